//! Windows: the reserved addresses of views.
#![allow(unsafe_code)] // reserves memory

use super::entry::{self, Entries};
use super::locked::LockedRanges;
use super::private::OwnPages;
use crate::mapping::File;
use pagemill_core::error::{Error, Result};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{AtomicU64, Guarded};
use pagemill_core::units::BLOCK_BYTES;
use pagemill_sys::{mem, window};
use std::ops::Range;
use std::sync::Arc;

/// What a view does with writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Writes {
    /// They fail with `SIGSEGV`.
    Refused,
    /// They change the file.
    Shared,
    /// They change a copy of the page that belongs to the view.
    Private,
}

/// The reserved addresses of a view, and what is mapped there.
pub(crate) struct Window {
    pub(super) file: Arc<File>,
    pub(super) writes: Writes,
    pub(super) addr: usize,
    pub(super) len_bytes: usize,
    /// Offset in the file of the window's first byte.
    pub(super) offset: u64,
    /// The first software page of the file that lies in the window, perhaps only in part.
    pub(super) first_page: u64,
    /// One entry for each software page.
    pub(super) entries: Entries,
    /// The pages that belong to a view with private writes.
    pub(super) own_pages: Option<OwnPages>,
    /// Number of pages that [`Window::unmap_next`] has passed.
    pub(super) hand: AtomicU64,
    /// Pages that stay mapped while a [`Prefaulted`](super::Prefaulted) exists. A range is added before its pages are
    /// mapped. An unmapping holds the lock from its look at the ranges until it has unmapped the pages, so a page of a
    /// range that is added meanwhile is mapped afterwards. The lock is also held while a huge folio is mapped, because
    /// several entries can have the same one. It is acquired before the lock of [`OwnPages`].
    pub(super) kept: Guarded<Vec<Range<u64>>>,
    /// Pages that stay in memory until they are unlocked ([`View::lock`](super::View::lock)).
    pub(super) locked: LockedRanges,
    /// The latest error for which an access raised `SIGBUS`.
    pub(super) error: Guarded<Option<Error>>,
}

impl Window {
    /// Reserves addresses that are congruent to the range of the file modulo 2 MiB, so that huge folios can be mapped
    /// as huge pages.
    pub fn new(file: Arc<File>, range: Range<u64>, writes: Writes) -> Result<Self> {
        let no_addresses = || Error::NoAddresses { wanted_bytes: range.end - range.start };
        let len_bytes = usize::try_from(range.end - range.start).map_err(|_| no_addresses())?;
        let len_bytes = len_bytes.checked_next_multiple_of(mem::os_page_bytes()).ok_or_else(no_addresses)?;
        let first_page = file.index_of(range.start);
        let count = (file.index_of(range.end - 1) + 1 - first_page) as usize;
        let entries = Entries::new(count).map_err(|_| no_addresses())?;
        let own_pages = match writes {
            Writes::Private => Some(OwnPages::new(&file, range.start, len_bytes, count)?),
            Writes::Refused | Writes::Shared => None,
        };
        stats::set(Counter::ViewMappingsMax, entry::max_pieces() as u64);
        let head = (range.start % BLOCK_BYTES as u64) as usize;
        let reserved = mem::reserve(len_bytes.checked_add(head).ok_or_else(no_addresses)?, BLOCK_BYTES, 0);
        let reserved = reserved.map_err(|_| no_addresses())?;
        if head > 0 {
            // SAFETY: the addresses in front of the window were just reserved.
            unsafe { mem::unreserve(reserved, head) };
        }
        Ok(Self {
            file,
            writes,
            addr: reserved + head,
            len_bytes,
            offset: range.start,
            first_page,
            entries,
            own_pages,
            hand: AtomicU64::new(0),
            kept: Guarded::new(Vec::new()),
            locked: LockedRanges::default(),
            error: Guarded::new(None),
        })
    }

    /// Returns the page of the file at an address of the window.
    pub fn page_at(&self, addr: usize) -> u64 {
        self.file.index_of(self.offset_at(addr))
    }

    /// Returns the offset in the file of an address of the window.
    pub fn offset_at(&self, addr: usize) -> u64 {
        debug_assert!((self.addr..self.addr + self.len_bytes).contains(&addr));
        self.offset + (addr - self.addr) as u64
    }

    /// Returns the pages of the file in a range of the window.
    pub fn pages_of(&self, range: Range<usize>) -> Range<u64> {
        if range.is_empty() {
            return 0..0;
        }
        self.page_at(self.addr + range.start)..self.page_at(self.addr + range.end - 1) + 1
    }

    /// Returns all pages of the file in the window.
    pub fn pages(&self) -> Range<u64> {
        self.first_page..self.first_page + self.entries.count() as u64
    }

    /// Returns the entry of a page.
    pub fn at(&self, page: u64) -> usize {
        (page - self.first_page) as usize
    }

    /// Returns the bytes of pages of the file that lie in the window.
    pub fn bytes_of(&self, pages: Range<u64>) -> Range<u64> {
        let end = self.file.offset_of(pages.end).min(self.offset + self.len_bytes as u64);
        self.file.offset_of(pages.start).max(self.offset)..end
    }

    /// Returns the address of a byte of the file that lies in the window.
    pub fn addr_of(&self, offset: u64) -> usize {
        debug_assert!(offset >= self.offset && offset - self.offset <= self.len_bytes as u64);
        self.addr + (offset - self.offset) as usize
    }

    /// Makes a range of addresses inaccessible: replaces what is mapped there by the reservation. `around` returns a
    /// larger range that consists of whole mappings. The pages there are mapped again when they are accessed.
    pub(super) fn reserve_again(range: &Range<usize>, around: impl Fn() -> Range<usize>) {
        #[cfg(shuttle)]
        pagemill_core::sync::modelled::scheduling_point();
        // A process with too many mappings cannot split one, but can remove the access to mappings, or replace whole
        // ones. SAFETY: the addresses lie in the window. Accesses to them call the fault handler.
        let is_unmapped = unsafe {
            window::reserve_again(range.start, range.len()).is_ok()
                || mem::close(range.start, range.len()).is_ok()
                || window::reserve_again(around().start, around().len()).is_ok()
                || mem::close(around().start, around().len()).is_ok()
        };
        if !is_unmapped {
            // The memory of the folios would be accessible after its reuse.
            std::process::abort();
        }
    }

    /// Called after a mapping of a range has failed: the kernel may have unmapped the range already. If so, reserves
    /// it. Otherwise what is mapped there stays.
    pub(super) fn reserve_if_unmapped(range: &Range<usize>) {
        let is_mapped = || mem::is_mapped(range.start, range.len()).is_ok();
        if !is_mapped() {
            window::reserve_if_unmapped(range.start, range.len());
            if !is_mapped() {
                // Other memory would be mapped there, which accesses to the window would change.
                std::process::abort();
            }
        }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        if self.file.cache.check().is_err() {
            // In a fork child the window is not mapped.
            return;
        }
        // SAFETY: the view was dropped, so no code accesses the window.
        unsafe { mem::unreserve(self.addr, self.len_bytes) };
    }
}
