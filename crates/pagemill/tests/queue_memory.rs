//! Tests of cache memory that queues have registered with the kernel. Reads into this memory must find the right bytes,
//! and the memory must be returned on request. Also tests queues on stores that are not regular files.
#![allow(unsafe_code)] // polls descriptors, forks

#[path = "common/source.rs"]
mod source;

use pagemill_cache::mapping::policy::{Always, Never};
use pagemill_cache::mapping::{Fetch, FolioHint, Mapping, PageCache, Policy, Queue};
use pagemill_core::Error;
use pagemill_core::stats::{self, Counter};
use pagemill_core::units::PageSize;
use pagemill_store::{Faults, FaultyStore, FileStore, MemoryStore};
use pagemill_testbed::Testbed;
use source::source;
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

const PAGE_BYTES: usize = 4 << 10;
const MIB: usize = 1 << 20;
const HUGE_FOLIO_BYTES: usize = 2 * MIB;
const WAIT_LIMIT: Duration = Duration::from_secs(600);

/// Length of a file that does not fit into its cache, in bytes.
const FILE_BYTES: usize = 20 * MIB;

/// Environment variable that makes a child process run its part of a test. Its value is the path of the test's file.
const CHILD_FILE_ENV: &str = "QUEUE_MEMORY_PART";

fn pattern(at: usize, seed: u8) -> u8 {
    (at / 509 % 251) as u8 ^ seed
}

/// Writes a file of `FILE_BYTES` bytes whose pages all differ.
fn write_test_file(folder: &Path, seed: u8) -> PathBuf {
    let path = folder.join(format!("file-{seed}"));
    fs::write(&path, (0..FILE_BYTES).map(|at| pattern(at, seed)).collect::<Vec<_>>()).unwrap();
    path
}

fn pagemill_cache(policy: Box<dyn Policy>, limit_bytes: usize) -> (&'static Testbed, PageCache) {
    let settings = PageCache::builder("queue")
        .source(source())
        .limit(limit_bytes as u64)
        .policy(policy)
        .page(PageSize::new(PAGE_BYTES).unwrap());
    let pagemill = Testbed::for_test();
    (pagemill, settings.build_in(pagemill.caches).unwrap())
}

fn cache(policy: Box<dyn Policy>, limit_bytes: usize) -> PageCache {
    pagemill_cache(policy, limit_bytes).1
}

fn open(cache: &PageCache, path: &Path) -> Mapping {
    cache.open(Arc::new(FileStore::open_read_only(path).unwrap())).unwrap()
}

/// Waits until the queue reports at least one page, and checks each page that it reports. The request id of a page is
/// the page's offset.
fn check_completed(queue: &mut Queue, file: &Mapping, seed: u8) {
    queue.wait(1, WAIT_LIMIT).unwrap();
    while let Some(fetched) = queue.next() {
        fetched.result.unwrap();
        check_huge_folio(file, fetched.token as usize, seed);
    }
}

/// Compares the page at `offset`, and the first and last page of its huge folio, with the pattern of the file.
fn check_huge_folio(file: &Mapping, offset: usize, seed: u8) {
    let mut bytes = [0; PAGE_BYTES];
    for offset in [
        offset,
        offset / HUGE_FOLIO_BYTES * HUGE_FOLIO_BYTES,
        offset / HUGE_FOLIO_BYTES * HUGE_FOLIO_BYTES + HUGE_FOLIO_BYTES - PAGE_BYTES,
    ] {
        assert_eq!(file.read_at(&mut bytes, offset as u64).unwrap(), PAGE_BYTES);
        let is_right = bytes.iter().enumerate().all(|(at, byte)| *byte == pattern(offset + at, seed));
        assert!(is_right, "at {offset}");
    }
}

/// Reads all of a file in order by the queue, which evicts earlier pages, and compares the bytes with the pattern of
/// the file.
fn read_all(queue: &mut Queue, file: &Mapping, step: usize, seed: u8) {
    for offset in (0..FILE_BYTES).step_by(step) {
        while queue.is_full() {
            check_completed(queue, file, seed);
        }
        if queue.fetch(file, offset as u64, offset as u64).unwrap() == Fetch::Present {
            check_huge_folio(file, offset, seed);
        }
    }
    while !queue.is_empty() {
        check_completed(queue, file, seed);
    }
}

