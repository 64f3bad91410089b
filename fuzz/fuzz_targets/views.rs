//! Makes random calls on a file and its views of all kinds. Each eight bytes of the input are decoded as one call, and the
//! results are compared with a vector of bytes. The test `view_model` of the crate `pagemill` has the same model.
//!
//! Run it by `cargo +nightly fuzz run views`. The first byte of an input chooses the page size, whether there are huge
//! folios, and whether the file has a store.
#![no_main]

#[path = "../../crates/pagemill/tests/common/view_model.rs"]
mod model;

use libfuzzer_sys::fuzz_target;
use model::{Model, STEP_BYTES, Setting, Step};
use pagemill_cache::mapping::PageCache;
use std::cell::RefCell;
use std::collections::BTreeMap;

const PAGE_BYTES: [usize; 3] = [4 << 10, 64 << 10, 2 << 20];

thread_local! {
    /// The caches that were used so far, by the first byte of an input.
    static CACHES: RefCell<BTreeMap<u8, PageCache>> = const { RefCell::new(BTreeMap::new()) };
}

fuzz_target!(|data: &[u8]| {
    let Some((first, calls)) = data.split_first() else { return };
    let first = first % 12;
    let page_bytes = PAGE_BYTES[usize::from(first) / 4];
    let setting = Setting::new(page_bytes, first & 1 == 1, first & 2 == 2);
    let cache = CACHES.with_borrow_mut(|caches| caches.entry(first).or_insert_with(|| setting.cache()).clone());
    let steps: Vec<Step> = calls.as_chunks::<STEP_BYTES>().0.iter().map(|bytes| Step::decode(*bytes)).collect();
    Model::new(&cache, setting).run(&steps);
    assert_eq!(cache.charged_bytes(), 0);
});
