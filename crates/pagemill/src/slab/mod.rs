//! Slabs: caches of objects of one size, which give their memory back, and compact themselves where their objects can be moved.
//!
//! Kinds on one `engine`: objects of a [`Fixed`] cache stay where they are until they are dropped; those of a [`ByOwner`] one
//! are moved by who knows all that refer to them; those of a [`ByHandle`] one are reached through a table, and move by themselves.
//!
//! What a cache has lies in blocks of 2 MiB (`blocks`), cut into slabs of 16 to 64 KiB (`shape`), whose metadata lie apart
//! (`meta`). A thread takes and gives objects in a magazine of its own (`magazine`, `claim`, `numbers`), by sheaves from the `barn` and
//! the slabs of a `node`, which are set up as they are needed (`supply`). Who empties slabs takes what is in magazines first
//! (`seize`), chooses (`defrag`), moves objects (`migrate`), and waits for readers (`batch`, `readers`). A thread of all caches does that
//! in the background (`worker`).
//!
//! Below: `arena`, `sync`, `epoch`, `xarray` (whose nodes it keeps: `xnodes`). Above, by trait: `reclaim::Shrinker`. States, transitions, bounds: docs/slab.md.

mod barn;
mod batch;
mod blocks;
mod claim;
mod control;
mod debug;
mod defrag;
#[cfg(all(test, not(shuttle)))]
mod defrag_tests;
mod ending;
mod engine;
mod fixed;
mod handle;
#[cfg(all(test, not(shuttle)))]
mod handle_tests;
mod handles;
mod info;
mod lists;
mod looks;
mod magazine;
mod meta;
mod migrate;
#[cfg(all(test, not(shuttle)))]
mod model_tests;
mod node;
#[cfg(all(test, not(shuttle)))]
mod node_tests;
mod numbers;
mod owner;
#[cfg(all(test, not(shuttle)))]
mod owner_tests;
mod poison;
mod readers;
mod seize;
mod shape;
#[cfg(all(test, shuttle))]
mod shuttle_tests;
mod stock;
mod supply;
#[cfg(all(test, not(shuttle)))]
mod tests;
#[cfg(all(test, not(shuttle)))]
mod threads_tests;
mod worker;
#[cfg(all(test, not(shuttle)))]
mod worker_tests;
mod xnodes;
#[cfg(all(test, not(shuttle)))]
mod xnodes_tests;

pub use control::ShrinkReport;
pub use fixed::{Fixed, Slot};
pub use handle::{ByHandle, Movable, Pinned};
pub use handles::Handle;
pub use info::{NodeInfo, SlabInfo};
pub use migrate::Progress;
pub use owner::{ByOwner, Candidates, Done, Migrate, Moving, New, Target};
pub use readers::{Guard, pin};
pub use xnodes::NodeCache;

use crate::arena::{Arena, place};
use crate::error::{Error, Result};
use crate::reclaim::{Shrinker, Urgency};
use crate::sync::{Guarded, Relaxed};
use barn::{BARNS, Yard};
use batch::Grace;
use blocks::Blocks;
use claim::Barriers;
use engine::{Engine, Object};
use handles::Handles;
use magazine::Rack;
use pagemill_sys::clock;
use std::alloc::Layout;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;
use worker::Worker;
use xnodes::Nodes;

/// Slab caches that a process can have at a time, that of nodes of indices among them, in a fork child those of the parent, too. Each has
/// addresses set aside for the magazines of all threads, 32 MiB where they can be had; the next is not made ([`Error::TooMany`]).
pub const MAX_CACHES: usize = 1 << 10;

/// A slab or block whose objects fill less than so many percent is worth emptying.
const DEFRAG_USED_RATIO: u32 = 30;

/// How a cache is to be.
#[derive(Clone, Debug)]
pub struct Settings {
    /// A word for reports: which cache of the program this is.
    pub name: String,
    /// Bytes of a slab: a power of two from 16 KiB and the OS page to 2 MiB. Chosen by the size of objects where it is `None`.
    pub slab_bytes: Option<usize>,
    /// Defragmentation, by calls and in the background, empties what is in use by less than so many percent: 0 nothing, 100 all
    /// that is not full. It calls owners of objects, and destructors of values by handle that were removed, on a thread of
    /// Pagemill's, but for caches at 0, and after [`Slabs::defrag_by_hand`].
    pub defrag_used_ratio: u32,
    /// In so many percent of the times when a node has no free object, those of other nodes serve before there is a new slab.
    pub remote_node_defrag_ratio: u32,
    /// Whether objects are watched: redzones, poison, owners. Costs a lock and a look at the object with every call.
    pub debug: bool,
}

