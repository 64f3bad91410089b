//! Background writeback: one thread writes back dirty pages that are old, or too many for their cache. The thread runs
//! only while pages are dirty.
//!
//! ```text
//!   dirty bytes of a cache     0 ---------- background ---------- half way ------------- maximum ------- limit
//!   a writer                    continues   continues, and wakes  pauses: the more      writes back,
//!                                           the flusher thread    dirty, the longer     or waits
//! ```
//!
//! A file is due when its oldest dirty page is older than [`Writeback::age`], or when its cache has too many dirty
//! pages. Files are written back in *slices* of up to 32 MiB, the file with the oldest page first. A slice follows the
//! order of the file, and begins where the previous slice ended. After a failed slice the file is not retried before a
//! delay, which doubles with each failure. A file is skipped while it is synced, or while its store makes no progress.
//! After a panic of the store, the file is not retried until the program syncs it. The only lock held during a slice is
//! the file's sync lock.
#![cfg_attr(shuttle, allow(dead_code))] // shuttle runs without the thread

use crate::folio::Owner;
use crate::mapping::File;
use crate::mapping::cache::{Caches, Inner};
use crate::mapping::writeback::dirty::Dirty;
use crate::mapping::writeback::walk::{WalkPlan, WritebackReason};
use pagemill_core::callback;
use pagemill_core::error::{Error, Result};
use pagemill_core::sync::{AtomicU64, Guarded, Lock, Relaxed, coarse_ns};
use pagemill_core::units::BLOCK_BYTES;
use pagemill_sys::clock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Maximum number of bytes that one slice of a file writes.
const SLICE_BYTES: u64 = 16 * BLOCK_BYTES as u64;

/// Delay before the writeback of a file is retried after its first failure.
const FIRST_RETRY_DELAY_NS: u64 = 100_000_000;
/// Maximum delay before the writeback of a file is retried.
const MAX_RETRY_DELAY_NS: u64 = 30_000_000_000;
/// Maximum number of doublings of the delay before the writeback of a file is retried. The limit keeps the shift from
/// overflowing.
const MAX_RETRY_DOUBLINGS: u32 = 16;

/// Delay before background writeback checks a file again, if the file is busy or has writes in flight.
const RECHECK_NS: u64 = 100_000_000;

/// Time after which a writeback slice gives up on a store that completes no write.
const NO_PROGRESS_TIMEOUT: Duration = Duration::from_secs(1);

/// Writeback slices with fewer bytes than this are not used to measure the speed of a store.
const SPEED_SAMPLE_BYTES: u64 = BLOCK_BYTES as u64 / 8;

/// When dirty pages are written back in the background, and when writers are throttled. [`Writeback::default`] suits
/// programs that call [`Mapping::sync`](crate::mapping::Mapping::sync) where they need durability.
///
/// Example: [`Builder`](crate::mapping::Builder).
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct Writeback {
    age: Duration,
    background_percent: u8,
    most_percent: u8,
    timeout: Duration,
}

impl Writeback {
    /// Sets the age at which dirty pages are written back. The default is 30 s.
    pub fn age(self, age: Duration) -> Self {
        Self { age, ..self }
    }

    /// Sets the percentage of the cache's limit above which dirty pages are written back. The default is 10.
    pub fn background_percent(self, percent: u8) -> Self {
        Self { background_percent: percent, ..self }
    }

    /// Sets the percentage of the cache's limit that dirty pages do not exceed, except by a folio of each writer. The
    /// default is 40. Folios that become dirty through pins and exclusive holds are not limited. Dirty folios that are
    /// in use (pinned, or prefaulted by a view) cannot be written back, and no writer waits for them. Writers are
    /// slowed from half way between [`Writeback::background_percent`] and this percentage on.
    pub fn most_percent(self, percent: u8) -> Self {
        Self { most_percent: percent, ..self }
    }

    /// Sets the time that a writer waits for a store without progress. The default is 5 s.
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }
}

impl Default for Writeback {
    fn default() -> Self {
        let (age, timeout) = (Duration::from_secs(30), Duration::from_secs(5));
        Self { age, background_percent: 10, most_percent: 40, timeout }
    }
}

