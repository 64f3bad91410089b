//! Allocation of objects: blocks of 2 MiB, slabs, the state of each NUMA node, and the magazines of threads.

pub(crate) mod asymmetric_lock;
pub(crate) mod barn;
pub(crate) mod blocks;
pub(crate) mod debug;
pub(crate) mod engine;
pub(crate) mod fixed;
pub(crate) mod lists;
pub(crate) mod magazine;
pub(crate) mod meta;
pub(crate) mod node;
pub(crate) mod poison;
pub(crate) mod settings;
pub(crate) mod shape;
pub(crate) mod shared;
pub(crate) mod stock;
pub(crate) mod supply;
pub(crate) mod thread_slots;
