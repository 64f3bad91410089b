//! Slab metadata, which lies apart from the slabs. Each slab has a bitmap of its objects and some counters. Each block
//! has a set of its slabs for each level of use.
//!
//! All metadata is changed under the lock of the node that has the block ([`crate::alloc::node`]). The words are atomic
//! only because they lie in shared tables.
#![allow(unsafe_code)] // zero bits are valid metadata

use crate::alloc::shape::{MAX_OBJECTS, MAX_SLABS};
use crate::alloc::thread_slots::set_bits;
use pagemill_core::arena::Zeroed;
use pagemill_core::sync::Relaxed;

macro_rules! locked_word {
    ($name:ident, $atomic:ident, $integer:ty) => {
        /// An atomic word that is accessed under a lock only.
        #[derive(Default)]
        #[repr(transparent)]
        pub(crate) struct $name(std::sync::atomic::$atomic);

        impl $name {
            #[inline]
            pub fn get(&self) -> $integer {
                self.0.load(Relaxed)
            }

            #[inline]
            pub fn set(&self, value: $integer) {
                self.0.store(value, Relaxed);
            }
        }
    };
}

locked_word!(LockedU32, AtomicU32, u32);
locked_word!(LockedU64, AtomicU64, u64);

impl LockedU32 {
    pub fn add(&self, more: u32) {
        self.set(self.get() + more);
    }

    pub fn sub(&self, less: u32) {
        self.set(self.get() - less);
    }
}

/// Number of 64-bit words in a slab's bitmap of objects.
const BITMAP_WORDS: usize = MAX_OBJECTS / u64::BITS as usize;

/// A set of objects of one slab.
#[derive(Clone, Copy, Default)]
pub(crate) struct ObjectSet([u64; BITMAP_WORDS]);

impl ObjectSet {
    pub fn add(&mut self, object: u32) {
        self.0[object as usize / 64] |= 1 << (object % 64);
    }

    pub fn count(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    pub fn iter(&self) -> impl Iterator<Item = u32> + use<> {
        set_bits(self.0.into_iter()).map(|object| object as u32)
    }
}

/// State of a slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum SlabState {
    /// Objects are allocated from the slab and freed into it.
    Open,
    /// One thread owns the slab, to set it up, empty it, or free its memory. Objects can still be freed into it.
    Claimed,
    /// The slab is unusable, because a callback panicked. No object is allocated from it again.
    Lost,
}

/// Metadata of one slab.
#[repr(C, align(128))]
pub(crate) struct Slab {
    /// One bit for each object, set while the object is *used*: allocated, or in a magazine or barn.
    bits: [LockedU64; BITMAP_WORDS],
    /// Number of set bits in `bits`.
    used: LockedU32,
    state: LockedU32,
    /// Number of the last defragmentation pass that tried to empty the slab. Passes are numbered from 1.
    pub tried: LockedU32,
}

// SAFETY: atomic words are valid if all bits are zero.
unsafe impl Zeroed for Slab {}

impl Slab {
    pub fn used_objects(&self) -> u32 {
        self.used.get()
    }

    pub fn state(&self) -> SlabState {
        match self.state.get() {
            0 => SlabState::Open,
            1 => SlabState::Claimed,
            _ => SlabState::Lost,
        }
    }

    pub fn set_state(&self, state: SlabState) {
        let is_legal = matches!(
            (self.state(), state),
            (SlabState::Open, SlabState::Claimed) | (SlabState::Claimed, SlabState::Open | SlabState::Lost)
        );
        debug_assert!(is_legal, "only a claimed slab is opened or lost");
        self.state.set(state as u32);
    }

    /// Allocates up to `most` free objects of the slab, the lowest index first, and calls `on_allocated` with the index
    /// of each. Returns the number of objects. The slab has `capacity` objects.
    pub fn allocate(&self, capacity: u32, most: usize, mut on_allocated: impl FnMut(u32)) -> usize {
        let mut count = 0;
        for (at, word) in self.bits.iter().enumerate().take(capacity.div_ceil(64) as usize) {
            let left = capacity - at as u32 * 64;
            let all = if left >= 64 { u64::MAX } else { (1 << left) - 1 };
            let mut free = !word.get() & all;
            while free != 0 && count < most {
                on_allocated(at as u32 * 64 + free.trailing_zeros());
                free &= free - 1;
                count += 1;
            }
            word.set(word.get() & !all | all & !free);
            if count == most {
                break;
            }
        }
        debug_assert!(count <= most && self.used.get() + count as u32 <= capacity, "no object is allocated twice");
        self.used.add(count as u32);
        count
    }

