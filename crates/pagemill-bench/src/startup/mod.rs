//! Startup cost of a preloaded library in a program that does nothing. Also the CPU time that `pagemill run` adds to
//! trees of short programs.

mod trees;

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use crate::child;
use crate::error::{Error, Result, doing};
use crate::experiment::{CommonOptions, Metric, Named, Progress, SampleTable, not_measured, report_rows};
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

pub fn run(options: &Options) -> Result<Report> {
    let common = &options.common;
    let is_wanted = |subject: &subject::Subject| subject.role != Role::ReturningAtOnce;
    let mut report = Report::new("startup", common.json);
    let ready = report.with_gaps(subject::select_available(&common.only, is_wanted)?);
    let samples = measure_cases(&ready, common)?;
    let names: Vec<&str> = subject_names(&ready).collect();
    let columns =
        [(Metric::lower(WALL_MS, "ms").against(BASELINE), "ms"), (Metric::lower(ADDED_MS, "ms"), "ms more than none")];
    let table = "`true`: ms from start to end, half the spread, times none";
    report_rows(&mut report, &samples, (&CASE, CASE), &names, table, &columns);
    let verdict = not_measured("start of `true`, more than without", Bound::AtMost(1.0), "ms", "");
    report.add_verdict(match samples.get((&CASE, PAGEMILL, ADDED_MS)) {
        Some(series) => {
            Verdict { estimate: stats::estimate_median(&series.values()), baseline: BASELINE.to_owned(), ..verdict }
        }
        None => Verdict { note: "pagemill was not run".to_owned(), ..verdict },
    });
    if common.is_wanted(PAGEMILL) {
        trees::run(options, &mut report)?;
    }
    Ok(report)
}

/// Returns the names of the baseline and of all preloaded subjects.
fn subject_names(ready: &[AvailableSubject]) -> impl Iterator<Item = &'static str> {
    let preloaded = ready.iter().filter(|ready| ready.preload().is_some());
    [BASELINE].into_iter().chain(preloaded.map(Named::name))
}

fn measure_cases(ready: &[AvailableSubject], common: &CommonOptions) -> Result<SampleTable<&'static str>> {
    let program = true_program()?;
    let preloaded: Vec<&AvailableSubject> = ready.iter().filter(|ready| ready.preload().is_some()).collect();
    let runs = common.quick_or_full(RUNS_PER_SAMPLE);
    let progress = Progress::new(common.rounds() * runs);
    let mut samples = SampleTable::new();
    for round in 0..common.rounds() {
        let mut times = vec![Vec::with_capacity(runs); preloaded.len() + 1];
        for run in 0..runs {
            progress.step(program);
            child::check_interrupt()?;
            for index in 0..times.len() {
                let index = (index + run + round) % times.len();
                let subject = index.checked_sub(1).map(|index| preloaded[index]);
                times[index].push(run_for_wall_ms(program, subject)?);
            }
        }
        let medians: Vec<f64> = times.iter().filter_map(|times| stats::median(times)).collect();
        for (name, &median) in subject_names(ready).zip(&medians) {
            samples.add_value(&CASE, name, WALL_MS, median);
            if name != BASELINE {
                samples.add_value(&CASE, name, ADDED_MS, median - medians[0]);
            }
        }
    }
    Ok(samples)
}

fn true_program() -> Result<&'static str> {
    let known = ["/usr/bin/true", "/bin/true"];
    let found = known.into_iter().find(|path| std::path::Path::new(path).exists());
    found.ok_or_else(|| Error::CannotRun("there is no program `true`".to_owned()))
}

/// Runs the program once and returns its duration in milliseconds. The program takes only a moment, so it needs no
/// process group and no timeout.
fn run_for_wall_ms(program: &str, ready: Option<&AvailableSubject>) -> Result<f64> {
    let mut command = Command::new(program);
    match ready {
        Some(ready) => ready.apply(&mut command),
        None => subject::clear_foreign_settings(&mut command),
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let begun = Instant::now();
    let mut running = command.spawn().map_err(doing(format!("starting {program}")))?;
    let status = running.wait().map_err(doing(format!("waiting for {program}")))?;
    let took = begun.elapsed();
    match status.success() {
        true => Ok(took.as_secs_f64() * 1e3),
        false => {
            let name = ready.map_or(BASELINE, Named::name);
            Err(Error::WrongAnswer { subject: name.to_owned(), what: format!("`true` ended with {status}") })
        }
    }
}
