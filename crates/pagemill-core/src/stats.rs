//! Figures of this process: its counters and latest events, on one page that other processes can read.
//!
//! The page is private until [`publish`] moves the figures into a shared file mapping. `pagemill` commands can read the
//! file while the process runs and after it was killed. [`Figures`] is the layout, which [`VERSION`] identifies.
//! Commands validate all that they read, because other programs can write to the file. Each counter is declared once,
//! in `counters!`.
#![allow(unsafe_code)] // the shared page is reached through a pointer

use crate::trace::{self, EventRing};
use pagemill_sys::file::{self, Access};
use pagemill_sys::futex::{self, Scope};
use pagemill_sys::{clock, process};
use std::ffi::CStr;
use std::io;
use std::mem::offset_of;
use std::ops::Range;
use std::sync::atomic::{
    AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::Release, Ordering::SeqCst,
};
use std::time::Duration;

/// The unit of a counter.
///
/// Example: [`Row`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    Bytes,
    Count,
    Microseconds,
    Nanoseconds,
}

/// How a counter changes, and how the figures of several processes combine.
///
/// Example: [`Row`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CounterKind {
    /// A total that only grows. Several processes: the sum, including ended processes.
    Sum,
    /// A current amount. Several processes: the sum over the running ones.
    Gauge,
    /// The largest amount so far. Several processes: the largest of all.
    Peak,
    /// The time of the latest event. Several processes: the earliest of all.
    Moment,
}

/// The declaration of one counter. All output of counters is rendered from [`TABLE`], which has a row for each.
///
/// ```
/// use pagemill::stats::{Counter, CounterKind, TABLE, Unit};
///
/// let row = TABLE.iter().find(|row| row.name == "resident").unwrap();
/// assert_eq!((row.counter, row.unit, row.kind), (Counter::Resident, Unit::Bytes, CounterKind::Gauge));
/// println!("{}: {}", row.name, row.meaning);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Row {
    pub counter: Counter,
    pub name: &'static str,
    pub kind: CounterKind,
    pub unit: Unit,
    pub meaning: &'static str,
}

macro_rules! counters {
    ($(#[doc = $meaning:literal] $name:ident: $variant:ident, $kind:ident, $unit:ident;)*) => {
        /// The counters. The value of a variant is the index of its [`Row`] in [`TABLE`].
        ///
        /// Example: [`Snapshot`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub enum Counter { $(#[doc = $meaning] $variant),* }

        impl Counter {
            /// The counter's name in all output.
            pub fn name(self) -> &'static str {
                TABLE[self as usize].name
            }
        }

        /// The declarations of all counters, in the order of their indices on the page of figures.
        ///
        /// Example: [`Row`].
        pub const TABLE: &[Row] = &[$(Row {
            counter: Counter::$variant,
            name: stringify!($name),
            kind: CounterKind::$kind,
            unit: Unit::$unit,
            meaning: $meaning.trim_ascii(),
        }),*];
    };
}

