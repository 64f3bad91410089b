//! A node of the tree: slots, marks, its place in the tree, and its array.
#![allow(unsafe_code)] // `Zeroed` for nodes; a call that only owners of nodes may make

use super::slots::IndexSlot;
use super::word::{IndexWord, SLOTS};
use pagemill_core::arena::Zeroed;
use pagemill_core::sync::{AtomicU32, AtomicU64, Relaxed, Release};

/// Number of marks of an entry.
pub(super) const MARKS: usize = 3;

/// 64 slots and their metadata. Zero bits are an empty node that is in no tree.
///
/// Except for slots and marks, the fields are accessed only by the thread that holds the array's lock or, for a node in
/// no tree, by its owner. Parent and offset locate the word that points here, so that a node can be found from below,
/// and moved.
///
/// A node in no tree is *clean* (all zero except for its link) if its first slot is empty; otherwise it must be cleared
/// before its next use.
///
/// Example: [`XArray`](super::XArray).
#[repr(C, align(64))]
pub struct Node {
    pub(super) slots: [IndexSlot; SLOTS],
    /// One bit per mark and slot: the entry that begins there has the mark, or an entry below it.
    pub(super) marks: [AtomicU64; MARKS],
    /// Number of the node above; 0 below the root word. In no tree: the next node of a list.
    parent: AtomicU32,
    /// Slot in the node above, and from [`SHIFT_AT`] on the shift. In no tree: the next batch in a list of batches.
    place: AtomicU32,
    /// Number of slots that are not empty.
    used: AtomicU32,
    /// Number of its array in [`super::Arrays`]; 0 if it has none, or if the array cannot be found. Written under the
    /// lock of that array, or by its drop.
    array: AtomicU32,
}

const SHIFT_AT: u32 = 8;

// SAFETY: atomic words.
unsafe impl Zeroed for Node {}

impl Default for Node {
    fn default() -> Self {
        Self::new()
    }
}

impl Node {
    /// An empty node, for owners that do not keep nodes in a table of zero bits.
    pub(crate) const fn new() -> Self {
        Self {
            slots: [const { IndexSlot::new() }; SLOTS],
            marks: [const { AtomicU64::new(0) }; MARKS],
            parent: AtomicU32::new(0),
            place: AtomicU32::new(0),
            used: AtomicU32::new(0),
            array: AtomicU32::new(0),
        }
    }

    /// Empties it. No reader may have access any more.
    ///
    /// # Safety
    ///
    /// It is in no tree and in no list.
    pub unsafe fn clear(&self) {
        self.slots.iter().for_each(|slot| slot.publish(IndexWord::EMPTY));
        self.marks.iter().for_each(|marks| marks.store(0, Relaxed));
        self.head().into_iter().for_each(|word| word.store(0, Relaxed));
    }

    /// Empties a node in no tree, unless it is clean.
    pub(super) fn clean(&self) {
        if !self.slots[0].peek().is_empty() {
            // SAFETY: in no tree, and its owner is about to use it.
            unsafe { self.clear() };
        }
    }

    /// Takes an unlinked node out of use: readers that reach it restart, and it is not moved any more.
    pub(super) fn kill(&self) {
        self.slots.iter().for_each(|slot| slot.publish(IndexWord::DEAD));
        self.array.store(0, Relaxed);
    }

    /// As [`Node::kill`], if there are no readers. The node is not clean.
    pub(super) fn drop_out(&self) {
        self.slots[0].publish(IndexWord::DEAD);
        self.array.store(0, Relaxed);
    }

    /// Copies this node to another one, which no reader can find yet.
    pub(super) fn copy_to(&self, other: &Self) {
        self.slots.iter().zip(&other.slots).for_each(|(from, to)| to.publish(from.peek()));
        self.marks.iter().zip(&other.marks).for_each(|(from, to)| to.store(from.load(Relaxed), Relaxed));
        for (from, to) in self.head().into_iter().zip(other.head()) {
            to.store(from.load(Relaxed), Relaxed);
        }
    }

    fn head(&self) -> [&AtomicU32; 4] {
        [&self.parent, &self.place, &self.used, &self.array]
    }

    /// Whether it seems to be in a tree of an array that can be found. Certain only under that array's lock.
    #[inline]
    pub fn may_move(&self) -> bool {
        self.array() != 0
    }

    #[inline]
    pub(super) fn array(&self) -> u32 {
        self.array.load(Relaxed)
    }

