//! The state word of a page: how the bytes of the folio that begins there may be accessed.
//!
//! ```text
//!            take              publish                 hold
//!   Free ------------> Busy -------------> Live <=================> Busy   bytes change: readers wait
//!     ^                  |                 | ^ \                thaw
//!     |       free       |          freeze | | thaw
//!     |<-----------------'                 v |   `---> Gone  removed from its file while pinned
//!     |<---------------------------------- Frozen      |
//!     |                free                            | last unpin
//!     `------------------------------------------------'
//! ```
//!
//! A *pin* keeps a live folio in place: *Busy* and *Frozen* require 0 pins, so a pinned folio is never split, moved or
//! freed. The bytes of a *Frozen* folio do not change; readers may copy them. All pages of a folio except the first are
//! *Tail*.
//!
//! A reader without a pin checks the word before and after its copy. The *version* is incremented whenever another
//! folio may own the bytes or exclusive access may have changed them (recycling, split, merge, hold). A version repeats
//! after 2^32 increments. A reader misses a change only if exactly 2^32 increments happen during its copy. The tests
//! check this protocol under loom.

use pagemill_core::sync::{Acquire, AtomicU64, Relaxed, Release, fence};
use std::sync::atomic::Ordering::AcqRel;

/// The kind of a page, which decides how its bytes may be accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// The page is on a free list.
    Free = 0,
    /// The page begins a folio of a file. Threads may read, write in place, and pin it.
    Live = 1,
    /// The page is not the first of its folio.
    Tail = 2,
    /// One thread has exclusive access to the folio.
    Busy = 3,
    /// The folio cannot be written or pinned; readers may copy its bytes.
    Frozen = 4,
    /// The folio was removed from its file while pinned. The last unpin frees it.
    Gone = 5,
}

/// All kinds of pages, in the order of their numbers in a state word.
const ALL_KINDS: [Kind; 6] = [Kind::Free, Kind::Live, Kind::Tail, Kind::Busy, Kind::Frozen, Kind::Gone];

/// Mask of the field of a state word with the [`Kind`].
const KIND_MASK: u64 = 7;
/// Position of the field of a state word with the folio's order, which is log2 of its pages.
const ORDER_SHIFT: u32 = 3;
/// Mask of the order, after the state word was shifted by [`ORDER_SHIFT`].
const ORDER_MASK: u64 = 0xF;
/// Bit of a state word: the folio is never split.
const UNSPLITTABLE_BIT: u64 = 1 << 7;
/// Bit of a state word: the folio was changed since it was written to its store.
const DIRTY_BIT: u64 = 1 << 8;
/// Position of the field with the use count: uses that the eviction scan has not subtracted yet, at most [`MAX_USES`].
const USE_COUNT_SHIFT: u32 = 9;
/// Mask of the use count, after the state word was shifted by [`USE_COUNT_SHIFT`].
const USE_COUNT_MASK: u64 = 3;
/// Maximum of a folio's use count.
const MAX_USES: u64 = 2;
/// Bit of live folios, the same bit as [`ZERO_BIT`]: the folio was prefetched, and no thread has used it yet. While
/// this bit is set, the bits of the use count hold [`READAHEAD_VALUE`] or 0.
const PREFETCHED_BIT: u64 = ZERO_BIT;
/// Value in the field of the use count, for prefetched folios: readahead fetched the folio.
const READAHEAD_VALUE: u64 = 1 << USE_COUNT_SHIFT;
/// Bit of free pages: all bytes of the run are zero.
const ZERO_BIT: u64 = 1 << 11;
/// Position of the field of a state word with the pin count.
const PIN_SHIFT: u32 = 12;
/// The value that one pin adds to a state word.
const ONE_PIN: u64 = 1 << PIN_SHIFT;
/// Mask of the pin count, after the state word was shifted by [`PIN_SHIFT`].
const PIN_MASK: u64 = 0xF_FFFF;
/// Position of the field of a state word with the version.
const VERSION_SHIFT: u32 = 32;

/// Value of the pin count of a busy or frozen folio that was removed from its file. The thread that ends the hold or
/// freeze then frees the folio.
const REMOVED_PINS: u32 = 1;

