//! The heap: allocations of 64 KiB and more. Each is a slot of one of the size classes (`class`).
//!
//! A free slot keeps its memory, so the next allocation of its class costs two compare-and-swaps and no page fault.
//! When memory is needed elsewhere, a purge returns the memory of free slots (`purge`).
//!
//! A *span* is a run of blocks with slots of one class. A *big* slot is a whole span; smaller slots share blocks.
//!
//! The free lists are sharded by CPU. So threads seldom contend, and a CPU usually allocates a slot whose memory is
//! still in its cache. There is no per-thread state, hence nothing to do at thread exit. Each NUMA node (*node* in this
//! crate) has its own shards, and a freed slot returns to a shard of its node.
//!
//! Uses `arena`. Locks: `carving`, `purging`. An allocation that finds a free slot acquires neither lock.
#![allow(unsafe_code)] // zeroes and copies slots, returns their memory

pub(crate) mod class;
mod inherited;
mod offer;
mod purge;
mod recycle;
mod resize;
pub(crate) mod slot;

pub use class::MIN_BYTES;

use class::{Class, GRANULE_BYTES, STEP_BYTES};
use pagemill_core::arena::block::Backing;
use pagemill_core::arena::{Arena, Context, ExpectedUse, Table, WASTE_DIVISOR, Zeroed};
use pagemill_core::error::{Error, Result};
use pagemill_core::reclaim::Account;
use pagemill_core::reclaim::helper::Helper;
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{self, AtomicU32, AtomicU64, Lock, Padded};
use pagemill_core::units::BLOCK_BYTES;
use pagemill_sys::{clock, numa, process};
use slot::{FreeList, Slot, SlotBytes, SlotClaim, SlotInfo, SlotPhase, Slots};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering::Relaxed};

/// Maximum number of shards (sets of free lists) for each NUMA node.
const MAX_SHARDS: usize = 16;

/// If the request leaves more than 1/10 of a slot unused, the slot's blocks get no huge pages, because huge pages would
/// make the unused part resident.
const MAX_UNUSED_DIVISOR: usize = 10;

/// Number of words in `Heap::carve_cursors` for each NUMA node and size class.
const CURSOR_WORDS: usize = 3;

/// Maximum number of claimed slots that an allocation skips in a free list. At the next claimed slot, the allocation
/// waits until the purge ends its claim.
const MAX_SKIPPED_SLOTS: usize = 8;

/// A `free` publishes the account's statistics if it raises the free bytes of a shard past a multiple of this number.
const PUBLISH_STEP_BYTES: i64 = 8 << 20;

/// From this size, calloc of a slot that was used before discards its pages instead of zeroing them. The kernel's new
/// pages are zero, and resident only where they are touched.
const CALLOC_DISCARD_FROM_BYTES: usize = 32 << 20;

/// The result of an allocation.
///
/// Example: [`Heap`].
#[derive(Clone, Copy, Debug)]
pub struct Allocation {
    pub addr: NonNull<u8>,
    /// Whether all bytes are known to be zero.
    pub is_zero: bool,
    /// Whether the slot was offered to the kernel while it was free. The kernel may still take a page of it until the
    /// program writes to that page.
    pub(crate) was_offered: bool,
}

/// The contents that the caller requires of an allocation.
#[derive(Clone, Copy, PartialEq, Eq)]
enum InitialContents {
    Any,
    Zero,
}

/// A slot with its number, its address, its size class and its NUMA node.
#[derive(Clone, Copy, Debug)]
struct LocatedSlot {
    /// Number of the granule of the heap zone in which the slot starts.
    number: u32,
    addr: usize,
    class: Class,
    node: usize,
}

