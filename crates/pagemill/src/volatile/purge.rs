//! Purging ranges: the least recently marked first, in bounded steps.
//!
//! Entries are walked for the oldest marks, some hundred at a time; these go in their order, and the walk is repeated when
//! they are used up. A whole range goes with its turn; of one that goes by chunks the last chunk goes, and it is marked
//! anew, so that the others have their turn before the next chunk. What free ranges of packs still have counts as oldest.
//!
//! A claimed range is out of its owner's reach. Whoever wants it says so in the word, and the purge ends after the step it
//! is at: what it has not come to is kept.
#![allow(unsafe_code)] // gives the memory of claimed ranges back

use super::line::{Line, Oldest};
use super::word::{Phase, Seen, age};
use super::{Entry, OWN_SLOT, Ranges, SMALLEST_BYTES, now};
use crate::reclaim::{Shrinker, Urgency};
use crate::stats::{self, Counter};
use crate::sync::{Acquire, AtomicU64, Lock, Relaxed};
use crate::trace::{self, Event};
use crate::units::BLOCK_BYTES;
use pagemill_sys::{clock, mem};

/// Given back by one system call: what a waiter may have to wait for, some 40 us. Small ranges have several under shuttle.
pub(super) const STEP_BYTES: usize = if cfg!(shuttle) { BLOCK_BYTES / 8 } else { 4 * BLOCK_BYTES };

/// A walk only to know what there is comes so much later than the one before, and takes at most one part in so many of the
/// time.
const MEASURE_PAUSE_NS: u64 = 100_000_000;
const MEASURE_SHARE: u64 = 100;

/// Who is next, and what there is.
#[derive(Default)]
pub(super) struct Purger {
    pub lock: Lock,
    /// Bytes of all ranges.
    pub total_bytes: AtomicU64,
    /// Bytes that were volatile, as far as kept, or free when that was last looked for.
    giveable_bytes: AtomicU64,
    /// When that may be looked for again only to know it.
    measure_after_ns: AtomicU64,
    /// Numbers of the ranges marked first; guarded by `lock`.
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

    fn shrink(&self, want_bytes: u64, _urgency: Urgency) -> u64 {
        let _guard = self.purger.lock.lock();
        self.purger.line.purge(want_bytes, |key, epoch| self.purge(key as u32, epoch), || self.look_for_oldest())
    }

    fn measure(&self) {
        let begun = clock::fine_ns();
        if begun < self.purger.measure_after_ns.load(Relaxed) {
            return;
        }
        let _guard = self.purger.lock.lock();
        self.look_for_oldest();
        let took = clock::fine_ns() - begun;
        self.purger.measure_after_ns.store(begun + MEASURE_PAUSE_NS.max(took * MEASURE_SHARE), Relaxed);
    }
}

impl Ranges {
    /// Walks all entries, some nanoseconds each, for the line and for what there is. Returns the length of the line.
    fn look_for_oldest(&self) -> usize {
        let (now, mut oldest, mut giveable) = (now(), Oldest::new(), 0);
        for number in 0..self.count.load(Acquire) {
            let entry = self.entry(number);
            let seen = entry.word.look();
            let bytes = self.giveable_of(entry, seen, now);
            if bytes > 0 {
                giveable += bytes;
                let age = if seen.phase() == Phase::Free { u32::MAX } else { age(now, seen.epoch()) };
                oldest.offer(age, seen.epoch(), u64::from(number));
            }
        }
        self.purger.giveable_bytes.store(giveable, Relaxed);
        self.purger.line.set(&mut oldest)
    }

    /// Purges a range, or its last chunk, if it is still volatile since that epoch, or free. Returns what the kernel took;
    /// `None` if nothing went.
    fn purge(&self, number: u32, epoch: u32) -> Option<u64> {
        let entry = self.entry(number);
        let (seen, begun) = (entry.word.look(), now());
        if self.giveable_of(entry, seen, begun) == 0 || seen.epoch() != epoch || !entry.word.claim(seen, begun) {
            return None;
        }
        let addr = entry.addr.load(Relaxed) as usize;
        if seen.phase() == Phase::Free {
            let freed = self.discard(entry, addr, addr + entry.room_bytes());
            // Where the kernel refused it is not asked again before the next use.
            entry.word.finish(true, epoch);
            return freed;
        }
        let (kept, chunk) = (entry.kept(seen), entry.chunk_bytes.load(Relaxed) as usize);
        let (left, freed) = self.purge_down_to(entry, kept, (kept - 1) / chunk * chunk);
        entry.kept_bytes.store(left as u64, Relaxed);
        // Of several chunks one: the others have their turn first. So they have where the kernel refused.
        entry.word.finish(seen.is_lost() || left < kept, now());
        if left == kept {
            return None;
        }
        note_purged(addr, kept - left);
        Some(freed)
    }

    /// Gives the end of a claimed range back, from its end on, step by step. Returns what is left of it, and what the
    /// kernel took.
    fn purge_down_to(&self, entry: &Entry, kept: usize, down_to: usize) -> (usize, u64) {
        let addr = entry.addr.load(Relaxed) as usize;
        let is_whole = kept == entry.len_bytes.load(Relaxed) as usize;
        // All that is behind the range's end is its own.
        let mut to = addr + if is_whole { entry.room_bytes() } else { kept };
        let (mut left, mut freed) = (kept, 0);
        while left > down_to && !(left < kept && entry.word.is_awaited()) {
            // Steps end on multiples of their length, so that huge pages go as a whole.
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

    /// What a purge of a range could take, at the most. Of what a parent process left, nothing is freed here.
    fn giveable_of(&self, entry: &Entry, seen: Seen, now: u32) -> u64 {
        let block = || self.arena.block_of(entry.addr.load(Relaxed) as usize);
        match seen.phase() {
            _ if !seen.is_claimable(now) || self.arena.peek(block()).is_inherited => 0,
            Phase::Free => entry.room_bytes() as u64,
            _ => entry.kept(seen) as u64,
        }
    }

    /// Gives back whole pages of a claimed range; `None` if the kernel refused, and then nothing more is to be tried.
    fn discard(&self, entry: &Entry, from: usize, to: usize) -> Option<u64> {
        let has_slot = entry.class.load(Relaxed) == OWN_SLOT;
        let (mut at, mut freed) = (from, 0);
        while at < to {
            let block = self.arena.block_of(at);
            let end = to.min(self.arena.block_addr(block) + BLOCK_BYTES);
            let blocks = (to - at) / BLOCK_BYTES;
            if has_slot && at == self.arena.block_addr(block) && blocks > 0 {
                // SAFETY: whole blocks of a slot, claimed: nobody needs or reaches their contents.
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

/// Tells that bytes of a range went, resident or not.
pub(super) fn note_purged(addr: usize, bytes: usize) {
    stats::add(Counter::RangesPurged, 1);
    stats::add(Counter::RangeBytesPurged, bytes as u64);
    trace::event(Event::RangePurged, addr as u64, bytes as u64);
}

impl Entry {
    /// What the range has of addresses: whole blocks, or its part of a pack.
    fn room_bytes(&self) -> usize {
        match self.class.load(Relaxed) {
            OWN_SLOT => (self.len_bytes.load(Relaxed) as usize).next_multiple_of(BLOCK_BYTES),
            class => SMALLEST_BYTES << class,
        }
    }

    /// Bytes from the start on that are there, of a volatile range.
    fn kept(&self, seen: Seen) -> usize {
        let bytes = if seen.is_lost() { &self.kept_bytes } else { &self.len_bytes };
        bytes.load(Relaxed) as usize
    }
}
