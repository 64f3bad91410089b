//! The driver of all experiments: options, samples, rows, verdicts, progress bar.
//!
//! An experiment describes its cases, subjects, columns and targets, and how one sample is taken. A [`Study`] takes the
//! samples in turn, and adds the rows and the verdicts to the report.
//!
//! An experiment compares *subjects*, such as allocators, in several *cases*, such as numbers of threads. Each *round*
//! has one sample of every subject in every case. A *metric* is one measured quantity. A *gap* is a measurement that
//! could not be made; the report lists gaps with their reasons.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use crate::child::Outcome;
use crate::error::Result;
use crate::output::OutputOptions;
use crate::report::{Bound, Report, RowLabels, Series, TableCell, Verdict};
use crate::stats::Better;
use crate::subject::PAGEMILL_WITHOUT_AGING;
pub use crate::subject::{Named, check_names};

#[derive(Clone, Debug, clap::Args)]
pub struct CommonOptions {
    /// Take fewer and shorter samples: seconds instead of minutes, and wider intervals
    #[arg(long)]
    pub quick: bool,
    /// Number of samples of each subject in each case (default 5, with --quick 3)
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    pub samples: Option<u16>,
    /// Run only these subjects, separated by commas
    #[arg(long, value_delimiter = ',', value_name = "SUBJECT")]
    pub only: Vec<String>,
    /// Exit with status 1 if a target is missed
    #[arg(long)]
    pub strict: bool,
    #[command(flatten)]
    pub output: OutputOptions,
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

    /// Returns those of the subjects that are to be run.
    pub fn wanted<'a, Subject: Named>(&self, subjects: &'a [Subject]) -> Vec<&'a Subject> {
        subjects.iter().filter(|subject| self.is_wanted(subject.name())).collect()
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

