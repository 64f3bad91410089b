//! Code that the tests of volatile memory share.
#![allow(dead_code)] // no test file uses all of it
#![allow(unsafe_code)] // forks

use pagemill::Pagemill;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// Marks this far apart have different epochs.
pub const EPOCH: Duration = Duration::from_millis(12);

/// One for all tests of a process; never dropped.
pub fn pagemill() -> &'static Pagemill {
    static PAGEMILL: OnceLock<&'static Pagemill> = OnceLock::new();
    PAGEMILL.get_or_init(Pagemill::for_test)
}

/// Forks as a program with this Pagemill does; `is_right` must return true in the child, where it may neither allocate
/// nor panic.
#[track_caller]
pub fn assert_in_child(is_right: impl FnOnce() -> bool) {
    // SAFETY: `after_fork` follows on both sides, nothing else before it.
    unsafe { pagemill().before_fork() };
    // SAFETY: the child calls nothing that allocates, and ends by `_exit`.
    let child = unsafe { libc::fork() };
    // SAFETY: after `before_fork`.
    unsafe { pagemill().after_fork() };
    if child == 0 {
        // SAFETY: a new child, whose one thread this is.
        unsafe { pagemill().begin_child() };
        // SAFETY: ends the child without running anything else.
        unsafe { libc::_exit(i32::from(!is_right())) };
    }
    let mut status = 0;
    // SAFETY: waits for our own child.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0);
}

/// Tests that purge run one at a time: each would purge what another is about to check.
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}
