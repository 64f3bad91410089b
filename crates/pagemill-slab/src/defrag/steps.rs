//! Defragmentation: decides which blocks and slabs are emptied and when to stop. Also moves objects between NUMA nodes.
//!
//! Blocks are emptied first, then slabs. The emptiest ones are tried first, if their objects fit into fuller blocks or
//! slabs. Steps form passes ([`crate::defrag::passes`]).

use crate::alloc::engine::{Engine, check_ratio};
use crate::alloc::node::{Keep, TargetSlabs};
use crate::defrag::candidates::Criteria;
use crate::defrag::drain::{ANOTHER_DRAIN, DrainGuard};
use crate::defrag::isolating::assert_not_isolating;
use crate::defrag::migrate::{MigrationRun, Mover};
use crate::defrag::passes::{ABOVE_FULL_PERCENT, Progress};
use pagemill_core::error::Result;
use pagemill_core::sync::Relaxed;
use pagemill_sys::clock;
use std::time::Duration;

/// Maximum time that reclaim waits for readers of moved objects, and also the maximum time that reclaim spends on
/// freeing retired values.
pub(crate) const SHORT_GRACE_TIMEOUT_NS: u64 = 5_000_000;

/// Length of a time slice of a long defragmentation. After each slice, threads can use their magazines again.
const SLICE_DURATION: Duration = Duration::from_millis(10);

impl Engine {
    /// Sets the cache's `defrag_used_ratio`. If the background thread skips the cache after a panic, the thread resumes
    /// work on the cache, even if the ratio is the same.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::BadRatio`] if `percent` is above 100.
    pub fn set_used_ratio(&self, percent: u32) -> Result<()> {
        self.check_generation()?;
        check_ratio(percent)?;
        let is_raised = self.used_ratio.swap(percent, Relaxed) < percent;
        if is_raised {
            self.passes.end_suspension();
        }
        if self.has_panicked.swap(false, Relaxed) || is_raised {
            self.notify_worker_if_worthwhile();
        }
        Ok(())
    }

    /// Records a successful shrink of the cache. If the background thread skips the cache after a panic, the thread
    /// resumes work on the cache.
    pub fn note_shrunk(&self) {
        if self.has_panicked.swap(false, Relaxed) {
            self.notify_worker_if_worthwhile();
        }
    }

    /// Wakes the background thread if it would find work in this cache.
    fn notify_worker_if_worthwhile(&self) {
        if self.object.is_movable() && is_step_worthwhile(self) {
            self.shared.worker.notify();
        }
    }
}

/// Runs a step of defragmentation for about `budget`: empties slabs and blocks of which a smaller percentage is in use
/// than the cache's `defrag_used_ratio`. Does nothing while defragmentation is suspended.
///
/// # Errors
///
/// [`pagemill_core::Error::Busy`] if another thread drains the cache.
pub(crate) fn run_step(engine: &Engine, mover: &impl Mover, budget: Duration) -> Result<Progress> {
    assert_not_isolating();
    engine.check_generation()?;
    engine.finish_retired();
    let used = engine.used_objects();
    let Some(criteria) = engine.passes.step_criteria(engine.used_ratio.load(Relaxed), used) else {
        return Ok(Progress { is_done: true, ..Progress::default() });
    };
    let drained = engine.try_drain_magazines().ok_or(ANOTHER_DRAIN)?;
    let progress = run_slice(engine, drained, mover, &criteria, budget);
    engine.passes.record_step(used, &progress);
    if progress.is_done && !engine.awaits_unblocking_batch() {
        engine.passes.end_pass(criteria.percent, &engine.used_ratio, || engine.used_slabs_and_blocks());
    }
    engine.trim_all(Keep::Reserve);
    Ok(progress)
}

/// Returns whether a step of defragmentation would find a slab or block to empty, or could end a pass. The result is an
/// estimate: free objects in magazines count as used, since the magazines are not drained.
pub(crate) fn is_step_worthwhile(engine: &Engine) -> bool {
    let used = engine.used_objects();
    engine.passes.step_criteria(engine.used_ratio.load(Relaxed), used).is_some_and(|criteria| {
        let can_end = engine.passes.is_ending.load(Relaxed) && !engine.awaits_unblocking_batch();
        can_end || (0..engine.node_count()).any(|node| engine.with_node(node, |node| node.has_candidate(&criteria)))
    })
}

/// Empties slabs and blocks of all nodes that meet `criteria`, until no candidate is left or the time `budget` is used
/// up.
fn run_slice(
    engine: &Engine,
    drained: DrainGuard<'_>,
    mover: &impl Mover,
    criteria: &Criteria,
    budget: Duration,
) -> Progress {
    debug_assert!(criteria.percent <= ABOVE_FULL_PERCENT && criteria.pass != 0);
    let deadline_ns = clock::fine_ns().saturating_add(budget.as_nanos().min(u128::from(u64::MAX)) as u64);
    engine.finish_retired();
    mover.collect_stocks(&drained);
    let mut run = MigrationRun::new(engine, mover, criteria.pass, deadline_ns, u64::MAX);
    (0..engine.node_count()).for_each(|node| run.empty_candidates(node, criteria));
    run.progress.is_done = !run.is_over() && !run.was_stopped;
    drop(drained);
    run.end()
}

