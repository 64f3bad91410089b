//! Unpublished folios: allocated and filled by one request, in no index yet.
//!
//! A read has three steps. *Reserve* registers a request in the table of in-flight reads and allocates memory. *Submit*
//! gives the read to the store. *Publish*, after the store has completed the read, enters the folio into the index.
//! Dropping the value ends the request (`InflightTable::complete`).
//!
//! A write reserves memory, fills it, and registers its request just before it publishes the folio.
#![allow(unsafe_code)] // the memory of unpublished folios as slices and buffers

use super::File;
use super::drivers::readahead::SHARE_DIVISOR;
use super::evict::order::GhostKey;
use super::inflight::{Conflict, Kind, RequestId};
use super::policy::Cause;
use super::writeback::dirty::DIRTY;
use super::writeback::sync::failed;
use crate::folio::word::Prefetch;
use crate::folio::{NewFolio, Owner, Pool};
use pagemill_core::epoch;
use pagemill_core::error::Result;
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{Acquire, Relaxed};
use pagemill_core::trace::Event;
use pagemill_core::units::BLOCK_BYTES;
use pagemill_store::{Aligned, Buffer, fills_all};
use std::ops::{Deref, Range};
use std::ptr::NonNull;
use std::sync::Arc;

/// Name of the operation in errors of the store.
pub(crate) const READING: &str = "reading a file into memory";

/// Maximum number of bytes of one read into pages that are not contiguous in memory. Such a read needs a buffer.
const MAX_SCATTERED_BYTES: usize = BLOCK_BYTES / 8;

/// Minimum length of contiguous pages for a request that wants more. Shorter runs would make many short transfers.
const MIN_CONTIGUOUS_BYTES: usize = BLOCK_BYTES / 32;

/// Maximum number of pages that are published, or created by a write, in one acquisition of the index's lock.
pub(crate) const MAX_BATCH_PAGES: usize = 64;

/// Why pages are read into memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A read. The use by the waiting call is not counted.
    Read,
    /// Readahead. The first use is reported, and not counted.
    Readahead,
    /// A pin, or a write to a part of a page.
    Write,
    /// An access through a view.
    Fault,
}

impl Purpose {
    fn policy_cause(self) -> Cause {
        match self {
            Self::Read | Self::Readahead => Cause::Read,
            Self::Write => Cause::Write,
            Self::Fault => Cause::Fault,
        }
    }

    fn prefetched(self) -> Option<Prefetch> {
        match self {
            Self::Read => Some(Prefetch::Requested),
            Self::Readahead => Some(Prefetch::Readahead),
            Self::Write | Self::Fault => None,
        }
    }
}

/// Result of [`Unpublished::reserve`].
pub(crate) enum Reserved<F: Deref<Target = File> = Arc<File>> {
    /// The page is in memory.
    Present,
    /// Another request reads the page.
    InFlight(Conflict),
    /// The caller must read the page and publish it.
    New(Unpublished<F>),
}

/// The memory of an unpublished folio.
///
/// # Invariants
///
/// Only the owner of this value accesses the pages that are not published.
enum Memory {
    /// `count` folios that are contiguous in memory, from page `number` on: pages, or one huge folio. The store's read
    /// fills them without a bounce buffer. `is_zero`: all bytes were zero at the allocation.
    Contiguous { number: u32, count: u32, is_zero: bool },
    /// Pages that are not contiguous in memory. The store's read fills the buffer; a write needs none.
    Scattered { numbers: Vec<u32>, buffer: Option<Aligned> },
}

/// Panic message if pages without a buffer are read.
const NO_BUFFER: &str = "scattered pages are read into a buffer";

impl Memory {
    fn count(&self) -> usize {
        match self {
            Self::Contiguous { count, .. } => *count as usize,
            Self::Scattered { numbers, .. } => numbers.len(),
        }
    }

    fn number(&self, at: usize) -> u32 {
        match self {
            Self::Contiguous { number, .. } => number + at as u32,
            Self::Scattered { numbers, .. } => numbers[at],
        }
    }

    /// Returns whether all bytes were zero at the allocation.
    fn is_zero(&self) -> bool {
        matches!(self, Self::Contiguous { is_zero: true, .. })
    }

