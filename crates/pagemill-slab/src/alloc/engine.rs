//! The engine: allocation and freeing of objects of one size, shared by all kinds of caches.
//!
//! ```text
//!   thread   magazine: two sheaves, no lock
//!              | a sheaf at a time
//!   node     barns: full sheaves         under the lock of one barn
//!              | object by object
//!   node     slabs, fullest first
//!              | slab by slab, block by block
//!   all      blocks (`blocks`), charged by the arena
//! ```
//!
//! `supply` sets slabs up and frees them. Lock order: `drain_lock`, then the state (`NodeState`) of one node, then the
//! lists of free blocks.
#![allow(unsafe_code)] // the contract of freeing an object

use crate::alloc::barn::{BARNS_PER_NODE, Barn};
use crate::alloc::debug::Checks;
use crate::alloc::magazine::{Magazine, MagazineGuard, Magazines};
use crate::alloc::node::{Keep, Node, NodeState, TargetSlabs};
use crate::alloc::poison;
use crate::alloc::settings::Settings;
use crate::alloc::shape::{MAX_SHEAF_LEN, Shape};
use crate::alloc::shared::SharedState;
use crate::alloc::thread_slots::{MAX_THREADS, WORD_BITS, ensure_slot, own_offset, own_slot};
use crate::cache::SlabKind;
use crate::defrag::isolating::assert_not_isolating;
use crate::defrag::passes::Passes;
use crate::defrag::worker::WorkRequest;
use crate::read::batch::Batch;
use crate::read::handles::HandleTable;
use pagemill_core::arena::Arena;
use pagemill_core::error::{Error, Result};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{AtomicU64, Guarded, Lock, Padded, Relaxed, Release};
use std::alloc::Layout;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32};

/// Difference between successive percentages of a sequence, taken modulo 100. With these percentages an allocation
/// decides whether to try other NUMA nodes first. The difference and 100 have no common factor, so a hundred steps
/// yield each percentage once.
const REMOTE_PERCENT_STEP: u32 = 37;
const MAX_PERCENT: u32 = 100;

/// A constructor, called with the address of each object of a slab before any of them is allocated.
pub(crate) type Constructor = Box<dyn Fn(usize) + Send + Sync>;

/// Properties that all objects of a cache share: their layout, their constructor, and how they can be moved.
pub(crate) struct ObjectSpec {
    pub layout: Layout,
    /// Size in bytes of an object as the cache's user defined it. The size in `layout` may be larger.
    pub user_bytes: usize,
    /// Byte range of an object that AddressSanitizer poisons while the object is free.
    pub poisoned_range: Range<usize>,
    /// Constructor of an object, if it has one.
    pub constructor: Option<Constructor>,
    /// How objects can be moved.
    pub kind: SlabKind,
    /// The cache's handle table, if it has one. The table also holds the threads' stocks of free handles and retired
    /// objects.
    pub handles: Option<&'static HandleTable>,
}

impl ObjectSpec {
    /// Returns whether defragmentation may move objects.
    pub fn is_movable(&self) -> bool {
        self.kind != SlabKind::Fixed
    }
}

/// Checks that a ratio of a slab cache is a valid percentage, from 0 to 100.
///
/// # Errors
///
/// [`Error::BadRatio`] if `percent` is above 100.
pub(crate) fn check_ratio(percent: u32) -> Result<()> {
    if percent <= MAX_PERCENT { Ok(()) } else { Err(Error::BadRatio { percent }) }
}

