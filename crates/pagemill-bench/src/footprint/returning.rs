//! Memory that a process frees before it continues to work. Measures how much of it is still resident after each
//! second.

use std::time::Duration;

use pagemill_core::units::Bytes;

use super::Options;
use crate::child::{self, Outcome, RunningGroup};
use crate::error::{Error, Result};
use crate::experiment::{CommonOptions, Metric, Named, Progress, SampleTable, Study, not_measured};
use crate::proc;
use crate::report::{Bound, Report, Verdict};
use crate::subject::{AvailableSubject, PAGEMILL};

/// MiB that each process allocates and frees (quick, full).
const FREED_MIB: (u64, u64) = (64, 400);
/// Seconds for which the process works after the last free (quick, full).
const WORK_SECONDS: (u64, u64) = (2, 15);

/// Sizes of the allocations in bytes, in a full run.
const SIZES: &[u64] = &[64, 512, 4 << 10, 64 << 10, 1 << 20];
/// Sizes of the allocations in bytes, in a quick run.
const QUICK_SIZES: &[u64] = &[4 << 10];

/// Maximum of [`GROWTH_MIB`] at the end of the run.
const MAX_LEFT_MIB: f64 = 16.0;

/// Metric: growth of the resident memory, in MiB, until all allocations were made.
const FILLED_MIB: &str = "filled_mib";
/// Metric: CPU time that the process used after the last free, divided by the duration.
const CPU_SHARE: &str = "cpu_share";
/// Metric: growth of the resident memory, in MiB, since before the first allocation.
const GROWTH_MIB: &str = "more_mib";

/// Size of the allocations in bytes, and seconds since the last free; none for the whole run.
type Case = (u64, Option<u64>);

fn case_name((size, second): &Case) -> String {
    let at = second.map(|second| format!(", after {second} s"));
    format!("pieces of {}{}", Bytes(*size), at.unwrap_or_default())
}

/// Measures how much freed memory stays resident after each second; adds rows and verdicts to the report.
///
/// # Errors
///
/// [`Error::CannotRun`] if the machine has too little memory to run all allocators at once.
pub fn run(options: &Options, ready: &[AvailableSubject], report: &mut Report) -> Result<()> {
    let common = &options.common;
    let (mib, seconds) = (common.quick_or_full(FREED_MIB), common.quick_or_full(WORK_SECONDS));
    let wanted = 2 * mib * ready.len() as u64;
    let available = proc::available_bytes().unwrap_or(u64::MAX) >> 20;
    if available < wanted {
        return Err(Error::CannotRun(format!("--return takes up to {wanted} MiB, {available} MiB are available")));
    }
    let sizes = match options.sizes.as_slice() {
        [] => common.quick_or_full((QUICK_SIZES, SIZES)),
        given => given,
    };
    child::touch_beforehand(mib * ready.len() as u64)?;
    let mut study = Study::new(report, case_name);
    measure_cases(common, ready, sizes, (mib, seconds), &mut study.samples)?;
    for &size in sizes {
        add_rows(&mut study, (size, mib, seconds), ready);
    }
    for &size in sizes {
        study.report.add_verdict(verdict(&study.samples, (size, seconds), mib));
    }
    Ok(())
}

/// Measures all allocation sizes and rounds. All allocators of a round run concurrently, because no time is measured
/// and each process uses only a fifth of a CPU.
fn measure_cases(
    common: &CommonOptions,
    ready: &[AvailableSubject],
    sizes: &[u64],
    (mib, seconds): (u64, u64),
    samples: &mut SampleTable<Case>,
) -> Result<()> {
    let progress = Progress::new(sizes.len() * common.rounds());
    for &size in sizes {
        for _ in 0..common.rounds() {
            progress.step(&format!("pieces of {}", Bytes(size)));
            let mut running = Vec::new();
            for subject in ready {
                let mut command = child::workload_command(["__returning"])?;
                command.args(child::numeric_options(&[("--mib", mib), ("--size", size), ("--seconds", seconds)]));
                subject.apply(&mut command);
                running.push((subject, RunningGroup::start(&mut command)?));
            }
            for (subject, running) in running {
                let finished = running.finish(Duration::from_secs(seconds + 120))?;
                add_sample(samples, size, seconds, subject.name(), child::classify(subject.name(), &finished)?);
            }
        }
    }
    Ok(())
}

fn add_sample(samples: &mut SampleTable<Case>, size: u64, seconds: u64, name: &'static str, outcome: Outcome) {
    for second in 0..=seconds {
        let of_second = outcome.part(|line| serde_json::json!({ GROWTH_MIB: line[GROWTH_MIB][second as usize] }));
        samples.add_outcome(&(size, Some(second)), name, &[GROWTH_MIB], &of_second);
    }
    samples.add_outcome(&(size, None), name, &[FILLED_MIB, CPU_SHARE], &outcome);
}

fn add_rows(study: &mut Study<'_, Case>, (size, mib, seconds): (u64, u64, u64), ready: &[AvailableSubject]) {
    let table = format!(
        "{mib} MiB in pieces of {} freed, then a fifth of a CPU used: MiB more than before, half the spread",
        Bytes(size)
    );
    // The rows have no baseline: some allocators hold almost nothing, and a ratio to almost nothing is meaningless.
    let whole = (size, None);
    study.rows(&whole, ready, &table, &[(Metric::lower(FILLED_MIB, "MiB"), "filled")]);
    for second in 0..=seconds {
        let (case, at) = ((size, Some(second)), format!("after {second} s"));
        let growth = Metric::lower(GROWTH_MIB, "MiB");
        // The JSON has a row for each second, and the table only for some of them.
        match second % 5 == 0 || second == 1 || second == seconds {
            true => study.rows(&case, ready, &table, &[(growth, &at)]),
            false => study.json_rows(&case, ready, &[growth]),
        }
    }
    study.rows(&whole, ready, &table, &[(Metric::lower(CPU_SHARE, "share"), "CPU used")]);
}

fn verdict(samples: &SampleTable<Case>, (size, seconds): (u64, u64), mib: u64) -> Verdict {
    let target = format!("{mib} MiB in pieces of {} freed, still held {seconds} s later", Bytes(size));
    let blank = not_measured(target, Bound::AtMost(MAX_LEFT_MIB), "MiB", "pagemill was not run");
    blank.measured(samples.get((&(size, Some(seconds)), PAGEMILL, GROWTH_MIB)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::VerdictState;

    /// The verdict must depend on the memory after the last second and not on the memory after earlier seconds. If a
    /// run was killed, the target must be missed.
    #[test]
    fn memory_after_last_second_is_judged() {
        let line = |held: [f64; 3]| {
            Outcome::Measured(serde_json::json!({ GROWTH_MIB: held, FILLED_MIB: 400.0, CPU_SHARE: 0.2 }))
        };
        let judge = |outcomes: [Outcome; 3]| {
            let mut samples = SampleTable::new();
            outcomes.into_iter().for_each(|outcome| add_sample(&mut samples, 4096, 2, PAGEMILL, outcome));
            verdict(&samples, (4096, 2), 400).state()
        };

        assert_eq!(judge([(); 3].map(|()| line([400.0, 200.0, 3.0]))), VerdictState::Reached);
        assert_eq!(judge([(); 3].map(|()| line([3.0, 3.0, 400.0]))), VerdictState::FallsShort);
        assert_eq!(judge([line([3.0; 3]), Outcome::Killed, line([3.0; 3])]), VerdictState::FallsShort);
    }
}
