//! Operations on blocks of the heap zone and of the pool zone: make resident, measure, move, discard.
//!
//! The callers own the blocks that they pass: those of a slot that is being allocated, of a slot that a purge has
//! claimed, or of unused pages of a cache. So discarding their contents is safe.
#![allow(unsafe_code)] // gives memory back to the kernel

use super::block::{Backing, BlockState};
use super::{Arena, Context, ExpectedUse, HugeUse};
use crate::error::{Error, Result};
use crate::stats::{self, Counter};
use crate::trace::{self, Event};
use crate::units::{BLOCK_BYTES, os_page_bytes, os_pages_per_block};
use pagemill_sys::{mem, memory_file, moves};
use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

/// Maximum number of blocks that one system call discards or moves. It bounds the time for which a call may block other
/// threads.
const MAX_BATCH_BLOCKS: usize = 32;

/// The kind of mapping that backs blocks of the pool zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Memory {
    /// Private anonymous memory.
    Private,
    /// A mapping of a memory file (`shared`).
    Shared,
}

impl Memory {
    /// Allocates pages of a block: all of them, or only the first one if the block is private and gets no huge page.
    fn populate_huge(self, addr: usize) -> io::Result<mem::Backing> {
        match self {
            Self::Private => mem::populate_huge(addr, BLOCK_BYTES),
            Self::Shared => memory_file::populate_huge(addr, BLOCK_BYTES),
        }
    }

    /// Frees the pages of a range.
    ///
    /// # Safety
    ///
    /// No code may need the contents or have a reference to them, in any mapping.
    unsafe fn discard(self, addr: usize, len_bytes: usize) -> io::Result<()> {
        match self {
            // SAFETY: guaranteed by the caller.
            Self::Private => unsafe { mem::discard(addr, len_bytes) },
            // SAFETY: guaranteed by the caller.
            Self::Shared => unsafe { memory_file::punch(addr, len_bytes) },
        }
    }
}

/// Makes reserved addresses readable and writable.
pub(super) fn make_accessible(addr: usize, len_bytes: usize) -> Result<()> {
    // SAFETY: these are unused addresses of the arena's own reservation.
    unsafe { mem::open(addr, len_bytes) }.map_err(Error::system("opening reserved memory"))
}

impl Arena {
    /// Makes an empty block usable. If [`Arena::may_take_huge`] allows a huge page, the block becomes resident as a
    /// huge page; otherwise the block is overcommitted.
    ///
    /// Does not wait for another thread that backs the same block, because the kernel provides the pages of an
    /// overcommitted block when they are touched.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`] if the limit has been reached.
    pub fn back_block(&self, block: usize, expected_use: ExpectedUse) -> Result<()> {
        debug_assert!(self.heap.contains(self.block_addr(block)), "the gauge of the heap counts the block");
        if self.block_state(block).backing != Backing::Empty {
            return Ok(());
        }
        if !self.may_take_huge(expected_use) {
            stats::add(Counter::BlocksSmall, 1);
            self.advise_pages(block, 1);
            return self.overcommit(block, 1, Context::Outside);
        }
        // Admission may purge, so it comes before the lock. Check the state again afterwards.
        if self.budget.admit(BLOCK_BYTES as u64, Context::Outside).is_err() {
            // A whole block exceeds the limit, but the part that the program will touch may fit.
            self.advise_pages(block, 1);
            return self.overcommit(block, 1, Context::Outside);
        }
        let mut locked = self.state_word(block).lock(&self.generation);
        if locked.state.backing == Backing::Empty {
            locked.state = self.populate_huge(block, Memory::Private);
            if locked.state.backing == Backing::Huge {
                Self::update_gauge(Counter::Heap, 0, locked.state.charged_pages);
                return Ok(());
            }
            // The block got no huge page and is overcommitted now. Its small pages are charged when measured.
            self.budget.reconciled(0, -(BLOCK_BYTES as i64));
        }
        drop(locked);
        self.budget.discharge(BLOCK_BYTES as u64);
        Ok(())
    }

    /// Makes all pages of empty blocks of the pool zone resident, with huge pages if wanted and available. The bytes
    /// read zero. Returns the number of huge pages. The caller must own the blocks.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`] if the blocks do not fit below the limit; [`Error::System`] if the kernel has no page. After
    /// an error all blocks are empty.
    ///
    /// # Safety
    ///
    /// The caller owns the blocks, and they contain no data.
    pub unsafe fn populate_blocks(&self, first: usize, blocks: usize, is_huge_wanted: bool) -> Result<usize> {
        self.budget.admit((blocks * BLOCK_BYTES) as u64, Context::Outside)?;
        // SAFETY: guaranteed by the caller.
        unsafe { self.populate_charged_blocks(first, blocks, is_huge_wanted, Memory::Private) }
    }

