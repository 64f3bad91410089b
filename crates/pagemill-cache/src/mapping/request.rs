//! Pages on their way in from a store: allocated and writable by their owner, but in no index yet.
#![allow(unsafe_code)] // lends memory that it has alone

use super::File;
use super::drivers::readahead::SHARE_DIVISOR;
use super::index::Content;
use super::inflight::{Conflict, InflightGuard, Kind, RequestId};
use super::policy::Cause;
use super::writeback::sync::failed;
use crate::folio::word::Prefetch;
use crate::folio::{NewFolio, Owner};
use pagemill_core::epoch;
use pagemill_core::error::Result;
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{Acquire, Relaxed};
use pagemill_core::units::BLOCK_BYTES;
use pagemill_store::{Aligned, Buffer, fills_all};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

pub(crate) const READING: &str = "reading a file into memory";

/// Pages that do not lie in a row are read into a buffer first, so many bytes at most.
const MOST_SCATTERED_BYTES: usize = BLOCK_BYTES / 8;

/// Pages that enter the index under one lock.
const MOST_TOGETHER: usize = 64;

/// What came of asking for a page.
pub(crate) enum Reserved {
    /// It is there.
    Present,
    /// Another brings it in.
    InFlight(Conflict),
    /// It is to be read: [`Unpublished::publish`] puts it into the index then.
    New(Unpublished),
}

/// Where the bytes go.
enum Memory {
    /// A folio, or pages that lie in a row: straight there.
    Row { number: u32, count: u32 },
    /// Pages here and there, by way of a buffer.
    Scattered { numbers: Box<[u32]>, buffer: Aligned },
}

impl Memory {
    fn count(&self) -> usize {
        match self {
            Self::Row { count, .. } => *count as usize,
            Self::Scattered { numbers, .. } => numbers.len(),
        }
    }

    fn number(&self, at: usize) -> u32 {
        match self {
            Self::Row { number, .. } => number + at as u32,
            Self::Scattered { numbers, .. } => numbers[at],
        }
    }
}

/// An unpublished folio, or several pages that follow each other in the file, under one request. Dropping it frees pages
/// that are not in the index, and completes the request.
///
/// # Invariants
///
/// Its pages from `entered` on were taken from the pool, and only this value frees them.
pub(crate) struct Unpublished {
    file: Arc<File>,
    request: RequestId,
    memory: Memory,
    /// So many of its pages are in the index.
    published: usize,
    /// Of a page, or of the huge folio.
    order: u8,
    /// First index.
    first: u64,
    /// So many bytes of it the store has; the others are zero, whatever it says.
    stored_bytes: usize,
    /// As of the beginning.
    revoked: u32,
    /// Purpose of the read.
    purpose: Prefetch,
    /// The requested page, and the requester's token.
    pub index: u64,
    pub token: u64,
}

impl Unpublished {
    /// Begins to bring a page in, with others around it if the policy says so. It may overtake another loose flight.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::NoMemory`] if no room can be made.
    pub fn reserve_for_queue(file: &Arc<File>, index: u64, token: u64, is_timed_out: bool) -> Result<Reserved> {
        let kind = if is_timed_out { Kind::CancellableTimedOut } else { Kind::Cancellable };
        let mut reserved = Self::reserve(file, index..index + 1, kind, Prefetch::Requested)?;
        if let Reserved::New(folio) = &mut reserved {
            folio.token = token;
        }
        Ok(reserved)
    }

