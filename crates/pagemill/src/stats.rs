//! Figures of this process: counters declared once, kept on one page that other processes may read.
//!
//! Until [`publish`] the page is private; then it is a file mapped shared, so
//! that `pagemill` commands read it while the process runs, and after it was
//! killed. Layout: [`Figures`], fixed by [`VERSION`]. Readers trust nothing in it.
#![allow(unsafe_code)] // the shared page is reached through a pointer

use crate::trace::{self, Ring};
use pagemill_sys::file::{self, Access};
use pagemill_sys::futex::{self, Scope};
use pagemill_sys::{clock, process};
use std::ffi::CStr;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};

/// What a counter counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    Bytes,
    Count,
}

/// How a counter moves, and how the figures of several processes combine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows; processes add up.
    Sum,
    /// The amount now; processes add up while they live.
    Gauge,
    /// The largest amount so far; of several processes the largest counts.
    Peak,
}

/// One row of the table that all output is rendered from.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    pub counter: Counter,
    pub name: &'static str,
    pub kind: Kind,
    pub unit: Unit,
    pub meaning: &'static str,
}

macro_rules! counters {
    ($(#[doc = $meaning:literal] $name:ident: $variant:ident, $kind:ident, $unit:ident;)*) => {
        /// A counter's place on the page. New ones go to the end, or [`VERSION`] changes.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub enum Counter { $(#[doc = $meaning] $variant),* }

        impl Counter {
            /// Its word in all output.
            pub fn name(self) -> &'static str {
                TABLE[self as usize].name
            }
        }

        /// Every counter, in the order of the page.
        pub const TABLE: &[Row] = &[$(Row {
            counter: Counter::$variant,
            name: stringify!($name),
            kind: Kind::$kind,
            unit: Unit::$unit,
            meaning: $meaning.trim_ascii(),
        }),*];
    };
}

