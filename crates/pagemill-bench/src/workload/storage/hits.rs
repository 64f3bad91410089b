//! One thread copies resident pages. In turns, this thread runs alone, or another thread keeps the device busy with
//! reads.

use std::hint::black_box;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;
use pagemill_core::stats::{self, Counter};
use serde_json::json;

use super::Source;
use super::miss::{CachedSource, RequestQueue};
use super::ring::{self, TransferLoop};
use crate::native::Pages;
use crate::pattern::{self, RECORD_BYTES, Records};
use crate::storage::miss::{COPIES_ALONE, COPIES_MISSED, COPIES_WITH_MISSES, KEPT_RATIO, MISSES};
use crate::workload::steps::join;
use crate::workload::{Failure, WorkloadResult, ensure};

/// Total size in bytes of the pages that are copied. It is small compared with the cache, so that all of these pages
/// stay resident.
const HOT_BYTES: u64 = 16 << 20;

const MISS_QUEUE_DEPTH: u32 = 32;

/// Number of turns. In each turn, copies of pages are measured without other reads, and then with concurrent misses.
const TURN_COUNT: u32 = 4;

/// Number of page copies between two reads of the clock.
const BATCH_COPIES: usize = 64;

crate::workload::arguments! {
    /// Arguments of a run in which one thread copies pages while another thread reads from a device. The copies are
    /// hits of a page cache, and the reads are misses of the same cache. With `--plain`, plain memory is copied, and a
    /// bare io_uring makes the reads. That shows how much the machine itself slows copies down.
    HitsArguments:
    cache_mib: u64,
    /// Use plain memory and a bare io_uring instead of the cache
    plain: bool,
    run_ms: u64,
    ..source: Source,
}

type Record = [u8; RECORD_BYTES];

/// State in which the thread that makes misses waits.
const STATE_PAUSED: u8 = 0;
/// State in which the thread that makes misses reads at full speed.
const STATE_BUSY: u8 = 1;
/// State in which the thread that makes misses must end.
const STATE_OVER: u8 = 2;

/// The number of page copies, the number of misses and the duration, summed over all measurements with misses or all
/// without.
#[derive(Default)]
struct CopyTotals {
    copies: u64,
    misses: u64,
    seconds: f64,
}

pub fn run(arguments: &HitsArguments) -> WorkloadResult {
    if arguments.source.len_bytes <= 2 * HOT_BYTES || arguments.cache_mib << 20 < 2 * HOT_BYTES {
        let mib = (2 * HOT_BYTES) >> 20;
        return Err(format!("a file of more than {mib} MiB, and a cache of {mib}, are needed").into());
    }
    if arguments.plain { measure_plain(arguments) } else { measure_cached(arguments) }
}

fn measure_cached(arguments: &HitsArguments) -> WorkloadResult {
    let source = &arguments.source;
    let cached = CachedSource::open(source, arguments.cache_mib, RECORD_BYTES)?;
    cached.fill(HOT_BYTES)?;
    let places = (source.len_bytes - HOT_BYTES) as usize / RECORD_BYTES;
    let copy = |record: &mut Record, offset: u64| -> Result<(), Failure> {
        let read = cached.file.read_at(record, offset)?;
        check_copy(read == RECORD_BYTES && source.is_right(black_box(record), offset))
    };
    // Makes the pages resident and uses them so often that the eviction keeps them.
    let mut record = [0; RECORD_BYTES];
    for _ in 0..TURN_COUNT {
        (0..HOT_BYTES).step_by(RECORD_BYTES).try_for_each(|offset| copy(&mut record, offset))?;
    }
    let before = stats::get(Counter::StoreRead);
    let (mut line, begun) = copy_by_turns(arguments, copy, |state, misses| {
        let mut queue = RequestQueue::new(&cached, MISS_QUEUE_DEPTH)?;
        let (mut random, mut record) = (Rng::with_seed(7), [0; RECORD_BYTES]);
        let mut drained = 0;
        while state.load(Relaxed) != STATE_OVER {
            if state.load(Relaxed) == STATE_PAUSED {
                drained += queue.drain()?;
                thread::sleep(Duration::from_millis(1));
                continue;
            }
            let next = || HOT_BYTES + (random.usize(..places) * RECORD_BYTES) as u64;
            queue.step(next, |offset| copy(&mut record, offset))?;
            misses.store(queue.times.count(), Relaxed);
        }
        drained += queue.drain()?;
        Ok(queue.times.count() + drained)
    })?;
    // Each read of the file that was not requested as a miss is a page that a copy found evicted and read again.
    let read = (stats::get(Counter::StoreRead) - before) / RECORD_BYTES as u64;
    line[COPIES_MISSED] = json!(read.saturating_sub(begun));
    Ok(line)
}