    /// Returns the address that a read of the store fills: that of the buffer for scattered pages, otherwise that of
    /// the first page.
    fn addr(&self, pool: &Pool) -> NonNull<u8> {
        match self {
            Self::Scattered { buffer, .. } => buffer.as_ref().expect(NO_BUFFER).addr(),
            // SAFETY: a pool does not begin at address 0.
            _ => unsafe { NonNull::new_unchecked(pool.addr(self.number(0)) as *mut u8) },
        }
    }

    /// Returns the first `len_bytes` bytes of the memory that a read of the store fills. `order` is that of the folios.
    fn bytes_mut(&mut self, pool: &Pool, order: u8, len_bytes: usize) -> &mut [u8] {
        match self {
            Self::Contiguous { number, count, .. } => {
                assert!(len_bytes <= (*count as usize * pool.page.bytes()) << order, "the bytes lie in the pages");
                // SAFETY: the pages are mapped while they are allocated, and this value has exclusive access (type
                // invariant).
                unsafe { std::slice::from_raw_parts_mut(pool.addr(*number) as *mut u8, len_bytes) }
            }
            Self::Scattered { buffer, .. } => &mut buffer.as_mut().expect(NO_BUFFER)[..len_bytes],
        }
    }
}

/// An unpublished folio, or unpublished pages that are contiguous in the file. Dropping it frees the pages that were
/// not published, and completes the request.
///
/// The file is an `Arc`, or a reference if the thread that reserves the folio also publishes it.
///
/// # Invariants
///
/// The pages from `published` on are allocated, and only this value frees them.
pub(crate) struct Unpublished<F: Deref<Target = File> = Arc<File>> {
    pub file: F,
    /// `None` for a file without a store, and for a write that is not complete yet.
    request: Option<RequestId>,
    is_cancellable: bool,
    memory: Memory,
    /// Number of published pages.
    published: usize,
    /// Order of each folio.
    order: u8,
    /// Index of the first page.
    first: u64,
    /// Number of bytes that are read from the store. The others are zero.
    stored_bytes: usize,
    /// Whether the store's read did not write to the bytes after the first `stored_bytes`, because its buffer ended
    /// there.
    is_rest_unread: bool,
    /// [`File::revoked`] at the reservation.
    revoked: u32,
    /// The bytes of the file that a write has filled. `None` if the folio is clean.
    written: Option<Range<u64>>,
    /// The bytes of readahead are counted as in flight (`Inner::ahead_bytes`). Dropping the value ends that.
    purpose: Purpose,
    /// The requested page, and the token of a queue's caller.
    pub index: u64,
    pub token: u64,
}

impl<F: Deref<Target = File>> Unpublished<F> {
    /// Registers a request for the first of some missing pages, and following ones that the same transfer can read: up
    /// to a page that is in memory or in flight. A huge folio is read as a whole. Allocates the memory. For files
    /// without a store, there is no request.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::NoMemory`] if eviction frees too little.
    pub fn reserve(file: F, pages: Range<u64>, kind: Kind, purpose: Purpose) -> Result<Reserved<F>> {
        let index = pages.start;
        let revoked = file.revoked.load(Acquire);
        let is_huge = file.wants_huge(index, purpose.policy_cause(), file.offset_of(index)..file.offset_of(index + 1));
        let mut span = file.span_of(index);
        if !is_huge {
            let max_bytes = file.cache.limit_bytes / SHARE_DIVISOR;
            let max_pages = (max_bytes / file.page_bytes() as u64).max(1);
            span = index..pages.end.min(span.end).min(index + max_pages);
        }
        if file.store.is_none() {
            let allocated = file.allocate_memory(index, &span, is_huge, purpose)?;
            return Ok(Reserved::New(Self::new(file, allocated, revoked, purpose)));
        }
        // Registered before the allocation: a thread that waits for another request needs no memory. The guard
        // completes the request on errors, and if a store panics during the allocation.
        let guard = match file.register(span.start, span.end - 1, kind) {
            Ok(guard) => guard,
            Err(other) if is_huge || other.pages.0 <= index => return Ok(Reserved::InFlight(other)),
            Err(other) => {
                span.end = other.pages.0;
                match file.register(span.start, span.end - 1, kind) {
                    Ok(guard) => guard,
                    Err(other) => return Ok(Reserved::InFlight(other)),
                }
            }
        };
        // No page enters the span from here on. Pages that are in it already are not read.
        let present = file.tree.next(span.start, span.end - 1, &epoch::pin()).map(|found| found.first);
        if let Some(first) = present {
            if is_huge || first <= index {
                // If only other pages of a huge span are in memory, the next attempt chooses a small folio.
                let own = Conflict { id: guard.id, pages: (span.start, span.end - 1) };
                drop(guard);
                return Ok(if file.has_page(index) { Reserved::Present } else { Reserved::InFlight(own) });
            }
            span.end = first;
        }
        let allocated = file.allocate_memory(index, &span, is_huge, purpose)?;
        let request = guard.into_id();
        let mut folio = Self::new(file, allocated, revoked, purpose);
        (folio.request, folio.is_cancellable, folio.index) = (Some(request), kind != Kind::Uncancellable, index);
        if folio.end() < span.end || present.is_some() {
            folio.file.cache.inflight.shorten(request, folio.end() - 1);
        }
        Ok(Reserved::New(folio))
    }

