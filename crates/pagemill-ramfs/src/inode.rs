//! Inodes: the attributes of files and directories, as values of a slab cache.

use crate::access::Caller;
use crate::error::Result;
use pagemill_slab::{Handle, Movable};
use std::fmt;

/// Number of an inode: stable while the file exists, never used again in the same file system. The root has number 1.
///
/// Example: [`crate::RamFs::lookup`].
pub type Ino = u64;

/// Handle of an inode. It may change while the inode is not in use ([`crate::RamFs::shrink`]).
pub(crate) type InodeHandle = Handle<Inode>;

/// Maximum number of names of a file.
pub(crate) const MAX_LINKS: u32 = 1 << 31;

const TYPE_MASK: u32 = libc::S_IFMT;
/// Size that a directory reports for each entry, with `.` and `..`, as in tmpfs.
pub(crate) const ENTRY_BYTES: u64 = 20;

/// The kind of a file.
///
/// ```
/// use pagemill::ramfs::{FileType, RamFs};
///
/// let fs = RamFs::new("kinds")?;
/// fs.symlink("/target", "/link")?;
/// assert_eq!(fs.symlink_metadata("/link")?.kind, FileType::Symlink);
/// # Ok::<(), pagemill::ramfs::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FileType {
    Fifo = libc::DT_FIFO,
    CharDevice = libc::DT_CHR,
    Directory = libc::DT_DIR,
    BlockDevice = libc::DT_BLK,
    Regular = libc::DT_REG,
    Symlink = libc::DT_LNK,
    Socket = libc::DT_SOCK,
}

impl FileType {
    /// Returns the type that the mode of an inode contains.
    pub fn of_mode(mode: u32) -> Option<Self> {
        Some(match mode & TYPE_MASK {
            libc::S_IFIFO => Self::Fifo,
            libc::S_IFCHR => Self::CharDevice,
            libc::S_IFDIR => Self::Directory,
            libc::S_IFBLK => Self::BlockDevice,
            libc::S_IFREG => Self::Regular,
            libc::S_IFLNK => Self::Symlink,
            libc::S_IFSOCK => Self::Socket,
            _ => return None,
        })
    }

    /// Returns the bits of the type in a mode.
    pub fn mode_bits(self) -> u32 {
        u32::from(self as u8) << 12
    }
}

/// An inode. It refers to other objects by handle only, so a copy of its bytes is a valid inode.
#[derive(Clone, Copy, Movable)]
pub(crate) struct Inode {
    pub ino: Ino,
    /// Directory: handle of its child index, 0 while it has never had an entry. Regular file: handle of its data, 0
    /// while it has none. Symbolic link: handle of its target. Device: its number.
    pub data: u64,
    /// Directory: handle of its parent's inode. The root is its own parent. Regular file: flags (`fs::volatile`).
    pub parent: u64,
    /// Handle of the extended attributes; 0 if there are none.
    pub xattrs: u64,
    pub accessed_ns: i64,
    pub modified_ns: i64,
    pub changed_ns: i64,
    pub created_ns: i64,
    /// Type and permission bits.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// Number of names; for a directory also the `..` of each subdirectory and its own `.`.
    pub links: u32,
    /// Number of the quota to which the inode is charged; 0 for none.
    pub quota: u32,
}

impl Inode {
    #[inline]
    pub fn is_directory(&self) -> bool {
        self.mode & TYPE_MASK == libc::S_IFDIR
    }

    #[inline]
    pub fn is_symlink(&self) -> bool {
        self.mode & TYPE_MASK == libc::S_IFLNK
    }

    pub fn is_regular(&self) -> bool {
        self.mode & TYPE_MASK == libc::S_IFREG
    }

    pub fn kind(&self) -> FileType {
        FileType::of_mode(self.mode).expect("the type of an inode is checked when it is created")
    }

    pub fn parent(&self) -> InodeHandle {
        Handle::from_bits(self.parent)
    }

    /// Returns the mode after a write or a change of owner by an unprivileged caller: without the set-user-ID bit, and
    /// without the set-group-ID bit of an executable file.
    pub fn mode_without_set_id(&self) -> u32 {
        let set_gid = if self.mode & libc::S_IXGRP != 0 { libc::S_ISGID } else { 0 };
        self.mode & !(libc::S_ISUID | set_gid)
    }
}

