//! The spill store: parts of files that were not used recently move to a disk when the file system is full, and come
//! back when they are used.
//!
//! ```text
//!   Spill        moves segments; reads, writes, truncates and punches files with segments in the store
//!                  (here, access, clear)
//!     segments     the state of one file's segments
//!     order        the eviction order
//!     extents      the space of the store
//! ```
//!
//! A *segment* is a part of a file, 256 KiB or one larger page. Its pages are in the file's mapping (*resident*), or in
//! the store (*spilled*). The pages of a spilled segment are holes of the mapping. A segment that came back keeps its
//! copy until it is changed, so that it can be evicted again without a write.
//!
//! **Locks.** Each use of a segment's bytes holds the segment's lock, also during transfers with the store. An eviction
//! acquires the locks of other segments, so it starts only in threads that hold none. Below these locks: the order,
//! then the list of a file's segments, under which the mapping is searched and punched; space and buffers of the store.
//!
//! **Truncation** freezes the file's segments: none is evicted or restored, because a restore beyond the new end would
//! make the file longer again. Reads of spilled segments then read the store directly. If memory is used up, reads do
//! the same, and writes change the pages of the copy in the store.

mod access;
mod clear;
mod extents;
mod order;
mod segments;

pub(crate) use segments::Segments;

use crate::error::{Error, Result};
use crate::file_data::FileData;
use crate::fs::volatile::Purge;
use extents::{Extent, Extents};
use order::{EvictionOrder, First, OrderEntry};
use pagemill_cache::PageCache;
use pagemill_core::sync::{Acquire, AtomicU64, Lock, LockGuard, Padded, Relaxed, coarse_ns, pause};
use pagemill_store::Store;
use segments::{MAX_PAGES, PageSet, Segment};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::AcqRel;

/// Bytes of a segment, unless a page is larger.
const SEGMENT_BYTES: u64 = 256 << 10;

/// Minimum number of segments that must fit into memory.
const MIN_RESIDENT_SEGMENTS: u64 = 4;

/// Time after which a call starts no further wait, writeback or repeated eviction to get memory.
const MAX_WAIT_NS: u64 = 5_000_000_000;

/// Number of locks of segments; a power of two.
const LOCK_COUNT: u64 = 128;

/// Moves segments of files to a store and back.
pub(crate) struct Spill {
    extents: Extents,
    /// Locks of segments, chosen by file and index.
    locks: Box<[Padded<Lock>]>,
    order: EvictionOrder,
    next_file: AtomicU64,
    next_entry_number: AtomicU64,
    /// Number of times that memory was freed: by evictions, truncations, holes and failed restores.
    releases: AtomicU64,
    /// Number of moves to memory or to the store that began, and that ended. During a move a segment takes both memory
    /// and space of the store.
    moves_begun: AtomicU64,
    moves_ended: AtomicU64,
    /// Pages that are in the store only.
    spilled_pages: AtomicU64,
    /// Number of copies of resident segments.
    unchanged_copies: AtomicU64,
    /// The cache of all files.
    cache: PageCache,
    page_bytes: u64,
    segment_bytes: u64,
}

/// The result of an attempt to free memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    Freed,
    /// There is none, and the limit of the store prevents moves.
    StoreFull,
    /// There is none, and the store itself has no space for a move.
    DiskFull,
    None,
}

/// One attempt to get memory: the counters at its start, adjusted for the calling thread.
pub(crate) struct Attempt {
    /// [`Spill::releases`] at the start, plus the thread's releases that give it no memory: evictions of the segment
    /// that it needs, and failed restores. A higher [`Spill::releases`] means that memory became free.
    releases: u64,
    /// [`Spill::moves_ended`] at the start, plus moves that the thread began itself. A higher [`Spill::moves_begun`]
    /// means that another thread moved a segment during the attempt, or is moving one.
    moves: u64,
}

/// The result of one turn of a segment.
enum Outcome {
    /// The segment was evicted; this many bytes of memory became free.
    Freed(u64),
    /// The segment stays in memory.
    Stays,
    /// The entry names no segment in memory.
    Gone,
}

