//! Emptying slabs: moves the objects of a slab to free objects in other slabs, in chunks.
//!
//! [`crate::defrag::steps`] chooses and claims a slab. The cache's mover selects objects of the slab (`isolate`, under
//! the lock of the node) and moves each selected object (`migrate`, without locks). The old memory of moved objects
//! waits for readers ([`crate::defrag::retire_list`]).
//!
//! ```text
//!   open --claim--> claimed --isolate, migrate ... --> claimed, in a batch --readers done--> open, or freed
//!                      `------- a callback panics ---> lost
//! ```

use crate::alloc::engine::Engine;
use crate::alloc::meta::{ObjectSet, SlabSet};
use crate::alloc::node::TargetSlabs;
use crate::defrag::candidates::{Criteria, DefragCandidate};
use crate::defrag::drain::DrainGuard;
use crate::defrag::isolating::IsolatingGuard;
use crate::defrag::passes::Progress;
use crate::read::batch::DeferredAction;
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::Relaxed;
use pagemill_core::trace::{self, Event};
use pagemill_sys::{clock, mem};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;

/// Maximum number of objects that one call of `isolate` gets. It bounds how long an allocation waits for the node's
/// lock.
const MAX_CHUNK_OBJECTS: usize = 64;

/// Number of moves by which an object is prefetched before it is moved. Objects to move and their destinations are
/// spread over a slab. Without prefetching, the processor would fetch one object at a time, because each move ends with
/// an atomic exchange that stalls it.
const PREFETCH_DISTANCE: usize = 4;

/// Maximum number of bytes of an object that are prefetched.
const PREFETCH_BYTES: usize = 256;

/// Size of a cache line of the processor in bytes.
const CACHE_LINE_BYTES: usize = 64;

/// Addresses of objects of one slab that may be moved, for one call of `isolate`.
pub(crate) struct Chunk {
    pub objects: [usize; MAX_CHUNK_OBJECTS],
    pub len: usize,
}

impl Chunk {
    /// Removes from the chunk the objects for which `is_kept` returns false, so that they are not moved.
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

/// Outcome of the attempt to move an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MoveOutcome {
    /// The object was moved.
    Moved,
    /// The owner freed the object instead of moving it.
    Freed,
    /// The object was not moved, because it is in use or pinned.
    Busy,
    /// The object was not moved, because there was no destination or the owner could not move the object.
    Failed,
}

/// How the objects of one kind of slab cache are moved. [`MigrationRun`] decides which objects are moved.
pub(crate) trait Mover {
    /// State that `isolate` passes to `migrate` for the objects of one chunk.
    type Isolated;

    /// Removes the objects that must not be moved from the chunk. Runs under the lock of the node, so `isolate` must
    /// not call the cache.
    fn isolate(&self, chunk: &mut Chunk) -> Self::Isolated;

    /// Prefetches memory that [`Mover::migrate`] will need for an object, apart from the object itself. Called some
    /// moves before `migrate`.
    fn prefetch_for(&self, _object: usize) {}

    /// Empties the stocks of all threads. Called while the magazines are drained. Does nothing if the cache has no
    /// stocks.
    fn collect_stocks(&self, _drained: &DrainGuard<'_>) {}

    /// Moves an object to a destination that it takes from `to`. Returns the outcome.
    fn migrate(&self, object: usize, to: &mut Destinations<'_>, isolated: &mut Self::Isolated) -> MoveOutcome;
}

/// The destinations of moves: free objects of one node, to which other objects can be moved.
pub(crate) struct Destinations<'engine> {
    engine: &'engine Engine,
    node: usize,
    targets: TargetSlabs,
    /// Free objects that were allocated as destinations. The first `len` of them are not used yet.
    taken: [usize; MAX_CHUNK_OBJECTS],
    len: usize,
    /// Upper bound of the number of objects that the run still has to move.
    wanted: usize,
}

impl<'engine> Destinations<'engine> {
    fn new(engine: &'engine Engine, node: usize, targets: TargetSlabs) -> Self {
        Self { engine, node, targets, taken: [0; MAX_CHUNK_OBJECTS], len: 0, wanted: MAX_CHUNK_OBJECTS }
    }
}

/// The operations of [`Destinations`] that movers use, as a trait, so that a reference to it has only one lifetime.
pub(crate) trait DestinationSource {
    /// Allocates a free object as a destination; `None` if the slabs that may receive objects have none.
    fn take(&mut self) -> Option<usize>;

