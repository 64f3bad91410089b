//! Serves new allocations from the memory of free slots of other sizes, so that the resident size does not grow.
//!
//! A slot without memory gets the blocks of free slots. They are moved, not copied: some 5 us per 2 MiB in total, where
//! a page fault costs 190. Where pages cannot be moved, or must be zero, the account gives back cold free memory
//! instead, as much as becomes resident.
//!
//! Donors are searched round robin, a few spans at a time, on the same node. Moved memory is not zero: every slot that
//! reaches into the block is claimed meanwhile and marked accordingly.
#![allow(unsafe_code)] // moves pages between slots

use super::purge::Span;
use super::slot::{SlotBytes, SlotPhase, Slots};
use super::{Heap, LocatedSlot};
use pagemill_core::arena::Filling;
use pagemill_core::arena::block::Backing;
use pagemill_core::error::Result;
use pagemill_core::stats::{self, Counter};
use pagemill_core::units::BLOCK_BYTES;
use pagemill_sys::clock;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

const EPERM: i32 = 1;
const ENOSYS: i32 = 38;

/// Maximum number of spans examined for one recipient: some 50 us if all of them are in use.
const MAX_LOOKS: usize = 256;

/// After an unsuccessful search the next one waits this many times its duration: free memory may lie in pieces.
const VAIN_FACTOR: u64 = 20;

/// The destination of moved memory.
struct Recipient {
    node: usize,
    /// The next block, and how many more.
    to: usize,
    blocks: usize,
    /// A move may stop inside a block, which is not zero then.
    done_bytes: usize,
}

impl Recipient {
    /// Whether it can take more: after a move that stopped inside a block nothing can follow.
    fn is_open(&self) -> bool {
        self.blocks > 0 && self.done_bytes.is_multiple_of(BLOCK_BYTES)
    }

    fn note(&mut self, moved_bytes: usize) {
        self.done_bytes += moved_bytes;
        self.to += moved_bytes / BLOCK_BYTES;
        self.blocks -= moved_bytes / BLOCK_BYTES;
    }
}

impl Heap {
    /// Moves blocks of free slots into the unbacked blocks of a live big slot. Returns the bytes moved; the slot is not
    /// zero then.
    pub(super) fn refill(&self, place: LocatedSlot, size: usize) -> usize {
        let first = self.arena.block_of(place.addr);
        let (mut at, end) = (first, first + size / BLOCK_BYTES);
        let is_untouched = |block: &usize| {
            let state = self.arena.peek(*block);
            state.backing == Backing::Lazy && state.charged_pages == 0
        };
        if !self.may_have_donors() || !(at..end).any(|block| is_untouched(&block)) {
            return 0;
        }
        let Some(_guard) = self.purging.try_lock() else { return 0 };
        let mut moved_bytes = 0;
        while at < end {
            let blocks = (at..end).take_while(is_untouched).count();
            let mut recipient = Recipient { node: place.node, to: at, blocks, done_bytes: 0 };
            self.collect(&mut recipient);
            moved_bytes += recipient.done_bytes;
            if blocks > 0 && recipient.blocks > 0 {
                break;
            }
            at += blocks.max(1);
        }
        moved_bytes
    }

    /// Moves a block of free slots into an empty block that several slots share. Returns whether anything was moved;
    /// then none of these slots is zero. After a move that stopped in the middle the block still counts as empty.
    pub(super) fn recycle_block(&self, place: LocatedSlot, block: usize, filling: Filling) -> bool {
        if !self.may_have_donors() || !self.arena.may_take_huge(filling) {
            return false;
        }
        let Some(_guard) = self.purging.try_lock() else { return false };
        let Some(span) = self.span_of(place) else { return false };
        // Another thread may be about to use one of them and rely on zeros: give up then.
        let Some(others) = self.claim_others(span, block, Some(place.number), |_| true) else { return false };
        let mut recipient = Recipient { node: place.node, to: block, blocks: 1, done_bytes: 0 };
        if self.arena.peek(block).backing == Backing::Empty {
            self.collect(&mut recipient);
        }
        for (index, claim) in others.indices() {
            let claim = if recipient.done_bytes > 0 { claim.stale() } else { claim };
            self.restore(self.place_at(span, index), claim, claim.bytes());
        }
        recipient.done_bytes > 0
    }

    fn may_have_donors(&self) -> bool {
        self.can_refill.load(Relaxed)
            && self.free_bytes() >= BLOCK_BYTES as u64
            && clock::fine_ns() >= self.donors_after_ns.load(Relaxed)
    }

