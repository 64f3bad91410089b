//! Writing: copies bytes in place into an existing folio. Where none exists, fills a new folio, which then enters the
//! index.

use crate::mapping::index::Place;
use crate::mapping::policy::Cause;
use crate::mapping::request::{MAX_BATCH_PAGES, Purpose, Unpublished};
use crate::mapping::{File, Mapping, in_pieces, one_by_one};
use pagemill_core::error::Result;
use pagemill_core::sync::Relaxed;
use std::io::IoSlice;
use std::ops::Range;

impl Mapping {
    /// Copies `from` into the file at `offset`, and extends the file if needed. Returns the number of bytes written:
    /// all of them, or as many as memory was found for.
    ///
    /// The part in each folio is written completely before or after a concurrent `truncate` or `punch_hole`.
    ///
    /// Cost: for each folio an index lookup, four atomic operations, and the copy. New pages also cost their memory;
    /// only the part that is not written is zeroed.
    ///
    /// # Errors
    ///
    /// If nothing was written: [`pagemill_core::Error::NoMemory`] over the limit; the error contains the amounts.
    /// [`pagemill_core::Error::BadOffset`] past 2^63, [`pagemill_core::Error::FileTooLarge`].
    /// [`pagemill_core::Error::Busy`] if a folio is held for a second, or while [`crate::mapping::View::bytes`] borrows
    /// bytes of the file. [`pagemill_core::Error::Store`], also if too
    /// much is dirty and the store fails or does not complete writes ([`crate::mapping::Writeback`]).
    /// [`pagemill_core::Error::ReadOnly`] if the store is read-only.
    pub fn write_at(&self, from: &[u8], offset: u64) -> Result<usize> {
        let file = &*self.0;
        file.check(offset, from.len() as u64)?;
        file.check_writable()?;
        if from.is_empty() {
            return Ok(0);
        }
        let most = file.max_bytes().saturating_sub(offset);
        if most == 0 {
            file.check_size(offset + from.len() as u64)?;
        }
        let from = &from[..(from.len() as u64).min(most) as usize];
        in_pieces(from.len(), |done| file.write_piece(&from[done..], offset + done as u64))
    }

    /// As [`Mapping::write_at`], from several buffers, one after the other.
    ///
    /// # Errors
    ///
    /// See [`Mapping::write_at`].
    pub fn write_vectored_at(&self, from: &[IoSlice<'_>], offset: u64) -> Result<usize> {
        self.0.check(offset, from.iter().fold(0, |sum: u64, buffer| sum.saturating_add(buffer.len() as u64)))?;
        one_by_one(from.iter().map(|buffer| &**buffer), |buffer, done| self.write_at(buffer, offset + done))
    }
}

impl File {
    /// Writes into one folio. Returns the number of bytes.
    #[inline]
    fn write_piece(&self, from: &[u8], offset: u64) -> Result<usize> {
        {
            let gate = self.gate.shared();
            self.check_not_borrowed()?;
            if self.must_zero_tail(offset + from.len() as u64) {
                drop(gate);
                return self.write_piece_behind_end(from, offset);
            }
            let index = self.index_of(offset);
            loop {
                if let Some(place) = self.pin_page(index)? {
                    if !self.pool.word(place.number).load().is_dirty() && !self.try_make_dirty(place) {
                        break;
                    }
                    return Ok(self.write_pinned(place, from, offset));
                }
                if self.must_wait(self.page_bytes() as u64) {
                    break;
                }
                if let Some(len) = self.write_new(from, offset)? {
                    return Ok(len);
                }
            }
        }
        self.throttle()?;
        self.write_piece_unchecked(from, offset)
    }

    /// Writes into a folio that is pinned and dirty, and unpins it.
    #[inline(always)] // a call would make each write a tenth slower; the second caller is rare
    fn write_pinned(&self, place: Place, from: &[u8], offset: u64) -> usize {
        let at = (offset - self.offset_of(place.first)) as usize;
        let len = from.len().min(self.cache.folio_bytes(place.order) as usize - at);
        self.pool.copy_in(place.number, at, &from[..len]);
        // Grows the file before the unpin, because a thread that writes the folio back must know how much of it is
        // valid.
        self.grow(offset + len as u64);
        self.cache.unpin(place.number);
        self.continue_sequential(offset, offset + len as u64);
        len
    }

    /// Makes a pinned folio dirty. If the writer must be throttled first, unpins the folio and returns `false`.
    #[cold]
    fn try_make_dirty(&self, place: Place) -> bool {
        if self.must_wait(self.cache.folio_bytes(place.order)) {
            self.cache.unpin(place.number);
            return false;
        }
        self.make_dirty(&place);
        true
    }

