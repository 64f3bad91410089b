//! An ordered map from disjoint intervals of addresses to small values: a B-tree with two levels.
//!
//! ```text
//!   directory   [ 0x1000, leaf 0 | 0x7000, leaf 2 | 0xf000, leaf 1 ]   by first start
//!                       |               |               |
//!   leaves         [ entries ]     [ entries ]     [ entries ]         by start, 4 KiB each
//! ```
//!
//! A lookup is two binary searches. A full leaf is split. Two neighbouring leaves that together fill less than half a
//! leaf are merged, so repeated insertions and removals leave no almost empty leaves. The map is used inside `malloc`,
//! so it does not use the global allocator. It has no lock; its owner must protect it.
#![allow(unsafe_code)] // leaves in memory mapped by hand

use pagemill_core::error::{Error, Result};
use pagemill_core::units::{PageSize, os_page_bytes};
use pagemill_sys::mem;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr;

/// Maximum number of leaves of a map. They have room for some 100 million intervals, and take 4 GiB of addresses.
const MAX_LEAVES: usize = 1 << 20;
const LEAF_BYTES: usize = PageSize::MIN_BYTES;
/// The memory of an array is made accessible in steps of this many bytes.
const OPEN_STEP_BYTES: usize = 1 << 20;

/// An ordered map from disjoint, half-open, non-empty intervals of addresses to small values (16 bytes at most).
///
/// # Invariants
///
/// 1. The first `leaves` items of the directory are in use, ascending by `first`. The items behind these, up to
///    `leaf_numbers`, are free leaves. Together the first `leaf_numbers` items contain every leaf number below
///    `leaf_numbers` once.
/// 2. A leaf in use has at least one entry. Its first `count` entries are written, ascending and disjoint, and `first`
///    is the start of the first entry.
/// 3. Two neighbouring leaves together have at least half a leaf of entries.
pub(super) struct Intervals<T> {
    directory: SparseArray<Leaf>,
    /// The entries of all leaves, `PER_LEAF` for each leaf, in the order of the leaves' numbers.
    entries: SparseArray<MaybeUninit<IntervalEntry<T>>>,
    /// Number of leaves in use.
    leaves: usize,
    /// Number of leaves created so far, in use or free.
    leaf_numbers: usize,
    /// Sum of the lengths of all intervals in the map.
    bytes: u64,
}

/// The directory entry of a leaf.
#[derive(Clone, Copy)]
struct Leaf {
    /// Start of the leaf's first entry.
    first: usize,
    /// Number of the leaf: its entries begin at index `number * PER_LEAF` of the array of all entries.
    number: u32,
    /// Number of entries in the leaf.
    count: u32,
}

/// The interval `start..end` with its value.
#[derive(Clone, Copy)]
struct IntervalEntry<T> {
    start: usize,
    end: usize,
    value: T,
}

impl<T: Copy> Intervals<T> {
    /// Maximum number of entries in a leaf.
    const PER_LEAF: usize = LEAF_BYTES / size_of::<IntervalEntry<T>>();

    /// Creates an empty map, without a system call. Memory that the map uses later stays until the process ends.
    pub(super) const fn new() -> Self {
        let directory = SparseArray::new(MAX_LEAVES);
        let entries = SparseArray::new(MAX_LEAVES * Self::PER_LEAF);
        Self { directory, entries, leaves: 0, leaf_numbers: 0, bytes: 0 }
    }

