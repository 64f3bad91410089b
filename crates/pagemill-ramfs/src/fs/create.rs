//! New inodes and new names: files, directories, links.

use super::volatile::LINKABLE;
use super::{Inner, STALE};
use crate::access::{Access, Caller};
use crate::active::Active;
use crate::error::{Error, Result};
use crate::inode::{FileType, Inode, InodeHandle, MAX_LINKS};
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
    /// Creates an inode with a name. The umask of the caller applies.
    ///
    /// # Errors
    ///
    /// [`Error::Exists`], and those of names, permissions and space.
    pub fn make(
        &self,
        directory: InodeHandle,
        name: &[u8],
        new: NewInode<'_>,
        mode: u32,
        caller: &Caller,
    ) -> Result<InodeHandle> {
        let ino = self.inode(directory)?.ino;
        let _locked = self.locks.lock([ino]);
        let parent = self.directory(directory)?;
        name::check_length(name)?;
        caller.check(&parent, Access::EXECUTE)?;
        let located = self.locate(&parent, name);
        if located.is_some_and(|located| located.inode.is_some()) {
            return Err(Error::Exists);
        }
        name::check(name)?;
        caller.check(&parent, Access::WRITE)?;
        let is_directory = matches!(new, NewInode::Directory);
        if is_directory && parent.links >= MAX_LINKS {
            return Err(Error::TooManyLinks { links: parent.links });
        }
        let inode = self.new_inode((directory, &parent), new, mode, caller)?;
        let named = self.prepare_name((directory, &parent), name, located, inode);
        let named = named.and_then(|prepared| {
            self.touch_directory(directory, &parent, i32::from(is_directory))?;
            self.publish_name(prepared);
            Ok(())
        });
        if let Err(error) = named {
            self.drop_new_inode(inode);
            return Err(error);
        }
        self.watches.notify(EventKind::Created, parent.ino, name);
        Ok(inode)
    }

    /// Creates a regular file without a name, which is in use.
    pub fn make_nameless(&self, directory: InodeHandle, mode: u32, caller: &Caller) -> Result<Arc<Active>> {
        let parent = self.directory(directory)?;
        caller.check(&parent, Access::CHANGE)?;
        let handle = self.new_inode((directory, &parent), NewInode::Regular, mode, caller)?;
        let nameless = self.update_inode(handle, |old| Inode { links: 0, parent: LINKABLE, ..*old });
        let used = nameless.and_then(|()| {
            let inode = self.inode(handle)?;
            self.active.begin(inode.ino, handle, || Some(None)).ok_or(STALE)
        });
        used.inspect_err(|_| self.drop_new_inode(handle))
    }

    /// Creates an inode without a name, and charges it.
    fn new_inode(
        &self,
        parent: (InodeHandle, &Inode),
        new: NewInode<'_>,
        mode: u32,
        caller: &Caller,
    ) -> Result<InodeHandle> {
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
        let made = self.charge_inode(parent.quota).and_then(|()| {
            self.inodes.insert(inode).map_err(Error::from).inspect_err(|_| self.discharge_inode(&inode))
        });
        made.inspect_err(|_| {
            if kind == FileType::Symlink {
                let _ = self.texts.remove(Handle::from_bits(data));
            }
        })
    }

    /// Frees an inode whose creation failed.
    fn drop_new_inode(&self, handle: InodeHandle) {
        if let Ok(inode) = self.inode(handle) {
            self.free_if_unused(inode.ino, handle);
        }
    }

    fn charge_inode(&self, quota: u32) -> Result<()> {
        self.whole.charge_inode().map_err(|error| match error {
            Error::QuotaExceeded { what, used, limit } => Error::NoSpace { what, used, limit },
            error => error,
        })?;
        let charged = self.domains.get(quota).map_or(Ok(()), |domain| domain.charge_inode());
        charged.inspect_err(|_| self.whole.discharge_inode())
    }

    /// Ends the charge of an inode that was freed. The root of a quota is charged to the directory above.
    pub(super) fn discharge_inode(&self, inode: &Inode) {
        self.whole.discharge_inode();
        if let Some(domain) = self.domains.get(inode.quota) {
            if domain.is_root(inode.ino) {
                domain.parent().iter().for_each(|parent| parent.discharge_inode());
                self.domains.remove(inode.quota);
            } else {
                domain.discharge_inode();
            }
        }
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
        name::check_length(name)?;
        caller.check(&parent, Access::EXECUTE)?;
        let located = self.locate(&parent, name);
        if located.is_some_and(|located| located.inode.is_some()) {
            return Err(Error::Exists);
        }
        name::check(name)?;
        caller.check(&parent, Access::WRITE)?;
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
        let prepared = self.prepare_name((directory, &parent), name, located, handle)?;
        self.touch_directory(directory, &parent, 0)?;
        let now_ns = self.clock.now_ns();
        self.update_inode(handle, |old| Inode {
            links: old.links + 1,
            parent: old.parent & !LINKABLE,
            changed_ns: now_ns,
            ..*old
        })?;
        self.publish_name(prepared);
        self.watches.notify(EventKind::Created, parent.ino, name);
        Ok(())
    }
}
