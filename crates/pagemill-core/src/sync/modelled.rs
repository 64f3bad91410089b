//! Atomics, waits and the clock for builds with `--cfg shuttle`, the randomized concurrency tester.
//!
//! Shuttle's own atomics cannot lie in memory that is mapped manually. The types here wrap the standard atomics and let
//! shuttle switch threads before each access. So zero bits stay a valid value, and layouts stay the same. Shuttle's
//! threads are coroutines of one thread: a wait switches to another coroutine and never sleeps. Outside of a shuttle
//! test all types and functions behave as in other builds.

use pagemill_sys::{clock, thread};
use shuttle::current::try_get_current_task;
use shuttle::rand::{Rng, thread_rng};
use std::cell::Cell;
use std::ops::Deref;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Step of the simulated clock, in nanoseconds: one tick of the time stamps of volatile ranges.
const TICK_NS: u64 = 1 << 22;

/// Whether this thread runs inside a shuttle test.
fn is_shuttle_test() -> bool {
    try_get_current_task().is_some()
}

/// Lets shuttle's scheduler switch to another thread.
pub fn scheduling_point() {
    if is_shuttle_test() {
        // Unlike `yield_now`, a sleep of zero is no hint that this thread cannot progress.
        shuttle::thread::sleep(Duration::ZERO);
    }
}

/// Yields to other threads. A thread calls this function in a loop while it waits for a change.
pub fn pause() {
    if !is_shuttle_test() {
        return thread::pause();
    }
    if std::thread::panicking() {
        // After a panic shuttle runs no other thread, so the wait would never end. The panic has been printed.
        std::process::abort();
    }
    shuttle::thread::yield_now();
}

pub use pause as spin_loop;

thread_local! {
    /// The simulated time in nanoseconds.
    static NOW_NS: Cell<u64> = const { Cell::new(0) };
}

/// Returns the simulated time in nanoseconds. Each read advances the clock by one tick with a probability of 1/4.
pub fn coarse_ns() -> u64 {
    if !is_shuttle_test() {
        return clock::coarse_ns();
    }
    if thread_rng().gen_bool(0.25) {
        skip_ticks(1);
    }
    NOW_NS.get()
}

/// Advances the simulated clock by this number of ticks.
pub fn skip_ticks(ticks: u64) {
    NOW_NS.set(NOW_NS.get() + ticks * TICK_NS);
}

/// Resets the simulated clock to its start value. Each execution of a shuttle test begins with this call.
pub fn reset_clock() {
    NOW_NS.set(TICK_NS);
}

macro_rules! atomic {
    ($name:ident, $integer:ty) => {
        #[repr(transparent)]
        #[derive(Debug, Default)]
        pub struct $name(std::sync::atomic::$name);

        impl $name {
            pub const fn new(value: $integer) -> Self {
                Self(std::sync::atomic::$name::new(value))
            }

            /// As the standard method, but with a scheduling point before each access.
            pub fn fetch_update(
                &self,
                set_order: Ordering,
                fetch_order: Ordering,
                mut change: impl FnMut($integer) -> Option<$integer>,
            ) -> Result<$integer, $integer> {
                let mut seen = self.load(fetch_order);
                while let Some(new) = change(seen) {
                    match self.compare_exchange(seen, new, set_order, fetch_order) {
                        Ok(_) => return Ok(seen),
                        Err(now) => seen = now,
                    }
                }
                Err(seen)
            }
        }

        /// Every access to the standard atomic starts with a scheduling point.
        impl Deref for $name {
            type Target = std::sync::atomic::$name;

            fn deref(&self) -> &Self::Target {
                scheduling_point();
                &self.0
            }
        }
    };
}

atomic!(AtomicU32, u32);
atomic!(AtomicU64, u64);
atomic!(AtomicUsize, usize);
