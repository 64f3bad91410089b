//! The paths that must be fast update no counter, so statistics cost them nothing: hits of the page cache, and
//! allocations that reuse free memory.
#![allow(unsafe_code)] // frees slots

use pagemill_cache::mapping::policy::{Always, Never};
use pagemill_cache::mapping::{FolioHint, Mapping, PageCache, Policy};
use pagemill_core::stats;
use pagemill_store::MemoryStore;
use pagemill_testbed::Testbed;
use std::sync::Arc;

const PAGE: u64 = 4096;
const MIB: usize = 1 << 20;
const REPETITIONS: u64 = 1000;

/// Runs `act` many times, and checks that no counter of the process has changed. The first runs may bring memory in.
fn assert_no_counter_changes(what: &str, mut act: impl FnMut(u64)) {
    (0..REPETITIONS).for_each(&mut act);
    let before = stats::snapshot();
    (0..REPETITIONS).for_each(&mut act);
    let after = stats::snapshot();
    let changed = stats::TABLE.iter().filter(|row| before.get(row.counter) != after.get(row.counter));
    let changed: Vec<&str> = changed.map(|row| row.name).collect();
    assert!(changed.is_empty(), "{what}: {changed:?}");
}

fn assert_hits_change_no_counter(what: &str, file: &Mapping) {
    let pages = file.size_bytes() / PAGE;
    let mut buffer = vec![0; PAGE as usize];
    let offset = |at: u64| at * 7 % pages * PAGE;
    assert_no_counter_changes(&format!("copies, {what}"), |at| {
        assert_eq!(file.read_at(&mut buffer, offset(at)).unwrap(), PAGE as usize);
    });
    assert_no_counter_changes(&format!("pins, {what}"), |at| {
        assert_eq!(file.pin(offset(at)).unwrap().read_u64(0), u64::from_ne_bytes([7; 8]));
    });
    let mut hint = FolioHint::default();
    assert_no_counter_changes(&format!("reads with a hint, {what}"), |at| {
        assert_eq!(file.read_at_hinted(&mut hint, &mut buffer[..8], offset(at)).unwrap(), 8);
    });
}

/// Hits of files with and without a store, in huge and in small folios, and pairs of `allocate` and `free` of sizes that
/// the workload of `bench ebizzy` uses. No background thread runs, and no other test of this process.
#[test]
fn hits_and_reused_memory_change_no_counter() {
    let pagemill = Testbed::for_test();
    pagemill.caches.collapse_by_hand();
    let policies: [(&str, Box<dyn Policy>); 2] = [("huge folios", Box::new(Always)), ("small folios", Box::new(Never))];
    for (folios, policy) in policies {
        let cache = PageCache::builder("hits").limit(64 << 20).policy(policy).build_in(pagemill.caches).unwrap();
        let memory = cache.create().unwrap();
        memory.write_at(&vec![7; 4 * MIB], 0).unwrap();
        assert_hits_change_no_counter(&format!("{folios}, without a store"), &memory);
        let stored = cache.open(Arc::new(MemoryStore::new(vec![7; 4 * MIB], 512))).unwrap();
        assert_hits_change_no_counter(&format!("{folios}, with a store"), &stored);
    }
    for len_bytes in [64 << 10, 256 << 10, MIB, 4 * MIB] {
        assert_no_counter_changes(&format!("slots of {len_bytes} bytes"), |_| {
            let slot = pagemill.heap.allocate(len_bytes, 64).unwrap().addr.as_ptr();
            // SAFETY: the slot was just allocated, is written inside of its length, and is not used after the free.
            unsafe {
                slot.write_bytes(1, len_bytes.min(1 << 16));
                pagemill.heap.free(slot as usize).unwrap();
            }
        });
    }
}
