//! Handles and what they stand for: a table of words, one for each handle, which alone say where a value is.
//!
//! ```text
//!   bits 0-40 place, in 8 bytes from the window's start | 41-60 generation | 61-63 pins
//! ```
//!
//! A word times eight is generation and place in bytes; the pins are out. Of a handle the generation is known before its word is, so from
//! the word to the value is one load, which does the rest: a multiplication by eight and an addition.
//!
//! A generation is odd while a value is there. It goes on by one when a value goes, so a handle of an older one never fits; a
//! handle's place in the table whose generations are used up is not used again. Pages of the table whose handles are all free
//! give their memory back; the page remembers the generation that all of it has passed, which is half of them at most.
//! Threads keep some in stock ([`stock`]).
//!
//! [`stock`]: super::stock
#![allow(unsafe_code)] // words of keys, which are in the table

use super::magazine::table_by_thread;
use super::numbers::WORD_BITS;
use super::stock::Stock;
use crate::arena::{Table, place};
use crate::error::{Error, Result};
use crate::sync::{Acquire, AtomicU64, AtomicUsize, Guarded, Relaxed, Release};
use crate::units::os_page_bytes;
use pagemill_sys::mem;
use std::marker::PhantomData;
use std::sync::atomic::Ordering::AcqRel;

/// Most handles of a cache; a power of two. The last of them never comes: it stands for what is no handle.
const MAX_HANDLES: usize = 1 << 26;
const NOWHERE: u64 = MAX_HANDLES as u64 - 1;

/// All words of a table. Those that are not open read as zero bits, which stand for nothing; so readers need not look how many
/// are.
pub(super) type Words = [AtomicU64; MAX_HANDLES];

const PIN_BITS: u32 = 3;
const ONE_PIN: u64 = 1 << (u64::BITS - PIN_BITS);
const MOST_PINS: u64 = (1 << PIN_BITS) - 1;
/// Of a key, and of a word times eight.
const GENERATION_SHIFT: u32 = 44;
const ONE_GENERATION: u64 = 1 << GENERATION_SHIFT;
const PLACE: u64 = ONE_GENERATION - 1;
/// Of a word as it is.
const GENERATION: u64 = !PLACE >> PIN_BITS;
const MAX_GENERATION: u32 = (1 << (u64::BITS - GENERATION_SHIFT)) - 1;

/// Which word a handle is about, and of which generation.
///
/// # Invariants
///
/// The generation is odd, as that of a value that is there. The index is below [`MAX_HANDLES`], and between the two all bits are 0.
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

    /// One that [`Key::to_bits`] was asked of.
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
        // Not `index()`: the processor would have to mask what has been masked.
        let index = self.0 as u32 as usize;
        debug_assert_eq!(index, self.index() as usize);
        // SAFETY: below the table's length (type invariant).
        unsafe { words.get_unchecked(index) }
    }

    /// From here on a handle that was taken stands for a value at a place.
    #[inline]
    pub fn publish(self, words: &Words, place: usize) {
        self.word(words).store(Entry::new(self.generation(), place).0, Release);
    }

    /// Ends what it stands for, if its word is still as it was seen; says whether. [`Key::next`] is to be given back.
    #[inline]
    pub fn end(self, words: &Words, seen: Entry) -> bool {
        seen.pins() == 0 && self.word(words).compare_exchange(seen.0, self.ended().0, AcqRel, Relaxed).is_ok()
    }

    /// The handle that takes the place of this one in the table; `None` when all generations are used up.
    #[inline]
    pub fn next(self) -> Option<Self> {
        (self.generation() < MAX_GENERATION).then(|| Self(self.0 + 2 * ONE_GENERATION))
    }

    /// The word when the value has gone: of generation 0, which is never any handle's, when all are used up.
    #[inline]
    fn ended(self) -> Entry {
        // One more than the last is 0.
        Entry((self.0 & !PLACE).wrapping_add(ONE_GENERATION) >> PIN_BITS)
    }

    /// The word of this handle while it stands for a value.
    #[inline]
    pub fn find(self, words: &Words) -> Option<Entry> {
        let entry = Entry(self.word(words).load(Acquire));
        // The generation of a word that stands for nothing is even.
        ((entry.0 ^ self.0 >> PIN_BITS) & GENERATION == 0).then_some(entry)
    }

    /// Where the value is of what [`Key::find`] found: so far from `base` as the entry says. Pointers, as numbers would be added up in the
    /// other order, one after the other when the entry is there.
    #[inline]
    pub fn address(self, entry: Entry, base: usize) -> *mut u8 {
        let before = (base as *mut u8).wrapping_sub((self.0 & !PLACE) as usize);
        let address = before.wrapping_add(entry.unpinned() as usize);
        debug_assert_eq!(address as usize, base + entry.place());
        address
    }
}