    /// Allocates a huge folio over page `index`, or up to `pages` pages from there on, for a write. The caller fills
    /// them before it calls [`Unpublished::register`].
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::NoMemory`]. [`pagemill_core::Error::Store`] if dirty folios cannot be written back.
    pub fn reserve_for_write(file: F, index: u64, is_huge: bool, pages: usize) -> Result<Self> {
        let revoked = file.revoked.load(Acquire);
        if pages > 1 && file.store.is_some() {
            let wanted_bytes = (file.page_bytes() * pages) as u64;
            // Contiguous pages are written back without a copy.
            let has_room = file.cache.fits_limit(wanted_bytes) || file.cache.evict_in_background(wanted_bytes);
            if let Some(memory) = has_room.then(|| file.allocate_contiguous_pages(pages)).flatten() {
                return Ok(Self::new(file, (memory, 0, index), revoked, Purpose::Write));
            }
        }
        let allocated = file.allocate_folio(index, is_huge, Purpose::Write)?;
        let mut new = Self::new(file, allocated, revoked, Purpose::Write);
        if pages > 1 {
            let mut numbers = Vec::with_capacity(pages);
            numbers.push(new.number());
            new.file.cache.allocate_more(pages - 1, |page| numbers.push(page.number));
            new.memory = Memory::Scattered { numbers, buffer: None };
        }
        Ok(new)
    }

    /// Creates the value for allocated memory. `allocated` has also the order of the folios, and the first index.
    fn new(file: F, allocated: (Memory, u8, u64), revoked: u32, purpose: Purpose) -> Self {
        let (memory, order, first) = allocated;
        let len_bytes = file.cache.folio_bytes(order) * memory.count() as u64;
        if purpose == Purpose::Readahead {
            file.cache.ahead_bytes.fetch_add(len_bytes, Relaxed);
        }
        let stored = file.stored_bytes.load(Relaxed).saturating_sub(file.offset_of(first));
        Self {
            file,
            request: None,
            is_cancellable: false,
            memory,
            published: 0,
            order,
            first,
            stored_bytes: stored.min(len_bytes) as usize,
            is_rest_unread: false,
            revoked,
            written: None,
            purpose,
            index: first,
            token: 0,
        }
    }

    /// Returns the page number of the first page.
    pub fn number(&self) -> u32 {
        self.memory.number(0)
    }

    pub fn is_readahead(&self) -> bool {
        self.purpose == Purpose::Readahead
    }

    /// Returns the id of the request, which each reserved folio of a file with a store has.
    pub fn request_id(&self) -> RequestId {
        self.request.expect("a read of a store has a request")
    }

    /// Returns the offset of the first byte in the file.
    pub fn offset(&self) -> u64 {
        self.file.offset_of(self.first)
    }

    /// Returns the index of the page after the last one.
    pub fn end(&self) -> u64 {
        self.index_at(self.memory.count())
    }

    fn index_at(&self, at: usize) -> u64 {
        self.first + ((at as u64) << self.order)
    }

    pub fn total_bytes(&self) -> usize {
        self.file.cache.folio_bytes(self.order) as usize * self.memory.count()
    }

    /// Returns whether any byte must be read from the store.
    pub fn needs_store(&self) -> bool {
        self.stored_bytes > 0
    }

    /// Zeroes the bytes to be read, if the store may read fewer than it reports. They may be bytes of another file.
    pub fn prepare(&mut self) {
        if self.file.store.as_ref().is_some_and(|store| !fills_all(&**store)) && !self.memory.is_zero() {
            self.memory.bytes_mut(self.file.pool, self.order, self.stored_bytes).fill(0);
        }
    }

    /// Reads the bytes from the store, in this thread.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::Store`].
    pub fn fill_from_store(&mut self) -> Result<()> {
        if !self.needs_store() {
            return Ok(());
        }
        self.prepare();
        self.is_rest_unread = true;
        let offset = self.offset();
        let Some(store) = &self.file.store else { return Ok(()) };
        let to = self.memory.bytes_mut(self.file.pool, self.order, self.stored_bytes);
        store.read(offset, to).map_err(failed(READING))
    }

    /// Copies written bytes into the folios, and zeroes all others. The folios will be dirty.
    pub fn fill_from_bytes(&mut self, offset: u64, bytes: &[u8]) {
        let (pool, len_bytes) = (self.file.pool, self.file.cache.folio_bytes(self.order));
        for at in 0..self.memory.count() {
            let (begin, number) = (self.file.offset_of(self.index_at(at)), self.memory.number(at));
            let (skipped, from) = (begin.saturating_sub(offset) as usize, offset.saturating_sub(begin));
            let part = &bytes[skipped..bytes.len().min(skipped + (len_bytes - from) as usize)];
            let to = from + part.len() as u64;
            if !self.memory.is_zero() {
                pool.zero(number, 0, from as usize);
                pool.zero(number, to as usize, (len_bytes - to) as usize);
            }
            pool.copy_in(number, from as usize, part);
        }
        self.written = Some(offset..offset + bytes.len() as u64);
    }

    /// Zeroes the bytes that were not read, and copies scattered pages out of their buffer.
    fn fill_rest(&mut self) {
        let (pool, stored, len) = (self.file.pool, self.stored_bytes, self.total_bytes());
        if self.memory.is_zero() && (stored == 0 || self.is_rest_unread) {
            return;
        }
        match &mut self.memory {
            Memory::Scattered { numbers, buffer } => {
                let buffer = buffer.as_mut().expect(NO_BUFFER);
                buffer[stored..].fill(0);
                let pages = buffer.chunks_exact(len / numbers.len());
                numbers.iter().zip(pages).for_each(|(number, bytes)| pool.copy_in(*number, 0, bytes));
            }
            memory => {
                let folio_bytes = len / memory.count();
                for at in stored / folio_bytes..memory.count() {
                    let from = stored.saturating_sub(at * folio_bytes);
                    pool.zero(memory.number(at), from, folio_bytes - from);
                }
            }
        }
    }

    /// Registers the request of a write that has filled its folios. Waits for other requests.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::Store`] with `ETIMEDOUT` after the cache's timeout.
    pub fn register(&mut self) -> Result<()> {
        debug_assert!(self.request.is_none(), "a request is registered once");
        self.request = Some(self.file.wait_and_register(self.first, self.end() - 1)?.into_id());
        Ok(())
    }

    /// Enters the filled folios into the index. Returns whether all were entered. Otherwise the file was truncated or
    /// closed, the request was cancelled, or a page was in the index already. The request stays registered until the
    /// value is dropped.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::NoAddresses`] if no memory for nodes of the index is left.
    pub fn publish(&mut self) -> Result<bool> {
        if self.written.is_none() {
            self.fill_rest();
        }
        let count = self.memory.count();
        while self.published < count {
            let batch = self.published..count.min(self.published + MAX_BATCH_PAGES);
            let bytes = self.file.cache.folio_bytes(self.order) * batch.len() as u64;
            // Added before another thread can write the folios back.
            let dirty_bytes = if self.written.is_some() { bytes } else { 0 };
            self.file.add_dirty(dirty_bytes);
            let published = self.publish_batch(batch);
            if !matches!(published, Ok(true)) {
                self.file.sub_dirty(dirty_bytes);
                return published;
            }
        }
        self.note_published();
        Ok(true)
    }

    /// Prefetches into the CPU cache what the publication of a batch of the folios changes: the first index node, and
    /// the ghosts of a file with a store.
    fn prefetch_metadata(&self, batch: Range<usize>) {
        let file = &*self.file;
        file.tree.prefetch_entry(self.index_at(batch.start));
        for at in batch.take_while(|_| file.store.is_some()) {
            file.cache.order.prefetch_ghosts(GhostKey::of(file.id, self.index_at(at), self.order));
        }
    }

    fn publish_batch(&mut self, batch: Range<usize>) -> Result<bool> {
        let (file, order) = (&*self.file, self.order);
        let (first, last) = (self.index_at(batch.start), self.index_at(batch.end) - 1);
        if batch.len() > 1 {
            // A single folio is changed at once, so a prefetch would save nothing.
            self.prefetch_metadata(batch.clone());
        }
        for at in batch.clone() {
            let number = self.memory.number(at);
            file.pool.set_owner(number, Owner { id: file.id, index: self.index_at(at) });
            file.reach_order(number, order)?;
        }
        let (mut writer, mut stock) = file.tree.lock_for(first, last, u32::from(order))?;
        // A page that an access through a view creates behind the end would stay there: a truncation that removed pages
        // before this request began does not revoke the request.
        let is_behind_end = self.purpose == Purpose::Fault && self.offset() >= file.size_bytes();
        if is_behind_end
            || writer.next(first, last).is_some()
            || file.revoked.load(Relaxed) != self.revoked
            || file.is_closed.load(Relaxed)
            || self.is_cancelled()
        {
            // Unused nodes are freed outside of the lock.
            drop(writer);
            return Ok(false);
        }
        for at in batch {
            let (index, number) = (self.index_at(at), self.memory.number(at));
            let word = file.pool.word(number);
            if file.store.is_some()
                && let Some(prefetched) = self.purpose.prefetched()
            {
                // Marked before it is in the index, so that its first use is found. A thread that pins it earlier by a
                // hint cannot make it dirty before this thread drops the lock.
                word.publish(order, !file.cache.may_split, false);
                word.set_prefetched(prefetched);
                writer.store(index, u32::from(order), u64::from(number), &mut stock);
            } else {
                // The folio is busy until it is live, so a thread that finds it waits. Made live last: a hint must not
                // find a folio that is not in the index. The length is set in between: a thread that reads up to the
                // new end finds the folio, and writeback knows how much of it is valid.
                writer.store(index, u32::from(order), u64::from(number), &mut stock);
                if let Some(written) = &self.written {
                    file.grow(file.offset_of(index + (1 << order)).min(written.end));
                    if file.dirty.is_some() {
                        writer.set_mark(index, DIRTY);
                    }
                }
                word.publish(order, !file.cache.may_split, self.written.is_some());
            }
            file.enter_order(index, number, order);
            self.published += 1;
        }
        drop(writer);
        Ok(true)
    }

    fn is_cancelled(&self) -> bool {
        self.is_cancellable && self.request.is_some_and(|id| !self.file.cache.inflight.contains(id))
    }

    fn note_published(&self) {
        if self.order == 0 {
            return;
        }
        self.file.trace(Event::FolioMade, self.first, self.order);
        stats::add(Counter::HugeAllocated, 1);
        let (begin, end) = (self.offset(), self.file.offset_of(self.end()));
        let is_full = self.written.as_ref().is_some_and(|written| written.start <= begin && written.end >= end);
        if !is_full {
            self.file.note_sparse(self.number());
        }
    }
}

