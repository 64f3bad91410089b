//! The rights of a caller: user, groups, and the checks of permission bits.

use crate::error::{Error, Result};
use crate::inode::Inode;
use std::sync::Arc;

/// Permissions that an operation needs: read (4), write (2), execute or search (1).
///
/// Example: [`Caller`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access(pub u32);

impl Access {
    /// Only that the object exists (`F_OK`).
    pub const EXISTS: Self = Self(0);
    pub const EXECUTE: Self = Self(1);
    pub const WRITE: Self = Self(2);
    /// Change of the entries of a directory.
    pub const CHANGE: Self = Self(3);
    pub const READ: Self = Self(4);
}

/// The user for which an operation runs. User 0 is privileged: it passes every check of permissions, except that
/// executing a file needs one of its execute bits.
///
/// ```
/// use pagemill::ramfs::{Access, Caller, RamFs};
///
/// let fs = RamFs::new("homes")?;
/// fs.create_dir("/users")?; // as user 0, with mode 0755
/// let user = fs.as_caller(Caller::new(1000, 1000));
/// assert_eq!(user.create_dir("/users/me").unwrap_err().errno(), 13); // EACCES
/// fs.set_owner("/users", Some(1000), Some(1000))?;
/// user.create_dir("/users/me")?;
/// user.access("/users/me", Access::WRITE)?;
/// # Ok::<(), pagemill::ramfs::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Caller {
    pub uid: u32,
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Arc<[u32]>,
    /// Permission bits that new files and directories do not get.
    pub umask: u32,
    /// Another component has checked the permissions, such as the kernel for FUSE: the operation checks none of them.
    pub is_checked: bool,
}

impl Caller {
    /// Returns the privileged caller, with umask 022.
    pub fn root() -> Self {
        Self::new(0, 0)
    }

    /// Returns a caller without supplementary groups, with umask 022.
    pub fn new(uid: u32, gid: u32) -> Self {
        Self { uid, gid, groups: Arc::from([]), umask: 0o022, is_checked: false }
    }

    /// Sets the supplementary groups.
    #[must_use]
    pub fn groups(self, groups: &[u32]) -> Self {
        Self { groups: Arc::from(groups), ..self }
    }

    /// Sets the umask.
    #[must_use]
    pub fn umask(self, umask: u32) -> Self {
        Self { umask: umask & 0o777, ..self }
    }

    /// Sets that another component has checked the permissions. New files still belong to the caller's user, and a
    /// write still clears the set-user-ID bit unless the user is 0.
    #[must_use]
    pub fn checked(self) -> Self {
        Self { is_checked: true, ..self }
    }

    /// Returns whether the caller passes every check of permissions.
    #[inline]
    pub fn is_privileged(&self) -> bool {
        self.uid == 0 || self.is_checked
    }

    /// Returns whether the set-user-ID and set-group-ID bits of a file stay when the caller changes its data.
    pub(crate) fn keeps_set_id(&self) -> bool {
        self.uid == 0
    }

    pub fn is_in_group(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.contains(&gid)
    }

    pub(crate) fn is_owner_of(&self, inode: &Inode) -> bool {
        self.uid == inode.uid || self.is_privileged()
    }

    /// Checks that the permission bits of an inode grant `access`.
    #[inline]
    pub(crate) fn check(&self, inode: &Inode, access: Access) -> Result<()> {
        if self.is_checked {
            return Ok(());
        }
        if self.is_privileged() {
            let is_granted = access.0 & 1 == 0 || inode.is_directory() || inode.mode & 0o111 != 0;
            return if is_granted { Ok(()) } else { Err(denied(inode, access)) };
        }
        let shift = if inode.uid == self.uid {
            6
        } else if self.is_in_group(inode.gid) {
            3
        } else {
            0
        };
        if inode.mode >> shift & access.0 == access.0 { Ok(()) } else { Err(denied(inode, access)) }
    }

    /// Checks that the sticky bit of a directory permits removing or renaming an entry.
    pub(crate) fn check_sticky(&self, directory: &Inode, entry: &Inode) -> Result<()> {
        let is_free = directory.mode & libc::S_ISVTX == 0 || self.is_owner_of(entry) || self.uid == directory.uid;
        if is_free { Ok(()) } else { Err(Error::NotPermitted { what: "the directory is sticky" }) }
    }

    pub(crate) fn check_owner(&self, inode: &Inode) -> Result<()> {
        if self.is_owner_of(inode) { Ok(()) } else { Err(Error::NotPermitted { what: "only the owner may do this" }) }
    }
}

#[cold]
fn denied(inode: &Inode, access: Access) -> Error {
    Error::AccessDenied { wanted: access.0, mode: inode.mode }
}
