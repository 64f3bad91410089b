//! Loads that fragment an allocator's memory: random churn, pandas, and programs of mimalloc-bench. Measures the memory
//! of each phase and the CPU time.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use super::programs::{is_installed, prepare_python, recorded_python_path};
use super::tree::TreeSampler;
use super::{BASELINE, Options, WALL_SECONDS};
use crate::child::{self, Outcome, RunningGroup};
use crate::error::{Error, Result, doing};
use crate::experiment::{CommonOptions, Metric, Named, SampleTable, Study, metric_names, not_measured};
use crate::report::{Bound, Report, Verdict};
use crate::stats::{self, Better};
use crate::subject::{self, AvailableSubject, PAGEMILL};

/// Metric: peak of the resident memory of the load's largest process.
const PROCESS_PEAK_MIB: &str = "process_peak_mib";
/// Metric: median of the resident memory while the load runs, without the first quarter of its samples.
const STEADY_MIB: &str = "steady_mib";
/// Metric: median of the resident memory in the last quarter of the run.
const LAST_QUARTER_MIB: &str = "last_quarter_mib";
/// Metric: median of the total size of the load's live allocations, over the same samples as [`STEADY_MIB`].
const LIVE_MIB: &str = "live_mib";
/// Metric: resident memory after all allocations were freed and the process slept for a while.
const AFTER_FREEING_MIB: &str = "after_mib";
/// Metric: CPU time of the run, for loads with a fixed amount of work.
const CPU: &str = "cpu_s";
/// Metric: CPU time per operation, for loads that run for a fixed time.
const CPU_PER_OPERATION: &str = "cpu_us_per_act";

/// Maximum of Pagemill's memory in each phase, relative to glibc's.
const MAX_MEMORY_RATIO: f64 = 1.10;
/// Maximum of Pagemill's CPU time, relative to [`CPU_BASELINE`].
const MAX_CPU_RATIO: f64 = 1.10;
/// The subject with which CPU times are compared.
const CPU_BASELINE: &str = "jemalloc";

/// The metrics, and their columns of the table.
const COLUMNS: [(Metric, &str); 8] = [
    (Metric::lower(PROCESS_PEAK_MIB, "MiB").against(BASELINE), "peak, MiB"),
    (Metric::lower(STEADY_MIB, "MiB").against(BASELINE), "steady"),
    (Metric::lower(LAST_QUARTER_MIB, "MiB").against(BASELINE), "last quarter"),
    (Metric::lower(AFTER_FREEING_MIB, "MiB").against(BASELINE), "after freeing, at rest"),
    // The live bytes depend on the load and not on the allocator, so they have no baseline.
    (Metric::lower(LIVE_MIB, "MiB"), "live"),
    (Metric::lower(CPU, "s").against(CPU_BASELINE), "CPU, s"),
    (Metric::lower(CPU_PER_OPERATION, "us").against(CPU_BASELINE), "CPU, us an act"),
    (Metric::lower(WALL_SECONDS, "s").against(BASELINE), "wall, s"),
];

/// A program of mimalloc-bench: its sources below the folder `bench`, extra compiler flags, and its arguments in
/// bench.sh. The argument `N` means the number of CPUs.
struct BenchProgram {
    name: &'static str,
    compiler: &'static str,
    sources: &'static [&'static str],
    flags: &'static [&'static str],
    arguments: &'static [&'static str],
    /// The run time, if it is fixed. A program with a fixed run time prints its operations per second.
    seconds: Option<f64>,
}

const fn c_program(
    name: &'static str,
    sources: &'static [&'static str],
    arguments: &'static [&'static str],
) -> BenchProgram {
    BenchProgram { name, compiler: "cc", sources, flags: &[], arguments, seconds: None }
}

const fn cpp_program(
    name: &'static str,
    sources: &'static [&'static str],
    arguments: &'static [&'static str],
) -> BenchProgram {
    BenchProgram { compiler: "c++", flags: &["-std=c++17"], ..c_program(name, sources, arguments) }
}

const BENCH_PROGRAMS: &[BenchProgram] = &[
    c_program("mstress", &["mstress/mstress.c"], &["N", "50", "25"]),
    cpp_program("malloc-large", &["malloc-large/malloc-large.cpp"], &[]),
    BenchProgram {
        flags: &["-std=c++17", "-fsized-deallocation", "-DCPP=1", "-DSIZED=1"],
        seconds: Some(5.0),
        ..cpp_program("larson", &["larson/larson.cpp"], &["5", "8", "1000", "5000", "100", "4141", "N"])
    },
    c_program(
        "rptest",
        &["rptest/rptest.c", "rptest/thread.c", "rptest/timer.c"],
        &["N", "0", "1", "2", "500", "1000", "100", "8", "16000"],
    ),
];

