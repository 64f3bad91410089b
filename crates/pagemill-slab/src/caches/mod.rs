//! [`Slabs`]: all slab caches of a process.

#[cfg(test)]
pub(crate) mod tests;

use crate::alloc::asymmetric_lock::Barriers;
use crate::alloc::engine::{Engine, ObjectSpec};
use crate::alloc::settings::Settings;
use crate::alloc::shared::SharedState;
use crate::cache::Cache;
use crate::defrag::isolating::is_isolating;
use crate::defrag::passes::Progress;
use crate::defrag::worker::{VISIT_TIMEOUT_NS, Worker, is_worker};
use crate::report::info::{self, SlabInfo};
use crate::xnodes::{IndexNodes, NodeCache, NodeIndex, NodeMemory};
use pagemill_core::arena::{Arena, place};
use pagemill_core::error::Result;
use pagemill_core::reclaim::{Cost, Shrinker, Urgency};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{Backoff, Guarded, Relaxed};
use pagemill_sys::clock;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

/// All slab caches of a process.
///
/// ```
/// use pagemill_slab::{Settings, SlabKind, Slabs};
///
/// let slabs = Slabs::of_process()?;
/// let cache = slabs.fixed::<u64>(Settings::new("numbers"))?;
/// let info = slabs.list().into_iter().find(|info| &*info.name == "numbers").unwrap();
/// assert_eq!(info.kind, SlabKind::Fixed);
/// # drop(cache);
/// # Ok::<(), pagemill_core::Error>(())
/// ```
pub struct Slabs {
    pub(crate) arena: &'static Arena,
    /// The state that all caches share. Created with the first cache.
    pub(crate) shared: OnceLock<&'static SharedState>,
    /// All slab caches in order of creation, each with a unique id.
    pub(crate) caches: Guarded<Vec<(u64, Weak<dyn Cache>)>>,
    /// Number of slab caches that were created so far. The next cache gets this number as its id.
    pub(crate) created_count: AtomicU64,
    /// Bytes of idle blocks and empty slabs that caches keep for their next objects, as of the last
    /// [`Shrinker::measure`].
    pub(crate) kept_bytes: AtomicU64,
    pub(crate) worker: Worker,
    /// The cache of index nodes, and the `SharedState` that only this cache uses.
    pub(crate) nodes: IndexNodes,
}

impl Slabs {
    /// Creates an empty set of caches. Reserves neither memory nor addresses before the first cache.
    pub fn new(arena: &'static Arena) -> Self {
        Self {
            arena,
            shared: OnceLock::new(),
            caches: Guarded::new(Vec::new()),
            created_count: AtomicU64::new(0),
            kept_bytes: AtomicU64::new(0),
            worker: Worker::default(),
            nodes: IndexNodes::default(),
        }
    }