    /// Number of intervals in the map.
    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.directory().iter().map(|leaf| leaf.count as usize).sum()
    }

    /// Sum of the lengths of all intervals in the map.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Ensures that the next `insertions` insertions cannot fail. A cut out of the middle of an interval counts as one
    /// insertion.
    ///
    /// Cost: two comparisons, and a system call for each MiB of leaves. The first call reserves the addresses. Errors:
    /// [`Error::NoAddresses`] if the map could need too many leaves, [`Error::System`] if the kernel refuses memory.
    pub(super) fn prepare(&mut self, insertions: usize) -> Result<()> {
        let leaves = self.leaves.saturating_add(insertions);
        self.directory.open(leaves)?;
        self.entries.open(leaves.saturating_mul(Self::PER_LEAF))
    }

    /// Adds an interval, which must not be empty and must not overlap another. Adjacent intervals stay separate.
    ///
    /// Cost: a search, and a move of up to 4 KiB. Errors as [`Self::prepare`]; after an error nothing has changed.
    pub(super) fn insert(&mut self, range: Range<usize>, value: T) -> Result<()> {
        assert!(!range.is_empty(), "an interval has bytes");
        debug_assert!(self.overlapping(range.clone()).next().is_none(), "intervals are disjoint");
        self.insert_entry(IntervalEntry { start: range.start, end: range.end, value })
    }

    /// Removes the parts of all intervals that lie inside `range`. Returns the number of bytes removed.
    ///
    /// Parts outside `range` stay, with their values. `each` is called with the removed parts in ascending order. Cost:
    /// a search, and some nanoseconds for each removed part. Errors as [`Self::prepare`], only if `range` is in the
    /// middle of an interval; after an error nothing has changed, and `each` was not called.
    pub(super) fn cut(&mut self, range: Range<usize>, mut each: impl FnMut(Range<usize>, T)) -> Result<u64> {
        if range.is_empty() {
            return Ok(0);
        }
        let (index, at) = self.seek(range.start);
        let entry = self.leaf(index).get(at).copied();
        if let Some(entry) = entry.filter(|entry| entry.start < range.start && range.end < entry.end) {
            self.insert_entry(IntervalEntry { start: range.end, ..entry })?;
            let (index, at) = self.seek(range.start);
            self.leaf_mut(index)[at].end = range.start;
            self.bytes -= (entry.end - range.start) as u64;
            each(range.clone(), entry.value);
            return Ok(range.len() as u64);
        }
        let (mut end, before) = (index, self.bytes);
        while self.directory().get(end).is_some_and(|leaf| leaf.first < range.end) {
            self.cut_leaf(end, &range, &mut each);
            end += 1;
        }
        self.free_empty_leaves(index..end);
        self.merge_around(index);
        debug_assert!((self.leaves == 0) == (self.bytes == 0), "no interval is empty");
        debug_assert!(self.directory().iter().all(|leaf| leaf.count > 0), "no leaf is empty");
        Ok(before - self.bytes)
    }

    /// Returns all intervals that end after `addr`, ascending. Cost: a search, then some nanoseconds for each interval.
    pub(super) fn from(&self, addr: usize) -> impl Iterator<Item = (Range<usize>, T)> {
        let (first, at) = self.seek(addr);
        let entries = (first..self.leaves).flat_map(move |index| self.leaf(index)).skip(at);
        entries.map(|entry| (entry.start..entry.end, entry.value))
    }

    /// Returns the intervals that overlap `range`, each as a whole, ascending. Cost: as [`Self::from`].
    pub(super) fn overlapping(&self, range: Range<usize>) -> impl Iterator<Item = (Range<usize>, T)> {
        self.from(range.start).take_while(move |(whole, _)| !range.is_empty() && whole.start < range.end)
    }

    /// Calls `change` with each interval that overlaps `range` and a reference to its value.
    pub(super) fn update(&mut self, range: Range<usize>, mut change: impl FnMut(Range<usize>, &mut T)) {
        let (mut index, mut at) = self.seek(range.start);
        while !range.is_empty() && self.directory().get(index).is_some_and(|leaf| leaf.first < range.end) {
            for entry in self.leaf_mut(index)[at..].iter_mut().take_while(|entry| entry.start < range.end) {
                change(entry.start..entry.end, &mut entry.value);
            }
            (index, at) = (index + 1, 0);
        }
    }

    fn directory(&self) -> &[Leaf] {
        &self.directory.items()[..self.leaves]
    }

    /// Returns the index of the leaf that contains, or would contain, an interval with this start.
    fn leaf_for(&self, start: usize) -> usize {
        self.directory().partition_point(|leaf| leaf.first <= start).saturating_sub(1)
    }

    /// Returns the leaf of the first interval that ends after `addr`, and the index of the interval in that leaf. If
    /// the interval is the first entry of its leaf, the result may be the end of the previous leaf.
    fn seek(&self, addr: usize) -> (usize, usize) {
        let index = self.leaf_for(addr);
        (index, self.leaf(index).partition_point(|entry| entry.end <= addr))
    }

    /// Returns the indices, in the array of all entries, of a leaf's entries from `at` on.
    fn entry_indices(leaf: Leaf, at: usize) -> Range<usize> {
        let first = leaf.number as usize * Self::PER_LEAF;
        first + at..first + leaf.count as usize
    }

    /// Returns the entries of a leaf; an empty slice if there is no leaf with this index.
    fn leaf(&self, index: usize) -> &[IntervalEntry<T>] {
        let Some(leaf) = self.directory().get(index) else { return &[] };
        let entries = &self.entries.items()[Self::entry_indices(*leaf, 0)];
        // SAFETY: the first `count` entries of a leaf are written (type invariant 2).
        unsafe { &*(ptr::from_ref(entries) as *const [IntervalEntry<T>]) }
    }

    fn leaf_mut(&mut self, index: usize) -> &mut [IntervalEntry<T>] {
        let places = Self::entry_indices(self.directory()[index], 0);
        let entries = &mut self.entries.items_mut()[places];
        // SAFETY: the first `count` entries of a leaf are written (type invariant 2).
        unsafe { &mut *(ptr::from_mut(entries) as *mut [IntervalEntry<T>]) }
    }

    /// Inserts an entry at its sorted position. After an error nothing has changed.
    fn insert_entry(&mut self, entry: IntervalEntry<T>) -> Result<()> {
        let mut index = self.leaf_for(entry.start);
        let mut at = self.leaf(index).partition_point(|other| other.start < entry.start);
        if self.leaves == 0 {
            self.prepare(1)?;
            self.add_leaf(0);
        } else if self.leaf(index).len() == Self::PER_LEAF {
            self.prepare(1)?;
            let is_at_end = at == Self::PER_LEAF && index + 1 == self.leaves;
            // Ascending insertions add no more entries to this leaf, so splitting the leaf would leave it half empty.
            let kept = if is_at_end { Self::PER_LEAF } else { Self::PER_LEAF / 2 };
            self.add_leaf(index + 1);
            self.move_entries(index, kept, index + 1);
            if at >= kept {
                (index, at) = (index + 1, at - kept);
            }
        }
        let leaf = &mut self.directory.items_mut()[index];
        let places = Self::entry_indices(*leaf, at);
        leaf.count += 1;
        let entries = self.entries.items_mut();
        entries.copy_within(places.clone(), places.start + 1);
        entries[places.start].write(entry);
        self.update_first(index);
        self.bytes += (entry.end - entry.start) as u64;
        debug_assert!(self.leaf(index).len() <= Self::PER_LEAF, "a full leaf was split");
        debug_assert!(self.leaf(index).is_sorted_by_key(|entry| entry.start));
        Ok(())
    }

    /// Inserts a leaf without entries into the directory. The caller has called [`Self::prepare`], so `add_leaf` cannot
    /// fail.
    fn add_leaf(&mut self, index: usize) {
        let directory = self.directory.items_mut();
        if self.leaves == self.leaf_numbers {
            directory[self.leaf_numbers] = Leaf { first: 0, number: self.leaf_numbers as u32, count: 0 };
            self.leaf_numbers += 1;
        }
        directory[index..=self.leaves].rotate_right(1);
        self.leaves += 1;
    }

    /// Moves the entries of leaf `from`, starting at index `at`, to the end of leaf `to`, which must have room for
    /// them.
    fn move_entries(&mut self, from: usize, at: usize, to: usize) {
        let directory = self.directory.items_mut();
        let (moved, target) = (Self::entry_indices(directory[from], at), Self::entry_indices(directory[to], 0).end);
        directory[from].count = at as u32;
        directory[to].count += moved.len() as u32;
        debug_assert!(directory[to].count as usize <= Self::PER_LEAF, "the entries fit");
        self.entries.items_mut().copy_within(moved, target);
        self.update_first(to);
    }

    /// Updates [`Leaf::first`] of a leaf in the directory, after the leaf's first entry may have changed.
    fn update_first(&mut self, index: usize) {
        if let Some(IntervalEntry { start, .. }) = self.leaf(index).first().copied() {
            self.directory.items_mut()[index].first = start;
        }
    }

    /// Removes the parts of a leaf's intervals that lie inside `range`. The leaf may be empty afterwards. `range` must
    /// not be in the middle of an entry.
    fn cut_leaf(&mut self, index: usize, range: &Range<usize>, each: &mut impl FnMut(Range<usize>, T)) {
        let entries = self.leaf_mut(index);
        let first = entries.partition_point(|entry| entry.end <= range.start);
        let (mut gone, mut removed) = (first..first, 0);
        for entry in entries[first..].iter_mut().take_while(|entry| entry.start < range.end) {
            let part = entry.start.max(range.start)..entry.end.min(range.end);
            removed += part.len() as u64;
            if entry.start < part.start {
                entry.end = part.start;
                gone = first + 1..first + 1;
            } else if part.end < entry.end {
                entry.start = part.end;
            } else {
                gone.end += 1;
            }
            each(part, entry.value);
        }
        entries.copy_within(gone.end.., gone.start);
        self.directory.items_mut()[index].count -= gone.len() as u32;
        self.update_first(index);
        self.bytes -= removed;
    }

    /// Frees the empty leaves among those that a cut has changed.
    fn free_empty_leaves(&mut self, touched: Range<usize>) {
        let directory = &mut self.directory.items_mut()[..self.leaves];
        let empty = directory[touched.clone()].iter().filter(|leaf| leaf.count == 0).count();
        // A cut empties all leaves except the first and the last ones that it changes. So the empty leaves are
        // adjacent.
        if let Some(first) = directory[touched.clone()].iter().position(|leaf| leaf.count == 0) {
            directory[touched.start + first..].rotate_left(empty);
        }
        self.leaves -= empty;
    }

    /// Merges neighbouring leaves with few entries after a cut. The cut has changed at most two leaves that still have
    /// entries: those at `index` and `index + 1`.
    fn merge_around(&mut self, index: usize) {
        for left in (index.saturating_sub(1)..=index + 1).rev() {
            let (here, next) = (self.leaf(left).len(), self.leaf(left + 1).len());
            if next > 0 && here + next < Self::PER_LEAF / 2 {
                self.move_entries(left + 1, 0, left);
                self.free_empty_leaves(left + 1..left + 2);
            }
        }
    }
}

