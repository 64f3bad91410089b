//! The speed that an allocator gains if it does not return memory to the kernel at once.
//!
//! Every peer allocator runs the [workload](crate::workload::ebizzy) twice: with its defaults, and with settings that
//! return memory at once. For each number of threads, Pagemill is compared with the fastest peer of both kinds,
//! measured in the same run.

use std::time::Duration;

use crate::child;
use crate::error::Result;
use crate::experiment::{self, CommonOptions, Metric, Named, SampleTable, Study, not_measured};
use crate::report::{Bound, Report, RowLabels, Series, Verdict};
use crate::stats::Better;
use crate::subject::{self, AvailableSubject, PAGEMILL, PAGEMILL_WITHOUT_AGING, Role};

/// MiB of memory that are touched before the first sample (quick, full): more than any allocator needs at 24 threads.
const WARM_MIB: (u64, u64) = (384, 1024);

/// Total duration of all workloads of a quick run, including [`OVERHEAD_MS`] for each. With this total, the run ends
/// well within 30 seconds.
const QUICK_BUDGET_MS: u64 = 22_000;

/// Time to start and end a workload, in addition to its measured time.
const OVERHEAD_MS: u64 = 25;

/// An allocator with at least this many page faults per record counts as returning memory. A record has 64 pages or
/// more. An allocator with fewer faults retains its memory despite its settings, so it is no baseline among the
/// allocators that return memory.
pub const MIN_FAULTS_IF_RETURNING: f64 = 1.0;

/// Value of `sizes` in a [`Case`]: all copied chunks have 256 KiB. The targets apply only to these cases.
const FIXED_SIZES: &str = "fixed";

/// Metric: records per second. For each record, the workload copies a chunk, searches the copy and frees it.
pub const RECORDS: &str = "records_per_second";
/// Metric: minor page faults per record (a copy and a search in it).
pub const FAULTS: &str = "faults_per_record";
/// Metric: number of failed allocations.
const FAILED_ALLOCATIONS: &str = "refused";

#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    #[command(flatten)]
    pub common: CommonOptions,
    /// Numbers of threads (default 1,2,4,8,12,24, with --quick 1,2,8,24)
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Vec<u16>,
    /// Run only the case in which a memory hog, a second process, shares a memory limit with the workload (the full run
    /// includes that case)
    #[arg(long)]
    pub hog: bool,
    /// Measure only the cost of watching limits without memory pressure, at 2 and 8 threads, and the wake-ups of an
    /// idle process
    #[arg(long, conflicts_with = "hog")]
    pub cost: bool,
}

/// A case of the experiment: sizes of the chunks that the workload copies (`fixed`: 256 KiB, `mixed`: 64 KiB to 1 MiB),
/// and number of threads.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Case {
    sizes: &'static str,
    threads: u16,
}

pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    if options.cost {
        return crate::cost::run(options, report);
    }
    let common = &options.common;
    let ready = report.with_gaps(subject::select_available(&common.only, |_| true)?);
    child::touch_beforehand(common.quick_or_full(WARM_MIB))?;
    if !options.hog {
        let cases = cases(options);
        let mut study = Study::new(report, case_name);
        measure_cases(&cases, &ready, common, &mut study)?;
        add_rows(&mut study, &cases, &ready);
        add_verdicts(&mut study, &cases, &ready);
    }
    if options.hog || !common.quick {
        crate::hog::run(common, &ready, report)?;
    }
    Ok(())
}

fn cases(options: &Options) -> Vec<Case> {
    let threads = match options.threads.as_slice() {
        [] => options.common.quick_or_full((vec![1, 2, 8, 24], vec![1, 2, 4, 8, 12, 24])),
        given => given.to_vec(),
    };
    let fixed = threads.iter().map(|&threads| Case { sizes: FIXED_SIZES, threads });
    let mixed = threads.iter().map(|&threads| Case { sizes: "mixed", threads });
    match options.common.quick {
        true => fixed.collect(),
        false => fixed.chain(mixed.filter(|case| matches!(case.threads, 2 | 24))).collect(),
    }
}

