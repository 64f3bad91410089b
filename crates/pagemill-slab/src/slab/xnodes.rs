//! The cache of index nodes. The index moves them, under its own locks ([`NodeIndex`]).
//!
//! Nodes lie in metadata blocks of their own. These are not charged, because an index may grow while memory is being
//! reclaimed, and they contain nothing else, because nodes are read without a guard. Each process has one such cache,
//! created with its first page cache. A fork child creates another.
#![allow(unsafe_code)] // nodes in slots; the contract of their memory

use super::batch::{GRACE_NS, Grace, wait_for_readers};
use super::defrag;
use super::engine::{Engine, Object};
use super::info::{self, SlabInfo};
use super::migrate::{Chunk, Destinations, MoveOutcome, Mover, Progress};
use super::{Cache, CacheKind, Settings, SharedState, Slabs};
use pagemill_core::arena::place;
use pagemill_core::epoch;
use pagemill_core::error::Result;
use pagemill_core::sync::{Guarded, Relaxed};
use std::alloc::Layout;
use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// The index whose nodes a cache holds. Implemented where the index is known.
///
/// # Safety
///
/// - After `set_up`, a node is accessed only by shared references and atomic operations, also after it was returned, for
///   readers may still be there. Zero bits are a valid node.
/// - A node that `relocate` has moved is not used any more, except by readers under a guard of [`epoch::pin`] that began
///   before. Otherwise the target is unused.
///
/// Example: [`Slabs`].
pub unsafe trait NodeIndex: Any + Send + Sync {
    /// Size and alignment of a node.
    fn layout() -> Layout
    where
        Self: Sized;

    /// Makes a node of memory that has only ever held nodes or zeros.
    ///
    /// # Safety
    ///
    /// The address of such memory, of that layout, without another user.
    unsafe fn set_up(node: usize)
    where
        Self: Sized;

    /// Whether the node seems to be one that can be moved.
    ///
    /// # Safety
    ///
    /// The address of an object of the cache.
    unsafe fn may_move(&self, node: usize) -> bool;

    /// Moves the node `old` to the free one `new`, if it is in use and no other thread has locked what it needs; returns
    /// whether it did. Never waits, and runs no code of the program.
    ///
    /// # Safety
    ///
    /// Addresses of objects of the cache; `new` has no other user.
    unsafe fn relocate(&'static self, old: usize, new: usize) -> bool;

    /// Starts the grace period of retired nodes.
    fn seal(&'static self);

    /// Whether retired nodes wait for readers.
    fn is_waiting(&self) -> bool;

    /// Returns retired nodes whose grace period is over.
    fn free_retired(&self);

    /// Resident bytes of its own tables.
    fn metadata_bytes(&self) -> u64;
}

/// The name of the cache, as in Linux.
const NAME: &str = "xarray_node";

/// The shared state and the cache of index nodes, created on first use.
#[derive(Default)]
pub(super) struct IndexNodes {
    shared: OnceLock<&'static SharedState>,
    /// The cache of this process; in a fork child, that of its parent at first.
    cache: Guarded<Option<&'static NodeCache>>,
}

impl IndexNodes {
    fn own_cache(&self) -> Option<&'static NodeCache> {
        self.cache.with(|cache| *cache).filter(|cache| cache.inner.engine.check_generation().is_ok())
    }

    /// Resident bytes of metadata, without the nodes themselves.
    pub fn metadata_bytes(&self) -> u64 {
        let blocks = self.shared.get().map_or(0, |shared| shared.blocks.metadata_bytes());
        blocks + self.own_cache().map_or(0, |cache| cache.index().metadata_bytes())
    }

    pub fn acquire_for_fork(&self) {
        self.cache.acquire_when(|_| true);
        if let Some(shared) = self.shared.get() {
            shared.blocks.acquire_for_fork();
        }
    }

    pub fn release_after_fork(&self) {
        if let Some(shared) = self.shared.get() {
            shared.blocks.release_after_fork();
        }
        self.cache.release();
    }
}

/// The part of the cache that the list of all caches refers to.
struct NodeInner {
    engine: Engine,
    /// Set before other threads can see the cache.
    index: OnceLock<&'static dyn NodeIndex>,
}

impl NodeInner {
    fn index(&self) -> &'static dyn NodeIndex {
        *self.index.get().expect("a cache of nodes is known once it has an index")
    }

    /// Frees all retired nodes, if their readers finish within a second.
    fn finish_all_retired_nodes(&self) {
        self.finish_retired_without_callback();
        wait_for_readers(GRACE_NS, || !self.index().is_waiting());
        self.finish_retired_without_callback();
    }
}

