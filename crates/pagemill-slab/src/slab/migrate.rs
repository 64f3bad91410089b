//! Emptying slabs: moves the objects of a slab to free objects elsewhere, in chunks.
//!
//! [`super::defrag`] chooses and claims a slab. The mover of the cache selects its objects (`isolate`, under the lock of
//! the node) and moves each of them (`migrate`, without locks). The emptied places wait for readers ([`super::batch`]).
//!
//! ```text
//!   open --claim--> claimed --isolate, migrate ... --> claimed, in a batch --readers gone--> open, or its memory back
//!                      `------- a callback panics ---> lost
//! ```

use super::batch::Deferred;
use super::candidates::{Criteria, DefragCandidate};
use super::drain::DrainGuard;
use super::engine::Engine;
use super::meta::{Objects, SlabSet};
use super::node::TargetRoom;
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::Relaxed;
use pagemill_sys::{clock, mem};
use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;

/// Objects that are isolated at once. Bounds how long an allocation waits for the node's lock.
const CHUNK: usize = 64;

/// Objects to move and their destinations are spread over a slab, so they are prefetched this many moves ahead. Each move
/// ends with an atomic exchange that stalls the processor, which would otherwise fetch only one object at a time.
const AHEAD: usize = 4;

/// Bytes of an object that are prefetched at most.
const AHEAD_BYTES: usize = 256;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Objects of one slab that may be moved.
pub(super) struct Chunk {
    pub objects: [usize; CHUNK],
    pub len: usize,
}

impl Chunk {
    /// Rejects the objects for which `is_kept` returns false.
    pub fn retain(&mut self, mut is_kept: impl FnMut(usize) -> bool) {
        let mut kept = 0;
        for at in 0..self.len {
            let object = self.objects[at];
            if is_kept(object) {
                self.objects[kept] = object;
                kept += 1;
            }
        }
        self.len = kept;
    }
}

/// Result of moving an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// The object was moved.
    Moved,
    /// Its owner freed it instead.
    Freed,
    /// It stays, because it is in use.
    Busy,
    /// It stays, because there was no destination, or it could not be moved.
    Failed,
}

/// Moves the objects of a cache.
pub(super) trait Mover {
    /// State that `isolate` passes to `migrate`.
    type Isolated;

    /// Rejects objects that must not be moved. Called under the lock of the node: must not call the cache.
    fn isolate(&self, chunk: &mut Chunk) -> Self::Isolated;

    /// Called for an object that `isolate` kept, which is being prefetched and will be moved soon. Prefetches what
    /// else [`Mover::migrate`] needs.
    fn expect(&self, _object: usize) {}

    /// Collects what threads keep beside their magazines.
    fn collect(&self, _drained: &DrainGuard<'_>) {}

    /// Moves an object to a place of `to`.
    fn migrate(&self, object: usize, to: &mut Places<'_>, isolated: &mut Self::Isolated) -> Fate;
}

/// Free objects of one node that objects can be moved to.
pub(super) struct Places<'engine> {
    engine: &'engine Engine,
    node: usize,
    room: TargetRoom,
    taken: [usize; CHUNK],
    len: usize,
    /// Upper bound of the objects that are still to be moved.
    wanted: usize,
}

impl<'engine> Places<'engine> {
    fn new(engine: &'engine Engine, node: usize, room: TargetRoom) -> Self {
        Self { engine, node, room, taken: [0; CHUNK], len: 0, wanted: CHUNK }
    }

    /// Allocates a destination.
    pub fn take(&mut self) -> Option<usize> {
        if self.len == 0 {
            let wanted = self.wanted.clamp(1, CHUNK);
            self.len = self.engine.take_present(self.node, self.room, &mut self.taken[..wanted]);
            let least = match self.room {
                TargetRoom::Used => Some(0),
                TargetRoom::Fuller(least) => Some(least),
                TargetRoom::Partial | TargetRoom::Any => None,
            };
            if self.len == 0 && least.is_some_and(|least| self.engine.grow_in_use(self.node, least)) {
                self.len = self.engine.take_present(self.node, self.room, &mut self.taken[..wanted]);
            }
        }
        if self.len == 0 && self.room == TargetRoom::Any && self.engine.take(self.node, 0, &mut self.taken[..1]).is_ok()
        {
            self.len = 1;
        }
        self.len = self.len.checked_sub(1)?;
        let object = self.taken[self.len];
        if let Some(next) = self.len.checked_sub(AHEAD) {
            self.engine.fetch(self.taken[next]);
        }
        self.engine.note_taken(object);
        self.engine.open_free(object);
        Some(object)
    }

    /// Returns a destination that was not used.
    pub fn put(&mut self, object: usize) {
        self.engine.note_given(object);
        self.engine.close_free(object);
        if self.len < CHUNK {
            self.taken[self.len] = object;
            self.len += 1;
        } else {
            self.engine.put_back(self.node, &[object]);
        }
    }
}

impl Drop for Places<'_> {
    fn drop(&mut self) {
        self.engine.put_back(self.node, &self.taken[..self.len]);
    }
}

