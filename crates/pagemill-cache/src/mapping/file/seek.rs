//! Seeking: finds data and holes of a file (`SEEK_DATA`, `SEEK_HOLE`).

use crate::mapping::Mapping;
use pagemill_core::epoch;
use pagemill_core::error::Result;
use std::ops::Range;

impl Mapping {
    /// Returns the offset of the first byte at or after `offset` that may hold data, or `None` if only a hole follows.
    /// Pages of zeros count as data, and so do all bytes of a file with a store.
    ///
    /// # Errors
    ///
    /// [`PastEnd`](pagemill_core::Error::PastEnd) at or past the end of the file,
    /// [`BadOffset`](pagemill_core::Error::BadOffset).
    pub fn seek_data(&self, offset: u64) -> Result<Option<u64>> {
        self.seek_data_in(offset..u64::MAX)
    }

    /// As [`Mapping::seek_data`], within a range. The search ends with the page of the last byte of the range.
    ///
    /// # Errors
    ///
    /// As [`Mapping::seek_data`] for the begin of the range.
    pub fn seek_data_in(&self, range: Range<u64>) -> Result<Option<u64>> {
        let file = &*self.0;
        let size = file.check_inside(range.start)?;
        let end = size.min(range.end);
        if file.store.is_some() || range.start >= end {
            return Ok((range.start < end).then_some(range.start));
        }
        let found = file.folios(file.index_of(range.start)..file.index_of(end - 1) + 1).next();
        Ok(found.map(|found| file.offset_of(found.first).max(range.start)))
    }

    /// Returns the offset of the first byte at or after `offset` that lies in a hole. The end of the file counts as a
    /// hole.
    ///
    /// # Errors
    ///
    /// See [`Mapping::seek_data`].
    pub fn seek_hole(&self, offset: u64) -> Result<u64> {
        self.seek_hole_in(offset..u64::MAX)
    }

    /// As [`Mapping::seek_hole`], within a range. The end of the range counts as a hole, too. The search ends there.
    ///
    /// Cost: grows with the number of folios before the hole.
    ///
    /// # Errors
    ///
    /// As [`Mapping::seek_data`] for the begin of the range.
    pub fn seek_hole_in(&self, range: Range<u64>) -> Result<u64> {
        let file = &*self.0;
        let size = file.check_inside(range.start)?;
        let end = size.min(range.end);
        if file.store.is_some() || range.start >= end {
            return Ok(end);
        }
        let hole = file.tree.next_gap(file.index_of(range.start), file.index_of(end - 1), &epoch::pin());
        Ok(hole.map_or(end, |index| file.offset_of(index).max(range.start)))
    }
}
