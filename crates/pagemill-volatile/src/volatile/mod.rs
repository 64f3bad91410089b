//! Volatile ranges: memory whose contents may be purged under pressure. The owner learns whether the contents were
//! purged.
//!
//! A [`VolatileBuf`] is *held* (its bytes are preserved) or *volatile* (a purge may discard them). Marking and
//! unmarking change one word of the range, without a system call, a lock, or a cache line shared with other ranges.
//! Bytes are accessed through a [`Pin`], which excludes purges and reports which bytes survived earlier purges. Only
//! memory pressure purges ranges, the least recently marked first (`purge`).
//!
//! ```
//! use pagemill::{Contents, VolatileBuf};
//!
//! let mut tile = VolatileBuf::new(1 << 20)?;
//! tile.bytes_mut()?.fill(7);
//! tile.mark()?; // from here on its bytes may be purged
//! match tile.unmark()? {
//!     Contents::Kept => assert_eq!(tile.pin()?[0], 7),
//!     Contents::Purged { .. } => tile.bytes_mut()?.fill(7), // recreate the contents
//! }
//! # Ok::<(), pagemill::Error>(())
//! ```
//!
//! ```text
//!   Ranges  --- entries: 128 bytes each (state word, address, length, kept bytes)
//!     |            |
//!     |            +-- over 1 MiB: a slot of the heap, whole blocks, with huge pages where possible
//!     |            `-- smaller: a part of a pack (a block of small pages, divided into ranges of one class)
//!     `--- Shrinker: walks the entries
//! ```
//!
//! Uses `heap`, `arena`. Implements `reclaim::Shrinker`. Locks: `free_lists_lock` (allocating and freeing entries), that
//! of the purge queue; marking acquires neither.
#![allow(unsafe_code)] // entries in memory mapped by hand, frees slots

pub mod c;
pub mod cache;
mod guards;
mod intervals;
pub mod listed;
mod mark_table;
mod purge;
mod purge_queue;
pub mod range;
mod records;
mod residents;
#[cfg(all(test, shuttle))]
mod shuttle_tests;
mod vpurge;
pub mod vrange;
mod word;

pub use cache::{Blob, CacheCounts, VolatileCache};
pub use guards::handle_fault;
pub use listed::Listed;
pub use range::{Behaviour, Contents, Pin, VolatileBuf};
pub use records::{List, RangeLists, ask};
pub use vrange::Vranges;

use pagemill_core::arena::{Arena, Table, Zeroed};
use pagemill_core::error::{Error, Result};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{self, Acquire, AtomicU32, AtomicU64, Backoff, Lock, Relaxed, Release};
use pagemill_core::units::{BLOCK_BYTES, os_page_bytes};
use pagemill_heap::Heap;
use pagemill_sys::mem;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::SeqCst;
use word::{Outcome, RangeWord, Refused, epoch_of};

/// Maximum number of ranges in a process.
pub const MAX_RANGES: usize = 1 << 24;

/// Maximum length of a range in a pack (a block of small pages that several ranges share). A longer range has a slot of
/// the heap.
const MAX_PACKED_BYTES: usize = BLOCK_BYTES / 2;

/// Number of size classes of ranges in packs: the powers of two from 4 KiB to 1 MiB.
const PACK_CLASSES: usize = 9;
/// Size of a range in a pack, in the smallest size class.
const MIN_CLASS_BYTES: usize = MAX_PACKED_BYTES >> (PACK_CLASSES - 1);

/// Value of [`RangeEntry::class`] for a range that has a slot of the heap.
const OWN_SLOT_CLASS: u32 = PACK_CLASSES as u32;

/// Number of shards, each with free lists of its own. Threads allocate entries from different shards, so that the state
/// words of different threads are far apart: the hardware prefetches neighbouring cache lines and pages.
const SHARDS: usize = 64;

/// Maximum number of bytes that are reserved in the budget when a range is allocated or marked. The rest of a longer
/// range may not be accessed soon.
const MAX_RESERVED_BYTES: u64 = 8 * BLOCK_BYTES as u64;

/// Number of new entries that a shard gets at a time. Together they take 64 KiB. The number is small in shuttle tests,
/// which take long for each entry that a purge visits.
const ENTRIES_PER_RUN: u32 = if cfg!(shuttle) { 4 } else { 512 };

/// Returns the index of this thread's shard. The shard depends on the thread, not on the CPU, because the thread that
/// allocates a range usually marks the range, too.
fn current_shard() -> usize {
    // The thread pointers of two threads may differ in few bits only, so they are hashed.
    (mem::thread_token().wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (usize::BITS - SHARDS.trailing_zeros())) % SHARDS
}

/// Returns the current time in ticks of 4.2 ms (see [`epoch_of`]).
#[inline]
fn current_epoch() -> u32 {
    epoch_of(sync::coarse_ns())
}

