//! The arena: reserved address space, given out in blocks of 2 MiB, backed and emptied block by block.
//!
//! Three zones of one reservation. The *small* zone holds the extents of the
//! linked allocator for small sizes (`extents`); the *heap* zone holds slots,
//! the *pool* zone the pages of caches (both `backing`). Addresses are never given back, memory is. What a
//! block is backed by stands in its word (`block`).
//!
//! ```text
//!   base                  heap                      pool                 end
//!    | extents             | spans of slots          | windows of pages   |
//!    |#######......        |##############.......    |######......        |
//!            ^ next block                  ^ next block      ^ next block
//! ```
//!
//! Every byte is admitted by the [`Budget`] before it becomes resident, except
//! where the program touches what `mmap` would have granted untouched: that is
//! measured (`Arena::settle`).
//!
//! Below: `units`, `sync`, `stats`, `trace`. Locks: a zone's lock, then a block's.

pub(crate) mod backing;
pub(crate) mod block;
pub(crate) mod extents;
mod hugetlb;
mod metadata;
pub mod nodes;

pub(crate) use hugetlb::Reserve;
pub(crate) use metadata::{Table, Zeroed, place};

use crate::error::{Error, Result};
use crate::stats::{self, Counter};
use crate::sync::Lock;
use crate::units::{BLOCK_BYTES, PageSize, os_pages_per_block};
use block::{State, Word};
use nodes::Nodes;
use pagemill_sys::mem;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::Relaxed};

/// Where a request for memory comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Context {
    /// Outside of every lock.
    Outside,
    /// Inside the small allocator, which holds locks of its own.
    Nested,
}

/// Who says how much memory may become resident. `reclaim` implements it.
pub trait Budget: Sync {
    /// Charges `bytes` if there is room, reclaiming if there is none.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`] if there is none after reclaim; nothing is charged then.
    fn admit(&self, bytes: u64, context: Context) -> Result<()>;

    /// Ends the charge of bytes that the kernel took back.
    fn discharge(&self, bytes: u64);

    /// Opens `bytes` that the program may touch without asking again.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`] if what is resident is at the limit already, after reclaim.
    fn lend(&self, bytes: u64, context: Context) -> Result<()>;

    /// Makes room for `bytes` that were lent before and are about to be touched.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`] if there is none after reclaim.
    fn expect(&self, bytes: u64) -> Result<()>;

    /// Of lent bytes, `resident` (may be negative) turned out to be resident and `settled` need no more measuring.
    fn settled(&self, resident: i64, settled: i64);

    /// Bytes resident now, and how many more may become so.
    fn room(&self) -> (u64, u64);
}

/// Counts forks: what an older generation charged or locked is not this process's.
#[derive(Default)]
pub(crate) struct Generation(AtomicU32);

impl Generation {
    #[inline]
    pub fn get(&self) -> u16 {
        self.0.load(Relaxed) as u16
    }

    pub fn advance(&self) -> u16 {
        (self.0.fetch_add(1, Relaxed) + 1) as u16
    }
}

/// How an arena is laid out.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Address space for the small allocator's extents.
    pub small_bytes: usize,
    /// Address space for slots.
    pub heap_bytes: usize,
    /// Address space for the pages of caches.
    pub pool_bytes: usize,
    /// Unit of population where no huge page serves.
    pub page: PageSize,
    pub nodes: Nodes,
    /// Whether huge pages are wanted at all.
    pub use_huge: bool,
    /// Resident bytes from which on a block may be taken huge before all of it is needed.
    pub huge_from_bytes: u64,
}

/// A huge page may waste at most this share (1/16) of what is resident.
pub const WASTE_DIVISOR: u64 = 16;

/// How much of a new block will be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Filling {
    /// All of it, soon: its size class has filled a block before.
    Soon,
    /// Not known: the first block of a class, or an extent, of which each kind of small object fills its own.
    Unknown,
    /// Not all: its slots are larger than what they hold.
    Never,
}

/// A block that may stay half empty is taken huge from so many times more on: there is one for each class.
const SPARSE_FACTOR: u64 = 4;

