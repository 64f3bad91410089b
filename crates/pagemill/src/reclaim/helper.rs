//! The helper thread: answers the siblings' requests, brings in blocks ahead of need, governs by the clock, sleeps
//! otherwise.
//!
//! Started when the process first holds enough for that to matter, outside
//! every lock; a fork child has none until it needs one again.

use super::Account;
use super::governor::{Governor, Next, SystemClock, WORTHWHILE_BYTES};
use super::limits::Bound;
use crate::arena::Arena;
use pagemill_sys::futex::{self, Scope};
use pagemill_sys::thread;
use std::sync::atomic::{
    AtomicBool, AtomicU32, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::SeqCst,
};
use std::time::Duration;

/// Resident bytes from which on a process of a limited tree or control group has a helper.
const HELPED_FROM_BYTES: u64 = 4 << 20;

/// Resident bytes from which on any process has one: it may fall idle.
const GOVERNED_FROM_BYTES: u64 = 64 << 20;

/// Whether there is a helper, and what it sleeps on outside of a tree.
#[derive(Default)]
pub struct Helper {
    is_started: AtomicBool,
    /// It sleeps until there is something to give.
    is_parked: AtomicBool,
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
        let is_near_limit = || account.is_limited() || account.headroom.known().bound == Bound::Group;
        resident >= GOVERNED_FROM_BYTES || (resident >= HELPED_FROM_BYTES && is_near_limit())
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

    /// Wakes the helper if it sleeps for lack of anything to give. Neither allocates nor locks.
    #[inline]
    pub(super) fn unpark(&self, account: &Account) {
        if self.is_parked.load(Relaxed) && self.is_parked.swap(false, AcqRel) {
            self.wake(account);
        }
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

    /// The thread's work, for as long as the process lives. A process that does nothing for `idle` gives back.
    pub fn run(&self, account: &Account, arena: &Arena, idle: Option<Duration>) -> ! {
        // Who needs memory most may leave this thread no time; and a program may count on the number of its next file.
        // Where either is not to be had it goes on as it is.
        thread::prefer();
        thread::unshare_files();
        let mut governor = Governor::new(SystemClock, idle);
        let place = account.place();
        let (word, scope) = self.word(&place);
        if let Some(place) = &place {
            place.listen(true);
        }
        loop {
            let seen = word.load(Acquire);
            account.answer();
            while arena.prefault() {}
            let next = governor.step(account);
            if matches!(next, Next::WhenGiveable(_)) {
                self.is_parked.store(true, SeqCst);
                // What was freed since the look wakes nobody: look again.
                if account.giveable() >= WORTHWHILE_BYTES {
                    self.is_parked.store(false, Relaxed);
                    continue;
                }
            }
            let pause = match next {
                Next::After(pause) => Some(pause),
                Next::WhenGiveable(pause) => pause,
                Next::WhenAsked => None,
            };
            futex::wait(word, seen, pause, scope);
            self.is_parked.store(false, Relaxed);
        }
    }
}