impl Engine {
    /// Prefetches an object that is about to be read or written.
    fn fetch(&self, object: usize) {
        (0..self.shape.stride.min(AHEAD_BYTES)).step_by(LINE).for_each(|at| mem::prefetch(object + at));
    }
}

thread_local! {
    static IS_ISOLATING: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is inside of `isolate`, under the lock of a node.
pub(super) fn is_isolating() -> bool {
    // Under shuttle all tasks share one thread.
    cfg!(not(shuttle)) && IS_ISOLATING.get()
}

/// Panics in calls from inside of `isolate`: they would wait for a lock that their own caller holds.
pub(super) fn assert_not_isolating() {
    assert!(!is_isolating(), "a slab cache is called while its slab is locked for `isolate`");
}

/// Sets the thread's `IS_ISOLATING` flag until it is dropped.
struct Isolating;

impl Isolating {
    fn begin() -> Self {
        IS_ISOLATING.set(true);
        Self
    }
}

impl Drop for Isolating {
    fn drop(&mut self) {
        IS_ISOLATING.set(false);
    }
}

/// Returns the first of two panics. The other is forgotten, because its destructor may panic.
fn first_panic(first: thread::Result<()>, other: thread::Result<()>) -> thread::Result<()> {
    if first.is_err() {
        std::mem::forget(other);
        return first;
    }
    other
}

/// Result of a defragmentation.
///
/// ```
/// use pagemill::{Pagemill, slab::Settings};
/// use std::time::Duration;
///
/// let cache = Pagemill::of_process()?.slabs.by_handle::<u64>(Settings::new("numbers"))?;
/// let progress = cache.defrag_step(Duration::from_millis(1))?;
/// assert_eq!((progress.moved, progress.emptied), (0, 0)); // the cache is empty
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Objects that were moved, or that their owner freed instead.
    pub moved: u64,
    /// Objects that stayed where they were.
    pub stayed: u64,
    /// Slabs that were emptied.
    pub emptied: u64,
    /// Whether the pass over all candidates has ended. A further pass may still find something.
    pub is_done: bool,
}

impl Progress {
    pub(super) fn add(&mut self, part: &Self) {
        self.moved += part.moved;
        self.stayed += part.stayed;
        self.emptied += part.emptied;
        self.is_done &= part.is_done;
    }
}

/// A step of defragmentation in progress.
pub(super) struct MigrationRun<'engine, M: Mover> {
    engine: &'engine Engine,
    mover: &'engine M,
    pass: u32,
    deadline_ns: u64,
    /// Objects that may still be moved.
    most: u64,
    pub progress: Progress,
    deferred: Vec<Deferred>,
    /// The first slab is finished regardless of the deadline, so that each step makes progress.
    has_tried: bool,
    /// A slab was left half done: there is more to do once it is open again.
    pub was_stopped: bool,
    panic: Option<Box<dyn Any + Send>>,
}

impl<'engine, M: Mover> MigrationRun<'engine, M> {
    pub fn new(engine: &'engine Engine, mover: &'engine M, pass: u32, deadline_ns: u64, most: u64) -> Self {
        Self {
            engine,
            mover,
            pass,
            deadline_ns,
            most,
            progress: Progress::default(),
            deferred: Vec::new(),
            has_tried: false,
            was_stopped: false,
            panic: None,
        }
    }

    pub fn is_over(&self) -> bool {
        let is_late = self.has_tried && clock::fine_ns() >= self.deadline_ns;
        self.panic.is_some() || self.most == 0 || is_late
    }

    /// Empties what the search finds on a node.
    pub fn compact(&mut self, node: usize, criteria: &Criteria) {
        while !self.is_over()
            && let Some(candidate) = self.engine.on(node, |node| node.claim_candidate(criteria))
        {
            match candidate {
                DefragCandidate::Slab(block, slab, most) => {
                    self.empty_slab(node, block, slab, most, (node, TargetRoom::Partial));
                }
                DefragCandidate::Block(block, slabs, room) => {
                    self.empty_block(node, block, slabs, (criteria.pass, room))
                }
            }
        }
    }

    /// Moves the objects of the slabs of a block that were claimed with it.
    pub fn empty_block(&mut self, node: usize, block: u32, slabs: SlabSet, (pass, room): (u32, TargetRoom)) {
        for slab in slabs.iter() {
            let was_tried = self.engine.shared.blocks.slab(block, slab).tried.get() == pass;
            let objects = if was_tried { 0 } else { u32::MAX };
            if !self.empty_slab(node, block, slab, objects, (node, room)) {
                self.engine.on(node, |node| node.blocks.block(block).tried.set(0));
            }
        }
        self.deferred.push(Deferred::Block { node, block });
    }

