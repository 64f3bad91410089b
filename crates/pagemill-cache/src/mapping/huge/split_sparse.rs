//! Sparse huge folios: splits huge folios whose pages are mostly zeros or past the end of the file, and frees these
//! pages.

use crate::folio::Owner;
use crate::folio::word::Kind;
use crate::mapping::cache::Inner;
use crate::mapping::policy::Choice;
use crate::mapping::{File, Mapping};
use pagemill_core::epoch;
use pagemill_core::error::Result;
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{Relaxed, coarse_ns};

/// Delay before the next attempt to split sparse huge folios after an attempt that freed nothing.
const SPLIT_SPARSE_RETRY_NS: u64 = 100_000_000;

/// A huge folio is split only if at least `1 / MIN_FREED_DIVISOR` of it can be freed.
const MIN_FREED_DIVISOR: u64 = 4;

/// Result of checking whether a huge folio is sparse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SparseSplitOutcome {
    /// The folio is not sparse enough to be split.
    Dense,
    /// The folio is in use, so it was not split.
    Refused,
    /// The folio was split, and this many bytes were freed.
    Split(u64),
}

impl SparseSplitOutcome {
    pub fn freed_bytes(self) -> u64 {
        if let Self::Split(bytes) = self { bytes } else { 0 }
    }
}

impl Mapping {
    /// Frees unused pages in huge folios of the file: pages past its end, and pages of zeros. Splits a huge folio only
    /// if at least a quarter of it can be freed. Returns the bytes freed. Does nothing for a file with a store.
    ///
    /// Cost: a check of all bytes in huge folios.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::WrongState`] in a fork child.
    pub fn split_sparse(&self) -> Result<u64> {
        self.0.check(0, 0)?;
        Ok(self.0.split_sparse_all())
    }
}

impl File {
    /// As [`Mapping::split_sparse`], without the check for a fork child.
    pub(crate) fn split_sparse_all(&self) -> u64 {
        if self.store.is_some() {
            return 0;
        }
        let huge = self.folios(0..Owner::MAX_INDEX).filter(|found| found.order > 0);
        let split =
            huge.map(|found| self.split_sparse_at(found.first, found.value as u32, Counter::HugeSplitForReclaim));
        split.map(SparseSplitOutcome::freed_bytes).sum()
    }

    /// Splits a huge folio and frees its unused pages (zero, or past the end of the file), if at least a quarter of the
    /// pages are unused.
    ///
    /// The background scan passes `Counter::HugeSplitBehind`. If all pages are unused, one of them is then kept,
    /// provided that the cache's policy allocates a folio for a read of a hole: the next read would only allocate a
    /// folio again.
    pub(crate) fn split_sparse_at(&self, first: u64, number: u32, counter: Counter) -> SparseSplitOutcome {
        let pages = 1 << self.pool.chunk_order;
        if self.is_locked_in_memory(first..first + pages) {
            return SparseSplitOutcome::Refused;
        }
        // The first check takes no pin or lock, so each page is checked again below.
        let end = self.index_of(self.size_bytes() + self.page_bytes() as u64 - 1);
        let is_live = self.pool.word(number).load().kind() == Kind::Live;
        let is_empty = |page: u64| is_live && (first + page >= end || self.pool.is_page_zero(number + page as u32));
        let empty = (0..pages).filter(|page| is_empty(*page)).count() as u64;
        if empty < pages / MIN_FREED_DIVISOR {
            return SparseSplitOutcome::Dense;
        }
        if !matches!(self.split_at(first, counter), Ok(true)) {
            return SparseSplitOutcome::Refused;
        }
        let would_be_allocated_again = || self.choose_for_hole(first) != Choice::Nothing;
        let kept_pages = u64::from(counter == Counter::HugeSplitBehind && empty == pages && would_be_allocated_again());
        let freed = (first + kept_pages..first + pages).filter(|index| self.free_zero_page(*index)).count();
        let bytes = freed as u64 * self.page_bytes() as u64;
        stats::add(Counter::CacheThinned, bytes);
        SparseSplitOutcome::Split(bytes)
    }

    /// Frees the small folio at page `index` if all of its bytes are zero. Returns whether the folio was freed.
    fn free_zero_page(&self, index: u64) -> bool {
        let number = {
            let guard = epoch::pin();
            let Some(hit) = self.tree.find(index, &guard) else { return false };
            let number = hit.value() as u32;
            let Ok(state) = self.pool.word(number).hold() else { return false };
            if !hit.is_still() || state.order() > 0 || self.is_locked_in_memory(index..index + 1) {
                self.end_hold(number);
                return false;
            }
            number
        };
        // The hold keeps writers out. Once the page is out of the index, a later write allocates a new one.
        let is_zero = self.pool.is_page_zero(number);
        let is_removed = is_zero && self.tree.lock().erase_value(index, u64::from(number)).is_some();
        if is_removed {
            self.cache.free(number, 0);
        } else {
            self.end_hold(number);
        }
        is_removed
    }
}

impl Inner {
    /// Splits sparse huge folios of the cache's files until `want_bytes` are freed. Returns whether that many bytes
    /// were freed.
    ///
    /// After an attempt that freed nothing, the next attempt is delayed. Without the delay, each write at the limit
    /// would check all bytes of all huge folios.
    pub(crate) fn split_sparse_some(&self, want_bytes: u64) -> bool {
        if coarse_ns() < self.split_sparse_after_ns.load(Relaxed) {
            return false;
        }
        let (mut freed, mut id) = (0, 0);
        while freed < want_bytes
            && let Some(file) = self.next_file(&mut id)
        {
            freed += file.split_sparse_all();
        }
        if freed == 0 {
            self.split_sparse_after_ns.store(coarse_ns() + SPLIT_SPARSE_RETRY_NS, Relaxed);
        }
        freed >= want_bytes
    }
}
