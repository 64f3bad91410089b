//! The memory of one cache: a window of addresses, carved into pages, and 16 bytes of metadata for each.
#![allow(unsafe_code)] // copies to and from its memory, gives it back

use super::buddy::Buddies;
use super::bytes;
use super::leases::Leases;
use super::word::{Kind, State, Word};
use crate::arena::{Arena, Reserve, Table, Zeroed, place};
use crate::error::{Error, Result};
use crate::stats::{self, Counter};
use crate::sync::{AtomicU32, AtomicU64, Backoff, Guarded, Relaxed};
use crate::units::{BLOCK_BYTES, PageSize};
use pagemill_sys::mem;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU8};

/// Metadata of one page.
#[repr(C)]
pub(crate) struct Frame {
    pub word: Word,
    pub(super) owner: AtomicU64,
}

// SAFETY: atomics only, for which zero bits are valid.
unsafe impl Zeroed for Frame {}

const _: () = assert!(size_of::<Frame>() == 16);

/// Frames use huge pages once this much of them is in use.
const HUGE_FRAMES_BYTES: usize = BLOCK_BYTES / 2;

/// The window is opened in steps of this.
const OPENED_BYTES: usize = 32 * BLOCK_BYTES;

/// Bits of a page's index in its file. The rest of the owner word is the file's id.
const INDEX_BITS: u32 = 40;

/// The owner of a folio, as an opaque id and an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    /// At most [`Owner::MAX_ID`].
    pub id: u32,
    /// Index of the folio's first page.
    pub index: u64,
}

impl Owner {
    pub const MAX_ID: u32 = (1 << (u64::BITS - INDEX_BITS)) - 1;
    pub const MAX_INDEX: u64 = (1 << INDEX_BITS) - 1;

    #[inline]
    fn pack(self) -> u64 {
        debug_assert!(self.id <= Self::MAX_ID && self.index <= Self::MAX_INDEX);
        u64::from(self.id) << INDEX_BITS | self.index
    }
}

impl Frame {
    /// The owner of the folio that begins here. Valid for a live folio only.
    #[inline]
    pub fn owner(&self) -> Owner {
        let word = self.owner.load(Relaxed);
        Owner { id: (word >> INDEX_BITS) as u32, index: word & Owner::MAX_INDEX }
    }

    /// Whether a folio of this owner begins here.
    #[inline]
    pub fn is_of(&self, owner: Owner) -> bool {
        self.owner.load(Relaxed) == owner.pack()
    }
}

/// Allocated but unpublished pages. Not `Clone`: each value is the only reference to its pages.
#[derive(Debug)]
pub(crate) struct Taken {
    pub number: u32,
    pub order: u8,
    /// All bytes read zero.
    pub is_zero: bool,
}

/// The state under the pool's lock.
struct PoolState {
    buddies: Buddies,
    /// Chunks of the window used so far.
    chunks: u32,
    /// Chunks in transit: neither free, nor empty, nor in use, because they are being brought in or given back.
    moving: u32,
    /// Head of the list of chunks without memory; each first frame holds the next chunk.
    empty: Option<u32>,
}

/// The memory of one cache. Never destroyed: an unused pool is emptied and used again.
///
/// # Invariants
///
/// 1. Chunks from 0 to `PoolState::chunks` that are not in the list of empty ones are mapped, writable, and this pool's
///    alone. They are resident as far as the process allows. Leased chunks stay so. For a pool over reserved huge pages
///    this holds while it has them.
/// 2. A thread that took a page from the free lists may change its bytes until its word is *Live*. From then on the
///    word's protocol holds.
pub(crate) struct Pool {
    arena: &'static Arena,
    page: PageSize,
    /// Log2 of the bytes of a page.
    page_shift: u32,
    base: usize,
    /// Log2 of the pages of a chunk: the order of a huge folio.
    chunk_order: u8,
    max_chunks: u32,
    use_huge: AtomicBool,
    frames: Table<Frame>,
    /// One word per chunk, for code that scans chunks periodically.
    notes: Table<AtomicU64>,
    state: Guarded<PoolState>,
    has_huge_frames: AtomicBool,
    /// Whole chunks that are free, as of the last change.
    free_chunks: AtomicU32,
    /// Chunks with memory.
    filled_chunks: AtomicU32,
    /// Pages that have frames.
    opened_pages: AtomicU32,
    /// Bytes of a chunk.
    chunk_bytes: usize,
    node: usize,
    /// Set while free memory cannot be given back because it is leased.
    is_wanted_back: AtomicBool,
    /// For a pool over reserved huge pages: [`CLOSED`] at first. Changed under `Caches::users` only.
    reserve: Option<AtomicU8>,
}

