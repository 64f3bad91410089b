//! Offers the memory of free slots to the kernel with `MADV_FREE`.
//!
//! A control group may reach its limit before this process can react, for example while the process is stopped. Then
//! the kernel takes offered memory instead of killing a process. An offered slot can still be allocated as usual: pages
//! that the program writes are no longer offered.
//!
//! Only whole blocks are offered, because the kernel cannot take a part of a huge page. A periodic walk (*reap*) finds
//! the blocks of which the kernel took pages and discards the rest of these blocks, so that the blocks can become huge
//! pages again.
#![allow(unsafe_code)] // offers and discards the memory of claimed slots

use super::purge::{Span, age_group};
use super::slot::{Slot, SlotBytes, SlotPhase, Slots};
use super::{Heap, LocatedSlot};
use pagemill_core::arena::block::Backing;
use pagemill_core::reclaim::Which;
use pagemill_sys::{clock, process};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Age group (see `purge`) from which cold memory is offered: free for a seventh of a second. The cost of reusing
/// offered memory is about 1/100 of that time.
const MIN_OFFER_AGE_GROUP: usize = 2;

/// Minimum time, in nanoseconds, between two walks over the heap that offer cold memory or that reap.
const MIN_WALK_INTERVAL_NS: u64 = 50_000_000;
/// The time between two walks is at least the duration of the last walk times this factor.
const WALK_TIME_FACTOR: u64 = 100;
/// Minimum time, in nanoseconds, between two walks that offer free memory of any age.
const MIN_URGENT_WALK_INTERVAL_NS: u64 = 5_000_000;

/// Time without offers, in nanoseconds, after the kernel has refused one because the memory is locked.
const REFUSED_PAUSE_NS: u64 = 10_000_000_000;

/// The first kernel release on which memory is offered. Older kernels may take offered memory while a device transfers
/// data into it. Commit 6c8e2a256915 fixed that, also in stable updates, which the release number does not identify.
const MIN_KERNEL_RELEASE: (u32, u32) = (5, 18);

/// Times, in nanoseconds, that limit how often walks over the heap offer memory or reap.
#[derive(Default)]
pub(super) struct OfferSchedule {
    /// Earliest time of the next walk that offers cold memory.
    offer_after_ns: AtomicU64,
    last_urgent_walk_ns: AtomicU64,
    /// No memory is offered before this time, because the kernel has refused an offer.
    refused_until_ns: AtomicU64,
    /// Earliest time of the next walk that finds the memory which the kernel took; 0 while no memory is offered.
    reap_after_ns: AtomicU64,
}

/// Returns the earliest time of the next walk, after a walk that began at `start_ns` and ends now.
fn next_walk_ns(start_ns: u64) -> u64 {
    let end_ns = clock::fine_ns();
    end_ns + MIN_WALK_INTERVAL_NS.max((end_ns - start_ns) * WALK_TIME_FACTOR)
}

impl Heap {
    /// Offers up to about `want_bytes` of free memory that is not offered yet. Returns the bytes offered.
    pub(super) fn offer_free(&self, want_bytes: u64, which: Which) -> u64 {
        if process::kernel_release() < MIN_KERNEL_RELEASE {
            return 0;
        }
        let now = clock::fine_ns();
        let (after, from_age) = match which {
            Which::Cold => (self.offers.offer_after_ns.load(Relaxed), MIN_OFFER_AGE_GROUP),
            Which::All => (self.offers.last_urgent_walk_ns.load(Relaxed) + MIN_URGENT_WALK_INTERVAL_NS, 0),
        };
        if now < after || now < self.offers.refused_until_ns.load(Relaxed) {
            return 0;
        }
        if which == Which::All {
            self.offers.last_urgent_walk_ns.store(now, Relaxed);
        }
        self.offer_from_age_group(want_bytes, from_age)
    }

