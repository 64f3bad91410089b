//! A waker (eventfd): one thread waits for it, and any thread may wake that thread.

use crate::file::Fd;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// A waker for one waiting thread. Several wake-ups before a wait count as one.
pub struct Waker(Fd);

impl Waker {
    /// Creates a waker.
    ///
    /// # Errors
    ///
    /// Errors of `eventfd`: `EMFILE`.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC)?.into()))
    }

    /// Wakes the waiting thread. If none waits, the next wait returns at once.
    pub fn wake(&self) {
        // The write could fail only after 2^64 wake-ups without a wait.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Waits for a wake-up, at most for `timeout`. Returns whether the thread was woken.
    pub fn wait(&self, timeout: Duration) -> bool {
        if !is_readable(self.as_fd(), timeout) {
            return false;
        }
        let mut count = [0; size_of::<u64>()];
        rustix::io::read(&self.0, &mut count) == Ok(count.len())
    }

    pub fn number(&self) -> i32 {
        self.0.descriptor_number()
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Waits until the descriptor is readable, a signal arrives, or `timeout` has passed. Returns whether the descriptor is
/// readable.
pub fn is_readable(descriptor: BorrowedFd<'_>, timeout: Duration) -> bool {
    let time = Timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    };
    poll(&mut [PollFd::from_borrowed_fd(descriptor, PollFlags::IN)], Some(&time)) == Ok(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two wake-ups before a wait must count as one, so that a second wait times out. A wake-up by another thread must
    /// end a wait.
    #[test]
    fn wake_ups_before_a_wait_count_as_one() {
        let waker = Waker::new().unwrap();
        assert!(!waker.wait(Duration::ZERO));
        waker.wake();
        waker.wake();
        assert!(waker.wait(Duration::from_secs(600)));
        assert!(!waker.wait(Duration::ZERO));
        std::thread::scope(|scope| {
            scope.spawn(|| waker.wake());
            assert!(waker.wait(Duration::from_secs(600)));
        });
    }
}
