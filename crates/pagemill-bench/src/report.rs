//! The report of a run: one JSON object per line or aligned tables, then the verdicts on the targets.
//!
//! In JSON mode the report prints a row as soon as the row is complete; otherwise it collects rows for the tables at
//! the end. A *gap* is a measurement that could not be made. In JSON mode gaps go to stderr, so that stdout has rows
//! only.

mod table;

use std::fmt::Write as _;

use serde::Serialize;

use crate::error::{Error, Result};
use crate::stats::{self, Better, Estimate};
pub use table::{TableView, format_number, unique_names};

/// One result: the median of a metric over the rounds of a run, and its spread. `ratio` says how many times better than
/// `baseline` the subject is in the same run, so a larger ratio is better for every metric.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub experiment: &'static str,
    pub case: String,
    pub subject: String,
    pub metric: &'static str,
    pub value: f64,
    pub unit: &'static str,
    pub baseline: Option<String>,
    pub ratio: Option<f64>,
    pub spread: f64,
    pub samples: usize,
    /// The row's cell in the tables. A row without a cell appears in the JSON output only.
    #[serde(skip)]
    pub cell: Option<TableCell>,
}

impl Row {
    /// Returns the row as a JSON object.
    pub fn json(&self) -> String {
        // A row consists of strings and numbers, so its serialization cannot fail.
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// Where the tables show the value of a row: the title of the table, and the title of the column. The value stands in
/// the line of the row's subject.
#[derive(Clone, Debug)]
pub struct TableCell {
    pub table: String,
    pub column: String,
}

/// The samples of one metric of one subject in one case. A round that was killed or failed is `None`.
#[derive(Clone, Debug, Default)]
pub struct Series {
    /// One value per round; `None` for a round that was killed or failed.
    pub rounds: Vec<Option<f64>>,
    /// Number of rounds that SIGKILL ended.
    pub killed: usize,
    /// Messages of the rounds that failed otherwise.
    pub failures: Vec<String>,
}

impl Series {
    pub fn values(&self) -> Vec<f64> {
        self.rounds.iter().copied().flatten().collect()
    }

    pub fn median(&self) -> Option<f64> {
        stats::median(&self.values())
    }

    /// Returns whether every round was measured, so that none was killed and none failed.
    pub fn survived(&self) -> bool {
        !self.rounds.is_empty() && self.rounds.iter().all(Option::is_some)
    }

    /// Returns the ratio to the baseline for each round in which both series have a value. A ratio above 1 means better
    /// than the baseline.
    pub fn ratios(&self, baseline: &Self, better: Better) -> Vec<f64> {
        stats::ratios(&self.rounds, &baseline.rounds, better)
    }
}

/// A verdict can say that a target was missed only with at least this many samples. With fewer, the 95 % interval is
/// too unreliable.
const MIN_SAMPLES_FOR_MISS: usize = 3;

/// The bound that an estimate must meet to reach its target.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

/// A target, and the estimate that is compared with its bound.
#[derive(Clone, Debug)]
pub struct Verdict {
    pub target: String,
    pub baseline: String,
    pub bound: Bound,
    pub unit: &'static str,
    /// The measured estimate. If nothing could be measured, it is none, and `note` has the reason.
    pub estimate: Option<Estimate>,
    /// Whether a round was killed or failed. If so, the target counts as missed, whatever the estimate is.
    pub has_lost_round: bool,
    pub note: String,
}

/// The result of a verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VerdictState {
    Reached,
    /// The median misses the bound, but part of the 95 % interval meets it. The result is undecided.
    WithinDoubt,
    /// The whole 95 % interval misses the bound, or a round was lost.
    FallsShort,
    NotMeasured,
}

impl Verdict {
    /// Compares the estimate with the bound. The target counts as missed only if the whole 95 % interval misses the
    /// bound, or if a round was lost.
    pub fn state(&self) -> VerdictState {
        if self.has_lost_round {
            return VerdictState::FallsShort;
        }
        let Some(Estimate { value, low, high, samples }) = self.estimate else {
            return VerdictState::NotMeasured;
        };
        let (is_reached, is_short) = match self.bound {
            Bound::AtLeast(bound) => (value >= bound, high < bound),
            Bound::AtMost(bound) => (value <= bound, low > bound),
        };
        let is_short = is_short && samples >= MIN_SAMPLES_FOR_MISS;
        match (is_reached, is_short) {
            (true, _) => VerdictState::Reached,
            (false, true) => VerdictState::FallsShort,
            (false, false) => VerdictState::WithinDoubt,
        }
    }

