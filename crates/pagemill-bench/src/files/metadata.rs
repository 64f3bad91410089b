//! What a controller that watches costs those who make, look at and remove many small files.

use std::time::Duration;

use super::Plan;
use super::mount::{Mounter, NEVER, STEERED, WITHIN_SIZE};
use crate::child;
use crate::error::Result;
use crate::experiment::{Metric, not_measured, report_row};
use crate::report::{Bound, Place, Report, Verdict};
use crate::stats::{self, Better};

const FILES: (usize, usize) = (10_000, 100_000);
const PER_DIRECTORY: u64 = 1000;
/// Differences of a few percent in samples of a second need more of them than other experiments.
const ROUNDS: (usize, usize) = (5, 15);

/// What is done to each file, and how much of the speed of plain tmpfs must be left.
const TARGETS: [(&str, &str, f64); 5] = [
    ("create", "create, write 100 B, close", 0.85),
    ("stat", "stat", 0.98),
    ("read", "open, read, close", 0.95),
    ("unlink", "unlink", 0.9),
    ("find", "find", 0.98),
];

/// Runs it and gives the report.
///
/// # Errors
///
/// [`crate::error::Error::CannotRun`] where mounting is not permitted.
pub fn run(options: &super::FileOptions) -> Result<Report> {
    let common = &options.common;
    let mounter = Mounter::new(options.dir.as_deref())?;
    let (ready, gaps) = mounter.select(&common.only, &[WITHIN_SIZE, NEVER, STEERED])?;
    let mut report = Report::new("metadata", common.json);
    gaps.into_iter().for_each(|gap| report.gap(gap));
    let files = common.pick(FILES.0, FILES.1);
    // A page of content for each file, and what the kernel keeps of it.
    child::warm(files as u64 * 6 / 1024 + 64)?;
    let case = format!("{files} files");
    let plan = Plan {
        cases: std::slice::from_ref(&case),
        rounds: common.samples.map_or(common.pick(ROUNDS.0, ROUNDS.1), usize::from),
        size_bytes: 2 << 30,
        metrics: &TARGETS.map(|(metric, ..)| metric),
        arguments: &|_| arguments(files),
        name: &|case| case.clone(),
        limit: Duration::from_secs(300),
    };
    let book = plan.measure(&mounter, &ready, &mut report)?;
    let table = format!("{case}, one thread: operations a second, half the spread, times {}", WITHIN_SIZE.name);
    for (name, column, bound) in TARGETS {
        for subject in &ready {
            let place = Some(Place { table: table.clone(), column: column.to_owned() });
            let metric = Metric { name, unit: "1/s", better: Better::Higher, baseline: Some(WITHIN_SIZE.name) };
            report_row(&mut report, &book, (&case, &case), subject.name, metric, place);
        }
        let target = format!("{column}, against {}", WITHIN_SIZE.name);
        let verdict = not_measured(target, Bound::AtLeast(bound), "x", "one side was not run");
        let get = |subject| book.get(&case, subject, name);
        report.verdict(match (get(STEERED.name), get(WITHIN_SIZE.name)) {
            (Some(series), Some(plain)) => Verdict {
                estimate: stats::estimate(&series.ratios(plain, Better::Higher)),
                baseline: WITHIN_SIZE.name.to_owned(),
                is_lost: !series.survived(),
                note: String::new(),
                ..verdict
            },
            _ => verdict,
        });
    }
    Ok(report)
}

fn arguments(files: usize) -> Vec<String> {
    let numbers = [("--files", files as u64), ("--per-directory", PER_DIRECTORY)];
    ["__metadata".to_owned()].into_iter().chain(child::numbers(&numbers)).collect()
}
