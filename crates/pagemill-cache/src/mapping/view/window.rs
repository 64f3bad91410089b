//! Windows: the addresses of views, and the folios that are mapped there.
#![allow(unsafe_code)] // maps memory, accesses the table of entries

use super::registry;
use crate::folio::word::Kind;
use crate::mapping::File;
use pagemill_core::error::{Error, Result};
use pagemill_core::sync::{AtomicU32, AtomicU64, Backoff, Guarded};
use pagemill_core::units::BLOCK_BYTES;
use pagemill_sys::fault::AllSignalsBlocked;
use pagemill_sys::{mem, window};
use std::ops::Range;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed, Ordering::SeqCst, fence};

/// Entry without a folio.
const EMPTY: u32 = 0;
/// Entry that one thread changes.
const CLAIMED: u32 = 1;
/// Entry of the folio that begins at page `number` of the pool: `number + FIRST`.
const FIRST: u32 = 2;

/// Number of entries that are counted together.
const BLOCK_ENTRIES: usize = 1024;

/// Returns the length of a table of words, in whole OS pages.
fn table_bytes(count: usize) -> usize {
    (count * size_of::<u32>()).next_multiple_of(mem::os_page_bytes())
}

/// Maximum number of attempts to map a page that was read into memory. The page may be evicted before it is mapped.
const MAX_FILL_ATTEMPTS: usize = 64;

/// Number of entries with a folio, in all windows. Each is at most one mapping of the process, and one gap.
static PIECES: AtomicUsize = AtomicUsize::new(0);

/// Returns the maximum of [`PIECES`]: with the gaps, half of the mappings that a process may have.
fn max_pieces() -> usize {
    static MAX: AtomicUsize = AtomicUsize::new(0);
    match MAX.load(Relaxed) {
        0 => {
            let max = window::max_mappings() / 4;
            MAX.store(max, Relaxed);
            max
        }
        max => max,
    }
}

/// Ends the pieces of the parent in a fork child.
pub(super) fn begin_child() {
    PIECES.store(0, Relaxed);
}

/// Result of mapping a page in the fault handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mapped {
    Yes,
    /// Another thread changes the entry.
    Busy,
    /// The page is not in memory, or the slow path is needed for another reason.
    No,
}

/// Which pages an unmapping includes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unmap {
    /// All pages: the file loses them.
    Always,
    /// Not those of a [`Prefaulted`](super::Prefaulted), which count as pinned.
    UnlessKept,
}

/// The reserved addresses of a view.
pub(crate) struct Window {
    pub file: Arc<File>,
    pub addr: usize,
    pub len_bytes: usize,
    /// Offset in the file of the window's first byte.
    offset: u64,
    /// The first software page of the file that lies in the window, perhaps only in part.
    first_page: u64,
    /// Address of the entries, one for each software page.
    entries: usize,
    entry_count: usize,
    /// Address of a table that has, for each [`BLOCK_ENTRIES`] entries, the number of those that are not empty, and of
    /// threads that may claim one. So an unmapping passes over empty parts of a large window.
    blocks: usize,
    /// Number of pages that [`Window::unmap_next`] has passed.
    hand: AtomicU64,
    /// Pages that stay mapped while a [`Prefaulted`](super::Prefaulted) exists.
    pub kept: Guarded<Vec<Range<u64>>>,
    /// The latest error of a fill request.
    pub error: Guarded<Option<Error>>,
}

