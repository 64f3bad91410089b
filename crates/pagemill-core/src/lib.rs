//! What all crates of Pagemill share.
//!
//! From bottom to top: [`units`], [`error`], [`trace`], [`stats`], [`sync`], [`epoch`]; statistics as text ([`metrics`]),
//! and the [`arena`] of 2 MiB blocks; memory limits and [`reclaim`]; files with statistics ([`published`]) and answers
//! to other processes ([`listing`]); and the [`instance`] to which products add their parts. A module uses lower ones
//! only. Where it calls upper code, it declares a trait: [`arena::Budget`], [`reclaim::Shrinker`],
//! [`listing::ListWriter`], [`instance::Part`].
//!
//! The crate `pagemill` re-exports items of [`error`], [`metrics`], [`reclaim`], [`stats`] and [`units`]. Examples of
//! these items use its names.

// Loom's atomics cannot lie in memory that is mapped manually: `--cfg loom` builds the lock only.
#[cfg(not(loom))]
pub mod arena;
#[cfg(not(loom))]
pub mod callback;
#[cfg(not(loom))]
pub mod epoch;
#[cfg(not(loom))]
pub mod error;
#[cfg(not(loom))]
pub mod instance;
#[cfg(not(loom))]
pub mod listing;
#[cfg(not(loom))]
pub mod metrics;
#[cfg(not(loom))]
pub mod published;
#[cfg(not(loom))]
pub mod reclaim;
#[cfg(not(loom))]
pub mod stats;
pub mod sync;
#[cfg(not(loom))]
pub mod trace;
#[cfg(not(loom))]
pub mod units;

#[cfg(not(loom))]
pub use error::{Error, Result};
