//! Supply of slabs: populates and sets up slabs when a node has no free object, and frees the memory of empty ones.
//!
//! Memory is requested and constructors run without locks. The slab is claimed meanwhile.
#![allow(unsafe_code)] // frees the memory of claimed slabs

use super::engine::Engine;
use super::node::Keep;
use super::poison;
use pagemill_core::arena::Filling;
use pagemill_core::error::Result;
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::Relaxed;
use pagemill_core::units::BLOCK_BYTES;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

impl Engine {
    /// Sets up one more slab of a node.
    pub fn grow(&self, node: usize) -> Result<()> {
        let claimed = self.on(node, |node| node.claim_bare());
        let (block, slab) = match claimed {
            Some(claimed) => claimed,
            None => {
                let has_filled = self.has_filled[node].load(Relaxed);
                let block = self.shared.blocks.take(node, if has_filled { Filling::Soon } else { Filling::Unknown })?;
                self.on(node, |node| {
                    node.add_block(block);
                    node.claim_bare().expect("a block that is new has slabs to set up")
                })
            }
        };
        self.set_up_slab(node, block, slab)
    }

    /// Sets up one more slab in a block that has memory and at least `least` objects in use. Returns whether there was
    /// one.
    pub fn grow_in_use(&self, node: usize, least: u32) -> bool {
        let claimed = self.on(node, |node| node.claim_bare_in_use(least));
        claimed.is_some_and(|(block, slab)| self.set_up_slab(node, block, slab).is_ok())
    }

    fn set_up_slab(&self, node: usize, block: u32, slab: u32) -> Result<()> {
        let blocks = &self.shared.blocks;
        let at = self.shape.offset_of(slab, 0);
        if blocks.block(block).is_sparse.get() == 1
            && let Err(error) = blocks.bring_in(block, at, self.shape.slab_bytes)
        {
            self.on(node, |node| node.strip(block, slab));
            self.trim(node, Keep::Some);
            return Err(error);
        }
        self.construct(node, block, slab);
        if slab + 1 == self.shape.slabs {
            self.has_filled[node].store(true, Relaxed);
        }
        self.on(node, |node| node.open(block, slab));
        Ok(())
    }

    /// Initializes the objects of a claimed slab. After a panic the slab is lost, and the panic resumes.
    fn construct(&self, node: usize, block: u32, slab: u32) {
        let base = self.shared.blocks.addr(block);
        let objects = || (0..self.shape.capacity).map(|object| base + self.shape.offset_of(slab, object));
        poison::open(base + self.shape.offset_of(slab, 0), self.shape.slab_bytes);
        if let Some(set_up) = &self.set_up
            && let Err(panic) = catch_unwind(AssertUnwindSafe(|| objects().for_each(set_up)))
        {
            self.lose(node, block, slab);
            resume_unwind(panic);
        }
        if let Some(checks) = &self.checks {
            objects().for_each(|object| checks.note_new(object));
        }
        objects().for_each(|object| self.close_free(object));
    }

    /// Makes a claimed slab unusable for good.
    pub fn lose(&self, node: usize, block: u32, slab: u32) {
        stats::add(Counter::SlabLost, 1);
        self.on(node, |node| node.lose(block, slab));
    }

    /// Frees idle blocks of a node, and the memory of empty slabs in sparse blocks, except for what is kept. Returns the
    /// bytes that went to the system; free whole blocks keep their memory.
    pub fn trim(&self, node: usize, keep: Keep) -> u64 {
        let (blocks, mut freed) = (&self.shared.blocks, 0);
        while let Some((block, slab)) = self.on(node, |node| node.claim_empty(keep)) {
            let at = self.shape.offset_of(slab, 0);
            // SAFETY: a claimed slab without an allocated object: no reference to its contents exists.
            let bytes = unsafe { blocks.discard(block, at, self.shape.slab_bytes) };
            if bytes.is_some() && blocks.is_charged() {
                poison::close(blocks.addr(block) + at, self.shape.slab_bytes);
            }
            self.on(node, |node| match bytes {
                Some(_) => node.strip(block, slab),
                None => node.open(block, slab),
            });
            let Some(bytes) = bytes else { break };
            freed += bytes;
        }
        while let Some(block) = self.on(node, |node| node.remove_idle(keep)) {
            if blocks.is_charged() {
                poison::close(blocks.addr(block), BLOCK_BYTES);
            }
            freed += blocks.give(block);
            if blocks.giveable_bytes() > 0 {
                // The block is in no cache and keeps its memory: the background thread frees it if it stays unused.
                self.shared.slabs.worker.notify();
            }
        }
        freed
    }

    pub fn trim_all(&self, keep: Keep) {
        (0..self.node_count()).for_each(|node| _ = self.trim(node, keep));
    }

    /// Frees all memory that holds no object. Returns by how many bytes the charge of the cache's blocks fell.
    ///
    /// # Errors
    ///
    /// As [`Engine::drain_magazines`].
    pub fn shrink(&self) -> Result<u64> {
        self.check()?;
        let before = self.resident_bytes();
        self.give_rest(before)?;
        Ok(before.saturating_sub(self.resident_bytes()))
    }

    /// Frees all memory that holds no object. Returns as much to the system as the charge of the cache fell below
    /// `before`.
    ///
    /// # Errors
    ///
    /// As [`Engine::drain_magazines`].
    pub fn give_rest(&self, before: u64) -> Result<()> {
        drop(self.drain_magazines()?);
        self.trim_all(Keep::Nothing);
        self.shared.blocks.shrink(before.saturating_sub(self.resident_bytes()));
        Ok(())
    }

    /// Whether a block that may stay partly unused gets small pages.
    pub fn comes_sparse(&self) -> bool {
        !self.shared.blocks.arena.may_take_huge(Filling::Unknown)
    }

    /// The next block of a node will not be filled soon.
    pub fn reserve_little(&self, node: usize) {
        self.has_filled[node].store(false, Relaxed);
    }
}
