//! Looking for huge folios that hold little, when nobody needs memory yet: a hand goes around over the chunks of all caches.
//!
//! ```text
//!   made, or written to  --first time around-->  seen  --untouched the next time around: looked at-->  thinned
//!          ^                                       |                                                     known: dense
//!          `------------- written to --------------'------------------------------------------------------'
//! ```
//!
//! Only files in memory are thinned, so the *dirty* bit of a huge folio is free to say whether it was written to since the hand
//! came by; version and state stand in the chunk's note. What is written all the time is never looked at, and what was looked at
//! once is passed over. What was thinned stays small folios until its last page is written: only that proposes a collapse.
//!
//! The hand rests when it has been around and nothing was new. Made in part, zeroed in part, collapsed with holes: that starts
//! it again ([`File::note_sparse`]). Zeros that are written over data do not, by themselves.

use super::File;
use super::cache::{Caches, Inner};
use super::fetch::Place;
use super::thin::Look;
use super::worker::Worker;
use crate::folio::word::Kind;
use crate::sync::{AtomicU32, Guarded, Relaxed, coarse_ns};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

/// Looks of a step in the background: 8 MiB. With the rest after it 64 MiB a second.
const STEP_LOOKS: usize = 4;

/// Chunks of a step that are passed by: a cache line each.
const STEP_VISITS: usize = 1 << 12;

const STEP_NS: u64 = 125_000_000;

/// It does not go around faster: what is untouched for so long is not just about to be written.
const ROUND_NS: u64 = 2_000_000_000;

/// In a chunk's note, above the version of the folio that it is about.
const SEEN: u64 = 1 << 32;
const KNOWN: u64 = 2 << 32;

/// Where the hand is.
#[derive(Clone, Copy, Default)]
struct Hand {
    cache: usize,
    chunk: u32,
    /// Changes that there were when it began to go around.
    changes: u32,
    /// This time around something was new.
    is_unsettled: bool,
    /// When it began to go around, and when it goes on.
    begun_ns: u64,
    due_ns: u64,
}

/// The hand, and what starts it.
#[derive(Default)]
pub(super) struct Sweep {
    hand: Guarded<Hand>,
    /// How often something came up that may be sparse.
    changes: AtomicU32,
    /// Otherwise it rests until the next change.
    is_awake: AtomicBool,
}

/// What came of a step.
#[derive(Default)]
pub(super) struct Step {
    pub freed_bytes: u64,
    /// The hand has been around.
    is_around: bool,
}

/// What came of a visit.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Visit {
    /// There is nothing to be looked at.
    Passed,
    /// Perhaps the next time around.
    Noted,
    Looked(Look),
}

impl File {
    /// A huge folio of the file may hold little.
    pub(super) fn note_sparse(&self, number: u32) {
        if self.store.is_none() {
            self.pool().note(number).store(0, Relaxed);
            let caches = self.cache.caches;
            caches.worker.sweep.note_change(&caches.worker, caches);
        }
    }

    /// As [`File::note_sparse`], of one that is pinned, if it is huge.
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

    /// Rests, unless something came up since the hand began to go around.
    fn fall_asleep(&self, hand: &Hand) -> bool {
        self.is_awake.store(false, SeqCst);
        let is_same = self.changes.load(SeqCst) == hand.changes;
        if !is_same {
            self.is_awake.store(true, SeqCst);
        }
        is_same
    }

    pub fn acquire_for_fork(&self) {
        self.hand.acquire_when(|_| true);
    }

    pub fn release_after_fork(&self) {
        self.hand.release();
    }

    pub fn begin_child(&self) {
        self.is_awake.store(false, SeqCst);
        self.hand.with(|hand| *hand = Hand::default());
    }
}

