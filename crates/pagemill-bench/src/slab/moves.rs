//! A reader and a writer during background defragmentation, compared with the same threads without defragmentation.

use std::time::Duration;

use super::{BY_HANDLE, BY_OWNER, Options};
use crate::child::{self, Outcome};
use crate::error::Result;
use crate::experiment::{CommonOptions, Metric, SampleTable, Study, not_measured, rotated};
use crate::report::{Bound, Report, Verdict};
use crate::stats::Better;

/// Names of the slab caches whose objects are moved, in the report and on the workload's command line.
pub const MOVING_CACHES: [&str; 2] = [BY_HANDLE, BY_OWNER];

// Metrics: rates of the reader, the writer and the defragmentation, and the number of objects moved in the sample.
const READS: &str = "reads_per_second";
const WRITES: &str = "writes_per_second";
const MOVES: &str = "moves_per_second";
const MOVED_OBJECTS: &str = "moved";

/// Whether a background thread moves objects during the measurement.
type Case = bool;
const CASES: [Case; 2] = [false, true];

/// Number of objects. Their total size of 38 MB exceeds the CPU caches.
const OBJECT_COUNT: u64 = 200_000;
/// Duration in milliseconds of a sample (quick, full).
const SAMPLE_MS: (u64, u64) = (200, 1000);
/// Number of samples (quick, full). It is larger than in other experiments, because the targets have a margin of only
/// 10 %.
const ROUNDS: (usize, usize) = (3, 9);

fn case_name(case: &Case) -> &'static str {
    if *case { "defragmented meanwhile" } else { "left alone" }
}

/// Measures a reader and a writer with and without background defragmentation; adds rows and verdicts to the report.
///
/// # Errors
///
/// [`crate::error::Error::WrongAnswer`] if an object, or a write to an object, was lost.
pub fn run_part(options: &Options, report: &mut Report) -> Result<()> {
    let kinds = options.common.wanted(&MOVING_CACHES);
    let mut study = Study::new(report, |case| case_name(case).to_owned());
    measure_cases(&options.common, &mut study, &kinds)?;
    let rates = [Metric::higher(READS, "1/s"), Metric::higher(WRITES, "1/s")];
    let moves = [Metric::higher(MOVES, "1/s"), Metric::higher(MOVED_OBJECTS, "1")];
    let table =
        "a reader and a writer of 200,000 objects of 192 B, nine of ten of a group gone: a second, half the spread";
    for case in CASES {
        let name = case_name(&case);
        let columns = ["reads", "writes", "moves", "moved in all"].map(|what| format!("{what}, {name}"));
        let columns: Vec<(Metric, &str)> =
            rates.into_iter().chain(moves).zip(columns.iter().map(String::as_str)).collect();
        let shown = if case { &columns[..] } else { &columns[..2] };
        study.rows(&case, &kinds, table, shown);
        if !case {
            study.json_rows(&case, &kinds, &moves);
        }
    }
    for kind in kinds {
        study.report.add_verdict(verdict(&study.samples, kind, READS));
        study.report.add_verdict(verdict(&study.samples, kind, WRITES));
    }
    Ok(())
}

/// Measures all rounds of each cache. In a round, the samples with and without moves follow each other, and take turns
/// at being the first.
fn measure_cases(common: &CommonOptions, study: &mut Study<'_, Case>, kinds: &[&&'static str]) -> Result<()> {
    let run_ms = common.quick_or_full(SAMPLE_MS);
    for kind in kinds {
        let rounds = 0..common.rounds_or(ROUNDS);
        let order = rounds.flat_map(|round| rotated(&CASES, round).map(move |case| (case, round)));
        let metrics = [READS, WRITES, MOVES, MOVED_OBJECTS];
        study.measure(order, &[*kind], &metrics, |_, _, _| true, |case, kind, _| take_sample(kind, *case, run_ms))?;
    }
    Ok(())
}

fn take_sample(kind: &str, case: Case, run_ms: u64) -> Result<Outcome> {
    let mut line = child::command_words(
        &["__slab", "moves", "--kind", kind],
        &[("--objects", OBJECT_COUNT), ("--run-ms", run_ms)],
    );
    line.extend(case.then(|| "--defrag".to_owned()));
    child::run_plain(kind, line, Duration::from_secs(60))
}

fn verdict(samples: &SampleTable<Case>, kind: &'static str, metric: &'static str) -> Verdict {
    let what = if metric == READS { "reads" } else { "writes" };
    let target = format!("{what}, {kind}: while the background defragments, of what they are without");
    let blank = not_measured(target, Bound::AtLeast(0.9), "x", "it was not run");
    let of = |case, metric| samples.get((&case, kind, metric));
    let Some(moves) = of(true, MOVES) else { return blank };
    let note = format!("{:.0} moves a second", moves.median().unwrap_or_default());
    Verdict { note, ..blank.compared(of(true, metric), (kind, of(false, metric)), Better::Higher) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::VerdictState;

    /// The target of a reader is 90 % of its speed without defragmentation. A reader at 80 % must miss the target, and
    /// a reader at 95 % must reach it. After a failed round, the target must be missed.
    #[test]
    fn slow_reader_misses_the_target() {
        let mut samples = SampleTable::new();
        let mut add = |case, kind, reads: f64| {
            let line = serde_json::json!({ READS: reads, WRITES: 9.0, MOVES: 7.0, MOVED_OBJECTS: 7 });
            for _ in 0..5 {
                samples.add_outcome(
                    &case,
                    kind,
                    &[READS, WRITES, MOVES, MOVED_OBJECTS],
                    &Outcome::Measured(line.clone()),
                );
            }
        };
        for (case, by_handle, by_owner) in [(false, 100.0, 100.0), (true, 80.0, 95.0)] {
            add(case, BY_HANDLE, by_handle);
            add(case, BY_OWNER, by_owner);
        }

        assert_eq!(verdict(&samples, BY_HANDLE, READS).state(), VerdictState::FallsShort);
        assert_eq!(verdict(&samples, BY_OWNER, READS).state(), VerdictState::Reached);
        assert!(verdict(&samples, BY_OWNER, WRITES).note.starts_with("7 moves"));
        samples.add_outcome(&true, BY_OWNER, &[READS], &Outcome::Failed("nothing was moved".to_owned()));
        assert_eq!(verdict(&samples, BY_OWNER, READS).state(), VerdictState::FallsShort);
    }
}
