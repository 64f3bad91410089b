//! The operations by path.

use crate::access::Access;
use crate::error::{Error, Result};
use crate::file::{File, OpenOptions};
use crate::fs::create::NewInode;
use crate::fs::remove::Remove;
use crate::fs::walk::{Last, Walked};
use crate::fs::{DirEntry, Inner, RamFs, Rename, SetXattr};
use crate::inode::{Attr, FileType, Ino, InodeHandle, SetAttr};
use crate::quota::{Quota, QuotaUsage};
use crate::watch::Watch;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Returns the bytes of a path.
pub(crate) fn bytes(path: &Path) -> &[u8] {
    path.as_os_str().as_bytes()
}

/// Operations by path. A walk may fail with [`Error::NotFound`], [`Error::NotDirectory`], [`Error::AccessDenied`],
/// [`Error::NameTooLong`], [`Error::PathTooLong`] and [`Error::LinkLoop`]; changes also with [`Error::NoSpace`] and
/// [`Error::QuotaExceeded`].
///
/// After an error nothing has changed, except for times, and in four cases. [`RamFs::write`], [`RamFs::create_dir_all`]
/// and [`RamFs::remove_dir_all`] have several steps, of which those before the error stay done. [`RamFs::set_attributes`]
/// may have changed the length.
impl RamFs {
    /// Walks a path and calls `act`, again if an inode got another handle meanwhile.
    fn at<T>(&self, path: &Path, last: Last, act: impl Fn(&Inner, &Walked<'_>) -> Result<T>) -> Result<T> {
        let inner = &*self.inner;
        inner.retry(|| act(inner, &inner.walk(bytes(path), &self.caller, last)?))
    }

    pub(crate) fn inode_at<T>(
        &self,
        path: &Path,
        last: Last,
        act: impl Fn(&Inner, InodeHandle) -> Result<T>,
    ) -> Result<T> {
        let inner = &*self.inner;
        inner.retry(|| {
            let walked = inner.walk_to_inode(bytes(path), &self.caller, last)?;
            let inode = walked.found()?;
            if walked.has_slash && !inner.inode(inode)?.is_directory() {
                return Err(Error::NotDirectory);
            }
            act(inner, inode)
        })
    }

    /// Opens a regular file, or creates it.
    ///
    /// # Errors
    ///
    /// [`Error::Exists`] with [`OpenOptions::create_new`], [`Error::IsDirectory`].
    pub fn open(&self, path: impl AsRef<Path>, options: &OpenOptions) -> Result<File> {
        let last = if options.no_follow || options.create_new { Last::Keep } else { Last::Follow };
        self.at(path.as_ref(), last, |inner, walked| match walked.inode {
            Some(_) if options.create_new => Err(Error::Exists),
            Some(inode) if walked.has_slash && !inner.inode(inode)?.is_directory() => Err(Error::NotDirectory),
            Some(inode) => File::open(&self.inner, inode, options, &self.caller),
            None if !options.create => Err(Error::NotFound),
            None if walked.has_slash => Err(Error::IsDirectory),
            None => {
                let mode = options.mode.unwrap_or(0o666);
                // In use before its name can be removed.
                let begin = |ino, inode| inner.active.begin_new(ino, inode);
                match inner.make(walked.directory, walked.name(), NewInode::Regular, mode, &self.caller, begin) {
                    Ok(active) => Ok(File::of(&self.inner, active, options, &self.caller)),
                    // Another thread has created it meanwhile: open that file.
                    Err(Error::Exists) if !options.create_new => Err(crate::fs::STALE),
                    Err(error) => Err(error),
                }
            }
        })
    }

    /// Creates an open regular file without a name in a directory. [`File::link_at`] gives it one.
    ///
    /// # Errors
    ///
    /// [`Error::NotDirectory`].
    pub fn open_nameless(&self, directory: impl AsRef<Path>, options: &OpenOptions) -> Result<File> {
        let mode = options.mode.unwrap_or(0o666);
        self.inode_at(directory.as_ref(), Last::Follow, |inner, directory| {
            let active = inner.make_nameless(directory, mode, &self.caller)?;
            Ok(File::of(&self.inner, active, options, &self.caller))
        })
    }

    fn make_at(&self, path: &Path, new: NewInode<'_>, mode: u32) -> Result<()> {
        self.at(path, Last::Keep, |inner, walked| {
            if walked.inode.is_some() {
                return Err(Error::Exists);
            }
            if walked.has_slash && !matches!(new, NewInode::Directory) {
                return Err(Error::NotFound);
            }
            inner.make(walked.directory, walked.name(), new, mode, &self.caller, |_, _| ())
        })
    }

    /// Creates a directory with the permission bits 0777 less the caller's umask.
    ///
    /// # Errors
    ///
    /// [`Error::Exists`].
    pub fn create_dir(&self, path: impl AsRef<Path>) -> Result<()> {
        self.make_at(path.as_ref(), NewInode::Directory, 0o777)
    }

    /// Creates a directory and the missing ones above it.
    ///
    /// # Errors
    ///
    /// [`Error::NotDirectory`].
    pub fn create_dir_all(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        match self.create_dir(path) {
            Err(Error::NotFound) if path.parent().is_some_and(|parent| !parent.as_os_str().is_empty()) => {
                path.parent().map_or(Ok(()), |parent| self.create_dir_all(parent))?;
                self.create_dir(path)
            }
            Err(Error::Exists) if self.metadata(path)?.kind == FileType::Directory => Ok(()),
            result => result,
        }
    }

    /// Creates a symbolic link at `link`.
    ///
    /// # Errors
    ///
    /// [`Error::Exists`], [`Error::PathTooLong`] for a target of 4096 bytes or more.
    pub fn symlink(&self, target: impl AsRef<Path>, link: impl AsRef<Path>) -> Result<()> {
        self.make_at(link.as_ref(), NewInode::Symlink { target: bytes(target.as_ref()) }, 0o777)
    }

    /// Creates a pipe, socket or device. It has attributes, but cannot be opened.
    ///
    /// # Errors
    ///
    /// [`Error::Exists`], [`Error::Invalid`] for another kind, [`Error::NotPermitted`] for a device.
    pub fn make_special(&self, path: impl AsRef<Path>, kind: FileType, mode: u32, device: u64) -> Result<()> {
        match kind {
            FileType::Fifo | FileType::Socket => {}
            FileType::CharDevice | FileType::BlockDevice if self.caller.is_privileged() => {}
            FileType::CharDevice | FileType::BlockDevice => {
                return Err(Error::NotPermitted { what: "only a privileged caller may create devices" });
            }
            _ => return Err(Error::Invalid { what: "a kind that is no special file" }),
        }
        self.make_at(path.as_ref(), NewInode::Special { kind, device }, mode)
    }

    /// Gives the file at `original` a further name. A symbolic link gets the name itself.
    ///
    /// # Errors
    ///
    /// [`Error::Exists`], [`Error::NotPermitted`] for a directory.
    pub fn hard_link(&self, original: impl AsRef<Path>, link: impl AsRef<Path>) -> Result<()> {
        let inode = |inner: &Inner| inner.walk(bytes(original.as_ref()), &self.caller, Last::Keep)?.found();
        self.inner.retry(|| self.try_link(inode(&self.inner)?, link.as_ref()))
    }

    pub(crate) fn link_handle(&self, inode: InodeHandle, link: &Path) -> Result<()> {
        self.inner.retry(|| self.try_link(inode, link))
    }

    fn try_link(&self, inode: InodeHandle, link: &Path) -> Result<()> {
        let walked = self.inner.walk(bytes(link), &self.caller, Last::Keep)?;
        match walked.inode {
            Some(_) => Err(Error::Exists),
            None if walked.has_slash => Err(Error::NotFound),
            None => self.inner.link(inode, walked.directory, walked.name(), &self.caller),
        }
    }

    /// Removes the name of a file. The file exists until it is closed.
    ///
    /// # Errors
    ///
    /// [`Error::IsDirectory`].
    pub fn remove_file(&self, path: impl AsRef<Path>) -> Result<()> {
        self.at(path.as_ref(), Last::Keep, |inner, walked| {
            let inode = walked.found()?;
            if walked.name().is_empty() {
                return Err(Error::IsDirectory);
            }
            if walked.has_slash && !inner.inode(inode)?.is_directory() {
                return Err(Error::NotDirectory);
            }
            inner.remove(walked.directory, walked.name(), Remove::File, &self.caller)
        })
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    ///
    /// [`Error::NotDirectory`], [`Error::NotEmpty`], [`Error::Busy`] for the root.
    pub fn remove_dir(&self, path: impl AsRef<Path>) -> Result<()> {
        self.at(path.as_ref(), Last::Keep, |inner, walked| {
            walked.found()?;
            if walked.name().is_empty() {
                return Err(Error::Busy { what: "the root" });
            }
            inner.remove(walked.directory, walked.name(), Remove::Directory, &self.caller)
        })
    }

    /// Removes a directory with everything below it. Entries that other threads add meanwhile are removed, too.
    ///
    /// # Errors
    ///
    /// [`Error::NotDirectory`]. What was removed before an error stays removed.
    pub fn remove_dir_all(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        loop {
            for entry in self.read_dir(path)? {
                let inside = path.join(&entry.name);
                let removed = match entry.kind {
                    FileType::Directory => self.remove_dir_all(&inside),
                    _ => self.remove_file(&inside),
                };
                removed.or_else(|error| if matches!(error, Error::NotFound) { Ok(()) } else { Err(error) })?;
            }
            match self.remove_dir(path) {
                Err(Error::NotEmpty { .. }) => {}
                result => return result,
            }
        }
    }

    /// Renames a file or directory; replaces an existing file or empty directory of the new name.
    ///
    /// # Errors
    ///
    /// [`Error::NotEmpty`], [`Error::IsDirectory`], [`Error::Invalid`] into itself, [`Error::OtherQuota`].
    pub fn rename(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<()> {
        self.rename_with(from, to, Rename::Replace)
    }

    /// Renames a file or directory.
    ///
    /// # Errors
    ///
    /// As [`RamFs::rename`]; [`Error::Exists`] with [`Rename::NoReplace`], [`Error::NotFound`] with
    /// [`Rename::Exchange`].
    pub fn rename_with(&self, from: impl AsRef<Path>, to: impl AsRef<Path>, how: Rename) -> Result<()> {
        let inner = &*self.inner;
        inner.retry(|| {
            let from = inner.walk(bytes(from.as_ref()), &self.caller, Last::Keep)?;
            let to = inner.walk(bytes(to.as_ref()), &self.caller, Last::Keep)?;
            let moved = inner.inode(from.found()?)?;
            if (from.has_slash || to.has_slash) && !moved.is_directory() {
                return Err(Error::NotDirectory);
            }
            inner.rename((from.directory, from.name()), (to.directory, to.name()), how, &self.caller)
        })
    }

    /// Returns the attributes of the file that a path leads to.
    ///
    /// # Errors
    ///
    /// Those of a path walk.
    pub fn metadata(&self, path: impl AsRef<Path>) -> Result<Attr> {
        self.inode_at(path.as_ref(), Last::Follow, Inner::attributes)
    }

    /// As [`RamFs::metadata`], but of a symbolic link itself.
    ///
    /// # Errors
    ///
    /// Those of a path walk.
    pub fn symlink_metadata(&self, path: impl AsRef<Path>) -> Result<Attr> {
        self.inode_at(path.as_ref(), Last::Keep, Inner::attributes)
    }

    /// Returns whether a path leads to a file. Errors count as no.
    pub fn exists(&self, path: impl AsRef<Path>) -> bool {
        self.inode_at(path.as_ref(), Last::Follow, |_, inode| Ok(inode)).is_ok()
    }

    /// Changes attributes of the file that a path leads to.
    ///
    /// # Errors
    ///
    /// [`Error::NotPermitted`].
    pub fn set_attributes(&self, path: impl AsRef<Path>, change: &SetAttr) -> Result<Attr> {
        let set = |inner: &Inner, inode| inner.set_attributes(inode, change, false, &self.caller);
        self.inode_at(path.as_ref(), Last::Follow, set)
    }

    /// Sets the permission bits.
    ///
    /// # Errors
    ///
    /// [`Error::NotPermitted`].
    pub fn set_mode(&self, path: impl AsRef<Path>, mode: u32) -> Result<()> {
        self.set_attributes(path, &SetAttr { mode: Some(mode), ..SetAttr::default() }).map(|_| ())
    }

    /// Sets owner and group; with `None` they stay.
    ///
    /// # Errors
    ///
    /// [`Error::NotPermitted`].
    pub fn set_owner(&self, path: impl AsRef<Path>, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        self.set_attributes(path, &SetAttr { uid, gid, ..SetAttr::default() }).map(|_| ())
    }

    /// Checks permissions of the file that a path leads to.
    ///
    /// # Errors
    ///
    /// [`Error::AccessDenied`].
    pub fn access(&self, path: impl AsRef<Path>, access: Access) -> Result<()> {
        self.inode_at(path.as_ref(), Last::Follow, |inner, inode| inner.check_access(inode, access, &self.caller))
    }

    /// Returns the target of a symbolic link.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for another file.
    pub fn read_link(&self, path: impl AsRef<Path>) -> Result<PathBuf> {
        let target = self.inode_at(path.as_ref(), Last::Keep, Inner::read_link)?;
        Ok(PathBuf::from(OsString::from_vec(target)))
    }

    /// Returns the entries of a directory, without `.` and `..`, in no useful order.
    ///
    /// # Errors
    ///
    /// [`Error::NotDirectory`].
    pub fn read_dir(&self, path: impl AsRef<Path>) -> Result<Vec<OwnedDirEntry>> {
        let mut entries = Vec::new();
        self.visit_dir(path, 0, |entry| {
            let name = OsString::from_vec(entry.name.to_vec());
            entries.push(OwnedDirEntry { name, ino: entry.ino, kind: entry.kind, cookie: entry.cookie });
            true
        })?;
        Ok(entries)
    }

    /// Calls `visit` for the entries of a directory behind the cookie `after`, 0 for all, until it returns false.
    /// Allocates nothing. `visit` must not call [`RamFs::shrink`].
    ///
    /// # Errors
    ///
    /// [`Error::NotDirectory`].
    pub fn visit_dir(
        &self,
        path: impl AsRef<Path>,
        after: u64,
        visit: impl FnMut(&DirEntry<'_>) -> bool,
    ) -> Result<()> {
        let path = path.as_ref();
        let directory = self.inode_at(path, Last::Follow, |inner, handle| {
            self.caller.check(&inner.inode(handle)?, Access::READ)?;
            inner.begin_use(handle)
        })?;
        // A directory in use keeps its handle during the listing.
        let visited = self.inner.visit_directory(directory.inode, after, visit);
        self.inner.end_use(directory.ino, 1);
        visited
    }

    /// Returns the contents of a file.
    ///
    /// # Errors
    ///
    /// As [`RamFs::open`].
    pub fn read(&self, path: impl AsRef<Path>) -> Result<Vec<u8>> {
        let file = self.open(path, &OpenOptions::new().read(true))?;
        let mut contents = vec![0; file.size_bytes() as usize];
        let mut len = 0;
        while len < contents.len() {
            match file.read_at(&mut contents[len..], len as u64)? {
                0 => break,
                more => len += more,
            }
        }
        contents.truncate(len);
        Ok(contents)
    }

    /// Writes a file: creates it, or replaces its contents.
    ///
    /// # Errors
    ///
    /// As [`RamFs::open`] and [`File::write_at`]. The file may have a part of the contents after an error.
    pub fn write(&self, path: impl AsRef<Path>, contents: &[u8]) -> Result<()> {
        let file = self.open(path, &OpenOptions::new().write(true).create(true).truncate(true))?;
        let mut at = 0;
        while at < contents.len() {
            at += file.write_at(&contents[at..], at as u64)?;
        }
        Ok(())
    }

    /// Returns the value of an extended attribute.
    ///
    /// # Errors
    ///
    /// [`Error::NoAttribute`], [`Error::Unsupported`] for other namespaces than `user`, `trusted` and `security`.
    pub fn get_xattr(&self, path: impl AsRef<Path>, name: &str) -> Result<Vec<u8>> {
        self.inode_at(path.as_ref(), Last::Follow, |inner, inode| inner.get_xattr(inode, name.as_bytes(), &self.caller))
    }

    /// Sets an extended attribute.
    ///
    /// # Errors
    ///
    /// [`Error::Exists`], [`Error::NoAttribute`], [`Error::AttributeTooLarge`], [`Error::NotPermitted`],
    /// [`Error::NoSpace`] and [`Error::QuotaExceeded`] if the attributes would count as more inodes than are left.
    ///
    /// ```
    /// use pagemill::ramfs::{RamFs, SetXattr};
    ///
    /// let fs = RamFs::new("scratch")?;
    /// fs.write("/file", b"")?;
    /// fs.set_xattr("/file", "user.note", b"draft", SetXattr::Create)?;
    /// assert_eq!(fs.get_xattr("/file", "user.note")?, b"draft");
    /// # Ok::<(), pagemill::ramfs::Error>(())
    /// ```
    pub fn set_xattr(&self, path: impl AsRef<Path>, name: &str, value: &[u8], how: SetXattr) -> Result<()> {
        self.inode_at(path.as_ref(), Last::Follow, |inner, inode| {
            inner.set_xattr(inode, name.as_bytes(), value, how, &self.caller)
        })
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    ///
    /// [`Error::NoAttribute`], [`Error::NotPermitted`].
    pub fn remove_xattr(&self, path: impl AsRef<Path>, name: &str) -> Result<()> {
        let remove = |inner: &Inner, inode| inner.remove_xattr(inode, name.as_bytes(), &self.caller);
        self.inode_at(path.as_ref(), Last::Follow, remove)
    }

    /// Returns the names of the extended attributes that the caller may see.
    ///
    /// # Errors
    ///
    /// Those of a walk.
    pub fn xattr_names(&self, path: impl AsRef<Path>) -> Result<Vec<OsString>> {
        let names = |inner: &Inner, inode| inner.list_xattrs(inode, &self.caller);
        let names = self.inode_at(path.as_ref(), Last::Follow, names)?;
        Ok(names.into_iter().map(OsString::from_vec).collect())
    }

    /// Gives an empty directory a quota, to which everything below it is charged. Quotas may be nested.
    ///
    /// # Errors
    ///
    /// [`Error::NotEmpty`], [`Error::NotPermitted`], [`Error::Busy`] if it has one.
    pub fn set_quota(&self, directory: impl AsRef<Path>, limit: Quota) -> Result<()> {
        let set = |inner: &Inner, inode| inner.set_quota(inode, limit, &self.caller);
        self.inode_at(directory.as_ref(), Last::Follow, set)
    }

    /// Returns limit and use of the innermost quota of a file or directory.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`], also if there is no quota.
    pub fn quota_usage(&self, path: impl AsRef<Path>) -> Result<QuotaUsage> {
        self.inode_at(path.as_ref(), Last::Follow, Inner::quota_usage)
    }

    /// Begins a watch of a file, or of a directory and the names in it. At most `queue` events wait, or one if it
    /// is 0. Then one event ([`crate::EventKind::Overflow`]) says that later ones are lost. Dropping the result ends the
    /// watch.
    ///
    /// # Errors
    ///
    /// Those of a path walk.
    pub fn watch(&self, path: impl AsRef<Path>, queue: usize) -> Result<Watch> {
        let ino =
            self.inode_at(path.as_ref(), Last::Follow, |inner, inode| inner.inode(inode).map(|inode| inode.ino))?;
        Ok(self.inner.watches.add(Some(ino), queue))
    }

    /// Begins a watch of all inodes. At most `queue` events wait, or one if it is 0. Then one event
    /// ([`crate::EventKind::Overflow`]) says that later ones are lost. Dropping the result ends the watch.
    pub fn watch_all(&self, queue: usize) -> Watch {
        self.inner.watches.add(None, queue)
    }
}

/// An entry of a directory, with a name of its own.
///
/// Example: [`DirEntry`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnedDirEntry {
    pub name: OsString,
    pub ino: Ino,
    pub kind: FileType,
    /// As [`DirEntry::cookie`].
    pub cookie: u64,
}
