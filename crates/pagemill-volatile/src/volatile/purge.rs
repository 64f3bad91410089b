//! Purges ranges, the least recently marked first, in bounded steps.
//!
//! A walk over the entries queues some hundred ranges with the oldest marks (`purge_queue`). These ranges are purged in
//! order; then the next walk follows. A range without chunks is purged as a whole. Of a range with chunks only the last
//! chunk is purged. Then the epoch of its mark is set to the current time, so that other ranges are purged before its
//! next chunk. The memory of free entries is purged before that of marked ranges.
//!
//! A range that a purge has claimed cannot be accessed. A thread that needs the range sets a bit in the range's state
//! word. Then the purge ends after its current step, and the rest of the range is kept.
#![allow(unsafe_code)] // discards the memory of claimed ranges

use super::purge_queue::PurgeQueue;
use super::residents::ResidentBytes;
use super::word::{RangePhase, SeenWord, age};
use super::{MIN_CLASS_BYTES, OWN_SLOT_CLASS, RangeEntry, Ranges, current_epoch};
use pagemill_core::reclaim::aging::LeastOver;
use pagemill_core::reclaim::governor::WORTHWHILE_BYTES;
use pagemill_core::reclaim::{Cost, Reason, Shrinker, Urgency};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{Acquire, AtomicU64, Guarded, Relaxed};
use pagemill_core::trace::{self, Event};
use pagemill_core::units::BLOCK_BYTES;
use pagemill_sys::{clock, mem};
use std::time::Duration;

/// Maximum number of bytes that one step discards. The limit bounds the time for which another thread waits for the
/// range: some 40 us. The number is small in shuttle tests, so that small ranges have several steps.
pub(super) const PURGE_STEP_BYTES: usize = if cfg!(shuttle) { BLOCK_BYTES / 8 } else { 4 * BLOCK_BYTES };

/// Minimum time in nanoseconds from the start of a measuring walk, which measures the resident bytes of all ranges, to
/// the start of the next one.
const MEASURE_PAUSE_NS: u64 = 100_000_000;
/// The time from the start of a measuring walk to the start of the next one is at least the duration of the first walk,
/// multiplied by this number.
const MEASURE_PAUSE_FACTOR: u64 = 100;

/// Time limit of a measuring walk, in nanoseconds. The resident bytes of the remaining ranges are extrapolated.
pub(super) const MAX_MEASURE_NS: u64 = 10_000_000;

/// The state of the purges of all ranges: the purge queue, and sums over the ranges.
#[derive(Default)]
pub(super) struct Purger {
    /// The purge queue; its keys are numbers of entries. A thread that purges or measures ranges holds its lock.
    pub queue: Guarded<PurgeQueue>,
    /// Sum of the lengths of all ranges.
    pub total_bytes: AtomicU64,
    /// Bytes that a purge of all ranges could free, as found by the last walk over the ranges.
    giveable_bytes: AtomicU64,
    /// Earliest time of the next measuring walk, in nanoseconds.
    measure_after_ns: AtomicU64,
    /// The minimum, over some time, of the bytes that free entries have. At least that many bytes were not reused in
    /// this time.
    unused: LeastOver,
}

impl Shrinker for Ranges {
    fn name(&self) -> &'static str {
        "ranges"
    }

    fn cost(&self) -> Cost {
        Cost::Purge
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

    /// Returns memory of free entries, which packs keep for reuse. Marked ranges are not purged here: only pressure
    /// purges contents.
    fn shrink_aged(&self, want_bytes: u64, age: Duration) -> Option<u64> {
        let now = current_epoch();
        let free = || self.giveable_entries(now).filter(|(_, seen, _)| seen.phase() == RangePhase::Free);
        let unused = self.purger.unused.least(free().map(|(_, _, bytes)| bytes).sum(), clock::fine_ns(), age);
        let want_bytes = unused.min(want_bytes);
        if want_bytes < WORTHWHILE_BYTES {
            return Some(0);
        }
        let _guard = self.purger.queue.lock();
        let mut freed = 0;
        for (number, seen, _) in free() {
            if freed >= want_bytes {
                break;
            }
            freed += self.purge(number, seen.epoch(), Reason::Age).unwrap_or(0);
        }
        self.purger.unused.take(freed);
        Some(freed)
    }

    fn shrink(&self, want_bytes: u64, urgency: Urgency) -> u64 {
        self.shrink_for(want_bytes, urgency, Reason::Program)
    }

    fn shrink_for(&self, want_bytes: u64, _urgency: Urgency, reason: Reason) -> u64 {
        let mut queue = self.purger.queue.lock();
        queue.purge(want_bytes, |key, epoch| self.purge(key as u32, epoch, reason), |queue| self.fill_queue(queue))
    }

    fn measure(&self) {
        if clock::fine_ns() >= self.purger.measure_after_ns.load(Relaxed) {
            self.measure_now();
        }
    }
}