impl Cache for NodeInner {
    fn engine(&self) -> &Engine {
        &self.engine
    }

    fn kind(&self) -> CacheKind {
        CacheKind::ByOwner
    }

    fn shrink(&self) -> Result<u64> {
        self.finish_all_retired_nodes();
        defrag::shrink(&self.engine, self)
    }

    /// Starts the grace period of retired nodes, and frees those whose grace period is over.
    fn finish_retired_without_callback(&self) {
        self.index().seal();
        self.index().free_retired();
    }

    fn finish_retired(&self) -> bool {
        let index = self.index();
        index.seal();
        if index.is_waiting() {
            // A flush advances the epoch if no participant is behind.
            epoch::flush(&epoch::pin());
        }
        // Read before nodes are freed. If a grace period ends in between, the next call frees those nodes.
        let is_waiting = index.is_waiting();
        index.free_retired();
        self.engine.finish_retired_in_background() || is_waiting
    }

    /// Packs the nodes directly, because moving a node runs no user code and waits for no lock.
    fn pack_without_callback(&self) {
        defrag::pack(&self.engine, self);
    }

    fn defrag(&self, budget: Duration) -> Result<Progress> {
        self.finish_retired_without_callback();
        defrag::step(&self.engine, self, budget)
    }
}

impl Mover for NodeInner {
    type Isolated = ();

    /// Selects nodes without their array's lock, so the selection is only a hint. `relocate` checks again under that
    /// lock.
    fn isolate(&self, chunk: &mut Chunk) {
        // SAFETY: the chunk has objects of the cache.
        chunk.retain(|object| unsafe { self.index().may_move(object) });
    }

    fn migrate(&self, object: usize, to: &mut Destinations<'_>, (): &mut ()) -> MoveOutcome {
        let Some(target) = to.take() else { return MoveOutcome::Failed };
        // SAFETY: objects of the cache; the target is a free one.
        if unsafe { self.index().relocate(object, target) } {
            MoveOutcome::Moved
        } else {
            to.put(target);
            MoveOutcome::Busy
        }
    }
}

/// The memory for the nodes of an index.
///
/// The addresses of [`NodeMemory::window`] stay the process's for good. They hold only nodes: bytes that were never opened
/// cannot be reached, nor can the bytes before the first one, and memory that was returned to the kernel reads zero. Slabs
/// are set up with atomic stores, as nodes are written.
///
/// Example: [`Slabs`].
pub struct NodeMemory(Arc<NodeInner>);

impl NodeMemory {
    /// Addresses that nodes may have.
    pub fn window(&self) -> Range<usize> {
        self.0.engine.shared.blocks.window()
    }

    /// Takes a node, which has one user at a time: its address. The contents are those at its last return, or as
    /// [`NodeIndex::set_up`] made them.
    ///
    /// # Errors
    ///
    /// [`NoAddresses`](pagemill_core::Error::NoAddresses),
    /// [`System`](pagemill_core::Error::System).
    pub fn take(&self) -> Result<usize> {
        self.0.engine.allocate()
    }

    /// Returns a node.
    ///
    /// # Safety
    ///
    /// From [`NodeMemory::take`], and no thread reaches it as a live one.
    pub unsafe fn give(&self, node: usize) {
        // SAFETY: the caller's promise. It needs no destructor, and the next user of the node checks its contents.
        unsafe { self.0.engine.free(node) };
    }

    /// Wakes the background thread for retired nodes, if the cache allows it.
    pub fn note_retired(&self) {
        if self.0.engine.used_ratio.load(Relaxed) > 0 {
            self.0.engine.shared.slabs.worker.notify();
        }
    }

    /// Whether this is a fork child, and the nodes are its parent's.
    pub fn is_inherited(&self) -> bool {
        self.0.engine.check_generation().is_err()
    }
}

/// The cache of index nodes.
///
/// Example: [`Slabs`].
pub struct NodeCache {
    inner: Arc<NodeInner>,
}

