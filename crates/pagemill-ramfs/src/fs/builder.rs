//! [`Builder`]: the parameters of a file system that is about to be created.

use super::{Inner, ROOT_INO, RamFs};
use crate::access::Caller;
use crate::active::ActiveInodes;
use crate::clock::Clock;
use crate::error::Result;
use crate::inode::Inode;
use crate::inode_locks::InodeLocks;
use crate::name::{HASH_BITS, NameHasher};
use crate::negative::Negatives;
use crate::quota::{Domain, Domains, Quota};
use crate::spill::Spill;
use crate::watch::Watches;
use pagemill_cache::{Caches, Never, PageCache, Policy, Source};
use pagemill_core::sync::{Guarded, Lock};
use pagemill_core::units::PageSize;
use pagemill_slab::{Handle, Settings, Slabs};
use pagemill_store::Store;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Default of [`Builder::inodes`]: the number of handles that a slab cache can have.
const MAX_INODES: u64 = 1 << 26;

/// The parameters of a file system that is about to be created ([`RamFs::builder`]).
///
/// ```
/// use pagemill::ramfs::RamFs;
/// use pagemill::units::PageSize;
///
/// let fs = RamFs::builder("objects")
///     .bytes(64 << 20)
///     .inodes(10_000)
///     .page(PageSize::new(64 << 10).unwrap())
///     .root_mode(0o1777)
///     .build()?;
/// assert_eq!(fs.metadata("/")?.mode, 0o1777);
/// # Ok::<(), pagemill::ramfs::Error>(())
/// ```
#[must_use = "`build` creates the file system"]
pub struct Builder {
    name: String,
    cache: pagemill_cache::Builder,
    inodes: u64,
    negative_dentries: usize,
    root_mode: u32,
    is_movable: bool,
    used_ratio: Option<u32>,
    clock: Clock,
    hash_bits: u32,
    policy: Option<Box<dyn Policy>>,
    spill: Option<(Arc<dyn Store>, u64)>,
}

