//! The index of a directory: a hash table of its names that is read without a lock.
//!
//! The slots lie in the order of the hashes (linear probing without wrap-around), so a scan visits the names in the
//! order of their hashes. Each hash occurs once, so it is also the cookie at which a listing continues, whatever was
//! added, removed or rehashed meanwhile.
//!
//! ```text
//!   slot 0: sequence, counts | home of hash h = 1 + h >> shift | … | tail: slots behind the last home
//! ```
//!
//! One thread at a time changes an index, under the lock of the directory. It makes the sequence counter odd before the
//! change and even afterwards. A table that was replaced by a larger or smaller one keeps an odd counter.

use crate::dentry::DentryHandle;
use crate::name::{HASH_BITS, TIE_BITS};
use pagemill_core::sync::{Acquire, AtomicU64, Relaxed, Release, fence};
use pagemill_slab::{Handle, Movable};

pub(crate) type IndexHandle = Handle<ChildIndex>;

const MIN_CAPACITY: usize = 4;
/// Slots behind the last home, for names that do not fit at theirs. If they are full, the table becomes larger, at most
/// twice as large as its names need. Then the tail grows: users see hashes in cookies and could choose names with homes
/// at the end.
const MAX_TAIL: usize = 32;

/// A slot of the table. Slots lie outside of [`ChildIndex`], behind its pointer, so a slab cache can move the index by
/// copying its bytes.
#[derive(Default)]
struct Slot {
    /// Hash of the name; 0 in an empty slot. In slot 0, the sequence counter.
    hash: AtomicU64,
    /// Handle of the dentry. In slot 0, the number of names, and above it that of positive ones.
    dentry: AtomicU64,
}

const ONE_POSITIVE: u64 = 1 << 32;

/// The names of one directory.
#[derive(Movable)]
pub(crate) struct ChildIndex {
    slots: Box<[Slot]>,
    shift: u32,
}

/// A name in an index: its hash and its dentry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Child {
    pub hash: u64,
    pub dentry: DentryHandle,
}

impl ChildIndex {
    /// Makes an empty index with room for `names` names.
    pub fn with_room_for(names: usize) -> Self {
        let capacity = (names * 4).div_ceil(3).max(MIN_CAPACITY).next_power_of_two();
        Self::with_capacity(capacity, capacity.min(MAX_TAIL))
    }

    fn with_capacity(capacity: usize, tail: usize) -> Self {
        let count = 1 + capacity + tail;
        let slots = (0..count).map(|_| Slot::default()).collect();
        Self { slots, shift: HASH_BITS - capacity.trailing_zeros() }
    }

    fn capacity(&self) -> usize {
        1 << (HASH_BITS - self.shift)
    }

    #[inline]
    fn home(&self, hash: u64) -> usize {
        1 + (hash >> self.shift) as usize
    }

    /// Number of names, with negative dentries.
    pub fn len(&self) -> usize {
        self.slots[0].dentry.load(Relaxed) as u32 as usize
    }

    /// Number of names that exist.
    pub fn positives(&self) -> u64 {
        self.slots[0].dentry.load(Relaxed) / ONE_POSITIVE
    }

    /// Bytes of the table.
    pub fn bytes(&self) -> u64 {
        (self.slots.len() * size_of::<Slot>()) as u64
    }

    /// Begins a read. Returns the sequence counter; `None` while the index is changed or after it was replaced.
    #[inline]
    pub fn begin_read(&self) -> Option<u64> {
        let sequence = self.slots[0].hash.load(Acquire);
        sequence.is_multiple_of(2).then_some(sequence)
    }

    /// Returns whether nothing has changed since [`ChildIndex::begin_read`].
    #[inline]
    pub fn is_unchanged(&self, sequence: u64) -> bool {
        fence(Acquire);
        self.slots[0].hash.load(Relaxed) == sequence
    }