impl Slabs {
    /// Returns the cache of index nodes of this process. The first call creates it, and the index with `make`; so does
    /// the first call in a fork child.
    ///
    /// # Errors
    ///
    /// [`Error::NoAddresses`](pagemill_core::Error::NoAddresses), [`Error::System`](pagemill_core::Error::System).
    pub fn nodes_of<I: NodeIndex>(
        &'static self,
        make: impl FnOnce(&'static NodeMemory) -> Result<&'static I>,
    ) -> Result<&'static NodeCache> {
        // Concurrent first calls wait for this lock, so only one creates the cache.
        let (cache, is_new) = self.nodes.cache.with(|cache| {
            if let Some(own) = cache.filter(|cache| cache.inner.engine.check_generation().is_ok()) {
                return Ok((own, false));
            }
            let made = self.create_node_cache(make)?;
            *cache = Some(made);
            Ok((made, true))
        })?;
        if is_new {
            // Registration may start a thread, so it runs without the lock.
            self.register(&cache.inner);
        }
        Ok(cache)
    }

    fn create_node_cache<I: NodeIndex>(
        &'static self,
        make: impl FnOnce(&'static NodeMemory) -> Result<&'static I>,
    ) -> Result<&'static NodeCache> {
        let shared = match self.nodes.shared.get() {
            Some(shared) => shared,
            None => {
                let shared = place(self.caches.with(|_| self.shared())?.for_metadata()?)?;
                self.nodes.shared.get_or_init(|| shared)
            }
        };
        // SAFETY: an object of a slab that is being set up, in memory that has only ever held nodes or zeros.
        let set_up = |object: usize| unsafe { I::set_up(object) };
        let layout = I::layout();
        let object = Object {
            layout,
            user_bytes: layout.size(),
            poisoned_range: 0..0,
            grace: Grace::of_all,
            set_up: Some(Box::new(set_up)),
            is_movable: true,
            handles: None,
        };
        let inner = |engine| NodeInner { engine, index: OnceLock::new() };
        let inner = Self::create_cache_on(shared, Settings::new(NAME), object, inner)?;
        let memory: &'static NodeMemory = place(NodeMemory(inner.clone()))?;
        let index = make(memory)?;
        let _ = inner.index.set(index);
        place(NodeCache { inner })
    }

    /// Resident bytes of the nodes.
    pub fn node_bytes(&self) -> u64 {
        self.nodes.own_cache().map_or(0, |cache| cache.inner.engine.resident_bytes())
    }
}

impl NodeCache {
    /// The index that [`Slabs::nodes_of`] was given.
    pub fn index(&self) -> &'static dyn NodeIndex {
        self.inner.index()
    }

    /// As [`super::ByOwner::shrink`]: packs all nodes. Nodes of arrays that another thread has locked stay.
    ///
    /// # Errors
    ///
    /// As [`super::ByOwner::shrink`].
    pub fn shrink(&self) -> Result<u64> {
        self.inner.shrink()
    }

    /// As [`super::ByOwner::defrag_step`].
    ///
    /// # Errors
    ///
    /// As [`super::ByOwner::defrag_step`].
    pub fn defrag_step(&self, budget: Duration) -> Result<Progress> {
        self.inner.defrag(budget)
    }

    /// As [`super::ByOwner::set_defrag_used_ratio`].
    ///
    /// # Errors
    ///
    /// As [`super::ByOwner::set_defrag_used_ratio`].
    pub fn set_defrag_used_ratio(&self, percent: u32) -> Result<()> {
        self.inner.engine.set_used_ratio(percent)
    }

    /// Returns the statistics of the cache.
    ///
    /// # Errors
    ///
    /// [`WrongState`](pagemill_core::Error::WrongState) in a fork child.
    pub fn info(&self) -> Result<SlabInfo> {
        info::of(&*self.inner)
    }
}

/// What tests of the index look at.
#[cfg(any(test, feature = "test-util"))]
impl NodeCache {
    /// Waits for readers until everything that was moved is freed.
    pub fn finish_retired(&self) {
        while !self.inner.engine.finish_all_retired().unwrap() {}
    }

    /// Returns slabs without objects.
    pub fn shrink_slabs(&self) {
        self.inner.engine.shrink().unwrap();
    }

    pub fn check_state(&self) {
        self.inner.engine.check_state();
    }

    /// The addresses of all objects of the first slab's shape.
    pub fn addresses(&self) -> impl Iterator<Item = usize> {
        let (first, shape) = (self.inner.engine.shared.blocks.window().start, &self.inner.engine.shape);
        (0..shape.capacity).map(move |object| first + shape.offset_of(0, object))
    }
}

/// What tests of the index look at.
#[cfg(any(test, feature = "test-util"))]
impl Slabs {
    /// The background thread sleeps without a timeout, after a round that found nothing.
    #[cfg(not(shuttle))]
    pub fn is_asleep(&self) -> bool {
        self.worker.is_asleep()
    }

    /// Number of caches.
    pub fn count(&self) -> usize {
        self.cache_count()
    }
}
