//! Files in memory, in huge pages: the page cache.
//!
//! ```text
//!   Cache     files that share a page size, a limit, a policy           (cache, policy)
//!     Mapping   one file: read_at, write_at, pin, truncate ..           one file per verb
//!       XArray    page index -> frame number; a huge folio is one entry   ../xarray
//!       Pool      pages, their words and bytes                            ../folio
//!     Worker    makes huge folios of small ones, behind                 (worker, collapse)
//!               and small ones of those that hold little                (sweep, thin)
//! ```
//!
//! **Reading** takes no lock and writes to no shared line: look the index up, look at the folio's word and owner, copy, look
//! at the word again; if it says that the bytes may have become another's, once more. **Writing** pins the
//! folio, copies, unpins; where nothing is, a folio is filled first and enters the index then. **Removing** (truncate,
//! punch_hole) goes alone through the file's `gate`, takes entries out of the index, then frees the folios; one that somebody has
//! pinned is freed by its last pin. Reads beside it find old bytes or zeros, never another file's.
//!
//! No caller's buffer is touched under a lock that the way of a fault would take: the buffer may lie in memory whose faults
//! come here. (Writers are inside the gate then, which no fault takes.) Who meets a folio that another has alone or keeps still
//! waits for a second at most, and ends in [`Error::Busy`]. Policies and stores are called inside the gate, too: they must
//! not use the cache's files.
//!
//! Below: `folio`, `xarray`. Above, by trait: [`Policy`], [`crate::store::Store`], [`crate::xarray::Forests`]. Locks, in order: gate, flight (of
//! files with a store), index, the pool's books. Diagram and table: docs/states-and-locks.md.

mod ahead;
mod arrivals;
mod behind;
mod cache;
mod collapse;
mod dirty;
mod evict;
mod fetch;
mod file;
mod fill;
mod flights;
mod flush;
mod future;
mod gate;
pub mod order;
mod pin;
pub mod policy;
mod punch;
mod queue;
mod read;
mod refresh;
mod registered;
mod seek;
#[cfg(all(test, shuttle))]
mod shuttle_tests;
mod source;
mod split;
mod streams;
mod sweep;
mod sync;
mod thin;
mod throttle;
mod truncate;
mod usage;
mod worker;
mod write;
mod writeback;
mod zero;

pub use ahead::{Advice, Reuse};
pub use cache::{Cache, Caches, MAX_CACHES, Settings};
pub use flush::Writeback;
pub use pin::{Exclusive, Pin, Pins};
pub use policy::Policy;
pub use queue::{Fetch, Fetched, Queue};
pub use source::Source;
pub use usage::{Holder, Usage};

use crate::error::{Error, Result};
use crate::folio::{Owner, Pool};
use crate::store::Store;
use crate::sync::{Acquire, AtomicU32, AtomicU64, Lock, Patience, Relaxed, Release};
use crate::trace::{self, Event};
use crate::xarray::{Forest, Node, XArray};
use behind::Behind;
use dirty::Dirty;
use gate::Gate;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::AcqRel};

/// Who holds a folio for so long is in the way of others; they hear of it.
const MOST_WAIT_NS: u64 = 1_000_000_000;

/// Reads of a [`Queue`] have a file for longer than this.
const MOST_LINGER_NS: u64 = 20_000_000;

/// Of the next file.
static SERIALS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

/// One file. It lies in an [`Arc`] and stays there (`file`).
pub(crate) struct File {
    /// That of the cache, at hand.
    pool: &'static Pool,
    cache: Arc<cache::Inner>,
    store: Option<Arc<dyn Store>>,
    /// Nothing is written to a file whose store cannot be.
    is_writable: bool,
    tree: XArray<Forest>,
    size_bytes: AtomicU64,
    /// So much of the store counts; what it has behind that is not the file's. Changed under the lock of the index.
    stored_bytes: AtomicU64,
    /// Odd while the store may hold more than counts, and moved on with every change of that. Changed as `stored_bytes`.
    cut: AtomicU32,
    /// Moves on whenever a page leaves the file, or less of the store counts. Changed under the lock of the index.
    left: AtomicU32,
    /// The same without evictions: what was read from the store before may have been cut off since.
    revoked: AtomicU32,
    /// Of one with a store: what goes on behind.
    behind: Option<Arc<Behind>>,
    /// One at a time writes back.
    syncing: Lock,
    /// Of a file with a store.
    dirty: Option<Box<Dirty>>,
    handles: AtomicU32,
    gate: Gate,
    id: u32,
    /// As `id`, but no other file ever has it.
    serial: u64,
    /// Nobody has its handle any more. Set before the lock of the index is taken for the last time by who had it.
    is_closed: AtomicBool,
    /// Of the process that made it.
    generation: u16,
    /// Where the last write that made pages ended, and where its streak began.
    streak_end: AtomicU64,
    streak_begin: AtomicU64,
}

/// A handle of a file in memory. Reached from all threads at once; the file goes when its last handle does. What was not written back
/// by then is, if the store takes it in time ([`Writeback::patience`]); whether it did is not told ([`Mapping::close`]).
/// What is read ahead of it is given up then; a store that does not let go of that is waited for, a second at most.
///
/// A page is the cache's software page; offsets are bytes. What was never written reads zero.
///
/// Beside the file: how many failures to write back this handle has been told of.
pub struct Mapping(Arc<File>, AtomicU32);

impl Mapping {
    fn new(file: Arc<File>) -> Self {
        Self(file, AtomicU32::new(0))
    }