    /// Returns whether a write up to `end` must first zero the bytes behind the end of the file, which writes through a
    /// view may have changed.
    #[inline]
    fn must_zero_tail(&self, end: u64) -> bool {
        self.views.were_writable() && end > self.size_bytes()
    }

    /// As [`File::write_piece`], for a write that must first zero the bytes behind the end of the file.
    #[cold]
    fn write_piece_behind_end(&self, from: &[u8], offset: u64) -> Result<usize> {
        if self.must_wait(self.page_bytes() as u64) {
            self.throttle()?;
        }
        self.write_piece_unchecked(from, offset)
    }

    /// As [`File::write_piece`], for a writer that has been throttled: does not check again whether it must wait. Takes the
    /// file's gate exclusively if bytes behind the end must be zeroed.
    #[cold]
    fn write_piece_unchecked(&self, from: &[u8], offset: u64) -> Result<usize> {
        let end = offset + from.len() as u64;
        let (mut shared, mut exclusive) = (Some(self.gate.shared()), None);
        if self.must_zero_tail(end) {
            drop(shared.take());
            exclusive = Some(self.gate.exclusive());
            self.zero_last_os_page()?;
        }
        let _gates = (shared, exclusive);
        self.check_not_borrowed()?;
        loop {
            if let Some(place) = self.pin_page(self.index_of(offset))? {
                self.make_dirty(&place);
                return Ok(self.write_pinned(place, from, offset));
            }
            if let Some(len) = self.write_new(from, offset)? {
                return Ok(len);
            }
        }
    }

    /// Writes into new folios. Returns the number of bytes written. Returns `None` if the caller must retry: the page
    /// has a folio now (perhaps read by this call, for a partial write), or the folios could not be published.
    #[cold]
    fn write_new(&self, from: &[u8], offset: u64) -> Result<Option<usize>> {
        let (index, written) = (self.index_of(offset), offset..offset + from.len() as u64);
        let is_huge = self.wants_huge(index, Cause::Write, written.clone());
        let pages = if is_huge { 1 } else { self.pages_to_create(index, &written) };
        let span = if is_huge { self.span_of(index) } else { index..index + pages as u64 };
        let is_whole = written.start <= self.offset_of(span.start) && written.end >= self.offset_of(span.end);
        if self.store.is_some() && !is_whole {
            // Reads the bytes that are not written. The write then finds the page in memory.
            self.note_sequential(offset, offset);
            self.bring_in(index..index + 1, Purpose::Write)?;
            return Ok(None);
        }
        let mut folio = Unpublished::reserve_for_write(self, index, is_huge, pages)?;
        // Copied before the request is registered: a page fault on the caller's bytes may need the same page.
        folio.fill_from_bytes(offset, from);
        if self.store.is_some() {
            folio.register()?;
        }
        if !folio.publish()? {
            return Ok(None);
        }
        let len = from.len().min((self.offset_of(folio.end()) - offset) as usize);
        drop(folio);
        self.note_sequential(offset, offset + len as u64);
        self.propose_collapse(self.index_of(offset + len as u64 - 1));
        Ok(Some(len))
    }

    /// Returns the number of small folios that a write creates together: up to the next folio, the end of the range of
    /// a huge folio, or [`MAX_BATCH_PAGES`]. In a file with a store, these are pages that are written completely.
    fn pages_to_create(&self, index: u64, written: &Range<u64>) -> usize {
        let end = written.end;
        let end = if self.store.is_some() { self.index_of(end) } else { self.index_of(end - 1) + 1 };
        let end = end.min(self.span_of(index).end).min(index + MAX_BATCH_PAGES as u64);
        let next = self.folios(index + 1..end).next();
        // Another thread may have created a huge folio that covers the page.
        next.map_or(end, |found| found.first).saturating_sub(index).max(1) as usize
    }

    /// Extends the sequential run of writes by a write in place, if the write continues it.
    #[inline]
    fn continue_sequential(&self, offset: u64, end: u64) {
        if self.sequential_end.load(Relaxed) == offset {
            self.sequential_end.store(end, Relaxed);
        }
    }

    /// Records a write that created pages from `offset` to `end`: it continues the sequential run, or begins a new one.
    pub(super) fn note_sequential(&self, offset: u64, end: u64) {
        if self.sequential_end.load(Relaxed) != offset {
            self.sequential_begin.store(offset, Relaxed);
        }
        self.sequential_end.store(end, Relaxed);
    }
}
