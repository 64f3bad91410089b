//! Collapsing: copies the small folios of a range into a new huge folio. Reads continue meanwhile.

use crate::folio::{NewFolio, Owner, word};
use crate::mapping::inflight::Kind;
use crate::mapping::{File, Mapping};
use pagemill_core::error::{Error, Result};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{Acquire, Relaxed};
use pagemill_core::trace::Event;

/// Maximum number of pages of a huge folio.
const MAX_FOLIO_PAGES: usize = 512;

/// Value in place of a page number for a page without a folio in the range to collapse.
const NO_FOLIO: u32 = u32::MAX;

/// The small folios of a range that is about to be collapsed. They are frozen during the copy.
struct SmallFolios<'file> {
    file: &'file File,
    /// Index in the file of the first page of the range to collapse.
    first: u64,
    /// The page number of the folio at each page of the range; [`NO_FOLIO`] if the file has no folio there.
    numbers: [u32; MAX_FOLIO_PAGES],
    /// Number of pages of the range to collapse.
    pages: usize,
    /// Number of leading pages of the range whose folios are frozen.
    frozen: usize,
    /// Total bytes of the frozen folios that are dirty.
    dirty_bytes: u64,
    /// Value of `File::removals` before the folios were looked up.
    removals: u32,
}

impl Mapping {
    /// Collapses the small folios around `offset` into one huge folio of `PageCache::huge_bytes` bytes. Holes between
    /// these folios become zeros. Returns `false` if there is a huge folio already, or if the range that it would cover
    /// has no folio at all.
    ///
    /// Cost: a copy of the huge folio, during which writers wait.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`] if one of the folios is in use. [`Error::NoMemory`] if no block is available.
    pub fn collapse(&self, offset: u64) -> Result<bool> {
        self.0.check(offset, 1)?;
        self.0.collapse_at(self.0.index_of(offset), Counter::HugeCollapsedForCaller)
    }
}

impl File {
    /// As [`Mapping::collapse`], for the range of a huge folio that contains page `index`. Counts a success in
    /// `counter`.
    pub(crate) fn collapse_at(&self, index: u64, counter: Counter) -> Result<bool> {
        let (order, span) = (self.pool.chunk_order, self.span_of(index));
        let end = self.size_bytes();
        if order == 0 || self.offset_of(span.start) >= end {
            return Ok(false);
        }
        // An in-flight entry is registered for the range, because the collapse also fills missing pages.
        let request = self.store.is_some().then(|| self.register(span.start, span.end - 1, Kind::Uncancellable));
        if matches!(request, Some(Err(_))) {
            return Err(Error::Busy { what: "a page of the range is being read" });
        }
        let Some(mut folios) = SmallFolios::find(self, span.start, 1 << order) else { return Ok(false) };
        // A missing page may have bytes in the store, which the huge folio would lack.
        let stored = self.index_of(self.stored_bytes.load(Relaxed).next_multiple_of(self.page_bytes() as u64));
        if self.store.is_some() && folios.first_missing().is_some_and(|index| index < stored) {
            return Ok(false);
        }
        let taken = self.cache.allocate_replacement(order, folios.present_bytes());
        let collapsed = taken.and_then(|taken| {
            self.collapse_into(&taken, &mut folios)
                .inspect_err(|_| self.cache.free_replacement(taken.number, order, folios.present_bytes()))?;
            Ok(taken.number)
        });
        let number = collapsed.inspect_err(|_| stats::add(Counter::HugeCollapseFailed, 1))?;
        if folios.first_missing().is_some() {
            self.note_sparse(number);
        }
        stats::add(counter, 1);
        self.trace(Event::FolioCollapsed, span.start, order);
        Ok(true)
    }

    /// Copies the small folios into the huge folio `taken`, replaces them by it in the index, and frees them.
    fn collapse_into(&self, taken: &NewFolio, folios: &mut SmallFolios<'_>) -> Result<()> {
        if !folios.freeze() {
            return Err(Error::Busy { what: "a page of the range is in use" });
        }
        folios.copy_to(taken);
        self.replace_in_index(folios, taken)?;
        folios.free();
        Ok(())
    }

