//! Model tests: random operations, and operations at every boundary, on an array and on an ordered map. Both must
//! agree. Nodes are moved between operations.
#![allow(unsafe_code)] // arrays that stay at their address

use super::node::MARKS;
use super::pin;
use super::stock::root_shift_for;
use super::word::{SLOT_BITS, SLOTS, first_index_of, last_index_of, shift_of};
use super::*;
use pagemill_core::error::Error;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// An entry of the model. The key of the map is the entry's first index.
#[derive(Clone, Copy, Debug)]
struct Entry {
    order: u32,
    value: u64,
    marks: [bool; MARKS],
}

/// A model of an array: its entries by first index.
#[derive(Default)]
struct Model(BTreeMap<u64, Entry>);

impl Model {
    fn entry_at(&self, index: u64) -> Option<(u64, Entry)> {
        let (first, entry) = self.0.range(..=index).next_back()?;
        (last_index_of(*first, entry.order) >= index).then_some((*first, *entry))
    }

    fn next(&self, from: u64, to: u64, is_wanted: impl Fn(&Entry) -> bool) -> Option<(u64, Entry)> {
        let covering = self.entry_at(from).filter(|(_, entry)| from <= to && is_wanted(entry));
        let after = || self.0.range(from..).map(|(first, entry)| (*first, *entry)).find(|(_, entry)| is_wanted(entry));
        covering.or_else(after).filter(|(first, _)| *first <= to)
    }

    fn next_gap(&self, from: u64, to: u64) -> Option<u64> {
        let mut at = from;
        while at <= to {
            let Some((first, entry)) = self.entry_at(at) else { return Some(at) };
            at = last_index_of(first, entry.order) + 1;
        }
        None
    }

    /// Returns whether an entry of order `order` at `first` would overwrite only a part of a larger entry.
    fn overwrites_a_part(&self, first: u64, order: u32) -> bool {
        self.entry_at(first).is_some_and(|(_, entry)| entry.order > order)
    }

    /// Removes and returns the entries that lie completely inside `from..=to`.
    fn remove_inside(&mut self, from: u64, to: u64) -> Vec<(u64, Entry)> {
        let is_inside = |(first, entry): &(u64, Entry)| last_index_of(*first, entry.order) <= to;
        let inside: Vec<_> = if from > to {
            Vec::new()
        } else {
            self.0.range(from..=to).map(|(first, entry)| (*first, *entry)).filter(is_inside).collect()
        };
        self.0.retain(|first, entry| *first < from || last_index_of(*first, entry.order) > to);
        inside
    }

    /// Returns the number of nodes in the lowest tree that contains all entries and has no empty nodes.
    fn nodes(&self) -> usize {
        let last = self.0.last_key_value().map_or(0, |(first, entry)| last_index_of(*first, entry.order));
        if last == 0 {
            return 0;
        }
        let lowest = self.0.values().map(|entry| shift_of(entry.order)).max().unwrap_or(0);
        let top = root_shift_for(last, lowest);
        let mut nodes = BTreeSet::new();
        for (first, entry) in &self.0 {
            let levels = (shift_of(entry.order)..=top).step_by(SLOT_BITS as usize);
            nodes.extend(levels.map(|shift| (shift, first >> (shift + SLOT_BITS))));
        }
        nodes.len()
    }
}

/// Waits until all retired nodes of a forest are freed.
pub(super) fn wait_until_no_node_is_used(nodes: &'static Forest) {
    let start = Instant::now();
    while nodes.in_use() > 0 {
        nodes.seal();
        pagemill_core::epoch::flush(&pin());
        nodes.free_retired();
        assert!(start.elapsed() < Duration::from_secs(600), "{} nodes do not come back", nodes.in_use());
        std::thread::yield_now();
    }
}

fn found(first: u64, entry: Entry) -> Found {
    Found { value: entry.value, first, order: entry.order }
}

