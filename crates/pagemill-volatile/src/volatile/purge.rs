//! Purges ranges, least recently marked first, in bounded steps.
//!
//! A walk over the entries selects some hundred of the oldest marks. They are purged in order, and the walk is repeated
//! when they are used up. A whole range is purged in its turn. Of a range with chunks the last chunk is purged and the
//! range counts as marked anew, so that other ranges come before its next chunk. Memory left in free ranges of packs
//! counts as oldest.
//!
//! The owner cannot access a claimed range. A thread that needs it sets a bit in the word, and the purge ends after its
//! current step: the rest is kept.
#![allow(unsafe_code)] // gives the memory of claimed ranges back

use super::line::{Line, Oldest};
use super::residents::Residents;
use super::word::{RangePhase, Seen, age};
use super::{OWN_SLOT, RangeEntry, Ranges, SMALLEST_BYTES, now};
use pagemill_core::reclaim::aging::LeastOver;
use pagemill_core::reclaim::governor::WORTHWHILE_BYTES;
use pagemill_core::reclaim::{Shrinker, Urgency};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{Acquire, AtomicU64, Lock, Relaxed};
use pagemill_core::trace::{self, Event};
use pagemill_core::units::BLOCK_BYTES;
use pagemill_sys::{clock, mem};
use std::time::Duration;

/// Bytes given back by one system call. It bounds the wait of another thread: some 40 us. Small under shuttle, so that
/// small ranges have several steps.
pub(super) const STEP_BYTES: usize = if cfg!(shuttle) { BLOCK_BYTES / 8 } else { 4 * BLOCK_BYTES };

/// Shortest pause between two walks that only measure, and the largest share of time that they take.
const MEASURE_PAUSE_NS: u64 = 100_000_000;
const MEASURE_SHARE: u64 = 100;

/// A measuring walk reads page states for this long; the remaining ranges are extrapolated from the average.
pub(super) const MEASURE_NS: u64 = 10_000_000;

/// The purge queue and the known amounts.
#[derive(Default)]
pub(super) struct Purger {
    pub lock: Lock,
    /// Length of all ranges.
    pub total_bytes: AtomicU64,
    /// Bytes that were volatile (as far as kept) or free at the last walk.
    giveable_bytes: AtomicU64,
    /// Earliest time of the next walk that only measures.
    measure_after_ns: AtomicU64,
    /// Least amount of free bytes that was not reused.
    unused: LeastOver,
    /// The ranges marked first, by number; guarded by `lock`.
    line: Line,
}

impl Shrinker for Ranges {
    fn name(&self) -> &'static str {
        "ranges"
    }

    fn may_nest(&self) -> bool {
        true
    }

    fn giveable_bytes(&self) -> u64 {
        self.purger.giveable_bytes.load(Relaxed)
    }

    fn may_have_more(&self) -> bool {
        self.purger.total_bytes.load(Relaxed) > 0
    }

    /// Gives back memory of dropped ranges, which packs keep for reuse. Contents of marked ranges are purged under
    /// pressure only.
    fn shrink_aged(&self, want_bytes: u64, age: Duration) -> Option<u64> {
        let now = now();
        let free = || {
            let numbers = 0..self.count.load(Acquire);
            numbers.filter_map(|number| {
                let (entry, seen) = (self.entry(number), self.entry(number).word.look());
                let bytes = self.giveable_of(entry, seen, now);
                (seen.phase() == RangePhase::Free && bytes > 0).then_some((number, seen.epoch(), bytes))
            })
        };
        let unused = self.purger.unused.least(free().map(|(_, _, bytes)| bytes).sum(), clock::fine_ns(), age);
        let want_bytes = unused.min(want_bytes);
        if want_bytes < WORTHWHILE_BYTES {
            return Some(0);
        }
        let _guard = self.purger.lock.lock();
        let mut freed = 0;
        for (number, epoch, _) in free() {
            if freed >= want_bytes {
                break;
            }
            freed += self.purge(number, epoch).unwrap_or(0);
        }
        self.purger.unused.take(freed);
        Some(freed)
    }

    fn shrink(&self, want_bytes: u64, _urgency: Urgency) -> u64 {
        let _guard = self.purger.lock.lock();
        self.purger.line.purge(want_bytes, |key, epoch| self.purge(key as u32, epoch), || self.look_for_oldest())
    }

    fn measure(&self) {
        if clock::fine_ns() >= self.purger.measure_after_ns.load(Relaxed) {
            self.measure_now();
        }
    }
}

impl Ranges {
    /// Measures what a purge of everything would free: the resident pages of each range that may be purged.
    pub fn measure_now(&self) {
        let begun = clock::fine_ns();
        let _guard = self.purger.lock.lock();
        let (now, mut residents) = (now(), Residents::new(begun + MEASURE_NS));
        for number in 0..self.count.load(Acquire) {
            let entry = self.entry(number);
            let bytes = self.giveable_of(entry, entry.word.look(), now);
            if bytes > 0 {
                residents.add(entry.addr.load(Relaxed) as usize, bytes);
            }
        }
        self.set_giveable(residents.bytes());
        let took = clock::fine_ns() - begun;
        self.purger.measure_after_ns.store(begun + MEASURE_PAUSE_NS.max(took * MEASURE_SHARE), Relaxed);
    }

    fn set_giveable(&self, bytes: u64) {
        self.purger.giveable_bytes.store(bytes, Relaxed);
        stats::set(Counter::RangesGiveable, bytes);
    }

