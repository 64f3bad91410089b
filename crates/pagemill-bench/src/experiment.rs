//! Code shared by all experiments: options, table of samples, verdicts, progress bar.
//!
//! An experiment compares *subjects*, such as allocators, in several *cases*, such as numbers of threads. Each *round*
//! has one sample of every subject in every case. A *metric* is one measured quantity. A *gap* is a measurement that
//! could not be made; the report lists gaps with their reasons.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use crate::child::Outcome;
use crate::error::Result;
use crate::report::{Bound, Report, RowLabels, Series, TableCell, Verdict};
use crate::stats::Better;
use crate::subject::PAGEMILL_WITHOUT_AGING;
pub use crate::subject::{Named, check_names};

#[derive(Clone, Debug, clap::Args)]
pub struct CommonOptions {
    /// Take fewer and shorter samples: seconds instead of minutes, and wider intervals
    #[arg(long)]
    pub quick: bool,
    /// Print one JSON object per line instead of tables
    #[arg(long)]
    pub json: bool,
    /// Number of samples of each subject in each case (default 5, with --quick 3)
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    pub samples: Option<u16>,
    /// Run only these subjects, separated by commas
    #[arg(long, value_delimiter = ',', value_name = "SUBJECT")]
    pub only: Vec<String>,
    /// Exit with status 1 if a target is missed
    #[arg(long)]
    pub strict: bool,
}

impl CommonOptions {
    pub fn rounds(&self) -> usize {
        self.rounds_or((3, 5))
    }

    /// Returns the number of rounds that `--samples` gives; without that option, the usual number (quick, full).
    pub fn rounds_or(&self, usual: (usize, usize)) -> usize {
        self.samples.map_or(self.quick_or_full(usual), usize::from)
    }

    /// Returns whether this subject is to be run: `--only` names it, or `--only` is absent.
    pub fn is_wanted(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| only == name)
    }

    /// Checks that each name in `--only` is one of the `known` subjects.
    ///
    /// # Errors
    ///
    /// [`Error::CannotRun`](crate::error::Error::CannotRun) with the list of known names if a name is unknown.
    pub fn check_only(&self, known: &[&str]) -> Result<()> {
        check_names("subject", &self.only, known)
    }

    /// Returns `quick` if the option `--quick` is given, otherwise `full`.
    pub fn quick_or_full<T>(&self, (quick, full): (T, T)) -> T {
        if self.quick { quick } else { full }
    }
}

/// All samples of a run: one series for each case (combination of settings), subject (allocator or program that is
/// measured) and metric.
#[derive(Debug)]
pub struct SampleTable<Case> {
    series: BTreeMap<(Case, &'static str, &'static str), Series>,
}

impl<Case: Ord + Clone> SampleTable<Case> {
    pub fn new() -> Self {
        Self { series: BTreeMap::new() }
    }

    /// Records the outcome of one round of one subject: either the value of each metric in the workload's JSON line,
    /// or, after a kill or a failure, a lost round for each metric.
    pub fn add_outcome(&mut self, case: &Case, subject: &'static str, metrics: &[&'static str], outcome: &Outcome) {
        for metric in metrics {
            let series = self.series.entry((case.clone(), subject, metric)).or_default();
            match outcome {
                Outcome::Measured(line) => series.rounds.push(line[*metric].as_f64()),
                Outcome::Killed => {
                    series.rounds.push(None);
                    series.killed += 1;
                }
                Outcome::Failed(why) => {
                    series.rounds.push(None);
                    series.failures.push(why.clone());
                }
            }
        }
    }

    /// Adds a round with one measured value to the series of a case, subject and metric.
    pub fn add_value(&mut self, case: &Case, subject: &'static str, metric: &'static str, value: f64) {
        let series = self.series.entry((case.clone(), subject, metric)).or_default();
        series.rounds.push(Some(value));
    }

    pub fn cases(&self) -> BTreeSet<&Case> {
        self.series.keys().map(|(case, _, _)| case).collect()
    }

    /// Returns the series of one case, subject and metric; none if that series was not measured.
    pub fn get(&self, (case, subject, metric): SeriesKey<'_, Case>) -> Option<&Series> {
        self.series.get(&(case.clone(), subject, metric))
    }

    /// Returns the sum of the values of a series; 0 if that series was not measured.
    pub fn sum(&self, key: SeriesKey<'_, Case>) -> f64 {
        self.get(key).map_or(0.0, |series| series.values().iter().sum())
    }

    /// Returns the series with the largest median of those of the subjects that have no lost round, and its subject.
    pub fn best_survivor(
        &self,
        case: &Case,
        subjects: impl Iterator<Item = &'static str>,
        metric: &'static str,
    ) -> Option<(&'static str, &Series)> {
        let all = subjects.filter_map(|subject| Some((subject, self.get((case, subject, metric))?)));
        let median = |series: &Series| series.median().unwrap_or_default();
        all.filter(|(_, series)| series.survived()).max_by(|(_, a), (_, b)| median(a).total_cmp(&median(b)))
    }
}

