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
use crate::arena::block::Backing;
use crate::reclaim::{Shrinker, Urgency};
use crate::stats::{self, Counter};
use crate::sync::Lock;
use crate::trace::{self, Event};
use crate::units::{BLOCK_BYTES, os_page_bytes};
use pagemill_sys::{clock, mem};
use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed};

/// Given back by one system call: what a waiter may have to wait for, some 40 us.
const STEP_BYTES: usize = 4 * BLOCK_BYTES;

/// Pages asked for at a time whether they are resident.
pub(super) const ASKED_PAGES: usize = 1024;

/// Walks of one request: others may mark and unmark as fast as this purges.
pub(super) const MOST_WALKS: usize = 64;

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
        let (mut freed, mut is_fresh) = (0, false);
        for _ in 0..MOST_WALKS {
            let mut has_gone = false;
            while freed < want_bytes
                && let Some((number, epoch)) = self.purger.line.next()
            {
                let gone = self.purge(number as u32, epoch);
                has_gone |= gone.is_some();
                freed += gone.unwrap_or(0);
            }
            // Of a whole line nothing went: what is left is in use or locked.
            let is_futile = is_fresh && !has_gone;
            if freed >= want_bytes || is_futile || self.look_for_oldest() == 0 {
                break;
            }
            is_fresh = true;
        }
        freed
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
            let bytes = if self.is_inherited(entry) { 0 } else { entry.giveable_bytes(seen, now) };
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
        if entry.giveable_bytes(seen, begun) == 0 || seen.epoch() != epoch || !entry.word.claim(seen, begun) {
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
        stats::add(Counter::RangesPurged, 1);
        stats::add(Counter::RangeBytesPurged, (kept - left) as u64);
        trace::event(Event::RangePurged, addr as u64, (kept - left) as u64);
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
                None if is_all_there(addr + from, to) => break,
                None => return (from, freed),
            }
            (left, to) = (from, addr + from);
        }
        (left, freed)
    }

    /// Whether it is the memory of a parent process, of which giving back frees nothing here.
    fn is_inherited(&self, entry: &Entry) -> bool {
        let addr = entry.addr.load(Relaxed) as usize;
        self.arena.heap.contains(addr) && self.arena.peek(self.arena.block_of(addr)).is_inherited
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
                freed += self.discard_blocks(block, blocks)?;
                at += blocks * BLOCK_BYTES;
            } else {
                // SAFETY: whole OS pages of one block, claimed: nobody needs or reaches their contents.
                freed += unsafe { self.arena.discard_part(block, at, end - at) }?;
                at = end;
            }
        }
        Some(freed)
    }

    fn discard_blocks(&self, first: usize, blocks: usize) -> Option<u64> {
        // SAFETY: whole blocks of a slot whose range is claimed: nobody needs or reaches their contents.
        let freed = unsafe { self.arena.discard(first, blocks) };
        let is_gone = (first..first + blocks).all(|block| self.arena.peek(block).backing == Backing::Empty);
        // The program may touch them again without asking.
        self.arena.reopen(first, blocks);
        is_gone.then_some(freed)
    }
}

/// Whether every page is resident: so it is with locked memory that the kernel refused to take.
pub(super) fn is_all_there(from: usize, to: usize) -> bool {
    let page = os_page_bytes();
    let mut pages = [0u8; ASKED_PAGES];
    (from..to).step_by(ASKED_PAGES * page).all(|at| {
        let len = (to - at).min(ASKED_PAGES * page);
        mem::resident(at, len, &mut pages).is_ok() && pages[..len / page].iter().all(|page| *page & 1 == 1)
    })
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

    /// What a purge could take, at the most.
    fn giveable_bytes(&self, seen: Seen, now: u32) -> u64 {
        match seen.phase() {
            _ if !seen.is_claimable(now) => 0,
            Phase::Free => self.room_bytes() as u64,
            _ => self.kept(seen) as u64,
        }
    }
}
