//! The handle table: one word for each handle, which alone holds the location of its value.
//!
//! ```text
//!   bits 0-40 place, in 8 bytes from the window's start | 41-60 generation | 61-63 pins
//! ```
//!
//! A word times eight is generation and place in bytes, without the pins. The generation is known from the handle before
//! the word is loaded. So the way from the word to the value is one load: its addressing mode does the multiplication by
//! eight and the addition.
//!
//! A generation is odd while the value exists. It is incremented when the value is removed, so a stale handle never
//! matches. An index is not used again after its last generation. Pages of the table with free handles only return their
//! memory. The page remembers the highest generation that it reached, at most half of all generations. Threads keep some
//! handles in stock ([`stock`]).
//!
//! [`stock`]: super::stock
#![allow(unsafe_code)] // unchecked access to words of the table

use super::magazine::table_by_thread;
use super::stock::Stock;
use super::thread_slots::WORD_BITS;
use pagemill_core::arena::{Table, place};
use pagemill_core::error::{Error, Result};
use pagemill_core::sync::{Acquire, AtomicU64, AtomicUsize, Guarded, Relaxed, Release};
use pagemill_core::units::os_page_bytes;
use pagemill_sys::mem;
use std::marker::PhantomData;
use std::sync::atomic::Ordering::AcqRel;

/// Maximum number of handles of a cache; a power of two. The last index is never given out: it marks an invalid handle.
const MAX_HANDLES: usize = 1 << 26;
const NOWHERE: u64 = MAX_HANDLES as u64 - 1;

/// All words of a table. Words that are not open read as zero, which is not live, so readers need no bounds check.
pub(super) type Words = [AtomicU64; MAX_HANDLES];

const PIN_BITS: u32 = 3;
const ONE_PIN: u64 = 1 << (u64::BITS - PIN_BITS);
const MOST_PINS: u64 = (1 << PIN_BITS) - 1;
/// In a key, and in a word times eight.
const GENERATION_SHIFT: u32 = 44;
const ONE_GENERATION: u64 = 1 << GENERATION_SHIFT;
const PLACE: u64 = ONE_GENERATION - 1;
/// In a word as it is stored.
const GENERATION: u64 = !PLACE >> PIN_BITS;
const MAX_GENERATION: u32 = (1 << (u64::BITS - GENERATION_SHIFT)) - 1;

/// Index and generation of a handle.
///
/// # Invariants
///
/// The generation is odd, as for a live value. The index is below [`MAX_HANDLES`], and the bits between the two are 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key(u64);

impl Key {
    pub fn new(index: u32, generation: u32) -> Self {
        debug_assert!(u64::from(index) < NOWHERE && generation % 2 == 1);
        Self(u64::from(generation) << GENERATION_SHIFT | u64::from(index))
    }

    #[inline]
    pub fn to_bits(self) -> u64 {
        self.0
    }

    /// A key from the result of [`Key::to_bits`].
    #[inline]
    pub fn from_stock(bits: u64) -> Self {
        debug_assert!(Self::from_bits(bits).0 == bits);
        Self(bits)
    }

    pub fn from_bits(bits: u64) -> Self {
        let (generation, index) = (bits >> GENERATION_SHIFT, bits & NOWHERE);
        Self(if generation % 2 == 1 { generation << GENERATION_SHIFT | index } else { 1 << GENERATION_SHIFT | NOWHERE })
    }

    #[inline]
    pub fn index(self) -> u32 {
        (self.0 & NOWHERE) as u32
    }

    #[inline]
    pub fn generation(self) -> u32 {
        (self.0 >> GENERATION_SHIFT) as u32
    }

    #[inline]
    fn word(self, words: &Words) -> &AtomicU64 {
        // Not `index()`: the processor would apply the same mask twice.
        let index = self.0 as u32 as usize;
        debug_assert_eq!(index, self.index() as usize);
        // SAFETY: below the table's length (type invariant).
        unsafe { words.get_unchecked(index) }
    }

    /// Makes an allocated handle live: it refers to the value at a place.
    #[inline]
    pub fn publish(self, words: &Words, place: usize) {
        self.word(words).store(HandleWord::new(self.generation(), place).0, Release);
    }

    /// Ends the value of a handle if its word is still `seen`; returns whether it did. The caller then frees
    /// [`Key::next`].
    #[inline]
    pub fn end(self, words: &Words, seen: HandleWord) -> bool {
        seen.pins() == 0 && self.word(words).compare_exchange(seen.0, self.ended().0, AcqRel, Relaxed).is_ok()
    }