impl Spill {
    /// Creates the spill store of a file system with its data in this cache.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the limit is too low, or a block of the store is larger than a page.
    pub fn new(store: Arc<dyn Store>, limit_bytes: u64, cache: PageCache) -> Result<Self> {
        let page_bytes = cache.page().bytes() as u64;
        let segment_bytes = SEGMENT_BYTES.max(page_bytes);
        debug_assert!(segment_bytes / page_bytes <= MAX_PAGES, "a set has a bit for each page");
        if cache.limit_bytes() < MIN_RESIDENT_SEGMENTS * segment_bytes {
            return Err(Error::Invalid { what: "a memory limit below 1 MiB, or below four pages, with a spill store" });
        }
        if store.block_bytes() as u64 > page_bytes {
            return Err(Error::Invalid { what: "a spill store with blocks larger than a page" });
        }
        Ok(Self {
            extents: Extents::new(store, limit_bytes, page_bytes, segment_bytes),
            locks: (0..LOCK_COUNT).map(|_| Padded(Lock::new())).collect(),
            order: EvictionOrder::default(),
            next_file: AtomicU64::new(0),
            next_entry_number: AtomicU64::new(0),
            releases: AtomicU64::new(0),
            moves_begun: AtomicU64::new(0),
            moves_ended: AtomicU64::new(0),
            spilled_pages: AtomicU64::new(0),
            unchanged_copies: AtomicU64::new(0),
            cache,
            page_bytes,
            segment_bytes,
        })
    }

    /// Returns the list of segments of a new file.
    pub fn new_segments(self: &Arc<Self>) -> Segments {
        Segments::new(self.clone(), self.next_file.fetch_add(1, Relaxed))
    }

    /// Returns the bytes that are in the store only.
    pub fn spilled_bytes(&self) -> u64 {
        self.spilled_pages.load(Relaxed) * self.page_bytes
    }

    /// Returns the maximum bytes of copies in the store.
    pub fn limit_bytes(&self) -> u64 {
        self.extents.limit_bytes()
    }

