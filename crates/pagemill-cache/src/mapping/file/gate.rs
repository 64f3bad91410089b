//! The gate of a file: a lock that writers hold shared, and removals of pages exclusively.
//!
//! The gate is held for the copy of one folio, never while a thread waits for anything else. A page fault handler does
//! not take it: a page fault in the caller's buffer may be resolved by a read of the same file, and the copy would then
//! deadlock.

use pagemill_core::sync::{Acquire, AtomicU32, Backoff, Relaxed, Release};

/// Bit of a [`Gate`]: a thread holds the gate exclusively, or waits until the shared holders have released it.
const EXCLUSIVE: u32 = 1 << 31;

/// The gate of a file: a lock that writers hold shared, and removals of pages exclusively. The word has the number of
/// shared holders, and the bit [`EXCLUSIVE`].
#[derive(Default)]
pub(crate) struct Gate(AtomicU32);

/// A guard: while it exists, this thread holds the gate of a file shared.
pub(crate) struct SharedGate<'gate>(&'gate Gate);

/// A guard: while it exists, this thread holds the gate of a file exclusively.
pub(crate) struct ExclusiveGate<'gate>(&'gate Gate);

impl Gate {
    /// Takes the file's gate (its lock) shared. Waits while a thread holds the gate exclusively.
    #[inline]
    pub fn shared(&self) -> SharedGate<'_> {
        if self.0.fetch_add(1, Acquire) & EXCLUSIVE != 0 {
            self.wait_for_exclusive();
        }
        SharedGate(self)
    }

    /// As [`Gate::shared`], but returns `None` at once if a thread holds the gate exclusively.
    pub fn try_shared(&self) -> Option<SharedGate<'_>> {
        if self.0.fetch_add(1, Acquire) & EXCLUSIVE == 0 {
            return Some(SharedGate(self));
        }
        self.0.fetch_sub(1, Release);
        None
    }

    /// Waits until no thread holds the gate exclusively, and then holds it shared.
    #[cold]
    fn wait_for_exclusive(&self) {
        let mut backoff = Backoff::new();
        loop {
            self.0.fetch_sub(1, Release);
            while self.0.load(Relaxed) & EXCLUSIVE != 0 {
                backoff.pause();
            }
            if self.0.fetch_add(1, Acquire) & EXCLUSIVE == 0 {
                return;
            }
        }
    }

    /// Takes the file's gate (its lock) exclusively. Waits for shared holders, each of which copies one folio at most.
    pub fn exclusive(&self) -> ExclusiveGate<'_> {
        let mut backoff = Backoff::new();
        loop {
            let seen = self.0.load(Relaxed);
            if seen & EXCLUSIVE == 0 && self.0.compare_exchange(seen, seen | EXCLUSIVE, Acquire, Relaxed).is_ok() {
                break;
            }
            backoff.pause();
        }
        while self.0.load(Acquire) != EXCLUSIVE {
            backoff.pause();
        }
        ExclusiveGate(self)
    }
}

impl Drop for SharedGate<'_> {
    #[inline]
    fn drop(&mut self) {
        let before = self.0.0.fetch_sub(1, Release);
        debug_assert!(before & !EXCLUSIVE > 0, "this holder is counted");
    }
}

impl Drop for ExclusiveGate<'_> {
    fn drop(&mut self) {
        // Subtracts instead of storing 0, because threads that try to take the gate shared add and subtract one
        // meanwhile.
        let before = self.0.0.fetch_sub(EXCLUSIVE, Release);
        debug_assert!(before & EXCLUSIVE != 0, "the gate is held exclusively");
    }
}
