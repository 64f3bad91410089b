//! Emptied places wait for readers: what was moved away stays as it is until nobody can be at it any more.
//!
//! One step of defragmentation makes one batch, and waits for one grace period ([`Grace`]), however many slabs it
//! emptied. Until then its slabs are claimed: nothing new comes into them.

use super::engine::Engine;
use super::meta::{Objects, State};
use super::node::Keep;
use super::readers::{self, Moment};
use crate::epoch;
use crate::error::Result;
use crate::sync::{Acquire, Patience, Release};
use std::collections::VecDeque;
use std::collections::vec_deque::Drain;
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

/// Looks again and again whether readers have gone, as `have_gone` says, and has them go; for so long at most. Says whether they have.
pub(super) fn wait_for_readers(most_ns: u64, mut have_gone: impl FnMut() -> bool) -> bool {
    let mut patience = Patience::new();
    loop {
        if have_gone() {
            return true;
        }
        if patience.waited_ns() > most_ns {
            return false;
        }
        // Each goes an epoch on, if nobody is behind.
        epoch::pin().flush();
        patience.pause();
    }
}

pub(super) struct Batch {
    left: Vec<Left>,
    grace: Grace,
    /// When it is back there is more room than before, or something to go on with.
    is_news: bool,
}

/// Until who reads now has gone.
pub(super) struct Grace {
    /// Of readers under [`super::pin`].
    moment: Moment,
    /// Of readers under [`crate::epoch::pin`]: true when it is over.
    epoch: Option<Arc<AtomicBool>>,
}

impl Grace {
    /// Begins to wait for readers of values by handle.
    pub fn of_handles() -> Self {
        Self { moment: readers::wait_until(), epoch: None }
    }

    /// Begins to wait for readers under a guard of either kind.
    pub fn of_all() -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let grace = Self { epoch: Some(is_over.clone()), ..Self::of_handles() };
        let guard = epoch::pin();
        guard.defer(move || is_over.store(true, Release));
        guard.flush();
        grace
    }

    /// Where somebody reads since then.
    fn is_over(&self, oldest: Moment) -> bool {
        self.epoch.as_ref().is_none_or(|is_over| is_over.load(Acquire)) && oldest > self.moment
    }
}

/// Takes out what has waited long enough, so much at most. What waits is in the order in which it came: behind the first that has to wait
/// nothing is looked at.
pub(super) fn take_over<W>(waiting: &mut VecDeque<W>, most: usize, is_over: impl FnMut(&&W) -> bool) -> Drain<'_, W> {
    let count = waiting.iter().take(most).take_while(is_over).count();
    waiting.drain(..count)
}

impl Engine {
    /// Ends a step: what it emptied comes back when readers have gone.
    pub fn retire(&self, left: Vec<Left>) {
        if left.is_empty() {
            return;
        }
        let is_news = left.iter().any(|left| match left {
            Left::Slab { block, slab, objects, .. } => {
                objects.count() > 0 || self.ground.blocks.slab(*block, *slab).tried.get() == 0
            }
            Left::Block { .. } => false,
        });
        let grace = (self.grace)();
        self.batches.with(|batches| batches.push_back(Batch { left, grace, is_news }));
    }

    /// Whether what waits for readers will be news: not such as was tried in vain.
    pub fn awaits_news(&self) -> bool {
        self.batches.with(|batches| batches.iter().any(|batch| batch.is_news))
    }

    /// Takes back what no reader can be at any more.
    pub fn settle(&self) {
        if !self.has_batches() {
            return;
        }
        let oldest = readers::oldest();
        let ripe: Vec<Batch> =
            self.batches.with(|batches| take_over(batches, usize::MAX, |batch| batch.grace.is_over(oldest)).collect());
        ripe.into_iter().flat_map(|batch| batch.left).for_each(|left| self.end(left));
    }

    /// Takes everything back, where it is known that nobody reads this cache any more.
    pub fn settle_at_once(&self) {
        let batches = self.batches.with(std::mem::take);
        batches.into_iter().flat_map(|batch| batch.left).for_each(|left| self.end(left));
    }

    fn end(&self, left: Left) {
        match left {
            Left::Slab { node, block, slab, objects } => {
                let base = self.ground.blocks.addr(block);
                let each = || objects.iter().map(|object| base + self.shape.offset_of(slab, object));
                each().for_each(|object| {
                    self.note_given(object);
                    self.close_free(object);
                });
                self.on(node, |node| {
                    node.give_all(block, slab, &objects);
                    if node.blocks.slab(block, slab).state() == State::Claimed {
                        node.open(block, slab);
                    }
                });
            }
            Left::Block { node, block } => self.on(node, |node| node.return_block(block)),
        }
    }

    /// As [`Engine::settle`], for who comes by time and again: goes an epoch on, and gives back what is empty. Says whether
    /// something waits still.
    pub fn settle_behind(&self) -> bool {
        if self.has_batches() {
            epoch::pin().flush();
            self.settle();
            self.trim_all(Keep::Some);
        }
        self.has_batches()
    }

    /// Objects that were moved away and whose places are not back yet.
    pub fn in_batches(&self) -> u64 {
        let objects = |left: &Left| match left {
            Left::Slab { objects, .. } => u64::from(objects.count()),
            Left::Block { .. } => 0,
        };
        self.batches.with(|batches| batches.iter().flat_map(|batch| &batch.left).map(objects).sum())
    }

    pub fn has_batches(&self) -> bool {
        self.batches.with(|batches| !batches.is_empty())
    }

    /// Waits until all that was emptied is back, a second at most; says whether it is.
    pub fn settle_all(&self) -> Result<bool> {
        self.check()?;
        Ok(self.settle_within(GRACE_NS))
    }

    /// The same, for so long at most; of a cache of this process.
    pub fn settle_within(&self, most_ns: u64) -> bool {
        wait_for_readers(most_ns, || {
            self.settle();
            !self.has_batches()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Who comes by looks at what he takes and at one more, however much waits.
    #[test]
    fn what_waits_is_looked_at_in_order() {
        let mut waiting: VecDeque<u32> = (0..1000).collect();
        let mut looks = 0;
        let mut take = |until, most| {
            take_over(&mut waiting, most, |at| {
                looks += 1;
                **at < until
            })
            .collect::<Vec<_>>()
        };
        assert_eq!((take(0, usize::MAX), take(3, usize::MAX), take(9, 2)), (vec![], vec![0, 1, 2], vec![3, 4]));
        assert_eq!((looks, waiting.len()), (1 + 4 + 2, 995));
    }
}
