//! Writing: copies bytes in place into an existing folio. Where none exists, fills a new folio, which then enters the
//! index.

use crate::mapping::index::{Content, Place};
use crate::mapping::policy::Cause;
use crate::mapping::{File, Mapping, in_pieces, one_by_one};
use pagemill_core::error::Result;
use std::io::IoSlice;

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
    /// [`pagemill_core::Error::Busy`] if a folio is held for a second. [`pagemill_core::Error::Store`], also if too
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
            let _gate = self.gate.shared();
            let index = self.index_of(offset);
            loop {
                if let Some(place) = self.pin_page(index)? {
                    if !self.pool().word(place.number).load().is_dirty() && !self.try_make_dirty(place) {
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
        self.write_piece_throttled(from, offset)
    }

    /// Writes into a folio that is pinned and dirty, and unpins it.
    #[inline(always)] // a call would make each write a tenth slower; the second caller is rare
    fn write_pinned(&self, place: Place, from: &[u8], offset: u64) -> usize {
        let at = (offset - self.offset_of(place.first)) as usize;
        let len = from.len().min(self.cache.folio_bytes(place.order) as usize - at);
        self.pool().copy_in(place.number, at, &from[..len]);
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

    /// As [`File::write_piece`], for a writer that must be throttled: waits without the file's gate, then writes
    /// without another check.
    #[cold]
    fn write_piece_throttled(&self, from: &[u8], offset: u64) -> Result<usize> {
        self.throttle()?;
        let _gate = self.gate.shared();
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

    /// Writes into a new folio. Returns `None` if the page has a folio by now.
    #[cold]
    fn write_new(&self, from: &[u8], offset: u64) -> Result<Option<usize>> {
        let Some(end) = self.create(self.index_of(offset), Cause::Write, &Content::Written(offset, from))? else {
            return Ok(None);
        };
        let len = from.len().min((end - offset) as usize);
        self.note_sequential(offset, offset + len as u64);
        self.propose_collapse(self.index_of(offset + len as u64 - 1));
        Ok(Some(len))
    }
}
