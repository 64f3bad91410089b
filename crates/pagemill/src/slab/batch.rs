//! Emptied places wait for readers: what was moved away stays as it is until nobody can be at it any more.
//!
//! One step of defragmentation makes one batch, and waits for one grace period ([`crate::xarray::pin`]), however many slabs it
//! emptied. Until then its slabs are claimed: nothing new comes into them.

use super::engine::Engine;
use super::meta::{Objects, State};
use crate::error::Result;
use crate::sync::{Acquire, Patience, Release};
use crate::xarray;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Who wants memory back waits so long for readers.
pub(super) const GRACE_NS: u64 = 1_000_000_000;

/// What is to be ended with a slab, a block, when readers have gone.
pub(super) enum Left {
    /// Objects that were moved away, and the slab, which is claimed.
    Slab { node: usize, block: u32, slab: u32, objects: Objects },
    /// A block that was being emptied; after its slabs.
    Block { node: usize, block: u32 },
}

pub(super) struct Batch {
    left: Vec<Left>,
    /// Nobody reads there any more.
    is_ripe: Arc<AtomicBool>,
}

impl Engine {
    /// Ends a step: what it emptied comes back when readers have gone.
    pub fn retire(&self, left: Vec<Left>) {
        if left.is_empty() {
            return;
        }
        let is_ripe = Arc::new(AtomicBool::new(false));
        self.batches.with(|batches| batches.push(Batch { left, is_ripe: is_ripe.clone() }));
        let guard = xarray::pin();
        guard.defer(move || is_ripe.store(true, Release));
        guard.flush();
    }

    /// Takes back what no reader can be at any more.
    pub fn settle(&self) {
        let ripe: Vec<Batch> = self.batches.with(|batches| {
            let is_ripe = |batch: &mut Batch| batch.is_ripe.load(Acquire);
            batches.extract_if(.., is_ripe).collect()
        });
        ripe.into_iter().flat_map(|batch| batch.left).for_each(|left| self.end(left));
    }

    fn end(&self, left: Left) {
        match left {
            Left::Slab { node, block, slab, objects } => {
                let base = self.ground.blocks.addr(block);
                let objects = || objects.iter().map(|object| base + self.shape.offset_of(slab, object));
                if let Some(checks) = &self.checks {
                    objects().for_each(|object| checks.note_given(object));
                }
                self.on(node, |node| {
                    objects().for_each(|object| node.give(object));
                    if node.blocks.slab(block, slab).state() == State::Claimed {
                        node.open(block, slab);
                    }
                });
            }
            Left::Block { node, block } => self.on(node, |node| node.return_block(block)),
        }
    }

    pub fn has_batches(&self) -> bool {
        self.batches.with(|batches| !batches.is_empty())
    }

    /// Waits until all that was emptied is back, a second at most; says whether it is.
    pub fn settle_all(&self) -> Result<bool> {
        self.check()?;
        let mut patience = Patience::new();
        loop {
            self.settle();
            let is_done = !self.has_batches();
            if is_done || patience.waited_ns() > GRACE_NS {
                return Ok(is_done);
            }
            // Each goes an epoch on, if nobody is behind.
            xarray::pin().flush();
            patience.pause();
        }
    }
}
