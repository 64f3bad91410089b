//! Readahead for sequential reads, and hints of the program about coming reads.
//!
//! Records accesses that find no folio, and first uses of prefetched folios.
//! [`streams`](crate::mapping::drivers::streams) detects streams from these and proposes ranges to read. Other hits are
//! not recorded, so they cost nothing.
//!
//! A stream has at most two proposals ahead of it, each at most a 64th of the cache's limit. All in-flight readahead of
//! a cache is at most a 16th of the limit. Readahead evicts folios as other reads do, and stops if that frees too
//! little.

use crate::folio::Frame;
use crate::mapping::drivers::streams::{Rules, Streams};
use crate::mapping::inflight::Kind;
use crate::mapping::policy::Choice;
use crate::mapping::request::{Purpose, Reserved, Unpublished};
use crate::mapping::{File, Mapping};
use pagemill_core::epoch;
use pagemill_core::error::Result;
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{Guarded, Relaxed};
use pagemill_core::units::BLOCK_BYTES;
use pagemill_store::Buffer;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8};

/// Length of a stream's first proposal: 128 KiB.
const FIRST_BYTES: u64 = BLOCK_BYTES as u64 / 16;

/// Maximum length of a proposal: 2 MiB. With [`Advice::Sequential`] twice as much.
const MAX_PROPOSAL_BYTES: u64 = BLOCK_BYTES as u64;

/// A proposal is at most the cache's limit divided by this.
const PROPOSAL_DIVISOR: u64 = 64;

/// One transfer, and all in-flight readahead, is at most the cache's limit divided by this.
pub(crate) const SHARE_DIVISOR: u64 = 16;

/// The order in which a program will read a file.
///
/// ```
/// use pagemill::cache::{Advice, PageCache, Reuse};
/// use pagemill::store::MemoryStore;
/// use std::sync::Arc;
///
/// let cache = PageCache::builder("scans").limit(64 << 20).build()?;
/// let file = cache.open(Arc::new(MemoryStore::new(vec![7; 1 << 20], 512)))?;
/// file.advise(Advice::Random); // no readahead
/// file.advise_reuse(Reuse::Usual); // no early eviction
/// assert_eq!(file.read_at(&mut [0; 100], 5000)?, 100);
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Advice {
    /// Detect streams from the accesses.
    #[default]
    Normal,
    /// Random order. Disables readahead.
    Random,
    /// In order, forwards or backwards. Reads more ahead, from the first access on. Random reads of such a file load
    /// many pages that are not used.
    Sequential,
}

/// How often a program will use the bytes of a file.
///
/// Example: [`Advice`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reuse {
    /// Perhaps several times.
    #[default]
    Usual,
    /// Once. New folios are evicted before all others, in FIFO order, even if they are used more often.
    Once,
}

/// Hints of the program about a file's reads, and the detected streams.
#[derive(Default)]
pub(crate) struct Reading {
    streams: Guarded<Streams>,
    advice: AtomicU8,
    is_once: AtomicBool,
}

impl Mapping {
    /// Sets the order in which the program will read this file, as `posix_fadvise` does with `POSIX_FADV_NORMAL`,
    /// `_RANDOM` and `_SEQUENTIAL`. Does nothing for files without a store.
    pub fn advise(&self, advice: Advice) {
        if let Some(reads) = &self.0.reads {
            reads.reading.advice.store(advice as u8, Relaxed);
        }
    }

    /// Sets how often the program will use pages that are read or written from now on (`POSIX_FADV_NOREUSE`). Does
    /// nothing for files without a store.
    pub fn advise_reuse(&self, reuse: Reuse) {
        if let Some(reads) = &self.0.reads {
            reads.reading.is_once.store(reuse == Reuse::Once, Relaxed);
        }
    }

    /// Starts reads of the missing pages of a range (`u64::MAX` bytes: up to the end), and does not wait for the reads
    /// (`POSIX_FADV_WILLNEED`). Returns the number of bytes that will be read. Starts fewer reads if a 16th of the
    /// cache's limit is in flight, or if eviction frees too little. Returns 0 for a store with blocking calls only
    /// ([`pagemill_store::Store::is_asynchronous`]). If a read fails, the call that needs the bytes repeats it.
    ///
    /// Cost: some microseconds for each transfer of up to 2 MiB.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::BadOffset`]. [`pagemill_core::Error::WrongState`] in a fork child.
    pub fn will_need(&self, offset: u64, len_bytes: u64) -> Result<u64> {
        let len_bytes = self.0.check_up_to(offset, len_bytes)?;
        Ok(self.0.read_ahead(std::iter::once(offset..offset + len_bytes)))
    }

    /// Evicts the clean, unpinned folios that lie completely in a range (`u64::MAX` bytes: up to the end;
    /// `POSIX_FADV_DONTNEED`). Dirty folios stay until [`Mapping::sync`]. Returns the bytes freed.
    ///
    /// Cost: that of eviction, a few hundred instructions for each folio.
    ///
    /// # Errors
    ///
    /// See [`Mapping::will_need`].
    pub fn dont_need(&self, offset: u64, len_bytes: u64) -> Result<u64> {
        let file = &*self.0;
        let len_bytes = file.check_up_to(offset, len_bytes)?;
        if file.store.is_none() {
            return Ok(0);
        }
        // If the range reaches the end of the file, the last page lies completely in it.
        let end = offset + len_bytes;
        let end = if end >= file.size_bytes() { end.max(file.max_bytes()) } else { end };
        let (first, end) = (file.index_of(offset.next_multiple_of(file.page_bytes() as u64)), file.index_of(end));
        let folios = file.folios(first..end).filter(|found| found.first >= first && found.last() < end);
        let evicted = folios.filter_map(|found| file.evict_at(found.first, found.value as u32, found.order as u8));
        Ok(evicted.map(|order| file.cache.folio_bytes(order)).sum())
    }
}

