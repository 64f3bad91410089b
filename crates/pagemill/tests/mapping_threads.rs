//! Tests of files that many threads use at the same time. No thread may find bytes of another file, or bytes that were
//! removed.

#[path = "common/source.rs"]
mod source;

use pagemill_cache::mapping::policy::{Always, Auto, Never};
use pagemill_cache::mapping::{Mapping, PageCache, Policy};
use pagemill_core::Error;
use pagemill_core::units::PageSize;
use pagemill_testbed::Testbed;
use source::source;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

const PAGE_BYTES: usize = 4 << 10;
const WORD: usize = size_of::<u64>();
const PAGES: u64 = 1536;
/// Upper bound of every wait in these tests.
const WAIT_LIMIT: Duration = Duration::from_secs(600);
/// Duration of each test.
const TEST_TIME: Duration = Duration::from_millis(if cfg!(debug_assertions) { 1500 } else { 3000 });

fn cache(policy: Box<dyn Policy>, limit_bytes: u64) -> PageCache {
    let settings = PageCache::builder("threads")
        .source(source())
        .limit(limit_bytes)
        .policy(policy)
        .page(PageSize::new(PAGE_BYTES).unwrap());
    settings.build_in(Testbed::for_test().caches).unwrap()
}

/// Returns the value of every word in a page. It identifies the file and the page.
fn stamp(file: u64, page: u64) -> u64 {
    (file + 1) << 32 | (page + 1)
}

fn random(seed: &mut u64) -> u64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    *seed >> 8
}

fn write(file: &Mapping, number: u64, page: u64, pages: u64) -> bool {
    let words = (page..page + pages).flat_map(|page| std::iter::repeat_n(stamp(number, page), PAGE_BYTES / WORD));
    let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    match file.write_at(&bytes, page * PAGE_BYTES as u64) {
        Ok(_) => true,
        Err(Error::NoMemory { .. }) => false,
        Err(error) => panic!("{error}"),
    }
}

/// Asserts that each word of the bytes is zero, or the stamp of its page.
fn assert_stamps(bytes: &[u8], number: u64, page: u64) {
    for (at, word) in bytes.chunks_exact(WORD).enumerate() {
        let word = u64::from_le_bytes(word.try_into().unwrap());
        let expected = stamp(number, page + (at * WORD / PAGE_BYTES) as u64);
        assert!(word == 0 || word == expected, "file {number}, page {page}: {word:#x} for {expected:#x}");
    }
}

/// Removes, zeroes, splits or collapses folios of the file at random.
fn change_folios_randomly(file: &Mapping, seed: &mut u64) {
    // Offsets and lengths are whole words, so that each word is one stamp, or zero.
    let some = |seed: &mut u64, pages: u64| random(seed) % (pages * PAGE_BYTES as u64) / WORD as u64 * WORD as u64;
    let (offset, len) = (some(seed, PAGES), some(seed, 600));
    let done = match random(seed) % 8 {
        0 => file.truncate(offset),
        1 | 2 => file.punch_hole(offset, len).map(drop),
        3 => file.zero_range(offset, len % PAGE_BYTES as u64),
        4 => file.split(offset).map(drop),
        5 => file.split_sparse().map(drop),
        _ => file.collapse(offset).map(drop),
    };
    match done {
        Ok(()) | Err(Error::Busy { .. } | Error::NoMemory { .. }) => {}
        Err(error) => panic!("{error}"),
    }
}

