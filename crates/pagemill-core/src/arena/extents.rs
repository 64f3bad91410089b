//! Extents for the allocator of small sizes: reserved, committed and decommitted in OS pages.
//!
//! The allocator commits the pages that it uses and decommits the others. Memory comes and goes in *units*: a whole
//! block if it is a huge page, else a software page. A unit is resident while one of its pages is committed. A page
//! decommitted inside a resident unit is *stale*: it is zeroed when it is committed again, not before. So giving back a
//! whole unit costs one system call and no zeroing.
#![allow(unsafe_code)] // zeroes pages and gives memory back to the kernel

use super::block::{Backing, BlockState, Locked};
use super::{Arena, Context, Filling};
use crate::error::Result;
use crate::stats::{self, Counter};
use crate::units::{BLOCK_BYTES, MAX_OS_PAGES_PER_BLOCK, os_page_bytes, os_pages_per_block};
use pagemill_sys::mem;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Which OS pages of a block are committed, and which are stale. Guarded by the block's lock.
pub(crate) struct ExtentMaps {
    committed: Bits,
    stale: Bits,
}

/// One bit per OS page of a block.
struct Bits([AtomicU64; MAX_OS_PAGES_PER_BLOCK / 64]);

impl Bits {
    fn get(&self, page: usize) -> bool {
        self.0[page / 64].load(Relaxed) >> (page % 64) & 1 == 1
    }

    fn set(&self, pages: Range<usize>, value: bool) {
        for page in pages {
            let (word, bit) = (&self.0[page / 64], 1u64 << (page % 64));
            let before = word.load(Relaxed);
            word.store(if value { before | bit } else { before & !bit }, Relaxed);
        }
    }

