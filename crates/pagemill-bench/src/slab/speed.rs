//! Speed of allocating and freeing objects: Pagemill's slab caches, compared with allocators and keyed maps.

use std::process::Command;
use std::time::Duration;

use super::storage_subjects::StorageSubject;
use super::{BY_HANDLE, BY_OWNER, FIXED, Options, allocators};
use crate::callgrind::{self, INSTRUCTIONS_PER_PAIR};
use crate::child::{self, Outcome};
use crate::error::Result;
use crate::experiment::{
    CommonOptions, Metric, Named, Progress, SampleTable, Study, not_measured, rotated, threads_text,
};
use crate::report::{Bound, Report, Series, Verdict};
use crate::stats::Better;

/// The slab caches and keyed maps that are measured, as the report and the workload's command line name them.
pub const CACHES: [&str; 5] = [FIXED, BY_OWNER, BY_HANDLE, "slotmap", "sharded-slab"];

pub fn names() -> impl Iterator<Item = &'static str> {
    CACHES.into_iter().chain(super::allocator_names())
}

/// Names of the slab caches that have a verdict. Each is compared with the faster of the two [`PEERS`].
const JUDGED_CACHES: [&str; 2] = [FIXED, BY_OWNER];
const PEERS: [&str; 2] = ["tcmalloc", "jemalloc"];
/// Name of the faster of the two [`PEERS`] in verdicts.
const BEST_PEER: &str = "best-of-tcmalloc-and-jemalloc";
const BASELINE: &str = "jemalloc";

/// Orders in which objects are allocated and freed, as the workload's command line names them: each is freed at once; a
/// thousand are allocated, then freed; a random one of many is replaced.
const PATTERNS: [&str; 3] = ["pair", "batch", "churn"];
/// Object sizes in bytes.
const SIZES: [usize; 5] = [64, 192, 576, 1024, 4096];
/// The object size, in bytes, to which the targets apply.
const TARGET_SIZE: usize = 192;
const THREAD_COUNTS: [u64; 2] = [1, 2];

/// Number of live objects in the pattern churn, unless [`MAX_LIVE_BYTES`] allows only fewer objects of the size.
const LIVE_OBJECTS: usize = 100_000;
/// Maximum of the total bytes of live objects in the pattern churn.
const MAX_LIVE_BYTES: usize = 128 << 20;
/// Duration in milliseconds of a sample (quick, full).
const SAMPLE_MS: (u64, u64) = (20, 100);

/// Metric: nanoseconds in which one thread allocates and frees an object.
const NS_PER_OBJECT: &str = "ns";
/// Metric: number of objects that all threads together allocate and free per second.
const PAIRS_PER_SECOND: &str = "pairs_per_second";

