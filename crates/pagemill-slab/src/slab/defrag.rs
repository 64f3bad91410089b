//! Defragmentation: which blocks and slabs are emptied, and when to stop; moving objects between nodes.
//!
//! Blocks are emptied first, then slabs. In both cases the emptiest go first, if their objects fit into fuller ones. A
//! *pass* tries each candidate once.

use super::candidates::Criteria;
use super::drain::DrainGuard;
use super::engine::Engine;
use super::migrate::{MigrationRun, Mover, Progress, assert_not_isolating};
use super::node::{Keep, TargetRoom};
use pagemill_core::error::{Error, Result};
use pagemill_core::sync::Relaxed;
use pagemill_sys::clock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Maximum time that reclaim waits for readers, and for freeing the objects that they used.
pub(super) const SHORT_GRACE_NS: u64 = 5_000_000;

/// Percentage with which everything that is not full is worth emptying.
const ALL: u32 = 101;

/// After a pass that freed nothing, a cache is skipped until this fraction of its object count has changed.
const CHANGE_DIVISOR: u64 = 64;

/// A long defragmentation re-enables magazines at this interval.
const SLICE: Duration = Duration::from_millis(10);

/// Progress of the defragmentation of a cache.
///
/// A pass ends when no candidate is left and all slabs that it emptied are open or freed again. Before that, room is
/// still missing and slabs that were left half done are not available.
pub(super) struct Passes {
    /// The current pass.
    number: AtomicU32,
    /// Number of objects when the pass began; [`NONE`] before its first step.
    used_before: AtomicU64,
    has_emptied: AtomicBool,
    /// No candidate was left; the pass waits for its batches.
    is_ending: AtomicBool,
    /// `footprint_before`: slabs and blocks in use when the last pass ended. `rest_at`: number of objects when the last
    /// pass had begun, if it freed nothing; else [`NONE`].
    footprint_before: AtomicU64,
    rest_at: AtomicU64,
    /// Memory is short: everything that is not full is worth emptying, until a pass gains nothing.
    is_pressed: AtomicBool,
}

/// No object count.
const NONE: u64 = u64::MAX;

impl Passes {
    pub fn new() -> Self {
        Self {
            number: AtomicU32::new(1),
            used_before: AtomicU64::new(NONE),
            has_emptied: AtomicBool::new(false),
            is_ending: AtomicBool::new(false),
            footprint_before: AtomicU64::new(0),
            rest_at: AtomicU64::new(NONE),
            is_pressed: AtomicBool::new(false),
        }
    }

    /// Begins the next pass and returns its unique number.
    fn next(&self) -> u32 {
        // 0 marks slabs that were never tried.
        match self.number.fetch_add(1, Relaxed).wrapping_add(1) {
            0 => self.next(),
            pass => pass,
        }
    }

    /// Records a step of a pass. `used` is the number of objects when the step began.
    fn note(&self, used: u64, progress: &Progress) {
        if self.used_before.load(Relaxed) == NONE {
            self.used_before.store(used, Relaxed);
            self.wake();
        }
        self.has_emptied.fetch_or(progress.emptied > 0, Relaxed);
        self.is_ending.store(progress.is_done, Relaxed);
    }

    /// Ends a pass. If it freed nothing, the next one waits for changes, counted from the beginning of this pass.
    fn end(&self, engine: &Engine, percent: u32) {
        self.next();
        self.is_ending.store(false, Relaxed);
        let (used, footprint) = (self.used_before.swap(NONE, Relaxed), engine.footprint());
        let has_gained = self.footprint_before.swap(footprint, Relaxed) > footprint;
        let may_gain = has_gained | self.has_emptied.swap(false, Relaxed);
        // The ratio may have been raised, or memory become short, since the last step began.
        let is_over = !may_gain && percent >= engine.used_ratio.load(Relaxed);
        self.rest_at.store(if is_over { used } else { NONE }, Relaxed);
        if percent == ALL {
            self.is_pressed.fetch_and(may_gain, Relaxed);
        }
    }

    /// Allows the next pass, although the last one freed nothing.
    pub fn wake(&self) {
        self.rest_at.store(NONE, Relaxed);
    }

    /// Whether the last pass freed nothing, so that the next waits for changes.
    #[cfg(all(test, not(shuttle)))]
    pub fn is_resting(&self) -> bool {
        self.rest_at.load(Relaxed) != NONE
    }