/// An array, and the model with which it is compared.
struct ArrayAndModel {
    array: Box<XArray<Forest>>,
    model: Model,
    /// The value that was stored last. Each new entry gets another value.
    last_value: u64,
}

impl ArrayAndModel {
    fn new() -> Self {
        let nodes = test_forest::forest_of(1 << 13);
        // SAFETY: the array is first used in its box, where it stays and is dropped.
        let array = Box::new(unsafe { XArray::movable(nodes) });
        Self { array, model: Model::default(), last_value: 0 }
    }

    /// Moves some nodes of the tree. The bits of `which` select the nodes, 64 nodes at a time.
    fn relocate(&mut self, which: u64) {
        let (nodes, mut numbers) = (self.array.nodes, Vec::new());
        let root = self.array.root.load_relaxed();
        if root.is_node() {
            numbers_below(nodes, root, &mut numbers);
        }
        for (at, old) in numbers.into_iter().enumerate().filter(|(at, _)| which >> (at % 64) & 1 == 1) {
            let new = nodes.take().unwrap();
            assert_eq!(relocate(nodes, old, new), self.array.id() != NO_ID, "node {at}");
            assert!(nodes.node(old).slots.iter().all(|slot| slot.load_relaxed() == IndexWord::DEAD));
            assert!(!relocate(nodes, old, old), "it is in no tree");
            nodes.retire(old);
        }
    }

    fn fresh_value(&mut self) -> u64 {
        self.last_value += 1;
        self.last_value << 20 & MAX_VALUE | self.last_value
    }

    fn store(&mut self, index: u64, order: u32) {
        let first = first_index_of(index, order);
        if self.model.overwrites_a_part(first, order) {
            return;
        }
        let value = self.fresh_value();
        let last = last_index_of(first, order);
        let (mut writer, mut stock) = self.array.lock_for(first, last, order).unwrap();
        let prepared = stock.count();
        writer.store(first, order, value, &mut stock);
        drop(writer);
        assert!(prepared == 0 || stock.count() < prepared, "nodes are prepared only if one is missing");
        self.model.remove_inside(first, last);
        self.model.0.insert(first, Entry { order, value, marks: [false; MARKS] });
    }

    fn join(&mut self, index: u64, order: u32) {
        let first = first_index_of(index, order);
        if self.model.overwrites_a_part(first, order) {
            return;
        }
        let value = self.fresh_value();
        let last = last_index_of(first, order);
        let mut stock = self.array.prepare(first, last, order).unwrap();
        self.array.lock().join(first, order, value, &mut stock);
        let parts = self.model.remove_inside(first, last);
        let marks = std::array::from_fn(|mark| parts.iter().any(|(_, part)| part.marks[mark]));
        self.model.0.insert(first, Entry { order, value, marks });
    }

    fn split(&mut self, index: u64, into_order: u32) {
        let Some((first, entry)) = self.model.entry_at(index).filter(|(_, entry)| entry.order > into_order) else {
            return;
        };
        let value = self.fresh_value();
        let value_at = |part: u64| (value + (part - first)) & MAX_VALUE;
        let mut stock = self.array.prepare_split(entry.order, into_order).unwrap();
        let old = self.array.lock().split(index, into_order, &mut stock, value_at);
        assert_eq!((old, stock.count()), (Some(found(first, entry)), 0), "a split takes the whole stock");
        for part in (first..=last_index_of(first, entry.order)).step_by(1 << into_order) {
            self.model.0.insert(part, Entry { order: into_order, value: value_at(part), ..entry });
        }
        self.last_value += 1 << entry.order;
    }

    fn erase(&mut self, index: u64) {
        let expected = self.model.entry_at(index);
        assert_eq!(self.array.lock().erase(index), expected.map(|(first, entry)| found(first, entry)));
        expected.map(|(first, _)| self.model.0.remove(&first));
    }

