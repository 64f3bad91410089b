//! Tests of races on files with a store: one thread truncates, collapses, fetches or writes a file while another thread
//! uses the file.
#![allow(unsafe_code)] // a page whose first touch waits, polling

#[path = "common/source.rs"]
mod source;

use pagemill_cache::mapping::policy::Never;
use pagemill_cache::mapping::{Fetch, PageCache};
use pagemill_core::units::PageSize;
use pagemill_store::{FileStore, MemoryStore, Store};
use pagemill_testbed::Testbed;
use source::source;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

const PAGE_BYTES: usize = 4 << 10;
const MIB: usize = 1 << 20;

/// Upper bound of every wait in these tests.
const WAIT_LIMIT: Duration = Duration::from_secs(600);

fn cache(limit_bytes: usize) -> PageCache {
    let page = PageSize::new(PAGE_BYTES).unwrap();
    let caches = Testbed::for_test().caches;
    caches.collapse_by_hand();
    PageCache::builder("sound")
        .source(source())
        .limit(limit_bytes as u64)
        .policy(Never)
        .page(page)
        .build_in(caches)
        .unwrap()
}

type Hook = Box<dyn Fn(u64) + Send + Sync>;

/// A store whose reads and writes call a hook of the test with the offset.
struct HookedStore {
    store: MemoryStore,
    on_read: Hook,
    on_write: Hook,
    fills: bool,
}

impl HookedStore {
    fn new(bytes: Vec<u8>, on_read: Hook, on_write: Hook) -> Arc<Self> {
        Arc::new(Self { store: MemoryStore::new(bytes, PAGE_BYTES), on_read, on_write, fills: true })
    }
}

