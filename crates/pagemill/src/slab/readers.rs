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
//! stands still while no reader is met. A thread's word is indexed by its thread slot ([`super::numbers`]). Threads
//! without a slot share an overflow list.
//!
//! Names: [`Moment`] is an epoch, [`Clock`] the global epoch, [`Reader`] a participant, `leave` is retire.

use crate::sync::{Acquire, AtomicU64, Relaxed, Release, fence};
use std::sync::atomic::Ordering::{AcqRel, SeqCst};

/// Bits of a participant's word that count its guards. The bits above hold the epoch at which the first guard began.
const DEPTH_BITS: u32 = 16;
const DEPTH: u64 = (1 << DEPTH_BITS) - 1;

/// An epoch: a value of the global epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment(u64);

impl Moment {
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
pub(crate) struct Clock(AtomicU64);

/// A participant of the epoch. The word is 0 while it does not read. Only its own thread writes it.
#[repr(align(128))]
pub(crate) struct Reader(AtomicU64);

impl Reader {
    /// Begins to read, or nests.
    #[inline(always)]
    fn begin(&self, clock: &Clock) {
        match self.0.load(Relaxed) {
            0 => self.enter(clock.0.load(Acquire) << DEPTH_BITS | 1),
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

    fn since(&self) -> Moment {
        // Acquires what the reader did until it finished or began anew.
        match self.0.load(Acquire) {
            0 => Moment::NEVER,
            word => Moment(word >> DEPTH_BITS),
        }
    }
}

/// The oldest epoch of a participant that is reading.
fn oldest_of<'all>(readers: impl IntoIterator<Item = &'all Reader>) -> Moment {
    readers.into_iter().map(Reader::since).min().unwrap_or(Moment::NEVER)
}

impl Clock {
    /// Retires objects after their last reference was unlinked. Returns the epoch up to which readers may still use
    /// them, and the oldest epoch of a reader. `readers` is called once the words of the participants can be read.
    fn leave<'all, R: IntoIterator<Item = &'all Reader>>(&self, readers: impl FnOnce() -> R) -> (Moment, Moment) {
        fence(SeqCst);
        let now = self.0.load(Acquire);
        let oldest = oldest_of(readers());
        if oldest <= Moment(now) {
            // Readers that begin from here on are known to be newer. If the exchange fails, another thread has advanced
            // the epoch.
            let _ = self.0.compare_exchange(now, now + 1, AcqRel, Relaxed);
        }
        (Moment(now), oldest)
    }
}

#[cfg(not(loom))]
pub use here::{Guard, pin};
#[cfg(not(loom))]
pub(super) use here::{begin_child, is_reading, leave, note_process, oldest, wait_until};

#[cfg(not(loom))]
mod here {
    use super::super::numbers::{self, MAX_THREADS, NONE};
    use super::{Clock, DEPTH_BITS, Moment, Reader, oldest_of};
    use crate::sync::{Acquire, AtomicU64, Padded, Relaxed, Release, fence};
    use pagemill_sys::process;
    use std::marker::PhantomData;
    use std::sync::OnceLock;
    use std::sync::atomic::Ordering::SeqCst;
    use std::sync::atomic::{AtomicBool, AtomicU32};

    /// Participants without a thread slot in one part of the overflow list.
    const CROWD: usize = 64;

    static CLOCK: Padded<Clock> = Padded(Clock(AtomicU64::new(1)));

    /// Participants by thread slot.
    static READERS: [Reader; MAX_THREADS] = [const { Reader(AtomicU64::new(0)) }; MAX_THREADS];

    /// Whether the overflow list was ever used.
    static IS_CROWDED: AtomicBool = AtomicBool::new(false);
    static FIRST: Crowd = Crowd::new();

    /// The process that these threads belong to; 0 while there is none.
    static OWNER: AtomicU32 = AtomicU32::new(0);

