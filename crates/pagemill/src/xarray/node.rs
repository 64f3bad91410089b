//! A node of the tree: slots, marks, and where it hangs.
#![allow(unsafe_code)] // says that zero bits are a node

use super::slots::Slot;
use super::word::{SLOTS, Word};
use crate::arena::Zeroed;
use crate::sync::{AtomicU32, AtomicU64, Relaxed, Release};

/// Marks of an entry.
pub(super) const MARKS: usize = 3;

/// 64 slots, and what is known of them. Zero bits are an empty node that is in no tree.
///
/// All but slots and marks is for who has the lock of the array. Parent and offset say which word points here, so that a
/// node can be found from below, and moved.
#[repr(C)]
pub struct Node {
    pub(super) slots: [Slot; SLOTS],
    /// Per mark and slot: the entry that begins there has it, or something below.
    pub(super) marks: [AtomicU64; MARKS],
    /// Number of the node above; 0 below the root word.
    parent: AtomicU32,
    /// Slot of the node above, and from [`SHIFT_AT`] on the shift.
    place: AtomicU32,
    /// Slots that are not empty.
    used: AtomicU32,
    _spare: AtomicU32,
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
            _spare: AtomicU32::new(0),
        }
    }

    /// Empties it for its next use. Only when no reader can have it any more.
    pub fn clear(&self) {
        self.slots.iter().for_each(|slot| slot.publish(Word::EMPTY));
        self.marks.iter().for_each(|marks| marks.store(0, Relaxed));
        for word in [&self.parent, &self.place, &self.used] {
            word.store(0, Relaxed);
        }
    }

    /// While it is in no tree: puts it before another in a list (0: before none).
    pub fn set_next(&self, next: u32) {
        self.slots[0].publish(Word(u64::from(next)));
    }

    /// Which one it was put before.
    pub fn next(&self) -> u32 {
        self.slots[0].peek().0 as u32
    }

    /// Ends [`Node::set_next`]: it is empty again. Returns which one it was put before.
    pub fn take_next(&self) -> u32 {
        let next = self.next();
        self.slots[0].publish(Word::EMPTY);
        next
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
        node.slots[9].publish(Word::DEAD);
        node.clear();
        assert_eq!((node.parent(), node.used(), node.slots[9].peek()), (0, 0, Word::EMPTY));
        node.set_next(8);
        assert_eq!((node.take_next(), node.slots[0].peek(), mask_of(0, SLOTS)), (8, Word::EMPTY, u64::MAX));
    }
}
