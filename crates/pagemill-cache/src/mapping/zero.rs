//! Zeroing in place.

use super::Mapping;
use pagemill_core::error::Result;

impl Mapping {
    /// Zeroes a range, up to the end of the file. Pages in memory keep their memory, and holes stay holes.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::BadOffset`]. [`pagemill_core::Error::Busy`] if a folio is held for a second, perhaps after a part was
    /// zeroed. With a store also the errors of reading, and of memory for the zeros. [`pagemill_core::Error::ReadOnly`].
    pub fn zero_range(&self, offset: u64, len_bytes: u64) -> Result<()> {
        let file = &*self.0;
        file.check(offset, len_bytes)?;
        file.check_writable()?;
        let end = (offset + len_bytes).min(file.size_bytes());
        // In steps, so that other threads can use the gate in between, and this one can wait if too much is dirty.
        let step = if file.store.is_some() { file.pool().chunk_bytes() as u64 } else { u64::MAX };
        let mut at = offset;
        while at < end {
            let to = end.min(at.saturating_add(step));
            if file.must_wait(to - at) {
                file.throttle()?;
            }
            let _exclusive = file.gate.exclusive();
            file.zero_present(at, to.min(file.size_bytes()))?;
            at = to;
        }
        Ok(())
    }
}
