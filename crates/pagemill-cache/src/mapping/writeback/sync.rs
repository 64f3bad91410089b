//! Sync: writes all dirty pages of a file to its store, then syncs the store.
//!
//! Bytes that a truncation cut off must not come back, and bytes written later must not be cut off. So the store is
//! truncated first, while the file has no write in flight. A folio stays dirty if a truncation ran concurrently with
//! its write, or if the store was still too long. The next attempt truncates the store and writes the folio again.

use crate::folio::Owner;
use crate::mapping::index::Place;
use crate::mapping::writeback::dirty::DIRTY;
use crate::mapping::writeback::walk::{WalkPlan, WalkResult, WritebackReason};
use crate::mapping::{File, Mapping, TimedWait};
use pagemill_core::epoch;
use pagemill_core::error::{Error, Result};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{Acquire, Backoff, Relaxed};
use pagemill_core::units::BLOCK_BYTES;
use pagemill_store::Store;
use std::ops::Range;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

/// Maximum number of attempts of a sync. The sync is attempted again if the file was truncated meanwhile.
const MAX_SYNC_ATTEMPTS: usize = 16;

/// A file that is longer than its store by at least this many bytes is being extended by large writes. The store is
/// then extended before they are written back.
const GROWN_BYTES: u64 = BLOCK_BYTES as u64;

impl Mapping {
    /// Writes all dirty pages to the store in the order of the file, and returns when they are durable. Does nothing
    /// for a file without a store. One thread at a time syncs a file; others wait.
    ///
    /// Cost: a check of each dirty folio, and the store's time. Many transfers are in flight at a time; adjacent folios
    /// are written by one transfer, up to 1 MiB.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] with the store's error: the bytes stay dirty, and another call tries again. The error may also
    /// be that of an earlier write, in the background or by another handle. Each handle ([`Mapping::clone`])
    /// reports such a failure once, even if all bytes are durable now.
    ///
    /// [`Error::Busy`] if a dirty folio is pinned or held for a second, or if the file is truncated continually. The
    /// other dirty folios are then in the store, but not durable. [`Error::Busy`] also if no write completes for as
    /// long as [`Builder::timeout`](crate::mapping::Builder::timeout).
    pub fn sync(&self) -> Result<()> {
        self.0.check(0, 0)?;
        self.report_failures(self.0.sync_pages(0..Owner::MAX_INDEX))
    }

    /// As [`Mapping::sync`], for `len_bytes` from `offset` on (`u64::MAX`: up to the end), and for all of each folio
    /// that lies partly in that range. The file's length becomes durable, too.
    ///
    /// # Errors
    ///
    /// See [`Mapping::sync`]; [`Error::BadOffset`].
    pub fn sync_range(&self, offset: u64, len_bytes: u64) -> Result<()> {
        match self.0.pages_of(offset, len_bytes)? {
            Some(pages) => self.report_failures(self.0.sync_pages(pages)),
            None => Ok(()),
        }
    }

    /// Writes dirty pages in `len_bytes` from `offset` on to the store, and returns when the store has them. The pages
    /// are not durable yet: a later [`Mapping::sync`] makes them durable, and is quick.
    ///
    /// # Errors
    ///
    /// See [`Mapping::sync_range`]. Earlier failures are not reported.
    pub fn write_back(&self, offset: u64, len_bytes: u64) -> Result<()> {
        let file = &self.0;
        let (Some(pages), Some(store)) = (file.pages_of(offset, len_bytes)?, &file.store) else { return Ok(()) };
        let _exclusive = file.syncing.lock();
        file.write_back_all(&**store, pages)
    }
}

impl Mapping {
    /// Makes all writes durable, and drops the handle.
    ///
    /// # Errors
    ///
    /// See [`Mapping::sync`]. The handle is returned with the error, so nothing is lost. A program that only passes the
    /// error on calls `file.close().map_err(|(_file, error)| error)?`. The handle is then dropped, and the drop of a
    /// file's last handle tries once more to write back.
    pub fn close(self) -> std::result::Result<(), (Self, Error)> {
        self.sync().map_err(|error| (self, error))
    }
}

