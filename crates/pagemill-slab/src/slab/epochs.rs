//! Epoch-based reclamation for values by handle: a retired object is freed once every pinned epoch is newer.
//!
//! ```text
//!   reader    word = global epoch, barrier, look up values ... word = 0
//!   retiring  unlink the object, barrier, read the words of all participants
//!               no reader, or only readers with a newer epoch --> free it
//!               else advance the global epoch by one, and wait until all readers up to the old one have finished
//! ```
//!
//! One of the two barriers comes first. So either the retiring thread sees the reader, or the reader does not find the
//! object. Nothing waits for time to pass: an object without readers is free at the first check, and the global epoch
//! stands still while no reader is met. A thread's word is indexed by its thread slot ([`super::thread_slots`]).
//! Threads without a slot share an overflow list.
//!
//! Names: [`Epoch`] is an epoch, [`GlobalEpoch`] the global epoch, [`Participant`] a participant, `retire` is retire.

use pagemill_core::sync::{Acquire, AtomicU64, Relaxed, Release, fence};
use std::sync::atomic::Ordering::{AcqRel, SeqCst};

/// Bits of a participant's word that count its guards. The bits above hold the epoch at which the first guard began.
const DEPTH_BITS: u32 = 16;
const DEPTH: u64 = (1 << DEPTH_BITS) - 1;

/// An epoch: a value of the global epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Epoch(u64);

impl Epoch {
    /// The epoch of a participant that is not reading: newer than all others.
    const NEVER: Self = Self(u64::MAX);

    /// Older than any epoch that the global epoch has ever had.
    const BEFORE_ALL: Self = Self(0);

    /// For storage in a word.
    pub fn to_bits(self) -> u64 {
        self.0
    }

    pub fn from_bits(bits: u64) -> Self {
        Self(bits)
    }
}

/// The global epoch.
pub(crate) struct GlobalEpoch(AtomicU64);

/// A participant of the epoch. The word is 0 while it does not read. Only its own thread writes it.
#[repr(align(128))]
pub(crate) struct Participant(AtomicU64);

impl Participant {
    /// Begins to read, or nests.
    #[inline(always)]
    fn begin(&self, global: &GlobalEpoch) {
        match self.0.load(Relaxed) {
            0 => self.enter(global.0.load(Acquire) << DEPTH_BITS | 1),
            word => self.begin_again(word),
        }
    }

    #[inline(always)]
    fn enter(&self, word: u64) {
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

    #[cold]
    fn begin_again(&self, word: u64) {
        assert!(word & DEPTH < DEPTH, "too many guards of one thread");
        self.0.store(word + 1, Release);
    }

    #[inline(always)]
    fn end(&self) {
        let word = self.0.load(Relaxed);
        // 0 if a fork child reset it meanwhile.
        self.0.store(if word & DEPTH <= 1 { 0 } else { word - 1 }, Release);
    }

    fn is_reading(&self) -> bool {
        self.0.load(Relaxed) != 0
    }

    fn since(&self) -> Epoch {
        // Acquires what the reader did until it finished or began anew.
        match self.0.load(Acquire) {
            0 => Epoch::NEVER,
            word => Epoch(word >> DEPTH_BITS),
        }
    }
}

/// The oldest epoch of a participant that is reading.
fn oldest_of<'all>(participants: impl IntoIterator<Item = &'all Participant>) -> Epoch {
    participants.into_iter().map(Participant::since).min().unwrap_or(Epoch::NEVER)
}

impl GlobalEpoch {
    /// Retires objects after their last reference was unlinked. Returns the epoch up to which readers may still use
    /// them, and the oldest epoch of a reader. `participants` is called once the words of the participants can be read.
    fn retire<'all, R: IntoIterator<Item = &'all Participant>>(
        &self,
        participants: impl FnOnce() -> R,
    ) -> (Epoch, Epoch) {
        fence(SeqCst);
        let now = self.0.load(Acquire);
        let oldest = oldest_of(participants());
        if oldest <= Epoch(now) {
            // Readers that begin from here on are known to be newer. If the exchange fails, another thread has advanced
            // the epoch.
            let _ = self.0.compare_exchange(now, now + 1, AcqRel, Relaxed);
        }
        (Epoch(now), oldest)
    }
}

#[cfg(not(loom))]
pub use here::{Guard, pin};
#[cfg(not(loom))]
pub(super) use here::{begin_child, is_reading, note_process, oldest, retire, wait_until};

