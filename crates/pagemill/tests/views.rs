//! Tests of views: ranges of cached files as memory, compared with the bytes that reads return, while other threads
//! write, truncate, split, collapse and evict.
#![allow(unsafe_code)] // forks, accesses memory wrongly on purpose

use pagemill_cache::mapping::policy::{Always, Never};
use pagemill_cache::mapping::{Mapping, PageCache, Policy, Source, View};
use pagemill_core::Error;
use pagemill_core::stats::{self, Counter};
use pagemill_core::units::PageSize;
use pagemill_store::{Faults, FaultyStore, MemoryStore};
use pagemill_testbed::Testbed;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

const PAGE_BYTES: usize = 4 << 10;
const MIB: usize = 1 << 20;

fn cache(policy: Box<dyn Policy>, limit_bytes: usize) -> PageCache {
    let builder = PageCache::builder("views").limit(limit_bytes as u64).policy(policy).source(Source::Shared);
    builder.build_in(Testbed::for_test().caches).unwrap()
}

fn pattern(at: usize) -> u8 {
    (at / PAGE_BYTES * 31 + at) as u8
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(pattern).collect()
}

fn assert_view(view: &View, at: usize, expected: &[u8]) {
    let mut found = vec![0; expected.len()];
    view.read_at(&mut found, at);
    let wrong = (0..expected.len()).find(|at| found[*at] != expected[*at]);
    assert_eq!(wrong, None, "the first wrong byte, from {at} on");
}

/// Waits until no folio is charged: the background thread may just be collapsing folios of a file that was dropped.
fn assert_nothing_charged(cache: &PageCache) {
    let begun = std::time::Instant::now();
    while cache.charged_bytes() > 0 {
        assert!(begun.elapsed().as_secs() < 60, "{} bytes stay charged", cache.charged_bytes());
        thread::yield_now();
    }
}

/// Waits until no folio is in use: dropped views keep no pins, and the background thread holds a folio for a moment only.
fn assert_nothing_locked(cache: &PageCache) {
    let begun = std::time::Instant::now();
    while cache.usage().pinned > 0 {
        assert!(begun.elapsed().as_secs() < 60, "{} bytes stay in use", cache.usage().pinned);
        thread::yield_now();
    }
}

/// Views at offsets that are no multiples of the huge page, of files with huge folios, small folios and holes. They
/// must show the bytes of the file, also those written later, and holes as zeros.
#[test]
fn a_view_shows_the_bytes_of_its_file() {
    for policy in [Box::new(Always) as Box<dyn Policy>, Box::new(Never)] {
        let cache = cache(policy, 32 * MIB);
        let file = cache.create().unwrap();
        let content = bytes(5 * MIB + 100);
        file.write_at(&content, 0).unwrap();
        file.truncate(8 * MIB as u64).unwrap();
        for begin in [0, PAGE_BYTES, 2 * MIB, 3 * MIB + 5 * PAGE_BYTES] {
            let view = file.view(begin as u64..8 * MIB as u64).unwrap();
            assert_eq!(view.len_bytes(), 8 * MIB - begin);
            assert_eq!(view.as_ptr() as usize % (2 * MIB), begin % (2 * MIB), "congruent to the file");
            assert_view(&view, 0, &content[begin..]);
            assert_view(&view, 6 * MIB - begin, &vec![0; 2 * MIB]);
            let other = file.view(0..8 * MIB as u64).unwrap();
            file.write_at(b"changed", 4 * MIB as u64).unwrap();
            assert_view(&view, 4 * MIB - begin, b"changed");
            assert_view(&other, 4 * MIB, b"changed");
            file.write_at(&content[4 * MIB..4 * MIB + 7], 4 * MIB as u64).unwrap();
        }
        assert_nothing_locked(&cache);
    }
}

