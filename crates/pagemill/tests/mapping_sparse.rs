//! Tests of the background scan for sparse huge folios. The scan must split sparse huge folios that were not written
//! for a while, and no others.

mod common;

#[path = "common/source.rs"]
mod source;

use pagemill_cache::mapping::policy::Always;
use pagemill_cache::mapping::{Builder, Mapping, PageCache};
use pagemill_core::stats::{self, Counter};
use pagemill_core::units::{BLOCK_BYTES, PageSize};
use pagemill_store::Store;
use pagemill_testbed::Testbed;
use source::source;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const PAGE_BYTES: usize = 64 << 10;
const BLOCK: u64 = BLOCK_BYTES as u64;
const PAGES: usize = BLOCK_BYTES / PAGE_BYTES;

fn settings() -> Builder {
    let page = PageSize::new(PAGE_BYTES).unwrap();
    PageCache::builder("thin").source(source()).limit(64 << 20).page(page).policy(Always)
}

/// Creates a cache that uses huge folios wherever possible, and no background thread. The tests call the scan.
fn cache() -> PageCache {
    let caches = Testbed::for_test().caches;
    caches.collapse_by_hand();
    settings().build_in(caches).unwrap()
}

/// Creates a file with one huge folio for each item of `full_pages`. The item is the number of pages with data at the
/// start of the folio.
fn file(cache: &PageCache, full_pages: &[usize]) -> Mapping {
    let file = cache.create().unwrap();
    for (span, pages) in full_pages.iter().enumerate() {
        file.write_at(&vec![span as u8 + 1; pages * PAGE_BYTES], span as u64 * BLOCK).unwrap();
    }
    assert_eq!(cache.usage().huge, full_pages.len() as u64 * BLOCK);
    file
}

fn assert_contents(file: &Mapping, full_pages: &[usize]) {
    let mut bytes = vec![0xEE; BLOCK_BYTES];
    for (span, pages) in full_pages.iter().enumerate() {
        let len = file.read_at(&mut bytes, span as u64 * BLOCK).unwrap();
        let (full, rest) = bytes[..len].split_at(pages * PAGE_BYTES);
        assert!(full.iter().all(|byte| *byte == span as u8 + 1) && rest.iter().all(|byte| *byte == 0), "{span}");
    }
}

/// The second round of the scan must split sparse folios and no dense ones. Later rounds must not check the dense
/// folios again.
#[test]
fn sparse_folios_are_split_and_dense_ones_stay() {
    let cache = cache();
    // A folio must be split if at least a quarter of it is zero.
    let full = [1, PAGES / 2, PAGES - PAGES / 4, PAGES - PAGES / 4 + 1, PAGES];
    let file = file(&cache, &full);
    let split = stats::get(Counter::HugeSplitBehind);
    assert_eq!(cache.split_sparse_waiting(usize::MAX), 0, "just written");
    let freed: usize = full[..3].iter().map(|pages| PAGES - pages).sum();
    assert_eq!(cache.split_sparse_waiting(usize::MAX), (freed * PAGE_BYTES) as u64);
    assert!(stats::get(Counter::HugeSplitBehind) >= split + 3);
    let usage = cache.usage();
    assert_eq!((usage.huge, usage.charged), (2 * BLOCK, 5 * BLOCK - (freed * PAGE_BYTES) as u64), "{usage:?}");
    assert_eq!((cache.split_sparse_waiting(usize::MAX), cache.split_sparse_waiting(usize::MAX)), (0, 0));
    assert_contents(&file, &full);
}

/// A step of the scan must check no more folios than requested. Successive steps together must check each folio once.
#[test]
fn a_step_checks_the_requested_number_of_folios() {
    let cache = cache();
    let full = [1, 2, PAGES, 3];
    let file = file(&cache, &full);
    cache.split_sparse_waiting(usize::MAX);
    let freed: Vec<u64> = (0..5).map(|_| cache.split_sparse_waiting(1) / PAGE_BYTES as u64).collect();
    let each = |pages: usize| (PAGES - pages) as u64;
    assert_eq!(freed, [each(1), each(2), 0, each(3), 0]);
    assert_contents(&file, &full);
}

