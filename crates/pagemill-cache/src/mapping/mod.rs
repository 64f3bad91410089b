//! The page cache: files in memory, in huge pages.
//!
//! ```text
//!   cache/      files that share a page size, a limit and a policy; their settings and figures
//!     file/       one file: a handle's operations, one file per verb
//!     index       page index -> folio
//!     inflight    the reads in flight; at most one request is registered for a page
//!     request     an unpublished folio: reserve, fill, publish
//!     submit      asynchronous reads of a store
//!     drivers/    what runs requests: blocking calls, queues, futures, readahead
//!     writeback/  dirty folios, and writing them to the store
//!     evict/      the eviction order
//!     huge/       collapse into huge folios, and splits
//! ```
//!
//! **Reading** takes no lock and writes to no shared cache line. It looks up the index, loads the folio's word and
//! owner, copies the bytes, and loads the word again. If the word shows that the folio may have changed its owner
//! meanwhile, the read starts over.
//!
//! **Writing** pins the folio, copies the bytes, and unpins the folio. Where no folio exists, the write fills a new one
//! and then enters it into the index.
//!
//! **Removing** (truncate, punch_hole) takes the file's `gate` exclusively, takes the entries out of the index, then
//! frees the folios. A pinned folio is freed by its last unpin. Concurrent reads find old bytes or zeros, never another
//! file's bytes.
//!
//! A copy to or from a caller's buffer holds no lock that a page fault handler would take, because the buffer may be
//! memory whose page faults are resolved by reads of a cached file. Writers hold the gate shared during the copy; no
//! fault handler takes the gate. A thread that needs a held or frozen folio waits for a second at most, then gets
//! [`Error::Busy`]. Policies and stores are called with the gate held, so they must not use the cache's files.
//!
//! Uses `folio` and `xarray`. Calls upper layers through traits: [`Policy`], [`pagemill_store::Store`],
//! `pagemill_xarray::Forests`. Lock order: gate, table of in-flight reads (files with a store), index, the pool's
//! state. Diagram and table: docs/states-and-locks.md.

mod cache;
mod drivers;
mod evict;
#[cfg(all(test, not(shuttle)))]
mod fault_tests;
mod file;
mod huge;
mod index;
mod inflight;
pub mod policy;
mod request;
#[cfg(all(test, shuttle))]
mod shuttle_tests;
mod submit;
mod view;
mod writeback;

pub use cache::config::Builder;
pub use cache::listing::ask_for_caches;
pub use cache::source::{SharedMemory, Source};
pub use cache::usage::{Holder, Usage};
pub use cache::{Caches, MAX_CACHES, PageCache};
pub use drivers::queue::{Fetch, Fetched, Queue};
pub use drivers::readahead::{Advice, Reuse};
pub use evict::order;
pub use file::cursor::Cursor;
pub use file::hint::FolioHint;
pub use file::pin::{Exclusive, Pin, Pins};
pub use policy::Policy;
pub use view::{Bytes, Prefaulted, PrivateView, View, ViewMut};
pub use writeback::flush::Writeback;

use crate::folio::{Owner, Pool};
use file::gate::Gate;
use pagemill_core::error::{Error, Result};
use pagemill_core::sync::{Acquire, AtomicU32, AtomicU64, Backoff, Lock, Relaxed, Release};
use pagemill_core::trace::{self, Event};
use pagemill_store::Store;
use pagemill_sys::clock;
use pagemill_xarray::{Forest, XArray};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::AcqRel};
use std::sync::{Arc, Weak};
use submit::AsyncReads;
use writeback::dirty::Dirty;

/// Maximum time that a call waits for a folio that another thread holds or has frozen. Then the call fails.
const MAX_WAIT_NS: u64 = 1_000_000_000;

/// Maximum time for which the drop of a file's last handle waits until other threads have dropped their temporary
/// references to the file.
const MAX_DROP_WAIT_NS: u64 = 20_000_000;

/// A drop of a file's last handle is traced if it takes at least this long.
const SLOW_DROP_US: u64 = 1000;

/// Serial number of the next file that is created in this process.
static NEXT_SERIAL: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

