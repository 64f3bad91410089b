//! Allocation of objects: blocks of 2 MiB, slabs, the state of each NUMA node, and the magazines of threads.

pub(crate) mod asymmetric_lock;
#[cfg(not(loom))]
pub(crate) mod barn;
#[cfg(not(loom))]
pub(crate) mod blocks;
#[cfg(not(loom))]
pub(crate) mod debug;
#[cfg(not(loom))]
pub(crate) mod engine;
#[cfg(not(loom))]
pub(crate) mod fixed;
#[cfg(not(loom))]
pub(crate) mod lists;
#[cfg(not(loom))]
pub(crate) mod magazine;
#[cfg(not(loom))]
pub(crate) mod meta;
#[cfg(not(loom))]
pub(crate) mod node;
#[cfg(not(loom))]
pub(crate) mod poison;
#[cfg(not(loom))]
pub(crate) mod settings;
#[cfg(not(loom))]
pub(crate) mod shape;
#[cfg(not(loom))]
pub(crate) mod shared;
#[cfg(not(loom))]
pub(crate) mod stock;
#[cfg(not(loom))]
pub(crate) mod supply;
#[cfg(not(loom))]
pub(crate) mod thread_slots;