counters! {
    /// Memory charged: small + heap + c_library + cache.
    resident: Resident, Gauge, Bytes;
    /// Largest value of `resident` so far.
    resident_peak: ResidentPeak, Peak, Bytes;
    /// Largest amount of `resident` less what could have been given back at once.
    net_peak: NetPeak, Peak, Bytes;
    /// Charged to the small allocator's extents (sizes below 64 KiB).
    small: Small, Gauge, Bytes;
    /// Charged to slots (64 KiB and up), live or free.
    heap: Heap, Gauge, Bytes;
    /// Free slots with their memory still there: given back on request.
    heap_free: HeapFree, Gauge, Bytes;
    /// Freed by the program and kept by the small allocator: given back on request. As of the last measurement.
    small_free: SmallFree, Gauge, Bytes;
    /// Opened for the program, not known to be touched: counted when measured.
    untouched: Untouched, Gauge, Bytes;
    /// Blocks taken from the system as huge pages.
    blocks_huge: BlocksHuge, Sum, Count;
    /// Blocks for which no huge page was to be had; small pages serve.
    blocks_fallback: BlocksFallback, Sum, Count;
    /// Blocks left in small pages because a huge one would waste too large a share.
    blocks_small: BlocksSmall, Sum, Count;
    /// Blocks brought in by the helper before anybody asked.
    blocks_prefaulted: BlocksPrefaulted, Sum, Count;
    /// Blocks split so that a part could be given back.
    blocks_split: BlocksSplit, Sum, Count;
    /// Software pages larger than the OS page brought in as a whole.
    pages_populated: PagesPopulated, Sum, Count;
    /// Slots handed out that nobody had used before.
    slots_fresh: SlotsFresh, Sum, Count;
    /// Requests to give memory back: from the program, a sibling, or the limit.
    purge_requests: PurgeRequests, Sum, Count;
    /// Bytes looked at by purges.
    purge_scanned: PurgeScanned, Sum, Bytes;
    /// Bytes that the kernel took back.
    purge_freed: PurgeFreed, Sum, Bytes;
    /// Purges that the kernel refused (locked memory).
    purge_failed: PurgeFailed, Sum, Count;
    /// Requests that were over the limit and met room only after reclaim.
    limit_reclaims: LimitReclaims, Sum, Count;
    /// Requests refused: over the limit, and nothing left to reclaim.
    limit_refused: LimitRefused, Sum, Count;
    /// Bytes that realloc moved as pages instead of copying.
    realloc_moved: ReallocMoved, Sum, Bytes;
    /// Bytes that realloc of slots copied.
    realloc_copied: ReallocCopied, Sum, Bytes;
    /// Bytes of new allocations from 64 KiB up served by moving the pages of free ones.
    refilled: Refilled, Sum, Bytes;
    /// Bytes that calloc did not have to zero.
    calloc_skipped: CallocSkipped, Sum, Bytes;
    /// Extents refused to the small allocator.
    extents_refused: ExtentsRefused, Sum, Count;
    /// Metadata of arena and heap that is resident.
    metadata: Metadata, Gauge, Bytes;
    /// Handed out by the C library's own malloc while the program was small, and still in use.
    c_library: CLibrary, Gauge, Bytes;
    /// Looks at the limits of control groups and at the machine's memory.
    room_sampled: RoomSampled, Sum, Count;
    /// Given back because the limit of the process or of its tree was reached.
    given_for_limit: GivenForLimit, Sum, Bytes;
    /// Given back because a control group's limit was near.
    given_for_group: GivenForGroup, Sum, Bytes;
    /// Given back because the machine's memory was short.
    given_for_machine: GivenForMachine, Sum, Bytes;
    /// Given back because a sibling of the process tree asked.
    given_for_sibling: GivenForSibling, Sum, Bytes;
    /// Given back because the program asked (malloc_trim).
    given_for_program: GivenForProgram, Sum, Bytes;
    /// Given back because the process had been idle.
    given_for_idleness: GivenForIdleness, Sum, Bytes;
    /// Given back, cold, because new memory came in.
    given_for_new: GivenForNew, Sum, Bytes;
    /// Times that memory was short and there was nothing left to give.
    nothing_to_give: NothingToGive, Sum, Count;
    /// Given back because somebody waits for memory, here or elsewhere on the machine (PSI).
    given_for_stall: GivenForStall, Sum, Bytes;
    /// Free and cold: the kernel may take it by itself. In all so far, however often.
    offered: Offered, Sum, Bytes;
    /// Of what was offered, found to have been taken.
    taken: Taken, Sum, Bytes;
    /// Times that the kernel woke the helper because a limit came near or somebody waits.
    signs: Signs, Sum, Count;
    /// Helper threads that run.
    helpers: Helpers, Gauge, Count;
    /// Of them, those that may go before other threads (real-time priority).
    helpers_preferred: HelpersPreferred, Gauge, Count;
    /// Of them, those that the kernel warns before a control group's limit (threshold events; on version 2 its own events).
    helpers_warned: HelpersWarned, Gauge, Count;
    /// Of them, those that the kernel wakes when somebody waits for memory (PSI).
    helpers_told_of_stalls: HelpersToldOfStalls, Gauge, Count;
    /// Alarms that could not be set, whatever for.
    alarms_refused: AlarmsRefused, Sum, Count;
    /// Times that a helper woke over 20 ms later than it wanted to.
    helper_late: HelperLate, Sum, Count;
    /// Looks at a control group or at the machine's memory that told nothing.
    limits_unread: LimitsUnread, Sum, Count;
    /// Times that the process was found in another control group, or under other limits.
    limits_changed: LimitsChanged, Sum, Count;
    /// Owners of memory that failed (panicked) and are not asked any more.
    owners_failed: OwnersFailed, Sum, Count;
    /// Times that an owner of memory was passed over because it did not come back.
    owners_blocked: OwnersBlocked, Sum, Count;
    /// Charges ended that were not on the books: blocks and account had drifted apart.
    books_mended: BooksMended, Sum, Bytes;
    /// Volatile ranges made so far.
    ranges_made: RangesMade, Sum, Count;
    /// Times that bytes of a volatile range were purged.
    ranges_purged: RangesPurged, Sum, Count;
    /// Bytes of volatile ranges that were purged, resident or not.
    range_bytes_purged: RangeBytesPurged, Sum, Bytes;
    /// Times that somebody wanted a range while it was being purged.
    ranges_awaited: RangesAwaited, Sum, Count;
    /// Purged pages of strict ranges that were touched (SIGBUS).
    purged_touched: PurgedTouched, Sum, Count;
    /// Length of the volatile ranges with a handle, marked or not.
    ranges_bytes: RangesBytes, Gauge, Bytes;
    /// Memory that is marked volatile by address.
    marked_bytes: MarkedBytes, Gauge, Bytes;
    /// Charged to the pages of caches, in use or free.
    cache: Cache, Gauge, Bytes;
    /// Of it, in huge folios of files.
    cache_huge: CacheHuge, Gauge, Bytes;
    /// Of it, in folios of a single page or a few.
    cache_small: CacheSmall, Gauge, Bytes;
    /// Of it, free and in whole blocks: given back on request.
    cache_free: CacheFree, Gauge, Bytes;
    /// Metadata of the pages of caches. As of the last measurement.
    cache_frames: CacheFrames, Gauge, Bytes;
    /// Nodes of the indices of caches, and what stands for their files. As of the last measurement.
    cache_index: CacheIndex, Gauge, Bytes;
    /// Huge folios made when a file was written or read.
    huge_allocated: HugeAllocated, Sum, Count;
    /// Huge folios that were wanted, but no block was free and none was to be had: small ones serve.
    huge_fallback: HugeFallback, Sum, Count;
    /// Huge folios split because a part of them went (truncate, punch_hole).
    huge_split_for_hole: HugeSplitForHole, Sum, Count;
    /// Huge folios split because the caller asked.
    huge_split_for_caller: HugeSplitForCaller, Sum, Count;
    /// Huge folios split because they held little and memory was wanted.
    huge_split_for_reclaim: HugeSplitForReclaim, Sum, Count;
    /// Huge folios made of small ones because the caller asked.
    huge_collapsed_for_caller: HugeCollapsedForCaller, Sum, Count;
    /// Huge folios made of small ones in the background.
    huge_collapsed_behind: HugeCollapsedBehind, Sum, Count;
    /// Collapses given up because somebody used a part or there was no block.
    huge_collapse_failed: HugeCollapseFailed, Sum, Count;
    /// Pages of files given back because they held zeros only, or lay beyond the end.
    cache_thinned: CacheThinned, Sum, Bytes;
    /// Bytes of clean folios that were dropped to make room.
    cache_evicted: CacheEvicted, Sum, Bytes;
    /// Times that a reader or writer waited for a folio that somebody held.
    folios_awaited: FoliosAwaited, Sum, Count;
    /// Bytes read from files behind the page cache, by rings and by blocking calls.
    store_read: StoreRead, Sum, Bytes;
    /// Bytes written to files behind the page cache.
    store_written: StoreWritten, Sum, Bytes;
    /// Rings for transfers that are open.
    rings: Rings, Gauge, Count;
    /// Rings that the kernel refused (io_uring forbidden): threads read and write instead.
    rings_refused: RingsRefused, Sum, Count;
    /// Pieces of memory that are registered with rings.
    regions_registered: RegionsRegistered, Gauge, Count;
    /// Pieces of memory that could not be registered (RLIMIT_MEMLOCK): each transfer looks their pages up.
    regions_refused: RegionsRefused, Sum, Count;
    /// Files opened whose file system refused direct transfers: they go through the kernel's page cache.
    stores_buffered: StoresBuffered, Sum, Count;
    /// Parts of transfers of direct files that went through the kernel's page cache: tails, odd addresses.
    transfers_buffered: TransfersBuffered, Sum, Count;
    /// Transfers of which the system did a part, and that were gone on with.
    transfers_resumed: TransfersResumed, Sum, Count;
    /// Transfers that took longer than allowed (a device that hangs): reported, and cancelled.
    transfers_late: TransfersLate, Sum, Count;
    /// Transfers that ended as given up.
    transfers_cancelled: TransfersCancelled, Sum, Count;
    /// Transfers that a device did not let go of when their ring was closed: their memory is lost.
    transfers_stuck: TransfersStuck, Sum, Count;
    /// Caches of files in memory.
    caches: Caches, Gauge, Count;
    /// Huge folios split in the background because they held little.
    huge_split_behind: HugeSplitBehind, Sum, Count;
    /// Of the clean folios that were dropped, bytes of such as were not used again after they had come in.
    cache_evicted_new: CacheEvictedNew, Sum, Bytes;
    /// Of the clean folios that were dropped, bytes of such as had been used, but not for long.
    cache_evicted_main: CacheEvictedMain, Sum, Bytes;
    /// Bytes that came in again not long after they had been dropped.
    cache_recalled: CacheRecalled, Sum, Bytes;
    /// Writes to files behind the page cache, of any length.
    store_writes: StoreWrites, Sum, Count;
    /// In folios of files with a store that were written to since they were written back last.
    cache_dirty: CacheDirty, Gauge, Bytes;
    /// Of it, being written back now.
    cache_writeback: CacheWriteback, Gauge, Bytes;
    /// Bytes that were written back because they had been dirty for long.
    cache_written_for_age: CacheWrittenForAge, Sum, Bytes;
    /// Bytes that were written back because too much of their cache was dirty.
    cache_written_for_share: CacheWrittenForShare, Sum, Bytes;
    /// Bytes that were written back because all pages were dirty, and somebody needed one.
    cache_written_for_room: CacheWrittenForRoom, Sum, Bytes;
    /// Bytes that were written back because the program asked (`sync`).
    cache_written_for_sync: CacheWrittenForSync, Sum, Bytes;
    /// Times that a file could not be written back, or not made safe: what failed stays dirty.
    cache_write_failed: CacheWriteFailed, Sum, Count;
    /// Bytes that were lost with the last handle of a file, because they could not be written back.
    cache_lost: CacheLost, Sum, Bytes;
    /// Times that a writer had to wait because too much was dirty.
    writers_throttled: WritersThrottled, Sum, Count;
    /// Microseconds that writers have waited for that.
    writers_throttled_us: WritersThrottledUs, Sum, Count;
    /// Bytes that came from stores before anybody asked for them: readahead, and hints.
    read_ahead: ReadAhead, Sum, Bytes;
    /// Of these, bytes of folios that were used.
    read_ahead_used: ReadAheadUsed, Sum, Bytes;
    /// Of these, bytes of folios that were dropped before anybody used them.
    read_ahead_unused: ReadAheadUnused, Sum, Bytes;
    /// Reads of stores that were started to read ahead.
    read_ahead_transfers: ReadAheadTransfers, Sum, Count;
    /// Calls that waited for a store, or for another's read, for longer than their cache's patience.
    reads_late: ReadsLate, Sum, Count;
    /// Blocks that slab caches have, counted in `resident` as `cache`.
    slab_blocks: SlabBlocks, Gauge, Count;
    /// Free blocks of no slab cache that keep their memory: given back on request.
    slab_free: SlabFree, Gauge, Bytes;
    /// Objects of slab caches that were moved.
    slab_moved: SlabMoved, Sum, Count;
    /// Objects of slab caches that were to be moved and stayed: pinned, busy, refused by their owner, or without a place.
    slab_stayed: SlabStayed, Sum, Count;
    /// Slabs that were emptied by moving what was in them.
    slab_emptied: SlabEmptied, Sum, Count;
    /// Slabs out of use because a callback panicked over them.
    slab_lost: SlabLost, Sum, Count;
    /// Reserved huge pages (hugetlb) that caches have, filled or not: beside `cache`, and not resident.
    cache_hugetlb: CacheHugetlb, Gauge, Bytes;
    /// Caches that were to have reserved huge pages and got ordinary memory, since not so many were free.
    hugetlb_refused: HugetlbRefused, Sum, Count;
    /// Slab caches that there are.
    slab_caches: SlabCaches, Gauge, Count;
    /// Steps of defragmentation of slab caches that were made in the background.
    slab_behind_steps: SlabBehindSteps, Sum, Count;
    /// Nanoseconds of a processor that the thread in the background took for slab caches.
    slab_behind_ns: SlabBehindNs, Sum, Count;
    /// Slab caches that are left alone in the background because a callback panicked.
    slab_behind_failed: SlabBehindFailed, Sum, Count;
}

