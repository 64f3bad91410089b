//! Cost of a cache hit: resident pages are copied out and pinned in random order. The subjects are the page cache,
//! plain memory, files of the kernel, and other caches. Also measures the memory that each cache uses in addition to
//! its pages.

use std::time::Duration;

use crate::callgrind::{self, INSTRUCTIONS};
use crate::child::{self, Outcome};
use crate::error::Result;
use crate::experiment::{CommonOptions, Metric, Named, Study, threads_text};
use crate::files;
use crate::files::mount::{ALWAYS, FileSystem, Mounter, NEVER};
use crate::report::{Bound, Report, Series};

/// Subject: the page cache with huge folios.
const HUGE_FOLIOS: &str = "huge";
/// Subject: the page cache with folios of one page.
const SMALL_FOLIOS: &str = "dense";
/// Subject: plain memory in huge pages.
const MEMCPY: &str = "memcpy";
/// Subject: plain memory in huge pages, with a state word for each page.
const FRAMES: &str = "frames";
/// Subject: a file on tmpfs without huge pages, read by `pread`.
const PREAD_NEVER: &str = "pread-huge-never";
/// Subject: a file on tmpfs with huge pages, read by `pread`.
const PREAD_ALWAYS: &str = "pread-huge-always";
/// Subject: a cache of the crate foyer.
const FOYER: &str = "foyer";
/// Name of the part of the experiment with many small files. `--only` accepts it like the name of a subject.
const SMALL_FILES_PART: &str = "files";

/// Metric: time to copy 4 KiB out of a resident page.
const COPY_NS: &str = "copy_ns";
/// Metric: time to pin a resident page and read 8 bytes of it.
const PIN_NS: &str = "pin_ns";
/// Metric: time to pin a resident page with a hint of its folio, and read 8 bytes of it.
const HINTED_NS: &str = "hinted_ns";
/// Metric: time to read 8 bytes of a resident page with a hint of its folio, without a pin.
const HINTED_READ_NS: &str = "hinted_read_ns";
/// Metric: bytes of page metadata (frames) per cached page.
const FRAME_BYTES: &str = "frames_bytes";
/// Metric: bytes of the index of the file per cached page.
const INDEX_BYTES: &str = "index_bytes";
/// Metric: resident bytes per cached page in addition to the page itself.
const ADDED_BYTES: &str = "beside_bytes";
/// Metric: fraction of the resident memory that is in huge pages.
const HUGE_SHARE: &str = "huge_share";
/// Metric of small files: resident bytes, relative to the files' sizes rounded up to pages.
const RESIDENT_RATIO: &str = "resident_ratio";
/// Metric of small files: bytes that the cache counts as used, relative to the files' sizes rounded up to pages.
const COUNTED_RATIO: &str = "counted_ratio";

const PAGE_CACHE_METRICS: &[&str] =
    &[COPY_NS, PIN_NS, HINTED_NS, HINTED_READ_NS, FRAME_BYTES, INDEX_BYTES, ADDED_BYTES, HUGE_SHARE];
const PEER_METRICS: &[&str] = &[COPY_NS, PIN_NS, ADDED_BYTES, HUGE_SHARE];
const UNPINNED_METRICS: &[&str] = &[COPY_NS, HUGE_SHARE];

/// Makes glibc use huge pages for all its memory. This is the best setting for a cache that allocates its pages with
/// malloc.
const GLIBC_HUGE_PAGES: &[(&str, &str)] = &[("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")];

/// A subject: a store of pages (cache, file or plain memory), its mount if it uses files, and the environment variables
/// of its workload.
struct Subject {
    name: &'static str,
    /// The subject's name on the workload's command line.
    argument: &'static str,
    mount: Option<FileSystem>,
    settings: &'static [(&'static str, &'static str)],
    metrics: &'static [&'static str],
}

impl Subject {
    const fn new(name: &'static str, argument: &'static str, metrics: &'static [&'static str]) -> Self {
        Self { name, argument, mount: None, settings: &[], metrics }
    }
}

impl Named for Subject {
    fn name(&self) -> &'static str {
        self.name
    }
}

