//! A process with page caches, for tests.

use crate::mapping::Caches;
use pagemill_core::arena::Layout;
use pagemill_core::instance::Instance;
use pagemill_core::reclaim::{Account, tree::UNLIMITED};
use pagemill_slab::Slabs;

/// Page caches of a Pagemill instance of their own, without a limit. Only explicit calls defragment the slab caches.
pub fn caches() -> &'static Caches {
    let instance = Instance::new(Layout::for_test(), Account::make(UNLIMITED).unwrap()).unwrap();
    let slabs = Slabs::of(instance).unwrap();
    slabs.defrag_by_hand();
    Caches::of(instance, slabs).unwrap()
}
