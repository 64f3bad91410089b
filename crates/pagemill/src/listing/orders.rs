//! An order, 32 bytes: 0 magic `pm-slor1`; 8 number of the request, 12 what is to be done (1 shrink, 2 `defrag_used_ratio`, 3
//! `remote_node_defrag_ratio`), 16 percent (u32 each); 20 1 once it was taken, which the process writes (u32); 24 number of the cache.
//! Behind it the head of the answer, and a record of 64 bytes: 0 number of the cache; 8 bytes that went
//! back; 16 objects moved; 24 slabs before, 28 after (u32); 32 resident bytes before, 40 after; 48 `errno` (u32); zeros.

use super::{Record, u32_at, u64_at};
use crate::published::Subject;
use crate::slab::ShrinkReport;

const MAGIC: u64 = u64::from_le_bytes(*b"pm-slor1");

/// What a process is told to do with its slab caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Pack what can be moved, and give back what nothing is in.
    Shrink,
    /// Set `defrag_used_ratio`, in percent.
    SetUsedRatio(u32),
    /// Set `remote_node_defrag_ratio`, in percent.
    SetRemoteRatio(u32),
}

/// An order to one cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    pub action: Action,
    /// The cache by the number that the list has it under.
    pub cache: u64,
}

/// What became of an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    pub cache: u64,
    /// Zeros where nothing was shrunk.
    pub shrunk: ShrinkReport,
    /// 0, or why it was not done: `ENOENT` of a cache that has gone, `ECANCELED` where the program's own code panicked, `EAGAIN`
    /// where too many orders wait or no thread was to be had.
    pub errno: i32,
}

impl Order {
    pub(super) const LEN: usize = 32;

    /// Where the process says that it has taken it: a 1 (u32).
    pub(super) const TAKEN_AT: usize = 20;

    pub(super) fn to_bytes(self, number: u32) -> [u8; Self::LEN] {
        let (action, percent) = match self.action {
            Action::Shrink => (1, 0),
            Action::SetUsedRatio(percent) => (2, percent),
            Action::SetRemoteRatio(percent) => (3, percent),
        };
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
        for (place, word) in bytes[8..Self::TAKEN_AT].chunks_exact_mut(4).zip([number, action, percent]) {
            place.copy_from_slice(&u32::to_le_bytes(word));
        }
        bytes[24..].copy_from_slice(&self.cache.to_le_bytes());
        bytes
    }

    /// `None` for what is no order of this number.
    pub(super) fn from_bytes(bytes: &[u8; Self::LEN], number: u32) -> Option<Self> {
        let percent = u32_at(bytes, 16);
        let action = match u32_at(bytes, 12) {
            1 => Action::Shrink,
            2 => Action::SetUsedRatio(percent),
            3 => Action::SetRemoteRatio(percent),
            _ => return None,
        };
        let is_order = u64_at(bytes, 0) == MAGIC && u32_at(bytes, 8) == number && u32_at(bytes, Self::TAKEN_AT) == 0;
        is_order.then(|| Self { action, cache: u64_at(bytes, 24) })
    }
}

impl Outcome {
    pub(super) fn failed(cache: u64, errno: i32) -> Self {
        Self { cache, shrunk: ShrinkReport::default(), errno }
    }

    pub(super) fn to_record(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        let ShrinkReport { freed_bytes, moved, slabs_before, slabs_after, resident_before, resident_after } =
            self.shrunk;
        let slabs = u64::from(slabs_after) << u32::BITS | u64::from(slabs_before);
        let words =
            [self.cache, freed_bytes, moved, slabs, resident_before, resident_after, u64::from(self.errno as u32)];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}

impl Record for Outcome {
    const SUBJECT: Subject = Subject::SlabOrder;
    const LEN: usize = 64;

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let shrunk = ShrinkReport {
            freed_bytes: u64_at(bytes, 8),
            moved: u64_at(bytes, 16),
            slabs_before: u32_at(bytes, 24),
            slabs_after: u32_at(bytes, 28),
            resident_before: u64_at(bytes, 32),
            resident_after: u64_at(bytes, 40),
        };
        Some(Self { cache: u64_at(bytes, 0), shrunk, errno: i32::try_from(u32_at(bytes, 48)).ok()? })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// What is written is read, of its number only; what is none is refused, and what somebody has taken.
    #[test]
    fn orders_go_and_come() {
        for action in [Action::Shrink, Action::SetUsedRatio(100), Action::SetRemoteRatio(7)] {
            for cache in [0, 9, u64::MAX] {
                let order = Order { action, cache };
                let bytes = order.to_bytes(5);
                assert_eq!((Order::from_bytes(&bytes, 5), Order::from_bytes(&bytes, 6)), (Some(order), None));
                for at in [0, 15, Order::TAKEN_AT] {
                    let mut bytes = bytes;
                    bytes[at] ^= 0x80;
                    assert_eq!(Order::from_bytes(&bytes, 5), None, "byte {at}");
                }
            }
        }
    }

    #[test]
    fn outcomes_go_and_come() {
        let shrunk = ShrinkReport {
            freed_bytes: 1,
            moved: 2,
            slabs_before: 3,
            slabs_after: 4,
            resident_before: 5,
            resident_after: 6,
        };
        let outcome = Outcome { cache: 7, shrunk, errno: 16 };
        assert_eq!(Outcome::from_bytes(&outcome.to_record()), Some(outcome));
        assert_eq!(Outcome::from_bytes(&[0xFF; Outcome::LEN]), None);
    }
}
