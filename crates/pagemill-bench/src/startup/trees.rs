//! CPU time that `pagemill run` adds to a process tree: one short program, a thousand short programs, a configure
//! script.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::{Options, true_program};
use crate::child::{FinishedProcess, Outcome, RunningGroup};
use crate::error::{Error, Result, doing};
use crate::experiment::{Metric, Study};
use crate::footprint::is_installed;
use crate::report::{Bound, Report};
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
    let mut study = Study::new(report, |case: &&str| (*case).to_owned());
    let folder = tempfile::tempdir().map_err(doing("making a folder for a program"))?;
    if let Some(spawner) = study.report.unless_gap(compile_spawner(folder.path()))? {
        measure_true(options, &pagemill, &spawner, &mut study)?;
    }
    measure_short_programs(options, &pagemill, &mut study)?;
    match &options.configure {
        Some(source) => measure_configure(options, &pagemill, source, &mut study)?,
        None => study.report.add_gap(
            "startup, configure: --configure DIR names no folder with a configure script, such as the source of GNU hello",
        ),
    }
    add_rows(&mut study);
    add_verdicts(&mut study, options);
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

fn measure_true(options: &Options, pagemill: &Path, spawner: &Path, study: &mut Study<'_, &'static str>) -> Result<()> {
    let (common, program) = (&options.common, Path::new(true_program()?));
    let launchers: [(&'static str, Vec<&Path>); 3] =
        [(PLAIN, vec![]), (SPAWNER, vec![spawner]), (PAGEMILL, vec![pagemill, Path::new("run"), Path::new("--")])];
    let counts = (common.rounds(), common.quick_or_full(START_COUNT));
    let mean = |times: &[f64]| Some(times.iter().sum::<f64>() / times.len() as f64);
    super::measure_added(
        &mut study.samples,
        RUN_TRUE,
        &launchers,
        counts,
        [CPU_MS, ADDED_CPU_MS],
        mean,
        |(name, launcher)| {
            let words = [&launcher[..], &[program]].concat();
            let mut command = Command::new(words[0]);
            command.args(&words[1..]);
            subject::clear_foreign_settings(&mut command);
            Ok(super::run_briefly(name, &mut command)?.1.as_secs_f64() * 1e3)
        },
    )
}

fn measure_short_programs(options: &Options, pagemill: &Path, study: &mut Study<'_, &'static str>) -> Result<()> {
    let (count, program) = (options.common.quick_or_full(SHORT_PROGRAM_COUNT), true_program()?);
    let script = format!("i=0; while [ $i -lt {count} ]; do {program} || exit 1; i=$((i + 1)); done");
    measure_with_and_without(options, SHORT_PROGRAMS, pagemill, study, || {
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
    study: &mut Study<'_, &'static str>,
) -> Result<()> {
    let script = source.join("configure");
    let script = script.canonicalize().map_err(doing(format!("looking for {}", script.display())))?;
    measure_with_and_without(options, CONFIGURE, pagemill, study, || {
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
    study: &mut Study<'_, &'static str>,
    make: impl Fn() -> Result<(Command, Option<tempfile::TempDir>)>,
) -> Result<()> {
    // One unmeasured run yields the expected output. It also fills the kernel's page cache.
    let reference = run_once(make()?, None)?;
    study.measure_by_round((&[case], options.common.rounds()), &[PLAIN, PAGEMILL], &[CPU_MS, WALL_MS], |case, name| {
        let finished = run_once(make()?, (*name == PAGEMILL).then_some(pagemill))?;
        if !finished.status.success() || finished.stdout != reference.stdout {
            let complaint = String::from_utf8_lossy(&finished.stderr).trim().to_owned();
            let what = format!("{case} ended with {}, or printed something else: {complaint}", finished.status);
            return Err(Error::WrongAnswer { subject: (*name).to_owned(), what });
        }
        let [cpu_ms, wall_ms] = [finished.cpu, finished.wall].map(|time| time.as_secs_f64() * 1e3);
        Ok(Outcome::Measured(serde_json::json!({ CPU_MS: cpu_ms, WALL_MS: wall_ms })))
    })
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

fn add_rows(study: &mut Study<'_, &'static str>) {
    let table = "`pagemill run`: CPU of the whole tree, half the spread, times none";
    for case in [RUN_TRUE, SHORT_PROGRAMS, CONFIGURE] {
        let subjects = [PLAIN, SPAWNER, PAGEMILL];
        let columns = [
            (Metric::lower(CPU_MS, "ms").against(PLAIN), &*format!("{case}, ms")),
            (Metric::lower(ADDED_CPU_MS, "ms").against(SPAWNER), &*format!("{case}, ms added")),
        ];
        study.rows(&case, &subjects, table, &columns);
        study.json_rows(&case, &subjects, &[Metric::lower(WALL_MS, "ms").against(PLAIN)]);
    }
}

fn add_verdicts(study: &mut Study<'_, &'static str>, options: &Options) {
    let count = options.common.quick_or_full(SHORT_PROGRAM_COUNT);
    let added = "CPU that `pagemill run true` adds, against a minimal spawner";
    let programs = format!("CPU of {count} short programs in a run, against none");
    let configure = "CPU of a configure script in a run, against none";
    for (case, metric, baseline, most, target) in [
        (RUN_TRUE, ADDED_CPU_MS, SPAWNER, MAX_ADDED_RATIO, added),
        (SHORT_PROGRAMS, CPU_MS, PLAIN, MAX_PROGRAMS_RATIO, &programs),
        (CONFIGURE, CPU_MS, PLAIN, MAX_CONFIGURE_RATIO, configure),
    ] {
        let (own, base) = ((&case, PAGEMILL, metric), (&case, baseline, metric));
        study.judge_quotient(target, Bound::AtMost(most), own, base);
    }
}
