//! Cost of watching memory limits without memory pressure: Pagemill with its defaults, compared with Pagemill that does
//! not watch limits.
//!
//! The cost is measured as the speed of the [`ebizzy`](crate::ebizzy) workload, and as wake-ups of an idle process.

use std::time::{Duration, Instant};

use crate::child::{self, Running};
use crate::ebizzy::{Options, RECORDS};
use crate::error::Result;
use crate::experiment::{Book, Common, Metric, Progress, not_measured, report_row};
use crate::proc;
use crate::report::{Bound, Place, Report, Verdict};
use crate::stats::{self, Better};
use crate::subject::{self, PAGEMILL, Ready, UNWATCHED};

/// MiB that are touched beforehand: more memory than either variant uses.
const WARM_MIB: u64 = 256;
const THREADS: [u16; 2] = [2, 8];
/// Number of samples (quick, full). To detect a difference of 1 % it takes more and shorter samples than other
/// experiments.
const SAMPLES: (usize, usize) = (3, 15);

/// MiB that the idle process allocates and frees.
const IDLE_MIB: u64 = 128;
/// The process has returned its free memory once its resident memory is below this value.
const GIVEN_BACK_BYTES: u64 = 32 << 20;
/// The environment setting that makes Pagemill return free memory after one idle second. [`GIVES_BACK_WITHIN`] is the
/// time limit of this measurement.
const IDLE_SETTING: (&str, &str) = ("PAGEMILL_IDLE", "1");
const GIVES_BACK_WITHIN: Duration = Duration::from_secs(15);
/// Pause between the return of the memory and the count of wake-ups.
const PAUSE: Duration = Duration::from_secs(1);

const WAKE_UPS: &str = "wake_ups_per_second";
const IDLE_CASE: &str = "idle";

/// Measures speed and wake-ups, and returns the report.
pub fn run(options: &Options) -> Result<Report> {
    let common = &options.common;
    let both = [PAGEMILL.to_owned(), UNWATCHED.to_owned()];
    let only = if common.only.is_empty() { &both[..] } else { &common.only };
    let (ready, gaps) = subject::select(only, |_| true)?;
    let mut report = Report::new("ebizzy", common.json);
    gaps.into_iter().for_each(|gap| report.gap(gap));
    child::warm(WARM_MIB)?;
    let threads = if options.threads.is_empty() { &THREADS[..] } else { &options.threads };
    let book = measure(common, &ready, threads)?;
    rows(&mut report, &book, &ready, threads);
    report.verdict(verdict(&book, threads));
    match ready.iter().find(|ready| ready.name() == PAGEMILL) {
        Some(pagemill) => idle(common, pagemill, &mut report)?,
        None => report.verdict(not_measured(idle_target(), Bound::AtMost(0.0), "1/s", "pagemill was not run")),
    }
    Ok(report)
}

fn measure(common: &Common, ready: &[Ready], threads: &[u16]) -> Result<Book<u16>> {
    let rounds = common.samples.map_or(common.pick(SAMPLES.0, SAMPLES.1), usize::from);
    let (warm_ms, measure_ms) = common.pick(("50", "200"), ("250", "1000"));
    let progress = Progress::new(rounds * threads.len() * ready.len());
    let mut book = Book::new();
    for round in 0..rounds {
        for &threads in threads {
            let count = threads.to_string();
            let arguments = ["__ebizzy", "--threads", &count, "--warm-ms", warm_ms, "--measure-ms", measure_ms];
            for index in 0..ready.len() {
                let subject = &ready[(index + round) % ready.len()];
                progress.step(&format!("{threads} threads, {}", subject.name()));
                let outcome = child::measure(subject, &arguments, Duration::from_secs(60))?;
                book.enter(&threads, subject.name(), &[RECORDS], &outcome);
            }
        }
    }
    Ok(book)
}

