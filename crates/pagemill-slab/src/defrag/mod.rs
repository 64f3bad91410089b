//! Defragmentation of slab caches: choice of slabs to empty, moves of objects, and the background thread.

#[cfg(not(loom))]
pub(crate) mod candidates;
#[cfg(not(loom))]
pub(crate) mod drain;
#[cfg(not(loom))]
pub(crate) mod isolating;
#[cfg(not(loom))]
pub(crate) mod migrate;
#[cfg(not(loom))]
pub(crate) mod owner;
#[cfg(not(loom))]
pub(crate) mod passes;
#[cfg(not(loom))]
pub(crate) mod retire_list;
#[cfg(not(loom))]
pub(crate) mod rounds;
#[cfg(not(loom))]
pub(crate) mod steps;
#[cfg(not(loom))]
pub(crate) mod worker;