/// A measured quantity as the report shows it: name, unit, whether larger or smaller values are better, and the subject
/// that is the baseline of ratios.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    pub name: &'static str,
    unit: &'static str,
    better: Better,
    baseline: Option<&'static str>,
}

impl Metric {
    /// A metric of which larger values are better, without a baseline.
    pub const fn higher(name: &'static str, unit: &'static str) -> Self {
        Self { name, unit, better: Better::Higher, baseline: None }
    }

    /// A metric of which smaller values are better, without a baseline.
    pub const fn lower(name: &'static str, unit: &'static str) -> Self {
        Self { name, unit, better: Better::Lower, baseline: None }
    }

    /// Returns the metric with a subject that is the baseline of its ratios.
    pub const fn against(self, baseline: &'static str) -> Self {
        Self { baseline: Some(baseline), ..self }
    }
}

/// Returns the names of the metrics that have a column.
pub fn metric_names(columns: &[(Metric, &str)]) -> Vec<&'static str> {
    columns.iter().map(|(metric, _)| metric.name).collect()
}

/// Adds the rows of one case to the report: for each metric, the rows of all subjects. Each metric has a column of the
/// table with this title.
pub fn report_rows<Case: Ord + Clone>(
    report: &mut Report,
    samples: &SampleTable<Case>,
    case: (&Case, &str),
    subjects: &[impl Named],
    table: &str,
    columns: &[(Metric, &str)],
) {
    for (metric, column) in columns {
        for subject in subjects {
            let cell = TableCell { table: table.to_owned(), column: (*column).to_owned() };
            report_row(report, samples, case, subject.name(), *metric, Some(cell));
        }
    }
}

/// As [`report_rows`], but the rows appear in the JSON output only.
pub fn report_json_rows<Case: Ord + Clone>(
    report: &mut Report,
    samples: &SampleTable<Case>,
    case: (&Case, &str),
    subjects: &[impl Named],
    metrics: &[Metric],
) {
    for metric in metrics {
        subjects.iter().for_each(|subject| report_row(report, samples, case, subject.name(), *metric, None));
    }
}

/// Adds the row of one subject, case and metric to the report, if `samples` has such a series.
fn report_row<Case: Ord + Clone>(
    report: &mut Report,
    samples: &SampleTable<Case>,
    (case, case_name): (&Case, &str),
    subject: &'static str,
    metric: Metric,
    cell: Option<TableCell>,
) {
    let Some(series) = samples.get((case, subject, metric.name)) else {
        return;
    };
    let baseline = metric.baseline.filter(|&baseline| baseline != subject);
    let baseline = baseline.and_then(|name| Some((name, samples.get((case, name, metric.name))?, metric.better)));
    let entry = RowLabels { case: case_name, subject, metric: metric.name, unit: metric.unit, baseline, cell };
    report.add_series(entry, series);
}

/// Returns the samples of a run in the order in which they are taken: case by case, in each case round by round, and in
/// each round one sample of every subject. Advances a progress bar.
pub fn turns_by_case<'a, Case, Subject: Named>(
    cases: &'a [Case],
    rounds: usize,
    subjects: &'a [Subject],
    case_name: impl Fn(&Case) -> String,
) -> impl Iterator<Item = (&'a Case, &'a Subject)> {
    let order = cases.iter().flat_map(move |case| (0..rounds).map(move |round| (case, round)));
    turns(order, cases.len() * rounds, subjects, case_name)
}

/// As [`turns_by_case`], but round by round, and in each round case by case.
pub fn turns_by_round<'a, Case, Subject: Named>(
    cases: &'a [Case],
    rounds: usize,
    subjects: &'a [Subject],
    case_name: impl Fn(&Case) -> String,
) -> impl Iterator<Item = (&'a Case, &'a Subject)> {
    let order = (0..rounds).flat_map(move |round| cases.iter().map(move |case| (case, round)));
    turns(order, cases.len() * rounds, subjects, case_name)
}