    fn erase_range(&mut self, from: u64, to: u64) {
        let mut erased = Vec::new();
        self.array.lock().erase_range(from, to, |found| {
            assert!(self.array.load(found.first, &pin()).is_none(), "a reported entry is erased");
            erased.push(found);
        });
        let expected = self.model.remove_inside(from, to);
        assert_eq!(erased, expected.into_iter().map(|(first, entry)| found(first, entry)).collect::<Vec<_>>());
    }

    fn replace(&mut self, index: u64) {
        let value = self.fresh_value();
        let expected = self.model.entry_at(index);
        let old = self.array.lock().replace(index, value);
        assert_eq!(old, expected.map(|(first, entry)| found(first, entry)));
        expected.map(|(first, entry)| self.model.0.insert(first, Entry { value, ..entry }));
    }

    fn mark(&mut self, index: u64, mark: usize, is_set: bool) {
        let mut writer = self.array.lock();
        let mark_of = Mark::ALL[mark];
        let value = self.model.entry_at(index).map_or(0, |(_, entry)| entry.value);
        let was_there = match is_set {
            true => writer.set_mark(index, mark_of),
            false => writer.clear_mark_of(index, value, mark_of),
        };
        let first = self.model.entry_at(index).map(|(first, _)| first);
        assert_eq!(was_there, first.is_some());
        let entry = first.and_then(|first| self.model.0.get_mut(&first));
        entry.into_iter().for_each(|entry| entry.marks[mark] = is_set);
        assert_eq!(writer.get_mark(index, mark_of), was_there && is_set);
    }

    /// Changes the array by one writer: for each index, stores, joins and marks an entry of the order, or erases the
    /// entry there if there is no order.
    fn change_by_one_writer(&mut self, changes: &[(u64, Option<u32>)]) {
        let Self { array, model, last_value } = self;
        let mut stock = NodeStock::new(array.nodes);
        stock.allocate_up_to(16 * 2 * changes.len() as u32).unwrap();
        let mut writer = array.lock();
        for (index, order) in changes {
            let Some(order) = *order else {
                let expected = model.entry_at(*index);
                assert_eq!(writer.erase(*index), expected.map(|(first, entry)| found(first, entry)));
                expected.map(|(first, _)| model.0.remove(&first));
                continue;
            };
            let (first, last) = (first_index_of(*index, order), last_index_of(*index, order));
            if model.overwrites_a_part(first, order) {
                continue;
            }
            *last_value += 2;
            writer.store(first, order, *last_value - 1, &mut stock);
            writer.join(first, order, *last_value, &mut stock);
            assert!(writer.set_mark(*index, Mark::B));
            model.remove_inside(first, last);
            model.0.insert(first, Entry { order, value: *last_value, marks: [false, true, false] });
        }
    }

    /// Checks that readers and writers find the same as the model, at `index` and in the range from `index` to `to`.
    fn check_at(&self, index: u64, to: u64) {
        let guard = &pin();
        let expected = self.model.entry_at(index).map(|(first, entry)| found(first, entry));
        assert_eq!(self.array.load(index, guard), expected, "load {index:#x}");
        assert_eq!(self.array.lock().get(index), expected);
        let hit = self.array.find(index, guard);
        assert!(hit.is_none_or(|hit| hit.is_still() && hit.found() == expected.unwrap()));
        let next = self.model.next(index, to, |_| true).map(|(first, entry)| found(first, entry));
        assert_eq!(self.array.next(index, to, guard), next, "next from {index:#x} to {to:#x}");
        assert_eq!(self.array.next_gap(index, to, guard), self.model.next_gap(index, to), "gap from {index:#x}");
        for (number, mark) in Mark::ALL.into_iter().enumerate() {
            let marked = self.model.next(index, to, |entry| entry.marks[number]);
            let marked = marked.map(|(first, entry)| found(first, entry));
            assert_eq!(self.array.next_marked(index, to, mark, guard), marked, "{mark:?} from {index:#x} to {to:#x}");
            let is_marked = self.model.entry_at(index).is_some_and(|(_, entry)| entry.marks[number]);
            assert_eq!(self.array.get_mark(index, mark, guard), is_marked);
        }
    }

