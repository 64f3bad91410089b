//! Caches of equally sized objects ([`Slabs`]). Movable objects are packed into fewer slabs, so that memory can be
//! returned.
//!
//! Uses `pagemill-core`. The crate `pagemill` re-exports what programs use.

// Loom's atomics cannot lie in memory that is mapped manually: `--cfg loom` builds the words only.
#[cfg(not(loom))]
mod slab;
#[cfg(all(loom, test))]
mod slab {
    mod asymmetric_lock;
    #[allow(dead_code)] // the parts that only caches use
    mod epochs;
}

#[cfg(not(loom))]
pub use slab::{
    ByHandle, ByOwner, CacheKind, Candidates, Done, Fixed, Guard, Handle, InsertError, MAX_CACHES, Migrate, Movable,
    Moving, New, NodeCache, NodeIndex, NodeInfo, NodeMemory, Pinned, Progress, Removed, Settings, ShrinkReport,
    SlabCache, SlabInfo, Slabs, Slot, Target, ask_for_slabs, enter, shown_name,
};
