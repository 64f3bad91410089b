//! The engine: allocation and freeing of objects of one size, shared by all kinds of caches.
//!
//! ```text
//!   thread   magazine: two sheaves, no lock
//!              | a sheaf at a time
//!   node     barns: full sheaves         under the lock of one of them
//!              | object by object
//!   node     slabs, fullest first
//!              | slab by slab, block by block
//!   all      blocks (`blocks`), charged by the arena
//! ```
//!
//! `supply` sets slabs up and frees them. Lock order: `emptying`, then the state (`NodeState`) of one node, then the
//! free blocks.
#![allow(unsafe_code)] // the contract of freeing an object

use super::barn::{BARNS, Barn};
use super::batch::{Batch, Grace};
use super::debug::Checks;
use super::defrag::{Passes, is_worth_it};
use super::handles::Handles;
use super::magazine::{Magazine, MagazineGuard, Magazines};
use super::migrate::assert_not_isolating;
use super::node::{Keep, Node, NodeState, TargetRoom};
use super::poison;
use super::shape::{MAX_SHEAF, Shape};
use super::thread_slots::{MAX_THREADS, WORD_BITS, find_slot, own_offset, own_slot};
use super::worker::ShrinkRequest;
use super::{Settings, SharedState};
use pagemill_core::error::{Error, Result};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{AtomicU64, Guarded, Lock, Padded, Relaxed, Release};
use std::alloc::Layout;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32};

/// A step prime to 100: a hundred draws yield each number once.
const DRAW_STEP: u32 = 37;
const PERCENT: u32 = 100;

/// Called for each object of a slab before any of them is allocated.
pub(super) type SetUp = Box<dyn Fn(usize) + Send + Sync>;

/// Layout and initialization of an object.
pub(super) struct Object {
    pub layout: Layout,
    /// The part of `layout` that the cache's user knows.
    pub user_bytes: usize,
    /// The bytes that are not accessed while the object is free.
    pub closed: Range<usize>,
    pub set_up: Option<SetUp>,
    pub is_movable: bool,
    /// Begins a grace period for readers of objects.
    pub grace: fn() -> Grace,
    /// The handle table, which also holds what threads keep beside their magazines.
    pub handles: Option<&'static Handles>,
}

/// # Errors
///
/// [`Error::BadRatio`] beyond 100.
fn check_ratio(percent: u32) -> Result<()> {
    if percent <= PERCENT { Ok(()) } else { Err(Error::BadRatio { percent }) }
}

/// # Invariants
///
/// The memory of an allocated object stays until it is freed. Objects of open slabs have been set up.
pub(super) struct Engine {
    pub shared: &'static SharedState,
    pub name: Arc<str>,
    /// The percentages of [`Settings`], which can be changed.
    pub used_ratio: AtomicU32,
    pub remote_ratio: AtomicU32,
    /// Bytes of an object as the user defined it.
    pub object_bytes: usize,
    pub shape: Shape,
    /// The cache id within `shared`.
    pub number: usize,
    generation: u16,
    /// The magazines, by thread slot. None is opened in debug mode.
    pub magazines: Magazines,
    handles: Option<&'static Handles>,
    has_one_node: bool,
    nodes: Box<[Padded<Guarded<NodeState>>]>,
    barns: Box<[Padded<Barn>]>,
    /// For each node, whether a block was filled completely: the next one may be whole.
    pub has_filled: Box<[AtomicBool]>,
    pub set_up: Option<SetUp>,
    pub checks: Option<Checks>,
    /// One bit for each thread slot that has opened a magazine; empty in debug mode. Changed under `emptying`.
    pub users: Box<[AtomicU64]>,
    /// Held by the one thread that drains magazines or empties slabs.
    pub emptying: Lock,
    /// Magazines are being drained and out of use.
    pub is_draining: AtomicBool,
    draws: AtomicU32,
    /// Batches of emptied slabs that wait for readers.
    pub batches: Guarded<VecDeque<Batch>>,
    pub passes: Passes,
    pub is_movable: bool,
    closed: Range<usize>,
    pub grace: fn() -> Grace,
    /// A callback panicked in the background, which ignores the cache since.
    pub has_failed: AtomicBool,
    pub request: Guarded<ShrinkRequest>,
    /// The user has dropped it: commands are not carried out any more.
    pub is_withdrawn: AtomicBool,
    pub counts: Counts,
}

