//! The arena: reserved address space in blocks of 2 MiB, each of which gets and returns its memory on its own.
//!
//! The reservation has three zones. The *small* zone has the extents of the small allocator (`extents`). The *heap*
//! zone has the slots, and the *pool* zone the pages of caches (`backing`). To *carve* blocks means to assign the next
//! unused addresses of a zone. The memory of a block can be returned later, its addresses cannot. A state word for each
//! block says how the block is backed (`block`).
//!
//! ```text
//!   base                  heap                      pool                 end
//!    | extents             | spans of slots          | windows of pages   |
//!    |#######......        |##############.......    |######......        |
//!            ^ next block                  ^ next block      ^ next block
//! ```
//!
//! The [`Budget`] admits every byte before it becomes resident. The exception is overcommitted memory, which the
//! program may touch without a charge, like memory from `mmap`. `Arena::reconcile` measures and charges its resident
//! part.
//!
//! Uses `units`, `sync`, `stats`, `trace`. Locks: a zone's lock, then a block's.
#![allow(unsafe_code)] // calls that only fork handlers may make, or only the owner of a block

pub mod backing;
pub mod block;
pub(crate) mod extents;
mod huge_use;
mod hugetlb;
mod metadata;
pub mod nodes;
mod shared;
mod software_pages;

pub use huge_use::HugeUse;
pub use hugetlb::Reserve;
pub use metadata::{Table, Zeroed, place};

use crate::error::{Error, Result};
use crate::stats::{self, Counter};
use crate::sync::Lock;
use crate::units::{BLOCK_BYTES, PageSize, os_pages_per_block};
use block::{BlockState, BlockWord};
use nodes::Nodes;
use pagemill_sys::mem;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicUsize, Ordering::Relaxed};

/// The locks that the caller of a request for memory holds.
///
/// Example: [`Budget`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Context {
    /// The caller holds no lock, so the request may purge, wait and call all shrinkers.
    Outside,
    /// The request comes from inside the small allocator, which holds its own locks.
    Nested,
}

/// Decides how much memory may become resident. The account in `reclaim` implements this.
///
/// ```
/// use pagemill_testbed::Testbed;
/// use pagemill_core::arena::{Budget, Context};
///
/// let account = Testbed::of_process()?.account;
/// account.admit(1 << 20, Context::Outside)?; // before a MiB becomes resident
/// account.discharge(1 << 20); // after it was returned
/// # Ok::<(), pagemill_core::Error>(())
/// ```
pub trait Budget: Sync {
    /// Charges `bytes` of memory before it becomes resident. If they do not fit below the memory limit, reclaims first.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`] if the bytes do not fit even after reclaim; nothing is charged then.
    fn admit(&self, bytes: u64, context: Context) -> Result<()>;

    /// As [`Budget::admit`], but never reclaims: returns false, and charges nothing, if less than twice the bytes fit
    /// below the limits of the process and its tree, or if the bytes do not fit before the margin of other limits.
    /// For memory that is made resident before it is needed. The default refuses all bytes.
    fn admit_without_reclaim(&self, _bytes: u64) -> bool {
        false
    }

    /// Ends the charge of bytes that were returned to the kernel.
    fn discharge(&self, bytes: u64);

    /// Overcommits `bytes`: the program may touch them without another charge.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`] if the resident bytes have reached the limit, even after reclaim.
    fn overcommit(&self, bytes: u64, context: Context) -> Result<()>;

    /// Reclaims until `bytes` more fit below the limit. The bytes were overcommitted earlier and are about to be
    /// touched. Charges nothing.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`] if the bytes do not fit even after reclaim.
    fn reserve(&self, bytes: u64) -> Result<()>;

    /// Updates the account after a measurement of overcommitted memory: adds `resident` to the charge, and subtracts
    /// `reconciled` from the bytes that count as untouched. Both may be negative.
    fn reconciled(&self, resident: i64, reconciled: i64);

    /// Returns the bytes that are resident now, and the bytes that may still become resident below the limit.
    fn room(&self) -> (u64, u64);
}

/// Number of forks between the process that created the arena and this process. Locks and charges of an older
/// generation belong to the parent.
///
/// Example: [`Arena`].
#[derive(Default)]
pub struct Generation(AtomicU32);

