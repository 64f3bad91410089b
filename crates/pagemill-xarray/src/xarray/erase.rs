//! Operations of the writer that remove entries, and then the nodes that are no longer needed.

use super::Found;
use super::node::{MARKS, mask_of};
use super::nodes::Nodes;
use super::store::{SlotRange, Writer};
use super::word::IndexWord;

impl<N: Nodes> Writer<'_, N> {
    /// Removes the whole entry that covers the index, with one store, and returns the entry. Cost: a lookup, and the
    /// removal of nodes that become empty.
    pub fn erase(&mut self, index: u64) -> Option<Found> {
        let place = self.find_slots(index)?;
        self.remove_from_slots(&place);
        Some(place.found)
    }

    /// As [`Writer::erase`], but only if the entry has this value.
    pub fn erase_value(&mut self, index: u64, value: u64) -> Option<Found> {
        let place = self.slots_of_value(index, value)?;
        self.remove_from_slots(&place);
        Some(place.found)
    }

    /// Removes the entries that lie entirely inside `from..=to`, in ascending order. Calls `each` once for every entry,
    /// when no reader can find the entry any more. Entries that reach beyond the range stay.
    #[cfg(any(test, feature = "test-util"))]
    pub fn erase_range(&mut self, from: u64, to: u64, mut each: impl FnMut(Found)) {
        let mut at = from;
        while let Some(found) = self.next(at, to) {
            if found.first >= from && found.last() <= to {
                self.erase(found.first);
                each(found);
            }
            at = found.last() + 1;
        }
    }

    /// Removes the entry in the slots `place`, and then the nodes that became empty.
    fn remove_from_slots(&self, place: &SlotRange) {
        if place.node == 0 {
            self.array.root.publish(IndexWord::EMPTY);
            return self.set_root_marks(0);
        }
        let node = self.node(place.node);
        let count = 1 << (place.found.order - node.shift());
        super::slots::remove_entry(&node.slots, place.slot, count);
        node.set_used_slots(node.used_slots() - count);
        self.remove_marks(place.node, mask_of(place.slot, count));
        self.remove_empty_nodes(place.node);
    }

    /// Removes the node with this number if it is empty, then its parents as long as they are empty.
    fn remove_empty_nodes(&self, mut number: u32) {
        while number != 0 && self.node(number).used_slots() == 0 {
            let node = self.node(number);
            let above = node.parent();
            match above {
                0 => {
                    self.array.root.publish(IndexWord::EMPTY);
                    self.set_root_marks(0);
                }
                _ => {
                    self.node(above).slots[node.offset()].publish(IndexWord::EMPTY);
                    self.node(above).set_used_slots(self.node(above).used_slots() - 1);
                }
            }
            self.retire_node(number);
            number = above;
        }
        self.remove_unneeded_levels();
    }

    /// Removes root nodes while [`Writer::remove_root_level`] succeeds.
    pub(super) fn remove_unneeded_levels(&self) {
        while self.remove_root_level() {}
    }

    /// Removes the root node if only its first slot is in use, and the word of that slot can be the root word. Returns
    /// whether the root node was removed.
    fn remove_root_level(&self) -> bool {
        let root = self.array.root.load_relaxed();
        if !root.is_node() || self.node(root.number()).used_slots() != 1 {
            return false;
        }
        let node = self.node(root.number());
        let word = node.slots[0].load_relaxed();
        if word.is_node() {
            self.node(word.number()).set_position(0, 0, word.shift());
        } else if word.is_value() && word.order() == 0 {
            let bit = |mark: usize| u32::from(node.is_marked(mark, 1)) << mark;
            self.set_root_marks((0..MARKS).map(bit).sum());
        } else {
            return false;
        }
        self.array.root.publish(word);
        self.retire_node(root.number());
        true
    }
}
