//! The passes of defragmentation over the slabs and blocks of a cache, and the progress that steps and passes report.
//!
//! A *pass* tries each candidate once and may consist of many short steps. After a pass that freed nothing,
//! defragmentation is *suspended* until enough objects were allocated or freed.

use crate::defrag::candidates::Criteria;
use pagemill_core::sync::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Percentage of use below which every slab and block that is not full lies. It makes all of them candidates.
pub(crate) const ABOVE_FULL_PERCENT: u32 = 101;

/// After a pass that freed nothing, a cache is skipped until more than `1 / CHANGE_DIVISOR` of its objects were
/// allocated or freed.
const CHANGE_DIVISOR: u64 = 64;

/// What one call has moved. A program that makes several calls adds the numbers up.
///
/// After a step with `is_done`, the memory of the emptied slabs may still be in use: a later call, the background
/// thread or [`shrink`](crate::SlabCache::shrink) frees it.
///
/// ```
/// use pagemill::Error;
/// use pagemill::slab::{HandleMap, SlabCache};
/// use std::thread;
/// use std::time::Duration;
///
/// let cache = HandleMap::<u64>::new("numbers")?;
/// let (mut moved, mut emptied) = (0, 0);
/// loop {
///     match cache.defrag_step(Duration::from_millis(1)) {
///         Ok(step) => {
///             moved += step.moved;
///             emptied += step.emptied;
///             if step.is_done {
///                 break;
///             }
///         }
///         // Another thread works on the cache, for example Pagemill's background thread.
///         Err(Error::Busy { .. }) => thread::sleep(Duration::from_millis(1)),
///         Err(error) => return Err(error),
///     }
/// }
/// assert_eq!((moved, emptied), (0, 0)); // the cache is empty
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Objects that were moved, or that their owner freed instead of moving them.
    pub moved: u64,
    /// Objects that were to be moved, but stayed where they were.
    pub stayed: u64,
    /// Slabs that were emptied.
    pub emptied: u64,
    /// Whether the pass over all candidates has ended. A later pass may find candidates again.
    pub is_done: bool,
}

impl Progress {
    pub(crate) fn add(&mut self, part: &Self) {
        self.moved += part.moved;
        self.stayed += part.stayed;
        self.emptied += part.emptied;
        self.is_done &= part.is_done;
    }
}

/// State of the defragmentation of a cache.
///
/// A pass ends when no candidate is left and all slabs that it emptied are open or freed again. Before that time the
/// memory of their moved objects is not free yet, and the emptying of partly emptied slabs cannot be continued.
pub(crate) struct Passes {
    /// Number of the current pass.
    number: AtomicU32,
    /// Number of used objects of the cache when the current pass began; [`UNSET`] before the first step of the pass.
    objects_at_start: AtomicU64,
    /// Whether a step of the current pass emptied a slab.
    has_emptied: AtomicBool,
    /// Set when the last step left no candidate: the pass then ends once its batches are finished.
    pub(super) is_ending: AtomicBool,
    /// Number of the cache's slabs and blocks with used objects when the previous pass ended.
    in_use_at_last_end: AtomicU64,
    /// While defragmentation is suspended, the number of used objects when the last pass began; otherwise [`UNSET`].
    pub(super) suspended_at: AtomicU64,
    /// Set while memory is short: all slabs and blocks that are not full are then candidates, until a pass frees
    /// nothing.
    is_memory_short: AtomicBool,
}

/// Stands for an unknown number of objects in a field of [`Passes`].
const UNSET: u64 = u64::MAX;

impl Passes {
    pub fn new() -> Self {
        Self {
            number: AtomicU32::new(1),
            objects_at_start: AtomicU64::new(UNSET),
            has_emptied: AtomicBool::new(false),
            is_ending: AtomicBool::new(false),
            in_use_at_last_end: AtomicU64::new(0),
            suspended_at: AtomicU64::new(UNSET),
            is_memory_short: AtomicBool::new(false),
        }
    }