/// The file is split, collapsed, truncated and punched under a view. The view must show the bytes of the file after
/// each step, and the memory of the removed pages must become free.
#[test]
fn changes_of_the_file_are_visible() {
    let cache = cache(Box::new(Always), 32 * MIB);
    let file = cache.create().unwrap();
    let mut content = bytes(6 * MIB);
    file.write_at(&content, 0).unwrap();
    let view = file.view(0..6 * MIB as u64).unwrap();
    assert_view(&view, 0, &content);
    assert!(file.split(3 * MIB as u64).unwrap());
    assert_view(&view, 0, &content);
    file.punch_hole(2 * MIB as u64 + 8192, 100 * PAGE_BYTES as u64).unwrap();
    content[2 * MIB + 8192..2 * MIB + 8192 + 100 * PAGE_BYTES].fill(0);
    assert_view(&view, 0, &content);
    file.truncate(4 * MIB as u64 + 100).unwrap();
    file.truncate(6 * MIB as u64).unwrap();
    content[4 * MIB + 100..].fill(0);
    assert_view(&view, 0, &content);
    let held = file.hold(0).unwrap();
    drop(held);
    assert_view(&view, 0, &content);
    drop(view);
    drop(file);
    assert_nothing_charged(&cache);
}

/// A file of a store, four times the size of the cache, is viewed as a whole by several threads in random order, while
/// another thread writes and syncs. All bytes must be right, and the cache must stay within its limit.
#[test]
fn views_of_a_store_evict_each_other() {
    let len = 16 * MIB;
    let cache = cache(Box::new(Never), 4 * MIB);
    let store = Arc::new(MemoryStore::new(bytes(len), 512));
    let file = cache.open(store.clone()).unwrap();
    let view = file.view(0..len as u64).unwrap();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let readers: Vec<_> = (0..4_u64)
            .map(|seed| {
                let view = &view;
                scope.spawn(move || {
                    let mut random = seed + 1;
                    for _ in 0..20_000 {
                        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                        let at = (random >> 33) as usize % (len - 8);
                        let mut found = [0; 8];
                        view.read_at(&mut found, at);
                        let expected: [u8; 8] = std::array::from_fn(|byte| pattern(at + byte));
                        assert_eq!(found, expected, "at {at}");
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            let mut at = 0;
            while !is_over.load(Relaxed) {
                let piece: Vec<u8> = (at..at + 10_000).map(pattern).collect();
                file.write_at(&piece, at as u64).unwrap();
                file.sync().unwrap();
                assert!(cache.charged_bytes() <= 4 * MIB as u64);
                at = (at + 777_777) % (len - 10_000);
            }
        });
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        is_over.store(true, Relaxed);
    });
    drop(view);
    file.close().map_err(|(_, error)| error).unwrap();
    assert!(store.bytes() == bytes(len));
}

/// Threads read through views while others truncate, punch, split and write whole pages of one byte value each. A read
/// of one word must find one of the values that were written, or zero.
#[test]
fn concurrent_changes_never_show_other_bytes() {
    let cache = cache(Box::new(Always), 16 * MIB);
    let (file, other) = (cache.create().unwrap(), cache.create().unwrap());
    let len = 4 * MIB;
    file.truncate(len as u64).unwrap();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let readers: Vec<_> = (0..3_u64)
            .map(|seed| {
                let (file, view) = (&file, file.view(0..len as u64).unwrap());
                scope.spawn(move || {
                    let mut random = seed;
                    for _ in 0..30_000 {
                        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        // The first half is never cut off.
                        let at = (random >> 33) as usize % (len / 2 / 8) * 8;
                        let mut word = [0; 8];
                        view.read_at(&mut word, at);
                        assert!(word[0] < 100, "{word:?} are bytes of the other file");
                    }
                    let _ = file;
                })
            })
            .collect();
        let change = |seed: u64| {
            let mut random = seed;
            while !is_over.load(Relaxed) {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let page = (random >> 40) % (len / PAGE_BYTES) as u64;
                let offset = page * PAGE_BYTES as u64;
                match random >> 33 & 7 {
                    0 => drop(file.punch_hole(offset, 3 * PAGE_BYTES as u64).unwrap()),
                    1 => file.truncate(len as u64 / 2 + offset / 2).unwrap(),
                    2 => drop(file.split(offset)),
                    3 => file.truncate(len as u64).unwrap(),
                    4 => drop(other.write_at(&[200; 8 * PAGE_BYTES], offset).unwrap()),
                    5 => drop(other.punch_hole(0, len as u64).unwrap()),
                    _ => drop(file.write_at(&[(random >> 50) as u8 % 100; PAGE_BYTES], offset)),
                }
            }
        };
        (10..12).for_each(|seed| drop(scope.spawn(move || change(seed))));
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        is_over.store(true, Relaxed);
    });
    drop((file, other));
    assert_nothing_charged(&cache);
}

