//! Truncation: sets the length of a file, and removes or zeroes the bytes behind it.

use crate::folio::Owner;
use crate::mapping::request::Purpose;
use crate::mapping::view::Unmap;
use crate::mapping::{File, Mapping};
use pagemill_core::error::Result;
use pagemill_core::stats::Counter;
use pagemill_core::sync::{Relaxed, Release};

impl Mapping {
    /// Sets the file's length to `size_bytes`. Bytes that are cut off are lost, and read zero if the file grows again.
    /// Bytes that are added are a hole.
    ///
    /// A huge folio that contains the new end is split, so that the pages behind the end can be freed. If the folio is
    /// pinned, these pages are zeroed instead and stay in memory.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::FileTooLarge`], [`pagemill_core::Error::BadOffset`], [`pagemill_core::Error::ReadOnly`].
    /// [`pagemill_core::Error::Busy`] if the folio at the new end is held for a second, or while
    /// [`crate::mapping::View::bytes`] borrows bytes of the file. The file is unchanged after an
    /// error.
    pub fn truncate(&self, size_bytes: u64) -> Result<()> {
        let file = &*self.0;
        file.check(size_bytes, 0)?;
        file.check_size(size_bytes)?;
        file.check_writable()?;
        let _gate = file.gate.exclusive();
        file.check_not_borrowed()?;
        if size_bytes >= file.size_bytes() {
            if file.views.were_writable() {
                file.zero_last_os_page()?;
            }
            file.size_bytes.store(size_bytes, Release);
            return Ok(());
        }
        // From here on no thread can begin a hold, because a hold needs the gate.
        file.check_last_folio_free(size_bytes)?;
        // The length is set first, so that readers stop at the new end and do not see pages being removed.
        file.set_shorter_size(size_bytes);
        file.remove_behind_end(size_bytes);
        Ok(())
    }
}

impl File {
    /// Splits the huge folio that has `index` as an inner page, so that a removal can begin or end at `index`. If the
    /// split fails, the caller zeroes the pages instead.
    pub(crate) fn split_around(&self, index: u64) {
        if index != self.span_of(index).start {
            let _ = self.split_at(index, Counter::HugeSplitForHole);
        }
    }

    /// Sets a shorter length of the file. The bytes of the store behind the new length are not valid any more.
    fn set_shorter_size(&self, size_bytes: u64) {
        let _writer = self.tree.lock();
        debug_assert!(size_bytes <= self.size_bytes(), "the file gets shorter");
        // Done even if the store has no bytes behind the new end yet: a writeback of these bytes may be in flight.
        self.stored_bytes.store(self.stored_bytes.load(Relaxed).min(size_bytes), Relaxed);
        self.note_revoked();
        self.note_store_too_long();
        // The size is set last: a writeback that finds nothing dirty behind the new end must already know that the
        // store has to be truncated.
        self.size_bytes.store(size_bytes, Release);
    }

    /// Removes the pages behind the end of the file, and zeroes the rest of the last page.
    pub(crate) fn remove_behind_end(&self, size_bytes: u64) {
        let first = size_bytes.div_ceil(self.page_bytes() as u64);
        self.split_around(first);
        self.remove_pages(first, Owner::MAX_INDEX);
        if !self.views.is_empty() && first > 0 {
            // The last folio stays, but accesses behind the end must fail, also those that would change it after it was
            // zeroed.
            self.unmap_from_views(self.span_of(first - 1).start..first, Unmap::Always);
        }
        // Zeroed last: before the removal, a collapse could create a huge folio of the range again, with bytes behind
        // the end.
        self.zero_behind_end(size_bytes);
    }

    /// Returns an error if the folio with the last byte before `size_bytes` is held for a second.
    pub(crate) fn check_last_folio_free(&self, size_bytes: u64) -> Result<()> {
        let Some(last) = size_bytes.checked_sub(1) else { return Ok(()) };
        if let Some(place) = self.pin_page(self.index_of(last))? {
            self.cache.unpin(place.number);
        }
        Ok(())
    }

    /// Zeroes the part of the last folio that lies behind the end of the file. Waits while another thread has the folio
    /// frozen, which takes at most a write to the store.
    fn zero_behind_end(&self, size_bytes: u64) {
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
        debug_assert!(at > 0 && at <= len_bytes, "the folio has the last byte");
        self.pool.zero(place.number, at, len_bytes - at);
        self.note_zeroed(&place);
        self.cache.unpin(place.number);
    }

    /// Zeroes the bytes of the file from offset `from` to offset `to`. Pages that have neither a folio nor a store read
    /// zero anyway.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::Busy`] if a folio is held for a second.
    pub(crate) fn zero_present(&self, from: u64, to: u64) -> Result<()> {
        let mut at = from;
        while at < to {
            let index = self.index_of(at);
            let end = match self.pin_page(index)? {
                Some(place) => {
                    let begin = self.offset_of(place.first);
                    let end = to.min(begin + self.cache.folio_bytes(place.order));
                    self.make_dirty(&place);
                    self.pool.zero(place.number, (at - begin) as usize, (end - at) as usize);
                    self.note_zeroed(&place);
                    self.cache.unpin(place.number);
                    end
                }
                // A missing page may have bytes in the store, so create a folio and zero it.
                None if self.store.is_some() => {
                    self.bring_in(index..index + 1, Purpose::Write)?;
                    continue;
                }
                None => match self.folios(index..self.index_of(to - 1) + 1).next() {
                    Some(found) => self.offset_of(found.first).max(at),
                    None => to,
                },
            };
            at = end;
        }
        Ok(())
    }
}
