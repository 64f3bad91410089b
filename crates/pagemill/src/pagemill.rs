//! [`Pagemill`]: builds and owns all parts of one memory manager.
#![allow(unsafe_code)] // functions for fork handlers, which other callers must not call

use pagemill_cache::Slabs;
use pagemill_cache::mapping::Caches;
use pagemill_core::arena::{self, Arena, Layout};
use pagemill_core::epoch;
use pagemill_core::error::Result;
use pagemill_core::listing::{Measured, StatsResponder};
use pagemill_core::reclaim::helper::Helper;
use pagemill_core::reclaim::{self, Account};
use pagemill_core::stats::{self, Snapshot};
use pagemill_heap::Heap;
use pagemill_volatile::{Base, Ranges, Vranges};

/// All parts of one memory manager. The parts are built once and exist until the process ends.
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
    base: &'static Base,
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
        let base = Base::new(layout, account)?;
        let Base { arena, heap, helper, ranges, vranges, responder, control, .. } = *base;
        let slabs: &'static Slabs = arena::place(Slabs::new(arena))?;
        let caches: &'static Caches = arena::place(Caches::new(arena, slabs))?;
        let all_slabs: &'static pagemill_slab::Slabs = slabs;
        account.register(caches);
        account.register(all_slabs);
        responder.add(caches);
        responder.add(all_slabs);
        control.set_slabs(all_slabs);
        let pagemill: &'static Self =
            arena::place(Self { account, arena, heap, helper, ranges, vranges, caches, slabs, responder, base })?;
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

    /// Updates the counters that need a measurement, because no operation updates them.
    pub fn measure(&self) {
        self.caches.measure();
        self.base.measure_with(self.caches.metadata_bytes() + self.slabs.metadata_bytes());
    }

    /// Acquires all locks before `fork`, in the forking thread. Waits until no other thread purges or carves.
    ///
    /// # Safety
    ///
    /// The thread's next call to this Pagemill is [`Pagemill::after_fork`], both in the parent and in the child.
    pub unsafe fn before_fork(&self) {
        self.base.control.acquire_for_fork();
        self.slabs.acquire_for_fork();
        self.caches.acquire_for_fork();
        // SAFETY: the caller's promise.
        unsafe { self.base.before_fork() };
    }

    /// Releases the locks of [`Pagemill::before_fork`]: in the parent, and in the child before
    /// [`Pagemill::begin_child`].
    ///
    /// # Safety
    ///
    /// The thread has called [`Pagemill::before_fork`], and calls this once in each process.
    pub unsafe fn after_fork(&self) {
        // SAFETY: the caller's promise, for each.
        unsafe { self.base.after_fork() };
        // SAFETY: as above.
        unsafe { self.caches.release_after_fork() };
        // SAFETY: as above.
        unsafe { self.slabs.release_after_fork() };
        self.base.control.release_after_fork();
    }

    /// Resets counters, charges and the helper in a fork child. Memory that the child shares with the parent stays
    /// charged to the parent.
    ///
    /// # Safety
    ///
    /// The process is a fork child with one thread that has not called this yet, and no lock of this Pagemill is held.
    pub unsafe fn begin_child(&self) {
        let begin_others = || {
            // SAFETY: the caller's promise, for each.
            unsafe { epoch::begin_child() };
            // SAFETY: as above.
            unsafe { self.caches.begin_child() };
            // SAFETY: as above.
            unsafe { self.slabs.begin_child() };
        };
        // SAFETY: the caller's promise.
        unsafe { self.base.begin_child(begin_others) };
    }
}

impl Measured for Pagemill {
    fn measure(&self) {
        self.measure();
    }
}