/// Counts of moved objects by result, and of emptied slabs.
#[derive(Default)]
pub(super) struct Counts {
    pub moved: AtomicU64,
    pub freed: AtomicU64,
    pub busy: AtomicU64,
    pub failed: AtomicU64,
    pub refused: AtomicU64,
    pub emptied: AtomicU64,
    pub from_remote: AtomicU64,
}

impl Engine {
    /// Sets the used ratio. In any case the background tries a cache again that it had given up.
    ///
    /// # Errors
    ///
    /// [`Error::BadRatio`] beyond 100.
    pub fn set_used_ratio(&self, percent: u32) -> Result<()> {
        self.check()?;
        check_ratio(percent)?;
        let is_raised = self.used_ratio.swap(percent, Relaxed) < percent;
        if is_raised {
            self.passes.wake();
        }
        if self.has_failed.swap(false, Relaxed) || is_raised {
            self.ring_if_worth_it();
        }
        Ok(())
    }

    /// Records a shrink that succeeded, including all callbacks. The background resumes a cache that it had given up.
    pub fn note_shrunk(&self) {
        if self.has_failed.swap(false, Relaxed) {
            self.ring_if_worth_it();
        }
    }

    fn ring_if_worth_it(&self) {
        if self.is_movable && is_worth_it(self) {
            self.shared.slabs.worker.notify();
        }
    }

    /// # Errors
    ///
    /// [`Error::BadRatio`] beyond 100.
    pub fn set_remote_ratio(&self, percent: u32) -> Result<()> {
        check_ratio(percent)?;
        self.remote_ratio.store(percent, Relaxed);
        Ok(())
    }

    /// Creates an engine with an unused cache id.
    ///
    /// # Errors
    ///
    /// [`Error::BadRatio`], and those of [`Shape::new`].
    pub fn new(shared: &'static SharedState, number: usize, settings: Settings, object: Object) -> Result<Self> {
        let nodes = shared.blocks.arena.nodes.count();
        let Object { layout, user_bytes, closed, set_up, is_movable, grace, handles } = object;
        [settings.defrag_used_ratio, settings.remote_node_defrag_ratio].into_iter().try_for_each(check_ratio)?;
        let checks = settings.debug.then(|| Checks::new(&settings.name, layout.size(), set_up.is_some()));
        // Debug mode checks free objects by itself.
        let closed = if checks.is_some() { 0..0 } else { closed };
        let trailer = checks.as_ref().map_or(0, |_| Checks::TRAILER_BYTES);
        let bytes =
            if trailer > 0 { layout.size().next_multiple_of(size_of::<u64>()) + trailer } else { layout.size() };
        let shape = Shape::new(bytes, layout.align(), settings.slab_bytes)?;
        let barn = |at| Padded(Barn::new(shared.barn_memory, number * nodes * BARNS + at, shape.sheaf));
        let user_words = if checks.is_some() { 0 } else { MAX_THREADS / WORD_BITS };
        stats::add(Counter::SlabCaches, 1);
        Ok(Self {
            shared,
            number,
            used_ratio: AtomicU32::new(settings.defrag_used_ratio),
            remote_ratio: AtomicU32::new(settings.remote_node_defrag_ratio),
            name: settings.name.into(),
            object_bytes: user_bytes,
            generation: shared.blocks.arena.generation(),
            magazines: Magazines::new(shared.range(number), shared.barriers),
            handles,
            has_one_node: nodes == 1,
            nodes: (0..nodes).map(|_| Padded(Guarded::new(NodeState::new()))).collect(),
            barns: (0..nodes * BARNS).map(barn).collect(),
            has_filled: (0..nodes).map(|_| AtomicBool::new(false)).collect(),
            set_up,
            checks,
            users: (0..user_words).map(|_| AtomicU64::new(0)).collect(),
            emptying: Lock::new(),
            is_draining: AtomicBool::new(false),
            draws: AtomicU32::new(0),
            batches: Guarded::new(VecDeque::new()),
            passes: Passes::new(),
            is_movable,
            closed,
            grace,
            has_failed: AtomicBool::new(false),
            request: Guarded::new(ShrinkRequest::None),
            is_withdrawn: AtomicBool::new(false),
            counts: Counts::default(),
            shape,
        })
    }

