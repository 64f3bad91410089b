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
//! Marking and unmarking are one compare-and-swap each, on the range's own word. A purge moves a volatile, unpinned
//! range to *Purging*, discards bytes, and records the result in the word. A thread that needs the range meanwhile
//! waits and requests the purge to stop at the next step. A free range is claimed as well, for the memory it may have.
//! The generation distinguishes a range from the one that used the same word before. Checked under loom.

use pagemill_core::sync::{Acquire, AtomicU64, Relaxed, Release};

/// The state of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RangePhase {
    /// Has no owner.
    Free = 0,
    /// Nonvolatile: its bytes stay.
    Held = 1,
    /// Its bytes may be discarded.
    Volatile = 2,
    /// A purge is discarding its bytes.
    Purging = 3,
}

const PHASE: u64 = 3;
/// Volatile: bytes were discarded since it was marked.
const LOST: u64 = 1 << 2;
/// Purging: a thread waits for the end. Volatile: a thread waited and has not taken the range yet.
const AWAITED: u64 = 1 << 3;
/// Purging: the purged range is free.
const FROM_FREE: u64 = 1 << 4;
/// Free: memory of the last owner may be behind it.
const BACKED: u64 = 1 << 5;
const PIN: u64 = 1 << 8;
const PINS: u64 = 0xFFFF << 8;
const GENERATION_SHIFT: u32 = 24;
const GENERATION: u64 = 0xFFFF << GENERATION_SHIFT;
const EPOCH_SHIFT: u32 = 40;

/// A range is reserved this long for the thread that waited for it.
const GRACE_TICKS: u32 = 2;

/// Bits of an epoch.
const EPOCH_BITS: u32 = u64::BITS - EPOCH_SHIFT;

/// The coarse time of marking: ticks of 4.2 ms that wrap after 19 hours.
pub(crate) fn epoch_of(ns: u64) -> u32 {
    (ns >> 22) as u32 & (u32::MAX >> (u32::BITS - EPOCH_BITS))
}

/// Ticks from `epoch` to `now`. An epoch later than `now` was set after `now` was read: age 0.
pub(crate) fn age(now: u32, epoch: u32) -> u32 {
    let ticks = ticks_since(now, epoch);
    if ticks >> (EPOCH_BITS - 1) == 0 { ticks } else { 0 }
}

/// Ticks from `epoch` to a later `now`.
pub(crate) fn ticks_since(now: u32, epoch: u32) -> u32 {
    now.wrapping_sub(epoch) & (u32::MAX >> (u32::BITS - EPOCH_BITS))
}

/// A copy of the word; the word may have changed since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen(u64);

impl Seen {
    pub fn phase(self) -> RangePhase {
        match self.0 & PHASE {
            0 => RangePhase::Free,
            1 => RangePhase::Held,
            2 => RangePhase::Volatile,
            _ => RangePhase::Purging,
        }
    }

    pub fn is_lost(self) -> bool {
        self.0 & LOST != 0
    }

    /// Whether it has an owner: free ranges are purged, too.
    pub fn has_owner(self) -> bool {
        let is_free =
            self.phase() == RangePhase::Free || (self.phase() == RangePhase::Purging && self.0 & FROM_FREE != 0);
        !is_free
    }

    pub fn pins(self) -> u16 {
        ((self.0 & PINS) >> 8) as u16
    }

    pub fn epoch(self) -> u32 {
        (self.0 >> EPOCH_SHIFT) as u32
    }

    /// Whether a purge may claim it at this epoch. For some milliseconds a thread that waited for the last purge has
    /// priority.
    pub fn is_claimable(self, now: u32) -> bool {
        let is_wanted = || self.0 & AWAITED != 0 && age(now, self.epoch()) < GRACE_TICKS;
        match self.phase() {
            RangePhase::Free => self.0 & BACKED != 0,
            RangePhase::Volatile => self.pins() == 0 && !is_wanted(),
            RangePhase::Held | RangePhase::Purging => false,
        }
    }

    fn with_phase(self, phase: RangePhase) -> u64 {
        self.0 & !PHASE | phase as u64
    }

    fn with_epoch(word: u64, epoch: u32) -> u64 {
        word & (u64::MAX >> EPOCH_BITS) | u64::from(epoch) << EPOCH_SHIFT
    }
}

/// Why a change was not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// A purge holds the range: wait, and try again.
    Purging,
    /// The range is in this phase.
    RangePhase(RangePhase),
    /// The range has the maximum number of pins.
    Pins,
}

/// The state word. Zero bits mean: free, without memory.
#[repr(transparent)]
pub(crate) struct RangeWord(AtomicU64);

impl RangeWord {
    #[cfg(test)]
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    pub fn look(&self) -> Seen {
        Seen(self.0.load(Acquire))
    }

