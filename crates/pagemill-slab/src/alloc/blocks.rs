//! The blocks that hold slabs. All caches share one window of addresses, with an equal part for each NUMA node.
//!
//! A block belongs to one cache at a time. A *whole* block is populated and freed as 2 MiB, with one huge page if
//! available. A *sparse* block is populated and freed slab by slab, in small pages. A free whole block keeps its memory
//! until reclaim or the background thread frees it.
//!
//! Metadata blocks have a window of their own outside of the arena. They are not charged and cause no reclaim, because
//! an allocation of metadata may itself run in reclaim. The first metadata blocks are sparse, later ones whole. A free
//! metadata block keeps no memory.
#![allow(unsafe_code)] // opens its own window; frees the memory of free blocks and slabs

use crate::alloc::meta::{BY_USE, Block, Slab};
use crate::alloc::shape::MAX_SLABS;
use pagemill_core::arena::block::Backing as BlockBacking;
use pagemill_core::arena::{Arena, Context, ExpectedUse, Table};
use pagemill_core::error::{Error, Result};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{AtomicU32, Guarded, Relaxed};
use pagemill_core::units::{BLOCK_BYTES, os_page_bytes};
use pagemill_sys::mem::{self, Backing};
use pagemill_sys::numa::MAX_NODES;
use std::ops::Range;

/// The address window of the blocks is as long as the arena's pool zone divided by this number, but has at most
/// [`MAX_BLOCKS`] blocks.
const WINDOW_DIVISOR: usize = 8;
/// Maximum number of blocks in the address window of the slab caches.
const MAX_BLOCKS: usize = 1 << 20;

/// Number of blocks in the window of metadata blocks, which hold the nodes of indexes (64 GiB). The number is halved
/// until enough addresses are available.
const METADATA_BLOCK_COUNT: usize = 1 << 15;

/// Number of metadata blocks that are sparse. All further metadata blocks are whole.
const SPARSE_METADATA_BLOCK_COUNT: u32 = 16;

/// Number of blocks that are made accessible by one system call.
const BLOCKS_PER_OPEN: u32 = 32;

/// The free blocks of one NUMA node, in linked lists. A list head is a block number plus one, or 0 if the list is
/// empty.
#[derive(Clone, Copy, Default)]
struct FreeBlocks {
    /// Number of blocks of the node that were used at least once. They are the node's first blocks.
    opened: u32,
    /// Head of the list of free whole blocks that have memory. In a fork child the list also has blocks of the parent,
    /// whose memory is discarded before use.
    with_memory: u32,
    /// Head of the list of free blocks without memory.
    without_memory: u32,
}

/// The allocator of slab blocks: one window of addresses, with lists of free blocks for each NUMA node.
pub(crate) struct Blocks {
    pub arena: &'static Arena,
    /// Start address of the window that contains all blocks.
    base: usize,
    /// Whether the blocks lie in the arena, which charges their memory. Metadata blocks do not, and they are read even
    /// while they are free.
    pub is_charged: bool,
    /// Number of blocks of each NUMA node: a power of two.
    blocks_per_node: u32,
    blocks: Table<Block>,
    slabs: Table<Slab>,
    free_lists: Guarded<[FreeBlocks; MAX_NODES]>,
    /// Number of free blocks with memory that is charged to this process.
    free_with_memory: AtomicU32,
    /// Number of times that a block became free and kept its memory.
    freed_with_memory: AtomicU32,
    /// Number of blocks that caches use.
    in_use: AtomicU32,
}

impl Blocks {
    /// Reserves the address window of the slab caches, but no memory.
    ///
    /// # Errors
    ///
    /// [`Error::NoAddresses`], [`Error::System`].
    pub fn new(arena: &'static Arena) -> Result<Self> {
        let most = (arena.pool.len_bytes() / BLOCK_BYTES / WINDOW_DIVISOR).min(MAX_BLOCKS);
        let blocks_per_node = Self::blocks_for_each_node(arena, most)?;
        // SAFETY: slab caches access only their own blocks of the zone, so they need no tables for the whole zone.
        let base = unsafe { arena.carve_closed(&arena.pool, blocks_per_node * arena.nodes.count(), 1, 0) }?;
        Self::with_window(arena, base, blocks_per_node, true)
    }