    #[inline]
    pub(super) fn set_array(&self, id: u32) {
        self.array.store(id, Relaxed);
    }

    /// Links a node in no tree before another one in a list (0: end of the list).
    pub(super) fn set_next(&self, next: u32) {
        self.parent.store(next, Relaxed);
    }

    /// The next node of the list.
    pub(super) fn next(&self) -> u32 {
        self.parent.load(Relaxed)
    }

    /// Links a batch before another one; uses the first node of each.
    pub(super) fn set_next_list(&self, next: u32) {
        self.place.store(next, Relaxed);
    }

    pub(super) fn next_list(&self) -> u32 {
        self.place.load(Relaxed)
    }

    #[inline]
    pub(super) fn parent(&self) -> u32 {
        self.parent.load(Relaxed)
    }

    #[inline]
    pub(super) fn offset(&self) -> usize {
        (self.place.load(Relaxed) & ((1 << SHIFT_AT) - 1)) as usize
    }

    #[inline]
    pub(super) fn shift(&self) -> u32 {
        self.place.load(Relaxed) >> SHIFT_AT
    }

    /// Sets a new number of the node above.
    #[inline]
    pub(super) fn set_parent(&self, parent: u32) {
        self.parent.store(parent, Relaxed);
    }

    /// Sets its place in the tree.
    #[inline]
    pub(super) fn hang(&self, parent: u32, offset: usize, shift: u32) {
        self.parent.store(parent, Relaxed);
        self.place.store(offset as u32 | shift << SHIFT_AT, Relaxed);
    }

    #[inline]
    pub(super) fn used(&self) -> usize {
        self.used.load(Relaxed) as usize
    }

    #[inline]
    pub(super) fn set_used(&self, used: usize) {
        debug_assert!(used <= SLOTS);
        self.used.store(used as u32, Relaxed);
    }

    /// Whether any of the slots in the mask has the mark.
    #[inline]
    pub(super) fn is_marked(&self, mark: usize, mask: u64) -> bool {
        self.marks[mark].load(Relaxed) & mask != 0
    }

    #[inline]
    pub(super) fn add_mark(&self, mark: usize, mask: u64) {
        self.marks[mark].store(self.marks[mark].load(Relaxed) | mask, Release);
    }

    #[inline]
    pub(super) fn remove_mark(&self, mark: usize, mask: u64) {
        self.marks[mark].store(self.marks[mark].load(Relaxed) & !mask, Release);
    }
}

/// A mask with `count` bits from `first` on.
#[inline]
pub(super) fn mask_of(first: usize, count: usize) -> u64 {
    (u64::MAX >> (SLOTS - count)) << first
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A node is small enough for 9.5 bytes per index; links leave it clean; masks include the last slot.
    #[test]
    fn a_node_is_small_and_clears() {
        assert!(size_of::<Node>() <= 592);
        let node = Node::new();
        node.hang(5, 63, 36);
        node.set_used(SLOTS);
        assert_eq!((node.parent(), node.offset(), node.shift(), node.used()), (5, 63, 36, SLOTS));
        node.add_mark(2, mask_of(60, 4));
        assert!(node.is_marked(2, 1 << 63) && !node.is_marked(2, mask_of(0, 60)) && !node.is_marked(1, u64::MAX));
        node.set_array(7);
        let copy = Node::new();
        node.slots[9].publish(IndexWord::value(3, 0));
        node.copy_to(&copy);
        assert_eq!((copy.parent(), copy.offset(), copy.shift(), copy.used(), copy.array()), (5, 63, 36, SLOTS, 7));
        assert!(copy.is_marked(2, 1 << 63) && copy.slots[9].peek() == IndexWord::value(3, 0) && copy.may_move());
        copy.kill();
        assert!(copy.slots.iter().all(|slot| slot.peek() == IndexWord::DEAD) && !copy.may_move());
        copy.clean();
        assert_eq!((copy.parent(), copy.used(), copy.slots[9].peek()), (0, 0, IndexWord::EMPTY));
        node.drop_out();
        node.clean();
        assert!(!node.may_move() && !node.is_marked(2, u64::MAX) && node.slots[9].peek() == IndexWord::EMPTY);
        node.set_next(8);
        node.set_next_list(9);
        node.clean();
        assert_eq!(
            (node.next(), node.next_list(), node.slots[0].peek()),
            (8, 9, IndexWord::EMPTY),
            "it is clean already"
        );
        assert_eq!(mask_of(0, SLOTS), u64::MAX);
    }
}
