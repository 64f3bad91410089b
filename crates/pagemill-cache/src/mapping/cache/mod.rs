//! Caches: files that share a software page size, a limit, a policy and a name; and the list of all caches of a
//! process.

pub(crate) mod config;
pub(crate) mod listing;
mod part;
pub(crate) mod source;
pub(crate) mod usage;

use crate::folio::{NewFolio, Owner, Pool};
use crate::mapping::cache::config::Builder;
use crate::mapping::evict::order::Order;
use crate::mapping::huge::worker::Worker;
use crate::mapping::inflight::InflightTable;
use crate::mapping::policy::{Always, Ask, Choice, Policy};
use crate::mapping::writeback::flush::{Balance, Flusher};
use crate::mapping::writeback::sync::failed;
use crate::mapping::{File, Mapping};
use pagemill_core::arena::{Arena, HugeUse, place};
use pagemill_core::error::{Error, Result};
use pagemill_core::reclaim::helper::Helper;
use pagemill_core::reclaim::{Shrinker, Urgency};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{AtomicU32, AtomicU64, AtomicUsize, Guarded, Relaxed};
use pagemill_core::units::{BLOCK_BYTES, PageSize};
use pagemill_store::Store;
use pagemill_store::ring::RingWaker;
use pagemill_sys::thread;
use pagemill_xarray::{Forest, Forests};
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

/// Maximum number of caches of a process. A new cache may reuse the pool of a dropped cache that had the same page size
/// and at least the same limit.
pub const MAX_CACHES: usize = 256;

