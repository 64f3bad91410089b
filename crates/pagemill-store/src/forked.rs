//! Fork handlers of the stores: a child never inherits a lock that another thread holds.

use super::file::claims;
use super::ring::regions;
use pagemill_sys::process;
use std::sync::OnceLock;

/// Acquires the locks before a fork.
extern "C" fn before() {
    claims::CLAIMED.acquire_when(|_| true);
    regions::NOT_INHERITED.acquire_when(|_| true);
}

/// Releases the locks after a fork, in parent and child.
extern "C" fn after() {
    regions::NOT_INHERITED.release();
    claims::CLAIMED.release();
}

/// Registers the fork handlers once. Must be called before the lock of the claims or of the regions is acquired.
pub(super) fn register() {
    static REGISTERED: OnceLock<()> = OnceLock::new();
    // Registration can fail for lack of memory. Then a child that is forked while a lock is held blocks forever.
    REGISTERED.get_or_init(|| drop(process::at_fork(before, after, after)));
}
