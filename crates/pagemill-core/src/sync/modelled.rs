//! Replacements for atomics, waiting and the clock under `--cfg shuttle`. Each access is a point at which shuttle may
//! switch to another thread.
//!
//! Shuttle's own atomics cannot lie in memory that is mapped manually. These are the standard atomics with a switch
//! point before each access, so zero bits are a valid value and layouts stay the same. Shuttle's threads are coroutines
//! of one thread: a wait switches to another coroutine and never sleeps. Outside a shuttle test everything behaves as
//! usual.

use pagemill_sys::{clock, thread};
use shuttle::current::try_get_current_task;
use shuttle::rand::{Rng, thread_rng};
use std::cell::Cell;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Length of an epoch tick; the clock advances by one tick or by none.
const TICK_NS: u64 = 1 << 22;

fn is_modelled() -> bool {
    try_get_current_task().is_some()
}

/// A point at which another thread may run.
pub fn point() {
    if is_modelled() {
        // A plain switch: unlike `yield_now` it gives the scheduler no hint.
        shuttle::thread::sleep(Duration::ZERO);
    }
}

/// Lets other threads run until the awaited change may have happened.
pub fn pause() {
    if !is_modelled() {
        return thread::pause();
    }
    if std::thread::panicking() {
        // The other threads no longer run; the failure has been printed.
        std::process::abort();
    }
    shuttle::thread::yield_now();
}

pub use pause as spin_loop;

thread_local! {
    static NOW_NS: Cell<u64> = const { Cell::new(0) };
}

/// The model's time: since the last read the next tick may have begun, or not.
pub fn coarse_ns() -> u64 {
    if !is_modelled() {
        return clock::coarse_ns();
    }
    if thread_rng().gen_bool(0.25) {
        skip_ticks(1);
    }
    NOW_NS.get()
}

/// Advances the clock.
pub fn skip_ticks(ticks: u64) {
    NOW_NS.set(NOW_NS.get() + ticks * TICK_NS);
}

/// Resets the clock to the start value of each run of a model.
pub fn reset_clock() {
    NOW_NS.set(TICK_NS);
}

macro_rules! atomic {
    ($name:ident, $integer:ty) => {
        #[repr(transparent)]
        #[derive(Debug, Default)]
        pub struct $name(std::sync::atomic::$name);

        #[allow(dead_code)] // each type has what its users need
        impl $name {
            pub const fn new(value: $integer) -> Self {
                Self(std::sync::atomic::$name::new(value))
            }

            pub fn load(&self, order: Ordering) -> $integer {
                point();
                self.0.load(order)
            }

            pub fn store(&self, value: $integer, order: Ordering) {
                point();
                self.0.store(value, order);
            }

            pub fn swap(&self, value: $integer, order: Ordering) -> $integer {
                point();
                self.0.swap(value, order)
            }

            pub fn fetch_add(&self, value: $integer, order: Ordering) -> $integer {
                point();
                self.0.fetch_add(value, order)
            }

            pub fn fetch_sub(&self, value: $integer, order: Ordering) -> $integer {
                point();
                self.0.fetch_sub(value, order)
            }

            pub fn fetch_max(&self, value: $integer, order: Ordering) -> $integer {
                point();
                self.0.fetch_max(value, order)
            }

            pub fn fetch_and(&self, value: $integer, order: Ordering) -> $integer {
                point();
                self.0.fetch_and(value, order)
            }

            pub fn fetch_or(&self, value: $integer, order: Ordering) -> $integer {
                point();
                self.0.fetch_or(value, order)
            }

            pub fn compare_exchange(
                &self,
                current: $integer,
                new: $integer,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$integer, $integer> {
                point();
                self.0.compare_exchange(current, new, success, failure)
            }

            pub fn compare_exchange_weak(
                &self,
                current: $integer,
                new: $integer,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$integer, $integer> {
                self.compare_exchange(current, new, success, failure)
            }
        }
    };
}

atomic!(AtomicU32, u32);
atomic!(AtomicU64, u64);
atomic!(AtomicUsize, usize);