/// The allocator inside a cache. A cache of any kind has one engine.
///
/// # Invariants
///
/// An allocated object keeps its memory until the object is freed. In an open slab (one from which objects are
/// allocated), all objects have been constructed.
pub(crate) struct Engine {
    pub shared: &'static SharedState,
    /// The arena of the blocks in `shared`. Each insertion and removal of a `HandleMap` reads its generation.
    arena: &'static Arena,
    pub name: Arc<str>,
    /// [`Settings::defrag_used_ratio`], in percent. Can be changed later.
    pub used_ratio: AtomicU32,
    /// [`Settings::remote_node_defrag_ratio`], in percent. Can be changed later.
    pub remote_ratio: AtomicU32,
    /// The objects. In debug mode, which has its own checks of free objects, their poisoned range is empty.
    pub object: ObjectSpec,
    pub shape: Shape,
    /// Id of the cache within `shared`.
    pub cache_id: usize,
    /// Fork generation (number of forks) of the process that created the cache.
    generation: u16,
    /// The magazines, by thread slot. In debug mode no magazine is opened.
    pub magazines: Magazines,
    has_one_node: bool,
    /// The slabs and blocks of the cache on each NUMA node.
    nodes: Box<[Padded<Guarded<NodeState>>]>,
    /// The cache's barns of all NUMA nodes, [`BARNS_PER_NODE`] for each node.
    barns: Box<[Padded<Barn>]>,
    /// For each NUMA node, whether the cache has filled a block of the node completely. If so, the next block of the
    /// node may be whole.
    pub has_filled_block: Box<[AtomicBool]>,
    /// The checks of allocations and frees in debug mode; `None` in normal mode.
    pub checks: Option<Checks>,
    /// One bit for each thread slot that has opened its magazine of this cache; empty in debug mode. Changed under
    /// `drain_lock`.
    pub opened_slots: Box<[AtomicU64]>,
    /// Held by the thread that drains magazines and empties slabs.
    pub drain_lock: Lock,
    /// Set while the magazines are drained, so that they are unusable.
    pub is_draining: AtomicBool,
    /// Position in the sequence of percentages that [`Engine::next_percent`] returns.
    percent_counter: AtomicU32,
    /// Batches of emptied slabs that wait until all readers of their moved objects have finished.
    pub batches: Guarded<VecDeque<Batch>>,
    /// State of the defragmentation of the cache.
    pub passes: Passes,
    /// Set when a callback panicked on the background thread. The thread then skips the cache until its used ratio is set
    /// or a shrink succeeds.
    pub has_panicked: AtomicBool,
    pub work_request: Guarded<WorkRequest>,
    /// Set when the user drops the cache. Requests of other processes for the cache then fail.
    pub is_unregistered: AtomicBool,
    pub counts: Counts,
}

/// Statistics of one slab cache: objects by the outcome of their move (fields `moved` to `refused`), emptied slabs, and
/// objects that were allocated from another NUMA node than the preferred one.
#[derive(Default)]
pub(crate) struct Counts {
    pub moved: AtomicU64,
    pub freed: AtomicU64,
    pub busy: AtomicU64,
    pub failed: AtomicU64,
    pub refused: AtomicU64,
    pub emptied: AtomicU64,
    pub from_remote: AtomicU64,
}

impl Engine {
    /// Creates the engine of a new cache, which gets the lowest free cache id.
    ///
    /// # Errors
    ///
    /// [`Error::BadRatio`], and those of [`SharedState::take_id`] and [`Shape::new`].
    pub fn new(shared: &'static SharedState, settings: Settings, object: ObjectSpec) -> Result<Self> {
        let id = shared.take_id()?;
        Self::with_id(shared, id, settings, object).inspect_err(|_| shared.free_id(id))
    }

    fn with_id(
        shared: &'static SharedState,
        cache_id: usize,
        settings: Settings,
        mut object: ObjectSpec,
    ) -> Result<Self> {
        let arena = shared.blocks.arena;
        let nodes = arena.nodes.count();
        let layout = object.layout;
        [settings.defrag_used_ratio, settings.remote_node_defrag_ratio].into_iter().try_for_each(check_ratio)?;
        let checks =
            settings.is_debug.then(|| Checks::new(&settings.name, layout.size(), object.constructor.is_some()));
        if checks.is_some() {
            object.poisoned_range = 0..0;
        }
        let trailer = checks.as_ref().map_or(0, |_| Checks::TRAILER_BYTES);
        let bytes =
            if trailer > 0 { layout.size().next_multiple_of(size_of::<u64>()) + trailer } else { layout.size() };
        let shape = Shape::new(bytes, layout.align(), settings.slab_bytes)?;
        let barn = |at| Padded(Barn::new(shared.barn_memory, cache_id * nodes * BARNS_PER_NODE + at, shape.sheaf_len));
        let slot_words = if checks.is_some() { 0 } else { MAX_THREADS / WORD_BITS };
        stats::add(Counter::SlabCaches, 1);
        Ok(Self {
            shared,
            arena,
            cache_id,
            used_ratio: AtomicU32::new(settings.defrag_used_ratio),
            remote_ratio: AtomicU32::new(settings.remote_node_defrag_ratio),
            name: settings.name.into(),
            object,
            generation: arena.generation(),
            magazines: Magazines::new(shared.range(cache_id), shared.barriers),
            has_one_node: nodes == 1,
            nodes: (0..nodes).map(|_| Padded(Guarded::new(NodeState::default()))).collect(),
            barns: (0..nodes * BARNS_PER_NODE).map(barn).collect(),
            has_filled_block: (0..nodes).map(|_| AtomicBool::new(false)).collect(),
            checks,
            opened_slots: (0..slot_words).map(|_| AtomicU64::new(0)).collect(),
            drain_lock: Lock::new(),
            is_draining: AtomicBool::new(false),
            percent_counter: AtomicU32::new(0),
            batches: Guarded::new(VecDeque::new()),
            passes: Passes::new(),
            has_panicked: AtomicBool::new(false),
            work_request: Guarded::new(WorkRequest::None),
            is_unregistered: AtomicBool::new(false),
            counts: Counts::default(),
            shape,
        })
    }

