//! Entries: the state of each software page of a window, and the counts that follow from it.
#![allow(unsafe_code)] // accesses the tables

use pagemill_core::error::{Error, Result};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{AtomicU32, Backoff};
use pagemill_sys::{mem, window};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};

/// Number of entries that are counted together.
pub(super) const BLOCK_ENTRIES: usize = 1024;

/// Number of pieces of all windows. A *piece* is a part of a window that was mapped by one call. It is at most one
/// mapping of the process, and one gap behind it.
static PIECES: AtomicUsize = AtomicUsize::new(0);

/// The part of [`PIECES`] that are pages of private views, which cannot be unmapped.
static OWN_PIECES: AtomicUsize = AtomicUsize::new(0);

/// Adds to the number of pieces that belong to private views, or subtracts from it.
pub(super) fn change_own_pieces(difference: isize) {
    OWN_PIECES.fetch_add(difference.cast_unsigned(), Relaxed);
    change_pieces(difference);
}

/// Returns whether a private view with `count` pieces may have another one. Private views get half of the pieces at
/// most. A view gets at most as many as are left for the others, so no view uses up all.
pub(super) fn may_add_own_piece(count: usize) -> bool {
    let free = (max_pieces() / 2).saturating_sub(OWN_PIECES.load(Relaxed));
    count < free && pieces() < max_pieces()
}

/// Returns the number of pieces of all windows.
pub(super) fn pieces() -> usize {
    PIECES.load(Relaxed)
}

/// Returns the maximum of [`pieces`]: with the gaps, half of the mappings that a process may have.
pub(super) fn max_pieces() -> usize {
    static MAX: AtomicUsize = AtomicUsize::new(0);
    match MAX.load(Relaxed) {
        0 => {
            let max = window::max_mappings() / 4;
            MAX.store(max, Relaxed);
            max
        }
        max => max,
    }
}

/// Adds to the number of pieces, or subtracts from it.
pub(super) fn change_pieces(difference: isize) {
    PIECES.fetch_add(difference.cast_unsigned(), Relaxed);
    stats::add(Counter::ViewMappings, difference.cast_unsigned() as u64);
}

/// Ends the pieces of the parent in a fork child.
pub(super) fn begin_child() {
    PIECES.store(0, Relaxed);
    OWN_PIECES.store(0, Relaxed);
}

/// The state of a page of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry(u32);

impl Entry {
    pub const EMPTY: Self = Self(0);
    /// One thread changes the entry.
    const CLAIMED: Self = Self(u32::MAX);
    /// Bit of an entry with a folio: no piece begins at the page. It lies in the piece of the page before it, or
    /// belongs to a private view.
    const JOINED_BIT: u32 = 1 << 31;

    /// Returns the entry of a folio that begins at page `number` of the pool, below 2^30.
    pub fn of(number: u32, is_joined: bool) -> Self {
        debug_assert!(number < 1 << 30, "the pool has no such page");
        Self((number + 1) | if is_joined { Self::JOINED_BIT } else { 0 })
    }

    /// Returns the number of the folio's first page; `None` if the entry is empty.
    pub fn number(self) -> Option<u32> {
        (self.0 & !Self::JOINED_BIT).checked_sub(1)
    }

    pub fn is_joined(self) -> bool {
        self.0 & Self::JOINED_BIT != 0
    }

    /// Returns the number of pieces that begin at the page.
    fn pieces(self) -> isize {
        isize::from(self.number().is_some() && !self.is_joined())
    }
}

/// The entries of a window.
pub(super) struct Entries {
    /// Address of a table with a word for each page of the window.
    table: usize,
    count: usize,
    /// Address of a table that has, for each [`BLOCK_ENTRIES`] entries, the number of those that are not empty, and of
    /// threads that may claim one. So an unmapping passes over empty parts of a large window.
    blocks: usize,
}

impl Entries {
    /// Creates `count` empty entries.
    pub fn new(count: usize) -> Result<Self> {
        let map = |words: usize| {
            let mapped = mem::map_sparse(words * size_of::<u32>(), mem::os_page_bytes());
            mapped.map_err(|_| Error::NoAddresses { wanted_bytes: (words * size_of::<u32>()) as u64 })
        };
        let table = map(count)?;
        match map(count.div_ceil(BLOCK_ENTRIES)) {
            Ok(blocks) => Ok(Self { table, count, blocks }),
            Err(error) => {
                // SAFETY: no other code knows the address.
                unsafe { mem::unreserve(table, table_bytes(count)) };
                Err(error)
            }
        }
    }

    pub fn count(&self) -> usize {
        self.count
    }

    fn word(&self, at: usize) -> &AtomicU32 {
        debug_assert!(at < self.count, "the page is in the window");
        // SAFETY: the table has `count` words, is zero at first, and lives as long as this value.
        unsafe { &*ptr::with_exposed_provenance::<AtomicU32>(self.table).add(at) }
    }

    /// Returns the number of used entries of the block of entry `at`.
    fn block(&self, at: usize) -> &AtomicU32 {
        // SAFETY: as for `word`, with a word for each block.
        unsafe { &*ptr::with_exposed_provenance::<AtomicU32>(self.blocks).add(at / BLOCK_ENTRIES) }
    }

