//! `--compare OLD.json`: differences between the rows of an earlier run and those of this run.
//!
//! A row has *changed* if its two medians differ by more than the larger of both spreads, so the difference is larger
//! than the range of the samples of either run. Rows of one sample have no spread. Of them only verdicts count as
//! changed; the others are counted.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::machine::{Difference, MACHINE_KIND, Machine};
use crate::report::{Row, TARGET_KEPT, format_number};

/// A row of an earlier run.
#[derive(Clone, Debug, Deserialize)]
struct OldRow {
    experiment: String,
    case: String,
    subject: String,
    metric: String,
    value: f64,
    unit: String,
    spread: f64,
    samples: usize,
}

/// What `--json` printed in an earlier run.
#[derive(Clone, Debug)]
pub struct OldRun {
    path: String,
    machine: Option<Value>,
    rows: Vec<OldRow>,
}

/// Names of a row: experiment, case, subject and metric.
type Key<'a> = [&'a str; 4];

/// A row whose medians differ by more than the larger spread of both runs, or whose unit differs. A row of which one run
/// has a single sample counts in `without_spread` instead, unless it is a verdict or its unit differs.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    pub key: [String; 4],
    pub unit: String,
    pub old: f64,
    pub new: f64,
}

/// The differences between two runs.
#[derive(Clone, Debug, Default)]
pub struct Comparison {
    /// The file of the earlier run.
    pub path: String,
    /// Whether the file names the machine of the earlier run.
    pub names_machine: bool,
    pub machine: Vec<Difference>,
    pub changes: Vec<Change>,
    /// Names of the rows that only the earlier run has.
    pub only_old: Vec<[String; 4]>,
    /// Names of the rows that only this run has.
    pub only_new: Vec<[String; 4]>,
    /// Number of rows whose difference is within the spread.
    pub unchanged: usize,
    /// Number of rows with different values, of which one run has a single sample and therefore no spread.
    pub without_spread: usize,
}

impl OldRun {
    /// Reads a file that `--json` or `--report` wrote.
    ///
    /// # Errors
    ///
    /// [`Error::CannotRun`] with the path, and with the number of the line if a line is no row, if the file cannot be
    /// read or has no row.
    pub fn read(path: &Path) -> Result<Self> {
        let path_text = path.display().to_string();
        let refused = |why: String| Error::CannotRun(format!("--compare {path_text}: {why}"));
        let text = fs::read_to_string(path).map_err(|cause| refused(cause.to_string()))?;
        let (mut machine, mut rows) = (None, Vec::new());
        for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
            let bad = |cause: serde_json::Error| refused(format!("line {number} is no row of `--json`: {cause}"));
            let value: Value = serde_json::from_str(line).map_err(bad)?;
            match value["kind"].as_str() {
                Some(MACHINE_KIND) => machine = Some(value),
                // Differences that an earlier comparison printed.
                Some(_) => {}
                None => rows.push(serde_json::from_value(value).map_err(bad)?),
            }
        }
        match rows.is_empty() {
            true => Err(refused("it has no row of `--json`".to_owned())),
            false => Ok(Self { path: path_text, machine, rows }),
        }
    }

    /// Compares this earlier run with the rows of a new run.
    pub fn compare<'a>(&self, machine: &Machine, rows: impl Iterator<Item = &'a Row>) -> Comparison {
        let mut comparison = Comparison {
            path: self.path.clone(),
            names_machine: self.machine.is_some(),
            machine: self.machine.as_ref().map(|old| machine.differences(old)).unwrap_or_default(),
            ..Comparison::default()
        };
        // A row can occur several times with the same values and different baselines. The first counts.
        let mut old_rows: BTreeMap<Key<'_>, &OldRow> = BTreeMap::new();
        for row in &self.rows {
            old_rows.entry([&row.experiment, &row.case, &row.subject, &row.metric]).or_insert(row);
        }
        let mut seen = BTreeSet::new();
        for row in rows {
            let key = [row.experiment, &row.case, &row.subject, row.metric];
            if !seen.insert(key) {
                continue;
            }
            match old_rows.get(&key) {
                Some(old) => comparison.add(key, old, row),
                None => comparison.only_new.push(key.map(str::to_owned)),
            }
        }
        for row in &self.rows {
            let key = [row.experiment.as_str(), &row.case, &row.subject, &row.metric];
            if seen.insert(key) {
                comparison.only_old.push(key.map(str::to_owned));
            }
        }
        comparison
    }
}

