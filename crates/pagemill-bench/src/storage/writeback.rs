//! Cost of writeback: scattered dirty pages of 4 KiB in a file of 1 GiB. The results are compared with fio and with a
//! bare io_uring that write at the same offsets in the same order.

use std::path::Path;
use std::time::Duration;

use fastrand::Rng;
use tempfile::TempDir;

use super::fio::{self, Engine, Job, Task};
use super::target::Target;
use super::{CPU, IOS, MIB, PlaceOptions, Subject, device, judge_against_best, sample};
use crate::child::{self, Outcome};
use crate::error::{Error, Result, doing};
use crate::experiment::{CommonOptions, Metric, Study, metric_names};
use crate::pattern::RECORD_BYTES;
use crate::report::{Bound, Report};

/// Metric: number of write operations that the subject submits, per dirty page.
pub const TRANSFERS: &str = "transfers_per_page";
/// Metric: number of writes that the block device completed, per dirty page.
const DEVICE_WRITES: &str = "device_writes_per_page";

/// The metrics, and their columns of the table.
const COLUMNS: [(Metric, &str); 5] = [
    (Metric::higher(MIB, "MiB/s").against(FIO_URING), "MiB/s"),
    (Metric::higher(IOS, "1/s"), "pages /s"),
    (Metric::lower(CPU, "us").against(FIO_URING), "processor, us"),
    (Metric::lower(TRANSFERS, "1"), "transfers a page"),
    (Metric::lower(DEVICE_WRITES, "1"), "writes of the device a page"),
];

/// Subject: the writeback of the page cache.
const CACHE: &str = "cache";
/// Subject: a bare io_uring with [`DEPTH`] writes in flight.
const RING: &str = "ring-64";
const FIO_URING: &str = "fio-io_uring-64";
/// Number of writes in flight of [`RING`] and of the asynchronous fio jobs.
const DEPTH: u64 = 64;
/// Size of the file in MiB (quick, full).
const FILE_MIB: (u64, u64) = (256, 1024);

/// By default, one page in this many is dirty. That is enough for half a second of writes. Seven of eight dirty pages
/// follow a clean page. So merging gains little, and the comparison is mostly of writes of single pages.
const PAGES_PER_DIRTY_PAGE: u64 = 8;

#[derive(Clone, Copy, Debug)]
enum Work {
    Cache,
    Ring,
    Fio(Engine, u64),
}

const SUBJECTS: [Subject<Work>; 5] = [
    Subject { name: CACHE, work: Work::Cache },
    Subject { name: RING, work: Work::Ring },
    Subject { name: FIO_URING, work: Work::Fio(fio::URING_FIXED_BUFFERS, DEPTH) },
    Subject { name: "fio-libaio-64", work: Work::Fio(fio::LIBAIO, DEPTH) },
    Subject { name: "fio-psync", work: Work::Fio(fio::PSYNC, 1) },
];

#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    #[command(flatten)]
    pub common: CommonOptions,
    #[command(flatten)]
    pub place: PlaceOptions,
    /// Write to the file given by --file, WHOSE CONTENT IS LOST; required with --file
    #[arg(long, requires = "file")]
    pub writes: bool,
    /// Make one page in this many dirty
    #[arg(
        long,
        value_name = "PAGES",
        default_value_t = PAGES_PER_DIRTY_PAGE,
        value_parser = clap::value_parser!(u64).range(1..=1024)
    )]
    pub one_of: u64,
}

/// Returns the offsets of the dirty pages in ascending order: on average one page in `one_of`, chosen by the seed.
pub fn page_offsets(len_bytes: u64, io_bytes: u64, one_of: u64, seed: u64) -> Vec<u64> {
    let mut random = Rng::with_seed(seed);
    let all = (0..len_bytes / io_bytes).map(|index| index * io_bytes);
    all.filter(|_| random.u64(..one_of) == 0).collect()
}

/// The only case of the experiment.
const CASE: &str = "4 KiB here and there";

