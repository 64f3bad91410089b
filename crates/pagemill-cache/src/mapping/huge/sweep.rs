//! Background scan for sparse huge folios (mostly zeros), before memory is short. A clock hand passes over the chunks
//! of all caches.
//!
//! ```text
//!   new, or written to  --first round-->  seen  --not written until the next round: check-->  split
//!          ^                                |                                                dense
//!          `---------- written to ----------'---------------------------------------------------'
//! ```
//!
//! Only folios of files without a store are split. Such files have no writeback, so the dirty bit of a huge folio is
//! free for another use: it records a write since the clock hand last passed the folio. The chunk's scan word holds the
//! folio's version and scan state. So folios that are written all the time are never checked, and folios that were
//! found dense are skipped. The pages of a split folio stay small until the last page of its range is written, because
//! only that write queues the range for a collapse. The dirty bit of a folio that a view maps tells nothing, so such a
//! folio is checked in its second round; a split unmaps it.
//!
//! The clock hand stops after a round that found nothing new. A huge folio that is created partly, zeroed partly or
//! collapsed with holes starts the hand again ([`File::note_sparse`]). Writing zeros over data does not.

use crate::folio::word::Kind;
use crate::mapping::File;
use crate::mapping::cache::{Caches, Inner};
use crate::mapping::huge::split_sparse::SparseSplitOutcome;
use crate::mapping::index::Place;
use pagemill_core::stats::Counter;
use pagemill_core::sync::{AtomicU32, Guarded, Relaxed, coarse_ns};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

/// Maximum number of folios that a background step of the scan checks: 8 MiB. With a step each 125 ms, that is 64 MiB a
/// second.
const MAX_CHECKS_PER_STEP: usize = 4;

/// Maximum number of chunks that a background step of the scan visits. A visit that checks no bytes reads one cache
/// line.
const MAX_VISITS_PER_STEP: usize = 1 << 12;

/// Time between two background steps of the scan for sparse huge folios.
const STEP_INTERVAL_NS: u64 = 125_000_000;

/// Minimum duration of a round of the clock hand over all chunks. A folio that was not written for this long will
/// hardly be written soon.
const MIN_ROUND_NS: u64 = 2_000_000_000;

/// Scan state of a huge folio, in the upper half of its scan word: the folio was seen in a round of the scan, and the
/// next round may check it.
const SEEN_STATE: u64 = 1 << 32;
/// Scan state of a huge folio, in the upper half of its scan word: a check found that the folio is not sparse.
const DENSE_STATE: u64 = 2 << 32;

/// Position of the scan's clock hand, which passes over the chunks of all caches.
#[derive(Clone, Copy, Default)]
pub(crate) struct ClockHand {
    /// Index of the cache to visit next.
    cache: usize,
    /// Index of the chunk to visit next.
    chunk: u32,
    /// Value of `Sweep::changes` when the current round began.
    changes: u32,
    /// Whether the current round met a folio that the next round must check.
    has_new_folio: bool,
    /// Time when the current round began.
    begun_ns: u64,
    /// Time of the next background step.
    due_ns: u64,
}

/// State of the scan for sparse huge folios: the clock hand, and the count of events that start it.
#[derive(Default)]
pub(crate) struct Sweep {
    pub clock_hand: Guarded<ClockHand>,
    /// Number of events so far that may have made a huge folio sparse.
    changes: AtomicU32,
    /// Whether the clock hand moves. If not, the next event in `changes` starts it.
    is_running: AtomicBool,
}

/// Result of one step of the scan for sparse huge folios.
#[derive(Default)]
pub(crate) struct SweepStep {
    pub freed_bytes: u64,
    /// Whether the hand has completed a round.
    is_round_complete: bool,
}

/// Result of the scan's visit to one chunk.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ChunkVisit {
    /// The chunk needs no check.
    Skipped,
    /// The scan state was set; the next round may check the folio.
    Noted,
    Checked(SparseSplitOutcome),
}

impl File {
    /// Records that a huge folio may be sparse, so that the scan checks it. Starts the clock hand if it is stopped.
    pub(crate) fn note_sparse(&self, number: u32) {
        if self.store.is_some() {
            return;
        }
        self.pool.scan_word(number).store(0, Relaxed);
        let (caches, worker) = (self.cache.caches, &self.cache.caches.worker);
        let Sweep { changes, is_running, .. } = &worker.sweep;
        changes.fetch_add(1, SeqCst);
        if !is_running.load(SeqCst) && !worker.is_thread_disabled() && !is_running.swap(true, SeqCst) {
            worker.wake(caches);
        }
    }

    /// As [`File::note_sparse`], for a pinned folio of any size that was zeroed partly. Does nothing for a small folio.
    pub(crate) fn note_zeroed(&self, place: &Place) {
        if place.order > 0 {
            self.note_sparse(place.number);
        }
    }
}

impl Sweep {
    /// Stops the clock hand, unless an event was counted in `changes` since the round began. Returns whether the hand
    /// was stopped.
    fn stop_if_unchanged(&self, clock_hand: &ClockHand) -> bool {
        self.is_running.store(false, SeqCst);
        let is_same = self.changes.load(SeqCst) == clock_hand.changes;
        if !is_same {
            self.is_running.store(true, SeqCst);
        }
        is_same
    }

    pub fn begin_child(&self) {
        self.is_running.store(false, SeqCst);
        self.clock_hand.with(|clock_hand| *clock_hand = ClockHand::default());
    }
}