/// A file of a cache. It is created in an [`Arc`] (`file/mod.rs`) and never moves out of it.
pub(crate) struct File {
    /// The cache's pool. A copy of `cache.pool`, which saves a load.
    pool: &'static Pool,
    cache: Arc<cache::Inner>,
    store: Option<Arc<dyn Store>>,
    /// False if the store cannot be written. Writes to the file fail then.
    is_writable: bool,
    /// Index of the file's folios by page index.
    tree: XArray<Forest>,
    size_bytes: AtomicU64,
    /// Number of bytes, from the begin of the store on, that belong to the file. Changed under the lock of the index.
    stored_bytes: AtomicU64,
    /// Version of the store's length: odd while the store may be longer than `stored_bytes`. Increases each time the
    /// store may have become longer, and each time the store was truncated. Changed under the lock of the index.
    length_version: AtomicU32,
    /// Counts removals of pages, and decreases of `stored_bytes`. Changed under the lock of the index.
    removals: AtomicU32,
    /// Counts as `removals`, but without evictions. If the count has changed since bytes were read from the store, a
    /// truncation may have cut these bytes off.
    revoked: AtomicU32,
    /// State of asynchronous reads and readahead. Only for files with a store.
    reads: Option<Arc<AsyncReads>>,
    /// Lock that serializes writeback and sync of the file.
    syncing: Lock,
    /// State of dirty folios and writeback. Only for files with a store.
    dirty: Option<Box<Dirty>>,
    /// Number of handles of the file.
    handles: AtomicU32,
    gate: Gate,
    /// Id of the file in its cache. Reused after the file has ended.
    id: u32,
    /// This file, for code that needs an `Arc` of it.
    this: Weak<Self>,
    /// Number of the file that is never reused, unlike `id`.
    serial: u64,
    /// Whether the last handle was dropped. Set before the dropping thread takes the lock of the index for the last
    /// time.
    is_closed: AtomicBool,
    /// Fork generation of the process that created the file.
    generation: u16,
    /// End of the last write that created pages.
    sequential_end: AtomicU64,
    /// Begin of the sequential run of writes that ends at `sequential_end`.
    sequential_begin: AtomicU64,
    /// The file's views.
    views: view::Views,
}

/// A handle of a cached file. Several threads may use one handle at the same time. Dropping the last handle closes the
/// file: dirty bytes are written back, if the store accepts them in time ([`Writeback::timeout`]). [`Mapping::close`]
/// reports errors of this writeback; a drop ignores them. The drop cancels readahead, and waits for the store's running
/// reads, a second at most. A drop that took a millisecond or more appears in the trace
/// (`slow_drop`).
///
/// A *page* is the cache's software page ([`Builder::page`]). Offsets are bytes. Bytes that were never written read
/// zero. A *folio* is one page, or a *huge folio* of 2 MiB (one page if pages are larger), whose memory is handled as
/// one object.
///
/// ```
/// use pagemill::PageCache;
/// use pagemill::store::MemoryStore;
/// use std::sync::Arc;
///
/// let store = Arc::new(MemoryStore::new(vec![7; 10_000], 512));
/// let cache = PageCache::builder("records").limit(64 << 20).build()?;
/// let file = cache.open(store.clone())?;
/// file.write_at(b"new", 5000)?;
/// let mut bytes = [0; 4];
/// assert_eq!((file.read_at(&mut bytes, 5000)?, &bytes), (4, b"new\x07"));
/// file.sync()?; // the store has the change from here on
/// // An error of `close` comes with the handle, so that the program can try again. Here only the error is passed on.
/// file.close().map_err(|(_file, error)| error)?;
/// assert_eq!(&store.bytes()[5000..5003], b"new");
/// # Ok::<(), pagemill::Error>(())
/// ```
pub struct Mapping(
    Arc<File>,
    /// Number of the file's writeback failures that this handle has reported so far.
    AtomicU32,
);

impl Mapping {
    /// Returns the length of the file in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.0.size_bytes()
    }
}

impl std::fmt::Debug for Mapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mapping").field("size_bytes", &self.size_bytes()).finish_non_exhaustive()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // A fork child must not close the file, because threads of the parent may hold its locks forever.
        if self.0.cache.check().is_ok() && self.0.handles.fetch_sub(1, AcqRel) == 1 {
            let (began_ns, dirty_bytes) = (clock::fine_ns(), self.dirty_bytes());
            // Other threads may still refer to the file, for a collapse or a read. Its pages are freed now, and
            // `is_closed` keeps new pages out. Only afterwards may another file get the id, because folios name their
            // owner by the id.
            self.0.write_back_at_last();
            self.0.unlock_all();
            self.0.is_closed.store(true, Relaxed);
            self.0.remove_pages(0, Owner::MAX_INDEX);
            self.0.cancel_reads();
            self.0.cache.remove_file(self.0.id, self.0.store.is_some());
            // A thread with a temporary reference (the background, or a store's thread after a completion) also keeps
            // the store alive. The caller may reopen the store's file at once, so wait until these references are gone.
            let mut backoff = Backoff::new();
            while self.0.store.is_some() && Arc::strong_count(&self.0) > 1 && backoff.waited_ns() < MAX_DROP_WAIT_NS {
                backoff.pause();
            }
            let waited_us = (clock::fine_ns() - began_ns) / 1000;
            if waited_us >= SLOW_DROP_US {
                trace::event(Event::SlowDrop, waited_us, dirty_bytes);
            }
        }
    }
}

impl File {
    /// Records a trace event about a folio of 2^`order` pages at `index`.
    fn trace(&self, event: Event, index: u64, order: u8) {
        let cache = u64::from(self.cache.number);
        trace::event_with_packed_values(event, [(index, u64::from(self.id)), (u64::from(order), cache)]);
    }

