//! Writeback of dirty folios: a walk over the dirty folios of a file in order, with many transfers in flight.
//!
//! ```text
//!   WalkState    one walk: its transfers in flight, and their results. Starts more transfers as others complete.
//!     WriteRun     adjacent frozen folios, written by one transfer. Copied first if not contiguous in memory.
//! ```
//!
//! The walk owns a run until the store receives it; then the store owns it. The folios of a run are thawed when the
//! store completes it. So a walk can give up on a store that makes no progress. A thread that wants to write to a
//! frozen folio waits for its run only.
#![allow(unsafe_code)] // references to the bytes of frozen folios

use crate::folio::word::Kind;
use crate::mapping::File;
use crate::mapping::index::Place;
use crate::mapping::writeback::dirty::DIRTY;
use crate::mapping::writeback::sync::failed;
use pagemill_core::epoch;
use pagemill_core::error::{Error, Result};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{EventCount, Guarded, Relaxed};
use pagemill_core::units::BLOCK_BYTES;
use pagemill_store::{Aligned, Buffer, Direction, Finish, Store, Transfer};
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::AcqRel, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// Maximum number of runs (transfers of adjacent folios) in flight, enough to keep a device busy.
const MAX_RUNS_IN_FLIGHT: usize = 128;
/// Maximum number of bytes that one walk has in flight. A single folio that is larger is also written.
const MAX_BYTES_IN_FLIGHT: u64 = 16 * BLOCK_BYTES as u64;

/// Number of runs that are passed to the store at a time. One call for each run would cost too much, and one call for
/// all runs would leave the device idle until then.
const BATCH_RUNS: usize = 8;
/// Number of bytes of dirty folios that are passed to the store at a time.
const BATCH_BYTES: u64 = MAX_BYTES_IN_FLIGHT / 4;

/// Maximum length of a run of small folios. A device writes a few large transfers faster than many small ones.
const MAX_RUN_BYTES: u64 = BLOCK_BYTES as u64 / 2;

/// Length from which on a run of contiguous memory is written without a copy, even if that makes the transfer shorter.
const MIN_CONTIGUOUS_BYTES: u64 = BLOCK_BYTES as u64 / 32;

/// The name of the operation in errors of a store during writeback.
const WRITEBACK_OPERATION: &str = "writing a file back";

/// Why a file is written back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WritebackReason {
    /// The pages were dirty for too long.
    Age,
    /// Too much of the cache is dirty.
    Share,
    /// The program syncs, writes back, or drops the file.
    Sync,
    /// All pages are dirty, and a thread needs a page.
    Room,
}

impl WritebackReason {
    /// Returns the counter of the bytes that were written for this reason.
    fn counter(self) -> Counter {
        match self {
            Self::Age => Counter::CacheWrittenForAge,
            Self::Share => Counter::CacheWrittenForShare,
            Self::Sync => Counter::CacheWrittenForSync,
            Self::Room => Counter::CacheWrittenForRoom,
        }
    }
}

/// Range and limits of a walk over the dirty folios of a file.
#[derive(Clone)]
pub(crate) struct WalkPlan {
    pub reason: WritebackReason,
    /// Indices of the pages that the walk covers.
    pub pages: Range<u64>,
    /// The walk ends after it has found this many bytes.
    pub most_bytes: u64,
    /// Time limit for a store that completes nothing. `None`: no limit.
    pub timeout: Option<Duration>,
    /// What the walk does with a folio that another thread uses. True: waits for that thread, a second at most. False:
    /// skips the folio.
    pub waits_for_others: bool,
}

/// Result of a walk over the dirty folios of a file.
#[derive(Debug, Default)]
pub(crate) struct WalkResult {
    /// Number of bytes that were written without an error.
    pub written_bytes: u64,
    /// Whether all folios that were dirty when the walk reached them are clean now.
    pub is_clean: bool,
    /// Page at which the next walk continues; `None` if this walk reached the end of its range.
    pub next: Option<u64>,
    /// The store's first error. Folios whose write failed stay dirty; the other folios were written.
    pub failure: Option<Error>,
}

/// One walk over the dirty folios of a file.
struct WalkState {
    file: Arc<File>,
    reason: WritebackReason,
    progress: Guarded<WalkProgress>,
    changed: EventCount,
}

