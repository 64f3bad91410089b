//! Atomics, waiting, the coarse clock, and a lock that never allocates. Under `--cfg loom` and `--cfg shuttle` the
//! atomics are those of loom or of `modelled`.
#![cfg_attr(loom, allow(dead_code))] // only the atomics are used there
#![allow(unsafe_code)] // a value behind the lock

#[cfg(shuttle)]
pub mod modelled;

#[cfg(loom)]
pub use loom::sync::atomic::{AtomicU32, AtomicU64, fence};
#[cfg(shuttle)]
pub use modelled::{AtomicU32, AtomicU64, AtomicUsize, coarse_ns, pause, spin_loop};
#[cfg(not(any(loom, shuttle)))]
pub use pagemill_sys::{clock::coarse_ns, thread::pause};
#[cfg(not(shuttle))]
pub use std::hint::spin_loop;
#[cfg(not(any(loom, shuttle)))]
pub use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize};

#[cfg(not(loom))]
pub use std::sync::atomic::fence;

#[cfg(not(loom))]
use std::sync::atomic::Ordering::SeqCst;
pub use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
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
/// It guards code, not data: each protected field names its lock. If the forking thread holds it across `fork`, it is
/// released in both processes.
///
/// ```
/// use pagemill::sync::Lock;
///
/// static LOCK: Lock = Lock::new();
/// let guard = LOCK.lock();
/// assert!(LOCK.try_lock().is_none());
/// drop(guard);
/// assert!(LOCK.try_lock().is_some());
/// ```
#[derive(Default)]
pub struct Lock {
    /// 0: free; 1: held; 2: held, with sleepers.
    word: Word,
}

impl Lock {
    #[inline]
    pub const fn new() -> Self {
        Self { word: Word::new(0) }
    }

    #[inline]
    pub fn lock(&self) -> LockGuard<'_> {
        self.acquire();
        LockGuard(self)
    }

    /// Takes the lock without a guard; [`Lock::release`] releases it. For `fork` handlers.
    #[inline]
    pub fn acquire(&self) {
        if self.word.compare_exchange(0, 1, Acquire, Relaxed).is_err() {
            self.acquire_slow();
        }
    }

    /// Takes the lock if it is free; returns whether it did.
    #[inline]
    pub fn try_acquire(&self) -> bool {
        self.word.compare_exchange(0, 1, Acquire, Relaxed).is_ok()
    }

    /// As [`Lock::lock`], but returns `None` if the lock is held.
    #[inline]
    pub fn try_lock(&self) -> Option<LockGuard<'_>> {
        self.try_acquire().then(|| LockGuard(self))
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

    /// Releases the lock. The caller must hold it.
    #[inline]
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

/// Waits, without a timeout, until the word has changed, so that the model detects a lost wake-up.
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

/// Example: [`Lock`].
pub struct LockGuard<'lock>(&'lock Lock);

impl Drop for LockGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.release();
    }
}

/// A value that is accessible only under its lock.
///
/// ```
/// use pagemill_core::sync::Guarded;
///
/// static NAMES: Guarded<Vec<&str>> = Guarded::new(Vec::new());
/// NAMES.with(|names| names.push("tiles"));
/// assert_eq!(NAMES.try_with(|names| names.len()), Some(1));
/// ```
#[cfg(not(loom))]
#[derive(Default)]
pub struct Guarded<T> {
    lock: Lock,
    /// The lock is held by [`Guarded::acquire_when`], and no reference to the value exists.
    is_acquired: std::sync::atomic::AtomicBool,
    value: std::cell::UnsafeCell<T>,
}

// SAFETY: one thread at a time accesses the value, through the lock.
#[cfg(not(loom))]
unsafe impl<T: Send> Sync for Guarded<T> {}

#[cfg(not(loom))]
impl<T> Guarded<T> {
    #[inline]
    pub const fn new(value: T) -> Self {
        let is_acquired = std::sync::atomic::AtomicBool::new(false);
        Self { lock: Lock::new(), is_acquired, value: std::cell::UnsafeCell::new(value) }
    }

