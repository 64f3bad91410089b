//! Defragmentation: decides which blocks and slabs are emptied and when to stop. Also moves objects between nodes.
//!
//! Blocks are emptied first, then slabs. The emptiest are tried first, if their objects fit into fuller ones. A *pass*
//! tries each candidate once and may consist of many short steps. After a pass that freed nothing, defragmentation is
//! *suspended* until enough objects were allocated or freed.

use crate::alloc::engine::Engine;
use crate::alloc::node::{Keep, TargetSlabs};
use crate::defrag::candidates::Criteria;
use crate::defrag::drain::DrainGuard;
use crate::defrag::migrate::{MigrationRun, Mover, Progress, assert_not_isolating};
use pagemill_core::error::{Error, Result};
use pagemill_core::sync::Relaxed;
use pagemill_sys::clock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Maximum time that reclaim waits for readers of moved objects, and that it spends on freeing retired values.
pub(crate) const SHORT_GRACE_NS: u64 = 5_000_000;

/// Percentage that makes every slab and block that is not full a candidate.
const ALL_PERCENT: u32 = 101;

/// After a pass that freed nothing, a cache is skipped until more than `1 / CHANGE_DIVISOR` of its objects were
/// allocated or freed.
const CHANGE_DIVISOR: u64 = 64;

/// A long defragmentation lets threads use their magazines again after each slice of this length.
const SLICE_DURATION: Duration = Duration::from_millis(10);

/// State of the defragmentation of a cache.
///
/// A pass ends when no candidate is left and all slabs that it emptied are open or freed again. Earlier, the objects of
/// these slabs are not free yet, and slabs that were emptied partly cannot be continued.
pub(crate) struct Passes {
    /// Number of the current pass.
    number: AtomicU32,
    /// Number of used objects when the current pass began; [`NONE`] before the first step of the pass.
    objects_at_start: AtomicU64,
    /// Whether a step of the current pass emptied a slab.
    has_emptied: AtomicBool,
    /// Set when the last step left no candidate: the pass ends once its batches are finished.
    is_ending: AtomicBool,
    /// Number of slabs and blocks in use when the previous pass ended.
    in_use_at_last_end: AtomicU64,
    /// While defragmentation is suspended, the number of used objects when the last pass began; else [`NONE`].
    suspended_at: AtomicU64,
    /// Set while memory is short: all slabs and blocks that are not full are then candidates, until a pass frees
    /// nothing.
    is_memory_short: AtomicBool,
}

/// Represents an unset number of objects.
const NONE: u64 = u64::MAX;

impl Passes {
    pub fn new() -> Self {
        Self {
            number: AtomicU32::new(1),
            objects_at_start: AtomicU64::new(NONE),
            has_emptied: AtomicBool::new(false),
            is_ending: AtomicBool::new(false),
            in_use_at_last_end: AtomicU64::new(0),
            suspended_at: AtomicU64::new(NONE),
            is_memory_short: AtomicBool::new(false),
        }
    }

    /// Begins the next pass and returns its unique number.
    fn begin_next(&self) -> u32 {
        // 0 is the `tried` value of slabs that were never tried.
        match self.number.fetch_add(1, Relaxed).wrapping_add(1) {
            0 => self.begin_next(),
            pass => pass,
        }
    }

    /// Records a step of a pass. `used` is the number of objects when the step began.
    fn record_step(&self, used: u64, progress: &Progress) {
        if self.objects_at_start.load(Relaxed) == NONE {
            self.objects_at_start.store(used, Relaxed);
            self.resume();
        }
        self.has_emptied.fetch_or(progress.emptied > 0, Relaxed);
        self.is_ending.store(progress.is_done, Relaxed);
    }

