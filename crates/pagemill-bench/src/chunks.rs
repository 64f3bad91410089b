//! The ebizzy workload with its copies in memory that the kernel or Pagemill may reclaim between records. Part of
//! `bench volatile`.
//!
//! The copies are stored in volatile ranges, in mappings that are freed with `MADV_FREE` or `MADV_DONTNEED`, or in
//! malloc. All variants run the same [workload](crate::workload::ebizzy). The first target is that volatile ranges are
//! no slower than malloc, which here does not return free memory. The second target is that no process is killed while
//! a second process needs memory periodically.

use std::time::Duration;

use crate::child::{self, Outcome};
use crate::error::{Result, doing};
use crate::experiment::{CommonOptions, Metric, Named, SampleTable, Study, not_measured, threads_text};
use crate::hog;
use crate::report::{Bound, Report, Verdict};
use crate::stats::Better;

/// A kind of memory in which the ebizzy workload stores its copies, and the environment variables of the workload.
struct CopyMemory {
    name: &'static str,
    memory: &'static str,
    settings: &'static [(&'static str, &'static str)],
}

impl Named for CopyMemory {
    fn name(&self) -> &'static str {
        self.name
    }
}

/// Subject: ebizzy with its copies in volatile ranges that have handles.
const HANDLES: &str = "ebizzy-handles";
/// Subject: ebizzy with its copies in glibc's malloc with default settings.
const MALLOC: &str = "ebizzy-malloc";
/// Subject: ebizzy with its copies in glibc's malloc, with settings with which glibc never returns memory. These are
/// its fastest settings for this workload.
const KEEPING_MALLOC: &str = "ebizzy-malloc-keeping";
/// Subject: ebizzy with its copies in a mapping that is freed with `MADV_FREE`.
const FREE: &str = "ebizzy-madv-free";
/// Subject: ebizzy with its copies in a mapping that is freed with `MADV_DONTNEED`.
const DONTNEED: &str = "ebizzy-madv-dontneed";

const COPY_MEMORIES: [CopyMemory; 5] = [
    CopyMemory { name: HANDLES, memory: "handles", settings: &[] },
    CopyMemory { name: MALLOC, memory: "malloc", settings: &[] },
    CopyMemory {
        name: KEEPING_MALLOC,
        memory: "malloc",
        settings: &[("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=1073741824")],
    },
    CopyMemory { name: FREE, memory: "free", settings: &[] },
    CopyMemory { name: DONTNEED, memory: "dontneed", settings: &[] },
];

/// Choices for the sizes of the copies, as the command line of the ebizzy workload names them.
const SIZES: [&str; 2] = ["fixed", "mixed"];
const THREAD_COUNTS: [u64; 2] = [1, 2];
/// For one record (a copy and a search in it) in this many, the workload computes the checksum of the whole copy and
/// compares it with that of the source.
const RECORDS_PER_CHECKSUM: u64 = 64;

const RECORDS: &str = "records_per_second";
const METRICS: [&str; 5] = [RECORDS, "faults_per_record", "purged_per_record", "refused", "hog_rounds"];

/// A case of the experiment: sizes of the copies (`fixed`: 256 KiB, `mixed`: 64 KiB to 1 MiB), number of threads, and
/// whether a second process (the hog) needs memory periodically.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Case {
    sizes: &'static str,
    threads: u64,
    has_hog: bool,
}

impl Case {
    fn all() -> impl Iterator<Item = Self> {
        let alone = |sizes| THREAD_COUNTS.map(|threads| Self { sizes, threads, has_hog: false });
        SIZES.into_iter().flat_map(alone)
    }

    const HOG: Self = Self { sizes: SIZES[0], threads: 2, has_hog: true };

    fn name(self) -> String {
        let sizes = if self.sizes == SIZES[0] { "256 KiB" } else { "64 KiB - 1 MiB" };
        let hog = if self.has_hog { ", hog" } else { "" };
        format!("{sizes}, {}{hog}", threads_text(self.threads))
    }
}

