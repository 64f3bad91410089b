//! Ghosts: small records of recently evicted folios, in a hash table of fixed size.
//!
//! ```text
//!   key of a folio --hash--> set of 16 ghosts, one cache line      ghost: 15 bits of hash, part, 16 bits of time
//! ```
//!
//! Time is counted in pages evicted: each part (new, main) has a clock that counts the pages evicted from it. A ghost
//! expires after as many pages as the cache has. A set then holds twelve ghosts of the new part on average, so that few
//! ghosts are replaced early. Lookups take no lock: a lookup concurrent with a change finds a ghost completely or not
//! at all. One lookup in two thousand finds the ghost of another folio with the same hash, and then a page enters a
//! better queue than it should.

use super::{CachePart, GhostKey};
use pagemill_core::arena::Table;
use pagemill_core::error::Result;
use pagemill_core::sync::{AtomicU32, AtomicU64, Padded, Relaxed};
use pagemill_sys::mem;

/// Maximum number of ghosts in a set, which fills a cache line.
const WAYS: usize = 16;

/// Average number of ghosts per set when the table is full of ghosts that have not expired.
const TARGET_GHOSTS_PER_SET: u64 = 12;

/// Lifetime of a ghost in ticks, or up to twice as many, because the length of a tick is rounded down. A clock of 16
/// bits wraps around after 64 lifetimes, and no ghost stays in the table that long.
const LIFETIME_TICKS: u64 = 512;

/// Number of clock values that a ghost can store: 1 to this number. So no ghost is zero.
const CLOCK_VALUE_COUNT: u64 = u16::MAX as u64;

/// Bit of a ghost: set if its folio was evicted from the main part.
const MAIN_PART_BIT: u32 = 1 << 16;
/// Position of the hash in a ghost.
const HASH_SHIFT: u32 = 17;
/// Mask of the hash bits that a ghost stores.
const HASH_MASK: u32 = u32::MAX >> HASH_SHIFT;

/// Rank of an empty entry when a place for a ghost is chosen: higher than the age of any ghost.
const EMPTY_RANK: u32 = u32::MAX - 1;
/// Rank of an older ghost of the same folio when a place for a ghost is chosen. This ghost is replaced in any case.
const SAME_FOLIO_RANK: u32 = u32::MAX;

/// Multiplier of [`Ghosts::salt`]: an odd number, so that successive salts differ in the hash bits.
const SALT_MULTIPLIER: u32 = 0x9e37;

/// The ghosts of a cache.
pub(super) struct Ghosts {
    /// The ghosts of all sets; 0 for an empty entry.
    ghosts: Table<AtomicU32>,
    /// Number of sets in use.
    sets: AtomicU64,
    /// Lifetime of a ghost, in evicted pages.
    lifetime_pages: AtomicU64,
    /// Log2 of the number of evicted pages that a tick counts.
    tick_shift: AtomicU32,
    /// Number of caches that have used the table so far. The number changes the hash, which invalidates the ghosts of
    /// earlier caches.
    salt: AtomicU32,
    /// Number of pages evicted so far from each [`CachePart`].
    evicted_pages: [Padded<AtomicU64>; 2],
}

impl Ghosts {
    /// Creates a table of ghosts for a cache of up to `most_pages`. Reserves addresses, and commits no memory.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::System`] if the address space is exhausted.
    pub fn new(most_pages: u64) -> Result<Self> {
        Ok(Self {
            ghosts: Table::new(WAYS * sets_for(most_pages) as usize)?,
            sets: AtomicU64::new(0),
            lifetime_pages: AtomicU64::new(0),
            tick_shift: AtomicU32::new(0),
            salt: AtomicU32::new(0),
            evicted_pages: Default::default(),
        })
    }

