//! The handle table: one word for each handle. Only this word holds the location of the handle's value.
//!
//! ```text
//!   bits 0-40 offset of the object in the window, in units of 8 bytes | 41-60 generation | 61-63 pins
//! ```
//!
//! A word times eight has the generation in its high bits and the offset in bytes below; the pins are shifted out. The
//! generation is known from the handle before the word is loaded, so the generation can be subtracted from the base
//! address in advance. Then one load from the word leads to the value: an addressing mode multiplies by eight and adds.
//!
//! A generation is odd while the value exists. Removal increments it, so an old handle never matches again. An index is
//! not reused after its last generation. If all handles of a page of the table are free, the page can be freed. The
//! table then remembers the highest generation of the page, which may be at most half of all generations. Threads keep
//! some free handles in their [`stock`].
//!
//! [`stock`]: crate::alloc::stock
#![allow(unsafe_code)] // unchecked access to words of the table

use crate::alloc::magazine::ThreadTable;
use crate::alloc::stock::Stock;
use crate::alloc::thread_slots::WORD_BITS;
use pagemill_core::arena::{Table, place};
use pagemill_core::error::{Error, Result};
use pagemill_core::sync::{Acquire, AtomicU64, Guarded, Relaxed, Release};
use pagemill_core::units::os_page_bytes;
use pagemill_sys::mem;
use std::marker::PhantomData;
use std::sync::atomic::Ordering::AcqRel;

/// Maximum number of handles of a cache; a power of two. The last index is never allocated, because it marks an invalid
/// handle.
const MAX_HANDLES: usize = 1 << 26;
/// Index that an invalid handle has.
const INVALID_INDEX: u64 = MAX_HANDLES as u64 - 1;

/// All words of a handle table. Words that are not open yet read as zero, which is not the word of a live handle. So
/// readers need no bounds check.
pub(crate) type Words = [AtomicU64; MAX_HANDLES];

/// Number of bits of a handle word that contain the number of pins of the value.
const PIN_BITS: u32 = 3;
/// A handle word with the pin count 1 and all other bits 0: adding it to a word adds one pin.
const ONE_PIN: u64 = 1 << (u64::BITS - PIN_BITS);
/// Maximum number of pins of a value.
const MAX_PINS: u64 = (1 << PIN_BITS) - 1;
/// Bit position of the generation in a [`Key`], and also in a handle word that was shifted left by [`PIN_BITS`].
const GENERATION_SHIFT: u32 = 44;
/// The lowest bit of the generation in a [`Key`], and also in a handle word that was shifted left by [`PIN_BITS`].
/// Adding it increments the generation.
const ONE_GENERATION: u64 = 1 << GENERATION_SHIFT;
/// Mask of the bits below the generation in a [`Key`], and also in a handle word that was shifted left by [`PIN_BITS`].
const OFFSET_MASK: u64 = ONE_GENERATION - 1;
/// Mask of the generation in a handle word.
const GENERATION_MASK: u64 = !OFFSET_MASK >> PIN_BITS;
/// The last generation number of a handle. After this generation, the index of the handle is not used again.
const MAX_GENERATION: u32 = (1 << (u64::BITS - GENERATION_SHIFT)) - 1;

/// Index and generation of a handle, in one number.
///
/// # Invariants
///
/// The generation is odd, as for a live value. The index is below [`MAX_HANDLES`], and the bits between index and
/// generation are 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Key(u64);

impl Key {
    pub fn new(index: u32, generation: u32) -> Self {
        debug_assert!(u64::from(index) < INVALID_INDEX && generation % 2 == 1);
        Self(u64::from(generation) << GENERATION_SHIFT | u64::from(index))
    }

    #[inline]
    pub fn to_bits(self) -> u64 {
        self.0
    }

    /// Restores a key from a result of [`Key::to_bits`], without a check.
    #[inline]
    pub fn from_stock(bits: u64) -> Self {
        debug_assert!(Self::from_bits(bits).0 == bits);
        Self(bits)
    }

    /// Makes a key from any number. A number with an even generation gives a key with the invalid index.
    pub fn from_bits(bits: u64) -> Self {
        let (generation, index) = (bits >> GENERATION_SHIFT, bits & INVALID_INDEX);
        Self(if generation % 2 == 1 {
            generation << GENERATION_SHIFT | index
        } else {
            1 << GENERATION_SHIFT | INVALID_INDEX
        })
    }

