//! A process with page caches, for tests.

use crate::mapping::Caches;
use pagemill_core::arena::Layout;
use pagemill_core::instance::Instance;
use pagemill_core::reclaim::{Account, tree::UNLIMITED};
use pagemill_slab::Slabs;

/// Page caches of a Pagemill instance of their own, without a limit. Only explicit calls defragment the slab caches.
pub fn caches() -> &'static Caches {
    caches_with_limit(UNLIMITED).1
}

/// As [`caches`], with a limit for the memory of the instance. Also returns the account.
pub fn caches_with_limit(limit_bytes: u64) -> (&'static Account, &'static Caches) {
    let instance = Instance::new(Layout::for_test(), Account::make(limit_bytes).unwrap()).unwrap();
    let slabs = Slabs::of(instance).unwrap();
    slabs.defrag_by_hand();
    (instance.account, Caches::of(instance, slabs).unwrap())
}
