//! Work that nobody waits for: small folios that became dense are made huge, huge ones that hold little are found ([`sweep`]).

use super::File;
use super::cache::Caches;
use super::policy::{Ask, Cause, Choice};
use super::sweep::{self, Sweep};
use crate::epoch;
use crate::error::Error;
use crate::stats::Counter;
use crate::sync::{Guarded, Relaxed};
use pagemill_sys::futex::{self, Scope};
use pagemill_sys::thread;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::AcqRel};
use std::sync::{Arc, Weak};

/// Ranges that may wait; what is more than that is proposed again by later writes.
const MOST_WAITING: usize = 10_000;

/// A range whose parts are in use is looked at so often.
const TRIES: u8 = 3;

struct Waiting {
    file: Weak<File>,
    index: u64,
    tries: u8,
}

/// Ranges that wait, and the thread that sees to them.
#[derive(Default)]
pub(crate) struct Worker {
    waiting: Guarded<VecDeque<Waiting>>,
    /// The thread sleeps on it.
    bell: AtomicU32,
    is_started: AtomicBool,
    /// The program does the work itself.
    is_by_hand: AtomicBool,
    pub(super) sweep: Sweep,
}

impl File {
    /// A page was made at `index`: if that may have completed its range, it is looked at, behind.
    pub(super) fn propose_collapse(&self, index: u64) {
        let order = self.pool().chunk_order();
        if order > 0 && index + 1 == self.span_of(index).end && self.cache.is_huge_allowed() {
            self.cache.caches.worker.propose(self.cache.caches, self, index);
        }
    }

    /// Makes a range huge if the policy wants it. Returns whether it did; `None` if it may be tried again.
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
            streak_bytes: 0,
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

    /// There is work for the thread.
    #[cfg(shuttle)]
    pub fn ring(&self, _caches: &'static Caches) {}

    #[cfg(not(shuttle))]
    pub fn ring(&self, caches: &'static Caches) {
        self.bell.fetch_add(1, Relaxed);
        if !self.is_started.swap(true, AcqRel) {
            if thread::spawn(c"pagemill-pages", caches).is_err() {
                self.is_started.store(false, Relaxed);
            }
        } else {
            futex::wake(&self.bell, 1, Scope::Private);
        }
    }

    /// Looks at up to `steps` ranges. Returns how many became huge.
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

    /// From here on no thread is started for it.
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

    /// In a fork child, which has no thread for it.
    pub(super) fn begin_child(&self) {
        self.is_started.store(false, Relaxed);
        self.sweep.begin_child();
    }
}

impl thread::Work for Caches {
    /// Sleeps until a range is proposed, or it is time to look for sparse folios; goes after all others.
    fn work(&'static self) {
        thread::defer();
        loop {
            let bell = self.worker.bell.load(Relaxed);
            while self.worker.waiting.with(|queue| !queue.is_empty()) {
                self.worker.step(1);
            }
            let rest = sweep::go_on(self);
            futex::wait(&self.worker.bell, bell, rest, Scope::Private);
        }
    }
}
