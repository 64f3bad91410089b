//! What a fork does to page caches.
#![allow(unsafe_code)] // calls that only fork handlers may make

use super::Caches;
use pagemill_core::sync::Relaxed;

impl Caches {
    /// Releases the locks of [`Caches::acquire_for_fork`].
    ///
    /// # Safety
    ///
    /// Follows one call of it, by the same thread.
    pub unsafe fn release_after_fork(&self) {
        self.worker.release_after_fork();
        self.wakers.release();
        self.users.release();
    }

    /// In a fork child: marks all caches as inherited, and the background threads as not running.
    ///
    /// # Safety
    ///
    /// The process is a child with one thread, made since the last call, and holds no lock of these caches.
    pub unsafe fn begin_child(&self) {
        self.inherited.store(self.users.with(|users| users.len()), Relaxed);
        self.worker.begin_child();
        self.flusher.begin_child();
    }
}
