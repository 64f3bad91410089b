//! Caches of equally sized objects ([`Slabs`]). Movable objects are packed into fewer slabs, so that memory can be
//! returned.
//!
//! All kinds of caches are built on the same allocator (`engine`). Objects of a [`FixedSlab`] cache keep their address
//! until they are dropped. Objects of an [`OwnerSlab`] cache are moved by their owner, which updates all references.
//! Values of a [`HandleMap`] cache are reached through a handle table, so the cache can move them by itself.
//!
//! A cache consists of blocks of 2 MiB (`blocks`), divided into slabs of 16 to 64 KiB (`shape`), whose metadata lies
//! apart (`meta`). A *whole* block is populated and freed as 2 MiB, a *sparse* block slab by slab. A thread allocates
//! and frees through its own magazine (`magazine`, `asymmetric_lock`, `thread_slots`). Magazines are refilled with
//! sheaves from a `barn`, or with objects from the slabs of a `node`, which are set up on demand (`supply`).
//! Defragmentation drains the magazines (`drain`), chooses slabs (`steps`, `passes`, `candidates`), moves objects
//! (`migrate`), and waits for readers (`retire_list`, `batch`, `epochs`). A background thread does this for all caches
//! (`rounds`, `worker`).
//!
//! Uses `arena`, `sync` and `epoch`. Implements `reclaim::Shrinker`. Allocates the nodes of an index (`xnodes`) without
//! a dependency on the index. States, transitions and bounds: docs/slab.md.
//!
//! The crate `pagemill` re-exports what programs use; examples of these items use its names.
//!
//! | folder | contents |
//! |---|---|
//! | `alloc` | blocks, slabs, nodes, magazines |
//! | `read` | values by handle: epochs, handle tables, retirement |
//! | `defrag` | choice of slabs, moves, background thread |
//! | `report` | statistics, commands of other processes |
//! | `caches` | all caches of a process; tests of caches as a whole |

// Loom's atomics cannot lie in memory that is mapped manually: `--cfg loom` builds the words only.
#[cfg(loom)]
#[allow(dead_code)] // the parts that only caches use
mod alloc {
    pub(crate) mod asymmetric_lock;
}
#[cfg(loom)]
#[allow(dead_code)] // the parts that only caches use
mod read {
    pub(crate) mod epochs;
}

#[cfg(not(loom))]
mod alloc;
#[cfg(not(loom))]
mod cache;
#[cfg(not(loom))]
mod caches;
#[cfg(not(loom))]
mod defrag;
#[cfg(not(loom))]
mod insert_error;
#[cfg(not(loom))]
mod kinds;
#[cfg(not(loom))]
mod part;
#[cfg(not(loom))]
mod read;
#[cfg(not(loom))]
mod report;
#[cfg(not(loom))]
mod xnodes;

/// Implements [`Movable`](trait@Movable) for a struct or an enum whose fields are all movable.
#[cfg(all(feature = "derive", not(loom)))]
pub use pagemill_derive::Movable;
#[cfg(not(loom))]
pub use {
    alloc::fixed::{FixedSlab, Slot},
    alloc::settings::Settings,
    alloc::shared::MAX_CACHES,
    cache::SlabKind,
    caches::Slabs,
    defrag::owner::{Candidates, Done, Migrate, Moving, New, OwnerSlab, Target},
    defrag::passes::Progress,
    insert_error::InsertError,
    kinds::SlabCache,
    pagemill_core::listing::ShrinkReport,
    read::epochs::{Guard, enter},
    read::handle::{HandleMap, Pinned, Removed},
    read::handles::Handle,
    read::movable::Movable,
    report::info::{NodeInfo, SlabInfo},
    report::records::{ask_for_slabs, shown_name},
    xnodes::{NodeCache, NodeIndex, NodeMemory},
};
