//! What all kinds of caches are made of: objects of one size, taken and given back.
//!
//! ```text
//!   thread   magazine: two sheaves, no lock
//!              | a sheaf at a time
//!   node     barn: full sheaves          under the lock of the node's books
//!              | object by object
//!   node     slabs, fullest first
//!              | slab by slab, block by block
//!   all      blocks (`blocks`), charged by the arena
//! ```
//!
//! Memory is asked for and constructors are called outside of every lock: a slab is claimed, set up, then opened.
//! Lock order: `emptying`, then one node's books, then the free blocks.
#![allow(unsafe_code)] // gives the memory of claimed slabs back

use super::barn::Barn;
use super::batch::Batch;
use super::debug::Checks;
use super::defrag::assert_not_isolating;
use super::magazine::{self, Magazine};
use super::node::{Books, Node, Room};
use super::shape::{MAX_SHEAF, Shape};
use super::{Ground, Settings};
use crate::arena::Filling;
use crate::error::{Error, Result};
use crate::stats::{self, Counter};
use crate::sync::{Guarded, Lock, Padded, Relaxed};
use std::alloc::Layout;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

/// Of a hundred draws each number comes once.
const DRAW_STEP: u32 = 37;
const PERCENT: u32 = 100;

/// Called for each object of a slab before any of them is handed out.
pub(super) type SetUp = Box<dyn Fn(usize) + Send + Sync>;

/// What a slot is to hold, and what makes it ready.
pub(super) struct Object {
    pub layout: Layout,
    /// Of that, bytes that the cache's user knows of.
    pub user_bytes: usize,
    pub set_up: Option<SetUp>,
}

/// # Errors
///
/// [`Error::BadRatio`] beyond 100.
fn check_ratio(percent: u32) -> Result<()> {
    if percent <= PERCENT { Ok(()) } else { Err(Error::BadRatio { percent }) }
}

/// # Invariants
///
/// Memory behind an object that was handed out stays until it is given back. Objects of slabs that are open have been set up.
pub(super) struct Engine {
    pub ground: &'static Ground,
    pub name: String,
    /// Percents of [`Settings`], which may be changed.
    pub used_ratio: AtomicU32,
    pub remote_ratio: AtomicU32,
    /// Bytes of an object as its user knows it.
    pub object_bytes: usize,
    pub shape: Shape,
    /// Which cache of the ground it is.
    number: usize,
    generation: u16,
    /// By number of the thread; none in debug mode.
    pub(super) magazines: &'static [Magazine],
    has_one_node: bool,
    nodes: Box<[Padded<Guarded<Books>>]>,
    /// Of each node whether it has filled a block: the next may be whole.
    has_filled: Box<[AtomicBool]>,
    set_up: Option<SetUp>,
    pub checks: Option<Checks>,
    /// Numbers of threads that have opened a magazine. Changed under `emptying`.
    pub(super) users: [AtomicU64; magazine::MAX_THREADS / 64],
    /// That one thread empties magazines and slabs at a time.
    pub(super) emptying: Lock,
    /// Somebody does: magazines are out of use.
    pub(super) is_seized: AtomicBool,
    draws: AtomicU32,
    /// Emptied places that wait for readers.
    pub batches: Guarded<Vec<Batch>>,
    /// The pass that defragmentation is at.
    pub pass: AtomicU32,
    /// Slabs and blocks in use when the last pass ended, and objects when it had freed nothing.
    pub footprint_before: AtomicU64,
    pub rest_at: AtomicU64,
    pub counts: Counts,
}

