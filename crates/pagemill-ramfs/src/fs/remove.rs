//! Removing names: of files and of empty directories.

use super::Inner;
use super::step::Step;
use crate::access::{Access, Caller};
use crate::error::{Error, Result};
use crate::inode::{Inode, InodeHandle};
use crate::name;
use crate::watch::EventKind;
use pagemill_slab::enter;

/// What [`Inner::remove`] removes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Remove {
    File,
    Directory,
}

impl Inner {
    /// Looks a name up without a lock. Returns the inode's handle and a copy of the inode.
    pub(super) fn peek(&self, directory: &Inode, name: &[u8]) -> Option<(InodeHandle, Inode)> {
        match self.step(directory, name, &enter()) {
            Step::Found(handle, inode) => Some((handle, *inode)),
            Step::Negative | Step::Missing => None,
        }
    }

    /// Removes the name of a file, or an empty directory.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`], [`Error::IsDirectory`] or [`Error::NotDirectory`], [`Error::NotEmpty`], and those of names,
    /// permissions and space.
    pub fn remove(&self, directory: InodeHandle, name: &[u8], what: Remove, caller: &Caller) -> Result<()> {
        match (name, what) {
            (b"." | b"..", Remove::File) => return Err(Error::IsDirectory),
            (b".", Remove::Directory) => return Err(Error::Invalid { what: "the name `.`" }),
            (b"..", Remove::Directory) => return Err(Error::NotEmpty { entries: 1 }),
            _ => name::check_length(name)?,
        }
        loop {
            let parent = self.directory(directory)?;
            caller.check(&parent, Access::EXECUTE)?;
            let (handle, seen) = self.peek(&parent, name).ok_or(Error::NotFound)?;
            let locked = self.locks.lock([parent.ino, seen.ino]);
            let parent = self.directory(directory)?;
            let located = self.locate(&parent, name);
            let Some(located) = located.filter(|located| located.inode == Some(handle)) else {
                // The name has changed since the look-up: look again.
                continue;
            };
            let inode = self.inode(handle)?;
            caller.check(&parent, Access::WRITE)?;
            caller.check_sticky(&parent, &inode)?;
            self.check_removable(&inode, what)?;
            let now_ns = self.clock.now_ns();
            // What can fail comes first. From then on the name goes without an error.
            self.touch_directory(directory, &parent, -i32::from(inode.is_directory()))?;
            let links = if inode.is_directory() { 0 } else { inode.links - 1 };
            let unlinked = self.update_inode(handle, |old| Inode { links, changed_ns: now_ns, ..*old });
            if let Err(error) = unlinked {
                let _ = self.touch_directory(directory, &parent, i32::from(inode.is_directory()));
                return Err(error);
            }
            self.remove_name(&parent, located);
            if links > 0 {
                self.discharge_inodes(&inode, 1);
            }
            drop(locked);
            if links == 0 {
                self.free_if_unused(inode.ino, handle);
            }
            self.watches.notify(EventKind::Removed, parent.ino, name);
            return Ok(());
        }
    }

    /// Checks that an inode is of the kind to remove, and an empty directory if it is one.
    pub(super) fn check_removable(&self, inode: &Inode, what: Remove) -> Result<()> {
        match (what, inode.is_directory()) {
            (Remove::File, true) => Err(Error::IsDirectory),
            (Remove::Directory, false) => Err(Error::NotDirectory),
            (Remove::File, false) => Ok(()),
            (Remove::Directory, true) => match self.entry_count(inode) {
                0 => Ok(()),
                entries => Err(Error::NotEmpty { entries }),
            },
        }
    }
}