    /// Begins a change: readers repeat what they read from here on. The change ends when the guard is dropped.
    pub fn begin_change(&self) -> Change<'_> {
        let sequence = &self.slots[0].hash;
        let before = sequence.load(Relaxed);
        debug_assert!(before.is_multiple_of(2), "one change at a time");
        sequence.store(before + 1, Relaxed);
        fence(Release);
        Change { index: self }
    }

    /// Finds a name by its hash. `is_it` compares the dentries that have this hash.
    #[inline]
    pub fn find(&self, hash: u64, mut is_it: impl FnMut(DentryHandle) -> bool) -> Option<Child> {
        let last = hash | ((1 << TIE_BITS) - 1);
        for slot in &self.slots[self.home(hash)..] {
            let found = slot.hash.load(Acquire);
            if found < hash {
                if found == 0 {
                    return None;
                }
                continue;
            }
            if found > last {
                return None;
            }
            let dentry = Handle::from_bits(slot.dentry.load(Acquire));
            if is_it(dentry) {
                return Some(Child { hash: found, dentry });
            }
        }
        None
    }

    /// Returns the names whose hashes are larger than `after`, in the order of their hashes.
    pub fn iter_after(&self, after: u64) -> impl Iterator<Item = Child> {
        let slots = &self.slots[self.home(after.min((1 << HASH_BITS) - 1))..];
        let children = slots.iter().map(|slot| (slot.hash.load(Acquire), slot.dentry.load(Acquire)));
        children
            .filter(move |(hash, _)| *hash > after)
            .map(|(hash, dentry)| Child { hash, dentry: Handle::from_bits(dentry) })
    }

    /// Returns whether one more name fits. Called by the thread that has the lock of the directory, as all functions
    /// below.
    pub fn has_room(&self) -> bool {
        let last = &self.slots[self.slots.len() - 1];
        (self.len() + 1) * 4 <= self.capacity() * 3 && last.hash.load(Relaxed) == 0
    }

    /// Returns whether the table is much larger than its names need.
    pub fn is_sparse(&self) -> bool {
        self.capacity() > 8 * MIN_CAPACITY && self.len() * 8 < self.capacity()
    }

    /// Returns whether a smaller table would do.
    pub fn could_shrink(&self) -> bool {
        Self::with_room_for_capacity(self.len()) < self.capacity()
    }

    fn with_room_for_capacity(names: usize) -> usize {
        (names * 4).div_ceil(3).max(MIN_CAPACITY).next_power_of_two()
    }

    /// Makes a copy with room for `names` names. With an unusual distribution of hashes the copy is larger.
    pub fn rebuilt(&self, names: usize) -> Self {
        let least = Self::with_room_for_capacity(names.max(self.len()));
        let (mut capacity, mut tail) = (least, least.min(MAX_TAIL));
        loop {
            let new = Self::with_capacity(capacity, tail);
            if self.iter_after(0).all(|child| new.has_room() && new.place(child.hash, child.dentry)) && new.has_room() {
                new.slots[0].dentry.store(self.slots[0].dentry.load(Relaxed), Relaxed);
                return new;
            }
            if capacity < 2 * least { capacity *= 2 } else { tail *= 2 }
        }
    }

    /// Returns the hash for a new name, the first of those that differ from `hash` only in the low bits and that no
    /// name has; `None` if all are in use.
    pub fn free_hash(&self, hash: u64) -> Option<u64> {
        let mut free = hash;
        let last = hash | ((1 << TIE_BITS) - 1);
        for child in self.iter_after(hash - 1).take_while(|child| child.hash <= last) {
            if child.hash > free {
                break;
            }
            free = child.hash + 1;
        }
        (free <= last).then_some(free)
    }

    /// Puts a name into its slot, and moves the names with larger hashes back by one. Returns false if the tail is full.
    fn place(&self, hash: u64, dentry: DentryHandle) -> bool {
        let mut at = self.home(hash);
        while at < self.slots.len() && (1..hash).contains(&self.slots[at].hash.load(Relaxed)) {
            at += 1;
        }
        let Some(room) = self.slots[at..].iter().position(|slot| slot.hash.load(Relaxed) == 0) else { return false };
        for to in (at + 1..=at + room).rev() {
            self.slots[to].copy_from(&self.slots[to - 1]);
        }
        self.slots[at].dentry.store(dentry.to_bits(), Release);
        self.slots[at].hash.store(hash, Release);
        true
    }

    /// Returns the position of a name that is in the index.
    fn position(&self, hash: u64) -> usize {
        let found = self.slots[self.home(hash)..].iter().position(|slot| slot.hash.load(Relaxed) == hash);
        self.home(hash) + found.expect("the name is in the index")
    }

    fn add_to_counts(&self, names: i64, positives: i64) {
        let delta = (names + positives * ONE_POSITIVE as i64) as u64;
        let counts = &self.slots[0].dentry;
        counts.store(counts.load(Relaxed).wrapping_add(delta), Relaxed);
    }
}

impl Slot {
    fn copy_from(&self, other: &Self) {
        self.dentry.store(other.dentry.load(Relaxed), Release);
        self.hash.store(other.hash.load(Relaxed), Release);
    }
}

/// A change of an index. Readers wait for its end.
#[must_use]
pub(crate) struct Change<'index> {
    index: &'index ChildIndex,
}

