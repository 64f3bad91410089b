//! Cost to mark memory volatile, to unmark it, and to purge it, compared with `MADV_FREE` and `MADV_DONTNEED`.

use std::time::Duration;

use crate::child;
use crate::chunks;
use crate::error::Result;
use crate::experiment::{CommonOptions, Metric, Study, threads_text};
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

/// Measures the cost to mark, unmark and purge volatile memory. Adds rows and verdicts to the report.
///
/// # Errors
///
/// [`crate::error::Error::WrongAnswer`] if bytes changed without memory pressure.
pub fn run(common: &CommonOptions, report: &mut Report) -> Result<()> {
    let known: Vec<&str> = METHODS.iter().map(|(name, _)| *name).chain([PURGING]).chain(chunks::names()).collect();
    common.check_only(&known)?;
    child::touch_beforehand(PURGED_MIB + 512)?;
    let mut study = Study::new(report, |case| match *case {
        PURGE_CASE => "purging".to_owned(),
        (kib, threads) => format!("{kib} KiB, {}", threads_text(threads)),
    });
    let cases = SIZES_KIB.map(|size| THREAD_COUNTS.map(|threads| (size, threads))).concat();
    measure_cases(common, &mut study, &cases)?;
    let table = format!("nanoseconds a thread to give up and take back, half the spread, times {FREE}");
    let toggle = Metric::lower(MARK_UNMARK_NS, "ns").against(FREE);
    for case in &cases {
        study.rows(case, &METHODS, &table, &[(toggle, &study.name(case))]);
    }
    let columns = [
        (Metric::higher(PURGE_RATE, "GB/s"), "huge pages of handles purged, GB/s"),
        (Metric::higher(VRANGE_PURGE_RATE, "GB/s"), "marked by address, GB/s"),
        (Metric::higher(STRICT_PURGE_RATE, "GB/s"), "marked strictly, GB/s"),
        (Metric::lower(UNMARK_WAIT, "us"), "unmark that meets a purge, 99.9 %, us"),
    ];
    study.rows(&PURGE_CASE, &[PURGING], "purging", &columns);
    add_verdicts(&mut study);
    chunks::run(common, report)
}

fn measure_cases(common: &CommonOptions, study: &mut Study<'_, Case>, cases: &[Case]) -> Result<()> {
    let run_ms = common.quick_or_full((50, 300));
    let methods = common.wanted(&METHODS);
    study.measure_by_round((cases, common.rounds()), &methods, &[MARK_UNMARK_NS, FAULTS], |case, (name, way)| {
        let numbers = [("--threads", case.1), ("--range-kib", case.0), ("--run-ms", run_ms)];
        child::run_plain(name, child::command_words(&["__toggle", "--way", way], &numbers), TIME_LIMIT)
    })?;
    let numbers = [("--mib", PURGED_MIB), ("--run-ms", common.quick_or_full((500, 3000)))];
    let metrics = [PURGE_RATE, VRANGE_PURGE_RATE, STRICT_PURGE_RATE, UNMARK_WAIT];
    study.measure_by_round((&[PURGE_CASE], common.rounds()), &common.wanted(&[PURGING]), &metrics, |_, name| {
        child::run_plain(name, child::command_words(&["__purging"], &numbers), TIME_LIMIT)
    })
}

fn add_verdicts(study: &mut Study<'_, Case>) {
    let mut ratio = |target: &str, least, way: &'static str, case: Case, base: (&'static str, Case)| {
        let (own, base) = ((&case, way, MARK_UNMARK_NS), (&base.1, base.0, MARK_UNMARK_NS));
        study.judge_time_ratio(target, Bound::AtLeast(least), own, base);
    };
    for size in SIZES_KIB {
        for (count, least) in [(1, 100.0), (2, 400.0)] {
            let target =
                format!("mark + unmark of {size} KiB, {}, against {FREE} of {TARGET_KIB} KiB", threads_text(count));
            ratio(&target, least, HANDLES, (size, count), (FREE, (TARGET_KIB, count)));
        }
    }
    let target = "mark + unmark, 2 threads against 1, a thread";
    ratio(target, 1.0, HANDLES, (TARGET_KIB, 2), (HANDLES, (TARGET_KIB, 1)));
    for count in THREAD_COUNTS {
        let target = format!("vrange mark + unmark among 100,000, {}, against {FREE}", threads_text(count));
        ratio(&target, 5.0, VRANGE, (TARGET_KIB, count), (FREE, (TARGET_KIB, count)));
    }
    for (target, bound, unit, key) in [
        ("faults of unpurged round trips", Bound::AtMost(0.0), "", (&(2048, 1), HANDLES, FAULTS)),
        ("purge of huge pages, lazy", Bound::AtLeast(100.0), "GB/s", (&PURGE_CASE, PURGING, PURGE_RATE)),
        ("purge of huge pages, strict", Bound::AtLeast(50.0), "GB/s", (&PURGE_CASE, PURGING, STRICT_PURGE_RATE)),
        ("unmark that meets a purge, 99.9 %", Bound::AtMost(1000.0), "us", (&PURGE_CASE, PURGING, UNMARK_WAIT)),
    ] {
        study.judge_value(target, (bound, unit), key);
    }
}
