//! One process frees much memory and continues with little work; then another process of its cgroup needs the memory.
//!
//! The first process (the keeper) runs under the measured allocator, the second (the newcomer) under plain glibc. A
//! sample has several turns: after each newcomer, the keeper fills its memory again.

use std::time::Duration;

use crate::child::{self, Outcome};
use crate::error::{Result, doing};
use crate::experiment::{CommonOptions, Metric, Named, SURVIVED, SampleTable, Study, not_measured};
use crate::report::{Bound, Report, Verdict};
use crate::signs::Signs;
use crate::stats;
use crate::subject::{AvailableSubject, PAGEMILL};
use crate::workload::handover::{freed_sign, taken_sign};

use super::{LIMIT_MIB, make_group, run_newcomer, start_in_group, workload_line};

/// MiB that the first process (the keeper) fills and frees. The limit of the cgroup has room for this memory or for
/// that of the second process (the newcomer), but not for both together.
const KEEPER_MIB: u64 = 200;
/// MiB that the newcomer, a process that starts after another one has freed memory, needs.
const NEWCOMER_MIB: u64 = 180;
/// Number of threads of the newcomer, the process that needs the freed memory.
const NEWCOMER_THREADS: u64 = 4;

const CASE: &str = "handover";
/// Metric: median, over the turns of a sample, of the speed at which the process that needs memory fills it.
const SPEED: &str = "gib_per_second";
/// Metric: longest time, over the turns of a sample, in which the process that needs memory fills it.
const SLOWEST_MS: &str = "slowest_ms";
/// Metric: number of failed allocations of all processes of a sample.
const FAILED_ALLOCATIONS: &str = "refused";
/// Metric: peak of the cgroup's memory as a fraction of its limit.
const USED_SHARE: &str = "used_share";
const METRICS: &[&str] = &[SPEED, SLOWEST_MS, FAILED_ALLOCATIONS, USED_SHARE, SURVIVED];

/// Measures under every allocator whether a second process can use memory that the first freed; adds rows and a verdict
/// to the report.
pub fn run(common: &CommonOptions, ready: &[AvailableSubject], report: &mut Report) -> Result<()> {
    let turns = common.quick_or_full((2, 5));
    let mut study = Study::new(report, |case: &&str| (*case).to_owned());
    study.measure_by_round((&[CASE], common.rounds()), ready, METRICS, |_, subject| take_sample(subject, turns))?;
    add_rows(&mut study, ready);
    study.report.add_verdict(verdict(&study.samples, ready));
    Ok(())
}

/// Takes one sample in a new cgroup.
///
/// # Errors
///
/// [`Error::Gap`](crate::error::Error::Gap) if nothing could be measured.
fn take_sample(ready: &AvailableSubject, turns: u64) -> Result<Outcome> {
    let folder = tempfile::tempdir().map_err(doing("making a folder for signs"))?;
    let signs = Signs::new(folder.path());
    let group = make_group(ready, LIMIT_MIB)?;
    let mut line = workload_line(ready, &[], "__keeper")?;
    line.extend(child::numeric_options(&[("--mib", KEEPER_MIB), ("--turns", turns)]));
    line.extend(["--folder".to_owned(), folder.path().display().to_string()]);
    let keeper = start_in_group(&group, &line)?;
    let mut newcomers = Vec::new();
    for turn in 0..turns {
        // A keeper that ended early was killed or has failed. The outcome of `finish` below shows which.
        if !signs.wait_for(&freed_sign(turn), &keeper, Duration::from_secs(60))? {
            break;
        }
        match run_newcomer(&group, NEWCOMER_MIB, NEWCOMER_THREADS)? {
            Outcome::Measured(line) => newcomers.push(line),
            lost => return Ok(lost),
        }
        signs.create(&taken_sign(turn)).map_err(doing("giving a sign"))?;
    }
    let finished = keeper.finish(Duration::from_secs(60))?;
    let used_share = group.peak_bytes().unwrap_or(0) as f64 / (LIMIT_MIB << 20) as f64;
    Ok(match child::classify(ready.name(), &finished)? {
        Outcome::Measured(keeper) => Outcome::Measured(sample_json(&keeper, &newcomers, used_share)),
        lost => lost,
    })
}

