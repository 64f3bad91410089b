//! Ranges of views that stay in memory ([`View::lock`](super::View::lock)). Eviction checks them after it has frozen a
//! folio. A range is noted before its pages are read into memory. So either eviction finds the range, or the page is
//! read after the eviction.

use super::window::Window;
use pagemill_core::stats::{self, Counter};
use pagemill_sys::fault::AllSignalsBlocked;
use std::ops::Range;
use std::sync::atomic::Ordering::SeqCst;

impl Window {
    /// Notes that pages stay in memory.
    pub(super) fn lock(&self, pages: Range<u64>) {
        self.count_locked(1, self.bytes_of_pages(&pages));
        // As in `File::unmap_from_views`.
        let _blocked = AllSignalsBlocked::begin();
        self.locked.with(|locked| locked.push(pages));
    }

    /// Ends one lock of pages. Returns false if there is none of exactly these pages.
    pub(super) fn unlock(&self, pages: &Range<u64>) -> bool {
        let is_found = {
            let _blocked = AllSignalsBlocked::begin();
            self.locked.with(|locked| {
                let at = locked.iter().position(|other| other == pages);
                at.map(|at| locked.swap_remove(at)).is_some()
            })
        };
        if is_found {
            self.count_locked(-1, self.bytes_of_pages(pages));
        }
        is_found
    }

    /// Ends all locks, when the view is dropped.
    pub(super) fn unlock_all(&self) {
        let locked = {
            let _blocked = AllSignalsBlocked::begin();
            self.locked.with(std::mem::take)
        };
        locked.iter().for_each(|pages| self.count_locked(-1, self.bytes_of_pages(pages)));
    }

    /// Returns whether some of the pages are locked.
    pub(super) fn has_locked(&self, pages: &Range<u64>) -> bool {
        self.locked.with(|locked| locked.iter().any(|range| range.start < pages.end && range.end > pages.start))
    }

    fn bytes_of_pages(&self, pages: &Range<u64>) -> u64 {
        (pages.end - pages.start) * self.file.page_bytes() as u64
    }

    /// Adds a range of `bytes` to those that are counted, or subtracts it.
    fn count_locked(&self, ranges: i32, bytes: u64) {
        let Some(windows) = self.file.views.0.get() else { return };
        windows.locked.fetch_add(ranges.cast_unsigned(), SeqCst);
        let counter = &self.file.cache.locked_by_views;
        if ranges > 0 {
            counter.fetch_add(bytes, SeqCst);
            stats::add(Counter::ViewLocked, bytes);
        } else {
            counter.fetch_sub(bytes, SeqCst);
            stats::sub(Counter::ViewLocked, bytes);
        }
    }
}
