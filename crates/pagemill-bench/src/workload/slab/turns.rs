//! Turns of a workload. In each turn, objects are replaced and then walked, with or without a concurrent thread that
//! compacts them.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use pagemill_slab::Slabs;

use crate::workload::Failure;

/// Time budget of a step of background defragmentation.
pub const DEFRAG_STEP_BUDGET: Duration = Duration::from_millis(1);
/// Pause between two steps of background defragmentation.
pub const DEFRAG_PAUSE: Duration = Duration::from_millis(10);

crate::workload::arguments! {
    /// Arguments of a run in turns. In each turn, objects are replaced and then walked, with or without a concurrent
    /// thread that moves them.
    TurnsArguments:
    /// Number of turns. In each turn, as many objects are replaced as exist.
    turns: usize,
    /// Milliseconds for which the objects are walked in each turn.
    turn_ms: u64,
    /// Let a concurrent thread compact partial slabs.
    moving: bool,
}

impl TurnsArguments {
    /// Calls `turn` once for each turn, with the time for which it must walk. If `moving` is set, a concurrent thread
    /// compacts the slabs meanwhile.
    pub fn run(
        &self,
        slabs: &'static Slabs,
        mut turn: impl FnMut(Duration) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let time = Duration::from_millis(self.turn_ms);
        let rest = |_| DEFRAG_PAUSE;
        run_with_defragmentation(self.moving.then_some(slabs), rest, || (0..self.turns).try_for_each(|_| turn(time)))
    }
}

/// Runs `work`. If slabs are given, a concurrent thread compacts their partial slabs step by step. After each step, the
/// thread sleeps for the time that `rest` computes from the step's duration.
pub fn run_with_defragmentation<T>(
    slabs: Option<&'static Slabs>,
    rest: impl Fn(Duration) -> Duration + Sync,
    work: impl FnOnce() -> Result<T, Failure>,
) -> Result<T, Failure> {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let steps = |slabs: &Slabs| {
            let mut has_moved = false;
            loop {
                let begun = Instant::now();
                let progress = slabs.defrag_step(DEFRAG_STEP_BUDGET);
                has_moved |= progress.moved > 0;
                // The work may end before this thread gets a CPU. So this thread continues until an object was moved or
                // none is left to move.
                if is_over.load(Relaxed) && (has_moved || progress.is_done) {
                    return;
                }
                thread::sleep(rest(begun.elapsed()));
            }
        };
        let mover = slabs.map(|slabs| scope.spawn(move || steps(slabs)));
        let result = work();
        is_over.store(true, Relaxed);
        match mover.map(thread::ScopedJoinHandle::join) {
            Some(Err(_)) => Err("a thread panicked".into()),
            _ => result,
        }
    })
}

/// Repeats `walk` for `time`, but at least once. `walk` returns the number of entries that it found. Adds the
/// nanoseconds per entry of each walk to `walks`.
pub fn repeat_walk_for(
    time: Duration,
    walks: &mut Vec<f64>,
    mut walk: impl FnMut() -> Result<u64, Failure>,
) -> Result<(), Failure> {
    let begun = Instant::now();
    loop {
        let one = Instant::now();
        let entries = walk()?;
        walks.push(one.elapsed().as_nanos() as f64 / entries as f64);
        if begun.elapsed() >= time {
            return Ok(());
        }
    }
}
