//! The blocks that slabs lie in: one window of addresses for all caches, an equal part of it for each node.
//!
//! A block belongs to one cache at a time. It comes *whole* (2 MiB of memory, one huge page where there is one) or *sparse*
//! (memory comes and goes slab by slab), as the arena says. Whole ones that are free keep their memory until somebody wants it.
#![allow(unsafe_code)] // gives the memory of free blocks and slabs back

use super::meta::{Block, Slab};
use super::shape::MAX_SLABS;
use crate::arena::{Arena, Context, Filling, Table};
use crate::error::{Error, Result};
use crate::stats::{self, Counter};
use crate::sync::{AtomicU32, Guarded, Relaxed};
use crate::units::{BLOCK_BYTES, os_page_bytes};
use pagemill_sys::{mem, numa::MAX_NODES};

/// The window is this part of what the arena has for pages, up to [`MAX_BLOCKS`].
const WINDOW_DIVISOR: usize = 8;
const MAX_BLOCKS: usize = 1 << 20;

/// So much of it is opened at a time.
const OPENED_BLOCKS: u32 = 32;

/// Blocks of one node that no cache has. Lists by number and one; 0 none.
#[derive(Clone, Copy, Default)]
struct Free {
    /// Of the node's blocks so many have been used.
    opened: u32,
    /// Whole ones with their memory.
    filled: u32,
    /// Such as have none.
    bare: u32,
}

pub(super) struct Blocks {
    pub arena: &'static Arena,
    base: usize,
    /// Blocks of each node: a power of two.
    per_node: u32,
    blocks: Table<Block>,
    slabs: Table<Slab>,
    free: Guarded<[Free; MAX_NODES]>,
    /// Free ones with memory.
    filled: AtomicU32,
}

impl Blocks {
    /// Takes addresses; no memory.
    ///
    /// # Errors
    ///
    /// [`Error::NoAddresses`], [`Error::System`].
    pub fn new(arena: &'static Arena) -> Result<Self> {
        let nodes = arena.nodes.count();
        let most = (arena.pool.len_bytes() / BLOCK_BYTES / WINDOW_DIVISOR).min(MAX_BLOCKS) / nodes;
        let per_node = (most + 1).next_power_of_two() / 2;
        if per_node == 0 {
            return Err(Error::NoAddresses { wanted_bytes: BLOCK_BYTES as u64 });
        }
        let base = arena.carve_closed(&arena.pool, per_node * nodes, 1, 0)?;
        for node in 0..nodes {
            arena.nodes.bind(base + node * per_node * BLOCK_BYTES, per_node * BLOCK_BYTES, node);
        }
        Ok(Self {
            arena,
            base,
            per_node: per_node as u32,
            blocks: Table::new(per_node * nodes)?,
            slabs: Table::new(per_node * nodes * MAX_SLABS)?,
            free: Guarded::new([Free::default(); MAX_NODES]),
            filled: AtomicU32::new(0),
        })
    }

    /// The block that an object's address lies in.
    #[inline]
    pub fn number_of(&self, addr: usize) -> u32 {
        ((addr - self.base) / BLOCK_BYTES) as u32
    }

    #[inline]
    pub fn addr(&self, block: u32) -> usize {
        self.base + block as usize * BLOCK_BYTES
    }

    /// Whose memory is behind a block.
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

    /// The arena's number of a block.
    fn in_arena(&self, block: u32) -> usize {
        self.arena.block_of(self.addr(block))
    }

    /// Takes a block of a node: whole where little of it will be wasted. Nothing is at any level of it.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`], [`Error::NoAddresses`].
    pub fn take(&self, node: usize, filling: Filling) -> Result<u32> {
        let is_whole_wanted = self.arena.may_take_huge(filling);
        let found = self.free.with(|free| self.find(&mut free[node], node))?;
        let (block, is_filled) = found;
        let words = self.block(block);
        words.clear();
        if is_filled {
            self.filled.fetch_sub(1, Relaxed);
            stats::sub(Counter::SlabFree, BLOCK_BYTES as u64);
        } else {
            let is_whole = is_whole_wanted && self.arena.bring_in_whole(self.in_arena(block), 1, true).is_ok();
            if !is_whole && let Err(error) = self.arena.lend(self.in_arena(block), 1, Context::Outside) {
                self.put_bare(block);
                return Err(error);
            }
            words.is_sparse.set(u32::from(!is_whole));
        }
        stats::add(Counter::SlabBlocks, 1);
        Ok(block)
    }

