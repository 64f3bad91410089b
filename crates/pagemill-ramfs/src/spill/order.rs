//! [`EvictionOrder`]: the order in which segments are evicted.
//!
//! A queue with a second chance: a segment that was used since its last turn goes to the end. An entry names its file
//! weakly, and its segment by index and by the entry's number. Entries of removed files and segments are *stale*. `push`
//! removes stale entries when the queue has at least 1024 entries, and twice as many as after the last removal.
//!
//! A segment gets its entry before its pages get memory, while the segment's lock is held. The order counts the entries
//! that were taken out and may be put back, so that a thread that finds none knows whether there will be one.

use crate::file_data::FileData;
use pagemill_core::sync::Guarded;
use std::collections::VecDeque;
use std::sync::Weak;

/// Minimum number of entries at which stale entries are removed.
const MIN_LEN: usize = 1024;

/// A segment's place in the order.
pub(crate) struct OrderEntry {
    pub file: Weak<FileData>,
    pub index: u64,
    pub number: u64,
}

impl OrderEntry {
    fn is_current(&self) -> bool {
        // Another thread may drop the other references to the file meanwhile; then this thread frees the file.
        let Some(file) = self.file.upgrade() else { return false };
        file.segments.as_ref().is_some_and(|segments| segments.has_entry(self.index, self.number))
    }
}

#[derive(Default)]
struct Queue {
    entries: VecDeque<OrderEntry>,
    /// Number of entries at which stale ones are removed next.
    clean_at: usize,
    /// Number of entries that are taken out at the moment.
    taken: usize,
}

#[derive(Default)]
pub(crate) struct EvictionOrder(Guarded<Queue>);

/// The first entry of the order.
pub(crate) enum First<'order> {
    Entry(Taken<'order>),
    /// There is none now, but other threads have taken some out and may put them back.
    Later,
    Nothing,
}

impl EvictionOrder {
    /// Adds an entry at the end.
    pub fn push(&self, entry: OrderEntry) {
        self.0.with(|queue| {
            if queue.entries.len() >= queue.clean_at.max(MIN_LEN) {
                queue.entries.retain(OrderEntry::is_current);
                queue.clean_at = 2 * queue.entries.len();
            }
            queue.entries.push_back(entry);
        });
    }

    /// Takes the first entry out.
    pub fn take_first(&self) -> First<'_> {
        self.0.with(|queue| match queue.entries.pop_front() {
            Some(entry) => {
                queue.taken += 1;
                First::Entry(Taken { order: self, entry: Some(entry) })
            }
            None if queue.taken > 0 => First::Later,
            None => First::Nothing,
        })
    }

    /// Returns the number of entries, with those that are taken out.
    pub fn len(&self) -> usize {
        self.0.with(|queue| queue.entries.len() + queue.taken)
    }

    /// Returns the file and segment index of each entry, except those that are taken out at the moment, and whether there
    /// are such entries.
    pub fn files_and_indices(&self) -> (Vec<(Weak<FileData>, u64)>, bool) {
        self.0.with(|queue| {
            let found = queue.entries.iter().map(|entry| (entry.file.clone(), entry.index)).collect();
            (found, queue.taken > 0)
        })
    }
}

/// An entry that was taken out of the order, until it is put back or dropped.
pub(crate) struct Taken<'order> {
    order: &'order EvictionOrder,
    entry: Option<OrderEntry>,
}

impl Taken<'_> {
    pub fn entry(&self) -> &OrderEntry {
        self.entry.as_ref().expect("the entry is there until it is put back")
    }

    /// Puts the entry back at the end of the order.
    pub fn put_back(mut self) {
        self.entry.take().into_iter().for_each(|entry| self.order.push(entry));
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.order.0.with(|queue| queue.taken -= 1);
    }
}
