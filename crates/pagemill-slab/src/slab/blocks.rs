//! The blocks that hold slabs: one address window for all caches, with an equal part for each NUMA node.
//!
//! A block belongs to one cache at a time. The arena provides it *whole* (2 MiB of memory, one huge page if available) or
//! *sparse* (memory comes and goes slab by slab). Whole blocks that are free keep their memory until it is reclaimed.
//!
//! Metadata blocks have their own window outside of the arena. They are not charged and cause no reclaim, because their
//! user may be running in reclaim. They are whole once there are many, and keep no memory while they are free.
#![allow(unsafe_code)] // opens its own window; frees the memory of free blocks and slabs

use super::meta::{Block, STANDING, Slab};
use super::shape::MAX_SLABS;
use pagemill_core::arena::block::Backing as Behind;
use pagemill_core::arena::{Arena, Context, Filling, Table};
use pagemill_core::error::{Error, Result};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{AtomicU32, Guarded, Relaxed};
use pagemill_core::units::{BLOCK_BYTES, os_page_bytes};
use pagemill_sys::mem::{self, Backing};
use pagemill_sys::numa::MAX_NODES;
use std::ops::Range;

/// The window is this fraction of the arena's address range for pages, up to [`MAX_BLOCKS`].
const WINDOW_DIVISOR: usize = 8;
const MAX_BLOCKS: usize = 1 << 20;

/// Size of the metadata window, if enough addresses are available: 64 GiB.
const METADATA_BLOCKS: usize = 1 << 15;

/// Number of metadata blocks that come sparse, before the others come whole.
const SPARSE_METADATA_BLOCKS: u32 = 16;

/// Blocks that are opened at a time.
const OPENED_BLOCKS: u32 = 32;

/// Free blocks of one node. List heads are block numbers plus one; 0: empty.
#[derive(Clone, Copy, Default)]
struct FreeBlocks {
    /// Number of the node's blocks that were ever used.
    opened: u32,
    /// Whole blocks with memory. In a fork child also those of the parent, which are emptied when they are taken.
    filled: u32,
    /// Blocks without memory.
    bare: u32,
}

/// The block allocator: one window of addresses, with free lists for each node.
pub(super) struct Blocks {
    pub arena: &'static Arena,
    base: usize,
    /// Whether the blocks lie in the arena, which charges their memory.
    is_charged: bool,
    /// Blocks of each node: a power of two.
    per_node: u32,
    blocks: Table<Block>,
    slabs: Table<Slab>,
    free: Guarded<[FreeBlocks; MAX_NODES]>,
    /// Number of free blocks with memory that is charged in this process.
    filled: AtomicU32,
    /// How many blocks have become free with their memory so far.
    gives: AtomicU32,
    /// Number of blocks that caches use.
    taken: AtomicU32,
}

impl Blocks {
    /// Reserves addresses; no memory.
    ///
    /// # Errors
    ///
    /// [`Error::NoAddresses`], [`Error::System`].
    pub fn new(arena: &'static Arena) -> Result<Self> {
        let most = (arena.pool.len_bytes() / BLOCK_BYTES / WINDOW_DIVISOR).min(MAX_BLOCKS);
        let per_node = Self::part_of_node(arena, most)?;
        let base = arena.carve_closed(&arena.pool, per_node * arena.nodes.count(), 1, 0)?;
        Self::over(arena, base, per_node, true)
    }

    /// As [`Blocks::new`], for metadata. One block of addresses before the first block is reserved and inaccessible.
    ///
    /// # Errors
    ///
    /// As [`Blocks::new`].
    pub fn for_metadata(arena: &'static Arena) -> Result<Self> {
        let mut most = METADATA_BLOCKS;
        loop {
            let per_node = Self::part_of_node(arena, most)?;
            let bytes = (1 + per_node * arena.nodes.count()) * BLOCK_BYTES;
            if let Ok(base) = mem::reserve(bytes, BLOCK_BYTES, 0) {
                return Self::over(arena, base + BLOCK_BYTES, per_node, false);
            }
            most /= 2;
        }
    }

