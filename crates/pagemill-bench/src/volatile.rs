//! Cost to mark memory volatile, to unmark it, and to purge it, compared with `MADV_FREE` and `MADV_DONTNEED`.

use std::time::Duration;

use crate::child;
use crate::chunks;
use crate::error::Result;
use crate::experiment::{
    CommonOptions, Metric, Progress, SampleTable, judge_time_ratio, judge_value, report_rows, rotated, threads_text,
};
use crate::report::{Bound, Report};

/// Subject: marks and unmarks a range with a handle.
const HANDLES: &str = "handle-mark-unmark";
/// Subject: pins and unpins a range with a handle.
const PIN: &str = "handle-pin-unpin";
/// Subject: marks and unmarks one of 100,000 ranges by address.
const VRANGE: &str = "vrange-among-100000";
/// Subject: applies `MADV_FREE` to a range.
const FREE: &str = "madv-free";
/// Subject: applies `MADV_DONTNEED` to a range and touches its pages again.
const DONTNEED: &str = "madv-dontneed-and-fault";
/// Each subject's name in the report, and its name on the workload's command line.
const METHODS: [(&str, &str); 5] =
    [(HANDLES, "handles"), (PIN, "pin"), (VRANGE, "vrange"), (FREE, "free"), (DONTNEED, "dontneed")];
/// Subject: purges marked ranges.
const PURGING: &str = "handles-purged";

/// Sizes of the ranges.
const SIZES_KIB: [u64; 4] = [4, 64, 512, 2048];
const THREAD_COUNTS: [u64; 2] = [1, 2];
/// The range size, in KiB, to which the targets apply.
const TARGET_KIB: u64 = 64;
/// Amount of marked memory, in MiB, that one purge frees.
const PURGED_MIB: u64 = 1024;
/// Time limit of a workload process.
const TIME_LIMIT: Duration = Duration::from_secs(60);

/// Metric: nanoseconds in which one thread marks and unmarks a range, or does the corresponding calls of the subject.
const MARK_UNMARK_NS: &str = "ns";
/// Metric: number of page faults of the measured threads.
const FAULTS: &str = "faults";
/// Metric: speed of purges of ranges that have handles.
const PURGE_RATE: &str = "purge_gb_per_second";
/// Metric: speed of purges of memory that was marked by address.
const VRANGE_PURGE_RATE: &str = "vrange_gb_per_second";
/// Metric: speed of purges of memory that was marked strict, so that accesses raise `SIGBUS` afterwards.
const STRICT_PURGE_RATE: &str = "strict_gb_per_second";
/// Metric: 99.9th percentile of the duration of an unmark during a purge of the range.
const UNMARK_WAIT: &str = "wait_p999_us";

/// Size of the range in KiB, and number of threads.
type Case = (u64, u64);
/// The case under which the metrics of purges are reported. It has no range size and no number of threads.
const PURGE_CASE: Case = (0, 0);

/// Measures the cost to mark, unmark and purge volatile memory. Returns the report.
///
/// # Errors
///
/// [`crate::error::Error::WrongAnswer`] if bytes changed without memory pressure.
pub fn run(common: &CommonOptions) -> Result<Report> {
    let known: Vec<&str> = METHODS.iter().map(|(name, _)| *name).chain([PURGING]).chain(chunks::names()).collect();
    common.check_only(&known)?;
    let mut report = Report::new("volatile", common.json);
    let is_wanted = |name: &str| common.is_wanted(name);
    child::touch_beforehand(PURGED_MIB + 512)?;
    let samples = measure_cases(common, is_wanted)?;
    let table = format!("nanoseconds a thread to give up and take back, half the spread, times {FREE}");
    let toggle = Metric::lower(MARK_UNMARK_NS, "ns").against(FREE);
    for case in SIZES_KIB.iter().flat_map(|size| THREAD_COUNTS.map(|threads| (*size, threads))) {
        let name = format!("{} KiB, {}", case.0, threads_text(case.1));
        let subjects = METHODS.map(|(subject, _)| subject);
        report_rows(&mut report, &samples, (&case, &name), &subjects, &table, &[(toggle, &name)]);
    }
    let columns = [
        (Metric::higher(PURGE_RATE, "GB/s"), "huge pages of handles purged, GB/s"),
        (Metric::higher(VRANGE_PURGE_RATE, "GB/s"), "marked by address, GB/s"),
        (Metric::higher(STRICT_PURGE_RATE, "GB/s"), "marked strictly, GB/s"),
        (Metric::lower(UNMARK_WAIT, "us"), "unmark that meets a purge, 99.9 %, us"),
    ];
    report_rows(&mut report, &samples, (&PURGE_CASE, "purging"), &[PURGING], "purging", &columns);
    add_verdicts(&mut report, &samples);
    chunks::run(common, is_wanted, &mut report)?;
    Ok(report)
}

