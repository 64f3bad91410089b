//! A RAM file system in process ([`RamFs`]): directories, inodes and names in movable slabs, file data in a page cache.
//!
//! ```text
//!   paths, file, vfs         paths; open files; one interface for this and the real file system
//!     vfs_adapter            the trait of the crate vfs (feature `vfs`)
//!     fs/                    the operations by inode, one file per subject
//!       walk, step           path walks, and one step of a walk, without locks
//!       create, remove, …    changes, under the locks of the directories
//!     active                 inodes in use: open files and lookups of a client
//!       child_index          the names of one directory, ordered by hash
//!       dentry, inode        the values in the slabs
//!     negative               names that are known not to exist
//!     spill/                 moves data that was not used recently to a store when memory is full
//!     quota, range_lock, watch
//!       name, access, clock, error
//! ```
//!
//! **Objects.** An inode has the attributes of a file. A dentry has a name and the handle of an inode. A directory's
//! inode has the handle of its child index, whose slots have the handles of dentries. Objects refer to each other by
//! handle only, so the slab caches move them without a callback. Values never change in place: a change stores a new
//! value behind the same handle.
//!
//! **Path walks** take no lock. A step reads the child index between two loads of the index's sequence counter, and
//! repeats if the counter has changed. After some attempts it takes the directory's lock.
//!
//! **Locks** of inodes are chosen by inode number from a fixed table, in which the sequence of locks is the order of
//! acquisition. A rename of a directory first takes `rename_lock`. Below them: a shard of `active`, then the list of
//! negative dentries.
//!
//! Uses `pagemill-core`, `pagemill-slab`, `pagemill-cache` and `pagemill-store`. Design and limits: docs/ramfs.md.

#![cfg(not(loom))]

mod access;
mod active;
mod child_index;
mod clock;
mod dentry;
mod error;
mod file;
mod file_data;
mod fs;
mod inode;
mod inode_locks;
mod name;
mod negative;
mod paths;
mod quota;
mod range_lock;
#[cfg(all(test, shuttle))]
mod shuttle_tests;
mod spill;
mod vfs;
#[cfg(any(feature = "vfs", test))]
mod vfs_adapter;
mod watch;

pub use access::{Access, Caller};
pub use error::{Error, Result};
pub use file::{File, OpenOptions, Whence};
pub use file_data::Allocate;
pub use fs::builder::Builder;
pub use fs::{DirEntry, Entry, RamFs, Rename, SetXattr, Shrunk, Usage};
pub use inode::{Attr, FileType, Ino, SetAttr, SetTime};
pub use paths::OwnedDirEntry;
pub use quota::{Quota, QuotaUsage};
pub use range_lock::{LockKind, LockRange};
pub use vfs::{FileSystem, OpenFile, RealFs};
pub use watch::{Event, EventKind, Watch};
