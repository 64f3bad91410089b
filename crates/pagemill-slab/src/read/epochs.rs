//! Epoch-based reclamation for values by handle. A retired object is freed once the epochs of all readers are newer
//! than the epoch at which the object was retired.
//!
//! ```text
//!   reader    word = global epoch, barrier, look up values ... word = 0
//!   retiring  unlink the object, barrier, read the words of all participants
//!               no reader, or only readers with a newer epoch --> free it
//!               else advance the global epoch by one, and wait until all readers up to the old epoch have finished
//! ```
//!
//! One of the two barriers comes first. So either the retiring thread sees the reader, or the reader does not find the
//! object. An object without readers is free at the first check, and the global epoch advances only if there are
//! readers. Each thread has one word, indexed by its thread slot ([`crate::alloc::thread_slots`]). Threads without a
//! slot share an overflow list of words.

use pagemill_core::sync::{Acquire, AtomicU64, Relaxed, Release, fence};
use std::sync::atomic::Ordering::{AcqRel, SeqCst};

/// Number of low bits of a participant's word that contain the number of the participant's guards. The other bits
/// contain the epoch at which the first of these guards began.
const GUARD_COUNT_BITS: u32 = 16;
/// Mask of the low bits of a participant's word that contain the number of the participant's guards.
const GUARD_COUNT_MASK: u64 = (1 << GUARD_COUNT_BITS) - 1;

/// An epoch: a value that the global epoch has or had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Epoch(u64);

impl Epoch {
    /// Epoch of a participant that is not reading: newer than all epochs.
    const NOT_READING: Self = Self(u64::MAX);

    /// An epoch that is older than every value of the global epoch.
    const BEFORE_ALL: Self = Self(0);

    /// Returns the epoch as a number, to be stored in an atomic word.
    pub fn to_bits(self) -> u64 {
        self.0
    }

    pub fn from_bits(bits: u64) -> Self {
        Self(bits)
    }
}

/// The global epoch. Retiring threads advance it while there are readers.
pub(crate) struct GlobalEpoch(AtomicU64);

/// The word of a participant, which is a thread that may read values. The word is 0 while the thread is not reading.
/// Only that thread writes the word.
#[repr(align(128))]
pub(crate) struct Participant(AtomicU64);

impl Participant {
    /// Adds a guard of the participant's thread. The first guard begins to read; further guards only increment the
    /// number of guards.
    #[inline(always)]
    fn begin(&self, global: &GlobalEpoch) {
        match self.0.load(Relaxed) {
            0 => self.enter(global.0.load(Acquire) << GUARD_COUNT_BITS | 1),
            word => self.add_guard(word),
        }
    }

    /// Stores the word of the participant's first guard, and executes a barrier.
    #[inline(always)]
    fn enter(&self, word: u64) {
        debug_assert!(word & GUARD_COUNT_MASK == 1, "the first guard of the thread");
        // A thread that sees this store also sees that all earlier reads of this thread are done.
        if cfg!(all(target_arch = "x86_64", not(loom))) {
            // On x86-64 a locked exchange is a full barrier, at half the price of a fence.
            self.0.swap(word, SeqCst);
            std::sync::atomic::compiler_fence(SeqCst);
        } else {
            self.0.store(word, Release);
            fence(SeqCst);
        }
    }

    /// Increments the number of guards in the word.
    #[cold]
    fn add_guard(&self, word: u64) {
        assert!(word & GUARD_COUNT_MASK < GUARD_COUNT_MASK, "too many guards of one thread");
        self.0.store(word + 1, Release);
    }

    /// Removes one guard of the participant. After its last guard the participant is not reading any more.
    #[inline(always)]
    fn end(&self) {
        let word = self.0.load(Relaxed);
        // The word is 0 if a fork child has reset it meanwhile.
        self.0.store(if word & GUARD_COUNT_MASK <= 1 { 0 } else { word - 1 }, Release);
    }

    fn is_reading(&self) -> bool {
        self.0.load(Relaxed) != 0
    }

    /// Returns the epoch at which the participant began to read; [`Epoch::NOT_READING`] if it is not reading.
    fn pinned_epoch(&self) -> Epoch {
        // Acquire: everything that the reader did before it finished, or began anew, is done.
        match self.0.load(Acquire) {
            0 => Epoch::NOT_READING,
            word => {
                debug_assert!(word & GUARD_COUNT_MASK > 0, "a pinned participant has guards");
                Epoch(word >> GUARD_COUNT_BITS)
            }
        }
    }
}