impl Settings {
    /// Slabs by the size of objects, Linux's ratios, no checks.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            slab_bytes: None,
            defrag_used_ratio: DEFRAG_USED_RATIO,
            remote_node_defrag_ratio: 100,
            debug: false,
        }
    }
}

/// Numbers of caches. One that could not be closed, or is a parent's, keeps its own.
struct Numbers {
    are_taken: [bool; MAX_CACHES],
    /// Of those that were ever anybody's. These have barns, too.
    racks: Vec<&'static Rack>,
}

/// What all caches share; made with the first of them. That of metadata has blocks of its own.
struct Ground {
    slabs: &'static Slabs,
    blocks: Blocks,
    barriers: Barriers,
    yard: &'static Yard,
    numbers: &'static Guarded<Numbers>,
    /// Tables of handles that no cache has.
    handles: Guarded<Vec<&'static Handles>>,
}

impl Ground {
    fn new(slabs: &'static Slabs, barriers: Barriers) -> Result<Self> {
        let arena = slabs.arena;
        Ok(Self {
            slabs,
            blocks: Blocks::new(arena)?,
            barriers,
            yard: place(Yard::new(MAX_CACHES * arena.nodes.count() * BARNS)?)?,
            numbers: place(Guarded::new(Numbers { are_taken: [false; MAX_CACHES], racks: Vec::new() }))?,
            handles: Guarded::new(Vec::new()),
        })
    }

    fn for_metadata(&self) -> Result<Self> {
        let (blocks, handles) = (Blocks::for_metadata(self.slabs.arena)?, Guarded::new(Vec::new()));
        Ok(Self { blocks, handles, ..*self })
    }

    /// The lowest number that nobody has, with room for magazines and barns.
    ///
    /// # Errors
    ///
    /// [`Error::TooMany`], [`Error::System`].
    fn take_number(&self) -> Result<usize> {
        self.numbers.with(|numbers| {
            let free = numbers.are_taken.iter().position(|is_taken| !is_taken);
            let number = free.ok_or(Error::TooMany { what: "slab caches", most: MAX_CACHES })?;
            if number == numbers.racks.len() {
                // Who tries again opens the same barns; a table that is reserved stays.
                let barns = self.barns_each();
                self.yard.open(number * barns, barns)?;
                numbers.racks.push(Box::leak(Box::new(Rack::new()?)));
            }
            numbers.are_taken[number] = true;
            Ok(number)
        })
    }

    /// Of a number that was taken.
    fn rack(&self, number: usize) -> &'static Rack {
        self.numbers.with(|numbers| numbers.racks[number])
    }

    /// Barns of a cache.
    fn barns_each(&self) -> usize {
        self.slabs.arena.nodes.count() * BARNS
    }

    /// Bytes of magazines and barns that are resident.
    fn resident_bytes(&self) -> u64 {
        let of_magazines = |numbers: &mut Numbers| {
            (numbers.racks.len(), numbers.racks.iter().map(|rack| rack.resident_bytes()).sum::<u64>())
        };
        let (caches, bytes) = self.numbers.with(of_magazines);
        bytes + self.yard.resident_bytes(caches * self.barns_each())
    }

    fn take_handles(&self) -> Result<&'static Handles> {
        self.handles.with(Vec::pop).map_or_else(Handles::place, Ok)
    }

    /// Takes a table back of which no handle stands for anything.
    fn give_handles(&self, handles: &'static Handles) {
        self.handles.with(|free| free.push(handles));
    }

    fn give_number(&self, number: usize) {
        self.numbers.with(|numbers| numbers.are_taken[number] = false);
    }
}

/// A cache as all of them see it.
trait Member: Send + Sync {
    fn engine(&self) -> &Engine;

    fn kind(&self) -> Kind;

    /// Bytes of its table of handles, where it has one.
    fn handle_bytes(&self) -> u64 {
        0
    }

    /// Objects in use that only wait for readers.
    fn waiting(&self) -> u64 {
        self.engine().in_batches()
    }

    /// Packs its objects, where that takes no callback of its user; else has it done.
    fn compact(&self) {}

    /// As the cache's own call of that name.
    fn shrink(&self) -> Result<u64>;

    /// Takes back what readers are done with, where that takes no callback of its user.
    fn tidy(&self) {}

