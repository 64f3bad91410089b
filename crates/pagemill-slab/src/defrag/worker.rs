//! State of the background thread of slab caches ([`crate::defrag::rounds`]): flags, wake-ups, sleep and rest. The
//! engines of caches wake the thread through this state.
//!
//! A thread that drops a cache or stops the background thread waits until the current visit ends, at most one second. A
//! thread that forks waits at most 20 ms.

use pagemill_core::error::Result;
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{AtomicU32, AtomicU64, Backoff, EventCount, Relaxed};
use pagemill_sys::clock;
use std::cell::Cell;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

/// Nanoseconds that the background thread rests for each nanosecond of processor time. So the thread uses at most a
/// twentieth of one processor.
const REST_FACTOR: u64 = if cfg!(shuttle) { 0 } else { 19 };

/// The background thread rests as soon as the rest that is due reaches this time. This is also the minimum rest between
/// two rounds.
pub(crate) const MIN_REST_NS: u64 = if cfg!(shuttle) { 0 } else { 20_000_000 };

/// Maximum length of one rest of the background thread, however long a callback took, because memory may become short
/// during the rest.
const MAX_REST_NS: u64 = 1_000_000_000;

/// Time until the next round if the last round found work that must wait for readers or for another thread that uses a
/// cache. The time is doubled after each further round of this kind, up to `MAX_RETRY_DELAY`.
pub(crate) const MIN_RETRY_DELAY: Duration = Duration::from_millis(10);
/// Maximum of the time between two rounds that must wait for readers or another thread. That time begins with
/// [`MIN_RETRY_DELAY`] and is doubled after each such round.
pub(crate) const MAX_RETRY_DELAY: Duration = Duration::from_secs(4);

/// Maximum time that other threads wait for the background thread to end its visit to a cache. A fork waits less,
/// because a callback may wait for the forking thread. Longer in tests, which check what is left after a drop on busy
/// machines.
pub(crate) const VISIT_TIMEOUT_NS: u64 = if cfg!(test) {
    100_000_000_000
} else if cfg!(feature = "test-util") {
    10_000_000_000
} else {
    1_000_000_000
};
/// Maximum time that a fork waits for the background thread to end its visit to a cache.
const FORK_VISIT_TIMEOUT_NS: u64 = 20_000_000;

/// Value of `parked` while the background thread is awake or rests. The next two are its values while the thread sleeps
/// with a timeout, and without one.
const AWAKE: u32 = 0;
const ASLEEP_WITH_TIMEOUT: u32 = 1;
const ASLEEP: u32 = 2;

/// Work on a slab cache that another process requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "control"), allow(dead_code))]
pub(crate) enum RequestedWork {
    Shrink,
    /// Move all objects of one NUMA node to another.
    Move {
        from: usize,
        to: usize,
    },
    Balance,
}

/// State of the work on a slab cache that another process requests.
#[derive(Debug, Default)]
pub(crate) enum WorkRequest {
    #[default]
    None,
    /// The work was requested and has not begun.
    Wanted(RequestedWork),
    /// The work is in progress.
    Taken,
    /// Number of bytes freed, which the requesting thread takes.
    Done(Result<u64>),
}

impl WorkRequest {
    /// Marks the requested work as in progress, and returns it, if there is a request.
    pub fn begin_if_wanted(&mut self) -> Option<RequestedWork> {
        let Self::Wanted(work) = *self else { return None };
        *self = Self::Taken;
        Some(work)
    }
}

/// State of the background thread that defragments caches. Flags are 0 or 1.
#[derive(Default)]
pub(crate) struct Worker {
    pub(super) is_started: AtomicU32,
    /// 1 if objects were freed or work was requested, so that a round is due.
    pub(super) is_notified: AtomicU32,
    /// 1 if objects were freed since the current round began. The thread then does not sleep without a timeout.
    pub(super) has_frees: AtomicU32,
    /// `AWAKE`, `ASLEEP_WITH_TIMEOUT` or `ASLEEP`.
    parked: AtomicU32,
    /// 1 while the thread visits a cache, or is about to check whether it may visit one.
    is_visiting: AtomicU32,
    is_stopped: AtomicU32,
    /// Number of forks in progress. While it is not 0, the thread visits no cache.
    forks_in_progress: AtomicU32,
    /// The event that the thread sleeps on, and that ends a rest.
    pub(super) wakeups: EventCount,
    /// Processor time that the thread has used for visits.
    used_cpu_ns: AtomicU64,
    /// Time for which the thread has rested.
    rested_ns: AtomicU64,
    /// Value of [`Blocks::freed_with_memory`](crate::alloc::blocks::Blocks::freed_with_memory) at the end of the last
    /// round: how many times a block has become free and kept its memory.
    pub(super) seen_freed_count: AtomicU32,
    /// Time at which `seen_freed_count` changed last.
    pub(super) last_freed_ns: AtomicU64,
}

