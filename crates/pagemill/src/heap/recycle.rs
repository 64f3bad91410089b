//! Serving new allocations from the memory of free slots of other sizes, so that what is resident does not grow.
//!
//! A big slot with nothing behind it gets the huge pages of free slots: moved,
//! not copied (1.8 us per 2 MiB, where a page fault costs 190). Where pages
//! cannot be moved, or must be zero, the account has free memory that has been cold
//! for a while given back instead, as much as comes in anew.
#![allow(unsafe_code)] // moves pages between slots

use super::purge::Span;
use super::slot::{Bytes, Phase, Slots};
use super::{Heap, Place};
use crate::arena::block::Backing;
use crate::stats::{self, Counter};
use crate::units::BLOCK_BYTES;
use std::sync::atomic::Ordering::Relaxed;

const EPERM: i32 = 1;
const ENOSYS: i32 = 38;

impl Heap {
    /// Moves huge pages of free slots behind a fresh big slot. Returns whether it did: the slot is not zero then.
    pub(super) fn refill(&self, place: Place, size: usize) -> bool {
        let (first, blocks) = (self.arena.block_of(place.addr), size / BLOCK_BYTES);
        let is_untouched = |block| {
            let state = self.arena.peek(block);
            state.backing == Backing::Lazy && state.charged_pages == 0
        };
        if !self.can_refill.load(Relaxed)
            || self.free_bytes() < BLOCK_BYTES as u64
            || !(first..first + blocks).all(is_untouched)
        {
            return false;
        }
        let _guard = self.purging.lock();
        // In bytes: a move may stop inside a block, which is not zero then.
        let mut done = 0;
        self.walk(|span| {
            if span.class.is_big() {
                done += self.donate(span, first + done / BLOCK_BYTES, blocks - done / BLOCK_BYTES);
            }
            done < blocks * BLOCK_BYTES && done % BLOCK_BYTES == 0 && self.can_refill.load(Relaxed)
        });
        stats::add(Counter::Refilled, done as u64);
        done > 0
    }

    /// Moves up to `wanted` huge pages of a free big slot to the blocks from `to` on; returns how many bytes.
    fn donate(&self, span: Span, to: usize, wanted: usize) -> usize {
        let Some(donor) = self.slot_at(span, 0) else { return 0 };
        let slot = self.slot(donor.number);
        if slot.phase() != Phase::Free {
            return 0;
        }
        let Some(claim) = slot.try_claim() else { return 0 };
        let (first, blocks) = (self.arena.block_of(donor.addr), donor.class.span_blocks());
        if claim.bytes().is_offered {
            self.arena.note_taken(first, blocks);
        }
        let (mut done, mut bytes_done, mut at) = (0, 0, 0);
        // From run to run of blocks that are wholly there.
        while claim.phase() == Phase::Free && at < blocks && done < wanted {
            let run = (at..blocks).take(wanted - done).take_while(|index| self.is_whole(first + index)).count();
            if run > 0 {
                // SAFETY: the donor is claimed; the target is a live slot that its program does not know yet.
                let result = unsafe { self.arena.move_blocks(to + done, first + at, run) };
                let moved = *result.as_ref().unwrap_or(&0);
                done += moved / BLOCK_BYTES;
                bytes_done += moved;
                if moved < run * BLOCK_BYTES {
                    // No such call, or a filter: for good. Busy or locked pages, several mappings: this donor only.
                    let is_for_good = result.is_err_and(|error| [EPERM, ENOSYS].contains(&error.errno()));
                    self.can_refill.fetch_and(!is_for_good, Relaxed);
                    break;
                }
            }
            at += run.max(1);
        }
        let is_zero = (first..first + blocks).all(|block| self.arena.peek(block).backing == Backing::Empty);
        let bytes = Bytes { is_resident: !is_zero, is_zero, ..Bytes::default() };
        self.restore(donor, claim, if bytes_done > 0 { bytes } else { claim.bytes() });
        bytes_done
    }

    /// Whether all OS pages of a block are there.
    fn is_whole(&self, block: usize) -> bool {
        self.arena.peek(block).charged_pages as usize == crate::units::os_pages_per_block()
    }
}
