//! Stores: the backing storage of mappings.
//!
//! ```text
//!   Store      the contract: size, block, read, write, sync; start for many at a time    (here)
//!     Transfer   one in-flight read or write: memory, completion, cancellation             (transfer, buffer)
//!     FileStore  a file or a block device, with direct I/O where possible                  (file/)
//!     MemoryStore, FaultyStore   for tests: bytes in memory; a store that injects faults   (memory, faulty)
//!     Ring       transfers of one thread with files: io_uring, or threads instead          (ring/)
//!     engine     one thread with a ring, for threads that start transfers without a ring   (engine)
//! ```
//!
//! Does not use folios or caches. Uses `stats` and `sync`. Locks are held for a few instructions (the lock of `regions`
//! around a `madvise`), never around I/O or callbacks. Only forks take two locks at a time (`forked`: claims, then
//! regions). Diagram and fallbacks: docs/files-behind.md.

// Nothing here is modelled by loom.
#![cfg(not(loom))]

pub mod buffer;
mod engine;
pub mod faulty;
pub mod file;
mod forked;
pub mod memory;
pub mod ring;
pub mod transfer;
mod uring;

pub use buffer::{Aligned, Buffer};
pub use faulty::{Faults, FaultyStore};
pub use file::{FileOptions, FileStore};
pub use memory::MemoryStore;
pub use ring::Ring;
pub use transfer::{Cancel, Direction, Finish, Gather, Transfer};

use std::any::Any;
use std::io;

/// The backing storage of a mapping.
///
/// A mapping calls its store from any thread, several calls at a time. A call may take long (a remote object: 100 ms).
/// A truncation of the file waits for it, and so does a write to a folio under writeback. A store must not use files of
/// the cache that calls it. Calls cover whole folios at offsets that are multiples of [`Store::block_bytes`], so a
/// store never overwrites a part of a block. A length that ends beyond the store means the last, partial block.
///
/// Concurrent calls may complete in any order. A caller that needs an order waits for the first call before it makes
/// the second. Two writes to one block never run at a time. A read may run beside a write to the same block if its
/// result is no longer used.
///
/// A panic of a store unwinds through the call that needed it. A thread of this crate catches and counts it
/// (`behind_panics`). The file then has no background writeback until a sync of it succeeds.
///
/// ```
/// use pagemill::store::{MemoryStore, Store};
/// use std::io;
///
/// /// A read-only store that computes its bytes.
/// struct Sevens;
///
/// impl Store for Sevens {
///     fn size_bytes(&self) -> io::Result<u64> {
///         Ok(1 << 20)
///     }
///     fn block_bytes(&self) -> usize {
///         1
///     }
///     fn read(&self, _offset: u64, to: &mut [u8]) -> io::Result<()> {
///         to.fill(7);
///         Ok(())
///     }
///     fn write(&self, _offset: u64, _from: &[u8]) -> io::Result<()> {
///         Err(io::ErrorKind::ReadOnlyFilesystem.into())
///     }
///     fn set_size(&self, _size_bytes: u64) -> io::Result<()> {
///         Err(io::ErrorKind::ReadOnlyFilesystem.into())
///     }
///     fn sync(&self) -> io::Result<()> {
///         Ok(())
///     }
///     fn is_writable(&self) -> bool {
///         false
///     }
/// }
///
/// # use pagemill::{Pagemill, mapping::Settings};
/// let cache = Pagemill::of_process()?.caches.make(Settings::new("computed", 64 << 20))?;
/// let file = cache.open(std::sync::Arc::new(Sevens))?;
/// let mut bytes = [0; 3];
/// assert_eq!((file.read_at(&mut bytes, 99)?, bytes), (3, [7; 3]));
/// # Ok::<(), pagemill::Error>(())
/// ```
pub trait Store: Any + Send + Sync {
    /// Returns the stored length of the file in bytes. Queried anew each time, because other processes may change it.
    ///
    /// # Errors
    ///
    /// Errors of the store.
    fn size_bytes(&self) -> io::Result<u64>;

    /// Returns the unit of transfers: a power of two, at most the software page.
    fn block_bytes(&self) -> usize;

    /// Reads from `offset` into all of `to`; bytes beyond the end read zero.
    ///
    /// # Errors
    ///
    /// Errors of the store; the content of `to` is discarded then.
    fn read(&self, offset: u64, to: &mut [u8]) -> io::Result<()>;

    /// Writes all of `from` at `offset` and extends the file if needed; a gap reads zero.
    ///
    /// # Errors
    ///
    /// Errors of the store; the bytes stay dirty in memory then.
    fn write(&self, offset: u64, from: &[u8]) -> io::Result<()>;

    /// Sets the length of the file. Bytes that are cut off do not come back; bytes that are added read zero.
    ///
    /// # Errors
    ///
    /// Errors of the store.
    fn set_size(&self, size_bytes: u64) -> io::Result<()>;

    /// Makes all completed writes and size changes durable, then returns.
    ///
    /// # Errors
    ///
    /// Errors of the store.
    fn sync(&self) -> io::Result<()>;

    /// Returns whether the store accepts writes.
    fn is_writable(&self) -> bool {
        true
    }

    /// Starts transfers, in any order. Each is finished once, by any thread, perhaps before this returns: with the same
    /// guarantees as [`Store::read`] and [`Store::write`], or with an error. A transfer that is dropped unfinished ends
    /// as cancelled. A store checks [`Transfer::is_cancelled`] before it begins a transfer, and may check it while the
    /// transfer runs.
    ///
    /// The default is for stores with blocking calls only: the caller does the transfers one after the other.
    fn start(&self, batch: Vec<Transfer>) {
        batch.into_iter().for_each(|transfer| transfer.run(self));
    }

    /// Returns whether [`Store::start`] returns before the transfers are done and runs many concurrently. Writeback
    /// then starts its transfers in batches.
    fn is_asynchronous(&self) -> bool {
        false
    }

    /// Returns the store as a file of the system, if it is one: a [`Ring`] can then do its transfers.
    fn as_file(&self) -> Option<&FileStore> {
        None
    }
}

/// Returns whether a store fills the whole buffer of a read or reports an error. True for [`FileStore`] only. Other
/// types are not trusted, whatever their [`Store::as_file`] returns: a short read would expose stale memory.
pub fn fills_all(store: &dyn Store) -> bool {
    (store as &dyn Any).is::<FileStore>()
}

/// Error numbers that this crate creates itself.
pub mod errno {
    use std::io;

    pub const EINTR: i32 = 4;
    pub const EIO: i32 = 5;
    pub const EBADF: i32 = 9;
    pub const EAGAIN: i32 = 11;
    pub const EBUSY: i32 = 16;
    pub const EISDIR: i32 = 21;
    pub const EINVAL: i32 = 22;
    pub const EFBIG: i32 = 27;
    pub const ENOSPC: i32 = 28;
    pub const EOPNOTSUPP: i32 = 95;
    pub const ETIMEDOUT: i32 = 110;
    pub const ECANCELED: i32 = 125;

    pub fn error(number: i32) -> io::Error {
        io::Error::from_raw_os_error(number)
    }

    /// Returns whether `error` is the system's error of that number.
    pub fn is(error: &io::Error, number: i32) -> bool {
        error.raw_os_error() == Some(number)
    }
}
