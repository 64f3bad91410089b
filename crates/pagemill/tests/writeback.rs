//! Tests of dirty pages of files with a store: what triggers writeback, which threads wait, and what happens if the
//! store fails or hangs.

#[path = "common/source.rs"]
mod source;

use libc::{EIO, ENOSPC, ETIMEDOUT};
use pagemill_cache::mapping::policy::{Always, Never};
use pagemill_cache::mapping::{Mapping, PageCache, Writeback};
use pagemill_core::Error;
use pagemill_core::stats::{self, Counter};
use pagemill_core::units::PageSize;
use pagemill_store::{Faults, FaultyStore, FileOptions, MemoryStore, Store};
use pagemill_testbed::Testbed;
use source::source;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

const PAGE_BYTES: usize = 4 << 10;
const MIB: usize = 1 << 20;

/// Upper bound of every wait in these tests.
const WAIT_LIMIT: Duration = Duration::from_secs(600);
/// An age that no page reaches during a test.
const NEVER: Duration = Duration::from_secs(1 << 20);

type FaultyMemoryStore = FaultyStore<MemoryStore>;

/// Returns settings with which pages are written back only if the share of dirty pages in the cache is too high, and
/// never because of their age.
fn dirty_shares(background_percent: u8, most_percent: u8) -> Writeback {
    Writeback::default()
        .age(NEVER)
        .background_percent(background_percent)
        .most_percent(most_percent)
        .timeout(WAIT_LIMIT)
}

/// Creates a cache with small folios. With `is_thread_disabled`, the cache has no background thread, and the test calls
/// writeback.
fn cache(limit_bytes: usize, writeback: Writeback, is_thread_disabled: bool) -> PageCache {
    let caches = Testbed::for_test().caches;
    if is_thread_disabled {
        caches.collapse_by_hand();
    }
    let page = PageSize::new(PAGE_BYTES).unwrap();
    let settings = PageCache::builder("writeback").source(source()).limit(limit_bytes as u64);
    settings.policy(Never).page(page).writeback(writeback).build_in(caches).unwrap()
}

fn open(cache: &PageCache) -> (FaultyMemoryStore, Mapping) {
    let store = FaultyStore::new(MemoryStore::new(Vec::new(), PAGE_BYTES));
    let file = cache.open(Arc::new(store.clone())).unwrap();
    (store, file)
}

fn wait_until(failure: &str, condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < WAIT_LIMIT, "{failure}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn write_page(file: &Mapping, page: usize, byte: u8) -> pagemill_core::error::Result<usize> {
    file.write_at(&[byte; PAGE_BYTES], (page * PAGE_BYTES) as u64)
}

/// Pages that are dirty for longer than the configured age must be written back in the background. One thread serves
/// all files, and must continue after a time without dirty pages.
#[test]
fn old_pages_are_written_back() {
    let cache = cache(64 * MIB, dirty_shares(100, 100).age(Duration::from_millis(30)), false);
    let files = [open(&cache), open(&cache)];
    let before = stats::get(Counter::CacheWrittenForAge);
    for round in 1..4 {
        for (store, file) in &files {
            for page in [0, 1, 2, 7] {
                write_page(file, page, round).unwrap();
            }
            wait_until("old pages stay in memory", || file.dirty_bytes() == 0);
            assert!(store.inner().bytes()[..3 * PAGE_BYTES].iter().all(|byte| *byte == round));
        }
    }
    assert_eq!((cache.dirty_bytes(), files[0].0.calls().syncs), (0, 0));
    assert!(stats::get(Counter::CacheWrittenForAge) - before >= (3 * 2 * 4 * PAGE_BYTES) as u64);
    files.iter().for_each(|(_, file)| file.sync().unwrap());
}

