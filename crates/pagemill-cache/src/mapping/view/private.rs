//! The pages that belong to a view with private writes.
//!
//! The first write to a page copies it into memory of the view, which then replaces the page in the window. Later
//! changes of the file's page, and its removal, do not change the copy.
//!
//! The copy is made in a second address range, the *copy range*, at the same offset as in the window, and then moved.
//! So another thread sees either the page of the file or the whole copy. Adjacent copies become one mapping, because
//! they were adjacent in the copy range.
#![allow(unsafe_code)] // copies and moves pages

use super::entry;
use super::pieces::{Access, Mapped};
use super::window::Window;
use crate::mapping::File;
use pagemill_core::error::{Error, Result};
use pagemill_core::sync::Guarded;
use pagemill_core::units::BLOCK_BYTES;
use pagemill_sys::fault::AllSignalsBlocked;
use pagemill_sys::window::Errno;
use pagemill_sys::{mem, process, window};
use std::ops::Range;

/// Maximum number of pages that are copied with a page, so that its copy lies beside other ones.
const MAX_DISTANCE: usize = 1024;

/// The pages of a window that belong to its view.
pub(super) struct OwnPages {
    /// A bit for each page of the window: whether the page belongs to the view. The lock is held while something is
    /// mapped in the window, so that a mapping never replaces a copy.
    bits: Guarded<Bits>,
    /// Address of the copy range; it is congruent to the window modulo 2 MiB.
    copies: usize,
    /// Addresses in front of the copy range, for its alignment.
    head_bytes: usize,
    len_bytes: usize,
    /// The process that has the memory. Fork children do not get it.
    process: u32,
}

/// A set of pages of a window.
pub(super) struct Bits {
    words: Vec<u64>,
    /// Number of runs of adjacent pages of the set.
    runs: usize,
}

impl Bits {
    fn has(&self, at: usize) -> bool {
        self.words[at / 64] >> (at % 64) & 1 == 1
    }

    /// Adds a page that is not in the set. Returns the change of the number of runs.
    fn insert(&mut self, at: usize) -> isize {
        let change = 1 - self.neighbours(at) as isize;
        self.words[at / 64] |= 1 << (at % 64);
        self.runs = self.runs.wrapping_add_signed(change);
        change
    }

    /// Returns how many of the two pages beside a page are in the set.
    fn neighbours(&self, at: usize) -> usize {
        let is_in = |at: usize| at / 64 < self.words.len() && self.has(at);
        usize::from(at > 0 && is_in(at - 1)) + usize::from(is_in(at + 1))
    }

    /// Returns the first page from `at` on, before `end`, that the set has (`true`) or lacks (`false`); `end` if there
    /// is none.
    fn next(&self, mut at: usize, end: usize, is_in: bool) -> usize {
        while at < end {
            let word = if is_in { self.words[at / 64] } else { !self.words[at / 64] } >> (at % 64);
            if word != 0 {
                return (at + word.trailing_zeros() as usize).min(end);
            }
            at = (at / 64 + 1) * 64;
        }
        end
    }

    /// Returns the first page of the longest range that begins at `least` or later, ends before `at`, and has no page
    /// of the set.
    fn begin_of_gap(&self, at: usize, least: usize) -> usize {
        let mut word_at = at / 64;
        let mut word = self.words.get(word_at).map_or(0, |word| word & ((1 << (at % 64)) - 1));
        while word == 0 && word_at * 64 > least {
            word_at -= 1;
            word = self.words[word_at];
        }
        if word == 0 { least } else { (word_at * 64 + 64 - word.leading_zeros() as usize).max(least) }
    }

    /// Returns the longest range inside of `within` that contains page `at`, which is not in the set, and has no page
    /// of the set.
    fn gap_around(&self, at: usize, within: Range<usize>) -> Range<usize> {
        self.begin_of_gap(at, within.start)..self.next(at, within.end, true)
    }

    /// Returns the ranges of `pages` without pages of the set.
    fn gaps(&self, pages: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let mut at = pages.start;
        std::iter::from_fn(move || {
            let begin = self.next(at, pages.end, false);
            at = self.next(begin, pages.end, true);
            (begin < pages.end).then_some(begin..at)
        })
    }

    fn count(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }
}

