//! Memory use of each cache, for the program itself and for other processes.
//!
//! Huge and charged bytes are counted as they change. Finding pinned and held folios requires a walk over all pages,
//! which ends at a time limit.

use crate::folio::Pool;
use crate::folio::word::Kind;
use crate::mapping::cache::{Caches, Inner, PageCache};
use crate::mapping::writeback::dirty::Dirty;
use crate::mapping::{File, SharedMemory};
use pagemill_core::sync::Relaxed;
use pagemill_sys::clock;
use pagemill_xarray::Node;
use std::sync::{Arc, Weak};

/// The kind of owner of the memory that a [`Usage`] describes.
///
/// Example: [`Usage`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    /// A cache.
    Cache,
    /// The pool of a cache that has ended: free memory, kept for the next cache.
    IdlePool,
    /// Index nodes that no file uses, available to later files. These nodes belong to no particular NUMA node.
    SpareNodes,
}

/// Memory use of one cache in bytes. The fields from `huge` to `index` add up to the cache's memory.
///
/// ```
/// use pagemill::PageCache;
///
/// let cache = PageCache::builder("tiles").limit(64 << 20).build()?;
/// let file = cache.create()?;
/// file.write_at(&[1; 100], 0)?;
/// let usage = cache.usage();
/// assert!(usage.small > 0 && usage.total() >= usage.small);
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub name: Arc<str>,
    /// Number of the cache in trace events. The number is unique among existing caches.
    pub number: u32,
    /// NUMA node of the cache's memory.
    pub node: usize,
    pub page_bytes: usize,
    /// Bytes in huge folios that are not pinned.
    pub huge: u64,
    /// Bytes in smaller folios that are not pinned.
    pub small: u64,
    /// Bytes in folios that are pinned or held, and so cannot be freed now.
    pub pinned: u64,
    /// Sum of the ranges that are locked in memory ([`Mapping::lock`](crate::mapping::Mapping::lock),
    /// [`View::lock`](crate::mapping::View::lock)), a part of `huge`, `small` and `locked`. A range that is locked twice
    /// counts twice.
    pub locked_ranges: u64,
    /// Bytes in unused pages.
    pub free: u64,
    /// Bytes of the pages' metadata, including the eviction order.
    pub frames: u64,
    /// Bytes of the nodes of the files' indices, and of the file structures.
    pub index: u64,
    /// Bytes of all folios of files, which the limit bounds.
    pub charged: u64,
    pub limit: u64,
    /// Bytes in dirty folios of files with a store.
    pub dirty: u64,
    /// Whether the cache uses reserved huge pages. If so, its bytes are not resident memory of the process, and in no
    /// published sum except `cache_hugetlb`.
    pub is_hugetlb: bool,
    /// Where the file of the cache's shared memory lies; `None` if its memory is not shared.
    pub shared: Option<SharedMemory>,
    /// Whether a walk over the pages or the files reached its time limit. If so, `pinned` and `index` may be too low.
    pub is_partial: bool,
}

impl Usage {
    /// Returns the sum of the fields from `huge` to `index`.
    pub fn total(&self) -> u64 {
        self.huge + self.small + self.pinned + self.free + self.frames + self.index
    }

    /// Returns the memory use of the pool with index `at`. All memory of the pool counts as free.
    fn of_pool(caches: &Caches, pool: &Pool, at: usize) -> Self {
        let (node, page_bytes) = (pool.node, pool.page.bytes());
        let (number, frames) = (at as u32, caches.frames_bytes_of(at, pool));
        let is_hugetlb = pool.is_hugetlb();
        let shared = pool.memory_file().map(|file| file.file_system().into());
        Self { number, node, page_bytes, frames, free: pool.filled_bytes(), is_hugetlb, shared, ..Self::default() }
    }
}

/// A time limit of a walk over pages or files. Reads the clock only at some of its checks.
struct Deadline {
    /// Time on the fine clock at which the limit is reached.
    ns: u64,
    /// Number of checks of the limit so far.
    checks: u32,
    is_over: bool,
}

impl Deadline {
    /// Number of checks between two readings of the clock. These checks take some microseconds.
    const CHECKS_PER_READING: u32 = 1 << 8;

    /// Creates a limit that is reached `ns` nanoseconds from now. With `u64::MAX`, the limit is never reached.
    fn after(ns: u64) -> Self {
        Self { ns: clock::fine_ns().saturating_add(ns), checks: 0, is_over: false }
    }

    /// Checks the time limit. Returns whether this check or an earlier one has found that the time is over.
    fn is_over(&mut self) -> bool {
        self.checks += 1;
        if self.checks.is_multiple_of(Self::CHECKS_PER_READING) {
            self.is_over |= clock::fine_ns() > self.ns;
        }
        self.is_over
    }
}