impl Generation {
    #[inline]
    pub fn get(&self) -> u16 {
        self.0.load(Relaxed) as u16
    }

    /// Increments the generation and returns it.
    pub(crate) fn advance(&self) -> u16 {
        (self.0.fetch_add(1, Relaxed) + 1) as u16
    }
}

/// Sizes and policies of an arena that are fixed when it is created.
///
/// ```
/// use pagemill_core::arena::{Layout, nodes::Nodes};
/// use pagemill_testbed::Testbed;
/// use pagemill_core::reclaim::tree::UNLIMITED;
///
/// let layout = Layout { nodes: Nodes::logical(2), use_huge: false, ..Layout::for_test() };
/// let pagemill = Testbed::new(layout, UNLIMITED)?;
/// assert!(pagemill.arena.contains(pagemill.heap.base()));
/// # Ok::<(), pagemill_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Bytes of address space for the small allocator's extents.
    pub small_bytes: usize,
    /// Bytes of address space for slots (allocations of 64 KiB and more).
    pub heap_bytes: usize,
    /// Bytes of address space for the pages of page caches and slab caches.
    pub pool_bytes: usize,
    /// The software page: the unit in which memory becomes resident where no huge page is used. For slots only if the
    /// kernel offers pages of such a size (mTHP).
    pub page: PageSize,
    /// The NUMA nodes to which blocks are assigned.
    pub nodes: Nodes,
    /// Whether huge pages are used at all.
    pub use_huge: bool,
    /// Once the process has this many resident bytes, a block may get a huge page before all of the block is needed.
    pub huge_from_bytes: u64,
}

/// The unused part of a huge page may be at most the process's resident bytes divided by this number.
pub const WASTE_DIVISOR: u64 = 16;

/// How much of a new block is expected to be used.
///
/// Example: [`Arena`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpectedUse {
    /// All of the block, soon: slots of the same size class have filled a block before.
    Full,
    /// Unknown: the block is the first of its size class, or belongs to an extent, which the small allocator may use
    /// only in part.
    Unknown,
    /// Only a part of the block, because slots in the block are larger than the requested sizes.
    Partial,
}

/// Factor on [`Layout::huge_from_bytes`] for blocks of [`ExpectedUse::Unknown`]. Each size class may leave one of these
/// blocks partly unused, so huge pages for them need a larger process.
const UNKNOWN_USE_FACTOR: u64 = 4;

impl Layout {
    /// The layout for a program: more address space than a machine has memory, as far as `RLIMIT_AS` allows.
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

/// One of the three parts of the arena's address space. The blocks of a zone are carved (assigned to a use) in the
/// order of their addresses.
///
/// Example: [`Layout`].
pub struct Zone {
    base: usize,
    len_bytes: usize,
    /// Bytes of the zone carved so far, from `base` on. Written under `lock`.
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

    /// Bytes of the zone that were carved so far, counted from its base.
    #[inline]
    pub fn carved_bytes(&self) -> usize {
        self.next.load(Relaxed)
    }