impl OwnPages {
    /// Reserves the addresses of a window of `len_bytes` with `count` pages, which begins at `offset` of the file.
    pub fn new(file: &File, offset: u64, len_bytes: usize, count: usize) -> Result<Self> {
        let head_bytes = (offset % BLOCK_BYTES as u64) as usize;
        let use_huge = file.page_bytes() >= BLOCK_BYTES && file.cache.is_huge_allowed();
        let total = len_bytes + head_bytes;
        let base = window::map_private(total, BLOCK_BYTES, use_huge)
            .map_err(|_| Error::NoAddresses { wanted_bytes: total as u64 })?;
        let bits = Guarded::new(Bits { words: vec![0; count.div_ceil(64)], runs: 0 });
        Ok(Self { bits, copies: base + head_bytes, head_bytes, len_bytes, process: process::id() })
    }

    /// Returns whether entry `at` is that of a page that belongs to the view.
    pub fn has(&self, at: usize) -> bool {
        // As in `File::unmap_from_views`.
        let _blocked = AllSignalsBlocked::begin();
        self.bits.with(|bits| bits.has(at))
    }

    /// Returns the pages from the nearest page of the view to entry `at`, in the order in which each has one of the
    /// view beside it; `None` if none is within [`MAX_DISTANCE`], or if one is beside `at` already.
    fn path_to(&self, at: usize, count: usize) -> Option<impl Iterator<Item = usize> + use<>> {
        let _blocked = AllSignalsBlocked::begin();
        let within = at.saturating_sub(MAX_DISTANCE)..count.min(at + MAX_DISTANCE);
        let gap = self.bits.with(|bits| bits.gap_around(at, within.clone()));
        let (has_before, has_behind) = (gap.start > within.start, gap.end < within.end);
        let is_before = has_before && (!has_behind || at - gap.start <= gap.end - at);
        let len = if is_before { at + 1 - gap.start } else { gap.end - at };
        ((has_before || has_behind) && len > 1)
            .then(|| (0..len).map(move |step| if is_before { gap.start + step } else { gap.end - 1 - step }))
    }

    /// Returns the number of pages that belong to the view.
    pub fn count(&self) -> usize {
        let _blocked = AllSignalsBlocked::begin();
        self.bits.with(|bits| bits.count())
    }
}

impl Drop for OwnPages {
    fn drop(&mut self) {
        if self.process != process::id() {
            return;
        }
        // SAFETY: the copy range belongs to this value. No copy is being made any more.
        unsafe { mem::unreserve(self.copies - self.head_bytes, self.head_bytes + self.len_bytes) };
    }
}

impl Window {
    /// Returns whether a page belongs to the view.
    pub(super) fn is_own(&self, page: u64) -> bool {
        self.own_pages.as_ref().is_some_and(|own_pages| own_pages.has(self.at(page)))
    }

    /// Copies a page into memory of the view, from `source`, the address of the page's bytes in the pool, and maps the
    /// copy in the window. The caller has pinned the folio and claimed the entry.
    pub(super) fn copy_page(&self, page: u64, source: usize) -> Mapped {
        let Some(own_pages) = &self.own_pages else { return Mapped::No };
        let bytes = self.bytes_of(page..page + 1);
        let (at, len_bytes) = (self.at(page), (bytes.end - bytes.start) as usize);
        let source = source + (bytes.start - self.file.offset_of(page)) as usize;
        let (to, copy) = (self.addr_of(bytes.start), own_pages.copies + (bytes.start - self.offset) as usize);
        // Checked before the copy. Other threads may exceed the limit meanwhile by a piece each.
        if own_pages.bits.with(|bits| bits.neighbours(at) == 0 && !entry::may_add_own_piece(bits.runs)) {
            return Mapped::Failed(Errno::NOMEM);
        }
        // SAFETY: this thread has claimed the page, so no other thread uses its place in the copy range. The source is
        // pinned. Another thread may change it meanwhile; the copy has each of its bytes before or after the change.
        unsafe { crate::folio::copy(copy as *mut u8, source as *const u8, len_bytes) };
        own_pages.bits.with(|bits| {
            // SAFETY: both ranges belong to the window. Accesses to its addresses call the fault handler.
            match unsafe { window::move_pages(copy, len_bytes, to) } {
                Ok(()) => {
                    entry::change_own_pieces(bits.insert(at));
                    Mapped::Yes(page + 1)
                }
                Err(error) => {
                    Self::reserve_if_unmapped(&(to..to + len_bytes));
                    Mapped::Failed(error)
                }
            }
        })
    }

