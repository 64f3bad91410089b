//! Tests of queues: one thread fetches many pages at the same time, from regular files and from other stores.

#[path = "common/source.rs"]
mod source;

use pagemill_cache::mapping::policy::{Always, Never};
use pagemill_cache::mapping::{Fetch, Mapping, PageCache, Policy, Queue};
use pagemill_core::Error;
use pagemill_core::units::PageSize;
use pagemill_store::{FileStore, MemoryStore, Store};
use pagemill_testbed::Testbed;
use source::source;
use std::collections::BTreeSet;
use std::fs;
use std::sync::Arc;
use std::time::Duration;

const PAGE_BYTES: usize = 4 << 10;
const MIB: usize = 1 << 20;
const WAIT_LIMIT: Duration = Duration::from_secs(600);

/// A file that is removed on drop.
struct TempFile(std::path::PathBuf);

impl TempFile {
    fn new(name: &str, len: usize) -> Self {
        let path = std::env::temp_dir().join(format!("pagemill-queue-{}-{name}", std::process::id()));
        fs::write(&path, bytes(len)).unwrap();
        Self(path)
    }

    fn store(&self) -> Arc<FileStore> {
        Arc::new(FileStore::open(&self.0).unwrap())
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / 999 % 251) as u8 + 1).collect()
}

fn cache(policy: Box<dyn Policy>, limit_bytes: usize) -> PageCache {
    let page = PageSize::new(PAGE_BYTES).unwrap();
    let settings = PageCache::builder("queue").source(source()).limit(limit_bytes as u64).policy(policy).page(page);
    settings.build_in(Testbed::for_test().caches).unwrap()
}

/// Waits for all in-flight reads of the queue, and records the request ids that it reports. Each id must be reported
/// only once.
fn drain(queue: &mut Queue, reported: &mut BTreeSet<u64>) {
    while !queue.is_empty() {
        queue.wait(1, WAIT_LIMIT).unwrap();
        collect_completed(queue, reported);
    }
}

fn collect_completed(queue: &mut Queue, reported: &mut BTreeSet<u64>) {
    while let Some(fetched) = queue.next() {
        fetched.result.unwrap();
        assert!(reported.insert(fetched.token), "{} is reported twice", fetched.token);
    }
}

fn assert_bytes(file: &Mapping, expected: &[u8]) {
    let mut found = vec![0; expected.len() + 1];
    assert_eq!(file.read_at(&mut found, 0).unwrap(), expected.len());
    assert!(found[..expected.len()] == *expected);
}

/// A full queue fetches every page of a file in a mixed order. Each page, including a partial last page, must be
/// reported once and be cached.
#[test]
fn every_page_is_reported_once() {
    let len = 4 * MIB + 100;
    let scratch = TempFile::new("all", len);
    let memory: Arc<dyn Store> = Arc::new(MemoryStore::new(bytes(len), 512));
    for store in [scratch.store(), memory] {
        let cache = cache(Box::new(Never), 8 * MIB);
        let file = cache.open(store).unwrap();
        let pages = len.div_ceil(PAGE_BYTES) as u64;
        let mut queue = cache.queue(32).unwrap();
        let (mut reported, mut present) = (BTreeSet::new(), 0);
        for step in 0..pages {
            let page = step * 577 % pages;
            while queue.is_full() {
                queue.wait(1, WAIT_LIMIT).unwrap();
                collect_completed(&mut queue, &mut reported);
            }
            present += u64::from(queue.fetch(&file, page * PAGE_BYTES as u64 + 5, page).unwrap() == Fetch::Present);
        }
        drain(&mut queue, &mut reported);
        assert_eq!(reported.len() as u64 + present, pages);
        assert_eq!(cache.charged_bytes(), pages * PAGE_BYTES as u64);
        assert_eq!(queue.fetch(&file, 0, 0).unwrap(), Fetch::Present);
        assert_bytes(&file, &bytes(len));
    }
}

/// A queue fetches more pages than the cache can contain, so that earlier pages must be evicted. Huge folios must be
/// read as a whole.
#[test]
fn fetches_beyond_the_limit_evict_pages() {
    let len = 16 * MIB;
    let scratch = TempFile::new("room", len);
    for (policy, limit, step) in
        [(Box::new(Never) as Box<dyn Policy>, MIB, PAGE_BYTES), (Box::new(Always), 8 * MIB, 2 * MIB)]
    {
        let cache = cache(policy, limit);
        let file = cache.open(scratch.store()).unwrap();
        let expected = bytes(len);
        let mut queue = cache.queue(2).unwrap();
        let mut reported = BTreeSet::new();
        for offset in (0..len).step_by(step) {
            while queue.is_full() {
                queue.wait(1, WAIT_LIMIT).unwrap();
                collect_completed(&mut queue, &mut reported);
            }
            assert_eq!(queue.fetch(&file, offset as u64, offset as u64).unwrap(), Fetch::Started);
        }
        drain(&mut queue, &mut reported);
        assert_eq!(reported.len(), len / step);
        assert!(cache.charged_bytes() <= limit as u64);
        assert_bytes(&file, &expected);
    }
}

