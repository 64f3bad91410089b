//! A machine that another process fills at 1 GiB/s. A server that holds free memory must return it at the same rate,
//! before memory is short.
//!
//! This is the only experiment that uses most of the machine's memory. The process that fills the machine (the
//! *filler*) stops at a minimum of available memory (the *floor*). If the kernel had to kill a process, it would kill
//! the filler first.

use std::time::{Duration, Instant};

use pagemill_core::reclaim::kernel::Kernel;
use pagemill_core::reclaim::limits::{Bound as NearestLimit, Limits};

use crate::child::{self, Outcome, RunningGroup};
use crate::error::{Error, Result, doing};
use crate::experiment::{CommonOptions, Metric, Named, SampleTable, Study, metric_names, not_measured};
use crate::proc;
use crate::report::{Bound, Report, Verdict};
use crate::signs::Signs;
use crate::stats;
use crate::subject::{self, AvailableSubject, PAGEMILL, Role};
use crate::workload::host::{FILLED_SIGN, NEARLY_FULL_SIGN, READY_SIGN, STOP_SIGN};

/// Minimum of available memory with which the experiment runs.
const MIN_AVAILABLE_BYTES: u64 = 4 << 30;
/// Number of CPUs that other processes may use. If other processes use more, the machine is not idle enough for the
/// experiment.
const MAX_BUSY_CPUS: f64 = 0.3;

/// MiB that the filler, the process that fills the machine's memory, allocates per second.
const FILL_MIB_PER_SECOND: u64 = 1024;
/// MiB of live memory of the server, the process that also holds free memory.
const LIVE_MIB: u64 = 64;
/// Interval between samples of the memory of the machine, the server and the filler.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(5);
/// Sampling continues for this long after the process that fills the machine (filler) has allocated its last byte.
const SAMPLING_AFTER_END: Duration = Duration::from_millis(500);
/// The server counts as returning memory once its resident memory has fallen by this many bytes. Its own work changes
/// its resident memory by less.
const RETURNING_BYTES: u64 = 128 << 20;

/// Available memory counts as low while it exceeds its minimum over the run by less than this.
const LOW_MARGIN_BYTES: u64 = 256 << 20;
const TIMEOUT: Duration = Duration::from_secs(300);

const CASE: &str = "host";
/// Metric: minimum of available memory, in percent of the machine's memory.
const MIN_AVAILABLE_PERCENT: &str = "least_available_percent";
/// Metric: rate at which the server returned memory while memory was low.
const RETURN_RATE: &str = "gave_gib_per_second";
/// Metric: rate at which the filler, the process that fills the machine, allocated memory.
const FILL_RATE: &str = "filler_gib_per_second";
/// Metric: rate at which the server returned memory, divided by the filler's rate during the same time.
const RETURNED_PER_FILLED: &str = "gave_per_taken";
/// Metric: 99.9th percentile of the duration of malloc in the server while memory was low.
const P999_MS: &str = "p999_ms";
/// Metric: 1 if the filler stopped because available memory fell to its minimum (the floor), else 0.
const STOPPED_AT_FLOOR: &str = "stopped";
/// Metrics that have a column of the table.
const COLUMNS: [(Metric, &str); 9] = [
    (Metric::higher(MIN_AVAILABLE_PERCENT, "%"), "least available, %"),
    (Metric::higher(RETURN_RATE, "GiB/s"), "gave, GiB/s"),
    (Metric::higher(FILL_RATE, "GiB/s"), "taken, GiB/s"),
    (Metric::higher("given_gib", "GiB"), "given, GiB"),
    (Metric::lower(STOPPED_AT_FLOOR, "samples"), "stopped at the floor"),
    (Metric::lower(P999_MS, "ms"), "malloc 99.9th, ms"),
    (Metric::lower("longest_ms", "ms"), "longest, ms"),
    (Metric::lower("quiet_p999_ms", "ms"), "99.9th before, ms"),
    (Metric::lower("quiet_longest_ms", "ms"), "longest before, ms"),
];
/// Metrics that appear in the JSON output only.
const OTHERS: [Metric; 4] = [
    Metric::lower("p50_ms", ""),
    Metric::lower("p99_ms", ""),
    Metric::lower(RETURNED_PER_FILLED, ""),
    Metric::lower("refused", ""),
];

/// The amounts of memory, in bytes, that a run uses on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MemoryPlan {
    total: u64,
    /// Available memory that the server should leave to the machine, in bytes.
    margin: u64,
    /// Available memory at which the filler stops, in bytes.
    floor: u64,
    /// Free memory that the server holds at the start, in bytes.
    free: u64,
}

