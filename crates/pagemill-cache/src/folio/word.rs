//! The state word of a page: how the bytes of the folio that begins there may be accessed.
//!
//! ```text
//!            take              publish                 hold
//!   Free ------------> Busy -------------> Live <=================> Busy   bytes change: readers wait
//!     ^                  |                 | ^ \                thaw
//!     |       free       |          freeze | | thaw
//!     |<-----------------'                 v |   `---> Gone  left its file while pinned
//!     |<---------------------------------- Still       |
//!     |                free                            | last unpin
//!     `------------------------------------------------'
//! ```
//!
//! A *pin* keeps a live folio in place: *Busy* and *Still* require 0 pins, so a pinned folio is never split, moved or
//! freed. *Still* bytes do not change; readers may copy them. All pages of a folio except the first are *Tail*.
//!
//! A reader without a pin checks the word before and after its copy. The *version* is incremented whenever the bytes
//! may have gone to another owner or were changed under exclusive access (recycling, split, merge, exclusive use). A
//! version repeats after 2^32 of these; a reader would have to sleep through exactly that many to miss it. Checked
//! under loom.

use pagemill_core::sync::{Acquire, AtomicU64, Relaxed, Release, fence};
use std::sync::atomic::Ordering::AcqRel;

/// How the bytes may be accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// No owner.
    Free = 0,
    /// Belongs to a file: read, written in place, pinned.
    Live = 1,
    /// Not the first page of its folio.
    Tail = 2,
    /// One thread has exclusive access.
    Busy = 3,
    /// No thread changes the bytes or pins the folio.
    Still = 4,
    /// Removed from its file while pinned; the last unpin frees it.
    Gone = 5,
}

const KINDS: [Kind; 6] = [Kind::Free, Kind::Live, Kind::Tail, Kind::Busy, Kind::Still, Kind::Gone];

const KIND_MASK: u64 = 7;
const ORDER_SHIFT: u32 = 3;
const ORDER_MASK: u64 = 0xF;
/// Never split: one folio from birth to death.
const WHOLE: u64 = 1 << 7;
const DIRTY: u64 = 1 << 8;
/// Number of uses since the last scan, up to [`MOST_USES`].
const USED_SHIFT: u32 = 9;
const USED_MASK: u64 = 3;
const MOST_USES: u64 = 2;
/// For live folios, in place of [`ZERO`]: fetched and not used yet by the thread it was fetched for. The use bits then
/// hold [`AHEAD`].
const FETCHED: u64 = ZERO;
const AHEAD: u64 = 1 << USED_SHIFT;
/// Free pages: all bytes read zero.
const ZERO: u64 = 1 << 11;
const PIN_SHIFT: u32 = 12;
const PIN: u64 = 1 << PIN_SHIFT;
const PIN_MASK: u64 = 0xF_FFFF;
const VERSION_SHIFT: u32 = 32;

/// For a busy or still folio, in place of the pin count: it was removed from its file, and the thread that holds it
/// frees it.
const LEFT: u32 = 1;

/// Maximum number of pins of a folio.
pub(crate) const MAX_PINS: u32 = PIN_MASK as u32;

/// Why a folio was fetched without a call that waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fetched {
    /// Explicitly requested.
    Asked,
    /// Read ahead.
    Ahead,
}

/// A copy of the word.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct State(u64);

impl State {
    const fn new(kind: Kind, order: u8, version: u32) -> Self {
        Self(kind as u64 | (order as u64) << ORDER_SHIFT | (version as u64) << VERSION_SHIFT)
    }

    #[inline]
    pub fn kind(self) -> Kind {
        // The last two of eight values are never written.
        KINDS[(self.0 & KIND_MASK).min(KINDS.len() as u64 - 1) as usize]
    }

    /// Log2 of the folio's pages.
    #[inline]
    pub fn order(self) -> u8 {
        (self.0 >> ORDER_SHIFT & ORDER_MASK) as u8
    }

