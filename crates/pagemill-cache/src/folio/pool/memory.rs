//! The memory of a pool: private memory, reserved huge pages (hugetlb), or a memory file that other addresses can map.
//!
//! A pool keeps its kind of memory when it serves a later cache. The memory file of a pool covers all of its address
//! range: the byte at offset N of the file is the byte N of the range.
#![allow(unsafe_code)] // makes chunks resident, returns them

use super::Pool;
use pagemill_core::arena::{Arena, Reserve};
use pagemill_core::error::{Error, Result};
use pagemill_core::sync::Relaxed;
use pagemill_sys::memory_file::MemoryFile;
use std::sync::atomic::AtomicU8;

/// The kind of memory that a new pool gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryKind {
    Private,
    Hugetlb,
    Shared,
}

/// The kind of a pool's memory, and its state.
pub(super) enum PoolMemory {
    Private,
    /// Reserved huge pages. The state is [`RESERVE_CLOSED`] (initially), [`RESERVE_PLACED`] or [`RESERVE_LOST`].
    /// Changed only under `Caches::users`.
    Hugetlb(AtomicU8),
    /// A memory file, mapped at all of the pool's addresses.
    Shared(MemoryFile),
}

/// State of a pool over reserved huge pages: no pages are placed in its address range.
const RESERVE_CLOSED: u8 = 0;
/// State of a pool over reserved huge pages: the pages back all of its address range.
const RESERVE_PLACED: u8 = 1;
/// State of a pool over reserved huge pages: the kernel failed while it placed or removed the pages. The pool's
/// addresses may belong to another mapping.
const RESERVE_LOST: u8 = 2;

impl PoolMemory {
    /// Creates the memory of a pool of `len_bytes`, without addresses.
    pub fn new(kind: MemoryKind, arena: &Arena, len_bytes: usize) -> Result<Self> {
        match kind {
            MemoryKind::Private => Ok(Self::Private),
            MemoryKind::Hugetlb => Ok(Self::Hugetlb(AtomicU8::new(RESERVE_CLOSED))),
            MemoryKind::Shared => MemoryFile::create(len_bytes, arena.uses_huge())
                .map(Self::Shared)
                .map_err(Error::system("creating a file for shared memory")),
        }
    }

    /// Maps a memory file at the pool's address range, which begins at `base`.
    ///
    /// # Safety
    ///
    /// The address range belongs to the caller, and was carved closed and never opened.
    pub unsafe fn place(&self, arena: &'static Arena, base: usize, node: usize) -> Result<()> {
        match self {
            // SAFETY: guaranteed by the caller.
            Self::Shared(file) => unsafe { arena.map_shared(file, base, node) },
            Self::Private | Self::Hugetlb(_) => Ok(()),
        }
    }

    /// In a fork child: releases the file, which would keep the memory of the parent.
    pub fn begin_child(&self) {
        if let Self::Shared(file) = self {
            file.begin_child();
        }
    }
}

impl Pool {
    /// Returns the kind of the pool's memory.
    pub fn kind(&self) -> MemoryKind {
        match self.memory {
            PoolMemory::Private => MemoryKind::Private,
            PoolMemory::Hugetlb(_) => MemoryKind::Hugetlb,
            PoolMemory::Shared(_) => MemoryKind::Shared,
        }
    }

    /// Returns whether the pool's memory consists of reserved huge pages. [`Pool::place_hugetlb`] maps all of them into
    /// the pool at once, and [`Pool::return_hugetlb`] returns all of them. In between the pool returns none to the
    /// system.
    ///
    /// Without the feature `hugetlb` the result is always false, so the compiler removes the code that depends on it.
    pub fn is_hugetlb(&self) -> bool {
        cfg!(feature = "hugetlb") && matches!(self.memory, PoolMemory::Hugetlb(_))
    }

    /// Returns the pool's memory file, if its memory is shared.
    pub fn memory_file(&self) -> Option<&MemoryFile> {
        if let PoolMemory::Shared(file) = &self.memory { Some(file) } else { None }
    }