impl MemoryPlan {
    fn new(total: u64, available: u64) -> Self {
        Self { total, margin: total / 20, floor: total / 40, free: (total / 5 * 2).min(available / 2) }
    }

    /// Returns the MiB that the filler allocates: all available memory down to the margin, and four fifths of the
    /// server's free memory, which the server must return.
    fn filler_mib(&self, available: u64) -> u64 {
        (available + self.free / 5 * 4).saturating_sub(self.margin) >> 20
    }
}

/// Available memory of the machine, and resident memory of the server (which holds free memory) and of the filler
/// (which fills the machine), at one point in time, in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct MachineSample {
    seconds: f64,
    available: u64,
    server: u64,
    filler: u64,
    is_filling: bool,
}

/// Checks that the machine has enough memory, is not limited by a cgroup, and is idle.
///
/// # Errors
///
/// [`Error::CannotRun`] with the reason why the machine must not be filled.
pub fn check_machine() -> Result<()> {
    let available = proc::available_bytes().unwrap_or(0);
    if available < MIN_AVAILABLE_BYTES {
        let (mib, least) = (available >> 20, MIN_AVAILABLE_BYTES >> 20);
        return Err(Error::CannotRun(format!("survive --host needs {least} MiB of available memory; {mib} are")));
    }
    if Kernel::new("").sample().bound == NearestLimit::Group {
        let why = "survive --host fills the machine, but a control group limits this process";
        return Err(Error::CannotRun(why.to_owned()));
    }
    let before = proc::cpu_ticks();
    child::sleep(Duration::from_secs(1))?;
    let busy = match (before, proc::cpu_ticks()) {
        (Some(before), Some(after)) => {
            busy_cpus(before, after, std::thread::available_parallelism().map_or(1, usize::from))
        }
        _ => 0.0,
    };
    match busy > MAX_BUSY_CPUS {
        true => Err(Error::CannotRun(format!("survive --host needs an idle machine; others use {busy:.1} CPUs"))),
        false => Ok(()),
    }
}

fn busy_cpus((busy, all): (u64, u64), (busy_after, all_after): (u64, u64), cpus: usize) -> f64 {
    let passed = all_after.saturating_sub(all).max(1);
    busy_after.saturating_sub(busy) as f64 / passed as f64 * cpus as f64
}

/// Measures how fast a server under each allocator returns free memory while the machine fills up; adds rows and
/// verdicts to the report. Pagemill runs in every round, each other allocator once.
pub fn run(common: &CommonOptions, ready: &[AvailableSubject], report: &mut Report) -> Result<()> {
    let total = proc::total_bytes().ok_or_else(|| Error::CannotRun("there is no /proc/meminfo".to_owned()))?;
    let plan = MemoryPlan::new(total, proc::available_bytes().unwrap_or(0));
    // Touches all available memory once, except twice the margin, which the system itself needs.
    let warm = proc::available_bytes().unwrap_or(0).saturating_sub(2 * plan.margin);
    child::touch_beforehand(warm >> 20)?;
    let rounds = common.rounds_or((1, 3));
    let runs = |_: &&str, ready: &AvailableSubject, round| {
        let is_wanted = !common.only.is_empty() || ready.subject.role != Role::ReturningAtOnce;
        is_wanted && (round == 0 || ready.name() == PAGEMILL)
    };
    let metrics = [metric_names(&COLUMNS), OTHERS.map(|metric| metric.name).to_vec()].concat();
    let order = (0..rounds).map(|round| (&CASE, round));
    let mut study = Study::new(report, |case: &&str| (*case).to_owned());
    study.measure(order, ready, &metrics, runs, |_, subject, _| run_sample(subject, &plan))?;
    let free = plan.free as f64 / f64::from(1 << 30);
    let table = format!(
        "survive: {free:.1} GiB held free, while another process fills the machine at {FILL_MIB_PER_SECOND} MiB/s"
    );
    study.rows(&CASE, ready, &table, &COLUMNS);
    study.json_rows(&CASE, ready, &OTHERS);
    verdicts(&study.samples).into_iter().for_each(|verdict| study.report.add_verdict(verdict));
    Ok(())
}