    /// Begins to bring the first of some pages in, and as many of those behind it as come by one transfer: up to one that is
    /// there or underway. A huge folio is read as a whole.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::NoMemory`] if no room can be made.
    pub fn reserve(file: &Arc<File>, pages: Range<u64>, kind: Kind, purpose: Prefetch) -> Result<Reserved> {
        let index = pages.start;
        if file.has_page(index) {
            return Ok(Reserved::Present);
        }
        let revoked = file.revoked.load(Acquire);
        let is_huge = file.wants_huge(index, Cause::Read, &Content::Stored);
        let mut span = file.span_of(index);
        if !is_huge {
            let most_bytes = file.cache.limit_bytes / SHARE_DIVISOR;
            let most_pages = (most_bytes / file.page_bytes() as u64).max(1);
            span = index..pages.end.min(span.end).min(index + most_pages);
        }
        // It ends where this fails, also by a store that panics when it is to make room.
        let guard = match file.register(span.start, span.end - 1, kind) {
            Ok(id) => InflightGuard::new(&file.cache, id),
            Err(other) if is_huge || other.pages.0 <= index => return Ok(Reserved::InFlight(other)),
            Err(other) => {
                span.end = other.pages.0;
                match file.register(span.start, span.end - 1, kind) {
                    Ok(id) => InflightGuard::new(&file.cache, id),
                    Err(other) => return Ok(Reserved::InFlight(other)),
                }
            }
        };
        // From here on nothing comes; what is there already must not be reserved for.
        let present = file.tree.next(span.start, span.end - 1, &epoch::pin()).map(|found| found.first);
        if let Some(first) = present {
            if is_huge || first <= index {
                let other = Conflict { id: guard.id(), pages: (span.start, span.end - 1) };
                drop(guard);
                // A part of the range came meanwhile: it is small now.
                return Ok(if file.has_page(index) { Reserved::Present } else { Reserved::InFlight(other) });
            }
            span.end = first;
        }
        let (memory, order, first) = file.take_memory(index, &span, is_huge, purpose)?;
        let (len_bytes, end) =
            (file.cache.folio_bytes(order) * memory.count() as u64, first + ((memory.count() as u64) << order));
        if end < span.end || present.is_some() {
            file.cache.inflight.shorten(guard.id(), end - 1);
        }
        let stored_bytes =
            file.stored_bytes.load(Relaxed).saturating_sub(file.offset_of(first)).min(len_bytes) as usize;
        let (file, request, published, token) = (file.clone(), guard.into_id(), 0, 0);
        let folio =
            Self { file, request, memory, published, order, first, stored_bytes, revoked, purpose, index, token };
        Ok(Reserved::New(folio))
    }

    pub fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// Of its first page.
    pub fn number(&self) -> u32 {
        self.memory.number(0)
    }

    /// Returns whether no call has requested it yet.
    pub fn is_readahead(&self) -> bool {
        self.purpose == Prefetch::Readahead
    }

    pub fn request_id(&self) -> RequestId {
        self.request
    }

    /// Where it begins in the file, in bytes.
    pub fn offset(&self) -> u64 {
        self.file.offset_of(self.first)
    }

    /// The page behind its last.
    pub fn end(&self) -> u64 {
        self.first + ((self.memory.count() as u64) << self.order)
    }

    /// Whether the store has to be reserved at all.
    pub fn needs_store(&self) -> bool {
        self.stored_bytes > 0
    }

    /// Zeroes what was another's, should the store put in less than it says.
    pub fn prepare(&mut self) {
        if self.file.store.as_ref().is_some_and(|store| !fills_all(&**store)) {
            self.bytes_mut().fill(0);
        }
    }

    /// The bytes that the store has of it.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: type invariant, or the buffer's memory; mapped for as long as it is taken, and borrowed as the value is.
        unsafe { std::slice::from_raw_parts_mut(self.addr().as_ptr(), self.stored_bytes) }
    }

    /// Reads it at once, in this thread.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::Store`].
    pub fn read(&mut self) -> Result<()> {
        let file = self.file.clone();
        let Some(store) = file.store.as_ref().filter(|_| self.needs_store()) else { return Ok(()) };
        self.prepare();
        store.read(self.offset(), self.bytes_mut()).map_err(failed(READING))
    }

    /// Puts it into the index, now that it holds what the store has. Returns whether all of it is there; otherwise the file was
    /// cut meanwhile, or another came in between.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::NoAddresses`] without nodes for the index.
    pub fn finish(mut self) -> Result<bool> {
        self.publish()
    }

    /// As [`Unpublished::publish`]; the flight goes on until it is dropped.
    ///
    /// # Errors
    ///
    /// As [`Unpublished::publish`].
    pub fn publish(&mut self) -> Result<bool> {
        self.spread();
        let file = &*self.file;
        let count = self.memory.count();
        while self.published < count {
            let together = self.published..count.min(self.published + MOST_TOGETHER);
            let (first, last) = (self.index_at(together.start), self.index_at(together.end) - 1);
            for at in together.clone() {
                let number = self.memory.number(at);
                file.pool.set_owner(number, Owner { id: file.id, index: self.index_at(at) });
                file.reach_order(number, self.order)?;
            }
            let (mut writer, mut stock) = file.tree.lock_for(first, last, u32::from(self.order))?;
            if writer.next(first, last).is_some()
                || file.revoked.load(Relaxed) != self.revoked
                || file.is_closed.load(Relaxed)
                || !file.cache.inflight.contains(self.request)
            {
                // Nodes go back outside of the lock.
                drop(writer);
                return Ok(false);
            }
            for at in together {
                let (index, number) = (self.index_at(at), self.memory.number(at));
                let word = file.pool.word(number);
                word.publish(self.order, !file.cache.may_split, false);
                word.set_prefetched(self.purpose);
                writer.store(index, u32::from(self.order), u64::from(number), &mut stock);
                file.enter_order(index, number, self.order);
                self.published += 1;
            }
            drop(writer);
            file.note_made(first, self.order);
        }
        Ok(true)
    }

    fn index_at(&self, at: usize) -> u64 {
        self.first + ((at as u64) << self.order)
    }

    /// Brings the bytes where they belong; those that the store does not have are zero.
    fn spread(&mut self) {
        let (pool, stored, len) = (self.file.pool, self.stored_bytes, self.len_bytes());
        match &mut self.memory {
            Memory::Row { number, count } => {
                let page_bytes = len / *count as usize;
                for at in stored / page_bytes..*count as usize {
                    let from = stored.saturating_sub(at * page_bytes);
                    pool.zero(*number + at as u32, from, page_bytes - from);
                }
            }
            Memory::Scattered { numbers, buffer } => {
                buffer[stored..].fill(0);
                let pages = buffer.chunks_exact(len / numbers.len());
                numbers.iter().zip(pages).for_each(|(number, bytes)| pool.copy_in(*number, 0, bytes));
            }
        }
    }
}