/// A sparse folio that is written between two rounds of the scan must not be split until there was no write for a whole
/// round. A pinned folio must not be split either.
#[test]
fn folios_in_use_are_not_split() {
    let cache = cache();
    let file = file(&cache, &[1, 1]);
    let pin = file.pin(BLOCK).unwrap();
    for _ in 0..5 {
        file.write_at(&[1; 8], 0).unwrap();
        assert_eq!(cache.split_sparse_waiting(usize::MAX), 0);
    }
    assert_eq!((cache.usage().huge, cache.usage().pinned), (BLOCK, BLOCK));
    let freed = BLOCK - PAGE_BYTES as u64;
    assert_eq!(cache.split_sparse_waiting(usize::MAX), freed, "the folio was not written since");
    pin.write_at(&[2; 8], 0).unwrap();
    drop(pin);
    assert_eq!([(); 2].map(|()| cache.split_sparse_waiting(usize::MAX)), [0, freed]);
    assert_contents(&file, &[1, 1]);
}

/// The scan finds a folio dense. The folio is removed, and its memory gets a new folio, of which only the end is written.
/// The scan must check the new folio.
#[test]
fn folios_with_a_hole_at_the_begin_are_split() {
    let cache = cache();
    let file = file(&cache, &[PAGES]);
    assert_eq!((0..4).map(|_| cache.split_sparse_waiting(1)).sum::<u64>(), 0, "the folio is dense");
    file.truncate(0).unwrap();
    file.write_at(&vec![7; BLOCK_BYTES / 2], BLOCK / 2).unwrap();
    assert_eq!(cache.usage().huge, BLOCK);
    let freed: u64 = (0..4).map(|_| cache.split_sparse_waiting(1)).sum();
    assert_eq!((freed, cache.usage().huge), (BLOCK / 2, 0));
}

/// Folios that the scan found dense are zeroed or truncated. The scan must then check them again.
#[test]
fn zeroed_folios_are_checked_again() {
    let cache = cache();
    let file = file(&cache, &[PAGES, PAGES]);
    assert_eq!([(); 3].map(|()| cache.split_sparse_waiting(usize::MAX)), [0; 3]);
    file.zero_range(PAGE_BYTES as u64, BLOCK - PAGE_BYTES as u64).unwrap();
    let pin = file.pin(BLOCK).unwrap();
    file.truncate(BLOCK + PAGE_BYTES as u64).unwrap();
    drop(pin);
    assert_eq!(cache.usage().huge, 2 * BLOCK, "a pinned folio is zeroed, not split");
    let freed = BLOCK - PAGE_BYTES as u64;
    assert_eq!([(); 3].map(|()| cache.split_sparse_waiting(usize::MAX)), [0, 2 * freed, 0]);
    assert_contents(&file, &[1, 1]);
}

/// The policy chooses huge folios wherever one fits. But where a sparse huge folio was split, no huge folio may be
/// allocated again, neither by reads of holes nor by writes to existing pages.
#[test]
fn split_folios_are_not_allocated_as_huge_again() {
    let cache = cache();
    let full = [1, PAGES / 2, 0];
    let file = cache.create().unwrap();
    file.truncate(3 * BLOCK).unwrap();
    assert_contents(&file, &[0, 0, 0]);
    assert_eq!(cache.usage().huge, 3 * BLOCK, "the policy chooses huge folios for reads of holes");
    file.write_at(&[1; PAGE_BYTES], 0).unwrap();
    file.write_at(&[2; BLOCK_BYTES / 2], BLOCK).unwrap();
    let split = [(); 2].map(|()| cache.split_sparse_waiting(usize::MAX));
    assert!(split.iter().sum::<u64>() > 0);
    let after = cache.usage();
    // One page of the folio of zeros remains, which prevents a new huge folio there.
    assert_eq!((after.huge, after.small), (0, ((1 + PAGES / 2 + 1) * PAGE_BYTES) as u64));
    for round in 0..6 {
        assert_contents(&file, &full);
        file.write_at(&[2; 8], BLOCK + round * PAGE_BYTES as u64).unwrap();
        cache.collapse_waiting(usize::MAX);
        assert_eq!(cache.split_sparse_waiting(usize::MAX), 0);
        assert_eq!((cache.usage().huge, cache.usage().charged), (0, after.charged));
    }
    // Once the last page of the range is written, the policy must be consulted again.
    file.write_at(&[2; PAGE_BYTES], 2 * BLOCK - PAGE_BYTES as u64).unwrap();
    assert_eq!(cache.collapse_waiting(usize::MAX), 1);
}