    /// Checks lookups at `index`, at the boundaries and their neighbours, and at some entries.
    fn check(&self, index: u64) {
        let step = (self.model.0.len() / 8).max(1);
        let edges =
            self.model.0.iter().step_by(step).flat_map(|(first, entry)| [*first, last_index_of(*first, entry.order)]);
        let edges: Vec<u64> = edges.chain([index]).collect();
        let around = edges.iter().flat_map(|edge| [edge.saturating_sub(1), *edge, edge + 1]);
        for at in around.chain(boundaries()).collect::<BTreeSet<_>>() {
            self.check_at(at, MAX_INDEX);
            self.check_at(at, at.max(index));
        }
        assert_eq!(self.array.node_count() as usize, self.model.nodes());
        assert_eq!(self.array.is_empty(), self.model.0.is_empty());
        check_invariants(&self.array);
    }

    /// Erases all entries of the array. All nodes must then be freed.
    fn erase_all_and_check(mut self) {
        self.erase_range(0, MAX_INDEX);
        self.check(0);
        wait_until_no_node_is_used(self.array.nodes);
    }
}

/// Appends the number of the node to which `word` refers, and the numbers of all nodes below it, to `numbers`.
fn numbers_below(nodes: &Forest, word: IndexWord, numbers: &mut Vec<u32>) {
    numbers.push(word.number());
    let below = nodes.node(word.number()).slots.iter().map(IndexSlot::load_relaxed).filter(|word| word.is_node());
    below.for_each(|word| numbers_below(nodes, word, numbers));
}

/// Checks the links, counts and marks of all nodes of an array.
fn check_invariants(array: &XArray<Forest>) {
    let root = array.root.load_relaxed();
    let count = if root.is_node() { check_node_invariants(array, root, 0, 0) } else { 0 };
    assert_eq!(count, array.node_count());
}

fn check_node_invariants(array: &XArray<Forest>, word: IndexWord, parent: u32, offset: usize) -> u32 {
    let node = array.nodes.node(word.number());
    assert_eq!((node.parent(), node.offset(), node.shift()), (parent, offset, word.shift()));
    assert_eq!(node.array(), if array.id() == NO_ID_YET { NO_ID } else { array.id() });
    assert_eq!(node.used_slots(), node.slots.iter().filter(|slot| !slot.load_relaxed().is_empty()).count());
    assert!(node.used_slots() > 0);
    let mut count = 1;
    for (at, below) in node.slots.iter().map(IndexSlot::load_relaxed).enumerate() {
        assert!(below.is_empty() || below.is_value() || below.is_node() || below.is_sibling());
        let may_be_marked = below.is_value() || below.is_node();
        assert!(may_be_marked || (0..MARKS).all(|mark| !node.is_marked(mark, 1 << at)), "a mark without an entry");
        if below.is_node() {
            assert_eq!(below.shift() + SLOT_BITS, word.shift());
            let child = array.nodes.node(below.number());
            (0..MARKS).for_each(|mark| assert_eq!(child.is_marked(mark, u64::MAX), node.is_marked(mark, 1 << at)));
            count += check_node_invariants(array, below, word.number(), at);
        }
    }
    count
}

/// Returns the powers of 64, the last index, and the neighbours of all these indices.
fn boundaries() -> impl Iterator<Item = u64> {
    let powers = (0..=6).map(|level| 1 << (level * SLOT_BITS)).chain([MAX_INDEX]);
    powers.flat_map(|power| [power - 1, power, (power + 1).min(MAX_INDEX)]).chain([0, 2, 62, 128])
}

/// An operation on an array and its model. The first number is an index. The others are an order, a mark or a selection
/// of nodes.
#[derive(Clone, Debug)]
enum Operation {
    Store(u64, u32),
    Join(u64, u32),
    Split(u64, u32),
    Erase(u64),
    EraseRange(u64, u64),
    Replace(u64),
    Mark(u64, usize, bool),
    Relocate(u64, u64),
}

