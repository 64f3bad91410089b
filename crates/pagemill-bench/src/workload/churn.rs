//! Random churn: threads replace allocations of random sizes, some hundred MiB in total. Then they free everything, and
//! the process is almost idle.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Barrier, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;

use super::pieces::Load;
use super::{Failure, WorkloadResult, ensure};
use crate::native::TaggedAllocation;
use crate::stats::{self, mib};
use crate::{native, proc};

/// Smallest size of an allocation, in bytes. The logarithms of the sizes are uniformly distributed.
const MIN_BYTES: f64 = 16.0;
/// Largest size of an allocation, in bytes.
const MAX_BYTES: f64 = (8 << 20) as f64;

/// Of this many allocations, one on average is passed to another thread, which frees it.
const ALLOCATIONS_PER_PASSED_ONE: usize = 8;
/// Number of slots through which threads pass allocations to each other.
const PASSING_SLOTS: usize = 64;

/// Interval at which the process samples its own memory usage.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);

crate::workload::arguments! {
    ChurnArguments:
    threads: usize,
    /// Total size of the live allocations of all threads together, in MiB.
    mib: usize,
    /// Time in ms for which the threads replace allocations.
    run_ms: u64,
    /// Time in ms for which the process is almost idle after all allocations are freed.
    rest_ms: u64,
}

/// An allocation with its size and its tag, by which it is counted and checked when it is freed.
struct TrackedAllocation {
    piece: TaggedAllocation,
    size: usize,
    tag: u64,
}

struct SharedState {
    /// The slots through which threads pass allocations to each other. A thread puts an allocation into a slot and
    /// frees the previous allocation of that slot.
    shared: Vec<Mutex<Option<TrackedAllocation>>>,
    is_over: AtomicBool,
    /// Sum of the sizes of all live allocations, in bytes.
    live: AtomicU64,
}

/// Replaces allocations, frees all of them, and is then almost idle. The resulting JSON has the resident memory of the
/// process during the replacements (the median over the last three quarters of the time, and over the last quarter) and
/// at the end. It also has the CPU time per replacement.
pub fn run(arguments: &ChurnArguments) -> WorkloadResult {
    let state = SharedState {
        shared: (0..PASSING_SLOTS).map(|_| Mutex::new(None)).collect(),
        is_over: AtomicBool::new(false),
        live: AtomicU64::new(0),
    };
    let share = (arguments.mib << 20) / arguments.threads;
    // The threads end only with the run, so that memory in their thread caches is counted.
    let (emptied, ended) = (Barrier::new(arguments.threads + 1), Barrier::new(arguments.threads + 1));
    let cpu_before = native::own_cpu_time();
    let (memory_samples, cpu, after_mib, replaced) = thread::scope(|scope| {
        let (state, emptied, ended) = (&state, &emptied, &ended);
        let work = move |index| {
            let replaced = run_thread(state, share, index as u64);
            emptied.wait();
            ended.wait();
            replaced
        };
        let workers: Vec<_> = (0..arguments.threads).map(|index| scope.spawn(move || work(index))).collect();
        let memory_samples = sample_memory(state, Duration::from_millis(arguments.run_ms));
        state.is_over.store(true, Ordering::Relaxed);
        emptied.wait();
        let cpu = native::own_cpu_time() - cpu_before;
        let rested =
            state.free_allocations_in_slots().and_then(|()| allocate_slowly(Duration::from_millis(arguments.rest_ms)));
        let after_mib = mib(proc::own_resident_bytes());
        ended.wait();
        let joined = workers.into_iter().map(|worker| worker.join().unwrap_or(Err("a thread panicked".into())));
        let replaced = joined.sum::<Result<u64, Failure>>();
        rested.and(replaced).map(|replaced| (memory_samples, cpu, after_mib, replaced))
    })?;
    let (held, live): (Vec<f64>, Vec<f64>) = memory_samples.into_iter().unzip();
    let last = |values: &[f64], share: usize| stats::median(&values[values.len() - values.len() / share..]);
    Ok(serde_json::json!({
        "steady_mib": stats::median(&held[held.len() / 4..]),
        "last_quarter_mib": last(&held, 4),
        "live_mib": stats::median(&live[live.len() / 4..]),
        "after_mib": after_mib,
        "cpu_us_per_act": cpu.as_secs_f64() * 1e6 / replaced.max(1) as f64,
    }))
}

