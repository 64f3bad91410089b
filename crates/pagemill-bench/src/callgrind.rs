//! Counts the instructions per operation of a workload with valgrind. The count has nearly no noise. It is
//! comparable on machines with the same C library and CPU features, which select functions such as `memcpy`.

use std::process::Command;
use std::time::Duration;

use crate::child::{self, Outcome, RunningGroup};
use crate::error::{Error, Result};
use crate::experiment::not_measured;
use crate::report::{Bound, Verdict};
use crate::stats::Estimate;

/// Number of operations of a workload in its first run under valgrind; its second run makes twice as many.
const COUNTED_OPERATIONS: u64 = 100_000;

/// Metric: instructions of one operation.
pub const INSTRUCTIONS: &str = "instructions";
/// Metric: instructions of one allocation and one free.
pub const INSTRUCTIONS_PER_PAIR: &str = "instructions_per_pair";

/// Counts the instructions that a workload executes per operation, as the value of `metric`. `add_arguments` adds the
/// workload's arguments and environment for a run with the given number of operations.
///
/// Runs the workload twice, the second time with twice as many operations. The difference of the two counts excludes
/// startup and exit.
///
/// # Errors
///
/// [`Error::Gap`] if nothing was counted; otherwise as [`child::classify`].
pub fn count_instructions(name: &str, metric: &str, add_arguments: impl Fn(&mut Command, u64)) -> Result<Outcome> {
    let gap = |why: &str| Error::Gap(format!("instructions, {name}: {why}"));
    let mut counts = [0; 2];
    for (count, operations) in counts.iter_mut().zip([COUNTED_OPERATIONS, 2 * COUNTED_OPERATIONS]) {
        let mut command = Command::new("valgrind");
        command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(child::own_executable()?);
        add_arguments(&mut command, operations);
        let Ok(running) = RunningGroup::start(&mut command) else {
            child::check_interrupt()?;
            return Err(gap("valgrind is missing: apt-get install valgrind"));
        };
        let finished = match running.finish(Duration::from_secs(300)) {
            Err(Error::CannotRun(why)) => return Err(gap(&why)),
            finished => finished?,
        };
        if let Outcome::Failed(why) = child::classify(name, &finished)? {
            return Err(gap(why.lines().last().unwrap_or_default()));
        }
        let collected = parse_instruction_count(&String::from_utf8_lossy(&finished.stderr));
        *count = collected.ok_or_else(|| gap("callgrind printed no count"))?;
    }
    let [once, twice] = counts;
    let count = twice.saturating_sub(once) as f64 / COUNTED_OPERATIONS as f64;
    Ok(Outcome::Measured(serde_json::json!({ metric: count })))
}

/// Judges the number of instructions that an operation takes more than the baseline's. Counts are exact, so the interval
/// has zero width.
pub fn judge_added(operation: String, budget: f64, own: f64, (baseline, base): (&str, f64)) -> Verdict {
    Verdict {
        estimate: Some(Estimate::exact(own - base, usize::MAX)),
        baseline: baseline.to_owned(),
        ..not_measured(format!("{operation}: instructions more"), Bound::AtMost(budget), "instructions", "")
    }
}

/// Parses the instruction count in the last lines of callgrind's output, such as `==7== Collected : 123456`.
fn parse_instruction_count(text: &str) -> Option<u64> {
    let (_, count) = text.lines().find(|line| line.contains("Collected"))?.split_once(" : ")?;
    count.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The instruction count must be parsed from output of callgrind 3.19. Text without an instruction count must give
    /// none.
    #[test]
    fn instruction_count_is_parsed() {
        assert_eq!(parse_instruction_count("==7== Events    : Ir\n==7== Collected : 123456\n"), Some(123_456));
        assert_eq!(parse_instruction_count("==7== nothing"), None);
    }
}
