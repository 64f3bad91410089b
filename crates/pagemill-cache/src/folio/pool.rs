//! The memory pool of one cache: a reserved address range in chunks of pages, with 16 bytes of metadata for each page.
#![allow(unsafe_code)] // copies to and from the pool's memory, returns it to the system

mod chunks;
mod growth;
mod memory;

use super::buddy::Buddies;
use super::bytes;
use super::frame::{Frame, Owner};
use super::leases::Leases;
use super::word::{Kind, State, Word};
use growth::Growth;
pub(crate) use memory::MemoryKind;
use memory::PoolMemory;
use pagemill_core::arena::{Arena, Table, place};
use pagemill_core::error::{Error, Result};
use pagemill_core::reclaim::helper::Helper;
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{AtomicU32, AtomicU64, Guarded, Relaxed};
use pagemill_core::units::{BLOCK_BYTES, PageSize};
use std::ops::Range;
use std::sync::atomic::AtomicBool;

/// Pages that were allocated and belong to no file yet. Not `Clone`: each value is the only reference to its pages.
#[derive(Debug)]
pub(crate) struct NewFolio {
    /// Number of the folio's first page in the pool.
    pub number: u32,
    /// Log2 of the folio's number of pages.
    pub order: u8,
    /// Whether all bytes of the folio are zero.
    pub is_zero: bool,
}

/// The part of the pool's state that the lock `state` protects.
struct PoolState {
    buddies: Buddies,
    /// Number of chunks that ever had memory: the first chunks of the address range.
    chunks: u32,
    /// Number of chunks that are being made resident or returned to the system. These chunks are in no list.
    chunks_in_transit: u32,
    /// Head of the list of chunks without memory. The owner word of a chunk's first frame holds the next chunk of that
    /// list.
    empty: Option<u32>,
}

/// The memory of one cache. Never destroyed: when its cache ends, the pool is emptied and serves a later cache.
///
/// # Invariants
///
/// 1. Chunks from 0 to `PoolState::chunks` that are not in the list of empty chunks are mapped, writable, and belong to
///    this pool alone. They are resident as far as the process allows; leased chunks stay resident. In a pool over
///    reserved huge pages this holds only while the pages are placed.
/// 2. A thread that allocated a page may change its bytes until the page's word is *Live*. From then on the word's
///    protocol applies.
pub(crate) struct Pool {
    arena: &'static Arena,
    pub page: PageSize,
    /// Log2 of the number of bytes of a page.
    pub page_shift: u32,
    /// Start of the pool's address range.
    base: usize,
    /// Log2 of the number of pages of a chunk: the order of a huge folio.
    pub chunk_order: u8,
    max_chunks: u32,
    /// Whether chunks that become resident later use huge pages.
    use_huge: AtomicBool,
    /// One frame for each page.
    frames: Table<Frame>,
    /// The scan word of each chunk: the version of the chunk's huge folio, and the folio's state in the background scan
    /// for sparse huge folios (`mapping::sweep`).
    scan_words: Table<AtomicU64>,
    state: Guarded<PoolState>,
    /// Whether the table of frames was allowed to use huge pages.
    has_huge_frames: AtomicBool,
    /// Number of completely free chunks with memory, as of the last change.
    free_chunks: AtomicU32,
    /// Number of chunks with memory.
    filled_chunks: AtomicU32,
    /// Number of pages whose frames are committed.
    opened_pages: AtomicU32,
    /// Bytes of a chunk.
    pub chunk_bytes: usize,
    /// NUMA node that the address range is bound to.
    pub node: usize,
    /// How many chunks the helper makes resident before they are needed.
    growth: Growth,
    /// Number of views of files that use the pool. Their entries have pins, which eviction can end.
    pub view_count: AtomicU32,
    /// Whether reclaim has requested that rings end their leases of free chunks. Cleared once no free chunk is leased.
    is_lease_end_requested: AtomicBool,
    /// The kind of the pool's memory.
    memory: PoolMemory,
}

