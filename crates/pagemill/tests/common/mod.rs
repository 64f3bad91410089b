//! What the tests of volatile memory share.
#![allow(dead_code)] // no test file uses all of it
#![allow(unsafe_code)] // forks

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

/// Forks, as a program with this Pagemill does; the child must find what it looks at to be right. There `is_right` may
/// neither allocate nor panic.
#[track_caller]
pub fn assert_in_child(is_right: impl FnOnce() -> bool) {
    pagemill().before_fork();
    // SAFETY: the child calls nothing that allocates, and ends by `_exit`.
    let child = unsafe { libc::fork() };
    pagemill().after_fork();
    if child == 0 {
        pagemill().begin_child();
        // SAFETY: ends the child without running anything else.
        unsafe { libc::_exit(i32::from(!is_right())) };
    }
    let mut status = 0;
    // SAFETY: waits for our own child.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0);
}

/// Tests that purge take turns: each would purge what another is about to look at.
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}