/// Rows that a page has room for.
const CAPACITY: usize = 128;
const _: () = assert!(TABLE.len() <= CAPACITY);

/// Layout version of [`Figures`].
pub const VERSION: u32 = 2;

const MAGIC: u64 = u64::from_le_bytes(*b"pagemill");

/// The page: identity, counters, the latest events.
///
/// # Invariants
///
/// All bits are valid: it may be mapped from any file.
#[repr(C)]
pub struct Figures {
    magic: AtomicU64,
    /// Version in the low half, process id in the high half.
    version_pid: AtomicU64,
    start_ticks: AtomicU64,
    /// Process name, 15 bytes and a zero.
    name: [AtomicU64; 2],
    /// Addresses of the arena: first, and one past the last; zeros while there is none.
    arena: [AtomicU64; 2],
    /// Bumped to wake the helper, which sleeps on it outside of a tree.
    wake: AtomicU32,
    /// The latest request for a list of ranges; another process raises it (`listing`).
    asked: AtomicU32,
    counters: [AtomicU64; CAPACITY],
    pub(crate) ring: Ring,
}

impl Figures {
    /// Bytes of the file.
    pub const LEN: usize = size_of::<Self>().next_multiple_of(64 << 10);

    const fn new() -> Self {
        Self {
            magic: AtomicU64::new(0),
            version_pid: AtomicU64::new(0),
            start_ticks: AtomicU64::new(0),
            name: [const { AtomicU64::new(0) }; 2],
            arena: [const { AtomicU64::new(0) }; 2],
            wake: AtomicU32::new(0),
            asked: AtomicU32::new(0),
            counters: [const { AtomicU64::new(0) }; CAPACITY],
            ring: Ring::new(),
        }
    }

