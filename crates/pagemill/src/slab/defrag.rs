//! Moving objects: out of the emptiest blocks and slabs into the fullest, or from node to node.
//!
//! A step claims a block (else a slab), takes some of its objects at a time, lets their mover choose (`isolate`, under the lock
//! of the node), and moves each (`migrate`, without any lock). What was left waits for readers ([`super::batch`]).
//!
//! ```text
//!   open --claim--> claimed --isolate, migrate ... --> claimed, in a batch --readers gone--> open, or its memory back
//!                      `------- a callback panics ---> lost
//! ```

use super::batch::Left;
use super::engine::Engine;
use super::meta::Objects;
use super::node::{Room, Search, Source};
use super::seize::Seized;
use crate::error::{Error, Result};
use crate::stats::{self, Counter};
use crate::sync::{Patience, Relaxed};
use crate::xarray;
use pagemill_sys::clock;
use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Duration;

/// Objects that are isolated at once: what an allocation may have to wait for.
const CHUNK: usize = 64;

/// Who needs memory at once waits so long for readers.
const MOMENT_NS: u64 = 5_000_000;

/// All that is not full is worth emptying.
const ALL: u32 = 101;

/// A cache where a pass freed nothing is left alone until this part of its objects has come or gone.
const CHANGE_DIVISOR: u64 = 64;

/// A long defragmentation lets others have their magazines back so often.
const SLICE: Duration = Duration::from_millis(10);

/// Objects of one slab that may be moved.
pub(super) struct Chunk {
    pub objects: [usize; CHUNK],
    pub len: usize,
}

/// What became of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It is elsewhere.
    Moved,
    /// Its owner freed it instead.
    Freed,
    /// It stays: somebody uses it.
    Busy,
    /// It stays: there was no place, or it could not be moved.
    Failed,
}

/// Who knows how to move the objects of a cache.
pub(super) trait Mover {
    /// What `isolate` tells `migrate`.
    type Isolated;

    /// Leaves those in that will be moved. Under the lock of the node: no call of the cache.
    fn isolate(&self, chunk: &mut Chunk) -> Self::Isolated;

    /// Moves one of them to a place of `to`.
    fn migrate(&self, object: usize, to: &mut Places<'_>, isolated: &mut Self::Isolated) -> Fate;
}

/// Places that objects may be moved to, of one node.
pub(super) struct Places<'engine> {
    engine: &'engine Engine,
    node: usize,
    room: Room,
    taken: [usize; CHUNK],
    len: usize,
    /// Objects that are still to be moved, at most.
    wanted: usize,
}

impl<'engine> Places<'engine> {
    fn new(engine: &'engine Engine, node: usize, room: Room) -> Self {
        Self { engine, node, room, taken: [0; CHUNK], len: 0, wanted: CHUNK }
    }

    /// A place that is nobody else's.
    pub fn take(&mut self) -> Option<usize> {
        if self.len == 0 {
            let wanted = self.wanted.clamp(1, CHUNK);
            self.len = self.engine.take_present(self.node, self.room, &mut self.taken[..wanted]);
        }
        if self.len == 0 && self.room == Room::Any && self.engine.take(self.node, 0, &mut self.taken[..1]).is_ok() {
            self.len = 1;
        }
        self.len = self.len.checked_sub(1)?;
        let object = self.taken[self.len];
        self.engine.note_taken(object);
        Some(object)
    }

    /// Takes back a place that was not used.
    pub fn put(&mut self, object: usize) {
        if let Some(checks) = &self.engine.checks {
            checks.note_given(object);
        }
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

thread_local! {
    static IS_ISOLATING: Cell<bool> = const { Cell::new(false) };
}

/// Refuses calls from inside of `isolate`: they would wait for the lock that its caller holds.
pub(super) fn assert_not_isolating() {
    // Under shuttle all threads are one.
    #[cfg(not(shuttle))]
    assert!(!IS_ISOLATING.get(), "a slab cache is called while its slab is locked for `isolate`");
}

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

/// What a defragmentation did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Objects that were moved, or freed by their owner instead.
    pub moved: u64,
    /// Objects that stayed where they were.
    pub stayed: u64,
    /// Slabs that were emptied.
    pub emptied: u64,
    /// Whether the pass over all that is worth emptying has come to its end. What it left may be worth another.
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

/// A step under way.
struct Run<'engine, M: Mover> {
    engine: &'engine Engine,
    mover: &'engine M,
    pass: u32,
    deadline_ns: u64,
    /// Objects that may still be moved.
    most: u64,
    progress: Progress,
    left: Vec<Left>,
    /// One slab is tried whatever the clock says, so that each step comes nearer to the end.
    has_tried: bool,
    /// A slab was left in the midst: there is more to do when it is back.
    was_stopped: bool,
    panic: Option<Box<dyn Any + Send>>,
}

impl<'engine, M: Mover> Run<'engine, M> {
    fn new(engine: &'engine Engine, mover: &'engine M, pass: u32, deadline_ns: u64, most: u64) -> Self {
        Self {
            engine,
            mover,
            pass,
            deadline_ns,
            most,
            progress: Progress::default(),
            left: Vec::new(),
            has_tried: false,
            was_stopped: false,
            panic: None,
        }
    }

