//! Offering cold free slots to the kernel (`MADV_FREE`): the last line of defence.
//!
//! Should a control group run full while this process gets no time to notice
//! (it is stopped, or others are faster), the kernel takes what was offered
//! instead of killing somebody. Until then an offered slot is as good as any:
//! whoever takes it writes to it, and the kernel keeps what was written.
//!
//! Whole blocks only: a part of a huge page cannot be taken. What the kernel
//! took is found out now and then, and the rest of such a block given back, so
//! that it may come as a huge page again.
#![allow(unsafe_code)] // gives the memory of claimed slots up

use super::purge::{Span, age};
use super::slot::{Bytes, Phase, Slot, Slots};
use super::{Heap, Place};
use crate::arena::block::Backing;
use pagemill_sys::clock;
use std::sync::atomic::Ordering::Relaxed;

/// Free for so long (in powers of two of the tick): a second. Who offers what is used again pays for it every time.
const OFFERED_AGE: usize = 5;

/// Looks at what was taken are so far apart, and take at most one part in so many of a thread's time.
const REAP_NS: u64 = 250_000_000;
const REAP_SHARE: u64 = 100;

impl Heap {
    /// Offers up to about `want_bytes` of what is cold and was not offered yet; returns how much it was.
    pub(super) fn offer_cold(&self, want_bytes: u64) -> u64 {
        self.offer_from(want_bytes, OFFERED_AGE)
    }

    /// As [`Heap::offer_cold`], from the given age on.
    fn offer_from(&self, want_bytes: u64, from_age: usize) -> u64 {
        let _guard = self.purging.lock();
        let now = super::stamp_now();
        let is_cold = |slot: &Slot| slot.phase() != Phase::Free || age(now, slot.stamp()) >= from_age;
        let mut offered = 0;
        self.walk(|span| {
            offered += self.offer_span(span, &is_cold);
            offered < want_bytes
        });
        if offered > 0 {
            let _ = self.reap_after_ns.compare_exchange(0, clock::fine_ns() + REAP_NS, Relaxed, Relaxed);
        }
        offered
    }

    fn offer_span(&self, span: Span, is_cold: &impl Fn(&Slot) -> bool) -> u64 {
        if span.class.is_big() {
            return self.offer_slot(span, is_cold);
        }
        let first = self.arena.block_of(span.start);
        (first..first + span.class.span_blocks()).map(|block| self.offer_block(span, block, is_cold)).sum()
    }

    /// A slot that owns its blocks.
    fn offer_slot(&self, span: Span, is_cold: impl Fn(&Slot) -> bool) -> u64 {
        let Some(place) = self.slot_at(span, 0) else { return 0 };
        let slot = self.slot(place.number);
        if slot.is_offered() || slot.bytes().counted == 0 || !is_cold(slot) {
            return 0;
        }
        let Some(claim) = slot.try_claim() else { return 0 };
        let mut offered = 0;
        if claim.phase() == Phase::Free {
            // SAFETY: the slot is claimed and its blocks are its own.
            offered = unsafe { self.arena.offer(self.arena.block_of(place.addr), span.class.span_blocks()) };
        }
        slot.restore(claim, Bytes { is_offered: offered > 0, ..claim.bytes() });
        offered
    }

    /// A block that several slots share, all of them free.
    fn offer_block(&self, span: Span, block: usize, is_cold: impl Fn(&Slot) -> bool) -> u64 {
        let state = self.arena.peek(block);
        let slots = || self.slots_of_block(span, block).map(|index| self.slot(self.place_at(span, index).number));
        let is_new = || slots().any(|slot| slot.phase() == Phase::Free && !slot.is_offered());
        if state.backing == Backing::Empty || state.charged_pages == 0 || !is_new() {
            return 0;
        }
        let Some(claims) = self.claim_block(span, block, is_cold) else { return 0 };
        // SAFETY: every slot that reaches into the block is claimed.
        let offered = unsafe { self.arena.offer(block, 1) };
        for (index, claim) in claims.indices() {
            self.restore(self.place_at(span, index), claim, Bytes { is_offered: offered > 0, ..claim.bytes() });
        }
        offered
    }

