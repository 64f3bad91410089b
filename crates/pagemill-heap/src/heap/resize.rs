//! Changes the size of an allocation: in place, by moving pages, or by copying bytes.
#![allow(unsafe_code)] // moves and copies slots

use super::slot::SlotBytes;
use super::{Heap, InitialContents, LocatedSlot};
use pagemill_core::error::Result;
use pagemill_core::stats::{self, Counter};
use pagemill_core::units::BLOCK_BYTES;
use std::ptr::NonNull;

/// From this number of bytes on, a resize moves pages instead of copying bytes. Copying fewer bytes is as fast as the
/// system calls.
const MIN_REMAP_BYTES: usize = 2 * BLOCK_BYTES;

impl Heap {
    /// Resizes the allocation at `addr` to at least `size` bytes. Contents up to the smaller size are preserved.
    ///
    /// The allocation stays where it is if `size` fits and uses more than half of the slot, or if a big slot shrinks.
    /// Otherwise a new slot is allocated and gets the contents: from 4 MiB on by moving pages if the kernel can, which
    /// takes 1.8 us for every 2 MiB, else by copying.
    ///
    /// # Errors
    ///
    /// As [`Heap::allocate`] and [`Heap::free`]. After an error the allocation is unchanged.
    ///
    /// # Safety
    ///
    /// No thread may use the allocation during the call, nor the old address afterwards if the returned one differs.
    pub unsafe fn resize(&self, addr: usize, size: usize) -> Result<NonNull<u8>> {
        let old = self.find_live(addr)?;
        let old_bytes = old.class.bytes();
        let here = || NonNull::new(addr as *mut u8).ok_or(pagemill_core::error::Error::NotAllocated { addr });
        if size <= old_bytes && (size * 2 > old_bytes || old.class.is_big()) {
            if old.class.is_big() {
                self.trim_big_slot(old, size);
            }
            return here();
        }
        let new = match self.allocate_with(size, 1, InitialContents::Zero) {
            Ok(new) => new,
            // Shrinking never fails, because the allocation can stay in its slot.
            Err(_) if size <= old_bytes => return here(),
            Err(error) => return Err(error),
        };
        let target = self.find_live(new.addr.as_ptr() as usize)?;
        let keep = size.min(old_bytes);
        debug_assert!(old.number != target.number, "the old slot is still live");
        debug_assert!(keep <= target.class.bytes(), "the contents fit");
        // SAFETY: both slots are live, and no thread uses them during the call.
        let moved = if new.is_zero { unsafe { self.move_blocks(old, target, keep) } } else { 0 };
        debug_assert!(moved <= keep);
        if moved < keep {
            if new.is_zero {
                // The slot may have no memory yet.
                self.arena.populate_pages(target.addr + moved, keep - moved);
            }
            // SAFETY: as above, and the slots do not overlap.
            unsafe {
                std::ptr::copy_nonoverlapping((addr + moved) as *const u8, new.addr.as_ptr().add(moved), keep - moved)
            };
            stats::add(Counter::ReallocCopied, (keep - moved) as u64);
        }
        self.free_slot(old, SlotBytes::USED)?;
        Ok(new.addr)
    }

    /// Returns the memory of whole blocks that a big slot does not need after it shrank. The blocks stay accessible,
    /// because the program may use all bytes of its slot.
    fn trim_big_slot(&self, place: LocatedSlot, size: usize) {
        debug_assert!(place.class.is_big() && size <= place.class.bytes());
        let kept = size.max(1).div_ceil(BLOCK_BYTES);
        let first = self.arena.block_of(place.addr);
        if kept < place.class.span_blocks() {
            // SAFETY: the program no longer needs the contents of the slot beyond `size`.
            unsafe { self.arena.discard_and_reopen(first + kept, place.class.span_blocks() - kept) };
        }
    }

    /// Moves the pages of the whole blocks in the first `keep` bytes from one big slot to another slot, whose memory
    /// was never touched. Returns the bytes moved; 0 if the pages cannot be moved.
    ///
    /// # Safety
    ///
    /// Both slots are live, and no thread uses them during the call.
    unsafe fn move_blocks(&self, old: LocatedSlot, new: LocatedSlot, keep: usize) -> usize {
        let blocks = keep / BLOCK_BYTES;
        if keep < MIN_REMAP_BYTES || !old.class.is_big() || !new.class.is_big() {
            return 0;
        }
        let (from, to) = (self.arena.block_of(old.addr), self.arena.block_of(new.addr));
        debug_assert!(blocks <= old.class.span_blocks() && blocks <= new.class.span_blocks());
        if !(to..to + blocks).all(|block| self.is_untouched_block(block)) {
            return 0;
        }
        // SAFETY: guaranteed by the caller, and the target has no memory.
        let moved = unsafe { self.arena.move_blocks(to, from, blocks) }.unwrap_or(0);
        stats::add(Counter::ReallocMoved, moved as u64);
        moved
    }
}
