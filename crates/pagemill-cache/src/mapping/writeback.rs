//! Writeback of dirty folios: a walk over those of one file, in order, with many transfers in flight.
//!
//! ```text
//!   Pass    one walk: transfers in flight, and their results     the walk starts more as transfers complete
//!     Run     adjacent folios, frozen                              written as one, from a copy if not contiguous in memory
//! ```
//!
//! A run has one owner: first the walk, then the store. Its folios are thawed when the store's thread finishes the run.
//! So a walk can give up on a store that makes no progress. A thread that writes to a frozen folio waits for that one
//! run only.
#![allow(unsafe_code)] // references to the bytes of folios that it keeps still

use super::File;
use super::dirty::DIRTY;
use super::sync::failed;
use crate::folio::word::State;
use pagemill_core::epoch;
use pagemill_core::error::{Error, Result};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::Relaxed;
use pagemill_core::units::BLOCK_BYTES;
use pagemill_store::{Aligned, Buffer, Direction, Finish, Store, Transfer};
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering::AcqRel, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Most runs and bytes in flight: enough to keep a device busy. A folio larger than that is written, too.
const MOST_RUNS: usize = 128;
const MOST_BYTES: u64 = 16 * BLOCK_BYTES as u64;

/// Runs are started in batches. Starting them one by one costs most; starting all at once leaves the device idle
/// before.
const STARTED_TOGETHER: usize = 8;
const STARTED_BYTES: u64 = MOST_BYTES / 4;

/// Adjacent small folios are written as one transfer, up to this length. A few large transfers cost a device less than
/// many small ones.
const MERGED_BYTES: u64 = BLOCK_BYTES as u64 / 2;

/// Interval of wakeups in a wait without a time limit. The store keeps the folios until it reports the end.
const LOOK: Duration = Duration::from_secs(60);

const DOING: &str = "writing a file back";

/// Why a file is written back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    /// The pages were dirty for too long.
    Age,
    /// Too much of the cache is dirty.
    Share,
    /// The program syncs, writes back, or drops the file.
    Sync,
    /// All pages are dirty, and room is needed.
    Room,
}

impl Why {
    fn counter(self) -> Counter {
        match self {
            Self::Age => Counter::CacheWrittenForAge,
            Self::Share => Counter::CacheWrittenForShare,
            Self::Sync => Counter::CacheWrittenForSync,
            Self::Room => Counter::CacheWrittenForRoom,
        }
    }
}

/// Range and limits of a walk.
#[derive(Clone)]
pub(super) struct Walk {
    pub why: Why,
    pub pages: Range<u64>,
    /// The walk ends after this many bytes.
    pub most_bytes: u64,
    /// Time limit for a store without completions. `None`: no limit.
    pub timeout: Option<Duration>,
    /// Whether the walk waits for users of a folio, a second at most. Otherwise it skips the folio.
    pub waits_for_others: bool,
}

/// Result of a walk.
#[derive(Debug, Default)]
pub(super) struct Walked {
    pub written_bytes: u64,
    /// All folios that were dirty when the walk reached them are clean.
    pub is_clean: bool,
    /// Where the next walk continues; `None` at the end.
    pub next: Option<u64>,
    /// The store's first error. Failed folios stay dirty, and the others were written.
    pub failure: Option<Error>,
}

/// A folio of a run.
struct RunFolio {
    number: u32,
    order: u8,
}

/// One walk over a file.
struct Pass {
    file: Arc<File>,
    why: Why,
    state: Mutex<PassProgress>,
    changed: Condvar,
}

#[derive(Default)]
struct PassProgress {
    runs: usize,
    bytes: u64,
    /// The waiting walk is woken when no more than this is in flight.
    awaited: (usize, u64),
    ended: u64,
    written_bytes: u64,
    must_stay: bool,
    failure: Option<io::Error>,
}

impl PassProgress {
    fn is_below(&self, most: (usize, u64)) -> bool {
        self.runs <= most.0 && self.bytes <= most.1
    }
}

