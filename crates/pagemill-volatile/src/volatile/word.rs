//! The state word of a volatile range.
//!
//! ```text
//!            hold              mark                 claim
//!   Free ------------> Held <--------> Volatile <------------> Purging
//!     ^                 | unmark           |   finish (lost)     |
//!     `-----------------+------------------'                     |
//!     ^                        release                           |
//!     `----------------------------------------------------------'
//!                        finish (of a free range)
//! ```
//!
//! Marking and unmarking are one compare-and-swap each. A purge changes a volatile range without pins to *Purging*,
//! discards bytes, and records the result in the word. A thread that needs the range meanwhile requests the purge to
//! stop after its current step, and waits. A purge also claims free ranges, which may still have memory. A generation
//! number in the word distinguishes the range from an earlier range of the same entry. Loom tests check the word.

use pagemill_core::sync::{Acquire, AtomicU64, Relaxed, Release};

/// The phase of a range, a field of its state word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RangePhase {
    /// The range has no owner.
    Free = 0,
    /// The range is nonvolatile: its bytes are preserved.
    Held = 1,
    /// The range is marked: a purge may discard its bytes.
    Volatile = 2,
    /// A purge has claimed the range and is discarding its bytes.
    Purging = 3,
}

/// Mask of the field of a state word with the [`RangePhase`].
const PHASE_MASK: u64 = 3;
/// Bit, used in the phases *Volatile* and *Purging*: bytes were discarded since the range was marked.
const LOST_BIT: u64 = 1 << 2;
/// Bit. In the phase *Purging*: a thread waits for the end of the purge. In the phase *Volatile*: the thread that
/// waited for the last purge has not accessed the range yet.
const AWAITED_BIT: u64 = 1 << 3;
/// Bit, used in the phase *Purging*: the range was free before the purge claimed it.
const FROM_FREE_BIT: u64 = 1 << 4;
/// Bit, used in the phase *Free*: the range may still have memory of its last owner.
const BACKED_BIT: u64 = 1 << 5;
/// The value that one pin adds to a state word.
const ONE_PIN: u64 = 1 << 8;
/// Mask of the field of a state word with the number of pins.
const PINS_MASK: u64 = 0xFFFF << 8;
const GENERATION_SHIFT: u32 = 24;
/// Mask of the field of a state word with the generation number, which increases when the owner of the range drops it.
const GENERATION_MASK: u64 = 0xFFFF << GENERATION_SHIFT;
/// Position of the field with the epoch of the mark: the upper bits of a state word.
const EPOCH_SHIFT: u32 = 40;

/// After a purge that a thread waited for, no purge can claim the range again for this many ticks.
const GRACE_TICKS: u32 = 2;

/// Number of bits of an epoch in a state word.
const EPOCH_BITS: u32 = u64::BITS - EPOCH_SHIFT;

/// Converts a time in nanoseconds to an epoch: a number of ticks of 2^22 ns (4.2 ms), which wraps after 19 hours.
pub(crate) fn epoch_of(ns: u64) -> u32 {
    (ns >> 22) as u32 & (u32::MAX >> (u32::BITS - EPOCH_BITS))
}

/// Returns the number of ticks from `epoch` to `now`. Returns 0 if `epoch` is later than `now`, because another thread
/// set it after `now` was read.
pub(crate) fn age(now: u32, epoch: u32) -> u32 {
    let ticks = ticks_since(now, epoch);
    if ticks >> (EPOCH_BITS - 1) == 0 { ticks } else { 0 }
}

/// Returns the number of ticks from `epoch` to `now`. `now` must not be earlier than `epoch`.
pub(crate) fn ticks_since(now: u32, epoch: u32) -> u32 {
    now.wrapping_sub(epoch) & (u32::MAX >> (u32::BITS - EPOCH_BITS))
}

/// A copy of a state word. The word may have changed since it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SeenWord(u64);