    /// Takes back what waited for readers, as far as they have gone; says whether something waits still.
    fn settle(&self) -> bool {
        self.engine().settle_behind()
    }

    /// A step of defragmentation, where objects can be moved.
    fn defrag(&self, _budget: Duration) -> Result<Progress> {
        Ok(Progress { is_done: true, ..Progress::default() })
    }

    /// Gives up what it can without a callback of its user; returns the bytes that went to the system, beside free blocks.
    /// `Limit`: also what threads have in magazines.
    fn give_back(&self, urgency: Urgency) -> u64 {
        let engine = self.engine();
        if engine.check().is_err() {
            return 0;
        }
        self.tidy();
        if urgency == Urgency::Limit {
            self.compact();
        }
        let _seized = (urgency == Urgency::Limit).then(|| engine.try_seize());
        let each = (0..engine.node_count()).map(|node| {
            engine.empty_barns(node);
            engine.trim(node, node::Keep::Nothing)
        });
        each.sum()
    }
}

/// What may be done with the objects of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// They stay where they are.
    Fixed,
    /// Their owner moves them.
    ByOwner,
    /// They are reached by handle, and move by themselves.
    ByHandle,
}

/// All slab caches of a process.
pub struct Slabs {
    arena: &'static Arena,
    ground: OnceLock<&'static Ground>,
    /// In the order in which they were made, each by a number that no other had.
    members: Guarded<Vec<(u64, Weak<dyn Member>)>>,
    made: AtomicU64,
    worker: Worker,
    /// Nodes of indices, and what their blocks are from.
    nodes: Nodes,
}

impl Slabs {
    /// No memory, and no addresses, before the first cache.
    pub(crate) fn new(arena: &'static Arena) -> Self {
        let (members, made) = (Guarded::new(Vec::new()), AtomicU64::new(0));
        Self { arena, ground: OnceLock::new(), members, made, worker: Worker::default(), nodes: Nodes::default() }
    }

    /// Makes a cache whose objects stay where they are.
    ///
    /// # Errors
    ///
    /// [`Error::BadLength`], [`Error::BadAlignment`] for objects or slabs that cannot be, [`Error::BadRatio`],
    /// [`Error::TooMany`] where there are [`MAX_CACHES`], [`Error::System`].
    pub fn fixed<T>(&'static self, settings: Settings) -> Result<Fixed<T>> {
        let object = Object {
            layout: Layout::new::<T>(),
            user_bytes: size_of::<T>(),
            closed: 0..size_of::<T>(),
            set_up: None,
            is_movable: false,
            grace: Grace::of_all,
            handles: None,
        };
        self.make(settings, object, fixed::Inner::new).map(Fixed::new)
    }

