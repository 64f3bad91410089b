//! Synchronization: atomics, waiting, the coarse clock, and a lock that never allocates.
//!
//! Under `--cfg loom` the atomics are loom's. Under `--cfg shuttle` the atomics, the waits and the clock come from
//! `modelled`.
#![allow(unsafe_code)] // the lock that guards a value

#[cfg(shuttle)]
pub mod modelled;

#[cfg(loom)]
pub use loom::sync::atomic::{AtomicU32, AtomicU64, fence};
#[cfg(shuttle)]
pub use modelled::{AtomicU32, AtomicU64, AtomicUsize, coarse_ns, pause, spin_loop};
#[cfg(not(shuttle))]
pub use pagemill_sys::{clock::coarse_ns, thread::pause};
#[cfg(not(shuttle))]
pub use std::hint::spin_loop;
#[cfg(not(any(loom, shuttle)))]
pub use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize};

#[cfg(not(loom))]
pub use std::sync::atomic::fence;

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
pub use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Duration;

#[cfg(not(shuttle))]
use pagemill_sys::futex::{self, Scope};

#[cfg(shuttle)]
use modelled::AtomicU32 as Word;
#[cfg(not(shuttle))]
use std::sync::atomic::AtomicU32 as Word;

/// A mutual exclusion lock that may be acquired inside `malloc`: one word, no allocation, no thread state.
///
/// The lock contains no data. The comment of a field that a lock protects names that lock. A lock that the forking
/// thread holds during `fork` must be released in both processes.
///
/// ```
/// use pagemill_core::sync::Lock;
///
/// static LOCK: Lock = Lock::new();
/// let guard = LOCK.lock();
/// assert!(LOCK.try_lock().is_none());
/// drop(guard);
/// assert!(LOCK.try_lock().is_some());
/// ```
#[derive(Default)]
pub struct Lock {
    /// 0: unlocked; 1: locked; 2: locked, and threads may sleep on the word.
    word: Word,
}

impl Lock {
    #[inline]
    pub const fn new() -> Self {
        Self { word: Word::new(0) }
    }

    /// Acquires the lock until the guard is dropped.
    #[inline]
    pub fn lock(&self) -> LockGuard<'_> {
        self.acquire();
        LockGuard(self)
    }

    /// Acquires the lock without a guard, for `fork` handlers. The caller must call [`Lock::release`] later.
    #[inline]
    pub fn acquire(&self) {
        if !self.try_acquire() {
            self.acquire_slow();
        }
    }

    /// Acquires the lock if it is unlocked; returns whether the lock was acquired.
    #[inline]
    pub fn try_acquire(&self) -> bool {
        self.word.compare_exchange(0, 1, Acquire, Relaxed).is_ok()
    }

    /// As [`Lock::lock`], but returns `None` at once if another thread has the lock.
    pub fn try_lock(&self) -> Option<LockGuard<'_>> {
        self.try_acquire().then(|| LockGuard(self))
    }

    /// Spins briefly, and then sleeps until the lock is unlocked.
    #[cold]
    fn acquire_slow(&self) {
        for _ in 0..100 {
            if self.word.load(Relaxed) == 0 && self.try_acquire() {
                return;
            }
            spin_loop();
        }
        while self.word.swap(2, Acquire) != 0 {
            sleep_while(&self.word, 2, None);
        }
    }

    /// Whether a thread holds the lock. Only for assertions, because that thread may release the lock at any time.
    #[inline]
    pub fn is_held(&self) -> bool {
        self.word.load(Relaxed) != 0
    }

    /// Releases the lock. The caller must hold it.
    #[inline]
    pub fn release(&self) {
        let before = self.word.swap(0, Release);
        debug_assert!(before != 0, "only a held lock is released");
        if before == 2 {
            wake(&self.word, 1);
        }
    }
}

#[cfg(not(shuttle))]
fn sleep_while(word: &Word, value: u32, timeout: Option<Duration>) {
    futex::wait(word, value, timeout, Scope::Private);
}

#[cfg(not(shuttle))]
fn wake(word: &Word, most: i32) {
    futex::wake(word, most, Scope::Private);
}

/// Without a timeout, waits until the word has changed, so that a test under shuttle hangs after a lost wake-up.
#[cfg(shuttle)]
fn sleep_while(word: &Word, value: u32, timeout: Option<Duration>) {
    pause();
    while timeout.is_none() && word.load(SeqCst) == value {
        pause();
    }
}

#[cfg(shuttle)]
fn wake(_word: &Word, _most: i32) {}

/// Releases its [`Lock`] when it is dropped.
///
/// Example: [`Lock`].
pub struct LockGuard<'lock>(&'lock Lock);

impl Drop for LockGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.release();
    }
}

// SAFETY: between a return of `acquire` or a successful `try_acquire` and the next `release`, no other thread gets the
// lock. The shuttle tests of `xarray` and `volatile` fail without this.
unsafe impl lock_api::RawMutex for Lock {
    #[allow(clippy::declare_interior_mutable_const)] // the trait requires a constant
    const INIT: Self = Self::new();
    type GuardMarker = lock_api::GuardSend;

    #[inline]
    fn lock(&self) {
        self.acquire();
    }

    #[inline]
    fn try_lock(&self) -> bool {
        self.try_acquire()
    }

    #[inline]
    unsafe fn unlock(&self) {
        self.release();
    }
}