    #[inline]
    pub fn index(self) -> u32 {
        (self.0 & INVALID_INDEX) as u32
    }

    #[inline]
    pub fn generation(self) -> u32 {
        (self.0 >> GENERATION_SHIFT) as u32
    }

    #[inline]
    fn word(self, words: &Words) -> &AtomicU64 {
        // `index()` would apply a mask that the conversion to 32 bits already implies.
        let index = self.0 as u32 as usize;
        debug_assert_eq!(index, self.index() as usize);
        // SAFETY: the index is below the table's length (type invariant).
        unsafe { words.get_unchecked(index) }
    }

    /// Makes an allocated handle live: from now on the handle refers to the value at `offset` in the window of slab
    /// memory.
    #[inline]
    pub fn publish(self, words: &Words, offset: usize) {
        self.word(words).store(HandleWord::new(self.generation(), offset).0, Release);
    }

    /// Makes a handle dead if its word is still `seen` and has no pins. Returns whether the handle was made dead. If
    /// so, the caller must free the handle's next generation ([`Key::next_generation`]). Until then, the word has the
    /// offset of the value.
    #[inline]
    pub fn end_value(self, words: &Words, seen: HandleWord) -> bool {
        seen.pins() == 0 && self.word(words).compare_exchange(seen.0, seen.ended().0, AcqRel, Relaxed).is_ok()
    }

    /// Returns the word of this handle, live or not.
    #[inline]
    pub fn load_word(self, words: &Words) -> HandleWord {
        HandleWord(self.word(words).load(Relaxed))
    }

    /// Returns the next handle with the same index; `None` after the last generation.
    #[inline]
    pub fn next_generation(self) -> Option<Self> {
        (self.generation() < MAX_GENERATION).then(|| Self(self.0 + 2 * ONE_GENERATION))
    }

    /// Returns the word of this handle if the handle is live.
    #[inline]
    pub fn live_word(self, words: &Words) -> Option<HandleWord> {
        let word = HandleWord(self.word(words).load(Acquire));
        // A word that is not live has an even generation, so it does not match.
        ((word.0 ^ self.0 >> PIN_BITS) & GENERATION_MASK == 0).then_some(word)
    }

    /// Returns the address of the handle's value: `base` plus the offset in the word. Computes with pointers, because
    /// the compiler would reorder integer additions into a chain after the load of the word.
    #[inline]
    pub fn address(self, word: HandleWord, base: usize) -> *mut u8 {
        let before = (base as *mut u8).wrapping_sub((self.0 & !OFFSET_MASK) as usize);
        let address = before.wrapping_add(word.generation_and_offset() as usize);
        debug_assert_eq!(address as usize, base + word.object_offset());
        address
    }
}

/// Refers to a value of one [`HandleMap`](crate::HandleMap). Copies refer to the same value. After the value was
/// removed, no copy matches a later value.
///
/// A handle is valid only in the map that returned it. In another map of the same type, it may refer to no value or to
/// an unrelated one, and no call can notice this.
///
/// Example: [`HandleMap`](crate::HandleMap).
pub struct Handle<T> {
    pub(crate) key: Key,
    _value: PhantomData<fn() -> T>,
}

impl<T> Handle<T> {
    pub(crate) fn new(key: Key) -> Self {
        Self { key, _value: PhantomData }
    }

    /// Returns the handle as a number, for storage. The number is never 0.
    pub fn to_bits(self) -> u64 {
        self.key.to_bits()
    }

    /// Returns the index of the handle in the handle table, below 2^26. No two live values of a map have the same index.
    /// The map prefers low indices, so a program can keep data of its own for each index in an array.
    pub fn index(self) -> u32 {
        self.key.index()
    }

    /// Restores a handle from a number. A number that did not come from [`Handle::to_bits`] refers to no value, or to
    /// any value of the map; 0 refers to no value.
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

/// The word of a handle, as it was when it was loaded from the handle table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HandleWord(u64);

impl HandleWord {
    fn new(generation: u32, offset: usize) -> Self {
        debug_assert!(offset as u64 & !OFFSET_MASK == 0 && offset.is_multiple_of(1 << PIN_BITS));
        Self((u64::from(generation) << GENERATION_SHIFT | offset as u64) >> PIN_BITS)
    }

    /// Returns the generation and the offset without the pins, at the bit positions of a [`Key`].
    #[inline]
    fn generation_and_offset(self) -> u64 {
        self.0 << PIN_BITS
    }