    /// Returns the address and the length in bytes of the next `blocks` unused blocks. The caller must hold the lock.
    fn next_addresses(&self, blocks: usize, align_blocks: usize) -> Result<(usize, usize)> {
        debug_assert!(self.lock.is_held());
        debug_assert!(self.carved_bytes() <= self.len_bytes);
        debug_assert!(self.carved_bytes().is_multiple_of(BLOCK_BYTES), "whole blocks are carved");
        let next = || {
            let align_bytes = align_blocks.checked_mul(BLOCK_BYTES)?;
            let len_bytes = blocks.checked_mul(BLOCK_BYTES)?;
            let start = (self.base + self.carved_bytes()).checked_next_multiple_of(align_bytes)?;
            (start.checked_add(len_bytes)? <= self.base + self.len_bytes).then_some((start, len_bytes))
        };
        next().ok_or(Error::NoAddresses { wanted_bytes: (blocks as u64).saturating_mul(BLOCK_BYTES as u64) })
    }
}

/// The reserved address space, the state words of its blocks, and the policy for backing them.
///
/// Example: [`Layout`].
pub struct Arena {
    pub small: Zone,
    pub heap: Zone,
    pub pool: Zone,
    /// The state words of all blocks, by block index.
    words: Table<BlockWord>,
    /// The maps of committed and stale pages of the small zone's blocks.
    maps: Table<extents::ExtentMaps>,
    pub(crate) generation: Generation,
    pub budget: &'static dyn Budget,
    pub nodes: Nodes,
    pub page: PageSize,
    /// Whether a page fault can provide several OS pages of a software page (`software_pages`).
    has_advised_pages: bool,
    /// Whether the arena was created with huge pages ([`Layout::use_huge`]).
    use_huge: bool,
    /// The number of a [`HugeUse`].
    huge_use: AtomicU8,
    huge_from_bytes: u64,
    /// Whether huge pages are allowed for `words` and `maps`.
    is_metadata_huge: AtomicBool,
    /// Index plus one of the block that the helper thread will make resident before an allocation needs it; 0 for none.
    pub(crate) prefault: AtomicUsize,
}

impl Arena {
    /// Reserves the address space and its metadata; no memory becomes resident.
    ///
    /// If `RLIMIT_AS` limits the address space, the zones are smaller.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if less than 256 MiB of address space are available.
    pub fn new(layout: Layout, budget: &'static dyn Budget) -> Result<Self> {
        let (base, [small_bytes, heap_bytes, pool_bytes]) = reserve_zones(&layout)?;
        assert!(base.is_multiple_of(BLOCK_BYTES));
        assert!((small_bytes | heap_bytes | pool_bytes).is_multiple_of(BLOCK_BYTES), "zones consist of blocks");
        let total_bytes = small_bytes + heap_bytes + pool_bytes;
        let blocks = total_bytes / BLOCK_BYTES;
        if !layout.use_huge {
            // Otherwise the kernel makes huge pages on its own if its setting is `always`.
            mem::forbid_huge(base, total_bytes);
        }
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
            has_advised_pages: software_pages::can_be_advised(layout.page),
            use_huge: layout.use_huge,
            huge_use: AtomicU8::new(HugeUse::Auto as u8),
            huge_from_bytes: layout.huge_from_bytes,
            is_metadata_huge: AtomicBool::new(false),
            prefault: AtomicUsize::new(0),
        })
    }

    /// Returns the first address of the arena.
    pub fn base(&self) -> usize {
        self.small.base
    }

    /// Returns the range of the arena's addresses.
    #[inline]
    pub fn addresses(&self) -> std::ops::Range<usize> {
        self.small.base..self.pool.base + self.pool.len_bytes
    }

    /// Whether the address lies in this arena.
    #[inline]
    pub fn contains(&self, addr: usize) -> bool {
        self.addresses().contains(&addr)
    }

    /// Returns the zones in the order of their addresses, which is also the order of their locks.
    fn zones(&self) -> [&Zone; 3] {
        [&self.small, &self.heap, &self.pool]
    }

    /// Returns the index of the block that contains `addr`, counted from the arena's base.
    #[inline]
    pub fn block_of(&self, addr: usize) -> usize {
        debug_assert!(addr >= self.small.base && addr <= self.addresses().end, "the address is in the arena");
        (addr - self.small.base) / BLOCK_BYTES
    }

    #[inline]
    pub fn block_addr(&self, block: usize) -> usize {
        debug_assert!(block * BLOCK_BYTES <= self.addresses().len(), "the block is in the arena");
        self.small.base + block * BLOCK_BYTES
    }

    #[inline]
    pub(crate) fn state_word(&self, block: usize) -> &BlockWord {
        self.words.get(block)
    }

    /// Returns the current state of a block. Other threads may change the state at any time.
    #[inline]
    pub fn block_state(&self, block: usize) -> BlockState {
        self.state_word(block).state(&self.generation)
    }

    /// Carves the next blocks of a zone and returns their address. The blocks are readable and writable and have no
    /// memory.
    ///
    /// Calls `prepare` with the number of carved bytes of the zone before and after this call. Other threads cannot see
    /// the new blocks until `prepare` has returned.
    ///
    /// # Errors
    ///
    /// [`Error::NoAddresses`] if the zone is full; [`Error::System`] if the kernel refuses the memory.
    ///
    /// # Safety
    ///
    /// The zone belongs to the caller. The caller's tables must cover all blocks that are carved in the zone.
    pub unsafe fn carve(
        &self,
        zone: &Zone,
        blocks: usize,
        align_blocks: usize,
        node: usize,
        prepare: impl FnOnce(usize, usize) -> Result<()>,
    ) -> Result<usize> {
        self.carve_with(zone, blocks, align_blocks, node, |start, len_bytes| {
            prepare(zone.carved_bytes(), start + len_bytes - zone.base)?;
            backing::make_accessible(start, len_bytes)
        })
    }

    /// As [`Arena::carve`], but the blocks stay inaccessible until [`Arena::open_blocks`].
    ///
    /// # Errors
    ///
    /// As [`Arena::carve`].
    ///
    /// # Safety
    ///
    /// As [`Arena::carve`].
    pub unsafe fn carve_closed(&self, zone: &Zone, blocks: usize, align_blocks: usize, node: usize) -> Result<usize> {
        self.carve_with(zone, blocks, align_blocks, node, |_, _| Ok(()))
    }

    /// Carves the next unused blocks of a zone, after `prepare` was called with their address and length in bytes.
    fn carve_with(
        &self,
        zone: &Zone,
        blocks: usize,
        align_blocks: usize,
        node: usize,
        prepare: impl FnOnce(usize, usize) -> Result<()>,
    ) -> Result<usize> {
        let _guard = zone.lock.lock();
        let (start, len_bytes) = zone.next_addresses(blocks, align_blocks)?;
        debug_assert!(node < self.nodes.count());
        self.open_metadata(zone, start + len_bytes)?;
        prepare(start, len_bytes)?;
        self.nodes.bind(start, len_bytes, node);
        let carved_bytes = start + len_bytes - zone.base;
        debug_assert!(carved_bytes >= zone.carved_bytes(), "carved addresses are never assigned again");
        zone.next.store(carved_bytes, Relaxed);
        Ok(start)
    }

    /// Makes blocks that [`Arena::carve_closed`] has carved readable and writable.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if the kernel refuses the memory.
    ///
    /// # Safety
    ///
    /// The blocks belong to the caller, were carved by [`Arena::carve_closed`], and contain no data yet.
    pub unsafe fn open_blocks(&self, addr: usize, len_bytes: usize) -> Result<()> {
        debug_assert!((addr | len_bytes).is_multiple_of(BLOCK_BYTES), "whole blocks are opened");
        debug_assert!(self.contains(addr), "the blocks are in the arena");
        backing::make_accessible(addr, len_bytes)
    }

    /// Makes the metadata (state words and extent maps) of the unused blocks of a zone below the address `end`
    /// accessible.
    fn open_metadata(&self, zone: &Zone, end: usize) -> Result<()> {
        let first = self.block_of(zone.base);
        debug_assert!(end <= zone.base + zone.len_bytes, "the range is in the zone");
        let (next, end) = (first + zone.carved_bytes() / BLOCK_BYTES, first + (end - zone.base) / BLOCK_BYTES);
        self.words.open(first, next, end)?;
        if first == 0 { self.maps.open(first, next, end) } else { Ok(()) }
    }

    /// Returns whether a block may get a huge page before all of the block is needed. True if the part that is expected
    /// to stay unused is small compared to the resident bytes.
    pub fn may_take_huge(&self, expected_use: ExpectedUse) -> bool {
        if !self.use_huge || self.huge_use() != HugeUse::Auto {
            return self.use_huge && self.huge_use() == HugeUse::Always;
        }
        let resident = self.budget.room().0;
        let is_worth_it = resident >= self.huge_from_bytes;
        if is_worth_it && !self.is_metadata_huge.load(Relaxed) && resident >= 4 * self.huge_from_bytes {
            self.is_metadata_huge.store(true, Relaxed);
            self.words.allow_huge();
            self.maps.allow_huge();
        }
        let is_filled = match expected_use {
            ExpectedUse::Full => true,
            ExpectedUse::Unknown => resident >= UNKNOWN_USE_FACTOR * self.huge_from_bytes,
            ExpectedUse::Partial => self.huge_from_bytes == 0,
        };
        is_worth_it && is_filled
    }

    /// Returns the resident bytes of the arena's metadata. Queries the kernel about all metadata in use.
    pub fn metadata_bytes(&self) -> u64 {
        let carved_blocks = |zone: &Zone| zone.carved_bytes() / BLOCK_BYTES;
        let words = |zone: &Zone| self.words.resident_bytes(self.block_of(zone.base), carved_blocks(zone));
        self.zones().into_iter().map(words).sum::<u64>() + self.maps.resident_bytes(0, carved_blocks(&self.small))
    }

    /// Returns the generation of this process: the number of forks between the process that created the arena and this
    /// process.
    #[inline]
    pub fn generation(&self) -> u16 {
        self.generation.get()
    }

    /// Returns the NUMA node on which this thread's new memory should lie.
    #[inline]
    pub fn current_node(&self) -> usize {
        self.nodes.current()
    }

    /// Advances the generation in a fork child. Locks and charges of the parent become void.
    ///
    /// # Safety
    ///
    /// The process is a fork child with one thread, which calls this once after the fork and holds no lock of this
    /// arena.
    pub unsafe fn forked(&self) -> u16 {
        self.generation.advance()
    }

    /// Returns whether this process is a fork child of a process that had this arena.
    #[inline]
    pub fn is_forked(&self) -> bool {
        self.generation.get() != 0
    }

    /// Acquires the zones' locks before `fork`. [`Arena::release_after_fork`] releases them in both processes.
    pub fn acquire_for_fork(&self) {
        self.zones().iter().for_each(|zone| zone.lock.acquire());
    }

    /// Releases the zones' locks after `fork`, in the parent and in the child.
    ///
    /// # Safety
    ///
    /// The same thread has called [`Arena::acquire_for_fork`] before, once for each call of this function.
    pub unsafe fn release_after_fork(&self) {
        self.zones().iter().rev().for_each(|zone| zone.lock.release());
    }

    /// Converts a number of charged OS pages to bytes.
    #[inline]
    pub fn charged_bytes(pages: u32) -> u64 {
        u64::from(pages) * (BLOCK_BYTES / os_pages_per_block()) as u64
    }

    /// Returns the gauge that counts the charged bytes of the zone to which a block belongs.
    pub(crate) fn gauge_of_block(&self, block: usize) -> Counter {
        match self.block_addr(block) {
            addr if self.small.contains(addr) => Counter::Small,
            addr if self.heap.contains(addr) => Counter::Heap,
            _ => Counter::Cache,
        }
    }

    /// Updates the gauge of a zone after the number of charged OS pages of a block has changed.
    pub(crate) fn update_gauge(counter: Counter, pages_before: u32, pages_after: u32) {
        let (before, after) = (Self::charged_bytes(pages_before), Self::charged_bytes(pages_after));
        if after >= before {
            stats::add(counter, after - before);
        } else {
            stats::sub(counter, before - after);
        }
    }
}