    /// As [`Arena::populate_blocks`], for blocks that will be needed soon. Never reclaims. Returns false, with the
    /// blocks still empty, if there is no room for twice their bytes or the kernel has no page.
    ///
    /// # Safety
    ///
    /// As [`Arena::populate_blocks`].
    pub unsafe fn populate_blocks_ahead(&self, first: usize, blocks: usize, is_huge_wanted: bool) -> bool {
        // SAFETY: guaranteed by the caller.
        unsafe { self.populate_ahead(first, blocks, is_huge_wanted, Memory::Private) }
    }

    /// As [`Arena::populate_blocks_ahead`], for blocks of the kind `memory`.
    ///
    /// # Safety
    ///
    /// As [`Arena::populate_blocks`]. The blocks are of the kind `memory`.
    pub(super) unsafe fn populate_ahead(
        &self,
        first: usize,
        blocks: usize,
        is_huge_wanted: bool,
        memory: Memory,
    ) -> bool {
        let is_in = self.budget.admit_without_reclaim((blocks * BLOCK_BYTES) as u64)
            // SAFETY: guaranteed by the caller.
            && unsafe { self.populate_charged_blocks(first, blocks, is_huge_wanted, memory) }.is_ok();
        if is_in {
            stats::add(Counter::BlocksPrefaulted, blocks as u64);
        }
        is_in
    }

    /// As [`Arena::populate_blocks`], for blocks of the kind `memory` that are charged already. After an error the
    /// charge has ended.
    ///
    /// # Safety
    ///
    /// As [`Arena::populate_blocks`]. The blocks are of the kind `memory`.
    pub(super) unsafe fn populate_charged_blocks(
        &self,
        first: usize,
        blocks: usize,
        is_huge_wanted: bool,
        memory: Memory,
    ) -> Result<usize> {
        debug_assert!(self.pool.contains(self.block_addr(first)));
        let mut huge = 0;
        for block in first..first + blocks {
            match self.populate_charged_block(block, is_huge_wanted && self.use_huge, memory) {
                Ok(is_huge) => huge += usize::from(is_huge),
                Err(error) => {
                    // SAFETY: the caller owns these blocks, and no data has been stored in them yet.
                    unsafe { self.discard_of(first, block - first, memory) };
                    self.budget.discharge(((first + blocks - block) * BLOCK_BYTES) as u64);
                    return Err(error);
                }
            }
        }
        Ok(huge)
    }

    /// Makes all pages of an empty block resident. The block must be charged already. Returns whether the block got a
    /// huge page.
    fn populate_charged_block(&self, block: usize, is_huge_wanted: bool, memory: Memory) -> Result<bool> {
        let mut locked = self.state_word(block).lock(&self.generation);
        debug_assert!(locked.state.backing == Backing::Empty, "the caller owns the block, which has no memory");
        let addr = self.block_addr(block);
        let state = if is_huge_wanted { self.populate_huge(block, memory) } else { BlockState::OVERCOMMITTED };
        if state.backing != Backing::Huge
            && let Err(cause) = mem::populate(addr, BLOCK_BYTES)
        {
            // SAFETY: the caller owns this block, and no data has been stored in it yet.
            let _ = unsafe { memory.discard(addr, BLOCK_BYTES) };
            return Err(self.populate_error(cause, memory));
        }
        locked.state = BlockState { charged_pages: os_pages_per_block() as u32, ..state };
        Self::update_gauge(self.gauge_of_block(block), 0, locked.state.charged_pages);
        Ok(state.backing == Backing::Huge)
    }

    /// Returns the error for a block that the kernel did not populate.
    fn populate_error(&self, cause: io::Error, memory: Memory) -> Error {
        match memory {
            Memory::Private => Error::System { doing: "bringing in pages", cause },
            // The file system is full, or the machine has no memory. The kernel reports both in several ways.
            Memory::Shared => {
                let (used_bytes, room_bytes) = self.budget.room();
                let limit_bytes = used_bytes.saturating_add(room_bytes);
                Error::NoMemory { wanted_bytes: BLOCK_BYTES as u64, used_bytes, limit_bytes }
            }
        }
    }

