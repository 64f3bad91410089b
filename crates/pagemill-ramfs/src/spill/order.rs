//! [`Order`]: the order in which segments are evicted.
//!
//! A queue with a second chance: a segment that was used since its last turn goes to the end. An entry names its file
//! weakly, and its segment by index and turn, so files and segments that end leave entries without meaning behind. Those
//! are removed when they become as many as the others.

use crate::file_data::FileData;
use std::collections::VecDeque;
use std::sync::Weak;

/// Number of entries from which on entries without meaning are removed.
const MIN_LEN: usize = 1024;

/// A segment's place in the order.
pub struct Entry {
    pub file: Weak<FileData>,
    pub index: u64,
    pub turn: u64,
}

impl Entry {
    fn has_meaning(&self) -> bool {
        // Another thread may drop the last reference to the file meanwhile; then this thread frees the file.
        let Some(file) = self.file.upgrade() else { return false };
        file.segments.as_ref().is_some_and(|segments| segments.has_turn(self.index, self.turn))
    }
}

#[derive(Default)]
pub struct Order {
    entries: VecDeque<Entry>,
    /// Length at which entries without meaning are removed.
    clean_at: usize,
}

impl Order {
    pub fn push(&mut self, entry: Entry) {
        if self.entries.len() >= self.clean_at.max(MIN_LEN) {
            self.entries.retain(Entry::has_meaning);
            self.clean_at = 2 * self.entries.len();
        }
        self.entries.push_back(entry);
    }

    pub fn pop(&mut self) -> Option<Entry> {
        self.entries.pop_front()
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns copies of all entries.
    pub fn entries(&self) -> Vec<(Weak<FileData>, u64)> {
        self.entries.iter().map(|entry| (entry.file.clone(), entry.index)).collect()
    }
}