impl Ranges {
    /// Measures the bytes that a purge of all ranges would free: the resident pages of each range that may be purged.
    pub fn measure_now(&self) {
        let begun = clock::fine_ns();
        let _guard = self.purger.queue.lock();
        let mut residents = ResidentBytes::new(begun + MAX_MEASURE_NS);
        for (number, _, bytes) in self.giveable_entries(current_epoch()) {
            residents.add(self.entry(number).addr.load(Relaxed) as usize, bytes);
        }
        self.set_giveable(residents.bytes());
        let took = clock::fine_ns() - begun;
        self.purger.measure_after_ns.store(begun + MEASURE_PAUSE_NS.max(took * MEASURE_PAUSE_FACTOR), Relaxed);
    }

    /// Stores the number of bytes that a purge of all ranges could free, and publishes it in the statistics.
    fn set_giveable(&self, bytes: u64) {
        self.purger.giveable_bytes.store(bytes, Relaxed);
        stats::set(Counter::RangesGiveable, bytes);
    }

    /// Walks all entries to fill the purge queue and to sum up the giveable bytes.
    fn fill_queue(&self, queue: &mut PurgeQueue) {
        let (now, mut giveable) = (current_epoch(), 0);
        for (number, seen, bytes) in self.giveable_entries(now) {
            giveable += bytes;
            let age = if seen.phase() == RangePhase::Free { u32::MAX } else { age(now, seen.epoch()) };
            queue.add(age, seen.epoch(), u64::from(number));
        }
        self.set_giveable(giveable);
    }

    /// Returns the entries that a purge could free memory of, each with its word and an upper bound of the bytes. Cost:
    /// some nanoseconds for each entry.
    fn giveable_entries(&self, now: u32) -> impl Iterator<Item = (u32, SeenWord, u64)> {
        (0..self.count.load(Acquire)).filter_map(move |number| {
            let entry = self.entry(number);
            let seen = entry.word.load();
            let bytes = self.giveable_bytes_of(entry, seen, now);
            (bytes > 0).then_some((number, seen, bytes))
        })
    }

    /// Purges a range or its last chunk, unless the range was marked again or became held after `epoch`. Returns the
    /// bytes that the kernel took; `None` if nothing was purged.
    fn purge(&self, number: u32, epoch: u32, reason: Reason) -> Option<u64> {
        let entry = self.entry(number);
        let (seen, begun) = (entry.word.load(), current_epoch());
        // The program may have allocated and marked an entry that was free when the caller saw it.
        let has_contents = seen.phase() != RangePhase::Free;
        if has_contents && reason.purge_counter().is_none() {
            return None;
        }
        if self.giveable_bytes_of(entry, seen, begun) == 0 || seen.epoch() != epoch || !entry.word.claim(seen, begun) {
            return None;
        }
        let addr = entry.addr.load(Relaxed) as usize;
        if !has_contents {
            let freed = self.discard(entry, addr, addr + entry.address_bytes());
            // Even if the kernel refused, the entry counts as without memory until its next use.
            entry.word.finish(true, epoch);
            return freed;
        }
        let (kept, chunk) = (entry.kept_len(seen), entry.chunk_bytes.load(Relaxed) as usize);
        let (left, freed) = self.purge_down_to(entry, kept, (kept - 1) / chunk * chunk);
        entry.kept_bytes.store(left as u64, Relaxed);
        // The range counts as marked now, so that other ranges are purged before its next chunk, or before another
        // attempt if the kernel refused.
        entry.word.finish(seen.is_lost() || left < kept, current_epoch());
        if left == kept {
            return None;
        }
        note_purged(addr, kept - left, reason);
        Some(freed)
    }

