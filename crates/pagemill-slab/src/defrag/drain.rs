//! Draining: removes all free objects from the magazines and barns of a cache, returns them to their slabs, and keeps
//! magazines unusable until the drain ends.
//!
//! An operation that must know which objects of a cache are in use begins with a drain. During a drain, threads
//! allocate from slabs, which is slower, but they do not wait for the end of the drain.

use crate::alloc::engine::Engine;
use crate::alloc::magazine::Magazine;
use crate::alloc::shape::MAX_SHEAF_LEN;
use crate::alloc::thread_slots::{self, WORD_BITS};
use pagemill_core::error::{Error, Result};
use pagemill_core::sync::{Backoff, Relaxed};
use std::sync::atomic::Ordering::Acquire;

/// Maximum time that a drain of a slab cache waits for another drain of the same cache, or for a thread that was
/// preempted or stopped while it held the lock of its magazine.
const DRAIN_TIMEOUT_NS: u64 = 1_000_000_000;
/// The error of a call that finds another thread defragmenting or draining its slab cache.
pub(crate) const ANOTHER_DRAIN: Error =
    Error::Busy { what: "another thread works on this slab cache, perhaps Pagemill's background thread" };
/// Maximum time that [`Engine::try_drain_magazines`] waits for a thread that holds the lock of its magazine.
const TRY_DRAIN_TIMEOUT_NS: u64 = 10_000_000;

impl Engine {
    /// Empties all magazines and barns of the cache. The magazines stay unusable until the result is dropped.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`] if another thread drains the cache, or a thread was stopped while it held the lock of its
    /// magazine. [`Error::Unsupported`] if the kernel refuses the process-wide barrier.
    pub fn drain_magazines(&self) -> Result<DrainGuard<'_>> {
        self.check_generation()?;
        let mut backoff = Backoff::new();
        while !self.drain_lock.try_acquire() {
            if backoff.waited_ns() > DRAIN_TIMEOUT_NS {
                return Err(ANOTHER_DRAIN);
            }
            backoff.pause();
        }
        DrainGuard::begin(self, DRAIN_TIMEOUT_NS)
    }

    /// As [`Engine::drain_magazines`], but returns `None` instead of waiting for another thread that drains the cache.
    pub fn try_drain_magazines(&self) -> Option<DrainGuard<'_>> {
        (self.check_generation().is_ok() && self.drain_lock.try_acquire())
            .then(|| DrainGuard::begin(self, TRY_DRAIN_TIMEOUT_NS).ok())
            .flatten()
    }

    /// Returns the approximate number of free objects in the magazines of the cache.
    pub fn objects_in_magazines(&self) -> u64 {
        self.opened_magazines().map(|magazine| magazine.len() as u64).sum()
    }

    /// Returns the thread slots that have opened their magazine of this cache.
    pub fn opened_slots(&self) -> impl Iterator<Item = usize> {
        let words = self.opened_slots.iter().take(thread_slots::high_water().div_ceil(WORD_BITS));
        thread_slots::set_bits(words.map(|word| word.load(Acquire)))
    }

    /// Returns the magazines of this cache that thread slots have opened.
    fn opened_magazines(&self) -> impl Iterator<Item = &Magazine> {
        self.opened_slots().map(|slot| self.magazines.get(slot))
    }
}

/// A drain in progress. The magazines of the cache are empty and unusable, so objects are allocated from slabs and
/// freed into slabs.
pub(crate) struct DrainGuard<'engine>(&'engine Engine);

impl<'engine> DrainGuard<'engine> {
    /// Begins a drain. The caller holds `drain_lock`, and dropping the result releases that lock.
    fn begin(engine: &'engine Engine, timeout_ns: u64) -> Result<Self> {
        debug_assert!(engine.drain_lock.is_held() && !engine.is_draining.load(Relaxed), "one thread drains");
        engine.is_draining.store(true, Relaxed);
        engine.opened_magazines().for_each(|magazine| magazine.lock.begin_drain());
        let drained = Self(engine);
        if engine.opened_slots().next().is_some() && !engine.magazines.barriers.execute() {
            return Err(Error::Unsupported { what: "the kernel refuses the process-wide memory barrier" });
        }
        let mut backoff = Backoff::new();
        for magazine in engine.opened_magazines() {
            while !magazine.lock.is_not_held_by_owner() {
                if backoff.waited_ns() > timeout_ns {
                    return Err(Error::Busy { what: "a thread was stopped inside its magazine" });
                }
                backoff.pause();
            }
            drained.drain_magazine(magazine);
        }
        (0..engine.node_count()).for_each(|node| engine.drain_barns(node));
        Ok(drained)
    }

    /// Empties a magazine: returns its objects to their slabs.
    fn drain_magazine(&self, magazine: &Magazine) {
        let mut objects = [0; MAX_SHEAF_LEN];
        while let count @ 1.. = magazine.take_oldest(&mut objects) {
            let is_of_node = |object: &usize| self.0.node_of(*object) == magazine.node();
            debug_assert!(objects[..count].iter().all(is_of_node), "a magazine has objects of one node");
            self.0.with_node(magazine.node(), |node| objects[..count].iter().for_each(|object| node.free(*object)));
        }
    }

    /// Returns the thread slots that have opened their magazine of this cache. While the guard exists, the caller may
    /// use the stocks of these slots.
    pub fn opened_slots(&self) -> impl Iterator<Item = usize> {
        self.0.opened_slots()
    }

    /// Closes all magazines of the cache. Called before the cache is dropped.
    pub fn close(&self) {
        self.0.opened_magazines().for_each(Magazine::reset_drained);
    }
}

impl Drop for DrainGuard<'_> {
    fn drop(&mut self) {
        debug_assert!(self.0.drain_lock.is_held());
        self.0.opened_magazines().for_each(|magazine| magazine.lock.end_drain());
        self.0.is_draining.store(false, Relaxed);
        self.0.drain_lock.release();
    }
}