/// Writeback is called explicitly. No page may be written before it is due. Then all pages must be written, adjacent
/// pages in one transfer.
#[test]
fn pages_are_written_back_only_when_due() {
    let fresh = cache(64 * MIB, dirty_shares(100, 100), true);
    let (store, file) = open(&fresh);
    write_page(&file, 0, 1).unwrap();
    assert_eq!((fresh.write_back_due(), file.dirty_bytes(), store.calls().writes), (0, PAGE_BYTES as u64, 0));
    let old = cache(64 * MIB, dirty_shares(100, 100).age(Duration::ZERO), true);
    let (store, file) = open(&old);
    for page in (0..100).chain(200..300).rev() {
        write_page(&file, page, 1).unwrap();
    }
    assert_eq!((old.write_back_due(), file.dirty_bytes()), ((200 * PAGE_BYTES) as u64, 0));
    assert_eq!(store.calls().writes, 2);
    assert_eq!(old.write_back_due(), 0);
}

/// If the share of dirty pages is above the background share, dirty pages must be written back, by the background
/// thread or by a call, whatever file they belong to.
#[test]
fn pages_above_the_background_share_are_written_back() {
    for is_thread_disabled in [false, true] {
        let cache = cache(8 * MIB, dirty_shares(10, 90), is_thread_disabled);
        let files = [open(&cache), open(&cache)];
        let share = (8 * MIB / 10) as u64;
        for page in 0..150 {
            files.iter().for_each(|(_, file)| _ = write_page(file, page, 1).unwrap());
        }
        if is_thread_disabled {
            assert!(cache.dirty_bytes() > share);
            cache.write_back_due();
        }
        wait_until("more than the share stays dirty", || cache.dirty_bytes() <= share);
        assert!(files.iter().all(|(store, _)| store.calls().syncs == 0));
    }
}

/// More than half of the allowed pages are dirty. From there on, a writer must pause once for each 512 KiB.
#[test]
fn writers_are_paced() {
    let cache = cache(128 * MIB, dirty_shares(0, 100), true);
    let (_store, file) = open(&cache);
    let before = stats::get(Counter::WritersThrottled);
    let last = 96 * MIB / PAGE_BYTES;
    (0..last).for_each(|page| assert_eq!(write_page(&file, page, 1).unwrap(), PAGE_BYTES));
    let pauses = stats::get(Counter::WritersThrottled) - before;
    assert!(pauses >= (96 - 64) * 2 - 1, "{pauses} pauses");
}

/// The store hangs after the share of dirty pages has reached its maximum. A writer must wait until the store
/// continues. At most one page more than the maximum may be dirty.
#[test]
fn writers_wait_for_a_store_that_hangs() {
    for is_thread_disabled in [false, true] {
        let cache = cache(4 * MIB, dirty_shares(10, 25), is_thread_disabled);
        let (store, file) = open(&cache);
        store.hold();
        let before = stats::get(Counter::WritersThrottled);
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for page in 0..2000 {
                    assert_eq!(write_page(&file, page, 1).unwrap(), PAGE_BYTES);
                    assert!(cache.dirty_bytes() <= (MIB + PAGE_BYTES) as u64);
                }
                is_over.store(true, SeqCst);
            });
            wait_until("no thread waits", || store.held() > 0 && cache.dirty_bytes() >= MIB as u64);
            assert!(!is_over.load(SeqCst));
            // Neither a rewrite of a dirty page nor a read may wait.
            let mut byte = [0];
            file.read_at(&mut byte, 0).unwrap();
            assert_eq!(byte, [1]);
            store.release();
        });
        assert!(stats::get(Counter::WritersThrottled) > before);
        file.sync().unwrap();
        assert!(store.inner().bytes().iter().all(|byte| *byte == 1) && file.dirty_bytes() == 0);
    }
}

/// A store hangs for longer than the timeout of its writers. The writers must get an error, no data may be lost, and
/// writers of other files must continue.
#[test]
fn writers_time_out_if_the_store_hangs() {
    for is_thread_disabled in [false, true] {
        let timeout = Duration::from_millis(50);
        let cache = cache(4 * MIB, dirty_shares(10, 25).timeout(timeout), is_thread_disabled);
        let ((store, file), (other_store, other)) = (open(&cache), open(&cache));
        store.hold();
        let (mut page, error) = (
            0,
            loop {
                match write_page(&file, end_page(&file), 1) {
                    Ok(_) => {}
                    Err(error) => break error,
                }
            },
        );
        assert_eq!(error.errno(), ETIMEDOUT, "{error}");
        page += end_page(&file);
        assert!(page >= MIB / PAGE_BYTES - 1);
        for at in 0..100 {
            // A writer of another file may also time out. It must succeed when it tries again.
            wait_until("the writer of another file fails", || write_page(&other, at, 2).is_ok());
        }
        let mut bytes = vec![0; page * PAGE_BYTES];
        assert_eq!(file.read_at(&mut bytes, 0).unwrap(), bytes.len());
        assert!(bytes.iter().all(|byte| *byte == 1));
        store.release();
        file.sync().unwrap();
        other.sync().unwrap();
        assert!(store.inner().bytes() == bytes && other_store.inner().bytes() == vec![2; 100 * PAGE_BYTES]);
        write_page(&file, page, 1).unwrap();
    }
}

