//! Events of a process that publishes its figures, as another would read them. A process of its own: the ring is short.

use pagemill::mapping::Settings;
use pagemill::mapping::policy::Always;
use pagemill::trace;
use pagemill::units::{BLOCK_BYTES, PageSize};
use pagemill::{Pagemill, stats};
use pagemill_sys::process;
use std::ffi::CString;

/// A huge folio that comes into being is told of with its first page, its order, its file and its cache, each as what it is.
#[test]
fn a_folio_is_told_of_as_it_was_made() {
    let folder = tempfile::tempdir().unwrap();
    let path = CString::new(folder.path().join("figures").to_str().unwrap()).unwrap();
    stats::publish(&path, process::own_identity()).unwrap();
    let page = PageSize::new(64 << 10).unwrap();
    let caches = Pagemill::for_test().caches;
    caches.collapse_by_hand();
    let settings = || Settings { page, policy: Box::new(Always), ..Settings::new("traced", 64 << 20) };
    let (_other, cache) = (caches.make(settings()).unwrap(), caches.make(settings()).unwrap());
    let files = [(); 4].map(|()| cache.create().unwrap());
    for (file, span) in files.iter().zip([2u64, 0, 5, 3]) {
        file.write_at(&vec![1; BLOCK_BYTES], span * BLOCK_BYTES as u64).unwrap();
    }
    let events = trace::read(&path, None).unwrap();
    let made = events.iter().filter(|event| event.event == "folio_made");
    let told: Vec<_> = made.map(|event| event.numbers.clone()).collect();
    let expected = [2u64, 0, 5, 3].iter().zip(0..);
    let expected: Vec<_> = expected
        .map(|(span, file)| vec![("page_index", span * 32), ("file", file), ("order", 5), ("cache", 1)])
        .collect();
    assert_eq!(format!("{told:?}"), format!("{expected:?}"));
}