impl Store for HookedStore {
    fn size_bytes(&self) -> io::Result<u64> {
        self.store.size_bytes()
    }
    fn block_bytes(&self) -> usize {
        PAGE_BYTES
    }
    fn read(&self, offset: u64, to: &mut [u8]) -> io::Result<()> {
        (self.on_read)(offset);
        if self.fills { self.store.read(offset, to) } else { Ok(()) }
    }
    fn write(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        self.store.write(offset, from)?;
        (self.on_write)(offset);
        Ok(())
    }
    fn set_size(&self, size_bytes: u64) -> io::Result<()> {
        self.store.set_size(size_bytes)
    }
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

/// Bytes that are truncated while they are being written back must not come back when the file grows again.
#[test]
fn bytes_truncated_during_writeback_do_not_come_back() {
    let cache = cache(8 * MIB);
    let (writing, is_writing) = mpsc::channel();
    let (go_on, may_go_on) = mpsc::channel::<()>();
    let (writing, may_go_on) = (Mutex::new(writing), Mutex::new(may_go_on));
    let hook: Hook = Box::new(move |offset| {
        if offset == 2 * PAGE_BYTES as u64 {
            writing.lock().unwrap().send(()).unwrap();
            may_go_on.lock().unwrap().recv().unwrap();
        }
    });
    let store = HookedStore::new(vec![7; PAGE_BYTES], Box::new(|_| {}), hook);
    let file = cache.open(store).unwrap();
    file.write_at(&[9; PAGE_BYTES], 2 * PAGE_BYTES as u64).unwrap();
    std::thread::scope(|scope| {
        let syncing = scope.spawn(|| file.sync());
        is_writing.recv().unwrap();
        file.truncate(PAGE_BYTES as u64).unwrap();
        file.truncate(3 * PAGE_BYTES as u64).unwrap();
        go_on.send(()).unwrap();
        syncing.join().unwrap().unwrap();
    });
    let mut bytes = [1; 8];
    file.read_at(&mut bytes, 2 * PAGE_BYTES as u64).unwrap();
    assert_eq!(bytes, [0; 8], "cut off, and back");
}

// A buffer whose first touch waits: a page that is closed until a signal handler opens it.

/// Whether a thread has touched the inaccessible page and waits in the signal handler.
static IS_FAULTING: AtomicBool = AtomicBool::new(false);
/// Whether the signal handler may make the page accessible.
static MAY_GRANT_ACCESS: AtomicBool = AtomicBool::new(false);
/// Address of the inaccessible page.
static INACCESSIBLE_PAGE_ADDR: AtomicUsize = AtomicUsize::new(0);
/// Lets one test at a time use the signal handler.
static HANDLER_USE: Mutex<()> = Mutex::new(());

extern "C" fn on_fault(_: i32) {
    IS_FAULTING.store(true, SeqCst);
    while !MAY_GRANT_ACCESS.load(SeqCst) {
        std::hint::spin_loop();
        // SAFETY: `usleep` may be called in a signal handler.
        unsafe { libc::usleep(1000) };
    }
    // SAFETY: the page of `inaccessible_page`, which stays mapped.
    unsafe {
        libc::mprotect(INACCESSIBLE_PAGE_ADDR.load(SeqCst) as *mut _, PAGE_BYTES, libc::PROT_READ | libc::PROT_WRITE)
    };
}

fn inaccessible_page(byte: u8) -> &'static [u8] {
    // SAFETY: the mapping is separate and is never unmapped. It is opened before any byte is read.
    unsafe {
        let at = libc::mmap(
            std::ptr::null_mut(),
            PAGE_BYTES,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        std::ptr::write_bytes(at.cast::<u8>(), byte, PAGE_BYTES);
        libc::mprotect(at, PAGE_BYTES, libc::PROT_NONE);
        INACCESSIBLE_PAGE_ADDR.store(at as usize, SeqCst);
        IS_FAULTING.store(false, SeqCst);
        MAY_GRANT_ACCESS.store(false, SeqCst);
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_fault as *const () as usize;
        libc::sigaction(libc::SIGSEGV, &action, std::ptr::null_mut());
        std::slice::from_raw_parts(at.cast::<u8>(), PAGE_BYTES)
    }
}

/// Waits until another thread sets the flag.
fn wait_until_set(what: &AtomicBool) {
    while !what.load(SeqCst) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A collapse reads missing pages from the store while a write to one of these pages is in progress. Data that is
/// written, written back and evicted during the collapse must not be overwritten.
#[test]
fn a_collapse_during_a_write_loses_no_data() {
    let _guard = HANDLER_USE.lock();
    let cache = cache(4 * MIB);
    let file = cache.open(Arc::new(MemoryStore::new(Vec::new(), PAGE_BYTES))).unwrap();
    let other = cache.open(Arc::new(MemoryStore::new(vec![3; 6 * MIB], PAGE_BYTES))).unwrap();
    file.truncate(2 * MIB as u64).unwrap();
    file.write_at(&[1; PAGE_BYTES], 0).unwrap();
    let last = (2 * MIB - PAGE_BYTES) as u64;
    let slow = inaccessible_page(5);
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| file.write_at(&slow[..100], last));
        wait_until_set(&IS_FAULTING);
        // The collapse may also fail.
        let is_huge = file.collapse(0).unwrap_or(false);
        if is_huge {
            file.write_at(&[9; 8], last + 2000).unwrap();
            file.sync().unwrap();
            assert!(file.split(0).unwrap());
            // Reading another file evicts all pages of this file.
            let mut bytes = vec![0; 6 * MIB];
            other.read_at(&mut bytes, 0).unwrap();
        }
        MAY_GRANT_ACCESS.store(true, SeqCst);
        writing.join().unwrap().unwrap();
        if !is_huge {
            file.write_at(&[9; 8], last + 2000).unwrap();
        }
    });
    let mut bytes = [0; 8];
    file.read_at(&mut bytes, last + 2000).unwrap();
    assert_eq!(bytes, [9; 8], "written, synced, and lost");
}

/// A write copies from a buffer of the caller, which causes a page fault. The fault handler reads the page that is
/// being written. That read must not wait for the writer.
#[test]
fn a_fault_of_the_callers_buffer_reads_the_page_that_is_written() {
    let _guard = HANDLER_USE.lock();
    let cache = cache(4 * MIB);
    let file = cache.open(Arc::new(MemoryStore::new(vec![7; MIB], PAGE_BYTES))).unwrap();
    let slow = inaccessible_page(5);
    let is_read = &AtomicBool::new(false);
    let in_time = std::thread::scope(|scope| {
        let writing = scope.spawn(|| file.write_at(&slow[..100], 0));
        wait_until_set(&IS_FAULTING);
        scope.spawn(|| {
            let mut bytes = [0; 8];
            file.read_at(&mut bytes, 2000).unwrap();
            is_read.store(true, SeqCst);
        });
        let begun = Instant::now();
        while !is_read.load(SeqCst) && begun.elapsed() < WAIT_LIMIT {
            std::thread::sleep(Duration::from_millis(1));
        }
        let in_time = is_read.load(SeqCst);
        MAY_GRANT_ACCESS.store(true, SeqCst);
        writing.join().unwrap().unwrap();
        in_time
    });
    assert!(in_time, "the server of the fault waits for the faulting thread");
}

