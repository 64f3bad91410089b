//! [`Slabs`]: all slab caches of a process, their parameters and their shared state.

#[cfg(test)]
pub(crate) mod tests;

use crate::alloc::asymmetric_lock::Barriers;
use crate::alloc::barn::{BARNS_PER_NODE, BarnMemory};
use crate::alloc::blocks::Blocks;
use crate::alloc::engine::{Engine, Object};
use crate::alloc::fixed;
use crate::alloc::magazine::MagazineRange;
use crate::alloc::settings::Settings;
use crate::cache::Cache;
use crate::defrag::isolating::is_isolating;
use crate::defrag::worker::Worker;
use crate::read::batch::Grace;
use crate::read::handles::HandleTable;
use crate::report::info;
use crate::xnodes::IndexNodes;
use crate::{FixedSlab, Progress, SlabInfo};
use pagemill_core::arena::{Arena, place};
use pagemill_core::error::{Error, Result};
use pagemill_core::reclaim::{Cost, Shrinker, Urgency};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{Guarded, Relaxed};
use pagemill_sys::clock;
use std::alloc::Layout;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

/// Maximum number of slab caches of a process at a time. The count includes the cache of index nodes and, in a fork
/// child, the caches of the parent. Each cache reserves addresses for the magazines of all threads (32 MiB if
/// available). One more cache fails with [`Error::TooMany`].
pub const MAX_CACHES: usize = 1 << 10;

/// The cache ids in use. A cache that could not be closed, or that belongs to the parent process, keeps its id.
pub(crate) struct CacheIds {
    /// Whether each id is in use.
    pub(crate) are_taken: [bool; MAX_CACHES],
    /// The magazine range of each id that was ever in use. The barns of these ids are open, too.
    pub(crate) ranges: Vec<&'static MagazineRange>,
}

/// State that all caches share, created with the first cache. The cache of index nodes has a second instance with
/// blocks of its own.
pub(crate) struct SharedState {
    pub(crate) slabs: &'static Slabs,
    pub(crate) blocks: Blocks,
    /// How threads enter magazines, which depends on the kernel.
    pub(crate) barriers: Barriers,
    /// The memory of the barns of all cache ids.
    pub(crate) barn_memory: &'static BarnMemory,
    pub(crate) ids: &'static Guarded<CacheIds>,
    /// Handle tables that no cache uses.
    pub(crate) free_handle_tables: Guarded<Vec<&'static HandleTable>>,
}

impl SharedState {
    pub(crate) fn new(slabs: &'static Slabs, barriers: Barriers) -> Result<Self> {
        let arena = slabs.arena;
        Ok(Self {
            slabs,
            blocks: Blocks::new(arena)?,
            barriers,
            barn_memory: place(BarnMemory::new(MAX_CACHES * arena.nodes.count() * BARNS_PER_NODE)?)?,
            ids: place(Guarded::new(CacheIds { are_taken: [false; MAX_CACHES], ranges: Vec::new() }))?,
            free_handle_tables: Guarded::new(Vec::new()),
        })
    }

    /// Creates the state for the cache of index nodes. Shares all but the blocks and the handle tables.
    pub(crate) fn for_metadata(&self) -> Result<Self> {
        let (blocks, free_handle_tables) = (Blocks::for_metadata(self.slabs.arena)?, Guarded::new(Vec::new()));
        Ok(Self { blocks, free_handle_tables, ..*self })
    }

    /// Allocates the lowest free cache id, and opens its magazine range and barns.
    ///
    /// # Errors
    ///
    /// [`Error::TooMany`], [`Error::System`].
    pub(crate) fn take_id(&self) -> Result<usize> {
        self.ids.with(|ids| {
            let free = ids.are_taken.iter().position(|is_taken| !is_taken);
            let id = free.ok_or(Error::TooMany { what: "slab caches", most: MAX_CACHES })?;
            if id == ids.ranges.len() {
                // After an error, a retry opens the same barns again, which has no effect if they are open.
                let barns = self.barns_per_cache();
                self.barn_memory.open(id * barns, barns)?;
                ids.ranges.push(Box::leak(Box::new(MagazineRange::new()?)));
            }
            ids.are_taken[id] = true;
            Ok(id)
        })
    }

    /// The magazine range of a cache id in use.
    pub(crate) fn range(&self, id: usize) -> &'static MagazineRange {
        self.ids.with(|ids| ids.ranges[id])
    }

    /// Number of barns of one cache.
    pub(crate) fn barns_per_cache(&self) -> usize {
        self.slabs.arena.nodes.count() * BARNS_PER_NODE
    }

    /// Resident bytes of the magazines and barns of all caches.
    pub(crate) fn resident_bytes(&self) -> u64 {
        let of_magazines =
            |ids: &mut CacheIds| (ids.ranges.len(), ids.ranges.iter().map(|range| range.resident_bytes()).sum::<u64>());
        let (caches, bytes) = self.ids.with(of_magazines);
        bytes + self.barn_memory.resident_bytes(caches * self.barns_per_cache())
    }

    /// Returns an unused handle table, or creates one.
    pub(crate) fn take_handle_table(&self) -> Result<&'static HandleTable> {
        self.free_handle_tables.with(Vec::pop).map_or_else(HandleTable::new_static, Ok)
    }

    /// Returns a handle table to the free list. None of its handles may be live.
    pub(crate) fn return_handle_table(&self, handles: &'static HandleTable) {
        self.free_handle_tables.with(|free| free.push(handles));
    }

    /// Makes a cache id available again.
    pub(crate) fn free_id(&self, id: usize) {
        self.ids.with(|ids| ids.are_taken[id] = false);
    }
}

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
    /// Created with the first cache.
    pub(crate) shared: OnceLock<&'static SharedState>,
    /// The caches in order of creation, each with a unique id.
    pub(crate) caches: Guarded<Vec<(u64, Weak<dyn Cache>)>>,
    /// Number of caches that were created. The next cache gets this number as id.
    pub(crate) created_count: AtomicU64,
    /// Bytes of idle blocks and empty slabs that caches keep for their next objects, as of the last `measure()`.
    pub(crate) kept_bytes: AtomicU64,
    pub(crate) worker: Worker,
    /// The cache of index nodes and its shared state.
    pub(crate) nodes: IndexNodes,
}

