//! The transfer engine: one thread with a ring, which does the transfers of all threads that have no ring of their own.
//!
//! The thread is spawned for the first batch of transfers and exits after an idle time. The lock of its queue is held
//! for a few instructions; completion callbacks run outside of it.

use super::errno::{self, ECANCELED};
use super::file::FileHandle;
use super::ring::{Event, Ring, RingWaker, Settings};
use super::transfer::{Direction, Transfer};
use crate::lock;
use crate::uring::generation;
use pagemill_core::callback;
use pagemill_core::stats::{self, Counter};
use pagemill_sys::thread::{self, Work};
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::task::{Wake, Waker};
use std::time::Duration;

/// Maximum number of transfers that wait for a free entry of the ring. The calling thread does any further transfers
/// itself, with blocking calls.
const MAX_WAITING_JOBS: usize = 16 << 10;

/// Maximum number of in-flight transfers of the engine's ring.
const RING_DEPTH: u32 = 128;

/// The engine's thread exits after this time without transfers.
const IDLE_TIMEOUT: Duration =
    if cfg!(any(test, feature = "test-util")) { Duration::from_millis(50) } else { Duration::from_secs(10) };

/// A transfer, and the file that it reads or writes.
struct EngineJob {
    handle: Arc<FileHandle>,
    transfer: Transfer,
}

/// The transfer engine of one process: a queue of transfers, and at most one thread that does them.
struct TransferEngine {
    generation: u32,
    submissions: Mutex<SubmissionQueue>,
    /// Wakes the engine's thread, if there is one. All threads that the engine ever spawns share this waker, because a
    /// [`Cancel`](super::Cancel) may store the waker for as long as the process runs.
    waker: OnceLock<Waker>,
    /// Whether a transfer was cancelled since the engine's thread last searched for cancelled transfers.
    has_cancelled: AtomicBool,
    /// Whether the thread was woken because a store was dropped.
    has_dropped_stores: AtomicBool,
}

/// Transfers (jobs) that are not in the ring yet.
#[derive(Default)]
struct SubmissionQueue {
    jobs: VecDeque<EngineJob>,
    /// Whether the engine has a thread.
    is_running: bool,
    /// Whether the engine's thread takes jobs off the queue before it waits for its ring, so that it need not be woken.
    is_awake: bool,
    /// Ends a wait of the engine's thread for its ring; `None` if the engine has no ring.
    ring_waker: Option<RingWaker>,
}