/// All caches of a process.
///
/// Example: [`PageCache`].
pub struct Caches {
    pub(crate) arena: &'static Arena,
    /// Makes chunks resident before they are needed.
    pub(crate) helper: &'static Helper,
    /// Provides the allocator of index nodes for each new cache.
    pub(crate) forests: &'static dyn Forests,
    /// The pools in the order of their creation. A pool is never destroyed.
    pub(crate) pools: [OnceLock<&'static Pool>; MAX_CACHES],
    /// The eviction order of each pool, by the pool's index.
    orders: [OnceLock<&'static Order>; MAX_CACHES],
    /// The pools, each with its current cache.
    pub(crate) users: Guarded<Vec<(&'static Pool, Weak<Inner>)>>,
    /// Number of pools inherited from a parent process. Such a pool is never used, because threads of the parent may
    /// hold its locks forever.
    pub(crate) inherited: AtomicUsize,
    /// The background thread that collapses small folios and splits sparse huge ones.
    pub(crate) worker: Worker,
    /// The background thread that writes dirty pages back.
    pub(crate) flusher: Flusher,
    /// Wakers of queues, each with the pool whose memory the queue may have registered.
    pub(crate) wakers: Guarded<Vec<(&'static Pool, RingWaker)>>,
}

impl Caches {
    /// Creates an empty list of caches. Memory for index nodes is allocated when the first cache is created.
    pub fn new(arena: &'static Arena, helper: &'static Helper, forests: &'static dyn Forests) -> Self {
        Self {
            arena,
            helper,
            forests,
            pools: [const { OnceLock::new() }; MAX_CACHES],
            orders: [const { OnceLock::new() }; MAX_CACHES],
            users: Guarded::new(Vec::new()),
            inherited: AtomicUsize::new(0),
            worker: Worker::default(),
            flusher: Flusher::default(),
            wakers: Guarded::new(Vec::new()),
        }
    }

    pub(crate) fn make(&'static self, settings: Builder) -> Result<PageCache> {
        let limit_bytes = settings.limit_bytes();
        let page_bytes = settings.page.bytes() as u64;
        if limit_bytes < page_bytes {
            return Err(Error::BadLimit { limit_bytes, page_bytes });
        }
        let balance = Balance::new(&settings.writeback, limit_bytes)?;
        let nodes = self.forests.forest()?;
        // One lock for both steps, so that no other thread finds the new pool without a cache.
        self.users.with(|users| {
            let at = self.pool_index_for(users, &settings)?;
            let (pool, user) = &mut users[at];
            let order = self.order_of_pool(at, pool)?;
            pool.allow_huge(settings.use_huge);
            pool.set_cache_limit(limit_bytes);
            let inner = Arc::new(Inner {
                caches: self,
                nodes,
                pool,
                number: at as u32,
                generation: self.arena.generation(),
                name: settings.name.into(),
                limit_bytes,
                charged_bytes: AtomicU64::new(0),
                huge_bytes: AtomicU64::new(0),
                dirty_bytes: AtomicU64::new(0),
                balance,
                use_huge: AtomicBool::new(settings.use_huge),
                may_split: settings.may_split && !pool.is_hugetlb(),
                policy: settings.policy,
                timeout: settings.timeout,
                order,
                is_order_started: Guarded::new(false),
                stored_files: AtomicU32::new(0),
                evict_after_ns: AtomicU64::new(0),
                evicting_threads: AtomicU32::new(0),
                split_sparse_after_ns: AtomicU64::new(0),
                files: Guarded::new(Files::default()),
                inflight: InflightTable::default(),
                ahead_bytes: AtomicU64::new(0),
                locked_ranges: AtomicU64::new(0),
            });
            *user = Arc::downgrade(&inner);
            stats::add(Counter::Caches, 1);
            Ok(PageCache(inner))
        })
    }

    /// Returns the eviction order of the pool with index `at`.
    fn order_of_pool(&self, at: usize, pool: &Pool) -> Result<&'static Order> {
        if let Some(order) = self.orders[at].get() {
            return Ok(order);
        }
        let order = place(Order::new((pool.max_bytes() >> pool.page_shift) as usize)?)?;
        let _ = self.orders[at].set(order);
        Ok(order)
    }

    /// Returns the pools that this process created. Excludes pools inherited from a parent process.
    pub(crate) fn pools(&self) -> impl Iterator<Item = &'static Pool> {
        self.pools.iter().skip(self.inherited.load(Relaxed)).map_while(|pool| pool.get().copied())
    }

    /// Makes the chunks resident that growing pools have requested, and drops the requests of pools whose cache has
    /// ended. A step of the helper thread. Returns whether there was a request.
    pub(crate) fn grow_ahead(&self) -> bool {
        let mut was_requested = false;
        for (at, pool) in (self.inherited.load(Relaxed)..).zip(self.pools()) {
            if !pool.is_growth_requested() {
                continue;
            }
            was_requested = true;
            let has_cache = self.users.with(|users| users[at].1.strong_count() > 0);
            if !has_cache {
                pool.drop_growth_request();
                continue;
            }
            // The threads of the program that submit and complete I/O come first.
            if !thread::with_normal_priority(|| pool.grow_ahead()) {
                stats::set(Counter::HelpersPreferred, 0);
            }
        }
        was_requested
    }

    /// Prevents the start of background threads from now on. The program then collapses small folios with
    /// [`PageCache::collapse_waiting`], splits sparse huge ones with [`PageCache::split_sparse_waiting`], and writes
    /// back with [`PageCache::write_back_due`].
    pub fn collapse_by_hand(&self) {
        self.worker.is_thread_disabled.store(true, Relaxed);
    }

    /// Returns the resident bytes of the frames and eviction orders of all pools.
    pub(crate) fn frames_bytes(&self) -> u64 {
        (self.inherited.load(Relaxed)..).zip(self.pools()).map(|(at, pool)| self.frames_bytes_of(at, pool)).sum()
    }

    /// Returns the resident bytes of a pool's frames and eviction order.
    pub(crate) fn frames_bytes_of(&self, at: usize, pool: &Pool) -> u64 {
        let order = self.orders[at].get().map_or(0, |order| order.resident_bytes(pool.pages() as usize));
        pool.frames_bytes() + order
    }
}

impl Shrinker for Caches {
    fn name(&self) -> &'static str {
        "caches"
    }

    fn may_nest(&self) -> bool {
        true
    }

    fn giveable_bytes(&self) -> u64 {
        self.pools().map(Pool::giveable_bytes).sum()
    }

    /// Returns free chunks to the system. With [`Urgency::Limit`], first evicts or splits folios if there are too few
    /// free chunks. If too little was freed, requests that queues end their leases of free chunks.
    fn shrink(&self, want_bytes: u64, urgency: Urgency) -> u64 {
        let mut freed = self.shrink_free(want_bytes);
        if urgency == Urgency::Limit && freed < want_bytes {
            let mut caches = self.caches();
            while freed < want_bytes
                && let Some(cache) = caches.next()
            {
                // Reserved huge pages are not returned to the system, so their caches are skipped.
                if !cache.pool.is_hugetlb() && cache.make_room(want_bytes - freed) {
                    freed += self.shrink_free(want_bytes - freed);
                }
            }
        }
        if freed < want_bytes {
            self.pools().for_each(|pool| self.request_lease_end(pool));
        }
        freed
    }
}

impl Caches {
    /// Returns the caches that this process created. No lock is held between two of them.
    pub(crate) fn caches(&self) -> impl Iterator<Item = Arc<Inner>> {
        let mut at = self.inherited.load(Relaxed);
        std::iter::from_fn(move || self.next_cache(&mut at))
    }