const CHURN: &str = "churn";
const PANDAS: &str = "pandas";

/// A Python script that builds, joins, groups and appends tables of pandas, drops all of them, and sleeps. It prints
/// its memory before the drop and after the sleep, and a sum by which the results of runs are compared.
const PANDAS_SCRIPT: &str = "
import gc, json, os, sys, time
import pandas
rows, rest = int(sys.argv[1]), float(sys.argv[2])
def resident():
    with open('/proc/self/statm') as statm:
        return int(statm.read().split()[1]) * os.sysconf('SC_PAGE_SIZE') / 2**20
numbers = pandas.Series(range(rows))
left = pandas.DataFrame({'key': numbers * 7919 % 5003, 'value': numbers / 3, 'name': ('n' + (numbers % 1009).astype(str))})
right = pandas.DataFrame({'key': range(5003), 'weight': [i % 17 / 4 for i in range(5003)]})
total = 0.0
for turn in range(4):
    joined = left.merge(right, on='key')
    joined['product'] = joined['value'] * joined['weight']
    grouped = joined.groupby('name').agg({'product': 'sum', 'value': 'mean'})
    longer = pandas.concat([joined, left], ignore_index=True)
    texts = longer['name'].str.upper()
    total += float(grouped['product'].sum()) + float(longer['value'].sum()) + len(set(texts))
    left.loc[left.index % 4 == turn, 'value'] += 1
full = resident()
del numbers, left, right, joined, grouped, longer, texts
gc.collect()
time.sleep(rest)
print(json.dumps({'steady_mib': full, 'after_mib': resident(), 'answer': repr(round(total, 3))}))
";

pub fn names() -> impl Iterator<Item = &'static str> {
    [CHURN, PANDAS].into_iter().chain(BENCH_PROGRAMS.iter().map(|bench_program| bench_program.name))
}

/// A program that fragments memory, and how its output is read.
struct Load {
    name: &'static str,
    command: Box<dyn Fn() -> Result<Command>>,
    /// Converts the standard output of the load's program into a JSON object with metrics.
    read: fn(&[u8]) -> std::result::Result<serde_json::Value, String>,
    seconds: Option<f64>,
}

