//! Waiting on a word (futex), in one process or across processes that share the word.

use rustix::thread::Timespec;
use rustix::thread::futex::{self, Flags};
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
    fn futex_flags(self) -> Flags {
        match self {
            Self::Private => Flags::PRIVATE,
            Self::Shared => Flags::empty(),
        }
    }
}

/// Blocks while `*word == expected`, until the thread is woken or `timeout` has passed (`None`: no timeout). May return
/// early.
pub fn wait(word: &AtomicU32, expected: u32, timeout: Option<Duration>, scope: Scope) {
    let time =
        timeout.map(|limit| Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) });
    // An error means that the value differs, that the time has passed, or that a signal arrived.
    let _ = futex::wait(word, scope.futex_flags(), expected, time.as_ref());
}

/// Wakes up to `count` threads that wait on `word`.
pub fn wake(word: &AtomicU32, count: i32, scope: Scope) {
    // The call cannot fail: the word is mapped and aligned.
    let _ = futex::wake(word, scope.futex_flags(), count as u32);
}
