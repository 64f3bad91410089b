//! Fork handlers of the stores: a child never inherits a lock that another thread holds.

use super::file::claims;
use super::ring::regions;
use pagemill_sys::process;
use std::sync::OnceLock;

/// Acquires the locks of claims and regions before a fork, so that no other thread holds them during the fork.
extern "C" fn before_fork() {
    claims::CLAIMED_FILES.acquire_when(|_| true);
    regions::NOT_INHERITED.acquire_when(|_| true);
}

/// Releases the locks of claims and regions after a fork, in parent and child.
extern "C" fn after_fork() {
    regions::NOT_INHERITED.release();
    claims::CLAIMED_FILES.release();
}

/// Registers the fork handlers once. Must be called before the lock of the claims or of the regions is acquired.
pub(super) fn register() {
    static REGISTERED: OnceLock<()> = OnceLock::new();
    // Registration can fail for lack of memory. Then a child that is forked while a lock is held blocks forever.
    REGISTERED.get_or_init(|| drop(process::at_fork(before_fork, after_fork, after_fork)));
}
