//! Sequential reads and writes of a file that is four times as large as its cache, with calls of 64 KiB or 1 MiB.
//! Pagemill's page cache is compared with the kernel's page cache and with fio, which bypasses the kernel's page cache.

use std::fs::OpenOptions;
use std::time::Duration;

use pagemill_core::units::Bytes;

use super::fio::{self, Engine, Job, Task};
use super::target::Target;
use super::{CPU_PER_MIB, MIB, PlaceOptions, Subject, judge_against_best, sample};
use crate::child::{self, Outcome};
use crate::error::{Error, Result, doing};
use crate::experiment::{CommonOptions, Metric, Study};
use crate::report::{Bound, Report};
use crate::workload::storage::stream::Way;

/// Subject: Pagemill's page cache with default settings.
const CACHE: &str = "cache";
/// Subject: `read` and `write` through the kernel's page cache.
const KERNEL: &str = "kernel";
/// Subject: as [`KERNEL`], with `RWF_DONTCACHE`.
const DONTCACHE: &str = "kernel-dontcache";

/// Size of the file in MiB (quick, full).
const FILE_MIB: (u64, u64) = (128, 2048);
/// Size of the file divided by that of the cache.
const FILE_TO_CACHE_RATIO: u64 = 4;
/// Bytes that one call reads or writes.
const CALL_BYTES: [u64; 2] = [64 << 10, 1 << 20];
/// Total bytes of the transfers that fio has in flight. With fewer bytes, the device would be idle between transfers.
const IN_FLIGHT_BYTES: u64 = 16 << 20;
/// Maximum number of transfers that fio has in flight.
const MAX_IN_FLIGHT: u64 = 64;

#[derive(Clone, Copy, Debug)]
enum Work {
    Calls(Way),
    Fio(Engine),
}

const SUBJECTS: [Subject<Work>; 5] = [
    Subject { name: CACHE, work: Work::Calls(Way::Cache) },
    Subject { name: KERNEL, work: Work::Calls(Way::Kernel) },
    Subject { name: DONTCACHE, work: Work::Calls(Way::Dontcache) },
    Subject { name: "fio-io_uring", work: Work::Fio(fio::URING_FIXED_BUFFERS) },
    Subject { name: "fio-libaio", work: Work::Fio(fio::LIBAIO) },
];

#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    #[command(flatten)]
    pub common: CommonOptions,
    #[command(flatten)]
    pub place: PlaceOptions,
    /// Also write to a file given by --file, WHOSE CONTENT IS LOST (default: write only to a temporary file)
    #[arg(long, conflicts_with = "reads")]
    pub writes: bool,
    /// Run only the cases that read
    #[arg(long)]
    pub reads: bool,
    /// MiB of memory for cached pages (default a quarter of the file)
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(2..))]
    pub cache_mib: Option<u64>,
}

/// What the calls of a case do with the file. Writes are ordered last, because they destroy the pattern with which
/// reads are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Direction {
    Read,
    /// Writes over existing bytes of the file.
    Overwrite,
    /// Writes to an empty file.
    Append,
}

/// A case: what the calls do, and how many bytes each of them reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Case {
    direction: Direction,
    call_bytes: u64,
}

impl Case {
    fn name(self) -> String {
        let calls = match self.direction {
            Direction::Read => "reads",
            Direction::Overwrite => "overwrites",
            Direction::Append => "appends",
        };
        format!("{} {calls}", Bytes(self.call_bytes))
    }
}

fn cases(options: &Options) -> Vec<Case> {
    use Direction::{Append, Overwrite, Read};
    let directions = match &options.place.file {
        None if !options.reads => &[Read, Overwrite, Append][..],
        // A device cannot be emptied.
        Some(path) if options.writes && path.is_file() => &[Read, Overwrite, Append],
        Some(_) if options.writes => &[Read, Overwrite],
        _ => &[Read],
    };
    let of = |direction: &Direction| CALL_BYTES.map(|call_bytes| Case { direction: *direction, call_bytes });
    directions.iter().flat_map(of).collect()
}