/// Reads until the queue has registered memory. If the kernel does not register memory here, returns the reason.
fn register_memory(queue: &mut Queue, file: &Mapping, seed: u8) -> Result<(), &'static str> {
    for _ in 0..4 {
        read_all(queue, file, HUGE_FOLIO_BYTES, seed);
        if queue.registered_bytes() > 0 {
            return Ok(());
        }
    }
    // Only the system can refuse the registration, and such a refusal must have been counted.
    assert!(
        stats::get(Counter::RegionsRefused) + stats::get(Counter::RingsRefused) > 0,
        "no registration was attempted"
    );
    Err("memory cannot be registered here")
}

fn is_readable(queue: &mut Queue, timeout: Duration) -> bool {
    let fd = queue.watch().unwrap().as_raw_fd();
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: the array has one entry, which outlives the call.
    unsafe { libc::poll(&raw mut poll, 1, timeout.as_millis() as i32) == 1 }
}

/// Reclaim requests memory that a queue has registered. The memory must not be returned to the system before the queue
/// has released it. Later reads must use new pages, even after these are registered. The test uses huge folios and then
/// small ones.
#[test]
fn registered_memory_is_returned_after_its_queue_released_it() {
    let folder = tempfile::tempdir().unwrap();
    let paths = [1, 2].map(|seed| write_test_file(folder.path(), seed));
    for (policy, step) in [(Box::new(Always) as Box<dyn Policy>, HUGE_FOLIO_BYTES), (Box::new(Never), PAGE_BYTES)] {
        let cache = cache(policy, 8 * MIB);
        let mut queue = cache.queue(4).unwrap();
        for (round, path) in paths.iter().cycle().take(3).enumerate() {
            let seed = (round % 2) as u8 + 1;
            let mapping = open(&cache, path);
            read_all(&mut queue, &mapping, step, seed);
            if let Err(reason) = register_memory(&mut queue, &mapping, seed) {
                return println!("skipped: {reason}");
            }
            read_all(&mut queue, &mapping, step, seed);
            drop(mapping);
            let registered = queue.registered_bytes();
            assert!(registered >= 8 * MIB && registered.is_multiple_of(HUGE_FOLIO_BYTES), "{registered}");
            // All folios are free now, but only memory that is not registered may be returned.
            let unregistered = cache.shrink();
            assert!(unregistered <= (8 * MIB) as u64, "{unregistered} returned, {registered} registered");
            assert_eq!((queue.registered_bytes(), cache.shrink()), (registered, 0));
            queue.wait(0, Duration::ZERO).unwrap();
            assert_eq!(queue.registered_bytes(), 0);
            assert_eq!(cache.shrink(), registered as u64);
        }
    }
}

/// Reclaim requests memory while a queue reads. All bytes must be right, and all memory must be returned between two
/// calls of the queue.
#[test]
fn a_busy_queue_releases_memory_on_request() {
    let folder = tempfile::tempdir().unwrap();
    let paths = [1, 2].map(|seed| write_test_file(folder.path(), seed));
    let cache = cache(Box::new(Always), 16 * MIB);
    let mut queue = cache.queue(2).unwrap();
    for _ in 0..3 {
        let [one, two] = paths.each_ref().map(|path| open(&cache, path));
        if let Err(reason) = register_memory(&mut queue, &one, 1) {
            return println!("skipped: {reason}");
        }
        drop(one);
        let offsets = (0..FILE_BYTES).step_by(HUGE_FOLIO_BYTES).cycle().take(40);
        let mut returned = 0;
        for offset in offsets {
            while queue.is_full() {
                check_completed(&mut queue, &two, 2);
            }
            // Some of the memory is free at first.
            returned += cache.shrink();
            let _ = queue.fetch(&two, offset as u64, offset as u64).unwrap();
        }
        while !queue.is_empty() {
            check_completed(&mut queue, &two, 2);
        }
        drop(two);
        queue.wait(0, Duration::ZERO).unwrap();
        returned += cache.shrink();
        queue.wait(0, Duration::ZERO).unwrap();
        returned += cache.shrink();
        assert!(returned >= (16 * MIB) as u64 && queue.registered_bytes() == 0, "{returned}");
    }
}