impl Window {
    /// Reserves addresses that are congruent to the range of the file modulo 2 MiB, so that huge folios can be mapped as
    /// huge pages.
    pub fn new(file: Arc<File>, range: Range<u64>) -> Result<Self> {
        let no_addresses = || Error::NoAddresses { wanted_bytes: range.end - range.start };
        let len_bytes = usize::try_from(range.end - range.start).map_err(|_| no_addresses())?;
        let len_bytes = len_bytes.checked_next_multiple_of(mem::os_page_bytes()).ok_or_else(no_addresses)?;
        let head = (range.start % BLOCK_BYTES as u64) as usize;
        let reserved = mem::reserve(len_bytes.checked_add(head).ok_or_else(no_addresses)?, BLOCK_BYTES, 0);
        let reserved = reserved.map_err(|_| no_addresses())?;
        if head > 0 {
            // SAFETY: the addresses in front of the window were just reserved.
            unsafe { mem::unreserve(reserved, head) };
        }
        let addr = reserved + head;
        let first_page = file.index_of(range.start);
        let entry_count = (file.index_of(range.end - 1) + 1 - first_page) as usize;
        let entries = mem::map_sparse(entry_count * size_of::<u32>(), mem::os_page_bytes()).map_err(|_| {
            // SAFETY: no other code knows the addresses.
            unsafe { mem::unreserve(addr, len_bytes) };
            no_addresses()
        })?;
        let block_count = entry_count.div_ceil(BLOCK_ENTRIES);
        let blocks = mem::map_sparse(block_count * size_of::<u32>(), mem::os_page_bytes()).map_err(|_| {
            // SAFETY: no other code knows the addresses.
            unsafe {
                mem::unreserve(addr, len_bytes);
                mem::unreserve(entries, table_bytes(entry_count));
            }
            no_addresses()
        })?;
        let error = Guarded::new(None);
        Ok(Self {
            file,
            addr,
            len_bytes,
            offset: range.start,
            first_page,
            entries,
            entry_count,
            blocks,
            hand: AtomicU64::new(0),
            kept: Guarded::new(Vec::new()),
            error,
        })
    }

    /// Returns the page of the file at an address of the window.
    pub fn page_at(&self, addr: usize) -> u64 {
        debug_assert!((self.addr..self.addr + self.len_bytes).contains(&addr));
        self.file.index_of(self.offset + (addr - self.addr) as u64)
    }

    /// Returns the offset in the file of an address of the window.
    pub fn offset_at(&self, addr: usize) -> u64 {
        self.offset + (addr - self.addr) as u64
    }

    /// Returns the pages of the file in a range of the window.
    pub fn pages_of(&self, range: Range<usize>) -> Range<u64> {
        if range.is_empty() {
            return 0..0;
        }
        self.page_at(self.addr + range.start)..self.page_at(self.addr + range.end - 1) + 1
    }

    fn entry(&self, page: u64) -> &AtomicU32 {
        let at = (page - self.first_page) as usize;
        debug_assert!(at < self.entry_count, "the page is in the window");
        // SAFETY: the table has `entry_count` words, is zero at first, and lives as long as the window.
        unsafe { &*ptr::with_exposed_provenance::<AtomicU32>(self.entries).add(at) }
    }

    /// Returns the number of used entries of a page's block.
    fn block(&self, page: u64) -> &AtomicU32 {
        let at = (page - self.first_page) as usize / BLOCK_ENTRIES;
        // SAFETY: as for `entry`, with a word for each block.
        unsafe { &*ptr::with_exposed_provenance::<AtomicU32>(self.blocks).add(at) }
    }

    /// Returns the bytes of the file that both the window and the folio of 2^`order` pages with page `page` have, up to
    /// the end of the file's last OS page.
    fn common_range(&self, page: u64, order: u8) -> Range<u64> {
        let first = page >> order << order;
        let end_of_file = self.file.size_bytes().next_multiple_of(mem::os_page_bytes() as u64);
        let begin = self.file.offset_of(first);
        let end = (begin + self.file.cache.folio_bytes(order)).min(self.offset + self.len_bytes as u64);
        begin.max(self.offset)..end.min(end_of_file)
    }

