//! Cost to pin a range of a huge folio, compared with one reference count for each 4 KiB. Also the cost to split and
//! collapse a huge folio, compared with a copy of the folio.

use std::time::Duration;

use crate::child;
use crate::error::Result;
use crate::experiment::{CommonOptions, Metric, Progress, SampleTable, judge_time_ratio, report_rows, rotated};
use crate::report::{Bound, Report};

/// Subject: pins a range of a huge folio that may be split.
const SPLITTABLE: &str = "splittable";
/// Subject: pins a range of a huge folio that is never split.
const NEVER_SPLIT: &str = "never-split";
/// The baseline: one reference count for each 4 KiB of a huge page, as in the kernel's direct I/O until 2013.
const PER_PAGE: &str = "per-4-KiB";
/// Each kind of pin: its name in the report, and its name on the workload's command line.
const METHODS: [(&str, &str); 3] = [(SPLITTABLE, "splittable"), (NEVER_SPLIT, "never-split"), (PER_PAGE, "per-page")];

/// Subject: splits huge folios and collapses them again.
const SPLIT: &str = "split-collapse";
/// Subject: copies huge pages with `memcpy`.
const MEMCPY: &str = "memcpy-2-MiB";

/// Metric: nanoseconds in which one thread pins and unpins a range.
const PIN_NS: &str = "ns";
/// Metric: nanoseconds to split a huge folio.
const SPLIT_NS: &str = "split_ns";
/// Metric: nanoseconds to collapse a split folio.
const COLLAPSE_NS: &str = "collapse_ns";
/// Metric: nanoseconds to copy a huge page.
const COPY_NS: &str = "copy_ns";

/// Sizes of the pinned ranges.
const SIZES_KIB: [u64; 2] = [64, 1024];
/// Duration in milliseconds of a sample of pins and unpins (quick, full).
const PIN_SAMPLE_MS: (u64, u64) = (20, 200);
/// Duration in milliseconds of a sample of splits and collapses, or of copies (quick, full).
const SPLIT_SAMPLE_MS: (u64, u64) = (100, 1000);
/// Time limit of a workload process.
const TIME_LIMIT: Duration = Duration::from_secs(60);
/// Number of huge folios that are split and collapsed, or copied (quick, full). Together they are larger than the CPU
/// caches, because folios that wait for a collapse are usually not cached.
const FOLIO_COUNT: (u64, u64) = (16, 64);

/// Size of the pinned range in KiB, number of threads, and whether each thread has a folio of its own.
type Case = (u64, u64, bool);
/// The case under which splits, collapses and copies are reported. It has no range size and no number of threads.
const SPLIT_CASE: Case = (0, 0, false);

fn cases() -> impl Iterator<Item = Case> {
    SIZES_KIB.into_iter().flat_map(|kib| [(kib, 1, false), (kib, 2, false), (kib, 2, true)])
}

fn case_name((kib, threads, is_own): Case) -> String {
    let threads = match (threads, is_own) {
        (1, _) => "1 thread".to_owned(),
        (count, true) => format!("{count} threads, a folio each"),
        (count, false) => format!("{count} threads, one folio"),
    };
    format!("{kib} KiB, {threads}")
}

/// Measures the cost to pin, split and collapse huge folios. Returns the report.
///
/// # Errors
///
/// [`crate::error::Error::WrongAnswer`] if a reference leaked or bytes changed; [`crate::error::Error::CannotRun`] for
/// an unknown subject.
pub fn run(common: &CommonOptions) -> Result<Report> {
    let known: Vec<&str> = METHODS.iter().map(|(name, _)| *name).chain([SPLIT, MEMCPY]).collect();
    common.check_only(&known)?;
    let mut report = Report::new("refs", common.json);
    child::touch_beforehand(512)?;
    let samples = measure_cases(common)?;
    let table = format!("nanoseconds of a get and its put, half the spread, times {PER_PAGE}");
    let pin = Metric::lower(PIN_NS, "ns").against(PER_PAGE);
    for case in cases() {
        let name = case_name(case);
        let subjects = METHODS.map(|(subject, _)| subject);
        report_rows(&mut report, &samples, (&case, &name), &subjects, &table, &[(pin, &name)]);
    }
    for (subject, metric, column) in
        [(SPLIT, SPLIT_NS, "split, ns"), (SPLIT, COLLAPSE_NS, "collapse, ns"), (MEMCPY, COPY_NS, "copy, ns")]
    {
        let columns = [(Metric::lower(metric, "ns"), column)];
        report_rows(&mut report, &samples, (&SPLIT_CASE, "2 MiB"), &[subject], "a huge folio", &columns);
    }
    add_verdicts(&mut report, &samples);
    Ok(report)
}

fn measure_cases(common: &CommonOptions) -> Result<SampleTable<Case>> {
    let ways: Vec<_> = METHODS.into_iter().filter(|(name, _)| common.is_wanted(name)).collect();
    let mut changes = vec![(SPLIT, &[SPLIT_NS, COLLAPSE_NS][..], None), (MEMCPY, &[COPY_NS], Some("--copy"))];
    changes.retain(|(name, ..)| common.is_wanted(name));
    let progress = Progress::new(common.rounds() * (cases().count() * ways.len() + changes.len()));
    let mut samples = SampleTable::new();
    for round in 0..common.rounds() {
        for case in cases() {
            for &(subject, way) in rotated(&ways, round) {
                progress.step(subject);
                let run_ms = common.quick_or_full(PIN_SAMPLE_MS);
                let numbers = [("--range-kib", case.0), ("--threads", case.1), ("--run-ms", run_ms)];
                let words = ["__refs", "--way", way].into_iter().chain(case.2.then_some("--own"));
                let line = words.map(str::to_owned).chain(child::numeric_options(&numbers));
                samples.add_outcome(&case, subject, &[PIN_NS], &child::run_plain(subject, line, TIME_LIMIT)?);
            }
        }
        for &(subject, metrics, flag) in rotated(&changes, round) {
            progress.step(subject);
            let numbers =
                [("--folios", common.quick_or_full(FOLIO_COUNT)), ("--run-ms", common.quick_or_full(SPLIT_SAMPLE_MS))];
            let words = ["__change"].into_iter().chain(flag);
            let line = words.map(str::to_owned).chain(child::numeric_options(&numbers));
            samples.add_outcome(&SPLIT_CASE, subject, metrics, &child::run_plain(subject, line, TIME_LIMIT)?);
        }
    }
    Ok(samples)
}

fn add_verdicts(report: &mut Report, samples: &SampleTable<Case>) {
    let one = (1024, 1, false);
    for subject in [SPLITTABLE, NEVER_SPLIT] {
        let target = format!("get + put of 1 MiB, 1 thread: {subject}, as fast as {PER_PAGE}");
        let (own, base) = ((&one, subject, PIN_NS), (&one, PER_PAGE, PIN_NS));
        report.add_verdict(judge_time_ratio(samples, target, Bound::AtLeast(50.0), own, base));
    }
    for (target, bound, metric) in [
        ("split, as fast as a copy of 2 MiB", Bound::AtLeast(20.0), SPLIT_NS),
        ("collapse, time of a copy of 2 MiB", Bound::AtMost(1.3), COLLAPSE_NS),
    ] {
        let (own, base) = ((&SPLIT_CASE, SPLIT, metric), (&SPLIT_CASE, MEMCPY, COPY_NS));
        report.add_verdict(judge_time_ratio(samples, target, bound, own, base));
    }
}