    fn is_over(&self) -> bool {
        let is_late = self.has_tried && clock::fine_ns() >= self.deadline_ns;
        self.panic.is_some() || self.most == 0 || is_late
    }

    /// Empties what is found on a node.
    fn compact(&mut self, node: usize, search: &Search) {
        while !self.is_over()
            && let Some(source) = self.engine.on(node, |node| node.claim_source(search))
        {
            match source {
                Source::Slab(block, slab, most) => {
                    self.empty_slab(node, block, slab, most, (node, Room::Partial));
                }
                Source::Block(block) => {
                    let slabs = self.engine.on(node, |node| node.claimed_slabs(block, search.pass));
                    for (slab, was_tried) in slabs {
                        let (objects, to) = (if was_tried { 0 } else { u32::MAX }, (node, Room::Used));
                        if !self.empty_slab(node, block, slab, objects, to) {
                            self.engine.on(node, |node| node.blocks.block(block).tried.set(0));
                        }
                    }
                    self.left.push(Left::Block { node, block });
                }
            }
        }
    }

    /// Moves objects of a claimed slab; says whether all were tried. One that was not is tried again.
    fn empty_slab(&mut self, node: usize, block: u32, slab: u32, most: u32, to: (usize, Room)) -> bool {
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
        self.left.push(Left::Slab { node, block, slab, objects });
        is_whole
    }

