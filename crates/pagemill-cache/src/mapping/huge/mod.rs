//! Huge folios: collapsing small folios into huge ones, and splitting huge ones.

mod choice;
mod collapse;
mod split;
pub(crate) mod split_sparse;
pub(crate) mod sweep;
pub(crate) mod worker;