impl SeenWord {
    pub fn phase(self) -> RangePhase {
        match self.0 & PHASE_MASK {
            0 => RangePhase::Free,
            1 => RangePhase::Held,
            2 => RangePhase::Volatile,
            _ => RangePhase::Purging,
        }
    }

    /// Returns whether bytes were discarded since the range was marked.
    pub fn is_lost(self) -> bool {
        self.0 & LOST_BIT != 0
    }

    /// Returns whether the range has an owner. A range in the phase *Purging* has no owner if it was free before the
    /// purge claimed it.
    pub fn has_owner(self) -> bool {
        let is_free =
            self.phase() == RangePhase::Free || (self.phase() == RangePhase::Purging && self.0 & FROM_FREE_BIT != 0);
        !is_free
    }

    pub fn pins(self) -> u16 {
        ((self.0 & PINS_MASK) >> 8) as u16
    }

    pub fn epoch(self) -> u32 {
        (self.0 >> EPOCH_SHIFT) as u32
    }

    /// Returns whether a purge may claim the range at the epoch `now`. False for some milliseconds after a purge that a
    /// thread waited for, so that this thread can access the range first.
    pub fn is_claimable(self, now: u32) -> bool {
        let is_wanted = || self.0 & AWAITED_BIT != 0 && age(now, self.epoch()) < GRACE_TICKS;
        match self.phase() {
            RangePhase::Free => self.0 & BACKED_BIT != 0,
            RangePhase::Volatile => self.pins() == 0 && !is_wanted(),
            RangePhase::Held | RangePhase::Purging => false,
        }
    }

    fn with_phase(self, phase: RangePhase) -> u64 {
        self.0 & !PHASE_MASK | phase as u64
    }

    fn with_epoch(word: u64, epoch: u32) -> u64 {
        debug_assert!(epoch >> EPOCH_BITS == 0, "an epoch fits into its field");
        word & (u64::MAX >> EPOCH_BITS) | u64::from(epoch) << EPOCH_SHIFT
    }
}

/// Why an operation on a state word was refused. The word is then unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// A purge has claimed the range. The caller can wait and try again.
    Purging,
    /// The range is in this phase, which does not allow the operation.
    RangePhase(RangePhase),
    /// The range has the maximum number of pins.
    Pins,
}

/// The result of an operation on a state word.
pub(crate) type Outcome<T> = Result<T, Refused>;

/// The state word of a range. Zero bits are a free range without memory.
#[repr(transparent)]
pub(crate) struct RangeWord(AtomicU64);

impl RangeWord {
    #[cfg(test)]
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    pub fn load(&self) -> SeenWord {
        SeenWord(self.0.load(Acquire))
    }

    /// Replaces the word by the result of `change`, unless a purge has claimed the range or `change` refuses.
    #[inline]
    fn update<T>(&self, change: impl Fn(SeenWord) -> Outcome<(u64, T)>) -> Outcome<T> {
        let mut word = self.0.load(Relaxed);
        loop {
            if SeenWord(word).phase() == RangePhase::Purging {
                return Err(Refused::Purging);
            }
            let (new, result) = change(SeenWord(word))?;
            debug_assert!(SeenWord(new).phase() != RangePhase::Purging, "only a claim begins a purge");
            // AWAITED_BIT is cleared, because the range was accessed. The ordering makes bytes that were written before
            // a mark visible to a later unmark or pin.
            match self.0.compare_exchange_weak(word, new & !AWAITED_BIT, std::sync::atomic::Ordering::AcqRel, Relaxed) {
                Ok(_) => return Ok(result),
                Err(now) => word = now,
            }
        }
    }

    /// As [`RangeWord::update`], but refuses if the range is not in the phase `from`.
    #[inline]
    fn update_from(&self, from: RangePhase, change: impl Fn(SeenWord) -> u64) -> Outcome<()> {
        self.update(|seen| match seen.phase() {
            phase if phase == from => Ok((change(seen), ())),
            other => Err(Refused::RangePhase(other)),
        })
    }

