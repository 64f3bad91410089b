//! Latency of a thread that allocates and frees objects. Meanwhile the objects that are left of a fragmented set are
//! compacted, or free memory is returned.

use super::Options;
use super::fragments::{self, SIZES};
use super::storage_subjects::{self, MOVERS, StorageSubject};
use crate::error::Result;
use crate::experiment::{Metric, Study, not_measured};
use crate::report::{Bound, Report, Verdict};

const BASELINE: &str = "glibc";

/// Metrics and the titles of their table columns: percentiles of the latency in microseconds. The first four metrics
/// are measured while the thread runs alone.
const TIMES: [(&str, &str); 8] = [
    ("quiet_p50_us", "alone, 50 %"),
    ("quiet_p99_us", "99 %"),
    ("quiet_p9999_us", "99.99 %"),
    ("quiet_longest_us", "longest"),
    ("p50_us", "meanwhile, 50 %"),
    ("p99_us", "meanwhile, 99 %"),
    (P9999_US, "meanwhile, 99.99 %"),
    ("longest_us", "meanwhile, longest"),
];
/// Metric: 99.99th percentile of the latency of an allocation or free while memory is returned.
const P9999_US: &str = "p9999_us";
/// Metric: number of allocations and frees that the measured thread made while memory was returned.
const CALL_COUNT: &str = "calls";
/// Metric: time in milliseconds to return the free memory.
const RETURN_MS: &str = "ms";

/// Maximum of [`P9999_US`], in microseconds.
const MAX_P9999_US: f64 = 1000.0;

/// Milliseconds for which the measured thread runs alone, before memory is returned (quick, full).
const QUIET_MS: (u64, u64) = (100, 500);

/// Size of the objects in bytes, and whether they are compacted in small steps, as the background thread does it.
type Case = (u64, bool);

fn case_name((size, steps): &Case) -> String {
    let how = if *steps { "by steps in the background" } else { "all at once" };
    format!("{size} B, {how}")
}

/// Measures the latency of allocations while memory is returned or objects are compacted; adds rows and verdicts to the
/// report.
///
/// # Errors
///
/// [`crate::error::Error::WrongAnswer`] if an object had wrong contents; [`crate::error::Error::CannotRun`] without
/// enough memory.
pub fn run_part(options: &Options, report: &mut Report) -> Result<()> {
    let subjects = storage_subjects::available_subjects(&options.common, report)?;
    if subjects.is_empty() {
        return Ok(());
    }
    fragments::prepare(options)?;
    let metrics: Vec<&str> = TIMES.iter().map(|(metric, _)| *metric).chain([RETURN_MS, CALL_COUNT]).collect();
    let (objects, quiet) = (fragments::objects(options), options.common.quick_or_full(QUIET_MS));
    let cases = SIZES.map(|size| [(size, false), (size, true)]).concat();
    let rounds = options.common.rounds();
    let order = cases.iter().flat_map(|case| (0..rounds).map(move |round| (case, round)));
    let runs = |case: &Case, subject: &StorageSubject, _| !case.1 || subject.can_move();
    let mut study = Study::new(report, case_name);
    study.measure(order, &subjects, &metrics, runs, |case, subject, _| {
        let numbers = [("--size", case.0), ("--objects", objects), ("--quiet-ms", quiet)];
        subject.sample("stalls", &numbers, case.1.then_some("--steps"))
    })?;
    let time = |metric| match metric {
        P9999_US => Metric::lower(metric, "us").against(BASELINE),
        _ => Metric::lower(metric, "us"),
    };
    let mut columns = TIMES.map(|(metric, column)| (time(metric), column)).to_vec();
    columns.extend([(Metric::lower(RETURN_MS, "ms"), "ms"), (Metric::lower(CALL_COUNT, "calls"), "calls")]);
    for case in &cases {
        study.rows(case, &subjects, &format!("microseconds of a call, {}", case_name(case)), &columns);
    }
    for (case, subject) in cases.iter().flat_map(|case| MOVERS.map(|subject| (case, subject))) {
        let target = format!("stall, {}, {subject}: 99.99 % of the calls", case_name(case));
        let blank = not_measured(target, Bound::AtMost(MAX_P9999_US), "us", "it was not run");
        let verdict = blank.measured(study.samples.get((case, subject, P9999_US)));
        let note = study.samples.get((case, subject, "quiet_p9999_us")).and_then(|alone| alone.median());
        let note = note.map_or(verdict.note.clone(), |alone| format!("alone {alone:.1} us"));
        study.report.add_verdict(Verdict { note, ..verdict });
    }
    Ok(())
}