const SUBJECTS: [Subject; 10] = [
    Subject::new(HUGE_FOLIOS, "huge", PAGE_CACHE_METRICS),
    Subject::new(SMALL_FOLIOS, "dense", PAGE_CACHE_METRICS),
    Subject::new(MEMCPY, "memcpy", UNPINNED_METRICS),
    Subject::new(FRAMES, "frames", &[COPY_NS, PIN_NS, HINTED_NS, HINTED_READ_NS, HUGE_SHARE]),
    Subject { mount: Some(NEVER), ..Subject::new("mmap-huge-never", "mmap", UNPINNED_METRICS) },
    Subject { mount: Some(ALWAYS), ..Subject::new("mmap-huge-always", "mmap", UNPINNED_METRICS) },
    Subject { mount: Some(NEVER), ..Subject::new(PREAD_NEVER, "pread", &[COPY_NS]) },
    Subject { mount: Some(ALWAYS), ..Subject::new(PREAD_ALWAYS, "pread", &[COPY_NS]) },
    Subject { settings: GLIBC_HUGE_PAGES, ..Subject::new(FOYER, "foyer", PEER_METRICS) },
    Subject { settings: GLIBC_HUGE_PAGES, ..Subject::new("quick_cache", "quick-cache", PEER_METRICS) },
];

/// MiB of data that each subject stores (quick, full).
const DATA_MIB: (u64, u64) = (256, 1024);
/// Duration in milliseconds of each measurement (quick, full).
const MEASUREMENT_MS: (u64, u64) = (50, 500);
/// Number of small files (quick, full).
const SMALL_FILE_COUNT: (u64, u64) = (10_000, 100_000);
/// Time limit of a workload process.
const TIME_LIMIT: Duration = Duration::from_secs(120);
/// Size of a small file.
const SMALL_FILE_BYTES: u64 = 1 << 10;
/// Number of samples (quick, full). It is larger than in other experiments, because the targets have a margin of only
/// 5 %.
const ROUNDS: (usize, usize) = (3, 9);
/// Minimum of [`HUGE_SHARE`] of a baseline. If the fraction is smaller, the report warns that the baseline is too slow.
/// The memory outside of huge pages may be memory that is not part of the data.
const MIN_HUGE_FRACTION: f64 = 0.98;

#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    #[command(flatten)]
    pub common: CommonOptions,
    /// MiB of data in each subject (default 1024, with --quick 256)
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..))]
    pub mib: Option<u64>,
    /// Number of small files in the last part (default 100000, with --quick 10000)
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    pub files: Option<u64>,
    /// Also count the instructions of a hit, a pin and a read with a hint with valgrind
    #[arg(long)]
    pub callgrind: bool,
}

/// Number of threads of a measurement. All of them access the same pages.
type Case = u64;
const THREAD_COUNTS: [Case; 2] = [1, 2];
/// The case under which memory sizes and small files are reported, which do not depend on the number of threads.
const SIZES_CASE: Case = 1;

/// Measures the cost of cache hits, and the memory that caches use in addition to their pages. Adds rows and verdicts to
/// the report.
///
/// # Errors
///
/// [`crate::error::Error::WrongAnswer`] if a page had wrong contents; [`crate::error::Error::CannotRun`] for an unknown
/// subject.
pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let common = &options.common;
    let known: Vec<&str> = SUBJECTS.iter().map(|subject| subject.name).chain([SMALL_FILES_PART]).collect();
    common.check_only(&known)?;
    let mut subjects = common.wanted(&SUBJECTS);
    let mounter = match subjects.iter().any(|subject| subject.mount.is_some()).then(|| Mounter::new(None)) {
        None => None,
        Some(Ok(mounter)) => Some(mounter),
        Some(Err(error)) => {
            report.add_gap(format!("files on tmpfs: {error}"));
            subjects.retain(|subject| subject.mount.is_none());
            None
        }
    };
    let mut study = Study::new(report, |threads| threads_text(*threads));
    measure_cases(options, &mut study, &subjects, mounter.as_ref())?;
    add_rows(&mut study, &subjects);
    report_doubtful_measurements(&mut study, &subjects);
    add_verdicts(&mut study);
    if options.callgrind {
        count_instructions(common, report)?;
    }
    Ok(())
}

/// The counted operations: metric of the operation's time, name, the subject that is the baseline, and the budget. The
/// budget is the maximum number of instructions that the operation takes more than the baseline.
const INSTRUCTION_BUDGETS: [(&str, &str, &str, f64); 4] = [
    (COPY_NS, "copy of 4 KiB", MEMCPY, 190.0),
    (PIN_NS, "pin, read 8 bytes, unpin", FRAMES, 170.0),
    (HINTED_NS, "pin with a hint, read 8 bytes, unpin", FRAMES, 115.0),
    (HINTED_READ_NS, "read 8 bytes with a hint", FRAMES, 80.0),
];