fn measure_plain(arguments: &HitsArguments) -> WorkloadResult {
    let mut pages = Pages::huge(HOT_BYTES as usize)?;
    let bytes = pages.bytes_mut(HOT_BYTES as usize);
    bytes.copy_from_slice(Records::filled(HOT_BYTES as usize).stamped_at(0, 0));
    let bytes = &*bytes;
    let copy = |record: &mut Record, offset: u64| {
        record.copy_from_slice(&bytes[offset as usize..][..RECORD_BYTES]);
        check_copy(pattern::is_stamped(black_box(record), 0, offset, 0))
    };
    let reads = ring::RingArguments::random_reads(&arguments.source, RECORD_BYTES, MISS_QUEUE_DEPTH as usize);
    let (line, _) = copy_by_turns(arguments, copy, |state, misses| {
        let mut work = TransferLoop::new(&reads, reads.offsets())?;
        while state.load(Relaxed) != STATE_OVER {
            if state.load(Relaxed) == STATE_PAUSED {
                work.drain()?;
                thread::sleep(Duration::from_millis(1));
                continue;
            }
            work.step()?;
            misses.store(work.times.count(), Relaxed);
        }
        work.drain()?;
        Ok(0)
    })?;
    Ok(line)
}

fn check_copy(is_right: bool) -> Result<(), Failure> {
    ensure(is_right, || "a copy is something else")
}

/// Runs `miss` in another thread and copies random pages in turns, while `miss` pauses and while it reads at full
/// speed. Returns the rates as JSON, and the result of `miss`.
fn copy_by_turns(
    arguments: &HitsArguments,
    copy: impl Fn(&mut Record, u64) -> Result<(), Failure>,
    miss: impl FnOnce(&AtomicU8, &AtomicU64) -> Result<u64, Failure> + Send,
) -> Result<(serde_json::Value, u64), Failure> {
    let (state, misses) = (AtomicU8::new(STATE_PAUSED), AtomicU64::new(0));
    let (mut random, mut record) = (Rng::with_seed(3), [0; RECORD_BYTES]);
    let mut copy_for = |time: Duration, totals: &mut CopyTotals| -> Result<(), Failure> {
        let (begun, before) = (Instant::now(), misses.load(Relaxed));
        while begun.elapsed() < time {
            for _ in 0..BATCH_COPIES {
                copy(&mut record, (random.usize(..HOT_BYTES as usize / RECORD_BYTES) * RECORD_BYTES) as u64)?;
            }
            totals.copies += BATCH_COPIES as u64;
        }
        totals.misses += misses.load(Relaxed) - before;
        totals.seconds += begun.elapsed().as_secs_f64();
        Ok(())
    };
    let time = Duration::from_millis(arguments.run_ms) / TURN_COUNT;
    let (mut alone, mut beside) = (CopyTotals::default(), CopyTotals::default());
    let begun = thread::scope(|scope| {
        let (state, misses) = (&state, &misses);
        let other = scope.spawn(move || miss(state, misses));
        let turns = (0..TURN_COUNT).try_for_each(|_| {
            // Half of the time is warm-up: in-flight reads end, or new ones begin.
            state.store(STATE_PAUSED, Relaxed);
            copy_for(time / 2, &mut CopyTotals::default())?;
            copy_for(time, &mut alone)?;
            state.store(STATE_BUSY, Relaxed);
            copy_for(time / 2, &mut CopyTotals::default())?;
            copy_for(time, &mut beside)
        });
        state.store(STATE_OVER, Relaxed);
        let other = join(other);
        turns.and(other)
    })?;
    let rate = |count: u64, totals: &CopyTotals| count as f64 / totals.seconds;
    let [alone_rate, beside_rate] = [&alone, &beside].map(|totals| rate(totals.copies, totals));
    let line = json!({
        COPIES_ALONE: alone_rate,
        COPIES_WITH_MISSES: beside_rate,
        KEPT_RATIO: beside_rate / alone_rate,
        MISSES: rate(beside.misses, &beside),
    });
    Ok((line, begun))
}
