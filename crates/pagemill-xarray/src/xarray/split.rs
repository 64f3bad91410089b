//! Operations of the writer that split an entry into smaller ones, or join entries into one. Readers always find the
//! old entries or the new ones.

use super::Found;
use super::node::{MARKS, mask_of, mask_of_slots};
use super::nodes::Nodes;
use super::slots::{insert_entry, split_entry};
use super::stock::NodeStock;
use super::store::{SlotRange, Writer, entry_word};
use super::word::{self, IndexWord, SLOTS};
use pagemill_core::sync::Relaxed;

impl<N: Nodes> Writer<'_, N> {
    /// Splits the entry that covers `index` into entries of a smaller order. `value_at` returns the value for the first
    /// index of each new entry; `value_at` is called in unspecified order, and must not panic. The new entries have the
    /// marks of the old entry. Returns the old entry, or `None` if no entry covers `index`.
    ///
    /// Readers always find an entry. The slot of the old entry's value is overwritten last: until then readers may find
    /// the old entry, and `is_still` returns true for it. Cost: a store for each new entry and each slot. `stock` must
    /// come from [`super::XArray::prepare_split`].
    pub fn split(
        &mut self,
        index: u64,
        into_order: u32,
        stock: &mut NodeStock<N>,
        mut value_at: impl FnMut(u64) -> u64,
    ) -> Option<Found> {
        let place = self.find_slots(index)?;
        let old = place.found;
        assert!(into_order < old.order, "the parts of an entry are smaller");
        assert!(stock.comes_from(self.array.nodes), "a stock is for arrays with the same nodes");
        let node = self.node(place.node);
        let shift = node.shift();
        let first_of_slot = |slot: usize| old.first + (((slot - place.slot) as u64) << shift);
        let count = 1 << (old.order - shift);
        let each = 1 << into_order.saturating_sub(shift);
        // Readers ignore the marks of the new entries before the split.
        let parts = (place.slot..place.slot + count).step_by(each);
        node.copy_marks(node, place.slot, mask_of_slots(parts));
        if into_order >= shift {
            split_entry(&node.slots, place.slot, count, each, |slot| {
                let first = first_of_slot(slot);
                entry_word(first, into_order, value_at(first))
            });
        } else {
            split_entry(&node.slots, place.slot, count, each, |slot| {
                self.node_of_parts(&place, slot, first_of_slot(slot), into_order, stock, &mut value_at)
            });
            // A single entry of 64 indices may need one level more than the new entries.
            self.remove_unneeded_levels();
        }
        Some(old)
    }

    /// Creates a node with the new entries that replace one slot of the entry at `place`. Returns the word that points
    /// at the node.
    fn node_of_parts(
        &self,
        place: &SlotRange,
        slot: usize,
        first: u64,
        order: u32,
        stock: &mut NodeStock<N>,
        value_at: &mut impl FnMut(u64) -> u64,
    ) -> IndexWord {
        let shift = word::shift_of(order);
        let number = self.take_node(place.node, slot, shift, stock);
        let node = self.node(number);
        let each = 1 << (order - shift);
        let begins = (0..SLOTS).step_by(each);
        node.copy_marks(self.node(place.node), place.slot, mask_of_slots(begins.clone()));
        for begin in begins {
            let index = first + ((begin as u64) << shift);
            insert_entry(&node.slots, begin, each, entry_word(index, order, value_at(index)));
        }
        node.set_used_slots(SLOTS);
        IndexWord::node(number, shift)
    }

    /// Replaces all entries in the `1 << order` indices from `first` on by one entry. The new entry has a mark if any
    /// of the old entries had that mark.
    ///
    /// Readers always find the old entry of an index, or the new one. The new entry also covers indices that had no
    /// entry. All slots of the old entries are overwritten before `join` returns. `stock` must come from
    /// [`super::XArray::prepare`].
    pub fn join(&mut self, first: u64, order: u32, value: u64, stock: &mut NodeStock<N>) {
        let word = entry_word(first, order, value);
        if order == 0 && !self.array.root.load_relaxed().is_node() && first == 0 {
            return self.array.root.publish(word);
        }
        let (number, slot) = self.slot_for_entry(first, order, stock);
        let node = self.node(number);
        let mask = mask_of(slot, word.slots(node.shift()));
        let marked: [bool; MARKS] = std::array::from_fn(|mark| node.is_marked(mark, mask));
        (0..MARKS).filter(|mark| marked[*mark]).for_each(|mark| self.add_mark(number, slot, mark));
        self.write_entry(number, slot, word);
        (0..MARKS).for_each(|mark| node.remove_mark(mark, mask & !mask_of(slot, 1)));
        debug_assert_eq!(node.marks.each_ref().map(|marks| marks.load(Relaxed) & mask != 0), marked);
    }
}
