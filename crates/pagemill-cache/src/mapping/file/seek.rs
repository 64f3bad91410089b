//! Seeking: finds data and holes of a file (`SEEK_DATA`, `SEEK_HOLE`).

use crate::mapping::Mapping;
use pagemill_core::epoch;
use pagemill_core::error::Result;

impl Mapping {
    /// Returns the offset of the first byte at or after `offset` that may hold data, or `None` if only a hole follows.
    /// Pages of zeros count as data, and so do all bytes of a file with a store.
    ///
    /// # Errors
    ///
    /// [`PastEnd`](pagemill_core::Error::PastEnd) at or past the end of the file,
    /// [`BadOffset`](pagemill_core::Error::BadOffset).
    pub fn seek_data(&self, offset: u64) -> Result<Option<u64>> {
        let file = &*self.0;
        let size = file.check_inside(offset)?;
        if file.store.is_some() {
            return Ok(Some(offset));
        }
        let found = file.folios(file.index_of(offset)..file.index_of(size - 1) + 1).next();
        Ok(found.map(|found| file.offset_of(found.first).max(offset)))
    }

    /// Returns the offset of the first byte at or after `offset` that lies in a hole. The end of the file counts as a
    /// hole.
    ///
    /// # Errors
    ///
    /// See [`Mapping::seek_data`].
    pub fn seek_hole(&self, offset: u64) -> Result<u64> {
        let file = &*self.0;
        let size = file.check_inside(offset)?;
        if file.store.is_some() {
            return Ok(size);
        }
        let hole = file.tree.next_gap(file.index_of(offset), file.index_of(size - 1), &epoch::pin());
        Ok(hole.map_or(size, |index| file.offset_of(index).max(offset)))
    }
}
