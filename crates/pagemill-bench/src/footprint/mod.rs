//! Real programs under every allocator. Measures their peak memory, their memory at rest, and the peak without the free
//! memory that they could return.

mod loads;
mod programs;
mod redis;
mod returning;
mod tree;

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::child::{self, FinishedProcess, Outcome, RunningGroup};
use crate::error::{Error, Result, doing};
use crate::experiment::{
    self, CommonOptions, Metric, Named, SampleTable, Study, check_names, metric_names, not_measured,
};
use crate::report::{Bound, Report, Verdict};
use crate::stats::{Better, mib};
use crate::subject::{self, AvailableSubject, PAGEMILL, PAGEMILL_WITHOUT_AGING, Role};
pub use programs::is_installed;
use programs::{PROGRAMS, Program};
use tree::{TreeMemory, TreePeaks, TreeSampler};

const BASELINE: &str = "glibc";
const REDIS: &str = "redis";
/// Metric: peak of the resident memory, summed over the process tree.
const PEAK_MIB: &str = "peak_mib";
/// Metric: peak of the resident anonymous memory, summed over the process tree.
const PEAK_ANONYMOUS_MIB: &str = "peak_anonymous_mib";
/// Metric: peak of the resident memory of the process tree minus the free memory that the allocator could return at
/// once.
const NET_PEAK_MIB: &str = "net_peak_mib";
/// Metric: largest peak of the resident memory of a single process.
const LARGEST_PROCESS_MIB: &str = "largest_process_mib";
/// Metric: resident memory of a server after two seconds without requests.
const IDLE_MIB: &str = "idle_mib";
/// Metric: as [`IDLE_MIB`], minus the free memory that the allocator could return at once.
const IDLE_NET_MIB: &str = "idle_net_mib";
/// Metric: duration of the run of a program.
const WALL_SECONDS: &str = "wall_s";
/// Metric: throughput of a server.
const REQUESTS_PER_SECOND: &str = "requests_per_second";
/// The metrics, and their columns of the tables.
const COLUMNS: [(Metric, &str); 8] = [
    (Metric::lower(PEAK_MIB, "MiB"), "peak, MiB"),
    (Metric::lower(PEAK_ANONYMOUS_MIB, "MiB"), "anonymous"),
    (Metric::lower(NET_PEAK_MIB, "MiB"), "net of giveable"),
    (Metric::lower(LARGEST_PROCESS_MIB, "MiB"), "largest process"),
    (Metric::lower(IDLE_MIB, "MiB"), "after 2 s idle"),
    (Metric::lower(IDLE_NET_MIB, "MiB"), "idle, net"),
    (Metric::lower(WALL_SECONDS, "s"), "wall, s"),
    (Metric::higher(REQUESTS_PER_SECOND, "1/s"), "GET and SET"),
];

#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    #[command(flatten)]
    pub common: CommonOptions,
    /// Run only these programs: redis, python, python-tests, sqlite3, git, cargo-build, or the loads of --churn
    #[arg(long, value_delimiter = ',', value_name = "PROGRAM")]
    pub programs: Vec<String>,
    /// Run loads instead that fragment an allocator's memory: churn, pandas, mstress, malloc-large, larson, rptest
    #[arg(long, conflicts_with_all = ["programs", "returning"])]
    pub churn: bool,
    /// A checkout of mimalloc-bench, from which the loads mstress, malloc-large, larson and rptest are compiled
    #[arg(long, value_name = "DIR")]
    pub mimalloc_bench: Option<PathBuf>,
    /// Measure instead a process that frees 400 MiB and goes on working: the memory that it still holds up to 15 s
    /// later
    #[arg(long = "return", conflicts_with = "programs")]
    pub returning: bool,
    /// With --return: only allocations of these sizes, such as 512,4K,1M
    #[arg(long, value_name = "SIZES", requires = "returning", value_delimiter = ',', value_parser = pagemill_core::units::parse_bytes)]
    pub sizes: Vec<u64>,
}

