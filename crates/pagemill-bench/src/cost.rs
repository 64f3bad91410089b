//! Cost of watching memory limits without memory pressure: Pagemill with its default settings is compared with Pagemill
//! that does not watch limits.
//!
//! The cost is measured as the speed of the [`ebizzy`](crate::ebizzy) workload, and as the number of wake-ups of an
//! idle process.

use std::time::{Duration, Instant};

use crate::child::{self, RunningGroup};
use crate::ebizzy::{Options, RECORDS};
use crate::error::{Error, Result};
use crate::experiment::{CommonOptions, Metric, Named, SampleTable, Study, not_measured};
use crate::proc;
use crate::report::{Bound, Report, Verdict};
use crate::stats::Better;
use crate::subject::{self, AvailableSubject, PAGEMILL, PAGEMILL_UNWATCHED};

/// MiB of memory that are touched before the first sample: more than either variant of Pagemill uses.
const WARM_MIB: u64 = 256;
const THREAD_COUNTS: [u16; 2] = [2, 8];
/// Number of samples (quick, full). There are more and shorter samples than in other experiments, so that a difference
/// of 1 % can be detected.
const SAMPLES: (usize, usize) = (3, 15);

/// MiB that the idle process allocates and frees.
const IDLE_MIB: u64 = 128;
/// The idle process counts as having returned its free memory once it has fewer resident bytes than this.
const RETURNED_BELOW_BYTES: u64 = 32 << 20;
/// The environment setting that makes Pagemill return free memory after one idle second.
const IDLE_SETTING: (&str, &str) = ("PAGEMILL_IDLE", "1");
/// Time within which the idle process must return its free memory.
const RETURN_TIME_LIMIT: Duration = Duration::from_secs(15);
/// Pause after the idle process has returned its free memory, before its wake-ups are counted.
const PAUSE_BEFORE_COUNT: Duration = Duration::from_secs(1);

const WAKE_UPS: &str = "wake_ups_per_second";
const IDLE_CASE: &str = "idle";

/// Measures the speed of ebizzy and the wake-ups of an idle process, with and without watching of memory limits.
/// Adds rows and verdicts to the report.
pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let common = &options.common;
    let both = [PAGEMILL.to_owned(), PAGEMILL_UNWATCHED.to_owned()];
    let only = if common.only.is_empty() { &both[..] } else { &common.only };
    let ready = report.with_gaps(subject::select_available(only, |_| true)?);
    child::touch_beforehand(WARM_MIB)?;
    let threads = if options.threads.is_empty() { &THREAD_COUNTS[..] } else { &options.threads };
    let mut study = Study::new(report, |case| format!("no pressure, {case} threads"));
    let (warm_ms, measure_ms) = common.quick_or_full((("50", "200"), ("250", "1000")));
    study.measure_by_round((threads, common.rounds_or(SAMPLES)), &ready, &[RECORDS], |threads, subject| {
        let count = threads.to_string();
        let arguments = ["__ebizzy", "--threads", &count, "--warm-ms", warm_ms, "--measure-ms", measure_ms];
        child::run_under(subject, arguments, Duration::from_secs(60))
    })?;
    let records = Metric::higher(RECORDS, "1/s").against(PAGEMILL_UNWATCHED);
    let table = format!("ebizzy with no pressure: records/s, half the spread, times {PAGEMILL_UNWATCHED}");
    for case in threads {
        study.rows(case, &ready, &table, &[(records, &format!("{case} threads"))]);
    }
    study.report.add_verdict(verdict(&study.samples, threads));
    match ready.iter().find(|ready| ready.name() == PAGEMILL) {
        Some(pagemill) => measure_idle(common, pagemill, report)?,
        None => report.add_verdict(not_measured(idle_target(), Bound::AtMost(0.0), "1/s", "pagemill was not run")),
    }
    Ok(())
}

fn verdict(samples: &SampleTable<u16>, threads: &[u16]) -> Verdict {
    let target = "ebizzy with no pressure, watching against not watching, geometric mean over threads";
    let blank = not_measured(target, Bound::AtLeast(0.99), "x", "a side is missing");
    let ratios = samples.ratios(threads, (PAGEMILL, PAGEMILL_UNWATCHED), (RECORDS, Better::Higher));
    if ratios.len() < threads.len() {
        return blank;
    }
    let mut own = threads.iter().filter_map(|case| samples.get((case, PAGEMILL, RECORDS)));
    let has_lost_round = own.any(|series| !series.survived());
    Verdict { has_lost_round, note: String::new(), ..blank.with_mean(&ratios, PAGEMILL_UNWATCHED) }
}

fn idle_target() -> String {
    "wake-ups of an idle process that has given back".to_owned()
}

fn measure_idle(common: &CommonOptions, pagemill: &AvailableSubject, report: &mut Report) -> Result<()> {
    let watched = common.quick_or_full((Duration::from_secs(2), Duration::from_secs(5)));
    let mut study = Study::new(report, |case: &&str| (*case).to_owned());
    for _ in 0..common.quick_or_full((1, 3)) {
        if let Some(rate) = study.report.unless_gap(measure_wake_ups(pagemill, watched))? {
            study.samples.add_value(&IDLE_CASE, PAGEMILL, WAKE_UPS, rate);
        }
    }
    let columns = [(Metric::lower(WAKE_UPS, "1/s"), "wake-ups/s")];
    study.rows(&IDLE_CASE, &[PAGEMILL], "An idle process that has given back", &columns);
    let blank = not_measured(idle_target(), Bound::AtMost(0.0), "1/s", "it did not fall idle");
    study.report.add_verdict(blank.measured(study.samples.get((&IDLE_CASE, PAGEMILL, WAKE_UPS))));
    Ok(())
}

/// Returns the wake-ups per second of an idle process, over all its threads.
///
/// # Errors
///
/// [`Error::Gap`] if the process did not return its free memory, or could not be read.
fn measure_wake_ups(pagemill: &AvailableSubject, watched: Duration) -> Result<f64> {
    let mib = IDLE_MIB.to_string();
    let mut command = child::workload_command(["__idle", "--mib", &mib, "--seconds", "60"])?;
    pagemill.apply(&mut command);
    command.env(IDLE_SETTING.0, IDLE_SETTING.1);
    let running = RunningGroup::start(&mut command)?;
    let (begun, mut has_held) = (Instant::now(), false);
    loop {
        child::sleep(Duration::from_millis(10))?;
        let resident = proc::resident_memory(running.id()).map_or(0, |memory| memory.all);
        has_held |= resident >= IDLE_MIB << 20;
        if has_held && resident < RETURNED_BELOW_BYTES {
            break;
        }
        if running.has_ended() || begun.elapsed() > RETURN_TIME_LIMIT {
            let held = resident >> 20;
            let what = format!("idle: {held} of {IDLE_MIB} MiB were still resident after the time limit");
            return Err(Error::Gap(what));
        }
    }
    child::sleep(PAUSE_BEFORE_COUNT)?;
    let before = proc::voluntary_switches(running.id());
    child::sleep(watched)?;
    let after = proc::voluntary_switches(running.id());
    match (before, after) {
        (Some(before), Some(after)) => Ok(after.saturating_sub(before) as f64 / watched.as_secs_f64()),
        _ => Err(Error::Gap("idle: the threads of the process could not be read".to_owned())),
    }
}
