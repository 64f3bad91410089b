//! Background search for sparse huge folios, before memory is short: a clock hand passes over the chunks of all caches.
//!
//! ```text
//!   new, or written to  --first round-->  seen  --untouched until the next round: checked-->  split
//!          ^                                |                                                  known: dense
//!          `---------- written to ----------'---------------------------------------------------'
//! ```
//!
//! Only folios of files in memory are split. They have no writeback, so the *dirty* bit of a huge folio records a write
//! since the last round. Version and state are in the chunk's note. Folios that are written all the time are never
//! checked, and folios checked once are skipped. Small folios of a split one stay small until its last page is written:
//! only that proposes a collapse.
//!
//! The hand rests after a round with nothing new. A huge folio that is created partly, zeroed partly or collapsed with
//! holes starts it again ([`File::note_sparse`]). Writing zeros over data does not.

use super::File;
use super::cache::{Caches, Inner};
use super::fetch::Place;
use super::split_sparse::SparseCheck;
use super::worker::Worker;
use crate::folio::word::Kind;
use pagemill_core::sync::{AtomicU32, Guarded, Relaxed, coarse_ns};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

/// Folios checked in a background step: 8 MiB. With the rest in between, 64 MiB a second.
const STEP_LOOKS: usize = 4;

/// Chunks skipped in a step: a cache line each.
const STEP_VISITS: usize = 1 << 12;

const STEP_NS: u64 = 125_000_000;

/// Shortest time of a round. A folio untouched for this long is not just about to be written.
const ROUND_NS: u64 = 2_000_000_000;

/// States in a chunk's note, above the version of the folio that it describes.
const SEEN: u64 = 1 << 32;
const KNOWN: u64 = 2 << 32;

/// Position of the clock hand.
#[derive(Clone, Copy, Default)]
struct ClockHand {
    cache: usize,
    chunk: u32,
    /// Value of `Sweep::changes` when the round began.
    changes: u32,
    /// This round met something new.
    is_changing: bool,
    /// Begin of the round, and time of the next step.
    begun_ns: u64,
    due_ns: u64,
}

/// The clock hand, and what wakes it.
#[derive(Default)]
pub(super) struct Sweep {
    clock_hand: Guarded<ClockHand>,
    /// Counts events that may have made a folio sparse.
    changes: AtomicU32,
    /// False while the hand rests until the next change.
    is_awake: AtomicBool,
}

/// Result of a step.
#[derive(Default)]
pub(super) struct Step {
    pub freed_bytes: u64,
    /// The hand has completed a round.
    is_around: bool,
}

/// Result of a visit to a chunk.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Visit {
    /// Nothing to check.
    Passed,
    /// Noted; checked in the next round perhaps.
    Noted,
    Looked(SparseCheck),
}

impl File {
    /// Records that a huge folio of the file may be sparse.
    pub(super) fn note_sparse(&self, number: u32) {
        if self.store.is_none() {
            self.pool().note(number).store(0, Relaxed);
            let caches = self.cache.caches;
            caches.worker.sweep.note_change(&caches.worker, caches);
        }
    }

    /// As [`File::note_sparse`], for a pinned folio, if it is huge.
    pub(super) fn note_zeroed(&self, place: &Place) {
        if place.order > 0 {
            self.note_sparse(place.number);
        }
    }
}

impl Sweep {
    fn note_change(&self, worker: &Worker, caches: &'static Caches) {
        self.changes.fetch_add(1, SeqCst);
        if !self.is_awake.load(SeqCst) && !worker.is_by_hand() && !self.is_awake.swap(true, SeqCst) {
            worker.ring(caches);
        }
    }

    /// Makes the hand rest, unless something changed since the round began.
    fn fall_asleep(&self, clock_hand: &ClockHand) -> bool {
        self.is_awake.store(false, SeqCst);
        let is_same = self.changes.load(SeqCst) == clock_hand.changes;
        if !is_same {
            self.is_awake.store(true, SeqCst);
        }
        is_same
    }

    pub fn acquire_for_fork(&self) {
        self.clock_hand.acquire_when(|_| true);
    }

    pub fn release_after_fork(&self) {
        self.clock_hand.release();
    }

    pub fn begin_child(&self) {
        self.is_awake.store(false, SeqCst);
        self.clock_hand.with(|clock_hand| *clock_hand = ClockHand::default());
    }
}

