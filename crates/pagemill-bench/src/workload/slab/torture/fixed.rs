//! Caches of values that do not move, for the random operations.

use fastrand::Rng;
use pagemill_core::Result;
use pagemill_slab::{FixedSlab, Settings, SlabCache, SlabInfo, Slabs, Slot};

use super::stamped::{Counters, Stamp, Stamped};
use super::{RemoveOutcome, Subject};

/// The slab cache under test, whose values do not move. It is never dropped, because slots borrow from it and move
/// between threads.
pub struct FixedCache<const WORDS: usize> {
    cache: &'static FixedSlab<Stamped<WORDS>>,
    counters: &'static Counters,
}

impl<const WORDS: usize> Subject for FixedCache<WORDS> {
    type Key = Slot<'static, Stamped<WORDS>>;
    type Pin<'a> = ();

    fn new(slabs: &'static Slabs, counters: &'static Counters) -> Result<Self> {
        let cache = Box::leak(Box::new(slabs.fixed(Settings::new("boxes"))?));
        Ok(Self { cache, counters })
    }

    fn insert(&self, stamp: Stamp, node: Option<usize>) -> Result<Self::Key> {
        let value = Stamped::new(stamp, self.counters);
        match node {
            Some(node) => Ok(self.cache.insert_on(node, value)?),
            None => Ok(self.cache.insert(value)?),
        }
    }

    fn is_intact(&self, slot: &Self::Key, stamp: Stamp) -> bool {
        slot.is_intact_with(stamp)
    }

    fn update(&self, slot: &mut Self::Key, old: Stamp, new: Stamp) -> Option<bool> {
        let was_whole = slot.is_intact_with(old);
        **slot = Stamped::new(new, self.counters);
        Some(was_whole)
    }

    fn remove(&self, slot: Self::Key, stamp: Stamp) -> RemoveOutcome<Self::Key> {
        if slot.is_intact_with(stamp) { RemoveOutcome::Gone } else { RemoveOutcome::Missing }
    }

    fn pin(&self, _slot: &Self::Key) -> Option<()> {
        None
    }

    fn unpin(&self, _held: (), _stamp: Stamp) -> bool {
        true
    }

    fn address(&self, slot: &Self::Key) -> usize {
        std::ptr::from_ref(&**slot) as usize
    }

    /// Inserts a value, removes it again and checks it. Threads cannot share the values of such a cache, so there is no
    /// board.
    fn use_board_object(&self, at: u64, _random: &mut Rng) -> bool {
        let value = self.cache.insert(Stamped::new(Stamp::of_board(at), self.counters)).map(Slot::into_inner);
        value.is_ok_and(|value| value.is_intact_with(Stamp::of_board(at)))
    }

    fn move_some_objects(&self, _random: &mut Rng) {
        let _ = self.cache.shrink();
    }

    fn info(&self) -> SlabInfo {
        self.cache.info().expect("a cache of this process")
    }

    fn check_and_drop(self, left: Vec<(Self::Key, Stamp)>) -> u64 {
        let count = left.len() as u64;
        let active = self.info().active;
        drop(left);
        active.abs_diff(count) + self.info().active
    }
}
