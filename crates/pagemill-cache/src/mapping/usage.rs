//! Memory use of caches, each by its name: for the program, and for other processes.
//!
//! Huge and charged bytes are counted as they change. Finding pinned and held folios takes a walk over all pages, as
//! far as the time limit allows.

use super::File;
use super::cache::{Cache, Caches, Inner};
use super::dirty::Dirty;
use crate::folio::Pool;
use crate::folio::word::Kind;
use pagemill_core::sync::Relaxed;
use pagemill_sys::clock;
use std::sync::{Arc, Weak};

/// The holder of the memory in a [`Usage`].
///
/// Example: [`Usage`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    /// A cache.
    Cache,
    /// The pool of a cache that has ended: free memory, kept for the next one.
    IdlePool,
    /// Nodes of indices that no file uses, kept for later ones. They belong to no particular NUMA node.
    SpareNodes,
}

/// Memory of a cache in bytes. The rows from `huge` to `index` add up to its memory.
///
/// ```
/// use pagemill::{Pagemill, mapping::Settings};
///
/// let cache = Pagemill::of_process()?.caches.make(Settings::new("tiles", 64 << 20))?;
/// let file = cache.create()?;
/// file.write_at(&[1; 100], 0)?;
/// let usage = cache.usage();
/// assert!(usage.small > 0 && usage.total() >= usage.small);
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub name: Arc<str>,
    /// Number of the cache in trace events. A later cache may reuse it.
    pub number: u32,
    /// NUMA node of its memory.
    pub node: usize,
    pub page_bytes: usize,
    /// In huge folios that are not pinned.
    pub huge: u64,
    /// In smaller folios that are not pinned.
    pub small: u64,
    /// In folios that are pinned or held: they cannot be freed now.
    pub locked: u64,
    /// In unused pages.
    pub free: u64,
    /// Metadata of the pages, including the eviction order.
    pub frames: u64,
    /// Nodes of the files' indices, and one structure for each file.
    pub index: u64,
    /// Charged to the limit: folios of files.
    pub charged: u64,
    pub limit: u64,
    /// In dirty folios of files with a store.
    pub dirty: u64,
    /// The cache lies in reserved huge pages: not resident, and in no published sum of the process except
    /// `cache_hugetlb`.
    pub is_hugetlb: bool,
    /// The walk ran out of time: `locked` and `index` may be too low.
    pub is_partial: bool,
}

impl Usage {
    /// Returns the sum of the rows.
    pub fn total(&self) -> u64 {
        self.huge + self.small + self.locked + self.free + self.frames + self.index
    }

    fn of_pool(caches: &Caches, pool: &Pool, at: usize) -> Self {
        let (node, page_bytes) = (pool.node(), pool.page().bytes());
        let (number, frames) = (at as u32, caches.frames_bytes_of(at, pool));
        let is_hugetlb = pool.is_hugetlb();
        Self { number, node, page_bytes, frames, free: pool.filled_bytes(), is_hugetlb, ..Self::default() }
    }
}

/// A time limit that checks the clock only now and then.
struct Deadline {
    ns: Option<u64>,
    asked: u32,
    is_over: bool,
}

impl Deadline {
    /// Calls between two readings of the clock: some microseconds.
    const EVERY: u32 = 1 << 8;

    fn within(ns: Option<u64>) -> Self {
        Self { ns: ns.map(|ns| clock::fine_ns().saturating_add(ns)), asked: 0, is_over: false }
    }

    fn is_over(&mut self) -> bool {
        self.asked += 1;
        if let Some(ns) = self.ns
            && self.asked.is_multiple_of(Self::EVERY)
        {
            self.is_over |= clock::fine_ns() > ns;
        }
        self.is_over
    }
}

impl Inner {
    /// Walks pages and files, for at most `most_ns` each.
    fn usage(&self, most_ns: Option<u64>) -> Usage {
        let pool = self.pool;
        let mut usage = Usage {
            name: self.name.clone(),
            charged: self.charged_bytes.load(Relaxed),
            limit: self.limit_bytes,
            dirty: self.dirty_bytes(),
            ..Usage::of_pool(self.caches, pool, self.number as usize)
        };
        let (nodes, are_all_known) = self.node_bytes(most_ns);
        usage.index = nodes + self.files_bytes();
        let (mut locked_huge, mut locked_small) = (0, 0);
        let mut deadline = Deadline::within(most_ns);
        pool.walk(|_, state| {
            let is_locked = match state.kind() {
                Kind::Live => state.pins() > 0,
                Kind::Busy | Kind::Still | Kind::Gone => true,
                Kind::Free | Kind::Tail => false,
            };
            let is_huge = self.is_huge(state.order());
            *if is_huge { &mut locked_huge } else { &mut locked_small } +=
                if is_locked { self.folio_bytes(state.order()) } else { 0 };
            !deadline.is_over()
        });
        // The counters are read at different times, so differences must not underflow.
        let huge = self.huge_bytes.load(Relaxed);
        usage.huge = huge.saturating_sub(locked_huge);
        usage.small = usage.charged.saturating_sub(huge).saturating_sub(locked_small);
        usage.locked = locked_huge + locked_small;
        usage.free = usage.free.saturating_sub(usage.huge + usage.small + usage.locked);
        usage.is_partial = deadline.is_over || !are_all_known;
        usage
    }