impl Slabs {
    /// Creates an empty set of caches. Reserves neither memory nor addresses before the first cache.
    pub fn new(arena: &'static Arena) -> Self {
        let (caches, created_count) = (Guarded::new(Vec::new()), AtomicU64::new(0));
        let kept_bytes = AtomicU64::new(0);
        Self {
            arena,
            shared: OnceLock::new(),
            caches,
            created_count,
            kept_bytes,
            worker: Worker::default(),
            nodes: IndexNodes::default(),
        }
    }

    /// Creates a cache of objects that keep their address.
    ///
    /// # Errors
    ///
    /// [`Error::BadLength`], [`Error::BadAlignment`] for unsupported object or slab sizes, [`Error::BadRatio`],
    /// [`Error::TooMany`] if there are [`MAX_CACHES`], [`Error::System`].
    pub fn fixed<T>(&'static self, settings: Settings) -> Result<FixedSlab<T>> {
        let object = Object {
            layout: Layout::new::<T>(),
            user_bytes: size_of::<T>(),
            poisoned_range: 0..size_of::<T>(),
            set_up: None,
            is_movable: false,
            grace: Grace::of_all,
            handles: None,
        };
        self.create_cache(settings, object, fixed::FixedInner::new).map(FixedSlab::of_inner)
    }

    /// Creates the inner part of a cache under a new cache id, and registers it.
    pub(crate) fn create_cache<M: Cache + 'static>(
        &'static self,
        settings: Settings,
        object: Object,
        inner: impl FnOnce(Engine) -> M,
    ) -> Result<Arc<M>> {
        let shared = self.caches.with(|_| self.shared())?;
        let cache = Self::create_cache_on(shared, settings, object, inner)?;
        self.register(&cache);
        Ok(cache)
    }

    /// As [`Slabs::create_cache`], but the caller must call [`Slabs::register`].
    pub(crate) fn create_cache_on<M: Cache + 'static>(
        shared: &'static SharedState,
        settings: Settings,
        object: Object,
        inner: impl FnOnce(Engine) -> M,
    ) -> Result<Arc<M>> {
        let id = shared.take_id()?;
        let engine = Engine::new(shared, id, settings, object).inspect_err(|_| shared.free_id(id))?;
        Ok(Arc::new(inner(engine)))
    }

    /// Registers a cache. The cache must be complete, because other threads may call it from now on.
    pub(crate) fn register<M: Cache + 'static>(&'static self, cache: &Arc<M>) {
        let weak: Weak<M> = Arc::downgrade(cache);
        self.caches.with(|caches| {
            caches.retain(|(_, cache)| cache.strong_count() > 0);
            caches.push((self.created_count.fetch_add(1, Relaxed), weak));
        });
        if cache.engine().is_movable {
            self.worker.start(self);
        }
    }

    /// Returns the shared state, and creates it on the first call. The caller holds the lock of `caches`.
    pub(crate) fn shared(&'static self) -> Result<&'static SharedState> {
        if let Some(shared) = self.shared.get() {
            return Ok(shared);
        }
        let shared = place(SharedState::new(self, Barriers::of_process())?)?;
        Ok(self.shared.get_or_init(|| shared))
    }

    /// Makes the process behave as if the kernel refused the process-wide barrier. Must be called before the first
    /// cache.
    #[cfg(test)]
    pub(crate) fn refuse_barrier(&'static self) {
        let shared = place(SharedState::new(self, Barriers::BothSides).unwrap()).unwrap();
        assert!(self.shared.set(shared).is_ok());
    }

    /// Returns all caches that still exist.
    pub(crate) fn caches(&self) -> Vec<Arc<dyn Cache>> {
        self.caches.with(|caches| caches.iter().filter_map(|(_, cache)| cache.upgrade()).collect())
    }

    pub(crate) fn cache_count(&self) -> usize {
        self.caches.with(|caches| caches.len())
    }

    pub(crate) fn cache_at(&self, at: usize) -> Option<Arc<dyn Cache>> {
        self.caches.with(|caches| caches.get(at).and_then(|(_, cache)| cache.upgrade()))
    }

    /// Returns the statistics of all caches of this process, without those of its parent. Caches with movable objects
    /// come first, and each kind is sorted by name.
    pub fn list(&self) -> Vec<SlabInfo> {
        let mut list: Vec<SlabInfo> = self.caches().iter().filter_map(|cache| info::of(&**cache).ok()).collect();
        list.sort_by_cached_key(SlabInfo::rank);
        list
    }

    /// Stops background defragmentation. Afterwards caches are defragmented only by calls such as
    /// [`Slabs::defrag_step`], and no callback runs on Pagemill's own thread. Waits for the step in progress, at most
    /// one second.
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

    /// Frees the memory of free blocks first, then blocks and slabs that caches keep for their next objects. With
    /// `Limit`, also drains magazines. A call from inside of `isolate`, under the lock of a node, frees only free
    /// blocks.
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

    /// Updates `kept_bytes`.
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
