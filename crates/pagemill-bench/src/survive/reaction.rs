//! Latency from a request to a sibling (another process of the same tree) until the sibling has returned memory. Only
//! Pagemill supports such requests.

use std::process::Command;
use std::time::Duration;

use crate::child;
use crate::error::Result;
use crate::experiment::{CommonOptions, Metric, Named, Study};
use crate::report::Report;
use crate::subject::{self, AvailableSubject, PAGEMILL};

/// MiB of free memory that the requested process holds (quick, full).
const HELD_FREE_MIB: (u64, u64) = (256, 1024);

/// MiB per request, and number of requests in a sample (quick, full).
type Case = (u64, (u64, u64));
const CASES: [Case; 2] = [(2, (50, 300)), (64, (9, 150))];

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
    let hoard_mib = common.quick_or_full(HELD_FREE_MIB);
    child::touch_beforehand(hoard_mib + hoard_mib / 8)?;
    let Some(line) = report.unless_gap(pagemill.launcher("reaction", &[]))? else { return Ok(()) };
    let mut study = Study::new(report, |(ask_mib, _): &Case| format!("reaction, {ask_mib} MiB"));
    let metrics = [MEDIAN_US, P99_US, LATE_REQUESTS];
    study.measure_by_round((&CASES, common.rounds()), &[PAGEMILL], &metrics, |(ask_mib, asks), _| {
        let mut command = Command::new(&line[0]);
        command.args(&line[1..]).arg(child::own_executable()?).arg("__asker");
        let options = [("--hoard-mib", hoard_mib), ("--ask-mib", *ask_mib), ("--asks", common.quick_or_full(*asks))];
        command.args(child::numeric_options(&options));
        subject::clear_foreign_settings(&mut command);
        child::run_to_end(PAGEMILL, &mut command, Duration::from_secs(300))
    })?;
    let table = format!("survive: from request to bytes given, by a sibling that holds {hoard_mib} MiB free");
    for case in &CASES {
        for (metric, column) in [
            (Metric::lower(MEDIAN_US, "us"), "median, us"),
            (Metric::lower(P99_US, "us"), "99th, us"),
            (Metric::lower(LATE_REQUESTS, "asks"), "over 1 s"),
        ] {
            study.rows(case, &[PAGEMILL], &table, &[(metric, &format!("{} MiB: {column}", case.0))]);
        }
    }
    Ok(())
}
