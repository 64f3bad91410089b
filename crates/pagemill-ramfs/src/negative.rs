//! Negative dentries: names that were looked up and do not exist, at most a fixed number of them.
//!
//! The list is in order of insertion. Eviction takes the oldest ones, but those that were found again since they were
//! last examined go to the end of the list (second chance). The bit for that lies in a side table by handle index,
//! because a value of a slab cache never changes in place.

use crate::child_index::IndexHandle;
use crate::dentry::DentryHandle;
use crate::inode::Ino;
use pagemill_core::arena::Table;
use pagemill_core::error::Result;
use pagemill_core::sync::{AtomicU64, Guarded, Relaxed};
use std::collections::VecDeque;
use std::sync::atomic::AtomicUsize;

/// Handles that a slab cache can have.
const MAX_HANDLES: usize = 1 << 26;
const WORD_BITS: usize = u64::BITS as usize;

/// A negative dentry in the list.
#[derive(Clone, Copy)]
pub(crate) struct Negative {
    pub directory: Ino,
    /// Index of the directory.
    pub index: IndexHandle,
    pub hash: u64,
    pub dentry: DentryHandle,
}

/// The negative dentries of a file system.
pub(crate) struct Negatives {
    limit: usize,
    /// Number of negative dentries. The list may be longer, because names that exist by now stay in it until their turn.
    count: AtomicUsize,
    list: Guarded<List>,
    /// One bit for each dentry handle, set when the dentry was found.
    found: Table<AtomicU64>,
}

#[derive(Default)]
struct List {
    oldest_first: VecDeque<Negative>,
    /// Number of words of `found` that are open.
    open_words: usize,
}

impl Negatives {
    pub fn new(limit: usize) -> Result<Self> {
        let words = if limit == 0 { 1 } else { MAX_HANDLES / WORD_BITS };
        Ok(Self { limit, count: AtomicUsize::new(0), list: Guarded::default(), found: Table::new_readable(words)? })
    }

    pub fn limit(&self) -> usize {
        self.limit
    }

    pub fn len(&self) -> usize {
        self.count.load(Relaxed)
    }

    /// Records that a negative dentry was found. Writes only if the bit is not set yet.
    #[inline]
    pub fn note_found(&self, dentry: DentryHandle) {
        let (word, bit) = (dentry.index() as usize / WORD_BITS, 1 << (dentry.index() as usize % WORD_BITS));
        let word = self.found.get(word);
        if word.load(Relaxed) & bit == 0 {
            word.fetch_or(bit, Relaxed);
        }
    }

    fn take_found(&self, dentry: DentryHandle) -> bool {
        let (word, bit) = (dentry.index() as usize / WORD_BITS, 1 << (dentry.index() as usize % WORD_BITS));
        self.found.get(word).fetch_and(!bit, Relaxed) & bit != 0
    }

    /// Adds a negative dentry before it enters the index of its directory. Returns those to evict, so that the limit
    /// holds.
    ///
    /// # Errors
    ///
    /// If the side table has no memory for the handle. Then the dentry was not added.
    pub fn add(&self, negative: Negative) -> Result<Vec<Negative>> {
        self.list.with(|list| {
            let words = negative.dentry.index() as usize / WORD_BITS + 1;
            if words > list.open_words {
                self.found.open(0, list.open_words, words)?;
                list.open_words = words;
            }
            self.take_found(negative.dentry);
            list.oldest_first.push_back(negative);
            self.count.fetch_add(1, Relaxed);
            let surplus = list.oldest_first.len().saturating_sub(self.limit);
            Ok(self.take_oldest(list, surplus))
        })
    }

    /// Counts negative dentries that were freed, or whose names exist now.
    pub fn note_ended(&self, count: usize) {
        let before = self.count.fetch_sub(count, Relaxed);
        debug_assert!(before >= count, "a negative dentry ends once");
    }

    /// Takes the `count` oldest dentries of the list, except those found since they were last examined.
    fn take_oldest(&self, list: &mut List, count: usize) -> Vec<Negative> {
        let mut taken = Vec::with_capacity(count);
        let mut chances = list.oldest_first.len();
        while taken.len() < count {
            let Some(oldest) = list.oldest_first.pop_front() else { break };
            if chances > 0 && self.take_found(oldest.dentry) {
                chances -= 1;
                list.oldest_first.push_back(oldest);
            } else {
                taken.push(oldest);
            }
        }
        taken
    }

    /// Takes all dentries of the list for which `is_chosen` returns true.
    pub fn take_where(&self, mut is_chosen: impl FnMut(&Negative) -> bool) -> Vec<Negative> {
        self.list.with(|list| {
            let (taken, left) = list.oldest_first.drain(..).partition(|negative| is_chosen(negative));
            list.oldest_first = left;
            list.oldest_first.shrink_to_fit();
            Vec::from(taken)
        })
    }
}