    /// Starts the table of ghosts for a cache of up to `pages` pages, and invalidates the ghosts of earlier caches. If
    /// the system cannot commit the memory, the table stays empty.
    pub fn open(&self, pages: u64) {
        let sets = sets_for(pages);
        let is_open = self.ghosts.open(0, 0, WAYS * sets as usize).is_ok();
        let shift = (pages / LIFETIME_TICKS).checked_ilog2().unwrap_or(0);
        self.tick_shift.store(shift, Relaxed);
        self.lifetime_pages.store(pages, Relaxed);
        self.salt.fetch_add(1, Relaxed);
        self.sets.store(if is_open { sets } else { 0 }, Relaxed);
    }

    /// Returns the resident bytes of the table of ghosts.
    pub fn resident_bytes(&self) -> u64 {
        self.ghosts.resident_bytes(0, WAYS * self.sets.load(Relaxed) as usize)
    }

    /// Prefetches into the CPU cache the set of a key's ghost.
    pub fn prefetch_set(&self, key: GhostKey) {
        if let Some(set) = self.set(key) {
            mem::prefetch(set.as_ptr() as usize);
        }
    }

    /// Stores a ghost for a folio of `pages` pages that was evicted from `part`.
    pub fn note(&self, key: GhostKey, part: CachePart, pages: u64) {
        let Some(set) = self.set(key) else { return };
        let (hash, now) = (self.hash(key), self.now());
        self.evicted_pages[part as usize].0.fetch_add(pages, Relaxed);
        // Replaces the ghost of the same folio, else an empty entry, else the oldest ghost.
        let rank = |ghost: u32| match ghost {
            0 => EMPTY_RANK,
            ghost if ghost >> HASH_SHIFT == hash => SAME_FOLIO_RANK,
            ghost => age(ghost, now),
        };
        // With the entry's index in the lowest bits, the choice is a maximum of integers, without a branch.
        let ranks = set.iter().zip(0..).map(|(ghost, at)| u64::from(rank(ghost.load(Relaxed))) * WAYS as u64 + at);
        let found = ranks.fold(0, u64::max) as usize % WAYS;
        let part_bit = if part == CachePart::Main { MAIN_PART_BIT } else { 0 };
        set[found].store(hash << HASH_SHIFT | part_bit | now[part as usize], Relaxed);
    }

    /// Returns the part that a folio was evicted from, and the number of pages evicted from that part since. Returns
    /// `None` if the folio has no ghost, or an expired one.
    pub fn recall(&self, key: GhostKey) -> Option<(CachePart, u64)> {
        let (set, hash) = (self.set(key)?, self.hash(key));
        // Fast path: most lookups find no ghost.
        let is_of_key = |ghost: u32| ghost != 0 && ghost >> HASH_SHIFT == hash;
        if !set.iter().fold(false, |any, ghost| any | is_of_key(ghost.load(Relaxed))) {
            return None;
        }
        let now = self.now();
        let ghosts = set.iter().map(|ghost| ghost.load(Relaxed)).filter(|ghost| is_of_key(*ghost));
        let (ticks, ghost) = ghosts.map(|ghost| (age(ghost, now), ghost)).min()?;
        let part = if ghost & MAIN_PART_BIT == 0 { CachePart::New } else { CachePart::Main };
        let age = u64::from(ticks) << self.tick_shift.load(Relaxed);
        (age <= self.lifetime_pages.load(Relaxed)).then_some((part, age))
    }

    /// Returns the current clock values of both parts.
    fn now(&self) -> [u32; 2] {
        let shift = self.tick_shift.load(Relaxed);
        [0, 1].map(|part: usize| ((self.evicted_pages[part].0.load(Relaxed) >> shift) % CLOCK_VALUE_COUNT) as u32 + 1)
    }

    /// Returns the bits of a key's hash that a ghost stores.
    fn hash(&self, key: GhostKey) -> u32 {
        (key.ghost_bits() ^ self.salt.load(Relaxed).wrapping_mul(SALT_MULTIPLIER)) & HASH_MASK
    }

    /// Returns the set in which a key's ghost is stored.
    fn set(&self, key: GhostKey) -> Option<&[AtomicU32; WAYS]> {
        let sets = self.sets.load(Relaxed);
        debug_assert!(sets == 0 || key.set_of(sets) < sets);
        (sets > 0).then(|| self.ghosts.row(key.set_of(sets) as usize * WAYS))
    }
}

