//! Batches of emptied slabs, and the grace periods after which no reader can use the old memory of moved objects.
//!
//! Each step of defragmentation creates one batch with one grace period ([`Grace`]) for all slabs that it emptied. The
//! engine has the list of the batches that wait ([`crate::defrag::retire_list`]).

use crate::alloc::meta::ObjectSet;
use crate::read::epochs::{self, Epoch};
use pagemill_core::epoch;
use pagemill_core::sync::{Acquire, Backoff, Release};
use std::collections::VecDeque;
use std::collections::vec_deque::Drain;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Maximum time, in nanoseconds, that a call such as `shrink` waits for readers of moved objects.
pub(crate) const GRACE_TIMEOUT_NS: u64 = 1_000_000_000;

/// An action that is executed after a grace period, when no reader can use the old memory of moved objects.
pub(crate) enum DeferredAction {
    /// Frees the old memory of the objects that were moved out of a slab, and opens the slab, which is claimed.
    Slab { node: usize, block: u32, slab: u32, objects: ObjectSet },
    /// Ends the emptying of a block. Executed after the actions for those slabs of the block that were emptied with it.
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

/// The deferred actions of one step of defragmentation, which wait for readers.
pub(crate) struct Batch {
    pub deferred: Vec<DeferredAction>,
    pub grace: Grace,
    /// Whether the current pass can continue after this batch: the batch frees objects, or opens a slab that was
    /// emptied only partly.
    pub unblocks_pass: bool,
}

/// A grace period. The period is over when all readers that existed at its beginning have finished.
pub(crate) struct Grace {
    /// The grace period ends only after all readers with a guard of [`crate::enter`] of this epoch, or of an earlier
    /// one, have finished.
    handle_epoch: Epoch,
    /// Set to true when all readers that had a guard of [`pagemill_core::epoch::pin`] at the beginning of the grace
    /// period have finished. `None`: the objects have no such readers.
    epoch: Option<Arc<AtomicBool>>,
}

impl Grace {
    /// Begins a grace period for readers of values by handle.
    pub fn of_handles() -> Self {
        Self { handle_epoch: epochs::grace_epoch(), epoch: None }
    }

    /// Begins a grace period for readers with a guard of [`crate::enter`] or of [`pagemill_core::epoch::pin`].
    pub fn of_all() -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let grace = Self { epoch: Some(is_over.clone()), ..Self::of_handles() };
        let guard = epoch::pin();
        epoch::defer(&guard, move || is_over.store(true, Release));
        epoch::flush(&guard);
        grace
    }

    /// Returns whether the grace period is over. `oldest` is the oldest epoch of a current reader with a guard of
    /// [`crate::enter`].
    pub fn is_over(&self, oldest: Epoch) -> bool {
        self.epoch.as_ref().is_none_or(|is_over| is_over.load(Acquire)) && oldest > self.handle_epoch
    }
}

/// Removes entries from the front of `waiting` as long as `is_over` returns true for them, at most `most` entries.
/// Entries are in order of arrival, so the scan stops at the first entry that has to wait.
pub(crate) fn drain_finished<W>(
    waiting: &mut VecDeque<W>,
    most: usize,
    is_over: impl FnMut(&&W) -> bool,
) -> Drain<'_, W> {
    let count = waiting.iter().take(most).take_while(is_over).count();
    waiting.drain(..count)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scans a queue of 1,000 waiting entries. A scan must visit only the entries that it removes and the first entry
    /// that has to wait.
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