/// A store fills fewer bytes than it reports. A queue must not expose bytes of another file in the place of the missing
/// bytes.
#[test]
fn a_queue_exposes_no_bytes_of_other_files() {
    let cache = cache(4 * MIB);
    let secret = cache.create().unwrap();
    secret.write_at(&vec![0x55; 4 * MIB], 0).unwrap();
    secret.truncate(0).unwrap();
    let short = Arc::new(HookedStore {
        store: MemoryStore::new(vec![0; 64 * PAGE_BYTES], PAGE_BYTES),
        on_read: Box::new(|_| {}),
        on_write: Box::new(|_| {}),
        fills: false,
    });
    let file = cache.open(short).unwrap();
    let mut bytes = [0; 8];
    file.read_at(&mut bytes, PAGE_BYTES as u64).unwrap();
    assert_eq!(bytes, [0; 8], "by a read");
    let mut queue = cache.queue(4).unwrap();
    assert_eq!(queue.fetch(&file, 0, 1).unwrap(), Fetch::Present);
    file.read_at(&mut bytes, 0).unwrap();
    assert_eq!(bytes, [0; 8], "by a queue");
}

/// In the range after the end of a regular file, no reader may see bytes of other files, neither in the partial last
/// page nor in whole pages.
#[test]
fn a_file_exposes_no_bytes_of_other_files() {
    let cache = cache(4 * MIB);
    let secret = cache.create().unwrap();
    secret.write_at(&vec![0x55; 4 * MIB], 0).unwrap();
    secret.truncate(0).unwrap();
    let scratch = TempFile::new("e", 7);
    std::fs::write(&scratch.0, [7; 100]).unwrap();
    let file = cache.open(Arc::new(FileStore::open(&scratch.0).unwrap())).unwrap();
    file.truncate(4 * PAGE_BYTES as u64).unwrap();
    file.write_at(&[7; 10], 3 * PAGE_BYTES as u64 - 10).unwrap();
    let mut bytes = vec![1; 4 * PAGE_BYTES];
    assert_eq!(file.read_at(&mut bytes, 0).unwrap(), bytes.len());
    let is_written = |at: usize| at < 100 || (3 * PAGE_BYTES - 10..3 * PAGE_BYTES).contains(&at);
    assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == if is_written(at) { 7 } else { 0 }));
}

struct TempFile(std::path::PathBuf);

impl TempFile {
    fn new(name: &str, byte: u8) -> Self {
        let path = std::env::temp_dir().join(format!("pagemill-sound-{}-{name}", std::process::id()));
        std::fs::write(&path, vec![byte; 16 * PAGE_BYTES]).unwrap();
        Self(path)
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A queue has a read of a page in flight, and no thread polls that queue. Another queue that fetches the page must
/// still report it.
#[test]
fn a_queue_that_is_not_polled_blocks_no_other_queue() {
    let cache = cache(4 * MIB);
    let scratch = TempFile::new("a", 7);
    let file = cache.open(Arc::new(FileStore::open(&scratch.0).unwrap())).unwrap();
    let (mut idle, mut queue) = (cache.queue(4).unwrap(), cache.queue(4).unwrap());
    idle.fetch(&file, 0, 1).unwrap();
    queue.fetch(&file, 0, 2).unwrap();
    assert_eq!(queue.wait(1, WAIT_LIMIT).unwrap(), 1);
}

/// A queue has a read of a dropped file in flight, and no thread polls that queue. Another file reuses the id of the
/// dropped file. A page of that file must still be read and reported.
#[test]
fn a_dropped_file_blocks_no_later_file() {
    let cache = cache(4 * MIB);
    let (first, second) = (TempFile::new("b", 7), TempFile::new("c", 8));
    let (mut idle, mut queue) = (cache.queue(4).unwrap(), cache.queue(4).unwrap());
    let file = cache.open(Arc::new(FileStore::open(&first.0).unwrap())).unwrap();
    idle.fetch(&file, 0, 1).unwrap();
    drop(file);
    let file = cache.open(Arc::new(FileStore::open(&second.0).unwrap())).unwrap();
    queue.fetch(&file, 0, 2).unwrap();
    assert_eq!(queue.wait(1, WAIT_LIMIT).unwrap(), 1);
}

/// A queue is reading a page, or has read it and `next` has not returned it yet. The queue's thread reads the same page
/// directly. An event loop that polls the descriptor for the time of `due`, and then calls `wait` with 0, must get the
/// page. If `due` is `None`, the descriptor must become readable.
#[test]
fn an_event_loop_is_notified_of_every_page() {
    use std::os::fd::AsRawFd;
    for has_ended in [false, true] {
        let cache = cache(4 * MIB);
        let scratch = TempFile::new("d", 7);
        let file = cache.open(Arc::new(FileStore::open(&scratch.0).unwrap())).unwrap();
        let mut queue = cache.queue(4).unwrap();
        assert_eq!(queue.fetch(&file, 0, 1).unwrap(), Fetch::Started);
        let fd = queue.watch().unwrap().as_raw_fd();
        let begun = Instant::now();
        while queue.wait(0, Duration::ZERO).unwrap() == 0 && has_ended {
            assert!(begun.elapsed() < WAIT_LIMIT, "the read does not end");
        }
        file.read_at(&mut [0; 8], 0).unwrap();
        let begun = Instant::now();
        while queue.next().is_none() {
            assert!(begun.elapsed() < WAIT_LIMIT, "no page, with {} on its way", queue.len());
            let (mut poll, due) = (libc::pollfd { fd, events: libc::POLLIN, revents: 0 }, queue.due());
            let limit = due.unwrap_or(WAIT_LIMIT).as_millis() as i32;
            // SAFETY: one entry, which outlives the call.
            let is_readable = unsafe { libc::poll(&raw mut poll, 1, limit) } > 0;
            assert!(is_readable || due.is_some(), "silent, with {} on its way", queue.len());
            queue.wait(0, Duration::ZERO).unwrap();
        }
    }
}

/// Another thread is reading the page that an event loop needs. The event loop must get the page if it polls until the
/// time that the queue reports as due.
#[test]
fn an_event_loop_is_notified_of_reads_by_other_threads() {
    use std::os::fd::AsRawFd;
    let cache = cache(4 * MIB);
    let (is_reading, may_end) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (reading, ending) = (is_reading.clone(), may_end.clone());
    let hook: Hook = Box::new(move |_| {
        reading.store(true, SeqCst);
        wait_until_set(&ending);
    });
    let file = cache.open(HookedStore::new(vec![7; PAGE_BYTES], hook, Box::new(|_| {}))).unwrap();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| file.read_at(&mut [0; 8], 0).unwrap());
        wait_until_set(&is_reading);
        let mut queue = cache.queue(4).unwrap();
        let fd = queue.watch().unwrap().as_raw_fd();
        assert_eq!(queue.fetch(&file, 0, 1).unwrap(), Fetch::Started);
        queue.wait(0, Duration::ZERO).unwrap();
        may_end.store(true, SeqCst);
        reader.join().unwrap();
        let (mut is_delivered, begun) = (false, Instant::now());
        while !is_delivered && begun.elapsed() < WAIT_LIMIT {
            let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            let due = queue.due().expect("another brings it").as_millis() as i32;
            // SAFETY: the array has one entry, which outlives the call.
            unsafe { libc::poll(&raw mut poll, 1, due) };
            queue.wait(0, Duration::ZERO).unwrap();
            is_delivered = queue.next().is_some();
        }
        assert!(is_delivered, "silent, with {} on its way", queue.len());
    });
}