    #[cfg(test)]
    pub fn is_pressed(&self) -> bool {
        self.is_pressed.load(Ordering::SeqCst)
    }

    /// Memory is short. Returns whether that was known already.
    pub fn press(&self) -> bool {
        self.is_pressed.swap(true, Ordering::SeqCst)
    }
}

/// Empties what is used by less than the cache's ratio, for about `budget`. After a pass that freed nothing, the next one
/// begins only when the number of objects has changed.
///
/// # Errors
///
/// [`Error::Busy`] if another thread drains the cache.
pub(super) fn step(engine: &Engine, mover: &impl Mover, budget: Duration) -> Result<Progress> {
    assert_not_isolating();
    engine.check()?;
    engine.finish_retired();
    let used = engine.used();
    let Some(criteria) = worthwhile(engine, used) else {
        return Ok(Progress { is_done: true, ..Progress::default() });
    };
    let drained = engine.try_drain_magazines().ok_or(Error::Busy { what: "another thread empties this slab cache" })?;
    let progress = slice(engine, drained, mover, &criteria, budget);
    engine.passes.note(used, &progress);
    if progress.is_done && !engine.awaits_news() {
        engine.passes.end(engine, criteria.percent);
    }
    engine.trim_all(Keep::Some);
    Ok(progress)
}

/// The search for a step; `None` if the last pass freed nothing and little has changed since.
fn worthwhile(engine: &Engine, used: u64) -> Option<Criteria> {
    let passes = &engine.passes;
    let (ratio, is_pressed) = (engine.used_ratio.load(Relaxed), passes.is_pressed.load(Ordering::SeqCst));
    let rested = passes.rest_at.load(Relaxed);
    let is_resting = used.abs_diff(rested) <= rested / CHANGE_DIVISOR;
    let pass = passes.number.load(Relaxed);
    let percent = if is_pressed { ALL } else { ratio };
    (ratio > 0 && (is_pressed || !is_resting)).then_some(Criteria { percent, pass, round: Some(pass) })
}

/// Whether a step would find a candidate or could end a pass. An estimate without a barrier, because magazines are not
/// drained.
pub(super) fn is_worth_it(engine: &Engine) -> bool {
    worthwhile(engine, engine.used()).is_some_and(|criteria| {
        let can_end = engine.passes.is_ending.load(Relaxed) && !engine.awaits_news();
        can_end || (0..engine.node_count()).any(|node| engine.on(node, |node| node.has_candidate(&criteria)))
    })
}

/// Runs a part of a pass.
fn slice(
    engine: &Engine,
    drained: DrainGuard<'_>,
    mover: &impl Mover,
    criteria: &Criteria,
    budget: Duration,
) -> Progress {
    let deadline_ns = clock::fine_ns().saturating_add(budget.as_nanos().min(u128::from(u64::MAX)) as u64);
    engine.finish_retired();
    mover.collect(&drained);
    let mut run = MigrationRun::new(engine, mover, criteria.pass, deadline_ns, u64::MAX);
    (0..engine.node_count()).for_each(|node| run.compact(node, criteria));
    run.progress.is_done = !run.is_over() && !run.was_stopped;
    drop(drained);
    run.end()
}

/// Packs for one slice of time, for reclaim, which may run inside of any call. A later call frees what readers still use.
pub(super) fn pack(engine: &Engine, mover: &impl Mover) {
    if let Some(drained) = engine.try_drain_magazines() {
        let pass = engine.passes.next();
        let criteria = Criteria { percent: ALL, pass, round: Some(pass) };
        slice(engine, drained, mover, &criteria, SLICE);
        engine.finish_retired_within(SHORT_GRACE_NS);
    }
}

