//! Tests of files whose store fails, hangs, is full or read-only, or is changed by another process.

#[path = "common/stores.rs"]
mod stores;

use pagemill_cache::mapping::policy::{Always, Never};
use pagemill_cache::mapping::{Fetch, Mapping, PageCache, Policy, Queue, Writeback};
use pagemill_core::Error;
use pagemill_core::stats::{self, Counter};
use pagemill_core::units::PageSize;
use pagemill_store::{Faults, FaultyStore, FileStore, MemoryStore};
use pagemill_testbed::Testbed;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;
use stores::BrokenStore;

const PAGE_BYTES: usize = 4 << 10;
const MIB: usize = 1 << 20;

fn cache_of(policy: Box<dyn Policy>) -> PageCache {
    let page = PageSize::new(PAGE_BYTES).unwrap();
    let caches = Testbed::for_test().caches;
    caches.collapse_by_hand();
    PageCache::builder("faults").limit(16 * MIB as u64).policy(policy).page(page).build_in(caches).unwrap()
}

fn cache() -> PageCache {
    cache_of(Box::new(Never))
}

/// Returns two caches, one with small folios and one with huge folios.
fn caches() -> [PageCache; 2] {
    [cache(), cache_of(Box::new(Always))]
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// Returns bytes that differ from page to page and are never zero.
fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| ((at / 100) as u8).wrapping_add(seed) | 1).collect()
}

fn read(file: &Mapping, offset: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0xEE; len];
    let len = file.read_at(&mut bytes, offset as u64).unwrap();
    bytes.truncate(len);
    bytes
}

fn write(file: &Mapping, bytes: &[u8], offset: usize) {
    assert_eq!(file.write_at(bytes, offset as u64).unwrap(), bytes.len());
}

fn open(cache: &PageCache, path: &Path) -> Mapping {
    cache.open(Arc::new(FileStore::open(path).unwrap())).unwrap()
}

fn errno(error: &Error) -> Option<i32> {
    match error {
        Error::Store { cause, .. } => cause.raw_os_error(),
        _ => None,
    }
}

/// Another process truncates the file of a store. Bytes in memory must stay, and bytes that are only in the file must
/// read as zeros. A sync without changes must not extend the file again. A refresh must use the new length.
#[test]
fn bytes_cut_off_by_another_process_read_zero() {
    for cache in caches() {
        let folder = folder();
        let (path, len) = (folder.path().join("file"), 6 * MIB);
        let bytes = pattern(len, 1);
        fs::write(&path, &bytes).unwrap();
        let file = open(&cache, &path);
        assert!(read(&file, 0, PAGE_BYTES) == bytes[..PAGE_BYTES]);
        let others = File::options().write(true).open(&path).unwrap();
        let left = 5 * MIB + 100;
        others.set_len(left as u64).unwrap();
        assert_eq!(file.size_bytes(), len as u64);
        let tail = read(&file, 4 * MIB, 2 * MIB);
        assert!(tail[..MIB + 100] == bytes[4 * MIB..left] && tail[MIB + 100..].iter().all(|byte| *byte == 0));
        others.set_len(100).unwrap();
        assert!(read(&file, 0, PAGE_BYTES) == bytes[..PAGE_BYTES], "in memory");
        file.sync().unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), 100, "nothing was changed here");
        file.refresh().unwrap();
        assert_eq!((file.size_bytes(), cache.charged_bytes()), (100, 0));
        assert!(read(&file, 0, PAGE_BYTES) == bytes[..100]);
        // Added bytes must read as zeros, in memory and in the file.
        file.truncate(PAGE_BYTES as u64).unwrap();
        file.sync().unwrap();
        let mut expected = bytes[..100].to_vec();
        expected.resize(PAGE_BYTES, 0);
        assert!(read(&file, 0, PAGE_BYTES) == expected && fs::read(&path).unwrap() == expected);
    }
}

