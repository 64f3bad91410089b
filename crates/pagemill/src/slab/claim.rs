//! Whose a magazine is for the moment: its thread's, at the cost of two plain stores, or somebody's who empties it.
//!
//! The thread says that it is inside before it looks whether the magazine was seized; who seizes says so before he looks
//! whether the thread is inside. One of them sees the other, because a barrier lies between the two steps of each. Whose barriers these
//! are the kernel decides, once for a process ([`Barriers`]).

use crate::sync::{Acquire, AtomicU32, Relaxed, Release, fence};
#[cfg(not(loom))]
use pagemill_sys::barrier;
#[cfg(not(loom))]
use std::sync::OnceLock;
use std::sync::atomic::Ordering::SeqCst;

/// Who has the barriers between the two steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Barriers {
    /// Who seizes, for all threads at once ([`pagemill_sys::barrier`]): these have none of their own.
    OfSeizer,
    /// Each its own: the kernel refuses the other.
    OfEach,
}

impl Barriers {
    /// As the kernel lets this process. It is asked once: threads that sleep would not hear of a change.
    #[cfg(not(loom))]
    pub fn of_process() -> Self {
        static ARE_OF_SEIZER: OnceLock<bool> = OnceLock::new();
        if *ARE_OF_SEIZER.get_or_init(barrier::register) { Self::OfSeizer } else { Self::OfEach }
    }

    /// By who seizes, between his two steps; says whether it was done. One for however many magazines.
    pub fn pass(self) -> bool {
        match self {
            #[cfg(not(loom))]
            Self::OfSeizer => barrier::all_threads(),
            // In a model one of its own stands for it, with that of `order_own`.
            #[cfg(loom)]
            Self::OfSeizer => {
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

#[derive(Default)]
#[repr(C)]
pub(crate) struct Claim {
    /// 1 while its thread is inside. Nobody else writes it.
    inside: AtomicU32,
    /// 1 while somebody else has it. Its thread never writes it.
    seized: AtomicU32,
}

impl Claim {
    /// By the thread: whether the magazine is its own until [`Claim::leave`]. Where barriers are [`Barriers::OfSeizer`].
    #[inline(always)]
    pub fn enter(&self) -> bool {
        self.inside.store(1, Relaxed);
        order_own();
        self.is_own()
    }

    /// As [`Claim::enter`], where they are [`Barriers::OfEach`].
    pub fn enter_fenced(&self) -> bool {
        self.inside.store(1, Relaxed);
        fence(SeqCst);
        self.is_own()
    }

    /// The second step of the thread.
    #[inline(always)]
    fn is_own(&self) -> bool {
        // Acquires what a seizer left.
        let is_own = self.seized.load(Acquire) == 0;
        if !is_own {
            self.leave();
        }
        is_own
    }

    /// Ends what [`Claim::enter`] began.
    #[inline(always)]
    pub fn leave(&self) {
        self.inside.store(0, Release);
    }

    /// By another thread, one at a time: from [`Barriers::pass`] on its thread does not come in.
    pub fn seize(&self) {
        self.seized.store(1, Relaxed);
    }

    /// After that: whether the thread is out, and the magazine the seizer's.
    pub fn is_left(&self) -> bool {
        self.inside.load(Acquire) == 0
    }

    /// Gives the magazine back to its thread.
    pub fn release(&self) {
        self.seized.store(0, Release);
    }
}

/// Keeps the compiler from exchanging what is before and after; the processor is kept by the seizer's barrier.
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
        claim: Claim,
        /// As the objects of a magazine: read, then written. Where two are at it at once a change is lost.
        objects: AtomicU32,
    }

    impl Magazine {
        fn change(&self, change: impl FnOnce(u32) -> u32) {
            self.objects.store(change(self.objects.load(Relaxed)), Relaxed);
        }
    }

    /// A thread adds objects while another takes all there are, twice: none is lost, none comes twice, and they never meet.
    fn thread_and_seizer(barriers: Barriers, enter: fn(&Claim) -> bool) {
        loom::model(move || {
            let magazine = Arc::new(Magazine::default());
            let owner = {
                let magazine = magazine.clone();
                thread::spawn(move || {
                    let mut added = 0;
                    for _ in 0..2 {
                        if enter(&magazine.claim) {
                            magazine.change(|objects| objects + 1);
                            added += 1;
                            magazine.claim.leave();
                        }
                    }
                    added
                })
            };
            let mut taken = 0;
            for _ in 0..2 {
                magazine.claim.seize();
                assert!(barriers.pass());
                // A seizer that finds the thread inside tries again later.
                if magazine.claim.is_left() {
                    magazine.change(|objects| {
                        taken += objects;
                        0
                    });
                }
                magazine.claim.release();
            }
            let added = owner.join().unwrap();
            assert!(enter(&magazine.claim));
            magazine.change(|objects| {
                assert_eq!(objects + taken, added);
                0
            });
        });
    }

    #[test]
    fn a_thread_and_a_seizer_never_meet() {
        thread_and_seizer(Barriers::OfSeizer, Claim::enter);
    }

    #[test]
    fn a_thread_with_barriers_of_its_own_and_a_seizer_never_meet() {
        thread_and_seizer(Barriers::OfEach, Claim::enter_fenced);
    }

    /// As many magazines as one seizes have one barrier of his: none of two threads is met.
    #[test]
    fn one_barrier_is_enough_for_two_magazines() {
        for (barriers, enter) in
            [(Barriers::OfSeizer, Claim::enter as fn(&Claim) -> bool), (Barriers::OfEach, Claim::enter_fenced)]
        {
            loom::model(move || {
                let magazines = Arc::new([Magazine::default(), Magazine::default()]);
                let threads = [0, 1].map(|own| {
                    let magazines = magazines.clone();
                    thread::spawn(move || {
                        let Magazine { claim, .. } = &magazines[own];
                        let is_in = enter(claim);
                        if is_in {
                            magazines[own].change(|objects| objects + 1);
                            claim.leave();
                        }
                        u32::from(is_in)
                    })
                });
                let mut taken = [0; 2];
                magazines.iter().for_each(|magazine| magazine.claim.seize());
                assert!(barriers.pass());
                for (magazine, taken) in magazines.iter().zip(&mut taken) {
                    if magazine.claim.is_left() {
                        magazine.change(|objects| {
                            *taken = objects;
                            0
                        });
                    }
                    magazine.claim.release();
                }
                let added = threads.map(|thread| thread.join().unwrap());
                let left = [0, 1].map(|own| magazines[own].objects.load(Relaxed));
                assert_eq!([0, 1].map(|own| left[own] + taken[own]), added);
            });
        }
    }
}