    fn sign(&self, who: process::Identity, name: [u8; 16]) {
        self.version_pid.store(u64::from(VERSION) | u64::from(who.pid) << 32, Relaxed);
        self.start_ticks.store(who.start_ticks, Relaxed);
        let (low, high) = name.split_at(8);
        for (word, half) in self.name.iter().zip([low, high]) {
            word.store(u64::from_le_bytes(half.try_into().unwrap_or_default()), Relaxed);
        }
        self.magic.store(MAGIC, std::sync::atomic::Ordering::Release);
    }

    /// Lets whoever sleeps on the page go on.
    fn wake_sleepers(&self) {
        self.wake.fetch_add(1, SeqCst);
        futex::wake(&self.wake, i32::MAX, Scope::Shared);
    }

    /// The latest request.
    pub(crate) fn asked(&self) -> u32 {
        self.asked.load(Relaxed)
    }

    /// Asks: the helper answers all requests up to this number. Says whether it is a new one: of another the helper may have
    /// looked for the file before it was there.
    pub(crate) fn ask(&self, number: u32) -> bool {
        let before = self.asked.fetch_max(number, SeqCst);
        self.wake_sleepers();
        before < number
    }

    /// Copies the page's figures; `None` if it is not one of ours.
    fn snapshot(&self) -> Option<Snapshot> {
        let version_pid = self.version_pid.load(Relaxed);
        if self.magic.load(Relaxed) != MAGIC || version_pid as u32 != VERSION {
            return None;
        }
        let mut name = [0; 16];
        for (bytes, word) in name.chunks_mut(8).zip(&self.name) {
            bytes.copy_from_slice(&word.load(Relaxed).to_le_bytes());
        }
        name[15] = 0;
        Some(Snapshot {
            who: process::Identity { pid: (version_pid >> 32) as u32, start_ticks: self.start_ticks.load(Relaxed) },
            name,
            arena: self.arena[0].load(Relaxed)..self.arena[1].load(Relaxed),
            values: std::array::from_fn(|index| self.counters[index].load(Relaxed)),
        })
    }
}

