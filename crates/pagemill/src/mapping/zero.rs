//! Zeroing in place.

use super::Mapping;
use crate::error::Result;

impl Mapping {
    /// Zeroes a range, up to the end of the file. What is in memory keeps its memory, holes stay holes.
    ///
    /// # Errors
    ///
    /// [`crate::Error::BadOffset`]; [`crate::Error::Busy`] where somebody holds a folio for a second, perhaps after a part;
    /// with a store also what reading and memory for the zeros say; [`crate::Error::ReadOnly`].
    pub fn zero_range(&self, offset: u64, len_bytes: u64) -> Result<()> {
        let file = &*self.0;
        file.check(offset, len_bytes)?;
        file.check_writable()?;
        let end = (offset + len_bytes).min(file.size_bytes());
        // In steps between which there is room for others, and to wait where too much is dirty.
        let step = if file.store.is_some() { file.pool().chunk_bytes() as u64 } else { u64::MAX };
        let mut at = offset;
        while at < end {
            let to = end.min(at.saturating_add(step));
            if file.must_wait(to - at) {
                file.throttle()?;
            }
            let _alone = file.gate.alone();
            file.zero_present(at, to.min(file.size_bytes()))?;
            at = to;
        }
        Ok(())
    }
}
