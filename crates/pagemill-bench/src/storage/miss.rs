//! Cost of a cache miss: random 4 KiB reads of a file that is six times as large as the cache. The results are compared
//! with fio and with a bare io_uring on the same file.

use std::time::Duration;

use super::fio::{self, Engine, Job};
use super::target::Target;
use super::{CPU, HIT_RATIO, IOS, P50, P99, P999, PlaceOptions, READS, judge_against_best, judge_ratio, sample};
use crate::child::{self, Outcome};
use crate::error::{Error, Result};
use crate::experiment::{
    CommonOptions, Metric, Progress, SampleTable, SeriesKey, judge_value, not_measured, report_row, rotated,
};
use crate::pattern::RECORD_BYTES;
use crate::report::{Bound, Report, TableCell};
use crate::stats::Better;

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
/// Subjects in which threads read with blocking calls: name, name of the fio subject to compare with, and number of
/// threads of both.
const BLOCKING_SUBJECTS: [(&str, &str, u64); 4] = [
    ("threads-1", "fio-psync-1", 1),
    ("threads-2", "fio-psync-2", 2),
    ("threads-8", "fio-psync-8", 8),
    ("threads-32", "fio-psync-32", 32),
];
/// As [`BLOCKING_SUBJECTS`], for subjects that begin with an empty cache.
const COLD_BLOCKING_SUBJECTS: [(&str, &str, u64); 2] =
    [("threads-8-cold", "fio-psync-8", 8), ("threads-32-cold", "fio-psync-32", 32)];

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

impl Subject {
    fn metrics(&self) -> &'static [&'static str] {
        match self.work {
            Work::Threads { .. } | Work::Queue { .. } | Work::Futures => &[IOS, CPU, P50, P99, P999, READS, HIT_RATIO],
            Work::Ring | Work::Fio(..) => &[IOS, CPU, P50, P99, P999],
            Work::Hits { is_plain: false } => &[COPIES_ALONE, COPIES_WITH_MISSES, KEPT_RATIO, MISSES, COPIES_MISSED],
            Work::Hits { is_plain: true } => &[COPIES_ALONE, COPIES_WITH_MISSES, KEPT_RATIO, MISSES],
        }
    }

    fn is_fio(&self) -> bool {
        matches!(self.work, Work::Fio(..))
    }
}

fn subjects() -> Vec<Subject> {
    let subject = |name, baseline, work| Subject { name, baseline, work };
    let mut all = Vec::new();
    for (own, peer, count) in BLOCKING_SUBJECTS {
        all.push(subject(own, Some(peer), Work::Threads { count, is_cold: false }));
        all.push(subject(peer, None, Work::Fio(fio::PSYNC, 1, count)));
    }
    for (own, peer, count) in COLD_BLOCKING_SUBJECTS {
        all.push(subject(own, Some(peer), Work::Threads { count, is_cold: true }));
    }
    all.push(subject(QUEUE, Some(FIO_URING), Work::Queue { is_cold: false }));
    all.push(subject(QUEUE_COLD, Some(FIO_URING), Work::Queue { is_cold: true }));
    all.push(subject(FUTURES, Some(FIO_URING), Work::Futures));
    all.push(subject(FIO_URING, None, Work::Fio(fio::URING_FIXED, DEPTH, 1)));
    all.push(subject(RING, Some(FIO_URING), Work::Ring));
    all.push(subject(FIO_LIBAIO, Some(FIO_URING), Work::Fio(fio::LIBAIO, DEPTH, 1)));
    all.push(subject(HITS, None, Work::Hits { is_plain: false }));
    all.push(subject(HITS_PLAIN, None, Work::Hits { is_plain: true }));
    all
}

#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    #[command(flatten)]
    pub common: CommonOptions,
    #[command(flatten)]
    pub place: PlaceOptions,
    /// MiB of memory for cached pages (default a sixth of the file: 256, with --quick 32)
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(2..))]
    pub cache_mib: Option<u64>,
}

/// This experiment has only one case.
type Case = ();

/// Measures the cost of cache misses. Returns the report.
///
/// # Errors
///
/// [`Error::WrongAnswer`] if a page had wrong contents; [`Error::CannotRun`] for an unknown subject, without a file, or
/// if the cache could hold the whole file.
pub fn run(options: &Options) -> Result<Report> {
    let common = &options.common;
    let mut report = Report::new("miss", common.json);
    let mut subjects = subjects();
    common.check_only(&subjects.iter().map(|subject| subject.name).collect::<Vec<_>>())?;
    subjects.retain(|subject| common.is_wanted(subject.name));
    fio::remove_fio_if_missing(&mut subjects, Subject::is_fio, &mut report)?;
    let target = options.place.open_or_make(FILE_TO_CACHE_RATIO * common.quick_or_full(CACHE_MIB.0, CACHE_MIB.1))?;
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
    let samples = measure_cases(options, &subjects, &target, cache_mib)?;
    add_rows(&mut report, &samples, &subjects);
    add_verdicts(&mut report, &samples);
    Ok(report)
}

