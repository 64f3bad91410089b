//! The parts of a memory manager that every process has: arena, account, heap, volatile ranges, answers to other
//! processes.
#![allow(unsafe_code)] // calls that only fork handlers may make

use crate::{RangeLists, Ranges, Vranges};
use pagemill_core::arena::{Arena, Layout, place};
use pagemill_core::error::Result;
use pagemill_core::listing::control::ControlEndpoint;
use pagemill_core::listing::{Measured, StatsResponder};
use pagemill_core::reclaim::Account;
use pagemill_core::reclaim::helper::Helper;
use pagemill_core::stats::{self, Counter};
use pagemill_core::trace::{self, Event};
use pagemill_heap::Heap;
use pagemill_sys::{clock, process};

/// The parts that every process has. Built once and never torn down.
///
/// The preload library uses `Base` unchanged. The crate `pagemill` adds page caches and slab caches.
///
/// ```
/// use pagemill_core::arena::Layout;
/// use pagemill_core::reclaim::{Account, tree::UNLIMITED};
/// use pagemill_volatile::{Base, Behaviour};
///
/// let base = Base::new(Layout::for_test(), Account::make(UNLIMITED)?)?;
/// let range = base.ranges.allocate(1 << 20, Behaviour::Full)?;
/// assert!(base.arena.contains(range.addr()));
/// # Ok::<(), pagemill_core::Error>(())
/// ```
pub struct Base {
    pub account: &'static Account,
    pub arena: &'static Arena,
    pub heap: &'static Heap,
    pub helper: &'static Helper,
    pub ranges: &'static Ranges,
    pub vranges: &'static Vranges,
    /// Lists ranges for other processes.
    pub responder: &'static StatsResponder,
    /// Executes commands of other processes of the same user.
    pub control: &'static ControlEndpoint,
}

impl Base {
    /// Creates the parts. Reserves address space; no memory becomes resident. Nothing is allocated from the global
    /// allocator, here or later.
    ///
    /// # Errors
    ///
    /// [`System`](pagemill_core::Error::System) if the address space cannot be reserved.
    pub fn new(layout: Layout, account: &'static Account) -> Result<&'static Self> {
        let arena: &'static Arena = place(Arena::new(layout, account)?)?;
        let helper: &'static Helper = place(Helper::new(account))?;
        // SAFETY: the arena was created above and gets no other heap.
        let heap: &'static Heap = place(unsafe { Heap::new(arena, account, helper) }?)?;
        let ranges: &'static Ranges = place(Ranges::new(arena, heap)?)?;
        let vranges: &'static Vranges = place(Vranges::new(arena, account))?;
        let control: &'static ControlEndpoint = place(ControlEndpoint::new(account))?;
        let responder: &'static StatsResponder = place(StatsResponder::new(control))?;
        responder.add(place(RangeLists { ranges, vranges })?);
        stats::publish_arena_range(arena.addresses());
        account.register(heap);
        account.register_last(ranges);
        account.register_last(vranges);
        account.set_helper(helper);
        helper.set_answer(responder);
        place(Self { account, arena, heap, helper, ranges, vranges, responder, control })
    }

    /// Measures memory and publishes the statistics. `other_bytes` is the resident metadata of the parts that the crate
    /// `pagemill` adds.
    pub fn measure_with(&self, other_bytes: u64) {
        let now = clock::fine_ns();
        self.account.measure();
        self.ranges.measure_now();
        self.vranges.measure_now();
        self.account.publish();
        let own_bytes = self.arena.metadata_bytes() + self.heap.metadata_bytes() + self.ranges.metadata_bytes();
        stats::set(Counter::Metadata, own_bytes + other_bytes);
        stats::set(Counter::MeasuredAt, now);
    }

    /// Acquires the locks of these parts, in the thread that calls `fork`: waits until no purge and no carving runs.
    /// The caller first acquires the lock of the control endpoint, then the locks of the parts that the crate
    /// `pagemill` adds.
    ///
    /// # Safety
    ///
    /// The thread calls no other function of these parts before [`Base::after_fork`], and calls that function in the
    /// parent and in the child.
    pub unsafe fn before_fork(&self) {
        self.vranges.acquire_for_fork();
        self.ranges.acquire_for_fork();
        self.heap.acquire_for_fork();
        self.arena.acquire_for_fork();
        self.account.headroom.acquire_for_fork();
    }

    /// Releases the locks after `fork`: in the parent, and in the child before [`Base::begin_child`].
    ///
    /// # Safety
    ///
    /// The thread has called [`Base::before_fork`], and calls this function once in each of the two processes.
    pub unsafe fn after_fork(&self) {
        self.account.headroom.release_after_fork();
        // SAFETY: the caller's promise, for each.
        unsafe { self.arena.release_after_fork() };
        // SAFETY: as above.
        unsafe { self.heap.release_after_fork() };
        // SAFETY: as above.
        unsafe { self.ranges.release_after_fork() };
        // SAFETY: as above.
        unsafe { self.vranges.release_after_fork() };
    }

    /// Resets counts, charges and the helper in a fork child. Memory shared with the parent stays the parent's charge.
    /// Calls `begin_others`, which resets the parts that the crate `pagemill` adds, before the account is reset.
    ///
    /// # Safety
    ///
    /// The process is a child with one thread, created since the last call, and no lock of these parts is held.
    pub unsafe fn begin_child(&self, begin_others: impl FnOnce()) {
        process::forget_own_identity();
        // SAFETY: the caller's promise.
        unsafe { stats::detach_in_child() };
        stats::publish_arena_range(self.arena.addresses());
        // SAFETY: the caller's promise.
        let generation = unsafe { self.arena.forked() };
        self.helper.unclaim();
        self.ranges.begin_child();
        // SAFETY: the caller's promise.
        unsafe { self.vranges.begin_child() };
        self.control.begin_child();
        begin_others();
        self.heap.recount_free();
        self.account.forked(process::own_identity());
        trace::event(Event::Forked, u64::from(process::id()), u64::from(generation));
    }
}

impl Measured for Base {
    fn measure(&self) {
        self.measure_with(0);
    }
}
