//! The table of marks on memory that is given by address, and sums over these marks. Protected by the lock in `vrange`.
//!
//! A purge *claims* a *piece* of a marked interval: the addresses that the purge discards under one claim.

use super::intervals::Intervals;
use super::purge::PURGE_STEP_BYTES;
use super::vrange::How;
use pagemill_core::error::Result;
use pagemill_core::units::BLOCK_BYTES;
use std::ops::Range;

/// Length of the pieces in which a partial range is purged, if the range is longer than a huge page.
const CHUNK_BYTES: usize = BLOCK_BYTES;
/// Length of the pieces in which a partial range is purged, if the range is at most as long as a huge page.
const SMALL_CHUNK_BYTES: usize = BLOCK_BYTES / 32;

/// The state of a marked interval of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    /// Time of marking, or of the last purge of a chunk (see `word::epoch_of`).
    pub epoch: u32,
    pub how: How,
    /// Whether bytes were purged, under this mark or under an older mark that it replaced.
    pub is_purged: bool,
    /// Whether all of the interval was purged.
    pub is_empty: bool,
    /// Whether the interval is claimed by a purge or by a thread that removes its guards.
    pub is_purging: bool,
    /// Whether purged pages get guards, which make accesses raise a signal.
    pub is_strict: bool,
    /// Whether some pages have guards.
    pub is_guarded: bool,
    /// The process generation in which the interval was marked. A fork child does not purge inherited marks.
    pub generation: u16,
}

impl Mark {
    /// Returns whether a purge in a process of this generation may claim the marked interval.
    pub fn is_claimable(&self, generation: u16) -> bool {
        !self.is_empty && !self.is_purging && self.generation == generation
    }

    /// Returns the piece of the interval `range` that is purged next, which is the last piece.
    pub fn next_purged_piece(&self, range: &Range<usize>) -> Range<usize> {
        debug_assert!(!range.is_empty());
        let step = match self.how {
            How::Full => PURGE_STEP_BYTES,
            How::Partial if range.len() > CHUNK_BYTES => CHUNK_BYTES,
            How::Partial => SMALL_CHUNK_BYTES,
        };
        // Pieces start at multiples of their length, so that huge pages are not divided.
        let start = (range.end - 1) & !(step - 1);
        start.max(range.start)..range.end
    }
}

/// All marks of a process, with sums and claims.
pub(super) struct MarkTable {
    pub marks: Intervals<Mark>,
    /// Number of pieces of marked intervals that are claimed. While the number is 0, no search for claimed pieces is
    /// needed.
    pub claimed: usize,
    /// Whether a piece of a strict mark was ever claimed.
    may_have_guards: bool,
    /// Number of threads that wait for claimed pieces. Purges claim no more pieces until these threads have proceeded.
    pub waiting: usize,
    pub sums: Sums,
    /// Addresses of the arena. All other memory is *foreign*: Pagemill did not allocate it.
    own: Range<usize>,
    /// The generation of this process: see [`Mark::generation`].
    pub generation: u16,
}

/// Sums of the bytes that are marked and not purged.
#[derive(Clone, Copy, Default)]
pub(super) struct Sums {
    pub all: u64,
    /// The part of `all` that is outside the arena.
    pub foreign: u64,
}

impl Sums {
    /// Returns the sums for a single marked interval, in a process of this generation whose arena has the addresses
    /// `own`.
    fn of(own: &Range<usize>, generation: u16, range: &Range<usize>, mark: &Mark) -> Self {
        let counts = !mark.is_empty && mark.generation == generation;
        let all = if counts { range.len() as u64 } else { 0 };
        Self { all, foreign: if own.contains(&range.start) { 0 } else { all } }
    }

    fn add(&mut self, other: Self) {
        (self.all, self.foreign) = (self.all + other.all, self.foreign + other.foreign);
    }

    fn subtract(&mut self, other: Self) {
        (self.all, self.foreign) = (self.all - other.all, self.foreign - other.foreign);
        debug_assert!(self.foreign <= self.all, "foreign bytes are a part of all");
    }
}

impl MarkTable {
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

    /// As [`Intervals::cut`]; also updates the sums of marked bytes.
    pub fn cut(&mut self, range: Range<usize>, mut each: impl FnMut(Range<usize>, Mark)) -> Result<u64> {
        self.marks.cut(range, |part, mark| {
            self.sums.subtract(Sums::of(&self.own, self.generation, &part, &mark));
            each(part, mark);
        })
    }

    /// Returns whether a purge or a removal of guards has claimed any part of the range.
    pub fn is_busy(&self, range: &Range<usize>) -> bool {
        self.claimed > 0 && self.marks.overlapping(range.clone()).any(|(_, mark)| mark.is_purging)
    }

    /// Claims the first guarded part of the range. Returns the part and its mark before the claim.
    ///
    /// # Errors
    ///
    /// An error if there is no memory to split an interval. Nothing is claimed then.
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

    /// Claims `part` of the interval `whole`, for a purge or for removing its guards. The part becomes an interval of
    /// its own.
    ///
    /// # Errors
    ///
    /// As [`MarkTable::claim_guarded`].
    pub fn claim(&mut self, whole: &Range<usize>, part: &Range<usize>, mark: Mark) -> Result<()> {
        debug_assert!(!mark.is_purging, "one thread claims a piece");
        debug_assert!(!part.is_empty() && whole.start <= part.start && part.end <= whole.end);
        let claimed = Mark { is_purging: true, ..mark };
        // Reserve memory for this split and for the changes when the claim ends.
        self.marks.prepare(6)?;
        self.cut(part.clone(), |_, _| ())?;
        self.insert(part.clone(), claimed)?;
        self.may_have_guards |= mark.is_strict;
        self.claimed += 1;
        Ok(())
    }

    /// As [`Intervals::insert`]; also updates the sums of marked bytes.
    pub fn insert(&mut self, range: Range<usize>, mark: Mark) -> Result<()> {
        self.marks.insert(range.clone(), mark)?;
        self.sums.add(Sums::of(&self.own, self.generation, &range, &mark));
        Ok(())
    }

    /// Replaces the mark of the interval that has exactly these addresses. Does nothing if there is no such interval.
    pub fn change(&mut self, interval: &Range<usize>, mark: Mark) {
        self.marks.update(interval.clone(), |range, found| {
            if range == *interval {
                self.sums.subtract(Sums::of(&self.own, self.generation, &range, found));
                *found = mark;
                self.sums.add(Sums::of(&self.own, self.generation, &range, found));
            }
        });
    }

    /// Replaces the adjacent intervals in `whole` by one interval with `mark`, if there is memory for that.
    pub fn join(&mut self, whole: Range<usize>, mark: Mark) {
        if self.marks.prepare(1).is_ok() {
            let is_done = self.cut(whole.clone(), |_, _| ()).and_then(|_| self.insert(whole, mark));
            debug_assert!(is_done.is_ok());
        }
    }
}