/// Another process appends to the file of a store. A sync must not remove the new bytes. A refresh must show them, even
/// in a page that already contains bytes of the file.
#[test]
fn bytes_appended_by_another_process_stay() {
    for cache in caches() {
        let folder = folder();
        let (path, len) = (folder.path().join("file"), 2 * MIB + 100);
        let bytes = pattern(len + 3 * MIB, 2);
        fs::write(&path, &bytes[..len]).unwrap();
        let reader = cache.open(Arc::new(FileStore::open_read_only(&path).unwrap())).unwrap();
        let writer = open(&cache, &path);
        assert!(read(&reader, 0, 3 * MIB) == bytes[..len]);
        let others = File::options().write(true).open(&path).unwrap();
        others.write_all_at(&bytes[len..], len as u64).unwrap();
        assert_eq!(read(&reader, len, PAGE_BYTES), []);
        write(&writer, &bytes[..10], 0);
        writer.sync().unwrap();
        assert!(fs::read(&path).unwrap() == bytes);
        for file in [&reader, &writer] {
            file.refresh().unwrap();
            assert_eq!(file.size_bytes() as usize, bytes.len());
            assert!(read(file, 0, bytes.len() + 1) == bytes);
        }
        // The other process changes bytes in the middle of the file, and does not change its length.
        others.write_all_at(&[0xAA; 3], 1000).unwrap();
        reader.refresh().unwrap();
        assert_eq!(read(&reader, 999, 5), [bytes[999], 0xAA, 0xAA, 0xAA, bytes[1003]]);
    }
}

/// A refresh must fail while the file has changes that are not synced, or a pinned page. Neither the changes nor the
/// pinned page may be lost.
#[test]
fn a_refresh_keeps_local_changes() {
    let (cache, folder) = (cache(), folder());
    let path = folder.path().join("file");
    fs::write(&path, pattern(4 * PAGE_BYTES, 3)).unwrap();
    let file = open(&cache, &path);
    let others = File::options().write(true).open(&path).unwrap();
    let is_refused = || matches!(file.refresh(), Err(Error::WrongState { .. }));
    write(&file, b"here", PAGE_BYTES);
    others.set_len(PAGE_BYTES as u64).unwrap();
    assert!(is_refused() && file.size_bytes() == 4 * PAGE_BYTES as u64);
    file.sync().unwrap();
    assert_eq!(read(&file, PAGE_BYTES, 4), b"here");
    file.truncate(3 * PAGE_BYTES as u64).unwrap();
    assert!(is_refused());
    file.truncate(5 * PAGE_BYTES as u64).unwrap();
    assert!(is_refused());
    file.sync().unwrap();
    let pin = file.pin(PAGE_BYTES as u64).unwrap();
    others.write_all_at(b"there", PAGE_BYTES as u64).unwrap();
    assert!(matches!(file.refresh(), Err(Error::Busy { .. })));
    assert_eq!(read(&file, PAGE_BYTES, 4), b"here");
    drop(pin);
    file.refresh().unwrap();
    assert_eq!(read(&file, PAGE_BYTES, 5), b"there");
    assert_eq!(cache.create().unwrap().refresh().ok(), Some(()), "a file in memory");
}

/// Readers run concurrently with truncations, appends and refreshes. Each read must find bytes that the file had at
/// some time, or zeros. It must never find bytes of another file.
#[test]
fn reads_during_refreshes_find_the_files_bytes() {
    let (cache, folder) = (cache(), folder());
    let secret = cache.create().unwrap();
    write(&secret, &vec![0x55; 8 * MIB], 0);
    drop(secret);
    let path = folder.path().join("file");
    fs::write(&path, vec![1; 16 * PAGE_BYTES]).unwrap();
    let file = cache.open(Arc::new(FileStore::open_read_only(&path).unwrap())).unwrap();
    let others = File::options().write(true).open(&path).unwrap();
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                    assert!(read(&file, 0, 16 * PAGE_BYTES).iter().all(|byte| *byte < 0x40));
                }
            });
        }
        for round in 0..200 {
            others.set_len(100 + round % 7 * PAGE_BYTES as u64).unwrap();
            others.write_all_at(&vec![round as u8 % 60 + 1; 9 * PAGE_BYTES], round % 5 * PAGE_BYTES as u64).unwrap();
            file.refresh().unwrap();
            let expected = fs::read(&path).unwrap();
            assert!(read(&file, 0, 16 * PAGE_BYTES) == expected, "round {round}");
        }
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

