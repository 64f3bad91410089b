//! The helper thread: answers the siblings' requests, brings in blocks ahead of need, sleeps otherwise.
//!
//! Started when the process first holds enough for that to matter, outside
//! every lock; a fork child has none until it needs one again.

use super::Account;
use crate::arena::Arena;
use pagemill_sys::futex::{self, Scope};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed};

/// Resident bytes from which on a process of a limited tree has a helper.
const HELPED_FROM_BYTES: u64 = 4 << 20;

/// Resident bytes from which on blocks are brought in ahead of need.
const PREFAULT_FROM_BYTES: u64 = 64 << 20;

/// Whether there is a helper, and what it sleeps on outside of a tree.
#[derive(Default)]
pub struct Helper {
    is_started: AtomicBool,
    own_word: AtomicU32,
}

impl Helper {
    /// Whether one should be started now: there is none, and the process holds enough.
    #[inline]
    pub fn is_due(&self, account: &Account) -> bool {
        if self.is_started.load(Relaxed) {
            return false;
        }
        let resident = account.resident();
        resident >= PREFAULT_FROM_BYTES || (resident >= HELPED_FROM_BYTES && account.is_limited())
    }

    #[inline]
    pub fn is_running(&self) -> bool {
        self.is_started.load(Relaxed)
    }

    /// Claims the right to start the one helper.
    pub fn claim(&self) -> bool {
        !self.is_started.swap(true, AcqRel)
    }

    /// It could not be started, or was not copied by `fork`: another may be.
    pub fn unclaim(&self) {
        self.is_started.store(false, Relaxed);
    }

    /// Wakes the helper, if there is one.
    pub fn wake(&self, account: &Account) {
        if self.is_started.load(Relaxed) {
            let place = account.place();
            let (word, scope) = self.word(&place);
            word.fetch_add(1, AcqRel);
            futex::wake(word, 1, scope);
        }
    }

    fn word<'word>(&'word self, place: &'word Option<super::tree::Place>) -> (&'word AtomicU32, Scope) {
        match place {
            Some(place) => (place.wake_word(), Scope::Shared),
            None => (&self.own_word, Scope::Private),
        }
    }

    /// The thread's work, for as long as the process lives.
    pub fn run(&self, account: &Account, arena: &Arena) -> ! {
        let place = account.place();
        let (word, scope) = self.word(&place);
        if let Some(place) = &place {
            place.listen(true);
        }
        loop {
            let seen = word.load(Acquire);
            account.answer();
            while arena.prefault() {}
            futex::wait(word, seen, None, scope);
        }
    }
}
