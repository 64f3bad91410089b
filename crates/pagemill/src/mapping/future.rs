//! Calls that do not wait: futures of any executor. Nothing here knows one: a read that is over wakes whoever waits for it.
//!
//! Bytes go from the store into folios, never straight into a caller's buffer. So a future may be dropped at any time: what it
//! started goes on, and is there for the next one.

use super::ahead::SHARE_DIVISOR;
use super::{File, Mapping, Pin};
use crate::error::{Error, Result};
use std::sync::Arc;

/// A page that came, and had to make room for others before its task went on, comes once more; so often.
const MOST_TRIES: usize = 16;

const GONE_AGAIN: Error = Error::Busy { what: "a page goes as soon as it has come" };

impl Mapping {
    /// As [`Mapping::pin`]; where that would wait for a store, this lets other tasks go on. Once it has resolved, nothing takes the
    /// bytes away until the pin goes: it is kept over other `await`s, and sent to other threads, as one likes.
    ///
    /// ```
    /// # use pagemill::{Pagemill, Result, mapping::{Mapping, Settings}, store::MemoryStore};
    /// /// Runs in any executor.
    /// async fn first_of_page(file: &Mapping, page: u64) -> Result<u64> {
    ///     let pin = file.pin_async(page * 4096).await?;
    ///     Ok(pin.read_u64(0))
    /// }
    /// # let cache = Pagemill::of_process()?.caches.make(Settings::new("doc", 8 << 20))?;
    /// # let file = cache.open(std::sync::Arc::new(MemoryStore::new(vec![1; 8192], 512)))?;
    /// # let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    /// # let first = std::pin::pin!(first_of_page(&file, 1)).poll(&mut context);
    /// # assert!(matches!(first, std::task::Poll::Ready(Ok(0x0101_0101_0101_0101))));
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    ///
    /// Of a store that only blocks ([`crate::store::Store::is_asynchronous`]) it waits in the executor's thread. So it does, briefly, for
    /// room, and for whoever holds the folio.
    ///
    /// Cost: of what is in memory that of [`Mapping::pin`]; else some allocations, and a switch to the store's thread and back.
    ///
    /// # Errors
    ///
    /// As [`Mapping::pin`]; [`Error::NoMemory`] also where what is on its way for others has all the room: it cannot be evicted, so tasks beyond
    /// that have to be held back. [`Error::Busy`] if the page is evicted time and again before the task goes on.
    pub async fn pin_async(&self, offset: u64) -> Result<Pin<'_>> {
        for _ in 0..MOST_TRIES {
            if let Some(pin) = self.pin_present(offset)? {
                return Ok(pin);
            }
            if self.0.behind.is_none() {
                return self.pin(offset);
            }
            let index = self.0.index_of(offset);
            self.0.note_access(self.0.offset_of(index), 1);
            self.0.bring(index..index + 1).await?;
        }
        Err(GONE_AGAIN)
    }

    /// As [`Mapping::read_at`], without waiting for a store.
    ///
    /// ```
    /// # use pagemill::{Pagemill, Result, mapping::{Mapping, Settings}, store::MemoryStore};
    /// async fn header(file: &Mapping) -> Result<Vec<u8>> {
    ///     let mut bytes = vec![0; 4096];
    ///     let len = file.read_async(&mut bytes, 0).await?;
    ///     bytes.truncate(len);
    ///     Ok(bytes)
    /// }
    /// # let cache = Pagemill::of_process()?.caches.make(Settings::new("doc", 8 << 20))?;
    /// # let file = cache.open(std::sync::Arc::new(MemoryStore::new(vec![1; 100], 512)))?;
    /// # let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    /// # let header = std::pin::pin!(header(&file)).poll(&mut context);
    /// # assert!(matches!(header, std::task::Poll::Ready(Ok(bytes)) if bytes == [1; 100]));
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    ///
    /// What is missing of the range is read together, some hundred KiB at a time. Dropped before it has resolved, the future leaves
    /// anything in `to`.
    ///
    /// # Errors
    ///
    /// As [`Mapping::read_at`], and [`Mapping::pin_async`].
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

    /// Resolves once all of a range, to the end of the file at most, has come into memory: blocking calls find it there, until room is
    /// made for others. What has to stay is pinned ([`Mapping::pin_async`]). It is [`Mapping::will_need`], and waits.
    ///
    /// # Errors
    ///
    /// [`Error::BadOffset`], [`Error::NoMemory`], [`Error::Store`].
    pub async fn fetch(&self, offset: u64, len_bytes: u64) -> Result<()> {
        let file = &self.0;
        file.check(offset, len_bytes)?;
        if file.behind.is_none() {
            return Ok(());
        }
        let (mut at, mut started) = (offset, offset);
        loop {
            let end = (offset + len_bytes).min(file.size_bytes());
            if at >= end {
                return Ok(());
            }
            // So that the store always has some of it to do.
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
    /// Copies from one folio, once it is there. Returns how many bytes.
    async fn read_piece_async(self: &Arc<Self>, to: &mut [u8], offset: u64) -> Result<usize> {
        for _ in 0..MOST_TRIES {
            if self.behind.is_none() {
                return self.read_piece(to, offset);
            }
            if offset >= self.size_bytes() {
                // Cut meanwhile: nothing is to come in behind the end.
                return Ok(0);
            }
            let (index, last) = (self.index_of(offset), self.index_of(offset + to.len() as u64 - 1));
            if let Some(place) = self.pin_page(index)? {
                let at = (offset - self.offset_of(place.first)) as usize;
                let len = to.len().min(self.cache.folio_bytes(place.order) as usize - at);
                self.pool.copy_out(place.number, at, &mut to[..len]);
                self.cache.unpin(place.number);
                return Ok(len);
            }
            self.note_access(offset, to.len());
            self.bring(index..last + 1).await?;
        }
        Err(GONE_AGAIN)
    }
}
