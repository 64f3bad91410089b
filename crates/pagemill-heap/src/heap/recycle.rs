//! Recycling: provides memory for new allocations by moving pages from free slots, also from those of other classes.
//!
//! Moved pages do not increase the resident size. Moving 2 MiB costs some 5 us, a page fault of 2 MiB 190 us. If pages
//! cannot be moved, or if the new bytes must be zero, the account instead returns as much cold free memory as becomes
//! resident.
//!
//! The free slots that lose their pages are called *donors*. A search visits the spans round robin, examines a limited
//! number of them, and uses donors of the recipient's node only. Moved pages are not zero. So every slot that reaches
//! into the block is claimed during a move and recorded as not zero.
#![allow(unsafe_code)] // moves pages between slots

use super::purge::{Span, is_any_offered};
use super::slot::{SlotPhase, Slots};
use super::{Heap, LocatedSlot};
use pagemill_core::arena::ExpectedUse;
use pagemill_core::error::Result;
use pagemill_core::stats::{self, Counter};
use pagemill_core::units::{BLOCK_BYTES, os_page_bytes};
use pagemill_sys::clock;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

/// Maximum number of spans that one search examines. If all slots of these spans are in use, a search takes some 50 us.
const MAX_EXAMINED_SPANS: usize = 256;

/// After a search without a donor, no search starts for this many times its duration. Free memory may exist only in
/// blocks that live slots share.
const FAILED_SEARCH_PAUSE_FACTOR: u64 = 20;

/// The blocks into which a search for donors (free slots) moves pages, and its progress.
struct Recipient {
    node: usize,
    /// Index of the next block to fill.
    to: usize,
    /// Number of blocks left to fill.
    blocks: usize,
    /// Bytes moved so far. A move may stop inside a block.
    done_bytes: usize,
}

impl Recipient {
    /// Returns whether more pages can be moved into the recipient's blocks. False after a move that stopped inside a
    /// block.
    fn can_take_more(&self) -> bool {
        self.blocks > 0 && self.done_bytes.is_multiple_of(BLOCK_BYTES)
    }

    /// Advances the progress by `moved_bytes`. A block that was filled only in part stays the next block to fill.
    fn note_moved(&mut self, moved_bytes: usize) {
        debug_assert!(moved_bytes <= self.blocks * BLOCK_BYTES, "no more was moved than fits");
        debug_assert!(moved_bytes.is_multiple_of(os_page_bytes()), "whole pages were moved");
        self.done_bytes += moved_bytes;
        self.to += moved_bytes / BLOCK_BYTES;
        self.blocks -= moved_bytes / BLOCK_BYTES;
    }
}

impl Heap {
    /// Moves pages of free slots into those blocks of a live big slot that have no memory. Returns the bytes moved. If
    /// pages were moved, the slot's bytes are not zero.
    pub(super) fn move_free_pages_in(&self, place: LocatedSlot, size: usize) -> usize {
        debug_assert!(place.class.is_big() && size <= place.class.stride());
        let first = self.arena.block_of(place.addr);
        let (mut at, end) = (first, first + size / BLOCK_BYTES);
        if !self.may_have_donors() || !(at..end).any(|block| self.is_untouched_block(block)) {
            return 0;
        }
        let Some(_guard) = self.purging.try_lock() else { return 0 };
        let mut moved_bytes = 0;
        while at < end {
            let blocks = (at..end).take_while(|block| self.is_untouched_block(*block)).count();
            let mut recipient = Recipient { node: place.node, to: at, blocks, done_bytes: 0 };
            self.move_from_donors(&mut recipient);
            moved_bytes += recipient.done_bytes;
            if blocks > 0 && recipient.blocks > 0 {
                break;
            }
            at += blocks.max(1);
        }
        moved_bytes
    }

    /// Moves pages of free slots into an empty block that several slots share. Returns whether pages were moved: then
    /// all slots of the block are recorded as not zero. If the move stops inside the block, the block still counts as
    /// empty.
    pub(super) fn recycle_block(&self, place: LocatedSlot, block: usize, expected_use: ExpectedUse) -> bool {
        debug_assert!(!place.class.is_big(), "several slots share the block");
        if !self.may_have_donors() || !self.arena.may_take_huge(expected_use) {
            return false;
        }
        let Some(_guard) = self.purging.try_lock() else { return false };
        let Some(span) = self.span_of(place) else { return false };
        // If another thread is just allocating a slot of the block, that thread may rely on zeros: move nothing.
        let Some(others) = self.claim_block_except(span, block, Some(place.number), |_| true) else { return false };
        let mut recipient = Recipient { node: place.node, to: block, blocks: 1, done_bytes: 0 };
        if self.is_empty_block(block) {
            self.move_from_donors(&mut recipient);
        }
        for (place, claim) in others.into_iter().flatten() {
            let claim = if recipient.done_bytes > 0 { claim.as_nonzero() } else { claim };
            self.restore(place, claim, claim.bytes());
        }
        recipient.done_bytes > 0
    }

