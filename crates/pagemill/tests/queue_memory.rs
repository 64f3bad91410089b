//! Memory of a cache that queues have registered: right bytes whatever changes, given back on request; and reads from
//! stores that are not system files.
#![allow(unsafe_code)] // polls descriptors, forks

use pagemill::mapping::policy::{Always, Never};
use pagemill::mapping::{Cache, Fetch, Mapping, Policy, Queue, Settings};
use pagemill::stats::{self, Counter};
use pagemill::store::{Faults, FaultyStore, FileStore, MemoryStore};
use pagemill::units::PageSize;
use pagemill::{Error, Pagemill};
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

const PAGE: usize = 4 << 10;
const MIB: usize = 1 << 20;
const HUGE: usize = 2 * MIB;
const LONG: Duration = Duration::from_secs(600);

/// For files that do not fit into their caches.
const FILE_BYTES: usize = 20 * MIB;

/// Names the part of a test that a child runs, and its file.
const PART: &str = "QUEUE_MEMORY_PART";

fn pattern(at: usize, seed: u8) -> u8 {
    (at / 509 % 251) as u8 ^ seed
}

/// A file of this many bytes; no two pages are alike.
fn file(folder: &Path, seed: u8) -> PathBuf {
    let path = folder.join(format!("file-{seed}"));
    fs::write(&path, (0..FILE_BYTES).map(|at| pattern(at, seed)).collect::<Vec<_>>()).unwrap();
    path
}

fn pagemill_cache(policy: Box<dyn Policy>, limit_bytes: usize) -> (&'static Pagemill, Cache) {
    let settings =
        Settings { policy, page: PageSize::new(PAGE).unwrap(), ..Settings::new("queue", limit_bytes as u64) };
    let pagemill = Pagemill::for_test();
    (pagemill, pagemill.caches.make(settings).unwrap())
}

fn cache(policy: Box<dyn Policy>, limit_bytes: usize) -> Cache {
    pagemill_cache(policy, limit_bytes).1
}

fn open(cache: &Cache, path: &Path) -> Mapping {
    cache.open(Arc::new(FileStore::open_read_only(path).unwrap())).unwrap()
}

/// Waits for at least one page, and checks each that arrived: its offset is its token.
fn take(queue: &mut Queue, file: &Mapping, seed: u8) {
    queue.wait(1, LONG).unwrap();
    while let Some(fetched) = queue.next() {
        fetched.result.unwrap();
        check(file, fetched.token as usize, seed);
    }
}

/// Compares a page in each part of a huge folio.
fn check(file: &Mapping, offset: usize, seed: u8) {
    let mut bytes = [0; PAGE];
    for offset in [offset, offset / HUGE * HUGE, offset / HUGE * HUGE + HUGE - PAGE] {
        assert_eq!(file.read_at(&mut bytes, offset as u64).unwrap(), PAGE);
        let is_right = bytes.iter().enumerate().all(|(at, byte)| *byte == pattern(offset + at, seed));
        assert!(is_right, "at {offset}");
    }
}

/// Reads through a file in order, so that all of it comes from the store, and compares.
fn read_all(queue: &mut Queue, file: &Mapping, step: usize, seed: u8) {
    for offset in (0..FILE_BYTES).step_by(step) {
        while queue.is_full() {
            take(queue, file, seed);
        }
        if queue.fetch(file, offset as u64, offset as u64).unwrap() == Fetch::Present {
            check(file, offset, seed);
        }
    }
    while !queue.is_empty() {
        take(queue, file, seed);
    }
}

/// Reads until the memory is registered. Returns why it cannot be.
fn register(queue: &mut Queue, file: &Mapping, seed: u8) -> Result<(), &'static str> {
    for _ in 0..4 {
        read_all(queue, file, HUGE, seed);
        if queue.registered_bytes() > 0 {
            return Ok(());
        }
    }
    // Nothing else in this process can cause a refusal.
    assert!(stats::get(Counter::RegionsRefused) + stats::get(Counter::RingsRefused) > 0, "nothing was tried");
    Err("memory cannot be registered here")
}

fn is_readable(queue: &mut Queue, timeout: Duration) -> bool {
    let fd = queue.watch().unwrap().as_raw_fd();
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry, which outlives the call.
    unsafe { libc::poll(&raw mut poll, 1, timeout.as_millis() as i32) == 1 }
}