/// An array in reserved address space, of which only the used part is accessible.
///
/// If the whole array were accessible, the program's `mlockall` would make gigabytes resident.
///
/// # Invariants
///
/// Zero bits are a valid `U`. If `base` is not 0, addresses for `max_len` items are reserved there and used by this
/// array only. The first `open_bytes` of them are readable and writable, and contain values of `U` or zero bits.
struct SparseArray<U> {
    base: usize,
    open_bytes: usize,
    max_len: usize,
    _items: PhantomData<U>,
}

impl<U> SparseArray<U> {
    const fn new(max_len: usize) -> Self {
        Self { base: 0, open_bytes: 0, max_len, _items: PhantomData }
    }

    /// Makes the first `len` items accessible.
    fn open(&mut self, len: usize) -> Result<()> {
        let wanted_bytes = len.saturating_mul(size_of::<U>());
        if len > self.max_len {
            return Err(Error::NoAddresses { wanted_bytes: wanted_bytes as u64 });
        }
        if wanted_bytes <= self.open_bytes {
            return Ok(());
        }
        if self.base == 0 {
            self.base =
                mem::reserve(self.max_bytes(), os_page_bytes(), 0).map_err(Error::system("reserving metadata"))?;
        }
        let new_bytes = wanted_bytes.next_multiple_of(OPEN_STEP_BYTES) - self.open_bytes;
        // SAFETY: the range is inside the reservation, whose length is a multiple of the step.
        unsafe { mem::open(self.base + self.open_bytes, new_bytes) }.map_err(Error::system("opening metadata"))?;
        self.open_bytes += new_bytes;
        debug_assert!(self.open_bytes <= self.max_bytes());
        Ok(())
    }