    /// Returns the first cache at index `at` or later, and sets `at` to the index after that cache.
    pub(crate) fn next_cache(&self, at: &mut usize) -> Option<Arc<Inner>> {
        self.users.with(|users| {
            loop {
                let cache = users.get(*at)?.1.upgrade();
                *at += 1;
                if cache.is_some() {
                    return cache;
                }
            }
        })
    }

    /// Registers the waker of a queue that may register memory of the pool. To get that memory back, reclaim wakes the
    /// queue.
    pub(crate) fn add_waker(&self, pool: &'static Pool, waker: &RingWaker) {
        let (mut new, mut room) = (Some((pool, waker.clone())), Vec::new());
        // The list is enlarged outside of the lock, because an allocation may start reclaim.
        while new.is_some() {
            room.reserve(self.wakers.with(|wakers| wakers.len()) + 1);
            self.wakers.with(|wakers| {
                if wakers.len() == wakers.capacity() && wakers.len() < room.capacity() {
                    room.append(wakers);
                    std::mem::swap(wakers, &mut room);
                }
                if wakers.len() < wakers.capacity() {
                    wakers.extend(new.take());
                }
            });
        }
    }

    /// Removes the waker of a queue that ends.
    pub(crate) fn remove_waker(&self, waker: &RingWaker) {
        let own = self.wakers.with(|wakers| {
            let at = wakers.iter().position(|(_, known)| known.is(waker))?;
            Some(wakers.swap_remove(at))
        });
        drop(own);
    }

    /// Requests that queues release the free memory of the pool, as far as they have registered it with their rings.
    /// Wakes these queues.
    fn request_lease_end(&self, pool: &'static Pool) {
        if pool.request_lease_end() {
            self.wakers.with(|wakers| {
                let own = wakers.iter().filter(|(known, _)| std::ptr::eq(*known, pool));
                own.for_each(|(_, waker)| waker.wake());
            });
        }
    }

