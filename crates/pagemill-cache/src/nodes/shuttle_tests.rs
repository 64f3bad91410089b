//! The cache of index nodes in random schedules.

use super::*;
use pagemill_core::arena::Layout;
use pagemill_core::reclaim::tree::UNLIMITED;
use pagemill_core::reclaim::{Account, Shrinker, Urgency};
use pagemill_core::sync::modelled::reset_clock;
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, MaxSteps, Runner};
use std::time::Duration;

/// Depth of the PCT schedules (probabilistic concurrency testing): at up to `PCT_DEPTH - 1` random steps, the running
/// thread gets the lowest priority.
const PCT_DEPTH: usize = 4;

/// Maximum number of steps of a run. A longer run waits for an event that never comes.
const MAX_STEPS: usize = 300_000;

fn new_slabs() -> &'static Slabs {
    let arena = place(pagemill_core::arena::Arena::new(Layout::for_test(), Account::make(UNLIMITED).unwrap()).unwrap())
        .unwrap();
    let slabs: &'static Slabs = place(Slabs::new(arena)).unwrap();
    slabs.defrag_by_hand();
    slabs
}

fn run_in_many_schedules(runs: usize, run: impl Fn() + Clone + Send + Sync + 'static) {
    let config = || {
        let mut config = Config::new();
        (config.stack_size, config.max_steps) = (1 << 20, MaxSteps::FailAfter(MAX_STEPS));
        config
    };
    let begin = move || {
        reset_clock();
        run();
    };
    Runner::new(RandomScheduler::new(runs), config()).run(begin.clone());
    Runner::new(PctScheduler::new(PCT_DEPTH, runs), config()).run(begin);
}

/// A thread visits all caches while two others use index nodes for the first time. The visiting thread must find either
/// no cache of nodes or a complete one. Only one such cache may be created. Reserved addresses are never freed, so
/// there are few runs.
#[test]
fn node_cache_is_complete_when_published() {
    run_in_many_schedules(30, || {
        let slabs = new_slabs();
        let seer = shuttle::thread::spawn(move || {
            while slabs.count() == 0 {
                shuttle::thread::yield_now();
            }
            slabs.defrag_step(Duration::from_secs(1));
            slabs.shrink(u64::MAX, Urgency::Limit);
        });
        let other =
            shuttle::thread::spawn(move || std::ptr::from_ref(IndexNodes::new(slabs).cache().unwrap()) as usize);
        let own = std::ptr::from_ref(IndexNodes::new(slabs).cache().unwrap()) as usize;
        assert_eq!(other.join().unwrap(), own);
        seer.join().unwrap();
        assert_eq!(slabs.count(), 1);
    });
}
