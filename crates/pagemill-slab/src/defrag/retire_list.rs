//! The retire list of emptied slabs. It delays the reuse of moved objects' old memory until no reader can use that
//! memory.
//!
//! The emptied slabs of one step form a batch. They stay claimed until the grace period of the batch is over, so no
//! object is allocated from them.

use crate::alloc::engine::Engine;
use crate::alloc::meta::SlabState;
use crate::alloc::node::Keep;
use crate::cache::SlabKind;
use crate::read::batch::{Batch, DeferredAction, GRACE_TIMEOUT_NS, Grace, drain_finished, wait_for_readers};
use crate::read::epochs;
use pagemill_core::epoch;
use pagemill_core::error::Result;

impl Engine {
    /// Makes the deferred actions of one step of defragmentation a batch, and begins the batch's grace period.
    pub fn retire(&self, deferred: Vec<DeferredAction>) {
        if deferred.is_empty() {
            return;
        }
        let unblocks_pass = deferred.iter().any(|deferred| match deferred {
            DeferredAction::Slab { block, slab, objects, .. } => {
                objects.count() > 0 || self.shared.blocks.slab(*block, *slab).tried.get() == 0
            }
            DeferredAction::Block { .. } => false,
        });
        let grace = if self.object.kind == SlabKind::ByHandle { Grace::of_handles() } else { Grace::of_all() };
        self.batches.with(|batches| batches.push_back(Batch { deferred, grace, unblocks_pass }));
    }

    /// Returns whether the current pass can continue once one of the waiting batches is finished.
    pub fn awaits_unblocking_batch(&self) -> bool {
        self.batches.with(|batches| batches.iter().any(|batch| batch.unblocks_pass))
    }

    /// Executes the deferred actions of all batches whose grace period is over.
    pub fn finish_retired(&self) {
        if !self.has_batches() {
            return;
        }
        let oldest = epochs::oldest_pinned();
        let finished: Vec<Batch> = self
            .batches
            .with(|batches| drain_finished(batches, usize::MAX, |batch| batch.grace.is_over(oldest)).collect());
        finished.into_iter().flat_map(|batch| batch.deferred).for_each(|deferred| self.finish_deferred(deferred));
    }

    /// Executes the deferred actions of all batches without waiting for readers. The caller guarantees that no thread
    /// reads objects of the cache any more.
    pub fn finish_retired_at_once(&self) {
        let batches = self.batches.with(std::mem::take);
        batches.into_iter().flat_map(|batch| batch.deferred).for_each(|deferred| self.finish_deferred(deferred));
    }

    /// Executes one deferred action, after its grace period.
    fn finish_deferred(&self, deferred: DeferredAction) {
        match deferred {
            DeferredAction::Slab { node, block, slab, objects } => {
                let base = self.shared.blocks.addr(block);
                let each = || objects.iter().map(|object| base + self.shape.offset_of(slab, object));
                each().for_each(|object| {
                    self.note_freed(object);
                    self.poison(object);
                });
                self.with_node(node, |node| {
                    let state = node.blocks.slab(block, slab).state();
                    debug_assert!(state != SlabState::Open, "the objects belong to a claimed slab");
                    node.free_all(block, slab, &objects);
                    if node.blocks.slab(block, slab).state() == SlabState::Claimed {
                        node.open(block, slab);
                    }
                });
            }
            DeferredAction::Block { node, block } => self.with_node(node, |node| node.end_emptying(block)),
        }
    }

    /// As [`Engine::finish_retired`], for periodic callers: also advances the epoch and frees empty slabs and blocks.
    /// Returns whether batches still wait for readers.
    pub fn finish_retired_in_background(&self) -> bool {
        if self.has_batches() {
            epoch::flush(&epoch::pin());
            self.finish_retired();
            self.trim_all(Keep::Reserve);
        }
        self.has_batches()
    }

    /// Returns the number of moved objects whose old memory is not free yet.
    pub fn objects_in_batches(&self) -> u64 {
        let objects = |deferred: &DeferredAction| match deferred {
            DeferredAction::Slab { objects, .. } => u64::from(objects.count()),
            DeferredAction::Block { .. } => 0,
        };
        self.batches.with(|batches| batches.iter().flat_map(|batch| &batch.deferred).map(objects).sum())
    }

    /// Returns whether any batch waits for readers.
    pub fn has_batches(&self) -> bool {
        self.batches.with(|batches| !batches.is_empty())
    }

    /// Waits at most one second until the deferred actions of all batches are executed. Returns whether they were.
    pub fn finish_all_retired(&self) -> Result<bool> {
        self.check_generation()?;
        Ok(self.finish_retired_within(GRACE_TIMEOUT_NS))
    }

    /// As [`Engine::finish_all_retired`], but waits at most `timeout_ns` nanoseconds. The cache must belong to this
    /// process.
    pub fn finish_retired_within(&self, timeout_ns: u64) -> bool {
        wait_for_readers(timeout_ns, || {
            self.finish_retired();
            !self.has_batches()
        })
    }
}