/// The runs of a walk that are in flight, and their results.
#[derive(Default)]
struct WalkProgress {
    /// Number of runs (transfers of adjacent folios) in flight.
    runs: usize,
    /// Number of bytes that these runs have in flight.
    bytes: u64,
    /// The walk sleeps until at most this many runs and bytes are in flight.
    awaited: (usize, u64),
    /// Number of runs (transfers of adjacent folios) that have ended.
    ended: u64,
    written_bytes: u64,
    /// Whether a folio was written but is dirty nevertheless.
    has_dirty_folio: bool,
    /// The store's first error.
    failure: Option<io::Error>,
}

impl WalkProgress {
    /// Returns whether at most `most.0` runs and `most.1` bytes are in flight.
    fn is_below(&self, most: (usize, u64)) -> bool {
        self.runs <= most.0 && self.bytes <= most.1
    }
}

impl WalkState {
    /// Records that a run of `bytes` bytes is in flight.
    fn begin(&self, bytes: u64) {
        self.file.dirty.iter().for_each(|dirty| _ = dirty.in_flight.fetch_add(1, SeqCst));
        stats::add(Counter::CacheWriteback, bytes);
        self.progress.with(|progress| {
            progress.runs += 1;
            progress.bytes += bytes;
        });
    }

    /// Records the end of a run of `bytes` bytes. `result` is the store's error, or says whether the folios are clean
    /// now.
    fn end(&self, bytes: u64, result: io::Result<bool>) {
        stats::sub(Counter::CacheWriteback, bytes);
        if result.is_ok() {
            stats::add(self.reason.counter(), bytes);
        }
        let is_awaited = self.progress.with(|progress| {
            debug_assert!(progress.runs > 0 && progress.bytes >= bytes, "the run was begun");
            progress.runs -= 1;
            progress.bytes -= bytes;
            debug_assert!(progress.runs > 0 || progress.bytes == 0, "bytes in flight belong to runs");
            progress.ended += 1;
            match result {
                Ok(is_clean) => {
                    progress.written_bytes += bytes;
                    progress.has_dirty_folio |= !is_clean;
                }
                Err(error) => _ = progress.failure.get_or_insert(error),
            }
            progress.is_below(progress.awaited)
        });
        if let Some(dirty) = &self.file.dirty {
            let runs = dirty.in_flight.fetch_sub(1, SeqCst);
            debug_assert!(runs > 0, "the run was in flight");
        }
        if is_awaited {
            self.changed.raise();
        }
    }

    /// Waits until at most `most.0` runs and `most.1` bytes are in flight. Returns `false` if no run ends for as long
    /// as `timeout`.
    fn wait(&self, most: (usize, u64), timeout: Option<Duration>) -> bool {
        let (mut known, mut since) = (u64::MAX, Instant::now());
        loop {
            let seen = self.changed.count();
            let (is_below, ended) = self.progress.with(|progress| {
                progress.awaited = most;
                (progress.is_below(most), progress.ended)
            });
            if is_below {
                return true;
            }
            if ended != known {
                (known, since) = (ended, Instant::now());
            }
            let rest = timeout.map(|timeout| timeout.saturating_sub(since.elapsed()));
            if rest.is_some_and(|rest| rest.is_zero()) {
                return false;
            }
            self.changed.wait(seen, rest);
        }
    }
}

/// Adjacent folios of a file that are written by one transfer.
///
/// # Invariants
///
/// 1. The folios are frozen until the run is complete, so no thread writes to their bytes.
/// 2. `copy`, if there is one, is never changed.
struct WriteRun {
    walk_state: Arc<WalkState>,
    first: Place,
    others: Vec<Place>,
    /// The bytes of the file that the run writes.
    bytes: Range<u64>,
    /// Whether the folios are contiguous in memory, in the order of the file.
    is_contiguous: bool,
    /// Copy of the bytes to write, if the folios are not contiguous.
    copy: Option<Aligned>,
    /// Value of `File::length_version` when the run was created.
    length_version: u32,
    /// Whether the folios of the run were thawed.
    is_complete: AtomicBool,
}

impl WriteRun {
    fn len_bytes(&self) -> u64 {
        self.bytes.end - self.bytes.start
    }

    /// Returns the folios of the run, in the order of the file.
    fn folios(&self) -> impl Iterator<Item = &Place> + Clone {
        std::iter::once(&self.first).chain(&self.others)
    }