    /// Creates the engine of a new slab cache with a new cache id, wraps the engine with `inner`, and registers the
    /// cache.
    pub(crate) fn create_cache<M: Cache + 'static>(
        &'static self,
        settings: Settings,
        object: ObjectSpec,
        inner: impl FnOnce(Engine) -> M,
    ) -> Result<Arc<M>> {
        let shared = self.caches.with(|_| self.shared())?;
        let cache = Arc::new(inner(Engine::new(shared, settings, object)?));
        self.register(&cache);
        Ok(cache)
    }

    /// Returns the cache of index nodes of this process. The first call, also in a fork child, creates the cache, and
    /// creates the index with `make`.
    ///
    /// # Errors
    ///
    /// [`Error::NoAddresses`](pagemill_core::Error::NoAddresses), [`Error::System`](pagemill_core::Error::System).
    pub fn nodes_of<I: NodeIndex>(
        &'static self,
        make: impl FnOnce(&'static NodeMemory) -> Result<&'static I>,
    ) -> Result<&'static NodeCache> {
        let (cache, is_new) = self.nodes.get_or_create(|| self.caches.with(|_| self.shared()), make)?;
        if is_new {
            // Registration may start a thread, so it runs without the lock of `nodes`.
            self.register(&cache.inner);
        }
        Ok(cache)
    }

    /// Returns the resident bytes of index nodes.
    pub fn node_bytes(&self) -> u64 {
        self.nodes.resident_bytes()
    }

    /// Registers a cache. The cache must be complete, because other threads may call it from now on.
    pub(crate) fn register<M: Cache + 'static>(&'static self, cache: &Arc<M>) {
        let weak: Weak<M> = Arc::downgrade(cache);
        self.caches.with(|caches| {
            caches.retain(|(_, cache)| cache.strong_count() > 0);
            caches.push((self.created_count.fetch_add(1, Relaxed), weak));
        });
        if cache.engine().object.is_movable() {
            self.worker.start(self);
        }
    }

    /// Removes a cache from the list of caches. Waits at most one second for other threads that use the cache: the
    /// background thread, the governor, and threads that visit all caches. Afterwards the caller usually has the last
    /// reference, so the caller's thread runs the destructors of the cache.
    pub(crate) fn unregister<M: Cache + 'static>(&self, cache: &Arc<M>) {
        let engine = cache.engine();
        if engine.check_generation().is_err() {
            return;
        }
        let is_it = |other: &Weak<dyn Cache>| std::ptr::addr_eq(other.as_ptr(), Arc::as_ptr(cache));
        self.caches.with(|caches| caches.retain(|(_, other)| !is_it(other)));
        // No later round finds the cache, so a request that has not begun must fail.
        engine.is_unregistered.store(true, SeqCst);
        let mut backoff = Backoff::new();
        while Arc::strong_count(cache) > 1 && !is_worker() && backoff.waited_ns() < VISIT_TIMEOUT_NS {
            backoff.pause();
        }
    }

    /// Returns the state that all caches share. The first call creates it. The caller holds the lock of `caches`.
    pub(crate) fn shared(&'static self) -> Result<&'static SharedState> {
        if let Some(shared) = self.shared.get() {
            return Ok(shared);
        }
        let shared = place(SharedState::new(self.arena, &self.worker, Barriers::of_process())?)?;
        Ok(self.shared.get_or_init(|| shared))
    }

    /// Makes these slab caches behave as if the kernel refused the process-wide barrier. Must be called before the
    /// first cache is created.
    #[cfg(test)]
    pub(crate) fn refuse_barrier(&'static self) {
        let shared = place(SharedState::new(self.arena, &self.worker, Barriers::BothSides).unwrap()).unwrap();
        assert!(self.shared.set(shared).is_ok());
    }

    /// Returns all caches that still exist, in order of creation.
    pub(crate) fn caches(&self) -> Vec<Arc<dyn Cache>> {
        self.caches.with(|caches| caches.iter().filter_map(|(_, cache)| cache.upgrade()).collect())
    }

    pub(crate) fn cache_count(&self) -> usize {
        self.caches.with(|caches| caches.len())
    }

    pub(crate) fn cache_at(&self, at: usize) -> Option<Arc<dyn Cache>> {
        self.caches.with(|caches| caches.get(at).and_then(|(_, cache)| cache.upgrade()))
    }

    /// Returns the statistics of all caches of this process, without the caches of its parent process. Caches with
    /// movable objects come first, and each kind is sorted by name.
    pub fn list(&self) -> Vec<SlabInfo> {
        let mut list: Vec<SlabInfo> = self.caches().iter().filter_map(|cache| info::of(&**cache).ok()).collect();
        list.sort_by_cached_key(SlabInfo::sort_key);
        list
    }

    /// Stops background defragmentation. Afterwards caches are defragmented only by calls such as
    /// [`Slabs::defrag_step`], and no callback runs on Pagemill's own thread. Waits at most one second for the step
    /// that is in progress.
    pub fn defrag_by_hand(&self) {
        self.worker.stop();
    }

    /// Runs one step of defragmentation over all caches, for about `budget` altogether. Empties the slabs and blocks of
    /// which less than their cache's `defrag_used_ratio` is used. A program calls `defrag_step` in a thread of
    /// its own, or when it is idle. The step calls the owners of objects, so the caller must hold no lock that an owner
    /// may wait for. Returns the progress of all caches together.
    pub fn defrag_step(&self, budget: Duration) -> Progress {
        let began_ns = clock::fine_ns();
        let mut whole = Progress { is_done: true, ..Progress::default() };
        for cache in self.caches().iter().filter(|cache| cache.engine().check_generation().is_ok()) {
            let left = budget.saturating_sub(Duration::from_nanos(clock::fine_ns() - began_ns));
            // A cache that another thread is defragmenting is skipped.
            let part = if left.is_zero() { Ok(Progress::default()) } else { cache.defrag(left) };
            whole.add(&part.unwrap_or_default());
        }
        whole
    }
}

/// Methods that only tests of the index use.
#[cfg(any(test, feature = "test-util"))]
impl Slabs {
    /// Returns whether the background thread sleeps without a timeout, after a round that found nothing to do.
    #[cfg(not(shuttle))]
    pub fn is_asleep(&self) -> bool {
        self.worker.is_asleep()
    }

    /// Returns the number of caches.
    pub fn count(&self) -> usize {
        self.cache_count()
    }
}

impl Shrinker for Slabs {
    fn name(&self) -> &'static str {
        "slabs"
    }

    fn cost(&self) -> Cost {
        Cost::Nothing
    }

    fn may_nest(&self) -> bool {
        false
    }

    fn giveable_bytes(&self) -> u64 {
        self.shared.get().map_or(0, |shared| shared.blocks.giveable_bytes() + self.kept_bytes.load(Relaxed))
    }

    /// Frees the memory of free blocks first, then of idle blocks and empty slabs that caches keep for their next
    /// objects. With [`Urgency::Limit`], also drains magazines and packs objects. A call from inside of the callback
    /// `isolate`, which runs under the lock of a node, frees only free blocks.
    fn shrink(&self, want_bytes: u64, urgency: Urgency) -> u64 {
        let Some(shared) = self.shared.get() else { return 0 };
        let mut freed = shared.blocks.shrink(want_bytes);
        if freed < want_bytes && !is_isolating() {
            freed += self.caches().iter().map(|cache| cache.give_back(urgency)).sum::<u64>();
            freed += shared.blocks.shrink(want_bytes.saturating_sub(freed));
            self.measure();
        }
        freed
    }

    /// Measures the bytes that caches keep for their next objects, and stores the sum in `kept_bytes`.
    fn measure(&self) {
        if is_isolating() {
            return;
        }
        let caches = (0..self.cache_count()).filter_map(|at| self.cache_at(at));
        let kept = caches.map(|cache| cache.engine().kept_bytes()).sum();
        self.kept_bytes.store(kept, Relaxed);
        stats::set(Counter::SlabKept, kept);
    }
}
