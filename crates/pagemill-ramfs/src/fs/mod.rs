//! The file system: its state, and the operations by inode.

pub(crate) mod attr;
pub(crate) mod builder;
mod by_ino;
mod charge;
pub(crate) mod create;
mod data;
mod names;
mod read_dir;
pub(crate) mod remove;
mod rename;
mod shrink;
pub(crate) mod step;
mod tree;
pub(crate) mod volatile;
pub(crate) mod walk;
mod xattr;

pub use by_ino::Entry;
pub use read_dir::DirEntry;
pub use rename::Rename;
pub use shrink::Shrunk;
pub use xattr::SetXattr;

use crate::access::Caller;
use crate::active::{Active, ActiveInodes};
use crate::child_index::ChildIndex;
use crate::clock::Clock;
use crate::dentry::{Dentry, Texts};
use crate::error::{Error, Result};
use crate::file_data::FileData;
use crate::inode::{Ino, Inode, InodeHandle};
use crate::inode_locks::InodeLocks;
use crate::name::NameHasher;
use crate::negative::Negatives;
use crate::quota::{Domain, Domains};
use crate::spill::Spill;
use crate::watch::Watches;
use builder::Builder;
use pagemill_cache::PageCache;
use pagemill_core::sync::{Guarded, Lock};
use pagemill_slab::{HandleMap, SlabCache, enter};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use volatile::VolatileFiles;
use xattr::XattrSet;

/// Number of the root directory.
pub(crate) const ROOT_INO: Ino = 1;

/// A RAM file system in this process. Clones lead to the same file system; it ends with the last clone and the last open
/// file.
///
/// A value has a caller, whose permissions its methods with paths check: at first user 0. [`RamFs::as_caller`] returns a
/// value with another caller. All paths begin at the root, with or without a slash. Methods with inode numbers serve
/// protocols such as FUSE.
///
/// ```
/// use pagemill::ramfs::{OpenOptions, RamFs};
///
/// let fs = RamFs::builder("build").bytes(64 << 20).inodes(10_000).build()?;
/// fs.create_dir("/out")?;
/// fs.write("/out/log", b"done\n")?;
/// let file = fs.open("/out/log", &OpenOptions::new().read(true))?;
/// let mut bytes = [0; 4];
/// assert_eq!((file.read_at(&mut bytes, 0)?, &bytes), (4, b"done"));
/// fs.rename("/out/log", "/out/old")?;
/// assert_eq!(fs.read_dir("/out")?.len(), 1);
/// # Ok::<(), pagemill::ramfs::Error>(())
/// ```
#[derive(Clone)]
pub struct RamFs {
    pub(crate) inner: Arc<Inner>,
    pub(crate) caller: Caller,
}

/// The state of a file system.
pub(crate) struct Inner {
    pub inodes: HandleMap<Inode>,
    pub dentries: HandleMap<Dentry>,
    pub indices: HandleMap<ChildIndex>,
    /// Data of regular files that have some.
    pub files: HandleMap<Arc<FileData>>,
    /// Long names and targets of symbolic links.
    pub texts: Texts,
    pub xattrs: HandleMap<Arc<XattrSet>>,
    pub cache: PageCache,
    pub spill: Option<Arc<Spill>>,
    pub root: InodeHandle,
    pub locks: InodeLocks,
    /// Held while a directory gets another parent, so that no two such renames make a cycle.
    pub rename_lock: Lock,
    pub active: ActiveInodes,
    pub negatives: Negatives,
    /// Inodes of the whole file system.
    pub whole: Domain,
    pub domains: Domains,
    pub volatile: Guarded<VolatileFiles>,
    pub watches: Watches,
    pub hasher: NameHasher,
    pub clock: Clock,
    pub next_ino: AtomicU64,
    /// Bytes of the tables of all directories.
    pub index_bytes: AtomicU64,
    pub is_movable: bool,
}

/// What a file system uses.
///
/// ```
/// use pagemill::ramfs::RamFs;
///
/// let fs = RamFs::builder("scratch").inodes(100).build()?;
/// fs.write("/file", b"hello")?;
/// let usage = fs.usage();
/// assert_eq!((usage.inodes, usage.inode_limit), (2, 100)); // the root, too
/// # Ok::<(), pagemill::ramfs::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Bytes of file data in memory, in whole pages.
    pub bytes: u64,
    pub byte_limit: u64,
    /// Bytes of file data that are only in the spill store ([`Builder::spill`]), and the maximum; 0 without a store.
    pub spilled_bytes: u64,
    pub spill_limit: u64,
    pub page_bytes: u64,
    /// As counted by [`Builder::inodes`].
    pub inodes: u64,
    pub inode_limit: u64,
    /// Names that are known not to exist.
    pub negative_dentries: u64,
    /// Inodes with open files, or that a client has looked up by number.
    pub inodes_in_use: u64,
    /// Resident bytes of inodes, names and directories, with free space in their slabs, and of handle tables.
    pub metadata_bytes: u64,
    /// Handles of inodes and dentries that are not used again, because they have had their last generation.
    pub worn_out_handles: u64,
}

impl RamFs {
    /// Creates a file system with default parameters. Reports show its caches under `name`.
    ///
    /// # Errors
    ///
    /// As [`Builder::build`].
    pub fn new(name: &str) -> Result<Self> {
        Self::builder(name).build()
    }

    /// Returns the parameters of a file system that is about to be created.
    pub fn builder(name: &str) -> Builder {
        Builder::new(name)
    }

