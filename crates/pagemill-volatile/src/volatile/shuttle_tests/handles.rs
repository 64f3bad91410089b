//! Shuttle tests of ranges with a handle.

use super::super::range::{Behaviour, Contents, Pin, VolatileBuf};
use super::super::word::RangePhase;
use super::super::{PACK_CLASSES, Ranges, SHARDS};
use super::*;
use pagemill_core::sync::Relaxed;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

/// Lengths of ranges: two that are in packs, and one that has a slot of the heap.
const RANGE_LENS: [usize; 3] = [BLOCK_BYTES / 4, BLOCK_BYTES / 2, BLOCK_BYTES / 2 + 4 * PIECE_BYTES];

fn random_behaviour() -> Behaviour {
    match random_below(3) {
        0 => Behaviour::Partial { chunk_bytes: PIECE_BYTES },
        1 => Behaviour::Partial { chunk_bytes: 5 * PIECE_BYTES },
        _ => Behaviour::Full,
    }
}

fn fill(range: &mut VolatileBuf, byte: u8) {
    range.bytes_mut().unwrap().iter_mut().step_by(PIECE_BYTES).for_each(|place| *place = byte);
}

fn assert_all(bytes: &[u8], byte: u8, why: &str) {
    assert!(bytes.iter().step_by(PIECE_BYTES).all(|found| *found == byte), "{why}");
}

/// A range that one thread uses, with its expected contents and state.
struct UserRange {
    range: VolatileBuf,
    byte: u8,
    is_marked: bool,
}

impl UserRange {
    fn new(fixture: &Fixture, byte: u8) -> Self {
        let mut range =
            fixture.ranges.allocate(RANGE_LENS[random_below(RANGE_LENS.len())], random_behaviour()).unwrap();
        fill(&mut range, byte);
        Self { range, byte, is_marked: false }
    }

    fn random_step(&mut self, fixture: &Fixture) {
        match random_below(6) {
            0 | 1 if self.is_marked => self.unmark_checked(),
            0 | 1 => {
                self.check_held();
                self.range.mark().unwrap();
                self.is_marked = true;
            }
            2 => self.check_pinned(),
            3 => assert_eq!(self.range.refresh().is_ok(), self.is_marked),
            4 => *self = Self::new(fixture, self.byte ^ 0x80),
            _ => yield_randomly(),
        }
    }

    fn check_held(&mut self) {
        assert_all(self.range.bytes_mut().unwrap(), self.byte, "a held range changed");
    }

    /// Unmarks the range. The result of `unmark` must say which bytes were kept. The bytes must not change afterwards.
    fn unmark_checked(&mut self) {
        let contents = self.range.unmark().unwrap();
        self.is_marked = false;
        let byte = self.byte;
        if let Contents::Purged { kept_bytes } = contents {
            let bytes = self.range.bytes_mut().unwrap();
            assert_all(&bytes[..kept_bytes], byte, "what was kept is damaged");
            assert!(bytes[kept_bytes..].iter().step_by(PIECE_BYTES).all(|found| [0, byte].contains(found)));
            self.byte ^= 1;
            fill(&mut self.range, self.byte);
        }
        self.check_held();
        yield_randomly();
        self.check_held();
    }

    /// Pins the range. Its bytes must not change while it is pinned.
    fn check_pinned(&self) {
        let pin = self.range.pin().unwrap();
        let is_whole = pin.contents() == Contents::Kept;
        assert!(is_whole || self.is_marked, "a held range was purged");
        assert_eq!(pin.len() == self.range.len_bytes(), is_whole);
        assert_all(&pin, self.byte, "a pin shows what is not there");
        yield_randomly();
        assert_all(&pin, self.byte, "a pinned range changed");
    }
}

/// Purges all memory of `ranges` after all ranges were dropped. Asserts that every entry is free, and that it is in a
/// free list or was never used.
fn assert_all_free(ranges: &Ranges) {
    skip_ticks(5);
    ranges.shrink(u64::MAX, Urgency::Limit);
    assert_eq!(ranges.shrink(u64::MAX, Urgency::Limit), 0, "nothing is left to purge");
    assert_eq!((ranges.giveable_bytes(), ranges.purger.total_bytes.load(Relaxed)), (0, 0));
    let count = ranges.count.load(Relaxed);
    for number in 0..count {
        let seen = ranges.entry(number).word.load();
        assert_eq!((seen.phase(), seen.pins(), seen.is_claimable(0)), (RangePhase::Free, 0, false));
    }
    // Each entry must be in one free list, or be in the unused part of a shard's run.
    let mut found = vec![false; count as usize];
    let mut find =
        |number: u32| assert!(!std::mem::replace(&mut found[number as usize], true), "an entry is free twice");
    for shard in 0..SHARDS {
        let [next, end] = ranges.runs[shard].each_ref().map(|place| place.load(Relaxed));
        (next..end).for_each(&mut find);
        for class in 0..=PACK_CLASSES {
            let mut link = ranges.free[shard][class].load(Relaxed);
            while let Some(number) = link.checked_sub(1) {
                find(number);
                link = ranges.entry(number).next.load(Relaxed);
            }
        }
    }
    // If a run had too few entries left for a request, these entries are never used and have no address.
    let lost = (0..count).filter(|number| !found[*number as usize]);
    assert_eq!(lost.map(|number| ranges.entry(number).addr.load(Relaxed)).max().unwrap_or(0), 0, "an entry is lost");
}

