//! ebizzy with its copies in memory that the program gives up between records. Part of `bench volatile`.
//!
//! The copies are in volatile ranges, or in mappings that are freed with `MADV_FREE` or `MADV_DONTNEED`, or in malloc.
//! All variants run the same [workload](crate::workload::ebizzy). Targets: volatile ranges are no slower than malloc,
//! which does not return its free memory; and no process is killed while a second process needs memory periodically.

use std::time::Duration;

use crate::child::{self, Running};
use crate::error::{Result, doing};
use crate::experiment::{Book, Common, Metric, Progress, not_measured, report_row};
use crate::hog::{self, Times};
use crate::report::{Bound, Place, Report, Verdict};
use crate::stats::{self, Better};
use crate::subject;

/// A way to store the copies, with the environment of the process that uses it.
struct Way {
    name: &'static str,
    memory: &'static str,
    settings: &'static [(&'static str, &'static str)],
}

const HANDLES: &str = "ebizzy-handles";
const MALLOC: &str = "ebizzy-malloc";
/// glibc with settings that never return memory, which is its fastest way to run this workload.
const KEEPING: &str = "ebizzy-malloc-keeping";
const FREE: &str = "ebizzy-madv-free";
const DONTNEED: &str = "ebizzy-madv-dontneed";

const WAYS: [Way; 5] = [
    Way { name: HANDLES, memory: "handles", settings: &[] },
    Way { name: MALLOC, memory: "malloc", settings: &[] },
    Way {
        name: KEEPING,
        memory: "malloc",
        settings: &[("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=1073741824")],
    },
    Way { name: FREE, memory: "free", settings: &[] },
    Way { name: DONTNEED, memory: "dontneed", settings: &[] },
];

const SIZES: [&str; 2] = ["fixed", "mixed"];
const THREADS: [u64; 2] = [1, 2];
/// One record in this many has its whole copy summed up and compared with the source.
const SUM_EVERY: u64 = 64;

const RECORDS: &str = "records_per_second";
const METRICS: [&str; 5] = [RECORDS, "faults_per_record", "purged_per_record", "refused", "hog_rounds"];

/// Sizes of the copies, number of threads, and whether a second process (the hog) needs memory periodically.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Case {
    sizes: &'static str,
    threads: u64,
    has_hog: bool,
}

impl Case {
    fn all() -> impl Iterator<Item = Self> {
        let alone = |sizes| THREADS.map(|threads| Self { sizes, threads, has_hog: false });
        SIZES.into_iter().flat_map(alone)
    }

    const HOG: Self = Self { sizes: SIZES[0], threads: 2, has_hog: true };

    fn name(self) -> String {
        let sizes = if self.sizes == SIZES[0] { "256 KiB" } else { "64 KiB - 1 MiB" };
        let hog = if self.has_hog { ", hog" } else { "" };
        format!("{sizes}, {} thread{}{hog}", self.threads, if self.threads == 1 { "" } else { "s" })
    }
}

/// Returns the names of all ways to store copies.
pub fn names() -> impl Iterator<Item = &'static str> {
    WAYS.iter().map(|way| way.name)
}

/// Measures the wanted ways to store copies; adds rows and verdicts to the report.
///
/// # Errors
///
/// [`crate::error::Error::WrongAnswer`] if a copy differs from its source.
pub fn run(common: &Common, is_wanted: impl Fn(&str) -> bool, report: &mut Report) -> Result<()> {
    let ways: Vec<&Way> = WAYS.iter().filter(|way| is_wanted(way.name)).collect();
    if ways.is_empty() {
        return Ok(());
    }
    let mut cases: Vec<Case> = Case::all().collect();
    match hog::limit() {
        Ok(()) => cases.push(Case::HOG),
        Err(why) => report.gap(format!("ebizzy on handles: no case with a hog, since {why}")),
    }
    let book = measure(common, &cases, &ways, report)?;
    for case in &cases {
        for way in &ways {
            rows(report, &book, case, way.name);
        }
    }
    verdicts(report, &book, &cases);
    Ok(())
}