    /// Populates an empty block with a huge page, and returns the new state of the block. If no huge page is available,
    /// returns the state of an overcommitted block, for which the kernel provides small pages on touch.
    pub(super) fn populate_huge(&self, block: usize, memory: Memory) -> BlockState {
        let resident = self.budget.room().0;
        let (state, counter, event) = match memory.populate_huge(self.block_addr(block)) {
            Ok(mem::Backing::Huge) => (BlockState::huge(), Counter::BlocksHuge, Event::BlockHuge),
            Ok(mem::Backing::Small) | Err(_) => {
                (BlockState::OVERCOMMITTED, Counter::BlocksFallback, Event::BlockFallback)
            }
        };
        stats::add(counter, 1);
        trace::event(event, block as u64, resident);
        state
    }

    /// Overcommits the empty ones of `blocks` blocks, of which `first` is the first: the program may touch them without
    /// another charge.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`] if the limit has been reached.
    pub fn overcommit(&self, first: usize, blocks: usize, context: Context) -> Result<()> {
        let empty = (first..first + blocks).filter(|block| self.block_state(*block).backing == Backing::Empty).count();
        if empty == 0 {
            return Ok(());
        }
        // Overcommitting may purge, so it comes before the locks. Check the states again afterwards.
        self.budget.overcommit((empty * BLOCK_BYTES) as u64, context)?;
        self.overcommit_counted(first, blocks, empty);
        Ok(())
    }

    /// Overcommits the empty ones of `blocks` blocks, of which `first` is the first, after the account has counted
    /// `counted` blocks as overcommitted. Returns the number of blocks that were empty.
    fn overcommit_counted(&self, first: usize, blocks: usize, counted: usize) -> usize {
        let mut empty = 0;
        for block in first..first + blocks {
            let mut locked = self.state_word(block).lock(&self.generation);
            if locked.state.backing == Backing::Empty {
                locked.state = BlockState::OVERCOMMITTED;
                empty += 1;
            }
        }
        self.budget.reconciled(0, ((counted - empty) * BLOCK_BYTES) as i64);
        empty
    }

    /// Discards the memory of whole blocks and overcommits them again. Returns the bytes that were resident; `None` if
    /// the kernel refused for some or all blocks.
    ///
    /// # Safety
    ///
    /// As [`Arena::discard`].
    pub unsafe fn discard_and_reopen(&self, first: usize, blocks: usize) -> Option<u64> {
        // SAFETY: guaranteed by the caller.
        let freed = unsafe { self.discard(first, blocks) };
        self.budget.reconciled(0, -((blocks * BLOCK_BYTES) as i64));
        (self.overcommit_counted(first, blocks, blocks) == blocks).then_some(freed)
    }

    /// As [`Arena::discard_and_reopen`] for one block, which the kernel may back with small pages only from now on.
    ///
    /// # Safety
    ///
    /// As [`Arena::discard`].
    pub unsafe fn reopen_with_small_pages(&self, block: usize) {
        debug_assert!(!self.small.contains(self.block_addr(block)), "extents have maps, too");
        mem::forbid_huge(self.block_addr(block), BLOCK_BYTES);
        // SAFETY: guaranteed by the caller.
        unsafe { self.discard_and_reopen(block, 1) };
    }

    /// Allows the kernel to use huge pages for the `len_bytes` from `addr` on.
    pub fn allow_huge(&self, addr: usize, len_bytes: usize) {
        debug_assert!((addr | len_bytes).is_multiple_of(BLOCK_BYTES), "huge pages are whole blocks");
        if self.use_huge && self.huge_use() != HugeUse::Never && len_bytes > 0 {
            mem::allow_huge(addr, len_bytes);
        }
    }

    /// Makes the software pages that lie completely in a range of overcommitted blocks resident, if they are larger
    /// than the OS page. For bytes that the caller is about to write.
    ///
    /// Cost: 20 us per 64 KiB that were not resident. A copy into such memory takes two thirds of the time that it
    /// takes with 16 page faults.
    pub fn populate_pages(&self, addr: usize, len_bytes: usize) {
        let page = self.page.bytes().min(BLOCK_BYTES);
        let (start, end) = (addr.next_multiple_of(page), (addr + len_bytes) & !(page - 1));
        if page > os_page_bytes() && start < end && mem::populate(start, end - start).is_ok() {
            stats::add(Counter::PagesPopulated, ((end - start) / page) as u64);
        }
    }

