//! Tests of asynchronous calls, and of calls with a time limit.

#[path = "common/source.rs"]
mod source;

use pagemill_cache::mapping::policy::{Always, Never};
use pagemill_cache::mapping::{Builder, Mapping, PageCache, Pin, Policy};
use pagemill_core::Error;
use pagemill_core::stats::{self, Counter};
use pagemill_core::units::PageSize;
use pagemill_store::{Faults, FaultyStore, FileStore, MemoryStore, Store};
use pagemill_testbed::Testbed;
use source::source;
use std::collections::VecDeque;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

const PAGE_BYTES: usize = 4 << 10;
const MIB: usize = 1 << 20;

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / 999 % 251) as u8 + 1).collect()
}

fn settings(limit_bytes: usize) -> Builder {
    let page = PageSize::new(PAGE_BYTES).unwrap();
    PageCache::builder("asynchronous").source(source()).limit(limit_bytes as u64).policy(Never).page(page)
}

fn cache_with(settings: Builder) -> PageCache {
    settings.build_in(Testbed::for_test().caches).unwrap()
}

fn cache(limit_bytes: usize) -> PageCache {
    cache_with(settings(limit_bytes))
}

type DelayedStore = FaultyStore<MemoryStore>;

/// A store with `len` bytes, whose transfers the test can delay.
fn delayed_store(len: usize) -> DelayedStore {
    FaultyStore::new(MemoryStore::new(bytes(len), 512))
}

fn open(cache: &PageCache, store: &DelayedStore) -> Mapping {
    cache.open(Arc::new(store.clone())).unwrap()
}

/// The waker of an executor that has a single task and runs it on one thread. It unparks that thread.
struct UnparkWaker(Thread);

impl Wake for UnparkWaker {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<F: Future>(future: F) -> F::Output {
    let waker = Waker::from(Arc::new(UnparkWaker(thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

/// A waker that counts how often it is called.
#[derive(Default)]
struct CountingWaker(AtomicUsize);

impl CountingWaker {
    fn new() -> (Arc<Self>, Waker) {
        let count = Arc::new(Self::default());
        (count.clone(), Waker::from(count))
    }

    fn count(&self) -> usize {
        self.0.load(SeqCst)
    }
}

impl Wake for CountingWaker {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, SeqCst);
    }
}

fn wait_until(condition: impl Fn() -> bool) {
    while !condition() {
        thread::sleep(Duration::from_millis(1));
    }
}

fn assert_read(file: &Mapping, offset: usize, expected: &[u8]) {
    let mut found = vec![0; expected.len()];
    assert_eq!(file.read_at(&mut found, offset as u64).unwrap(), expected.len());
    assert!(found == expected, "bytes from {offset} on");
}

/// Futures and pins must be `Send`, as executors require.
#[test]
fn futures_can_be_sent_between_threads() {
    fn require_send<F: Future + Send>(_: F) {}
    let file = cache(MIB).create().unwrap();
    require_send(file.pin_async(0));
    require_send(file.read_async(&mut [0; 8], 0));
    require_send(file.fetch(0, 8));
    fn require_send_and_sync<T: Send + Sync>() {}
    require_send_and_sync::<Pin<'static>>();
}

/// Two threads poll one future with different wakers. When the bytes are in memory, only the waker of the latest poll
/// may be called.
#[test]
fn the_latest_waker_is_called() {
    let (cache, store) = (cache(MIB), delayed_store(MIB / 2));
    let file = open(&cache, &store);
    store.hold();
    let ((first, first_waker), (second, second_waker)) = (CountingWaker::new(), CountingWaker::new());
    let mut to = vec![0; 3 * PAGE_BYTES];
    let mut reading = Box::pin(file.read_async(&mut to, 100));
    assert!(reading.as_mut().poll(&mut Context::from_waker(&first_waker)).is_pending());
    thread::scope(|scope| {
        let reading = &mut reading;
        let poll = || assert!(reading.as_mut().poll(&mut Context::from_waker(&second_waker)).is_pending());
        scope.spawn(poll).join().unwrap();
    });
    assert_eq!((first.count(), second.count()), (0, 0));
    store.release();
    wait_until(|| second.count() > 0);
    let polled = reading.as_mut().poll(&mut Context::from_waker(&first_waker));
    assert!(matches!(polled, Poll::Ready(Ok(len)) if len == 3 * PAGE_BYTES));
    drop(reading);
    assert!(to[..] == bytes(MIB / 2)[100..100 + 3 * PAGE_BYTES]);
    assert_eq!((first.count(), store.calls().reads), (0, 1), "one transfer for all three pages");
}

/// Many tasks run in an executor with two threads. The executor creates a waker for each poll and moves tasks between
/// its threads. Every task must complete.
#[test]
fn many_tasks_run_on_two_threads() {
    const TASK_COUNT: usize = 200;
    type Task = std::pin::Pin<Box<dyn Future<Output = ()> + Send>>;
    #[derive(Default)]
    struct Executor {
        ready: Mutex<VecDeque<usize>>,
        is_ready: Condvar,
        left: AtomicUsize,
    }
    struct Wakes(Arc<Executor>, usize);
    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.ready.lock().unwrap().push_back(self.1);
            self.0.is_ready.notify_one();
        }
    }
    let (cache, store) = (cache(MIB), delayed_store(4 * MIB));
    let longest_delay = Duration::from_millis(3);
    store.set_faults(Faults { seed: 7, delay_per_mille: 500, longest_delay, is_reordered: true, ..Faults::default() });
    let (file, expected) = (Arc::new(open(&cache, &store)), Arc::new(bytes(4 * MIB)));
    let executor = Arc::new(Executor::default());
    let tasks: Vec<Mutex<Option<Task>>> = (0..TASK_COUNT)
        .map(|number| {
            let (file, expected) = (file.clone(), expected.clone());
            let task = async move {
                for step in 0..5 {
                    let offset = (number * 7919 + step * 104_729) * 997 % (4 * MIB - 2 * PAGE_BYTES);
                    let mut to = vec![0; 1 + (number + step) * 31 % (2 * PAGE_BYTES)];
                    let len = file.read_async(&mut to, offset as u64).await.unwrap();
                    assert!(to[..] == expected[offset..offset + len] && len == to.len());
                    let pin = file.pin_async(offset as u64).await.unwrap();
                    file.fetch((offset / 2) as u64, PAGE_BYTES as u64).await.unwrap();
                    pin.read_at(&mut to[..1], 0);
                    assert_eq!(to[0], expected[offset]);
                }
            };
            Mutex::new(Some(Box::pin(task) as Task))
        })
        .collect();
    executor.ready.lock().unwrap().extend(0..TASK_COUNT);
    executor.left.store(TASK_COUNT, SeqCst);
    let work = || {
        while executor.left.load(SeqCst) > 0 {
            let mut ready = executor.ready.lock().unwrap();
            let Some(number) = ready.pop_front() else {
                let _ = executor.is_ready.wait_timeout(ready, Duration::from_millis(10)).unwrap();
                continue;
            };
            drop(ready);
            let mut place = tasks[number].lock().unwrap();
            let Some(task) = place.as_mut() else { continue };
            let waker = Waker::from(Arc::new(Wakes(executor.clone(), number)));
            if task.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
                *place = None;
                executor.left.fetch_sub(1, SeqCst);
            }
        }
    };
    thread::scope(|scope| {
        scope.spawn(work);
        work();
    });
    assert_eq!(cache.usage().pinned, 0);
}

