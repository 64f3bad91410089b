//! New inodes and new names: files, directories, links.

use super::Inner;
use super::names::Located;
use super::volatile::LINKABLE;
use crate::access::{Access, Caller};
use crate::active::Active;
use crate::error::{Error, Result};
use crate::inode::{FileType, Ino, Inode, InodeHandle, MAX_LINKS};
use crate::name;
use crate::watch::EventKind;
use pagemill_slab::Handle;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Maximum length of the target of a symbolic link in bytes.
const MAX_TARGET_BYTES: usize = 4095;

/// What a new inode is.
#[derive(Clone, Copy)]
pub(crate) enum NewInode<'a> {
    Regular,
    Directory,
    Symlink {
        target: &'a [u8],
    },
    /// Pipe, socket or device.
    Special {
        kind: FileType,
        device: u64,
    },
}

impl NewInode<'_> {
    fn kind(&self) -> FileType {
        match self {
            Self::Regular => FileType::Regular,
            Self::Directory => FileType::Directory,
            Self::Symlink { .. } => FileType::Symlink,
            Self::Special { kind, .. } => *kind,
        }
    }
}

impl Inner {
    /// Checks whether a caller may add a name to a directory. Returns the negative dentry of the name, if there is one.
    ///
    /// # Errors
    ///
    /// [`Error::Exists`], and those of names and permissions.
    fn check_new_name(&self, directory: &Inode, name: &[u8], caller: &Caller) -> Result<Option<Located>> {
        name::check_length(name)?;
        caller.check(directory, Access::EXECUTE)?;
        let located = self.locate(directory, name);
        if located.is_some_and(|located| located.inode.is_some()) {
            return Err(Error::Exists);
        }
        name::check(name)?;
        caller.check(directory, Access::WRITE)?;
        Ok(located)
    }

    /// Creates an inode with a name, and calls `then` before other threads can find it. The umask of the caller applies.
    ///
    /// # Errors
    ///
    /// [`Error::Exists`], and those of names, permissions and space.
    pub fn make<T>(
        &self,
        directory: InodeHandle,
        name: &[u8],
        new: NewInode<'_>,
        mode: u32,
        caller: &Caller,
        then: impl FnOnce(Ino, InodeHandle) -> T,
    ) -> Result<T> {
        let ino = self.inode(directory)?.ino;
        let _locked = self.locks.lock([ino]);
        let parent = self.directory(directory)?;
        let located = self.check_new_name(&parent, name, caller)?;
        let is_directory = matches!(new, NewInode::Directory);
        if is_directory && parent.links >= MAX_LINKS {
            return Err(Error::TooManyLinks { links: parent.links });
        }
        let (ino, inode) = self.new_inode((directory, &parent), new, mode, caller)?;
        let prepared = self.prepare_name((directory, &parent), name, located, inode).and_then(|prepared| {
            self.touch_directory(directory, &parent, i32::from(is_directory))?;
            Ok(prepared)
        });
        let prepared = prepared.inspect_err(|_| self.free_if_unused(ino, inode))?;
        let result = then(ino, inode);
        self.publish_name(prepared);
        self.watches.notify(EventKind::Created, parent.ino, name);
        Ok(result)
    }

    /// Creates a regular file without a name, which is in use.
    pub fn make_nameless(&self, directory: InodeHandle, mode: u32, caller: &Caller) -> Result<Arc<Active>> {
        let parent = self.directory(directory)?;
        caller.check(&parent, Access::CHANGE)?;
        let (ino, inode) = self.new_inode((directory, &parent), NewInode::Regular, mode, caller)?;
        let nameless = self.update_inode(inode, |old| Inode { links: 0, parent: LINKABLE, ..*old });
        nameless.inspect_err(|_| self.free_if_unused(ino, inode))?;
        Ok(self.active.begin_new(ino, inode))
    }

