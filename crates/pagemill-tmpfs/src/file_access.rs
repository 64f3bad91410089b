//! The controller's access to the file system: a private mount, and calls that follow no links.
//!
//! The private mount is a clone of the users' mount that appears at no path. The controller's open files therefore do
//! not keep the users' mount busy, and mounts or renames at the users' path cannot redirect the controller. Every path
//! starts at the clone's root and cannot lead out of the clone.

use crate::policy::{self, Ancestor, HUGE, Marks, PURGED, SIZE, VOLATILE};
use rustix::fs::{self, AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, ResolveFlags, XattrFlags};
use rustix::io::{Errno, retry_on_intr};
use rustix::mount::{self, FsPickFlags, OpenTreeFlags};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::str::FromStr;
use std::time::SystemTime;

/// `f_type` of tmpfs.
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// Families of extended attributes, in order of preference. Users may set `user.` attributes; only root may set
/// `trusted.` ones.
const ATTRIBUTE_FAMILIES: [&str; 2] = ["user.", "trusted."];

/// Flags of `open_tree` that clone a mount.
const CLONE_FLAGS: OpenTreeFlags = OpenTreeFlags::OPEN_TREE_CLONE.union(OpenTreeFlags::OPEN_TREE_CLOEXEC);

/// Attributes of a file or folder, from one `stat` call.
#[derive(Clone, Copy, Debug)]
pub struct FileAttributes {
    pub inode: u64,
    pub kind: FileType,
    pub owner: u32,
    pub mode: u32,
    pub links: u64,
    pub len_bytes: u64,
    /// Memory that the file occupies.
    pub held_bytes: u64,
    /// Last access (`atime`) or last change (`ctime`), whichever is later, in nanoseconds since 1970. Users can set
    /// `atime` back, but not `ctime`.
    pub used_ns: i64,
    /// Last change of contents or attributes (`ctime`), in nanoseconds since 1970.
    pub changed_ns: i64,
}

impl From<fs::Stat> for FileAttributes {
    #[allow(clippy::unnecessary_cast, reason = "widths differ between processors")]
    fn from(stat: fs::Stat) -> Self {
        let time = |seconds: i64, nanoseconds: i64| seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds);
        let changed_ns = time(stat.st_ctime, stat.st_ctime_nsec as i64);
        Self {
            inode: stat.st_ino,
            kind: FileType::from_raw_mode(stat.st_mode),
            owner: stat.st_uid,
            mode: stat.st_mode,
            links: stat.st_nlink as u64,
            len_bytes: stat.st_size.max(0) as u64,
            held_bytes: stat.st_blocks.max(0) as u64 * 512,
            used_ns: changed_ns.max(time(stat.st_atime, stat.st_atime_nsec as i64)),
            changed_ns,
        }
    }
}

impl FileAttributes {
    pub fn is_file(&self) -> bool {
        self.kind == FileType::RegularFile
    }

    pub fn is_folder(&self) -> bool {
        self.kind == FileType::Directory
    }

    /// Returns whether users other than the owner may write to this file and set its attributes.
    ///
    /// For a file with an access control list, the mode's group bits are the list's mask. So the result is also true if
    /// the list lets another user write.
    pub fn is_writable_by_others(&self) -> bool {
        Mode::from_raw_mode(self.mode).intersects(Mode::WGRP | Mode::WOTH)
    }

    /// Returns this folder as an ancestor of files, with its own marks.
    pub fn as_ancestor(&self, marks: Marks) -> Ancestor {
        Ancestor { marks, owner: self.owner, is_open_to_others: self.is_open_to_others() }
    }

    /// Returns the effective marks of this file, given its own marks and its ancestors, nearest first
    /// ([`policy::effective_marks`]).
    pub fn effective_marks(&self, own: Marks, ancestors: impl IntoIterator<Item = Ancestor>) -> Marks {
        policy::effective_marks(own.trusted(self.is_writable_by_others()), self.owner, ancestors)
    }

    /// Returns whether users other than the owner may write to this folder and delete its entries.
    pub fn is_open_to_others(&self) -> bool {
        let mode = Mode::from_raw_mode(self.mode);
        mode.intersects(Mode::WGRP | Mode::WOTH) && !mode.contains(Mode::SVTX)
    }
}

/// Size and usage of the file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileSystemUsage {
    pub size_bytes: u64,
    pub used_bytes: u64,
    /// Maximum number of inodes. The kernel counts each KiB of attributes as an inode, too.
    pub max_inodes: u64,
    /// Number of inodes in use, including those for attributes.
    pub inodes: u64,
}

/// The error text for a mark with an invalid value.
#[derive(Debug)]
pub struct BadMark(pub String);