impl Change<'_> {
    /// Adds a name with a hash of [`ChildIndex::free_hash`]. The index has room ([`ChildIndex::has_room`]).
    pub fn insert(&self, child: Child, is_positive: bool) {
        let is_placed = self.index.place(child.hash, child.dentry);
        assert!(is_placed, "the caller has made room");
        self.index.add_to_counts(1, i64::from(is_positive));
    }

    /// Removes a name, and moves the names behind it forward.
    pub fn remove(&self, hash: u64, was_positive: bool) {
        let (index, mut at) = (self.index, self.index.position(hash));
        while let Some(next) = index.slots.get(at + 1) {
            let next_hash = next.hash.load(Relaxed);
            if next_hash == 0 || index.home(next_hash) > at {
                break;
            }
            index.slots[at].copy_from(next);
            at += 1;
        }
        index.slots[at].hash.store(0, Release);
        index.slots[at].dentry.store(0, Release);
        index.add_to_counts(-1, -i64::from(was_positive));
    }

    /// Replaces the dentry of a name. `positives` is the change of the number of positive dentries.
    pub fn replace(&self, child: Child, positives: i64) {
        self.index.slots[self.index.position(child.hash)].dentry.store(child.dentry.to_bits(), Release);
        self.index.add_to_counts(0, positives);
    }

    /// Leaves the sequence counter odd for good, because another table has replaced this one.
    pub fn retire(self) {
        std::mem::forget(self);
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        let sequence = &self.index.slots[0].hash;
        sequence.store(sequence.load(Relaxed) + 1, Release);
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// Inserts and removes names with random, also with equal hashes, in a table and in a `BTreeMap`. After each step
    /// the table must list the same names in the same order, find each, and continue a listing at any cookie.
    #[test]
    fn table_agrees_with_a_sorted_map() {
        for bits in [6, 9, HASH_BITS - TIE_BITS] {
            let mut random = fastrand::Rng::with_seed(u64::from(bits));
            let (mut index, mut model) = (ChildIndex::with_room_for(0), BTreeMap::new());
            for step in 0..3000_u64 {
                if model.is_empty() || random.u8(..) < if step < 2000 { 150 } else { 100 } {
                    let hash = random.u64(1..1 << bits) << (HASH_BITS - bits).max(TIE_BITS);
                    let Some(free) = index.free_hash(hash) else { continue };
                    let dentry = Handle::from_bits(1 << 44 | step);
                    if !index.has_room() {
                        index = index.rebuilt(index.len() + 1);
                    }
                    index.begin_change().insert(Child { hash: free, dentry }, step % 3 == 0);
                    assert!(model.insert(free, (dentry, step % 3 == 0)).is_none());
                } else {
                    let at = random.usize(..model.len());
                    let (&hash, &(_, is_positive)) = model.iter().nth(at).unwrap();
                    index.begin_change().remove(hash, is_positive);
                    model.remove(&hash);
                    if index.is_sparse() {
                        index = index.rebuilt(index.len());
                    }
                }
                let after = random.u64(..1 << HASH_BITS);
                let listed: Vec<_> = index.iter_after(after).map(|child| (child.hash, child.dentry)).collect();
                assert_eq!(listed, model.range(after + 1..).map(|(h, (d, _))| (*h, *d)).collect::<Vec<_>>());
                assert_eq!(index.len(), model.len());
                assert_eq!(index.positives(), model.values().filter(|(_, is)| *is).count() as u64);
            }
            for (hash, (dentry, _)) in &model {
                let base = hash & !((1 << TIE_BITS) - 1);
                assert_eq!(index.find(base, |it| it == *dentry), Some(Child { hash: *hash, dentry: *dentry }));
            }
            assert_eq!(index.find(1 << TIE_BITS, |_| false), None);
        }
    }

    /// Names with chosen hashes must not make the table large, and all must be found.
    #[test]
    fn names_at_the_end_need_a_longer_tail_only() {
        const NAMES: u64 = 300;
        let mut index = ChildIndex::with_room_for(0);
        let hash_of = |name: u64| ((1 << HASH_BITS) - (NAMES << TIE_BITS)) + (name << TIE_BITS);
        for name in 0..NAMES {
            let child =
                Child { hash: index.free_hash(hash_of(name)).unwrap(), dentry: Handle::from_bits(1 << 44 | name) };
            if !index.has_room() {
                index = index.rebuilt(index.len() + 1);
            }
            index.begin_change().insert(child, true);
        }
        assert!(index.bytes() <= 16 * 4 * 512, "{} bytes", index.bytes());
        for name in 0..NAMES {
            let found = index.find(hash_of(name), |_| true).unwrap();
            assert_eq!(found.dentry.to_bits(), 1 << 44 | name);
        }
    }

    /// A reader must notice a change that began before or during the read, and a table that was replaced.
    #[test]
    fn reads_notice_changes() {
        let index = ChildIndex::with_room_for(1);
        let sequence = index.begin_read().unwrap();
        assert!(index.is_unchanged(sequence));
        let change = index.begin_change();
        assert!(index.begin_read().is_none() && !index.is_unchanged(sequence));
        drop(change);
        assert!(!index.is_unchanged(sequence) && index.begin_read().is_some());
        index.begin_change().retire();
        assert!(index.begin_read().is_none());
    }
}
