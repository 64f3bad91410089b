//! The purge queue: the up to 512 ranges with the oldest marks, in the order in which they are purged.
//!
//! A walk over all ranges fills the queue. When all its ranges were purged, the next walk fills the queue again.

/// Maximum number of walks over all ranges for one purge request. Without a limit a request might never end, because
/// other threads mark ranges meanwhile.
const MAX_WALKS: usize = 64;

/// Maximum number of ranges that one walk selects.
const QUEUE_LENGTH: usize = 512;

/// Number of ranges that a walk collects before it selects the oldest of them.
const MAX_COLLECTED: usize = QUEUE_LENGTH + QUEUE_LENGTH / 2;

/// A range that a walk has found: its age, the epoch of its mark, and the key that identifies it.
#[derive(Clone, Copy)]
struct QueueEntry {
    age: u32,
    epoch: u32,
    key: u64,
}

impl QueueEntry {
    /// Returns the sort key of the purge order: oldest first, ranges of equal age in the order of their keys.
    fn order(&self) -> (u32, u64) {
        (u32::MAX - self.age, self.key)
    }
}

/// The purge queue.
pub(super) struct PurgeQueue {
    entries: [QueueEntry; MAX_COLLECTED],
    /// Index of the next range to purge: those in `entries[next..end]` are not purged yet.
    next: usize,
    /// Number of ranges that the last walk has stored in `entries`.
    end: usize,
    /// A walk adds no ranges of a lower age, because it has found enough older ranges.
    least_age: u32,
}

impl Default for PurgeQueue {
    fn default() -> Self {
        let entries = [QueueEntry { age: 0, epoch: 0, key: 0 }; MAX_COLLECTED];
        Self { entries, next: 0, end: 0, least_age: 0 }
    }
}

impl PurgeQueue {
    /// Removes the next range from the queue. Returns its key and the epoch at which it was queued. The range may have
    /// been marked again since.
    fn dequeue(&mut self) -> Option<(u64, u32)> {
        let QueueEntry { key, epoch, .. } = *self.entries[..self.end].get(self.next)?;
        self.next += 1;
        Some((key, epoch))
    }

    /// Purges the ranges of the queue until `want_bytes` are freed. Returns the bytes freed.
    ///
    /// `purge` gets key and epoch of a range and returns the bytes that the kernel took, or `None` if it purged
    /// nothing. `walk` passes each range that can be purged to [`PurgeQueue::add`].
    pub fn purge(
        &mut self,
        want_bytes: u64,
        mut purge: impl FnMut(u64, u32) -> Option<u64>,
        mut walk: impl FnMut(&mut Self),
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
            if freed >= want_bytes || is_futile {
                break;
            }
            self.refill(&mut walk);
            is_fresh = true;
        }
        freed
    }

    /// Replaces the contents of the queue by the oldest ranges that `walk` adds.
    fn refill(&mut self, walk: impl FnOnce(&mut Self)) {
        (self.next, self.end, self.least_age) = (0, 0, 0);
        walk(self);
        self.entries[..self.end].sort_unstable_by_key(QueueEntry::order);
        self.end = self.end.min(QUEUE_LENGTH);
    }

    /// Adds a range during a walk, unless the walk has found enough older ranges.
    pub fn add(&mut self, age: u32, epoch: u32, key: u64) {
        if age < self.least_age {
            return;
        }
        if self.end == self.entries.len() {
            let (_, youngest, _) = self.entries.select_nth_unstable_by_key(QUEUE_LENGTH - 1, QueueEntry::order);
            (self.least_age, self.end) = (youngest.age.saturating_add(1), QUEUE_LENGTH);
        }
        self.entries[self.end] = QueueEntry { age, epoch, key };
        self.end += 1;
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
            let mut queue = PurgeQueue::default();
            queue.refill(|queue| ages.iter().zip(0..).for_each(|(age, key)| queue.add(*age, 7, key)));
            let found: Vec<u32> = std::iter::from_fn(|| queue.dequeue()).map(|(key, _)| ages[key as usize]).collect();
            let mut expected = ages.clone();
            expected.sort_unstable_by_key(|age| u32::MAX - age);
            expected.truncate(QUEUE_LENGTH);
            prop_assert_eq!(found, expected);
        }
    }
}