    /// Makes the inside of a cache, under a number of its own.
    fn make<M: Member + 'static>(
        &'static self,
        settings: Settings,
        object: Object,
        inner: impl FnOnce(Engine) -> M,
    ) -> Result<Arc<M>> {
        let ground = self.members.with(|_| self.ground())?;
        let member = Self::make_on(ground, settings, object, inner)?;
        self.enter(&member);
        Ok(member)
    }

    /// As [`Slabs::make`]; nobody knows of it before [`Slabs::enter`].
    fn make_on<M: Member + 'static>(
        ground: &'static Ground,
        settings: Settings,
        object: Object,
        inner: impl FnOnce(Engine) -> M,
    ) -> Result<Arc<M>> {
        let number = ground.take_number()?;
        let engine = Engine::new(ground, number, settings, object).inspect_err(|_| ground.give_number(number))?;
        Ok(Arc::new(inner(engine)))
    }

    /// From here on a cache is one of all. It is whole: others call it at once.
    fn enter<M: Member + 'static>(&'static self, member: &Arc<M>) {
        let weak: Weak<M> = Arc::downgrade(member);
        self.members.with(|members| {
            members.retain(|(_, member)| member.strong_count() > 0);
            members.push((self.made.fetch_add(1, Relaxed), weak));
        });
        if member.engine().is_movable {
            self.worker.start(self);
        }
    }

    /// Under the lock of the members.
    fn ground(&'static self) -> Result<&'static Ground> {
        if let Some(ground) = self.ground.get() {
            return Ok(ground);
        }
        let ground = place(Ground::new(self, Barriers::of_process())?)?;
        Ok(self.ground.get_or_init(|| ground))
    }

    /// As if the kernel refused seizers the barrier in all threads. Before there is a cache.
    #[cfg(test)]
    fn refuse_barrier(&'static self) {
        let ground = place(Ground::new(self, Barriers::OfEach).unwrap()).unwrap();
        assert!(self.ground.set(ground).is_ok());
    }

    fn members(&self) -> Vec<Arc<dyn Member>> {
        self.members.with(|members| members.iter().filter_map(|(_, member)| member.upgrade()).collect())
    }

    fn member_count(&self) -> usize {
        self.members.with(|members| members.len())
    }

    fn member_at(&self, at: usize) -> Option<Arc<dyn Member>> {
        self.members.with(|members| members.get(at).and_then(|(_, member)| member.upgrade()))
    }

    /// All caches that are this process's own, those with movable objects first, then by name.
    pub fn list(&self) -> Vec<SlabInfo> {
        let mut list: Vec<SlabInfo> = self.members().iter().filter_map(|member| info::of(&**member).ok()).collect();
        list.sort_by_cached_key(SlabInfo::rank);
        list
    }

    /// From here on nothing is done in the background: caches are defragmented by calls alone, as [`Slabs::defrag_step`], and no
    /// callback runs on a thread that is not the program's. Waits for the step that is under way, a second at most.
    pub fn defrag_by_hand(&self) {
        self.worker.stop();
    }

    /// A step of defragmentation of all caches, by their ratios: for a thread of the program, or an idle moment. It calls owners of
    /// objects, so it must not be called where they could be waiting for the caller. Says what was done in all.
    pub fn defrag_step(&self, budget: Duration) -> Progress {
        let began_ns = clock::fine_ns();
        let mut whole = Progress { is_done: true, ..Progress::default() };
        for member in self.members().iter().filter(|member| member.engine().check().is_ok()) {
            let left = budget.saturating_sub(Duration::from_nanos(clock::fine_ns() - began_ns));
            // One that somebody else is at is passed over.
            let part = if left.is_zero() { Ok(Progress::default()) } else { member.defrag(left) };
            whole.add(&part.unwrap_or_default());
        }
        whole
    }

    /// Bytes of metadata that are resident.
    pub(crate) fn metadata_bytes(&self) -> u64 {
        let of_nodes = self.nodes.metadata_bytes();
        of_nodes + self.ground.get().map_or(0, |ground| ground.blocks.metadata_bytes() + ground.resident_bytes())
    }

    pub(crate) fn acquire_for_fork(&self) {
        self.worker.acquire_for_fork();
        self.nodes.acquire_for_fork();
        self.members.acquire_when(|_| true);
        if let Some(ground) = self.ground.get() {
            ground.numbers.acquire_when(|_| true);
            ground.handles.acquire_when(|_| true);
            ground.blocks.acquire_for_fork();
        }
    }

    pub(crate) fn release_after_fork(&self) {
        if let Some(ground) = self.ground.get() {
            ground.blocks.release_after_fork();
            ground.handles.release();
            ground.numbers.release();
        }
        self.members.release();
        self.nodes.release_after_fork();
        self.worker.release_after_fork();
    }

    /// In a fork child: caches are the parent's, and no thread works here.
    pub(crate) fn begin_child(&self) {
        self.worker.begin_child();
        numbers::begin_child();
        readers::begin_child();
        if let Some(ground) = self.ground.get() {
            ground.blocks.begin_child();
        }
        // Here nobody is to have an owner of the parent's in his hands, and be the last.
        self.members.with(|members| std::mem::forget(std::mem::take(members)));
    }
}

impl Shrinker for Slabs {
    fn name(&self) -> &'static str {
        "slabs"
    }

    fn may_nest(&self) -> bool {
        false
    }

    fn giveable_bytes(&self) -> u64 {
        self.ground.get().map_or(0, |ground| ground.blocks.giveable_bytes())
    }

    /// Free blocks; then those that caches keep for their next object. At a limit magazines are emptied, too. From inside of
    /// `isolate`, whose caller has the lock of a node, free blocks only.
    fn shrink(&self, want_bytes: u64, urgency: Urgency) -> u64 {
        let Some(ground) = self.ground.get() else { return 0 };
        let mut freed = ground.blocks.shrink(want_bytes);
        if freed < want_bytes && !migrate::is_isolating() {
            freed += self.members().iter().map(|member| member.give_back(urgency)).sum::<u64>();
            freed += ground.blocks.shrink(want_bytes.saturating_sub(freed));
        }
        freed
    }
}
