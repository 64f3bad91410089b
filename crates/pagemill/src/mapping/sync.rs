//! Writing back to the store.
//!
//! What was cut off must not come back, and what was written must not be cut off. So the store is cut first, when nothing
//! is being written; a folio whose write met a truncation, or a store that still had more than counts, stays dirty, and
//! the next round cuts and writes again.

use super::writeback::Batch;
use super::{File, Mapping, Turn};
use crate::error::{Error, Result};
use crate::folio::Owner;
use crate::folio::word::State;
use crate::store::Store;
use crate::sync::Relaxed;
use crate::xarray as epoch;

/// Rounds before it gives up: each met a truncation.
const ROUNDS: usize = 16;

impl Mapping {
    /// Writes all that was changed here to the store, in the order of the file, and returns when it is safe there. A file in
    /// memory only has nothing to do. One at a time does this for a file; others wait.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] with what the store says: the bytes stay dirty, another call tries again. [`Error::Busy`] where somebody holds a
    /// folio for a second, or truncates all the time.
    pub fn sync(&self) -> Result<()> {
        self.0.check(0, 0)?;
        self.0.sync_pages(0, Owner::MAX_INDEX - 1)
    }

    /// As [`Mapping::sync`], of `len_bytes` from `offset` on and what shares a folio with them; the file's length is made
    /// safe, too.
    ///
    /// # Errors
    ///
    /// As [`Mapping::sync`]; [`Error::BadOffset`].
    pub fn sync_range(&self, offset: u64, len_bytes: u64) -> Result<()> {
        let file = &*self.0;
        file.check(offset, len_bytes)?;
        if len_bytes == 0 {
            return Ok(());
        }
        file.sync_pages(file.index_of(offset), file.index_of(offset + len_bytes - 1).min(Owner::MAX_INDEX - 1))
    }
}

impl File {
    fn sync_pages(&self, first: u64, last: u64) -> Result<()> {
        let Some(store) = &self.store else { return Ok(()) };
        let _alone = self.syncing.lock();
        for _ in 0..ROUNDS {
            self.cut(&**store)?;
            if self.write_back_all(&**store, first, last)? {
                self.cache.evict_after_ns.store(0, Relaxed);
                self.lengthen(&**store)?;
                return store.sync().map_err(failed("making a file safe"));
            }
        }
        Err(Error::Busy { what: "the file is truncated all the time" })
    }
}

/// For `map_err`: what was being done when the store failed.
pub(super) fn failed(doing: &'static str) -> impl FnOnce(std::io::Error) -> Error {
    move |cause| Error::Store { doing, cause }
}

/// A folio that is kept still, and goes on as it was whatever happens to the store.
pub(super) struct Still<'file> {
    pub file: &'file File,
    pub number: u32,
}

/// The index after a folio, and what is kept still of it: its number and state, if it is dirty.
type Frozen = (u64, Option<(u32, State)>);

impl Drop for Still<'_> {
    fn drop(&mut self) {
        self.file.thaw(self.number);
    }
}

impl File {
    /// Under the lock of the index: the store may hold more than counts.
    pub(super) fn note_more_stored(&self) {
        let cut = self.cut.load(Relaxed);
        self.cut.store((cut | 1).wrapping_add(2 * (cut & 1)), Relaxed);
    }

    /// Cuts the store down to what counts of it.
    fn cut(&self, store: &dyn Store) -> Result<()> {
        let (before, stored) = {
            let _writer = self.tree.lock();
            (self.cut.load(Relaxed), self.stored_bytes.load(Relaxed))
        };
        if before & 1 == 1 {
            store.set_size(stored).map_err(failed("cutting a file"))?;
            let _writer = self.tree.lock();
            if self.cut.load(Relaxed) == before {
                self.cut.store(before.wrapping_add(1), Relaxed);
            }
        }
        Ok(())
    }

    /// Makes the store as long as the file was made here. What somebody else did to its length is left alone.
    fn lengthen(&self, store: &dyn Store) -> Result<()> {
        let size_bytes = self.size_bytes();
        if size_bytes > self.stored_bytes.load(Relaxed) {
            store.set_size(size_bytes).map_err(failed("setting the size of a file"))?;
            let _writer = self.tree.lock();
            // Otherwise it was cut meanwhile, and the store will be.
            if self.cut.load(Relaxed) & 1 == 0 {
                self.stored_bytes.store(self.stored_bytes.load(Relaxed).max(size_bytes), Relaxed);
            }
        }
        Ok(())
    }

    /// Writes each dirty folio of these pages once. Returns whether none had to stay dirty.
    fn write_back_all(&self, store: &dyn Store, first: u64, last: u64) -> Result<bool> {
        let (mut at, mut is_clean) = (first, true);
        let mut batch = Batch::new(self, store);
        while let Some(found) = { self.tree.next(at, last, &epoch::pin()) } {
            // It may be split meanwhile: the next look begins where this folio ended.
            let (end, dirty) = match self.try_freeze_dirty(found.first) {
                Some(frozen) => frozen,
                None => {
                    // Who has it may wait for one of the batch.
                    is_clean &= batch.write()?;
                    self.freeze_dirty(found.first)?
                }
            };
            if let Some((number, state)) = dirty {
                batch.push(number, state);
            }
            if batch.is_full() {
                is_clean &= batch.write()?;
            }
            at = end;
        }
        Ok(batch.write()? && is_clean)
    }

    fn freeze_dirty(&self, index: u64) -> Result<Frozen> {
        let mut turn = Turn::new();
        loop {
            if let Some(frozen) = self.try_freeze_dirty(index) {
                return Ok(frozen);
            }
            turn.wait()?;
        }
    }

    /// Keeps the folio at `index` still if it is dirty: others read it, and nobody writes. Also the index after it. `None` if
    /// somebody has it.
    fn try_freeze_dirty(&self, index: u64) -> Option<Frozen> {
        loop {
            let guard = epoch::pin();
            let Some(hit) = self.tree.find(index, &guard) else { return Some((index + 1, None)) };
            let (number, end) = (hit.value() as u32, hit.found().last() + 1);
            let word = self.pool().word(number);
            let seen = word.load();
            if !seen.is_dirty() && seen.is_readable() && hit.is_still() && word.is_unchanged(seen) {
                return Some((end, None));
            }
            match word.freeze() {
                Ok(state) if hit.is_still() => return Some((end, Some((number, state)))),
                Ok(_) => self.thaw(number),
                Err(_) => return None,
            }
        }
    }

    /// A folio was written to the store up to `end`, while so much had been cut. Lets it go on; returns whether it is clean.
    pub(super) fn note_written(&self, still: Still<'_>, end: u64, cut: u32) -> bool {
        let writer = self.tree.lock();
        let is_clean = cut & 1 == 0 && self.cut.load(Relaxed) == cut;
        if is_clean {
            self.stored_bytes.store(self.stored_bytes.load(Relaxed).max(end), Relaxed);
        } else {
            // What was just written may be behind the end by now.
            self.note_more_stored();
        }
        drop(writer);
        if is_clean {
            let number = still.number;
            std::mem::forget(still);
            self.note_revived(number, self.pool().word(number).thaw_clean());
        }
        is_clean
    }
}
