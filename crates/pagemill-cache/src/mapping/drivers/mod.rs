//! Drivers of read requests: the calling thread, a queue of one thread, futures, and readahead.

mod blocking;
mod completions;
mod future;
pub(crate) mod queue;
pub(crate) mod readahead;
mod registration;
pub(crate) mod streams;
