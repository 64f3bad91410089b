//! Model test of the state word: random operations on a word and on a struct with the same fields.

use super::*;

/// The expected values of the fields of a state word.
#[derive(Clone, Debug)]
struct Model {
    kind: Kind,
    order: u8,
    version: u32,
    pins: u32,
    uses: u64,
    fetched: Option<Prefetch>,
    is_unsplittable: bool,
    is_dirty: bool,
    is_zero: bool,
    /// Whether the folio was removed from its file while it was held or frozen.
    is_removed: bool,
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
            is_unsplittable: false,
            is_dirty: false,
            is_zero: false,
            is_removed: false,
        }
    }

    /// Resets the fields for a new folio at the same page, and increments the version.
    fn renew(&mut self, kind: Kind, order: u8) {
        *self = Self { kind, order, ..Self::free(self.version.wrapping_add(1)) };
    }

    fn has_counted_uses(&self) -> bool {
        self.fetched.is_none() && self.uses > 0
    }

    /// Models `Word::make_live`: applies `change` and returns true, unless the folio was removed from its file.
    fn make_live(&mut self, change: impl FnOnce(&mut Self)) -> bool {
        if !self.is_removed {
            self.kind = Kind::Live;
            change(self);
        }
        !self.is_removed
    }

    fn remove_from_file(&mut self) -> Removal {
        let was_dirty = std::mem::take(&mut self.is_dirty);
        let must_be_freed = self.kind == Kind::Live && self.pins == 0;
        match self.kind {
            Kind::Live => self.kind = if must_be_freed { Kind::Busy } else { Kind::Gone },
            _ => self.is_removed = true,
        }
        self.version = self.version.wrapping_add(1);
        Removal { must_be_freed, was_dirty }
    }
}

struct WordAndModel {
    word: Word,
    model: Model,
    /// Copy of the tested word at an earlier step.
    seen: State,
    seed: u64,
}

