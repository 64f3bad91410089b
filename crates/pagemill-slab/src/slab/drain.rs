//! Draining magazines and barns: returns the free objects that threads and nodes keep to their slabs, and keeps magazines
//! out of use meanwhile.
//!
//! This precedes everything that must know which objects are in use. Threads work without magazines meanwhile: slower,
//! but without blocking.

use super::engine::Engine;
use super::magazine::Magazine;
use super::shape::MAX_SHEAF;
use super::thread_slots::{self, WORD_BITS};
use pagemill_core::error::{Error, Result};
use pagemill_core::sync::{Backoff, Relaxed};
use std::sync::atomic::Ordering::Acquire;

/// `BUSY_NS`: how long a caller waits for another thread that drains the cache, or for a thread that was stopped inside
/// of its magazine. `INSIDE_NS`: how long [`Engine::try_drain_magazines`] waits for the latter.
const BUSY_NS: u64 = 1_000_000_000;
const INSIDE_NS: u64 = 10_000_000;

impl Engine {
    /// Drains all magazines and barns, and keeps magazines out of use until the result is dropped.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`] if another thread drains the cache, or a thread was stopped inside of its magazine.
    /// [`Error::Unsupported`] if the kernel refuses the barrier.
    pub fn drain_magazines(&self) -> Result<DrainGuard<'_>> {
        self.check()?;
        let mut backoff = Backoff::new();
        while !self.emptying.try_acquire() {
            if backoff.waited_ns() > BUSY_NS {
                return Err(Error::Busy { what: "another thread empties this slab cache" });
            }
            backoff.pause();
        }
        DrainGuard::begin(self, BUSY_NS)
    }

    /// As [`Engine::drain_magazines`], but does not wait for another thread that drains the cache.
    pub fn try_drain_magazines(&self) -> Option<DrainGuard<'_>> {
        (self.check().is_ok() && self.emptying.try_acquire()).then(|| DrainGuard::begin(self, INSIDE_NS).ok()).flatten()
    }

    /// Free objects in magazines, approximately.
    pub fn in_magazines(&self) -> u64 {
        self.user_magazines().map(|magazine| magazine.len() as u64).sum()
    }

    /// Thread slots that may hold objects.
    pub fn users(&self) -> impl Iterator<Item = usize> {
        let words = self.users.iter().take(thread_slots::high_water().div_ceil(WORD_BITS));
        thread_slots::set_bits(words.map(|word| word.load(Acquire)))
    }

    fn user_magazines(&self) -> impl Iterator<Item = &Magazine> {
        self.users().map(|number| self.magazines.get(number))
    }
}

/// A drain guard: magazines of a cache are empty and out of use, so objects come from slabs and return to them.
pub(super) struct DrainGuard<'engine>(&'engine Engine);

impl<'engine> DrainGuard<'engine> {
    /// The caller holds `emptying`; the result takes it over.
    fn begin(engine: &'engine Engine, most_ns: u64) -> Result<Self> {
        engine.is_draining.store(true, Relaxed);
        engine.user_magazines().for_each(Magazine::begin_drain);
        let drained = Self(engine);
        if engine.users().next().is_some() && !engine.magazines.barriers().pass() {
            return Err(Error::Unsupported { what: "the kernel refuses a memory barrier in all threads" });
        }
        let mut backoff = Backoff::new();
        for magazine in engine.user_magazines() {
            while !magazine.is_outside() {
                if backoff.waited_ns() > most_ns {
                    return Err(Error::Busy { what: "a thread was stopped while it took or gave an object" });
                }
                backoff.pause();
            }
            drained.empty(magazine);
        }
        (0..engine.node_count()).for_each(|node| engine.empty_barns(node));
        Ok(drained)
    }

    fn empty(&self, magazine: &Magazine) {
        let mut objects = [0; MAX_SHEAF];
        loop {
            let count = magazine.take_drained(&mut objects);
            if count == 0 {
                break;
            }
            self.0.on(magazine.node(), |node| objects[..count].iter().for_each(|object| node.give(*object)));
        }
    }

    /// Thread slots that may keep something beside their magazines. The guard covers that, too.
    pub fn users(&self) -> impl Iterator<Item = usize> {
        self.0.users()
    }

    /// Closes all magazines, at the end of the cache.
    pub fn close(&self) {
        self.0.user_magazines().for_each(Magazine::close_drained);
    }
}

impl Drop for DrainGuard<'_> {
    fn drop(&mut self) {
        self.0.user_magazines().for_each(Magazine::release);
        self.0.is_draining.store(false, Relaxed);
        self.0.emptying.release();
    }
}
