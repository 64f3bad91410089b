//! Tests of accesses through views to pages that neither memory nor the store has: which of them get huge folios, and
//! what happens to huge folios that stay sparse.

use pagemill_cache::mapping::policy::{Always, Auto, Never};
use pagemill_cache::mapping::{PageCache, Policy, Source};
use pagemill_core::stats::{self, Counter};
use pagemill_core::units::{BLOCK_BYTES, PageSize};
use pagemill_store::MemoryStore;
use pagemill_testbed::Testbed;
use std::sync::{Arc, Mutex, MutexGuard};

const PAGE_BYTES: usize = 4 << 10;
const BLOCK: u64 = BLOCK_BYTES as u64;
const LIMIT_BYTES: u64 = 16 * BLOCK;

/// The tests compare counters of the process, so they run one after the other.
static ONE_BY_ONE: Mutex<()> = Mutex::new(());

/// Creates a cache without a background thread. The tests call its work.
fn cache(policy: impl Policy + 'static) -> (PageCache, MutexGuard<'static, ()>) {
    let guard = ONE_BY_ONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let caches = Testbed::for_test().caches;
    caches.collapse_by_hand();
    let builder = PageCache::builder("holes").limit(LIMIT_BYTES).policy(policy).source(Source::Shared);
    (builder.page(PageSize::new(PAGE_BYTES).unwrap()).build_in(caches).unwrap(), guard)
}

/// Returns the number of huge folios made since `before` ([`Counter::HugeAllocated`]), and the bytes of all folios. The
/// figures of [`PageCache::usage`] tell no sizes of mapped folios, which are pinned.
fn made(cache: &PageCache, before: u64) -> (u64, u64) {
    (stats::get(Counter::HugeAllocated) - before, cache.charged_bytes())
}

/// A policy that chooses a huge folio must get one at the first write, and all of it must be mapped by one fault. In a
/// range that ends behind the file, too.
#[test]
fn a_huge_folio_is_mapped_by_one_fault() {
    let (cache, _guard) = cache(Always);
    let before = stats::get(Counter::HugeAllocated);
    let file = cache.create().unwrap();
    file.truncate(3 * BLOCK + BLOCK / 2).unwrap();
    let view = file.view_mut(0..3 * BLOCK + BLOCK / 2).unwrap();
    let faults = stats::get(Counter::ViewFaults);
    view.write_at(b"in the middle", BLOCK_BYTES + 5000);
    assert_eq!(made(&cache, before), (1, BLOCK));
    view.write_at(&[1; BLOCK_BYTES], BLOCK_BYTES);
    assert_eq!(stats::get(Counter::ViewFaults) - faults, 1);
    view.write_at(b"behind the last whole range", 3 * BLOCK_BYTES);
    assert_eq!(made(&cache, before), (2, 2 * BLOCK));
    let mut found = vec![9; BLOCK_BYTES + 1];
    file.read_at(&mut found, BLOCK).unwrap();
    assert!(found[..BLOCK_BYTES].iter().all(|byte| *byte == 1) && found[BLOCK_BYTES] == 0);
}

/// Scattered accesses must bring small folios, whatever a view covers.
#[test]
fn scattered_accesses_get_small_folios() {
    let (cache, _guard) = cache(Auto);
    let before = stats::get(Counter::HugeAllocated);
    let new_file = || {
        let file = cache.create().unwrap();
        file.truncate(4 * BLOCK).unwrap();
        file
    };
    let page = PAGE_BYTES as u64;
    new_file().view(0..4 * BLOCK).unwrap().read_at(&mut [1], 7);
    new_file().view_private(0..4 * BLOCK).unwrap().read_at(&mut [1], 7);
    let file = new_file();
    let view = file.view_mut(page..4 * BLOCK).unwrap();
    for number in 0..300_u64 {
        view.write_at(&[1], (number * 7919 % 1023 * page) as usize);
    }
    assert_eq!(made(&cache, before), (0, 300 * page));
}

/// With other policies, reads follow the policy, too.
#[test]
fn policies_decide() {
    for (is_huge, policy) in [(true, Box::new(Always) as Box<dyn Policy>), (false, Box::new(Never))] {
        let (cache, _guard) = cache(policy);
        let before = stats::get(Counter::HugeAllocated);
        let file = cache.create().unwrap();
        file.truncate(2 * BLOCK).unwrap();
        let mut byte = [1];
        file.view(0..2 * BLOCK).unwrap().read_at(&mut byte, 0);
        file.view_mut(0..2 * BLOCK).unwrap().write_at(&[1], BLOCK_BYTES);
        assert_eq!((byte, made(&cache, before).0), ([0], if is_huge { 2 } else { 0 }));
    }
}

