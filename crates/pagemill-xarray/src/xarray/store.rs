//! Writers: the lock, and storing entries.

use super::node::{MARKS, Node, mask_of};
use super::nodes::Nodes;
use super::stock::{NodeStock, top_for};
use super::word::{self, IndexWord, MAX_INDEX, MAX_ORDER, MAX_VALUE, SLOT_BITS};
use super::{Found, XArray, slots};
use pagemill_core::sync::Relaxed;
use std::cell::Cell;

/// The exclusive writer of an array. Dropping it releases the lock.
///
/// Errors of the caller are assertions: an index that is not aligned to its order, a store over a part of a larger
/// entry, a stock that is too small.
///
/// Example: [`XArray`](super::XArray).
pub struct Writer<'a, N: Nodes> {
    pub(super) array: &'a XArray<N>,
    has_retired: Cell<bool>,
}

impl<'a, N: Nodes> Writer<'a, N> {
    /// Takes over the lock, which the caller holds.
    fn new(array: &'a XArray<N>) -> Self {
        Self { array, has_retired: Cell::new(false) }
    }
}

/// The slots of an entry.
pub(super) struct SlotRange {
    /// 0: the root word.
    pub node: u32,
    /// Its first slot.
    pub slot: usize,
    pub found: Found,
}

impl<N: Nodes> XArray<N> {
    /// Takes the lock; waits for another writer. Operations under the lock must be short.
    pub fn lock(&self) -> Writer<'_, N> {
        self.lock.acquire();
        Writer::new(self)
    }

    /// As [`XArray::lock`]; returns none if another thread holds the lock.
    pub fn try_lock(&self) -> Option<Writer<'_, N>> {
        self.lock.try_acquire().then(|| Writer::new(self))
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
    /// Stores an entry, without marks, over `1 << order` indices from `index` on, replacing everything there.
    ///
    /// Readers find each index's old entry, then the new one; if there was none, one store inserts the entry. Cost: a
    /// descent of the tree, and the removal of replaced entries.
    pub fn store(&mut self, index: u64, order: u32, value: u64, stock: &mut NodeStock<N>) {
        let word = checked(index, order, value);
        if word::last_of(index, order) == 0 && !self.array.root.peek().is_node() {
            self.array.root.publish(word);
            return self.set_root_marks(0);
        }
        let (number, slot) = self.make_way(index, order, stock);
        self.put(number, slot, word);
        let node = self.node(number);
        self.remove_marks(number, mask_of(slot, word.slots(node.shift())));
    }

    /// The entry that covers the index.
    pub fn get(&self, index: u64) -> Option<Found> {
        self.place(index).map(|place| place.found)
    }

    /// The first entry that covers `from`, or begins after it and not after `to`.
    pub fn next(&self, from: u64, to: u64) -> Option<Found> {
        self.array.next_locked(from, to)
    }

    /// Changes the value of the entry that covers the index, with one store; its order and marks stay. Returns the old
    /// entry; without one nothing changes.
    pub fn replace(&mut self, index: u64, value: u64) -> Option<Found> {
        let place = self.place(index)?;
        let word = checked(place.found.first, place.found.order, value);
        match place.node {
            0 => self.array.root.publish(word),
            number => self.node(number).slots[place.slot].publish(word),
        }
        Some(place.found)
    }

    pub(super) fn node(&self, number: u32) -> &Node {
        self.array.nodes.node(number)
    }

    pub(super) fn place(&self, index: u64) -> Option<SlotRange> {
        let (mut number, mut slot, mut word) = (0, 0, self.array.root.peek());
        if !word.reaches(index) {
            return None;
        }
        while word.is_node() {
            number = word.number();
            let slots = &self.node(number).slots;
            slot = word::slot_of(index, word.shift());
            word = slots[slot].peek();
            if word.is_sibling() {
                slot = word.first_slot();
                word = slots[slot].peek();
            }
        }
        let found =
            || Found { value: word.to_value(), first: word::first_of(index, word.order()), order: word.order() };
        word.is_value().then(|| SlotRange { node: number, slot, found: found() })
    }

    /// Whether storing entries of that order over the range needs no new node: one node has all their slots.
    pub(super) fn has_nodes_for(&self, first: u64, last: u64, order: u32) -> bool {
        let (lowest, mut word) = (word::shift_of(order), self.array.root.peek());
        if last == 0 && !word.is_node() {
            // The entry is stored in the root word.
            return true;
        }
        let is_one_node = first >> (lowest + SLOT_BITS) == last >> (lowest + SLOT_BITS);
        if !is_one_node || !word.reaches(last) {
            return false;
        }
        while word.is_node() && word.shift() > lowest {
            word = self.node(word.number()).slots[word::slot_of(first, word.shift())].peek();
        }
        word.is_node() && word.shift() == lowest
    }

    /// Returns the node and the slot for an entry of that order at `index`; makes the nodes above it.
    pub(super) fn make_way(&mut self, index: u64, order: u32, stock: &mut NodeStock<N>) -> (u32, usize) {
        assert!(stock.is_of(self.array.nodes), "a stock is for arrays with the same nodes");
        let lowest = word::shift_of(order);
        let mut word = self.grow(word::last_of(index, order), lowest, stock);
        loop {
            let slot = word::slot_of(index, word.shift());
            if word.shift() == lowest {
                return (word.number(), slot);
            }
            let below = self.node(word.number()).slots[slot].peek();
            word = if below.is_node() {
                below
            } else {
                assert!(below.is_empty(), "an entry sticks out of what is stored over it");
                self.hang_new(word.number(), slot, word.shift() - SLOT_BITS, stock)
            };
        }
    }

    /// Grows the tree until it covers `last` and has nodes of shift `lowest`. Returns the root word.
    fn grow(&mut self, last: u64, lowest: u32, stock: &mut NodeStock<N>) -> IndexWord {
        let root = &self.array.root;
        loop {
            let word = root.peek();
            if word.is_node() && word.shift() >= lowest && word.reaches(last) {
                return word;
            }
            let shift = match word.is_node() {
                true => word.shift() + SLOT_BITS,
                false if word.is_empty() => top_for(last, lowest),
                false => 0,
            };
            let number = self.take(0, 0, shift, stock);
            let node = self.node(number);
            if !word.is_empty() {
                self.move_below(word, number);
                node.slots[0].publish(word);
                node.set_used(1);
            }
            root.publish(IndexWord::node(number, shift));
        }
    }

    /// Prepares the move of the root word into slot 0 of a new node: copies its marks there, and sets the parent of the
    /// node below.
    fn move_below(&self, word: IndexWord, number: u32) {
        let is_marked = |mark: usize| match word.is_node() {
            true => self.node(word.number()).is_marked(mark, u64::MAX),
            false => self.root_marks() >> mark & 1 != 0,
        };
        (0..MARKS).filter(|mark| is_marked(*mark)).for_each(|mark| self.node(number).add_mark(mark, 1));
        if word.is_node() {
            self.node(word.number()).hang(number, 0, word.shift());
        }
    }

    /// Takes a node of the stock for that place.
    pub(super) fn take(&self, parent: u32, slot: usize, shift: u32, stock: &mut NodeStock<N>) -> u32 {
        let number = stock.take();
        self.node(number).hang(parent, slot, shift);
        self.node(number).set_array(self.array.id());
        self.array.count.store(self.array.count.load(Relaxed) + 1, Relaxed);
        number
    }

    /// Links an empty node into an empty slot.
    fn hang_new(&self, parent: u32, slot: usize, shift: u32, stock: &mut NodeStock<N>) -> IndexWord {
        let word = IndexWord::node(self.take(parent, slot, shift, stock), shift);
        let above = self.node(parent);
        above.slots[slot].publish(word);
        above.set_used(above.used() + 1);
        word
    }

    /// Stores the entry into its slots, replacing everything there.
    pub(super) fn put(&self, number: u32, first: usize, word: IndexWord) {
        let node = self.node(number);
        let count = word.slots(node.shift());
        let old = node.slots[first].peek();
        let is_larger = old.is_sibling() || old.is_value() && old.order() > word.order();
        assert!(!is_larger, "an entry sticks out of what is stored over it");
        let is_empty = |slot: &slots::IndexSlot| slot.peek().is_empty();
        if node.slots[first..first + count].iter().all(is_empty) {
            slots::enter(&node.slots, first, count, word);
            return node.set_used(node.used() + count);
        }
        slots::cover(&node.slots, first, count, word, |old| {
            if old.is_empty() {
                node.set_used(node.used() + 1);
            } else if old.is_node() {
                self.bury_tree(old.number());
            }
        });
    }

    /// Retires an unlinked node and all nodes below.
    fn bury_tree(&self, number: u32) {
        let below = self.node(number).slots.each_ref().map(slots::IndexSlot::peek);
        self.bury(number);
        below.into_iter().filter(|word| word.is_node()).for_each(|word| self.bury_tree(word.number()));
    }

    /// Retires an unlinked node, but not the nodes below.
    pub(super) fn bury(&self, number: u32) {
        self.node(number).kill();
        self.array.count.store(self.array.count.load(Relaxed) - 1, Relaxed);
        self.array.nodes.retire(number);
        self.has_retired.set(true);
    }
}

/// Makes the word of an entry at `index`, after checks.
pub(super) fn checked(index: u64, order: u32, value: u64) -> IndexWord {
    assert!(order <= MAX_ORDER, "an order is at most MAX_ORDER");
    assert!(word::first_of(index, order) == index, "an entry is aligned to its order");
    assert!(index <= MAX_INDEX, "an index is at most MAX_INDEX");
    assert!(value <= MAX_VALUE, "a value is at most MAX_VALUE");
    IndexWord::value(value, order)
}