/// Reserves address space for all zones. The zones are smaller if address space is limited. Returns the base and the
/// lengths of the zones.
fn reserve_zones(layout: &Layout) -> Result<(usize, [usize; 3])> {
    /// Minimum total length of the zones.
    const MIN_RESERVATION_BYTES: usize = 256 << 20;
    let allowed = pagemill_sys::process::address_space_limit().unwrap_or(usize::MAX) / 2;
    let mut zones = [layout.small_bytes, layout.heap_bytes, layout.pool_bytes];
    if zones.iter().sum::<usize>() > allowed {
        // Divide the address space equally, because the zone that the program will need most is unknown.
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
            Err(cause) if total / 2 < MIN_RESERVATION_BYTES => {
                return Err(Error::System { doing: "reserving address space", cause });
            }
            Err(_) => zones = zones.map(|bytes| (bytes / 2).next_multiple_of(BLOCK_BYTES)),
        }
    }
}

/// Returns a random base for the arena, below all libraries and stacks of a position-independent program. Returns 0 (no
/// hint) for a small arena.
///
/// With this base, one comparison distinguishes addresses of the arena from addresses of libraries and stacks. If the
/// address is in use, the kernel chooses another base. Then only the message about an invalid address is less precise.
fn address_hint(len_bytes: usize) -> usize {
    if cfg!(target_pointer_width = "64") && len_bytes >= 1 << 40 {
        let random = pagemill_sys::process::random_u64() as usize;
        (0x1000_0000_0000 + random % 0x2000_0000_0000) & !(BLOCK_BYTES - 1)
    } else {
        0
    }
}
