//! Reads and writes of 4 KiB records by many concurrent workers. The results are compared with tmpfs and with the
//! results published in 2013.

mod original;
mod verdicts;

use std::time::Duration;

use crate::child;
use crate::error::Result;
use crate::experiment::{Metric, Study, threads_text};
use crate::files;
use crate::files::mount::{ALWAYS, CACHE, FileSystem, Mounter, NEVER, PAGEMILL_MOUNT, VIEWS, WITHIN_SIZE};
use crate::report::{OriginalCurve, Report, Row, TableCell};
use crate::workload::iozone::Operation;
use original::PublishedResults;

/// Numbers of workers (threads or processes) for which results were published in 2013.
const THREADS: &[u16] = &[1, 2, 4, 8, 10, 20, 30, 40, 50, 60, 70, 80, 120, 160, 200];
/// Numbers of workers (threads or processes) in a quick run.
const QUICK_THREADS: &[u16] = &[1, 2, 8];
/// Total size of all files in bytes (quick, full).
const TOTAL_BYTES: (u64, u64) = (256 << 20, 2 << 30);
/// Minimum measured time of one operation with one number of workers (quick, full).
const CELL_SECONDS: (f64, f64) = (0.1, 1.0);
/// Pause in milliseconds before the first read, in which Pagemill can move closed files into huge pages (quick,
/// full). All file systems get the same pause.
const PAUSE_MS: (u64, u64) = (500, 2000);
const UNIT: &str = "MiB/s";
/// Subject of the results of 2013.
const ORIGINAL: &str = "original-2013";

/// How the workers access the records of their files: through a mapping, or by system calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Mode {
    Mapped,
    ReadWrite,
}

impl Mode {
    fn name(self) -> &'static str {
        match self {
            Self::Mapped => "mapped",
            Self::ReadWrite => "read/write",
        }
    }
}

#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    #[command(flatten)]
    pub files: files::FileOptions,
    /// Numbers of workers, separated by commas (default: the fifteen numbers of 2013, with --quick 1,2,8)
    #[arg(long, value_delimiter = ',', value_name = "LIST", value_parser = clap::value_parser!(u16).range(1..))]
    pub threads: Vec<u16>,
    /// Use processes as workers instead of threads
    #[arg(long)]
    pub processes: bool,
    /// Use files in a page cache of the workers' own process and its calls, compared with tmpfs
    #[arg(long, conflicts_with_all = ["processes", "mode", "dir"])]
    pub cache: bool,
    /// Use views of files in a page cache of the workers' own process, compared with files mapped on tmpfs
    #[arg(long, conflicts_with_all = ["cache", "processes", "mode", "dir"])]
    pub views: bool,
    /// Total size of all files (default 2G, with --quick 256M)
    #[arg(long, value_name = "SIZE", value_parser = pagemill_core::units::parse_bytes)]
    pub total: Option<u64>,
    /// Minimum time in seconds of a cell, which is one operation with one number of workers (default 1, with --quick
    /// 0.1)
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub cell_seconds: Option<f64>,
    /// Measure only this way to access the records
    #[arg(long, value_enum)]
    pub mode: Option<Mode>,
}

fn parse_seconds(text: &str) -> std::result::Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.0..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("a number of seconds, at most 3600".to_owned()),
    }
}

/// A number of workers, and how they access records. Each sample of a case runs all seven operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Case {
    mode: Mode,
    threads: u16,
}

impl Case {
    fn name(&self) -> String {
        format!("{}, {}", self.mode.name(), self.column())
    }

    fn column(&self) -> String {
        threads_text(self.threads.into())
    }
}

/// Measures reads and writes of files by many concurrent workers. Adds rows and verdicts to the report.
///
/// # Errors
///
/// [`crate::error::Error::CannotRun`] if mounting is not permitted.
pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let common = &options.files.common;
    let mounter = Mounter::new(options.files.dir.as_deref())?;
    let known: &[FileSystem] = match (options.cache, options.views) {
        (true, _) => &[CACHE, NEVER, ALWAYS],
        (_, true) => &[VIEWS, NEVER, ALWAYS],
        _ => &[NEVER, WITHIN_SIZE, ALWAYS, PAGEMILL_MOUNT],
    };
    let ready = report.with_gaps(mounter.select(&common.only, known)?);
    let cases = cases(options);
    let total = options.total.unwrap_or(common.quick_or_full(TOTAL_BYTES));
    child::touch_beforehand((total >> 20) * 5 / 4 + 64)?;
    let mut study = Study::new(report, Case::name);
    let metrics = Operation::ALL.map(Operation::metric);
    let sizes = (2 * total + (512 << 20), Duration::from_secs(900));
    let turns = (&cases[..], common.rounds());
    files::measure((&mut study, &mounter), turns, &ready, &metrics, sizes, |case| arguments(options, total, case))?;
    let original = PublishedResults::load();
    for mode in [Mode::Mapped, Mode::ReadWrite] {
        let cases: Vec<Case> = cases.iter().copied().filter(|case| case.mode == mode).collect();
        for operation in Operation::ALL {
            add_rows(&mut study, &cases, operation, &ready, &original);
        }
    }
    let add_verdicts = match (options.cache, options.views) {
        (true, _) => verdicts::add_cache_verdicts,
        (_, true) => verdicts::add_view_verdicts,
        _ => verdicts::add_verdicts,
    };
    add_verdicts(study.report, &study.samples, &cases);
    Ok(())
}