impl Layout {
    /// The layout for a program: address space far beyond any limit, as far as `RLIMIT_AS` allows.
    pub fn for_program() -> Self {
        Self {
            small_bytes: 2 << 40,
            heap_bytes: 14 << 40,
            pool_bytes: 16 << 40,
            page: PageSize::os(),
            nodes: Nodes::real(),
            use_huge: true,
            huge_from_bytes: WASTE_DIVISOR * BLOCK_BYTES as u64,
        }
    }

    /// A small one, taken huge from the start: for tests.
    pub fn for_test() -> Self {
        Self {
            small_bytes: 1 << 30,
            heap_bytes: 16 << 30,
            pool_bytes: 16 << 30,
            huge_from_bytes: 0,
            ..Self::for_program()
        }
    }
}

/// A part of the reservation, given out from its start.
pub(crate) struct Zone {
    base: usize,
    len_bytes: usize,
    /// Bytes given out so far. Guarded by `lock` for writing.
    next: AtomicUsize,
    lock: Lock,
}

impl Zone {
    #[inline]
    pub fn contains(&self, addr: usize) -> bool {
        addr.wrapping_sub(self.base) < self.len_bytes
    }

    pub fn base(&self) -> usize {
        self.base
    }

    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Bytes given out so far, from the base on.
    pub fn used_bytes(&self) -> usize {
        self.next.load(Relaxed)
    }
}

/// The address space, its block words, and the rules by which blocks are backed.
pub struct Arena {
    pub(crate) small: Zone,
    pub(crate) heap: Zone,
    pub(crate) pool: Zone,
    words: Table<Word>,
    maps: Table<extents::Maps>,
    pub(crate) generation: Generation,
    pub(crate) budget: &'static dyn Budget,
    pub(crate) nodes: Nodes,
    pub(crate) page: PageSize,
    use_huge: bool,
    huge_from_bytes: u64,
    is_metadata_huge: AtomicBool,
    /// Block that should be brought in ahead of need, plus one; 0 for none.
    pub(crate) prefault: AtomicUsize,
}

impl Arena {
    /// Reserves the address space and its metadata; no memory becomes resident.
    ///
    /// Where the address space is limited, less is reserved: at least 256 MiB.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if not even that can be had.
    pub fn new(layout: Layout, budget: &'static dyn Budget) -> Result<Self> {
        let (base, [small_bytes, heap_bytes, pool_bytes]) = reserve(&layout)?;
        let blocks = (small_bytes + heap_bytes + pool_bytes) / BLOCK_BYTES;
        let zone = |base, len_bytes| Zone { base, len_bytes, next: AtomicUsize::new(0), lock: Lock::new() };
        Ok(Self {
            small: zone(base, small_bytes),
            heap: zone(base + small_bytes, heap_bytes),
            pool: zone(base + small_bytes + heap_bytes, pool_bytes),
            words: Table::new(blocks)?,
            maps: Table::new(small_bytes / BLOCK_BYTES)?,
            generation: Generation::default(),
            budget,
            nodes: layout.nodes,
            page: layout.page,
            use_huge: layout.use_huge,
            huge_from_bytes: layout.huge_from_bytes,
            is_metadata_huge: AtomicBool::new(false),
            prefault: AtomicUsize::new(0),
        })
    }

    /// First address.
    pub fn base(&self) -> usize {
        self.small.base
    }

    /// First address, and one past the last.
    pub fn addresses(&self) -> std::ops::Range<usize> {
        self.small.base..self.pool.base + self.pool.len_bytes
    }

    /// Whether the address lies in this arena.
    #[inline]
    pub fn contains(&self, addr: usize) -> bool {
        self.small.contains(addr) || self.heap.contains(addr) || self.pool.contains(addr)
    }

    /// The number of the block that `addr` lies in, counted from the arena's base.
    #[inline]
    pub(crate) fn block_of(&self, addr: usize) -> usize {
        (addr - self.small.base) / BLOCK_BYTES
    }

    pub(crate) fn block_addr(&self, block: usize) -> usize {
        self.small.base + block * BLOCK_BYTES
    }

    #[inline]
    pub(crate) fn word(&self, block: usize) -> &Word {
        self.words.get(block)
    }

    /// Bytes of address space for slots.
    pub(crate) fn heap_len_bytes(&self) -> usize {
        self.heap.len_bytes
    }

