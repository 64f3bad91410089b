//! Queue of requests and scan results for the control loop.
//!
//! The control loop only tries to lock it: the thread that holds the lock may have lower priority and be off the CPU.

use crate::scan::ScanItem;
use crate::status::Status;
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::Sender;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Maximum number of queued results, and how long a scan waits for room: the control loop may have ended.
const MAX_FOUND: usize = 4096;
const TIMEOUT: Duration = Duration::from_secs(10);

/// A request to the control loop.
pub enum LoopRequest {
    Status(Sender<Status>),
    /// Purge this many bytes; answered with the bytes freed.
    Purge(u64, Sender<u64>),
    Stop,
}

/// The queue and its waker.
pub struct SubmissionQueue {
    requests: Mutex<Vec<LoopRequest>>,
    found: Mutex<Vec<Message>>,
    wake: OwnedFd,
}

/// A message of a scan.
pub enum Message {
    ScanItem(ScanItem),
    ScanEnded,
}

impl SubmissionQueue {
    /// # Errors
    /// # Errors
    ///
    /// Errors of `eventfd`.
    pub fn new() -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { requests: Mutex::default(), found: Mutex::default(), wake })
    }

    /// Queues a request.
    pub fn send(&self, request: LoopRequest) {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).push(request);
        self.wake();
    }

    /// Queues scan results and empties `messages`. Blocks while too many results are queued.
    pub fn send_found(&self, messages: &mut Vec<Message>) {
        let lock = || self.found.lock().unwrap_or_else(PoisonError::into_inner);
        let begun = Instant::now();
        while lock().len() >= MAX_FOUND && begun.elapsed() < TIMEOUT {
            std::thread::sleep(Duration::from_millis(1));
        }
        lock().append(messages);
        self.wake();
    }

    pub fn take_requests(&self) -> Vec<LoopRequest> {
        take(&self.requests)
    }

    pub fn take_found(&self) -> Vec<Message> {
        take(&self.found)
    }

    /// Resets the waker. A message under a lock that was busy is taken at the next look, at most ten milliseconds
    /// later.
    pub fn calm(&self) {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
    }

    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

/// Readable when a message was queued.
impl AsFd for SubmissionQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

/// Takes all messages, unless another thread holds the lock.
fn take<T>(from: &Mutex<Vec<T>>) -> Vec<T> {
    let guard: Option<MutexGuard<'_, Vec<T>>> = from.try_lock().ok();
    guard.map_or_else(Vec::new, |mut guard| std::mem::take(&mut *guard))
}
