//! Slots in a fork child: memory of the parent's is discarded before a slot is allocated again.
//!
//! The child shares the parent's pages until it writes to them, and they are the parent's charge. A slot that was free at the
//! fork gets new memory in the child, which is charged like any other: so limits hold there, and purges find it later.
#![allow(unsafe_code)] // discards the memory of slots that were just taken

use super::slot::SlotBytes;
use super::{Heap, LocatedSlot};

impl Heap {
    /// Discards what is inherited behind a slot that was just taken. Returns what is known of the slot then. Blocks that the slot
    /// shares with slots in use stay as they are: their pages are copied as they are written, without a charge.
    ///
    /// Cost: a look at each block; in the first allocation from a block after the fork, a call of the kernel.
    #[cold]
    pub(super) fn discard_inherited(&self, place: LocatedSlot, bytes: SlotBytes) -> SlotBytes {
        let mut blocks = self.blocks_of(place);
        if !blocks.any(|block| self.arena.peek(block).is_inherited) {
            return bytes;
        }
        if place.class.is_big() {
            // SAFETY: the slot was just taken, its blocks are its own, and its contents are undefined.
            unsafe { self.arena.discard(self.arena.block_of(place.addr), place.class.span_blocks()) };
        } else if let Some(span) = self.span_of(place) {
            for block in self.blocks_of(place).filter(|block| self.arena.peek(*block).is_inherited) {
                if let Some(claims) = self.claim_others(span, block, Some(place.number), |_| true) {
                    self.empty_block(span, block, &claims);
                }
            }
        }
        self.known_after(place.addr, place.class, bytes)
    }
}
