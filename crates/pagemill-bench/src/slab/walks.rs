//! Walks of the index of a file, while the nodes of the index are moved.

use super::Options;
use super::storage_subjects::TIME_LIMIT;
use crate::child::{self, Outcome};
use crate::error::Result;
use crate::experiment::{CommonOptions, Metric, Study, metric_names, not_measured};
use crate::report::{Bound, Report};

/// Subject: walks while no nodes are moved.
const STILL: &str = "still";
/// Subject: walks while a background thread moves nodes.
const MOVING: &str = "moving";
pub const NAMES: [&str; 2] = [STILL, MOVING];

/// Metric: nanoseconds in which a walk visits one page.
const NS_PER_PAGE: Metric = Metric::lower("ns", "ns").against(STILL);
/// Metric: number of objects moved during the walks.
const MOVED_OBJECTS: Metric = Metric::lower("moved", "objects");
const COLUMNS: [(Metric, &str); 2] = [(NS_PER_PAGE, "ns"), (MOVED_OBJECTS, "moves")];

/// Number of pages of the file (quick, full).
const FILE_PAGES: (u64, u64) = (6_000, 30_000);
/// Number of turns of a sample (quick, full). In each turn, the workload makes a new file and walks its index.
const TURN_COUNT: (u64, u64) = (2, 5);
/// Milliseconds for which the workload walks the index in each turn (quick, full).
const TURN_MS: (u64, u64) = (100, 300);

/// Minimum speed of walks during moves relative to walks without moves.
const MIN_SPEED: f64 = 0.95;

/// Measures the wanted walks; adds rows and a verdict to the report.
///
/// # Errors
///
/// [`crate::error::Error::WrongAnswer`] if a walk found wrong pages.
pub fn run_part(options: &Options, report: &mut Report) -> Result<()> {
    let common = &options.common;
    child::touch_beforehand(1024)?;
    let mut study = Study::new(report, |()| "index of a file, one page of six".to_owned());
    let (subjects, metrics) = (common.wanted(&NAMES), metric_names(&COLUMNS));
    study.measure_by_case((&[()], common.rounds()), &subjects, &metrics, |(), subject| take_sample(common, subject))?;
    study.rows(&(), &NAMES, "walks of the index of a file, nanoseconds a page", &COLUMNS);
    judge(&mut study);
    Ok(())
}

/// Adds the verdict. If no object was moved, it has no estimate.
fn judge(study: &mut Study<'_, ()>) {
    let target = format!("walk of the index of a file: {MOVING}, as fast as {STILL}");
    let bound = Bound::AtLeast(MIN_SPEED);
    let moved = study.samples.get((&(), MOVING, MOVED_OBJECTS.name)).and_then(|series| series.median());
    match moved {
        Some(0.0) => study.report.add_verdict(not_measured(target, bound, "x", "nothing was moved")),
        _ => study.judge_time_ratio(target, bound, (&(), MOVING, NS_PER_PAGE.name), (&(), STILL, NS_PER_PAGE.name)),
    }
}

fn take_sample(common: &CommonOptions, subject: &str) -> Result<Outcome> {
    let numbers = [
        ("--pages", common.quick_or_full(FILE_PAGES)),
        ("--turns", common.quick_or_full(TURN_COUNT)),
        ("--turn-ms", common.quick_or_full(TURN_MS)),
    ];
    let mut line = child::command_words(&["__slab", "index"], &numbers);
    line.extend((subject == MOVING).then(|| "--moving".to_owned()));
    child::run_plain(subject, line, TIME_LIMIT)
}