/// Runs a background step of the scan if a step is due. Returns the time until the next step; `None` if the clock hand
/// is stopped.
pub(crate) fn run_due_step(caches: &'static Caches) -> Option<Duration> {
    let (worker, now) = (&caches.worker, coarse_ns());
    let sweep = &worker.sweep;
    if worker.is_thread_disabled() || !sweep.is_running.load(SeqCst) {
        return None;
    }
    let due_ns = sweep.clock_hand.with(|clock_hand| clock_hand.due_ns);
    if now < due_ns {
        return Some(Duration::from_nanos(due_ns - now));
    }
    let is_round_complete = step(caches, MAX_CHECKS_PER_STEP, MAX_VISITS_PER_STEP).is_round_complete;
    let mut rest_ns = STEP_INTERVAL_NS;
    if is_round_complete {
        let last = sweep.clock_hand.with(|clock_hand| *clock_hand);
        // Folios that were new in this round must be checked in the next one.
        if !last.has_new_folio && sweep.stop_if_unchanged(&last) {
            return None;
        }
        rest_ns = rest_ns.max((last.begun_ns + MIN_ROUND_NS).saturating_sub(now));
    }
    sweep.clock_hand.with(|clock_hand| clock_hand.due_ns = now + rest_ns);
    Some(Duration::from_nanos(rest_ns))
}

/// Moves the clock hand until it has checked `most_checks` folios, visited `most_visits` chunks, or completed its
/// round.
pub(crate) fn step(caches: &'static Caches, most_checks: usize, most_visits: usize) -> SweepStep {
    let sweep = &caches.worker.sweep;
    let (mut result, mut checks, mut visits) = (SweepStep::default(), 0, 0);
    let mut clock_hand = sweep.clock_hand.with(|clock_hand| *clock_hand);
    if (clock_hand.cache, clock_hand.chunk) == (0, 0) {
        clock_hand.begun_ns = coarse_ns();
        clock_hand.changes = sweep.changes.load(SeqCst);
        clock_hand.has_new_folio = false;
    }
    while checks < most_checks && visits < most_visits {
        let Some((at, cache)) = caches.first_cache_at(clock_hand.cache) else {
            (clock_hand.cache, clock_hand.chunk, result.is_round_complete) = (0, 0, true);
            break;
        };
        if at != clock_hand.cache {
            (clock_hand.cache, clock_hand.chunk) = (at, 0);
        }
        while checks < most_checks && visits < most_visits && clock_hand.chunk < cache.sweepable_chunks() {
            let visit = cache.visit_chunk(clock_hand.chunk);
            visits += 1;
            clock_hand.has_new_folio |=
                matches!(visit, ChunkVisit::Noted | ChunkVisit::Checked(SparseSplitOutcome::Refused));
            if let ChunkVisit::Checked(outcome) = visit {
                checks += 1;
                result.freed_bytes += outcome.freed_bytes();
            }
            clock_hand.chunk += 1;
        }
        if clock_hand.chunk >= cache.sweepable_chunks() {
            (clock_hand.cache, clock_hand.chunk) = (at + 1, 0);
        }
    }
    sweep.clock_hand.with(|now| *now = ClockHand { due_ns: now.due_ns, ..clock_hand });
    result
}

impl Caches {
    /// Returns the first cache at index `at` or later, and its index.
    fn first_cache_at(&self, at: usize) -> Option<(usize, Arc<Inner>)> {
        let mut at = at.max(self.inherited.load(Relaxed));
        let cache = self.next_cache(&mut at)?;
        Some((at - 1, cache))
    }
}

impl Inner {
    /// Returns the number of the cache's chunks that the scan visits: 0 if a chunk is one page, or if the cache never
    /// splits huge folios.
    fn sweepable_chunks(&self) -> u32 {
        let order = self.pool.chunk_order;
        if order > 0 && self.may_split { self.pool.pages() >> order } else { 0 }
    }

    /// Visits a chunk. If its huge folio was not written since the previous round, checks the folio, and splits it if it
    /// is sparse. Notes a folio that is new or was written for the next round.
    fn visit_chunk(&self, chunk: u32) -> ChunkVisit {
        let (pool, order) = (self.pool, self.pool.chunk_order);
        let number = chunk << order;
        let (word, note) = (pool.word(number), pool.scan_word(number));
        let seen = word.load();
        if seen.kind() != Kind::Live || seen.order() != order {
            return ChunkVisit::Skipped;
        }
        // A folio that is mapped in a view stays dirty. It is checked although it may be written.
        let is_pinned = seen.pins() > 0;
        let is_written = seen.is_dirty() && !is_pinned;
        let (version, known) = (u64::from(seen.version()), note.load(Relaxed));
        if !is_written && known == DENSE_STATE | version {
            return ChunkVisit::Skipped;
        }
        // The owner is valid as long as the folio's version is unchanged.
        let owner = pool.frame(number).owner();
        let is_candidate = |file: &Arc<File>| file.store.is_none() && !(is_pinned && file.views.is_empty());
        let Some(file) = self.file(owner.id).filter(is_candidate) else { return ChunkVisit::Skipped };
        if is_written {
            // Fails if the word has changed: the page could be a dirty folio of a file with a store by now.
            if word.clear_dirty_if_unchanged(seen) {
                note.store(SEEN_STATE | version, Relaxed);
            }
            return ChunkVisit::Noted;
        }
        if known != SEEN_STATE | version {
            note.store(SEEN_STATE | version, Relaxed);
            return ChunkVisit::Noted;
        }
        let check = file.split_sparse_at(owner.index, number, Counter::HugeSplitBehind);
        if check == SparseSplitOutcome::Dense {
            note.store(DENSE_STATE | version, Relaxed);
        }
        ChunkVisit::Checked(check)
    }
}