/// A value together with the [`Lock`] that every access acquires.
///
/// ```
/// use pagemill_core::sync::Guarded;
///
/// static NAMES: Guarded<Vec<&str>> = Guarded::new(Vec::new());
/// let mut names = NAMES.lock();
/// names.push("tiles");
/// drop(names);
/// NAMES.with(|names| names.push("glyphs"));
/// assert_eq!(NAMES.try_with(|names| names.len()), Some(2));
/// ```
#[derive(Default)]
pub struct Guarded<T> {
    value: lock_api::Mutex<Lock, T>,
    /// [`Guarded::acquire_when`] has acquired the lock, and the lock is not released yet.
    is_acquired: AtomicBool,
}

impl<T> Guarded<T> {
    #[inline]
    pub const fn new(value: T) -> Self {
        Self { value: lock_api::Mutex::new(value), is_acquired: AtomicBool::new(false) }
    }

    /// Acquires the lock until the guard is dropped. The guard gives access to the value.
    pub fn lock(&self) -> lock_api::MutexGuard<'_, Lock, T> {
        self.value.lock()
    }

    /// Calls `act` with the value while this thread has the lock. `act` must not acquire the same lock.
    pub fn with<R>(&self, act: impl FnOnce(&mut T) -> R) -> R {
        act(&mut self.value.lock())
    }

    /// As [`Guarded::with`], but returns `None` at once if another thread has the lock.
    pub fn try_with<R>(&self, act: impl FnOnce(&mut T) -> R) -> Option<R> {
        self.value.try_lock().map(|mut value| act(&mut value))
    }

    /// Waits until the value satisfies `condition`, and returns with the lock acquired. For `fork` handlers.
    pub fn acquire_when(&self, condition: impl Fn(&T) -> bool) {
        let mut value = self.value.lock();
        while !condition(&value) {
            lock_api::MutexGuard::unlocked(&mut value, pause);
        }
        // `release` releases the lock instead of the guard.
        std::mem::forget(value);
        self.is_acquired.store(true, Relaxed);
    }

    /// Releases the lock that [`Guarded::acquire_when`] acquired.
    ///
    /// # Panics
    ///
    /// If [`Guarded::acquire_when`] has not acquired the lock.
    #[inline]
    pub fn release(&self) {
        assert!(self.is_acquired.swap(false, Relaxed));
        // SAFETY: `acquire_when` has acquired the lock, and its guard exists no more.
        unsafe { self.value.force_unlock() };
    }
}

/// A counter of events. Threads can sleep until the next event, and cannot miss the wake-up.
///
/// Without sleepers, [`EventCount::raise`] costs two accesses to one cache line.
///
/// Example: [`Lock`].
#[derive(Default)]
pub struct EventCount {
    count: Word,
    /// Number of threads inside [`EventCount::wait`].
    sleepers: Word,
}

impl EventCount {
    /// Number of events so far.
    #[inline]
    pub fn count(&self) -> u32 {
        self.count.load(SeqCst)
    }

    /// Counts an event and wakes all threads that sleep in [`EventCount::wait`].
    #[inline]
    pub fn raise(&self) {
        self.count.fetch_add(1, SeqCst);
        // All accesses are sequentially consistent: this thread sees the sleeper, or the sleeper sees the new count.
        if self.sleepers.load(SeqCst) > 0 {
            wake(&self.count, i32::MAX);
        }
    }

    /// Sleeps until the number of events differs from `seen`, or until `timeout`. Spurious returns are possible.
    pub fn wait(&self, seen: u32, timeout: Option<Duration>) {
        self.sleepers.fetch_add(1, SeqCst);
        if self.count.load(SeqCst) == seen {
            sleep_while(&self.count, seen, timeout);
        }
        let sleepers = self.sleepers.fetch_sub(1, SeqCst);
        debug_assert!(sleepers > 0, "this thread counts as a sleeper");
    }
}

/// Backoff for a loop that waits: [`Backoff::pause`] spins for the first 100 us, then yields the processor.
///
/// Example: [`Lock`].
pub struct Backoff {
    /// Time at which the loop began to wait.
    began_ns: u64,
}

impl Default for Backoff {
    fn default() -> Self {
        Self::new()
    }
}

impl Backoff {
    /// Time, in nanoseconds, for which [`Backoff::pause`] spins before it yields.
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

    /// Nanoseconds since this value was created.
    pub fn waited_ns(&self) -> u64 {
        pagemill_sys::clock::fine_ns() - self.began_ns
    }
}

/// Sleeps for `time`; a zero time returns at once.
#[cfg(not(shuttle))]
pub fn sleep(time: Duration) {
    if !time.is_zero() {
        std::thread::sleep(time);
    }
}

#[cfg(shuttle)]
pub fn sleep(_time: Duration) {
    pause();
}

/// A value aligned to 128 bytes, so that it shares no cache line with other values.
///
/// Example: [`Lock`].
#[repr(align(128))]
#[derive(Default)]
pub struct Padded<T>(pub T);

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    /// Four threads increment a counter with a separate load and store under the lock. No increment may be lost.
    #[test]
    fn lock_is_mutually_exclusive() {
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

    /// Two threads take turns: each raises an event and waits, without a timeout, for an event of the other. A lost
    /// wake-up would hang the test.
    #[test]
    fn event_count_loses_no_wake_up() {
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
