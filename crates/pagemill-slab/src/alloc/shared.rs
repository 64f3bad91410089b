//! State that all slab caches share: blocks, cache ids, the memory of magazines and barns, unused handle tables.

use crate::alloc::asymmetric_lock::Barriers;
use crate::alloc::barn::{BARNS_PER_NODE, BarnMemory};
use crate::alloc::blocks::Blocks;
use crate::alloc::magazine::MagazineRange;
use crate::defrag::worker::Worker;
use crate::read::handles::HandleTable;
use pagemill_core::arena::{Arena, place};
use pagemill_core::error::{Error, Result};
use pagemill_core::sync::Guarded;

/// Maximum number of slab caches of a process at a time. The count includes the cache of index nodes and, in a fork
/// child, the caches of the parent. Each cache reserves addresses for the magazines of all threads (32 MiB of addresses
/// if available). One more cache fails with [`Error::TooMany`].
pub const MAX_CACHES: usize = 1 << 10;

/// The ids of slab caches that are in use. A cache that could not be closed, or that belongs to the parent process,
/// keeps its id.
pub(crate) struct CacheIds {
    /// For each id of a slab cache, whether it is in use.
    pub are_taken: [bool; MAX_CACHES],
    /// The magazine range of each id that was ever in use. The memory for the barns of each of these ids is accessible,
    /// too.
    pub ranges: Vec<&'static MagazineRange>,
}

/// State that all slab caches share, created with the first cache. The cache of index nodes has another `SharedState`,
/// with blocks of its own.
pub(crate) struct SharedState {
    /// State of the background thread, which serves all slab caches.
    pub worker: &'static Worker,
    pub blocks: Blocks,
    /// The kind of memory barriers with which threads enter and drain magazines. It depends on the kernel.
    pub barriers: Barriers,
    /// The memory of the barns of all cache ids.
    pub barn_memory: &'static BarnMemory,
    pub ids: &'static Guarded<CacheIds>,
    /// Handle tables that no cache uses.
    pub free_handle_tables: Guarded<Vec<&'static HandleTable>>,
}

impl SharedState {
    pub fn new(arena: &'static Arena, worker: &'static Worker, barriers: Barriers) -> Result<Self> {
        Ok(Self {
            worker,
            blocks: Blocks::new(arena)?,
            barriers,
            barn_memory: place(BarnMemory::new(MAX_CACHES * arena.nodes.count() * BARNS_PER_NODE)?)?,
            ids: place(Guarded::new(CacheIds { are_taken: [false; MAX_CACHES], ranges: Vec::new() }))?,
            free_handle_tables: Guarded::new(Vec::new()),
        })
    }

    /// Creates the shared state for the cache of index nodes. It has blocks and handle tables of its own, and
    /// everything else in common with `self`.
    pub fn for_metadata(&self) -> Result<Self> {
        let (blocks, free_handle_tables) = (Blocks::for_metadata(self.blocks.arena)?, Guarded::new(Vec::new()));
        Ok(Self { blocks, free_handle_tables, ..*self })
    }

    /// Allocates the lowest free cache id, and makes its magazine range and barns usable.
    ///
    /// # Errors
    ///
    /// [`Error::TooMany`], [`Error::System`].
    pub fn take_id(&self) -> Result<usize> {
        self.ids.with(|ids| {
            let free = ids.are_taken.iter().position(|is_taken| !is_taken);
            let id = free.ok_or(Error::TooMany { what: "slab caches", most: MAX_CACHES })?;
            if id == ids.ranges.len() {
                // After an error, a retry opens the same barns again, which has no effect if they are open.
                let barns = self.barns_per_cache();
                self.barn_memory.open(id * barns, barns)?;
                ids.ranges.push(Box::leak(Box::new(MagazineRange::new()?)));
            }
            ids.are_taken[id] = true;
            Ok(id)
        })
    }

    /// Returns the magazine range of a cache id in use.
    pub fn range(&self, id: usize) -> &'static MagazineRange {
        self.ids.with(|ids| ids.ranges[id])
    }

    /// Returns the number of barns of one cache, on all NUMA nodes.
    pub fn barns_per_cache(&self) -> usize {
        self.blocks.arena.nodes.count() * BARNS_PER_NODE
    }

    /// Returns the resident bytes of the magazines and barns of all caches.
    pub fn resident_bytes(&self) -> u64 {
        let of_magazines =
            |ids: &mut CacheIds| (ids.ranges.len(), ids.ranges.iter().map(|range| range.resident_bytes()).sum::<u64>());
        let (caches, bytes) = self.ids.with(of_magazines);
        bytes + self.barn_memory.resident_bytes(caches * self.barns_per_cache())
    }

    /// Returns an unused handle table, or creates one.
    pub fn take_handle_table(&self) -> Result<&'static HandleTable> {
        self.free_handle_tables.with(Vec::pop).map_or_else(HandleTable::new_static, Ok)
    }

    /// Makes a handle table available to later caches. No handle of the table may refer to a value any more.
    pub fn return_handle_table(&self, handles: &'static HandleTable) {
        self.free_handle_tables.with(|free| free.push(handles));
    }

    /// Makes a cache id available again.
    pub fn free_id(&self, id: usize) {
        self.ids.with(|ids| ids.are_taken[id] = false);
    }
}
