//! The background thread of caches: collapses ranges whose small folios became dense, and scans for sparse huge folios
//! ([`sweep`]).

use crate::mapping::File;
use crate::mapping::cache::Caches;
use crate::mapping::huge::sweep::{self, Sweep};
use crate::mapping::policy::{Ask, Cause, Choice};
use pagemill_core::callback;
use pagemill_core::error::Error;
use pagemill_core::stats::Counter;
use pagemill_core::sync::{Guarded, Relaxed};
use pagemill_sys::futex::{self, Scope};
use pagemill_sys::thread;
use std::collections::VecDeque;
use std::sync::Weak;
#[cfg(not(shuttle))]
use std::sync::atomic::Ordering::AcqRel;
use std::sync::atomic::{AtomicBool, AtomicU32};

/// Maximum number of ranges in the queue of ranges to collapse. Further ranges are dropped; later writes propose them
/// again.
const MAX_QUEUED_RANGES: usize = 10_000;

/// Maximum number of further attempts to collapse a range, if folios of the range are in use.
const MAX_COLLAPSE_RETRIES: u8 = 3;

/// A range whose small folios may be collapsed.
struct QueuedRange {
    file: Weak<File>,
    /// Index of a page in the queued range.
    index: u64,
    /// Number of failed attempts to collapse the queued range.
    tries: u8,
}

/// The queue of ranges to collapse, and the background thread that collapses them.
#[derive(Default)]
pub(crate) struct Worker {
    queue: Guarded<VecDeque<QueuedRange>>,
    /// Counter of wakeups; the futex on which the thread sleeps.
    wakeups: AtomicU32,
    /// Whether the background thread was started.
    is_started: AtomicBool,
    /// Whether the background thread must never be started. The program then does its work with calls of
    /// [`PageCache::collapse_waiting`](crate::mapping::PageCache::collapse_waiting) and similar methods.
    pub(crate) is_thread_disabled: AtomicBool,
    pub(crate) sweep: Sweep,
}

impl File {
    /// Queues the range of a huge folio for a collapse, if the page that was created at `index` is the last page of the
    /// range.
    pub(crate) fn propose_collapse(&self, index: u64) {
        let order = self.pool.chunk_order;
        if order > 0 && index + 1 == self.span_of(index).end && self.cache.is_huge_allowed() {
            self.cache.caches.worker.propose(self.cache.caches, self, index);
        }
    }

    /// Collapses a range if the policy chooses a huge folio for it. Returns whether a huge folio was made, or `None` if
    /// a later attempt may succeed.
    fn collapse_if_chosen(&self, index: u64) -> Option<bool> {
        let present_bytes = (self.folios(self.span_of(index)).count() * self.page_bytes()) as u64;
        let ask = Ask { present_bytes, ..self.ask(Cause::Collapse, index) };
        // Huge folios may have been forbidden since the range was queued.
        if !self.cache.is_huge_allowed() || self.cache.choose(&ask) != Choice::Huge {
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
    /// Adds the range with page `index` of a file to the queue, and wakes the background thread.
    fn propose(&self, caches: &'static Caches, file: &File, index: u64) {
        let range = QueuedRange { file: file.this.clone(), index, tries: 0 };
        self.queue.with(|queue| {
            if queue.len() < MAX_QUEUED_RANGES {
                queue.push_back(range);
            }
        });
        if !self.is_thread_disabled() {
            self.wake(caches);
        }
    }

    pub fn is_thread_disabled(&self) -> bool {
        self.is_thread_disabled.load(Relaxed)
    }

    /// Does nothing, because shuttle tests run without the background thread.
    #[cfg(shuttle)]
    pub fn wake(&self, _caches: &'static Caches) {}

    /// Wakes the background thread, or starts it.
    #[cfg(not(shuttle))]
    pub fn wake(&self, caches: &'static Caches) {
        self.wakeups.fetch_add(1, Relaxed);
        if !self.is_started.swap(true, AcqRel) {
            if thread::spawn(c"pagemill-pages", caches).is_err() {
                self.is_started.store(false, Relaxed);
            }
        } else {
            futex::wake(&self.wakeups, 1, Scope::Private);
        }
    }

    /// Takes up to `steps` ranges from the queue of ranges to collapse. Collapses a range if the policy chooses a huge
    /// folio for it. Returns the number of new huge folios.
    pub fn step(&self, steps: usize) -> usize {
        let mut made = 0;
        for _ in 0..steps {
            let Some(range) = self.queue.with(VecDeque::pop_front) else { break };
            let Some(file) = range.file.upgrade() else { continue };
            match file.collapse_if_chosen(range.index) {
                Some(is_huge) => made += usize::from(is_huge),
                None if range.tries < MAX_COLLAPSE_RETRIES => {
                    self.queue.with(|queue| queue.push_back(QueuedRange { tries: range.tries + 1, ..range }));
                }
                None => {}
            }
        }
        made
    }

    pub(crate) fn acquire_for_fork(&self) {
        self.queue.acquire_when(|_| true);
        self.sweep.clock_hand.acquire_when(|_| true);
    }

    pub(crate) fn release_after_fork(&self) {
        self.sweep.clock_hand.release();
        self.queue.release();
    }

    /// Called in a fork child: marks the background thread as not running.
    pub(crate) fn begin_child(&self) {
        self.is_started.store(false, Relaxed);
        self.sweep.begin_child();
    }
}

impl thread::Work for Caches {
    /// Main loop of the background thread. Sleeps until a range is proposed for a collapse, or until a step of the scan
    /// for sparse huge folios is due. Runs at the lowest scheduling priority.
    fn work(&'static self) {
        thread::defer();
        loop {
            let wakeups = self.worker.wakeups.load(Relaxed);
            while self.worker.queue.with(|queue| !queue.is_empty()) {
                // If the policy panics, the range is dropped. Later writes propose it again.
                callback::catch_panic(|| self.worker.step(1));
            }
            let rest = callback::catch_panic(|| sweep::run_due_step(self)).flatten();
            futex::wait(&self.worker.wakeups, wakeups, rest, Scope::Private);
        }
    }
}
