//! Cost of a cache miss: random 4 KiB reads of a file that is six times as large as the cache. The results are compared
//! with fio and with a bare io_uring on the same file.

use std::time::Duration;

use super::fio::{self, Engine, Job, Task};
use super::target::Target;
use super::{CPU, HIT_RATIO, IOS, P50, P99, P999, PlaceOptions, READS, judge_against_best, sample};
use crate::callgrind::{self, INSTRUCTIONS};
use crate::child::{self, Outcome};
use crate::error::{Error, Result};
use crate::experiment::{CommonOptions, Metric, Named, Study, metric_names};
use crate::pattern::RECORD_BYTES;
use crate::report::{Bound, Report};

/// Metric: number of resident pages that a thread copies per second, without concurrent reads.
pub const COPIES_ALONE: &str = "alone_per_second";
/// Metric: number of resident pages that a thread copies per second, while another thread causes cache misses.
pub const COPIES_WITH_MISSES: &str = "beside_per_second";
/// Metric: [`COPIES_WITH_MISSES`] divided by [`COPIES_ALONE`].
pub const KEPT_RATIO: &str = "kept_ratio";
/// Metric: number of cache misses per second during the copies of [`COPIES_WITH_MISSES`].
pub const MISSES: &str = "misses_per_second";
/// Metric: number of copies whose page was not resident any more and had to be read from the file.
pub const COPIES_MISSED: &str = "hits_lost";

/// Subject: one thread with a queue of the page cache and [`DEPTH`] reads in flight.
const QUEUE: &str = "queue-32";
/// Subject: as [`QUEUE`], beginning with an empty cache.
const QUEUE_COLD: &str = "queue-32-cold";
/// Subject: one thread that polls [`DEPTH`] futures, each of which reads one page after the other.
const FUTURES: &str = "futures-32";
/// Subject: a bare io_uring with [`DEPTH`] reads in flight.
const RING: &str = "ring-32";
const FIO_URING: &str = "fio-io_uring-32";
const FIO_LIBAIO: &str = "fio-libaio-32";
/// Subject: copies resident pages of the cache while another thread causes misses.
const HITS: &str = "hits";
/// Subject: as [`HITS`], but the pages are copied from plain memory instead of the cache.
const HITS_PLAIN: &str = "hits-memcpy";
/// The fio subjects with blocking calls.
const FIO_PSYNC_1: &str = "fio-psync-1";
const FIO_PSYNC_8: &str = "fio-psync-8";
const FIO_PSYNC_32: &str = "fio-psync-32";

/// Number of reads in flight of [`QUEUE`] and [`RING`], and of the fio jobs with which they are compared.
const DEPTH: u64 = 32;
/// Number of reads that the bare io_uring submits together.
const RING_BATCH: u64 = 4;
/// Duration in milliseconds of a sample (quick, full).
const SAMPLE_MS: (u64, u64) = (500, 2000);
/// Size in MiB of the cache (quick, full).
const CACHE_MIB: (u64, u64) = (32, 256);
/// Size of the file divided by the size of the cache.
const FILE_TO_CACHE_RATIO: u64 = 6;

/// How a subject reads the file. The subject `Hits` copies resident pages while another thread causes misses.
#[derive(Clone, Copy, Debug)]
enum Work {
    Threads { count: u64, is_cold: bool },
    Queue { is_cold: bool },
    Futures,
    Ring,
    Fio(Engine, u64, u64),
    Hits { is_plain: bool },
}

#[derive(Clone, Copy, Debug)]
struct Subject {
    name: &'static str,
    /// Name of the fio subject with the same number of reads in flight.
    baseline: Option<&'static str>,
    work: Work,
}

impl Named for Subject {
    fn name(&self) -> &'static str {
        self.name
    }
}

const fn subject(name: &'static str, baseline: Option<&'static str>, work: Work) -> Subject {
    Subject { name, baseline, work }
}