    pub fn node_count(&self) -> usize {
        self.nodes.len()
    }

    /// Checks that this process created the cache. A fork child cannot use a cache of its parent, because threads that
    /// held the cache's locks do not exist in the child.
    ///
    /// # Errors
    ///
    /// [`Error::WrongState`].
    #[inline]
    pub fn check_generation(&self) -> Result<()> {
        if self.generation == self.arena.generation() { Ok(()) } else { Self::fail_in_child() }
    }

    #[cold]
    fn fail_in_child() -> Result<()> {
        Err(Error::WrongState {
            what: "the slab cache belongs to the parent process: a fork child must create its own",
        })
    }

    /// Calls `act` with the cache's state on a NUMA node, under the lock of that state.
    pub fn with_node<R>(&self, node: usize, act: impl FnOnce(&mut Node<'_>) -> R) -> R {
        let (shape, blocks) = (&self.shape, &self.shared.blocks);
        self.nodes[node].0.with(|state| act(&mut Node { shape, blocks, state }))
    }

    /// As [`Engine::with_node`], but returns `None` at once if another thread holds the lock.
    pub fn try_with_node<R>(&self, node: usize, act: impl FnOnce(&mut Node<'_>) -> R) -> Option<R> {
        let (shape, blocks) = (&self.shape, &self.shared.blocks);
        self.nodes[node].0.try_with(|state| act(&mut Node { shape, blocks, state }))
    }

    /// Enters this thread's magazine of the cache. Returns `None` if the magazine is not open or is being drained.
    #[inline(always)]
    fn enter(&self) -> Option<MagazineGuard<'_>> {
        self.magazines.enter(own_offset())
    }

    /// Allocates an object, mostly from this thread's magazine.
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
        self.unpoison(object);
        Ok(object)
    }

    /// Frees the object at the address `object`.
    ///
    /// # Safety
    ///
    /// The object was allocated from this cache, no reference to it exists, and its contents are again those of a
    /// set-up object.
    #[inline]
    #[track_caller]
    pub unsafe fn free(&self, object: usize) {
        self.poison(object);
        let is_in = self.enter().is_some_and(|magazine| self.is_same_node(&magazine, object) && magazine.push(object));
        if !is_in {
            self.free_slowly(object);
        }
    }

    /// Allocates an object and calls `take_other`, which takes a handle from the thread's stock. Returns both. Returns
    /// `None`, and allocates neither, if the object or the handle is not available. `take_other` must not panic.
    #[inline(always)]
    pub fn allocate_together<R>(&self, take_other: impl FnOnce(usize) -> Option<R>) -> Option<(usize, R)> {
        let found = self.enter()?.pop_together(|| take_other(own_slot() as usize))?;
        self.unpoison(found.0);
        Some(found)
    }

    /// Frees several objects. If the machine has only one NUMA node, puts them into this thread's magazine as far as
    /// they fit, and may first remove a sheaf of older objects to make room. Frees the other objects one by one, which
    /// is slower.
    ///
    /// # Safety
    ///
    /// As [`Engine::free`], for each object.
    pub unsafe fn free_all(&self, objects: &[u64]) {
        let mut rest = 0;
        if self.has_one_node {
            objects.iter().for_each(|object| self.poison(*object as usize));
            rest = self.fill_own_magazine(objects.iter().map(|object| *object as usize), 0);
            if rest < objects.len() {
                let mut sheaf = [0; MAX_SHEAF_LEN];
                let count = self.drain_own_magazine(&mut sheaf[..self.shape.sheaf_len]);
                self.return_objects(0, &sheaf[..count]);
                rest += self.fill_own_magazine(objects[rest..].iter().map(|object| *object as usize), 0);
            }
        }
        // SAFETY: the caller's promise, for the objects that did not fit into the magazine.
        objects[rest..].iter().for_each(|object| unsafe { self.free(*object as usize) });
    }

