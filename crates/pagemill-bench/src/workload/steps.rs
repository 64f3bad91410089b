//! Runs threads that do the same kind of work in steps. Measures them over an interval in which all of them run.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use super::Failure;

/// The work of one thread, which is divided into steps.
pub trait StepWork {
    /// Makes one step, which has a fixed number of operations. No clock is read during a step.
    fn step(&mut self) -> Result<(), Failure>;

    /// Returns an error if any operation of this thread had a wrong result.
    fn check_results(&mut self) -> Result<(), Failure>;
}

impl StepWork for Box<dyn StepWork + '_> {
    fn step(&mut self) -> Result<(), Failure> {
        (**self).step()
    }

    fn check_results(&mut self) -> Result<(), Failure> {
        (**self).check_results()
    }
}

/// For each thread, its number of operations in the measured interval and the time that they took.
pub struct ThreadTimes(Vec<ThreadTime>);

/// Number of operations that one thread made in the measured interval, and the time that they took.
#[derive(Clone, Copy)]
struct ThreadTime {
    nanoseconds: u64,
    operations: u64,
}

impl ThreadTimes {
    pub fn operations(&self) -> u64 {
        self.0.iter().map(|time| time.operations).sum::<u64>().max(1)
    }

    /// Returns the mean time that a thread needs for one operation, in nanoseconds.
    pub fn ns_per_operation(&self) -> f64 {
        self.0.iter().map(|time| time.nanoseconds).sum::<u64>() as f64 / self.operations() as f64
    }

    /// Returns the operations per second of one thread; 0 if there is no thread with this index.
    pub fn per_second(&self, thread: usize) -> f64 {
        self.0.get(thread).map_or(0.0, |time| time.operations as f64 * 1e9 / time.nanoseconds as f64)
    }
}

/// Waits for the end of a thread and returns its result. A panic of the thread is returned as an error.
pub fn join<T>(worker: ScopedJoinHandle<'_, Result<T, Failure>>) -> Result<T, Failure> {
    worker.join().unwrap_or_else(|_| Err("a thread panicked".into()))
}

fn join_all<T>(workers: Vec<ScopedJoinHandle<'_, Result<T, Failure>>>) -> Result<Vec<T>, Failure> {
    // All threads are joined before the first error is returned.
    let results: Vec<_> = workers.into_iter().map(join).collect();
    results.into_iter().collect()
}

/// Runs `work` in `threads` threads at once, and passes each call the index of its thread. Returns the results in the
/// order of the indexes.
pub fn run_in_threads<T: Send>(
    threads: usize,
    work: impl Fn(usize) -> Result<T, Failure> + Sync,
) -> Result<Vec<T>, Failure> {
    let work = &work;
    thread::scope(|scope| join_all((0..threads).map(|index| scope.spawn(move || work(index))).collect()))
}

/// Runs threads that start together. They warm up for a quarter of `duration` and are then measured for `duration`.
///
/// Thread `i` runs the steps of the work that `make(i)` returns. Each step counts as `operations_per_step` operations.
pub fn measure_threads<W: StepWork>(
    threads: usize,
    duration: Duration,
    operations_per_step: u64,
    make: impl Fn(usize) -> Result<W, Failure> + Sync,
) -> Result<ThreadTimes, Failure> {
    let (is_measured, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
    let start = Barrier::new(threads + 1);
    let work = |index| {
        let made = make(index);
        start.wait();
        let mut work = made?;
        while !is_measured.load(Ordering::Relaxed) {
            work.step()?;
        }
        let (begun, mut steps) = (Instant::now(), 0);
        // Each thread makes at least one step, even if the time is over before it gets a CPU.
        loop {
            work.step()?;
            steps += 1;
            if is_over.load(Ordering::Relaxed) {
                break;
            }
        }
        let time =
            ThreadTime { nanoseconds: begun.elapsed().as_nanos() as u64, operations: steps * operations_per_step };
        work.check_results().map(|()| time)
    };
    thread::scope(|scope| {
        let work = &work;
        let workers: Vec<_> = (0..threads).map(|index| scope.spawn(move || work(index))).collect();
        start.wait();
        thread::sleep(duration / 4);
        is_measured.store(true, Ordering::Relaxed);
        thread::sleep(duration);
        is_over.store(true, Ordering::Relaxed);
        join_all(workers).map(ThreadTimes)
    })
}
