//! The operations by inode number, for protocols such as FUSE: a client looks a name up, then uses the number of its
//! inode until it forgets the look-up.

use super::create::NewInode;
use super::read_dir::DirEntry;
use super::remove::Remove;
use super::rename::Rename;
use super::walk::Last;
use super::xattr::SetXattr;
use super::{Inner, ROOT_INO, RamFs};
use crate::access::{Access, Caller};
use crate::active::Active;
use crate::error::{Error, Result};
use crate::file::{File, OpenOptions};
use crate::inode::{Attr, FileType, Ino, InodeHandle, SetAttr};
use crate::name;
use pagemill_slab::enter;

/// A name that was looked up: the attributes of its inode. Each entry counts as one look-up, until
/// [`RamFs::forget`].
///
/// Example: [`RamFs::lookup`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    pub attr: Attr,
}

impl Inner {
    /// Returns the handle of an inode in use.
    ///
    /// # Errors
    ///
    /// [`Error::Stale`].
    pub fn handle_of(&self, ino: Ino) -> Result<InodeHandle> {
        if ino == ROOT_INO { Ok(self.root) } else { self.active.handle(ino).ok_or(Error::Stale { ino }) }
    }

    /// Counts a look-up of an inode, and returns its attributes.
    fn entry(&self, inode: InodeHandle) -> Result<Entry> {
        self.entry_of(&*self.begin_use(inode)?)
    }

    /// Returns the entry of a use that has begun; ends the use if that fails.
    fn entry_of(&self, active: &Active) -> Result<Entry> {
        let attr = self.attributes(active.inode).inspect_err(|_| self.end_use(active.ino, 1))?;
        Ok(Entry { attr })
    }

    /// Repeats an operation whose inode got another handle or was freed between its look-up and its use.
    pub fn retry<T>(&self, mut act: impl FnMut() -> Result<T>) -> Result<T> {
        loop {
            match act() {
                Err(Error::Stale { ino: 0 }) => pagemill_core::sync::pause(),
                result => return result,
            }
        }
    }
}

/// Operations by inode number. The root has number 1; other numbers are valid from a look-up until it is forgotten, and
/// while a file is open. Permissions are checked for the caller; `caller.umask` applies to new files. None of them
/// follows symbolic links.
///
/// All may fail with [`Error::Stale`] for a number that is not in use, and with [`Error::NotDirectory`].
impl RamFs {
    /// Looks a name up, also `.` and `..`.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`], [`Error::NameTooLong`], [`Error::AccessDenied`].
    ///
    /// ```
    /// use pagemill::ramfs::{Caller, RamFs};
    ///
    /// let (fs, root) = (RamFs::new("export")?, Caller::root());
    /// let made = fs.mkdir(1, b"dir", 0o755, &root)?;
    /// let found = fs.lookup(1, b"dir", &root)?;
    /// assert_eq!(made.attr.ino, found.attr.ino);
    /// fs.forget(found.attr.ino, 2); // of `mkdir` and `lookup`
    /// assert_eq!(fs.getattr(found.attr.ino).unwrap_err().errno(), 116); // ESTALE
    /// # Ok::<(), pagemill::ramfs::Error>(())
    /// ```
    pub fn lookup(&self, parent: Ino, name: &[u8], caller: &Caller) -> Result<Entry> {
        let inner = &*self.inner;
        inner.retry(|| {
            name::check_length(name)?;
            let handle = inner.handle_of(parent)?;
            let found = {
                let guard = enter();
                let directory = inner.inodes.get(handle, &guard).ok_or(Error::Stale { ino: parent })?;
                if !directory.is_directory() {
                    return Err(Error::NotDirectory);
                }
                caller.check(directory, Access::EXECUTE)?;
                if directory.links == 0 {
                    return Err(Error::NotFound); // a removed directory, whose parent may be gone
                }
                inner.step_or_dots(handle, directory, name, &guard)?.handle()
            };
            match found {
                Ok(found) => inner.entry(found),
                Err(is_known) => {
                    if inner.negatives.limit() > 0 && !is_known {
                        inner.add_negative(handle, name);
                    }
                    Err(Error::NotFound)
                }
            }
        })
    }

    /// Ends `count` look-ups of an inode.
    pub fn forget(&self, ino: Ino, count: u64) {
        if ino != ROOT_INO && count > 0 {
            self.inner.end_use(ino, count);
        }
    }

    /// Returns the attributes of an inode.
    ///
    /// # Errors
    ///
    /// [`Error::Stale`].
    pub fn getattr(&self, ino: Ino) -> Result<Attr> {
        self.inner.attributes(self.inner.handle_of(ino)?)
    }

    /// Changes attributes. `file` is a file through which the length is set, if the client names one.
    ///
    /// # Errors
    ///
    /// [`Error::NotPermitted`], [`Error::AccessDenied`], [`Error::IsDirectory`], [`Error::NoSpace`].
    pub fn setattr(&self, ino: Ino, change: &SetAttr, file: Option<&File>, caller: &Caller) -> Result<Attr> {
        let is_open = file.is_some_and(|file| file.is_of(&self.inner) && file.ino() == ino && file.is_writable());
        self.inner.set_attributes(self.inner.handle_of(ino)?, change, is_open, caller)
    }