    /// Returns whether the arena was created with huge pages ([`Layout::use_huge`](super::Layout::use_huge)).
    pub fn uses_huge(&self) -> bool {
        self.use_huge
    }

    /// Measures which pages are resident in the overcommitted ones of `blocks` blocks, of which `first` is the first,
    /// and charges these pages.
    pub fn reconcile(&self, first: usize, blocks: usize) {
        for block in first..first + blocks {
            let full = os_pages_per_block() as u32;
            let state = self.block_state(block);
            if state.backing != Backing::Lazy || state.is_inherited || state.charged_pages == full {
                continue;
            }
            let Some(mut locked) = self.state_word(block).try_lock(&self.generation) else { continue };
            if locked.state.backing == Backing::Lazy {
                self.measure_block(block, &mut locked.state);
            }
        }
    }

    /// Measures the resident pages of a block whose backing is [`Backing::Lazy`], and charges exactly these pages. The
    /// caller must hold the block's lock; `state` is the block's state.
    pub(super) fn measure_block(&self, block: usize, state: &mut BlockState) {
        // The parent is charged for inherited memory.
        if state.is_inherited {
            return;
        }
        let Ok(bytes) = mem::resident_bytes(self.block_addr(block), BLOCK_BYTES) else { return };
        let pages = (bytes / os_page_bytes()) as u32;
        debug_assert!(pages as usize <= os_pages_per_block());
        let change = Self::charged_bytes(pages) as i64 - Self::charged_bytes(state.charged_pages) as i64;
        if change != 0 {
            Self::update_gauge(self.gauge_of_block(block), state.charged_pages, pages);
            self.budget.reconciled(change, change);
            state.charged_pages = pages;
        }
    }

    /// Gives the memory of whole blocks back to the kernel. Returns the number of bytes that were resident.
    ///
    /// # Safety
    ///
    /// The caller owns every byte of these blocks and does not need their contents.
    pub unsafe fn discard(&self, first: usize, blocks: usize) -> u64 {
        // SAFETY: guaranteed by the caller.
        unsafe { self.discard_of(first, blocks, Memory::Private) }
    }

    /// As [`Arena::discard`], for blocks of the kind `memory`.
    ///
    /// # Safety
    ///
    /// As [`Arena::discard`]. The blocks are of the kind `memory`.
    pub(super) unsafe fn discard_of(&self, first: usize, blocks: usize, memory: Memory) -> u64 {
        let end = first + blocks;
        let batches = (first..end).step_by(MAX_BATCH_BLOCKS);
        // SAFETY: guaranteed by the caller for all blocks.
        batches.map(|at| unsafe { self.discard_batch(at, MAX_BATCH_BLOCKS.min(end - at), memory) }).sum()
    }

    /// As [`Arena::discard_of`], for at most [`MAX_BATCH_BLOCKS`] blocks, with one system call.
    ///
    /// # Safety
    ///
    /// As [`Arena::discard_of`].
    unsafe fn discard_batch(&self, first: usize, blocks: usize, memory: Memory) -> u64 {
        debug_assert!(blocks > 0 && blocks <= MAX_BATCH_BLOCKS);
        debug_assert!(!self.small.contains(self.block_addr(first)), "extents have maps, too");
        let mut range = first..first + blocks;
        if range.all(|block| self.block_state(block).backing == Backing::Empty) {
            return 0;
        }
        // Measure first: the charge, which is returned as the bytes freed, must equal the kernel's count.
        self.reconcile(first, blocks);
        // SAFETY: the caller owns these bytes, and no reference to them exists.
        if unsafe { memory.discard(self.block_addr(first), blocks * BLOCK_BYTES) }.is_err() {
            stats::add(Counter::PurgeFailed, 1);
            return 0;
        }
        let mut freed = 0;
        for block in first..first + blocks {
            let mut locked = self.state_word(block).lock(&self.generation);
            let state = std::mem::replace(&mut locked.state, BlockState::EMPTY);
            let bytes = Self::charged_bytes(state.charged_pages);
            Self::update_gauge(self.gauge_of_block(block), state.charged_pages, 0);
            if bytes > 0 {
                self.budget.discharge(bytes);
            }
            if state.backing == Backing::Lazy && !state.is_inherited {
                // The block no longer counts as overcommitted.
                self.budget.reconciled(0, BLOCK_BYTES as i64 - bytes as i64);
            }
            freed += bytes;
        }
        freed
    }