    pub fn node_count(&self) -> usize {
        self.nodes.len()
    }

    /// Fails in a fork child of the process that created the cache: threads that hold its locks do not exist there.
    ///
    /// # Errors
    ///
    /// [`Error::WrongState`].
    #[inline]
    pub fn check(&self) -> Result<()> {
        if self.generation == self.shared.blocks.arena.generation() { Ok(()) } else { Self::refuse() }
    }

    #[cold]
    fn refuse() -> Result<()> {
        Err(Error::WrongState { what: "a slab cache of the parent process: a fork child has to make its own" })
    }

    /// Calls `act` with the state of a node, under its lock.
    pub fn on<R>(&self, node: usize, act: impl FnOnce(&mut Node<'_>) -> R) -> R {
        let (shape, blocks) = (&self.shape, &self.shared.blocks);
        self.nodes[node].0.with(|state| act(&mut Node { shape, blocks, state }))
    }

    /// As [`Engine::on`], unless the lock is taken.
    pub fn try_on<R>(&self, node: usize, act: impl FnOnce(&mut Node<'_>) -> R) -> Option<R> {
        let (shape, blocks) = (&self.shape, &self.shared.blocks);
        self.nodes[node].0.try_with(|state| act(&mut Node { shape, blocks, state }))
    }

    /// Enters the magazine of this thread.
    #[inline(always)]
    fn enter(&self) -> Option<MagazineGuard<'_>> {
        self.magazines.enter(own_offset())
    }

    /// Allocates an object, mostly from the thread's magazine.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`], [`Error::NoAddresses`], [`Error::System`]; [`Error::WrongState`] in a fork child.
    #[inline]
    #[track_caller]
    pub fn allocate(&self) -> Result<usize> {
        let object = match self.enter().and_then(MagazineGuard::pop) {
            Some(object) => object,
            None => self.allocate_slowly()?,
        };
        self.open_free(object);
        Ok(object)
    }

    /// Frees an object.
    ///
    /// # Safety
    ///
    /// It was allocated from this cache, no reference to it exists, and its contents are as after set-up.
    #[inline]
    #[track_caller]
    pub unsafe fn free(&self, object: usize) {
        self.close_free(object);
        let is_in = self.enter().is_some_and(|magazine| self.is_of(&magazine, object) && magazine.push(object));
        if !is_in {
            self.free_slowly(object);
        }
    }

    /// Allocates an object together with a result of `beside`, which takes something that this thread slot keeps beside
    /// its magazine, and must not panic. Both, or neither if one is not available.
    #[inline(always)]
    pub fn allocate_with<R>(&self, beside: impl FnOnce(usize) -> Option<R>) -> Option<(usize, R)> {
        let found = self.enter()?.pop_with(|| beside(own_slot() as usize))?;
        self.open_free(found.0);
        Some(found)
    }

    /// Frees objects, about a sheaf at most.
    ///
    /// # Safety
    ///
    /// As [`Engine::free`], of each.
    pub unsafe fn free_all(&self, objects: &[u64]) {
        let mut rest = 0;
        if self.has_one_node {
            objects.iter().for_each(|object| self.close_free(*object as usize));
            rest = self.fill(objects.iter().map(|object| *object as usize), 0);
            if rest < objects.len() {
                let mut sheaf = [0; MAX_SHEAF];
                let count = self.drain(&mut sheaf[..self.shape.sheaf]);
                self.put_back(0, &sheaf[..count]);
                rest += self.fill(objects[rest..].iter().map(|object| *object as usize), 0);
            }
        }
        // SAFETY: the caller's promise, for the objects that did not fit into the magazine.
        objects[rest..].iter().for_each(|object| unsafe { self.free(*object as usize) });
    }

    /// Calls `act`, which must not panic, with the thread slot, inside of its magazine. `None` if the magazine is not
    /// open.
    #[inline(always)]
    pub fn beside_magazine<R>(&self, act: impl FnOnce(usize) -> R) -> Option<R> {
        self.enter()?.act(|| act(own_slot() as usize))
    }

    /// [`MagazineGuard::fill`] on the thread's magazine.
    fn fill(&self, objects: impl ExactSizeIterator<Item = usize>, node: usize) -> usize {
        self.enter().map_or(0, |magazine| magazine.fill(objects, node))
    }

    /// [`MagazineGuard::drain`] on the thread's magazine.
    fn drain(&self, sheaf: &mut [usize]) -> usize {
        self.enter().map_or(0, |magazine| magazine.drain(sheaf))
    }

    #[inline(always)]
    fn is_of(&self, magazine: &Magazine, object: usize) -> bool {
        self.has_one_node || magazine.node() == self.node_of(object)
    }

    /// The node of an object's memory.
    pub fn node_of(&self, object: usize) -> usize {
        self.shared.blocks.node_of(self.shared.blocks.number_of(object))
    }

    /// The index of an object in its slab.
    pub fn place_of(&self, object: usize) -> u32 {
        let blocks = &self.shared.blocks;
        self.shape.place_of(object - blocks.addr(blocks.number_of(object))).1
    }

    /// Opens and returns the thread's magazine; `None` while magazines are drained.
    fn open_magazine(&self) -> Option<&Magazine> {
        if self.is_draining.load(Relaxed) {
            return None;
        }
        let number = find_slot() as usize;
        let (word, bit) = (self.users.get(number / WORD_BITS)?, 1 << (number % WORD_BITS));
        if word.load(Relaxed) & bit == 0 {
            let _emptying = self.emptying.try_lock()?;
            let has_stock = self.handles.is_none_or(|handles| handles.reach(number));
            let has_room = has_stock && self.magazines.reach(number);
            let magazine = has_room.then(|| self.enter()).flatten()?;
            magazine.open(2 * self.shape.sheaf);
            word.fetch_or(bit, Release);
        }
        Some(self.magazines.get(number))
    }

    #[cold]
    #[inline(never)]
    #[track_caller]
    fn allocate_slowly(&self) -> Result<usize> {
        assert_not_isolating();
        self.check()?;
        let has_magazine = self.open_magazine().is_some();
        let mut taken = [0; MAX_SHEAF];
        let most = if has_magazine { self.shape.sheaf } else { 1 };
        let node = self.shared.blocks.arena.current_node();
        let (node, count) = self.take(node, self.remote_ratio.load(Relaxed), &mut taken[..most])?;
        let object = taken[count - 1];
        if has_magazine {
            let rest = &taken[..count - 1];
            let kept = self.fill(rest.iter().copied(), node);
            self.put_back(node, &rest[kept..]);
        }
        self.note_taken(object);
        Ok(object)
    }

    /// Allocates one object from the memory of a node.
    ///
    /// # Errors
    ///
    /// As [`Engine::allocate`]; [`Error::BadNode`].
    #[track_caller]
    pub fn allocate_on(&self, node: usize) -> Result<usize> {
        assert_not_isolating();
        self.check()?;
        self.check_node(node)?;
        let mut taken = [0];
        self.take(node, 0, &mut taken)?;
        self.note_taken(taken[0]);
        self.open_free(taken[0]);
        Ok(taken[0])
    }

    /// Unpoisons an object that is about to be used.
    #[inline(always)]
    pub fn open_free(&self, object: usize) {
        poison::open(object + self.closed.start, self.closed.len());
    }

    /// Poisons an object that is free.
    #[inline(always)]
    pub fn close_free(&self, object: usize) {
        poison::close(object + self.closed.start, self.closed.len());
    }

    /// # Errors
    ///
    /// [`Error::BadNode`].
    pub fn check_node(&self, node: usize) -> Result<()> {
        let nodes = self.node_count();
        if node < nodes { Ok(()) } else { Err(Error::BadNode { node, nodes }) }
    }

    #[track_caller]
    pub fn note_taken(&self, object: usize) {
        if let Some(checks) = &self.checks {
            checks.note_taken(object);
        }
    }

    #[track_caller]
    pub fn note_given(&self, object: usize) {
        if let Some(checks) = &self.checks {
            checks.note_given(object);
        }
    }

    #[cold]
    #[inline(never)]
    #[track_caller]
    fn free_slowly(&self, object: usize) {
        assert_not_isolating();
        if self.check().is_err() {
            // The object belongs to the parent; in the child it is unused memory.
            return;
        }
        self.note_given(object);
        let node = self.node_of(object);
        if let Some(magazine) = self.open_magazine()
            && (self.is_of(magazine, object) || magazine.len() == 0)
        {
            let mut sheaf = [0; MAX_SHEAF];
            let count =
                if magazine.len() < 2 * self.shape.sheaf { 0 } else { self.drain(&mut sheaf[..self.shape.sheaf]) };
            self.put_back(magazine.node(), &sheaf[..count]);
            if self.fill([object].into_iter(), node) == 1 {
                return;
            }
        }
        self.put_back(node, &[object]);
    }

    /// Returns objects of a node to its barn or its slabs.
    pub fn put_back(&self, node: usize, objects: &[usize]) {
        if objects.is_empty() {
            return;
        }
        if self.barns(node).next().is_some_and(|own| own.put(objects)) {
            return;
        }
        let (has_spare, is_due) = self.on(node, |node| {
            objects.iter().for_each(|object| node.give(*object));
            node.state.given += objects.len() as u64;
            (node.has_spare(), node.state.given >= u64::from(self.shape.block_capacity()))
        });
        if has_spare {
            self.trim(node, Keep::Some);
        }
        if is_due && self.is_movable && self.used_ratio.load(Relaxed) > 0 {
            self.shared.slabs.worker.notify();
        }
    }

    /// Whether users returned objects to slabs since the last call.
    pub fn take_given(&self) -> bool {
        let given = |node| self.on(node, |node| std::mem::take(&mut node.state.given));
        (0..self.node_count()).map(given).sum::<u64>() > 0
    }

    /// Called when memory is short: makes the background thread, if there is one, pack the cache. The first such call
    /// also shortens the thread's rest.
    pub fn press(&self) {
        let worker = &self.shared.slabs.worker;
        if self.used_ratio.load(Relaxed) > 0 && !worker.is_by_hand() {
            // Either the thread sees this, or it has not yet begun the round that this wake-up requests.
            if self.passes.press() {
                worker.notify();
            } else {
                worker.wake();
            }
        }
    }

    /// Takes at least one object of a node, or of other nodes in `remote_percent` of the cases in which the node has none
    /// set up. Returns the node and the number of objects.
    pub fn take(&self, node: usize, remote_percent: u32, taken: &mut [usize]) -> Result<(usize, usize)> {
        loop {
            let stored = self.barns(node).map(|barn| barn.take(taken)).find(|count| *count > 0);
            let count = stored.unwrap_or_else(|| self.take_present(node, TargetRoom::Any, taken));
            if count > 0 {
                return Ok((node, count));
            }
            if !self.has_one_node && self.draw() < remote_percent {
                let others = (1..self.node_count()).map(|step| (node + step) % self.node_count());
                let found = others.map(|node| (node, self.on(node, |node| node.take(TargetRoom::Used, taken))));
                if let Some((node, count)) = found.into_iter().find(|(_, count)| *count > 0) {
                    self.counts.from_remote.fetch_add(count as u64, Relaxed);
                    return Ok((node, count));
                }
            }
            if let Err(error) = self.grow(node) {
                // Reclaim for this may have drained magazines of other threads.
                let count = self.take_present(node, TargetRoom::Any, taken);
                return if count > 0 { Ok((node, count)) } else { Err(error) };
            }
        }
    }

    /// Takes objects of a node from slabs that are set up; returns how many.
    pub fn take_present(&self, node: usize, room: TargetRoom, taken: &mut [usize]) -> usize {
        self.on(node, |node| node.take(room, taken))
    }

    fn draw(&self) -> u32 {
        self.draws.fetch_add(DRAW_STEP, Relaxed) % PERCENT
    }

    /// The barns of a node, this thread's first.
    fn barns(&self, node: usize) -> impl Iterator<Item = &Barn> {
        let own = own_slot() as usize;
        (0..BARNS).map(move |step| &self.barns[node * BARNS + (own + step) % BARNS].0)
    }

    /// Free objects in the barns of a node, approximately.
    pub fn in_barns(&self, node: usize) -> u64 {
        self.barns(node).map(|barn| barn.objects() as u64).sum()
    }

    /// Returns the contents of the barns of a node to its slabs.
    pub fn empty_barns(&self, node: usize) {
        let mut objects = [0; MAX_SHEAF];
        for barn in self.barns(node) {
            loop {
                let count = barn.take(&mut objects);
                if count == 0 {
                    break;
                }
                self.on(node, |node| objects[..count].iter().for_each(|object| node.give(*object)));
            }
        }
    }

    /// Frees all memory that holds no object. Blocks with objects left are leaked.
    fn close(&mut self) {
        // Objects that readers may still use are leaked, with their blocks.
        let is_finished = self.finish_all_retired().unwrap_or(false);
        if let Ok(drained) = self.drain_magazines() {
            drained.close();
            self.trim_all(Keep::Nothing);
            // Releases the magazines before another cache gets them.
            drop(drained);
            if is_finished {
                self.shared.give_id(self.number);
            }
        }
    }

    /// Checks the counters of all nodes.
    #[cfg(any(test, feature = "test-util"))]
    pub fn check_state(&self) {
        (0..self.node_count()).for_each(|node| self.on(node, |node| node.check()));
    }

    /// Number of slabs and blocks with objects in use.
    pub fn footprint(&self) -> u64 {
        (0..self.node_count()).map(|node| self.on(node, |node| node.footprint())).sum()
    }

    /// Objects outside of slabs.
    pub fn used(&self) -> u64 {
        (0..self.node_count()).map(|node| self.on(node, |node| node.state.used())).sum()
    }

    /// Bytes charged for its blocks.
    pub fn resident_bytes(&self) -> u64 {
        (0..self.node_count()).map(|node| self.on(node, |node| node.tally().resident_bytes)).sum()
    }

    /// Bytes that [`Engine::trim`] would free with [`Keep::Nothing`]. Skips a node if its lock is held, maybe by a
    /// callback.
    pub fn kept_bytes(&self) -> u64 {
        if self.check().is_err() {
            return 0;
        }
        (0..self.node_count()).filter_map(|node| self.try_on(node, |node| node.kept_bytes())).sum()
    }

    pub fn has_constructor(&self) -> bool {
        self.set_up.is_some()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // A fork child counts only its own caches.
        if self.check().is_ok() {
            stats::sub(Counter::SlabCaches, 1);
        }
        self.close();
    }
}