/// Two threads mark, unmark, pin, drop and allocate ranges of their own while purges run. Ranges are dropped in any
/// state, and other threads reuse their memory. No byte of a held or pinned range may change, and each result of
/// `unmark` must match the bytes.
#[test]
fn users_race_purges() {
    run_in_many_schedules(|fixture| {
        let user = |byte: u8| {
            Box::new(move || {
                let mut owned: Vec<UserRange> =
                    (0..2).map(|index| UserRange::new(&fixture, byte + 2 * index)).collect();
                owned[0].range.mark().unwrap();
                owned[0].is_marked = true;
                (0..8).for_each(|_| owned[random_below(2)].random_step(&fixture));
                owned.iter_mut().filter(|owned| owned.is_marked).for_each(UserRange::unmark_checked);
            }) as Box<dyn FnOnce() + Send>
        };
        let others = move || (0..3).for_each(|_| fixture.purge_once());
        run_concurrently([user(0x10), user(0x20), Box::new(move || purge(fixture.ranges, 4)), Box::new(others)]);
        assert_all_free(fixture.ranges);
    });
}

/// A range that several threads use, with the smallest result of its `unmark` so far.
struct SharedRange {
    range: VolatileBuf,
    /// The smallest `kept_bytes` that `unmark` has reported to any thread.
    least_kept: AtomicUsize,
}

impl SharedRange {
    fn pieces(pin: &Pin<'_>) -> Vec<u8> {
        pin.iter().step_by(PIECE_BYTES).copied().collect()
    }

    fn unmark(&self) {
        // This fails if another thread has unmarked the range before.
        if let Ok(Contents::Purged { kept_bytes }) = self.range.unmark() {
            self.least_kept.fetch_min(kept_bytes, Relaxed);
        }
    }

    /// Performs a random operation. `kinds` is the number of kinds of operations to choose from.
    fn random_step(&self, kinds: usize) {
        match random_below(kinds) {
            0 => drop(self.range.mark()),
            1 => self.unmark(),
            2 => drop(self.range.refresh()),
            _ => {
                let pin = self.range.pin().unwrap();
                let before = Self::pieces(&pin);
                yield_randomly();
                assert_eq!(Self::pieces(&pin), before, "a pinned range changed");
            }
        }
    }
}

/// Several threads mark, unmark, refresh and pin one range while purges run. No byte may change while the range is
/// pinned, and no byte below the smallest reported `kept_bytes` may be lost.
#[test]
fn threads_that_share_a_range_race_purges() {
    run_in_many_schedules(|fixture| {
        let mut range =
            fixture.ranges.allocate(RANGE_LENS[random_below(RANGE_LENS.len())], random_behaviour()).unwrap();
        fill(&mut range, 7);
        let least_kept = AtomicUsize::new(range.len_bytes());
        let shared = Arc::new(SharedRange { range, least_kept });
        // With only the first two kinds, threads mark and unmark most of the time.
        let kinds = [2, 5][random_below(2)];
        let user = || {
            let shared = shared.clone();
            Box::new(move || (0..6).for_each(|_| shared.random_step(kinds))) as Box<dyn FnOnce() + Send>
        };
        run_concurrently([user(), user(), user(), Box::new(move || purge(fixture.ranges, 5))]);
        let words = (0..fixture.ranges.count.load(Relaxed)).map(|number| fixture.ranges.entry(number).word.load());
        assert_eq!(words.map(|seen| u32::from(seen.pins())).sum::<u32>(), 0, "all pins have ended");
        shared.unmark();
        let kept = shared.least_kept.load(Relaxed);
        assert_all(&shared.range.pin().unwrap()[..kept], 7, "bytes went without a report");
        drop(shared);
        assert_all_free(fixture.ranges);
    });
}