    /// Returns the length of the reserved address space in bytes.
    fn max_bytes(&self) -> usize {
        (self.max_len * size_of::<U>()).next_multiple_of(OPEN_STEP_BYTES)
    }

    /// Returns the accessible items; an empty slice at an arbitrary address if no items are accessible.
    fn accessible_items(&self) -> *mut [U] {
        ptr::slice_from_raw_parts_mut(self.base.max(align_of::<U>()) as *mut U, self.open_bytes / size_of::<U>())
    }

    fn items(&self) -> &[U] {
        // SAFETY: the items are readable, valid, and used by this array only (type invariant).
        unsafe { &*self.accessible_items() }
    }

    fn items_mut(&mut self) -> &mut [U] {
        // SAFETY: as above; the items are writable, and `&mut self` excludes other references.
        unsafe { &mut *self.accessible_items() }
    }
}

/// Unmaps an array in shuttle tests, which create thousands of arrays. In other builds arrays are never unmapped.
#[cfg(all(test, shuttle))]
impl<U> Drop for SparseArray<U> {
    fn drop(&mut self) {
        if self.base != 0 {
            // SAFETY: this is the reservation of this array, which is not used any more.
            unsafe { mem::unreserve(self.base, self.max_bytes()) };
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    type Items = Vec<(Range<usize>, u32)>;
    const PER_LEAF: usize = Intervals::<u32>::PER_LEAF;

    /// Asserts the invariants of [`Intervals`], and that the counters of the map agree with its entries.
    fn assert_invariants(tested: &Intervals<u32>) {
        let mut numbers: Vec<_> =
            tested.directory.items()[..tested.leaf_numbers].iter().map(|leaf| leaf.number).collect();
        numbers.sort_unstable();
        assert!(numbers.into_iter().eq(0..tested.leaf_numbers as u32), "each leaf is there once");
        let counts: Vec<usize> = tested.directory().iter().map(|leaf| leaf.count as usize).collect();
        assert!(counts.iter().all(|count| (1..=PER_LEAF).contains(count)));
        assert!(counts.windows(2).all(|pair| pair[0] + pair[1] >= PER_LEAF / 2), "thin neighbours are merged");
        assert!((0..tested.leaves).all(|index| tested.directory()[index].first == tested.leaf(index)[0].start));
        let entries: Vec<_> = (0..tested.leaves).flat_map(|index| tested.leaf(index)).collect();
        assert!(entries.iter().all(|entry| entry.start < entry.end));
        assert!(entries.windows(2).all(|pair| pair[0].end <= pair[1].start));
        let bytes: usize = entries.iter().map(|entry| entry.end - entry.start).sum();
        assert_eq!((tested.count(), tested.bytes()), (entries.len(), bytes as u64));
    }

    /// The tested map, and a `BTreeMap` with the same contents.
    struct MapAndModel(Intervals<u32>, BTreeMap<usize, (usize, u32)>);

    impl MapAndModel {
        fn expected(&self, range: &Range<usize>) -> Items {
            let is_in = |whole: &Range<usize>| range.start.max(whole.start) < range.end.min(whole.end);
            let all = self.1.iter().map(|(start, (end, value))| (*start..*end, *value));
            all.filter(|(whole, _)| is_in(whole)).collect()
        }

        /// Cuts `range` in both maps, then inserts it as an interval if `new` is a value.
        fn replace(&mut self, range: Range<usize>, new: Option<u32>) {
            let (mut expected, mut parts) = (self.expected(&range), Items::new());
            for (whole, value) in &mut expected {
                self.1.remove(&whole.start);
                for (start, end) in [(whole.start, range.start), (range.end, whole.end)] {
                    self.1.extend((start < end).then_some((start, (end, *value))));
                }
                *whole = whole.start.max(range.start)..whole.end.min(range.end);
            }
            let removed = self.0.cut(range.clone(), |part, value| parts.push((part, value))).unwrap();
            assert_eq!(removed as usize, parts.iter().map(|(part, _)| part.len()).sum());
            assert_eq!(parts, expected);
            if let Some(new) = new.filter(|_| !range.is_empty()) {
                self.0.insert(range.clone(), new).unwrap();
                self.1.insert(range.start, (range.end, new));
            }
            assert_invariants(&self.0);
        }

        fn update(&mut self, range: Range<usize>, new: u32) {
            let (expected, mut seen) = (self.expected(&range), Items::new());
            self.1.extend(expected.iter().map(|(whole, value)| (whole.start, (whole.end, value ^ new))));
            self.0.update(range, |whole, value| seen.push((whole, std::mem::replace(value, *value ^ new))));
            assert_eq!(seen, expected);
        }

        fn check_queries(&self, range: Range<usize>) {
            assert_eq!(self.0.from(range.start).collect::<Items>(), self.expected(&(range.start..usize::MAX)));
            assert_eq!(self.0.overlapping(range.clone()).collect::<Items>(), self.expected(&range));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Applies random operations to a map with many leaves or none. Results and contents must equal those of the
        /// `BTreeMap`.
        #[test]
        fn operations_match_btree_map(
            filled in 0usize..1000,
            steps in prop::collection::vec((0..8, 0usize..4000, 0usize..8, 0..40, any::<u32>()), 0..300),
        ) {
            let mut pair = MapAndModel(Intervals::new(), BTreeMap::new());
            (0..filled).for_each(|index| pair.replace(index * 4..index * 4 + 3, Some(index as u32)));
            for (what, start, len, rare, value) in steps {
                let range = start..start + if rare == 0 { len * 500 } else { len };
                match what {
                    0..4 => pair.replace(range.clone(), Some(value)),
                    4..7 => pair.replace(range.clone(), None),
                    _ => pair.update(range.clone(), value),
                }
                pair.check_queries(range);
            }
        }
    }

    /// Inserts thousands of intervals in random order and removes nine of ten, twice; then cuts long ranges. Leaves
    /// must be merged, and freed leaves must be used again.
    #[test]
    fn leaves_are_split_merged_and_reused() {
        let mix = |number: usize| (number ^ number >> 29).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let (mut pair, mut order) = (MapAndModel(Intervals::new(), BTreeMap::new()), Vec::from_iter(0..3000));
        let mut most_leaves = 0;
        for seed in [3, 7] {
            order.sort_by_key(|number| mix(mix(number + seed)));
            for number in &order {
                pair.replace(number * 8..number * 8 + 5, Some(*number as u32));
                most_leaves = most_leaves.max(pair.0.leaves);
            }
            assert!(pair.0.leaves > 3000 / PER_LEAF);
            order[300..].iter().for_each(|number| pair.replace(number * 8..number * 8 + 5, None));
            pair.check_queries(0..usize::MAX);
            assert!(pair.0.leaves <= 2 * 300 / (PER_LEAF / 2) + 1, "{} leaves", pair.0.leaves);
            assert_eq!(pair.0.leaf_numbers, most_leaves, "no new leaf while one is free");
        }
        pair.replace(0..usize::MAX, None);
        assert_eq!((pair.0.leaves, pair.0.count(), pair.0.bytes()), (0, 0, 0));
        (0..3 * PER_LEAF).for_each(|number| pair.replace(number * 8..number * 8 + 8, Some(0)));
        pair.replace(8 * (2 * PER_LEAF + 50)..usize::MAX, None);
        pair.replace(8 * 100..8 * (2 * PER_LEAF - 10), None);
    }

    /// Insertions in ascending order must fill all leaves of a map that is limited to ten leaves. An operation that
    /// then needs another leaf must fail and change nothing.
    #[test]
    fn full_map_refuses_and_stays_unchanged() {
        let mut tested: Intervals<u32> = Intervals::new();
        tested.directory.max_len = 10;
        let end = 80 * PER_LEAF;
        (0..end).step_by(8).for_each(|start| tested.insert(start..start + 8, start as u32).unwrap());
        let before: Items = tested.from(0).collect();
        assert_eq!((tested.leaves, before.len()), (10, 10 * PER_LEAF));
        assert!(matches!(tested.insert(end..end + 1, 0), Err(Error::NoAddresses { .. })));
        assert!(tested.cut(9..10, |_, _| unreachable!("nothing was removed")).is_err());
        assert!(tested.from(0).eq(before));
        assert_eq!(tested.cut(14..24, |_, _| {}).unwrap(), 10);
        assert_eq!(tested.cut(9..10, |_, _| {}).unwrap(), 1);
        assert!(tested.overlapping(8..14).eq([(8..9, 8), (10..14, 8)]));
        assert_invariants(&tested);
    }

    /// After `prepare(1000)`, 1000 insertions must need no more memory. `prepare` must fail for too many leaves, and
    /// `insert` must fail if the kernel refuses to reserve addresses.
    #[test]
    fn prepared_insertions_need_no_memory() {
        let mut tested: Intervals<u32> = Intervals::new();
        assert!(matches!(tested.prepare(MAX_LEAVES + 1), Err(Error::NoAddresses { .. })));
        tested.prepare(1000).unwrap();
        let open_bytes = tested.entries.open_bytes;
        assert!(open_bytes >= 1000 * PER_LEAF * size_of::<IntervalEntry<u32>>());
        (0..1000).for_each(|number| tested.insert(number * 2..number * 2 + 1, 0).unwrap());
        assert_eq!(tested.entries.open_bytes, open_bytes);
        let mut refused: Intervals<u32> = Intervals::new();
        refused.entries.max_len = 1 << 56;
        assert!(matches!(refused.insert(1..2, 3), Err(Error::System { .. })));
        assert_invariants(&refused);
    }

    /// Inserts intervals until three steps of memory ([`OPEN_STEP_BYTES`]) are full. The map must open one step at a
    /// time, and only when it needs the step.
    #[test]
    fn memory_grows_in_steps() {
        let mut tested: Intervals<u32> = Intervals::new();
        let (steps, mut seen) = (3, 0);
        let items = steps * OPEN_STEP_BYTES / size_of::<IntervalEntry<u32>>();
        for number in 0..items {
            tested.insert(number * 2..number * 2 + 1, number as u32).unwrap();
            seen = seen.max(tested.entries.open_bytes / OPEN_STEP_BYTES);
            let wanted_bytes = (tested.leaves + 1) * PER_LEAF * size_of::<IntervalEntry<u32>>();
            assert!(tested.entries.open_bytes <= wanted_bytes.next_multiple_of(OPEN_STEP_BYTES));
        }
        assert_eq!(
            (seen, tested.entries.items().len()),
            (steps + 1, (steps + 1) * OPEN_STEP_BYTES / size_of::<IntervalEntry<u32>>())
        );
        assert_eq!(tested.directory.items().len(), OPEN_STEP_BYTES / size_of::<Leaf>());
        assert!(tested.from(0).eq((0..items).map(|number| (number * 2..number * 2 + 1, number as u32))));
        assert_eq!(SparseArray::<u64>::new(3 * OPEN_STEP_BYTES / 8).max_bytes(), 3 * OPEN_STEP_BYTES);
        assert_eq!(SparseArray::<u64>::new(3 * OPEN_STEP_BYTES / 8 + 1).max_bytes(), 4 * OPEN_STEP_BYTES);
    }
}