/// Returns the JSON line of a sample: the median speed of the processes that needed memory (newcomers), their longest
/// time, the number of failed allocations of all processes, and the used fraction of the limit.
fn sample_json(keeper: &serde_json::Value, newcomers: &[serde_json::Value], used_share: f64) -> serde_json::Value {
    let of = |metric: &str| -> Vec<f64> { newcomers.iter().filter_map(|line| line[metric].as_f64()).collect() };
    let refused = of(FAILED_ALLOCATIONS).iter().sum::<f64>() + keeper[FAILED_ALLOCATIONS].as_f64().unwrap_or(0.0);
    let slowest = of("ms").into_iter().fold(0.0, f64::max);
    let speed = stats::median(&of(SPEED));
    serde_json::json!({
        SPEED: speed,
        SLOWEST_MS: slowest,
        FAILED_ALLOCATIONS: refused,
        USED_SHARE: used_share,
        SURVIVED: 1.0,
    })
}

fn add_rows(study: &mut Study<'_, &'static str>, ready: &[AvailableSubject]) {
    let columns = [
        (Metric::higher(SPEED, "GiB/s"), "newcomer, GiB/s"),
        (Metric::lower(SLOWEST_MS, "ms"), "its slowest turn, ms"),
        (Metric::higher(USED_SHARE, "share"), "of the limit used"),
        (Metric::lower(FAILED_ALLOCATIONS, "calls"), "refused"),
    ];
    let table = format!(
        "survive: {KEEPER_MIB} MiB filled and freed, then {NEWCOMER_MIB} MiB needed by another process, \
         in {LIMIT_MIB} MiB"
    );
    study.rows(&CASE, ready, &table, &columns);
    study.json_rows(&CASE, ready, &[Metric::higher(SURVIVED, "share")]);
}

fn verdict(samples: &SampleTable<&'static str>, ready: &[AvailableSubject]) -> Verdict {
    let target = "survive, handover: samples in which no process was killed";
    let blank = not_measured(target, Bound::AtLeast(1.0), "of all", "pagemill was not run");
    let Some(survived) = samples.get((&CASE, PAGEMILL, SURVIVED)) else { return blank };
    let survived = survived.values();
    let share = survived.iter().sum::<f64>() / survived.len() as f64;
    let peers = ready.iter().filter(|ready| ready.name() != PAGEMILL);
    let killed: Vec<_> = peers
        .filter(|peer| samples.get((&CASE, peer.name(), SPEED)).is_some_and(|series| series.killed > 0))
        .map(Named::name)
        .collect();
    let mut note = match killed.is_empty() {
        true => "no peer was killed".to_owned(),
        false => format!("killed: {}", killed.join(", ")),
    };
    let refused = samples.sum((&CASE, PAGEMILL, FAILED_ALLOCATIONS));
    if refused > 0.0 {
        note = format!("{refused} calls were refused; {note}");
    }
    let estimate = Some(stats::Estimate::exact(share, survived.len()));
    Verdict { estimate, has_lost_round: share < 1.0 || refused > 0.0, note, ..blank }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::subject;

    /// In three turns of a sample, a process (keeper) frees memory and another (newcomer) fills it. The JSON line of
    /// the sample must have the median speed of the newcomers, their longest time, and the failed allocations of all
    /// processes.
    #[test]
    fn sample_summarizes_its_turns() {
        fn turn(speed: f64, ms: f64, refused: u64) -> serde_json::Value {
            serde_json::json!({ SPEED: speed, "ms": ms, FAILED_ALLOCATIONS: refused })
        }
        let turns = [turn(1.0, 90.0, 0), turn(3.0, 30.0, 1), turn(2.0, 45.0, 0)];

        let line = sample_json(&serde_json::json!({ FAILED_ALLOCATIONS: 2 }), &turns, 0.5);

        assert_eq!(
            line,
            serde_json::json!({
                SPEED: 2.0, SLOWEST_MS: 90.0, FAILED_ALLOCATIONS: 3.0, USED_SHARE: 0.5, SURVIVED: 1.0
            })
        );
    }

    /// After one sample that Pagemill survived and glibc did not, the target must be reached, and the note must say
    /// that glibc was killed. After a second sample in which Pagemill was killed, the target must be missed.
    #[test]
    fn one_kill_misses_the_target() {
        let (ready, _) = subject::select_available(&[], |_| true).expect("glibc is always there");
        let mut samples = SampleTable::new();
        let line = serde_json::json!({ SPEED: 1.0, FAILED_ALLOCATIONS: 0, SURVIVED: 1.0 });
        samples.add_outcome(&CASE, PAGEMILL, METRICS, &Outcome::Measured(line));
        samples.add_outcome(&CASE, "glibc", METRICS, &Outcome::Killed);
        let reached = verdict(&samples, &ready);
        assert!(!reached.has_lost_round && reached.note.contains("killed: glibc"), "{reached:?}");

        samples.add_outcome(&CASE, PAGEMILL, METRICS, &Outcome::Killed);
        assert!(verdict(&samples, &ready).has_lost_round);
    }
}
