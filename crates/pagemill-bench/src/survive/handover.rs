//! One process frees much memory and continues with little work; then another process of its cgroup needs the memory.
//!
//! The first process (the keeper) runs under the measured allocator, the second (the newcomer) under plain glibc. A
//! sample repeats this several times: after each run of a newcomer the keeper fills its memory again.

use std::time::Duration;

use crate::cgroup::Cgroup;
use crate::child::{self, Outcome, Running};
use crate::error::{Result, doing};
use crate::experiment::{Book, Common, Metric, Progress, not_measured, report_row};
use crate::report::{Bound, Place, Report, Verdict};
use crate::signs::Signs;
use crate::stats::{self, Better};
use crate::subject::{self, PAGEMILL, Ready};
use crate::workload::handover::{freed_sign, taken_sign};

use super::LIMIT_MIB;

/// Memory that the keeper fills and frees. The limit has room for this memory or for the newcomer's, but not for both.
const KEEPER_MIB: u64 = 200;
/// Memory that the newcomer needs.
const NEWCOMER_MIB: u64 = 180;
const NEWCOMER_THREADS: u64 = 4;

const CASE: &str = "handover";
const SPEED: &str = "gib_per_second";
const SLOWEST: &str = "slowest_ms";
const REFUSED: &str = "refused";
const USED: &str = "used_share";
/// Metric: 1 for a sample in which no process was killed, else 0.
const SURVIVED: &str = "survived";
const METRICS: &[&str] = &[SPEED, SLOWEST, REFUSED, USED];

/// Runs the experiment under every allocator; adds rows and a verdict to the report.
pub fn run(common: &Common, ready: &[Ready], report: &mut Report) -> Result<()> {
    let turns = common.pick(2, 5);
    let progress = Progress::new(ready.len() * common.rounds());
    let mut book = Book::new();
    for round in 0..common.rounds() {
        for index in 0..ready.len() {
            let subject = &ready[(index + round) % ready.len()];
            progress.step(&format!("handover, {}", subject.name()));
            match sample(subject, turns)? {
                Ok(outcome) => {
                    book.enter(&CASE, subject.name(), METRICS, &outcome);
                    let survived = f64::from(u8::from(matches!(outcome, Outcome::Measured(_))));
                    book.enter_value(&CASE, subject.name(), SURVIVED, survived);
                }
                Err(gap) => report.gap(gap),
            }
        }
    }
    drop(progress);
    rows(report, &book, ready);
    report.verdict(verdict(&book, ready));
    Ok(())
}

/// Takes one sample in a new cgroup. The inner error is a sentence for the list of gaps.
fn sample(ready: &Ready, turns: u64) -> Result<std::result::Result<Outcome, String>> {
    let folder = tempfile::tempdir().map_err(doing("making a folder for signs"))?;
    let signs = Signs::new(folder.path());
    let group = match Cgroup::with_limit(LIMIT_MIB << 20) {
        Ok(group) => group,
        Err(why) => return Ok(Err(format!("survive: {}: {why}", ready.name()))),
    };
    let mut line = match ready.launcher(&[]) {
        Ok(line) => line,
        Err(gap) => return Ok(Err(format!("survive: {gap}"))),
    };
    line.extend([child::own_executable()?.display().to_string(), "__keeper".to_owned()]);
    let options = [
        ("--mib", KEEPER_MIB.to_string()),
        ("--turns", turns.to_string()),
        ("--folder", folder.path().display().to_string()),
    ];
    line.extend(options.into_iter().flat_map(|(name, value)| [name.to_owned(), value]));
    let keeper = start(&group, &line)?;
    let mut newcomers = Vec::new();
    for turn in 0..turns {
        // A keeper that ended early was killed or failed. The outcome of `finish` below tells which.
        if !signs.wait_for(&freed_sign(turn), &keeper, Duration::from_secs(60))? {
            break;
        }
        match newcomer(&group)? {
            Outcome::Measured(line) => newcomers.push(line),
            lost => return Ok(Ok(lost)),
        }
        signs.give(&taken_sign(turn)).map_err(doing("giving a sign"))?;
    }
    let finished = keeper.finish(Duration::from_secs(60))?;
    let used_share = group.peak_bytes().unwrap_or(0) as f64 / (LIMIT_MIB << 20) as f64;
    Ok(Ok(match child::outcome(ready.name(), &finished)? {
        Outcome::Measured(keeper) => Outcome::Measured(summary(&keeper, &newcomers, used_share)),
        lost => lost,
    }))
}

/// Runs one newcomer process from start to end.
fn newcomer(group: &Cgroup) -> Result<Outcome> {
    let (mib, threads) = (NEWCOMER_MIB.to_string(), NEWCOMER_THREADS.to_string());
    let own = child::own_executable()?.display().to_string();
    let line = [&own, "__newcomer", "--mib", &mib, "--threads", &threads].map(str::to_owned);
    let finished = start(group, &line)?.finish(Duration::from_secs(60))?;
    child::outcome("the newcomer's glibc", &finished)
}

/// Starts a command in the cgroup, without any allocator setting of the caller.
pub fn start(group: &Cgroup, line: &[String]) -> Result<Running> {
    let entrance = group.entrance().display().to_string();
    let mut command = child::workload(&["__enter", "--entrance", &entrance, "--"])?;
    command.args(line);
    subject::clear_foreign_settings(&mut command);
    Running::start(&mut command)
}

