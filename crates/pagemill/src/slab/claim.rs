//! Whose a magazine is for the moment: its thread's, at the cost of two plain stores, or somebody's who empties it.
//!
//! The thread says that it is inside before it looks whether the magazine was seized; who seizes says so before he looks
//! whether the thread is inside. One of them sees the other: between the two steps of the seizer lies a barrier in all threads
//! ([`pagemill_sys::barrier`]), which stands for the one that the thread would need each time.

#[cfg(any(loom, shuttle))]
use crate::sync::fence;
use crate::sync::{Acquire, AtomicU32, Relaxed, Release};
#[cfg(any(loom, shuttle))]
use std::sync::atomic::Ordering::SeqCst;

#[derive(Default)]
#[repr(C)]
pub(crate) struct Claim {
    /// 1 while its thread is inside. Nobody else writes it.
    inside: AtomicU32,
    /// 1 while somebody else has it. Its thread never writes it.
    seized: AtomicU32,
}

impl Claim {
    /// By the thread: whether the magazine is its own until [`Claim::leave`].
    #[inline(always)]
    pub fn enter(&self) -> bool {
        self.inside.store(1, Relaxed);
        order_own();
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

    /// By another thread, one at a time: from the next barrier in all threads on its thread does not come in.
    pub fn seize(&self) {
        self.seized.store(1, Relaxed);
        #[cfg(any(loom, shuttle))]
        fence(SeqCst);
    }

    /// After that barrier: whether the thread is out, and the magazine the seizer's.
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
    #[cfg(not(any(loom, shuttle)))]
    std::sync::atomic::compiler_fence(std::sync::atomic::Ordering::SeqCst);
    #[cfg(any(loom, shuttle))]
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
    #[test]
    fn a_thread_and_a_seizer_never_meet() {
        loom::model(|| {
            let magazine = Arc::new(Magazine::default());
            let owner = {
                let magazine = magazine.clone();
                thread::spawn(move || {
                    let mut added = 0;
                    for _ in 0..2 {
                        if magazine.claim.enter() {
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
            assert!(magazine.claim.enter());
            magazine.change(|objects| {
                assert_eq!(objects + taken, added);
                0
            });
        });
    }
}