    /// Finds out what the kernel took, and gives back what is left of such blocks.
    pub(super) fn reap(&self) {
        let start = clock::fine_ns();
        let due = self.reap_after_ns.load(Relaxed);
        if due == 0 || start < due {
            return;
        }
        let mut is_any_left = false;
        {
            let _guard = self.purging.lock();
            self.walk(|span| {
                is_any_left |= self.reap_span(span);
                true
            });
        }
        let end = clock::fine_ns();
        let next = if is_any_left { end + REAP_NS.max((end - start) * REAP_SHARE) } else { 0 };
        self.reap_after_ns.store(next, Relaxed);
    }

    /// Returns whether anything of it is still offered.
    fn reap_span(&self, span: Span) -> bool {
        let slots = || (0..span.class.span_slots()).filter_map(|index| self.slot_at(span, index));
        let is_any_offered = || slots().any(|place| self.slot(place.number).is_offered());
        if !is_any_offered() {
            return false;
        }
        if span.class.is_big() {
            slots().for_each(|place| self.reap_slot(place));
        } else {
            let first = self.arena.block_of(span.start);
            (first..first + span.class.span_blocks()).for_each(|block| self.reap_block(span, block));
        }
        is_any_offered()
    }

    fn reap_slot(&self, place: Place) {
        let slot = self.slot(place.number);
        let Some(claim) = slot.try_claim() else { return };
        if claim.phase() != Phase::Free {
            slot.restore(claim, claim.bytes());
            return;
        }
        let first = self.arena.block_of(place.addr);
        for block in first..first + place.class.span_blocks() {
            if self.arena.note_taken(block, 1) > 0 {
                // SAFETY: the slot is claimed and its blocks are its own.
                unsafe { self.arena.discard(block, 1) };
            }
        }
        let is_left = self.counted(place, claim.bytes()).counted > 0;
        self.restore(place, claim, Bytes { is_offered: is_left, ..claim.bytes() });
    }

    fn reap_block(&self, span: Span, block: usize) {
        let Some(claims) = self.claim_block(span, block, is_offered) else { return };
        if self.arena.note_taken(block, 1) > 0 {
            self.empty_block(span, block, &claims);
            return;
        }
        for (index, claim) in claims.indices() {
            self.restore(self.place_at(span, index), claim, claim.bytes());
        }
    }
}

