//! [`Pagemill`]: builds and owns all parts of one memory manager.
#![allow(unsafe_code)] // functions for fork handlers, which other callers must not call

use crate::arena::{self, Arena, Layout};
use crate::epoch;
use crate::error::Result;
use crate::heap::Heap;
use crate::listing::control::ControlEndpoint;
use crate::listing::{Measured, StatsResponder};
use crate::mapping::Caches;
use crate::reclaim::helper::Helper;
use crate::reclaim::{self, Account};
use crate::slab::Slabs;
use crate::stats::{self, Counter, Snapshot};
use crate::trace::{self, Event};
use crate::volatile::{Ranges, Vranges};
use pagemill_sys::{clock, process};

/// All parts of one memory manager. They are built once and exist until the process ends.
///
/// ```
/// use pagemill::{Pagemill, stats::Counter};
///
/// let pagemill = Pagemill::of_process()?;
/// let block = pagemill.heap.allocate(1 << 20, 64)?;
/// // SAFETY: a new block of a MiB, not used after it was freed.
/// unsafe {
///     block.addr.as_ptr().write_bytes(1, 1 << 20);
///     assert!(pagemill.figures().get(Counter::Resident) >= 1 << 20);
///     pagemill.heap.free(block.addr.as_ptr() as usize)?;
/// }
/// # Ok::<(), pagemill::Error>(())
/// ```
pub struct Pagemill {
    pub account: &'static Account,
    pub arena: &'static Arena,
    pub heap: &'static Heap,
    pub helper: &'static Helper,
    pub ranges: &'static Ranges,
    pub vranges: &'static Vranges,
    pub caches: &'static Caches,
    pub slabs: &'static Slabs,
    /// Answers requests of other processes for lists of ranges and caches and for figures.
    pub responder: &'static StatsResponder,
    /// Executes commands on slab caches for other processes of the same user.
    pub(crate) control: &'static ControlEndpoint,
}

impl Pagemill {
    /// Reserves address space and creates the account; no memory becomes resident.
    ///
    /// Neither this call nor later ones on the heap allocate from the global allocator.
    ///
    /// # Errors
    ///
    /// [`crate::Error::System`] if the address space cannot be reserved.
    pub fn new(layout: Layout, limit_bytes: u64) -> Result<&'static Self> {
        Self::with_account(layout, Account::make(limit_bytes)?)
    }

    /// As [`Pagemill::new`], with an existing account.
    ///
    /// # Errors
    ///
    /// As [`Pagemill::new`].
    pub fn with_account(layout: Layout, account: &'static Account) -> Result<&'static Self> {
        let arena: &'static Arena = arena::place(Arena::new(layout, account)?)?;
        let helper: &'static Helper = arena::place(Helper::new(account))?;
        let heap: &'static Heap = arena::place(Heap::new(arena, account, helper)?)?;
        let ranges: &'static Ranges = arena::place(Ranges::new(arena, heap)?)?;
        let vranges: &'static Vranges = arena::place(Vranges::new(arena, account))?;
        let slabs: &'static Slabs = arena::place(Slabs::new(arena))?;
        let caches: &'static Caches = arena::place(Caches::new(arena, slabs))?;
        let control: &'static ControlEndpoint = arena::place(ControlEndpoint::new(account, slabs))?;
        let responder: &'static StatsResponder =
            arena::place(StatsResponder::new((ranges, vranges), caches, slabs, control))?;
        stats::publish_arena_range(arena.addresses());
        account.register(heap);
        account.register(caches);
        account.register(slabs);
        account.register_last(ranges);
        account.register_last(vranges);
        account.set_helper(helper);
        helper.set_answer(responder);
        let pagemill: &'static Self =
            arena::place(Self { account, arena, heap, helper, ranges, vranges, caches, slabs, responder, control })?;
        responder.set_measured(pagemill);
        Ok(pagemill)
    }

    /// Creates a small Pagemill without a limit, for tests. Only explicit calls defragment its slab caches.
    ///
    /// # Panics
    ///
    /// If the address space cannot be reserved.
    pub fn for_test() -> &'static Self {
        let pagemill = Self::new(Layout::for_test(), reclaim::tree::UNLIMITED).expect("address space for a test");
        pagemill.slabs.defrag_by_hand();
        pagemill
    }

    /// Measures and returns the figures: memory that the process holds, how much of it could be returned at once, and
    /// the counters of all events. `pagemill meminfo` and `pagemill vmstat` show the same figures.
    ///
    /// Cost: some 20 us for each 64 MiB that is overcommitted or volatile; at most 20 ms for volatile memory. Call it
    /// outside every lock that a `free` may take.
    pub fn figures(&self) -> Snapshot {
        self.measure();
        stats::snapshot()
    }

    /// Updates the counters that are not kept current by each operation but need a measurement.
    pub fn measure(&self) {
        let now = clock::fine_ns();
        self.account.measure();
        self.ranges.measure_now();
        self.vranges.measure_now();
        self.account.publish();
        self.caches.measure();
        stats::set(
            Counter::Metadata,
            self.arena.metadata_bytes()
                + self.heap.metadata_bytes()
                + self.ranges.metadata_bytes()
                + self.caches.metadata_bytes()
                + self.slabs.metadata_bytes(),
        );
        stats::set(Counter::MeasuredAt, now);
    }

    /// Acquires all locks before `fork`, in the forking thread. Waits for purges and carving that other threads do.
    ///
    /// # Safety
    ///
    /// The thread's next call to this Pagemill is [`Pagemill::after_fork`], both in the parent and in the child.
    pub unsafe fn before_fork(&self) {
        self.control.acquire_for_fork();
        self.slabs.acquire_for_fork();
        self.caches.acquire_for_fork();
        self.vranges.acquire_for_fork();
        self.ranges.acquire_for_fork();
        self.heap.acquire_for_fork();
        self.arena.acquire_for_fork();
        self.account.headroom.acquire_for_fork();
    }

    /// Releases the locks of [`Pagemill::before_fork`]: in the parent, and in the child before
    /// [`Pagemill::begin_child`].
    ///
    /// # Safety
    ///
    /// The thread has called [`Pagemill::before_fork`], and calls this once in each process.
    pub unsafe fn after_fork(&self) {
        self.account.headroom.release_after_fork();
        self.arena.release_after_fork();
        self.heap.release_after_fork();
        self.ranges.release_after_fork();
        self.vranges.release_after_fork();
        self.caches.release_after_fork();
        self.slabs.release_after_fork();
        self.control.release_after_fork();
    }

    /// Resets counters, charges and the helper in a fork child. Memory that it shares with the parent stays charged to
    /// the parent.
    ///
    /// # Safety
    ///
    /// The process is a fork child with one thread that has not called this yet, and no lock of this Pagemill is held.
    pub unsafe fn begin_child(&self) {
        process::forget_own_identity();
        // SAFETY: the caller's promise.
        unsafe { stats::detach_in_child() };
        stats::publish_arena_range(self.arena.addresses());
        let generation = self.arena.forked();
        epoch::begin_child();
        self.helper.unclaim();
        self.ranges.begin_child();
        self.vranges.begin_child();
        self.caches.begin_child();
        self.control.begin_child();
        self.slabs.begin_child();
        self.heap.recount_free();
        self.account.forked(process::own_identity());
        trace::event(Event::Forked, u64::from(process::id()), u64::from(generation));
    }
}

impl Measured for Pagemill {
    fn measure(&self) {
        self.measure();
    }
}