/// Scattered writes to a file larger than the cache must not use up its memory. Writes in order must get huge folios
/// from the second range on.
#[test]
fn files_larger_than_the_cache_get_huge_folios_in_order() {
    let (cache, _guard) = cache(Auto);
    let before = stats::get(Counter::HugeAllocated);
    let file = cache.create().unwrap();
    file.truncate(4 * LIMIT_BYTES).unwrap();
    let view = file.view_mut(0..4 * LIMIT_BYTES).unwrap();
    for span in 0..4 * LIMIT_BYTES / BLOCK {
        view.write_at(&[1], (span * BLOCK) as usize + 100);
    }
    assert_eq!(made(&cache, before), (0, 4 * LIMIT_BYTES / BLOCK * PAGE_BYTES as u64));
    let from = 9 * BLOCK_BYTES;
    file.punch_hole(0, 4 * LIMIT_BYTES).unwrap();
    for at in (from..from + 3 * BLOCK_BYTES).step_by(PAGE_BYTES) {
        view.write_at(&[1], at);
    }
    assert_eq!(made(&cache, before), (2, 3 * BLOCK));
    // The last page of the first range proposed a collapse, which unmaps the pages.
    assert_eq!(cache.collapse_waiting(10), 1);
    let mut found = vec![0; 3 * BLOCK_BYTES];
    view.read_at(&mut found, from);
    assert!((0..found.len()).all(|at| found[at] == u8::from(at.is_multiple_of(PAGE_BYTES))));
}

/// A huge folio would first have to read the bytes of the store. Behind them, writes in order must get huge folios, and
/// the store must get all bytes.
#[test]
fn files_with_a_store_get_huge_folios_behind_its_bytes() {
    let (cache, _guard) = cache(Auto);
    let before = stats::get(Counter::HugeAllocated);
    let store = Arc::new(MemoryStore::new(vec![7; BLOCK_BYTES], PAGE_BYTES));
    let file = cache.open(store.clone()).unwrap();
    file.truncate(4 * BLOCK).unwrap();
    let view = file.view_mut(0..4 * BLOCK).unwrap();
    for at in (0..4 * BLOCK_BYTES).step_by(PAGE_BYTES) {
        view.write_at(&[1], at);
    }
    assert_eq!(made(&cache, before), (3, 4 * BLOCK));
    drop(view);
    file.sync().unwrap();
    let rest = |at: usize| if at < BLOCK_BYTES { 7 } else { 0 };
    let bytes = store.bytes();
    assert_eq!(bytes.len(), 4 * BLOCK_BYTES);
    assert!((0..bytes.len()).all(|at| bytes[at] == if at.is_multiple_of(PAGE_BYTES) { 1 } else { rest(at) }));
}

/// A huge folio that stays sparse must be split while a view maps it, and the view must keep its bytes. A dense one must
/// stay mapped.
#[test]
fn sparse_folios_are_split_under_a_view() {
    let (cache, _guard) = cache(Always);
    let before = stats::get(Counter::HugeAllocated);
    let file = cache.create().unwrap();
    file.truncate(4 * BLOCK).unwrap();
    let view = file.view_mut(0..4 * BLOCK).unwrap();
    let dense = vec![3; BLOCK_BYTES];
    (0..3).for_each(|span| view.write_at(&[span as u8 + 1; 5000], span * BLOCK_BYTES + 100));
    view.write_at(&dense, 3 * BLOCK_BYTES);
    assert_eq!(made(&cache, before), (4, 4 * BLOCK));
    assert_eq!(cache.split_sparse_waiting(usize::MAX), 0, "new");
    let freed = cache.split_sparse_waiting(usize::MAX);
    assert_eq!(freed, 3 * (BLOCK - 2 * PAGE_BYTES as u64));
    assert_eq!(cache.charged_bytes(), BLOCK + 6 * PAGE_BYTES as u64);
    let unmapped = stats::get(Counter::ViewUnmapped);
    assert_eq!((0..3).map(|_| cache.split_sparse_waiting(usize::MAX)).sum::<u64>(), 0);
    assert_eq!(stats::get(Counter::ViewUnmapped), unmapped, "the dense folio stays mapped");
    for span in 0..3 {
        let mut found = vec![9; BLOCK_BYTES];
        view.read_at(&mut found, span * BLOCK_BYTES);
        let is_data = |at: &usize| (100..5100).contains(at);
        assert!((0..found.len()).all(|at| found[at] == if is_data(&at) { span as u8 + 1 } else { 0 }));
    }
}

/// Writes to a sparse file that fill the cache must find memory, because sparse folios are split then.
#[test]
fn sparse_folios_make_room_for_others() {
    let (cache, _guard) = cache(Always);
    let before = stats::get(Counter::HugeAllocated);
    let files: Vec<_> = (0..4).map(|_| cache.create().unwrap()).collect();
    let views: Vec<_> = files
        .iter()
        .map(|file| {
            file.truncate(LIMIT_BYTES / 2).unwrap();
            file.view_mut(0..LIMIT_BYTES / 2).unwrap()
        })
        .collect();
    for at in (0..LIMIT_BYTES as usize / 2).step_by(16 * PAGE_BYTES) {
        for (id, view) in views.iter().enumerate() {
            view.write_at(&[id as u8 + 1], at);
        }
    }
    let (huge, bytes) = made(&cache, before);
    assert!(huge > 0 && bytes <= LIMIT_BYTES, "{huge} huge folios, {bytes} B");
    for (id, view) in views.iter().enumerate() {
        for at in (0..LIMIT_BYTES as usize / 2).step_by(16 * PAGE_BYTES) {
            let mut found = [0; 2];
            view.read_at(&mut found, at);
            assert_eq!(found, [id as u8 + 1, 0]);
        }
        assert!(view.take_error().is_none());
    }
}
