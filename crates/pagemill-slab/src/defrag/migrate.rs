//! Emptying slabs: moves the objects of a slab to free objects elsewhere, in chunks.
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
use crate::alloc::meta::{Objects, SlabSet};
use crate::alloc::node::TargetSlabs;
use crate::defrag::candidates::{Criteria, DefragCandidate};
use crate::defrag::drain::DrainGuard;
use crate::defrag::isolating::Isolating;
use crate::defrag::passes::Progress;
use crate::read::batch::Deferred;
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::Relaxed;
use pagemill_sys::{clock, mem};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;

/// Number of objects that one call of `isolate` gets. The number bounds how long an allocation waits for the node's
/// lock.
const CHUNK_OBJECTS: usize = 64;

/// Prefetch distance in moves. Objects to move and their destinations are spread over a slab. Without prefetching, the
/// processor would fetch one object at a time, because each move ends with an atomic exchange that stalls it.
const PREFETCH_DISTANCE: usize = 4;

/// Maximum number of bytes of an object that are prefetched.
const PREFETCH_BYTES: usize = 256;

/// Bytes of a cache line of the processor.
const CACHE_LINE: usize = 64;

/// Addresses of objects of one slab that may be moved.
pub(crate) struct Chunk {
    pub objects: [usize; CHUNK_OBJECTS],
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

/// Outcome of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MoveOutcome {
    /// The object was moved.
    Moved,
    /// The owner freed the object instead of moving it.
    Freed,
    /// The object was not moved, because it is in use.
    Busy,
    /// The object was not moved, because there was no destination or the owner could not move the object.
    Failed,
}

/// Moves the objects of one kind of cache. [`MigrationRun`] decides which objects are moved.
pub(crate) trait Mover {
    /// State that `isolate` returns for `migrate`.
    type Isolated;

    /// Removes objects that must not be moved from the chunk. Runs under the lock of the node, so it must not call the
    /// cache.
    fn isolate(&self, chunk: &mut Chunk) -> Self::Isolated;

    /// Prefetches memory that [`Mover::migrate`] will need for this object, apart from the object itself. Called some
    /// moves ahead.
    fn prefetch_for(&self, _object: usize) {}

    /// Empties the stocks of threads, while magazines are drained.
    fn collect_stocks(&self, _drained: &DrainGuard<'_>) {}

    /// Moves an object to a destination from `to`.
    fn migrate(&self, object: usize, to: &mut Destinations<'_>, isolated: &mut Self::Isolated) -> MoveOutcome;
}

/// Destinations: free objects of one node, to which other objects can be moved.
pub(crate) struct Destinations<'engine> {
    engine: &'engine Engine,
    node: usize,
    targets: TargetSlabs,
    /// Free objects that are allocated as destinations. The first `len` are not used yet.
    taken: [usize; CHUNK_OBJECTS],
    len: usize,
    /// Upper bound of the number of objects that are still to be moved.
    wanted: usize,
}

impl<'engine> Destinations<'engine> {
    fn new(engine: &'engine Engine, node: usize, targets: TargetSlabs) -> Self {
        Self { engine, node, targets, taken: [0; CHUNK_OBJECTS], len: 0, wanted: CHUNK_OBJECTS }
    }

