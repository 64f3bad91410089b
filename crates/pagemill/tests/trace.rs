//! Trace events as another process reads them. The test has a process of its own, because the ring of events is short
//! and other tests would overwrite its events.

use pagemill_cache::mapping::policy::Always;
use pagemill_cache::mapping::{PageCache, Writeback};
use pagemill_core::stats;
use pagemill_core::trace;
use pagemill_core::units::{BLOCK_BYTES, PageSize};
use pagemill_store::{FaultyStore, MemoryStore};
use pagemill_sys::process;
use pagemill_testbed::Testbed;
use std::ffi::CString;
use std::sync::Arc;
use std::time::Duration;

/// A huge folio is created. Its event must have the page index, the file, the order and the cache in the right fields.
/// The drop of a file that waits for its store must leave an event with the number of dirty bytes.
#[test]
fn events_describe_new_huge_folios_and_slow_drops() {
    let folder = tempfile::tempdir().unwrap();
    let path = CString::new(folder.path().join("published").to_str().unwrap()).unwrap();
    stats::publish(&path, process::own_identity()).unwrap();
    let page = PageSize::new(64 << 10).unwrap();
    let caches = Testbed::for_test().caches;
    caches.collapse_by_hand();
    let settings = || PageCache::builder("traced").limit(64 << 20).page(page).policy(Always);
    let (_other, cache) = (settings().build_in(caches).unwrap(), settings().build_in(caches).unwrap());
    let files = [(); 4].map(|()| cache.create().unwrap());
    for (file, span) in files.iter().zip([2u64, 0, 5, 3]) {
        file.write_at(&vec![1; BLOCK_BYTES], span * BLOCK_BYTES as u64).unwrap();
    }
    let events = trace::read(&path, None).unwrap();
    let new_folios = events.iter().filter(|event| event.event == "folio_made");
    let numbers: Vec<_> = new_folios.map(|event| event.numbers.clone()).collect();
    let expected = [2u64, 0, 5, 3].iter().zip(0..);
    let expected: Vec<_> = expected
        .map(|(span, file)| vec![("page_index", span * 32), ("file", file), ("order", 5), ("cache", 1)])
        .collect();
    assert_eq!(format!("{numbers:?}"), format!("{expected:?}"));

    let store = FaultyStore::new(MemoryStore::new(vec![0; 64 << 10], 512));
    let writeback = Writeback::default().timeout(Duration::from_millis(50));
    let file = settings().writeback(writeback).build_in(caches).unwrap().open(Arc::new(store.clone())).unwrap();
    file.write_at(&[1], 0).unwrap();
    let dirty_bytes = file.dirty_bytes();
    store.hold();
    drop(file);
    store.release();
    let events = trace::read(&path, None).unwrap();
    let drops: Vec<_> = events.iter().filter(|event| event.event == "slow_drop").collect();
    let [(_, waited_us), (_, dirty)] = drops[0].numbers[..] else { panic!("{drops:?}") };
    assert!(drops.len() == 1 && waited_us >= 50_000 && dirty == dirty_bytes && dirty > 0, "{drops:?}");
}