fn rows(report: &mut Report, book: &Book<u16>, ready: &[Ready], threads: &[u16]) {
    for case in threads {
        for subject in ready {
            let place = Place {
                table: format!("ebizzy with no pressure: records/s, half the spread, times {UNWATCHED}"),
                column: format!("{case} threads"),
            };
            let metric = Metric { name: RECORDS, unit: "1/s", better: Better::Higher, baseline: Some(UNWATCHED) };
            let name = format!("no pressure, {case} threads");
            report_row(report, book, (case, &name), subject.name(), metric, Some(place));
        }
    }
}

fn verdict(book: &Book<u16>, threads: &[u16]) -> Verdict {
    let target = "ebizzy with no pressure, watching against not watching, geometric mean over threads";
    let blank = not_measured(target, Bound::AtLeast(0.99), "x", "a side is missing");
    let series = |name| threads.iter().map(move |case| book.get(case, name, RECORDS));
    let pairs = series(PAGEMILL).zip(series(UNWATCHED));
    let ratios: Option<Vec<Vec<f64>>> =
        pairs.map(|(watching, not)| Some(watching?.ratios(not?, Better::Higher))).collect();
    let Some(ratios) = ratios else { return blank };
    Verdict {
        estimate: stats::estimate(&stats::geometric_means(&ratios)),
        baseline: UNWATCHED.to_owned(),
        is_lost: series(PAGEMILL).flatten().any(|series| !series.survived()),
        note: String::new(),
        ..blank
    }
}

fn idle_target() -> String {
    "wake-ups of an idle process that has given back".to_owned()
}

fn idle(common: &Common, pagemill: &Ready, report: &mut Report) -> Result<()> {
    let watched = common.pick(Duration::from_secs(2), Duration::from_secs(5));
    let mut book = Book::new();
    for _ in 0..common.pick(1, 3) {
        match wake_ups(pagemill, watched)? {
            Ok(rate) => book.enter_value(&IDLE_CASE, PAGEMILL, WAKE_UPS, rate),
            Err(gap) => report.gap(gap),
        }
    }
    let place = Place { table: "An idle process that has given back".to_owned(), column: "wake-ups/s".to_owned() };
    let metric = Metric { name: WAKE_UPS, unit: "1/s", better: Better::Lower, baseline: None };
    report_row(report, &book, (&IDLE_CASE, IDLE_CASE), PAGEMILL, metric, Some(place));
    let blank = not_measured(idle_target(), Bound::AtMost(0.0), "1/s", "it did not fall idle");
    report.verdict(match book.get(&IDLE_CASE, PAGEMILL, WAKE_UPS) {
        Some(series) => Verdict { estimate: stats::estimate(&series.values()), note: String::new(), ..blank },
        None => blank,
    });
    Ok(())
}

/// Returns the wake-ups per second of an idle process, over all its threads. The inner error is a sentence for the list
/// of gaps.
fn wake_ups(pagemill: &Ready, watched: Duration) -> Result<std::result::Result<f64, String>> {
    let mib = IDLE_MIB.to_string();
    let mut command = child::workload(&["__idle", "--mib", &mib, "--seconds", "60"])?;
    pagemill.apply(&mut command);
    command.env(IDLE_SETTING.0, IDLE_SETTING.1);
    let running = Running::start(&mut command)?;
    let (begun, mut has_held) = (Instant::now(), false);
    loop {
        child::sleep(Duration::from_millis(10))?;
        let resident = proc::resident(running.id()).map_or(0, |memory| memory.all);
        has_held |= resident >= IDLE_MIB << 20;
        if has_held && resident < GIVEN_BACK_BYTES {
            break;
        }
        if running.has_ended() || begun.elapsed() > GIVES_BACK_WITHIN {
            let held = resident >> 20;
            return Ok(Err(format!("idle: {held} of {IDLE_MIB} MiB were still resident after the time limit")));
        }
    }
    child::sleep(PAUSE)?;
    let before = proc::wake_ups(running.id());
    child::sleep(watched)?;
    let after = proc::wake_ups(running.id());
    Ok(match (before, after) {
        (Some(before), Some(after)) => Ok(after.saturating_sub(before) as f64 / watched.as_secs_f64()),
        _ => Err("idle: the threads of the process could not be read".to_owned()),
    })
}
