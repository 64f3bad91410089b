//! Memory whose contents may be discarded and which is used again afterwards. It is marked and unmarked by a handle or
//! by address, or freed by a system call.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use pagemill_core::arena::Layout;
use pagemill_core::reclaim::tree::UNLIMITED;
use pagemill_core::reclaim::{Shrinker, Urgency};
use pagemill_testbed::Testbed;
use pagemill_volatile::vrange::Mode;
use pagemill_volatile::{Behaviour, Contents, VolatileBuf};

use super::steps::run_in_threads;
use super::{Failure, WorkloadResult, ensure};
use crate::histogram::Histogram;
use crate::native::Pages;
use crate::stats;

/// Bytes of memory in which each thread marks and unmarks ranges.
const AREA_BYTES: usize = 64 << 20;
/// Number of other ranges that stay marked by address while the cost of such marks is measured.
const OTHER_MARKED_RANGES: usize = 100_000;
const HUGE_RANGE_BYTES: usize = 64 << 20;
const BLOCK_BYTES: usize = 2 << 20;

/// The method that allows memory to be discarded and later ends this permission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Method {
    /// A range with a handle is marked volatile and unmarked.
    Handles,
    /// A range with a handle, which is marked volatile, is pinned and unpinned.
    Pin,
    /// A range is marked and unmarked by its address (`vrange`), while 100,000 other ranges are marked.
    Vrange,
    /// `MADV_FREE` is applied to a range, then each page of the range is written.
    Free,
    /// `MADV_DONTNEED` is applied to a range, then each page of the range is written.
    Dontneed,
}

crate::workload::arguments! {
    /// Arguments of a run that repeatedly marks and unmarks ranges, or applies the system calls that replace marks.
    ToggleArguments:
    way: Method,
    threads: usize,
    range_kib: usize,
    run_ms: u64,
}

crate::workload::arguments! {
    /// Arguments of a run that measures two things: the rate of purges, and the time to unmark a range during its
    /// purge.
    PurgingArguments:
    mib: usize,
    run_ms: u64,
}

/// Measures the time that a thread needs to mark and unmark a range, or to make the system calls that replace marks.
/// The resulting JSON has the mean time in nanoseconds and the number of page faults.
pub fn measure_toggle(arguments: &ToggleArguments) -> WorkloadResult {
    let pagemill = make_testbed()?;
    let start = Barrier::new(arguments.threads);
    let results = run_in_threads(arguments.threads, |index| toggle_in_thread(arguments, pagemill, index, &start))?;
    let each: Vec<f64> = results.iter().map(|(ns, _)| *ns).collect();
    let faults: u64 = results.iter().map(|(_, faults)| *faults).sum();
    Ok(serde_json::json!({ "ns": each.iter().sum::<f64>() / each.len() as f64, "faults": faults }))
}

fn make_testbed() -> Result<&'static Testbed, Failure> {
    Testbed::new(Layout { huge_from_bytes: 0, ..Layout::for_program() }, UNLIMITED).map_err(Failure::from)
}

fn toggle_in_thread(
    arguments: &ToggleArguments,
    pagemill: &'static Testbed,
    index: usize,
    start: &Barrier,
) -> Result<(f64, u64), Failure> {
    let range_bytes = arguments.range_kib << 10;
    let count = AREA_BYTES / range_bytes;
    let duration = Duration::from_millis(arguments.run_ms);
    match arguments.way {
        Method::Handles | Method::Pin => {
            let ranges = make_ranges(pagemill, count.min(512), range_bytes, index as u8)?;
            if arguments.way == Method::Pin {
                ranges.iter().try_for_each(VolatileBuf::mark)?;
            }
            start.wait();
            let result =
                if arguments.way == Method::Pin { time_pins(&ranges, duration) } else { time_marks(&ranges, duration) };
            check_bytes(&ranges, index as u8)?;
            result
        }
        Method::Vrange => {
            let area = Pages::new(AREA_BYTES)?;
            // The further ranges are every second page of another mapping, so that they do not merge.
            let others = Pages::new(OTHER_MARKED_RANGES / arguments.threads * 2 * Pages::page_bytes())?;
            for page in 0..OTHER_MARKED_RANGES / arguments.threads {
                others.vrange(pagemill, page * 2 * Pages::page_bytes(), Pages::page_bytes(), true)?;
            }
            start.wait();
            time_repeated(duration, |index| {
                let at = index % count * range_bytes;
                area.vrange(pagemill, at, range_bytes, true)?;
                Ok(area.vrange(pagemill, at, range_bytes, false)?)
            })
        }
        Method::Free | Method::Dontneed => {
            let mut area = Pages::new(AREA_BYTES)?;
            area.touch(0, AREA_BYTES);
            start.wait();
            time_madvise_calls(&mut area, arguments.way, range_bytes, duration)
        }
    }
}

