//! The part `loop`: the test of the patches of 2007. A program reads 100 MiB of a file again and again into memory from
//! `malloc`: from a page cache in the process, from a mount, under `pagemill run`, and from the kernel.

use std::time::Duration;

use super::page::Page;
use super::{Part, Plan};
use crate::child::{self, Outcome};
use crate::error::{Error, Result};
use crate::experiment::{Metric, Study, metric_names};
use crate::files::mount::{Mounter, PAGEMILL_MOUNT};
use crate::files::place_arguments;
use crate::report::{Report, Row, TableCell};
use crate::storage::Subject;
use crate::subject;

/// Subject: a file in the kernel's memory, and the C library's allocator.
const KERNEL: &str = "kernel";
/// Subject: a file on a new `pagemill mount`.
const MOUNT: &str = "mount";
/// Subject: as [`KERNEL`], but under `pagemill run` with its default settings. The subjects with a page size also have
/// `--no-huge`, because page sizes have no effect in huge pages.
const RUN: &str = "run";

/// Length of the file.
pub const LEN_BYTES: u64 = 100 << 20;
/// Number of passes after the first (quick, full).
const PASSES: (u64, u64) = (5, 20);
const TIME_LIMIT: Duration = Duration::from_secs(120);

const AGAIN_US: Metric = Metric::lower("again_us", "us");
const COLUMNS: [(Metric, &str); 3] = [
    (AGAIN_US.against(KERNEL), "again, us"),
    (Metric::lower("first_us", "us").against(KERNEL), "first pass, us"),
    (Metric::lower("first_faults", "faults"), "faults of the first pass"),
];

/// The published results: page size of the kernel, and microseconds for a pass over 100 MiB.
///
/// Source: A. Arcangeli, "CONFIG_PAGE_SHIFT (aka software PAGE_SIZE)", linux-kernel, July 2007.
const ORIGINAL: [(&str, f64); 2] = [("original-2007: 4 KiB", 109_722.0), ("original-2007: 8 KiB", 108_703.0)];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    Cache(&'static Page),
    Mount,
    Run(Option<&'static Page>),
    Kernel,
}

pub fn subjects(pages: &[&'static Page]) -> Vec<Subject<Work>> {
    let caches = pages.iter().map(|page| Subject { name: page.cache, work: Work::Cache(page) });
    let runs = pages.iter().map(|page| Subject { name: page.run, work: Work::Run(Some(page)) });
    let kernel = [Subject { name: KERNEL, work: Work::Kernel }, Subject { name: MOUNT, work: Work::Mount }];
    kernel.into_iter().chain(caches).chain([Subject { name: RUN, work: Work::Run(None) }]).chain(runs).collect()
}

pub fn run(plan: &Plan<'_>, report: &mut Report) -> Result<()> {
    let mut subjects = plan.wanted(Part::Loop, subjects(&plan.pages));
    let mounter = match subjects.iter().any(|subject| subject.work == Work::Mount).then(|| Mounter::new(None)) {
        Some(Err(error)) => {
            report.add_gap(format!("{MOUNT}: {error}"));
            subjects.retain(|subject| subject.work != Work::Mount);
            None
        }
        Some(Ok(mounter)) => Some(mounter),
        None => None,
    };
    child::touch_beforehand(2 * (LEN_BYTES >> 20) + 64)?;
    let passes = plan.common.quick_or_full(PASSES);
    let mut study = Study::new(report, |()| "100 MiB".to_owned());
    study.measure_by_round((&[()], plan.common.rounds()), &subjects, &metric_names(&COLUMNS), |(), subject| {
        child::failed_if_gap(sample(subject, passes, mounter.as_ref()))
    })?;
    let table = format!("100 MiB of a file read into memory from malloc: half the spread, times {KERNEL}");
    study.rows(&(), &subjects, &table, &COLUMNS);
    for (subject, value) in ORIGINAL {
        report.add_row(Row {
            case: "100 MiB".to_owned(),
            subject: subject.to_owned(),
            cell: Some(TableCell { table: table.clone(), column: COLUMNS[0].1.to_owned() }),
            ..report.single_value(AGAIN_US.name, value, "us")
        });
    }
    Ok(())
}

fn sample(subject: &Subject<Work>, passes: u64, mounter: Option<&Mounter>) -> Result<Outcome> {
    let numbers = [("--len-bytes", LEN_BYTES), ("--passes", passes)];
    let mut line = child::command_words(&["__pageshift-loop"], &numbers);
    match subject.work {
        Work::Kernel => {}
        Work::Cache(page) => line.extend(["--page", page.text].map(str::to_owned)),
        Work::Mount => {
            let mounter = mounter.ok_or_else(|| Error::Gap(format!("{MOUNT}: nothing can be mounted")))?;
            let mounted = mounter.mount(PAGEMILL_MOUNT, 2 * LEN_BYTES)?;
            line.extend(place_arguments(&mounted));
            let outcome = child::run_plain(subject.name, line, TIME_LIMIT)?;
            return match mounted.unmount().complaint {
                Some(complaint) => Err(Error::Gap(complaint)),
                None => Ok(outcome),
            };
        }
        Work::Run(page) => {
            let gap = || Error::Gap(format!("{}: the command is not built: cargo build --release", subject.name));
            let command = subject::built_file("pagemill").ok_or_else(gap)?;
            let options = page.into_iter().flat_map(|page| ["--no-huge", "--page-size", page.text]);
            let first = [command.display().to_string(), "run".to_owned()].into_iter();
            let words = first.chain(options.chain(["--"]).map(str::to_owned));
            let words = words.chain([child::own_executable()?.display().to_string()]).chain(line);
            let words: Vec<String> = words.chain(["--preloaded".to_owned()]).collect();
            return child::run_to_end(subject.name, &mut child::command_in_group(None, &words)?, TIME_LIMIT);
        }
    }
    child::run_plain(subject.name, line, TIME_LIMIT)
}
