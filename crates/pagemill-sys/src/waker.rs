//! A waker (eventfd): one thread waits for it, and any thread may wake that thread.
#![allow(unsafe_code)] // eventfd, poll

use crate::file::Fd;
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
        // SAFETY: the call only creates a descriptor.
        let number = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if number < 0 { Err(io::Error::last_os_error()) } else { Ok(Self(Fd::own(number))) }
    }

    /// Wakes the waiting thread. If none waits, the next wait returns at once.
    pub fn wake(&self) {
        let one = 1u64;
        // SAFETY: the call reads eight bytes. It could fail only after 2^64 wake-ups without a wait.
        unsafe { libc::syscall(libc::SYS_write, self.number(), &raw const one, size_of::<u64>()) };
    }

    /// Waits for a wake-up, at most for `timeout`. Returns whether the thread was woken.
    pub fn wait(&self, timeout: Duration) -> bool {
        if !is_readable(self.as_fd(), timeout) {
            return false;
        }
        let mut count = 0u64;
        // SAFETY: the call writes eight bytes into `count`.
        let bytes = unsafe { libc::syscall(libc::SYS_read, self.number(), &raw mut count, size_of::<u64>()) };
        bytes == size_of::<u64>() as i64
    }

    pub fn number(&self) -> i32 {
        self.0.number()
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open for as long as `self` lives.
        unsafe { BorrowedFd::borrow_raw(self.number()) }
    }
}

/// Waits until the descriptor is readable, a signal arrives, or `timeout` has passed. Returns whether the descriptor is
/// readable.
pub fn is_readable(descriptor: BorrowedFd<'_>, timeout: Duration) -> bool {
    use std::os::fd::AsRawFd;
    let mut poll = libc::pollfd { fd: descriptor.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let mut time = libc::timespec {
        tv_sec: timeout.as_secs().min(i64::MAX as u64) as i64,
        tv_nsec: timeout.subsec_nanos().into(),
    };
    // SAFETY: the call uses only `poll` and `time`; there is no signal mask.
    let count = unsafe {
        libc::syscall(libc::SYS_ppoll, &raw mut poll, 1, &raw mut time, std::ptr::null::<libc::sigset_t>(), 0_usize)
    };
    count == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two wake-ups before a wait must count as one, so that a second wait finds none.
    #[test]
    fn wakes_are_merged() {
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