    /// Creates an inode without a name, and charges it.
    fn new_inode(
        &self,
        parent: (InodeHandle, &Inode),
        new: NewInode<'_>,
        mode: u32,
        caller: &Caller,
    ) -> Result<(Ino, InodeHandle)> {
        let (kind, now_ns) = (new.kind(), self.clock.now_ns());
        let (parent_handle, parent) = parent;
        let mut mode = mode & 0o7777 & !caller.umask;
        let mut gid = caller.gid;
        if parent.mode & libc::S_ISGID != 0 {
            gid = parent.gid;
            if kind == FileType::Directory {
                mode |= libc::S_ISGID;
            } else if mode & libc::S_ISGID != 0 && !caller.is_privileged() && !caller.is_in_group(gid) {
                mode &= !(if mode & libc::S_IXGRP != 0 { libc::S_ISGID } else { 0 });
            }
        }
        let data = match new {
            NewInode::Symlink { target: b"" } => return Err(Error::NotFound),
            NewInode::Symlink { target } if target.len() > MAX_TARGET_BYTES => {
                return Err(Error::PathTooLong { len_bytes: target.len(), most_bytes: MAX_TARGET_BYTES });
            }
            NewInode::Symlink { target } => self.texts.insert(Arc::from(target))?.to_bits(),
            NewInode::Special { device, .. } => device,
            NewInode::Regular | NewInode::Directory => 0,
        };
        let inode = Inode {
            ino: self.next_ino.fetch_add(1, Relaxed),
            data,
            parent: if kind == FileType::Directory { parent_handle.to_bits() } else { 0 },
            xattrs: 0,
            accessed_ns: now_ns,
            modified_ns: now_ns,
            changed_ns: now_ns,
            created_ns: now_ns,
            mode: kind.mode_bits() | if kind == FileType::Symlink { 0o777 } else { mode },
            uid: caller.uid,
            gid,
            links: if kind == FileType::Directory { 2 } else { 1 },
            quota: parent.quota,
        };
        let count = self.inode_charge(&inode);
        let made = self.charge_inodes(&inode, count).and_then(|()| {
            self.inodes.insert(inode).map_err(Error::from).inspect_err(|_| self.discharge_inodes(&inode, count))
        });
        let made = made.inspect_err(|_| {
            if kind == FileType::Symlink {
                let _ = self.texts.remove(Handle::from_bits(data));
            }
        })?;
        Ok((inode.ino, made))
    }

    /// Gives an inode a further name.
    ///
    /// # Errors
    ///
    /// [`Error::Exists`], [`Error::NotPermitted`] for a directory, [`Error::OtherQuota`], [`Error::TooManyLinks`];
    /// [`Error::NotFound`] for a removed file.
    pub fn link(&self, handle: InodeHandle, directory: InodeHandle, name: &[u8], caller: &Caller) -> Result<()> {
        let [ino, parent_ino] = [self.inode(handle)?.ino, self.inode(directory)?.ino];
        let _locked = self.locks.lock([ino, parent_ino]);
        let (inode, parent) = (self.inode(handle)?, self.directory(directory)?);
        let located = self.check_new_name(&parent, name, caller)?;
        if inode.is_directory() {
            return Err(Error::NotPermitted { what: "directories have one name" });
        }
        if inode.links == 0 && inode.parent & LINKABLE == 0 {
            return Err(Error::NotFound);
        }
        if inode.links >= MAX_LINKS {
            return Err(Error::TooManyLinks { links: inode.links });
        }
        if inode.quota != parent.quota {
            return Err(Error::OtherQuota);
        }
        // The first name is charged with the inode.
        let charge = u64::from(inode.links > 0);
        self.charge_inodes(&inode, charge)?;
        let prepared = self.prepare_name((directory, &parent), name, located, handle).and_then(|prepared| {
            self.touch_directory(directory, &parent, 0)?;
            let now_ns = self.clock.now_ns();
            self.update_inode(handle, |old| Inode {
                links: old.links + 1,
                parent: old.parent & !LINKABLE,
                changed_ns: now_ns,
                ..*old
            })?;
            Ok(prepared)
        });
        self.publish_name(prepared.inspect_err(|_| self.discharge_inodes(&inode, charge))?);
        self.watches.notify(EventKind::Created, parent.ino, name);
        Ok(())
    }
}
