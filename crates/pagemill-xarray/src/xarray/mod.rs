//! The index of a page cache: maps page indices to values, for many concurrent readers and one writer at a time.
//!
//! ```text
//!   XArray  root -> node 9, shift 6                        indices up to 64 * 64 - 1
//!                     |
//!            node 9   [ -> node 4 | page x, order 7 | -> slot 1 | ... ]      each slot: 64 indices
//!                         |
//!            node 4       [ page a | page b | . | page c, order 1 | -> slot 3 | ... ]
//! ```
//!
//! The index is a tree of nodes with 64 slots (`word`, `node`). An entry of order *n* covers `1 << n` aligned indices
//! in one node. Its value is stored in its first slot, and its later slots contain the number of that slot (`slots`).
//! So one store of a word inserts, changes or removes the entry. A single entry of order 0 at index 0 is stored in the
//! root word. Each entry has three marks; a slot that contains a node has the marks of all entries below. The design
//! follows Linux's XArray (Documentation/core-api/xarray.rst), with its own protocol for readers.
//!
//! # Readers
//!
//! Readers take no lock, and writers do not wait for readers. A reader holds a [`pagemill_core::epoch::Guard`], so no
//! node that the reader can reach is reused before the guard is dropped. Lookups are correct for each single index: an
//! entry that a lookup finds was in the array at some time during the call. A lookup returns no entry only if the index
//! had no entry at some time during the call. The reasons are:
//!
//! 1. While a node is in the tree, each of its slots covers the same indices. Growing or shrinking the tree changes the
//!    root word and the levels at the top, but never the indices of a node.
//! 2. A reader reaches a node by a word that points at it, at a time when the node was in the tree. A writer that
//!    removes the node first unlinks it, and then sets all of its slots to DEAD. So any other word that the reader
//!    finds in the node was already in the node when the node was unlinked. That word is a valid result for a time
//!    between reaching the node and unlinking it. A reader that finds DEAD restarts at the root, where it sees that the
//!    node was unlinked.
//! 3. Rule 2 also holds when the tree grows: the former root word is copied into a new node, which becomes the root.
//!    When the tree shrinks, the reverse happens, and the former root node is then DEAD. A single entry moves to or
//!    from the root word in the same ways.
//! 4. Inside a node the rules of `slots` hold. A SIBLING word is stale if the slot that it refers to contains no entry
//!    that covers the slot of the SIBLING.
//! 5. Indices that the root word does not reach have no entry.
//! 6. A node that moves (`relocate`) is removed as in 2. The nodes below it stay where they are.
//!
//! A reader restarts only after a writer has made progress, and at most once for each change of a writer.
//!
//! # The contract of [`Hit::is_still`]
//!
//! An entry leaves its slot when it is erased, replaced, overwritten, split, joined, or moved with its node or to the
//! root word. Before the call that does so returns, the slot in which a reader may have found the entry is overwritten.
//! [`Writer::erase_range`] overwrites the slot before it calls the callback.
//!
//! So a reader may find a value, pin the object that the value refers to, and then check `is_still`. If `is_still`
//! returns true, the object has not been released since: a releaser first removes the entry, and then checks for pins.
//! To pin the object, the reader must change a word by a read-modify-write with `Acquire`; the releaser must change the
//! same word from "no pins" by a read-modify-write with `Release`. Plain loads and stores of two words could be
//! reordered. If `is_still` returns false, the reader must look up again: the entry may have moved to another slot.
//!
//! # Writers
//!
//! [`XArray::prepare`] allocates nodes. [`XArray::lock`] returns a [`Writer`], whose methods neither fail nor allocate
//! nodes. A writer sets marks before a marked entry becomes visible, and clears them after the entry is removed. A
//! reader that finds no mark checks the slot again. So during a write a reader may see a mark that no entry has, but it
//! never misses a mark.
//!
//! # Nodes
//!
//! Nodes come from an implementation of `Nodes`. For page caches this is a [`Forest`], whose memory belongs to the
//! layer above (`slab`), so that `slab` can move nodes and free whole slabs. A thread that moves a node finds the
//! node's array by number (`arrays`). Dropping an array waits until no thread moves one of its nodes.
//!
//! Uses `arena`, `epoch`. Lock order: a table entry of `arrays`, the array (only tried), the free numbers.

mod arrays;
mod erase;
mod forest;
mod marks;
#[cfg(all(test, not(shuttle)))]
mod model_tests;
mod node;
mod nodes;
mod relocate;
#[cfg(all(test, shuttle))]
mod shuttle_tests;
mod slots;
mod split;
mod stock;
mod store;
#[cfg(any(test, feature = "test-util"))]
mod test_forest;
#[cfg(all(test, not(shuttle)))]
mod thread_tests;
mod walk;
mod word;

pub use forest::{Forest, Forests, Source};
pub use marks::Mark;
pub use node::Node;
pub use pagemill_core::epoch::pin;
// `Nodes` is not public, because a caller could free a node that an array uses.
use nodes::Nodes;
#[cfg(test)]
use relocate::relocate;
pub use stock::NodeStock;
pub use store::Writer;
#[cfg(any(test, feature = "test-util"))]
pub use test_forest::OneForest;
pub use walk::Hit;
pub use word::{MAX_INDEX, MAX_ORDER, MAX_VALUE};

use pagemill_core::sync::{AtomicU32, Lock, Relaxed};
use slots::IndexSlot;
use std::marker::PhantomPinned;
use word::IndexWord;

