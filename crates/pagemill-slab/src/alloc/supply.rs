//! Supply of slabs: populates and sets up slabs when a node has no free object, and frees the memory of empty slabs.
//!
//! Memory is requested, and constructors run, without a lock. The slab is claimed until the constructors have run.
#![allow(unsafe_code)] // frees the memory of claimed slabs

use crate::alloc::engine::Engine;
use crate::alloc::meta::SlabState;
use crate::alloc::node::Keep;
use crate::alloc::poison;
use pagemill_core::arena::ExpectedUse;
use pagemill_core::error::Result;
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::Relaxed;
use pagemill_core::units::BLOCK_BYTES;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

impl Engine {
    /// Sets up one more slab on a NUMA node. Allocates a block if no block has a bare slab.
    pub fn add_slab(&self, node: usize) -> Result<()> {
        let claimed = self.with_node(node, |node| node.claim_bare());
        let (block, slab) = match claimed {
            Some(claimed) => claimed,
            None => {
                let has_filled_block = self.has_filled_block[node].load(Relaxed);
                let filling = if has_filled_block { ExpectedUse::Full } else { ExpectedUse::Unknown };
                let block = self.shared.blocks.allocate(node, filling)?;
                self.with_node(node, |node| {
                    node.add_block(block);
                    node.claim_bare().expect("a block that is new has slabs to set up")
                })
            }
        };
        self.set_up_slab(node, block, slab)
    }

    /// Sets up one more slab in a whole block with at least `least` objects in use, where a bare slab has memory
    /// already. Returns false if no such block has a bare slab.
    pub fn add_slab_in_used_block(&self, node: usize, least: u32) -> bool {
        let claimed = self.with_node(node, |node| node.claim_bare_in_used_block(least));
        claimed.is_some_and(|(block, slab)| self.set_up_slab(node, block, slab).is_ok())
    }

    /// Populates and sets up a claimed slab, then opens it for allocations. If no memory is available, the slab becomes
    /// bare again.
    fn set_up_slab(&self, node: usize, block: u32, slab: u32) -> Result<()> {
        let blocks = &self.shared.blocks;
        debug_assert!(blocks.slab(block, slab).state() == SlabState::Claimed, "this thread sets the slab up");
        let at = self.shape.offset_of(slab, 0);
        if blocks.block(block).is_sparse.get() == 1
            && let Err(error) = blocks.populate_slab(block, at, self.shape.slab_bytes)
        {
            self.with_node(node, |node| node.mark_bare(block, slab));
            self.trim(node, Keep::Reserve);
            return Err(error);
        }
        self.construct(node, block, slab);
        if slab + 1 == self.shape.slabs {
            self.has_filled_block[node].store(true, Relaxed);
        }
        self.with_node(node, |node| node.open(block, slab));
        Ok(())
    }

    /// Calls the constructor for each object of a claimed slab. If the constructor panics, the slab is lost and the
    /// panic resumes.
    fn construct(&self, node: usize, block: u32, slab: u32) {
        let base = self.shared.blocks.addr(block);
        let objects = || (0..self.shape.capacity).map(|object| base + self.shape.offset_of(slab, object));
        poison::unpoison(base + self.shape.offset_of(slab, 0), self.shape.slab_bytes);
        if let Some(constructor) = &self.object.constructor
            && let Err(panic) = catch_unwind(AssertUnwindSafe(|| objects().for_each(constructor)))
        {
            self.mark_slab_lost(node, block, slab);
            resume_unwind(panic);
        }
        if let Some(checks) = &self.checks {
            objects().for_each(|object| checks.note_new(object));
        }
        objects().for_each(|object| self.poison(object));
    }

    /// Marks a claimed slab as lost: no object is allocated from it again.
    pub fn mark_slab_lost(&self, node: usize, block: u32, slab: u32) {
        stats::add(Counter::SlabLost, 1);
        self.with_node(node, |node| node.mark_lost(block, slab));
    }

    /// Frees idle blocks of a node, and the memory of empty slabs in sparse blocks, except for what `keep` demands.
    /// Returns how many bytes were returned to the system. Whole blocks that become free are not included in that
    /// number, because they keep their memory.
    pub fn trim(&self, node: usize, keep: Keep) -> u64 {
        let (blocks, mut freed) = (&self.shared.blocks, 0);
        while let Some((block, slab)) = self.with_node(node, |node| node.claim_empty(keep)) {
            let at = self.shape.offset_of(slab, 0);
            // SAFETY: the slab is claimed and has no allocated object, so no reference to its contents exists.
            let bytes = unsafe { blocks.discard_slab(block, at, self.shape.slab_bytes) };
            if bytes.is_some() && blocks.is_charged {
                poison::poison(blocks.addr(block) + at, self.shape.slab_bytes);
            }
            self.with_node(node, |node| match bytes {
                Some(_) => node.mark_bare(block, slab),
                None => node.open(block, slab),
            });
            let Some(bytes) = bytes else { break };
            freed += bytes;
        }
        while let Some(block) = self.with_node(node, |node| node.remove_idle(keep)) {
            if blocks.is_charged {
                poison::poison(blocks.addr(block), BLOCK_BYTES);
            }
            freed += blocks.free(block);
            if blocks.giveable_bytes() > 0 {
                // A free block kept its memory. The background thread frees that memory if no cache uses the block
                // soon.
                self.shared.worker.notify();
            }
        }
        freed
    }

    /// As [`Engine::trim`], for all NUMA nodes.
    pub fn trim_all(&self, keep: Keep) {
        (0..self.node_count()).for_each(|node| _ = self.trim(node, keep));
    }

    /// Frees all memory of the cache that holds no object. Returns by how many bytes the memory charged for the cache
    /// fell.
    ///
    /// # Errors
    ///
    /// As [`Engine::drain_magazines`].
    pub fn shrink(&self) -> Result<u64> {
        self.check_generation()?;
        let before = self.resident_bytes();
        self.free_unused_memory(before)?;
        Ok(before.saturating_sub(self.resident_bytes()))
    }

    /// Frees all memory of the cache that holds no object. `before` is the number of bytes that were charged for the
    /// cache before the caller's operation. Then returns memory of free blocks to the system: as many bytes as the
    /// charged number fell below `before`.
    ///
    /// # Errors
    ///
    /// As [`Engine::drain_magazines`].
    pub fn free_unused_memory(&self, before: u64) -> Result<()> {
        drop(self.drain_magazines()?);
        self.trim_all(Keep::Nothing);
        self.shared.blocks.shrink(before.saturating_sub(self.resident_bytes()));
        Ok(())
    }

    /// Returns whether a new block will be sparse if it is not expected to be filled.
    pub fn new_blocks_are_sparse(&self) -> bool {
        !self.shared.blocks.arena.may_take_huge(ExpectedUse::Unknown)
    }
}
