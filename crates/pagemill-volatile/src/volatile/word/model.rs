//! Model test of the state word: compares random operations on the word with operations on separate fields.

use super::*;

/// The fields of a state word, as separate variables.
#[derive(Clone, Debug)]
struct Model {
    phase: RangePhase,
    is_lost: bool,
    is_awaited: bool,
    /// Whether the range, in *Purging*, was free before the claim.
    is_from_free: bool,
    /// Whether a free range has memory.
    is_backed: bool,
    pins: u16,
    generation: u16,
    epoch: u32,
}

impl Model {
    fn has_owner(&self) -> bool {
        self.phase != RangePhase::Free && !self.is_from_free
    }

    fn is_claimable(&self, now: u32) -> bool {
        // Epochs wrap: half of all values count as later than `now`, that is as set since `now` was read.
        let ticks = (u64::from(now) + (1 << 24) - u64::from(self.epoch)) % (1 << 24);
        let is_within_grace = ticks < u64::from(GRACE_TICKS) || ticks >= 1 << 23;
        match self.phase {
            RangePhase::Free => self.is_backed,
            RangePhase::Volatile => self.pins == 0 && !(self.is_awaited && is_within_grace),
            RangePhase::Held | RangePhase::Purging => false,
        }
    }

    /// Applies `change` to the model unless a purge has claimed the range. A change that succeeds also clears
    /// `is_awaited`.
    fn update<T>(&mut self, change: impl FnOnce(&mut Self) -> Result<T, Refused>) -> Result<T, Refused> {
        if self.phase == RangePhase::Purging {
            return Err(Refused::Purging);
        }
        let result = change(self)?;
        self.is_awaited = false;
        Ok(result)
    }

    fn change(&mut self, from: RangePhase, to: RangePhase) -> Result<(), Refused> {
        if self.phase != from {
            return Err(Refused::RangePhase(self.phase));
        }
        self.phase = to;
        Ok(())
    }

    fn release(&mut self, has_memory: bool) -> Result<(), Refused> {
        self.update(|model| match model.phase {
            RangePhase::Free => Err(Refused::RangePhase(RangePhase::Free)),
            _ => {
                (model.phase, model.is_lost, model.is_backed, model.pins) = (RangePhase::Free, false, has_memory, 0);
                model.generation = model.generation.wrapping_add(1);
                Ok(())
            }
        })
    }

    fn unmark(&mut self) -> Result<bool, Refused> {
        self.update(|model| {
            if model.phase == RangePhase::Volatile && model.is_lost && model.pins == u16::MAX {
                return Err(Refused::Pins);
            }
            model.change(RangePhase::Volatile, RangePhase::Held)?;
            let was_lost = std::mem::take(&mut model.is_lost);
            model.pins += u16::from(was_lost);
            Ok(was_lost)
        })
    }

    fn pin(&mut self) -> Result<(), Refused> {
        self.update(|model| match model.phase {
            RangePhase::Held | RangePhase::Volatile if model.pins == u16::MAX => Err(Refused::Pins),
            RangePhase::Held | RangePhase::Volatile => {
                model.pins += 1;
                Ok(())
            }
            other => Err(Refused::RangePhase(other)),
        })
    }

    fn finish(&mut self, has_lost: bool, epoch: u32) {
        self.epoch = epoch;
        if std::mem::take(&mut self.is_from_free) {
            (self.phase, self.is_backed, self.is_awaited) = (RangePhase::Free, false, false);
        } else {
            (self.phase, self.is_lost) = (RangePhase::Volatile, self.is_lost | has_lost);
        }
    }
}

/// The tested word, the model with the same state, and a random number generator.
struct WordAndModel {
    word: RangeWord,
    model: Model,
    /// A copy of the tested word that was read earlier.
    seen: SeenWord,
    seed: u64,
}