/// Does a background step if one is due. Returns the rest until the next; `None`: until something changes.
pub(super) fn go_on(caches: &'static Caches) -> Option<Duration> {
    let (worker, now) = (&caches.worker, coarse_ns());
    let sweep = &worker.sweep;
    if worker.is_by_hand() || !sweep.is_awake.load(SeqCst) {
        return None;
    }
    let due_ns = sweep.clock_hand.with(|clock_hand| clock_hand.due_ns);
    if now < due_ns {
        return Some(Duration::from_nanos(due_ns - now));
    }
    let was = sweep.clock_hand.with(|clock_hand| {
        if (clock_hand.cache, clock_hand.chunk) == (0, 0) {
            clock_hand.begun_ns = now;
        }
        *clock_hand
    });
    let is_around = step(caches, STEP_LOOKS, STEP_VISITS).is_around;
    let mut rest_ns = STEP_NS;
    if is_around {
        let last = sweep.clock_hand.with(|clock_hand| *clock_hand);
        // Folios that were new in this round must be checked in the next.
        if !last.is_changing && sweep.fall_asleep(&last) {
            return None;
        }
        rest_ns = rest_ns.max((was.begun_ns + ROUND_NS).saturating_sub(now));
    }
    sweep.clock_hand.with(|clock_hand| clock_hand.due_ns = now + rest_ns);
    Some(Duration::from_nanos(rest_ns))
}

/// Moves the hand until it has checked `most_looks` folios, visited `most_visits` chunks, or completed the round.
pub(super) fn step(caches: &'static Caches, most_looks: usize, most_visits: usize) -> Step {
    let sweep = &caches.worker.sweep;
    let (mut done, mut looks, mut visits) = (Step::default(), 0, 0);
    let mut clock_hand = sweep.clock_hand.with(|clock_hand| *clock_hand);
    if (clock_hand.cache, clock_hand.chunk) == (0, 0) {
        clock_hand.changes = sweep.changes.load(SeqCst);
        clock_hand.is_changing = false;
    }
    while looks < most_looks && visits < most_visits {
        let Some((at, cache)) = caches.cache_from(clock_hand.cache) else {
            (clock_hand.cache, clock_hand.chunk, done.is_around) = (0, 0, true);
            break;
        };
        if at != clock_hand.cache {
            (clock_hand.cache, clock_hand.chunk) = (at, 0);
        }
        while looks < most_looks && visits < most_visits && clock_hand.chunk < cache.sweepable_chunks() {
            let visit = cache.visit(clock_hand.chunk);
            visits += 1;
            looks += usize::from(matches!(visit, Visit::Looked(_)));
            clock_hand.is_changing |= matches!(visit, Visit::Noted | Visit::Looked(SparseCheck::Refused));
            if let Visit::Looked(SparseCheck::Split(bytes)) = visit {
                done.freed_bytes += bytes;
            }
            clock_hand.chunk += 1;
        }
        if clock_hand.chunk >= cache.sweepable_chunks() {
            (clock_hand.cache, clock_hand.chunk) = (at + 1, 0);
        }
    }
    sweep.clock_hand.with(|now| *now = ClockHand { due_ns: now.due_ns, begun_ns: now.begun_ns, ..clock_hand });
    done
}

impl Caches {
    /// Returns the first cache from `at` on, and its index.
    fn cache_from(&self, at: usize) -> Option<(usize, Arc<Inner>)> {
        let mut at = at.max(self.inherited.load(Relaxed));
        let cache = self.next_cache(&mut at)?;
        Some((at - 1, cache))
    }
}

impl Inner {
    /// Returns the number of chunks to sweep: 0 if a chunk is one page, or is never split.
    fn sweepable_chunks(&self) -> u32 {
        let order = self.pool.chunk_order();
        if order > 0 && self.may_split { self.pool.pages() >> order } else { 0 }
    }

    fn visit(&self, chunk: u32) -> Visit {
        let (pool, order) = (self.pool, self.pool.chunk_order());
        let number = chunk << order;
        let (word, note) = (pool.word(number), pool.note(number));
        let seen = word.load();
        if seen.kind() != Kind::Live || seen.order() != order || seen.pins() > 0 {
            return Visit::Passed;
        }
        let (version, known) = (u64::from(seen.version()), note.load(Relaxed));
        if !seen.is_dirty() && known == KNOWN | version {
            return Visit::Passed;
        }
        // The owner is valid as long as the version is.
        let owner = pool.owner(number);
        let Some(file) = self.file(owner.id).filter(|file| file.store.is_none()) else { return Visit::Passed };
        if seen.is_dirty() {
            // Only if the word is unchanged: the folio could be a dirty page of a file with a store by now.
            if word.forget_dirty(seen) {
                note.store(SEEN | version, Relaxed);
            }
            return Visit::Noted;
        }
        if known != SEEN | version {
            note.store(SEEN | version, Relaxed);
            return Visit::Noted;
        }
        let look = file.split_sparse_behind(owner.index, number);
        if look == SparseCheck::Dense {
            note.store(KNOWN | version, Relaxed);
        }
        Visit::Looked(look)
    }
}
