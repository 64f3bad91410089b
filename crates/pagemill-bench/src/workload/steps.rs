//! Threads that do the same work, step by step, for a while that all of them are measured in.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::Failure;

/// What one thread does.
pub trait Work {
    /// So many acts that the clock need not be looked at within.
    fn step(&mut self) -> Result<(), Failure>;

    /// Whether every answer was right.
    fn verdict(&mut self) -> Result<(), Failure>;
}

/// What the threads did while they were measured.
pub struct Times(Vec<Time>);

/// The acts of one thread, and how long it was at them.
#[derive(Clone, Copy)]
struct Time {
    nanoseconds: u64,
    acts: u64,
}

impl Times {
    /// Acts of all threads.
    pub fn acts(&self) -> u64 {
        self.0.iter().map(|time| time.acts).sum::<u64>().max(1)
    }

    /// Nanoseconds of an act, as its thread sees it.
    pub fn ns(&self) -> f64 {
        self.0.iter().map(|time| time.nanoseconds).sum::<u64>() as f64 / self.acts() as f64
    }

    /// Acts a second of one thread, or none without the thread.
    pub fn per_second(&self, thread: usize) -> f64 {
        self.0.get(thread).map_or(0.0, |time| time.acts as f64 * 1e9 / time.nanoseconds as f64)
    }
}

/// Has threads work for so long. Each makes its work itself, all begin together, and a quarter of the time goes by before any of it
/// counts.
pub fn timed<W: Work>(
    threads: usize,
    duration: Duration,
    step_acts: u64,
    make: impl Fn(usize) -> Result<W, Failure> + Sync,
) -> Result<Times, Failure> {
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
        // One at least, also where the time goes by before this thread has a processor.
        loop {
            work.step()?;
            steps += 1;
            if is_over.load(Ordering::Relaxed) {
                break;
            }
        }
        let time = Time { nanoseconds: begun.elapsed().as_nanos() as u64, acts: steps * step_acts };
        work.verdict().map(|()| time)
    };
    thread::scope(|scope| {
        let work = &work;
        let workers: Vec<_> = (0..threads).map(|index| scope.spawn(move || work(index))).collect();
        start.wait();
        thread::sleep(duration / 4);
        is_measured.store(true, Ordering::Relaxed);
        thread::sleep(duration);
        is_over.store(true, Ordering::Relaxed);
        let joined = workers.into_iter().map(|worker| worker.join());
        let times = joined.map(|result| result.unwrap_or_else(|_| Err("a thread panicked".to_owned().into())));
        times.collect::<Result<_, _>>().map(Times)
    })
}
