//! Slab allocator: caches of equally sized objects that return free memory to the system, and compact themselves if
//! objects can move.
//!
//! All kinds of caches share one `engine`. Objects of a [`Fixed`] cache keep their address until they are dropped.
//! Objects of a [`ByOwner`] cache are moved by their owner, which updates all references. Values of a [`ByHandle`] cache
//! are reached through a handle table, so the cache can move them by itself.
//!
//! A cache consists of blocks of 2 MiB (`blocks`), cut into slabs of 16 to 64 KiB (`shape`) with metadata out of line
//! (`meta`). A thread allocates and frees through its own magazine (`magazine`, `asymmetric_lock`, `thread_slots`).
//! Magazines are refilled from the `barn` sheaf by sheaf, or from the slabs of a `node`, which are set up on demand
//! (`supply`). Defragmentation drains the magazines (`drain`), chooses slabs (`defrag`, `candidates`), moves objects
//! (`migrate`), and waits for readers (`batch`, `epochs`). A background thread does this for all caches (`worker`).
//!
//! Uses `arena`, `sync` and `epoch`. Implements `reclaim::Shrinker`. Holds the nodes of an index (`xnodes`), which it does
//! not know.
//! States, transitions and bounds: docs/slab.md.

mod asymmetric_lock;
mod barn;
mod batch;
mod blocks;
mod candidates;
mod control;
mod debug;
mod deferred_drop;
mod defrag;
#[cfg(all(test, not(shuttle)))]
mod defrag_tests;
mod drain;
mod engine;
mod epochs;
mod fixed;
mod forked;
mod handle;
#[cfg(all(test, not(shuttle)))]
mod handle_tests;
mod handles;
mod info;
mod lists;
mod magazine;
mod meta;
mod migrate;
#[cfg(all(test, not(shuttle)))]
mod model_tests;
mod node;
#[cfg(all(test, not(shuttle)))]
mod node_tests;
mod owner;
#[cfg(all(test, not(shuttle)))]
mod owner_tests;
mod poison;
mod records;
mod shape;
#[cfg(all(test, shuttle))]
mod shuttle_tests;
mod stock;
mod supply;
#[cfg(all(test, not(shuttle)))]
mod tests;
mod thread_slots;
#[cfg(all(test, not(shuttle)))]
mod threads_tests;
mod worker;
#[cfg(all(test, not(shuttle)))]
mod worker_tests;
mod xnodes;

pub use epochs::{Guard, pin};
pub use fixed::{Fixed, Slot};
pub use handle::{ByHandle, Movable, Pinned};
pub use handles::Handle;
pub use info::{NodeInfo, SlabInfo};
pub use migrate::Progress;
pub use owner::{ByOwner, Candidates, Done, Migrate, Moving, New, Target};
pub use pagemill_core::listing::ShrinkReport;
pub use records::{ask_for_slabs, shown_name};
pub use xnodes::{NodeCache, NodeIndex, NodeMemory};

use asymmetric_lock::Barriers;
use barn::{BARNS, BarnMemory};
use batch::Grace;
use blocks::Blocks;
use engine::{Engine, Object};
use handles::Handles;
use magazine::MagazineRange;
use pagemill_core::arena::{Arena, place};
use pagemill_core::error::{Error, Result};
use pagemill_core::reclaim::{Shrinker, Urgency};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{Guarded, Relaxed};
use pagemill_sys::clock;
use std::alloc::Layout;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;
use worker::Worker;
use xnodes::IndexNodes;

/// Maximum number of slab caches of a process at a time. The count includes the cache of index nodes and, in a fork
/// child, the caches of the parent. Each cache reserves addresses for the magazines of all threads (32 MiB if available).
/// One more cache fails with [`Error::TooMany`].
pub const MAX_CACHES: usize = 1 << 10;

/// A slab or block that is used by less than this percentage is worth emptying.
const DEFRAG_USED_RATIO: u32 = 30;