    /// Discards the bytes of a claimed range from `down_to` to `kept`, in steps from the end. Returns the length of the
    /// remaining part and the bytes that the kernel took.
    fn purge_down_to(&self, entry: &RangeEntry, kept: usize, down_to: usize) -> (usize, u64) {
        debug_assert!(down_to < kept && kept <= entry.len_bytes.load(Relaxed) as usize);
        debug_assert!(entry.word.load().phase() == RangePhase::Purging, "the range is claimed");
        let addr = entry.addr.load(Relaxed) as usize;
        let is_whole = kept == entry.len_bytes.load(Relaxed) as usize;
        // If nothing was purged before, also discard the addresses behind the range's end, which no other range uses.
        let mut to = addr + if is_whole { entry.address_bytes() } else { kept };
        let (mut left, mut freed) = (kept, 0);
        while left > down_to && !(left < kept && entry.word.is_awaited()) {
            // Steps start at multiples of their length, so that huge pages are discarded as a whole.
            let from = down_to.max((left - 1) / PURGE_STEP_BYTES * PURGE_STEP_BYTES);
            match self.discard(entry, addr + from, to) {
                Some(bytes) => freed += bytes,
                // The kernel refused. If all pages are still resident, it has discarded none of them.
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

    /// Returns an upper bound of the bytes that a purge of a range could free. Memory inherited from a parent process
    /// counts as 0.
    fn giveable_bytes_of(&self, entry: &RangeEntry, seen: SeenWord, now: u32) -> u64 {
        let block = || self.arena.block_of(entry.addr.load(Relaxed) as usize);
        match seen.phase() {
            _ if !seen.is_claimable(now) || self.arena.block_state(block()).is_inherited => 0,
            RangePhase::Free => entry.address_bytes() as u64,
            _ => entry.kept_len(seen) as u64,
        }
    }

    /// Discards whole pages of a claimed range. Returns the bytes that the kernel took; `None` if the kernel refused,
    /// possibly after it took some of the pages.
    fn discard(&self, entry: &RangeEntry, from: usize, to: usize) -> Option<u64> {
        let has_slot = entry.class.load(Relaxed) == OWN_SLOT_CLASS;
        let (mut at, mut freed) = (from, 0);
        while at < to {
            let block = self.arena.block_of(at);
            let end = to.min(self.arena.block_addr(block) + BLOCK_BYTES);
            let blocks = (to - at) / BLOCK_BYTES;
            if has_slot && at == self.arena.block_addr(block) && blocks > 0 {
                // SAFETY: these are whole blocks of a claimed range, so no thread needs or accesses their contents.
                freed += unsafe { self.arena.discard_and_reopen(block, blocks) }?;
                at += blocks * BLOCK_BYTES;
            } else {
                // SAFETY: as above; these are whole OS pages of one block.
                freed += unsafe { self.arena.discard_part(block, at, end - at) }?;
                at = end;
            }
        }
        Some(freed)
    }
}

/// Counts and traces a purge of `bytes` bytes of a range for `reason`, whether these bytes were resident or not.
pub(super) fn note_purged(addr: usize, bytes: usize, reason: Reason) {
    let of_reason = reason.purge_counter();
    debug_assert!(of_reason.is_some(), "no contents are purged for {reason:?}");
    stats::add(Counter::RangesPurged, 1);
    stats::add(Counter::RangeBytesPurged, bytes as u64);
    if let Some(counter) = of_reason {
        stats::add(counter, bytes as u64);
    }
    trace::event(Event::RangePurged, addr as u64, bytes as u64);
}

impl RangeEntry {
    /// Returns the bytes of address space of the entry: the whole blocks of its slot, or its part of a pack.
    fn address_bytes(&self) -> usize {
        match self.class.load(Relaxed) {
            OWN_SLOT_CLASS => (self.len_bytes.load(Relaxed) as usize).next_multiple_of(BLOCK_BYTES),
            class => MIN_CLASS_BYTES << class,
        }
    }

    /// Returns the number of bytes at the start of a volatile range that were not purged.
    fn kept_len(&self, seen: SeenWord) -> usize {
        let bytes = if seen.is_lost() { &self.kept_bytes } else { &self.len_bytes };
        bytes.load(Relaxed) as usize
    }
}