    fn any(&self, pages: Range<usize>) -> bool {
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

/// A part of one block, in OS pages.
#[derive(Clone)]
struct BlockPart {
    block: usize,
    pages: Range<usize>,
}

impl Arena {
    /// Carves address space for an extent: at least block aligned, without memory.
    ///
    /// # Errors
    ///
    /// `NoAddresses`, `System`.
    pub fn extent(&self, len_bytes: usize, align_bytes: usize) -> Result<usize> {
        let blocks = len_bytes.div_ceil(BLOCK_BYTES);
        let align = align_bytes.div_ceil(BLOCK_BYTES).max(1);
        self.carve(&self.small, blocks, align, self.nodes.current(), |_, _| Ok(()))
    }

    /// Overcommits an extent as a whole, charged when measured: for the allocator's own metadata, which is never given
    /// back.
    ///
    /// # Errors
    ///
    /// `NoMemory` at the limit.
    ///
    /// # Safety
    ///
    /// The range begins an extent of the caller's, of which nothing is committed or overcommitted.
    pub unsafe fn overcommit_extent(&self, addr: usize, len_bytes: usize) -> Result<()> {
        self.overcommit(self.block_of(addr), len_bytes.div_ceil(BLOCK_BYTES), Context::Nested)
    }

    /// The parts of each block that a range covers.
    fn parts(&self, addr: usize, len_bytes: usize) -> impl Iterator<Item = BlockPart> + use<'_> {
        let page = os_page_bytes();
        let (first, last) = (self.block_of(addr), self.block_of(addr + len_bytes.max(1) - 1));
        (first..=last).map(move |block| {
            let start = self.block_addr(block);
            let from = addr.max(start) - start;
            let to = (addr + len_bytes).min(start + BLOCK_BYTES) - start;
            BlockPart { block, pages: from / page..to.div_ceil(page) }
        })
    }

    /// Commits pages of an extent: charges them and makes them zero. After an error nothing is committed.
    ///
    /// # Errors
    ///
    /// `NoMemory`.
    ///
    /// # Safety
    ///
    /// The pages lie in an extent of the caller's, and none of them is committed.
    pub unsafe fn commit(&self, addr: usize, len_bytes: usize) -> Result<()> {
        let mut done = 0;
        for part in self.parts(addr, len_bytes) {
            let part_bytes = part.pages.len() * os_page_bytes();
            if let Err(error) = self.commit_part(&part) {
                stats::add(Counter::ExtentsRefused, 1);
                if done > 0 {
                    // SAFETY: committed just now for this caller, which has not used it yet.
                    unsafe { self.decommit(addr, done) };
                }
                return Err(error);
            }
            done += part_bytes;
        }
        Ok(())
    }

    fn commit_part(&self, part: &BlockPart) -> Result<()> {
        let (mut admitted, mut use_huge) = (0, true);
        loop {
            let mut locked = self.word(part.block).lock(&self.generation);
            if locked.state.backing == Backing::Lazy {
                // The allocator's metadata, or a block that was inherited and measured: open already.
                drop(locked);
                break;
            }
            let take_huge = use_huge && locked.state.backing == Backing::Empty && self.may_take_huge(Filling::Unknown);
            let needed = if take_huge { os_pages_per_block() as u32 } else { self.missing_pages(&locked, part) };
            if needed > admitted {
                // Admission may purge, so it is never called under the lock.
                drop(locked);
                if let Err(error) = self.budget.admit(Self::charged_bytes(needed - admitted), Context::Nested) {
                    if !take_huge {
                        return Err(error);
                    }
                    // A whole block does not fit; the requested pages may.
                    use_huge = false;
                    continue;
                }
                admitted = needed;
                continue;
            }
            let used = self.fill(&mut locked, part, take_huge);
            drop(locked);
            if admitted > used {
                self.budget.discharge(Self::charged_bytes(admitted - used));
            }
            return Ok(());
        }
        if admitted > 0 {
            self.budget.discharge(Self::charged_bytes(admitted));
        }
        Ok(())
    }

    /// OS pages per unit of a block in this state.
    fn unit_pages(&self, state: BlockState) -> usize {
        match state.backing {
            Backing::Huge => os_pages_per_block(),
            _ => (self.page.bytes() / os_page_bytes()).clamp(1, os_pages_per_block()),
        }
    }

    /// Pages of the units that this part would newly make resident.
    fn missing_pages(&self, locked: &Locked<'_>, part: &BlockPart) -> u32 {
        if locked.state.backing == Backing::Huge {
            return 0;
        }
        let (unit, maps) = (self.unit_pages(locked.state), self.maps.get(part.block));
        let units = part.pages.start / unit..part.pages.end.div_ceil(unit);
        // A unit with a stale page is still resident: the kernel did not take it back.
        let is_there = |pages: Range<usize>| maps.committed.any(pages.clone()) || maps.stale.any(pages);
        let missing = units.filter(|index| !is_there(index * unit..(index + 1) * unit)).count();
        (missing * unit) as u32
    }

    /// Commits a part whose pages are admitted; returns how many pages of the admission it used.
    fn fill(&self, locked: &mut Locked<'_>, part: &BlockPart, take_huge: bool) -> u32 {
        let before = locked.state.charged_pages;
        if take_huge {
            locked.state = self.populate(part.block);
            if locked.state.backing != Backing::Huge {
                locked.state = BlockState { backing: Backing::Small, ..BlockState::EMPTY };
                // Pages that the kernel adds by itself would not be counted.
                mem::forbid_huge(self.block_addr(part.block), BLOCK_BYTES);
            }
        }
        if locked.state.backing == Backing::Empty {
            locked.state.backing = Backing::Small;
            // It may have been huge before.
            mem::forbid_huge(self.block_addr(part.block), BLOCK_BYTES);
            stats::add(Counter::BlocksSmall, 1);
        }
        if locked.state.backing == Backing::Small {
            locked.state.charged_pages += self.missing_pages(locked, part);
            self.populate_units(locked, part);
        }
        let maps = self.maps.get(part.block);
        for page in part.pages.clone() {
            if maps.stale.get(page) {
                let addr = self.block_addr(part.block) + page * os_page_bytes();
                // SAFETY: a stale page has no owner until this commit returns it.
                unsafe { std::ptr::write_bytes(addr as *mut u8, 0, os_page_bytes()) };
            }
        }
        maps.stale.set(part.pages.clone(), false);
        maps.committed.set(part.pages.clone(), true);
        Self::count(Counter::Small, before, locked.state.charged_pages);
        locked.state.charged_pages - before
    }

    /// Populates software pages larger than the OS page as a whole; smaller ones come with their first touch.
    fn populate_units(&self, locked: &Locked<'_>, part: &BlockPart) {
        let (unit, maps) = (self.unit_pages(locked.state), self.maps.get(part.block));
        if unit == 1 {
            return;
        }
        for index in part.pages.start / unit..part.pages.end.div_ceil(unit) {
            if !maps.committed.any(index * unit..(index + 1) * unit) {
                let addr = self.block_addr(part.block) + index * unit * os_page_bytes();
                if mem::populate(addr, unit * os_page_bytes()).is_ok() {
                    stats::add(Counter::PagesPopulated, 1);
                }
            }
        }
    }

    /// Decommits pages; returns the bytes given back to the kernel at once.
    ///
    /// # Safety
    ///
    /// The range was committed, and its contents are not needed any more.
    pub unsafe fn decommit(&self, addr: usize, len_bytes: usize) -> u64 {
        let mut freed = 0;
        for part in self.parts(addr, len_bytes) {
            let mut locked = self.word(part.block).lock(&self.generation);
            if locked.state.backing == Backing::Lazy {
                freed += self.drop_overcommitted(&mut locked, &part);
            } else if locked.state.backing != Backing::Empty {
                let maps = self.maps.get(part.block);
                maps.committed.set(part.pages.clone(), false);
                maps.stale.set(part.pages.clone(), true);
                freed += self.drop_units(&mut locked, &part);
            }
        }
        freed
    }

    /// Gives back overcommitted pages (the allocator's first extents). They are zero afterwards, even if the kernel
    /// refuses.
    fn drop_overcommitted(&self, locked: &mut Locked<'_>, part: &BlockPart) -> u64 {
        let addr = self.block_addr(part.block) + part.pages.start * os_page_bytes();
        let len_bytes = part.pages.len() * os_page_bytes();
        let before = locked.state.charged_pages;
        // SAFETY: decommitted by the caller, which needs no contents.
        if unsafe { mem::discard(addr, len_bytes) }.is_err() {
            stats::add(Counter::PurgeFailed, 1);
            // SAFETY: as above; open memory.
            unsafe { std::ptr::write_bytes(addr as *mut u8, 0, len_bytes) };
        }
        self.measure(part.block, &mut locked.state);
        Self::charged_bytes(before.saturating_sub(locked.state.charged_pages))
    }

    /// Gives back the units of a part that have no committed page left.
    fn drop_units(&self, locked: &mut Locked<'_>, part: &BlockPart) -> u64 {
        let (unit, maps) = (self.unit_pages(locked.state), self.maps.get(part.block));
        let before = locked.state.charged_pages;
        let mut run: Option<Range<usize>> = None;
        for index in part.pages.start / unit..part.pages.end.div_ceil(unit) {
            let pages = index * unit..(index + 1) * unit;
            if maps.committed.any(pages.clone()) {
                self.drop_run(locked, part.block, run.take());
            } else {
                run = Some(run.map_or(pages.start, |run| run.start)..pages.end);
            }
        }
        self.drop_run(locked, part.block, run);
        if locked.state.charged_pages == 0 && maps.committed.count() == 0 && maps.stale.count() == 0 {
            locked.state = BlockState::EMPTY;
        }
        Self::count(Counter::Small, before, locked.state.charged_pages);
        let freed = Self::charged_bytes(before - locked.state.charged_pages);
        if freed > 0 {
            self.budget.discharge(freed);
        }
        freed
    }

    fn drop_run(&self, locked: &mut Locked<'_>, block: usize, run: Option<Range<usize>>) {
        let Some(run) = run else { return };
        let addr = self.block_addr(block) + run.start * os_page_bytes();
        // SAFETY: none of these pages is committed, so no thread uses them (the block is locked).
        if unsafe { mem::discard(addr, run.len() * os_page_bytes()) }.is_ok() {
            self.maps.get(block).stale.set(run.clone(), false);
            locked.state.charged_pages = locked.state.charged_pages.saturating_sub(run.len() as u32);
        } else {
            stats::add(Counter::PurgeFailed, 1);
        }
    }

    /// Splits huge pages of which at least a quarter is stale and gives that part back, until `want_bytes` are freed:
    /// 280 us a block.
    pub fn split_sparse_extents(&self, want_bytes: u64) -> u64 {
        let mut freed = 0;
        for block in self.sparse_blocks() {
            if freed >= want_bytes {
                break;
            }
            let mut locked = self.word(block).lock(&self.generation);
            if locked.state.backing == Backing::Huge {
                mem::split_huge(self.block_addr(block), BLOCK_BYTES);
                stats::add(Counter::BlocksSplit, 1);
                locked.state.backing = Backing::Small;
                freed += self.drop_units(&mut locked, &BlockPart { block, pages: 0..os_pages_per_block() });
            }
        }
        freed
    }

    /// Bytes that [`Arena::split_sparse_extents`] would free.
    pub fn sparse_extent_bytes(&self) -> u64 {
        let pages = self.sparse_blocks().map(|block| self.maps.get(block).stale.count());
        (pages.sum::<usize>() * os_page_bytes()) as u64
    }

    /// Huge pages of extents of which at least a quarter is stale.
    fn sparse_blocks(&self) -> impl Iterator<Item = usize> {
        let is_sparse = |block: &usize| {
            self.peek(*block).backing == Backing::Huge
                && self.maps.get(*block).stale.count() * 4 >= os_pages_per_block()
        };
        (0..self.small.used_bytes() / BLOCK_BYTES).filter(is_sparse)
    }

    /// Measures the allocator's own metadata.
    pub fn reconcile_extents(&self) {
        self.reconcile(0, self.small.used_bytes() / BLOCK_BYTES);
    }
}
