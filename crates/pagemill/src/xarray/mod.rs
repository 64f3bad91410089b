//! The index of a page cache: from page indices to values, for many readers and one writer at a time.
//!
//! ```text
//!   XArray  root -> node 9, shift 6                        indices up to 64 * 64 - 1
//!                     |
//!            node 9   [ -> node 4 | page x, order 7 | -> slot 1 | ... ]      each slot: 64 indices
//!                         |
//!            node 4       [ page a | page b | . | page c, order 1 | -> slot 3 | ... ]
//! ```
//!
//! A tree of nodes with 64 slots (`word`, `node`). An entry of order *n* covers `1 << n` indices, aligned to that, in one
//! node: it stands in its first slot, the later ones name that (`slots`), so it is one word that comes, changes and goes. An
//! entry of order 0 at index 0, alone, stands in the root word. Each entry has three marks; a node's slots have those of
//! what is below. After Linux's XArray (Documentation/core-api/xarray.rst), with its own protocol.
//!
//! # Readers
//!
//! Readers take no lock. They hold a [`crossbeam_epoch::Guard`] of our own collector ([`pin`]), so no
//! node is used anew under them; writers do not wait for them. For each index by itself what a reader finds was there at
//! some moment of the call, and it finds nothing only if at some moment nothing was there:
//!
//! 1. A slot belongs to the same indices as long as its node is in the tree; a taller or lower tree changes the root word
//!    and what hangs below it, never a node's place among the indices.
//! 2. A reader that comes to a node by its word came while it was in the tree. What leaves is cut off first, then all of
//!    its slots become DEAD. So a word read there that is not DEAD is what stood there at the cut, or before: as good as
//!    having read at a moment between coming and the cut. DEAD sends the reader back to the root, where it sees the cut.
//! 3. So it is when a tree grows (the former root's word moves into a new node, then that becomes the root), when it becomes
//!    lower (the other way round, then the former root is DEAD), and when the entry alone moves to the root word or from it.
//! 4. Inside of a node the rules of `slots` hold: a name of another slot that does not lead to an answer is out of date.
//! 5. Beyond what the root word reaches there is nothing, by that word alone.
//! 6. A node that moves ([`relocate()`]) leaves as any other; what hangs below it stays where it is.
//!
//! A reader begins again only when a writer has gone on, at most once for each of its changes.
//!
//! # The contract of [`Hit::is_still`]
//!
//! Whenever an entry leaves (erased, replaced, covered, split, joined, or moved with its node or to the root), the slot that
//! a reader may have it from is overwritten before the call that does it returns; in [`Writer::erase_range`] before the
//! callback has it. So whoever finds a value, pins what it stands for, and then sees `is_still`, has pinned what cannot have
//! been released since: the releaser takes the entry out first, then looks for pins. The pin must be a read-modify-write
//! with `Acquire` of a word which the releaser changes from "no pins" by one with `Release`; plain loads and
//! stores of two words would pass each other. A `false` means: look again; the entry may only have moved.
//!
//! # Writers
//!
//! [`XArray::prepare`] takes nodes; [`XArray::lock`] gives a [`Writer`], of which nothing fails and nothing allocates nodes.
//! Marks are set before an entry that has them can be found, and taken off after. A reader that finds no mark looks at the
//! slot again: so it may meet a mark too many while something is written, never one too few.
//!
//! # Nodes
//!
//! They come from whoever has [`Nodes`]: for page caches a [`Forest`], whose memory is above (`slab`), so that nodes can be moved
//! together. Who moves one finds its array by number ([`Arrays`]); an array that is dropped waits for him.
//!
//! Below: `arena`, `epoch`. Lock order: an entry of [`Arrays`], the array (only tried there), the free numbers.

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
#[cfg(test)]
mod test_forest;
#[cfg(all(test, not(shuttle)))]
mod thread_tests;
mod walk;
mod word;

pub use crate::epoch::pin;
pub use arrays::Arrays;
pub use forest::{Forest, Forests, Source};
pub use marks::Mark;
pub use node::Node;
pub use nodes::Nodes;
pub use relocate::relocate;
pub use stock::Stock;
pub use store::Writer;
#[cfg(test)]
pub(crate) use test_forest::OneForest;
pub use walk::Hit;
pub use word::{MAX_INDEX, MAX_ORDER, MAX_VALUE};

use crate::sync::{AtomicU32, Lock, Relaxed};
use slots::Slot;
use std::marker::PhantomPinned;
use word::Word;

/// From indices up to [`MAX_INDEX`] to values up to [`MAX_VALUE`]. Small: there may be hundreds of thousands.
///
/// # Invariants
///
/// While nobody has the lock:
///
/// 1. The root word is empty, a value of order 0 at index 0, or the lowest node that has a place for all entries.
/// 2. Each node has a slot in use, knows how many, and where it hangs. A root node has more in use than a node, or an entry of
///    order 0, in its first slot: the tree has no level too many.
/// 3. No slot says GONE or DEAD.
/// 4. A mark bit of a slot that holds a node is set exactly if the node has a bit of that mark.
pub struct XArray<N: Nodes> {
    root: Slot,
    nodes: &'static N,
    lock: Lock,
    /// Of an entry in the root word: bit per mark.
    root_marks: AtomicU32,
    /// Nodes of the tree. Changed under the lock.
    count: AtomicU32,
    /// Its number among [`Nodes::arrays`], once it has had a node; else whether it may have one. Changed under the lock.
    id: AtomicU32,
    /// Who moves nodes comes to it by its address.
    _pinned: PhantomPinned,
}

/// Numbers of arrays that have none: because they may move themselves, or there was none left; or because they had no node yet.
const NO_ID: u32 = 0;
const NO_ID_YET: u32 = u32::MAX;

/// What a reader found.
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
    /// An empty one, whose nodes stay where they are. Takes no node.
    pub const fn new(nodes: &'static N) -> Self {
        Self::with_id(nodes, NO_ID)
    }

    const fn with_id(nodes: &'static N, id: u32) -> Self {
        let (root_marks, count, id) = (AtomicU32::new(0), AtomicU32::new(0), AtomicU32::new(id));
        Self { root: Slot::new(), nodes, lock: Lock::new(), root_marks, count, id, _pinned: PhantomPinned }
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.root.look().is_empty()
    }

    /// Nodes of the tree, each [`Node`]'s size.
    pub fn node_count(&self) -> u32 {
        self.count.load(Relaxed)
    }

    /// What its nodes say: its number, which it gets with the first of them. Under the lock.
    fn id(&self) -> u32 {
        let id = self.id.load(Relaxed);
        if id != NO_ID_YET {
            return id;
        }
        let id = self.nodes.arrays().enter(self).unwrap_or(NO_ID);
        self.id.store(id, Relaxed);
        id
    }

    /// Gives the nodes from here on down.
    fn give_tree(&self, word: Word) {
        let node = self.nodes.node(word.number());
        node.slots.iter().map(Slot::peek).filter(|word| word.is_node()).for_each(|below| self.give_tree(below));
        node.drop_out();
        self.nodes.give(word.number());
    }
}

/// Nobody reads any more: the nodes go back at once. Waits for who moves one of them.
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
        // Now no node says it.
        if has_id {
            self.nodes.arrays().give(id);
        }
    }
}
