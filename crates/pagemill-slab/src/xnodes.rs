//! The cache of index nodes: the nodes of an index are its objects. The index moves its nodes under its own locks
//! ([`NodeIndex`]).
//!
//! Nodes lie in metadata blocks of their own. The blocks are not charged, because an index may grow while memory is
//! being reclaimed. The blocks contain only nodes, because nodes are read without a guard. Each process, also a fork
//! child, has its own cache of index nodes, created with its first page cache.
#![allow(unsafe_code)] // raw access to nodes; the contract of their memory

use crate::alloc::engine::{Engine, ObjectSpec};
use crate::alloc::settings::Settings;
use crate::alloc::shared::SharedState;
use crate::cache::{Cache, SlabKind};
use crate::defrag::migrate::{Chunk, DestinationSource, Destinations, MoveOutcome, Mover};
use crate::defrag::passes::Progress;
use crate::defrag::steps;
use crate::read::batch::{GRACE_TIMEOUT_NS, wait_for_readers};
use crate::report::info::{self, SlabInfo};
use pagemill_core::arena::place;
use pagemill_core::epoch;
use pagemill_core::error::Result;
use pagemill_core::sync::{Guarded, Relaxed};
use std::alloc::Layout;
use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// The index whose nodes are the objects of the cache. Implemented by a crate that knows the index.
///
/// # Safety
///
/// - After `set_up`, a node is accessed only by shared references and atomic operations, even after it was freed,
///   because readers may still access the node. Zero bits are a valid node.
/// - If `relocate` returns true, only readers under a guard of [`epoch::pin`] that began before the call may still
///   access the node `old`. If `relocate` returns false, no thread accesses the node `new`.
///
/// Example: `IndexNodes` of `pagemill-cache`.
pub unsafe trait NodeIndex: Any + Send + Sync {
    /// Returns the size and alignment of a node.
    fn layout() -> Layout
    where
        Self: Sized;

    /// Initializes a node in memory that has only ever contained nodes or zeros.
    ///
    /// # Safety
    ///
    /// `node` is the address of memory that meets this condition, has the layout of a node, and has no other user.
    unsafe fn set_up(node: usize)
    where
        Self: Sized;

    /// Returns whether a node can probably be moved. Only a call of `relocate` shows whether it can.
    ///
    /// # Safety
    ///
    /// `node` is the address of an object of the cache.
    unsafe fn may_move(&self, node: usize) -> bool;