    /// As [`Heap::offer_free`], for free memory whose age group is at least `from_age`, however recent the last walk
    /// was.
    fn offer_from_age_group(&self, want_bytes: u64, from_age: usize) -> u64 {
        let _guard = self.purging.lock();
        let start = clock::fine_ns();
        let now = super::current_stamp();
        let is_cold = |slot: &Slot| slot.phase() != SlotPhase::Free || age_group(now, slot) >= from_age;
        let mut offer = OfferWalk { is_cold: &is_cold, bytes: 0, is_refused: false };
        for span in self.spans() {
            self.offer_span(span, &mut offer);
            if offer.bytes >= want_bytes || offer.is_refused {
                break;
            }
        }
        let is_all = offer.bytes < want_bytes;
        self.offers.offer_after_ns.store(if is_all { next_walk_ns(start) } else { 0 }, Relaxed);
        if offer.is_refused {
            self.offers.refused_until_ns.store(start + REFUSED_PAUSE_NS, Relaxed);
        }
        if offer.bytes > 0 {
            let _ = self.offers.reap_after_ns.compare_exchange(0, next_walk_ns(start), Relaxed, Relaxed);
        }
        offer.bytes
    }

    /// Offers the free memory of a span to the kernel.
    fn offer_span(&self, span: Span, offer: &mut OfferWalk<'_>) {
        if span.class.is_big() {
            return self.offer_slot(span, offer);
        }
        self.blocks_of_span(span).for_each(|block| self.offer_block(span, block, offer));
    }

    /// Offers the big slot of a span to the kernel, if the slot is free and cold.
    fn offer_slot(&self, span: Span, offer: &mut OfferWalk<'_>) {
        debug_assert!(span.class.is_big(), "the slot shares no block");
        let Some(place) = self.carved_slot_at(span, 0) else { return };
        let slot = self.slot(place.number);
        if slot.is_offered() || slot.bytes().counted == 0 || !(offer.is_cold)(slot) {
            return;
        }
        let Some(claim) = slot.try_claim_free() else { return };
        let blocks = self.blocks_of(place);
        // SAFETY: the slot is claimed and shares no block.
        let is_offered = offer.record(unsafe { self.arena.offer(blocks.start, blocks.len()) });
        slot.restore(claim, SlotBytes { is_offered, ..claim.bytes() });
    }

    /// Offers a block that several slots share to the kernel, if none of the slots is live.
    fn offer_block(&self, span: Span, block: usize, offer: &mut OfferWalk<'_>) {
        debug_assert!(!span.class.is_big() && self.purging.is_held());
        let state = self.arena.block_state(block);
        let mut slots = self.slots_of_block(span, block).map(|place| self.slot(place.number));
        if state.backing == Backing::Empty
            || state.charged_pages == 0
            || !slots.any(|slot| slot.phase() == SlotPhase::Free && !slot.is_offered())
        {
            return;
        }
        let Some(claims) = self.claim_block(span, block, offer.is_cold) else { return };
        // SAFETY: every slot that reaches into the block is claimed.
        let is_offered = offer.record(unsafe { self.arena.offer(block, 1) });
        for (place, claim) in claims.into_iter().flatten() {
            // The slot may reach into another block that was offered earlier.
            let is_offered = is_offered || claim.bytes().is_offered;
            self.restore(place, claim, SlotBytes { is_offered, ..claim.bytes() });
        }
    }

    /// Ends the charge for memory that the kernel took from an offered slot, before the slot is used again. Returns the
    /// number of bytes that the kernel took.
    pub(super) fn discharge_taken(&self, place: LocatedSlot) -> u64 {
        let blocks = self.blocks_of(place);
        self.arena.discharge_taken(blocks.start, blocks.len())
    }

    /// Finds the offered blocks of which the kernel took pages, and discards the rest of these blocks.
    pub(super) fn reap_offered(&self) {
        let start = clock::fine_ns();
        let due = self.offers.reap_after_ns.load(Relaxed);
        if due == 0 || start < due {
            return;
        }
        let mut is_any_left = false;
        {
            let _guard = self.purging.lock();
            self.spans().for_each(|span| is_any_left |= self.reap_span(span));
        }
        let next = if is_any_left { next_walk_ns(start) } else { 0 };
        self.offers.reap_after_ns.store(next, Relaxed);
    }

