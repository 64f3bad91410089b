//! A memory barrier in all threads of the process at once (`membarrier`), so that frequent operations need no barrier
//! of their own.

use rustix::thread::{MembarrierCommand, membarrier};

/// Registers this process for the barrier of [`all_threads`]. Returns whether the kernel supports that barrier (since
/// Linux 4.14, unless a system call filter forbids the call).
pub fn register() -> bool {
    membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok()
        && membarrier(MembarrierCommand::PrivateExpedited).is_ok()
}

/// Executes a full memory barrier on every thread of the process before it returns. The kernel interrupts running
/// threads; all other threads executed a barrier when the scheduler switched them out. Takes some microseconds. Returns
/// whether the barrier was executed.
pub fn all_threads() -> bool {
    // A fork child may have to register again.
    membarrier(MembarrierCommand::PrivateExpedited).is_ok() || register()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed, compiler_fence};

    /// Each of two threads sets its flag and then reads the other thread's flag. In between, one thread calls
    /// `all_threads`, and the other executes no barrier. At least one thread must see that the other's flag is set.
    #[test]
    fn one_of_two_threads_sees_the_others_flag() {
        if !register() {
            println!("skipped: the kernel has no membarrier for this process");
            return;
        }
        const ROUNDS: u32 = 2_000;
        let (round, done) = (AtomicU32::new(0), AtomicU32::new(0));
        let (fast, slow) = (AtomicU32::new(0), AtomicU32::new(0));
        let missed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for now in 1..=ROUNDS {
                    while round.load(std::sync::atomic::Ordering::Acquire) != now {
                        std::hint::spin_loop();
                    }
                    fast.store(now, Relaxed);
                    compiler_fence(std::sync::atomic::Ordering::SeqCst);
                    missed.store(slow.load(Relaxed) != now, Relaxed);
                    done.store(now, std::sync::atomic::Ordering::Release);
                }
            });
            for now in 1..=ROUNDS {
                round.store(now, std::sync::atomic::Ordering::Release);
                slow.store(now, Relaxed);
                assert!(all_threads());
                let has_missed = fast.load(Relaxed) != now;
                while done.load(std::sync::atomic::Ordering::Acquire) != now {
                    std::thread::yield_now();
                }
                assert!(!(has_missed && missed.load(Relaxed)), "both missed the other in round {now}");
            }
        });
    }
}
