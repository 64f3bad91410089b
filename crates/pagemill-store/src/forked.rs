//! Fork handlers for stores: a child never inherits a lock that a thread of the parent held.

use super::file::claims;
use super::ring::regions;
use pagemill_sys::process;
use std::sync::OnceLock;

extern "C" fn before() {
    claims::CLAIMED.acquire_when(|_| true);
    regions::KEPT.acquire_when(|_| true);
}

extern "C" fn after() {
    regions::KEPT.release();
    claims::CLAIMED.release();
}

/// Registers the fork handlers once. Called before either lock is taken for the first time.
pub(super) fn hear() {
    static HEARD: OnceLock<()> = OnceLock::new();
    // If registration fails for lack of memory, a child forked while a lock is held blocks forever; there is no other
    // effect.
    HEARD.get_or_init(|| drop(process::at_fork(before, after, after)));
}