    /// The span that contains a slot.
    pub(super) fn span_of(&self, place: LocatedSlot) -> Option<Span> {
        let block = (place.addr - self.base()) / BLOCK_BYTES;
        let starts = (block + 1).saturating_sub(place.class.span_blocks())..block + 1;
        let is_start = |block: &usize| self.spans.get(*block).load(Relaxed) as usize == place.class.index() + 1;
        let start = starts.rev().find(is_start)?;
        Some(Span { start: self.base() + start * BLOCK_BYTES, class: place.class })
    }

    /// Searches donors from where the last search stopped, at most one round. The caller holds `purging`.
    fn collect(&self, recipient: &mut Recipient) {
        if recipient.blocks == 0 {
            return;
        }
        let (begun_ns, end, mut looks) = (clock::fine_ns(), self.zone_blocks(), 0);
        let start = self.donor_at.load(Relaxed).min(end);
        let mut look = |span: Span| {
            looks += 1;
            self.donor_at.store((span.start - self.base()) / BLOCK_BYTES, Relaxed);
            if span.class.is_big() {
                self.donate_slot(span, recipient);
            } else {
                self.donate_blocks(span, recipient);
            }
            recipient.is_open() && looks < MAX_LOOKS && self.can_refill.load(Relaxed)
        };
        let _ = self.walk_in(start..end, &mut look) && self.walk_in(0..start, &mut look);
        if recipient.done_bytes == 0 {
            let now = clock::fine_ns();
            self.donors_after_ns.store(now + (now - begun_ns) * VAIN_FACTOR, Relaxed);
        }
        stats::add(Counter::Refilled, recipient.done_bytes as u64);
    }

    /// Moves whole blocks of a free big slot.
    fn donate_slot(&self, span: Span, recipient: &mut Recipient) {
        let Some(donor) = self.slot_at(span, 0).filter(|donor| donor.node == recipient.node) else { return };
        let slot = self.slot(donor.number);
        if slot.phase() != SlotPhase::Free {
            return;
        }
        let Some(claim) = slot.try_claim() else { return };
        if claim.phase() != SlotPhase::Free {
            return slot.restore(claim, claim.bytes());
        }
        let blocks = self.arena.block_of(donor.addr)..self.arena.block_of(donor.addr) + donor.class.span_blocks();
        if claim.bytes().is_offered {
            self.arena.note_taken(blocks.start, blocks.len());
        }
        let has_moved = self.donate_runs(blocks.clone(), recipient);
        let is_zero = blocks.clone().all(|block| self.arena.peek(block).backing == Backing::Empty);
        let bytes = SlotBytes { is_resident: !is_zero, is_zero, ..SlotBytes::default() };
        self.restore(donor, claim, if has_moved { bytes } else { claim.bytes() });
    }

    /// Moves runs of fully resident blocks. Returns whether anything was moved.
    fn donate_runs(&self, blocks: Range<usize>, recipient: &mut Recipient) -> bool {
        let (before, mut at) = (recipient.done_bytes, blocks.start);
        while at < blocks.end && recipient.is_open() {
            let run = (at..blocks.end).take(recipient.blocks).take_while(|block| self.is_whole(*block)).count();
            // SAFETY: the donor is claimed; the target is live or claimed, and no program knows its address yet.
            if run > 0 && unsafe { !self.give_to(recipient, at, run) } {
                break;
            }
            at += run.max(1);
        }
        recipient.done_bytes > before
    }

    /// Moves blocks shared by several slots, if all of them are free.
    fn donate_blocks(&self, span: Span, recipient: &mut Recipient) {
        if self.slot_at(span, 0).is_none_or(|first| first.node != recipient.node) {
            return;
        }
        let first = self.arena.block_of(span.start);
        for block in first..first + span.class.span_blocks() {
            if !recipient.is_open() || !self.is_whole(block) {
                continue;
            }
            let Some(claims) = self.claim_block(span, block, |_| true) else { continue };
            if claims.iter().any(|claim| claim.bytes().is_offered) {
                self.arena.note_taken(block, 1);
            }
            if self.is_whole(block) {
                // SAFETY: every slot that reaches into the block is claimed; the target as above.
                unsafe { self.give_to(recipient, block, 1) };
            }
            self.restore_all(span, block, &claims);
        }
    }