/// Packs the objects of a cache into fewer slabs, for one slice of time. Reclaim calls `pack`, possibly inside any
/// other call. A later call frees the memory that readers still use.
pub(crate) fn pack(engine: &Engine, mover: &impl Mover) {
    if let Some(drained) = engine.try_drain_magazines() {
        let pass = engine.passes.begin_next();
        let criteria = Criteria { percent: ABOVE_FULL_PERCENT, pass, block_pass: Some(pass) };
        run_slice(engine, drained, mover, &criteria, SLICE_DURATION);
        engine.finish_retired_within(SHORT_GRACE_TIMEOUT_NS);
    }
}

/// Packs all objects of a cache into as few slabs and blocks as possible, and frees the unused memory. Returns by how
/// many bytes the memory charged for the cache fell.
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
            let criteria = Criteria { percent: ABOVE_FULL_PERCENT, pass: engine.passes.begin_next(), block_pass };
            let (mut was_stopped, mut slice) = (false, SLICE_DURATION);
            let is_finished = loop {
                let is_done = run_slice(engine, engine.drain_magazines()?, mover, &criteria, slice).is_done;
                was_stopped |= !is_done;
                if is_done {
                    let is_finished = engine.finish_all_retired()?;
                    // Slabs that were emptied partly are open again, so the pass continues with them. The pass does not
                    // retry other slabs.
                    if !was_stopped || !is_finished {
                        break is_finished;
                    }
                    was_stopped = false;
                    // On a slow machine, slices of one length could stop at partly emptied slabs again and again.
                    slice *= 2;
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
    // The next block of the node will probably not be filled soon, so it becomes sparse.
    engine.has_filled_block[node].store(false, Relaxed);
    let mut run = MigrationRun::new(engine, mover, pass, u64::MAX, u64::MAX);
    run.empty_block(node, block, slabs, TargetSlabs::Any);
    drop(drained);
    run.end();
    engine.finish_all_retired()?;
    engine.free_unused_memory(before)
}

/// Moves up to `most` objects of a cache from NUMA node `from` to NUMA node `to`.
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
        debug_assert!(whole.moved <= most, "no more objects are moved than requested");
        // A slab that was emptied partly can be continued once it is open again.
        if !has_more && !was_stopped || was_stopped && !engine.finish_all_retired()? {
            break;
        }
    }
    engine.finish_all_retired()?;
    engine.trim_all(Keep::Reserve);
    Ok(whole)
}

/// Moves objects of a cache from nodes with more than the average number of objects to nodes with fewer.
///
/// # Errors
///
/// As [`Engine::drain_magazines`].
pub(crate) fn balance(engine: &Engine, mover: &impl Mover) -> Result<Progress> {
    assert_not_isolating();
    drop(engine.drain_magazines()?);
    let nodes = engine.node_count();
    let mut used: Vec<u64> = (0..nodes).map(|node| engine.with_node(node, |node| node.state.used)).collect();
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

    const USED_OBJECTS: u64 = 6400;
    const USED_RATIO_PERCENT: u32 = 60;

    /// A suspension of defragmentation must end when more than a 64th of the objects has changed, or memory is short.
    /// If `defrag_used_ratio` is 0, no step may run.
    #[test]
    fn suspension_ends_when_a_64th_has_changed() {
        let cache = cache_of(slabs(), Settings::new("rest").defrag_used_ratio(USED_RATIO_PERCENT));
        let engine = cache.engine();
        let percent_at =
            |used: u64| engine.passes.step_criteria(engine.used_ratio.load(Relaxed), used).map(|search| search.percent);
        assert_eq!(percent_at(0), Some(USED_RATIO_PERCENT));
        engine.passes.suspended_at.store(USED_OBJECTS, Relaxed);
        assert_eq!(
            [USED_OBJECTS - 101, USED_OBJECTS - 100, USED_OBJECTS, USED_OBJECTS + 100, USED_OBJECTS + 101]
                .map(percent_at),
            [Some(USED_RATIO_PERCENT), None, None, None, Some(USED_RATIO_PERCENT)]
        );
        engine.passes.note_memory_short();
        assert_eq!(percent_at(USED_OBJECTS), Some(ABOVE_FULL_PERCENT));
        engine.used_ratio.store(0, Relaxed);
        assert_eq!((percent_at(USED_OBJECTS), percent_at(0), is_step_worthwhile(engine)), (None, None, false));
    }

    /// In an empty cache, a step must be worthwhile only if the step can end a pass.
    #[test]
    fn step_is_worthwhile_if_it_can_end_a_pass() {
        let cache = cache_of(slabs(), Settings::new("ending").defrag_used_ratio(USED_RATIO_PERCENT));
        let engine = cache.engine();
        assert!(!is_step_worthwhile(engine) && !engine.awaits_unblocking_batch());
        engine.passes.is_ending.store(true, Relaxed);
        assert!(is_step_worthwhile(engine));
    }
}
