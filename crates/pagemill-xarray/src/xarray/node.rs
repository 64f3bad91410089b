//! A node of an array's tree: slots, marks, its position in the tree, and the number of its array.
#![allow(unsafe_code)] // `Zeroed` for nodes; a call that only owners of nodes may make

use super::slots::IndexSlot;
use super::word::{IndexWord, SLOTS};
use pagemill_core::arena::Zeroed;
use pagemill_core::sync::{AtomicU32, AtomicU64, Relaxed, Release};

/// Number of marks that each entry has.
pub(super) const MARKS: usize = 3;

/// A node of an array's tree: 64 slots and their metadata. A node whose bits are all 0 is empty and in no tree.
///
/// Readers access slots and marks only. The other fields belong to the thread that holds the array's lock or, while the
/// node is in no tree, to the owner of the node. Only [`Node::may_move`] reads `array` without the lock. `parent` and
/// `place` tell which word points at the node, so that the node can be moved.
///
/// A node in no tree is *clean* (all zero except for list links) if its first slot is empty. Otherwise it must be
/// cleared before its next use.
///
/// Example: [`XArray`](super::XArray).
#[repr(C, align(64))]
pub struct Node {
    pub(super) slots: [IndexSlot; SLOTS],
    /// One bit for each mark and slot: set if the entry that begins in the slot, or any entry below the slot, has the
    /// mark.
    pub(super) marks: [AtomicU64; MARKS],
    /// Number of the parent node; 0 for a node that the root word points at. While the node is in no tree: number of
    /// the next node of a list.
    parent: AtomicU32,
    /// Slot of the parent that points at this node and, from bit [`SHIFT_POSITION`] on, the shift. While the node is in
    /// no tree: number of the first node of the next batch, in a list of batches.
    place: AtomicU32,
    /// Number of the node's slots that are not empty.
    used_slots: AtomicU32,
    /// Number of the node's array in [`super::Arrays`]; 0 if the node is in no array or its array has no number.
    /// Written under the lock of that array, or when the array is dropped.
    array: AtomicU32,
}

/// Position of the shift in the field `place`.
const SHIFT_POSITION: u32 = 8;

// SAFETY: a node consists of atomic words, for which zero bits are valid.
unsafe impl Zeroed for Node {}

impl Default for Node {
    fn default() -> Self {
        Self::new()
    }
}

impl Node {
    /// Creates an empty node, for memory that is not zeroed.
    pub(crate) const fn new() -> Self {
        Self {
            slots: [const { IndexSlot::new() }; SLOTS],
            marks: [const { AtomicU64::new(0) }; MARKS],
            parent: AtomicU32::new(0),
            place: AtomicU32::new(0),
            used_slots: AtomicU32::new(0),
            array: AtomicU32::new(0),
        }
    }

    /// Empties the node. No reader may have access to the node.
    ///
    /// # Safety
    ///
    /// The node is in no tree and in no list.
    pub unsafe fn clear(&self) {
        self.slots.iter().for_each(|slot| slot.publish(IndexWord::EMPTY));
        self.marks.iter().for_each(|marks| marks.store(0, Relaxed));
        self.header_fields().into_iter().for_each(|word| word.store(0, Relaxed));
    }

    /// Empties a node that is in no tree, unless the node is clean.
    pub(super) fn clear_if_needed(&self) {
        if !self.slots[0].load_relaxed().is_empty() {
            // SAFETY: in no tree, and its owner is about to use it.
            unsafe { self.clear() };
        }
    }

    /// Sets all slots of an unlinked node to DEAD, so that readers that reach the node restart, and excludes the node
    /// from moves.
    pub(super) fn mark_dead(&self) {
        self.slots.iter().for_each(|slot| slot.publish(IndexWord::DEAD));
        self.array.store(0, Relaxed);
    }

    /// As [`Node::mark_dead`], for a node without readers: sets only the first slot to DEAD, so that the node does not
    /// count as clean.
    pub(super) fn mark_dead_without_readers(&self) {
        self.slots[0].publish(IndexWord::DEAD);
        self.array.store(0, Relaxed);
    }

    /// Copies this node to the node `other`, which no reader can find yet.
    pub(super) fn copy_to(&self, other: &Self) {
        self.slots.iter().zip(&other.slots).for_each(|(from, to)| to.publish(from.load_relaxed()));
        self.marks.iter().zip(&other.marks).for_each(|(from, to)| to.store(from.load(Relaxed), Relaxed));
        for (from, to) in self.header_fields().into_iter().zip(other.header_fields()) {
            to.store(from.load(Relaxed), Relaxed);
        }
    }

    /// Returns the fields of the node other than slots and marks.
    fn header_fields(&self) -> [&AtomicU32; 4] {
        [&self.parent, &self.place, &self.used_slots, &self.array]
    }

    /// Returns whether the node seems to be in an array that has a number. The result is certain only under that
    /// array's lock.
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

    /// Stores the number of the next node of a list in this node, which is in no tree. 0 marks the end of the list.
    pub(super) fn set_next(&self, next: u32) {
        self.parent.store(next, Relaxed);
    }

    /// Returns the number of the next node in the list of this node; 0 at the end of the list.
    pub(super) fn next(&self) -> u32 {
        self.parent.load(Relaxed)
    }

