//! Stores: the backing storage of mappings.
//!
//! ```text
//!   Store      the contract: size, block, read, write, sync; start for many at a time    (here)
//!     Transfer   one in-flight read or write: memory, completion, cancellation             (transfer, buffer)
//!     FileStore  a file or a block device, with direct I/O where possible                  (file/)
//!     MemoryStore              bytes in memory                                             (memory)
//!     FaultyStore              a store that injects faults, with the feature `test-util`   (faulty)
//!     Ring       transfers of one thread with files: io_uring, or threads instead          (ring/)
//!     engine     one thread with a ring, for threads that start transfers without a ring   (engine)
//! ```
//!
//! Does not use folios or caches. Uses `stats` and `sync`. Locks are held for a few instructions (that of `regions`
//! around a `madvise`), never around I/O or callbacks. Only the fork handlers take two locks at once (`forked`: first
//! claims, then regions). docs/files-behind.md lists the fallbacks.
//!
//! The crate `pagemill` re-exports what programs use; examples of these items use its names.

// The crate has no loom tests, so `--cfg loom` builds nothing of it.
#![cfg(not(loom))]

pub mod buffer;
mod engine;
#[cfg(any(test, feature = "test-util"))]
pub mod faulty;
pub mod file;
mod forked;
pub mod memory;
pub mod ring;
pub mod transfer;
mod uring;

pub use buffer::{Aligned, Buffer};
#[cfg(any(test, feature = "test-util"))]
pub use faulty::{Faults, FaultyStore};
pub use file::{FileOptions, FileStore};
pub use memory::MemoryStore;
pub use pagemill_sys::disk::Alignment;
pub use ring::Ring;
pub use transfer::{Cancel, Direction, Finish, Gather, Transfer};

use std::any::Any;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The backing storage of a mapping.
///
/// A mapping calls its store from any thread, and makes several calls at a time. A call may take long (100 ms for a
/// remote object). A truncation of the file waits for the call, and so does a write to a folio under writeback. A store
/// must not use files of the cache that calls it. Calls cover whole folios at offsets that are multiples of
/// [`Store::block_bytes`], so a store never has to overwrite a part of a block. A call that ends beyond the end of the
/// file includes the last, partial block.
///
/// Concurrent calls may complete in any order. A caller that needs an order waits for the first call before it makes
/// the second. Two writes to the same block never run at the same time. A read of a block may run during a write to it
/// only if the caller ignores what the read returns.
///
/// A panic of a store unwinds through the call that needed the store. A thread of this crate catches and counts the
/// panic (`behind_panics`); after that, the file has no background writeback until a sync succeeds.
///
/// ```
/// use pagemill::PageCache;
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
/// let cache = PageCache::builder("computed").limit(64 << 20).build()?;
/// let file = cache.open(std::sync::Arc::new(Sevens))?;
/// let mut bytes = [0; 3];
/// assert_eq!((file.read_at(&mut bytes, 99)?, bytes), (3, [7; 3]));
/// # Ok::<(), pagemill::Error>(())
/// ```
pub trait Store: Any + Send + Sync {
    /// Returns the current length of the file in bytes. Callers do not cache it, because other processes may change it.
    ///
    /// # Errors
    ///
    /// Errors of the store.
    fn size_bytes(&self) -> io::Result<u64>;

    /// Returns the unit of transfers in bytes: a power of two, at most the size of a software page.
    fn block_bytes(&self) -> usize;

    /// Fills `to` with the file's bytes from `offset` on. Bytes beyond the end of the file read zero.
    ///
    /// # Errors
    ///
    /// Errors of the store; the caller then discards the content of `to`.
    fn read(&self, offset: u64, to: &mut [u8]) -> io::Result<()>;

    /// Writes all of `from` at `offset`, and extends the file if needed. Bytes between the old end and `offset` read
    /// zero.
    ///
    /// # Errors
    ///
    /// Errors of the store; the bytes then stay dirty in the cache.
    fn write(&self, offset: u64, from: &[u8]) -> io::Result<()>;

    /// Sets the length of the file. Bytes that are cut off are lost; bytes that are added read zero.
    ///
    /// # Errors
    ///
    /// Errors of the store.
    fn set_size(&self, size_bytes: u64) -> io::Result<()>;

    /// Makes all completed writes and size changes durable before it returns.
    ///
    /// # Errors
    ///
    /// Errors of the store.
    fn sync(&self) -> io::Result<()>;

    /// Frees the space of a range. Later reads of it return unspecified bytes. The length does not change. `offset` and
    /// `len_bytes` must be multiples of [`Store::block_bytes`], and `len_bytes` more than 0. Best effort: the default does
    /// nothing and returns `Ok`.
    ///
    /// # Errors
    ///
    /// Errors of the store, such as `EOPNOTSUPP`, and a refusal by a read-only store. The range may then keep its space.
    fn discard(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        let _ = (offset, len_bytes);
        Ok(())
    }

    /// Returns whether the store accepts writes.
    fn is_writable(&self) -> bool {
        true
    }

    /// Starts transfers, in any order. The store ends each transfer exactly once, on any thread, perhaps before this
    /// call returns. The transfer ends either as [`Store::read`] or [`Store::write`] describes, or with an error. A
    /// transfer that the store drops ends as cancelled. A store checks [`Transfer::is_cancelled`] before it begins a
    /// transfer, and may check again during the transfer.
    ///
    /// The default does the transfers one after the other on the calling thread, with blocking calls.
    fn start(&self, batch: Vec<Transfer>) {
        batch.into_iter().for_each(|transfer| transfer.run(self));
    }

    /// Returns whether [`Store::start`] returns before the transfers are done, and many transfers run at a time. If
    /// true, writeback starts its transfers in batches.
    fn is_asynchronous(&self) -> bool {
        false
    }

    /// Returns this store as a [`FileStore`]; `None` if the store is of another type. The rings of this
    /// library (io_uring) can do transfers only with a [`FileStore`].
    fn as_file(&self) -> Option<&FileStore> {
        None
    }
}

/// Returns whether a store either fills the whole buffer of a read or reports an error. True only if the store itself
/// is a [`FileStore`], whatever [`Store::as_file`] returns. Another type may report success after a short read, and the
/// rest of the buffer would then expose stale memory.
pub fn fills_all(store: &dyn Store) -> bool {
    (store as &dyn Any).is::<FileStore>()
}

/// Locks a mutex, even if a thread has panicked while it held the lock.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Error numbers that this crate uses in its own errors.
pub mod errno {
    pub use libc::{EAGAIN, EBADF, EBUSY, ECANCELED, EFBIG, EINTR, EINVAL, EIO, EISDIR, ENOSPC, EOPNOTSUPP, ETIMEDOUT};
    use std::io;

    /// Returns the operating system's error with this error number.
    pub fn error(number: i32) -> io::Error {
        io::Error::from_raw_os_error(number)
    }

    /// Returns whether `error` is the operating system's error with this error number.
    pub fn is(error: &io::Error, number: i32) -> bool {
        error.raw_os_error() == Some(number)
    }
}
