//! Lists and commands between processes of the same user. On request a process lists its volatile ranges, the usage of
//! its caches, and its slab caches; measures its statistics; shrinks a slab cache; or returns memory.
//!
//! A process must not read another process's memory, so each process writes its own lists:
//!
//! ```text
//!   requester                                         the process
//!   makes an empty file beside its figures
//!   raises the number on the page of figures,
//!   wakes the helper                          ---->   the helper opens the file, after checks
//!   waits for the head, 2 s at most           <----   writes one record per range, the head last
//!   reads, checks everything, removes the file
//! ```
//!
//! All numbers are little-endian. The head has 32 bytes: 0 magic (`pm-vrng1` ranges, `pm-cach2` caches, `pm-slab2` slab
//! caches, `pm-figr1` statistics, `pm-answ1` outcome of a command); 8 number of the request (u32); 12 `errno` of a
//! failure, or 0 (u32); 16 count of records; 24 count of records left out. The modules `ranges`, `caches`, `slabs`,
//! `figures` and `commands` define the records.
//!
//! The file of a command ([`ControlCommand`]) contains the command from the start, and the answer follows it. Commands
//! that may call code of the program are executed by a thread that runs only while there are commands (`control`). The
//! requester waits as long as for a list. After that it learns that the process continues with the command.
//!
//! Answering (`answer`) allocates no memory, and holds no lock while it writes. Requests ([`mod@ask`]) are made by the
//! command-line tool.

mod answer;
pub mod ask;
mod caches;
mod commands;
pub(crate) mod control;
mod figures;
mod ranges;
mod slabs;

pub use answer::StatsResponder;
pub use ask::{List, Unanswered, ask, ask_for_caches, ask_for_figures, ask_for_slabs, command};
pub use commands::{Action, ControlCommand, Outcome};
pub use slabs::shown_name;

use crate::published::Subject;

/// Most records in a file: 8 MiB of ranges.
pub const MOST_RECORDS: u64 = 1 << 18;

/// The head of a list, before its records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Head {
    number: u32,
    errno: u32,
    records: u64,
    left_out: u64,
}

const fn magic_of(subject: Subject) -> u64 {
    u64::from_le_bytes(match subject {
        Subject::Ranges => *b"pm-vrng1",
        Subject::Caches => *b"pm-cach2",
        Subject::Slabs => *b"pm-slab2",
        Subject::Figures => *b"pm-figr1",
        Subject::Command => *b"pm-answ1",
    })
}

impl Head {
    const LEN: usize = 32;

    fn to_bytes(self, subject: Subject) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&magic_of(subject).to_le_bytes());
        bytes[8..12].copy_from_slice(&self.number.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.errno.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.records.to_le_bytes());
        bytes[24..].copy_from_slice(&self.left_out.to_le_bytes());
        bytes
    }

    /// Returns `None` if this is not the head of such a list.
    fn from_bytes(bytes: &[u8; Self::LEN], subject: Subject) -> Option<Self> {
        let head = Self {
            number: u32_at(bytes, 8),
            errno: u32_at(bytes, 12),
            records: u64_at(bytes, 16),
            left_out: u64_at(bytes, 24),
        };
        (u64_at(bytes, 0) == magic_of(subject)).then_some(head)
    }
}

/// Measures statistics when another process requests them.
///
/// Example: [`List`].
pub trait Measured: Sync {
    /// Updates the counters. Must neither allocate nor take long.
    fn measure(&self);
}

/// A record of a list; each subject has a format of its own.
trait Record: Sized {
    const SUBJECT: Subject;
    const LEN: usize;

    /// Parses a record, which another process wrote. Returns `None` if it is invalid.
    fn from_bytes(bytes: &[u8]) -> Option<Self>;
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].iter().take(8).rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..].iter().take(4).rev().fold(0, |number, byte| number << 8 | u32::from(*byte))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// A head is read as it was written. The magic of each subject is different.
    #[test]
    fn heads_are_read_as_written() {
        let head = Head { number: 3, errno: 28, records: 5, left_out: 6 };
        for subject in Subject::ALL {
            let bytes = head.to_bytes(subject);
            let read = Subject::ALL.map(|subject| Head::from_bytes(&bytes, subject));
            assert_eq!(read, Subject::ALL.map(|other| (other == subject).then_some(head)));
            assert_eq!(Head::from_bytes(&[0; Head::LEN], subject), None);
        }
    }
}
