//! Caches: files that share a software page size, a limit, a policy and a name; and the list of all caches of a
//! process.

use super::flights::Flights;
use super::flush::{Balance, Flusher, Writeback};
use super::order::Order;
use super::policy::{Auto, Policy};
use super::source::Source;
use super::worker::Worker;
use super::{File, Mapping};
use crate::folio::{Owner, Pool, Taken};
use pagemill_core::arena::{Arena, place};
use pagemill_core::error::{Error, Result};
use pagemill_core::reclaim::{Shrinker, Urgency};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{AtomicU32, AtomicU64, AtomicUsize, Guarded, Relaxed};
use pagemill_core::units::{BLOCK_BYTES, PageSize};
use pagemill_store::Store;
use pagemill_store::ring::RingWaker;
use pagemill_xarray::{Forest, Forests};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

/// Most caches of a process. A dropped cache leaves its pool to a later one with the same page size and no larger
/// limit.
pub const MAX_CACHES: usize = 256;

/// Settings of a cache.
///
/// ```
/// use pagemill::Pagemill;
/// use pagemill::mapping::{Settings, Source, Writeback, policy::Never};
/// use pagemill::units::PageSize;
/// use std::time::Duration;
///
/// let writeback = Writeback { age: Duration::from_secs(5), ..Writeback::default() };
/// let cache = Pagemill::of_process()?.caches.make(Settings {
///     page: PageSize::new(64 << 10).unwrap(),
///     policy: Box::new(Never), // no huge folios
///     source: Source::TryHugetlb,
///     writeback,
///     ..Settings::new("index", 32 << 20)
/// })?;
/// assert_eq!(cache.page().bytes(), 65_536);
/// # Ok::<(), pagemill::Error>(())
/// ```
pub struct Settings {
    /// Name of the cache in reports.
    pub name: String,
    /// The software page: the smallest folio.
    pub page: PageSize,
    /// Most bytes of folios at a time. The memory behind them may be half as much again, plus a huge folio: blocks are
    /// partly used, and free ones stay until memory is needed.
    pub limit_bytes: u64,
    /// Whether huge folios are allocated at all; [`Cache::set_huge`] changes it.
    pub use_huge: bool,
    /// Whether huge folios may be split, so that parts of them can be freed. Unsplittable ones need no check of their
    /// neighbours. Those in reserved huge pages are never split.
    pub may_split: bool,
    pub policy: Box<dyn Policy>,
    pub source: Source,
    /// When dirty pages of files with a store are written back.
    pub writeback: Writeback,
    /// Time limit of waits for a store; a call that exceeds it fails ([`Error::Store`] with `ETIMEDOUT`). This covers
    /// reads for the call and in-flight reads of other threads that it needs. The read itself continues, and a later
    /// call finds its bytes. `None`: no limit. A store with blocking calls only ([`Store::is_asynchronous`]) has no
    /// limit for reads on the calling thread. A sync fails with [`Error::Busy`] if no write of its file completes for
    /// this time.
    pub timeout: Option<Duration>,
}

impl Settings {
    /// Settings with the OS page, and [`Auto`] as policy for huge folios.
    pub fn new(name: &str, limit_bytes: u64) -> Self {
        Self {
            name: name.to_owned(),
            page: PageSize::os(),
            limit_bytes,
            use_huge: cfg!(feature = "huge"),
            may_split: true,
            policy: Box::new(Auto),
            source: Source::default(),
            writeback: Writeback::default(),
            timeout: None,
        }
    }
}