impl Builder {
    pub(crate) fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            cache: PageCache::builder(name),
            inodes: MAX_INODES,
            negative_dentries: 0,
            root_mode: 0o755,
            is_movable: true,
            used_ratio: None,
            clock: Clock::System,
            hash_bits: HASH_BITS,
            policy: None,
            spill: None,
        }
    }

    fn with_cache(self, change: impl FnOnce(pagemill_cache::Builder) -> pagemill_cache::Builder) -> Self {
        Self { cache: change(self.cache), ..self }
    }

    /// Sets the maximum bytes of file data, in whole pages. The default is a quarter of the machine's memory.
    pub fn bytes(self, bytes: u64) -> Self {
        self.with_cache(|cache| cache.limit(bytes))
    }

    /// Sets the maximum number of inodes, the root included. The default is 2^26. Each further name of a file, and each
    /// KiB of a file's extended attributes or of a symbolic link's target, counts as one more, so the limit also bounds
    /// the memory of metadata.
    pub fn inodes(self, inodes: u64) -> Self {
        Self { inodes, ..self }
    }

    /// Sets the software page of file data. The default is the OS page.
    pub fn page(self, page: PageSize) -> Self {
        self.with_cache(|cache| cache.page(page))
    }

    /// Sets whether file data get huge folios. The default is true with the crate's feature `huge`. Has no effect with
    /// [`Builder::spill`].
    pub fn huge(self, use_huge: bool) -> Self {
        self.with_cache(|cache| cache.huge(use_huge))
    }

    /// Sets the policy that chooses between huge and small folios. Has no effect with [`Builder::spill`].
    pub fn policy(self, policy: impl Policy + 'static) -> Self {
        Self { policy: Some(Box::new(policy)), ..self }
    }

    /// Sets a store to which segments of files move when the file system is full. A segment is 256 KiB, or one larger page.
    /// Segments are evicted in FIFO order with a second chance. They come back when they are read or written, and are used
    /// directly in the store if memory is used up. So the file system has room for up to `limit_bytes` more. A write first
    /// purges volatile files that have bytes in memory; it examines at most 256 marked files. Reads,
    /// [`crate::File::allocate`] and views purge nothing.
    ///
    /// If the store fails to write, its data stay in memory, and writes that need more fail with
    /// [`crate::Error::NoSpace`]. If it fails to read a segment, reads and writes of that segment fail with the store's
    /// error. So do truncations and holes that end inside it. The file system never syncs the store. The store's contents
    /// are useless after the file system has ended.
    ///
    /// All folios are small; [`Builder::policy`] and [`Builder::huge`] have no effect. A file with a mapping
    /// ([`crate::File::mapping`]) or a view stays in memory. `limit_bytes` counts whole pages of data, not the store's
    /// length: each segment occupies a range of 256 KiB (or one larger page), however few pages it has. So use a regular
    /// file on a file system with sparse files, not a device of `limit_bytes`.
    ///
    /// The store must not use files of this file system. The buffer of a read or write must not be a mapping of a file in
    /// a `pagemill_fuse::Mount` of the same process: the bytes are copied under the lock of a segment, and a page fault of
    /// the copy may wait for that lock.
    ///
    /// Cost: a first read of 4 KiB transfers the whole segment, and may first write another one. The calling thread does the
    /// transfers. A call that finds no memory because other threads use it up tries for up to 5 seconds for each segment.
    ///
    /// ```
    /// use pagemill::ramfs::RamFs;
    /// use pagemill::store::MemoryStore;
    /// use std::sync::Arc;
    ///
    /// let disk = Arc::new(MemoryStore::new(Vec::new(), 512)); // usually a `FileStore`
    /// let fs = RamFs::builder("results").bytes(1 << 20).spill(disk, 16 << 20).build()?;
    /// fs.write("/first", &[1; 3_000_000])?;
    /// fs.write("/second", &[2; 3_000_000])?;
    /// assert!(fs.usage().spilled_bytes > 4_000_000);
    /// assert_eq!(fs.read("/first")?, [1; 3_000_000]);
    /// # Ok::<(), pagemill::ramfs::Error>(())
    /// ```
    pub fn spill(self, store: Arc<dyn Store>, limit_bytes: u64) -> Self {
        Self { spill: Some((store, limit_bytes)), ..self }
    }

    /// Sets the kind of memory of file data. Views of files ([`crate::File::view`]) need [`Source::Shared`].
    pub fn source(self, source: Source) -> Self {
        self.with_cache(|cache| cache.source(source))
    }

    /// Sets how many names that do not exist are remembered after a look-up. The default is 0, since the index of a
    /// directory answers a failed look-up as fast ([decisions.md](../../../docs/decisions.md)).
    pub fn negative_dentries(self, most: usize) -> Self {
        Self { negative_dentries: most, ..self }
    }

    /// Sets the permission bits of the root. The default is 0755.
    pub fn root_mode(self, mode: u32) -> Self {
        Self { root_mode: mode & 0o7777, ..self }
    }

    /// Sets whether inodes and names can be moved, so that the memory of removed ones returns. The default is true;
    /// false is for comparisons.
    pub fn movable(self, is_movable: bool) -> Self {
        Self { is_movable, ..self }
    }

    /// Sets the `defrag_used_ratio` of the slab caches ([`Settings::defrag_used_ratio`]).
    pub fn defrag_used_ratio(self, percent: u32) -> Self {
        Self { used_ratio: Some(percent), ..self }
    }

    /// Sets the clock of timestamps: nanoseconds since 1970. The default is the system's coarse clock, which advances
    /// every 1 to 10 ms. The clock may go back.
    pub fn clock(self, now_ns: impl Fn() -> i64 + Send + Sync + 'static) -> Self {
        Self { clock: Clock::Custom(Box::new(now_ns)), ..self }
    }

    /// Sets the number of significant bits of the hashes of names, for tests with many equal hashes.
    #[doc(hidden)]
    pub fn hash_bits(self, bits: u32) -> Self {
        Self { hash_bits: bits, ..self }
    }

    /// Creates the file system.
    ///
    /// # Errors
    ///
    /// Those of creating a page cache and six slab caches: [`crate::Error::Memory`], [`crate::Error::NoSpace`].
    /// [`crate::Error::Invalid`] with a spill store if its blocks are larger than a page, or if [`Builder::bytes`] is below
    /// 1 MiB or four pages.
    pub fn build(self) -> Result<RamFs> {
        self.build_in(Slabs::of_process()?, Caches::of_process()?)
    }

    /// Creates the file system in an instance of its own.
    ///
    /// # Errors
    ///
    /// As [`Builder::build`].
    #[doc(hidden)] // programs have one instance, tests have several
    pub fn build_in(self, slabs: &'static Slabs, caches: &'static Caches) -> Result<RamFs> {
        let settings = |kind: &str| {
            let settings = Settings::new(&format!("{}_{kind}", self.name)).movable(self.is_movable);
            match self.used_ratio {
                Some(percent) => settings.defrag_used_ratio(percent),
                None => settings,
            }
        };
        let inodes = slabs.by_handle(settings("inode"))?;
        let dentries = slabs.by_handle(settings("dentry"))?;
        let indices = slabs.by_handle(settings("index"))?;
        let files = slabs.by_handle(settings("file"))?;
        let texts = slabs.by_handle(settings("text"))?;
        let xattrs = slabs.by_handle(settings("xattr"))?;
        let (cache, spill) = build_cache(self.cache, self.policy, self.spill, caches)?;
        let whole = Domain::new(Quota { bytes: u64::MAX, inodes: self.inodes }, 0, None);
        whole.charge_inodes(1)?;
        let root = inodes.insert(root_inode(self.root_mode, self.clock.now_ns()))?;
        inodes.update(root, |old| Inode { parent: root.to_bits(), ..*old })?;
        let inner = Inner {
            inodes,
            dentries,
            indices,
            files,
            texts,
            xattrs,
            cache,
            spill,
            root,
            locks: InodeLocks::new(),
            rename_lock: Lock::new(),
            active: ActiveInodes::new(),
            negatives: Negatives::new(self.negative_dentries)?,
            whole,
            domains: Domains::default(),
            volatile: Guarded::default(),
            watches: Watches::default(),
            hasher: NameHasher::new(RandomState::new().hash_one(0), self.hash_bits),
            clock: self.clock,
            next_ino: AtomicU64::new(ROOT_INO + 1),
            index_bytes: AtomicU64::new(0),
            is_movable: self.is_movable,
        };
        // The root is always in use, so it keeps its handle and is found by its number.
        inner.begin_use(root)?;
        Ok(RamFs { inner: Arc::new(inner), caller: Caller::root() })
    }
}

