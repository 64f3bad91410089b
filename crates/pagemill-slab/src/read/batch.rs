//! The retire list of emptied slabs: the memory of a moved object keeps its old bytes until no reader can use them.
//!
//! Each step of defragmentation creates one batch with one grace period ([`Grace`]) for all slabs that it emptied.
//! These slabs stay claimed until the grace period is over, so no object is allocated from them.

use crate::alloc::engine::Engine;
use crate::alloc::meta::{Objects, SlabState};
use crate::alloc::node::Keep;
use crate::read::epochs::{self, Epoch};
use pagemill_core::epoch;
use pagemill_core::error::Result;
use pagemill_core::sync::{Acquire, Backoff, Release};
use std::collections::VecDeque;
use std::collections::vec_deque::Drain;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Maximum time that calls that return memory wait for readers.
pub(crate) const GRACE_NS: u64 = 1_000_000_000;

/// An action that is executed after the grace period.
pub(crate) enum Deferred {
    /// Frees the objects that were moved away, and opens their slab, which is claimed.
    Slab { node: usize, block: u32, slab: u32, objects: Objects },
    /// Ends the emptying of a block. Executed after the actions for the slabs of the block.
    Block { node: usize, block: u32 },
}

/// Calls `have_finished` repeatedly until it returns true, and advances the epoch between calls. Gives up after
/// `timeout_ns`. Returns the last result of `have_finished`.
pub(crate) fn wait_for_readers(timeout_ns: u64, mut have_finished: impl FnMut() -> bool) -> bool {
    let mut backoff = Backoff::new();
    loop {
        if have_finished() {
            return true;
        }
        if backoff.waited_ns() > timeout_ns {
            return false;
        }
        // A flush advances the epoch if no participant is behind.
        epoch::flush(&epoch::pin());
        backoff.pause();
    }
}

/// The actions of one step of defragmentation, which wait for readers.
pub(crate) struct Batch {
    deferred: Vec<Deferred>,
    grace: Grace,
    /// Whether the end of this batch lets the current pass continue: it frees objects, or opens a slab that was emptied
    /// partly.
    unblocks_pass: bool,
}

/// A grace period. It is over when all readers that existed at its beginning have finished.
pub(crate) struct Grace {
    /// All readers under [`crate::enter`] with this epoch or an earlier one must have finished.
    handle_epoch: Epoch,
    /// Set to true when all readers under [`pagemill_core::epoch::pin`] have finished. `None`: the objects have no such
    /// readers.
    epoch: Option<Arc<AtomicBool>>,
}

impl Grace {
    /// Begins a grace period for readers of values by handle.
    pub fn of_handles() -> Self {
        Self { handle_epoch: epochs::grace_epoch(), epoch: None }
    }

    /// Begins a grace period for readers under either kind of guard.
    pub fn of_all() -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let grace = Self { epoch: Some(is_over.clone()), ..Self::of_handles() };
        let guard = epoch::pin();
        epoch::defer(&guard, move || is_over.store(true, Release));
        epoch::flush(&guard);
        grace
    }

    /// Returns whether the grace period is over. `oldest` is the oldest epoch of a current reader.
    fn is_over(&self, oldest: Epoch) -> bool {
        self.epoch.as_ref().is_none_or(|is_over| is_over.load(Acquire)) && oldest > self.handle_epoch
    }
}

/// Removes entries from the front for which `is_over` returns true, at most `most`. Entries are in order of arrival, so
/// the scan stops at the first that has to wait.
pub(crate) fn drain_finished<W>(
    waiting: &mut VecDeque<W>,
    most: usize,
    is_over: impl FnMut(&&W) -> bool,
) -> Drain<'_, W> {
    let count = waiting.iter().take(most).take_while(is_over).count();
    waiting.drain(..count)
}