    /// The overflow list: participants of threads without a slot, because all are taken or the thread is ending. Each
    /// guard has its own word.
    struct Crowd {
        readers: [Reader; CROWD],
        next: OnceLock<Box<Crowd>>,
    }

    impl Crowd {
        const fn new() -> Self {
            Self { readers: [const { Reader(AtomicU64::new(0)) }; CROWD], next: OnceLock::new() }
        }

        fn all(&'static self) -> impl Iterator<Item = &'static Self> {
            std::iter::successors(Some(self), |crowd| crowd.next.get().map(|next| &**next))
        }

        /// Begins to read with the first free word.
        fn begin(&'static self) -> &'static Reader {
            let mut crowd = self;
            loop {
                let word = CLOCK.0.0.load(Acquire) << DEPTH_BITS | 1;
                let found = crowd.readers.iter().find(|reader| {
                    reader.0.load(Relaxed) == 0 && reader.0.compare_exchange(0, word, SeqCst, Relaxed).is_ok()
                });
                if let Some(reader) = found {
                    fence(SeqCst);
                    return reader;
                }
                crowd = crowd.next.get_or_init(|| Box::new(Crowd::new()));
            }
        }
    }

    /// Pins the epoch of a reader: until the guard is dropped, values that it has looked up stay valid and unchanged.
    ///
    /// Example: [`ByHandle`](crate::slab::ByHandle).
    pub struct Guard {
        reader: &'static Reader,
        _of_this_thread: PhantomData<*mut ()>,
    }

    /// Begins reading. Costs some nanoseconds, and writes no shared cache line. Retired memory accumulates while the
    /// guard is kept.
    #[inline]
    pub fn pin() -> Guard {
        let reader = match READERS.get(numbers::own_number() as usize) {
            Some(reader) => {
                reader.begin(&CLOCK.0);
                reader
            }
            None => pin_slowly(),
        };
        Guard { reader, _of_this_thread: PhantomData }
    }

    #[cold]
    #[inline(never)]
    fn pin_slowly() -> &'static Reader {
        if let Some(reader) = READERS.get(numbers::find_number() as usize) {
            reader.begin(&CLOCK.0);
            return reader;
        }
        // Before the barrier of this reader, so that a retiring thread that looks for it sees the flag.
        IS_CROWDED.store(true, Relaxed);
        FIRST.begin()
    }

    impl Drop for Guard {
        #[inline]
        fn drop(&mut self) {
            self.reader.end();
        }
    }

    /// All participants that may be reading. To be called after a barrier.
    fn readers() -> impl Iterator<Item = &'static Reader> {
        let crowd = IS_CROWDED.load(Relaxed).then(|| FIRST.all().flat_map(|crowd| &crowd.readers));
        // A slot that no thread has is not reading.
        numbers::taken().map(|number| &READERS[number]).chain(crowd.into_iter().flatten())
    }

    /// Retires unlinked objects. Returns the epoch up to which readers may use them, and the oldest epoch of a reader.
    /// The objects are free if the second is newer than the first.
    pub fn leave() -> (Moment, Moment) {
        CLOCK.0.leave(readers)
    }

    /// The epoch that [`oldest`] has to pass before objects retired now are free. They are free at once if no thread
    /// reads.
    pub fn wait_until() -> Moment {
        let (moment, oldest) = leave();
        if oldest > moment { Moment::BEFORE_ALL } else { moment }
    }

    /// The oldest epoch of a reader: objects retired at an earlier epoch are free.
    pub fn oldest() -> Moment {
        fence(SeqCst);
        oldest_of(readers())
    }

    /// Whether the thread in this slot is reading.
    pub fn is_reading(number: u32) -> bool {
        READERS[number as usize].is_reading()
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
        let number = numbers::own_number();
        let all = READERS.iter().take(numbers::high_water()).enumerate();
        all.filter(|(at, _)| *at != number as usize).for_each(|(_, reader)| {
            if reader.is_reading() {
                reader.0.store(0, Release)
            }
        });
        if number != NONE {
            FIRST.all().flat_map(|crowd| &crowd.readers).for_each(|reader| reader.0.store(0, Release));
        }
    }