/// Drops a marked range while purges run. Other threads allocate its slot from the heap, and its entry is used for a
/// new range. The mark of the dropped range must not cause a purge of the new owners' bytes.
#[test]
fn purges_spare_next_owner() {
    run_in_many_schedules(|fixture| {
        let new = move || {
            let mut range = fixture.ranges.allocate(RANGE_LENS[2], Behaviour::Full).unwrap();
            fill(&mut range, 7);
            range
        };
        let own_slot = move || {
            let slot = fixture.heap.allocate_stable_blocks(RANGE_LENS[2]).unwrap().as_ptr() as usize;
            set_byte(slot, 9);
            slot
        };
        let before = new();
        before.mark().unwrap();
        let user = move || {
            drop(before);
            let slot = own_slot();
            let after = new();
            after.mark().unwrap();
            yield_randomly();
            assert_eq!(byte_at(slot), 9, "the next owner's bytes went");
            let is_kept = after.unmark().unwrap() == Contents::Kept;
            assert!(!is_kept || byte_at(after.addr()) == 7);
        };
        // Allocates slots that the heap has at this time, perhaps that of the dropped range.
        let other = move || {
            for slot in [own_slot(), own_slot()] {
                yield_randomly();
                assert_eq!(byte_at(slot), 9, "the next owner's bytes went");
            }
        };
        run_concurrently([Box::new(user), Box::new(other), Box::new(move || purge(fixture.ranges, 3))]);
        assert_all_free(fixture.ranges);
    });
}

/// Unmarks a range while it is purged. In some schedules the purge must end early, so that a part of the range is kept
/// although its behaviour is `Full`.
#[test]
fn awaited_purges_end_early() {
    static KEPT_PARTS: AtomicUsize = AtomicUsize::new(0);
    run_in_many_schedules(|fixture| {
        let mut range = fixture.ranges.allocate(RANGE_LENS[2], Behaviour::Full).unwrap();
        fill(&mut range, 7);
        range.mark().unwrap();
        let user = move || match range.unmark().unwrap() {
            Contents::Purged { kept_bytes } => {
                KEPT_PARTS.fetch_add(usize::from(kept_bytes > 0), Relaxed);
                assert_all(&range.bytes_mut().unwrap()[..kept_bytes], 7, "what was kept is damaged");
            }
            Contents::Kept => assert_all(range.bytes_mut().unwrap(), 7, "what was kept is damaged"),
        };
        run_concurrently([Box::new(user), Box::new(move || purge(fixture.ranges, 1))]);
        assert_all_free(fixture.ranges);
    });
    assert!(KEPT_PARTS.load(Relaxed) > 0, "no purge ended early");
}

/// Refreshes a range, or unmarks and marks it again, while a purge runs. This range must be purged after the other
/// ranges, although the purge queue was filled before.
#[test]
fn recently_used_range_is_purged_last() {
    run_in_many_schedules(|fixture| {
        let ranges: Vec<VolatileBuf> = (0..4)
            .map(|_| {
                let mut range = fixture.ranges.allocate(RANGE_LENS[0], Behaviour::Full).unwrap();
                fill(&mut range, 7);
                range
            })
            .collect();
        // The ranges are marked after all were allocated, because an allocation may purge.
        for range in &ranges {
            range.mark().unwrap();
            skip_ticks(2);
        }
        let (ranges, used) = (Arc::new(ranges), random_below(3));
        let user = {
            let ranges = ranges.clone();
            move || {
                skip_ticks(2);
                if random_below(2) == 0 {
                    ranges[used].refresh().unwrap();
                } else if ranges[used].unmark().unwrap() == Contents::Kept {
                    ranges[used].mark().unwrap();
                }
            }
        };
        let purge_one = move || assert!(fixture.ranges.shrink(1, Urgency::Limit) > 0);
        run_concurrently([Box::new(user), Box::new(purge_one)]);
        // Until these ticks have passed, a range that a thread waited for cannot be purged.
        skip_ticks(4);
        let is_kept = |range: &VolatileBuf| range.is_volatile() && range.pin().unwrap().contents() == Contents::Kept;
        let mut kept: Vec<bool> = ranges.iter().map(is_kept).collect();
        while let Some(oldest) = (0..4).filter(|index| kept[*index]).min_by_key(|index| (*index == used, *index)) {
            assert!(fixture.ranges.shrink(1, Urgency::Limit) > 0);
            kept[oldest] = false;
            assert!(ranges.iter().map(is_kept).eq(kept.iter().copied()), "another went than {oldest}; used: {used}");
        }
        drop(ranges);
        assert_all_free(fixture.ranges);
    });
}
