//! ebizzy with a memory hog under the same limit: free memory must move from one process to the other.
//!
//! Workload and hog need their memory alternately. The memory that both use at one time always fits; together with the
//! free memory that both *retain* it does not. An allocator that retains free memory is killed; one that returns it at
//! once loses time at every record. Pagemill should do better than both. A kill is a result, not an error.

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::cgroup::Cgroup;
use crate::child::{self, Outcome, Running};
use crate::ebizzy::{FAULTS, RETURNING_FAULTS};
use crate::error::{Result, doing};
use crate::experiment::{Book, Common, Metric, Progress, not_measured, report_row};
use crate::report::{Bound, Place, Report, Series, Verdict};
use crate::stats::{self, Better};
use crate::subject::{self, PAGEMILL, Ready, Role};
use crate::workload::hog::LOCK;

/// The memory limit around both processes together.
const LIMIT_MIB: u64 = 512;
/// Memory that each process uses when it is its turn. The limit has room for it once, but not twice.
const TURN_MIB: u64 = 300;
const THREADS: u16 = 2;
const CASE: &str = "hog, 512 MiB, 2 threads";

const RECORDS: &str = "records_per_second";
const METRICS: &[&str] = &[FAULTS, RECORDS, "hog_rounds", "refused", "hog_refused", "bursts"];

/// The durations of a sample, in ms.
pub struct Times {
    warm_ms: u64,
    measure_ms: u64,
    burst_every_ms: u64,
    pause_ms: u64,
}

/// Runs the case under every subject; adds rows and a verdict to the report.
pub fn run(common: &Common, ready: &[Ready], report: &mut Report) -> Result<()> {
    let is_limited = match limit() {
        Ok(()) => true,
        Err(why) => {
            report.gap(format!("hog: without a limit around workload and hog, since {why}"));
            false
        }
    };
    let times = Times::new(common);
    let progress = Progress::new(ready.len() * common.rounds());
    let mut book = Book::new();
    for round in 0..common.rounds() {
        for index in 0..ready.len() {
            let subject = &ready[(index + round) % ready.len()];
            progress.step(&format!("with a hog, {}", subject.name()));
            match sample(subject, &times, is_limited)? {
                Ok(outcome) => book.enter(&CASE, subject.name(), METRICS, &outcome),
                Err(gap) => report.gap(gap),
            }
        }
    }
    drop(progress);
    rows(report, &book, ready);
    report.verdict(verdict(&book, ready));
    Ok(())
}

/// Takes one sample of a subject in a new cgroup. The inner error is a sentence for the list of gaps.
fn sample(ready: &Ready, times: &Times, is_limited: bool) -> Result<std::result::Result<Outcome, String>> {
    let folder = tempfile::tempdir().map_err(doing("making a folder for the lock"))?;
    let launcher = match launcher(ready, folder.path(), times, is_limited)? {
        Ok(launcher) => launcher,
        Err(gap) => return Ok(Err(gap)),
    };
    sample_of(ready.name(), &launcher, folder.path(), is_limited, &[])
}

/// Takes one sample: starts workload and hog with the command line `launcher` and the environment `settings`, in a new
/// cgroup if `is_limited`. The inner error is a sentence for the list of gaps.
pub fn sample_of(
    subject: &str,
    launcher: &[String],
    folder: &Path,
    is_limited: bool,
    settings: &[(&str, &str)],
) -> Result<std::result::Result<Outcome, String>> {
    File::create(folder.join(LOCK)).map_err(doing("making the lock"))?;
    let group = match is_limited.then(|| Cgroup::with_limit(LIMIT_MIB << 20)) {
        Some(Ok(group)) => Some(group),
        Some(Err(why)) => return Ok(Err(format!("hog: {subject}: {why}"))),
        None => None,
    };
    let mut command = match &group {
        Some(group) => {
            let entrance = group.entrance().display().to_string();
            let mut command = child::workload(&["__enter", "--entrance", &entrance, "--"])?;
            command.args(launcher);
            command
        }
        None => {
            let mut command = Command::new(&launcher[0]);
            command.args(&launcher[1..]);
            command
        }
    };
    subject::clear_foreign_settings(&mut command);
    command.envs(settings.iter().copied());
    let finished = Running::start(&mut command)?.finish(Duration::from_secs(90))?;
    // The group must outlive the processes in it. It is also removed if an error returned early.
    drop(group);
    child::outcome(subject, &finished).map(Ok)
}

/// Checks that a cgroup with the limit can be made on this machine; the error has the reason.
pub fn limit() -> std::result::Result<(), String> {
    Cgroup::with_limit(LIMIT_MIB << 20).map(|_probe| ()).map_err(|why| why.to_string())
}

impl Times {
    pub fn new(common: &Common) -> Self {
        match common.quick {
            true => Self { warm_ms: 50, measure_ms: 400, burst_every_ms: 300, pause_ms: 100 },
            false => Self { warm_ms: 250, measure_ms: 3000, burst_every_ms: 500, pause_ms: 200 },
        }
    }