/// Returns the oldest epoch of the participants that are reading.
fn oldest_of<'all>(participants: impl IntoIterator<Item = &'all Participant>) -> Epoch {
    participants.into_iter().map(Participant::pinned_epoch).min().unwrap_or(Epoch::NOT_READING)
}

impl GlobalEpoch {
    /// Retires objects whose last reference was removed. Returns the epoch up to which readers may still use the
    /// objects, and the oldest epoch of a current reader. Executes a barrier before it calls `participants`.
    fn retire<'all, R: IntoIterator<Item = &'all Participant>>(
        &self,
        participants: impl FnOnce() -> R,
    ) -> (Epoch, Epoch) {
        fence(SeqCst);
        let now = self.0.load(Acquire);
        let oldest = oldest_of(participants());
        if oldest <= Epoch(now) {
            // Readers that begin from here on have a newer epoch. If the exchange fails, another thread has advanced
            // the epoch.
            let _ = self.0.compare_exchange(now, now + 1, AcqRel, Relaxed);
        }
        (Epoch(now), oldest)
    }
}

#[cfg(not(loom))]
pub use process_wide::{Guard, enter};
#[cfg(not(loom))]
pub(crate) use process_wide::{begin_child, grace_epoch, is_reading, oldest_pinned, record_process, retire};

#[cfg(not(loom))]
mod process_wide {
    use super::{Epoch, GUARD_COUNT_BITS, GlobalEpoch, Participant, oldest_of};
    use crate::alloc::thread_slots::{self, MAX_THREADS, NO_SLOT};
    use pagemill_core::sync::{Acquire, AtomicU64, Padded, Relaxed, Release, fence};
    use pagemill_sys::process;
    use std::marker::PhantomData;
    use std::sync::OnceLock;
    use std::sync::atomic::Ordering::SeqCst;
    use std::sync::atomic::{AtomicBool, AtomicU32};

    /// Number of participants' words in one segment of the overflow list.
    const OVERFLOW_SEGMENT_LEN: usize = 64;

    static GLOBAL_EPOCH: Padded<GlobalEpoch> = Padded(GlobalEpoch(AtomicU64::new(1)));

    /// The words of the participants, by thread slot.
    static PARTICIPANTS: [Participant; MAX_THREADS] = [const { Participant(AtomicU64::new(0)) }; MAX_THREADS];

    /// Whether a thread without a slot was ever a participant. If not, the overflow list is unused.
    static HAS_OVERFLOW: AtomicBool = AtomicBool::new(false);
    /// First segment of the overflow list.
    static FIRST_OVERFLOW: Overflow = Overflow::new();

    /// Id of the process whose threads the participants are; 0 before the first thread.
    static OWNER_PROCESS: AtomicU32 = AtomicU32::new(0);

    /// A segment of the overflow list: words for threads without a slot, because all slots are taken or the thread is
    /// ending. Each guard uses a word of its own.
    struct Overflow {
        participants: [Participant; OVERFLOW_SEGMENT_LEN],
        next: OnceLock<Box<Overflow>>,
    }

    impl Overflow {
        const fn new() -> Self {
            Self {
                participants: [const { Participant(AtomicU64::new(0)) }; OVERFLOW_SEGMENT_LEN],
                next: OnceLock::new(),
            }
        }

