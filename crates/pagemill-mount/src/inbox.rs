//! Where others leave what they want of the steward, and what they found.
//!
//! The steward only tries to lock it: who has the lock may be of lower priority and off the processor.

use crate::scan::Found;
use crate::status::Status;
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::Sender;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// So much is left at a time, unless the steward does not come for so long: it may have ended.
const MAX_FOUND: usize = 4096;
const PATIENCE: Duration = Duration::from_secs(10);

/// What others want.
pub enum Request {
    Status(Sender<Status>),
    /// Purge so much; answered with what went.
    Purge(u64, Sender<u64>),
    Stop,
}

/// Where others leave what they want, and what they found.
pub struct Inbox {
    requests: Mutex<Vec<Request>>,
    found: Mutex<Vec<Message>>,
    wake: OwnedFd,
}

/// What a look at everything tells.
pub enum Message {
    Found(Found),
    ScanEnded,
}

impl Inbox {
    /// # Errors
    ///
    /// What `eventfd` says.
    pub fn new() -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { requests: Mutex::default(), found: Mutex::default(), wake })
    }

    /// Leaves a request.
    pub fn send(&self, request: Request) {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).push(request);
        self.wake();
    }

    /// Leaves what was found; `messages` is empty afterwards. Waits while there is much that was not taken yet.
    pub fn send_found(&self, messages: &mut Vec<Message>) {
        let lock = || self.found.lock().unwrap_or_else(PoisonError::into_inner);
        let begun = Instant::now();
        while lock().len() >= MAX_FOUND && begun.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(1));
        }
        lock().append(messages);
        self.wake();
    }

    pub fn take_requests(&self) -> Vec<Request> {
        take(&self.requests)
    }

    pub fn take_found(&self) -> Vec<Message> {
        take(&self.found)
    }

    /// Takes back what made it readable. Who held a lock just then is heard at the next look, ten milliseconds later at most.
    pub fn calm(&self) {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
    }

    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

/// Readable when something was left.
impl AsFd for Inbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

/// Takes what is there, if nobody holds the lock just now.
fn take<T>(from: &Mutex<Vec<T>>) -> Vec<T> {
    let guard: Option<MutexGuard<'_, Vec<T>>> = from.try_lock().ok();
    guard.map_or_else(Vec::new, |mut guard| std::mem::take(&mut *guard))
}