    #[inline]
    pub fn generation(self) -> u32 {
        (self.generation_and_offset() >> GENERATION_SHIFT) as u32
    }

    /// Returns the word for the time after the value was removed: that of the next generation, with the same offset.
    /// This word matches no handle, because its generation is even.
    #[inline]
    fn ended(self) -> Self {
        // The generation after the last one wraps to 0.
        Self(self.generation_and_offset().wrapping_add(ONE_GENERATION) >> PIN_BITS)
    }

    #[inline]
    pub fn is_live(self) -> bool {
        self.generation() % 2 == 1
    }

    /// Returns the offset of the value's object from the start of the window of slab memory. In the word of a free
    /// handle, it is the index of the next free word of the page.
    #[inline]
    pub fn object_offset(self) -> usize {
        (self.generation_and_offset() & OFFSET_MASK) as usize
    }

    #[inline]
    pub fn pins(self) -> u64 {
        self.0 / ONE_PIN
    }

    pub fn has_max_pins(self) -> bool {
        self.pins() == MAX_PINS
    }

    /// Returns a word with the same generation and another offset.
    pub fn with_offset(self, offset: usize) -> Self {
        Self::new(self.generation(), offset)
    }
}

/// State of the free handles in one OS page of a handle table. Protected by the table's lock.
#[derive(Clone, Copy)]
struct Page {
    /// Index of the first free word in the page; the number of words in a page if no word is free.
    head: u32,
    /// Number of free words in the page.
    free: u32,
    /// Upper bound of the generations of the page's handles at the time when the page's memory was freed.
    max_generation: u32,
    /// Whether the page's memory holds words. It does not before the first use and after the memory was freed.
    has_words: bool,
}

/// State of the OS pages of a handle table. Protected by the table's lock.
#[derive(Default)]
struct TableState {
    pages: Vec<Page>,
    pages_with_free: PageBitmap,
}

/// The set of pages that have a free handle, as a two-level bitmap.
#[derive(Default)]
struct PageBitmap {
    /// One bit for each page, set if the page has a free handle.
    pages: Vec<u64>,
    /// One bit for each nonzero word of `pages`: the upper level.
    nonzero_words: Vec<u64>,
}

impl PageBitmap {
    fn insert(&mut self, page: usize) {
        let word = page / WORD_BITS;
        if self.pages.len() <= word {
            self.pages.resize(word + 1, 0);
            self.nonzero_words.resize(word / WORD_BITS + 1, 0);
        }
        self.pages[word] |= 1 << (page % WORD_BITS);
        self.nonzero_words[word / WORD_BITS] |= 1 << (word % WORD_BITS);
    }

    fn remove(&mut self, page: usize) {
        let word = page / WORD_BITS;
        self.pages[word] &= !(1 << (page % WORD_BITS));
        if self.pages[word] == 0 {
            self.nonzero_words[word / WORD_BITS] &= !(1 << (word % WORD_BITS));
        }
    }

    fn lowest_page(&self) -> Option<usize> {
        let at = self.nonzero_words.iter().position(|words| *words != 0)?;
        let word = at * WORD_BITS + self.nonzero_words[at].trailing_zeros() as usize;
        Some(word * WORD_BITS + self.pages[word].trailing_zeros() as usize)
    }
}

/// The handle table of one cache. When the cache is dropped, another cache may use the table, and the generations
/// continue.
pub(crate) struct HandleTable {
    words: Table<AtomicU64>,
    state: Guarded<TableState>,
    /// Number of handle words in an OS page.
    words_per_page: usize,
    /// Log2 of `words_per_page`.
    page_shift: u32,
    /// Number of handles that had their last generation.
    worn_out: AtomicU64,
    /// The stocks of free handles and retired objects, by thread slot.
    pub stocks: ThreadTable<Stock>,
}

impl HandleTable {
    /// Creates a handle table that is never freed.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if no addresses are available.
    pub fn new_static() -> Result<&'static Self> {
        let words_per_page = os_page_bytes() / size_of::<AtomicU64>();
        place(Self {
            words: Table::new_readable(MAX_HANDLES)?,
            state: Guarded::default(),
            words_per_page,
            page_shift: words_per_page.trailing_zeros(),
            worn_out: AtomicU64::new(0),
            stocks: ThreadTable::new()?,
        })
    }

