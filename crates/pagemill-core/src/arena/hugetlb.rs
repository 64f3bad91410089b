//! Reserved huge pages (hugetlb) under blocks of the pool zone.
//!
//! They belong to the administrator: not charged, not part of `resident`, and given back only to the reserve. The words
//! of their blocks stay *Empty*.
#![allow(unsafe_code)] // maps pages into a window and removes them

use super::Arena;
use crate::error::{Error, Result};
use crate::stats::{self, Counter};
use crate::units::BLOCK_BYTES;
use pagemill_sys::{hugetlb, mem};

/// Reserved pages that are not placed in the arena yet.
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
    /// Takes pages for `len_bytes`, whole blocks, from the free part of the reserve. They become resident later.
    ///
    /// # Errors
    ///
    /// [`Error::NoHugetlb`] if too few are free, [`Error::Unsupported`] if the kernel does not support them.
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
        // SAFETY: owned by this value only (type invariant).
        unsafe { mem::unreserve(self.addr, self.len_bytes) };
    }
}

impl Arena {
    /// Places reserved pages at as many blocks from `addr` on.
    ///
    /// # Errors
    ///
    /// [`Error::System`]: the addresses must not be used any more.
    ///
    /// # Safety
    ///
    /// The blocks belong to the caller. They were carved closed and never opened, or closed again by
    /// [`Arena::end_reserve`].
    pub unsafe fn place_reserve(&self, reserve: Reserve, addr: usize, node: usize) -> Result<()> {
        let len_bytes = reserve.len_bytes;
        // SAFETY: a mapping known to this function only moves to blocks of the caller that have no memory.
        unsafe { hugetlb::place(reserve.addr, len_bytes, addr) }
            .map_err(Error::system("moving reserved huge pages into place"))?;
        // The pages are no longer at the old address.
        std::mem::forget(reserve);
        self.nodes.bind(addr, len_bytes, node);
        stats::add(Counter::CacheHugetlb, len_bytes as u64);
        Ok(())
    }

    /// Populates the reserved pages of blocks.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if the kernel refuses nevertheless: a control group's limit of hugetlb pages.
    pub fn bring_in_reserved(&self, first: usize, blocks: usize) -> Result<()> {
        mem::populate(self.block_addr(first), blocks * BLOCK_BYTES)
            .map_err(Error::system("bringing in reserved huge pages"))
    }

    /// Gives back all pages that [`Arena::place_reserve`] placed there.
    ///
    /// # Errors
    ///
    /// [`Error::System`]: the addresses must not be used any more.
    ///
    /// # Safety
    ///
    /// The blocks are exactly what was placed. Their contents are not needed, and the kernel transfers nothing there.
    pub unsafe fn end_reserve(&self, addr: usize, len_bytes: usize) -> Result<()> {
        stats::sub(Counter::CacheHugetlb, len_bytes as u64);
        // SAFETY: guaranteed by the caller.
        unsafe { hugetlb::give_back(addr, len_bytes) }.map_err(Error::system("giving reserved huge pages back"))?;
        Ok(())
    }
}
