//! Statistics of slab caches, and commands of other processes on slab caches.

#[cfg(not(loom))]
#[cfg(feature = "control")]
pub(crate) mod control;
#[cfg(not(loom))]
pub(crate) mod debug_text;
#[cfg(not(loom))]
pub(crate) mod info;
#[cfg(not(loom))]
pub(crate) mod records;