    /// Changes the range's phase from *Free* to *Held*, for a new owner.
    pub fn hold(&self) -> Outcome<()> {
        self.update_from(RangePhase::Free, |seen| seen.with_phase(RangePhase::Held) & !BACKED_BIT)
    }

    /// Changes the range's phase from *Held* or *Volatile* to *Free*, when the owner drops the range. `has_memory` says
    /// whether the range keeps its memory. Removes pins that were leaked.
    pub fn release(&self, has_memory: bool) -> Outcome<()> {
        self.update(|seen| match seen.phase() {
            RangePhase::Free => Err(Refused::RangePhase(RangePhase::Free)),
            _ => {
                let generation = (seen.0 & GENERATION_MASK).wrapping_add(1 << GENERATION_SHIFT) & GENERATION_MASK;
                let epoch = SeenWord::with_epoch(0, seen.epoch());
                Ok((epoch | generation | RangePhase::Free as u64 | if has_memory { BACKED_BIT } else { 0 }, ()))
            }
        })
    }

    /// Changes the range's phase from *Held* to *Volatile*. The range counts as marked at `epoch`.
    #[inline]
    pub fn mark(&self, epoch: u32) -> Outcome<()> {
        self.update_from(RangePhase::Held, |seen| {
            SeenWord::with_epoch(seen.with_phase(RangePhase::Volatile) & !LOST_BIT, epoch)
        })
    }

    /// Changes the range's phase from *Volatile* to *Held*. Returns whether bytes were lost. If bytes were lost,
    /// `unmark` also pins the range, so that the caller can read `kept_bytes` before another thread marks the range
    /// again. The caller must then call [`RangeWord::unpin`].
    #[inline]
    pub fn unmark(&self) -> Outcome<bool> {
        self.update(|seen| match seen.phase() {
            RangePhase::Volatile if seen.is_lost() && seen.pins() == u16::MAX => Err(Refused::Pins),
            RangePhase::Volatile if seen.is_lost() => {
                Ok(((seen.with_phase(RangePhase::Held) & !LOST_BIT) + ONE_PIN, true))
            }
            RangePhase::Volatile => Ok((seen.with_phase(RangePhase::Held), false)),
            other => Err(Refused::RangePhase(other)),
        })
    }

    /// Sets the epoch of a volatile range, so that the range counts as marked at that epoch.
    #[inline]
    pub fn refresh(&self, epoch: u32) -> Outcome<()> {
        self.update_from(RangePhase::Volatile, |seen| SeenWord::with_epoch(seen.0, epoch))
    }

    /// Adds a pin, which excludes purges until [`RangeWord::unpin`]. Returns the word as it was before the pin was
    /// added.
    #[inline]
    pub fn pin(&self) -> Outcome<SeenWord> {
        self.update(|seen| match seen.phase() {
            RangePhase::Held | RangePhase::Volatile if seen.pins() == u16::MAX => Err(Refused::Pins),
            RangePhase::Held | RangePhase::Volatile => Ok((seen.0 + ONE_PIN, seen)),
            other => Err(Refused::RangePhase(other)),
        })
    }

    /// Removes a pin.
    #[inline]
    pub fn unpin(&self) {
        let before = self.0.fetch_sub(ONE_PIN, Release);
        debug_assert!(SeenWord(before).pins() > 0);
    }

    /// Claims the range for a purge, if the word is still `seen` and `seen` is claimable. Returns whether the claim
    /// succeeded.
    pub fn claim(&self, seen: SeenWord, now: u32) -> bool {
        let from_free = if seen.phase() == RangePhase::Free { FROM_FREE_BIT } else { 0 };
        let new = seen.with_phase(RangePhase::Purging) & !AWAITED_BIT | from_free;
        seen.is_claimable(now) && self.0.compare_exchange(seen.0, new, Acquire, Relaxed).is_ok()
    }

    /// Returns whether a thread waits for the end of the purge that has claimed the range.
    pub fn is_awaited(&self) -> bool {
        self.0.load(Relaxed) & AWAITED_BIT != 0
    }

