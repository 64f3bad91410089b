//! The workload of a search server: copy a chunk of keys, search the copy for a key, and free the copy, as fast as
//! possible.
//!
//! The workload follows ebizzy (V. Henson, 2006) in new code, with another random generator, since the original one
//! stays at zero. Every record checks its answer: keys are unique and ascending, so a search with another result has
//! found damaged memory.
//!
//! With a lock file, the workload also makes *bursts*: copies that are all live at once and are then searched. Bursts
//! and the [`hog`](super::hog) exclude each other by the lock, so the live memory always fits into the limit. If a
//! process is out of memory nevertheless, the cause is free memory that an allocator retained.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;
use rustix::fs::{FlockOperation, flock};

use super::copies::{self, Copies, Copy, CopyMemory};
use super::{Failure, WorkloadResult, ensure};
use crate::native::WordAllocation;
use crate::proc;

/// Number of words of a chunk, and of each copy, with [`CopySizes::Fixed`]: 256 KiB, as in ebizzy.
const FIXED_COPY_WORDS: usize = 256 * 1024 / 8;

/// Smallest and largest number of words of a copy with [`CopySizes::Mixed`]: 64 KiB to 1 MiB.
const MIXED_COPY_WORDS: (usize, usize) = (64 * 1024 / 8, 1024 * 1024 / 8);

/// Minimum number of records (a copy and a search in it) that each thread makes before the measurement, and again
/// during the measurement, even if the set time is over. The first records touch new memory, and a thread may get no
/// CPU for a while.
const MIN_RECORDS: u64 = 4;
/// Maximum time to wait until every thread has made [`MIN_RECORDS`] records.
const MIN_RECORDS_TIME_LIMIT: Duration = Duration::from_secs(30);

/// The sizes of the copies that are made of the chunks of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum CopySizes {
    /// Each copy has 256 KiB
    Fixed,
    /// Each copy has a uniformly random size from 64 KiB to 1 MiB
    Mixed,
}

crate::workload::arguments! {
    EbizzyArguments:
    threads: usize,
    warm_ms: u64,
    measure_ms: u64,
    #[arg(default_value = "fixed")]
    sizes: CopySizes,
    /// The kind of memory in which the copies are stored.
    #[arg(default_value = "malloc")]
    memory: CopyMemory,
    /// In one record of this many, the sum of the whole copy is compared with the sum of its source; 0: in none.
    #[arg(default_value_t = 0)]
    sum_every: u64,
    /// Number of chunks of keys from which copies are made.
    #[arg(default_value_t = 10)]
    chunks: usize,
    /// Size in MiB of the copies that are live at the end of a burst; 0 for no bursts.
    #[arg(default_value_t = 0)]
    burst_mib: usize,
    /// Milliseconds from the end of a burst to the start of the next.
    #[arg(default_value_t = 500)]
    burst_every_ms: u64,
    /// Lock file that prevents a burst from running at the same time as a round of the memory hog.
    lock: Option<PathBuf>,
}

struct SharedState {
    chunks: Vec<WordAllocation>,
    sizes: CopySizes,
    sum_every: u64,
    is_over: AtomicBool,
    counters: Vec<Counters>,
    bursts: AtomicU64,
}

/// Counters of the records that one thread has made, of errors and of purged chunks, on cache lines that no other
/// thread writes.
#[derive(Default)]
#[repr(align(128))]
struct Counters {
    records: AtomicU64,
    mismatches: AtomicU64,
    purged: AtomicU64,
    refused: AtomicU64,
}

/// State of the bursts, in which many copies are live at once. Only the first thread makes bursts.
struct Bursts {
    lock: File,
    bytes: usize,
    every: Duration,
    next: Instant,
}

/// Runs threads that copy chunks of keys, search the copies and free them. The resulting JSON has the records (a copy
/// and a search in it) per second, the page faults per record, and the number of failed allocations.
pub fn run(arguments: &EbizzyArguments) -> WorkloadResult {
    let words = match arguments.sizes {
        CopySizes::Fixed => FIXED_COPY_WORDS,
        CopySizes::Mixed => MIXED_COPY_WORDS.1,
    };
    let shared = SharedState {
        chunks: make_working_set(arguments.chunks, words)?,
        sizes: arguments.sizes,
        sum_every: arguments.sum_every,
        is_over: AtomicBool::new(false),
        counters: (0..arguments.threads).map(|_| Counters::default()).collect(),
        bursts: AtomicU64::new(0),
    };
    let mut bursts = open_bursts(arguments)?;
    let copies = (0..arguments.threads).map(|_| Copies::new(arguments.memory, words * size_of::<u64>()));
    let copies = copies.collect::<Result<Vec<_>, _>>()?;
    let start = Barrier::new(arguments.threads + 1);
    let measured = thread::scope(|scope| {
        for (index, copies) in copies.into_iter().enumerate() {
            let (shared, start, bursts) = (&shared, &start, bursts.take());
            scope.spawn(move || {
                start.wait();
                run_thread(shared, index, copies, bursts);
            });
        }
        start.wait();
        let measured = measure_records(&shared, arguments);
        shared.is_over.store(true, Ordering::Relaxed);
        measured
    });
    let mismatches = shared.sum_over_threads(|counters| &counters.mismatches);
    ensure(mismatches == 0, || format!("{mismatches} searches ended at a wrong key"))?;
    measured
}

