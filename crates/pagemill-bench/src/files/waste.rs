//! Memory that files take in addition to their content, under each setting for huge pages; and whether large files get
//! huge pages.

use std::time::Duration;

use super::Plan;
use super::mount::{ALWAYS, FileSystem, Mounter, NEVER, STEERED, WITHIN_SIZE};
use crate::child;
use crate::error::Result;
use crate::experiment::{Book, Metric, not_measured, report_row};
use crate::report::{Bound, Place, Report, Verdict};
use crate::stats::{self, Better};

const AT_ONCE: &str = "used_at_once";
const LATER: &str = "used_after_second";
const SHARE: &str = "huge_share";
/// The bound on the memory of files after a second, relative to their memory in small pages.
const MOST: f64 = 1.1;
const LEAST_SHARE: f64 = 0.95;

/// How a kind of files is judged: not at all, by the memory that it takes, or by its fraction in huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Judged {
    Not,
    BySize,
    ByHugePages,
}

/// Files of one size, all written in the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Kind {
    name: &'static str,
    files: u64,
    bytes: u64,
    /// Bytes per write; with 0 the file is a hole with one byte in its middle.
    step: u64,
    judged: Judged,
}

const LARGE: u64 = 64 << 20;

const fn appended(name: &'static str, step: u64) -> Kind {
    Kind { name, files: 1, bytes: LARGE, step, judged: Judged::ByHugePages }
}

const KINDS: [Kind; 6] = [
    Kind { name: "small: 1000 x 1000 B", files: 1000, bytes: 1000, step: 1000, judged: Judged::BySize },
    Kind { name: "middle: 300 x 300 KiB", files: 300, bytes: 300 << 10, step: 64 << 10, judged: Judged::Not },
    Kind { name: "sparse: 100 x 64 MiB, 1 B each", files: 100, bytes: LARGE, step: 0, judged: Judged::BySize },
    appended("64 MiB in steps of 4 KiB", 4 << 10),
    appended("64 MiB in steps of 64 KiB", 64 << 10),
    appended("64 MiB in steps of 1 MiB", 1 << 20),
];

/// Runs the experiment and returns the report.
///
/// # Errors
///
/// [`crate::error::Error::CannotRun`] if mounting is not permitted.
pub fn run(options: &super::FileOptions) -> Result<Report> {
    let common = &options.common;
    let mounter = Mounter::new(options.dir.as_deref())?;
    let (ready, gaps) = mounter.select(&common.only, &[NEVER, WITHIN_SIZE, ALWAYS, STEERED])?;
    let mut report = Report::new("waste", common.json);
    gaps.into_iter().for_each(|gap| report.gap(gap));
    // If all pages were huge, each small file would take 2 MiB.
    child::warm(2100)?;
    let plan = Plan {
        cases: &KINDS,
        rounds: common.rounds(),
        size_bytes: 8 << 30,
        metrics: &[AT_ONCE, LATER, SHARE],
        arguments: &arguments,
        name: &|kind| kind.name.to_owned(),
        limit: Duration::from_secs(120),
    };
    let book = plan.measure(&mounter, &ready, &mut report)?;
    for kind in KINDS {
        rows(&mut report, &book, kind, &ready);
        match kind.judged {
            Judged::Not => {}
            Judged::BySize => report.verdict(size_verdict(&book, kind)),
            Judged::ByHugePages => report.verdict(share_verdict(&book, kind)),
        }
    }
    Ok(report)
}

fn arguments(kind: &Kind) -> Vec<String> {
    let numbers = [("--files", kind.files), ("--bytes", kind.bytes), ("--step", kind.step)];
    ["__waste".to_owned()].into_iter().chain(child::numbers(&numbers)).collect()
}

fn rows(report: &mut Report, book: &Book<Kind>, kind: Kind, ready: &[FileSystem]) {
    let mut metrics = vec![
        (AT_ONCE, "MiB", Some(NEVER.name), "used at once"),
        (LATER, "MiB", Some(NEVER.name), "used after a second"),
    ];
    if kind.judged == Judged::ByHugePages {
        metrics.push((SHARE, "share", None, "mapped huge"));
    }
    for (name, unit, baseline, column) in metrics {
        for subject in ready {
            let table = format!("{}: MiB, half the spread, times {}", kind.name, NEVER.name);
            let place = Some(Place { table, column: column.to_owned() });
            let metric = Metric { name, unit, better: Better::Lower, baseline };
            report_row(report, book, (&kind, kind.name), subject.name, metric, place);
        }
    }
}

fn size_verdict(book: &Book<Kind>, kind: Kind) -> Verdict {
    let target = format!("{}, used after a second, against {}", kind.name, NEVER.name);
    let verdict = not_measured(target, Bound::AtMost(MOST), "x", "one side was not run");
    match (book.get(&kind, STEERED.name, LATER), book.get(&kind, NEVER.name, LATER)) {
        (Some(series), Some(never)) => Verdict {
            // The ratio is bytes divided by bytes, so a larger ratio is worse here.
            estimate: stats::estimate(&series.ratios(never, Better::Higher)),
            baseline: NEVER.name.to_owned(),
            is_lost: !series.survived(),
            note: String::new(),
            ..verdict
        },
        _ => verdict,
    }
}

fn share_verdict(book: &Book<Kind>, kind: Kind) -> Verdict {
    let target = format!("{}, share in huge pages when mapped a second after the close", kind.name);
    let verdict = not_measured(target, Bound::AtLeast(LEAST_SHARE), "of 1", "pagemill was not run");
    match book.get(&kind, STEERED.name, SHARE) {
        Some(series) => Verdict {
            estimate: stats::estimate(&series.values()),
            is_lost: !series.survived(),
            note: String::new(),
            ..verdict
        },
        None => verdict,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The arguments of the workload have the numbers of a kind. Two kinds are judged by size, three by huge pages.
    #[test]
    fn kinds_are_told_to_the_workload() {
        assert_eq!(arguments(&KINDS[2]), ["__waste", "--files", "100", "--bytes", "67108864", "--step", "0"]);
        let count = |judged| KINDS.iter().filter(|kind| kind.judged == judged).count();
        assert_eq!((count(Judged::BySize), count(Judged::ByHugePages)), (2, 3));
    }

    /// The fraction in huge pages has a verdict without a baseline. The ratio of bytes has one only if both file
    /// systems were measured.
    #[test]
    fn verdicts_need_both_sides() {
        let (mut book, small, large) = (Book::new(), KINDS[0], KINDS[3]);
        for _ in 0..3 {
            book.enter_value(&small, STEERED.name, LATER, 10.0);
            book.enter_value(&large, STEERED.name, SHARE, 0.5);
        }
        assert!(size_verdict(&book, small).estimate.is_none());
        book.enter_value(&small, NEVER.name, LATER, 5.0);
        assert_eq!(size_verdict(&book, small).estimate.map(|estimate| estimate.value), Some(2.0));
        assert_eq!(share_verdict(&book, large).state(), crate::report::State::FallsShort);
    }
}
