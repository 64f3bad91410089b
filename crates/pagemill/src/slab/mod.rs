//! Slabs: caches of objects of one size, which give their memory back, and compact themselves where their objects can be moved.
//!
//! Kinds on one [`engine`]: objects of a [`Fixed`] cache stay where they are until they are dropped; those of a [`ByOwner`] one
//! are moved by who knows all that refer to them; those of a [`ByHandle`] one are reached through a table, and move by themselves.
//!
//! What a cache has lies in blocks of 2 MiB ([`blocks`]), cut into slabs of 16 to 64 KiB ([`shape`]), whose metadata lie apart
//! ([`meta`]). A thread takes and gives objects in a magazine of its own ([`magazine`], [`claim`]), by sheaves from the [`barn`] and
//! the slabs of a [`node`]. Who empties slabs takes what is in magazines first ([`seize`]), moves objects ([`defrag`]), and waits
//! for readers ([`batch`]).
//!
//! Below: `arena`, `sync`, `xarray` (its epochs). Above, by trait: `reclaim::Shrinker`. States, transitions, bounds: docs/slab.md.

mod barn;
mod batch;
mod blocks;
mod claim;
mod debug;
mod defrag;
mod engine;
mod fixed;
mod handle;
#[cfg(all(test, not(shuttle)))]
mod handle_tests;
mod handles;
mod info;
mod magazine;
mod meta;
#[cfg(all(test, not(shuttle)))]
mod model_tests;
mod node;
mod owner;
#[cfg(all(test, not(shuttle)))]
mod owner_tests;
mod seize;
mod shape;
#[cfg(all(test, shuttle))]
mod shuttle_tests;
#[cfg(all(test, not(shuttle)))]
mod tests;

pub use defrag::Progress;
pub use fixed::{Fixed, Slot};
pub use handle::{ByHandle, Guard, Handle, Movable, Pinned, pin};
pub use info::{NodeInfo, SlabInfo};
pub use owner::{ByOwner, Candidates, Done, Migrate, Moving, New, Target};

use crate::arena::{Arena, place};
use crate::error::{Error, Result};
use crate::reclaim::{Shrinker, Urgency};
use crate::sync::Guarded;
use barn::Yard;
use blocks::Blocks;
use engine::{Engine, Object};
use handles::Handles;
use magazine::Magazines;
use pagemill_sys::clock;
use std::alloc::Layout;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

/// Slab caches that a process can have at a time.
pub const MAX_CACHES: usize = 256;

/// A slab or block whose objects fill less than so many percent is worth emptying.
const DEFRAG_USED_RATIO: u32 = 30;

/// How a cache is to be.
#[derive(Clone, Debug)]
pub struct Settings {
    /// A word for reports: which cache of the program this is.
    pub name: String,
    /// Bytes of a slab: a power of two from 16 KiB and the OS page to 2 MiB. Chosen by the size of objects where it is `None`.
    pub slab_bytes: Option<usize>,
    /// Defragmentation in the background empties what is in use by less than so many percent: 0 nothing, 100 all that is not full.
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

/// What all caches share; made with the first of them.
struct Ground {
    blocks: Blocks,
    magazines: &'static Magazines,
    yard: &'static Yard,
    /// Numbers that caches have. One that could not be closed, or is a parent's, keeps its own.
    numbers: Guarded<[bool; MAX_CACHES]>,
    /// Tables of handles that no cache has.
    handles: Guarded<Vec<&'static Handles>>,
}

impl Ground {
    fn new(arena: &'static Arena) -> Result<Self> {
        Ok(Self {
            blocks: Blocks::new(arena)?,
            magazines: place(Magazines::new(MAX_CACHES)?)?,
            yard: place(Yard::new(MAX_CACHES * arena.nodes.count())?)?,
            numbers: Guarded::new([false; MAX_CACHES]),
            handles: Guarded::new(Vec::new()),
        })
    }

    fn take_number(&self) -> Option<usize> {
        self.numbers.with(|numbers| {
            let number = numbers.iter().position(|is_taken| !is_taken)?;
            numbers[number] = true;
            Some(number)
        })
    }