    /// Locks a segment of a file.
    fn lock(&self, segments: &Segments, index: u64) -> LockGuard<'_> {
        // Up to 128 consecutive segments of a file get different locks.
        let at =
            segments.file_number.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32).wrapping_add(index) % LOCK_COUNT;
        self.locks[at as usize].0.lock()
    }

    /// Appends an entry for a segment that is about to get memory to the eviction order. Returns the entry's number.
    /// The caller holds the segment's lock.
    fn push_entry(&self, data: &Arc<FileData>, index: u64) -> u64 {
        let number = self.next_entry_number.fetch_add(1, Relaxed);
        self.order.push(OrderEntry { file: Arc::downgrade(data), index, number });
        number
    }

    fn bytes_of(&self, pages: PageSet) -> u64 {
        pages.count() * self.page_bytes
    }

    /// Returns the index of the segment that contains the byte at `offset`.
    fn index_of(&self, offset: u64) -> u64 {
        offset / self.segment_bytes
    }

    /// Returns the file range of a segment.
    fn range_of(&self, index: u64) -> Range<u64> {
        let start = index * self.segment_bytes;
        start..start.saturating_add(self.segment_bytes)
    }

    /// Begins an attempt to get memory.
    pub fn begin_attempt(&self) -> Attempt {
        Attempt { releases: self.releases.load(Acquire), moves: self.moves_ended.load(Acquire) }
    }

    /// Sleeps briefly if another thread moved a segment since the attempt began, or is moving one. When such a move
    /// ends, memory or space of the store is free, or a copy can be dropped. Returns whether it slept: `false` if no
    /// other thread moved a segment, or if [`MAX_WAIT_NS`] have passed since `begun_ns`, when the caller's operation
    /// began.
    fn wait_for_move(&self, attempt: &Attempt, begun_ns: u64) -> bool {
        let may_wait = !is_late(begun_ns) && self.moves_begun.load(Acquire) > attempt.moves;
        if may_wait {
            pause();
        }
        may_wait
    }

    /// Makes space in the store after [`Spill::make_room`], so that segments can move there: calls `purge` for files
    /// anywhere, or waits for another thread's move. Returns whether the caller may try again.
    pub fn make_space(&self, room: Room, attempt: &Attempt, begun_ns: u64, purge: impl Fn(Purge) -> bool) -> bool {
        match room {
            Room::Freed => true,
            Room::StoreFull => purge(Purge::Anywhere) || self.wait_for_move(attempt, begun_ns),
            // A move to a full disk fails, so there is nothing to wait for.
            Room::DiskFull => purge(Purge::Anywhere),
            Room::None => false,
        }
    }

    /// Counts freed memory. Called before other threads can see that the segment is gone: under the segment's lock, or
    /// while the file is frozen.
    fn count_release(&self) {
        self.releases.fetch_add(1, AcqRel);
    }

    /// Frees memory: first evicts clean pages of files with a store of their own, then segments. Ends when `bytes` are
    /// free, each entry had two turns, or the spill store failed and no copy can be dropped. Returns [`Room::Freed`] if
    /// any memory became free since the attempt began, perhaps fewer than `bytes`, and perhaps through other threads.
    /// `own` is the file number and index of the segment that the caller needs; its eviction does not count. The caller
    /// holds no segment lock.
    pub fn make_room(&self, bytes: u64, own: Option<(u64, u64)>, attempt: &mut Attempt) -> Room {
        if self.cache.evict_clean(bytes) {
            self.count_release();
            return Room::Freed;
        }
        let (mut freed, mut failed) = (0, Room::None);
        // In a second round no segment gets a second chance, so the two rounds reach all.
        let (round, mut turns) = (self.order.len(), 0);
        while freed < bytes && turns < 2 * round {
            let taken = match self.order.take_first() {
                First::Entry(taken) => taken,
                First::Later => {
                    pause();
                    continue;
                }
                First::Nothing => break,
            };
            turns += 1;
            let Some(data) = taken.entry().file.upgrade() else { continue };
            let is_own = own.is_some_and(|(file, index)| data.has_number(file) && taken.entry().index == index);
            let moves = attempt.moves;
            match self.take_turn(&data, taken.entry(), turns <= round, attempt) {
                // The caller needs its own segment again, so this is no gain.
                Ok(Outcome::Freed(_)) if is_own => attempt.releases += 1,
                Ok(Outcome::Freed(more)) => freed += more,
                Ok(Outcome::Gone) => {}
                Ok(Outcome::Stays) => taken.put_back(),
                // The store is full, or fails. Space of copies that are not needed may help, if no other thread takes
                // it.
                Err(error) => {
                    taken.put_back();
                    failed = match is_full(&error) {
                        true if attempt.moves == moves => Room::StoreFull,
                        true => Room::DiskFull,
                        false => Room::None,
                    };
                    if !self.drop_copies_in_time(attempt) {
                        break;
                    }
                }
            }
        }
        if self.releases.load(Acquire) != attempt.releases { Room::Freed } else { failed }
    }

    /// Evicts a segment, unless it has a second chance and was used since its last turn. Waits while the file is being
    /// truncated.
    fn take_turn(
        &self,
        data: &FileData,
        entry: &OrderEntry,
        has_second_chance: bool,
        attempt: &mut Attempt,
    ) -> io::Result<Outcome> {
        let (Some(segments), index) = (&data.segments, entry.index) else { return Ok(Outcome::Gone) };
        let mut locked = self.lock(segments, index);
        while segments.is_frozen() && segments.has_entry(index, entry.number) {
            drop(locked);
            pause();
            locked = self.lock(segments, index);
        }
        let Some(old) = segments.get(index).filter(|old| old.is_resident && old.entry_number == entry.number) else {
            return Ok(Outcome::Gone);
        };
        if segments.is_kept_in_memory() {
            return Ok(Outcome::Stays);
        }
        if old.is_recent && has_second_chance {
            segments.set(index, Segment { is_recent: false, ..old });
            return Ok(Outcome::Stays);
        }
        let (copy, pages) = match old.copy {
            Some(copy) => (copy, old.pages),
            None => {
                let Some(pages) = self.pages_in_memory(data, index) else { return Ok(Outcome::Stays) };
                if pages.is_empty() {
                    segments.remove(index);
                    return Ok(Outcome::Gone);
                }
                let Some(copy) = self.create_copy(data, index, pages, attempt)? else { return Ok(Outcome::Stays) };
                (copy, pages)
            }
        };
        if old.copy.is_some() {
            self.unchanged_copies.fetch_sub(1, Relaxed);
        }
        let spilled = Segment { copy: Some(copy), pages, is_resident: false, ..old };
        let freed = segments.evict(index, spilled, &data.mapping);
        self.spilled_pages.fetch_add(pages.count(), Relaxed);
        self.count_release();
        if old.copy.is_none() {
            self.moves_ended.fetch_add(1, AcqRel);
        }
        Ok(Outcome::Freed(freed))
    }

    /// Returns the pages of a segment that the mapping has; `None` if the mapping cannot be searched. The caller holds
    /// the segment's lock.
    fn pages_in_memory(&self, data: &FileData, index: u64) -> Option<PageSet> {
        let Range { start, end } = self.range_of(index);
        let end = end.min(data.mapping.size_bytes());
        let (mut pages, mut at) = (PageSet::default(), start);
        while at < end {
            let Some(found) = data.mapping.seek_data_in(at..end).ok()? else { break };
            let hole = data.mapping.seek_hole_in(found..end).ok()?;
            let first = (found - start) / self.page_bytes;
            pages = pages.with(PageSet::of(first..(hole - start).div_ceil(self.page_bytes)));
            at = hole.max(found + 1);
        }
        Some(pages)
    }

    /// Writes these pages of a resident segment to a new extent, which begins a move. With a result the caller ends the
    /// move, otherwise this function. Returns `None` if a folio in use prevents the read. The caller holds the
    /// segment's lock.
    ///
    /// # Errors
    ///
    /// `ENOSPC` if the store is full, errors of the store.
    fn create_copy(
        &self,
        data: &FileData,
        index: u64,
        pages: PageSet,
        attempt: &mut Attempt,
    ) -> io::Result<Option<Extent>> {
        self.moves_begun.fetch_add(1, AcqRel);
        let allocated = self.extents.allocate(pages.count());
        let copy = allocated.inspect_err(|_| _ = self.moves_begun.fetch_sub(1, AcqRel))?;
        attempt.moves += 1;
        let written = self.extents.with_buffer(|buffer| {
            let Range { start, end } = self.range_of(index);
            let wanted = end.min(data.mapping.size_bytes()).saturating_sub(start) as usize;
            if !data.mapping.read_at(&mut buffer[..wanted], start).is_ok_and(|len| len == wanted) {
                return Ok(false);
            }
            buffer[wanted..].fill(0);
            self.extents.write(copy, pages, buffer).map(|()| true)
        });
        if !matches!(written, Ok(true)) {
            self.extents.free(copy, pages);
            self.moves_ended.fetch_add(1, AcqRel);
        }
        Ok(written?.then_some(copy))
    }

    fn no_memory(&self) -> Error {
        Error::NoSpace { what: "bytes", used: self.cache.charged_bytes(), limit: self.cache.limit_bytes() }
    }

    /// Brings a spilled segment back into memory. The caller holds the segment's lock. After an error, frees the
    /// pages that it filled, and counts that as a release, also in `attempt`.
    ///
    /// # Errors
    ///
    /// [`Error::NoSpace`] without memory for all pages, errors of the mapping and of the store. The segment stays
    /// spilled.
    fn restore(&self, data: &Arc<FileData>, index: u64, old: &Segment, attempt: &mut Attempt) -> Result<()> {
        let segments = data.segments.as_ref().expect("only files with segments are restored");
        debug_assert!(!old.is_resident, "only a spilled segment is restored");
        // Saves the transfer if there is no room anyway.
        if self.cache.charged_bytes() + self.bytes_of(old.pages) > self.cache.limit_bytes() {
            return Err(self.no_memory());
        }
        self.moves_begun.fetch_add(1, AcqRel);
        attempt.moves += 1;
        let restored = self.fill(data, segments, index, old, attempt);
        self.moves_ended.fetch_add(1, AcqRel);
        restored
    }

    /// Fills the pages of a spilled segment from its copy; the errors are those of [`Spill::restore`].
    fn fill(
        &self,
        data: &Arc<FileData>,
        segments: &Segments,
        index: u64,
        old: &Segment,
        attempt: &mut Attempt,
    ) -> Result<()> {
        let copy = old.copy.expect("a spilled segment has a copy");
        let Range { start, end } = self.range_of(index);
        if matches!(data.mapping.seek_data_in(start..end), Ok(Some(_))) {
            // Left by an eviction that could not remove all pages. The copy may have changed since.
            data.mapping.punch_hole(start, self.segment_bytes)?;
        }
        let entry_number = self.push_entry(data, index);
        let filled = self.extents.with_buffer(|buffer| {
            self.extents.read(copy, old.pages, buffer).map_err(store_failed("a read of the spill store"))?;
            old.pages.runs().try_for_each(|run| {
                let (from, to) = (run.start * self.page_bytes, run.end * self.page_bytes);
                // The length does not shrink while a segment is locked and not frozen.
                let to = to.min(data.mapping.size_bytes() - start);
                let bytes = &buffer[from as usize..to as usize];
                match data.mapping.write_at(bytes, start + from)? {
                    written if written == bytes.len() => Ok(()),
                    _ => Err(self.no_memory()),
                }
            })
        });
        if let Err(error) = filled {
            if data.mapping.punch_hole(start, self.segment_bytes).is_ok_and(|freed| freed > 0) {
                self.count_release();
                attempt.releases += 1;
            }
            return Err(error);
        }
        segments.set(index, Segment { is_resident: true, is_recent: true, entry_number, ..*old });
        self.unchanged_copies.fetch_add(1, Relaxed);
        self.spilled_pages.fetch_sub(old.pages.count(), Relaxed);
        Ok(())
    }

    /// Writes back dirty pages of files with a store of their own, or evicts pages that became clean meanwhile. Returns
    /// whether there were any, or whether memory became free since the attempt began. Waits for a store without progress up to the timeout of writeback. The caller holds no
    /// lock of a segment.
    pub fn clean_some(&self, bytes: u64, attempt: &Attempt) -> bool {
        if self.cache.clean_some(bytes) || self.releases.load(Acquire) != attempt.releases {
            return true;
        }
        let has_evicted = self.cache.evict_clean(bytes);
        if has_evicted {
            self.count_release();
        }
        has_evicted
    }

    /// Drops the copies of resident segments. If only segments with entries that other threads have taken out have
    /// copies, waits until these are put back, or until memory became free since the attempt began, for at most
    /// [`MAX_WAIT_NS`]. Returns whether a copy was dropped. The caller holds no lock of a segment.
    fn drop_copies_in_time(&self, attempt: &Attempt) -> bool {
        let begun_ns = coarse_ns();
        loop {
            let (has_dropped, has_others) = self.drop_copies();
            if has_dropped {
                return true;
            }
            if !has_others || self.releases.load(Acquire) != attempt.releases || is_late(begun_ns) {
                return false;
            }
            pause();
        }
    }

    /// Drops the copies of resident segments, except those with entries that other threads have taken out. Returns
    /// whether there were any, and whether such other segments may have copies. The caller holds no lock of a segment.
    fn drop_copies(&self) -> (bool, bool) {
        let mut has_dropped = false;
        if self.unchanged_copies.load(Relaxed) == 0 {
            return (false, false);
        }
        let (entries, has_taken) = self.order.files_and_indices();
        for (file, index) in entries {
            let Some(data) = file.upgrade() else { continue };
            let Some(segments) = &data.segments else { continue };
            let _locked = self.lock(segments, index);
            if let Some(segment) = segments.get(index).filter(|segment| segment.is_resident) {
                has_dropped |= self.drop_copy(segments, index, &segment);
            }
        }
        (has_dropped, has_taken && self.unchanged_copies.load(Relaxed) > 0)
    }

    /// Frees the store copy of a resident segment. Returns whether there was one. The caller holds the segment's lock.
    fn drop_copy(&self, segments: &Segments, index: u64, segment: &Segment) -> bool {
        debug_assert!(segment.is_resident, "the copy of a spilled segment is its only one");
        let Some(copy) = segment.copy else { return false };
        segments.set(index, Segment { copy: None, pages: PageSet::default(), ..*segment });
        self.unchanged_copies.fetch_sub(1, Relaxed);
        self.extents.free(copy, segment.pages);
        true
    }
}