    /// As [`Blocks::new`], for metadata blocks, which hold the nodes of indexes. One block of addresses before the
    /// first block is reserved and inaccessible.
    ///
    /// # Errors
    ///
    /// As [`Blocks::new`].
    pub fn for_metadata(arena: &'static Arena) -> Result<Self> {
        let mut most = METADATA_BLOCK_COUNT;
        loop {
            let blocks_per_node = Self::blocks_for_each_node(arena, most)?;
            let bytes = (1 + blocks_per_node * arena.nodes.count()) * BLOCK_BYTES;
            if let Ok(base) = mem::reserve(bytes, BLOCK_BYTES, 0) {
                return Self::with_window(arena, base + BLOCK_BYTES, blocks_per_node, false);
            }
            most /= 2;
        }
    }

    /// Divides `blocks` evenly among the NUMA nodes. Returns the number of blocks for each node, rounded down to a
    /// power of two.
    fn blocks_for_each_node(arena: &Arena, blocks: usize) -> Result<usize> {
        let blocks_per_node = (blocks / arena.nodes.count() + 1).next_power_of_two() / 2;
        let error = Error::NoAddresses { wanted_bytes: BLOCK_BYTES as u64 };
        (blocks_per_node > 0).then_some(blocks_per_node).ok_or(error)
    }

    /// Creates the allocator of the window that begins at `base`. Binds each part of the window to its NUMA node, and
    /// reserves addresses for the metadata of all blocks.
    fn with_window(arena: &'static Arena, base: usize, blocks_per_node: usize, is_charged: bool) -> Result<Self> {
        let nodes = arena.nodes.count();
        for node in 0..nodes {
            arena.nodes.bind(base + node * blocks_per_node * BLOCK_BYTES, blocks_per_node * BLOCK_BYTES, node);
        }
        Ok(Self {
            arena,
            base,
            is_charged,
            blocks_per_node: blocks_per_node as u32,
            blocks: Table::new(blocks_per_node * nodes)?,
            slabs: Table::new(blocks_per_node * nodes * MAX_SLABS)?,
            free_lists: Guarded::new([FreeBlocks::default(); MAX_NODES]),
            free_with_memory: AtomicU32::new(0),
            freed_with_memory: AtomicU32::new(0),
            in_use: AtomicU32::new(0),
        })
    }

    /// Returns the address range of all blocks.
    pub fn window(&self) -> Range<usize> {
        self.base..self.addr(self.blocks_per_node * self.arena.nodes.count() as u32)
    }

    /// Returns the number of the slab block that contains the address `addr`.
    #[inline]
    pub fn number_of(&self, addr: usize) -> u32 {
        debug_assert!(self.window().contains(&addr), "the address is in the window of slab caches");
        ((addr - self.base) / BLOCK_BYTES) as u32
    }

    /// Returns the start address of a block.
    #[inline]
    pub fn addr(&self, block: u32) -> usize {
        self.base + block as usize * BLOCK_BYTES
    }

    /// Returns the NUMA node of a block's memory.
    #[inline]
    pub fn node_of(&self, block: u32) -> usize {
        (block >> self.blocks_per_node.trailing_zeros()) as usize
    }

    /// Returns the metadata of a block.
    #[inline]
    pub fn block(&self, block: u32) -> &Block {
        self.blocks.get(block as usize)
    }

    /// Returns the metadata of a slab of a block.
    #[inline]
    pub fn slab(&self, block: u32, slab: u32) -> &Slab {
        self.slabs.get(block as usize * MAX_SLABS + slab as usize)
    }

    /// Returns the index that a slab block has among all blocks of the arena.
    fn arena_index(&self, block: u32) -> usize {
        self.arena.block_of(self.addr(block))
    }

