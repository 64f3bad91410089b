//! Real programs under every allocator: what they hold at most, at rest, and net of what could be given.

mod programs;
mod redis;
mod tree;

use std::path::Path;
use std::time::Duration;

use crate::child::{self, Finished, Outcome, Running};
use crate::error::{Error, Result, doing};
use crate::experiment::{Book, Common, Metric, Progress, not_measured, report_row};
use crate::report::{Bound, Place, Report, Verdict};
use crate::stats::{self, Better};
use crate::subject::{self, PAGEMILL, Ready, Role};
use programs::{PROGRAMS, Program};
use tree::{Moment, Peaks, Watch};

const BASELINE: &str = "glibc";
const REDIS: &str = "redis";
const PEAK: &str = "peak_mib";
const PEAK_ANONYMOUS: &str = "peak_anonymous_mib";
const NET_PEAK: &str = "net_peak_mib";
const LARGEST: &str = "largest_process_mib";
const IDLE: &str = "idle_mib";
const IDLE_NET: &str = "idle_net_mib";
const WALL: &str = "wall_s";
const METRICS: [&str; 7] = [PEAK, PEAK_ANONYMOUS, NET_PEAK, LARGEST, IDLE, IDLE_NET, WALL];

/// Options of the experiment.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    #[command(flatten)]
    pub common: Common,
    /// Only these programs: redis, python, python-tests, sqlite3, git, cargo-build
    #[arg(long, value_delimiter = ',', value_name = "PROGRAM")]
    pub programs: Vec<String>,
}

/// One run of one program.
struct Sample {
    peaks: Peaks,
    /// Of servers, after a rest.
    idle: Option<Moment>,
    wall: Duration,
}

impl Sample {
    fn line(&self) -> serde_json::Value {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let idle_net = self.idle.and_then(|idle| Some(idle.resident.saturating_sub(idle.giveable?)));
        serde_json::json!({
            PEAK: mib(self.peaks.resident),
            PEAK_ANONYMOUS: mib(self.peaks.anonymous),
            NET_PEAK: self.peaks.net.map(mib),
            LARGEST: mib(self.peaks.largest_process),
            IDLE: self.idle.map(|idle| mib(idle.resident)),
            IDLE_NET: idle_net.map(mib),
            WALL: self.wall.as_secs_f64(),
        })
    }
}

/// Runs it and gives the report.
pub fn run(options: &Options) -> Result<Report> {
    let common = &options.common;
    let is_wanted = |subject: &subject::Subject| subject.role != Role::ReturningAtOnce;
    let (ready, gaps) = subject::select(&common.only, is_wanted)?;
    let mut report = Report::new("footprint", common.json);
    gaps.into_iter().for_each(|gap| report.gap(gap));
    let names = wanted_names(&options.programs)?;
    child::warm(common.pick(256, 512))?;
    let progress = Progress::new(names.len() * common.rounds() * ready.len());
    let mut book = Book::new();
    for &name in &names {
        match PROGRAMS.iter().find(|program| program.name == name) {
            Some(program) => measure(program, &ready, common, &mut book, &mut report, &progress)?,
            None => measure_redis(&ready, common, &mut book, &mut report, &progress)?,
        }
    }
    drop(progress);
    for &name in &names {
        rows(&mut report, &book, name, &ready);
        verdicts(&mut report, &book, name);
    }
    Ok(report)
}

fn wanted_names(given: &[String]) -> Result<Vec<&'static str>> {
    let known: Vec<&'static str> = [REDIS].into_iter().chain(PROGRAMS.iter().map(|program| program.name)).collect();
    if let Some(unknown) = given.iter().find(|name| !known.contains(&name.as_str())) {
        return Err(Error::CannotRun(format!("no program {unknown}; there are {}", known.join(", "))));
    }
    let is_given = |name: &&str| given.is_empty() || given.iter().any(|given| given == name);
    Ok(known.into_iter().filter(is_given).collect())
}

fn measure(
    program: &Program,
    ready: &[Ready],
    common: &Common,
    book: &mut Book<&'static str>,
    report: &mut Report,
    progress: &Progress,
) -> Result<()> {
    let folder = tempfile::tempdir().map_err(doing("making a folder for a program"))?;
    if let Err(gap) = program.prepare(folder.path())? {
        report.gap(gap);
        return Ok(());
    }
    // Once unmeasured, without a preload: what is right, and everything in the page cache.
    let reference = run_once(program, None, folder.path())?.0;
    if !reference.status.success() {
        let complaint = String::from_utf8_lossy(&reference.stderr).trim().to_owned();
        report.gap(format!("{}: fails even without a preload: {complaint}", program.name));
        return Ok(());
    }
    for round in 0..common.rounds() {
        for index in 0..ready.len() {
            let subject = &ready[(index + round) % ready.len()];
            progress.step(&format!("{}, {}", program.name, subject.name()));
            let (finished, sample) = run_once(program, Some(subject), folder.path())?;
            check(program, subject, &reference, &finished)?;
            let outcome = match (finished.status.success(), sample.peaks.saw_library) {
                (true, true) => Outcome::Measured(sample.line()),
                (true, false) => Outcome::Failed("the preload was not seen in it".to_owned()),
                (false, _) => child::outcome(subject.name(), &finished)?,
            };
            book.enter(&program.name, subject.name(), &METRICS, &outcome);
        }
    }
    Ok(())
}

