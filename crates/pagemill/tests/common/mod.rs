//! Helpers that several test files share, mostly tests of volatile memory.
#![allow(dead_code)] // each test file uses a part of this module
#![allow(unsafe_code)] // forks

use pagemill_testbed::Testbed;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// Time between two marks after which their epochs differ. An epoch is the time of a mark in ticks of 4.2 ms.
pub const EPOCH_DISTANCE: Duration = Duration::from_millis(12);

/// Returns the Pagemill instance that all tests of this process share. It is never dropped.
pub fn pagemill() -> &'static Testbed {
    static PAGEMILL: OnceLock<&'static Testbed> = OnceLock::new();
    PAGEMILL.get_or_init(Testbed::for_test)
}

/// Forks as a program that uses this instance does, and asserts that `is_right` returns true in the child. `is_right`
/// must neither allocate nor panic.
#[track_caller]
pub fn assert_in_child(is_right: impl FnOnce() -> bool) {
    // SAFETY: `after_fork` follows on both sides, with nothing else before it.
    unsafe { pagemill().instance.before_fork() };
    // SAFETY: the child calls nothing that allocates, and ends by `_exit`.
    let child = unsafe { libc::fork() };
    // SAFETY: called after `before_fork`.
    unsafe { pagemill().instance.after_fork() };
    if child == 0 {
        // SAFETY: the process is a new child, and this is its only thread.
        unsafe { pagemill().instance.begin_child() };
        // SAFETY: ends the child without running anything else.
        unsafe { libc::_exit(i32::from(!is_right())) };
    }
    let mut status = 0;
    // SAFETY: waits for the child process created above.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0);
}

/// Lets one test at a time run, because a purge in one test would purge the ranges that another test checks.
pub fn exclusive_test() -> MutexGuard<'static, ()> {
    static RUNNING_TEST: Mutex<()> = Mutex::new(());
    RUNNING_TEST.lock().unwrap_or_else(PoisonError::into_inner)
}
