//! The writer of an array: how it acquires the array's lock, and its operations that store entries.

use super::node::{MARKS, Node, mask_of};
use super::nodes::Nodes;
use super::stock::{NodeStock, root_shift_for};
use super::word::{self, IndexWord, MAX_INDEX, MAX_ORDER, MAX_VALUE, SLOT_BITS};
use super::{Found, XArray, slots};
use pagemill_core::sync::Relaxed;
use std::cell::Cell;

/// The exclusive writer of an array. Dropping the writer releases the array's lock.
///
/// Methods panic if the caller passes an index that is not aligned to its order, stores over a part of a larger entry,
/// or has preallocated too few nodes.
///
/// Example: [`XArray`](super::XArray).
pub struct Writer<'a, N: Nodes> {
    pub(super) array: &'a XArray<N>,
    /// Whether this writer retired a node. If so, dropping the writer calls [`Nodes::collect`].
    has_retired: Cell<bool>,
    /// The leaf in which this writer last looked for a slot, so that the next entry in it needs no descent: the leaf's
    /// first index divided by [`SLOTS`](word::SLOTS), and its number.
    leaf: Cell<Option<(u64, u32)>>,
}

/// What a stored entry replaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Replaced {
    /// Empty slots, which have no marks.
    Nothing,
    Entries,
}

/// The position of an entry in the tree: its slots in one node.
pub(super) struct SlotRange {
    /// Number of the node that contains the slots; 0 if the entry is in the root word.
    pub node: u32,
    /// Index of the entry's first slot in that node.
    pub slot: usize,
    pub found: Found,
}

impl<N: Nodes> XArray<N> {
    /// Acquires the array's lock for a writer. Waits while there is another writer. Operations under the lock must be
    /// short.
    pub fn lock(&self) -> Writer<'_, N> {
        self.lock.acquire();
        Writer { array: self, has_retired: Cell::new(false), leaf: Cell::new(None) }
    }

    /// As [`XArray::lock`], but returns `None` if another thread holds the lock.
    pub fn try_lock(&self) -> Option<Writer<'_, N>> {
        self.lock.try_acquire().then(|| Writer { array: self, has_retired: Cell::new(false), leaf: Cell::new(None) })
    }
}

impl<N: Nodes> Drop for Writer<'_, N> {
    fn drop(&mut self) {
        self.array.lock.release();
        if self.has_retired.get() {
            self.array.nodes.collect();
        }
    }
}

