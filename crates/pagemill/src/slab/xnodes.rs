//! The cache of index nodes ([`pagemill_xarray`]). Nodes are moved under the locks of their arrays.
//!
//! Nodes lie in metadata blocks, which are not charged and hold nothing else: an index grows while memory is being
//! reclaimed, and is read without a guard. Each process has one cache, created with its first page cache; a fork child
//! creates another.
#![allow(unsafe_code)] // nodes in slots; the contract of their memory

use super::batch::{GRACE_NS, Grace, wait_for_readers};
use super::defrag;
use super::engine::{Engine, Object};
use super::info::{self, SlabInfo};
use super::migrate::{Chunk, Fate, Mover, Places, Progress};
use super::{CacheKind, Member, Settings, SharedState, Slabs};
use crate::arena::place;
use crate::error::Result;
use crate::sync::{Guarded, Relaxed};
use pagemill_core::epoch;
use pagemill_xarray::{Forest, Forests, Node, Source};
use std::alloc::Layout;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// The name that Linux uses.
const NAME: &str = "xarray_node";

/// State for index nodes, created with the first node.
#[derive(Default)]
pub(super) struct IndexNodes {
    shared: OnceLock<&'static SharedState>,
    /// The cache of this process, or of its parent.
    cache: Guarded<Option<&'static NodeCache>>,
}

impl IndexNodes {
    fn find(&self) -> Option<&'static NodeCache> {
        self.cache.with(|cache| *cache).filter(|cache| cache.inner.engine.check().is_ok())
    }

    /// Resident bytes of metadata, without the nodes.
    pub fn metadata_bytes(&self) -> u64 {
        let blocks = self.shared.get().map_or(0, |shared| shared.blocks.metadata_bytes());
        blocks + self.find().map_or(0, |cache| cache.forest.metadata_bytes())
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
    /// Set before the cache is visible to other threads.
    forest: OnceLock<&'static Forest>,
}

impl NodeInner {
    fn forest(&self) -> &'static Forest {
        self.forest.get().expect("a cache of nodes is known once it has a forest")
    }

    /// Frees all retired nodes, if their readers finish within a second.
    fn tidy_all(&self) {
        self.tidy();
        wait_for_readers(GRACE_NS, || !self.forest().is_waiting());
        self.tidy();
    }
}

/// # Safety
///
/// An object of the cache.
unsafe fn node<'node>(object: usize) -> &'node Node {
    // SAFETY: the caller's promise: it was set up as a node, is aligned to that, and stays, since the cache is never
    // dropped.
    unsafe { &*(object as *const Node) }
}

impl Member for NodeInner {
    fn engine(&self) -> &Engine {
        &self.engine
    }

    fn kind(&self) -> CacheKind {
        CacheKind::ByOwner
    }

    fn shrink(&self) -> Result<u64> {
        self.tidy_all();
        defrag::shrink(&self.engine, self)
    }

    /// Starts the grace period of retired nodes, and frees those with a grace period that is over.
    fn tidy(&self) {
        self.forest().seal();
        self.forest().free_retired();
    }

    fn finish_retired(&self) -> bool {
        let forest = self.forest();
        forest.seal();
        if forest.is_waiting() {
            // Advances the epoch if no participant lags behind.
            epoch::pin().flush();
        }
        // Checked before the others are freed: if a grace period ends between the two, the next call finds the node.
        let is_waiting = forest.is_waiting();
        forest.free_retired();
        self.engine.finish_retired_behind() || is_waiting
    }

    /// Moving a node runs no user code and waits for no lock.
    fn compact(&self) {
        defrag::pack(&self.engine, self);
    }

    fn defrag(&self, budget: Duration) -> Result<Progress> {
        self.tidy();
        defrag::step(&self.engine, self, budget)
    }
}

impl Mover for NodeInner {
    type Isolated = ();

    /// A hint only: `relocate` checks again under the lock of the array.
    fn isolate(&self, chunk: &mut Chunk) {
        // SAFETY: objects of the cache.
        chunk.retain(|object| unsafe { node(object) }.may_move());
    }

    fn migrate(&self, object: usize, to: &mut Places<'_>, (): &mut ()) -> Fate {
        let Some(target) = to.take() else { return Fate::Failed };
        let forest = self.forest();
        // SAFETY: objects of the cache; the target is a free one. The mover frees an object that was moved after all
        // readers.
        if unsafe { forest.relocate(object, target) } {
            Fate::Moved
        } else {
            to.put(target);
            Fate::Busy
        }
    }
}

// SAFETY:
// 1. The window is the blocks of a shared state that only nodes are put in. Blocks that were never opened cannot be
//    reached, nor can the bytes before the first one. Memory that was returned to the kernel reads zero. Slabs are set up
//    with atomic stores, as nodes are written.
// 2. Objects of the cache have a node's size and alignment, and one user at a time. The cache is never dropped.
unsafe impl Source for NodeInner {
    fn window(&self) -> Range<usize> {
        self.engine.shared.blocks.window()
    }

    fn take(&self) -> Result<usize> {
        self.engine.allocate()
    }

    fn give(&self, node: usize) {
        // SAFETY: an allocated node that no thread reaches as a live one. It needs no destructor, and the next user of
        // the node checks its contents.
        unsafe { self.engine.free(node) };
    }

    fn note_retired(&self) {
        if self.engine.used_ratio.load(Relaxed) > 0 {
            self.engine.shared.slabs.worker.notify();
        }
    }

    fn is_inherited(&self) -> bool {
        self.engine.check().is_err()
    }
}

/// The cache of index nodes.
///
/// Example: [`XArray`](pagemill_xarray::XArray).
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
        // The lock serializes creation: concurrent first calls wait here.
        let (cache, is_new) = self.nodes.cache.with(|cache| {
            if let Some(own) = cache.filter(|cache| cache.inner.engine.check().is_ok()) {
                return Ok((own, false));
            }
            let made = self.make_nodes()?;
            *cache = Some(made);
            Ok((made, true))
        })?;
        if is_new {
            // May start a thread, so it runs outside of the lock.
            self.enter(&cache.inner);
        }
        Ok(cache)
    }

    fn make_nodes(&'static self) -> Result<&'static NodeCache> {
        let shared = match self.nodes.shared.get() {
            Some(shared) => shared,
            None => {
                let shared = place(self.members.with(|_| self.shared())?.for_metadata()?)?;
                self.nodes.shared.get_or_init(|| shared)
            }
        };
        // SAFETY: an object of a slab that is being set up, in memory that has only ever held nodes or zeros.
        let set_up = |object: usize| unsafe { node(object).clear() };
        let object = Object {
            layout: Layout::new::<Node>(),
            user_bytes: size_of::<Node>(),
            closed: 0..0,
            grace: Grace::of_all,
            set_up: Some(Box::new(set_up)),
            is_movable: true,
            handles: None,
        };
        let inner = |engine| NodeInner { engine, forest: OnceLock::new() };
        let inner = Self::make_on(shared, Settings::new(NAME), object, inner)?;
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
        self.nodes.find().map_or(0, |cache| cache.inner.engine.resident_bytes())
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
    /// As there.
    pub fn shrink(&self) -> Result<u64> {
        self.inner.shrink()
    }

    /// As [`super::ByOwner::defrag_step`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn defrag_step(&self, budget: Duration) -> Result<Progress> {
        self.inner.defrag(budget)
    }

    /// As [`super::ByOwner::set_defrag_used_ratio`].
    ///
    /// # Errors
    ///
    /// As there.
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
