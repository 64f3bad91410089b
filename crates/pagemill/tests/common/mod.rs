//! What the tests of volatile memory share.
#![allow(dead_code)] // no test file uses all of it

use pagemill::Pagemill;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// Marks so far apart have different epochs.
pub const EPOCH: Duration = Duration::from_millis(12);

/// One for all tests of a process: it is never taken down.
pub fn pagemill() -> &'static Pagemill {
    static PAGEMILL: OnceLock<&'static Pagemill> = OnceLock::new();
    PAGEMILL.get_or_init(Pagemill::for_test)
}

/// Tests that purge take turns: each would purge what another is about to look at.
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}
