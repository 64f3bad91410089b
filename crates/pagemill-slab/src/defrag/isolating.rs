//! Whether this thread is inside of the callback `isolate`, which runs under the lock of a node. Functions that would
//! wait for that lock then panic or do nothing.

use std::cell::Cell;

thread_local! {
    /// Whether this thread is inside of `isolate`.
    static IS_ISOLATING: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether this thread is inside of `isolate`, under the lock of a node.
pub(crate) fn is_isolating() -> bool {
    // Under shuttle all tasks share one thread.
    cfg!(not(shuttle)) && IS_ISOLATING.get()
}

/// Panics if this thread is inside of `isolate`. The caller's function would wait for a lock that this thread holds.
pub(crate) fn assert_not_isolating() {
    assert!(!is_isolating(), "a slab cache is called while its slab is locked for `isolate`");
}

/// Sets the thread's `IS_ISOLATING` flag until the value is dropped.
pub(crate) struct Isolating;

impl Isolating {
    pub fn begin() -> Self {
        IS_ISOLATING.set(true);
        Self
    }
}

impl Drop for Isolating {
    fn drop(&mut self) {
        IS_ISOLATING.set(false);
    }
}