impl Comparison {
    fn add(&mut self, key: Key<'_>, old: &OldRow, new: &Row) {
        let is_single = old.samples.min(new.samples) < 2;
        let difference = (new.value - old.value).abs();
        let largest_spread = (old.spread * old.value).abs().max((new.spread * new.value).abs());
        // Old units differ from new ones only if the metric has changed its meaning, so the row has changed.
        let is_same_unit = old.unit == new.unit;
        let is_changed = !is_same_unit || difference > largest_spread;
        match is_changed {
            true if is_single && is_same_unit && new.metric != TARGET_KEPT => self.without_spread += 1,
            true => self.changes.push(Change {
                key: key.map(str::to_owned),
                unit: new.unit.to_owned(),
                old: old.value,
                new: new.value,
            }),
            false => self.unchanged += 1,
        }
    }

    /// Returns the differences as JSON rows of the kinds `machine-difference`, `change`, `missing` and `comparison`.
    pub fn json_rows(&self) -> Vec<Value> {
        let machine = self.machine.iter().map(
            |Difference { fact, old, new }| json!({"kind": "machine-difference", "fact": fact, "old": old, "new": new}),
        );
        let changes = self.changes.iter().map(|change| {
            let [experiment, case, subject, metric] = &change.key;
            json!({"kind": "change", "experiment": experiment, "case": case, "subject": subject, "metric": metric,
                "unit": change.unit, "old": change.old, "new": change.new, "ratio": change.ratio()})
        });
        let missing = [("old", &self.only_new), ("new", &self.only_old)];
        let missing = missing.into_iter().flat_map(|(run, keys)| {
            keys.iter().map(move |[experiment, case, subject, metric]| {
                json!({"kind": "missing", "run": run, "experiment": experiment, "case": case, "subject": subject,
                    "metric": metric})
            })
        });
        let sums = json!({"kind": "comparison", "file": self.path, "names_machine": self.names_machine,
            "changed": self.changes.len(), "unchanged": self.unchanged, "without_spread": self.without_spread,
            "only_old": self.only_old.len(), "only_new": self.only_new.len()});
        machine.chain(changes).chain(missing).chain([sums]).collect()
    }

    /// Returns the differences as sentences and a table.
    pub fn text(&self) -> String {
        let mut text = format!("compared with {}: {}\n", self.path, self.summary());
        for sentence in self.machine_sentences() {
            let _ = writeln!(text, "machine differs: {sentence}");
        }
        let mut table = comfy_table::Table::new();
        table.load_style(comfy_table::presets::ASCII_MARKDOWN);
        table.set_header(["experiment", "case", "subject", "metric", "old", "new", "new / old"]);
        for change in &self.changes {
            let [experiment, case, subject, metric] = &change.key;
            let values = [change.old, change.new].map(|value| format!("{} {}", format_number(value), change.unit));
            let [old, new] = &values;
            table.add_row([experiment, case, subject, metric, old, new, &change.ratio_text()]);
        }
        if !self.changes.is_empty() {
            let _ = writeln!(text, "{table}");
        }
        for line in self.missing_lines() {
            let _ = writeln!(text, "{line}");
        }
        text
    }

    /// Returns the numbers of rows by their difference.
    pub fn summary(&self) -> String {
        let Self { changes, unchanged, without_spread, .. } = self;
        let mut text = format!("{} rows changed beyond the spread, {unchanged} did not", changes.len());
        if *without_spread > 0 {
            let _ = write!(text, "; {without_spread} differ, but have one sample and so no spread (use --samples 3)");
        }
        text
    }

    /// Returns a sentence for each difference of the machines, or that the earlier machine is unknown.
    pub fn machine_sentences(&self) -> Vec<String> {
        let all = self.machine.iter().map(|Difference { fact, old, new }| format!("{fact} was {old}, is {new}"));
        let unknown = (!self.names_machine).then(|| "the old file does not name its machine".to_owned());
        unknown.into_iter().chain(all).collect()
    }

    /// Returns a line for each case and subject that has rows in one run only.
    pub fn missing_lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for (run, keys) in [("old", &self.only_old), ("new", &self.only_new)] {
            let mut metrics: Vec<([&str; 3], usize)> = Vec::new();
            for [experiment, case, subject, _] in keys {
                let group = [experiment.as_str(), case, subject];
                match metrics.iter_mut().find(|(known, _)| *known == group) {
                    Some((_, count)) => *count += 1,
                    None => metrics.push((group, 1)),
                }
            }
            lines.extend(metrics.into_iter().map(|([experiment, case, subject], count)| {
                let plural = if count == 1 { "" } else { "s" };
                format!("only in the {run} run: {experiment}, {case}, {subject}: {count} metric{plural}")
            }));
        }
        lines
    }
}

impl Change {
    /// Returns the new value divided by the old one; none if the old one is zero.
    pub fn ratio(&self) -> Option<f64> {
        Some(self.new / self.old).filter(|ratio| ratio.is_finite())
    }