    /// Takes back a destination that no object was moved to, so that another move can use it.
    fn put_back(&mut self, object: usize);
}

impl DestinationSource for Destinations<'_> {
    fn take(&mut self) -> Option<usize> {
        if self.len == 0 {
            let wanted = self.wanted.clamp(1, MAX_CHUNK_OBJECTS);
            self.len = self.engine.take_from_slabs(self.node, self.targets, &mut self.taken[..wanted]);
            let least = match self.targets {
                TargetSlabs::InUse => Some(0),
                TargetSlabs::Fuller(least) => Some(least),
                TargetSlabs::Partial | TargetSlabs::Any => None,
            };
            if self.len == 0 && least.is_some_and(|least| self.engine.add_slab_in_used_block(self.node, least)) {
                self.len = self.engine.take_from_slabs(self.node, self.targets, &mut self.taken[..wanted]);
            }
        }
        if self.len == 0
            && self.targets == TargetSlabs::Any
            && self.engine.take_objects(self.node, 0, &mut self.taken[..1]).is_ok()
        {
            self.len = 1;
        }
        self.len = self.len.checked_sub(1)?;
        let object = self.taken[self.len];
        if let Some(next) = self.len.checked_sub(PREFETCH_DISTANCE) {
            self.engine.prefetch(self.taken[next]);
        }
        self.engine.note_allocated(object);
        self.engine.unpoison(object);
        Some(object)
    }

    fn put_back(&mut self, object: usize) {
        self.engine.note_freed(object);
        self.engine.poison(object);
        if self.len < MAX_CHUNK_OBJECTS {
            self.taken[self.len] = object;
            self.len += 1;
        } else {
            self.engine.return_objects(self.node, &[object]);
        }
    }
}

impl Drop for Destinations<'_> {
    fn drop(&mut self) {
        self.engine.return_objects(self.node, &self.taken[..self.len]);
    }
}

impl Engine {
    /// Prefetches the memory of an object that is about to be read or written.
    fn prefetch(&self, object: usize) {
        (0..self.shape.stride.min(PREFETCH_BYTES)).step_by(CACHE_LINE_BYTES).for_each(|at| mem::prefetch(object + at));
    }
}

/// Returns the panic of `first`, or else that of `other`, if any. A second panic is leaked, because its destructor may
/// panic.
fn first_panic(first: thread::Result<()>, other: thread::Result<()>) -> thread::Result<()> {
    if first.is_err() {
        std::mem::forget(other);
        return first;
    }
    other
}