/// Returns the current time in nanoseconds since 1970, like the times of files.
pub fn now_ns() -> i64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_nanos()).unwrap_or(i64::MAX)
}

/// Access to one file system, through the root of its private mount.
pub struct FileAccess {
    root: OwnedFd,
    device: u64,
    root_inode: u64,
}

impl FileAccess {
    /// Clones the mount at `path` as the private mount.
    ///
    /// # Errors
    ///
    /// Errors of the kernel: `EPERM` without the right to mount; `InvalidInput` if the file system is not a
    /// tmpfs.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::clone(mount::open_tree(CWD, path, CLONE_FLAGS)?)
    }

    /// Clones the mount of a descriptor as the private mount.
    ///
    /// # Errors
    ///
    /// As [`Self::open`].
    pub fn of_mount(mount: impl AsFd) -> io::Result<Self> {
        Self::clone(mount::open_tree(mount, "", CLONE_FLAGS | OpenTreeFlags::AT_EMPTY_PATH)?)
    }

    /// Opens the root folder of the cloned mount.
    fn clone(tree: OwnedFd) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Self::of_root(retry_on_intr(|| fs::openat(&tree, ".", flags, Mode::empty()))?)
    }

    /// Uses an open root folder of an existing mount; clones nothing.
    ///
    /// # Errors
    ///
    /// `InvalidInput` if the file system is not a tmpfs; errors of `fstat`.
    pub fn of_root(root: OwnedFd) -> io::Result<Self> {
        if u64::try_from(fs::fstatfs(&root)?.f_type) != Ok(TMPFS_MAGIC) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a tmpfs"));
        }
        let stat = fs::fstat(&root)?;
        Ok(Self { root, device: stat.st_dev, root_inode: stat.st_ino })
    }

    pub fn root(&self) -> BorrowedFd<'_> {
        self.root.as_fd()
    }

    pub fn device(&self) -> u64 {
        self.device
    }

    pub fn root_inode(&self) -> u64 {
        self.root_inode
    }

    /// Returns size and usage of the file system.
    ///
    /// # Errors
    ///
    /// Errors of `fstatvfs`.
    pub fn usage(&self) -> io::Result<FileSystemUsage> {
        let stat = fs::fstatvfs(&self.root)?;
        let size_bytes = stat.f_blocks.saturating_mul(stat.f_frsize);
        let free_bytes = stat.f_bfree.saturating_mul(stat.f_frsize);
        let used_bytes = size_bytes.saturating_sub(free_bytes);
        let (max_inodes, inodes) = (stat.f_files, stat.f_files.saturating_sub(stat.f_ffree));
        Ok(FileSystemUsage { size_bytes, used_bytes, max_inodes, inodes })
    }

    /// Changes the size of the file system. Writes that would need more memory than `bytes`, and files beyond `inodes`,
    /// fail with `ENOSPC`. Takes some 30 us.
    ///
    /// # Errors
    ///
    /// `EINVAL` if more is in use, `EPERM` without permission.
    pub fn set_size(&self, bytes: u64, inodes: u64) -> io::Result<()> {
        let context = mount::fspick(&self.root, "", FsPickFlags::FSPICK_EMPTY_PATH | FsPickFlags::FSPICK_CLOEXEC)?;
        mount::fsconfig_set_string(&context, "size", bytes.to_string())?;
        mount::fsconfig_set_string(&context, "nr_inodes", inodes.to_string())?;
        Ok(mount::fsconfig_reconfigure(&context)?)
    }

    /// Returns the size that the user requested for the mount, if it was recorded.
    pub fn requested_size(&self) -> Option<u64> {
        ATTRIBUTE_FAMILIES.iter().rev().find_map(|family| number_attribute(&self.root, family, SIZE))
    }

    /// Records the requested size, for a controller that takes over the mount. Uses a `trusted.` attribute if
    /// possible, because other users cannot change it.
    ///
    /// # Errors
    ///
    /// Errors of `fsetxattr`.
    pub fn record_requested_size(&self, bytes: u64) -> io::Result<()> {
        let value = bytes.to_string();
        let set = |family| fs::fsetxattr(&self.root, format!("{family}{SIZE}"), value.as_bytes(), XattrFlags::empty());
        Ok(set(ATTRIBUTE_FAMILIES[1]).or_else(|_| set(ATTRIBUTE_FAMILIES[0]))?)
    }

    /// Opens `path` below the root. Follows no links.
    ///
    /// # Errors
    ///
    /// Errors of `openat2`: `ELOOP` for a link, `EXDEV` for a path that leaves the mount.
    pub fn open_at(&self, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        Ok(retry_on_intr(|| fs::openat2(&self.root, path, flags, Mode::empty(), resolve))?)
    }

    /// Opens a folder.
    ///
    /// # Errors
    ///
    /// As [`Self::open_at`].
    pub fn open_folder(&self, path: &Path) -> io::Result<OwnedFd> {
        self.open_at(path, OFlags::RDONLY | OFlags::DIRECTORY)
    }
}

