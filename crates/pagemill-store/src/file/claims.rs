//! Write claims: at most one store of this process writes to a file at a time.

use crate::forked;
use crate::uring;
use pagemill_core::sync::Guarded;
use std::collections::BTreeSet;

/// Identity of a file: device and inode.
pub(crate) type FileKey = (u64, u64);

/// The files that a store of this process has claimed for writing. A file has at most one such store.
pub(crate) static CLAIMED_FILES: Guarded<BTreeSet<FileKey>> = Guarded::new(BTreeSet::new());

/// The right of one store to write to a file; dropping the claim releases the file.
pub(super) struct FileClaim {
    key: FileKey,
    /// Fork generation ([`uring::generation`]) of the process that owns the claim.
    generation: u32,
}

impl FileClaim {
    /// Claims a file for writing. Returns `None` if another store of this process has claimed the file.
    pub fn try_acquire(key: FileKey) -> Option<Self> {
        forked::register();
        let generation = uring::generation().unwrap_or_default();
        // The claim is created only after the insert succeeded, because dropping a claim releases the file.
        CLAIMED_FILES.with(|claimed| claimed.insert(key)).then(|| Self { key, generation })
    }

    /// Returns whether this process owns the claim. False in a fork child of the owner.
    pub fn is_ours(&self) -> bool {
        uring::generation().is_ok_and(|generation| generation == self.generation)
    }
}

impl Drop for FileClaim {
    fn drop(&mut self) {
        // A fork child must not release the parent's claim.
        if self.is_ours() {
            let was_claimed = CLAIMED_FILES.with(|claimed| claimed.remove(&self.key));
            debug_assert!(was_claimed, "a claim is released once");
        }
    }
}
