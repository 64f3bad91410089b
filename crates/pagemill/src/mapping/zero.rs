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
        let _alone = file.gate.alone();
        file.zero_present(offset, (offset + len_bytes).min(file.size_bytes()))
    }
}
