//! The state word of a volatile range.
//!
//! ```text
//!            hold              mark                 claim
//!   Free ------------> Held <--------> Volatile <------------> Purging
//!     ^                 | unmark           |   finish (lost)     |
//!     `-----------------+------------------'                     |
//!     ^                        release                           |
//!     `----------------------------------------------------------'
//!                        finish (of a free one)
//! ```
//!
//! Marking and unmarking are one compare-and-swap each, on the range's own word. A purge takes a range that is volatile
//! and not pinned to *Purging*, throws bytes away, and says in the word what became of it; whoever wants the range
//! meanwhile waits, and has the purge stop at the next step. A free one is claimed as well, for the memory it may have.
//! The generation tells a range from the one that had the same word before. Checked under loom.

use crate::sync::{Acquire, AtomicU64, Relaxed, Release};

/// What may be done with a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Nobody's.
    Free = 0,
    /// Nonvolatile: its bytes stay.
    Held = 1,
    /// Its bytes may be thrown away.
    Volatile = 2,
    /// A purge is throwing them away.
    Purging = 3,
}

const PHASE: u64 = 3;
/// Volatile: bytes were thrown away since it was marked.
const LOST: u64 = 1 << 2;
/// Purging: somebody waits for the end. Volatile: somebody waited, and has not come yet.
const AWAITED: u64 = 1 << 3;
/// Purging: what is purged is free.
const FROM_FREE: u64 = 1 << 4;
/// Free: memory of the last owner may be behind it.
const BACKED: u64 = 1 << 5;
const PIN: u64 = 1 << 8;
const PINS: u64 = 0xFFFF << 8;
const GENERATION_SHIFT: u32 = 24;
const GENERATION: u64 = 0xFFFF << GENERATION_SHIFT;
const EPOCH_SHIFT: u32 = 40;

/// So long a range is left to who waited for it.
const GRACE_TICKS: u32 = 2;

/// Bits of an epoch.
const EPOCH_BITS: u32 = u64::BITS - EPOCH_SHIFT;

/// The coarse time of marking, of some nanoseconds: ticks of 4.2 ms that wrap after 19 hours.
pub(crate) fn epoch_of(ns: u64) -> u32 {
    (ns >> 22) as u32 & (u32::MAX >> (u32::BITS - EPOCH_BITS))
}

/// How many ticks before `now` it was. What lies ahead of it was marked since `now` was read.
pub(crate) fn age(now: u32, epoch: u32) -> u32 {
    let ticks = ticks_since(now, epoch);
    if ticks >> (EPOCH_BITS - 1) == 0 { ticks } else { 0 }
}

/// Ticks from `epoch` to `now`, which was read after that was.
pub(crate) fn ticks_since(now: u32, epoch: u32) -> u32 {
    now.wrapping_sub(epoch) & (u32::MAX >> (u32::BITS - EPOCH_BITS))
}

/// A look at the word; it may have changed since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen(u64);

impl Seen {
    pub fn phase(self) -> Phase {
        match self.0 & PHASE {
            0 => Phase::Free,
            1 => Phase::Held,
            2 => Phase::Volatile,
            _ => Phase::Purging,
        }
    }

    pub fn is_lost(self) -> bool {
        self.0 & LOST != 0
    }

    /// Whether it is somebody's: free ones are purged, too.
    pub fn has_owner(self) -> bool {
        let is_free = self.phase() == Phase::Free || (self.phase() == Phase::Purging && self.0 & FROM_FREE != 0);
        !is_free
    }

    pub fn pins(self) -> u16 {
        ((self.0 & PINS) >> 8) as u16
    }

    pub fn epoch(self) -> u32 {
        (self.0 >> EPOCH_SHIFT) as u32
    }

    /// Whether a purge may take it at this epoch. Who waited for the last one comes first, for some milliseconds.
    pub fn is_claimable(self, now: u32) -> bool {
        let is_wanted = || self.0 & AWAITED != 0 && age(now, self.epoch()) < GRACE_TICKS;
        match self.phase() {
            Phase::Free => self.0 & BACKED != 0,
            Phase::Volatile => self.pins() == 0 && !is_wanted(),
            Phase::Held | Phase::Purging => false,
        }
    }

