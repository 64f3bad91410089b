//! When nobody can be in a node any more: epochs of our own.
//!
//! Not those of the default collector, which the program may use as well: retiring a node gives back what is due, under the
//! lock of an array, and destructors of the program must not run there.

use crossbeam_epoch::{Collector, Guard, LocalHandle};
use std::sync::OnceLock;

fn collector() -> &'static Collector {
    static COLLECTOR: OnceLock<Collector> = OnceLock::new();
    COLLECTOR.get_or_init(Collector::new)
}

thread_local! {
    static HANDLE: LocalHandle = collector().register();
}

/// For who reads: until the guard goes, no node that he comes to is used for anything else.
///
/// Cost: some nanoseconds, no shared line written. Others wait for nothing; nodes pile up for as long as it is kept.
#[inline]
pub fn pin() -> Guard {
    // A thread that is ending may still read.
    HANDLE.try_with(LocalHandle::pin).unwrap_or_else(|_| collector().register().pin())
}