/// Returns the number of the process's mappings that lie in a view.
fn mapping_count(view: &View) -> usize {
    let (begin, end) = (view.as_ptr() as usize, view.as_ptr() as usize + view.len_bytes());
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let addresses = maps.lines().map(|line| line.split([' ', '-']).take(2).map(|text| usize::from_str_radix(text, 16)));
    let ranges = addresses.map(|mut range| (range.next().unwrap().unwrap(), range.next().unwrap().unwrap()));
    ranges.filter(|(from, to)| *from < end && *to > begin).count()
}

/// More pages are read through views than a process may have mappings, first from the end of a large window. All bytes
/// must be right, and the mappings must stay below the limit. When the pages are removed, their mappings must merge.
#[test]
fn mappings_stay_below_their_limit() {
    let max_mappings: usize = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap().trim().parse().unwrap();
    if max_mappings > 100_000 {
        return println!("skipped: the test would need {max_mappings} pages");
    }
    let cache = cache(Box::new(Never), 256 * MIB);
    let file = cache.create().unwrap();
    let pages = max_mappings / 2;
    // Every second page has a folio, so that adjacent mappings do not merge.
    let begin = 8 * MIB;
    for page in (0..pages).step_by(2) {
        file.write_at(&[page as u8 | 1; PAGE_BYTES], (begin + page * PAGE_BYTES) as u64).unwrap();
    }
    file.truncate(1 << 34).unwrap();
    let view = file.view(0..1 << 34).unwrap();
    for _ in 0..2 {
        for page in (0..pages).step_by(2).rev() {
            let mut bytes = [0; 2];
            view.read_at(&mut bytes, begin + page * PAGE_BYTES);
            assert_eq!(bytes, [page as u8 | 1; 2], "page {page}");
        }
        assert!(mapping_count(&view) <= max_mappings / 2 + 100);
        assert!(stats::get(Counter::ViewUnmappedForLimit) > 0);
    }
    file.truncate(0).unwrap();
    assert!(mapping_count(&view) <= 2, "{} mappings are left", mapping_count(&view));
}

/// A range with huge folios is prefaulted. The first access to each page must then be possible in a system call.
#[test]
fn prefaulted_ranges_can_be_passed_to_system_calls() {
    use std::io::Write;
    let cache = cache(Box::new(Always), 32 * MIB);
    let file = cache.create().unwrap();
    let content = bytes(8 * MIB);
    file.write_at(&content, 0).unwrap();
    let view = file.view(PAGE_BYTES as u64..8 * MIB as u64).unwrap();
    let prefaulted = view.prefault(0..view.len_bytes()).unwrap();
    assert!(mapping_count(&view) <= 8, "{} mappings", mapping_count(&view));
    // SAFETY: no other thread changes the file.
    let range = unsafe { std::slice::from_raw_parts(view.as_ptr(), view.len_bytes()) };
    let mut target = tempfile::tempfile().unwrap();
    target.write_all(range).unwrap();
    assert_eq!(target.metadata().unwrap().len(), (8 * MIB - PAGE_BYTES) as u64);
    assert!(matches!(file.split(0), Err(Error::Busy { .. })), "the pages are pinned");
    drop(prefaulted);
    assert!(file.split(0).unwrap());
    // One page keeps its whole folio, of which another page was accessed, too.
    assert!(file.collapse(0).unwrap());
    let page = view.prefault(0..1).unwrap();
    view.read_at(&mut [0], MIB);
    assert!(matches!(file.split(0), Err(Error::Busy { .. })));
    target.write_all(&range[..PAGE_BYTES]).unwrap();
    drop(page);
    let kept = view.prefault(0..2 * MIB).unwrap();
    file.truncate(MIB as u64).unwrap();
    drop(kept);
    assert_view(&view, 0, &content[PAGE_BYTES..MIB]);
    // Pages behind the end cannot be prefaulted, even if their huge folio is in memory.
    let short = cache.create().unwrap();
    short.write_at(&content[..MIB], 0).unwrap();
    let view = short.view(0..2 * MIB as u64).unwrap();
    drop(view.prefault(0..MIB).unwrap());
    assert!(matches!(view.prefault(0..2 * MIB), Err(Error::PastEnd { .. })));
}

