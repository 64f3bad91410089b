//! Random reads of pages of a file that is larger than its cache. They are made by blocking threads, or by one thread
//! with a queue.

use std::cell::RefCell;
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;
use pagemill_cache::mapping::policy::{Always, Never};
use pagemill_cache::mapping::{Fetch, Mapping, PageCache, Queue};
use pagemill_core::stats::{self, Counter};
use pagemill_core::units::BLOCK_BYTES;
use serde_json::Value;

use super::ring::Offsets;
use super::{Elapsed, IntervalStart, Source};
use crate::histogram::Histogram;
use crate::pattern::{self, RECORD_BYTES};
use crate::storage::{HIT_RATIO, READS};
use crate::workload::hit::cache_of;
use crate::workload::steps::join;
use crate::workload::{Failure, WorkloadResult, ensure};

/// Time limit of a read from the file. It is longer than any device needs.
const TRANSFER_TIME_LIMIT: Duration = Duration::from_secs(20);

/// Number of reads in flight while the cache is filled.
const FILL_DEPTH: u32 = 64;

crate::workload::arguments! {
    /// Arguments of a run that reads pages of a file through a page cache that is smaller than the file.
    MissArguments:
    cache_mib: u64,
    /// Number of threads that read one page at a time and block meanwhile
    #[arg(conflicts_with = "depth")]
    threads: Option<usize>,
    /// Number of reads that one thread keeps in flight
    depth: Option<u32>,
    /// Number of futures that one thread polls
    #[arg(conflicts_with_all = ["threads", "depth"])]
    futures: Option<usize>,
    /// Begin with an empty cache
    cold: bool,
    /// Bytes of a page, which one transfer reads
    #[arg(default_value_t = RECORD_BYTES)]
    io_bytes: usize,
    /// Read sequentially instead of randomly
    sequential: bool,
    run_ms: u64,
    /// Make this many reads by a queue or one thread, instead of measuring their rate
    #[arg(conflicts_with = "futures")]
    reads: Option<u64>,
    ..source: Source,
}

/// Makes a page cache whose folios have `folio_bytes` bytes: huge folios of small pages if that is 2 MiB, otherwise
/// folios of one page.
pub fn cache_of_folios(limit_bytes: u64, folio_bytes: usize) -> Result<PageCache, Failure> {
    match folio_bytes {
        BLOCK_BYTES => cache_of(RECORD_BYTES, limit_bytes, Box::new(Always), true),
        page_bytes => cache_of(page_bytes, limit_bytes, Box::new(Never), true),
    }
}

/// A file that is read through a page cache, which is smaller than the file.
pub struct CachedSource<'a> {
    pub cache: PageCache,
    pub file: Mapping,
    source: &'a Source,
    io_bytes: usize,
}

impl<'a> CachedSource<'a> {
    pub fn open(source: &'a Source, cache_mib: u64, io_bytes: usize) -> Result<Self, Failure> {
        let cache = cache_of_folios(cache_mib << 20, io_bytes)?;
        let file = cache.open(Arc::new(source.open_read_only()?))?;
        Ok(Self { cache, file, source, io_bytes })
    }

    /// Reads random pages at or above the offset `from` until the cache is nearly full, and compares every byte.
    pub fn fill(&self, from: u64) -> Result<(), Failure> {
        let full_bytes = self.cache.usage().limit.min(self.source.len_bytes - from) * 9 / 10;
        let mut random = Rng::with_seed(99);
        let places = (self.source.len_bytes - from) as usize / self.io_bytes;
        // The number of reads in flight is limited, because in-flight folios cannot be evicted.
        let most = self.cache.usage().limit / 4 / self.io_bytes as u64;
        let mut queue_loop = RequestQueue::new(self, FILL_DEPTH.min(most as u32).max(1))?;
        let mut bytes = vec![0; self.io_bytes];
        let mut rounds = 0;
        while self.cache.charged_bytes() < full_bytes && rounds < 10 * places {
            rounds += 1;
            let next = || from + (random.usize(..places) * self.io_bytes) as u64;
            queue_loop.step(next, |offset| {
                let read = self.file.read_at(&mut bytes, offset)?;
                let is_intact = !self.source.pattern || pattern::is_intact(&bytes, 0, offset);
                ensure_page(read == bytes.len() && is_intact, offset)
            })?;
        }
        queue_loop.drain().map(drop)
    }