    /// Returns whether a search for donors (free slots that can lose their pages) may succeed now.
    fn may_have_donors(&self) -> bool {
        self.can_move_pages.load(Relaxed)
            && self.free_bytes() >= BLOCK_BYTES as u64
            && clock::fine_ns() >= self.next_donor_search_ns.load(Relaxed)
    }

    /// Returns the span that contains a slot.
    pub(super) fn span_of(&self, place: LocatedSlot) -> Option<Span> {
        let block = (place.addr - self.base()) / BLOCK_BYTES;
        let starts = (block + 1).saturating_sub(place.class.span_blocks())..block + 1;
        let is_start = |block: &usize| self.spans.get(*block).load(Relaxed) as usize == place.class.index() + 1;
        let start = starts.rev().find(is_start)?;
        debug_assert!(block < start + place.class.span_blocks(), "the slot starts in its span");
        Some(Span { start: self.base() + start * BLOCK_BYTES, class: place.class })
    }

    /// Searches for donors, starting where the last search stopped, and moves their pages to the recipient. The caller
    /// must hold `purging`.
    fn move_from_donors(&self, recipient: &mut Recipient) {
        debug_assert!(self.purging.is_held());
        if recipient.blocks == 0 {
            return;
        }
        let (begun_ns, end) = (clock::fine_ns(), self.carved_blocks());
        let start = self.donor_search_block.load(Relaxed).min(end);
        for span in self.spans_in(start..end).chain(self.spans_in(0..start)).take(MAX_EXAMINED_SPANS) {
            self.donor_search_block.store((span.start - self.base()) / BLOCK_BYTES, Relaxed);
            if span.class.is_big() {
                self.donate_slot(span, recipient);
            } else {
                self.donate_blocks(span, recipient);
            }
            if !recipient.can_take_more() || !self.can_move_pages.load(Relaxed) {
                break;
            }
        }
        if recipient.done_bytes == 0 {
            let now = clock::fine_ns();
            self.next_donor_search_ns.store(now + (now - begun_ns) * FAILED_SEARCH_PAUSE_FACTOR, Relaxed);
        }
        stats::add(Counter::Refilled, recipient.done_bytes as u64);
    }

    /// Moves the pages of whole blocks of a big slot to the recipient, if the slot is free.
    fn donate_slot(&self, span: Span, recipient: &mut Recipient) {
        debug_assert!(span.class.is_big());
        let Some(donor) = self.carved_slot_at(span, 0).filter(|donor| donor.node == recipient.node) else { return };
        let slot = self.slot(donor.number);
        if slot.phase() != SlotPhase::Free {
            return;
        }
        let Some(claim) = slot.try_claim_free() else { return };
        let blocks = self.blocks_of(donor);
        if claim.bytes().is_offered {
            self.arena.discharge_taken(blocks.start, blocks.len());
        }
        let has_moved = self.donate_runs(blocks.clone(), recipient);
        self.restore(donor, claim, if has_moved { self.bytes_of_emptied(blocks) } else { claim.bytes() });
    }

    /// Moves the pages of those of the `blocks` that are fully resident to the recipient, as many adjacent blocks at
    /// once as possible. Returns whether pages were moved.
    fn donate_runs(&self, blocks: Range<usize>, recipient: &mut Recipient) -> bool {
        let (before, mut at) = (recipient.done_bytes, blocks.start);
        while at < blocks.end && recipient.can_take_more() {
            let run =
                (at..blocks.end).take(recipient.blocks).take_while(|block| self.is_fully_resident(*block)).count();
            // SAFETY: the donor is claimed. The recipient is live or claimed, and its address was not returned yet.
            if run > 0 && unsafe { !self.move_to_recipient(recipient, at, run) } {
                break;
            }
            at += run.max(1);
        }
        recipient.done_bytes > before
    }