/// A thread directly reads a page that a queue is reading. The thread must not wait for the queue, even if the thread
/// owns the queue. The queue must still report the page, and must not undo concurrent writes.
#[test]
fn reads_do_not_wait_for_a_queue() {
    let len = 64 * PAGE_BYTES;
    let scratch = TempFile::new("overtaken", len);
    let cache = cache(Box::new(Never), 8 * MIB);
    let file = cache.open(scratch.store()).unwrap();
    let mut queue = cache.queue(8).unwrap();
    for page in 0..8 {
        assert_eq!(queue.fetch(&file, page * PAGE_BYTES as u64, page).unwrap(), Fetch::Started);
    }
    let mut expected = bytes(len);
    assert_bytes(&file, &expected);
    assert_eq!(file.write_at(&[0xAB; 3], 10).unwrap(), 3);
    expected[10..13].fill(0xAB);
    let mut reported = BTreeSet::new();
    drain(&mut queue, &mut reported);
    assert_eq!(reported.len(), 8);
    assert_bytes(&file, &expected);
    file.sync().unwrap();
    assert!(fs::read(&scratch.0).unwrap() == expected);
}

/// Two queues fetch the same pages. Each page must be read from the store only once, and both queues must report it.
#[test]
fn two_queues_share_pages() {
    let len = 16 * PAGE_BYTES;
    let scratch = TempFile::new("two", len);
    let cache = cache(Box::new(Never), 8 * MIB);
    let file = cache.open(scratch.store()).unwrap();
    let mut queues = [cache.queue(16).unwrap(), cache.queue(16).unwrap()];
    for queue in &mut queues {
        for page in 0..16 {
            assert_eq!(queue.fetch(&file, page * PAGE_BYTES as u64, page).unwrap(), Fetch::Started);
        }
    }
    let [one, two] = &mut queues;
    let (mut reported, mut reported_two) = (BTreeSet::new(), BTreeSet::new());
    drain(one, &mut reported);
    drain(two, &mut reported_two);
    assert!(reported.len() == 16 && reported_two.len() == 16);
    assert_eq!(cache.charged_bytes(), len as u64);
}

/// A page is requested again from a queue that is reading it. The page must be read only once, and must be reported
/// once for each request.
#[test]
fn repeated_requests_share_a_read() {
    let scratch = TempFile::new("twice", 8 * PAGE_BYTES);
    let cache = cache(Box::new(Never), 8 * MIB);
    let file = cache.open(scratch.store()).unwrap();
    let mut queue = cache.queue(8).unwrap();
    for token in 0..3 {
        assert_eq!(queue.fetch(&file, 0, token).unwrap(), Fetch::Started);
    }
    assert_eq!((queue.due(), queue.len()), (None, 3));
    // A wait for all of them ends as soon as the read has ended.
    assert_eq!(queue.wait(3, WAIT_LIMIT).unwrap(), 3);
    let mut reported = BTreeSet::new();
    collect_completed(&mut queue, &mut reported);
    assert_eq!(reported, BTreeSet::from([0, 1, 2]));
    assert!(queue.is_empty());
}

/// A page enters its file when its completion is taken. Then another page can be requested, although the queue had no
/// room before.
#[test]
fn a_page_can_be_requested_between_two_completions() {
    let (depth, pages) = (4, 64);
    let scratch = TempFile::new("between", pages as usize * PAGE_BYTES);
    let cache = cache(Box::new(Never), 8 * MIB);
    let file = cache.open(scratch.store()).unwrap();
    let mut queue = cache.queue(depth as u32).unwrap();
    let fetch = |queue: &mut Queue, page: u64| queue.fetch(&file, page * PAGE_BYTES as u64, page);
    (0..depth).for_each(|page| assert_eq!(fetch(&mut queue, page).unwrap(), Fetch::Started));
    let (mut next, mut reported) = (depth, BTreeSet::new());
    while !queue.is_empty() {
        let ready = queue.wait(queue.len(), WAIT_LIMIT).unwrap();
        assert_eq!((ready, queue.is_full()), (queue.len(), ready as u64 == depth));
        assert!(matches!(fetch(&mut queue, pages - 1), Err(Error::Busy { .. })) || !queue.is_full());
        assert!(file.pin_present(reported.len() as u64 * PAGE_BYTES as u64).unwrap().is_none());
        while let Some(fetched) = queue.next() {
            fetched.result.unwrap();
            assert!(reported.insert(fetched.token));
            assert!(file.pin_present(fetched.token * PAGE_BYTES as u64).unwrap().is_some());
            if next < pages {
                assert_eq!(fetch(&mut queue, next).unwrap(), Fetch::Started);
                next += 1;
            }
        }
    }
    assert_eq!(reported.len(), pages as usize);
    assert_bytes(&file, &bytes(pages as usize * PAGE_BYTES));
}