    /// Returns whether all entries of the block of entry `at` are empty.
    pub fn is_block_empty(&self, at: usize) -> bool {
        self.block(at).load(SeqCst) == 0
    }

    pub fn load(&self, at: usize) -> Entry {
        Entry(self.word(at).load(SeqCst))
    }

    /// Claims an entry, and returns its state. Returns `None` if another thread has claimed it.
    pub fn claim(&self, at: usize) -> Option<Entry> {
        let (word, block) = (self.word(at), self.block(at));
        // Counted before the claim, so that an unmapping does not pass over the entry.
        block.fetch_add(1, SeqCst);
        let seen = word.load(SeqCst);
        let is_claimed =
            seen != Entry::CLAIMED.0 && word.compare_exchange(seen, Entry::CLAIMED.0, SeqCst, Relaxed).is_ok();
        if !is_claimed {
            block.fetch_sub(1, SeqCst);
            return None;
        }
        Some(Entry(seen))
    }

    /// As [`Entries::claim`], but only if the entry is empty.
    pub fn claim_empty(&self, at: usize) -> bool {
        self.load(at) == Entry::EMPTY
            && self.claim(at).is_some_and(|seen| {
                if seen != Entry::EMPTY {
                    self.release(at, seen, seen);
                }
                seen == Entry::EMPTY
            })
    }

    /// Claims an entry unless it is empty. Waits while another thread has claimed it. Returns `None` if it is empty.
    pub fn claim_used(&self, at: usize) -> Option<Entry> {
        let mut backoff = Backoff::new();
        loop {
            if self.load(at) == Entry::EMPTY {
                return None;
            }
            match self.claim(at) {
                Some(Entry::EMPTY) => {
                    self.release(at, Entry::EMPTY, Entry::EMPTY);
                    return None;
                }
                Some(seen) => return Some(seen),
                None => backoff.pause(),
            }
        }
    }

    /// Ends a claim: `seen` was the state before it, `now` is the state from here on.
    pub fn release(&self, at: usize, seen: Entry, now: Entry) {
        change_pieces(now.pieces() - seen.pieces());
        self.word(at).store(now.0, SeqCst);
        // The claim counts once, and an entry that is not empty once.
        let counted = 1 + u32::from(seen != Entry::EMPTY);
        self.block(at).fetch_sub(counted - u32::from(now != Entry::EMPTY), SeqCst);
    }

    /// Makes the piece of entry `at` begin there, because the page before it was mapped in another way or unmapped.
    /// Waits while another thread has claimed the entry.
    pub fn separate(&self, at: usize) {
        if at >= self.count {
            return;
        }
        let (word, mut backoff) = (self.word(at), Backoff::new());
        loop {
            let seen = Entry(word.load(SeqCst));
            if seen == Entry::CLAIMED {
                backoff.pause();
                continue;
            }
            if seen.number().is_none() || !seen.is_joined() {
                return;
            }
            if word.compare_exchange(seen.0, seen.0 & !Entry::JOINED_BIT, SeqCst, Relaxed).is_ok() {
                return change_pieces(1);
            }
        }
    }
}

impl Drop for Entries {
    fn drop(&mut self) {
        // SAFETY: nothing refers to the tables any more.
        unsafe {
            mem::unreserve(self.table, table_bytes(self.count));
            mem::unreserve(self.blocks, table_bytes(self.count.div_ceil(BLOCK_ENTRIES)));
        }
    }
}

/// Returns the length of a table of words, in whole OS pages.
fn table_bytes(count: usize) -> usize {
    (count * size_of::<u32>()).next_multiple_of(mem::os_page_bytes())
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    /// Three entries form one piece. Unmapping the middle one must make two pieces, unmapping the others none. Blocks
    /// must count exactly the entries that are not empty.
    #[test]
    fn pieces_and_used_entries_are_counted() {
        let entries = Entries::new(3 * BLOCK_ENTRIES).unwrap();
        let (first, before) = (BLOCK_ENTRIES - 1, pieces());
        for at in first..first + 3 {
            assert!(entries.claim_empty(at) && entries.claim(at).is_none() && !entries.claim_empty(at));
            entries.release(at, Entry::EMPTY, Entry::of(at as u32, at > first));
        }
        assert_eq!(pieces() - before, 1);
        assert_eq!([0, BLOCK_ENTRIES, 2 * BLOCK_ENTRIES].map(|at| entries.is_block_empty(at)), [false, false, true]);
        let unmap = |at: usize| {
            let seen = entries.claim_used(at).unwrap();
            assert_eq!(seen.number(), Some(at as u32));
            entries.release(at, seen, Entry::EMPTY);
            entries.separate(at + 1);
        };
        unmap(first + 1);
        assert_eq!(pieces() - before, 2);
        unmap(first);
        assert_eq!(pieces() - before, 1);
        unmap(first + 2);
        assert_eq!(pieces(), before);
        assert!(entries.claim_used(first).is_none() && entries.is_block_empty(0) && entries.is_block_empty(first + 1));
    }
}