    /// Moves whole blocks to the recipient. Returns whether all of them were moved.
    ///
    /// # Safety
    ///
    /// No thread uses the bytes of these blocks, nor of the recipient's.
    unsafe fn give_to(&self, recipient: &mut Recipient, from: usize, blocks: usize) -> bool {
        // SAFETY: guaranteed by the caller.
        let result: Result<usize> = unsafe { self.arena.move_blocks(recipient.to, from, blocks) };
        let moved = *result.as_ref().unwrap_or(&0);
        recipient.note(moved);
        // Missing system call or a seccomp filter: permanent. Busy or locked pages, several mappings: this donor only.
        let is_for_good = result.is_err_and(|error| [EPERM, ENOSYS].contains(&error.errno()));
        self.can_refill.fetch_and(!is_for_good, Relaxed);
        moved == blocks * BLOCK_BYTES
    }

    /// Whether all OS pages of a block are resident.
    fn is_whole(&self, block: usize) -> bool {
        self.arena.peek(block).charged_pages as usize == pagemill_core::units::os_pages_per_block()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::test_process::TestProcess;
    use pagemill_core::reclaim::{Shrinker, Urgency};

    const KIB: usize = 1 << 10;
    const MIB: u64 = 1 << 20;

    fn allocate(pagemill: &TestProcess, len: usize) -> usize {
        let addr = pagemill.heap.allocate(len, 16).unwrap().addr.as_ptr() as usize;
        // SAFETY: allocated just now.
        unsafe { std::ptr::write_bytes(addr as *mut u8, 0xAB, len) };
        addr
    }

    fn free(pagemill: &TestProcess, addr: usize) {
        // SAFETY: the test is done with it.
        unsafe { pagemill.heap.free(addr) }.unwrap();
    }

    fn is_zero(addr: usize, len: usize) -> bool {
        // SAFETY: a live allocation of the test.
        unsafe { std::slice::from_raw_parts(addr as *const u8, len) }.iter().all(|byte| *byte == 0)
    }

    /// Bytes that were moved while `act` ran; tests that run concurrently may add to it.
    fn refilled(act: impl FnOnce()) -> u64 {
        let before = stats::get(Counter::Refilled);
        act();
        stats::get(Counter::Refilled) - before
    }

    /// Free blocks of one class serve another, shared and big ones alike: the resident size does not grow.
    #[test]
    fn free_memory_of_one_size_serves_others() {
        if pagemill_sys::moves::can_move().is_err() {
            return println!("skipped: this kernel moves no pages");
        }
        for (from, to) in
            [(256 * KIB, 512 * KIB), (256 * KIB, 4096 * KIB), (4096 * KIB, 320 * KIB), (640 * KIB, 896 * KIB)]
        {
            let pagemill = TestProcess::for_test();
            let held: Vec<_> = (0..(24 << 20) / from).map(|_| allocate(pagemill, from)).collect();
            held.into_iter().for_each(|addr| free(pagemill, addr));
            // Small pages are charged only when measured.
            pagemill.account.reconcile();
            let resident = pagemill.account.resident();
            let moved = refilled(|| (0..(12 << 20) / to).for_each(|_| _ = allocate(pagemill, to)));
            assert!(moved >= 8 * MIB, "{from} to {to}: {moved}");
            pagemill.account.reconcile();
            let grown = pagemill.account.resident().saturating_sub(resident);
            assert!(grown <= 2 * MIB, "{from} to {to}: {grown} more than {resident}");
        }
    }

    /// Slots in a block with moved memory are not treated as zero, whether never allocated or free and known zero
    /// before.
    #[test]
    fn recycled_memory_is_not_taken_for_zero() {
        let pagemill = TestProcess::for_test();
        let heap = pagemill.heap;
        // Known to be zero: purged while free.
        let known: Vec<_> = (0..3).map(|_| allocate(pagemill, 512 * KIB)).collect();
        known.into_iter().for_each(|addr| free(pagemill, addr));
        heap.shrink(u64::MAX, Urgency::Limit);
        let donors: Vec<_> = (0..32).map(|_| allocate(pagemill, 256 * KIB)).collect();
        donors.into_iter().for_each(|addr| free(pagemill, addr));
        // The first takes a block of the donors; some of the others were free, some never allocated.
        for _ in 0..8 {
            let addr = heap.allocate_zeroed(512 * KIB, 16).unwrap().as_ptr() as usize;
            assert!(is_zero(addr, 512 * KIB));
        }
        for _ in 0..12 {
            let addr = heap.allocate_zeroed(640 * KIB, 16).unwrap().as_ptr() as usize;
            assert!(is_zero(addr, 640 * KIB), "in a block that two slots share");
        }
    }
}