/// The heap of one instance.
///
/// # Invariants
///
/// The bytes of a slot belong exclusively to the thread that changed the slot's state word to *Live*, until the slot is
/// freed, or to *Purging*, until the claim ends. All slots lie in the heap zone, and no two overlap.
///
/// ```
/// let heap = pagemill_testbed::Testbed::of_process()?.heap;
/// let block = heap.allocate(3 << 20, 4096)?;
/// let addr = block.addr.as_ptr() as usize;
/// assert!(addr % 4096 == 0 && heap.usable_bytes(addr)? >= 3 << 20);
/// // SAFETY: the block is not used any more. Its slot keeps its memory until reclaim needs it.
/// unsafe { heap.free(addr)? };
/// # Ok::<(), pagemill_core::Error>(())
/// ```
pub struct Heap {
    arena: &'static Arena,
    account: &'static Account,
    helper: &'static Helper,
    slots: Table<Slot>,
    /// The head words of the free lists, by NUMA node, shard and size class.
    free_list_heads: Table<AtomicU64>,
    /// For each NUMA node and size class: the next address to carve, the end of the current span, and the number of
    /// slots carved so far. Written under `carving`.
    carve_cursors: Table<AtomicU64>,
    /// For each block of the heap zone: the index of the size class plus one if a span starts there, else 0.
    spans: Table<AtomicU32>,
    /// Lock that is held while addresses are carved.
    carving: Lock,
    /// Lock that is held by purges and offers of free memory, and by searches for donors (free slots that can lose
    /// pages).
    purging: Lock,
    /// Resident bytes of free slots. Each shard counts the changes made on its CPUs, so only the sum is meaningful.
    free_bytes: [Padded<AtomicI64>; MAX_SHARDS],
    shards_per_node: usize,
    /// Whether the kernel can move pages between slots; cleared after the kernel has refused.
    can_move_pages: AtomicBool,
    /// Block of the heap zone at which the last search for donors stopped (`recycle`).
    donor_search_block: AtomicUsize,
    /// Earliest time, in nanoseconds, of the next search for donors, after a search that found none.
    next_donor_search_ns: AtomicU64,
    offers: offer::OfferSchedule,
}

// SAFETY: the type consists of atomic words; zero bits are a slot that was never allocated.
unsafe impl Zeroed for Slot {}

impl Slots for Heap {
    #[inline]
    fn slot(&self, number: u32) -> &Slot {
        self.slots.get(number as usize)
    }
}

/// The age of free slots is measured in ticks of 2^26 nanoseconds: 67 ms.
const TICK_SHIFT: u32 = 26;

/// Returns the error for a call that needs a live slot, and finds the slot in another phase.
#[cold]
fn not_live(place: LocatedSlot, phase: SlotPhase) -> Error {
    debug_assert!(phase != SlotPhase::Live);
    match phase {
        SlotPhase::None => Error::NotAllocated { addr: place.addr },
        _ => Error::FreedBefore { addr: place.addr, len_bytes: place.class.bytes() },
    }
}

/// Returns the current time in ticks, which a slot stores when it is freed. The value wraps after 73 minutes.
fn current_stamp() -> u16 {
    (clock::coarse_ns() >> TICK_SHIFT) as u16
}

impl Heap {
    /// Creates the heap in the arena's heap zone.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if the heap's metadata cannot be mapped.
    ///
    /// # Safety
    ///
    /// The arena has no other heap, since a heap's tables cover what that heap carves.
    pub unsafe fn new(arena: &'static Arena, account: &'static Account, helper: &'static Helper) -> Result<Self> {
        let zone_bytes = arena.heap.len_bytes();
        let shards_per_node = process::cpu_count().next_power_of_two().min(MAX_SHARDS);
        let nodes = arena.nodes.count();
        assert!(nodes <= 1 << 8, "a slot stores its node in 8 bits");
        assert!(zone_bytes / GRANULE_BYTES < u32::MAX as usize, "a free list stores numbers of slots in 32 bits");
        assert!(shards_per_node.is_power_of_two());
        Ok(Self {
            arena,
            account,
            helper,
            slots: Table::new(zone_bytes / GRANULE_BYTES)?,
            free_list_heads: Table::new_open(nodes * shards_per_node * class::CLASS_COUNT)?,
            carve_cursors: Table::new_open(nodes * class::CLASS_COUNT * CURSOR_WORDS)?,
            spans: Table::new(zone_bytes / BLOCK_BYTES)?,
            carving: Lock::new(),
            purging: Lock::new(),
            free_bytes: Default::default(),
            shards_per_node,
            can_move_pages: AtomicBool::new(true),
            donor_search_block: AtomicUsize::new(0),
            next_donor_search_ns: AtomicU64::new(0),
            offers: offer::OfferSchedule::default(),
        })
    }