    /// Returns the stock of a thread slot. The caller must have entered or drained the slot's magazine, which is opened
    /// only after [`ThreadTable::open_slot`].
    #[inline]
    pub fn stock(&self, slot: usize) -> &Stock {
        self.stocks.entries.get(slot)
    }

    /// Frees the memory of an empty stock. The caller must have drained the magazine of the thread slot.
    pub fn discard_stock(&self, slot: usize) {
        if size_of::<Stock>().is_multiple_of(os_page_bytes()) {
            // If the kernel keeps the memory, the stock stays as it is.
            let _ = self.stocks.entries.discard(slot, 1);
        }
    }

    #[inline]
    pub fn words(&self) -> &Words {
        self.words.row(0)
    }

    fn word(&self, index: u32) -> &AtomicU64 {
        &self.words()[index as usize]
    }

    pub fn load(&self, index: u32) -> HandleWord {
        HandleWord(self.word(index).load(Acquire))
    }

    pub fn prefetch(&self, index: u32) {
        mem::prefetch(std::ptr::from_ref(self.word(index)).addr());
    }

    /// Replaces the handle word at `index` by `new` if the word is still `seen`. Returns whether the word was replaced.
    #[inline]
    pub fn replace_word(&self, index: u32, seen: HandleWord, new: HandleWord) -> bool {
        self.word(index).compare_exchange(seen.0, new.0, AcqRel, Relaxed).is_ok()
    }

    /// Adds a pin to the handle word at `index`. Returns false if the word has the maximum number of pins or is not
    /// `seen` any more.
    pub fn pin(&self, index: u32, seen: HandleWord) -> bool {
        !seen.has_max_pins() && self.replace_word(index, seen, HandleWord(seen.0 + ONE_PIN))
    }

    /// Counts a handle that had its last generation.
    #[cold]
    pub fn note_worn_out(&self) {
        self.worn_out.fetch_add(1, Relaxed);
    }

    pub fn worn_out(&self) -> u64 {
        self.worn_out.load(Relaxed)
    }

    pub fn unpin(&self, index: u32) {
        self.word(index).fetch_sub(ONE_PIN, Release);
    }

    /// Allocates up to `keys.len()` handles, at least one. Returns the number of allocated handles. The handles are not
    /// live before [`Key::publish`].
    ///
    /// # Errors
    ///
    /// [`Error::NoAddresses`] if all handles are in use or have had their last generation.
    pub fn allocate(&self, keys: &mut [Key]) -> Result<usize> {
        self.state.with(|state| {
            for (count, key) in keys.iter_mut().enumerate() {
                *key = match self.allocate_one(state) {
                    Ok(key) => key,
                    Err(error) => return if count > 0 { Ok(count) } else { Err(error) },
                };
            }
            Ok(keys.len())
        })
    }

    /// Allocates the first free handle of the table's lowest page that has a free handle.
    fn allocate_one(&self, state: &mut TableState) -> Result<Key> {
        let page_number = match state.pages_with_free.lowest_page() {
            Some(page_number) => page_number,
            None => self.open_page(state)?,
        };
        let page = &mut state.pages[page_number];
        if !page.has_words {
            self.write_free_words(page_number, page);
        }
        let index = (page_number * self.words_per_page) as u32 + page.head;
        let word = HandleWord(self.word(index).load(Relaxed));
        page.head = (word.object_offset() >> PIN_BITS) as u32;
        page.free -= 1;
        if page.free == 0 {
            state.pages_with_free.remove(page_number);
        }
        Ok(Key::new(index, word.generation() + 1))
    }

    /// Opens one more OS page of the table. Returns the number of the page.
    fn open_page(&self, state: &mut TableState) -> Result<usize> {
        let next = state.pages.len() * self.words_per_page;
        if next + self.words_per_page > INVALID_INDEX as usize {
            return Err(Error::NoAddresses { wanted_bytes: size_of::<AtomicU64>() as u64 });
        }
        self.words.open(0, next, next + self.words_per_page)?;
        let page_number = state.pages.len();
        state.pages.push(Page { head: 0, free: self.words_per_page as u32, max_generation: 0, has_words: false });
        state.pages_with_free.insert(page_number);
        Ok(page_number)
    }