fn run_sample(ready: &AvailableSubject, plan: &MemoryPlan) -> Result<Outcome> {
    let folder = tempfile::tempdir().map_err(doing("making a folder for signs"))?;
    let signs = Signs::new(folder.path());
    let folder = folder.path().display().to_string();
    let (free, live) = ((plan.free >> 20).to_string(), LIVE_MIB.to_string());
    let mut command =
        child::workload_command(["__server", "--free-mib", &free, "--live-mib", &live, "--folder", &folder])?;
    ready.apply(&mut command);
    let server = RunningGroup::start(&mut command)?;
    if !signs.wait_for(READY_SIGN, &server, TIMEOUT)? {
        return child::classify(ready.name(), &server.finish(TIMEOUT)?);
    }
    let available = proc::available_bytes().unwrap_or(0);
    let (mib, rate) = (plan.filler_mib(available).to_string(), FILL_MIB_PER_SECOND.to_string());
    let floor = (plan.floor >> 20).to_string();
    let mut command =
        child::workload_command(["__filler", "--mib", &mib, "--mib-per-second", &rate, "--folder", &folder])?;
    command.args(["--floor-mib", &floor]);
    subject::clear_foreign_settings(&mut command);
    let filler = RunningGroup::start(&mut command)?;
    let trace = sample_until_full(plan, &signs, &server, &filler)?;
    signs.create(STOP_SIGN).map_err(doing("giving a sign"))?;
    let (filler, server) = (filler.finish(TIMEOUT)?, server.finish(TIMEOUT)?);
    Ok(match (child::classify(ready.name(), &server)?, child::classify("the filler's glibc", &filler)?) {
        (Outcome::Measured(server), Outcome::Measured(filler)) => {
            Outcome::Measured(sample_json(plan, &trace, &server, &filler))
        }
        (Outcome::Measured(_), lost) | (lost, _) => lost,
    })
}

/// Samples the memory of the machine, the server and the process that fills the machine (filler). Ends
/// [`SAMPLING_AFTER_END`] after the filler allocated its last byte; earlier if the server or the filler ends, if
/// available memory falls below half of the floor, or after [`TIMEOUT`].
fn sample_until_full(
    plan: &MemoryPlan,
    signs: &Signs,
    server: &RunningGroup,
    filler: &RunningGroup,
) -> Result<Vec<MachineSample>> {
    let (begun, mut taken, mut is_near) = (Instant::now(), None, false);
    let mut trace = Vec::with_capacity(1 << 13);
    loop {
        child::check_interrupt()?;
        let now = MachineSample {
            seconds: begun.elapsed().as_secs_f64(),
            available: proc::available_bytes().unwrap_or(0),
            server: resident_bytes(server),
            filler: resident_bytes(filler),
            is_filling: taken.is_none(),
        };
        trace.push(now);
        if !is_near && now.available < 2 * plan.margin {
            signs.create(NEARLY_FULL_SIGN).map_err(doing("giving a sign"))?;
            is_near = true;
        }
        if taken.is_none() && signs.exists(FILLED_SIGN) {
            taken = Some(Instant::now());
        }
        let is_over = taken.is_some_and(|taken| taken.elapsed() > SAMPLING_AFTER_END);
        // The filler normally stops at its floor. This check ends the run if the filler does not stop, or if the run
        // takes too long.
        let is_in_danger = now.available < plan.floor / 2 || begun.elapsed() > TIMEOUT;
        if is_over || is_in_danger || server.has_ended() || filler.has_ended() {
            return Ok(trace);
        }
        std::thread::sleep(SAMPLE_INTERVAL);
    }
}

fn resident_bytes(running: &RunningGroup) -> u64 {
    proc::resident_memory(running.id()).map_or(0, |memory| memory.all)
}

/// Returns the JSON line of a sample: rates and minimum of available memory, computed from `trace`, and the values that
/// the server and the process that fills the machine (filler) reported.
fn sample_json(
    plan: &MemoryPlan,
    trace: &[MachineSample],
    server: &serde_json::Value,
    filler: &serde_json::Value,
) -> serde_json::Value {
    let mut line = server.clone();
    let least = trace.iter().map(|sample| sample.available).min().unwrap_or(0);
    let most = trace.iter().map(|sample| sample.server).max().unwrap_or(0);
    let last = trace.last().map_or(0, |sample| sample.server);
    line[MIN_AVAILABLE_PERCENT] = (least as f64 / plan.total as f64 * 100.0).into();
    line["given_gib"] = (most.saturating_sub(last) as f64 / f64::from(1 << 30)).into();
    line[FILL_RATE] = filler[FILL_RATE].clone();
    line[STOPPED_AT_FLOOR] = filler[STOPPED_AT_FLOOR].clone();
    if let Some((returned, took)) = return_and_fill_rates(trace) {
        line[RETURN_RATE] = returned.into();
        line[FILL_RATE] = took.into();
        line[RETURNED_PER_FILLED] = (returned / took).into();
    }
    line
}