    /// Adds a folio to the run if the folio directly follows the run in the file and the run is not too long. A long
    /// run of contiguous memory does not get a folio from elsewhere, because the run would then have to be copied.
    /// Returns whether the folio was added.
    fn append(&mut self, folio: Place, bytes: &Range<u64>) -> bool {
        let pool = self.walk_state.file.pool;
        let is_next = pool.addr(self.first.number) + self.len_bytes() as usize == pool.addr(folio.number);
        let stays_contiguous = self.is_contiguous && is_next;
        let is_worth_copying = !self.is_contiguous || self.len_bytes() < MIN_CONTIGUOUS_BYTES;
        let fits = self.bytes.end == bytes.start && bytes.end - self.bytes.start <= MAX_RUN_BYTES;
        if !fits || !(stays_contiguous || is_worth_copying) {
            return false;
        }
        self.is_contiguous = stays_contiguous;
        self.others.push(folio);
        self.bytes.end = bytes.end;
        true
    }

    /// Copies the folios of the run into one buffer, unless the folios are contiguous in memory.
    fn gather(&mut self) {
        if self.is_contiguous {
            return;
        }
        let file = &self.walk_state.file;
        let mut copy = Aligned::new(self.len_bytes() as usize, file.page_bytes());
        let mut rest = &mut copy[..];
        for folio in self.folios() {
            let len = rest.len().min(file.cache.folio_bytes(folio.order) as usize);
            let (here, behind) = rest.split_at_mut(len);
            debug_assert_eq!(file.pool.word(folio.number).load().kind(), Kind::Frozen);
            file.pool.copy_out(folio.number, 0, here);
            rest = behind;
        }
        debug_assert!(rest.is_empty(), "the folios cover the run");
        self.copy = Some(copy);
    }

    /// Converts the run to a transfer, which owns the run from then on.
    fn into_transfer(mut self) -> Transfer {
        self.gather();
        let (offset, len) = (self.bytes.start, self.len_bytes() as usize);
        let addr = match &self.copy {
            Some(copy) => copy.addr(),
            // SAFETY: the address of the first folio, which is never 0.
            None => unsafe { NonNull::new_unchecked(self.walk_state.file.pool.addr(self.first.number) as *mut u8) },
        };
        debug_assert!(len > 0 && offset.is_multiple_of(self.walk_state.file.page_bytes() as u64));
        debug_assert!(!self.is_complete.load(SeqCst), "a run is started once");
        self.walk_state.begin(len as u64);
        // SAFETY: the bytes are a copy owned by the run, or contiguous folios. No thread writes to either (invariants)
        // until the run is complete, which is at the earliest when the store reports its end. The transfer owns the
        // run, so the run lives until then.
        unsafe { Transfer::new(Direction::Write, offset, addr, len, Arc::new(self), 0) }
    }

    /// Thaws the folios of the run. `is_written` says whether the store has written them. Returns whether they are
    /// clean now.
    fn complete(&self, is_written: bool) -> bool {
        let file = &self.walk_state.file;
        if is_written {
            return file.note_written(self.folios(), self.bytes.end, self.length_version);
        }
        self.folios().for_each(|folio| file.thaw(folio.number));
        false
    }
}