/// Returns the attributes of an open file or folder.
///
/// # Errors
///
/// Errors of `fstat`.
pub fn attributes(fd: impl AsFd) -> io::Result<FileAttributes> {
    Ok(fs::fstat(fd)?.into())
}

/// Returns the attributes of the entry `name` in a folder. For a link, returns those of the link itself.
///
/// # Errors
///
/// Errors of `fstatat`.
pub fn attributes_at(folder: impl AsFd, name: &OsStr) -> io::Result<FileAttributes> {
    Ok(fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)?.into())
}

/// Opens a file in a folder without blocking and, where that is allowed, without changing its access time.
///
/// # Errors
///
/// Errors of `openat`: `EAGAIN` while another process has a lease, `ELOOP` for a link.
pub fn open_file(folder: impl AsFd, name: &OsStr, flags: OFlags) -> io::Result<OwnedFd> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    match fs::openat(&folder, name, flags | OFlags::NOATIME, Mode::empty()) {
        Err(Errno::PERM) => Ok(fs::openat(&folder, name, flags, Mode::empty())?),
        result => Ok(result?),
    }
}

/// Renames a file within a folder. The new name must not exist.
///
/// # Errors
///
/// Errors of `renameat2`: `EEXIST` if the new name exists.
pub fn rename(folder: impl AsFd, from: &OsStr, to: &OsStr) -> io::Result<()> {
    Ok(fs::renameat_with(&folder, from, &folder, to, RenameFlags::NOREPLACE)?)
}

/// Returns a path to an entry of an open folder, for system calls that accept no folder descriptor.
fn path_of(folder: impl AsFd, name: &OsStr) -> OsString {
    let mut path = format!("/proc/self/fd/{}/", folder.as_fd().as_raw_fd()).into_bytes();
    path.extend_from_slice(name.as_bytes());
    OsString::from_vec(path)
}

/// Reads the marks of an open file or folder. Ignores invalid values, and passes an error text for each to
/// `bad`.
///
/// # Errors
///
/// Errors of reading. The caller must not treat the file as unmarked then.
pub fn marks(fd: impl AsFd, bad: impl FnMut(BadMark)) -> io::Result<Marks> {
    let mut names = [0; 1024];
    let listed = fs::flistxattr(&fd, &mut names[..]);
    read_listed_marks(fitting_names(&names, listed)?, |name, value| fs::fgetxattr(&fd, name, value), bad)
}

/// Reads the marks of an entry in a folder, like [`marks`].
///
/// # Errors
///
/// As [`marks`].
pub fn marks_at(folder: impl AsFd, name: &OsStr, bad: impl FnMut(BadMark)) -> io::Result<Marks> {
    let path = path_of(folder, name);
    let mut names = [0; 1024];
    let listed = fs::llistxattr(&path, &mut names[..]);
    read_listed_marks(fitting_names(&names, listed)?, |name, value| fs::lgetxattr(&path, name, value), bad)
}