fn run_once(program: &Program, ready: Option<&Ready>, folder: &Path) -> Result<(Finished, Sample)> {
    let mut command = program.command(folder);
    if let Some(ready) = ready {
        ready.apply(&mut command);
    }
    let running = Running::start(&mut command)?;
    let watch = Watch::start(running.id(), ready.and_then(Ready::preload), ready.is_some_and(Ready::publishes));
    let finished = running.finish(Duration::from_secs(300))?;
    let sample = Sample { peaks: watch.stop(), idle: None, wall: finished.wall };
    Ok((finished, sample))
}

/// A program that succeeds with another output than without the preload was given wrong memory.
fn check(program: &Program, ready: &Ready, reference: &Finished, finished: &Finished) -> Result<()> {
    let is_same = !program.is_repeatable || reference.stdout == finished.stdout;
    match is_same || !finished.status.success() {
        true => Ok(()),
        false => Err(Error::WrongAnswer {
            subject: ready.name().to_owned(),
            what: format!("{} printed something else than without a preload", program.name),
        }),
    }
}

fn measure_redis(
    ready: &[Ready],
    common: &Common,
    book: &mut Book<&'static str>,
    report: &mut Report,
    progress: &Progress,
) -> Result<()> {
    if let Some(gap) = redis::gap() {
        report.gap(gap);
        return Ok(());
    }
    let folder = redis::folder()?;
    for round in 0..common.rounds() {
        for index in 0..ready.len() {
            let subject = &ready[(index + round) % ready.len()];
            progress.step(&format!("{REDIS}, {}", subject.name()));
            let outcome = match redis::run(subject, folder.path())? {
                Ok(sample) if sample.peaks.saw_library => Outcome::Measured(sample.line()),
                Ok(_) => Outcome::Failed("the preload was not seen in it".to_owned()),
                Err(why) => Outcome::Failed(why),
            };
            book.enter(&REDIS, subject.name(), &METRICS, &outcome);
        }
    }
    Ok(())
}

fn rows(report: &mut Report, book: &Book<&'static str>, name: &'static str, ready: &[Ready]) {
    let metrics = [
        (PEAK, "MiB", "peak, MiB"),
        (PEAK_ANONYMOUS, "MiB", "anonymous"),
        (NET_PEAK, "MiB", "net of giveable"),
        (LARGEST, "MiB", "largest process"),
        (IDLE, "MiB", "after 2 s idle"),
        (IDLE_NET, "MiB", "idle, net"),
        (WALL, "s", "wall, s"),
    ];
    for (metric, unit, column) in metrics {
        for subject in ready {
            let is_missing = |series: &crate::report::Series| series.median().is_none();
            if metric != PEAK && book.get(&name, subject.name(), metric).is_none_or(is_missing) {
                continue;
            }
            let place = Place {
                table: format!("{name}: memory of the whole tree, half the spread, times {BASELINE}"),
                column: column.to_owned(),
            };
            let metric = Metric { name: metric, unit, better: Better::Lower, baseline: Some(BASELINE) };
            report_row(report, book, (&name, name), subject.name(), metric, Some(place));
        }
    }
}

fn verdicts(report: &mut Report, book: &Book<&'static str>, name: &'static str) {
    let Some(glibc) = book.get(&name, BASELINE, PEAK) else {
        return;
    };
    for (metric, bound, what) in [(PEAK, 1.1, "peak"), (NET_PEAK, 1.05, "peak net of what could be given")] {
        let target = format!("{name}, {what}, against {BASELINE}");
        let verdict = not_measured(target, Bound::AtMost(bound), "x", "");
        let pagemill = book.get(&name, PAGEMILL, metric);
        report.verdict(match pagemill {
            None => Verdict { note: "pagemill was not run".to_owned(), ..verdict },
            Some(series) if series.median().is_none() && series.killed + series.failures.len() == 0 => {
                Verdict { note: "it was not seen what could be given".to_owned(), ..verdict }
            }
            Some(series) => Verdict {
                // Held memory over held memory: here more is worse.
                estimate: stats::estimate(&series.ratios(glibc, Better::Higher)),
                baseline: BASELINE.to_owned(),
                is_lost: !series.survived(),
                ..verdict
            },
        });
    }
}