/// A step of the background's, if it is time for one. Returns how long to rest; `None`: until something changes.
pub(super) fn go_on(caches: &'static Caches) -> Option<Duration> {
    let (worker, now) = (&caches.worker, coarse_ns());
    let sweep = &worker.sweep;
    if worker.is_by_hand() || !sweep.is_awake.load(SeqCst) {
        return None;
    }
    let due_ns = sweep.hand.with(|hand| hand.due_ns);
    if now < due_ns {
        return Some(Duration::from_nanos(due_ns - now));
    }
    let was = sweep.hand.with(|hand| {
        if (hand.cache, hand.chunk) == (0, 0) {
            hand.begun_ns = now;
        }
        *hand
    });
    let is_around = step(caches, STEP_LOOKS, STEP_VISITS).is_around;
    let mut rest_ns = STEP_NS;
    if is_around {
        let last = sweep.hand.with(|hand| *hand);
        // What was new this time has to be looked at the next.
        if !last.is_unsettled && sweep.fall_asleep(&last) {
            return None;
        }
        rest_ns = rest_ns.max((was.begun_ns + ROUND_NS).saturating_sub(now));
    }
    sweep.hand.with(|hand| hand.due_ns = now + rest_ns);
    Some(Duration::from_nanos(rest_ns))
}

/// Goes on with the hand, until so many folios were looked at, so many chunks visited, or it has been around.
pub(super) fn step(caches: &'static Caches, most_looks: usize, most_visits: usize) -> Step {
    let sweep = &caches.worker.sweep;
    let (mut done, mut looks, mut visits) = (Step::default(), 0, 0);
    let mut hand = sweep.hand.with(|hand| *hand);
    if (hand.cache, hand.chunk) == (0, 0) {
        hand.changes = sweep.changes.load(SeqCst);
        hand.is_unsettled = false;
    }
    while looks < most_looks && visits < most_visits {
        let Some((at, cache)) = caches.cache_from(hand.cache) else {
            (hand.cache, hand.chunk, done.is_around) = (0, 0, true);
            break;
        };
        if at != hand.cache {
            (hand.cache, hand.chunk) = (at, 0);
        }
        while looks < most_looks && visits < most_visits && hand.chunk < cache.sweepable_chunks() {
            let visit = cache.visit(hand.chunk);
            visits += 1;
            looks += usize::from(matches!(visit, Visit::Looked(_)));
            hand.is_unsettled |= matches!(visit, Visit::Noted | Visit::Looked(Look::Refused));
            if let Visit::Looked(Look::Thinned(bytes)) = visit {
                done.freed_bytes += bytes;
            }
            hand.chunk += 1;
        }
        if hand.chunk >= cache.sweepable_chunks() {
            (hand.cache, hand.chunk) = (at + 1, 0);
        }
    }
    sweep.hand.with(|now| *now = Hand { due_ns: now.due_ns, begun_ns: now.begun_ns, ..hand });
    done
}

impl Caches {
    /// The first cache from `at` on, and which it is.
    fn cache_from(&self, at: usize) -> Option<(usize, Arc<Inner>)> {
        let mut at = at.max(self.inherited.load(Relaxed));
        let cache = self.next_cache(&mut at)?;
        Some((at - 1, cache))
    }
}

impl Inner {
    /// None where a chunk is one page, or is not split.
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
        // Whose it is stays true for as long as the version does.
        let owner = pool.owner(number);
        let Some(file) = self.file(owner.id).filter(|file| file.store.is_none()) else { return Visit::Passed };
        if seen.is_dirty() {
            // Only if nothing has happened since: it could be a page by now that a store has to hear of.
            if word.forget_dirty(seen) {
                note.store(SEEN | version, Relaxed);
            }
            return Visit::Noted;
        }
        if known != SEEN | version {
            note.store(SEEN | version, Relaxed);
            return Visit::Noted;
        }
        let look = file.thin_behind(owner.index, number);
        if look == Look::Dense {
            note.store(KNOWN | version, Relaxed);
        }
        Visit::Looked(look)
    }
}
