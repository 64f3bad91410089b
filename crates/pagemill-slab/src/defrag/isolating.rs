//! Records whether this thread is inside of the callback `isolate` of a slab cache, which runs under the lock of a
//! node. Inside of `isolate`, functions that would wait for that lock panic or do nothing.

use std::cell::Cell;

thread_local! {
    /// Whether this thread is inside of the callback `isolate`.
    static IS_ISOLATING: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether this thread is inside of the callback `isolate`, and so holds the lock of a node.
pub(crate) fn is_isolating() -> bool {
    // Under shuttle all tasks share one thread.
    cfg!(not(shuttle)) && IS_ISOLATING.get()
}

/// Panics if this thread is inside of the callback `isolate`, because the calling function would wait for a lock that
/// the thread itself holds.
pub(crate) fn assert_not_isolating() {
    assert!(!is_isolating(), "a slab cache is called while its slab is locked for `isolate`");
}

/// Marks this thread as inside of the callback `isolate` until the value is dropped.
pub(crate) struct IsolatingGuard;

impl IsolatingGuard {
    pub fn begin() -> Self {
        IS_ISOLATING.set(true);
        Self
    }
}

impl Drop for IsolatingGuard {
    fn drop(&mut self) {
        IS_ISOLATING.set(false);
    }
}
