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

/// Implements [`Movable`](trait@Movable) for a struct or an enum whose fields are all movable.
#[cfg(all(feature = "derive", not(loom)))]
pub use pagemill_derive::Movable;
#[cfg(not(loom))]
pub use slab::{
    Candidates, Done, FixedSlab, Guard, Handle, HandleMap, InsertError, MAX_CACHES, Migrate, Movable, Moving, New,
    NodeCache, NodeIndex, NodeInfo, NodeMemory, OwnerSlab, Pinned, Progress, Removed, Settings, ShrinkReport,
    SlabCache, SlabInfo, SlabKind, Slabs, Slot, Target, ask_for_slabs, enter, shown_name,
};
