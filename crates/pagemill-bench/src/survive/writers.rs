//! Writers in a cgroup whose limit has room for their live memory, but not also for the memory that they freed.

use std::time::Duration;

use crate::cgroup::Cgroup;
use crate::child::{self, Outcome, Running};
use crate::error::Result;
use crate::experiment::{Book, Metric, Progress, not_measured, report_row};
use crate::report::{Bound, Place, Report, Verdict};
use crate::stats::{self, Better};
use crate::subject::{self, PAGEMILL, Ready, Role};

use super::{LIMIT_MIB, Options};

/// Live memory of all writers together. With the memory freed in one phase it would exceed the limit.
const LIVE_MIB: u64 = 160;
/// A sample must free at least this many times the limit to prove anything. The writers free all that they write.
const FREED_LIMITS: u64 = 2;

const SPEED: &str = "gib_per_second";
const REFUSED: &str = "refused";
const USED: &str = "used_share";
const METRICS: &[&str] = &[SPEED, REFUSED];

/// Number of processes, and number of writers in each process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Case {
    processes: u64,
    writers: u64,
}

impl Case {
    fn name(self) -> String {
        match self.processes {
            1 => format!("{} writers", self.writers),
            many => format!("{many} x {} writers", self.writers),
        }
    }
}

const CASES: [Case; 6] = [
    Case { processes: 1, writers: 2 },
    Case { processes: 1, writers: 4 },
    Case { processes: 1, writers: 8 },
    Case { processes: 2, writers: 1 },
    Case { processes: 2, writers: 2 },
    Case { processes: 2, writers: 4 },
];

/// Runs the cases under every allocator that retains free memory; adds rows and verdicts to the report.
pub fn run(options: &Options, ready: &[Ready], report: &mut Report) -> Result<()> {
    let common = &options.common;
    let ready: Vec<&Ready> = ready.iter().filter(|ready| ready.subject.role != Role::ReturningAtOnce).collect();
    let seconds = options.seconds.unwrap_or(common.pick(1, 60));
    let rounds = common.samples.map_or(common.pick(2, 3), usize::from);
    let progress = Progress::new(CASES.len() * rounds * ready.len());
    let mut book = Book::new();
    for case in CASES {
        for _ in 0..rounds {
            for subject in &ready {
                progress.step(&format!("{}, {}", case.name(), subject.name()));
                match sample(subject, case, seconds)? {
                    Ok((outcome, used_share)) => {
                        book.enter(&case, subject.name(), METRICS, &outcome);
                        if let Outcome::Measured(line) = &outcome {
                            book.enter_value(&case, subject.name(), USED, used_share);
                            let written_gib = line[SPEED].as_f64().unwrap_or(0.0) * (seconds * case.processes) as f64;
                            note_idlers(report, case, subject, written_gib);
                        }
                    }
                    Err(gap) => report.gap(gap),
                }
            }
        }
    }
    drop(progress);
    for case in CASES {
        rows(report, &book, case, &ready);
    }
    CASES.into_iter().for_each(|case| report.verdict(verdict(&book, case)));
    Ok(())
}

/// Adds a gap if a sample freed too little memory to prove anything. The speed of the first process is taken for all.
fn note_idlers(report: &mut Report, case: Case, ready: &Ready, written_gib: f64) {
    if written_gib * 1024.0 < (FREED_LIMITS * LIMIT_MIB) as f64 {
        report.gap(format!(
            "{} {}: a sample freed less than {FREED_LIMITS} times the limit; give it more --seconds",
            ready.name(),
            case.name()
        ));
    }
}

/// Takes one sample in a new cgroup. Returns its outcome, and the cgroup's peak as a fraction of its limit.
fn sample(ready: &Ready, case: Case, seconds: u64) -> Result<std::result::Result<(Outcome, f64), String>> {
    let group = match Cgroup::with_limit(LIMIT_MIB << 20) {
        Ok(group) => group,
        Err(why) => return Ok(Err(format!("survive: {}: {why}", ready.name()))),
    };
    let mut line = match ready.launcher(&[]) {
        Ok(line) => line,
        Err(gap) => return Ok(Err(format!("survive: {gap}"))),
    };
    line.extend([child::own_executable()?.display().to_string(), "__writers".to_owned()]);
    let options = [
        ("--processes", case.processes),
        ("--threads", case.writers),
        ("--mib", LIVE_MIB / case.processes),
        ("--run-ms", seconds * 1000),
    ];
    line.extend(child::numbers(&options));
    let entrance = group.entrance().display().to_string();
    let mut command = child::workload(&["__enter", "--entrance", &entrance, "--"])?;
    command.args(&line);
    subject::clear_foreign_settings(&mut command);
    let finished = Running::start(&mut command)?.finish(Duration::from_secs(seconds + 60))?;
    let used_share = group.peak_bytes().unwrap_or(0) as f64 / (LIMIT_MIB << 20) as f64;
    child::outcome(ready.name(), &finished).map(|outcome| Ok((outcome, used_share)))
}

fn rows(report: &mut Report, book: &Book<Case>, case: Case, ready: &[&Ready]) {
    let metrics =
        [(SPEED, "GiB/s", "written, GiB/s"), (USED, "share", "of the limit used"), (REFUSED, "calls", "refused")];
    for subject in ready {
        for (name, unit, column) in metrics {
            let place = Place {
                table: format!("survive: {} in {LIMIT_MIB} MiB, {LIVE_MIB} MiB held at a time", case.name()),
                column: column.to_owned(),
            };
            let metric = Metric { name, unit, better: Better::Higher, baseline: None };
            report_row(report, book, (&case, &case.name()), subject.name(), metric, Some(place));
        }
    }
}

fn verdict(book: &Book<Case>, case: Case) -> Verdict {
    let target = format!("survive, {}: used of the limit", case.name());
    let blank = not_measured(target, Bound::AtLeast(0.9), "x", "pagemill was not run");
    let Some(series) = book.get(&case, PAGEMILL, SPEED) else { return blank };
    let refused: f64 = book.get(&case, PAGEMILL, REFUSED).map_or(0.0, |series| series.values().iter().sum());
    let is_lost = !series.survived() || refused > 0.0;
    let used = book.get(&case, PAGEMILL, USED).map(|series| series.values()).unwrap_or_default();
    let killed: Vec<_> = ["glibc", "jemalloc", "mimalloc", "tcmalloc"]
        .into_iter()
        .filter(|name| book.get(&case, name, SPEED).is_some_and(|series| series.killed > 0))
        .collect();
    let others =
        if killed.is_empty() { "no peer was killed".to_owned() } else { format!("killed: {}", killed.join(", ")) };
    let note = if is_lost { format!("pagemill was killed or refused; {others}") } else { others };
    Verdict { estimate: stats::estimate(&used), is_lost, note, ..blank }
}