/// Metadata of one range, on two cache lines of its own. The hardware fetches lines in pairs, so marking one range does
/// not slow down threads that mark other ranges.
#[repr(C, align(128))]
struct RangeEntry {
    word: RangeWord,
    /// Address of the range's bytes. A part of a pack belongs to its entry permanently, whereas a slot is freed with
    /// the range.
    addr: AtomicU64,
    len_bytes: AtomicU64,
    /// Number of bytes at the start of the range that were not purged. Valid while the word has the bit `LOST_BIT`.
    kept_bytes: AtomicU64,
    /// Number of bytes that are purged at a time: the length of the range, or of a chunk if the range is purged in
    /// chunks.
    chunk_bytes: AtomicU64,
    /// The size class of a range in a pack, or [`OWN_SLOT_CLASS`].
    class: AtomicU32,
    /// The shard to whose free list the entry returns.
    shard: AtomicU32,
    /// The next entry in the free list: its number plus one; 0 at the end. Protected by `free_lists_lock`.
    next: AtomicU32,
}

// SAFETY: the type consists of atomics, for which zero bits are valid.
unsafe impl Zeroed for RangeEntry {}

impl RangeEntry {
    /// Runs `act`. If a purge has claimed the range, requests the purge to stop, waits until it has stopped (some
    /// hundred microseconds at most), and runs `act` again.
    #[inline]
    fn retry_after_purge<T>(&self, act: impl Fn(&RangeWord) -> Outcome<T>) -> Outcome<T> {
        match act(&self.word) {
            Err(Refused::Purging) => self.wait_for_purge(act),
            result => result,
        }
    }

    /// Requests the purge of the range to stop. Runs `act` until the result is not [`Refused::Purging`], and returns
    /// that result.
    #[cold]
    fn wait_for_purge<T>(&self, act: impl Fn(&RangeWord) -> Outcome<T>) -> Outcome<T> {
        stats::add(Counter::RangesAwaited, 1);
        let mut backoff = Backoff::new();
        loop {
            if self.word.request_stop() {
                backoff.pause();
            }
            match act(&self.word) {
                Err(Refused::Purging) => {}
                result => return result,
            }
        }
    }
}

/// All volatile ranges with a handle of one Pagemill instance.
///
/// Example: [`VolatileBuf`].
pub struct Ranges {
    arena: &'static Arena,
    heap: &'static Heap,
    entries: Table<RangeEntry>,
    /// Number of range entries created so far.
    count: AtomicU32,
    /// Heads of the free lists, by shard and class. The last class is that of entries without memory. Protected by
    /// `free_lists_lock`.
    free: [[AtomicU32; PACK_CLASSES + 1]; SHARDS],
    /// For each shard: the first number, and the end, of its run of entries that were never used. Protected by
    /// `free_lists_lock`.
    runs: [[AtomicU32; 2]; SHARDS],
    free_lists_lock: Lock,
    purger: purge::Purger,
}

impl Ranges {
    /// Creates an empty set of ranges; no memory becomes resident.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if there is no address space for its metadata.
    pub fn new(arena: &'static Arena, heap: &'static Heap) -> Result<Self> {
        Ok(Self {
            arena,
            heap,
            entries: Table::new(MAX_RANGES)?,
            count: AtomicU32::new(0),
            free: std::array::from_fn(|_| Default::default()),
            runs: std::array::from_fn(|_| Default::default()),
            free_lists_lock: Lock::new(),
            purger: purge::Purger::default(),
        })
    }

    /// Allocates a range of `len_bytes`, which is held at first. Its bytes are zero, or contents of memory that this
    /// process has freed. `behaviour` defines how the range is purged after it was marked.
    ///
    /// Cost: an entry of 128 bytes, and memory where it is touched. Up to 1 MiB the range has a power of two of address
    /// space in a block that ranges share; a longer range has a slot of the heap.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`] over the limit, [`Error::NoAddresses`] if the range is too long or there are [`MAX_RANGES`]
    /// ranges, [`Error::BadLength`] for zero bytes, [`Error::BadChunk`] for chunks that are not a multiple of the OS
    /// page, [`Error::System`] if the kernel refuses the memory.
    pub fn allocate(&'static self, len_bytes: usize, behaviour: Behaviour) -> Result<VolatileBuf> {
        if len_bytes == 0 {
            return Err(Error::BadLength { len_bytes: 0 });
        }
        let chunk_bytes = match behaviour {
            Behaviour::Full => len_bytes,
            Behaviour::Partial { chunk_bytes } if chunk_bytes == 0 || !chunk_bytes.is_multiple_of(os_page_bytes()) => {
                return Err(Error::BadChunk { chunk_bytes: chunk_bytes as u64 });
            }
            Behaviour::Partial { chunk_bytes } => chunk_bytes,
        };
        // Reserve room for a part of a large range only, because the rest may never be touched.
        self.arena.budget.reserve((len_bytes as u64).min(MAX_RESERVED_BYTES))?;
        let (number, addr) = match class_of(len_bytes) {
            Some(class) => self.allocate_in_pack(class)?,
            None => self.allocate_in_slot(len_bytes, chunk_bytes)?,
        };
        let entry = self.entry(number);
        entry.addr.store(addr.as_ptr() as u64, Relaxed);
        entry.len_bytes.store(len_bytes as u64, Relaxed);
        entry.chunk_bytes.store(chunk_bytes as u64, Relaxed);
        entry.kept_bytes.store(len_bytes as u64, Relaxed);
        stats::add(Counter::RangesMade, 1);
        if self.purger.total_bytes.fetch_add(len_bytes as u64, SeqCst) == 0 {
            // Marking does not notify the helper, so the helper must poll as long as there are ranges.
            self.heap.note_more();
        }
        self.publish_total_bytes();
        Ok(VolatileBuf::of_entry(self, number, addr, len_bytes))
    }

