//! Values read by handle, compared with values read by pointer.

use std::time::Duration;

use super::Options;
use crate::child;
use crate::error::Result;
use crate::experiment::{Metric, Progress, Study};
use crate::report::{Bound, Report};

const HANDLE_READ: &str = "handle-read";
const POINTER_READ: &str = "pointer-read";
/// Names of reads by handle and reads by pointer, in the report and in the workload's JSON. One process measures both,
/// because they read the same memory.
pub const SUBJECTS: [&str; 2] = [HANDLE_READ, POINTER_READ];

/// Metric: nanoseconds of a read that does not depend on other reads.
const READ_NS: &str = "ns";
/// Metric: nanoseconds of a read in a chain, in which each value contains the index of the value that is read next.
const CHAIN_NS: &str = "chain_ns";

/// Number of values that are read. The smaller number of values, with their handles and state words, fits into the L1
/// cache. The larger number exceeds the L2 cache.
type Case = u64;
const CASES: [Case; 2] = [100, 100_000];
/// Duration in milliseconds of a sample (quick, full).
const SAMPLE_MS: (u64, u64) = (100, 500);

fn case_name(case: &Case) -> String {
    let fits = if *case == CASES[0] { "in L1" } else { "beyond L2" };
    format!("{case} values of 192 B, {fits}")
}

/// Measures reads by handle and by pointer; adds rows and verdicts to the report.
///
/// # Errors
///
/// [`crate::error::Error::WrongAnswer`] if a value had wrong contents.
pub fn run_part(options: &Options, report: &mut Report) -> Result<()> {
    let common = &options.common;
    let progress = Progress::new(common.rounds() * CASES.len());
    let mut study = Study::new(report, case_name);
    for case in CASES.repeat(common.rounds()) {
        progress.step(&format!("read, {}", case_name(&case)));
        let numbers = [("--objects", case), ("--run-ms", common.quick_or_full(SAMPLE_MS))];
        let line = child::command_words(&["__slab", "reads"], &numbers);
        let outcome = child::run_plain(HANDLE_READ, line, Duration::from_secs(60))?;
        for subject in SUBJECTS {
            let own = outcome.part(|line| line[subject].clone());
            study.samples.add_outcome(&case, subject, &[READ_NS, CHAIN_NS], &own);
        }
    }
    for (metric, how) in [(READ_NS, "each by itself"), (CHAIN_NS, "each of where the one before said")] {
        let table =
            format!("ns to read the first word of a value at random, {how}, half the spread, times {POINTER_READ}");
        let metric = Metric::lower(metric, "ns").against(POINTER_READ);
        for case in &CASES {
            study.rows(case, &SUBJECTS, &table, &[(metric, &case_name(case))]);
        }
    }
    for case in &CASES {
        for (metric, how) in [(READ_NS, "each by itself"), (CHAIN_NS, "one after the other")] {
            let target = format!("read, {}, {how}: {HANDLE_READ}, time of {POINTER_READ}", case_name(case));
            let (own, base) = ((case, HANDLE_READ, metric), (case, POINTER_READ, metric));
            study.judge_time_ratio(target, Bound::AtMost(2.0), own, base);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::child::Outcome;
    use crate::experiment::SampleTable;

    /// A JSON line of the workload must yield the metrics of reads by handle and of reads by pointer. A failed run must
    /// count as a lost round of both.
    #[test]
    fn json_line_has_both_subjects() {
        let line = serde_json::json!({ HANDLE_READ: { READ_NS: 3.0, CHAIN_NS: 9.0 }, POINTER_READ: { READ_NS: 2.0, CHAIN_NS: 3.0 } });
        let mut samples = SampleTable::new();
        for outcome in [Outcome::Measured(line), Outcome::Failed("no".to_owned())] {
            for subject in SUBJECTS {
                samples.add_outcome(
                    &CASES[0],
                    subject,
                    &[READ_NS, CHAIN_NS],
                    &outcome.part(|line| line[subject].clone()),
                );
            }
        }
        let of = |subject, metric| samples.get((&CASES[0], subject, metric)).expect("it was entered");

        assert_eq!(of(HANDLE_READ, READ_NS).rounds, [Some(3.0), None]);
        assert_eq!(of(POINTER_READ, CHAIN_NS).rounds, [Some(3.0), None]);
        assert_eq!(of(POINTER_READ, READ_NS).failures.len(), 1);
    }
}