    /// Ends a pass. If it freed nothing, suspends defragmentation until the number of objects has changed enough since
    /// the beginning of this pass.
    fn end(&self, engine: &Engine, percent: u32) {
        self.begin_next();
        self.is_ending.store(false, Relaxed);
        let (used, used_slabs_and_blocks) = (self.objects_at_start.swap(NONE, Relaxed), engine.used_slabs_and_blocks());
        let has_gained = self.in_use_at_last_end.swap(used_slabs_and_blocks, Relaxed) > used_slabs_and_blocks;
        let may_gain = has_gained | self.has_emptied.swap(false, Relaxed);
        // Since the last step began, the ratio may have been raised or memory may have become short. Then
        // defragmentation continues.
        let is_over = !may_gain && percent >= engine.used_ratio.load(Relaxed);
        self.suspended_at.store(if is_over { used } else { NONE }, Relaxed);
        if percent == ALL_PERCENT {
            self.is_memory_short.fetch_and(may_gain, Relaxed);
        }
    }

    /// Ends the suspension, so that the next step begins a pass.
    pub fn resume(&self) {
        self.suspended_at.store(NONE, Relaxed);
    }

    /// Whether defragmentation is suspended, because the last pass freed nothing.
    #[cfg(all(test, not(shuttle)))]
    pub fn is_suspended(&self) -> bool {
        self.suspended_at.load(Relaxed) != NONE
    }

    #[cfg(test)]
    pub fn is_memory_short(&self) -> bool {
        self.is_memory_short.load(Ordering::SeqCst)
    }

    /// Records that memory is short. Returns whether this was recorded before.
    pub fn note_memory_short(&self) -> bool {
        self.is_memory_short.swap(true, Ordering::SeqCst)
    }
}

/// Runs a step of defragmentation for about `budget`: empties slabs and blocks that are used by less than the cache's
/// ratio. Does nothing while defragmentation is suspended.
///
/// # Errors
///
/// [`Error::Busy`] if another thread drains the cache.
pub(crate) fn step(engine: &Engine, mover: &impl Mover, budget: Duration) -> Result<Progress> {
    assert_not_isolating();
    engine.check_generation()?;
    engine.finish_retired();
    let used = engine.used_objects();
    let Some(criteria) = criteria_for_step(engine, used) else {
        return Ok(Progress { is_done: true, ..Progress::default() });
    };
    let drained = engine.try_drain_magazines().ok_or(Error::Busy { what: "another thread drains this slab cache" })?;
    let progress = run_slice(engine, drained, mover, &criteria, budget);
    engine.passes.record_step(used, &progress);
    if progress.is_done && !engine.awaits_unblocking_batch() {
        engine.passes.end(engine, criteria.percent);
    }
    engine.trim_all(Keep::Reserve);
    Ok(progress)
}

/// Returns the conditions for candidates of a step, or `None` while defragmentation is suspended or switched off.
fn criteria_for_step(engine: &Engine, used: u64) -> Option<Criteria> {
    let passes = &engine.passes;
    let (ratio, is_memory_short) = (engine.used_ratio.load(Relaxed), passes.is_memory_short.load(Ordering::SeqCst));
    let suspended_at = passes.suspended_at.load(Relaxed);
    let is_suspended = used.abs_diff(suspended_at) <= suspended_at / CHANGE_DIVISOR;
    let pass = passes.number.load(Relaxed);
    let percent = if is_memory_short { ALL_PERCENT } else { ratio };
    (ratio > 0 && (is_memory_short || !is_suspended)).then_some(Criteria { percent, pass, block_pass: Some(pass) })
}

/// Returns whether a step would find a candidate or could end a pass. This is an estimate: free objects in magazines
/// count as used, since the magazines are not drained.
pub(crate) fn is_step_worthwhile(engine: &Engine) -> bool {
    criteria_for_step(engine, engine.used_objects()).is_some_and(|criteria| {
        let can_end = engine.passes.is_ending.load(Relaxed) && !engine.awaits_unblocking_batch();
        can_end || (0..engine.node_count()).any(|node| engine.with_node(node, |node| node.has_candidate(&criteria)))
    })
}