    /// Length in bytes.
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
        // In a fork child the parent's locks may be held for good.
        if self.0.cache.check().is_ok() && self.0.handles.fetch_sub(1, AcqRel) == 1 {
            // Others may hold the file for longer, to collapse it, or to bring pages in; its pages go now, and none comes any
            // more. Only then may another have its id: that is what folios are known by.
            self.0.write_back_at_last();
            self.0.is_closed.store(true, Relaxed);
            self.0.remove_pages(0, Owner::MAX_INDEX);
            self.0.end_behind();
            self.0.cache.leave(self.0.id, self.0.store.is_some());
            // Who has the file for a moment (the background, a thread of the store's that has just told an end) has its store as
            // well. Whoever lets it go may open that anew at once.
            let mut patience = Patience::new();
            while self.0.store.is_some() && Arc::strong_count(&self.0) > 1 && patience.waited_ns() < MOST_LINGER_NS {
                patience.pause();
            }
        }
    }
}

impl File {
    /// Bytes of its index's nodes.
    fn node_bytes(&self) -> u64 {
        u64::from(self.tree.node_count()) * size_of::<Node>() as u64
    }

    /// Records what became of a folio of several pages.
    fn trace(&self, event: Event, index: u64, order: u8) {
        let cache = u64::from(self.cache.number);
        trace::event_in_parts(event, [(index, u64::from(self.id)), (u64::from(order), cache)]);
    }

    #[inline]
    fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Acquire)
    }

    #[inline]
    fn pool(&self) -> &'static Pool {
        self.pool
    }

    #[inline]
    fn page_bytes(&self) -> usize {
        1 << self.pool().page_shift()
    }

    /// Index of the page that a byte lies in.
    #[inline]
    fn index_of(&self, offset: u64) -> u64 {
        offset >> self.pool().page_shift()
    }

    #[inline]
    fn offset_of(&self, index: u64) -> u64 {
        index << self.pool().page_shift()
    }

    /// Indices that one huge folio over `index` would take.
    fn span_of(&self, index: u64) -> Range<u64> {
        let pages = 1 << self.pool().chunk_order();
        let first = index & !(pages - 1);
        first..first + pages
    }

    /// Most bytes that a file may have.
    fn max_bytes(&self) -> u64 {
        // The last index of all is left out, so that one past the end is an index, too.
        (i64::MAX as u64).min(Owner::MAX_INDEX.saturating_mul(self.page_bytes() as u64))
    }

    /// Refuses offsets that no file has.
    #[inline]
    fn check(&self, offset: u64, len_bytes: u64) -> Result<()> {
        if self.pool.generation() != self.generation {
            self.cache.check()?;
        }
        let is_past = offset.checked_add(len_bytes).is_none_or(|end| end > i64::MAX as u64);
        if is_past { Err(Error::BadOffset { offset, len_bytes }) } else { Ok(()) }
    }

    #[inline]
    fn check_writable(&self) -> Result<()> {
        if self.is_writable { Ok(()) } else { Err(Error::ReadOnly) }
    }

    /// As [`File::check`], of a range that may be as long as it likes: it ends with the file. Returns a length that fits.
    fn check_up_to(&self, offset: u64, len_bytes: u64) -> Result<u64> {
        let len_bytes = len_bytes.min((i64::MAX as u64).saturating_sub(offset));
        self.check(offset, len_bytes).map(|()| len_bytes)
    }

    /// Refuses what would make the file longer than a file can be.
    fn check_size(&self, size_bytes: u64) -> Result<()> {
        let most_bytes = self.max_bytes();
        if size_bytes > most_bytes { Err(Error::FileTooLarge { size_bytes, most_bytes }) } else { Ok(()) }
    }

    /// Under the lock of the index: pages are taken out of the file, or a part of its store.
    fn note_revoked(&self) {
        self.revoked.store(self.revoked.load(Relaxed).wrapping_add(1), Release);
        self.note_left();
    }

    /// Under the lock of the index: a page leaves the file, to come again perhaps.
    fn note_left(&self) {
        self.left.store(self.left.load(Relaxed).wrapping_add(1), Release);
    }

    /// Makes the file at least so long.
    fn grow(&self, size_bytes: u64) {
        let mut seen = self.size_bytes.load(Relaxed);
        while seen < size_bytes {
            match self.size_bytes.compare_exchange(seen, size_bytes, AcqRel, Relaxed) {
                Ok(_) => return,
                Err(now) => seen = now,
            }
        }
    }
}

/// Does `act` from where it ended until it has done `len` bytes; what fails after a part makes it short.
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

/// Does `act` for one buffer after the other, until one is not used whole; what fails after a part makes it short.
fn in_turn<B: std::ops::Deref<Target = [u8]>>(
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

/// Waits for a folio that somebody has for a moment.
struct Turn(Option<Patience>);

impl Turn {
    fn new() -> Self {
        Self(None)
    }

    /// # Errors
    ///
    /// [`Error::Busy`] if that takes a second.
    #[cold]
    fn wait(&mut self) -> Result<()> {
        let patience = self.0.get_or_insert_with(|| {
            crate::stats::add(crate::stats::Counter::FoliosAwaited, 1);
            Patience::new()
        });
        if patience.waited_ns() > MOST_WAIT_NS {
            return Err(Error::Busy { what: "a page of the file has been pinned or held for a second" });
        }
        patience.pause();
        Ok(())
    }
}
