//! A node of the tree: slots, marks, where it hangs, and whose it is.
#![allow(unsafe_code)] // says that zero bits are a node

use super::slots::Slot;
use super::word::{SLOTS, Word};
use crate::arena::Zeroed;
use crate::sync::{AtomicU32, AtomicU64, Relaxed, Release};

/// Marks of an entry.
pub(super) const MARKS: usize = 3;

/// 64 slots, and what is known of them. Zero bits are an empty node that is in no tree.
///
/// All but slots and marks is for who has the lock of the array, or of a node in no tree for who has that. Parent and offset say
/// which word points here, so that a node can be found from below, and moved.
///
/// A node of no tree is *clean* (all zero but for its link) if its first slot is empty; else it has to be cleared before its next use.
#[repr(C, align(64))]
pub struct Node {
    pub(super) slots: [Slot; SLOTS],
    /// Per mark and slot: the entry that begins there has it, or something below.
    pub(super) marks: [AtomicU64; MARKS],
    /// Number of the node above; 0 below the root word. In no tree: the next of a list.
    parent: AtomicU32,
    /// Slot of the node above, and from [`SHIFT_AT`] on the shift. In no tree: the next list of a list of them.
    place: AtomicU32,
    /// Slots that are not empty.
    used: AtomicU32,
    /// The array in whose tree it is, as [`super::Arrays`] knows it; 0 in none, or in one that nobody is to find. Written with the
    /// lock of that array, or by who drops it.
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
    /// An empty one, for those who keep nodes elsewhere than in a table of zero bits.
    pub const fn new() -> Self {
        Self {
            slots: [const { Slot::new() }; SLOTS],
            marks: [const { AtomicU64::new(0) }; MARKS],
            parent: AtomicU32::new(0),
            place: AtomicU32::new(0),
            used: AtomicU32::new(0),
            array: AtomicU32::new(0),
        }
    }

    /// Empties it. Only when no reader can have it any more.
    pub fn clear(&self) {
        self.slots.iter().for_each(|slot| slot.publish(Word::EMPTY));
        self.marks.iter().for_each(|marks| marks.store(0, Relaxed));
        self.head().into_iter().for_each(|word| word.store(0, Relaxed));
    }

    /// Of a node in no tree: empties it, if it is not clean.
    pub(super) fn clean(&self) {
        if !self.slots[0].peek().is_empty() {
            self.clear();
        }
    }

    /// Takes it out of use, once it has been cut off: readers that come to it begin again, and nobody moves it.
    pub(super) fn kill(&self) {
        self.slots.iter().for_each(|slot| slot.publish(Word::DEAD));
        self.array.store(0, Relaxed);
    }

    /// The same where nobody reads: it is not clean.
    pub(super) fn drop_out(&self) {
        self.slots[0].publish(Word::DEAD);
        self.array.store(0, Relaxed);
    }

    /// Makes another, which nobody can find yet, what this one is.
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

    /// Whether it seems to be in a tree whose array can be found. Known for sure under that array's lock.
    pub fn may_move(&self) -> bool {
        self.array() != 0
    }

    pub(super) fn array(&self) -> u32 {
        self.array.load(Relaxed)
    }

    pub(super) fn set_array(&self, id: u32) {
        self.array.store(id, Relaxed);
    }

    /// While it is in no tree: puts it before another in a list (0: before none).
    pub(super) fn set_next(&self, next: u32) {
        self.parent.store(next, Relaxed);
    }

    /// Which one it was put before.
    pub(super) fn next(&self) -> u32 {
        self.parent.load(Relaxed)
    }

    /// The same of lists, of each in its first node.
    pub(super) fn set_next_list(&self, next: u32) {
        self.place.store(next, Relaxed);
    }

    pub(super) fn next_list(&self) -> u32 {
        self.place.load(Relaxed)
    }

    pub(super) fn parent(&self) -> u32 {
        self.parent.load(Relaxed)
    }

    pub(super) fn offset(&self) -> usize {
        (self.place.load(Relaxed) & ((1 << SHIFT_AT) - 1)) as usize
    }

    pub(super) fn shift(&self) -> u32 {
        self.place.load(Relaxed) >> SHIFT_AT
    }

    /// Says that the node above has another number now.
    pub(super) fn set_parent(&self, parent: u32) {
        self.parent.store(parent, Relaxed);
    }

    /// Says where it hangs.
    pub(super) fn hang(&self, parent: u32, offset: usize, shift: u32) {
        self.parent.store(parent, Relaxed);
        self.place.store(offset as u32 | shift << SHIFT_AT, Relaxed);
    }

    pub(super) fn used(&self) -> usize {
        self.used.load(Relaxed) as usize
    }

    pub(super) fn set_used(&self, used: usize) {
        debug_assert!(used <= SLOTS);
        self.used.store(used as u32, Relaxed);
    }

    /// Whether any of the slots in the mask has the mark.
    pub(super) fn is_marked(&self, mark: usize, mask: u64) -> bool {
        self.marks[mark].load(Relaxed) & mask != 0
    }

    pub(super) fn add_mark(&self, mark: usize, mask: u64) {
        self.marks[mark].store(self.marks[mark].load(Relaxed) | mask, Release);
    }

    pub(super) fn remove_mark(&self, mark: usize, mask: u64) {
        self.marks[mark].store(self.marks[mark].load(Relaxed) & !mask, Release);
    }
}

/// The bits of `count` slots from `first` on.
pub(super) fn mask_of(first: usize, count: usize) -> u64 {
    (u64::MAX >> (SLOTS - count)) << first
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A node is small enough for 9.5 bytes per index; lists leave no trace; masks go to the last slot.
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
        node.slots[9].publish(Word::value(3, 0));
        node.copy_to(&copy);
        assert_eq!((copy.parent(), copy.offset(), copy.shift(), copy.used(), copy.array()), (5, 63, 36, SLOTS, 7));
        assert!(copy.is_marked(2, 1 << 63) && copy.slots[9].peek() == Word::value(3, 0) && copy.may_move());
        copy.kill();
        assert!(copy.slots.iter().all(|slot| slot.peek() == Word::DEAD) && !copy.may_move());
        copy.clean();
        assert_eq!((copy.parent(), copy.used(), copy.slots[9].peek()), (0, 0, Word::EMPTY));
        node.drop_out();
        node.clean();
        assert!(!node.may_move() && !node.is_marked(2, u64::MAX) && node.slots[9].peek() == Word::EMPTY);
        node.set_next(8);
        node.set_next_list(9);
        node.clean();
        assert_eq!((node.next(), node.next_list(), node.slots[0].peek()), (8, 9, Word::EMPTY), "it is clean already");
        assert_eq!(mask_of(0, SLOTS), u64::MAX);
    }
}
