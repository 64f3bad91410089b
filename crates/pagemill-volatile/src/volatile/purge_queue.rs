//! The purge queue: the up to 512 ranges with the oldest marks, in the order in which they are purged.
//!
//! A walk over all ranges fills the queue. When all its ranges were purged, the next walk fills the queue again.

use pagemill_core::sync::{AtomicU32, AtomicU64, AtomicUsize, Relaxed};

/// Maximum number of walks over all ranges for one purge request. Without a limit a request might never end, because
/// other threads mark ranges meanwhile.
const MAX_WALKS: usize = 64;

/// Capacity of the queue: the maximum number of ranges that one walk selects.
pub(super) const QUEUE_LENGTH: usize = 512;

/// The purge queue. Its owner protects it with a lock.
pub(super) struct PurgeQueue {
    /// For each queued range: the key that identifies the range, and the epoch of its mark.
    entries: [(AtomicU64, AtomicU32); QUEUE_LENGTH],
    /// Index of the next range to purge: those in `entries[next..end]` are not purged yet.
    next: AtomicUsize,
    /// Number of ranges that the last walk has stored in `entries`.
    end: AtomicUsize,
}

impl Default for PurgeQueue {
    fn default() -> Self {
        let entries = std::array::from_fn(|_| Default::default());
        Self { entries, next: AtomicUsize::new(0), end: AtomicUsize::new(0) }
    }
}

impl PurgeQueue {
    /// Removes the next range from the queue. Returns its key and the epoch at which it was queued. The range may have
    /// been marked again since.
    fn dequeue(&self) -> Option<(u64, u32)> {
        let at = self.next.load(Relaxed);
        if at >= self.end.load(Relaxed) {
            return None;
        }
        self.next.store(at + 1, Relaxed);
        let (key, epoch) = &self.entries[at];
        Some((key.load(Relaxed), epoch.load(Relaxed)))
    }

    /// Purges the ranges of the queue until `want_bytes` are freed. Returns the bytes freed.
    ///
    /// `purge` gets key and epoch of a range and returns the bytes that the kernel took, or `None` if it purged
    /// nothing. `walk` fills the queue again and returns its new length.
    pub fn purge(
        &self,
        want_bytes: u64,
        mut purge: impl FnMut(u64, u32) -> Option<u64>,
        mut walk: impl FnMut() -> usize,
    ) -> u64 {
        let (mut freed, mut is_fresh) = (0, false);
        for _ in 0..MAX_WALKS {
            let mut has_gone = false;
            while freed < want_bytes
                && let Some((key, epoch)) = self.dequeue()
            {
                let gone = purge(key, epoch);
                has_gone |= gone.is_some();
                freed += gone.unwrap_or(0);
            }
            // If no range of a newly filled queue could be purged, the other ranges are assumed to be in use or locked,
            // too.
            let is_futile = is_fresh && !has_gone;
            if freed >= want_bytes || is_futile || walk() == 0 {
                break;
            }
            is_fresh = true;
        }
        freed
    }

    /// Replaces the contents of the queue by the ranges that a walk has selected. Returns the new length of the queue.
    pub fn refill(&self, oldest: &mut OldestRanges) -> usize {
        let sorted = oldest.sorted();
        for (place, found) in self.entries.iter().zip(sorted) {
            place.0.store(found.key, Relaxed);
            place.1.store(found.epoch, Relaxed);
        }
        self.next.store(0, Relaxed);
        self.end.store(sorted.len(), Relaxed);
        sorted.len()
    }
}

/// A range that a walk has found: its age, the epoch of its mark, and the key that identifies it.
#[derive(Clone, Copy)]
struct QueueEntry {
    age: u32,
    epoch: u32,
    key: u64,
}

/// Selects the oldest ranges of a walk: a binary heap of limited size with the youngest range on top, which an older
/// range replaces.
pub(super) struct OldestRanges {
    found: [QueueEntry; QUEUE_LENGTH],
    count: usize,
}

impl OldestRanges {
    pub const fn new() -> Self {
        Self { found: [QueueEntry { age: 0, epoch: 0, key: 0 }; QUEUE_LENGTH], count: 0 }
    }

    /// Adds a range to the selection if the selection is not full, or if the range is older than the youngest selected
    /// range.
    pub fn add(&mut self, age: u32, epoch: u32, key: u64) {
        let found = QueueEntry { age, epoch, key };
        if self.count < QUEUE_LENGTH {
            self.found[self.count] = found;
            self.count += 1;
            self.sift_up(self.count - 1);
        } else if age > self.found[0].age {
            self.found[0] = found;
            self.sift_down();
        }
    }

    /// Restores the heap order after the entry at `at` was added.
    fn sift_up(&mut self, mut at: usize) {
        while at > 0 && self.found[at].age < self.found[(at - 1) / 2].age {
            self.found.swap(at, (at - 1) / 2);
            at = (at - 1) / 2;
        }
    }

    /// Restores the heap order after the top entry was replaced.
    fn sift_down(&mut self) {
        let mut at = 0;
        loop {
            let children = [2 * at + 1, 2 * at + 2].into_iter().filter(|child| *child < self.count);
            let Some(youngest) = children.min_by_key(|child| self.found[*child].age) else { return };
            if self.found[at].age <= self.found[youngest].age {
                return;
            }
            self.found.swap(at, youngest);
            at = youngest;
        }
    }

    /// Returns the selected ranges, oldest first. Ranges of equal age are in the order of their keys.
    fn sorted(&mut self) -> &[QueueEntry] {
        let found = &mut self.found[..self.count];
        found.sort_unstable_by_key(|found| (u32::MAX - found.age, found.key));
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Adds ranges of random ages, up to three times as many as fit into the queue. The oldest ranges must be
        /// selected, oldest first.
        #[test]
        fn oldest_ages_are_selected(ages in prop::collection::vec(0u32..1000, 0..3 * QUEUE_LENGTH)) {
            let mut oldest = OldestRanges::new();
            ages.iter().zip(0..).for_each(|(age, key)| oldest.add(*age, 7, key));
            let found: Vec<u32> = oldest.sorted().iter().map(|found| found.age).collect();
            let mut expected = ages.clone();
            expected.sort_unstable_by_key(|age| u32::MAX - age);
            expected.truncate(QUEUE_LENGTH);
            prop_assert_eq!(found, expected);
        }
    }
}