    /// A free block, and whether there is memory behind it.
    fn find(&self, free: &mut Free, node: usize) -> Result<(u32, bool)> {
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
            self.arena.open_blocks(self.addr(block as u32), blocks * BLOCK_BYTES)?;
        }
        free.opened += 1;
        Ok((block as u32, false))
    }

    /// Notes a block without memory. What is known of its slabs goes, too: it is a page or more.
    fn put_bare(&self, block: u32) {
        if (MAX_SLABS * size_of::<Slab>()).is_multiple_of(os_page_bytes()) {
            // Where the kernel keeps it (locked memory) it is zero all the same but for what passes leave, which says nothing here.
            let _ = self.slabs.discard(block as usize * MAX_SLABS, MAX_SLABS);
        }
        let node = self.node_of(block);
        self.free.with(|free| self.push(&mut free[node].bare, block));
    }

    fn push(&self, list: &mut u32, block: u32) {
        self.block(block).next.set(*list);
        *list = block + 1;
    }

    fn pop(&self, list: &mut u32) -> Option<u32> {
        let block = list.checked_sub(1)?;
        *list = self.block(block).next.get();
        Some(block)
    }

    /// Takes back a block that has no object. Of a sparse one the memory goes at once; returns the bytes of that.
    pub fn give(&self, block: u32) -> u64 {
        stats::sub(Counter::SlabBlocks, 1);
        let node = self.node_of(block);
        if self.block(block).is_sparse.get() == 1 {
            // SAFETY: no cache has this block: nobody refers to what is in it.
            let freed = unsafe { self.arena.discard(self.in_arena(block), 1) };
            self.put_bare(block);
            return freed;
        }
        self.filled.fetch_add(1, Relaxed);
        stats::add(Counter::SlabFree, BLOCK_BYTES as u64);
        self.free.with(|free| self.push(&mut free[node].filled, block));
        0
    }

    /// Brings the memory of one slab of a sparse block in.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`], [`Error::System`].
    pub fn bring_in(&self, block: u32, at: usize, len_bytes: usize) -> Result<()> {
        self.arena.budget.expect(len_bytes as u64)?;
        mem::populate(self.addr(block) + at, len_bytes).map_err(Error::system("bringing in a slab"))?;
        self.arena.settle(self.in_arena(block), 1);
        Ok(())
    }

    /// Gives the memory of one slab of a sparse block back; returns the bytes, `None` where the kernel refuses.
    ///
    /// # Safety
    ///
    /// The slab is the caller's alone, and nobody refers to what is in it.
    pub unsafe fn discard(&self, block: u32, at: usize, len_bytes: usize) -> Option<u64> {
        // SAFETY: the caller's promise.
        unsafe { self.arena.discard_part(self.in_arena(block), self.addr(block) + at, len_bytes) }
    }

    /// Bytes of free blocks that keep their memory.
    pub fn giveable_bytes(&self) -> u64 {
        u64::from(self.filled.load(Relaxed)) * BLOCK_BYTES as u64
    }

    /// Gives memory of free blocks back to the system, up to about `want_bytes`; returns what the kernel took.
    pub fn shrink(&self, want_bytes: u64) -> u64 {
        let mut freed = 0;
        for node in 0..self.arena.nodes.count() {
            while freed < want_bytes {
                let Some(block) = self.free.with(|free| self.pop(&mut free[node].filled)) else { break };
                // SAFETY: a block out of the lists: nobody knows of it.
                let bytes = unsafe { self.arena.discard(self.in_arena(block), 1) };
                if bytes == 0 {
                    // The kernel keeps it (locked memory): so do we.
                    self.free.with(|free| self.push(&mut free[node].filled, block));
                    break;
                }
                self.filled.fetch_sub(1, Relaxed);
                stats::sub(Counter::SlabFree, BLOCK_BYTES as u64);
                freed += bytes;
                self.put_bare(block);
            }
        }
        freed
    }

    /// Bytes charged for a block.
    #[cfg(test)]
    pub fn resident_bytes_of(&self, block: u32) -> u64 {
        Arena::charged_bytes(self.arena.peek(self.in_arena(block)).charged_pages)
    }

    /// Bytes of metadata that are resident.
    pub fn metadata_bytes(&self) -> u64 {
        let each = (0..self.arena.nodes.count()).map(|node| {
            let (first, opened) = (node * self.per_node as usize, self.free.with(|free| free[node].opened) as usize);
            self.blocks.resident_bytes(first, opened) + self.slabs.resident_bytes(first * MAX_SLABS, opened * MAX_SLABS)
        });
        each.sum()
    }

    pub fn acquire_for_fork(&self) {
        self.free.acquire_when(|_| true);
    }

    pub fn release_after_fork(&self) {
        self.free.release();
    }
}