fn measure_cases(
    options: &Options,
    subjects: &[Subject],
    target: &Target,
    cache_mib: u64,
) -> Result<SampleTable<Case>> {
    let common = &options.common;
    child::touch_beforehand(cache_mib * 3 / 2 + 256)?;
    let progress = Progress::new(common.rounds() * subjects.len());
    let mut samples = SampleTable::new();
    for round in 0..common.rounds() {
        for subject in rotated(subjects, round) {
            progress.step(subject.name);
            let outcome = run_sample(subject, target, cache_mib, common.quick_or_full(SAMPLE_MS.0, SAMPLE_MS.1))?;
            samples.add_outcome(&(), subject.name, subject.metrics(), &outcome);
        }
    }
    Ok(samples)
}

fn run_sample(subject: &Subject, target: &Target, cache_mib: u64, run_ms: u64) -> Result<Outcome> {
    let io_bytes = RECORD_BYTES as u64;
    let (words, numbers) = match subject.work {
        Work::Fio(engine, depth, jobs) => {
            let (path, len_bytes) = (target.path(), target.len_bytes);
            let job = Job { engine, path, len_bytes, io_bytes, is_random: true, is_write: false, depth, jobs, run_ms };
            return job.run();
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

fn add_rows(report: &mut Report, samples: &SampleTable<Case>, subjects: &[Subject]) {
    let table = "4 KiB at random, a file of six times the cache, O_DIRECT; half the spread, times the fio of that width; \
                 processor and times for each read from the device";
    for (name, unit, better, column) in [
        (IOS, "1/s", Better::Higher, "from the device /s"),
        (CPU, "us", Better::Lower, "processor, us"),
        (P50, "us", Better::Lower, "p50, us"),
        (P99, "us", Better::Lower, "p99, us"),
        (P999, "us", Better::Lower, "p99.9, us"),
        (READS, "1/s", Better::Higher, "with hits /s"),
        (HIT_RATIO, "1", Better::Higher, "hits"),
    ] {
        for subject in subjects {
            let cell = Some(TableCell { table: table.to_owned(), column: column.to_owned() });
            let metric = Metric { name, unit, better, baseline: subject.baseline };
            report_row(report, samples, (&(), "4 KiB random"), subject.name, metric, cell);
        }
    }
    for (name, unit, column) in [
        (COPIES_ALONE, "1/s", "alone /s"),
        (COPIES_WITH_MISSES, "1/s", "beside misses /s"),
        (KEPT_RATIO, "1", "kept"),
        (MISSES, "1/s", "misses /s"),
        (COPIES_MISSED, "1", "copies that were misses"),
    ] {
        for subject in subjects {
            let table = "one thread copies 4 KiB that are in memory, another misses by 32 at a time".to_owned();
            let cell = Some(TableCell { table, column: column.to_owned() });
            let metric = Metric { name, unit, better: Better::Higher, baseline: None };
            report_row(report, samples, (&(), "hits beside misses"), subject.name, metric, cell);
        }
    }
}

/// Targets: subject; fio job to compare with; minimum of the rate and maximum of the CPU time per read, both divided by
/// the fio job's. If the fio job is [`FIO_URING`], the rate is instead divided by that of the fastest of all fio jobs.
const TARGETS: [(&str, &str, f64, f64); 8] = [
    (QUEUE, FIO_URING, 0.95, 1.05),
    (FUTURES, FIO_URING, 0.95, 1.15),
    (QUEUE_COLD, FIO_URING, 0.9, 1.3),
    ("threads-1", "fio-psync-1", 0.98, 1.1),
    ("threads-8", "fio-psync-8", 0.98, 1.1),
    ("threads-32", "fio-psync-32", 0.98, 1.1),
    ("threads-8-cold", "fio-psync-8", 0.9, 1.3),
    ("threads-32-cold", "fio-psync-32", 0.9, 1.3),
];

fn add_verdicts(report: &mut Report, samples: &SampleTable<Case>) {
    let get = |subject, metric| samples.get(&(), subject, metric);
    let peers: Vec<&'static str> = subjects().iter().filter(|subject| subject.is_fio()).map(|it| it.name).collect();
    for (own, peer, least_rate, most_cpu) in TARGETS {
        let bound = Bound::AtLeast(least_rate);
        report.add_verdict(if peer == FIO_URING {
            let target = format!("read from the device, {own}, against the best of fio");
            judge_against_best(samples, (target, bound), (&(), own), (&peers, IOS))
        } else {
            let target = format!("read from the device, {own}, against {peer}");
            judge_ratio(target, bound, get(own, IOS), (peer, get(peer, IOS)))
        });
        let target = format!("processor for each, {own}, of that of {peer}");
        report.add_verdict(judge_ratio(target, Bound::AtMost(most_cpu), get(own, CPU), (peer, get(peer, CPU))));
    }
    let (target, bound) = ("copies beside misses, of those alone", Bound::AtLeast(0.8));
    report.add_verdict(match get(HITS, KEPT_RATIO) {
        Some(_) => {
            judge_value(samples, target, (bound, "x"), SeriesKey { case: &(), subject: HITS, metric: KEPT_RATIO })
        }
        None => not_measured(target, bound, "x", "it was not run"),
    });
}
