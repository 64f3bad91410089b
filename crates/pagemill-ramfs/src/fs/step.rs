//! One step of a path walk: looks a name up in a directory, without a lock.

use super::Inner;
use crate::dentry::DentryHandle;
use crate::inode::{Inode, InodeHandle};
use pagemill_core::sync::spin_loop;
use pagemill_slab::{Guard, Handle};

/// Number of attempts without the directory's lock.
const MAX_ATTEMPTS: u32 = 100;

/// The result of a look-up.
#[derive(Clone, Copy)]
pub(crate) enum Step<'read> {
    Found(InodeHandle, &'read Inode),
    /// The name does not exist, and a negative dentry says so.
    Negative,
    Missing,
}

impl Step<'_> {
    /// Returns the handle that was found, or else whether a negative dentry was found.
    pub fn handle(self) -> Result<InodeHandle, bool> {
        match self {
            Self::Found(handle, _) => Ok(handle),
            Self::Negative => Err(true),
            Self::Missing => Err(false),
        }
    }
}

impl Inner {
    /// Looks a name up in a directory. The result was true at a moment during the call.
    ///
    /// Takes the lock of the directory after some attempts that met changes, unless the caller has it.
    #[inline]
    pub fn step<'read>(&'read self, directory: &Inode, name: &[u8], guard: &'read Guard) -> Step<'read> {
        if directory.data == 0 {
            return Step::Missing;
        }
        let hash = self.hasher.hash(name);
        for _ in 0..MAX_ATTEMPTS {
            if let Some(found) = self.try_step(directory, name, hash, guard) {
                return found;
            }
            spin_loop();
        }
        let _locked = self.locks.lock([directory.ino]);
        self.step_locked(directory, name, guard)
    }

    /// As [`Inner::step`], for a caller that has the lock of the directory.
    pub fn step_locked<'read>(&'read self, directory: &Inode, name: &[u8], guard: &'read Guard) -> Step<'read> {
        let hash = self.hasher.hash(name);
        self.try_step(directory, name, hash, guard).expect("the lock of the directory excludes changes")
    }

    /// Attempts to look a name up. Returns `None` if the directory's index changed meanwhile.
    #[inline]
    fn try_step<'read>(
        &'read self,
        directory: &Inode,
        name: &[u8],
        hash: u64,
        guard: &'read Guard,
    ) -> Option<Step<'read>> {
        // An index is freed with its directory, which is empty then.
        let Some(index) = self.indices.get(Handle::from_bits(directory.data), guard) else {
            return Some(Step::Missing);
        };
        let sequence = index.begin_read()?;
        let mut found = Step::Missing;
        let child = index.find(hash, |handle| {
            let Some(dentry) = self.dentries.get(handle, guard) else { return false };
            let is_it = dentry.has_name(name, &self.texts, guard);
            if is_it {
                found = match dentry.inode() {
                    None => Step::Negative,
                    // An inode is freed after its name has left the index, so the counter has changed then.
                    Some(inode) => {
                        self.inodes.get(inode, guard).map_or(Step::Missing, |found| Step::Found(inode, found))
                    }
                };
            }
            is_it
        });
        if !index.is_unchanged(sequence) {
            return None;
        }
        if let (Step::Negative, Some(child)) = (&found, child) {
            self.note_negative_found(child.dentry);
        }
        Some(found)
    }

    #[cold]
    fn note_negative_found(&self, dentry: DentryHandle) {
        self.negatives.note_found(dentry);
    }
}
