//! A process with page caches, for tests.

use crate::Slabs;
use crate::mapping::Caches;
use pagemill_core::arena::{Arena, Layout, place};
use pagemill_core::reclaim::{Account, tree::UNLIMITED};

/// The parts that tests use.
///
/// Example: [`TestProcess::for_test`].
pub struct TestProcess {
    pub caches: &'static Caches,
}

impl TestProcess {
    /// Creates a process without a memory limit and without background threads of slabs.
    pub fn for_test() -> Self {
        let account = Account::make(UNLIMITED).unwrap();
        let arena: &'static Arena = place(Arena::new(Layout::for_test(), account).unwrap()).unwrap();
        let slabs: &'static Slabs = place(Slabs::new(arena)).unwrap();
        let caches: &'static Caches = place(Caches::new(arena, slabs)).unwrap();
        account.register(caches);
        let of_slabs: &'static pagemill_slab::Slabs = slabs;
        account.register(of_slabs);
        slabs.defrag_by_hand();
        Self { caches }
    }
}