/// Parameters of a cache.
///
/// ```
/// use pagemill::{Pagemill, slab::Settings};
///
/// let settings = Settings { defrag_used_ratio: 50, debug: true, ..Settings::new("sessions") };
/// let cache = Pagemill::of_process()?.slabs.by_handle::<u64>(settings)?;
/// assert!(cache.info()?.is_debug);
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Settings {
    /// Name of the cache in reports.
    pub name: String,
    /// Slab size in bytes: a power of two, at least 16 KiB and one OS page, at most 2 MiB. `None`: chosen by the object
    /// size.
    pub slab_bytes: Option<usize>,
    /// Defragmentation, by calls and in the background, empties slabs and blocks that are used by less than this
    /// percentage: 0 none, 100 all that are not full. The background runs owners' callbacks and the destructors of
    /// removed values on Pagemill's thread, except for caches with ratio 0 and after [`Slabs::defrag_by_hand`].
    pub defrag_used_ratio: u32,
    /// How often, in percent, a node without free objects takes those of other nodes before a new slab is set up.
    pub remote_node_defrag_ratio: u32,
    /// Debug mode: redzones, poison, and the callers that allocated and freed an object. Each call then costs a lock and
    /// a check of the object.
    pub debug: bool,
}

impl Settings {
    /// Slab size chosen by the object size, Linux's ratios, no debug checks.
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

/// Cache ids in use. A cache that could not be closed, or belongs to the parent process, keeps its id.
struct CacheIds {
    are_taken: [bool; MAX_CACHES],
    /// The magazine range of each id that was ever in use. These ids have barns, too.
    ranges: Vec<&'static MagazineRange>,
}

/// Shared state of all caches, created with the first one. The index nodes have a second one, with blocks of their own.
struct SharedState {
    slabs: &'static Slabs,
    blocks: Blocks,
    barriers: Barriers,
    barn_memory: &'static BarnMemory,
    ids: &'static Guarded<CacheIds>,
    /// Handle tables that no cache uses.
    handles: Guarded<Vec<&'static Handles>>,
}

impl SharedState {
    fn new(slabs: &'static Slabs, barriers: Barriers) -> Result<Self> {
        let arena = slabs.arena;
        Ok(Self {
            slabs,
            blocks: Blocks::new(arena)?,
            barriers,
            barn_memory: place(BarnMemory::new(MAX_CACHES * arena.nodes.count() * BARNS)?)?,
            ids: place(Guarded::new(CacheIds { are_taken: [false; MAX_CACHES], ranges: Vec::new() }))?,
            handles: Guarded::new(Vec::new()),
        })
    }

    fn for_metadata(&self) -> Result<Self> {
        let (blocks, handles) = (Blocks::for_metadata(self.slabs.arena)?, Guarded::new(Vec::new()));
        Ok(Self { blocks, handles, ..*self })
    }

    /// Takes the lowest free cache id and prepares its magazines and barns.
    ///
    /// # Errors
    ///
    /// [`Error::TooMany`], [`Error::System`].
    fn take_id(&self) -> Result<usize> {
        self.ids.with(|ids| {
            let free = ids.are_taken.iter().position(|is_taken| !is_taken);
            let number = free.ok_or(Error::TooMany { what: "slab caches", most: MAX_CACHES })?;
            if number == ids.ranges.len() {
                // A retry after an error opens the same barns again; a table that is reserved stays.
                let barns = self.barns_each();
                self.barn_memory.open(number * barns, barns)?;
                ids.ranges.push(Box::leak(Box::new(MagazineRange::new()?)));
            }
            ids.are_taken[number] = true;
            Ok(number)
        })
    }

    /// The magazine range of a cache id in use.
    fn range(&self, number: usize) -> &'static MagazineRange {
        self.ids.with(|ids| ids.ranges[number])
    }

    /// Number of barns of one cache.
    fn barns_each(&self) -> usize {
        self.slabs.arena.nodes.count() * BARNS
    }

    /// Resident bytes of magazines and barns.
    fn resident_bytes(&self) -> u64 {
        let of_magazines =
            |ids: &mut CacheIds| (ids.ranges.len(), ids.ranges.iter().map(|range| range.resident_bytes()).sum::<u64>());
        let (caches, bytes) = self.ids.with(of_magazines);
        bytes + self.barn_memory.resident_bytes(caches * self.barns_each())
    }

    fn take_handles(&self) -> Result<&'static Handles> {
        self.handles.with(Vec::pop).map_or_else(Handles::place, Ok)
    }

    /// Returns a handle table to the free list. None of its handles may be live.
    fn give_handles(&self, handles: &'static Handles) {
        self.handles.with(|free| free.push(handles));
    }

    fn give_id(&self, number: usize) {
        self.ids.with(|ids| ids.are_taken[number] = false);
    }
}

/// Operations on a cache of any kind, for code that handles all caches.
trait Member: Send + Sync {
    fn engine(&self) -> &Engine;