    /// Checks the contents of the page at `offset`. A page of a record's size is copied as a whole; of a larger page,
    /// only two words are read.
    fn check_page(&self, record: &mut [u8; RECORD_BYTES], offset: u64) -> Result<(), Failure> {
        let is_right = if self.io_bytes == RECORD_BYTES {
            self.file.read_at(record, offset)? == RECORD_BYTES && self.source.is_right(record, offset)
        } else {
            let pin = self.file.pin(offset)?;
            let last = pin.len_bytes() - RECORD_BYTES;
            let is_at = |at: usize| pin.read_u64(at) == pattern::stamp_word(0, offset + at as u64, 0);
            pin.len_bytes() == self.io_bytes && (!self.source.pattern || (is_at(0) && is_at(last)))
        };
        ensure_page(is_right, offset)
    }
}

fn ensure_page(is_right: bool, offset: u64) -> Result<(), Failure> {
    ensure(is_right, || format!("what was read at {offset} is something else"))
}

/// A queue of a page cache, with the requests that are in flight.
pub struct RequestQueue<'a> {
    file: &'a Mapping,
    queue: Queue,
    /// The offset and the start time of each request, by the request's token.
    requests: Vec<(u64, Instant)>,
    free: Vec<u64>,
    /// Latencies of the completed requests.
    pub times: Histogram,
    /// Number of requested pages that were already resident.
    pub present_count: u64,
}

impl<'a> RequestQueue<'a> {
    pub fn new(cached: &'a CachedSource<'_>, depth: u32) -> Result<Self, Failure> {
        let queue = cached.cache.queue(depth)?;
        let requests = vec![(0, Instant::now()); depth as usize];
        let free = (0..u64::from(depth)).collect();
        Ok(Self { file: &cached.file, queue, requests, free, times: Histogram::new(), present_count: 0 })
    }

    /// Fills the queue with requests at the offsets that `next` returns, waits for a completion, and handles all
    /// completions. Fills the queue again after each of them. Calls `on_page` for each page that has become resident or
    /// already was resident.
    pub fn step(
        &mut self,
        mut next: impl FnMut() -> u64,
        mut on_page: impl FnMut(u64) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        self.fill(&mut next, &mut on_page)?;
        self.queue.wait(1, TRANSFER_TIME_LIMIT)?;
        while let Some(completion) = self.queue.next() {
            let (offset, began) = self.requests[completion.token as usize];
            completion.result?;
            self.times.add(began.elapsed());
            self.free.push(completion.token);
            on_page(offset)?;
            self.fill(&mut next, &mut on_page)?;
        }
        Ok(())
    }

    /// Requests pages at the offsets that `next` returns until the queue is full.
    fn fill(
        &mut self,
        next: &mut impl FnMut() -> u64,
        on_page: &mut impl FnMut(u64) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        while let Some(token) = self.free.pop() {
            let offset = next();
            self.requests[token as usize] = (offset, Instant::now());
            if self.queue.fetch(self.file, offset, token)? == Fetch::Present {
                self.present_count += 1;
                self.free.push(token);
                on_page(offset)?;
            }
        }
        Ok(())
    }

    /// Waits until no request is in flight; returns the number of completed requests.
    pub fn drain(&mut self) -> Result<u64, Failure> {
        let mut completions = 0;
        while !self.queue.is_empty() {
            self.queue.wait(1, TRANSFER_TIME_LIMIT)?;
            while let Some(completion) = self.queue.next() {
                completion.result?;
                self.free.push(completion.token);
                completions += 1;
            }
        }
        Ok(completions)
    }
}

/// Returns the number of pages of `io_bytes` bytes that were read from the file so far.
fn pages_read_from_store(io_bytes: usize) -> u64 {
    stats::get(Counter::StoreRead) / io_bytes as u64
}

/// Fills the cache unless it shall be cold, then reads pages of the file until the time is over. The resulting JSON has
/// their rate and latencies.
pub fn run(arguments: &MissArguments) -> WorkloadResult {
    let cached = CachedSource::open(&arguments.source, arguments.cache_mib, arguments.io_bytes)?;
    if !arguments.cold {
        cached.fill(0)?;
    }
    if let Some(reads) = arguments.reads {
        return make_reads(arguments, &cached, reads);
    }
    match (arguments.threads, arguments.depth, arguments.futures) {
        (Some(threads), ..) => measure_threads(arguments, &cached, threads),
        (None, Some(depth), _) => measure_queue(arguments, &cached, depth),
        (None, None, Some(futures)) => measure_futures(arguments, &cached, futures),
        (None, None, None) => Err("neither threads, nor a depth, nor futures".into()),
    }
}