    /// Checks permissions of an inode, as `access` does.
    ///
    /// # Errors
    ///
    /// [`Error::AccessDenied`].
    pub fn check_access(&self, ino: Ino, access: Access, caller: &Caller) -> Result<()> {
        self.inner.check_access(self.inner.handle_of(ino)?, access, caller)
    }

    /// Creates a regular file, pipe, socket or device; `mode` has the type. `device` is the number of a device.
    ///
    /// # Errors
    ///
    /// [`Error::Exists`], [`Error::AccessDenied`], [`Error::NoSpace`]; [`Error::Invalid`] for another type,
    /// [`Error::NotPermitted`] for a device of an unprivileged caller.
    pub fn mknod(&self, parent: Ino, name: &[u8], mode: u32, device: u64, caller: &Caller) -> Result<Entry> {
        let new = match FileType::of_mode(mode) {
            _ if mode & libc::S_IFMT == 0 => NewInode::Regular,
            Some(FileType::Regular) => NewInode::Regular,
            Some(kind @ (FileType::Fifo | FileType::Socket)) => NewInode::Special { kind, device: 0 },
            Some(kind @ (FileType::CharDevice | FileType::BlockDevice)) if caller.is_privileged() => {
                NewInode::Special { kind, device }
            }
            Some(FileType::CharDevice | FileType::BlockDevice) => {
                return Err(Error::NotPermitted { what: "only a privileged caller may create devices" });
            }
            _ => return Err(Error::Invalid { what: "a type that `mknod` does not create" }),
        };
        self.make_entry(parent, name, new, mode, caller)
    }

    fn make_entry(&self, parent: Ino, name: &[u8], new: NewInode<'_>, mode: u32, caller: &Caller) -> Result<Entry> {
        let inner = &*self.inner;
        let begin = |ino, inode| inner.active.begin_new(ino, inode);
        inner.entry_of(&*inner.make(inner.handle_of(parent)?, name, new, mode, caller, begin)?)
    }

    /// Creates a directory.
    ///
    /// # Errors
    ///
    /// [`Error::Exists`], [`Error::AccessDenied`], [`Error::NoSpace`].
    pub fn mkdir(&self, parent: Ino, name: &[u8], mode: u32, caller: &Caller) -> Result<Entry> {
        self.make_entry(parent, name, NewInode::Directory, mode, caller)
    }

    /// Creates a symbolic link to `target`.
    ///
    /// # Errors
    ///
    /// As [`RamFs::mkdir`]; [`Error::PathTooLong`], [`Error::NotFound`] for an empty target.
    pub fn mksymlink(&self, parent: Ino, name: &[u8], target: &[u8], caller: &Caller) -> Result<Entry> {
        self.make_entry(parent, name, NewInode::Symlink { target }, 0o777, caller)
    }

    /// Gives an inode a further name.
    ///
    /// # Errors
    ///
    /// [`Error::Exists`], [`Error::NotPermitted`] for a directory, [`Error::OtherQuota`], [`Error::TooManyLinks`].
    pub fn link(&self, ino: Ino, parent: Ino, name: &[u8], caller: &Caller) -> Result<Entry> {
        let inner = &*self.inner;
        let handle = inner.handle_of(ino)?;
        inner.link(handle, inner.handle_of(parent)?, name, caller)?;
        inner.entry(handle)
    }

    /// Removes the name of a file. The file exists until its last use ends.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`], [`Error::IsDirectory`], [`Error::AccessDenied`].
    pub fn unlink(&self, parent: Ino, name: &[u8], caller: &Caller) -> Result<()> {
        let inner = &*self.inner;
        inner.retry(|| inner.remove(inner.handle_of(parent)?, name, Remove::File, caller))
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`], [`Error::NotDirectory`], [`Error::NotEmpty`], [`Error::AccessDenied`].
    pub fn rmdir(&self, parent: Ino, name: &[u8], caller: &Caller) -> Result<()> {
        let inner = &*self.inner;
        inner.retry(|| inner.remove(inner.handle_of(parent)?, name, Remove::Directory, caller))
    }

    /// Renames an entry.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`], [`Error::Exists`], [`Error::NotEmpty`], [`Error::IsDirectory`], [`Error::NotDirectory`],
    /// [`Error::Invalid`] into itself, [`Error::OtherQuota`], [`Error::AccessDenied`].
    pub fn rename_entry(&self, from: (Ino, &[u8]), to: (Ino, &[u8]), how: Rename, caller: &Caller) -> Result<()> {
        let inner = &*self.inner;
        inner.retry(|| inner.rename((inner.handle_of(from.0)?, from.1), (inner.handle_of(to.0)?, to.1), how, caller))
    }

