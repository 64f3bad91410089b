//! The arena: reserved address space, carved in blocks of 2 MiB, backed and emptied block by block.
//!
//! One reservation has three zones. The *small* zone holds the extents of the linked allocator for small sizes
//! (`extents`), the *heap* zone holds slots, the *pool* zone the pages of caches (both `backing`). Address space is
//! never given back, memory is. The word of a block stores its backing (`block`).
//!
//! ```text
//!   base                  heap                      pool                 end
//!    | extents             | spans of slots          | windows of pages   |
//!    |#######......        |##############.......    |######......        |
//!            ^ next block                  ^ next block      ^ next block
//! ```
//!
//! Every byte is admitted by the [`Budget`] before it becomes resident. The exception is overcommitted memory, which
//! the program may touch as if `mmap` had granted it: its resident part is measured (`Arena::reconcile`).
//!
//! Below: `units`, `sync`, `stats`, `trace`. Locks: a zone's lock, then a block's.
#![allow(unsafe_code)] // calls that only fork handlers may make, or only the owner of a block

pub mod backing;
pub mod block;
pub(crate) mod extents;
mod hugetlb;
mod metadata;
pub mod nodes;

pub use hugetlb::Reserve;
pub use metadata::{Table, Zeroed, place};

use crate::error::{Error, Result};
use crate::stats::{self, Counter};
use crate::sync::Lock;
use crate::units::{BLOCK_BYTES, PageSize, os_pages_per_block};
use block::{BlockState, BlockWord};
use nodes::Nodes;
use pagemill_sys::mem;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::Relaxed};

/// The context of a request for memory.
///
/// Example: [`Budget`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Context {
    /// Outside every lock.
    Outside,
    /// Inside the small allocator, which holds its own locks.
    Nested,
}

/// Decides how much memory may become resident. Implemented by `reclaim`.
///
/// ```
/// use pagemill::{Pagemill, arena::{Budget, Context}};
///
/// let account = Pagemill::of_process()?.account;
/// account.admit(1 << 20, Context::Outside)?; // before a MiB becomes resident
/// account.discharge(1 << 20); // after it was returned
/// # Ok::<(), pagemill::Error>(())
/// ```
pub trait Budget: Sync {
    /// Charges `bytes` if there is room, reclaiming if there is not.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`] if there is no room after reclaim; nothing is charged then.
    fn admit(&self, bytes: u64, context: Context) -> Result<()>;

    /// Ends the charge of bytes that the kernel took back.
    fn discharge(&self, bytes: u64);

    /// Overcommits `bytes`: the program may touch them without another charge.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`] if the resident bytes are at the limit already, after reclaim.
    fn overcommit(&self, bytes: u64, context: Context) -> Result<()>;

    /// Makes room for `bytes` that were overcommitted before and are about to be touched.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`] if there is no room after reclaim.
    fn reserve(&self, bytes: u64) -> Result<()>;

    /// Updates the charge of overcommitted bytes: `resident` more (or fewer) are resident, and `reconciled` are no
    /// longer counted as untouched.
    fn reconciled(&self, resident: i64, reconciled: i64);

    /// Resident bytes now, and how many more may become resident.
    fn room(&self) -> (u64, u64);
}

/// Counts forks: charges and locks of an older generation are not this process's.
///
/// Example: [`Arena`].
#[derive(Default)]
pub struct Generation(AtomicU32);

impl Generation {
    #[inline]
    pub fn get(&self) -> u16 {
        self.0.load(Relaxed) as u16
    }

    pub fn advance(&self) -> u16 {
        (self.0.fetch_add(1, Relaxed) + 1) as u16
    }
}

/// The layout of an arena.
///
/// ```
/// use pagemill::arena::{Layout, nodes::Nodes};
/// use pagemill::{Pagemill, reclaim::tree::UNLIMITED};
///
/// let layout = Layout { nodes: Nodes::logical(2), use_huge: false, ..Layout::for_test() };
/// let pagemill = Pagemill::new(layout, UNLIMITED)?;
/// assert!(pagemill.arena.contains(pagemill.heap.base()));
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Address space for the small allocator's extents.
    pub small_bytes: usize,
    /// Address space for slots.
    pub heap_bytes: usize,
    /// Address space for the pages of caches.
    pub pool_bytes: usize,
    /// Unit of population where no huge page is used.
    pub page: PageSize,
    pub nodes: Nodes,
    /// Whether huge pages are used at all.
    pub use_huge: bool,
    /// Resident bytes from which a block may be huge before all of it is needed.
    pub huge_from_bytes: u64,
}

