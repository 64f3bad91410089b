//! Ranges of a file that stay in memory ([`Mapping::lock`], [`View::lock`](super::View::lock)). Eviction checks them
//! after it has frozen a folio. A range is noted before its pages are read into memory. So either eviction finds the
//! range, or the page is read after the eviction.

use super::window::Window;
use crate::mapping::{File, Mapping};
use pagemill_core::error::{Error, Result};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::Guarded;
use pagemill_sys::fault::AllSignalsBlocked;
use std::ops::Range;
use std::sync::atomic::Ordering::SeqCst;

const NOT_LOCKED: Error = Error::WrongState { what: "the range is not locked" };

/// Ranges of pages that stay in memory. A range that is locked twice is in the list twice.
#[derive(Default)]
pub(super) struct LockedRanges(Guarded<Vec<Range<u64>>>);

impl LockedRanges {
    /// Adds a range of pages of `file`.
    fn add(&self, file: &File, pages: Range<u64>) {
        file.count_locked(1, &pages);
        // As in `File::unmap_from_views`.
        let _blocked = AllSignalsBlocked::begin();
        self.0.with(|locked| locked.push(pages));
    }

    /// Removes one range of exactly these pages of `file`.
    ///
    /// # Errors
    ///
    /// [`Error::WrongState`] if there is none.
    fn remove(&self, file: &File, pages: &Range<u64>) -> Result<()> {
        let is_found = {
            let _blocked = AllSignalsBlocked::begin();
            self.0.with(|locked| {
                let at = locked.iter().position(|other| other == pages);
                at.map(|at| locked.swap_remove(at)).is_some()
            })
        };
        if !is_found {
            return Err(NOT_LOCKED);
        }
        file.count_locked(-1, pages);
        Ok(())
    }

    /// Removes all ranges of `file`.
    fn clear(&self, file: &File) {
        let locked = {
            let _blocked = AllSignalsBlocked::begin();
            self.0.with(std::mem::take)
        };
        locked.iter().for_each(|pages| file.count_locked(-1, pages));
    }

    /// Returns whether some of the pages are in a range. The caller has blocked all signals.
    pub(super) fn overlap(&self, pages: &Range<u64>) -> bool {
        self.0.with(|locked| locked.iter().any(|range| range.start < pages.end && range.end > pages.start))
    }
}

impl Window {
    /// Notes that pages stay in memory.
    pub(super) fn lock(&self, pages: Range<u64>) {
        self.locked.add(&self.file, pages);
    }

    /// Ends one lock of pages.
    ///
    /// # Errors
    ///
    /// [`Error::WrongState`] if there is none of exactly these pages.
    pub(super) fn unlock(&self, pages: &Range<u64>) -> Result<()> {
        self.locked.remove(&self.file, pages)
    }

    /// Ends all locks, when the view is dropped.
    pub(super) fn unlock_all(&self) {
        self.locked.clear(&self.file);
    }
}