/// Returns the index of the first page beyond the end of the file.
fn end_page(file: &Mapping) -> usize {
    file.size_bytes() as usize / PAGE_BYTES
}

/// A store fails, and the share of dirty pages is too high. Writers must get the store's error, their data must stay in
/// memory, and each handle must report the error once. Once the store works again, all data must be written back.
#[test]
fn no_data_is_lost_if_the_store_fails() {
    let cache = cache(4 * MIB, dirty_shares(10, 25), false);
    let (store, file) = open(&cache);
    let others = [file.clone(), file.clone()];
    store.set_faults(Faults { fail_per_mille: 1000, errno: ENOSPC, ..Faults::default() });
    let error = loop {
        if let Err(error) = write_page(&file, end_page(&file), 1) {
            break error;
        }
    };
    assert!(matches!(error, Error::Store { .. }) && error.errno() == ENOSPC, "{error}");
    let pages = end_page(&file);
    assert!(file.dirty_bytes() == (pages * PAGE_BYTES) as u64 && pages >= MIB / PAGE_BYTES - 1);
    let mut bytes = vec![0; pages * PAGE_BYTES];
    assert!(file.read_at(&mut bytes, 0).is_ok() && bytes.iter().all(|byte| *byte == 1));
    assert_eq!(file.sync().unwrap_err().errno(), ENOSPC);
    store.set_faults(Faults::default());
    // Dirty pages below the background share need not be written back.
    wait_until("writeback is not tried again", || cache.dirty_bytes() <= 4 * MIB as u64 / 10);
    for handle in &others {
        assert_eq!(handle.sync().unwrap_err().errno(), ENOSPC);
        handle.sync().unwrap();
    }
    assert!(store.inner().bytes() == bytes);
    // The store may have failed once more between this handle's sync and the call that ended the faults.
    let _ = file.sync();
    file.sync().unwrap();
}

/// The store cannot write one page. Other pages must still be written back, and the write of that page must be tried
/// again.
#[test]
fn a_page_that_fails_does_not_block_other_pages() {
    let cache = cache(64 * MIB, dirty_shares(100, 100).age(Duration::ZERO), true);
    let (store, file) = open(&cache);
    for page in (0..200).step_by(2) {
        write_page(&file, page, 1).unwrap();
    }
    store.set_faults(Faults { seed: 1, fail_per_mille: 300, errno: EIO, ..Faults::default() });
    cache.write_back_due();
    assert!(file.dirty_bytes() < (60 * PAGE_BYTES) as u64, "{}", file.dirty_bytes());
    store.set_faults(Faults::default());
    wait_until("the page is not tried again", || {
        cache.write_back_due();
        file.dirty_bytes() == 0
    });
    assert_eq!((file.sync().unwrap_err().errno(), file.sync().is_ok()), (EIO, true));
}

