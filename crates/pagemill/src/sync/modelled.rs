//! What stands for atomics, waiting and the clock under `--cfg shuttle`: each use is a point at which another thread may go
//! on, as shuttle decides.
//!
//! Shuttle's own atomics cannot lie in memory mapped by hand; these are the real ones with a point before each access, so
//! zero bits are a value and layouts stay. Its threads are coroutines of one thread: whoever waits lets others go on, and
//! never sleeps. Outside of a test that shuttle runs all is as it is elsewhere.

use pagemill_sys::{clock, thread};
use shuttle::current::try_get_current_task;
use shuttle::rand::{Rng, thread_rng};
use std::cell::Cell;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Ticks of an epoch are so long; the clock goes on by one or by none.
const TICK_NS: u64 = 1 << 22;

fn is_modelled() -> bool {
    try_get_current_task().is_some()
}

/// Here another thread may go on.
pub(crate) fn point() {
    if is_modelled() {
        // A plain switch: unlike `yield_now` it says nothing about who should go on.
        shuttle::thread::sleep(Duration::ZERO);
    }
}

/// Lets others go on until what is waited for may have come.
pub(crate) fn pause() {
    if !is_modelled() {
        return thread::pause();
    }
    if std::thread::panicking() {
        // The others do not go on any more; what failed has been printed.
        std::process::abort();
    }
    shuttle::thread::yield_now();
}

pub(crate) use pause as spin_loop;

thread_local! {
    static NOW_NS: Cell<u64> = const { Cell::new(0) };
}

/// The model's time: the next tick may have begun since the last look, or not.
pub(crate) fn coarse_ns() -> u64 {
    if !is_modelled() {
        return clock::coarse_ns();
    }
    if thread_rng().gen_bool(0.25) {
        skip_ticks(1);
    }
    NOW_NS.get()
}

/// Lets time go by.
pub(crate) fn skip_ticks(ticks: u64) {
    NOW_NS.set(NOW_NS.get() + ticks * TICK_NS);
}

/// Sets the clock as each run of a model finds it.
#[cfg(test)]
pub(crate) fn reset_clock() {
    NOW_NS.set(TICK_NS);
}

macro_rules! atomic {
    ($name:ident, $integer:ty) => {
        #[repr(transparent)]
        #[derive(Debug, Default)]
        pub(crate) struct $name(std::sync::atomic::$name);

        #[allow(dead_code)] // of each what its users need
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
