//! Blocks of the heap zone and of the pool zone: brought in, measured, moved and emptied.
//!
//! Callers own the bytes they name: a slot that is being handed out, one
//! that a purge has claimed, pages of a cache that nobody has. That is what makes emptying safe.
#![allow(unsafe_code)] // gives memory back to the kernel

use super::block::{Backing, State};
use super::{Arena, Context, Filling};
use crate::error::{Error, Result};
use crate::stats::{self, Counter};
use crate::trace::{self, Event};
use crate::units::{BLOCK_BYTES, os_page_bytes, os_pages_per_block};
use pagemill_sys::{mem, moves};

/// Most blocks emptied by one system call: what a waiter may have to wait for.
const BATCH_BLOCKS: usize = 32;

pub(super) fn open(addr: usize, len_bytes: usize) -> Result<()> {
    // SAFETY: fresh addresses of the arena's own reservation.
    unsafe { mem::open(addr, len_bytes) }.map_err(Error::system("opening reserved memory"))
}

impl Arena {
    /// Makes one block resident (or open to be touched), if nothing is behind it yet.
    ///
    /// Another thread doing the same for this block is not waited for: the
    /// kernel serves whoever touches first.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`].
    pub(crate) fn bring_in(&self, block: usize, filling: Filling) -> Result<()> {
        if self.peek(block).backing != Backing::Empty {
            return Ok(());
        }
        if !self.may_take_huge(filling) {
            stats::add(Counter::BlocksSmall, 1);
            return self.lend(block, 1, Context::Outside);
        }
        // Admission may purge, so it comes before the lock; then look again.
        if self.budget.admit(BLOCK_BYTES as u64, Context::Outside).is_err() {
            // A whole block does not fit. What is really wanted of it may.
            return self.lend(block, 1, Context::Outside);
        }
        let mut locked = self.word(block).lock(&self.generation);
        if locked.state.backing == Backing::Empty {
            locked.state = self.populate(block);
            if locked.state.backing == Backing::Huge {
                Self::count(Counter::Heap, 0, locked.state.charged_pages);
                return Ok(());
            }
            // Small pages then, counted as they come: the block is open from here on.
            self.budget.settled(0, -(BLOCK_BYTES as i64));
        }
        drop(locked);
        self.budget.discharge(BLOCK_BYTES as u64);
        Ok(())
    }

    /// Makes blocks of the pool zone resident, all of them: huge as far as huge pages are to be had. Returns how many are.
    ///
    /// Only who was given these blocks calls it; they are empty, and read zero afterwards.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`]; [`Error::System`] where the kernel has no page. Nothing has changed then.
    pub(crate) fn bring_in_whole(&self, first: usize, blocks: usize, is_huge_wanted: bool) -> Result<usize> {
        self.budget.admit((blocks * BLOCK_BYTES) as u64, Context::Outside)?;
        let mut huge = 0;
        for block in first..first + blocks {
            match self.fill_whole(block, is_huge_wanted && self.use_huge) {
                Ok(is_huge) => huge += usize::from(is_huge),
                Err(error) => {
                    // SAFETY: nobody was told of these blocks yet.
                    unsafe { self.discard(first, block - first) };
                    self.budget.discharge(((first + blocks - block) * BLOCK_BYTES) as u64);
                    return Err(error);
                }
            }
        }
        Ok(huge)
    }

    /// Puts memory behind an empty block that is charged already; says whether it is a huge page.
    fn fill_whole(&self, block: usize, is_huge_wanted: bool) -> Result<bool> {
        let mut locked = self.word(block).lock(&self.generation);
        debug_assert_eq!(locked.state.backing, Backing::Empty);
        let addr = self.block_addr(block);
        let state = if is_huge_wanted { self.populate(block) } else { State::LENT };
        if state.backing != Backing::Huge {
            let populated = mem::populate(addr, BLOCK_BYTES).map_err(Error::system("bringing in pages"));
            if let Err(error) = populated {
                // SAFETY: nobody was told of this block yet.
                let _ = unsafe { mem::discard(addr, BLOCK_BYTES) };
                return Err(error);
            }
        }
        locked.state = State { charged_pages: os_pages_per_block() as u32, ..state };
        Self::count(self.counter_of(block), 0, locked.state.charged_pages);
        Ok(state.backing == Backing::Huge)
    }

