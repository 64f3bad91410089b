//! Blocks of the pool zone that are backed by a memory file, so that other addresses can map the same memory.
//!
//! They are charged, counted and returned as private blocks are. The kernel counts their memory as shared (`RssShmem`).
#![allow(unsafe_code)] // maps a file into a window, gives its memory back

use super::backing::Memory;
use super::block::Backing;
use super::{Arena, Context};
use crate::error::{Error, Result};
use crate::units::BLOCK_BYTES;
use pagemill_sys::memory_file::{self, MemoryFile};
use pagemill_sys::{disk, mem};

impl Arena {
    /// Maps all of `file` at the blocks that start at `addr`. Fork children do not inherit the blocks, because they
    /// would share them. No memory becomes resident.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if the kernel refuses. After that error the caller must not use the addresses any more.
    ///
    /// # Safety
    ///
    /// The caller owns the blocks, which were carved closed and never opened.
    pub unsafe fn map_shared(&self, file: &MemoryFile, addr: usize, node: usize) -> Result<()> {
        let len_bytes = file.len_bytes();
        assert!((addr | len_bytes).is_multiple_of(BLOCK_BYTES) && self.pool.contains(addr), "blocks of the pool zone");
        assert!(addr + len_bytes <= self.pool.base() + self.pool.carved_bytes(), "the target was carved");
        // SAFETY: the target blocks belong to the caller and have no memory.
        let mapped = unsafe { file.map(0, len_bytes, addr) };
        mapped
            .and_then(|()| disk::keep_from_children(addr, len_bytes, true))
            .map_err(Error::system("mapping shared memory"))?;
        if !self.use_huge {
            // The advice for the whole arena ended with the mapping that was replaced.
            mem::forbid_huge(addr, len_bytes);
        }
        self.nodes.bind(addr, len_bytes, node);
        Ok(())
    }

    /// As [`Arena::populate_blocks`], for blocks that [`Arena::map_shared`] has mapped.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`] if the blocks do not fit below the limit, or if the kernel has no memory for them. After an
    /// error all blocks are empty.
    ///
    /// # Safety
    ///
    /// As [`Arena::populate_blocks`].
    pub unsafe fn populate_shared(&self, first: usize, blocks: usize, is_huge_wanted: bool) -> Result<usize> {
        self.budget.admit((blocks * BLOCK_BYTES) as u64, Context::Outside)?;
        // SAFETY: guaranteed by the caller.
        unsafe { self.populate_charged_blocks(first, blocks, is_huge_wanted, Memory::Shared) }
    }

    /// As [`Arena::populate_blocks_ahead`], for blocks that [`Arena::map_shared`] has mapped.
    ///
    /// # Safety
    ///
    /// As [`Arena::populate_blocks`].
    pub unsafe fn populate_shared_ahead(&self, first: usize, blocks: usize, is_huge_wanted: bool) -> bool {
        // SAFETY: guaranteed by the caller.
        unsafe { self.populate_ahead(first, blocks, is_huge_wanted, Memory::Shared) }
    }

    /// As [`Arena::discard`], for blocks that [`Arena::map_shared`] has mapped. Other mappings of these blocks read zero
    /// afterwards.
    ///
    /// # Safety
    ///
    /// As [`Arena::discard`], for all mappings of the blocks.
    pub unsafe fn discard_shared(&self, first: usize, blocks: usize) -> u64 {
        // SAFETY: guaranteed by the caller.
        unsafe { self.discard_of(first, blocks, Memory::Shared) }
    }

    /// Frees the memory of a shared block that should have none. A read of returned shared memory allocates a page,
    /// unlike one of private memory.
    pub fn punch_if_empty(&self, block: usize) {
        let locked = self.state_word(block).lock(&self.generation);
        if locked.state.backing == Backing::Empty {
            // SAFETY: an empty block has no contents. Under its lock no thread makes it resident.
            let _ = unsafe { memory_file::punch(self.block_addr(block), BLOCK_BYTES) };
        }
    }
}
