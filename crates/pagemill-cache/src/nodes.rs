//! Index nodes in a slab cache, which moves them under the locks of their arrays.
//!
//! The slab caches own the memory and choose what is moved; the index moves a node while other threads read it. Neither
//! of the two crates depends on the other. This module implements the index's [`Source`] of memory by a slab cache, and
//! the slab cache's [`NodeIndex`] by the index.
#![allow(unsafe_code)] // the contracts of the index and of the slab cache

use pagemill_core::arena::place;
use pagemill_core::error::Result;
use pagemill_slab::{NodeIndex, NodeMemory, Slabs};
use pagemill_xarray::{Forest, Forests, Node, Source};
use std::alloc::Layout;
use std::any::Any;
use std::ops::{Deref, Range};
use std::sync::OnceLock;

#[cfg(all(test, shuttle))]
mod shuttle_tests;
#[cfg(all(test, not(shuttle)))]
mod tests;

/// The source of index nodes: a slab cache among the slab caches of a process.
///
/// Example: [`XArray`](pagemill_xarray::XArray).
pub struct IndexNodes(&'static Slabs);

impl IndexNodes {
    /// Creates a source of index nodes. Allocates nothing: the first array allocates memory.
    pub fn new(slabs: &'static Slabs) -> Self {
        Self(slabs)
    }

    /// Returns the cache of index nodes of this process. Creates it on the first call, and again in a fork child.
    ///
    /// # Errors
    ///
    /// [`NoAddresses`](pagemill_core::Error::NoAddresses), [`System`](pagemill_core::Error::System).
    pub fn cache(&self) -> Result<&'static NodeCache> {
        let cache = self.0.nodes_of(|memory| {
            let source: &'static NodeSource = place(NodeSource(memory))?;
            place(NodeCache { forest: Forest::new(source)?, cache: OnceLock::new() })
        })?;
        let index: &'static dyn Any = cache.index();
        let nodes = index.downcast_ref::<NodeCache>().expect("made above");
        let _ = nodes.cache.set(cache);
        Ok(nodes)
    }
}

impl Forests for IndexNodes {
    fn forest(&'static self) -> Result<&'static Forest> {
        self.cache().map(NodeCache::forest)
    }

    fn node_bytes(&self) -> u64 {
        self.0.node_bytes()
    }
}

/// The cache of index nodes. This cache has the methods of [`pagemill_slab::NodeCache`].
///
/// Example: [`XArray`](pagemill_xarray::XArray).
pub struct NodeCache {
    forest: Forest,
    /// The slab cache of the nodes, set by [`IndexNodes::cache`].
    cache: OnceLock<&'static pagemill_slab::NodeCache>,
}

impl NodeCache {
    pub fn forest(&'static self) -> &'static Forest {
        &self.forest
    }
}

impl Deref for NodeCache {
    type Target = pagemill_slab::NodeCache;

    fn deref(&self) -> &pagemill_slab::NodeCache {
        self.cache.get().expect("set before a caller gets it")
    }
}

/// Returns the node at the address of an object.
///
/// # Safety
///
/// `object` is an object of the cache of nodes.
unsafe fn node<'node>(object: usize) -> &'node Node {
    // SAFETY: by the caller's promise, `object` was set up as a node and is aligned for one. The object stays, since
    // the cache is never dropped.
    unsafe { &*(object as *const Node) }
}

// SAFETY: nodes consist of atomic words, for which zero bits are valid. A node that was moved leaves its tree, so only
// readers that were in the tree before can still be there.
unsafe impl NodeIndex for NodeCache {
    fn layout() -> Layout {
        Layout::new::<Node>()
    }

    unsafe fn set_up(object: usize) {
        // SAFETY: the caller's promise; in no tree and in no list.
        unsafe { node(object).clear() };
    }

    unsafe fn may_move(&self, object: usize) -> bool {
        // SAFETY: the caller's promise.
        unsafe { node(object) }.may_move()
    }

    unsafe fn relocate(&'static self, old: usize, new: usize) -> bool {
        // SAFETY: the caller's promise; the slab cache reuses a moved object after all readers.
        unsafe { self.forest.relocate(old, new) }
    }

    fn seal(&'static self) {
        self.forest.seal();
    }

    fn is_waiting(&self) -> bool {
        self.forest.is_waiting()
    }

    fn free_retired(&self) {
        self.forest.free_retired();
    }

    fn metadata_bytes(&self) -> u64 {
        self.forest.metadata_bytes()
    }
}

/// The memory of a slab cache of index nodes, from which a [`Forest`] gets its nodes.
struct NodeSource(&'static NodeMemory);

// SAFETY:
// 1. The window holds only nodes or zeros, stays for good, and is inaccessible just before its start ([`NodeMemory`]).
// 2. Objects of the cache have a node's size and alignment, and one user at a time. The cache is never dropped.
unsafe impl Source for NodeSource {
    fn window(&self) -> Range<usize> {
        self.0.window()
    }

    fn take(&self) -> Result<usize> {
        self.0.take()
    }

    fn give(&self, node: usize) {
        // SAFETY: an allocated node that no thread uses as a live node.
        unsafe { self.0.give(node) };
    }

    fn note_retired(&self) {
        self.0.note_retired();
    }

    fn is_inherited(&self) -> bool {
        self.0.is_inherited()
    }
}
