//! The index of a file: finding and pinning the folio of a page, and removing folios.

use super::view::Unmap;
use super::{File, TimedWait};
use crate::folio::{Frame, Owner};
use pagemill_core::epoch;
use pagemill_core::error::Result;
use pagemill_sys::mem;
use pagemill_xarray::Found;
use std::ops::Range;
use std::sync::atomic::{Ordering::SeqCst, fence};

/// Location of a folio that the caller has pinned, and must unpin (`Inner::unpin`), or has frozen, and must thaw
/// ([`File::thaw`]).
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub number: u32,
    /// Index of the folio's first page.
    pub first: u64,
    pub order: u8,
}

impl File {
    /// Pins the folio of a page. Returns `None` if the page has no folio.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::Busy`] if another thread holds the folio for a second.
    #[inline]
    pub(crate) fn pin_page(&self, index: u64) -> Result<Option<Place>> {
        let offset = self.offset_of(index);
        match self.tree.hint(index).and_then(|found| self.try_pin_number(found.value, found.order, offset)) {
            Some((place, _)) => Ok(Some(place)),
            None => self.pin_page_slowly(index),
        }
    }

    /// Pins the folio of 2^`order` pages that begins at page `number` of the pool, if there is such a folio and it has the
    /// byte at `offset` of this file.
    ///
    /// Inlined with the creation of the guard, so that the guard stays in registers. A guard that is stored, and loaded
    /// by an instruction of another width, would stop the processor until all earlier instructions have completed. Then
    /// the cache misses of several pins could not overlap: one pin would take three times as long.
    #[inline(always)]
    pub(crate) fn try_pin_number(&self, number: u64, order: u32, offset: u64) -> Option<(Place, &'static Frame)> {
        let frame: &'static Frame = self.pool.frame_if_any(number)?;
        self.prefetch(number as u32, order, offset);
        let index = self.index_of(offset);
        let pinned_order = frame.word.pin().ok()?.order();
        let place = Place { number: number as u32, first: index >> pinned_order << pinned_order, order: pinned_order };
        // A pinned folio keeps its owner.
        if self.has_page_in(frame, index, pinned_order) && u32::from(pinned_order) == order {
            self.note_use(frame, offset, 1);
            return Some((place, frame));
        }
        self.cache.unpin(place.number);
        None
    }

    /// Prefetches the byte at `offset` into the CPU cache, so that its cache miss overlaps with that of the folio's
    /// state word. The folio of 2^`order` pages begins at page `number` of the pool. A wrong order does no harm.
    #[inline(always)]
    pub(crate) fn prefetch(&self, number: u32, order: u32, offset: u64) {
        // A folio's offset in the file is a multiple of its length.
        let at = offset as usize & ((1 << (self.pool.page_shift + order)) - 1);
        mem::prefetch(self.pool.addr(number) + at);
    }

    /// Returns the entry of a page and its frame, without a lock or an epoch. Both may be outdated.
    #[inline(always)]
    pub(crate) fn hint(&self, index: u64) -> Option<(Found, &'static Frame)> {
        let found = self.tree.hint(index)?;
        Some((found, self.pool.frame_if_any(found.value)?))
    }

    /// Returns whether a page has a folio. May return false for a page that has one, if another thread changes the
    /// index or the folio. Needs no epoch.
    pub(crate) fn seems_present(&self, index: u64) -> bool {
        self.hint(index).is_some_and(|(_, frame)| {
            let state = frame.word.load();
            state.is_readable() && self.has_page_in(frame, index, state.order())
        })
    }

    /// Returns whether the live or frozen folio of 2^`order` pages that begins at a frame has page `index` of this
    /// file.
    #[inline]
    pub(crate) fn has_page_in(&self, frame: &Frame, index: u64, order: u8) -> bool {
        frame.has_page(Owner { id: self.id, index }, order)
    }

    /// Records a use of a folio for eviction, by an access to bytes of it. The first use of a folio that was read ahead
    /// may start further readahead.
    #[inline(always)] // a call would cost each hit more than the check itself
    pub(crate) fn note_use(&self, frame: &Frame, offset: u64, len_bytes: usize) {
        if self.store.is_some() && frame.word.note_use() {
            self.note_first_use(frame, offset, len_bytes);
        }
    }

