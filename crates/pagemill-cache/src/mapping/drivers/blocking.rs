//! Reads in the calling thread: it fills the folio itself, or waits for the request that does.

use crate::mapping::File;
use crate::mapping::inflight::{Kind, WAITING_FOR_PAGE};
use crate::mapping::request::{Purpose, Reserved, Unpublished};
use pagemill_core::error::{Error, Result};
use std::ops::Range;

impl File {
    /// Reads the first of some missing pages into memory, and following ones that the same transfer can read. Fills
    /// pages of a file without a store with zeros. The first page may be missing again afterwards, because it was
    /// truncated, evicted, or in the way of another request.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`]. [`Error::Store`] with the store's error for the first page, or with `ETIMEDOUT` after the
    /// cache's timeout.
    pub(crate) fn bring_in(&self, pages: Range<u64>, purpose: Purpose) -> Result<()> {
        let first = pages.start..pages.start + 1;
        if pages.end > first.end {
            match self.bring_in_together(pages, purpose) {
                Err(error @ Error::Store { doing: WAITING_FOR_PAGE, .. }) => return Err(error),
                // Perhaps only one of the other pages cannot be read.
                Err(_) => {}
                Ok(()) => return Ok(()),
            }
        }
        self.bring_in_together(first, purpose)
    }

    fn bring_in_together(&self, pages: Range<u64>, purpose: Purpose) -> Result<()> {
        if self.cache.timeout.is_some() && self.is_asynchronous() {
            return self.bring_in_within_timeout(pages, purpose);
        }
        match Unpublished::reserve(self, pages, Kind::Uncancellable, purpose)? {
            Reserved::Present => Ok(()),
            Reserved::InFlight(other) => self.wait_for(other.id, self.deadline()),
            Reserved::New(mut folio) => {
                folio.fill_from_store()?;
                folio.publish().map(drop)
            }
        }
    }

    /// Submits the read to the store, and waits until it completes or the cache's timeout has passed.
    fn bring_in_within_timeout(&self, pages: Range<u64>, purpose: Purpose) -> Result<()> {
        let Some(file) = self.this.upgrade() else { return Ok(()) };
        let deadline = self.deadline();
        let Some((id, error)) = file.submit(pages, purpose)? else { return Ok(()) };
        self.wait_for(id, deadline)?;
        error.map_or(Ok(()), |error| error.take())
    }
}