    /// Calls `act` with the index of this thread's slot, while the thread holds the lock of its magazine. The lock also
    /// protects the stock of the thread slot. `act` must not panic. Returns `None` if the magazine is not open or is
    /// being drained.
    #[inline(always)]
    pub fn with_magazine<R>(&self, act: impl FnOnce(usize) -> R) -> Option<R> {
        self.enter()?.run_entered(|| act(own_slot() as usize))
    }

    /// As [`MagazineGuard::fill`], on this thread's magazine. Adds nothing if the thread cannot enter the magazine.
    fn fill_own_magazine(&self, objects: impl ExactSizeIterator<Item = usize>, node: usize) -> usize {
        self.enter().map_or(0, |magazine| magazine.fill(objects, node))
    }

    /// As [`Magazine::take_oldest`], on this thread's magazine. Removes nothing if the thread cannot enter the magazine.
    fn drain_own_magazine(&self, sheaf: &mut [usize]) -> usize {
        self.enter().map_or(0, |magazine| magazine.take_oldest(sheaf))
    }

    /// Returns whether an object lies on the NUMA node whose objects the magazine contains.
    #[inline(always)]
    fn is_same_node(&self, magazine: &Magazine, object: usize) -> bool {
        self.has_one_node || magazine.node() == self.node_of(object)
    }

    /// Returns the NUMA node of an object's memory.
    pub fn node_of(&self, object: usize) -> usize {
        self.shared.blocks.node_of(self.shared.blocks.number_of(object))
    }

    /// Returns the index of an object in its slab.
    pub fn object_index(&self, object: usize) -> u32 {
        let blocks = &self.shared.blocks;
        self.shape.locate(object - blocks.addr(blocks.number_of(object))).1
    }

    /// Returns this thread's magazine of the cache, and opens it if necessary. Returns `None` while magazines are
    /// drained, or if the magazine cannot be opened.
    fn open_magazine(&self) -> Option<&Magazine> {
        if self.is_draining.load(Relaxed) {
            return None;
        }
        let slot = ensure_slot() as usize;
        let (word, bit) = (self.opened_slots.get(slot / WORD_BITS)?, 1 << (slot % WORD_BITS));
        if word.load(Relaxed) & bit == 0 {
            let _emptying = self.drain_lock.try_lock()?;
            let has_stock = self.object.handles.is_none_or(|handles| handles.stocks.open_slot(slot));
            let has_room = has_stock && self.magazines.open_slot(slot);
            let magazine = has_room.then(|| self.enter()).flatten()?;
            magazine.open(2 * self.shape.sheaf_len);
            word.fetch_or(bit, Release);
        }
        Some(self.magazines.get(slot))
    }

    /// Allocates a sheaf of objects from a barn or from slabs. Returns one of the objects and puts the others into the
    /// magazine.
    #[cold]
    #[inline(never)]
    #[track_caller]
    fn allocate_slowly(&self) -> Result<usize> {
        assert_not_isolating();
        self.check_generation()?;
        let has_magazine = self.open_magazine().is_some();
        let mut taken = [0; MAX_SHEAF_LEN];
        let most = if has_magazine { self.shape.sheaf_len } else { 1 };
        let node = self.arena.current_node();
        let (node, count) = self.take_objects(node, self.remote_ratio.load(Relaxed), &mut taken[..most])?;
        debug_assert!(count > 0 && count <= most);
        let object = taken[count - 1];
        if has_magazine {
            let rest = &taken[..count - 1];
            let kept = self.fill_own_magazine(rest.iter().copied(), node);
            self.return_objects(node, &rest[kept..]);
        }
        self.note_allocated(object);
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
        self.check_generation()?;
        self.check_node(node)?;
        let mut taken = [0];
        self.take_objects(node, 0, &mut taken)?;
        self.note_allocated(taken[0]);
        self.unpoison(taken[0]);
        Ok(taken[0])
    }

    /// Makes AddressSanitizer accept accesses to an object that is about to be used.
    #[inline(always)]
    pub fn unpoison(&self, object: usize) {
        poison::unpoison(object + self.object.poisoned_range.start, self.object.poisoned_range.len());
    }

    /// Makes AddressSanitizer report accesses to a free object.
    #[inline(always)]
    pub fn poison(&self, object: usize) {
        poison::poison(object + self.object.poisoned_range.start, self.object.poisoned_range.len());
    }