/// Makes `reads` random reads, by a queue or with one thread, so that their instructions can be counted. Returns no
/// metrics.
fn make_reads(arguments: &MissArguments, cached: &CachedSource<'_>, reads: u64) -> WorkloadResult {
    let mut offsets = Offsets::new(arguments.source.len_bytes, cached.io_bytes, true);
    let mut record = [0; RECORD_BYTES];
    if let Some(depth) = arguments.depth {
        let mut queue_loop = RequestQueue::new(cached, depth)?;
        while queue_loop.times.count() + queue_loop.present_count < reads {
            queue_loop.step(|| offsets.draw(), |offset| cached.check_page(&mut record, offset))?;
        }
        queue_loop.drain()?;
    } else {
        (0..reads).try_for_each(|_| cached.check_page(&mut record, offsets.draw()))?;
    }
    Ok(Value::Object(Default::default()))
}

impl MissArguments {
    /// Returns how long pages are read before reads are counted. It is zero for a run that begins with an empty cache,
    /// because such reads would fill the cache.
    fn warm_up(&self) -> Duration {
        if self.cold { Duration::ZERO } else { Duration::from_millis(self.run_ms) / 10 }
    }
}

/// Returns the metrics as JSON. `ios` is the number of reads that the file served; all other reads were hits. Hits are
/// faster than any transfer, so the `ios` longest of the times are those of transfers.
fn json_line(took: &Elapsed, reads: u64, ios: u64, io_bytes: usize, times: &Histogram) -> WorkloadResult {
    let mut metrics = took.metrics(ios, io_bytes, times)?;
    metrics.insert(READS.to_owned(), Value::from(reads as f64 / took.seconds));
    metrics.insert(HIT_RATIO.to_owned(), Value::from(1.0 - ios.min(reads) as f64 / reads.max(1) as f64));
    Ok(metrics.into())
}

fn measure_queue(arguments: &MissArguments, cached: &CachedSource<'_>, depth: u32) -> WorkloadResult {
    let mut offsets = Offsets::new(arguments.source.len_bytes, cached.io_bytes, !arguments.sequential);
    let mut record = [0; RECORD_BYTES];
    let mut queue_loop = RequestQueue::new(cached, depth)?;
    let mut run_for = |queue_loop: &mut RequestQueue<'_>, time: Duration| -> Result<(), Failure> {
        let begun = Instant::now();
        while begun.elapsed() < time {
            queue_loop.step(|| offsets.draw(), |offset| cached.check_page(&mut record, offset))?;
        }
        Ok(())
    };
    let run = Duration::from_millis(arguments.run_ms);
    run_for(&mut queue_loop, arguments.warm_up())?;
    queue_loop.times.clear();
    queue_loop.present_count = 0;
    let (span, before) = (IntervalStart::begin(), pages_read_from_store(cached.io_bytes));
    run_for(&mut queue_loop, run)?;
    let ios = pages_read_from_store(cached.io_bytes) - before;
    let reads = queue_loop.times.count() + queue_loop.present_count;
    let line = json_line(&span.end(), reads, ios, cached.io_bytes, &queue_loop.times);
    queue_loop.drain()?;
    line
}

/// The futures of one thread that were woken and must be polled.
struct Woken {
    thread: thread::Thread,
    tasks: Mutex<Vec<usize>>,
}

/// The waker of one future: adds the future to `woken`, and wakes the thread that polls it.
struct TaskWaker {
    woken: Arc<Woken>,
    task: usize,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        let mut tasks = self.woken.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        tasks.push(self.task);
        // The thread takes all tasks at once, so only the first of them has to wake it.
        if tasks.len() == 1 {
            self.woken.thread.unpark();
        }
    }
}