    /// Allocates a destination.
    pub fn take(&mut self) -> Option<usize> {
        if self.len == 0 {
            let wanted = self.wanted.clamp(1, CHUNK_OBJECTS);
            self.len = self.engine.take_from_slabs(self.node, self.targets, &mut self.taken[..wanted]);
            let least = match self.targets {
                TargetSlabs::InUse => Some(0),
                TargetSlabs::Fuller(least) => Some(least),
                TargetSlabs::Partial | TargetSlabs::Any => None,
            };
            if self.len == 0 && least.is_some_and(|least| self.engine.add_slab_in_use(self.node, least)) {
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

    /// Makes a destination that was not used available again.
    pub fn put(&mut self, object: usize) {
        self.engine.note_freed(object);
        self.engine.poison(object);
        if self.len < CHUNK_OBJECTS {
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
    /// Prefetches an object that is about to be read or written.
    fn prefetch(&self, object: usize) {
        (0..self.shape.stride.min(PREFETCH_BYTES)).step_by(CACHE_LINE).for_each(|at| mem::prefetch(object + at));
    }
}

/// Returns the first of two panics. The other is leaked, because its destructor may panic.
fn first_panic(first: thread::Result<()>, other: thread::Result<()>) -> thread::Result<()> {
    if first.is_err() {
        std::mem::forget(other);
        return first;
    }
    other
}

/// One run of moves: empties slabs and blocks until its deadline or its number of moves is reached.
pub(crate) struct MigrationRun<'engine, M: Mover> {
    engine: &'engine Engine,
    mover: &'engine M,
    pass: u32,
    /// Time at which the run ends, on the fine clock.
    deadline_ns: u64,
    /// Number of objects that the run may still move.
    most: u64,
    pub progress: Progress,
    /// The slabs and blocks that this run emptied.
    deferred: Vec<Deferred>,
    /// Whether a slab was finished. The first slab of a step is finished regardless of the deadline, so that each step
    /// makes progress.
    has_finished_slab: bool,
    /// Set when a slab was emptied partly: the pass continues with that slab once the slab is open again.
    pub was_stopped: bool,
    /// The first panic of a callback.
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

    /// Empties candidates of a node until none is left or the run is over.
    pub fn empty_candidates(&mut self, node: usize, criteria: &Criteria) {
        while !self.is_over()
            && let Some(candidate) = self.engine.with_node(node, |node| node.claim_candidate(criteria))
        {
            match candidate {
                DefragCandidate::Slab(block, slab, most) => {
                    self.empty_slab(node, block, slab, most, (node, TargetSlabs::Partial));
                }
                DefragCandidate::Block(block, slabs, targets) => {
                    self.empty_block(node, block, slabs, (criteria.pass, targets))
                }
            }
        }
    }

    /// Empties a claimed block: moves the objects of the slabs that were claimed with it.
    pub fn empty_block(&mut self, node: usize, block: u32, slabs: SlabSet, (pass, targets): (u32, TargetSlabs)) {
        for slab in slabs.iter() {
            let was_tried = self.engine.shared.blocks.slab(block, slab).tried.get() == pass;
            let objects = if was_tried { 0 } else { u32::MAX };
            if !self.empty_slab(node, block, slab, objects, (node, targets)) {
                self.engine.with_node(node, |node| node.blocks.block(block).tried.set(0));
            }
        }
        self.deferred.push(Deferred::Block { node, block });
    }

    /// Moves up to `most` objects of a claimed slab. Returns whether all objects were tried. If not, the slab is tried
    /// again later.
    pub fn empty_slab(&mut self, node: usize, block: u32, slab: u32, most: u32, to: (usize, TargetSlabs)) -> bool {
        let mut objects = Objects::default();
        let (mut from, mut left) = (0, u64::from(most));
        let is_complete = loop {
            let chunk_most = left.min(self.most).min(CHUNK_OBJECTS as u64) as usize;
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
        self.deferred.push(Deferred::Slab { node, block, slab, objects });
        is_complete
    }

    /// Moves up to `most` objects of a slab, beginning at `from`. Adds the objects that left the slab to `left`.
    /// Returns the number of objects that were tried and the number of those that stayed, or `None` if a callback
    /// panicked.
    fn move_chunk(
        &mut self,
        node: usize,
        (block, slab): (u32, u32),
        from: &mut u32,
        most: usize,
        (to, targets): (usize, TargetSlabs),
        left: &mut Objects,
    ) -> Option<(usize, usize)> {
        let (engine, mover) = (self.engine, self.mover);
        let mut chunk = Chunk { objects: [0; CHUNK_OBJECTS], len: 0 };
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
                let _isolating = Isolating::begin();
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
        self.count(refused, outcomes);
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

    /// Adds the outcomes of a chunk to the statistics and the progress of the run.
    fn count(&mut self, refused: usize, outcomes: [usize; 4]) {
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

    /// Ends the run: emptied slabs become a batch that waits for readers. If a callback panicked, resumes the panic.
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
