//! Mounts a [`pagemill_ramfs::RamFs`] through FUSE: every program can use its files by path ([`Mount`]).
//!
//! ```text
//!   mount        mounts and unmounts, runs the session threads
//!     adapter    one method for each request of the kernel
//!       attr     conversion of attributes and times
//! ```
//!
//! **Caching.** The kernel may cache names, missing names, attributes, links, directories and pages without a time
//! limit, because all changes come through this kernel. The adapter invalidates what it changes on its own: the
//! permission bits of a file when a write clears the set-user-ID bit.
//!
//! **Permissions.** The kernel checks them (`default_permissions`), because it answers most look-ups from its cache,
//! without a request. The file system gets callers whose permissions were checked ([`Caller::checked`]).
//!
//! **Open files.** The kernel sends no request for open and close. A file that a program has open is in use by its
//! look-up, which the kernel forgets only after the last close, so the adapter keeps no table of open files.
//!
//! [`Caller::checked`]: pagemill_ramfs::Caller::checked

mod adapter;
mod attr;
mod mount;

pub use adapter::USAGE_ATTRIBUTE;
pub use mount::{Mount, MountError, Options, unmount};