/// The result of freezing a dirty folio: the index of the page behind the folio. If the folio was dirty and is frozen
/// now, also its place.
type FreezeOutcome = (u64, Option<Place>);

/// The error of a call if the store completes no write within the timeout.
const NO_PROGRESS: Error = Error::Busy { what: "the store makes no progress" };

/// Returns a function for `map_err`, which adds the name of the operation during which the store failed.
pub(crate) fn failed(doing: &'static str) -> impl FnOnce(std::io::Error) -> Error {
    move |cause| Error::Store { doing, cause }
}

impl File {
    /// Returns the page indices of a range of bytes, or `None` if the range is empty.
    fn pages_of(&self, offset: u64, len_bytes: u64) -> Result<Option<Range<u64>>> {
        let len_bytes = self.check_up_to(offset, len_bytes)?;
        let Some(last) = len_bytes.checked_sub(1) else { return Ok(None) };
        let end = self.index_of(offset + last) + 1;
        Ok(Some(self.index_of(offset)..end.min(Owner::MAX_INDEX)))
    }

    /// Writes dirty pages in the range back, then makes these pages and the file's length durable.
    fn sync_pages(self: &Arc<Self>, pages: Range<u64>) -> Result<()> {
        let Some(store) = &self.store else { return Ok(()) };
        let _exclusive = self.syncing.lock();
        self.write_back_all(&**store, pages)?;
        let done = self.extend_store(&**store);
        let done = done.and_then(|()| store.sync().map_err(failed("syncing a file")));
        if done.is_ok() {
            self.dirty.iter().for_each(|dirty| dirty.flush.reset_delay());
        }
        done.inspect_err(|error| self.note_error(error))
    }

    /// Writes dirty pages in the range back, until each page that was dirty at the call has been clean once. The caller
    /// holds the file's sync lock.
    fn write_back_all(self: &Arc<Self>, store: &dyn Store, pages: Range<u64>) -> Result<()> {
        // Limited to the current length, so that concurrent appends cannot prolong the sync.
        let end = self.index_of(self.size_bytes().next_multiple_of(self.page_bytes() as u64));
        let walk = WalkPlan {
            reason: WritebackReason::Sync,
            pages: pages.start..pages.end.min(end),
            most_bytes: u64::MAX,
            timeout: self.cache.timeout,
            waits_for_others: true,
        };
        self.await_in_flight()?;
        self.clean_behind_end(end, pages.end);
        for _ in 0..MAX_SYNC_ATTEMPTS {
            let walked = self.walk_once(store, &walk)?;
            walked.failure.map_or(Ok(()), Err)?;
            // Bytes that a truncation cut off meanwhile must not stay in the store.
            if walked.is_clean && !self.is_store_too_long() {
                return Ok(());
            }
        }
        Err(Error::Busy { what: "the file is truncated all the time" })
    }

    /// Truncates the store if needed, then writes the dirty folios. The caller holds the file's sync lock, and the file
    /// has no write in flight. Failures are recorded for all handles.
    pub(crate) fn walk_once(self: &Arc<Self>, store: &dyn Store, walk: &WalkPlan) -> Result<WalkResult> {
        debug_assert!(self.syncing.is_held(), "one thread writes the file back");
        self.truncate_store(store).inspect_err(|error| self.note_error(error))?;
        self.lengthen_store(store);
        let walked = self.walk(store, walk)?;
        walked.failure.iter().for_each(|error| self.note_error(error));
        Ok(walked)
    }

    /// Called when the last handle of the file is dropped: writes dirty pages to the store, if the store accepts them
    /// in time. Errors are counted, not returned.
    pub(crate) fn write_back_at_last(self: &Arc<Self>) {
        let (Some(store), Some(dirty)) = (&self.store, &self.dirty) else { return };
        let has_wrong_length = self.is_store_too_long() || self.size_bytes() > self.stored_bytes.load(Relaxed);
        if store.is_writable() && (has_wrong_length || dirty.bytes() > 0) {
            // A panic of the store must not end the program when it drops a file.
            let written = panic::catch_unwind(AssertUnwindSafe(|| self.write_back_in_time(&**store)));
            if !matches!(written, Ok(Ok(()))) {
                stats::add(Counter::CacheWriteFailed, 1);
            }
        }
        stats::add(Counter::CacheLost, dirty.bytes());
    }

