//! Throttling of writers: a writer pauses or waits, for a bounded time, before dirty pages fill the cache. This module
//! also writes pages back when all pages are dirty and a thread needs a page.
//!
//! Called without the file's gate and without other locks. A writer that waits also writes its own file back, unless
//! another thread does.

use crate::mapping::File;
use crate::mapping::cache::Inner;
use crate::mapping::writeback::flush::Balance;
use crate::mapping::writeback::walk::WritebackReason;
use pagemill_core::error::{Error, Result};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{Backoff, Relaxed, sleep};
use pagemill_core::units::BLOCK_BYTES;
use pagemill_store::errno::{self, ETIMEDOUT};
use std::time::Duration;

/// Number of bytes that a waiting writer writes back at a time.
const WRITER_SLICE_BYTES: u64 = 2 * BLOCK_BYTES as u64;

/// While more than `free_bytes` are dirty, one writer pauses each time that writers have made this number of bytes
/// dirty. The number is small enough that no pause is long, and large enough that a pause is a real sleep.
const PACED_BYTES: u64 = BLOCK_BYTES as u64 / 4;

/// Maximum length of one pause.
const MAX_PAUSE: Duration = Duration::from_millis(200);

/// Interval of checks whether other threads made progress with writeback.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);

impl Balance {
    /// Returns the pause of the writer whose bytes complete another `PACED_BYTES`. If the number of dirty bytes lies
    /// half way from `free_bytes` to `most_bytes`, the pause is the time to write `PACED_BYTES` back. So the number of
    /// dirty bytes settles there.
    fn pause(&self, dirty_bytes: u64) -> Duration {
        let (over, span) =
            (dirty_bytes.saturating_sub(self.free_bytes), self.most_bytes - self.free_bytes.min(self.most_bytes));
        let takes_ns = u128::from(self.ns_per_mib.load(Relaxed)) * u128::from(PACED_BYTES) / (BLOCK_BYTES as u128 / 2);
        let pause_ns = takes_ns * 2 * u128::from(over) / u128::from(span.max(1));
        Duration::from_nanos(u64::try_from(pause_ns).unwrap_or(u64::MAX)).min(MAX_PAUSE)
    }
}

/// Measures the time without any progress of writeback.
struct NoProgress {
    /// Value of [`Balance::cleaned_bytes`] when writeback last made progress.
    cleaned_bytes: u64,
    /// Time since writeback last made progress.
    since: Backoff,
}

impl NoProgress {
    fn new(balance: &Balance) -> Self {
        Self { cleaned_bytes: balance.cleaned_bytes.load(Relaxed), since: Backoff::new() }
    }

    /// Returns an error if the time without progress exceeds the limit ([`crate::mapping::Writeback::timeout`]).
    fn check(&mut self, balance: &Balance) -> Result<()> {
        let cleaned_bytes = balance.cleaned_bytes.load(Relaxed);
        if cleaned_bytes != self.cleaned_bytes {
            *self = Self { cleaned_bytes, since: Backoff::new() };
        }
        let is_too_long = u128::from(self.since.waited_ns()) > balance.timeout.as_nanos();
        if is_too_long { Err(no_progress_error()) } else { Ok(()) }
    }
}

/// Returns the error for a store that makes no progress.
fn no_progress_error() -> Error {
    Error::Store { doing: "waiting for the writeback of dirty pages", cause: errno::error(ETIMEDOUT) }
}

impl File {
    /// Returns whether a writer of `bytes` must call [`File::throttle`] first.
    #[cold]
    pub(crate) fn must_wait(&self, bytes: u64) -> bool {
        if self.dirty.is_none() {
            return false;
        }
        let (balance, dirty_bytes) = (&self.cache.balance, self.cache.dirty_bytes());
        if dirty_bytes < balance.free_bytes {
            return false;
        }
        let made = balance.dirtied_bytes.fetch_add(bytes, Relaxed);
        dirty_bytes >= balance.most_bytes || made / PACED_BYTES != (made + bytes) / PACED_BYTES
    }

