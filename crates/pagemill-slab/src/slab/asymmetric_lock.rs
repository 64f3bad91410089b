//! An asymmetric lock for a magazine: its thread enters at the cost of two plain stores; a drain pays for both sides.
//!
//! The thread sets `entered` before it reads `draining`. The draining thread sets `draining` before it reads `entered`.
//! A barrier separates the two steps on each side, so at least one side sees the other. Either the draining thread
//! executes a process-wide barrier (`membarrier`) for all, or each side has its own: the kernel decides once for a
//! process ([`Barriers`]).

use pagemill_core::sync::{Acquire, AtomicU32, Relaxed, Release, fence};
#[cfg(not(loom))]
use pagemill_sys::barrier;
#[cfg(not(loom))]
use std::sync::OnceLock;
use std::sync::atomic::Ordering::SeqCst;

/// Which side executes the barriers between the two steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Barriers {
    /// The draining thread, for all threads at once ([`pagemill_sys::barrier`]): they need no barrier of their own.
    OfDrainer,
    /// Each side its own, because the kernel refuses the process-wide barrier.
    OfEach,
}

impl Barriers {
    /// What the kernel supports. Queried once: sleeping threads would not notice a change.
    #[cfg(not(loom))]
    pub fn of_process() -> Self {
        static ARE_OF_DRAINER: OnceLock<bool> = OnceLock::new();
        if *ARE_OF_DRAINER.get_or_init(barrier::register) { Self::OfDrainer } else { Self::OfEach }
    }

    /// The draining thread's barrier between its two steps; returns whether it was executed. One call covers any number
    /// of magazines.
    pub fn pass(self) -> bool {
        match self {
            #[cfg(not(loom))]
            Self::OfDrainer => barrier::all_threads(),
            // The model represents the process-wide barrier by one fence here and one in `order_own`.
            #[cfg(loom)]
            Self::OfDrainer => {
                fence(SeqCst);
                true
            }
            Self::OfEach => {
                fence(SeqCst);
                true
            }
        }
    }
}

/// The asymmetric lock of one magazine.
#[derive(Default)]
#[repr(C)]
pub(crate) struct AsymmetricLock {
    /// 1 while its thread is inside. Written by that thread only.
    entered: AtomicU32,
    /// 1 while another thread drains the magazine. Never written by its own thread.
    draining: AtomicU32,
}

impl AsymmetricLock {
    /// For the thread of the magazine: enters, and returns whether the magazine is its own until
    /// [`AsymmetricLock::leave`]. For [`Barriers::OfDrainer`].
    #[inline(always)]
    pub fn enter(&self) -> bool {
        self.entered.store(1, Relaxed);
        order_own();
        self.is_own()
    }

    /// As [`AsymmetricLock::enter`], for [`Barriers::OfEach`].
    pub fn enter_fenced(&self) -> bool {
        self.entered.store(1, Relaxed);
        fence(SeqCst);
        self.is_own()
    }

    /// The second step of the thread.
    #[inline(always)]
    fn is_own(&self) -> bool {
        // Acquires what the draining thread left.
        let is_own = self.draining.load(Acquire) == 0;
        if !is_own {
            self.leave();
        }
        is_own
    }

    /// Leaves the magazine.
    #[inline(always)]
    pub fn leave(&self) {
        self.entered.store(0, Release);
    }

    /// For the draining thread, one at a time: after the following [`Barriers::pass`] the magazine's thread cannot enter.
    pub fn begin_drain(&self) {
        self.draining.store(1, Relaxed);
    }

    /// For the draining thread, after `pass`: whether the thread is outside, so that the magazine belongs to the caller.
    pub fn is_outside(&self) -> bool {
        self.entered.load(Acquire) == 0
    }

    /// Ends the drain: the thread can enter again.
    pub fn release(&self) {
        self.draining.store(0, Release);
    }
}

/// Prevents the compiler from reordering the two steps; the barrier of the draining thread orders the processor.
#[inline(always)]
fn order_own() {
    #[cfg(not(loom))]
    std::sync::atomic::compiler_fence(SeqCst);
    #[cfg(loom)]
    fence(SeqCst);
}

#[cfg(all(loom, test))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    #[derive(Default)]
    struct Magazine {
        lock: AsymmetricLock,
        /// Stands for the objects of a magazine: read, then written. If two threads change it at once, a change is lost.
        objects: AtomicU32,
    }

    impl Magazine {
        fn change(&self, change: impl FnOnce(u32) -> u32) {
            self.objects.store(change(self.objects.load(Relaxed)), Relaxed);
        }
    }

    /// A thread adds objects while another drains them twice: no object is lost or duplicated, and the two are never
    /// inside together.
    fn thread_and_drainer(barriers: Barriers, enter: fn(&AsymmetricLock) -> bool) {
        loom::model(move || {
            let magazine = Arc::new(Magazine::default());
            let owner = {
                let magazine = magazine.clone();
                thread::spawn(move || {
                    let mut added = 0;
                    for _ in 0..2 {
                        if enter(&magazine.lock) {
                            magazine.change(|objects| objects + 1);
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
                assert!(barriers.pass());
                // If the thread is inside, the drain is retried later.
                if magazine.lock.is_outside() {
                    magazine.change(|objects| {
                        taken += objects;
                        0
                    });
                }
                magazine.lock.release();
            }
            let added = owner.join().unwrap();
            assert!(enter(&magazine.lock));
            magazine.change(|objects| {
                assert_eq!(objects + taken, added);
                0
            });
        });
    }

    #[test]
    fn a_thread_and_a_drainer_never_meet() {
        thread_and_drainer(Barriers::OfDrainer, AsymmetricLock::enter);
    }

    #[test]
    fn a_thread_with_barriers_of_its_own_and_a_drainer_never_meet() {
        thread_and_drainer(Barriers::OfEach, AsymmetricLock::enter_fenced);
    }

    /// One barrier of the draining thread covers two magazines of two threads: it is never inside together with either.
    #[test]
    fn one_barrier_is_enough_for_two_magazines() {
        for (barriers, enter) in [
            (Barriers::OfDrainer, AsymmetricLock::enter as fn(&AsymmetricLock) -> bool),
            (Barriers::OfEach, AsymmetricLock::enter_fenced),
        ] {
            loom::model(move || {
                let magazines = Arc::new([Magazine::default(), Magazine::default()]);
                let threads = [0, 1].map(|own| {
                    let magazines = magazines.clone();
                    thread::spawn(move || {
                        let Magazine { lock, .. } = &magazines[own];
                        let is_in = enter(lock);
                        if is_in {
                            magazines[own].change(|objects| objects + 1);
                            lock.leave();
                        }
                        u32::from(is_in)
                    })
                });
                let mut taken = [0; 2];
                magazines.iter().for_each(|magazine| magazine.lock.begin_drain());
                assert!(barriers.pass());
                for (magazine, taken) in magazines.iter().zip(&mut taken) {
                    if magazine.lock.is_outside() {
                        magazine.change(|objects| {
                            *taken = objects;
                            0
                        });
                    }
                    magazine.lock.release();
                }
                let added = threads.map(|thread| thread.join().unwrap());
                let left = [0, 1].map(|own| magazines[own].objects.load(Relaxed));
                assert_eq!([0, 1].map(|own| left[own] + taken[own]), added);
            });
        }
    }
}
