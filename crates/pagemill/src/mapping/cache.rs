//! A cache: files that share a software page size, a limit, a policy and a name; and all caches of a process.

use super::flights::Flights;
use super::flush::{Balance, Flusher, Writeback};
use super::order::Order;
use super::policy::{Auto, Policy};
use super::source::Source;
use super::worker::Worker;
use super::{File, Mapping};
use crate::arena::{Arena, place};
use crate::error::{Error, Result};
use crate::folio::{Owner, Pool, Taken};
use crate::reclaim::{Shrinker, Urgency};
use crate::stats::{self, Counter};
use crate::store::Store;
use crate::store::ring::RingBell;
use crate::sync::{AtomicU32, AtomicU64, AtomicUsize, Guarded, Relaxed};
use crate::units::{BLOCK_BYTES, PageSize};
use crate::xarray::{Forest, Forests};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

/// Caches that a process can have at a time. One that went leaves its place to others with the same page and no larger limit.
pub const MAX_CACHES: usize = 256;

/// How a cache is to be.
pub struct Settings {
    /// A word for reports: which cache of the program this is.
    pub name: String,
    /// The software page: a folio is at least so long.
    pub page: PageSize,
    /// Most bytes of folios at a time. The memory behind them may be half as much again, and a huge folio: blocks are in use in
    /// part, and free ones stay until somebody wants memory.
    pub limit_bytes: u64,
    /// Whether huge folios are made at all; [`Cache::set_huge`] changes it.
    pub use_huge: bool,
    /// Whether huge folios may be split again, so that parts of them can go. One that may not needs no look at its neighbours.
    /// Those in reserved huge pages never are.
    pub may_split: bool,
    pub policy: Box<dyn Policy>,
    pub source: Source,
    /// When what was written to files with a store goes back to it.
    pub writeback: Writeback,
    /// How long a call waits for a store until it ends in an error ([`Error::Store`] with `ETIMEDOUT`): while the store reads what it
    /// needs, or another's read of that goes on. The read itself goes on, and a later call finds what it brought. `None`: as
    /// long as the store takes. So it is for the reads of a call's own, too, where the store only blocks
    /// ([`Store::is_asynchronous`]).
    pub patience: Option<Duration>,
}

impl Settings {
    /// The page of the system, huge folios by [`Auto`].
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
            patience: None,
        }
    }
}