/// Maps indices up to [`MAX_INDEX`] to values up to [`MAX_VALUE`]. The type is small, because a process may have
/// hundreds of thousands of arrays.
///
/// # Invariants
///
/// While the lock is free:
///
/// 1. The root word is empty, a value of order 0 at index 0, or the lowest node that covers all entries.
/// 2. Each node has at least one slot in use. Each node stores the number of its slots in use, its parent, and its
///    offset in the parent. If only the first slot of the root node is in use, that slot contains an entry of order
///    above 0: the tree has no unneeded level.
/// 3. No slot is GONE or DEAD.
/// 4. A mark of a slot that contains a node is set exactly if any slot of that node has the mark.
///
/// ```
/// use pagemill_testbed::Testbed;
/// use pagemill_core::epoch;
/// use pagemill_xarray::{Mark, XArray};
///
/// let array = XArray::new(Testbed::of_process()?.nodes.cache()?.forest());
/// let (mut writer, mut nodes) = array.lock_for(100, 100, 0)?;
/// writer.store(100, 0, 7, &mut nodes); // value 7 at index 100, order 0: one index
/// writer.set_mark(100, Mark::A);
/// drop(writer);
///
/// let guard = epoch::pin();
/// let found = array.load(100, &guard).unwrap();
/// assert_eq!((found.value, found.first, found.last()), (7, 100, 100));
/// assert_eq!(array.next_marked(0, 1000, Mark::A, &guard), Some(found));
/// assert!(array.find(100, &guard).is_some_and(|hit| hit.is_still()));
/// # Ok::<(), pagemill_core::Error>(())
/// ```
pub struct XArray<N: Nodes> {
    root: IndexSlot,
    nodes: &'static N,
    lock: Lock,
    /// Marks of the entry in the root word, with one bit for each mark.
    root_marks: AtomicU32,
    /// Number of nodes in the tree. Changed only under the array's lock.
    count: AtomicU32,
    /// The array's number in [`Nodes::arrays`], assigned with its first node; until then [`NO_ID_YET`] or [`NO_ID`].
    /// Changed only under the lock.
    id: AtomicU32,
    /// Makes the array `!Unpin`, because threads that move nodes access the array by its address.
    _pinned: PhantomPinned,
}

/// Value of an array's `id` if no number was free, or if the array's nodes cannot be moved.
const NO_ID: u32 = 0;
/// Value of an array's `id` until the array has its first node.
const NO_ID_YET: u32 = u32::MAX;

/// An entry that a lookup found.
///
/// Example: [`XArray`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    pub value: u64,
    /// First index that the entry covers.
    pub first: u64,
    pub order: u32,
}

impl Found {
    /// Returns the entry of a VALUE word that was found at `index`.
    #[inline]
    fn new(word: IndexWord, index: u64) -> Self {
        let order = word.order();
        Self { value: word.to_value(), first: word::first_index_of(index, order), order }
    }

    /// Returns the last index that the entry covers.
    #[inline]
    pub fn last(&self) -> u64 {
        word::last_index_of(self.first, self.order)
    }
}

impl<N: Nodes> XArray<N> {
    /// Creates an empty array whose nodes cannot be moved. Allocates no node.
    pub const fn new(nodes: &'static N) -> Self {
        Self::with_id(nodes, NO_ID)
    }

    /// Creates an empty array whose field `id` has this initial value.
    const fn with_id(nodes: &'static N, id: u32) -> Self {
        let (root_marks, count, id) = (AtomicU32::new(0), AtomicU32::new(0), AtomicU32::new(id));
        Self { root: IndexSlot::new(), nodes, lock: Lock::new(), root_marks, count, id, _pinned: PhantomPinned }
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.root.load_acquire().is_empty()
    }

    /// Returns the number of nodes in the tree. Each node has the size of `Node`.
    pub fn node_count(&self) -> u32 {
        self.count.load(Relaxed)
    }

    /// Returns the array's number. Assigns the number if the array has none yet. The caller holds the array's lock.
    fn id(&self) -> u32 {
        let id = self.id.load(Relaxed);
        if id != NO_ID_YET {
            return id;
        }
        let id = self.nodes.arrays().assign_number(self).unwrap_or(NO_ID);
        self.id.store(id, Relaxed);
        id
    }

    /// Frees the node that `word` points at, and all nodes below it.
    fn free_tree(&self, word: IndexWord) {
        let node = self.nodes.node(word.number());
        node.slots
            .iter()
            .map(IndexSlot::load_relaxed)
            .filter(|word| word.is_node())
            .for_each(|below| self.free_tree(below));
        node.mark_dead_without_readers();
        self.nodes.give(word.number());
    }
}

/// Frees the nodes of the array without a grace period, because there are no readers. Waits for a thread that moves one
/// of the nodes. Does nothing in a fork child if the nodes belong to the parent.
impl<N: Nodes> Drop for XArray<N> {
    fn drop(&mut self) {
        if self.nodes.are_inherited() {
            return;
        }
        let id = self.id.load(Relaxed);
        let has_id = ![NO_ID, NO_ID_YET].contains(&id);
        if has_id {
            self.nodes.arrays().remove(id);
        }
        let root = self.root.load_relaxed();
        if root.is_node() {
            self.free_tree(root);
        }
        // No node stores the number any more.
        if has_id {
            self.nodes.arrays().free_number(id);
        }
    }
}