    /// The next handle with the same index; `None` if all generations are used up.
    #[inline]
    pub fn next(self) -> Option<Self> {
        (self.generation() < MAX_GENERATION).then(|| Self(self.0 + 2 * ONE_GENERATION))
    }

    /// The word after the value was removed. After the last generation it is 0, which no handle has.
    #[inline]
    fn ended(self) -> HandleWord {
        // One more than the last generation wraps to 0.
        HandleWord((self.0 & !PLACE).wrapping_add(ONE_GENERATION) >> PIN_BITS)
    }

    /// The word of this handle while it is live.
    #[inline]
    pub fn find(self, words: &Words) -> Option<HandleWord> {
        let entry = HandleWord(self.word(words).load(Acquire));
        // The generation of a word that is not live is even.
        ((entry.0 ^ self.0 >> PIN_BITS) & GENERATION == 0).then_some(entry)
    }

    /// Address of the value that [`Key::find`] found: `base` plus the place of the entry. Uses pointers, because integer
    /// additions would be reordered into a chain after the load of the entry.
    #[inline]
    pub fn address(self, entry: HandleWord, base: usize) -> *mut u8 {
        let before = (base as *mut u8).wrapping_sub((self.0 & !PLACE) as usize);
        let address = before.wrapping_add(entry.unpinned() as usize);
        debug_assert_eq!(address as usize, base + entry.place());
        address
    }
}

/// Refers to a value of a cache. Copies refer to the same value; once it is removed, no copy matches a later value.
///
/// Example: [`ByHandle`](super::ByHandle).
pub struct Handle<T> {
    pub(super) key: Key,
    _value: PhantomData<fn() -> T>,
}

impl<T> Handle<T> {
    pub(super) fn new(key: Key) -> Self {
        Self { key, _value: PhantomData }
    }

    /// The handle as a number, for storage. Never 0.
    pub fn to_bits(self) -> u64 {
        self.key.to_bits()
    }

    /// The handle of a number. A number that did not come from [`Handle::to_bits`] refers to no value or to any value of
    /// the cache; 0 refers to none.
    pub fn from_bits(bits: u64) -> Self {
        Self::new(Key::from_bits(bits))
    }
}

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Handle<T> {}

impl<T> PartialEq for Handle<T> {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key
    }
}

impl<T> Eq for Handle<T> {}

impl<T> std::hash::Hash for Handle<T> {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.key.hash(state);
    }
}

impl<T> std::fmt::Debug for Handle<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Handle({}.{})", self.key.index(), self.key.generation())
    }
}

/// A snapshot of the word of a handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HandleWord(u64);

impl HandleWord {
    fn new(generation: u32, place: usize) -> Self {
        debug_assert!(place as u64 & !PLACE == 0 && place.is_multiple_of(1 << PIN_BITS));
        Self((u64::from(generation) << GENERATION_SHIFT | place as u64) >> PIN_BITS)
    }

    /// Generation and place, laid out as in a key.
    #[inline]
    fn unpinned(self) -> u64 {
        self.0 << PIN_BITS
    }

    #[inline]
    pub fn generation(self) -> u32 {
        (self.unpinned() >> GENERATION_SHIFT) as u32
    }

    #[inline]
    pub fn is_live(self) -> bool {
        self.generation() % 2 == 1
    }

    /// Location of the value from the window's start; in a free entry, the next free entry.
    #[inline]
    pub fn place(self) -> usize {
        (self.unpinned() & PLACE) as usize
    }

    #[inline]
    pub fn pins(self) -> u64 {
        self.0 / ONE_PIN
    }

    pub fn is_pinned_most(self) -> bool {
        self.pins() == MOST_PINS
    }

    /// The same generation at another place.
    pub fn at(self, place: usize) -> Self {
        Self::new(self.generation(), place)
    }
}

/// Free handles of one page of the table. Under the lock of the table.
#[derive(Clone, Copy)]
struct Page {
    /// The first free entry of the page; the page's length if there is none.
    head: u32,
    free: u32,
    /// Upper bound of the generations of the page when its memory was freed.
    passed: u32,
    /// Whether its words are written.
    is_filled: bool,
}

#[derive(Default)]
struct TableState {
    pages: Vec<Page>,
    with_free: Marks,
}

/// Set of the pages that have a free handle: a two-level bitmap.
#[derive(Default)]
struct Marks {
    /// One bit for each page.
    pages: Vec<u64>,
    /// One bit for each nonzero word of `pages`.
    words: Vec<u64>,
}