/// The window has no pages.
const CLOSED: u8 = 0;
/// All of the window has pages.
const PLACED: u8 = 1;
/// The kernel failed; the addresses may belong to another mapping.
const LOST: u8 = 2;

impl Pool {
    /// Creates a pool of addresses for up to `max_bytes`; none are resident.
    ///
    /// # Errors
    ///
    /// [`Error::NoAddresses`]; [`Error::System`] without memory for its metadata.
    pub fn new(
        arena: &'static Arena,
        page: PageSize,
        max_bytes: u64,
        node: usize,
        is_hugetlb: bool,
    ) -> Result<&'static Self> {
        let chunk_bytes = page.bytes().max(BLOCK_BYTES);
        let no_addresses = || Error::NoAddresses { wanted_bytes: max_bytes };
        let chunks = usize::try_from(max_bytes).map_err(|_| no_addresses())?.div_ceil(chunk_bytes).max(1);
        let chunk_pages = chunk_bytes / page.bytes();
        // The last number means none.
        let pages =
            chunks.checked_mul(chunk_pages).filter(|pages| *pages < u32::MAX as usize).ok_or_else(no_addresses)?;
        let align_blocks = chunk_bytes / BLOCK_BYTES;
        let base = arena.carve_closed(&arena.pool, chunks * align_blocks, align_blocks, node)?;
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
            notes: Table::new(chunks)?,
            state: Guarded::new(PoolState {
                buddies: Buddies::new(chunk_order, Leases::new(chunks, chunk_bytes)?),
                chunks: 0,
                moving: 0,
                empty: None,
            }),
            has_huge_frames: AtomicBool::new(false),
            free_chunks: AtomicU32::new(0),
            filled_chunks: AtomicU32::new(0),
            opened_pages: AtomicU32::new(0),
            chunk_bytes,
            node,
            is_wanted_back: AtomicBool::new(false),
            reserve: is_hugetlb.then(|| AtomicU8::new(CLOSED)),
        })
    }

    /// Whether the pool uses reserved huge pages. These are placed by [`Pool::place_hugetlb`], all at once, and removed
    /// by [`Pool::return_hugetlb`]. Until then none is given back.
    pub fn is_hugetlb(&self) -> bool {
        self.reserve.is_some()
    }

    /// Whether a pool over reserved huge pages has none and can get some.
    pub fn is_closed(&self) -> bool {
        self.reserve.as_ref().is_some_and(|reserve| reserve.load(Relaxed) == CLOSED)
    }

    /// Places reserved pages at all of the window.
    ///
    /// # Errors
    ///
    /// [`Error::System`]: the pool is unusable from then on.
    ///
    /// # Panics
    ///
    /// If the pool is not closed, or if `pages` has a different length.
    pub fn place_hugetlb(&self, pages: Reserve) -> Result<()> {
        assert!(self.is_closed());
        assert_eq!(pages.len_bytes() as u64, self.max_bytes());
        let Some(reserve) = &self.reserve else { return Ok(()) };
        reserve.store(LOST, Relaxed);
        // SAFETY: the window is ours, and closed.
        unsafe { self.arena.place_hugetlb(pages, self.base, self.node) }?;
        reserve.store(PLACED, Relaxed);
        Ok(())
    }

    /// Gives back the reserved pages if no page of the pool is in use or leased; otherwise keeps them.
    pub fn return_hugetlb(&self) {
        let Some(reserve) = self.reserve.as_ref().filter(|reserve| reserve.load(Relaxed) == PLACED) else { return };
        let is_empty = self.state.with(|state| {
            // Leased chunks are not taken.
            while let Some(number) = state.buddies.take_whole(&self.frames) {
                let chunk = number >> self.chunk_order;
                state.buddies.leases.note_filled(chunk, false);
                self.filled_chunks.fetch_sub(1, Relaxed);
                self.add_empty(state, chunk);
            }
            self.note_free(state);
            self.filled_chunks.load(Relaxed) == 0 && state.moving == 0
        });
        if is_empty {
            // SAFETY: all chunks are out of the free lists, and none is being brought in. So nothing refers to their
            // bytes, including the kernel's rings.
            let ended = unsafe { self.arena.return_hugetlb(self.base, self.max_chunks as usize * self.chunk_bytes) };
            reserve.store(if ended.is_ok() { CLOSED } else { LOST }, Relaxed);
        }
    }

    pub fn page(&self) -> PageSize {
        self.page
    }

    #[inline]
    pub fn page_shift(&self) -> u32 {
        self.page_shift
    }

    /// The memory node that its window is bound to.
    pub fn node(&self) -> usize {
        self.node
    }

    /// Whether no page of the pool is in use.
    pub fn is_idle(&self) -> bool {
        self.free_chunks.load(Relaxed) == self.filled_chunks.load(Relaxed)
    }

    pub fn chunk_order(&self) -> u8 {
        self.chunk_order
    }

    #[inline]
    pub fn chunk_bytes(&self) -> usize {
        self.chunk_bytes
    }

    /// Incremented with each fork that leads to this process.
    #[inline]
    pub fn generation(&self) -> u16 {
        self.arena.generation()
    }

    /// Maximum number of bytes that it can hold.
    pub fn max_bytes(&self) -> u64 {
        u64::from(self.max_chunks) * self.chunk_bytes() as u64
    }

    #[inline]
    pub fn frame(&self, number: u32) -> &Frame {
        self.frames.get(number as usize)
    }

    /// The frame of an unverified number; `None` if there is no such frame.
    #[inline]
    pub fn frame_if_any(&self, number: u64) -> Option<&Frame> {
        // SAFETY: the frames of opened pages are in the table; they were opened before the count was raised.
        (number < u64::from(self.opened_pages.load(Relaxed)))
            .then(|| unsafe { self.frames.get_unchecked(number as usize) })
    }

    /// Prefetches bytes that are about to be read.
    #[inline]
    pub fn prefetch(&self, number: u32, at: usize) {
        mem::prefetch(self.addr(number) + at);
    }

    #[inline]
    pub fn word(&self, number: u32) -> &Word {
        &self.frame(number).word
    }

    pub fn owner(&self, number: u32) -> Owner {
        self.frame(number).owner()
    }

    /// Sets the owner of the folio that begins here. The caller must own it exclusively.
    pub fn set_owner(&self, number: u32, owner: Owner) {
        self.frame(number).owner.store(owner.pack(), Relaxed);
    }

    #[inline]
    pub fn addr(&self, number: u32) -> usize {
        self.base + ((number as usize) << self.page_shift)
    }

    /// The number of the page that begins at an address of the pool.
    pub fn number_at(&self, addr: usize) -> u32 {
        ((addr - self.base) >> self.page_shift) as u32
    }

    /// Sets whether new chunks use huge pages from here on.
    pub fn allow_huge(&self, is_allowed: bool) {
        self.use_huge.store(is_allowed, Relaxed);
    }

    /// Allocates 2^`order` free pages, bringing in a new chunk if needed. The folio is busy and owned by the caller.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`] if there is no room for another chunk.
    pub fn take(&self, order: u8) -> Result<Taken> {
        match self.take_free(order) {
            Some(taken) => Ok(taken),
            None => self.take_new(order),
        }
    }

    /// As [`Pool::take`], from free pages only.
    pub fn take_free(&self, order: u8) -> Option<Taken> {
        let taken = self.state.with(|state| {
            let taken = state.buddies.take(&self.frames, order);
            self.note_free(state);
            taken
        });
        taken.map(|(number, is_zero)| Taken { number, order, is_zero })
    }

    /// Allocates up to `most` free single pages; returns how many.
    pub fn take_free_pages(&self, most: usize, mut taken: impl FnMut(Taken)) -> usize {
        self.state.with(|state| {
            let free = std::iter::from_fn(|| state.buddies.take(&self.frames, 0));
            let count = free.take(most).map(|(number, is_zero)| taken(Taken { number, order: 0, is_zero })).count();
            self.note_free(state);
            count
        })
    }

    /// Allocates `pages` consecutive pages, from free pages only; returns the first. Each is busy, and is freed
    /// separately.
    pub fn take_free_row(&self, pages: u32) -> Option<u32> {
        let order = pages.next_power_of_two().trailing_zeros() as u8;
        if order > self.chunk_order {
            return None;
        }
        self.state.with(|state| {
            let (number, is_zero) = state.buddies.take(&self.frames, order)?;
            (number..number + (1 << order)).for_each(|page| self.word(page).assign(Kind::Busy, 0));
            (number + pages..number + (1 << order)).for_each(|page| state.buddies.give(&self.frames, page, 0, is_zero));
            self.note_free(state);
            Some(number)
        })
    }

    fn take_new(&self, order: u8) -> Result<Taken> {
        let mut backoff = Backoff::new();
        let chunk = loop {
            // Other threads may bring in a chunk for more than they need, or give one back.
            let is_moving = self.state.with(|state| state.moving > 0);
            match self.claim_chunk() {
                Ok(chunk) => break chunk,
                Err(error) => match self.take_free(order) {
                    Some(taken) => return Ok(taken),
                    None if !is_moving => return Err(error),
                    None => backoff.pause(),
                },
            }
        };
        let first_block = self.first_block(chunk);
        let filled = if self.is_hugetlb() {
            self.arena.populate_reserved(first_block, self.blocks_of_chunk())
        } else {
            let use_huge = self.use_huge.load(Relaxed);
            self.arena.populate_blocks(first_block, self.blocks_of_chunk(), use_huge).map(drop)
        };
        if let Err(error) = filled {
            self.leave_chunk(chunk);
            // Another thread may have freed pages meanwhile.
            return self.take_free(order).ok_or(error);
        }
        self.filled_chunks.fetch_add(1, Relaxed);
        let number = chunk << self.chunk_order;
        self.note_frames(number);
        (number..number + (1 << self.chunk_order)).for_each(|page| self.word(page).assign(Kind::Tail, 0));
        self.state.with(|state| {
            state.moving -= 1;
            state.buddies.leases.note_filled(chunk, true);
            state.buddies.give(&self.frames, number, self.chunk_order, true);
            // This chunk is ours: no other thread could take it meanwhile.
            let taken = state.buddies.take(&self.frames, order);
            self.note_free(state);
            taken.map(|(number, is_zero)| Taken { number, order, is_zero }).ok_or_else(|| self.is_full())
        })
    }

    fn is_full(&self) -> Error {
        let used = u64::from(self.filled_chunks.load(Relaxed)) * self.chunk_bytes() as u64;
        Error::NoMemory { wanted_bytes: self.chunk_bytes() as u64, used_bytes: used, limit_bytes: self.max_bytes() }
    }

    /// Takes a chunk without memory for the caller to fill.
    fn claim_chunk(&self) -> Result<u32> {
        self.state.with(|state| {
            if let Some(chunk) = state.empty {
                let next = self.frame(chunk << self.chunk_order).owner.load(Relaxed);
                state.empty = u32::try_from(next).ok();
                state.moving += 1;
                return Ok(chunk);
            }
            if state.chunks == self.max_chunks {
                return Err(self.is_full());
            }
            self.open(state.chunks)?;
            state.buddies.leases.open(state.chunks)?;
            state.chunks += 1;
            state.moving += 1;
            self.opened_pages.store(state.chunks << self.chunk_order, Relaxed);
            Ok(state.chunks - 1)
        })
    }

    /// Opens a chunk that was never used, with its frames. Addresses are opened in steps, because open memory counts as
    /// committed by the system.
    fn open(&self, chunk: u32) -> Result<()> {
        let pages = 1usize << self.chunk_order;
        let next = chunk as usize * pages;
        self.frames.open(0, next, next + pages)?;
        self.notes.open(0, chunk as usize, chunk as usize + 1)?;
        let step = (OPENED_BYTES / self.chunk_bytes()).max(1) as u32;
        if chunk.is_multiple_of(step) && !self.is_hugetlb() {
            let chunks = step.min(self.max_chunks - chunk) as usize;
            self.arena.open_blocks(self.addr(chunk << self.chunk_order), chunks * self.chunk_bytes())?;
        }
        Ok(())
    }

    fn leave_chunk(&self, chunk: u32) {
        self.state.with(|state| {
            self.add_empty(state, chunk);
            state.moving -= 1;
        });
    }

    fn add_empty(&self, state: &mut PoolState, chunk: u32) {
        let next = state.empty.map_or(u64::MAX, u64::from);
        self.frame(chunk << self.chunk_order).owner.store(next, Relaxed);
        state.empty = Some(chunk);
    }

    fn note_frames(&self, number: u32) {
        if number as usize * size_of::<Frame>() >= HUGE_FRAMES_BYTES && !self.has_huge_frames.swap(true, Relaxed) {
            self.frames.allow_huge();
        }
    }

    fn first_block(&self, chunk: u32) -> usize {
        self.arena.block_of(self.addr(chunk << self.chunk_order))
    }

    fn blocks_of_chunk(&self) -> usize {
        self.chunk_bytes() / BLOCK_BYTES
    }

    /// Frees pages that the caller owns exclusively, with the words of all of them.
    pub fn give(&self, number: u32, order: u8) {
        self.state.with(|state| {
            state.buddies.give(&self.frames, number, order, false);
            self.note_free(state);
        });
    }

    /// Leases the chunks with memory around a page to a ring, up to 64 MiB. None of them is given back until
    /// [`Pool::end_lease`]. Returns their numbers. Returns `None` if a different run of the same 64 MiB is leased
    /// already, or memory is wanted back.
    pub fn lease(&self, number: u32) -> Option<Range<u32>> {
        if self.is_wanted_back() {
            return None;
        }
        self.state.with(|state| state.buddies.lease(&self.frames, number >> self.chunk_order))
    }

    /// Ends one ring's lease of the run that begins at a chunk.
    pub fn end_lease(&self, first: u32) {
        self.state.with(|state| {
            state.buddies.end_lease(&self.frames, first);
            self.note_free(state);
        });
    }

    /// Address and length of the memory of chunks.
    pub fn range_of(&self, chunks: &Range<u32>) -> (usize, usize) {
        (self.addr(chunks.start << self.chunk_order), chunks.len() * self.chunk_bytes())
    }

    /// Length of the pieces of the window that memory is leased in; the first piece begins with the window.
    pub fn lease_bytes(&self) -> usize {
        self.state.with(|state| state.buddies.leases.chunks() as usize) * self.chunk_bytes
    }

    /// Whether leases should be ended, because memory is wanted back.
    #[inline]
    pub fn is_wanted_back(&self) -> bool {
        self.is_wanted_back.load(Relaxed)
    }

    /// Requests the end of leases on free chunks; returns whether this is a new request.
    pub fn want_back(&self) -> bool {
        !self.is_hugetlb()
            && self.state.with(|state| state.buddies.has_leased() && !self.is_wanted_back.swap(true, Relaxed))
    }

    /// Bytes that [`Pool::shrink`] could give back, if they are not leased.
    pub fn giveable_bytes(&self) -> u64 {
        if self.is_hugetlb() {
            return 0;
        }
        u64::from(self.free_chunks.load(Relaxed)) * self.chunk_bytes() as u64
    }

    /// Bytes with memory, in use or free.
    pub fn filled_bytes(&self) -> u64 {
        u64::from(self.filled_chunks.load(Relaxed)) * self.chunk_bytes() as u64
    }

    /// Gives free chunks that are not leased back to the system, up to about `want_bytes`; returns the bytes that the
    /// kernel took. Reserved huge pages are never given back: while they are reserved for this pool they have no other
    /// use.
    pub fn shrink(&self, want_bytes: u64) -> u64 {
        let mut freed = 0;
        while freed < want_bytes && !self.is_hugetlb() {
            let taken = self.state.with(|state| {
                let taken = state.buddies.take_whole(&self.frames);
                state.moving += u32::from(taken.is_some());
                if let Some(number) = taken {
                    // From here on it cannot be leased.
                    state.buddies.leases.note_filled(number >> self.chunk_order, false);
                }
                self.note_free(state);
                taken
            });
            let Some(number) = taken else { break };
            let chunk = number >> self.chunk_order;
            // SAFETY: the chunk is out of the free lists. Nothing refers to it, including the kernel's rings, and its
            // contents are not needed.
            let bytes = unsafe { self.arena.discard(self.first_block(chunk), self.blocks_of_chunk()) };
            if bytes == 0 {
                // The kernel keeps it (locked memory), so the pool does, too.
                self.state.with(|state| {
                    state.buddies.leases.note_filled(chunk, true);
                    state.buddies.give(&self.frames, number, self.chunk_order, false);
                    state.moving -= 1;
                    self.note_free(state);
                });
                break;
            }
            self.filled_chunks.fetch_sub(1, Relaxed);
            self.leave_chunk(chunk);
            freed += bytes;
        }
        freed
    }

    /// Resident bytes of the frames.
    pub fn frames_bytes(&self) -> u64 {
        let pages = self.pages();
        let chunks = pages >> self.chunk_order;
        self.frames.resident_bytes(0, pages as usize)
            + self.notes.resident_bytes(0, chunks as usize)
            + self.state.with(|state| state.buddies.leases.resident_bytes(chunks))
    }

    /// The note of the chunk that contains a page: 0 at first, kept when the chunk is emptied.
    pub fn note(&self, number: u32) -> &AtomicU64 {
        self.notes.get((number >> self.chunk_order) as usize)
    }

    /// Number of pages that ever had memory: an upper bound of page numbers.
    pub fn pages(&self) -> u32 {
        self.state.with(|state| state.chunks) << self.chunk_order
    }

    /// Walks all folios, used and free, while `see` returns true. Concurrent changes are seen either before or after.
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

    /// Copies bytes of a folio out. Whether the copy is valid must be checked with the folio's word.
    #[inline]
    pub fn copy_out(&self, number: u32, at: usize, to: &mut [u8]) {
        assert!(at + to.len() <= self.chunk_bytes());
        // In a model another thread may run in the middle of the copy.
        #[cfg(shuttle)]
        let (at, to) = {
            let (first, rest) = to.split_at_mut(to.len() / 2);
            // SAFETY: as below.
            unsafe { bytes::copy(first.as_mut_ptr(), (self.addr(number) + at) as *const u8, first.len()) };
            crate::sync::modelled::point();
            (at + first.len(), rest)
        };
        // SAFETY: mapped by invariant 1. A number comes from an index or a guard, and memory is taken only from chunks
        // that are in neither. A copy that races with that reads zeros and is discarded. `to` belongs to the caller.
        unsafe { bytes::copy(to.as_mut_ptr(), (self.addr(number) + at) as *const u8, to.len()) };
    }

    /// Copies bytes into a folio that the caller has pinned or owns exclusively.
    #[inline]
    pub fn copy_in(&self, number: u32, at: usize, from: &[u8]) {
        assert!(at + from.len() <= self.chunk_bytes());
        #[cfg(shuttle)]
        let (at, from) = {
            let (first, rest) = from.split_at(from.len() / 2);
            // SAFETY: as below.
            unsafe { bytes::copy((self.addr(number) + at) as *mut u8, first.as_ptr(), first.len()) };
            crate::sync::modelled::point();
            (at + first.len(), rest)
        };
        // SAFETY: mapped by invariant 1; the caller's pin keeps the folio in place; concurrent copies may race and
        // detect it.
        unsafe { bytes::copy((self.addr(number) + at) as *mut u8, from.as_ptr(), from.len()) };
    }

    /// As [`Pool::copy_in`], but writes zeros.
    pub fn zero(&self, number: u32, at: usize, len_bytes: usize) {
        assert!(at + len_bytes <= self.chunk_bytes());
        // SAFETY: as in `copy_in`.
        unsafe { bytes::zero((self.addr(number) + at) as *mut u8, len_bytes) };
    }

    /// Copies one or more pages to pages that the caller owns exclusively, from pages that do not change.
    pub fn copy_pages(&self, to: u32, from: u32, pages: u32) {
        let len_bytes = (pages as usize) << self.page_shift;
        // SAFETY: mapped by invariant 1. The target belongs to the caller, and both are separate folios, so they do not
        // overlap.
        unsafe { bytes::copy(self.addr(to) as *mut u8, self.addr(from) as *const u8, len_bytes) };
    }

    /// Whether all bytes of a page are zero.
    pub fn is_page_zero(&self, number: u32) -> bool {
        // SAFETY: mapped by invariant 1, a whole page.
        unsafe { bytes::is_zero(self.addr(number) as *const u8, self.page.bytes()) }
    }

    /// Calls `act` with the bytes of an unpublished folio.
    pub fn with_bytes<R>(&self, taken: &mut Taken, len_bytes: usize, act: impl FnOnce(&mut [u8]) -> R) -> R {
        assert!(len_bytes <= self.page.bytes() << taken.order);
        // SAFETY: mapped by invariant 1; by invariant 2 they belong to the caller, which is blocked meanwhile by the
        // borrow.
        act(unsafe { std::slice::from_raw_parts_mut(self.addr(taken.number) as *mut u8, len_bytes) })
    }

    /// Calls `act` with the bytes of a folio that the caller keeps *Still*.
    pub fn with_still_bytes<R>(&self, number: u32, len_bytes: usize, act: impl FnOnce(&[u8]) -> R) -> R {
        debug_assert_eq!(self.word(number).load().kind(), Kind::Still);
        // SAFETY: mapped by invariant 1; no thread writes to a still folio until the caller ends that.
        act(unsafe { std::slice::from_raw_parts(self.addr(number) as *const u8, len_bytes) })
    }

    /// The bytes of a folio that `holder` holds exclusively ([`Word::hold`]) as long as it lives.
    ///
    /// # Safety
    ///
    /// The folio must be held so, and must have `len_bytes` bytes.
    pub unsafe fn held_bytes<'held, H>(&self, _holder: &'held H, number: u32, len_bytes: usize) -> &'held [u8] {
        // SAFETY: mapped by invariant 1 for the life of the process; only the holder changes them, through a unique
        // borrow.
        unsafe { std::slice::from_raw_parts(self.addr(number) as *const u8, len_bytes) }
    }

    /// As [`Pool::held_bytes`], mutable.
    ///
    /// # Safety
    ///
    /// As [`Pool::held_bytes`].
    pub unsafe fn held_bytes_mut<'held, H>(
        &self,
        _holder: &'held mut H,
        number: u32,
        len_bytes: usize,
    ) -> &'held mut [u8] {
        // SAFETY: as above, and the borrow is unique. Optimistic readers may copy the bytes with opaque calls; they
        // discard the copy.
        unsafe { std::slice::from_raw_parts_mut(self.addr(number) as *mut u8, len_bytes) }
    }

    /// Publishes the number of free chunks here and in the figures. The caller holds the lock of the state.
    fn note_free(&self, state: &PoolState) {
        if self.is_wanted_back() && !state.buddies.has_leased() {
            self.is_wanted_back.store(false, Relaxed);
        }
        let now = state.buddies.whole_count;
        let before = self.free_chunks.load(Relaxed);
        if now != before {
            self.free_chunks.store(now, Relaxed);
            if self.is_hugetlb() {
                return;
            }
            let bytes = |chunks: u32| u64::from(chunks) * self.chunk_bytes() as u64;
            if now > before {
                stats::add(Counter::CacheFree, bytes(now - before));
            } else {
                stats::sub(Counter::CacheFree, bytes(before - now));
            }
        }
    }
}
