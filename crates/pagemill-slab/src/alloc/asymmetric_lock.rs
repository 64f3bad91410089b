//! An asymmetric lock for a magazine: the magazine's thread enters with two plain stores, and a drain pays for the
//! barriers of both sides.
//!
//! The magazine's thread sets `entered` before it reads `draining`. The draining thread sets `draining` before it reads
//! `entered`. A barrier separates the two steps on each side, so at least one thread sees the flag of the other. Either
//! the draining thread executes one process-wide barrier (`membarrier`) for all threads, or each side executes its own.
//! The choice is the same for the whole process, and depends on the kernel's support of `membarrier` ([`Barriers`]).

use pagemill_core::sync::{Acquire, AtomicU32, Relaxed, Release, fence};
#[cfg(not(loom))]
use pagemill_sys::barrier;
#[cfg(not(loom))]
use std::sync::OnceLock;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::compiler_fence;

/// Which threads execute a memory barrier for an [`AsymmetricLock`]: only draining threads, or also the threads that
/// enter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Barriers {
    /// A draining thread executes one barrier for all threads of the process ([`pagemill_sys::barrier`]). A thread that
    /// enters executes none.
    DrainerOnly,
    /// A draining thread and a thread that enters a magazine each execute a barrier of their own, because the kernel
    /// refuses the process-wide barrier.
    BothSides,
}

impl Barriers {
    /// Returns the kind of barriers that the kernel supports. The kernel is queried only once for a process, because
    /// threads that sleep would not notice a later change.
    #[cfg(not(loom))]
    pub fn of_process() -> Self {
        static HAS_PROCESS_BARRIER: OnceLock<bool> = OnceLock::new();
        if *HAS_PROCESS_BARRIER.get_or_init(barrier::register) { Self::DrainerOnly } else { Self::BothSides }
    }

    /// Executes the barrier that a draining thread needs between [`AsymmetricLock::begin_drain`] and
    /// [`AsymmetricLock::is_not_held_by_owner`]. One call covers any number of magazines. Returns false if the kernel
    /// refused the barrier.
    pub fn execute(self) -> bool {
        // loom has no process-wide barrier: the fence below and one in `AsymmetricLock::enter` represent it.
        #[cfg(not(loom))]
        if self == Self::DrainerOnly {
            return barrier::all_threads();
        }
        fence(SeqCst);
        true
    }
}

/// The asymmetric lock of one magazine. Its owner is the magazine's thread.
#[derive(Default)]
#[repr(C)]
pub(crate) struct AsymmetricLock {
    /// 1 while the magazine's thread holds the lock or tries to. Only that thread writes the flag.
    entered: AtomicU32,
    /// 1 while another thread drains the magazine. The magazine's thread never writes the flag.
    draining: AtomicU32,
}

impl AsymmetricLock {
    /// Acquires the lock for the magazine's thread, with [`Barriers::DrainerOnly`]. Returns false if the magazine is
    /// being drained. Otherwise the thread has exclusive access until [`AsymmetricLock::leave`].
    #[inline(always)]
    pub fn enter(&self) -> bool {
        self.entered.store(1, Relaxed);
        // The load of `draining` must not move before this store. Here only the compiler has to be stopped: the barrier
        // of the draining thread, which reaches all processors, keeps the two in order there.
        if cfg!(loom) {
            fence(SeqCst)
        } else {
            compiler_fence(SeqCst)
        }
        self.confirm_entry()
    }

    /// As [`AsymmetricLock::enter`], for [`Barriers::BothSides`].
    pub fn enter_fenced(&self) -> bool {
        self.entered.store(1, Relaxed);
        fence(SeqCst);
        self.confirm_entry()
    }

    /// Completes an acquisition by the magazine's thread, which has set `entered`: checks for a drain in progress. If
    /// there is one, clears `entered` again and returns false.
    #[inline(always)]
    fn confirm_entry(&self) -> bool {
        // Acquire: the thread must see the changes of the last drain.
        let is_entered = self.draining.load(Acquire) == 0;
        if !is_entered {
            self.leave();
        }
        is_entered
    }

    /// Releases the lock, which the magazine's thread holds.
    #[inline(always)]
    pub fn leave(&self) {
        self.entered.store(0, Release);
    }

