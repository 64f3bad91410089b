//! Drivers of read requests: a queue of one thread, futures, and readahead.

mod completions;
mod future;
pub(crate) mod queue;
pub(crate) mod readahead;
mod registration;
pub(crate) mod streams;
