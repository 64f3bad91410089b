//! A [`Testbed`]: one instance of Pagemill with all products (slab caches, page caches, volatile memory), for tests,
//! experiments and fuzz targets.
//!
//! Programs use the crate `pagemill`, whose products share one instance in each process. A test that counts memory
//! needs an instance of its own.

// Nothing here is modelled by loom.
#![cfg(not(loom))]

#[cfg(doctest)]
mod rejected_programs;

use pagemill_cache::IndexNodes;
use pagemill_cache::mapping::Caches;
use pagemill_core::arena::{Arena, Layout, place};
use pagemill_core::error::Result;
use pagemill_core::instance::Instance;
use pagemill_core::listing::StatsResponder;
use pagemill_core::reclaim::helper::Helper;
use pagemill_core::reclaim::{Account, Return, tree::UNLIMITED};
use pagemill_core::stats::Snapshot;
use pagemill_heap::Heap;
use pagemill_slab::Slabs;
use pagemill_volatile::{Base, Ranges, Vranges};

/// An instance of Pagemill with all products: slab caches, page caches and volatile memory. It exists until the process
/// ends.
///
/// ```
/// use pagemill_core::stats::Counter;
/// use pagemill_testbed::Testbed;
///
/// let testbed = Testbed::for_test();
/// let block = testbed.heap.allocate(1 << 20, 64)?;
/// // SAFETY: a new block of a MiB, not used after it was freed.
/// unsafe {
///     block.addr.as_ptr().write_bytes(1, 1 << 20);
///     assert!(testbed.figures().get(Counter::Resident) >= 1 << 20);
///     testbed.heap.free(block.addr.as_ptr() as usize)?;
/// }
/// # Ok::<(), pagemill_core::Error>(())
/// ```
pub struct Testbed {
    pub instance: &'static Instance,
    pub account: &'static Account,
    pub arena: &'static Arena,
    pub heap: &'static Heap,
    pub helper: &'static Helper,
    pub ranges: &'static Ranges,
    pub vranges: &'static Vranges,
    pub caches: &'static Caches,
    pub slabs: &'static Slabs,
    /// The slab cache of the nodes of all page-cache indices.
    pub nodes: &'static IndexNodes,
    pub responder: &'static StatsResponder,
}

impl Testbed {
    /// Creates a new instance with all products, separate from the one that the crate `pagemill` uses. Reserves address
    /// space; no memory becomes resident.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::System`] if the address space cannot be reserved.
    pub fn new(layout: Layout, limit_bytes: u64) -> Result<&'static Self> {
        Self::with_account(layout, Account::make(limit_bytes)?)
    }

    /// Creates a new instance like [`Testbed::new`], but charges its memory to an existing account instead of a new
    /// one.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::System`] if the address space cannot be reserved.
    pub fn with_account(layout: Layout, account: &'static Account) -> Result<&'static Self> {
        let base = Base::new(Instance::new(layout, account)?)?;
        let slabs = Slabs::of(base.instance)?;
        Self::with_products(base, slabs, Caches::of(base.instance, slabs)?)
    }

    /// Creates a small instance without a memory limit. Only explicit calls defragment its slab caches.
    ///
    /// # Panics
    ///
    /// If the address space cannot be reserved.
    pub fn for_test() -> &'static Self {
        let testbed = Self::new(Layout::for_test(), UNLIMITED).expect("address space for a test");
        testbed.slabs.defrag_by_hand();
        testbed
    }

    /// Returns the one instance of this process that the crate `pagemill` also uses, with all products.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::System`] if the address space cannot be reserved, or the exit or fork handlers cannot be
    /// registered.
    pub fn of_process() -> Result<&'static Self> {
        Self::with_products(Base::of_process()?, Slabs::of_process()?, Caches::of_process()?)
    }

    fn with_products(base: &'static Base, slabs: &'static Slabs, caches: &'static Caches) -> Result<&'static Self> {
        let Base { instance, heap, ranges, vranges } = *base;
        let Instance { account, arena, helper, responder, .. } = *instance;
        let nodes = place(IndexNodes::new(slabs))?;
        place(Self { instance, account, arena, heap, helper, ranges, vranges, caches, slabs, nodes, responder })
    }

    /// Measures the memory of the instance and returns its statistics, like [`Instance::figures`].
    pub fn figures(&self) -> Snapshot {
        self.instance.figures()
    }

    /// Measures the memory of the instance and publishes its statistics, like [`Instance::measure`].
    pub fn measure(&self) {
        self.instance.measure();
    }

    /// Sets after which time free memory returns to the system, as `Pagemill::set_return` does.
    pub fn set_return(&self, policy: Return) {
        self.instance.helper.set_return(policy);
    }
}