/// The page before it is published.
static PRIVATE: Figures = Figures::new();
/// The page in use: [`PRIVATE`], or the shared file.
static CURRENT: AtomicPtr<Figures> = AtomicPtr::new(std::ptr::null_mut());

pub(crate) fn current() -> &'static Figures {
    let page = CURRENT.load(Relaxed);
    // SAFETY: not null means a page mapped by `publish`, which is never unmapped.
    if page.is_null() { &PRIVATE } else { unsafe { &*page } }
}

/// The word that the helper sleeps on outside of a tree ([`Scope::Shared`]).
pub(crate) fn wake_word() -> &'static AtomicU32 {
    &current().wake
}

/// Wakes the helper.
pub(crate) fn wake() {
    loop {
        let page = CURRENT.load(SeqCst);
        current().wake_sleepers();
        // Published meanwhile: it may sleep on the new page by now.
        if page == CURRENT.load(SeqCst) {
            return;
        }
    }
}

/// Adds to a counter.
#[inline]
pub fn add(counter: Counter, amount: u64) {
    current().counters[counter as usize].fetch_add(amount, Relaxed);
}

/// Takes from a gauge.
#[inline]
pub fn sub(counter: Counter, amount: u64) {
    current().counters[counter as usize].fetch_sub(amount, Relaxed);
}

