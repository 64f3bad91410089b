//! Writers: splitting one entry into smaller ones and joining entries into one. Readers always find the old entries or
//! the new ones.

use super::Found;
use super::node::{MARKS, mask_of};
use super::nodes::Nodes;
use super::slots::{enter, part};
use super::stock::NodeStock;
use super::store::{SlotRange, Writer, checked};
use super::word::{self, IndexWord, SLOTS};
use pagemill_core::sync::Relaxed;

impl<N: Nodes> Writer<'_, N> {
    /// Splits the entry that covers `index` into entries of a smaller order. `value_at` returns the value for the first
    /// index of each part; it is called in unspecified order, and must not panic. The parts inherit the marks. Returns
    /// the old entry; without one nothing changes.
    ///
    /// Readers find no gap. The slot of the old entry's value is overwritten last: until then the entry may be found,
    /// and `is_still` is true. Cost: a store for each part and each slot. The stock: [`super::XArray::prepare_split`].
    pub fn split(
        &mut self,
        index: u64,
        into_order: u32,
        stock: &mut NodeStock<N>,
        mut value_at: impl FnMut(u64) -> u64,
    ) -> Option<Found> {
        let place = self.place(index)?;
        let old = place.found;
        assert!(into_order < old.order, "the parts of an entry are smaller");
        assert!(stock.is_of(self.array.nodes), "a stock is for arrays with the same nodes");
        let shift = self.node(place.node).shift();
        let first_of_slot = |slot: usize| old.first + (((slot - place.slot) as u64) << shift);
        let slots = &self.node(place.node).slots;
        let count = 1 << (old.order - shift);
        if into_order >= shift {
            let each = 1 << (into_order - shift);
            self.mark_parts(&place, count, each);
            part(slots, place.slot, count, each, |slot| {
                let first = first_of_slot(slot);
                checked(first, into_order, value_at(first))
            });
        } else {
            self.mark_parts(&place, count, 1);
            part(slots, place.slot, count, 1, |slot| {
                self.parts_below(&place, slot, first_of_slot(slot), into_order, stock, &mut value_at)
            });
            // A single entry of 64 indices needs a level more than its parts.
            self.free_retired();
        }
        Some(old)
    }

    /// Sets the marks of the entry at the first slots of its parts. Readers do not use them before the split.
    fn mark_parts(&self, place: &SlotRange, count: usize, each: usize) {
        let node = self.node(place.node);
        let mask = (place.slot..place.slot + count).step_by(each).fold(0, |mask, slot| mask | mask_of(slot, 1));
        let marked = |mark: &usize| node.is_marked(*mark, mask_of(place.slot, 1));
        (0..MARKS).filter(marked).for_each(|mark| node.add_mark(mark, mask));
    }

    /// Makes a node of parts for one slot of the entry at `place`.
    fn parts_below(
        &self,
        place: &SlotRange,
        slot: usize,
        first: u64,
        order: u32,
        stock: &mut NodeStock<N>,
        value_at: &mut impl FnMut(u64) -> u64,
    ) -> IndexWord {
        let above = self.node(place.node);
        let shift = word::shift_of(order);
        let number = self.take(place.node, slot, shift, stock);
        let node = self.node(number);
        let each = 1 << (order - shift);
        let begins = (0..SLOTS).step_by(each);
        let mask = begins.clone().fold(0, |mask, begin| mask | mask_of(begin, 1));
        for begin in begins {
            let index = first + ((begin as u64) << shift);
            enter(&node.slots, begin, each, checked(index, order, value_at(index)));
        }
        node.set_used(SLOTS);
        let marked = |mark: &usize| above.is_marked(*mark, mask_of(place.slot, 1));
        (0..MARKS).filter(marked).for_each(|mark| node.add_mark(mark, mask));
        IndexWord::node(number, shift)
    }

    /// Replaces all entries in the `1 << order` indices from `first` on by one entry, which has a mark if any of them
    /// had it.
    ///
    /// Readers find no gap: each index has its old entry until it has the new one. An index without an entry gets the
    /// new one. The slots of all parts are overwritten before this returns. The stock: [`super::XArray::prepare`].
    pub fn join(&mut self, first: u64, order: u32, value: u64, stock: &mut NodeStock<N>) {
        let word = checked(first, order, value);
        if order == 0 && !self.array.root.peek().is_node() && first == 0 {
            return self.array.root.publish(word);
        }
        let (number, slot) = self.make_way(first, order, stock);
        let node = self.node(number);
        let mask = mask_of(slot, word.slots(node.shift()));
        let marked: [bool; MARKS] = std::array::from_fn(|mark| node.is_marked(mark, mask));
        (0..MARKS).filter(|mark| marked[*mark]).for_each(|mark| self.add_mark(number, slot, mark));
        self.put(number, slot, word);
        (0..MARKS).for_each(|mark| node.remove_mark(mark, mask & !mask_of(slot, 1)));
        debug_assert_eq!(node.marks.each_ref().map(|marks| marks.load(Relaxed) & mask != 0), marked);
    }
}