// A new counter must be appended. Any other change of this list needs a new `VERSION`.
counters! {
    /// Memory charged: small + heap + c_library + cache.
    resident: Resident, Gauge, Bytes;
    /// Largest value of `resident` so far.
    resident_peak: ResidentPeak, Peak, Bytes;
    /// Largest value so far of `resident` minus the memory that could have been given back at once.
    net_peak: NetPeak, Peak, Bytes;
    /// Memory charged for the small allocator's extents (allocations below 64 KiB).
    small: Small, Gauge, Bytes;
    /// Memory charged for slots (allocations of 64 KiB and more), live or free.
    heap: Heap, Gauge, Bytes;
    /// Resident memory of free slots: given back on request.
    heap_free: HeapFree, Gauge, Bytes;
    /// Memory that the small allocator caches after a free: given back on request. As of the last measurement.
    small_free: SmallFree, Gauge, Bytes;
    /// Overcommitted memory that no measurement has found resident yet: what is touched is charged when measured.
    untouched: Untouched, Gauge, Bytes;
    /// Blocks (2 MiB) that became resident as huge pages.
    blocks_huge: BlocksHuge, Sum, Count;
    /// Blocks (2 MiB) that got small pages because no huge page was available.
    blocks_fallback: BlocksFallback, Sum, Count;
    /// Blocks (2 MiB) that got small pages because too much of a huge page would be unused for the process's size.
    blocks_small: BlocksSmall, Sum, Count;
    /// Blocks (2 MiB) that the helper thread made resident before an allocation needed them.
    blocks_prefaulted: BlocksPrefaulted, Sum, Count;
    /// Huge pages split into small pages so that a part could be given back.
    blocks_split: BlocksSplit, Sum, Count;
    /// Software pages larger than the OS page that were made resident as a whole.
    pages_populated: PagesPopulated, Sum, Count;
    /// Slots (allocations of 64 KiB and more) allocated for the first time.
    slots_fresh: SlotsFresh, Sum, Count;
    /// Times that memory had to be given back: for the program, a sibling process, a limit near or reached, or a stall.
    purge_requests: PurgeRequests, Sum, Count;
    /// Bytes that purges examined.
    purge_scanned: PurgeScanned, Sum, Bytes;
    /// Bytes that purges returned to the kernel.
    purge_freed: PurgeFreed, Sum, Bytes;
    /// Purges that the kernel refused (locked memory).
    purge_failed: PurgeFailed, Sum, Count;
    /// Times that reclaim made room below the limit for a charge.
    limit_reclaims: LimitReclaims, Sum, Count;
    /// Times that reclaim did not make enough room below the limit: the charge was refused or became a debt.
    limit_refused: LimitRefused, Sum, Count;
    /// Bytes that realloc moved as pages instead of copying.
    realloc_moved: ReallocMoved, Sum, Bytes;
    /// Bytes that realloc of slots copied.
    realloc_copied: ReallocCopied, Sum, Bytes;
    /// Bytes of new allocations of 64 KiB and more that were served by moving the pages of free ones.
    refilled: Refilled, Sum, Bytes;
    /// Bytes that calloc did not have to zero.
    calloc_skipped: CallocSkipped, Sum, Bytes;
    /// Times that the small allocator got no memory for pages of an extent, at the limit or from the kernel.
    extents_refused: ExtentsRefused, Sum, Count;
    /// Resident metadata of the arena, heap, volatile ranges, page caches and slab caches. As of the last measurement.
    metadata: Metadata, Gauge, Bytes;
    /// Memory in use that the C library's own malloc allocated while the program was small.
    c_library: CLibrary, Gauge, Bytes;
    /// Times that control groups' limits and the machine's memory were sampled.
    room_sampled: RoomSampled, Sum, Count;
    /// Bytes given back because the limit of the process or of its tree was reached.
    given_for_limit: GivenForLimit, Sum, Bytes;
    /// Bytes given back because a control group's limit was near.
    given_for_group: GivenForGroup, Sum, Bytes;
    /// Bytes given back because the machine's memory was short.
    given_for_machine: GivenForMachine, Sum, Bytes;
    /// Bytes given back because a sibling of the process tree requested them.
    given_for_sibling: GivenForSibling, Sum, Bytes;
    /// Bytes given back because the program requested it (malloc_trim).
    given_for_program: GivenForProgram, Sum, Bytes;
    /// Bytes given back because they were free and not reused for the age that --return sets.
    given_for_age: GivenForAge, Sum, Bytes;
    /// Bytes of free memory given back to compensate for new memory that became resident.
    given_for_new: GivenForNew, Sum, Bytes;
    /// Times that memory was short and nothing was left to give back.
    nothing_to_give: NothingToGive, Sum, Count;
    /// Bytes given back because threads stalled on memory, in the process's group or on the machine (PSI).
    given_for_stall: GivenForStall, Sum, Bytes;
    /// Bytes of free memory offered to the kernel (MADV_FREE), which may take them. Sum over all offers.
    offered: Offered, Sum, Bytes;
    /// Bytes of offered memory that the kernel has taken, as far as a check found this.
    taken: Taken, Sum, Bytes;
    /// Times that the kernel woke the helper thread: a limit came near, or a thread stalls on memory.
    signs: Signs, Sum, Count;
    /// Helper threads running.
    helpers: Helpers, Gauge, Count;
    /// Helper threads with real-time priority, which run before other threads.
    helpers_preferred: HelpersPreferred, Gauge, Count;
    /// Helper threads that the kernel warns before a control group's limit (v1: thresholds; v2: memory events).
    helpers_warned: HelpersWarned, Gauge, Count;
    /// Helper threads that the kernel wakes when a thread stalls on memory (PSI).
    helpers_told_of_stalls: HelpersToldOfStalls, Gauge, Count;
    /// Kernel warnings (limit near, memory stall) that could not be set up.
    alarms_refused: AlarmsRefused, Sum, Count;
    /// Times that a helper thread woke over 20 ms later than planned.
    helper_late: HelperLate, Sum, Count;
    /// Times that the limits of a control group or the machine's memory could not be read.
    limits_unread: LimitsUnread, Sum, Count;
    /// Times that the process was found in another control group, or under other limits.
    limits_changed: LimitsChanged, Sum, Count;
    /// Owners of memory (shrinkers) that panicked and are not called any more.
    owners_failed: OwnersFailed, Sum, Count;
    /// Times that an owner of memory (shrinker) was skipped because a thread had been blocked inside it for long.
    owners_blocked: OwnersBlocked, Sum, Count;
    /// Bytes that were discharged but had not been charged. Such an error of the account is corrected.
    books_mended: BooksMended, Sum, Bytes;
    /// Volatile ranges created so far.
    ranges_made: RangesMade, Sum, Count;
    /// Times that bytes of a volatile range were purged.
    ranges_purged: RangesPurged, Sum, Count;
    /// Bytes of volatile ranges that were purged, resident or not.
    range_bytes_purged: RangeBytesPurged, Sum, Bytes;
    /// Times that a thread waited for a range that was being purged.
    ranges_awaited: RangesAwaited, Sum, Count;
    /// Purged pages of strict ranges that were touched (SIGBUS).
    purged_touched: PurgedTouched, Sum, Count;
    /// Total length of the volatile ranges with a handle, whether marked volatile or not.
    ranges_bytes: RangesBytes, Gauge, Bytes;
    /// Memory marked volatile by address.
    marked_bytes: MarkedBytes, Gauge, Bytes;
    /// Memory charged for the pages of caches, in use or free.
    cache: Cache, Gauge, Bytes;
    /// Part of `cache` that is in huge folios of files.
    cache_huge: CacheHuge, Gauge, Bytes;
    /// Part of `cache` that is in folios smaller than a huge one.
    cache_small: CacheSmall, Gauge, Bytes;
    /// Part of `cache` that is in free whole blocks: given back on request.
    cache_free: CacheFree, Gauge, Bytes;
    /// Memory of the metadata of caches' pages (frames). As of the last measurement.
    cache_frames: CacheFrames, Gauge, Bytes;
    /// Memory of the index nodes of caches, and of the objects that describe files. As of the last measurement.
    cache_index: CacheIndex, Gauge, Bytes;
    /// Huge folios allocated when a file was written or read.
    huge_allocated: HugeAllocated, Sum, Count;
    /// Times that small folios were allocated in place of a huge one, because no block was available.
    huge_fallback: HugeFallback, Sum, Count;
    /// Huge folios split because a part of them was removed (truncate, punch_hole).
    huge_split_for_hole: HugeSplitForHole, Sum, Count;
    /// Huge folios split because the caller requested it.
    huge_split_for_caller: HugeSplitForCaller, Sum, Count;
    /// Huge folios split under memory pressure, because at least a quarter was zeros or beyond the end of the file.
    huge_split_for_reclaim: HugeSplitForReclaim, Sum, Count;
    /// Huge folios made of small ones because the caller requested it.
    huge_collapsed_for_caller: HugeCollapsedForCaller, Sum, Count;
    /// Huge folios made of small ones in the background.
    huge_collapsed_behind: HugeCollapsedBehind, Sum, Count;
    /// Collapses abandoned because a folio was in use or no block was available.
    huge_collapse_failed: HugeCollapseFailed, Sum, Count;
    /// Bytes of file pages given back because the pages contained only zeros, or lay beyond the end of the file.
    cache_thinned: CacheThinned, Sum, Bytes;
    /// Bytes of clean folios that were evicted.
    cache_evicted: CacheEvicted, Sum, Bytes;
    /// Times that a reader or writer waited for a folio that another thread held.
    folios_awaited: FoliosAwaited, Sum, Count;
    /// Bytes read from the stores of cached files, by rings and by blocking calls.
    store_read: StoreRead, Sum, Bytes;
    /// Bytes written to the stores of cached files.
    store_written: StoreWritten, Sum, Bytes;
    /// Open rings (io_uring) for transfers between memory and stores.
    rings: Rings, Gauge, Count;
    /// Rings that the kernel refused (io_uring forbidden): threads read and write instead.
    rings_refused: RingsRefused, Sum, Count;
    /// Memory regions registered with rings.
    regions_registered: RegionsRegistered, Gauge, Count;
    /// Memory regions that could not be registered (RLIMIT_MEMLOCK): each transfer to such a region looks up its pages.
    regions_refused: RegionsRefused, Sum, Count;
    /// Files opened on a file system that refused direct transfers: they use the kernel's page cache.
    stores_buffered: StoresBuffered, Sum, Count;
    /// Parts of direct transfers that used the kernel's page cache: ends of files, unaligned addresses.
    transfers_buffered: TransfersBuffered, Sum, Count;
    /// Transfers that the kernel completed only in part and that were resumed.
    transfers_resumed: TransfersResumed, Sum, Count;
    /// Transfers that took longer than allowed (a device that hangs): reported and cancelled.
    transfers_late: TransfersLate, Sum, Count;
    /// Transfers that ended as cancelled.
    transfers_cancelled: TransfersCancelled, Sum, Count;
    /// Transfers that a device had not completed when their ring was closed: their memory is leaked.
    transfers_stuck: TransfersStuck, Sum, Count;
    /// Number of page caches.
    caches: Caches, Gauge, Count;
    /// Huge folios split in the background, because at least a quarter was zeros or beyond the end of the file.
    huge_split_behind: HugeSplitBehind, Sum, Count;
    /// Bytes of evicted folios that were not used again after their first use.
    cache_evicted_new: CacheEvictedNew, Sum, Bytes;
    /// Bytes of evicted folios that had been used again, but not recently.
    cache_evicted_main: CacheEvictedMain, Sum, Bytes;
    /// Bytes read again soon after their eviction.
    cache_recalled: CacheRecalled, Sum, Bytes;
    /// Writes to the stores of cached files. A write of any length counts once.
    store_writes: StoreWrites, Sum, Count;
    /// Dirty bytes: in folios of files with a store, changed since the last writeback.
    cache_dirty: CacheDirty, Gauge, Bytes;
    /// Part of `cache_dirty` that is being written back now.
    cache_writeback: CacheWriteback, Gauge, Bytes;
    /// Bytes written back because they had been dirty for long.
    cache_written_for_age: CacheWrittenForAge, Sum, Bytes;
    /// Bytes written back because too much of their cache was dirty.
    cache_written_for_share: CacheWrittenForShare, Sum, Bytes;
    /// Bytes written back because all pages were dirty and a thread needed one.
    cache_written_for_room: CacheWrittenForRoom, Sum, Bytes;
    /// Bytes written back because the program requested it (`sync`).
    cache_written_for_sync: CacheWrittenForSync, Sum, Bytes;
    /// Times that writeback or sync of a file failed: the data stays dirty.
    cache_write_failed: CacheWriteFailed, Sum, Count;
    /// Bytes lost with the last handle of a file, because they could not be written back.
    cache_lost: CacheLost, Sum, Bytes;
    /// Times that a writer had to wait because too much was dirty.
    writers_throttled: WritersThrottled, Sum, Count;
    /// Time that writers waited because too much was dirty.
    writers_throttled_us: WritersThrottledUs, Sum, Microseconds;
    /// Bytes read from stores ahead of need: readahead and hints.
    read_ahead: ReadAhead, Sum, Bytes;
    /// Part of `read_ahead` that a later call used.
    read_ahead_used: ReadAheadUsed, Sum, Bytes;
    /// Part of `read_ahead` that was evicted or removed before any call used it.
    read_ahead_unused: ReadAheadUnused, Sum, Bytes;
    /// Reads of stores started by readahead.
    read_ahead_transfers: ReadAheadTransfers, Sum, Count;
    /// Calls that waited for a store, or for another thread's read, longer than their cache's timeout.
    reads_late: ReadsLate, Sum, Count;
    /// Blocks of slab caches. Their memory is charged and part of `cache`.
    slab_blocks: SlabBlocks, Gauge, Count;
    /// Memory of free blocks that belong to no slab cache at present: given back on request.
    slab_free: SlabFree, Gauge, Bytes;
    /// Objects of slab caches that were moved.
    slab_moved: SlabMoved, Sum, Count;
    /// Objects of slab caches that could not be moved: pinned, busy, refused by their owner, or no free slot for them.
    slab_stayed: SlabStayed, Sum, Count;
    /// Slabs emptied by moving their objects.
    slab_emptied: SlabEmptied, Sum, Count;
    /// Slabs that are not used any more because a callback panicked while it handled them.
    slab_lost: SlabLost, Sum, Count;
    /// Reserved huge pages (hugetlb) of caches, filled or not: not part of `cache` or `resident`.
    cache_hugetlb: CacheHugetlb, Gauge, Bytes;
    /// Caches that got ordinary memory because too few reserved huge pages were free.
    hugetlb_refused: HugetlbRefused, Sum, Count;
    /// Number of slab caches.
    slab_caches: SlabCaches, Gauge, Count;
    /// Steps of background defragmentation of slab caches.
    slab_behind_steps: SlabBehindSteps, Sum, Count;
    /// CPU time of the background thread for slab caches.
    slab_behind_ns: SlabBehindNs, Sum, Nanoseconds;
    /// Slab caches excluded from background defragmentation because a callback panicked.
    slab_behind_failed: SlabBehindFailed, Sum, Count;
    /// Empty slabs and idle blocks kept for new objects: given back on request. As of the last measurement.
    slab_kept: SlabKept, Gauge, Bytes;
    /// Volatile ranges with a handle, and freed ones: given back on request. As of the last measurement.
    ranges_giveable: RangesGiveable, Gauge, Bytes;
    /// Resident memory marked volatile by address: given back on request. As of the last measurement.
    marked_giveable: MarkedGiveable, Gauge, Bytes;
    /// Part of `marked_giveable` that Pagemill did not allocate: not part of `resident`.
    marked_foreign: MarkedForeign, Gauge, Bytes;
    /// Freed parts of the small allocator's huge pages: given back by splitting. As of the last measurement.
    small_stale: SmallStale, Gauge, Bytes;
    /// Time of the last measurement of all figures, of `CLOCK_MONOTONIC`.
    measured_at: MeasuredAt, Moment, Nanoseconds;
    /// Panics of stores, policies and completion callbacks that background threads caught.
    behind_panics: BehindPanics, Sum, Count;
    /// Page faults in views that the fault handler handled. An access that is retried counts again.
    view_faults: ViewFaults, Sum, Count;
    /// Accesses to views that raised SIGBUS: behind the end of the file, or the store could not read the page.
    view_faults_failed: ViewFaultsFailed, Sum, Count;
    /// Page faults in views for which the handler filled the page, mostly after reading it from the store.
    view_fills: ViewFills, Sum, Count;
    /// Mappings of files and of private copies in views. A huge folio is one mapping.
    view_mappings: ViewMappings, Gauge, Count;
    /// Largest number of `view_mappings` that is allowed: a quarter of vm.max_map_count. 0 before the first view.
    view_mappings_max: ViewMappingsMax, Gauge, Count;
    /// Folios unmapped from views because they were evicted, written back, split, collapsed or removed from the file.
    view_unmapped: ViewUnmapped, Sum, Count;
    /// Folios unmapped from views because `view_mappings_max` was reached.
    view_unmapped_for_limit: ViewUnmappedForLimit, Sum, Count;
    /// Sum of the ranges that views have locked in memory: part of `cache`. A range locked twice counts twice.
    view_locked: ViewLocked, Gauge, Bytes;
}