    /// Moves the node at address `old` to the free node at address `new`, and returns true. Returns false if the index
    /// does not use the node `old`, or if another thread holds a lock that the move needs. Never waits, and runs no
    /// code of the program.
    ///
    /// # Safety
    ///
    /// `old` and `new` are addresses of objects of the cache, and `new` has no other user.
    unsafe fn relocate(&'static self, old: usize, new: usize) -> bool;

    /// Begins the grace period of the index nodes that were retired since the last call of `seal`.
    fn seal(&'static self);

    /// Returns whether any retired index node cannot be freed before its readers have finished.
    fn is_waiting(&self) -> bool;

    /// Frees the retired index nodes whose grace period is over.
    fn free_retired(&self);

    /// Returns the resident bytes of the index's own tables.
    fn metadata_bytes(&self) -> u64;
}

/// The name of the cache of index nodes in statistics, as in Linux.
const CACHE_NAME: &str = "xarray_node";

/// The cache of index nodes and its [`SharedState`], which has blocks of its own. Both are created on first use.
#[derive(Default)]
pub(crate) struct IndexNodes {
    shared: OnceLock<&'static SharedState>,
    /// The cache of this process. In a fork child, the parent's cache until the child creates its own.
    cache: Guarded<Option<&'static NodeCache>>,
}

impl IndexNodes {
    /// Returns the cache of index nodes of this process, if it was created.
    fn own_cache(&self) -> Option<&'static NodeCache> {
        self.cache.with(|cache| *cache).filter(|cache| cache.inner.engine.check_generation().is_ok())
    }

    /// Returns the cache of index nodes of this process, and whether this call created the cache. A new cache gets an
    /// index that `make` creates, and the caller must register the cache. `shared` returns the shared state of the
    /// other caches.
    ///
    /// # Errors
    ///
    /// As [`Slabs::nodes_of`](crate::Slabs::nodes_of).
    pub fn get_or_create<I: NodeIndex>(
        &self,
        shared: impl FnOnce() -> Result<&'static SharedState>,
        make: impl FnOnce(&'static NodeMemory) -> Result<&'static I>,
    ) -> Result<(&'static NodeCache, bool)> {
        // Concurrent first calls wait for this lock, so only one creates the cache.
        self.cache.with(|cache| {
            if let Some(own) = cache.filter(|cache| cache.inner.engine.check_generation().is_ok()) {
                return Ok((own, false));
            }
            let shared = match self.shared.get() {
                Some(shared) => shared,
                None => {
                    let shared = place(shared()?.for_metadata()?)?;
                    self.shared.get_or_init(|| shared)
                }
            };
            let made = NodeCache::create(shared, make)?;
            *cache = Some(made);
            Ok((made, true))
        })
    }

    /// Returns the resident bytes of all index nodes of this process.
    pub fn resident_bytes(&self) -> u64 {
        self.own_cache().map_or(0, |cache| cache.inner.engine.resident_bytes())
    }

    /// Returns the resident bytes of the metadata for index nodes, without the nodes themselves.
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

/// The part of a [`NodeCache`] to which the list of all caches refers.
pub(crate) struct NodeInner {
    engine: Engine,
    /// The index that owns and moves the nodes. Set before other threads can see the cache.
    index: OnceLock<&'static dyn NodeIndex>,
}

impl NodeInner {
    fn index(&self) -> &'static dyn NodeIndex {
        *self.index.get().expect("a cache of nodes is known once it has an index")
    }
}

impl Cache for NodeInner {
    fn engine(&self) -> &Engine {
        &self.engine
    }

    fn shrink(&self) -> Result<u64> {
        // Frees all retired nodes, if their readers finish in time.
        self.finish_retired_without_callback();
        wait_for_readers(GRACE_TIMEOUT_NS, || !self.index().is_waiting());
        self.finish_retired_without_callback();
        steps::shrink(&self.engine, self)
    }

    /// Begins the grace period of retired nodes, and frees the nodes whose grace period is over.
    fn finish_retired_without_callback(&self) {
        self.index().seal();
        self.index().free_retired();
    }

    /// Begins the grace period of retired nodes, frees the nodes whose grace period is over, and advances the epoch.
    /// Returns whether retired nodes or batches still wait.
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

    /// Packs the nodes into fewer slabs on this thread, because moving a node runs no user code and waits for no lock.
    fn pack_without_callback(&self) {
        steps::pack(&self.engine, self);
    }

    fn defrag(&self, budget: Duration) -> Result<Progress> {
        self.finish_retired_without_callback();
        steps::run_step(&self.engine, self, budget)
    }
}

impl Mover for NodeInner {
    type Isolated = ();

    /// Removes the nodes that probably cannot be moved from the chunk, without acquiring the lock of their array.
    /// `relocate` checks the others under that lock.
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
            to.put_back(target);
            MoveOutcome::Busy
        }
    }
}

/// The memory from which an index allocates its nodes.
///
/// The addresses of [`NodeMemory::window`] are reserved until the process ends, and contain only nodes. Addresses that
/// were never used, and those just before the window, are inaccessible. Memory that was returned to the kernel reads as
/// zero. Slabs are set up with atomic stores, because readers may access their memory meanwhile.
///
/// Example: `IndexNodes` of `pagemill-cache`.
pub struct NodeMemory(Arc<NodeInner>);

impl NodeMemory {
    /// Returns the range of the addresses that nodes may have.
    pub fn window(&self) -> Range<usize> {
        self.0.engine.shared.blocks.window()
    }

    /// Allocates a node and returns its address. The node has the contents that it had when it was last freed, or those
    /// that [`NodeIndex::set_up`] wrote.
    ///
    /// # Errors
    ///
    /// [`NoAddresses`](pagemill_core::Error::NoAddresses),
    /// [`System`](pagemill_core::Error::System).
    pub fn take(&self) -> Result<usize> {
        self.0.engine.allocate()
    }