/// After a file is opened, another file takes over its path, or the file is unlinked. The mapping must continue to use
/// the file that was opened, and the other file must not be changed.
#[test]
fn a_mapping_keeps_the_file_that_it_opened() {
    let (cache, folder) = (cache(), folder());
    let (path, other) = (folder.path().join("file"), folder.path().join("other"));
    fs::write(&path, pattern(4 * PAGE_BYTES, 1)).unwrap();
    fs::write(&other, pattern(2 * PAGE_BYTES, 9)).unwrap();
    let file = open(&cache, &path);
    let opened = File::open(&path).unwrap();
    fs::rename(&other, &path).unwrap();
    write(&file, b"mine", 10);
    file.sync().unwrap();
    file.refresh().unwrap();
    assert!(fs::read(&path).unwrap() == pattern(2 * PAGE_BYTES, 9));
    let mut expected = pattern(4 * PAGE_BYTES, 1);
    expected[10..14].copy_from_slice(b"mine");
    let mut found = vec![0; 4 * PAGE_BYTES];
    opened.read_exact_at(&mut found, 0).unwrap();
    assert!(found == expected && read(&file, 0, 5 * PAGE_BYTES) == expected);
    let second = open(&cache, &path);
    assert!(read(&second, 0, PAGE_BYTES) == pattern(2 * PAGE_BYTES, 9)[..PAGE_BYTES]);
    fs::remove_file(&path).unwrap();
    write(&second, b"gone", 0);
    second.sync().unwrap();
    second.refresh().unwrap();
    assert_eq!(read(&second, 0, 4), b"gone");
    assert!(!path.exists());
}

fn faulty_store(bytes: Vec<u8>) -> FaultyStore<MemoryStore> {
    FaultyStore::new(MemoryStore::new(bytes, 512))
}

fn always_failing(errno: i32) -> Faults {
    Faults { fail_per_mille: 1000, errno, ..Faults::default() }
}

/// Fetches the first page of the file by a queue. Returns the result of the fetch.
fn fetch_first_page(queue: &mut Queue, file: &Mapping) -> Result<(), Error> {
    if queue.fetch(file, 0, 1)? == Fetch::Present {
        return Ok(());
    }
    queue.wait(1, Duration::from_secs(600))?;
    queue.next().unwrap().result
}

/// A read error of the store must reach the thread that needs the page: by a read, a partial write, a pin or a queue.
/// The page must not be cached, and the next access must read it again.
#[test]
fn read_errors_are_reported_and_not_cached() {
    for cache in caches() {
        let store = faulty_store(pattern(4 * MIB, 1));
        let file = cache.open(Arc::new(store.clone())).unwrap();
        for round in 1..3 {
            store.set_faults(always_failing(libc::EIO));
            let mut queue = cache.queue(1).unwrap();
            let errors = [
                file.read_at(&mut [0; 10], 0).unwrap_err(),
                file.write_at(b"part", 100).unwrap_err(),
                file.pin(0).map(drop).unwrap_err(),
                file.hold(0).map(drop).unwrap_err(),
                file.zero_range(10, 10).unwrap_err(),
                fetch_first_page(&mut queue, &file).unwrap_err(),
            ];
            assert!(errors.iter().all(|error| errno(error) == Some(libc::EIO)), "{errors:?}");
            assert_eq!((cache.charged_bytes(), store.calls().failed), (0, 6 * round));
            store.set_faults(Faults::default());
            assert!(read(&file, 0, 1000) == pattern(1000, 1));
            assert_eq!(queue.fetch(&file, 0, 1).unwrap(), Fetch::Present);
            drop(queue);
            file.refresh().unwrap();
        }
    }
}

