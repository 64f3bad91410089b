//! The parts `small` and `hits`: the memory of small files by page size, and copies of resident pages of a cache in shared
//! memory, as views need it, compared with a cache in anonymous memory.

use std::time::Duration;

use super::page::Page;
use super::recommend::Finding;
use super::{Part, Plan};
use crate::child;
use crate::error::Result;
use crate::experiment::{Metric, Study, metric_names, threads_text};
use crate::report::{Bound, Report, Series};
use crate::stats::{self, Better};
use crate::storage::Subject;

/// Number of small files (quick, full).
const FILE_COUNT: (u64, u64) = (2000, 10_000);
/// Lengths of the small files in bytes.
const MIN_BYTES: u64 = 1 << 10;
const MAX_BYTES: u64 = 16 << 10;
/// Maximum memory for the pages of the small files. With larger pages there are fewer files.
const MAX_MEMORY_BYTES: u64 = 1 << 30;
/// MiB of data of the part `hits` (quick, full).
const HITS_MIB: (u64, u64) = (256, 1024);
/// Duration in milliseconds of a sample of the part `hits` (quick, full).
const HITS_MS: (u64, u64) = (100, 500);
const TIME_LIMIT: Duration = Duration::from_secs(120);

const FOLIO_RATIO: Metric = Metric::lower("folio_ratio", "x");
const SMALL_COLUMNS: [(Metric, &str); 3] = [
    (FOLIO_RATIO, "in pages"),
    (Metric::lower("total_ratio", "x"), "with metadata and free pages"),
    (Metric::lower("frames_mib_per_gib", "MiB"), "page metadata, MiB a GiB"),
];

pub fn subjects(pages: &[&'static Page]) -> Vec<Subject<&'static Page>> {
    pages.iter().map(|page| Subject { name: page.cache, work: *page }).collect()
}

pub fn run(plan: &Plan<'_>, report: &mut Report) -> Result<Option<Finding>> {
    let subjects = plan.wanted(Part::Small, subjects(&plan.pages));
    let wanted = plan.options.files.unwrap_or(plan.common.quick_or_full(FILE_COUNT));
    let mut study = Study::new(report, |()| "files of 1 to 16 KiB".to_owned());
    // The lengths are the same in each round, so one round is enough.
    study.measure_by_round((&[()], 1), &subjects, &metric_names(&SMALL_COLUMNS), |(), subject| {
        let files = wanted.min(MAX_MEMORY_BYTES / subject.work.bytes().max(MAX_BYTES));
        let numbers = [("--files", files), ("--min-bytes", MIN_BYTES), ("--max-bytes", MAX_BYTES)];
        let line = child::command_words(&["__pageshift-small", "--page", subject.work.text], &numbers);
        child::run_plain(subject.name, line, TIME_LIMIT)
    })?;
    let table = format!("{wanted} files of 1 to 16 KiB, with large pages fewer: memory over the bytes of the files");
    study.rows(&(), &subjects, &table, &SMALL_COLUMNS);
    let metric = (FOLIO_RATIO, Better::Lower);
    Ok(Some(Finding::new("small files", (&study, &()), metric, &plan.pages, |page| page.cache)))
}

const ANONYMOUS_POOL: &str = "anonymous-pool";
const SHARED_POOL: &str = "shared-pool";
/// The subjects of the part `hits`, and whether their caches use shared memory.
pub const POOLS: [Subject<bool>; 2] =
    [Subject { name: ANONYMOUS_POOL, work: false }, Subject { name: SHARED_POOL, work: true }];

const COPY_NS: Metric = Metric::lower("copy_ns", "ns");
/// The kinds of folios, as [`crate::hit`] names them: huge ones, and folios of 4 KiB.
const FOLIOS: [&str; 2] = ["huge", "dense"];
/// The greatest spread of the baseline that a verdict allows for.
const MAX_SPREAD: f64 = 0.05;

/// The kind of folios, and the number of threads.
type HitCase = (&'static str, u64);

pub fn run_hits(plan: &Plan<'_>, report: &mut Report) -> Result<()> {
    let pools = plan.wanted(Part::Hits, POOLS.to_vec());
    let (mib, run_ms) = (plan.common.quick_or_full(HITS_MIB), plan.common.quick_or_full(HITS_MS));
    child::touch_beforehand(mib * 3 / 2 + 64)?;
    let cases: Vec<HitCase> = FOLIOS.iter().flat_map(|folios| [1, 2].map(|threads| (*folios, threads))).collect();
    let name = |(folios, threads): &HitCase| format!("{folios}, {}", threads_text(*threads));
    let mut study = Study::new(report, name);
    study.measure_by_round((&cases, plan.common.rounds()), &pools, &[COPY_NS.name], |(folios, threads), pool| {
        let words = ["__hit", "--subject", folios, "--operation", COPY_NS.name];
        let numbers = [("--threads", *threads), ("--mib", mib), ("--run-ms", run_ms)];
        let mut line = child::command_words(&words, &numbers);
        line.extend(pool.work.then(|| "--shared".to_owned()));
        child::run_plain(pool.name, line, TIME_LIMIT)
    })?;
    let table = format!("random copies of 4 KiB of {mib} MiB by read_at, ns: half the spread, times {ANONYMOUS_POOL}");
    for case in &cases {
        study.rows(case, &pools, &table, &[(COPY_NS.against(ANONYMOUS_POOL), &name(case))]);
    }
    for case in &cases {
        let base = (case, ANONYMOUS_POOL, COPY_NS.name);
        let spread = study.samples.get(base).map_or(0.0, |series: &Series| stats::spread(&series.values()));
        let target = format!("hits, {}, time of {SHARED_POOL}, with the spread of {ANONYMOUS_POOL}", name(case));
        // Rounded, because the report prints the bound.
        let bound = Bound::AtMost(((1.0 + spread.min(MAX_SPREAD)) * 1e3).round() / 1e3);
        study.judge_time_ratio(target, bound, (case, SHARED_POOL, COPY_NS.name), base);
    }
    Ok(())
}
