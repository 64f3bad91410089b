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
//! A tree of nodes with 64 slots (`word`, `node`). An entry of order *n* covers `1 << n` aligned indices in one node.
//! Its value is in its first slot, and the later slots name that slot (`slots`), so one word is stored to insert,
//! change or remove the entry. A single entry of order 0 at index 0 is stored in the root word. Each entry has three
//! marks; a slot that holds a node has the marks of all entries below. After Linux's XArray
//! (Documentation/core-api/xarray.rst), with its own protocol.
//!
//! # Readers
//!
//! Readers take no lock. They hold a [`pagemill_core::epoch::Guard`], so no node is reused while they read
//! it; writers do not wait for readers. For each single index, an entry that a reader finds was
//! there at some moment of the call, and it finds nothing only if nothing was there at some moment:
//!
//! 1. While its node is in the tree, a slot covers the same indices. Growing or shrinking the tree changes the root
//!    word and the levels at the top, but never the indices of a node.
//! 2. A reader that reaches a node by its word reached it while it was in the tree. A node that is removed is unlinked
//!    first, and then all of its slots become DEAD. So a word that a reader finds there, other than DEAD, was there at
//!    the unlinking or before. It is a valid result for a moment between reaching the node and the unlinking. At DEAD
//!    the reader restarts at the root, where it sees the unlinking.
//! 3. The same holds when the tree grows (the word of the former root is copied into a new node, which becomes the
//!    root), when it shrinks (the reverse, then the former root is DEAD), and when a single entry moves to the root
//!    word or from it.
//! 4. Inside a node the rules of `slots` hold: a slot that names another slot which does not lead to an answer is
//!    stale.
//! 5. Indices beyond the reach of the root word have no entry.
//! 6. A node that moves (`relocate`) is removed as in 2; the nodes below it stay where they are.
//!
//! A reader restarts only after a writer has made progress, at most once for each of its changes.
//!
//! # The contract of [`Hit::is_still`]
//!
//! An entry leaves its slot when it is erased, replaced, covered, split, joined, or moved with its node or to the root
//! word. The slot in which a reader may have found it is overwritten before that call returns; in
//! [`Writer::erase_range`], before the callback gets the entry.
//!
//! So a reader may find a value, pin the object behind it, and then check `is_still`. If that is true, the object was
//! not released since, because a releaser removes the entry first, then checks for pins. The pin must be a
//! read-modify-write with `Acquire` of a word that the releaser changes from "no pins" by a read-modify-write with
//! `Release`; plain loads and stores of two words could be reordered. If `is_still` is false, the reader must look up
//! again: the entry may only have moved.
//!
//! # Writers
//!
//! [`XArray::prepare`] allocates nodes; [`XArray::lock`] returns a [`Writer`], whose methods neither fail nor allocate
//! nodes. Marks are set before a marked entry becomes visible, and cleared after it is gone. A reader that finds no
//! mark checks the slot again. So during a write it may see a mark too many, never one too few.
//!
//! # Nodes
//!
//! Nodes come from an implementation of `Nodes`. For page caches that is a [`Forest`], whose memory belongs to the
//! layer above (`slab`), so that nodes can be moved together. A thread that moves a node finds its array by number
//! (`arrays`); an array that is dropped waits for that thread.
//!
//! Uses `arena`, `epoch`. Lock order: an entry of `arrays`, the array (only tried there), the free numbers.

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

pub use forest::Forest;
pub use forest::{Forests, Source};
pub use marks::Mark;
pub use node::Node;
pub use pagemill_core::epoch::pin;
// Not named outside of the crate: a caller could return a node that an array holds.
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

/// Maps indices up to [`MAX_INDEX`] to values up to [`MAX_VALUE`]. Small, since there may be hundreds of thousands.
///
/// # Invariants
///
/// While the lock is free:
///
/// 1. The root word is empty, a value of order 0 at index 0, or the lowest node that covers all entries.
/// 2. Each node has a slot in use, and records their number and its own parent and offset. A root node has more in use
///    than a node, or an entry of order 0, in its first slot: the tree has no unneeded level.
/// 3. No slot is GONE or DEAD.
/// 4. A mark bit of a slot that holds a node is set exactly if the node has a bit of that mark.
///
/// ```
/// use pagemill::{Pagemill, epoch, xarray::{Mark, XArray}};
///
/// let array = XArray::new(Pagemill::of_process()?.slabs.nodes()?.forest());
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
/// # Ok::<(), pagemill::Error>(())
/// ```
pub struct XArray<N: Nodes> {
    root: IndexSlot,
    nodes: &'static N,
    lock: Lock,
    /// Marks of an entry in the root word, one bit each.
    root_marks: AtomicU32,
    /// Number of nodes in the tree. Changed under the lock.
    count: AtomicU32,
    /// Its number in [`Nodes::arrays`] once it has had a node; before that, whether it may get one. Changed under the
    /// lock.
    id: AtomicU32,
    /// Threads that move nodes access the array by its address.
    _pinned: PhantomPinned,
}

/// Values of `id` for arrays without a number: never (the array may move, or no number was free), and not yet (it had
/// no node).
const NO_ID: u32 = 0;
const NO_ID_YET: u32 = u32::MAX;

/// An entry that a reader found.
///
/// Example: [`XArray`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    pub value: u64,
    /// First index of the entry.
    pub first: u64,
    pub order: u32,
}

impl Found {
    /// Last index of the entry.
    #[inline]
    pub fn last(&self) -> u64 {
        word::last_of(self.first, self.order)
    }
}

impl<N: Nodes> XArray<N> {
    /// Makes an empty array with nodes that cannot be moved. Allocates no node.
    pub const fn new(nodes: &'static N) -> Self {
        Self::with_id(nodes, NO_ID)
    }

    const fn with_id(nodes: &'static N, id: u32) -> Self {
        let (root_marks, count, id) = (AtomicU32::new(0), AtomicU32::new(0), AtomicU32::new(id));
        Self { root: IndexSlot::new(), nodes, lock: Lock::new(), root_marks, count, id, _pinned: PhantomPinned }
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.root.look().is_empty()
    }

    /// Number of nodes of the tree, each of `Node`'s size.
    pub fn node_count(&self) -> u32 {
        self.count.load(Relaxed)
    }

    /// The number that its nodes hold; assigned with the first node. Under the lock.
    fn id(&self) -> u32 {
        let id = self.id.load(Relaxed);
        if id != NO_ID_YET {
            return id;
        }
        let id = self.nodes.arrays().enter(self).unwrap_or(NO_ID);
        self.id.store(id, Relaxed);
        id
    }

    /// Returns this node and all nodes below.
    fn give_tree(&self, word: IndexWord) {
        let node = self.nodes.node(word.number());
        node.slots.iter().map(IndexSlot::peek).filter(|word| word.is_node()).for_each(|below| self.give_tree(below));
        node.drop_out();
        self.nodes.give(word.number());
    }
}

/// Drop excludes readers, so the nodes are returned at once. Waits for a thread that moves one of them.
impl<N: Nodes> Drop for XArray<N> {
    fn drop(&mut self) {
        if self.nodes.are_inherited() {
            return;
        }
        let id = self.id.load(Relaxed);
        let has_id = ![NO_ID, NO_ID_YET].contains(&id);
        if has_id {
            self.nodes.arrays().leave(id);
        }
        let root = self.root.peek();
        if root.is_node() {
            self.give_tree(root);
        }
        // From here on no node holds the number.
        if has_id {
            self.nodes.arrays().give(id);
        }
    }
}