/// Two queues have registered the same memory. The memory must be returned only after both queues have released it.
/// Dropping a queue must release what the queue has registered.
#[test]
fn memory_is_returned_after_the_last_queue_released_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_test_file(folder.path(), 3);
    let cache = cache(Box::new(Always), 8 * MIB);
    let mut queues = [cache.queue(2).unwrap(), cache.queue(2).unwrap()];
    let mapping = open(&cache, &path);
    for queue in &mut queues {
        if let Err(reason) = register_memory(queue, &mapping, 3) {
            return println!("skipped: {reason}");
        }
    }
    let registered = queues[0].registered_bytes();
    drop(mapping);
    cache.shrink();
    let [mut one, other] = queues;
    one.wait(0, Duration::ZERO).unwrap();
    assert_eq!((one.registered_bytes(), cache.shrink()), (0, 0), "the other queue has it registered");
    drop(other);
    assert_eq!(cache.shrink(), registered as u64);
}

/// An event loop has no reads in flight. A request for memory must wake the loop, so that its queue can release the
/// memory.
#[test]
fn an_idle_event_loop_is_woken_to_release_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_test_file(folder.path(), 4);
    let cache = cache(Box::new(Always), 8 * MIB);
    let mut queue = cache.queue(4).unwrap();
    let mapping = open(&cache, &path);
    if let Err(reason) = register_memory(&mut queue, &mapping, 4) {
        return println!("skipped: {reason}");
    }
    for _ in 0..3 {
        drop(open(&cache, &path));
        // Discards wake-ups of earlier requests, which may arrive late.
        while is_readable(&mut queue, Duration::from_millis(1)) {
            queue.wait(0, Duration::ZERO).unwrap();
        }
        assert!(queue.registered_bytes() > 0);
        mapping.refresh().unwrap();
        assert_eq!(cache.shrink(), 0);
        assert!(is_readable(&mut queue, WAIT_LIMIT));
        queue.wait(0, Duration::ZERO).unwrap();
        assert_eq!(queue.registered_bytes(), 0);
        assert!(cache.shrink() > 0);
        let reopened = open(&cache, &path);
        register_memory(&mut queue, &reopened, 4).unwrap();
    }
}

/// A fork child does not have the registered memory of its parent. Calls on the queue must fail in the child before
/// they access that memory, and the child must be able to drop the objects that it inherited. Calls of the parent must
/// continue to work.
#[test]
fn calls_of_a_fork_child_fail() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_test_file(folder.path(), 5);
    let (pagemill, cache) = pagemill_cache(Box::new(Always), 8 * MIB);
    let mut queue = cache.queue(4).unwrap();
    let mapping = open(&cache, &path);
    if let Err(reason) = register_memory(&mut queue, &mapping, 5) {
        return println!("skipped: {reason}");
    }
    let mut hint = FolioHint::default();
    drop(mapping.pin_hinted(&mut hint, 0).unwrap());
    // A completed read, whose page is not in the file yet.
    mapping.dont_need(0, HUGE_FOLIO_BYTES as u64).unwrap();
    assert_eq!(queue.fetch(&mapping, 0, 0).unwrap(), Fetch::Started);
    assert_eq!(queue.wait(1, WAIT_LIMIT).unwrap(), 1);
    // SAFETY: `after_fork` follows on both sides, with nothing else before it.
    unsafe { pagemill.instance.before_fork() };
    // SAFETY: the child ends without returning to the test.
    let pid = unsafe { libc::fork() };
    // SAFETY: called after `before_fork`.
    unsafe { pagemill.instance.after_fork() };
    if pid == 0 {
        // SAFETY: the process is a new child, and this is its only thread.
        unsafe { pagemill.instance.begin_child() };
        let is_refused = |result: Result<(), Error>| u8::from(matches!(result, Err(Error::WrongState { .. })));
        let mut refused = 0;
        for offset in (0..FILE_BYTES).step_by(HUGE_FOLIO_BYTES) {
            refused |= 1 - is_refused(mapping.read_at(&mut [0; PAGE_BYTES], offset as u64).map(drop));
            refused |= (1 - is_refused(mapping.pin(offset as u64).map(drop))) << 1;
            let mut copy = hint;
            refused |= (1 - is_refused(mapping.pin_hinted(&mut copy, offset as u64).map(drop))) << 4;
            let read = mapping.read_at_hinted(&mut copy, &mut [0; 8], offset as u64);
            refused |= (1 - is_refused(read.map(drop))) << 5;
            refused |= (1 - is_refused(queue.fetch(&mapping, offset as u64, 0).map(drop))) << 2;
        }
        refused |= (1 - is_refused(queue.wait(0, Duration::ZERO).map(drop))) << 3;
        refused |= u8::from(queue.next().is_some()) << 6;
        drop((queue, mapping, cache));
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(refused.into()) };
    }
    assert!(pid > 0);
    let mut status = 0;
    // SAFETY: waits for a child of this test, and writes `status`.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(status, 0, "a signal, or a bit for each kind of call that did not fail");
    queue.next().unwrap().result.unwrap();
    read_all(&mut queue, &mapping, HUGE_FOLIO_BYTES, 5);
    drop(mapping);
    let registered = queue.registered_bytes();
    cache.shrink();
    queue.wait(0, Duration::ZERO).unwrap();
    assert_eq!(cache.shrink(), registered as u64);
}

