//! Caches of values that are accessed by handle, for the random operations. All threads change the values on the board,
//! and each change is counted.
#![allow(unsafe_code)] // implements `Movable` for the values

use fastrand::Rng;
use pagemill_slab::SlabCache;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use pagemill_core::{Error, Result};
use pagemill_slab as slab;
use pagemill_slab::{Handle, HandleMap, Movable, Pinned, Settings, SlabInfo, Slabs};

use super::stamped::{Counters, Stamp, Stamped};
use super::{BOARD_OBJECTS, RemoveOutcome, Subject};

// SAFETY: the value contains only numbers and a reference, so it may be moved by copying its bytes.
unsafe impl<const WORDS: usize> Movable for Stamped<WORDS> {}

/// The slab cache under test, whose values are accessed by handle.
pub struct HandleCache<const WORDS: usize> {
    cache: HandleMap<Stamped<WORDS>>,
    counters: &'static Counters,
    board: Vec<Handle<Stamped<WORDS>>>,
    /// Number of changes made to each value of the board, that is, of the values that all threads use.
    changes: Vec<AtomicU64>,
}

impl<const WORDS: usize> HandleCache<WORDS> {
    /// Changes a value. Returns whether the change was made; `None` if the value is missing. Sets `is_right` to false
    /// if the old value was torn, or if `old` returns false for the stamp of the old value.
    fn change(&self, handle: Handle<Stamped<WORDS>>, is_right: &mut bool, old: impl Fn(Stamp) -> bool) -> Option<bool> {
        let changed = self.cache.update(handle, |value| {
            *is_right &= old(value.stamp()) && value.is_intact();
            Stamped::new(value.stamp().next(), self.counters)
        });
        match changed {
            Ok(was_there) => was_there.then_some(true),
            Err(_) => Some(false),
        }
    }
}

impl<const WORDS: usize> Subject for HandleCache<WORDS> {
    type Key = Handle<Stamped<WORDS>>;
    type Pin<'a> = Pinned<'a, Stamped<WORDS>>;

    fn new(slabs: &'static Slabs, counters: &'static Counters) -> Result<Self> {
        let cache = slabs.by_handle(Settings::new("values"))?;
        let insert = |at| Ok(cache.insert(Stamped::new(Stamp::of_board(at), counters))?);
        let board = (0..BOARD_OBJECTS).map(insert).collect::<Result<_>>()?;
        Ok(Self { cache, counters, board, changes: (0..BOARD_OBJECTS).map(|_| AtomicU64::new(0)).collect() })
    }

    fn insert(&self, stamp: Stamp, _node: Option<usize>) -> Result<Self::Key> {
        Ok(self.cache.insert(Stamped::new(stamp, self.counters))?)
    }

    fn is_intact(&self, handle: &Self::Key, stamp: Stamp) -> bool {
        let guard = slab::enter();
        let Some(value) = self.cache.get(*handle, &guard) else { return false };
        let was_whole = value.is_intact_with(stamp);
        // The value may be moved now, but under the guard its old copy does not change.
        stamp.maybe_yield();
        was_whole && value.is_intact_with(stamp)
    }

    fn update(&self, handle: &mut Self::Key, old: Stamp, _new: Stamp) -> Option<bool> {
        let mut is_right = true;
        match self.change(*handle, &mut is_right, |stamp| stamp == old) {
            None => Some(false),
            Some(is_changed) => is_changed.then_some(is_right),
        }
    }

    fn remove(&self, handle: Self::Key, _stamp: Stamp) -> RemoveOutcome<Self::Key> {
        match self.cache.remove(handle) {
            Ok(Some(_)) if self.cache.get(handle, &slab::enter()).is_none() => RemoveOutcome::Gone,
            Err(Error::Busy { .. }) => RemoveOutcome::Busy(handle),
            _ => RemoveOutcome::Missing,
        }
    }

    fn pin(&self, handle: &Self::Key) -> Option<Self::Pin<'_>> {
        self.cache.pin(*handle).ok().flatten()
    }

    fn unpin(&self, held: Self::Pin<'_>, stamp: Stamp) -> bool {
        held.is_intact_with(stamp)
    }

    fn address(&self, handle: &Self::Key) -> usize {
        self.cache.get(*handle, &slab::enter()).map_or(0, |value| std::ptr::from_ref(value) as usize)
    }

    fn use_board_object(&self, at: u64, random: &mut Rng) -> bool {
        let (handle, of_it) = (self.board[at as usize], |stamp: Stamp| stamp.is_of_same_object(Stamp::of_board(at)));
        let is_it = |value: &Stamped<WORDS>| of_it(value.stamp()) && value.is_intact();
        match random.u64(..4) {
            0 => match self.cache.pin(handle) {
                Ok(Some(pinned)) => is_it(&pinned),
                Ok(None) => false,
                Err(_) => true,
            },
            1 => self.cache.get(handle, &slab::enter()).is_some_and(is_it),
            _ => {
                let mut is_right = true;
                let changed = self.change(handle, &mut is_right, of_it);
                self.changes[at as usize].fetch_add(u64::from(changed == Some(true)), Relaxed);
                is_right && changed.is_some()
            }
        }
    }

    fn move_some_objects(&self, random: &mut Rng) {
        super::move_some_objects_of(&self.cache, random);
    }

    fn info(&self) -> SlabInfo {
        self.cache.info().expect("a cache of this process")
    }

    /// Checks the values of the board and removes half of the values in `left`. All other values are dropped with the
    /// cache. Returns the number of wrong or missing values.
    fn check_and_drop(self, left: Vec<(Self::Key, Stamp)>) -> u64 {
        let wrong = |at: &usize| {
            let guard = slab::enter();
            let changes = self.changes[*at].load(Relaxed) & 0xffff;
            self.cache.get(self.board[*at], &guard).is_none_or(|value| value.stamp().changes() != changes)
        };
        let wrong = (0..self.board.len()).filter(wrong).count() as u64;
        let _ = self.cache.shrink();
        let active = self.info().active;
        let removed = left.iter().step_by(2).filter(|(handle, _)| matches!(self.cache.remove(*handle), Ok(Some(_))));
        let missing = left.len().div_ceil(2) - removed.count();
        // While readers have guards, the cache may still count values that were removed.
        wrong + missing as u64 + u64::from(active < left.len() as u64 + BOARD_OBJECTS)
    }
}