/// A call needs more memory than the cache may have, and fails. Once its pins have ended, reads of other pages, and a
/// queue that has been drained, must find room at once.
#[test]
fn calls_succeed_after_one_that_needed_too_much() {
    let scratch = TempFile::new("too-much", 4 * MIB);
    let cache = cache(Box::new(Never), MIB);
    let file = cache.open(scratch.store()).unwrap();
    let mut queue = cache.queue(512).unwrap();
    for _ in 0..3 {
        assert!(matches!(file.pin_range(0, 2 * MIB), Err(Error::NoMemory { .. })));
        for page in (0..1024).step_by(7) {
            file.read_at(&mut [0; 8], page * PAGE_BYTES as u64).unwrap();
        }
        let mut started = 0;
        let error = loop {
            let offset = (started + 100) * PAGE_BYTES as u64;
            match queue.fetch(&file, offset, started) {
                Ok(_) => started += 1,
                Err(error) => break error,
            }
        };
        assert!(matches!(error, Error::NoMemory { .. }), "{error}");
        assert!(started >= 256, "{started} pages of a cache of 256 were requested");
        drain(&mut queue, &mut BTreeSet::new());
        assert!(queue.fetch(&file, 0, 0).is_ok());
        drain(&mut queue, &mut BTreeSet::new());
    }
}

/// A file is truncated or dropped, or its queue is dropped, while reads are in flight. No truncated bytes may appear,
/// and no memory may leak.
#[test]
fn dropping_files_and_queues_leaks_nothing() {
    let len = 64 * PAGE_BYTES;
    let scratch = TempFile::new("gone", len);
    let cache = cache(Box::new(Never), 8 * MIB);
    let begin = |queue: &mut Queue, file: &Mapping| {
        for page in 0..8 {
            assert_eq!(queue.fetch(file, page * PAGE_BYTES as u64, page).unwrap(), Fetch::Started);
        }
    };
    let mut queue = cache.queue(8).unwrap();
    let file = cache.open(scratch.store()).unwrap();
    begin(&mut queue, &file);
    file.truncate(10).unwrap();
    file.truncate(len as u64).unwrap();
    let mut reported = BTreeSet::new();
    drain(&mut queue, &mut reported);
    assert_eq!(reported.len(), 8);
    let mut expected = vec![0; len];
    expected[..10].copy_from_slice(&bytes(len)[..10]);
    assert_bytes(&file, &expected);
    drop(file);
    // The drop of the last handle has written the bytes to the store.
    assert_bytes(&cache.open(scratch.store()).unwrap(), &expected);

    let scratch = TempFile::new("left", len);
    let file = cache.open(scratch.store()).unwrap();
    begin(&mut queue, &file);
    drop(file);
    drain(&mut queue, &mut BTreeSet::new());
    let file = cache.open(scratch.store()).unwrap();
    begin(&mut queue, &file);
    drop(queue);
    assert_bytes(&file, &bytes(len));
    drop(file);
    assert_eq!(cache.charged_bytes(), 0);
}

/// Invalid requests to a queue must fail without an effect.
#[test]
fn invalid_requests_fail() {
    let scratch = TempFile::new("bad", 4 * PAGE_BYTES);
    let (one, other) = (cache(Box::new(Never), 8 * MIB), cache(Box::new(Never), 8 * MIB));
    let file = one.open(scratch.store()).unwrap();
    let mut queue = one.queue(1).unwrap();
    assert!(matches!(queue.fetch(&file, 4 * PAGE_BYTES as u64, 0), Err(Error::PastEnd { .. })));
    assert!(matches!(queue.fetch(&file, u64::MAX, 0), Err(Error::BadOffset { .. })));
    assert!(matches!(queue.fetch(&other.create().unwrap(), 0, 0), Err(Error::PastEnd { .. })));
    let stranger = other.create().unwrap();
    stranger.write_at(&[1], 0).unwrap();
    assert!(matches!(queue.fetch(&stranger, 0, 0), Err(Error::WrongState { .. })));
    assert_eq!(queue.fetch(&file, 0, 1).unwrap(), Fetch::Started);
    assert!(matches!(queue.fetch(&file, PAGE_BYTES as u64, 2), Err(Error::Busy { .. })));
    drain(&mut queue, &mut BTreeSet::new());
    let in_memory = one.create().unwrap();
    in_memory.truncate(PAGE_BYTES as u64).unwrap();
    assert_eq!(queue.fetch(&in_memory, 0, 3).unwrap(), Fetch::Present, "a hole is there without memory");
    assert_eq!((queue.wait(1, WAIT_LIMIT).unwrap(), queue.len(), queue.depth()), (0, 0, 1));
}