/// A write error of the store must be reported by each sync. Data that was written must still be readable, and must
/// reach the store once its writes succeed again.
#[test]
fn write_errors_lose_no_data() {
    for cache in caches() {
        for number in [libc::EIO, libc::ENOSPC] {
            let store = faulty_store(pattern(4 * MIB, 1));
            let file = cache.open(Arc::new(store.clone())).unwrap();
            let mut expected = pattern(4 * MIB, 1);
            for (round, at) in [100, 2 * MIB - 50, 4 * MIB - 10].into_iter().enumerate() {
                let bytes = [round as u8 + 0x80; 100];
                write(&file, &bytes, at);
                expected.resize(expected.len().max(at + 100), 0);
                expected[at..at + 100].copy_from_slice(&bytes);
                store.set_faults(always_failing(number));
                let errors = [file.sync().unwrap_err(), file.sync_range(at as u64, 1).unwrap_err()];
                assert!(errors.iter().all(|error| errno(error) == Some(number)), "{errors:?}");
                assert!(matches!(file.refresh(), Err(Error::WrongState { .. })), "it is not synced");
                store.set_faults(Faults::default());
                assert!(read(&file, 0, expected.len() + 1) == expected);
            }
            file.sync().unwrap();
            assert!(store.inner().bytes() == expected);
            file.refresh().unwrap();
            assert!(read(&file, 0, expected.len() + 1) == expected);
        }
    }
}