    fn with_phase(self, phase: Phase) -> u64 {
        self.0 & !PHASE | phase as u64
    }

    fn with_epoch(word: u64, epoch: u32) -> u64 {
        word & (u64::MAX >> EPOCH_BITS) | u64::from(epoch) << EPOCH_SHIFT
    }
}

/// Why a change was not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// A purge has it: wait, and try again.
    Purging,
    /// It is in this phase.
    Phase(Phase),
    /// It has as many pins as the word counts.
    Pins,
}

/// The word itself. Zero bits say: free, and nothing is behind it.
#[repr(transparent)]
pub(crate) struct Word(AtomicU64);

impl Word {
    #[cfg(test)]
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    pub fn look(&self) -> Seen {
        Seen(self.0.load(Acquire))
    }

    /// Changes the word as `change` says, if it says so.
    #[inline]
    fn update<T>(&self, change: impl Fn(Seen) -> Result<(u64, T), Refused>) -> Result<T, Refused> {
        let mut word = self.0.load(Relaxed);
        loop {
            if Seen(word).phase() == Phase::Purging {
                return Err(Refused::Purging);
            }
            let (new, result) = change(Seen(word))?;
            // Who waited has come. Bytes that were written before a mark are there for whoever unmarks or pins it.
            match self.0.compare_exchange_weak(word, new & !AWAITED, std::sync::atomic::Ordering::AcqRel, Relaxed) {
                Ok(_) => return Ok(result),
                Err(now) => word = now,
            }
        }
    }

    /// Takes a free range for a new owner.
    pub fn hold(&self) -> Result<(), Refused> {
        self.update(|seen| match seen.phase() {
            Phase::Free => Ok((seen.with_phase(Phase::Held) & !BACKED, ())),
            other => Err(Refused::Phase(other)),
        })
    }

    /// Ends the owner's use; `has_memory` if something is still behind it. Pins that were forgotten end with it.
    pub fn release(&self, has_memory: bool) -> Result<(), Refused> {
        self.update(|seen| match seen.phase() {
            Phase::Free => Err(Refused::Phase(Phase::Free)),
            _ => {
                let generation = (seen.0 & GENERATION).wrapping_add(1 << GENERATION_SHIFT) & GENERATION;
                let epoch = Seen::with_epoch(0, seen.epoch());
                Ok((epoch | generation | Phase::Free as u64 | if has_memory { BACKED } else { 0 }, ()))
            }
        })
    }

    /// *Held* to *Volatile*.
    #[inline]
    pub fn mark(&self, epoch: u32) -> Result<(), Refused> {
        self.update(|seen| match seen.phase() {
            Phase::Held => Ok((Seen::with_epoch(seen.with_phase(Phase::Volatile) & !LOST, epoch), ())),
            other => Err(Refused::Phase(other)),
        })
    }

    /// *Volatile* to *Held*. Says whether bytes were lost; then it is pinned, too, so that what was kept can be read before
    /// another marks it again: end that with [`Word::unpin`].
    #[inline]
    pub fn unmark(&self) -> Result<bool, Refused> {
        self.update(|seen| match seen.phase() {
            Phase::Volatile if seen.is_lost() && seen.pins() == u16::MAX => Err(Refused::Pins),
            Phase::Volatile if seen.is_lost() => Ok(((seen.with_phase(Phase::Held) & !LOST) + PIN, true)),
            Phase::Volatile => Ok((seen.with_phase(Phase::Held), false)),
            other => Err(Refused::Phase(other)),
        })
    }

    /// A volatile range was used: it counts as marked now.
    #[inline]
    pub fn refresh(&self, epoch: u32) -> Result<(), Refused> {
        self.update(|seen| match seen.phase() {
            Phase::Volatile => Ok((Seen::with_epoch(seen.0, epoch), ())),
            other => Err(Refused::Phase(other)),
        })
    }

    /// Keeps purges away until [`Word::unpin`]. Returns what it is now.
    #[inline]
    pub fn pin(&self) -> Result<Seen, Refused> {
        self.update(|seen| match seen.phase() {
            Phase::Held | Phase::Volatile if seen.pins() == u16::MAX => Err(Refused::Pins),
            Phase::Held | Phase::Volatile => Ok((seen.0 + PIN, seen)),
            other => Err(Refused::Phase(other)),
        })
    }

