//! The retire list of emptied slabs: moved objects keep their old bytes until no reader can use them.
//!
//! Each step of defragmentation makes one batch with one grace period ([`Grace`]), however many slabs it emptied. Until
//! the grace period is over, its slabs stay claimed: no object is allocated from them.

use super::engine::Engine;
use super::epochs::{self, Epoch};
use super::meta::{Objects, SlabState};
use super::node::Keep;
use pagemill_core::epoch;
use pagemill_core::error::Result;
use pagemill_core::sync::{Acquire, Backoff, Release};
use std::collections::VecDeque;
use std::collections::vec_deque::Drain;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Calls that return memory wait for readers up to this long.
pub(super) const GRACE_NS: u64 = 1_000_000_000;

/// A deferred action: what to finish after the grace period.
pub(super) enum Deferred {
    /// Objects that were moved away, and their slab, which is claimed.
    Slab { node: usize, block: u32, slab: u32, objects: Objects },
    /// A block that was being emptied; comes after its slabs.
    Block { node: usize, block: u32 },
}

/// Polls `have_gone` until readers have finished, advancing the epoch between polls, for `most_ns` at most. Returns
/// whether they have finished.
pub(super) fn wait_for_readers(most_ns: u64, mut have_gone: impl FnMut() -> bool) -> bool {
    let mut backoff = Backoff::new();
    loop {
        if have_gone() {
            return true;
        }
        if backoff.waited_ns() > most_ns {
            return false;
        }
        // Each flush advances the epoch if no participant lags behind.
        epoch::pin().flush();
        backoff.pause();
    }
}

pub(super) struct Batch {
    deferred: Vec<Deferred>,
    grace: Grace,
    /// When the batch is done there is more room than before, or a slab to continue with.
    is_news: bool,
}

/// A grace period: over when all readers of its beginning have finished.
pub(super) struct Grace {
    /// For readers under [`super::pin`].
    handle_epoch: Epoch,
    /// For readers under [`pagemill_core::epoch::pin`]: true once they have finished.
    epoch: Option<Arc<AtomicBool>>,
}

impl Grace {
    /// Begins a grace period for readers of values by handle.
    pub fn of_handles() -> Self {
        Self { handle_epoch: epochs::wait_until(), epoch: None }
    }

    /// Begins a grace period for readers under either kind of guard.
    pub fn of_all() -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let grace = Self { epoch: Some(is_over.clone()), ..Self::of_handles() };
        let guard = epoch::pin();
        guard.defer(move || is_over.store(true, Release));
        guard.flush();
        grace
    }

    /// Whether no reader can use the objects any more. `oldest` is the oldest epoch of a reader.
    fn is_over(&self, oldest: Epoch) -> bool {
        self.epoch.as_ref().is_none_or(|is_over| is_over.load(Acquire)) && oldest > self.handle_epoch
    }
}

/// Removes entries from the front while they are over, `most` at most. Entries are in order of arrival, so the first that
/// has to wait ends the scan.
pub(super) fn take_over<W>(waiting: &mut VecDeque<W>, most: usize, is_over: impl FnMut(&&W) -> bool) -> Drain<'_, W> {
    let count = waiting.iter().take(most).take_while(is_over).count();
    waiting.drain(..count)
}

impl Engine {
    /// Ends a step: `deferred` becomes a batch that waits for readers.
    pub fn retire(&self, deferred: Vec<Deferred>) {
        if deferred.is_empty() {
            return;
        }
        let is_news = deferred.iter().any(|deferred| match deferred {
            Deferred::Slab { block, slab, objects, .. } => {
                objects.count() > 0 || self.shared.blocks.slab(*block, *slab).tried.get() == 0
            }
            Deferred::Block { .. } => false,
        });
        let grace = (self.grace)();
        self.batches.with(|batches| batches.push_back(Batch { deferred, grace, is_news }));
    }

    /// Whether a waiting batch gives more room or a slab to continue with.
    pub fn awaits_news(&self) -> bool {
        self.batches.with(|batches| batches.iter().any(|batch| batch.is_news))
    }

    /// Finishes the batches after their grace period.
    pub fn finish_retired(&self) {
        if !self.has_batches() {
            return;
        }
        let oldest = epochs::oldest();
        let ripe: Vec<Batch> =
            self.batches.with(|batches| take_over(batches, usize::MAX, |batch| batch.grace.is_over(oldest)).collect());
        ripe.into_iter().flat_map(|batch| batch.deferred).for_each(|deferred| self.end(deferred));
    }

    /// Finishes all batches at once. For a cache that no thread reads any more.
    pub fn finish_retired_at_once(&self) {
        let batches = self.batches.with(std::mem::take);
        batches.into_iter().flat_map(|batch| batch.deferred).for_each(|deferred| self.end(deferred));
    }

    fn end(&self, deferred: Deferred) {
        match deferred {
            Deferred::Slab { node, block, slab, objects } => {
                let base = self.shared.blocks.addr(block);
                let each = || objects.iter().map(|object| base + self.shape.offset_of(slab, object));
                each().for_each(|object| {
                    self.note_given(object);
                    self.close_free(object);
                });
                self.on(node, |node| {
                    node.give_all(block, slab, &objects);
                    if node.blocks.slab(block, slab).state() == SlabState::Claimed {
                        node.open(block, slab);
                    }
                });
            }
            Deferred::Block { node, block } => self.on(node, |node| node.return_block(block)),
        }
    }

    /// As [`Engine::finish_retired`], for periodic callers: also advances the epoch and frees what is empty. Returns
    /// whether something still waits.
    pub fn finish_retired_behind(&self) -> bool {
        if self.has_batches() {
            epoch::pin().flush();
            self.finish_retired();
            self.trim_all(Keep::Some);
        }
        self.has_batches()
    }

    /// Objects that were moved away from places that are not free yet.
    pub fn in_batches(&self) -> u64 {
        let objects = |deferred: &Deferred| match deferred {
            Deferred::Slab { objects, .. } => u64::from(objects.count()),
            Deferred::Block { .. } => 0,
        };
        self.batches.with(|batches| batches.iter().flat_map(|batch| &batch.deferred).map(objects).sum())
    }

    pub fn has_batches(&self) -> bool {
        self.batches.with(|batches| !batches.is_empty())
    }

    /// Waits until all batches are finished, at most one second. Returns whether they are.
    pub fn finish_all_retired(&self) -> Result<bool> {
        self.check()?;
        Ok(self.finish_retired_within(GRACE_NS))
    }

    /// As [`Engine::finish_all_retired`], for `most_ns` at most. The cache must be of this process.
    pub fn finish_retired_within(&self, most_ns: u64) -> bool {
        wait_for_readers(most_ns, || {
            self.finish_retired();
            !self.has_batches()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A scan visits the entries that it removes and one more, however many wait.
    #[test]
    fn what_waits_is_looked_at_in_order() {
        let mut waiting: VecDeque<u32> = (0..1000).collect();
        let mut looks = 0;
        let mut take = |until, most| {
            take_over(&mut waiting, most, |at| {
                looks += 1;
                **at < until
            })
            .collect::<Vec<_>>()
        };
        assert_eq!((take(0, usize::MAX), take(3, usize::MAX), take(9, 2)), (vec![], vec![0, 1, 2], vec![3, 4]));
        assert_eq!((looks, waiting.len()), (1 + 4 + 2, 995));
    }
}