impl Marks {
    fn mark(&mut self, page: usize) {
        let word = page / WORD_BITS;
        if self.pages.len() <= word {
            self.pages.resize(word + 1, 0);
            self.words.resize(word / WORD_BITS + 1, 0);
        }
        self.pages[word] |= 1 << (page % WORD_BITS);
        self.words[word / WORD_BITS] |= 1 << (word % WORD_BITS);
    }

    fn unmark(&mut self, page: usize) {
        let word = page / WORD_BITS;
        self.pages[word] &= !(1 << (page % WORD_BITS));
        if self.pages[word] == 0 {
            self.words[word / WORD_BITS] &= !(1 << (word % WORD_BITS));
        }
    }

    fn lowest(&self) -> Option<usize> {
        let at = self.words.iter().position(|words| *words != 0)?;
        let word = at * WORD_BITS + self.words[at].trailing_zeros() as usize;
        Some(word * WORD_BITS + self.pages[word].trailing_zeros() as usize)
    }
}

/// The handles of one cache. After the end of the cache another one takes the table over, and generations continue.
pub(super) struct Handles {
    words: Table<AtomicU64>,
    state: Guarded<TableState>,
    per_page: usize,
    page_shift: u32,
    /// By thread slot; the first `stocked` are open.
    stocks: Table<Stock>,
    stocked: AtomicUsize,
    /// Number of threads that the table has addresses for.
    threads: usize,
}

