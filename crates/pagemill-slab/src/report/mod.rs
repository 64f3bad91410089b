//! Statistics of slab caches, and commands of other processes on slab caches.

#[cfg(feature = "control")]
pub(crate) mod control;
pub(crate) mod debug_text;
pub(crate) mod info;
pub(crate) mod records;
