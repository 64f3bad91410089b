//! Reading of values by handle: epochs, handle tables, and the retirement of values.

#[cfg(not(loom))]
pub(crate) mod batch;
#[cfg(not(loom))]
pub(crate) mod deferred_drop;
pub(crate) mod epochs;
#[cfg(not(loom))]
pub(crate) mod handle;
#[cfg(not(loom))]
pub(crate) mod handles;
#[cfg(not(loom))]
pub(crate) mod movable;