/// Empties candidates until none is left or the budget is used up.
fn run_slice(
    engine: &Engine,
    drained: DrainGuard<'_>,
    mover: &impl Mover,
    criteria: &Criteria,
    budget: Duration,
) -> Progress {
    let deadline_ns = clock::fine_ns().saturating_add(budget.as_nanos().min(u128::from(u64::MAX)) as u64);
    engine.finish_retired();
    mover.collect_stocks(&drained);
    let mut run = MigrationRun::new(engine, mover, criteria.pass, deadline_ns, u64::MAX);
    (0..engine.node_count()).for_each(|node| run.empty_candidates(node, criteria));
    run.progress.is_done = !run.is_over() && !run.was_stopped;
    drop(drained);
    run.end()
}

/// Packs the objects for one slice of time. Reclaim calls `pack`, possibly inside any other call. Memory that readers
/// still use is freed by a later call.
pub(crate) fn pack(engine: &Engine, mover: &impl Mover) {
    if let Some(drained) = engine.try_drain_magazines() {
        let pass = engine.passes.begin_next();
        let criteria = Criteria { percent: ALL_PERCENT, pass, block_pass: Some(pass) };
        run_slice(engine, drained, mover, &criteria, SLICE_DURATION);
        engine.finish_retired_within(SHORT_GRACE_NS);
    }
}

/// Packs all objects into as few slabs and blocks as possible, and frees the unused memory. Returns by how many bytes
/// the charge of the cache fell.
///
/// # Errors
///
/// As [`Engine::drain_magazines`].
pub(crate) fn shrink(engine: &Engine, mover: &impl Mover) -> Result<u64> {
    assert_not_isolating();
    engine.check_generation()?;
    let before = engine.resident_bytes();
    drop(engine.drain_magazines()?);
    engine.finish_all_retired()?;
    let block_pass = engine.passes.begin_next();
    // The first iteration empties blocks; the second packs the remaining objects into as few slabs as possible.
    for block_pass in [Some(block_pass), None] {
        loop {
            let used_slabs_and_blocks = engine.used_slabs_and_blocks();
            let criteria = Criteria { percent: ALL_PERCENT, pass: engine.passes.begin_next(), block_pass };
            let mut was_stopped = false;
            let is_finished = loop {
                let is_done = run_slice(engine, engine.drain_magazines()?, mover, &criteria, SLICE_DURATION).is_done;
                was_stopped |= !is_done;
                if is_done {
                    let is_finished = engine.finish_all_retired()?;
                    // Slabs that were emptied partly are open again, so the pass continues with them. The pass does not
                    // retry other slabs.
                    if !was_stopped || !is_finished {
                        break is_finished;
                    }
                    was_stopped = false;
                }
            };
            if !is_finished || engine.used_slabs_and_blocks() >= used_slabs_and_blocks {
                break;
            }
        }
    }
    engine.free_unused_memory(before)?;
    for node in 0..engine.node_count() {
        make_sparse(engine, mover, node)?;
    }
    engine.note_shrunk();
    Ok(before.saturating_sub(engine.resident_bytes()))
}

/// If a new block would be sparse, moves the objects of a whole block that is at most half used after packing to a
/// sparse block.
///
/// # Errors
///
/// As [`Engine::drain_magazines`].
fn make_sparse(engine: &Engine, mover: &impl Mover, node: usize) -> Result<()> {
    if !engine.new_blocks_are_sparse() {
        return Ok(());
    }
    let (before, drained) = (engine.resident_bytes(), engine.drain_magazines()?);
    let pass = engine.passes.begin_next();
    let Some((block, slabs)) = engine.with_node(node, |node| node.claim_half_used_block()) else { return Ok(()) };
    engine.expect_low_use(node);
    let mut run = MigrationRun::new(engine, mover, pass, u64::MAX, u64::MAX);
    run.empty_block(node, block, slabs, (pass, TargetSlabs::Any));
    drop(drained);
    run.end();
    engine.finish_all_retired()?;
    engine.free_unused_memory(before)
}

