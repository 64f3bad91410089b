//! Readahead for sequential reads, and hints of the program about coming reads.
//!
//! Noted are accesses that find nothing, and the first ones to what came ahead: [`streams`](super::streams) tells from these what
//! comes next. Hits on all else are not, so they cost nothing.
//!
//! How much: a stream has two proposals ahead of it at most, each a 64th of the cache's limit at most; all reads ahead that
//! are on their way together a 16th. What comes ahead makes room as all that comes does; if there is none to be made, it does not come.

use super::behind::Behind;
use super::fill::{Asked, Filling};
use super::flights::Kind;
use super::policy::Choice;
use super::streams::{Rules, Streams};
use super::{File, Mapping};
use crate::folio::Frame;
use crate::folio::word::Prefetch;
use pagemill_core::epoch;
use pagemill_core::error::Result;
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{Guarded, Relaxed};
use pagemill_core::units::BLOCK_BYTES;
use pagemill_store::Buffer;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8};

/// The first proposal and the largest one, as elsewhere: 128 KiB and 2 MiB. Declared sequential reads have twice as
/// much.
const FIRST_BYTES: u64 = BLOCK_BYTES as u64 / 16;
const MOST_BYTES: u64 = BLOCK_BYTES as u64;

/// A proposal is this part of the cache's limit at most.
const PROPOSAL_DIVISOR: u64 = 64;

/// One transfer, and all that is on its way ahead, is this part of the cache's limit at most.
pub(super) const SHARE_DIVISOR: u64 = 16;

/// In which order a file is going to be read.
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
    /// As accesses show.
    #[default]
    Normal,
    /// Here and there: nothing is read ahead, and accesses are not looked at.
    Random,
    /// From the beginning to the end, or the other way: more is read ahead, from the first access on. It is believed: what is read here and
    /// there all the same brings much in for nothing.
    Sequential,
}

/// How often bytes of a file are going to be used.
///
/// Example: [`Advice`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reuse {
    /// Time and again, perhaps.
    #[default]
    Usual,
    /// Once: what comes in makes room before all else does, the oldest first, however often it is used after all.
    Once,
}

/// What is known of how a file is read.
#[derive(Default)]
pub(super) struct Reading {
    streams: Guarded<Streams>,
    advice: AtomicU8,
    is_once: AtomicBool,
}

impl Mapping {
    /// Says in which order this file is going to be read, from here on, as `posix_fadvise` does with `POSIX_FADV_NORMAL`,
    /// `_RANDOM` and `_SEQUENTIAL`. For files with a store.
    pub fn advise(&self, advice: Advice) {
        if let Some(behind) = &self.0.behind {
            behind.reading.advice.store(advice as u8, Relaxed);
        }
    }

    /// Says how often what comes in from here on is going to be used (`POSIX_FADV_NOREUSE`). For files with a store.
    pub fn advise_reuse(&self, reuse: Reuse) {
        if let Some(behind) = &self.0.behind {
            behind.reading.is_once.store(reuse == Reuse::Once, Relaxed);
        }
    }

    /// Starts reading what is missing of a range (`u64::MAX` bytes: up to the end), and returns at once with the number
    /// of those bytes (`POSIX_FADV_WILLNEED`). Fewer than are missing where a 16th of the cache's limit is in flight
    /// already, or no room can be made; 0 for a store that only blocks ([`pagemill_store::Store::is_asynchronous`]). A
    /// failed read is repeated by the call that needs its bytes.
    ///
    /// Cost: some microseconds for each transfer of up to 2 MiB.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::BadOffset`]; [`pagemill_core::Error::WrongState`] in a fork child.
    pub fn will_need(&self, offset: u64, len_bytes: u64) -> Result<u64> {
        let len_bytes = self.0.check_up_to(offset, len_bytes)?;
        Ok(self.0.read_ahead(std::iter::once(offset..offset + len_bytes)))
    }

