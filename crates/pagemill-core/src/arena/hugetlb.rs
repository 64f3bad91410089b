//! Blocks of the pool zone that are backed by hugetlb pages, which the administrator reserved.
//!
//! Hugetlb pages are neither charged nor counted as resident, because the reserve took them from the system before.
//! They return only to the reserve. The state words of their blocks stay *Empty*.
#![allow(unsafe_code)] // maps pages into a window and removes them

use super::Arena;
use crate::error::{Error, Result};
use crate::stats::{self, Counter};
use crate::units::BLOCK_BYTES;
use pagemill_sys::{hugetlb, mem};

/// Hugetlb pages that were taken from the administrator's reserve and are not part of the arena yet. Dropping the value
/// returns the pages to the reserve.
///
/// # Invariants
///
/// `addr..addr + len_bytes` is a mapping made by `hugetlb::map` and known to this value only.
///
/// Example: [`Arena`].
pub struct Reserve {
    addr: usize,
    len_bytes: usize,
}

impl Reserve {
    /// Takes hugetlb pages for `len_bytes` (whole blocks) from the free part of the reserve. The pages become resident
    /// in [`Arena::populate_reserved`].
    ///
    /// # Errors
    ///
    /// [`Error::NoHugetlb`] if too few hugetlb pages are free, [`Error::Unsupported`] if the kernel does not support
    /// them.
    pub fn take(len_bytes: usize) -> Result<Self> {
        assert!(len_bytes.is_multiple_of(BLOCK_BYTES), "hugetlb pages are whole blocks");
        match hugetlb::map(len_bytes, BLOCK_BYTES) {
            Ok(addr) => Ok(Self { addr, len_bytes }),
            Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => {
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
        // SAFETY: only this value knows the mapping (type invariant).
        unsafe { mem::unreserve(self.addr, self.len_bytes) };
    }
}

impl Arena {
    /// Moves the hugetlb pages of `reserve` to the blocks that start at `addr`.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if the kernel refuses. After that error the caller must not use the addresses any more.
    ///
    /// # Safety
    ///
    /// The caller owns the blocks, which are inaccessible: they were carved closed and never opened, or
    /// [`Arena::return_hugetlb`] has closed them again.
    pub unsafe fn place_hugetlb(&self, reserve: Reserve, addr: usize, node: usize) -> Result<()> {
        let len_bytes = reserve.len_bytes;
        assert!(addr.is_multiple_of(BLOCK_BYTES) && self.pool.contains(addr), "the target is in the pool zone");
        assert!(addr + len_bytes <= self.pool.base() + self.pool.carved_bytes(), "the target was carved");
        // SAFETY: only this function knows the source mapping, and the target blocks of the caller have no memory.
        unsafe { hugetlb::place(reserve.addr, len_bytes, addr) }
            .map_err(Error::system("moving reserved huge pages into place"))?;
        // The mapping at the old address is gone, so the destructor must not unmap it.
        std::mem::forget(reserve);
        self.nodes.bind(addr, len_bytes, node);
        stats::add(Counter::CacheHugetlb, len_bytes as u64);
        Ok(())
    }

    /// Makes the hugetlb pages of `blocks` blocks from block `first` on resident.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if the kernel refuses, for example because of a control group's limit of hugetlb pages.
    pub fn populate_reserved(&self, first: usize, blocks: usize) -> Result<()> {
        mem::populate(self.block_addr(first), blocks * BLOCK_BYTES)
            .map_err(Error::system("bringing in reserved huge pages"))
    }

    /// Returns all hugetlb pages that one call of [`Arena::place_hugetlb`] placed at `addr`.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if the kernel refuses. After that error the caller must not use the addresses any more.
    ///
    /// # Safety
    ///
    /// The blocks are exactly those of that call. Their contents are not needed, and no I/O to or from them is in
    /// flight.
    pub unsafe fn return_hugetlb(&self, addr: usize, len_bytes: usize) -> Result<()> {
        assert!((addr | len_bytes).is_multiple_of(BLOCK_BYTES) && self.pool.contains(addr));
        stats::sub(Counter::CacheHugetlb, len_bytes as u64);
        // SAFETY: guaranteed by the caller.
        unsafe { hugetlb::give_back(addr, len_bytes) }.map_err(Error::system("giving reserved huge pages back"))
    }
}
