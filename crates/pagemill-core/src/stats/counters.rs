//! The counters of Pagemill: each is declared once, in `counters!`, and all output is rendered from [`TABLE`].

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
        /// Example: [`Snapshot`](super::Snapshot).
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
    /// Sum of the ranges of cached files that are locked in memory: part of `cache`. A range locked twice counts twice.
    cache_locked: CacheLocked, Gauge, Bytes;
    /// Part of `range_bytes_purged` that was purged because the limit of the process or of its tree was reached.
    purged_for_limit: PurgedForLimit, Sum, Bytes;
    /// Part of `range_bytes_purged` that was purged because a control group's limit was near.
    purged_for_group: PurgedForGroup, Sum, Bytes;
    /// Part of `range_bytes_purged` that was purged because the machine's memory was short.
    purged_for_machine: PurgedForMachine, Sum, Bytes;
    /// Part of `range_bytes_purged` that was purged because a sibling of the process tree requested memory.
    purged_for_sibling: PurgedForSibling, Sum, Bytes;
    /// Part of `range_bytes_purged` that was purged on request: by the program (malloc_trim), or by `pagemill trim`.
    purged_for_program: PurgedForProgram, Sum, Bytes;
    /// Part of `range_bytes_purged` that was purged because threads stalled on memory (PSI).
    purged_for_stall: PurgedForStall, Sum, Bytes;
}

/// The counters of memory that could be given back at once. Their sum is [`Snapshot::giveable_bytes`](super::Snapshot::giveable_bytes).
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
}