impl Drop for Unpublished {
    fn drop(&mut self) {
        (self.published..self.memory.count()).for_each(|at| self.file.cache.free(self.memory.number(at), self.order));
        self.file.cache.inflight.complete(self.request);
    }
}

// SAFETY: mapped and writable for as long as it is taken, which is until the value is dropped (type invariant), or the
// buffer's own; no other code knows of it.
unsafe impl Buffer for Unpublished {
    fn addr(&self) -> NonNull<u8> {
        match &self.memory {
            // SAFETY: a pool does not begin at address 0.
            Memory::Row { number, .. } => unsafe { NonNull::new_unchecked(self.file.pool.addr(*number) as *mut u8) },
            Memory::Scattered { buffer, .. } => buffer.addr(),
        }
    }

    fn len_bytes(&self) -> usize {
        self.file.cache.folio_bytes(self.order) as usize * self.memory.count()
    }
}

impl File {
    /// Whether a page is in memory.
    pub(crate) fn has_page(&self, index: u64) -> bool {
        self.tree.find(index, &epoch::pin()).is_some()
    }

    /// Takes what a folio is to hold: a huge folio over the page, or as many pages of the span as are to be had for little.
    /// Returns also the order, and the first index.
    fn take_memory(
        &self,
        index: u64,
        span: &Range<u64>,
        is_huge: bool,
        purpose: Prefetch,
    ) -> Result<(Memory, u8, u64)> {
        let wanted = if is_huge { 1 } else { (span.end - span.start) as usize };
        if wanted > 1
            && let Some(memory) = self.take_some(wanted)
        {
            return Ok((memory, 0, index));
        }
        let (taken, first) = match purpose {
            Prefetch::Readahead => self.take_ahead(index, is_huge)?,
            Prefetch::Requested => self.take_for(index, is_huge)?,
        };
        Ok((Memory::Row { number: taken.number, count: 1 }, taken.order, first))
    }

    /// As [`File::take_for`], for a read without a waiting caller: evicts once, and fails if that frees too little.
    fn take_ahead(&self, index: u64, is_huge: bool) -> Result<(NewFolio, u64)> {
        let take = |order| match self.cache.allocate(order) {
            Err(_) if self.cache.evict_in_background(self.cache.folio_bytes(order)) => self.cache.allocate(order),
            taken => taken,
        };
        if is_huge {
            if let Ok(taken) = take(self.pool().chunk_order()) {
                return Ok((taken, self.span_of(index).start));
            }
            stats::add(Counter::HugeFallback, 1);
        }
        take(0).map(|taken| (taken, index))
    }

    /// Up to `wanted` pages at once: in a row, or if need be here and there.
    fn take_some(&self, wanted: usize) -> Option<Memory> {
        let wanted_bytes = (self.page_bytes() * wanted) as u64;
        if !self.cache.fits_limit(wanted_bytes) {
            self.cache.evict_in_background(wanted_bytes);
        }
        if let Some(number) = self.cache.allocate_contiguous(wanted as u32) {
            return Some(Memory::Row { number, count: wanted as u32 });
        }
        let most = wanted.min(MOST_SCATTERED_BYTES / self.page_bytes());
        let mut numbers = Vec::with_capacity(most);
        self.cache.allocate_more(most, |taken| numbers.push(taken.number));
        match numbers.len() {
            0 => None,
            1 => Some(Memory::Row { number: numbers[0], count: 1 }),
            count => {
                let buffer = Aligned::new(count * self.page_bytes(), self.page_bytes());
                Some(Memory::Scattered { numbers: numbers.into_boxed_slice(), buffer })
            }
        }
    }
}