/// All subjects. Threads read with blocking calls; a cold subject begins with an empty cache.
const SUBJECTS: [Subject; 18] = [
    subject("threads-1", Some(FIO_PSYNC_1), Work::Threads { count: 1, is_cold: false }),
    subject(FIO_PSYNC_1, None, Work::Fio(fio::PSYNC, 1, 1)),
    subject("threads-2", Some("fio-psync-2"), Work::Threads { count: 2, is_cold: false }),
    subject("fio-psync-2", None, Work::Fio(fio::PSYNC, 1, 2)),
    subject("threads-8", Some(FIO_PSYNC_8), Work::Threads { count: 8, is_cold: false }),
    subject(FIO_PSYNC_8, None, Work::Fio(fio::PSYNC, 1, 8)),
    subject("threads-32", Some(FIO_PSYNC_32), Work::Threads { count: 32, is_cold: false }),
    subject(FIO_PSYNC_32, None, Work::Fio(fio::PSYNC, 1, 32)),
    subject("threads-8-cold", Some(FIO_PSYNC_8), Work::Threads { count: 8, is_cold: true }),
    subject("threads-32-cold", Some(FIO_PSYNC_32), Work::Threads { count: 32, is_cold: true }),
    subject(QUEUE, Some(FIO_URING), Work::Queue { is_cold: false }),
    subject(QUEUE_COLD, Some(FIO_URING), Work::Queue { is_cold: true }),
    subject(FUTURES, Some(FIO_URING), Work::Futures),
    subject(FIO_URING, None, Work::Fio(fio::URING_FIXED, DEPTH, 1)),
    subject(RING, Some(FIO_URING), Work::Ring),
    subject(FIO_LIBAIO, Some(FIO_URING), Work::Fio(fio::LIBAIO, DEPTH, 1)),
    subject(HITS, None, Work::Hits { is_plain: false }),
    subject(HITS_PLAIN, None, Work::Hits { is_plain: true }),
];

#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    #[command(flatten)]
    pub common: CommonOptions,
    #[command(flatten)]
    pub place: PlaceOptions,
    /// MiB of memory for cached pages (default a sixth of the file: 256, with --quick 32)
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(2..))]
    pub cache_mib: Option<u64>,
    /// Also count the instructions of a read in user space with valgrind
    #[arg(long)]
    pub callgrind: bool,
}

type Case = &'static str;
const READS_CASE: Case = "4 KiB random";

/// The metrics of reads, and their columns of the table.
const READ_COLUMNS: [(Metric, &str); 7] = [
    (Metric::higher(IOS, "1/s"), "from the device /s"),
    (Metric::lower(CPU, "us"), "processor, us"),
    (Metric::lower(P50, "us"), "p50, us"),
    (Metric::lower(P99, "us"), "p99, us"),
    (Metric::lower(P999, "us"), "p99.9, us"),
    (Metric::higher(READS, "1/s"), "with hits /s"),
    (Metric::higher(HIT_RATIO, "1"), "hits"),
];
/// The metrics of copies of resident pages, and their columns of the table.
const HIT_COLUMNS: [(Metric, &str); 5] = [
    (Metric::higher(COPIES_ALONE, "1/s"), "alone /s"),
    (Metric::higher(COPIES_WITH_MISSES, "1/s"), "beside misses /s"),
    (Metric::higher(KEPT_RATIO, "1"), "kept"),
    (Metric::higher(MISSES, "1/s"), "misses /s"),
    (Metric::higher(COPIES_MISSED, "1"), "copies that were misses"),
];

