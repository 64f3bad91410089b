//! Forests of nodes for tests, in memory that is never freed.
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
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

/// Maximum number of nodes in a forest for most tests.
const DEFAULT_NODE_LIMIT: usize = 1 << 20;

/// A reserved range of addresses for nodes, which is the source of a forest.
struct NodeRange {
    base: usize,
    limit: usize,
    free: Guarded<FreeNodes>,
    /// Whether no node can be allocated ([`OneForest::refuse_nodes`]).
    refuses: AtomicBool,
}

#[derive(Default)]
/// The nodes of a [`NodeRange`] that are not in use.
struct FreeNodes {
    freed: Vec<usize>,
    /// Number of nodes that were allocated at least once: the first nodes of the range.
    allocated: usize,
}

// SAFETY: the memory stays mapped forever and is zeroed at first. Each node has one owner at a time.
unsafe impl Source for NodeRange {
    fn window(&self) -> Range<usize> {
        self.base..self.base + self.limit * size_of::<Node>()
    }

    fn take(&self) -> Result<usize> {
        if self.refuses.load(SeqCst) {
            return Err(Error::NoAddresses { wanted_bytes: size_of::<Node>() as u64 });
        }
        self.free.with(|free| {
            if let Some(node) = free.freed.pop() {
                return Ok(node);
            }
            if free.allocated == self.limit {
                return Err(Error::NoAddresses { wanted_bytes: size_of::<Node>() as u64 });
            }
            free.allocated += 1;
            Ok(self.base + (free.allocated - 1) * size_of::<Node>())
        })
    }

    fn give(&self, node: usize) {
        self.free.with(|free| free.freed.push(node));
    }

    fn note_retired(&self) {}

    fn is_inherited(&self) -> bool {
        false
    }
}

/// Creates a source of up to `limit` nodes.
fn range_of(limit: usize) -> &'static NodeRange {
    // The bytes before the first node are inaccessible.
    let bytes = limit * size_of::<Node>();
    let base = mem::reserve(bytes + BLOCK_BYTES, BLOCK_BYTES, 0).unwrap() + BLOCK_BYTES;
    // SAFETY: the range is a part of the reservation above.
    unsafe { mem::open(base, bytes) }.unwrap();
    place(NodeRange { base, limit, free: Guarded::new(FreeNodes::default()), refuses: AtomicBool::new(false) }).unwrap()
}

/// Creates a forest that can have up to `limit` nodes.
#[cfg(test)]
pub(super) fn forest_of(limit: usize) -> &'static Forest {
    place(Forest::new(range_of(limit)).unwrap()).unwrap()
}

/// Creates a forest that can have enough nodes for most tests.
#[cfg(all(test, not(shuttle)))]
pub(super) fn forest() -> &'static Forest {
    forest_of(DEFAULT_NODE_LIMIT)
}

/// The only forest of a test process that has no slab caches.
///
/// Example: [`XArray`](super::XArray).
#[derive(Default)]
pub struct OneForest(OnceLock<(&'static NodeRange, &'static Forest)>);

impl OneForest {
    fn made(&self) -> (&'static NodeRange, &'static Forest) {
        *self.0.get_or_init(|| {
            let range = range_of(DEFAULT_NODE_LIMIT);
            (range, place(Forest::new(range).unwrap()).unwrap())
        })
    }

    /// Sets whether each allocation of a node fails from now on, as if no memory were left.
    pub fn refuse_nodes(&self, refuses: bool) {
        self.made().0.refuses.store(refuses, SeqCst);
    }
}

impl Forests for OneForest {
    fn forest(&'static self) -> Result<&'static Forest> {
        Ok(self.made().1)
    }

    fn node_bytes(&self) -> u64 {
        self.0.get().map_or(0, |(_, forest)| u64::from(forest.in_use()) * size_of::<Node>() as u64)
    }
}
