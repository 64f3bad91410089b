//! Code shared by all experiments: options, samples, progress.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use crate::child::Outcome;
use crate::error::{Error, Result};
use crate::report::{Bound, Entry, Place, Report, Series, Verdict};
use crate::stats::{self, Better};
use crate::subject::KEEPING;

/// Options of every experiment.
#[derive(Clone, Debug, clap::Args)]
pub struct Common {
    /// Fewer and shorter samples: seconds instead of minutes, and wider intervals
    #[arg(long)]
    pub quick: bool,
    /// Print one JSON object per line instead of tables
    #[arg(long)]
    pub json: bool,
    /// Interleaved samples of each case (default 5, with --quick 3)
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    pub samples: Option<u16>,
    /// Only these subjects, separated by commas
    #[arg(long, value_delimiter = ',', value_name = "SUBJECT")]
    pub only: Vec<String>,
    /// Exit with status 1 if a target is missed
    #[arg(long)]
    pub strict: bool,
}

impl Common {
    /// The number of rounds to run.
    pub fn rounds(&self) -> usize {
        let usual = if self.quick { 3 } else { 5 };
        self.samples.map_or(usual, usize::from)
    }

    /// Whether `--only` names this subject, or is not given.
    pub fn is_wanted(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| only == name)
    }

    /// Rejects names in `--only` that match no subject.
    ///
    /// # Errors
    ///
    /// [`Error::CannotRun`] with the list of known names.
    pub fn check_only(&self, known: &[&str]) -> Result<()> {
        match self.only.iter().find(|name| !known.contains(&name.as_str())) {
            Some(name) => Err(Error::CannotRun(format!("no subject {name}; there are {}", known.join(", ")))),
            None => Ok(()),
        }
    }

    /// The quick value or the full one.
    pub fn pick<T>(&self, quick: T, full: T) -> T {
        if self.quick { quick } else { full }
    }
}

/// All samples of a run, by case, subject and metric.
#[derive(Debug)]
pub struct Book<Case> {
    series: BTreeMap<(Case, &'static str, &'static str), Series>,
}

impl<Case: Ord + Clone> Book<Case> {
    /// Makes an empty book.
    pub fn new() -> Self {
        Self { series: BTreeMap::new() }
    }

    /// Records one round of one subject: a value for each metric in the workload's JSON line.
    pub fn enter(&mut self, case: &Case, subject: &'static str, metrics: &[&'static str], outcome: &Outcome) {
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

    /// Records one value.
    pub fn enter_value(&mut self, case: &Case, subject: &'static str, metric: &'static str, value: f64) {
        let series = self.series.entry((case.clone(), subject, metric)).or_default();
        series.rounds.push(Some(value));
    }

    /// The cases that have samples.
    pub fn cases(&self) -> BTreeSet<&Case> {
        self.series.keys().map(|(case, _, _)| case).collect()
    }

    /// The samples of one subject, if it was measured.
    pub fn get(&self, case: &Case, subject: &'static str, metric: &'static str) -> Option<&Series> {
        self.series.get(&(case.clone(), subject, metric))
    }
}

/// How a metric is reported: its unit, and its baseline.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    pub name: &'static str,
    pub unit: &'static str,
    pub better: Better,
    pub baseline: Option<&'static str>,
}

/// Adds the row of one subject, case and metric to the report, if it was measured.
pub fn report_row<Case: Ord + Clone>(
    report: &mut Report,
    book: &Book<Case>,
    (case, case_name): (&Case, &str),
    subject: &'static str,
    metric: Metric,
    place: Option<Place>,
) {
    let Some(series) = book.get(case, subject, metric.name) else {
        return;
    };
    let baseline = metric.baseline.filter(|&baseline| baseline != subject);
    let baseline = baseline.and_then(|name| Some((name, book.get(case, name, metric.name)?, metric.better)));
    let entry = Entry { case: case_name, subject, metric: metric.name, unit: metric.unit, baseline, place };
    report.series(entry, series);
}