/// The counters of memory that could be given back at once. Their sum is [`Snapshot::giveable_bytes`].
pub const GIVEABLE: &[Counter] = &[
    Counter::HeapFree,
    Counter::SmallFree,
    Counter::SmallStale,
    Counter::RangesGiveable,
    Counter::MarkedGiveable,
    Counter::CacheFree,
    Counter::SlabFree,
    Counter::SlabKept,
];

/// Maximum number of counters on a page.
pub(crate) const MAX_COUNTERS: usize = 192;
const _: () = assert!(TABLE.len() <= MAX_COUNTERS);

/// Layout version of [`Figures`].
pub const VERSION: u32 = 3;

/// First word of the page of figures. It identifies the file format.
const MAGIC: u64 = u64::from_le_bytes(*b"pagemill");

/// The page of figures: the process's identity, its counters and its latest events.
///
/// # Invariants
///
/// Every bit pattern is a valid value, because the page may be mapped from any file.
///
/// Example: [`Snapshot`], which copies the page.
#[repr(C)]
pub struct Figures {
    magic: AtomicU64,
    /// Version in the low half, process id in the high half.
    version_pid: AtomicU64,
    /// Start time of the process in clock ticks since boot. With the process id it identifies the process.
    start_ticks: AtomicU64,
    /// Process name, 15 bytes and a zero.
    name: [AtomicU8; 16],
    /// Addresses of the arena: the first, and one past the last. Both are 0 while there is no arena.
    arena: [AtomicU64; 2],
    /// Futex word on which the helper sleeps if the process is in no tree; incremented to wake it.
    wake: AtomicU32,
    /// Number of the latest request to this process. The process that makes a request stores it (`listing`).
    asked: AtomicU32,
    counters: [AtomicU64; MAX_COUNTERS],
    pub(crate) ring: EventRing,
}