/// Measures the cost of writeback of scattered dirty pages. Adds rows and verdicts to the report.
///
/// # Errors
///
/// [`Error::WrongAnswer`] if the file has wrong contents afterwards; [`Error::CannotRun`] for an unknown subject,
/// without a file, or for `--file` without `--writes`.
pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let common = &options.common;
    if let Some(path) = options.place.file.as_ref().filter(|_| !options.writes) {
        let path = path.display();
        return Err(Error::CannotRun(format!("{path}: writing to it needs --writes, since its content is lost")));
    }
    let subjects = fio::available_subjects(common, &SUBJECTS, report)?;
    let target = options.place.open_or_make(common.quick_or_full(FILE_MIB))?;
    let pages = page_offsets(target.len_bytes, RECORD_BYTES as u64, options.one_of, 0).len();
    report
        .add_note(format!("the file has {} MiB, of which about {pages} pages are made dirty", target.len_bytes >> 20));
    report.add_note("all subjects end with one fdatasync, which is timed; processor and rates are for each page");
    if device::completed_writes(target.path()).is_none() {
        report.add_gap("the file's device is unknown: writes that the kernel merges are not counted");
    }
    let mut study = Study::new(report, |case: &&str| (*case).to_owned());
    measure_rounds(options, &mut study, &subjects, &target)?;
    let table =
        format!("4 KiB pages here and there, O_DIRECT, in the order of the file; half the spread, times {FIO_URING}");
    study.rows(&CASE, &subjects, &table, &COLUMNS);
    let target = format!("pages written back and safe, {CACHE}, against the best of fio");
    let peers = fio::names(&SUBJECTS);
    judge_against_best(&mut study, (target, Bound::AtLeast(0.95)), (&CASE, CACHE), (&peers, IOS));
    Ok(())
}

fn measure_rounds(
    options: &Options,
    study: &mut Study<'_, &'static str>,
    subjects: &[&Subject<Work>],
    target: &Target,
) -> Result<()> {
    let common = &options.common;
    child::touch_beforehand((target.len_bytes >> 20) / options.one_of * 2 + 256)?;
    let folder = TempDir::with_prefix("pagemill-bench-").map_err(doing("making a folder for a list of writes"))?;
    let list = folder.path().join("list");
    let order = (0..common.rounds()).map(|round| (&CASE, round));
    study.measure(
        order,
        subjects,
        &metric_names(&COLUMNS),
        |_, _, _| true,
        |_, subject, round| {
            let seed = round as u64 + 1;
            let page_offsets = page_offsets(target.len_bytes, RECORD_BYTES as u64, options.one_of, seed);
            fio::write_list(&list, &page_offsets, RECORD_BYTES as u64).map_err(doing("writing a list of writes"))?;
            let before = device::completed_writes(target.path());
            let mut outcome = run_sample(subject, target, &list, (options.one_of, seed))?;
            if let (Outcome::Measured(line), Some(before)) = (&mut outcome, before)
                && let Some(after) = device::completed_writes(target.path())
            {
                line[DEVICE_WRITES] = ((after - before) as f64 / page_offsets.len() as f64).into();
            }
            Ok(outcome)
        },
    )
}

fn run_sample(subject: &Subject<Work>, target: &Target, list: &Path, (one_of, seed): (u64, u64)) -> Result<Outcome> {
    let mut words = vec!["__writeback".to_owned()];
    match subject.work {
        Work::Fio(engine, depth) => {
            let mut outcome = Job::new(target, engine, (RECORD_BYTES as u64, depth), Task::Replay { list }).run()?;
            if let Outcome::Measured(line) = &mut outcome {
                // fio writes each page with an operation of its own.
                line[TRANSFERS] = 1.0.into();
            }
            return Ok(outcome);
        }
        Work::Ring => words.extend(child::numeric_options(&[("--ring", DEPTH)])),
        Work::Cache => {}
    }
    words.extend(child::numeric_options(&[("--one-of", one_of), ("--seed", seed)]));
    sample(subject.name, target, words, Duration::from_secs(300))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Equal seeds must give equal offsets. The offsets must ascend, be multiples of the page size inside the file, and
    /// select about one page in eight. With `one_of` equal to 1, all pages must be selected.
    #[test]
    fn page_offsets_follow_the_seed() {
        let (len_bytes, io_bytes) = (64 << 20, RECORD_BYTES as u64);
        let drawn = page_offsets(len_bytes, io_bytes, 8, 1);

        assert!(drawn.is_sorted() && drawn.iter().all(|place| place % io_bytes == 0 && *place < len_bytes));
        assert!((1800..2300).contains(&drawn.len()), "{}", drawn.len());
        assert!(drawn == page_offsets(len_bytes, io_bytes, 8, 1) && drawn != page_offsets(len_bytes, io_bytes, 8, 2));
        assert_eq!(page_offsets(len_bytes, io_bytes, 1, 1).len() as u64, len_bytes / io_bytes);
    }
}