    #[cfg(all(test, not(shuttle)))]
    mod tests {
        use super::*;

        /// Objects retired under guards wait for the guards of that time, in any order of drops, and for no newer guard.
        #[test]
        fn what_is_left_waits_for_who_was_there() {
            let (first, second) = (pin(), pin());
            let (moment, oldest_then) = leave();
            assert!(oldest_then <= moment);
            drop(first);
            assert!(oldest() <= moment, "the second guard is there");
            drop(second);
            let later = pin();
            let wait = |is_so: &dyn Fn() -> bool| {
                while !is_so() {
                    std::thread::yield_now();
                }
            };
            // Readers of other tests finish, too.
            wait(&|| oldest() > moment);
            drop(later);
        }

        /// Participants without a thread slot are waited for, even more than one part of the overflow list holds.
        #[test]
        fn readers_without_a_number_count() {
            let guards: Vec<_> = (0..CROWD + 2)
                .map(|_| {
                    IS_CROWDED.store(true, Relaxed);
                    Guard { reader: FIRST.begin(), _of_this_thread: PhantomData }
                })
                .collect();
            let (moment, oldest_then) = leave();
            assert!(oldest_then <= moment);
            let mut guards = guards.into_iter();
            let last = guards.next_back();
            guards.for_each(drop);
            assert!(oldest() <= moment);
            drop(last);
            while oldest() <= moment {
                std::thread::yield_now();
            }
        }

        /// A thread slot is not reused while one of its guards exists, even if the thread has ended otherwise.
        #[test]
        fn numbers_of_readers_are_kept() {
            let (number, reader) = std::thread::spawn(|| {
                let guard = pin();
                let reader = guard.reader;
                std::mem::forget(guard);
                (numbers::own_number(), reader)
            })
            .join()
            .unwrap();
            let others = (0..100).map(|_| std::thread::spawn(numbers::find_number).join().unwrap());
            assert!(others.into_iter().all(|other| other != number));
            reader.end();
        }
    }
}

#[cfg(all(loom, test))]
mod loom_tests {
    use super::*;
    use crate::sync::AtomicU32;
    use loom::sync::Arc;
    use loom::thread;

    const LEAVERS: usize = 2;

    struct Model {
        clock: Clock,
        reader: Reader,
        /// Each makes a place reachable while it is 1.
        words: [AtomicU32; LEAVERS],
        /// 1 once the place is reused.
        places: [AtomicU32; LEAVERS],
    }

    /// A reader that begins twice, beside two threads that each unlink a place and reuse it when it is free. The reader
    /// never sees a reused place. With only one retiring thread, no other thread would advance the global epoch.
    #[test]
    fn nobody_reads_what_is_used_again() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let model = Arc::new(Model {
                clock: Clock(AtomicU64::new(1)),
                reader: Reader(AtomicU64::new(0)),
                words: [AtomicU32::new(1), AtomicU32::new(1)],
                places: [AtomicU32::new(0), AtomicU32::new(0)],
            });
            let leave = |at: usize| {
                let model = model.clone();
                move || {
                    model.words[at].store(0, Release);
                    let (moment, oldest) = model.clock.leave(|| [&model.reader]);
                    let is_free = oldest > moment || {
                        fence(SeqCst);
                        oldest_of([&model.reader]) > moment
                    };
                    if is_free {
                        model.places[at].store(1, Relaxed);
                    }
                }
            };
            let leavers = [thread::spawn(leave(0)), thread::spawn(leave(1))];
            for _ in 0..2 {
                model.reader.begin(&model.clock);
                for at in 0..LEAVERS {
                    if model.words[at].load(Acquire) == 1 {
                        assert_eq!(model.places[at].load(Relaxed), 0, "a place is used again under its reader");
                    }
                }
                model.reader.end();
            }
            leavers.into_iter().for_each(|leaver| leaver.join().unwrap());
        });
    }
}