impl Operation {
    /// Runs the operation. Returns the index at which lookups are checked after it.
    fn run(self, pair: &mut ArrayAndModel) -> u64 {
        match self {
            Self::Store(_, order) => pair.store(self.index(), order),
            Self::Join(_, order) => pair.join(self.index(), order),
            Self::Split(_, order) => pair.split(self.index(), order),
            Self::Erase(_) => pair.erase(self.index()),
            Self::EraseRange(from, to) => pair.erase_range(from, to),
            Self::Replace(_) => pair.replace(self.index()),
            Self::Mark(_, mark, is_set) => pair.mark(self.index(), mark, is_set),
            Self::Relocate(_, which) => pair.relocate(which),
        }
        self.index()
    }

    fn index(&self) -> u64 {
        match *self {
            Self::Store(index, _) | Self::Join(index, _) | Self::Split(index, _) | Self::Mark(index, ..) => index,
            Self::Erase(index) | Self::EraseRange(_, index) | Self::Replace(index) | Self::Relocate(index, _) => index,
        }
    }
}

/// Returns a strategy that prefers indices near zero and near a boundary, and adds powers of 64 and random indices.
fn any_index() -> impl Strategy<Value = u64> {
    let boundaries: Vec<u64> = boundaries().collect();
    prop_oneof![
        6 => 0..200u64,
        4 => (1u64 << 12) - 70..(1 << 12) + 200,
        2 => proptest::sample::select(boundaries),
        1 => MAX_INDEX - 3000..=MAX_INDEX,
        1 => 0..=MAX_INDEX,
    ]
}

fn any_order() -> impl Strategy<Value = u32> {
    prop_oneof![3 => Just(0u32), 2 => 1..=6u32, 1 => 7..=MAX_ORDER]
}