/// Moves up to `most` objects from one node to another.
///
/// # Errors
///
/// [`pagemill_core::Error::BadNode`]; as [`Engine::drain_magazines`].
pub(crate) fn move_objects(engine: &Engine, mover: &impl Mover, from: usize, to: usize, most: u64) -> Result<Progress> {
    assert_not_isolating();
    engine.check_generation()?;
    [from, to].into_iter().try_for_each(|node| engine.check_node(node))?;
    let mut whole = Progress { is_done: true, ..Progress::default() };
    let pass = engine.passes.begin_next();
    while from != to && whole.moved < most {
        engine.finish_retired();
        let drained = engine.drain_magazines()?;
        let deadline_ns = clock::fine_ns() + SLICE_DURATION.as_nanos() as u64;
        let mut run = MigrationRun::new(engine, mover, pass, deadline_ns, most - whole.moved);
        let mut has_more = true;
        while !run.is_over() && has_more {
            match engine.with_node(from, |node| node.claim_next_slab(pass)) {
                None => has_more = false,
                Some((block, slab)) => {
                    run.empty_slab(from, block, slab, u32::MAX, (to, TargetSlabs::Any));
                }
            }
        }
        drop(drained);
        let was_stopped = run.was_stopped;
        let part = run.end();
        whole.add(&Progress { is_done: true, ..part });
        // A slab that was emptied partly can be continued once it is open again.
        if !has_more && !was_stopped || was_stopped && !engine.finish_all_retired()? {
            break;
        }
    }
    engine.finish_all_retired()?;
    engine.trim_all(Keep::Reserve);
    Ok(whole)
}