    /// Calls `map` with the part of `pages` around `page` that does not belong to the view, while no page there can
    /// become the view's own.
    pub(super) fn with_shared_pages(
        &self,
        page: u64,
        pages: Range<u64>,
        map: impl FnOnce(Range<u64>) -> Mapped,
    ) -> Mapped {
        let Some(own_pages) = &self.own_pages else { return map(pages) };
        own_pages.bits.with(|bits| {
            if bits.has(self.at(page)) {
                return Mapped::Busy;
            }
            let gap = bits.gap_around(self.at(page), self.at(pages.start)..self.at(pages.end));
            map(self.first_page + gap.start as u64..self.first_page + gap.end as u64)
        })
    }

    /// Copies a page although no piece may be added: first copies the pages between it and the nearest page that
    /// belongs to the view, so that the copies form one mapping. Returns whether that was possible. It is not if one of
    /// these pages cannot be read, which is no error of an access to `page`.
    pub(super) fn copy_with_neighbours(&self, page: u64) -> bool {
        let path = self.own_pages.as_ref().and_then(|own| own.path_to(self.at(page), self.entries.count()));
        path.is_some_and(|mut path| path.all(|at| self.fill(self.first_page + at as u64, Access::Write).is_ok()))
    }

    /// Unmaps pages, except those that belong to the view.
    pub(super) fn unmap_shared_pages(&self, pages: Range<u64>) {
        let addresses = |pages: Range<usize>| {
            let first = self.first_page;
            let bytes = self.bytes_of(first + pages.start as u64..first + pages.end as u64);
            self.addr_of(bytes.start)..self.addr_of(bytes.end)
        };
        let (pages, count) = (self.at(pages.start)..self.at(pages.end), self.entries.count());
        match &self.own_pages {
            None => Self::reserve_again(&addresses(pages), || addresses(0..count)),
            Some(own_pages) => own_pages.bits.with(|bits| {
                for gap in bits.gaps(pages) {
                    let around = || addresses(bits.gap_around(gap.start, 0..count));
                    Self::reserve_again(&addresses(gap.clone()), around);
                }
            }),
        }
    }

    /// Ends the pieces of the view's own pages. Called once, when the window is not used any more.
    pub(super) fn forget_own_pages(&self) {
        let Some(own_pages) = &self.own_pages else { return };
        own_pages.bits.with(|bits| entry::change_own_pieces(-(bits.runs as isize)));
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    /// Searches over some sets of 200 pages must give the same results as over lists of booleans.
    #[test]
    fn gaps_are_found() {
        let sets: [&[usize]; 5] = [&[], &[0, 199], &[5, 6, 7, 70], &[63, 64, 128], &[127, 130]];
        for set in sets {
            let mut bits = Bits { words: vec![0; 4], runs: 0 };
            set.iter().for_each(|at| _ = bits.insert(*at));
            let runs = set.iter().filter(|at| !set.contains(&(**at + 1))).count();
            assert_eq!((bits.count(), bits.runs), (set.len(), runs), "{set:?}");
            let free: Vec<bool> = (0..200).map(|at| !set.contains(&at)).collect();
            for at in (0..200).filter(|at| free[*at]) {
                let begin = (0..at).rev().find(|at| !free[*at]).map_or(0, |at| at + 1);
                let end = (at..200).find(|at| !free[*at]).unwrap_or(200);
                assert_eq!(bits.gap_around(at, 0..200), begin..end, "{set:?}");
                let within = at.saturating_sub(3)..(at + 70).min(200);
                assert_eq!(
                    bits.gap_around(at, within.clone()),
                    begin.max(within.start)..end.min(within.end),
                    "{set:?}"
                );
            }
            let found: Vec<usize> = bits.gaps(3..150).flatten().collect();
            assert_eq!(found, (3..150).filter(|at| free[*at]).collect::<Vec<_>>(), "{set:?}");
            assert!(bits.gaps(3..150).all(|gap| !gap.is_empty()));
        }
    }
}
