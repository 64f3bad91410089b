//! Forks of a process with stores: no child finds a lock of theirs held by a thread that it does not have.

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

/// Hears of forks from here on. Called before one of the locks is taken for the first time.
pub(super) fn hear() {
    static HEARD: OnceLock<()> = OnceLock::new();
    // Without memory for it a child of such a moment waits for good; nothing else is lost.
    HEARD.get_or_init(|| drop(process::at_fork(before, after, after)));
}