/// If the system does not allow locked memory, a queue must try to register memory only once, and must then read
/// without registered memory.
#[test]
fn a_queue_reads_without_registered_memory() {
    const TEST_NAME: &str = "a_queue_reads_without_registered_memory";
    if let Some(path) = std::env::var_os(CHILD_FILE_ENV) {
        let cache = cache(Box::new(Always), 8 * MIB);
        let mut queue = cache.queue(4).unwrap();
        let mapping = open(&cache, Path::new(&path));
        assert!(register_memory(&mut queue, &mapping, 6).is_err());
        read_all(&mut queue, &mapping, HUGE_FOLIO_BYTES, 6);
        assert_eq!((stats::get(Counter::RegionsRegistered), queue.registered_bytes()), (0, 0));
        if stats::get(Counter::RingsRefused) == 0 {
            assert_eq!(stats::get(Counter::RegionsRefused), 1);
        }
        drop(mapping);
        return assert!(cache.shrink() >= (8 * MIB) as u64);
    }
    // SAFETY: the call is a query without effect.
    if unsafe { libc::geteuid() } != 0 {
        return println!("skipped: only root becomes a user without privileges");
    }
    // The unprivileged user may not have access to this program's directory, so the child runs a copy.
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let program = folder.path().join("tests");
    fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -l 0; exec \"$0\" \"$@\""]).arg(program).args([
        "--exact",
        &source::harness_name(TEST_NAME),
        "--nocapture",
    ]);
    limited.env(CHILD_FILE_ENV, write_test_file(folder.path(), 6)).current_dir(folder.path()).uid(65534).gid(65534);
    let output = limited.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Opens a file on a store whose reads the test can delay. Returns the store and the file.
fn open_delayed_store(cache: &PageCache, len: usize) -> (FaultyStore<MemoryStore>, Mapping) {
    let bytes = (0..len).map(|at| pattern(at, 7)).collect();
    let store = FaultyStore::new(MemoryStore::new(bytes, 512));
    let file = cache.open(Arc::new(store.clone())).unwrap();
    (store, file)
}

/// All reads of a delayed store must begin before the first one ends. Both a wait for the queue and a poll of its file
/// descriptor must report their completions.
#[test]
fn reads_of_a_delayed_store_overlap() {
    const READ_COUNT: usize = 32;
    for is_watched in [false, true] {
        let cache = cache(Box::new(Never), 8 * MIB);
        let (store, file) = open_delayed_store(&cache, READ_COUNT * PAGE_BYTES + 100);
        let mut queue = cache.queue(READ_COUNT as u32).unwrap();
        store.hold();
        for page in 0..READ_COUNT {
            let offset = (page * PAGE_BYTES) as u64;
            assert_eq!(queue.fetch(&file, offset, offset).unwrap(), Fetch::Started);
        }
        assert!(
            queue.is_full()
                && matches!(queue.fetch(&file, (READ_COUNT * PAGE_BYTES) as u64, 0), Err(Error::Busy { .. }))
        );
        while store.held() < READ_COUNT {
            std::thread::yield_now();
        }
        assert_eq!(queue.wait(1, Duration::from_millis(1)).unwrap(), 0);
        if is_watched {
            while is_readable(&mut queue, Duration::ZERO) {
                assert_eq!(queue.wait(0, Duration::ZERO).unwrap(), 0);
            }
        }
        store.release();
        let mut completed = 0;
        while completed < READ_COUNT {
            if is_watched {
                assert!(is_readable(&mut queue, WAIT_LIMIT), "{completed} of {READ_COUNT} completed");
                queue.wait(0, Duration::ZERO).unwrap();
            } else {
                assert!(queue.wait(READ_COUNT - completed, WAIT_LIMIT).unwrap() > 0);
            }
            while let Some(fetched) = queue.next() {
                fetched.result.unwrap();
                let (mut bytes, offset) = ([0; PAGE_BYTES], fetched.token);
                assert_eq!(file.read_at(&mut bytes, offset).unwrap(), PAGE_BYTES);
                assert!((offset as usize..).zip(bytes).all(|(at, byte)| byte == pattern(at, 7)), "at {offset}");
                completed += 1;
            }
        }
        assert!(queue.is_empty());
        assert_eq!(store.calls().reads, READ_COUNT as u64, "each page was read once");
    }
}

