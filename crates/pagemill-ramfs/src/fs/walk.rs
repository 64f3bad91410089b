//! Path walks: from a directory along the components of a path, without locks.

use super::step::Step;
use super::{Inner, STALE};
use crate::access::{Access, Caller};
use crate::error::{Error, Result};
use crate::inode::{Inode, InodeHandle};
use crate::name::{self, MAX_PATH_BYTES};
use pagemill_slab::{Guard, Handle, enter};
use std::borrow::Cow;
use std::ops::Range;

/// Maximum number of symbolic links in a path, as in Linux.
const MAX_SYMLINKS: u32 = 40;

/// Whether a walk follows a symbolic link that is the last component.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Last {
    Follow,
    Keep,
}

/// The end of a walk.
pub(crate) struct Walked<'path> {
    /// The directory of the last component.
    pub directory: InodeHandle,
    path: Cow<'path, [u8]>,
    last: Range<usize>,
    /// The inode of the last component, if that exists.
    pub inode: Option<InodeHandle>,
    /// Whether a negative dentry says that it does not.
    is_negative: bool,
    /// Whether slashes follow the last component, which must be a directory then.
    pub has_slash: bool,
}

impl<'path> Walked<'path> {
    /// The end of a walk at the root, or at a directory without a last component.
    fn root(directory: InodeHandle, path: Cow<'path, [u8]>) -> Self {
        Self { directory, path, last: 0..0, inode: Some(directory), is_negative: false, has_slash: true }
    }

    /// Returns the last component; empty for the root.
    pub fn name(&self) -> &[u8] {
        &self.path[self.last.clone()]
    }

    /// Returns the inode of the last component.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`].
    pub fn found(&self) -> Result<InodeHandle> {
        self.inode.ok_or(Error::NotFound)
    }
}

/// Returns the range of the first component of a path from `at` on; `None` if only slashes follow.
#[inline]
fn component(path: &[u8], at: usize) -> Option<Range<usize>> {
    let start = at + path[at..].iter().position(|byte| *byte != b'/')?;
    let len = path[start..].iter().position(|byte| *byte == b'/').unwrap_or(path.len() - start);
    Some(start..start + len)
}

impl Inner {
    /// Walks a path to an existing inode. Otherwise as [`Inner::walk`]. Remembers a missing last component, if the limit
    /// of negative dentries permits it.
    pub fn walk_to_inode<'path>(&self, path: &'path [u8], caller: &Caller, last: Last) -> Result<Walked<'path>> {
        let walked = self.walk(path, caller, last)?;
        if walked.inode.is_none() {
            if self.negatives.limit() > 0 && !walked.is_negative {
                self.add_negative(walked.directory, walked.name());
            }
            return Err(Error::NotFound);
        }
        Ok(walked)
    }

    /// Walks a path from the root. The last component need not exist.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`], [`Error::NotDirectory`], [`Error::AccessDenied`], [`Error::NameTooLong`],
    /// [`Error::PathTooLong`], [`Error::LinkLoop`]; [`Error::Stale`] if an inode changed its handle: the walk must
    /// begin again.
    pub fn walk<'path>(&self, path: &'path [u8], caller: &Caller, last: Last) -> Result<Walked<'path>> {
        if path.is_empty() {
            return Err(Error::NotFound);
        }
        if path.len() > MAX_PATH_BYTES {
            return Err(Error::PathTooLong { len_bytes: path.len(), most_bytes: MAX_PATH_BYTES });
        }
        let guard = enter();
        self.walk_from(self.root, Cow::Borrowed(path), caller, last, &guard)
    }

    fn walk_from<'path>(
        &self,
        start: InodeHandle,
        mut path: Cow<'path, [u8]>,
        caller: &Caller,
        last: Last,
        guard: &Guard,
    ) -> Result<Walked<'path>> {
        let mut directory = start;
        let mut inode = self.inodes.get(start, guard).ok_or(STALE)?;
        let mut symlinks = 0;
        let Some(mut range) = component(&path, 0) else {
            return Ok(Walked::root(directory, path));
        };
        loop {
            if !inode.is_directory() {
                return Err(Error::NotDirectory);
            }
            caller.check(inode, Access::EXECUTE)?;
            let name = &path[range.clone()];
            name::check_length(name)?;
            let found = self.step_or_dots(directory, inode, name, guard)?;
            let next = component(&path, range.end);
            let has_slash = range.end < path.len();
            let at = match (found, next) {
                (Step::Missing | Step::Negative, Some(_)) => return Err(Error::NotFound),
                (Step::Missing | Step::Negative, None) => {
                    let is_negative = matches!(found, Step::Negative);
                    return Ok(Walked { directory, path, last: range, inode: None, is_negative, has_slash });
                }
                (Step::Found(_, child), ref next)
                    if child.is_symlink() && (next.is_some() || has_slash || last == Last::Follow) =>
                {
                    symlinks += 1;
                    if symlinks > MAX_SYMLINKS {
                        return Err(Error::LinkLoop { most: MAX_SYMLINKS });
                    }
                    let target = self.texts.get(Handle::from_bits(child.data), guard).ok_or(STALE)?;
                    if target.first() == Some(&b'/') {
                        directory = self.root;
                        inode = self.inodes.get(directory, guard).ok_or(STALE)?;
                    }
                    path = Cow::Owned([&**target, &path[range.end..]].concat());
                    0
                }
                (Step::Found(handle, _), None) => {
                    let inode = Some(handle);
                    return Ok(Walked { directory, path, last: range, inode, is_negative: false, has_slash });
                }
                (Step::Found(handle, child), Some(next)) => {
                    (directory, inode) = (handle, child);
                    next.start
                }
            };
            range = match component(&path, at) {
                Some(range) => range,
                None => return Ok(Walked::root(directory, path)),
            };
        }
    }

    /// As [`Inner::step`], also for the names `.` and `..`.
    #[inline]
    pub fn step_or_dots<'read>(
        &'read self,
        directory: InodeHandle,
        inode: &'read Inode,
        name: &[u8],
        guard: &'read Guard,
    ) -> Result<Step<'read>> {
        let other = match name {
            b"." => directory,
            b".." => inode.parent(),
            _ => return Ok(self.step(inode, name, guard)),
        };
        Ok(Step::Found(other, self.inodes.get(other, guard).ok_or(STALE)?))
    }
}