/// Packs all objects into as few slabs and blocks as possible, and frees the rest. Returns by how many bytes the charge
/// of the cache's blocks fell.
///
/// # Errors
///
/// As [`Engine::drain_magazines`].
pub(super) fn shrink(engine: &Engine, mover: &impl Mover) -> Result<u64> {
    assert_not_isolating();
    engine.check()?;
    let before = engine.resident_bytes();
    drop(engine.drain_magazines()?);
    engine.finish_all_retired()?;
    let round = engine.passes.next();
    // First empties blocks, then packs what is left into as few slabs as possible.
    for round in [Some(round), None] {
        loop {
            let footprint = engine.footprint();
            let criteria = Criteria { percent: ALL, pass: engine.passes.next(), round };
            let mut was_stopped = false;
            let is_finished = loop {
                let is_done = slice(engine, engine.drain_magazines()?, mover, &criteria, SLICE).is_done;
                was_stopped |= !is_done;
                if is_done {
                    let is_finished = engine.finish_all_retired()?;
                    // Slabs that were left half done are open again, so the pass continues. Slabs that were tried are not
                    // tried again.
                    if !was_stopped || !is_finished {
                        break is_finished;
                    }
                    was_stopped = false;
                }
            };
            if !is_finished || engine.footprint() >= footprint {
                break;
            }
        }
    }
    engine.give_rest(before)?;
    for node in 0..engine.node_count() {
        make_sparse(engine, mover, node)?;
    }
    engine.note_shrunk();
    Ok(before.saturating_sub(engine.resident_bytes()))
}

/// Splits up a whole block that is at most half used after packing: moves its objects to small pages, if a new block
/// would come in small pages.
///
/// # Errors
///
/// As [`Engine::drain_magazines`].
fn make_sparse(engine: &Engine, mover: &impl Mover, node: usize) -> Result<()> {
    if !engine.comes_sparse() {
        return Ok(());
    }
    let (before, drained) = (engine.resident_bytes(), engine.drain_magazines()?);
    let pass = engine.passes.next();
    let Some((block, slabs)) = engine.on(node, |node| node.claim_emptiest()) else { return Ok(()) };
    engine.reserve_little(node);
    let mut run = MigrationRun::new(engine, mover, pass, u64::MAX, u64::MAX);
    run.empty_block(node, block, slabs, (pass, TargetRoom::Any));
    drop(drained);
    run.end();
    engine.finish_all_retired()?;
    engine.give_rest(before)
}

/// Moves up to `most` objects from one node to another.
///
/// # Errors
///
/// [`pagemill_core::Error::BadNode`]; as [`Engine::drain_magazines`].
pub(super) fn move_objects(engine: &Engine, mover: &impl Mover, from: usize, to: usize, most: u64) -> Result<Progress> {
    assert_not_isolating();
    engine.check()?;
    [from, to].into_iter().try_for_each(|node| engine.check_node(node))?;
    let mut whole = Progress { is_done: true, ..Progress::default() };
    let pass = engine.passes.next();
    while from != to && whole.moved < most {
        engine.finish_retired();
        let drained = engine.drain_magazines()?;
        let deadline_ns = clock::fine_ns() + SLICE.as_nanos() as u64;
        let mut run = MigrationRun::new(engine, mover, pass, deadline_ns, most - whole.moved);
        let mut has_more = true;
        while !run.is_over() && has_more {
            match engine.on(from, |node| node.claim_next(pass)) {
                None => has_more = false,
                Some((block, slab)) => {
                    run.empty_slab(from, block, slab, u32::MAX, (to, TargetRoom::Any));
                }
            }
        }
        drop(drained);
        let was_stopped = run.was_stopped;
        let part = run.end();
        whole.add(&Progress { is_done: true, ..part });
        // A slab that was left half done can be continued once it is open again.
        if !has_more && !was_stopped || was_stopped && !engine.finish_all_retired()? {
            break;
        }
    }
    engine.finish_all_retired()?;
    engine.trim_all(Keep::Some);
    Ok(whole)
}