/// Two tasks and a thread need the same page. The store must be read only once for all three. Other pages must be
/// readable while that read is in flight.
#[test]
fn a_page_is_read_once() {
    let (cache, store) = (cache(MIB), delayed_store(MIB / 2));
    let file = open(&cache, &store);
    assert_read(&file, 9 * PAGE_BYTES, &bytes(MIB)[9 * PAGE_BYTES..10 * PAGE_BYTES]);
    store.hold();
    let ((one, waker), mut context) = (CountingWaker::new(), Context::from_waker(Waker::noop()));
    let (mut first, mut second) = (pin!(file.pin_async(0)), pin!(file.pin_async(5)));
    assert!(first.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    assert!(second.as_mut().poll(&mut context).is_pending());
    thread::scope(|scope| {
        let reads = store.calls().reads;
        let reading = scope.spawn(|| assert_read(&file, 10, &bytes(MIB)[10..30]));
        assert_read(&file, 9 * PAGE_BYTES, &bytes(MIB)[9 * PAGE_BYTES..10 * PAGE_BYTES]);
        assert_eq!(store.calls().reads, reads);
        store.release();
        reading.join().unwrap();
    });
    wait_until(|| one.count() == 1);
    assert!(first.as_mut().poll(&mut context).is_ready() && second.as_mut().poll(&mut context).is_ready());
    assert_eq!(store.calls().reads, 2);
}

/// A fetch of a range must start reads of the whole range, while at most a sixteenth of the cache is in flight. A pin
/// of a range must need only one transfer.
#[test]
fn ranges_are_read_by_few_transfers() {
    let (cache, store) = (cache(16 * MIB), delayed_store(8 * MIB));
    let file = open(&cache, &store);
    store.hold();
    let mut fetching = Box::pin(file.fetch(0, 8 * MIB as u64));
    assert!(fetching.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    assert_eq!(cache.charged_bytes(), MIB as u64, "a 16th");
    store.release();
    block_on(fetching).unwrap();
    assert_eq!(cache.charged_bytes(), 8 * MIB as u64);
    let reads = store.calls().reads;
    assert!(reads <= 16, "{reads} transfers for 8 MiB");
    assert_read(&file, 0, &bytes(8 * MIB));
    assert_eq!(store.calls().reads, reads);
    file.dont_need(0, 8 * MIB as u64).unwrap();
    assert_eq!(file.pin_range(MIB as u64 + 5, MIB / 2).unwrap().len(), MIB / 2 / PAGE_BYTES + 1);
    assert_eq!(store.calls().reads, reads + 1);
}

/// A future is dropped after it has started a read of the store. The read must continue, and the next reader must find
/// its bytes in memory.
#[test]
fn reads_of_dropped_futures_continue() {
    let (cache, store) = (cache(MIB), delayed_store(MIB / 2));
    let file = open(&cache, &store);
    drop(file.pin_async(0));
    assert_eq!(store.calls().reads, 0, "it does nothing before it is polled");
    store.hold();
    let (count, waker) = CountingWaker::new();
    let mut pinning = Box::pin(file.pin_async(0));
    assert!(pinning.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    drop(pinning);
    store.release();
    wait_until(|| cache.charged_bytes() == PAGE_BYTES as u64 && file.pin_present(0).unwrap().is_some());
    assert_eq!((count.count(), store.calls().reads), (0, 1));
    let pin = block_on(file.pin_async(0)).unwrap();
    assert_eq!((pin.len_bytes(), store.calls().reads), (PAGE_BYTES, 1));
}

/// A failed read must leave no page in the cache. In the second part, two tasks wait for one read that fails. The task
/// that started the read must get the error, and the other task must read the page itself.
#[test]
fn only_the_task_that_started_a_read_gets_its_error() {
    let (cache, store) = (cache(MIB), delayed_store(MIB / 2));
    let file = open(&cache, &store);
    store.set_faults(Faults { fails_after: Some(0), errno: libc::EREMOTEIO, ..Faults::default() });
    let error = block_on(file.pin_async(0)).map(drop).unwrap_err();
    assert!(matches!(&error, Error::Store { cause, .. } if cause.raw_os_error() == Some(libc::EREMOTEIO)), "{error}");
    assert_eq!(cache.charged_bytes(), 0);
    store.hold();
    let mut context = Context::from_waker(Waker::noop());
    let (mut starts, mut waits) = (Box::pin(file.fetch(0, 9)), Box::pin(file.fetch(0, 9)));
    assert!(starts.as_mut().poll(&mut context).is_pending() && waits.as_mut().poll(&mut context).is_pending());
    // The result of the first read is already decided. All later reads succeed.
    store.set_faults(Faults::default());
    store.release();
    assert!(block_on(starts).is_err() && block_on(waits).is_ok());
    assert_read(&file, 0, &bytes(MIB)[..PAGE_BYTES]);
    let past = block_on(file.pin_async(MIB as u64)).map(drop);
    assert!(matches!(past, Err(Error::PastEnd { .. })));
    assert!(matches!(block_on(file.read_async(&mut [0; 8], u64::MAX)), Err(Error::BadOffset { .. })));
    assert_eq!(block_on(file.read_async(&mut [0; 8], MIB as u64)).unwrap(), 0);
}

/// A file is truncated or dropped while a read is in flight. No truncated bytes may appear, no memory may leak, and the
/// store must be released.
#[test]
fn truncation_and_drop_during_a_read_leak_nothing() {
    let (cache, store) = (cache(MIB), delayed_store(MIB / 2));
    let file = open(&cache, &store);
    store.hold();
    let mut context = Context::from_waker(Waker::noop());
    let mut to = vec![7; 4 * PAGE_BYTES];
    let mut reading = Box::pin(file.read_async(&mut to, 0));
    assert!(reading.as_mut().poll(&mut context).is_pending());
    file.truncate(10).unwrap();
    file.truncate(3 * PAGE_BYTES as u64).unwrap();
    store.release();
    assert_eq!(block_on(reading).unwrap(), 3 * PAGE_BYTES);
    assert!(to[..10] == bytes(MIB)[..10] && to[10..3 * PAGE_BYTES].iter().all(|byte| *byte == 0), "cut off, and back");
    drop(file);
    let shared: Arc<dyn Store> = Arc::new(store.clone());
    let file = cache.open(shared.clone()).unwrap();
    store.hold();
    assert!(Box::pin(file.fetch(0, 9)).as_mut().poll(&mut context).is_pending());
    // The drop must cancel the read, although the store still has it.
    drop(file);
    assert_eq!((Arc::strong_count(&shared), cache.charged_bytes()), (1, 0));
    store.release();
}

/// A future that finds no room in the cache must fail without reading. Futures must also work for files with a blocking
/// store, and for files without a store.
#[test]
fn futures_work_with_every_kind_of_file() {
    let (cache, store) = (cache(8 * PAGE_BYTES), delayed_store(MIB));
    let file = open(&cache, &store);
    let pins: Vec<_> = (0..8).map(|page| block_on(file.pin_async(page * PAGE_BYTES as u64)).unwrap()).collect();
    assert!(matches!(block_on(file.pin_async(9 * PAGE_BYTES as u64)).map(drop), Err(Error::NoMemory { .. })));
    drop(pins);
    // After a failed eviction, the next eviction is delayed. So the fetch may fail for a while.
    wait_until(|| block_on(file.fetch(0, MIB as u64)).is_ok());
    drop(file);
    let plain = cache.open(Arc::new(MemoryStore::new(bytes(MIB), 512))).unwrap();
    let in_memory = cache.create().unwrap();
    in_memory.truncate(MIB as u64).unwrap();
    let mut to = vec![9; MIB];
    assert_eq!(block_on(in_memory.read_async(&mut to, 0)).unwrap(), MIB);
    assert!(to.iter().all(|byte| *byte == 0));
    wait_until(|| block_on(plain.fetch(0, PAGE_BYTES as u64)).is_ok());
    assert_eq!(block_on(plain.read_async(&mut to, 0)).unwrap(), MIB);
    assert!(to == bytes(MIB));
    assert_eq!(block_on(in_memory.pin_async(5)).unwrap().len_bytes(), PAGE_BYTES - 5);
}

/// Futures read a regular file, in small and in huge folios. All bytes must be right.
#[test]
fn system_files_are_read_by_futures() {
    let len = 8 * MIB + 5000;
    let path = std::env::temp_dir().join(format!("pagemill-asynchronous-{}", std::process::id()));
    std::fs::write(&path, bytes(len)).unwrap();
    for (policy, limit) in [(Box::new(Never) as Box<dyn Policy>, 16 * MIB), (Box::new(Always), 6 * MIB)] {
        let cache = cache_with(settings(limit).policy(policy));
        let file = cache.open(Arc::new(FileStore::open_read_only(&path).unwrap())).unwrap();
        let mut to = vec![0; len + 1];
        assert_eq!(block_on(file.read_async(&mut to, 0)).unwrap(), len);
        assert!(to[..len] == bytes(len));
        // The file is not released as long as its last read is in flight.
        let mut context = Context::from_waker(Waker::noop());
        _ = Box::pin(file.fetch(0, 9)).as_mut().poll(&mut context);
        drop(file);
        FileStore::open(&path).expect("no store has it any more");
    }
    std::fs::remove_file(&path).unwrap();
}

/// The store hangs. Calls must fail when their timeout has passed. The reads that they started must continue, and later
/// calls must find the bytes.
#[test]
fn calls_time_out_if_the_store_hangs() {
    let timeout = Some(Duration::from_millis(20));
    let (cache, store) = (cache_with(settings(MIB).timeout(timeout)), delayed_store(MIB / 2));
    let file = open(&cache, &store);
    store.hold();
    let late = stats::get(Counter::ReadsLate);
    let is_late = |done: Result<usize, Error>| {
        let error = done.unwrap_err();
        assert!(
            matches!(&error, Error::Store { cause, .. } if cause.raw_os_error() == Some(libc::ETIMEDOUT)),
            "{error}"
        );
    };
    is_late(file.read_at(&mut [0; 8], 0));
    is_late(file.write_at(&[9; 8], 100));
    is_late(file.pin(200).map(|pin| pin.len_bytes()));
    is_late(file.hold(300).map(|held| held.len()));
    is_late(file.read_at(&mut [0; 8], PAGE_BYTES as u64));
    assert!(stats::get(Counter::ReadsLate) >= late + 5);
    assert_eq!(store.calls().reads, 2, "each page is asked for once");
    // Cached data must be available. A write of a whole page needs no read from the store.
    assert_eq!(file.write_at(&[9; PAGE_BYTES], 5 * PAGE_BYTES as u64).unwrap(), PAGE_BYTES);
    assert_read(&file, 5 * PAGE_BYTES, &[9; PAGE_BYTES]);
    store.release();
    wait_until(|| file.pin_present(0).unwrap().is_some() && file.pin_present(PAGE_BYTES as u64).unwrap().is_some());
    assert_read(&file, 0, &bytes(MIB)[..2 * PAGE_BYTES]);
    assert_eq!(store.calls().reads, 2);
    // A read that fails within the timeout must report its cause.
    store.set_faults(Faults { fails_after: Some(0), ..Faults::default() });
    wait_until(|| file.read_at(&mut [0; 8], 8 * PAGE_BYTES as u64).unwrap_err().errno() == libc::EIO);
}