        fn segments(&'static self) -> impl Iterator<Item = &'static Self> {
            std::iter::successors(Some(self), |overflow| overflow.next.get().map(|next| &**next))
        }

        /// Begins to read with the first free word of the overflow list. Adds a segment if all words are used.
        fn begin(&'static self) -> &'static Participant {
            let mut overflow = self;
            loop {
                let word = GLOBAL_EPOCH.0.0.load(Acquire) << GUARD_COUNT_BITS | 1;
                let found = overflow.participants.iter().find(|participant| {
                    participant.0.load(Relaxed) == 0 && participant.0.compare_exchange(0, word, SeqCst, Relaxed).is_ok()
                });
                if let Some(participant) = found {
                    fence(SeqCst);
                    return participant;
                }
                overflow = overflow.next.get_or_init(|| Box::new(Overflow::new()));
            }
        }
    }

    /// The right of a thread to read values by handle, from [`enter`]. Until the guard is dropped, values that were
    /// looked up under it stay valid and unchanged.
    ///
    /// Example: [`HandleMap`](crate::HandleMap).
    pub struct Guard {
        participant: &'static Participant,
        _of_this_thread: PhantomData<*mut ()>,
    }

    /// Pins the current epoch, so that values can be read until the guard is dropped. While the guard exists, the
    /// memory of removed values is not freed and may accumulate. Keep it in a variable: `let _ = enter();` drops the
    /// guard at once.
    ///
    /// Cost: some nanoseconds. Writes no shared cache line.
    #[inline]
    pub fn enter() -> Guard {
        let participant = match PARTICIPANTS.get(thread_slots::own_slot() as usize) {
            Some(participant) => {
                participant.begin(&GLOBAL_EPOCH.0);
                participant
            }
            None => pin_slowly(),
        };
        Guard { participant, _of_this_thread: PhantomData }
    }

    /// Pins the epoch for a thread that had no slot at its last guard: takes a slot, or else a word of the overflow
    /// list.
    #[cold]
    #[inline(never)]
    fn pin_slowly() -> &'static Participant {
        if let Some(participant) = PARTICIPANTS.get(thread_slots::ensure_slot() as usize) {
            participant.begin(&GLOBAL_EPOCH.0);
            return participant;
        }
        // Set before this reader's barrier, so that a retiring thread that could miss the reader sees the flag.
        HAS_OVERFLOW.store(true, Relaxed);
        FIRST_OVERFLOW.begin()
    }

    impl Drop for Guard {
        #[inline]
        fn drop(&mut self) {
            self.participant.end();
        }
    }

    /// Returns all participants that may be reading. The caller must have executed a barrier.
    fn participants() -> impl Iterator<Item = &'static Participant> {
        let overflow =
            HAS_OVERFLOW.load(Relaxed).then(|| FIRST_OVERFLOW.segments().flat_map(|overflow| &overflow.participants));
        // A participant whose slot is not in use is not reading.
        thread_slots::slots_in_use().map(|slot| &PARTICIPANTS[slot]).chain(overflow.into_iter().flatten())
    }

    /// Retires objects that were unlinked. Returns the epoch up to which readers may still use the objects, and the
    /// oldest epoch of a current reader. No reader uses the objects if the second epoch is newer than the first.
    pub fn retire() -> (Epoch, Epoch) {
        GLOBAL_EPOCH.0.retire(participants)
    }

    /// Returns an epoch for objects that are retired now: no reader uses them when [`oldest_pinned`] returns a newer
    /// epoch. If no thread is reading, returns an epoch that is older than all others.
    pub fn grace_epoch() -> Epoch {
        let (epoch, oldest) = retire();
        if oldest > epoch { Epoch::BEFORE_ALL } else { epoch }
    }

    /// Returns the oldest epoch of a current reader. No reader uses objects that were retired at an earlier epoch.
    pub fn oldest_pinned() -> Epoch {
        fence(SeqCst);
        oldest_of(participants())
    }

    /// Returns whether the thread in this thread slot is reading, that is, has a guard.
    pub fn is_reading(slot: u32) -> bool {
        PARTICIPANTS[slot as usize].is_reading()
    }

    /// Records this process as the one whose threads are the participants, unless a process is recorded already.
    pub fn record_process() {
        let _ = OWNER_PROCESS.compare_exchange(0, process::id(), Relaxed, Relaxed);
    }

    /// In a fork child: resets all participants except that of this thread. Runs once for each process, even if the
    /// process has several instances. Does nothing on another thread than the first, because the first may be reading.
    pub fn begin_child() {
        let own = process::id();
        if [0, own].contains(&OWNER_PROCESS.load(Relaxed)) || !process::is_first_thread() {
            return;
        }
        OWNER_PROCESS.store(own, Relaxed);
        let slot = thread_slots::own_slot();
        let all = PARTICIPANTS.iter().take(thread_slots::high_water()).enumerate();
        all.filter(|(at, _)| *at != slot as usize).for_each(|(_, participant)| {
            if participant.is_reading() {
                participant.0.store(0, Release)
            }
        });
        if slot != NO_SLOT {
            FIRST_OVERFLOW
                .segments()
                .flat_map(|overflow| &overflow.participants)
                .for_each(|participant| participant.0.store(0, Release));
        }
    }