/// Moves objects from nodes above the average to nodes below it.
///
/// # Errors
///
/// As [`Engine::drain_magazines`].
pub(super) fn balance(engine: &Engine, mover: &impl Mover) -> Result<Progress> {
    assert_not_isolating();
    drop(engine.drain_magazines()?);
    let nodes = engine.node_count();
    let mut used: Vec<u64> = (0..nodes).map(|node| engine.on(node, |node| node.tally().used)).collect();
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
    use super::super::Settings;
    use super::super::owner_tests::cache_of;
    use super::super::tests::slabs;
    use super::*;

    const USED: u64 = 6400;
    const RATIO: u32 = 60;

    fn step_of(emptied: u64, is_done: bool) -> Progress {
        Progress { emptied, is_done, ..Progress::default() }
    }

    /// The number of objects counts from the first step of a pass. Whether it has emptied a slab holds for all steps,
    /// whether it is ending for the last.
    #[test]
    fn a_pass_notes_its_steps() {
        let passes = Passes::new();
        let noted = || {
            let (used, has_emptied) = (passes.used_before.load(Relaxed), passes.has_emptied.load(Relaxed));
            (used, has_emptied, passes.is_ending.load(Relaxed))
        };
        assert_eq!(noted(), (NONE, false, false));
        passes.rest_at.store(5, Relaxed);
        passes.note(10, &step_of(0, true));
        assert_eq!((noted(), passes.rest_at.load(Relaxed)), ((10, false, true), NONE), "a rest ends");
        passes.rest_at.store(5, Relaxed);
        passes.note(20, &step_of(1, false));
        assert_eq!((noted(), passes.rest_at.load(Relaxed)), ((10, true, false), 5));
        passes.note(30, &step_of(0, true));
        assert_eq!(noted(), (10, true, true));
    }

    /// A pass that freed nothing is followed by a rest, unless it left out what is to be emptied now. A rest at everything
    /// that is not full ends the pressure.
    #[test]
    fn a_pass_that_gains_nothing_rests() {
        let cache = cache_of(slabs(), Settings { defrag_used_ratio: RATIO, ..Settings::new("passes") });
        let engine = cache.engine();
        let footprint = engine.footprint() + 1;
        for (before, emptied, percent, is_resting, is_pressed) in [
            (footprint, 0, RATIO, false, true),
            (footprint - 1, 0, RATIO, true, true),
            (0, 0, RATIO, true, true),
            (footprint - 1, 1, RATIO, false, true),
            (footprint, 1, RATIO, false, true),
            (footprint - 1, 0, RATIO - 1, false, true),
            (footprint - 1, 0, RATIO + 1, true, true),
            (footprint - 1, 0, ALL, true, false),
            (footprint - 1, 1, ALL, false, true),
            (footprint, 0, ALL, false, true),
        ] {
            let passes = Passes::new();
            let number = passes.number.load(Relaxed);
            passes.footprint_before.store(before, Relaxed);
            assert!(!passes.press() && passes.press() && passes.is_pressed());
            passes.note(USED, &step_of(emptied, true));
            passes.end(engine, percent);
            let case = format!("{before} of {footprint}, {emptied} emptied, {percent} %");
            assert_eq!((passes.is_resting(), passes.is_pressed()), (is_resting, is_pressed), "{case}");
            assert_eq!(passes.rest_at.load(Relaxed), if is_resting { USED } else { NONE }, "{case}");
            assert_eq!((passes.number.load(Relaxed), passes.used_before.load(Relaxed)), (number + 1, NONE));
            assert_eq!(passes.footprint_before.load(Relaxed), footprint - 1);
            assert!(!passes.is_ending.load(Relaxed) && !passes.has_emptied.load(Relaxed));
        }
    }

    /// The number of a pass is never 0, which marks slabs that were not tried.
    #[test]
    fn passes_have_numbers() {
        let passes = Passes::new();
        assert_eq!((passes.next(), passes.next()), (2, 3));
        passes.number.store(u32::MAX, Relaxed);
        assert_eq!((passes.next(), passes.next()), (1, 2));
    }

    /// A rest ends when more than a 64th of the objects has changed, or memory is short. At a ratio of 0 nothing is worth a
    /// step.
    #[test]
    fn a_rest_ends_when_a_64th_has_changed() {
        let cache = cache_of(slabs(), Settings { defrag_used_ratio: RATIO, ..Settings::new("rest") });
        let engine = cache.engine();
        let percent_at = |used: u64| worthwhile(engine, used).map(|search| search.percent);
        assert_eq!(percent_at(0), Some(RATIO));
        engine.passes.rest_at.store(USED, Relaxed);
        assert_eq!(
            [USED - 101, USED - 100, USED, USED + 100, USED + 101].map(percent_at),
            [Some(RATIO), None, None, None, Some(RATIO)]
        );
        engine.passes.press();
        assert_eq!(percent_at(USED), Some(ALL));
        engine.used_ratio.store(0, Relaxed);
        assert_eq!((percent_at(USED), percent_at(0), is_worth_it(engine)), (None, None, false));
    }

    /// A step is worth it if it can end a pass; an empty cache has no candidate.
    #[test]
    fn a_step_is_worth_it_if_it_can_end_a_pass() {
        let cache = cache_of(slabs(), Settings { defrag_used_ratio: RATIO, ..Settings::new("ending") });
        let engine = cache.engine();
        assert!(!is_worth_it(engine) && !engine.awaits_news());
        engine.passes.is_ending.store(true, Relaxed);
        assert!(is_worth_it(engine));
    }
}
