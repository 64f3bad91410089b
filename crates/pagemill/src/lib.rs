//! Big, fast memory that gives itself back.
//!
//! A memory manager in user space for data-heavy Linux programs. It consists of the basics ([`units`], [`error`],
//! [`stats`], [`trace`]), the [`arena`] of 2 MiB blocks, memory limits and [`reclaim`], the [`heap`] that serves whole
//! programs under `pagemill run`, [`volatile`] ranges, [`slab`] caches, the page cache ([`mapping`]) with its index
//! ([`xarray`]), and the [`store`]s behind its files.
//!
//! [`Pagemill`] builds and owns all of it. Layers, from bottom to top: `units`, `error`, `trace`, `stats`, `sync`,
//! `epoch`; `arena`; `reclaim`, `xarray`, `store`; `heap`; `volatile`, `mapping`, `slab`. A module uses lower ones
//! only. Where lower code calls upper code, it declares a trait ([`arena::Budget`], [`reclaim::Shrinker`]).

// Loom's atomics cannot lie in memory that is mapped manually: `--cfg loom` builds the slot protocol only.
#[cfg(not(loom))]
mod pagemill;
#[cfg(not(loom))]
mod process;
#[cfg(doctest)]
mod refused;

#[cfg(not(loom))]
pub use error::{Error, Result};
#[cfg(not(loom))]
pub use pagemill::Pagemill;
pub use pagemill_core::sync;
#[cfg(not(loom))]
pub use pagemill_core::{arena, epoch, error, published, reclaim, stats, trace, units};

/// Large allocations: slots of 64 KiB and up.
#[cfg(not(loom))]
pub mod heap {
    pub use pagemill_heap::{Allocation, Heap, MIN_BYTES};
}

/// Files in memory: the page cache.
#[cfg(not(loom))]
pub mod mapping {
    pub use pagemill_cache::mapping::{
        Advice, Cache, Caches, Exclusive, Fetch, Fetched, Holder, MAX_CACHES, Mapping, Pin, Pins, Policy, Queue, Reuse,
        Settings, Source, Usage, Writeback, order, policy,
    };
}

/// Slab caches: objects of one size, which can be moved together.
#[cfg(not(loom))]
pub mod slab {
    pub use pagemill_cache::{NodeCache, Slabs};
    pub use pagemill_slab::{
        ByHandle, ByOwner, CacheKind, Candidates, Done, Fixed, Guard, Handle, MAX_CACHES, Migrate, Movable, Moving,
        New, NodeInfo, Pinned, Progress, Settings, ShrinkReport, SlabInfo, Slot, Target, pin,
    };
}

/// The index of a page cache.
#[cfg(not(loom))]
pub mod xarray {
    pub use pagemill_xarray::{
        Forest, Found, Hit, MAX_INDEX, MAX_ORDER, MAX_VALUE, Mark, NodeStock, Writer, XArray, pin,
    };
}

/// Files, devices and programs behind cached files.
#[cfg(not(loom))]
pub mod store {
    pub use pagemill_store::*;
}

/// Memory whose contents may be purged under pressure.
#[cfg(not(loom))]
pub mod volatile {
    pub use pagemill_volatile::{
        Behaviour, Contents, Listed, MAX_RANGES, Pin, Range, Ranges, VolatileCache, Vranges, c, cache, handle_fault,
        listed, range, vrange,
    };
}

/// Lists and commands between processes.
#[cfg(not(loom))]
pub mod listing {
    pub use pagemill_cache::mapping::ask_for_caches;
    pub use pagemill_core::listing::*;
    pub use pagemill_slab::{ask_for_slabs, shown_name};
    pub use pagemill_volatile::{List, ask};
}