    /// Takes a huge page for an empty block; without one the kernel's small pages serve on touch.
    pub(super) fn populate(&self, block: usize) -> State {
        let resident = self.budget.room().0;
        match mem::populate_huge(self.block_addr(block), BLOCK_BYTES) {
            Ok(mem::Backing::Huge) => {
                stats::add(Counter::BlocksHuge, 1);
                trace::event(Event::BlockHuge, block as u64, resident);
                State::huge()
            }
            Ok(mem::Backing::Small) | Err(_) => {
                stats::add(Counter::BlocksFallback, 1);
                trace::event(Event::BlockFallback, block as u64, resident);
                State::LENT
            }
        }
    }

    /// Opens whole blocks for a program to touch as it likes; what was empty is lent.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`] if the limit is reached already.
    pub(crate) fn lend(&self, first: usize, blocks: usize, context: Context) -> Result<()> {
        let empty = (first..first + blocks).filter(|block| self.peek(*block).backing == Backing::Empty).count();
        if empty == 0 {
            return Ok(());
        }
        // Lending may purge, so it comes before the locks; then look again.
        self.budget.lend((empty * BLOCK_BYTES) as u64, context)?;
        let mut lent = 0;
        for block in first..first + blocks {
            let mut locked = self.word(block).lock(&self.generation);
            if locked.state.backing == Backing::Empty {
                locked.state = State::LENT;
                lent += 1;
            }
        }
        self.budget.settled(0, ((empty - lent) * BLOCK_BYTES) as i64);
        Ok(())
    }

    /// Opens blocks again that the program had before, and were just emptied. Nobody is asked.
    fn reopen(&self, first: usize, blocks: usize) {
        for block in first..first + blocks {
            let mut locked = self.word(block).lock(&self.generation);
            if locked.state.backing == Backing::Empty {
                locked.state = State::LENT;
                self.budget.settled(0, -(BLOCK_BYTES as i64));
            }
        }
    }

    /// Empties whole blocks that stay open to be touched. Returns the bytes that were resident behind them; `None` if the
    /// kernel refused, perhaps after a part.
    ///
    /// # Safety
    ///
    /// As [`Arena::discard`].
    pub(crate) unsafe fn renew(&self, first: usize, blocks: usize) -> Option<u64> {
        // SAFETY: the caller's promise.
        let freed = unsafe { self.discard(first, blocks) };
        let is_gone = (first..first + blocks).all(|block| self.peek(block).backing == Backing::Empty);
        self.reopen(first, blocks);
        is_gone.then_some(freed)
    }

    /// As [`Arena::renew`] for a block that is to come in small pages only.
    ///
    /// # Safety
    ///
    /// As [`Arena::discard`].
    pub(crate) unsafe fn make_small(&self, block: usize) {
        mem::forbid_huge(self.block_addr(block), BLOCK_BYTES);
        // SAFETY: the caller's promise.
        unsafe { self.renew(block, 1) };
    }

    /// Lets the kernel answer touches of these addresses with huge pages.
    pub(crate) fn allow_huge(&self, addr: usize, len_bytes: usize) {
        if self.use_huge && len_bytes > 0 {
            mem::allow_huge(addr, len_bytes);
        }
    }

    /// Brings in the software pages of a range whose blocks are lent, where they are larger than the OS page.
    pub(crate) fn populate_pages(&self, addr: usize, len_bytes: usize) {
        let page = self.page.bytes().min(BLOCK_BYTES);
        if page > os_page_bytes() && mem::populate(addr, len_bytes).is_ok() {
            stats::add(Counter::PagesPopulated, (len_bytes / page).max(1) as u64);
        }
    }

    /// Measures how much of lent blocks is resident, and charges it.
    pub(crate) fn settle(&self, first: usize, blocks: usize) {
        for block in first..first + blocks {
            let full = os_pages_per_block() as u32;
            let state = self.peek(block);
            if state.backing != Backing::Lazy || state.is_inherited || state.charged_pages == full {
                continue;
            }
            let Some(mut locked) = self.word(block).try_lock(&self.generation) else { continue };
            if locked.state.backing == Backing::Lazy {
                self.measure(block, &mut locked.state);
            }
        }
    }

