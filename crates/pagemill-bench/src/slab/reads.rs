//! Values read by handle, compared with values read by pointer.

use std::time::Duration;

use super::Options;
use crate::child::{self, Outcome};
use crate::error::Result;
use crate::experiment::{Metric, Progress, SampleTable, SeriesKey, judge_time_ratio, report_row};
use crate::report::{Bound, Report, TableCell};
use crate::stats::Better;

const HANDLE: &str = "handle-read";
const POINTER: &str = "pointer-read";
/// The names in the report and in the workload's JSON. One process measures both subjects, because they read the same
/// memory.
pub const SUBJECTS: [&str; 2] = [HANDLE, POINTER];

/// Metric: nanoseconds of a read that does not depend on other reads.
const NS: &str = "ns";
/// Metric: nanoseconds of a dependent read, in a chain in which each value leads to the next one.
const CHAIN_NS: &str = "chain_ns";

/// Number of values. The smaller number of values, with their handles and state words, fits into the L1 cache. The
/// larger number exceeds the L2 cache.
type Case = u64;
const CASES: [Case; 2] = [100, 100_000];
const RUN_MS: (u64, u64) = (100, 500);

fn case_name(case: Case) -> String {
    let fits = if case == CASES[0] { "in L1" } else { "beyond L2" };
    format!("{case} values of 192 B, {fits}")
}

/// Measures this part; adds rows and verdicts.
///
/// # Errors
///
/// [`crate::error::Error::WrongAnswer`] if a value had wrong contents.
pub fn run_part(options: &Options, report: &mut Report) -> Result<()> {
    let common = &options.common;
    let progress = Progress::new(common.rounds() * CASES.len());
    let mut samples = SampleTable::new();
    for _ in 0..common.rounds() {
        for case in CASES {
            progress.step(&format!("read, {}", case_name(case)));
            let outcome = sample(case, common.quick_or_full(RUN_MS.0, RUN_MS.1))?;
            for subject in SUBJECTS {
                samples.add_outcome(&case, subject, &[NS, CHAIN_NS], &of_subject(&outcome, subject));
            }
        }
    }
    for (metric, how) in [(NS, "each by itself"), (CHAIN_NS, "each of where the one before said")] {
        for case in CASES {
            for subject in SUBJECTS {
                let table =
                    format!("ns to read the first word of a value at random, {how}, half the spread, times {POINTER}");
                let cell = Some(TableCell { table, column: case_name(case) });
                let metric = Metric { name: metric, unit: "ns", better: Better::Lower, baseline: Some(POINTER) };
                report_row(report, &samples, (&case, &case_name(case)), subject, metric, cell);
            }
        }
    }
    add_verdicts(report, &samples);
    Ok(())
}

fn sample(objects: u64, run_ms: u64) -> Result<Outcome> {
    let line = child::command_words(&["__slab", "reads"], &[("--objects", objects), ("--run-ms", run_ms)]);
    child::run_plain(HANDLE, line, Duration::from_secs(60))
}

/// Returns the part of the workload's JSON line that belongs to one subject.
fn of_subject(outcome: &Outcome, subject: &str) -> Outcome {
    match outcome {
        Outcome::Measured(line) => Outcome::Measured(line[subject].clone()),
        Outcome::Killed => Outcome::Killed,
        Outcome::Failed(why) => Outcome::Failed(why.clone()),
    }
}

fn add_verdicts(report: &mut Report, samples: &SampleTable<Case>) {
    for case in &CASES {
        for (metric, how) in [(NS, "each by itself"), (CHAIN_NS, "one after the other")] {
            let target = format!("read, {}, {how}: {HANDLE}, time of {POINTER}", case_name(*case));
            let side = |subject| SeriesKey { case, subject, metric };
            report.add_verdict(judge_time_ratio(samples, target, Bound::AtMost(2.0), side(HANDLE), side(POINTER)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One JSON line must yield the metrics of both subjects. A failed run must be a lost round of both subjects.
    #[test]
    fn json_line_has_both_subjects() {
        let line = serde_json::json!({ HANDLE: { NS: 3.0, CHAIN_NS: 9.0 }, POINTER: { NS: 2.0, CHAIN_NS: 3.0 } });
        let mut samples = SampleTable::new();
        for outcome in [Outcome::Measured(line), Outcome::Failed("no".to_owned())] {
            for subject in SUBJECTS {
                samples.add_outcome(&CASES[0], subject, &[NS, CHAIN_NS], &of_subject(&outcome, subject));
            }
        }
        let of = |subject, metric| samples.get(&CASES[0], subject, metric).expect("it was entered");

        assert_eq!(of(HANDLE, NS).rounds, [Some(3.0), None]);
        assert_eq!(of(POINTER, CHAIN_NS).rounds, [Some(3.0), None]);
        assert_eq!(of(POINTER, NS).failures.len(), 1);
    }
}