/// Ranges that are empty or misaligned, and caches without shared memory, must be refused.
#[test]
fn invalid_views_fail() {
    let shared = cache(Box::new(Never), 8 * MIB);
    let file = shared.create().unwrap();
    file.write_at(&[1; 100], 0).unwrap();
    assert!(matches!(file.view(0..0), Err(Error::BadRange { .. })));
    assert!(matches!(file.view(100..200), Err(Error::BadRange { .. })));
    assert!(matches!(file.view(0..u64::MAX), Err(Error::BadOffset { .. })));
    assert!(matches!(file.view(0..1 << 62), Err(Error::NoAddresses { .. })));
    let view = file.view(0..PAGE_BYTES as u64 * 4).unwrap();
    assert!(matches!(view.prefault(0..5 * PAGE_BYTES), Err(Error::PastEnd { .. })));
    assert!(matches!(view.prefault(PAGE_BYTES..2 * PAGE_BYTES), Err(Error::PastEnd { .. })));
    drop(view.prefault(0..100).unwrap());
    let private = PageCache::builder("private").limit(8 << 20).build_in(Testbed::for_test().caches).unwrap();
    let file = private.create().unwrap();
    assert!(matches!(file.view(0..PAGE_BYTES as u64), Err(Error::Unsupported { .. })));
}

/// Views are made and dropped while other threads read through views of the same file.
#[test]
fn views_come_and_go() {
    let cache = cache(Box::new(Always), 32 * MIB);
    let file = cache.create().unwrap();
    let content = bytes(4 * MIB);
    file.write_at(&content, 0).unwrap();
    thread::scope(|scope| {
        for seed in 0..4 {
            let (file, content): (&Mapping, &[u8]) = (&file, &content);
            scope.spawn(move || {
                for round in 0..300 {
                    let begin = (seed * 100 + round) % 1000 * PAGE_BYTES;
                    let view = file.view(begin as u64..begin as u64 + 8192).unwrap();
                    assert_view(&view, 0, &content[begin..begin + 8192]);
                }
            });
        }
    });
    assert_nothing_locked(&cache);
}

/// A store fails. A child process must get a `SIGBUS`, and `prefault` must return the error of the store.
#[test]
fn errors_of_the_store_are_reported() {
    let cache = cache(Box::new(Never), 8 * MIB);
    let store = FaultyStore::new(MemoryStore::new(bytes(MIB), 512));
    let file = cache.open(Arc::new(store.clone())).unwrap();
    let view = file.view(0..MIB as u64).unwrap();
    store.set_faults(Faults { fail_per_mille: 1000, ..Faults::default() });
    assert!(matches!(view.prefault(0..MIB), Err(Error::Store { .. })));
    store.set_faults(Faults::default());
    drop(view.prefault(0..MIB).unwrap());
    assert_view(&view, 0, &bytes(MIB));
}

/// Set in the child process of a test that compares counters, in which no other test runs.
const COUNTS_ENV: &str = "VIEWS_COUNTS";