/// All pages of a cache are dirty. A thread that needs a page must write some dirty pages back. It may fail only if the
/// store fails.
#[test]
fn dirty_pages_are_written_back_to_make_room() {
    for is_thread_disabled in [false, true] {
        let cache = cache(64 * PAGE_BYTES, dirty_shares(100, 100), is_thread_disabled);
        let (store, file) = open(&cache);
        let memory = cache.create().unwrap();
        file.truncate((200 * PAGE_BYTES) as u64).unwrap();
        // Writers wait only at 100 % dirty pages. Writes through pins and holds never wait.
        for page in 0..64 {
            file.pin((page * PAGE_BYTES) as u64).unwrap().write_at(&[1], 0).unwrap();
        }
        assert_eq!(cache.dirty_bytes(), (64 * PAGE_BYTES) as u64);
        let before = stats::get(Counter::CacheWrittenForRoom);
        let mut byte = [9];
        assert_eq!(file.read_at(&mut byte, (100 * PAGE_BYTES) as u64).unwrap(), 1);
        assert!(byte == [0] && stats::get(Counter::CacheWrittenForRoom) > before);
        assert_eq!(
            memory.write_at(&vec![5; 60 * PAGE_BYTES], 0).unwrap(),
            60 * PAGE_BYTES,
            "the other pages are written back, too"
        );
        file.hold(0).unwrap()[0] = 7;
        for page in 1..4 {
            file.pin((page * PAGE_BYTES) as u64).unwrap().set_dirty();
        }
        store.set_faults(Faults { fail_per_mille: 1000, errno: ENOSPC, ..Faults::default() });
        let error = file.read_at(&mut byte, (101 * PAGE_BYTES) as u64).unwrap_err();
        assert_eq!((error.errno(), matches!(error, Error::Store { .. })), (ENOSPC, true));
        store.set_faults(Faults::default());
        file.read_at(&mut byte, 0).unwrap();
        assert_eq!(byte, [7]);
        let _ = file.sync();
        assert_eq!(file.read_at(&mut byte, (101 * PAGE_BYTES) as u64).unwrap(), 1);
        drop((file, memory));
        assert_eq!((cache.dirty_bytes(), cache.charged_bytes()), (0, 0));
    }
}

/// All pages are dirty, and the last slice of writeback ended after the last of them. A thread that needs a page must
/// get one: the next slice starts where the last one ended, finds nothing, and continues at the start of the file.
#[test]
fn writeback_makes_room_wherever_the_last_slice_ended() {
    let cache = cache(8 * MIB, dirty_shares(100, 100), true);
    let (_, file) = open(&cache);
    let pages = 8 * MIB / PAGE_BYTES;
    (0..pages).for_each(|page| _ = write_page(&file, page, 1).unwrap());
    // This write starts a slice that ends in the middle of the file.
    write_page(&file, pages, 1).unwrap();
    assert!(file.dirty_bytes() > 0, "only a part of the file was written");
    file.sync().unwrap();
    file.dont_need(0, 16 * MIB as u64).unwrap();
    // From here on, all dirty pages are before that position, and the cache is full.
    let other = cache.create().unwrap();
    other.write_at(&vec![1; 7 * MIB], 0).unwrap();
    (0..MIB / PAGE_BYTES).for_each(|page| _ = write_page(&file, page, 2).unwrap());
    assert_eq!((file.dirty_bytes(), cache.charged_bytes()), (MIB as u64, 8 * MIB as u64));
    assert_eq!(other.write_at(&[1], 8 * MIB as u64).unwrap(), 1);
}

/// A truncation cannot split a pinned huge folio. The folio must be split later, and a sync must make its pages beyond
/// the end of the file clean.
#[test]
fn pages_behind_the_end_become_clean() {
    let settings = PageCache::builder("end")
        .source(source())
        .limit(64 * MIB as u64)
        .policy(Always)
        .writeback(dirty_shares(100, 100));
    let cache = settings.build_in(Testbed::for_test().caches).unwrap();
    let (store, file) = open(&cache);
    file.write_at(&vec![1; 2 * MIB], 0).unwrap();
    let pin = file.pin(0).unwrap();
    file.truncate(PAGE_BYTES as u64).unwrap();
    drop(pin);
    assert!(file.split(0).unwrap() && file.dirty_bytes() == 2 * MIB as u64);
    file.sync().unwrap();
    assert!(file.dirty_bytes() == 0 && store.inner().bytes() == [1; PAGE_BYTES]);
    file.truncate(2 * MIB as u64).unwrap();
    let mut bytes = vec![9; 2 * MIB - PAGE_BYTES];
    file.read_at(&mut bytes, PAGE_BYTES as u64).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0));
}