/// Makes chunks of ascending keys. The upper bits of a key are the index of its chunk, so that no two chunks share a
/// key.
fn make_working_set(chunks: usize, words: usize) -> Result<Vec<WordAllocation>, Failure> {
    let mut random = Rng::with_seed(0x6562_697a_7a79);
    (0..chunks)
        .map(|chunk| {
            let mut key = (chunk as u64) << 40;
            let keys: Vec<u64> = (0..words)
                .map(|_| {
                    key += 1 + random.u64(..7);
                    key
                })
                .collect();
            WordAllocation::copy_of(&keys).ok_or(Failure::Other("no memory for the working set".to_owned()))
        })
        .collect()
}

fn open_bursts(arguments: &EbizzyArguments) -> Result<Option<Bursts>, Failure> {
    let Some(path) = arguments.lock.as_ref().filter(|_| arguments.burst_mib > 0) else {
        return Ok(None);
    };
    let lock = File::open(path).map_err(|cause| format!("{}: {cause}", path.display()))?;
    Ok(Some(Bursts {
        lock,
        bytes: arguments.burst_mib << 20,
        every: Duration::from_millis(arguments.burst_every_ms),
        next: Instant::now(),
    }))
}

/// Waits for the end of the warm-up and, if there are bursts, of the first burst. Then counts records, page faults and
/// purged chunks for the given time.
fn measure_records(shared: &SharedState, arguments: &EbizzyArguments) -> WorkloadResult {
    let begun = Instant::now();
    thread::sleep(Duration::from_millis(arguments.warm_ms));
    while arguments.burst_mib > 0 && shared.bursts.load(Ordering::Relaxed) == 0 {
        if begun.elapsed() > Duration::from_secs(30) {
            return Err("no burst came through in 30 s".into());
        }
        thread::sleep(Duration::from_millis(5));
    }
    shared.await_records(&vec![0; arguments.threads])?;
    let snapshot = || {
        let faults = proc::process_stat(std::process::id()).map_or(0, |own| own.minor_faults);
        (
            shared.sum_over_threads(|counters| &counters.records),
            faults,
            shared.sum_over_threads(|counters| &counters.purged),
            Instant::now(),
        )
    };
    let (before, made) = (snapshot(), shared.records_per_thread());
    thread::sleep(Duration::from_millis(arguments.measure_ms));
    shared.await_records(&made)?;
    let after = snapshot();
    let records = after.0 - before.0;
    let seconds = (after.3 - before.3).as_secs_f64();
    Ok(serde_json::json!({
        "records_per_second": records as f64 / seconds,
        "faults_per_record": (after.1 - before.1) as f64 / records.max(1) as f64,
        "purged_per_record": (after.2 - before.2) as f64 / records.max(1) as f64,
        "refused": shared.sum_over_threads(|counters| &counters.refused),
        "bursts": shared.bursts.load(Ordering::Relaxed),
    }))
}

fn run_thread(shared: &SharedState, index: usize, mut copies: Copies, mut bursts: Option<Bursts>) {
    let mut random = Rng::with_seed(0x1000 + index as u64);
    let counters = &shared.counters[index];
    while !shared.is_over.load(Ordering::Relaxed) {
        match &mut bursts {
            Some(bursts) if bursts.lock_if_due() => make_burst(shared, bursts, counters, &mut copies, &mut random),
            _ => match Query::make(shared, &mut copies, &mut random) {
                Some(query) => {
                    counters.count_record(shared, &query);
                    counters.release(query, &mut copies);
                }
                None => counters.count_refusal(),
            },
        }
    }
}

/// Makes copies until their bytes reach the size of a burst, then searches all of them and frees them.
fn make_burst(shared: &SharedState, bursts: &mut Bursts, counters: &Counters, copies: &mut Copies, random: &mut Rng) {
    let (mut held, mut held_bytes) = (Vec::new(), 0);
    while held_bytes < bursts.bytes && !shared.is_over.load(Ordering::Relaxed) {
        match Query::make(shared, copies, random) {
            Some(query) => {
                held_bytes += query.words * size_of::<u64>();
                held.push(query);
            }
            None => {
                counters.count_refusal();
                break;
            }
        }
    }
    for query in &held {
        counters.count_record(shared, query);
    }
    for query in held {
        counters.release(query, copies);
    }
    let _ = flock(&bursts.lock, FlockOperation::Unlock);
    bursts.next = Instant::now() + bursts.every;
    shared.bursts.fetch_add(1, Ordering::Relaxed);
}

/// One record of the workload: a copy of a chunk, and the key to find in the copy.
struct Query {
    copy: Copy,
    chunk: usize,
    words: usize,
    /// Index of the key in the copy.
    place: usize,
}