/// The attributes of a file.
///
/// ```
/// use pagemill::ramfs::RamFs;
///
/// let fs = RamFs::new("scratch")?;
/// fs.write("/file", b"hello")?;
/// let attr = fs.metadata("/file")?;
/// assert_eq!((attr.size_bytes, attr.links, attr.mode), (5, 1, 0o644));
/// # Ok::<(), pagemill::ramfs::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attr {
    pub ino: Ino,
    pub kind: FileType,
    /// Permission bits, with set-user-ID, set-group-ID and sticky bit.
    pub mode: u32,
    pub links: u32,
    pub uid: u32,
    pub gid: u32,
    /// Device number of a device file.
    pub device: u64,
    /// Length of a file or of the target of a symbolic link. A directory has 20 bytes for each entry, with `.` and `..`,
    /// as in tmpfs.
    pub size_bytes: u64,
    /// Memory of a regular file's data in whole pages; the whole length with a store. On a [`crate::RealFs`] the memory
    /// that the file system reports (512 `st_blocks`).
    pub allocated_bytes: u64,
    /// Software page of the file data. On a [`crate::RealFs`] the preferred size of reads and writes (`st_blksize`).
    pub page_bytes: u32,
    /// Times are in nanoseconds since 1970.
    pub accessed_ns: i64,
    pub modified_ns: i64,
    pub changed_ns: i64,
    pub created_ns: i64,
}

/// A time to set.
///
/// Example: [`SetAttr`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    Now,
    /// Nanoseconds since 1970.
    To(i64),
}

/// Changes of attributes; fields with `None` stay as they are.
///
/// ```
/// use pagemill::ramfs::{Caller, RamFs, SetAttr, SetTime};
///
/// let fs = RamFs::new("scratch")?;
/// fs.write("/file", b"hello")?;
/// let change = SetAttr { size_bytes: Some(2), modified: Some(SetTime::To(0)), ..SetAttr::default() };
/// let attr = fs.set_attributes("/file", &change)?;
/// assert_eq!((attr.size_bytes, attr.modified_ns), (2, 0));
/// # Ok::<(), pagemill::ramfs::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct SetAttr {
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size_bytes: Option<u64>,
    pub accessed: Option<SetTime>,
    pub modified: Option<SetTime>,
    /// Time of the last change, for FUSE clients that keep it themselves.
    pub changed: Option<SetTime>,
}

impl SetAttr {
    /// Returns whether a field is set.
    pub(crate) fn is_any(&self) -> bool {
        let times = [self.accessed, self.modified, self.changed];
        let sets_owner = self.mode.is_some() || self.uid.is_some() || self.gid.is_some();
        sets_owner || self.size_bytes.is_some() || times.iter().any(Option::is_some)
    }

    /// Applies the changes except that of the size to an inode. `caller` may make them ([`SetAttr::check`]).
    pub(crate) fn apply(&self, old: &Inode, now_ns: i64, caller: &Caller) -> Inode {
        let mut new = *old;
        if let Some(mode) = self.mode {
            new.mode = old.mode & TYPE_MASK | mode & 0o7777;
            if !caller.is_privileged() && !caller.is_in_group(self.gid.unwrap_or(old.gid)) {
                new.mode &= !libc::S_ISGID;
            }
        }
        if self.uid.is_some() || self.gid.is_some() {
            (new.uid, new.gid) = (self.uid.unwrap_or(old.uid), self.gid.unwrap_or(old.gid));
            if !old.is_directory() && self.mode.is_none() {
                new.mode = new.mode_without_set_id();
            }
        }
        let time = |set: Option<SetTime>, old| match set {
            None => old,
            Some(SetTime::Now) => now_ns,
            Some(SetTime::To(ns)) => ns,
        };
        new.accessed_ns = time(self.accessed, old.accessed_ns);
        new.modified_ns = time(self.modified, old.modified_ns);
        new.changed_ns = time(self.changed, now_ns);
        new
    }

    /// Checks that the caller may make the changes.
    pub(crate) fn check(&self, inode: &Inode, caller: &Caller) -> Result<()> {
        use crate::access::Access;
        use crate::error::Error;
        if caller.is_privileged() {
            return Ok(());
        }
        if self.mode.is_some() {
            caller.check_owner(inode)?;
        }
        if self.uid.is_some_and(|uid| uid != inode.uid) {
            return Err(Error::NotPermitted { what: "only a privileged caller may change the owner" });
        }
        if self.uid.is_some() || self.gid.is_some() {
            caller.check_owner(inode)?;
        }
        if self.gid.is_some_and(|gid| gid != inode.gid && !caller.is_in_group(gid)) {
            return Err(Error::NotPermitted { what: "the caller is not in the new group" });
        }
        let sets_time = |set: Option<SetTime>| matches!(set, Some(SetTime::To(_)));
        if sets_time(self.accessed) || sets_time(self.modified) {
            caller.check_owner(inode)?;
        } else if (self.accessed.is_some() || self.modified.is_some()) && !caller.is_owner_of(inode) {
            // The current time may be set by all callers that may write.
            caller.check(inode, Access::WRITE)?;
        }
        Ok(())
    }
}

impl fmt::Display for FileType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fifo => "pipe",
            Self::CharDevice => "character device",
            Self::Directory => "directory",
            Self::BlockDevice => "block device",
            Self::Regular => "regular file",
            Self::Symlink => "symbolic link",
            Self::Socket => "socket",
        })
    }
}