impl Handles {
    /// # Errors
    ///
    /// [`Error::System`] without addresses.
    pub fn place() -> Result<&'static Self> {
        let per_page = os_page_bytes() / size_of::<AtomicU64>();
        let (stocks, threads) = table_by_thread()?;
        place(Self {
            words: Table::new_readable(MAX_HANDLES)?,
            state: Guarded::default(),
            per_page,
            page_shift: per_page.trailing_zeros(),
            stocks,
            stocked: AtomicUsize::new(0),
            threads,
        })
    }

    /// Opens the stock of a thread slot; returns whether it has one. One caller at a time.
    pub fn reach(&self, number: usize) -> bool {
        let (stocked, end) = (self.stocked.load(Relaxed), number + 1);
        if end > self.threads || self.stocks.open(0, stocked, end).is_err() {
            return false;
        }
        // The end of the previous cache may still be reaching a slot of its own.
        self.stocked.fetch_max(end, Relaxed);
        true
    }

    /// The stock of a thread slot. For a thread inside of its magazine, which is not open before the slot was
    /// [reached](Self::reach).
    #[inline]
    pub fn stock(&self, number: usize) -> &Stock {
        self.stocks.get(number)
    }

    /// Frees the memory of an empty stock. The caller drains the magazine of the slot.
    pub fn strip_stock(&self, number: usize) {
        if size_of::<Stock>().is_multiple_of(os_page_bytes()) {
            // If the kernel keeps the memory, the stock stays as it is.
            let _ = self.stocks.discard(number, 1);
        }
    }

    #[inline]
    pub fn words(&self) -> &Words {
        self.words.row(0)
    }

    fn word(&self, index: u32) -> &AtomicU64 {
        &self.words()[index as usize]
    }

    /// The current word of an index.
    pub fn load(&self, index: u32) -> HandleWord {
        HandleWord(self.word(index).load(Acquire))
    }

    /// Prefetches the word of an index.
    pub fn fetch(&self, index: u32) {
        mem::prefetch(std::ptr::from_ref(self.word(index)).addr());
    }

    /// Replaces a word that is still `seen`; returns whether it was.
    #[inline]
    pub fn exchange(&self, index: u32, seen: HandleWord, new: HandleWord) -> bool {
        self.word(index).compare_exchange(seen.0, new.0, AcqRel, Relaxed).is_ok()
    }

    /// Adds a pin. Returns false if the pins are used up or the word has changed.
    pub fn pin(&self, index: u32, seen: HandleWord) -> bool {
        !seen.is_pinned_most() && self.exchange(index, seen, HandleWord(seen.0 + ONE_PIN))
    }

    pub fn unpin(&self, index: u32) {
        self.word(index).fetch_sub(ONE_PIN, Release);
    }

    /// Allocates at least one handle; returns how many. They belong to the caller, and are not live before
    /// [`Key::publish`].
    ///
    /// # Errors
    ///
    /// [`Error::NoAddresses`] if all handles are used up.
    pub fn take(&self, keys: &mut [Key]) -> Result<usize> {
        self.state.with(|state| {
            for (count, key) in keys.iter_mut().enumerate() {
                *key = match self.take_one(state) {
                    Ok(key) => key,
                    Err(error) => return if count > 0 { Ok(count) } else { Err(error) },
                };
            }
            Ok(keys.len())
        })
    }

    fn take_one(&self, state: &mut TableState) -> Result<Key> {
        let number = match state.with_free.lowest() {
            Some(number) => number,
            None => self.open(state)?,
        };
        let page = &mut state.pages[number];
        if !page.is_filled {
            self.fill(number, page);
        }
        let index = (number * self.per_page) as u32 + page.head;
        let entry = HandleWord(self.word(index).load(Relaxed));
        page.head = (entry.place() >> PIN_BITS) as u32;
        page.free -= 1;
        if page.free == 0 {
            state.with_free.unmark(number);
        }
        Ok(Key::new(index, entry.generation() + 1))
    }

    /// Opens one more page of the table; returns its number.
    fn open(&self, state: &mut TableState) -> Result<usize> {
        let next = state.pages.len() * self.per_page;
        if next + self.per_page > NOWHERE as usize {
            return Err(Error::NoAddresses { wanted_bytes: size_of::<AtomicU64>() as u64 });
        }
        self.words.open(0, next, next + self.per_page)?;
        let number = state.pages.len();
        state.pages.push(Page { head: 0, free: self.per_page as u32, passed: 0, is_filled: false });
        state.with_free.mark(number);
        Ok(number)
    }

    /// Writes the words of a page of free handles.
    fn fill(&self, number: usize, page: &mut Page) {
        for at in 0..self.per_page {
            let entry = HandleWord::new(page.passed, (at + 1) << PIN_BITS);
            self.words.get(number * self.per_page + at).store(entry.0, Relaxed);
        }
        (page.head, page.is_filled) = (0, true);
    }

    /// Ends a value that no other thread can reach, regardless of its pins. As [`Key::end`].
    pub fn close(&self, key: Key) {
        self.word(key.index()).store(key.ended().0, Release);
    }

    /// Frees handles that are not live.
    pub fn give(&self, keys: impl IntoIterator<Item = Key>) {
        self.state.with(|state| {
            for key in keys {
                let (number, at) =
                    (key.index() as usize >> self.page_shift, key.index() as usize & (self.per_page - 1));
                let page = &mut state.pages[number];
                let entry = HandleWord::new(key.generation() - 1, (page.head as usize) << PIN_BITS);
                self.word(key.index()).store(entry.0, Relaxed);
                page.head = at as u32;
                page.free += 1;
                state.with_free.mark(number);
            }
        });
    }

    /// Frees the memory of pages without a handle in use; returns the bytes.
    pub fn shrink(&self) -> u64 {
        self.state.with(|state| {
            let is_free = |page: &Page| page.is_filled && page.free as usize == self.per_page;
            let mut freed = 0;
            for (number, page) in state.pages.iter_mut().enumerate().filter(|(_, page)| is_free(page)) {
                let words = (number * self.per_page..(number + 1) * self.per_page).map(|at| self.words.get(at));
                let passed = words.map(|word| HandleWord(word.load(Relaxed)).generation()).max().unwrap_or(0);
                // All handles of the page continue from this generation when it is used again. If one busy handle would
                // cost the others more than half of their generations, the page keeps its memory.
                let is_cheap = passed <= MAX_GENERATION / 2;
                if is_cheap && self.words.discard(number * self.per_page, self.per_page).is_ok() {
                    *page = Page { passed, is_filled: false, ..*page };
                    freed += os_page_bytes() as u64;
                }
            }
            freed
        })
    }

    /// All live handles with their words.
    pub fn live(&self) -> impl Iterator<Item = (u32, HandleWord)> {
        let pages: Vec<bool> = self.state.with(|state| state.pages.iter().map(|page| page.is_filled).collect());
        let filled = pages.into_iter().enumerate().filter(|(_, is_filled)| *is_filled);
        let indices = filled.flat_map(|(number, _)| number * self.per_page..(number + 1) * self.per_page);
        indices.map(|index| (index as u32, self.load(index as u32))).filter(|(_, entry)| entry.is_live())
    }

    /// Resident bytes of the table and the stocks.
    pub fn resident_bytes(&self) -> u64 {
        let opened = self.state.with(|state| state.pages.len()) * self.per_page;
        self.words.resident_bytes(0, opened) + self.stocks.resident_bytes(0, self.stocked.load(Relaxed))
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    fn take(handles: &Handles) -> Key {
        let mut keys = [Key::from_bits(0)];
        assert_eq!(handles.take(&mut keys).unwrap(), 1);
        keys[0]
    }

    /// A handle has one owner at a time; a freed one comes back with another generation.
    #[test]
    fn generations_go_on() {
        let handles = Handles::place().unwrap();
        let key = take(handles);
        key.publish(handles.words(), 64);
        let seen = key.find(handles.words()).unwrap();
        assert_eq!(seen.place(), 64);
        assert!(
            handles.pin(key.index(), seen) && !key.end(handles.words(), handles.load(key.index())),
            "a pinned value stays"
        );
        handles.unpin(key.index());
        assert!(key.end(handles.words(), seen) && key.find(handles.words()).is_none());
        let next = key.next().unwrap();
        handles.give([next]);
        assert_eq!((next.index(), next.generation()), (key.index(), key.generation() + 2));
        assert!(take(handles) == next);
    }

    /// The lowest page is taken first, in any order of marks. Compares with a `BTreeSet`; as many pages as three words of
    /// `words` cover.
    #[test]
    fn the_lowest_page_comes_first() {
        let (mut marks, mut set) = (Marks::default(), std::collections::BTreeSet::new());
        let mut draw = 1_usize;
        for round in 0..20_000 {
            draw = draw.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let page = (draw >> 33) % (3 * WORD_BITS * WORD_BITS);
            assert_eq!(marks.lowest(), set.first().copied());
            // First more are marked than unmarked, then all are unmarked.
            if round < 10_000 && draw >> 62 != 0 {
                marks.mark(page);
                set.insert(page);
            } else if let Some(first) = set.pop_first() {
                marks.unmark(first);
            }
        }
        assert_eq!((marks.lowest(), set.len()), (None, 0));
    }

    /// When all generations of an index are used up there is no next handle, and its word is not live.
    #[test]
    fn generations_end() {
        let handles = Handles::place().unwrap();
        let last = Key::new(take(handles).index(), MAX_GENERATION);
        last.publish(handles.words(), 8);
        assert!(last.end(handles.words(), last.find(handles.words()).unwrap()));
        assert!(last.next().is_none() && last.find(handles.words()).is_none());
        assert_ne!(take(handles).index(), last.index());
    }

    /// A number that is no handle finds nothing.
    #[test]
    fn numbers_are_no_handles() {
        let handles = Handles::place().unwrap();
        let key = take(handles);
        assert!(Key::from_bits(key.to_bits()) == key && key.find(handles.words()).is_none());
        key.publish(handles.words(), 64);
        assert_eq!(key.find(handles.words()).map(HandleWord::place), Some(64));
        for bits in [0, 1, u64::MAX, key.to_bits() + (1 << GENERATION_SHIFT), key.to_bits() + (2 << GENERATION_SHIFT)] {
            assert_eq!(Key::from_bits(bits).find(handles.words()), None, "{bits:#x}");
        }
    }

    /// A heavily used handle does not use up the generations of its page: when the page is used again, each handle has
    /// half of them left.
    #[test]
    fn a_busy_handle_leaves_generations_to_others() {
        for (busy, freed) in [(MAX_GENERATION / 2 - 2, os_page_bytes() as u64), (MAX_GENERATION - 2, 0)] {
            let handles = Handles::place().unwrap();
            let last = Key::new(take(handles).index(), busy);
            last.publish(handles.words(), 8);
            assert!(last.end(handles.words(), last.find(handles.words()).unwrap()));
            handles.give(last.next());
            assert_eq!(handles.shrink(), freed);
            let others = (1..handles.per_page).map(|_| take(handles)).filter(|key| key.index() != last.index());
            assert!(others.into_iter().all(|key| key.generation() < MAX_GENERATION / 2 + 2));
        }
    }

    /// Pages without a handle in use free their memory; old handles do not match new values.
    #[test]
    fn a_table_shrinks() {
        let handles = Handles::place().unwrap();
        let taken: Vec<_> = (0..5 * handles.per_page).map(|_| take(handles)).collect();
        assert_eq!(handles.shrink(), 0);
        taken.iter().for_each(|key| key.publish(handles.words(), 8));
        let (kept, gone) = taken.split_at(10);
        for key in gone {
            assert!(key.end(handles.words(), handles.load(key.index())));
            handles.give(key.next());
        }
        let before = handles.resident_bytes();
        let freed = handles.shrink();
        assert_eq!((freed, handles.shrink()), (4 * os_page_bytes() as u64, 0));
        assert_eq!(before - handles.resident_bytes(), freed);
        assert_eq!(handles.live().count(), kept.len());
        assert!(gone[gone.len() - 1].find(handles.words()).is_none());
        assert!(gone.iter().all(|_| take(handles).generation() == 3));
    }
}