    #[inline]
    pub fn version(self) -> u32 {
        (self.0 >> VERSION_SHIFT) as u32
    }

    pub fn pins(self) -> u32 {
        (self.0 >> PIN_SHIFT & PIN_MASK) as u32
    }

    pub fn is_whole(self) -> bool {
        self.0 & WHOLE != 0
    }

    pub fn is_dirty(self) -> bool {
        self.0 & DIRTY != 0
    }

    pub fn is_zero(self) -> bool {
        self.0 & ZERO != 0
    }

    /// Whether it was fetched and not used yet. For live folios, and folios that were live.
    pub fn is_fetched(self) -> bool {
        self.0 & FETCHED != 0
    }

    /// Whether it was read ahead and not used yet.
    pub fn is_ahead(self) -> bool {
        self.0 & (FETCHED | USED_MASK << USED_SHIFT) == FETCHED | AHEAD
    }

    fn has_uses(self) -> bool {
        !self.is_fetched() && self.0 & (USED_MASK << USED_SHIFT) > 0
    }

    /// Whether its bytes may be copied now. The copy is valid if [`Word::is_unchanged`] afterwards.
    #[inline]
    pub fn is_readable(self) -> bool {
        self.is_live() || self.0 & KIND_MASK == Kind::Still as u64
    }

    #[inline]
    fn is_live(self) -> bool {
        self.0 & KIND_MASK == Kind::Live as u64
    }

    fn with_kind(self, kind: Kind) -> Self {
        Self(self.0 & !KIND_MASK | kind as u64)
    }

    fn next_version(self) -> u32 {
        self.version().wrapping_add(1)
    }
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (kind, order, pins, version) = (self.kind(), self.order(), self.pins(), self.version());
        write!(f, "{kind:?} order {order} pins {pins} version {version}")
    }
}

/// The result of removing a folio from its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the caller may have to free it"]
pub(crate) struct Left {
    /// The caller must free it: it was not pinned, held or kept still, and is busy from here on. Otherwise the current
    /// holder frees it.
    pub must_be_freed: bool,
    pub was_dirty: bool,
}

/// The state word. Zero bits: free, of order 0.
#[repr(transparent)]
pub(crate) struct Word(AtomicU64);

impl Word {
    #[cfg(test)]
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    #[inline]
    pub fn load(&self) -> State {
        State(self.0.load(Acquire))
    }

    /// Whether bytes copied since the word was `seen` are valid: the folio was neither accessed exclusively nor freed.
    #[inline]
    pub fn is_unchanged(&self, seen: State) -> bool {
        // Orders the copy before this load.
        fence(Acquire);
        let now = State(self.0.load(Relaxed));
        now.version() == seen.version() && now.is_readable()
    }

    fn swap_from(&self, seen: State, next: State) -> bool {
        self.0.compare_exchange(seen.0, next.0, AcqRel, Relaxed).is_ok()
    }

    /// Pins a live folio; returns its state.
    ///
    /// # Errors
    ///
    /// The conflicting state: not live, or pinned [`MAX_PINS`] times.
    #[inline]
    pub fn pin(&self) -> Result<State, State> {
        let mut seen = self.load();
        loop {
            if !seen.is_live() || seen.pins() == MAX_PINS {
                return Err(seen);
            }
            match self.0.compare_exchange_weak(seen.0, seen.0 + PIN, Acquire, Relaxed) {
                Ok(_) => return Ok(State(seen.0 + PIN)),
                Err(now) => seen = State(now),
            }
        }
    }

    /// Ends a pin. Returns whether the caller must free the folio: it is gone, and this was the last pin.
    #[inline]
    #[must_use]
    pub fn unpin(&self) -> bool {
        let before = State(self.0.fetch_sub(PIN, Release));
        debug_assert!(before.pins() > 0, "{before:?}");
        debug_assert!(matches!(before.kind(), Kind::Live | Kind::Gone), "{before:?}");
        let is_last = before.0 & (KIND_MASK | PIN_MASK << PIN_SHIFT) == Kind::Gone as u64 | PIN;
        if is_last {
            // Orders other threads' accesses to the bytes before their next use.
            fence(Acquire);
        }
        is_last
    }

