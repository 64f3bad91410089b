//! Reading of values by handle: epochs, handle tables, and the retirement of values.

pub(crate) mod batch;
pub(crate) mod deferred_drop;
pub(crate) mod epochs;
pub(crate) mod handle;
pub(crate) mod handles;
pub(crate) mod movable;