/// A verdict without an estimate, and the reason.
pub fn not_measured(target: impl Into<String>, bound: Bound, unit: &'static str, why: &str) -> Verdict {
    Verdict {
        target: target.into(),
        baseline: String::new(),
        bound,
        unit,
        estimate: None,
        is_lost: false,
        note: why.to_owned(),
    }
}

/// One side of a comparison.
#[derive(Debug)]
pub struct Side<'a, Case> {
    pub case: &'a Case,
    pub subject: &'static str,
    pub metric: &'static str,
}

/// A verdict on two times: at least this many times as fast as the baseline, or at most this many times its time.
pub fn compare_times<Case: Ord + Clone>(
    book: &Book<Case>,
    target: impl Into<String>,
    bound: Bound,
    own: Side<'_, Case>,
    base: Side<'_, Case>,
) -> Verdict {
    let blank = not_measured(target, bound, "x", "one side was not run");
    let get = |side: &Side<'_, Case>| book.get(side.case, side.subject, side.metric);
    let (Some(series), Some(baseline)) = (get(&own), get(&base)) else { return blank };
    let better = match bound {
        Bound::AtLeast(_) => Better::Lower,
        Bound::AtMost(_) => Better::Higher,
    };
    Verdict {
        estimate: stats::estimate(&series.ratios(baseline, better)),
        baseline: base.subject.to_owned(),
        is_lost: !series.survived(),
        note: String::new(),
        ..blank
    }
}

/// A verdict on a value of one subject alone.
pub fn judge<Case: Ord + Clone>(
    book: &Book<Case>,
    target: impl Into<String>,
    (bound, unit): (Bound, &'static str),
    own: Side<'_, Case>,
) -> Verdict {
    let blank = not_measured(target, bound, unit, "it was not run");
    match book.get(own.case, own.subject, own.metric) {
        Some(series) => Verdict {
            estimate: stats::estimate(&series.values()),
            is_lost: !series.survived(),
            note: String::new(),
            ..blank
        },
        None => blank,
    }
}

/// Pagemill that returns memory by age must reach at least this fraction of the speed of Pagemill that keeps it.
const AGAINST_KEEPING: f64 = 0.98;

/// A verdict on the cost of returning memory by age, over all cases in which both variants were run; none without such
/// a case. `ratios`: for each case, the speed relative to the variant that keeps its memory.
pub fn against_keeping(experiment: &str, ratios: &[Vec<f64>]) -> Option<Verdict> {
    let target = format!("{experiment}: balanced against keep, geometric mean of {} cases", ratios.len());
    (!ratios.is_empty()).then(|| Verdict {
        estimate: stats::estimate(&stats::geometric_means(ratios)),
        baseline: KEEPING.to_owned(),
        ..not_measured(target, Bound::AtLeast(AGAINST_KEEPING), "x", "")
    })
}

/// A progress bar on stderr; hidden if stderr is no terminal, and in the first two seconds.
#[derive(Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    /// Makes a bar of so many steps.
    pub fn new(steps: usize) -> Self {
        let bar = ProgressBar::new(steps as u64);
        let style = ProgressStyle::with_template("{elapsed_precise} {wide_bar} {pos}/{len} {msg} {eta}");
        if let Ok(style) = style {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_secs(2));
        Self(bar)
    }

    /// Begins a step and shows its name.
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
    use crate::report::State;

    /// 2 % slower is allowed, 4 % is too much; without cases there is no verdict.
    #[test]
    fn keeping_is_compared_over_all_cases() {
        let state = |ratio: f64| against_keeping("x", &[vec![ratio; 3], vec![ratio; 3]]).map(|verdict| verdict.state());

        assert_eq!((state(0.985), state(0.96)), (Some(State::Reached), Some(State::FallsShort)));
        assert!(against_keeping("x", &[]).is_none());
    }
}