    /// Allocates a block of a NUMA node. A free whole block with memory is used first. Otherwise a block without memory
    /// is used, which becomes whole if `filling`, the expected use of the block, allows a huge page. In the metadata of
    /// the returned block, no slab is in the set of any level.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`], [`Error::NoAddresses`].
    pub fn allocate(&self, node: usize, filling: ExpectedUse) -> Result<u32> {
        let wants_whole = self.arena.may_take_huge(filling)
            && (self.is_charged || self.in_use.load(Relaxed) >= SPARSE_METADATA_BLOCK_COUNT);
        let (block, has_memory) = self.free_lists.with(|free| self.find_free(&mut free[node], node))?;
        debug_assert!(self.node_of(block) == node, "the block belongs to the node");
        let block_meta = self.block(block);
        block_meta.clear_levels();
        if has_memory && !self.is_inherited(block) {
            let free = self.free_with_memory.fetch_sub(1, Relaxed);
            debug_assert!(free > 0, "the block was counted");
            stats::sub(Counter::SlabFree, BLOCK_BYTES as u64);
        } else {
            let is_whole = self.prepare_memory(block, wants_whole).inspect_err(|_| self.add_without_memory(block))?;
            block_meta.is_sparse.set(u32::from(!is_whole));
        }
        self.in_use.fetch_add(1, Relaxed);
        if self.is_charged {
            stats::add(Counter::SlabBlocks, 1);
        }
        Ok(block)
    }

    /// Returns whether the memory of a block was inherited by fork. Such memory is not charged to this process.
    fn is_inherited(&self, block: u32) -> bool {
        self.is_charged && self.arena.block_state(self.arena_index(block)).is_inherited
    }

    /// Frees the memory of an unused arena block. Returns the bytes that were charged for the block, or `None` if the
    /// kernel keeps the memory because it is locked (`mlock`).
    fn discard_block(&self, block: u32) -> Option<u64> {
        // SAFETY: no cache uses this block, and it is in no list: no reference to its contents exists.
        let bytes = unsafe { self.arena.discard(self.arena_index(block), 1) };
        (self.arena.block_state(self.arena_index(block)).backing == BlockBacking::Empty).then_some(bytes)
    }

    /// If `wants_whole` is true and a huge page is available, populates the whole block. Otherwise prepares the block
    /// to be populated slab by slab. Returns whether the block is whole.
    fn prepare_memory(&self, block: u32, wants_whole: bool) -> Result<bool> {
        if self.is_charged {
            // Memory of the parent, or memory that the kernel kept, is discarded first. If the kernel keeps it again,
            // the block stays charged, in small pages.
            let is_empty = self.discard_block(block).is_some();
            if is_empty && wants_whole {
                // SAFETY: a block of this window that is in no list, and has no memory.
                let filled = unsafe { self.arena.populate_blocks(self.arena_index(block), 1, true) };
                if filled.is_ok() {
                    return Ok(true);
                }
            }
            self.arena.overcommit(self.arena_index(block), 1, Context::Outside)?;
        } else if wants_whole && mem::populate_huge(self.addr(block), BLOCK_BYTES).is_ok_and(|got| got == Backing::Huge)
        {
            return Ok(true);
        }
        // The block may have been whole before. Without a huge page, touching one slab does not populate the others.
        mem::forbid_huge(self.addr(block), BLOCK_BYTES);
        Ok(false)
    }