    /// Writes all dirty pages back, within [`Writeback::timeout`](crate::mapping::Writeback::timeout).
    fn write_back_in_time(self: &Arc<Self>, store: &dyn Store) -> Result<()> {
        let (timeout, mut waits) = (self.cache.balance.timeout, Backoff::new());
        let is_late = |waits: &Backoff| u128::from(waits.waited_ns()) > timeout.as_nanos();
        let _exclusive = loop {
            match self.syncing.try_lock() {
                Some(locked) => break locked,
                None if is_late(&waits) => return Err(NO_PROGRESS),
                None => waits.pause(),
            }
        };
        let (pages, timeout) = (0..Owner::MAX_INDEX, Some(timeout));
        let walk =
            WalkPlan { reason: WritebackReason::Sync, pages, most_bytes: u64::MAX, timeout, waits_for_others: false };
        loop {
            if !self.is_in_flight() {
                let walked = self.walk_once(store, &walk)?;
                walked.failure.map_or(Ok(()), Err)?;
                if walked.is_clean && !self.is_store_too_long() {
                    return self.extend_store(store);
                }
            }
            if is_late(&waits) {
                return Err(NO_PROGRESS);
            }
            // A thread that collapses or splits the folio finishes soon.
            waits.pause();
        }
    }

    /// Returns whether the file has a write in flight.
    pub(crate) fn is_in_flight(&self) -> bool {
        self.dirty.as_ref().is_some_and(|dirty| dirty.in_flight.load(SeqCst) > 0)
    }

    /// Waits until the file has no write in flight, for as long as the cache's timeout at most.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`] after the timeout.
    pub(crate) fn await_in_flight(&self) -> Result<()> {
        let mut waits = Backoff::new();
        while self.is_in_flight() {
            if self.cache.timeout.is_some_and(|most| u128::from(waits.waited_ns()) > most.as_nanos()) {
                return Err(NO_PROGRESS);
            }
            waits.pause();
        }
        Ok(())
    }

    /// Records that the store may be longer than `stored_bytes`, its valid part. The caller holds the lock of the
    /// index.
    pub(crate) fn note_store_too_long(&self) {
        let seen = self.length_version.load(Relaxed);
        self.length_version.store((seen | 1).wrapping_add(2 * (seen & 1)), Relaxed);
    }

    /// Returns whether the store may be longer than `stored_bytes`, its valid part.
    pub(crate) fn is_store_too_long(&self) -> bool {
        self.length_version.load(Acquire) & 1 == 1
    }

    /// Truncates the store to `stored_bytes`, its valid part, if the store may be longer.
    fn truncate_store(&self, store: &dyn Store) -> Result<()> {
        let (before, stored) = {
            let _writer = self.tree.lock();
            (self.length_version.load(Relaxed), self.stored_bytes.load(Relaxed))
        };
        if before & 1 == 1 {
            store.set_size(stored).map_err(failed("truncating a file"))?;
            let _writer = self.tree.lock();
            if self.length_version.load(Relaxed) == before {
                self.length_version.store(before.wrapping_add(1), Relaxed);
            }
        }
        Ok(())
    }

    /// Sets the store's length before large writes after its end, because a file system does one write at a time there.
    /// `stored_bytes` stays: the store has no bytes of the file after it yet. If a truncation runs at the same time, it
    /// has noted that the store may be too long. A failure is reported by the writes.
    fn lengthen_store(&self, store: &dyn Store) {
        let size_bytes = self.size_bytes();
        let is_growing = size_bytes >= self.stored_bytes.load(Relaxed).saturating_add(GROWN_BYTES);
        // Another process may have made the store longer than the file.
        if is_growing && store.size_bytes().is_ok_and(|stored| stored < size_bytes) {
            let _ = store.set_size(size_bytes);
        }
    }