    /// Notifies the account that another shrinker, in a crate that uses the heap, may have giveable memory from now on.
    pub fn note_more(&self) {
        self.account.note_more();
    }

    /// Returns whether the address lies in the heap zone.
    #[inline]
    pub fn contains(&self, addr: usize) -> bool {
        self.arena.heap.contains(addr)
    }

    /// Returns the first address of the heap zone.
    pub fn base(&self) -> usize {
        self.arena.heap.base()
    }

    /// Returns the shard of the CPU on which this thread runs.
    #[inline]
    fn current_shard(&self) -> usize {
        numa::cpu() & (self.shards_per_node - 1)
    }

    /// Returns the free list of a NUMA node, a shard and a size class.
    #[inline]
    fn free_list(&self, node: usize, shard: usize, class: Class) -> FreeList<'_> {
        debug_assert!(node < self.arena.nodes.count() && shard < self.shards_per_node);
        FreeList(self.free_list_heads.get((node * self.shards_per_node + shard) * class::CLASS_COUNT + class.index()))
    }

    /// Allocates at least `size` bytes at a multiple of `align`. The contents are undefined unless `is_zero` is set.
    ///
    /// Cost: two compare-and-swaps if a free slot with memory exists. Otherwise one huge page fault per 2 MiB, which
    /// happens here for smaller slots and at the first touch for slots of 2 MiB and more.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`] if the limit has been reached, [`Error::NoAddresses`] if the heap zone is full,
    /// [`Error::BadAlignment`] if `align` is not a power of two.
    pub fn allocate(&self, size: usize, align: usize) -> Result<Allocation> {
        self.allocate_with(size, align, InitialContents::Any)
    }

    /// Allocates a slot. `wanted` says whether its memory may be pages moved from free slots, which are not zero.
    fn allocate_with(&self, size: usize, align: usize, wanted: InitialContents) -> Result<Allocation> {
        if !align.is_power_of_two() {
            return Err(Error::BadAlignment { align_bytes: align });
        }
        let class = Class::with_align(size, align).ok_or(Error::NoAddresses { wanted_bytes: size as u64 })?;
        let node = self.arena.nodes.current();
        let (place, bytes) = match self.pop_free_slot(node, class) {
            Some(found) => found,
            None => match self.carve(node, class, size) {
                Err(Error::NoAddresses { wanted_bytes }) => {
                    self.pop_larger_slot(node, class, align).ok_or(Error::NoAddresses { wanted_bytes })?
                }
                carved => carved?,
            },
        };
        debug_assert!(place.class.bytes() >= size, "the slot is large enough");
        debug_assert!(place.addr.is_multiple_of(align), "the slot is aligned");
        let bytes = if self.arena.is_forked() { self.discard_inherited(place, bytes) } else { bytes };
        let is_recycled = self.back_slot(place, bytes, size, wanted)?;
        let addr = NonNull::new(place.addr as *mut u8).ok_or(Error::NoAddresses { wanted_bytes: size as u64 })?;
        Ok(Allocation { addr, is_zero: bytes.is_zero && !is_recycled, was_offered: bytes.is_offered })
    }

    /// As [`Heap::allocate`], but all `size` bytes are zero.
    ///
    /// # Errors
    ///
    /// As [`Heap::allocate`].
    pub fn allocate_zeroed(&self, size: usize, align: usize) -> Result<NonNull<u8>> {
        let allocation = self.allocate_with(size, align, InitialContents::Zero)?;
        if allocation.is_zero || (size >= CALLOC_DISCARD_FROM_BYTES && self.discard_contents(allocation, size)) {
            stats::add(Counter::CallocSkipped, size as u64);
        } else {
            // SAFETY: this call allocated the slot, which has at least `size` bytes.
            unsafe { std::ptr::write_bytes(allocation.addr.as_ptr(), 0, size) };
        }
        Ok(allocation.addr)
    }

    /// Discards the contents of an allocation of whole blocks that the caller has just made. Returns whether all of its
    /// bytes are zero now.
    fn discard_contents(&self, allocation: Allocation, size: usize) -> bool {
        let addr = allocation.addr.as_ptr() as usize;
        debug_assert!(addr.is_multiple_of(BLOCK_BYTES));
        // SAFETY: the caller allocated the slot, which consists of whole blocks.
        unsafe { self.arena.discard_and_reopen(self.arena.block_of(addr), size.div_ceil(BLOCK_BYTES)) }.is_some()
    }

    /// Allocates whole blocks whose contents do not change, even where the program has not written. A slot that was
    /// offered to the kernel gets new memory, because the kernel may still take unwritten pages.
    ///
    /// # Errors
    ///
    /// As [`Heap::allocate`].
    pub fn allocate_stable_blocks(&self, size: usize) -> Result<NonNull<u8>> {
        let size = size.max(BLOCK_BYTES);
        let allocation = self.allocate_with(size, BLOCK_BYTES, InitialContents::Any)?;
        if allocation.was_offered {
            self.discard_contents(allocation, size);
        }
        Ok(allocation.addr)
    }

    /// Allocates a block backed by small pages, so that parts of it can be returned. Its bytes are zero, unless the
    /// program has locked its memory (`mlockall`): then the bytes are undefined.
    ///
    /// # Errors
    ///
    /// As [`Heap::allocate`].
    pub fn allocate_small_page_block(&self) -> Result<NonNull<u8>> {
        let addr = self.allocate_with(BLOCK_BYTES, BLOCK_BYTES, InitialContents::Zero)?.addr;
        // SAFETY: this call allocated the slot, which is one block.
        unsafe { self.arena.reopen_with_small_pages(self.arena.block_of(addr.as_ptr() as usize)) };
        Ok(addr)
    }

    /// Allocates a free slot of the size class `class`: from the shard of this CPU, else from other shards of the NUMA
    /// node, else from other nodes.
    fn pop_free_slot(&self, node: usize, class: Class) -> Option<(LocatedSlot, SlotBytes)> {
        let own = self.current_shard();
        let pop_from_node = |node| {
            let mut shards = (0..self.shards_per_node).map(|distance| (own + distance) & (self.shards_per_node - 1));
            shards.find_map(|shard| self.pop_from_list(node, shard, own, class))
        };
        pop_from_node(node)
            .or_else(|| (0..self.arena.nodes.count()).filter(|other| *other != node).find_map(pop_from_node))
    }

    /// Allocates a free slot of a larger class, after the addresses of the zone have run out.
    #[cold]
    fn pop_larger_slot(&self, node: usize, class: Class, align: usize) -> Option<(LocatedSlot, SlotBytes)> {
        let larger = (class.index() + 1..class::CLASS_COUNT).filter_map(Class::from_index);
        larger.filter(|class| class.align() >= align).find_map(|class| self.pop_free_slot(node, class))
    }

    /// Allocates a slot from one free list. Skips slots that a purge has claimed.
    fn pop_from_list(&self, node: usize, shard: usize, own: usize, class: Class) -> Option<(LocatedSlot, SlotBytes)> {
        let head = self.free_list(node, shard, class);
        if head.is_empty() {
            return None;
        }
        let mut skipped = [0u32; MAX_SKIPPED_SLOTS];
        let mut skipped_count = 0;
        let mut found = None;
        while found.is_none() {
            let Some(number) = head.pop(self) else { break };
            match self.slot(number).try_allocate() {
                Some(bytes) => found = Some((number, bytes)),
                None if skipped_count < MAX_SKIPPED_SLOTS => {
                    skipped[skipped_count] = number;
                    skipped_count += 1;
                }
                None => {
                    // A purge claims the slots of a shared block for some hundred microseconds at most.
                    sync::pause();
                    head.push(self, number);
                }
            }
        }
        skipped[..skipped_count].iter().rev().for_each(|number| head.push(self, *number));
        let (number, bytes) = found?;
        debug_assert!(self.slot(number).info().is_some(), "only carved slots are in a free list");
        let place = self.locate(number)?;
        debug_assert!(place.class == class && place.node == node, "the slot was in the list of its class and node");
        self.add_free_bytes(own, -(bytes.counted_bytes() as i64));
        Some((place, bytes))
    }

    /// Returns `bytes` with the field `counted` set to the resident bytes of the slot.
    fn with_resident_count(&self, place: LocatedSlot, bytes: SlotBytes) -> SlotBytes {
        let charged = |block| Arena::charged_bytes(self.arena.block_state(block).charged_pages);
        let bytes = bytes.with_count(match place.class.is_big() {
            true => self.blocks_of(place).map(charged).sum(),
            false if bytes.is_resident => place.class.bytes() as u64,
            false => 0,
        });
        debug_assert!(bytes.counted_bytes() <= place.class.stride() as u64, "a slot counts no bytes of other slots");
        bytes
    }

    /// Ends a purge's claim on a slot and stores the new attributes of its bytes.
    fn restore(&self, place: LocatedSlot, claim: SlotClaim, bytes: SlotBytes) {
        let bytes = self.with_resident_count(place, bytes);
        if claim.phase() == SlotPhase::Free {
            self.add_free_bytes(0, bytes.counted_bytes() as i64 - claim.bytes().counted_bytes() as i64);
        }
        self.slot(place.number).restore(claim, bytes);
    }

    /// Adds `bytes`, which may be negative, to the count of resident bytes of free slots.
    fn add_free_bytes(&self, shard: usize, bytes: i64) {
        if bytes != 0 {
            self.free_bytes[shard % MAX_SHARDS].0.fetch_add(bytes, Relaxed);
        }
    }

    /// Returns the resident bytes of free slots, which a reclaim request could return at once.
    pub fn free_bytes(&self) -> u64 {
        self.free_bytes.iter().map(|shard| shard.0.load(Relaxed)).sum::<i64>().max(0) as u64
    }

    /// Carves a new slot of a size class, and allocates the slot for `size` bytes.
    fn carve(&self, node: usize, class: Class, size: usize) -> Result<(LocatedSlot, SlotBytes)> {
        let (addr, span_end) = self.carve_address(node, class)?;
        let distance = addr - self.base();
        let (number, offset) = ((distance / GRANULE_BYTES) as u32, (distance % GRANULE_BYTES / STEP_BYTES) as u8);
        let slot = self.slot(number);
        debug_assert!(distance.is_multiple_of(STEP_BYTES), "slots start at whole steps");
        debug_assert!(slot.info().is_none(), "at most one slot starts in a granule");
        debug_assert!(matches!(slot.phase(), SlotPhase::None | SlotPhase::Purging), "the slot was never allocated");
        slot.set_info(SlotInfo { class: class.index() as u8, node: node as u8, offset });
        let bytes = loop {
            match slot.try_carve() {
                Some(bytes) => break bytes,
                None => sync::pause(), // a purge of the block has claimed the slot for a short time
            }
        };
        stats::add(Counter::SlotsFresh, 1);
        let place = LocatedSlot { number, addr, class, node };
        if class.is_big() {
            self.allow_huge(place, size);
        } else {
            self.request_next_block(place, size, span_end);
        }
        Ok((place, bytes))
    }

    /// Carves the address of the next slot, from a new span if the current one is used up. Returns the address and the
    /// end of the span.
    fn carve_address(&self, node: usize, class: Class) -> Result<(usize, usize)> {
        let [next, end, carved] = self.carve_cursor(node, class);
        let _guard = self.carving.lock();
        if next.load(Relaxed) >= end.load(Relaxed) {
            let open_metadata = |used: usize, end: usize| {
                self.slots.open(0, used / GRANULE_BYTES, end / GRANULE_BYTES)?;
                self.spans.open(0, used / BLOCK_BYTES, end / BLOCK_BYTES)
            };
            let (blocks, align_blocks) = (class.span_blocks(), class.span_align_blocks());
            // SAFETY: this is the only heap of the arena (`Heap::new`), and `open_metadata` opens its tables.
            let start = unsafe { self.arena.carve(&self.arena.heap, blocks, align_blocks, node, open_metadata) }?;
            let span_block = (start - self.base()) / BLOCK_BYTES;
            debug_assert!(start.is_multiple_of(class.align()), "spans are aligned for their slots");
            debug_assert!(self.spans.get(span_block).load(Relaxed) == 0, "no other span starts here");
            self.spans.get(span_block).store(class.index() as u32 + 1, Relaxed);
            next.store(start as u64, Relaxed);
            end.store((start + blocks * BLOCK_BYTES) as u64, Relaxed);
        }
        debug_assert!(next.load(Relaxed) + class.stride() as u64 <= end.load(Relaxed), "the slot fits into its span");
        carved.fetch_add(1, Relaxed);
        Ok((next.fetch_add(class.stride() as u64, Relaxed) as usize, end.load(Relaxed) as usize))
    }

    /// Returns the words of `carve_cursors` for a NUMA node and a size class.
    fn carve_cursor(&self, node: usize, class: Class) -> &[AtomicU64; CURSOR_WORDS] {
        debug_assert!(node < self.arena.nodes.count());
        self.carve_cursors.row((node * class::CLASS_COUNT + class.index()) * CURSOR_WORDS)
    }

    /// Returns how much of a new block is expected to be used for slots of this slot's class. `Full` if slots of the
    /// class have filled a block before and the request uses most of a slot.
    fn expected_use(&self, place: LocatedSlot, size: usize) -> ExpectedUse {
        if (place.class.bytes() - size.min(place.class.bytes())) * MAX_UNUSED_DIVISOR > place.class.bytes() {
            return ExpectedUse::Partial;
        }
        let [_, _, carved] = self.carve_cursor(place.node, place.class);
        let is_full = carved.load(Relaxed) as usize * place.class.bytes() > BLOCK_BYTES;
        if is_full { ExpectedUse::Full } else { ExpectedUse::Unknown }
    }

    /// Allows huge pages for a new big slot. The last block may be huge only if little of it is unused. Blocks without
    /// huge pages get software pages.
    fn allow_huge(&self, place: LocatedSlot, size: usize) {
        let whole = size & !(BLOCK_BYTES - 1);
        let waste = (BLOCK_BYTES - size % BLOCK_BYTES) % BLOCK_BYTES;
        let len_bytes = if waste * WASTE_DIVISOR as usize <= size { size.next_multiple_of(BLOCK_BYTES) } else { whole };
        let is_huge = self.arena.may_take_huge(ExpectedUse::Full) || size >= 8 * BLOCK_BYTES;
        let huge_bytes = if self.arena.uses_huge() && self.arena.allows_huge(is_huge) { len_bytes } else { 0 };
        self.arena.allow_huge(place.addr, huge_bytes);
        let blocks = self.blocks_of(place);
        let first = blocks.start + huge_bytes / BLOCK_BYTES;
        self.arena.advise_pages(first, blocks.end.saturating_sub(first));
    }

    /// When the first slot of a block is carved, requests that the helper makes the next block of the span resident.
    fn request_next_block(&self, place: LocatedSlot, size: usize, span_end: usize) {
        let next = (place.addr + BLOCK_BYTES) & !(BLOCK_BYTES - 1);
        let is_first = place.addr % BLOCK_BYTES < place.class.bytes();
        let is_filling = self.expected_use(place, size) == ExpectedUse::Full;
        if is_first && is_filling && next < span_end && self.helper.is_running() {
            self.arena.request_prefault(self.arena.block_of(next));
            self.helper.wake();
        }
    }

    /// Provides the memory that a slot lacks, if possible by moving pages from free slots. Returns whether pages were
    /// moved: then the slot's bytes are not zero. After an error the slot is free again.
    fn back_slot(&self, place: LocatedSlot, bytes: SlotBytes, size: usize, wanted: InitialContents) -> Result<bool> {
        debug_assert!(self.slot(place.number).phase() == SlotPhase::Live, "the caller has allocated the slot");
        let taken = if bytes.is_offered { self.discharge_taken(place) } else { 0 };
        if bytes.is_resident && taken == 0 && !place.class.is_big() {
            return Ok(false);
        }
        let mut blocks = self.blocks_of(place);
        let part = (place.class.bytes() / blocks.len()) as u64;
        let expected_use = self.expected_use(place, size);
        let mut is_recycled = false;
        let result = if place.class.is_big() {
            // The memory that the kernel took becomes resident again without a charge, so room is reserved for it.
            let room = if taken > 0 { self.arena.budget.reserve(taken) } else { Ok(()) };
            room.and_then(|()| self.arena.overcommit(blocks.start, blocks.len(), Context::Outside))
        } else {
            blocks.try_for_each(|block| {
                if self.is_empty_block(block) {
                    is_recycled |= self.recycle_block(place, block, expected_use);
                }
                match self.arena.block_state(block).backing {
                    Backing::Empty => self.account.offset_new_memory(BLOCK_BYTES as u64),
                    Backing::Lazy => self.account.offset_new_memory(part),
                    Backing::Huge | Backing::Small => {}
                }
                self.arena.back_block(block, expected_use)?;
                // The bytes of a *Lazy* block become resident without a charge, so room is reserved for them.
                if self.arena.block_state(block).backing == Backing::Lazy {
                    self.arena.budget.reserve(part)
                } else {
                    Ok(())
                }
            })
        };
        if result.is_err() {
            // Pages of another slot may have been moved into a part of this slot.
            let bytes = SlotBytes { is_zero: bytes.is_zero && !is_recycled, ..bytes };
            let freed = self.free_slot(place, bytes);
            debug_assert!(freed.is_ok(), "no other thread has freed the slot");
        } else if place.class.is_big() {
            let missing_bytes = size.saturating_sub(bytes.counted_bytes() as usize);
            let moved_bytes = if wanted == InitialContents::Any { self.move_free_pages_in(place, size) } else { 0 };
            is_recycled = moved_bytes > 0;
            self.account.offset_new_memory(missing_bytes.saturating_sub(moved_bytes) as u64);
        }
        result.map(|()| is_recycled)
    }

    /// Returns the address, class and node of the slot with this number; `None` if the slot was never carved.
    fn locate(&self, number: u32) -> Option<LocatedSlot> {
        let info = self.slot(number).info()?;
        let addr = self.base() + number as usize * GRANULE_BYTES + usize::from(info.offset) * STEP_BYTES;
        let class = Class::from_index(usize::from(info.class))?;
        Some(LocatedSlot { number, addr, class, node: usize::from(info.node) })
    }

    /// Returns the slot that starts at `addr`.
    #[inline]
    fn find_slot(&self, addr: usize) -> Result<LocatedSlot> {
        let distance = addr.wrapping_sub(self.base());
        if distance >= self.arena.heap.carved_bytes() {
            return Err(Error::NotAllocated { addr });
        }
        let place = self.locate((distance / GRANULE_BYTES) as u32);
        debug_assert!(place.is_none_or(|place| self.contains(place.addr)), "slots lie in the heap zone");
        place.filter(|place| place.addr == addr).ok_or(Error::NotAllocated { addr })
    }

    /// Returns the live slot that starts at `addr`.
    fn find_live(&self, addr: usize) -> Result<LocatedSlot> {
        let place = self.find_slot(addr)?;
        match self.slot(place.number).phase() {
            SlotPhase::Live => Ok(place),
            phase => Err(not_live(place, phase)),
        }
    }

    /// Returns the usable bytes of the allocation at `addr`.
    ///
    /// # Errors
    ///
    /// [`Error::NotAllocated`], [`Error::FreedBefore`].
    pub fn usable_bytes(&self, addr: usize) -> Result<usize> {
        Ok(self.find_live(addr)?.class.bytes())
    }

    /// Frees the allocation at `addr`. The slot keeps its memory until a purge returns it or its pages are moved to
    /// another slot.
    ///
    /// # Errors
    ///
    /// [`Error::NotAllocated`] for an address that was not allocated (or lies inside an allocation),
    /// [`Error::FreedBefore`] for a second free. After an error nothing has changed.
    ///
    /// # Safety
    ///
    /// The program must not use the allocation any more.
    pub unsafe fn free(&self, addr: usize) -> Result<()> {
        let place = self.find_slot(addr)?;
        self.free_slot(place, SlotBytes::USED)
    }

    /// Frees a live slot and stores the attributes of its bytes.
    fn free_slot(&self, place: LocatedSlot, bytes: SlotBytes) -> Result<()> {
        if place.class.is_big() && self.slot(place.number).phase() == SlotPhase::Live {
            let blocks = self.blocks_of(place);
            self.arena.reconcile(blocks.start, blocks.len());
        }
        // Computed before the slot becomes free, because another thread may allocate it at once afterwards.
        let shard = self.current_shard();
        let bytes = self.with_resident_count(place, bytes);
        let free_bytes = bytes.counted_bytes() as i64;
        self.slot(place.number).free(bytes, current_stamp()).map_err(|phase| not_live(place, phase))?;
        self.free_list(place.node, shard, place.class).push(self, place.number);
        let before = self.free_bytes[shard % MAX_SHARDS].0.fetch_add(free_bytes, Relaxed);
        if before / PUBLISH_STEP_BYTES != (before + free_bytes) / PUBLISH_STEP_BYTES {
            self.account.publish();
        }
        Ok(())
    }

    /// Recomputes the resident bytes of free slots, in a fork child. Inherited memory counts as 0, because it is
    /// charged to the parent.
    pub fn recount_free(&self) {
        let mut bytes = 0;
        for place in self.spans().flat_map(|span| self.carved_slots(span)) {
            let slot = self.slot(place.number);
            if let Some(claim) = slot.try_claim_free() {
                // The memory that the parent offered is charged to the parent.
                let own = SlotBytes { is_offered: false, ..claim.bytes() };
                let counted = self.with_resident_count(place, own);
                bytes += counted.counted_bytes() as i64;
                slot.restore(claim, counted);
            }
        }
        debug_assert!(bytes <= self.arena.heap.carved_bytes() as i64, "no more than the carved blocks is free");
        self.free_bytes.iter().for_each(|shard| shard.0.store(0, Relaxed));
        self.free_bytes[0].0.store(bytes, Relaxed);
    }

    /// Acquires the heap's locks before `fork`, so that the child gets consistent metadata.
    pub fn acquire_for_fork(&self) {
        self.purging.acquire();
        self.carving.acquire();
    }

    /// Releases the heap's locks after `fork`, in the parent and in the child.
    ///
    /// # Safety
    ///
    /// The same thread has called [`Heap::acquire_for_fork`] before, once for each call of this function.
    pub unsafe fn release_after_fork(&self) {
        self.carving.release();
        self.purging.release();
    }

    /// Returns the resident bytes of the heap's metadata.
    pub fn metadata_bytes(&self) -> u64 {
        let used = self.arena.heap.carved_bytes();
        self.slots.resident_bytes(0, used / GRANULE_BYTES)
            + self.spans.resident_bytes(0, used / BLOCK_BYTES)
            + self
                .free_list_heads
                .resident_bytes(0, self.arena.nodes.count() * self.shards_per_node * class::CLASS_COUNT)
    }
}
