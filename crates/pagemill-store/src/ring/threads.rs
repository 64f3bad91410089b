//! Threads that read and write where the kernel refuses rings: the same transfers, with blocking calls.
//!
//! All rings of the process share one pool. A thread is spawned when more jobs wait than threads are idle, and exits
//! after an idle time. Locks: that of the pool, and that of a completion queue; never both.
#![allow(unsafe_code)] // transfers name memory

use super::backend::Call;
use crate::errno::{ECANCELED, EIO};
use crate::uring::{Completion, Target, Transfer, generation};
use pagemill_sys::disk;
use pagemill_sys::thread::{self, Work};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicPtr, Ordering::AcqRel, Ordering::Acquire};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Most threads: enough to keep a disk busy.
const MOST_THREADS: usize = 16;

/// A thread exits after this time without work.
const IDLE: Duration = Duration::from_secs(10);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Completion queue of one ring.
struct CompletionQueue {
    done: Mutex<Vec<Completion>>,
    call: Arc<Call>,
}

struct ThreadJob {
    transfer: Transfer,
    token: u64,
    completions: Arc<CompletionQueue>,
}

impl ThreadJob {
    fn complete(&self, result: i32) {
        lock(&self.completions.done).push(Completion { token: self.token, result });
        self.completions.call.waker.wake();
    }

    fn run(&self) {
        let Transfer { target: Target::Descriptor(number), is_write, addr, len_bytes, offset, .. } = self.transfer
        else {
            return self.complete(-EIO);
        };
        let len = len_bytes as usize;
        let result = if is_write {
            // SAFETY: the caller of `queue` promised that the memory lasts until the completion, which comes below.
            unsafe { disk::write_at(number, addr, len, offset) }
        } else {
            // SAFETY: as above.
            unsafe { disk::read_at(number, addr, len, offset) }
        };
        self.complete(match result {
            Ok(bytes) => bytes as i32,
            Err(error) => -error.raw_os_error().unwrap_or(EIO),
        });
    }
}

/// The threads of a process, and their jobs.
struct ThreadPool {
    generation: u32,
    state: Mutex<PoolQueue>,
    more: Condvar,
}

#[derive(Default)]
struct PoolQueue {
    jobs: VecDeque<ThreadJob>,
    threads: usize,
    idle: usize,
}

/// The pool of this process. A fork child creates its own, because the parent's pool has no threads there.
static POOL: AtomicPtr<ThreadPool> = AtomicPtr::new(std::ptr::null_mut());

fn pool() -> &'static ThreadPool {
    let generation = generation().unwrap_or_default();
    let seen = POOL.load(Acquire);
    // SAFETY: never freed once it is stored there.
    if let Some(pool) = unsafe { seen.as_ref() }
        && pool.generation == generation
    {
        return pool;
    }
    let new = Box::into_raw(Box::new(ThreadPool { generation, state: Mutex::default(), more: Condvar::new() }));
    match POOL.compare_exchange(seen, new, AcqRel, Acquire) {
        // SAFETY: just created, and never freed from here on.
        Ok(_) => unsafe { &*new },
        Err(others) => {
            // SAFETY: created above, and never shared.
            drop(unsafe { Box::from_raw(new) });
            // SAFETY: never freed once it is stored there; only pools of this process are stored.
            unsafe { &*others }
        }
    }
}

impl ThreadPool {
    fn add(&'static self, jobs: &mut VecDeque<ThreadJob>) {
        let mut state = lock(&self.state);
        state.jobs.append(jobs);
        let wanted = state.jobs.len().saturating_sub(state.idle).min(MOST_THREADS - state.threads);
        state.threads += wanted;
        drop(state);
        self.more.notify_all();
        for _ in 0..wanted {
            if thread::spawn(c"pagemill-io", self).is_err() {
                self.leave();
            }
        }
    }

    /// Called when a thread exits or could not be spawned. If no thread is left, runs the jobs here.
    fn leave(&self) {
        let mut state = lock(&self.state);
        state.threads -= 1;
        let left = if state.threads == 0 { std::mem::take(&mut state.jobs) } else { VecDeque::new() };
        drop(state);
        left.iter().for_each(ThreadJob::run);
    }

    /// Removes a transfer from the pool if no thread has begun it.
    fn withdraw(&self, token: u64, completions: &Arc<CompletionQueue>) -> Option<ThreadJob> {
        let mut state = lock(&self.state);
        let is_it = |job: &ThreadJob| job.token == token && Arc::ptr_eq(&job.completions, completions);
        let at = state.jobs.iter().position(is_it)?;
        state.jobs.remove(at)
    }

    fn next(&self) -> Option<ThreadJob> {
        let mut state = lock(&self.state);
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            state.idle += 1;
            let (woken, waited) = self.more.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.idle -= 1;
            if waited.timed_out() && state.jobs.is_empty() {
                return None;
            }
        }
    }
}

impl Work for ThreadPool {
    fn work(&'static self) {
        while let Some(job) = self.next() {
            job.run();
        }
        self.leave();
    }
}

/// The pool's interface for one ring: queued jobs, and completions.
pub(super) struct Crew {
    queued: VecDeque<ThreadJob>,
    ready: VecDeque<Completion>,
    completions: Arc<CompletionQueue>,
}

impl Crew {
    /// # Errors
    ///
    /// `EMFILE` for its waker.
    pub fn new() -> std::io::Result<Self> {
        let completions = Arc::new(CompletionQueue { done: Mutex::default(), call: Call::new()? });
        Ok(Self { queued: VecDeque::new(), ready: VecDeque::new(), completions })
    }

    pub fn call(&self) -> &Arc<Call> {
        &self.completions.call
    }

    /// # Safety
    ///
    /// As `uring::Ring::queue`; the file stays open until the completion has come.
    pub unsafe fn queue(&mut self, transfer: &Transfer, token: u64) {
        self.queued.push_back(ThreadJob { transfer: *transfer, token, completions: self.completions.clone() });
    }

    #[cfg(any(test, feature = "test-util"))]
    pub fn has_queued(&mut self) -> bool {
        !self.queued.is_empty()
    }

    pub fn submit(&mut self) {
        if !self.queued.is_empty() {
            pool().add(&mut self.queued);
        }
    }

    pub fn cancel(&mut self, token: u64) {
        let queued = self.queued.iter().position(|job| job.token == token).and_then(|at| self.queued.remove(at));
        if let Some(job) = queued.or_else(|| pool().withdraw(token, &self.completions)) {
            job.complete(-ECANCELED);
        }
    }

    /// Waits for completions, for the waker, or until the timeout.
    pub fn wait(&mut self, timeout: Duration) {
        self.submit();
        self.collect();
        if self.ready.is_empty() {
            self.completions.call.waker.wait(timeout);
            self.collect();
        }
    }

    fn collect(&mut self) {
        self.ready.extend(lock(&self.completions.done).drain(..));
    }

    pub fn pop(&mut self) -> Option<Completion> {
        if self.ready.is_empty() {
            self.collect();
        }
        self.ready.pop_front()
    }
}
