//! Writing back behind, by a thread that is there while something is dirty: what has been dirty for long, and what is too much.
//!
//! ```text
//!   dirty bytes of a cache     0 ---------- background ---------- half way ------------- most ---------- limit
//!   who makes a page dirty       goes on     goes on, the thread    pauses: the more,     writes back,
//!                                            is woken               the longer            or waits
//! ```
//!
//! A file is due when its oldest dirty page is, or when its cache has too many. Each gets a turn, the oldest first: so many bytes in
//! the order of the file, from where the last turn ended. A file that fails rests for longer each time; one that is being synced, or whose store does not
//! go on, is passed by. No lock is held meanwhile but the file's token.
#![cfg_attr(shuttle, allow(dead_code))] // no thread there

use super::File;
use super::cache::{Caches, Inner};
use super::dirty::Dirty;
use super::writeback::{Walk, Why};
use crate::error::{Error, Result};
use crate::folio::Owner;
use crate::sync::{AtomicU64, Guarded, Lock, Relaxed, coarse_ns};
use crate::units::BLOCK_BYTES;
use pagemill_sys::clock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// A file's turn.
const TURN_BYTES: u64 = 16 * BLOCK_BYTES as u64;

/// The rest of a file whose store fails: at first, and at most.
const FIRST_REST_NS: u64 = 100_000_000;
const LONGEST_REST_NS: u64 = 30_000_000_000;
const MOST_DOUBLINGS: u32 = 16;

/// A file that another has, or whose store has not told the end of all, is looked at again after this.
const LOOK_NS: u64 = 100_000_000;

/// A store is left behind if it does not tell an end for so long.
const STUCK: Duration = Duration::from_secs(1);

/// Turns that are too short say nothing about a store's pace.
const TELLING_BYTES: u64 = BLOCK_BYTES as u64 / 8;

/// When what was written goes back to its store by itself, and when writers wait for that. [`Writeback::default`] is made for
/// programs that call [`Mapping::sync`](super::Mapping::sync) where they want to be sure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Writeback {
    /// What has been dirty for so long is written back: 30 s.
    pub age: Duration,
    /// What is more than this percentage of the cache's limit is written back: 10.
    pub background_percent: u8,
    /// Nobody makes more than this percentage of the cache's limit dirty by writing, a folio at a time excepted: 40. What is pinned or
    /// held is not asked. Half way between this and the background's share writers begin to be slowed.
    pub most_percent: u8,
    /// A writer waits for a store that does not go on for so long: 5 s.
    pub patience: Duration,
}

impl Default for Writeback {
    fn default() -> Self {
        let (age, patience) = (Duration::from_secs(30), Duration::from_secs(5));
        Self { age, background_percent: 10, most_percent: 40, patience }
    }
}

/// How much of a cache may be dirty, and what is done about it.
pub(super) struct Balance {
    age_ns: u64,
    background_bytes: u64,
    /// Below this nobody is slowed.
    pub free_bytes: u64,
    pub most_bytes: u64,
    pub patience: Duration,
    /// Files that are dirty, each once.
    files: Guarded<Vec<Weak<File>>>,
    /// One at a time looks through them: another would miss those that are being looked at.
    looking: Lock,
    /// The thread knows that there is too much.
    is_told: AtomicBool,
    /// Made dirty so far, and made clean: what has been done, not what there is.
    pub made_bytes: AtomicU64,
    pub cleaned_bytes: AtomicU64,
    /// What a MiB took lately; 0 before the first.
    pub ns_per_mib: AtomicU64,
}

impl Balance {
    /// # Errors
    ///
    /// [`Error::WrongState`] for percentages that are none, or the wrong way round.
    pub fn new(settings: &Writeback, limit_bytes: u64) -> Result<Self> {
        let Writeback { age, background_percent, most_percent, patience } = settings;
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
            patience: *patience,
            files: Guarded::new(Vec::new()),
            looking: Lock::new(),
            is_told: AtomicBool::new(false),
            made_bytes: AtomicU64::new(0),
            cleaned_bytes: AtomicU64::new(0),
            ns_per_mib: AtomicU64::new(0),
        })
    }

    fn note_pace(&self, bytes: u64, took_ns: u64) {
        if bytes >= TELLING_BYTES {
            let now = (u128::from(took_ns) * (BLOCK_BYTES as u128 / 2) / u128::from(bytes)).max(1) as u64;
            let before = self.ns_per_mib.load(Relaxed);
            self.ns_per_mib.store(if before == 0 { now } else { before - before / 4 + now / 4 }, Relaxed);
        }
    }
}

