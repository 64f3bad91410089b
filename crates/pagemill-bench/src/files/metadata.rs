//! Cost of Pagemill's mount controller for programs that create, stat and remove many small files.

use std::time::Duration;

use super::mount::{Mounter, NEVER, PAGEMILL_MOUNT, WITHIN_SIZE};
use crate::child;
use crate::error::Result;
use crate::experiment::{Metric, Study};
use crate::report::{Bound, Report};

/// Number of files that are created (quick, full).
const FILE_COUNT: (usize, usize) = (10_000, 100_000);
/// Number of files in each folder.
const FILES_PER_FOLDER: u64 = 1000;
/// Number of samples (quick, full). It is larger than in other experiments, because differences of a few percent must
/// be detected in samples of one second.
const ROUNDS: (usize, usize) = (5, 15);

/// The measured operations on files. Each has the name of its metric, the title of its table column, and its minimum
/// speed relative to plain tmpfs.
const TARGETS: [(&str, &str, f64); 5] = [
    (CREATE, "create, write 100 B, close", 0.7),
    ("stat", "stat", 0.95),
    ("read", "open, read, close", 0.95),
    ("unlink", "unlink", 0.95),
    ("find", "find", 0.95),
];
const CREATE: &str = "create";
/// Metric: time of the call `close` alone. There is no target for it.
const CLOSE: &str = "close";
/// Minimum speed of creation in folders marked `huge=never`, relative to plain tmpfs.
const MIN_CREATE_SPEED_HUGE_NEVER: f64 = 0.9;

/// Number of files, and whether their folders are marked `huge=never`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Case {
    files: usize,
    is_never: bool,
}

impl Case {
    fn name(self) -> String {
        let mark = if self.is_never { ", huge=never" } else { "" };
        format!("{} files{mark}", self.files)
    }

    fn arguments(self) -> Vec<String> {
        let numbers = [("--files", self.files as u64), ("--per-directory", FILES_PER_FOLDER)];
        let mark = self.is_never.then(|| "--huge-never".to_owned());
        ["__metadata".to_owned()].into_iter().chain(child::numeric_options(&numbers)).chain(mark).collect()
    }

    /// Returns the minimum speed of an operation in this case. It is `bound`, except for creation in folders marked
    /// `huge=never`.
    fn min_speed(self, metric: &str, bound: f64) -> f64 {
        if self.is_never && metric == CREATE { MIN_CREATE_SPEED_HUGE_NEVER } else { bound }
    }
}

/// Measures creation, lookup and removal of many small files. Adds rows and verdicts to the report.
///
/// # Errors
///
/// [`crate::error::Error::CannotRun`] if mounting is not permitted.
pub fn run(options: &super::FileOptions, report: &mut Report) -> Result<()> {
    let common = &options.common;
    let mounter = Mounter::new(options.dir.as_deref())?;
    let ready = report.with_gaps(mounter.select(&common.only, &[WITHIN_SIZE, NEVER, PAGEMILL_MOUNT])?);
    let files = common.quick_or_full(FILE_COUNT);
    // Each file uses a page for its content, and some metadata of the kernel.
    child::touch_beforehand(files as u64 * 6 / 1024 + 64)?;
    let cases = [false, true].map(|is_never| Case { files, is_never });
    let mut study = Study::new(report, |case: &Case| case.name());
    let metrics = TARGETS.iter().map(|(metric, ..)| *metric).chain([CLOSE]).collect::<Vec<_>>();
    let sizes = (2 << 30, Duration::from_secs(300));
    let turns = (&cases[..], common.rounds_or(ROUNDS));
    super::measure((&mut study, &mounter), turns, &ready, &metrics, sizes, |case| case.arguments())?;
    let columns = TARGETS.map(|(name, column, _)| (Metric::higher(name, "1/s").against(WITHIN_SIZE.name), column));
    let close = [(Metric::lower(CLOSE, "ns").against(WITHIN_SIZE.name), "ns")];
    for case in cases {
        let (name, plain) = (case.name(), WITHIN_SIZE.name);
        let table = format!("{name}, one thread: time of close, half the spread, times {plain}");
        study.rows(&case, &ready, &table, &close);
        let table = format!("{name}, one thread: operations a second, half the spread, times {plain}");
        study.rows(&case, &ready, &table, &columns);
        for (metric, column, bound) in TARGETS {
            let target = format!("{name}: {column}, against {plain}");
            let bound = Bound::AtLeast(case.min_speed(metric, bound));
            let (own, base) = ((&case, PAGEMILL_MOUNT.name, metric), (&case, plain, metric));
            study.judge_quotient(target, bound, own, base);
        }
    }
    Ok(())
}
