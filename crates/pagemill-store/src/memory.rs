//! A store in memory, for tests.

use super::Store;
use std::io;
use std::sync::{PoisonError, RwLock};

/// A store in memory. Its bytes are lost when the store is dropped: [`Store::sync`] does nothing.
///
/// ```
/// use pagemill::store::{MemoryStore, Store};
///
/// let store = MemoryStore::new(vec![0; 1024], 512); // blocks of 512 bytes
/// store.write(512, &[7; 512])?;
/// assert_eq!((store.size_bytes()?, store.bytes()[512]), (1024, 7));
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct MemoryStore {
    bytes: RwLock<Vec<u8>>,
    block_bytes: usize,
}

impl std::fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryStore").field("block_bytes", &self.block_bytes).finish_non_exhaustive()
    }
}

impl MemoryStore {
    /// Creates a store with these bytes, and with blocks of `block_bytes`.
    ///
    /// # Panics
    ///
    /// If `block_bytes` is not a power of two.
    pub fn new(bytes: Vec<u8>, block_bytes: usize) -> Self {
        assert!(block_bytes.is_power_of_two(), "{block_bytes} is no power of two");
        Self { bytes: RwLock::new(bytes), block_bytes }
    }

    /// Returns a copy of all bytes of the store.
    pub fn bytes(&self) -> Vec<u8> {
        self.bytes.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn with_bytes<T>(&self, act: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        act(&mut self.bytes.write().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Converts a file offset to an index into the store's bytes. Returns an error for an offset above `isize::MAX`.
fn index_of(offset: u64) -> io::Result<usize> {
    usize::try_from(offset).ok().filter(|at| *at <= isize::MAX as usize).ok_or(io::ErrorKind::FileTooLarge.into())
}

impl Store for MemoryStore {
    fn size_bytes(&self) -> io::Result<u64> {
        Ok(self.bytes.read().unwrap_or_else(PoisonError::into_inner).len() as u64)
    }

    fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    fn read(&self, offset: u64, to: &mut [u8]) -> io::Result<()> {
        let (at, bytes) = (index_of(offset)?, self.bytes.read().unwrap_or_else(PoisonError::into_inner));
        let from = bytes.get(at..).unwrap_or_default();
        let len = from.len().min(to.len());
        to[..len].copy_from_slice(&from[..len]);
        to[len..].fill(0);
        Ok(())
    }

    fn write(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        let at = index_of(offset)?;
        let end = index_of(offset.saturating_add(from.len() as u64))?;
        self.with_bytes(|bytes| {
            if bytes.len() < end {
                bytes.resize(end, 0);
            }
            bytes[at..end].copy_from_slice(from);
        });
        Ok(())
    }

    fn set_size(&self, size_bytes: u64) -> io::Result<()> {
        let size = index_of(size_bytes)?;
        self.with_bytes(|bytes| bytes.resize(size, 0));
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    /// Fills the range with 0xdd, so that tests find reads of discarded bytes.
    fn discard(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        let at = index_of(offset)?;
        let end = index_of(offset.saturating_add(len_bytes))?;
        self.with_bytes(|bytes| {
            let len = bytes.len();
            bytes[at.min(len)..end.min(len)].fill(0xdd);
        });
        Ok(())
    }
}