/// A store panics in the middle of a batch of transfers. No memory may leak.
#[test]
fn a_panic_in_a_batch_leaks_no_memory() {
    let cache = cache(4 * MIB);
    let hook: Hook = Box::new(|offset| assert!(offset != 9 * PAGE_BYTES as u64, "the store panics"));
    let file = cache.open(HookedStore::new(vec![7; 16 * PAGE_BYTES], hook, Box::new(|_| {}))).unwrap();
    let bytes = vec![1; 9 * PAGE_BYTES + 100];
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| file.write_at(&bytes, 0)));
    assert!(result.is_err());
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        cache.queue(2).unwrap().fetch(&file, 9 * PAGE_BYTES as u64, 1).map(drop)
    }));
    assert!(result.is_err());
    assert_eq!(cache.charged_bytes(), 9 * PAGE_BYTES as u64, "what was written before");
    // No thread waits for a read that failed.
    file.truncate(0).unwrap();
    assert_eq!(cache.charged_bytes(), 0);
}

/// A write to a folio during a slow sync must wait only for the writeback of that folio, not of all folios.
#[test]
fn a_write_during_a_slow_sync_succeeds() {
    let cache = cache(4 * MIB);
    let [writing, may_end] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
    let (flag, end) = (writing.clone(), may_end.clone());
    // Only the write of the first folio completes at once.
    let hook: Hook = Box::new(move |offset| {
        if offset > 0 {
            flag.store(true, SeqCst);
            wait_until_set(&end);
        }
    });
    let file = cache.open(HookedStore::new(Vec::new(), Box::new(|_| {}), hook)).unwrap();
    for page in 0..20 {
        file.write_at(&[1; 8], 2 * page * PAGE_BYTES as u64).unwrap();
    }
    std::thread::scope(|scope| {
        let syncing = scope.spawn(|| file.sync());
        wait_until_set(&writing);
        assert_eq!(file.write_at(&[2; 8], 0).unwrap(), 8);
        may_end.store(true, SeqCst);
        syncing.join().unwrap().unwrap();
    });
}