    /// Returns the words of the command line that start workload and hog with these durations.
    pub fn pair(&self, folder: &Path) -> impl Iterator<Item = String> {
        let options = [
            ("--threads", u64::from(THREADS)),
            ("--warm-ms", self.warm_ms),
            ("--measure-ms", self.measure_ms),
            ("--burst-mib", TURN_MIB),
            ("--burst-every-ms", self.burst_every_ms),
            ("--mib", TURN_MIB),
            ("--pause-ms", self.pause_ms),
        ];
        let numbers: Vec<String> = child::numbers(&options).collect();
        let folder = ["--folder".to_owned(), folder.display().to_string()];
        ["__pair".to_owned()].into_iter().chain(numbers).chain(folder)
    }
}

/// Returns the command line that starts workload and hog under the subject. In a cgroup with a limit, Pagemill gets no
/// `--limit` option, since it must detect the limit of the group.
fn launcher(
    ready: &Ready,
    folder: &Path,
    times: &Times,
    is_limited: bool,
) -> Result<std::result::Result<Vec<String>, String>> {
    let limit = format!("{LIMIT_MIB}M");
    let told = ["--limit", &limit];
    let mut line = match ready.launcher(if is_limited { &[] } else { &told }) {
        Ok(line) => line,
        Err(gap) => return Ok(Err(format!("hog: {gap}"))),
    };
    line.push(child::own_executable()?.display().to_string());
    line.extend(times.pair(folder));
    Ok(Ok(line))
}

fn rows(report: &mut Report, book: &Book<&'static str>, ready: &[Ready]) {
    let metrics = [
        (RECORDS, "1/s", Some("glibc-eager"), "records/s"),
        ("hog_rounds", "rounds", None, "turns of the hog"),
        ("refused", "calls", None, "refused"),
        ("hog_refused", "calls", None, "refused to the hog"),
    ];
    for subject in ready {
        for (name, unit, baseline, column) in metrics {
            let place = Place {
                table: format!(
                    "ebizzy with a hog: {THREADS} threads, {LIMIT_MIB} MiB around both, {TURN_MIB} MiB by turns"
                ),
                column: column.to_owned(),
            };
            let metric = Metric { name, unit, better: Better::Higher, baseline };
            report_row(report, book, (&CASE, CASE), subject.name(), metric, Some(place));
        }
    }
}

fn verdict(book: &Book<&'static str>, ready: &[Ready]) -> Verdict {
    let bound = Bound::AtLeast(6.0);
    let target = "ebizzy with a hog, against the best returning at once";
    let Some(series) = book.get(&CASE, PAGEMILL, RECORDS) else {
        return not_measured(target, bound, "x", "pagemill was not run");
    };
    let refusals: f64 = ["refused", "hog_refused"]
        .iter()
        .filter_map(|metric| book.get(&CASE, PAGEMILL, metric))
        .flat_map(|series| series.values())
        .sum();
    let eager = ready.iter().filter(|ready| ready.subject.role == Role::ReturningAtOnce);
    let eager = eager.filter(|ready| {
        let faults = book.get(&CASE, ready.name(), FAULTS).and_then(Series::median);
        faults.is_some_and(|faults| faults >= RETURNING_FAULTS)
    });
    let best = best_survivor(book, eager);
    let is_lost = !series.survived() || refusals > 0.0;
    let Some((name, best)) = best else {
        let why = "no subject that returns at once survived";
        return Verdict { is_lost, ..not_measured(target, bound, "x", why) };
    };
    let note = match is_lost {
        true => format!("best: {name}; pagemill was killed or refused"),
        false => format!("best: {name}"),
    };
    let peers = ready.iter().filter(|ready| ready.name() != PAGEMILL);
    let note = match best_survivor(book, peers) {
        Some((name, peer)) if !is_lost => {
            let ratio = stats::median(&series.ratios(peer, Better::Higher)).unwrap_or_default();
            format!("{note}; {ratio:.2} x the best of all survivors, {name}")
        }
        _ => note,
    };
    Verdict {
        estimate: stats::estimate(&series.ratios(best, Better::Higher)),
        baseline: "best-eager".to_owned(),
        is_lost,
        ..not_measured(target, bound, "x", &note)
    }
}

fn best_survivor<'a>(
    book: &'a Book<&'static str>,
    ready: impl Iterator<Item = &'a Ready>,
) -> Option<(&'static str, &'a Series)> {
    let survivors = ready.filter_map(|ready| {
        let series = book.get(&CASE, ready.name(), RECORDS)?;
        series.survived().then_some((ready.name(), series))
    });
    survivors.max_by(|(_, a), (_, b)| {
        let (a, b) = (a.median().unwrap_or_default(), b.median().unwrap_or_default());
        a.total_cmp(&b)
    })
}