    /// Charges what is resident of a locked lazy block.
    pub(super) fn measure(&self, block: usize, state: &mut State) {
        if state.is_inherited {
            return;
        }
        let mut pages = [0u8; crate::units::MAX_OS_PAGES_PER_BLOCK];
        let count = match mem::resident(self.block_addr(block), BLOCK_BYTES, &mut pages) {
            Ok(()) => pages.iter().filter(|page| **page & 1 == 1).count() as u32,
            Err(_) => return,
        };
        self.recharge(block, state, count);
    }

    /// Changes what a lazy block is charged with; the rest of it stays lent.
    fn recharge(&self, block: usize, state: &mut State, pages: u32) {
        let change = Self::charged_bytes(pages) as i64 - Self::charged_bytes(state.charged_pages) as i64;
        if change != 0 {
            Self::count(self.counter_of(block), state.charged_pages, pages);
            self.budget.settled(change, change);
            state.charged_pages = pages;
        }
    }

    /// Gives whole blocks back to the kernel and returns the bytes that were resident behind them.
    ///
    /// # Safety
    ///
    /// The caller owns every byte of these blocks and needs no contents.
    pub(crate) unsafe fn discard(&self, first: usize, blocks: usize) -> u64 {
        let mut freed = 0;
        let mut at = first;
        while at < first + blocks {
            let count = (first + blocks - at).min(BATCH_BLOCKS);
            // SAFETY: the caller's promise, for a part.
            freed += unsafe { self.discard_batch(at, count) };
            at += count;
        }
        freed
    }

    /// # Safety
    ///
    /// As [`Arena::discard`].
    unsafe fn discard_batch(&self, first: usize, blocks: usize) -> u64 {
        let mut range = first..first + blocks;
        if range.all(|block| self.peek(block).backing == Backing::Empty) {
            return 0;
        }
        // Settling first makes the count that of the kernel, not our guess.
        self.settle(first, blocks);
        // SAFETY: the caller owns the bytes, and nobody refers to them.
        if unsafe { mem::discard(self.block_addr(first), blocks * BLOCK_BYTES) }.is_err() {
            stats::add(Counter::PurgeFailed, 1);
            return 0;
        }
        let mut freed = 0;
        for block in first..first + blocks {
            let mut locked = self.word(block).lock(&self.generation);
            freed += self.forget(block, &mut locked.state);
        }
        freed
    }

    /// Offers whole blocks to the kernel, which takes them when it runs short. Returns the bytes resident behind them;
    /// `None` where that cannot be done (locked memory).
    ///
    /// # Safety
    ///
    /// As [`Arena::discard`].
    pub(crate) unsafe fn offer(&self, first: usize, blocks: usize) -> Option<u64> {
        // SAFETY: the caller owns the bytes, and nobody refers to them.
        if unsafe { mem::offer(self.block_addr(first), blocks * BLOCK_BYTES) }.is_err() {
            return None;
        }
        Some((first..first + blocks).map(|block| Self::charged_bytes(self.peek(block).charged_pages)).sum())
    }