    #[cfg(all(test, not(shuttle)))]
    mod tests {
        use super::*;

        /// Objects that are retired while two guards exist must wait for both guards, but not for a newer guard.
        #[test]
        fn retired_objects_wait_for_earlier_guards() {
            let (first, second) = (enter(), enter());
            let (epoch, oldest_then) = retire();
            assert!(oldest_then <= epoch);
            drop(first);
            assert!(oldest_pinned() <= epoch, "the second guard is there");
            drop(second);
            let later = enter();
            let wait = |is_so: &dyn Fn() -> bool| {
                while !is_so() {
                    std::thread::yield_now();
                }
            };
            // Readers of concurrent tests may hold older epochs for a while.
            wait(&|| oldest_pinned() > epoch);
            drop(later);
        }

        /// Creates more guards without a thread slot than one segment of the overflow list has words. Retired objects
        /// must wait for all of these guards.
        #[test]
        fn participants_without_a_slot_delay_reclaim() {
            let guards: Vec<_> = (0..OVERFLOW_SEGMENT_LEN + 2)
                .map(|_| {
                    HAS_OVERFLOW.store(true, Relaxed);
                    Guard { participant: FIRST_OVERFLOW.begin(), _of_this_thread: PhantomData }
                })
                .collect();
            let (epoch, oldest_then) = retire();
            assert!(oldest_then <= epoch);
            let mut guards = guards.into_iter();
            let last = guards.next_back();
            guards.for_each(drop);
            assert!(oldest_pinned() <= epoch);
            drop(last);
            while oldest_pinned() <= epoch {
                std::thread::yield_now();
            }
        }

        /// A thread ends without dropping its guard. Other threads must not get the thread's slot before the guard is
        /// dropped.
        #[test]
        fn slot_stays_taken_while_a_guard_exists() {
            let (slot, participant) = std::thread::spawn(|| {
                let guard = enter();
                let participant = guard.participant;
                std::mem::forget(guard);
                (thread_slots::own_slot(), participant)
            })
            .join()
            .unwrap();
            let others = (0..100).map(|_| std::thread::spawn(thread_slots::ensure_slot).join().unwrap());
            assert!(others.into_iter().all(|other| other != slot));
            participant.end();
        }
    }
}

#[cfg(all(loom, test))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;
    use pagemill_core::sync::AtomicU32;

    const RETIRING_THREADS: usize = 2;

    struct Model {
        global: GlobalEpoch,
        participant: Participant,
        /// For each object, whether it is still reachable: 1 if so, 0 once it was unlinked.
        references: [AtomicU32; RETIRING_THREADS],
        /// For each object, whether its memory was reused: 1 if so.
        memory: [AtomicU32; RETIRING_THREADS],
    }

    /// A reader begins twice. Meanwhile, two threads each unlink an object, and reuse its memory when it is free. The
    /// reader must never see reused memory. Two such threads are needed, because one of them advances the global epoch
    /// for the other.
    #[test]
    fn no_reader_sees_reused_memory() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let model = Arc::new(Model {
                global: GlobalEpoch(AtomicU64::new(1)),
                participant: Participant(AtomicU64::new(0)),
                references: [AtomicU32::new(1), AtomicU32::new(1)],
                memory: [AtomicU32::new(0), AtomicU32::new(0)],
            });
            let retire = |at: usize| {
                let model = model.clone();
                move || {
                    model.references[at].store(0, Release);
                    let (epoch, oldest) = model.global.retire(|| [&model.participant]);
                    let is_free = oldest > epoch || {
                        fence(SeqCst);
                        oldest_of([&model.participant]) > epoch
                    };
                    if is_free {
                        model.memory[at].store(1, Relaxed);
                    }
                }
            };
            let retirers = [thread::spawn(retire(0)), thread::spawn(retire(1))];
            for _ in 0..2 {
                model.participant.begin(&model.global);
                for at in 0..RETIRING_THREADS {
                    if model.references[at].load(Acquire) == 1 {
                        assert_eq!(model.memory[at].load(Relaxed), 0, "the memory is reused under its reader");
                    }
                }
                model.participant.end();
            }
            retirers.into_iter().for_each(|retirer| retirer.join().unwrap());
        });
    }
}
