//! Where the bytes of a file come from and go to when they are not in memory.

use std::io;

/// What lies behind a mapping.
///
/// A mapping calls it from any thread, several at a time. Calls may take long (an object far away: 100 ms): who truncates the
/// file waits meanwhile, and who writes to a folio that is being written back. A store must not use the files of the cache that
/// calls it. Calls are made for whole folios at offsets that are multiples of [`Store::block_bytes`], so a store never
/// has to overwrite a part of a block. A length that ends beyond the store is the last, partial block.
pub trait Store: Send + Sync {
    /// Length of the file in bytes, as it is stored.
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
}