    /// Prepares [`Pool::view_source`].
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] if the pool's memory is not shared. [`Error::System`].
    pub fn prepare_views(&self) -> Result<()> {
        /// Maximum number of pages that the entries of views can name.
        const MAX_PAGES: u64 = 1 << 30;
        let Some(file) = self.memory_file() else {
            return Err(Error::Unsupported { what: "views need a cache with shared memory (Source::Shared)" });
        };
        if self.max_bytes() >> self.page_shift > MAX_PAGES {
            return Err(Error::Unsupported { what: "views of a cache with more than 2^30 pages; use larger pages" });
        }
        file.readable_mapping(self.arena.uses_huge()).map_err(Error::system("mapping shared memory")).map(drop)
    }

    /// Returns an address of the bytes of page `number` that views map again ([`pagemill_sys::window::map_again`]); the
    /// copy has the access of that address. `None` if the memory is not shared.
    pub fn view_source(&self, number: u32, is_writable: bool) -> Option<usize> {
        let file = self.memory_file()?;
        if is_writable {
            return Some(self.addr(number));
        }
        // Exists already (`prepare_views`).
        file.readable_mapping(self.arena.uses_huge()).ok().map(|base| base + self.addr(number) - self.base)
    }

    /// Called after a copy from page `number` that was not valid: the chunk may have been returned to the system before
    /// the copy, which has then allocated shared memory again.
    #[cold]
    pub fn note_invalid_copy(&self, number: u32) {
        if self.memory_file().is_some() {
            let (first, count) = self.blocks_of(number >> self.chunk_order);
            (first..first + count).for_each(|block| self.arena.punch_if_empty(block));
        }
    }

    /// Returns whether the pool's addresses are opened in steps, as chunks come into use.
    pub(super) fn is_opened_in_steps(&self) -> bool {
        matches!(self.memory, PoolMemory::Private)
    }

    /// Returns whether fork children never inherit the pool's memory.
    pub fn is_kept_from_children(&self) -> bool {
        self.is_hugetlb() || self.memory_file().is_some()
    }

    /// Makes blocks resident, with huge pages if wanted and available.
    ///
    /// # Errors
    ///
    /// If the process gets no memory; the blocks are empty then.
    ///
    /// # Safety
    ///
    /// The blocks are those of a chunk of this pool that this thread has claimed, and that is empty.
    pub(super) unsafe fn populate(&self, first_block: usize, blocks: usize, use_huge: bool) -> Result<()> {
        match &self.memory {
            PoolMemory::Hugetlb(_) => self.arena.populate_reserved(first_block, blocks),
            // SAFETY: guaranteed by the caller.
            PoolMemory::Private => unsafe { self.arena.populate_blocks(first_block, blocks, use_huge) }.map(drop),
            // SAFETY: guaranteed by the caller. The file is mapped at all blocks of the pool.
            PoolMemory::Shared(_) => unsafe { self.arena.populate_shared(first_block, blocks, use_huge) }.map(drop),
        }
    }

    /// As [`Pool::populate`], for blocks that will be needed soon. Returns false, and does nothing, if there is no room
    /// without reclaim.
    ///
    /// # Safety
    ///
    /// As [`Pool::populate`].
    pub(super) unsafe fn populate_ahead(&self, first_block: usize, blocks: usize, use_huge: bool) -> bool {
        match &self.memory {
            PoolMemory::Hugetlb(_) => unreachable!("reserved huge pages are resident"),
            // SAFETY: guaranteed by the caller.
            PoolMemory::Private => unsafe { self.arena.populate_blocks_ahead(first_block, blocks, use_huge) },
            // SAFETY: guaranteed by the caller. The file is mapped at all blocks of the pool.
            PoolMemory::Shared(_) => unsafe { self.arena.populate_shared_ahead(first_block, blocks, use_huge) },
        }
    }

    /// Returns blocks to the system. Returns the number of bytes that the kernel freed.
    ///
    /// # Safety
    ///
    /// The blocks are those of a chunk of this pool that is in no list. Nothing refers to their bytes, and the contents
    /// are not needed.
    pub(super) unsafe fn discard(&self, first_block: usize, blocks: usize) -> u64 {
        debug_assert!(!self.is_hugetlb(), "reserved huge pages are returned together");
        match &self.memory {
            // SAFETY: guaranteed by the caller.
            PoolMemory::Shared(_) => unsafe { self.arena.discard_shared(first_block, blocks) },
            // SAFETY: guaranteed by the caller.
            _ => unsafe { self.arena.discard(first_block, blocks) },
        }
    }

    /// Returns whether this is a pool over reserved huge pages in which no pages are placed, and none were lost.
    pub fn is_closed(&self) -> bool {
        self.reserve_state().is_some_and(|state| state.load(Relaxed) == RESERVE_CLOSED)
    }

    /// Returns the state of a pool over reserved huge pages.
    fn reserve_state(&self) -> Option<&AtomicU8> {
        if let PoolMemory::Hugetlb(state) = &self.memory { Some(state) } else { None }
    }

    /// Places reserved huge pages at the whole address range.
    ///
    /// # Errors
    ///
    /// [`Error::System`]: the pool is unusable from then on.
    ///
    /// # Panics
    ///
    /// If the pool is not closed, or if `pages` differs from the pool in length.
    pub fn place_hugetlb(&self, pages: Reserve) -> Result<()> {
        assert!(self.is_closed());
        assert_eq!(pages.len_bytes() as u64, self.max_bytes());
        let Some(reserve) = self.reserve_state() else { return Ok(()) };
        reserve.store(RESERVE_LOST, Relaxed);
        // SAFETY: the pool owns the address range, and nothing is mapped there (closed).
        unsafe { self.arena.place_hugetlb(pages, self.base, self.node) }?;
        reserve.store(RESERVE_PLACED, Relaxed);
        Ok(())
    }

    /// Returns the reserved huge pages to the system if no page of the pool is in use or leased. Otherwise does
    /// nothing.
    pub fn return_hugetlb(&self) {
        let Some(reserve) = self.reserve_state().filter(|state| state.load(Relaxed) == RESERVE_PLACED) else {
            return;
        };
        let is_empty = self.with_state(|state| {
            // Leased chunks are not taken.
            while let Some(number) = state.buddies.take_free_chunk(&self.frames) {
                let chunk = number >> self.chunk_order;
                state.buddies.leases.note_filled(chunk, false);
                self.filled_chunks.fetch_sub(1, Relaxed);
                self.push_empty_chunk(state, chunk);
            }
            self.filled_chunks.load(Relaxed) == 0 && state.chunks_in_transit == 0
        });
        if is_empty {
            // SAFETY: all chunks are out of the free lists, and none is being brought in. So nothing refers to their
            // bytes, including the kernel's rings.
            let ended = unsafe { self.arena.return_hugetlb(self.base, self.max_chunks as usize * self.chunk_bytes) };
            reserve.store(if ended.is_ok() { RESERVE_CLOSED } else { RESERVE_LOST }, Relaxed);
        }
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use crate::mapping::{PageCache, Source};
    use crate::test_process;
    use pagemill_core::units::BLOCK_BYTES;
    use pagemill_sys::mem;

    /// A chunk of shared memory is returned, and then read, as by a copy that began before. That allocates memory. After
    /// the copy was found invalid, the chunk must have no memory again. A chunk in use must keep its bytes.
    #[test]
    fn memory_that_a_late_copy_allocates_is_returned() {
        let caches = test_process::caches();
        let builder = PageCache::builder("late").limit(8 << 20).source(Source::Shared);
        let cache = builder.build_in(caches).unwrap();
        let file = cache.create().unwrap();
        file.write_at(&vec![7; BLOCK_BYTES], 0).unwrap();
        let (pool, addr) = (cache.0.pool, file.pin(0).unwrap().as_ptr() as usize);
        let number = ((addr - pool.addr(0)) >> pool.page_shift) as u32;
        pool.note_invalid_copy(number);
        assert_eq!(mem::resident_bytes(addr, BLOCK_BYTES).unwrap(), BLOCK_BYTES);
        file.truncate(0).unwrap();
        cache.shrink();
        assert_eq!(mem::resident_bytes(addr, BLOCK_BYTES).unwrap(), 0);
        // SAFETY: the address is mapped, and no other thread writes there.
        assert_eq!(unsafe { (addr as *const u8).read_volatile() }, 0);
        assert!(mem::resident_bytes(addr, BLOCK_BYTES).unwrap() > 0);
        pool.note_invalid_copy(number);
        assert_eq!(mem::resident_bytes(addr, BLOCK_BYTES).unwrap(), 0);
    }
}