/// A huge page may waste at most this share (1/16) of what is resident.
pub const WASTE_DIVISOR: u64 = 16;

/// How far a new block will be used.
///
/// Example: [`Arena`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filling {
    /// Completely, soon: its size class has filled a block before.
    Soon,
    /// Unknown: the first block of a class, or an extent, because each kind of small object fills its own.
    Unknown,
    /// Not completely: its slots are larger than their contents.
    Never,
}

/// A block that may stay half empty is made huge only from this many times the resident bytes: there is one for each
/// class.
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

    /// A small layout for tests, with huge pages from the start.
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

/// A part of the reservation, carved from its start.
///
/// Example: [`Layout`].
pub struct Zone {
    base: usize,
    len_bytes: usize,
    /// Bytes carved so far. Guarded by `lock` for writing.
    next: AtomicUsize,
    lock: Lock,
}

impl Zone {
    #[inline]
    pub fn contains(&self, addr: usize) -> bool {
        addr.wrapping_sub(self.base) < self.len_bytes
    }

    #[inline]
    pub fn base(&self) -> usize {
        self.base
    }

    #[inline]
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Bytes carved so far, from the base on.
    #[inline]
    pub fn used_bytes(&self) -> usize {
        self.next.load(Relaxed)
    }
}

/// The address space, its block words, and the rules for backing blocks.
///
/// Example: [`Layout`].
pub struct Arena {
    pub small: Zone,
    pub heap: Zone,
    pub pool: Zone,
    words: Table<BlockWord>,
    maps: Table<extents::ExtentMaps>,
    pub generation: Generation,
    pub budget: &'static dyn Budget,
    pub nodes: Nodes,
    pub page: PageSize,
    use_huge: bool,
    huge_from_bytes: u64,
    is_metadata_huge: AtomicBool,
    /// Block that should be brought in ahead of need, plus one; 0 for none.
    pub(crate) prefault: AtomicUsize,
}

impl Arena {
    /// Reserves the address space and its metadata; no memory becomes resident.
    ///
    /// If the address space is limited, it reserves less: at least 256 MiB.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if not even that is available.
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
    #[inline]
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

    /// The number of the block that contains `addr`, counted from the arena's base.
    #[inline]
    pub fn block_of(&self, addr: usize) -> usize {
        (addr - self.small.base) / BLOCK_BYTES
    }

    #[inline]
    pub fn block_addr(&self, block: usize) -> usize {
        self.small.base + block * BLOCK_BYTES
    }

    #[inline]
    pub(crate) fn word(&self, block: usize) -> &BlockWord {
        self.words.get(block)
    }

    /// Bytes of address space for slots.
    pub fn heap_len_bytes(&self) -> usize {
        self.heap.len_bytes
    }

    /// The current state of a block.
    #[inline]
    pub fn peek(&self, block: usize) -> BlockState {
        self.word(block).peek(&self.generation)
    }

