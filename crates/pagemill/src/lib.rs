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
mod folio;
#[cfg(all(loom, test))]
#[path = "folio/word.rs"]
#[allow(dead_code)] // the parts that only folios use
mod folio_word;
#[cfg(not(loom))]
pub mod mapping;
#[cfg(not(loom))]
mod pagemill;
#[cfg(not(loom))]
mod process;
#[cfg(doctest)]
mod refused;
#[cfg(not(loom))]
pub mod slab;
#[cfg(all(loom, test))]
#[path = "slab/asymmetric_lock.rs"]
mod slab_asymmetric_lock;
#[cfg(all(loom, test))]
#[path = "slab/epochs.rs"]
#[allow(dead_code)] // the parts that only caches use
mod slab_epochs;
#[cfg(not(loom))]
pub mod volatile;
#[cfg(all(loom, test))]
#[path = "volatile/word.rs"]
#[allow(dead_code)] // the parts that only the ranges use
mod word;

#[cfg(not(loom))]
pub use error::{Error, Result};
#[cfg(not(loom))]
pub use pagemill::Pagemill;
#[cfg(not(loom))]
use pagemill_core::callback;
pub use pagemill_core::sync;
#[cfg(not(loom))]
pub use pagemill_core::{arena, epoch, error, published, reclaim, stats, trace, units};

/// Large allocations: slots of 64 KiB and up.
#[cfg(not(loom))]
pub mod heap {
    pub use pagemill_heap::{Allocation, Heap, MIN_BYTES};
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

/// Lists and commands between processes.
#[cfg(not(loom))]
pub mod listing {
    pub use crate::mapping::ask_for_caches;
    pub use crate::slab::{ask_for_slabs, shown_name};
    pub use crate::volatile::{List, ask};
    pub use pagemill_core::listing::*;
}