impl Figures {
    /// Length of the file in bytes.
    pub const LEN: usize = size_of::<Self>().next_multiple_of(64 << 10);

    /// Returns a page of zeros.
    pub(crate) const fn new() -> Self {
        // SAFETY: every bit pattern is valid (type invariant).
        unsafe { std::mem::zeroed() }
    }

    /// Stores the process's identity and name on the page, and then the magic, which makes the page valid.
    fn write_header(&self, identity: process::Identity, name: [u8; 16]) {
        self.version_pid.store(u64::from(VERSION) | u64::from(identity.pid) << 32, Relaxed);
        self.start_ticks.store(identity.start_ticks, Relaxed);
        self.name.iter().zip(name).for_each(|(to, byte)| to.store(byte, Relaxed));
        self.magic.store(MAGIC, Release);
    }

    /// Wakes all threads that sleep on the page's `wake` word.
    fn wake_sleepers(&self) {
        self.wake.fetch_add(1, SeqCst);
        futex::wake(&self.wake, i32::MAX, Scope::Shared);
    }

    /// Returns the number of the latest request to the process of this page.
    pub fn latest_request(&self) -> u32 {
        self.asked.load(Relaxed)
    }

    /// Announces the request with this number to the process of this page, whose helper then answers all requests up to
    /// the number. Returns `false` if the number was announced before: then the helper may have looked for the
    /// request's file before the file existed.
    pub fn announce_request(&self, number: u32) -> bool {
        let before = self.asked.fetch_max(number, SeqCst);
        self.wake_sleepers();
        before < number
    }

