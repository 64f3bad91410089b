//! Attributes of inodes.

use super::Inner;
use crate::access::{Access, Caller};
use crate::error::{Error, Result};
use crate::file_data::FileData;
use crate::inode::{Attr, ENTRY_BYTES, Inode, InodeHandle, SetAttr};
use crate::quota::{Domain, Quota, QuotaUsage};
use crate::watch::EventKind;
use pagemill_slab::{Guard, Handle, enter};
use std::sync::Arc;

impl Inner {
    /// Returns the attributes of an inode, all of the same moment but for the length of a file that is being written.
    pub fn attributes(&self, handle: InodeHandle) -> Result<Attr> {
        let guard = enter();
        let inode = self.inodes.get(handle, &guard).ok_or(super::STALE)?;
        Ok(self.attributes_of(inode, &guard))
    }

    pub(super) fn attributes_of(&self, inode: &Inode, guard: &Guard) -> Attr {
        let page_bytes = self.page_bytes();
        let (size_bytes, allocated_bytes) = if inode.is_directory() {
            ((self.entry_count(inode) + 2) * ENTRY_BYTES, 0)
        } else if inode.is_symlink() {
            (self.texts.get(Handle::from_bits(inode.data), guard).map_or(0, |target| target.len() as u64), 0)
        } else if inode.is_regular() && inode.data != 0 {
            let data: Option<&Arc<FileData>> = self.files.get(Handle::from_bits(inode.data), guard);
            data.map_or((0, 0), |data| (data.mapping.size_bytes(), data.allocated_bytes(page_bytes)))
        } else {
            (0, 0)
        };
        let is_device = !(inode.is_directory() || inode.is_symlink() || inode.is_regular());
        Attr {
            ino: inode.ino,
            kind: inode.kind(),
            mode: inode.mode & 0o7777,
            links: inode.links,
            uid: inode.uid,
            gid: inode.gid,
            device: if is_device { inode.data } else { 0 },
            size_bytes,
            allocated_bytes,
            page_bytes: page_bytes as u32,
            accessed_ns: inode.accessed_ns,
            modified_ns: inode.modified_ns,
            changed_ns: inode.changed_ns,
            created_ns: inode.created_ns,
        }
    }

    /// Changes attributes. `is_open` tells that the length is changed through a file that is open for writing.
    ///
    /// # Errors
    ///
    /// [`Error::NotPermitted`], [`Error::AccessDenied`], [`Error::IsDirectory`] or [`Error::Invalid`] for a length of
    /// an object that is no regular file, and those of space.
    pub fn set_attributes(
        &self,
        handle: InodeHandle,
        change: &SetAttr,
        is_open: bool,
        caller: &Caller,
    ) -> Result<Attr> {
        let inode = self.inode(handle)?;
        change.check(&inode, caller)?;
        if let Some(size_bytes) = change.size_bytes {
            if inode.is_directory() {
                return Err(Error::IsDirectory);
            } else if !inode.is_regular() {
                return Err(Error::Invalid { what: "the length of an object that is no regular file" });
            } else if !is_open {
                caller.check(&inode, Access::WRITE)?;
            }
            let active = self.begin_use(handle)?;
            let done = self.truncate(&active, size_bytes, caller.keeps_set_id());
            self.end_use(active.ino, 1);
            done?;
        }
        let is_other_change = SetAttr { size_bytes: None, ..*change }.is_any();
        if is_other_change {
            let _locked = self.locks.lock([inode.ino]);
            change.check(&self.inode(handle)?, caller)?;
            let now_ns = self.clock.now_ns();
            self.update_inode(handle, |old| change.apply(old, now_ns, caller))?;
            self.watches.notify(EventKind::Attributes, inode.ino, b"");
        }
        self.attributes(handle)
    }

    pub fn check_access(&self, handle: InodeHandle, access: Access, caller: &Caller) -> Result<()> {
        caller.check(&self.inode(handle)?, access)
    }

    /// Returns the target of a symbolic link.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for another inode.
    pub fn read_link(&self, handle: InodeHandle) -> Result<Vec<u8>> {
        let guard = enter();
        let inode = self.inodes.get(handle, &guard).ok_or(super::STALE)?;
        if !inode.is_symlink() {
            return Err(Error::Invalid { what: "the target of an object that is no symbolic link" });
        }
        self.texts.get(Handle::from_bits(inode.data), &guard).map(|target| target.to_vec()).ok_or(super::STALE)
    }

    /// Gives an empty directory a quota, which all inodes below it are charged to.
    ///
    /// # Errors
    ///
    /// [`Error::NotEmpty`], [`Error::NotDirectory`], [`Error::Busy`] if the directory has a quota of its own.
    pub fn set_quota(&self, handle: InodeHandle, limit: Quota, caller: &Caller) -> Result<()> {
        if !caller.is_privileged() {
            return Err(Error::NotPermitted { what: "only a privileged caller may set a quota" });
        }
        let ino = self.directory(handle)?.ino;
        let _locked = self.locks.lock([ino]);
        let inode = self.directory(handle)?;
        self.check_removable(&inode, super::remove::Remove::Directory)?;
        let above = self.domains.get(inode.quota);
        if handle == self.root || above.as_ref().is_some_and(|domain| domain.is_root(ino)) {
            return Err(Error::Busy { what: "the directory's quota" });
        }
        let number = self.domains.add(Arc::new(Domain::new(limit, ino, above)));
        let updated = self.update_inode(handle, |old| Inode { quota: number, ..*old });
        updated.inspect_err(|_| self.domains.end(number))
    }

    /// Returns limit and use of the quota of a directory.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`] if neither the directory nor one above it has a quota.
    pub fn quota_usage(&self, handle: InodeHandle) -> Result<QuotaUsage> {
        let quota = self.inode(handle)?.quota;
        self.domains.get(quota).map(|domain| domain.usage()).ok_or(Error::NotFound)
    }
}