    /// Offers whole blocks to the kernel (`MADV_FREE`), which takes their memory under pressure. Returns the charged
    /// bytes of the blocks; `None` if the kernel refused (locked memory).
    ///
    /// # Safety
    ///
    /// As [`Arena::discard`].
    pub unsafe fn offer(&self, first: usize, blocks: usize) -> Option<u64> {
        // SAFETY: the caller owns these bytes, and no reference to them exists.
        if unsafe { mem::offer(self.block_addr(first), blocks * BLOCK_BYTES) }.is_err() {
            return None;
        }
        Some((first..first + blocks).map(|block| Self::charged_bytes(self.block_state(block).charged_pages)).sum())
    }

    /// Ends the charge for memory that the kernel took from offered blocks. Returns the number of bytes that the kernel
    /// took. The backing of the blocks that lost memory becomes [`Backing::Lazy`].
    pub fn discharge_taken(&self, first: usize, blocks: usize) -> u64 {
        let mut taken = 0;
        for block in first..first + blocks {
            let mut locked = self.state_word(block).lock(&self.generation);
            let before = locked.state.charged_pages;
            self.measure_block(block, &mut locked.state);
            let gone = Self::charged_bytes(before.saturating_sub(locked.state.charged_pages));
            if gone > 0 {
                locked.state.backing = Backing::Lazy;
                stats::add(Counter::Taken, gone);
                trace::event(Event::Taken, block as u64, gone);
            }
            taken += gone;
        }
        taken
    }

    /// Gives a part of a block whose backing is [`Backing::Lazy`] back to the kernel. Returns the number of bytes
    /// freed; `None` if the kernel refused. Does nothing for a block with another backing.
    ///
    /// # Safety
    ///
    /// The part consists of whole OS pages of one block. The caller owns them and does not need their contents.
    pub unsafe fn discard_part(&self, block: usize, addr: usize, len_bytes: usize) -> Option<u64> {
        let mut is_refused = false;
        let part = addr..addr + len_bytes;
        // SAFETY: guaranteed by the caller.
        let freed = unsafe { self.discard_parts(block, &[part], |_| is_refused = true) };
        (!is_refused).then_some(freed.unwrap_or(0))
    }

    /// As [`Arena::discard_part`] for several parts, which must be in the order of their addresses and may be empty.
    /// Calls `refused` with the index of each part that the kernel refused. Returns `None` if the block's backing is
    /// not [`Backing::Lazy`].
    ///
    /// Cost: two measurements of the block (some 15 us), and one system call for each run of adjacent parts.
    ///
    /// # Safety
    ///
    /// As [`Arena::discard_part`], for each part.
    pub unsafe fn discard_parts(
        &self,
        block: usize,
        parts: &[Range<usize>],
        mut refused: impl FnMut(usize),
    ) -> Option<u64> {
        let range = self.block_addr(block)..self.block_addr(block) + BLOCK_BYTES;
        let whole = || parts.iter().filter(|part| !part.is_empty());
        debug_assert!(whole().all(|part| part.start >= range.start && part.end <= range.end), "parts of this block");
        debug_assert!(whole().all(|part| (part.start | part.end).is_multiple_of(os_page_bytes())), "whole OS pages");
        debug_assert!(whole().map(|part| part.start).is_sorted(), "parts in the order of their addresses");
        let mut locked = self.state_word(block).lock(&self.generation);
        if locked.state.backing != Backing::Lazy {
            return None;
        }
        if parts.iter().all(Range::is_empty) {
            return Some(0);
        }
        self.measure_block(block, &mut locked.state);
        let before = locked.state.charged_pages;
        let mut first = 0;
        for run in parts.chunk_by(|part, next| part.end == next.start) {
            let (start, end) = (run[0].start, run[run.len() - 1].end);
            // SAFETY: guaranteed by the caller for each of these adjacent parts.
            if start < end && unsafe { mem::discard(start, end - start) }.is_err() {
                stats::add(Counter::PurgeFailed, 1);
                (first..first + run.len()).for_each(&mut refused);
            }
            first += run.len();
        }
        self.measure_block(block, &mut locked.state);
        Some(Self::charged_bytes(before.saturating_sub(locked.state.charged_pages)))
    }