    /// Fills in the estimate from the values of one series, and clears the note. Without a series, changes nothing.
    /// Returns the verdict.
    pub fn measured(self, own: Option<&Series>) -> Self {
        let Some(own) = own else { return self };
        let estimate = stats::estimate_median(&own.values());
        Self { estimate, has_lost_round: !own.survived(), note: String::new(), ..self }
    }

    /// Fills in the estimate from the ratios of `own` to a named baseline, and clears the note. If one of both series
    /// is missing, changes nothing. Returns the verdict.
    pub fn compared(self, own: Option<&Series>, (name, base): (&str, Option<&Series>), better: Better) -> Self {
        let (Some(own), Some(base)) = (own, base) else { return self };
        let estimate = stats::estimate_median(&own.ratios(base, better));
        let (baseline, has_lost_round) = (name.to_owned(), !own.survived());
        Self { estimate, baseline, has_lost_round, note: String::new(), ..self }
    }

    /// Fills in the estimate of the geometric mean over all cases. `ratios` has one list per case: for each round, the
    /// ratio to the named baseline. Returns the verdict.
    pub fn with_mean(self, ratios: &[Vec<f64>], baseline: &str) -> Self {
        let estimate = stats::estimate_median(&stats::geometric_means(ratios));
        Self { estimate, baseline: baseline.to_owned(), ..self }
    }

    /// Returns the target with its bound and its unit.
    pub fn target_text(&self) -> String {
        let bound = match self.bound {
            Bound::AtLeast(bound) => format!(">= {bound}"),
            Bound::AtMost(bound) => format!("<= {bound}"),
        };
        format!("{} {bound} {}", self.target, self.unit)
    }

    /// Returns the estimate with its interval, and the note; `-` for a target that was not measured.
    pub fn result_text(&self) -> String {
        // A bound between 0.98 and 1 is printed with three digits, so that a value just below it does not look equal.
        let digits = match self.bound {
            Bound::AtLeast(bound) | Bound::AtMost(bound) if (0.98..1.0).contains(&bound) => 3,
            _ => 2,
        };
        let mut text = match self.estimate {
            Some(Estimate { value, low, high, .. }) => {
                format!("{value:.digits$} {} [{low:.digits$}, {high:.digits$}]", self.unit)
            }
            None => "-".to_owned(),
        };
        if !self.note.is_empty() {
            let _ = write!(text, " ({})", self.note);
        }
        text
    }

    fn format_line(&self) -> String {
        format!("{:<13} {}: {}", self.state().name(), self.target_text(), self.result_text())
    }
}

impl VerdictState {
    pub fn name(self) -> &'static str {
        match self {
            Self::Reached => "reached",
            Self::WithinDoubt => "within doubt",
            Self::FallsShort => "FALLS SHORT",
            Self::NotMeasured => "not measured",
        }
    }
}

/// Metric: number of rounds that SIGKILL ended, mostly for lack of memory.
const KILLED_ROUNDS: &str = "killed";
/// Metric: number of rounds that failed for another reason.
const FAILED_ROUNDS: &str = "failed";

/// Metric of a verdict's row: 0 if the target was missed, otherwise 1.
pub const TARGET_KEPT: &str = "target_kept";

/// Start of the names of subjects that are published results of an original experiment.
pub const ORIGINAL_SUBJECTS: &str = "original";

/// Published results of an original experiment, with more points than this run has cases. Only the report page shows
/// them, in the plot of the table.
#[derive(Clone, Debug)]
pub struct OriginalCurve {
    pub table: String,
    pub subject: String,
    /// Number of threads, and ratio to the original's own baseline.
    pub points: Vec<(f64, f64)>,
}