/// A store hangs. Only threads that need that store may wait. A write to a folio under writeback must fail after a
/// second. When the store continues, all bytes must be right.
#[test]
fn a_store_that_hangs_blocks_only_its_callers() {
    let cache = cache();
    let store = faulty_store(pattern(16 * PAGE_BYTES, 1));
    let file = cache.open(Arc::new(store.clone())).unwrap();
    assert!(read(&file, 0, PAGE_BYTES) == pattern(PAGE_BYTES, 1));
    write(&file, b"dirty", 4 * PAGE_BYTES);
    let awaited = stats::get(Counter::FoliosAwaited);
    store.hold();
    std::thread::scope(|scope| {
        let until_held = |count| {
            while store.held() < count {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        let reading = scope.spawn(|| read(&file, 8 * PAGE_BYTES, 10));
        until_held(1);
        let syncing = scope.spawn(|| file.sync());
        until_held(2);
        assert!(read(&file, 0, PAGE_BYTES) == pattern(PAGE_BYTES, 1), "what is in memory is read");
        assert_eq!(read(&file, 4 * PAGE_BYTES, 5), b"dirty");
        write(&file, b"other", 0);
        assert!(matches!(file.write_at(b"again", 4 * PAGE_BYTES as u64), Err(Error::Busy { .. })));
        assert!(stats::get(Counter::FoliosAwaited) > awaited);
        assert!(!reading.is_finished() && !syncing.is_finished());
        store.release();
        assert_eq!(reading.join().unwrap(), pattern(16 * PAGE_BYTES, 1)[8 * PAGE_BYTES..8 * PAGE_BYTES + 10]);
        syncing.join().unwrap().unwrap();
    });
    file.sync().unwrap();
    let bytes = store.inner().bytes();
    assert!(bytes[..5] == *b"other" && bytes[4 * PAGE_BYTES..4 * PAGE_BYTES + 5] == *b"dirty");
}

/// A file with a read-only store must be readable. Every change of the file must fail without an effect.
#[test]
fn read_only_files_reject_changes() {
    for cache in caches() {
        let folder = folder();
        let path = folder.path().join("file");
        let bytes = pattern(3 * MIB, 1);
        fs::write(&path, &bytes).unwrap();
        let file = cache.open(Arc::new(FileStore::open_read_only(&path).unwrap())).unwrap();
        let pin = file.pin(100).unwrap();
        let errors = [
            file.write_at(b"x", 0).unwrap_err(),
            file.write_at(b"", 0).unwrap_err(),
            file.truncate(0).unwrap_err(),
            file.truncate(bytes.len() as u64).unwrap_err(),
            file.zero_range(0, 10).unwrap_err(),
            file.hold(PAGE_BYTES as u64).map(drop).unwrap_err(),
            pin.write_at(b"x", 0).unwrap_err(),
        ];
        assert!(errors.iter().all(|error| matches!(error, Error::ReadOnly) && error.errno() == libc::EBADF));
        assert_eq!(errors[0].to_string(), "the file is read-only");
        pin.set_dirty();
        drop(pin);
        // Nothing is dirty, so the file can be synced and its pages can be evicted.
        file.sync().unwrap();
        file.sync_range(0, 1).unwrap();
        assert!(read(&file, 0, bytes.len()) == bytes && fs::read(&path).unwrap() == bytes);
        file.refresh().unwrap();
        assert_eq!(cache.charged_bytes(), 0);
    }
}

/// One cache writes a regular file, and another cache reads it. A second writer must fail. After a refresh, the reader
/// must see synced data.
#[test]
fn two_caches_share_a_file() {
    let folder = folder();
    let path = folder.path().join("file");
    fs::write(&path, pattern(2 * MIB, 1)).unwrap();
    let [writers, readers] = caches();
    let writer = open(&writers, &path);
    assert!(matches!(FileStore::open(&path), Err(Error::Busy { .. })));
    let reader = readers.open(Arc::new(FileStore::open_read_only(&path).unwrap())).unwrap();
    assert!(read(&reader, 0, 2 * MIB) == pattern(2 * MIB, 1));
    for round in 2..10 {
        let bytes = pattern(round as usize * MIB / 4, round);
        write(&writer, &bytes, 0);
        writer.truncate(bytes.len() as u64).unwrap();
        writer.sync().unwrap();
        reader.refresh().unwrap();
        assert!(read(&reader, 0, 4 * MIB) == bytes, "round {round}");
    }
    drop(writer);
    write(&open(&readers, &path), b"now", 0);
}

/// A huge folio that extends beyond the end of its file is split. A sync must not write the pages beyond the end. It
/// must make them clean, so that they can be evicted.
#[test]
fn pages_behind_the_end_become_clean() {
    let [_, cache] = caches();
    let store = faulty_store(Vec::new());
    let file = cache.open(Arc::new(store.clone())).unwrap();
    file.truncate(2 * MIB as u64).unwrap();
    write(&file, &pattern(PAGE_BYTES + 100, 1), 0);
    assert!(read(&file, 0, 1) == [1] && cache.charged_bytes() == 2 * MIB as u64);
    let pin = file.pin(0).unwrap();
    file.truncate(PAGE_BYTES as u64 + 100).unwrap();
    drop(pin);
    assert!(file.split(0).unwrap() && cache.charged_bytes() == 2 * MIB as u64);
    file.sync().unwrap();
    assert!(store.inner().bytes() == pattern(PAGE_BYTES + 100, 1));
    file.refresh().unwrap();
    assert_eq!(cache.charged_bytes(), 0);
    assert!(read(&file, 0, 2 * PAGE_BYTES) == pattern(PAGE_BYTES + 100, 1));
}

/// A store panics while its pages are written back to make room for another file. Later calls on both files must
/// succeed.
#[test]
fn a_panic_of_a_store_blocks_no_thread() {
    let writeback = Writeback::default().background_percent(100).most_percent(100);
    let page = PageSize::new(PAGE_BYTES).unwrap();
    let caches = Testbed::for_test().caches;
    caches.collapse_by_hand();
    let settings = PageCache::builder("panics").limit(MIB as u64);
    // If a thread blocked nevertheless, it would get an error.
    let timeout = Some(Duration::from_millis(100));
    let cache = settings.policy(Never).page(page).writeback(writeback).timeout(timeout).build_in(caches).unwrap();
    let store = Arc::new(BrokenStore::that_panics(PAGE_BYTES));
    let dirty = cache.open(store.clone()).unwrap();
    write(&dirty, &pattern(MIB, 1), 0);
    let other = cache.open(Arc::new(MemoryStore::new(pattern(MIB, 2), PAGE_BYTES))).unwrap();
    for len in [PAGE_BYTES, 2 * PAGE_BYTES] {
        let lost = catch_unwind(AssertUnwindSafe(|| read(&other, 0, len)));
        assert!(lost.is_err());
    }
    store.panics.store(false, SeqCst);
    assert_eq!(read(&other, 0, 2 * PAGE_BYTES), pattern(2 * PAGE_BYTES, 2));
    dirty.sync().unwrap();
    assert_eq!(read(&dirty, 0, MIB), pattern(MIB, 1));
    drop((dirty, other));
    assert_eq!(cache.charged_bytes(), 0);
}