    /// Extends the store to the file's length, if the file is longer.
    fn extend_store(&self, store: &dyn Store) -> Result<()> {
        let size_bytes = self.size_bytes();
        if size_bytes > self.stored_bytes.load(Relaxed) {
            store.set_size(size_bytes).map_err(failed("setting the size of a file"))?;
            let _writer = self.tree.lock();
            // If the file was truncated meanwhile, the next attempt truncates the store.
            if !self.is_store_too_long() {
                self.stored_bytes.store(self.stored_bytes.load(Relaxed).max(size_bytes), Relaxed);
            }
        }
        Ok(())
    }

    /// As [`File::try_freeze_dirty`], but waits, a second at most, while another thread uses the folio.
    pub(crate) fn freeze_dirty(&self, index: u64) -> Result<FreezeOutcome> {
        let mut timed_wait = TimedWait::new();
        loop {
            if let Some(frozen) = self.try_freeze_dirty(index) {
                return Ok(frozen);
            }
            timed_wait.wait()?;
        }
    }

    /// Freezes the folio that covers page `index` if the folio is dirty. Threads can read a frozen folio but not write
    /// to it. Returns `None` if another thread uses the folio.
    pub(crate) fn try_freeze_dirty(&self, index: u64) -> Option<FreezeOutcome> {
        loop {
            let guard = epoch::pin();
            let Some(hit) = self.tree.find(index, &guard) else { return Some((index + 1, None)) };
            let (number, end) = (hit.value() as u32, hit.found().last() + 1);
            let word = self.pool.word(number);
            let seen = word.load();
            if !seen.is_dirty() && seen.is_readable() && hit.is_still() && word.is_unchanged(seen) {
                return Some((end, None));
            }
            match self.freeze(number) {
                Ok(state) if hit.is_still() && state.is_dirty() => {
                    return Some((end, Some(Place { number, first: hit.first(), order: state.order() })));
                }
                Ok(_) => self.thaw(number),
                Err(_) => return None,
            }
        }
    }

    /// Makes dirty folios behind the end of the file clean, from page `first` to the page before `end`. Stops at a
    /// folio that lies inside the file by now, because the file has grown.
    fn clean_behind_end(&self, first: u64, end: u64) {
        let mut at = first;
        while at < end
            && let Some(found) = { self.tree.next_marked(at, end - 1, DIRTY, &epoch::pin()) }
        {
            at = found.last() + 1;
            if let Some((_, Some(place))) = self.try_freeze_dirty(found.first) {
                if self.offset_of(place.first) < self.size_bytes() {
                    return self.thaw(place.number);
                }
                self.thaw_behind_end(place);
            }
        }
    }

    /// Thaws a frozen folio that lies behind the end of the file, and makes it clean, because it needs no writeback.
    pub(crate) fn thaw_behind_end(&self, place: Place) {
        self.tree.lock().clear_mark_of(place.first, u64::from(place.number), DIRTY);
        let is_live = self.pool.word(place.number).thaw_clean();
        if is_live {
            self.sub_dirty(self.cache.folio_bytes(place.order));
        }
        self.note_revived(place.number, is_live);
    }

    /// Thaws folios that were written to the store up to offset `end`. `length_version` is the
    /// value of `File::length_version` before the write. Returns whether the folios are clean.
    pub(crate) fn note_written<'run>(
        &self,
        folios: impl Iterator<Item = &'run Place> + Clone,
        end: u64,
        length_version: u32,
    ) -> bool {
        let mut writer = self.tree.lock();
        let is_clean = length_version & 1 == 0 && self.length_version.load(Relaxed) == length_version;
        if is_clean {
            self.stored_bytes.store(self.stored_bytes.load(Relaxed).max(end), Relaxed);
            for place in folios.clone() {
                writer.clear_mark_of(place.first, u64::from(place.number), DIRTY);
            }
        } else {
            // The bytes just written may lie behind the end of the file by now.
            self.note_store_too_long();
        }
        drop(writer);
        let mut clean_bytes = 0;
        for &Place { number, order, .. } in folios {
            let word = self.pool.word(number);
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
