//! Where the bytes of a file come from and go to when they are not in memory.
//!
//! ```text
//!   Store      the contract: size, block, read, write, sync; start for many at a time    (here)
//!     Transfer   one read or write under way: memory, whom to tell, how to give it up      (transfer, buffer)
//!     FileStore  a file or a block device, past the kernel's page cache                    (file/)
//!     MemoryStore, FaultyStore   for tests: bytes in memory; a store that fails as told    (memory, faulty)
//!     Ring       transfers of one thread with files: io_uring, or threads instead          (ring/)
//!     engine     one thread with a ring, for who starts transfers and has none             (engine)
//! ```
//!
//! Knows nothing of folios and caches. Below: `stats`, `sync`. Locks are held for some instructions (that of `regions` around
//! a `madvise`), never around I/O or calls of somebody else's code; two at a time only for forks (`forked`: claims, then
//! regions). Diagram and fallbacks: docs/files-behind.md.

pub mod buffer;
mod engine;
pub mod faulty;
pub mod file;
mod forked;
pub mod memory;
pub mod ring;
pub mod transfer;

pub use buffer::{Aligned, Buffer};
pub use faulty::{Faults, FaultyStore};
pub use file::{FileOptions, FileStore};
pub use memory::MemoryStore;
pub use ring::Ring;
pub use transfer::{Cancel, Direction, Finish, Gather, Transfer};

use std::io;

/// What lies behind a mapping.
///
/// A mapping calls it from any thread, several at a time. Calls may take long (an object far away: 100 ms): who truncates the
/// file waits meanwhile, and who writes to a folio that is being written back. A store must not use the files of the cache that
/// calls it. Calls are made for whole folios at offsets that are multiples of [`Store::block_bytes`], so a store never
/// has to overwrite a part of a block. A length that ends beyond the store is the last, partial block.
///
/// Calls at the same time may be done in any order; who needs one waits for the first before making the second. No two at a
/// time write to one block. A read may go on beside a write to the same block if nobody wants its answer any more.
pub trait Store: Send + Sync {
    /// Length of the file in bytes, as it is stored. Asked anew each time: somebody else may have changed it.
    ///
    /// # Errors
    ///
    /// What the store says.
    fn size_bytes(&self) -> io::Result<u64>;

    /// The unit of its transfers: a power of two, up to the software page.
    fn block_bytes(&self) -> usize;

    /// Reads from `offset` into all of `to`; what lies beyond the end reads zero.
    ///
    /// # Errors
    ///
    /// What the store says; nothing is kept of `to` then.
    fn read(&self, offset: u64, to: &mut [u8]) -> io::Result<()>;

    /// Writes all of `from` at `offset`, growing the file where it must; a gap reads zero then.
    ///
    /// # Errors
    ///
    /// What the store says; the bytes stay dirty in memory then.
    fn write(&self, offset: u64, from: &[u8]) -> io::Result<()>;

    /// Makes the file `size_bytes` long: what is cut off does not come back, what is added reads zero.
    ///
    /// # Errors
    ///
    /// What the store says.
    fn set_size(&self, size_bytes: u64) -> io::Result<()>;

    /// Returns when all that was done before is safe.
    ///
    /// # Errors
    ///
    /// What the store says.
    fn sync(&self) -> io::Result<()>;

    /// Whether it can be written to at all.
    fn is_writable(&self) -> bool {
        true
    }

    /// Starts transfers, in any order. Each is finished once, by any thread, perhaps before this returns: with the same
    /// promises as [`Store::read`] and [`Store::write`], or with an error. One that is dropped unfinished ends as cancelled.
    /// A store looks at [`Transfer::is_cancelled`] before it begins with one, and may while it goes on.
    ///
    /// A store that only blocks leaves this as it is: one after the other is done at once, by the caller.
    fn start(&self, batch: Vec<Transfer>) {
        batch.into_iter().for_each(|transfer| transfer.run(self));
    }

    /// Whether [`Store::start`] returns before the transfers are done, and many go on beside each other: then what is written back
    /// is started together.
    fn is_asynchronous(&self) -> bool {
        false
    }

    /// Itself, if it is a file of the system: who has a [`Ring`] can do transfers with it there.
    fn as_file(&self) -> Option<&FileStore> {
        None
    }
}

/// Error numbers that are made here, not told by the system.
pub(crate) mod errno {
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

    /// Whether it is the system's error of that number.
    pub fn is(error: &io::Error, number: i32) -> bool {
        error.raw_os_error() == Some(number)
    }
}