/// The measurements of one run of one program.
struct Sample {
    peaks: TreePeaks,
    /// Memory of a server after two seconds without requests; none for other programs.
    idle: Option<TreeMemory>,
    wall: Duration,
    /// Throughput of a server, measured after its memory; none for other programs.
    requests_per_second: Option<f64>,
}

impl Sample {
    fn outcome(&self) -> Outcome {
        if !self.peaks.has_mapped_library {
            return Outcome::Failed("the preload was not mapped in it".to_owned());
        }
        let idle_net = self.idle.and_then(|idle| Some(idle.resident.saturating_sub(idle.giveable?)));
        Outcome::Measured(serde_json::json!({
            PEAK_MIB: mib(self.peaks.resident),
            PEAK_ANONYMOUS_MIB: mib(self.peaks.anonymous),
            NET_PEAK_MIB: self.peaks.net.map(mib),
            LARGEST_PROCESS_MIB: mib(self.peaks.largest_process),
            IDLE_MIB: self.idle.map(|idle| mib(idle.resident)),
            IDLE_NET_MIB: idle_net.map(mib),
            WALL_SECONDS: self.wall.as_secs_f64(),
            REQUESTS_PER_SECOND: self.requests_per_second,
        }))
    }
}

pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let common = &options.common;
    let is_wanted = |subject: &subject::Subject| subject.role != Role::ReturningAtOnce;
    let ready = report.with_gaps(subject::select_available(&common.only, is_wanted)?);
    if options.returning {
        return returning::run(options, &ready, report);
    }
    let (names, loads) = wanted_names(options)?;
    child::touch_beforehand(common.quick_or_full((256, 1024)))?;
    let mut study = Study::new(report, |name: &&str| (*name).to_owned());
    for &name in &names {
        match PROGRAMS.iter().find(|program| program.name == name) {
            Some(program) => measure_program(program, &ready, common, &mut study)?,
            None => measure_redis(&ready, common, &mut study)?,
        }
    }
    for &name in &names {
        add_rows(&mut study, name, &ready);
        add_verdicts(study.report, &study.samples, name);
    }
    loads::run(options, &loads, &ready, report)
}

/// Returns the names of the programs and of the loads that `--programs` lists. Without that option, returns all
/// programs, or all loads if `--churn` is given.
fn wanted_names(options: &Options) -> Result<(Vec<&'static str>, Vec<&'static str>)> {
    let given = &options.programs;
    let programs: Vec<&'static str> = [REDIS].into_iter().chain(PROGRAMS.iter().map(|program| program.name)).collect();
    let loads: Vec<&'static str> = loads::names().collect();
    let known = [programs.as_slice(), &loads].concat();
    check_names("program", given, &known)?;
    let wanted = |names: Vec<&'static str>, is_usual: bool| -> Vec<&'static str> {
        let is_given = |name: &str| given.iter().any(|given| given == name);
        names.into_iter().filter(|name| if given.is_empty() { is_usual } else { is_given(name) }).collect()
    };
    Ok((wanted(programs, !options.churn), wanted(loads, options.churn)))
}

fn measure_program(
    program: &Program,
    ready: &[AvailableSubject],
    common: &CommonOptions,
    study: &mut Study<'_, &'static str>,
) -> Result<()> {
    let folder = tempfile::tempdir().map_err(doing("making a folder for a program"))?;
    if study.report.unless_gap(program.prepare(folder.path()))?.is_none() {
        return Ok(());
    }
    // One unmeasured run without a preload yields the expected output. It also fills the kernel's page cache.
    let reference = run_once(program, None, folder.path())?.0;
    if !reference.status.success() {
        let complaint = String::from_utf8_lossy(&reference.stderr).trim().to_owned();
        study.report.add_gap(format!("{}: fails even without a preload: {complaint}", program.name));
        return Ok(());
    }
    study.measure_by_case((&[program.name], common.rounds()), ready, &metric_names(&COLUMNS), |_, subject| {
        let (finished, sample) = run_once(program, Some(subject), folder.path())?;
        check_output(program, subject, &reference, &finished)?;
        match finished.status.success() {
            true => Ok(sample.outcome()),
            false => child::classify(subject.name(), &finished),
        }
    })
}