    /// Begins the next pass and returns the pass's unique number.
    pub fn begin_next(&self) -> u32 {
        // 0 is the `tried` value of slabs that were never tried.
        match self.number.fetch_add(1, Relaxed).wrapping_add(1) {
            0 => self.begin_next(),
            pass => pass,
        }
    }

    /// Records a step of the current pass. `used` is the number of used objects when the step began.
    pub fn record_step(&self, used: u64, progress: &Progress) {
        if self.objects_at_start.load(Relaxed) == UNSET {
            self.objects_at_start.store(used, Relaxed);
            self.end_suspension();
        }
        self.has_emptied.fetch_or(progress.emptied > 0, Relaxed);
        self.is_ending.store(progress.is_done, Relaxed);
    }

    /// Ends a pass that tried the slabs and blocks of which less than `percent` was in use. If the pass freed nothing,
    /// suspends defragmentation until the number of objects has changed enough since the beginning of the pass.
    /// `used_slabs_and_blocks` returns the current number of slabs and blocks with used objects.
    pub fn end_pass(&self, percent: u32, used_ratio: &AtomicU32, used_slabs_and_blocks: impl FnOnce() -> u64) {
        self.begin_next();
        self.is_ending.store(false, Relaxed);
        let (used, used_slabs_and_blocks) = (self.objects_at_start.swap(UNSET, Relaxed), used_slabs_and_blocks());
        let has_gained = self.in_use_at_last_end.swap(used_slabs_and_blocks, Relaxed) > used_slabs_and_blocks;
        let may_gain = has_gained | self.has_emptied.swap(false, Relaxed);
        // Since the last step began, the ratio may have been raised or memory may have become short. Then
        // defragmentation continues.
        let is_over = !may_gain && percent >= used_ratio.load(Relaxed);
        self.suspended_at.store(if is_over { used } else { UNSET }, Relaxed);
        if percent == ABOVE_FULL_PERCENT {
            self.is_memory_short.fetch_and(may_gain, Relaxed);
        }
    }

    /// Returns the conditions that the candidates of a step must meet, or `None` while defragmentation is suspended or
    /// switched off. `used` is the number of used objects.
    pub fn step_criteria(&self, used_ratio: u32, used: u64) -> Option<Criteria> {
        let is_memory_short = self.is_memory_short.load(Ordering::SeqCst);
        let suspended_at = self.suspended_at.load(Relaxed);
        let is_suspended = used.abs_diff(suspended_at) <= suspended_at / CHANGE_DIVISOR;
        let pass = self.number.load(Relaxed);
        let percent = if is_memory_short { ABOVE_FULL_PERCENT } else { used_ratio };
        let is_wanted = used_ratio > 0 && (is_memory_short || !is_suspended);
        is_wanted.then_some(Criteria { percent, pass, block_pass: Some(pass) })
    }

    /// Ends the suspension of defragmentation, so that the next step begins a pass.
    pub fn end_suspension(&self) {
        self.suspended_at.store(UNSET, Relaxed);
    }

    /// Returns whether defragmentation is suspended, because the last pass freed nothing.
    #[cfg(all(test, not(shuttle)))]
    pub fn is_suspended(&self) -> bool {
        self.suspended_at.load(Relaxed) != UNSET
    }

    #[cfg(test)]
    pub fn is_memory_short(&self) -> bool {
        self.is_memory_short.load(Ordering::SeqCst)
    }

