//! Truncation: sets the length of a file.

use super::{File, Mapping};
use crate::folio::Owner;
use pagemill_core::epoch;
use pagemill_core::error::Result;
use pagemill_core::stats::Counter;
use pagemill_core::sync::{Relaxed, Release};

impl Mapping {
    /// Sets the file's length to `size_bytes`. Bytes that are cut off are lost, and read zero if the file grows again.
    /// Bytes that are added are a hole.
    ///
    /// A huge folio across the new end is split, so that the part behind it can be freed. If it is pinned, that part is
    /// zeroed and stays.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::FileTooLarge`], [`pagemill_core::Error::BadOffset`]. [`pagemill_core::Error::Busy`] if the folio at the new end
    /// is held for a second. [`pagemill_core::Error::ReadOnly`]. Nothing has changed then.
    pub fn truncate(&self, size_bytes: u64) -> Result<()> {
        let file = &*self.0;
        file.check(size_bytes, 0)?;
        file.check_size(size_bytes)?;
        file.check_writable()?;
        let _exclusive = file.gate.exclusive();
        if size_bytes >= file.size_bytes() {
            file.size_bytes.store(size_bytes, Release);
            return Ok(());
        }
        // No thread can begin a hold from here on: holds need the gate.
        file.check_free(size_bytes)?;
        // Shortened first: readers then stop at the new end, and cannot see pages being removed.
        file.shorten(size_bytes);
        file.drop_behind(size_bytes);
        Ok(())
    }
}

impl File {
    /// Splits the huge folio in which `index` is an inner page, so that a removal can begin or end there. If that
    /// fails, the caller zeroes the pages instead.
    pub(super) fn open_up(&self, index: u64) {
        if index != self.span_of(index).start {
            let _ = self.split_at(index, Counter::HugeSplitForHole);
        }
    }

    /// Sets the new end; bytes of the store behind it are not valid any more.
    fn shorten(&self, size_bytes: u64) {
        let _writer = self.tree.lock();
        // Also if nothing of it was stored yet: a writeback may be in flight.
        self.stored_bytes.store(self.stored_bytes.load(Relaxed).min(size_bytes), Relaxed);
        self.note_revoked();
        self.note_more_stored();
        // Last: if writeback finds nothing dirty behind the end, it must already find that the store has to be
        // truncated.
        self.size_bytes.store(size_bytes, Release);
    }

    /// Removes pages behind a new end.
    pub(super) fn drop_behind(&self, size_bytes: u64) {
        let first = size_bytes.div_ceil(self.page_bytes() as u64);
        self.open_up(first);
        self.remove_pages(first, Owner::MAX_INDEX);
        // Last: before, a collapse might have made a huge folio of the range again, with bytes behind the end.
        self.zero_rest(size_bytes);
    }

    /// Fails if the folio of the last byte is held.
    pub(super) fn check_free(&self, size_bytes: u64) -> Result<()> {
        let Some(last) = size_bytes.checked_sub(1) else { return Ok(()) };
        if let Some(place) = self.pin_page(self.index_of(last))? {
            self.cache.unpin(place.number);
        }
        Ok(())
    }

    /// Zeroes the part behind the end of the last byte's folio. Waits while another thread has it frozen, at most for a
    /// write to the store.
    fn zero_rest(&self, size_bytes: u64) {
        let Some(last) = size_bytes.checked_sub(1) else { return };
        let place = loop {
            match self.pin_page(self.index_of(last)) {
                Ok(Some(place)) => break place,
                Ok(None) => return,
                Err(_) => {}
            }
        };
        let at = (size_bytes - self.offset_of(place.first)) as usize;
        let len_bytes = self.cache.folio_bytes(place.order) as usize;
        self.pool().zero(place.number, at, len_bytes - at);
        self.note_zeroed(&place);
        self.cache.unpin(place.number);
    }

    /// Zeroes pages in memory from `from` to `to`, folio by folio.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::Busy`] if one is held.
    pub(super) fn zero_present(&self, from: u64, to: u64) -> Result<()> {
        let mut at = from;
        while at < to {
            let index = self.index_of(at);
            let end = match self.pin_page(index)? {
                Some(place) => {
                    let begin = self.offset_of(place.first);
                    let end = to.min(begin + self.cache.folio_bytes(place.order));
                    self.make_dirty(&place);
                    self.pool().zero(place.number, (at - begin) as usize, (end - at) as usize);
                    self.note_zeroed(&place);
                    self.cache.unpin(place.number);
                    end
                }
                // Bytes of the store must not come back.
                None if self.store.is_some() => {
                    self.create_zeroed(index)?;
                    continue;
                }
                None => match self.tree.next(index, self.index_of(to - 1), &epoch::pin()) {
                    Some(found) => self.offset_of(found.first).max(at),
                    None => to,
                },
            };
            at = end;
        }
        Ok(())
    }

    /// # Errors
    ///
    /// See [`pagemill_core::Error::NoMemory`].
    fn create_zeroed(&self, index: u64) -> Result<()> {
        self.create(index, super::policy::Cause::Write, &super::fetch::Content::Stored).map(drop)
    }
}
