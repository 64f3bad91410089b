//! Emptying magazines and barns: what threads and nodes keep of free objects goes to its slabs, and stays there for a while.
//!
//! Whoever wants to know which objects are in use takes everything out first. Threads do without a magazine meanwhile: they are
//! slower, and wait for nobody.

use super::engine::Engine;
use super::magazine::Magazine;
use super::numbers::{self, WORD_BITS};
use super::shape::MAX_SHEAF;
use crate::error::{Error, Result};
use crate::sync::{Patience, Relaxed};
use std::sync::atomic::Ordering::Acquire;

/// Who empties a cache waits so long for another who does, and for a thread that was stopped inside of its magazine; who needs memory at
/// once waits so long for the thread.
const BUSY_NS: u64 = 1_000_000_000;
const INSIDE_NS: u64 = 10_000_000;

impl Engine {
    /// Takes all free objects out of magazines and barns, and keeps magazines out of use as long as the result lives.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`] if another thread does the same, or one was stopped inside of its magazine.
    pub fn seize(&self) -> Result<Seized<'_>> {
        self.check()?;
        let mut patience = Patience::new();
        while !self.emptying.try_acquire() {
            if patience.waited_ns() > BUSY_NS {
                return Err(Error::Busy { what: "another thread empties this slab cache" });
            }
            patience.pause();
        }
        Seized::begin(self, BUSY_NS)
    }

    /// As [`Engine::seize`], without waiting for another who does it.
    pub fn try_seize(&self) -> Option<Seized<'_>> {
        (self.check().is_ok() && self.emptying.try_acquire()).then(|| Seized::begin(self, INSIDE_NS).ok()).flatten()
    }

    /// Free objects in magazines, more or less.
    pub fn in_magazines(&self) -> u64 {
        self.user_magazines().map(|magazine| magazine.len() as u64).sum()
    }

    /// Numbers of threads that may keep something.
    pub fn users(&self) -> impl Iterator<Item = usize> {
        let words = self.users.iter().take(numbers::high_water().div_ceil(WORD_BITS));
        numbers::numbers_in(words.map(|word| word.load(Acquire)))
    }

    fn user_magazines(&self) -> impl Iterator<Item = &Magazine> {
        self.users().map(|number| self.magazines.get(number))
    }
}

/// Magazines of a cache are empty and out of use: objects come from slabs and go to them.
pub(super) struct Seized<'engine>(&'engine Engine);

impl<'engine> Seized<'engine> {
    /// With `emptying` held, which it takes over.
    fn begin(engine: &'engine Engine, most_ns: u64) -> Result<Self> {
        engine.is_seized.store(true, Relaxed);
        engine.user_magazines().for_each(Magazine::seize);
        let seized = Self(engine);
        if engine.users().next().is_some() && !engine.magazines.barriers().pass() {
            return Err(Error::Unsupported { what: "the kernel refuses a memory barrier in all threads" });
        }
        let mut patience = Patience::new();
        for magazine in engine.user_magazines() {
            while !magazine.is_left() {
                if patience.waited_ns() > most_ns {
                    return Err(Error::Busy { what: "a thread was stopped while it took or gave an object" });
                }
                patience.pause();
            }
            seized.empty(magazine);
        }
        (0..engine.node_count()).for_each(|node| engine.empty_barns(node));
        Ok(seized)
    }

    fn empty(&self, magazine: &Magazine) {
        let mut objects = [0; MAX_SHEAF];
        loop {
            let count = magazine.take_seized(&mut objects);
            if count == 0 {
                break;
            }
            self.0.on(magazine.node(), |node| objects[..count].iter().for_each(|object| node.give(*object)));
        }
    }

    /// Numbers of threads that may keep something beside their magazines, which is the seizer's now, too.
    pub fn users(&self) -> impl Iterator<Item = usize> {
        self.0.users()
    }

    /// Closes all magazines: nobody uses the cache any more.
    pub fn close(&self) {
        self.0.user_magazines().for_each(Magazine::close_seized);
    }
}

impl Drop for Seized<'_> {
    fn drop(&mut self) {
        self.0.user_magazines().for_each(Magazine::release);
        self.0.is_seized.store(false, Relaxed);
        self.0.emptying.release();
    }
}
