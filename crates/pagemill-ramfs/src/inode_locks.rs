//! The locks of inodes, chosen by inode number from a fixed table.

use crate::inode::Ino;
use pagemill_core::sync::{Lock, Padded};

/// Number of locks; a power of two.
const LOCKS: usize = 128;
/// Maximum number of inodes that one call locks: two directories and the two inodes of a rename.
const MAX_LOCKED: usize = 4;

/// A table of locks. Inodes with the same position share a lock, so a thread locks all inodes of a change by one call.
pub(crate) struct InodeLocks(Box<[Padded<Lock>]>);

/// The locks of some inodes, until it is dropped.
pub(crate) struct LockedInodes<'locks> {
    locks: &'locks InodeLocks,
    /// Positions in ascending order, the first `count` of them.
    held: [u16; MAX_LOCKED],
    count: usize,
}

impl InodeLocks {
    pub fn new() -> Self {
        Self((0..LOCKS).map(|_| Padded(Lock::new())).collect())
    }

    fn position(ino: Ino) -> u16 {
        (ino % LOCKS as u64) as u16
    }

    /// Locks up to four inodes, in the order of the table.
    pub fn lock<const N: usize>(&self, inodes: [Ino; N]) -> LockedInodes<'_> {
        let mut positions = inodes.map(Self::position);
        positions.sort_unstable();
        let mut locked = LockedInodes { locks: self, held: [0; MAX_LOCKED], count: 0 };
        for position in positions {
            if locked.count == 0 || locked.held[locked.count - 1] != position {
                self.0[usize::from(position)].0.acquire();
                locked.held[locked.count] = position;
                locked.count += 1;
            }
        }
        locked
    }

    /// Locks all inodes.
    pub fn lock_all(&self) -> LockedAll<'_> {
        self.0.iter().for_each(|lock| lock.0.acquire());
        LockedAll(self)
    }
}

impl Drop for LockedInodes<'_> {
    fn drop(&mut self) {
        for position in self.held[..self.count].iter().rev() {
            self.locks.0[usize::from(*position)].0.release();
        }
    }
}

/// The locks of all inodes, until it is dropped.
pub(crate) struct LockedAll<'locks>(&'locks InodeLocks);

impl Drop for LockedAll<'_> {
    fn drop(&mut self) {
        self.0.0.iter().rev().for_each(|lock| lock.0.release());
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    /// Locks inodes that share a lock, in any order. Each lock must be taken once, and all must be free afterwards.
    #[test]
    fn shared_locks_are_taken_once() {
        let locks = InodeLocks::new();
        let held = locks.lock([5, 5 + LOCKS as u64, 3, 5]);
        assert_eq!((held.count, &held.held[..2]), (2, &[3, 5][..]));
        drop(held);
        drop(locks.lock_all());
        assert!(locks.0.iter().all(|lock| !lock.0.is_held()));
    }
}