    /// Maps the folio of the page with the byte at `offset` of the file, if it is in memory. Neither allocates nor locks:
    /// the fault handler calls this. All signals are blocked, because a handler of the program could access the page,
    /// and would then wait for the entry.
    pub fn try_map(&self, offset: u64) -> Mapped {
        let page = self.file.index_of(offset);
        let (entry, block) = (self.entry(page), self.block(page));
        // Counted before the claim, so that an unmapping does not pass over the entry.
        block.fetch_add(1, SeqCst);
        let seen = entry.load(SeqCst);
        if seen == CLAIMED || entry.compare_exchange(seen, CLAIMED, SeqCst, Relaxed).is_err() {
            block.fetch_sub(1, SeqCst);
            return Mapped::Busy;
        }
        // Orders the claim before the look-up and the load of the file's length (`unmap`).
        fence(SeqCst);
        let number = if seen == EMPTY { self.pin(page) } else { Ok(seen - FIRST) };
        let (Ok(number) | Err(Some(number))) = number else {
            entry.store(EMPTY, SeqCst);
            block.fetch_sub(1, SeqCst);
            return Mapped::No;
        };
        let (frame, file) = (self.file.pool.frame(number), &self.file);
        let state = frame.word.load();
        let is_right = state.kind() == Kind::Live && file.has_page_in(frame, page, state.order());
        let is_mapped = is_right && self.map(number, offset, state.order());
        if seen == EMPTY {
            PIECES.fetch_add(1, Relaxed);
        } else {
            // The entry was counted before.
            block.fetch_sub(1, SeqCst);
        }
        // The entry keeps the pin also of a wrong folio: ending a pin may free the folio, which needs a lock.
        entry.store(number + FIRST, SeqCst);
        if is_mapped { Mapped::Yes } else { Mapped::No }
    }

    /// Pins the folio of a page. Returns `Err(None)` if it is not in memory, and `Err` with its number if the pinned
    /// folio is that of another page by now.
    fn pin(&self, page: u64) -> std::result::Result<u32, Option<u32>> {
        let Some((found, frame)) = self.file.hint(page) else { return Err(None) };
        // The first use of a page that was read ahead may start further readahead, which allocates.
        let is_read_ahead = self.file.store.is_some() && frame.word.load().is_prefetched();
        if is_read_ahead || frame.word.pin().is_err() {
            return Err(None);
        }
        if !self.file.has_page_in(frame, page, frame.word.load().order()) {
            return Err(Some(found.value as u32));
        }
        if self.file.store.is_some() {
            let _ = frame.word.note_use();
        }
        Ok(found.value as u32)
    }

    /// Maps the part of a pinned folio that lies in the window. Returns whether the byte at `offset` is mapped.
    fn map(&self, number: u32, offset: u64, order: u8) -> bool {
        let page = self.file.index_of(offset);
        let range = self.common_range(page, order);
        let may_map = range.contains(&offset) && PIECES.load(Relaxed) < max_pieces();
        let Some(memory) = self.file.pool.memory_file().filter(|_| may_map) else { return false };
        let at = range.start - self.file.offset_of(page >> order << order);
        let in_pool = self.file.pool.offset_in_memory(number) + at as usize;
        let addr = self.addr + (range.start - self.offset) as usize;
        // SAFETY: the addresses lie in the window, whose pages are accessed only through mappings.
        unsafe { memory.map_to_read(in_pool, (range.end - range.start) as usize, addr) }.is_ok()
    }

    /// Reads a page into memory and maps its folio. Returns the first page behind the folio.
    ///
    /// # Errors
    ///
    /// As [`crate::mapping::Mapping::pin`]. [`Error::PastEnd`] behind the end of the file.
    pub fn fill(&self, page: u64) -> Result<u64> {
        let file = &self.file;
        let offset = file.offset_of(page).max(self.offset);
        let mut backoff = Backoff::new();
        for attempt in 0..MAX_FILL_ATTEMPTS {
            let size_bytes = file.size_bytes();
            if offset >= size_bytes {
                return Err(Error::PastEnd { offset, size_bytes });
            }
            // The pin keeps the page in memory until it is mapped, and counts as its use.
            let pin = file.pin_for_view(offset)?;
            let blocked = AllSignalsBlocked::begin();
            let mapped = self.try_map(offset);
            let end = file.index_of(offset + pin.len_bytes() as u64 - 1) + 1;
            drop(blocked);
            match mapped {
                Mapped::Yes => return Ok(end),
                Mapped::No => {
                    // The entry may have a folio that was removed from the file. Or there are too many mappings.
                    self.unmap(page..page + 1, Unmap::Always);
                    if PIECES.load(Relaxed) >= max_pieces() || attempt > 0 {
                        registry::unmap_some(max_pieces() / 8);
                    }
                }
                Mapped::Busy => {}
            }
            drop(pin);
            backoff.pause();
        }
        Err(Error::Busy { what: "the page cannot be mapped" })
    }