    /// Returns a value for the same file system, whose methods with paths check the permissions of another caller.
    #[must_use]
    pub fn as_caller(&self, caller: Caller) -> Self {
        Self { inner: self.inner.clone(), caller }
    }

    /// Returns what the file system uses, and its limits.
    ///
    /// Cost: some microseconds.
    pub fn usage(&self) -> Usage {
        let inner = &*self.inner;
        let whole = inner.whole.usage();
        Usage {
            bytes: inner.cache.charged_bytes(),
            byte_limit: inner.cache.limit_bytes(),
            spilled_bytes: inner.spill.as_ref().map_or(0, |spill| spill.spilled_bytes()),
            spill_limit: inner.spill.as_ref().map_or(0, |spill| spill.limit_bytes()),
            page_bytes: inner.page_bytes(),
            inodes: whole.inodes,
            inode_limit: whole.limit.inodes,
            negative_dentries: inner.negatives.len() as u64,
            inodes_in_use: inner.active.count() as u64,
            metadata_bytes: inner.metadata_bytes(),
            worn_out_handles: inner.inodes.worn_out_handles() + inner.dentries.worn_out_handles(),
        }
    }
}

impl std::fmt::Debug for RamFs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RamFs").field("caller", &self.caller).finish_non_exhaustive()
    }
}

impl Inner {
    pub fn page_bytes(&self) -> u64 {
        self.cache.page().bytes() as u64
    }

    /// Returns a copy of an inode.
    ///
    /// # Errors
    ///
    /// [`Error::Stale`] if the inode was freed, or has another handle now.
    pub fn inode(&self, inode: InodeHandle) -> Result<Inode> {
        self.inodes.get(inode, &enter()).copied().ok_or(STALE)
    }

    /// Returns a copy of an inode that must be a directory with a name.
    ///
    /// # Errors
    ///
    /// [`Error::NotDirectory`], [`Error::NotFound`], as [`Inner::inode`].
    pub fn directory(&self, inode: InodeHandle) -> Result<Inode> {
        let directory = self.inode(inode)?;
        match (directory.is_directory(), directory.links) {
            (false, _) => Err(Error::NotDirectory),
            (true, 0) => Err(Error::NotFound),
            _ => Ok(directory),
        }
    }

    /// Replaces an inode by the result of `change`, which may be called repeatedly.
    ///
    /// # Errors
    ///
    /// [`Error::NoSpace`] without memory, [`Error::Stale`].
    pub fn update_inode(&self, inode: InodeHandle, change: impl FnMut(&Inode) -> Inode) -> Result<()> {
        if self.inodes.update(inode, change)? { Ok(()) } else { Err(STALE) }
    }

    /// Begins a use of an inode that has a name or is in use.
    ///
    /// # Errors
    ///
    /// [`Error::Stale`] if the inode was freed, or has another handle now.
    pub fn begin_use(&self, inode: InodeHandle) -> Result<Arc<Active>> {
        let ino = self.inode(inode)?.ino;
        let data = || {
            let guard = enter();
            // Freed only under the lock of the shard, which is held here.
            let found = self.inodes.get(inode, &guard).filter(|found| found.links > 0)?;
            Some(self.data_of(found))
        };
        self.active.begin(ino, inode, data).ok_or(STALE)
    }

    /// Ends `count` uses of an inode; frees the inode if it has no name and these uses were the last.
    pub fn end_use(&self, ino: Ino, count: u64) {
        let mut freed = None;
        self.active.end(ino, count, |active| {
            let is_nameless = self.inode(active.inode).is_ok_and(|inode| inode.links == 0);
            freed = if is_nameless { self.take_inode(active.inode) } else { None };
        });
        freed.iter().for_each(|inode| self.free_contents(inode));
    }

    /// Frees an inode that has no name any more, unless it is in use.
    pub fn free_if_unused(&self, ino: Ino, inode: InodeHandle) {
        let freed = self.active.if_unused(ino, || self.take_inode(inode));
        freed.flatten().iter().for_each(|inode| self.free_contents(inode));
    }

    /// Removes an inode from its slab cache. Only one thread gets it.
    fn take_inode(&self, inode: InodeHandle) -> Option<Inode> {
        self.inodes.remove(inode).ok().flatten().map(|removed| *removed)
    }

    /// Frees what an inode refers to, and ends its charges. The inode was taken out of its slab cache.
    fn free_contents(&self, inode: &Inode) {
        let charge = self.inode_charge(inode);
        if inode.is_directory() {
            self.free_index(inode);
        } else if inode.is_regular() {
            self.free_data(inode);
        } else if inode.is_symlink() {
            let _ = self.texts.remove(pagemill_slab::Handle::from_bits(inode.data));
        }
        if inode.xattrs != 0 {
            let _ = self.xattrs.remove(pagemill_slab::Handle::from_bits(inode.xattrs));
        }
        self.forget_volatile(inode);
        self.discharge_inodes(inode, charge);
        self.end_quota_of(inode);
    }

    pub fn metadata_bytes(&self) -> u64 {
        fn bytes<T: pagemill_slab::Movable>(map: &HandleMap<T>) -> u64 {
            map.info().map_or(0, |info| info.total.resident_bytes) + map.handle_bytes()
        }
        let slabs = bytes(&self.inodes) + bytes(&self.dentries) + bytes(&self.files) + bytes(&self.texts);
        slabs + bytes(&self.indices) + bytes(&self.xattrs) + self.index_bytes.load(Relaxed)
    }
}

/// The error for a handle that leads to no inode any more. Walks by path begin again.
pub(crate) const STALE: Error = Error::Stale { ino: 0 };
