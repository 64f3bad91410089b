//! Atomics, waiting and the coarse clock (loom's or `modelled` ones under `--cfg loom` and `--cfg shuttle`), and a lock that
//! never allocates.
#![cfg_attr(loom, allow(dead_code))] // only the atomics are used there
#![allow(unsafe_code)] // a value behind the lock

#[cfg(shuttle)]
pub(crate) mod modelled;

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, fence};
#[cfg(shuttle)]
pub(crate) use modelled::{AtomicU32, AtomicU64, AtomicUsize, coarse_ns, pause, spin_loop};
#[cfg(not(any(loom, shuttle)))]
pub(crate) use pagemill_sys::{clock::coarse_ns, thread::pause};
#[cfg(not(shuttle))]
pub(crate) use std::hint::spin_loop;
#[cfg(not(any(loom, shuttle)))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize};

#[cfg(not(loom))]
pub(crate) use std::sync::atomic::fence;

#[cfg(not(loom))]
use std::sync::atomic::Ordering::SeqCst;
pub(crate) use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
#[cfg(not(loom))]
use std::time::Duration;

#[cfg(not(shuttle))]
use pagemill_sys::futex::{self, Scope};

#[cfg(shuttle)]
use modelled::AtomicU32 as Word;
#[cfg(not(shuttle))]
use std::sync::atomic::AtomicU32 as Word;

/// A mutual exclusion lock that may be taken inside `malloc`: one word, no allocation, no thread state.
///
/// It guards code, not data: what it protects says so at its field. Held
/// across `fork` by the forking thread it is released on both sides.
#[derive(Default)]
pub struct Lock {
    /// 0 free, 1 held, 2 held and somebody sleeps.
    word: Word,
}

impl Lock {
    pub const fn new() -> Self {
        Self { word: Word::new(0) }
    }

    pub fn lock(&self) -> Guard<'_> {
        self.acquire();
        Guard(self)
    }

    /// Takes the lock without a guard; [`Lock::release`] ends it. For `fork` handlers.
    pub fn acquire(&self) {
        if self.word.compare_exchange(0, 1, Acquire, Relaxed).is_err() {
            self.acquire_slow();
        }
    }

    /// Takes the lock if nobody has it; says whether it did.
    pub fn try_acquire(&self) -> bool {
        self.word.compare_exchange(0, 1, Acquire, Relaxed).is_ok()
    }

    /// As [`Lock::lock`], if nobody has it.
    pub fn try_lock(&self) -> Option<Guard<'_>> {
        self.try_acquire().then(|| Guard(self))
    }

    #[cold]
    fn acquire_slow(&self) {
        for _ in 0..100 {
            if self.word.load(Relaxed) == 0 && self.word.compare_exchange(0, 1, Acquire, Relaxed).is_ok() {
                return;
            }
            spin_loop();
        }
        while self.word.swap(2, Acquire) != 0 {
            sleep_while_held(&self.word);
        }
    }

    /// Gives the lock up. Only the one who has it may.
    pub fn release(&self) {
        if self.word.swap(0, Release) == 2 {
            wake_one(&self.word);
        }
    }
}

#[cfg(not(shuttle))]
fn sleep_while_held(word: &Word) {
    futex::wait(word, 2, None, Scope::Private);
}

#[cfg(not(shuttle))]
fn wake_one(word: &Word) {
    futex::wake(word, 1, Scope::Private);
}

#[cfg(not(any(loom, shuttle)))]
fn sleep_while(word: &Word, value: u32, timeout: Option<Duration>) {
    futex::wait(word, value, timeout, Scope::Private);
}

#[cfg(not(any(loom, shuttle)))]
fn wake_all(word: &Word) {
    futex::wake(word, i32::MAX, Scope::Private);
}

/// Without a timeout until the word has changed, so that a sign which was lost is missed.
#[cfg(shuttle)]
fn sleep_while(word: &Word, value: u32, timeout: Option<Duration>) {
    pause();
    while timeout.is_none() && word.load(SeqCst) == value {
        pause();
    }
}

#[cfg(shuttle)]
fn wake_all(_word: &Word) {}

#[cfg(shuttle)]
fn sleep_while_held(_word: &Word) {
    pause();
}

#[cfg(shuttle)]
fn wake_one(_word: &Word) {}

pub struct Guard<'lock>(&'lock Lock);

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.0.release();
    }
}

/// A value that only who has its lock can reach.
#[cfg(not(loom))]
#[derive(Default)]
pub(crate) struct Guarded<T> {
    lock: Lock,
    value: std::cell::UnsafeCell<T>,
}

// SAFETY: one thread at a time reaches the value, through the lock.
#[cfg(not(loom))]
unsafe impl<T: Send> Sync for Guarded<T> {}