fn any_operation() -> impl Strategy<Value = Operation> {
    let marking = (any_index(), 0..MARKS, proptest::bool::weighted(0.7));
    prop_oneof![
        8 => (any_index(), any_order()).prop_map(|(index, order)| Operation::Store(index, order)),
        2 => (any_index(), any_order()).prop_map(|(index, order)| Operation::Join(index, order)),
        3 => (any_index(), any_order()).prop_map(|(index, order)| Operation::Split(index, order)),
        4 => any_index().prop_map(Operation::Erase),
        1 => (any_index(), any_index()).prop_map(|(from, to)| Operation::EraseRange(from, to)),
        1 => any_index().prop_map(Operation::Replace),
        5 => marking.prop_map(|(index, mark, is_set)| Operation::Mark(index, mark, is_set)),
        4 => (any_index(), proptest::num::u64::ANY).prop_map(|(index, which)| Operation::Relocate(index, which)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// After any sequence of operations, readers must find the same entries as in the model, and the tree must have no
    /// unneeded node.
    #[test]
    fn the_array_is_an_ordered_map(operations in proptest::collection::vec(any_operation(), 1..48)) {
        let mut pair = ArrayAndModel::new();
        for operation in operations {
            let index = operation.run(&mut pair);
            pair.check(index);
        }
        pair.erase_all_and_check();
    }

    /// After several changes by one writer, readers must find the same entries as in the model.
    #[test]
    fn one_writer_makes_several_changes(
        changes in proptest::collection::vec((any_index(), proptest::option::weighted(0.6, any_order())), 1..24),
    ) {
        let mut pair = ArrayAndModel::new();
        for changes in changes.chunks(8) {
            pair.change_by_one_writer(changes);
            pair.check(changes[0].0);
        }
        pair.erase_all_and_check();
    }
}

/// Stores, marks, splits, joins, replaces and erases a single entry of each order at each boundary. The array must
/// agree with the model after each operation.
#[test]
fn entries_of_every_order_work_at_every_boundary() {
    let mut pair = ArrayAndModel::new();
    for index in boundaries().collect::<BTreeSet<_>>() {
        for order in 0..=MAX_ORDER {
            pair.store(index, order);
            pair.mark(index, order as usize % MARKS, true);
            pair.check_at(index, MAX_INDEX);
            pair.relocate(u64::MAX);
            pair.check_at(index, MAX_INDEX);
            let into = order / 2;
            pair.split(index, into);
            check_invariants(&pair.array);
            pair.check_at(index, MAX_INDEX);
            pair.join(index, order);
            pair.replace(index);
            pair.check_at(first_index_of(index, order), index);
            assert_eq!(pair.array.node_count() as usize, pair.model.nodes());
            pair.erase(index);
            assert_eq!((pair.array.node_count(), pair.array.is_empty()), (0, true));
        }
    }
    // An entry that moves from the root word to a node leaves no mark in the root word.
    pair.store(0, 0);
    pair.mark(0, 0, true);
    pair.store(5, 0);
    pair.erase(0);
    pair.erase(5);
    pair.join(0, 0);
    pair.check(0);
    pair.erase_all_and_check();
}

/// Splits an entry of each order into each smaller order, and joins the parts again. Readers must find all parts, with
/// the marks of the entry.
#[test]
fn entries_split_into_every_smaller_order() {
    let mut pair = ArrayAndModel::new();
    for order in 1..=MAX_ORDER {
        for into in 0..order {
            pair.store(1 << MAX_ORDER, order);
            pair.mark(1 << MAX_ORDER, 1, true);
            pair.split((1 << MAX_ORDER) + 1, into);
            pair.relocate(0xA5A5_A5A5_A5A5_A5A5);
            pair.check(1 << MAX_ORDER);
            pair.mark(1 << MAX_ORDER, 1, false);
            pair.join(1 << MAX_ORDER, order);
            pair.check(1 << MAX_ORDER);
        }
    }
    pair.erase_all_and_check();
}

/// The tree must grow when entries are stored, and must shrink when they are erased. A single entry at index 0 must
/// need no node.
#[test]
fn the_tree_has_only_the_needed_levels() {
    let mut pair = ArrayAndModel::new();
    pair.store(0, 0);
    pair.mark(0, 2, true);
    for level in 0..=6 {
        let index = (1u64 << ((level + 1) * SLOT_BITS)).min(MAX_INDEX + 1) - 1;
        pair.store(index, 0);
        pair.check(index);
        assert_eq!(pair.array.node_count(), 2 * level + 1, "the top, and a way to either end");
        pair.erase(index);
        pair.check(index);
        assert_eq!(pair.array.node_count(), 0);
    }
    assert!(pair.array.get_mark(0, Mark::C, &pin()));
    pair.erase_all_and_check();
}

/// Stores entries for 2^18 consecutive pages. The nodes must take at most 9.5 bytes a page. The nodes that `prepare`
/// allocated must suffice, and unused ones must be freed.
#[test]
fn a_dense_index_is_small() {
    const ENTRIES: u64 = 1 << 18;
    let nodes = test_forest::forest();
    let array = XArray::new(nodes);
    let mut stock = array.prepare(0, ENTRIES - 1, 0).unwrap();
    {
        let mut writer = array.lock();
        (0..ENTRIES).for_each(|index| writer.store(index, 0, index, &mut stock));
    }
    drop(stock);
    let bytes = nodes.in_use() as usize * size_of::<Node>();
    assert!(bytes as f64 / ENTRIES as f64 <= 9.5, "{bytes} bytes");
    assert_eq!((array.next_gap(0, MAX_INDEX, &pin()), nodes.in_use()), (Some(ENTRIES), array.node_count()));
    assert_eq!(array.load(ENTRIES / 3, &pin()).unwrap().value, ENTRIES / 3);
    drop(array);
    assert_eq!(nodes.in_use(), 0, "no thread reads an array that is dropped");
}

/// The type `XArray` must have at most 48 bytes, because a process may have many arrays.
#[test]
fn an_array_is_small() {
    assert!(size_of::<XArray<Forest>>() <= 48);
}

/// If nodes cannot be allocated, `prepare` must fail without acquiring the lock, and must free the nodes that it
/// allocated before.
#[test]
fn a_failed_prepare_frees_its_nodes() {
    let nodes = test_forest::forest_of(8);
    let array = XArray::new(nodes);
    assert!(matches!(array.prepare(MAX_INDEX, MAX_INDEX, 0), Err(Error::NoAddresses { .. })));
    assert_eq!(nodes.in_use(), 0);
    let mut stock = array.prepare(SLOTS as u64, SLOTS as u64, 0).unwrap();
    array.lock().store(SLOTS as u64, 0, 1, &mut stock);
    assert_eq!((nodes.in_use(), array.node_count()), (stock.count() + 2, 2));
    assert!(array.top_up(&mut stock, 0, MAX_INDEX, 0).is_err());
    drop(stock);
    assert_eq!(nodes.in_use(), 2);
}

/// While a writer exists, `try_lock` must return `None`.
#[test]
fn the_lock_excludes_a_second_writer() {
    let array = XArray::new(test_forest::forest_of(1));
    let writer = array.lock();
    assert!(array.try_lock().is_none());
    drop(writer);
    assert!(array.try_lock().is_some());
}

/// Storing over a part of a larger entry must panic.
#[test]
#[should_panic(expected = "sticks out")]
fn a_store_over_a_part_of_an_entry_panics() {
    let mut pair = ArrayAndModel::new();
    pair.store(0, 9);
    let mut stock = pair.array.prepare(0, 0, 0).unwrap();
    pair.array.lock().store(70, 0, 1, &mut stock);
}

/// Returns an array with nodes and an entry at index 70.
fn array_with_nodes(nodes: &'static Forest) -> Box<XArray<Forest>> {
    // SAFETY: the array is first used in its box, where it stays and is dropped.
    let array = Box::new(unsafe { XArray::movable(nodes) });
    let mut stock = array.prepare(70, 70, 0).unwrap();
    array.lock().store(70, 0, 7, &mut stock);
    array
}

/// Returns the number of the node that contains index 70.
fn leaf_number(array: &XArray<Forest>) -> u32 {
    array.lock().find_slots(70).unwrap().node
}

/// A node must not be moved if it belongs to another array, or if no word points at it.
#[test]
fn a_node_of_another_array_is_not_moved() {
    let nodes = test_forest::forest_of(40);
    let (one, other) = (array_with_nodes(nodes), array_with_nodes(nodes));
    let (old, new) = (leaf_number(&one), nodes.take().unwrap());
    assert!(!other.lock().relocate(other.id(), old, new), "of another array");
    let of_other = leaf_number(&other);
    assert!(other.lock().relocate(other.id(), of_other, new));
    let (unknown, new) = (nodes.take().unwrap(), nodes.take().unwrap());
    nodes.node(old).copy_to(nodes.node(unknown));
    assert!(!one.lock().relocate(one.id(), unknown, new), "no word points at it");
    nodes.node(unknown).set_position(0, 0, 0);
    assert!(!one.lock().relocate(one.id(), unknown, new), "nor is it the root");
    assert!(relocate(nodes, old, new) && leaf_number(&one) == new);
    nodes.node(unknown).mark_dead();
}

/// While another thread holds the array's lock or the array's table entry, a move of a node must fail instead of
/// waiting.
#[test]
fn a_move_does_not_wait_for_locks() {
    let nodes = test_forest::forest_of(20);
    let array = array_with_nodes(nodes);
    let (old, new) = (leaf_number(&array), nodes.take().unwrap());
    let writer = array.lock();
    assert!(!relocate(nodes, old, new));
    drop(writer);
    assert_eq!(nodes.arrays().with(array.id(), |_| relocate(nodes, old, new)), Some(false));
    assert!(nodes.node(old).may_move() && relocate(nodes, old, new));
    assert!(!nodes.node(old).may_move() && leaf_number(&array) == new);
}
