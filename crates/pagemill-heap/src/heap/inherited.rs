//! Slots in a fork child: inherited memory is discarded before a slot is allocated again.
//!
//! The child shares the parent's pages until the child writes to them. Shared pages are charged to the parent. A slot
//! that was free at the fork gets new memory in the child. That memory is charged as usual, so limits apply, and purges
//! can free that memory.
#![allow(unsafe_code)] // discards the memory of slots that were just allocated

use super::slot::SlotBytes;
use super::{Heap, LocatedSlot};

impl Heap {
    /// Discards the inherited memory of a slot that was just allocated. Returns the new attributes of the slot's bytes.
    /// Does not discard blocks that the slot shares with live slots. The pages of those blocks are copied on write,
    /// without a charge.
    ///
    /// Cost: a read of each block's state word, and a system call for each block that is still inherited.
    #[cold]
    pub(super) fn discard_inherited(&self, place: LocatedSlot, bytes: SlotBytes) -> SlotBytes {
        let blocks = self.blocks_of(place);
        let mut inherited = blocks.clone().filter(|block| self.arena.block_state(*block).is_inherited).peekable();
        if inherited.peek().is_none() {
            return bytes;
        }
        if place.class.is_big() {
            // SAFETY: the slot was just allocated, shares no block, and has undefined contents.
            unsafe { self.arena.discard(blocks.start, blocks.len()) };
        } else if let Some(span) = self.span_of(place) {
            for block in inherited {
                if let Some(claims) = self.claim_block_except(span, block, Some(place.number), |_| true) {
                    self.discard_claimed_block(block, &claims);
                }
            }
        }
        self.bytes_after_discard(place, bytes)
    }
}