    fn part_of_node(arena: &Arena, blocks: usize) -> Result<usize> {
        let per_node = (blocks / arena.nodes.count() + 1).next_power_of_two() / 2;
        if per_node > 0 { Ok(per_node) } else { Err(Error::NoAddresses { wanted_bytes: BLOCK_BYTES as u64 }) }
    }

    fn over(arena: &'static Arena, base: usize, per_node: usize, is_charged: bool) -> Result<Self> {
        let nodes = arena.nodes.count();
        for node in 0..nodes {
            arena.nodes.bind(base + node * per_node * BLOCK_BYTES, per_node * BLOCK_BYTES, node);
        }
        Ok(Self {
            arena,
            base,
            is_charged,
            per_node: per_node as u32,
            blocks: Table::new(per_node * nodes)?,
            slabs: Table::new(per_node * nodes * MAX_SLABS)?,
            free: Guarded::new([FreeBlocks::default(); MAX_NODES]),
            filled: AtomicU32::new(0),
            gives: AtomicU32::new(0),
            taken: AtomicU32::new(0),
        })
    }

    /// Whether the blocks are charged. Metadata blocks are not, and they are read even while free.
    pub fn is_charged(&self) -> bool {
        self.is_charged
    }

    /// The addresses of all blocks.
    pub fn window(&self) -> Range<usize> {
        self.base..self.addr(self.per_node * self.arena.nodes.count() as u32)
    }

    /// The block that contains an object's address.
    #[inline]
    pub fn number_of(&self, addr: usize) -> u32 {
        ((addr - self.base) / BLOCK_BYTES) as u32
    }

    #[inline]
    pub fn addr(&self, block: u32) -> usize {
        self.base + block as usize * BLOCK_BYTES
    }

    /// The node of a block's memory.
    #[inline]
    pub fn node_of(&self, block: u32) -> usize {
        (block >> self.per_node.trailing_zeros()) as usize
    }

    #[inline]
    pub fn block(&self, block: u32) -> &Block {
        self.blocks.get(block as usize)
    }

    #[inline]
    pub fn slab(&self, block: u32, slab: u32) -> &Slab {
        self.slabs.get(block as usize * MAX_SLABS + slab as usize)
    }

    /// The number of a block within the arena.
    fn in_arena(&self, block: u32) -> usize {
        self.arena.block_of(self.addr(block))
    }

    /// Takes a block of a node: whole if little of it will be wasted. Its slabs are at no level.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`], [`Error::NoAddresses`].
    pub fn take(&self, node: usize, filling: Filling) -> Result<u32> {
        let is_whole_wanted = self.arena.may_take_huge(filling)
            && (self.is_charged || self.taken.load(Relaxed) >= SPARSE_METADATA_BLOCKS);
        let found = self.free.with(|free| self.find(&mut free[node], node))?;
        let (block, is_filled) = found;
        let words = self.block(block);
        words.clear();
        if is_filled && !self.is_inherited(block) {
            self.filled.fetch_sub(1, Relaxed);
            stats::sub(Counter::SlabFree, BLOCK_BYTES as u64);
        } else {
            let is_whole = self.open(block, is_whole_wanted).inspect_err(|_| self.put_bare(block))?;
            words.is_sparse.set(u32::from(!is_whole));
        }
        self.taken.fetch_add(1, Relaxed);
        if self.is_charged {
            stats::add(Counter::SlabBlocks, 1);
        }
        Ok(block)
    }

    /// Whether the memory of a block was inherited by fork: it is not charged in this process.
    fn is_inherited(&self, block: u32) -> bool {
        self.is_charged && self.arena.peek(self.in_arena(block)).is_inherited
    }

    /// Frees the memory of an unused arena block. Returns the bytes that were charged; `None` if the kernel keeps the
    /// memory (because it is locked).
    fn empty(&self, block: u32) -> Option<u64> {
        // SAFETY: no cache uses this block, and it is in no list: no reference to its contents exists.
        let bytes = unsafe { self.arena.discard(self.in_arena(block), 1) };
        (self.arena.peek(self.in_arena(block)).backing == Behind::Empty).then_some(bytes)
    }