/// Order of allocating and freeing (pattern), and object size.
type PatternAndSize = (&'static str, usize);
/// Order of allocating and freeing (pattern), object size, and number of threads.
type Case = (&'static str, usize, u64);

/// Adds the workload's arguments to a command, and the environment of the subject.
fn add_arguments(
    subject: &StorageSubject,
    command: &mut Command,
    (pattern, size): PatternAndSize,
    numbers: &[(&str, u64)],
) {
    command.args(["__slab", "speed", "--subject", subject.word(), "--pattern", pattern, "--size", &size.to_string()]);
    command.args(child::numeric_options(numbers));
    subject.apply(command);
}

fn take_sample(subject: &StorageSubject, (pattern, size, threads): Case, run_ms: u64) -> Result<Outcome> {
    let live = LIVE_OBJECTS.min(MAX_LIVE_BYTES / size);
    let numbers = [("--threads", threads), ("--live", live as u64), ("--measure-ms", run_ms)];
    let mut command = child::workload_command([""; 0])?;
    add_arguments(subject, &mut command, (pattern, size), &numbers);
    child::run_to_end(subject.name(), &mut command, Duration::from_secs(60))
}

/// Measures how fast the wanted caches, maps and allocators allocate and free objects; adds rows and verdicts to the
/// report.
///
/// # Errors
///
/// [`crate::error::Error::WrongAnswer`] if an object's tag changed.
pub fn run_part(options: &Options, report: &mut Report) -> Result<()> {
    let common = &options.common;
    let ready = report.with_gaps(allocators(common)?);
    let caches = CACHES.into_iter().filter(|name| common.is_wanted(name)).map(StorageSubject::Cache);
    let subjects: Vec<StorageSubject> = caches.chain(ready.into_iter().map(StorageSubject::Allocator)).collect();
    if subjects.is_empty() {
        return Ok(());
    }
    child::touch_beforehand(4 * (MAX_LIVE_BYTES >> 20) as u64)?;
    let sizes = if options.sizes.is_empty() { &SIZES[..] } else { &options.sizes };
    let mut study = Study::new(report, case_name);
    measure_cases(&subjects, sizes, common, &mut study)?;
    add_rows(&mut study, &subjects, sizes);
    add_verdicts(&mut study);
    if options.callgrind {
        count_instructions(report, &subjects, sizes)?;
    }
    Ok(())
}

pub fn parse_size(text: &str) -> std::result::Result<usize, String> {
    let size = text.parse().ok().filter(|size| SIZES.contains(size));
    size.ok_or_else(|| format!("there are objects of {SIZES:?} bytes"))
}

fn patterns_and_sizes(sizes: &[usize]) -> Vec<PatternAndSize> {
    PATTERNS.into_iter().flat_map(|pattern| sizes.iter().map(move |size| (pattern, *size))).collect()
}

fn case_name((pattern, size, threads): &Case) -> String {
    format!("{pattern}, {size} B, {}", threads_text(*threads))
}

/// Measures all cases. The run with two threads directly follows the run with one thread of the same subject, because
/// the verdict on scaling compares these two.
fn measure_cases(
    subjects: &[StorageSubject],
    sizes: &[usize],
    common: &CommonOptions,
    study: &mut Study<'_, Case>,
) -> Result<()> {
    let (run_ms, metrics) = (common.quick_or_full(SAMPLE_MS), [NS_PER_OBJECT, PAIRS_PER_SECOND]);
    let shapes = patterns_and_sizes(sizes);
    let progress = Progress::new(shapes.len() * common.rounds() * subjects.len());
    for ((pattern, size), round) in
        shapes.iter().flat_map(|shape| (0..common.rounds()).map(move |round| (*shape, round)))
    {
        for subject in rotated(subjects, round) {
            progress.step(&format!("{pattern}, {size} B, {}", subject.name()));
            for case in THREAD_COUNTS.map(|threads| (pattern, size, threads)) {
                study.samples.add_outcome(&case, subject.name(), &metrics, &take_sample(subject, case, run_ms)?);
            }
        }
    }
    Ok(())
}

fn add_rows(study: &mut Study<'_, Case>, subjects: &[StorageSubject], sizes: &[usize]) {
    let what = "ns to take an object and give it back, as a thread sees it";
    let ns = Metric::lower(NS_PER_OBJECT, "ns").against(BASELINE);
    let rate = Metric::higher(PAIRS_PER_SECOND, "1/s").against(BASELINE);
    for (pattern, size) in patterns_and_sizes(sizes) {
        for threads in THREAD_COUNTS {
            let case = (pattern, size, threads);
            let table = format!("{pattern}, {}: {what}, half the spread, times {BASELINE}", threads_text(threads));
            study.rows(&case, subjects, &table, &[(ns, &format!("{size} B"))]);
            study.json_rows(&case, subjects, &[rate]);
        }
    }
}

fn add_verdicts(study: &mut Study<'_, Case>) {
    for (pattern, name) in PATTERNS.into_iter().flat_map(|pattern| JUDGED_CACHES.map(|name| (pattern, name))) {
        study.report.add_verdict(judge_against_best(&study.samples, name, (pattern, TARGET_SIZE, 1)));
        study.report.add_verdict(judge_scaling(&study.samples, name, (pattern, TARGET_SIZE)));
    }
}

/// Compares the speed of a slab cache with that of the faster one of [`PEERS`], by the medians of this run.
fn judge_against_best(samples: &SampleTable<Case>, name: &'static str, case: Case) -> Verdict {
    let target = format!("{}: {name}, as fast as the best of tcmalloc and jemalloc", case_name(&case));
    let blank = not_measured(target, Bound::AtLeast(0.95), "x", "one side was not run");
    let of = |name: &'static str| {
        Some((name, samples.get((&case, name, NS_PER_OBJECT)).filter(|series| series.survived())?))
    };
    let peers: Vec<(&str, &Series)> = PEERS.into_iter().filter_map(of).collect();
    let best = peers
        .iter()
        .min_by(|(_, one), (_, other)| one.median().partial_cmp(&other.median()).unwrap_or(std::cmp::Ordering::Equal));
    let (Some(own), Some((best, peer))) = (samples.get((&case, name, NS_PER_OBJECT)), best) else { return blank };
    let missing = if peers.len() < PEERS.len() { ", the only one that there is" } else { "" };
    let note = format!("best: {best}{missing}");
    Verdict { note, ..blank.compared(Some(own), (BEST_PEER, Some(peer)), Better::Lower) }
}

/// Compares the throughput of a slab cache with two threads with its throughput with one thread.
fn judge_scaling(samples: &SampleTable<Case>, name: &'static str, (pattern, size): PatternAndSize) -> Verdict {
    let target = format!("{pattern}, {size} B: {name}, all of 2 threads against 1");
    let blank = not_measured(target, Bound::AtLeast(1.8), "x", "it was not run");
    let of = |threads| samples.get((&(pattern, size, threads), name, PAIRS_PER_SECOND));
    blank.compared(of(2), (name, of(1)), Better::Higher)
}

/// Number of live objects under valgrind. It is small, so that setting up takes less than a minute.
const VALGRIND_LIVE_OBJECTS: u64 = 20_000;

fn count_instructions(report: &mut Report, subjects: &[StorageSubject], sizes: &[usize]) -> Result<()> {
    let shapes = patterns_and_sizes(sizes);
    let mut study = Study::new(report, |(pattern, size): &PatternAndSize| case_name(&(*pattern, *size, 1)));
    study.measure_by_case((&shapes, 1), subjects, &[INSTRUCTIONS_PER_PAIR], |shape, subject| {
        callgrind::count_instructions(subject.name(), INSTRUCTIONS_PER_PAIR, |command, pairs| {
            add_arguments(subject, command, *shape, &[("--live", VALGRIND_LIVE_OBJECTS), ("--pairs", pairs)]);
        })
    })?;
    let metric = Metric::lower(INSTRUCTIONS_PER_PAIR, "instructions").against(BASELINE);
    for shape in &shapes {
        let (pattern, size) = *shape;
        let table = format!("{pattern}: instructions to take and give back (callgrind), times {BASELINE}");
        study.rows(shape, subjects, &table, &[(metric, &format!("{size} B"))]);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(ns: &[(&'static str, u64, f64)]) -> SampleTable<Case> {
        let mut samples = SampleTable::new();
        for &(name, threads, ns) in ns {
            let line = serde_json::json!({ NS_PER_OBJECT: ns, PAIRS_PER_SECOND: threads as f64 * 1e9 / ns });
            samples.add_outcome(
                &("pair", TARGET_SIZE, threads),
                name,
                &[NS_PER_OBJECT, PAIRS_PER_SECOND],
                &Outcome::Measured(line),
            );
        }
        samples
    }

    /// A slab cache that takes 8 ns per object is compared with two allocators that take 6 and 9 ns. The baseline must
    /// be the faster allocator. If only the slower allocator was measured, it must be the baseline, and the note must
    /// say so.
    #[test]
    fn the_faster_peer_is_the_baseline() {
        let all = [(FIXED, 1, 8.0), ("tcmalloc", 1, 6.0), ("jemalloc", 1, 9.0), ("slotmap", 1, 1.0)];
        let verdict = |all: &[_]| judge_against_best(&samples(all), FIXED, ("pair", TARGET_SIZE, 1));

        let both = verdict(&all);
        let without = verdict(&[all[0], all[2]]);
        let alone = verdict(&all[..1]);

        assert_eq!(
            (both.estimate.map(|estimate| estimate.value), both.note),
            (Some(0.75), "best: tcmalloc".to_owned())
        );
        assert_eq!(without.estimate.map(|estimate| estimate.value), Some(1.125));
        assert!(without.note.contains("the only one"));
        assert_eq!(alone.state(), crate::report::VerdictState::NotMeasured);
    }

    /// If each of two threads takes 10 ns per object and a single thread takes 9 ns, the ratio of the throughputs must
    /// be 1.8.
    #[test]
    fn scaling_compares_total_throughput() {
        let both = judge_scaling(&samples(&[(FIXED, 1, 9.0), (FIXED, 2, 10.0)]), FIXED, ("pair", TARGET_SIZE));
        let one = judge_scaling(&samples(&[(FIXED, 1, 9.0)]), FIXED, ("pair", TARGET_SIZE));

        assert!(both.estimate.is_some_and(|estimate| (estimate.value - 1.8).abs() < 1e-9));
        assert_eq!(one.state(), crate::report::VerdictState::NotMeasured);
    }

    /// Subject names must be unique, and all names used in verdicts must belong to a subject.
    #[test]
    fn subject_names_are_unique() {
        let known = super::super::all_subjects();
        assert_eq!(known.iter().collect::<std::collections::BTreeSet<_>>().len(), known.len());
        assert!(PEERS.iter().chain(&JUDGED_CACHES).chain([&BASELINE]).all(|name| known.contains(name)));
    }
}