/// Returns the warm-up time and the measured time of a sample, in ms. A quick run divides a time budget among its
/// samples. A full run warms up for 250 ms and measures for one second.
fn durations(common: &CommonOptions, runs: usize) -> (u64, u64) {
    match common.quick {
        true => {
            let each = QUICK_BUDGET_MS / runs.max(1) as u64;
            let measured = each.saturating_sub(OVERHEAD_MS).clamp(40, 400);
            (measured / 4, measured * 3 / 4)
        }
        false => (250, 1000),
    }
}

fn measure_cases(
    cases: &[Case],
    ready: &[AvailableSubject],
    common: &CommonOptions,
    study: &mut Study<'_, Case>,
) -> Result<()> {
    let (warm_ms, measure_ms) = durations(common, cases.len() * ready.len() * common.rounds());
    let (warm_ms, measure_ms) = (warm_ms.to_string(), measure_ms.to_string());
    let metrics = [RECORDS, FAULTS, FAILED_ALLOCATIONS];
    study.measure_by_case((cases, common.rounds()), ready, &metrics, |case, subject| {
        let words = ["__ebizzy", "--threads", &case.threads.to_string(), "--sizes", case.sizes];
        let arguments = words.into_iter().chain(["--warm-ms", &warm_ms, "--measure-ms", &measure_ms]);
        child::run_under(subject, arguments, Duration::from_secs(60))
    })
}

fn sizes_name(case: &Case) -> &'static str {
    match case.sizes {
        FIXED_SIZES => "256 KiB",
        _ => "64 KiB - 1 MiB",
    }
}

fn case_name(case: &Case) -> String {
    format!("{}, {} threads", sizes_name(case), case.threads)
}

fn add_rows(study: &mut Study<'_, Case>, cases: &[Case], ready: &[AvailableSubject]) {
    let records = Metric::higher(RECORDS, "1/s").against("glibc");
    for case in cases {
        let sizes = sizes_name(case);
        let table = format!("ebizzy, copies of {sizes}: records/s, half the spread, times glibc");
        study.rows(case, ready, &table, &[(records, &format!("{} threads", case.threads))]);
        study.json_rows(case, ready, &[Metric::lower(FAULTS, "1")]);
        let (report, samples) = (&mut *study.report, &study.samples);
        for subject in ready {
            add_gap_for_refusals(report, samples, case, subject);
            add_gap_for_retaining(report, samples, case, subject);
        }
        for role in [Role::Default, Role::ReturningAtOnce] {
            add_row_against_best(report, samples, case, ready, role);
        }
    }
}

fn add_gap_for_refusals(report: &mut Report, samples: &SampleTable<Case>, case: &Case, subject: &AvailableSubject) {
    let refused = samples.get((case, subject.name(), FAILED_ALLOCATIONS));
    if refused.is_some_and(|series| series.values().iter().any(|&count| count > 0.0)) {
        let name = case_name(case);
        report.add_gap(format!("{}, {name}: malloc refused memory without a limit", subject.name()));
    }
}

/// Adds a sentence (gap) to the report if an allocator retains memory although its settings tell it to return memory at
/// once. Such an allocator is no baseline.
fn add_gap_for_retaining(report: &mut Report, samples: &SampleTable<Case>, case: &Case, ready: &AvailableSubject) {
    let faults = samples.get((case, ready.name(), FAULTS)).and_then(Series::median);
    let is_eager = ready.subject.role == Role::ReturningAtOnce;
    if is_eager && faults.is_some_and(|faults| faults < MIN_FAULTS_IF_RETURNING) {
        let sizes = sizes_name(case);
        report.add_gap(format!(
            "{} keeps freed copies of {sizes}, without a fault at reuse: no baseline for returning at once",
            ready.name()
        ));
    }
}