    /// Returns free chunks to the system. Begins with the pools of which no page is in use.
    fn shrink_free(&self, want_bytes: u64) -> u64 {
        let mut freed = 0;
        for is_idle in [true, false] {
            for pool in self.pools().filter(|pool| pool.is_idle() == is_idle) {
                if freed < want_bytes {
                    freed += pool.shrink(want_bytes - freed);
                }
            }
        }
        freed
    }
}

/// The files of a cache by id, and the free ids.
#[derive(Default)]
pub(crate) struct Files {
    /// The file of each id. If the id is free, the reference is dead.
    pub by_id: Vec<Weak<File>>,
    /// Ids without a file, for the next files.
    pub free: Vec<u32>,
}

/// The state that a cache, its files and its clones share.
pub(crate) struct Inner {
    pub(crate) caches: &'static Caches,
    /// Allocator of the index nodes of the cache's files.
    pub(crate) nodes: &'static Forest,
    pub(crate) pool: &'static Pool,
    /// Index of the cache's pool in [`Caches`]. No two caches that exist at the same time have the same number.
    pub(crate) number: u32,
    /// Fork generation of the process that created the cache ([`Inner::check`]).
    pub(crate) generation: u16,
    pub(crate) name: Arc<str>,
    pub(crate) limit_bytes: u64,
    /// Total bytes of the cache's folios, at most `limit_bytes`.
    pub(crate) charged_bytes: AtomicU64,
    /// The part of `charged_bytes` in huge folios.
    pub(crate) huge_bytes: AtomicU64,
    /// Total bytes of dirty folios of files with a store.
    pub(crate) dirty_bytes: AtomicU64,
    /// Limits of the cache's dirty bytes, and the state of its background writeback.
    pub(crate) balance: Balance,
    use_huge: AtomicBool,
    pub(crate) may_split: bool,
    pub(crate) policy: Box<dyn Policy>,
    pub(crate) timeout: Option<Duration>,
    /// The eviction order of the cache's folios.
    pub(crate) order: &'static Order,
    /// Whether the eviction order was reset for this cache. Creating the cache's first file with a store resets it.
    is_order_started: Guarded<bool>,
    /// Number of files with a store.
    pub(crate) stored_files: AtomicU32,
    /// Time before which no eviction is attempted, because the last attempt found nothing to evict.
    pub(crate) evict_after_ns: AtomicU64,
    /// Number of threads that are looking for a folio to evict, or evicting one.
    pub(crate) evicting_threads: AtomicU32,
    /// Time before which no sparse huge folio is split to free memory, because the last attempt freed nothing.
    pub(crate) split_sparse_after_ns: AtomicU64,
    pub(crate) files: Guarded<Files>,
    /// The in-flight reads of the cache's files.
    pub(crate) inflight: InflightTable,
    /// Bytes that in-flight readahead has requested.
    pub(crate) ahead_bytes: AtomicU64,
    /// Sum of the ranges that files and views have locked.
    pub(crate) locked_ranges: AtomicU64,
}

impl Inner {
    /// Returns an error in a fork child of the process that created the cache. The child has copies of the parent's
    /// locks and pins, but not the threads that would release them.
    #[inline]
    pub fn check(&self) -> Result<()> {
        if self.generation == self.caches.arena.generation() { Ok(()) } else { Err(Self::parent_cache_error()) }
    }

    /// Returns the error for a cache of the parent process.
    #[cold]
    fn parent_cache_error() -> Error {
        Error::WrongState { what: "the cache belongs to the parent process: a fork child must create its own" }
    }

    /// Allocates and charges a folio of 2^`order` pages, which the caller owns exclusively.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`].
    pub fn allocate(&self, order: u8) -> Result<NewFolio> {
        self.allocate_replacement(order, 0)
    }

    /// Allocates up to `most` free pages that have memory, as far as the limit allows. Calls `taken` with each page.
    pub fn allocate_more(&self, most: usize, taken: impl FnMut(NewFolio)) {
        let page_bytes = self.folio_bytes(0);
        // Charges no more than fits under the limit: a larger temporary charge would make allocations of other threads
        // fail.
        let room = self.limit_bytes.saturating_sub(self.charged_bytes.load(Relaxed)) / page_bytes;
        let most = most.min(room as usize);
        let wanted = page_bytes * most as u64;
        if self.charge(wanted).is_ok() {
            let bytes = page_bytes * self.pool.allocate_free_pages(most, taken) as u64;
            debug_assert!(bytes <= wanted, "no more pages were allocated than wanted");
            self.discharge(wanted - bytes);
            self.update_counters(0, bytes, stats::add);
        }
    }

    /// Allocates `max_pages` contiguous pages, within the limit. If no run of free pages is that long and the pool has
    /// less memory than the limit, makes a new chunk resident for them. If the pool cannot grow, allocates fewer
    /// contiguous pages, but at least `min_pages`. Returns the page numbers.
    pub fn allocate_contiguous(&self, max_pages: u32, min_pages: u32) -> Option<Range<u32>> {
        debug_assert!(min_pages > 0 && min_pages <= max_pages);
        let page_bytes = self.folio_bytes(0);
        self.charge(page_bytes * u64::from(max_pages)).ok()?;
        let take = |min_pages| self.pool.allocate_free_contiguous(max_pages, min_pages);
        let grow_and_take = || {
            let may_grow = self.pool.filled_bytes() < self.limit_bytes;
            may_grow.then(|| self.pool.add_free_chunk().ok()).flatten()?;
            take(max_pages)
        };
        let pages = take(max_pages).or_else(grow_and_take).or_else(|| take(min_pages));
        let taken_bytes = page_bytes * pages.as_ref().map_or(0, ExactSizeIterator::len) as u64;
        self.discharge(page_bytes * u64::from(max_pages) - taken_bytes);
        if taken_bytes > 0 {
            self.update_counters(0, taken_bytes, stats::add);
        }
        pages
    }

