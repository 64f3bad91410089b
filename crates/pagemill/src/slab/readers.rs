//! Who reads values by handle, and since when: from that it follows when nobody can be at what was left.
//!
//! ```text
//!   reader   word = what the clock says, barrier, look for a value ... word = 0
//!   leaver   no word leads to the place, barrier, look at the words of all readers
//!              nobody reads, or only who began after the clock's moment --> it is free
//!              else the clock goes on by one, and it waits until all who began up to then have gone
//! ```
//!
//! One of the two barriers comes first: either the leaver sees that the reader is there, or the reader does not come to the place. So
//! nothing waits for time to pass: what nobody is at goes at the first look, and the clock stands still while leavers meet no reader.
//! A thread's word is that of its number ([`super::numbers`]); such as have none share a list.

use crate::sync::{Acquire, AtomicU64, Relaxed, Release, fence};
use std::sync::atomic::Ordering::{AcqRel, SeqCst};

/// Of a reader's word: how many guards there are; above that the moment at which the first began.
const DEPTH_BITS: u32 = 16;
const DEPTH: u64 = (1 << DEPTH_BITS) - 1;

/// What the clock said.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment(u64);

impl Moment {
    /// That of a reader who is not there.
    const NEVER: Self = Self(u64::MAX);

    /// Before any that the clock has ever said.
    const BEFORE_ALL: Self = Self(0);

    /// As it is kept in a word.
    pub fn to_bits(self) -> u64 {
        self.0
    }

    pub fn from_bits(bits: u64) -> Self {
        Self(bits)
    }
}

pub(crate) struct Clock(AtomicU64);

/// A reader's word: 0 while he does not read. Nobody else writes it.
#[repr(align(128))]
pub(crate) struct Reader(AtomicU64);

impl Reader {
    /// Begins to read, or does so once more.
    #[inline(always)]
    fn begin(&self, clock: &Clock) {
        match self.0.load(Relaxed) {
            0 => self.enter(clock.0.load(Acquire) << DEPTH_BITS | 1),
            word => self.begin_again(word),
        }
    }

    #[inline(always)]
    fn enter(&self, word: u64) {
        // Of what the thread read before, who sees this knows that it is over.
        if cfg!(all(target_arch = "x86_64", not(loom))) {
            // An exchange is a whole barrier there, at half the price of one.
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
        // 0 where a child began anew meanwhile.
        self.0.store(if word & DEPTH <= 1 { 0 } else { word - 1 }, Release);
    }

    fn is_reading(&self) -> bool {
        self.0.load(Relaxed) != 0
    }

    fn since(&self) -> Moment {
        // Acquires what he did until he was done, or began anew.
        match self.0.load(Acquire) {
            0 => Moment::NEVER,
            word => Moment(word >> DEPTH_BITS),
        }
    }
}

/// Since when somebody reads.
fn oldest_of<'all>(readers: impl IntoIterator<Item = &'all Reader>) -> Moment {
    readers.into_iter().map(Reader::since).min().unwrap_or(Moment::NEVER)
}

impl Clock {
    /// After the last word that led to some places was changed: the moment up to which who reads may be at them, and since when
    /// somebody reads. `readers` is called when their words can be looked at.
    fn leave<'all, R: IntoIterator<Item = &'all Reader>>(&self, readers: impl FnOnce() -> R) -> (Moment, Moment) {
        fence(SeqCst);
        let now = self.0.load(Acquire);
        let oldest = oldest_of(readers());
        if oldest <= Moment(now) {
            // Who begins from here on is known to have come later. If it fails another has done it.
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

    /// Readers without a number that a part of the list has room for.
    const CROWD: usize = 64;

    static CLOCK: Padded<Clock> = Padded(Clock(AtomicU64::new(1)));

    /// By number of the thread.
    static READERS: [Reader; MAX_THREADS] = [const { Reader(AtomicU64::new(0)) }; MAX_THREADS];

    /// Whether there was ever a reader without a number.
    static IS_CROWDED: AtomicBool = AtomicBool::new(false);
    static FIRST: Crowd = Crowd::new();

    /// The process whose threads these are; 0 while there is none.
    static OWNER: AtomicU32 = AtomicU32::new(0);

    /// Readers whose threads have no number: there are too many of them, or they are ending. Each guard has a word of its own.
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

        /// Begins to read with the first word that is free.
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

    /// For who reads: until it goes, values that he came to stay as they are.
    pub struct Guard {
        reader: &'static Reader,
        _of_this_thread: PhantomData<*mut ()>,
    }

    /// Begins reading. Some nanoseconds, no shared line is written; memory that was freed piles up for as long as the guard is kept.
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
        // Before the barrier of who begins, so that who looks for him sees it.
        IS_CROWDED.store(true, Relaxed);
        FIRST.begin()
    }

    impl Drop for Guard {
        #[inline]
        fn drop(&mut self) {
            self.reader.end();
        }
    }

    /// All who may be reading; after a barrier.
    fn readers() -> impl Iterator<Item = &'static Reader> {
        let crowd = IS_CROWDED.load(Relaxed).then(|| FIRST.all().flat_map(|crowd| &crowd.readers));
        // Of a number that nobody has nobody reads.
        numbers::taken().map(|number| &READERS[number]).chain(crowd.into_iter().flatten())
    }

    /// Of places to which no word leads any more: the moment up to which who reads may be at them, and since when somebody reads. They
    /// are free when the second is later than the first.
    pub fn leave() -> (Moment, Moment) {
        CLOCK.0.leave(readers)
    }

    /// Until when what is left now has to wait, for [`oldest`] to be later: not at all where nobody reads.
    pub fn wait_until() -> Moment {
        let (moment, oldest) = leave();
        if oldest > moment { Moment::BEFORE_ALL } else { moment }
    }

    /// Since when somebody reads: what was left at an earlier moment is free.
    pub fn oldest() -> Moment {
        fence(SeqCst);
        oldest_of(readers())
    }

    /// Whether the thread of this number reads.
    pub fn is_reading(number: u32) -> bool {
        READERS[number as usize].is_reading()
    }

    /// A thread of this process may read from now on.
    pub fn note_process() {
        let _ = OWNER.compare_exchange(0, process::id(), Relaxed, Relaxed);
    }

    /// In a fork child: nobody reads but this thread, if it does. Counts once for each process, of however many Pagemills; where another
    /// thread than the first was the first to notice, not at all: the first may be reading.
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

        /// What was left under guards waits for those that were there, whichever goes first, and for no other.
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
            // Readers of other tests go, too.
            wait(&|| oldest() > moment);
            drop(later);
        }

        /// Readers without a number of their own are waited for, more than a part of the list has room for.
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

        /// A thread's number goes to nobody while a guard of it is there, which may be when all else of the thread has ended.
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
        /// Each leads to a place while it is 1.
        words: [AtomicU32; LEAVERS],
        /// 1 when a place is used for something else.
        places: [AtomicU32; LEAVERS],
    }

    /// A reader who goes and comes again, beside two who take a place each out of reach and use it again when they may: he finds none
    /// that is used again. With one leaver alone the clock would be his own.
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