    /// Discards the offered blocks of a span of which the kernel took pages. Returns whether any slot of the span is
    /// still offered.
    fn reap_span(&self, span: Span) -> bool {
        let is_any_offered = || self.carved_slots(span).any(|place| self.slot(place.number).is_offered());
        if !is_any_offered() {
            return false;
        }
        if span.class.is_big() {
            self.carved_slots(span).for_each(|place| self.reap_slot(place));
        } else {
            self.blocks_of_span(span).for_each(|block| self.reap_block(span, block));
        }
        is_any_offered()
    }

    /// Discards those blocks of a free big slot of which the kernel took pages.
    fn reap_slot(&self, place: LocatedSlot) {
        debug_assert!(place.class.is_big() && self.purging.is_held());
        let Some(claim) = self.slot(place.number).try_claim_free() else { return };
        for block in self.blocks_of(place) {
            if self.arena.discharge_taken(block, 1) > 0 {
                // SAFETY: the slot is claimed and shares no block.
                unsafe { self.arena.discard(block, 1) };
            }
        }
        let is_left = self.with_resident_count(place, claim.bytes()).counted > 0;
        self.restore(place, claim, SlotBytes { is_offered: is_left, ..claim.bytes() });
    }

    /// Discards a block that several slots share, if no slot of it is live and the kernel took pages of it.
    fn reap_block(&self, span: Span, block: usize) {
        debug_assert!(!span.class.is_big() && self.purging.is_held());
        let Some(claims) = self.claim_block(span, block, has_only_offered_memory) else { return };
        if self.arena.discharge_taken(block, 1) > 0 {
            self.discard_claimed_block(block, &claims);
        } else {
            claims.iter().flatten().for_each(|(place, claim)| self.restore(*place, *claim, claim.bytes()));
        }
    }
}

/// The criteria and the results of one walk that offers memory.
struct OfferWalk<'walk> {
    /// Returns whether a slot, if it is free, has been free for long enough to be offered.
    is_cold: &'walk dyn Fn(&Slot) -> bool,
    /// Bytes offered so far.
    bytes: u64,
    /// The kernel has refused an offer.
    is_refused: bool,
}

impl OfferWalk<'_> {
    /// Records `result`, which [`Arena::offer`](pagemill_core::arena::Arena) returned for a slot or block. Returns
    /// whether the slot or block is offered now.
    fn record(&mut self, result: Option<u64>) -> bool {
        self.is_refused |= result.is_none();
        self.bytes += result.unwrap_or(0);
        result.is_some_and(|bytes| bytes > 0)
    }
}