/// What the background knows of a dirty file.
#[derive(Default)]
pub(super) struct Turns {
    is_listed: AtomicBool,
    /// Where the next turn begins: a page.
    cursor: AtomicU64,
    /// When the walk through it began that goes on there.
    lap_ns: AtomicU64,
    /// Turns in a row of which only failures came, and until when it rests.
    failures: AtomicU32,
    rests_until_ns: AtomicU64,
}

impl Turns {
    /// Whether its store has failed just now.
    pub fn is_failing(&self) -> bool {
        self.failures.load(Relaxed) > 0 && self.rests_until_ns.load(Relaxed) > coarse_ns()
    }

    /// Whether the next turn begins behind pages that this one did not look at.
    pub fn is_midway(&self) -> bool {
        self.cursor.load(Relaxed) > 0
    }

    /// Nothing could be written: others have it.
    fn rest(&self) {
        self.rests_until_ns.store(coarse_ns() + LOOK_NS, Relaxed);
    }

    /// Nothing could be written: each time it failed.
    fn rest_longer(&self) {
        let failures = self.failures.fetch_add(1, Relaxed);
        let rest_ns = FIRST_REST_NS.saturating_mul(1 << failures.min(MOST_DOUBLINGS)).min(LONGEST_REST_NS);
        self.rests_until_ns.store(coarse_ns() + rest_ns, Relaxed);
    }

    fn go_on(&self) {
        self.failures.store(0, Relaxed);
        self.rests_until_ns.store(0, Relaxed);
    }
}

impl File {
    /// It was clean until now. Not under the lock of its index: this allocates.
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

    /// Writes some of it back, if nobody else does and its store has not failed just now. Returns how many bytes, or `None` where it was passed by.
    ///
    /// # Errors
    ///
    /// What the store says, if nothing could be written at all; [`Error::Busy`] if it does not go on for all of `patience`.
    pub(super) fn write_some(self: &Arc<Self>, why: Why, most_bytes: u64, patience: Duration) -> Result<Option<u64>> {
        let (Some(store), Some(dirty)) = (&self.store, &self.dirty) else { return Ok(None) };
        let turns = &dirty.turns;
        let is_free = !turns.is_failing() && !self.is_closed.load(Relaxed);
        let Some(_alone) = is_free.then(|| self.syncing.try_lock()).flatten() else { return Ok(None) };
        if self.is_underway() {
            return Ok(None);
        }
        let (began_ns, mut first) = (clock::fine_ns(), turns.cursor.load(Relaxed));
        let walked = loop {
            if first == 0 {
                turns.lap_ns.store(coarse_ns(), Relaxed);
            }
            let walk = Walk { why, pages: first..Owner::MAX_INDEX, most_bytes, patience: Some(patience) };
            let walked = self.walk_once(&**store, &walk).inspect_err(|error| match error {
                Error::Busy { .. } => turns.rest(),
                _ => turns.rest_longer(),
            })?;
            if first == 0 || walked.written_bytes > 0 || walked.next.is_some() {
                break walked;
            }
            // It ended in vain: what can be written lies before.
            first = 0;
        };
        self.cache.balance.note_pace(walked.written_bytes, clock::fine_ns() - began_ns);
        turns.cursor.store(walked.next.unwrap_or(0), Relaxed);
        if first == 0 && walked.next.is_none() {
            // All that was dirty before has been written, or was in use, or failed.
            dirty.since_ns.store(turns.lap_ns.load(Relaxed), Relaxed);
        }
        if walked.written_bytes > 0 {
            turns.go_on();
            return Ok(Some(walked.written_bytes));
        }
        match walked.failure {
            // Nothing could be written, in all of it.
            Some(error) if first == 0 => {
                turns.rest_longer();
                Err(error)
            }
            _ if first == 0 => {
                turns.rest();
                Ok(Some(0))
            }
            // It goes on where this ended.
            _ => Ok(Some(0)),
        }
    }
}

/// What is to be done about a file.
enum Due {
    Now(Why),
    At(u64),
}

