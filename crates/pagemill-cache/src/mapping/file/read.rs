//! Reading: copies bytes out of folios, without a lock or a pin.

use crate::folio::Frame;
use crate::folio::word::State;
use crate::mapping::policy::{Ask, Cause, Choice};
use crate::mapping::request::Purpose;
use crate::mapping::{File, Mapping, TimedWait, in_pieces, one_by_one};
use pagemill_core::epoch;
use pagemill_core::error::{Error, Result};
use std::io::IoSliceMut;

impl Mapping {
    /// Copies bytes from `offset` on into `to`, up to the end of the file. Returns the number of bytes: 0 at or past
    /// the end, and for an empty buffer.
    ///
    /// Holes read zero. A read that runs concurrently with a write may find old and new bytes in one page, as in any
    /// file. Concurrently with `truncate` or `punch_hole` a read finds old bytes or zeros.
    ///
    /// Cost: an index lookup and a copy for each folio, small or huge. Writes to no shared memory, except that reads of
    /// files with a store sometimes record the use of a folio.
    ///
    /// # Errors
    ///
    /// [`Error::BadOffset`] past 2^63. [`Error::Busy`] if another thread holds a folio for a second. [`Error::Store`].
    /// [`Error::NoMemory`] if there is no room for bytes of the store (dirty pages stay until [`Mapping::sync`]). If a
    /// part was read before the error, returns the length of that part. The rest of `to` is then unchanged or zero.
    pub fn read_at(&self, to: &mut [u8], offset: u64) -> Result<usize> {
        let file = &*self.0;
        if file.try_read(to, offset) {
            return Ok(to.len());
        }
        file.check(offset, to.len() as u64)?;
        let size = file.size_bytes();
        let len = (to.len() as u64).min(size.saturating_sub(offset)) as usize;
        in_pieces(len, |done| file.read_piece(&mut to[done..len], offset + done as u64))
    }

    /// As [`Mapping::read_at`], into several buffers, one after the other.
    ///
    /// # Errors
    ///
    /// See [`Mapping::read_at`].
    pub fn read_vectored_at(&self, to: &mut [IoSliceMut<'_>], offset: u64) -> Result<usize> {
        self.0.check(offset, to.iter().fold(0, |sum: u64, buffer| sum.saturating_add(buffer.len() as u64)))?;
        one_by_one(to.iter_mut().map(|buffer| &mut **buffer), |buffer, done| self.read_at(buffer, offset + done))
    }
}

impl File {
    /// Fills `to` from the folio in which the index's hint finds the first byte. Returns as [`File::try_read_folio`].
    #[inline(always)]
    fn try_read(&self, to: &mut [u8], offset: u64) -> bool {
        let Some((found, frame)) = self.hint(self.index_of(offset)) else { return false };
        self.prefetch(found.value as u32, found.order, offset);
        let seen = frame.word.load();
        // While a huge folio is split, its word is frozen and has its old order. Of that folio, only the page that the
        // index found is in the file for certain.
        let is_current = seen.is_readable() && u32::from(seen.order()) == found.order;
        is_current && self.try_read_folio(found.value as u32, frame, seen, to, offset)
    }

    /// Fills `to` from the folio at page `number` of the pool, whose state was `seen`. Returns false, with `to` unchanged
    /// or zero, if this is not the folio with the byte at `offset`, if another thread changes the folio, or if the folio
    /// or the file ends before `to` is full.
    #[inline(always)] // a call would cost a fast read ten instructions
    pub fn try_read_folio(&self, number: u32, frame: &Frame, seen: State, to: &mut [u8], offset: u64) -> bool {
        let is_inside = offset.checked_add(to.len() as u64).is_some_and(|end| end <= self.size_bytes());
        let folio_bytes = 1 << (self.pool.page_shift + u32::from(seen.order()));
        // Folios are aligned to their length in the file.
        let at = offset as usize % folio_bytes;
        if to.is_empty() || !is_inside || to.len() > folio_bytes - at {
            return false;
        }
        if !self.has_page_in(frame, self.index_of(offset), seen.order()) {
            return false;
        }
        let is_valid = self.try_copy(number, frame, seen, at, to);
        if is_valid {
            self.note_use(frame, offset, to.len())
        } else {
            self.wipe(to)
        }
        is_valid
    }

    /// Copies from one folio, or writes zeros for a hole. Returns the number of bytes read.
    #[inline]
    pub(crate) fn read_piece(&self, to: &mut [u8], offset: u64) -> Result<usize> {
        let index = self.index_of(offset);
        if let Some((found, frame)) = self.hint(index) {
            let (number, at) = (found.value as u32, (offset - self.offset_of(found.first)) as usize);
            self.prefetch(number, found.order, offset);
            let seen = frame.word.load();
            if seen.is_readable()
                && u32::from(seen.order()) == found.order
                && self.has_page_in(frame, index, seen.order())
            {
                let len = to.len().min(self.cache.folio_bytes(seen.order()) as usize - at);
                if self.try_copy(number, frame, seen, at, &mut to[..len]) {
                    self.note_use(frame, offset, to.len());
                    return Ok(len);
                }
            }
        }
        self.read_piece_slowly(to, offset).inspect_err(|_| self.wipe(to))
    }