/// One run of moves: empties slabs and blocks until a deadline, or until it has moved a number of objects.
pub(crate) struct MigrationRun<'engine, M: Mover> {
    engine: &'engine Engine,
    mover: &'engine M,
    pass: u32,
    /// Time at which the run ends, on the clock of `clock::fine_ns`.
    deadline_ns: u64,
    /// Number of objects that the run may still move.
    most: u64,
    pub progress: Progress,
    /// Actions that end the emptying of slabs and blocks. They are executed after a grace period.
    deferred: Vec<DeferredAction>,
    /// Set when the run has finished a slab, that is, tried to move all objects that were to be moved. Only then does
    /// the deadline end the run.
    has_finished_slab: bool,
    /// Set when the run ended before it had finished a slab. The pass continues with that slab once the slab is open
    /// again.
    pub was_stopped: bool,
    /// The first panic of a callback in this run.
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
            has_finished_slab: false,
            was_stopped: false,
            panic: None,
        }
    }

    /// Returns whether the run must stop: after a panic, at the deadline, or when it has moved enough objects.
    pub fn is_over(&self) -> bool {
        let is_late = self.has_finished_slab && clock::fine_ns() >= self.deadline_ns;
        self.panic.is_some() || self.most == 0 || is_late
    }

    /// Empties candidates of a node until no candidate is left or the run is over.
    pub fn empty_candidates(&mut self, node: usize, criteria: &Criteria) {
        while !self.is_over()
            && let Some(candidate) = self.engine.with_node(node, |node| node.claim_candidate(criteria))
        {
            match candidate {
                DefragCandidate::Slab(block, slab, most) => {
                    self.empty_slab(node, block, slab, most, (node, TargetSlabs::Partial));
                }
                DefragCandidate::Block(block, slabs, targets) => self.empty_block(node, block, slabs, targets),
            }
        }
    }

    /// Empties a claimed block: moves the objects of those slabs of the block that were claimed with it.
    pub fn empty_block(&mut self, node: usize, block: u32, slabs: SlabSet, targets: TargetSlabs) {
        for slab in slabs.iter() {
            let was_tried = self.engine.shared.blocks.slab(block, slab).tried.get() == self.pass;
            let objects = if was_tried { 0 } else { u32::MAX };
            if !self.empty_slab(node, block, slab, objects, (node, targets)) {
                self.engine.with_node(node, |node| node.blocks.block(block).tried.set(0));
            }
        }
        self.deferred.push(DeferredAction::Block { node, block });
    }

    /// Moves up to `most` objects of a claimed slab. Returns whether the slab is finished: no further object is to be
    /// moved. If not, a later run tries the slab again.
    pub fn empty_slab(&mut self, node: usize, block: u32, slab: u32, most: u32, to: (usize, TargetSlabs)) -> bool {
        let mut objects = ObjectSet::default();
        let (mut from, mut left) = (0, u64::from(most));
        let is_complete = loop {
            let chunk_most = left.min(self.most).min(MAX_CHUNK_OBJECTS as u64) as usize;
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
                    self.engine.mark_slab_lost(node, block, slab);
                    break true;
                }
            }
        };
        let is_empty = self.engine.with_node(node, |node| {
            let slab_meta = node.blocks.slab(block, slab);
            slab_meta.tried.set(if is_complete { self.pass } else { 0 });
            slab_meta.used_objects() == objects.count()
        });
        self.progress.emptied += u64::from(is_empty && objects.count() > 0);
        self.was_stopped |= !is_complete;
        self.has_finished_slab |= is_complete && most > 0;
        self.deferred.push(DeferredAction::Slab { node, block, slab, objects });
        is_complete
    }

    /// Moves up to `most` objects of a slab, beginning at object `from`. Adds the objects that left the slab to `left`.
    /// Returns how many objects were tried and how many of these stayed, or `None` if a callback panicked.
    fn move_chunk(
        &mut self,
        node: usize,
        (block, slab): (u32, u32),
        from: &mut u32,
        most: usize,
        (to, targets): (usize, TargetSlabs),
        left: &mut ObjectSet,
    ) -> Option<(usize, usize)> {
        let (engine, mover) = (self.engine, self.mover);
        let mut chunk = Chunk { objects: [0; MAX_CHUNK_OBJECTS], len: 0 };
        let mut count = 0;
        let isolated = catch_unwind(AssertUnwindSafe(|| {
            engine.with_node(node, |node| {
                let base = node.blocks.addr(block);
                node.blocks.slab(block, slab).for_each_allocated(*from, most, |object| {
                    chunk.objects[count] = base + node.shape.offset_of(slab, object);
                    count += 1;
                    *from = object + 1;
                });
                // `isolate` usually reads each object, so all are prefetched.
                chunk.objects[..count].iter().for_each(|object| mem::prefetch(*object));
                chunk.len = count;
                let _isolating = IsolatingGuard::begin();
                mover.isolate(&mut chunk)
            })
        }));
        let refused = count - chunk.len;
        let mut outcomes = [0_usize; 4];
        let moved = isolated.and_then(|mut isolated| {
            let mut destinations = Destinations::new(engine, to, targets);
            let moved = catch_unwind(AssertUnwindSafe(|| {
                for (at, object) in chunk.objects[..chunk.len].iter().enumerate() {
                    destinations.wanted = chunk.len - at;
                    if let Some(next) = chunk.objects[..chunk.len].get(at + PREFETCH_DISTANCE) {
                        engine.prefetch(*next);
                        mover.prefetch_for(*next);
                    }
                    let outcome = mover.migrate(*object, &mut destinations, &mut isolated);
                    outcomes[outcome as usize] += 1;
                    if matches!(outcome, MoveOutcome::Moved | MoveOutcome::Freed) {
                        left.add(engine.object_index(*object));
                    }
                }
            }));
            // The destructor of the isolated state is user code, too.
            let ended = catch_unwind(AssertUnwindSafe(|| drop(isolated)));
            first_panic(moved, ended)
        });
        self.count_outcomes(refused, outcomes);
        match moved {
            Ok(()) => {
                Some((count, refused + outcomes[MoveOutcome::Busy as usize] + outcomes[MoveOutcome::Failed as usize]))
            }
            Err(panic) => {
                self.panic = Some(panic);
                None
            }
        }
    }

    /// Adds the outcomes of a chunk's moves to the statistics of the cache and the progress of the run.
    fn count_outcomes(&mut self, refused: usize, outcomes: [usize; 4]) {
        let counts = &self.engine.counts;
        let [moved, freed, busy, failed] = outcomes.map(|count| count as u64);
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

    /// Ends the run: its emptied slabs become a batch that waits for readers. If a callback panicked, resumes the
    /// panic.
    pub fn end(self) -> Progress {
        stats::add(Counter::SlabEmptied, self.progress.emptied);
        self.engine.counts.emptied.fetch_add(self.progress.emptied, Relaxed);
        if self.progress.moved > 0 {
            let cache = (self.engine.cache_id as u64, self.progress.emptied);
            trace::event_with_packed_values(Event::SlabMoved, [(self.progress.moved, 0), cache]);
        }
        self.engine.retire(self.deferred);
        if let Some(panic) = self.panic {
            resume_unwind(panic);
        }
        self.progress
    }
}