fn cases(options: &Options) -> Vec<Case> {
    let usual = options.files.common.quick_or_full((QUICK_THREADS, THREADS));
    let threads = if options.threads.is_empty() { usual } else { &options.threads };
    let only = match (options.cache, options.views) {
        (true, _) => Some(Mode::ReadWrite),
        (_, true) => Some(Mode::Mapped),
        _ => options.mode,
    };
    let modes = [Mode::Mapped, Mode::ReadWrite].into_iter().filter(|mode| only.is_none_or(|only| only == *mode));
    modes.flat_map(|mode| threads.iter().map(move |&threads| Case { mode, threads })).collect()
}

fn arguments(options: &Options, total: u64, case: &Case) -> Vec<String> {
    let common = &options.files.common;
    let seconds = options.cell_seconds.unwrap_or(common.quick_or_full(CELL_SECONDS));
    let numbers = [
        ("--workers", u64::from(case.threads)),
        ("--total-bytes", total),
        ("--cell-ms", (seconds * 1e3) as u64),
        ("--pause-ms", common.quick_or_full(PAUSE_MS)),
    ];
    let flags = [("--mapped", case.mode == Mode::Mapped), ("--processes", options.processes)];
    let flags = flags.into_iter().filter(|(_, is_given)| *is_given).map(|(flag, _)| flag.to_owned());
    ["__iozone".to_owned()].into_iter().chain(child::numeric_options(&numbers)).chain(flags).collect()
}

/// Adds the results of one operation to the report, as one table for each mode. A table has one line for each number of
/// workers, like the tables published in 2013.
fn add_rows(
    study: &mut Study<'_, Case>,
    cases: &[Case],
    operation: Operation,
    ready: &[FileSystem],
    original: &PublishedResults,
) {
    let Some(Case { mode, .. }) = cases.first() else { return };
    let table = format!(
        "{}, {}: {UNIT}, half the spread, times {}; beside it the original and times its own baseline",
        mode.name(),
        original::published_name(operation),
        NEVER.name,
    );
    study.report.transpose_table(table.clone());
    let points = original.speedups(mode.name(), operation);
    study.report.add_original_curve(OriginalCurve { table: table.clone(), subject: ORIGINAL.to_owned(), points });
    for case in cases {
        let metric = Metric::higher(operation.metric(), UNIT).against(NEVER.name);
        study.rows(case, ready, &table, &[(metric, &case.column())]);
        if let Some((value, speedup)) = original.find(case.mode.name(), operation, case.threads) {
            study.report.add_row(Row {
                case: case.name(),
                subject: ORIGINAL.to_owned(),
                baseline: Some("original-2013-before".to_owned()),
                ratio: Some(speedup),
                cell: Some(TableCell { table: table.clone(), column: case.column() }),
                ..study.report.single_value(operation.metric(), value, UNIT)
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    fn parse(line: &[&str]) -> std::result::Result<Options, clap::Error> {
        Line::try_parse_from([&["x"], line].concat()).map(|line| line.options)
    }

    /// Without options, there must be a case for each of the fifteen numbers of workers in each of the two modes.
    /// Options must reduce the cases. Contradictory options and invalid values must be refused.
    #[test]
    fn cases_follow_the_options() {
        let count = |line: &[&str]| cases(&parse(line).expect("known options")).len();

        assert_eq!(count(&[]), 30);
        assert_eq!(count(&["--quick"]), 6);
        assert_eq!(count(&["--threads", "3,5", "--mode", "mapped"]), 2);
        assert_eq!((count(&["--cache"]), count(&["--views"])), (15, 15));
        assert!(parse(&["--cache", "--processes"]).is_err() && parse(&["--cache", "--views"]).is_err());
        assert!(parse(&["--threads", "0"]).is_err() && parse(&["--cell-seconds", "-1"]).is_err());
        assert!(parse(&["--total", "much"]).is_err());
    }

    /// The workload's command line must contain the numbers and flags of the case and the options.
    #[test]
    fn workload_gets_all_arguments() {
        let options = parse(&["--processes", "--cell-seconds", "0.5"]).expect("known options");
        let case = Case { mode: Mode::Mapped, threads: 4 };

        let line = arguments(&options, 1 << 20, &case).join(" ");

        assert_eq!(
            line,
            "__iozone --workers 4 --total-bytes 1048576 --cell-ms 500 --pause-ms 2000 --mapped --processes"
        );
    }
}