/// Adds a row to the report that compares Pagemill with the best peer of a role. Only the JSON output has this row; the
/// tables show a verdict instead.
fn add_row_against_best(
    report: &mut Report,
    samples: &SampleTable<Case>,
    case: &Case,
    ready: &[AvailableSubject],
    role: Role,
) {
    let pagemill = samples.get((case, PAGEMILL, RECORDS));
    let (Some(series), Some((_, best))) = (pagemill, best_peer(samples, case, ready, role)) else {
        return;
    };
    let entry = RowLabels {
        case: &case_name(case),
        subject: PAGEMILL,
        metric: RECORDS,
        unit: "1/s",
        baseline: Some((baseline_name(role), best, Better::Higher)),
        cell: None,
    };
    report.add_series(entry, series);
}

fn baseline_name(role: Role) -> &'static str {
    match role {
        Role::Default => "best-default",
        Role::ReturningAtOnce => "best-eager",
        Role::Pagemill | Role::Unwatched | Role::WithoutAging => PAGEMILL,
    }
}

/// Returns the best peer with default settings: the fastest over all numbers of threads, by geometric mean.
///
/// Choosing a peer for each number of threads would be biased: it would select the luckiest of several nearly equal
/// peers each time.
fn best_default_peer(samples: &SampleTable<Case>, ready: &[AvailableSubject]) -> Option<&'static str> {
    let mean = |ready: &&AvailableSubject| {
        let cases = samples.cases().into_iter().filter(|case| case.sizes == FIXED_SIZES);
        let medians = cases.filter_map(|case| samples.get((case, ready.name(), RECORDS))?.median());
        medians.map(f64::ln).sum::<f64>()
    };
    let defaults = ready.iter().filter(|ready| ready.subject.role == Role::Default);
    defaults.max_by(|a, b| mean(a).total_cmp(&mean(b))).map(Named::name)
}

/// Returns the fastest peer that has the given role and of which no round was killed or failed. For
/// [`Role::ReturningAtOnce`], the peer must also cause enough page faults to show that it returns memory.
fn best_peer<'a>(
    samples: &'a SampleTable<Case>,
    case: &Case,
    ready: &[AvailableSubject],
    role: Role,
) -> Option<(&'static str, &'a Series)> {
    let best_default_peer = if role == Role::Default { best_default_peer(samples, ready) } else { None };
    let of_role = ready.iter().filter(|ready| {
        ready.subject.role == role
            && best_default_peer
                .is_none_or(|best_default_peer| case.sizes != FIXED_SIZES || ready.name() == best_default_peer)
    });
    let candidates = of_role.filter(|ready| {
        let faults = samples.get((case, ready.name(), FAULTS)).and_then(Series::median);
        faults.is_some_and(|faults| role != Role::ReturningAtOnce || faults >= MIN_FAULTS_IF_RETURNING)
    });
    samples.best_survivor(case, candidates.map(Named::name), RECORDS)
}

fn add_verdicts(study: &mut Study<'_, Case>, cases: &[Case], ready: &[AvailableSubject]) {
    let (report, samples) = (&mut *study.report, &study.samples);
    let fixed: Vec<Case> = cases.iter().filter(|case| case.sizes == FIXED_SIZES).cloned().collect();
    for (threads, bound) in [(2, 15.0), (24, 5.0)] {
        let target = format!("ebizzy against the best returning at once, {threads} threads");
        let case = fixed.iter().find(|case| case.threads == threads);
        let verdict = case.map(|case| case_verdict(&target, bound, samples, case, ready, Role::ReturningAtOnce));
        let missing = || not_measured(target.clone(), Bound::AtLeast(bound), "x", "not in --threads");
        report.add_verdict(verdict.unwrap_or_else(missing));
    }
    let mut ratios = Vec::new();
    for case in &fixed {
        let target = format!("ebizzy against the best default, {} threads", case.threads);
        report.add_verdict(case_verdict(&target, 0.95, samples, case, ready, Role::Default));
        let pagemill = samples.get((case, PAGEMILL, RECORDS));
        if let (Some(series), Some((_, best))) = (pagemill, best_peer(samples, case, ready, Role::Default)) {
            ratios.push(series.ratios(best, Better::Higher));
        }
    }
    let is_whole = !fixed.is_empty() && ratios.len() == fixed.len();
    let (ratios, note) = if is_whole { (&ratios[..], "") } else { (&[][..], "a side is missing") };
    let target = "ebizzy against the best default, geometric mean over threads";
    let blank = not_measured(target, Bound::AtLeast(1.0), "x", note);
    report.add_verdict(blank.with_mean(ratios, baseline_name(Role::Default)));
    let aging_ratios = samples.ratios(&fixed, (PAGEMILL, PAGEMILL_WITHOUT_AGING), (RECORDS, Better::Higher));
    experiment::judge_aging_cost("ebizzy", &aging_ratios).into_iter().for_each(|verdict| report.add_verdict(verdict));
}