/// Returns the rate at which the server returned memory, and the rate at which the process that fills the machine
/// (filler) allocated memory, in GiB/s. Both rates are measured over the same time. This time starts with the first
/// sample in which available memory is low and the server has begun to return memory. It ends with the filler's last
/// byte. Returns none if there is no such sample. Memory that was returned earlier does not count, since it was not yet
/// needed.
fn return_and_fill_rates(trace: &[MachineSample]) -> Option<(f64, f64)> {
    let held = trace.first()?.server;
    let little = trace.iter().map(|sample| sample.available).min()? + LOW_MARGIN_BYTES;
    let first = trace.iter().find(|sample| sample.available < little && sample.server + RETURNING_BYTES < held)?;
    let last = trace.iter().rev().find(|sample| sample.is_filling)?;
    let seconds = last.seconds - first.seconds;
    let rate = |bytes: u64| bytes as f64 / f64::from(1 << 30) / seconds;
    let took = rate(last.filler.saturating_sub(first.filler));
    (seconds > 0.0 && took > 0.0).then(|| (rate(first.server.saturating_sub(last.server)), took))
}

fn verdicts(samples: &SampleTable<&'static str>) -> [Verdict; 3] {
    let targets = [
        ("given a second, of what is taken", RETURNED_PER_FILLED, Bound::AtLeast(0.9), "x"),
        ("least of the machine's memory available", MIN_AVAILABLE_PERCENT, Bound::AtLeast(5.0), "%"),
        ("malloc, 99.9th percentile", P999_MS, Bound::AtMost(5.0), "ms"),
    ];
    targets.map(|(what, metric, bound, unit)| {
        let target = format!("survive, a machine that is filled: {what}");
        let Some(series) = samples.get((&CASE, PAGEMILL, metric)) else {
            return not_measured(target, bound, unit, "pagemill was not run");
        };
        let is_stopped =
            samples.get((&CASE, PAGEMILL, STOPPED_AT_FLOOR)).is_some_and(|stopped| stopped.values().contains(&1.0));
        let took = samples.get((&CASE, PAGEMILL, FILL_RATE)).and_then(|series| series.median()).unwrap_or(0.0);
        let note = match is_stopped {
            true => "the filler was stopped at the floor".to_owned(),
            false => format!("filled at {took:.2} GiB/s"),
        };
        let has_lost_round = series.killed > 0 || !series.failures.is_empty() || is_stopped;
        Verdict {
            estimate: stats::estimate_median(&series.values()),
            has_lost_round,
            ..not_measured(target, bound, unit, &note)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// In the trace, a server with 8 GiB returns nothing for four seconds. For four more seconds, it returns 0.5 GiB/s
    /// while the filler allocates 1 GiB/s. Both rates must be computed over the later four seconds only.
    #[test]
    fn rates_start_with_the_first_return() {
        let trace: Vec<MachineSample> = (0..=900)
            .map(|step| {
                let seconds = f64::from(step) / 100.0;
                let given = (seconds.clamp(4.0, 8.0) - 4.0) / 2.0;
                MachineSample {
                    seconds,
                    available: GIB,
                    server: 8 * GIB - (given * GIB as f64) as u64,
                    filler: (seconds.min(8.0) * GIB as f64) as u64,
                    is_filling: seconds <= 8.0,
                }
            })
            .collect();

        let (returned, took) = return_and_fill_rates(&trace).expect("it gave");

        assert!((returned - 0.5).abs() < 0.01 && (took - 1.0).abs() < 0.01, "{returned} {took}");
        assert!(return_and_fill_rates(&trace[..300]).is_none() && return_and_fill_rates(&[]).is_none());
    }

    /// The margin and the floor of available memory must be fixed fractions of the machine's memory. The planned size
    /// of the filler must be the available memory above the margin, plus four fifths of the server's free memory.
    #[test]
    fn plan_leaves_margin_and_floor() {
        let plan = MemoryPlan::new(20 * GIB, 19 * GIB);

        assert_eq!((plan.margin, plan.floor, plan.free), (GIB, GIB / 2, 8 * GIB));
        assert!(plan.filler_mib(11 * GIB).abs_diff(16_384 + 6 * 1024 / 15) < 64);
        assert!(MemoryPlan::new(20 * GIB, 4 * GIB).free <= 2 * GIB);
    }

    /// If half of the clock ticks of two CPUs are busy, the result must be one busy CPU.
    #[test]
    fn busy_ticks_convert_to_cpus() {
        assert_eq!(busy_cpus((100, 1000), (150, 1100), 2), 1.0);
        assert_eq!(busy_cpus((1, 1), (1, 1), 2), 0.0);
    }
}
