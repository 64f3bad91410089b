//! Calls the program's code (stores, policies, wakers, completion callbacks) where a panic must not unwind: on threads
//! of the library, and in calls that must do the rest of their work.
//!
//! On a thread of the library an uncaught panic would end the process; elsewhere it would skip the rest of the work, or
//! unwind through code that has nothing to do with it. So this module catches and counts it. The calling code decides
//! which store, policy or cache it stops using afterwards.

use crate::stats::{self, Counter};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Calls `act`; returns `None` if `act` panicked. In that case `act` may have done only a part of its work.
pub fn catch_panic<T>(act: impl FnOnce() -> T) -> Option<T> {
    match catch_unwind(AssertUnwindSafe(act)) {
        Ok(value) => Some(value),
        Err(panic) => {
            // The panic's payload is leaked, because its destructor may panic, too.
            std::mem::forget(panic);
            stats::add(Counter::BehindPanics, 1);
            None
        }
    }
}