/// Runs the experiment; adds rows and verdicts to the report.
///
/// # Errors
///
/// [`Error::WrongAnswer`] if the file or a read had wrong contents; [`Error::CannotRun`] for an unknown subject, without a
/// file, or if the cache could hold the whole file.
pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let common = &options.common;
    let subjects = fio::available_subjects(common, &SUBJECTS, report)?;
    let target = options.place.open_or_make(common.quick_or_full(FILE_MIB))?;
    let file_mib = target.len_bytes >> 20;
    let cache_mib = options.cache_mib.unwrap_or(file_mib / FILE_TO_CACHE_RATIO).max(2);
    if cache_mib >= file_mib {
        return Err(Error::CannotRun(format!(
            "a cache of {cache_mib} MiB holds the whole file of {file_mib} MiB: --cache-mib has to be less"
        )));
    }
    report.add_note(format!("the file has {file_mib} MiB, the cache {cache_mib}; the kernel's cache is not limited"));
    report.add_note("writes end with a sync, which is timed; before reads no cache has a page of the file");
    report.add_note(
        "processor time is that of the process: the kernel's threads write and read a part for the kernel's cache",
    );
    let cases = cases(options);
    child::touch_beforehand(file_mib + cache_mib + 256)?;
    let mut study = Study::new(report, |case: &Case| case.name());
    // All reads run before all writes, because writes destroy the pattern.
    for cases in cases.chunk_by(|one, other| one.direction == other.direction) {
        study.measure_by_round((cases, common.rounds()), &subjects, &[MIB, CPU_PER_MIB], |case, subject| {
            run_sample(subject, *case, &target, cache_mib)
        })?;
    }
    for (metric, what) in
        [(Metric::higher(MIB, "MiB/s"), "MiB/s"), (Metric::lower(CPU_PER_MIB, "us"), "processor time of a MiB, us")]
    {
        let table = format!("a file of four times the cache, in order: {what}, half the spread, times {KERNEL}");
        for case in &cases {
            study.rows(case, &subjects, &table, &[(metric.against(KERNEL), &case.name())]);
        }
    }
    cases.iter().for_each(|case| add_verdicts(&mut study, *case));
    Ok(())
}

fn run_sample(subject: &Subject<Work>, case: Case, target: &Target, cache_mib: u64) -> Result<Outcome> {
    let Case { direction, call_bytes } = case;
    let is_write = direction != Direction::Read;
    if direction == Direction::Append {
        let emptied =
            OpenOptions::new().write(true).truncate(true).open(target.path()).and_then(|file| file.sync_all());
        emptied.map_err(doing("emptying the file"))?;
    }
    match subject.work {
        Work::Fio(engine) => {
            let depth = (IN_FLIGHT_BYTES / call_bytes).min(MAX_IN_FLIGHT);
            let task = Task::Pass { is_write, is_append: direction == Direction::Append };
            let mut outcome = Job::new(target, engine, (call_bytes, depth), task).run()?;
            if let Outcome::Measured(line) = &mut outcome {
                let cpu_us = line[super::CPU].as_f64().unwrap_or_default();
                line[CPU_PER_MIB] = (cpu_us * f64::from(1 << 20) / call_bytes as f64).into();
            }
            Ok(outcome)
        }
        Work::Calls(way) => {
            let words = ["__stream", "--way", way.name()].into_iter().chain(is_write.then_some("--write"));
            let numbers = [("--cache-mib", cache_mib), ("--call-bytes", call_bytes)];
            let line = child::command_words(&words.collect::<Vec<_>>(), &numbers);
            sample(subject.name, target, line, Duration::from_secs(300))
        }
    }
}

fn add_verdicts(study: &mut Study<'_, Case>, case: Case) {
    let name = case.name();
    for (peers, what, least) in [
        (vec![KERNEL, DONTCACHE], "the faster way of the kernel's page cache", 1.0),
        (fio::names(&SUBJECTS), "the best of fio", 0.95),
    ] {
        let target = format!("{name}, {CACHE}, against {what}");
        judge_against_best(study, (target, Bound::AtLeast(least)), (&case, CACHE), (&peers, MIB));
    }
    let target = format!("{name}, processor time, {CACHE} against {KERNEL}");
    let (own, base) = ((&case, CACHE, CPU_PER_MIB), (&case, KERNEL, CPU_PER_MIB));
    study.judge_quotient(target, Bound::AtMost(1.0), own, base);
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    fn cases_of(words: &[&str]) -> Vec<String> {
        let line = Line::try_parse_from(["stream"].iter().chain(words)).expect("it parses");
        cases(&line.options).into_iter().map(Case::name).collect()
    }

    /// A file of the user must be written only with `--writes`. A temporary file must be written unless `--reads` is
    /// given.
    #[test]
    fn only_allowed_files_are_written() {
        let reads = ["64 KiB reads", "1 MiB reads"];
        let overwrites = ["64 KiB reads", "1 MiB reads", "64 KiB overwrites", "1 MiB overwrites"];
        let all = [&overwrites[..], &["64 KiB appends", "1 MiB appends"]].concat();
        assert_eq!(cases_of(&[]), all);
        assert_eq!(cases_of(&["--file", "/dev/null", "--writes"]), overwrites);
        assert_eq!(cases_of(&["--file", "/proc/self/exe", "--writes"]), all);
        assert_eq!(cases_of(&["--reads"]), reads);
        assert_eq!(cases_of(&["--file", "x"]), reads);
    }
}