    /// Charges bytes to the cache. Returns an error if the charge would exceed the cache's limit.
    fn charge(&self, bytes: u64) -> Result<()> {
        let mut seen = self.charged_bytes.load(Relaxed);
        loop {
            if bytes > self.limit_bytes.saturating_sub(seen) {
                return Err(Error::NoMemory { wanted_bytes: bytes, used_bytes: seen, limit_bytes: self.limit_bytes });
            }
            match self.charged_bytes.compare_exchange(seen, seen + bytes, Relaxed, Relaxed) {
                Ok(_) => return Ok(()),
                Err(now) => seen = now,
            }
        }
    }

    /// Ends the charge of `bytes`.
    fn discharge(&self, bytes: u64) {
        let charged = self.charged_bytes.fetch_sub(bytes, Relaxed);
        debug_assert!(charged >= bytes, "only charged bytes are discharged");
    }

    /// Returns whether folios of 2^`order` pages are huge: a whole chunk, or a page of a block or more.
    pub(crate) fn is_huge(&self, order: u8) -> bool {
        order > 0 && order == self.pool.chunk_order || self.pool.page.bytes() >= BLOCK_BYTES
    }

    /// Applies `change` (`stats::add` or `stats::sub`) to the process's counter of huge or small folios. Excludes
    /// reserved huge pages, for which the process is not charged.
    fn update_counters(&self, order: u8, bytes: u64, change: fn(Counter, u64)) {
        if !self.pool.is_hugetlb() {
            change(if self.is_huge(order) { Counter::CacheHuge } else { Counter::CacheSmall }, bytes);
        }
    }

    /// Allocates a folio that replaces smaller folios of `present_bytes` in total. Charges only the difference, so that
    /// the limit need not have room for the old folios and the new one.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`].
    pub fn allocate_replacement(&self, order: u8, present_bytes: u64) -> Result<NewFolio> {
        debug_assert!(present_bytes <= self.folio_bytes(order), "the replaced folios fit");
        let more = self.folio_bytes(order) - present_bytes;
        self.charge(more)?;
        let taken = self.pool.allocate(order).inspect_err(|_| self.discharge(more))?;
        self.count_allocated(order);
        Ok(taken)
    }

    /// Reverts [`Inner::allocate_replacement`]: frees the folio, and ends the charge that the allocation has added.
    pub fn free_replacement(&self, number: u32, order: u8, present_bytes: u64) {
        self.count_freed(order);
        self.discharge(self.folio_bytes(order) - present_bytes);
        self.pool.free(number, order);
    }

    /// Frees a page that a larger folio has replaced. The page's charge now counts for the larger folio.
    pub fn free_replaced(&self, number: u32) {
        self.count_freed(0);
        self.pool.free(number, 0);
    }

    /// Frees a folio that the caller owns, and ends its charge.
    pub fn free(&self, number: u32, order: u8) {
        self.free_replacement(number, order, 0);
    }

    /// As [`Inner::free`], for several folios, with their page numbers and orders.
    pub fn free_several(&self, folios: impl Iterator<Item = (u32, u8)> + Clone) {
        let (mut bytes, mut small_bytes) = (0, 0);
        for (_, order) in folios.clone() {
            bytes += self.folio_bytes(order);
            if self.is_huge(order) {
                self.count_freed(order);
            } else {
                small_bytes += self.folio_bytes(order);
            }
        }
        if small_bytes > 0 {
            self.update_counters(0, small_bytes, stats::sub);
        }
        self.discharge(bytes);
        self.pool.free_several(folios);
    }