    /// Marks the folio dirty; the caller has it pinned. Returns whether it was clean before.
    pub fn set_dirty(&self) -> bool {
        // Release: a thread that sees the bit also sees what the first writer did to register the folio.
        self.0.fetch_or(DIRTY, Release) & DIRTY == 0
    }

    /// Clears the dirty mark if the word is still `seen`; returns whether it was.
    pub fn forget_dirty(&self, seen: State) -> bool {
        self.swap_from(seen, State(seen.0 & !DIRTY))
    }

    /// Counts a use, up to two; a use concurrent with another thread's change is lost. Mostly this is only a load, so
    /// contended lines are not written. The first use of a fetched folio, by the thread it was fetched for, is not
    /// counted. Returns whether this was the first use of a folio that was read ahead: true once for each.
    #[inline]
    pub fn note_use(&self) -> bool {
        let seen = State(self.0.load(Relaxed));
        if seen.0 & (USED_MASK << USED_SHIFT | FETCHED | KIND_MASK) == MOST_USES << USED_SHIFT | Kind::Live as u64 {
            return false;
        }
        if !seen.is_live() {
            return false;
        }
        if seen.0 & FETCHED != 0 {
            return self.forget_fetched(seen);
        }
        let _ = self.0.compare_exchange(seen.0, seen.0 + (1 << USED_SHIFT), Relaxed, Relaxed);
        false
    }

    #[cold]
    fn forget_fetched(&self, seen: State) -> bool {
        let next = seen.0 & !(FETCHED | USED_MASK << USED_SHIFT);
        self.0.compare_exchange(seen.0, next, Relaxed, Relaxed).is_ok() && seen.is_ahead()
    }

    /// Marks a folio that was just made live as fetched and not used yet.
    pub fn set_fetched(&self, fetched: Fetched) {
        self.0.fetch_or(FETCHED | if fetched == Fetched::Ahead { AHEAD } else { 0 }, Relaxed);
    }

    /// Subtracts one counted use; returns whether there was one.
    pub fn forget_use(&self) -> bool {
        let seen = State(self.0.load(Relaxed));
        if seen.has_uses() {
            let _ = self.0.compare_exchange(seen.0, seen.0 - (1 << USED_SHIFT), Relaxed, Relaxed);
        }
        seen.has_uses()
    }

    /// Clears the counted uses; returns whether there was one.
    pub fn forget_uses(&self) -> bool {
        let is_used = State(self.0.load(Relaxed)).has_uses();
        if is_used {
            // Another folio fetched to this place meanwhile may lose its AHEAD mark; its first use is then not
            // reported.
            self.0.fetch_and(!(USED_MASK << USED_SHIFT), Relaxed);
        }
        is_used
    }

    fn claim(&self, kind: Kind) -> Result<State, State> {
        let seen = self.load();
        if seen.kind() != Kind::Live || seen.pins() > 0 {
            return Err(seen);
        }
        let next = seen.with_kind(kind);
        if !self.swap_from(seen, next) {
            return Err(self.load());
        }
        // No byte changes before other threads can see that it may.
        fence(Release);
        Ok(next)
    }

    /// Takes exclusive access to a live, unpinned folio. Readers wait.
    ///
    /// # Errors
    ///
    /// The conflicting state.
    pub fn hold(&self) -> Result<State, State> {
        self.claim(Kind::Busy)
    }

    /// Freezes a live, unpinned folio: it cannot be written, pinned or freed. Readers continue.
    ///
    /// # Errors
    ///
    /// The conflicting state.
    pub fn freeze(&self) -> Result<State, State> {
        self.claim(Kind::Still)
    }