impl<N: Nodes> Writer<'_, N> {
    /// Stores an entry without marks over `1 << order` indices from `index` on. The entry replaces all entries at these
    /// indices.
    ///
    /// A reader of an index finds the old entry until the new one is stored. If there is no old entry, one store of a
    /// word inserts the new one. Cost: a descent of the tree, and the removal of replaced entries.
    pub fn store(&mut self, index: u64, order: u32, value: u64, stock: &mut NodeStock<N>) {
        let word = entry_word(index, order, value);
        if word::last_index_of(index, order) == 0 && !self.array.root.load_relaxed().is_node() {
            self.array.root.publish(word);
            return self.set_root_marks(0);
        }
        let (number, slot) = self.slot_for_entry(index, order, stock);
        let mask = mask_of(slot, word.slots(self.node(number).shift()));
        if self.write_entry(number, slot, word) == Replaced::Entries {
            self.remove_marks(number, mask);
        }
        debug_assert!(self.node(number).marks.iter().all(|marks| marks.load(Relaxed) & mask == 0));
    }

    /// Returns the entry that covers the index; `None` if no entry covers it.
    pub fn get(&self, index: u64) -> Option<Found> {
        self.find_slots(index).map(|place| place.found)
    }

    /// Returns the first entry that covers `from`, or begins after `from` and not after `to`.
    pub fn next(&self, from: u64, to: u64) -> Option<Found> {
        if from == to { self.get(from) } else { self.array.next_locked(from, to) }
    }

    /// Changes the value of the entry that covers the index, with one store. The order and the marks of the entry stay.
    /// Returns the old entry, or `None` if no entry covers the index.
    pub fn replace(&mut self, index: u64, value: u64) -> Option<Found> {
        let place = self.find_slots(index)?;
        let word = entry_word(place.found.first, place.found.order, value);
        match place.node {
            0 => self.array.root.publish(word),
            number => self.node(number).slots[place.slot].publish(word),
        }
        Some(place.found)
    }

    #[inline]
    pub(super) fn node(&self, number: u32) -> &Node {
        self.array.nodes.node(number)
    }

    /// Returns the slots of the entry that covers the index; `None` if no entry covers the index.
    pub(super) fn find_slots(&self, index: u64) -> Option<SlotRange> {
        let (mut number, mut slot, mut word) = (0, 0, self.array.root.load_relaxed());
        if !word.reaches(index) {
            return None;
        }
        while word.is_node() {
            number = word.number();
            let slots = &self.node(number).slots;
            slot = word::slot_of(index, word.shift());
            word = slots[slot].load_relaxed();
            if word.is_sibling() {
                slot = word.first_slot();
                word = slots[slot].load_relaxed();
            }
        }
        word.is_value().then(|| SlotRange { node: number, slot, found: Found::new(word, index) })
    }

    /// Returns whether entries of this order can be stored over the range without a new node, because one node contains
    /// all slots for them.
    pub(super) fn has_all_nodes_for(&self, first: u64, last: u64, order: u32) -> bool {
        let (lowest, mut word) = (word::shift_of(order), self.array.root.load_relaxed());
        if last == 0 && !word.is_node() {
            // The entry is stored in the root word.
            return true;
        }
        let is_one_node = first >> (lowest + SLOT_BITS) == last >> (lowest + SLOT_BITS);
        if !is_one_node || !word.reaches(last) {
            return false;
        }
        while word.is_node() && word.shift() > lowest {
            word = self.node(word.number()).slots[word::slot_of(first, word.shift())].load_relaxed();
        }
        let has_node = word.is_node() && word.shift() == lowest;
        if has_node {
            self.note_leaf(first, lowest, word.number());
        }
        has_node
    }

    /// Remembers the node with this number, which has the slots for entries at `index`, if it is a leaf.
    fn note_leaf(&self, index: u64, shift: u32, number: u32) {
        if shift == 0 {
            self.leaf.set(Some((index >> SLOT_BITS, number)));
        }
    }

    /// Returns the node and the slot for an entry of this order at `index`. Creates the missing nodes on the path to
    /// that slot.
    pub(super) fn slot_for_entry(&mut self, index: u64, order: u32, stock: &mut NodeStock<N>) -> (u32, usize) {
        assert!(stock.comes_from(self.array.nodes), "a stock is for arrays with the same nodes");
        let lowest = word::shift_of(order);
        if let Some((first, number)) = self.leaf.get()
            && lowest == 0
            && first == index >> SLOT_BITS
        {
            return (number, word::slot_of(index, 0));
        }
        let mut word = self.grow(word::last_index_of(index, order), lowest, stock);
        loop {
            let slot = word::slot_of(index, word.shift());
            if word.shift() == lowest {
                self.note_leaf(index, lowest, word.number());
                return (word.number(), slot);
            }
            let below = self.node(word.number()).slots[slot].load_relaxed();
            word = if below.is_node() {
                below
            } else {
                assert!(below.is_empty(), "an entry sticks out of what is stored over it");
                self.link_new_node(word.number(), slot, word.shift() - SLOT_BITS, stock)
            };
        }
    }

    /// Adds root nodes until the tree covers index `last` and has nodes of shift `lowest`. Returns the root word.
    fn grow(&mut self, last: u64, lowest: u32, stock: &mut NodeStock<N>) -> IndexWord {
        let root = &self.array.root;
        loop {
            let word = root.load_relaxed();
            if word.is_node() && word.shift() >= lowest && word.reaches(last) {
                return word;
            }
            let shift = match word.is_node() {
                true => word.shift() + SLOT_BITS,
                false if word.is_empty() => root_shift_for(last, lowest),
                false => 0,
            };
            let number = self.take_node(0, 0, shift, stock);
            let node = self.node(number);
            if !word.is_empty() {
                self.prepare_root_move(word, number);
                node.slots[0].publish(word);
                node.set_used_slots(1);
            }
            root.publish(IndexWord::node(number, shift));
        }
    }

    /// Prepares to move the root word into slot 0 of the new node `number`. Copies the marks of the root word into that
    /// slot, and sets the parent of the node to which the root word refers.
    fn prepare_root_move(&self, word: IndexWord, number: u32) {
        let is_marked = |mark: usize| match word.is_node() {
            true => self.node(word.number()).is_marked(mark, u64::MAX),
            false => self.root_marks() >> mark & 1 != 0,
        };
        (0..MARKS).filter(|mark| is_marked(*mark)).for_each(|mark| self.node(number).add_mark(mark, 1));
        if word.is_node() {
            self.node(word.number()).set_position(number, 0, word.shift());
        }
    }

    /// Removes a node from the stock and records its position in the tree. Returns the node's number.
    pub(super) fn take_node(&self, parent: u32, slot: usize, shift: u32, stock: &mut NodeStock<N>) -> u32 {
        let number = stock.take();
        self.node(number).set_position(parent, slot, shift);
        self.node(number).set_array(self.array.id());
        self.array.count.store(self.array.count.load(Relaxed) + 1, Relaxed);
        number
    }

    /// Takes an empty node from the stock and links it into an empty slot of node `parent`. Returns the word that
    /// points at the new node.
    fn link_new_node(&self, parent: u32, slot: usize, shift: u32, stock: &mut NodeStock<N>) -> IndexWord {
        let word = IndexWord::node(self.take_node(parent, slot, shift, stock), shift);
        let above = self.node(parent);
        above.slots[slot].publish(word);
        above.set_used_slots(above.used_slots() + 1);
        word
    }

    /// Stores an entry into the slots of node `number`, beginning with slot `first`. Retires the nodes that the entry
    /// replaces. Returns what the entry replaces.
    pub(super) fn write_entry(&self, number: u32, first: usize, word: IndexWord) -> Replaced {
        let node = self.node(number);
        let count = word.slots(node.shift());
        let old = node.slots[first].load_relaxed();
        let is_larger = old.is_sibling() || old.is_value() && old.order() > word.order();
        assert!(!is_larger, "an entry sticks out of what is stored over it");
        let is_empty = |slot: &slots::IndexSlot| slot.load_relaxed().is_empty();
        if node.slots[first..first + count].iter().all(is_empty) {
            slots::insert_entry(&node.slots, first, count, word);
            node.set_used_slots(node.used_slots() + count);
            return Replaced::Nothing;
        }
        slots::overwrite_entries(&node.slots, first, count, word, |old| {
            if old.is_empty() {
                node.set_used_slots(node.used_slots() + 1);
            } else if old.is_node() {
                self.retire_tree(old.number());
            }
        });
        Replaced::Entries
    }

    /// Retires an unlinked node with this number, and all nodes below it.
    fn retire_tree(&self, number: u32) {
        let below = self.node(number).slots.each_ref().map(slots::IndexSlot::load_relaxed);
        self.retire_node(number);
        below.into_iter().filter(|word| word.is_node()).for_each(|word| self.retire_tree(word.number()));
    }

    /// Retires an unlinked node with this number, but not the nodes below it.
    pub(super) fn retire_node(&self, number: u32) {
        self.leaf.set(None);
        self.node(number).mark_dead();
        self.array.count.store(self.array.count.load(Relaxed) - 1, Relaxed);
        self.array.nodes.retire(number);
        self.has_retired.set(true);
    }
}

/// Returns the word of an entry of this order and value at `index`. Panics if an argument is out of range.
pub(super) fn entry_word(index: u64, order: u32, value: u64) -> IndexWord {
    assert!(order <= MAX_ORDER, "an order is at most MAX_ORDER");
    assert!(word::first_index_of(index, order) == index, "an entry is aligned to its order");
    assert!(index <= MAX_INDEX, "an index is at most MAX_INDEX");
    assert!(value <= MAX_VALUE, "a value is at most MAX_VALUE");
    IndexWord::value(value, order)
}
