//! Refresh: adopts changes that other processes made to a file's store.

use crate::folio::Owner;
use crate::mapping::writeback::sync::failed;
use crate::mapping::{File, Mapping, TimedWait};
use pagemill_core::error::{Error, Result};
use pagemill_core::sync::{Relaxed, Release};
use pagemill_xarray::Found;

impl Mapping {
    /// Adopts changes that other processes made to the store since the file was opened or refreshed. The file gets the
    /// store's length. Its folios are evicted, so that they are read again. Without a refresh the file keeps its
    /// length, pages in memory keep their bytes, and bytes that the store has lost read zero. Does nothing for a file
    /// without a store.
    ///
    /// Reads during the refresh find old or new bytes. Writes wait.
    ///
    /// Cost: a query of the store's size, and some hundred instructions for each folio in memory.
    ///
    /// # Errors
    ///
    /// [`Error::WrongState`] if the file has changes that are not synced; nothing has changed then. [`Error::Busy`] if
    /// a folio is pinned or held for a second; the file then has the store's length, but that folio and the folios
    /// behind it keep their bytes. [`Error::Busy`] also while [`crate::mapping::View::bytes`] borrows bytes of the file, and
    /// if writes in flight do not complete (see [`Mapping::sync`]).
    /// [`Error::Store`] if the store cannot report its size. [`Error::FileTooLarge`].
    pub fn refresh(&self) -> Result<()> {
        let file = &*self.0;
        file.check(0, 0)?;
        let Some(store) = &file.store else { return Ok(()) };
        // Takes the gate, which stops writers, before the sync lock. A thread that writes back must not wait for the
        // gate, because threads that hold the gate wait for writeback.
        let _gate = file.gate.exclusive();
        file.check_not_borrowed()?;
        let _sync = file.syncing.lock();
        file.await_in_flight()?;
        let size_bytes = store.size_bytes().map_err(failed("getting the size of a file"))?;
        file.check_size(size_bytes)?;
        file.check_synced()?;
        let is_shorter = size_bytes < file.size_bytes();
        if is_shorter {
            file.check_last_folio_free(size_bytes)?;
            file.size_bytes.store(size_bytes, Release);
        }
        file.set_stored_bytes(size_bytes);
        if is_shorter {
            file.remove_behind_end(size_bytes);
        } else {
            if file.views.were_writable() && size_bytes > file.size_bytes() {
                file.zero_last_os_page()?;
            }
            file.size_bytes.store(size_bytes, Release);
        }
        file.evict_all()
    }
}

impl File {
    /// Returns an error if the file has changes that the store lacks.
    fn check_synced(&self) -> Result<()> {
        let is_longer = self.size_bytes() > self.stored_bytes.load(Relaxed);
        let is_dirty = |found: Found| self.pool.word(found.value as u32).load().is_dirty();
        if is_longer || self.is_store_too_long() || self.folios(0..Owner::MAX_INDEX).any(is_dirty) {
            return Err(Error::WrongState { what: "the file has changes that are not synced" });
        }
        Ok(())
    }

    /// Sets the number of valid bytes of the store. In-flight reads start over.
    fn set_stored_bytes(&self, size_bytes: u64) {
        let _writer = self.tree.lock();
        self.stored_bytes.store(size_bytes, Relaxed);
        self.note_revoked();
    }

    /// Evicts all folios of the file. The caller holds the file's gate exclusively, so only pins can make a folio dirty
    /// meanwhile.
    fn evict_all(&self) -> Result<()> {
        let (mut at, mut timed_wait) = (0, TimedWait::new());
        while let Some(found) = { self.folios(at..Owner::MAX_INDEX).next() } {
            if self.evict_locked_at(found.first, found.value as u32).is_some() {
                (at, timed_wait) = (found.last() + 1, TimedWait::new());
            } else {
                // Another thread uses the folio, or the index has a different one by now.
                timed_wait.wait()?;
            }
        }
        Ok(())
    }
}
