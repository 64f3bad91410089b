//! Model test of the state word: random operations against plain fields.

use super::*;

/// The fields of the word, each on its own.
#[derive(Clone, Debug)]
struct Model {
    kind: Kind,
    order: u8,
    version: u32,
    pins: u32,
    uses: u64,
    fetched: Option<Fetched>,
    is_whole: bool,
    is_dirty: bool,
    is_zero: bool,
    /// Removed from its file while held or kept still.
    is_left: bool,
}

impl Model {
    fn free(version: u32) -> Self {
        Self {
            kind: Kind::Free,
            order: 0,
            version,
            pins: 0,
            uses: 0,
            fetched: None,
            is_whole: false,
            is_dirty: false,
            is_zero: false,
            is_left: false,
        }
    }

    /// Another folio, or part of one, in the same place.
    fn renew(&mut self, kind: Kind, order: u8) {
        *self = Self { kind, order, ..Self::free(self.version.wrapping_add(1)) };
    }

    fn has_uses(&self) -> bool {
        self.fetched.is_none() && self.uses > 0
    }

    /// Returns whether it is live again.
    fn revive(&mut self, change: impl FnOnce(&mut Self)) -> bool {
        if !self.is_left {
            self.kind = Kind::Live;
            change(self);
        }
        !self.is_left
    }

    fn leave(&mut self) -> Left {
        let was_dirty = std::mem::take(&mut self.is_dirty);
        let must_be_freed = self.kind == Kind::Live && self.pins == 0;
        match self.kind {
            Kind::Live => self.kind = if must_be_freed { Kind::Busy } else { Kind::Gone },
            _ => self.is_left = true,
        }
        self.version = self.version.wrapping_add(1);
        Left { must_be_freed, was_dirty }
    }
}

struct Pair {
    word: Word,
    model: Model,
    /// A copy of the word, and the version then.
    seen: State,
    seed: u64,
}