    /// Copies the page's counters. Returns `None` if the page has another layout version than [`VERSION`].
    fn snapshot(&self) -> Option<Snapshot> {
        let version_pid = self.version_pid.load(Relaxed);
        if self.magic.load(Relaxed) != MAGIC || version_pid as u32 != VERSION {
            return None;
        }
        let mut name = self.name.each_ref().map(|byte| byte.load(Relaxed));
        name[15] = 0;
        let (pid, start_ticks) = ((version_pid >> 32) as u32, self.start_ticks.load(Relaxed));
        Some(Snapshot {
            identity: process::Identity { pid, start_ticks },
            name,
            arena: self.arena[0].load(Relaxed)..self.arena[1].load(Relaxed),
            values: std::array::from_fn(|index| self.counters[index].load(Relaxed)),
        })
    }
}

/// The page of figures of this process until [`publish`] creates a shared page.
static PRIVATE_PAGE: Figures = Figures::new();
/// The shared page of figures of this process; null while [`PRIVATE_PAGE`] is used.
static SHARED_PAGE: AtomicPtr<Figures> = AtomicPtr::new(std::ptr::null_mut());

/// Returns the page of figures that this process updates: the shared page, or the private one before [`publish`].
#[inline]
pub fn current() -> &'static Figures {
    let page = SHARED_PAGE.load(Relaxed);
    // SAFETY: a pointer that is not null refers to a page that `publish` mapped, and such a page is never unmapped.
    if page.is_null() { &PRIVATE_PAGE } else { unsafe { &*page } }
}