    /// Frees the object that has index `object` in the slab.
    ///
    /// # Panics
    ///
    /// If the object is free already.
    pub fn free(&self, object: u32) {
        let word = &self.bits[object as usize / 64];
        let bit = 1 << (object % 64);
        assert!(word.get() & bit != 0, "object {object} of a slab is free already");
        word.set(word.get() & !bit);
        self.used.sub(1);
    }

    /// Frees those objects of the slab that are in a set.
    ///
    /// # Panics
    ///
    /// If one of the objects is free already.
    pub fn free_all(&self, objects: &ObjectSet) {
        for (word, freed) in self.bits.iter().zip(objects.0) {
            assert!(word.get() & freed == freed, "an object of a slab is free already");
            word.set(word.get() & !freed);
        }
        self.used.sub(objects.count());
    }

    /// Calls `found` with the index of each used object of the slab, beginning at object `from`, for at most `most`
    /// objects. Returns the number of calls.
    pub fn for_each_allocated(&self, from: u32, most: usize, found: impl FnMut(u32)) -> usize {
        let first = from as usize / 64;
        let mut objects = ObjectSet(std::array::from_fn(|at| if at < first { 0 } else { self.bits[at].get() }));
        if let Some(word) = objects.0.get_mut(first) {
            *word &= u64::MAX << (from % 64);
        }
        objects.iter().take(most).map(found).count()
    }
}

/// Level of use of a slab that has no memory, or was never divided into objects. Slabs are classified by the share of
/// their objects that is in use.
pub(crate) const BARE_LEVEL: usize = 0;
/// Level of use of a slab that is set up, and whose objects are all free.
pub(crate) const EMPTY_LEVEL: usize = 1;
/// The first of four levels for partial slabs: one level for each quarter of the objects in use.
pub(crate) const PARTIAL_LEVEL: usize = 2;
/// Number of levels for partial slabs: one for each quarter of the objects in use.
const QUARTER_LEVEL_COUNT: usize = 4;
/// Number of levels of a slab's use: bare, empty, and four partial levels.
pub(crate) const LEVEL_COUNT: usize = PARTIAL_LEVEL + QUARTER_LEVEL_COUNT;
/// Number of 64-bit words in the set of slabs at one level.
const SLAB_SET_WORDS: usize = 2;
const _: () = assert!(MAX_SLABS == u128::BITS as usize);

/// Returns the level of an open slab with `used` used objects; `None` if the slab is full.
pub(crate) fn level_of(used: u32, capacity: u32) -> Option<usize> {
    debug_assert!(used <= capacity);
    match used {
        0 => Some(EMPTY_LEVEL),
        used if used == capacity => None,
        used => Some(PARTIAL_LEVEL + used as usize * QUARTER_LEVEL_COUNT / capacity as usize),
    }
}

/// Index in [`Block::links`] of the links for the lists by use, which sort blocks by how many of their objects are in
/// use. Each block of a node is in one of these lists.
pub(crate) const BY_USE: usize = 0;
/// Index in [`Block::links`] of the links for the queues of blocks that the current block search has not visited yet.
pub(crate) const SEARCH_QUEUE: usize = 1;
/// Number of kinds of lists that a block can be in: lists by use, and search queues.
const LIST_KIND_COUNT: usize = SEARCH_QUEUE + 1;

/// Neighbours of a block in a list, as block numbers plus one (0: no neighbour), and the index of that list.
#[derive(Default)]
pub(crate) struct Links {
    pub next: LockedU32,
    pub previous: LockedU32,
    pub list: LockedU32,
}

