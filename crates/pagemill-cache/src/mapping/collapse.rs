//! Collapsing: makes a huge folio of small ones. They are copied into a free block, and reads continue meanwhile.

use super::{File, Mapping};
use crate::folio::word::Kind;
use crate::folio::{Owner, Taken};
use pagemill_core::epoch;
use pagemill_core::error::{Error, Result};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{Acquire, Relaxed};
use pagemill_core::trace::Event;

/// Most pages of a huge folio.
const MOST_PAGES: usize = 512;

/// No page.
const NONE: u32 = u32::MAX;

/// The small folios of a range, frozen during the copy.
struct Parts<'file> {
    file: &'file File,
    first: u64,
    numbers: [u32; MOST_PAGES],
    pages: usize,
    /// The number of frozen entries, from the first on.
    frozen: usize,
    dirty_bytes: u64,
    /// Value of `File::left` before they were looked up.
    left: u32,
}

impl Mapping {
    /// Collapses the small folios around `offset` into one huge folio; holes among them become zeros. Returns whether
    /// it did. It does not if there is a huge folio already, or no folio.
    ///
    /// Cost: a copy of a huge folio, for which writers wait.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`] if one of them is in use. [`Error::NoMemory`] if no block is available.
    pub fn collapse(&self, offset: u64) -> Result<bool> {
        self.0.check(offset, 1)?;
        self.0.collapse_at(self.0.index_of(offset), Counter::HugeCollapsedForCaller)
    }
}

impl File {
    pub(super) fn collapse_at(&self, index: u64, counter: Counter) -> Result<bool> {
        let (order, span) = (self.pool().chunk_order(), self.span_of(index));
        let end = self.size_bytes();
        if order == 0 || self.offset_of(span.start) >= end {
            return Ok(false);
        }
        // Taken because the collapse fills gaps of the index, too.
        let flight = self.store.is_some().then(|| self.try_fly(span.start, span.end - 1));
        if matches!(flight, Some(None)) {
            return Err(Error::Busy { what: "a page of the range is being read in" });
        }
        let Some(mut parts) = Parts::find(self, span.start, 1 << order) else { return Ok(false) };
        // Bytes of a gap may be in the store.
        let stored = self.index_of(self.stored_bytes.load(Relaxed).next_multiple_of(self.page_bytes() as u64));
        if self.store.is_some() && parts.first_gap().is_some_and(|index| index < stored) {
            return Ok(false);
        }
        let failed = |error| {
            stats::add(Counter::HugeCollapseFailed, 1);
            Err(error)
        };
        let taken = match self.cache.take_in_place(order, parts.present_bytes()) {
            Ok(taken) => taken,
            Err(error) => return failed(error),
        };
        if !parts.freeze() {
            self.cache.give_in_place(taken.number, order, parts.present_bytes());
            return failed(Error::Busy { what: "a page of the range is in use" });
        }
        parts.copy_to(&taken);
        if !self.join(&parts, &taken)? {
            self.cache.give_in_place(taken.number, order, parts.present_bytes());
            return failed(Error::Busy { what: "the range was changed meanwhile" });
        }
        parts.free();
        if parts.first_gap().is_some() {
            self.note_sparse(taken.number);
        }
        stats::add(counter, 1);
        self.trace(Event::FolioCollapsed, span.start, order);
        Ok(true)
    }

    /// Replaces the parts by the huge folio in the index, if the parts are unchanged. Returns whether they were.
    fn join(&self, parts: &Parts<'_>, taken: &Taken) -> Result<bool> {
        let (number, order, first) = (taken.number, taken.order, parts.first);
        let word = self.pool().word(number);
        self.pool().set_owner(number, Owner { id: self.id, index: first });
        let last = first + (1 << order) - 1;
        let reached = self.reach_order(number, order);
        let stock = reached.and_then(|()| self.tree.prepare(first, last, u32::from(order)));
        let mut stock = stock.inspect_err(|_| self.cache.give_in_place(number, order, parts.present_bytes()))?;
        let mut writer = self.tree.lock();
        let is_same = self.store.is_none() || self.left.load(Relaxed) == parts.left;
        let is_same = is_same
            && (first..).zip(&parts.numbers[..parts.pages]).all(|(index, number)| {
                writer.get(index).map(|found| found.value) == (*number != NONE).then_some(u64::from(*number))
            });
        if is_same {
            // Once it is in the index, other threads may use it.
            let is_dirty = parts.dirty_bytes > 0;
            if is_dirty {
                self.count_dirty(self.cache.folio_bytes(order) - parts.dirty_bytes);
            }
            word.publish(order, !self.cache.may_split, is_dirty);
            writer.join(first, u32::from(order), u64::from(number), &mut stock);
            if self.store.is_some() {
                self.cache.order.join(parts.present().map(|(_, part)| part), number, order);
            }
        }
        Ok(is_same)
    }
}

impl<'file> Parts<'file> {
    /// Finds the small folios from `first` on; `None` if there are none, or a huge one.
    fn find(file: &'file File, first: u64, pages: usize) -> Option<Self> {
        let left = file.left.load(Acquire);
        let mut parts = Self { file, first, numbers: [NONE; MOST_PAGES], pages, frozen: 0, dirty_bytes: 0, left };
        let guard = epoch::pin();
        let mut at = first;
        let last = first + pages as u64 - 1;
        while at <= last
            && let Some(found) = file.tree.next(at, last, &guard)
        {
            if found.order > 0 {
                return None;
            }
            parts.numbers[(found.first - first) as usize] = found.value as u32;
            at = found.first + 1;
        }
        (at > first).then_some(parts)
    }

    /// Returns the index of the first missing page.
    fn first_gap(&self) -> Option<u64> {
        let gap = self.numbers[..self.pages].iter().position(|number| *number == NONE);
        gap.map(|at| self.first + at as u64)
    }

    fn present_bytes(&self) -> u64 {
        self.present().count() as u64 * self.file.page_bytes() as u64
    }

    fn present(&self) -> impl Iterator<Item = (usize, u32)> {
        let numbers = self.numbers[..self.pages].iter().copied().enumerate();
        numbers.filter(|(_, number)| *number != NONE)
    }

    /// Freezes all of them. Returns whether it could.
    fn freeze(&mut self) -> bool {
        for at in 0..self.pages {
            let number = self.numbers[at];
            if number != NONE {
                match self.file.pool().word(number).freeze() {
                    // The page may belong to another file by now. The check of the index in `join` detects that.
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

    fn copy_to(&self, taken: &Taken) {
        let pool = self.file.pool();
        for (at, number) in self.numbers[..self.pages].iter().enumerate() {
            let to = taken.number + at as u32;
            if *number != NONE {
                pool.copy_pages(to, *number, 1);
            } else if !taken.is_zero {
                pool.zero(to, 0, pool.page().bytes());
            }
        }
    }

    /// Frees the parts. They are in no index any more.
    fn free(&mut self) {
        for (_, number) in self.present() {
            debug_assert_eq!(self.file.pool().word(number).load().kind(), Kind::Still);
            self.file.cache.give_replaced(number);
        }
        self.frozen = 0;
    }
}

impl Drop for Parts<'_> {
    fn drop(&mut self) {
        for number in self.numbers[..self.frozen].iter().filter(|number| **number != NONE) {
            self.file.thaw(*number);
        }
    }
}
