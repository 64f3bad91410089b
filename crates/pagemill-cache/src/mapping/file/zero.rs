//! Zeroing a range of a file in place.

use crate::mapping::Mapping;
use pagemill_core::error::Result;

impl Mapping {
    /// Zeroes a range, up to the end of the file. Pages in memory stay in memory, and holes stay holes.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::BadOffset`]. [`pagemill_core::Error::Busy`] if a folio is held for a second, perhaps
    /// after a part was zeroed, or while [`crate::mapping::View::bytes`] borrows bytes of the file. For a file with a store
    /// also errors of reading the store, and [`pagemill_core::Error::NoMemory`]. [`pagemill_core::Error::ReadOnly`].
    pub fn zero_range(&self, offset: u64, len_bytes: u64) -> Result<()> {
        let file = &*self.0;
        file.check(offset, len_bytes)?;
        file.check_writable()?;
        let end = (offset + len_bytes).min(file.size_bytes());
        // A file with a store is zeroed in steps, so that other threads can take the gate in between, and this thread
        // can be throttled.
        let step = if file.store.is_some() { file.pool.chunk_bytes as u64 } else { u64::MAX };
        let mut at = offset;
        while at < end {
            let step_end = end.min(at.saturating_add(step));
            if file.must_wait(step_end - at) {
                file.throttle()?;
            }
            let _gate = file.gate.exclusive();
            file.check_not_borrowed()?;
            file.zero_present(at, step_end.min(file.size_bytes()))?;
            at = step_end;
        }
        Ok(())
    }
}
