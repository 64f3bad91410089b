//! Queues of requests and of scan results for the control loop.
//!
//! The control loop never waits for the lock of a queue, because the thread that holds the lock may have lower priority
//! and wait for a CPU.

use crate::scan::ScanItem;
use crate::status::Status;
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::Sender;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Maximum number of messages of a scan that are queued for the control loop.
const MAX_SCAN_MESSAGES: usize = 4096;

/// How long a scan waits while the queue of its messages is full. Then it adds its messages anyway, since the control
/// loop may have ended.
const FULL_QUEUE_TIMEOUT: Duration = Duration::from_secs(10);

/// A request to the control loop.
pub enum LoopRequest {
    Status(Sender<Status>),
    /// Purges volatile files until this many bytes are freed or no file can be purged. Answers with the number of bytes
    /// freed.
    Purge(u64, Sender<u64>),
    Stop,
}

/// The queues of the control loop, and the eventfd that wakes the loop.
pub struct SubmissionQueue {
    requests: Mutex<Vec<LoopRequest>>,
    scan_messages: Mutex<Vec<ScanMessage>>,
    wake: OwnedFd,
}

/// A message from a scan: an item, or the end of the scan.
pub enum ScanMessage {
    ScanItem(ScanItem),
    ScanEnded,
}

impl SubmissionQueue {
    /// Creates empty queues.
    ///
    /// # Errors
    ///
    /// Errors of `eventfd`.
    pub fn new() -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { requests: Mutex::default(), scan_messages: Mutex::default(), wake })
    }

    /// Queues a request to the control loop, and wakes the loop.
    pub fn send(&self, request: LoopRequest) {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).push(request);
        self.wake();
    }

    /// Queues messages of a scan and empties `messages`. While the queue is full, blocks for up to 10 s.
    pub fn send_scan_messages(&self, messages: &mut Vec<ScanMessage>) {
        let lock = || self.scan_messages.lock().unwrap_or_else(PoisonError::into_inner);
        let begun = Instant::now();
        while lock().len() >= MAX_SCAN_MESSAGES && begun.elapsed() < FULL_QUEUE_TIMEOUT {
            std::thread::sleep(Duration::from_millis(1));
        }
        lock().append(messages);
        self.wake();
    }

    pub fn take_requests(&self) -> Vec<LoopRequest> {
        try_take_all(&self.requests)
    }

    pub fn take_scan_messages(&self) -> Vec<ScanMessage> {
        try_take_all(&self.scan_messages)
    }

    /// Resets the eventfd. If another thread held the lock of a queue, the control loop processes that queue at its
    /// next periodic check, some ten milliseconds later.
    pub fn reset_waker(&self) {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
    }

    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

/// The descriptor is readable once a request or a message of a scan was queued.
impl AsFd for SubmissionQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

/// Removes and returns all entries of a queue. Returns none while another thread holds the lock of the queue.
fn try_take_all<T>(queue: &Mutex<Vec<T>>) -> Vec<T> {
    queue.try_lock().map(|mut queue| std::mem::take(&mut *queue)).unwrap_or_default()
}