/// Maximum number of pins of a folio. At this number the upper bit of the pin count is set.
pub(crate) const MAX_PINS: u32 = (PIN_MASK as u32).div_ceil(2);

/// Why a folio was fetched although no call waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Prefetch {
    /// The program requested the prefetch.
    Requested,
    /// Readahead fetched the folio.
    Readahead,
}

/// A copy of a state word, as it was when it was loaded.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct State(u64);

impl State {
    const fn new(kind: Kind, order: u8, version: u32) -> Self {
        debug_assert!(order as u64 <= ORDER_MASK, "an order fits into its field");
        Self(kind as u64 | (order as u64) << ORDER_SHIFT | (version as u64) << VERSION_SHIFT)
    }

    #[inline]
    pub fn kind(self) -> Kind {
        // The values 6 and 7 of the three bits are never written.
        ALL_KINDS[(self.0 & KIND_MASK).min(ALL_KINDS.len() as u64 - 1) as usize]
    }

    /// Returns log2 of the folio's number of pages.
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

    pub fn is_unsplittable(self) -> bool {
        self.0 & UNSPLITTABLE_BIT != 0
    }

    pub fn is_dirty(self) -> bool {
        self.0 & DIRTY_BIT != 0
    }

    pub fn is_zero(self) -> bool {
        self.0 & ZERO_BIT != 0
    }

    /// Returns whether the folio was prefetched and not used yet. Valid for folios that are or were live.
    pub fn is_prefetched(self) -> bool {
        self.0 & PREFETCHED_BIT != 0
    }

    /// Returns whether readahead fetched the folio and the folio was not used yet.
    pub fn is_readahead(self) -> bool {
        self.0 & (PREFETCHED_BIT | USE_COUNT_MASK << USE_COUNT_SHIFT) == PREFETCHED_BIT | READAHEAD_VALUE
    }

    /// Returns whether the use count is above 0. Returns false for a prefetched folio that was not used yet.
    fn has_counted_uses(self) -> bool {
        !self.is_prefetched() && self.0 & (USE_COUNT_MASK << USE_COUNT_SHIFT) > 0
    }

    /// Returns whether the folio's bytes may be copied now. The copy is valid if [`Word::is_unchanged`] holds
    /// afterwards.
    #[inline]
    pub fn is_readable(self) -> bool {
        self.is_live() || self.0 & KIND_MASK == Kind::Frozen as u64
    }

