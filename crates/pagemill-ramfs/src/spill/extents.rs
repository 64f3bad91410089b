//! [`Extents`]: the space of the spill store, in extents of one segment each.
//!
//! A page of a segment has a fixed place in the segment's extent. Pages that a copy does not have are never written, so
//! a file system with sparse files keeps no blocks for them. An extent that is free again is discarded and reused.

use super::segments::PageSet;
use pagemill_core::sync::{AtomicU64, Guarded, Relaxed};
use pagemill_store::{Aligned, Store, errno};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::sync::Arc;

/// Maximum number of buffers that are kept for later transfers.
const MAX_BUFFERS: usize = 8;

/// Number of an extent in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Extent(u64);

/// The store and its space.
pub(crate) struct Extents {
    store: Arc<dyn Store>,
    space: Guarded<Space>,
    /// Pages of all copies.
    used_pages: AtomicU64,
    limit_pages: u64,
    page_bytes: u64,
    extent_bytes: u64,
    buffers: Guarded<Vec<Aligned>>,
}

#[derive(Default)]
struct Space {
    free: BinaryHeap<Reverse<Extent>>,
    /// Number of extents that were ever used.
    count: u64,
}

impl Extents {
    pub fn new(store: Arc<dyn Store>, limit_bytes: u64, page_bytes: u64, extent_bytes: u64) -> Self {
        let limit_pages = limit_bytes / page_bytes;
        let (space, used_pages, buffers) = (Guarded::default(), AtomicU64::new(0), Guarded::default());
        Self { store, space, used_pages, limit_pages, page_bytes, extent_bytes, buffers }
    }

    pub fn limit_bytes(&self) -> u64 {
        self.limit_pages * self.page_bytes
    }

    /// Allocates an extent for a copy of `pages` pages.
    ///
    /// # Errors
    ///
    /// `ENOSPC` if the copies of all files would exceed the limit.
    pub fn allocate(&self, pages: u64) -> io::Result<Extent> {
        let fits = |used: u64| used.checked_add(pages).filter(|sum| *sum <= self.limit_pages);
        self.used_pages.fetch_update(Relaxed, Relaxed, fits).map_err(|_| errno::error(errno::ENOSPC))?;
        Ok(self.space.with(|space| {
            space.free.pop().map_or_else(
                || {
                    space.count += 1;
                    Extent(space.count - 1)
                },
                |Reverse(extent)| extent,
            )
        }))
    }

    /// Frees the extent of a copy with these pages.
    pub fn free(&self, extent: Extent, pages: PageSet) {
        self.discharge(pages.count());
        self.free_discharged(extent, pages);
    }

    /// Subtracts pages of copies from the used ones. The caller discards them, which may take longer: other threads need
    /// not wait for the store.
    pub fn discharge(&self, pages: u64) {
        let before = self.used_pages.fetch_sub(pages, Relaxed);
        debug_assert!(before >= pages, "pages of copies are freed once");
    }

    /// As [`Extents::free`], after the pages were discharged.
    pub fn free_discharged(&self, extent: Extent, pages: PageSet) {
        self.discard_discharged(extent, pages);
        self.space.with(|space| space.free.push(Reverse(extent)));
    }

    /// Frees the space of some pages of a copy.
    pub fn discard(&self, extent: Extent, pages: PageSet) {
        self.discharge(pages.count());
        self.discard_discharged(extent, pages);
    }

    fn discard_discharged(&self, extent: Extent, pages: PageSet) {
        for run in pages.runs() {
            // A store that cannot free the space keeps it for the extent's next copy.
            let _ = self.store.discard(self.offset_of(extent, run.start), (run.end - run.start) * self.page_bytes);
        }
    }

    /// Reads pages of a copy. Page 0 of the extent is at the begin of `to`.
    pub fn read(&self, extent: Extent, pages: PageSet, to: &mut [u8]) -> io::Result<()> {
        pages.runs().try_for_each(|run| {
            let (start, end) = ((run.start * self.page_bytes) as usize, (run.end * self.page_bytes) as usize);
            self.store.read(self.offset_of(extent, run.start), &mut to[start..end])
        })
    }

    /// Writes pages of a copy. Page 0 of the extent is at the begin of `from`.
    pub fn write(&self, extent: Extent, pages: PageSet, from: &[u8]) -> io::Result<()> {
        pages.runs().try_for_each(|run| {
            let (start, end) = ((run.start * self.page_bytes) as usize, (run.end * self.page_bytes) as usize);
            self.store.write(self.offset_of(extent, run.start), &from[start..end])
        })
    }

    fn offset_of(&self, extent: Extent, page: u64) -> u64 {
        extent.0 * self.extent_bytes + page * self.page_bytes
    }

    /// Calls `act` with a buffer of one extent. The buffer has bytes of earlier uses.
    pub fn with_buffer<R>(&self, act: impl FnOnce(&mut [u8]) -> R) -> R {
        let kept = self.buffers.with(Vec::pop);
        let mut buffer = kept.unwrap_or_else(|| Aligned::new(self.extent_bytes as usize, self.page_bytes as usize));
        let result = act(&mut buffer);
        self.buffers.with(|buffers| {
            if buffers.len() < MAX_BUFFERS {
                buffers.push(buffer);
            }
        });
        result
    }
}