thread_local! {
    /// Whether the current thread is the background thread.
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

impl Worker {
    pub fn is_stopped(&self) -> bool {
        self.is_stopped.load(SeqCst) == 1
    }

    /// Wakes the background thread if it sleeps, because objects were freed or work was requested. Acquires no lock
    /// and allocates no memory, so any code can call `notify`.
    pub fn notify(&self) {
        if self.is_notified.swap(1, SeqCst) == 1 {
            return;
        }
        // Either the thread sees the flag before it sleeps, or this call sees that the thread sleeps.
        if self.parked.swap(AWAKE, SeqCst) != AWAKE {
            self.wakeups.raise();
        }
    }

    /// Records that a few objects were freed, which is not urgent. Wakes the background thread only if it sleeps
    /// without a timeout, so that it runs a round a while later. As [`Worker::notify`], any code can call `note_frees`.
    pub fn note_frees(&self) {
        if self.has_frees.load(SeqCst) == 1 || self.has_frees.swap(1, SeqCst) == 1 {
            return;
        }
        // Either the thread sees the flag before it sleeps without a timeout, or this call sees that sleep.
        if self.parked.compare_exchange(ASLEEP, AWAKE, SeqCst, SeqCst).is_ok() {
            self.wakeups.raise();
        }
    }

    /// As [`Worker::notify`], for urgent work: also shortens the rest of the background thread.
    pub fn wake(&self) {
        self.is_notified.store(1, SeqCst);
        self.wakeups.raise();
    }

    /// Stops the background thread: it begins no further step. Returns when no step is in progress, or after a second.
    pub fn stop(&self) {
        self.is_stopped.store(1, SeqCst);
        self.wakeups.raise();
        self.wait_for_visit_end(VISIT_TIMEOUT_NS);
    }

    /// Waits until the background thread visits no cache, at most `timeout_ns`. Returns at once if called on the
    /// background thread itself.
    fn wait_for_visit_end(&self, timeout_ns: u64) {
        let mut backoff = Backoff::new();
        while self.is_visiting.load(SeqCst) == 1 && !is_worker() && backoff.waited_ns() < timeout_ns {
            backoff.pause();
        }
    }

    /// Keeps the background thread from visiting caches until [`Worker::release_after_fork`]. Waits for the visit in
    /// progress, because a child would inherit the pinned epoch of the background thread, which does not exist in the
    /// child. The wait has a short timeout, because a callback may wait for the forking thread.
    pub fn acquire_for_fork(&self) {
        self.forks_in_progress.fetch_add(1, SeqCst);
        self.wait_for_visit_end(FORK_VISIT_TIMEOUT_NS);
    }

    /// Allows the background thread to visit caches again. Called after a fork, once for each
    /// [`Worker::acquire_for_fork`].
    pub fn release_after_fork(&self) {
        self.forks_in_progress.fetch_sub(1, SeqCst);
        self.wakeups.raise();
    }

    /// In a fork child: resets the state, because the background thread does not exist there. The next cache of the
    /// child starts a new thread.
    pub fn begin_child(&self) {
        for flag in [&self.is_started, &self.is_notified, &self.has_frees, &self.parked, &self.is_visiting] {
            flag.store(0, SeqCst);
        }
    }

    /// Begins the background thread's visit to a cache, after forks in progress have ended. Returns false if the thread
    /// was stopped.
    pub fn begin_visit(&self) -> bool {
        loop {
            let seen = self.wakeups.count();
            self.is_visiting.store(1, SeqCst);
            if self.is_stopped() {
                self.end_visit();
                return false;
            }
            if self.forks_in_progress.load(SeqCst) == 0 {
                return true;
            }
            self.end_visit();
            self.wakeups.wait(seen, Some(MIN_RETRY_DELAY));
        }
    }

    /// Ends the background thread's visit to a cache.
    pub fn end_visit(&self) {
        self.is_visiting.store(0, SeqCst);
    }

    /// Puts the background thread to sleep until it is woken or the timeout expires. Without a timeout, returns at once
    /// if objects were freed since the current round began. `seen` is the count of the event `wakeups` that was read
    /// before the last check for work.
    pub fn park(&self, seen: u32, timeout: Option<Duration>) {
        self.parked.store(if timeout.is_some() { ASLEEP_WITH_TIMEOUT } else { ASLEEP }, SeqCst);
        let must_sleep_briefly = timeout.is_none() && self.has_frees.load(SeqCst) == 1;
        if self.is_notified.load(SeqCst) == 0 && !must_sleep_briefly {
            self.wakeups.wait(seen, timeout);
        }
        self.parked.store(AWAKE, SeqCst);
    }

    /// Lets the background thread rest for `ns`, or until it is stopped. A wake-up during the rest shortens the rest to
    /// the minimum [`MIN_REST_NS`]. `seen` is the count of the event `wakeups` that was read before the last check for
    /// work.
    pub fn rest(&self, mut ns: u64, seen: u32) {
        let (began_ns, mut last) = (clock::fine_ns(), seen);
        let mut rested_ns = 0;
        while rested_ns < ns && !self.is_stopped() {
            self.wakeups.wait(last, Some(Duration::from_nanos(ns - rested_ns)));
            last = self.wakeups.count();
            ns = if last == seen { ns } else { ns.min(MIN_REST_NS) };
            rested_ns = clock::fine_ns() - began_ns;
        }
        self.rested_ns.fetch_add(rested_ns, Relaxed);
    }

    /// Adds to the statistics the processor time that the background thread has used since its processor time was
    /// `before_ns`. Adds the rest that is due for it to `rest_due_ns`.
    pub fn note_cpu_time(&self, before_ns: u64, rest_due_ns: Option<&mut u64>) {
        let took_ns = clock::own_cpu_ns() - before_ns;
        if let Some(rest_due_ns) = rest_due_ns {
            *rest_due_ns = rest_due_after(*rest_due_ns, took_ns);
        }
        stats::add(Counter::SlabBehindNs, took_ns);
        self.used_cpu_ns.fetch_add(took_ns, Relaxed);
    }
}

/// Records that the current thread is the background thread.
pub(crate) fn set_worker() {
    IS_WORKER.set(true);
}

/// Returns whether the current thread is the background thread. Returns false under shuttle, where all tasks share one
/// thread.
pub(crate) fn is_worker() -> bool {
    IS_WORKER.get()
}

/// Returns how many nanoseconds the background thread must rest after a visit: `rest_due_ns`, which were due before,
/// plus the rest for `took_ns` of processor time.
pub(crate) fn rest_due_after(rest_due_ns: u64, took_ns: u64) -> u64 {
    rest_due_ns.saturating_add(took_ns.saturating_mul(REST_FACTOR)).min(MAX_REST_NS)
}

#[cfg(any(test, feature = "test-util"))]
#[cfg_attr(not(test), allow(dead_code))] // only tests of this crate use all functions
impl Worker {
    pub fn is_started(&self) -> bool {
        self.is_started.load(SeqCst) == 1
    }

    /// Returns whether objects were freed since the current round began.
    pub fn has_frees(&self) -> bool {
        self.has_frees.load(SeqCst) == 1
    }

    /// Returns whether the background thread sleeps without a timeout, after a round that found nothing to do.
    #[cfg(not(shuttle))]
    pub fn is_asleep(&self) -> bool {
        self.parked.load(SeqCst) == ASLEEP && self.is_notified.load(SeqCst) == 0 && !self.has_frees()
    }

    #[cfg(not(shuttle))]
    pub fn wake_count(&self) -> u32 {
        self.wakeups.count()
    }

    #[cfg(not(shuttle))]
    pub fn used_cpu_ns(&self) -> u64 {
        self.used_cpu_ns.load(Relaxed)
    }

    #[cfg(not(shuttle))]
    pub fn rested_ns(&self) -> u64 {
        self.rested_ns.load(Relaxed)
    }

    /// Resets the state, as if the background thread had never been started or stopped.
    #[cfg(shuttle)]
    pub fn reset(&self) {
        self.begin_child();
        self.is_stopped.store(0, SeqCst);
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    /// Few freed objects must end a sleep without a timeout, once, and no other sleep. The next sleep without a timeout
    /// must end at once. Many freed objects must end any sleep, also after few frees.
    #[test]
    fn few_frees_end_only_a_sleep_without_a_timeout() {
        for (parked, wakes) in [(AWAKE, 0), (ASLEEP_WITH_TIMEOUT, 0), (ASLEEP, 1)] {
            let worker = Worker::default();
            worker.parked.store(parked, SeqCst);
            (0..2).for_each(|_| worker.note_frees());
            assert_eq!((worker.wake_count(), worker.has_frees()), (wakes, true), "{parked}");
            worker.park(worker.wake_count(), None);
            worker.parked.store(ASLEEP_WITH_TIMEOUT, SeqCst);
            worker.notify();
            assert_eq!(worker.wake_count(), wakes + 1, "{parked}");
        }
    }
}
