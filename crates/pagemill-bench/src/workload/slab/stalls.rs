//! Latency of a thread that continuously allocates and frees objects. Meanwhile another thread compacts the same cache
//! or returns its memory.

use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::thread;
use std::time::{Duration, Instant};

use super::SlabsProvider;
use super::fragments::{FragmentationPlan, SPARE_OBJECT_NUMBERS, SubjectOptions, SubjectWork};
use super::object_stores::ObjectStore;
use super::turns::{DEFRAG_PAUSE, DEFRAG_STEP_BUDGET};
use crate::histogram::Histogram;
use crate::workload::{Failure, WorkloadResult, ensure};

/// Maximum number of steps of background defragmentation.
const MAX_STEPS: usize = 2000;

/// Phase of a run in which the measured thread runs alone.
const PHASE_QUIET: u8 = 0;
/// Phase of a run in which another thread moves objects or returns memory.
const PHASE_MOVING: u8 = 1;
/// Phase of a run in which the measured thread must end.
const PHASE_OVER: u8 = 2;

crate::workload::arguments! {
    StallsArguments:
    /// Compact the cache in small steps with pauses, instead of all at once.
    steps: bool,
    /// Milliseconds for which the measured thread first runs alone.
    quiet_ms: u64,
    ..subject_options: SubjectOptions,
}

/// Measures the latencies of allocations and frees. The resulting JSON has their percentiles in the phases
/// [`PHASE_QUIET`] and [`PHASE_MOVING`].
pub fn run(arguments: &StallsArguments, provider: SlabsProvider) -> WorkloadResult {
    arguments.subject_options.run(provider, arguments)
}

impl SubjectWork for StallsArguments {
    fn run_with<const WORDS: usize, K: ObjectStore<WORDS>>(
        &self,
        open: impl FnOnce() -> Result<K, Failure>,
    ) -> WorkloadResult {
        let mut plan = FragmentationPlan::new(self.subject_options.objects);
        let store = open()?;
        plan.fragment(&store)?;
        let phase = AtomicU8::new(PHASE_QUIET);
        let (times, took) = thread::scope(|scope| {
            let worker = scope.spawn(|| replace_until_stopped(&store, self.subject_options.objects as u64, &phase));
            thread::sleep(Duration::from_millis(self.quiet_ms));
            phase.store(PHASE_MOVING, Release);
            let begun = Instant::now();
            let moved = if self.steps { run_defrag_steps(&store) } else { store.give_back() };
            let took = begun.elapsed();
            phase.store(PHASE_OVER, Release);
            let times = worker.join().unwrap_or_else(|_| Err("the watched thread panicked".into()));
            moved.and_then(|()| Ok((times?, took)))
        })?;
        plan.check_objects(&store)?;
        let mut line = serde_json::json!({ "ms": took.as_secs_f64() * 1e3, "moved": store.moved_count()? });
        for (phase, times) in ["quiet_", ""].into_iter().zip(&times) {
            // A percentile needs enough calls; the 99.99th needs ten thousand.
            let us =
                |one_of: u64| (times.count() >= one_of).then(|| times.percentile_ms(1.0 - 1.0 / one_of as f64) * 1e3);
            let longest = (times.count() > 0).then(|| times.longest_ms() * 1e3);
            let percentiles =
                [("p50_us", us(2)), ("p99_us", us(100)), ("p9999_us", us(10_000)), ("longest_us", longest)];
            percentiles.into_iter().for_each(|(name, value)| line[format!("{phase}{name}")] = value.into());
            line[format!("{phase}calls")] = times.count().into();
        }
        Ok(line)
    }
}

/// Makes steps of background defragmentation until no objects are left to move.
fn run_defrag_steps<const WORDS: usize>(store: &impl ObjectStore<WORDS>) -> Result<(), Failure> {
    for _ in 0..MAX_STEPS {
        match store.defrag_step(DEFRAG_STEP_BUDGET)? {
            None => return Err("it does nothing in the background".into()),
            Some(progress) if progress.is_done && progress.moved == 0 => return Ok(()),
            Some(_) => thread::sleep(DEFRAG_PAUSE),
        }
    }
    Err("the steps come to no end".into())
}

/// Repeatedly frees the oldest of its objects and makes a new one, until [`PHASE_OVER`]. Adds the time of each call to
/// the histogram of the current phase.
fn replace_until_stopped<const WORDS: usize>(
    store: &impl ObjectStore<WORDS>,
    first: u64,
    phase: &AtomicU8,
) -> Result<[Histogram; 2], Failure> {
    let mut references: Vec<_> = (0..SPARE_OBJECT_NUMBERS).map(|_| None).collect();
    let mut times = [Histogram::new(), Histogram::new()];
    loop {
        for (number, slot) in (first..).zip(&mut references) {
            let phase = phase.load(Acquire);
            if phase == PHASE_OVER {
                return Ok(times);
            }
            let times = &mut times[usize::from(phase)];
            if let Some(reference) = slot.take() {
                ensure(store.has_number(&reference, number), || "an object that was just made is not what it was")?;
                let begun = Instant::now();
                store.free_object(reference)?;
                times.add(begun.elapsed());
            }
            let begun = Instant::now();
            let new = store.make_object(number)?;
            times.add(begun.elapsed());
            *slot = Some(new);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::native::GiveBack;
    use crate::workload::slab::fragments::Subject;
    use crate::workload::slab::slabs_of_test;

    /// Objects are allocated and freed while others are moved, all at once or in steps. No object may be damaged. A run
    /// in steps must fail with a cache that cannot move its objects.
    #[test]
    fn calls_are_timed_during_moves() {
        for (subject, steps) in [(Subject::OwnerSlab, true), (Subject::HandleMap, false), (Subject::Malloc, false)] {
            let subject_options = SubjectOptions { subject, size: 192, objects: 50_000, how: GiveBack::MallocTrim };
            let line =
                run(&StallsArguments { subject_options, steps, quiet_ms: 5 }, slabs_of_test).expect("it comes through");

            assert!(line["quiet_calls"].is_u64() && line["calls"].is_u64(), "{line}");
            assert!(line["longest_us"].as_f64() >= line["p99_us"].as_f64());
            assert_eq!(line["moved"].as_u64() > Some(0), subject != Subject::Malloc, "{line}");
        }
        let subject_options =
            SubjectOptions { subject: Subject::Fixed, size: 192, objects: 1000, how: GiveBack::MallocTrim };
        assert!(run(&StallsArguments { subject_options, steps: true, quiet_ms: 1 }, slabs_of_test).is_err());
    }
}
