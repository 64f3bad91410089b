//! What somebody else did to the store: taken over when it is asked for.

use super::sync::failed;
use super::{File, Mapping, Turn};
use crate::epoch;
use crate::error::{Error, Result};
use crate::folio::Owner;
use crate::sync::{Relaxed, Release};

impl Mapping {
    /// Takes over what somebody else did to the store since the file was opened, or refreshed: the file is as long as the store is
    /// now, and what is in memory is dropped, to be read again. Until then a file keeps its length, pages in memory keep their bytes, and
    /// what the store has lost reads zero. A file in memory only has nothing to do.
    ///
    /// Reads beside it find bytes of before or of after; writes wait.
    ///
    /// Cost: a question to the store, some hundred instructions for each folio in memory.
    ///
    /// # Errors
    ///
    /// [`Error::WrongState`] if something was changed here and is not synced: nothing has changed then. [`Error::Busy`] where somebody
    /// pins or holds a folio for a second: the length was taken over, and pages from there on are as they were.
    /// [`Error::Store`] if the store does not tell its size; [`Error::FileTooLarge`].
    pub fn refresh(&self) -> Result<()> {
        let file = &*self.0;
        file.check(0, 0)?;
        let Some(store) = &file.store else { return Ok(()) };
        // Nobody writes; then nobody writes back. Who does may not wait for the gate, but who is inside waits for him.
        let _alone = file.gate.alone();
        let _one = file.syncing.lock();
        file.await_underway();
        let size_bytes = store.size_bytes().map_err(failed("asking for the size of a file"))?;
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

const CHANGED: Error = Error::WrongState { what: "the file was changed here, too, and is not synced" };

impl File {
    /// Refuses where the store lacks something.
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

    /// So much of the store counts from here on; what is being read of it is read again.
    fn take_over(&self, size_bytes: u64) {
        let _writer = self.tree.lock();
        self.stored_bytes.store(size_bytes, Relaxed);
        self.note_revoked();
    }

    /// Drops all folios, of which only pins make one dirty meanwhile.
    fn drop_clean(&self) -> Result<()> {
        let (mut at, mut turn) = (0, Turn::new());
        while let Some(found) = { self.tree.next(at, Owner::MAX_INDEX - 1, &epoch::pin()) } {
            if self.evict_at(found.first, found.value as u32).is_some() {
                (at, turn) = (found.last() + 1, Turn::new());
            } else {
                // Somebody has it; or it is another by now.
                turn.wait()?;
            }
        }
        Ok(())
    }
}