/// Wakes the thread of the engine, if there is one.
struct EngineWaker(&'static TransferEngine);

impl Wake for EngineWaker {
    fn wake(self: Arc<Self>) {
        self.0.has_cancelled.store(true, SeqCst);
        self.0.wake_thread();
    }
}

/// Starts transfers on the engine of this process. If the process has no engine, does the transfers on the calling
/// thread, with blocking calls.
pub(super) fn start(handle: &Arc<FileHandle>, batch: Vec<Transfer>) {
    let Some(engine) = TransferEngine::of_process() else {
        return batch.into_iter().for_each(|transfer| run_blocking(handle, transfer));
    };
    engine.start(handle, batch);
}

/// Makes the engine of this process close the files of dropped stores, each after its last transfer.
pub(super) fn close_dropped_files() {
    if let Some(engine) = TransferEngine::of_process() {
        engine.has_dropped_stores.store(true, SeqCst);
        engine.wake_thread();
    }
}

/// Does one transfer with blocking calls on the calling thread.
fn run_blocking(handle: &FileHandle, transfer: Transfer) {
    transfer.run_with(|offset, to| handle.read(offset, to), |offset, from| handle.write(offset, from));
}

/// Reports the end of a transfer to its callback, and catches a panic of the callback.
fn report_end(transfer: Transfer, result: io::Result<()>) {
    callback::catch_panic(|| transfer.finish(result));
}

impl TransferEngine {
    /// Returns the engine of this process; `None` in a fork child of a process that had an engine.
    fn of_process() -> Option<&'static Self> {
        static ENGINE: OnceLock<TransferEngine> = OnceLock::new();
        let generation = generation().ok()?;
        let engine = ENGINE.get_or_init(|| Self::new(generation));
        (engine.generation == generation).then_some(engine)
    }

    fn new(generation: u32) -> Self {
        Self {
            generation,
            submissions: Mutex::default(),
            waker: OnceLock::new(),
            has_cancelled: AtomicBool::new(false),
            has_dropped_stores: AtomicBool::new(false),
        }
    }

    /// Queues transfers, and spawns the engine's thread if there is none. Does transfers beyond [`MAX_WAITING_JOBS`] on
    /// the calling thread.
    fn start(&'static self, handle: &Arc<FileHandle>, batch: Vec<Transfer>) {
        let mut submissions = self.submissions();
        let room = MAX_WAITING_JOBS.saturating_sub(submissions.jobs.len());
        let mut batch = batch.into_iter();
        submissions
            .jobs
            .extend(batch.by_ref().take(room).map(|transfer| EngineJob { handle: handle.clone(), transfer }));
        debug_assert!(submissions.jobs.len() <= MAX_WAITING_JOBS);
        let must_spawn = !std::mem::replace(&mut submissions.is_running, true);
        let must_wake = !std::mem::replace(&mut submissions.is_awake, true);
        let ring_waker = submissions.ring_waker.clone().filter(|_| must_wake);
        drop(submissions);
        if let Some(ring_waker) = ring_waker {
            ring_waker.wake();
        }
        if must_spawn && thread::spawn(c"pagemill-ring", self).is_err() {
            self.run_jobs_here();
        }
        batch.for_each(|transfer| run_blocking(handle, transfer));
    }

    fn submissions(&self) -> MutexGuard<'_, SubmissionQueue> {
        lock(&self.submissions)
    }

    /// Ends a wait of the engine's thread for its ring, if there is one.
    fn wake_thread(&self) {
        let ring_waker = self.submissions().ring_waker.clone();
        ring_waker.iter().for_each(RingWaker::wake);
    }

    /// Does all queued transfers on the calling thread, with blocking calls. Used when no thread or no ring is
    /// available.
    fn run_jobs_here(&self) {
        loop {
            let mut submissions = self.submissions();
            debug_assert!(submissions.is_running, "this thread does the jobs");
            let Some(EngineJob { handle, transfer }) = submissions.jobs.pop_front() else {
                (submissions.is_running, submissions.ring_waker) = (false, None);
                return;
            };
            drop(submissions);
            callback::catch_panic(|| run_blocking(&handle, transfer));
        }
    }

    /// The main loop of the engine's thread. Returns after [`IDLE_TIMEOUT`] without transfers.
    fn run_ring(&'static self) -> io::Result<()> {
        let mut ring = Ring::new(&Settings { depth: RING_DEPTH, ..Settings::default() })?;
        let waker = self.waker.get_or_init(|| Waker::from(Arc::new(EngineWaker(self))));
        let ring_waker = ring.waker()?;
        self.submissions().ring_waker = Some(ring_waker);
        loop {
            self.queue_jobs(&mut ring, waker);
            if !self.may_wait(ring.is_full()) {
                continue;
            }
            let events = ring.wait(1, IDLE_TIMEOUT)?;
            self.submissions().is_awake = true;
            while let Some(event) = ring.next() {
                match event {
                    Event::Done { buffer, result, .. } => report_end(buffer, result),
                    Event::Late { id } => {
                        if let Some(transfer) = ring.buffer(id) {
                            callback::catch_panic(|| transfer.tell_late());
                        }
                    }
                }
            }
            let has_cancelled = self.has_cancelled.swap(false, SeqCst);
            if has_cancelled {
                ring.cancel_where(Transfer::is_cancelled);
            }
            ring.sweep();
            let was_woken = has_cancelled || self.has_dropped_stores.swap(false, SeqCst);
            let is_idle = events == 0 && ring.in_flight() == 0 && !was_woken;
            if is_idle && self.try_end() {
                return Ok(());
            }
        }
    }

    /// Returns whether the engine's thread may wait for its ring: the queue is empty, or the ring is full. With an
    /// empty queue, the next job wakes the thread.
    fn may_wait(&self, is_ring_full: bool) -> bool {
        let mut submissions = self.submissions();
        submissions.is_awake = !submissions.jobs.is_empty();
        is_ring_full || submissions.jobs.is_empty()
    }

    /// Returns whether the queue is empty. If so, marks the thread as ended.
    fn try_end(&self) -> bool {
        let mut submissions = self.submissions();
        debug_assert!(submissions.is_running, "this thread does the jobs");
        let is_idle = submissions.jobs.is_empty();
        if is_idle {
            (submissions.is_running, submissions.ring_waker) = (false, None);
        }
        is_idle
    }

    /// Moves queued transfers to the ring until the ring is full or the queue is empty.
    fn queue_jobs(&self, ring: &mut Ring<Transfer>, waker: &Waker) {
        while !ring.is_full() {
            let Some(EngineJob { handle, transfer }) = self.submissions().jobs.pop_front() else { return };
            if let Some(cancel) = transfer.cancel() {
                cancel.wake_when_cancelled(waker);
                if cancel.is_cancelled() {
                    stats::add(Counter::TransfersCancelled, 1);
                    report_end(transfer, Err(errno::error(ECANCELED)));
                    continue;
                }
            }
            let file = match ring.attach_handle(&handle) {
                Ok(file) => file,
                Err(error) => {
                    report_end(transfer, Err(error));
                    continue;
                }
            };
            let offset = transfer.offset();
            let queued = match transfer.direction() {
                Direction::Read => ring.read(file, offset, transfer),
                Direction::Write => ring.write(file, offset, transfer),
            };
            // The ring has room here. If it refused, dropping the transfer would report it as cancelled.
            debug_assert!(queued.is_ok(), "a ring that is not full takes a transfer");
            drop(queued);
        }
    }
}

