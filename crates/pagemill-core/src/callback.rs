//! Calls the program's code (stores, policies, completion callbacks) on threads that belong to this crate.
//!
//! An uncaught panic in such code would end the process, so this module catches and counts it. The calling code decides
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