/// Metric of a sample: 1 if all its processes survived, otherwise 0. A lost sample has the value 0.
pub const SURVIVED: &str = "survived";

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
                Outcome::Killed | Outcome::Failed(_) if *metric == SURVIVED => series.rounds.push(Some(0.0)),
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

    /// For each case in which both subjects were measured, returns how many times better `own` is than `base` in each
    /// round.
    pub fn ratios(
        &self,
        cases: &[Case],
        (own, base): (&'static str, &'static str),
        (metric, better): (&'static str, Better),
    ) -> Vec<Vec<f64>> {
        let both = |case| Some((self.get((case, own, metric))?, self.get((case, base, metric))?));
        cases.iter().filter_map(both).map(|(own, base)| own.ratios(base, better)).collect()
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

/// A comparison of *subjects* in several *cases*: its samples, and the report to which it adds rows and verdicts.
#[derive(Debug)]
pub struct Study<'a, Case> {
    pub report: &'a mut Report,
    pub samples: SampleTable<Case>,
    name: fn(&Case) -> String,
}

impl<'a, Case: Ord + Clone> Study<'a, Case> {
    /// Makes a comparison without samples. `name` returns the name of a case in the report.
    pub fn new(report: &'a mut Report, name: fn(&Case) -> String) -> Self {
        Self { report, samples: SampleTable::new(), name }
    }

    /// Returns the name of a case in the report.
    pub fn name(&self, case: &Case) -> String {
        (self.name)(case)
    }

    /// Takes samples case by case, in each case round by round, and in each round one sample of every subject. Records
    /// the values of `metrics`, and advances a progress bar. A sample that could not be taken is reported as a gap.
    ///
    /// # Errors
    ///
    /// Every error of `sample` that is not a gap.
    pub fn measure_by_case<Subject: Named>(
        &mut self,
        (cases, rounds): (&[Case], usize),
        subjects: &[Subject],
        metrics: &[&'static str],
        mut sample: impl FnMut(&Case, &Subject) -> Result<Outcome>,
    ) -> Result<()> {
        let order = cases.iter().flat_map(|case| (0..rounds).map(move |round| (case, round)));
        self.measure(order, subjects, metrics, |_, _, _| true, |case, subject, _| sample(case, subject))
    }

    /// As [`Self::measure_by_case`], but round by round, and in each round case by case.
    pub fn measure_by_round<Subject: Named>(
        &mut self,
        (cases, rounds): (&[Case], usize),
        subjects: &[Subject],
        metrics: &[&'static str],
        mut sample: impl FnMut(&Case, &Subject) -> Result<Outcome>,
    ) -> Result<()> {
        let order = (0..rounds).flat_map(|round| cases.iter().map(move |case| (case, round)));
        self.measure(order, subjects, metrics, |_, _, _| true, |case, subject, _| sample(case, subject))
    }

    /// Takes samples of the given cases and rounds, in this order. `runs` returns whether a subject runs in a case and a
    /// round. Otherwise as [`Self::measure_by_case`].
    ///
    /// # Errors
    ///
    /// As [`Self::measure_by_case`].
    pub fn measure<'case, Subject: Named>(
        &mut self,
        order: impl Iterator<Item = (&'case Case, usize)>,
        subjects: &[Subject],
        metrics: &[&'static str],
        runs: impl Fn(&Case, &Subject, usize) -> bool,
        mut sample: impl FnMut(&Case, &Subject, usize) -> Result<Outcome>,
    ) -> Result<()>
    where
        Case: 'case,
    {
        let mut turns = Vec::new();
        for (case, round) in order {
            let fitting: Vec<&Subject> = subjects.iter().filter(|subject| runs(case, subject, round)).collect();
            turns.extend(rotated(&fitting, round).map(|subject| (case, *subject, round)));
        }
        let progress = Progress::new(turns.len());
        for (case, subject, round) in turns {
            progress.step(&format!("{}, {}", self.name(case), subject.name()));
            if let Some(outcome) = self.report.unless_gap(sample(case, subject, round))? {
                self.samples.add_outcome(case, subject.name(), metrics, &outcome);
            }
        }
        Ok(())
    }

    /// Adds the rows of one case to the report: for each metric, the rows of all subjects that were measured. Each
    /// metric has a column of the table with this title.
    pub fn rows(&mut self, case: &Case, subjects: &[impl Named], table: &str, columns: &[(Metric, &str)]) {
        self.rows_as(case, &self.name(case), subjects, table, columns);
    }

    /// As [`Self::rows`], but with another name of the case.
    pub fn rows_as(
        &mut self,
        case: &Case,
        name: &str,
        subjects: &[impl Named],
        table: &str,
        columns: &[(Metric, &str)],
    ) {
        for (metric, column) in columns {
            let cell = TableCell { table: table.to_owned(), column: (*column).to_owned() };
            subjects.iter().for_each(|subject| self.row((case, name), subject.name(), *metric, Some(cell.clone())));
        }
    }

    /// As [`Self::rows`], but the rows appear in the JSON output only.
    pub fn json_rows(&mut self, case: &Case, subjects: &[impl Named], metrics: &[Metric]) {
        let name = self.name(case);
        for metric in metrics {
            subjects.iter().for_each(|subject| self.row((case, &name), subject.name(), *metric, None));
        }
    }

    fn row(&mut self, (case, name): (&Case, &str), subject: &'static str, metric: Metric, cell: Option<TableCell>) {
        let get = |subject| self.samples.get((case, subject, metric.name));
        let Some(series) = get(subject) else { return };
        let baseline = metric.baseline.filter(|&baseline| baseline != subject);
        let baseline = baseline.and_then(|name| Some((name, get(name)?, metric.better)));
        let labels = RowLabels { case: name, subject, metric: metric.name, unit: metric.unit, baseline, cell };
        self.report.add_series(labels, series);
    }

    /// Adds a verdict on the quotient of two series, `own` divided by `base`, for rates and for costs. The bound says
    /// whether a large or a small quotient is good.
    pub fn judge_quotient(
        &mut self,
        target: impl Into<String>,
        bound: Bound,
        own: SeriesKey<'_, Case>,
        base: SeriesKey<'_, Case>,
    ) {
        self.judge_ratio(target, bound, (own, base), Better::Higher);
    }

    /// Adds a verdict on the times of two series. With [`Bound::AtLeast`], the estimate is the baseline's time divided
    /// by the time of `own`. With [`Bound::AtMost`], the estimate is the time of `own` divided by the baseline's time.
    pub fn judge_time_ratio(
        &mut self,
        target: impl Into<String>,
        bound: Bound,
        own: SeriesKey<'_, Case>,
        base: SeriesKey<'_, Case>,
    ) {
        let better = if matches!(bound, Bound::AtMost(_)) { Better::Higher } else { Better::Lower };
        self.judge_ratio(target, bound, (own, base), better);
    }

    fn judge_ratio(
        &mut self,
        target: impl Into<String>,
        bound: Bound,
        (own, base): (SeriesKey<'_, Case>, SeriesKey<'_, Case>),
        better: Better,
    ) {
        let blank = not_measured(target, bound, "x", "one side was not run");
        let base = (base.1, self.samples.get(base));
        self.report.add_verdict(blank.compared(self.samples.get(own), base, better));
    }

    /// Adds a verdict on the median of one series against a fixed bound, without a baseline.
    pub fn judge_value(
        &mut self,
        target: impl Into<String>,
        (bound, unit): (Bound, &'static str),
        own: SeriesKey<'_, Case>,
    ) {
        let blank = not_measured(target, bound, unit, "it was not run");
        self.report.add_verdict(blank.measured(self.samples.get(own)));
    }
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

/// Title of the progress bars: the name of the experiment that runs.
static PROGRESS_TITLE: Mutex<&str> = Mutex::new("");

/// Sets the title of the progress bars that are made later.
pub fn set_progress_title(title: &'static str) {
    *PROGRESS_TITLE.lock().unwrap_or_else(PoisonError::into_inner) = title;
}

/// A progress bar on stderr. It stays hidden if stderr is not a terminal, and during the first two seconds.
#[derive(Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    pub fn new(steps: usize) -> Self {
        let bar = ProgressBar::new(steps as u64);
        let style = ProgressStyle::with_template("{prefix:<10} {elapsed_precise} {wide_bar} {pos}/{len} {msg} {eta}");
        if let Ok(style) = style {
            bar.set_style(style);
        }
        bar.set_prefix(*PROGRESS_TITLE.lock().unwrap_or_else(PoisonError::into_inner));
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
