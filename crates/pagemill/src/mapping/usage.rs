//! What caches hold, each by its name: for the program, and for other processes.
//!
//! What is huge and what is charged is counted where it changes; only for what is pinned or held all pages are walked, as far as
//! the time reaches.

use super::File;
use super::cache::{Cache, Caches, Inner};
use super::dirty::Dirty;
use crate::folio::Pool;
use crate::folio::word::Kind;
use crate::sync::Relaxed;
use pagemill_sys::clock;
use std::sync::{Arc, Weak};

/// Whose memory a [`Usage`] is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    /// A cache's.
    Cache,
    /// That of a cache that has ended: free, kept for the next one.
    IdlePool,
    /// Nodes of indices that no file uses, kept for the next. They lie on no node of memory in particular.
    SpareNodes,
}

/// What a cache holds, in bytes: the rows from `huge` to `index` add up to what it has in memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub name: Arc<str>,
    /// Which one, in events of the trace. That of a cache that has ended may come again.
    pub number: u32,
    /// Of memory.
    pub node: usize,
    pub page_bytes: usize,
    /// In huge folios that nobody has pinned.
    pub huge: u64,
    /// In smaller ones.
    pub small: u64,
    /// In folios that somebody has pinned or holds: they stay for now.
    pub locked: u64,
    /// Pages without a use.
    pub free: u64,
    /// Metadata of the pages, with the order in which they make room.
    pub frames: u64,
    /// Nodes of the index of its files, and what stands for each file.
    pub index: u64,
    /// What counts against the limit: folios of files.
    pub charged: u64,
    pub limit: u64,
    /// In folios of files with a store that were written to since they were written back last.
    pub dirty: u64,
    /// It lies in reserved huge pages: not resident, and in no sum that the process publishes but `cache_hugetlb`.
    pub is_hugetlb: bool,
    /// Not all was looked at, for lack of time: more may be locked, and in the index.
    pub is_partial: bool,
}

impl Usage {
    /// All of it.
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

/// A time that is asked for now and then.
struct Deadline {
    ns: Option<u64>,
    asked: u32,
    is_over: bool,
}

impl Deadline {
    /// Things that are looked at between two looks at the clock: some microseconds.
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
    /// Looks at pages and files for at most `most_ns` each.
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
        // Counted a moment apart: nothing may be less than nothing.
        let huge = self.huge_bytes.load(Relaxed);
        usage.huge = huge.saturating_sub(locked_huge);
        usage.small = usage.charged.saturating_sub(huge).saturating_sub(locked_small);
        usage.locked = locked_huge + locked_small;
        usage.free = usage.free.saturating_sub(usage.huge + usage.small + usage.locked);
        usage.is_partial = deadline.is_over || !are_all_known;
        usage
    }

    /// Bytes of the nodes of its files' indices, and whether all files were looked at.
    fn node_bytes(&self, most_ns: Option<u64>) -> (u64, bool) {
        let (mut id, mut bytes, mut deadline) = (0, 0, Deadline::within(most_ns));
        // One by one: the last who has a file may drop its store, which is not done under a lock.
        while let Some(file) = self.next_file(&mut id) {
            bytes += file.node_bytes();
            if deadline.is_over() {
                return (bytes, false);
            }
        }
        (bytes, true)
    }

    /// Bytes of what stands for each file, and of the list of them.
    fn files_bytes(&self) -> u64 {
        // An `Arc` counts its holders in two words.
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
    /// What it holds now. Walks all pages.
    pub fn usage(&self) -> Usage {
        self.0.usage(None)
    }
}

impl Caches {
    /// What each cache holds. Walks all pages: some milliseconds for a gigabyte in small folios.
    pub fn usage(&self) -> Vec<Usage> {
        let mut at = self.inherited.load(Relaxed);
        std::iter::from_fn(|| self.next_cache(&mut at)).map(|cache| cache.usage(None)).collect()
    }

    /// Shows all that caches hold, holder by holder, in about `most_ns`: no lock is held for longer than some stores take. What
    /// is shown adds up, but for what changes meanwhile.
    ///
    /// # Errors
    ///
    /// What `show` says; the rest is not shown then.
    pub(crate) fn show<E>(&self, most_ns: u64, mut show: impl FnMut(Holder, &Usage) -> Result<(), E>) -> Result<(), E> {
        let first = self.inherited.load(Relaxed);
        let count = self.books.with(|books| books.len()).saturating_sub(first);
        // Pages, then files, of each: none takes the time of the others.
        let each_ns = most_ns / (2 * count.max(1)) as u64;
        let (mut nodes, mut is_partial) = (0, false);
        for at in first..first + count {
            let (pool, cache) = self.books.with(|books| (books[at].0, books[at].1.upgrade()));
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

    /// Bytes of what stands for the files of all caches.
    pub(super) fn files_bytes(&self) -> u64 {
        let mut at = self.inherited.load(Relaxed);
        std::iter::from_fn(|| self.next_cache(&mut at)).map(|cache| cache.files_bytes()).sum()
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;
    use crate::Pagemill;
    use crate::mapping::Settings;

    /// Without time only a part is looked at, which is said; with time all of it is as the program sees it.
    #[test]
    fn looks_end_in_time() {
        let caches = Pagemill::for_test().caches;
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