    /// Removes a free block of `node` from a list in `free`, or opens the next of the node's blocks that were never
    /// used. Returns the number of the block and whether the block has memory.
    fn find_free(&self, free: &mut FreeBlocks, node: usize) -> Result<(u32, bool)> {
        for (list, has_memory) in [(&mut free.with_memory, true), (&mut free.without_memory, false)] {
            if let Some(block) = self.pop_block(list) {
                return Ok((block, has_memory));
            }
        }
        debug_assert!(free.opened <= self.blocks_per_node);
        if free.opened == self.blocks_per_node {
            return Err(Error::NoAddresses { wanted_bytes: BLOCK_BYTES as u64 });
        }
        let first = node * self.blocks_per_node as usize;
        let (block, slab) = (first + free.opened as usize, (first + free.opened as usize) * MAX_SLABS);
        self.blocks.open(first, block, block + 1)?;
        self.slabs.open(first * MAX_SLABS, slab, slab + MAX_SLABS)?;
        if free.opened.is_multiple_of(BLOCKS_PER_OPEN) {
            let blocks = BLOCKS_PER_OPEN.min(self.blocks_per_node - free.opened) as usize;
            let (addr, bytes) = (self.addr(block as u32), blocks * BLOCK_BYTES);
            if self.is_charged {
                // SAFETY: blocks of this window, carved closed; those beyond `opened` were never opened.
                unsafe { self.arena.open_blocks(addr, bytes) }?;
            } else {
                // SAFETY: within the window, which is a reservation of its own.
                unsafe { mem::open(addr, bytes) }.map_err(Error::system("opening memory of metadata"))?;
            }
        }
        free.opened += 1;
        Ok((block as u32, false))
    }

    /// Adds a block without memory to the free list of its node. Also frees the memory of its slabs' metadata, if that
    /// metadata fills whole OS pages.
    fn add_without_memory(&self, block: u32) {
        if (MAX_SLABS * size_of::<Slab>()).is_multiple_of(os_page_bytes()) {
            // If the kernel keeps the metadata (locked memory), all of it is zero except `tried`, which has no effect
            // here.
            let _ = self.slabs.discard(block as usize * MAX_SLABS, MAX_SLABS);
        }
        let node = self.node_of(block);
        self.free_lists.with(|free| self.push_block(&mut free[node].without_memory, block));
    }

    /// Adds a block to the front of the free list whose head is `list`.
    fn push_block(&self, list: &mut u32, block: u32) {
        debug_assert!(*list != block + 1, "the block is not in the list");
        self.block(block).links[BY_USE].next.set(*list);
        *list = block + 1;
    }

    /// Removes the first block from the free list whose head is `list`, and returns its number.
    fn pop_block(&self, list: &mut u32) -> Option<u32> {
        let block = list.checked_sub(1)?;
        *list = self.block(block).links[BY_USE].next.get();
        Some(block)
    }

    /// Frees a block without objects. Also frees the memory of a sparse block; a whole block keeps its memory. Returns
    /// the freed bytes.
    pub fn free(&self, block: u32) -> u64 {
        let in_use = self.in_use.fetch_sub(1, Relaxed);
        debug_assert!(in_use > 0, "the block was allocated");
        if !self.is_charged {
            // SAFETY: no cache uses this block, so its contents may become zero. If the kernel keeps the memory
            // (locked), nothing changes.
            let _ = unsafe { mem::discard(self.addr(block), BLOCK_BYTES) };
            self.add_without_memory(block);
            return 0;
        }
        stats::sub(Counter::SlabBlocks, 1);
        let node = self.node_of(block);
        if self.block(block).is_sparse.get() == 1 {
            let freed = self.discard_block(block);
            self.add_without_memory(block);
            return freed.unwrap_or(0);
        }
        self.free_with_memory.fetch_add(1, Relaxed);
        self.freed_with_memory.fetch_add(1, Relaxed);
        stats::add(Counter::SlabFree, BLOCK_BYTES as u64);
        self.free_lists.with(|free| self.push_block(&mut free[node].with_memory, block));
        0
    }

    /// Populates the memory of one slab in a sparse block: `len_bytes` from offset `at` of the block.
    ///
    /// The caller has claimed the slab, so no other thread uses it.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`], [`Error::System`].
    pub fn populate_slab(&self, block: u32, at: usize, len_bytes: usize) -> Result<()> {
        debug_assert!(at + len_bytes <= BLOCK_BYTES, "a slab is in one block");
        if self.is_charged {
            self.arena.budget.reserve(len_bytes as u64)?;
        }
        if let Err(error) = mem::populate(self.addr(block) + at, len_bytes) {
            // Frees what was populated before the error.
            // SAFETY: the slab is being set up, and not visible to other threads.
            let _ = unsafe { self.discard_slab(block, at, len_bytes) };
            return Err(Error::system("bringing in a slab")(error));
        }
        if self.is_charged {
            self.arena.reconcile(self.arena_index(block), 1);
        }
        Ok(())
    }

