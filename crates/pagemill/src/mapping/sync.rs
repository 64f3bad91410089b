//! Making what was written safe: all of it in the store, then the store's own word for it.
//!
//! What was cut off must not come back, and what was written must not be cut off. So the store is cut first, when nothing
//! is being written; a folio whose write met a truncation, or a store that still had more than counts, stays dirty, and
//! the next round cuts and writes again.

use super::dirty::DIRTY;
use super::writeback::{Walk, Walked, Why};
use super::{File, Mapping, Turn};
use crate::epoch;
use crate::error::{Error, Result};
use crate::folio::Owner;
use crate::folio::word::State;
use crate::stats::{self, Counter};
use crate::store::Store;
use crate::sync::{Acquire, Patience, Relaxed};
use std::ops::Range;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

/// Rounds before it gives up: each met a truncation.
const ROUNDS: usize = 16;

impl Mapping {
    /// Writes all that was changed here to the store, in the order of the file, and returns when it is safe there. A file in
    /// memory only has nothing to do. One at a time does this for a file; others wait.
    ///
    /// Cost: a look at each dirty folio, and what the store takes. Many are under way at a time; such as follow each other are
    /// written as one, up to 1 MiB.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] with what the store says: the bytes stay dirty, another call tries again. So it says, once to each handle
    /// ([`Mapping::try_clone`]), if something could not be written back since the last sync by this handle, in the background or by
    /// another: even if all is safe now. [`Error::Busy`] where somebody pins or holds a dirty folio for a second, or truncates all the time:
    /// the other dirty folios are in the store then, though not safe there.
    pub fn sync(&self) -> Result<()> {
        self.0.check(0, 0)?;
        self.tell(self.0.sync_pages(0..Owner::MAX_INDEX))
    }

    /// As [`Mapping::sync`], of `len_bytes` from `offset` on (`u64::MAX`: up to the end) and what shares a folio with them; the file's length is made
    /// safe, too.
    ///
    /// # Errors
    ///
    /// As [`Mapping::sync`]; [`Error::BadOffset`].
    pub fn sync_range(&self, offset: u64, len_bytes: u64) -> Result<()> {
        match self.0.pages_of(offset, len_bytes)? {
            Some(pages) => self.tell(self.0.sync_pages(pages)),
            None => Ok(()),
        }
    }

    /// Writes what was changed in `len_bytes` from `offset` on to the store, and returns when that has it. It is not
    /// safe there yet: [`Mapping::sync`] is quick afterwards.
    ///
    /// # Errors
    ///
    /// As [`Mapping::sync_range`], but of what failed before nothing is told.
    pub fn write_back(&self, offset: u64, len_bytes: u64) -> Result<()> {
        let file = &self.0;
        let (Some(pages), Some(store)) = (file.pages_of(offset, len_bytes)?, &file.store) else { return Ok(()) };
        let _alone = file.syncing.lock();
        file.write_back_all(&**store, pages)
    }
}

impl Mapping {
    /// Makes all that was written safe, and lets the handle go.
    ///
    /// # Errors
    ///
    /// As [`Mapping::sync`], and the handle: nothing is lost yet.
    pub fn close(self) -> std::result::Result<(), (Self, Error)> {
        self.sync().map_err(|error| (self, error))
    }
}

/// The index after a folio, and what is kept still of it: index, number and state, if it is dirty.
type Frozen = (u64, Option<(u64, u32, State)>);

/// For `map_err`: what was being done when the store failed.
pub(super) fn failed(doing: &'static str) -> impl FnOnce(std::io::Error) -> Error {
    move |cause| Error::Store { doing, cause }
}

impl File {
    /// Pages that hold bytes of a range; `None` where that is empty.
    fn pages_of(&self, offset: u64, len_bytes: u64) -> Result<Option<Range<u64>>> {
        let len_bytes = self.check_up_to(offset, len_bytes)?;
        let Some(last) = len_bytes.checked_sub(1) else { return Ok(None) };
        let end = self.index_of(offset + last) + 1;
        Ok(Some(self.index_of(offset)..end.min(Owner::MAX_INDEX)))
    }

