//! The single record of figures: all counters of [`stats::TABLE`](crate::stats::TABLE) as measured, 8 bytes each, with
//! room for 128.

use super::{Record, u64_at};
use crate::published::Subject;
use crate::stats::CAPACITY;

/// Counters of a process as it measured them.
pub(super) struct Values(pub [u64; CAPACITY]);

impl Values {
    pub fn to_record(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        for (place, value) in bytes.chunks_exact_mut(8).zip(self.0) {
            place.copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }
}

impl Record for Values {
    const SUBJECT: Subject = Subject::Figures;
    const LEN: usize = 8 * CAPACITY;

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        Some(Self(std::array::from_fn(|at| u64_at(bytes, 8 * at))))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// A written record is read back.
    #[test]
    fn records_go_and_come() {
        let values: [u64; CAPACITY] = std::array::from_fn(|at| (at as u64) << 40 | 7);
        assert_eq!(Values::from_bytes(&Values(values).to_record()).unwrap().0, values);
    }
}