    fn kind(&self) -> CacheKind;

    /// Resident bytes of the handle table, if the cache has one.
    fn handle_bytes(&self) -> u64 {
        0
    }

    /// Objects that are no longer reachable but wait for readers.
    fn waiting(&self) -> u64 {
        self.engine().in_batches()
    }

    /// Packs the objects if that runs no user callback; else requests it from the background thread.
    fn compact(&self) {}

    /// The public `shrink` of the cache.
    fn shrink(&self) -> Result<u64>;

    /// Frees retired objects after their readers have finished, if that runs no user callback.
    fn tidy(&self) {}

    /// Frees retired objects after their readers have finished. Returns whether some still wait.
    fn finish_retired(&self) -> bool {
        self.engine().finish_retired_behind()
    }

    /// One step of defragmentation, if objects can be moved.
    fn defrag(&self, _budget: Duration) -> Result<Progress> {
        Ok(Progress { is_done: true, ..Progress::default() })
    }

    /// Frees what it can without user callbacks. Returns the bytes that went to the system, not counting free blocks.
    /// With `Limit`, magazines are drained, too.
    fn give_back(&self, urgency: Urgency) -> u64 {
        let engine = self.engine();
        if engine.check().is_err() {
            return 0;
        }
        self.tidy();
        if urgency == Urgency::Limit {
            self.compact();
        }
        let _drained = (urgency == Urgency::Limit).then(|| engine.try_drain_magazines());
        let each = (0..engine.node_count()).map(|node| {
            engine.empty_barns(node);
            engine.trim(node, node::Keep::Nothing)
        });
        each.sum()
    }
}

/// How objects of a cache can be moved.
///
/// Example: [`Slabs`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheKind {
    /// Objects keep their address.
    Fixed,
    /// The owner moves objects.
    ByOwner,
    /// Values are reached by handle, and the cache moves them.
    ByHandle,
}

/// All slab caches of a process.
///
/// ```
/// use pagemill::{Pagemill, slab::{CacheKind, Settings}};
///
/// let slabs = Pagemill::of_process()?.slabs;
/// let cache = slabs.fixed::<u64>(Settings::new("numbers"))?;
/// let info = slabs.list().into_iter().find(|info| &*info.name == "numbers").unwrap();
/// assert_eq!(info.kind, CacheKind::Fixed);
/// # drop(cache);
/// # Ok::<(), pagemill::Error>(())
/// ```
pub struct Slabs {
    arena: &'static Arena,
    shared: OnceLock<&'static SharedState>,
    /// In order of creation, each with a unique id.
    members: Guarded<Vec<(u64, Weak<dyn Member>)>>,
    made: AtomicU64,
    /// Bytes of idle blocks and empty slabs that caches keep, as of the last `measure()`.
    kept_bytes: AtomicU64,
    worker: Worker,
    /// The cache of index nodes and its shared state.
    nodes: IndexNodes,
}

impl Slabs {
    /// Reserves neither memory nor addresses before the first cache.
    pub fn new(arena: &'static Arena) -> Self {
        let (members, made) = (Guarded::new(Vec::new()), AtomicU64::new(0));
        let kept_bytes = AtomicU64::new(0);
        Self {
            arena,
            shared: OnceLock::new(),
            members,
            made,
            kept_bytes,
            worker: Worker::default(),
            nodes: IndexNodes::default(),
        }
    }