/// Repeats an operation for `duration`. Returns the mean nanoseconds of an operation and the page faults of this
/// thread. Reads the clock once per hundred operations.
fn time_repeated(
    duration: Duration,
    mut operation: impl FnMut(usize) -> Result<(), Failure>,
) -> Result<(f64, u64), Failure> {
    const BATCH: usize = 100;
    let (faults, begun, mut done) = (Pages::faults(), Instant::now(), 0);
    while begun.elapsed() < duration {
        for index in done..done + BATCH {
            operation(index)?;
        }
        done += BATCH;
    }
    let ns = begun.elapsed().as_nanos() as f64 / done as f64;
    Ok((ns, Pages::faults() - faults))
}

fn time_marks(ranges: &[VolatileBuf], duration: Duration) -> Result<(f64, u64), Failure> {
    time_repeated(duration, |index| {
        let range = &ranges[index % ranges.len()];
        range.mark()?;
        match range.unmark()? {
            Contents::Kept => Ok(()),
            contents => Err(format!("without pressure a range was lost: {contents:?}").into()),
        }
    })
}

fn time_pins(ranges: &[VolatileBuf], duration: Duration) -> Result<(f64, u64), Failure> {
    time_repeated(duration, |index| match ranges[index % ranges.len()].pin()?.contents() {
        Contents::Kept => Ok(()),
        contents => Err(format!("without pressure a range was lost: {contents:?}").into()),
    })
}

/// Returns the mean nanoseconds of an `madvise` call, and the page faults. With `MADV_DONTNEED`, the time includes the
/// writes afterwards, since these cause page faults. Writes after `MADV_FREE` cause none and are not timed.
fn time_madvise_calls(
    area: &mut Pages,
    way: Method,
    range_bytes: usize,
    duration: Duration,
) -> Result<(f64, u64), Failure> {
    let (faults, begun, mut took, mut done) = (Pages::faults(), Instant::now(), Duration::ZERO, 0u32);
    let count = AREA_BYTES / range_bytes;
    while begun.elapsed() < duration {
        let at = done as usize % count * range_bytes;
        let call = Instant::now();
        if way == Method::Free {
            area.advise_free(at, range_bytes)?;
            took += call.elapsed();
            area.touch(at, range_bytes);
        } else {
            area.discard(at, range_bytes)?;
            area.touch(at, range_bytes);
            took += call.elapsed();
        }
        done += 1;
    }
    Ok((took.as_nanos() as f64 / f64::from(done), Pages::faults() - faults))
}

fn make_ranges(
    pagemill: &'static Testbed,
    count: usize,
    len_bytes: usize,
    byte: u8,
) -> Result<Vec<VolatileBuf>, Failure> {
    let made = (0..count).map(|_| {
        let mut range = pagemill.ranges.allocate(len_bytes, Behaviour::Full)?;
        range.bytes_mut()?.fill(byte);
        Ok(range)
    });
    made.collect::<pagemill_core::Result<_>>().map_err(Failure::from)
}

fn check_bytes(ranges: &[VolatileBuf], byte: u8) -> Result<(), Failure> {
    let is_right = |range: &VolatileBuf| {
        range.pin().is_ok_and(|pin| pin.whole().is_some_and(|all| all.iter().all(|found| *found == byte)))
    };
    ensure(ranges.iter().all(is_right), || "bytes of a range changed without pressure")
}