impl Unpublished {
    /// Prefetches into the CPU cache what [`Unpublished::publish`] changes first, for a caller that publishes other folios
    /// before this one.
    pub fn prefetch_publication(&self) {
        self.prefetch_metadata(self.published..self.memory.count().min(MAX_BATCH_PAGES));
    }
}

impl<F: Deref<Target = File>> Drop for Unpublished<F> {
    fn drop(&mut self) {
        if self.is_readahead() {
            self.file.cache.ahead_bytes.fetch_sub(self.total_bytes() as u64, Relaxed);
        }
        (self.published..self.memory.count()).for_each(|at| self.file.cache.free(self.memory.number(at), self.order));
        if let Some(request) = self.request {
            self.file.cache.inflight.complete(request);
        }
    }
}

// SAFETY: the memory is mapped and writable while it is allocated, which is until the value is dropped (type
// invariant). No other code accesses it.
unsafe impl Buffer for Unpublished {
    fn addr(&self) -> NonNull<u8> {
        self.memory.addr(self.file.pool)
    }

    fn len_bytes(&self) -> usize {
        self.total_bytes()
    }
}

impl File {
    /// Allocates a huge folio over page `index`, or as many pages of the span as are free. Returns also the order and
    /// the first index.
    fn allocate_memory(
        &self,
        index: u64,
        span: &Range<u64>,
        is_huge: bool,
        purpose: Purpose,
    ) -> Result<(Memory, u8, u64)> {
        let wanted = if is_huge { 1 } else { (span.end - span.start) as usize };
        if wanted > 1
            && let Some(memory) = self.allocate_pages(wanted)
        {
            return Ok((memory, 0, index));
        }
        self.allocate_folio(index, is_huge, purpose)
    }