/// `write_back` must write a range to the store without syncing the store. A following sync must find nothing to write.
#[test]
fn write_back_does_not_sync() {
    let cache = cache(64 * MIB, dirty_shares(100, 100), true);
    let (store, file) = open(&cache);
    for page in 0..10 {
        write_page(&file, page, 1).unwrap();
    }
    file.write_back(0, 0).unwrap();
    file.write_back((2 * PAGE_BYTES + 1) as u64, (2 * PAGE_BYTES) as u64).unwrap();
    let calls = store.calls();
    assert_eq!((file.dirty_bytes(), calls.writes, calls.syncs), ((7 * PAGE_BYTES) as u64, 1, 0));
    file.write_back(0, u64::MAX).unwrap();
    assert_eq!((file.dirty_bytes(), store.calls().syncs), (0, 0));
    let before = store.calls().writes;
    file.sync().unwrap();
    assert_eq!((store.calls().writes, store.calls().syncs), (before, 1));
    assert!(matches!(file.write_back(1 << 63, 1), Err(Error::BadOffset { .. })));
    cache.create().unwrap().write_back(0, 1).unwrap();
}

/// Shares of dirty pages that are above 100 %, or a background share above the maximum, must be rejected. 0 and 100 %
/// must be valid.
#[test]
fn invalid_shares_are_rejected() {
    let caches = Testbed::for_test().caches;
    for (background, most, is_valid) in
        [(0, 0, true), (100, 100, true), (0, 100, true), (41, 40, false), (10, 101, false)]
    {
        let made = PageCache::builder("odd")
            .source(source())
            .limit(MIB as u64)
            .writeback(dirty_shares(background, most))
            .build_in(caches);
        match made {
            Ok(cache) => {
                assert!(is_valid);
                let (store, file) = open(&cache);
                for page in 0..4 {
                    write_page(&file, page, 3).unwrap();
                }
                file.sync().unwrap();
                assert_eq!(store.inner().bytes(), vec![3; 4 * PAGE_BYTES]);
            }
            Err(error) => assert!(!is_valid && error.errno() == libc::EINVAL, "{error}"),
        }
    }
}

/// Writers, background writeback, syncs and truncations use one file concurrently. At the end, the store must have the
/// contents that were written last.
#[test]
fn concurrent_writers_lose_no_data() {
    let writeback = dirty_shares(5, 15).age(Duration::from_millis(2)).timeout(WAIT_LIMIT);
    let cache = cache(4 * MIB, writeback, false);
    let (store, file) = open(&cache);
    store.set_faults(Faults { seed: 9, delay_per_mille: 50, is_reordered: true, ..Faults::default() });
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..3_usize)
            .map(|thread| {
                let file = &file;
                scope.spawn(move || {
                    for step in 0..3000_usize {
                        let page = step * 7919 % 500 * 3 + thread;
                        write_page(file, page, (step / 500 + 1) as u8).unwrap();
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            while !is_over.load(SeqCst) {
                file.sync().unwrap();
                // These changes are beyond all pages that are checked.
                file.write_at(&[9; 100], (1600 * PAGE_BYTES) as u64).unwrap();
                file.truncate((1550 * PAGE_BYTES) as u64).unwrap();
            }
        });
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        is_over.store(true, SeqCst);
    });
    file.sync().unwrap();
    store.set_faults(Faults::default());
    let mut bytes = vec![0; 1500 * PAGE_BYTES];
    store.read(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 6) && file.dirty_bytes() == 0);
}