/// Counts the instructions of the operations in [`INSTRUCTION_BUDGETS`]. Adds rows and verdicts to the report.
fn count_instructions(common: &CommonOptions, report: &mut Report) -> Result<()> {
    let wanted = common.wanted(&SUBJECTS);
    let mut study = Study::new(report, |(_, what, ..): &(&str, &str, &str)| (*what).to_owned());
    for (operation, what, baseline, budget) in INSTRUCTION_BUDGETS {
        let case = (operation, what, baseline);
        let is_counted = |subject: &&&Subject| [HUGE_FOLIOS, SMALL_FOLIOS, baseline].contains(&subject.name);
        let subjects: Vec<&Subject> = wanted.iter().filter(is_counted).copied().collect();
        study.measure_by_case((&[case], 1), &subjects, &[INSTRUCTIONS], |_, subject| {
            callgrind::count_instructions(subject.name, INSTRUCTIONS, |command, operations| {
                let words = ["__hit", "--subject", subject.argument, "--operation", operation];
                let numbers = [("--threads", 1), ("--mib", 16), ("--run-ms", 0), ("--operations", operations)];
                command.args(child::command_words(&words, &numbers));
            })
        })?;
        let metric = Metric::lower(INSTRUCTIONS, "instructions").against(baseline);
        study.rows(&case, &subjects, "instructions of one operation (callgrind)", &[(metric, what)]);
        let count = |subject| study.samples.get((&case, subject, INSTRUCTIONS)).and_then(Series::median);
        for subject in [HUGE_FOLIOS, SMALL_FOLIOS] {
            if let (Some(own), Some(base)) = (count(subject), count(baseline)) {
                let verdict = callgrind::judge_added(format!("{what}, {subject}"), budget, own, (baseline, base));
                study.report.add_verdict(verdict);
            }
        }
    }
    Ok(())
}

fn measure_cases(
    options: &Options,
    study: &mut Study<'_, Case>,
    subjects: &[&Subject],
    mounter: Option<&Mounter>,
) -> Result<()> {
    let common = &options.common;
    let (rounds, run_ms) = (common.rounds_or(ROUNDS), common.quick_or_full(MEASUREMENT_MS));
    let mib = options.mib.unwrap_or(common.quick_or_full(DATA_MIB));
    let files = options.files.unwrap_or(common.quick_or_full(SMALL_FILE_COUNT));
    child::touch_beforehand(mib * 3 / 2 + 64)?;
    study.measure_by_round((&THREAD_COUNTS, rounds), subjects, PAGE_CACHE_METRICS, |threads, subject| {
        let numbers = [("--threads", *threads), ("--mib", mib), ("--run-ms", run_ms)];
        let line = child::command_words(&["__hit", "--subject", subject.argument], &numbers);
        let outcome = child::failed_if_gap(take_sample(subject, line, mounter, mib))?;
        Ok(outcome.part(|line| subject.metrics.iter().map(|metric| (*metric, line[*metric].clone())).collect()))
    })?;
    let metrics = [RESIDENT_RATIO, COUNTED_RATIO];
    study.measure_by_round((&[SIZES_CASE], rounds), &common.wanted(&[SMALL_FILES_PART]), &metrics, |_, part| {
        let numbers = [("--files", files), ("--bytes", SMALL_FILE_BYTES)];
        child::run_plain(part, child::command_words(&["__small-files"], &numbers), TIME_LIMIT)
    })
}

/// Takes one sample of a subject in a new workload process. If the subject uses files, mounts a file system for it.
fn take_sample(subject: &Subject, mut line: Vec<String>, mounter: Option<&Mounter>, mib: u64) -> Result<Outcome> {
    let mounted = match (subject.mount, mounter) {
        (Some(system), Some(mounter)) => Some(mounter.mount(system, (mib + mib / 4 + 16) << 20)?),
        _ => None,
    };
    line.extend(mounted.iter().flat_map(files::place_arguments));
    child::run_with_settings(subject.name, line, subject.settings, TIME_LIMIT)
}