/// Metadata of one block.
#[repr(C, align(64))]
#[derive(Default)]
pub(crate) struct Block {
    /// For each level of use, the set of the block's slabs at that level. Full, claimed and lost slabs are at no level.
    levels: [[LockedU64; SLAB_SET_WORDS]; LEVEL_COUNT],
    /// Neighbours of the block in its list of each kind.
    pub links: [Links; LIST_KIND_COUNT],
    /// Number of used objects in the block.
    pub used: LockedU32,
    /// Number of objects that can be allocated from the block's open slabs.
    pub free_objects: LockedU32,
    /// Number of the block's slabs that are claimed or lost.
    pub claimed: LockedU32,
    /// Number of the block's slabs that are set up, that is, divided into objects.
    pub slabs: LockedU32,
    /// 1 if the block is sparse: its memory is charged and freed slab by slab.
    pub is_sparse: LockedU32,
    /// 1 while the block is being emptied. No object is allocated from it then.
    pub is_emptying: LockedU32,
    /// The pass number ([`Criteria::block_pass`](crate::defrag::candidates::Criteria::block_pass)) under which the
    /// block was last tried, that is, defragmentation began to empty it.
    pub tried: LockedU32,
    /// 1 if an attempt to empty the block left objects in it.
    pub has_unmovable: LockedU32,
    /// Id of the last slab search (a search for slabs to empty) that found no further candidate in the block.
    pub exhausted_search: LockedU32,
    /// Id of the block search (a search for blocks to empty) in whose queue the block is; 0 if it is in no queue.
    pub queued_search: LockedU32,
}

// SAFETY: atomic words are valid if all bits are zero.
unsafe impl Zeroed for Block {}

/// A set of slabs of one block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SlabSet(u128);

impl SlabSet {
    pub fn add(&mut self, slab: u32) {
        self.0 |= 1 << slab;
    }

    pub fn iter(self) -> impl Iterator<Item = u32> {
        set_bits([self.0 as u64, (self.0 >> u64::BITS) as u64].into_iter()).map(|slab| slab as u32)
    }
}

impl Block {
    /// Returns the index of the list by use that the block is in.
    pub fn use_list(&self) -> usize {
        self.links[BY_USE].list.get() as usize
    }

    /// Adds a slab of the block to the set of slabs at a level of use.
    pub fn insert(&self, level: usize, slab: u32) {
        debug_assert!((0..LEVEL_COUNT).all(|other| self.mask_at_level(other) >> slab & 1 == 0), "a slab has one level");
        let word = &self.levels[level][slab as usize / 64];
        word.set(word.get() | 1 << (slab % 64));
    }

    /// Removes a slab of the block from the set of slabs at a level of use.
    pub fn remove(&self, level: usize, slab: u32) {
        let word = &self.levels[level][slab as usize / 64];
        debug_assert!(word.get() >> (slab % 64) & 1 == 1, "the slab has this level");
        word.set(word.get() & !(1 << (slab % 64)));
    }

    /// Returns the number of the block's first slab at a level of use.
    #[inline]
    pub fn first_at_level(&self, level: usize) -> Option<u32> {
        let slabs = self.mask_at_level(level);
        (slabs != 0).then(|| slabs.trailing_zeros())
    }

    /// Returns the set of the block's slabs at a level of use, with one bit for each slab.
    fn mask_at_level(&self, level: usize) -> u128 {
        let [low, high] = &self.levels[level];
        u128::from(low.get()) | u128::from(high.get()) << u64::BITS
    }

    pub fn slabs_at_level(&self, level: usize) -> impl Iterator<Item = u32> + use<> {
        SlabSet(self.mask_at_level(level)).iter()
    }

    /// Returns all slabs of the block that are set up. The block has `slabs` slabs.
    pub fn set_up_slabs(&self, slabs: u32) -> impl Iterator<Item = u32> + use<> {
        SlabSet(!self.mask_at_level(BARE_LEVEL) & u128::MAX >> (MAX_SLABS as u32 - slabs)).iter()
    }

    pub fn count_at_level(&self, level: usize) -> u32 {
        self.mask_at_level(level).count_ones()
    }

    /// Adds the first `slabs` slabs of the block to the set of bare slabs.
    pub fn mark_all_bare(&self, slabs: u32) {
        (0..slabs).for_each(|slab| self.insert(BARE_LEVEL, slab));
    }