/// Returns the names of all kinds of memory in which the workload can store its copies.
pub fn names() -> impl Iterator<Item = &'static str> {
    COPY_MEMORIES.iter().map(|memory_kind| memory_kind.name)
}

/// Runs the ebizzy workload with its copies in each wanted kind of memory; adds rows and verdicts to the report.
///
/// # Errors
///
/// [`crate::error::Error::WrongAnswer`] if a copy differs from its source.
pub fn run(common: &CommonOptions, report: &mut Report) -> Result<()> {
    let memories = common.wanted(&COPY_MEMORIES);
    if memories.is_empty() {
        return Ok(());
    }
    let mut cases: Vec<Case> = Case::all().collect();
    match hog::check_limit() {
        Ok(()) => cases.push(Case::HOG),
        Err(why) => report.add_gap(format!("ebizzy on handles: no case with a hog, since {why}")),
    }
    let mut study = Study::new(report, |case: &Case| case.name());
    study.measure_by_round((&cases, common.rounds()), &memories, &METRICS, |case, memory_kind| match case.has_hog {
        true => measure_with_hog(common, memory_kind),
        false => measure_alone(common, case, memory_kind),
    })?;
    let table = format!("ebizzy on handles: records/s, half the spread, times {MALLOC}");
    let records = Metric::higher(RECORDS, "1/s").against(MALLOC);
    let others: Vec<Metric> = METRICS[1..].iter().map(|metric| Metric::lower(metric, "1")).collect();
    for case in &cases {
        study.rows(case, &memories, &table, &[(records, &case.name())]);
        study.json_rows(case, &memories, &others);
    }
    let peer_kinds = [("malloc", [MALLOC, KEEPING_MALLOC], 0.95), ("pages given up at once", [FREE, DONTNEED], 1.0)];
    for (case, (kind, peers, least)) in cases.iter().flat_map(|case| peer_kinds.map(|kind| (case, kind))) {
        let target = format!("ebizzy on handles against the best of {kind}, {}", case.name());
        study.report.add_verdict(judge_against_best(&study.samples, case, &target, &peers, least));
    }
    Ok(())
}

fn measure_alone(common: &CommonOptions, case: &Case, memory_kind: &CopyMemory) -> Result<Outcome> {
    let numbers = [
        ("--warm-ms", common.quick_or_full((30, 250))),
        ("--measure-ms", common.quick_or_full((100, 1000))),
        ("--threads", case.threads),
        ("--sum-every", RECORDS_PER_CHECKSUM),
    ];
    let line = child::command_words(&["__ebizzy", "--memory", memory_kind.memory, "--sizes", case.sizes], &numbers);
    let (name, settings) = (memory_kind.name, memory_kind.settings);
    child::run_with_settings(name, line, settings, Duration::from_secs(60))
}

fn measure_with_hog(common: &CommonOptions, memory_kind: &CopyMemory) -> Result<Outcome> {
    let folder = tempfile::tempdir().map_err(doing("making a folder for the lock"))?;
    let mut line = vec![child::own_executable()?.display().to_string()];
    line.extend(hog::pair_arguments(common, folder.path()));
    line.extend(["--memory", memory_kind.memory, "--sum-every", &RECORDS_PER_CHECKSUM.to_string()].map(str::to_owned));
    hog::sample_pair(memory_kind.name, &line, folder.path(), true, memory_kind.settings)
}

/// Compares the speed of ebizzy with copies in volatile ranges with its speed on the fastest of `peers`. Peers of which
/// a round was killed or failed are ignored.
fn judge_against_best(
    samples: &SampleTable<Case>,
    case: &Case,
    target: &str,
    peers: &[&'static str],
    least: f64,
) -> Verdict {
    let blank = |why: &str| not_measured(target, Bound::AtLeast(least), "x", why);
    let Some(own) = samples.get((case, HANDLES, RECORDS)) else {
        return blank("handles were not run");
    };
    let Some((name, best)) = samples.best_survivor(case, peers.iter().copied(), RECORDS) else {
        return Verdict { has_lost_round: !own.survived(), ..blank("no peer of this kind survived") };
    };
    blank("").compared(Some(own), (name, Some(best)), Better::Higher)
}