/// What became of objects that were to be moved, and of slabs.
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
    /// # Errors
    ///
    /// [`Error::BadRatio`] beyond 100.
    pub fn set_used_ratio(&self, percent: u32) -> Result<()> {
        check_ratio(percent)?;
        self.used_ratio.store(percent, Relaxed);
        Ok(())
    }

    /// An engine with a number that nobody else has.
    ///
    /// # Errors
    ///
    /// [`Error::BadRatio`], and those of [`Shape::new`].
    pub fn new(ground: &'static Ground, number: usize, settings: Settings, object: Object) -> Result<Self> {
        let nodes = ground.blocks.arena.nodes.count();
        let Object { layout, user_bytes, set_up } = object;
        [settings.defrag_used_ratio, settings.remote_node_defrag_ratio].into_iter().try_for_each(check_ratio)?;
        let checks = settings.debug.then(|| Checks::new(&settings.name, layout.size(), set_up.is_some()));
        let trailer = checks.as_ref().map_or(0, |_| Checks::TRAILER_BYTES);
        let bytes =
            if trailer > 0 { layout.size().next_multiple_of(size_of::<u64>()) + trailer } else { layout.size() };
        let shape = Shape::new(bytes, layout.align(), settings.slab_bytes)?;
        let barn = |node| Barn::new(ground.yard, number * nodes + node, shape.sheaf);
        Ok(Self {
            ground,
            number,
            used_ratio: AtomicU32::new(settings.defrag_used_ratio),
            remote_ratio: AtomicU32::new(settings.remote_node_defrag_ratio),
            name: settings.name,
            object_bytes: user_bytes,
            generation: ground.blocks.arena.generation(),
            magazines: if checks.is_some() { &[] } else { ground.magazines.of_cache(number) },
            has_one_node: nodes == 1,
            nodes: (0..nodes).map(|node| Padded(Guarded::new(Books::new(barn(node))))).collect(),
            has_filled: (0..nodes).map(|_| AtomicBool::new(false)).collect(),
            set_up,
            checks,
            users: [const { AtomicU64::new(0) }; magazine::MAX_THREADS / 64],
            emptying: Lock::new(),
            is_seized: AtomicBool::new(false),
            draws: AtomicU32::new(0),
            batches: Guarded::new(Vec::new()),
            pass: AtomicU32::new(1),
            footprint_before: AtomicU64::new(0),
            rest_at: AtomicU64::new(u64::MAX),
            counts: Counts::default(),
            shape,
        })
    }

    pub fn node_count(&self) -> usize {
        self.nodes.len()
    }

    /// Refuses in a child of the process that made the cache: locks of the parent's threads are here, they are not.
    ///
    /// # Errors
    ///
    /// [`Error::WrongState`].
    pub fn check(&self) -> Result<()> {
        if self.generation == self.ground.blocks.arena.generation() {
            Ok(())
        } else {
            Err(Error::WrongState { what: "a slab cache of the parent process: a fork child has to make its own" })
        }
    }

    /// Lets `act` have the books of a node.
    pub fn on<R>(&self, node: usize, act: impl FnOnce(&mut Node<'_>) -> R) -> R {
        let (shape, blocks) = (&self.shape, &self.ground.blocks);
        self.nodes[node].0.with(|books| act(&mut Node { shape, blocks, books }))
    }

    #[inline(always)]
    fn own_magazine(&self) -> Option<&'static Magazine> {
        self.magazines.get(magazine::own_number() as usize)
    }

    /// Takes an object: of the thread's magazine mostly.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`], [`Error::NoAddresses`], [`Error::System`]; [`Error::WrongState`] in a fork child.
    #[inline]
    #[track_caller]
    pub fn allocate(&self) -> Result<usize> {
        match self.own_magazine().and_then(Magazine::pop) {
            Some(object) => Ok(object),
            None => self.allocate_slowly(),
        }
    }

    /// Gives an object back.
    ///
    /// # Safety
    ///
    /// It was taken from this cache, nobody refers to it any more, and it is as it was when it was set up.
    #[inline]
    #[track_caller]
    pub unsafe fn free(&self, object: usize) {
        match self.own_magazine() {
            Some(magazine) if self.is_of(magazine, object) && magazine.push(object) => {}
            _ => self.free_slowly(object),
        }
    }

    #[inline(always)]
    fn is_of(&self, magazine: &Magazine, object: usize) -> bool {
        self.has_one_node || magazine.node() == self.node_of(object)
    }

    /// The node whose memory an object is in.
    pub fn node_of(&self, object: usize) -> usize {
        self.ground.blocks.node_of(self.ground.blocks.number_of(object))
    }

    /// The number of an object in its slab.
    pub fn place_of(&self, object: usize) -> u32 {
        let blocks = &self.ground.blocks;
        self.shape.place_of(object - blocks.addr(blocks.number_of(object))).1
    }

    /// The thread's magazine, opened; none while all are being emptied.
    fn open_magazine(&self) -> Option<&'static Magazine> {
        if self.magazines.is_empty() || self.is_seized.load(Relaxed) {
            return None;
        }
        let number = magazine::find_number() as usize;
        let magazine = self.magazines.get(number)?;
        let (word, bit) = (&self.users[number / 64], 1 << (number % 64));
        if word.load(Relaxed) & bit == 0 {
            if !self.emptying.try_acquire() {
                return None;
            }
            word.fetch_or(bit, Relaxed);
            magazine.open(2 * self.shape.sheaf);
            self.emptying.release();
        }
        Some(magazine)
    }

    #[cold]
    #[inline(never)]
    #[track_caller]
    fn allocate_slowly(&self) -> Result<usize> {
        assert_not_isolating();
        self.check()?;
        let magazine = self.open_magazine();
        let mut taken = [0; MAX_SHEAF];
        let most = if magazine.is_some() { self.shape.sheaf } else { 1 };
        let node = self.ground.blocks.arena.current_node();
        let (node, count) = self.take(node, self.remote_ratio.load(Relaxed), &mut taken[..most])?;
        let object = taken[count - 1];
        if let Some(magazine) = magazine {
            let rest = &taken[..count - 1];
            let kept = magazine.fill(rest, node);
            self.put_back(node, &rest[kept..]);
        }
        self.note_taken(object);
        Ok(object)
    }

    /// Takes one object of one node's memory.
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
        Ok(taken[0])
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

    #[cold]
    #[inline(never)]
    #[track_caller]
    fn free_slowly(&self, object: usize) {
        assert_not_isolating();
        if self.check().is_err() {
            // The parent has it still; here nobody would use it again.
            return;
        }
        if let Some(checks) = &self.checks {
            checks.note_given(object);
        }
        let node = self.node_of(object);
        if let Some(magazine) = self.open_magazine()
            && (self.is_of(magazine, object) || magazine.len() == 0)
        {
            let mut sheaf = [0; MAX_SHEAF];
            let count =
                if magazine.len() < 2 * self.shape.sheaf { 0 } else { magazine.drain(&mut sheaf[..self.shape.sheaf]) };
            self.put_back(magazine.node(), &sheaf[..count]);
            if magazine.fill(&[object], node) == 1 {
                return;
            }
        }
        self.put_back(node, &[object]);
    }

    /// Gives objects of a node to its barn or its slabs.
    pub fn put_back(&self, node: usize, objects: &[usize]) {
        if objects.is_empty() {
            return;
        }
        let has_spare = self.on(node, |node| {
            if node.books.barn.put(objects) {
                return false;
            }
            objects.iter().for_each(|object| node.give(*object));
            node.has_spare()
        });
        if has_spare {
            self.trim(node, true);
        }
    }

    /// Takes objects of a node, or of others by so many percent of the times when the node has none set up; says which, and
    /// how many: at least one.
    pub fn take(&self, node: usize, remote_percent: u32, taken: &mut [usize]) -> Result<(usize, usize)> {
        loop {
            let count = self.on(node, |node| match node.books.barn.take(taken) {
                0 => node.take(Room::Any, taken),
                count => count,
            });
            if count > 0 {
                return Ok((node, count));
            }
            if !self.has_one_node && self.draw() < remote_percent {
                let others = (1..self.node_count()).map(|step| (node + step) % self.node_count());
                let found = others.map(|node| (node, self.on(node, |node| node.take(Room::Used, taken))));
                if let Some((node, count)) = found.into_iter().find(|(_, count)| *count > 0) {
                    self.counts.from_remote.fetch_add(count as u64, Relaxed);
                    return Ok((node, count));
                }
            }
            if let Err(error) = self.grow(node) {
                // Looking for memory may have emptied magazines of others.
                let count = self.take_present(node, Room::Any, taken);
                return if count > 0 { Ok((node, count)) } else { Err(error) };
            }
        }
    }

    /// Takes objects of a node that are set up already; says how many.
    pub fn take_present(&self, node: usize, room: Room, taken: &mut [usize]) -> usize {
        self.on(node, |node| node.take(room, taken))
    }

    fn draw(&self) -> u32 {
        self.draws.fetch_add(DRAW_STEP, Relaxed) % PERCENT
    }

    /// Sets one more slab of a node up.
    fn grow(&self, node: usize) -> Result<()> {
        let claimed = self.on(node, |node| node.claim_bare());
        let (block, slab) = match claimed {
            Some(claimed) => claimed,
            None => {
                let has_filled = self.has_filled[node].load(Relaxed);
                let block = self.ground.blocks.take(node, if has_filled { Filling::Soon } else { Filling::Unknown })?;
                self.on(node, |node| {
                    node.add_block(block);
                    node.claim_bare().expect("a block that is new has slabs to set up")
                })
            }
        };
        let blocks = &self.ground.blocks;
        let at = self.shape.offset_of(slab, 0);
        if blocks.block(block).is_sparse.get() == 1
            && let Err(error) = blocks.bring_in(block, at, self.shape.slab_bytes)
        {
            self.on(node, |node| node.strip(block, slab));
            self.trim(node, true);
            return Err(error);
        }
        self.construct(node, block, slab);
        if slab + 1 == self.shape.slabs {
            self.has_filled[node].store(true, Relaxed);
        }
        self.on(node, |node| node.open(block, slab));
        Ok(())
    }

    /// Sets the objects of a claimed slab up. A panic leaves the slab out of use, and goes on.
    fn construct(&self, node: usize, block: u32, slab: u32) {
        let base = self.ground.blocks.addr(block);
        let objects = || (0..self.shape.capacity).map(|object| base + self.shape.offset_of(slab, object));
        if let Some(set_up) = &self.set_up
            && let Err(panic) = catch_unwind(AssertUnwindSafe(|| objects().for_each(set_up)))
        {
            self.lose(node, block, slab);
            resume_unwind(panic);
        }
        if let Some(checks) = &self.checks {
            objects().for_each(|object| checks.note_new(object));
        }
    }

    /// Leaves a claimed slab out of use for good.
    pub fn lose(&self, node: usize, block: u32, slab: u32) {
        stats::add(Counter::SlabLost, 1);
        self.on(node, |node| node.lose(block, slab));
    }

    /// Gives idle blocks of a node back, and the memory of empty slabs of sparse ones: all but some that are kept, or all.
    /// Returns the bytes that went to the system; whole blocks keep theirs.
    pub fn trim(&self, node: usize, keep_some: bool) -> u64 {
        let (blocks, mut freed) = (&self.ground.blocks, 0);
        while let Some((block, slab)) = self.on(node, |node| node.claim_empty(keep_some)) {
            // SAFETY: a claimed slab without an object in use: nobody refers to what is in it.
            let bytes = unsafe { blocks.discard(block, self.shape.offset_of(slab, 0), self.shape.slab_bytes) };
            self.on(node, |node| match bytes {
                Some(_) => node.strip(block, slab),
                None => node.open(block, slab),
            });
            let Some(bytes) = bytes else { break };
            freed += bytes;
        }
        while let Some(block) = self.on(node, |node| node.remove_idle(keep_some)) {
            freed += blocks.give(block);
        }
        freed
    }

    fn trim_all(&self) {
        (0..self.node_count()).for_each(|node| _ = self.trim(node, false));
    }

    /// Gives what is in the barn of a node to its slabs.
    pub fn empty_barn(&self, node: usize) {
        let mut objects = [0; MAX_SHEAF];
        let mut take_sheaf = |node: &mut Node<'_>| {
            let count = node.books.barn.take(&mut objects);
            objects[..count].iter().for_each(|object| node.give(*object));
            count
        };
        while self.on(node, &mut take_sheaf) > 0 {}
    }

    /// Gives all of its memory back that no object is in; blocks with objects left are lost.
    fn close(&mut self) {
        // What readers may still be at is lost, with its blocks.
        let is_settled = self.settle_all().unwrap_or(false);
        if let Ok(seized) = self.seize() {
            seized.close();
            self.trim_all();
            if is_settled {
                self.ground.give_number(self.number);
            }
        }
    }

    /// The books are true.
    #[cfg(test)]
    pub fn check_books(&self) {
        (0..self.node_count()).for_each(|node| self.on(node, |node| node.check()));
    }

    /// Gives back all that no object is in; says how many bytes less are charged for the cache's blocks.
    ///
    /// # Errors
    ///
    /// As [`Engine::seize`].
    pub fn shrink(&self) -> Result<u64> {
        let before = self.resident_bytes();
        drop(self.seize()?);
        self.trim_all();
        let freed = before.saturating_sub(self.resident_bytes());
        self.ground.blocks.shrink(freed);
        Ok(freed)
    }

    /// The next pass; no other has its number.
    pub fn next_pass(&self) -> u32 {
        // 0 is never tried.
        match self.pass.fetch_add(1, Relaxed).wrapping_add(1) {
            0 => self.next_pass(),
            pass => pass,
        }
    }

    /// Slabs and blocks that objects are in.
    pub fn footprint(&self) -> u64 {
        (0..self.node_count()).map(|node| self.on(node, |node| node.footprint())).sum()
    }

    /// Objects outside of slabs.
    pub fn used(&self) -> u64 {
        (0..self.node_count()).map(|node| self.on(node, |node| node.books.used())).sum()
    }

    /// Bytes charged for its blocks.
    pub fn resident_bytes(&self) -> u64 {
        (0..self.node_count()).map(|node| self.on(node, |node| node.tally().resident_bytes)).sum()
    }

    pub fn has_constructor(&self) -> bool {
        self.set_up.is_some()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.close();
    }
}