/// Sets a gauge.
#[inline]
pub fn set(counter: Counter, amount: u64) {
    current().counters[counter as usize].store(amount, Relaxed);
}

/// Raises a peak; says whether it rose.
#[inline]
pub fn raise(counter: Counter, amount: u64) -> bool {
    current().counters[counter as usize].fetch_max(amount, Relaxed) < amount
}

/// The counter's value now.
#[inline]
pub fn get(counter: Counter) -> u64 {
    current().counters[counter as usize].load(Relaxed)
}

/// Says where this process's arena lies, so that others can tell its mappings from the rest.
pub(crate) fn describe_arena(addresses: Range<usize>) {
    for (word, addr) in current().arena.iter().zip([addresses.start, addresses.end]) {
        word.store(addr as u64, Relaxed);
    }
}

/// Figures of one process at one moment.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub who: process::Identity,
    name: [u8; 16],
    /// Addresses of the process's arena; empty while it has none.
    pub arena: Range<u64>,
    values: [u64; CAPACITY],
}

impl Default for Snapshot {
    fn default() -> Self {
        Self { who: process::Identity::default(), name: [0; 16], arena: 0..0, values: [0; CAPACITY] }
    }
}

impl Snapshot {
    pub fn get(&self, counter: Counter) -> u64 {
        self.values[counter as usize]
    }

    /// The process's name, printable characters only (it comes from a file that others can write).
    pub fn name(&self) -> String {
        let bytes = self.name.iter().take_while(|byte| **byte != 0);
        bytes.map(|byte| if (b' '..=b'~').contains(byte) { char::from(*byte) } else { '?' }).collect()
    }

    /// Bytes that the process would give back at once if asked.
    pub fn giveable_bytes(&self) -> u64 {
        let free = self.get(Counter::HeapFree).saturating_add(self.get(Counter::SmallFree));
        free.saturating_add(self.get(Counter::CacheFree))
            .saturating_add(self.get(Counter::SlabFree))
            .min(self.get(Counter::Resident))
    }

    /// Adds the figures of another Pagemill of the same process. Of peaks the sum: it was not higher.
    pub fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.values.iter_mut().zip(other.values) {
            *mine = mine.saturating_add(theirs);
        }
    }

    /// Adds the figures of a process that has ended: gauges, which are amounts now, stay out.
    pub fn absorb_ended(&mut self, other: &Self) {
        for row in TABLE {
            let (mine, theirs) = (&mut self.values[row.counter as usize], other.get(row.counter));
            match row.kind {
                Kind::Sum => *mine = mine.saturating_add(theirs),
                Kind::Peak => *mine = (*mine).max(theirs),
                Kind::Gauge => {}
            }
        }
    }
}

/// The figures of this process.
pub fn snapshot() -> Snapshot {
    let page = current();
    if page.magic.load(Relaxed) != MAGIC {
        page.sign(process::own_identity(), process::name(process::id()));
    }
    page.snapshot().unwrap_or_default()
}