fn rows(report: &mut Report, book: &Book<Case>, case: &Case, way: &'static str) {
    let name = case.name();
    let table = format!("ebizzy on handles: records/s, half the spread, times {MALLOC}");
    let place = Some(Place { table, column: name.clone() });
    let metric = Metric { name: RECORDS, unit: "1/s", better: Better::Higher, baseline: Some(MALLOC) };
    report_row(report, book, (case, &name), way, metric, place);
    for other in &METRICS[1..] {
        let metric = Metric { name: other, unit: "1", better: Better::Lower, baseline: None };
        report_row(report, book, (case, &name), way, metric, None);
    }
}

fn measure(common: &Common, cases: &[Case], ways: &[&Way], report: &mut Report) -> Result<Book<Case>> {
    let progress = Progress::new(common.rounds() * cases.len() * ways.len());
    let mut book = Book::new();
    for round in 0..common.rounds() {
        for case in cases {
            for index in 0..ways.len() {
                let way = ways[(index + round) % ways.len()];
                progress.step(way.name);
                if case.has_hog {
                    with_hog(common, case, way, &mut book, report)?;
                } else {
                    alone(common, case, way, &mut book)?;
                }
            }
        }
    }
    Ok(book)
}

fn alone(common: &Common, case: &Case, way: &Way, book: &mut Book<Case>) -> Result<()> {
    let numbers = [
        ("--warm-ms", common.pick(30, 250)),
        ("--measure-ms", common.pick(100, 1000)),
        ("--threads", case.threads),
        ("--sum-every", SUM_EVERY),
    ];
    let words = ["__ebizzy", "--memory", way.memory, "--sizes", case.sizes].map(str::to_owned);
    let arguments: Vec<String> = words.into_iter().chain(child::numbers(&numbers)).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let mut command = child::workload(&arguments)?;
    subject::clear_foreign_settings(&mut command);
    command.envs(way.settings.iter().copied());
    let finished = Running::start(&mut command)?.finish(Duration::from_secs(60))?;
    book.enter(case, way.name, &METRICS, &child::outcome(way.name, &finished)?);
    Ok(())
}

fn with_hog(common: &Common, case: &Case, way: &Way, book: &mut Book<Case>, report: &mut Report) -> Result<()> {
    let folder = tempfile::tempdir().map_err(doing("making a folder for the lock"))?;
    let mut line = vec![child::own_executable()?.display().to_string()];
    line.extend(Times::new(common).pair(folder.path()));
    line.extend(["--memory", way.memory, "--sum-every", &SUM_EVERY.to_string()].map(str::to_owned));
    match hog::sample_of(way.name, &line, folder.path(), true, way.settings)? {
        Ok(outcome) => book.enter(case, way.name, &METRICS, &outcome),
        Err(gap) => report.gap(gap),
    }
    Ok(())
}

fn verdicts(report: &mut Report, book: &Book<Case>, cases: &[Case]) {
    let peers = |at_once: bool| if at_once { [FREE, DONTNEED] } else { [MALLOC, KEEPING] };
    for case in cases {
        for (kind, at_once, least) in [("malloc", false, 0.95), ("pages given up at once", true, 1.0)] {
            let target = format!("ebizzy on handles against the best of {kind}, {}", case.name());
            report.verdict(against_best(book, case, &target, &peers(at_once), least));
        }
    }
}

/// Compares volatile handles with the fastest of `peers` that lost no round.
fn against_best(book: &Book<Case>, case: &Case, target: &str, peers: &[&'static str], least: f64) -> Verdict {
    let blank = |why: &str| not_measured(target, Bound::AtLeast(least), "x", why);
    let Some(own) = book.get(case, HANDLES, RECORDS) else {
        return blank("handles were not run");
    };
    let survivors = peers.iter().filter_map(|name| Some((*name, book.get(case, name, RECORDS)?)));
    let survivors = survivors.filter(|(_, series)| series.survived());
    let median = |series: &crate::report::Series| series.median().unwrap_or_default();
    let best = survivors.max_by(|(_, a), (_, b)| median(a).total_cmp(&median(b)));
    let Some((name, best)) = best else {
        return Verdict { is_lost: !own.survived(), ..blank("no peer of this kind survived") };
    };
    Verdict {
        estimate: stats::estimate(&own.ratios(best, Better::Higher)),
        baseline: name.to_owned(),
        is_lost: !own.survived(),
        ..blank("")
    }
}