/// Returns the attribute names that a list call stored in `names`. Returns `None` if the names did not fit; the caller
/// then queries each attribute.
fn fitting_names(names: &[u8], listed: rustix::io::Result<usize>) -> io::Result<Option<&[u8]>> {
    match listed {
        Ok(len) => Ok(Some(&names[..len])),
        Err(Errno::RANGE) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Reads the marks with `get`. `names` lists the existing attributes, separated by zero bytes; `None` if they
/// are unknown.
fn read_listed_marks(
    names: Option<&[u8]>,
    get: impl Fn(&str, &mut [u8]) -> rustix::io::Result<usize>,
    mut bad: impl FnMut(BadMark),
) -> io::Result<Marks> {
    // Most files have no attributes, and then no value is queried.
    if names.is_some_and(<[u8]>::is_empty) {
        return Ok(Marks::default());
    }
    let is_there =
        |name: &str| names.is_none_or(|names| names.split(|byte| *byte == 0).any(|one| one == name.as_bytes()));
    let text = |attribute: &str| -> io::Result<Option<String>> {
        for name in ATTRIBUTE_FAMILIES.iter().map(|family| format!("{family}{attribute}")).filter(|name| is_there(name))
        {
            let mut value = [0; 16];
            match get(&name, &mut value) {
                Ok(len) => return Ok(Some(String::from_utf8_lossy(&value[..len]).into_owned())),
                // The value is longer than any valid one.
                Err(Errno::RANGE) => return Ok(Some("(too long)".into())),
                Err(Errno::NODATA | Errno::OPNOTSUPP) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(None)
    };
    fn parse_mark<T: FromStr<Err = String>>(text: Option<String>, bad: &mut impl FnMut(BadMark)) -> Option<T> {
        text?.parse().map_err(|message| bad(BadMark(message))).ok()
    }
    Ok(Marks { volatile: parse_mark(text(VOLATILE)?, &mut bad), huge: parse_mark(text(HUGE)?, &mut bad) })
}

/// Sets an attribute of an open file: in the `user.` family where tmpfs has it, else in `trusted.`.
///
/// # Errors
///
/// Errors of `fsetxattr`.
pub fn set_attribute(fd: impl AsFd, attribute: &str, value: &str) -> io::Result<()> {
    let set = |family| fs::fsetxattr(&fd, format!("{family}{attribute}"), value.as_bytes(), XattrFlags::empty());
    match set(ATTRIBUTE_FAMILIES[0]) {
        Err(Errno::OPNOTSUPP) => Ok(set(ATTRIBUTE_FAMILIES[1])?),
        result => Ok(result?),
    }
}

/// Returns the offset from which the contents of an open file were purged; `None` if nothing was purged.
pub fn purged_from(fd: impl AsFd) -> Option<u64> {
    ATTRIBUTE_FAMILIES.iter().find_map(|family| number_attribute(&fd, family, PURGED))
}

/// Reads an attribute as a number. `family` is the prefix of the attribute's name.
fn number_attribute(fd: impl AsFd, family: &str, attribute: &str) -> Option<u64> {
    let mut value = [0; 24];
    let len = fs::fgetxattr(&fd, format!("{family}{attribute}"), &mut value[..]).ok()?;
    std::str::from_utf8(&value[..len]).ok()?.trim().parse().ok()
}

/// Removes the attribute that says that an open file was purged.
///
/// # Errors
///
/// Errors of `fremovexattr`.
pub fn clear_purged(fd: impl AsFd) -> io::Result<()> {
    for family in ATTRIBUTE_FAMILIES {
        match fs::fremovexattr(&fd, format!("{family}{PURGED}")) {
            Ok(()) | Err(Errno::NODATA | Errno::OPNOTSUPP) => {}
            // Without root, an attribute of the `trusted.` family cannot be removed, and the error is ignored.
            Err(Errno::PERM) if family != ATTRIBUTE_FAMILIES[0] => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Huge, Volatile};

    /// Marks of both families must be found among other attributes. Invalid values must be reported and ignored. A
    /// failed read must be an error, not a missing mark.
    #[test]
    fn marks_are_read() {
        let names = b"security.x\0user.pagemill.volatile\0trusted.pagemill.huge\0";
        let get = |name: &str, value: &mut [u8]| {
            let text = if name == "user.pagemill.volatile" { "full" } else { "often" };
            value[..text.len()].copy_from_slice(text.as_bytes());
            Ok(text.len())
        };
        let mut told = Vec::new();
        let full = Marks { volatile: Some(Volatile::Full), huge: None };
        assert_eq!(read_listed_marks(Some(names), get, |bad| told.push(bad.0)).unwrap(), full);
        assert_eq!(told, ["`often` is no value of user.pagemill.huge: auto, always, never"]);
        let by_name = |name: &str, value: &mut [u8]| match name {
            "user.pagemill.huge" => {
                value[..6].copy_from_slice(b"always");
                Ok(6)
            }
            _ => Err(Errno::NODATA),
        };
        let always = Marks { volatile: None, huge: Some(Huge::Always) };
        assert_eq!(read_listed_marks(None, by_name, |_| panic!()).unwrap(), always, "the names did not fit");
        assert_eq!(read_listed_marks(Some(b""), |_, _| panic!(), |_| panic!()).unwrap(), Marks::default());
        let mut told = 0;
        let long = read_listed_marks(Some(b"user.pagemill.huge\0"), |_, _| Err(Errno::RANGE), |_| told += 1);
        assert_eq!((long.unwrap(), told), (Marks::default(), 1));
        assert!(read_listed_marks(None, |_, _| Err(Errno::IO), |_| panic!()).is_err());
    }

    /// A folder is open to other users if they may write to it and it has no sticky bit.
    #[test]
    fn a_sticky_folder_is_not_open_to_others() {
        let seen = |mode| FileAttributes {
            inode: 1,
            kind: FileType::Directory,
            owner: 0,
            mode,
            links: 1,
            len_bytes: 0,
            held_bytes: 0,
            used_ns: 0,
            changed_ns: 0,
        };
        assert!(seen(0o777).is_open_to_others() && seen(0o775).is_open_to_others());
        assert!(!seen(0o1777).is_open_to_others() && !seen(0o755).is_open_to_others());
    }
}