    /// Frees a node of the index.
    ///
    /// # Safety
    ///
    /// [`NodeMemory::take`] returned the node, and the index does not use the node any more.
    pub unsafe fn give(&self, node: usize) {
        // SAFETY: the caller's promise. A node needs no destructor, and the next user of the node checks its contents.
        unsafe { self.0.engine.free(node) };
    }

    /// Wakes the background thread, which frees retired nodes. Does nothing if the `defrag_used_ratio` of the cache is
    /// 0.
    pub fn note_retired(&self) {
        if self.0.engine.used_ratio.load(Relaxed) > 0 {
            self.0.engine.shared.worker.notify();
        }
    }

    /// Returns whether this process is a fork child and the nodes belong to its parent.
    pub fn is_inherited(&self) -> bool {
        self.0.engine.check_generation().is_err()
    }
}

/// The cache of index nodes.
///
/// Example: `IndexNodes` of `pagemill-cache`.
pub struct NodeCache {
    pub(crate) inner: Arc<NodeInner>,
}

impl NodeCache {
    /// Creates the cache of index nodes, and the index by calling `make`.
    fn create<I: NodeIndex>(
        shared: &'static SharedState,
        make: impl FnOnce(&'static NodeMemory) -> Result<&'static I>,
    ) -> Result<&'static Self> {
        // SAFETY: an object of a slab that is being set up, in memory that has only ever held nodes or zeros.
        let constructor = |object: usize| unsafe { I::set_up(object) };
        let layout = I::layout();
        let object = ObjectSpec {
            layout,
            user_bytes: layout.size(),
            poisoned_range: 0..0,
            constructor: Some(Box::new(constructor)),
            kind: SlabKind::ByOwner,
            handles: None,
        };
        let engine = Engine::new(shared, Settings::new(CACHE_NAME), object)?;
        let inner = Arc::new(NodeInner { engine, index: OnceLock::new() });
        let memory: &'static NodeMemory = place(NodeMemory(inner.clone()))?;
        let index = make(memory)?;
        let _ = inner.index.set(index);
        place(Self { inner })
    }

    /// Returns the index that `make` created in [`Slabs::nodes_of`](crate::Slabs::nodes_of).
    pub fn index(&self) -> &'static dyn NodeIndex {
        self.inner.index()
    }

    /// As [`crate::SlabCache::shrink`]: packs all nodes into fewer slabs. Nodes of arrays that another thread has
    /// locked are not moved.
    ///
    /// # Errors
    ///
    /// As [`crate::SlabCache::shrink`].
    pub fn shrink(&self) -> Result<u64> {
        self.inner.shrink()
    }

    /// As [`crate::SlabCache::defrag_step`].
    ///
    /// # Errors
    ///
    /// As [`crate::SlabCache::defrag_step`].
    pub fn defrag_step(&self, budget: Duration) -> Result<Progress> {
        self.inner.defrag(budget)
    }

    /// As [`crate::SlabCache::set_defrag_used_ratio`].
    ///
    /// # Errors
    ///
    /// As [`crate::SlabCache::set_defrag_used_ratio`].
    pub fn set_defrag_used_ratio(&self, percent: u32) -> Result<()> {
        self.inner.engine.set_used_ratio(percent)
    }

    /// Returns the statistics of the cache of index nodes.
    ///
    /// # Errors
    ///
    /// [`WrongState`](pagemill_core::Error::WrongState) in a fork child.
    pub fn info(&self) -> Result<SlabInfo> {
        info::of(&*self.inner)
    }
}

/// Methods that only tests of the index use.
#[cfg(any(test, feature = "test-util"))]
impl NodeCache {
    /// Waits for readers until the old memory of all moved nodes is freed.
    pub fn finish_all_retired(&self) {
        while !self.inner.engine.finish_all_retired().unwrap() {}
    }

    /// Frees the memory of those slabs of the cache that have no objects.
    pub fn shrink_slabs(&self) {
        self.inner.engine.shrink().unwrap();
    }

    pub fn check_state(&self) {
        self.inner.engine.check_state();
    }

    /// Returns the addresses of all objects in the first slab of the window.
    pub fn addresses(&self) -> impl Iterator<Item = usize> {
        let (first, shape) = (self.inner.engine.shared.blocks.window().start, &self.inner.engine.shape);
        (0..shape.capacity).map(move |object| first + shape.offset_of(0, object))
    }
}
