//! Lists and commands between processes of the same user. On request a process lists its volatile ranges, the usage of
//! its caches, or its slab caches. It can also measure its figures, shrink a slab cache, or return memory.
//!
//! A process must not read another process's memory, so each process writes its own lists:
//!
//! ```text
//!   requester                                         the process
//!   creates a file in the folder of its figures file
//!   stores the request number on its page of figures,
//!   wakes the helper                          ---->   the helper opens the file, after checks
//!   waits for the header, 2 s at most           <----   writes the records, the header last
//!   reads and checks the answer, removes the file
//! ```
//!
//! All numbers are little-endian. The header has 32 bytes: 0 magic (`pm-vrng1` ranges, `pm-cach2` caches, `pm-slab2`
//! slab caches, `pm-figr1` statistics, `pm-answ1` outcome of a command); 8 number of the request (u32); 12 `errno` of a
//! failure, or 0 (u32); 16 count of records; 24 count of records left out. The modules `figures` and `commands`, and
//! the modules `records` of the crates that add a [`ListWriter`], define the records.
//!
//! The file of a command ([`ControlCommand`]) contains the command from the start, and the answer follows it. Commands
//! that may call code of the program are executed by a thread that runs only while there are commands (`control`). The
//! requester waits for as long as for a list. If the command takes longer, the requester reports that it is still in
//! progress.
//!
//! Answering (`answer`) allocates no memory, and holds no lock while it writes. Requests ([`mod@ask`]) are made by the
//! command-line tool.

mod answer;
pub mod ask;
mod commands;
pub mod control;
pub(crate) mod figures;

pub use answer::{Response, StatsResponder};
pub use ask::{Records, Unanswered, ask_all_for, ask_for, ask_for_figures, command};
pub use commands::{Action, ControlCommand, Outcome, ShrinkReport};

use crate::error::Result;
use crate::published::Subject;
use std::io;

/// Maximum number of records in the file of an answer. As many records of volatile ranges take 8 MiB.
pub const MOST_RECORDS: u64 = 1 << 18;

/// The header of an answer, before its records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AnswerHeader {
    number: u32,
    errno: u32,
    records: u64,
    /// Number of listed objects without a record in the file, because the list has more than [`MOST_RECORDS`] records.
    left_out: u64,
}

/// Returns the first word of an answer about this subject, which identifies the file format.
const fn magic_of(subject: Subject) -> u64 {
    u64::from_le_bytes(match subject {
        Subject::Ranges => *b"pm-vrng1",
        Subject::Caches => *b"pm-cach2",
        Subject::Slabs => *b"pm-slab2",
        Subject::Figures => *b"pm-figr2",
        Subject::Command => *b"pm-answ1",
    })
}

impl AnswerHeader {
    const LEN: usize = 32;

    fn to_bytes(self, subject: Subject) -> [u8; Self::LEN] {
        bytes_of([magic_of(subject), word_of(self.number, self.errno), self.records, self.left_out])
    }

    /// Parses the header of an answer. Returns `None` if the answer is not about `subject`.
    fn from_bytes(bytes: &[u8; Self::LEN], subject: Subject) -> Option<Self> {
        let header = Self {
            number: u32_at(bytes, 8),
            errno: u32_at(bytes, 12),
            records: u64_at(bytes, 16),
            left_out: u64_at(bytes, 24),
        };
        (u64_at(bytes, 0) == magic_of(subject)).then_some(header)
    }
}

/// Maximum time that a list writer spends on inspecting the objects that it lists. It runs in the helper thread, and
/// other processes of the tree wait for answers of that thread for at most 25 ms.
pub const MAX_INSPECTION_NS: u64 = 15_000_000;

/// Writes one kind of list for other processes, such as the list of slab caches. The crate of the listed objects
/// implements this trait, and adds the implementation to the [`StatsResponder`] of an instance. The instance itself
/// writes the record of its figures.
///
/// ```
/// use pagemill_core::listing::{ListWriter, Record, Response};
/// use pagemill_core::published::Subject;
/// use std::io;
///
/// /// A record of one slab cache, in 8 bytes.
/// struct Caches(u64);
///
/// impl Record for Caches {
///     const SUBJECT: Subject = Subject::Caches;
///     const LEN: usize = 8;
///
///     fn from_bytes(bytes: &[u8]) -> Option<Self> {
///         bytes.try_into().ok().map(|bytes| Self(u64::from_le_bytes(bytes)))
///     }
/// }
///
/// impl ListWriter for Caches {
///     fn subject(&self) -> Subject {
///         Self::SUBJECT
///     }
///
///     fn list(&self, response: &mut Response<'_>) -> io::Result<()> {
///         response.write_record(&self.0.to_le_bytes())
///     }
/// }
///
/// assert_eq!(Caches::from_bytes(&7_u64.to_le_bytes()).map(|caches| caches.0), Some(7));
/// ```
pub trait ListWriter: Sync {
    /// The subject of the list that [`ListWriter::list`] writes.
    fn subject(&self) -> Subject;

    /// Writes the records of all listed objects to `response`. Must not allocate, and must end soon after
    /// [`MAX_INSPECTION_NS`].
    ///
    /// # Errors
    ///
    /// Errors of writing to `response`. The list ends at the first error.
    fn list(&self, response: &mut Response<'_>) -> io::Result<()>;
}

/// Executes commands of other processes on the slab caches of this process. `pagemill-slab` implements this trait, and
/// passes the implementation to [`control::ControlEndpoint::set_slabs`].
///
/// Example: [`ControlCommand`].
pub trait SlabCommands: Sync {
    /// Executes `action` on the slab cache with the number `cache`. Returns `None` if there is no such cache.
    fn execute(&self, cache: u64, action: Action) -> Option<Result<ShrinkReport>>;
}

/// A record of a list. Each kind of list has its own format of records.
///
/// Example: [`ListWriter`].
pub trait Record: Sized {
    const SUBJECT: Subject;
    const LEN: usize;

    /// Parses a record, which another process wrote. Returns `None` if it is invalid.
    fn from_bytes(bytes: &[u8]) -> Option<Self>;
}

/// Returns the bytes of little-endian words; the bytes behind the words are zero.
fn bytes_of<const WORDS: usize, const LEN: usize>(words: [u64; WORDS]) -> [u8; LEN] {
    assert!(8 * WORDS <= LEN);
    let mut bytes = [0; LEN];
    for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// Packs two numbers of 32 bits into a word, `first` at the lower offset.
fn word_of(first: u32, second: u32) -> u64 {
    u64::from(first) | u64::from(second) << u32::BITS
}

/// Reads the little-endian 64-bit number at offset `at` of `bytes`.
pub fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].iter().take(8).rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// As [`u64_at`], for a number of 32 bits.
pub fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..].iter().take(4).rev().fold(0, |number, byte| number << 8 | u32::from(*byte))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Writes a header for each subject and parses it. The parsed header must equal the written one. It must be
    /// rejected if another subject is expected.
    #[test]
    fn headers_are_read_as_written() {
        let header = AnswerHeader { number: 3, errno: libc::ENOSPC as u32, records: 5, left_out: 6 };
        for subject in Subject::ALL {
            let bytes = header.to_bytes(subject);
            let read = Subject::ALL.map(|subject| AnswerHeader::from_bytes(&bytes, subject));
            assert_eq!(read, Subject::ALL.map(|other| (other == subject).then_some(header)));
            assert_eq!(AnswerHeader::from_bytes(&[0; AnswerHeader::LEN], subject), None);
        }
    }
}