    /// Applies `change` to the word, unless a purge holds it or `change` refuses.
    #[inline]
    fn update<T>(&self, change: impl Fn(Seen) -> Result<(u64, T), Refused>) -> Result<T, Refused> {
        let mut word = self.0.load(Relaxed);
        loop {
            if Seen(word).phase() == RangePhase::Purging {
                return Err(Refused::Purging);
            }
            let (new, result) = change(Seen(word))?;
            // Clears AWAITED: the waiting thread has come. The ordering makes bytes written before a mark visible to a
            // later unmark or pin.
            match self.0.compare_exchange_weak(word, new & !AWAITED, std::sync::atomic::Ordering::AcqRel, Relaxed) {
                Ok(_) => return Ok(result),
                Err(now) => word = now,
            }
        }
    }

    /// Takes a free range for a new owner.
    pub fn hold(&self) -> Result<(), Refused> {
        self.update(|seen| match seen.phase() {
            RangePhase::Free => Ok((seen.with_phase(RangePhase::Held) & !BACKED, ())),
            other => Err(Refused::RangePhase(other)),
        })
    }

    /// Ends the owner's use. `has_memory`: memory is still behind it. Leaked pins end with it.
    pub fn release(&self, has_memory: bool) -> Result<(), Refused> {
        self.update(|seen| match seen.phase() {
            RangePhase::Free => Err(Refused::RangePhase(RangePhase::Free)),
            _ => {
                let generation = (seen.0 & GENERATION).wrapping_add(1 << GENERATION_SHIFT) & GENERATION;
                let epoch = Seen::with_epoch(0, seen.epoch());
                Ok((epoch | generation | RangePhase::Free as u64 | if has_memory { BACKED } else { 0 }, ()))
            }
        })
    }

    /// *Held* to *Volatile*.
    #[inline]
    pub fn mark(&self, epoch: u32) -> Result<(), Refused> {
        self.update(|seen| match seen.phase() {
            RangePhase::Held => Ok((Seen::with_epoch(seen.with_phase(RangePhase::Volatile) & !LOST, epoch), ())),
            other => Err(Refused::RangePhase(other)),
        })
    }

    /// *Volatile* to *Held*. Returns whether bytes were lost. In that case the range is also pinned, so that the kept
    /// part can be read before another thread marks it again. The caller ends that with [`RangeWord::unpin`].
    #[inline]
    pub fn unmark(&self) -> Result<bool, Refused> {
        self.update(|seen| match seen.phase() {
            RangePhase::Volatile if seen.is_lost() && seen.pins() == u16::MAX => Err(Refused::Pins),
            RangePhase::Volatile if seen.is_lost() => Ok(((seen.with_phase(RangePhase::Held) & !LOST) + PIN, true)),
            RangePhase::Volatile => Ok((seen.with_phase(RangePhase::Held), false)),
            other => Err(Refused::RangePhase(other)),
        })
    }

    /// Counts a volatile range as marked now, because it was used.
    #[inline]
    pub fn refresh(&self, epoch: u32) -> Result<(), Refused> {
        self.update(|seen| match seen.phase() {
            RangePhase::Volatile => Ok((Seen::with_epoch(seen.0, epoch), ())),
            other => Err(Refused::RangePhase(other)),
        })
    }

    /// Excludes purges until [`RangeWord::unpin`]. Returns the state before.
    #[inline]
    pub fn pin(&self) -> Result<Seen, Refused> {
        self.update(|seen| match seen.phase() {
            RangePhase::Held | RangePhase::Volatile if seen.pins() == u16::MAX => Err(Refused::Pins),
            RangePhase::Held | RangePhase::Volatile => Ok((seen.0 + PIN, seen)),
            other => Err(Refused::RangePhase(other)),
        })
    }

    /// Ends a pin.
    #[inline]
    pub fn unpin(&self) {
        let before = self.0.fetch_sub(PIN, Release);
        debug_assert!(Seen(before).pins() > 0);
    }

    /// Claims the range for a purge, if the word is still `seen` and was claimable.
    pub fn claim(&self, seen: Seen, now: u32) -> bool {
        let from_free = if seen.phase() == RangePhase::Free { FROM_FREE } else { 0 };
        let new = seen.with_phase(RangePhase::Purging) & !AWAITED | from_free;
        seen.is_claimable(now) && self.0.compare_exchange(seen.0, new, Acquire, Relaxed).is_ok()
    }

    /// Whether a thread waits for a claimed range.
    pub fn is_awaited(&self) -> bool {
        self.0.load(Relaxed) & AWAITED != 0
    }

