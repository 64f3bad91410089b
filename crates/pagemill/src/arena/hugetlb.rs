//! Reserved huge pages (hugetlb) under blocks of the pool zone.
//!
//! They are the administrator's: not charged, no part of `resident`, and given back to nobody but the reserve. To the words of their
//! blocks they are nothing: those stay *Empty*.
#![allow(unsafe_code)] // puts pages under a window, takes them away

use super::Arena;
use crate::error::{Error, Result};
use crate::stats::{self, Counter};
use crate::units::BLOCK_BYTES;
use pagemill_sys::{hugetlb, mem};

/// Reserved pages that lie nowhere in particular yet.
///
/// # Invariants
///
/// `addr..addr + len_bytes` is a mapping by `hugetlb::map` that nobody else knows of.
pub(crate) struct Reserve {
    addr: usize,
    len_bytes: usize,
}

impl Reserve {
    /// Takes pages for so many bytes, whole blocks, out of what is free in the reserve. They come in later.
    ///
    /// # Errors
    ///
    /// [`Error::NoHugetlb`] where not so many are free, [`Error::Unsupported`] where the kernel has none such.
    pub fn take(len_bytes: usize) -> Result<Self> {
        const ENOMEM: i32 = 12;
        match hugetlb::map(len_bytes, BLOCK_BYTES) {
            Ok(addr) => Ok(Self { addr, len_bytes }),
            Err(error) if error.raw_os_error() == Some(ENOMEM) => {
                Err(Error::NoHugetlb { wanted_bytes: len_bytes as u64 })
            }
            Err(_) => {
                Err(Error::Unsupported { what: "this kernel has no reserved huge pages of 2 MiB that can be moved" })
            }
        }
    }

    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }
}

impl Drop for Reserve {
    fn drop(&mut self) {
        // SAFETY: ours alone (type invariant).
        unsafe { mem::unreserve(self.addr, self.len_bytes) };
    }
}

impl Arena {
    /// Puts reserved pages under as many blocks from `addr` on.
    ///
    /// # Errors
    ///
    /// [`Error::System`]: the addresses must not be used any more.
    ///
    /// # Safety
    ///
    /// The blocks are the caller's, carved closed and never opened, or closed again by [`Arena::end_reserve`].
    pub(crate) unsafe fn place_reserve(&self, reserve: Reserve, addr: usize, node: usize) -> Result<()> {
        let len_bytes = reserve.len_bytes;
        // SAFETY: a mapping that nobody knows of goes to blocks of the caller, behind which nothing is.
        unsafe { hugetlb::place(reserve.addr, len_bytes, addr) }
            .map_err(Error::system("moving reserved huge pages into place"))?;
        // They are not there any more.
        std::mem::forget(reserve);
        self.nodes.bind(addr, len_bytes, node);
        stats::add(Counter::CacheHugetlb, len_bytes as u64);
        Ok(())
    }

    /// Brings the reserved pages of blocks in.
    ///
    /// # Errors
    ///
    /// [`Error::System`] where the kernel has none after all: a control group's limit of them.
    pub(crate) fn bring_in_reserved(&self, first: usize, blocks: usize) -> Result<()> {
        mem::populate(self.block_addr(first), blocks * BLOCK_BYTES)
            .map_err(Error::system("bringing in reserved huge pages"))
    }

    /// Gives all pages back that [`Arena::place_reserve`] put there.
    ///
    /// # Errors
    ///
    /// [`Error::System`]: the addresses must not be used any more.
    ///
    /// # Safety
    ///
    /// These blocks are whole what was placed; nobody needs what is in them, and the kernel transfers nothing there.
    pub(crate) unsafe fn end_reserve(&self, addr: usize, len_bytes: usize) -> Result<()> {
        stats::sub(Counter::CacheHugetlb, len_bytes as u64);
        // SAFETY: the caller's promise.
        unsafe { hugetlb::give_back(addr, len_bytes) }.map_err(Error::system("giving reserved huge pages back"))?;
        Ok(())
    }
}