    /// Requests the purge that has claimed the range to stop early. Returns false if no purge has claimed the range.
    pub fn request_stop(&self) -> bool {
        let word = self.0.load(Relaxed);
        let is_purging = SeenWord(word).phase() == RangePhase::Purging;
        if is_purging && word & AWAITED_BIT == 0 {
            // This fails if the word has changed, for example because the purge has ended. The caller tries again.
            let _ = self.0.compare_exchange(word, word | AWAITED_BIT, Relaxed, Relaxed);
        }
        is_purging
    }

    /// Ends the claim of a purge. `has_lost` says whether the purge discarded bytes. From now on the range counts as
    /// marked at `epoch`. A free range counts as without memory, even if the kernel refused to take its memory.
    pub fn finish(&self, has_lost: bool, epoch: u32) {
        let mut word = self.0.load(Relaxed);
        loop {
            debug_assert!(SeenWord(word).phase() == RangePhase::Purging, "a claim ends once");
            debug_assert!(SeenWord(word).pins() == 0, "a claimed range has no pins");
            // AWAITED_BIT stays set for a range with an owner, so that the waiting thread can access it first.
            let new = match word & FROM_FREE_BIT {
                0 => word & !PHASE_MASK | RangePhase::Volatile as u64 | if has_lost { LOST_BIT } else { 0 },
                _ => word & !(PHASE_MASK | AWAITED_BIT | FROM_FREE_BIT | BACKED_BIT) | RangePhase::Free as u64,
            };
            match self.0.compare_exchange_weak(word, SeenWord::with_epoch(new, epoch), Release, Relaxed) {
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

    /// Marks, purges and unmarks a range. Operations that its phase does not allow must be refused.
    #[test]
    fn operations_follow_phases() {
        let word = RangeWord::new();
        word.hold().unwrap();
        assert_eq!(word.unmark(), Err(Refused::RangePhase(RangePhase::Held)));
        word.mark(7).unwrap();
        assert_eq!(word.mark(8), Err(Refused::RangePhase(RangePhase::Volatile)));
        let seen = word.load();
        assert_eq!((seen.epoch(), seen.pins(), seen.is_lost()), (7, 0, false));
        assert!(word.claim(seen, 9) && !word.claim(seen, 9));
        assert_eq!((word.pin(), word.is_awaited()), (Err(Refused::Purging), false));
        assert!(word.request_stop() && word.is_awaited());
        word.finish(true, 9);
        assert!(!word.request_stop());
        let seen = word.load();
        assert!(
            !seen.is_claimable(9) && seen.is_claimable(9 + GRACE_TICKS),
            "a waiting thread comes first, for a while"
        );
        assert_eq!((seen.epoch(), word.unmark(), word.load().pins()), (9, Ok(true), 1));
        word.unpin();
        word.mark(10).unwrap();
        assert_eq!(word.unmark(), Ok(false), "a mark begins anew");
    }

    /// Pins a range three times. A purge must be able to claim the range only after the last pin was removed.
    #[test]
    fn range_is_claimable_after_last_unpin() {
        let word = RangeWord::new();
        word.hold().unwrap();
        word.mark(1).unwrap();
        for pins in 1..=3 {
            word.pin().unwrap();
            assert_eq!(word.load().pins(), pins);
        }
        for pins in (0..3).rev() {
            assert!(!word.load().is_claimable(1));
            word.unpin();
            assert_eq!(word.load().pins(), pins);
        }
        assert!(word.load().is_claimable(1));
    }

    /// Adds the maximum number of pins. One more pin must be refused, and a claim must fail. After the range was
    /// released, a claim must succeed, but not with a copy of the word that was read before the release.
    #[test]
    fn pins_prevent_claims() {
        let word = RangeWord::new();
        word.hold().unwrap();
        word.mark(1).unwrap();
        for _ in 0..u16::MAX {
            word.pin().unwrap();
        }
        assert_eq!(word.pin(), Err(Refused::Pins));
        assert!(!word.claim(word.load(), 9));
        (0..u16::MAX).for_each(|_| word.unpin());
        let seen = word.load();
        word.release(true).unwrap();
        assert!(!word.claim(seen, 9), "another generation");
        assert!(word.claim(word.load(), 9), "what is free has memory to give");
        word.finish(true, 3);
        assert!(word.load().phase() == RangePhase::Free && !word.load().is_claimable(4));
    }

    /// The ages of marks must be correct when the epoch wraps.
    #[test]
    fn ages_are_correct_when_epochs_wrap() {
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

    /// A range of one byte, which is 1 until a purge sets it to 0.
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
            let seen = self.word.load();
            if self.word.claim(seen, 9) {
                self.byte.store(0, Relaxed);
                self.word.finish(true, 2);
            }
        }

        /// Runs `act` as the owner of a range does: if the range is being purged, requests the purge to stop, waits for
        /// its end, and runs `act` again.
        fn retry_after_purge<T>(
            &self,
            purge: &mut PurgeThread,
            act: impl Fn() -> Result<T, Refused>,
        ) -> Result<T, Refused> {
            match act() {
                Err(Refused::Purging) => {
                    self.word.request_stop();
                    purge.take().unwrap().join().unwrap();
                    act()
                }
                result => result,
            }
        }

        fn start_purge(fixture: &Arc<Self>) -> PurgeThread {
            let other = fixture.clone();
            Some(thread::spawn(move || other.purge()))
        }
    }

    type PurgeThread = Option<thread::JoinHandle<()>>;

    fn join(purge: PurgeThread) {
        purge.into_iter().for_each(|purge| purge.join().unwrap());
    }

    /// Unmarks a range of one byte while a purge runs. The result of `unmark` must say whether the byte was lost. The
    /// byte must not change afterwards.
    #[test]
    fn unmark_result_matches_bytes() {
        loom::model(|| {
            let fixture = Fixture::marked();
            let mut purge = Fixture::start_purge(&fixture);
            let was_lost = fixture.retry_after_purge(&mut purge, || fixture.word.unmark()).unwrap();
            assert_eq!(fixture.byte.load(Relaxed), usize::from(!was_lost));
            assert_eq!(fixture.word.load().pins(), u16::from(was_lost));
            join(purge);
            assert_eq!(fixture.byte.load(Relaxed), usize::from(!was_lost));
        });
    }

    /// Pins a range while a purge runs. The pin must report whether the byte was lost, and the byte must not change
    /// while it is pinned.
    #[test]
    fn pin_excludes_purge() {
        loom::model(|| {
            let fixture = Fixture::marked();
            let mut purge = Fixture::start_purge(&fixture);
            let seen = fixture.retry_after_purge(&mut purge, || fixture.word.pin()).unwrap();
            assert_eq!(fixture.byte.load(Relaxed), usize::from(!seen.is_lost()));
            fixture.word.unpin();
            join(purge);
            assert_eq!(fixture.word.load().pins(), 0);
        });
    }

    /// Releases a range, and holds and marks it for a new owner, while a purge runs. A purge that read the word under
    /// the old owner must not discard the new owner's byte.
    #[test]
    fn purge_spares_next_owner() {
        loom::model(|| {
            let fixture = Fixture::marked();
            let mut purge = Fixture::start_purge(&fixture);
            fixture.retry_after_purge(&mut purge, || fixture.word.release(true)).unwrap();
            if fixture.retry_after_purge(&mut purge, || fixture.word.hold()).is_ok() {
                fixture.byte.store(2, Relaxed);
                fixture.word.mark(1).unwrap();
                // A purge under the new mark is allowed. A purge under the old mark would not be recorded in the word.
                let was_lost = fixture.retry_after_purge(&mut purge, || fixture.word.unmark()).unwrap();
                assert_eq!(fixture.byte.load(Relaxed), if was_lost { 0 } else { 2 });
            }
            join(purge);
        });
    }

    /// Two threads mark the same range. Exactly one of them must succeed.
    #[test]
    fn one_of_two_marks_succeeds() {
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
