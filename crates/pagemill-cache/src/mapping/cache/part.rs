//! Page caches as a part of an `Instance`: what they do at a fork and at a measurement of memory.
#![allow(unsafe_code)] // calls that only fork handlers may make

use crate::IndexNodes;
use crate::mapping::Caches;
use pagemill_core::arena::place;
use pagemill_core::epoch;
use pagemill_core::error::Result;
use pagemill_core::instance::{Instance, Part, PartOfProcess, Product};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::Relaxed;
use pagemill_slab::Slabs;
use std::sync::atomic::Ordering::SeqCst;

impl Caches {
    /// Creates an empty list of caches as a part of `instance`: reclaim, reports and commands of other processes reach
    /// these caches. The nodes of the files' indices are objects of `slabs`.
    ///
    /// # Errors
    ///
    /// [`System`](pagemill_core::Error::System).
    ///
    /// # Panics
    ///
    /// If the instance has page caches already.
    pub fn of(instance: &'static Instance, slabs: &'static Slabs) -> Result<&'static Self> {
        let caches: &'static Self = place(Self::new(instance.arena, instance.helper, place(IndexNodes::new(slabs))?))?;
        instance.add(caches);
        instance.account.register(caches);
        instance.responder.add(caches);
        Ok(caches)
    }

    /// Returns the page caches of this process; the first call creates them.
    ///
    /// # Errors
    ///
    /// As [`Instance::of_process`].
    pub fn of_process() -> Result<&'static Self> {
        static OF_PROCESS: PartOfProcess<Caches> = PartOfProcess::new();
        let slabs = Slabs::of_process()?;
        OF_PROCESS.get_or_create(|instance| Self::of(instance, slabs))
    }
}

impl Part for Caches {
    fn product(&self) -> Product {
        Product::Cache
    }

    /// Returns the resident bytes of frames, eviction orders and index nodes of all caches.
    fn metadata_bytes(&self) -> u64 {
        self.frames_bytes() + self.forests.node_bytes()
    }

    fn measure(&self) {
        stats::set(Counter::CacheFrames, self.frames_bytes());
        stats::set(Counter::CacheIndex, self.forests.node_bytes() + self.files_bytes());
    }

    fn prefault(&self) -> bool {
        self.grow_ahead()
    }

    fn acquire_for_fork(&self) {
        self.users.acquire_when(|_| true);
        self.wakers.acquire_when(|_| true);
        self.worker.acquire_for_fork();
    }

    unsafe fn release_after_fork(&self) {
        self.worker.release_after_fork();
        self.wakers.release();
        self.users.release();
    }

    /// In a fork child: marks all caches as inherited, and the background threads as not running.
    unsafe fn begin_child(&self) {
        // First, before the child maps memory.
        crate::mapping::view::registry::begin_child();
        // SAFETY: the caller's promise.
        unsafe { epoch::begin_child() };
        self.pools().for_each(|pool| pool.begin_child());
        self.inherited.store(self.users.with(|users| users.len()), Relaxed);
        self.worker.begin_child();
        self.flusher.is_running.store(false, SeqCst);
    }
}
