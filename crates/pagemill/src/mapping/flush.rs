//! Background writeback: one thread, present while pages are dirty, writes back old dirty pages, and excess ones.
//!
//! ```text
//!   dirty bytes of a cache     0 ---------- background ---------- half way ------------- most ---------- limit
//!   a thread that writes        continues   continues, and wakes  pauses: the more,     writes back,
//!                                           the thread            the longer            or waits
//! ```
//!
//! A file is due when its oldest dirty page is, or when its cache has too many dirty pages. Files get turns, the oldest
//! first. A turn writes a number of bytes in the order of the file, from where the last turn ended. After a failed turn
//! a file rests, each time longer. A file is skipped while it is synced, or while its store makes no progress. After a
//! panic of the store, the file rests until the program syncs it. The only lock held meanwhile is the file's sync lock.
#![cfg_attr(shuttle, allow(dead_code))] // no thread there

use super::File;
use super::cache::{Caches, Inner};
use super::dirty::Dirty;
use super::writeback::{Walk, Why};
use crate::callback;
use crate::error::{Error, Result};
use crate::folio::Owner;
use crate::sync::{AtomicU64, Guarded, Lock, Relaxed, coarse_ns};
use crate::units::BLOCK_BYTES;
use pagemill_sys::clock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Bytes of a file's turn.
const TURN_BYTES: u64 = 16 * BLOCK_BYTES as u64;

/// Rest of a file after a failure: the first, and the longest.
const FIRST_REST_NS: u64 = 100_000_000;
const LONGEST_REST_NS: u64 = 30_000_000_000;
const MOST_DOUBLINGS: u32 = 16;

/// A file that is busy, or has writes in flight, is checked again after this time.
const LOOK_NS: u64 = 100_000_000;

/// Time limit of a turn for a store without completions.
const STUCK: Duration = Duration::from_secs(1);

/// Shorter turns do not count for a store's speed.
const TELLING_BYTES: u64 = BLOCK_BYTES as u64 / 8;

/// When dirty pages are written back in the background, and when writers are throttled. [`Writeback::default`] suits
/// programs that call [`Mapping::sync`](super::Mapping::sync) where they need durability.
///
/// Example: [`Settings`](super::Settings).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Writeback {
    /// Pages that are dirty for this time are written back: 30 s.
    pub age: Duration,
    /// Dirty pages above this percentage of the cache's limit are written back: 10.
    pub background_percent: u8,
    /// Writers do not exceed this percentage of the cache's limit in dirty pages, except for a folio at a time: 40.
    /// Pins and holds are not limited. Writers are slowed from half way between this and the background's share on.
    pub most_percent: u8,
    /// A writer waits for a store without progress for this time: 5 s.
    pub timeout: Duration,
}

impl Default for Writeback {
    fn default() -> Self {
        let (age, timeout) = (Duration::from_secs(30), Duration::from_secs(5));
        Self { age, background_percent: 10, most_percent: 40, timeout }
    }
}

/// Limits of a cache's dirty bytes, and the state of its writeback.
pub(super) struct Balance {
    age_ns: u64,
    background_bytes: u64,
    /// Writers are not slowed below this.
    pub free_bytes: u64,
    pub most_bytes: u64,
    pub timeout: Duration,
    /// Dirty files, each once.
    files: Guarded<Vec<Weak<File>>>,
    /// Serializes scans of the list, because a second scan would miss the files that the first one has taken off.
    looking: Lock,
    /// The thread was woken because too much is dirty.
    is_told: AtomicBool,
    /// Totals of bytes made dirty and made clean so far.
    pub made_bytes: AtomicU64,
    pub cleaned_bytes: AtomicU64,
    /// Recent time to write a MiB; 0 before the first.
    pub ns_per_mib: AtomicU64,
}