/// More threads than the cache has pages access a view. A thread that finds all pages in use must wait for one: `SIGBUS`
/// would end the process.
#[test]
fn threads_wait_for_a_page() {
    let cache = cache(Box::new(Never), PAGE_BYTES);
    let content = bytes(64 * PAGE_BYTES);
    let file = cache.open(Arc::new(MemoryStore::new(content.clone(), PAGE_BYTES))).unwrap();
    let view = file.view(0..content.len() as u64).unwrap();
    thread::scope(|scope| {
        for id in 0..4_usize {
            let (view, content) = (&view, &content);
            scope.spawn(move || {
                for round in 0..3000 {
                    let at = (round * 7919 + id * 31) % 64 * PAGE_BYTES + round % PAGE_BYTES;
                    let mut found = [0];
                    view.read_at(&mut found, at);
                    assert_eq!(found, [content[at]], "thread {id}, round {round}");
                }
            });
        }
    });
    assert!(view.take_error().is_none());
}

/// Runs a test again in a child process. Returns false in that process.
fn is_run_in_child(test: &str) -> bool {
    if std::env::var(COUNTS_ENV).is_ok() {
        return false;
    }
    let output = Command::new(std::env::current_exe().unwrap()).args([test, "--exact"]).env(COUNTS_ENV, "1").output();
    let output = output.unwrap();
    assert!(output.status.success(), "{} {}", output.status, String::from_utf8_lossy(&output.stdout));
    true
}

/// Pages are accessed through a view in a process without other views. The counters must have the number of faults, of
/// pages that fills read, and of mappings. `vmstat` shows the counters.
#[test]
fn faults_and_mappings_are_counted() {
    if is_run_in_child("faults_and_mappings_are_counted") {
        return;
    }
    let assert_counts = |faults: u64, fills: u64, mappings: u64, unmapped: u64| {
        let counters = [Counter::ViewFaults, Counter::ViewFills, Counter::ViewMappings, Counter::ViewUnmapped];
        assert_eq!(counters.map(stats::get), [faults, fills, mappings, unmapped]);
    };
    let (page_bytes, len) = (64 << 10, 4 * MIB);
    let page = PageSize::new(page_bytes).unwrap();
    let builder = PageCache::builder("counted").limit(8 << 20).page(page).huge(false).source(Source::Shared);
    let cache = builder.build_in(Testbed::for_test().caches).unwrap();
    let file = cache.open(Arc::new(MemoryStore::new(bytes(len), 512))).unwrap();
    file.read_at(&mut [0], 0).unwrap();
    let view = file.view(0..len as u64).unwrap();
    assert_counts(0, 0, 0, 0);
    let max_mappings: u64 = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap().trim().parse().unwrap();
    assert_eq!(stats::get(Counter::ViewMappingsMax), max_mappings / 4);
    // All of a software page is mapped by one fault. Pages that are not in memory are filled first.
    assert_view(&view, 0, &bytes(page_bytes));
    assert_counts(1, 0, 1, 0);
    let last = len - page_bytes;
    assert_view(&view, last, &bytes(len)[last..]);
    assert_counts(2, 1, 2, 0);
    file.truncate(last as u64).unwrap();
    assert_counts(2, 1, 1, 1);
    view.lock(0..page_bytes).unwrap();
    assert_eq!(stats::get(Counter::CacheLocked), page_bytes as u64);
    drop(view);
    assert_counts(2, 1, 0, 1);
    assert_eq!(stats::get(Counter::CacheLocked), 0);
    assert_eq!(stats::get(Counter::ViewUnmappedForLimit), 0);
    assert_eq!(stats::get(Counter::ViewFaultsFailed), 0);
}