    /// Writes the handle words of a page whose handles are all free, and links the words into the page's list of free
    /// words.
    fn write_free_words(&self, page_number: usize, page: &mut Page) {
        for at in 0..self.words_per_page {
            let word = HandleWord::new(page.max_generation, (at + 1) << PIN_BITS);
            self.words.get(page_number * self.words_per_page + at).store(word.0, Relaxed);
        }
        (page.head, page.has_words) = (0, true);
    }

    /// Makes a handle dead as [`Key::end_value`] does, but regardless of its pins. No other thread may reach the value.
    pub fn end_value_despite_pins(&self, key: Key) {
        self.word(key.index()).store(self.load(key.index()).ended().0, Release);
    }

    /// Frees handles that are not live, so that they can be allocated again.
    pub fn free(&self, keys: impl IntoIterator<Item = Key>) {
        self.state.with(|state| {
            for key in keys {
                let (page_number, at) =
                    (key.index() as usize >> self.page_shift, key.index() as usize & (self.words_per_page - 1));
                let page = &mut state.pages[page_number];
                let word = HandleWord::new(key.generation() - 1, (page.head as usize) << PIN_BITS);
                self.word(key.index()).store(word.0, Relaxed);
                page.head = at as u32;
                page.free += 1;
                state.pages_with_free.insert(page_number);
            }
        });
    }

    /// Frees the memory of those OS pages of the table in which no handle is in use. Returns the freed bytes.
    pub fn shrink(&self) -> u64 {
        self.state.with(|state| {
            let is_free = |page: &Page| page.has_words && page.free as usize == self.words_per_page;
            let mut freed = 0;
            for (page_number, page) in state.pages.iter_mut().enumerate().filter(|(_, page)| is_free(page)) {
                let words = (page_number * self.words_per_page..(page_number + 1) * self.words_per_page)
                    .map(|at| self.words.get(at));
                let max_generation = words.map(|word| HandleWord(word.load(Relaxed)).generation()).max().unwrap_or(0);
                // When the page is used again, all its handles continue from this generation. If the other handles
                // would lose more than half of all generations, because one handle was used often, the page keeps its
                // memory.
                let is_cheap = max_generation <= MAX_GENERATION / 2;
                if is_cheap && self.words.discard(page_number * self.words_per_page, self.words_per_page).is_ok() {
                    *page = Page { max_generation, has_words: false, ..*page };
                    freed += os_page_bytes() as u64;
                }
            }
            freed
        })
    }

    /// Returns the indices of all live handles, with their words.
    pub fn live_words(&self) -> impl Iterator<Item = (u32, HandleWord)> {
        let pages: Vec<bool> = self.state.with(|state| state.pages.iter().map(|page| page.has_words).collect());
        let filled = pages.into_iter().enumerate().filter(|(_, has_words)| *has_words);
        let indices = filled
            .flat_map(|(page_number, _)| page_number * self.words_per_page..(page_number + 1) * self.words_per_page);
        indices.map(|index| (index as u32, self.load(index as u32))).filter(|(_, word)| word.is_live())
    }