    /// Adds a folio of 2^`order` pages to the statistics, and to `huge_bytes` if the folio is huge.
    fn count_allocated(&self, order: u8) {
        let bytes = self.folio_bytes(order);
        self.update_counters(order, bytes, stats::add);
        if self.is_huge(order) {
            self.huge_bytes.fetch_add(bytes, Relaxed);
        }
    }

    /// Subtracts a folio of 2^`order` pages from the statistics, and from `huge_bytes` if the folio is huge.
    fn count_freed(&self, order: u8) {
        let bytes = self.folio_bytes(order);
        self.update_counters(order, bytes, stats::sub);
        if self.is_huge(order) {
            let huge = self.huge_bytes.fetch_sub(bytes, Relaxed);
            debug_assert!(huge >= bytes, "only counted huge folios are freed");
        }
    }

    /// Updates the statistics after a split of a huge folio.
    pub fn count_split(&self) {
        let bytes = self.folio_bytes(self.pool.chunk_order);
        self.count_freed(self.pool.chunk_order);
        self.update_counters(0, bytes, stats::add);
    }

    /// Returns the bytes of a folio of 2^`order` pages.
    #[inline]
    pub fn folio_bytes(&self, order: u8) -> u64 {
        (self.pool.page.bytes() as u64) << order
    }

    /// Returns whether the cache may make huge folios: as the program has set, unless `pagemill huge` has set another
    /// choice for the process.
    pub fn is_huge_allowed(&self) -> bool {
        self.caches.arena.allows_huge(self.use_huge.load(Relaxed))
    }

    /// Returns the folio size for a range: the choice of the policy, unless `pagemill huge PID always` has set huge
    /// folios for the process.
    pub fn choose(&self, ask: &Ask) -> Choice {
        let is_always = self.caches.arena.huge_use() == HugeUse::Always;
        if is_always { Always.choose(ask) } else { self.policy.choose(ask) }
    }

    /// Unpins a folio. Frees it if this was the last pin of a folio that was removed from its file.
    #[inline]
    pub fn unpin(&self, number: u32) {
        if self.pool.word(number).unpin() {
            self.free(number, self.pool.word(number).load().order());
        }
    }

    /// Returns whether `bytes` more bytes would fit within the cache's limit.
    pub fn fits_limit(&self, bytes: u64) -> bool {
        self.charged_bytes.load(Relaxed) + bytes <= self.limit_bytes
    }

    /// Returns the first file with an id of `id` or more, and sets `id` to the next id after that file.
    pub(crate) fn next_file(&self, id: &mut u32) -> Option<Arc<File>> {
        self.files.with(|files| {
            loop {
                let file = files.by_id.get(*id as usize)?.upgrade();
                *id += 1;
                if file.is_some() {
                    return file;
                }
            }
        })
    }

    /// Returns the file with this id; `None` if there is no such file.
    pub(crate) fn file(&self, id: u32) -> Option<Arc<File>> {
        self.files.with(|files| files.by_id.get(id as usize)?.upgrade())
    }

    /// Resets the eviction order for this cache. Only the first call has an effect.
    fn start_order_once(&self) {
        self.is_order_started.with(|is_order_started| {
            if !std::mem::replace(is_order_started, true) {
                self.order.begin(self.limit_bytes >> self.pool.page_shift);
            }
        });
    }

    /// Creates a file with an unused id, and records the file under its id.
    fn add_file(&self, make: impl FnOnce(u32) -> Arc<File>) -> Result<Arc<File>> {
        self.files.with(|files| {
            let id = match files.free.pop() {
                Some(id) => id,
                None if files.by_id.len() > Owner::MAX_ID as usize => {
                    return Err(Error::NoAddresses { wanted_bytes: size_of::<File>() as u64 });
                }
                None => {
                    files.by_id.push(Weak::new());
                    files.by_id.len() as u32 - 1
                }
            };
            debug_assert!(files.by_id[id as usize].strong_count() == 0, "a free id has no file");
            let file = make(id);
            files.by_id[id as usize] = Arc::downgrade(&file);
            Ok(file)
        })
    }

