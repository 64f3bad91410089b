//! The error type of the crate. Each variant has the quantities that explain the failure, and one `errno`.

use std::fmt;
use std::io;

/// Why an operation of a RAM file system failed. Converts to [`io::Error`].
///
/// ```
/// use pagemill::ramfs::{Error, RamFs};
///
/// let fs = RamFs::new("scratch")?;
/// let error = fs.metadata("/missing").unwrap_err();
/// assert!(matches!(error, Error::NotFound));
/// assert_eq!((error.errno(), error.to_string().as_str()), (2, "no file or directory has this name"));
/// # Ok::<(), pagemill::ramfs::Error>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// A component of the path does not exist.
    NotFound,
    /// The name exists already.
    Exists,
    /// A component of the path must be a directory and is not one.
    NotDirectory,
    /// The operation does not work on directories.
    IsDirectory,
    /// The directory has this many entries.
    NotEmpty {
        entries: u64,
    },
    /// The caller lacks a permission: bits of `r` (4), `w` (2), `x` (1), of an object with this mode.
    AccessDenied {
        wanted: u32,
        mode: u32,
    },
    /// Only the owner or a privileged caller may do this.
    NotPermitted {
        what: &'static str,
    },
    NameTooLong {
        len_bytes: usize,
        most_bytes: usize,
    },
    PathTooLong {
        len_bytes: usize,
        most_bytes: usize,
    },
    /// The path leads through more than this many symbolic links.
    LinkLoop {
        most: u32,
    },
    /// The inode has this many names, the maximum.
    TooManyLinks {
        links: u32,
    },
    /// `what` (bytes or inodes) of the file system or of a quota are used up.
    NoSpace {
        what: &'static str,
        used: u64,
        limit: u64,
    },
    /// A quota of a directory is used up.
    QuotaExceeded {
        what: &'static str,
        used: u64,
        limit: u64,
    },
    Invalid {
        what: &'static str,
    },
    /// The file would be longer than the maximum.
    FileTooLarge {
        size_bytes: u64,
        most_bytes: u64,
    },
    /// The two directories have different quotas.
    OtherQuota,
    /// The file belongs to another file system.
    OtherFileSystem,
    /// The inode number belongs to no inode that is in use.
    Stale {
        ino: u64,
    },
    /// The file was not opened for this operation.
    BadAccessMode {
        what: &'static str,
    },
    /// No data, or no hole, follows the offset.
    PastEnd {
        offset: u64,
        size_bytes: u64,
    },
    NoAttribute,
    /// An extended attribute is larger than the maximum.
    AttributeTooLarge {
        len_bytes: usize,
        most_bytes: usize,
    },
    /// Another owner has locked bytes of the range, from `start` on.
    Locked {
        start: u64,
    },
    /// Waiting for this lock would never end: the owners wait for each other.
    Deadlock,
    Unsupported {
        what: &'static str,
    },
    /// The object is in use.
    Busy {
        what: &'static str,
    },
    /// The page cache or a slab cache failed.
    Memory(pagemill_core::Error),
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Returns the error number that a system call on a tmpfs would return.
    pub fn errno(&self) -> i32 {
        match self {
            Self::NotFound => libc::ENOENT,
            Self::Exists => libc::EEXIST,
            Self::NotDirectory => libc::ENOTDIR,
            Self::IsDirectory => libc::EISDIR,
            Self::NotEmpty { .. } => libc::ENOTEMPTY,
            Self::AccessDenied { .. } => libc::EACCES,
            Self::NotPermitted { .. } => libc::EPERM,
            Self::NameTooLong { .. } | Self::PathTooLong { .. } => libc::ENAMETOOLONG,
            Self::LinkLoop { .. } => libc::ELOOP,
            Self::TooManyLinks { .. } => libc::EMLINK,
            Self::NoSpace { .. } => libc::ENOSPC,
            Self::QuotaExceeded { .. } => libc::EDQUOT,
            Self::Invalid { .. } => libc::EINVAL,
            Self::FileTooLarge { .. } => libc::EFBIG,
            Self::OtherQuota | Self::OtherFileSystem => libc::EXDEV,
            Self::Stale { .. } => libc::ESTALE,
            Self::BadAccessMode { .. } => libc::EBADF,
            Self::PastEnd { .. } => libc::ENXIO,
            Self::NoAttribute => libc::ENODATA,
            Self::AttributeTooLarge { .. } => libc::E2BIG,
            Self::Locked { .. } => libc::EAGAIN,
            Self::Deadlock => libc::EDEADLK,
            Self::Unsupported { .. } => libc::EOPNOTSUPP,
            Self::Busy { .. } => libc::EBUSY,
            Self::Memory(cause) => match cause.errno() {
                libc::ENOMEM => libc::ENOSPC,
                errno => errno,
            },
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFound => write!(f, "no file or directory has this name"),
            Self::Exists => write!(f, "the name exists already"),
            Self::NotDirectory => write!(f, "a component of the path is not a directory"),
            Self::IsDirectory => write!(f, "it is a directory"),
            Self::NotEmpty { entries } => write!(f, "the directory has {entries} entries"),
            Self::AccessDenied { wanted, mode } => {
                let wanted: String = [(4, 'r'), (2, 'w'), (1, 'x')]
                    .into_iter()
                    .filter_map(|(bit, letter)| (wanted & bit != 0).then_some(letter))
                    .collect();
                write!(f, "the mode {:04o} does not permit {wanted} to this caller", mode & 0o7777)
            }
            Self::NotPermitted { what } => write!(f, "not permitted: {what}"),
            Self::NameTooLong { len_bytes, most_bytes } => {
                write!(f, "a name of {len_bytes} bytes, at most {most_bytes} are possible")
            }
            Self::PathTooLong { len_bytes, most_bytes } => {
                write!(f, "a path of {len_bytes} bytes, at most {most_bytes} are possible")
            }
            Self::LinkLoop { most } => write!(f, "the path leads through more than {most} symbolic links"),
            Self::TooManyLinks { links } => write!(f, "the file has {links} names, the maximum"),
            Self::NoSpace { what, used, limit } => {
                write!(f, "the file system is full: {used} of {limit} {what} are in use")
            }
            Self::QuotaExceeded { what, used, limit } => {
                write!(f, "the directory's quota is used up: {used} of {limit} {what}")
            }
            Self::Invalid { what } => write!(f, "invalid: {what}"),
            Self::FileTooLarge { size_bytes, most_bytes } => {
                write!(f, "a file of {size_bytes} bytes, at most {most_bytes} are possible")
            }
            Self::OtherQuota => write!(f, "the two directories have different quotas"),
            Self::OtherFileSystem => write!(f, "the file belongs to another file system"),
            Self::Stale { ino } => write!(f, "no inode in use has the number {ino}"),
            Self::BadAccessMode { what } => write!(f, "the file is not open for {what}"),
            Self::PastEnd { offset, size_bytes } => {
                write!(f, "nothing of the kind from offset {offset} on in a file of {size_bytes} bytes")
            }
            Self::NoAttribute => write!(f, "the file has no such extended attribute"),
            Self::AttributeTooLarge { len_bytes, most_bytes } => {
                write!(f, "extended attributes of {len_bytes} bytes, at most {most_bytes} are possible")
            }
            Self::Locked { start } => write!(f, "another owner has locked bytes from offset {start} on"),
            Self::Deadlock => write!(f, "the owners of the locks wait for each other"),
            Self::Unsupported { what } => write!(f, "not supported: {what}"),
            Self::Busy { what } => write!(f, "in use: {what}"),
            Self::Memory(cause) => cause.fmt(f),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Memory(cause) => Some(cause),
            _ => None,
        }
    }
}

impl From<pagemill_core::Error> for Error {
    fn from(cause: pagemill_core::Error) -> Self {
        use pagemill_core::Error as Core;
        match cause {
            Core::NoMemory { used_bytes, limit_bytes, .. } => {
                Self::NoSpace { what: "bytes", used: used_bytes, limit: limit_bytes }
            }
            Core::FileTooLarge { size_bytes, most_bytes } => Self::FileTooLarge { size_bytes, most_bytes },
            Core::PastEnd { offset, size_bytes } => Self::PastEnd { offset, size_bytes },
            Core::BadOffset { .. } => Self::Invalid { what: "an offset beyond the largest one" },
            cause => Self::Memory(cause),
        }
    }
}

impl<T> From<pagemill_slab::InsertError<T>> for Error {
    fn from(failed: pagemill_slab::InsertError<T>) -> Self {
        failed.error.into()
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        let kind = io::Error::from_raw_os_error(error.errno()).kind();
        io::Error::new(kind, error)
    }
}