    /// Checks that a NUMA node exists.
    ///
    /// # Errors
    ///
    /// [`Error::BadNode`].
    pub fn check_node(&self, node: usize) -> Result<()> {
        let nodes = self.node_count();
        if node < nodes { Ok(()) } else { Err(Error::BadNode { node, nodes }) }
    }

    /// In debug mode, checks an object that was allocated and records the call site.
    #[track_caller]
    pub fn note_allocated(&self, object: usize) {
        if let Some(checks) = &self.checks {
            checks.note_allocated(object);
        }
    }

    /// In debug mode, checks an object that is being freed and records the call site.
    #[track_caller]
    pub fn note_freed(&self, object: usize) {
        if let Some(checks) = &self.checks {
            checks.note_freed(object);
        }
    }

    /// Frees an object that does not fit into the magazine. Makes room in the magazine first, if possible.
    #[cold]
    #[inline(never)]
    #[track_caller]
    fn free_slowly(&self, object: usize) {
        assert_not_isolating();
        if self.check_generation().is_err() {
            // The object belongs to the parent. Its copy in the child is never used again.
            return;
        }
        self.note_freed(object);
        let node = self.node_of(object);
        if let Some(magazine) = self.open_magazine()
            && (self.is_same_node(magazine, object) || magazine.len() == 0)
        {
            let mut sheaf = [0; MAX_SHEAF_LEN];
            let count = if magazine.len() < 2 * self.shape.sheaf_len {
                0
            } else {
                self.drain_own_magazine(&mut sheaf[..self.shape.sheaf_len])
            };
            self.return_objects(magazine.node(), &sheaf[..count]);
            if self.fill_own_magazine([object].into_iter(), node) == 1 {
                return;
            }
        }
        self.return_objects(node, &[object]);
    }

    /// Returns free objects of a NUMA node to the barn that this thread prefers, or to their slabs.
    pub fn return_objects(&self, node: usize, objects: &[usize]) {
        if objects.is_empty() {
            return;
        }
        debug_assert!(objects.iter().all(|object| self.node_of(*object) == node), "objects of this node");
        if self.barns(node).next().is_some_and(|own| own.push_sheaf(objects)) {
            return;
        }
        let (has_surplus, is_due) = self.with_node(node, |node| {
            objects.iter().for_each(|object| node.free(*object));
            node.state.freed_objects += objects.len() as u64;
            (node.has_surplus(), node.state.freed_objects >= u64::from(self.shape.block_capacity()))
        });
        if has_surplus {
            self.trim(node, Keep::Reserve);
        }
        if self.object.is_movable() {
            self.note_free_for_worker(is_due);
        }
    }

    /// Tells the background thread that objects were freed, unless the used ratio of the cache is 0. `is_urgent`: wakes
    /// the thread now. Otherwise the thread runs a round a while later.
    pub fn note_free_for_worker(&self, is_urgent: bool) {
        let worker = self.shared.worker;
        match (self.used_ratio.load(Relaxed) > 0, is_urgent) {
            (false, _) => (),
            (true, false) => worker.note_frees(),
            (true, true) => worker.notify(),
        }
    }

    /// Begins a new count of the objects that users free into slabs. The background thread calls this at each visit.
    pub fn reset_freed_objects(&self) {
        (0..self.node_count()).for_each(|node| self.with_node(node, |node| node.state.freed_objects = 0));
    }

    /// Asks the background thread to pack the cache's objects into fewer slabs, because memory is short. The first call
    /// after memory became short also shortens the current rest of the background thread.
    pub fn note_memory_short(&self) {
        let worker = self.shared.worker;
        if self.used_ratio.load(Relaxed) > 0 && !worker.is_stopped() {
            // Either the thread sees the flag, or it has not yet begun the round that this call requests.
            if self.passes.note_memory_short() {
                worker.notify();
            } else {
                worker.wake();
            }
        }
    }