impl WordAndModel {
    fn random_below(&mut self, bound: u64) -> u64 {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.seed >> 33) % bound
    }

    fn random_epoch(&mut self) -> u32 {
        self.random_below(1 << 24) as u32
    }

    /// Returns a random epoch. In most cases it is close to the range's epoch, or to the epoch half a wrap later, from
    /// which on ages are 0.
    fn random_now(&mut self) -> u32 {
        match self.random_below(4) {
            0 => self.random_epoch(),
            1 => (self.model.epoch + (1 << 23) - 1 + self.random_below(3) as u32) % (1 << 24),
            _ => (self.model.epoch + (1 << 24) - 2 + self.random_below(6) as u32) % (1 << 24),
        }
    }

    fn check(&mut self) {
        let (seen, model) = (self.word.load(), self.model.clone());
        assert_eq!((seen.phase(), seen.pins(), seen.epoch()), (model.phase, model.pins, model.epoch), "{model:?}");
        assert_eq!((seen.is_lost(), seen.has_owner()), (model.is_lost, model.has_owner()), "{model:?}");
        assert_eq!((self.word.is_awaited(), (seen.0 >> 24) as u16), (model.is_awaited, model.generation), "{model:?}");
        let now = self.random_now();
        assert_eq!(seen.is_claimable(now), model.is_claimable(now), "{model:?} at {now}");
    }

    fn step(&mut self) {
        let (flag, epoch) = (self.random_below(2) == 1, self.random_epoch());
        match self.random_below(12) {
            0 => self.seen = self.word.load(),
            1 => assert_eq!(
                self.word.hold(),
                self.model.update(|model| {
                    model.change(RangePhase::Free, RangePhase::Held)?;
                    model.is_backed = false;
                    Ok(())
                })
            ),
            2 => assert_eq!(self.word.release(flag), self.model.release(flag)),
            3 => assert_eq!(
                self.word.mark(epoch),
                self.model.update(|model| {
                    model.change(RangePhase::Held, RangePhase::Volatile)?;
                    (model.is_lost, model.epoch) = (false, epoch);
                    Ok(())
                })
            ),
            4 => assert_eq!(self.word.unmark(), self.model.unmark()),
            5 => assert_eq!(
                self.word.refresh(epoch),
                self.model.update(|model| {
                    model.change(RangePhase::Volatile, RangePhase::Volatile)?;
                    model.epoch = epoch;
                    Ok(())
                })
            ),
            6 => {
                let before = self.word.load();
                assert_eq!(self.word.pin(), self.model.pin().map(|()| before));
            }
            7 | 8 if self.model.pins > 0 && self.model.phase != RangePhase::Free => {
                self.word.unpin();
                self.model.pins -= 1;
            }
            9 => {
                let is_purging = self.model.phase == RangePhase::Purging;
                assert_eq!(self.word.request_stop(), is_purging);
                self.model.is_awaited |= is_purging;
            }
            10 if self.model.phase == RangePhase::Purging => {
                self.word.finish(flag, epoch);
                self.model.finish(flag, epoch);
            }
            11 => {
                let (now, seen) = (self.random_now(), if flag { self.seen } else { self.word.load() });
                let is_claimed = seen == self.word.load() && self.model.is_claimable(now);
                assert_eq!(self.word.claim(seen, now), is_claimed);
                if is_claimed {
                    self.model.is_from_free = self.model.phase == RangePhase::Free;
                    (self.model.phase, self.model.is_awaited) = (RangePhase::Purging, false);
                }
            }
            _ => {}
        }
    }
}

/// Applies 100,000 random operations to a word whose generation is about to wrap, and to a word with nearly all pins.
/// After each operation the fields of the word must equal those of the model.
#[test]
fn random_operations_match_model() {
    for pins in [0, u16::MAX - 2] {
        let (phase, generation) = (if pins == 0 { RangePhase::Free } else { RangePhase::Held }, u16::MAX - 20);
        let word = RangeWord(AtomicU64::new(phase as u64 | u64::from(pins) << 8 | u64::from(generation) << 24));
        let model = Model {
            phase,
            is_lost: false,
            is_awaited: false,
            is_from_free: false,
            is_backed: false,
            pins,
            generation,
            epoch: 0,
        };
        let mut pair = WordAndModel { seen: word.load(), word, model, seed: 7 };
        for _ in 0..50_000 {
            pair.step();
            pair.check();
        }
        assert!(pair.model.generation < u16::MAX / 2, "it has wrapped");
    }
}

/// Unmarking a range with lost bytes and the maximum number of pins must be refused, because it would add a pin.
#[test]
fn lost_range_with_all_pins_is_not_unmarked() {
    let of = |bits: u64| RangeWord(AtomicU64::new(bits | u64::from(u16::MAX) << 8));
    assert_eq!(of(RangePhase::Volatile as u64 | LOST_BIT).unmark(), Err(Refused::Pins));
    assert_eq!(of(RangePhase::Volatile as u64).unmark(), Ok(false));
    assert_eq!(of(RangePhase::Volatile as u64).pin(), Err(Refused::Pins));
    assert_eq!(of(RangePhase::Held as u64).pin(), Err(Refused::Pins));
}

/// An epoch must have 24 bits, and ages must be correct across its wrap.
#[test]
fn epochs_have_24_bits() {
    assert_eq!((epoch_of(u64::MAX), epoch_of(1 << 46), epoch_of((1 << 22) - 1)), ((1 << 24) - 1, 0, 0));
    for epoch in [0, 5, (1 << 24) - 1] {
        for ticks in [0, 1, (1 << 23) - 1, 1 << 23, (1 << 24) - 1] {
            let now = (epoch + ticks) % (1 << 24);
            assert_eq!(ticks_since(now, epoch), ticks);
            assert_eq!(age(now, epoch), if ticks < 1 << 23 { ticks } else { 0 });
        }
    }
}