/// Measures the cost of cache misses. Adds rows and verdicts to the report.
///
/// # Errors
///
/// [`Error::WrongAnswer`] if a page had wrong contents; [`Error::CannotRun`] for an unknown subject, without a file, or
/// if the cache could hold the whole file.
pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let common = &options.common;
    let subjects = fio::available_subjects(common, &SUBJECTS, report)?;
    let target = options.place.open_or_make(FILE_TO_CACHE_RATIO * common.quick_or_full(CACHE_MIB))?;
    if !target.has_pattern {
        report.add_note("the file's content is unknown, so reads are not compared");
    }
    let (file_mib, cache_mib) =
        (target.len_bytes >> 20, options.cache_mib.unwrap_or((target.len_bytes / FILE_TO_CACHE_RATIO) >> 20).max(2));
    if cache_mib >= file_mib {
        return Err(Error::CannotRun(format!(
            "a cache of {cache_mib} MiB holds the whole file of {file_mib} MiB, and nothing would miss: --cache-mib has to be less"
        )));
    }
    report.add_note(format!("the file has {file_mib} MiB, the cache {cache_mib}"));
    child::touch_beforehand(cache_mib * 3 / 2 + 256)?;
    let mut study = Study::new(report, |case: &Case| (*case).to_owned());
    let run_ms = common.quick_or_full(SAMPLE_MS);
    let metrics = [metric_names(&READ_COLUMNS), metric_names(&HIT_COLUMNS)].concat();
    study.measure_by_round((&[READS_CASE], common.rounds()), &subjects, &metrics, |_, subject| {
        run_sample(subject, &target, cache_mib, run_ms)
    })?;
    add_rows(&mut study, &subjects);
    add_verdicts(&mut study);
    if options.callgrind {
        count_instructions(report, &target)?;
    }
    Ok(())
}

/// The counted ways to read: name, words of the workload's command line, and the budget of instructions of one read.
/// Futures are left out, because valgrind runs one thread at a time, and the count depends on its scheduling.
const INSTRUCTION_BUDGETS: [(Case, [&str; 2], f64); 2] =
    [("one thread", ["--threads", "1"], 6600.0), ("queue of 32", ["--depth", "32"], 5500.0)];

/// Counts the instructions of a read in user space, through a cache of 16 MiB. Adds rows and verdicts to the report.
fn count_instructions(report: &mut Report, target: &Target) -> Result<()> {
    let cases = INSTRUCTION_BUDGETS.map(|(name, ..)| name);
    let mut study = Study::new(report, |case: &Case| (*case).to_owned());
    study.measure_by_case((&cases, 1), &["cache"], &[INSTRUCTIONS], |case, subject| {
        let how = INSTRUCTION_BUDGETS.iter().find(|(name, ..)| name == case).map(|(_, words, _)| words);
        callgrind::count_instructions(subject, INSTRUCTIONS, |command, reads| {
            command.args(["__miss", "--run-ms", "0", "--cache-mib", "16", "--reads", &reads.to_string()]);
            command.args(how.into_iter().flatten()).args(target.arguments());
        })
    })?;
    for (case, _, budget) in INSTRUCTION_BUDGETS {
        let metric = Metric::lower(INSTRUCTIONS, "instructions");
        let table = "instructions of one read in user space (callgrind)";
        study.rows(&case, &["cache"], table, &[(metric, case)]);
        let target = format!("instructions of a read, {case}");
        study.judge_value(target, (Bound::AtMost(budget), "instructions"), (&case, "cache", INSTRUCTIONS));
    }
    Ok(())
}