    fn sync_pages(self: &Arc<Self>, pages: Range<u64>) -> Result<()> {
        let Some(store) = &self.store else { return Ok(()) };
        let _alone = self.syncing.lock();
        self.write_back_all(&**store, pages)?;
        let done = self.lengthen(&**store);
        let done = done.and_then(|()| store.sync().map_err(failed("making a file safe")));
        done.inspect_err(|error| self.note_error(error))
    }

    /// Writes until each folio that was dirty has been clean once. The caller has the file's token.
    fn write_back_all(self: &Arc<Self>, store: &dyn Store, pages: Range<u64>) -> Result<()> {
        // What is appended meanwhile is not meant, however fast that goes on.
        let end = self.index_of(self.size_bytes().next_multiple_of(self.page_bytes() as u64));
        let walk =
            Walk { why: Why::Sync, pages: pages.start..pages.end.min(end), most_bytes: u64::MAX, patience: None };
        self.await_underway();
        self.forget_needless(end, pages.end);
        for _ in 0..ROUNDS {
            let walked = self.walk_once(store, &walk)?;
            if let Some(error) = walked.failure {
                return Err(error);
            }
            // What a truncation took away meanwhile must not be in the store, either, as it was before it was written.
            if walked.is_clean && !self.is_cut() {
                return Ok(());
            }
        }
        Err(Error::Busy { what: "the file is truncated all the time" })
    }

    /// Cuts the store, and walks. The caller has the file's token; nothing of the file is under way. What fails is noted for all
    /// handles.
    pub(super) fn walk_once(self: &Arc<Self>, store: &dyn Store, walk: &Walk) -> Result<Walked> {
        self.cut(store).inspect_err(|error| self.note_error(error))?;
        let walked = self.walk(store, walk)?;
        walked.failure.iter().for_each(|error| self.note_error(error));
        Ok(walked)
    }

    /// The last handle goes: what was written reaches the store, if that takes it in time. Nobody can be told.
    pub(super) fn write_back_at_last(self: &Arc<Self>) {
        let (Some(store), Some(dirty)) = (&self.store, &self.dirty) else { return };
        let is_cut = self.is_cut() || self.size_bytes() > self.stored_bytes.load(Relaxed);
        if store.is_writable() && (is_cut || dirty.bytes() > 0) {
            // A store that panics would take the program down where somebody only lets a file go.
            let written = panic::catch_unwind(AssertUnwindSafe(|| self.write_back_in_time(&**store)));
            if !matches!(written, Ok(Ok(()))) {
                stats::add(Counter::CacheWriteFailed, 1);
            }
        }
        stats::add(Counter::CacheLost, dirty.bytes());
    }

    fn write_back_in_time(self: &Arc<Self>, store: &dyn Store) -> Result<()> {
        const LATE: Error = Error::Busy { what: "the store does not go on" };
        let (patience, mut waits) = (self.cache.balance.patience, Patience::new());
        let is_late = |waits: &Patience| u128::from(waits.waited_ns()) > patience.as_nanos();
        let _alone = loop {
            match self.syncing.try_lock() {
                Some(alone) => break alone,
                None if is_late(&waits) => return Err(LATE),
                None => waits.pause(),
            }
        };
        let walk = Walk { why: Why::Sync, pages: 0..Owner::MAX_INDEX, most_bytes: u64::MAX, patience: Some(patience) };
        loop {
            if self.is_underway() {
                if is_late(&waits) {
                    return Err(LATE);
                }
                waits.pause();
                continue;
            }
            let walked = self.walk_once(store, &walk)?;
            if let Some(error) = walked.failure {
                return Err(error);
            }
            if walked.is_clean && !self.is_cut() {
                return self.lengthen(store);
            }
            if is_late(&waits) {
                return Err(LATE);
            }
            // Whoever makes it huge, or small, is done soon.
            waits.pause();
        }
    }

    /// Whether a store has something of it that it has not told the end of.
    pub(super) fn is_underway(&self) -> bool {
        self.dirty.as_ref().is_some_and(|dirty| dirty.underway.load(SeqCst) > 0)
    }