impl Balance {
    /// # Errors
    ///
    /// [`Error::WrongState`] for percentages above 100, or in the wrong order.
    pub fn new(settings: &Writeback, limit_bytes: u64) -> Result<Self> {
        let Writeback { age, background_percent, most_percent, timeout } = settings;
        if background_percent > most_percent || *most_percent > 100 {
            return Err(Error::WrongState { what: "shares of dirty pages: background <= most <= 100 percent" });
        }
        let share = |percent: u8| (u128::from(limit_bytes) * u128::from(percent) / 100) as u64;
        let (background_bytes, most_bytes) = (share(*background_percent), share(*most_percent));
        Ok(Self {
            age_ns: u64::try_from(age.as_nanos()).unwrap_or(u64::MAX),
            background_bytes,
            free_bytes: background_bytes + (most_bytes - background_bytes) / 2,
            most_bytes: most_bytes.max(1),
            timeout: *timeout,
            files: Guarded::new(Vec::new()),
            looking: Lock::new(),
            is_told: AtomicBool::new(false),
            made_bytes: AtomicU64::new(0),
            cleaned_bytes: AtomicU64::new(0),
            ns_per_mib: AtomicU64::new(0),
        })
    }

    fn note_speed(&self, bytes: u64, took_ns: u64) {
        if bytes >= TELLING_BYTES {
            let now = (u128::from(took_ns) * (BLOCK_BYTES as u128 / 2) / u128::from(bytes)).max(1) as u64;
            let before = self.ns_per_mib.load(Relaxed);
            self.ns_per_mib.store(if before == 0 { now } else { before - before / 4 + now / 4 }, Relaxed);
        }
    }
}

/// Background state of a dirty file.
#[derive(Default)]
pub(super) struct FlushTurns {
    is_listed: AtomicBool,
    /// Page at which the next turn begins.
    cursor: AtomicU64,
    /// Time when the current walk through the file began.
    lap_ns: AtomicU64,
    /// Number of consecutive failed turns, and the end of the rest.
    failures: AtomicU32,
    rests_until_ns: AtomicU64,
}

impl FlushTurns {
    /// Returns whether its store failed recently.
    pub fn is_failing(&self) -> bool {
        self.failures.load(Relaxed) > 0 && self.rests_until_ns.load(Relaxed) > coarse_ns()
    }

    /// Returns whether the last turn ended before the end of the file.
    pub fn is_midway(&self) -> bool {
        self.cursor.load(Relaxed) > 0
    }

    /// Rests after a turn that wrote nothing because other threads use the folios.
    fn rest(&self) {
        self.rests_until_ns.store(coarse_ns() + LOOK_NS, Relaxed);
    }

    /// Rests after a failed turn, each time longer.
    fn rest_longer(&self) {
        let failures = self.failures.fetch_add(1, Relaxed);
        let rest_ns = FIRST_REST_NS.saturating_mul(1 << failures.min(MOST_DOUBLINGS)).min(LONGEST_REST_NS);
        self.rests_until_ns.store(coarse_ns() + rest_ns, Relaxed);
    }

    /// Rests forever: its store has panicked and is in an unknown state.
    fn rest_for_good(&self) {
        self.failures.fetch_add(1, Relaxed);
        self.rests_until_ns.store(u64::MAX, Relaxed);
    }

    /// Ends the pause that follows failures: a write succeeded.
    pub fn go_on(&self) {
        self.failures.store(0, Relaxed);
        self.rests_until_ns.store(0, Relaxed);
    }
}

impl File {
    /// Called when the file gets its first dirty page. Not under the lock of its index: this allocates.
    #[cold]
    pub(super) fn note_first_dirty(&self, dirty: &Dirty) {
        dirty.since_ns.store(coarse_ns(), Relaxed);
        self.list(dirty);
        let (caches, balance) = (self.cache.caches, &self.cache.balance);
        caches.flusher.attend(caches, coarse_ns().saturating_add(balance.age_ns));
    }

    fn list(&self, dirty: &Dirty) {
        if !dirty.turns.is_listed.swap(true, SeqCst)
            && let Some(file) = self.cache.file(self.id)
        {
            self.cache.balance.files.with(|files| files.push(Arc::downgrade(&file)));
        }
    }