/// Stands for a value of a cache. Copies stand for the same; when the value has gone none of them fits any other.
pub struct Handle<T> {
    pub(super) key: Key,
    _value: PhantomData<fn() -> T>,
}

impl<T> Handle<T> {
    pub(super) fn new(key: Key) -> Self {
        Self { key, _value: PhantomData }
    }

    /// As a number, for places that keep numbers. Never 0.
    pub fn to_bits(self) -> u64 {
        self.key.to_bits()
    }

    /// The handle of a number. One that was no handle's stands for nothing, or for any value of the cache; 0 for nothing.
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

/// The word of a handle at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry(u64);

impl Entry {
    fn new(generation: u32, place: usize) -> Self {
        debug_assert!(place as u64 & !PLACE == 0 && place.is_multiple_of(1 << PIN_BITS));
        Self((u64::from(generation) << GENERATION_SHIFT | place as u64) >> PIN_BITS)
    }

    /// Generation and place, as those of a key.
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

    /// Where the value is, from the window's start; of a free one the next that is free.
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

    /// The same value elsewhere.
    pub fn at(self, place: usize) -> Self {
        Self::new(self.generation(), place)
    }
}

/// Handles of one page that are free. Under the lock of the table.
#[derive(Clone, Copy)]
struct Page {
    /// The first free one, by its place in the page; the page's length if none is.
    head: u32,
    free: u32,
    /// All generations of the page were at most this when its memory went.
    passed: u32,
    /// Whether its words are there.
    is_filled: bool,
}

#[derive(Default)]
struct Books {
    pages: Vec<Page>,
    with_free: Marks,
}

/// Pages that have a free handle.
#[derive(Default)]
struct Marks {
    /// A bit for each page.
    pages: Vec<u64>,
    /// A bit for each word of these that has one.
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

/// The handles of one cache. When the cache is gone the table serves another, and its generations go on.
pub(super) struct Handles {
    words: Table<AtomicU64>,
    books: Guarded<Books>,
    per_page: usize,
    page_shift: u32,
    /// By number of the thread; open for so many of them.
    stocks: Table<Stock>,
    stocked: AtomicUsize,
    /// There are addresses for so many.
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
            books: Guarded::default(),
            per_page,
            page_shift: per_page.trailing_zeros(),
            stocks,
            stocked: AtomicUsize::new(0),
            threads,
        })
    }

    /// Opens the table for the stock of a thread; says whether it has one. By one caller at a time.
    pub fn reach(&self, number: usize) -> bool {
        let (stocked, end) = (self.stocked.load(Relaxed), number + 1);
        if end > self.threads || self.stocks.open(0, stocked, end).is_err() {
            return false;
        }
        // Who ends the cache before may reach its own place yet.
        self.stocked.fetch_max(end, Relaxed);
        true
    }

    /// What a thread keeps. For who is inside of the thread's magazine, which is not open before it was [reached](Self::reach).
    #[inline]
    pub fn stock(&self, number: usize) -> &Stock {
        self.stocks.get(number)
    }

    /// Gives the memory of a stock back in which nothing is. For who has seized the thread's magazine.
    pub fn strip_stock(&self, number: usize) {
        if size_of::<Stock>().is_multiple_of(os_page_bytes()) {
            // Where the kernel keeps it, it stays as it is.
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

    /// The word of an index, whatever it is now.
    pub fn load(&self, index: u32) -> Entry {
        Entry(self.word(index).load(Acquire))
    }

    /// Has the word of an index come near.
    pub fn fetch(&self, index: u32) {
        mem::prefetch(std::ptr::from_ref(self.word(index)).addr());
    }

    /// Changes a word that is still as it was seen; says whether it was.
    #[inline]
    pub fn exchange(&self, index: u32, seen: Entry, new: Entry) -> bool {
        self.word(index).compare_exchange(seen.0, new.0, AcqRel, Relaxed).is_ok()
    }

    /// One pin more; not if there are as many as can be, or the word has changed.
    pub fn pin(&self, index: u32, seen: Entry) -> bool {
        !seen.is_pinned_most() && self.exchange(index, seen, Entry(seen.0 + ONE_PIN))
    }

    pub fn unpin(&self, index: u32) {
        self.word(index).fetch_sub(ONE_PIN, Release);
    }

    /// Takes handles that are free, at least one; says how many. Nobody else has them; they stand for nothing before
    /// [`Key::publish`].
    ///
    /// # Errors
    ///
    /// [`Error::NoAddresses`] when there are no more.
    pub fn take(&self, keys: &mut [Key]) -> Result<usize> {
        self.books.with(|books| {
            for (count, key) in keys.iter_mut().enumerate() {
                *key = match self.take_one(books) {
                    Ok(key) => key,
                    Err(error) => return if count > 0 { Ok(count) } else { Err(error) },
                };
            }
            Ok(keys.len())
        })
    }

    fn take_one(&self, books: &mut Books) -> Result<Key> {
        let number = match books.with_free.lowest() {
            Some(number) => number,
            None => self.open(books)?,
        };
        let page = &mut books.pages[number];
        if !page.is_filled {
            self.fill(number, page);
        }
        let index = (number * self.per_page) as u32 + page.head;
        let entry = Entry(self.word(index).load(Relaxed));
        page.head = (entry.place() >> PIN_BITS) as u32;
        page.free -= 1;
        if page.free == 0 {
            books.with_free.unmark(number);
        }
        Ok(Key::new(index, entry.generation() + 1))
    }

    /// Lets one more page be used; says which.
    fn open(&self, books: &mut Books) -> Result<usize> {
        let next = books.pages.len() * self.per_page;
        if next + self.per_page > NOWHERE as usize {
            return Err(Error::NoAddresses { wanted_bytes: size_of::<AtomicU64>() as u64 });
        }
        self.words.open(0, next, next + self.per_page)?;
        let number = books.pages.len();
        books.pages.push(Page { head: 0, free: self.per_page as u32, passed: 0, is_filled: false });
        books.with_free.mark(number);
        Ok(number)
    }

    /// Writes the words of a page of which all handles are free.
    fn fill(&self, number: usize, page: &mut Page) {
        for at in 0..self.per_page {
            let entry = Entry::new(page.passed, (at + 1) << PIN_BITS);
            self.words.get(number * self.per_page + at).store(entry.0, Relaxed);
        }
        (page.head, page.is_filled) = (0, true);
    }

    /// Ends what a handle stands for, where nobody else comes to it, whatever its pins say. As [`Key::end`].
    pub fn close(&self, key: Key) {
        self.word(key.index()).store(key.ended().0, Release);
    }

    /// Takes handles back that were taken, and stand for nothing.
    pub fn give(&self, keys: impl IntoIterator<Item = Key>) {
        self.books.with(|books| {
            for key in keys {
                let (number, at) =
                    (key.index() as usize >> self.page_shift, key.index() as usize & (self.per_page - 1));
                let page = &mut books.pages[number];
                let entry = Entry::new(key.generation() - 1, (page.head as usize) << PIN_BITS);
                self.word(key.index()).store(entry.0, Relaxed);
                page.head = at as u32;
                page.free += 1;
                books.with_free.mark(number);
            }
        });
    }

    /// Gives the memory of pages back that have no handle in use; returns the bytes.
    pub fn shrink(&self) -> u64 {
        self.books.with(|books| {
            let is_free = |page: &Page| page.is_filled && page.free as usize == self.per_page;
            let mut freed = 0;
            for (number, page) in books.pages.iter_mut().enumerate().filter(|(_, page)| is_free(page)) {
                let words = (number * self.per_page..(number + 1) * self.per_page).map(|at| self.words.get(at));
                let passed = words.map(|word| Entry(word.load(Relaxed)).generation()).max().unwrap_or(0);
                // All of the page go on from there when it is used again. Where one of them was so busy that this costs the others more
                // than half of what they ever have, the page keeps its memory.
                let is_cheap = passed <= MAX_GENERATION / 2;
                if is_cheap && self.words.discard(number * self.per_page, self.per_page).is_ok() {
                    *page = Page { passed, is_filled: false, ..*page };
                    freed += os_page_bytes() as u64;
                }
            }
            freed
        })
    }

    /// Handles that stand for something, with their words.
    pub fn live(&self) -> impl Iterator<Item = (u32, Entry)> {
        let pages: Vec<bool> = self.books.with(|books| books.pages.iter().map(|page| page.is_filled).collect());
        let filled = pages.into_iter().enumerate().filter(|(_, is_filled)| *is_filled);
        let indices = filled.flat_map(|(number, _)| number * self.per_page..(number + 1) * self.per_page);
        indices.map(|index| (index as u32, self.load(index as u32))).filter(|(_, entry)| entry.is_live())
    }

    /// Bytes of the table that are resident.
    pub fn resident_bytes(&self) -> u64 {
        let opened = self.books.with(|books| books.pages.len()) * self.per_page;
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

    /// A handle is taken by one at a time; one that was given back comes with another generation.
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

    /// Whatever goes and comes back, what is lowest is taken first. Pages of three words of words, as a set has them.
    #[test]
    fn the_lowest_page_comes_first() {
        let (mut marks, mut set) = (Marks::default(), std::collections::BTreeSet::new());
        let mut draw = 1_usize;
        for round in 0..20_000 {
            draw = draw.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let page = (draw >> 33) % (3 * WORD_BITS * WORD_BITS);
            assert_eq!(marks.lowest(), set.first().copied());
            // More come than go at first, then all go.
            if round < 10_000 && draw >> 62 != 0 {
                marks.mark(page);
                set.insert(page);
            } else if let Some(first) = set.pop_first() {
                marks.unmark(first);
            }
        }
        assert_eq!((marks.lowest(), set.len()), (None, 0));
    }

    /// When all generations of an index are used up there is no next one, and its word stands for nothing.
    #[test]
    fn generations_end() {
        let handles = Handles::place().unwrap();
        let last = Key::new(take(handles).index(), MAX_GENERATION);
        last.publish(handles.words(), 8);
        assert!(last.end(handles.words(), last.find(handles.words()).unwrap()));
        assert!(last.next().is_none() && last.find(handles.words()).is_none());
        assert_ne!(take(handles).index(), last.index());
    }

    /// A number that was no handle's finds nothing, whatever it is.
    #[test]
    fn numbers_are_no_handles() {
        let handles = Handles::place().unwrap();
        let key = take(handles);
        assert!(Key::from_bits(key.to_bits()) == key && key.find(handles.words()).is_none());
        key.publish(handles.words(), 64);
        assert_eq!(key.find(handles.words()).map(Entry::place), Some(64));
        for bits in [0, 1, u64::MAX, key.to_bits() + (1 << GENERATION_SHIFT), key.to_bits() + (2 << GENERATION_SHIFT)] {
            assert_eq!(Key::from_bits(bits).find(handles.words()), None, "{bits:#x}");
        }
    }

    /// A handle of very many values does not use up those beside it: when its page is used again each has half of its generations left.
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

    /// Pages without a handle in use give their memory back; handles of before do not fit what comes after.
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