fn case_verdict(
    target: &str,
    bound: f64,
    samples: &SampleTable<Case>,
    case: &Case,
    ready: &[AvailableSubject],
    role: Role,
) -> Verdict {
    let bound = Bound::AtLeast(bound);
    let Some(series) = samples.get((case, PAGEMILL, RECORDS)) else {
        return not_measured(target, bound, "x", "pagemill was not run");
    };
    let Some((name, best)) = best_peer(samples, case, ready, role) else {
        return Verdict {
            has_lost_round: !series.survived(),
            ..not_measured(target, bound, "x", "no peer of this kind survived")
        };
    };
    let blank = not_measured(target, bound, "x", "");
    Verdict {
        note: describe_best(samples, case, name),
        ..blank.compared(Some(series), (baseline_name(role), Some(best)), Better::Higher)
    }
}

/// Describes the best peer by its name and, if it returns memory, its page faults per record.
fn describe_best(samples: &SampleTable<Case>, case: &Case, name: &'static str) -> String {
    let faults = samples.get((case, name, FAULTS)).and_then(Series::median);
    match faults.filter(|&faults| faults >= MIN_FAULTS_IF_RETURNING) {
        Some(faults) => format!("best: {name}, {faults:.0} faults a record"),
        None => format!("best: {name}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::child::Outcome;

    fn samples() -> (SampleTable<Case>, Case) {
        let case = Case { sizes: FIXED_SIZES, threads: 2 };
        let mut samples = SampleTable::new();
        let mut add = |subject, records: f64, faults: f64| {
            let line = serde_json::json!({ RECORDS: records, FAULTS: faults });
            samples.add_outcome(&case, subject, &[RECORDS, FAULTS], &Outcome::Measured(line));
        };
        add("glibc", 100.0, 0.0);
        add("glibc-eager", 5.0, 64.0);
        add("tcmalloc-eager", 90.0, 0.1);
        add(PAGEMILL, 110.0, 0.0);
        (samples, case)
    }

    /// tcmalloc-eager is faster than glibc-eager but has almost no page faults, so it does not return memory. The best
    /// peer that returns memory must be glibc-eager.
    #[test]
    fn best_eager_peer_must_return_memory() {
        let (samples, case) = samples();
        let (ready, _) = subject::select_available(&[], |_| true).expect("glibc is always there");

        let best = best_peer(&samples, &case, &ready, Role::ReturningAtOnce);

        assert_eq!(best.map(|(name, _)| name), Some("glibc-eager"));
    }

    /// Pagemill makes 110 records per second and the best peer 5. The verdict must have the ratio 22.
    #[test]
    fn verdict_is_ratio_to_best_peer() {
        let (samples, case) = samples();
        let (ready, _) = subject::select_available(&[], |_| true).expect("glibc is always there");

        let verdict = case_verdict("t", 15.0, &samples, &case, &ready, Role::ReturningAtOnce);

        assert!(verdict.estimate.is_some_and(|estimate| (estimate.value - 22.0).abs() < 1e-9));
        assert!(!verdict.has_lost_round);
    }
}
