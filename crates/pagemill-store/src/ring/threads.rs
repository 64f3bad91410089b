//! The backend of rings without io_uring: a pool of threads that do the transfers with blocking calls.
//!
//! All rings of a process share the pool. A thread is spawned when more jobs wait than threads are idle, and exits
//! after an idle time. Locks: the lock of the pool, and the lock of a completion queue. No thread holds both.
#![allow(unsafe_code)] // passes addresses of memory to system calls

use super::backend::WakeHandle;
use crate::errno::{ECANCELED, EIO};
use crate::lock;
use crate::uring::{Completion, Target, Transfer, generation};
use pagemill_sys::disk;
use pagemill_sys::thread::{self, Work};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicPtr, Ordering::AcqRel, Ordering::Acquire};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Maximum number of threads of the pool, enough to keep a disk busy.
const MAX_THREADS: usize = 16;

/// A thread of the pool exits after this time without a job.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

/// Completions of one ring that the ring's thread has not collected yet.
struct CompletionQueue {
    done: Mutex<VecDeque<Completion>>,
    handle: Arc<WakeHandle>,
}

/// One piece of a transfer, and the queue for its completion.
struct ThreadJob {
    transfer: Transfer,
    token: u64,
    completions: Arc<CompletionQueue>,
}

impl ThreadJob {
    /// Adds the job's completion to the ring's completion queue, and wakes the thread of the ring.
    fn complete(&self, result: i32) {
        lock(&self.completions.done).push_back(Completion { token: self.token, result });
        self.completions.handle.waker.wake();
    }

    /// Does the transfer with a blocking call, and reports its end.
    fn run(&self) {
        let Transfer { target: Target::Descriptor(number), is_write, addr, len_bytes, offset, .. } = self.transfer
        else {
            return self.complete(-EIO);
        };
        let len = len_bytes as usize;
        let result = if is_write {
            // SAFETY: the caller of `queue` keeps the memory valid until the completion.
            unsafe { disk::write_at(number, addr, len, offset) }
        } else {
            // SAFETY: the caller of `queue` keeps the memory valid until the completion.
            unsafe { disk::read_at(number, addr, len, offset) }
        };
        debug_assert!(!result.as_ref().is_ok_and(|bytes| *bytes > len), "no more is transferred than requested");
        self.complete(match result {
            Ok(bytes) => bytes as i32,
            Err(error) => -error.raw_os_error().unwrap_or(EIO),
        });
    }
}

/// Threads that do the transfers of all rings of a process.
struct ThreadPool {
    generation: u32,
    state: Mutex<PoolQueue>,
    has_jobs: Condvar,
}

/// The queued jobs of the pool, and the number of its threads.
#[derive(Default)]
struct PoolQueue {
    jobs: VecDeque<ThreadJob>,
    /// Number of threads, idle or not.
    threads: usize,
    /// Number of threads that wait for a job.
    idle: usize,
}

/// The pool of this process. A fork child creates a pool of its own, because threads do not survive a fork.
static POOL: AtomicPtr<ThreadPool> = AtomicPtr::new(std::ptr::null_mut());

/// Returns the pool of this process, and creates it if necessary.
fn pool_of_process() -> &'static ThreadPool {
    let generation = generation().unwrap_or_default();
    let seen = POOL.load(Acquire);
    // SAFETY: a pool is never freed once its address is stored in `POOL`.
    if let Some(pool) = unsafe { seen.as_ref() }
        && pool.generation == generation
    {
        return pool;
    }
    let new = Box::into_raw(Box::new(ThreadPool { generation, state: Mutex::default(), has_jobs: Condvar::new() }));
    match POOL.compare_exchange(seen, new, AcqRel, Acquire) {
        // SAFETY: `new` was just created, and is never freed from now on.
        Ok(_) => unsafe { &*new },
        Err(stored) => {
            // SAFETY: `new` was created above and not shared.
            drop(unsafe { Box::from_raw(new) });
            // SAFETY: a pool is never freed once its address is stored in `POOL`.
            unsafe { &*stored }
        }
    }
}

