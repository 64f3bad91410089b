//! Files as memory: mapped by the kernel, or viewed in a page cache. Records are copied in and out by the same code, so
//! that no Rust reference to a file's bytes exists.

#![allow(unsafe_code)] // mmap, and copies to and from what it mapped

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::{self, NonNull};

use pagemill_cache::mapping::{Mapping as Cached, View, ViewMut};
use pagemill_core::units::os_page_bytes;

use crate::pattern::RECORD_BYTES;

/// The access to a mapping: only reads, or also writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read,
    Write,
}

/// The order in which a mapping will be accessed ([`Mapping::advise`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The kernel's default.
    Unknown,
    Random,
    Sequential,
}

/// A shared mapping of a file's first bytes.
///
/// # Invariants
///
/// `start` is the first of `len_bytes` bytes of a shared file mapping, which `_owner` keeps. They are readable, and also
/// writable if `access` is `Write`. Nothing else in this process refers to them.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    len_bytes: usize,
    access: Access,
    _owner: Owner,
}

/// What keeps the memory of a mapping.
#[derive(Debug)]
#[expect(dead_code, reason = "the fields are only dropped")]
enum Owner {
    Kernel(KernelMapping),
    View(View),
    ViewMut(ViewMut),
}

impl Mapping {
    /// Lets the kernel map the first `len_bytes` bytes of a file, which must be at least that long.
    ///
    /// # Errors
    ///
    /// The error of the system call `mmap`.
    pub fn new(file: &File, len_bytes: usize, access: Access) -> io::Result<Self> {
        let protection = match access {
            Access::Read => libc::PROT_READ,
            Access::Write => libc::PROT_READ | libc::PROT_WRITE,
        };
        // SAFETY: the kernel chooses the address of the new mapping, so it replaces nothing.
        let start =
            unsafe { libc::mmap(ptr::null_mut(), len_bytes, protection, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        match NonNull::new(start.cast::<u8>()) {
            Some(start) if start.as_ptr().cast() != libc::MAP_FAILED => {
                let _owner = Owner::Kernel(KernelMapping { start, len_bytes });
                Ok(Self { start, len_bytes, access, _owner })
            }
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Tells the kernel by `madvise` how the mapping will be accessed.
    ///
    /// # Errors
    ///
    /// The error of the system call `madvise`.
    pub fn advise(&self, advice: Order) -> io::Result<()> {
        let advice = match advice {
            Order::Unknown => libc::MADV_NORMAL,
            Order::Random => libc::MADV_RANDOM,
            Order::Sequential => libc::MADV_SEQUENTIAL,
        };
        // SAFETY: the range is this mapping, and none of these advices changes its bytes.
        match unsafe { libc::madvise(self.start.as_ptr().cast(), self.len_bytes, advice) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Views the first `len_bytes` bytes of a cached file, which must be at least that long.
    ///
    /// # Errors
    ///
    /// The error of [`Cached::view`] or [`Cached::view_mut`].
    pub fn of_cached(file: &Cached, len_bytes: usize, access: Access) -> io::Result<Self> {
        let range = 0..len_bytes as u64;
        let (start, _owner) = match access {
            Access::Read => file.view(range).map(|view| (view.as_ptr().cast_mut(), Owner::View(view)))?,
            Access::Write => file.view_mut(range).map(|view| (view.as_mut_ptr(), Owner::ViewMut(view)))?,
        };
        let start = NonNull::new(start).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Self { start, len_bytes, access, _owner })
    }

    pub fn address(&self) -> usize {
        self.start.as_ptr() as usize
    }

    #[inline]
    pub fn read(&self, offset: usize, record: &mut [u8; RECORD_BYTES]) {
        assert!(offset + RECORD_BYTES <= self.len_bytes);
        // SAFETY:
        // 1. The record lies within the mapping (assertion above, type invariant), which is readable.
        // 2. `record` is an exclusive borrow, so the two ranges do not overlap.
        // 3. While a file is measured, only the thread that owns the file writes it.
        unsafe { ptr::copy_nonoverlapping(self.start.as_ptr().add(offset), record.as_mut_ptr(), RECORD_BYTES) };
    }

    #[inline]
    pub fn write(&self, offset: usize, record: &[u8; RECORD_BYTES]) {
        assert!(offset + RECORD_BYTES <= self.len_bytes && self.access == Access::Write);
        // SAFETY:
        // 1. The record lies within the mapping and is writable (assertion above, type invariant).
        // 2. Nothing refers to these bytes (type invariant), so the two ranges do not overlap.
        unsafe { ptr::copy_nonoverlapping(record.as_ptr(), self.start.as_ptr().add(offset), RECORD_BYTES) };
    }

    /// Reads one byte of each page, so that the kernel maps all pages.
    pub fn touch(&self) {
        for offset in (0..self.len_bytes).step_by(os_page_bytes()) {
            // SAFETY: `offset` lies within the mapping, which is readable (type invariant).
            unsafe { self.start.as_ptr().add(offset).read_volatile() };
        }
    }
}

/// A read-only file mapping that several threads read.
#[derive(Debug)]
pub struct SharedMapping(Mapping);

// SAFETY: the mapping is only read, and the file is not written while it is measured.
unsafe impl Sync for SharedMapping {}

impl SharedMapping {
    /// Maps the first `len_bytes` bytes of a file, and causes all page faults at once.
    ///
    /// # Errors
    ///
    /// The error of the system call `mmap`.
    pub fn new(file: &File, len_bytes: usize) -> io::Result<Self> {
        let mapping = Mapping::new(file, len_bytes, Access::Read)?;
        mapping.touch();
        Ok(Self(mapping))
    }

    /// Maps the first `len_bytes` bytes of a file, of which no page is mapped yet, and calls `madvise`.
    ///
    /// # Errors
    ///
    /// The error of the system calls `mmap` and `madvise`.
    pub fn untouched(file: &File, len_bytes: usize, advice: Order) -> io::Result<Self> {
        let mapping = Mapping::new(file, len_bytes, Access::Read)?;
        mapping.advise(advice)?;
        Ok(Self(mapping))
    }

    #[inline]
    pub fn read(&self, offset: usize, record: &mut [u8; RECORD_BYTES]) {
        self.0.read(offset, record);
    }
}

/// Memory that the kernel has mapped.
///
/// # Invariants
///
/// `start` is the first of `len_bytes` bytes of a mapping that no other value unmaps.
#[derive(Debug)]
struct KernelMapping {
    start: NonNull<u8>,
    len_bytes: usize,
}

impl Drop for KernelMapping {
    fn drop(&mut self) {
        // SAFETY: only the `Mapping` that is being dropped refers to the memory (type invariants).
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len_bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::AssertUnwindSafe;

    /// Bytes that were written through one mapping must be read through another. A read beyond the end must panic.
    #[test]
    fn records_are_copied_through_a_mapping() {
        let file = tempfile::tempfile().expect("a temporary file");
        file.set_len(3 * RECORD_BYTES as u64).expect("it grows");
        let [writer, reader] = [Access::Write, Access::Read]
            .map(|access| Mapping::new(&file, 3 * RECORD_BYTES, access).expect("it is mapped"));
        let mut record = [0; RECORD_BYTES];

        writer.write(RECORD_BYTES, &[7; RECORD_BYTES]);
        reader.touch();
        reader.read(RECORD_BYTES, &mut record);

        assert_eq!(record, [7; RECORD_BYTES]);
        let read_beyond = AssertUnwindSafe(|| reader.read(2 * RECORD_BYTES + 1, &mut [0; RECORD_BYTES]));
        assert!(std::panic::catch_unwind(read_beyond).is_err());
    }
}