/// All caches of a process.
///
/// Example: [`Cache`].
pub struct Caches {
    pub(super) arena: &'static Arena,
    pub(super) forests: &'static dyn Forests,
    pub(super) pools: [OnceLock<&'static Pool>; MAX_CACHES],
    /// Eviction order of each pool.
    orders: [OnceLock<&'static Order>; MAX_CACHES],
    /// Pools, each with its current cache.
    pub(super) users: Guarded<Vec<(&'static Pool, Weak<Inner>)>>,
    /// Number of pools inherited from a parent process. Their locks may be held forever, so they are never used.
    pub(super) inherited: AtomicUsize,
    pub(super) worker: Worker,
    pub(super) flusher: Flusher,
    /// Wakers of queues, each with the pool of which the queue may have registered memory.
    pub(super) wakers: Guarded<Vec<(&'static Pool, RingWaker)>>,
}

impl Caches {
    /// Makes no memory resident. The first cache requests the forest for nodes of indices.
    pub fn new(arena: &'static Arena, forests: &'static dyn Forests) -> Self {
        Self {
            arena,
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

    /// Creates a cache.
    ///
    /// Cost: address space for the limit and for 16 bytes a page; memory as files are written.
    ///
    /// # Errors
    ///
    /// [`Error::BadLength`] for a limit below one page. [`Error::NoAddresses`] if the limit is too large.
    /// [`Error::TooMany`] if there are [`MAX_CACHES`] already. [`Error::WrongState`] for invalid shares of dirty pages.
    /// Errors of [`Source::Hugetlb`].
    pub fn make(&'static self, settings: Settings) -> Result<Cache> {
        if settings.limit_bytes < settings.page.bytes() as u64 {
            return Err(Error::BadLength { len_bytes: settings.limit_bytes });
        }
        let balance = Balance::new(&settings.writeback, settings.limit_bytes)?;
        let nodes = self.forests.forest()?;
        // Under one lock, so that no other thread finds the pool without a cache.
        self.users.with(|users| {
            let at = self.pool(users, &settings)?;
            let (pool, user) = &mut users[at];
            let order = self.order(at, pool)?;
            pool.allow_huge(settings.use_huge);
            let inner = Arc::new(Inner {
                caches: self,
                nodes,
                pool,
                number: at as u32,
                generation: self.arena.generation(),
                name: settings.name.into(),
                limit_bytes: settings.limit_bytes,
                charged_bytes: AtomicU64::new(0),
                huge_bytes: AtomicU64::new(0),
                dirty_bytes: AtomicU64::new(0),
                balance,
                use_huge: AtomicBool::new(settings.use_huge),
                may_split: settings.may_split && !pool.is_hugetlb(),
                policy: settings.policy,
                timeout: settings.timeout,
                order,
                is_ordered: Guarded::new(false),
                stored_files: AtomicU32::new(0),
                evict_after_ns: AtomicU64::new(0),
                in_hand: AtomicU32::new(0),
                split_sparse_after_ns: AtomicU64::new(0),
                files: Guarded::new(Files::default()),
                flights: Flights::default(),
                ahead_bytes: AtomicU64::new(0),
            });
            *user = Arc::downgrade(&inner);
            stats::add(Counter::Caches, 1);
            Ok(Cache(inner))
        })
    }

    /// Returns the eviction order of a pool's folios.
    fn order(&self, at: usize, pool: &Pool) -> Result<&'static Order> {
        if let Some(order) = self.orders[at].get() {
            return Ok(order);
        }
        let order = place(Order::new((pool.max_bytes() >> pool.page_shift()) as usize)?)?;
        let _ = self.orders[at].set(order);
        Ok(order)
    }

    pub(super) fn pools(&self) -> impl Iterator<Item = &'static Pool> {
        self.pools.iter().skip(self.inherited.load(Relaxed)).map_while(|pool| pool.get().copied())
    }

    /// Starts no thread from here on. The program then collapses small folios with [`Cache::collapse_waiting`], splits
    /// sparse huge ones with [`Cache::split_sparse_waiting`], and writes back with [`Cache::write_back_due`].
    pub fn collapse_by_hand(&self) {
        self.worker.do_by_hand();
    }

    pub fn acquire_for_fork(&self) {
        self.users.acquire_when(|_| true);
        self.wakers.acquire_when(|_| true);
        self.worker.acquire_for_fork();
    }

    /// Updates the statistics that are measured.
    pub fn measure(&self) {
        stats::set(Counter::CacheFrames, self.frames_bytes());
        stats::set(Counter::CacheIndex, self.forests.node_bytes() + self.files_bytes());
    }

    /// Returns the resident bytes of metadata.
    pub fn metadata_bytes(&self) -> u64 {
        self.frames_bytes() + self.forests.node_bytes()
    }

    fn frames_bytes(&self) -> u64 {
        (self.inherited.load(Relaxed)..).zip(self.pools()).map(|(at, pool)| self.frames_bytes_of(at, pool)).sum()
    }

    /// Returns the resident bytes of a pool's frames and eviction order.
    pub(super) fn frames_bytes_of(&self, at: usize, pool: &Pool) -> u64 {
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

    /// Frees unused chunks. At a limit, first frees unused parts of huge folios.
    fn shrink(&self, want_bytes: u64, urgency: Urgency) -> u64 {
        let mut freed = self.shrink_free(want_bytes);
        if urgency == Urgency::Limit && freed < want_bytes {
            let mut at = self.inherited.load(Relaxed);
            while freed < want_bytes
                && let Some(cache) = self.next_cache(&mut at)
            {
                // Reserved huge pages are not given back, so they are skipped.
                if !cache.pool.is_hugetlb() && cache.make_room(want_bytes - freed) {
                    freed += self.shrink_free(want_bytes - freed);
                }
            }
        }
        if freed < want_bytes {
            self.pools().for_each(|pool| self.want_back(pool));
        }
        freed
    }
}

impl Caches {
    /// Returns the next cache from `at` on, and moves `at` behind it.
    pub(super) fn next_cache(&self, at: &mut usize) -> Option<Arc<Inner>> {
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

    /// Registers the waker of a queue. It is called when memory of the pool is wanted back that the queue has
    /// registered.
    pub(super) fn hear_by(&self, pool: &'static Pool, waker: &RingWaker) {
        let (mut new, mut room) = (Some((pool, waker.clone())), Vec::new());
        // The list grows outside of the lock, because an allocation may start reclaim.
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

    pub(super) fn hear_no_more_by(&self, waker: &RingWaker) {
        let own = self.wakers.with(|wakers| {
            let at = wakers.iter().position(|(_, known)| known.is(waker))?;
            Some(wakers.swap_remove(at))
        });
        drop(own);
    }

    /// Requests free memory that queues have registered.
    fn want_back(&self, pool: &'static Pool) {
        if pool.want_back() {
            self.wakers.with(|wakers| {
                let own = wakers.iter().filter(|(known, _)| std::ptr::eq(*known, pool));
                own.for_each(|(_, waker)| waker.wake());
            });
        }
    }

    /// Frees unused chunks. Pools without a file go first, because nothing uses them.
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

/// Files by id, and free ids.
#[derive(Default)]
pub(super) struct Files {
    pub by_id: Vec<Weak<File>>,
    pub free: Vec<u32>,
}

/// The shared state of a cache and its files.
pub(crate) struct Inner {
    pub(super) caches: &'static Caches,
    /// Nodes of its files' indices.
    pub(super) nodes: &'static Forest,
    pub(super) pool: &'static Pool,
    /// Index of its pool: unique among caches that exist at the same time.
    pub(super) number: u32,
    pub(super) generation: u16,
    pub(super) name: Arc<str>,
    pub(super) limit_bytes: u64,
    pub(super) charged_bytes: AtomicU64,
    /// The part of `charged_bytes` in huge folios.
    pub(super) huge_bytes: AtomicU64,
    /// Bytes of dirty folios of files with a store.
    pub(super) dirty_bytes: AtomicU64,
    pub(super) balance: Balance,
    use_huge: AtomicBool,
    pub(super) may_split: bool,
    pub(super) policy: Box<dyn Policy>,
    pub(super) timeout: Option<Duration>,
    /// The eviction order.
    pub(super) order: &'static Order,
    /// Whether the order was started for this cache, which its first file with a store does.
    is_ordered: Guarded<bool>,
    /// Files with a store.
    pub(super) stored_files: AtomicU32,
    /// Time of the next attempt to evict, or to split sparse folios, after one that found nothing.
    pub(super) evict_after_ns: AtomicU64,
    /// Threads that search for a folio to evict, or are evicting one.
    pub(super) in_hand: AtomicU32,
    pub(super) split_sparse_after_ns: AtomicU64,
    pub(super) files: Guarded<Files>,
    pub(super) flights: Flights,
    /// Bytes of in-flight reads ahead.
    pub(super) ahead_bytes: AtomicU64,
}

impl Inner {
    /// Fails in a child of the process that created the cache. The child has the locks and pins of the parent's
    /// threads, but not the threads.
    #[inline]
    pub fn check(&self) -> Result<()> {
        if self.generation == self.caches.arena.generation() { Ok(()) } else { Err(Self::is_of_parent()) }
    }

    #[cold]
    fn is_of_parent() -> Error {
        Error::WrongState { what: "a cache of the parent process: a fork child has to make its own" }
    }

    /// Allocates and charges a folio. It is busy: the caller owns it.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`].
    pub fn take(&self, order: u8) -> Result<Taken> {
        let bytes = self.folio_bytes(order);
        self.charge(bytes)?;
        let taken = self.pool.take(order).inspect_err(|_| self.discharge(order))?;
        self.count(order);
        Ok(taken)
    }

    /// Allocates up to `most` more pages from free ones, within the limit.
    pub fn take_more(&self, most: usize, taken: impl FnMut(Taken)) {
        let page_bytes = self.folio_bytes(0);
        // Requests no more than there is room for: a larger temporary charge would make other threads fail at the
        // limit.
        let room = self.limit_bytes.saturating_sub(self.charged_bytes.load(Relaxed)) / page_bytes;
        let most = most.min(room as usize);
        let wanted = page_bytes * most as u64;
        if self.charge(wanted).is_ok() {
            let bytes = page_bytes * self.pool.take_free_pages(most, taken) as u64;
            self.charged_bytes.fetch_sub(wanted - bytes, Relaxed);
            self.publish(0, bytes, stats::add);
        }
    }

    /// Allocates contiguous pages from free ones, within the limit. If the pool holds less memory than the limit,
    /// splits a new chunk for it. Returns the first page.
    pub fn take_row(&self, pages: u32) -> Option<u32> {
        let bytes = self.folio_bytes(0) * u64::from(pages);
        self.charge(bytes).ok()?;
        let take = || self.pool.take_free_row(pages);
        let row = take().or_else(|| {
            let may_grow = self.pool.filled_bytes() < self.limit_bytes;
            let taken = may_grow.then(|| self.pool.take(self.pool.chunk_order()).ok()).flatten()?;
            self.pool.give(taken.number, taken.order);
            take()
        });
        match row {
            Some(_) => self.publish(0, bytes, stats::add),
            None => _ = self.charged_bytes.fetch_sub(bytes, Relaxed),
        }
        row
    }

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

    fn discharge(&self, order: u8) {
        self.charged_bytes.fetch_sub(self.folio_bytes(order), Relaxed);
    }

    /// Returns whether folios of an order are whole chunks.
    pub(super) fn is_huge(&self, order: u8) -> bool {
        order > 0 && order == self.pool.chunk_order() || self.pool.page().bytes() >= BLOCK_BYTES
    }

    /// Changes the statistics of the process. They exclude reserved huge pages, which are not charged to it.
    fn publish(&self, order: u8, bytes: u64, change: fn(Counter, u64)) {
        if !self.pool.is_hugetlb() {
            change(if self.is_huge(order) { Counter::CacheHuge } else { Counter::CacheSmall }, bytes);
        }
    }

    /// Allocates a folio that replaces smaller ones of `present_bytes`. Charges only the difference, so that concurrent
    /// writers do not hit the limit.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`].
    pub fn take_in_place(&self, order: u8, present_bytes: u64) -> Result<Taken> {
        let more = self.folio_bytes(order) - present_bytes;
        self.charge(more)?;
        let taken = self.pool.take(order).inspect_err(|_| {
            self.charged_bytes.fetch_sub(more, Relaxed);
        })?;
        self.count(order);
        Ok(taken)
    }

    /// Reverts [`Inner::take_in_place`].
    pub fn give_in_place(&self, number: u32, order: u8, present_bytes: u64) {
        self.discount(order);
        self.charged_bytes.fetch_sub(self.folio_bytes(order) - present_bytes, Relaxed);
        self.pool.give(number, order);
    }

    /// Frees a page that another folio replaced. The other folio keeps its charge.
    pub fn give_replaced(&self, number: u32) {
        self.discount(0);
        self.pool.give(number, 0);
    }

    /// Frees and uncharges a folio that the caller owns.
    pub fn give(&self, number: u32, order: u8) {
        self.discount(order);
        self.discharge(order);
        self.pool.give(number, order);
    }

    fn count(&self, order: u8) {
        let bytes = self.folio_bytes(order);
        self.publish(order, bytes, stats::add);
        if self.is_huge(order) {
            self.huge_bytes.fetch_add(bytes, Relaxed);
        }
    }

    fn discount(&self, order: u8) {
        let bytes = self.folio_bytes(order);
        self.publish(order, bytes, stats::sub);
        if self.is_huge(order) {
            self.huge_bytes.fetch_sub(bytes, Relaxed);
        }
    }

    /// Updates the statistics after a split of a huge folio.
    pub fn count_split(&self) {
        let bytes = self.folio_bytes(self.pool.chunk_order());
        self.discount(self.pool.chunk_order());
        self.publish(0, bytes, stats::add);
    }

    #[inline]
    pub fn folio_bytes(&self, order: u8) -> u64 {
        (self.pool.page().bytes() as u64) << order
    }

    pub fn is_huge_allowed(&self) -> bool {
        self.use_huge.load(Relaxed)
    }

    /// Unpins a folio. Frees it if this was the last pin and it has left its file.
    #[inline]
    pub fn unpin(&self, number: u32) {
        if self.pool.word(number).unpin() {
            self.give(number, self.pool.word(number).load().order());
        }
    }

    /// Returns whether a huge folio fits within the limit.
    pub fn has_room(&self) -> bool {
        self.has_room_for(self.folio_bytes(self.pool.chunk_order()))
    }

    /// Returns whether this many more bytes fit within the limit.
    pub fn has_room_for(&self, bytes: u64) -> bool {
        self.charged_bytes.load(Relaxed) + bytes <= self.limit_bytes
    }

    /// Returns the next file from `id` on, and moves `id` behind it.
    pub(super) fn next_file(&self, id: &mut u32) -> Option<Arc<File>> {
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

    pub(super) fn file(&self, id: u32) -> Option<Arc<File>> {
        self.files.with(|files| files.by_id.get(id as usize)?.upgrade())
    }

    fn begin_order(&self) {
        self.is_ordered.with(|is_ordered| {
            if !std::mem::replace(is_ordered, true) {
                self.order.begin(self.limit_bytes >> self.pool.page_shift());
            }
        });
    }

    fn enter(&self, make: impl FnOnce(u32) -> Arc<File>) -> Result<Arc<File>> {
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
            let file = make(id);
            files.by_id[id as usize] = Arc::downgrade(&file);
            Ok(file)
        })
    }

    pub(super) fn leave(&self, id: u32, has_store: bool) {
        self.stored_files.fetch_sub(u32::from(has_store), Relaxed);
        self.files.with(|files| {
            files.by_id[id as usize] = Weak::new();
            files.free.push(id);
        });
    }

    /// Evicts or splits sparse folios to free `want_bytes` of folios. Returns whether that succeeded.
    pub fn make_room(&self, want_bytes: u64) -> bool {
        self.evict_some(want_bytes) || self.split_sparse_some(want_bytes)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // A fork child has its own statistics.
        if self.check().is_ok() {
            stats::sub(Counter::Caches, 1);
            if self.pool.is_hugetlb() {
                self.caches.users.with(|users| self.caches.end_reserves(users));
            }
        }
    }
}

/// A cache of files. Clones are handles of the same cache, which ends with the last handle and file.
///
/// ```
/// use pagemill::mapping::Settings;
/// use pagemill::Pagemill;
///
/// let cache = Pagemill::of_process()?.caches.make(Settings::new("tiles", 64 << 20))?;
/// let file = cache.create()?;
/// assert_eq!(file.write_at(b"hello", 1000)?, 5);
/// let mut bytes = [0xFF; 10];
/// assert_eq!(file.read_at(&mut bytes, 998)?, 7);
/// assert_eq!(&bytes[..7], b"\0\0hello");
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone)]
pub struct Cache(pub(super) Arc<Inner>);

impl Cache {
    /// Creates an empty file in memory.
    ///
    /// Cost: some 200 bytes.
    ///
    /// # Errors
    ///
    /// [`Error::NoAddresses`] for more than 16 million files.
    pub fn create(&self) -> Result<Mapping> {
        self.enter(None, 0)
    }

    /// Opens a store as a file in memory. Reads bring in bytes as needed. Written bytes stay in memory until writeback
    /// ([`Writeback`]) or [`Mapping::sync`].
    ///
    /// Cost: about 1 KiB. The cache's first such file adds 5 bytes for each page of the limit, as they are used.
    ///
    /// # Errors
    ///
    /// See [`Cache::create`]. [`Error::Store`] if the store cannot report its size. [`Error::FileTooLarge`].
    /// [`Error::Unsupported`] if its block is larger than a page.
    pub fn open(&self, store: Arc<dyn Store>) -> Result<Mapping> {
        let size_bytes =
            store.size_bytes().map_err(|cause| Error::Store { doing: "getting the size of a file", cause })?;
        if !store.block_bytes().is_power_of_two() || store.block_bytes() > self.page().bytes() {
            return Err(Error::Unsupported { what: "the store's block is not a power of two up to the cache's page" });
        }
        self.enter(Some(store), size_bytes)
    }

    fn enter(&self, store: Option<Arc<dyn Store>>, size_bytes: u64) -> Result<Mapping> {
        self.0.check()?;
        let has_store = store.is_some();
        if has_store {
            self.0.begin_order();
        }
        let file = self.0.enter(|id| File::new(self.0.clone(), id, store, size_bytes))?;
        self.0.stored_files.fetch_add(u32::from(has_store), Relaxed);
        let file = Mapping::new(file);
        file.0.check_size(size_bytes)?;
        Ok(file)
    }

    /// Allows or forbids new huge folios. Existing ones stay.
    pub fn set_huge(&self, is_allowed: bool) {
        self.0.use_huge.store(is_allowed, Relaxed);
        self.0.pool.allow_huge(is_allowed);
    }

    pub fn page(&self) -> PageSize {
        self.0.pool.page()
    }

    /// Returns the bytes of a huge folio: a block, or a larger page.
    pub fn huge_bytes(&self) -> usize {
        self.0.pool.chunk_bytes()
    }

    /// Returns the bytes of the files' folios. The limit bounds them.
    pub fn charged_bytes(&self) -> u64 {
        self.0.charged_bytes.load(Relaxed)
    }

    /// Collapses small folios that should be huge: about `steps` blocks, some hundred microseconds each. The background
    /// does this by itself where it runs. Returns the number of new huge folios.
    pub fn collapse_waiting(&self, steps: usize) -> usize {
        self.0.caches.worker.step(steps)
    }

    /// Checks up to `steps` huge folios of all caches, a fraction of a millisecond each, and splits sparse ones. Passes
    /// each chunk at most once. Checks only folios that were not written since the previous round. The background does
    /// this by itself where it runs. Returns the bytes freed.
    pub fn split_sparse_waiting(&self, steps: usize) -> u64 {
        super::sweep::step(self.0.caches, steps, usize::MAX).freed_bytes
    }

    /// Writes back pages that are dirty for too long, and those above the background share ([`Writeback`]). The
    /// background does this by itself where it runs. Returns the bytes written.
    pub fn write_back_due(&self) -> u64 {
        self.0.flush().0
    }

    /// Returns the bytes of dirty folios: in memory, but not yet in their stores.
    pub fn dirty_bytes(&self) -> u64 {
        self.0.dirty_bytes()
    }

    /// Gives free memory back to the system and returns its bytes. Reclaim does the same when memory is needed. Memory
    /// registered by a [`Queue`] is only requested here; the queue's thread releases it when it waits, asks for a page,
    /// or drops the queue. Reserved huge pages are given back when the cache ends ([`Source::Hugetlb`]).
    ///
    /// [`Queue`]: super::Queue
    pub fn give_back(&self) -> u64 {
        let freed = self.0.pool.shrink(u64::MAX);
        self.0.caches.want_back(self.0.pool);
        freed
    }
}

impl std::fmt::Debug for Cache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Inner { name, limit_bytes, .. } = &*self.0;
        f.debug_struct("Cache").field("name", name).field("limit_bytes", limit_bytes).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_small() {
        assert!(size_of::<File>() <= 192, "{}", size_of::<File>());
    }
}
