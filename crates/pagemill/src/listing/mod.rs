//! What a process does for other processes of its user: it lists its volatile ranges, what its caches hold, and its slab caches,
//! which it shrinks as well.
//!
//! Nobody may look into another process's memory uninvited, so the process answers itself:
//!
//! ```text
//!   who asks                                          the process
//!   makes an empty file beside its figures
//!   raises the number on the page of figures,
//!   wakes the helper                          ---->   the helper opens the file, if it is what it should be
//!   waits for the head, 2 s at most           <----   writes a record a range, last the head
//!   reads, believes nothing, removes the file
//! ```
//!
//! All numbers are little-endian. Head, 32 bytes: 0 magic (`pm-vrng1` ranges, `pm-cach2` caches, `pm-slab2` slab caches, `pm-slan1`
//! what became of an order); 8 number of the request (u32); 12 `errno` of what went wrong, or 0 (u32); 16 records; 24 records that
//! were left out. The records: `ranges`, `caches`, `slabs`, `orders`.
//!
//! An order ([`Order`]) stands in the file already, and the answer behind it. What may call the program's own code is carried out
//! by a thread that lives as long as there are orders (`clerk`); who asked waits no longer than for a list, and is told that it goes on.
//!
//! Answering (`answer`) takes no memory and, while it writes, no lock. Asking ([`mod@ask`]) is for commands.

mod answer;
pub mod ask;
mod caches;
pub(crate) mod clerk;
mod orders;
mod ranges;
mod slabs;

pub use answer::Lister;
pub use ask::{List, Unanswered, ask, ask_for_caches, ask_for_slabs, order};
pub use orders::{Action, Order, Outcome};
pub use slabs::shown_name;

use crate::published::Subject;

/// Most records of a file: 8 MiB of ranges.
pub const MOST_RECORDS: u64 = 1 << 18;

/// What stands before the records.
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
        Subject::SlabOrder => *b"pm-slan1",
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

    /// `None` for what is no head of such a list.
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

/// A record of a list.
trait Record: Sized {
    const SUBJECT: Subject;
    const LEN: usize;

    /// `None` for what cannot be: another process wrote it.
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

    /// What is written is read; each list has its own magic.
    #[test]
    fn heads_go_and_come() {
        let head = Head { number: 3, errno: 28, records: 5, left_out: 6 };
        for subject in Subject::ALL {
            let bytes = head.to_bytes(subject);
            let read = Subject::ALL.map(|subject| Head::from_bytes(&bytes, subject));
            assert_eq!(read, Subject::ALL.map(|other| (other == subject).then_some(head)));
            assert_eq!(Head::from_bytes(&[0; Head::LEN], subject), None);
        }
    }
}