    /// Fills `to` with the bytes at offset `at` of a folio that needs no pin. Returns false if the folio may have changed
    /// since its state was `seen`; `to` may then have bytes of another file.
    #[inline(always)] // a call would cost a fast read ten instructions
    pub fn try_copy(&self, number: u32, frame: &Frame, seen: State, at: usize, to: &mut [u8]) -> bool {
        self.pool.copy_out(number, at, to);
        // Unchanged: the folio had the same owner during the whole copy.
        let is_valid = frame.word.is_unchanged(seen);
        if !is_valid {
            self.pool.note_invalid_copy(number);
        }
        is_valid
    }

    /// Zeroes a buffer after a read that failed, or whose copy was not valid. The folio may have been reused during the
    /// copy, so the buffer may have bytes of another file, which the caller must not see.
    #[cold]
    pub(super) fn wipe(&self, to: &mut [u8]) {
        // The read copied at most one folio, which is at most a chunk.
        let most = to.len().min(self.pool.chunk_bytes);
        to[..most].fill(0);
    }

    /// As [`File::read_piece`], but holds an epoch guard during the index lookup. Used for holes, and for folios that
    /// change.
    #[cold]
    fn read_piece_slowly(&self, to: &mut [u8], offset: u64) -> Result<usize> {
        let index = self.index_of(offset);
        let mut timed_wait = TimedWait::new();
        loop {
            let guard = epoch::pin();
            let Some(hit) = self.tree.find(index, &guard) else {
                drop(guard);
                if let Some(bytes) = self.read_hole(to, offset)? {
                    return Ok(bytes);
                }
                continue;
            };
            let number = hit.value() as u32;
            let frame = self.pool.frame(number);
            let seen = frame.word.load();
            if !hit.is_still() {
                continue;
            }
            if !seen.is_readable() {
                drop(guard);
                timed_wait.wait()?;
                continue;
            }
            let found = hit.found();
            // The copy below needs no epoch: the memory stays mapped, and an invalid copy is discarded. Without the
            // guard, this reader delays no reclamation.
            drop(guard);
            let at = (offset - self.offset_of(found.first)) as usize;
            let len = to.len().min(self.cache.folio_bytes(found.order as u8) as usize - at);
            if self.try_copy(number, frame, seen, at, &mut to[..len]) {
                self.note_use(frame, offset, to.len());
                return Ok(len);
            }
        }
    }

    /// Loads a folio into memory and returns `None`; the page may be missing again. Or reads zeros up to the end of the
    /// page, and returns their number.
    #[cold]
    fn read_hole(&self, to: &mut [u8], offset: u64) -> Result<Option<usize>> {
        let index = self.index_of(offset);
        // If the file was truncated meanwhile, no page behind its end may be read into memory.
        if self.store.is_some() && offset < self.size_bytes() {
            self.note_access(offset, to.len());
            self.bring_in(index..self.index_of(offset + to.len() as u64 - 1) + 1, Purpose::Read)?;
            return Ok(None);
        }
        if self.store.is_none() && self.wants_folio_for_hole(index) {
            match self.bring_in(index..index + 1, Purpose::Read) {
                // Without memory for a folio, the hole reads zero as well.
                Err(Error::NoMemory { .. }) => {}
                result => return result.map(|()| None),
            }
        }
        let len = to.len().min((self.offset_of(index + 1) - offset) as usize);
        to[..len].fill(0);
        Ok(Some(len))
    }

    /// Returns whether the policy wants a folio for a read of a hole, and the limit leaves room for a huge one.
    fn wants_folio_for_hole(&self, index: u64) -> bool {
        let is_wanted = match self.choose_for_hole(index) {
            Choice::Nothing => false,
            Choice::Small => true,
            // If the range has folios already, the new folio would be a small one.
            Choice::Huge => self.folios(self.span_of(index)).next().is_none(),
        };
        // If no huge folio fits within the limit, the hole reads zero without memory.
        is_wanted && self.cache.fits_limit(self.pool.chunk_bytes as u64)
    }

    /// Returns the policy's choice for a read of a hole.
    pub(crate) fn choose_for_hole(&self, index: u64) -> Choice {
        self.cache.choose(&Ask { wanted_bytes: self.page_bytes() as u64, ..self.ask(Cause::Read, index) })
    }
}