/// Returns the futex word on which the helper thread sleeps if the process is in no tree ([`Scope::Shared`]).
pub(crate) fn wake_word() -> &'static AtomicU32 {
    &current().wake
}

/// Wakes the helper thread of this process, if the process is in no tree.
pub fn wake() {
    loop {
        let page = SHARED_PAGE.load(SeqCst);
        current().wake_sleepers();
        // If `publish` replaced the page meanwhile, the helper may sleep on the new page: wake again.
        if page == SHARED_PAGE.load(SeqCst) {
            return;
        }
    }
}

/// Adds `amount` to a counter of this process.
#[inline]
pub fn add(counter: Counter, amount: u64) {
    current().counters[counter as usize].fetch_add(amount, Relaxed);
}

/// Subtracts `amount` from a gauge of this process.
#[inline]
pub fn sub(counter: Counter, amount: u64) {
    current().counters[counter as usize].fetch_sub(amount, Relaxed);
}

/// Sets a gauge of this process to `amount`.
#[inline]
pub fn set(counter: Counter, amount: u64) {
    current().counters[counter as usize].store(amount, Relaxed);
}

/// Raises a peak of this process to `amount` if that is larger; returns whether the peak was raised.
#[inline]
pub fn raise(counter: Counter, amount: u64) -> bool {
    current().counters[counter as usize].fetch_max(amount, Relaxed) < amount
}

/// Returns the current value of a counter of this process.
#[inline]
pub fn get(counter: Counter) -> u64 {
    current().counters[counter as usize].load(Relaxed)
}

/// Stores the addresses of this process's arena on the page, so that commands can recognise the arena's mappings.
pub fn publish_arena_range(addresses: Range<usize>) {
    for (word, addr) in current().arena.iter().zip([addresses.start, addresses.end]) {
        word.store(addr as u64, Relaxed);
    }
}

/// A copy of the figures of one process.
///
/// ```
/// use pagemill::Pagemill;
/// use pagemill::stats::Counter;
///
/// let figures = Pagemill::of_process()?.figures();
/// let (resident, giveable) = (figures.get(Counter::Resident), figures.giveable_of_resident());
/// assert!(giveable <= resident && figures.memory_amounts().net <= resident);
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Snapshot {
    #[doc(hidden)] // for commands, which depend on `pagemill-sys`
    pub identity: process::Identity,
    name: [u8; 16],
    /// Addresses of the process's arena; empty while it has none.
    pub arena: Range<u64>,
    values: [u64; MAX_COUNTERS],
}