/// Moves objects from nodes with more than the average to nodes with less.
///
/// # Errors
///
/// As [`Engine::drain_magazines`].
pub(crate) fn balance(engine: &Engine, mover: &impl Mover) -> Result<Progress> {
    assert_not_isolating();
    drop(engine.drain_magazines()?);
    let nodes = engine.node_count();
    let mut used: Vec<u64> = (0..nodes).map(|node| engine.with_node(node, |node| node.tally().used)).collect();
    let share = used.iter().sum::<u64>().div_ceil(nodes as u64);
    let mut whole = Progress { is_done: true, ..Progress::default() };
    for from in 0..nodes {
        for to in 0..nodes {
            let most = used[from].saturating_sub(share).min(share.saturating_sub(used[to]));
            if most == 0 {
                continue;
            }
            let part = move_objects(engine, mover, from, to, most)?;
            used[from] -= part.moved;
            used[to] += part.moved;
            whole.add(&part);
        }
    }
    Ok(whole)
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;
    use crate::alloc::settings::Settings;
    use crate::caches::tests::basics::slabs;
    use crate::caches::tests::owner::cache_of;

    const USED: u64 = 6400;
    const RATIO: u32 = 60;

    fn step_of(emptied: u64, is_done: bool) -> Progress {
        Progress { emptied, is_done, ..Progress::default() }
    }

    /// Records several steps of a pass. The object count must be that of the first step, `is_ending` that of the last
    /// step, and `has_emptied` must be true if any step emptied a slab.
    #[test]
    fn pass_records_its_steps() {
        let passes = Passes::new();
        let noted = || {
            let (used, has_emptied) = (passes.objects_at_start.load(Relaxed), passes.has_emptied.load(Relaxed));
            (used, has_emptied, passes.is_ending.load(Relaxed))
        };
        assert_eq!(noted(), (NONE, false, false));
        passes.suspended_at.store(5, Relaxed);
        passes.record_step(10, &step_of(0, true));
        assert_eq!((noted(), passes.suspended_at.load(Relaxed)), ((10, false, true), NONE), "a rest ends");
        passes.suspended_at.store(5, Relaxed);
        passes.record_step(20, &step_of(1, false));
        assert_eq!((noted(), passes.suspended_at.load(Relaxed)), ((10, true, false), 5));
        passes.record_step(30, &step_of(0, true));
        assert_eq!(noted(), (10, true, true));
    }

    /// A pass that freed nothing must suspend defragmentation, unless the ratio was raised above the percentage of the
    /// pass. If that percentage was `ALL_PERCENT`, the pass must also end the memory shortage.
    #[test]
    fn pass_that_frees_nothing_suspends_defragmentation() {
        let cache = cache_of(slabs(), Settings::new("passes").defrag_used_ratio(RATIO));
        let engine = cache.engine();
        let used_slabs_and_blocks = engine.used_slabs_and_blocks() + 1;
        for (before, emptied, percent, is_suspended, is_memory_short) in [
            (used_slabs_and_blocks, 0, RATIO, false, true),
            (used_slabs_and_blocks - 1, 0, RATIO, true, true),
            (0, 0, RATIO, true, true),
            (used_slabs_and_blocks - 1, 1, RATIO, false, true),
            (used_slabs_and_blocks, 1, RATIO, false, true),
            (used_slabs_and_blocks - 1, 0, RATIO - 1, false, true),
            (used_slabs_and_blocks - 1, 0, RATIO + 1, true, true),
            (used_slabs_and_blocks - 1, 0, ALL_PERCENT, true, false),
            (used_slabs_and_blocks - 1, 1, ALL_PERCENT, false, true),
            (used_slabs_and_blocks, 0, ALL_PERCENT, false, true),
        ] {
            let passes = Passes::new();
            let number = passes.number.load(Relaxed);
            passes.in_use_at_last_end.store(before, Relaxed);
            assert!(!passes.note_memory_short() && passes.note_memory_short() && passes.is_memory_short());
            passes.record_step(USED, &step_of(emptied, true));
            passes.end(engine, percent);
            let case = format!("{before} of {used_slabs_and_blocks}, {emptied} emptied, {percent} %");
            assert_eq!((passes.is_suspended(), passes.is_memory_short()), (is_suspended, is_memory_short), "{case}");
            assert_eq!(passes.suspended_at.load(Relaxed), if is_suspended { USED } else { NONE }, "{case}");
            assert_eq!((passes.number.load(Relaxed), passes.objects_at_start.load(Relaxed)), (number + 1, NONE));
            assert_eq!(passes.in_use_at_last_end.load(Relaxed), used_slabs_and_blocks - 1);
            assert!(!passes.is_ending.load(Relaxed) && !passes.has_emptied.load(Relaxed));
        }
    }

    /// The number of a pass must never be 0, even after an overflow.
    #[test]
    fn pass_number_is_never_zero() {
        let passes = Passes::new();
        assert_eq!((passes.begin_next(), passes.begin_next()), (2, 3));
        passes.number.store(u32::MAX, Relaxed);
        assert_eq!((passes.begin_next(), passes.begin_next()), (1, 2));
    }

    /// A suspension must end when more than a 64th of the objects has changed, or memory is short. At a ratio of 0 no
    /// step may run.
    #[test]
    fn suspension_ends_when_a_64th_has_changed() {
        let cache = cache_of(slabs(), Settings::new("rest").defrag_used_ratio(RATIO));
        let engine = cache.engine();
        let percent_at = |used: u64| criteria_for_step(engine, used).map(|search| search.percent);
        assert_eq!(percent_at(0), Some(RATIO));
        engine.passes.suspended_at.store(USED, Relaxed);
        assert_eq!(
            [USED - 101, USED - 100, USED, USED + 100, USED + 101].map(percent_at),
            [Some(RATIO), None, None, None, Some(RATIO)]
        );
        engine.passes.note_memory_short();
        assert_eq!(percent_at(USED), Some(ALL_PERCENT));
        engine.used_ratio.store(0, Relaxed);
        assert_eq!((percent_at(USED), percent_at(0), is_step_worthwhile(engine)), (None, None, false));
    }

    /// In an empty cache, a step must be worthwhile only if it can end a pass.
    #[test]
    fn step_is_worthwhile_if_it_can_end_a_pass() {
        let cache = cache_of(slabs(), Settings::new("ending").defrag_used_ratio(RATIO));
        let engine = cache.engine();
        assert!(!is_step_worthwhile(engine) && !engine.awaits_unblocking_batch());
        engine.passes.is_ending.store(true, Relaxed);
        assert!(is_step_worthwhile(engine));
    }
}
