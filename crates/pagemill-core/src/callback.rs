//! Calls of the program's code on threads of this crate: stores, policies, completion callbacks.
//!
//! A panic there would end the process, because no caller can catch it. It is caught and counted here. The calling code
//! decides what to stop using afterwards.

use crate::stats::{self, Counter};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Calls `act`; returns `None` if it panicked. The caller must handle a half-finished state.
pub fn contain<T>(act: impl FnOnce() -> T) -> Option<T> {
    match catch_unwind(AssertUnwindSafe(act)) {
        Ok(value) => Some(value),
        Err(panic) => {
            // Forgotten, because its destructor may panic.
            std::mem::forget(panic);
            stats::add(Counter::BehindPanics, 1);
            None
        }
    }
}