/// Samples two values for the given duration: the resident memory of the process, and the sum of the sizes of its live
/// allocations, both in MiB.
fn sample_memory(state: &SharedState, duration: Duration) -> Vec<(f64, f64)> {
    let begun = Instant::now();
    let mut memory_samples = Vec::with_capacity((duration.as_millis() / SAMPLE_INTERVAL.as_millis()) as usize + 2);
    while begun.elapsed() < duration || memory_samples.len() < 4 {
        thread::sleep(SAMPLE_INTERVAL.min(duration / 4));
        memory_samples.push((mib(proc::own_resident_bytes()), mib(state.live.load(Ordering::Relaxed))));
    }
    memory_samples
}

/// Runs one thread: makes allocations of `share` bytes in total, replaces them until the end, and frees all of them.
/// Returns the number of allocations that it made.
fn run_thread(state: &SharedState, share: usize, seed: u64) -> Result<u64, Failure> {
    let mut random = Rng::with_seed(seed);
    let (mut held, mut held_bytes, mut allocated) = (Vec::<TrackedAllocation>::with_capacity(1 << 16), 0, 0);
    while !state.is_over.load(Ordering::Relaxed) {
        let size = random_size(&mut random);
        while held_bytes + size > share && !held.is_empty() {
            let gone = held.swap_remove(random.usize(..held.len()));
            held_bytes -= gone.size;
            state.free(gone)?;
        }
        let tag = seed << 48 | allocated;
        let piece = TaggedAllocation::touched(size, tag).ok_or("malloc refused without a limit")?;
        allocated += 1;
        state.live.fetch_add(size as u64, Ordering::Relaxed);
        let new = TrackedAllocation { piece, size, tag };
        if random.usize(..ALLOCATIONS_PER_PASSED_ONE) == 0 {
            let place = &state.shared[random.usize(..PASSING_SLOTS)];
            let other = place.lock().unwrap_or_else(PoisonError::into_inner).replace(new);
            other.map_or(Ok(()), |other| state.free(other))?;
        } else {
            held_bytes += size;
            held.push(new);
        }
    }
    held.into_iter().try_for_each(|held| state.free(held))?;
    Ok(allocated)
}

/// Returns a random size whose logarithm is uniformly distributed.
fn random_size(random: &mut Rng) -> usize {
    let share = random.f64();
    (MIN_BYTES * (MAX_BYTES / MIN_BYTES).powf(share)) as usize
}

fn allocate_slowly(duration: Duration) -> Result<(), Failure> {
    let begun = Instant::now();
    while begun.elapsed() < duration {
        Load::Little.work_once(MIN_BYTES as usize)?;
    }
    Ok(())
}

impl SharedState {
    /// Frees an allocation. Fails if its tag has changed since it was made.
    fn free(&self, held: TrackedAllocation) -> Result<(), Failure> {
        self.live.fetch_sub(held.size as u64, Ordering::Relaxed);
        ensure(held.piece.tag() == held.tag, || format!("a piece of {} bytes lost its tag", held.size))
    }

    /// Frees the allocations that are still in the slots through which threads pass allocations to each other.
    fn free_allocations_in_slots(&self) -> Result<(), Failure> {
        let places = self.shared.iter();
        let mut all = places.filter_map(|place| place.lock().unwrap_or_else(PoisonError::into_inner).take());
        all.try_for_each(|held| self.free(held))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Random sizes must lie between minimum and maximum, and their median must be far below their mean. A short run
    /// must find the tag of each allocation unchanged, and must report its results.
    #[test]
    fn allocations_keep_their_tags_during_churn() {
        let mut random = Rng::with_seed(1);
        let sizes: Vec<f64> = (0..10_000).map(|_| random_size(&mut random) as f64).collect();
        assert!(sizes.iter().all(|&size| (MIN_BYTES..=MAX_BYTES).contains(&size)));
        assert!((4e3..40e3).contains(&stats::median(&sizes).expect("there are some")));

        let line = run(&ChurnArguments { threads: 2, mib: 32, run_ms: 40, rest_ms: 5 }).expect("all tags are there");
        assert!(line["cpu_us_per_act"].as_f64().is_some_and(|time| time > 0.0), "{line}");
        assert!(line["live_mib"].as_f64().is_some_and(|mib| mib > 1.0), "{line}");
    }
}