impl ThreadPool {
    /// Queues jobs, and spawns threads if there are fewer idle threads than jobs.
    fn add_jobs(&'static self, jobs: &mut VecDeque<ThreadJob>) {
        let mut state = lock(&self.state);
        state.jobs.append(jobs);
        let wanted = state.jobs.len().saturating_sub(state.idle).min(MAX_THREADS - state.threads);
        debug_assert!(state.idle <= state.threads && state.threads <= MAX_THREADS);
        state.threads += wanted;
        drop(state);
        self.has_jobs.notify_all();
        for _ in 0..wanted {
            if thread::spawn(c"pagemill-io", self).is_err() {
                self.on_thread_end();
            }
        }
    }

    /// Called when a thread exits or could not be spawned. If the pool has no thread any more, runs the queued jobs on
    /// the calling thread.
    fn on_thread_end(&self) {
        let mut state = lock(&self.state);
        debug_assert!(state.idle < state.threads, "the thread that ends is not idle");
        state.threads -= 1;
        let remaining = if state.threads == 0 { std::mem::take(&mut state.jobs) } else { VecDeque::new() };
        drop(state);
        remaining.iter().for_each(ThreadJob::run);
    }

    /// Removes the job with this token from the queue; `None` if a thread has begun the job.
    fn remove_job(&self, token: u64, completions: &Arc<CompletionQueue>) -> Option<ThreadJob> {
        let mut state = lock(&self.state);
        let is_same = |job: &ThreadJob| job.token == token && Arc::ptr_eq(&job.completions, completions);
        let at = state.jobs.iter().position(is_same)?;
        state.jobs.remove(at)
    }

    /// Waits for a job, and removes it from the queue. Returns `None` after [`IDLE_TIMEOUT`] without a job.
    fn wait_for_job(&self) -> Option<ThreadJob> {
        let mut state = lock(&self.state);
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            state.idle += 1;
            debug_assert!(state.idle <= state.threads, "only threads of the pool wait");
            let (woken, waited) =
                self.has_jobs.wait_timeout(state, IDLE_TIMEOUT).unwrap_or_else(PoisonError::into_inner);
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
        while let Some(job) = self.wait_for_job() {
            job.run();
        }
        self.on_thread_end();
    }
}

/// The backend of one ring without io_uring: the ring's queued jobs and completions. The pool's threads do the jobs.
pub(super) struct ThreadBackend {
    /// Jobs that were not passed to the pool yet.
    queued: VecDeque<ThreadJob>,
    completions: Arc<CompletionQueue>,
}

impl ThreadBackend {
    /// Creates a backend without jobs.
    ///
    /// # Errors
    ///
    /// `EMFILE` if the waker gets no descriptor.
    pub fn new() -> std::io::Result<Self> {
        let completions = Arc::new(CompletionQueue { done: Mutex::default(), handle: WakeHandle::new()? });
        Ok(Self { queued: VecDeque::new(), completions })
    }

    pub fn wake_handle(&self) -> &Arc<WakeHandle> {
        &self.completions.handle
    }

    /// Queues a transfer. [`ThreadBackend::submit`] passes it to the pool.
    ///
    /// # Safety
    ///
    /// As `uring::Ring::queue`. The file must stay open until the completion has arrived.
    pub unsafe fn queue(&mut self, transfer: &Transfer, token: u64) {
        self.queued.push_back(ThreadJob { transfer: *transfer, token, completions: self.completions.clone() });
    }

    /// Returns the number of jobs that are queued but not started.
    pub fn queued(&self) -> usize {
        self.queued.len()
    }

    pub fn submit(&mut self) {
        if !self.queued.is_empty() {
            pool_of_process().add_jobs(&mut self.queued);
        }
    }

    /// Cancels the job with this token if no thread has begun it.
    pub fn cancel(&mut self, token: u64) {
        let queued = self.queued.iter().position(|job| job.token == token).and_then(|at| self.queued.remove(at));
        if let Some(job) = queued.or_else(|| pool_of_process().remove_job(token, &self.completions)) {
            job.complete(-ECANCELED);
        }
    }

    /// Passes the queued jobs to the pool. Then waits until a job completes, the waker is woken, or the timeout has
    /// passed.
    pub fn wait(&mut self, timeout: Duration) {
        self.submit();
        let has_completions = !lock(&self.completions.done).is_empty();
        if !has_completions {
            self.completions.handle.waker.wait(timeout);
        }
    }

    pub fn pop(&mut self) -> Option<Completion> {
        lock(&self.completions.done).pop_front()
    }
}
