//! Slab caches as a part of an instance: what they do at a fork, at the exit of the process, and in a measurement of
//! memory.
#![allow(unsafe_code)] // calls that only fork handlers may make

use crate::alloc::thread_slots;
use crate::caches::Slabs;
use crate::read::epochs;
use pagemill_core::arena::place;
use pagemill_core::error::Result;
use pagemill_core::instance::{Instance, Part, PartOfProcess, Product};
use pagemill_core::sync::Relaxed;

impl Slabs {
    /// Creates an empty set of caches as a part of `instance`, so that reclaim, reports and commands of other processes
    /// reach the caches.
    ///
    /// # Errors
    ///
    /// [`System`](pagemill_core::Error::System).
    ///
    /// # Panics
    ///
    /// If the instance has slab caches already.
    pub fn of(instance: &'static Instance) -> Result<&'static Self> {
        let slabs: &'static Self = place(Self::new(instance.arena))?;
        instance.add(slabs);
        instance.account.register(slabs);
        instance.responder.add(slabs);
        #[cfg(feature = "control")]
        instance.control.set_slabs(slabs);
        Ok(slabs)
    }

    /// Returns the slab caches of this process; the first call creates them.
    ///
    /// # Errors
    ///
    /// As [`Instance::of_process`].
    pub fn of_process() -> Result<&'static Self> {
        static OF_PROCESS: PartOfProcess<Slabs> = PartOfProcess::new();
        OF_PROCESS.get_or_create(Self::of)
    }
}

impl Part for Slabs {
    fn product(&self) -> Product {
        Product::Slab
    }

    fn metadata_bytes(&self) -> u64 {
        let of_nodes = self.nodes.metadata_bytes();
        of_nodes + self.shared.get().map_or(0, |shared| shared.blocks.metadata_bytes() + shared.resident_bytes())
    }

    fn acquire_for_fork(&self) {
        self.worker.acquire_for_fork();
        self.nodes.acquire_for_fork();
        self.caches.acquire_when(|_| true);
        if let Some(shared) = self.shared.get() {
            shared.ids.acquire_when(|_| true);
            shared.free_handle_tables.acquire_when(|_| true);
            shared.blocks.acquire_for_fork();
        }
    }

    unsafe fn release_after_fork(&self) {
        if let Some(shared) = self.shared.get() {
            shared.blocks.release_after_fork();
            shared.free_handle_tables.release();
            shared.ids.release();
        }
        self.caches.release();
        self.nodes.release_after_fork();
        self.worker.release_after_fork();
    }

    /// In a fork child: forgets the caches, which belong to the parent, and the background thread, which does not exist
    /// in the child.
    unsafe fn begin_child(&self) {
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

    /// Stops background defragmentation, because exit destroys objects that the program's callbacks use.
    fn at_exit(&self) {
        self.defrag_by_hand();
    }
}
