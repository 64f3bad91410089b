//! The cache of the index nodes of [`crate::xarray`]. Nodes are moved under the locks of their arrays.
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
use crate::arena::place;
use crate::error::Result;
use crate::sync::{Guarded, Relaxed};
use crate::xarray::{self, Forest, Forests, Node, Source};
use std::alloc::Layout;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

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
        blocks + self.own_cache().map_or(0, |cache| cache.forest.metadata_bytes())
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
    forest: OnceLock<&'static Forest>,
}

impl NodeInner {
    fn forest(&self) -> &'static Forest {
        self.forest.get().expect("a cache of nodes is known once it has a forest")
    }

    /// Frees all retired nodes, if their readers finish within a second.
    fn finish_all_retired_nodes(&self) {
        self.finish_retired_without_callback();
        wait_for_readers(GRACE_NS, || !self.forest().is_waiting());
        self.finish_retired_without_callback();
    }
}

/// # Safety
///
/// `object` is an object of the cache of nodes.
unsafe fn node<'node>(object: usize) -> &'node Node {
    // SAFETY: by the caller's promise, `object` was set up as a node and is aligned for one. It stays, since the cache
    // is never dropped.
    unsafe { &*(object as *const Node) }
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
        self.forest().seal();
        self.forest().free_retired();
    }

    fn finish_retired(&self) -> bool {
        let forest = self.forest();
        forest.seal();
        if forest.is_waiting() {
            // A flush advances the epoch if no participant is behind.
            xarray::pin().flush();
        }
        // Read before nodes are freed. If a grace period ends in between, the next call frees those nodes.
        let is_waiting = forest.is_waiting();
        forest.free_retired();
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
        chunk.retain(|object| unsafe { node(object) }.may_move());
    }

    fn migrate(&self, object: usize, to: &mut Destinations<'_>, (): &mut ()) -> MoveOutcome {
        let Some(target) = to.take() else { return MoveOutcome::Failed };
        let forest = self.forest();
        if xarray::relocate(forest, forest.number_of(object), forest.number_of(target)) {
            MoveOutcome::Moved
        } else {
            to.put(target);
            MoveOutcome::Busy
        }
    }
}

// SAFETY:
// 1. The window has the blocks of a shared state that only nodes use. Blocks that were never opened, and the bytes
//    before the first block, cannot be accessed. Memory that was returned to the kernel reads as zero. Slabs are set up
//    with atomic stores, as nodes are written.
// 2. Objects of the cache have the size and alignment of a node, and one user at a time. The cache is never dropped.
unsafe impl Source for NodeInner {
    fn window(&self) -> Range<usize> {
        self.engine.shared.blocks.window()
    }

    fn take(&self) -> Result<usize> {
        self.engine.allocate()
    }

    fn give(&self, node: usize) {
        // SAFETY: an allocated node that no thread uses as a live node. It needs no destructor, and the next user
        // checks its contents.
        unsafe { self.engine.free(node) };
    }

    fn note_retired(&self) {
        if self.engine.used_ratio.load(Relaxed) > 0 {
            self.engine.shared.slabs.worker.notify();
        }
    }

    fn is_inherited(&self) -> bool {
        self.engine.check_generation().is_err()
    }
}

/// The cache of index nodes.
///
/// Example: [`XArray`](crate::xarray::XArray).
pub struct NodeCache {
    inner: Arc<NodeInner>,
    forest: Forest,
}

impl Slabs {
    /// Returns the cache of index nodes of this process. Creates it on the first call, and again in a fork child.
    ///
    /// # Errors
    ///
    /// [`crate::Error::NoAddresses`], [`crate::Error::System`].
    pub fn nodes(&'static self) -> Result<&'static NodeCache> {
        // Concurrent first calls wait for this lock, so only one creates the cache.
        let (cache, is_new) = self.nodes.cache.with(|cache| {
            if let Some(own) = cache.filter(|cache| cache.inner.engine.check_generation().is_ok()) {
                return Ok((own, false));
            }
            let made = self.create_node_cache()?;
            *cache = Some(made);
            Ok((made, true))
        })?;
        if is_new {
            // Registration may start a thread, so it runs without the lock.
            self.register(&cache.inner);
        }
        Ok(cache)
    }

    fn create_node_cache(&'static self) -> Result<&'static NodeCache> {
        let shared = match self.nodes.shared.get() {
            Some(shared) => shared,
            None => {
                let shared = place(self.caches.with(|_| self.shared())?.for_metadata()?)?;
                self.nodes.shared.get_or_init(|| shared)
            }
        };
        // SAFETY: an object of a slab that is being set up, in memory that has only ever held nodes or zeros.
        let set_up = |object: usize| unsafe { node(object) }.clear();
        let object = Object {
            layout: Layout::new::<Node>(),
            user_bytes: size_of::<Node>(),
            poisoned_range: 0..0,
            grace: Grace::of_all,
            set_up: Some(Box::new(set_up)),
            is_movable: true,
            handles: None,
        };
        let inner = |engine| NodeInner { engine, forest: OnceLock::new() };
        let inner = Self::create_cache_on(shared, Settings::new(NAME), object, inner)?;
        let source: &'static Arc<NodeInner> = place(inner.clone())?;
        let cache = place(NodeCache { forest: Forest::new(&**source)?, inner })?;
        let _ = cache.inner.forest.set(&cache.forest);
        Ok(cache)
    }
}

impl Forests for Slabs {
    fn forest(&'static self) -> Result<&'static Forest> {
        self.nodes().map(|cache| &cache.forest)
    }

    fn node_bytes(&self) -> u64 {
        self.nodes.own_cache().map_or(0, |cache| cache.inner.engine.resident_bytes())
    }
}

impl NodeCache {
    pub fn forest(&'static self) -> &'static Forest {
        &self.forest
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
    /// [`crate::Error::WrongState`] in a fork child.
    pub fn info(&self) -> Result<SlabInfo> {
        info::of(&*self.inner)
    }
}

#[cfg(all(test, not(shuttle)))]
impl NodeCache {
    pub(super) fn engine(&self) -> &Engine {
        &self.inner.engine
    }
}