/// Collects the rows, gaps, notes and verdicts of a run, and prints them.
#[derive(Debug)]
pub struct Report {
    experiment: &'static str,
    is_json: bool,
    rows: Vec<Row>,
    gaps: Vec<String>,
    notes: Vec<String>,
    conclusion: Option<String>,
    verdicts: Vec<Verdict>,
    /// Titles of the tables that are transposed: one line per column name, one column per subject.
    transposed: Vec<String>,
    curves: Vec<OriginalCurve>,
    first_line: Option<String>,
}

impl Report {
    pub fn new(experiment: &'static str, is_json: bool) -> Self {
        let (rows, gaps, notes, conclusion, verdicts, transposed, curves, first_line) = Default::default();
        Self { experiment, is_json, rows, gaps, notes, conclusion, verdicts, transposed, curves, first_line }
    }

    /// Adds a row with the median and the spread of a series. Also adds rows that count the killed and the failed
    /// rounds of the series, if there are any.
    pub fn add_series(&mut self, entry: RowLabels<'_>, series: &Series) {
        let baseline = entry.baseline;
        let ratio = baseline.and_then(|(_, baseline, better)| stats::median(&series.ratios(baseline, better)));
        if let Some(value) = series.median() {
            let values = series.values();
            self.add_row(Row {
                case: entry.case.to_owned(),
                subject: entry.subject.to_owned(),
                baseline: baseline.map(|(name, ..)| name.to_owned()),
                ratio,
                spread: stats::spread(&values),
                samples: values.len(),
                cell: entry.cell.clone(),
                ..self.single_value(entry.metric, value, entry.unit)
            });
        }
        self.add_lost_rounds(&entry, series);
    }

    fn add_lost_rounds(&mut self, entry: &RowLabels<'_>, series: &Series) {
        let lost = [(KILLED_ROUNDS, series.killed), (FAILED_ROUNDS, series.failures.len())];
        for (metric, count) in lost.into_iter().filter(|&(_, count)| count > 0) {
            // A lost round has no value for any metric. Its loss is reported once, with the first metric of the subject
            // and case.
            let is_it = |row: &Row| row.metric == metric && row.subject == entry.subject && row.case == entry.case;
            if self.rows.iter().any(is_it) {
                continue;
            }
            self.add_row(Row {
                case: entry.case.to_owned(),
                subject: entry.subject.to_owned(),
                samples: series.rounds.len(),
                cell: entry.cell.clone(),
                ..self.single_value(metric, count as f64, "samples")
            });
        }
        if let Some(why) = series.failures.first() {
            self.add_gap(format!("{} {}: {why}", entry.subject, entry.case));
        }
    }

    /// Returns a row of this experiment with one value. Its case and subject are still empty.
    pub fn single_value(&self, metric: &'static str, value: f64, unit: &'static str) -> Row {
        let (case, subject, baseline, ratio, cell) = Default::default();
        Row {
            experiment: self.experiment,
            case,
            subject,
            metric,
            value,
            unit,
            baseline,
            ratio,
            spread: 0.0,
            samples: 1,
            cell,
        }
    }

    /// Sets the line that JSON mode prints before the first row. If nothing is measured, it is not printed.
    pub fn set_first_line(&mut self, line: Option<String>) {
        self.first_line = line;
    }

    /// Returns the line before the first row, if it was not printed yet.
    pub fn take_first_line(&mut self) -> Option<String> {
        self.first_line.take()
    }

    /// Adds a complete row; in JSON mode, prints it.
    pub fn add_row(&mut self, row: Row) {
        if self.is_json {
            self.first_line.take().into_iter().for_each(|line| println!("{line}"));
            println!("{}", row.json());
        }
        self.rows.push(row);
    }

    /// Adds a sentence about a measurement that could not be made (a gap), unless the same sentence was added before.
    pub fn add_gap(&mut self, what: impl Into<String>) {
        let what = what.into();
        if !self.gaps.contains(&what) {
            self.gaps.push(what);
        }
    }