    /// Carves fresh blocks at the end of a zone: readable, writable, empty. Before the carved length becomes visible,
    /// calls `prepare` with the zone's old and new length in bytes.
    ///
    /// # Errors
    ///
    /// [`Error::NoAddresses`], or [`Error::System`] if the kernel refuses the memory.
    pub fn carve(
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

    /// As [`Arena::carve`], for blocks that stay closed until [`Arena::open_blocks`].
    ///
    /// # Errors
    ///
    /// As [`Arena::carve`].
    pub fn carve_closed(&self, zone: &Zone, blocks: usize, align_blocks: usize, node: usize) -> Result<usize> {
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
    /// [`Error::System`] if the kernel refuses the memory.
    ///
    /// # Safety
    ///
    /// The blocks belong to the caller, were carved closed, and hold nothing yet.
    pub unsafe fn open_blocks(&self, addr: usize, len_bytes: usize) -> Result<()> {
        backing::open(addr, len_bytes)
    }

    /// Address and length of the next blocks of a zone. The caller holds its lock.
    fn place_of(&self, zone: &Zone, blocks: usize, align_blocks: usize) -> Result<(usize, usize)> {
        let no_addresses = || Error::NoAddresses { wanted_bytes: (blocks as u64).saturating_mul(BLOCK_BYTES as u64) };
        let align_bytes = align_blocks.checked_mul(BLOCK_BYTES).ok_or_else(no_addresses)?;
        let len_bytes = blocks.checked_mul(BLOCK_BYTES).ok_or_else(no_addresses)?;
        let start = (zone.base + zone.used_bytes()).checked_next_multiple_of(align_bytes).ok_or_else(no_addresses)?;
        let end = start.checked_add(len_bytes).ok_or_else(no_addresses)?;
        if end > zone.base + zone.len_bytes { Err(no_addresses()) } else { Ok((start, len_bytes)) }
    }

    /// Opens the words and maps of the blocks that a zone is about to carve.
    fn open_metadata(&self, zone: &Zone, end: usize) -> Result<()> {
        let first = self.block_of(zone.base);
        let (next, end) = (first + zone.used_bytes() / BLOCK_BYTES, first + (end - zone.base) / BLOCK_BYTES);
        self.words.open(first, next, end)?;
        if first == 0 { self.maps.open(first, next, end) } else { Ok(()) }
    }

    /// Whether a block may be made huge before all of it is needed, without wasting a large share of the resident
    /// bytes.
    pub fn may_take_huge(&self, filling: Filling) -> bool {
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

    /// Resident bytes of the metadata, as reported by the kernel. Walks what is in use.
    pub fn metadata_bytes(&self) -> u64 {
        let small = self.small.used_bytes() / BLOCK_BYTES;
        let heap = self.heap.used_bytes() / BLOCK_BYTES;
        let pool = self.pool.used_bytes() / BLOCK_BYTES;
        self.words.resident_bytes(0, small)
            + self.words.resident_bytes(self.block_of(self.heap.base), heap)
            + self.words.resident_bytes(self.block_of(self.pool.base), pool)
            + self.maps.resident_bytes(0, small)
    }

    /// Incremented with each fork that leads to this process.
    #[inline]
    pub fn generation(&self) -> u16 {
        self.generation.get()
    }

    /// The preferred memory node of this thread.
    #[inline]
    pub fn current_node(&self) -> usize {
        self.nodes.current()
    }

    /// Called in a fork child: charges and locks of the parent become void.
    ///
    /// # Safety
    ///
    /// The process is a child with one thread, made since the last call, and holds no lock of this arena.
    pub unsafe fn forked(&self) -> u16 {
        self.generation.advance()
    }

    /// Whether this process is a fork child of one that had this arena.
    #[inline]
    pub fn is_forked(&self) -> bool {
        self.generation.get() != 0
    }

    /// Takes the locks for `fork`; [`Arena::release_after_fork`] releases them in both processes.
    pub fn acquire_for_fork(&self) {
        self.small.lock.acquire();
        self.heap.lock.acquire();
        self.pool.lock.acquire();
    }

    /// # Safety
    ///
    /// Follows one [`Arena::acquire_for_fork`] of the same thread.
    pub unsafe fn release_after_fork(&self) {
        self.pool.lock.release();
        self.heap.lock.release();
        self.small.lock.release();
    }

    #[inline]
    pub fn charged_bytes(pages: u32) -> u64 {
        u64::from(pages) * (BLOCK_BYTES / os_pages_per_block()) as u64
    }

    /// The gauge of the zone that contains a block.
    pub(crate) fn counter_of(&self, block: usize) -> Counter {
        match self.block_addr(block) {
            addr if self.small.contains(addr) => Counter::Small,
            addr if self.heap.contains(addr) => Counter::Heap,
            _ => Counter::Cache,
        }
    }

    /// Updates a zone's gauge after a change of a block's charge.
    #[inline]
    pub fn count(counter: Counter, pages_before: u32, pages_after: u32) {
        let (before, after) = (Self::charged_bytes(pages_before), Self::charged_bytes(pages_after));
        if after >= before {
            stats::add(counter, after - before);
        } else {
            stats::sub(counter, before - after);
        }
    }
}

/// Reserves all zones, smaller if address space is limited; returns base and lengths.
fn reserve(layout: &Layout) -> Result<(usize, [usize; 3])> {
    const LEAST_BYTES: usize = 256 << 20;
    let allowed = pagemill_sys::process::address_space_limit().unwrap_or(usize::MAX) / 2;
    let mut zones = [layout.small_bytes, layout.heap_bytes, layout.pool_bytes];
    if zones.iter().sum::<usize>() > allowed {
        // Then use equal parts: which zone the program needs more is unknown.
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

/// A random address below everything else that a position-independent program maps.
///
/// Then one comparison distinguishes the arena's addresses from those of libraries and stacks. If the place is taken
/// the kernel chooses another; only the error message for a foreign address becomes less precise.
fn address_hint(len_bytes: usize) -> usize {
    if cfg!(target_pointer_width = "64") && len_bytes >= 1 << 40 {
        let random = pagemill_sys::process::random_u64() as usize;
        (0x1000_0000_0000 + random % 0x2000_0000_0000) & !(BLOCK_BYTES - 1)
    } else {
        0
    }
}
