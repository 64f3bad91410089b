//! Marks: three bits of each entry. A slot that refers to a node has the marks of all entries below it.

use super::node::{MARKS, mask_of};
use super::nodes::Nodes;
use super::store::{SlotRange, Writer};
use pagemill_core::sync::{Relaxed, Release};

/// One of the marks of an entry. Users of the array define the meaning of each mark.
///
/// Example: [`XArray`](super::XArray).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    A = 0,
    B = 1,
    C = 2,
}

impl Mark {
    pub const ALL: [Self; MARKS] = [Self::A, Self::B, Self::C];
}

impl<N: Nodes> Writer<'_, N> {
    /// Sets a mark of the entry that covers the index. Returns false if no entry covers the index. Cost: a lookup, and
    /// a store for each level that lacks the mark.
    pub fn set_mark(&mut self, index: u64, mark: Mark) -> bool {
        self.find_slots(index).map(|place| self.set_mark_at(&place, mark)).is_some()
    }

    /// Sets a mark of the entry in the slots `place`.
    fn set_mark_at(&self, place: &SlotRange, mark: Mark) {
        match place.node {
            0 => self.set_root_marks(self.root_marks() | 1 << mark as u32),
            number => self.add_mark(number, place.slot, mark as usize),
        }
    }

    /// Clears a mark of the entry in the slots `place`.
    fn clear_mark_at(&self, place: &SlotRange, mark: Mark) {
        match place.node {
            0 => self.set_root_marks(self.root_marks() & !(1 << mark as u32)),
            number => self.remove_mark(number, mask_of(place.slot, 1), mark as usize),
        }
    }

    /// As [`Writer::set_mark`], but only if the entry has the value `value`. Returns whether an entry with that value
    /// covers the index.
    pub fn set_mark_of(&mut self, index: u64, value: u64, mark: Mark) -> bool {
        self.slots_of_value(index, value).map(|place| self.set_mark_at(&place, mark)).is_some()
    }

    /// Clears a mark of the entry that covers the index, but only if the entry has the value `value`. Returns whether
    /// an entry with that value covers the index. Cost: as [`Writer::set_mark`].
    pub fn clear_mark_of(&mut self, index: u64, value: u64, mark: Mark) -> bool {
        self.slots_of_value(index, value).map(|place| self.clear_mark_at(&place, mark)).is_some()
    }

    /// Returns the slots of the entry that covers the index; `None` unless the entry has the value `value`.
    pub(super) fn slots_of_value(&self, index: u64, value: u64) -> Option<SlotRange> {
        self.find_slots(index).filter(|place| place.found.value == value)
    }

    /// Returns whether the entry that covers the index has the mark.
    pub fn get_mark(&self, index: u64, mark: Mark) -> bool {
        let marks = |place: SlotRange| match place.node {
            0 => u64::from(self.root_marks()) >> mark as u32,
            number => u64::from(self.node(number).is_marked(mark as usize, mask_of(place.slot, 1))),
        };
        self.find_slots(index).is_some_and(|place| marks(place) & 1 != 0)
    }

    /// Returns the marks of the entry in the root word, with one bit for each mark.
    pub(super) fn root_marks(&self) -> u32 {
        self.array.root_marks.load(Relaxed)
    }

    pub(super) fn set_root_marks(&self, marks: u32) {
        self.array.root_marks.store(marks, Release);
    }

    /// Sets a mark of slot `slot` in the node with this number, and of the slots that lead to the node.
    pub(super) fn add_mark(&self, mut number: u32, mut slot: usize, mark: usize) {
        while number != 0 {
            let node = self.node(number);
            let bit = mask_of(slot, 1);
            if node.is_marked(mark, bit) {
                return;
            }
            node.add_mark(mark, bit);
            (number, slot) = (node.parent(), node.offset());
        }
    }

    /// Clears a mark of the slots in `mask` of the node with this number. Also clears the mark of each slot that leads
    /// to the node, if no slot below has it any more.
    pub(super) fn remove_mark(&self, mut number: u32, mut mask: u64, mark: usize) {
        while number != 0 {
            let node = self.node(number);
            if !node.is_marked(mark, mask) {
                return;
            }
            node.remove_mark(mark, mask);
            if node.is_marked(mark, u64::MAX) {
                return;
            }
            (number, mask) = (node.parent(), mask_of(node.offset(), 1));
        }
    }

    /// Clears all marks of the slots in `mask`, as [`Writer::remove_mark`] does for one mark.
    pub(super) fn remove_marks(&self, number: u32, mask: u64) {
        (0..MARKS).for_each(|mark| self.remove_mark(number, mask, mark));
    }
}