    /// Moves up to `most` objects of a slab from `from` on. Says how many there were and how many of them stayed; `None` if a
    /// callback panicked.
    fn move_chunk(
        &mut self,
        node: usize,
        (block, slab): (u32, u32),
        from: &mut u32,
        most: usize,
        (to, room): (usize, Room),
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
                chunk.len = count;
                let _isolating = Isolating::begin();
                mover.isolate(&mut chunk)
            })
        }));
        let refused = count - chunk.len;
        let mut fates = [0_usize; 4];
        let moved = isolated.and_then(|mut isolated| {
            let mut places = Places::new(engine, to, room);
            catch_unwind(AssertUnwindSafe(|| {
                for (at, object) in chunk.objects[..chunk.len].iter().enumerate() {
                    places.wanted = chunk.len - at;
                    let fate = mover.migrate(*object, &mut places, &mut isolated);
                    fates[fate as usize] += 1;
                    if matches!(fate, Fate::Moved | Fate::Freed) {
                        left.add(engine.place_of(*object));
                    }
                }
            }))
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

    /// Leaves what was emptied to wait for readers; goes on with a panic of a callback.
    fn end(self) -> Progress {
        stats::add(Counter::SlabEmptied, self.progress.emptied);
        self.engine.counts.emptied.fetch_add(self.progress.emptied, Relaxed);
        self.engine.retire(self.left);
        if let Some(panic) = self.panic {
            resume_unwind(panic);
        }
        self.progress
    }
}

/// Empties what is in use by less than the cache's ratio, for so long at most. When a pass over all has freed nothing there
/// is no other before the number of objects has changed.
///
/// # Errors
///
/// [`Error::Busy`] if somebody else empties the cache.
pub(super) fn step(engine: &Engine, mover: &impl Mover, budget: Duration) -> Result<Progress> {
    assert_not_isolating();
    engine.check()?;
    engine.settle();
    let percent = engine.used_ratio.load(Relaxed);
    let used = engine.used();
    let rested = engine.rest_at.load(Relaxed);
    if percent == 0 || used.abs_diff(rested) <= rested / CHANGE_DIVISOR {
        return Ok(Progress { is_done: true, ..Progress::default() });
    }
    let pass = engine.pass.load(Relaxed);
    let seized = engine.try_seize().ok_or(Error::Busy { what: "another thread empties this slab cache" })?;
    let progress = slice(engine, seized, mover, &Search { percent, pass, round: Some(pass) }, budget);
    if progress.is_done {
        engine.next_pass();
        let footprint = engine.footprint();
        let has_gained = engine.footprint_before.swap(footprint, Relaxed) > footprint;
        engine.rest_at.store(if has_gained || progress.emptied > 0 { u64::MAX } else { used }, Relaxed);
    }
    (0..engine.node_count()).for_each(|node| _ = engine.trim(node, true));
    Ok(progress)
}

/// A part of a pass, which goes on with the next.
fn slice(engine: &Engine, seized: Seized<'_>, mover: &impl Mover, search: &Search, budget: Duration) -> Progress {
    let deadline_ns = clock::fine_ns().saturating_add(budget.as_nanos().min(u128::from(u64::MAX)) as u64);
    engine.settle();
    let mut run = Run::new(engine, mover, search.pass, deadline_ns, u64::MAX);
    (0..engine.node_count()).for_each(|node| run.compact(node, search));
    run.progress.is_done = !run.is_over() && !run.was_stopped;
    drop(seized);
    run.end()
}

/// Packs what can be packed in a moment, for who needs memory, and may be in the midst of anything. What readers are still at
/// comes back with a later call.
pub(super) fn pack(engine: &Engine, mover: &impl Mover) {
    if let Some(seized) = engine.try_seize() {
        let pass = engine.next_pass();
        let search = Search { percent: ALL, pass, round: Some(pass) };
        slice(engine, seized, mover, &search, SLICE);
        let mut patience = Patience::new();
        while engine.has_batches() && patience.waited_ns() < MOMENT_NS {
            // With nobody reading a few of these do.
            xarray::pin().flush();
            patience.pause();
            engine.settle();
        }
    }
}

/// Packs all objects into as few slabs and blocks as can be, and gives the rest back. Returns the bytes that are no longer
/// charged for the cache's blocks.
///
/// # Errors
///
/// As [`Engine::seize`].
pub(super) fn shrink(engine: &Engine, mover: &impl Mover) -> Result<u64> {
    assert_not_isolating();
    let before = engine.resident_bytes();
    drop(engine.seize()?);
    engine.settle_all()?;
    let round = engine.next_pass();
    // Blocks first; then what is left of them in as few slabs as can be.
    for round in [Some(round), None] {
        loop {
            let footprint = engine.footprint();
            let search = Search { percent: ALL, pass: engine.next_pass(), round };
            let mut was_stopped = false;
            let is_settled = loop {
                let is_done = slice(engine, engine.seize()?, mover, &search, SLICE).is_done;
                was_stopped |= !is_done;
                if is_done {
                    let is_settled = engine.settle_all()?;
                    // What was left in the midst is back, and gone on with: slabs that were tried are not tried again.
                    if !was_stopped || !is_settled {
                        break is_settled;
                    }
                    was_stopped = false;
                }
            };
            if !is_settled || engine.footprint() >= footprint {
                break;
            }
        }
    }
    engine.shrink()?;
    Ok(before.saturating_sub(engine.resident_bytes()))
}

/// Moves up to `most` objects from one node to another.
///
/// # Errors
///
/// [`crate::Error::BadNode`]; as [`Engine::seize`].
pub(super) fn move_objects(engine: &Engine, mover: &impl Mover, from: usize, to: usize, most: u64) -> Result<Progress> {
    assert_not_isolating();
    [from, to].into_iter().try_for_each(|node| engine.check_node(node))?;
    let mut whole = Progress { is_done: true, ..Progress::default() };
    let pass = engine.next_pass();
    while from != to && whole.moved < most {
        engine.settle();
        let seized = engine.seize()?;
        let deadline_ns = clock::fine_ns() + SLICE.as_nanos() as u64;
        let mut run = Run::new(engine, mover, pass, deadline_ns, most - whole.moved);
        let mut has_more = true;
        while !run.is_over() && has_more {
            match engine.on(from, |node| node.claim_next(pass)) {
                None => has_more = false,
                Some((block, slab)) => {
                    run.empty_slab(from, block, slab, u32::MAX, (to, Room::Any));
                }
            }
        }
        drop(seized);
        let was_stopped = run.was_stopped;
        let part = run.end();
        whole.add(&Progress { is_done: true, ..part });
        // A slab that was left in the midst can be gone on with when it is back.
        if !has_more && !was_stopped || was_stopped && !engine.settle_all()? {
            break;
        }
    }
    engine.settle_all()?;
    (0..engine.node_count()).for_each(|node| _ = engine.trim(node, true));
    Ok(whole)
}

/// Moves what nodes have more than their share to those that have less.
///
/// # Errors
///
/// As [`Engine::seize`].
pub(super) fn balance(engine: &Engine, mover: &impl Mover) -> Result<Progress> {
    assert_not_isolating();
    drop(engine.seize()?);
    let nodes = engine.node_count();
    let mut used: Vec<u64> = (0..nodes).map(|node| engine.on(node, |node| node.tally().used)).collect();
    let share = used.iter().sum::<u64>().div_ceil(nodes as u64);
    let mut whole = Progress { is_done: true, ..Progress::default() };
    for from in 0..nodes {
        for to in 0..nodes {
            let most = used[from].saturating_sub(share).min(share.saturating_sub(used[to]));
            if most == 0 {
                continue;
            }
            let part = move_objects(engine, mover, from, to, most)?;
            used[from] -= part.moved;
            used[to] += part.moved;
            whole.add(&part);
        }
    }
    Ok(whole)
}