    /// Adds the gaps that come with a selection of subjects. Returns the selection.
    pub fn with_gaps<T>(&mut self, (selected, gaps): (T, Vec<String>)) -> T {
        gaps.into_iter().for_each(|gap| self.add_gap(gap));
        selected
    }

    /// Returns the result of a measurement. If it could not be made, adds the gap and returns none.
    ///
    /// # Errors
    ///
    /// Every other error.
    pub fn unless_gap<T>(&mut self, result: Result<T>) -> Result<Option<T>> {
        match result {
            Ok(measured) => Ok(Some(measured)),
            Err(Error::Gap(what)) => {
                self.add_gap(what);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Adds a remark, which is printed at the end of the report.
    pub fn add_note(&mut self, what: impl Into<String>) {
        self.notes.push(what.into());
    }

    /// Sets the recommendation that follows from the rows, which is printed behind the verdicts.
    pub fn set_conclusion(&mut self, sentence: impl Into<String>) {
        self.conclusion = Some(sentence.into());
    }

    /// Transposes the table with this title: one line per column name, one column per subject. This suits tables of few
    /// subjects with many columns.
    pub fn transpose_table(&mut self, table: impl Into<String>) {
        self.transposed.push(table.into());
    }

    /// Adds a verdict. In JSON mode, also prints a row with 0 if the target was missed, otherwise 1.
    pub fn add_verdict(&mut self, verdict: Verdict) {
        if self.is_json
            && let Some(estimate) = verdict.estimate
        {
            let is_reached = verdict.state() != VerdictState::FallsShort;
            self.add_row(Row {
                case: format!("target: {}", verdict.target),
                subject: crate::subject::PAGEMILL.to_owned(),
                baseline: Some(verdict.baseline.clone()),
                ratio: (verdict.unit == "x").then_some(estimate.value),
                ..self.single_value(TARGET_KEPT, f64::from(u8::from(is_reached)), "bool")
            });
        }
        self.verdicts.push(verdict);
    }

    /// Adds published results that only the report page shows.
    pub fn add_original_curve(&mut self, curve: OriginalCurve) {
        self.curves.push(curve);
    }

    pub fn experiment(&self) -> &'static str {
        self.experiment
    }

    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    pub fn gaps(&self) -> &[String] {
        &self.gaps
    }

    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    pub fn conclusion(&self) -> Option<&str> {
        self.conclusion.as_deref()
    }

    pub fn verdicts(&self) -> &[Verdict] {
        &self.verdicts
    }

    /// Returns the numbers of verdicts that are reached, within doubt, short, and not measured.
    pub fn verdict_counts(&self) -> [usize; 4] {
        let states =
            [VerdictState::Reached, VerdictState::WithinDoubt, VerdictState::FallsShort, VerdictState::NotMeasured];
        states.map(|state| self.verdicts.iter().filter(|verdict| verdict.state() == state).count())
    }

    pub fn curves(&self) -> &[OriginalCurve] {
        &self.curves
    }

    /// Returns whether any verdict says that its target was missed.
    pub fn has_missed_target(&self) -> bool {
        self.verdicts.iter().any(|verdict| verdict.state() == VerdictState::FallsShort)
    }

    /// Returns whether anything was measured. A killed workload counts as a result, a failed one does not.
    pub fn has_results(&self) -> bool {
        self.rows.iter().any(|row| row.metric != FAILED_ROUNDS)
    }

    /// Prints the tables, gaps, notes, verdicts and the recommendation. In JSON mode only the rows go to stdout, the rest
    /// to stderr.
    pub fn print(&self) {
        let mut text = String::new();
        if !self.is_json {
            TableView::all(self).iter().for_each(|table| text += &table.text());
        }
        for gap in &self.gaps {
            let _ = writeln!(text, "gap: {gap}");
        }
        for note in &self.notes {
            let _ = writeln!(text, "note: {note}");
        }
        for verdict in &self.verdicts {
            let _ = writeln!(text, "{}", verdict.format_line());
        }
        if let Some(conclusion) = &self.conclusion {
            let _ = writeln!(text, "recommendation: {conclusion}");
        }
        match self.is_json {
            true => eprint!("{text}"),
            false => print!("{text}"),
        }
    }
}

/// Labels of a series in the report: all parts of its row that are not computed from samples.
#[derive(Clone, Debug)]
pub struct RowLabels<'a> {
    pub case: &'a str,
    pub subject: &'a str,
    pub metric: &'static str,
    pub unit: &'static str,
    pub baseline: Option<(&'a str, &'a Series, Better)>,
    pub cell: Option<TableCell>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(bound: Bound, value: f64, low: f64, high: f64) -> Verdict {
        Verdict {
            target: String::new(),
            baseline: String::new(),
            bound,
            unit: "x",
            estimate: Some(Estimate { value, low, high, samples: 5 }),
            has_lost_round: false,
            note: String::new(),
        }
    }

    /// A serialized row must have exactly the ten keys that other programs parse, in this order, and no table cell.
    #[test]
    fn row_serializes_with_its_ten_keys() {
        let row = Row {
            experiment: "ebizzy",
            case: "256 KiB, 2 threads".into(),
            subject: "pagemill".into(),
            metric: "records_per_second",
            value: 1.5,
            unit: "1/s",
            baseline: None,
            ratio: None,
            spread: 0.25,
            samples: 5,
            cell: Some(TableCell { table: "t".into(), column: "c".into() }),
        };

        let text = serde_json::to_string(&row).expect("a row serializes");

        assert_eq!(
            text,
            r#"{"experiment":"ebizzy","case":"256 KiB, 2 threads","subject":"pagemill","metric":"records_per_second","value":1.5,"unit":"1/s","baseline":null,"ratio":null,"spread":0.25,"samples":5}"#
        );
    }

    /// The verdict must be that the target was missed if the whole confidence interval of the estimate misses the
    /// bound, or if a round was lost. With a single sample, the result must stay undecided.
    #[test]
    fn target_is_missed_only_if_whole_interval_misses_bound() {
        let state = |value, low, high| verdict(Bound::AtLeast(15.0), value, low, high).state();
        assert_eq!(state(16.0, 14.0, 18.0), VerdictState::Reached);
        assert_eq!(state(14.0, 13.0, 15.5), VerdictState::WithinDoubt);
        assert_eq!(state(14.0, 13.0, 14.9), VerdictState::FallsShort);

        let mut hasty = verdict(Bound::AtLeast(15.0), 14.0, 14.0, 14.0);
        hasty.estimate = hasty.estimate.map(|estimate| Estimate { samples: 1, ..estimate });
        assert_eq!(hasty.state(), VerdictState::WithinDoubt);

        let lost = Verdict { has_lost_round: true, ..verdict(Bound::AtMost(1.0), 0.5, 0.4, 0.6) };
        assert_eq!(lost.state(), VerdictState::FallsShort);
        let unknown = Verdict { estimate: None, ..verdict(Bound::AtMost(1.0), 0.0, 0.0, 0.0) };
        assert_eq!(unknown.state(), VerdictState::NotMeasured);
    }

    /// In a table, all results of one subject must be in one line, and the number of kills must follow the measured
    /// value. In a transposed table, the subject must be a column.
    #[test]
    fn table_cells_align_by_subject_and_column() {
        let mut report = Report::new("ebizzy", false);
        let series = Series { rounds: vec![Some(10.0), None], killed: 1, failures: Vec::new() };
        let cell = Some(TableCell { table: "with a hog".into(), column: "2 threads".into() });
        report.add_series(
            RowLabels { case: "hog", subject: "tcmalloc", metric: "r", unit: "1/s", baseline: None, cell },
            &series,
        );

        let text_of = |report: &Report| TableView::all(report).iter().map(TableView::text).collect::<String>();
        let text = text_of(&report);
        report.transpose_table("with a hog");
        let transposed = text_of(&report);

        assert!(text.contains("10.0, killed 1/2") && text.contains("| tcmalloc |"), "{text}");
        assert!(transposed.contains("| 2 threads | 10.0, killed 1/2"), "{transposed}");
    }
}