#[cfg(not(loom))]
mod here {
    use super::super::thread_slots::{self, MAX_THREADS, NONE};
    use super::{DEPTH_BITS, Epoch, GlobalEpoch, Participant, oldest_of};
    use pagemill_core::sync::{Acquire, AtomicU64, Padded, Relaxed, Release, fence};
    use pagemill_sys::process;
    use std::marker::PhantomData;
    use std::sync::OnceLock;
    use std::sync::atomic::Ordering::SeqCst;
    use std::sync::atomic::{AtomicBool, AtomicU32};

    /// Participants without a thread slot in one part of the overflow list.
    const OVERFLOW_LEN: usize = 64;

    static GLOBAL_EPOCH: Padded<GlobalEpoch> = Padded(GlobalEpoch(AtomicU64::new(1)));

    /// Participants by thread slot.
    static PARTICIPANTS: [Participant; MAX_THREADS] = [const { Participant(AtomicU64::new(0)) }; MAX_THREADS];

    /// Whether the overflow list was ever used.
    static HAS_OVERFLOW: AtomicBool = AtomicBool::new(false);
    static FIRST: Overflow = Overflow::new();

    /// The process that these threads belong to; 0 while there is none.
    static OWNER: AtomicU32 = AtomicU32::new(0);

    /// The overflow list: participants of threads without a slot, because all are taken or the thread is ending. Each
    /// guard has its own word.
    struct Overflow {
        participants: [Participant; OVERFLOW_LEN],
        next: OnceLock<Box<Overflow>>,
    }

    impl Overflow {
        const fn new() -> Self {
            Self { participants: [const { Participant(AtomicU64::new(0)) }; OVERFLOW_LEN], next: OnceLock::new() }
        }

