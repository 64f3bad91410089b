//! Asynchronous calls: futures that run in any executor. A completed read wakes the tasks that wait for it.
//!
//! The store fills folios, never a caller's buffer directly. So a future may be dropped at any time. The reads that it
//! started continue, and later calls find their bytes.

use crate::mapping::drivers::readahead::SHARE_DIVISOR;
use crate::mapping::inflight::Completion;
use crate::mapping::request::{Purpose, READING};
use crate::mapping::{File, Mapping, Pin};
use pagemill_core::error::{Error, Result};
use std::ops::Range;
use std::sync::Arc;

/// Maximum number of attempts of a call to read a page. The page may be evicted before its task runs, and is then read
/// again.
const MAX_READ_ATTEMPTS: usize = 16;

/// Error if a page is evicted again after each of [`MAX_READ_ATTEMPTS`] reads.
const EVICTED_REPEATEDLY: Error = Error::Busy { what: "the page is evicted repeatedly before its task runs" };

impl Mapping {
    /// As [`Mapping::pin`], but other tasks can run while the future waits for a store. Once the future has resolved,
    /// the bytes stay in memory until the pin is dropped. A pin may be kept across `await`s and sent to other threads.
    ///
    /// ```
    /// use pagemill::Result;
    /// use pagemill::cache::Mapping;
    /// # use pagemill::PageCache;
    /// # use pagemill::store::MemoryStore;
    ///
    /// /// Runs in any executor.
    /// async fn first_of_page(file: &Mapping, page: u64) -> Result<u64> {
    ///     let pin = file.pin_async(page * 4096).await?;
    ///     Ok(pin.read_u64(0))
    /// }
    /// # let cache = PageCache::builder("doc").limit(8 << 20).build()?;
    /// # let file = cache.open(std::sync::Arc::new(MemoryStore::new(vec![1; 8192], 512)))?;
    /// # let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    /// # let first = std::pin::pin!(first_of_page(&file, 1)).poll(&mut context);
    /// # assert!(matches!(first, std::task::Poll::Ready(Ok(0x0101_0101_0101_0101))));
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    ///
    /// For a store with blocking calls only ([`pagemill_store::Store::is_asynchronous`]) the future blocks the
    /// executor's thread. The future also blocks briefly to evict folios, and while another thread holds the folio.
    ///
    /// Cost: that of [`Mapping::pin`] for a page in memory. Otherwise some allocations, and a switch to the store's
    /// thread and back.
    ///
    /// # Errors
    ///
    /// See [`Mapping::pin`]. [`Error::NoMemory`] also if in-flight reads use up the limit: they cannot be evicted, so
    /// the program must limit its concurrent tasks. [`Error::Busy`] if the page is evicted repeatedly before the task
    /// runs.
    pub async fn pin_async(&self, offset: u64) -> Result<Pin<'_>> {
        for _ in 0..MAX_READ_ATTEMPTS {
            if let Some(pin) = self.pin_present(offset)? {
                return Ok(pin);
            }
            if self.0.reads.is_none() {
                return self.pin(offset);
            }
            let index = self.0.index_of(offset);
            self.0.note_access(self.0.offset_of(index), 1);
            self.0.bring(index..index + 1).await?;
        }
        Err(EVICTED_REPEATEDLY)
    }

    /// As [`Mapping::read_at`], but other tasks can run while the future waits for a store.
    ///
    /// ```
    /// use pagemill::Result;
    /// use pagemill::cache::Mapping;
    /// # use pagemill::PageCache;
    /// # use pagemill::store::MemoryStore;
    ///
    /// async fn header(file: &Mapping) -> Result<Vec<u8>> {
    ///     let mut bytes = vec![0; 4096];
    ///     let len = file.read_async(&mut bytes, 0).await?;
    ///     bytes.truncate(len);
    ///     Ok(bytes)
    /// }
    /// # let cache = PageCache::builder("doc").limit(8 << 20).build()?;
    /// # let file = cache.open(std::sync::Arc::new(MemoryStore::new(vec![1; 100], 512)))?;
    /// # let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    /// # let header = std::pin::pin!(header(&file)).poll(&mut context);
    /// # assert!(matches!(header, std::task::Poll::Ready(Ok(bytes)) if bytes == [1; 100]));
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    ///
    /// Missing pages of the range are read together, some hundred KiB at a time. If the future is dropped before it
    /// resolves, the content of `to` is unspecified.
    ///
    /// # Errors
    ///
    /// See [`Mapping::read_at`] and [`Mapping::pin_async`].
    pub async fn read_async(&self, to: &mut [u8], offset: u64) -> Result<usize> {
        let file = &self.0;
        file.check(offset, to.len() as u64)?;
        let mut done = 0;
        while done < to.len() {
            let at = offset + done as u64;
            let len = (to.len() - done).min(file.size_bytes().saturating_sub(at).try_into().unwrap_or(usize::MAX));
            if len == 0 {
                break;
            }
            match file.read_piece_async(&mut to[done..done + len], at).await {
                Ok(bytes) => done += bytes,
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(done)
    }

    /// Reads a range into memory, up to the end of the file, and resolves once it is there. Blocking calls then find
    /// the bytes until they are evicted; use [`Mapping::pin_async`] for bytes that must stay. Unlike
    /// [`Mapping::will_need`], the future waits for the reads.
    ///
    /// # Errors
    ///
    /// [`Error::BadOffset`], [`Error::NoMemory`], [`Error::Store`].
    pub async fn fetch(&self, offset: u64, len_bytes: u64) -> Result<()> {
        let file = &self.0;
        file.check(offset, len_bytes)?;
        if file.reads.is_none() {
            return Ok(());
        }
        let (mut at, mut started) = (offset, offset);
        loop {
            let end = (offset + len_bytes).min(file.size_bytes());
            if at >= end {
                return Ok(());
            }
            // Start readahead, so that the store always has work.
            if at >= started && end - at > file.page_bytes() as u64 {
                file.read_ahead(std::iter::once(at..end));
                started = at + file.cache.limit_bytes / (2 * SHARE_DIVISOR);
            }
            let index = file.index_of(at);
            if !file.has_page(index) {
                file.bring(index..file.index_of(end - 1) + 1).await?;
            }
            at = file.offset_of(index + 1);
        }
    }
}

impl File {
    /// Reads the first of some missing pages into memory, and following ones of the same transfer. They may be evicted
    /// again before the future resolves.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`]. [`Error::Store`] with the store's error for the first page.
    async fn bring(self: &Arc<Self>, pages: Range<u64>) -> Result<()> {
        let first = pages.start..pages.start + 1;
        let is_one = pages == first;
        match self.bring_together(pages).await {
            // Perhaps only one of the other pages cannot be read.
            Err(Error::Store { doing: READING, .. }) if !is_one => self.bring_together(first).await,
            result => result,
        }
    }

    async fn bring_together(self: &Arc<Self>, pages: Range<u64>) -> Result<()> {
        let Some((id, error)) = self.submit(pages, Purpose::Read)? else { return Ok(()) };
        Completion::new(&self.cache.inflight, id).await;
        error.and_then(|error| error.with(Option::take)).map_or(Ok(()), Err)
    }

    /// Copies from one folio; if the folio is not in memory, waits until it has been read. Returns the number of bytes.
    async fn read_piece_async(self: &Arc<Self>, to: &mut [u8], offset: u64) -> Result<usize> {
        for _ in 0..MAX_READ_ATTEMPTS {
            if self.reads.is_none() {
                return self.read_piece(to, offset);
            }
            if offset >= self.size_bytes() {
                // The file was truncated meanwhile. No page after its end may be read into memory.
                return Ok(0);
            }
            let (index, last) = (self.index_of(offset), self.index_of(offset + to.len() as u64 - 1));
            if let Some(place) = self.pin_page(index)? {
                let pin = self.guard_of(place, offset);
                let len = to.len().min(pin.len_bytes());
                pin.read_at(&mut to[..len], 0);
                return Ok(len);
            }
            self.note_access(offset, to.len());
            self.bring(index..last + 1).await?;
        }
        Err(EVICTED_REPEATEDLY)
    }
}