impl Mapping {
    /// Reads the pages of a range of bytes into memory, and keeps them there until [`Mapping::unlock`] is called as
    /// often with the same range, or the last handle of the file is dropped. Eviction and [`Mapping::dont_need`] leave
    /// locked pages out; writeback writes them. A hole gets pages. [`Mapping::truncate`], [`Mapping::punch_hole`] and
    /// [`Mapping::refresh`] still remove pages of the range. All handles of a file share its locks.
    ///
    /// The cache's limit bounds the locked bytes, together with pages in use. Pages that cannot be evicted leave other
    /// files less room. [`Usage::locked_ranges`](crate::mapping::Usage::locked_ranges) and the counter `cache_locked` have
    /// the sum of all locked ranges.
    ///
    /// Cost: that of reading the range, without copies. An eviction of a page of the file compares the page with all its
    /// locked ranges, so lock few long ranges.
    ///
    /// ```
    /// use pagemill::PageCache;
    /// use pagemill::store::MemoryStore;
    /// use std::sync::Arc;
    ///
    /// let cache = PageCache::builder("tables").limit(64 << 20).build()?;
    /// let file = cache.open(Arc::new(MemoryStore::new(vec![7; 1 << 20], 512)))?;
    /// file.lock(0..64 << 10)?; // the first 64 KiB stay, whatever else is read
    /// assert_eq!(cache.usage().locked_ranges, 64 << 10);
    /// file.unlock(0..64 << 10)?;
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::PastEnd`] if the range does not lie in the file; [`Error::BadOffset`] if it ends before it begins;
    /// [`Error::NoMemory`] if the range and other pages in use do not fit into the cache; else see [`Mapping::pin`].
    /// After an error the range is not locked.
    pub fn lock(&self, range: Range<u64>) -> Result<()> {
        let pages = self.pages_to_lock(&range)?;
        let size_bytes = self.size_bytes();
        if range.end > size_bytes {
            return Err(Error::PastEnd { offset: range.end, size_bytes });
        }
        let locked = &self.0.views.0.get_or_init(Box::default).locked_by_file;
        locked.add(&self.0, pages.clone());
        self.read_into_memory(range).inspect_err(|_| _ = locked.remove(&self.0, &pages))
    }

    /// Ends one [`Mapping::lock`] of a range.
    ///
    /// # Errors
    ///
    /// [`Error::WrongState`] if the pages of the range are not locked by a call with the same pages, and in a fork child.
    pub fn unlock(&self, range: Range<u64>) -> Result<()> {
        let pages = self.pages_to_lock(&range)?;
        self.0.views.0.get().map_or(Err(NOT_LOCKED), |windows| windows.locked_by_file.remove(&self.0, &pages))
    }

    /// Returns the pages that contain the bytes of a range.
    fn pages_to_lock(&self, range: &Range<u64>) -> Result<Range<u64>> {
        let len_bytes = range.end.checked_sub(range.start);
        let len_bytes = len_bytes.ok_or(Error::BadOffset { offset: range.start, len_bytes: 0 })?;
        self.0.check(range.start, len_bytes)?;
        let first = self.0.index_of(range.start);
        Ok(if len_bytes == 0 { first..first } else { first..self.0.index_of(range.end - 1) + 1 })
    }

    /// Reads the folios of a range into memory, one after the other.
    fn read_into_memory(&self, range: Range<u64>) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            at += self.0.pin_or_bring_in(at, range.end)?.len_bytes() as u64;
        }
        Ok(())
    }
}

impl File {
    /// Ends all locks of [`Mapping::lock`], when the last handle is dropped.
    pub(crate) fn unlock_all(&self) {
        if let Some(windows) = self.views.0.get() {
            windows.locked_by_file.clear(self);
        }
    }

    /// Returns whether some of the pages are locked, by the file or by a view.
    pub(crate) fn is_locked_in_memory(&self, pages: Range<u64>) -> bool {
        let Some(windows) = self.views.0.get().filter(|windows| windows.locked.load(SeqCst) > 0) else { return false };
        // As in `File::unmap_from_views`.
        let _blocked = AllSignalsBlocked::begin();
        windows.locked_by_file.overlap(&pages)
            || windows.list.with(|list| list.iter().any(|window| window.locked.overlap(&pages)))
    }

    /// Adds a range of pages to those that are counted (`ranges` is 1), or subtracts it (-1).
    fn count_locked(&self, ranges: i32, pages: &Range<u64>) {
        let Some(windows) = self.views.0.get() else { return };
        let bytes = (pages.end - pages.start) * self.page_bytes() as u64;
        windows.locked.fetch_add(ranges.cast_unsigned(), SeqCst);
        let sum = &self.cache.locked_ranges;
        if ranges > 0 {
            sum.fetch_add(bytes, SeqCst);
            stats::add(Counter::CacheLocked, bytes);
        } else {
            sum.fetch_sub(bytes, SeqCst);
            stats::sub(Counter::CacheLocked, bytes);
        }
    }
}
