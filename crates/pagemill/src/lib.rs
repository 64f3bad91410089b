//! A memory manager in user space for data-heavy Linux programs: huge pages, and free memory that returns to the
//! system.
//!
//! It consists of the basics ([`units`], [`error`], [`stats`], [`trace`]), the [`arena`] of 2 MiB blocks, memory limits
//! and [`reclaim`], the [`heap`] that serves whole programs under `pagemill run`, [`volatile`] ranges, [`slab`] caches,
//! the page cache ([`mapping`]) with its index ([`xarray`]), and the [`store`]s behind its files.
//!
//! [`Pagemill`] builds and owns all of it. Layers, from bottom to top: `units`, `error`, `trace`, `stats`, `sync`,
//! `epoch`; `arena`; `reclaim`, `xarray`, `store`; `heap`; `volatile`, `mapping`, `slab`. A module uses lower ones
//! only. Where lower code calls upper code, it declares a trait ([`arena::Budget`], [`reclaim::Shrinker`]).

// `--cfg loom` builds the state words only, because loom's atomics cannot lie in memory that is mapped manually.
#[cfg(not(loom))]
pub mod arena;
#[cfg(not(loom))]
mod callback;
#[cfg(not(loom))]
pub mod epoch;
#[cfg(not(loom))]
pub mod error;
#[cfg(not(loom))]
mod folio;
#[cfg(all(loom, test))]
#[path = "folio/word.rs"]
#[allow(dead_code)] // the parts that only folios use
mod folio_word;
#[cfg(not(loom))]
pub mod heap;
#[cfg(not(loom))]
pub mod listing;
#[cfg(not(loom))]
pub mod mapping;
#[cfg(not(loom))]
mod pagemill;
#[cfg(not(loom))]
mod process;
#[cfg(not(loom))]
pub mod published;
#[cfg(not(loom))]
pub mod reclaim;
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
#[cfg(all(loom, test))]
#[path = "heap/slot.rs"]
#[allow(dead_code)] // the parts that only the heap uses
mod slot;
#[cfg(not(loom))]
pub mod stats;
#[cfg(not(loom))]
pub mod store;
pub mod sync;
#[cfg(not(loom))]
pub mod trace;
#[cfg(not(loom))]
pub mod units;
#[cfg(not(loom))]
pub mod volatile;
#[cfg(all(loom, test))]
#[path = "volatile/word.rs"]
#[allow(dead_code)] // the parts that only the ranges use
mod word;
#[cfg(not(loom))]
pub mod xarray;
#[cfg(all(loom, test))]
mod xarray {
    #[allow(dead_code)] // the parts that only the tree uses
    mod slots;
    #[allow(dead_code)]
    mod word;
}

#[cfg(not(loom))]
pub use error::{Error, Result};
#[cfg(not(loom))]
pub use pagemill::Pagemill;