impl std::fmt::Debug for Spill {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Spill").field("spilled_bytes", &self.spilled_bytes()).finish_non_exhaustive()
    }
}

/// Returns whether the store cannot grow: its disk is full, or a quota or a file size limit is reached.
fn is_full(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}

/// Returns whether a call that began at `begun_ns` has taken at least [`MAX_WAIT_NS`].
fn is_late(begun_ns: u64) -> bool {
    coarse_ns().saturating_sub(begun_ns) >= MAX_WAIT_NS
}

/// Returns a function that adds to an error of the store what failed.
fn store_failed(doing: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |cause| Error::Memory(pagemill_core::Error::Store { doing, cause })
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::{Room, SEGMENT_BYTES};
    use crate::file_data::FileData;
    use crate::fs::walk::Last;
    use crate::{Allocate, OpenOptions, Quota, RamFs};
    use pagemill_store::MemoryStore;
    use pagemill_testbed::Testbed;
    use std::sync::Arc;

    fn new() -> RamFs {
        let (testbed, store) = (Testbed::for_test(), Arc::new(MemoryStore::new(Vec::new(), 512)));
        let builder = RamFs::builder("inner").bytes(1 << 20).spill(store, 1 << 20);
        builder.build_in(testbed.slabs, testbed.caches).unwrap()
    }

    fn data_of(fs: &RamFs, path: &str) -> Arc<FileData> {
        let inode = fs.inode_at(path.as_ref(), Last::Follow, |inner, inode| inner.inode(inode));
        fs.inner.data_of(&inode.unwrap()).unwrap()
    }

    /// A folio in the middle of a segment is held for longer than a read of it waits. The eviction then gets a part of
    /// the bytes, and must leave the segment where it is.
    #[test]
    fn a_segment_with_a_folio_in_use_stays() {
        let fs = new();
        let bytes: Vec<u8> = (0..200_000u32).map(|at| (at / 251) as u8).collect();
        fs.write("/file", &bytes).unwrap();
        let (data, spill) = (data_of(&fs, "/file"), fs.inner.spill.as_ref().unwrap());
        let held = data.mapping.hold(100_000).unwrap();
        let make_room = || spill.make_room(1, None, &mut spill.begin_attempt());
        assert_eq!(make_room(), Room::None);
        drop(held);
        assert!(fs.read("/file").unwrap() == bytes && spill.spilled_bytes() == 0);
        assert!(make_room() == Room::Freed && spill.spilled_bytes() == 49 * 4096);
        assert!(fs.read("/file").unwrap() == bytes);
    }
    /// A log grows at its end and is punched at its begin. Parts that are gone must leave no segments behind, neither
    /// must a truncation, nor a write that a quota refuses.
    #[test]
    fn parts_without_data_have_no_segments() {
        let fs = new();
        fs.write("/log", b"begin").unwrap();
        let log = fs.open("/log", &OpenOptions::new().read(true).write(true)).unwrap();
        let data = data_of(&fs, "/log");
        let count = || data.segments.as_ref().unwrap().indices(0..u64::MAX).len();
        for index in 0..20 {
            log.write_at(b"x", index * SEGMENT_BYTES).unwrap();
            log.allocate(Allocate::Punch, 0, (index * SEGMENT_BYTES).max(1)).unwrap();
            assert_eq!(count(), 1);
        }
        (0..20).for_each(|index| _ = log.write_at(b"x", index * SEGMENT_BYTES).unwrap());
        log.set_size(3 * SEGMENT_BYTES + 1).unwrap();
        assert_eq!(count(), 4);
        fs.create_dir("/team").unwrap();
        fs.set_quota("/team", Quota { bytes: 4096, inodes: 10 }).unwrap();
        fs.write("/team/full", b"x").unwrap();
        let full = fs.open("/team/full", &OpenOptions::new().write(true)).unwrap();
        (1..9).for_each(|index| _ = full.write_at(b"x", index * SEGMENT_BYTES).unwrap_err());
        assert_eq!(data_of(&fs, "/team/full").segments.as_ref().unwrap().indices(0..u64::MAX).len(), 1);
    }
}
