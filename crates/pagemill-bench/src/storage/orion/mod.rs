//! Large transfers between a file and huge or small pages, as Oracle's ORION made them in 2013. The subjects are the
//! page cache, a bare io_uring, and fio.

mod original;
mod subjects;
mod verdicts;

use std::time::Duration;

use pagemill_core::units::Bytes;

use super::fio::{self, Job, Task};
use super::target::Target;
use super::{CPU, IOS, MIB, P50, P99, P999, PlaceOptions, Subject, sample};
use crate::child::{self, Outcome};
use crate::error::Result;
use crate::experiment::{CommonOptions, Metric, Study};
use crate::report::Report;
use subjects::{SUBJECTS, Work};

const METRICS: &[&str] = &[IOS, MIB, CPU, P50, P99, P999];

const KIB_64: u64 = 64 << 10;
const MIB_1: u64 = 1 << 20;
/// Size of a huge folio in bytes.
const FOLIO_BYTES: u64 = pagemill_core::units::BLOCK_BYTES as u64;
/// Transfer sizes: the two sizes of the original experiment of 2013, and the size of a huge folio.
const SIZES: [u64; 3] = [KIB_64, MIB_1, FOLIO_BYTES];

/// Numbers of transfers in flight (quick, full).
const DEPTHS: (&[u64], &[u64]) = (&[8], &[1, 8, 64]);
/// Duration in milliseconds of a sample (quick, full).
const SAMPLE_MS: (u64, u64) = (150, 500);
/// Milliseconds of a sample with `--targets`. Such a sample is longer, because it uses only some milliseconds of CPU
/// time.
const TARGET_SAMPLE_MS: u64 = 1000;
/// Number of transfers in flight with `--targets`.
const TARGET_DEPTH: u64 = 64;
/// Minimum size of the file in MiB (quick, full).
const FILE_MIB: (u64, u64) = (256, 2048);
/// Size of the file divided by the size of the cache. A cache of this size is enlarged if it is smaller than twice the
/// bytes in flight.
const FILE_TO_CACHE_RATIO: u64 = 4;

#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    #[command(flatten)]
    pub common: CommonOptions,
    #[command(flatten)]
    pub place: PlaceOptions,
    /// Also write, even to a file given by --file, WHOSE CONTENT IS LOST (default: write only to a temporary file)
    #[arg(long, conflicts_with = "reads")]
    pub writes: bool,
    /// Run only the cases that read
    #[arg(long)]
    pub reads: bool,
    /// Run only the cases that have targets: 64 transfers in flight, of 64 KiB or 1 MiB each; one second per sample.
    /// The run takes seven minutes with --samples 3
    #[arg(long, conflicts_with = "depths")]
    pub targets: bool,
    /// Numbers of transfers in flight, separated by commas (default 1, 8, 64; with --quick 8)
    #[arg(long, value_delimiter = ',', value_name = "DEPTH", value_parser = clap::value_parser!(u64).range(1..=256))]
    pub depths: Vec<u64>,
}

/// One kind of transfer: direction, size, order of offsets, and number in flight. Writes are ordered last, because they
/// destroy the pattern with which reads are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Case {
    is_write: bool,
    io_bytes: u64,
    is_random: bool,
    depth: u64,
}

impl Case {
    fn kind(self) -> String {
        let order = if self.is_random { "random" } else { "sequential" };
        format!("{} {order} {}", Bytes(self.io_bytes), if self.is_write { "writes" } else { "reads" })
    }

    fn name(self) -> String {
        format!("{}, depth {}", self.kind(), self.depth)
    }
}

impl Options {
    fn sizes(&self) -> &'static [u64] {
        if self.targets { &SIZES[..2] } else { &SIZES }
    }

    fn depths(&self) -> &[u64] {
        match &self.depths[..] {
            [] if self.targets => &[TARGET_DEPTH],
            [] => self.common.quick_or_full(DEPTHS),
            depths => depths,
        }
    }

    fn run_ms(&self) -> u64 {
        let usual = if self.targets { TARGET_SAMPLE_MS } else { SAMPLE_MS.1 };
        self.common.quick_or_full((SAMPLE_MS.0, usual))
    }

    /// Returns the size of the file in MiB: the minimum size, or four times the bytes in flight if that is larger.
    fn file_mib(&self) -> u64 {
        let on_its_way = self.depths().iter().max().unwrap_or(&1) * self.sizes().iter().max().unwrap_or(&FOLIO_BYTES);
        self.common.quick_or_full(FILE_MIB).max((4 * on_its_way) >> 20)
    }
}

fn cases(options: &Options) -> Vec<Case> {
    let writes: &[bool] =
        if options.writes || (options.place.file.is_none() && !options.reads) { &[false, true] } else { &[false] };
    let mut cases = Vec::new();
    for is_write in writes {
        for io_bytes in options.sizes() {
            for is_random in [true, false] {
                cases.extend(options.depths().iter().map(|depth| Case {
                    is_write: *is_write,
                    io_bytes: *io_bytes,
                    is_random,
                    depth: *depth,
                }));
            }
        }
    }
    cases
}