    /// Waits for what another has left with the store.
    pub(super) fn await_underway(&self) {
        let mut patience = Patience::new();
        while self.is_underway() {
            patience.pause();
        }
    }

    /// Under the lock of the index: the store may hold more than counts.
    pub(super) fn note_more_stored(&self) {
        let cut = self.cut.load(Relaxed);
        self.cut.store((cut | 1).wrapping_add(2 * (cut & 1)), Relaxed);
    }

    /// Whether the store may hold more than counts.
    pub(super) fn is_cut(&self) -> bool {
        self.cut.load(Acquire) & 1 == 1
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
            if !self.is_cut() {
                self.stored_bytes.store(self.stored_bytes.load(Relaxed).max(size_bytes), Relaxed);
            }
        }
        Ok(())
    }

    pub(super) fn freeze_dirty(&self, index: u64) -> Result<Frozen> {
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
    pub(super) fn try_freeze_dirty(&self, index: u64) -> Option<Frozen> {
        loop {
            let guard = epoch::pin();
            let Some(hit) = self.tree.find(index, &guard) else { return Some((index + 1, None)) };
            let (number, first, end) = (hit.value() as u32, hit.first(), hit.found().last() + 1);
            let word = self.pool().word(number);
            let seen = word.load();
            if !seen.is_dirty() && seen.is_readable() && hit.is_still() && word.is_unchanged(seen) {
                return Some((end, None));
            }
            match word.freeze() {
                Ok(state) if hit.is_still() && state.is_dirty() => return Some((end, Some((first, number, state)))),
                Ok(_) => self.thaw(number),
                Err(_) => return None,
            }
        }
    }

    /// Makes what lies behind the end of the file clean, from `first` to before `end`. Stops at what is inside by now.
    fn forget_needless(&self, first: u64, end: u64) {
        let mut at = first;
        while at < end
            && let Some(found) = { self.tree.next_marked(at, end - 1, DIRTY, &epoch::pin()) }
        {
            at = found.last() + 1;
            if let Some((_, Some((index, number, state)))) = self.try_freeze_dirty(found.first) {
                if self.offset_of(index) < self.size_bytes() {
                    return self.thaw(number);
                }
                self.note_needless(index, number, state);
            }
        }
    }

    /// A still folio lies behind the end of the file, so the store needs nothing of it: lets it go on, clean.
    pub(super) fn note_needless(&self, index: u64, number: u32, state: State) {
        self.tree.lock().clear_mark_of(index, u64::from(number), DIRTY);
        let is_live = self.pool().word(number).thaw_clean();
        if is_live {
            self.sub_dirty(self.cache.folio_bytes(state.order()));
        }
        self.note_revived(number, is_live);
    }

    /// Folios (index, number, order) were written to the store up to `end`, while so much had been cut. Lets them go on; returns
    /// whether they are clean.
    pub(super) fn note_written(
        &self,
        folios: impl Iterator<Item = (u64, u32, u8)> + Clone,
        end: u64,
        cut: u32,
    ) -> bool {
        let mut writer = self.tree.lock();
        let is_clean = cut & 1 == 0 && self.cut.load(Relaxed) == cut;
        if is_clean {
            self.stored_bytes.store(self.stored_bytes.load(Relaxed).max(end), Relaxed);
            for (index, number, _) in folios.clone() {
                writer.clear_mark_of(index, u64::from(number), DIRTY);
            }
        } else {
            // What was just written may be behind the end by now.
            self.note_more_stored();
        }
        drop(writer);
        let mut clean_bytes = 0;
        for (_, number, order) in folios {
            let word = self.pool().word(number);
            let is_live = if is_clean { word.thaw_clean() } else { word.thaw() };
            clean_bytes += if is_clean && is_live { self.cache.folio_bytes(order) } else { 0 };
            self.note_revived(number, is_live);
        }
        self.sub_dirty(clean_bytes);
        if clean_bytes > 0 && self.cache.evict_after_ns.load(SeqCst) > 0 {
            self.cache.evict_after_ns.store(0, SeqCst);
        }
        is_clean
    }
}