    /// Makes a folio of `order` live that was allocated, held or made from another. The caller must have exclusive
    /// access.
    pub fn publish(&self, order: u8, is_whole: bool, is_dirty: bool) {
        let version = State(self.0.load(Relaxed)).next_version();
        let (whole, dirty) = (if is_whole { WHOLE } else { 0 }, if is_dirty { DIRTY } else { 0 });
        self.0.store(State::new(Kind::Live, order, version).0 | whole | dirty, Release);
    }

    /// Makes a held or frozen folio live again, with the state that `next` returns. Returns whether it is live;
    /// otherwise it was removed from its file, and the caller must free it.
    fn revive(&self, next: impl Fn(State) -> State) -> bool {
        loop {
            let seen = self.load();
            debug_assert!(matches!(seen.kind(), Kind::Busy | Kind::Still), "{seen:?}");
            if seen.pins() == LEFT {
                return false;
            }
            if self.swap_from(seen, next(seen)) {
                return true;
            }
        }
    }

    /// Ends [`Word::hold`]. Returns whether the folio is live again; otherwise it was removed from its file, and the
    /// caller must free it.
    #[must_use]
    pub fn end_hold(&self, is_dirty: bool) -> bool {
        let dirty = if is_dirty { DIRTY } else { 0 };
        self.revive(|seen| State(seen.with_kind(Kind::Live).0.wrapping_add(1 << VERSION_SHIFT) | dirty))
    }

    /// Ends [`Word::freeze`] without a change; returns as [`Word::end_hold`].
    #[must_use]
    pub fn thaw(&self) -> bool {
        self.revive(|seen| seen.with_kind(Kind::Live))
    }

    /// As [`Word::thaw`], for a folio that was written back.
    #[must_use]
    pub fn thaw_clean(&self) -> bool {
        self.revive(|seen| State(seen.with_kind(Kind::Live).0 & !DIRTY))
    }

    /// As [`Word::thaw`], for a part of a split folio, which is a separate page from here on.
    #[must_use]
    pub fn thaw_as_page(&self, is_dirty: bool) -> bool {
        let dirty = if is_dirty { DIRTY } else { 0 };
        self.revive(|seen| State(State::new(Kind::Live, 0, seen.next_version()).0 | dirty))
    }

    /// Changes a free page, or a page of another folio, to `kind`. The caller must have exclusive access.
    pub fn assign(&self, kind: Kind, order: u8) {
        let version = State(self.0.load(Relaxed)).next_version();
        self.0.store(State::new(kind, order, version).0, Release);
        fence(Release);
    }

    /// As [`Word::assign`] to *Still*: a page of a folio that is being split, as clean or dirty as that folio.
    pub fn assign_still(&self, is_dirty: bool) {
        let version = State(self.0.load(Relaxed)).next_version();
        let dirty = if is_dirty { DIRTY } else { 0 };
        self.0.store(State::new(Kind::Still, 0, version).0 | dirty, Release);
    }

    /// As [`Word::assign`] to *Free*; `is_zero`: its bytes read zero.
    pub fn release(&self, order: u8, is_zero: bool) {
        let version = State(self.0.load(Relaxed)).next_version();
        self.0.store(State::new(Kind::Free, order, version).0 | if is_zero { ZERO } else { 0 }, Release);
    }