/// Returns the JSON line of a sample: the newcomers' median speed and longest time, and all refused calls.
fn summary(keeper: &serde_json::Value, newcomers: &[serde_json::Value], used_share: f64) -> serde_json::Value {
    let of = |metric: &str| -> Vec<f64> { newcomers.iter().filter_map(|line| line[metric].as_f64()).collect() };
    let refused = of(REFUSED).iter().sum::<f64>() + keeper[REFUSED].as_f64().unwrap_or(0.0);
    let slowest = of("ms").into_iter().fold(0.0, f64::max);
    serde_json::json!({ SPEED: stats::median(&of(SPEED)), SLOWEST: slowest, REFUSED: refused, USED: used_share })
}

fn rows(report: &mut Report, book: &Book<&'static str>, ready: &[Ready]) {
    let metrics = [
        (SPEED, "GiB/s", Better::Higher, "newcomer, GiB/s"),
        (SLOWEST, "ms", Better::Lower, "its slowest turn, ms"),
        (USED, "share", Better::Higher, "of the limit used"),
        (REFUSED, "calls", Better::Lower, "refused"),
    ];
    let table = format!(
        "survive: {KEEPER_MIB} MiB filled and freed, then {NEWCOMER_MIB} MiB needed by another process, \
         in {LIMIT_MIB} MiB"
    );
    for subject in ready {
        for (name, unit, better, column) in metrics {
            let place = Place { table: table.clone(), column: column.to_owned() };
            let metric = Metric { name, unit, better, baseline: None };
            report_row(report, book, (&CASE, CASE), subject.name(), metric, Some(place));
        }
        let survived = Metric { name: SURVIVED, unit: "share", better: Better::Higher, baseline: None };
        report_row(report, book, (&CASE, CASE), subject.name(), survived, None);
    }
}

fn verdict(book: &Book<&'static str>, ready: &[Ready]) -> Verdict {
    let target = "survive, handover: samples in which no process was killed";
    let blank = not_measured(target, Bound::AtLeast(1.0), "of all", "pagemill was not run");
    let Some(survived) = book.get(&CASE, PAGEMILL, SURVIVED) else { return blank };
    let sum = |name, metric| book.get(&CASE, name, metric).map_or(0.0, |series| series.values().iter().sum());
    let survived = survived.values();
    let share = survived.iter().sum::<f64>() / survived.len() as f64;
    let peers = ready.iter().filter(|ready| ready.name() != PAGEMILL);
    let killed: Vec<_> = peers
        .filter(|peer| book.get(&CASE, peer.name(), SPEED).is_some_and(|series| series.killed > 0))
        .map(Ready::name)
        .collect();
    let mut note = match killed.is_empty() {
        true => "no peer was killed".to_owned(),
        false => format!("killed: {}", killed.join(", ")),
    };
    let refused: f64 = sum(PAGEMILL, REFUSED);
    if refused > 0.0 {
        note = format!("{refused} calls were refused; {note}");
    }
    // The samples are counted exactly, so the interval has zero width.
    let estimate = stats::Estimate { value: share, low: share, high: share, samples: survived.len() };
    Verdict { estimate: Some(estimate), is_lost: share < 1.0 || refused > 0.0, note, ..blank }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sample of three turns has the median speed, the longest time, and the refused calls of both processes
    /// together.
    #[test]
    fn a_sample_sums_up_its_turns() {
        let turn = |speed: f64, ms: f64, refused: u64| serde_json::json!({ SPEED: speed, "ms": ms, REFUSED: refused });
        let turns = [turn(1.0, 90.0, 0), turn(3.0, 30.0, 1), turn(2.0, 45.0, 0)];

        let line = summary(&serde_json::json!({ REFUSED: 2 }), &turns, 0.5);

        assert_eq!(line, serde_json::json!({ SPEED: 2.0, SLOWEST: 90.0, REFUSED: 3.0, USED: 0.5 }));
    }

    /// A survived sample of Pagemill reaches the target, and the note names the killed peer. One killed sample makes
    /// the target fall short.
    #[test]
    fn survival_allows_no_doubt() {
        let (ready, _) = subject::select(&[], |_| true).expect("glibc is always there");
        let mut book = Book::new();
        let mut enter = |name, survived, outcome: &Outcome| {
            book.enter(&CASE, name, METRICS, outcome);
            book.enter_value(&CASE, name, SURVIVED, survived);
        };
        enter(PAGEMILL, 1.0, &Outcome::Measured(serde_json::json!({ SPEED: 1.0, REFUSED: 0 })));
        enter("glibc", 0.0, &Outcome::Killed);
        let reached = verdict(&book, &ready);
        assert!(!reached.is_lost && reached.note.contains("killed: glibc"), "{reached:?}");

        let mut enter = |name, survived, outcome: &Outcome| {
            book.enter(&CASE, name, METRICS, outcome);
            book.enter_value(&CASE, name, SURVIVED, survived);
        };
        enter(PAGEMILL, 0.0, &Outcome::Killed);
        assert!(verdict(&book, &ready).is_lost);
    }
}
