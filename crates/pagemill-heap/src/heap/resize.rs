//! Changes the size of an allocation: in place, by moving pages, or by copying bytes.
#![allow(unsafe_code)] // moves and copies slots

use super::slot::SlotBytes;
use super::{Heap, InitialContents, LocatedSlot};
use pagemill_core::arena::block::Backing;
use pagemill_core::error::Result;
use pagemill_core::stats::{self, Counter};
use pagemill_core::units::BLOCK_BYTES;
use std::ptr::NonNull;

/// From this size pages are moved. Below, copying two blocks is as fast as the system calls.
const MOVE_FROM_BYTES: usize = 2 * BLOCK_BYTES;

impl Heap {
    /// Resizes the allocation at `addr` to `size` bytes (at least 64 KiB). Contents up to the smaller size stay.
    ///
    /// Works in place if the slot is large enough and not far too large. Otherwise the bytes move to another slot: from
    /// 4 MiB up as pages (1.8 us per 2 MiB) where the kernel can.
    ///
    /// # Errors
    ///
    /// As [`Heap::allocate`] and [`Heap::free`]; the allocation is unchanged then.
    ///
    /// # Safety
    ///
    /// The program must not use the allocation meanwhile, nor the old address afterwards if another is returned.
    pub unsafe fn resize(&self, addr: usize, size: usize) -> Result<NonNull<u8>> {
        let old = self.find_live(addr)?;
        let old_bytes = old.class.bytes();
        let here = || NonNull::new(addr as *mut u8).ok_or(pagemill_core::error::Error::NotAllocated { addr });
        if size <= old_bytes && (size * 2 > old_bytes || old.class.is_big()) {
            if old.class.is_big() {
                self.trim(old, size);
            }
            return here();
        }
        let new = match self.allocate_with(size, 1, InitialContents::Zero) {
            Ok(new) => new,
            // A shrink never fails: it can stay where it is.
            Err(_) if size <= old_bytes => return here(),
            Err(error) => return Err(error),
        };
        let target = self.find_live(new.addr.as_ptr() as usize)?;
        let keep = size.min(old_bytes);
        // SAFETY: both slots are live and not used by any thread meanwhile.
        let moved = if new.is_zero { unsafe { self.move_blocks(old, target, keep) } } else { 0 };
        if moved < keep {
            // SAFETY: as above; the slots do not overlap.
            unsafe {
                std::ptr::copy_nonoverlapping((addr + moved) as *const u8, new.addr.as_ptr().add(moved), keep - moved)
            };
            stats::add(Counter::ReallocCopied, (keep - moved) as u64);
        }
        self.free_place(old, SlotBytes::USED)?;
        Ok(new.addr)
    }

    /// Gives back whole blocks that a shrunken big slot does not need. They stay open: the program may use all of its slot.
    fn trim(&self, place: LocatedSlot, size: usize) {
        let kept = size.max(1).div_ceil(BLOCK_BYTES);
        let first = self.arena.block_of(place.addr);
        if kept < place.class.span_blocks() {
            // SAFETY: the program gave up these bytes of its slot.
            unsafe { self.arena.renew(first + kept, place.class.span_blocks() - kept) };
        }
    }

    /// Moves whole blocks from one slot to another without memory; returns the bytes moved.
    ///
    /// # Safety
    ///
    /// Both slots are live and not used by any thread meanwhile.
    unsafe fn move_blocks(&self, old: LocatedSlot, new: LocatedSlot, keep: usize) -> usize {
        let blocks = keep / BLOCK_BYTES;
        if keep < MOVE_FROM_BYTES || !old.class.is_big() || !new.class.is_big() {
            return 0;
        }
        let (from, to) = (self.arena.block_of(old.addr), self.arena.block_of(new.addr));
        let is_untouched = |block| {
            let state = self.arena.peek(block);
            state.backing == Backing::Lazy && state.charged_pages == 0
        };
        if !(to..to + blocks).all(is_untouched) {
            return 0;
        }
        // SAFETY: guaranteed by the caller; the target was never touched.
        let moved = unsafe { self.arena.move_blocks(to, from, blocks) }.unwrap_or(0);
        stats::add(Counter::ReallocMoved, moved as u64);
        moved
    }
}