    /// Writes a part of the file back, unless another thread does, or its store failed recently. Returns the bytes, or
    /// `None` if the file was skipped.
    ///
    /// # Errors
    ///
    /// The store's error, if nothing could be written. [`Error::Busy`] if no write completes within `timeout`.
    pub(super) fn write_some(self: &Arc<Self>, why: Why, most_bytes: u64, timeout: Duration) -> Result<Option<u64>> {
        let (Some(store), Some(dirty)) = (&self.store, &self.dirty) else { return Ok(None) };
        let turns = &dirty.turns;
        let is_free = !turns.is_failing() && !self.is_closed.load(Relaxed);
        let Some(_alone) = is_free.then(|| self.syncing.try_lock()).flatten() else { return Ok(None) };
        if self.is_in_flight() {
            return Ok(None);
        }
        let (began_ns, mut first) = (clock::fine_ns(), turns.cursor.load(Relaxed));
        let walked = loop {
            if first == 0 {
                turns.lap_ns.store(coarse_ns(), Relaxed);
            }
            let (pages, timeout) = (first..Owner::MAX_INDEX, Some(timeout));
            let walk = Walk { why, pages, most_bytes, timeout, waits_for_others: false };
            let walked = self.walk_once(&**store, &walk).inspect_err(|error| match error {
                Error::Busy { .. } => turns.rest(),
                _ => turns.rest_longer(),
            })?;
            if first == 0 || walked.written_bytes > 0 || walked.next.is_some() {
                break walked;
            }
            // The rest of the file had nothing to write: start again at its begin.
            first = 0;
        };
        self.cache.balance.note_speed(walked.written_bytes, clock::fine_ns() - began_ns);
        turns.cursor.store(walked.next.unwrap_or(0), Relaxed);
        if first == 0 && walked.next.is_none() {
            // Pages that were dirty before this walk have been written, or were in use, or failed.
            dirty.since_ns.store(turns.lap_ns.load(Relaxed), Relaxed);
        }
        if walked.written_bytes > 0 {
            turns.go_on();
            return Ok(Some(walked.written_bytes));
        }
        match walked.failure {
            // Nothing could be written in the whole file.
            Some(error) if first == 0 => {
                turns.rest_longer();
                Err(error)
            }
            _ if first == 0 => {
                turns.rest();
                Ok(Some(0))
            }
            // The next turn begins where this one ended.
            _ => Ok(Some(0)),
        }
    }
}

/// When and why a file is due.
enum Due {
    Now(Why),
    At(u64),
}

impl Inner {
    /// Returns its dirty files, the longest dirty first.
    pub(super) fn dirty_files(&self) -> Vec<Weak<File>> {
        // Files are dropped only after the lock is released: the last reference drops the store, too.
        let (mut held, mut files) = (Vec::new(), Vec::new());
        let looking = self.balance.looking.lock();
        for entry in self.balance.files.with(std::mem::take) {
            let Some(file) = entry.upgrade() else { continue };
            if let Some(dirty) = &file.dirty {
                // Cleared before `bytes` is read: a thread that makes the file dirty afterwards lists it again.
                dirty.turns.is_listed.store(false, SeqCst);
                if dirty.bytes() > 0 {
                    file.list(dirty);
                    files.push((dirty.since_ns.load(Relaxed), entry));
                }
            }
            held.push(file);
        }
        drop(looking);
        drop(held);
        files.sort_by_key(|(since_ns, _)| *since_ns);
        files.into_iter().map(|(_, entry)| entry).collect()
    }

    fn due(&self, dirty: &Dirty, now_ns: u64) -> Due {
        let (turns, balance) = (&dirty.turns, &self.balance);
        let rests_until_ns = turns.rests_until_ns.load(Relaxed);
        let expires_ns = dirty.since_ns.load(Relaxed).saturating_add(balance.age_ns);
        if rests_until_ns > now_ns {
            Due::At(rests_until_ns)
        } else if dirty.in_flight.load(SeqCst) > 0 {
            Due::At(now_ns + LOOK_NS)
        } else if expires_ns <= now_ns {
            Due::Now(Why::Age)
        } else if self.dirty_bytes() > balance.background_bytes {
            Due::Now(Why::Share)
        } else {
            Due::At(expires_ns)
        }
    }

    /// Wakes the thread once if too much is dirty.
    pub(super) fn note_much_dirty(&self) {
        let balance = &self.balance;
        if self.dirty_bytes() > balance.background_bytes
            && !balance.is_told.load(Relaxed)
            && !balance.is_told.swap(true, SeqCst)
        {
            self.caches.flusher.attend(self.caches, 0);
        }
    }

