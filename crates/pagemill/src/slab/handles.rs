//! Handles and what they stand for: a table of words, one for each handle, which alone say where a value is.
//!
//! ```text
//!   bits 0-2 pins | 3-43 place, in 8 bytes from the window's start | 44-63 generation
//! ```
//!
//! A generation is odd while a value is there. It goes on by one when a value goes, so a handle of an older one never fits; a
//! handle's place in the table whose generations are used up is not used again. Pages of the table whose handles are all free
//! give their memory back; the page remembers the generation that all of it has passed.

use crate::arena::{Table, place};
use crate::error::{Error, Result};
use crate::sync::{Acquire, AtomicU32, AtomicU64, Guarded, Relaxed, Release};
use crate::units::os_page_bytes;
use std::sync::atomic::Ordering::AcqRel;

/// Most handles of a cache.
const MAX_HANDLES: usize = 1 << 26;

const PIN_BITS: u32 = 3;
const GENERATION_SHIFT: u32 = 44;
const PINS: u64 = (1 << PIN_BITS) - 1;
const PLACE: u64 = (1 << GENERATION_SHIFT) - 1 - PINS;
const MAX_GENERATION: u32 = (1 << (u64::BITS - GENERATION_SHIFT)) - 1;

/// The word of a handle at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry(u64);

impl Entry {
    fn new(generation: u32, place: usize) -> Self {
        debug_assert!(place as u64 & !PLACE == 0);
        Self(u64::from(generation) << GENERATION_SHIFT | place as u64)
    }

    #[inline]
    pub fn generation(self) -> u32 {
        (self.0 >> GENERATION_SHIFT) as u32
    }

    #[inline]
    pub fn is_live(self) -> bool {
        self.generation() % 2 == 1
    }

    /// Where the value is, from the window's start; of a free one the next that is free.
    #[inline]
    pub fn place(self) -> usize {
        (self.0 & PLACE) as usize
    }

    pub fn pins(self) -> u64 {
        self.0 & PINS
    }

    pub fn is_pinned_most(self) -> bool {
        self.pins() == PINS
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
    /// Pages before this one have no free handle.
    first: usize,
}

/// The handles of one cache. When the cache is gone the table serves another, and its generations go on.
pub(super) struct Handles {
    words: Table<AtomicU64>,
    /// Words that may be looked at.
    opened: AtomicU32,
    books: Guarded<Books>,
    per_page: usize,
}

impl Handles {
    /// # Errors
    ///
    /// [`Error::System`] without addresses.
    pub fn place() -> Result<&'static Self> {
        place(Self {
            words: Table::new(MAX_HANDLES)?,
            opened: AtomicU32::new(0),
            books: Guarded::default(),
            per_page: os_page_bytes() / size_of::<AtomicU64>(),
        })
    }

    #[inline]
    fn word(&self, index: u32) -> Option<&AtomicU64> {
        (index < self.opened.load(Relaxed)).then(|| self.words.get(index as usize))
    }

    /// The word of a handle, whatever it is now.
    #[inline]
    pub fn load(&self, index: u32) -> Option<Entry> {
        self.word(index).map(|word| Entry(word.load(Acquire)))
    }

    /// Changes a word that is still as it was seen; says whether it was.
    #[inline]
    pub fn exchange(&self, index: u32, seen: Entry, new: Entry) -> bool {
        self.word(index).is_some_and(|word| word.compare_exchange(seen.0, new.0, AcqRel, Relaxed).is_ok())
    }

    /// One pin more; not if there are as many as can be, or the word has changed.
    pub fn pin(&self, index: u32, seen: Entry) -> bool {
        !seen.is_pinned_most() && self.exchange(index, seen, Entry(seen.0 + 1))
    }

    pub fn unpin(&self, index: u32) {
        if let Some(word) = self.word(index) {
            word.fetch_sub(1, Release);
        }
    }

    /// Takes a handle that is free: index and generation. Nobody else has it; it stands for nothing before [`Handles::publish`].
    ///
    /// # Errors
    ///
    /// [`Error::NoAddresses`] when there are no more.
    pub fn take(&self) -> Result<(u32, u32)> {
        self.books.with(|books| {
            let with_free = books.pages[books.first..].iter().position(|page| page.free > 0);
            books.first = with_free.map_or(books.pages.len(), |at| books.first + at);
            if with_free.is_none() {
                self.open(books)?;
            }
            let number = books.first;
            let page = &mut books.pages[number];
            if !page.is_filled {
                self.fill(number, page);
            }
            let index = (number * self.per_page) as u32 + page.head;
            let entry = Entry(self.words.get(index as usize).load(Relaxed));
            page.head = (entry.place() >> PIN_BITS) as u32;
            page.free -= 1;
            Ok((index, entry.generation() + 1))
        })
    }