    /// Returns the resident bytes of the table and the stocks.
    pub fn resident_bytes(&self) -> u64 {
        let opened = self.state.with(|state| state.pages.len()) * self.words_per_page;
        self.words.resident_bytes(0, opened) + self.stocks.resident_bytes()
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    /// Allocates one handle from a table.
    fn allocate_key(handles: &HandleTable) -> Key {
        let mut keys = [Key::from_bits(0)];
        assert_eq!(handles.allocate(&mut keys).unwrap(), 1);
        keys[0]
    }

    /// Removing a pinned value must fail. After the value is unpinned, the removal must succeed, and the index must be
    /// allocated again with the next generation.
    #[test]
    fn freed_handle_returns_with_the_next_generation() {
        let handles = HandleTable::new_static().unwrap();
        let key = allocate_key(handles);
        key.publish(handles.words(), 64);
        let seen = key.live_word(handles.words()).unwrap();
        assert_eq!(seen.object_offset(), 64);
        assert!(
            handles.pin(key.index(), seen) && !key.end_value(handles.words(), handles.load(key.index())),
            "a pinned value stays"
        );
        handles.unpin(key.index());
        assert!(key.end_value(handles.words(), seen) && key.live_word(handles.words()).is_none());
        let next = key.next_generation().unwrap();
        handles.free([next]);
        assert_eq!((next.index(), next.generation()), (key.index(), key.generation() + 2));
        assert!(allocate_key(handles) == next);
    }

    /// Inserts pages into a bitmap and removes them at random, and compares the bitmap with a `BTreeSet`. The bitmap
    /// must always return the lowest page. The pages span three words of the upper level.
    #[test]
    fn bitmap_returns_the_lowest_page() {
        let (mut bitmap, mut set) = (PageBitmap::default(), std::collections::BTreeSet::new());
        let mut draw = 1_usize;
        for round in 0..20_000 {
            draw = draw.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let page = (draw >> 33) % (3 * WORD_BITS * WORD_BITS);
            assert_eq!(bitmap.lowest_page(), set.first().copied());
            // First insertions outnumber removals, then all pages are removed.
            if round < 10_000 && draw >> 62 != 0 {
                bitmap.insert(page);
                set.insert(page);
            } else if let Some(first) = set.pop_first() {
                bitmap.remove(first);
            }
        }
        assert_eq!((bitmap.lowest_page(), set.len()), (None, 0));
    }

    /// Ends a handle of the last generation. There must be no next handle, the word must not be live, and the index
    /// must not be reused.
    #[test]
    fn index_is_unused_after_its_last_generation() {
        let handles = HandleTable::new_static().unwrap();
        let last = Key::new(allocate_key(handles).index(), MAX_GENERATION);
        last.publish(handles.words(), 8);
        assert!(last.end_value(handles.words(), last.live_word(handles.words()).unwrap()));
        assert!(last.next_generation().is_none() && last.live_word(handles.words()).is_none());
        assert_ne!(allocate_key(handles).index(), last.index());
    }

    /// Numbers that are not live handles must refer to no value. Handles with another generation must refer to no
    /// value, either.
    #[test]
    fn arbitrary_numbers_find_no_value() {
        let handles = HandleTable::new_static().unwrap();
        let key = allocate_key(handles);
        assert!(Key::from_bits(key.to_bits()) == key && key.live_word(handles.words()).is_none());
        key.publish(handles.words(), 64);
        assert_eq!(key.live_word(handles.words()).map(HandleWord::object_offset), Some(64));
        for bits in [0, 1, u64::MAX, key.to_bits() + (1 << GENERATION_SHIFT), key.to_bits() + (2 << GENERATION_SHIFT)] {
            assert_eq!(Key::from_bits(bits).live_word(handles.words()), None, "{bits:#x}");
        }
    }

    /// One handle uses up half of its generations, or nearly all. Its page must then be freed only in the first case.
    /// The other handles of the page must have half of their generations left.
    #[test]
    fn often_used_handle_leaves_half_of_the_generations() {
        for (busy, freed) in [(MAX_GENERATION / 2 - 2, os_page_bytes() as u64), (MAX_GENERATION - 2, 0)] {
            let handles = HandleTable::new_static().unwrap();
            let last = Key::new(allocate_key(handles).index(), busy);
            last.publish(handles.words(), 8);
            assert!(last.end_value(handles.words(), last.live_word(handles.words()).unwrap()));
            handles.free(last.next_generation());
            assert_eq!(handles.shrink(), freed);
            let others =
                (1..handles.words_per_page).map(|_| allocate_key(handles)).filter(|key| key.index() != last.index());
            assert!(others.into_iter().all(|key| key.generation() < MAX_GENERATION / 2 + 2));
        }
    }

    /// Five pages of handles are allocated, and all handles but ten are removed. `shrink` must free the memory of the
    /// pages without handles, and old handles must match no new value.
    #[test]
    fn free_pages_of_the_table_return_memory() {
        let handles = HandleTable::new_static().unwrap();
        let taken: Vec<_> = (0..5 * handles.words_per_page).map(|_| allocate_key(handles)).collect();
        assert_eq!(handles.shrink(), 0);
        taken.iter().for_each(|key| key.publish(handles.words(), 8));
        let (kept, gone) = taken.split_at(10);
        for key in gone {
            assert!(key.end_value(handles.words(), handles.load(key.index())));
            handles.free(key.next_generation());
        }
        let before = handles.resident_bytes();
        let freed = handles.shrink();
        assert_eq!((freed, handles.shrink()), (4 * os_page_bytes() as u64, 0));
        assert_eq!(before - handles.resident_bytes(), freed);
        assert_eq!(handles.live_words().count(), kept.len());
        assert!(gone[gone.len() - 1].live_word(handles.words()).is_none());
        assert!(gone.iter().all(|_| allocate_key(handles).generation() == 3));
    }
}