    pub fn ratio_text(&self) -> String {
        self.ratio().map_or("-".to_owned(), |ratio| format!("{ratio:.2}"))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;
    use crate::report::Report;

    fn row(subject: &str, value: f64, spread: f64, samples: usize) -> Row {
        let of_report = Report::new("ebizzy", false).single_value("rate", value, "1/s");
        Row { case: "2 threads".to_owned(), subject: subject.to_owned(), spread, samples, ..of_report }
    }

    fn file_of(lines: &[String]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
        lines.iter().for_each(|line| writeln!(file, "{line}").expect("written"));
        file
    }

    fn old_of(rows: &[Row], machine: Option<Value>) -> OldRun {
        let machine = machine.into_iter().map(|row| row.to_string());
        let rows = rows.iter().map(|row| serde_json::to_string(row).expect("a row serializes"));
        OldRun::read(file_of(&machine.chain(rows).collect::<Vec<_>>()).path()).expect("these are rows")
    }

    /// A difference must count only if it exceeds the spread of both runs. A difference of rows of a single sample must
    /// only be counted, unless it is a verdict.
    #[test]
    fn changes_exceed_both_spreads() {
        let machine = Machine::read();
        let verdict = |value| Row { metric: TARGET_KEPT, ..row("verdict", value, 0.0, 1) };
        let old = [row("a", 100.0, 0.1, 3), row("b", 100.0, 0.3, 3), row("c", 100.0, 0.0, 1), verdict(1.0)];
        let new = [row("a", 111.0, 0.05, 3), row("b", 111.0, 0.05, 3), row("c", 111.0, 0.0, 3), verdict(0.0)];

        let found = old_of(&old, Some(machine.json_row())).compare(&machine, new.iter());

        let subjects: Vec<&str> = found.changes.iter().map(|change| change.key[2].as_str()).collect();
        assert_eq!(subjects, ["a", "verdict"]);
        assert_eq!((found.unchanged, found.without_spread), (1, 1));
        assert_eq!(found.changes[0].ratio_text(), "1.11");
        assert!(found.names_machine && found.machine.is_empty() && found.missing_lines().is_empty());
        assert!(found.text().contains("| ebizzy     | 2 threads | a "), "{}", found.text());
    }

    /// Rows of one run only, and other machines, must be named. The JSON rows must have all of it, and a file that has
    /// such rows must be read as if it had none.
    #[test]
    fn missing_rows_and_other_machines_are_named() {
        let machine = Machine::read();
        let mut other = machine.json_row();
        other["kernel"] = json!("2.6.39");
        let twice = [row("gone", 1.0, 0.0, 3), row("both", 1.0, 0.0, 3), row("both", 1.0, 0.0, 3)];

        let found =
            old_of(&twice, Some(other)).compare(&machine, [row("both", 1.0, 0.0, 3), row("fresh", 1.0, 0.0, 3)].iter());

        assert_eq!((found.unchanged, found.changes.len()), (1, 0));
        let text = found.text();
        for words in
            ["kernel was 2.6.39", "old run: ebizzy, 2 threads, gone: 1 metric", "new run: ebizzy, 2 threads, fresh"]
        {
            assert!(text.contains(words), "{words}: {text}");
        }
        let kinds: Vec<Value> = found.json_rows().iter().map(|row| row["kind"].clone()).collect();
        assert_eq!(kinds, ["machine-difference", "missing", "missing", "comparison"]);
        let mut lines: Vec<String> = found.json_rows().iter().map(Value::to_string).collect();
        lines.push(serde_json::to_string(&twice[0]).expect("a row serializes"));
        let again = OldRun::read(file_of(&lines).path()).expect("it has a row");
        assert_eq!((again.rows.len(), again.machine.is_none()), (1, true));
        assert!(again.compare(&machine, [].iter()).text().contains("does not name its machine"));
    }

    /// A file that is missing, empty, or has a line that is no row must be refused with its path and the line's number.
    #[test]
    fn bad_files_are_refused() {
        let refusal = |path: &Path| OldRun::read(path).expect_err("it is refused").to_string();

        assert!(refusal(Path::new("/nowhere/old.json")).contains("/nowhere/old.json: No such file"));
        assert!(refusal(file_of(&[]).path()).contains("has no row"));
        let good = serde_json::to_string(&row("a", 1.0, 0.0, 1)).expect("a row serializes");
        for bad in ["machine: Linux", "{\"experiment\":\"ebizzy\"}"] {
            let why = refusal(file_of(&[good.clone(), String::new(), bad.to_owned()]).path());
            assert!(why.contains("line 3 is no row"), "{why}");
        }
    }
}