    /// Waits until this file may have another dirty folio. Must not be called under a lock or with the file's gate
    /// held.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] with the store's error if nothing can be written back, or with `ETIMEDOUT` if the store makes
    /// no progress.
    #[cold]
    pub(crate) fn throttle(&self) -> Result<()> {
        let (cache, began) = (&self.cache, Backoff::new());
        let dirty_bytes = cache.dirty_bytes();
        let done = if dirty_bytes < cache.balance.most_bytes {
            sleep(cache.balance.pause(dirty_bytes));
            Ok(())
        } else {
            self.await_clean()
        };
        stats::add(Counter::WritersThrottled, 1);
        stats::add(Counter::WritersThrottledUs, began.waited_ns() / 1000);
        done
    }

    /// Writes this file back, or waits for other threads, until the cache has fewer than `most_bytes` dirty, or until
    /// all dirty folios of the file are in use: pinned or prefaulted, perhaps by the calling thread, so a wait could
    /// not end. Folios that are in use are then dirty beside `most_bytes`.
    fn await_clean(&self) -> Result<()> {
        let (cache, balance) = (&self.cache, &self.cache.balance);
        let mut no_progress = NoProgress::new(balance);
        while cache.dirty_bytes() >= balance.most_bytes {
            let Some((file, dirty)) = self.this.upgrade().zip(self.dirty.as_ref()) else { return Ok(()) };
            let written_bytes = match file.write_some(WritebackReason::Share, WRITER_SLICE_BYTES, balance.timeout) {
                Ok(bytes) => bytes,
                Err(Error::Busy { .. }) => return Err(no_progress_error()),
                Err(error) => return Err(error),
            };
            if written_bytes == Some(0) && !dirty.flush.is_midway() {
                // The whole file was walked, and each of its dirty folios was in use.
                return Ok(());
            }
            // This file has few dirty pages, so the stores of other files are slow. The writer of this file need not
            // wait for these stores.
            if dirty.bytes() < WRITER_SLICE_BYTES.min(balance.most_bytes / 4).max(1) {
                return Ok(());
            }
            if dirty.flush.is_failing() {
                return Err(dirty.failure());
            }
            if written_bytes.is_none_or(|bytes| bytes == 0) {
                cache.note_much_dirty();
                sleep(CHECK_INTERVAL);
            }
            no_progress.check(balance)?;
        }
        Ok(())
    }
}

impl Inner {
    /// Writes dirty folios back so that they can be evicted. Called when no clean folio is left. Returns whether some
    /// became clean.
    ///
    /// # Errors
    ///
    /// [`Error::Store`], see [`File::throttle`].
    pub(crate) fn clean_some(&self, want_bytes: u64) -> Result<bool> {
        let balance = &self.balance;
        let mut no_progress = NoProgress::new(balance);
        let begun = no_progress.cleaned_bytes;
        while self.dirty_bytes() > 0 {
            let (mut failure, mut may_continue) = (None, false);
            for entry in self.dirty_files() {
                let Some(file) = entry.upgrade() else { continue };
                let Some(dirty) = &file.dirty else { continue };
                match file.write_some(WritebackReason::Room, want_bytes.max(WRITER_SLICE_BYTES), balance.timeout) {
                    Ok(Some(bytes)) => may_continue |= bytes > 0 || dirty.flush.is_midway(),
                    Ok(None) if dirty.flush.is_failing() => failure = Some(dirty.failure()),
                    // Another thread is writing the file back, or has just done so.
                    Ok(None) => may_continue = true,
                    Err(Error::Busy { .. }) => failure = Some(no_progress_error()),
                    Err(error) => failure = Some(error),
                }
                if balance.cleaned_bytes.load(Relaxed) != begun {
                    return Ok(true);
                }
            }
            if !may_continue {
                return failure.map_or(Ok(false), Err);
            }
            no_progress.check(balance)?;
            sleep(CHECK_INTERVAL);
        }
        Ok(balance.cleaned_bytes.load(Relaxed) != begun)
    }
}