impl Query {
    fn make(shared: &SharedState, copies: &mut Copies, random: &mut Rng) -> Option<Self> {
        let chunk = random.usize(..shared.chunks.len());
        let source = shared.chunks[chunk].words();
        let words = match shared.sizes {
            CopySizes::Fixed => source.len(),
            CopySizes::Mixed => MIXED_COPY_WORDS.0 + random.usize(..MIXED_COPY_WORDS.1 - MIXED_COPY_WORDS.0 + 1),
        };
        let place = random.usize(..words);
        let copy = copies.copy_of(&source[..words])?;
        Some(Self { copy, chunk, words, place })
    }

    fn finds_key(&self, shared: &SharedState) -> bool {
        self.copy.find(shared.chunks[self.chunk].words()[self.place]) == Some(self.place)
    }

    /// Returns whether the sum of the whole copy equals that of its source.
    fn equals_source(&self, shared: &SharedState) -> bool {
        let source = &shared.chunks[self.chunk].words()[..self.words];
        self.copy.sum() == Some(copies::sum(source.iter().copied()))
    }
}

impl Counters {
    fn count_record(&self, shared: &SharedState, query: &Query) {
        // Only one thread writes to its counters, so a load and a store suffice.
        let count = |counter: &AtomicU64| {
            counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        };
        count(&self.records);
        let is_summed = shared.sum_every > 0 && self.records.load(Ordering::Relaxed).is_multiple_of(shared.sum_every);
        if !query.finds_key(shared) || is_summed && !query.equals_source(shared) {
            count(&self.mismatches);
        }
    }

    /// Frees the allocation of a record's copy, or returns the copy's chunk to `copies` for reuse.
    fn release(&self, query: Query, copies: &mut Copies) {
        self.purged.store(copies.purged, Ordering::Relaxed);
        // A failure to release a copy is a bug, and a panic in a thread ends the run.
        copies.release(query.copy).expect("a chunk that was written can be given up");
    }

    fn count_refusal(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
        thread::sleep(Duration::from_millis(1));
    }
}

impl Bursts {
    fn lock_if_due(&self) -> bool {
        Instant::now() >= self.next && flock(&self.lock, FlockOperation::NonBlockingLockExclusive).is_ok()
    }
}

impl SharedState {
    /// Returns the number of records that each thread has made, including those that failed for lack of memory.
    fn records_per_thread(&self) -> Vec<u64> {
        let made =
            |counters: &Counters| counters.records.load(Ordering::Relaxed) + counters.refused.load(Ordering::Relaxed);
        self.counters.iter().map(made).collect()
    }

    /// Waits until each thread has made [`MIN_RECORDS`] more records than its number in `before`.
    fn await_records(&self, before: &[u64]) -> Result<(), Failure> {
        let begun = Instant::now();
        while self.records_per_thread().iter().zip(before).any(|(made, before)| *made < before + MIN_RECORDS) {
            if begun.elapsed() > MIN_RECORDS_TIME_LIMIT {
                return Err("a thread makes no records".into());
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn sum_over_threads(&self, counter: impl Fn(&Counters) -> &AtomicU64) -> u64 {
        let counters = self.counters.iter().map(counter);
        counters.map(|counter| counter.load(Ordering::Relaxed)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared_state() -> SharedState {
        SharedState {
            chunks: make_working_set(3, MIXED_COPY_WORDS.1).expect("3 MiB are there"),
            sizes: CopySizes::Mixed,
            sum_every: 1,
            is_over: AtomicBool::new(false),
            counters: vec![Counters::default()],
            bursts: AtomicU64::new(0),
        }
    }

    /// Keys must ascend within a chunk and from chunk to chunk, so that a search has only one right answer.
    #[test]
    fn keys_are_unique() {
        let shared = shared_state();
        let keys: Vec<u64> = shared.chunks.iter().flat_map(|chunk| chunk.words()).copied().collect();

        assert!(keys.is_sorted_by(|a, b| a < b));
    }

    /// An intact copy must pass the search for its key and the comparison of sums. A damaged copy must fail both
    /// checks, and its record must be counted as a mismatch.
    #[test]
    fn damaged_copy_is_counted() {
        let shared = shared_state();
        let mut copies = Copies::new(CopyMemory::Malloc, 0).expect("nothing is made yet");
        let mut query = Query::make(&shared, &mut copies, &mut Rng::with_seed(1)).expect("1 MiB is there");
        assert!(query.finds_key(&shared) && query.equals_source(&shared));

        let source = &shared.chunks[query.chunk].words()[..query.words];
        let mut damaged: Vec<u64> = source.iter().map(|key| key ^ 1 << 63).collect();
        // Flipping the highest bit of an even number of words does not change the sum. So one word also gets another
        // value.
        damaged[0] += 1;
        query.copy = copies.copy_of(&damaged).expect("1 MiB is there");
        assert!(!query.finds_key(&shared) && !query.equals_source(&shared));
        shared.counters[0].count_record(&shared, &query);

        assert_eq!(shared.sum_over_threads(|counters| &counters.mismatches), 1);
    }
}
