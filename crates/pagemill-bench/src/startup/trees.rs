//! CPU time that `pagemill run` adds to a process tree: one short program, a thousand short programs, a configure
//! script.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use super::{Options, true_program};
use crate::child::{self, FinishedProcess, RunningGroup};
use crate::error::{Error, Result, doing};
use crate::experiment::{Metric, Progress, SampleTable, not_measured, report_json_rows, report_rows};
use crate::footprint::is_installed;
use crate::native;
use crate::report::{Bound, Report};
use crate::stats::Better;
use crate::subject::{self, PAGEMILL};

/// Number of starts of `true` per sample (quick, full). The CPU times of a sample are summed.
const START_COUNT: (usize, usize) = (20, 100);
/// Number of short programs that one shell starts in a sample (quick, full).
const SHORT_PROGRAM_COUNT: (u32, u32) = (50, 1000);

/// Maximum of the CPU time that `pagemill run` adds to a program, divided by the CPU time that a minimal launcher
/// ([`SPAWNER`]) adds.
const MAX_ADDED_RATIO: f64 = 1.5;
/// Maximum of the CPU time of [`SHORT_PROGRAMS`] under `pagemill run`, divided by the CPU time without a launcher.
const MAX_PROGRAMS_RATIO: f64 = 1.15;
/// Maximum of the CPU time of [`CONFIGURE`] under `pagemill run`, divided by the CPU time without a launcher.
const MAX_CONFIGURE_RATIO: f64 = 1.05;

/// Subject: the program is started without a launcher.
const PLAIN: &str = "none";
/// Subject: the program is started by a minimal launcher ([`SPAWNER_SOURCE`]).
const SPAWNER: &str = "spawner";

/// Case: one program that does nothing.
const RUN_TRUE: &str = "run true";
/// Case: a shell that starts [`SHORT_PROGRAM_COUNT`] short programs.
const SHORT_PROGRAMS: &str = "short programs";
/// Case: a configure script.
const CONFIGURE: &str = "configure";

/// Metric: CPU time of the whole process tree.
const CPU_MS: &str = "cpu_ms";
/// Metric: CPU time that the launcher adds to [`PLAIN`].
const ADDED_CPU_MS: &str = "cpu_ms_added";
/// Metric: duration of the run of the process tree.
const WALL_MS: &str = "wall_ms";

/// A C program that starts a program, waits for it and exits with its status. This is the minimum that any waiting
/// launcher must do.
const SPAWNER_SOURCE: &str = "
#include <sys/wait.h>
#include <unistd.h>
int main(int argc, char **argv) {
    int status = 0;
    pid_t child = fork();
    if (child == 0) {
        execvp(argv[1], argv + 1);
        _exit(127);
    }
    if (child < 0 || waitpid(child, &status, 0) < 0 || !WIFEXITED(status)) return 126;
    return WEXITSTATUS(status);
}
";

/// Measures the program `true`, many short programs, and a configure script, with and without `pagemill run`. Adds rows
/// and verdicts to the report.
pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let Some(pagemill) = subject::built_file("pagemill") else {
        report.add_gap("startup, trees: the command is not built: cargo build --release -p pagemill-cli");
        return Ok(());
    };
    let mut samples = SampleTable::new();
    let folder = tempfile::tempdir().map_err(doing("making a folder for a program"))?;
    if let Some(spawner) = report.unless_gap(compile_spawner(folder.path()))? {
        measure_true(options, &pagemill, &spawner, &mut samples)?;
    }
    measure_short_programs(options, &pagemill, &mut samples)?;
    match &options.configure {
        Some(source) => measure_configure(options, &pagemill, source, &mut samples)?,
        None => report.add_gap(
            "startup, configure: --configure DIR names no folder with a configure script, such as the source of GNU hello",
        ),
    }
    add_rows(report, &samples);
    add_verdicts(report, &samples, options);
    Ok(())
}

