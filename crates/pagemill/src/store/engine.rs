//! One thread with a ring, for threads that start transfers of files without a ring of their own.
//!
//! The thread is spawned for the first batch and exits after an idle time. The lock of its queue is held for a few
//! instructions; transfers are finished outside of it.

use super::errno::{self, ECANCELED};
use super::file::Handle;
use super::ring::{Event, Ring, RingWaker, Settings};
use super::transfer::{Direction, Transfer};
use crate::callback;
use crate::stats::{self, Counter};
use pagemill_sys::ring::generation;
use pagemill_sys::thread::{self, Work};
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Wake, Waker};
use std::time::Duration;

/// Most transfers that wait for room in the ring; a caller does those beyond it itself.
const MOST_WAITING: usize = 16 << 10;

const DEPTH: u32 = 128;

/// The thread exits after this time without work.
const IDLE: Duration = if cfg!(test) { Duration::from_millis(50) } else { Duration::from_secs(10) };

struct EngineJob {
    handle: Arc<Handle>,
    transfer: Transfer,
}

/// The thread of one process.
struct TransferEngine {
    generation: u32,
    submissions: Mutex<SubmissionQueue>,
    /// Shared by all threads of this engine: a cancel may keep it for as long as the process runs.
    waker: OnceLock<Waker>,
}

#[derive(Default)]
struct SubmissionQueue {
    jobs: VecDeque<EngineJob>,
    is_running: bool,
    ring_waker: Option<RingWaker>,
}

/// Wakes the engine's thread, if it runs.
struct EngineWaker(&'static TransferEngine);

impl Wake for EngineWaker {
    fn wake(self: Arc<Self>) {
        let ring_waker = self.0.submissions().ring_waker.clone();
        ring_waker.iter().for_each(RingWaker::wake);
    }
}

/// Starts transfers of a file.
pub(super) fn start(handle: &Arc<Handle>, batch: Vec<Transfer>) {
    let Some(engine) = TransferEngine::of_process() else {
        return batch.into_iter().for_each(|transfer| run(handle, transfer));
    };
    engine.start(handle, batch);
}

/// Does one transfer with blocking calls.
fn run(handle: &Handle, mut transfer: Transfer) {
    let offset = transfer.offset();
    let result = match transfer.direction() {
        _ if transfer.is_cancelled() => Err(errno::error(ECANCELED)),
        Direction::Read => handle.read(offset, transfer.bytes_mut()),
        Direction::Write => handle.write(offset, transfer.bytes()),
    };
    transfer.finish(result);
}

/// Finishes a transfer on the engine's thread.
fn end(transfer: Transfer, result: io::Result<()>) {
    callback::catch_panic(|| transfer.finish(result));
}

impl TransferEngine {
    /// Returns the engine of this process; `None` in a fork child of a process that had one.
    fn of_process() -> Option<&'static Self> {
        static ENGINE: OnceLock<TransferEngine> = OnceLock::new();
        let generation = generation().ok()?;
        let engine = ENGINE.get_or_init(|| Self::new(generation));
        (engine.generation == generation).then_some(engine)
    }

    fn new(generation: u32) -> Self {
        Self { generation, submissions: Mutex::default(), waker: OnceLock::new() }
    }

    fn start(&'static self, handle: &Arc<Handle>, batch: Vec<Transfer>) {
        let mut submissions = self.submissions();
        let room = MOST_WAITING.saturating_sub(submissions.jobs.len());
        let mut batch = batch.into_iter();
        submissions
            .jobs
            .extend(batch.by_ref().take(room).map(|transfer| EngineJob { handle: handle.clone(), transfer }));
        let must_spawn = !std::mem::replace(&mut submissions.is_running, true);
        let ring_waker = submissions.ring_waker.clone();
        drop(submissions);
        if let Some(ring_waker) = ring_waker {
            ring_waker.wake();
        }
        if must_spawn && thread::spawn(c"pagemill-ring", self).is_err() {
            self.run_all();
        }
        batch.for_each(|transfer| run(handle, transfer));
    }

    fn submissions(&self) -> MutexGuard<'_, SubmissionQueue> {
        self.submissions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does the waiting jobs on the calling thread. Used when no thread or no ring is available.
    fn run_all(&self) {
        loop {
            let mut submissions = self.submissions();
            let Some(EngineJob { handle, transfer }) = submissions.jobs.pop_front() else {
                (submissions.is_running, submissions.ring_waker) = (false, None);
                return;
            };
            drop(submissions);
            callback::catch_panic(|| run(&handle, transfer));
        }
    }

    fn drive(&'static self) -> io::Result<()> {
        let mut ring = Ring::new(&Settings { depth: DEPTH, ..Settings::default() })?;
        let waker = self.waker.get_or_init(|| Waker::from(Arc::new(EngineWaker(self))));
        let ring_waker = ring.waker()?;
        self.submissions().ring_waker = Some(ring_waker);
        loop {
            self.take_in(&mut ring, waker);
            let events = ring.wait(1, IDLE)?;
            while let Some(event) = ring.next() {
                match event {
                    Event::Done { buffer, result, .. } => end(buffer, result),
                    Event::Late { id } => {
                        if let Some(transfer) = ring.buffer(id) {
                            callback::catch_panic(|| transfer.tell_late());
                        }
                    }
                }
            }
            ring.cancel_where(Transfer::is_cancelled);
            if ring.in_flight() == 0 {
                ring.sweep();
                if events == 0 && self.may_end() {
                    return Ok(());
                }
            }
        }
    }

    /// Returns whether the queue is empty, and marks the thread as ended if so.
    fn may_end(&self) -> bool {
        let mut submissions = self.submissions();
        let is_idle = submissions.jobs.is_empty();
        if is_idle {
            (submissions.is_running, submissions.ring_waker) = (false, None);
        }
        is_idle
    }

    /// Queues as many jobs as the ring has room for.
    fn take_in(&self, ring: &mut Ring<Transfer>, waker: &Waker) {
        while !ring.is_full() {
            let Some(EngineJob { handle, transfer }) = self.submissions().jobs.pop_front() else { return };
            if let Some(cancel) = transfer.cancel() {
                cancel.wake_when_cancelled(waker);
                if cancel.is_cancelled() {
                    stats::add(Counter::TransfersCancelled, 1);
                    end(transfer, Err(errno::error(ECANCELED)));
                    continue;
                }
            }
            let file = match ring.attach_handle(&handle) {
                Ok(file) => file,
                Err(error) => {
                    end(transfer, Err(error));
                    continue;
                }
            };
            let offset = transfer.offset();
            let queued = match transfer.direction() {
                Direction::Read => ring.read(file, offset, transfer),
                Direction::Write => ring.write(file, offset, transfer),
            };
            // The ring has room here; otherwise the transfer would end as cancelled.
            drop(queued);
        }
    }
}

impl Work for TransferEngine {
    fn work(&'static self) {
        if self.drive().is_err() {
            self.run_all();
        }
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;
    use crate::arena::place;
    use crate::store::transfer::{Cancel, Finish, Gather};
    use crate::store::{Aligned, FileStore};

    /// A long-lived cancel keeps one waker for all threads of the engine, and that waker wakes the current one.
    #[test]
    fn cancels_keep_no_thread() {
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
}