/// All pages of a file are in memory, and are read through a fresh view: forwards, backwards, and in random order. Each
/// group of 16 pages must take one fault and one mapping, which are counted exactly, also after a page in its middle
/// was unmapped. Of a file with every second page in memory, each page that is read must take a fault, and no other
/// page may be read from the store.
#[test]
fn neighbours_are_mapped_in_both_directions() {
    if is_run_in_child("neighbours_are_mapped_in_both_directions") {
        return;
    }
    let (len, group) = (4 * MIB, 16);
    let pages = len / PAGE_BYTES;
    let cache = cache(Box::new(Never), 16 * MIB);
    let open = || cache.open(Arc::new(MemoryStore::new(bytes(len), 512))).unwrap();
    let count_faults = |view: &View, order: &mut dyn Iterator<Item = usize>| {
        let before = stats::get(Counter::ViewFaults);
        order.for_each(|page| assert_view(view, page * PAGE_BYTES + 9, &[pattern(page * PAGE_BYTES + 9)]));
        (stats::get(Counter::ViewFaults) - before) as usize
    };
    let file = open();
    assert_eq!(file.read_at(&mut vec![0; len], 0).unwrap(), len);
    let orders: [&mut dyn Iterator<Item = usize>; 3] =
        [&mut (0..pages), &mut (0..pages).rev(), &mut (0..pages).map(|page| page * 597 % pages)];
    for order in orders {
        let view = file.view(0..len as u64).unwrap();
        assert_eq!(count_faults(&view, order), pages / group);
        assert_eq!(stats::get(Counter::ViewMappings) as usize, pages / group);
        drop(file.hold(7 * PAGE_BYTES as u64).unwrap());
        assert_eq!(stats::get(Counter::ViewMappings) as usize, pages / group + 1, "the page was in the middle");
        assert_eq!(count_faults(&view, &mut (0..group)), 1);
        assert_eq!(stats::get(Counter::ViewMappings) as usize, pages / group + 2);
        drop(view);
        assert_eq!(stats::get(Counter::ViewMappings), 0);
    }
    // The window has a part of the first and of the last group.
    let view = file.view(13 * PAGE_BYTES as u64..37 * PAGE_BYTES as u64).unwrap();
    let faults = [36, 13, 20].map(|page| {
        let before = stats::get(Counter::ViewFaults);
        assert_view(&view, (page - 13) * PAGE_BYTES, &[pattern(page * PAGE_BYTES)]);
        stats::get(Counter::ViewFaults) - before
    });
    assert_eq!((faults, mapping_count(&view)), ([1; 3], 1), "the kernel merges adjacent mappings");
    assert_view(&view, 0, &bytes(len)[13 * PAGE_BYTES..37 * PAGE_BYTES]);
    assert_eq!(stats::get(Counter::ViewMappings), 3);
    drop(view);

    let sparse = open();
    (0..pages).step_by(2).for_each(|page| _ = sparse.read_at(&mut [0], (page * PAGE_BYTES) as u64).unwrap());
    let (view, charged_bytes) = (sparse.view(0..len as u64).unwrap(), cache.charged_bytes());
    assert_eq!(count_faults(&view, &mut (0..pages).step_by(2).rev()), pages / 2);
    assert_eq!((stats::get(Counter::ViewFills), cache.charged_bytes()), (0, charged_bytes));
}

/// Names of the accesses that a child process of [`wrong_accesses_raise_sigbus`] makes.
const ACCESS_ENV: &str = "VIEWS_ACCESS";

/// An access behind the end of the file, to bytes that a truncation has cut off, or to bytes that the store cannot read
/// must end a process by `SIGBUS`. A write to a view must end it by `SIGSEGV`.
#[test]
fn wrong_accesses_raise_sigbus() {
    if let Ok(access) = std::env::var(ACCESS_ENV) {
        return access_wrongly(&access);
    }
    for (access, signal) in
        [("behind", libc::SIGBUS), ("truncated", libc::SIGBUS), ("failed", libc::SIGBUS), ("write", libc::SIGSEGV)]
    {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["wrong_accesses_raise_sigbus", "--exact"]).env(ACCESS_ENV, access);
        let output = child.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.signal(), Some(signal), "{access}: {:?} {text}", output.status);
    }
}