    #[inline]
    pub fn is_live(self) -> bool {
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

/// Result of removing a folio from its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the caller may have to free it"]
pub(crate) struct Removal {
    /// Whether the caller must free the folio, which is *Busy* from here on, because it was not pinned, held or frozen.
    /// If false, the thread that has pinned, held or frozen the folio frees it.
    pub must_be_freed: bool,
    pub was_dirty: bool,
}

fn bit_if(bit: u64, is_set: bool) -> u64 {
    if is_set { bit } else { 0 }
}

/// The state word of a page. Zero bits mean a free page of order 0.
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

    /// Returns whether bytes that were copied after `seen` was loaded are valid: the folio was neither held nor freed
    /// since that load.
    #[inline]
    pub fn is_unchanged(&self, seen: State) -> bool {
        // Orders the copy before this load.
        fence(Acquire);
        let now = State(self.0.load(Relaxed));
        now.version() == seen.version() && now.is_readable()
    }

    /// Replaces the word by `next` if it still equals `seen`. Returns whether it was replaced.
    fn replace_if(&self, seen: State, next: State) -> bool {
        self.0.compare_exchange(seen.0, next.0, AcqRel, Relaxed).is_ok()
    }

    /// Pins a live folio and returns its state.
    ///
    /// # Errors
    ///
    /// The current state, if the folio is not live, or has [`MAX_PINS`] pins.
    #[inline]
    pub fn pin(&self) -> Result<State, State> {
        let mut seen = self.load();
        loop {
            // One test of two fields: the folio is live, and has fewer than `MAX_PINS` pins.
            if seen.0 & (KIND_MASK | u64::from(MAX_PINS) << PIN_SHIFT) != Kind::Live as u64 {
                return Err(seen);
            }
            match self.0.compare_exchange_weak(seen.0, seen.0 + ONE_PIN, Acquire, Relaxed) {
                Ok(_) => return Ok(State(seen.0 + ONE_PIN)),
                Err(now) => seen = State(now),
            }
        }
    }

    /// Ends a pin. Returns whether the caller must free the folio, because this was the last pin of a folio that was
    /// removed from its file.
    #[inline]
    #[must_use]
    pub fn unpin(&self) -> bool {
        let before = State(self.0.fetch_sub(ONE_PIN, Release));
        debug_assert!(before.pins() > 0, "{before:?}");
        debug_assert!(matches!(before.kind(), Kind::Live | Kind::Gone), "{before:?}");
        let is_last = before.0 & (KIND_MASK | PIN_MASK << PIN_SHIFT) == Kind::Gone as u64 | ONE_PIN;
        if is_last {
            // Orders the accesses of other threads before the reuse of the bytes.
            fence(Acquire);
        }
        is_last
    }

    /// Ends a pin, unless the caller would then have to free the folio. Returns whether the pin was ended.
    #[must_use]
    pub fn unpin_unless_freed(&self) -> bool {
        loop {
            let seen = self.load();
            debug_assert!(seen.pins() > 0, "{seen:?}");
            if seen.kind() == Kind::Gone && seen.pins() == 1 {
                return false;
            }
            if self.0.compare_exchange_weak(seen.0, seen.0 - ONE_PIN, Release, Relaxed).is_ok() {
                return true;
            }
        }
    }

    /// Makes a folio dirty that the caller has pinned. Returns whether the folio was clean before.
    pub fn set_dirty(&self) -> bool {
        // Release: a thread that sees the dirty bit also sees how the first writer registered the folio.
        let before = State(self.0.fetch_or(DIRTY_BIT, Release));
        debug_assert!(!matches!(before.kind(), Kind::Free | Kind::Tail), "only a folio in use becomes dirty");
        !before.is_dirty()
    }

    /// Clears the folio's dirty bit if the word still equals `seen`. Returns whether the bit was cleared.
    pub fn clear_dirty_if_unchanged(&self, seen: State) -> bool {
        self.replace_if(seen, State(seen.0 & !DIRTY_BIT))
    }

    /// Adds one to the folio's use count, up to two. A use that races with another change of the word is not counted.
    /// At two uses the call only loads the word, so that hot cache lines are not written. Of a folio that readahead
    /// fetched, the first use is not counted, because it is the use that readahead expected. Returns whether this is
    /// such a first use.
    #[inline]
    pub fn note_use(&self) -> bool {
        let seen = State(self.0.load(Relaxed));
        if seen.0 & (USE_COUNT_MASK << USE_COUNT_SHIFT | PREFETCHED_BIT | KIND_MASK)
            == MAX_USES << USE_COUNT_SHIFT | Kind::Live as u64
        {
            return false;
        }
        if !seen.is_live() {
            return false;
        }
        if seen.0 & PREFETCHED_BIT != 0 {
            return self.clear_prefetched(seen);
        }
        let _ = self.0.compare_exchange(seen.0, seen.0 + (1 << USE_COUNT_SHIFT), Relaxed, Relaxed);
        false
    }

    /// Clears the folio's [`PREFETCHED_BIT`]. Returns true if this call has cleared it and the folio was fetched by
    /// readahead, not by a requested prefetch.
    #[cold]
    fn clear_prefetched(&self, seen: State) -> bool {
        let next = seen.0 & !(PREFETCHED_BIT | USE_COUNT_MASK << USE_COUNT_SHIFT);
        self.0.compare_exchange(seen.0, next, Relaxed, Relaxed).is_ok() && seen.is_readahead()
    }

    /// Marks a folio that was just made live as prefetched and not used yet.
    pub fn set_prefetched(&self, fetched: Prefetch) {
        self.0.fetch_or(PREFETCHED_BIT | bit_if(READAHEAD_VALUE, fetched == Prefetch::Readahead), Relaxed);
    }

    /// Subtracts one from the folio's use count. Returns whether the count was above 0.
    pub fn forget_use(&self) -> bool {
        let seen = State(self.0.load(Relaxed));
        if seen.has_counted_uses() {
            let _ = self.0.compare_exchange(seen.0, seen.0 - (1 << USE_COUNT_SHIFT), Relaxed, Relaxed);
        }
        seen.has_counted_uses()
    }

    /// Sets the folio's use count to 0. Returns whether the count was above 0.
    pub fn forget_uses(&self) -> bool {
        let is_used = State(self.0.load(Relaxed)).has_counted_uses();
        if is_used {
            // Another folio prefetched into this page meanwhile may lose its READAHEAD_VALUE bit. Its first use is then
            // not reported.
            self.0.fetch_and(!(USE_COUNT_MASK << USE_COUNT_SHIFT), Relaxed);
        }
        is_used
    }

    /// Changes the kind of a live, unpinned folio to `kind`. Fails as [`Word::hold`] describes.
    fn claim_unpinned(&self, kind: Kind) -> Result<State, State> {
        let seen = self.load();
        if seen.kind() != Kind::Live || seen.pins() > 0 {
            return Err(seen);
        }
        let next = seen.with_kind(kind);
        if !self.replace_if(seen, next) {
            return Err(self.load());
        }
        // Orders this change before later writes to the bytes.
        fence(Release);
        Ok(next)
    }

    /// Takes exclusive access to a live, unpinned folio. Readers wait until [`Word::end_hold`].
    ///
    /// # Errors
    ///
    /// The current state, if the folio is not live, is pinned, or changed meanwhile.
    pub fn hold(&self) -> Result<State, State> {
        self.claim_unpinned(Kind::Busy)
    }

    /// Freezes a live, unpinned folio: it cannot be written, pinned or freed until [`Word::thaw`]. Readers continue.
    ///
    /// # Errors
    ///
    /// See [`Word::hold`].
    pub fn freeze(&self) -> Result<State, State> {
        self.claim_unpinned(Kind::Frozen)
    }

    /// Sets the kind, the order and `bits` of a page to which the caller has exclusive access, and clears all other bits.
    /// Increments the version.
    fn renew(&self, kind: Kind, order: u8, bits: u64) {
        let version = State(self.0.load(Relaxed)).next_version();
        self.0.store(State::new(kind, order, version).0 | bits, Release);
    }

    /// Makes a new, held or collapsed folio of 2^`order` pages live. The caller must have exclusive access.
    pub fn publish(&self, order: u8, is_unsplittable: bool, is_dirty: bool) {
        self.renew(Kind::Live, order, bit_if(UNSPLITTABLE_BIT, is_unsplittable) | bit_if(DIRTY_BIT, is_dirty));
    }

    /// Makes a held or frozen folio live again, in the state that `next` returns. Returns false if the folio was
    /// removed from its file meanwhile; the caller must then free it.
    fn make_live(&self, next: impl Fn(State) -> State) -> bool {
        loop {
            let seen = self.load();
            debug_assert!(matches!(seen.kind(), Kind::Busy | Kind::Frozen), "{seen:?}");
            if seen.pins() == REMOVED_PINS {
                return false;
            }
            if self.replace_if(seen, next(seen)) {
                return true;
            }
        }
    }

    /// Ends [`Word::hold`]. Returns whether the folio is live again. If not, the folio was removed from its file, and
    /// the caller must free it.
    #[must_use]
    pub fn end_hold(&self, is_dirty: bool) -> bool {
        let dirty = bit_if(DIRTY_BIT, is_dirty);
        self.make_live(|seen| State(seen.with_kind(Kind::Live).0.wrapping_add(1 << VERSION_SHIFT) | dirty))
    }

    /// Ends [`Word::freeze`] without a change of the folio's bytes. Returns as [`Word::end_hold`] whether the folio is
    /// live again.
    #[must_use]
    pub fn thaw(&self) -> bool {
        self.make_live(|seen| seen.with_kind(Kind::Live))
    }

    /// As [`Word::thaw`], for a folio that was written back: clears the dirty bit.
    #[must_use]
    pub fn thaw_clean(&self) -> bool {
        self.make_live(|seen| State(seen.with_kind(Kind::Live).0 & !DIRTY_BIT))
    }

    /// As [`Word::thaw`], for one page of a folio that was split: the page is a folio of its own from here on.
    #[must_use]
    pub fn thaw_as_page(&self, is_dirty: bool) -> bool {
        let dirty = bit_if(DIRTY_BIT, is_dirty);
        self.make_live(|seen| State(State::new(Kind::Live, 0, seen.next_version()).0 | dirty))
    }

    /// Sets the kind and order of a page to which the caller has exclusive access. Increments the version.
    pub fn assign(&self, kind: Kind, order: u8) {
        debug_assert!(!matches!(kind, Kind::Live | Kind::Gone), "a folio becomes live by `publish` or `make_live`");
        self.renew(kind, order, 0);
        fence(Release);
    }

    /// Sets a page of a folio that is being split to *Frozen*. `is_dirty` says whether that folio is dirty.
    pub fn assign_frozen(&self, is_dirty: bool) {
        self.renew(Kind::Frozen, 0, bit_if(DIRTY_BIT, is_dirty));
    }

    /// Sets a page to *Free*, as first page of a free run of 2^`order` pages. `is_zero`: all bytes of the run are zero.
    pub fn set_free(&self, order: u8, is_zero: bool) {
        debug_assert!(self.load().kind() != Kind::Live, "a live folio is frozen or removed before it is freed");
        self.renew(Kind::Free, order, bit_if(ZERO_BIT, is_zero));
    }

    /// Removes a folio from its file. The caller holds the lock of the file's index. Clears the dirty bit, because the bytes need no
    /// writeback any more.
    pub fn remove_from_file(&self) -> Removal {
        loop {
            let seen = self.load();
            let (kind, left) = match seen.kind() {
                Kind::Live if seen.pins() == 0 => (Kind::Busy, 0),
                Kind::Live => (Kind::Gone, 0),
                kind => (kind, u64::from(REMOVED_PINS) << PIN_SHIFT),
            };
            debug_assert!(left == 0 || (matches!(kind, Kind::Busy | Kind::Frozen) && seen.pins() == 0), "{seen:?}");
            let next = State((seen.with_kind(kind).0 & !DIRTY_BIT | left).wrapping_add(1 << VERSION_SHIFT));
            if self.replace_if(seen, next) {
                return Removal { must_be_freed: kind == Kind::Busy && left == 0, was_dirty: seen.is_dirty() };
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
    fn a_folio_is_published_removed_and_freed() {
        let word = Word::new();
        assert_eq!(word.load().kind(), Kind::Free);
        word.assign(Kind::Busy, 3);
        assert!(word.pin().is_err() && word.hold().is_err() && !word.load().is_readable());
        word.publish(3, false, true);
        let seen = word.load();
        assert_eq!((seen.kind(), seen.order(), seen.is_dirty(), seen.is_unsplittable()), (Kind::Live, 3, true, false));
        assert_eq!(word.pin().unwrap().pins(), 1);
        assert!(word.is_unchanged(seen), "a pin changes no byte");
        assert!(word.hold().is_err() && word.freeze().is_err());
        assert_eq!(word.remove_from_file(), Removal { must_be_freed: false, was_dirty: true });
        assert!(!word.is_unchanged(seen) && word.pin().is_err());
        assert!(!word.unpin_unless_freed(), "the last unpin must free the folio");
        assert!(word.unpin(), "the last unpin must free the folio");
        word.set_free(0, false);
        assert_eq!(word.load().kind(), Kind::Free);
    }

    /// A copy of a folio's bytes must be valid if the folio was frozen during the copy, and invalid if the folio was
    /// held.
    #[test]
    fn versions_show_whether_a_copy_is_valid() {
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
        assert!(!word.remove_from_file().must_be_freed, "the holder frees the folio");
        assert!(!word.end_hold(true));
        word.publish(0, false, false);
        word.freeze().unwrap();
        assert!(!word.remove_from_file().must_be_freed && !word.thaw(), "the thread that froze the folio frees it");
    }

    /// [`Word::clear_dirty_if_unchanged`] must clear the dirty bit only if no pin, hold or other change of the word
    /// happened since the caller loaded it.
    #[test]
    fn dirty_is_cleared_only_if_the_word_is_unchanged() {
        let word = Word::new();
        word.publish(3, false, true);
        let seen = word.load();
        word.pin().unwrap();
        assert!(
            !word.clear_dirty_if_unchanged(seen) && word.load().is_dirty(),
            "a pinned folio may be written meanwhile"
        );
        assert!(!word.unpin() && word.clear_dirty_if_unchanged(seen) && !word.load().is_dirty());
        word.hold().unwrap();
        assert!(word.end_hold(true));
        assert!(!word.clear_dirty_if_unchanged(seen) && word.load().is_dirty(), "the version has changed");
    }

    #[test]
    fn use_and_pin_counts_have_a_maximum() {
        let word = Word::new();
        word.publish(0, true, false);
        assert!(!(0..10).any(|_| word.note_use()));
        let uses = std::iter::from_fn(|| word.forget_use().then_some(())).count();
        assert_eq!(uses as u64, MAX_USES);
        assert!(!(0..10).any(|_| word.note_use()));
        assert!(word.forget_uses() && !word.forget_uses() && !word.forget_use());
        word.set_prefetched(Prefetch::Requested);
        assert!(word.load().is_prefetched() && !word.load().is_readahead() && !word.note_use());
        assert!(!word.forget_use(), "the first use of a prefetched folio is not counted");
        assert!(!word.note_use() && word.forget_use());
        word.set_prefetched(Prefetch::Readahead);
        assert!(!word.forget_use() && !word.forget_uses() && word.load().is_readahead(), "the folio is still unused");
        assert!(word.note_use() && !word.note_use() && !word.load().is_prefetched(), "the first use is reported once");
        assert!(word.forget_use() && !word.forget_use());
        let seen = word.load();
        assert_eq!((seen.version(), seen.pins(), seen.order()), (1, 0, 0));
        for _ in 0..MAX_PINS {
            word.pin().unwrap();
        }
        assert_eq!(word.pin().unwrap_err().pins(), MAX_PINS);
        assert!(word.unpin_unless_freed() && word.load().pins() == MAX_PINS - 1);
        for _ in 1..MAX_PINS {
            assert!(!word.unpin());
        }
        assert!(word.load().is_unsplittable());
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    /// A page with one byte of contents, for loom tests.
    struct Page {
        word: Word,
        byte: AtomicU64,
    }

    fn page() -> Arc<Page> {
        let page = Page { word: Word::new(), byte: AtomicU64::new(1) };
        page.word.publish(0, false, false);
        Arc::new(page)
    }

    /// A thread copies the byte of a folio while another thread frees the folio and uses its page for a new one. A copy
    /// that counts as valid must have the byte of the folio that the reader looked up.
    #[test]
    fn a_valid_copy_never_has_the_next_owners_bytes() {
        loom::model(|| {
            let page = page();
            let other = page.clone();
            let freeing = thread::spawn(move || {
                if other.word.remove_from_file().must_be_freed {
                    other.word.set_free(0, false);
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

    /// One thread pins a folio while another thread removes it from its file. The folio's byte must not change while
    /// the folio is pinned. Exactly one of the two threads must free the folio.
    #[test]
    fn exactly_one_thread_frees_a_pinned_folio() {
        loom::model(|| {
            let page = page();
            let other = page.clone();
            let freeing = thread::spawn(move || u32::from(other.word.remove_from_file().must_be_freed));
            let mut freed = 0;
            if page.word.pin().is_ok() {
                assert_eq!(page.byte.load(Relaxed), 1);
                freed += u32::from(page.word.unpin());
            }
            assert_eq!(freed + freeing.join().unwrap(), 1);
        });
    }

    /// One thread holds a folio while another thread pins it. A folio must never be held and pinned at the same time. A
    /// thread that pins the folio after the hold must see the holder's writes.
    #[test]
    fn hold_and_pin_exclude_each_other() {
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

    /// One thread freezes a folio while another thread removes it from its file. Exactly one of the two threads must
    /// free the folio.
    #[test]
    fn a_frozen_folio_that_is_removed_is_freed_once() {
        loom::model(|| {
            let page = page();
            let other = page.clone();
            let freeing = thread::spawn(move || u32::from(other.word.remove_from_file().must_be_freed));
            let mut freed = 0;
            if page.word.freeze().is_ok() {
                freed += u32::from(!page.word.thaw());
            }
            assert_eq!(freed + freeing.join().unwrap(), 1);
        });
    }

    /// A thread copies a folio's byte while another thread freezes the folio and then holds it. A copy from the frozen
    /// folio must be valid, and a copy from the held folio must be invalid.
    #[test]
    fn copies_from_a_frozen_folio_are_valid() {
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