impl Work for TransferEngine {
    fn work(&'static self) {
        if self.run_ring().is_err() {
            self.run_jobs_here();
        }
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;
    use crate::transfer::{Cancel, Finish, Gather};
    use crate::{Aligned, FileStore, Store};
    use pagemill_core::arena::place;
    use std::io::Write;
    use std::time::Instant;

    /// Three transfers share a [`Cancel`]. Each of them runs on a new thread of the engine. The [`Cancel`] must store
    /// only one waker for these threads.
    #[test]
    fn a_cancel_stores_one_waker_for_all_engine_threads() {
        let engine = place(TransferEngine::new(generation().unwrap())).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, [7; 512]).unwrap();
        let store = FileStore::open_read_only(&path).unwrap();
        let cancel = Cancel::new();
        for _ in 0..3 {
            let gather = Gather::new(1);
            let to = gather.clone();
            let done = move |result, _: Aligned| to.finish(0, result);
            let transfer = Transfer::read(0, Aligned::new(512, 512), done).with_cancel(&cancel);
            engine.start(store.handle(), vec![transfer]);
            assert!(gather.wait(Duration::from_secs(600)).unwrap()[0].is_ok());
            while engine.submissions().is_running {
                std::thread::yield_now();
            }
            assert!(engine.submissions().ring_waker.is_none());
        }
        assert_eq!(cancel.wakers(), 1);
        cancel.cancel();
    }

    /// A store is dropped while a transfer of another file is in flight. The file of the store must be closed before
    /// that transfer ends.
    #[test]
    fn the_file_of_a_dropped_store_is_closed_during_other_transfers() {
        let (empty_pipe, mut writer) = FileHandle::of_pipe();
        let (pipe_read, stored) = (Gather::new(1), Gather::new(1));
        let read_into = |gather: &Arc<Gather>| {
            let to = gather.clone();
            Transfer::read(0, Aligned::new(512, 512), move |result, _: Aligned| to.finish(0, result))
        };
        start(&empty_pipe, vec![read_into(&pipe_read)]);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, [7; 512]).unwrap();
        let store = FileStore::open_read_only(&path).unwrap();
        store.start(vec![read_into(&stored)]);
        assert!(stored.wait(Duration::from_secs(600)).unwrap()[0].is_ok());
        let handle = Arc::downgrade(store.handle());
        drop(store);
        let start = Instant::now();
        while handle.strong_count() > 0 {
            assert!(start.elapsed() < Duration::from_secs(600), "the file stays open");
            std::thread::yield_now();
        }
        writer.write_all(&[0; 512]).unwrap();
        assert!(pipe_read.wait(Duration::from_secs(600)).unwrap()[0].is_ok());
    }
}