fn run_sample(subject: &Subject, target: &Target, cache_mib: u64, run_ms: u64) -> Result<Outcome> {
    let io_bytes = RECORD_BYTES as u64;
    let (words, numbers) = match subject.work {
        Work::Fio(engine, depth, jobs) => {
            let task = Task::Timed { is_random: true, is_write: false, jobs, run_ms };
            return Job::new(target, engine, (io_bytes, depth), task).run();
        }
        Work::Threads { count, is_cold } => {
            (miss_words(is_cold), vec![("--threads", count), ("--cache-mib", cache_mib)])
        }
        Work::Queue { is_cold } => (miss_words(is_cold), vec![("--depth", DEPTH), ("--cache-mib", cache_mib)]),
        Work::Futures => (miss_words(false), vec![("--futures", DEPTH), ("--cache-mib", cache_mib)]),
        Work::Ring => {
            let words = &["__ring", "--memory", "huge", "--registered", "--random"][..];
            (words, vec![("--depth", DEPTH), ("--batch", RING_BATCH), ("--io-bytes", io_bytes)])
        }
        Work::Hits { is_plain: false } => (&["__hits"][..], vec![("--cache-mib", cache_mib)]),
        Work::Hits { is_plain: true } => (&["__hits", "--plain"][..], vec![("--cache-mib", cache_mib)]),
    };
    let line = child::command_words(words, &[numbers, vec![("--run-ms", run_ms)]].concat());
    sample(subject.name, target, line, Duration::from_secs(120))
}

/// Returns the first words of the workload's command line.
fn miss_words(is_cold: bool) -> &'static [&'static str] {
    if is_cold { &["__miss", "--cold"] } else { &["__miss"] }
}

fn add_rows(study: &mut Study<'_, Case>, subjects: &[&Subject]) {
    let table = "4 KiB at random, a file of six times the cache, O_DIRECT; half the spread, times the fio of that width; \
                 processor and times for each read from the device";
    for subject in subjects {
        let against = |metric: Metric| subject.baseline.map_or(metric, |baseline| metric.against(baseline));
        let columns = READ_COLUMNS.map(|(metric, column)| (against(metric), column));
        study.rows(&READS_CASE, &[*subject], table, &columns);
    }
    let table = "one thread copies 4 KiB that are in memory, another misses by 32 at a time";
    let hits: Vec<_> = subjects.iter().filter(|subject| matches!(subject.work, Work::Hits { .. })).collect();
    study.rows_as(&READS_CASE, "hits beside misses", &hits, table, &HIT_COLUMNS);
}

/// Targets: subject; fio job to compare with; minimum of the rate and maximum of the CPU time per read, both divided by
/// the fio job's. If the fio job is [`FIO_URING`], the rate is instead divided by that of the fastest of all fio jobs.
const TARGETS: [(&str, &str, f64, f64); 8] = [
    (QUEUE, FIO_URING, 0.95, 1.05),
    (FUTURES, FIO_URING, 0.95, 1.15),
    (QUEUE_COLD, FIO_URING, 0.9, 1.3),
    ("threads-1", FIO_PSYNC_1, 0.98, 1.1),
    ("threads-8", FIO_PSYNC_8, 0.98, 1.1),
    ("threads-32", FIO_PSYNC_32, 0.98, 1.1),
    ("threads-8-cold", FIO_PSYNC_8, 0.9, 1.3),
    ("threads-32-cold", FIO_PSYNC_32, 0.9, 1.3),
];

fn add_verdicts(study: &mut Study<'_, Case>) {
    let peers = fio::names(&SUBJECTS);
    for (own, peer, least_rate, most_cpu) in TARGETS {
        let bound = Bound::AtLeast(least_rate);
        if peer == FIO_URING {
            let target = format!("read from the device, {own}, against the best of fio");
            judge_against_best(study, (target, bound), (&READS_CASE, own), (&peers, IOS));
        } else {
            let target = format!("read from the device, {own}, against {peer}");
            study.judge_quotient(target, bound, (&READS_CASE, own, IOS), (&READS_CASE, peer, IOS));
        }
        let target = format!("processor for each, {own}, of that of {peer}");
        let bound = Bound::AtMost(most_cpu);
        study.judge_quotient(target, bound, (&READS_CASE, own, CPU), (&READS_CASE, peer, CPU));
    }
    let (target, bound) = ("copies beside misses, of those alone", Bound::AtLeast(0.8));
    study.judge_value(target, (bound, "x"), (&READS_CASE, HITS, KEPT_RATIO));
}
