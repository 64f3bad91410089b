//! The record of a process's statistics: all counters of [`stats::TABLE`](crate::stats::TABLE), 8 bytes each, with
//! space for 192 counters.

use super::{Record, bytes_of, u64_at};
use crate::published::Subject;
use crate::stats::MAX_COUNTERS;

/// The values of all counters of a process, indexed by [`Counter`](crate::stats::Counter).
pub(crate) struct CounterValues(pub [u64; MAX_COUNTERS]);

impl CounterValues {
    pub fn to_record(&self) -> [u8; Self::LEN] {
        bytes_of(self.0)
    }
}

impl Record for CounterValues {
    const SUBJECT: Subject = Subject::Figures;
    const LEN: usize = 8 * MAX_COUNTERS;

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        Some(Self(std::array::from_fn(|at| u64_at(bytes, 8 * at))))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Writes counter values into a record and parses it. All values must be the same.
    #[test]
    fn records_are_read_as_written() {
        let values: [u64; MAX_COUNTERS] = std::array::from_fn(|at| (at as u64) << 40 | 7);
        assert_eq!(CounterValues::from_bytes(&CounterValues(values).to_record()).unwrap().0, values);
    }
}