impl Default for Snapshot {
    fn default() -> Self {
        Self { identity: process::Identity::default(), name: [0; 16], arena: 0..0, values: [0; MAX_COUNTERS] }
    }
}

impl Snapshot {
    /// The value of a counter in this copy.
    pub fn get(&self, counter: Counter) -> u64 {
        self.values[counter as usize]
    }

    /// Sets a counter of this copy to `amount`.
    pub fn set(&mut self, counter: Counter, amount: u64) {
        self.values[counter as usize] = amount;
    }

    /// The process's name. Unprintable characters are replaced, because other programs can write to the page's file.
    pub fn name(&self) -> String {
        process::printable_letters(&self.name).collect()
    }

    /// Bytes that the process would give back at once on request: the sum over all owners of memory.
    pub fn giveable_bytes(&self) -> u64 {
        self.giveable_of_resident().saturating_add(self.get(Counter::MarkedForeign))
    }

    /// The part of [`Snapshot::giveable_bytes`] that `resident` includes: all but volatile memory that Pagemill did not
    /// allocate.
    pub fn giveable_of_resident(&self) -> u64 {
        let sum = GIVEABLE.iter().fold(0u64, |sum, counter| sum.saturating_add(self.get(*counter)));
        sum.saturating_sub(self.get(Counter::MarkedForeign)).min(self.get(Counter::Resident))
    }

    /// The process's resident bytes, its giveable bytes, and its resident bytes without the giveable ones (`net`).
    pub fn memory_amounts(&self) -> MemoryAmounts {
        let resident = self.get(Counter::Resident);
        MemoryAmounts { resident, giveable: self.giveable_bytes(), net: resident - self.giveable_of_resident() }
    }

    /// Returns the time since the last measurement of all figures; `None` if the figures were never measured.
    pub fn age(&self) -> Option<Duration> {
        let measured_ns = self.get(Counter::MeasuredAt);
        (measured_ns > 0).then(|| Duration::from_nanos(clock::fine_ns().saturating_sub(measured_ns)))
    }

    /// The values of all counters, in the order of [`TABLE`].
    pub fn values(&self) -> &[u64; MAX_COUNTERS] {
        &self.values
    }

    /// Returns a copy of this snapshot that has the counter values `values`.
    pub(crate) fn with_values(&self, values: [u64; MAX_COUNTERS]) -> Self {
        Self { values, ..self.clone() }
    }

    /// Adds the counters of another instance in the same process. Adds peaks, too: the sum of two peaks is an upper
    /// bound of the process's peak.
    pub fn add(&mut self, other: &Self) {
        for row in TABLE {
            let (mine, theirs) = (&mut self.values[row.counter as usize], other.get(row.counter));
            *mine = if row.kind == CounterKind::Moment { (*mine).min(theirs) } else { mine.saturating_add(theirs) };
        }
    }

    /// Adds the sums of a process that has ended, and keeps the larger of two peaks. Gauges and moments are left out.
    pub fn absorb_ended(&mut self, other: &Self) {
        for row in TABLE {
            let (mine, theirs) = (&mut self.values[row.counter as usize], other.get(row.counter));
            match row.kind {
                CounterKind::Sum => *mine = mine.saturating_add(theirs),
                CounterKind::Peak => *mine = (*mine).max(theirs),
                CounterKind::Gauge | CounterKind::Moment => {}
            }
        }
    }
}

/// The result of `pagemill_figures`, laid out as in include/pagemill.h.
///
/// Example: [`Snapshot`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct MemoryAmounts {
    pub resident: u64,
    pub giveable: u64,
    /// The part of `resident` that is not giveable.
    pub net: u64,
}

/// Returns the figures of this process as they are now, without a measurement.
pub fn snapshot() -> Snapshot {
    let page = current();
    if page.magic.load(Relaxed) != MAGIC {
        page.write_header(process::own_identity(), process::name(process::id()));
    }
    page.snapshot().unwrap_or_default()
}