/// Limits of a cache's dirty bytes, and the state of its background writeback.
pub(crate) struct Balance {
    /// [`Writeback::age`] in nanoseconds.
    age_ns: u64,
    /// Number of dirty bytes above which the flusher thread writes back.
    background_bytes: u64,
    /// Number of dirty bytes below which writers are not slowed.
    pub free_bytes: u64,
    /// Maximum number of dirty bytes.
    pub most_bytes: u64,
    /// [`Writeback::timeout`].
    pub timeout: Duration,
    /// Files with dirty pages, each listed once.
    files: Guarded<Vec<Weak<File>>>,
    /// Serializes scans of the list `files`. A scan takes the files off this list and puts them back, so a concurrent
    /// scan would miss files.
    scan_lock: Lock,
    /// Whether the flusher thread knows that more than `background_bytes` are dirty, so writers need not wake the
    /// thread again.
    is_woken: AtomicBool,
    /// Total bytes that writers made dirty or tried to make dirty.
    pub dirtied_bytes: AtomicU64,
    /// Total bytes of dirty folios that became clean.
    pub cleaned_bytes: AtomicU64,
    /// Recent time to write back a MiB; 0 before the first measurement.
    pub ns_per_mib: AtomicU64,
}

impl Balance {
    /// Computes the limits of dirty bytes for a cache that may have up to `limit_bytes`.
    ///
    /// # Errors
    ///
    /// [`Error::WrongState`] for percentages above 100, or in the wrong order.
    pub fn new(settings: &Writeback, limit_bytes: u64) -> Result<Self> {
        let Writeback { age, background_percent, most_percent, timeout } = settings;
        if background_percent > most_percent || *most_percent > 100 {
            return Err(Error::WrongState {
                what: "the shares of dirty pages must be background <= most <= 100 percent",
            });
        }
        let share = |percent: u8| (u128::from(limit_bytes) * u128::from(percent) / 100) as u64;
        let (background_bytes, most_bytes) = (share(*background_percent), share(*most_percent));
        debug_assert!(background_bytes <= most_bytes && most_bytes <= limit_bytes);
        Ok(Self {
            age_ns: u64::try_from(age.as_nanos()).unwrap_or(u64::MAX),
            background_bytes,
            free_bytes: background_bytes + (most_bytes - background_bytes) / 2,
            most_bytes: most_bytes.max(1),
            timeout: *timeout,
            files: Guarded::new(Vec::new()),
            scan_lock: Lock::new(),
            is_woken: AtomicBool::new(false),
            dirtied_bytes: AtomicU64::new(0),
            cleaned_bytes: AtomicU64::new(0),
            ns_per_mib: AtomicU64::new(0),
        })
    }

    /// Updates `ns_per_mib` with the bytes and time of a slice.
    fn note_speed(&self, bytes: u64, took_ns: u64) {
        if bytes >= SPEED_SAMPLE_BYTES {
            let now = (u128::from(took_ns) * (BLOCK_BYTES as u128 / 2) / u128::from(bytes)).max(1) as u64;
            let before = self.ns_per_mib.load(Relaxed);
            self.ns_per_mib.store(if before == 0 { now } else { before - before / 4 + now / 4 }, Relaxed);
        }
    }
}

/// State of the background writeback of one file.
#[derive(Default)]
pub(crate) struct FileFlush {
    /// Whether the file is in [`Balance`]'s list of files with dirty pages.
    is_listed: AtomicBool,
    /// Page at which the file's next writeback slice begins.
    cursor: AtomicU64,
    /// Time when the current walk of writeback over the whole file began.
    walk_began_ns: AtomicU64,
    /// Number of consecutive writeback slices of the file that failed.
    failures: AtomicU32,
    /// Time before which the writeback of the file is not retried.
    retry_at_ns: AtomicU64,
}

impl FileFlush {
    /// Returns whether the file's store failed recently.
    pub fn is_failing(&self) -> bool {
        self.failures.load(Relaxed) > 0 && self.retry_at_ns.load(Relaxed) > coarse_ns()
    }

    /// Returns whether the file's last writeback slice ended before the end of the file.
    pub fn is_midway(&self) -> bool {
        self.cursor.load(Relaxed) > 0
    }