    /// What is behind a block now.
    #[inline]
    pub(crate) fn peek(&self, block: usize) -> State {
        self.word(block).peek(&self.generation)
    }

    /// Takes fresh blocks at the end of a zone: readable, writable, empty. Before anybody can see that they are given
    /// out, `prepare` is told up to which byte of the zone that was so, and will be.
    ///
    /// # Errors
    ///
    /// [`Error::NoAddresses`], or [`Error::System`] where `mmap` would refuse as much.
    pub(crate) fn carve(
        &self,
        zone: &Zone,
        blocks: usize,
        align_blocks: usize,
        node: usize,
        prepare: impl FnOnce(usize, usize) -> Result<()>,
    ) -> Result<usize> {
        let _guard = zone.lock.lock();
        let (start, len_bytes) = self.place_of(zone, blocks, align_blocks)?;
        let end = start + len_bytes;
        self.open_metadata(zone, end)?;
        prepare(zone.used_bytes(), end - zone.base)?;
        backing::open(start, len_bytes)?;
        self.nodes.bind(start, len_bytes, node);
        zone.next.store(end - zone.base, Relaxed);
        Ok(start)
    }

    /// As [`Arena::carve`], of blocks that stay closed until [`Arena::open_blocks`].
    ///
    /// # Errors
    ///
    /// As [`Arena::carve`].
    pub(crate) fn carve_closed(&self, zone: &Zone, blocks: usize, align_blocks: usize, node: usize) -> Result<usize> {
        let _guard = zone.lock.lock();
        let (start, len_bytes) = self.place_of(zone, blocks, align_blocks)?;
        self.open_metadata(zone, start + len_bytes)?;
        self.nodes.bind(start, len_bytes, node);
        zone.next.store(start + len_bytes - zone.base, Relaxed);
        Ok(start)
    }

    /// Makes blocks readable and writable that were carved closed.
    ///
    /// # Errors
    ///
    /// [`Error::System`] where `mmap` would refuse as much.
    pub(crate) fn open_blocks(&self, addr: usize, len_bytes: usize) -> Result<()> {
        backing::open(addr, len_bytes)
    }

    /// Where the next blocks of a zone begin, and their bytes. Under its lock.
    fn place_of(&self, zone: &Zone, blocks: usize, align_blocks: usize) -> Result<(usize, usize)> {
        let no_addresses = || Error::NoAddresses { wanted_bytes: (blocks as u64).saturating_mul(BLOCK_BYTES as u64) };
        let align_bytes = align_blocks.checked_mul(BLOCK_BYTES).ok_or_else(no_addresses)?;
        let len_bytes = blocks.checked_mul(BLOCK_BYTES).ok_or_else(no_addresses)?;
        let start = (zone.base + zone.used_bytes()).checked_next_multiple_of(align_bytes).ok_or_else(no_addresses)?;
        let end = start.checked_add(len_bytes).ok_or_else(no_addresses)?;
        if end > zone.base + zone.len_bytes { Err(no_addresses()) } else { Ok((start, len_bytes)) }
    }

    /// Opens the words and maps of the blocks that a zone is about to give out.
    fn open_metadata(&self, zone: &Zone, end: usize) -> Result<()> {
        let first = self.block_of(zone.base);
        let (next, end) = (first + zone.used_bytes() / BLOCK_BYTES, first + (end - zone.base) / BLOCK_BYTES);
        self.words.open(first, next, end)?;
        if first == 0 { self.maps.open(first, next, end) } else { Ok(()) }
    }

    /// Whether a block may be taken huge before all of it is needed: it wastes no large share of what is resident.
    pub(crate) fn may_take_huge(&self, filling: Filling) -> bool {
        if !self.use_huge {
            return false;
        }
        let resident = self.budget.room().0;
        let is_worth_it = resident >= self.huge_from_bytes;
        if is_worth_it && !self.is_metadata_huge.load(Relaxed) && resident >= 4 * self.huge_from_bytes {
            self.is_metadata_huge.store(true, Relaxed);
            self.words.allow_huge();
            self.maps.allow_huge();
        }
        let is_filled = match filling {
            Filling::Soon => true,
            Filling::Unknown => resident >= SPARSE_FACTOR * self.huge_from_bytes,
            Filling::Never => self.huge_from_bytes == 0,
        };
        is_worth_it && is_filled
    }