/// A store in memory, without holes.
#[derive(Default)]
struct VecStore(Mutex<Vec<u8>>);

impl Store for VecStore {
    fn size_bytes(&self) -> io::Result<u64> {
        Ok(self.0.lock().unwrap().len() as u64)
    }

    fn block_bytes(&self) -> usize {
        512
    }

    fn read(&self, offset: u64, to: &mut [u8]) -> io::Result<()> {
        to.fill(0);
        let (bytes, at) = (self.0.lock().unwrap(), offset as usize);
        let len = to.len().min(bytes.len().saturating_sub(at));
        to[..len].copy_from_slice(&bytes[at..at + len]);
        Ok(())
    }

    fn write(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        let (mut bytes, end) = (self.0.lock().unwrap(), offset as usize + from.len());
        let len = bytes.len().max(end);
        bytes.resize(len, 0);
        bytes[offset as usize..end].copy_from_slice(from);
        Ok(())
    }

    fn set_size(&self, size_bytes: u64) -> io::Result<()> {
        self.0.lock().unwrap().resize(size_bytes as usize, 0);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

/// Folios of files with a store must not be checked, and their data must be written back as before.
#[test]
fn folios_of_files_with_a_store_are_not_split() {
    let (cache, store) = (cache(), Arc::new(VecStore::default()));
    let file = cache.open(store.clone()).unwrap();
    file.truncate(BLOCK).unwrap();
    file.write_at(&[7; 100], 50).unwrap();
    assert_eq!([(); 3].map(|()| cache.split_sparse_waiting(usize::MAX)), [0; 3]);
    assert_eq!(cache.usage().huge, BLOCK);
    file.sync().unwrap();
    let bytes = store.0.lock().unwrap();
    assert!(bytes[50..150].iter().all(|byte| *byte == 7) && bytes.len() == BLOCK_BYTES);
}

/// A cache's settings forbid splits, and another cache has pages of the size of a huge folio. The scan must not split
/// their folios, even if these are sparse.
#[test]
fn unsplittable_folios_are_not_split() {
    let caches = Testbed::for_test().caches;
    caches.collapse_by_hand();
    let unsplittable = settings().split(false).build_in(caches).unwrap();
    let large = settings().page(PageSize::new(BLOCK_BYTES).unwrap()).build_in(caches).unwrap();
    let files = [&unsplittable, &large].map(|cache| file(cache, &[1]));
    assert_eq!([(); 3].map(|()| unsplittable.split_sparse_waiting(usize::MAX)), [0; 3]);
    assert_eq!((unsplittable.usage().huge, large.usage().huge), (BLOCK, BLOCK));
    drop(files);
}

fn thread_count() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

/// The background thread must split sparse folios without a call, some seconds after their last write. A fork child
/// must have no background thread until one of its own caches needs the thread.
#[test]
fn the_background_thread_splits_sparse_folios() {
    let cache = settings().build_in(common::pagemill().caches).unwrap();
    let begun = Instant::now();
    let file = file(&cache, &[1, PAGES]);
    common::assert_in_child(|| {
        let threads_before = thread_count();
        let own = settings().build_in(common::pagemill().caches).unwrap();
        let file = own.create().unwrap();
        let is_written = file.write_at(&[1; PAGE_BYTES], 0).is_ok() && file.write_at(&[1; PAGE_BYTES], BLOCK).is_ok();
        threads_before == 1 && is_written && thread_count() == 2
    });
    while cache.usage().huge > BLOCK {
        assert!(begun.elapsed() < Duration::from_secs(600), "{:?}", cache.usage());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(begun.elapsed() > Duration::from_millis(1500), "not at once");
    assert_contents(&file, &[1, PAGES]);
}