    /// Evicts the folios of a range (`u64::MAX` bytes: up to the end; `POSIX_FADV_DONTNEED`): clean ones that lie
    /// wholly in it and are not pinned. Written bytes stay until [`Mapping::sync`]. Returns the bytes that came free.
    ///
    /// Cost: that of eviction, a few hundred instructions for each folio.
    ///
    /// # Errors
    ///
    /// As [`Mapping::will_need`].
    pub fn dont_need(&self, offset: u64, len_bytes: u64) -> Result<u64> {
        let file = &*self.0;
        let len_bytes = file.check_up_to(offset, len_bytes)?;
        if file.store.is_none() {
            return Ok(0);
        }
        // The last page may end with the file.
        let end = offset + len_bytes;
        let end = if end >= file.size_bytes() { end.max(file.max_bytes()) } else { end };
        let (first, end) = (file.index_of(offset.next_multiple_of(file.page_bytes() as u64)), file.index_of(end));
        let (mut at, mut freed) = (first, 0);
        while at < end
            && let Some(found) = { file.tree.next(at, end - 1, &epoch::pin()) }
        {
            at = found.last() + 1;
            let is_inside = found.first >= first && at <= end;
            if let Some(order) = is_inside.then(|| file.evict_at(found.first, found.value as u32)).flatten() {
                freed += file.cache.folio_bytes(order);
            }
        }
        Ok(freed)
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
    /// Whether what comes in is used once.
    pub(super) fn is_once(&self) -> bool {
        self.behind.as_ref().is_some_and(|behind| behind.reading.is_once.load(Relaxed))
    }

    /// Records the first use of a folio that was read ahead.
    #[cold]
    pub(super) fn note_first_use(&self, frame: &Frame, offset: u64, len_bytes: usize) {
        stats::add(Counter::ReadAheadUsed, self.cache.folio_bytes(frame.word.load().order()));
        self.note_access(offset, len_bytes);
    }

    /// Records a read of bytes that are not in memory, or were read ahead. If reads are sequential, starts reading what
    /// follows.
    pub(super) fn note_access(&self, offset: u64, len_bytes: usize) {
        let Some(behind) = &self.behind else { return };
        let advice = behind.reading.advice();
        if advice == Advice::Random || !self.is_asynchronous() {
            return;
        }
        let Some(rules) = self.rules(advice, self.index_of(offset)) else { return };
        let access = offset..offset + len_bytes.max(1) as u64;
        let size_bytes = self.size_bytes();
        // A concurrent access is not recorded, so that no thread waits here.
        let noted = behind.reading.streams.try_with(|streams| streams.note(access, size_bytes, &rules));
        if let Some(proposal) = noted.flatten() {
            self.read_ahead(proposal.ranges());
        }
    }

    pub(super) fn is_asynchronous(&self) -> bool {
        self.store.as_ref().is_some_and(|store| store.is_asynchronous())
    }

    /// `None` where the cache has no room to read ahead.
    fn rules(&self, advice: Advice, index: u64) -> Option<Rules> {
        let limit_bytes = self.cache.limit_bytes;
        let is_eager = advice == Advice::Sequential;
        let is_huge =
            self.pool.chunk_order() > 0 && self.cache.is_huge_allowed() && self.choose_for_hole(index) == Choice::Huge;
        let page_bytes = if is_huge { self.pool.chunk_bytes() } else { self.page_bytes() } as u64;
        let most_bytes = MOST_BYTES.min(limit_bytes / PROPOSAL_DIVISOR) << u32::from(is_eager);
        let most_bytes = (most_bytes - most_bytes % page_bytes).max(page_bytes);
        let rules = Rules { page_bytes, first_bytes: FIRST_BYTES.clamp(page_bytes, most_bytes), most_bytes, is_eager };
        (most_bytes <= limit_bytes / SHARE_DIVISOR).then_some(rules)
    }

    /// Starts reading what is missing of some ranges, as far as there is room. Returns the bytes.
    pub(super) fn read_ahead(&self, ranges: impl Iterator<Item = Range<u64>>) -> u64 {
        let can_read = self.is_asynchronous();
        let Some(file) = can_read.then(|| self.cache.file(self.id)).flatten() else { return 0 };
        let mut fillings: Vec<Filling> = Vec::new();
        for range in ranges {
            let end = range.end.min(self.size_bytes());
            if range.start >= end {
                continue;
            }
            if !file.begin_ahead(self.index_of(range.start)..self.index_of(end - 1) + 1, &mut fillings) {
                break;
            }
        }
        let started = fillings.iter().map(|filling| filling.len_bytes() as u64).sum();
        stats::add(Counter::ReadAheadTransfers, fillings.len() as u64);
        self.start_all(fillings.into_iter().map(|filling| (filling, None)).collect());
        started
    }

    /// Begins to bring in what is missing of some pages. Returns whether there was room for all of it.
    fn begin_ahead(self: &Arc<Self>, pages: Range<u64>, fillings: &mut Vec<Filling>) -> bool {
        let most_bytes = self.cache.limit_bytes / SHARE_DIVISOR;
        let mut at = pages.start;
        while at < pages.end {
            if let Some(behind) = self.behind_page(at) {
                at = behind;
                continue;
            }
            let left = most_bytes.saturating_sub(self.cache.ahead_bytes.load(Relaxed));
            let end = pages.end.min(at + left / self.page_bytes() as u64);
            if at >= end {
                return false;
            }
            match Filling::begin_some(self, at..end, Kind::Behind, Prefetch::Readahead) {
                Ok(Asked::Begun(filling)) => {
                    self.cache.ahead_bytes.fetch_add(filling.len_bytes() as u64, Relaxed);
                    at = filling.end();
                    fillings.push(filling);
                }
                Ok(Asked::Present) => {}
                Ok(Asked::Underway(other)) => at = at.max(other.pages.1) + 1,
                Err(_) => return false,
            }
        }
        true
    }

    /// The page behind the folio that has a page; `None` if none has.
    fn behind_page(&self, index: u64) -> Option<u64> {
        let guard = epoch::pin();
        self.tree.find(index, &guard).map(|hit| hit.found().last() + 1)
    }
}

impl Behind {
    /// A read ahead is over.
    pub(super) fn note_ahead(filling: &Filling, has_come: bool) {
        let len_bytes = filling.len_bytes() as u64;
        filling.file().cache.ahead_bytes.fetch_sub(len_bytes, Relaxed);
        if has_come {
            stats::add(Counter::ReadAhead, len_bytes);
        }
    }
}
