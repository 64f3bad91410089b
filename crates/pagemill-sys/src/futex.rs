//! Waiting on a word (futex), in one process or across processes that share the word.
#![allow(unsafe_code)] // the futex system call

use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Which threads may wake the waiting thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Threads of this process.
    Private,
    /// Any process that maps the same page.
    Shared,
}

impl Scope {
    fn flag(self) -> libc::c_int {
        match self {
            Self::Private => libc::FUTEX_PRIVATE_FLAG,
            Self::Shared => 0,
        }
    }
}

/// Blocks while `*word == expected`, until the thread is woken or `timeout` has passed (`None`: no timeout). May return
/// early.
pub fn wait(word: &AtomicU32, expected: u32, timeout: Option<Duration>, scope: Scope) {
    let time = timeout
        .map(|limit| libc::timespec { tv_sec: limit.as_secs() as libc::time_t, tv_nsec: limit.subsec_nanos() as _ });
    let time_ptr = time.as_ref().map_or(std::ptr::null(), |time| time as *const libc::timespec);
    // SAFETY: `word` and `time` are alive during the call.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT | scope.flag(), expected, time_ptr) };
}

/// Wakes up to `count` threads that wait on `word`.
pub fn wake(word: &AtomicU32, count: i32, scope: Scope) {
    // SAFETY: `word` is alive during the call.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE | scope.flag(), count) };
}