    /// Stores the number of the first node of the next batch in this node, which is the first node of its own batch.
    pub(super) fn set_next_batch(&self, next: u32) {
        self.place.store(next, Relaxed);
    }

    /// Returns the number of the first node of the next batch in a list of batches; 0 at the end of the list. This node
    /// is the first node of its own batch.
    pub(super) fn next_batch(&self) -> u32 {
        self.place.load(Relaxed)
    }

    #[inline]
    pub(super) fn parent(&self) -> u32 {
        self.parent.load(Relaxed)
    }

    #[inline]
    pub(super) fn offset(&self) -> usize {
        (self.place.load(Relaxed) & ((1 << SHIFT_POSITION) - 1)) as usize
    }

    #[inline]
    pub(super) fn shift(&self) -> u32 {
        self.place.load(Relaxed) >> SHIFT_POSITION
    }

    /// Stores the new number of the parent node in this node, after the parent has moved.
    pub(super) fn set_parent(&self, parent: u32) {
        self.parent.store(parent, Relaxed);
    }

    /// Records the node's position in the tree: its parent, the slot `offset` of the parent, and its own shift.
    pub(super) fn set_position(&self, parent: u32, offset: usize, shift: u32) {
        self.parent.store(parent, Relaxed);
        self.place.store(offset as u32 | shift << SHIFT_POSITION, Relaxed);
    }

    pub(super) fn used_slots(&self) -> usize {
        self.used_slots.load(Relaxed) as usize
    }

    pub(super) fn set_used_slots(&self, used: usize) {
        debug_assert!(used <= SLOTS);
        self.used_slots.store(used as u32, Relaxed);
    }

    /// Returns whether any slot of the node that is in `mask` has the mark.
    #[inline]
    pub(super) fn is_marked(&self, mark: usize, mask: u64) -> bool {
        self.marks[mark].load(Relaxed) & mask != 0
    }

    #[inline]
    pub(super) fn add_mark(&self, mark: usize, mask: u64) {
        self.marks[mark].store(self.marks[mark].load(Relaxed) | mask, Release);
    }

    /// Adds those marks to the slots in `mask` that the slot `slot` of the node `from` has.
    pub(super) fn copy_marks(&self, from: &Self, slot: usize, mask: u64) {
        (0..MARKS).filter(|mark| from.is_marked(*mark, mask_of(slot, 1))).for_each(|mark| self.add_mark(mark, mask));
    }

    #[inline]
    pub(super) fn remove_mark(&self, mark: usize, mask: u64) {
        self.marks[mark].store(self.marks[mark].load(Relaxed) & !mask, Release);
    }
}

/// Returns a mask with the bits of these slots.
pub(super) fn mask_of_slots(slots: impl Iterator<Item = usize>) -> u64 {
    slots.fold(0, |mask, slot| mask | mask_of(slot, 1))
}

/// Returns a mask with the bits of `count` slots, beginning with slot `first`.
pub(super) fn mask_of(first: usize, count: usize) -> u64 {
    (u64::MAX >> (SLOTS - count)) << first
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The type `Node` must be small. A copy must have all fields of the original. `clear_if_needed` must clear a dead
    /// node, but not a clean one.
    #[test]
    fn a_node_is_small_and_can_be_cleared() {
        assert!(size_of::<Node>() <= 592);
        let node = Node::new();
        node.set_position(5, 63, 36);
        node.set_used_slots(SLOTS);
        assert_eq!((node.parent(), node.offset(), node.shift(), node.used_slots()), (5, 63, 36, SLOTS));
        node.add_mark(2, mask_of(60, 4));
        assert!(node.is_marked(2, 1 << 63) && !node.is_marked(2, mask_of(0, 60)) && !node.is_marked(1, u64::MAX));
        node.set_array(7);
        let copy = Node::new();
        node.slots[9].publish(IndexWord::value(3, 0));
        node.copy_to(&copy);
        assert_eq!(
            (copy.parent(), copy.offset(), copy.shift(), copy.used_slots(), copy.array()),
            (5, 63, 36, SLOTS, 7)
        );
        assert!(
            copy.is_marked(2, 1 << 63) && copy.slots[9].load_relaxed() == IndexWord::value(3, 0) && copy.may_move()
        );
        copy.mark_dead();
        assert!(copy.slots.iter().all(|slot| slot.load_relaxed() == IndexWord::DEAD) && !copy.may_move());
        copy.clear_if_needed();
        assert_eq!((copy.parent(), copy.used_slots(), copy.slots[9].load_relaxed()), (0, 0, IndexWord::EMPTY));
        node.mark_dead_without_readers();
        node.clear_if_needed();
        assert!(!node.may_move() && !node.is_marked(2, u64::MAX) && node.slots[9].load_relaxed() == IndexWord::EMPTY);
        node.set_next(8);
        node.set_next_batch(9);
        node.clear_if_needed();
        assert_eq!(
            (node.next(), node.next_batch(), node.slots[0].load_relaxed()),
            (8, 9, IndexWord::EMPTY),
            "a clean node is not cleared"
        );
        assert_eq!(mask_of(0, SLOTS), u64::MAX);
    }
}