/// Two files of one cache share its memory. Threads write, read and pin pages, while another thread truncates, punches
/// holes, splits and collapses. Every word that a thread finds must be zero or the stamp of its page.
fn use_two_files_concurrently(cache: &PageCache) {
    let files = [cache.create().unwrap(), cache.create().unwrap()];
    let (files, is_over, reads) = (&files, &AtomicBool::new(false), &AtomicU64::new(0));
    std::thread::scope(|scope| {
        for thread in 0..2_u64 {
            scope.spawn(move || {
                let mut seed = 0x9E37_79B9 + thread;
                while !is_over.load(Relaxed) {
                    let (file, page) = (random(&mut seed) % 2, random(&mut seed) % PAGES);
                    let pages = if random(&mut seed).is_multiple_of(4) { (PAGES - page).min(700) } else { 1 };
                    write(&files[file as usize], file, page, pages);
                }
            });
            scope.spawn(move || {
                let mut seed = 0xABCD_EF01 + thread;
                let mut bytes = vec![0; 8 * PAGE_BYTES];
                while !is_over.load(Relaxed) {
                    let (number, page) = (random(&mut seed) % 2, random(&mut seed) % PAGES);
                    let file = &files[number as usize];
                    if !random(&mut seed).is_multiple_of(4) {
                        let len = file.read_at(&mut bytes, page * PAGE_BYTES as u64).unwrap();
                        assert_stamps(&bytes[..len], number, page);
                    } else if let Ok(Some(pin)) = file.pin_present(page * PAGE_BYTES as u64) {
                        let word = pin.read_u64(0);
                        assert!(word == 0 || word == stamp(number, page), "{word:#x}");
                    }
                    reads.fetch_add(1, Relaxed);
                }
            });
        }
        scope.spawn(move || {
            let mut seed = 77;
            while !is_over.load(Relaxed) {
                change_folios_randomly(&files[random(&mut seed) as usize % 2], &mut seed);
            }
        });
        let begun = Instant::now();
        while begun.elapsed() < TEST_TIME || (reads.load(Relaxed) <= 100 && begun.elapsed() < WAIT_LIMIT) {
            std::thread::sleep(Duration::from_millis(50));
            cache.usage();
        }
        is_over.store(true, Relaxed);
    });
    assert!(reads.load(Relaxed) > 100);
    for (number, file) in files.iter().enumerate() {
        let mut bytes = vec![0; file.size_bytes() as usize];
        file.read_at(&mut bytes, 0).unwrap();
        assert_stamps(&bytes, number as u64, 0);
        file.truncate(0).unwrap();
    }
}

/// Asserts that the cache returns all its memory after its files were dropped.
fn assert_all_memory_returned(cache: &PageCache) {
    // Waits, because the background thread may be in the middle of a collapse.
    let begun = Instant::now();
    while cache.charged_bytes() > 0 && begun.elapsed() < WAIT_LIMIT {
        std::thread::sleep(Duration::from_millis(1));
    }
    let usage = cache.usage();
    assert_eq!((usage.charged, usage.huge, usage.small, usage.pinned), (0, 0, 0, 0), "{usage:?}");
}

/// Threads use two files in small folios. No thread may see bytes of another page.
#[test]
fn threads_see_their_own_bytes() {
    let cache = cache(Box::new(Auto), 64 << 20);
    use_two_files_concurrently(&cache);
    assert_all_memory_returned(&cache);
}

/// Threads use two files in huge folios. No thread may see bytes of another page.
#[test]
fn threads_see_their_own_bytes_in_huge_folios() {
    let cache = cache(Box::new(Always), 64 << 20);
    use_two_files_concurrently(&cache);
    assert_all_memory_returned(&cache);
}

/// Threads use two files in a cache that is too small for them: huge folios become small, writes are short, and unused
/// pages are freed. No thread may see bytes of another page.
#[test]
fn threads_see_their_own_bytes_at_the_limit() {
    let cache = cache(Box::new(Always), 5 << 20);
    use_two_files_concurrently(&cache);
    assert_all_memory_returned(&cache);
}

/// The first pages of a cache are written by more threads than its pool has chunks. While other threads make the chunks
/// resident, a thread that finds no chunk must wait for one of them.
#[test]
fn threads_share_the_first_chunks_of_a_cache() {
    const THREADS: u64 = 4;
    let pagemill = Testbed::for_test();
    pagemill.caches.collapse_by_hand();
    let cache =
        PageCache::builder("first").source(source()).limit(2 << 20).policy(Never).build_in(pagemill.caches).unwrap();
    for round in 0..500 {
        let (file, barrier) = (cache.create().unwrap(), std::sync::Barrier::new(THREADS as usize));
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (file, barrier) = (&file, &barrier);
                scope.spawn(move || {
                    barrier.wait();
                    assert_eq!(file.write_at(&[1; 4096], thread * 4096).unwrap(), 4096, "round {round}");
                });
            }
        });
        drop(file);
        cache.shrink();
    }
}