    /// Allocates a folio for a page: a huge one if wanted and possible. Evicts and writes back until a folio is free;
    /// for readahead, evicts once and fails if that frees too little. Returns also the order and the first index.
    fn allocate_folio(&self, index: u64, is_huge: bool, purpose: Purpose) -> Result<(Memory, u8, u64)> {
        let found = |folio: NewFolio, first| {
            let NewFolio { number, order, is_zero } = folio;
            (Memory::Contiguous { number, count: 1, is_zero }, order, first)
        };
        let is_ahead = purpose == Purpose::Readahead;
        if is_huge {
            if let Ok(folio) = self.allocate_evicting_once(self.pool.chunk_order, is_ahead) {
                return Ok(found(folio, self.span_of(index).start));
            }
            stats::add(Counter::HugeFallback, 1);
        }
        if is_ahead {
            return self.allocate_evicting_once(0, is_ahead).map(|folio| found(folio, index));
        }
        loop {
            match self.cache.allocate(0) {
                Ok(folio) => return Ok(found(folio, index)),
                // Another thread may allocate the freed memory first. Then this thread evicts again.
                Err(_) if self.cache.make_room(self.page_bytes() as u64) => {}
                // All folios may be dirty.
                Err(_) if self.clean_some()? => {}
                Err(_) if self.cache.evict_at_last(self.page_bytes() as u64) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Writes dirty folios of the cache back. Returns whether some became clean.
    ///
    /// # Errors
    ///
    /// Those of the store that failed, for a file with a store. A file in memory has nothing to do with that store.
    fn clean_some(&self) -> Result<bool> {
        let result = self.cache.clean_some(self.page_bytes() as u64);
        if self.store.is_some() { result } else { Ok(result.unwrap_or(false)) }
    }

    /// Allocates a folio. For a file with a store, evicts once if the limit is reached. More attempts for a huge folio
    /// could evict everything without freeing a whole chunk.
    fn allocate_evicting_once(&self, order: u8, is_ahead: bool) -> Result<NewFolio> {
        let (cache, bytes) = (&self.cache, self.cache.folio_bytes(order));
        let evict = || if is_ahead { cache.evict_in_background(bytes) } else { cache.evict_some(bytes) };
        match cache.allocate(order) {
            Err(_) if self.store.is_some() && evict() => cache.allocate(order),
            result => result,
        }
    }

    /// Allocates pages that are contiguous in memory: `wanted`, or fewer if no run of free pages is that long, but at
    /// least [`MIN_CONTIGUOUS_BYTES`].
    fn allocate_contiguous_pages(&self, wanted: usize) -> Option<Memory> {
        let min_pages = (MIN_CONTIGUOUS_BYTES / self.page_bytes()).clamp(1, wanted);
        let pages = self.cache.allocate_contiguous(wanted as u32, min_pages as u32)?;
        Some(Memory::Contiguous { number: pages.start, count: pages.len() as u32, is_zero: false })
    }

    /// Allocates up to `wanted` pages: contiguous ones if possible.
    fn allocate_pages(&self, wanted: usize) -> Option<Memory> {
        let wanted_bytes = (self.page_bytes() * wanted) as u64;
        if !self.cache.fits_limit(wanted_bytes) {
            self.cache.evict_in_background(wanted_bytes);
        }
        if let Some(memory) = self.allocate_contiguous_pages(wanted) {
            return Some(memory);
        }
        let max_pages = wanted.min(MAX_SCATTERED_BYTES / self.page_bytes());
        let mut numbers = Vec::with_capacity(max_pages);
        self.cache.allocate_more(max_pages, |page| numbers.push(page.number));
        match numbers.len() {
            0 => None,
            1 => Some(Memory::Contiguous { number: numbers[0], count: 1, is_zero: false }),
            count => {
                let buffer = Some(Aligned::new(count * self.page_bytes(), self.page_bytes()));
                Some(Memory::Scattered { numbers, buffer })
            }
        }
    }
}
