//! Who writes to a file: one store of this process at a time.

use crate::store::forked;
use crate::sync::Guarded;
use pagemill_sys::ring;
use std::collections::BTreeSet;

/// What the system knows a file by: device and inode.
pub(in crate::store) type Key = (u64, u64);

pub(in crate::store) static CLAIMED: Guarded<BTreeSet<Key>> = Guarded::new(BTreeSet::new());

/// The right to write to a file, until it is dropped.
pub(super) struct Claim {
    key: Key,
    /// Of the process that has it.
    generation: u32,
}

impl Claim {
    /// `None` if a store of this process has it.
    pub fn take(key: Key) -> Option<Self> {
        forked::hear();
        let generation = ring::generation().unwrap_or_default();
        // Made only if it is had: one that is dropped gives the file up.
        CLAIMED.with(|claimed| claimed.insert(key)).then(|| Self { key, generation })
    }

    /// Whether it is this process's, and not that of one it was forked from.
    pub fn is_ours(&self) -> bool {
        ring::generation().is_ok_and(|generation| generation == self.generation)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // In a fork child it is still the parent's.
        if self.is_ours() {
            CLAIMED.with(|claimed| claimed.remove(&self.key));
        }
    }
}
