//! Runs the tests of other files with caches in shared memory.
#![allow(clippy::duplicate_mod)] // the files have helper modules in common

#[path = "ahead.rs"]
mod ahead;
#[path = "asynchronous.rs"]
mod asynchronous;
#[path = "mapping.rs"]
mod mapping;
#[path = "mapping_hints.rs"]
mod mapping_hints;
#[path = "mapping_sparse.rs"]
mod mapping_sparse;
#[path = "mapping_threads.rs"]
mod mapping_threads;
#[path = "queue.rs"]
mod queue;
#[path = "queue_memory.rs"]
mod queue_memory;
#[path = "store.rs"]
mod store;
#[path = "store_races.rs"]
mod store_races;
#[path = "writeback.rs"]
mod writeback;