/// Returns the age of a ghost in ticks. `now` has the current clock values of both parts.
fn age(ghost: u32, now: [u32; 2]) -> u32 {
    let now = if ghost & MAIN_PART_BIT == 0 { now[0] } else { now[1] };
    debug_assert!(ghost & u32::from(u16::MAX) != 0 && u64::from(now) <= CLOCK_VALUE_COUNT, "clock values start at 1");
    let ticks = now.wrapping_sub(ghost & u32::from(u16::MAX));
    // Corrects the difference if the clock has wrapped around.
    ticks.min(ticks.wrapping_add(CLOCK_VALUE_COUNT as u32))
}

/// Returns the number of sets of ghosts for a cache of `pages` pages.
fn sets_for(pages: u64) -> u64 {
    pages.div_ceil(TARGET_GHOSTS_PER_SET).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ghosts_for(pages: u64) -> Ghosts {
        let ghosts = Ghosts::new(pages).unwrap();
        ghosts.open(pages);
        ghosts
    }

    /// Three times as many pages as the cache has are evicted. The ghosts of nearly all pages of the last third must be
    /// found, with their part and age. Ghosts of older evictions, and of pages that were never evicted, must not be
    /// found.
    #[test]
    fn the_latest_evictions_are_found() {
        const PAGES: u64 = 10_000;
        let ghosts = ghosts_for(PAGES);
        let key = |page| GhostKey::of(7, page, 0);
        (0..3 * PAGES).for_each(|page| ghosts.note(key(page), CachePart::New, 1));
        let known = |pages: std::ops::Range<u64>| pages.filter(|page| ghosts.recall(key(*page)).is_some()).count();
        let (latest, older) = (known(2 * PAGES + 50..3 * PAGES), known(0..2 * PAGES - 50));
        assert!(latest > PAGES as usize * 93 / 100 && older < 30, "{latest} {older}");
        assert!(known(5 * PAGES..6 * PAGES) < 30, "pages that were never evicted");
        for page in (2 * PAGES + 50..3 * PAGES).step_by(97) {
            if let Some((part, age)) = ghosts.recall(key(page)) {
                assert!(part == CachePart::New && age.abs_diff(3 * PAGES - page) <= 32, "{page} {age}");
            }
        }
    }

    /// The clock of one part must not advance with the clock of the other part. A second eviction of a folio must
    /// replace its ghost. A huge folio must advance the clock by all of its pages.
    #[test]
    fn each_part_has_its_own_clock() {
        let ghosts = ghosts_for(100);
        let (key, other, huge) = (GhostKey::of(1, 5, 0), GhostKey::of(2, 5, 0), GhostKey::of(1, 0, 9));
        ghosts.note(key, CachePart::Main, 1);
        ghosts.note(other, CachePart::New, 1);
        ghosts.note(huge, CachePart::New, 60);
        assert_eq!(ghosts.recall(key), Some((CachePart::Main, 1)));
        assert_eq!(ghosts.recall(other), Some((CachePart::New, 61)));
        ghosts.note(key, CachePart::New, 1);
        assert_eq!(ghosts.recall(key), Some((CachePart::New, 1)));
        assert_eq!(ghosts.recall(GhostKey::of(1, 0, 0)), None, "a page is not the huge folio that began there");
        ghosts.open(100);
        assert_eq!(ghosts.recall(key), None, "the ghost of an earlier cache");
    }

    fn key(index: u64) -> GhostKey {
        GhostKey::of(3, index, 0)
    }

    /// A set has room for 16 ghosts. A new ghost must replace the old ghost of the same folio, or else an empty entry,
    /// or else the oldest ghost.
    #[test]
    fn the_oldest_ghost_is_replaced() {
        let ghosts = ghosts_for(12);
        let known = |range: std::ops::Range<u64>| range.filter(|index| ghosts.recall(key(*index)).is_some()).count();
        (0..2).for_each(|_| ghosts.note(key(0), CachePart::Main, 0));
        ghosts.note(key(1), CachePart::New, 1);
        (2..16).for_each(|index| ghosts.note(key(index), CachePart::New, 0));
        assert_eq!(known(0..16), 16);
        ghosts.note(key(0), CachePart::Main, 1);
        ghosts.note(key(1), CachePart::New, 2);
        (0..5).for_each(|_| ghosts.note(key(3), CachePart::New, 0));
        assert_eq!((known(0..16), known(16..100)), (16, 0));
        assert_eq!(
            (ghosts.recall(key(1)), ghosts.recall(key(2))),
            (Some((CachePart::New, 2)), Some((CachePart::New, 2)))
        );
        // The other ghosts of the new part are two pages old, the ghost of main is one page old, so ghosts of the new
        // part are replaced.
        (16..29).for_each(|index| ghosts.note(key(index), CachePart::New, 0));
        assert_eq!((known(0..1), known(3..4), known(16..29)), (1, 1, 13));
        assert_eq!(ghosts.recall(key(0)), Some((CachePart::Main, 1)));
    }

    /// A ghost must last for as many evicted pages as the cache has. Large caches must count in ticks of several pages.
    #[test]
    fn a_ghost_lasts_for_as_many_evictions_as_the_cache_has_pages() {
        let small = ghosts_for(100);
        small.note(key(1), CachePart::New, 1);
        small.note(key(2), CachePart::New, 99);
        assert_eq!(small.recall(key(1)), Some((CachePart::New, 100)));
        small.note(key(3), CachePart::New, 1);
        assert_eq!((small.recall(key(1)), small.recall(key(2))), (None, Some((CachePart::New, 100))));
        for (pages, tick) in [(1023, 1), (1024, 2), (2047, 2), (2048, 4)] {
            let large = ghosts_for(pages);
            large.note(key(1), CachePart::Main, 1);
            large.note(key(2), CachePart::Main, 10);
            assert_eq!(large.recall(key(1)), Some((CachePart::Main, 11 / tick * tick)), "{pages}");
        }
    }

    /// The ages of ghosts must be correct when the clock of evictions wraps around, after 65,535 ticks.
    #[test]
    fn ages_are_correct_when_the_clock_wraps() {
        for start in [0, 65_434, 65_435, 65_485, 65_534, 65_535, 65_536, 131_069, 131_070] {
            let ghosts = ghosts_for(200);
            ghosts.note(key(7), CachePart::New, start);
            ghosts.note(key(start), CachePart::New, 1);
            ghosts.note(key(8), CachePart::New, 100);
            assert_eq!(ghosts.recall(key(start)), Some((CachePart::New, 101)), "{start}");
        }
    }

    /// A ghost must not be taken for an empty entry, even if all bits of its hash are zero and the clock has just
    /// started.
    #[test]
    fn no_ghost_is_zero() {
        let ghosts = ghosts_for(100);
        let zero = (0..).map(key).find(|key| ghosts.hash(*key) == 0).unwrap();
        ghosts.note(zero, CachePart::New, 1);
        assert_eq!(ghosts.recall(zero), Some((CachePart::New, 1)));
    }

    /// The resident memory of the table must match the size of the cache that uses the table, not the table's maximum
    /// size.
    #[test]
    fn resident_memory_matches_the_size_of_the_cache() {
        let ghosts = Ghosts::new(1 << 20).unwrap();
        assert_eq!((ghosts.recall(key(1)), ghosts.resident_bytes()), (None, 0));
        ghosts.note(key(1), CachePart::New, 1);
        ghosts.open(1 << 20);
        assert_eq!(ghosts.recall(key(1)), None);
        (0..1 << 16).for_each(|index| ghosts.note(key(index), CachePart::New, 1));
        let most = (1_u64 << 20).div_ceil(TARGET_GHOSTS_PER_SET) * 64;
        let resident = ghosts.resident_bytes();
        assert!(resident > most / 2 && resident <= most + (2 << 20), "{resident} of {most}");
    }
}