/// All caches of a process.
pub struct Caches {
    pub(super) arena: &'static Arena,
    pub(super) forests: &'static dyn Forests,
    pub(super) pools: [OnceLock<&'static Pool>; MAX_CACHES],
    /// Of each pool.
    orders: [OnceLock<&'static Order>; MAX_CACHES],
    /// Which pools have a cache, and which.
    pub(super) books: Guarded<Vec<(&'static Pool, Weak<Inner>)>>,
    /// So many pools are a parent's: locks of theirs may be held for good, and nothing of theirs is used.
    pub(super) inherited: AtomicUsize,
    pub(super) worker: Worker,
    pub(super) flusher: Flusher,
    /// Of queues, and whose memory they may have registered.
    bells: Guarded<Vec<(&'static Pool, RingBell)>>,
}

impl Caches {
    /// No memory becomes resident. Nodes of indices come from a forest that is asked for with the first cache.
    pub(crate) fn new(arena: &'static Arena, forests: &'static dyn Forests) -> Self {
        Self {
            arena,
            forests,
            pools: [const { OnceLock::new() }; MAX_CACHES],
            orders: [const { OnceLock::new() }; MAX_CACHES],
            books: Guarded::new(Vec::new()),
            inherited: AtomicUsize::new(0),
            worker: Worker::default(),
            flusher: Flusher::default(),
            bells: Guarded::new(Vec::new()),
        }
    }

    /// Makes a cache.
    ///
    /// Cost: addresses for its limit, and for 16 bytes a page; memory as files are written.
    ///
    /// # Errors
    ///
    /// [`Error::BadLength`] for a limit below one page, [`Error::NoAddresses`] if it is too large, [`Error::TooMany`] if there are
    /// [`MAX_CACHES`] already; [`Error::WrongState`] for shares of dirty pages that cannot be; what [`Source::Hugetlb`] says.
    pub fn make(&'static self, settings: Settings) -> Result<Cache> {
        if settings.limit_bytes < settings.page.bytes() as u64 {
            return Err(Error::BadLength { len_bytes: settings.limit_bytes });
        }
        let balance = Balance::new(&settings.writeback, settings.limit_bytes)?;
        let nodes = self.forests.forest()?;
        // In one step: nobody else may find the pool without a cache.
        self.books.with(|books| {
            let at = self.pool(books, &settings)?;
            let (pool, user) = &mut books[at];
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
                patience: settings.patience,
                order,
                is_ordered: Guarded::new(false),
                stored_files: AtomicU32::new(0),
                evict_after_ns: AtomicU64::new(0),
                in_hand: AtomicU32::new(0),
                thin_after_ns: AtomicU64::new(0),
                files: Guarded::new(Files::default()),
                flights: Flights::default(),
                ahead_bytes: AtomicU64::new(0),
            });
            *user = Arc::downgrade(&inner);
            stats::add(Counter::Caches, 1);
            Ok(Cache(inner))
        })
    }

    /// The order in which folios of a pool make room.
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

    /// Starts no thread from here on: small folios become huge by [`Cache::collapse_waiting`] alone, and sparse huge ones small by
    /// [`Cache::thin_waiting`]; what is dirty for long goes back by [`Cache::write_back_due`].
    pub fn collapse_by_hand(&self) {
        self.worker.do_by_hand();
    }

    pub(crate) fn acquire_for_fork(&self) {
        self.books.acquire_when(|_| true);
        self.bells.acquire_when(|_| true);
        self.worker.acquire_for_fork();
    }

    pub(crate) fn release_after_fork(&self) {
        self.worker.release_after_fork();
        self.bells.release();
        self.books.release();
    }

    /// In a fork child: what there is of caches is the parent's, and no thread works here.
    pub(crate) fn begin_child(&self) {
        self.inherited.store(self.books.with(|books| books.len()), Relaxed);
        self.worker.begin_child();
        self.flusher.begin_child();
    }

    /// Brings the figures up to date that are found by measuring.
    pub(crate) fn measure(&self) {
        stats::set(Counter::CacheFrames, self.frames_bytes());
        stats::set(Counter::CacheIndex, self.forests.node_bytes() + self.files_bytes());
    }

    /// Bytes of metadata that are resident.
    pub(crate) fn metadata_bytes(&self) -> u64 {
        self.frames_bytes() + self.forests.node_bytes()
    }

    fn frames_bytes(&self) -> u64 {
        (self.inherited.load(Relaxed)..).zip(self.pools()).map(|(at, pool)| self.frames_bytes_of(at, pool)).sum()
    }

    /// Of frames, and of the order of a pool, that are resident.
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

    /// Free chunks. At a limit what huge folios hold for nothing is taken out first.
    fn shrink(&self, want_bytes: u64, urgency: Urgency) -> u64 {
        let mut freed = self.shrink_free(want_bytes);
        if urgency == Urgency::Limit && freed < want_bytes {
            let mut at = self.inherited.load(Relaxed);
            while freed < want_bytes
                && let Some(cache) = self.next_cache(&mut at)
            {
                // Of reserved huge pages nothing would go back.
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
    /// The next cache from `at` on, which goes behind it.
    pub(super) fn next_cache(&self, at: &mut usize) -> Option<Arc<Inner>> {
        self.books.with(|books| {
            loop {
                let cache = books.get(*at)?.1.upgrade();
                *at += 1;
                if cache.is_some() {
                    return cache;
                }
            }
        })
    }

    /// A queue over a pool hears of it by its bell when memory is wanted back that it has registered.
    pub(super) fn hear_by(&self, pool: &'static Pool, bell: &RingBell) {
        let (mut new, mut room) = (Some((pool, bell.clone())), Vec::new());
        // Room is made without the lock: an allocation may ask for memory back.
        while new.is_some() {
            room.reserve(self.bells.with(|bells| bells.len()) + 1);
            self.bells.with(|bells| {
                if bells.len() == bells.capacity() && bells.len() < room.capacity() {
                    room.append(bells);
                    std::mem::swap(bells, &mut room);
                }
                if bells.len() < bells.capacity() {
                    bells.extend(new.take());
                }
            });
        }
    }

    pub(super) fn hear_no_more_by(&self, bell: &RingBell) {
        let own = self.bells.with(|bells| {
            let at = bells.iter().position(|(_, known)| known.is(bell))?;
            Some(bells.swap_remove(at))
        });
        drop(own);
    }

    /// Asks queues for memory that is free, but registered.
    fn want_back(&self, pool: &'static Pool) {
        if pool.want_back() {
            self.bells.with(|bells| {
                let own = bells.iter().filter(|(known, _)| std::ptr::eq(*known, pool));
                own.for_each(|(_, bell)| bell.ring());
            });
        }
    }

    /// Gives free chunks back. Those of caches without a file go first, being of no use to anybody.
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

/// Files by their id, and ids that are free.
#[derive(Default)]
pub(super) struct Files {
    pub by_id: Vec<Weak<File>>,
    pub free: Vec<u32>,
}

/// The inside of a cache, which its files share.
pub(crate) struct Inner {
    pub(super) caches: &'static Caches,
    /// Of the indices of its files.
    pub(super) nodes: &'static Forest,
    pub(super) pool: &'static Pool,
    /// Its pool's place among all: no two caches that are there at the same time have one number.
    pub(super) number: u32,
    pub(super) generation: u16,
    pub(super) name: Arc<str>,
    pub(super) limit_bytes: u64,
    pub(super) charged_bytes: AtomicU64,
    /// Of these, in huge folios.
    pub(super) huge_bytes: AtomicU64,
    /// In dirty folios of files with a store.
    pub(super) dirty_bytes: AtomicU64,
    pub(super) balance: Balance,
    use_huge: AtomicBool,
    pub(super) may_split: bool,
    pub(super) policy: Box<dyn Policy>,
    pub(super) patience: Option<Duration>,
    /// Whose turn it is when room is to be made.
    pub(super) order: &'static Order,
    /// Whether the order is this cache's: it is from the first file with a store on.
    is_ordered: Guarded<bool>,
    /// Files with a store.
    pub(super) stored_files: AtomicU32,
    /// Nothing was found to evict, or to thin: not looked for before.
    pub(super) evict_after_ns: AtomicU64,
    /// Threads that look for a folio to drop, or have one in hand.
    pub(super) in_hand: AtomicU32,
    pub(super) thin_after_ns: AtomicU64,
    pub(super) files: Guarded<Files>,
    pub(super) flights: Flights,
    /// On their way ahead of who will want them.
    pub(super) ahead_bytes: AtomicU64,
}

impl Inner {
    /// Refuses in a child of the process that made the cache: locks and pins of the parent's threads are here, they are not.
    #[inline]
    pub fn check(&self) -> Result<()> {
        if self.generation == self.caches.arena.generation() { Ok(()) } else { Err(Self::is_of_parent()) }
    }

    #[cold]
    fn is_of_parent() -> Error {
        Error::WrongState { what: "a cache of the parent process: a fork child has to make its own" }
    }

    /// Takes a folio, and counts it. It is busy: the caller's.
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

    /// Takes up to `most` more pages, of what is free and within the limit.
    pub fn take_more(&self, most: usize, taken: impl FnMut(Taken)) {
        let page_bytes = self.folio_bytes(0);
        // No more than there is room for: others who meet the limit meanwhile are refused.
        let room = self.limit_bytes.saturating_sub(self.charged_bytes.load(Relaxed)) / page_bytes;
        let most = most.min(room as usize);
        let wanted = page_bytes * most as u64;
        if self.charge(wanted).is_ok() {
            let bytes = page_bytes * self.pool.take_free_pages(most, taken) as u64;
            self.charged_bytes.fetch_sub(wanted - bytes, Relaxed);
            self.publish(0, bytes, stats::add);
        }
    }

    /// Takes so many pages that lie in a row, if such are free and within the limit; while there is less memory than the limit says
    /// also of a new chunk. Returns the first.
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

    /// Whether folios of an order are whole chunks.
    pub(super) fn is_huge(&self, order: u8) -> bool {
        order > 0 && order == self.pool.chunk_order() || self.pool.page().bytes() >= BLOCK_BYTES
    }

    /// Changes the figures of the process: of what is charged to it, as reserved huge pages are not.
    fn publish(&self, order: u8, bytes: u64, change: fn(Counter, u64)) {
        if !self.pool.is_hugetlb() {
            change(if self.is_huge(order) { Counter::CacheHuge } else { Counter::CacheSmall }, bytes);
        }
    }

    /// Takes a folio in the place of smaller ones of so many bytes: only what it has more is charged, so that nobody who writes
    /// meanwhile meets the limit.
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

    /// Nothing came of [`Inner::take_in_place`].
    pub fn give_in_place(&self, number: u32, order: u8, present_bytes: u64) {
        self.discount(order);
        self.charged_bytes.fetch_sub(self.folio_bytes(order) - present_bytes, Relaxed);
        self.pool.give(number, order);
    }

    /// A page whose place another folio took, with its charge.
    pub fn give_replaced(&self, number: u32) {
        self.discount(0);
        self.pool.give(number, 0);
    }

    /// A folio that the caller has alone goes back.
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

    /// A huge folio has become small ones.
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

    /// Ends a pin of a folio, and frees it if it was the last of one that left its file.
    #[inline]
    pub fn unpin(&self, number: u32) {
        if self.pool.word(number).unpin() {
            self.give(number, self.pool.word(number).load().order());
        }
    }

    /// Whether a huge folio is within the limit.
    pub fn has_room(&self) -> bool {
        self.has_room_for(self.folio_bytes(self.pool.chunk_order()))
    }

    /// Whether so much more is within the limit.
    pub fn has_room_for(&self, bytes: u64) -> bool {
        self.charged_bytes.load(Relaxed) + bytes <= self.limit_bytes
    }

    /// The next file from `id` on, which goes behind it.
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

    /// Makes room for `want_bytes` of folios. Returns whether it could.
    pub fn make_room(&self, want_bytes: u64) -> bool {
        self.evict_some(want_bytes) || self.thin_some(want_bytes)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // A fork child counts its own.
        if self.check().is_ok() {
            stats::sub(Counter::Caches, 1);
            if self.pool.is_hugetlb() {
                self.caches.books.with(|books| self.caches.end_reserves(books));
            }
        }
    }
}

/// A cache of files. Copies of the handle are the same cache; it ends with the last of them and of its files.
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
    /// Makes an empty file in memory.
    ///
    /// Cost: some 200 bytes.
    ///
    /// # Errors
    ///
    /// [`Error::NoAddresses`] for more than 16 million files.
    pub fn create(&self) -> Result<Mapping> {
        self.enter(None, 0)
    }

    /// Makes a file in memory of what lies in a store. Bytes come in as they are read; what is written stays in memory for
    /// some time ([`Writeback`]), and until [`Mapping::sync`] at most.
    ///
    /// Cost: about 1 KiB; for a cache's first such file 5 bytes for each page of the limit, as they are used.
    ///
    /// # Errors
    ///
    /// As [`Cache::create`]; [`Error::Store`] if the store does not tell its size, [`Error::FileTooLarge`];
    /// [`Error::Unsupported`] if its blocks are larger than a page.
    pub fn open(&self, store: Arc<dyn Store>) -> Result<Mapping> {
        let size_bytes =
            store.size_bytes().map_err(|cause| Error::Store { doing: "asking for the size of a file", cause })?;
        if !store.block_bytes().is_power_of_two() || store.block_bytes() > self.page().bytes() {
            return Err(Error::Unsupported { what: "the store's block is no power of two up to the cache's page" });
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

    /// Whether new folios may be huge from here on. Those that are stay.
    pub fn set_huge(&self, is_allowed: bool) {
        self.0.use_huge.store(is_allowed, Relaxed);
        self.0.pool.allow_huge(is_allowed);
    }

    pub fn page(&self) -> PageSize {
        self.0.pool.page()
    }

    /// Bytes of a huge folio: a block, or a page that is larger.
    pub fn huge_bytes(&self) -> usize {
        self.0.pool.chunk_bytes()
    }

    /// Bytes of the files' folios, which the limit bounds.
    pub fn charged_bytes(&self) -> u64 {
        self.0.charged_bytes.load(Relaxed)
    }

    /// Works on small folios that should be huge, for about `steps` blocks of some hundred microseconds. The background does so
    /// by itself where it runs. Returns how many became huge.
    pub fn collapse_waiting(&self, steps: usize) -> usize {
        self.0.caches.worker.step(steps)
    }

    /// Looks at up to `steps` huge folios whether they are sparse, a fraction of a millisecond each, and thins those that are: of
    /// all caches, at most once around. Only those are looked at to which nothing has happened since the last time around. The
    /// background does so by itself where it runs. Returns the bytes that came free.
    pub fn thin_waiting(&self, steps: usize) -> u64 {
        super::sweep::step(self.0.caches, steps, usize::MAX).freed_bytes
    }

    /// Writes back what has been dirty for long, and what is too much ([`Writeback`]). The background does so by itself where it runs.
    /// Returns the bytes.
    pub fn write_back_due(&self) -> u64 {
        self.0.flush().0
    }

    /// Bytes of its files that are in memory and not in their stores yet, in whole folios.
    pub fn dirty_bytes(&self) -> u64 {
        self.0.dirty_bytes()
    }

    /// Gives free memory back to the system; returns the bytes. It goes by itself when somebody needs it. What a [`Queue`] has
    /// registered goes once its thread has waited, asked for a page, or dropped it: it is asked to. Reserved huge pages go with the
    /// cache only ([`Source::Hugetlb`]).
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