    fn entry(&self, number: u32) -> &RangeEntry {
        self.entries.get(number as usize)
    }

    /// Allocates an entry of this size class, with its part of a pack. Takes a free entry, or creates a pack if there
    /// is no free entry.
    fn allocate_in_pack(&'static self, class: usize) -> Result<(u32, NonNull<u8>)> {
        let shard = current_shard();
        if let Some(taken) = self.pop_free_entry(shard, class) {
            return Ok(taken);
        }
        let pack = match self.heap.allocate_small_page_block() {
            Ok(pack) => pack,
            // Without memory for a pack, use a free entry of another shard.
            Err(error) => return (0..SHARDS).find_map(|other| self.pop_free_entry(other, class)).ok_or(error),
        };
        let size = MIN_CLASS_BYTES << class;
        let first = self.create_entries(shard, class, BLOCK_BYTES / size).inspect_err(|_| self.free_heap_slot(pack))?;
        for part in 0..BLOCK_BYTES / size {
            self.entry(first + part as u32).addr.store((pack.as_ptr() as usize + part * size) as u64, Relaxed);
        }
        self.push_free_entries(first + 1..first + (BLOCK_BYTES / size) as u32);
        Ok((first, pack))
    }

    /// Allocates an entry and a slot of the heap for its bytes.
    fn allocate_in_slot(&'static self, len_bytes: usize, chunk_bytes: usize) -> Result<(u32, NonNull<u8>)> {
        let slot = self.heap.allocate_stable_blocks(len_bytes)?;
        if len_bytes == chunk_bytes || chunk_bytes.is_multiple_of(BLOCK_BYTES) {
            self.arena.allow_huge(slot.as_ptr() as usize, len_bytes & !(BLOCK_BYTES - 1));
        } else {
            // Chunks smaller than a huge page need small pages, because discarding a part of a huge page frees nothing.
            let first = self.arena.block_of(slot.as_ptr() as usize);
            for block in first..first + len_bytes.div_ceil(BLOCK_BYTES) {
                // SAFETY: this call allocated the slot to which the block belongs.
                unsafe { self.arena.reopen_with_small_pages(block) };
            }
        }
        let shard = current_shard();
        if let Some((number, _)) = self.pop_free_entry(shard, PACK_CLASSES) {
            return Ok((number, slot));
        }
        let number = self.create_entries(shard, PACK_CLASSES, 1).inspect_err(|_| self.free_heap_slot(slot))?;
        Ok((number, slot))
    }

    /// Removes an entry from a free list and changes its phase to *Held*. Skips entries that a purge has claimed.
    /// Returns the entry's number and the address of its memory.
    fn pop_free_entry(&self, shard: usize, class: usize) -> Option<(u32, NonNull<u8>)> {
        let _guard = self.free_lists_lock.lock();
        let mut link = &self.free[shard][class];
        loop {
            let number = link.load(Relaxed).checked_sub(1)?;
            let entry = self.entry(number);
            if entry.word.hold().is_ok() {
                link.store(entry.next.load(Relaxed), Relaxed);
                let addr = entry.addr.load(Relaxed) as usize as *mut u8;
                return Some((number, NonNull::new(addr).unwrap_or(NonNull::dangling())));
            }
            link = &entry.next;
        }
    }

    /// Adds an entry to its free list. The caller must hold `free_lists_lock`.
    fn push_free_entry(&self, number: u32) {
        let entry = self.entry(number);
        let head = &self.free[entry.shard.load(Relaxed) as usize][entry.class.load(Relaxed) as usize];
        entry.next.store(head.load(Relaxed), Relaxed);
        head.store(number + 1, Relaxed);
    }

