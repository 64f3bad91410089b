//! Walks of a tree of names, like those of the program `find`, and of the index of a file: while objects are moved, and
//! afterwards.

use serde_json::json;

use super::Options;
use super::storage_subjects::TIME_LIMIT;
use crate::child::{self, Outcome};
use crate::error::Result;
use crate::experiment::{CommonOptions, Metric, SampleTable, Study, not_measured};
use crate::report::{Bound, Report};

/// Subject: walks while no objects are moved.
const STILL: &str = "still";
/// Subject: walks while a background thread moves objects.
const MOVING: &str = "moving";
/// Subject: walks after nine of ten objects were freed.
const FRAGMENTED: &str = "fragmented";
/// Subject: walks after the objects left of [`FRAGMENTED`] were compacted.
const PACKED: &str = "packed";
pub const NAMES: [&str; 4] = [STILL, MOVING, FRAGMENTED, PACKED];

/// Metric: nanoseconds in which a walk visits one entry.
const NS_PER_ENTRY: &str = "ns";
/// Metric: number of objects moved during the walks.
const MOVED_OBJECTS: &str = "moved";

/// Number of entries of the tree (quick, full).
const TREE_ENTRIES: (u64, u64) = (20_000, 100_000);
/// Number of pages of the file whose index is walked (quick, full).
const FILE_PAGES: (u64, u64) = (6_000, 30_000);
/// Number of turns of a sample (quick, full). In each turn, the workload replaces all objects and then walks them.
const TURN_COUNT: (u64, u64) = (2, 5);
/// Milliseconds for which the workload walks the objects in each turn (quick, full).
const TURN_MS: (u64, u64) = (100, 300);

/// Minimum speed of walks relative to their baseline.
const MIN_SPEED: f64 = 0.95;

/// A case of the experiment: the data structure that is walked, and whether it was compacted before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Case {
    Tree,
    Packed,
    Index,
}

impl Case {
    const ALL: [Self; 3] = [Self::Tree, Self::Packed, Self::Index];

    fn name(self) -> &'static str {
        match self {
            Self::Tree => "tree of names",
            Self::Packed => "tree of names, nine tenths freed",
            Self::Index => "index of a file, one page of six",
        }
    }

    /// Returns the subject of the verdict, and the subject that is its baseline.
    fn sides(self) -> [&'static str; 2] {
        match self {
            Self::Packed => [PACKED, FRAGMENTED],
            _ => [MOVING, STILL],
        }
    }
}

/// Measures the wanted walks; adds rows and verdicts to the report.
///
/// # Errors
///
/// [`crate::error::Error::WrongAnswer`] if a walk found a wrong entry.
pub fn run_part(options: &Options, report: &mut Report) -> Result<()> {
    let common = &options.common;
    child::touch_beforehand(1024)?;
    let mut study = Study::new(report, |case: &Case| case.name().to_owned());
    measure_cases(common, &mut study)?;
    for case in Case::ALL {
        let ns = Metric::lower(NS_PER_ENTRY, "ns").against(case.sides()[1]);
        let columns = [(ns, "ns"), (Metric::lower(MOVED_OBJECTS, "objects"), "moves")];
        let table = format!("walks, nanoseconds an entry: {}", case.name());
        study.rows(&case, &case.sides(), &table, &columns);
        judge(&mut study, case);
    }
    Ok(())
}

/// Adds the verdict on a case. If no object was moved, the verdict has no estimate.
fn judge(study: &mut Study<'_, Case>, case: Case) {
    let [own, base] = case.sides();
    let target = format!("walk, {}: {own}, as fast as {base}", case.name());
    let bound = Bound::AtLeast(MIN_SPEED);
    let moved = study.samples.get((&case, own, MOVED_OBJECTS)).and_then(|series| series.median());
    match moved {
        Some(0.0) => study.report.add_verdict(not_measured(target, bound, "x", "nothing was moved")),
        _ => study.judge_time_ratio(target, bound, (&case, own, NS_PER_ENTRY), (&case, base, NS_PER_ENTRY)),
    }
}

fn measure_cases(common: &CommonOptions, study: &mut Study<'_, Case>) -> Result<()> {
    let (rounds, metrics) = (common.rounds(), [NS_PER_ENTRY, MOVED_OBJECTS]);
    for case in Case::ALL.into_iter().filter(|case| *case != Case::Packed) {
        let sides = case.sides();
        study.measure_by_case((&[case], rounds), &common.wanted(&sides), &metrics, |case, subject| {
            take_sample(common, *case, subject)
        })?;
    }
    if Case::Packed.sides().into_iter().any(|side| common.is_wanted(side)) {
        for _ in 0..rounds {
            sample_packed(common, &mut study.samples)?;
        }
    }
    Ok(())
}

fn take_sample(common: &CommonOptions, case: Case, subject: &str) -> Result<Outcome> {
    let (work, size) = match case {
        Case::Index => ("index", ("--pages", common.quick_or_full(FILE_PAGES))),
        _ => ("tree", ("--entries", common.quick_or_full(TREE_ENTRIES))),
    };
    let turns = [("--turns", common.quick_or_full(TURN_COUNT)), ("--turn-ms", common.quick_or_full(TURN_MS))];
    let numbers: Vec<(&str, u64)> = [size].into_iter().chain(turns).collect();
    run(work, subject, &numbers, (subject == MOVING).then_some("--moving"))
}

/// Takes one sample of walks in a fragmented tree and one of walks in a compacted tree. The same process walks the tree
/// before and after the compaction.
fn sample_packed(common: &CommonOptions, samples: &mut SampleTable<Case>) -> Result<()> {
    let entries = ("--entries", common.quick_or_full(TREE_ENTRIES));
    let turn = ("--turn-ms", common.quick_or_full(TURN_MS));
    let outcome = run("packed", PACKED, &[entries, turn], None)?;
    let part = |ns: &str| outcome.part(|line| json!({ NS_PER_ENTRY: line[ns], MOVED_OBJECTS: line[MOVED_OBJECTS] }));
    samples.add_outcome(&Case::Packed, FRAGMENTED, &[NS_PER_ENTRY], &part("fragmented_ns"));
    samples.add_outcome(&Case::Packed, PACKED, &[NS_PER_ENTRY, MOVED_OBJECTS], &part("packed_ns"));
    Ok(())
}

fn run(work: &str, subject: &str, numbers: &[(&str, u64)], flag: Option<&str>) -> Result<Outcome> {
    let mut line = child::command_words(&["__slab", work], numbers);
    line.extend(flag.map(str::to_owned));
    child::run_plain(subject, line, TIME_LIMIT)
}