    /// Delays the file's next writeback slice, because this slice wrote nothing: other threads use the folios.
    fn delay(&self) {
        self.retry_at_ns.store(coarse_ns() + RECHECK_NS, Relaxed);
    }

    /// Delays the file's next writeback slice after a failure, each time longer.
    fn delay_longer(&self) {
        let failures = self.failures.fetch_add(1, Relaxed);
        let delay_ns =
            FIRST_RETRY_DELAY_NS.saturating_mul(1 << failures.min(MAX_RETRY_DOUBLINGS)).min(MAX_RETRY_DELAY_NS);
        self.retry_at_ns.store(coarse_ns() + delay_ns, Relaxed);
    }

    /// Ends background writeback of the file: its store has panicked and is in an unknown state.
    fn stop(&self) {
        self.failures.fetch_add(1, Relaxed);
        self.retry_at_ns.store(u64::MAX, Relaxed);
    }

    /// Ends the delay after failures, because a write succeeded.
    pub fn reset_delay(&self) {
        self.failures.store(0, Relaxed);
        self.retry_at_ns.store(0, Relaxed);
    }
}

impl File {
    /// Called when the file gets its first dirty page. Must not be called under the lock of the index, since it
    /// allocates.
    #[cold]
    pub(crate) fn note_first_dirty(&self, dirty: &Dirty) {
        dirty.since_ns.store(coarse_ns(), Relaxed);
        self.list(dirty);
        let (caches, balance) = (self.cache.caches, &self.cache.balance);
        caches.flusher.attend(caches, coarse_ns().saturating_add(balance.age_ns));
    }

    /// Adds the file to the cache's list of files with dirty pages, unless the list has it.
    fn list(&self, dirty: &Dirty) {
        if !dirty.flush.is_listed.swap(true, SeqCst) {
            self.cache.balance.files.with(|files| files.push(self.this.clone()));
        }
    }

    /// Writes one slice of the file back, unless another thread is doing so, or its store failed recently. Returns the
    /// bytes written, or `None` if the file was skipped.
    ///
    /// # Errors
    ///
    /// The store's error, if the slice wrote nothing. [`Error::Busy`] if no write completes within `timeout`.
    pub(crate) fn write_some(
        self: &Arc<Self>,
        reason: WritebackReason,
        most_bytes: u64,
        timeout: Duration,
    ) -> Result<Option<u64>> {
        let (Some(store), Some(dirty)) = (&self.store, &self.dirty) else { return Ok(None) };
        let flush = &dirty.flush;
        let is_free = !flush.is_failing() && !self.is_closed.load(Relaxed);
        let Some(_alone) = is_free.then(|| self.syncing.try_lock()).flatten() else { return Ok(None) };
        if self.is_in_flight() {
            return Ok(None);
        }
        let (began_ns, mut first) = (clock::fine_ns(), flush.cursor.load(Relaxed));
        let walked = loop {
            if first == 0 {
                flush.walk_began_ns.store(coarse_ns(), Relaxed);
            }
            let (pages, timeout) = (first..Owner::MAX_INDEX, Some(timeout));
            let walk = WalkPlan { reason, pages, most_bytes, timeout, waits_for_others: false };
            let walked = self.walk_once(&**store, &walk).inspect_err(|error| match error {
                Error::Busy { .. } => flush.delay(),
                _ => flush.delay_longer(),
            })?;
            if first == 0 || walked.written_bytes > 0 || walked.next.is_some() {
                break walked;
            }
            // The rest of the file had nothing to write, so continue at its begin.
            first = 0;
        };
        self.cache.balance.note_speed(walked.written_bytes, clock::fine_ns() - began_ns);
        flush.cursor.store(walked.next.unwrap_or(0), Relaxed);
        if first == 0 && walked.next.is_none() {
            // Pages that were dirty before this walk have been written, or were in use, or failed.
            dirty.since_ns.store(flush.walk_began_ns.load(Relaxed), Relaxed);
        }
        if walked.written_bytes > 0 {
            flush.reset_delay();
            return Ok(Some(walked.written_bytes));
        }
        match walked.failure {
            // No page of the whole file could be written.
            Some(error) if first == 0 => {
                flush.delay_longer();
                Err(error)
            }
            _ if first == 0 => {
                flush.delay();
                Ok(Some(0))
            }
            // The next slice continues where this slice ended.
            _ => Ok(Some(0)),
        }
    }
}