/// Measures the named loads, which fragment memory; adds rows and verdicts to the report.
pub fn run(options: &Options, names: &[&'static str], ready: &[AvailableSubject], report: &mut Report) -> Result<()> {
    let common = &options.common;
    let mut study = Study::new(report, |name: &&str| (*name).to_owned());
    for &name in names {
        let folder = tempfile::tempdir().map_err(doing("making a folder for a load"))?;
        if let Some(load) = study.report.unless_gap(prepare(options, name, folder.path()))? {
            measure_load(&load, common, ready, &mut study)?;
        }
    }
    for &name in names {
        let table = format!("{name}: memory, half the spread, times {BASELINE}; CPU, times {CPU_BASELINE}");
        study.rows(&name, ready, &table, &COLUMNS);
    }
    for &name in names {
        add_verdicts(study.report, &study.samples, name);
    }
    Ok(())
}

/// Prepares the load with this name: compiles its program, or writes its script.
///
/// # Errors
///
/// [`Error::Gap`] if it cannot run.
fn prepare(options: &Options, name: &'static str, folder: &Path) -> Result<Load> {
    let common = &options.common;
    match BENCH_PROGRAMS.iter().find(|bench_program| bench_program.name == name) {
        Some(bench_program) => compile_program(bench_program, options.mimalloc_bench.as_deref(), folder),
        None if name == PANDAS => pandas_load(common, folder),
        None => Ok(churn_load(common)),
    }
}

fn churn_load(common: &CommonOptions) -> Load {
    let numbers = common.quick_or_full((
        [("--threads", 4), ("--mib", 64), ("--run-ms", 300), ("--rest-ms", 200)],
        [("--threads", 8), ("--mib", 350), ("--run-ms", 20_000), ("--rest-ms", 15_000)],
    ));
    let command = move || {
        let mut command = child::workload_command(["__churn"])?;
        command.args(child::numeric_options(&numbers));
        Ok(command)
    };
    Load { name: CHURN, command: Box::new(command), read: parse_json, seconds: None }
}

fn pandas_load(common: &CommonOptions, folder: &Path) -> Result<Load> {
    if !is_installed("python3") {
        return Err(Error::Gap(format!("{PANDAS}: python3 is not installed")));
    }
    prepare_python(folder).map_err(doing("preparing pandas"))?;
    let python = recorded_python_path(folder).map_err(doing("finding python3"))?;
    let mut probe = Command::new(&python);
    probe.args(["-c", "import pandas"]).stdin(Stdio::null()).stderr(Stdio::null());
    subject::clear_foreign_settings(&mut probe);
    if !probe.status().is_ok_and(|status| status.success()) {
        return Err(Error::Gap(format!("{PANDAS}: python3 cannot import it; to have it: pip install pandas")));
    }
    let script = folder.join("tables.py");
    fs::write(&script, PANDAS_SCRIPT).map_err(doing("preparing pandas"))?;
    let (rows, rest) = common.quick_or_full((("20000", "0.2"), ("2000000", "15")));
    let command = move || {
        let mut command = Command::new(&python);
        command.arg(&script).args([rows, rest]).env("PYTHONHASHSEED", "0");
        Ok(command)
    };
    Ok(Load { name: PANDAS, command: Box::new(command), read: parse_json, seconds: None })
}

/// Compiles a program of mimalloc-bench with the flags of its CMakeLists.txt.
fn compile_program(bench_program: &'static BenchProgram, checkout: Option<&Path>, folder: &Path) -> Result<Load> {
    let name = bench_program.name;
    let gap = |what: String| Err(Error::Gap(format!("{name}: {what}")));
    let Some(checkout) = checkout else {
        return gap(
            "--mimalloc-bench DIR names no checkout; to have one: git clone https://github.com/daanx/mimalloc-bench"
                .to_owned(),
        );
    };
    let sources: Vec<PathBuf> =
        bench_program.sources.iter().map(|source| checkout.join("bench").join(source)).collect();
    if let Some(missing) = sources.iter().find(|source| !source.is_file()) {
        return gap(format!("{} is not there", missing.display()));
    }
    let program = folder.join(name);
    let mut compiler = Command::new(bench_program.compiler);
    compiler.args(["-O3", "-DNDEBUG", "-w"]).args(bench_program.flags).args(&sources).arg("-o").arg(&program);
    compiler.args(sources.iter().filter_map(|source| Some(format!("-I{}", source.parent()?.display()))));
    compiler.args(["-pthread", "-lm"]);
    if !is_installed(bench_program.compiler) {
        return gap(format!("{} is not installed", bench_program.compiler));
    }
    let finished = RunningGroup::start(&mut compiler)?.finish(Duration::from_secs(120))?;
    if !finished.status.success() {
        let complaint = String::from_utf8_lossy(&finished.stderr).lines().next().unwrap_or_default().to_owned();
        return gap(format!("does not compile: {complaint}"));
    }
    let cpus = std::thread::available_parallelism().map_or(1, usize::from).to_string();
    let folder = folder.to_owned();
    let command = move || {
        let mut command = Command::new(&program);
        command.args(bench_program.arguments.iter().map(|word| if *word == "N" { cpus.as_str() } else { *word }));
        command.current_dir(&folder);
        Ok(command)
    };
    Ok(Load { name, command: Box::new(command), read: parse_printed_rate, seconds: bench_program.seconds })
}

fn parse_json(stdout: &[u8]) -> std::result::Result<serde_json::Value, String> {
    serde_json::from_slice(stdout).map_err(|cause| format!("unreadable result: {cause}"))
}

/// Parses the operations per second that a program with a fixed run time prints.
fn parse_printed_rate(stdout: &[u8]) -> std::result::Result<serde_json::Value, String> {
    let text = String::from_utf8_lossy(stdout);
    let rate =
        text.split_once("Throughput =").and_then(|(_, rest)| rest.split_whitespace().next()?.parse::<f64>().ok());
    Ok(serde_json::json!({ OPERATIONS_PER_SECOND: rate }))
}

/// Key of a load's JSON line with the operations per second of a program with a fixed run time.
const OPERATIONS_PER_SECOND: &str = "operations_per_second";

fn measure_load(
    load: &Load,
    common: &CommonOptions,
    ready: &[AvailableSubject],
    study: &mut Study<'_, &'static str>,
) -> Result<()> {
    let mut answer = None;
    study.measure_by_case((&[load.name], common.rounds()), ready, &metric_names(&COLUMNS), |name, subject| {
        let outcome = take_sample(load, subject)?;
        if let Outcome::Measured(line) = &outcome {
            let expected = answer.get_or_insert_with(|| line["answer"].clone());
            if *expected != line["answer"] {
                let what = format!("{name} came to {}, not to {expected}", line["answer"]);
                return Err(Error::WrongAnswer { subject: subject.name().to_owned(), what });
            }
        }
        Ok(outcome)
    })
}

fn take_sample(load: &Load, ready: &AvailableSubject) -> Result<Outcome> {
    let mut command = (load.command)()?;
    ready.apply(&mut command);
    let running = RunningGroup::start(&mut command)?;
    let watch = TreeSampler::start(running.id(), ready.preload(), false);
    let finished = running.finish(Duration::from_secs(300))?;
    let peaks = watch.stop();
    if !finished.status.success() {
        return child::classify(ready.name(), &finished);
    }
    if !peaks.has_mapped_library {
        return Ok(Outcome::Failed("the preload was not mapped in it".to_owned()));
    }
    let mut line = match (load.read)(&finished.stdout) {
        Ok(line) => line,
        Err(why) => return Ok(Outcome::Failed(why)),
    };
    line[PROCESS_PEAK_MIB] = stats::mib(peaks.largest_process).into();
    line[WALL_SECONDS] = finished.wall.as_secs_f64().into();
    let cpu = finished.cpu.as_secs_f64();
    match load.seconds {
        Some(seconds) => match line[OPERATIONS_PER_SECOND].as_f64() {
            Some(rate) => line[CPU_PER_OPERATION] = (cpu * 1e6 / (rate * seconds)).into(),
            None => return Ok(Outcome::Failed("it printed no rate".to_owned())),
        },
        // The bench's own load (`churn`) has a fixed run time and reports the CPU time per operation itself.
        None if line[CPU_PER_OPERATION].is_null() => line[CPU] = cpu.into(),
        None => {}
    }
    Ok(Outcome::Measured(line))
}

fn add_verdicts(report: &mut Report, samples: &SampleTable<&'static str>, name: &'static str) {
    let memory_targets = [
        (PROCESS_PEAK_MIB, "peak"),
        (STEADY_MIB, "steady"),
        (LAST_QUARTER_MIB, "last quarter"),
        (AFTER_FREEING_MIB, "after freeing"),
    ];
    let memory_targets = memory_targets.map(|(metric, what)| (metric, what, MAX_MEMORY_RATIO, BASELINE));
    let cpu = [(CPU, "CPU", MAX_CPU_RATIO, CPU_BASELINE), (CPU_PER_OPERATION, "CPU", MAX_CPU_RATIO, CPU_BASELINE)];
    for (metric, what, most, baseline) in memory_targets.into_iter().chain(cpu) {
        let (Some(own), Some(base)) = (samples.get((&name, PAGEMILL, metric)), samples.get((&name, baseline, metric)))
        else {
            continue;
        };
        let was_lost = own.killed + own.failures.len() > 0;
        // The median is missing if the load has no such phase, or if it reports CPU time per operation instead of the
        // total, or the reverse.
        if own.median().is_none() && !(was_lost && metric == PROCESS_PEAK_MIB) {
            continue;
        }
        let target = format!("{name}, {what}, against {baseline}");
        report.add_verdict(Verdict {
            // The ratio is own value divided by baseline, so a larger ratio is worse here.
            estimate: stats::estimate_median(&own.ratios(base, Better::Higher)),
            baseline: baseline.to_owned(),
            has_lost_round: was_lost,
            ..not_measured(target, Bound::AtMost(most), "x", "")
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The memory of each phase of a load must have one verdict against glibc, and its CPU time one against jemalloc.
    /// Metrics that the load does not report must have no verdict.
    #[test]
    fn every_phase_is_judged() {
        let mut samples = SampleTable::new();
        for (name, mib, cpu) in [(BASELINE, 100.0, 1.0), (CPU_BASELINE, 300.0, 2.0), (PAGEMILL, 120.0, 2.1)] {
            let line = serde_json::json!({ PROCESS_PEAK_MIB: mib, AFTER_FREEING_MIB: mib, CPU: cpu });
            (0..3).for_each(|_| {
                samples.add_outcome(&CHURN, name, &metric_names(&COLUMNS), &Outcome::Measured(line.clone()))
            });
        }
        let mut report = Report::new("footprint", false);

        add_verdicts(&mut report, &samples, CHURN);

        let lines: Vec<(String, f64)> = report
            .verdicts()
            .iter()
            .map(|verdict| (verdict.target.clone(), verdict.estimate.expect("both were run").value))
            .collect();
        let expected = [("churn, peak, against glibc", 1.2), ("churn, after freeing, against glibc", 1.2)];
        let expected = expected.into_iter().chain([("churn, CPU, against jemalloc", 1.05)]);
        assert!(lines.iter().map(|(target, value)| (target.as_str(), *value)).eq(expected), "{lines:?}");
    }

    /// The operations per second must be parsed from the output of the program larson. Output without a rate must give
    /// none.
    #[test]
    fn printed_rate_is_parsed() {
        let larson = b"Throughput = 51871522 operations per second, relative time: 19.278s.\nDone sleeping...\n";

        assert_eq!(parse_printed_rate(larson).expect("any text will do")[OPERATIONS_PER_SECOND], 51_871_522.0);
        assert!(parse_printed_rate(b"done\n").expect("any text will do")[OPERATIONS_PER_SECOND].is_null());
    }
}
