//! The marks on a program's own memory: what is kept of each, and sums over all. Used under a lock.

use super::intervals::Intervals;
use super::vrange::How;
use crate::error::Result;
use crate::units::BLOCK_BYTES;
use std::ops::Range;

/// Given back by one system call: what a waiter may have to wait for.
const STEP_BYTES: usize = 4 * BLOCK_BYTES;

/// What a partial range loses at a time: a huge page, or a part of one where it is smaller.
const CHUNK_BYTES: usize = BLOCK_BYTES;
const SMALL_CHUNK_BYTES: usize = BLOCK_BYTES / 32;

/// What is known of a marked interval.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    pub epoch: u32,
    pub how: How,
    /// Some of it was purged, or of what it took the place of.
    pub is_purged: bool,
    /// All of it was.
    pub is_empty: bool,
    /// A purge is at it.
    pub is_purging: bool,
    /// Of which process it is: what a fork child inherited frees nothing there.
    pub generation: u16,
}

impl Mark {
    pub fn is_claimable(&self, generation: u16) -> bool {
        !self.is_empty && !self.is_purging && self.generation == generation
    }

    /// The part of an interval that goes next.
    pub fn next_piece(&self, range: &Range<usize>) -> Range<usize> {
        let step = match self.how {
            How::Full => STEP_BYTES,
            How::Partial if range.len() > CHUNK_BYTES => CHUNK_BYTES,
            How::Partial => SMALL_CHUNK_BYTES,
        };
        // Pieces end where huge pages do.
        let start = (range.end - 1) & !(step - 1);
        start.max(range.start)..range.end
    }
}

/// What the lock guards.
pub(super) struct Book {
    pub marks: Intervals<Mark>,
    /// Pieces that a purge is at: mostly none, and then nobody need look whether his is one.
    pub claimed: usize,
    /// Those who wait for that. Nothing more is claimed until they have come.
    pub waiting: usize,
    pub sums: Sums,
    /// Of this process: see [`Mark::generation`].
    pub generation: u16,
}

/// Bytes that are marked and were not purged.
#[derive(Clone, Copy, Default)]
pub(super) struct Sums {
    pub all: u64,
    /// Of them, outside of the arena.
    pub foreign: u64,
}

/// Where the arena lies, for a book that tells its memory from other.
pub(super) type Own = Range<usize>;

impl Book {
    pub const fn new() -> Self {
        Self { marks: Intervals::new(), claimed: 0, waiting: 0, sums: Sums { all: 0, foreign: 0 }, generation: 0 }
    }

    fn count(&mut self, own: &Own, range: &Range<usize>, mark: &Mark, is_in: bool) {
        if mark.is_empty || mark.generation != self.generation {
            return;
        }
        let bytes = range.len() as u64;
        let foreign = if own.contains(&range.start) { 0 } else { bytes };
        let add = |sum: &mut u64, bytes| *sum = if is_in { *sum + bytes } else { sum.saturating_sub(bytes) };
        add(&mut self.sums.all, bytes);
        add(&mut self.sums.foreign, foreign);
    }

    /// As [`Intervals::cut`].
    pub fn cut(&mut self, own: &Own, range: Range<usize>, mut each: impl FnMut(Mark)) -> Result<u64> {
        let mut gone = Self { generation: self.generation, ..Self::new() };
        let bytes = self.marks.cut(range, |part, mark| {
            gone.count(own, &part, &mark, true);
            each(mark);
        })?;
        self.sums.all = self.sums.all.saturating_sub(gone.sums.all);
        self.sums.foreign = self.sums.foreign.saturating_sub(gone.sums.foreign);
        Ok(bytes)
    }

    /// As [`Intervals::insert`].
    pub fn insert(&mut self, own: &Own, range: Range<usize>, mark: Mark) -> Result<()> {
        self.marks.insert(range.clone(), mark)?;
        self.count(own, &range, &mark, true);
        Ok(())
    }

    /// Changes the mark of exactly this interval.
    pub fn change(&mut self, own: &Own, interval: &Range<usize>, mark: Mark) {
        let mut before = None;
        self.marks.update(interval.clone(), |range, found| {
            if range == *interval {
                before = Some(std::mem::replace(found, mark));
            }
        });
        if let Some(before) = before {
            self.count(own, interval, &before, false);
            self.count(own, interval, &mark, true);
        }
    }

    /// Makes two intervals that touch one, if there is room to do it.
    pub fn join(&mut self, own: &Own, whole: Range<usize>, mark: Mark) {
        if self.marks.prepare(1).is_ok() {
            let is_done = self.cut(own, whole.clone(), |_| ()).and_then(|_| self.insert(own, whole, mark));
            debug_assert!(is_done.is_ok());
        }
    }
}