impl WordAndModel {
    fn random_below(&mut self, bound: u64) -> u64 {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.seed >> 33) % bound
    }

    fn check(&self) {
        let (seen, model) = (self.word.load(), &self.model);
        let pins = if model.is_removed { REMOVED_PINS } else { model.pins };
        let expected = (model.kind, model.order, model.version, pins);
        assert_eq!((seen.kind(), seen.order(), seen.version(), seen.pins()), expected, "{model:?}");
        assert_eq!((seen.is_unsplittable(), seen.is_dirty()), (model.is_unsplittable, model.is_dirty), "{model:?}");
        let is_readable = matches!(model.kind, Kind::Live | Kind::Frozen);
        assert_eq!(seen.is_readable(), is_readable, "{model:?}");
        let is_unchanged = is_readable && self.seen.version() == model.version;
        assert_eq!(self.word.is_unchanged(self.seen), is_unchanged, "{model:?}");
        if model.kind == Kind::Free {
            assert_eq!(seen.is_zero(), model.is_zero, "{model:?}");
        } else {
            let is_readahead = model.fetched == Some(Prefetch::Readahead);
            assert_eq!(
                (seen.is_prefetched(), seen.is_readahead()),
                (model.fetched.is_some(), is_readahead),
                "{model:?}"
            );
        }
        let (kind, order, version) = (model.kind, model.order, model.version);
        assert_eq!(format!("{seen:?}"), format!("{kind:?} order {order} pins {pins} version {version}"));
    }

    /// Runs a random operation that is allowed in every state.
    fn step_anywhere(&mut self) {
        match self.random_below(4) {
            0 => self.seen = self.word.load(),
            1 => {
                let is_first = self.model.kind == Kind::Live && self.model.fetched == Some(Prefetch::Readahead);
                if self.model.kind == Kind::Live {
                    self.model.uses =
                        if self.model.fetched.take().is_some() { 0 } else { (self.model.uses + 1).min(2) };
                }
                assert_eq!(self.word.note_use(), is_first);
            }
            2 => {
                let had = self.model.has_counted_uses();
                self.model.uses -= u64::from(had);
                assert_eq!(self.word.forget_use(), had);
            }
            _ => {
                let had = self.model.has_counted_uses();
                self.model.uses = if had { 0 } else { self.model.uses };
                assert_eq!(self.word.forget_uses(), had);
            }
        }
    }

    fn step_live(&mut self) {
        let is_free_to_take = self.model.pins == 0;
        match self.random_below(8) {
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
                assert_eq!(self.word.clear_dirty_if_unchanged(self.seen), is_same);
                self.model.is_dirty &= !is_same;
            }
            6 => {
                assert_eq!(self.word.hold().is_ok(), is_free_to_take);
                self.model.kind = if is_free_to_take { Kind::Busy } else { Kind::Live };
            }
            7 => {
                assert_eq!(self.word.freeze().is_ok(), is_free_to_take);
                self.model.kind = if is_free_to_take { Kind::Frozen } else { Kind::Live };
            }
            _ => assert_eq!(self.word.remove_from_file(), self.model.remove_from_file()),
        }
    }

    /// Runs a random operation on a held or frozen folio: makes it live again, removes it from its file, or reuses its
    /// page.
    fn step_held(&mut self) {
        let (kind, flag) = (self.model.kind, self.random_below(2) == 1);
        match self.random_below(5) {
            0 if !self.model.is_removed && self.random_below(4) == 0 => {
                assert_eq!(self.word.remove_from_file(), self.model.remove_from_file())
            }
            1 if kind == Kind::Busy => {
                let is_live = self.model.make_live(|model| {
                    model.version = model.version.wrapping_add(1);
                    model.is_dirty |= flag;
                });
                assert_eq!(self.word.end_hold(flag), is_live);
            }
            2 if kind == Kind::Frozen => assert_eq!(self.word.thaw(), self.model.make_live(|_| {})),
            3 if kind == Kind::Frozen => {
                assert_eq!(self.word.thaw_clean(), self.model.make_live(|model| model.is_dirty = false));
            }
            4 if kind == Kind::Frozen => {
                let is_live = self.model.make_live(|model| {
                    model.renew(Kind::Live, 0);
                    model.is_dirty = flag;
                });
                assert_eq!(self.word.thaw_as_page(flag), is_live);
            }
            _ if kind == Kind::Busy || self.model.is_removed => self.step_owned(),
            _ => {}
        }
    }

    /// Runs a random operation of a thread that owns the page exclusively: turns it into another folio, a tail page or
    /// a free page.
    fn step_owned(&mut self) {
        let (order, flag, other) = (self.random_below(16) as u8, self.random_below(2) == 1, self.random_below(2) == 1);
        match self.random_below(5) {
            0 => {
                self.word.assign(Kind::Busy, order);
                self.model.renew(Kind::Busy, order);
            }
            1 => {
                self.word.assign(Kind::Tail, order);
                self.model.renew(Kind::Tail, order);
            }
            2 => {
                self.word.assign_frozen(flag);
                self.model.renew(Kind::Frozen, 0);
                self.model.is_dirty = flag;
            }
            3 => {
                self.word.set_free(order, flag);
                self.model.renew(Kind::Free, order);
                self.model.is_zero = flag;
            }
            _ => {
                self.word.publish(order, flag, other);
                self.model.renew(Kind::Live, order);
                (self.model.is_unsplittable, self.model.is_dirty) = (flag, other);
                if let Some(fetched) =
                    [None, Some(Prefetch::Requested), Some(Prefetch::Readahead)][self.random_below(3) as usize]
                {
                    self.word.set_prefetched(fetched);
                    self.model.fetched = Some(fetched);
                }
            }
        }
    }

    fn step(&mut self) {
        if self.random_below(3) == 0 {
            return self.step_anywhere();
        }
        let kind = self.model.kind;
        match kind {
            Kind::Free | Kind::Tail => {
                assert!(self.word.pin().is_err() && self.word.hold().is_err() && self.word.freeze().is_err());
                self.step_owned();
            }
            Kind::Live if self.random_below(12) == 0 => {
                assert_eq!(self.word.remove_from_file(), self.model.remove_from_file())
            }
            Kind::Live => self.step_live(),
            Kind::Busy | Kind::Frozen => {
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

/// Every operation on a state word must change exactly the fields that its documentation names. The test runs 30,000
/// random operations, starting with a version that is about to wrap around.
#[test]
fn operations_change_exactly_the_documented_fields() {
    let version = u32::MAX - 20;
    let word = Word(AtomicU64::new(u64::from(version) << 32));
    let mut pair = WordAndModel { seen: word.load(), word, model: Model::free(version), seed: 5 };
    for _ in 0..30_000 {
        pair.step();
        pair.check();
    }
    assert!(pair.model.version < u32::MAX / 2, "the version has wrapped around");
}

/// A [`State`] must report the kind, the order and the version from which it was created.
#[test]
fn a_state_reports_the_fields_it_was_created_from() {
    for kind in ALL_KINDS {
        for order in 0..16 {
            let state = State::new(kind, order, 0xF123_4567);
            assert_eq!((state.kind(), state.order(), state.version(), state.pins()), (kind, order, 0xF123_4567, 0));
        }
    }
}