/// Dropping the last handle of a file must write dirty pages and the file's length to the store. If the store fails or
/// hangs, the drop must wait for a limited time and count lost bytes. On failure, `close` must return the handle.
#[test]
fn dropping_the_last_handle_writes_back() {
    let cache_with_timeout = |timeout| cache(64 * MIB, dirty_shares(100, 100).timeout(timeout), true);
    let cache = cache_with_timeout(WAIT_LIMIT);
    let (store, file) = open(&cache);
    let other = file.clone();
    for page in [0, 5, 6] {
        write_page(&file, page, 1).unwrap();
    }
    drop(file);
    assert_eq!(store.calls().writes, 0);
    other.truncate((6 * PAGE_BYTES + 10) as u64).unwrap();
    drop(other);
    let bytes = store.inner().bytes();
    assert!(
        bytes.len() == 6 * PAGE_BYTES + 10
            && bytes[..PAGE_BYTES] == [1; PAGE_BYTES]
            && bytes[6 * PAGE_BYTES..] == [1; 10]
    );
    // Nothing has changed, so the store must not be called.
    let calls = store.calls();
    drop(cache.open(Arc::new(store.clone())).unwrap());
    assert_eq!(store.calls(), calls);

    let lost = stats::get(Counter::CacheLost);
    let file = cache.open(Arc::new(store.clone())).unwrap();
    write_page(&file, 0, 2).unwrap();
    store.set_faults(Faults { fail_per_mille: 1000, errno: ENOSPC, ..Faults::default() });
    let (file, error) = file.close().unwrap_err();
    assert_eq!((error.errno(), file.dirty_bytes()), (ENOSPC, PAGE_BYTES as u64));
    drop(file);
    assert!(stats::get(Counter::CacheLost) - lost >= PAGE_BYTES as u64);
    store.set_faults(Faults::default());
    let impatient = cache_with_timeout(Duration::from_millis(50));
    let file = impatient.open(Arc::new(store.clone())).unwrap();
    write_page(&file, 0, 3).unwrap();
    store.hold();
    drop(file);
    assert!(stats::get(Counter::CacheLost) - lost >= (2 * PAGE_BYTES) as u64);
    assert_eq!((cache.dirty_bytes(), impatient.dirty_bytes()), (0, 0));
    store.release();
    let file = cache.open(Arc::new(store.clone())).unwrap();
    write_page(&file, 1, 4).unwrap();
    let syncs = store.calls().syncs;
    file.close().unwrap();
    assert!(store.calls().syncs == syncs + 1 && store.inner().bytes()[PAGE_BYTES..2 * PAGE_BYTES] == [4; PAGE_BYTES]);
}

/// A regular file is written back by many concurrent transfers. All data must arrive. Reopening the file immediately
/// after it was closed must succeed.
#[test]
fn files_are_written_back_and_reopened() {
    let folder = std::env::temp_dir().join(format!("pagemill-writeback-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("file");
    let cache = cache(64 * MIB, dirty_shares(5, 20).age(Duration::ZERO), false);
    for round in 1..30_u8 {
        let file = cache.open(Arc::new(FileOptions::new().create().open(&path).unwrap())).unwrap();
        for step in 0..1500_usize {
            write_page(&file, step * 7919 % 6000, round).unwrap();
        }
        match round % 3 {
            0 => file.sync().unwrap(),
            1 => file.write_back(0, u64::MAX >> 1).unwrap(),
            _ => {}
        }
        drop(file);
        let bytes = std::fs::read(&path).unwrap();
        for step in 0..1500_usize {
            let at = step * 7919 % 6000 * PAGE_BYTES;
            assert!(bytes[at..at + PAGE_BYTES] == [round; PAGE_BYTES], "round {round}, step {step}");
        }
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Two pages are pinned. Other pages must still be written back. A sync must wait for one second in total, and report
/// that not everything is durable.
#[test]
fn pinned_pages_do_not_block_other_pages() {
    let cache = cache(64 * MIB, dirty_shares(50, 90), true);
    let (store, file) = open(&cache);
    (0..64).for_each(|page| _ = write_page(&file, page, 7).unwrap());
    let pins = [5, 9].map(|page| file.pin(page * PAGE_BYTES as u64).unwrap());
    for result in [file.sync(), file.write_back(0, (64 * PAGE_BYTES) as u64)] {
        assert!(matches!(result, Err(Error::Busy { .. })), "{result:?}");
        assert_eq!(file.dirty_bytes(), 2 * PAGE_BYTES as u64);
    }
    assert_eq!(store.inner().bytes().iter().filter(|byte| **byte == 7).count(), 62 * PAGE_BYTES);
    // An error of the store must take precedence over the error for pinned pages.
    (0..64).for_each(|page| _ = write_page(&file, page, 8).unwrap());
    store.set_faults(Faults { fail_per_mille: 1000, errno: ENOSPC, ..Faults::default() });
    assert_eq!(file.sync().unwrap_err().errno(), ENOSPC);
    store.set_faults(Faults::default());
    drop(pins);
    file.sync().unwrap();
    assert_eq!(store.inner().bytes(), [8; 64 * PAGE_BYTES]);
}