    /// Finds out what the kernel took of blocks that were offered, and ends the charge of that: such blocks are lent from
    /// here on. Returns the bytes.
    pub(crate) fn note_taken(&self, first: usize, blocks: usize) -> u64 {
        let mut taken = 0;
        for block in first..first + blocks {
            let mut locked = self.word(block).lock(&self.generation);
            let before = locked.state.charged_pages;
            self.measure(block, &mut locked.state);
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

    /// Marks a locked block empty and ends its charge or loan.
    fn forget(&self, block: usize, state: &mut State) -> u64 {
        let bytes = Self::charged_bytes(state.charged_pages);
        Self::count(self.counter_of(block), state.charged_pages, 0);
        if bytes > 0 {
            self.budget.discharge(bytes);
        }
        if state.backing == Backing::Lazy && !state.is_inherited {
            self.budget.settled(0, BLOCK_BYTES as i64 - bytes as i64);
        }
        *state = State::EMPTY;
        bytes
    }

    /// Gives a part of a block in small pages back; returns the bytes freed. `None` if the kernel refused; a block that
    /// is not in small pages is left alone.
    ///
    /// # Safety
    ///
    /// The caller owns the bytes, whole OS pages of one block, and needs no contents.
    pub(crate) unsafe fn discard_part(&self, block: usize, addr: usize, len_bytes: usize) -> Option<u64> {
        let mut locked = self.word(block).lock(&self.generation);
        if locked.state.backing != Backing::Lazy || len_bytes == 0 {
            return Some(0);
        }
        self.measure(block, &mut locked.state);
        let before = locked.state.charged_pages;
        // SAFETY: the caller's promise.
        if unsafe { mem::discard(addr, len_bytes) }.is_err() {
            stats::add(Counter::PurgeFailed, 1);
            return None;
        }
        self.measure(block, &mut locked.state);
        Some(Self::charged_bytes(before.saturating_sub(locked.state.charged_pages)))
    }

    /// Splits the huge page behind a block, so that parts of it can be given back.
    pub(crate) fn split(&self, block: usize) {
        let mut locked = self.word(block).lock(&self.generation);
        if locked.state.backing == Backing::Huge {
            mem::split_huge(self.block_addr(block), BLOCK_BYTES);
            locked.state.backing = Backing::Lazy;
            stats::add(Counter::BlocksSplit, 1);
        }
    }

    /// Moves what is behind whole blocks to empty ones; returns how many bytes from the start were moved.
    ///
    /// The kernel may stop anywhere (at a page that a fork child still shares,
    /// say), also inside a block. Source bytes read zero as far as they were
    /// moved.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if nothing was moved.
    ///
    /// # Safety
    ///
    /// The caller owns both ranges; nothing is behind the target; nobody touches either meanwhile.
    pub(crate) unsafe fn move_blocks(&self, to: usize, from: usize, blocks: usize) -> Result<usize> {
        let mut done = 0;
        while done < blocks {
            let count = (blocks - done).min(BATCH_BLOCKS);
            // SAFETY: the caller's promise, for a part.
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

    /// # Safety
    ///
    /// As [`Arena::move_blocks`].
    unsafe fn move_batch(&self, to: usize, from: usize, blocks: usize) -> Result<usize> {
        // Locked for the whole move, so that nobody measures pages in two places.
        let lock = |first: usize| {
            std::array::from_fn::<_, BATCH_BLOCKS, _>(|index| {
                (index < blocks).then(|| self.word(first + index).lock(&self.generation))
            })
        };
        let (mut sources, mut targets) = (lock(from), lock(to));
        let (dst, src, len) = (self.block_addr(to), self.block_addr(from), blocks * BLOCK_BYTES);
        // SAFETY: the caller's promise.
        let moved = unsafe { moves::move_pages(dst, src, len) }.map_err(Error::system("moving pages"))?;
        for (source, target) in sources.iter_mut().zip(&mut targets).take(moved / BLOCK_BYTES) {
            let (Some(source), Some(target)) = (source, target) else { continue };
            debug_assert_eq!(target.state.charged_pages, 0);
            if target.state.backing == Backing::Lazy && !target.state.is_inherited {
                // What was lent to the target has come with the source.
                self.budget.settled(0, BLOCK_BYTES as i64);
            }
            target.state = std::mem::replace(&mut source.state, State::EMPTY);
        }
        Ok(moved)
    }

    /// Notes that a block will be needed soon. The helper brings it in.
    pub(crate) fn want_soon(&self, block: usize) {
        self.prefault.store(block + 1, std::sync::atomic::Ordering::Relaxed);
    }

    /// Brings in the block that was wanted soon, if there is room without reclaim. Returns whether it did.
    pub fn prefault(&self) -> bool {
        let wanted = self.prefault.swap(0, std::sync::atomic::Ordering::Relaxed);
        let has_room = self.budget.room().1 >= 2 * BLOCK_BYTES as u64;
        let is_huge = self.may_take_huge(Filling::Soon);
        if wanted == 0 || !has_room || self.peek(wanted - 1).backing != Backing::Empty || !is_huge {
            return false;
        }
        let is_in = self.bring_in(wanted - 1, Filling::Soon).is_ok() && self.peek(wanted - 1).backing == Backing::Huge;
        if is_in {
            stats::add(Counter::BlocksPrefaulted, 1);
        }
        is_in
    }
}