fn largest_depth(cases: &[Case]) -> u64 {
    cases.iter().map(|case| case.depth).max().unwrap_or(0)
}

/// Measures large transfers between a file and memory. Adds rows and verdicts to the report.
///
/// # Errors
///
/// [`crate::error::Error::WrongAnswer`] if wrong bytes were read; [`crate::error::Error::CannotRun`] for an unknown
/// subject, or without a file.
pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let common = &options.common;
    let subjects = fio::available_subjects(common, &SUBJECTS, report)?;
    let target = options.place.open_or_make(options.file_mib())?;
    if !target.has_pattern {
        report.add_note("the file's content is unknown, so reads are not compared");
    }
    report.add_note(format!("the file has {} MiB", target.len_bytes >> 20));
    report.add_note(
        "fio's huge buffers are transparent huge pages of its malloc; --iomem=mmaphuge would need reserved ones",
    );
    let cases = cases(options);
    if cases.iter().any(|case| case.is_write) && subjects.iter().any(|subject| matches!(subject.work, Work::Cache)) {
        report.add_note("the cache chooses its own depth of writeback: its writes are in the row of the deepest queue");
    }
    let mut study = Study::new(report, |case: &Case| case.name());
    measure_cases(options, &mut study, &cases, &subjects, &target)?;
    add_rows(&mut study, &cases, &subjects);
    original::add_rows(study.report);
    verdicts::add_verdicts(&mut study, &cases);
    Ok(())
}

fn measure_cases(
    options: &Options,
    study: &mut Study<'_, Case>,
    cases: &[Case],
    subjects: &[&Subject<Work>],
    target: &Target,
) -> Result<()> {
    let (rounds, largest_depth) = (options.common.rounds(), largest_depth(cases));
    child::touch_beforehand((target.len_bytes >> 20) / FILE_TO_CACHE_RATIO + 512)?;
    // All reads run before all writes, because writes destroy the pattern.
    let groups = cases.chunk_by(|one, other| one.is_write == other.is_write);
    let order = groups.flat_map(|cases| (0..rounds).flat_map(move |round| cases.iter().map(move |case| (case, round))));
    let runs = |case: &Case, subject: &&Subject<Work>, _| {
        subject.runs_case(*case, largest_depth) && (!options.targets || subject.has_target(*case))
    };
    let run_ms = options.run_ms();
    study.measure(order, subjects, METRICS, runs, |case, subject, _| run_sample(subject, *case, target, run_ms))
}

fn run_sample(subject: &Subject<Work>, case: Case, target: &Target, run_ms: u64) -> Result<Outcome> {
    let Case { is_write, io_bytes, is_random, depth } = case;
    let (words, more) = match subject.work {
        Work::Fio(engine) => {
            let task = Task::Timed { is_random, is_write, jobs: 1, run_ms };
            return Job::new(target, engine, (io_bytes, depth), task).run();
        }
        Work::Ring(words) => {
            let flags = [("--random", is_random), ("--write", is_write)].into_iter().filter(|(_, is_set)| *is_set);
            let words: Vec<&str> = ["__ring"].iter().chain(words).copied().chain(flags.map(|(flag, _)| flag)).collect();
            (words, vec![("--depth", depth)])
        }
        Work::Cache if is_write => {
            // The cache is as large as the file, so that the dirty pages are only a small part of it.
            let words = ["__overwrite"].into_iter().chain(is_random.then_some("--random")).collect();
            (words, vec![("--cache-mib", target.len_bytes >> 20)])
        }
        Work::Cache => {
            let words = ["__miss"].into_iter().chain((!is_random).then_some("--sequential")).collect();
            let cache_bytes =
                (target.len_bytes / FILE_TO_CACHE_RATIO).max((2 * depth * io_bytes).min(target.len_bytes / 2));
            (words, vec![("--cache-mib", cache_bytes >> 20), ("--depth", depth)])
        }
    };
    let numbers = [more, vec![("--io-bytes", io_bytes), ("--run-ms", run_ms)]].concat();
    sample(subject.name, target, child::command_words(&words, &numbers), Duration::from_secs(120))
}

fn add_rows(study: &mut Study<'_, Case>, cases: &[Case], subjects: &[&Subject<Work>]) {
    let baseline = subjects::FIO_HUGE_FIXED;
    for (metric, what) in
        [(Metric::higher(MIB, "MiB/s"), "MiB/s"), (Metric::lower(CPU, "us"), "processor time a transfer, us")]
    {
        for case in cases {
            let table = format!("{}: {what}, half the spread, times {baseline}", case.kind());
            let columns = [(metric.against(baseline), &*format!("depth {}", case.depth))];
            study.rows(case, subjects, &table, &columns);
        }
    }
    let others =
        [Metric::higher(IOS, "1/s"), Metric::lower(P50, "us"), Metric::lower(P99, "us"), Metric::lower(P999, "us")];
    let others = others.map(|metric| metric.against(baseline));
    for case in cases {
        study.json_rows(case, subjects, &others);
    }
}
