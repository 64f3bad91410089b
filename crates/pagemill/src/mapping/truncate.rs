//! Making a file shorter, or longer.

use super::{File, Mapping};
use crate::epoch;
use crate::error::Result;
use crate::folio::Owner;
use crate::stats::Counter;
use crate::sync::{Relaxed, Release};

impl Mapping {
    /// Makes the file `size_bytes` long. What is cut off is gone, and reads zero should the file grow again; what is added is a
    /// hole.
    ///
    /// A huge folio that the new end lies in is split, so that what is behind it can go; where it is pinned, its rest is
    /// zeroed and stays.
    ///
    /// # Errors
    ///
    /// [`crate::Error::FileTooLarge`], [`crate::Error::BadOffset`]; [`crate::Error::Busy`] if the folio at the new end is held by somebody for a second;
    /// [`crate::Error::ReadOnly`]. Nothing has changed then.
    pub fn truncate(&self, size_bytes: u64) -> Result<()> {
        let file = &*self.0;
        file.check(size_bytes, 0)?;
        file.check_size(size_bytes)?;
        file.check_writable()?;
        let _alone = file.gate.alone();
        if size_bytes >= file.size_bytes() {
            file.size_bytes.store(size_bytes, Release);
            return Ok(());
        }
        // Nobody begins to hold a folio from here on: inside of the gate there is only this.
        file.check_free(size_bytes)?;
        // Readers stop there first; then nobody can see what goes.
        file.shorten(size_bytes);
        file.drop_behind(size_bytes);
        Ok(())
    }
}

impl File {
    /// Splits a huge folio that a page in its midst is to be the first to go, or to stay. Without success what is to go is
    /// zeroed instead.
    pub(super) fn open_up(&self, index: u64) {
        if index != self.span_of(index).start {
            let _ = self.split_at(index, Counter::HugeSplitForHole);
        }
    }

    /// Ends the file there; what the store has behind does not count any more.
    fn shorten(&self, size_bytes: u64) {
        let _writer = self.tree.lock();
        // Also where nothing of it was stored yet: it may just be written back.
        self.stored_bytes.store(self.stored_bytes.load(Relaxed).min(size_bytes), Relaxed);
        self.note_revoked();
        self.note_more_stored();
        // At last: who writes back and finds nothing behind the end has to find that the store is to be cut.
        self.size_bytes.store(size_bytes, Release);
    }

    /// Takes what is behind a new end out of memory.
    pub(super) fn drop_behind(&self, size_bytes: u64) {
        let first = size_bytes.div_ceil(self.page_bytes() as u64);
        self.open_up(first);
        self.remove_pages(first, Owner::MAX_INDEX);
        // At last: until now the range might have become a huge folio again, with what was behind the end.
        self.zero_rest(size_bytes);
    }

    /// Refuses where the folio of the last byte is held.
    pub(super) fn check_free(&self, size_bytes: u64) -> Result<()> {
        let Some(last) = size_bytes.checked_sub(1) else { return Ok(()) };
        if let Some(place) = self.pin_page(self.index_of(last))? {
            self.cache.unpin(place.number);
        }
        Ok(())
    }

    /// Zeroes what the folio of the last byte holds behind it. Waits for who keeps it still, a store at most.
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

    /// Zeroes what is in memory from `from` to `to`, folio by folio.
    ///
    /// # Errors
    ///
    /// [`crate::Error::Busy`] where somebody holds one.
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
                // What the store has must not come back.
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
    /// As [`crate::Error::NoMemory`] says.
    fn create_zeroed(&self, index: u64) -> Result<()> {
        self.create(index, super::policy::Cause::Write, &super::fetch::Content::Stored).map(drop)
    }
}