/// Measures the rate of purging huge pages, and the 99.9th percentile of the time to unmark a range during its purge.
pub fn measure_purging(arguments: &PurgingArguments) -> WorkloadResult {
    let pagemill = make_testbed()?;
    let bytes = arguments.mib << 20;
    // The first round is not measured: it touches memory that the host of a virtual machine has not backed yet.
    let (mut best, mut total) = (Vec::new(), 0);
    for round in 0..6 {
        let ranges = make_ranges(pagemill, bytes / HUGE_RANGE_BYTES, HUGE_RANGE_BYTES, 1)?;
        ranges.iter().try_for_each(VolatileBuf::mark)?;
        pagemill.account.reconcile();
        let begun = Instant::now();
        let freed = pagemill.ranges.shrink(bytes as u64, Urgency::Request);
        let took = begun.elapsed();
        ensure((freed as usize) >= bytes / HUGE_RANGE_BYTES * HUGE_RANGE_BYTES, || {
            format!("of {bytes} bytes the kernel took {freed}")
        })?;
        if round > 0 {
            best.push(freed as f64 / took.as_secs_f64() / 1e9);
        }
        total += freed;
    }
    let waits = measure_unmark_times(pagemill, Duration::from_millis(arguments.run_ms))?;
    let lazy = measure_purge_of_marks(pagemill, bytes, Mode::Volatile)?;
    let strict = measure_purge_of_marks(pagemill, bytes, Mode::VolatileStrict)?;
    Ok(serde_json::json!({
        "purge_gb_per_second": stats::median(&best),
        "vrange_gb_per_second": lazy,
        "strict_gb_per_second": strict,
        "purged_bytes": total,
        "wait_p999_us": waits.percentile_ms(0.999) * 1e3,
        "wait_p50_us": waits.percentile_ms(0.5) * 1e3,
        "waits": waits.count(),
    }))
}

/// Returns the rate, in GB/s, of purging huge pages that were marked by address. Checks that a later read gets a signal
/// in strict mode, and zeros otherwise.
fn measure_purge_of_marks(pagemill: &'static Testbed, bytes: usize, mode: Mode) -> Result<f64, Failure> {
    let mut area = Pages::new(bytes)?;
    area.advise_huge()?;
    let mut rates = Vec::new();
    for round in 0..6 {
        area.touch(0, bytes);
        match area.mark(pagemill, 0, bytes, mode) {
            Ok(_) => {}
            Err(pagemill_core::Error::Unsupported { .. }) => return Ok(0.0),
            Err(error) => return Err(Failure::Other(error.to_string())),
        }
        let begun = Instant::now();
        let freed = pagemill.vranges.shrink(bytes as u64, Urgency::Limit);
        let took = begun.elapsed();
        let is_right = |at| area.is_readable(at) == (mode == Mode::Volatile);
        let are_all_right = (0..bytes).step_by(Pages::page_bytes()).all(is_right);
        let is_purged = area.mark(pagemill, 0, bytes, Mode::Nonvolatile)?;
        ensure(freed as usize == bytes && are_all_right && is_purged, || {
            format!("of {bytes} bytes the kernel took {freed}, or pages show it wrong")
        })?;
        if round > 0 {
            rates.push(freed as f64 / took.as_secs_f64() / 1e9);
        }
    }
    stats::median(&rates).ok_or_else(|| Failure::Other("no rounds".to_owned()))
}

/// Returns the times to unmark a range while it is being purged. One thread purges continuously, and this thread marks
/// and unmarks the range.
fn measure_unmark_times(pagemill: &'static Testbed, run: Duration) -> Result<Histogram, Failure> {
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
    let mut range = make_ranges(pagemill, 1, HUGE_RANGE_BYTES, 1)?.remove(0);
    let is_over = AtomicBool::new(false);
    let mut waits = Histogram::new();
    thread::scope(|scope| {
        let purger = scope.spawn(|| {
            while !is_over.load(Relaxed) {
                pagemill.ranges.shrink(u64::MAX, Urgency::Request);
            }
        });
        let begun = Instant::now();
        let result = (|| {
            while begun.elapsed() < run {
                // All pages are made resident, so that a purge has work to do.
                for at in (0..HUGE_RANGE_BYTES).step_by(BLOCK_BYTES) {
                    range.bytes_mut()?[at] = 1;
                }
                range.mark()?;
                // Waits until a purge of the range has begun, but at most two milliseconds.
                let marked = Instant::now();
                while !range.is_being_purged() && marked.elapsed() < Duration::from_millis(2) {
                    std::hint::spin_loop();
                }
                let is_met = range.is_being_purged();
                let asked = Instant::now();
                range.unmark()?;
                if is_met {
                    waits.add(asked.elapsed());
                }
            }
            Ok::<_, pagemill_core::Error>(())
        })();
        is_over.store(true, Relaxed);
        let _ = purger.join();
        result.map_err(Failure::from)
    })?;
    match waits.count() {
        0 => Err("no unmarking met a purge".into()),
        _ => Ok(waits),
    }
}