    /// Splits the huge page of a block into small pages, so that parts of the block can be returned.
    pub fn split(&self, block: usize) {
        let mut locked = self.state_word(block).lock(&self.generation);
        if locked.state.backing == Backing::Huge {
            debug_assert!(!self.small.contains(self.block_addr(block)), "blocks of extents become small");
            mem::split_huge(self.block_addr(block), BLOCK_BYTES);
            locked.state.backing = Backing::Lazy;
            stats::add(Counter::BlocksSplit, 1);
        }
    }

    /// Moves the memory of whole blocks to blocks without memory. Returns the length of the moved part in bytes.
    ///
    /// The kernel may stop early, also inside a block, for example at a page that a fork child shares. The moved part
    /// of the source reads zero afterwards.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if nothing was moved.
    ///
    /// # Safety
    ///
    /// The caller owns both ranges, the target has no memory, and no thread accesses either range during the call.
    pub unsafe fn move_blocks(&self, to: usize, from: usize, blocks: usize) -> Result<usize> {
        debug_assert!(to + blocks <= from || from + blocks <= to, "source and target are disjoint");
        debug_assert!(self.gauge_of_block(from) == self.gauge_of_block(to), "one gauge counts the moved memory");
        let mut done = 0;
        while done < blocks {
            let count = (blocks - done).min(MAX_BATCH_BLOCKS);
            // SAFETY: guaranteed by the caller for the whole ranges.
            let result = unsafe { self.move_batch(to + done, from + done, count) };
            match result {
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
                Ok(bytes) if bytes < count * BLOCK_BYTES => return Ok(done * BLOCK_BYTES + bytes),
                Ok(_) => done += count,
            }
        }
        Ok(done * BLOCK_BYTES)
    }

    /// As [`Arena::move_blocks`], for at most [`MAX_BATCH_BLOCKS`] blocks, with one system call.
    ///
    /// # Safety
    ///
    /// As [`Arena::move_blocks`].
    unsafe fn move_batch(&self, to: usize, from: usize, blocks: usize) -> Result<usize> {
        debug_assert!(blocks > 0 && blocks <= MAX_BATCH_BLOCKS);
        // All blocks are locked during the move, so that no page is measured both in its source and in its target.
        let lock = |first: usize| {
            std::array::from_fn::<_, MAX_BATCH_BLOCKS, _>(|index| {
                (index < blocks).then(|| self.state_word(first + index).lock(&self.generation))
            })
        };
        let (mut sources, mut targets) = (lock(from), lock(to));
        let (dst, src, len) = (self.block_addr(to), self.block_addr(from), blocks * BLOCK_BYTES);
        // SAFETY: guaranteed by the caller.
        let moved = unsafe { moves::move_pages(dst, src, len) }.map_err(Error::system("moving pages"))?;
        debug_assert!(moved <= len, "no more was moved than requested");
        for (source, target) in sources.iter_mut().zip(&mut targets).take(moved / BLOCK_BYTES) {
            let (Some(source), Some(target)) = (source, target) else { continue };
            debug_assert!(target.state.charged_pages == 0, "the target has no memory");
            debug_assert!(matches!(target.state.backing, Backing::Empty | Backing::Lazy));
            if target.state.backing == Backing::Lazy && !target.state.is_inherited {
                // The source's memory, which is charged, replaces the untouched bytes of the target.
                self.budget.reconciled(0, BLOCK_BYTES as i64);
            }
            target.state = std::mem::replace(&mut source.state, BlockState::EMPTY);
        }
        Ok(moved)
    }

    /// Requests that the helper thread makes a block resident, because an allocation will need the block soon.
    pub fn request_prefault(&self, block: usize) {
        debug_assert!(self.heap.contains(self.block_addr(block)));
        self.prefault.store(block + 1, Relaxed);
    }

    /// Makes the block of the last [`Arena::request_prefault`] resident, if there is room without reclaim. Returns
    /// whether the block was made resident.
    pub fn prefault(&self) -> bool {
        let wanted = self.prefault.swap(0, Relaxed);
        let has_room = self.budget.room().1 >= 2 * BLOCK_BYTES as u64;
        let is_huge = self.may_take_huge(ExpectedUse::Full);
        if wanted == 0 || !has_room || self.block_state(wanted - 1).backing != Backing::Empty || !is_huge {
            return false;
        }
        let is_in = self.back_block(wanted - 1, ExpectedUse::Full).is_ok()
            && self.block_state(wanted - 1).backing == Backing::Huge;
        stats::add(Counter::BlocksPrefaulted, u64::from(is_in));
        is_in
    }
}