impl Finish for WriteRun {
    fn finish(&self, _token: u64, result: io::Result<()>) {
        if !self.is_complete.swap(true, AcqRel) {
            let is_clean = self.complete(result.is_ok());
            self.walk_state.end(self.len_bytes(), result.map(|()| is_clean));
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

/// Runs of a walk that the store has not received yet.
struct PendingRuns<'store> {
    walk_state: Arc<WalkState>,
    store: &'store dyn Store,
    runs: Vec<WriteRun>,
    bytes: u64,
}

impl PendingRuns<'_> {
    /// Adds a frozen folio that lies behind all folios added before. Returns the number of its bytes that must be
    /// written.
    fn push(&mut self, folio: Place, size_bytes: u64) -> u64 {
        let file = &self.walk_state.file;
        debug_assert!(file.pool.word(folio.number).load().kind() == Kind::Frozen, "only frozen folios are written");
        debug_assert!(folio.first.is_multiple_of(1 << folio.order), "folios are aligned");
        let begin = file.offset_of(folio.first);
        let bytes = begin..(begin + file.cache.folio_bytes(folio.order)).min(size_bytes);
        if bytes.is_empty() {
            // The folio lies behind the end of the file: it is about to be removed, or is the zeroed rest of a folio
            // that could not be split.
            file.thaw_behind_end(folio);
            return 0;
        }
        let len_bytes = bytes.end - bytes.start;
        self.bytes += len_bytes;
        if !self.runs.last_mut().is_some_and(|run| run.append(folio, &bytes)) {
            let run = WriteRun {
                walk_state: self.walk_state.clone(),
                first: folio,
                others: Vec::new(),
                bytes,
                is_contiguous: true,
                copy: None,
                length_version: file.length_version.load(Relaxed),
                is_complete: AtomicBool::new(false),
            };
            self.runs.push(run);
        }
        len_bytes
    }

    /// Returns whether the runs should be passed to the store now. The last run is not counted, since it may still
    /// grow.
    fn is_full(&self) -> bool {
        let most = if self.store.is_asynchronous() { BATCH_RUNS } else { 1 };
        self.runs.len() > most || self.bytes >= BATCH_BYTES
    }

    /// Passes all pending runs to the store.
    fn start(&mut self) {
        self.bytes = 0;
        if !self.runs.is_empty() {
            self.store.start(self.runs.drain(..).map(WriteRun::into_transfer).collect());
        }
    }
}

impl File {
    /// Writes dirty folios back, each once. The caller holds the file's sync lock, and the file has no other write in
    /// flight.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`] if a folio is in use for too long (the others were written), or if the store makes no progress.
    pub(crate) fn walk(self: &Arc<Self>, store: &dyn Store, walk: &WalkPlan) -> Result<WalkResult> {
        let (progress, changed) = Default::default();
        let walk_state = Arc::new(WalkState { file: self.clone(), reason: walk.reason, progress, changed });
        let mut pending = PendingRuns { walk_state: walk_state.clone(), store, runs: Vec::new(), bytes: 0 };
        let found = self.find_and_start(&mut pending, walk);
        pending.start();
        let is_over = walk_state.wait((0, 0), walk.timeout);
        if !is_over {
            return Err(Error::Busy { what: "the store makes no progress with its writes" });
        }
        let progress = walk_state.progress.with(std::mem::take);
        debug_assert!((progress.runs, progress.bytes) == (0, 0), "all runs have ended");
        let failure = progress.failure.map(failed(WRITEBACK_OPERATION));
        let (next, is_clean) = match found {
            Err(error) if failure.is_none() => return Err(error),
            found => found.unwrap_or((None, false)),
        };
        Ok(WalkResult {
            written_bytes: progress.written_bytes,
            is_clean: is_clean && !progress.has_dirty_folio,
            next,
            failure,
        })
    }

    /// Finds dirty folios and starts their transfers. Returns where the walk ended, and whether the walk skipped no
    /// folio.
    fn find_and_start(self: &Arc<Self>, pending: &mut PendingRuns<'_>, walk: &WalkPlan) -> Result<(Option<u64>, bool)> {
        let (mut at, mut found_bytes, mut is_clean, mut busy) = (walk.pages.start, 0, true, None);
        while at < walk.pages.end
            && !self.is_closed.load(Relaxed)
            && let Some(found) = { self.tree.next_marked(at, walk.pages.end - 1, DIRTY, &epoch::pin()) }
        {
            if found_bytes >= walk.most_bytes {
                return Ok((Some(found.first), is_clean));
            }
            // The folio may be split meanwhile, so the search continues where the frozen folio ends.
            let (end, dirty) = match self.try_freeze_dirty(found.first) {
                Some(frozen) => frozen,
                None => {
                    // A thread that uses the folio may wait for one of the runs found so far, so start them first.
                    pending.start();
                    // The walk waits without success for one folio at most; later folios in use are skipped.
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
            found_bytes += dirty.map_or(0, |folio| pending.push(folio, self.size_bytes()));
            at = end;
            if pending.is_full() {
                pending.start();
                let walk_state = &pending.walk_state;
                let most = (MAX_RUNS_IN_FLIGHT - BATCH_RUNS, MAX_BYTES_IN_FLIGHT - BATCH_BYTES);
                if !walk_state.wait(most, walk.timeout) {
                    return Ok((Some(at), false));
                }
                let is_timeout = |error: &io::Error| error.kind() == io::ErrorKind::TimedOut;
                if walk_state.progress.with(|progress| progress.failure.as_ref().is_some_and(is_timeout)) {
                    // Give up: if a store times out for each transfer, each remaining one would cost that time.
                    return Ok((Some(at), false));
                }
            }
        }
        busy.map_or(Ok((None, is_clean)), Err)
    }
}