fn measure_cases(common: &CommonOptions, is_wanted: impl Fn(&str) -> bool) -> Result<SampleTable<Case>> {
    let run_ms = common.quick_or_full((50, 300));
    let ways: Vec<_> = METHODS.into_iter().filter(|(name, _)| is_wanted(name)).collect();
    let progress = Progress::new(common.rounds() * (SIZES_KIB.len() * THREAD_COUNTS.len() * ways.len() + 1));
    let mut samples = SampleTable::new();
    for round in 0..common.rounds() {
        for case in SIZES_KIB.iter().flat_map(|size| THREAD_COUNTS.map(|threads| (*size, threads))) {
            for &(name, way) in rotated(&ways, round) {
                progress.step(name);
                let numbers = [("--threads", case.1), ("--range-kib", case.0), ("--run-ms", run_ms)];
                let outcome =
                    child::run_plain(name, child::command_words(&["__toggle", "--way", way], &numbers), TIME_LIMIT)?;
                samples.add_outcome(&case, name, &[MARK_UNMARK_NS, FAULTS], &outcome);
            }
        }
        if is_wanted(PURGING) {
            progress.step(PURGING);
            let numbers = [("--mib", PURGED_MIB), ("--run-ms", common.quick_or_full((500, 3000)))];
            let outcome = child::run_plain(PURGING, child::command_words(&["__purging"], &numbers), TIME_LIMIT)?;
            let metrics = [PURGE_RATE, VRANGE_PURGE_RATE, STRICT_PURGE_RATE, UNMARK_WAIT];
            samples.add_outcome(&PURGE_CASE, PURGING, &metrics, &outcome);
        }
    }
    Ok(samples)
}

fn add_verdicts(report: &mut Report, samples: &SampleTable<Case>) {
    let ratio = |target: &str, least, way: &'static str, case: Case, base: (&'static str, Case)| {
        let (own, base) = ((&case, way, MARK_UNMARK_NS), (&base.1, base.0, MARK_UNMARK_NS));
        judge_time_ratio(samples, target, Bound::AtLeast(least), own, base)
    };
    for size in SIZES_KIB {
        for (count, least) in [(1, 100.0), (2, 400.0)] {
            let target =
                format!("mark + unmark of {size} KiB, {}, against {FREE} of {TARGET_KIB} KiB", threads_text(count));
            report.add_verdict(ratio(&target, least, HANDLES, (size, count), (FREE, (TARGET_KIB, count))));
        }
    }
    let target = "mark + unmark, 2 threads against 1, a thread";
    report.add_verdict(ratio(target, 1.0, HANDLES, (TARGET_KIB, 2), (HANDLES, (TARGET_KIB, 1))));
    for count in THREAD_COUNTS {
        let target = format!("vrange mark + unmark among 100,000, {}, against {FREE}", threads_text(count));
        report.add_verdict(ratio(&target, 5.0, VRANGE, (TARGET_KIB, count), (FREE, (TARGET_KIB, count))));
    }
    for (target, bound, unit, key) in [
        ("faults of unpurged round trips", Bound::AtMost(0.0), "", (&(2048, 1), HANDLES, FAULTS)),
        ("purge of huge pages, lazy", Bound::AtLeast(100.0), "GB/s", (&PURGE_CASE, PURGING, PURGE_RATE)),
        ("purge of huge pages, strict", Bound::AtLeast(50.0), "GB/s", (&PURGE_CASE, PURGING, STRICT_PURGE_RATE)),
        ("unmark that meets a purge, 99.9 %", Bound::AtMost(1000.0), "us", (&PURGE_CASE, PURGING, UNMARK_WAIT)),
    ] {
        report.add_verdict(judge_value(samples, target, (bound, unit), key));
    }
}