impl Reading {
    fn advice(&self) -> Advice {
        match self.advice.load(Relaxed) {
            at if at == Advice::Random as u8 => Advice::Random,
            at if at == Advice::Sequential as u8 => Advice::Sequential,
            _ => Advice::Normal,
        }
    }
}

impl File {
    /// Returns whether new folios of the file are evicted first ([`Reuse::Once`]).
    pub(crate) fn is_once(&self) -> bool {
        self.reads.as_ref().is_some_and(|reads| reads.reading.is_once.load(Relaxed))
    }

    /// Records the first use of a folio that was read ahead.
    #[cold]
    pub(crate) fn note_first_use(&self, frame: &Frame, offset: u64, len_bytes: usize) {
        stats::add(Counter::ReadAheadUsed, self.cache.folio_bytes(frame.word.load().order()));
        self.note_access(offset, len_bytes);
    }

    /// Records a read of bytes that are not in memory, or were read ahead. If reads are sequential, starts reading what
    /// follows.
    pub(crate) fn note_access(&self, offset: u64, len_bytes: usize) {
        let Some(reads) = &self.reads else { return };
        let advice = reads.reading.advice();
        if advice == Advice::Random || !self.is_asynchronous() {
            return;
        }
        let Some(rules) = self.rules(advice, self.index_of(offset)) else { return };
        let access = offset..offset + len_bytes.max(1) as u64;
        let size_bytes = self.size_bytes();
        // A concurrent access is not recorded, so that no thread waits here.
        let noted = reads.reading.streams.try_with(|streams| streams.note(access, size_bytes, &rules));
        if let Some(proposal) = noted.flatten() {
            self.read_ahead(proposal.ranges());
        }
    }

    pub(crate) fn is_asynchronous(&self) -> bool {
        self.store.as_ref().is_some_and(|store| store.is_asynchronous())
    }

    /// Returns the rules for proposals at a page, or `None` if the cache is too small for readahead.
    fn rules(&self, advice: Advice, index: u64) -> Option<Rules> {
        let limit_bytes = self.cache.limit_bytes;
        let is_eager = advice == Advice::Sequential;
        let is_huge =
            self.pool.chunk_order > 0 && self.cache.is_huge_allowed() && self.choose_for_hole(index) == Choice::Huge;
        let page_bytes = if is_huge { self.pool.chunk_bytes } else { self.page_bytes() } as u64;
        let most_bytes = MAX_PROPOSAL_BYTES.min(limit_bytes / PROPOSAL_DIVISOR) << u32::from(is_eager);
        let most_bytes = (most_bytes - most_bytes % page_bytes).max(page_bytes);
        let rules = Rules { page_bytes, first_bytes: FIRST_BYTES.clamp(page_bytes, most_bytes), most_bytes, is_eager };
        (most_bytes <= limit_bytes / SHARE_DIVISOR).then_some(rules)
    }

    /// Starts reads of the missing pages of some ranges, as far as there is room. Returns their bytes.
    pub(crate) fn read_ahead(&self, ranges: impl Iterator<Item = Range<u64>>) -> u64 {
        let can_read = self.is_asynchronous();
        let Some(file) = can_read.then(|| self.this.upgrade()).flatten() else { return 0 };
        let mut folios: Vec<Unpublished> = Vec::new();
        for range in ranges {
            let end = range.end.min(self.size_bytes());
            if range.start >= end {
                continue;
            }
            if !file.reserve_ahead(self.index_of(range.start)..self.index_of(end - 1) + 1, &mut folios) {
                break;
            }
        }
        let started = folios.iter().map(|folio| folio.len_bytes() as u64).sum();
        stats::add(Counter::ReadAheadTransfers, folios.len() as u64);
        self.submit_all(folios.into_iter().map(|folio| (folio, None)).collect());
        started
    }

    /// Reserves folios for the missing ones of some pages. Returns whether there was room for all of them.
    fn reserve_ahead(self: &Arc<Self>, pages: Range<u64>, folios: &mut Vec<Unpublished>) -> bool {
        let most_bytes = self.cache.limit_bytes / SHARE_DIVISOR;
        let mut at = pages.start;
        while at < pages.end {
            if let Some(next) = self.page_after_folio(at) {
                at = next;
                continue;
            }
            let left = most_bytes.saturating_sub(self.cache.ahead_bytes.load(Relaxed));
            let end = pages.end.min(at + left / self.page_bytes() as u64);
            if at >= end {
                return false;
            }
            match Unpublished::reserve(self.clone(), at..end, Kind::Uncancellable, Purpose::Readahead) {
                Ok(Reserved::New(folio)) => {
                    at = folio.end();
                    folios.push(folio);
                }
                Ok(Reserved::Present) => at += 1,
                Ok(Reserved::InFlight(other)) => at = at.max(other.pages.1) + 1,
                Err(_) => return false,
            }
        }
        true
    }

    /// Returns the index of the first page after the folio that contains page `index`. Returns `None` if the page has
    /// no folio.
    fn page_after_folio(&self, index: u64) -> Option<u64> {
        let guard = epoch::pin();
        self.tree.find(index, &guard).map(|hit| hit.found().last() + 1)
    }
}