/// Whether a file is due now and for which reason, or the time when it is due.
enum Due {
    Now(WritebackReason),
    At(u64),
}

impl Inner {
    /// Returns the cache's dirty files, ordered by the time when they became dirty, oldest first.
    pub(crate) fn dirty_files(&self) -> Vec<Weak<File>> {
        // References to files are dropped only after the lock is released: dropping the last reference drops the store,
        // too.
        let (mut held, mut files) = (Vec::new(), Vec::new());
        let scan = self.balance.scan_lock.lock();
        for entry in self.balance.files.with(std::mem::take) {
            let Some(file) = entry.upgrade() else { continue };
            if let Some(dirty) = &file.dirty {
                // Cleared before `bytes` is read, so that a thread that makes the file dirty afterwards lists it again.
                dirty.flush.is_listed.store(false, SeqCst);
                if dirty.bytes() > 0 {
                    file.list(dirty);
                    files.push((dirty.since_ns.load(Relaxed), entry));
                }
            }
            held.push(file);
        }
        drop(scan);
        drop(held);
        files.sort_by_key(|(since_ns, _)| *since_ns);
        files.into_iter().map(|(_, entry)| entry).collect()
    }

    /// Returns whether a file is due at `now_ns`, or when it will be.
    fn due(&self, dirty: &Dirty, now_ns: u64) -> Due {
        let (flush, balance) = (&dirty.flush, &self.balance);
        let retry_at_ns = flush.retry_at_ns.load(Relaxed);
        let expires_ns = dirty.since_ns.load(Relaxed).saturating_add(balance.age_ns);
        if retry_at_ns > now_ns {
            Due::At(retry_at_ns)
        } else if dirty.in_flight.load(SeqCst) > 0 {
            Due::At(now_ns + RECHECK_NS)
        } else if expires_ns <= now_ns {
            Due::Now(WritebackReason::Age)
        } else if self.dirty_bytes() > balance.background_bytes {
            Due::Now(WritebackReason::Share)
        } else {
            Due::At(expires_ns)
        }
    }

    /// Wakes the flusher thread if more than `background_bytes` are dirty, unless the thread was already woken for this
    /// reason.
    pub(crate) fn note_much_dirty(&self) {
        let balance = &self.balance;
        if self.dirty_bytes() > balance.background_bytes
            && !balance.is_woken.load(Relaxed)
            && !balance.is_woken.swap(true, SeqCst)
        {
            self.caches.flusher.attend(self.caches, 0);
        }
    }

    /// Writes one slice of a file back if the file is due. Returns as [`Inner::flush`].
    fn flush_file(&self, entry: &Weak<File>) -> (u64, Option<u64>) {
        // The reference lives for this slice only, because it keeps the store alive.
        let Some(file) = entry.upgrade() else { return (0, None) };
        let Some(dirty) = file.dirty.as_ref().filter(|dirty| dirty.bytes() > 0) else { return (0, None) };
        let now_ns = coarse_ns();
        let reason = match self.due(dirty, now_ns) {
            Due::Now(reason) => reason,
            Due::At(ns) => return (0, Some(ns)),
        };
        match file.write_some(reason, SLICE_BYTES, NO_PROGRESS_TIMEOUT) {
            Ok(Some(bytes)) => (bytes, Some(dirty.flush.retry_at_ns.load(Relaxed).max(now_ns + 1))),
            Ok(None) => (0, Some(now_ns + RECHECK_NS)),
            Err(_) => (0, Some(dirty.flush.retry_at_ns.load(Relaxed))),
        }
    }