        fn all(&'static self) -> impl Iterator<Item = &'static Self> {
            std::iter::successors(Some(self), |overflow| overflow.next.get().map(|next| &**next))
        }

        /// Begins to read with the first free word.
        fn begin(&'static self) -> &'static Participant {
            let mut overflow = self;
            loop {
                let word = GLOBAL_EPOCH.0.0.load(Acquire) << DEPTH_BITS | 1;
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

    /// Pins the epoch of a reader: until the guard is dropped, values that it has looked up stay valid and unchanged.
    ///
    /// Example: [`ByHandle`](crate::slab::ByHandle).
    pub struct Guard {
        participant: &'static Participant,
        _of_this_thread: PhantomData<*mut ()>,
    }

    /// Begins reading. Costs some nanoseconds, and writes no shared cache line. Retired memory accumulates while the
    /// guard is kept.
    #[inline]
    pub fn pin() -> Guard {
        let participant = match PARTICIPANTS.get(thread_slots::own_slot() as usize) {
            Some(participant) => {
                participant.begin(&GLOBAL_EPOCH.0);
                participant
            }
            None => pin_slowly(),
        };
        Guard { participant, _of_this_thread: PhantomData }
    }

    #[cold]
    #[inline(never)]
    fn pin_slowly() -> &'static Participant {
        if let Some(participant) = PARTICIPANTS.get(thread_slots::find_slot() as usize) {
            participant.begin(&GLOBAL_EPOCH.0);
            return participant;
        }
        // Before the barrier of this reader, so that a retiring thread that looks for it sees the flag.
        HAS_OVERFLOW.store(true, Relaxed);
        FIRST.begin()
    }

    impl Drop for Guard {
        #[inline]
        fn drop(&mut self) {
            self.participant.end();
        }
    }

    /// All participants that may be reading. To be called after a barrier.
    fn participants() -> impl Iterator<Item = &'static Participant> {
        let overflow = HAS_OVERFLOW.load(Relaxed).then(|| FIRST.all().flat_map(|overflow| &overflow.participants));
        // A slot that no thread has is not reading.
        thread_slots::taken().map(|slot| &PARTICIPANTS[slot]).chain(overflow.into_iter().flatten())
    }

    /// Retires unlinked objects. Returns the epoch up to which readers may use them, and the oldest epoch of a reader.
    /// The objects are free if the second is newer than the first.
    pub fn retire() -> (Epoch, Epoch) {
        GLOBAL_EPOCH.0.retire(participants)
    }

    /// The epoch that [`oldest`] has to pass before objects retired now are free. They are free at once if no thread
    /// reads.
    pub fn wait_until() -> Epoch {
        let (epoch, oldest) = retire();
        if oldest > epoch { Epoch::BEFORE_ALL } else { epoch }
    }

    /// The oldest epoch of a reader: objects retired at an earlier epoch are free.
    pub fn oldest() -> Epoch {
        fence(SeqCst);
        oldest_of(participants())
    }

    /// Whether the thread in this slot is reading.
    pub fn is_reading(slot: u32) -> bool {
        PARTICIPANTS[slot as usize].is_reading()
    }

    /// Records that threads of this process may read from now on.
    pub fn note_process() {
        let _ = OWNER.compare_exchange(0, process::id(), Relaxed, Relaxed);
    }

    /// In a fork child: resets all participants but that of this thread. Runs once for each process, however many
    /// Pagemills it has. It does nothing if called first by another thread than the first one, because the first thread
    /// may be reading.
    pub fn begin_child() {
        let own = process::id();
        if [0, own].contains(&OWNER.load(Relaxed)) || !process::is_first_thread() {
            return;
        }
        OWNER.store(own, Relaxed);
        let slot = thread_slots::own_slot();
        let all = PARTICIPANTS.iter().take(thread_slots::high_water()).enumerate();
        all.filter(|(at, _)| *at != slot as usize).for_each(|(_, participant)| {
            if participant.is_reading() {
                participant.0.store(0, Release)
            }
        });
        if slot != NONE {
            FIRST
                .all()
                .flat_map(|overflow| &overflow.participants)
                .for_each(|participant| participant.0.store(0, Release));
        }
    }

    #[cfg(all(test, not(shuttle)))]
    mod tests {
        use super::*;

        /// Objects retired under guards wait for the guards of that time, in any order of drops, and for no newer guard.
        #[test]
        fn retired_objects_wait_for_earlier_guards() {
            let (first, second) = (pin(), pin());
            let (epoch, oldest_then) = retire();
            assert!(oldest_then <= epoch);
            drop(first);
            assert!(oldest() <= epoch, "the second guard is there");
            drop(second);
            let later = pin();
            let wait = |is_so: &dyn Fn() -> bool| {
                while !is_so() {
                    std::thread::yield_now();
                }
            };
            // Readers of other tests finish, too.
            wait(&|| oldest() > epoch);
            drop(later);
        }

        /// Participants without a thread slot are waited for, even more than one part of the overflow list holds.
        #[test]
        fn participants_without_a_slot_count() {
            let guards: Vec<_> = (0..OVERFLOW_LEN + 2)
                .map(|_| {
                    HAS_OVERFLOW.store(true, Relaxed);
                    Guard { participant: FIRST.begin(), _of_this_thread: PhantomData }
                })
                .collect();
            let (epoch, oldest_then) = retire();
            assert!(oldest_then <= epoch);
            let mut guards = guards.into_iter();
            let last = guards.next_back();
            guards.for_each(drop);
            assert!(oldest() <= epoch);
            drop(last);
            while oldest() <= epoch {
                std::thread::yield_now();
            }
        }

        /// A thread slot is not reused while one of its guards exists, even if the thread has ended otherwise.
        #[test]
        fn slots_of_participants_are_kept() {
            let (slot, participant) = std::thread::spawn(|| {
                let guard = pin();
                let participant = guard.participant;
                std::mem::forget(guard);
                (thread_slots::own_slot(), participant)
            })
            .join()
            .unwrap();
            let others = (0..100).map(|_| std::thread::spawn(thread_slots::find_slot).join().unwrap());
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

    const RETIRERS: usize = 2;

    struct Model {
        global: GlobalEpoch,
        participant: Participant,
        /// Each makes a place reachable while it is 1.
        words: [AtomicU32; RETIRERS],
        /// 1 once the place is reused.
        places: [AtomicU32; RETIRERS],
    }

    /// A reader that begins twice, beside two threads that each unlink a place and reuse it when it is free. The reader
    /// never sees a reused place. With only one retiring thread, no other thread would advance the global epoch.
    #[test]
    fn no_reader_sees_a_reused_place() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let model = Arc::new(Model {
                global: GlobalEpoch(AtomicU64::new(1)),
                participant: Participant(AtomicU64::new(0)),
                words: [AtomicU32::new(1), AtomicU32::new(1)],
                places: [AtomicU32::new(0), AtomicU32::new(0)],
            });
            let retire = |at: usize| {
                let model = model.clone();
                move || {
                    model.words[at].store(0, Release);
                    let (epoch, oldest) = model.global.retire(|| [&model.participant]);
                    let is_free = oldest > epoch || {
                        fence(SeqCst);
                        oldest_of([&model.participant]) > epoch
                    };
                    if is_free {
                        model.places[at].store(1, Relaxed);
                    }
                }
            };
            let retirers = [thread::spawn(retire(0)), thread::spawn(retire(1))];
            for _ in 0..2 {
                model.participant.begin(&model.global);
                for at in 0..RETIRERS {
                    if model.words[at].load(Acquire) == 1 {
                        assert_eq!(model.places[at].load(Relaxed), 0, "a place is used again under its reader");
                    }
                }
                model.participant.end();
            }
            retirers.into_iter().for_each(|retirer| retirer.join().unwrap());
        });
    }
}
