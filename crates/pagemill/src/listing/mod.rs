//! Lists of a process's volatile ranges, for other processes of its user.
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
//! All numbers are little-endian. Head, 32 bytes: 0 magic `pm-vrng1`; 8 number of the request (u32); 12 `errno` of what went
//! wrong, or 0 (u32); 16 records; 24 ranges that were left out. Records, 32 bytes each: 0 address; 8 length; 16 bytes purged
//! (all ones: some, how many is not known); 24 age in ticks of 2^22 ns (u32; all ones: not marked); 28 kind; 29 state; 30
//! behaviour; 31 whether it is strict.
//!
//! Answering ([`answer`]) takes no memory and, while it writes, no lock. Asking ([`ask`]) is for commands.

mod answer;
pub mod ask;

pub use answer::Lister;
pub use ask::{List, Unanswered, ask};

use crate::volatile::listed::{Kind, Listed, State};
use crate::volatile::vrange::How;

const MAGIC: u64 = u64::from_le_bytes(*b"pm-vrng1");

/// Most ranges that a file lists: 8 MiB.
pub const MOST_RECORDS: u64 = 1 << 18;

const UNKNOWN: u64 = u64::MAX;
const NOT_MARKED: u32 = u32::MAX;

/// What stands before the records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Head {
    number: u32,
    errno: u32,
    records: u64,
    left_out: u64,
}

impl Head {
    const LEN: usize = 32;

    fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.number.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.errno.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.records.to_le_bytes());
        bytes[24..].copy_from_slice(&self.left_out.to_le_bytes());
        bytes
    }

    /// `None` for what is no head.
    fn from_bytes(bytes: &[u8; Self::LEN]) -> Option<Self> {
        let head = Self {
            number: u32_at(bytes, 8),
            errno: u32_at(bytes, 12),
            records: u64_at(bytes, 16),
            left_out: u64_at(bytes, 24),
        };
        (u64_at(bytes, 0) == MAGIC).then_some(head)
    }
}

const RECORD_LEN: usize = 32;

fn to_record(listed: &Listed) -> [u8; RECORD_LEN] {
    let mut bytes = [0; RECORD_LEN];
    bytes[..8].copy_from_slice(&(listed.addr as u64).to_le_bytes());
    bytes[8..16].copy_from_slice(&(listed.len_bytes as u64).to_le_bytes());
    let purged = listed.purged_bytes.map_or(UNKNOWN, |bytes| bytes as u64);
    bytes[16..24].copy_from_slice(&purged.to_le_bytes());
    bytes[24..28].copy_from_slice(&listed.age_ticks.unwrap_or(NOT_MARKED).to_le_bytes());
    bytes[28] = match listed.kind {
        Kind::Handle => 0,
        Kind::Marked => 1,
    };
    bytes[29] = match listed.state {
        State::Held => 0,
        State::Volatile => 1,
        State::Pinned => 2,
        State::Purging => 3,
    };
    bytes[30] = match listed.how {
        How::Full => 0,
        How::Partial => 1,
    };
    bytes[31] = u8::from(listed.is_strict);
    bytes
}

/// `None` for what cannot be.
fn from_record(bytes: &[u8; RECORD_LEN]) -> Option<Listed> {
    let (addr, len_bytes) = (u64_at(bytes, 0), u64_at(bytes, 8));
    let purged = Some(u64_at(bytes, 16)).filter(|purged| *purged != UNKNOWN);
    let is_inside =
        len_bytes > 0 && addr.checked_add(len_bytes).is_some() && purged.is_none_or(|purged| purged <= len_bytes);
    let listed = Listed {
        addr: usize::try_from(addr).ok()?,
        len_bytes: usize::try_from(len_bytes).ok()?,
        kind: *[Kind::Handle, Kind::Marked].get(usize::from(bytes[28]))?,
        state: *[State::Held, State::Volatile, State::Pinned, State::Purging].get(usize::from(bytes[29]))?,
        how: *[How::Full, How::Partial].get(usize::from(bytes[30]))?,
        is_strict: *[false, true].get(usize::from(bytes[31]))?,
        purged_bytes: purged.and_then(|purged| usize::try_from(purged).ok()),
        age_ticks: Some(u32_at(bytes, 24)).filter(|ticks| *ticks != NOT_MARKED),
    };
    is_inside.then_some(listed)
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

    fn listed() -> Listed {
        Listed {
            addr: 0x7000_0000_0000,
            len_bytes: 3 << 20,
            kind: Kind::Marked,
            state: State::Pinned,
            how: How::Partial,
            is_strict: true,
            purged_bytes: Some(1 << 20),
            age_ticks: Some(7),
        }
    }

    /// What is written is read; each field has its place.
    #[test]
    fn records_go_and_come() {
        let head = Head { number: 3, errno: 28, records: 5, left_out: 6 };
        assert_eq!(Head::from_bytes(&head.to_bytes()), Some(head));
        assert_eq!(Head::from_bytes(&[0; Head::LEN]), None);
        let states = [State::Held, State::Volatile, State::Pinned, State::Purging];
        for (state, (kind, how)) in
            states.into_iter().zip([Kind::Handle, Kind::Marked].into_iter().zip([How::Full, How::Partial]).cycle())
        {
            for (purged_bytes, age_ticks) in [(None, None), (Some(0), Some(0)), (Some(3 << 20), Some(1 << 24))] {
                let is_strict = age_ticks.is_some();
                let listed = Listed { state, kind, how, is_strict, purged_bytes, age_ticks, ..listed() };
                assert_eq!(from_record(&to_record(&listed)), Some(listed));
            }
        }
    }

    /// Nothing that cannot be is taken for a range, whichever byte is wrong.
    #[test]
    fn damaged_records_are_refused() {
        let good = to_record(&listed());
        for (at, byte) in [(28, 2), (29, 4), (30, 2), (31, 2), (18, 0x31), (23, 1), (7, 0xFF)] {
            let mut bytes = good;
            bytes[at] = byte;
            if at == 7 {
                bytes[..7].fill(0xFF);
            }
            assert_eq!(from_record(&bytes), None, "byte {at}");
        }
        assert_eq!(from_record(&[0; RECORD_LEN]), None, "no length");
        assert_eq!(from_record(&[0xFF; RECORD_LEN]), None);
    }
}
