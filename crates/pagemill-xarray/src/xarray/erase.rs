//! Writers: removing entries, and nodes that are no longer needed.

use super::Found;
use super::node::{MARKS, mask_of};
use super::nodes::Nodes;
use super::store::{SlotRange, Writer};
use super::word::IndexWord;

impl<N: Nodes> Writer<'_, N> {
    /// Removes the whole entry that covers the index, with one store; returns it. Cost: a lookup, and the removal of
    /// nodes that become empty.
    pub fn erase(&mut self, index: u64) -> Option<Found> {
        let place = self.place(index)?;
        self.take_out(&place);
        Some(place.found)
    }

    /// Removes the entries that lie entirely inside `from..=to`, in ascending order, and passes each to `each` once no
    /// reader can find it any more. Entries that reach beyond the range stay.
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

    fn take_out(&self, place: &SlotRange) {
        if place.node == 0 {
            self.array.root.publish(IndexWord::EMPTY);
            return self.set_root_marks(0);
        }
        let node = self.node(place.node);
        let count = 1 << (place.found.order - node.shift());
        super::slots::leave(&node.slots, place.slot, count);
        node.set_used(node.used() - count);
        self.remove_marks(place.node, mask_of(place.slot, count));
        self.prune(place.node);
    }

    /// Removes the node if it is empty, then empty nodes above it.
    fn prune(&self, number: u32) {
        let mut number = number;
        while number != 0 && self.node(number).used() == 0 {
            let node = self.node(number);
            let above = node.parent();
            match above {
                0 => self.array.root.publish(IndexWord::EMPTY),
                _ => {
                    self.node(above).slots[node.offset()].publish(IndexWord::EMPTY);
                    self.node(above).set_used(self.node(above).used() - 1);
                }
            }
            self.bury(number);
            number = above;
        }
        self.free_retired();
    }

    /// Removes unneeded levels at the top.
    pub(super) fn free_retired(&self) {
        while self.lower() {}
    }

    /// Removes the root node if only its first slot is in use and that slot's word can be the root. Returns whether it
    /// did.
    fn lower(&self) -> bool {
        let root = self.array.root.peek();
        if !root.is_node() || self.node(root.number()).used() != 1 {
            return false;
        }
        let node = self.node(root.number());
        let word = node.slots[0].peek();
        if word.is_node() {
            self.node(word.number()).hang(0, 0, word.shift());
        } else if word.is_value() && word.order() == 0 {
            let bit = |mark: usize| u32::from(node.is_marked(mark, 1)) << mark;
            self.set_root_marks((0..MARKS).map(bit).sum());
        } else {
            return false;
        }
        self.array.root.publish(word);
        self.bury(root.number());
        true
    }
}