    /// Calls `act` with the value under the lock. `act` must not take the same lock.
    #[inline]
    pub fn with<R>(&self, act: impl FnOnce(&mut T) -> R) -> R {
        let _guard = self.lock.lock();
        // SAFETY: the lock is held until `act` has returned, so this is the only reference.
        act(unsafe { &mut *self.value.get() })
    }

    /// As [`Guarded::with`], but returns `None` if the lock is held.
    #[inline]
    pub fn try_with<R>(&self, act: impl FnOnce(&mut T) -> R) -> Option<R> {
        let is_ours = self.lock.try_acquire();
        is_ours.then(|| {
            let _guard = LockGuard(&self.lock);
            // SAFETY: as in `with`.
            act(unsafe { &mut *self.value.get() })
        })
    }

    /// Takes the lock as soon as the value satisfies `is_so`. For `fork` handlers.
    pub fn acquire_when(&self, is_so: impl Fn(&T) -> bool) {
        loop {
            self.lock.acquire();
            // SAFETY: the lock is held, so no other thread changes the value.
            if is_so(unsafe { &*self.value.get() }) {
                self.is_acquired.store(true, Relaxed);
                return;
            }
            self.lock.release();
            pause();
        }
    }

    /// Releases the lock of [`Guarded::acquire_when`].
    ///
    /// # Panics
    ///
    /// If the lock is not held by it.
    #[inline]
    pub fn release(&self) {
        assert!(self.is_acquired.swap(false, Relaxed));
        self.lock.release();
    }
}

/// A repeated event on which threads can sleep. Without sleepers, raising it costs two accesses to one cache line.
///
/// Example: [`Lock`].
#[cfg(not(loom))]
#[derive(Default)]
pub struct EventCount {
    count: Word,
    sleepers: Word,
}

#[cfg(not(loom))]
impl EventCount {
    /// Number of events so far.
    #[inline]
    pub fn count(&self) -> u32 {
        self.count.load(SeqCst)
    }

    /// Counts an event and wakes all sleepers.
    #[inline]
    pub fn raise(&self) {
        self.count.fetch_add(1, SeqCst);
        // Either this thread sees the sleeper, or the sleeper sees the new count.
        if self.sleepers.load(SeqCst) > 0 {
            wake_all(&self.count);
        }
    }

    /// Sleeps until an event after number `seen`, at most `timeout`. May return early.
    pub fn wait(&self, seen: u32, timeout: Option<Duration>) {
        self.sleepers.fetch_add(1, SeqCst);
        if self.count.load(SeqCst) == seen {
            sleep_while(&self.count, seen, timeout);
        }
        self.sleepers.fetch_sub(1, SeqCst);
    }
}

/// Backoff for a wait: first spins (100 us), then yields the processor.
///
/// Example: [`Lock`].
#[cfg(not(loom))]
pub struct Backoff {
    began_ns: u64,
}

#[cfg(not(loom))]
impl Default for Backoff {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(not(loom))]
impl Backoff {
    const SPIN_NS: u64 = 100_000;

    #[inline]
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

/// Sleeps for `time`; a zero time returns at once.
#[cfg(not(any(loom, shuttle)))]
pub fn sleep(time: std::time::Duration) {
    if !time.is_zero() {
        std::thread::sleep(time);
    }
}

#[cfg(shuttle)]
pub fn sleep(_time: std::time::Duration) {
    pause();
}

/// A value on separate cache lines.
///
/// Example: [`Lock`].
#[repr(align(128))]
#[derive(Default)]
pub struct Padded<T>(pub T);

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    /// Non-atomic increments under the lock are all counted: the lock excludes.
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

    /// Two threads wait for each other in turn, without a timeout: no wake-up is lost.
    #[test]
    fn events_are_not_lost() {
        let events = [EventCount::default(), EventCount::default()];
        let play = |own: usize| {
            for round in 0..1000 {
                events[own].raise();
                let other = &events[1 - own];
                while other.count() <= round {
                    other.wait(round, None);
                }
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| play(0));
            play(1);
        });
        assert!(events.iter().all(|event| event.count() == 1000 && event.sleepers.load(Relaxed) == 0));
    }
}
