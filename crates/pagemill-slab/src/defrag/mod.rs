//! Defragmentation of slab caches: choice of slabs to empty, moves of objects, and the background thread.

pub(crate) mod candidates;
pub(crate) mod drain;
pub(crate) mod isolating;
pub(crate) mod migrate;
pub(crate) mod owner;
pub(crate) mod passes;
pub(crate) mod retire_list;
pub(crate) mod rounds;
pub(crate) mod steps;
pub(crate) mod worker;