    /// Removes the record of a file that ends, and frees its id.
    pub(crate) fn remove_file(&self, id: u32, has_store: bool) {
        let stored = self.stored_files.fetch_sub(u32::from(has_store), Relaxed);
        debug_assert!(stored >= u32::from(has_store), "the file was counted");
        self.files.with(|files| {
            debug_assert!(files.by_id[id as usize].strong_count() > 0, "a file is removed once");
            files.by_id[id as usize] = Weak::new();
            files.free.push(id);
        });
    }

    /// Evicts folios until `want_bytes` are freed. If that frees too little, splits sparse huge folios until
    /// `want_bytes` are freed. Returns whether one of the two attempts freed that much.
    pub fn make_room(&self, want_bytes: u64) -> bool {
        self.evict_some(want_bytes) || self.split_sparse_some(want_bytes)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // A fork child has statistics of its own, which do not count the parent's caches.
        if self.check().is_ok() {
            stats::sub(Counter::Caches, 1);
            if self.pool.is_hugetlb() {
                self.caches.users.with(|users| self.caches.end_reserves(users));
            }
        }
    }
}

/// A cache of files. Clones are handles of the same cache. The cache ends when its last handle and its last file are
/// dropped.
///
/// A file exists in memory only ([`PageCache::create`]), or caches a store, such as a file on disk
/// ([`PageCache::open`]). Its memory consists of *folios*: a folio is one page, or a huge page of 2 MiB.
///
/// ```
/// use pagemill::PageCache;
///
/// let cache = PageCache::builder("tiles").limit(64 << 20).build()?;
/// let file = cache.create()?;
/// assert_eq!(file.write_at(b"hello", 1000)?, 5);
/// let mut bytes = [0xFF; 10];
/// assert_eq!(file.read_at(&mut bytes, 998)?, 7);
/// assert_eq!(&bytes[..7], b"\0\0hello");
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone)]
pub struct PageCache(pub(crate) Arc<Inner>);

impl PageCache {
    /// Returns a builder for a cache. Reports show the cache under `name`.
    pub fn builder(name: &str) -> Builder {
        Builder::new(name)
    }

    /// Creates an empty file without a store: its bytes exist in memory only. [`Mapping::cursor`] gives the file a
    /// position, for code that uses [`Read`](std::io::Read), [`Write`](std::io::Write) and [`Seek`](std::io::Seek).
    ///
    /// Cost: some 200 bytes.
    ///
    /// # Errors
    ///
    /// [`Error::NoAddresses`] for more than 16 million files.
    pub fn create(&self) -> Result<Mapping> {
        self.open_file(None, 0)
    }

    /// Opens a store as a cached file. Reads load bytes from the store unless they are in memory already. Written bytes
    /// stay in memory until writeback ([`Writeback`](crate::mapping::Writeback)) or [`Mapping::sync`]. A file on disk
    /// is a [`FileStore`](pagemill_store::FileStore):
    ///
    /// ```no_run
    /// use pagemill::PageCache;
    /// use pagemill::store::FileStore;
    /// use std::sync::Arc;
    ///
    /// let cache = PageCache::builder("tables").limit(1 << 30).build()?;
    /// let file = cache.open(Arc::new(FileStore::open("table.db")?))?;
    /// # drop(file);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    ///
    /// Cost: about 1 KiB. The cache's first file with a store adds 5 bytes for each page of the limit, as pages come
    /// into use.
    ///
    /// # Errors
    ///
    /// See [`PageCache::create`]. [`Error::Store`] if the store cannot report its size. [`Error::FileTooLarge`].
    /// [`Error::Unsupported`] if the store's block is larger than a page.
    pub fn open(&self, store: Arc<dyn Store>) -> Result<Mapping> {
        let size_bytes = store.size_bytes().map_err(failed("getting the size of a file"))?;
        if !store.block_bytes().is_power_of_two() || store.block_bytes() > self.page().bytes() {
            return Err(Error::Unsupported { what: "the store's block is not a power of two up to the cache's page" });
        }
        self.open_file(Some(store), size_bytes)
    }