    /// Frees the memory of one slab in a sparse block: `len_bytes` from offset `at` of the block. Returns the bytes
    /// that were charged for it, or `None` if the kernel refuses to free the memory.
    ///
    /// # Safety
    ///
    /// The caller owns the slab, and no reference to its contents exists.
    pub unsafe fn discard_slab(&self, block: u32, at: usize, len_bytes: usize) -> Option<u64> {
        debug_assert!(at + len_bytes <= BLOCK_BYTES, "a slab is in one block");
        let addr = self.addr(block) + at;
        if !self.is_charged {
            // SAFETY: the caller's promise.
            return unsafe { mem::discard(addr, len_bytes) }.ok().map(|()| 0);
        }
        // SAFETY: the caller's promise.
        unsafe { self.arena.discard_part(self.arena_index(block), addr, len_bytes) }
    }

    /// Returns how many times a block became free and kept its memory.
    pub fn freed_with_memory(&self) -> u32 {
        self.freed_with_memory.load(Relaxed)
    }

    /// Returns how many bytes of memory the free blocks keep.
    pub fn giveable_bytes(&self) -> u64 {
        u64::from(self.free_with_memory.load(Relaxed)) * BLOCK_BYTES as u64
    }

    /// Frees the memory of free blocks until `want_bytes` are freed or no free block has memory. Returns the freed
    /// bytes.
    pub fn shrink(&self, want_bytes: u64) -> u64 {
        let mut freed = 0;
        for node in 0..self.arena.nodes.count() {
            while freed < want_bytes {
                let Some(block) = self.free_lists.with(|free| self.pop_block(&mut free[node].with_memory)) else {
                    break;
                };
                let is_inherited = self.is_inherited(block);
                let Some(bytes) = self.discard_block(block) else {
                    // The kernel keeps the memory, so the block returns to the list of blocks with memory.
                    self.free_lists.with(|free| self.push_block(&mut free[node].with_memory, block));
                    break;
                };
                if !is_inherited {
                    self.free_with_memory.fetch_sub(1, Relaxed);
                    stats::sub(Counter::SlabFree, BLOCK_BYTES as u64);
                }
                freed += bytes;
                self.add_without_memory(block);
            }
        }
        freed
    }

    /// Returns the bytes that are charged for a block.
    #[cfg(any(test, feature = "test-util"))]
    pub fn resident_bytes_of(&self, block: u32) -> u64 {
        if !self.is_charged {
            return mem::resident_bytes(self.addr(block), BLOCK_BYTES).unwrap() as u64;
        }
        Arena::charged_bytes(self.arena.block_state(self.arena_index(block)).charged_pages)
    }

    /// Returns the resident bytes of the metadata of all blocks.
    pub fn metadata_bytes(&self) -> u64 {
        let each = (0..self.arena.nodes.count()).map(|node| {
            let (first, opened) =
                (node * self.blocks_per_node as usize, self.free_lists.with(|free| free[node].opened) as usize);
            self.blocks.resident_bytes(first, opened) + self.slabs.resident_bytes(first * MAX_SLABS, opened * MAX_SLABS)
        });
        each.sum()
    }

    /// In a fork child: counts no free block as charged, since the memory of free blocks is charged to the parent. The
    /// memory is discarded when a block is allocated, so a child that only executes another program pays nothing.
    pub fn begin_child(&self) {
        self.free_with_memory.store(0, Relaxed);
    }

    /// Acquires the lock of the free lists before a fork.
    pub fn acquire_for_fork(&self) {
        self.free_lists.acquire_when(|_| true);
    }

    pub fn release_after_fork(&self) {
        self.free_lists.release();
    }
}
