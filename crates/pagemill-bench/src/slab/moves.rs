//! A reader and a writer during background defragmentation, compared with the same reader and writer without it.

use std::time::Duration;

use super::{BY_HANDLE, BY_OWNER, Options};
use crate::child::{self, Outcome, Running};
use crate::error::Result;
use crate::experiment::{Book, Common, Metric, Progress, not_measured, report_row};
use crate::report::{Bound, Place, Report, Verdict};
use crate::stats::{self, Better};
use crate::subject;

/// Kinds of caches, by their names in the report and on the workload's command line.
pub const KINDS: [&str; 2] = [BY_HANDLE, BY_OWNER];

const READS: &str = "reads_per_second";
const WRITES: &str = "writes_per_second";
const MOVES: &str = "moves_per_second";
const MOVED: &str = "moved";

/// Whether the objects are moved in the background.
type Case = bool;
const CASES: [Case; 2] = [false, true];

/// Number of objects. They have 38 MB, more than the CPU caches hold.
const OBJECTS: u64 = 200_000;
const RUN_MS: (u64, u64) = (200, 1000);
/// Number of samples (quick, full). A bound of 10 % needs more samples than other experiments.
const ROUNDS: (usize, usize) = (3, 9);

fn name(case: Case) -> &'static str {
    if case { "defragmented meanwhile" } else { "left alone" }
}

/// Measures this part; adds rows and verdicts to the report.
///
/// # Errors
///
/// [`crate::error::Error::WrongAnswer`] if an object, or a write to an object, was lost.
pub fn run_part(options: &Options, report: &mut Report) -> Result<()> {
    let kinds: Vec<&'static str> = KINDS.into_iter().filter(|kind| options.common.is_wanted(kind)).collect();
    let book = measure(&options.common, &kinds)?;
    for case in CASES {
        for kind in &kinds {
            for (metric, what) in [(READS, "reads"), (WRITES, "writes"), (MOVES, "moves"), (MOVED, "moved in all")] {
                let table = "a reader and a writer of 200,000 objects of 192 B, nine of ten of a group gone: a second, half the spread";
                let column = format!("{what}, {}", name(case));
                let place =
                    (case || [READS, WRITES].contains(&metric)).then(|| Place { table: table.to_owned(), column });
                let unit = if metric == MOVED { "1" } else { "1/s" };
                let metric = Metric { name: metric, unit, better: Better::Higher, baseline: None };
                report_row(report, &book, (&case, name(case)), kind, metric, place);
            }
        }
    }
    for kind in kinds {
        report.verdict(verdict(&book, kind, READS));
        report.verdict(verdict(&book, kind, WRITES));
    }
    Ok(())
}

fn measure(common: &Common, kinds: &[&'static str]) -> Result<Book<Case>> {
    let rounds = common.samples.map_or(common.pick(ROUNDS.0, ROUNDS.1), usize::from);
    let progress = Progress::new(rounds * CASES.len() * kinds.len());
    let mut book = Book::new();
    for round in 0..rounds {
        for kind in kinds {
            for index in 0..CASES.len() {
                let case = CASES[(index + round) % CASES.len()];
                progress.step(&format!("{kind}, {}", name(case)));
                let outcome = sample(kind, case, common.pick(RUN_MS.0, RUN_MS.1))?;
                book.enter(&case, kind, &[READS, WRITES, MOVES, MOVED], &outcome);
            }
        }
    }
    Ok(book)
}

fn sample(kind: &str, case: Case, run_ms: u64) -> Result<Outcome> {
    let mut command = child::workload(&["__slab", "moves", "--kind", kind])?;
    command.args(child::numbers(&[("--objects", OBJECTS), ("--run-ms", run_ms)]));
    command.args(case.then_some("--defrag"));
    subject::clear_foreign_settings(&mut command);
    child::outcome(kind, &Running::start(&mut command)?.finish(Duration::from_secs(60))?)
}

fn verdict(book: &Book<Case>, kind: &'static str, metric: &'static str) -> Verdict {
    let what = if metric == READS { "reads" } else { "writes" };
    let target = format!("{what}, {kind}: while the background defragments, of what they are without");
    let blank = not_measured(target, Bound::AtLeast(0.9), "x", "it was not run");
    let of = |case, metric| book.get(&case, kind, metric);
    let (Some(alone), Some(beside), Some(moves)) = (of(false, metric), of(true, metric), of(true, MOVES)) else {
        return blank;
    };
    Verdict {
        estimate: stats::estimate(&beside.ratios(alone, Better::Higher)),
        baseline: kind.to_owned(),
        is_lost: !beside.survived(),
        note: format!("{:.0} moves a second", moves.median().unwrap_or_default()),
        ..blank
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::State;

    /// 80 % of the reads per second fall short of the bound of 90 %, and 95 % reach it. A failed round makes the target
    /// fall short.
    #[test]
    fn a_reader_that_is_held_up_falls_short() {
        let mut book = Book::new();
        let mut enter = |case, kind, reads: f64| {
            let line = serde_json::json!({ READS: reads, WRITES: 9.0, MOVES: 7.0, MOVED: 7 });
            for _ in 0..5 {
                book.enter(&case, kind, &[READS, WRITES, MOVES, MOVED], &Outcome::Measured(line.clone()));
            }
        };
        for (case, by_handle, by_owner) in [(false, 100.0, 100.0), (true, 80.0, 95.0)] {
            enter(case, BY_HANDLE, by_handle);
            enter(case, BY_OWNER, by_owner);
        }

        assert_eq!(verdict(&book, BY_HANDLE, READS).state(), State::FallsShort);
        assert_eq!(verdict(&book, BY_OWNER, READS).state(), State::Reached);
        assert!(verdict(&book, BY_OWNER, WRITES).note.starts_with("7 moves"));
        book.enter(&true, BY_OWNER, &[READS], &Outcome::Failed("nothing was moved".to_owned()));
        assert_eq!(verdict(&book, BY_OWNER, READS).state(), State::FallsShort);
    }
}