fn add_rows(study: &mut Study<'_, Case>, subjects: &[&Subject]) {
    for (name, what, baseline) in [
        (COPY_NS, "copied out", MEMCPY),
        (PIN_NS, "pinned, 8 bytes read", FRAMES),
        (HINTED_NS, "pinned with a hint, 8 bytes read", FRAMES),
        (HINTED_READ_NS, "not pinned, 8 bytes read with a hint", FRAMES),
    ] {
        let table = format!("4 KiB {what} at random, ns as a thread sees it, half the spread, times {baseline}");
        for case in THREAD_COUNTS {
            study.rows(&case, subjects, &table, &[(Metric::lower(name, "ns").against(baseline), &threads_text(case))]);
        }
    }
    let metadata = [
        (Metric::lower(FRAME_BYTES, "B"), "frames, B a page"),
        (Metric::lower(INDEX_BYTES, "B"), "index, B a page"),
        (Metric::lower(ADDED_BYTES, "B"), "resident in addition to the data, B a page"),
        (Metric::higher(HUGE_SHARE, "1"), "share in huge pages"),
    ];
    study.rows_as(&SIZES_CASE, "metadata", subjects, "memory in addition to the data", &metadata);
    let table = "files of 1 KiB in one cache: bytes over those rounded up to pages";
    let sizes = [
        (Metric::lower(RESIDENT_RATIO, "x"), "resident"),
        (Metric::lower(COUNTED_RATIO, "x"), "as the cache counts it"),
    ];
    study.rows_as(&SIZES_CASE, "small files", &[SMALL_FILES_PART], table, &sizes);
}

/// Adds a warning to the report for each baseline that got too few huge pages, and for an index size that cannot be
/// right.
fn report_doubtful_measurements(study: &mut Study<'_, Case>, subjects: &[&Subject]) {
    let (report, samples) = (&mut *study.report, &study.samples);
    for subject in subjects.iter().filter(|subject| [MEMCPY, FRAMES].contains(&subject.name)) {
        let share = samples.get((&SIZES_CASE, subject.name, HUGE_SHARE)).and_then(Series::median);
        if share.is_some_and(|share| share < MIN_HUGE_FRACTION) {
            report
                .add_gap(format!("{}: the kernel gave it too few huge pages: the baseline is too slow", subject.name));
        }
    }
    let get = |metric| samples.get((&SIZES_CASE, SMALL_FOLIOS, metric));
    if get(COPY_NS).is_some_and(Series::survived) && get(INDEX_BYTES).is_some_and(|series| !series.survived()) {
        report.add_gap(format!(
            "{SMALL_FOLIOS}: the cache reports an index of less than 8 B a page, which is impossible"
        ));
    }
}

fn add_verdicts(study: &mut Study<'_, Case>) {
    for case in &THREAD_COUNTS {
        for (subject, bound, base) in [
            (HUGE_FOLIOS, Bound::AtMost(1.05), MEMCPY),
            (SMALL_FOLIOS, Bound::AtMost(1.2), MEMCPY),
            (HUGE_FOLIOS, Bound::AtLeast(2.5), PREAD_NEVER),
            (HUGE_FOLIOS, Bound::AtLeast(2.5), FOYER),
            (HUGE_FOLIOS, Bound::AtLeast(1.8), PREAD_ALWAYS),
        ] {
            let how = if matches!(bound, Bound::AtMost(_)) { "time of" } else { "as fast as" };
            let target = format!("copy, {}: {subject}, {how} {base}", threads_text(*case));
            let (own, base) = ((case, subject, COPY_NS), (case, base, COPY_NS));
            study.judge_time_ratio(target, bound, own, base);
        }
        for subject in [HUGE_FOLIOS, SMALL_FOLIOS] {
            let bounds =
                [("pin", PIN_NS, 2.5), ("pin with a hint", HINTED_NS, 1.3), ("read with a hint", HINTED_READ_NS, 1.3)];
            for (what, metric, bound) in bounds {
                let target = format!("{what}, {}: {subject}, time of {FRAMES}", threads_text(*case));
                let (own, base) = ((case, subject, metric), (case, FRAMES, metric));
                study.judge_time_ratio(target, Bound::AtMost(bound), own, base);
            }
        }
    }
    for (target, subject, metric, bound, unit) in [
        ("frames, huge, a page", HUGE_FOLIOS, FRAME_BYTES, 16.0, "B"),
        ("frames, dense, a page", SMALL_FOLIOS, FRAME_BYTES, 16.0, "B"),
        ("index, dense, a page", SMALL_FOLIOS, INDEX_BYTES, 9.5, "B"),
        ("small files, resident", SMALL_FILES_PART, RESIDENT_RATIO, 1.15, "x"),
        ("small files, counted", SMALL_FILES_PART, COUNTED_RATIO, 1.15, "x"),
    ] {
        study.judge_value(target, (Bound::AtMost(bound), unit), (&SIZES_CASE, subject, metric));
    }
}