    /// Unmaps pages, and ends the pins of their entries. Waits for threads that are changing one of the entries.
    pub fn unmap(&self, pages: Range<u64>, how: Unmap) {
        let _blocked = AllSignalsBlocked::begin();
        // Orders the removal of a folio, or the change of the file's length, before the loads of entries (`try_map`).
        fence(SeqCst);
        let end = self.first_page + self.entry_count as u64;
        let (mut page, end) = (pages.start.max(self.first_page), pages.end.min(end));
        while page < end {
            if self.block(page).load(SeqCst) == 0 {
                // Continues with the next block.
                let at = (page - self.first_page) as usize / BLOCK_ENTRIES * BLOCK_ENTRIES;
                page = self.first_page + (at + BLOCK_ENTRIES) as u64;
                continue;
            }
            self.unmap_page(page, how);
            page += 1;
        }
    }

    /// Unmaps `count` pages or more, from the page on where the last call ended, or all pages.
    pub fn unmap_next(&self, count: usize) {
        let target = PIECES.load(Relaxed).saturating_sub(count);
        for _ in 0..self.entry_count.div_ceil(BLOCK_ENTRIES) {
            if PIECES.load(Relaxed) <= target {
                return;
            }
            let at = self.hand.fetch_add(BLOCK_ENTRIES as u64, Relaxed);
            let at = at % (self.entry_count.next_multiple_of(BLOCK_ENTRIES)) as u64;
            self.unmap(self.first_page + at..self.first_page + at + BLOCK_ENTRIES as u64, Unmap::UnlessKept);
        }
    }

    fn unmap_page(&self, page: u64, how: Unmap) {
        let entry = self.entry(page);
        let mut backoff = Backoff::new();
        let number = loop {
            match entry.load(SeqCst) {
                EMPTY => return,
                CLAIMED => backoff.pause(),
                seen if entry.compare_exchange(seen, CLAIMED, SeqCst, Relaxed).is_ok() => break seen - FIRST,
                _ => {}
            }
        };
        let order = self.file.pool.word(number).load().order();
        // Checked after the claim: a range that is kept from now on is mapped again by `fill`. The mapping is that of the
        // whole folio, so one kept page keeps all.
        let (first, last) = (page >> order << order, page | ((1 << order) - 1));
        let is_kept = |kept: &Range<u64>| kept.start <= last && kept.end > first;
        if how == Unmap::UnlessKept && self.kept.with(|kept| kept.iter().any(is_kept)) {
            entry.store(number + FIRST, SeqCst);
            return;
        }
        let begin = self.file.offset_of(page >> order << order);
        let end = (begin + self.file.cache.folio_bytes(order)).min(self.offset + self.len_bytes as u64);
        let begin = begin.max(self.offset);
        if begin < end {
            let (addr, len_bytes) = (self.addr + (begin - self.offset) as usize, (end - begin) as usize);
            // SAFETY: the addresses lie in the window. Accesses to them call the fault handler, which waits for the
            // entry. A process with too many mappings cannot split one, but can remove the access to mappings, or
            // replace all of the window. The other pages are mapped again when they are accessed.
            let is_unmapped = unsafe {
                window::reserve_again(addr, len_bytes).is_ok()
                    || mem::close(addr, len_bytes).is_ok()
                    || window::reserve_again(self.addr, self.len_bytes).is_ok()
                    || mem::close(self.addr, self.len_bytes).is_ok()
            };
            if !is_unmapped {
                // The memory of the folio would be accessible after its reuse.
                std::process::abort();
            }
        }
        PIECES.fetch_sub(1, Relaxed);
        entry.store(EMPTY, SeqCst);
        self.block(page).fetch_sub(1, SeqCst);
        self.file.cache.unpin(number);
    }

    /// Unmaps all pages, and ends the reservation of the addresses. Called once, when no fault handler uses the window.
    pub fn unmap_all(&self) {
        self.unmap(self.first_page..self.first_page + self.entry_count as u64, Unmap::Always);
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        if self.file.cache.check().is_err() {
            return;
        }
        // SAFETY: the view was dropped, so no code accesses the window. Nothing refers to the table.
        unsafe {
            mem::unreserve(self.addr, self.len_bytes);
            mem::unreserve(self.entries, table_bytes(self.entry_count));
            mem::unreserve(self.blocks, table_bytes(self.entry_count.div_ceil(BLOCK_ENTRIES)));
        }
    }
}