/// Registered memory is not given back until its queue was notified. Later data is read into the new pages, also after
/// registering again. Both for huge folios and for pages.
#[test]
fn registered_memory_goes_when_its_queue_knows() {
    let folder = tempfile::tempdir().unwrap();
    let paths = [1, 2].map(|seed| file(folder.path(), seed));
    for (policy, step) in [(Box::new(Always) as Box<dyn Policy>, HUGE), (Box::new(Never), PAGE)] {
        let cache = cache(policy, 8 * MIB);
        let mut queue = cache.queue(4).unwrap();
        for (round, path) in paths.iter().cycle().take(3).enumerate() {
            let seed = (round % 2) as u8 + 1;
            let mapping = open(&cache, path);
            read_all(&mut queue, &mapping, step, seed);
            if let Err(reason) = register(&mut queue, &mapping, seed) {
                return println!("skipped: {reason}");
            }
            read_all(&mut queue, &mapping, step, seed);
            drop(mapping);
            let registered = queue.registered_bytes();
            assert!(registered >= 8 * MIB && registered.is_multiple_of(HUGE), "{registered}");
            // All of it is free now; at most the unregistered rest is given back.
            let beside = cache.give_back();
            assert!(beside <= (8 * MIB) as u64, "{beside} given back beside {registered} registered");
            assert_eq!((queue.registered_bytes(), cache.give_back()), (registered, 0));
            queue.wait(0, Duration::ZERO).unwrap();
            assert_eq!(queue.registered_bytes(), 0);
            assert_eq!(cache.give_back(), registered as u64);
        }
    }
}

/// A request during reads: bytes stay right, and everything is given back between two calls of the queue.
#[test]
fn a_busy_queue_gives_memory_up() {
    let folder = tempfile::tempdir().unwrap();
    let paths = [1, 2].map(|seed| file(folder.path(), seed));
    let cache = cache(Box::new(Always), 16 * MIB);
    let mut queue = cache.queue(2).unwrap();
    for _ in 0..3 {
        let [one, two] = paths.each_ref().map(|path| open(&cache, path));
        if let Err(reason) = register(&mut queue, &one, 1) {
            return println!("skipped: {reason}");
        }
        drop(one);
        let offsets = (0..FILE_BYTES).step_by(HUGE).cycle().take(40);
        let mut given = 0;
        for offset in offsets {
            while queue.is_full() {
                take(&mut queue, &two, 2);
            }
            // A part of the memory is free at first.
            given += cache.give_back();
            let _ = queue.fetch(&two, offset as u64, offset as u64).unwrap();
        }
        while !queue.is_empty() {
            take(&mut queue, &two, 2);
        }
        drop(two);
        queue.wait(0, Duration::ZERO).unwrap();
        given += cache.give_back();
        queue.wait(0, Duration::ZERO).unwrap();
        given += cache.give_back();
        assert!(given >= (16 * MIB) as u64 && queue.registered_bytes() == 0, "{given}");
    }
}

/// Two queues have the same memory registered: it is given back after both released it. Dropping a queue releases its
/// registration.
#[test]
fn the_last_queue_gives_memory_up() {
    let folder = tempfile::tempdir().unwrap();
    let path = file(folder.path(), 3);
    let cache = cache(Box::new(Always), 8 * MIB);
    let mut queues = [cache.queue(2).unwrap(), cache.queue(2).unwrap()];
    let mapping = open(&cache, &path);
    for queue in &mut queues {
        if let Err(reason) = register(queue, &mapping, 3) {
            return println!("skipped: {reason}");
        }
    }
    let registered = queues[0].registered_bytes();
    drop(mapping);
    cache.give_back();
    let [mut one, other] = queues;
    one.wait(0, Duration::ZERO).unwrap();
    assert_eq!((one.registered_bytes(), cache.give_back()), (0, 0), "the other has it");
    drop(other);
    assert_eq!(cache.give_back(), registered as u64);
}