    /// Populates a block that has no memory, or prepares it to be populated slab by slab. Returns whether it is whole.
    fn open(&self, block: u32, is_whole_wanted: bool) -> Result<bool> {
        if self.is_charged {
            // First drops memory of the parent, or memory that the kernel kept. If the kernel still keeps it, the block
            // remains charged, in small pages.
            let is_empty = self.empty(block).is_some();
            if is_empty && is_whole_wanted {
                // SAFETY: a block of this window that is in no list, and has no memory.
                let filled = unsafe { self.arena.bring_in_whole(self.in_arena(block), 1, true) };
                if filled.is_ok() {
                    return Ok(true);
                }
            }
            self.arena.overcommit(self.in_arena(block), 1, Context::Outside)?;
        } else if is_whole_wanted
            && mem::populate_huge(self.addr(block), BLOCK_BYTES).is_ok_and(|got| got == Backing::Huge)
        {
            return Ok(true);
        }
        // It may have been whole before: touching one slab must not populate the others.
        mem::forbid_huge(self.addr(block), BLOCK_BYTES);
        Ok(false)
    }

    /// A free block, and whether it has memory.
    fn find(&self, free: &mut FreeBlocks, node: usize) -> Result<(u32, bool)> {
        if let Some(block) = self.pop(&mut free.filled) {
            return Ok((block, true));
        }
        if let Some(block) = self.pop(&mut free.bare) {
            return Ok((block, false));
        }
        if free.opened == self.per_node {
            return Err(Error::NoAddresses { wanted_bytes: BLOCK_BYTES as u64 });
        }
        let first = node * self.per_node as usize;
        let (block, slab) = (first + free.opened as usize, (first + free.opened as usize) * MAX_SLABS);
        self.blocks.open(first, block, block + 1)?;
        self.slabs.open(first * MAX_SLABS, slab, slab + MAX_SLABS)?;
        if free.opened.is_multiple_of(OPENED_BLOCKS) {
            let blocks = OPENED_BLOCKS.min(self.per_node - free.opened) as usize;
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

    /// Adds a block without memory to the free list. The metadata of its slabs is freed, too: it is a page or more.
    fn put_bare(&self, block: u32) {
        if (MAX_SLABS * size_of::<Slab>()).is_multiple_of(os_page_bytes()) {
            // If the kernel keeps it (locked memory), it is zero except for `tried` marks, which do not matter here.
            let _ = self.slabs.discard(block as usize * MAX_SLABS, MAX_SLABS);
        }
        let node = self.node_of(block);
        self.free.with(|free| self.push(&mut free[node].bare, block));
    }

    fn push(&self, list: &mut u32, block: u32) {
        self.block(block).links[STANDING].next.set(*list);
        *list = block + 1;
    }

    fn pop(&self, list: &mut u32) -> Option<u32> {
        let block = list.checked_sub(1)?;
        *list = self.block(block).links[STANDING].next.get();
        Some(block)
    }

    /// Frees a block without objects. The memory of a sparse block is freed at once; returns its charged bytes.
    pub fn give(&self, block: u32) -> u64 {
        self.taken.fetch_sub(1, Relaxed);
        if !self.is_charged {
            // SAFETY: no cache uses this block: its contents may become zero. If the kernel keeps it (locked memory), it
            // stays.
            let _ = unsafe { mem::discard(self.addr(block), BLOCK_BYTES) };
            self.put_bare(block);
            return 0;
        }
        stats::sub(Counter::SlabBlocks, 1);
        let node = self.node_of(block);
        if self.block(block).is_sparse.get() == 1 {
            let freed = self.empty(block);
            self.put_bare(block);
            return freed.unwrap_or(0);
        }
        self.filled.fetch_add(1, Relaxed);
        self.gives.fetch_add(1, Relaxed);
        stats::add(Counter::SlabFree, BLOCK_BYTES as u64);
        self.free.with(|free| self.push(&mut free[node].filled, block));
        0
    }

    /// Populates the memory of one slab in a block whose memory is brought in slab by slab (*sparse*).
    ///
    /// The caller has claimed the slab, so no other thread sees it.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`], [`Error::System`].
    pub fn bring_in(&self, block: u32, at: usize, len_bytes: usize) -> Result<()> {
        if self.is_charged {
            self.arena.budget.reserve(len_bytes as u64)?;
        }
        if let Err(error) = mem::populate(self.addr(block) + at, len_bytes) {
            // Frees what was populated before the error.
            // SAFETY: the slab is being set up, and not visible to other threads.
            let _ = unsafe { self.discard(block, at, len_bytes) };
            return Err(Error::system("bringing in a slab")(error));
        }
        if self.is_charged {
            self.arena.reconcile(self.in_arena(block), 1);
        }
        Ok(())
    }

    /// Frees the memory of one slab of a sparse block. Returns the bytes that were charged; `None` if the kernel refuses.
    ///
    /// # Safety
    ///
    /// The caller owns the slab, and no reference to its contents exists.
    pub unsafe fn discard(&self, block: u32, at: usize, len_bytes: usize) -> Option<u64> {
        let addr = self.addr(block) + at;
        if !self.is_charged {
            // SAFETY: the caller's promise.
            return unsafe { mem::discard(addr, len_bytes) }.ok().map(|()| 0);
        }
        // SAFETY: the caller's promise.
        unsafe { self.arena.discard_part(self.in_arena(block), addr, len_bytes) }
    }

    /// How many blocks have become free with their memory so far.
    pub fn gives(&self) -> u32 {
        self.gives.load(Relaxed)
    }

    /// Bytes of free blocks that keep their memory.
    pub fn giveable_bytes(&self) -> u64 {
        u64::from(self.filled.load(Relaxed)) * BLOCK_BYTES as u64
    }

    /// Frees memory of free blocks, up to about `want_bytes`. Returns the bytes that the kernel took.
    pub fn shrink(&self, want_bytes: u64) -> u64 {
        let mut freed = 0;
        for node in 0..self.arena.nodes.count() {
            while freed < want_bytes {
                let Some(block) = self.free.with(|free| self.pop(&mut free[node].filled)) else { break };
                let is_inherited = self.is_inherited(block);
                let Some(bytes) = self.empty(block) else {
                    // The kernel keeps the memory, so the block keeps it, too.
                    self.free.with(|free| self.push(&mut free[node].filled, block));
                    break;
                };
                if !is_inherited {
                    self.filled.fetch_sub(1, Relaxed);
                    stats::sub(Counter::SlabFree, BLOCK_BYTES as u64);
                }
                freed += bytes;
                self.put_bare(block);
            }
        }
        freed
    }

    /// Bytes charged for a block.
    #[cfg(any(test, feature = "test-util"))]
    pub fn resident_bytes_of(&self, block: u32) -> u64 {
        if !self.is_charged {
            return mem::resident_bytes(self.addr(block), BLOCK_BYTES).unwrap() as u64;
        }
        Arena::charged_bytes(self.arena.peek(self.in_arena(block)).charged_pages)
    }

    /// Resident bytes of metadata.
    pub fn metadata_bytes(&self) -> u64 {
        let each = (0..self.arena.nodes.count()).map(|node| {
            let (first, opened) = (node * self.per_node as usize, self.free.with(|free| free[node].opened) as usize);
            self.blocks.resident_bytes(first, opened) + self.slabs.resident_bytes(first * MAX_SLABS, opened * MAX_SLABS)
        });
        each.sum()
    }

    /// In a fork child: free memory is the parent's, and charged there. It stays until a block is taken, so a child that
    /// only executes another program pays nothing.
    pub fn begin_child(&self) {
        self.filled.store(0, Relaxed);
    }

    pub fn acquire_for_fork(&self) {
        self.free.acquire_when(|_| true);
    }

    pub fn release_after_fork(&self) {
        self.free.release();
    }
}