impl Engine {
    /// Makes the deferred actions of a step one batch, and begins its grace period.
    pub fn retire(&self, deferred: Vec<Deferred>) {
        if deferred.is_empty() {
            return;
        }
        let unblocks_pass = deferred.iter().any(|deferred| match deferred {
            Deferred::Slab { block, slab, objects, .. } => {
                objects.count() > 0 || self.shared.blocks.slab(*block, *slab).tried.get() == 0
            }
            Deferred::Block { .. } => false,
        });
        let grace = (self.grace)();
        self.batches.with(|batches| batches.push_back(Batch { deferred, grace, unblocks_pass }));
    }

    /// Returns whether a waiting batch will let the current pass continue.
    pub fn awaits_unblocking_batch(&self) -> bool {
        self.batches.with(|batches| batches.iter().any(|batch| batch.unblocks_pass))
    }

    /// Executes the actions of all batches with a grace period that is over.
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

    /// Executes the actions of all batches without waiting. The caller guarantees that no thread reads the cache any
    /// more.
    pub fn finish_retired_at_once(&self) {
        let batches = self.batches.with(std::mem::take);
        batches.into_iter().flat_map(|batch| batch.deferred).for_each(|deferred| self.finish_deferred(deferred));
    }

    /// Executes one action, after its grace period.
    fn finish_deferred(&self, deferred: Deferred) {
        match deferred {
            Deferred::Slab { node, block, slab, objects } => {
                let base = self.shared.blocks.addr(block);
                let each = || objects.iter().map(|object| base + self.shape.offset_of(slab, object));
                each().for_each(|object| {
                    self.note_freed(object);
                    self.poison(object);
                });
                self.with_node(node, |node| {
                    node.free_all(block, slab, &objects);
                    if node.blocks.slab(block, slab).state() == SlabState::Claimed {
                        node.open(block, slab);
                    }
                });
            }
            Deferred::Block { node, block } => self.with_node(node, |node| node.end_emptying(block)),
        }
    }

    /// As [`Engine::finish_retired`], for periodic callers: also advances the epoch and frees empty slabs and blocks.
    /// Returns whether batches still wait.
    pub fn finish_retired_in_background(&self) -> bool {
        if self.has_batches() {
            epoch::flush(&epoch::pin());
            self.finish_retired();
            self.trim_all(Keep::Reserve);
        }
        self.has_batches()
    }

    /// Number of moved objects whose old memory is not free yet.
    pub fn objects_in_batches(&self) -> u64 {
        let objects = |deferred: &Deferred| match deferred {
            Deferred::Slab { objects, .. } => u64::from(objects.count()),
            Deferred::Block { .. } => 0,
        };
        self.batches.with(|batches| batches.iter().flat_map(|batch| &batch.deferred).map(objects).sum())
    }

    /// Returns whether any batch waits for readers.
    pub fn has_batches(&self) -> bool {
        self.batches.with(|batches| !batches.is_empty())
    }

    /// Waits until all batches are finished, at most one second. Returns whether all are finished.
    pub fn finish_all_retired(&self) -> Result<bool> {
        self.check_generation()?;
        Ok(self.finish_retired_within(GRACE_NS))
    }

    /// As [`Engine::finish_all_retired`], for `timeout_ns` at most. The cache must belong to this process.
    pub fn finish_retired_within(&self, timeout_ns: u64) -> bool {
        wait_for_readers(timeout_ns, || {
            self.finish_retired();
            !self.has_batches()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scans 1,000 waiting entries. A scan must visit only the entries that it removes and the first that has to wait.
    #[test]
    fn scan_stops_at_first_entry_that_waits() {
        let mut waiting: VecDeque<u32> = (0..1000).collect();
        let mut visited = 0;
        let mut take = |until, most| {
            drain_finished(&mut waiting, most, |at| {
                visited += 1;
                **at < until
            })
            .collect::<Vec<_>>()
        };
        assert_eq!((take(0, usize::MAX), take(3, usize::MAX), take(9, 2)), (vec![], vec![0, 1, 2], vec![3, 4]));
        assert_eq!((visited, waiting.len()), (1 + 4 + 2, 995));
    }
}