    /// Allocates up to `taken.len()` objects, at least one. The objects come from `node` if the node has free objects.
    /// Otherwise `remote_percent` percent of the calls first try the other nodes. If no object is found, sets up a slab
    /// on `node`. Returns the node and the number of objects.
    ///
    /// # Errors
    ///
    /// As [`Engine::allocate`].
    pub fn take_objects(&self, node: usize, remote_percent: u32, taken: &mut [usize]) -> Result<(usize, usize)> {
        loop {
            let stored = self.barns(node).map(|barn| barn.pop_sheaf(taken)).find(|count| *count > 0);
            let count = stored.unwrap_or_else(|| self.take_from_slabs(node, TargetSlabs::Any, taken));
            if count > 0 {
                return Ok((node, count));
            }
            if !self.has_one_node && self.next_percent() < remote_percent {
                let others = (1..self.node_count()).map(|step| (node + step) % self.node_count());
                let found =
                    others.map(|node| (node, self.with_node(node, |node| node.allocate(TargetSlabs::InUse, taken))));
                if let Some((node, count)) = found.into_iter().find(|(_, count)| *count > 0) {
                    self.counts.from_remote.fetch_add(count as u64, Relaxed);
                    return Ok((node, count));
                }
            }
            if let Err(error) = self.add_slab(node) {
                // Reclaim during the attempt may have drained magazines of other threads.
                let count = self.take_from_slabs(node, TargetSlabs::Any, taken);
                return if count > 0 { Ok((node, count)) } else { Err(error) };
            }
        }
    }

    /// Allocates up to `taken.len()` objects from set-up slabs of a node. Returns the number of objects.
    pub fn take_from_slabs(&self, node: usize, targets: TargetSlabs, taken: &mut [usize]) -> usize {
        self.with_node(node, |node| node.allocate(targets, taken))
    }

    /// Returns the next percentage of a sequence in which all values from 0 to 99 are equally frequent.
    fn next_percent(&self) -> u32 {
        self.percent_counter.fetch_add(REMOTE_PERCENT_STEP, Relaxed) % MAX_PERCENT
    }

    /// Returns the barns of a node, beginning with the barn that this thread prefers.
    fn barns(&self, node: usize) -> impl Iterator<Item = &Barn> {
        let own = own_slot() as usize;
        (0..BARNS_PER_NODE).map(move |step| &self.barns[node * BARNS_PER_NODE + (own + step) % BARNS_PER_NODE].0)
    }

    /// Returns the number of free objects in the barns of a node, approximately.
    pub fn objects_in_barns(&self, node: usize) -> u64 {
        self.barns(node).map(|barn| barn.objects() as u64).sum()
    }

    /// Empties the barns of a node: returns their objects to the slabs.
    pub fn drain_barns(&self, node: usize) {
        let mut objects = [0; MAX_SHEAF_LEN];
        for barn in self.barns(node) {
            while let count @ 1.. = barn.pop_sheaf(&mut objects) {
                self.with_node(node, |node| objects[..count].iter().for_each(|object| node.free(*object)));
            }
        }
    }

    /// Frees all memory of the cache when the cache is dropped. Blocks with objects that are still allocated are
    /// leaked.
    fn free_all_memory(&mut self) {
        // Objects that readers may still use are leaked, with their blocks.
        let is_finished = self.finish_all_retired().unwrap_or(false);
        if let Ok(drained) = self.drain_magazines() {
            drained.close();
            self.trim_all(Keep::Nothing);
            // Another cache that gets this cache id must find usable magazines.
            drop(drained);
            if is_finished {
                self.shared.free_id(self.cache_id);
            }
        }
    }

    #[cfg(any(test, feature = "test-util"))]
    pub fn check_state(&self) {
        (0..self.node_count()).for_each(|node| self.with_node(node, |node| node.check()));
    }

    /// Returns how many slabs and how many blocks of the cache have objects in use, as one sum.
    pub fn used_slabs_and_blocks(&self) -> u64 {
        (0..self.node_count()).map(|node| self.with_node(node, |node| node.used_slabs_and_blocks())).sum()
    }

    /// Returns the number of the cache's objects that are not free in their slabs: allocated objects, and free objects
    /// in magazines and barns.
    pub fn used_objects(&self) -> u64 {
        (0..self.node_count()).map(|node| self.with_node(node, |node| node.state.used)).sum()
    }

    /// Returns the bytes that are charged for the blocks of the cache.
    pub fn resident_bytes(&self) -> u64 {
        (0..self.node_count()).map(|node| self.with_node(node, |node| node.state.resident_bytes)).sum()
    }

    /// Returns the bytes that [`Engine::trim`] with [`Keep::Nothing`] would free. Skips a node if a thread holds the
    /// node's lock, because that thread may be running a callback.
    pub fn kept_bytes(&self) -> u64 {
        if self.check_generation().is_err() {
            return 0;
        }
        (0..self.node_count()).filter_map(|node| self.try_with_node(node, |node| node.kept_bytes())).sum()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // The counter of a fork child includes only the child's own caches.
        if self.check_generation().is_ok() {
            stats::sub(Counter::SlabCaches, 1);
        }
        self.free_all_memory();
    }
}