/// Compiles [`SPAWNER_SOURCE`] with `cc`, and returns the path of the program.
///
/// # Errors
///
/// [`Error::Gap`] if it was not compiled.
fn compile_spawner(folder: &Path) -> Result<PathBuf> {
    if !is_installed("cc") {
        let what = "startup, run true: cc is not installed, which compiles the spawner that it is compared with";
        return Err(Error::Gap(what.to_owned()));
    }
    let (source, program) = (folder.join("spawner.c"), folder.join("spawner"));
    fs::write(&source, SPAWNER_SOURCE).map_err(doing("writing the spawner"))?;
    let mut compiler = Command::new("cc");
    compiler.arg("-O2").arg(&source).arg("-o").arg(&program);
    let finished = RunningGroup::start(&mut compiler)?.finish(Duration::from_secs(60))?;
    match finished.status.success() {
        true => Ok(program),
        false => Err(Error::Gap("startup, run true: the spawner does not compile".to_owned())),
    }
}

fn measure_true(
    options: &Options,
    pagemill: &Path,
    spawner: &Path,
    samples: &mut SampleTable<&'static str>,
) -> Result<()> {
    let (common, program) = (&options.common, true_program()?);
    let starts = common.quick_or_full(START_COUNT);
    let launchers: [(&'static str, Vec<&Path>); 3] =
        [(PLAIN, vec![]), (SPAWNER, vec![spawner]), (PAGEMILL, vec![pagemill, Path::new("run"), Path::new("--")])];
    let progress = Progress::new(common.rounds() * starts);
    for round in 0..common.rounds() {
        let mut cpu = [Duration::ZERO; 3];
        for start in 0..starts {
            progress.step(RUN_TRUE);
            for index in 0..launchers.len() {
                let index = (index + start + round) % launchers.len();
                let (name, words) = &launchers[index];
                let mut words = words.iter().copied().chain([Path::new(program)]);
                cpu[index] += words.next().map_or(Ok(Duration::ZERO), |first| run_for_cpu_time(name, first, words))?;
            }
        }
        let each = cpu.map(|cpu| cpu.as_secs_f64() * 1e3 / starts as f64);
        for ((name, _), own) in launchers.iter().zip(each) {
            samples.add_value(&RUN_TRUE, name, CPU_MS, own);
            if *name != PLAIN {
                samples.add_value(&RUN_TRUE, name, ADDED_CPU_MS, own - each[0]);
            }
        }
    }
    Ok(())
}

/// Runs a command that must succeed. Returns its CPU time, including that of all descendants that were waited for. The
/// command takes only a moment, so it needs no process group and no timeout.
fn run_for_cpu_time<'a>(name: &str, first: &Path, rest: impl Iterator<Item = &'a Path>) -> Result<Duration> {
    child::check_interrupt()?;
    let mut command = Command::new(first);
    command.args(rest).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    subject::clear_foreign_settings(&mut command);
    let running = command.spawn().map_err(doing(format!("starting {}", first.display())))?;
    let (status, cpu) = native::reap(running.id()).map_err(doing("waiting for a program"))?;
    let status = ExitStatus::from_raw(status);
    match status.success() {
        true => Ok(cpu),
        false => Err(Error::WrongAnswer { subject: name.to_owned(), what: format!("`true` ended with {status}") }),
    }
}

fn measure_short_programs(options: &Options, pagemill: &Path, samples: &mut SampleTable<&'static str>) -> Result<()> {
    let (count, program) = (options.common.quick_or_full(SHORT_PROGRAM_COUNT), true_program()?);
    let script = format!("i=0; while [ $i -lt {count} ]; do {program} || exit 1; i=$((i + 1)); done");
    measure_with_and_without(options, SHORT_PROGRAMS, pagemill, samples, || {
        let mut command = Command::new("sh");
        command.args(["-c", &script]);
        Ok((command, None))
    })
}

/// Runs the configure script in a new folder, like a build outside of the source tree.
fn measure_configure(
    options: &Options,
    pagemill: &Path,
    source: &Path,
    samples: &mut SampleTable<&'static str>,
) -> Result<()> {
    let script = source.join("configure");
    let script = script.canonicalize().map_err(doing(format!("looking for {}", script.display())))?;
    measure_with_and_without(options, CONFIGURE, pagemill, samples, || {
        let folder = tempfile::tempdir().map_err(doing("making a folder for configure"))?;
        let mut command = Command::new(&script);
        command.current_dir(folder.path()).env("CONFIG_SITE", "/dev/null");
        Ok((command, Some(folder)))
    })
}

/// In each round, runs a command without a launcher and under `pagemill run`. Fails unless both runs succeed and print
/// the same output.
fn measure_with_and_without(
    options: &Options,
    case: &'static str,
    pagemill: &Path,
    samples: &mut SampleTable<&'static str>,
    make: impl Fn() -> Result<(Command, Option<tempfile::TempDir>)>,
) -> Result<()> {
    let common = &options.common;
    let progress = Progress::new(common.rounds() * 2);
    // One unmeasured run yields the expected output. It also fills the kernel's page cache.
    let reference = run_once(make()?, None)?;
    for round in 0..common.rounds() {
        for index in 0..2 {
            progress.step(case);
            let is_own = (index + round) % 2 == 1;
            let name = if is_own { PAGEMILL } else { PLAIN };
            let finished = run_once(make()?, is_own.then_some(pagemill))?;
            if !finished.status.success() || finished.stdout != reference.stdout {
                let complaint = String::from_utf8_lossy(&finished.stderr).trim().to_owned();
                let what = format!("{case} ended with {}, or printed something else: {complaint}", finished.status);
                return Err(Error::WrongAnswer { subject: name.to_owned(), what });
            }
            samples.add_value(&case, name, CPU_MS, finished.cpu.as_secs_f64() * 1e3);
            samples.add_value(&case, name, WALL_MS, finished.wall.as_secs_f64() * 1e3);
        }
    }
    Ok(())
}

fn run_once(
    (command, folder): (Command, Option<tempfile::TempDir>),
    pagemill: Option<&Path>,
) -> Result<FinishedProcess> {
    let mut whole = match pagemill {
        None => command,
        Some(pagemill) => {
            let mut whole = Command::new(pagemill);
            whole.args(["run", "--"]).arg(command.get_program()).args(command.get_args());
            whole.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
            if let Some(folder) = &folder {
                whole.current_dir(folder.path());
            }
            whole
        }
    };
    subject::clear_foreign_settings(&mut whole);
    RunningGroup::start(&mut whole)?.finish(Duration::from_secs(300))
}

fn add_rows(report: &mut Report, samples: &SampleTable<&'static str>) {
    let table = "`pagemill run`: CPU of the whole tree, half the spread, times none";
    for case in [RUN_TRUE, SHORT_PROGRAMS, CONFIGURE] {
        let subjects = [PLAIN, SPAWNER, PAGEMILL];
        let columns = [
            (Metric::lower(CPU_MS, "ms").against(PLAIN), &*format!("{case}, ms")),
            (Metric::lower(ADDED_CPU_MS, "ms").against(SPAWNER), &*format!("{case}, ms added")),
        ];
        report_rows(report, samples, (&case, case), &subjects, table, &columns);
        let wall = Metric::lower(WALL_MS, "ms").against(PLAIN);
        report_json_rows(report, samples, (&case, case), &subjects, &[wall]);
    }
}

fn add_verdicts(report: &mut Report, samples: &SampleTable<&'static str>, options: &Options) {
    let count = options.common.quick_or_full(SHORT_PROGRAM_COUNT);
    for (case, metric, baseline, most, target) in [
        (
            RUN_TRUE,
            ADDED_CPU_MS,
            SPAWNER,
            MAX_ADDED_RATIO,
            "CPU that `pagemill run true` adds, against a minimal spawner".to_owned(),
        ),
        (
            SHORT_PROGRAMS,
            CPU_MS,
            PLAIN,
            MAX_PROGRAMS_RATIO,
            format!("CPU of {count} short programs in a run, against none"),
        ),
        (CONFIGURE, CPU_MS, PLAIN, MAX_CONFIGURE_RATIO, "CPU of a configure script in a run, against none".to_owned()),
    ] {
        let blank = not_measured(target, Bound::AtMost(most), "x", "it was not run");
        // The ratio is own time divided by baseline time, so a larger ratio is worse here.
        let base = (baseline, samples.get((&case, baseline, metric)));
        report.add_verdict(blank.compared(samples.get((&case, PAGEMILL, metric)), base, Better::Higher));
    }
}