    #[inline]
    fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Acquire)
    }

    #[inline]
    fn page_bytes(&self) -> usize {
        1 << self.pool.page_shift
    }

    /// Returns the index of the page that contains the byte at `offset`.
    #[inline]
    fn index_of(&self, offset: u64) -> u64 {
        offset >> self.pool.page_shift
    }

    /// Returns the offset of the first byte of a page.
    #[inline]
    fn offset_of(&self, index: u64) -> u64 {
        index << self.pool.page_shift
    }

    /// Returns the page indices that a huge folio with page `index` would cover.
    fn span_of(&self, index: u64) -> Range<u64> {
        let pages = 1 << self.pool.chunk_order;
        let first = index & !(pages - 1);
        first..first + pages
    }

    /// Returns the largest possible length of a file.
    fn max_bytes(&self) -> u64 {
        // The last index is unused, so that the index after the last page is valid, too.
        (i64::MAX as u64).min(Owner::MAX_INDEX.saturating_mul(self.page_bytes() as u64))
    }

    /// Returns an error if the range exceeds the largest file offset, or if this process is a fork child of the process
    /// that created the file.
    #[inline]
    fn check(&self, offset: u64, len_bytes: u64) -> Result<()> {
        if self.pool.generation() != self.generation {
            self.cache.check()?;
        }
        let is_past = offset.checked_add(len_bytes).is_none_or(|end| end > i64::MAX as u64);
        if is_past { Err(Error::BadOffset { offset, len_bytes }) } else { Ok(()) }
    }

    /// Returns an error if the file's store is read-only.
    #[inline]
    fn check_writable(&self) -> Result<()> {
        if self.is_writable { Ok(()) } else { Err(Error::ReadOnly) }
    }

    /// As [`File::check`], but cuts a range at the largest file offset. Returns the length that remains.
    fn check_up_to(&self, offset: u64, len_bytes: u64) -> Result<u64> {
        let len_bytes = len_bytes.min((i64::MAX as u64).saturating_sub(offset));
        self.check(offset, len_bytes).map(|()| len_bytes)
    }

    /// Returns an error if `size_bytes` exceeds the largest possible length of a file.
    fn check_size(&self, size_bytes: u64) -> Result<()> {
        let most_bytes = self.max_bytes();
        if size_bytes > most_bytes { Err(Error::FileTooLarge { size_bytes, most_bytes }) } else { Ok(()) }
    }

    /// Records that pages were removed, or that a part of the store is not valid any more. The caller holds the lock of
    /// the index.
    fn note_revoked(&self) {
        self.revoked.store(self.revoked.load(Relaxed).wrapping_add(1), Release);
        self.note_removal();
    }

    /// Records that pages were removed or evicted. The caller holds the lock of the index.
    fn note_removal(&self) {
        self.removals.store(self.removals.load(Relaxed).wrapping_add(1), Release);
    }

    /// Extends the file to `size_bytes` if it is shorter.
    fn grow(&self, size_bytes: u64) {
        // Most writes do not extend the file; those only load the length.
        if self.size_bytes.load(Relaxed) < size_bytes {
            self.size_bytes.fetch_max(size_bytes, AcqRel);
        }
    }
}

/// Calls `act`, which transfers some bytes, until `len` bytes are transferred. `act` gets the number of bytes
/// transferred so far. If a later call than the first fails, returns the number of bytes transferred instead of the
/// error.
#[inline]
fn in_pieces(len: usize, mut act: impl FnMut(usize) -> Result<usize>) -> Result<usize> {
    let mut done = 0;
    while done < len {
        match act(done) {
            Ok(bytes) => done += bytes,
            Err(error) if done == 0 => return Err(error),
            Err(_) => break,
        }
    }
    Ok(done)
}

/// Calls `act` for each buffer in order, until a call does not transfer all bytes of its buffer. `act` also gets the
/// number of bytes transferred so far. If a later call fails, returns the number of bytes transferred instead of the
/// error.
fn one_by_one<B: std::ops::Deref<Target = [u8]>>(
    buffers: impl Iterator<Item = B>,
    mut act: impl FnMut(B, u64) -> Result<usize>,
) -> Result<usize> {
    let mut done = 0;
    for buffer in buffers {
        let len = buffer.len();
        match act(buffer, done as u64) {
            Ok(bytes) => {
                done += bytes;
                if bytes < len {
                    break;
                }
            }
            Err(error) if done == 0 => return Err(error),
            Err(_) => break,
        }
    }
    Ok(done)
}

/// A wait, with a time limit of a second, for a folio that another thread holds or has frozen.
struct TimedWait(Option<Backoff>);

impl TimedWait {
    fn new() -> Self {
        Self(None)
    }

    /// Pauses the thread. Each pause is longer than the previous one.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`] if the waits took a second together.
    #[cold]
    fn wait(&mut self) -> Result<()> {
        let backoff = self.0.get_or_insert_with(|| {
            pagemill_core::stats::add(pagemill_core::stats::Counter::FoliosAwaited, 1);
            Backoff::new()
        });
        if backoff.waited_ns() > MAX_WAIT_NS {
            return Err(Error::Busy { what: "a page of the file has been pinned or held for a second" });
        }
        backoff.pause();
        Ok(())
    }
}
