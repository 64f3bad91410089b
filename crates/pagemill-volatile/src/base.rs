//! What every process with volatile memory has, beside the [`Instance`]: the heap, and the two kinds of volatile
//! ranges.
#![allow(unsafe_code)] // calls that only fork handlers may make

use crate::{RangeLists, Ranges, Vranges};
use pagemill_core::arena::place;
use pagemill_core::error::Result;
use pagemill_core::instance::{Instance, Part, PartOfProcess, Product};
use pagemill_heap::Heap;

/// The heap and the volatile ranges of a Pagemill instance. The preload library creates one `Base`, and so does every
/// program with volatile ranges of its own.
///
/// ```
/// use pagemill_core::arena::Layout;
/// use pagemill_core::instance::Instance;
/// use pagemill_core::reclaim::{Account, tree::UNLIMITED};
/// use pagemill_volatile::{Base, Behaviour};
///
/// let base = Base::new(Instance::new(Layout::for_test(), Account::make(UNLIMITED)?)?)?;
/// let range = base.ranges.allocate(1 << 20, Behaviour::Full)?;
/// assert!(base.instance.arena.contains(range.addr()));
/// # Ok::<(), pagemill_core::Error>(())
/// ```
pub struct Base {
    pub instance: &'static Instance,
    pub heap: &'static Heap,
    pub ranges: &'static Ranges,
    pub vranges: &'static Vranges,
}

impl Base {
    /// Creates the heap and the lists of ranges. Reserves address space; no memory becomes resident. Nothing is
    /// allocated from the global allocator, here or later.
    ///
    /// # Errors
    ///
    /// [`System`](pagemill_core::Error::System) if the address space cannot be reserved.
    ///
    /// # Panics
    ///
    /// If the instance has a heap already.
    pub fn new(instance: &'static Instance) -> Result<&'static Self> {
        let Instance { account, arena, helper, responder, .. } = *instance;
        // SAFETY: an arena has one instance, and `add` below panics if the instance has a heap already. The heap of
        // that call is not used then.
        let heap: &'static Heap = place(unsafe { Heap::new(arena, account, helper) }?)?;
        let ranges: &'static Ranges = place(Ranges::new(arena, heap)?)?;
        let vranges: &'static Vranges = place(Vranges::new(arena, account))?;
        let lists = place(RangeLists { ranges, vranges })?;
        let base: &'static Self = place(Self { instance, heap, ranges, vranges })?;
        instance.add(base);
        responder.add(lists);
        account.register(heap);
        account.register(vranges);
        account.register(ranges);
        Ok(base)
    }

    /// Returns the heap and the ranges of this process; the first call creates them.
    ///
    /// # Errors
    ///
    /// As [`Instance::of_process`].
    pub fn of_process() -> Result<&'static Self> {
        static OF_PROCESS: PartOfProcess<Base> = PartOfProcess::new();
        OF_PROCESS.get_or_create(Self::new)
    }
}

impl Part for Base {
    fn product(&self) -> Product {
        Product::Volatile
    }

    fn metadata_bytes(&self) -> u64 {
        self.heap.metadata_bytes() + self.ranges.metadata_bytes()
    }

    fn measure(&self) {
        self.ranges.measure_now();
        self.vranges.measure_now();
    }

    /// Acquires the locks of the heap and of the ranges. This waits until no purge runs and no slots are carved.
    fn acquire_for_fork(&self) {
        self.vranges.acquire_for_fork();
        self.ranges.acquire_for_fork();
        self.heap.acquire_for_fork();
    }

    unsafe fn release_after_fork(&self) {
        // SAFETY: the caller's promise, for each.
        unsafe { self.heap.release_after_fork() };
        // SAFETY: as above.
        unsafe { self.ranges.release_after_fork() };
        // SAFETY: as above.
        unsafe { self.vranges.release_after_fork() };
    }

    unsafe fn begin_child(&self) {
        self.ranges.begin_child();
        // SAFETY: the caller's promise.
        unsafe { self.vranges.begin_child() };
        self.heap.recount_free();
    }
}