    /// Moves objects of a claimed slab. Returns whether all were tried; if not, the slab is tried again later.
    pub fn empty_slab(&mut self, node: usize, block: u32, slab: u32, most: u32, to: (usize, TargetRoom)) -> bool {
        let mut objects = Objects::default();
        let (mut from, mut left) = (0, u64::from(most));
        let is_whole = loop {
            let chunk_most = left.min(self.most).min(CHUNK as u64) as usize;
            if chunk_most == 0 {
                break left == 0;
            }
            if self.is_over() {
                break false;
            }
            match self.move_chunk(node, (block, slab), &mut from, chunk_most, to, &mut objects) {
                Some((0, _)) => break true,
                Some((count, stayed)) => left -= (count - stayed) as u64,
                None => {
                    self.engine.lose(node, block, slab);
                    break true;
                }
            }
        };
        let is_empty = self.engine.on(node, |node| {
            let words = node.blocks.slab(block, slab);
            words.tried.set(if is_whole { self.pass } else { 0 });
            words.used() == objects.count()
        });
        self.progress.emptied += u64::from(is_empty && objects.count() > 0);
        self.was_stopped |= !is_whole;
        self.has_tried |= is_whole && most > 0;
        self.deferred.push(Deferred::Slab { node, block, slab, objects });
        is_whole
    }

    /// Moves up to `most` objects of a slab, beginning at `from`. Returns how many there were and how many stayed; `None`
    /// if a callback panicked.
    fn move_chunk(
        &mut self,
        node: usize,
        (block, slab): (u32, u32),
        from: &mut u32,
        most: usize,
        (to, room): (usize, TargetRoom),
        left: &mut Objects,
    ) -> Option<(usize, usize)> {
        let (engine, mover) = (self.engine, self.mover);
        let mut chunk = Chunk { objects: [0; CHUNK], len: 0 };
        let mut count = 0;
        let isolated = catch_unwind(AssertUnwindSafe(|| {
            engine.on(node, |node| {
                let base = node.blocks.addr(block);
                node.blocks.slab(block, slab).set_objects(*from, most, |object| {
                    chunk.objects[count] = base + node.shape.offset_of(slab, object);
                    count += 1;
                    *from = object + 1;
                });
                // `isolate` usually reads each object.
                chunk.objects[..count].iter().for_each(|object| mem::prefetch(*object));
                chunk.len = count;
                let _isolating = Isolating::begin();
                mover.isolate(&mut chunk)
            })
        }));
        let refused = count - chunk.len;
        let mut fates = [0_usize; 4];
        let moved = isolated.and_then(|mut isolated| {
            let mut places = Places::new(engine, to, room);
            let moved = catch_unwind(AssertUnwindSafe(|| {
                for (at, object) in chunk.objects[..chunk.len].iter().enumerate() {
                    places.wanted = chunk.len - at;
                    if let Some(next) = chunk.objects[..chunk.len].get(at + AHEAD) {
                        engine.fetch(*next);
                        mover.expect(*next);
                    }
                    let fate = mover.migrate(*object, &mut places, &mut isolated);
                    fates[fate as usize] += 1;
                    if matches!(fate, Fate::Moved | Fate::Freed) {
                        left.add(engine.place_of(*object));
                    }
                }
            }));
            // The destructor is user code, too.
            let ended = catch_unwind(AssertUnwindSafe(|| drop(isolated)));
            first_panic(moved, ended)
        });
        self.count(refused, fates);
        match moved {
            Ok(()) => Some((count, refused + fates[Fate::Busy as usize] + fates[Fate::Failed as usize])),
            Err(panic) => {
                self.panic = Some(panic);
                None
            }
        }
    }

    fn count(&mut self, refused: usize, fates: [usize; 4]) {
        let counts = &self.engine.counts;
        let [moved, freed, busy, failed] = fates.map(|count| count as u64);
        let stayed = busy + failed + refused as u64;
        let each = [
            (&counts.moved, moved),
            (&counts.freed, freed),
            (&counts.busy, busy),
            (&counts.failed, failed),
            (&counts.refused, refused as u64),
        ];
        each.into_iter().for_each(|(counter, more)| _ = counter.fetch_add(more, Relaxed));
        stats::add(Counter::SlabMoved, moved);
        stats::add(Counter::SlabStayed, stayed);
        self.progress.moved += moved + freed;
        self.progress.stayed += stayed;
        self.most = self.most.saturating_sub(moved + freed);
    }

    /// Retires what was emptied until readers have finished. Resumes the panic of a callback, if there was one.
    pub fn end(self) -> Progress {
        stats::add(Counter::SlabEmptied, self.progress.emptied);
        self.engine.counts.emptied.fetch_add(self.progress.emptied, Relaxed);
        self.engine.retire(self.deferred);
        if let Some(panic) = self.panic {
            resume_unwind(panic);
        }
        self.progress
    }
}