/// Moves the figures to a new shared file at `path`. From then on counters are updated in that file.
///
/// Updates that other threads make during the move are carried over. An update within the last few instructions of the
/// move may be lost.
///
/// # Errors
///
/// The error of creating the file. The figures stay private after an error.
pub fn publish(path: &CStr, identity: process::Identity) -> io::Result<()> {
    let map = |access| file::map_shared(path, Figures::LEN, access);
    // A file from before an `exec` of this process is reused, because other processes may have mapped it.
    let addr = match map(Access::Create) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => map(Access::Update)?,
        created => created?,
    };
    // SAFETY: the mapping is as long as the type and page aligned, and every bit pattern is valid (type invariant).
    let page: &'static Figures = unsafe { &*(addr as *const Figures) };
    page.write_header(identity, process::name(identity.pid));
    let before = current();
    let copied: [u64; MAX_COUNTERS] = std::array::from_fn(|index| before.counters[index].load(Relaxed));
    for (to, amount) in page.counters.iter().zip(copied) {
        to.store(amount, Relaxed);
    }
    for (to, from) in page.arena.iter().zip(&before.arena) {
        to.store(from.load(Relaxed), Relaxed);
    }
    SHARED_PAGE.store(addr as *mut Figures, SeqCst);
    // Wake the threads that sleep on the old page. From now on wake-ups go to the new page.
    before.wake_sleepers();
    // Add the updates that other threads made on the old page since it was copied.
    for ((to, from), amount) in page.counters.iter().zip(&before.counters).zip(copied) {
        to.fetch_add(from.load(Relaxed).wrapping_sub(amount), Relaxed);
    }
    trace::event(trace::Event::Start, u64::from(identity.pid), clock::fine_ns());
    Ok(())
}

/// Replaces the parent's shared page by a private page of zeros, in a fork child. The new page has the same address.
///
/// # Safety
///
/// The process is a fork child with one thread and calls this once. The call unmaps the page at that address.
pub unsafe fn detach_in_child() {
    let page = SHARED_PAGE.load(Relaxed);
    if page.is_null() {
        PRIVATE_PAGE.counters.iter().for_each(|counter| counter.store(0, Relaxed));
        return;
    }
    // SAFETY: `publish` made the mapping at this address, and no other thread uses it, because there is none.
    if unsafe { file::map_private_over(page as usize, Figures::LEN) }.is_err() {
        SHARED_PAGE.store(std::ptr::null_mut(), Relaxed);
    }
}

/// Reads the figures that a process published at `path`.
///
/// # Errors
///
/// The error of opening the file; `InvalidData` if it holds no figures of this version.
pub fn read(path: &CStr) -> io::Result<Snapshot> {
    read_of(path, None)
}

/// As [`read`], but fails with `EACCES` unless `owner` owns the file; `None` skips the check. Root calls this to read
/// files in other users' folders.
///
/// # Errors
///
/// As [`read`].
pub fn read_of(path: &CStr, owner: Option<u32>) -> io::Result<Snapshot> {
    // Without the events, the copy takes a twentieth of the time.
    let snapshot = with_copy(path, owner, offset_of!(Figures, ring), Figures::snapshot)?;
    snapshot.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

/// Calls `act` with a copy of the first `len` bytes of the page of figures at `path`; the other bytes are zero. `act`
/// gets no mapping of the file, because accessing a mapping would raise `SIGBUS` if the file's user truncates the file.
/// The copy takes 34 KiB of stack.
pub(crate) fn with_copy<T>(path: &CStr, owner: Option<u32>, len: usize, act: impl Fn(&Figures) -> T) -> io::Result<T> {
    let mut copy = Figures::new();
    let start = (&raw mut copy).cast::<u8>();
    // SAFETY: these are the bytes of a local value for which every bit pattern is valid (type invariant).
    let bytes = unsafe { std::slice::from_raw_parts_mut(start, size_of::<Figures>()) };
    file::read_published(path, owner, &mut bytes[..len])?;
    Ok(act(&copy))
}

/// Calls `act` with the mapped page of figures of another process, so that `act` can send a request to that process.
/// Fails with `InvalidData` if the file at `path` is not a page of figures of this version.
pub(crate) fn with_page_of_process<T>(path: &CStr, act: impl FnOnce(&Figures) -> T) -> io::Result<T> {
    let addr = file::map_shared(path, Figures::LEN, Access::Update)?;
    // SAFETY: as in `publish`.
    let page = unsafe { &*(addr as *const Figures) };
    let is_ours = page.magic.load(Relaxed) == MAGIC && page.version_pid.load(Relaxed) as u32 == VERSION;
    let result = is_ours.then(|| act(page));
    // SAFETY: nothing uses the mapping any more.
    unsafe { file::unmap(addr, Figures::LEN) };
    result.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// The rows of `TABLE` must have the order of the counters' indices, and every row must have a meaning.
    #[test]
    fn table_is_in_counter_order() {
        for (index, row) in TABLE.iter().enumerate() {
            assert_eq!(row.counter as usize, index, "{}", row.name);
            assert!(!row.meaning.is_empty(), "{}", row.name);
        }
    }

    /// Reads invalid files. A short file and a file without the magic must be rejected. A page of which all other bits
    /// are 1 must be read: the name must be printable, and sums must saturate.
    #[test]
    fn invalid_pages_are_rejected_or_harmless() {
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