/// Creates the page cache of file data, and what moves data to the store.
fn build_cache(
    cache: pagemill_cache::Builder,
    policy: Option<Box<dyn Policy>>,
    store: Option<(Arc<dyn Store>, u64)>,
    caches: &'static Caches,
) -> Result<(PageCache, Option<Arc<Spill>>)> {
    let cache = match (&store, policy) {
        (Some(_), _) => cache.policy(Never),
        (None, Some(policy)) => cache.policy(policy),
        (None, None) => cache,
    };
    let cache = cache.build_in(caches)?;
    let spill = store.map(|(store, limit_bytes)| Spill::new(store, limit_bytes, cache.clone()).map(Arc::new));
    Ok((cache, spill.transpose()?))
}

fn root_inode(mode: u32, now_ns: i64) -> Inode {
    Inode {
        ino: ROOT_INO,
        data: 0,
        parent: Handle::<Inode>::from_bits(0).to_bits(),
        xattrs: 0,
        accessed_ns: now_ns,
        modified_ns: now_ns,
        changed_ns: now_ns,
        created_ns: now_ns,
        mode: libc::S_IFDIR | mode,
        uid: 0,
        gid: 0,
        links: 2,
        quota: 0,
    }
}

impl std::fmt::Debug for Builder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, inodes, is_movable, .. } = self;
        let mut text = f.debug_struct("Builder");
        text.field("name", name).field("inodes", inodes).field("is_movable", is_movable).finish_non_exhaustive()
    }
}