fn access_wrongly(access: &str) {
    let cache = cache(Box::new(Never), 8 * MIB);
    let store = FaultyStore::new(MemoryStore::new(bytes(MIB), 512));
    let file = cache.open(Arc::new(store.clone())).unwrap();
    let view = file.view(0..2 * MIB as u64).unwrap();
    let mut byte = [0];
    view.read_at(&mut byte, MIB - 1);
    match access {
        "behind" => view.read_at(&mut byte, MIB),
        "truncated" => {
            file.truncate(MIB as u64 - PAGE_BYTES as u64).unwrap();
            view.read_at(&mut byte, MIB - 1);
        }
        "failed" => {
            store.set_faults(Faults { fail_per_mille: 1000, ..Faults::default() });
            view.read_at(&mut byte, 5 * PAGE_BYTES);
        }
        // SAFETY: none: the access must end this process.
        _ => unsafe { view.as_ptr().cast_mut().write_volatile(1) },
    }
    panic!("the access succeeded");
}

/// Maps a page of a fork child, where the child has no memory of a view of its parent, if the kernel finds the address
/// free. Ends the child if it does.
fn map_in_child(addr: usize) {
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: the address is a hint only, so no mapping is replaced.
    let mapped = unsafe { libc::mmap(addr as *mut libc::c_void, PAGE_BYTES, access, flags, -1, 0) };
    if mapped == libc::MAP_FAILED || mapped as usize == addr {
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(2) };
    }
}

/// Calls `act` in a fork child. Returns the child's status.
fn in_fork_child(act: impl FnOnce()) -> i32 {
    let pagemill = Testbed::for_test();
    // SAFETY: `after_fork` follows on both sides, with nothing else before it.
    unsafe { pagemill.instance.before_fork() };
    // SAFETY: the child ends without returning to the test.
    let pid = unsafe { libc::fork() };
    // SAFETY: called after `before_fork`.
    unsafe { pagemill.instance.after_fork() };
    if pid == 0 {
        // SAFETY: the process is a new child, and this is its only thread.
        unsafe { pagemill.instance.begin_child() };
        // SAFETY: the default action ends the process without running code of the test.
        unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
        act();
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: waits for a child of this test, and writes `status`.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    status
}

/// A fork child must not have the memory of its parent's views: an access ends it by `SIGSEGV`, wherever the parent has
/// mapped or copied pages, and no other memory of the child may get these addresses. The child must be able to drop the
/// views. Those of the parent must stay usable.
#[test]
fn fork_children_have_no_views() {
    let pagemill = Testbed::for_test();
    let builder = PageCache::builder("forked").limit(8 << 20).source(Source::Shared);
    let cache = builder.build_in(pagemill.caches).unwrap();
    let file = cache.create().unwrap();
    let content = bytes(MIB);
    file.write_at(&content, 0).unwrap();
    let (view, private) = (file.view_mut(0..MIB as u64).unwrap(), file.view_private(0..4 * MIB as u64).unwrap());
    assert_view(&view, 0, &content);
    private.write_at(&content[..5 * PAGE_BYTES], 3 * PAGE_BYTES);
    assert_view(&private, 0, &content[..PAGE_BYTES]);
    let expect_segv = |act: &dyn Fn()| assert_eq!(libc::WTERMSIG(in_fork_child(act)), libc::SIGSEGV);
    expect_segv(&|| view.read_at(&mut [0], 0));
    for addr in [view.as_ptr(), private.as_ptr()].map(|addr| addr as usize) {
        for page in [0, 3, 4, 7] {
            expect_segv(&|| {
                map_in_child(addr + page * PAGE_BYTES);
                // SAFETY: the access ends the child.
                unsafe { ((addr + page * PAGE_BYTES) as *mut u8).write_volatile(1) };
            });
        }
    }
    expect_segv(&|| {
        (0..1000).for_each(|_| map_in_child(0));
        view.write_at(&[1], 5);
    });
    assert_view(&view, 0, &content);
    drop((view, private));
    let status = {
        let (view, file, cache) = (file.view(0..MIB as u64).unwrap(), file, cache);
        assert_view(&view, 0, &content);
        in_fork_child(move || drop((view, file, cache)))
    };
    assert_eq!(status, 0, "the child dropped the view");
}