    /// Requests the purge that holds the range to stop. Returns whether there is one.
    pub fn await_end(&self) -> bool {
        let word = self.0.load(Relaxed);
        let is_purging = Seen(word).phase() == RangePhase::Purging;
        if is_purging && word & AWAITED == 0 {
            // If the purge ended just now, there is nothing to request.
            let _ = self.0.compare_exchange(word, word | AWAITED, Relaxed, Relaxed);
        }
        is_purging
    }

    /// Ends a claim. `has_lost`: bytes were discarded. The range counts as marked at `epoch`. A free range has no
    /// memory from here on, or none that the kernel gives back.
    pub fn finish(&self, has_lost: bool, epoch: u32) {
        let mut word = self.0.load(Relaxed);
        loop {
            debug_assert_eq!(Seen(word).phase(), RangePhase::Purging);
            // Requests to stop may arrive until the last moment. They are kept, so that the requester has priority.
            let new = match word & FROM_FREE {
                0 => word & !PHASE | RangePhase::Volatile as u64 | if has_lost { LOST } else { 0 },
                _ => word & !(PHASE | AWAITED | FROM_FREE | BACKED) | RangePhase::Free as u64,
            };
            match self.0.compare_exchange_weak(word, Seen::with_epoch(new, epoch), Release, Relaxed) {
                Ok(_) => return,
                Err(now) => word = now,
            }
        }
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod model;

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// The life of a range: marked, purged, unmarked. Operations out of order are refused and change nothing.
    #[test]
    fn a_range_goes_its_way() {
        let word = RangeWord::new();
        word.hold().unwrap();
        assert_eq!(word.unmark(), Err(Refused::RangePhase(RangePhase::Held)));
        word.mark(7).unwrap();
        assert_eq!(word.mark(8), Err(Refused::RangePhase(RangePhase::Volatile)));
        let seen = word.look();
        assert_eq!((seen.epoch(), seen.pins(), seen.is_lost()), (7, 0, false));
        assert!(word.claim(seen, 9) && !word.claim(seen, 9));
        assert_eq!((word.pin(), word.is_awaited()), (Err(Refused::Purging), false));
        assert!(word.await_end() && word.is_awaited());
        word.finish(true, 9);
        assert!(!word.await_end());
        let seen = word.look();
        assert!(
            !seen.is_claimable(9) && seen.is_claimable(9 + GRACE_TICKS),
            "a waiting thread comes first, for a while"
        );
        assert_eq!((seen.epoch(), word.unmark(), word.look().pins()), (9, Ok(true), 1));
        word.unpin();
        word.mark(10).unwrap();
        assert_eq!(word.unmark(), Ok(false), "a mark begins anew");
    }

    /// Every pin is counted, and the range is claimable once the last one has ended.
    #[test]
    fn the_last_unpin_ends_the_protection() {
        let word = RangeWord::new();
        word.hold().unwrap();
        word.mark(1).unwrap();
        for pins in 1..=3 {
            word.pin().unwrap();
            assert_eq!(word.look().pins(), pins);
        }
        for pins in (0..3).rev() {
            assert!(!word.look().is_claimable(1));
            word.unpin();
            assert_eq!(word.look().pins(), pins);
        }
        assert!(word.look().is_claimable(1));
    }

    /// Pinned ranges are not claimed; the number of pins is limited.
    #[test]
    fn pins_protect() {
        let word = RangeWord::new();
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
        assert!(word.look().phase() == RangePhase::Free && !word.look().is_claimable(4));
    }

    /// Ages are correct across the wrap.
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
        word: RangeWord,
        byte: AtomicUsize,
    }

    impl Fixture {
        fn marked() -> Arc<Self> {
            let fixture = Self { word: RangeWord::new(), byte: AtomicUsize::new(1) };
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

        /// Acts as a waiting owner: requests the purge to stop, waits, and tries again.
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

    /// The result of unmarking matches the bytes, and they do not change afterwards.
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

    /// While it is pinned no byte is purged, and the pin reports whether bytes were lost before.
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

    /// A range that is released and held anew is not purged by a thread that saw its previous state.
    #[test]
    fn a_purge_never_meets_the_next_owner() {
        loom::model(|| {
            let fixture = Fixture::marked();
            let mut purge = Fixture::start_purge(&fixture);
            fixture.insist(&mut purge, || fixture.word.release(true)).unwrap();
            if fixture.insist(&mut purge, || fixture.word.hold()).is_ok() {
                fixture.byte.store(2, Relaxed);
                fixture.word.mark(1).unwrap();
                // A purge of this mark is allowed. A purge of the former is not, and would leave no trace in the word.
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
            let word = Arc::new(RangeWord::new());
            word.hold().unwrap();
            let other = word.clone();
            let thread = thread::spawn(move || other.mark(1).is_ok());
            let here = word.mark(2).is_ok();
            assert!(here ^ thread.join().unwrap());
        });
    }
}