    /// Returns the target of a symbolic link.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for another inode.
    pub fn readlink(&self, ino: Ino) -> Result<Vec<u8>> {
        self.inner.read_link(self.inner.handle_of(ino)?)
    }

    /// Opens a regular file. Devices, pipes and sockets cannot be opened.
    ///
    /// # Errors
    ///
    /// [`Error::AccessDenied`], [`Error::IsDirectory`], [`Error::LinkLoop`] for a symbolic link.
    pub fn open_ino(&self, ino: Ino, options: &OpenOptions, caller: &Caller) -> Result<File> {
        File::open(&self.inner, self.inner.handle_of(ino)?, options, caller)
    }

    /// Creates a regular file and opens it. The permission bits do not restrict this open.
    ///
    /// # Errors
    ///
    /// As [`RamFs::mknod`].
    pub fn create(
        &self,
        parent: Ino,
        name: &[u8],
        mode: u32,
        options: &OpenOptions,
        caller: &Caller,
    ) -> Result<(Entry, File)> {
        let entry = self.make_entry(parent, name, NewInode::Regular, mode, caller)?;
        let active = self.inner.begin_use(self.inner.handle_of(entry.attr.ino)?);
        let active = active.inspect_err(|_| self.forget(entry.attr.ino, 1))?;
        Ok((entry, File::of(&self.inner, active, options, caller)))
    }

    /// Creates an open regular file without a name (`O_TMPFILE`). [`RamFs::link`] may give it one.
    ///
    /// # Errors
    ///
    /// [`Error::AccessDenied`], [`Error::NoSpace`].
    pub fn tmpfile(&self, parent: Ino, mode: u32, options: &OpenOptions, caller: &Caller) -> Result<File> {
        let active = self.inner.make_nameless(self.inner.handle_of(parent)?, mode, caller)?;
        Ok(File::of(&self.inner, active, options, caller))
    }

    /// Calls `visit` for the entries of a directory behind the cookie `after`, 0 for all, until it returns false. The
    /// entries `.` and `..` are not included; their numbers are `ino` and [`RamFs::parent_of`].
    ///
    /// # Errors
    ///
    /// [`Error::NotDirectory`].
    pub fn readdir(&self, ino: Ino, after: u64, visit: impl FnMut(&DirEntry<'_>) -> bool) -> Result<()> {
        self.inner.visit_directory(self.inner.handle_of(ino)?, after, visit)
    }

    /// Returns the number of the directory above a directory.
    ///
    /// # Errors
    ///
    /// [`Error::NotDirectory`].
    pub fn parent_of(&self, ino: Ino) -> Result<Ino> {
        let inner = &*self.inner;
        inner.retry(|| {
            let directory = inner.inode(inner.handle_of(ino)?)?;
            if !directory.is_directory() {
                return Err(Error::NotDirectory);
            }
            // The parent of a removed directory may be gone.
            if directory.links == 0 { Ok(ino) } else { inner.inode(directory.parent()).map(|parent| parent.ino) }
        })
    }

    /// Returns the value of an extended attribute.
    ///
    /// # Errors
    ///
    /// [`Error::NoAttribute`], [`Error::Unsupported`] for other namespaces than `user`, `trusted` and `security`.
    pub fn getxattr(&self, ino: Ino, name: &[u8], caller: &Caller) -> Result<Vec<u8>> {
        self.inner.get_xattr(self.inner.handle_of(ino)?, name, caller)
    }

    /// Returns the names of the extended attributes.
    ///
    /// # Errors
    ///
    /// [`Error::Stale`].
    pub fn listxattr(&self, ino: Ino, caller: &Caller) -> Result<Vec<Vec<u8>>> {
        self.inner.list_xattrs(self.inner.handle_of(ino)?, caller)
    }

    /// Sets an extended attribute.
    ///
    /// # Errors
    ///
    /// [`Error::Exists`], [`Error::NoAttribute`], [`Error::AttributeTooLarge`], [`Error::NotPermitted`],
    /// [`Error::AccessDenied`], [`Error::Unsupported`].
    pub fn setxattr(&self, ino: Ino, name: &[u8], value: &[u8], how: SetXattr, caller: &Caller) -> Result<()> {
        self.inner.set_xattr(self.inner.handle_of(ino)?, name, value, how, caller)
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    ///
    /// As [`RamFs::setxattr`].
    pub fn removexattr(&self, ino: Ino, name: &[u8], caller: &Caller) -> Result<()> {
        self.inner.remove_xattr(self.inner.handle_of(ino)?, name, caller)
    }

    /// Returns the number of the inode that a path leads to, and counts a look-up of it.
    ///
    /// # Errors
    ///
    /// Those of a path walk.
    pub fn lookup_path(&self, path: impl AsRef<std::path::Path>) -> Result<Entry> {
        let path = crate::paths::bytes(path.as_ref());
        self.inner.retry(|| self.inner.entry(self.inner.walk(path, &self.caller, Last::Follow)?.found()?))
    }
}