    /// Creates a cache of objects that keep their address.
    ///
    /// # Errors
    ///
    /// [`Error::BadLength`], [`Error::BadAlignment`] for unsupported object or slab sizes, [`Error::BadRatio`],
    /// [`Error::TooMany`] if there are [`MAX_CACHES`], [`Error::System`].
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
        self.make(settings, object, fixed::FixedInner::new).map(Fixed::new)
    }

    /// Creates the inner part of a cache under a new id and registers it.
    fn make<M: Member + 'static>(
        &'static self,
        settings: Settings,
        object: Object,
        inner: impl FnOnce(Engine) -> M,
    ) -> Result<Arc<M>> {
        let shared = self.members.with(|_| self.shared())?;
        let member = Self::make_on(shared, settings, object, inner)?;
        self.enter(&member);
        Ok(member)
    }

    /// As [`Slabs::make`], without registration; [`Slabs::enter`] registers it.
    fn make_on<M: Member + 'static>(
        shared: &'static SharedState,
        settings: Settings,
        object: Object,
        inner: impl FnOnce(Engine) -> M,
    ) -> Result<Arc<M>> {
        let number = shared.take_id()?;
        let engine = Engine::new(shared, number, settings, object).inspect_err(|_| shared.give_id(number))?;
        Ok(Arc::new(inner(engine)))
    }

    /// Registers a cache. It must be complete, because other threads call it at once.
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

    /// The shared state, created on the first call. Called under the lock of `members`.
    fn shared(&'static self) -> Result<&'static SharedState> {
        if let Some(shared) = self.shared.get() {
            return Ok(shared);
        }
        let shared = place(SharedState::new(self, Barriers::of_process())?)?;
        Ok(self.shared.get_or_init(|| shared))
    }

    /// Makes the process behave as if the kernel refused the process-wide barrier. Before the first cache.
    #[cfg(test)]
    fn refuse_barrier(&'static self) {
        let shared = place(SharedState::new(self, Barriers::OfEach).unwrap()).unwrap();
        assert!(self.shared.set(shared).is_ok());
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

    /// All caches of this process, not those of the parent: first those with movable objects, then by name.
    pub fn list(&self) -> Vec<SlabInfo> {
        let mut list: Vec<SlabInfo> = self.members().iter().filter_map(|member| info::of(&**member).ok()).collect();
        list.sort_by_cached_key(SlabInfo::rank);
        list
    }

    /// Stops background defragmentation. From here on caches are defragmented only by calls such as
    /// [`Slabs::defrag_step`], and no callback runs on a thread of Pagemill. Waits for the step in progress, at most one
    /// second.
    pub fn defrag_by_hand(&self) {
        self.worker.stop();
    }

    /// Runs one step of defragmentation over all caches, by their ratios. For a thread of the program or for idle time.
    /// It calls the owners of objects: do not call it where they may wait for the caller. Returns the progress of all
    /// caches together.
    pub fn defrag_step(&self, budget: Duration) -> Progress {
        let began_ns = clock::fine_ns();
        let mut whole = Progress { is_done: true, ..Progress::default() };
        for member in self.members().iter().filter(|member| member.engine().check().is_ok()) {
            let left = budget.saturating_sub(Duration::from_nanos(clock::fine_ns() - began_ns));
            // A cache that another thread is defragmenting is skipped.
            let part = if left.is_zero() { Ok(Progress::default()) } else { member.defrag(left) };
            whole.add(&part.unwrap_or_default());
        }
        whole
    }

    /// Resident bytes of metadata.
    pub fn metadata_bytes(&self) -> u64 {
        let of_nodes = self.nodes.metadata_bytes();
        of_nodes + self.shared.get().map_or(0, |shared| shared.blocks.metadata_bytes() + shared.resident_bytes())
    }

    pub fn acquire_for_fork(&self) {
        self.worker.acquire_for_fork();
        self.nodes.acquire_for_fork();
        self.members.acquire_when(|_| true);
        if let Some(shared) = self.shared.get() {
            shared.ids.acquire_when(|_| true);
            shared.handles.acquire_when(|_| true);
            shared.blocks.acquire_for_fork();
        }
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
        self.shared.get().map_or(0, |shared| shared.blocks.giveable_bytes() + self.kept_bytes.load(Relaxed))
    }

    /// Frees free blocks first, then the blocks and slabs that caches keep for their next objects. With `Limit`,
    /// magazines are drained, too. A call from inside of `isolate`, under the lock of a node, frees free blocks only.
    fn shrink(&self, want_bytes: u64, urgency: Urgency) -> u64 {
        let Some(shared) = self.shared.get() else { return 0 };
        let mut freed = shared.blocks.shrink(want_bytes);
        if freed < want_bytes && !migrate::is_isolating() {
            freed += self.members().iter().map(|member| member.give_back(urgency)).sum::<u64>();
            freed += shared.blocks.shrink(want_bytes.saturating_sub(freed));
            self.measure();
        }
        freed
    }

    /// Updates `kept_bytes`: what caches keep for their next objects.
    fn measure(&self) {
        if migrate::is_isolating() {
            return;
        }
        let members = (0..self.member_count()).filter_map(|at| self.member_at(at));
        let kept = members.map(|member| member.engine().kept_bytes()).sum();
        self.kept_bytes.store(kept, Relaxed);
        stats::set(Counter::SlabKept, kept);
    }
}
