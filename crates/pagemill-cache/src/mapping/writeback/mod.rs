//! Writeback: the dirty folios of files, and writing them to the stores.

pub(crate) mod dirty;
pub(crate) mod flush;
pub(crate) mod sync;
mod throttle;
pub(crate) mod walk;
