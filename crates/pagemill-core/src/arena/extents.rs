//! Extents: addresses for the allocator of small sizes, which commits and decommits them in OS pages.
//!
//! Memory becomes resident and is returned in *units*: a whole block if it is a huge page, else a software page. A unit
//! is resident while at least one of its pages is committed. A page that is decommitted in a resident unit becomes
//! *stale*, and the next commit zeroes it. So returning a whole unit costs one system call and no zeroing.
#![allow(unsafe_code)] // zeroes pages and gives memory back to the kernel

use super::backing::Memory;
use super::block::{Backing, BlockState, LockedBlock};
use super::{Arena, Context, ExpectedUse};
use crate::error::Result;
use crate::stats::{self, Counter};
use crate::units::{BLOCK_BYTES, MAX_OS_PAGES_PER_BLOCK, os_page_bytes, os_pages_per_block};
use pagemill_sys::mem;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The sets of committed and of stale OS pages of one block. Protected by the block's lock.
pub(crate) struct ExtentMaps {
    /// Committed pages: the small allocator may use them.
    committed: PageSet,
    /// Stale pages: they are decommitted, and still resident with their old bytes.
    stale: PageSet,
}

/// A set of OS pages of a block, one bit for each page.
struct PageSet([AtomicU64; MAX_OS_PAGES_PER_BLOCK / 64]);

impl PageSet {
    fn get(&self, page: usize) -> bool {
        self.0[page / 64].load(Relaxed) >> (page % 64) & 1 == 1
    }

    fn set(&self, pages: Range<usize>, value: bool) {
        debug_assert!(pages.end <= os_pages_per_block(), "the pages belong to one block");
        for page in pages {
            let (word, bit) = (&self.0[page / 64], 1u64 << (page % 64));
            let before = word.load(Relaxed);
            word.store(if value { before | bit } else { before & !bit }, Relaxed);
        }
    }

    /// Returns whether the set contains at least one of these pages.
    fn contains_any(&self, pages: Range<usize>) -> bool {
        debug_assert!(pages.end <= os_pages_per_block(), "the pages belong to one block");
        let mut page = pages.start;
        while page < pages.end {
            let word = self.0[page / 64].load(Relaxed) >> (page % 64);
            let count = (64 - page % 64).min(pages.end - page);
            if word & (u64::MAX >> (64 - count)) != 0 {
                return true;
            }
            page += count;
        }
        false
    }

    fn count(&self) -> usize {
        self.0.iter().map(|word| word.load(Relaxed).count_ones() as usize).sum()
    }
}

/// A part of one block, as a range of OS pages.
#[derive(Clone)]
struct BlockPart {
    block: usize,
    pages: Range<usize>,
}

impl Arena {
    /// Carves address space for an extent, without memory. Returns its address, a multiple of `align_bytes` and of 2
    /// MiB.
    ///
    /// # Errors
    ///
    /// `NoAddresses` if the small zone is full, `System` if the kernel refuses memory for the metadata.
    pub fn extent(&self, len_bytes: usize, align_bytes: usize) -> Result<usize> {
        let blocks = len_bytes.div_ceil(BLOCK_BYTES);
        let align = align_bytes.div_ceil(BLOCK_BYTES).max(1);
        // SAFETY: the zone of extents belongs to the arena, which needs no other tables.
        unsafe { self.carve(&self.small, blocks, align, self.nodes.current(), |_, _| Ok(())) }
    }

    /// Overcommits a whole extent, for metadata of the small allocator. The extent's pages need no commit, and are
    /// charged when a measurement finds them resident.
    ///
    /// # Errors
    ///
    /// `NoMemory` if the limit has been reached.
    ///
    /// # Safety
    ///
    /// The range starts at the start of an extent of the caller. No page of that extent is committed or overcommitted.
    pub unsafe fn overcommit_extent(&self, addr: usize, len_bytes: usize) -> Result<()> {
        debug_assert!(addr.is_multiple_of(BLOCK_BYTES), "extents start with a block");
        self.overcommit(self.block_of(addr), len_bytes.div_ceil(BLOCK_BYTES), Context::Nested)
    }