impl Pass {
    /// Held for a few instructions, without callbacks.
    fn state(&self) -> MutexGuard<'_, PassProgress> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, bytes: u64) {
        self.file.note_in_flight();
        stats::add(Counter::CacheWriteback, bytes);
        let mut state = self.state();
        state.runs += 1;
        state.bytes += bytes;
    }

    fn end(&self, bytes: u64, result: io::Result<bool>) {
        stats::sub(Counter::CacheWriteback, bytes);
        if result.is_ok() {
            stats::add(self.why.counter(), bytes);
        }
        let mut state = self.state();
        state.runs -= 1;
        state.bytes -= bytes;
        state.ended += 1;
        match result {
            Ok(is_clean) => {
                state.written_bytes += bytes;
                state.must_stay |= !is_clean;
            }
            Err(error) => _ = state.failure.get_or_insert(error),
        }
        let is_awaited = state.is_below(state.awaited);
        drop(state);
        self.file.note_run_ended();
        if is_awaited {
            self.changed.notify_all();
        }
    }

    /// Waits until at most `most` is in flight. Returns `false` if nothing completes for all of `timeout`.
    fn wait(&self, most: (usize, u64), timeout: Option<Duration>) -> bool {
        let (mut seen, mut since) = (u64::MAX, Instant::now());
        let mut state = self.state();
        state.awaited = most;
        while !state.is_below(most) {
            if state.ended != seen {
                (seen, since) = (state.ended, Instant::now());
            }
            let rest = timeout.map_or(LOOK, |timeout| timeout.saturating_sub(since.elapsed()));
            if rest.is_zero() {
                return false;
            }
            state = self.changed.wait_timeout(state, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

/// Adjacent folios of a file, written as one.
///
/// # Invariants
///
/// 1. Its folios are frozen until it is complete, so no thread writes to their bytes.
/// 2. `copy`, if there is one, is never changed.
struct WriteRun {
    pass: Arc<Pass>,
    first: RunFolio,
    others: Vec<RunFolio>,
    /// Its range in the file.
    bytes: Range<u64>,
    /// Its folios are contiguous in memory, in the order of the file.
    is_in_a_row: bool,
    copy: Option<Aligned>,
    /// Value of `File::cut` when the run was made.
    cut: u32,
    is_complete: AtomicBool,
}

impl WriteRun {
    fn len_bytes(&self) -> u64 {
        self.bytes.end - self.bytes.start
    }

    fn parts(&self) -> impl Iterator<Item = &RunFolio> + Clone {
        std::iter::once(&self.first).chain(&self.others)
    }

    /// Index, number and order of each folio.
    fn folios(&self) -> impl Iterator<Item = (u64, u32, u8)> + Clone {
        let first = self.pass.file.index_of(self.bytes.start);
        self.parts().scan(first, |index, part| {
            let at = *index;
            *index += 1 << part.order;
            Some((at, part.number, part.order))
        })
    }

    /// Adds a folio if it follows the others; returns whether it did.
    fn join(&mut self, part: &RunFolio, bytes: &Range<u64>) -> bool {
        let fits = self.bytes.end == bytes.start && bytes.end - self.bytes.start <= MERGED_BYTES;
        if fits {
            let pool = self.pass.file.pool();
            let end = pool.addr(self.first.number) + self.len_bytes() as usize;
            self.is_in_a_row &= end == pool.addr(part.number);
            self.others.push(RunFolio { ..*part });
            self.bytes.end = bytes.end;
        }
        fits
    }

    /// Copies folios that are not contiguous.
    fn gather(&mut self) {
        if self.is_in_a_row {
            return;
        }
        let file = &self.pass.file;
        let mut copy = Aligned::new(self.len_bytes() as usize, file.page_bytes());
        let mut rest = &mut copy[..];
        for part in self.parts() {
            let len = rest.len().min(file.cache.folio_bytes(part.order) as usize);
            let (here, behind) = rest.split_at_mut(len);
            file.pool().with_still_bytes(part.number, len, |bytes| here.copy_from_slice(bytes));
            rest = behind;
        }
        self.copy = Some(copy);
    }

    fn into_transfer(mut self) -> Transfer {
        self.gather();
        let (offset, len) = (self.bytes.start, self.len_bytes() as usize);
        let addr = match &self.copy {
            Some(copy) => copy.addr(),
            // SAFETY: the first folio's bytes, which are never at address 0.
            None => unsafe { NonNull::new_unchecked(self.pass.file.pool().addr(self.first.number) as *mut u8) },
        };
        self.pass.begin(len as u64);
        // SAFETY: a copy of its own, or contiguous folios. No thread writes to either (invariants) until the run is
        // complete. It is complete when its end is reported at the earliest, and lives until then: the transfer owns
        // it.
        unsafe { Transfer::new(Direction::Write, offset, addr, len, Arc::new(self), 0) }
    }

    /// Thaws its folios; returns whether they are clean.
    fn complete(&self, is_written: bool) -> bool {
        let file = &self.pass.file;
        if is_written {
            return file.note_written(self.folios(), self.bytes.end, self.cut);
        }
        self.parts().for_each(|part| file.thaw(part.number));
        false
    }
}

impl Finish for WriteRun {
    fn finish(&self, _token: u64, result: io::Result<()>) {
        if !self.is_complete.swap(true, AcqRel) {
            let is_clean = self.complete(result.is_ok());
            self.pass.end(self.len_bytes(), result.map(|()| is_clean));
        }
    }
}

impl Drop for WriteRun {
    fn drop(&mut self) {
        if !self.is_complete.swap(true, AcqRel) {
            self.complete(false);
        }
    }
}

/// Runs of a walk that the store has not got yet.
struct Ready<'store> {
    pass: Arc<Pass>,
    store: &'store dyn Store,
    runs: Vec<WriteRun>,
    bytes: u64,
}

impl Ready<'_> {
    /// Adds a frozen folio that lies behind the others in the file.
    fn push(&mut self, index: u64, number: u32, state: State, size_bytes: u64) -> u64 {
        let file = &self.pass.file;
        let (part, begin) = (RunFolio { number, order: state.order() }, file.offset_of(index));
        let bytes = begin..(begin + file.cache.folio_bytes(part.order)).min(size_bytes);
        if bytes.is_empty() {
            // It lies behind the end: it is about to be removed, or is the zero rest of a folio that could not be
            // split.
            file.note_needless(index, number, state);
            return 0;
        }
        let len_bytes = bytes.end - bytes.start;
        self.bytes += len_bytes;
        if !self.runs.last_mut().is_some_and(|run| run.join(&part, &bytes)) {
            let (pass, cut) = (self.pass.clone(), file.cut.load(Relaxed));
            let is_complete = AtomicBool::new(false);
            let run = WriteRun {
                pass,
                first: part,
                others: Vec::new(),
                bytes,
                is_in_a_row: true,
                copy: None,
                cut,
                is_complete,
            };
            self.runs.push(run);
        }
        len_bytes
    }

    /// Whether the collected runs should be started. The last run does not count, since it may still grow.
    fn is_full(&self) -> bool {
        let most = if self.store.is_asynchronous() { STARTED_TOGETHER } else { 1 };
        self.runs.len() > most || self.bytes >= STARTED_BYTES
    }

    fn start(&mut self) {
        self.bytes = 0;
        if !self.runs.is_empty() {
            self.store.start(self.runs.drain(..).map(WriteRun::into_transfer).collect());
        }
    }
}

impl File {
    /// Writes dirty folios back, each once. The caller holds the file's sync lock, and no other write of the file is in
    /// flight.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`] if a folio is in use for too long; the others were written. Also if the store makes no progress.
    pub(super) fn walk(self: &Arc<Self>, store: &dyn Store, walk: &Walk) -> Result<Walked> {
        let (state, changed) = (Mutex::new(PassProgress::default()), Condvar::new());
        let pass = Arc::new(Pass { file: self.clone(), why: walk.why, state, changed });
        let mut ready = Ready { pass: pass.clone(), store, runs: Vec::new(), bytes: 0 };
        let found = self.find_and_start(&mut ready, walk);
        ready.start();
        let is_over = pass.wait((0, 0), walk.timeout);
        let mut state = pass.state();
        if !is_over {
            return Err(Error::Busy { what: "the store makes no progress with its writes" });
        }
        let failure = state.failure.take().map(failed(DOING));
        let (next, is_clean) = match found {
            Err(error) if failure.is_none() => return Err(error),
            found => found.unwrap_or((None, false)),
        };
        Ok(Walked { written_bytes: state.written_bytes, is_clean: is_clean && !state.must_stay, next, failure })
    }

    /// Returns where the walk ended, and whether it skipped no folio.
    fn find_and_start(self: &Arc<Self>, ready: &mut Ready<'_>, walk: &Walk) -> Result<(Option<u64>, bool)> {
        let (mut at, mut found_bytes, mut is_clean, mut busy) = (walk.pages.start, 0, true, None);
        while at < walk.pages.end
            && !self.is_closed.load(Relaxed)
            && let Some(found) = { self.tree.next_marked(at, walk.pages.end - 1, DIRTY, &epoch::pin()) }
        {
            if found_bytes >= walk.most_bytes {
                return Ok((Some(found.first), is_clean));
            }
            // The folio may be split meanwhile: the search continues where the frozen folio ends.
            let (end, dirty) = match self.try_freeze_dirty(found.first) {
                Some(frozen) => frozen,
                None => {
                    // The folio's user may wait for one of the runs found so far, so start them first.
                    ready.start();
                    // Waits for at most one folio in vain; later ones in use are skipped.
                    let is_awaited = walk.waits_for_others && busy.is_none();
                    match is_awaited.then(|| self.freeze_dirty(found.first)) {
                        Some(Ok(frozen)) => frozen,
                        passed => {
                            is_clean = false;
                            busy = busy.or(passed.and_then(Result::err));
                            (found.last() + 1, None)
                        }
                    }
                }
            };
            if let Some((index, number, state)) = dirty {
                found_bytes += ready.push(index, number, state, self.size_bytes());
            }
            at = end;
            if ready.is_full() {
                ready.start();
                let pass = &ready.pass;
                let most = (MOST_RUNS - STARTED_TOGETHER, MOST_BYTES - STARTED_BYTES);
                if !pass.wait(most, walk.timeout) {
                    return Ok((Some(at), false));
                }
                if pass.state().failure.as_ref().is_some_and(|error| error.kind() == io::ErrorKind::TimedOut) {
                    // A store that times out for each transfer would otherwise cost that time for each of the rest.
                    return Ok((Some(at), false));
                }
            }
        }
        busy.map_or(Ok((None, is_clean)), Err)
    }

    fn note_in_flight(&self) {
        self.dirty.iter().for_each(|dirty| _ = dirty.in_flight.fetch_add(1, SeqCst));
    }

    fn note_run_ended(&self) {
        self.dirty.iter().for_each(|dirty| _ = dirty.in_flight.fetch_sub(1, SeqCst));
    }
}
