//! Threads access views of a file while others write, remove, sync and evict its pages, and open and drop views.

use pagemill_cache::mapping::policy::Always;
use pagemill_cache::mapping::{Mapping, PageCache, Source, View, ViewMut};
use pagemill_core::Error;
use pagemill_core::units::BLOCK_BYTES;
use pagemill_store::MemoryStore;
use pagemill_testbed::Testbed;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

const PAGE_BYTES: usize = 4 << 10;

/// Length of the file. Only its second half is cut off, because an access behind the end raises a signal.
const FILE_BYTES: usize = 2 * BLOCK_BYTES;

/// Time for which each group of threads runs.
const TEST_TIME: Duration = Duration::from_millis(1500);

/// Time to wait for accesses on a slow machine.
const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// Returns the word that is written to each place of a page. A place without it reads zero.
fn stamp(offset: usize) -> u64 {
    0x5EED_0000_0000_0001 | ((offset / PAGE_BYTES) as u64) << 16
}

fn random(seed: &mut u64) -> usize {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 33) as usize
}

fn assert_word(word: u64, offset: usize) {
    assert!(word == 0 || word == stamp(offset), "{word:#x} at {offset}");
}

/// Reads a word of a view that begins at offset `begin` of the file.
fn read_word(view: &View, begin: usize, offset: usize) {
    let mut word = [0; 8];
    view.read_at(&mut word, offset - begin);
    assert_word(u64::from_ne_bytes(word), offset);
}

/// Reads, writes and prefaults words of views, of which each thread has some of its own. Returns the number of accesses.
fn use_views(file: &Mapping, common: &ViewMut, mut seed: u64, is_over: &AtomicBool) -> u64 {
    let mut count = 0;
    while !is_over.load(Relaxed) {
        let begin = random(&mut seed) % (FILE_BYTES / 2 / PAGE_BYTES) * PAGE_BYTES;
        let range = begin as u64..FILE_BYTES as u64;
        let mut some_offset = || begin + random(&mut seed) % ((FILE_BYTES / 2 - begin) / 8) * 8;
        let (view, private) = (file.view(range.clone()).unwrap(), file.view_private(range).unwrap());
        for _ in 0..20 {
            let offset = some_offset();
            read_word(&view, begin, offset);
            read_word(common, 0, offset);
            read_word(&private, begin, offset);
            let offset = some_offset();
            common.atomic_u64(offset).store(stamp(offset), Relaxed);
            count += 4;
        }
        let offset = some_offset();
        private.write_at(&7_u64.to_ne_bytes(), offset - begin);
        let mut word = [0; 8];
        private.read_at(&mut word, offset - begin);
        assert_eq!(u64::from_ne_bytes(word), 7, "a private page at {offset}");
        match common.prefault(offset..offset + 1) {
            Ok(prefaulted) => drop(prefaulted),
            Err(error) => assert!(matches!(error, Error::Busy { .. }), "{error}"),
        }
    }
    count
}

/// Changes the file by calls at random.
fn change_file(cache: &PageCache, file: &Mapping, filler: &Mapping, mut seed: u64, is_over: &AtomicBool) {
    while !is_over.load(Relaxed) {
        let offset = random(&mut seed) % (FILE_BYTES / PAGE_BYTES) * PAGE_BYTES;
        let done = match random(&mut seed) % 9 {
            0 => file.truncate((FILE_BYTES / 2 + offset / 2) as u64),
            1 => file.truncate(FILE_BYTES as u64),
            2 => file.punch_hole(offset as u64, 3 * PAGE_BYTES as u64).map(drop),
            3 => file.zero_range(offset as u64, 5000 / 8 * 8),
            4 => file.split(offset as u64).map(drop),
            5 => file.collapse(offset as u64).map(drop),
            6 => file.sync(),
            7 => filler.read_at(&mut vec![0; BLOCK_BYTES / 2], (offset / 2) as u64).map(|_| _ = cache.shrink()),
            _ => file.write_at(&stamp(offset).to_ne_bytes().repeat(PAGE_BYTES / 8), offset as u64).map(drop),
        };
        match done {
            Ok(()) | Err(Error::Busy { .. } | Error::NoMemory { .. } | Error::Unsupported { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// Runs `count` threads, of which a quarter changes the file, at least one.
fn use_file_concurrently(cache: &PageCache, file: &Mapping, count: u64) {
    let filler = cache.open(Arc::new(MemoryStore::new(vec![0; FILE_BYTES], 512))).unwrap();
    file.truncate(FILE_BYTES as u64).unwrap();
    let common = file.view_mut(0..FILE_BYTES as u64).unwrap();
    let (is_over, accesses) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        for number in 0..count {
            let (common, filler, is_over, accesses) = (&common, &filler, &is_over, &accesses);
            let is_changing = number < (count / 4).max(1);
            scope.spawn(move || match is_changing {
                true => change_file(cache, file, filler, number + 1, is_over),
                false => _ = accesses.fetch_add(use_views(file, common, number + 1, is_over), Relaxed),
            });
        }
        thread::sleep(TEST_TIME);
        is_over.store(true, Relaxed);
    });
    assert!(accesses.load(Relaxed) > 0, "no thread accessed a view");
    drop(common);
    let mut bytes = vec![0; FILE_BYTES];
    file.truncate(FILE_BYTES as u64).unwrap();
    file.read_at(&mut bytes, 0).unwrap();
    let words = bytes.as_chunks::<8>().0;
    (0..).step_by(8).zip(words).for_each(|(offset, word)| assert_word(u64::from_ne_bytes(*word), offset));
}

fn assert_all_memory_returned(cache: &PageCache) {
    // Waits, because the background thread may be in the middle of a collapse.
    let begun = Instant::now();
    while cache.charged_bytes() > 0 && begun.elapsed() < WAIT_LIMIT {
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!((cache.charged_bytes(), cache.usage().pinned), (0, 0));
}

/// Threads use views of a file in memory, in small and huge folios. Every word must be zero or the stamp of its page, and
/// private writes must stay in their view.
#[test]
fn threads_use_views_of_a_file() {
    let builder = PageCache::builder("threads").limit(16 << 20).policy(Always).source(Source::Shared);
    let cache = builder.build_in(Testbed::for_test().caches).unwrap();
    for count in [2, 6, 16] {
        use_file_concurrently(&cache, &cache.create().unwrap(), count);
    }
    assert_all_memory_returned(&cache);
}

/// As [`threads_use_views_of_a_file`], with a store behind the file, whose pages are evicted and written back.
#[test]
fn threads_use_views_of_a_store() {
    let builder = PageCache::builder("threads").limit(3 << 20).huge(false).source(Source::Shared);
    let cache = builder.build_in(Testbed::for_test().caches).unwrap();
    for count in [2, 6, 16] {
        let file = cache.open(Arc::new(MemoryStore::new(vec![0; FILE_BYTES], 512))).unwrap();
        use_file_concurrently(&cache, &file, count);
        file.close().map_err(|(_, error)| error).unwrap();
    }
    assert_all_memory_returned(&cache);
}