/// A queue reads a file of the system and a delayed store. A wait for both must sleep until the store has completed its
/// read, although the other completion could be taken. The thread's CPU time must be less than half of the waiting time.
#[test]
fn a_wait_for_a_file_and_a_store_sleeps() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_test_file(folder.path(), 3);
    let cache = cache(Box::new(Never), 8 * MIB);
    let (store, delayed) = open_delayed_store(&cache, PAGE_BYTES);
    let fast = open(&cache, &path);
    let mut queue = cache.queue(4).unwrap();
    store.hold();
    assert_eq!(queue.fetch(&delayed, 0, 1).unwrap(), Fetch::Started);
    assert_eq!(queue.fetch(&fast, 0, 2).unwrap(), Fetch::Started);
    assert_eq!(queue.wait(1, WAIT_LIMIT).unwrap(), 1);
    let cpu_time = || {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the call writes `time`.
        assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) }, 0);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    };
    let (begun, cpu_before) = (std::time::Instant::now(), cpu_time());
    assert_eq!(queue.wait(2, Duration::from_millis(300)).unwrap(), 1);
    assert!((cpu_time() - cpu_before) * 2 < begun.elapsed(), "the wait used {:?}", cpu_time() - cpu_before);
    store.release();
    assert_eq!(queue.wait(2, WAIT_LIMIT).unwrap(), 2);
    let tokens: [u64; 2] = [(); 2].map(|()| queue.next().unwrap().token);
    assert_eq!(tokens, [2, 1]);
}

/// A read that fails must be reported and must not be cached. Truncated data must not come back. Reads that are in
/// flight when their queue is dropped must be cancelled, and their memory must be freed.
#[test]
fn delayed_reads_may_fail_or_be_cancelled() {
    let cache = cache(Box::new(Always), 16 * MIB);
    let (store, file) = open_delayed_store(&cache, 4 * HUGE_FOLIO_BYTES);
    let mut queue = cache.queue(4).unwrap();
    let fetch = |queue: &mut Queue, file: &Mapping| {
        for at in 0..4 {
            assert_eq!(queue.fetch(file, (at * HUGE_FOLIO_BYTES) as u64, at as u64).unwrap(), Fetch::Started);
        }
    };
    let drain = |queue: &mut Queue, is_failed: bool| {
        let mut completed = 0;
        while !queue.is_empty() {
            assert!(queue.wait(1, WAIT_LIMIT).unwrap() > 0);
            while let Some(fetched) = queue.next() {
                assert_eq!(matches!(fetched.result, Err(Error::Store { .. })), is_failed, "{fetched:?}");
                completed += 1;
            }
        }
        assert_eq!(completed, 4);
    };
    store.set_faults(Faults { fails_after: Some(0), ..Faults::default() });
    fetch(&mut queue, &file);
    drain(&mut queue, true);
    assert_eq!((cache.charged_bytes(), store.calls().failed), (0, 4));
    store.set_faults(Faults::default());

    store.hold();
    fetch(&mut queue, &file);
    let kept = HUGE_FOLIO_BYTES + 10;
    [kept, 4 * HUGE_FOLIO_BYTES].into_iter().for_each(|len| file.truncate(len as u64).unwrap());
    store.release();
    drain(&mut queue, false);
    let mut bytes = vec![1; 4 * HUGE_FOLIO_BYTES];
    assert_eq!(file.read_at(&mut bytes, 0).unwrap(), bytes.len());
    assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == if at < kept { pattern(at, 7) } else { 0 }));
    drop(file);

    let (store, file) = open_delayed_store(&cache, 4 * HUGE_FOLIO_BYTES);
    store.hold();
    fetch(&mut queue, &file);
    assert_eq!(cache.charged_bytes(), (4 * HUGE_FOLIO_BYTES) as u64);
    drop(queue);
    while cache.charged_bytes() > 0 {
        std::thread::yield_now();
    }
    store.release();
}