fn run_once(program: &Program, ready: Option<&AvailableSubject>, folder: &Path) -> Result<(FinishedProcess, Sample)> {
    let mut command = program.command(folder);
    if let Some(ready) = ready {
        ready.apply(&mut command);
    }
    let running = RunningGroup::start(&mut command)?;
    let watch = TreeSampler::start(
        running.id(),
        ready.and_then(AvailableSubject::preload),
        ready.is_some_and(AvailableSubject::publishes),
    );
    let finished = running.finish(Duration::from_secs(300))?;
    let sample = Sample { peaks: watch.stop(), idle: None, wall: finished.wall, requests_per_second: None };
    Ok((finished, sample))
}

/// Compares the output of a program with that of a run without a preloaded allocator. If the program succeeds but
/// prints something else, its memory had wrong contents.
fn check_output(
    program: &Program,
    ready: &AvailableSubject,
    reference: &FinishedProcess,
    finished: &FinishedProcess,
) -> Result<()> {
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
    ready: &[AvailableSubject],
    common: &CommonOptions,
    study: &mut Study<'_, &'static str>,
) -> Result<()> {
    if let Some(gap) = redis::missing_programs() {
        study.report.add_gap(gap);
        return Ok(());
    }
    let folder = redis::make_folder()?;
    study.measure_by_case((&[REDIS], common.rounds()), ready, &metric_names(&COLUMNS), |_, subject| {
        child::failed_if_gap(redis::run(subject, folder.path()).map(|sample| sample.outcome()))
    })
}

fn add_rows(study: &mut Study<'_, &'static str>, name: &'static str, ready: &[AvailableSubject]) {
    let table = format!("{name}: memory of the whole tree, half the spread, times {BASELINE}");
    let requests_table = format!("{name}: requests a second");
    for (metric, column) in COLUMNS {
        let table = if metric.name == REQUESTS_PER_SECOND { &requests_table } else { &table };
        study.rows(&name, ready, table, &[(metric.against(BASELINE), column)]);
    }
}

fn add_verdicts(report: &mut Report, samples: &SampleTable<&'static str>, name: &'static str) {
    let requests =
        |subject| samples.get((&name, subject, REQUESTS_PER_SECOND)).filter(|series| series.median().is_some());
    if let (Some(own), Some(keeping)) = (requests(PAGEMILL), requests(PAGEMILL_WITHOUT_AGING))
        && let Some(verdict) = experiment::judge_aging_cost(name, &[own.ratios(keeping, Better::Higher)])
    {
        report.add_verdict(verdict);
    }
    let Some(glibc) = samples.get((&name, BASELINE, PEAK_MIB)) else {
        return;
    };
    for (metric, bound, what) in [(PEAK_MIB, 1.1, "peak"), (NET_PEAK_MIB, 1.05, "peak net of what could be given")] {
        let target = format!("{name}, {what}, against {BASELINE}");
        let verdict = not_measured(target, Bound::AtMost(bound), "x", "");
        let pagemill = samples.get((&name, PAGEMILL, metric));
        report.add_verdict(match pagemill {
            None => Verdict { note: "pagemill was not run".to_owned(), ..verdict },
            Some(series) if series.median().is_none() && series.killed + series.failures.len() == 0 => {
                Verdict { note: "the giveable memory was not published".to_owned(), ..verdict }
            }
            // The ratio is own memory divided by baseline memory, so a larger ratio is worse here.
            Some(series) => verdict.compared(Some(series), (BASELINE, Some(glibc)), Better::Higher),
        });
    }
}