impl Inner {
    /// Returns the memory use of the cache. Walks over all pages and over all files; each of the two walks takes at
    /// most `most_ns`.
    fn usage(&self, most_ns: u64) -> Usage {
        let pool = self.pool;
        let mut usage = Usage {
            name: self.name.clone(),
            charged: self.charged_bytes.load(Relaxed),
            limit: self.limit_bytes,
            dirty: self.dirty_bytes(),
            locked_ranges: self.locked_ranges.load(Relaxed),
            ..Usage::of_pool(self.caches, pool, self.number as usize)
        };
        let (nodes, are_all_counted) = self.node_bytes(most_ns);
        usage.index = nodes + self.files_bytes();
        let (mut locked_huge, mut locked_small) = (0, 0);
        let mut deadline = Deadline::after(most_ns);
        pool.walk(|_, state| {
            let is_locked = match state.kind() {
                Kind::Live => state.pins() > 0,
                Kind::Busy | Kind::Frozen | Kind::Gone => true,
                Kind::Free | Kind::Tail => false,
            };
            let is_huge = self.is_huge(state.order());
            *if is_huge { &mut locked_huge } else { &mut locked_small } +=
                if is_locked { self.folio_bytes(state.order()) } else { 0 };
            !deadline.is_over()
        });
        // The counters are read at different times, so the subtractions saturate.
        let huge = self.huge_bytes.load(Relaxed);
        usage.huge = huge.saturating_sub(locked_huge);
        usage.small = usage.charged.saturating_sub(huge).saturating_sub(locked_small);
        usage.pinned = locked_huge + locked_small;
        usage.free = usage.free.saturating_sub(usage.huge + usage.small + usage.pinned);
        usage.is_partial = deadline.is_over || !are_all_counted;
        usage
    }

    /// Returns the bytes of the index nodes of all files, and whether all files were counted.
    fn node_bytes(&self, most_ns: u64) -> (u64, bool) {
        let (mut id, mut bytes, mut deadline) = (0, 0, Deadline::after(most_ns));
        // Takes one file at a time, without a lock: dropping the last reference to a file may drop its store.
        while let Some(file) = self.next_file(&mut id) {
            bytes += u64::from(file.tree.node_count()) * size_of::<Node>() as u64;
            if deadline.is_over() {
                return (bytes, false);
            }
        }
        (bytes, true)
    }

    /// Returns the bytes of the file structures, and of the list of files.
    fn files_bytes(&self) -> u64 {
        // An `Arc` adds two counters to each file.
        let each = size_of::<File>() + 2 * size_of::<usize>();
        let dirty = self.stored_files.load(Relaxed) as usize * size_of::<Dirty>();
        let bytes = self.files.with(|files| {
            let list = files.by_id.capacity() * size_of::<Weak<File>>() + files.free.capacity() * size_of::<u32>();
            list + dirty + (files.by_id.len() - files.free.len()) * each
        });
        bytes as u64
    }
}

impl PageCache {
    /// Returns the current memory use of the cache. Walks over all of its pages.
    pub fn usage(&self) -> Usage {
        self.0.usage(u64::MAX)
    }
}

impl Caches {
    /// Returns the memory use of each cache. Walks over all pages: some milliseconds for a gigabyte in small folios.
    pub fn usage(&self) -> Vec<Usage> {
        self.caches().map(|cache| cache.usage(u64::MAX)).collect()
    }

    /// Passes the memory use of each cache, of each idle pool and of spare index nodes to `show`, in about `most_ns`.
    /// No lock is held for more than a few stores. The values add up, except for concurrent changes.
    ///
    /// # Errors
    ///
    /// The first error of `show`, after which `show` is not called again.
    pub(crate) fn show<E>(&self, most_ns: u64, mut show: impl FnMut(Holder, &Usage) -> Result<(), E>) -> Result<(), E> {
        let first = self.inherited.load(Relaxed);
        let count = self.users.with(|users| users.len()).saturating_sub(first);
        // The time limit is divided among the pages and files of each cache, so that no cache uses up the time of the
        // others.
        let each_ns = most_ns / (2 * count.max(1)) as u64;
        let (mut nodes, mut is_partial) = (0, false);
        for at in first..first + count {
            let (pool, cache) = self.users.with(|users| (users[at].0, users[at].1.upgrade()));
            let Some(cache) = cache else {
                show(Holder::IdlePool, &Usage::of_pool(self, pool, at))?;
                continue;
            };
            let usage = cache.usage(each_ns);
            nodes += usage.index.saturating_sub(cache.files_bytes());
            is_partial |= usage.is_partial;
            show(Holder::Cache, &usage)?;
        }
        let index = self.forests.node_bytes().saturating_sub(nodes);
        show(Holder::SpareNodes, &Usage { index, is_partial, ..Usage::default() })
    }

    /// Returns the bytes of the file structures of all caches.
    pub(crate) fn files_bytes(&self) -> u64 {
        self.caches().map(|cache| cache.files_bytes()).sum()
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;
    use crate::mapping::PageCache;
    use crate::test_process;

    /// With a time limit of 0, a walk must visit only some of the pages, and its result must be marked as partial. With
    /// enough time, the result must equal that of `PageCache::usage`.
    #[test]
    fn a_usage_walk_ends_at_its_time_limit() {
        let caches = test_process::caches();
        let cache = PageCache::builder("many").limit(64 << 20).huge(false).build_in(caches).unwrap();
        let file = cache.create().unwrap();
        let pages = 4 * Deadline::CHECKS_PER_READING as usize;
        file.write_at(&vec![1; pages * cache.page().bytes()], 0).unwrap();
        let pin = file.pin((pages as u64 - 1) * cache.page().bytes() as u64).unwrap();
        let shown = |most_ns| {
            let mut shown = Vec::new();
            let all = caches.show(most_ns, |holder, usage| {
                shown.push((holder, usage.clone()));
                Ok::<_, std::fmt::Error>(())
            });
            all.map(|()| shown).unwrap()
        };
        let partial = shown(0);
        let Usage { is_partial, pinned, small, charged, .. } = partial[0].1;
        assert!(is_partial && pinned == 0 && small == charged, "{partial:?}");
        let complete = shown(1 << 40);
        assert_eq!(complete[0], (Holder::Cache, cache.usage()));
        assert_eq!(complete[0].1.pinned, cache.page().bytes() as u64);
        assert_eq!((complete.len(), complete[1].0), (2, Holder::SpareNodes));
        drop(pin);
    }
}
