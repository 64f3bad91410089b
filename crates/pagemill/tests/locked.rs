//! Tests of `Mapping::lock`: which pages stay in memory, how they are counted, and when a lock ends.

use pagemill_cache::mapping::policy::{Always, Never};
use pagemill_cache::mapping::{Mapping, PageCache, Policy, Source};
use pagemill_core::Error;
use pagemill_store::{Faults, FaultyStore, MemoryStore};
use pagemill_testbed::Testbed;
use std::sync::Arc;

const PAGE: usize = 4096;
const MIB: usize = 1 << 20;

fn cache(policy: impl Policy + 'static, limit_bytes: usize) -> PageCache {
    let pagemill = Testbed::for_test();
    pagemill.caches.collapse_by_hand();
    let builder = PageCache::builder("locked").limit(limit_bytes as u64).policy(policy).source(Source::Shared);
    builder.build_in(pagemill.caches).unwrap()
}

/// A file of 16 MiB whose store can be made to fail.
struct Stored {
    store: FaultyStore<MemoryStore>,
    file: Mapping,
}

impl Stored {
    const LEN: usize = 16 * MIB;

    fn new(cache: &PageCache) -> Self {
        let store = FaultyStore::new(MemoryStore::new(vec![7; Self::LEN], 512));
        Self { file: cache.open(Arc::new(store.clone())).unwrap(), store }
    }

    /// Reads all bytes from offset `from` on, which evicts other pages.
    fn read_from(&self, from: usize) {
        let mut buffer = vec![0; 64 << 10];
        (from..Self::LEN)
            .step_by(buffer.len())
            .for_each(|at| assert!(self.file.read_at(&mut buffer, at as u64).unwrap() > 0));
    }

    /// Counts the pages in memory of the first `len_bytes`: their pins succeed although the store fails.
    fn pages_in_memory(&self, len_bytes: usize) -> usize {
        self.store.set_faults(Faults { fail_per_mille: 1000, ..Faults::default() });
        let count = (0..len_bytes).step_by(PAGE).filter(|at| self.file.pin(*at as u64).is_ok()).count();
        self.store.set_faults(Faults::default());
        count
    }
}

/// Half of a small cache is locked twice. The locked pages must stay in memory while other pages are read and dropped,
/// with small and with huge folios, and must be written back. After the second `unlock` they must be evictable.
fn lock_and_unlock(policy: impl Policy + 'static) {
    let cache = cache(policy, 8 * MIB);
    let stored = Stored::new(&cache);
    let (file, locked) = (&stored.file, 2 * MIB as u64);
    file.lock(0..locked).unwrap();
    file.lock(0..locked).unwrap();
    assert_eq!(cache.usage().locked_ranges, 2 * locked);
    stored.read_from(2 * MIB);
    assert_eq!(stored.pages_in_memory(2 * MIB), 2 * MIB / PAGE);
    file.write_at(b"written", 100).unwrap();
    file.sync().unwrap();
    assert_eq!(file.dirty_bytes(), 0);
    assert!(file.dont_need(0, Stored::LEN as u64).unwrap() > 0);
    assert_eq!(stored.pages_in_memory(2 * MIB), 2 * MIB / PAGE);
    assert!(matches!(file.unlock(0..locked + 1), Err(Error::WrongState { .. })));
    file.unlock(0..locked).unwrap();
    stored.read_from(2 * MIB);
    assert_eq!(stored.pages_in_memory(2 * MIB), 2 * MIB / PAGE, "one lock is left");
    // Any range with the same pages ends the lock.
    file.unlock(1..locked - 1).unwrap();
    assert_eq!(cache.usage().locked_ranges, 0);
    assert!(matches!(file.unlock(0..locked), Err(Error::WrongState { .. })));
    file.dont_need(0, locked).unwrap();
    assert_eq!(stored.pages_in_memory(2 * MIB), 0);
}

#[test]
fn locked_small_pages_stay_in_memory() {
    lock_and_unlock(Never);
}

#[test]
fn locked_huge_folios_stay_in_memory() {
    lock_and_unlock(Always);
}

/// A range that does not fit into the cache, does not lie in the file, or cannot be read, must not stay locked.
#[test]
fn a_range_that_cannot_be_locked_is_refused() {
    let cache = cache(Never, 4 * MIB);
    let stored = Stored::new(&cache);
    let file = &stored.file;
    let refused = file.lock(0..8 * MIB as u64);
    assert!(matches!(refused, Err(Error::NoMemory { .. })), "more than the cache: {refused:?}");
    let len = Stored::LEN as u64;
    assert!(matches!(file.lock(len - 1..len + 1), Err(Error::PastEnd { .. })));
    let (start, end) = (5, 4);
    assert!(matches!(file.lock(start..end), Err(Error::BadOffset { .. })));
    file.dont_need(0, len).unwrap();
    stored.store.set_faults(Faults { fail_per_mille: 1000, ..Faults::default() });
    assert!(file.lock(0..PAGE as u64).is_err(), "the store fails");
    stored.store.set_faults(Faults::default());
    assert_eq!(cache.usage().locked_ranges, 0);
    file.lock(3..3).unwrap();
    assert_eq!(cache.usage().locked_ranges, 0, "an empty range");
    file.unlock(3..3).unwrap();
}

/// The locks belong to the file: they must outlast a handle and a view, and end with the last handle. Pages that a
/// truncation removes do not come back.
#[test]
fn locks_end_with_the_file() {
    let cache = cache(Never, 8 * MIB);
    let stored = Stored::new(&cache);
    let other = stored.file.clone();
    other.lock(0..MIB as u64).unwrap();
    drop(other);
    let view = stored.file.view(0..MIB as u64).unwrap();
    view.lock(0..MIB).unwrap();
    assert_eq!(cache.usage().locked_ranges, 2 * MIB as u64);
    drop(view);
    stored.read_from(MIB);
    assert_eq!((cache.usage().locked_ranges, stored.pages_in_memory(MIB)), (MIB as u64, MIB / PAGE));
    drop(stored);
    assert_eq!(cache.usage().locked_ranges, 0);

    let file = cache.create().unwrap();
    file.truncate(MIB as u64).unwrap();
    file.lock(0..MIB as u64).unwrap();
    assert_eq!(cache.charged_bytes(), MIB as u64, "a hole gets pages");
    file.truncate(0).unwrap();
    assert_eq!(cache.charged_bytes(), 0);
    file.unlock(0..MIB as u64).unwrap();
}