    /// Records that memory is short. Returns whether a shortage was recorded already.
    pub fn note_memory_short(&self) -> bool {
        self.is_memory_short.swap(true, Ordering::SeqCst)
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    const USED_OBJECTS: u64 = 6400;
    const USED_RATIO_PERCENT: u32 = 60;

    fn progress_of_step(emptied: u64, is_done: bool) -> Progress {
        Progress { emptied, is_done, ..Progress::default() }
    }

    /// Records several steps of a pass. `objects_at_start` must be the number of used objects at the first step, and
    /// `is_ending` must follow from the last step. `has_emptied` must be true if any step emptied a slab.
    #[test]
    fn pass_records_its_steps() {
        let passes = Passes::new();
        let noted = || {
            let (used, has_emptied) = (passes.objects_at_start.load(Relaxed), passes.has_emptied.load(Relaxed));
            (used, has_emptied, passes.is_ending.load(Relaxed))
        };
        assert_eq!(noted(), (UNSET, false, false));
        passes.suspended_at.store(5, Relaxed);
        passes.record_step(10, &progress_of_step(0, true));
        assert_eq!((noted(), passes.suspended_at.load(Relaxed)), ((10, false, true), UNSET), "a rest ends");
        passes.suspended_at.store(5, Relaxed);
        passes.record_step(20, &progress_of_step(1, false));
        assert_eq!((noted(), passes.suspended_at.load(Relaxed)), ((10, true, false), 5));
        passes.record_step(30, &progress_of_step(0, true));
        assert_eq!(noted(), (10, true, true));
    }

    /// A pass that freed nothing must suspend defragmentation, unless the ratio was raised above the percentage of the
    /// pass. If that percentage was `ABOVE_FULL_PERCENT`, the pass must also end the memory shortage.
    #[test]
    fn pass_that_frees_nothing_suspends_defragmentation() {
        let used_slabs_and_blocks = 7;
        for (before, emptied, percent, is_suspended, is_memory_short) in [
            (used_slabs_and_blocks, 0, USED_RATIO_PERCENT, false, true),
            (used_slabs_and_blocks - 1, 0, USED_RATIO_PERCENT, true, true),
            (0, 0, USED_RATIO_PERCENT, true, true),
            (used_slabs_and_blocks - 1, 1, USED_RATIO_PERCENT, false, true),
            (used_slabs_and_blocks, 1, USED_RATIO_PERCENT, false, true),
            (used_slabs_and_blocks - 1, 0, USED_RATIO_PERCENT - 1, false, true),
            (used_slabs_and_blocks - 1, 0, USED_RATIO_PERCENT + 1, true, true),
            (used_slabs_and_blocks - 1, 0, ABOVE_FULL_PERCENT, true, false),
            (used_slabs_and_blocks - 1, 1, ABOVE_FULL_PERCENT, false, true),
            (used_slabs_and_blocks, 0, ABOVE_FULL_PERCENT, false, true),
        ] {
            let passes = Passes::new();
            let number = passes.number.load(Relaxed);
            passes.in_use_at_last_end.store(before, Relaxed);
            assert!(!passes.note_memory_short() && passes.note_memory_short() && passes.is_memory_short());
            passes.record_step(USED_OBJECTS, &progress_of_step(emptied, true));
            passes.end_pass(percent, &AtomicU32::new(USED_RATIO_PERCENT), || used_slabs_and_blocks - 1);
            let case = format!("{before} of {used_slabs_and_blocks}, {emptied} emptied, {percent} %");
            assert_eq!((passes.is_suspended(), passes.is_memory_short()), (is_suspended, is_memory_short), "{case}");
            assert_eq!(passes.suspended_at.load(Relaxed), if is_suspended { USED_OBJECTS } else { UNSET }, "{case}");
            assert_eq!((passes.number.load(Relaxed), passes.objects_at_start.load(Relaxed)), (number + 1, UNSET));
            assert_eq!(passes.in_use_at_last_end.load(Relaxed), used_slabs_and_blocks - 1);
            assert!(!passes.is_ending.load(Relaxed) && !passes.has_emptied.load(Relaxed));
        }
    }

    /// The number of a pass must not be 0, even after the counter of passes has overflowed.
    #[test]
    fn pass_number_is_never_zero() {
        let passes = Passes::new();
        assert_eq!((passes.begin_next(), passes.begin_next()), (2, 3));
        passes.number.store(u32::MAX, Relaxed);
        assert_eq!((passes.begin_next(), passes.begin_next()), (1, 2));
    }
}