    /// Returns the bytes of its files' index nodes, and whether all files were counted.
    fn node_bytes(&self, most_ns: Option<u64>) -> (u64, bool) {
        let (mut id, mut bytes, mut deadline) = (0, 0, Deadline::within(most_ns));
        // One file at a time, without a lock: dropping the last reference to a file may drop its store.
        while let Some(file) = self.next_file(&mut id) {
            bytes += file.node_bytes();
            if deadline.is_over() {
                return (bytes, false);
            }
        }
        (bytes, true)
    }

    /// Returns the bytes of the file structures, and of the file list.
    fn files_bytes(&self) -> u64 {
        // An `Arc` has two counters.
        let each = size_of::<File>() + 2 * size_of::<usize>();
        let dirty = self.stored_files.load(Relaxed) as usize * size_of::<Dirty>();
        let bytes = self.files.with(|files| {
            let list = files.by_id.capacity() * size_of::<Weak<File>>() + files.free.capacity() * size_of::<u32>();
            list + dirty + (files.by_id.len() - files.free.len()) * each
        });
        bytes as u64
    }
}

impl Cache {
    /// Returns the current memory use. Walks all pages.
    pub fn usage(&self) -> Usage {
        self.0.usage(None)
    }
}

impl Caches {
    /// Returns the memory use of each cache. Walks all pages: some milliseconds for a gigabyte in small folios.
    pub fn usage(&self) -> Vec<Usage> {
        let mut at = self.inherited.load(Relaxed);
        std::iter::from_fn(|| self.next_cache(&mut at)).map(|cache| cache.usage(None)).collect()
    }

    /// Passes the memory of all caches to `show`, holder by holder, in about `most_ns`. Holds no lock for longer than a
    /// few stores. The values add up, except for concurrent changes.
    ///
    /// # Errors
    ///
    /// The first error of `show`; the remaining holders are skipped then.
    pub(crate) fn show<E>(&self, most_ns: u64, mut show: impl FnMut(Holder, &Usage) -> Result<(), E>) -> Result<(), E> {
        let first = self.inherited.load(Relaxed);
        let count = self.users.with(|users| users.len()).saturating_sub(first);
        // The time is divided among the pages and files of each cache, so that no cache uses up the others' time.
        let each_ns = most_ns / (2 * count.max(1)) as u64;
        let (mut nodes, mut is_partial) = (0, false);
        for at in first..first + count {
            let (pool, cache) = self.users.with(|users| (users[at].0, users[at].1.upgrade()));
            let Some(cache) = cache else {
                show(Holder::IdlePool, &Usage::of_pool(self, pool, at))?;
                continue;
            };
            let usage = cache.usage(Some(each_ns));
            nodes += usage.index.saturating_sub(cache.files_bytes());
            is_partial |= usage.is_partial;
            show(Holder::Cache, &usage)?;
        }
        let index = self.forests.node_bytes().saturating_sub(nodes);
        show(Holder::SpareNodes, &Usage { index, is_partial, ..Usage::default() })
    }

    /// Returns the bytes of the file structures of all caches.
    pub(super) fn files_bytes(&self) -> u64 {
        let mut at = self.inherited.load(Relaxed);
        std::iter::from_fn(|| self.next_cache(&mut at)).map(|cache| cache.files_bytes()).sum()
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;
    use crate::mapping::Settings;
    use crate::test_process::TestProcess;

    /// Without time only a part is walked, and the result is marked as partial. With time, the result equals that of
    /// the program's own call.
    #[test]
    fn looks_end_in_time() {
        let caches = TestProcess::for_test().caches;
        let cache = caches.make(Settings { use_huge: false, ..Settings::new("many", 64 << 20) }).unwrap();
        let file = cache.create().unwrap();
        let pages = 4 * Deadline::EVERY as usize;
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
        let in_part = shown(0);
        let Usage { is_partial, locked, small, charged, .. } = in_part[0].1;
        assert!(is_partial && locked == 0 && small == charged, "{in_part:?}");
        let whole = shown(1 << 40);
        assert_eq!(whole[0], (Holder::Cache, cache.usage()));
        assert_eq!(whole[0].1.locked, cache.page().bytes() as u64);
        assert_eq!((whole.len(), whole[1].0), (2, Holder::SpareNodes));
        drop(pin);
    }
}
