//! Page caches in a fork: releases the locks, and resets the state of the child.
#![allow(unsafe_code)] // calls that only fork handlers may make

use super::Caches;
use pagemill_core::sync::Relaxed;

impl Caches {
    /// Releases the locks of [`Caches::acquire_for_fork`].
    ///
    /// # Safety
    ///
    /// The same thread has called [`Caches::acquire_for_fork`] before, once for each call of this function.
    pub unsafe fn release_after_fork(&self) {
        self.worker.release_after_fork();
        self.wakers.release();
        self.users.release();
    }

    /// In a fork child: marks all caches as inherited, and the background threads as not running.
    ///
    /// # Safety
    ///
    /// The process is a fork child with one thread, which calls this once after the fork and holds no lock of these
    /// caches.
    pub unsafe fn begin_child(&self) {
        self.inherited.store(self.users.with(|users| users.len()), Relaxed);
        self.worker.begin_child();
        self.flusher.begin_child();
    }
}