    /// Ends a pin.
    #[inline]
    pub fn unpin(&self) {
        let before = self.0.fetch_sub(PIN, Release);
        debug_assert!(Seen(before).pins() > 0);
    }

    /// Takes what was seen for a purge, if it is still that and was claimable.
    pub fn claim(&self, seen: Seen, now: u32) -> bool {
        let from_free = if seen.phase() == Phase::Free { FROM_FREE } else { 0 };
        let new = seen.with_phase(Phase::Purging) & !AWAITED | from_free;
        seen.is_claimable(now) && self.0.compare_exchange(seen.0, new, Acquire, Relaxed).is_ok()
    }

    /// Whether somebody waits for a claimed range.
    pub fn is_awaited(&self) -> bool {
        self.0.load(Relaxed) & AWAITED != 0
    }

    /// Asks the purge that has the range to come to an end. Returns whether one has it.
    pub fn await_end(&self) -> bool {
        let word = self.0.load(Relaxed);
        let is_purging = Seen(word).phase() == Phase::Purging;
        if is_purging && word & AWAITED == 0 {
            // Did it end just now, there is nothing to ask for.
            let _ = self.0.compare_exchange(word, word | AWAITED, Relaxed, Relaxed);
        }
        is_purging
    }

    /// Ends a claim: `has_lost` if any byte went. It counts as marked at `epoch`. Of a free one nothing is behind it from
    /// here on, or nothing that could be had.
    pub fn finish(&self, has_lost: bool, epoch: u32) {
        let mut word = self.0.load(Relaxed);
        loop {
            debug_assert_eq!(Seen(word).phase(), Phase::Purging);
            // Requests to end may come until the last moment; they are kept, for whoever made them to come first.
            let new = match word & FROM_FREE {
                0 => word & !PHASE | Phase::Volatile as u64 | if has_lost { LOST } else { 0 },
                _ => word & !(PHASE | AWAITED | FROM_FREE | BACKED) | Phase::Free as u64,
            };
            match self.0.compare_exchange_weak(word, Seen::with_epoch(new, epoch), Release, Relaxed) {
                Ok(_) => return,
                Err(now) => word = now,
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// The way of a range: marked, purged, unmarked; what is out of order is refused and changes nothing.
    #[test]
    fn a_range_goes_its_way() {
        let word = Word::new();
        word.hold().unwrap();
        assert_eq!(word.unmark(), Err(Refused::Phase(Phase::Held)));
        word.mark(7).unwrap();
        assert_eq!(word.mark(8), Err(Refused::Phase(Phase::Volatile)));
        let seen = word.look();
        assert_eq!((seen.epoch(), seen.pins(), seen.is_lost()), (7, 0, false));
        assert!(word.claim(seen, 9) && !word.claim(seen, 9));
        assert_eq!((word.pin(), word.is_awaited()), (Err(Refused::Purging), false));
        assert!(word.await_end() && word.is_awaited());
        word.finish(true, 9);
        assert!(!word.await_end());
        let seen = word.look();
        assert!(!seen.is_claimable(9) && seen.is_claimable(9 + GRACE_TICKS), "who waited comes first, for a while");
        assert_eq!((seen.epoch(), word.unmark(), word.look().pins()), (9, Ok(true), 1));
        word.unpin();
        word.mark(10).unwrap();
        assert_eq!(word.unmark(), Ok(false), "a mark begins anew");
    }

    /// Pinned ranges are not claimed; pins have a bound.
    #[test]
    fn pins_protect() {
        let word = Word::new();
        word.hold().unwrap();
        word.mark(1).unwrap();
        for _ in 0..u16::MAX {
            word.pin().unwrap();
        }
        assert_eq!(word.pin(), Err(Refused::Pins));
        assert!(!word.claim(word.look(), 9));
        (0..u16::MAX).for_each(|_| word.unpin());
        let seen = word.look();
        word.release(true).unwrap();
        assert!(!word.claim(seen, 9), "another generation");
        assert!(word.claim(word.look(), 9), "what is free has memory to give");
        word.finish(true, 3);
        assert!(word.look().phase() == Phase::Free && !word.look().is_claimable(4));
    }

    /// Ages go over the wrap.
    #[test]
    fn ages_wrap() {
        assert_eq!(age(5, 3), 2);
        assert_eq!(age(1, epoch_of(u64::MAX)), 2);
        assert_eq!(age(3, 5), 0, "marked since the clock was read");
        assert_eq!(ticks_since(1, epoch_of(u64::MAX)), 2);
        assert_eq!(epoch_of(10 << 22), 10);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicUsize;
    use loom::thread;

    /// A range of one byte, 1 while kept.
    struct Fixture {
        word: Word,
        byte: AtomicUsize,
    }

    impl Fixture {
        fn marked() -> Arc<Self> {
            let fixture = Self { word: Word::new(), byte: AtomicUsize::new(1) };
            fixture.word.hold().unwrap();
            fixture.word.mark(1).unwrap();
            Arc::new(fixture)
        }

        fn purge(&self) {
            let seen = self.word.look();
            if self.word.claim(seen, 9) {
                self.byte.store(0, Relaxed);
                self.word.finish(true, 2);
            }
        }

        /// As a waiting owner does: asks the purge to end, waits, and tries again.
        fn insist<T>(&self, purge: &mut Purge, act: impl Fn() -> Result<T, Refused>) -> Result<T, Refused> {
            match act() {
                Err(Refused::Purging) => {
                    self.word.await_end();
                    purge.take().unwrap().join().unwrap();
                    act()
                }
                result => result,
            }
        }

        fn start_purge(fixture: &Arc<Self>) -> Purge {
            let other = fixture.clone();
            Some(thread::spawn(move || other.purge()))
        }
    }

    type Purge = Option<thread::JoinHandle<()>>;

    fn join(purge: Purge) {
        purge.into_iter().for_each(|purge| purge.join().unwrap());
    }

    /// What unmarking says of the bytes is true, and they stay so.
    #[test]
    fn unmarking_tells_the_truth() {
        loom::model(|| {
            let fixture = Fixture::marked();
            let mut purge = Fixture::start_purge(&fixture);
            let was_lost = fixture.insist(&mut purge, || fixture.word.unmark()).unwrap();
            assert_eq!(fixture.byte.load(Relaxed), usize::from(!was_lost));
            assert_eq!(fixture.word.look().pins(), u16::from(was_lost));
            join(purge);
            assert_eq!(fixture.byte.load(Relaxed), usize::from(!was_lost));
        });
    }

    /// While it is pinned nothing goes, and the pin says whether something had gone.
    #[test]
    fn a_pin_keeps_bytes() {
        loom::model(|| {
            let fixture = Fixture::marked();
            let mut purge = Fixture::start_purge(&fixture);
            let seen = fixture.insist(&mut purge, || fixture.word.pin()).unwrap();
            assert_eq!(fixture.byte.load(Relaxed), usize::from(!seen.is_lost()));
            fixture.word.unpin();
            join(purge);
            assert_eq!(fixture.word.look().pins(), 0);
        });
    }

    /// A range that is released and held anew is not purged by who saw it before.
    #[test]
    fn a_purge_never_meets_the_next_owner() {
        loom::model(|| {
            let fixture = Fixture::marked();
            let mut purge = Fixture::start_purge(&fixture);
            fixture.insist(&mut purge, || fixture.word.release(true)).unwrap();
            if fixture.insist(&mut purge, || fixture.word.hold()).is_ok() {
                fixture.byte.store(2, Relaxed);
                fixture.word.mark(1).unwrap();
                // A purge of this mark is allowed; one of the former is not, and would leave no trace in the word.
                let was_lost = fixture.insist(&mut purge, || fixture.word.unmark()).unwrap();
                assert_eq!(fixture.byte.load(Relaxed), if was_lost { 0 } else { 2 });
            }
            join(purge);
        });
    }

    /// Of two marks exactly one succeeds.
    #[test]
    fn a_double_mark_is_noticed() {
        loom::model(|| {
            let word = Arc::new(Word::new());
            word.hold().unwrap();
            let other = word.clone();
            let thread = thread::spawn(move || other.mark(1).is_ok());
            let here = word.mark(2).is_ok();
            assert!(here ^ thread.join().unwrap());
        });
    }
}
