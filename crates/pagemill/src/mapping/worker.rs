//! Background work: collapses small folios that became dense, and finds sparse huge ones ([`sweep`]).

use super::File;
use super::cache::Caches;
use super::policy::{Ask, Cause, Choice};
use super::sweep::{self, Sweep};
use crate::callback;
use crate::epoch;
use crate::error::Error;
use crate::stats::Counter;
use crate::sync::{Guarded, Relaxed};
use pagemill_sys::futex::{self, Scope};
use pagemill_sys::thread;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::AcqRel};
use std::sync::{Arc, Weak};

/// Most ranges in the queue; later writes propose the others again.
const MOST_WAITING: usize = 10_000;

/// Attempts for a range with folios in use.
const TRIES: u8 = 3;

struct Waiting {
    file: Weak<File>,
    index: u64,
    tries: u8,
}

/// Queue of ranges, and the thread that works on them.
#[derive(Default)]
pub(crate) struct Worker {
    waiting: Guarded<VecDeque<Waiting>>,
    /// Futex on which the thread sleeps.
    wakeups: AtomicU32,
    is_started: AtomicBool,
    /// The program does the work itself.
    is_by_hand: AtomicBool,
    pub(super) sweep: Sweep,
}

impl File {
    /// Proposes a collapse if the page created at `index` may have completed its range.
    pub(super) fn propose_collapse(&self, index: u64) {
        let order = self.pool().chunk_order();
        if order > 0 && index + 1 == self.span_of(index).end && self.cache.is_huge_allowed() {
            self.cache.caches.worker.propose(self.cache.caches, self, index);
        }
    }

    /// Collapses a range if the policy chooses a huge folio. Returns whether it did; `None` if a later attempt may
    /// succeed.
    fn collapse_if_dense(&self, index: u64) -> Option<bool> {
        let span = self.span_of(index);
        let (mut present, mut at) = (0, span.start);
        while at < span.end
            && let Some(found) = { self.tree.next(at, span.end - 1, &epoch::pin()) }
        {
            present += self.page_bytes() as u64;
            at = found.last() + 1;
        }
        let ask = Ask {
            cause: Cause::Collapse,
            offset: self.offset_of(span.start),
            span_bytes: self.cache.folio_bytes(self.pool().chunk_order()),
            wanted_bytes: 0,
            present_bytes: present,
            size_bytes: self.size_bytes(),
            sequential_bytes: 0,
        };
        if self.cache.policy.choose(&ask) != Choice::Huge {
            return Some(false);
        }
        match self.collapse_at(index, Counter::HugeCollapsedBehind) {
            Ok(is_huge) => Some(is_huge),
            Err(Error::Busy { .. }) => None,
            Err(_) => Some(false),
        }
    }
}

impl Worker {
    fn propose(&self, caches: &'static Caches, file: &File, index: u64) {
        let Some(file) = file.cache.file(file.id) else { return };
        let waiting = Waiting { file: Arc::downgrade(&file), index, tries: 0 };
        self.waiting.with(|queue| {
            if queue.len() < MOST_WAITING {
                queue.push_back(waiting);
            }
        });
        drop(file);
        if !self.is_by_hand() {
            self.ring(caches);
        }
    }

    pub fn is_by_hand(&self) -> bool {
        self.is_by_hand.load(Relaxed)
    }

    /// Wakes the thread, or spawns it.
    #[cfg(shuttle)]
    pub fn ring(&self, _caches: &'static Caches) {}

    #[cfg(not(shuttle))]
    pub fn ring(&self, caches: &'static Caches) {
        self.wakeups.fetch_add(1, Relaxed);
        if !self.is_started.swap(true, AcqRel) {
            if thread::spawn(c"pagemill-pages", caches).is_err() {
                self.is_started.store(false, Relaxed);
            }
        } else {
            futex::wake(&self.wakeups, 1, Scope::Private);
        }
    }

    /// Checks up to `steps` ranges. Returns the number of new huge folios.
    pub fn step(&self, steps: usize) -> usize {
        let mut made = 0;
        for _ in 0..steps {
            let Some(next) = self.waiting.with(VecDeque::pop_front) else { break };
            let Some(file) = next.file.upgrade() else { continue };
            match file.collapse_if_dense(next.index) {
                Some(is_huge) => made += usize::from(is_huge),
                None if next.tries < TRIES => {
                    self.waiting.with(|queue| queue.push_back(Waiting { tries: next.tries + 1, ..next }));
                }
                None => {}
            }
        }
        made
    }

    /// Starts no thread from here on.
    pub fn do_by_hand(&self) {
        self.is_by_hand.store(true, Relaxed);
    }

    pub(super) fn acquire_for_fork(&self) {
        self.waiting.acquire_when(|_| true);
        self.sweep.acquire_for_fork();
    }

    pub(super) fn release_after_fork(&self) {
        self.sweep.release_after_fork();
        self.waiting.release();
    }

    /// In a fork child: marks the thread as not running.
    pub(super) fn begin_child(&self) {
        self.is_started.store(false, Relaxed);
        self.sweep.begin_child();
    }
}

impl thread::Work for Caches {
    /// Sleeps until a range is proposed, or a sweep is due; has the lowest scheduling priority.
    fn work(&'static self) {
        thread::defer();
        loop {
            let wakeups = self.worker.wakeups.load(Relaxed);
            while self.worker.waiting.with(|queue| !queue.is_empty()) {
                // If the policy panics, the range is dropped; later writes propose it again.
                callback::catch_panic(|| self.worker.step(1));
            }
            let rest = callback::catch_panic(|| sweep::go_on(self)).flatten();
            futex::wait(&self.worker.wakeups, wakeups, rest, Scope::Private);
        }
    }
}