    /// Replaces the small folios in the index by the huge folio `taken`, if the index entries of their range are
    /// unchanged.
    fn replace_in_index(&self, folios: &SmallFolios<'_>, taken: &NewFolio) -> Result<()> {
        let (number, order, first) = (taken.number, taken.order, folios.first);
        debug_assert!(first.is_multiple_of(1 << order) && folios.pages == 1 << order);
        let word = self.pool.word(number);
        self.pool.set_owner(number, Owner { id: self.id, index: first });
        self.reach_order(number, order)?;
        let mut stock = self.tree.prepare(first, first + (1 << order) - 1, u32::from(order))?;
        let mut writer = self.tree.lock();
        let is_same = self.store.is_none() || self.removals.load(Relaxed) == folios.removals;
        let is_same = is_same
            && (first..).zip(&folios.numbers[..folios.pages]).all(|(index, number)| {
                writer.get(index).map(|found| found.value) == (*number != NO_FOLIO).then_some(u64::from(*number))
            });
        if !is_same {
            return Err(Error::Busy { what: "the range was changed meanwhile" });
        }
        // Dirty bytes are counted first: once the folio is in the index, other threads may use it.
        let is_dirty = folios.dirty_bytes > 0;
        if is_dirty {
            self.count_dirty(self.cache.folio_bytes(order) - folios.dirty_bytes);
        }
        debug_assert!(word.load().kind() == word::Kind::Busy, "the new folio is in no file yet");
        // Made live last: a hint must not find a folio that is not in the index. A thread that finds it there waits.
        writer.join(first, u32::from(order), u64::from(number), &mut stock);
        word.publish(order, !self.cache.may_split, is_dirty);
        if self.store.is_some() {
            self.cache.order.join(folios.present(), number, order);
        }
        Ok(())
    }
}

impl<'file> SmallFolios<'file> {
    /// Finds the small folios in the range of `pages` pages from page `first` on. Returns `None` if the range has no
    /// folio, or has a huge folio.
    fn find(file: &'file File, first: u64, pages: usize) -> Option<Self> {
        debug_assert!(pages <= MAX_FOLIO_PAGES);
        let removals = file.removals.load(Acquire);
        let mut folios =
            Self { file, first, numbers: [NO_FOLIO; MAX_FOLIO_PAGES], pages, frozen: 0, dirty_bytes: 0, removals };
        for found in file.folios(first..first + pages as u64) {
            if found.order > 0 {
                return None;
            }
            folios.numbers[(found.first - first) as usize] = found.value as u32;
        }
        let has_folio = folios.present().next().is_some();
        has_folio.then_some(folios)
    }

    /// Returns the index of the first page without a folio in the range to collapse.
    fn first_missing(&self) -> Option<u64> {
        let missing = self.numbers[..self.pages].iter().position(|number| *number == NO_FOLIO);
        missing.map(|at| self.first + at as u64)
    }

    /// Returns the total bytes of the small folios in the range to collapse.
    fn present_bytes(&self) -> u64 {
        self.present().count() as u64 * self.file.page_bytes() as u64
    }

    /// Returns the page number of each small folio of the range to collapse.
    fn present(&self) -> impl Iterator<Item = u32> {
        self.numbers[..self.pages].iter().copied().filter(|number| *number != NO_FOLIO)
    }

    /// Freezes all small folios of the range to collapse. Returns false if one of them is in use.
    fn freeze(&mut self) -> bool {
        debug_assert!(self.frozen == 0 && self.dirty_bytes == 0, "the folios are frozen once");
        for at in 0..self.pages {
            let number = self.numbers[at];
            if number != NO_FOLIO {
                match self.file.freeze(number) {
                    // The page may belong to another file by now. The check of the index in `replace_in_index` detects
                    // that.
                    Ok(state) if state.order() == 0 => {
                        self.dirty_bytes += if state.is_dirty() { self.file.page_bytes() as u64 } else { 0 };
                    }
                    Ok(_) => {
                        self.file.thaw(number);
                        return false;
                    }
                    Err(_) => return false,
                }
            }
            self.frozen = at + 1;
        }
        true
    }

    /// Copies the small folios into the huge folio `taken`, and zeroes the other pages of the huge folio.
    fn copy_to(&self, taken: &NewFolio) {
        let pool = self.file.pool;
        for (at, number) in self.numbers[..self.pages].iter().enumerate() {
            let to = taken.number + at as u32;
            if *number != NO_FOLIO {
                pool.copy_page(to, *number);
            } else if !taken.is_zero {
                pool.zero(to, 0, pool.page.bytes());
            }
        }
    }

    /// Frees the small folios after they were removed from the index.
    fn free(&mut self) {
        for number in self.present() {
            debug_assert_eq!(self.file.pool.word(number).load().kind(), word::Kind::Frozen);
            self.file.cache.free_replaced(number);
        }
        self.frozen = 0;
    }
}

impl Drop for SmallFolios<'_> {
    fn drop(&mut self) {
        for number in self.numbers[..self.frozen].iter().filter(|number| **number != NO_FOLIO) {
            self.file.thaw(*number);
        }
    }
}
