//! Slab metadata, out of line: for each slab a line of bits and a line of words, for each block the set of slabs at each
//! level of use.
//!
//! All of it is changed under the lock of the node that has the block ([`super::node`]). The words are atomic only so
//! that they can lie in shared tables.
#![allow(unsafe_code)] // zero bits are valid metadata

use super::shape::{MAX_OBJECTS, MAX_SLABS};
use pagemill_core::arena::Zeroed;
use pagemill_core::sync::Relaxed;

macro_rules! held {
    ($name:ident, $atomic:ident, $integer:ty) => {
        /// A word that a lock protects.
        #[derive(Default)]
        #[repr(transparent)]
        pub(super) struct $name(std::sync::atomic::$atomic);

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

held!(Held32, AtomicU32, u32);
held!(Held64, AtomicU64, u64);

impl Held32 {
    pub fn add(&self, more: u32) {
        self.set(self.get() + more);
    }

    pub fn sub(&self, less: u32) {
        self.set(self.get() - less);
    }
}

const WORDS: usize = MAX_OBJECTS / u64::BITS as usize;

/// A set of objects of one slab.
#[derive(Clone, Copy, Default)]
pub(super) struct Objects([u64; WORDS]);

impl Objects {
    pub fn add(&mut self, object: u32) {
        self.0[object as usize / 64] |= 1 << (object % 64);
    }

    pub fn count(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    pub fn iter(&self) -> impl Iterator<Item = u32> + use<> {
        let (mut words, mut at) = (self.0, 0);
        std::iter::from_fn(move || {
            at += words[at..].iter().position(|word| *word != 0)?;
            let object = at as u32 * 64 + words[at].trailing_zeros();
            words[at] &= words[at] - 1;
            Some(object)
        })
    }
}

/// State of a slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum SlabState {
    /// Objects are taken from it and returned to it.
    Open,
    /// Owned by one thread that sets it up, empties it or frees its memory. Objects can still be returned to it.
    Claimed,
    /// Unusable, because a callback panicked: no object is taken from it again.
    Lost,
}

/// Metadata of one slab.
#[repr(C, align(128))]
pub(super) struct Slab {
    /// One bit for each object that is outside of the slab: allocated, or in a magazine or barn.
    bits: [Held64; WORDS],
    /// Number of set bits.
    used: Held32,
    state: Held32,
    /// The last pass that tried to empty it.
    pub tried: Held32,
}

// SAFETY: atomic words.
unsafe impl Zeroed for Slab {}

impl Slab {
    pub fn used(&self) -> u32 {
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
        self.state.set(state as u32);
    }

    /// Takes up to `most` of `capacity` objects, lowest first, and calls `taken` for each.
    pub fn take(&self, capacity: u32, most: usize, mut taken: impl FnMut(u32)) -> usize {
        let mut count = 0;
        for (at, word) in self.bits.iter().enumerate().take(capacity.div_ceil(64) as usize) {
            let left = capacity - at as u32 * 64;
            let all = if left >= 64 { u64::MAX } else { (1 << left) - 1 };
            let mut free = !word.get() & all;
            while free != 0 && count < most {
                taken(at as u32 * 64 + free.trailing_zeros());
                free &= free - 1;
                count += 1;
            }
            word.set(word.get() & !all | all & !free);
            if count == most {
                break;
            }
        }
        self.used.add(count as u32);
        count
    }

    /// Returns one object.
    ///
    /// # Panics
    ///
    /// If it is free already.
    pub fn give(&self, object: u32) {
        let word = &self.bits[object as usize / 64];
        let bit = 1 << (object % 64);
        assert!(word.get() & bit != 0, "object {object} of a slab is free already");
        word.set(word.get() & !bit);
        self.used.sub(1);
    }

    /// Returns several objects.
    ///
    /// # Panics
    ///
    /// If one of them is free already.
    pub fn give_all(&self, objects: &Objects) {
        for (word, given) in self.bits.iter().zip(objects.0) {
            assert!(word.get() & given == given, "an object of a slab is free already");
            word.set(word.get() & !given);
        }
        self.used.sub(objects.count());
    }

    /// Calls `found` for up to `most` objects outside of the slab, beginning at `from`.
    pub fn set_objects(&self, from: u32, most: usize, found: impl FnMut(u32)) -> usize {
        let first = from as usize / 64;
        let mut objects = Objects(std::array::from_fn(|at| if at < first { 0 } else { self.bits[at].get() }));
        if let Some(word) = objects.0.get_mut(first) {
            *word &= u64::MAX << (from % 64);
        }
        objects.iter().take(most).map(found).count()
    }
}

/// Level of use of a slab, or that it is not set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(super) enum Level {
    /// Not set up: it has no memory, or was never cut into objects.
    Bare,
    /// All objects are free.
    Empty,
    /// The first of four levels of partial slabs.
    Partial,
}

/// Levels of partial slabs: quarters.
const QUARTERS: usize = 4;
pub(super) const LEVELS: usize = Level::Partial as usize + QUARTERS;
const MASK_WORDS: usize = 2;
const _: () = assert!(MAX_SLABS == u128::BITS as usize);

/// The level of an open slab; `None` if it is full.
pub(super) fn level_of(used: u32, capacity: u32) -> Option<usize> {
    match used {
        0 => Some(Level::Empty as usize),
        used if used == capacity => None,
        used => Some(Level::Partial as usize + used as usize * QUARTERS / capacity as usize),
    }
}

/// Kinds of lists. Each block is in one `STANDING` list (by use), and in a `QUEUED` list while a search still has to
/// visit it.
pub(super) const STANDING: usize = 0;
pub(super) const QUEUED: usize = 1;
const LINKS: usize = QUEUED + 1;

/// Links of a block in a list, as block number plus one (0: none), and the index of that list.
#[derive(Default)]
pub(super) struct Links {
    pub next: Held32,
    pub before: Held32,
    pub list: Held32,
}

/// Metadata of one block.
#[repr(C, align(64))]
#[derive(Default)]
pub(super) struct Block {
    /// The set of slabs at each level. Full, claimed and lost slabs are at none.
    levels: [[Held64; MASK_WORDS]; LEVELS],
    /// Links for each kind of list.
    pub links: [Links; LINKS],
    /// Objects outside of its slabs.
    pub used: Held32,
    /// Objects that can be taken from its slabs.
    pub room: Held32,
    /// Number of slabs that are claimed or lost.
    pub claimed: Held32,
    /// Number of slabs that are set up.
    pub slabs: Held32,
    /// 1 if its memory is charged and returned slab by slab.
    pub is_sparse: Held32,
    /// 1 while it is being emptied: no object is taken from it.
    pub is_leaving: Held32,
    /// The last pass that tried to empty it.
    pub tried: Held32,
    /// 1 if an attempt to empty it left objects behind.
    pub has_refused: Held32,
    /// The last search for slabs that found no more candidate in it.
    pub spent: Held32,
    /// The search for blocks that has not visited it yet; 0 if none.
    pub queued: Held32,
}

// SAFETY: atomic words.
unsafe impl Zeroed for Block {}

/// A set of slabs of one block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SlabSet(u128);

impl SlabSet {
    pub fn add(&mut self, slab: u32) {
        self.0 |= 1 << slab;
    }

    pub fn iter(mut self) -> impl Iterator<Item = u32> {
        std::iter::from_fn(move || {
            let first = (self.0 != 0).then(|| self.0.trailing_zeros())?;
            self.0 &= self.0 - 1;
            Some(first)
        })
    }
}

impl Block {
    /// The list by use that it is in.
    pub fn bucket(&self) -> usize {
        self.links[STANDING].list.get() as usize
    }

    pub fn put(&self, level: usize, slab: u32) {
        let word = &self.levels[level][slab as usize / 64];
        word.set(word.get() | 1 << (slab % 64));
    }

    pub fn remove(&self, level: usize, slab: u32) {
        let word = &self.levels[level][slab as usize / 64];
        debug_assert!(word.get() >> (slab % 64) & 1 == 1);
        word.set(word.get() & !(1 << (slab % 64)));
    }

    /// The lowest slab at a level.
    #[inline]
    pub fn first_at(&self, level: usize) -> Option<u32> {
        let slabs = self.mask_at(level);
        (slabs != 0).then(|| slabs.trailing_zeros())
    }

    fn mask_at(&self, level: usize) -> u128 {
        let [low, high] = &self.levels[level];
        u128::from(low.get()) | u128::from(high.get()) << u64::BITS
    }

    /// All slabs at a level.
    pub fn all_at(&self, level: usize) -> impl Iterator<Item = u32> + use<> {
        SlabSet(self.mask_at(level)).iter()
    }

    /// All of the first `slabs` slabs that are set up.
    pub fn all_set_up(&self, slabs: u32) -> impl Iterator<Item = u32> + use<> {
        SlabSet(!self.mask_at(Level::Bare as usize) & u128::MAX >> (MAX_SLABS as u32 - slabs)).iter()
    }

    /// Number of slabs at a level.
    pub fn count_at(&self, level: usize) -> u32 {
        self.mask_at(level).count_ones()
    }

    /// Marks the first `slabs` slabs as bare.
    pub fn strip(&self, slabs: u32) {
        (0..slabs).for_each(|slab| self.put(Level::Bare as usize, slab));
    }

    /// Removes all slabs from all levels.
    pub fn clear(&self) {
        self.levels.iter().flatten().for_each(|word| word.set(0));
    }

    /// The fullest partial slab; if there is none and `may_be_empty`, an empty one.
    pub fn fullest(&self, may_be_empty: bool) -> Option<u32> {
        let least = if may_be_empty { Level::Empty } else { Level::Partial } as usize;
        (least..LEVELS).rev().find_map(|level| self.first_at(level))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slab() -> Slab {
        // SAFETY: zero bits are a value.
        unsafe { std::mem::zeroed() }
    }

    /// Each object of a slab is taken once, none beyond its capacity; returned ones are taken again.
    #[test]
    fn objects_come_once() {
        for capacity in [1, 63, 64, 65, 341, 512] {
            let slab = slab();
            let mut taken = Vec::new();
            while slab.take(capacity, 7, |object| taken.push(object)) == 7 {}
            assert_eq!(taken, (0..capacity).collect::<Vec<_>>());
            assert_eq!((slab.used(), level_of(slab.used(), capacity)), (capacity, None));
            slab.give(capacity - 1);
            assert_eq!(slab.set_objects(capacity - 1, 1, |_| ()), 0);
            assert_eq!(slab.take(capacity, 9, |object| assert_eq!(object, capacity - 1)), 1);
        }
    }

    /// The objects found from any position on are those taken and not returned, also after several are returned at once.
    #[test]
    fn objects_are_found_and_given_at_once() {
        let slab = slab();
        slab.take(512, 300, |_| ());
        let mut given = Objects::default();
        (0..300).filter(|object| object % 3 != 0).for_each(|object| given.add(object));
        assert_eq!(given.iter().collect::<Vec<_>>(), (0..300).filter(|object| object % 3 != 0).collect::<Vec<_>>());
        slab.give_all(&given);
        assert_eq!(slab.used(), 100);
        for (from, most) in [(0, 200), (1, 7), (64, 30), (127, 200), (299, 1), (512, 1)] {
            let mut found = Vec::new();
            let count = slab.set_objects(from, most, |object| found.push(object));
            let expected: Vec<u32> = (from..300).filter(|object| object % 3 == 0).take(most).collect();
            assert_eq!((count, found), (expected.len(), expected));
        }
    }

    #[test]
    #[should_panic(expected = "free already")]
    fn an_object_is_not_given_twice() {
        let slab = slab();
        slab.take(64, 1, |_| ());
        slab.give(0);
        slab.give(0);
    }

    /// Levels run from empty to nearly full; a full slab is at none.
    #[test]
    fn levels_are_quarters() {
        assert_eq!(level_of(0, 8), Some(Level::Empty as usize));
        let levels: Vec<_> = (1..8).map(|used| level_of(used, 8).unwrap()).collect();
        assert_eq!(levels, [2, 3, 3, 4, 4, 5, 5]);
        assert_eq!(level_of(8, 8), None);
    }

    /// The fullest slab comes first; an empty one only if allowed.
    #[test]
    fn the_fullest_comes_first() {
        let block = Block::default();
        block.put(Level::Empty as usize, 3);
        assert_eq!((block.fullest(false), block.fullest(true)), (None, Some(3)));
        block.put(Level::Partial as usize, 100);
        block.put(LEVELS - 1, 70);
        assert_eq!((block.fullest(false), block.count_at(LEVELS - 1)), (Some(70), 1));
        block.remove(LEVELS - 1, 70);
        assert_eq!(block.fullest(true), Some(100));
    }
}
