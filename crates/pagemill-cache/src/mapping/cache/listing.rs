//! The record of a cache: 144 bytes, in little-endian order. The fields are those of [`Usage`].
//!
//! | offset | field |
//! |---|---|
//! | 0 | name, padded with zeros |
//! | 40 | bytes of a page |
//! | 48, 52 | (u32) number; node |
//! | 56 | holder: 0 a cache, 1 an idle pool, 2 spare nodes |
//! | 57, 58 | whether the inspection was incomplete; whether the memory is hugetlb |
//! | 59 | shared memory: 0 none, 1 in a memfd, 2 in a tmpfs. 60 to 63 are zero |
//! | 64, 72, 80, 88, 96, 104 | bytes: huge, small, pinned, free, frames, index |
//! | 112, 120, 128, 136 | bytes: charged, limit, dirty, locked ranges |

use crate::mapping::{Caches, Holder, SharedMemory, Usage};
use pagemill_core::listing::{ListWriter, MAX_INSPECTION_NS, Record, Response, Unanswered, ask_for, u32_at, u64_at};
use pagemill_core::published::Subject;
use pagemill_sys::file::Path;
use pagemill_sys::process::Identity;
use std::io;

/// Bytes of a record.
const RECORD_LEN: usize = 144;

/// Bytes of the name in a record.
const NAME_LEN: usize = 40;

/// The kinds of owners, in the order of their numbers in a record.
const HOLDERS: [Holder; 3] = [Holder::Cache, Holder::IdlePool, Holder::SpareNodes];

/// The places of shared memory, in the order of their numbers in a record.
const SHARED: [Option<SharedMemory>; 3] = [None, Some(SharedMemory::Memfd), Some(SharedMemory::Tmpfs)];

/// Returns the record with the memory use of a cache, an idle pool or the spare index nodes.
fn to_record(holder: Holder, usage: &Usage) -> [u8; RECORD_LEN] {
    let mut bytes = [0; RECORD_LEN];
    let name = (0..=NAME_LEN.min(usage.name.len())).rev().find(|len| usage.name.is_char_boundary(*len)).unwrap_or(0);
    bytes[..name].copy_from_slice(&usage.name.as_bytes()[..name]);
    bytes[40..48].copy_from_slice(&(usage.page_bytes as u64).to_le_bytes());
    bytes[48..52].copy_from_slice(&usage.number.to_le_bytes());
    bytes[52..56].copy_from_slice(&(usage.node as u32).to_le_bytes());
    bytes[56] = holder as u8;
    bytes[57] = u8::from(usage.is_partial);
    bytes[58] = u8::from(usage.is_hugetlb);
    bytes[59] = SHARED.iter().position(|shared| *shared == usage.shared).unwrap_or_default() as u8;
    let Usage { huge, small, pinned, free, frames, index, charged, limit, dirty, locked_ranges, .. } = *usage;
    let numbers = [huge, small, pinned, free, frames, index, charged, limit, dirty, locked_ranges];
    for (place, bytes_of) in bytes[64..].chunks_exact_mut(8).zip(numbers) {
        place.copy_from_slice(&bytes_of.to_le_bytes());
    }
    bytes
}

/// Requests from a process the memory use of its page caches. Waits for the answer as [`ask_for`] does.
///
/// # Errors
///
/// See [`ask_for`].
pub fn ask_for_caches(
    figures: &Path,
    identity: Identity,
    should_stop: impl Fn() -> bool,
) -> Result<Vec<(Holder, Usage)>, Unanswered> {
    ask_for(figures, identity, should_stop)
        .map(|(rows, _)| rows.into_iter().map(|CacheRecord(holder, usage)| (holder, usage)).collect())
}

impl ListWriter for Caches {
    fn subject(&self) -> Subject {
        Subject::Caches
    }

    fn list(&self, response: &mut Response<'_>) -> io::Result<()> {
        self.show(MAX_INSPECTION_NS, |holder, usage| response.write_record(&to_record(holder, usage)))
    }
}

/// A record that was read: an owner of memory, and its memory use.
#[derive(Debug, PartialEq, Eq)]
struct CacheRecord(Holder, Usage);

impl Record for CacheRecord {
    const SUBJECT: Subject = Subject::Caches;
    const LEN: usize = RECORD_LEN;

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let name = bytes[..NAME_LEN].split(|byte| *byte == 0).next().unwrap_or_default();
        // The name is printed to a terminal, so control characters are replaced.
        let clean =
            |letter: char| if letter.is_control() || letter == char::REPLACEMENT_CHARACTER { '?' } else { letter };
        let [huge, small, pinned, free, frames, index, charged, limit, dirty, locked_ranges] =
            std::array::from_fn(|at| u64_at(bytes, 64 + 8 * at));
        let usage = Usage {
            name: String::from_utf8_lossy(name).chars().map(clean).collect::<String>().into(),
            number: u32_at(bytes, 48),
            node: u32_at(bytes, 52) as usize,
            page_bytes: usize::try_from(u64_at(bytes, 40)).ok()?,
            huge,
            small,
            pinned,
            locked_ranges,
            free,
            frames,
            index,
            charged,
            limit,
            dirty,
            is_hugetlb: *[false, true].get(usize::from(bytes[58]))?,
            shared: *SHARED.get(usize::from(bytes[59]))?,
            is_partial: *[false, true].get(usize::from(bytes[57]))?,
        };
        Some(Self(*HOLDERS.get(usize::from(bytes[56]))?, usage))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn usage(name: &str) -> Usage {
        Usage {
            name: name.into(),
            number: 3,
            node: 1,
            page_bytes: 64 << 10,
            huge: 1,
            small: 2,
            pinned: 3,
            locked_ranges: 9,
            free: 4,
            frames: 5,
            index: 6,
            charged: 7,
            limit: u64::MAX,
            dirty: 8,
            is_hugetlb: true,
            shared: Some(SharedMemory::Tmpfs),
            is_partial: true,
        }
    }

    /// A record must be read as it was written. A long name must be cut at a character boundary.
    #[test]
    fn records_are_read_as_written() {
        for holder in HOLDERS {
            let read = Record::from_bytes(&to_record(holder, &usage("tiles")));
            assert_eq!(read, Some(CacheRecord(holder, usage("tiles"))));
        }
        let long = "ä".repeat(100);
        let CacheRecord(_, read) = Record::from_bytes(&to_record(Holder::Cache, &usage(&long))).unwrap();
        let CacheRecord(_, odd) = Record::from_bytes(&to_record(Holder::Cache, &usage(&format!("x{long}")))).unwrap();
        assert_eq!((read, odd), (usage(&"ä".repeat(20)), usage(&format!("x{}", "ä".repeat(19)))));
    }

    /// A record with an invalid field must be rejected. Control characters in names must be replaced.
    #[test]
    fn invalid_records_are_rejected() {
        let good = to_record(Holder::Cache, &usage("a\x1b[31m"));
        let CacheRecord(_, read) = Record::from_bytes(&good).unwrap();
        assert_eq!(&*read.name, "a?[31m");
        for (at, byte) in [(56, 3), (57, 2), (58, 2), (59, 3)] {
            let mut bytes = good;
            bytes[at] = byte;
            assert_eq!(CacheRecord::from_bytes(&bytes), None, "byte {at}");
        }
        let mut bytes = good;
        bytes[..NAME_LEN].fill(0xFF);
        assert_eq!(&*CacheRecord::from_bytes(&bytes).unwrap().1.name, "?".repeat(NAME_LEN));
    }
}