    /// Removes a folio from its file; it is no longer reachable there. It becomes clean, because its bytes are not
    /// needed any more.
    pub fn leave(&self) -> Left {
        loop {
            let seen = self.load();
            let (kind, left) = match seen.kind() {
                Kind::Live if seen.pins() == 0 => (Kind::Busy, 0),
                Kind::Live => (Kind::Gone, 0),
                kind => (kind, u64::from(LEFT) << PIN_SHIFT),
            };
            debug_assert!(left == 0 || (matches!(kind, Kind::Busy | Kind::Still) && seen.pins() == 0), "{seen:?}");
            let next = State((seen.with_kind(kind).0 & !DIRTY | left).wrapping_add(1 << VERSION_SHIFT));
            if self.swap_from(seen, next) {
                return Left { must_be_freed: kind == Kind::Busy && left == 0, was_dirty: seen.is_dirty() };
            }
        }
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod model;

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_folio_lives_and_is_recycled() {
        let word = Word::new();
        assert_eq!(word.load().kind(), Kind::Free);
        word.assign(Kind::Busy, 3);
        assert!(word.pin().is_err() && word.hold().is_err() && !word.load().is_readable());
        word.publish(3, false, true);
        let seen = word.load();
        assert_eq!((seen.kind(), seen.order(), seen.is_dirty(), seen.is_whole()), (Kind::Live, 3, true, false));
        assert_eq!(word.pin().unwrap().pins(), 1);
        assert!(word.is_unchanged(seen), "a pin changes no byte");
        assert!(word.hold().is_err() && word.freeze().is_err());
        assert_eq!(word.leave(), Left { must_be_freed: false, was_dirty: true });
        assert!(!word.is_unchanged(seen) && word.pin().is_err());
        assert!(word.unpin(), "the last one frees");
        word.release(0, false);
        assert_eq!(word.load().kind(), Kind::Free);
    }

    /// Still bytes may be read, busy ones not. A copy from before exclusive access is invalid after it.
    #[test]
    fn versions_tell_what_a_copy_is_worth() {
        let word = Word::new();
        word.publish(0, false, false);
        let seen = word.load();
        word.freeze().unwrap();
        assert!(word.is_unchanged(seen) && word.load().is_readable() && word.pin().is_err());
        assert!(word.thaw() && word.is_unchanged(seen));
        word.hold().unwrap();
        assert!(!word.is_unchanged(seen));
        assert!(word.end_hold(true));
        assert!(!word.is_unchanged(seen) && word.load().is_dirty());
        word.hold().unwrap();
        assert!(!word.leave().must_be_freed, "its holder has it still");
        assert!(!word.end_hold(true));
        word.publish(0, false, false);
        word.freeze().unwrap();
        assert!(!word.leave().must_be_freed && !word.thaw(), "the same while it is kept still");
    }

    /// A dirty mark is cleared only by a thread that saw the latest change of the same folio.
    #[test]
    fn a_change_is_forgotten_by_the_thread_that_saw_the_last() {
        let word = Word::new();
        word.publish(3, false, true);
        let seen = word.load();
        word.pin().unwrap();
        assert!(!word.forget_dirty(seen) && word.load().is_dirty(), "a thread may be writing");
        assert!(!word.unpin() && word.forget_dirty(seen) && !word.load().is_dirty());
        word.hold().unwrap();
        assert!(word.end_hold(true));
        assert!(!word.forget_dirty(seen) && word.load().is_dirty(), "another version");
    }

    #[test]
    fn uses_and_pins_are_bounded() {
        let word = Word::new();
        word.publish(0, true, false);
        assert!(!(0..10).any(|_| word.note_use()));
        let uses = std::iter::from_fn(|| word.forget_use().then_some(())).count();
        assert_eq!(uses as u64, MOST_USES);
        assert!(!(0..10).any(|_| word.note_use()));
        assert!(word.forget_uses() && !word.forget_uses() && !word.forget_use());
        word.set_fetched(Fetched::Asked);
        assert!(word.load().is_fetched() && !word.load().is_ahead() && !word.note_use());
        assert!(!word.forget_use(), "that is what it was fetched for");
        assert!(!word.note_use() && word.forget_use());
        word.set_fetched(Fetched::Ahead);
        assert!(!word.forget_use() && !word.forget_uses() && word.load().is_ahead(), "no thread has used it");
        assert!(word.note_use() && !word.note_use() && !word.load().is_fetched(), "the first use, once");
        assert!(word.forget_use() && !word.forget_use());
        let seen = word.load();
        assert_eq!((seen.version(), seen.pins(), seen.order()), (1, 0, 0));
        for _ in 0..MAX_PINS {
            word.pin().unwrap();
        }
        assert_eq!(word.pin().unwrap_err().pins(), MAX_PINS);
        for _ in 0..MAX_PINS {
            assert!(!word.unpin());
        }
        assert!(word.load().is_whole());
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    struct Page {
        word: Word,
        byte: AtomicU64,
    }

    fn page() -> Arc<Page> {
        let page = Page { word: Word::new(), byte: AtomicU64::new(1) };
        page.word.publish(0, false, false);
        Arc::new(page)
    }

    /// A valid copy has the folio's own bytes, never those of the next owner.
    #[test]
    fn a_reader_never_takes_the_next_owners_bytes() {
        loom::model(|| {
            let page = page();
            let other = page.clone();
            let freeing = thread::spawn(move || {
                if other.word.leave().must_be_freed {
                    other.word.release(0, false);
                    other.word.assign(Kind::Busy, 0);
                    other.byte.store(2, Relaxed);
                    other.word.publish(0, false, false);
                }
            });
            let seen = page.word.load();
            if seen.is_readable() {
                let byte = page.byte.load(Relaxed);
                if page.word.is_unchanged(seen) {
                    assert!(byte == 1 || seen.version() > 1, "{seen:?}");
                    assert!(byte == if seen.version() == 1 { 1 } else { 2 });
                }
            }
            freeing.join().unwrap();
        });
    }

    /// A pinned folio keeps its bytes, and exactly one thread frees it.
    #[test]
    fn the_last_pin_frees() {
        loom::model(|| {
            let page = page();
            let other = page.clone();
            let freeing = thread::spawn(move || u32::from(other.word.leave().must_be_freed));
            let mut freed = 0;
            if page.word.pin().is_ok() {
                assert_eq!(page.byte.load(Relaxed), 1);
                freed += u32::from(page.word.unpin());
            }
            assert_eq!(freed + freeing.join().unwrap(), 1);
        });
    }

    /// Holding and pinning exclude each other, and the holder's writes are seen.
    #[test]
    fn holding_excludes_pins() {
        loom::model(|| {
            let page = page();
            let other = page.clone();
            let holder = thread::spawn(move || {
                if other.word.hold().is_ok() {
                    other.byte.store(2, Relaxed);
                    other.byte.store(3, Relaxed);
                    assert!(other.word.end_hold(true));
                }
            });
            if let Ok(state) = page.word.pin() {
                let byte = page.byte.load(Relaxed);
                assert_eq!(byte, if state.version() == 1 { 1 } else { 3 });
                assert_eq!(page.byte.load(Relaxed), byte);
                assert!(!page.word.unpin());
            }
            holder.join().unwrap();
        });
    }

    /// One thread freezes a folio, another removes it from the file: exactly one frees it.
    #[test]
    fn a_still_folio_that_leaves_is_freed_once() {
        loom::model(|| {
            let page = page();
            let other = page.clone();
            let freeing = thread::spawn(move || u32::from(other.word.leave().must_be_freed));
            let mut freed = 0;
            if page.word.freeze().is_ok() {
                freed += u32::from(!page.word.thaw());
            }
            assert_eq!(freed + freeing.join().unwrap(), 1);
        });
    }

    /// Copies of a still folio are valid; copies of a busy one never are.
    #[test]
    fn readers_go_on_while_it_is_still() {
        loom::model(|| {
            let page = page();
            let other = page.clone();
            let splitter = thread::spawn(move || {
                if other.word.freeze().is_ok() {
                    assert!(other.word.thaw_as_page(false));
                }
                if other.word.hold().is_ok() {
                    other.byte.store(2, Relaxed);
                    other.byte.store(3, Relaxed);
                    assert!(other.word.end_hold(false));
                }
            });
            let seen = page.word.load();
            if seen.is_readable() {
                let byte = page.byte.load(Relaxed);
                if page.word.is_unchanged(seen) {
                    assert_eq!(byte, if seen.version() < 3 { 1 } else { 3 });
                }
            }
            splitter.join().unwrap();
        });
    }
}