impl Pair {
    fn below(&mut self, bound: u64) -> u64 {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.seed >> 33) % bound
    }

    fn check(&self) {
        let (seen, model) = (self.word.load(), &self.model);
        let pins = if model.is_left { LEFT } else { model.pins };
        let expected = (model.kind, model.order, model.version, pins);
        assert_eq!((seen.kind(), seen.order(), seen.version(), seen.pins()), expected, "{model:?}");
        assert_eq!((seen.is_whole(), seen.is_dirty()), (model.is_whole, model.is_dirty), "{model:?}");
        let is_readable = matches!(model.kind, Kind::Live | Kind::Still);
        assert_eq!(seen.is_readable(), is_readable, "{model:?}");
        let is_unchanged = is_readable && self.seen.version() == model.version;
        assert_eq!(self.word.is_unchanged(self.seen), is_unchanged, "{model:?}");
        if model.kind == Kind::Free {
            assert_eq!(seen.is_zero(), model.is_zero, "{model:?}");
        } else {
            let is_ahead = model.fetched == Some(Fetched::Ahead);
            assert_eq!((seen.is_fetched(), seen.is_ahead()), (model.fetched.is_some(), is_ahead), "{model:?}");
        }
        let (kind, order, version) = (model.kind, model.order, model.version);
        assert_eq!(format!("{seen:?}"), format!("{kind:?} order {order} pins {pins} version {version}"));
    }

    /// Operations that are allowed in any state.
    fn step_anywhere(&mut self) {
        match self.below(4) {
            0 => self.seen = self.word.load(),
            1 => {
                let is_first = self.model.kind == Kind::Live && self.model.fetched == Some(Fetched::Ahead);
                if self.model.kind == Kind::Live {
                    self.model.uses =
                        if self.model.fetched.take().is_some() { 0 } else { (self.model.uses + 1).min(2) };
                }
                assert_eq!(self.word.note_use(), is_first);
            }
            2 => {
                let had = self.model.has_uses();
                self.model.uses -= u64::from(had);
                assert_eq!(self.word.forget_use(), had);
            }
            _ => {
                let had = self.model.has_uses();
                self.model.uses = if had { 0 } else { self.model.uses };
                assert_eq!(self.word.forget_uses(), had);
            }
        }
    }

    fn step_live(&mut self) {
        let is_free_to_take = self.model.pins == 0;
        match self.below(8) {
            0 | 1 if self.model.pins < 5 => {
                self.model.pins += 1;
                assert_eq!(self.word.pin().unwrap().pins(), self.model.pins);
            }
            2 | 3 if self.model.pins > 0 => {
                self.model.pins -= 1;
                assert!(!self.word.unpin());
            }
            4 if self.model.pins > 0 => {
                assert_eq!(self.word.set_dirty(), !self.model.is_dirty);
                self.model.is_dirty = true;
            }
            5 => {
                let is_same = self.word.load() == self.seen;
                assert_eq!(self.word.forget_dirty(self.seen), is_same);
                self.model.is_dirty &= !is_same;
            }
            6 => {
                assert_eq!(self.word.hold().is_ok(), is_free_to_take);
                self.model.kind = if is_free_to_take { Kind::Busy } else { Kind::Live };
            }
            7 => {
                assert_eq!(self.word.freeze().is_ok(), is_free_to_take);
                self.model.kind = if is_free_to_take { Kind::Still } else { Kind::Live };
            }
            _ => assert_eq!(self.word.leave(), self.model.leave()),
        }
    }

    /// The thread that has the folio busy or still: changes it, removes it from its file, or makes it live.
    fn step_held(&mut self) {
        let (kind, flag) = (self.model.kind, self.below(2) == 1);
        match self.below(5) {
            0 if !self.model.is_left && self.below(4) == 0 => assert_eq!(self.word.leave(), self.model.leave()),
            1 if kind == Kind::Busy => {
                let is_live = self.model.revive(|model| {
                    model.version = model.version.wrapping_add(1);
                    model.is_dirty |= flag;
                });
                assert_eq!(self.word.end_hold(flag), is_live);
            }
            2 if kind == Kind::Still => assert_eq!(self.word.thaw(), self.model.revive(|_| {})),
            3 if kind == Kind::Still => {
                assert_eq!(self.word.thaw_clean(), self.model.revive(|model| model.is_dirty = false));
            }
            4 if kind == Kind::Still => {
                let is_live = self.model.revive(|model| {
                    model.renew(Kind::Live, 0);
                    model.is_dirty = flag;
                });
                assert_eq!(self.word.thaw_as_page(flag), is_live);
            }
            _ if kind == Kind::Busy || self.model.is_left => self.step_owned(),
            _ => {}
        }
    }

    /// Makes the pages another folio, a part of one, or free ones.
    fn step_owned(&mut self) {
        let (order, flag, other) = (self.below(16) as u8, self.below(2) == 1, self.below(2) == 1);
        match self.below(5) {
            0 => {
                self.word.assign(Kind::Busy, order);
                self.model.renew(Kind::Busy, order);
            }
            1 => {
                self.word.assign(Kind::Tail, order);
                self.model.renew(Kind::Tail, order);
            }
            2 => {
                self.word.assign_still(flag);
                self.model.renew(Kind::Still, 0);
                self.model.is_dirty = flag;
            }
            3 => {
                self.word.release(order, flag);
                self.model.renew(Kind::Free, order);
                self.model.is_zero = flag;
            }
            _ => {
                self.word.publish(order, flag, other);
                self.model.renew(Kind::Live, order);
                (self.model.is_whole, self.model.is_dirty) = (flag, other);
                if let Some(fetched) = [None, Some(Fetched::Asked), Some(Fetched::Ahead)][self.below(3) as usize] {
                    self.word.set_fetched(fetched);
                    self.model.fetched = Some(fetched);
                }
            }
        }
    }

    fn step(&mut self) {
        if self.below(3) == 0 {
            return self.step_anywhere();
        }
        let kind = self.model.kind;
        match kind {
            Kind::Free | Kind::Tail => {
                assert!(self.word.pin().is_err() && self.word.hold().is_err() && self.word.freeze().is_err());
                self.step_owned();
            }
            Kind::Live if self.below(12) == 0 => assert_eq!(self.word.leave(), self.model.leave()),
            Kind::Live => self.step_live(),
            Kind::Busy | Kind::Still => {
                assert!(self.word.pin().is_err() && self.word.hold().is_err() && self.word.freeze().is_err());
                self.step_held();
            }
            Kind::Gone => {
                assert!(self.word.pin().is_err() && self.word.hold().is_err() && self.word.freeze().is_err());
                self.model.pins -= 1;
                assert_eq!(self.word.unpin(), self.model.pins == 0);
                if self.model.pins == 0 {
                    self.step_owned();
                }
            }
        }
    }
}

/// Every operation changes the fields that it names, and no other. 30,000 random operations from a word whose version is
/// about to wrap.
#[test]
fn operations_change_what_they_name() {
    let version = u32::MAX - 20;
    let word = Word(AtomicU64::new(u64::from(version) << 32));
    let mut pair = Pair { seen: word.load(), word, model: Model::free(version), seed: 5 };
    for _ in 0..30_000 {
        pair.step();
        pair.check();
    }
    assert!(pair.model.version < u32::MAX / 2, "it has wrapped");
}

/// Kind, order and version are read as written.
#[test]
fn every_kind_is_read_as_written() {
    for kind in KINDS {
        for order in 0..16 {
            let state = State::new(kind, order, 0xF123_4567);
            assert_eq!((state.kind(), state.order(), state.version(), state.pins()), (kind, order, 0xF123_4567, 0));
        }
    }
}