fn turns<'a, Case: 'a, Subject: Named>(
    cases_and_rounds: impl Iterator<Item = (&'a Case, usize)>,
    len: usize,
    subjects: &'a [Subject],
    case_name: impl Fn(&Case) -> String,
) -> impl Iterator<Item = (&'a Case, &'a Subject)> {
    let progress = Progress::new(len * subjects.len());
    let turns =
        cases_and_rounds.flat_map(move |(case, round)| rotated(subjects, round).map(move |subject| (case, subject)));
    turns.inspect(move |(case, subject)| progress.step(&format!("{}, {}", case_name(case), subject.name())))
}

/// Returns all items in cyclic order. Each round begins with another item, so that no item always runs first.
pub fn rotated<T>(items: &[T], round: usize) -> impl Iterator<Item = &T> {
    let (before, from) = items.split_at(round % items.len().max(1));
    from.iter().chain(before)
}

/// Returns the number of threads as text, such as "1 thread" or "2 threads".
pub fn threads_text(count: u64) -> String {
    format!("{count} thread{}", if count == 1 { "" } else { "s" })
}

/// Returns a verdict without an estimate. `why` is the reason why the target was not measured.
pub fn not_measured(target: impl Into<String>, bound: Bound, unit: &'static str, why: &str) -> Verdict {
    Verdict {
        target: target.into(),
        baseline: String::new(),
        bound,
        unit,
        estimate: None,
        has_lost_round: false,
        note: why.to_owned(),
    }
}

/// Identifies one series of samples: its case, subject and metric.
pub type SeriesKey<'a, Case> = (&'a Case, &'static str, &'static str);

/// Compares the times of two series of samples. With [`Bound::AtLeast`], the estimate is the baseline's time divided by
/// the time of `own`. With [`Bound::AtMost`], the estimate is the time of `own` divided by the baseline's time.
pub fn judge_time_ratio<Case: Ord + Clone>(
    samples: &SampleTable<Case>,
    target: impl Into<String>,
    bound: Bound,
    own: SeriesKey<'_, Case>,
    base: SeriesKey<'_, Case>,
) -> Verdict {
    if matches!(bound, Bound::AtMost(_)) {
        return judge_quotient(samples, target, bound, own, base);
    }
    let blank = not_measured(target, bound, "x", "one side was not run");
    blank.compared(samples.get(own), (base.1, samples.get(base)), Better::Lower)
}

/// Judges the quotient of two series, `own` divided by `base`, for rates and for costs. The bound says whether a large
/// or a small quotient is good.
pub fn judge_quotient<Case: Ord + Clone>(
    samples: &SampleTable<Case>,
    target: impl Into<String>,
    bound: Bound,
    own: SeriesKey<'_, Case>,
    base: SeriesKey<'_, Case>,
) -> Verdict {
    let blank = not_measured(target, bound, "x", "one side was not run");
    blank.compared(samples.get(own), (base.1, samples.get(base)), Better::Higher)
}

/// Judges the median of one series against a fixed bound, without a baseline.
pub fn judge_value<Case: Ord + Clone>(
    samples: &SampleTable<Case>,
    target: impl Into<String>,
    (bound, unit): (Bound, &'static str),
    own: SeriesKey<'_, Case>,
) -> Verdict {
    not_measured(target, bound, unit, "it was not run").measured(samples.get(own))
}

/// Minimum speed of Pagemill that returns free memory by age (the default), relative to Pagemill that returns it only
/// on request and under pressure.
const MIN_SPEED_WITH_AGING: f64 = 0.98;

/// Judges the cost of returning memory by age, by the geometric mean over all cases in which both variants were run.
/// `ratios` has one list per case: for each round, the speed of Pagemill relative to the variant that does not return
/// memory by age. Returns none if `ratios` is empty.
pub fn judge_aging_cost(experiment: &str, ratios: &[Vec<f64>]) -> Option<Verdict> {
    let target = format!("{experiment}: balanced against keep, geometric mean of {} cases", ratios.len());
    let blank = not_measured(target, Bound::AtLeast(MIN_SPEED_WITH_AGING), "x", "");
    (!ratios.is_empty()).then(|| blank.with_mean(ratios, PAGEMILL_WITHOUT_AGING))
}

/// A progress bar on stderr. It stays hidden if stderr is not a terminal, and during the first two seconds.
#[derive(Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    pub fn new(steps: usize) -> Self {
        let bar = ProgressBar::new(steps as u64);
        let style = ProgressStyle::with_template("{elapsed_precise} {wide_bar} {pos}/{len} {msg} {eta}");
        if let Ok(style) = style {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_secs(2));
        Self(bar)
    }

    /// Advances the bar by one step and shows the step's name.
    pub fn step(&self, what: &str) {
        self.0.set_message(what.to_owned());
        self.0.inc(1);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::VerdictState;

    /// Pagemill that returns memory by age runs at 98.5 % of the speed of the variant that does not. The target must be
    /// reached. At 96 %, the target must be missed. Without any case there must be no verdict.
    #[test]
    fn aging_cost_is_judged_over_all_cases() {
        let state =
            |ratio: f64| judge_aging_cost("x", &[vec![ratio; 3], vec![ratio; 3]]).map(|verdict| verdict.state());

        assert_eq!((state(0.985), state(0.96)), (Some(VerdictState::Reached), Some(VerdictState::FallsShort)));
        assert!(judge_aging_cost("x", &[]).is_none());
    }
}
