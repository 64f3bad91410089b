//! Startup cost of a preloaded library in a program that does nothing. Also the CPU time that `pagemill run` adds to
//! trees of short programs.

mod trees;

use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::child;
use crate::error::{Error, Result, doing};
use crate::experiment::{CommonOptions, Metric, Named, Progress, SampleTable, Study, not_measured};
use crate::native;
use crate::report::{Bound, Report, Verdict};
use crate::stats;
use crate::subject::{self, AvailableSubject, PAGEMILL, Role};

/// Number of runs of the program `true` per sample (quick, full). A sample is the median of its runs, so that one
/// outlier does not affect it.
const RUNS_PER_SAMPLE: (usize, usize) = (30, 50);

/// The baseline of all subjects: the program without a preloaded library, under glibc.
const BASELINE: &str = "none";
/// Metric: duration of a run of the program `true`, in milliseconds.
const WALL_MS: &str = "ms";
/// Metric: [`WALL_MS`] minus [`WALL_MS`] of the baseline in the same round.
const ADDED_MS: &str = "ms_more";
/// The only case. Its name is that of the program `true`, which does nothing.
const CASE: &str = "true";

#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    #[command(flatten)]
    pub common: CommonOptions,
    /// A folder with a configure script to run with and without `pagemill run`
    #[arg(long, value_name = "DIR")]
    pub configure: Option<PathBuf>,
}

pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let common = &options.common;
    let is_wanted = |subject: &subject::Subject| subject.role != Role::ReturningAtOnce;
    let ready = report.with_gaps(subject::select_available(&common.only, is_wanted)?);
    let mut study = Study::new(report, |case: &&str| (*case).to_owned());
    let program = true_program()?;
    let preloaded = ready.iter().filter(|ready| ready.preload().is_some());
    let subjects: Vec<(&str, Option<&AvailableSubject>)> =
        [(BASELINE, None)].into_iter().chain(preloaded.map(|ready| (ready.name(), Some(ready)))).collect();
    let counts = (common.rounds(), common.quick_or_full(RUNS_PER_SAMPLE));
    measure_added(&mut study.samples, CASE, &subjects, counts, [WALL_MS, ADDED_MS], stats::median, |(name, ready)| {
        let mut command = Command::new(program);
        match ready {
            Some(ready) => ready.apply(&mut command),
            None => subject::clear_foreign_settings(&mut command),
        }
        Ok(run_briefly(name, &mut command)?.0.as_secs_f64() * 1e3)
    })?;
    let columns =
        [(Metric::lower(WALL_MS, "ms").against(BASELINE), "ms"), (Metric::lower(ADDED_MS, "ms"), "ms more than none")];
    let table = "`true`: ms from start to end, half the spread, times none";
    study.rows(&CASE, &subjects, table, &columns);
    let verdict = not_measured("start of `true`, more than without", Bound::AtMost(1.0), "ms", "");
    study.report.add_verdict(match study.samples.get((&CASE, PAGEMILL, ADDED_MS)) {
        Some(series) => {
            Verdict { estimate: stats::estimate_median(&series.values()), baseline: BASELINE.to_owned(), ..verdict }
        }
        None => Verdict { note: "pagemill was not run".to_owned(), ..verdict },
    });
    if common.is_wanted(PAGEMILL) {
        trees::run(options, report)?;
    }
    Ok(())
}

/// In each round, runs every subject `runs` times, in turn. Adds to the samples of the case what `summarize` makes of a
/// subject's runs, and by how much that exceeds what it makes of the first subject's.
fn measure_added<Subject: Named>(
    samples: &mut SampleTable<&'static str>,
    case: &'static str,
    subjects: &[Subject],
    (rounds, runs): (usize, usize),
    [metric, added]: [&'static str; 2],
    summarize: fn(&[f64]) -> Option<f64>,
    run: impl Fn(&Subject) -> Result<f64>,
) -> Result<()> {
    let progress = Progress::new(rounds * runs);
    for round in 0..rounds {
        let mut times = vec![Vec::with_capacity(runs); subjects.len()];
        for turn in 0..runs {
            progress.step(case);
            for index in (0..subjects.len()).map(|index| (index + turn + round) % subjects.len()) {
                times[index].push(run(&subjects[index])?);
            }
        }
        let of_round: Vec<f64> = times.iter().filter_map(|times| summarize(times)).collect();
        for (index, (subject, own)) in subjects.iter().zip(&of_round).enumerate() {
            samples.add_value(&case, subject.name(), metric, *own);
            if index > 0 {
                samples.add_value(&case, subject.name(), added, own - of_round[0]);
            }
        }
    }
    Ok(())
}

fn true_program() -> Result<&'static str> {
    let known = ["/usr/bin/true", "/bin/true"];
    let found = known.into_iter().find(|path| std::path::Path::new(path).exists());
    found.ok_or_else(|| Error::CannotRun("there is no program `true`".to_owned()))
}

/// Runs a command that must succeed. Returns its duration, and its CPU time including that of all descendants that were
/// waited for. The command takes only a moment, so it needs no process group and no timeout.
fn run_briefly(subject: &str, command: &mut Command) -> Result<(Duration, Duration)> {
    child::check_interrupt()?;
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let program = command.get_program().to_string_lossy().into_owned();
    let begun = Instant::now();
    let running = command.spawn().map_err(doing(format!("starting {program}")))?;
    let (status, cpu) = native::reap(running.id()).map_err(doing(format!("waiting for {program}")))?;
    let (wall, status) = (begun.elapsed(), ExitStatus::from_raw(status));
    match status.success() {
        true => Ok((wall, cpu)),
        false => Err(Error::WrongAnswer { subject: subject.to_owned(), what: format!("`true` ended with {status}") }),
    }
}