    /// As [`File::pin_page`], but holds an epoch guard during the lookup, and waits for a held or frozen folio.
    #[cold]
    pub(crate) fn pin_page_slowly(&self, index: u64) -> Result<Option<Place>> {
        let mut timed_wait = TimedWait::new();
        loop {
            let guard = epoch::pin();
            let Some(hit) = self.tree.find(index, &guard) else { return Ok(None) };
            let number = hit.value() as u32;
            match self.pool.word(number).pin() {
                // A pinned folio does not move to another file, so the index entry stays valid.
                Ok(state) if hit.is_still() => {
                    return Ok(Some(Place { number, first: hit.first(), order: state.order() }));
                }
                Ok(_) => self.cache.unpin(number),
                Err(_) if !hit.is_still() => {}
                Err(_) => {
                    drop(guard);
                    timed_wait.wait()?;
                }
            }
        }
    }

    /// Returns the folios that cover some of `pages`, in the order of the file. Each step is a look-up of its own, with
    /// a guard of its own, so the caller may wait or change the index between two steps.
    pub(crate) fn folios(&self, pages: Range<u64>) -> impl Iterator<Item = Found> {
        let mut at = pages.start;
        std::iter::from_fn(move || {
            let found = (at < pages.end).then(|| self.tree.next(at, pages.end - 1, &epoch::pin())).flatten()?;
            at = found.last() + 1;
            Some(found)
        })
    }

    /// Returns whether a page has a folio.
    pub(crate) fn has_page(&self, index: u64) -> bool {
        self.tree.find(index, &epoch::pin()).is_some()
    }

    /// Thaws a frozen folio. Frees it if it was removed from its file meanwhile.
    pub(crate) fn thaw(&self, number: u32) {
        self.note_revived(number, self.pool.word(number).thaw());
    }

    /// Frees a folio that could not be made live again, because it was removed from its file while this thread used it.
    pub(crate) fn note_revived(&self, number: u32, is_live: bool) {
        if !is_live {
            self.cache.free(number, self.pool.word(number).load().order());
        }
    }

    /// Removes from the index the folios that lie completely in pages `first..=last`. Returns the bytes freed. A pinned
    /// folio is freed by its last unpin, a held or frozen one by the thread that ends this state.
    pub(crate) fn remove_pages(&self, first: u64, last: u64) -> u64 {
        /// Maximum number of folios that are removed in one acquisition of the index's lock.
        const BATCH: usize = 256;
        let (mut from, mut removed_bytes, mut is_complete) = (first, 0, false);
        while !is_complete {
            let (mut freed, mut count, mut dirty_bytes) = ([(0, 0); BATCH], 0, 0);
            let mut writer = self.tree.lock();
            self.note_revoked();
            for _ in 0..BATCH {
                let Some(found) = (from <= last).then(|| writer.next(from, last)).flatten() else {
                    is_complete = true;
                    break;
                };
                from = found.last() + 1;
                if found.first < first || found.last() > last {
                    continue;
                }
                // If the folio is being split, the order in its word is outdated, unlike that of the index.
                let (number, bytes) = (found.value as u32, self.cache.folio_bytes(found.order as u8));
                // Before the index loses the folio: a hint must not find a live folio that is not in the index.
                let left = self.pool.word(number).remove_from_file();
                writer.erase(found.first);
                dirty_bytes += if left.was_dirty { bytes } else { 0 };
                if left.must_be_freed {
                    freed[count] = (number, found.order as u8);
                    count += 1;
                    removed_bytes += bytes;
                }
            }
            drop(writer);
            self.sub_dirty(dirty_bytes);
            if count > 0 {
                self.cache.free_several(freed[..count].iter().copied());
            }
        }
        // Orders the removals before the check for views. A new view finds the removed folios gone.
        fence(SeqCst);
        if !self.views.is_empty() {
            self.unmap_from_views(first..last.saturating_add(1), Unmap::Always);
        }
        removed_bytes
    }
}
