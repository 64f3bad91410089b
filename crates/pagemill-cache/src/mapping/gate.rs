//! A gate of a file: shared for writers, exclusive for removing pages.
//!
//! Held for one folio's copy at a time, never while a caller waits for anything else. A fault handler takes no gate:
//! the caller's buffer may lie in a view of the same file.

use pagemill_core::sync::{Acquire, AtomicU32, Backoff, Relaxed, Release};

/// A thread holds the gate exclusively, or waits for that.
const EXCLUSIVE: u32 = 1 << 31;

#[derive(Default)]
pub(super) struct Gate(AtomicU32);

/// The gate, held shared.
pub(super) struct SharedGate<'gate>(&'gate Gate);

/// The gate, held exclusively.
pub(super) struct ExclusiveGate<'gate>(&'gate Gate);

impl Gate {
    #[inline]
    pub fn shared(&self) -> SharedGate<'_> {
        if self.0.fetch_add(1, Acquire) & EXCLUSIVE != 0 {
            self.wait_for_exclusive();
        }
        SharedGate(self)
    }

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

    /// Takes the gate exclusively. Waits for shared holders, which copy one folio at most.
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
        self.0.0.fetch_sub(1, Release);
    }
}

impl Drop for ExclusiveGate<'_> {
    fn drop(&mut self) {
        // Subtracts, because a thread that tries the gate shared adds and subtracts one meanwhile.
        self.0.0.fetch_sub(EXCLUSIVE, Release);
    }
}
