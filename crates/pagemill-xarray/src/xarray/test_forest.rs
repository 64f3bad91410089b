//! Nodes for tests, in memory of their own that is never unmapped.
#![allow(unsafe_code)] // a source of nodes

use super::forest::{Forest, Forests, Source};
use super::node::Node;
use pagemill_core::arena::place;
use pagemill_core::error::{Error, Result};
use pagemill_core::sync::Guarded;
use pagemill_core::units::BLOCK_BYTES;
use pagemill_sys::mem;
use std::ops::Range;
use std::sync::OnceLock;

/// Enough nodes for most tests.
const MANY: usize = 1 << 20;

/// A reserved range of nodes.
struct Row {
    base: usize,
    limit: usize,
    free: Guarded<Free>,
}

#[derive(Default)]
struct Free {
    given: Vec<usize>,
    /// Number of nodes taken so far.
    used: usize,
}

// SAFETY: memory that is mapped for good, zeros at first; each node has one owner at a time.
unsafe impl Source for Row {
    fn window(&self) -> Range<usize> {
        self.base..self.base + self.limit * size_of::<Node>()
    }

    fn take(&self) -> Result<usize> {
        self.free.with(|free| {
            if let Some(node) = free.given.pop() {
                return Ok(node);
            }
            if free.used == self.limit {
                return Err(Error::NoAddresses { wanted_bytes: size_of::<Node>() as u64 });
            }
            free.used += 1;
            Ok(self.base + (free.used - 1) * size_of::<Node>())
        })
    }

    fn give(&self, node: usize) {
        self.free.with(|free| free.given.push(node));
    }

    fn note_retired(&self) {}

    fn is_inherited(&self) -> bool {
        false
    }
}

/// Makes a forest with room for `limit` nodes.
pub(super) fn forest_of(limit: usize) -> &'static Forest {
    // The bytes before the first node are inaccessible.
    let bytes = limit * size_of::<Node>();
    let base = mem::reserve(bytes + BLOCK_BYTES, BLOCK_BYTES, 0).unwrap() + BLOCK_BYTES;
    // SAFETY: a part of that reservation.
    unsafe { mem::open(base, bytes) }.unwrap();
    let row = place(Row { base, limit, free: Guarded::new(Free::default()) }).unwrap();
    place(Forest::new(row).unwrap()).unwrap()
}

/// Makes a forest with room for most tests.
pub(super) fn forest() -> &'static Forest {
    forest_of(MANY)
}

/// The forest of a process without slabs.
#[derive(Default)]
pub struct OneForest(OnceLock<&'static Forest>);

impl Forests for OneForest {
    fn forest(&'static self) -> Result<&'static Forest> {
        Ok(*self.0.get_or_init(forest))
    }

    fn node_bytes(&self) -> u64 {
        self.0.get().map_or(0, |forest| u64::from(forest.in_use()) * size_of::<Node>() as u64)
    }
}
