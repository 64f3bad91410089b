//! Slab caches in a fork: releases the locks, and resets the state of the child.
#![allow(unsafe_code)] // calls that only fork handlers may make

use super::{Slabs, epochs, thread_slots};
use pagemill_core::sync::Relaxed;

impl Slabs {
    /// Releases the locks of [`Slabs::acquire_for_fork`].
    ///
    /// # Safety
    ///
    /// Follows one call of [`Slabs::acquire_for_fork`] by the same thread.
    pub unsafe fn release_after_fork(&self) {
        if let Some(shared) = self.shared.get() {
            shared.blocks.release_after_fork();
            shared.free_handle_tables.release();
            shared.ids.release();
        }
        self.caches.release();
        self.nodes.release_after_fork();
        self.worker.release_after_fork();
    }

    /// Resets the state in a fork child: removes the caches, which belong to the parent, and the background thread,
    /// which does not exist in the child.
    ///
    /// # Safety
    ///
    /// The process is a child with one thread, created since the last call, and holds no lock of these caches.
    pub unsafe fn begin_child(&self) {
        self.worker.begin_child();
        thread_slots::begin_child();
        epochs::begin_child();
        if let Some(shared) = self.shared.get() {
            shared.blocks.begin_child();
        }
        // The child leaks its references to the caches, so that it never drops an owner of the parent.
        self.caches.with(|caches| std::mem::forget(std::mem::take(caches)));
        self.kept_bytes.store(0, Relaxed);
    }
}