    /// Begins a drain. After the next [`Barriers::execute`] the magazine's thread cannot acquire the lock any more.
    /// Only one thread at a time may drain.
    pub fn begin_drain(&self) {
        debug_assert!(self.draining.load(Relaxed) == 0, "one thread drains");
        self.draining.store(1, Relaxed);
    }

    /// Returns whether the lock is free: the magazine's thread does not hold it. If this returns true after
    /// [`Barriers::execute`], the draining thread has exclusive access.
    pub fn is_not_held_by_owner(&self) -> bool {
        self.entered.load(Acquire) == 0
    }

    /// Ends the drain: the magazine's thread can acquire the lock again.
    pub fn end_drain(&self) {
        debug_assert!(self.draining.load(Relaxed) == 1, "a drain ends once");
        self.draining.store(0, Release);
    }
}

#[cfg(all(loom, test))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    #[derive(Default)]
    /// A magazine reduced to its lock and a number of objects.
    struct Magazine {
        lock: AsymmetricLock,
        /// Number of objects in the magazine. Each change first loads the number and then stores the new one, so of two
        /// concurrent changes one would be lost.
        objects: AtomicU32,
    }

    impl Magazine {
        fn change_objects(&self, change: impl FnOnce(u32) -> u32) {
            self.objects.store(change(self.objects.load(Relaxed)), Relaxed);
        }
    }

    /// One thread adds objects to a magazine while another drains the magazine twice. No object may be lost or
    /// duplicated.
    fn check_mutual_exclusion(barriers: Barriers, enter: fn(&AsymmetricLock) -> bool) {
        loom::model(move || {
            let magazine = Arc::new(Magazine::default());
            let owner = {
                let magazine = magazine.clone();
                thread::spawn(move || {
                    let mut added = 0;
                    for _ in 0..2 {
                        if enter(&magazine.lock) {
                            magazine.change_objects(|objects| objects + 1);
                            added += 1;
                            magazine.lock.leave();
                        }
                    }
                    added
                })
            };
            let mut taken = 0;
            for _ in 0..2 {
                magazine.lock.begin_drain();
                assert!(barriers.execute());
                // If the thread is inside, this drain fails; a real one would be retried.
                if magazine.lock.is_not_held_by_owner() {
                    magazine.change_objects(|objects| {
                        taken += objects;
                        0
                    });
                }
                magazine.lock.end_drain();
            }
            let added = owner.join().unwrap();
            assert!(enter(&magazine.lock));
            magazine.change_objects(|objects| {
                assert_eq!(objects + taken, added);
                0
            });
        });
    }

    #[test]
    fn owner_and_drainer_exclude_each_other() {
        check_mutual_exclusion(Barriers::DrainerOnly, AsymmetricLock::enter);
    }

    #[test]
    fn owner_with_barrier_and_drainer_exclude_each_other() {
        check_mutual_exclusion(Barriers::BothSides, AsymmetricLock::enter_fenced);
    }

    /// Two threads each use a magazine of their own, while a third thread drains both magazines with one barrier. No
    /// object may be lost or duplicated.
    #[test]
    fn one_barrier_covers_two_magazines() {
        for (barriers, enter) in [
            (Barriers::DrainerOnly, AsymmetricLock::enter as fn(&AsymmetricLock) -> bool),
            (Barriers::BothSides, AsymmetricLock::enter_fenced),
        ] {
            loom::model(move || {
                let magazines = Arc::new([Magazine::default(), Magazine::default()]);
                let threads = [0, 1].map(|own| {
                    let magazines = magazines.clone();
                    thread::spawn(move || {
                        let Magazine { lock, .. } = &magazines[own];
                        let is_entered = enter(lock);
                        if is_entered {
                            magazines[own].change_objects(|objects| objects + 1);
                            lock.leave();
                        }
                        u32::from(is_entered)
                    })
                });
                let mut taken = [0; 2];
                magazines.iter().for_each(|magazine| magazine.lock.begin_drain());
                assert!(barriers.execute());
                for (magazine, taken) in magazines.iter().zip(&mut taken) {
                    if magazine.lock.is_not_held_by_owner() {
                        magazine.change_objects(|objects| {
                            *taken = objects;
                            0
                        });
                    }
                    magazine.lock.end_drain();
                }
                let added = threads.map(|thread| thread.join().unwrap());
                let left = [0, 1].map(|own| magazines[own].objects.load(Relaxed));
                assert_eq!([0, 1].map(|own| left[own] + taken[own]), added);
            });
        }
    }
}
