//! Tests of trace events as another process reads them. The test has a process of its own, because the ring of events
//! is short and other tests would overwrite its events.

use pagemill_cache::mapping::PageCache;
use pagemill_cache::mapping::policy::Always;
use pagemill_core::stats;
use pagemill_core::trace;
use pagemill_core::units::{BLOCK_BYTES, PageSize};
use pagemill_sys::process;
use pagemill_testbed::Testbed;
use std::ffi::CString;

/// The event of a new huge folio must have its page index, its file, its order and its cache in the right fields.
#[test]
fn the_event_of_a_new_huge_folio_describes_it() {
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
}