    /// Writes back all files that are due. Returns the bytes written, and the time of the next check on the coarse
    /// clock; `None` if nothing is dirty.
    pub(crate) fn flush(&self) -> (u64, Option<u64>) {
        let mut written_bytes = 0;
        loop {
            self.balance.is_woken.store(false, SeqCst);
            let (mut slice_bytes, mut next_ns) = (0, None);
            for entry in self.dirty_files() {
                let slice = callback::catch_panic(|| self.flush_file(&entry)).unwrap_or_else(|| {
                    if let Some(file) = entry.upgrade() {
                        file.dirty.iter().for_each(|dirty| dirty.flush.stop());
                    }
                    (0, Some(u64::MAX))
                });
                slice_bytes += slice.0;
                next_ns = next_ns.into_iter().chain(slice.1).min();
            }
            written_bytes += slice_bytes;
            if slice_bytes == 0 {
                // If too much is still dirty, those files are checked when they are due. Waking the thread earlier
                // would not help.
                self.balance.is_woken.store(self.dirty_bytes() > self.balance.background_bytes, SeqCst);
                return (written_bytes, next_ns);
            }
        }
    }
}

/// The flusher thread and its wakeups.
#[derive(Default)]
pub(crate) struct Flusher {
    caches: std::sync::OnceLock<&'static Caches>,
    /// Counter of wakeups; the futex on which the thread sleeps.
    wakeups: AtomicU32,
    pub is_running: AtomicBool,
    /// Time of the next check on the coarse clock; 0 while the thread works.
    wakes_ns: std::sync::atomic::AtomicU64,
}

impl Flusher {
    /// Does nothing, because shuttle runs without the thread.
    #[cfg(shuttle)]
    pub fn attend(&'static self, _caches: &'static Caches, _due_ns: u64) {}

    /// Starts the thread if it is not running. Makes the thread check the files at `due_ns` at the latest.
    #[cfg(not(shuttle))]
    pub fn attend(&'static self, caches: &'static Caches, due_ns: u64) {
        if caches.worker.is_thread_disabled() {
            return;
        }
        if !self.is_running.swap(true, SeqCst) {
            let _ = self.caches.set(caches);
            if thread::spawn(c"pagemill-flush", self).is_err() {
                self.is_running.store(false, SeqCst);
            }
            return;
        }
        let wakes_ns = self.wakes_ns.load(SeqCst);
        if wakes_ns == 0 || due_ns < wakes_ns {
            self.wakeups.fetch_add(1, SeqCst);
            futex::wake(&self.wakeups, 1, Scope::Private);
        }
    }
}

#[cfg(not(shuttle))]
use pagemill_sys::futex::{self, Scope};
#[cfg(not(shuttle))]
use pagemill_sys::thread;

/// The flusher thread exits when no folio has been dirty for this time.
#[cfg(not(shuttle))]
const IDLE_NS: u64 = 10_000_000_000;

#[cfg(not(shuttle))]
impl thread::Work for Flusher {
    fn work(&'static self) {
        let Some(caches) = self.caches.get() else { return };
        let mut idle_since_ns = None;
        loop {
            let wakeups = self.wakeups.load(SeqCst);
            self.wakes_ns.store(0, SeqCst);
            let next_ns = caches.flush().1;
            let now_ns = coarse_ns();
            let wakes_ns = match next_ns {
                Some(ns) => {
                    idle_since_ns = None;
                    ns.max(now_ns + 1)
                }
                None if now_ns >= *idle_since_ns.get_or_insert(now_ns) + IDLE_NS => {
                    self.is_running.store(false, SeqCst);
                    // A file that became dirty before this store relied on this thread, so the thread may not exit yet.
                    if caches.is_all_clean() || self.is_running.swap(true, SeqCst) {
                        return;
                    }
                    continue;
                }
                None => now_ns + IDLE_NS,
            };
            self.wakes_ns.store(wakes_ns, SeqCst);
            futex::wait(&self.wakeups, wakeups, Some(Duration::from_nanos(wakes_ns - now_ns)), Scope::Private);
        }
    }
}

impl Caches {
    /// As [`Inner::flush`], for all caches.
    pub(crate) fn flush(&self) -> (u64, Option<u64>) {
        let (mut written_bytes, mut next_ns) = (0, None);
        for cache in self.caches() {
            let (bytes, ns) = cache.flush();
            written_bytes += bytes;
            next_ns = next_ns.into_iter().chain(ns).min();
        }
        (written_bytes, next_ns)
    }

    /// Returns whether no cache has a dirty folio.
    #[cfg(not(shuttle))]
    fn is_all_clean(&self) -> bool {
        self.caches().all(|cache| cache.dirty_bytes() == 0)
    }
}
