//! Nodes for tests: in memory of their own, which stays.
#![allow(unsafe_code)] // a source of nodes

use super::forest::{Forest, Forests, Source};
use super::node::Node;
use crate::arena::place;
use crate::error::{Error, Result};
use crate::sync::Guarded;
use crate::units::BLOCK_BYTES;
use pagemill_sys::mem;
use std::ops::Range;
use std::sync::OnceLock;

/// Nodes mostly enough for a test.
const MANY: usize = 1 << 20;

/// A row of nodes.
struct Row {
    base: usize,
    limit: usize,
    free: Guarded<Free>,
}

#[derive(Default)]
struct Free {
    given: Vec<usize>,
    /// Nodes that have been taken.
    used: usize,
}

// SAFETY: memory that is mapped for good, zeros at first; each node is taken by one at a time.
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

/// A forest with room for so many nodes.
pub(super) fn forest_of(limit: usize) -> &'static Forest {
    // What lies before the first node cannot be reached.
    let bytes = limit * size_of::<Node>();
    let base = mem::reserve(bytes + BLOCK_BYTES, BLOCK_BYTES, 0).unwrap() + BLOCK_BYTES;
    // SAFETY: of that reservation.
    unsafe { mem::open(base, bytes) }.unwrap();
    let row = place(Row { base, limit, free: Guarded::new(Free::default()) }).unwrap();
    place(Forest::new(row).unwrap()).unwrap()
}

/// One with room for what a test needs.
pub(super) fn forest() -> &'static Forest {
    forest_of(MANY)
}

/// The forest of a process without slabs.
#[derive(Default)]
pub(crate) struct OneForest(OnceLock<&'static Forest>);

impl Forests for OneForest {
    fn forest(&'static self) -> Result<&'static Forest> {
        Ok(*self.0.get_or_init(forest))
    }

    fn node_bytes(&self) -> u64 {
        self.0.get().map_or(0, |forest| u64::from(forest.in_use()) * size_of::<Node>() as u64)
    }
}
