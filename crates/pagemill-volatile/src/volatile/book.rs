//! The marks on the program's own memory, and sums over them. Used under a lock.

use super::intervals::Intervals;
use super::purge::STEP_BYTES;
use super::vrange::How;
use pagemill_core::error::Result;
use pagemill_core::units::BLOCK_BYTES;
use std::ops::Range;

/// Bytes that a partial range loses at a time: a huge page, or a part of one if the range is smaller.
const CHUNK_BYTES: usize = BLOCK_BYTES;
const SMALL_CHUNK_BYTES: usize = BLOCK_BYTES / 32;

/// The state of a marked interval.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    pub epoch: u32,
    pub how: How,
    /// Part of it was purged, or part of a mark that it replaced.
    pub is_purged: bool,
    /// All of it was purged.
    pub is_empty: bool,
    /// A purge, or a thread that removes its guards, works on it.
    pub is_purging: bool,
    /// Purged pages are guarded.
    pub is_strict: bool,
    /// Some of its pages are guarded.
    pub is_guarded: bool,
    /// The process generation that made it: in a fork child an inherited mark frees nothing.
    pub generation: u16,
}

impl Mark {
    pub fn is_claimable(&self, generation: u16) -> bool {
        !self.is_empty && !self.is_purging && self.generation == generation
    }

    /// The part of an interval that is purged next.
    pub fn next_piece(&self, range: &Range<usize>) -> Range<usize> {
        let step = match self.how {
            How::Full => STEP_BYTES,
            How::Partial if range.len() > CHUNK_BYTES => CHUNK_BYTES,
            How::Partial => SMALL_CHUNK_BYTES,
        };
        // Pieces end where huge pages end.
        let start = (range.end - 1) & !(step - 1);
        start.max(range.start)..range.end
    }
}

/// The data that the lock guards.
pub(super) struct Book {
    pub marks: Intervals<Mark>,
    /// Number of claimed pieces: mostly 0, and then no search for a busy piece is needed.
    pub claimed: usize,
    /// A strict mark was purged at some time.
    may_have_guards: bool,
    /// Number of threads that wait for a claimed piece. Nothing more is claimed until they have proceeded.
    pub waiting: usize,
    pub sums: Sums,
    /// Addresses of the arena: all other memory is foreign.
    own: Range<usize>,
    /// The generation of this process: see [`Mark::generation`].
    pub generation: u16,
}

/// Bytes that are marked and were not purged.
#[derive(Clone, Copy, Default)]
pub(super) struct Sums {
    pub all: u64,
    /// The part outside the arena.
    pub foreign: u64,
}

impl Sums {
    /// The contribution of an interval, for a process of this generation with the arena at `own`.
    fn of(own: &Range<usize>, generation: u16, range: &Range<usize>, mark: &Mark) -> Self {
        let counts = !mark.is_empty && mark.generation == generation;
        let all = if counts { range.len() as u64 } else { 0 };
        Self { all, foreign: if own.contains(&range.start) { 0 } else { all } }
    }

    fn add(&mut self, other: Self) {
        (self.all, self.foreign) = (self.all + other.all, self.foreign + other.foreign);
    }

    fn take(&mut self, other: Self) {
        (self.all, self.foreign) = (self.all - other.all, self.foreign - other.foreign);
    }
}

impl Book {
    pub fn new(own: Range<usize>) -> Self {
        Self {
            marks: Intervals::new(),
            claimed: 0,
            may_have_guards: false,
            waiting: 0,
            sums: Sums::default(),
            own,
            generation: 0,
        }
    }

    /// As [`Intervals::cut`].
    pub fn cut(&mut self, range: Range<usize>, mut each: impl FnMut(Range<usize>, Mark)) -> Result<u64> {
        let mut gone = Sums::default();
        let bytes = self.marks.cut(range, |part, mark| {
            gone.add(Sums::of(&self.own, self.generation, &part, &mark));
            each(part, mark);
        })?;
        self.sums.take(gone);
        Ok(bytes)
    }

    /// Whether a purge, or a thread that removes guards, works on any of the range.
    pub fn is_busy(&mut self, range: &Range<usize>) -> bool {
        let mut is_busy = false;
        if self.claimed > 0 {
            self.marks.update(range.clone(), |_, mark| is_busy |= mark.is_purging);
        }
        is_busy
    }

    /// Claims the first guarded part of the range as a separate mark; returns it with its previous mark.
    ///
    /// # Errors
    ///
    /// Without memory to split the mark nothing is claimed.
    pub fn claim_guarded(&mut self, range: &Range<usize>) -> Result<Option<(Range<usize>, Mark)>> {
        if !self.may_have_guards {
            return Ok(None);
        }
        let Some((whole, mark)) = self.marks.overlapping(range.clone()).find(|(_, mark)| mark.is_guarded) else {
            return Ok(None);
        };
        let part = whole.start.max(range.start)..whole.end.min(range.end);
        self.claim(&whole, &part, mark)?;
        Ok(Some((part, mark)))
    }

    /// Marks a part of an interval as claimed, for a purge or for removing its guards.
    ///
    /// # Errors
    ///
    /// As [`Book::claim_guarded`].
    pub fn claim(&mut self, whole: &Range<usize>, part: &Range<usize>, mark: Mark) -> Result<()> {
        let claimed = Mark { is_purging: true, ..mark };
        // Memory for this split and for the changes afterwards.
        self.marks.prepare(6)?;
        if part == whole {
            self.change(part, claimed);
        } else {
            self.cut(part.clone(), |_, _| ())?;
            self.insert(part.clone(), claimed)?;
        }
        self.may_have_guards |= mark.is_strict;
        self.claimed += 1;
        Ok(())
    }

    /// As [`Intervals::insert`].
    pub fn insert(&mut self, range: Range<usize>, mark: Mark) -> Result<()> {
        self.marks.insert(range.clone(), mark)?;
        self.sums.add(Sums::of(&self.own, self.generation, &range, &mark));
        Ok(())
    }

    /// Changes the mark of exactly this interval.
    pub fn change(&mut self, interval: &Range<usize>, mark: Mark) {
        self.marks.update(interval.clone(), |range, found| {
            if range == *interval {
                self.sums.take(Sums::of(&self.own, self.generation, &range, found));
                *found = mark;
                self.sums.add(Sums::of(&self.own, self.generation, &range, found));
            }
        });
    }

    /// Joins two adjacent intervals into one, if there is memory to do it.
    pub fn join(&mut self, whole: Range<usize>, mark: Mark) {
        if self.marks.prepare(1).is_ok() {
            let is_done = self.cut(whole.clone(), |_, _| ()).and_then(|_| self.insert(whole, mark));
            debug_assert!(is_done.is_ok());
        }
    }
}
