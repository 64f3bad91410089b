//! Cost to pin a range of a huge folio, compared with one reference count for each 4 KiB. Also the cost to split and
//! collapse a huge folio, compared with a copy of the folio.

use std::time::Duration;

use crate::child;
use crate::error::Result;
use crate::experiment::{CommonOptions, Metric, Study};
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

fn cases() -> Vec<Case> {
    SIZES_KIB.map(|kib| [(kib, 1, false), (kib, 2, false), (kib, 2, true)]).concat()
}

fn case_name(&(kib, threads, is_own): &Case) -> String {
    let threads = match (threads, is_own) {
        (0, _) => return "2 MiB".to_owned(),
        (1, _) => "1 thread".to_owned(),
        (count, true) => format!("{count} threads, a folio each"),
        (count, false) => format!("{count} threads, one folio"),
    };
    format!("{kib} KiB, {threads}")
}

/// Measures the cost to pin, split and collapse huge folios. Adds rows and verdicts to the report.
///
/// # Errors
///
/// [`crate::error::Error::WrongAnswer`] if a reference leaked or bytes changed; [`crate::error::Error::CannotRun`] for
/// an unknown subject.
pub fn run(common: &CommonOptions, report: &mut Report) -> Result<()> {
    let known: Vec<&str> = METHODS.iter().map(|(name, _)| *name).chain([SPLIT, MEMCPY]).collect();
    common.check_only(&known)?;
    child::touch_beforehand(512)?;
    let mut study = Study::new(report, case_name);
    measure_cases(common, &mut study)?;
    let table = format!("nanoseconds of a get and its put, half the spread, times {PER_PAGE}");
    let pin = Metric::lower(PIN_NS, "ns").against(PER_PAGE);
    for case in cases() {
        study.rows(&case, &METHODS, &table, &[(pin, &case_name(&case))]);
    }
    for (subject, metric, column) in
        [(SPLIT, SPLIT_NS, "split, ns"), (SPLIT, COLLAPSE_NS, "collapse, ns"), (MEMCPY, COPY_NS, "copy, ns")]
    {
        study.rows(&SPLIT_CASE, &[subject], "a huge folio", &[(Metric::lower(metric, "ns"), column)]);
    }
    add_verdicts(&mut study);
    Ok(())
}

fn measure_cases(common: &CommonOptions, study: &mut Study<'_, Case>) -> Result<()> {
    let run_ms = common.quick_or_full(PIN_SAMPLE_MS);
    study.measure_by_round((&cases(), common.rounds()), &common.wanted(&METHODS), &[PIN_NS], |case, (name, way)| {
        let numbers = [("--range-kib", case.0), ("--threads", case.1), ("--run-ms", run_ms)];
        let mut line = child::command_words(&["__refs", "--way", way], &numbers);
        line.extend(case.2.then(|| "--own".to_owned()));
        child::run_plain(name, line, TIME_LIMIT)
    })?;
    let changes = [(SPLIT, None), (MEMCPY, Some("--copy".to_owned()))];
    let numbers =
        [("--folios", common.quick_or_full(FOLIO_COUNT)), ("--run-ms", common.quick_or_full(SPLIT_SAMPLE_MS))];
    let metrics = [SPLIT_NS, COLLAPSE_NS, COPY_NS];
    study.measure_by_round((&[SPLIT_CASE], common.rounds()), &common.wanted(&changes), &metrics, |_, (name, flag)| {
        let line = child::command_words(&["__change"], &numbers).into_iter().chain(flag.clone());
        child::run_plain(name, line, TIME_LIMIT)
    })
}

fn add_verdicts(study: &mut Study<'_, Case>) {
    let one = (1024, 1, false);
    for subject in [SPLITTABLE, NEVER_SPLIT] {
        let target = format!("get + put of 1 MiB, 1 thread: {subject}, as fast as {PER_PAGE}");
        let (own, base) = ((&one, subject, PIN_NS), (&one, PER_PAGE, PIN_NS));
        study.judge_time_ratio(target, Bound::AtLeast(50.0), own, base);
    }
    for (target, bound, metric) in [
        ("split, as fast as a copy of 2 MiB", Bound::AtLeast(20.0), SPLIT_NS),
        ("collapse, time of a copy of 2 MiB", Bound::AtMost(1.3), COLLAPSE_NS),
    ] {
        let (own, base) = ((&SPLIT_CASE, SPLIT, metric), (&SPLIT_CASE, MEMCPY, COPY_NS));
        study.judge_time_ratio(target, bound, own, base);
    }
}