    /// Splits a range of an extent at block boundaries. Returns the part in each block.
    fn split_at_blocks(&self, addr: usize, len_bytes: usize) -> impl Iterator<Item = BlockPart> + use<'_> {
        debug_assert!(self.small.contains(addr) && self.small.contains(addr + len_bytes.max(1) - 1));
        let page = os_page_bytes();
        let (first, last) = (self.block_of(addr), self.block_of(addr + len_bytes.max(1) - 1));
        (first..=last).map(move |block| {
            let start = self.block_addr(block);
            let from = addr.max(start) - start;
            let to = (addr + len_bytes).min(start + BLOCK_BYTES) - start;
            BlockPart { block, pages: from / page..to.div_ceil(page) }
        })
    }

    /// Commits pages of an extent: charges them and ensures that they read zero. After an error nothing is committed.
    ///
    /// # Errors
    ///
    /// `NoMemory` if the pages do not fit below the limit.
    ///
    /// # Safety
    ///
    /// The pages lie in an extent of the caller, and none of them is committed.
    pub unsafe fn commit(&self, addr: usize, len_bytes: usize) -> Result<()> {
        let mut done = 0;
        for part in self.split_at_blocks(addr, len_bytes) {
            let part_bytes = part.pages.len() * os_page_bytes();
            if let Err(error) = self.commit_part(&part) {
                stats::add(Counter::ExtentsRefused, 1);
                if done > 0 {
                    // SAFETY: this call committed the pages, and the caller does not use them before it returns.
                    unsafe { self.decommit(addr, done) };
                }
                return Err(error);
            }
            done += part_bytes;
        }
        Ok(())
    }

    /// Commits the pages of a part of one block. First charges these pages, without holding the block's lock.
    fn commit_part(&self, part: &BlockPart) -> Result<()> {
        let (mut admitted, mut use_huge) = (0, true);
        let result = loop {
            let mut locked = self.state_word(part.block).lock(&self.generation);
            if locked.state.backing == Backing::Lazy {
                // The pages of a *Lazy* block (allocator metadata, or inherited memory) need no commit.
                break Ok(0);
            }
            let take_huge =
                use_huge && locked.state.backing == Backing::Empty && self.may_take_huge(ExpectedUse::Unknown);
            let needed = if take_huge { os_pages_per_block() as u32 } else { self.nonresident_pages(&locked, part) };
            if needed <= admitted {
                break Ok(self.commit_admitted(&mut locked, part, take_huge));
            }
            // Admission may purge, so it is never called under the lock.
            drop(locked);
            match self.budget.admit(Self::charged_bytes(needed - admitted), Context::Nested) {
                Ok(()) => admitted = needed,
                // A whole block exceeds the limit, but the requested pages may fit.
                Err(_) if take_huge => use_huge = false,
                Err(error) => break Err(error),
            }
        };
        let used = *result.as_ref().unwrap_or(&0);
        if admitted > used {
            self.budget.discharge(Self::charged_bytes(admitted - used));
        }
        result.map(|_| ())
    }

    /// Number of OS pages in a unit, which becomes resident as a whole, of a block with this state.
    fn unit_pages(&self, state: BlockState) -> usize {
        match state.backing {
            Backing::Huge => os_pages_per_block(),
            _ => (self.page.bytes() / os_page_bytes()).clamp(1, os_pages_per_block()),
        }
    }

    /// Returns the OS pages of each unit into which `part` reaches.
    fn units_of(&self, state: BlockState, part: &BlockPart) -> impl Iterator<Item = Range<usize>> + use<> {
        let unit = self.unit_pages(state);
        (part.pages.start / unit..part.pages.end.div_ceil(unit)).map(move |index| index * unit..(index + 1) * unit)
    }

    /// Number of OS pages that a commit of `part` must charge: those in units that are not resident yet.
    fn nonresident_pages(&self, locked: &LockedBlock<'_>, part: &BlockPart) -> u32 {
        if locked.state.backing == Backing::Huge {
            return 0;
        }
        let maps = self.maps.get(part.block);
        // A unit that has only stale pages is still resident, because the kernel refused to take it.
        let is_missing = |pages: &Range<usize>| {
            !maps.committed.contains_any(pages.clone()) && !maps.stale.contains_any(pages.clone())
        };
        self.units_of(locked.state, part).filter(is_missing).map(|pages| pages.len() as u32).sum()
    }

    /// Commits the pages of `part` after the budget has admitted them. Returns the number of OS pages by which the
    /// block's charge grew.
    fn commit_admitted(&self, locked: &mut LockedBlock<'_>, part: &BlockPart, take_huge: bool) -> u32 {
        debug_assert!(!take_huge || locked.state.backing == Backing::Empty, "only an empty block gets a huge page");
        debug_assert!(
            !self.maps.get(part.block).committed.contains_any(part.pages.clone()),
            "pages are committed once"
        );
        let before = locked.state.charged_pages;
        if take_huge {
            locked.state = self.populate_huge(part.block, Memory::Private);
            if locked.state.backing != Backing::Huge {
                locked.state = BlockState { backing: Backing::Small, ..BlockState::EMPTY };
                // The kernel must not add huge pages on its own, because they would not be charged.
                mem::forbid_huge(self.block_addr(part.block), BLOCK_BYTES);
            }
        }
        if locked.state.backing == Backing::Empty {
            locked.state.backing = Backing::Small;
            // Huge pages may still be allowed here, because the block may have been a huge page before.
            mem::forbid_huge(self.block_addr(part.block), BLOCK_BYTES);
            stats::add(Counter::BlocksSmall, 1);
        }
        if locked.state.backing == Backing::Small {
            locked.state.charged_pages += self.nonresident_pages(locked, part);
            self.populate_units(locked, part);
        }
        let maps = self.maps.get(part.block);
        for page in part.pages.clone() {
            if maps.stale.get(page) {
                let addr = self.block_addr(part.block) + page * os_page_bytes();
                // SAFETY: a stale page is not committed, so no thread uses it.
                unsafe { std::ptr::write_bytes(addr as *mut u8, 0, os_page_bytes()) };
            }
        }
        maps.stale.set(part.pages.clone(), false);
        maps.committed.set(part.pages.clone(), true);
        self.check_charge(locked, part.block);
        Self::update_gauge(Counter::Small, before, locked.state.charged_pages);
        locked.state.charged_pages - before
    }

    /// Asserts that this process is charged for the block's resident pages, unless its parent is charged for some of
    /// them.
    fn check_charge(&self, locked: &LockedBlock<'_>, block: usize) {
        let maps = self.maps.get(block);
        debug_assert!(
            locked.state.is_inherited
                || locked.state.charged_pages as usize >= maps.committed.count() + maps.stale.count()
        );
    }

    /// Makes the units of `part` resident if a software page is larger than the OS page. Otherwise the kernel provides
    /// each page on its first touch.
    fn populate_units(&self, locked: &LockedBlock<'_>, part: &BlockPart) {
        if self.unit_pages(locked.state) == 1 {
            return;
        }
        let maps = self.maps.get(part.block);
        for pages in self.units_of(locked.state, part).filter(|pages| !maps.committed.contains_any(pages.clone())) {
            let addr = self.block_addr(part.block) + pages.start * os_page_bytes();
            if mem::populate(addr, pages.len() * os_page_bytes()).is_ok() {
                stats::add(Counter::PagesPopulated, 1);
            }
        }
    }

    /// Decommits the pages of a range. Returns the bytes that the kernel got back at once: those of units without
    /// committed pages.
    ///
    /// # Safety
    ///
    /// The caller has committed the range and no longer needs its contents.
    pub unsafe fn decommit(&self, addr: usize, len_bytes: usize) -> u64 {
        let mut freed = 0;
        for part in self.split_at_blocks(addr, len_bytes) {
            let mut locked = self.state_word(part.block).lock(&self.generation);
            if locked.state.backing == Backing::Lazy {
                freed += self.discard_overcommitted(&mut locked, &part);
            } else if locked.state.backing != Backing::Empty {
                let maps = self.maps.get(part.block);
                debug_assert!(part.pages.clone().all(|page| maps.committed.get(page)), "only committed pages are");
                maps.committed.set(part.pages.clone(), false);
                maps.stale.set(part.pages.clone(), true);
                freed += self.discard_unused_units(&mut locked, &part);
            }
        }
        freed
    }

    /// Discards the overcommitted pages of `part`. The pages read zero afterwards, even if the kernel refuses. Returns
    /// the bytes freed.
    fn discard_overcommitted(&self, locked: &mut LockedBlock<'_>, part: &BlockPart) -> u64 {
        let addr = self.block_addr(part.block) + part.pages.start * os_page_bytes();
        let len_bytes = part.pages.len() * os_page_bytes();
        let before = locked.state.charged_pages;
        // SAFETY: the pages are decommitted, so their contents are not needed.
        if unsafe { mem::discard(addr, len_bytes) }.is_err() {
            stats::add(Counter::PurgeFailed, 1);
            // SAFETY: as above, and the pages are writable.
            unsafe { std::ptr::write_bytes(addr as *mut u8, 0, len_bytes) };
        }
        self.measure_block(part.block, &mut locked.state);
        Self::charged_bytes(before.saturating_sub(locked.state.charged_pages))
    }

    /// Discards those units of `part` that have no committed page. Returns the bytes freed.
    fn discard_unused_units(&self, locked: &mut LockedBlock<'_>, part: &BlockPart) -> u64 {
        let maps = self.maps.get(part.block);
        let before = locked.state.charged_pages;
        let mut run: Option<Range<usize>> = None;
        for pages in self.units_of(locked.state, part) {
            if maps.committed.contains_any(pages.clone()) {
                self.discard_run(locked, part.block, run.take());
            } else {
                run = Some(run.map_or(pages.start, |run| run.start)..pages.end);
            }
        }
        self.discard_run(locked, part.block, run);
        self.check_charge(locked, part.block);
        if locked.state.charged_pages == 0 && maps.committed.count() == 0 && maps.stale.count() == 0 {
            locked.state = BlockState::EMPTY;
        }
        Self::update_gauge(Counter::Small, before, locked.state.charged_pages);
        let freed = Self::charged_bytes(before - locked.state.charged_pages);
        if freed > 0 {
            self.budget.discharge(freed);
        }
        freed
    }

    /// Discards the adjacent pages `run` of a block, which all lie in units without committed pages.
    fn discard_run(&self, locked: &mut LockedBlock<'_>, block: usize, run: Option<Range<usize>>) {
        let Some(run) = run else { return };
        debug_assert!(!self.maps.get(block).committed.contains_any(run.clone()), "no thread uses these pages");
        let addr = self.block_addr(block) + run.start * os_page_bytes();
        // SAFETY: none of these pages is committed, and the lock on the block keeps it so. No thread uses them.
        if unsafe { mem::discard(addr, run.len() * os_page_bytes()) }.is_ok() {
            self.maps.get(block).stale.set(run.clone(), false);
            locked.state.charged_pages = locked.state.charged_pages.saturating_sub(run.len() as u32);
        } else {
            stats::add(Counter::PurgeFailed, 1);
        }
    }

    /// Splits huge pages of extents of which at least a quarter is stale, and discards their stale pages, until
    /// `want_bytes` are freed. Returns the bytes freed. Cost: 280 us for each huge page.
    pub fn split_sparse_extents(&self, want_bytes: u64) -> u64 {
        let mut freed = 0;
        for block in self.sparse_huge_blocks() {
            if freed >= want_bytes {
                break;
            }
            let mut locked = self.state_word(block).lock(&self.generation);
            if locked.state.backing == Backing::Huge {
                mem::split_huge(self.block_addr(block), BLOCK_BYTES);
                stats::add(Counter::BlocksSplit, 1);
                locked.state.backing = Backing::Small;
                freed += self.discard_unused_units(&mut locked, &BlockPart { block, pages: 0..os_pages_per_block() });
            }
        }
        freed
    }

    /// Bytes that [`Arena::split_sparse_extents`] could free.
    pub fn sparse_extent_bytes(&self) -> u64 {
        let pages = self.sparse_huge_blocks().map(|block| self.maps.get(block).stale.count());
        (pages.sum::<usize>() * os_page_bytes()) as u64
    }

    /// Returns the blocks of extents that have a huge page of which at least a quarter is stale.
    fn sparse_huge_blocks(&self) -> impl Iterator<Item = usize> {
        let is_sparse = |block: &usize| {
            self.block_state(*block).backing == Backing::Huge
                && self.maps.get(*block).stale.count() * 4 >= os_pages_per_block()
        };
        (0..self.small.carved_bytes() / BLOCK_BYTES).filter(is_sparse)
    }

    /// Measures which pages of overcommitted extents (metadata of the small allocator) are resident, and charges them.
    pub fn reconcile_extents(&self) {
        self.reconcile(0, self.small.carved_bytes() / BLOCK_BYTES);
    }
}