    /// Removes all slabs of the block from the sets of all levels of use.
    pub fn clear_levels(&self) {
        self.levels.iter().flatten().for_each(|word| word.set(0));
    }

    /// Returns the fullest partial slab of the block. If no slab is partial and `may_be_empty` is true, returns an
    /// empty slab.
    pub fn fullest_slab(&self, may_be_empty: bool) -> Option<u32> {
        let least = if may_be_empty { EMPTY_LEVEL } else { PARTIAL_LEVEL };
        (least..LEVEL_COUNT).rev().find_map(|level| self.first_at_level(level))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zeroed_slab() -> Slab {
        // SAFETY: zero bits are a valid slab.
        unsafe { std::mem::zeroed() }
    }

    /// Allocates objects of a slab until the slab is full. Each object must be allocated once, and none beyond the
    /// capacity. An object that is then freed must be allocated again.
    #[test]
    fn each_object_is_allocated_once() {
        for capacity in [1, 63, 64, 65, 341, 512] {
            let slab = zeroed_slab();
            let mut taken = Vec::new();
            while slab.allocate(capacity, 7, |object| taken.push(object)) == 7 {}
            assert_eq!(taken, (0..capacity).collect::<Vec<_>>());
            assert_eq!((slab.used_objects(), level_of(slab.used_objects(), capacity)), (capacity, None));
            slab.free(capacity - 1);
            assert_eq!(slab.for_each_allocated(capacity - 1, 1, |_| ()), 0);
            assert_eq!(slab.allocate(capacity, 9, |object| assert_eq!(object, capacity - 1)), 1);
        }
    }

    /// Allocates 300 objects and frees two thirds of them in one call. From any start, `for_each_allocated` must visit
    /// exactly the objects that were not freed.
    #[test]
    fn for_each_allocated_skips_freed_objects() {
        let slab = zeroed_slab();
        slab.allocate(512, 300, |_| ());
        let mut freed = ObjectSet::default();
        (0..300).filter(|object| object % 3 != 0).for_each(|object| freed.add(object));
        assert_eq!(freed.iter().collect::<Vec<_>>(), (0..300).filter(|object| object % 3 != 0).collect::<Vec<_>>());
        slab.free_all(&freed);
        assert_eq!(slab.used_objects(), 100);
        for (from, most) in [(0, 200), (1, 7), (64, 30), (127, 200), (299, 1), (512, 1)] {
            let mut found = Vec::new();
            let count = slab.for_each_allocated(from, most, |object| found.push(object));
            let expected: Vec<u32> = (from..300).filter(|object| object % 3 == 0).take(most).collect();
            assert_eq!((count, found), (expected.len(), expected));
        }
    }

    #[test]
    #[should_panic(expected = "free already")]
    fn double_free_panics() {
        let slab = zeroed_slab();
        slab.allocate(64, 1, |_| ());
        slab.free(0);
        slab.free(0);
    }

    /// The level of a slab must rise with each further quarter of its objects in use. A full slab must have no level.
    #[test]
    fn partial_levels_are_quarters_of_use() {
        assert_eq!(level_of(0, 8), Some(EMPTY_LEVEL));
        let levels: Vec<_> = (1..8).map(|used| level_of(used, 8).unwrap()).collect();
        assert_eq!(levels, [2, 3, 3, 4, 4, 5, 5]);
        assert_eq!(level_of(8, 8), None);
    }

    /// `fullest_slab` must return the fullest partial slab, and an empty slab only if allowed.
    #[test]
    fn fullest_slab_is_chosen_first() {
        let block = Block::default();
        block.insert(EMPTY_LEVEL, 3);
        assert_eq!((block.fullest_slab(false), block.fullest_slab(true)), (None, Some(3)));
        block.insert(PARTIAL_LEVEL, 100);
        block.insert(LEVEL_COUNT - 1, 70);
        assert_eq!((block.fullest_slab(false), block.count_at_level(LEVEL_COUNT - 1)), (Some(70), 1));
        block.remove(LEVEL_COUNT - 1, 70);
        assert_eq!(block.fullest_slab(true), Some(100));
    }
}