/// An event loop without anything in flight is woken, so that its queue can release its memory.
#[test]
fn a_loop_of_events_is_asked_for_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = file(folder.path(), 4);
    let cache = cache(Box::new(Always), 8 * MIB);
    let mut queue = cache.queue(4).unwrap();
    let mapping = open(&cache, &path);
    if let Err(reason) = register(&mut queue, &mapping, 4) {
        return println!("skipped: {reason}");
    }
    for _ in 0..3 {
        drop(open(&cache, &path));
        // Earlier wake-ups do not count, however late their signal is.
        while is_readable(&mut queue, Duration::from_millis(1)) {
            queue.wait(0, Duration::ZERO).unwrap();
        }
        assert!(queue.registered_bytes() > 0);
        mapping.refresh().unwrap();
        assert_eq!(cache.give_back(), 0);
        assert!(is_readable(&mut queue, LONG));
        queue.wait(0, Duration::ZERO).unwrap();
        assert_eq!(queue.registered_bytes(), 0);
        assert!(cache.give_back() > 0);
        let again = open(&cache, &path);
        register(&mut queue, &again, 4).unwrap();
    }
}

/// A fork child does not have the memory: it is refused before any access, and drops what it inherited; the parent
/// continues.
#[test]
fn a_fork_child_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = file(folder.path(), 5);
    let (pagemill, cache) = pagemill_cache(Box::new(Always), 8 * MIB);
    let mut queue = cache.queue(4).unwrap();
    let mapping = open(&cache, &path);
    if let Err(reason) = register(&mut queue, &mapping, 5) {
        return println!("skipped: {reason}");
    }
    // SAFETY: `after_fork` follows on both sides, nothing else before it.
    unsafe { pagemill.before_fork() };
    // SAFETY: the child ends without returning to the test.
    let pid = unsafe { libc::fork() };
    // SAFETY: after `before_fork`.
    unsafe { pagemill.after_fork() };
    if pid == 0 {
        // SAFETY: a new child, whose one thread this is.
        unsafe { pagemill.begin_child() };
        let is_refused = |result: Result<(), Error>| u8::from(matches!(result, Err(Error::WrongState { .. })));
        let mut refused = 0;
        for offset in (0..FILE_BYTES).step_by(HUGE) {
            refused |= 1 - is_refused(mapping.read_at(&mut [0; PAGE], offset as u64).map(drop));
            refused |= (1 - is_refused(mapping.pin(offset as u64).map(drop))) << 1;
            refused |= (1 - is_refused(queue.fetch(&mapping, offset as u64, 0).map(drop))) << 2;
        }
        refused |= (1 - is_refused(queue.wait(0, Duration::ZERO).map(drop))) << 3;
        drop((queue, mapping, cache));
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(refused.into()) };
    }
    assert!(pid > 0);
    let mut status = 0;
    // SAFETY: our own child; writes `status`.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(status, 0, "a signal, or a bit for each that was not refused");
    read_all(&mut queue, &mapping, HUGE, 5);
    drop(mapping);
    let registered = queue.registered_bytes();
    cache.give_back();
    queue.wait(0, Duration::ZERO).unwrap();
    assert_eq!(cache.give_back(), registered as u64);
}

/// Where little memory may be locked, a queue tries once, and reads nevertheless.
#[test]
fn unregistered_memory_does() {
    const TEST: &str = "unregistered_memory_does";
    if let Some(path) = std::env::var_os(PART) {
        let cache = cache(Box::new(Always), 8 * MIB);
        let mut queue = cache.queue(4).unwrap();
        let mapping = open(&cache, Path::new(&path));
        assert!(register(&mut queue, &mapping, 6).is_err());
        read_all(&mut queue, &mapping, HUGE, 6);
        assert_eq!((stats::get(Counter::RegionsRegistered), queue.registered_bytes()), (0, 0));
        if stats::get(Counter::RingsRefused) == 0 {
            assert_eq!(stats::get(Counter::RegionsRefused), 1);
        }
        drop(mapping);
        return assert!(cache.give_back() >= (8 * MIB) as u64);
    }
    // SAFETY: a query without effect.
    if unsafe { libc::geteuid() } != 0 {
        return println!("skipped: only root becomes a user without privileges");
    }
    // That user may not have access to this program's directory.
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let program = folder.path().join("tests");
    fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -l 0; exec \"$0\" \"$@\""]).arg(program).args(["--exact", TEST, "--nocapture"]);
    limited.env(PART, file(folder.path(), 6)).current_dir(folder.path()).uid(65534).gid(65534);
    let output = limited.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// A store that a queue reads from, and a file on it.