    /// Creates consecutive entries and returns the number of the first entry, which is held. The caller must add the
    /// other entries to the free list with [`Ranges::push_free_entries`].
    fn create_entries(&self, shard: usize, class: usize, entries: usize) -> Result<u32> {
        let entries = entries as u32;
        let _guard = self.free_lists_lock.lock();
        let [next, end] = &self.runs[shard];
        if end.load(Relaxed) - next.load(Relaxed) < entries {
            let start = self.count.load(Relaxed);
            let count = start + entries.max(ENTRIES_PER_RUN);
            if count as usize > MAX_RANGES {
                return Err(Error::NoAddresses { wanted_bytes: u64::from(entries) * size_of::<RangeEntry>() as u64 });
            }
            self.entries.open(0, start as usize, count as usize)?;
            // Purges visit these entries from now on. They are free and have no memory.
            self.count.store(count, Release);
            next.store(start, Relaxed);
            end.store(count, Relaxed);
        }
        let first = next.fetch_add(entries, Relaxed);
        for number in first..first + entries {
            let entry = self.entry(number);
            entry.shard.store(shard as u32, Relaxed);
            entry.class.store(class as u32, Relaxed);
        }
        let is_held = self.entry(first).word.hold();
        debug_assert!(is_held.is_ok());
        Ok(first)
    }

    /// Adds new entries to their free list.
    fn push_free_entries(&self, entries: std::ops::Range<u32>) {
        let _guard = self.free_lists_lock.lock();
        entries.rev().for_each(|number| self.push_free_entry(number));
    }

    /// Frees the range with this entry, which its owner has dropped.
    fn release_entry(&self, number: u32) {
        let entry = self.entry(number);
        let class = entry.class.load(Relaxed) as usize;
        let has_slot = class == PACK_CLASSES;
        // Read before the release: another thread may reuse the entry afterwards.
        let slot = NonNull::new(entry.addr.load(Relaxed) as usize as *mut u8).filter(|_| has_slot);
        let is_released = entry.retry_after_purge(|word| word.release(!has_slot));
        debug_assert!(is_released.is_ok());
        self.purger.total_bytes.fetch_sub(entry.len_bytes.load(Relaxed), Relaxed);
        self.publish_total_bytes();
        if let Some(slot) = slot {
            self.free_heap_slot(slot);
        }
        let _guard = self.free_lists_lock.lock();
        self.push_free_entry(number);
    }

    /// Frees the heap slot of a range.
    fn free_heap_slot(&self, slot: NonNull<u8>) {
        // SAFETY: this module allocated the slot, and its range was dropped, so nothing uses it.
        let result = unsafe { self.heap.free(slot.as_ptr() as usize) };
        debug_assert!(result.is_ok());
    }

    /// Copies the sum of the lengths of all ranges to the published statistics. Repeats the copy if another thread has
    /// changed the sum meanwhile.
    fn publish_total_bytes(&self) {
        loop {
            let bytes = self.purger.total_bytes.load(Relaxed);
            stats::set(Counter::RangesBytes, bytes);
            if self.purger.total_bytes.load(Relaxed) == bytes {
                return;
            }
        }
    }

    /// Returns the number of resident bytes of the range entries.
    pub fn metadata_bytes(&self) -> u64 {
        self.entries.resident_bytes(0, self.count.load(Acquire) as usize)
    }

    /// Acquires the locks of the ranges, so that a fork copies consistent entries and lists.
    pub fn acquire_for_fork(&self) {
        self.purger.queue.acquire_when(|_| true);
        self.free_lists_lock.acquire();
    }

    /// Releases the locks of [`Ranges::acquire_for_fork`].
    ///
    /// # Safety
    ///
    /// The calling thread must have called [`Ranges::acquire_for_fork`], once for each call of this function.
    pub unsafe fn release_after_fork(&self) {
        self.free_lists_lock.release();
        self.purger.queue.release();
    }
}

/// Returns the size class for a range of this length; `None` if the range needs a slot of the heap.
fn class_of(len_bytes: usize) -> Option<usize> {
    let size = len_bytes.max(MIN_CLASS_BYTES.max(os_page_bytes()));
    (size <= MAX_PACKED_BYTES).then(|| (size.next_power_of_two() / MIN_CLASS_BYTES).trailing_zeros() as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lengths at the boundaries of size classes must get the smallest size class that is large enough.
    #[test]
    fn classes_are_powers_of_two() {
        assert_eq!([1, MIN_CLASS_BYTES, MIN_CLASS_BYTES + 1].map(class_of), [Some(0), Some(0), Some(1)]);
        assert_eq!(
            [MAX_PACKED_BYTES, MAX_PACKED_BYTES + 1, usize::MAX].map(class_of),
            [Some(PACK_CLASSES - 1), None, None]
        );
    }
}