/// Polls futures until `is_over` returns true, and returns how many completed. A completed future is replaced by the one
/// that `next` returns.
fn poll_until<'a, F: Future<Output = Result<(), Failure>> + 'a>(
    count: usize,
    mut next: impl FnMut() -> F,
    mut is_over: impl FnMut() -> bool,
) -> Result<u64, Failure> {
    let woken = Arc::new(Woken { thread: thread::current(), tasks: Mutex::new((0..count).collect()) });
    let wakers: Vec<Waker> =
        (0..count).map(|task| Waker::from(Arc::new(TaskWaker { woken: woken.clone(), task }))).collect();
    let mut futures: Vec<Pin<Box<F>>> = (0..count).map(|_| Box::pin(next())).collect();
    let (mut due, mut completed) = (Vec::new(), 0);
    while !is_over() {
        std::mem::swap(&mut due, &mut woken.tasks.lock().unwrap_or_else(PoisonError::into_inner));
        if due.is_empty() {
            thread::park_timeout(Duration::from_millis(10));
        }
        for task in due.drain(..) {
            let mut context = Context::from_waker(&wakers[task]);
            while let Poll::Ready(result) = futures[task].as_mut().poll(&mut context) {
                result?;
                completed += 1;
                futures[task].set(next());
            }
        }
    }
    Ok(completed)
}

fn measure_futures(arguments: &MissArguments, cached: &CachedSource<'_>, futures: usize) -> WorkloadResult {
    let mut offsets = Offsets::new(arguments.source.len_bytes, cached.io_bytes, !arguments.sequential);
    let times = RefCell::new(Histogram::new());
    let mut run_for = |time: Duration| -> Result<u64, Failure> {
        let begun = Instant::now();
        let next = || read_one(cached, offsets.draw(), &times);
        poll_until(futures, next, || begun.elapsed() >= time)
    };
    run_for(arguments.warm_up())?;
    times.borrow_mut().clear();
    let (span, before) = (IntervalStart::begin(), pages_read_from_store(cached.io_bytes));
    let reads = run_for(Duration::from_millis(arguments.run_ms))?;
    let ios = pages_read_from_store(cached.io_bytes) - before;
    json_line(&span.end(), reads, ios, cached.io_bytes, &times.borrow())
}

/// Reads one page and checks its stamp.
async fn read_one(cached: &CachedSource<'_>, offset: u64, times: &RefCell<Histogram>) -> Result<(), Failure> {
    let (mut record, began) = ([0; RECORD_BYTES], Instant::now());
    let read = cached.file.read_async(&mut record, offset).await?;
    times.borrow_mut().add(began.elapsed());
    ensure_page(read == RECORD_BYTES && cached.source.is_right(&record, offset), offset)
}

/// Phase of a run with blocking threads in which reads are not counted yet.
const PHASE_WARM_UP: u8 = 0;
/// Phase of a run with blocking threads in which reads are counted.
const PHASE_MEASURED: u8 = 1;
/// Phase of a run with blocking threads in which the threads must end.
const PHASE_OVER: u8 = 2;

fn measure_threads(arguments: &MissArguments, cached: &CachedSource<'_>, threads: usize) -> WorkloadResult {
    let phase = AtomicU8::new(PHASE_WARM_UP);
    let work = |thread: usize| -> Result<Histogram, Failure> {
        let mut random = Rng::with_seed(thread as u64 + 1);
        let places = arguments.source.len_bytes as usize / cached.io_bytes;
        let (mut record, mut times) = ([0; RECORD_BYTES], Histogram::new());
        while phase.load(Relaxed) != PHASE_OVER {
            let offset = (random.usize(..places) * cached.io_bytes) as u64;
            let began = Instant::now();
            cached.check_page(&mut record, offset)?;
            if phase.load(Relaxed) == PHASE_MEASURED {
                times.add(began.elapsed());
            }
        }
        Ok(times)
    };
    let run = Duration::from_millis(arguments.run_ms);
    thread::scope(|scope| {
        let work = &work;
        let workers: Vec<_> = (0..threads).map(|thread| scope.spawn(move || work(thread))).collect();
        thread::sleep(arguments.warm_up());
        let (span, before) = (IntervalStart::begin(), pages_read_from_store(cached.io_bytes));
        phase.store(PHASE_MEASURED, Relaxed);
        thread::sleep(run);
        phase.store(PHASE_OVER, Relaxed);
        let ios = pages_read_from_store(cached.io_bytes) - before;
        let took = span.end();
        let mut times = Histogram::new();
        for worker in workers {
            times.merge(&join(worker)?);
        }
        json_line(&took, times.count(), ios, cached.io_bytes, &times)
    })
}
