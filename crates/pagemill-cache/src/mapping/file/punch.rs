//! Hole punching: removes a range of pages from a file.

use crate::mapping::Mapping;
use pagemill_core::error::{Error, Result};

impl Mapping {
    /// Removes a range from the file: the range reads zero afterwards, and pages completely inside it use no memory.
    /// Returns the bytes of memory that became free, for other folios or for reclaim. Pinned folios are freed later and
    /// not counted.
    ///
    /// Pages that lie partly in the range are zeroed there. Parts of a huge folio are also zeroed if the folio is
    /// pinned, or if the cache does not split it. The file's length does not change.
    ///
    /// # Errors
    ///
    /// [`Error::BadOffset`]. [`Error::Busy`] if a folio is held for a second, perhaps after a part was removed, or
    /// while [`crate::mapping::View::bytes`] borrows bytes of the file.
    /// [`Error::Unsupported`] for a file with a store, which cannot keep holes: use [`Mapping::zero_range`].
    pub fn punch_hole(&self, offset: u64, len_bytes: u64) -> Result<u64> {
        let file = &*self.0;
        file.check(offset, len_bytes)?;
        if file.store.is_some() {
            return Err(Error::Unsupported { what: "a store keeps no holes" });
        }
        let _gate = file.gate.exclusive();
        file.check_not_borrowed()?;
        let end = (offset + len_bytes).min(file.size_bytes().next_multiple_of(file.page_bytes() as u64));
        if offset >= end {
            return Ok(0);
        }
        let (first, last) = (file.index_of(offset.next_multiple_of(file.page_bytes() as u64)), file.index_of(end));
        let mut freed = 0;
        if first < last {
            file.split_around(first);
            file.split_around(last);
            freed = file.remove_pages(first, last - 1);
        }
        // Zeroes the partial pages at both ends, and folios that could not be removed.
        file.zero_present(offset, end)?;
        Ok(freed)
    }
}
