//! Refresh: adopts changes that other processes made to the store.

use super::sync::failed;
use super::{File, Mapping, TimedWait};
use crate::folio::Owner;
use pagemill_core::epoch;
use pagemill_core::error::{Error, Result};
use pagemill_core::sync::{Relaxed, Release};

impl Mapping {
    /// Adopts changes that other processes made to the store since the file was opened or refreshed. The file gets the
    /// store's length, and its folios are evicted, to be read again. Until then a file keeps its length, pages in
    /// memory keep their bytes, and bytes that the store has lost read zero. Does nothing for a file in memory only.
    ///
    /// Concurrent reads find old or new bytes; writes wait.
    ///
    /// Cost: a query of the store's size, and some hundred instructions for each folio in memory.
    ///
    /// # Errors
    ///
    /// [`Error::WrongState`] if the file has changes that are not synced; nothing has changed then. [`Error::Busy`] if
    /// a folio is pinned or held for a second. The length was adopted then, and that folio and later ones are
    /// unchanged. [`Error::Busy`] also if writes in flight do not complete (see [`Mapping::sync`]). [`Error::Store`] if
    /// the store cannot report its size. [`Error::FileTooLarge`].
    pub fn refresh(&self) -> Result<()> {
        let file = &*self.0;
        file.check(0, 0)?;
        let Some(store) = &file.store else { return Ok(()) };
        // First the gate, which stops writers, then writeback. A thread that writes back must not wait for the gate,
        // because threads inside the gate wait for it.
        let _exclusive = file.gate.exclusive();
        let _one = file.syncing.lock();
        file.await_in_flight()?;
        let size_bytes = store.size_bytes().map_err(failed("getting the size of a file"))?;
        file.check_size(size_bytes)?;
        file.check_synced()?;
        let is_shorter = size_bytes < file.size_bytes();
        if is_shorter {
            file.check_free(size_bytes)?;
            file.size_bytes.store(size_bytes, Release);
        }
        file.take_over(size_bytes);
        if is_shorter {
            file.drop_behind(size_bytes);
        } else {
            file.size_bytes.store(size_bytes, Release);
        }
        file.drop_clean()
    }
}

const CHANGED: Error = Error::WrongState { what: "the file has changes that are not synced" };

impl File {
    /// Fails if the file has changes that the store lacks.
    fn check_synced(&self) -> Result<()> {
        let is_longer = self.size_bytes() > self.stored_bytes.load(Relaxed);
        if is_longer || self.is_cut() {
            return Err(CHANGED);
        }
        let mut at = 0;
        while let Some(found) = { self.tree.next(at, Owner::MAX_INDEX - 1, &epoch::pin()) } {
            if self.pool().word(found.value as u32).load().is_dirty() {
                return Err(CHANGED);
            }
            at = found.last() + 1;
        }
        Ok(())
    }

    /// Sets the valid length of the store. Reads in flight start over.
    fn take_over(&self, size_bytes: u64) {
        let _writer = self.tree.lock();
        self.stored_bytes.store(size_bytes, Relaxed);
        self.note_revoked();
    }

    /// Evicts all folios. Only pins can make one dirty meanwhile.
    fn drop_clean(&self) -> Result<()> {
        let (mut at, mut timed_wait) = (0, TimedWait::new());
        while let Some(found) = { self.tree.next(at, Owner::MAX_INDEX - 1, &epoch::pin()) } {
            if self.evict_at(found.first, found.value as u32).is_some() {
                (at, timed_wait) = (found.last() + 1, TimedWait::new());
            } else {
                // Another thread uses the folio, or the index has another one by now.
                timed_wait.wait()?;
            }
        }
        Ok(())
    }
}