    fn take_handles(&self) -> Result<&'static Handles> {
        self.handles.with(Vec::pop).map_or_else(Handles::place, Ok)
    }

    /// Takes a table back of which no handle stands for anything.
    fn give_handles(&self, handles: &'static Handles) {
        self.handles.with(|free| free.push(handles));
    }

    fn give_number(&self, number: usize) {
        self.numbers.with(|numbers| numbers[number] = false);
    }
}

/// A cache as all of them see it.
trait Member: Send + Sync {
    fn engine(&self) -> &Engine;

    fn kind(&self) -> Kind;

    /// Packs its objects, where that takes no callback of its user.
    fn compact(&self) {}

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
        if urgency == Urgency::Limit {
            self.compact();
        }
        let _seized = (urgency == Urgency::Limit).then(|| engine.try_seize());
        let each = (0..engine.node_count()).map(|node| {
            engine.empty_barn(node);
            engine.trim(node, false)
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
    members: Guarded<Vec<Weak<dyn Member>>>,
}

impl Slabs {
    /// No memory, and no addresses, before the first cache.
    pub(crate) fn new(arena: &'static Arena) -> Self {
        Self { arena, ground: OnceLock::new(), members: Guarded::new(Vec::new()) }
    }

    /// Makes a cache whose objects stay where they are.
    ///
    /// # Errors
    ///
    /// [`Error::BadLength`], [`Error::BadAlignment`] for objects or slabs that cannot be, [`Error::BadRatio`],
    /// [`Error::NoAddresses`] where there are [`MAX_CACHES`], [`Error::System`].
    pub fn fixed<T>(&'static self, settings: Settings) -> Result<Fixed<T>> {
        let object = Object { layout: Layout::new::<T>(), user_bytes: size_of::<T>(), set_up: None };
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
        let no_number = || Error::NoAddresses { wanted_bytes: object.layout.size() as u64 };
        let number = ground.take_number().ok_or_else(no_number)?;
        let engine = Engine::new(ground, number, settings, object).inspect_err(|_| ground.give_number(number))?;
        let member = Arc::new(inner(engine));
        let weak: Weak<M> = Arc::downgrade(&member);
        self.members.with(|members| {
            members.retain(|member| member.strong_count() > 0);
            members.push(weak);
        });
        Ok(member)
    }

    /// Under the lock of the members.
    fn ground(&self) -> Result<&'static Ground> {
        if let Some(ground) = self.ground.get() {
            return Ok(ground);
        }
        let ground = place(Ground::new(self.arena)?)?;
        Ok(self.ground.get_or_init(|| ground))
    }

    fn members(&self) -> Vec<Arc<dyn Member>> {
        self.members.with(|members| members.iter().filter_map(Weak::upgrade).collect())
    }

    /// All caches that are this process's own, those with movable objects first, then by name.
    pub fn list(&self) -> Vec<SlabInfo> {
        let mut list: Vec<SlabInfo> =
            self.members().iter().filter_map(|member| info::of(member.engine(), member.kind()).ok()).collect();
        list.sort_by(|one, other| (one.kind == Kind::Fixed, &one.name).cmp(&(other.kind == Kind::Fixed, &other.name)));
        list
    }

    /// A step of defragmentation of all caches, by their ratios: for a thread in the background, or an idle moment. It calls owners of
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
        self.ground.get().map_or(0, |ground| {
            ground.blocks.metadata_bytes() + ground.magazines.resident_bytes(MAX_CACHES) + ground.yard.resident_bytes()
        })
    }

    pub(crate) fn acquire_for_fork(&self) {
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

    /// Free blocks; then those that caches keep for their next object. At a limit magazines are emptied, too.
    fn shrink(&self, want_bytes: u64, urgency: Urgency) -> u64 {
        let Some(ground) = self.ground.get() else { return 0 };
        let mut freed = ground.blocks.shrink(want_bytes);
        if freed < want_bytes {
            freed += self.members().iter().map(|member| member.give_back(urgency)).sum::<u64>();
            freed += ground.blocks.shrink(want_bytes.saturating_sub(freed));
        }
        freed
    }
}
