//! A descriptor for requests to the memory of this process (userfaultfd). Handles only faults of user code, which needs
//! no privilege.
#![allow(unsafe_code)] // userfaultfd, ioctl

use crate::file::Fd;
use crate::result::check_result;
use rustix::mm::{UserfaultfdFlags, userfaultfd};
use std::io;

/// A userfaultfd. Dropping the value closes it, which also unregisters its ranges.
pub(crate) struct Userfault {
    fd: Fd,
    /// Features that the kernel offers, one bit each.
    pub features: u64,
}

impl Userfault {
    /// Opens a userfaultfd that offers the features in `wanted`.
    ///
    /// # Errors
    ///
    /// `ENOSYS` or `EPERM` if userfaultfd is unavailable; `EINVAL` if the kernel lacks a feature in `wanted`.
    pub fn open(wanted: u64) -> io::Result<Self> {
        const API: u64 = 0xAA;
        const UFFDIO_API: libc::c_ulong = 0xC018_AA3F;
        /// Flag for faults of user code only. rustix has no name for the flag.
        const USER_MODE_ONLY: UserfaultfdFlags = UserfaultfdFlags::from_bits_retain(1);
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK | USER_MODE_ONLY;
        // SAFETY: the call only creates a descriptor.
        let mut opened = Self { fd: unsafe { userfaultfd(flags) }?.into(), features: 0 };
        let mut handshake = [API, wanted, 0];
        opened.ioctl(UFFDIO_API, &mut handshake)?;
        opened.features = handshake[1];
        Ok(opened)
    }

    /// Registers the `len` bytes from `start` on for requests of a kind, `mode`.
    pub fn register(&self, start: u64, len: u64, mode: u64) -> io::Result<()> {
        const UFFDIO_REGISTER: libc::c_ulong = 0xC020_AA00;
        self.ioctl(UFFDIO_REGISTER, &mut [start, len, mode, 0])
    }

    /// Makes an ioctl request with `words` as its argument.
    pub fn ioctl<const N: usize>(&self, request: libc::c_ulong, words: &mut [u64; N]) -> io::Result<()> {
        // The number of an ioctl request contains the size of its argument.
        assert_eq!(size_of_val(words), (request >> 16 & 0x3FFF) as usize);
        // SAFETY: the call reads and writes `words`. The callers own the memory in the ranges that these contain.
        check_result(unsafe { libc::ioctl(self.fd.descriptor_number(), request as _, words.as_mut_ptr()) })
    }
}