#[cfg(not(loom))]
impl<T> Guarded<T> {
    pub const fn new(value: T) -> Self {
        Self { lock: Lock::new(), value: std::cell::UnsafeCell::new(value) }
    }

    /// Lets `act` have the value. It must not come here again.
    pub fn with<R>(&self, act: impl FnOnce(&mut T) -> R) -> R {
        let _guard = self.lock.lock();
        // SAFETY: the lock is held until `act` has returned, so this is the only reference.
        act(unsafe { &mut *self.value.get() })
    }

    /// As [`Guarded::with`], unless somebody has it.
    pub fn try_with<R>(&self, act: impl FnOnce(&mut T) -> R) -> Option<R> {
        let is_ours = self.lock.try_acquire();
        is_ours.then(|| {
            let _guard = Guard(&self.lock);
            // SAFETY: as in `with`.
            act(unsafe { &mut *self.value.get() })
        })
    }

    /// Takes the lock when the value is so. For `fork` handlers.
    pub fn acquire_when(&self, is_so: impl Fn(&T) -> bool) {
        loop {
            self.lock.acquire();
            // SAFETY: the lock is held, so nobody changes it.
            if is_so(unsafe { &*self.value.get() }) {
                return;
            }
            self.lock.release();
            pause();
        }
    }

    /// Ends [`Guarded::acquire_when`].
    pub fn release(&self) {
        self.lock.release();
    }
}

/// Something happens time and again: threads sleep until it does once more. While nobody sleeps, saying so costs two looks at one
/// line.
#[cfg(not(loom))]
#[derive(Default)]
pub(crate) struct Signal {
    count: Word,
    sleepers: Word,
}

#[cfg(not(loom))]
impl Signal {
    /// How often it has happened so far.
    pub fn count(&self) -> u32 {
        self.count.load(SeqCst)
    }

    /// It has happened: all who sleep go on.
    pub fn raise(&self) {
        self.count.fetch_add(1, SeqCst);
        // Either a sleeper is seen here, or he sees the count.
        if self.sleepers.load(SeqCst) > 0 {
            wake_all(&self.count);
        }
    }

    /// Sleeps while it has not happened since it was `seen`, for that long at most. May return early.
    pub fn wait(&self, seen: u32, timeout: Option<Duration>) {
        self.sleepers.fetch_add(1, SeqCst);
        if self.count.load(SeqCst) == seen {
            sleep_while(&self.count, seen, timeout);
        }
        self.sleepers.fetch_sub(1, SeqCst);
    }
}

/// Waits in short steps: first spinning, for what lasts some microseconds, then giving up the processor.
#[cfg(not(loom))]
pub(crate) struct Patience {
    began_ns: u64,
}

#[cfg(not(loom))]
impl Patience {
    const SPIN_NS: u64 = 100_000;

    pub fn new() -> Self {
        Self { began_ns: pagemill_sys::clock::fine_ns() }
    }

    pub fn pause(&mut self) {
        if self.waited_ns() < Self::SPIN_NS {
            spin_loop();
        } else {
            pause();
        }
    }

    pub fn waited_ns(&self) -> u64 {
        pagemill_sys::clock::fine_ns() - self.began_ns
    }
}

/// Sleeps for some time.
#[cfg(not(any(loom, shuttle)))]
pub(crate) fn sleep(time: std::time::Duration) {
    if !time.is_zero() {
        std::thread::sleep(time);
    }
}

#[cfg(shuttle)]
pub(crate) fn sleep(_time: std::time::Duration) {
    pause();
}

/// A value on cache lines of its own.
#[repr(align(128))]
#[derive(Default)]
pub(crate) struct Padded<T>(pub T);

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    /// Increments that are not atomic by themselves are all there: the lock excludes.
    #[test]
    fn the_lock_excludes() {
        let (lock, count) = (Lock::new(), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..10_000 {
                        let _guard = lock.lock();
                        count.store(count.load(Relaxed) + 1, Relaxed);
                    }
                });
            }
        });
        assert_eq!(count.load(Relaxed), 40_000);
        assert_eq!(lock.word.load(Relaxed), 0);
    }

    /// Two threads that wait for each other in turn, without a timeout: no sign is lost.
    #[test]
    fn signals_are_not_lost() {
        let signals = [Signal::default(), Signal::default()];
        let play = |own: usize| {
            for round in 0..1000 {
                signals[own].raise();
                let other = &signals[1 - own];
                while other.count() <= round {
                    other.wait(round, None);
                }
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| play(0));
            play(1);
        });
        assert!(signals.iter().all(|signal| signal.count() == 1000 && signal.sleepers.load(Relaxed) == 0));
    }
}
