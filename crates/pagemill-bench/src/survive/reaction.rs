//! Latency from a request to a sibling (another process of the same tree) until the sibling has returned memory. Only
//! Pagemill supports such requests.

use std::process::Command;
use std::time::Duration;

use crate::child::{self, RunningGroup};
use crate::error::Result;
use crate::experiment::{CommonOptions, Metric, Progress, SampleTable, report_row};
use crate::report::{Report, TableCell};
use crate::stats::Better;
use crate::subject::{self, AvailableSubject, PAGEMILL};

/// MiB of free memory that the requested process holds (quick, full).
const HELD_FREE_MIB: (u64, u64) = (256, 1024);

/// MiB per request, and number of requests in a sample (quick, full).
const CASES: [(u64, (u64, u64)); 2] = [(2, (50, 300)), (64, (9, 150))];

/// Metric: median of the time until a requested amount of memory was returned.
const MEDIAN_US: &str = "median_us";
/// Metric: 99th percentile of the time until a requested amount of memory was returned.
const P99_US: &str = "p99_us";
/// Metric: number of requests for which the return of memory took longer than a second.
const LATE_REQUESTS: &str = "late";

/// Measures the latency of requests to return memory, if Pagemill is among the measured allocators; adds rows to the
/// report.
pub fn run(common: &CommonOptions, ready: &[AvailableSubject], report: &mut Report) -> Result<()> {
    let Some(pagemill) = ready.iter().find(|ready| ready.name() == PAGEMILL) else { return Ok(()) };
    let hoard_mib = common.quick_or_full(HELD_FREE_MIB.0, HELD_FREE_MIB.1);
    child::touch_beforehand(hoard_mib + hoard_mib / 8)?;
    let progress = Progress::new(CASES.len() * common.rounds());
    let mut samples = SampleTable::new();
    for _ in 0..common.rounds() {
        for (ask_mib, asks) in CASES {
            progress.step(&format!("reaction, {ask_mib} MiB"));
            let line = match pagemill.launcher(&[]) {
                Ok(line) => line,
                Err(gap) => {
                    report.add_gap(format!("reaction: {gap}"));
                    return Ok(());
                }
            };
            let mut command = Command::new(&line[0]);
            command.args(&line[1..]).arg(child::own_executable()?).arg("__asker");
            let options =
                [("--hoard-mib", hoard_mib), ("--ask-mib", ask_mib), ("--asks", common.quick_or_full(asks.0, asks.1))];
            for (name, value) in options {
                command.arg(name).arg(value.to_string());
            }
            subject::clear_foreign_settings(&mut command);
            let finished = RunningGroup::start(&mut command)?.finish(Duration::from_secs(300))?;
            let outcome = child::classify(PAGEMILL, &finished)?;
            samples.add_outcome(&ask_mib, PAGEMILL, &[MEDIAN_US, P99_US, LATE_REQUESTS], &outcome);
        }
    }
    drop(progress);
    for (ask_mib, _) in CASES {
        add_rows(report, &samples, ask_mib, hoard_mib);
    }
    Ok(())
}

fn add_rows(report: &mut Report, samples: &SampleTable<u64>, ask_mib: u64, hoard_mib: u64) {
    let name = format!("reaction, {ask_mib} MiB");
    for (metric, unit, column) in
        [(MEDIAN_US, "us", "median, us"), (P99_US, "us", "99th, us"), (LATE_REQUESTS, "asks", "over 1 s")]
    {
        let cell = TableCell {
            table: format!("survive: from request to bytes given, by a sibling that holds {hoard_mib} MiB free"),
            column: format!("{ask_mib} MiB: {column}"),
        };
        let metric = Metric { name: metric, unit, better: Better::Lower, baseline: None };
        report_row(report, samples, (&ask_mib, &name), PAGEMILL, metric, Some(cell));
    }
}
