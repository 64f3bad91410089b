//! Two million objects, of which nine tenths are freed at random. The allocator then returns as much free memory as it
//! can, and the resident memory of the process is measured.

use super::storage_subjects::{self, MOVERS};
use super::{BY_HANDLE, BY_OWNER, Options};
use crate::child;
use crate::error::{Error, Result};
use crate::experiment::{Metric, Study, metric_names, not_measured};
use crate::proc;
use crate::report::{Bound, Report, Verdict};
use crate::stats::Better;

/// Sizes of the objects in bytes.
pub const SIZES: [u64; 2] = [192, 576];

/// Number of objects that are allocated before most are freed (quick, full). The targets apply to the full number.
const OBJECT_COUNT: (u64, u64) = (500_000, 2_000_000);

/// Bytes of memory that the workload needs for each object of the larger size. This is enough for the allocator that
/// needs most, and for the objects whose copying is timed.
const NEEDED_BYTES_PER_OBJECT: u64 = 2 * 1024;

const BASELINE: &str = "glibc";

/// Metric: resident memory before the free memory is returned, divided by the total size of the live objects.
const HELD_RATIO: &str = "held_ratio";
/// Metric: resident memory after the free memory was returned, divided by the total size of the live objects. For
/// [`BY_HANDLE`], the handles (8 bytes for each object at the peak) are subtracted first.
const LEFT_RATIO: &str = "left_ratio";
/// Metric: resident memory in MiB after the free memory was returned, including the table of handles.
const LEFT_MIB: &str = "left_mib";
/// Metric: the part of [`LEFT_MIB`] that the table of handles uses.
const HANDLES_MIB: &str = "handles_mib";
/// Metric: time in milliseconds to return the free memory.
const RETURN_MS: &str = "ms";
/// Metric: number of objects that were moved while the free memory was returned.
const MOVED_OBJECTS: &str = "moved";
/// Metric: time to return the free memory, divided by the number of objects moved meanwhile.
const MOVE_NS: &str = "move_ns";
/// Metric: nanoseconds to copy the bytes of one object.
const COPY_NS: &str = "copy_ns";
/// Metric: [`MOVE_NS`] divided by [`COPY_NS`].
const TIMES_COPY: &str = "times_copy";

const COMMON_METRICS: [&str; 5] = [HELD_RATIO, LEFT_MIB, LEFT_RATIO, HANDLES_MIB, RETURN_MS];
/// The metrics, and their columns of the table.
const COLUMNS: [(Metric, &str); 9] = [
    (Metric::lower(HELD_RATIO, "x"), "before the return, x of live"),
    (Metric::lower(LEFT_MIB, "MiB").against(BASELINE), "after the return, MiB"),
    (Metric::lower(LEFT_RATIO, "x"), "after, x of live, without handle table"),
    (Metric::lower(HANDLES_MIB, "MiB"), "handle table, MiB"),
    (Metric::lower(RETURN_MS, "ms"), "ms"),
    (Metric::higher(MOVED_OBJECTS, "objects"), "moves"),
    (Metric::lower(MOVE_NS, "ns"), "ns a move, with all other work"),
    (Metric::lower(COPY_NS, "ns"), "ns a copy"),
    (Metric::lower(TIMES_COPY, "x"), "x of a copy"),
];

/// Number of objects, and their size in bytes.
type Case = (u64, u64);

/// Maximum of [`LEFT_RATIO`].
const MAX_LEFT_RATIO: f64 = 1.10;
/// For each cache, the minimum of a peer allocator's [`LEFT_MIB`], divided by [`LEFT_MIB`] of the cache.
const MIN_PEER_RATIOS: [(&str, f64); 2] = [(BY_OWNER, 5.0), (BY_HANDLE, 4.0)];
/// Maximum of [`TIMES_COPY`].
const MAX_TIMES_COPY: f64 = 6.0;

/// Returns the number of objects that are allocated before most are freed.
pub fn objects(options: &Options) -> u64 {
    options.objects.map_or(options.common.quick_or_full(OBJECT_COUNT), u64::from)
}

/// Checks that the machine has enough available memory for the objects. Touches that memory, so that the first sample
/// is not slower than later ones.
///
/// # Errors
///
/// [`Error::CannotRun`] without enough memory.
pub fn prepare(options: &Options) -> Result<()> {
    let needed = objects(options) * NEEDED_BYTES_PER_OBJECT;
    match proc::available_bytes() {
        Some(available) if available < needed => {
            Err(Error::CannotRun(format!("{} MiB of memory are not available", needed >> 20)))
        }
        _ => child::touch_beforehand(needed >> 20),
    }
}

/// Measures how much memory the wanted allocators and caches keep after most objects were freed; adds rows and verdicts
/// to the report.
///
/// # Errors
///
/// [`Error::WrongAnswer`] if an object had wrong contents; [`Error::CannotRun`] without enough memory.
pub fn run_part(options: &Options, report: &mut Report) -> Result<()> {
    let subjects = storage_subjects::available_subjects(&options.common, report)?;
    if subjects.is_empty() {
        return Ok(());
    }
    prepare(options)?;
    let mut study = Study::new(report, |(objects, size): &Case| format!("{objects} objects of {size} B"));
    let cases = SIZES.map(|size| (objects(options), size));
    study.measure_by_case((&cases, options.common.rounds()), &subjects, &metric_names(&COLUMNS), |case, subject| {
        let outcome = subject.sample("fragments", &[("--size", case.1), ("--objects", case.0)], None)?;
        // An allocator reports no moves, so it has no cell for them.
        Ok(match subject.can_move() {
            true => outcome,
            false => outcome.part(|line| COMMON_METRICS.iter().map(|name| (*name, line[*name].clone())).collect()),
        })
    })?;
    for case in &cases {
        let table = format!("{}, a random nine tenths freed", study.name(case));
        study.rows(case, &subjects, &table, &COLUMNS);
    }
    cases.iter().for_each(|case| add_verdicts(&mut study, case));
    Ok(())
}

fn add_verdicts(study: &mut Study<'_, Case>, case: &Case) {
    let ((objects, size), report, samples) = (*case, &mut *study.report, &study.samples);
    let mut add = |verdict: Verdict| {
        let note = "fewer objects than the target requires".to_owned();
        let is_small = objects < OBJECT_COUNT.1;
        report.add_verdict(if is_small { Verdict { estimate: None, note, ..verdict } } else { verdict });
    };
    let judge_value = |target: String, most, subject, metric| {
        not_measured(target, Bound::AtMost(most), "x", "it was not run").measured(samples.get((case, subject, metric)))
    };
    for subject in MOVERS {
        let beside = if subject == BY_HANDLE { ", without 8 B for each handle of the peak" } else { "" };
        let target = format!("fragments of {size} B, {subject}: left, of what is live{beside}");
        add(judge_value(target, MAX_LEFT_RATIO, subject, LEFT_RATIO));
    }
    for (subject, least) in MIN_PEER_RATIOS {
        for peer in storage_subjects::peers().filter(|peer| samples.get((case, peer, LEFT_MIB)).is_some()) {
            let target = format!("fragments of {size} B, {peer}: left, of what {subject} has left");
            let blank = not_measured(target, Bound::AtLeast(least), "x", "it was not run");
            let of = |subject| samples.get((case, subject, LEFT_MIB));
            add(blank.compared(of(subject), (peer, of(peer)), Better::Lower));
        }
    }
    for subject in MOVERS {
        let target = format!("moves of {size} B, {subject}: time of a copy");
        add(judge_value(target, MAX_TIMES_COPY, subject, TIMES_COPY));
    }
}