/// Returns whether the slot was never allocated, or is free and offered. The slot is neither live nor claimed.
fn has_only_offered_memory(slot: &Slot) -> bool {
    slot.phase() != SlotPhase::Free || slot.is_offered()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::test_process::TestProcess;
    use pagemill_core::arena::Layout;
    use pagemill_core::reclaim::{Shrinker, Urgency};
    use pagemill_core::stats::{self, Counter};
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

    fn allocate(pagemill: &TestProcess, len: usize, tag: u64) -> usize {
        let addr = pagemill.heap.allocate(len, 16).unwrap().addr.as_ptr() as usize;
        fill(addr, len, tag);
        addr
    }

    fn free(pagemill: &TestProcess, addr: usize) {
        // SAFETY: the test is done with it.
        unsafe { pagemill.heap.free(addr) }.unwrap();
    }

    /// Makes the kernel reclaim the heap zone as under memory pressure, so that it takes offered memory.
    fn make_kernel_reclaim(pagemill: &TestProcess) {
        mem::reclaim(pagemill.heap.base(), pagemill.arena.heap.carved_bytes());
    }

    /// Frees slots in shared blocks and a big slot, offers all free memory twice, and lets the kernel take it. Only the
    /// first call may offer memory. The charge for the memory must end, and all slots must be usable afterwards.
    #[test]
    fn offered_slots_can_be_taken_and_reused() {
        let pagemill = TestProcess::for_test();
        let shared: Vec<_> = (0..32).map(|tag| allocate(pagemill, 256 * KIB, tag)).collect();
        let big = allocate(pagemill, 8 * MIB, 99);
        let kept = allocate(pagemill, 3 * MIB, 7);
        let freed = std::time::Instant::now();
        shared.iter().for_each(|addr| free(pagemill, *addr));
        free(pagemill, big);
        let heap = pagemill.heap;
        let cold = heap.offer_free(u64::MAX, Which::Cold);
        assert!(cold == 0 || freed.elapsed().as_millis() > 60, "nothing is cold that was free just now");
        let offered = cold + heap.offer_from_age_group(u64::MAX, 0);
        assert_eq!((offered, heap.offer_from_age_group(u64::MAX, 0)), (16 * MIB as u64, 0), "offered once");
        assert_eq!(heap.free_bytes(), offered);

        let (resident, taken) = (pagemill.account.resident(), stats::get(Counter::Taken));
        make_kernel_reclaim(pagemill);
        heap.offers.reap_after_ns.store(1, Relaxed);
        heap.reap_offered();
        if stats::get(Counter::Taken) == taken {
            println!("skipped: this kernel takes nothing when asked to");
            return;
        }
        assert_eq!((heap.free_bytes(), heap.offers.reap_after_ns.load(Relaxed)), (0, 0));
        assert_eq!(pagemill.account.resident(), resident - offered);
        let again: Vec<_> = (0..32).map(|tag| allocate(pagemill, 256 * KIB, tag)).collect();
        assert!((0..).zip(&again).all(|(tag, addr)| is_filled(*addr, 256 * KIB, tag)));
        assert!(is_filled(kept, 3 * MIB, 7), "what is in use is kept");
        let zeroed = heap.allocate_zeroed(8 * MIB, 16).unwrap().as_ptr() as usize;
        assert!(is_filled(zeroed, 8 * MIB, 0));
    }

    /// Offers free slots that reach into two blocks, and lets the kernel take their memory. Afterwards no free bytes
    /// may be counted and no bytes may be charged.
    #[test]
    fn straddling_slots_are_reaped() {
        let pagemill = TestProcess::for_test();
        let heap = pagemill.heap;
        let fallbacks = stats::get(Counter::BlocksFallback);
        for len in [1792 * KIB, 80 * KIB, 640 * KIB] {
            let held: Vec<_> = (0..24).map(|tag| allocate(pagemill, len, tag)).collect();
            held.iter().for_each(|addr| free(pagemill, *addr));
            if stats::get(Counter::BlocksFallback) > fallbacks {
                return println!("skipped: no huge pages to be had");
            }
            let offered = heap.offer_from_age_group(u64::MAX, 0);
            assert!(offered >= 24 * len as u64, "{offered} of 24 x {len}");
            let taken = stats::get(Counter::Taken);
            make_kernel_reclaim(pagemill);
            heap.offers.reap_after_ns.store(1, Relaxed);
            heap.reap_offered();
            if stats::get(Counter::Taken) == taken {
                return println!("skipped: this kernel takes nothing when asked to");
            }
            assert_eq!((heap.free_bytes(), heap.offers.reap_after_ns.load(Relaxed)), (0, 0), "{len}");
            assert_eq!(pagemill.account.resident(), 0, "{len}");
        }
    }

    /// The kernel takes the memory of offered slots, which are allocated again before the next walk. Their memory must
    /// be charged once only, and the account must stay below its limit.
    #[test]
    fn reused_taken_memory_is_charged_once() {
        let (small, big) = (256 * KIB, 8 * MIB);
        let pagemill = TestProcess::new(Layout::for_test(), 24 * MIB as u64).unwrap();
        let shared: Vec<_> = (0..32).map(|tag| allocate(pagemill, small, tag)).collect();
        let own = allocate(pagemill, big, 1);
        shared.iter().for_each(|addr| free(pagemill, *addr));
        free(pagemill, own);
        assert_eq!(pagemill.heap.offer_from_age_group(u64::MAX, 0), 16 * MIB as u64);
        let taken = stats::get(Counter::Taken);
        make_kernel_reclaim(pagemill);
        assert_eq!(allocate(pagemill, big, 2), own);
        if stats::get(Counter::Taken) == taken {
            return println!("skipped: this kernel takes nothing when asked to");
        }
        (0..32).for_each(|tag| _ = allocate(pagemill, small, tag));
        pagemill.account.reconcile();
        let resident = pagemill.account.resident();
        assert_eq!(resident, 16 * MIB as u64, "charged once");
        assert!(pagemill.heap.allocate(9 * MIB, 16).is_ok(), "overcommitted");
        pagemill.account.reconcile();
        assert!(pagemill.account.resident() <= 24 * MIB as u64);
    }

    /// Offers a slot whose pages are locked in memory. The kernel must refuse the offer, and the heap must not offer
    /// memory again for a while.
    #[test]
    fn locked_memory_is_not_offered() {
        let pagemill = TestProcess::for_test();
        let held: Vec<_> = (0..16).map(|tag| allocate(pagemill, 256 * KIB, tag)).collect();
        // A direct system call, because the `mlock` of sanitizers does nothing.
        // SAFETY: the call locks pages that the test allocated.
        if unsafe { libc::syscall(libc::SYS_mlock, held[0], 256 * KIB) } != 0 {
            return println!("skipped: nothing may be locked here");
        }
        held.iter().for_each(|addr| free(pagemill, *addr));
        pagemill.heap.offer_from_age_group(u64::MAX, 0);
        assert!(pagemill.heap.offers.refused_until_ns.load(Relaxed) > clock::fine_ns());
        assert_eq!(pagemill.heap.offer_free(u64::MAX, Which::All), 0);
    }

    /// Offers a free slot, and allocates and writes it again. The kernel must not take the slot's memory. After the
    /// slot was freed, it must be possible to offer it again.
    #[test]
    fn reused_slot_is_not_taken() {
        let pagemill = TestProcess::for_test();
        let first = allocate(pagemill, 4 * MIB, 1);
        free(pagemill, first);
        assert_eq!(pagemill.heap.offer_from_age_group(u64::MAX, 0), 4 * MIB as u64);
        assert_eq!(allocate(pagemill, 4 * MIB, 2), first);
        make_kernel_reclaim(pagemill);
        assert!(is_filled(first, 4 * MIB, 2));
        free(pagemill, first);
        assert_eq!(pagemill.heap.offer_from_age_group(u64::MAX, 0), 4 * MIB as u64);
    }

    /// Threads allocate, check and free slots while another thread constantly offers free memory and makes the kernel
    /// take it. No bytes of a live slot may be lost. At the end the heap's free bytes must equal the sum over its
    /// slots.
    #[test]
    fn threads_keep_live_slots_during_offers() {
        let layout = Layout { huge_from_bytes: 8 * MIB as u64, ..Layout::for_test() };
        let pagemill = TestProcess::new(layout, u64::MAX).unwrap();
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
                    pagemill.heap.offer_from_age_group(u64::MAX, 0);
                    make_kernel_reclaim(pagemill);
                    pagemill.heap.offers.reap_after_ns.fetch_min(1, Relaxed);
                    pagemill.heap.reap_offered();
                }
            });
            let results: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
            is_over.store(true, Relaxed);
            assert!(results.iter().all(Result::is_ok));
        });
        let (heap, free_bytes) = (pagemill.heap, pagemill.heap.free_bytes());
        let mut counted = 0;
        for place in heap.spans().flat_map(|span| heap.carved_slots(span)) {
            counted += heap.slot(place.number).bytes().counted_bytes();
        }
        assert_eq!(counted, free_bytes, "the count of free bytes drifted");
        heap.shrink(u64::MAX, Urgency::Limit);
        assert_eq!(heap.free_bytes(), 0);
        assert!(pagemill.account.resident() == 0, "{} bytes are charged still", pagemill.account.resident());
    }
}