    /// Lets one more page be used.
    fn open(&self, books: &mut Books) -> Result<()> {
        let next = books.pages.len() * self.per_page;
        if next + self.per_page > MAX_HANDLES {
            return Err(Error::NoAddresses { wanted_bytes: size_of::<AtomicU64>() as u64 });
        }
        self.words.open(0, next, next + self.per_page)?;
        books.pages.push(Page { head: 0, free: self.per_page as u32, passed: 0, is_filled: false });
        self.opened.store((next + self.per_page) as u32, Release);
        Ok(())
    }

    /// Writes the words of a page of which all handles are free.
    fn fill(&self, number: usize, page: &mut Page) {
        for at in 0..self.per_page {
            let entry = Entry::new(page.passed, (at + 1) << PIN_BITS);
            self.words.get(number * self.per_page + at).store(entry.0, Relaxed);
        }
        (page.head, page.is_filled) = (0, true);
    }

    /// From here on a handle that was taken stands for a value at a place.
    #[inline]
    pub fn publish(&self, index: u32, generation: u32, place: usize) {
        self.words.get(index as usize).store(Entry::new(generation, place).0, Release);
    }

    /// Ends what a handle stands for, if its word is still as it was seen; says whether. It is to be given back.
    pub fn end(&self, index: u32, seen: Entry) -> bool {
        seen.pins() == 0 && self.exchange(index, seen, Entry::new(Self::after(seen.generation()), 0))
    }

    /// The generation when the value has gone; 0, which is never any handle's, when all are used up.
    fn after(generation: u32) -> u32 {
        if generation == MAX_GENERATION { 0 } else { generation + 1 }
    }

    /// Takes a handle back that was taken, and stands for nothing that anybody could still reach.
    pub fn give(&self, index: u32, generation: u32) {
        let after = Self::after(generation);
        if after == 0 {
            return self.words.get(index as usize).store(0, Relaxed);
        }
        let (number, at) = (index as usize / self.per_page, index as usize % self.per_page);
        self.books.with(|books| {
            let page = &mut books.pages[number];
            let entry = Entry::new(after, (page.head as usize) << PIN_BITS);
            self.words.get(index as usize).store(entry.0, Relaxed);
            page.head = at as u32;
            page.free += 1;
            books.first = books.first.min(number);
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
                if self.words.discard(number * self.per_page, self.per_page).is_ok() {
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
        indices.filter_map(|index| Some((index as u32, self.load(index as u32).filter(|entry| entry.is_live())?)))
    }

    /// Bytes of the table that are resident.
    pub fn resident_bytes(&self) -> u64 {
        self.words.resident_bytes(0, self.opened.load(Relaxed) as usize)
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    /// A handle is taken by one at a time; one that was given back comes with another generation.
    #[test]
    fn generations_go_on() {
        let handles = Handles::place().unwrap();
        let (index, generation) = handles.take().unwrap();
        handles.publish(index, generation, 64);
        let seen = handles.load(index).unwrap();
        assert!(seen.is_live() && seen.place() == 64 && seen.generation() == generation);
        assert!(handles.pin(index, seen) && !handles.end(index, handles.load(index).unwrap()), "a pinned value stays");
        handles.unpin(index);
        assert!(handles.end(index, seen) && !handles.load(index).unwrap().is_live());
        handles.give(index, generation);
        assert_eq!(handles.take().unwrap(), (index, generation + 2));
        assert_eq!(handles.load(u32::MAX), None);
    }

    /// When all generations of an index are used up it is never taken again.
    #[test]
    fn generations_end() {
        let handles = Handles::place().unwrap();
        let (index, _) = handles.take().unwrap();
        handles.give(index, MAX_GENERATION);
        assert_ne!(handles.take().unwrap().0, index);
        handles.publish(index, MAX_GENERATION, 8);
        assert!(handles.end(index, handles.load(index).unwrap()));
        assert!(!handles.load(index).unwrap().is_live());
    }

    /// Pages without a handle in use give their memory back; handles of before do not fit what comes after.
    #[test]
    fn a_table_shrinks() {
        let handles = Handles::place().unwrap();
        let taken: Vec<_> = (0..5 * handles.per_page).map(|_| handles.take().unwrap()).collect();
        assert_eq!(handles.shrink(), 0);
        for (index, generation) in &taken {
            handles.publish(*index, *generation, 8);
        }
        let (kept, gone) = taken.split_at(10);
        for (index, generation) in gone {
            assert!(handles.end(*index, handles.load(*index).unwrap()));
            handles.give(*index, *generation);
        }
        let before = handles.resident_bytes();
        let freed = handles.shrink();
        assert_eq!((freed, handles.shrink()), (4 * os_page_bytes() as u64, 0));
        assert_eq!(before - handles.resident_bytes(), freed);
        assert_eq!(handles.live().count(), kept.len());
        assert!(!handles.load(gone[gone.len() - 1].0).unwrap().is_live());
        let again: Vec<_> = gone.iter().map(|_| handles.take().unwrap()).collect();
        assert!(again.iter().all(|(_, generation)| *generation == 3));
    }
}