    /// Gives one file a turn. Returns as [`Inner::flush`].
    fn flush_file(&self, entry: &Weak<File>) -> (u64, Option<u64>) {
        // Kept for this turn only, because it keeps the store alive.
        let Some(file) = entry.upgrade() else { return (0, None) };
        let Some(dirty) = file.dirty.as_ref().filter(|dirty| dirty.bytes() > 0) else { return (0, None) };
        let now_ns = coarse_ns();
        let why = match self.due(dirty, now_ns) {
            Due::Now(why) => why,
            Due::At(ns) => return (0, Some(ns)),
        };
        match file.write_some(why, TURN_BYTES, STUCK) {
            Ok(Some(bytes)) => (bytes, Some(dirty.turns.rests_until_ns.load(Relaxed).max(now_ns + 1))),
            Ok(None) => (0, Some(now_ns + LOOK_NS)),
            Err(_) => (0, Some(dirty.turns.rests_until_ns.load(Relaxed))),
        }
    }

    /// Writes back what is due. Returns the bytes, and the time of the next check on the coarse clock; `None` if
    /// nothing is dirty.
    pub(super) fn flush(&self) -> (u64, Option<u64>) {
        let mut written_bytes = 0;
        loop {
            self.balance.is_told.store(false, SeqCst);
            let (mut turn_bytes, mut next_ns) = (0, None);
            let mut at = |ns: u64| next_ns = Some(next_ns.map_or(ns, |next: u64| next.min(ns)));
            for entry in self.dirty_files() {
                let turn = callback::catch_panic(|| self.flush_file(&entry)).unwrap_or_else(|| {
                    if let Some(file) = entry.upgrade() {
                        file.dirty.iter().for_each(|dirty| dirty.turns.rest_for_good());
                    }
                    (0, Some(u64::MAX))
                });
                turn_bytes += turn.0;
                turn.1.into_iter().for_each(&mut at);
            }
            written_bytes += turn_bytes;
            if turn_bytes == 0 {
                // If too much is still dirty, those files are checked when they are due. Waking the thread before would
                // not help.
                self.balance.is_told.store(self.dirty_bytes() > self.balance.background_bytes, SeqCst);
                return (written_bytes, next_ns);
            }
        }
    }
}

/// The writeback thread and its wakeups.
#[derive(Default)]
pub(crate) struct Flusher {
    caches: std::sync::OnceLock<&'static Caches>,
    /// Futex on which the thread sleeps.
    wakeups: AtomicU32,
    is_running: AtomicBool,
    /// Time of the next check on the coarse clock; 0 while the thread works.
    wakes_ns: std::sync::atomic::AtomicU64,
}

impl Flusher {
    /// Makes sure that the thread runs, and is awake at `due_ns`.
    #[cfg(shuttle)]
    pub fn attend(&'static self, _caches: &'static Caches, _due_ns: u64) {}

    #[cfg(not(shuttle))]
    pub fn attend(&'static self, caches: &'static Caches, due_ns: u64) {
        if caches.worker.is_by_hand() {
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

    /// In a fork child: marks the thread as not running.
    pub fn begin_child(&self) {
        self.is_running.store(false, SeqCst);
    }
}

#[cfg(not(shuttle))]
use pagemill_sys::futex::{self, Scope};
#[cfg(not(shuttle))]
use pagemill_sys::thread;

/// The thread exits when nothing has been dirty for this time.
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
                    // A file that became dirty before this store relied on this thread.
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
    pub(super) fn flush(&self) -> (u64, Option<u64>) {
        let (mut at, mut written_bytes, mut next_ns) = (self.inherited.load(Relaxed), 0, None);
        while let Some(cache) = self.next_cache(&mut at) {
            let (bytes, ns) = cache.flush();
            written_bytes += bytes;
            next_ns = match (next_ns, ns) {
                (Some(next), Some(ns)) => Some(ns.min(next)),
                (next, ns) => next.or(ns),
            };
        }
        (written_bytes, next_ns)
    }

    #[cfg(not(shuttle))]
    fn is_all_clean(&self) -> bool {
        let mut at = self.inherited.load(Relaxed);
        std::iter::from_fn(|| self.next_cache(&mut at)).all(|cache| cache.dirty_bytes() == 0)
    }
}