/// Moves the figures to a new shared file at `path` and counts there from now on.
///
/// What other threads count during the move is carried over, but for a few instructions at its end.
///
/// # Errors
///
/// What making the file says; the figures stay private then.
pub fn publish(path: &CStr, who: process::Identity) -> io::Result<()> {
    // SAFETY: a new mapping, at no fixed address.
    let map = |access| unsafe { file::map_shared(path, Figures::LEN, access, 0) };
    // A file of this process's life before an `exec` is taken over: others may be looking at it.
    let addr = match map(Access::Create) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => map(Access::Update)?,
        created => created?,
    };
    // SAFETY: the file is as long as the type, page aligned, and any bits are valid.
    let page: &'static Figures = unsafe { &*(addr as *const Figures) };
    page.sign(who, process::name(who.pid));
    let copied: [u64; CAPACITY] = std::array::from_fn(|index| current().counters[index].load(Relaxed));
    for (to, amount) in page.counters.iter().zip(copied) {
        to.store(amount, Relaxed);
    }
    let before = current();
    for (to, from) in page.arena.iter().zip(&before.arena) {
        to.store(from.load(Relaxed), Relaxed);
    }
    CURRENT.store(addr as *mut Figures, SeqCst);
    // Who sleeps on the page before is woken here for the last time.
    before.wake_sleepers();
    // What other threads counted meanwhile.
    for ((to, from), amount) in page.counters.iter().zip(&before.counters).zip(copied) {
        to.fetch_add(from.load(Relaxed).wrapping_sub(amount), Relaxed);
    }
    trace::event(trace::Event::Start, u64::from(who.pid), clock::fine_ns());
    Ok(())
}

/// In a fork child: counts from zero, on a private page in the place of the parent's shared one.
pub fn detach_in_child() {
    let page = CURRENT.load(Relaxed);
    if page.is_null() {
        PRIVATE.counters.iter().for_each(|counter| counter.store(0, Relaxed));
        return;
    }
    // SAFETY: this address range is the mapping made by `publish`; other threads do not exist.
    if unsafe { file::map_private_over(page as usize, Figures::LEN) }.is_err() {
        CURRENT.store(std::ptr::null_mut(), Relaxed);
    }
}

/// Reads the figures that a process published at `path`.
///
/// # Errors
///
/// What opening the file says; `InvalidData` if it holds no figures of this version.
pub fn read(path: &CStr) -> io::Result<Snapshot> {
    with_page(path, Figures::snapshot)?.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

/// Maps the page at `path` read-only while `act` looks at it.
pub(crate) fn with_page<T>(path: &CStr, act: impl FnOnce(&Figures) -> T) -> io::Result<T> {
    with_mapped(path, Access::Inspect, act)
}

/// As [`with_page`], for who asks that process for something; `InvalidData` if the page is none of ours.
pub(crate) fn with_page_of_asked<T>(path: &CStr, act: impl FnOnce(&Figures) -> T) -> io::Result<T> {
    let is_ours =
        |page: &Figures| page.magic.load(Relaxed) == MAGIC && page.version_pid.load(Relaxed) as u32 == VERSION;
    with_mapped(path, Access::Update, |page| is_ours(page).then(|| act(page)))?
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

/// `act` changes nothing of a page that is mapped to [`Access::Inspect`] it.
fn with_mapped<T>(path: &CStr, access: Access, act: impl FnOnce(&Figures) -> T) -> io::Result<T> {
    // SAFETY: a new mapping, at no fixed address.
    let addr = unsafe { file::map_shared(path, Figures::LEN, access, 0) }?;
    // SAFETY: as in `publish`.
    let result = act(unsafe { &*(addr as *const Figures) });
    // SAFETY: nothing of it is used any more.
    unsafe { file::unmap(addr, Figures::LEN) };
    Ok(result)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_page() {
        for (index, row) in TABLE.iter().enumerate() {
            assert_eq!(row.counter as usize, index, "{}", row.name);
            assert!(!row.meaning.is_empty(), "{}", row.name);
        }
    }

    /// Absurd contents are refused or made harmless: a short file, no magic, a name of control characters.
    #[test]
    fn readers_trust_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("page");
        let c_path = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        std::fs::write(&path, b"short").unwrap();
        assert!(read(&c_path).is_err());
        std::fs::write(&path, vec![0u8; Figures::LEN]).unwrap();
        assert!(read(&c_path).is_err());
        let mut bytes = vec![0xFFu8; Figures::LEN];
        bytes[..8].copy_from_slice(b"pagemill");
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        std::fs::write(&path, &bytes).unwrap();
        let snapshot = read(&c_path).unwrap();
        assert_eq!(snapshot.name(), "?".repeat(15));
        assert_eq!(snapshot.giveable_bytes(), u64::MAX);
        let mut total = snapshot.clone();
        total.absorb_ended(&snapshot);
        assert_eq!(total.get(Counter::PurgeFreed), u64::MAX);
    }
}