    /// Bytes of metadata that are resident, as far as the kernel tells. Walks what is in use.
    pub fn metadata_bytes(&self) -> u64 {
        let small = self.small.used_bytes() / BLOCK_BYTES;
        let heap = self.heap.used_bytes() / BLOCK_BYTES;
        let pool = self.pool.used_bytes() / BLOCK_BYTES;
        self.words.resident_bytes(0, small)
            + self.words.resident_bytes(self.block_of(self.heap.base), heap)
            + self.words.resident_bytes(self.block_of(self.pool.base), pool)
            + self.maps.resident_bytes(0, small)
    }

    /// Advances with each fork that this process is a child of.
    pub(crate) fn generation(&self) -> u16 {
        self.generation.get()
    }

    /// The node this thread's memory should come from.
    pub(crate) fn current_node(&self) -> usize {
        self.nodes.current()
    }

    /// In a fork child: what the parent charged or locked is not this process's.
    pub(crate) fn forked(&self) -> u16 {
        self.generation.advance()
    }

    /// Locks for `fork`; [`Arena::release_after_fork`] ends it on both sides.
    pub(crate) fn acquire_for_fork(&self) {
        self.small.lock.acquire();
        self.heap.lock.acquire();
        self.pool.lock.acquire();
    }

    pub(crate) fn release_after_fork(&self) {
        self.pool.lock.release();
        self.heap.lock.release();
        self.small.lock.release();
    }

    pub(crate) fn charged_bytes(pages: u32) -> u64 {
        u64::from(pages) * (BLOCK_BYTES / os_pages_per_block()) as u64
    }

    /// The gauge of the zone that a block lies in.
    pub(crate) fn counter_of(&self, block: usize) -> Counter {
        match self.block_addr(block) {
            addr if self.small.contains(addr) => Counter::Small,
            addr if self.heap.contains(addr) => Counter::Heap,
            _ => Counter::Cache,
        }
    }

    /// Counts a change of one zone's charge.
    pub(crate) fn count(counter: Counter, pages_before: u32, pages_after: u32) {
        let (before, after) = (Self::charged_bytes(pages_before), Self::charged_bytes(pages_after));
        if after >= before {
            stats::add(counter, after - before);
        } else {
            stats::sub(counter, before - after);
        }
    }
}

/// Reserves all zones, less where addresses are limited; returns base and lengths.
fn reserve(layout: &Layout) -> Result<(usize, [usize; 3])> {
    const LEAST_BYTES: usize = 256 << 20;
    let allowed = pagemill_sys::process::address_space_limit().unwrap_or(usize::MAX) / 2;
    let mut zones = [layout.small_bytes, layout.heap_bytes, layout.pool_bytes];
    if zones.iter().sum::<usize>() > allowed {
        // Little of each then, in equal parts: what a program needs more of is not known.
        let parts = zones.iter().filter(|bytes| **bytes > 0).count().max(1);
        zones = zones.map(|bytes| bytes.min(allowed / parts) & !(BLOCK_BYTES - 1));
    }
    loop {
        let total = zones.iter().sum::<usize>();
        let result = if total <= allowed {
            mem::reserve(total, BLOCK_BYTES, address_hint(total))
        } else {
            Err(std::io::ErrorKind::OutOfMemory.into())
        };
        match result {
            Ok(base) => return Ok((base, zones)),
            Err(cause) if total / 2 < LEAST_BYTES => {
                return Err(Error::System { doing: "reserving address space", cause });
            }
            Err(_) => zones = zones.map(|bytes| (bytes / 2).next_multiple_of(BLOCK_BYTES)),
        }
    }
}

/// A place below everything else that a position-independent program maps, at random.
///
/// Then one comparison tells the arena's addresses from those of libraries and
/// stacks. Where the place is taken the kernel chooses another, and only the
/// error message for a foreign address gets worse.
fn address_hint(len_bytes: usize) -> usize {
    if cfg!(target_pointer_width = "64") && len_bytes >= 1 << 40 {
        let random = pagemill_sys::process::random_u64() as usize;
        (0x1000_0000_0000 + random % 0x2000_0000_0000) & !(BLOCK_BYTES - 1)
    } else {
        0
    }
}