impl Inner {
    /// Its files that are dirty, the longest first.
    pub(super) fn dirty_files(&self) -> Vec<Weak<File>> {
        // They go, if they do, when the lock is free again: with their stores.
        let (mut held, mut files) = (Vec::new(), Vec::new());
        let looking = self.balance.looking.lock();
        for entry in self.balance.files.with(std::mem::take) {
            let Some(file) = entry.upgrade() else { continue };
            if let Some(dirty) = &file.dirty {
                // Before the look at what is dirty: who makes it dirty after that lists it.
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
        } else if dirty.underway.load(SeqCst) > 0 {
            Due::At(now_ns + LOOK_NS)
        } else if expires_ns <= now_ns {
            Due::Now(Why::Age)
        } else if self.dirty_bytes() > balance.background_bytes {
            Due::Now(Why::Share)
        } else {
            Due::At(expires_ns)
        }
    }

    /// More is dirty than should be: the thread learns of it.
    pub(super) fn note_much_dirty(&self) {
        let balance = &self.balance;
        if self.dirty_bytes() > balance.background_bytes
            && !balance.is_told.load(Relaxed)
            && !balance.is_told.swap(true, SeqCst)
        {
            self.caches.flusher.attend(self.caches, 0);
        }
    }

    /// Writes back what is due. Returns the bytes, and when to look again, on the coarse clock; `None` if nothing is dirty.
    pub(super) fn flush(&self) -> (u64, Option<u64>) {
        let mut written_bytes = 0;
        loop {
            self.balance.is_told.store(false, SeqCst);
            let (mut turn_bytes, mut next_ns) = (0, None);
            let mut at = |ns: u64| next_ns = Some(next_ns.map_or(ns, |next: u64| next.min(ns)));
            for entry in self.dirty_files() {
                // No longer than for its turn: its store goes with it.
                let Some(file) = entry.upgrade() else { continue };
                let Some(dirty) = file.dirty.as_ref().filter(|dirty| dirty.bytes() > 0) else { continue };
                let now_ns = coarse_ns();
                let why = match self.due(dirty, now_ns) {
                    Due::Now(why) => why,
                    Due::At(ns) => {
                        at(ns);
                        continue;
                    }
                };
                match file.write_some(why, TURN_BYTES, STUCK) {
                    Ok(Some(bytes)) => {
                        turn_bytes += bytes;
                        at(dirty.turns.rests_until_ns.load(Relaxed).max(now_ns + 1));
                    }
                    Ok(None) => at(now_ns + LOOK_NS),
                    Err(_) => at(dirty.turns.rests_until_ns.load(Relaxed)),
                }
            }
            written_bytes += turn_bytes;
            if turn_bytes == 0 {
                // Who cannot be helped now is when that is due: no more of it has to be told.
                self.balance.is_told.store(self.dirty_bytes() > self.balance.background_bytes, SeqCst);
                return (written_bytes, next_ns);
            }
        }
    }
}

/// The thread, and what wakes it.
#[derive(Default)]
pub(crate) struct Flusher {
    caches: std::sync::OnceLock<&'static Caches>,
    /// It sleeps on this.
    bell: AtomicU32,
    is_running: AtomicBool,
    /// When it looks again, on the coarse clock; 0 while it is at it.
    wakes_ns: std::sync::atomic::AtomicU64,
}

impl Flusher {
    /// Something is due then: the thread is there, and awake in time.
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
            self.bell.fetch_add(1, SeqCst);
            futex::wake(&self.bell, 1, Scope::Private);
        }
    }

    /// In a fork child, which has no thread for it.
    pub fn begin_child(&self) {
        self.is_running.store(false, SeqCst);
    }
}

#[cfg(not(shuttle))]
use pagemill_sys::futex::{self, Scope};
#[cfg(not(shuttle))]
use pagemill_sys::thread;

/// The thread ends when nothing has been dirty for so long.
#[cfg(not(shuttle))]
const IDLE_NS: u64 = 10_000_000_000;

#[cfg(not(shuttle))]
impl thread::Work for Flusher {
    fn work(&'static self) {
        let Some(caches) = self.caches.get() else { return };
        let mut idle_since_ns = None;
        loop {
            let bell = self.bell.load(SeqCst);
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
                    // Who made something dirty before that counted on this thread.
                    if caches.is_all_clean() || self.is_running.swap(true, SeqCst) {
                        return;
                    }
                    continue;
                }
                None => now_ns + IDLE_NS,
            };
            self.wakes_ns.store(wakes_ns, SeqCst);
            futex::wait(&self.bell, bell, Some(Duration::from_nanos(wakes_ns - now_ns)), Scope::Private);
        }
    }
}

impl Caches {
    /// As [`Inner::flush`], of all.
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
