//! The handle that builds and owns everything of one process.
#![allow(unsafe_code)] // calls that only fork handlers may make

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
use crate::volatile::{RangeLists, Ranges, Vranges};
use pagemill_sys::{clock, process};

/// All parts of one process's memory manager. Built once and never torn down.
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
    /// Lists ranges and caches for other processes.
    pub responder: &'static StatsResponder,
    /// Executes commands on slab caches for other processes of the same user.
    pub(crate) control: &'static ControlEndpoint,
}

impl Pagemill {
    /// Reserves address space and creates the account; no memory becomes resident.
    ///
    /// Nothing is allocated from the global allocator, here or later.
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
        let control: &'static ControlEndpoint = arena::place(ControlEndpoint::new(account))?;
        control.set_slabs(slabs);
        let responder: &'static StatsResponder = arena::place(StatsResponder::new(control))?;
        responder.add(arena::place(RangeLists { ranges, vranges })?);
        responder.add(caches);
        responder.add(slabs);
        stats::describe_arena(arena.addresses());
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

    /// Builds a small one without a limit, for tests. Slab caches are defragmented by explicit calls only.
    ///
    /// # Panics
    ///
    /// If the address space cannot be reserved.
    pub fn for_test() -> &'static Self {
        let pagemill = Self::new(Layout::for_test(), reclaim::tree::UNLIMITED).expect("address space for a test");
        pagemill.slabs.defrag_by_hand();
        pagemill
    }

    /// Measures and returns the current figures: what the process holds, how much of it could be given back at once,
    /// and what was done so far. `pagemill meminfo` and `vmstat` show the same.
    ///
    /// Cost: some 20 us for each 64 MiB that is overcommitted or volatile; at most 20 ms for volatile memory. Call it
    /// outside every lock that a `free` may take.
    pub fn figures(&self) -> Snapshot {
        self.measure();
        stats::snapshot()
    }

    /// Updates the figures that are only known by measuring.
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

    /// Before `fork`, in the forking thread: waits until no purge and no carving is under way.
    ///
    /// # Safety
    ///
    /// The thread calls nothing else of this Pagemill before [`Pagemill::after_fork`], which it calls on both sides.
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

    /// After `fork`, in the parent, and in the child before [`Pagemill::begin_child`].
    ///
    /// # Safety
    ///
    /// The thread has called [`Pagemill::before_fork`], and releases those locks once.
    pub unsafe fn after_fork(&self) {
        self.account.headroom.release_after_fork();
        // SAFETY: the caller's promise: after `before_fork`.
        unsafe { self.arena.release_after_fork() };
        // SAFETY: as above.
        unsafe { self.heap.release_after_fork() };
        self.ranges.release_after_fork();
        self.vranges.release_after_fork();
        self.caches.release_after_fork();
        self.slabs.release_after_fork();
        self.control.release_after_fork();
    }

    /// In a child process: counts, charges and the helper start anew; what is shared with the parent is the parent's.
    ///
    /// # Safety
    ///
    /// The process is a child with one thread, made since the last call, and no lock of this Pagemill is held.
    pub unsafe fn begin_child(&self) {
        process::forget_own_identity();
        // SAFETY: the caller's promise.
        unsafe { stats::detach_in_child() };
        stats::describe_arena(self.arena.addresses());
        // SAFETY: the caller's promise.
        let generation = unsafe { self.arena.forked() };
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