    /// Moves the pages of fully resident blocks of a span whose slots share blocks to the recipient. Skips blocks into
    /// which a live slot reaches.
    fn donate_blocks(&self, span: Span, recipient: &mut Recipient) {
        debug_assert!(!span.class.is_big());
        if self.carved_slot_at(span, 0).is_none_or(|first| first.node != recipient.node) {
            return;
        }
        for block in self.blocks_of_span(span) {
            if !recipient.can_take_more() || !self.is_fully_resident(block) {
                continue;
            }
            let Some(claims) = self.claim_block(span, block, |_| true) else { continue };
            if is_any_offered(&claims) {
                self.arena.discharge_taken(block, 1);
            }
            if self.is_fully_resident(block) {
                // SAFETY: every slot that reaches into the block is claimed. The recipient is live or claimed, and its
                // address was not returned yet.
                unsafe { self.move_to_recipient(recipient, block, 1) };
            }
            self.restore_claimed_slots(block, &claims);
        }
    }

    /// Moves the pages of `blocks` blocks from block `from` on to the recipient. Returns whether all pages were moved.
    ///
    /// # Safety
    ///
    /// No thread uses the bytes of these blocks or of the recipient's blocks.
    unsafe fn move_to_recipient(&self, recipient: &mut Recipient, from: usize, blocks: usize) -> bool {
        debug_assert!(blocks <= recipient.blocks && recipient.done_bytes.is_multiple_of(BLOCK_BYTES));
        // SAFETY: guaranteed by the caller.
        let result: Result<usize> = unsafe { self.arena.move_blocks(recipient.to, from, blocks) };
        let moved = *result.as_ref().unwrap_or(&0);
        recipient.note_moved(moved);
        // A missing system call or a seccomp filter is permanent. Other errors (busy or locked pages) concern this
        // donor.
        // `EPERM`: a filter forbids the system call. `ENOSYS`: the kernel does not have it.
        let is_for_good = result.is_err_and(|error| [libc::EPERM, libc::ENOSYS].contains(&error.errno()));
        self.can_move_pages.fetch_and(!is_for_good, Relaxed);
        moved == blocks * BLOCK_BYTES
    }

    /// Returns whether all OS pages of a block are resident.
    fn is_fully_resident(&self, block: usize) -> bool {
        self.arena.block_state(block).charged_pages as usize == pagemill_core::units::os_pages_per_block()
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

    /// Returns the bytes that were moved between slots while `act` ran, also those of tests that run concurrently.
    fn bytes_moved_by(act: impl FnOnce()) -> u64 {
        let before = stats::get(Counter::Refilled);
        act();
        stats::get(Counter::Refilled) - before
    }

    /// Frees slots of one class and allocates slots of another, for shared and for big slots. Pages must be moved, and
    /// the resident size must grow by 2 MiB at most.
    #[test]
    fn free_memory_of_one_class_serves_another() {
        if pagemill_sys::moves::can_move().is_err() {
            return println!("skipped: this kernel moves no pages");
        }
        for (from, to) in
            [(256 * KIB, 512 * KIB), (256 * KIB, 4096 * KIB), (4096 * KIB, 320 * KIB), (640 * KIB, 896 * KIB)]
        {
            let pagemill = TestProcess::for_test();
            let held: Vec<_> = (0..(24 << 20) / from).map(|_| allocate(pagemill, from)).collect();
            held.into_iter().for_each(|addr| free(pagemill, addr));
            // Small pages are charged only when they are measured.
            pagemill.account.reconcile();
            let resident = pagemill.account.resident();
            let moved = bytes_moved_by(|| (0..(12 << 20) / to).for_each(|_| _ = allocate(pagemill, to)));
            assert!(moved >= 8 * MIB, "{from} to {to}: {moved}");
            pagemill.account.reconcile();
            let grown = pagemill.account.resident().saturating_sub(resident);
            assert!(grown <= 2 * MIB, "{from} to {to}: {grown} more than {resident}");
        }
    }

    /// Moves pages into blocks whose other slots were never allocated or were known to be zero. `allocate_zeroed` must
    /// still return zeros from all of these slots.
    #[test]
    fn zeroed_allocations_after_recycling_are_zero() {
        let pagemill = TestProcess::for_test();
        let heap = pagemill.heap;
        // A purge discards these slots, so they are known to be zero.
        let known: Vec<_> = (0..3).map(|_| allocate(pagemill, 512 * KIB)).collect();
        known.into_iter().for_each(|addr| free(pagemill, addr));
        heap.shrink(u64::MAX, Urgency::Limit);
        let donors: Vec<_> = (0..32).map(|_| allocate(pagemill, 256 * KIB)).collect();
        donors.into_iter().for_each(|addr| free(pagemill, addr));
        // The first allocation gets pages of the donors. Its block has free slots and slots that were never allocated.
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
