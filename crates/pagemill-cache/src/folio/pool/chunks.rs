//! The chunks of a pool: a chunk without memory is claimed, made resident, and published as a free chunk.
#![allow(unsafe_code)] // makes chunks resident

use super::{NewFolio, Pool, PoolState};
use crate::folio::frame::Frame;
use crate::folio::word::Kind;
use pagemill_core::error::Result;
use pagemill_core::sync::{Backoff, Relaxed};
use pagemill_core::units::BLOCK_BYTES;

/// The table of frames is allowed to use huge pages once this many bytes of it are in use.
const HUGE_FRAMES_BYTES: usize = BLOCK_BYTES / 2;

/// Bytes of the pool's address range that are opened (counted as committed by the system) in one step.
const OPEN_STEP_BYTES: usize = 32 * BLOCK_BYTES;

impl Pool {
    /// Makes a chunk resident and allocates from it, unless other threads free enough pages meanwhile.
    pub(super) fn allocate_from_new_chunk(&self, order: u8) -> Result<NewFolio> {
        debug_assert!(order <= self.chunk_order, "a folio fits into a chunk");
        let mut backoff = Backoff::new();
        let chunk = loop {
            let claimed = self.claim_empty_chunk();
            if let Ok(Some(chunk)) = claimed {
                break chunk;
            }
            // Another thread may use only a part of the chunk that it brings in.
            if let Some(taken) = self.allocate_free(order) {
                return Ok(taken);
            }
            claimed?;
            backoff.pause();
        };
        if let Err(error) = self.fill_chunk(chunk) {
            self.return_claimed_chunk(chunk);
            // Another thread may have freed pages meanwhile.
            return self.allocate_free(order).ok_or(error);
        }
        // The lock is held from the publication to the allocation, so no other thread can have allocated from the
        // chunk.
        self.note_chunk_missed();
        let taken = self.publish_chunk(chunk, |state| state.buddies.allocate(&self.frames, order));
        taken.map(|(number, is_zero)| NewFolio { number, order, is_zero }).ok_or_else(|| self.pool_full_error())
    }

    /// Makes a chunk resident that this thread has claimed.
    ///
    /// # Errors
    ///
    /// If the process gets no memory; the chunk is empty then.
    fn fill_chunk(&self, chunk: u32) -> Result<()> {
        let (first_block, blocks) = self.blocks_of(chunk);
        // SAFETY: the blocks of a chunk that this thread has claimed, which is empty.
        unsafe { self.populate(first_block, blocks, self.arena.allows_huge(self.use_huge.load(Relaxed))) }
    }

    /// As [`Pool::fill_chunk`] for a chunk that will be needed soon. Never reclaims. Returns false, with the chunk
    /// still empty, if there is too little room or the kernel has no page.
    pub(super) fn fill_chunk_ahead(&self, chunk: u32) -> bool {
        let (first_block, blocks) = self.blocks_of(chunk);
        // SAFETY: the blocks of a chunk that this thread has claimed, which is empty.
        unsafe { self.populate_ahead(first_block, blocks, self.arena.allows_huge(self.use_huge.load(Relaxed))) }
    }

    /// Makes a chunk that this thread has claimed and filled a free chunk, and calls `act` before the lock `state` is
    /// released.
    pub(super) fn publish_chunk<R>(&self, chunk: u32, act: impl FnOnce(&mut PoolState) -> R) -> R {
        let number = chunk << self.chunk_order;
        let wants_huge_frames = number as usize * size_of::<Frame>() >= HUGE_FRAMES_BYTES && self.arena.uses_huge();
        if wants_huge_frames && !self.has_huge_frames.swap(true, Relaxed) {
            self.frames.allow_huge();
        }
        (number..number + (1 << self.chunk_order)).for_each(|page| self.word(page).assign(Kind::Tail, 0));
        self.with_state(|state| {
            debug_assert!(state.chunks_in_transit > 0, "this chunk is in transit");
            state.chunks_in_transit -= 1;
            let filled = self.filled_chunks.fetch_add(1, Relaxed);
            debug_assert!(filled < self.max_chunks, "each chunk counts once");
            state.buddies.leases.note_filled(chunk, true);
            state.buddies.free(&self.frames, number, self.chunk_order, true);
            act(state)
        })
    }

    /// Claims a chunk without memory; the caller then makes the chunk resident. Returns `None` if there is none, but
    /// other threads are making chunks resident, or are returning chunks to the system.
    fn claim_empty_chunk(&self) -> Result<Option<u32>> {
        self.state.with(|state| match self.take_empty_chunk(state) {
            Ok(chunk) => Ok(Some(chunk)),
            Err(_) if state.chunks_in_transit > 0 => Ok(None),
            Err(error) => Err(error),
        })
    }

    /// Takes a chunk without memory. The chunk is in transit from then on.
    pub(super) fn take_empty_chunk(&self, state: &mut PoolState) -> Result<u32> {
        let chunk = match state.empty {
            Some(chunk) => {
                let next = self.frame(chunk << self.chunk_order).owner.load(Relaxed);
                debug_assert!(chunk < state.chunks, "a chunk in the list was opened");
                state.empty = u32::try_from(next).ok();
                chunk
            }
            None => self.open_next_chunk(state)?,
        };
        state.chunks_in_transit += 1;
        Ok(chunk)
    }

    /// Opens the first chunk that was never used: commits its frames, and opens its addresses. Returns its number.
    fn open_next_chunk(&self, state: &mut PoolState) -> Result<u32> {
        let chunk = state.chunks;
        if chunk == self.max_chunks {
            return Err(self.pool_full_error());
        }
        let pages = 1_usize << self.chunk_order;
        let next = chunk as usize * pages;
        self.frames.open(0, next, next + pages)?;
        self.scan_words.open(0, chunk as usize, chunk as usize + 1)?;
        // Addresses are opened in steps, because the system counts open memory as committed.
        let step = (OPEN_STEP_BYTES / self.chunk_bytes).max(1) as u32;
        if chunk.is_multiple_of(step) && self.is_opened_in_steps() {
            let len_bytes = step.min(self.max_chunks - chunk) as usize * self.chunk_bytes;
            // SAFETY: blocks of this pool, carved closed. The blocks of a chunk that was never used are opened here
            // only.
            unsafe { self.arena.open_blocks(self.addr(chunk << self.chunk_order), len_bytes) }?;
        }
        state.buddies.leases.commit_slot_state(chunk)?;
        state.chunks += 1;
        self.opened_pages.store(state.chunks << self.chunk_order, Relaxed);
        Ok(chunk)
    }

    /// Puts a chunk that this thread has claimed back into the list of chunks without memory.
    pub(super) fn return_claimed_chunk(&self, chunk: u32) {
        self.state.with(|state| {
            self.push_empty_chunk(state, chunk);
            state.chunks_in_transit -= 1;
        });
    }

    /// Adds a chunk to the list of chunks without memory.
    pub(super) fn push_empty_chunk(&self, state: &mut PoolState, chunk: u32) {
        debug_assert!(chunk < state.chunks && state.empty != Some(chunk), "the chunk is in no list");
        let next = state.empty.map_or(u64::MAX, u64::from);
        self.frame(chunk << self.chunk_order).owner.store(next, Relaxed);
        state.empty = Some(chunk);
    }
}