impl Pool {
    /// Creates a pool with addresses for `max_bytes`. No memory is resident yet.
    ///
    /// # Errors
    ///
    /// [`Error::NoAddresses`]. [`Error::System`] if the system has no memory for the metadata, or cannot create the
    /// memory file.
    pub fn new(
        arena: &'static Arena,
        helper: &'static Helper,
        page: PageSize,
        max_bytes: u64,
        node: usize,
        kind: MemoryKind,
    ) -> Result<&'static Self> {
        let chunk_bytes = page.bytes().max(BLOCK_BYTES);
        let no_addresses = || Error::NoAddresses { wanted_bytes: max_bytes };
        let chunks = usize::try_from(max_bytes).map_err(|_| no_addresses())?.div_ceil(chunk_bytes).max(1);
        let chunk_pages = chunk_bytes / page.bytes();
        // The last page number is reserved for "none".
        let pages =
            chunks.checked_mul(chunk_pages).filter(|pages| *pages < u32::MAX as usize).ok_or_else(no_addresses)?;
        let align_blocks = chunk_bytes / BLOCK_BYTES;
        // Before the addresses are carved, which are never returned.
        let memory = PoolMemory::new(kind, arena, chunks * chunk_bytes)?;
        // SAFETY: a pool accesses only its own blocks of the zone, so it needs no tables for the whole zone.
        let base = unsafe { arena.carve_closed(&arena.pool, chunks * align_blocks, align_blocks, node) }?;
        // SAFETY: these blocks were carved above.
        unsafe { memory.place(arena, base, node) }?;
        let frames = Table::new(pages)?;
        let chunk_order = chunk_pages.trailing_zeros() as u8;
        place(Self {
            arena,
            page,
            page_shift: page.bytes().trailing_zeros(),
            base,
            chunk_order,
            max_chunks: chunks as u32,
            use_huge: AtomicBool::new(true),
            frames,
            scan_words: Table::new(chunks)?,
            state: Guarded::new(PoolState {
                buddies: Buddies::new(chunk_order, Leases::new(chunks, chunk_bytes)?),
                chunks: 0,
                chunks_in_transit: 0,
                empty: None,
            }),
            has_huge_frames: AtomicBool::new(false),
            free_chunks: AtomicU32::new(0),
            filled_chunks: AtomicU32::new(0),
            opened_pages: AtomicU32::new(0),
            chunk_bytes,
            node,
            growth: Growth::new(helper),
            view_count: AtomicU32::new(0),
            is_lease_end_requested: AtomicBool::new(false),
            memory,
        })
    }

    /// Returns whether no page of the pool is in use.
    pub fn is_idle(&self) -> bool {
        self.free_chunks.load(Relaxed) == self.filled_chunks.load(Relaxed)
    }

    /// Returns the number of forks that lead to this process (`Arena::generation`).
    #[inline]
    pub fn generation(&self) -> u16 {
        self.arena.generation()
    }

    /// Returns the maximum number of bytes that the pool can hold.
    pub fn max_bytes(&self) -> u64 {
        u64::from(self.max_chunks) * self.chunk_bytes as u64
    }

    /// Returns the frame of page `number`.
    #[inline]
    pub fn frame(&self, number: u32) -> &Frame {
        self.frames.get(number as usize)
    }

    /// Returns the frame of the page with this number, or `None` if the pool has no such page yet, or belongs to the
    /// parent of this fork child. The number need not be valid.
    #[inline]
    pub fn frame_if_any(&self, number: u64) -> Option<&Frame> {
        // SAFETY: `opened_pages` is raised only after the frames below it are committed, so this frame is in the table.
        (number < u64::from(self.opened_pages.load(Relaxed)))
            .then(|| unsafe { self.frames.get_unchecked(number as usize) })
    }

    /// Returns the state word of page `number`.
    #[inline]
    pub fn word(&self, number: u32) -> &Word {
        &self.frame(number).word
    }

    /// Sets the owner of the folio that begins at page `number`. The caller must have exclusive access to the folio.
    pub fn set_owner(&self, number: u32, owner: Owner) {
        self.frame(number).owner.store(owner.pack(), Relaxed);
    }

    /// Returns the address of page `number`.
    #[inline]
    pub fn addr(&self, number: u32) -> usize {
        debug_assert!(u64::from(number) << self.page_shift < self.max_bytes(), "the page is in the pool");
        self.base + ((number as usize) << self.page_shift)
    }

    /// Called in a fork child for each pool of its parent. [`Pool::frame_if_any`] returns no frame from then on,
    /// because the memory of these pools may not be mapped in the child.
    pub fn begin_child(&self) {
        self.opened_pages.store(0, Relaxed);
        self.memory.begin_child();
    }

    /// Returns the number of the page that a frame of this pool describes.
    pub fn number_of(&self, frame: &Frame) -> u32 {
        let bytes = std::ptr::from_ref(frame).addr() - self.frames.start().addr();
        debug_assert!(bytes.is_multiple_of(size_of::<Frame>()), "the frame is in the table");
        (bytes / size_of::<Frame>()) as u32
    }

    /// Sets whether chunks that become resident later use huge pages.
    pub fn allow_huge(&self, is_allowed: bool) {
        self.use_huge.store(is_allowed, Relaxed);
    }

    /// Allocates 2^`order` pages, and makes a new chunk resident if needed. The pages are *Busy* and owned by the
    /// caller.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`] if the pool has reached its maximum, or if the process gets no memory for another chunk.
    pub fn allocate(&self, order: u8) -> Result<NewFolio> {
        if let Some(taken) = self.allocate_free(order) {
            return Ok(taken);
        }
        let taken = self.allocate_from_new_chunk(order)?;
        self.note_chunk_used();
        Ok(taken)
    }

    /// Makes a chunk resident and frees it, for an allocation that follows.
    ///
    /// # Errors
    ///
    /// As [`Pool::allocate`].
    pub fn add_free_chunk(&self) -> Result<()> {
        // The allocation that follows takes the chunk into use.
        let taken = self.allocate_from_new_chunk(self.chunk_order)?;
        self.free(taken.number, taken.order);
        Ok(())
    }

    /// As [`Pool::allocate`], but only from free pages that have memory. Returns `None` if there are not enough.
    pub fn allocate_free(&self, order: u8) -> Option<NewFolio> {
        let (number, is_zero) = self.allocate_with(|state| state.buddies.allocate(&self.frames, order))?;
        Some(NewFolio { number, order, is_zero })
    }

    /// Allocates up to `most` single pages that are free and have memory. Returns the number of allocated pages.
    pub fn allocate_free_pages(&self, most: usize, mut taken: impl FnMut(NewFolio)) -> usize {
        self.allocate_with(|state| {
            let free = std::iter::from_fn(|| state.buddies.allocate(&self.frames, 0));
            free.take(most).map(|(number, is_zero)| taken(NewFolio { number, order: 0, is_zero })).count()
        })
    }

    /// Allocates `max_pages` contiguous free pages that have memory, from one free run of the buddy allocator. If no
    /// run is that long, allocates a whole shorter run of at least `min_pages` pages. Returns the page numbers, or
    /// `None` if there is no such run. Each page is *Busy*, and is freed separately.
    pub fn allocate_free_contiguous(&self, max_pages: u32, min_pages: u32) -> Option<Range<u32>> {
        debug_assert!(min_pages > 0 && min_pages <= max_pages);
        let order_for = |pages: u32| pages.next_power_of_two().trailing_zeros() as u8;
        let orders = order_for(min_pages)..=order_for(max_pages).min(self.chunk_order);
        self.allocate_with(|state| {
            let taken = |order| Some((order, state.buddies.allocate(&self.frames, order)?));
            let (order, (number, is_zero)) = orders.rev().find_map(taken)?;
            let (end, run_end) = (number + max_pages.min(1 << order), number + (1 << order));
            (number..run_end).for_each(|page| self.word(page).assign(Kind::Busy, 0));
            (end..run_end).for_each(|page| state.buddies.free(&self.frames, page, 0, is_zero));
            Some(number..end)
        })
    }

    /// Returns the error for a pool that has reached its maximum.
    fn pool_full_error(&self) -> Error {
        let (wanted_bytes, used_bytes) = (self.chunk_bytes as u64, self.filled_bytes());
        Error::NoMemory { wanted_bytes, used_bytes, limit_bytes: self.max_bytes() }
    }

    /// Returns the arena's index of a chunk's first block, and the number of the chunk's blocks.
    fn blocks_of(&self, chunk: u32) -> (usize, usize) {
        (self.arena.block_of(self.addr(chunk << self.chunk_order)), self.chunk_bytes / BLOCK_BYTES)
    }

    /// Frees pages that the caller owns exclusively.
    pub fn free(&self, number: u32, order: u8) {
        self.with_state(|state| state.buddies.free(&self.frames, number, order, false));
    }

    /// As [`Pool::free`], for several folios: acquires the lock `state` once.
    pub fn free_several(&self, folios: impl Iterator<Item = (u32, u8)>) {
        self.with_state(|state| {
            folios.for_each(|(number, order)| state.buddies.free(&self.frames, number, order, false));
        });
    }

    /// Leases the chunk of page `number`, and adjacent chunks with memory, to a ring: up to 64 MiB. The pool does
    /// not return these chunks to the system until [`Pool::end_lease`]. Returns the range of chunks. Returns `None` if
    /// other chunks of the same 64 MiB are leased already, or if reclaim has requested that rings end their leases.
    pub fn lease(&self, number: u32) -> Option<Range<u32>> {
        if self.is_lease_end_requested() {
            return None;
        }
        self.state.with(|state| state.buddies.lease(&self.frames, number >> self.chunk_order))
    }

    /// Ends one ring's lease of the chunks that begin with `first`.
    pub fn end_lease(&self, first: u32) {
        self.with_state(|state| state.buddies.end_lease(&self.frames, first));
    }

    /// Returns the address and length of a range of chunks.
    pub fn range_of(&self, chunks: &Range<u32>) -> (usize, usize) {
        (self.addr(chunks.start << self.chunk_order), chunks.len() * self.chunk_bytes)
    }

    /// Returns the size of the slots into which the address range is divided for leases ([`super::leases`]). The first
    /// slot begins where the pool's address range begins.
    pub fn lease_bytes(&self) -> usize {
        self.state.with(|state| state.buddies.leases.chunks as usize) * self.chunk_bytes
    }

    /// Returns whether reclaim has requested that rings end their leases of free chunks.
    #[inline]
    pub fn is_lease_end_requested(&self) -> bool {
        self.is_lease_end_requested.load(Relaxed)
    }

    /// Requests that rings end their leases, unless no free chunk is leased or the pool uses reserved huge pages.
    /// Returns whether this request is new.
    pub fn request_lease_end(&self) -> bool {
        !self.is_hugetlb()
            && self.state.with(|state| state.buddies.has_leased() && !self.is_lease_end_requested.swap(true, Relaxed))
    }

    /// Returns the bytes that [`Pool::shrink`] could return to the system if no free chunk were leased.
    pub fn giveable_bytes(&self) -> u64 {
        if self.is_hugetlb() { 0 } else { u64::from(self.free_chunks.load(Relaxed)) * self.chunk_bytes as u64 }
    }

    /// Returns the bytes of all chunks with memory, whether in use or free.
    pub fn filled_bytes(&self) -> u64 {
        u64::from(self.filled_chunks.load(Relaxed)) * self.chunk_bytes as u64
    }

    /// Returns unleased free chunks to the system, up to about `want_bytes`. Returns the number of bytes that the
    /// kernel freed. Does nothing for reserved huge pages: while they are reserved for this pool they have no other
    /// use.
    pub fn shrink(&self, want_bytes: u64) -> u64 {
        let mut freed = 0;
        while freed < want_bytes && !self.is_hugetlb() {
            let taken = self.with_state(|state| {
                let number = state.buddies.take_free_chunk(&self.frames)?;
                state.chunks_in_transit += 1;
                // From here on the chunk cannot be leased.
                state.buddies.leases.note_filled(number >> self.chunk_order, false);
                Some(number)
            });
            let Some(number) = taken else { break };
            let chunk = number >> self.chunk_order;
            let (first_block, blocks) = self.blocks_of(chunk);
            // SAFETY: the chunk is out of the free lists. Nothing refers to it, including the kernel's rings, and its
            // contents are not needed.
            let bytes = unsafe { self.discard(first_block, blocks) };
            if bytes == 0 {
                // The kernel did not free the chunk (its memory is locked), so the chunk is free again.
                self.with_state(|state| {
                    state.buddies.leases.note_filled(chunk, true);
                    state.buddies.free(&self.frames, number, self.chunk_order, false);
                    state.chunks_in_transit -= 1;
                });
                break;
            }
            let filled = self.filled_chunks.fetch_sub(1, Relaxed);
            debug_assert!(filled > 0, "the chunk had memory");
            self.return_claimed_chunk(chunk);
            freed += bytes;
        }
        freed
    }

    /// Returns the resident bytes of the pool's metadata: frames, scan words and leases.
    pub fn frames_bytes(&self) -> u64 {
        let pages = self.pages();
        let chunks = pages >> self.chunk_order;
        self.frames.resident_bytes(0, pages as usize)
            + self.scan_words.resident_bytes(0, chunks as usize)
            + self.state.with(|state| state.buddies.leases.resident_bytes(chunks))
    }

    /// Returns the scan word of the chunk that contains page `number`. The word holds the version of the chunk's huge
    /// folio, and the folio's state in the scan for sparse huge folios (`mapping::sweep`). The word is 0 at first, and
    /// keeps its value when the chunk is emptied.
    pub fn scan_word(&self, number: u32) -> &AtomicU64 {
        self.scan_words.get((number >> self.chunk_order) as usize)
    }

    /// Returns the number of pages that ever had memory; all page numbers are smaller.
    pub fn pages(&self) -> u32 {
        self.state.with(|state| state.chunks) << self.chunk_order
    }

    /// Calls `see` with the first page and the state of each folio and of each free run, in the order of their
    /// addresses, until `see` returns false. `see` gets the old or the new state of a folio that changes concurrently.
    pub fn walk(&self, mut see: impl FnMut(u32, State) -> bool) {
        let (mut number, end) = (0, self.pages());
        while number < end {
            let state = self.word(number).load();
            if !see(number, state) {
                return;
            }
            number += 1 << if state.kind() == Kind::Tail { 0 } else { state.order() };
        }
    }

    /// Copies bytes from offset `at` of a folio to `to`. The caller must check with the folio's word whether the copy
    /// is valid.
    #[inline]
    pub fn copy_out(&self, number: u32, at: usize, to: &mut [u8]) {
        assert!(at + to.len() <= self.chunk_bytes);
        // A word needs no call of the C library.
        #[cfg(not(shuttle))]
        if let Ok(word) = <&mut [u8; 8]>::try_from(&mut *to) {
            // SAFETY: as for the copy below.
            *word = unsafe { bytes::read_u64((self.addr(number) + at) as *const u8) }.to_le_bytes();
            return;
        }
        // SAFETY: mapped by invariant 1. A number comes from an index or a guard. Only chunks without a page in an
        // index or under a guard lose their memory. A copy that races with the loss reads zeros and is discarded. `to`
        // belongs to the caller.
        unsafe { copy(to.as_mut_ptr(), (self.addr(number) + at) as *const u8, to.len()) };
    }

    /// Copies `from` to offset `at` of a folio that the caller has pinned or owns exclusively.
    #[inline]
    pub fn copy_in(&self, number: u32, at: usize, from: &[u8]) {
        assert!(at + from.len() <= self.chunk_bytes);
        // SAFETY: mapped by invariant 1. The caller's pin keeps the folio in place. Concurrent copies may race; they
        // detect the race by the folio's word.
        unsafe { copy((self.addr(number) + at) as *mut u8, from.as_ptr(), from.len()) };
    }

    /// As [`Pool::copy_in`], but writes `len_bytes` zeros.
    pub fn zero(&self, number: u32, at: usize, len_bytes: usize) {
        assert!(at + len_bytes <= self.chunk_bytes);
        // SAFETY: as in `copy_in`.
        unsafe { bytes::zero((self.addr(number) + at) as *mut u8, len_bytes) };
    }

    /// Copies page number `from` to page number `to`. The bytes to copy must not change meanwhile, and the caller must
    /// own the target page exclusively.
    pub fn copy_page(&self, to: u32, from: u32) {
        // SAFETY: mapped by invariant 1. The target belongs to the caller. Source and target are separate folios, so
        // they do not overlap.
        unsafe { bytes::copy(self.addr(to) as *mut u8, self.addr(from) as *const u8, self.page.bytes()) };
    }

    /// Returns whether all bytes of a page are zero.
    pub fn is_page_zero(&self, number: u32) -> bool {
        // SAFETY: mapped by invariant 1; the length is one page.
        unsafe { bytes::is_zero(self.addr(number) as *const u8, self.page.bytes()) }
    }

    /// Changes the state under its lock. Then publishes the number of free chunks for threads that read it without the
    /// lock, and in the statistics.
    fn with_state<R>(&self, change: impl FnOnce(&mut PoolState) -> R) -> R {
        self.state.with(|state| {
            let result = change(state);
            self.publish_free_chunks(state);
            result
        })
    }

    /// As [`Pool::with_state`], for allocations: also notes if a free chunk is taken into use.
    fn allocate_with<R>(&self, allocate: impl FnOnce(&mut PoolState) -> R) -> R {
        let (result, is_chunk_used) = self.state.with(|state| {
            let result = allocate(state);
            (result, self.publish_free_chunks(state))
        });
        if is_chunk_used {
            self.note_chunk_used();
        }
        result
    }

    /// Publishes the number of free chunks. Returns whether there are fewer than before. False for reserved huge pages,
    /// which never grow.
    fn publish_free_chunks(&self, state: &PoolState) -> bool {
        if self.is_lease_end_requested() && !state.buddies.has_leased() {
            self.is_lease_end_requested.store(false, Relaxed);
        }
        let now = state.buddies.free_chunk_count;
        let before = self.free_chunks.load(Relaxed);
        if now != before {
            self.free_chunks.store(now, Relaxed);
            if self.is_hugetlb() {
                return false;
            }
            let bytes = |chunks: u32| u64::from(chunks) * self.chunk_bytes as u64;
            if now > before {
                stats::add(Counter::CacheFree, bytes(now - before));
            } else {
                stats::sub(Counter::CacheFree, bytes(before - now));
            }
        }
        now < before
    }
}

/// As [`bytes::copy`].
///
/// # Safety
///
/// As [`bytes::copy`].
#[inline]
unsafe fn copy(dst: *mut u8, src: *const u8, len_bytes: usize) {
    // Under shuttle another thread may run in the middle of the copy.
    let first = if cfg!(shuttle) { len_bytes / 2 } else { 0 };
    #[cfg(shuttle)]
    {
        // SAFETY: guaranteed by the caller for `len_bytes`, of which these are the first half.
        unsafe { bytes::copy(dst, src, first) };
        pagemill_core::sync::modelled::scheduling_point();
    }
    // SAFETY: guaranteed by the caller.
    unsafe { bytes::copy(dst.add(first), src.add(first), len_bytes - first) };
}