    /// Creates a file with or without a store, and its first handle.
    fn open_file(&self, store: Option<Arc<dyn Store>>, size_bytes: u64) -> Result<Mapping> {
        self.0.check()?;
        let has_store = store.is_some();
        if has_store {
            self.0.start_order_once();
        }
        let file = self.0.add_file(|id| File::new(self.0.clone(), id, store, size_bytes))?;
        self.0.stored_files.fetch_add(u32::from(has_store), Relaxed);
        let file = Mapping(file, AtomicU32::new(0));
        file.0.check_size(size_bytes)?;
        Ok(file)
    }

    /// Allows or forbids new huge folios in the cache. Existing huge folios stay.
    pub fn set_huge(&self, is_allowed: bool) {
        self.0.use_huge.store(is_allowed, Relaxed);
        self.0.pool.allow_huge(is_allowed);
    }

    pub fn page(&self) -> PageSize {
        self.0.pool.page
    }

    /// Returns the size of a huge folio in bytes: that of a block, or that of a page if pages are larger.
    pub fn huge_bytes(&self) -> usize {
        self.0.pool.chunk_bytes
    }

    /// Returns the maximum of [`PageCache::charged_bytes`].
    pub fn limit_bytes(&self) -> u64 {
        self.0.limit_bytes
    }

    /// Returns [`Error::WrongState`] in a fork child of the process that created the cache.
    #[doc(hidden)] // for pagemill-ramfs
    pub fn check_process(&self) -> Result<()> {
        self.0.check()
    }

    /// Returns the total bytes of all folios of the cache's files. The cache's limit bounds this number.
    pub fn charged_bytes(&self) -> u64 {
        self.0.charged_bytes.load(Relaxed)
    }

    /// Collapses queued ranges of small folios: checks about `steps` ranges, which takes some hundred microseconds
    /// each. The background thread does the same unless it is disabled. Returns the number of new huge folios.
    #[doc(hidden)] // a step of the background thread, for callers of `Caches::collapse_by_hand`
    pub fn collapse_waiting(&self, steps: usize) -> usize {
        self.0.caches.worker.step(steps)
    }

    /// Checks up to `steps` huge folios of all caches, a fraction of a millisecond each, and splits those that are
    /// sparse. Visits each chunk at most once. Checks only folios that were not written since the previous round over
    /// all chunks. The background thread does the same unless it is disabled. Returns the bytes freed.
    #[doc(hidden)] // a step of the background thread, for callers of `Caches::collapse_by_hand`
    pub fn split_sparse_waiting(&self, steps: usize) -> u64 {
        crate::mapping::huge::sweep::step(self.0.caches, steps, usize::MAX).freed_bytes
    }

    /// Writes back pages that have been dirty for too long, and those above the background share
    /// ([`Writeback`](crate::mapping::Writeback)). The background thread does the same unless it is disabled. Returns
    /// the bytes written.
    #[doc(hidden)] // a step of the background thread, for callers of `Caches::collapse_by_hand`
    pub fn write_back_due(&self) -> u64 {
        self.0.flush().0
    }

    /// Returns the bytes of dirty folios: changed in memory, and not yet in their stores.
    pub fn dirty_bytes(&self) -> u64 {
        self.0.dirty_bytes()
    }

    /// Frees all free chunks of the cache, whose memory then belongs to the system again. Returns the number of freed
    /// bytes. Reclaim does the same when memory is needed. A chunk that a [`Queue`] has registered is not freed by this
    /// call. The queue's thread releases it later: when it waits, requests a page, or drops the queue. Reserved huge
    /// pages (feature `hugetlb`) are returned when the cache ends.
    ///
    /// [`Queue`]: crate::mapping::Queue
    pub fn shrink(&self) -> u64 {
        let freed = self.0.pool.shrink(u64::MAX);
        self.0.caches.request_lease_end(self.0.pool);
        freed
    }
}

impl std::fmt::Debug for PageCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut text = f.debug_struct("PageCache");
        text.field("name", &self.0.name).field("limit_bytes", &self.0.limit_bytes).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_structure_has_at_most_192_bytes() {
        assert!(size_of::<File>() <= 192, "{}", size_of::<File>());
    }
}