    /// Walks all entries, some nanoseconds each, to fill the line and to sum up what is giveable. Returns the length of
    /// the line.
    fn look_for_oldest(&self) -> usize {
        let (now, mut oldest, mut giveable) = (now(), Oldest::new(), 0);
        for number in 0..self.count.load(Acquire) {
            let entry = self.entry(number);
            let seen = entry.word.look();
            let bytes = self.giveable_of(entry, seen, now);
            if bytes > 0 {
                giveable += bytes;
                let age = if seen.phase() == RangePhase::Free { u32::MAX } else { age(now, seen.epoch()) };
                oldest.offer(age, seen.epoch(), u64::from(number));
            }
        }
        self.set_giveable(giveable);
        self.purger.line.set(&mut oldest)
    }

    /// Purges a range or its last chunk, if it is free or still volatile since `epoch`. Returns the bytes that the
    /// kernel took; `None` if nothing was purged.
    fn purge(&self, number: u32, epoch: u32) -> Option<u64> {
        let entry = self.entry(number);
        let (seen, begun) = (entry.word.look(), now());
        if self.giveable_of(entry, seen, begun) == 0 || seen.epoch() != epoch || !entry.word.claim(seen, begun) {
            return None;
        }
        let addr = entry.addr.load(Relaxed) as usize;
        if seen.phase() == RangePhase::Free {
            let freed = self.discard(entry, addr, addr + entry.room_bytes());
            // If the kernel refused, the range is not tried again before its next use.
            entry.word.finish(true, epoch);
            return freed;
        }
        let (kept, chunk) = (entry.kept(seen), entry.chunk_bytes.load(Relaxed) as usize);
        let (left, freed) = self.purge_down_to(entry, kept, (kept - 1) / chunk * chunk);
        entry.kept_bytes.store(left as u64, Relaxed);
        // Only one of several chunks is purged, so that other ranges have their turn first. The same holds where the
        // kernel refused.
        entry.word.finish(seen.is_lost() || left < kept, now());
        if left == kept {
            return None;
        }
        note_purged(addr, kept - left);
        Some(freed)
    }

    /// Gives back the end of a claimed range step by step, last step first. Returns the bytes left and the bytes that
    /// the kernel took.
    fn purge_down_to(&self, entry: &RangeEntry, kept: usize, down_to: usize) -> (usize, u64) {
        let addr = entry.addr.load(Relaxed) as usize;
        let is_whole = kept == entry.len_bytes.load(Relaxed) as usize;
        // All addresses behind the range's end are its own.
        let mut to = addr + if is_whole { entry.room_bytes() } else { kept };
        let (mut left, mut freed) = (kept, 0);
        while left > down_to && !(left < kept && entry.word.is_awaited()) {
            // Steps end on multiples of their length, so that huge pages are discarded as a whole.
            let from = down_to.max((left - 1) / STEP_BYTES * STEP_BYTES);
            match self.discard(entry, addr + from, to) {
                Some(bytes) => freed += bytes,
                // The kernel may have refused after a part of it.
                None if mem::resident_bytes(addr + from, to - addr - from)
                    .is_ok_and(|bytes| bytes == to - addr - from) =>
                {
                    break;
                }
                None => return (from, freed),
            }
            (left, to) = (from, addr + from);
        }
        (left, freed)
    }

    /// Upper bound of what a purge of a range could free. Memory inherited from a parent process counts as 0.
    fn giveable_of(&self, entry: &RangeEntry, seen: Seen, now: u32) -> u64 {
        let block = || self.arena.block_of(entry.addr.load(Relaxed) as usize);
        match seen.phase() {
            _ if !seen.is_claimable(now) || self.arena.peek(block()).is_inherited => 0,
            RangePhase::Free => entry.room_bytes() as u64,
            _ => entry.kept(seen) as u64,
        }
    }

    /// Gives back whole pages of a claimed range. Returns `None` if the kernel refused; then the caller must not
    /// continue.
    fn discard(&self, entry: &RangeEntry, from: usize, to: usize) -> Option<u64> {
        let has_slot = entry.class.load(Relaxed) == OWN_SLOT;
        let (mut at, mut freed) = (from, 0);
        while at < to {
            let block = self.arena.block_of(at);
            let end = to.min(self.arena.block_addr(block) + BLOCK_BYTES);
            let blocks = (to - at) / BLOCK_BYTES;
            if has_slot && at == self.arena.block_addr(block) && blocks > 0 {
                // SAFETY: whole blocks of a slot, claimed: no thread needs or accesses their contents.
                freed += unsafe { self.arena.renew(block, blocks) }?;
                at += blocks * BLOCK_BYTES;
            } else {
                // SAFETY: as above, whole OS pages of one block.
                freed += unsafe { self.arena.discard_part(block, at, end - at) }?;
                at = end;
            }
        }
        Some(freed)
    }
}

/// Records that bytes of a range were purged, resident or not.
pub(super) fn note_purged(addr: usize, bytes: usize) {
    stats::add(Counter::RangesPurged, 1);
    stats::add(Counter::RangeBytesPurged, bytes as u64);
    trace::event(Event::RangePurged, addr as u64, bytes as u64);
}

impl RangeEntry {
    /// Bytes of address space of the range: whole blocks, or its part of a pack.
    fn room_bytes(&self) -> usize {
        match self.class.load(Relaxed) {
            OWN_SLOT => (self.len_bytes.load(Relaxed) as usize).next_multiple_of(BLOCK_BYTES),
            class => SMALLEST_BYTES << class,
        }
    }

    /// Bytes from the start that are present, of a volatile range.
    fn kept(&self, seen: Seen) -> usize {
        let bytes = if seen.is_lost() { &self.kept_bytes } else { &self.len_bytes };
        bytes.load(Relaxed) as usize
    }
}