fn slow(cache: &Cache, len: usize) -> (FaultyStore<MemoryStore>, Mapping) {
    let bytes = (0..len).map(|at| pattern(at, 7)).collect();
    let store = FaultyStore::new(MemoryStore::new(bytes, 512));
    let file = cache.open(Arc::new(store.clone())).unwrap();
    (store, file)
}

/// Reads of a slow store all begin before the first has ended; the queue, its waits and its descriptor get the
/// completions.
#[test]
fn slow_stores_are_asked_together() {
    const COUNT: usize = 32;
    for is_watched in [false, true] {
        let cache = cache(Box::new(Never), 8 * MIB);
        let (store, file) = slow(&cache, COUNT * PAGE + 100);
        let mut queue = cache.queue(COUNT as u32).unwrap();
        store.hold();
        for page in 0..COUNT {
            let offset = (page * PAGE) as u64;
            assert_eq!(queue.fetch(&file, offset, offset).unwrap(), Fetch::Started);
        }
        assert!(queue.is_full() && matches!(queue.fetch(&file, (COUNT * PAGE) as u64, 0), Err(Error::Busy { .. })));
        while store.held() < COUNT {
            std::thread::yield_now();
        }
        assert_eq!(queue.wait(1, Duration::from_millis(1)).unwrap(), 0);
        if is_watched {
            while is_readable(&mut queue, Duration::ZERO) {
                assert_eq!(queue.wait(0, Duration::ZERO).unwrap(), 0);
            }
        }
        store.release();
        let mut told = 0;
        while told < COUNT {
            if is_watched {
                assert!(is_readable(&mut queue, LONG), "{told} of {COUNT} were told");
                queue.wait(0, Duration::ZERO).unwrap();
            } else {
                assert!(queue.wait(COUNT - told, LONG).unwrap() > 0);
            }
            while let Some(fetched) = queue.next() {
                fetched.result.unwrap();
                let (mut bytes, offset) = ([0; PAGE], fetched.token);
                assert_eq!(file.read_at(&mut bytes, offset).unwrap(), PAGE);
                assert!((offset as usize..).zip(bytes).all(|(at, byte)| byte == pattern(at, 7)), "at {offset}");
                told += 1;
            }
        }
        assert!(queue.is_empty());
        assert_eq!(store.calls().reads, COUNT as u64, "each was read once");
    }
}

/// A failed read of a slow store is reported and not cached; truncated data does not come back; reads in flight when
/// their queue is dropped are cancelled, with their memory.
#[test]
fn slow_stores_may_fail_and_come_too_late() {
    let cache = cache(Box::new(Always), 16 * MIB);
    let (store, file) = slow(&cache, 4 * HUGE);
    let mut queue = cache.queue(4).unwrap();
    let fetch = |queue: &mut Queue, file: &Mapping| {
        for at in 0..4 {
            assert_eq!(queue.fetch(file, (at * HUGE) as u64, at as u64).unwrap(), Fetch::Started);
        }
    };
    let drain = |queue: &mut Queue, is_failed: bool| {
        let mut told = 0;
        while !queue.is_empty() {
            assert!(queue.wait(1, LONG).unwrap() > 0);
            while let Some(fetched) = queue.next() {
                assert_eq!(matches!(fetched.result, Err(Error::Store { .. })), is_failed, "{fetched:?}");
                told += 1;
            }
        }
        assert_eq!(told, 4);
    };
    store.set_faults(Faults { fails_after: Some(0), ..Faults::default() });
    fetch(&mut queue, &file);
    drain(&mut queue, true);
    assert_eq!((cache.charged_bytes(), store.calls().failed), (0, 4));
    store.set_faults(Faults::default());

    store.hold();
    fetch(&mut queue, &file);
    let kept = HUGE + 10;
    [kept, 4 * HUGE].into_iter().for_each(|len| file.truncate(len as u64).unwrap());
    store.release();
    drain(&mut queue, false);
    let mut bytes = vec![1; 4 * HUGE];
    assert_eq!(file.read_at(&mut bytes, 0).unwrap(), bytes.len());
    assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == if at < kept { pattern(at, 7) } else { 0 }));
    drop(file);

    let (store, file) = slow(&cache, 4 * HUGE);
    store.hold();
    fetch(&mut queue, &file);
    assert_eq!(cache.charged_bytes(), (4 * HUGE) as u64);
    drop(queue);
    while cache.charged_bytes() > 0 {
        std::thread::yield_now();
    }
    store.release();
}