/// Of a slot that was never handed out as much as of one that was.
fn is_offered(slot: &Slot) -> bool {
    slot.phase() != Phase::Free || slot.is_offered()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::Pagemill;
    use crate::arena::Layout;
    use crate::reclaim::{Shrinker, Urgency};
    use crate::stats::{self, Counter};
    use pagemill_sys::mem;
    use std::sync::atomic::AtomicBool;

    const KIB: usize = 1 << 10;
    const MIB: usize = 1 << 20;

    /// Writes a tag to every OS page of the allocation.
    fn fill(addr: usize, len: usize, tag: u64) {
        for at in (0..len).step_by(4096) {
            // SAFETY: a live allocation of the test.
            unsafe { ((addr + at) as *mut u64).write(tag) };
        }
    }

    fn is_filled(addr: usize, len: usize, tag: u64) -> bool {
        // SAFETY: a live allocation of the test.
        (0..len).step_by(4096).all(|at| unsafe { ((addr + at) as *const u64).read() } == tag)
    }

    fn allocate(pagemill: &Pagemill, len: usize, tag: u64) -> usize {
        let addr = pagemill.heap.allocate(len, 16).unwrap().addr.as_ptr() as usize;
        fill(addr, len, tag);
        addr
    }

    fn free(pagemill: &Pagemill, addr: usize) {
        // SAFETY: the test is done with it.
        unsafe { pagemill.heap.free(addr) }.unwrap();
    }

    /// Lets the kernel reclaim the whole heap zone, as if memory were short: it takes what was offered.
    fn squeeze(pagemill: &Pagemill) {
        mem::reclaim(pagemill.heap.base(), pagemill.arena.heap.used_bytes());
    }

    /// Both kinds of blocks: offered once, taken, noticed, and good for use afterwards.
    #[test]
    fn what_was_offered_may_be_taken() {
        let pagemill = Pagemill::for_test();
        let shared: Vec<_> = (0..32).map(|tag| allocate(pagemill, 256 * KIB, tag)).collect();
        let big = allocate(pagemill, 8 * MIB, 99);
        let kept = allocate(pagemill, 3 * MIB, 7);
        shared.iter().for_each(|addr| free(pagemill, *addr));
        free(pagemill, big);
        let heap = pagemill.heap;
        assert_eq!(heap.offer_cold(u64::MAX), 0, "nothing is cold");
        let offered = heap.offer_from(u64::MAX, 0);
        assert_eq!((offered, heap.offer_from(u64::MAX, 0)), (16 * MIB as u64, 0), "offered once");
        assert_eq!(heap.free_bytes(), offered);

        let (resident, taken) = (pagemill.account.resident(), stats::get(Counter::Taken));
        squeeze(pagemill);
        heap.reap_after_ns.store(1, Relaxed);
        heap.reap();
        if stats::get(Counter::Taken) == taken {
            println!("skipped: this kernel takes nothing when asked to");
            return;
        }
        assert_eq!((heap.free_bytes(), heap.reap_after_ns.load(Relaxed)), (0, 0));
        assert_eq!(pagemill.account.resident(), resident - offered);
        let again: Vec<_> = (0..32).map(|tag| allocate(pagemill, 256 * KIB, tag)).collect();
        assert!((0..).zip(&again).all(|(tag, addr)| is_filled(*addr, 256 * KIB, tag)));
        assert!(is_filled(kept, 3 * MIB, 7), "what is in use is kept");
        let zeroed = heap.allocate_zeroed(8 * MIB, 16).unwrap().as_ptr() as usize;
        assert!(is_filled(zeroed, 8 * MIB, 0));
    }

    /// An offered slot that is used again is kept, and may be offered again when it is free.
    #[test]
    fn use_ends_the_offer() {
        let pagemill = Pagemill::for_test();
        let first = allocate(pagemill, 4 * MIB, 1);
        free(pagemill, first);
        assert_eq!(pagemill.heap.offer_from(u64::MAX, 0), 4 * MIB as u64);
        assert_eq!(allocate(pagemill, 4 * MIB, 2), first);
        squeeze(pagemill);
        assert!(is_filled(first, 4 * MIB, 2));
        free(pagemill, first);
        assert_eq!(pagemill.heap.offer_from(u64::MAX, 0), 4 * MIB as u64);
    }

    /// Threads fill, check and free while everything free is offered and taken all the time; the books agree at the end.
    #[test]
    fn threads_never_lose_what_they_hold() {
        let layout = Layout { huge_from_bytes: 8 * MIB as u64, ..Layout::for_test() };
        let pagemill = Pagemill::new(layout, u64::MAX).unwrap();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let threads: Vec<_> = (1..=3)
                .map(|seed| {
                    scope.spawn(move || {
                        let mut held = std::collections::VecDeque::new();
                        for round in 0..600 {
                            let tag = seed << 32 | round;
                            let len =
                                [80 * KIB, 256 * KIB, 700 * KIB, 2 * MIB, 5 * MIB][(seed * 7 + round * 3) as usize % 5];
                            held.push_back((allocate(pagemill, len, tag), len, tag));
                            if held.len() > 6 {
                                let (addr, len, tag) = held.pop_front().unwrap();
                                assert!(is_filled(addr, len, tag), "{len} bytes lost");
                                free(pagemill, addr);
                            }
                        }
                        held.into_iter().for_each(|(addr, ..)| free(pagemill, addr));
                    })
                })
                .collect();
            scope.spawn(|| {
                while !is_over.load(Relaxed) {
                    pagemill.heap.offer_from(u64::MAX, 0);
                    squeeze(pagemill);
                    pagemill.heap.reap_after_ns.fetch_min(1, Relaxed);
                    pagemill.heap.reap();
                }
            });
            let results: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
            is_over.store(true, Relaxed);
            assert!(results.iter().all(Result::is_ok));
        });
        let (heap, free_bytes) = (pagemill.heap, pagemill.heap.free_bytes());
        let mut counted = 0;
        heap.walk(|span| {
            let slots = (0..span.class.span_slots()).filter_map(|index| heap.slot_at(span, index));
            counted += slots.map(|place| heap.slot(place.number).bytes().counted_bytes()).sum::<u64>();
            true
        });
        assert_eq!(counted, free_bytes, "the count of free bytes drifted");
        heap.shrink(u64::MAX, Urgency::Limit);
        assert_eq!(heap.free_bytes(), 0);
        assert!(pagemill.account.resident() == 0, "{} bytes are charged still", pagemill.account.resident());
    }
}
