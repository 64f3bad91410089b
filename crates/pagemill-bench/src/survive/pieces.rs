//! Tests whether memory that one process freed can be used by another, for each size of allocations.
//!
//! Processes under the measured allocator (*keepers*) fill a cgroup with allocations of one size, and free all of them
//! or nine tenths. Then a process with the C library's malloc (the *newcomer*) allocates memory in the same cgroup.
//!
//! A sample is lost if a process of the cgroup was killed, or if malloc failed in one.

use std::path::Path;
use std::time::Duration;

use clap::ValueEnum;
use pagemill_core::units::Bytes;

use super::{Options, make_group, run_newcomer, start_in_group, workload_line};
use crate::chain::MIN_BYTES;
use crate::child::{self, Outcome, RunningGroup};
use crate::error::{Error, Result, doing};
use crate::experiment::{Metric, Named, SURVIVED, SampleTable, Study, not_measured};
use crate::report::{Bound, Report, Verdict};
use crate::signs::Signs;
use crate::stats;
use crate::subject::{AvailableSubject, PAGEMILL, Role};
use crate::workload::handover::taken_sign;
use crate::workload::pieces::{Freed, Load, keeper_sign};

/// The memory limit, in MiB, of the cgroup that contains all processes of a sample.
const LIMIT_MIB: u64 = 140;
/// MiB that all processes under the measured allocator (keepers) together fill.
const KEEPERS_MIB: u64 = 100;
/// MiB that the newcomer, the process that uses the freed memory, allocates.
const NEWCOMER_MIB: u64 = 70;
/// Number of threads of the newcomer, the process that uses the freed memory.
const NEWCOMER_THREADS: u64 = 2;
/// Argument of `pagemill run --limit` in the variant [`Variant::Limit`]. The memory of the processes that run under
/// this limit fits below it.
const TREE_LIMIT: &str = "128M";

/// Sizes in bytes of the allocations that are made and freed, in a full run.
const SIZES: &[u64] = &[16, 64, 512, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];
/// Sizes in bytes of the allocations that are made and freed, in a quick run.
const QUICK_SIZES: &[u64] = &[4 << 10, 1 << 20];
/// The smallest allocation size of [`Variant::Random`]. Each allocation of at least this size has OS pages of its own,
/// so an allocator can return the pages of freed ones.
const MIN_RANDOM_FREE_BYTES: u64 = 64 << 10;

/// Pauses between the last free and the start of the process that uses the freed memory. The samples use these pauses
/// in turn. In the longer pauses, Pagemill's periodic reclaim goes to sleep.
const PAUSES: [Duration; 3] = [Duration::ZERO, Duration::from_millis(300), Duration::from_millis(1500)];

/// Metric: GiB that the process that uses the freed memory (newcomer) fills per second.
const SPEED: &str = "gib_per_second";
/// Metric: time in which the process that uses the freed memory (newcomer) fills it.
const SLOWEST_MS: &str = "slowest_ms";
/// Metric: number of failed allocations of all processes of a sample.
const FAILED_ALLOCATIONS: &str = "refused";
const METRICS: &[&str] = &[SPEED, SLOWEST_MS, FAILED_ALLOCATIONS, SURVIVED];

/// A variant: how many processes fill memory, which of their allocations they free, and what they do afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Variant {
    /// One process frees all allocations
    All,
    /// One process frees nine tenths of its allocations, in runs of 1 MiB
    Runs,
    /// One process frees nine tenths of its allocations at random; sizes from 64 KiB
    Random,
    /// Three processes, each with a third of the memory, free all allocations
    Several,
    /// One process frees all allocations and then uses a fifth of a CPU
    Busy,
    /// One process of a tree with its own limit (`pagemill run --limit`) frees all allocations
    Limit,
}

impl Variant {
    fn description(self) -> &'static str {
        match self {
            Self::All => "all freed",
            Self::Runs => "90 % freed in runs",
            Self::Random => "90 % freed at random",
            Self::Several => "three processes, all freed",
            Self::Busy => "busy, all freed",
            Self::Limit => "under --limit 128M, all freed",
        }
    }

    fn freed(self) -> Freed {
        match self {
            Self::Runs => Freed::Runs,
            Self::Random => Freed::Random,
            Self::All | Self::Several | Self::Busy | Self::Limit => Freed::All,
        }
    }

    fn load(self) -> Load {
        if self == Self::Busy { Load::Busy } else { Load::Little }
    }

    fn keepers(self) -> u64 {
        if self == Self::Several { 3 } else { 1 }
    }

    fn applies_to(self, size: u64, ready: &AvailableSubject) -> bool {
        let is_for_size = self != Self::Random || size >= MIN_RANDOM_FREE_BYTES;
        is_for_size && (self != Self::Limit || ready.subject.role == Role::Pagemill)
    }
}

/// Variant, and size of the allocations in bytes. The order of these fields is also the order in the tables.
type Case = (Variant, u64);

/// Measures all variants and allocation sizes under every allocator; adds rows and verdicts to the report.
///
/// # Errors
///
/// [`Error::CannotRun`] for an allocation size below [`MIN_BYTES`] or above [`KEEPERS_MIB`].
pub fn run(options: &Options, ready: &[AvailableSubject], report: &mut Report) -> Result<()> {
    let (common, cases) = (&options.common, cases(options)?);
    // A quick run only checks that the cases work. Only a full run has enough samples for survival rates.
    let trials = options.trials.map_or(common.quick_or_full((1, common.rounds())), usize::from);
    let order = cases.iter().flat_map(|case| (0..trials).map(move |trial| (case, trial)));
    let runs = |case: &Case, subject: &AvailableSubject, _| case.0.applies_to(case.1, subject);
    let mut study = Study::new(report, case_name);
    study.measure(order, ready, METRICS, runs, |case, subject, trial| {
        take_sample(subject, *case, PAUSES[trial % PAUSES.len()])
    })?;
    for &case in &cases {
        add_rows(&mut study, case, ready);
    }
    let mut variants: Vec<Variant> = cases.iter().map(|(variant, _)| *variant).collect();
    variants.dedup();
    for variant in variants {
        study.report.add_verdict(verdict(&study.samples, variant, &cases));
    }
    Ok(())
}

fn cases(options: &Options) -> Result<Vec<Case>> {
    if let Some(size) = options.sizes.iter().find(|&&size| size < MIN_BYTES as u64 || size > KEEPERS_MIB << 20) {
        let most = Bytes(KEEPERS_MIB << 20);
        return Err(Error::CannotRun(format!("pieces of {size} bytes: they have {MIN_BYTES} B to {most}")));
    }
    let sizes = match options.sizes.as_slice() {
        [] => options.common.quick_or_full((QUICK_SIZES, SIZES)),
        given => given,
    };
    let variants = match options.variants.as_slice() {
        [] => options.common.quick_or_full((&[Variant::All][..], Variant::value_variants())),
        given => given,
    };
    let of_all = variants.iter().flat_map(|&variant| sizes.iter().map(move |&size| (variant, size)));
    Ok(of_all.filter(|&(variant, size)| variant != Variant::Random || size >= MIN_RANDOM_FREE_BYTES).collect())
}

fn case_name((variant, size): &Case) -> String {
    format!("pieces of {}, {}", Bytes(*size), variant.description())
}

/// Takes one sample in a new cgroup.
///
/// # Errors
///
/// [`Error::Gap`] if nothing could be measured.
fn take_sample(ready: &AvailableSubject, case: Case, pause: Duration) -> Result<Outcome> {
    let folder = tempfile::tempdir().map_err(doing("making a folder for signs"))?;
    let signs = Signs::new(folder.path());
    let group = make_group(ready, LIMIT_MIB)?;
    let keepers =
        (0..case.0.keepers()).map(|index| start_in_group(&group, &keeper_line(ready, case, index, folder.path())?));
    let keepers = keepers.collect::<Result<Vec<_>>>()?;
    for (index, keeper) in (0..).zip(&keepers) {
        if !signs.wait_for(&keeper_sign(index), keeper, Duration::from_secs(60))? {
            // The keepers' memory fits under every allocator. So a keeper that ends here did not lack memory, and the
            // sample has failed instead of being killed.
            return Ok(Outcome::Failed("a keeper ended before it had freed its pieces".to_owned()));
        }
    }
    child::sleep(pause)?;
    let newcomer = match keepers.iter().any(RunningGroup::has_ended) {
        true => None,
        false => Some(run_newcomer(&group, NEWCOMER_MIB, NEWCOMER_THREADS)?),
    };
    signs.create(&taken_sign(0)).map_err(doing("giving a sign"))?;
    let mut refused = 0.0;
    for keeper in keepers {
        let finished = keeper.finish(Duration::from_secs(60))?;
        match child::classify(ready.name(), &finished)? {
            Outcome::Measured(line) => refused += line[FAILED_ALLOCATIONS].as_f64().unwrap_or(0.0),
            lost => return Ok(lost),
        }
    }
    Ok(match newcomer {
        Some(Outcome::Measured(line)) => {
            refused += line[FAILED_ALLOCATIONS].as_f64().unwrap_or(0.0);
            Outcome::Measured(sample_json(&line, refused))
        }
        Some(lost) => lost,
        None => Outcome::Failed("a keeper ended before the newcomer came".to_owned()),
    })
}

/// Returns the JSON line of a sample, from that of the newcomer and the number of failed allocations. A sample with a
/// failed allocation has not survived.
fn sample_json(newcomer: &serde_json::Value, refused: f64) -> serde_json::Value {
    serde_json::json!({
        SPEED: newcomer[SPEED],
        SLOWEST_MS: newcomer["ms"],
        FAILED_ALLOCATIONS: refused,
        SURVIVED: u8::from(refused == 0.0),
    })
}

/// Returns the command line of a keeper, a process that fills and frees memory.
fn keeper_line(ready: &AvailableSubject, (variant, size): Case, index: u64, folder: &Path) -> Result<Vec<String>> {
    let run_options: &[&str] = if variant == Variant::Limit { &["--limit", TREE_LIMIT] } else { &[] };
    let mut line = workload_line(ready, run_options, "__piece-keeper")?;
    let options = [
        ("--mib", (KEEPERS_MIB / variant.keepers()).to_string()),
        ("--size", size.to_string()),
        ("--index", index.to_string()),
        ("--folder", folder.display().to_string()),
        ("--freed", child::word(&variant.freed())),
        ("--load", child::word(&variant.load())),
    ];
    line.extend(options.into_iter().flat_map(|(name, value)| [name.to_owned(), value]));
    Ok(line)
}

fn add_rows(study: &mut Study<'_, Case>, case: Case, ready: &[AvailableSubject]) {
    let (variant, size) = case;
    let words = variant.description();
    let table = format!(
        "survive, {words}: newcomer's GiB/s after {KEEPERS_MIB} MiB in pieces of one size, \
         {NEWCOMER_MIB} MiB needed, in {LIMIT_MIB} MiB"
    );
    study.rows(&case, ready, &table, &[(Metric::higher(SPEED, "GiB/s"), &Bytes(size).to_string())]);
    let others = [
        Metric::lower(SLOWEST_MS, "ms"),
        Metric::lower(FAILED_ALLOCATIONS, "calls"),
        Metric::higher(SURVIVED, "share"),
    ];
    study.json_rows(&case, ready, &others);
}

/// Judges all allocation sizes of a variant together. The target is missed if a process was killed or a malloc failed
/// in any sample.
fn verdict(samples: &SampleTable<Case>, variant: Variant, cases: &[Case]) -> Verdict {
    let target = format!("survive, pieces of one size, {}: samples without a kill or refusal", variant.description());
    let blank = not_measured(target, Bound::AtLeast(1.0), "of all", "pagemill was not run");
    let own = cases.iter().filter(|case| case.0 == variant);
    let survived: Vec<(u64, Vec<f64>)> =
        own.filter_map(|case| Some((case.1, samples.get((case, PAGEMILL, SURVIVED))?.values()))).collect();
    let all: Vec<f64> = survived.iter().flat_map(|(_, values)| values).copied().collect();
    if all.is_empty() {
        return blank;
    }
    let lost = survived.iter().filter_map(|(size, values)| {
        let lost = values.iter().filter(|&&value| value < 1.0).count();
        (lost > 0).then(|| format!("{} {lost}/{}", Bytes(*size), values.len()))
    });
    let lost: Vec<String> = lost.collect();
    let note = match lost.is_empty() {
        true => format!("{} samples", all.len()),
        false => format!("lost: {}", lost.join(", ")),
    };
    let share = all.iter().sum::<f64>() / all.len() as f64;
    let estimate = Some(stats::Estimate::exact(share, all.len()));
    Verdict { estimate, has_lost_round: share < 1.0, note, ..blank }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::VerdictState;

    /// Of three samples with allocations of 4 KiB, one is killed and one has a failed malloc. The target of the variant
    /// must be missed, and the note must say that 2 of 3 samples were lost. A variant without lost samples must reach
    /// its target. A variant without samples must count as not measured.
    #[test]
    fn lost_samples_miss_the_target() {
        let cases = [(Variant::All, 512), (Variant::All, 4096), (Variant::Runs, 512)];
        let mut samples = SampleTable::new();
        let line = |refused| Outcome::Measured(sample_json(&serde_json::json!({ SPEED: 1.0, "ms": 1.0 }), refused));
        for (case, outcome) in
            [(0, line(0.0)), (1, line(0.0)), (1, Outcome::Killed), (1, line(1.0)), (2, line(0.0)), (2, line(0.0))]
        {
            samples.add_outcome(&cases[case], PAGEMILL, METRICS, &outcome);
        }

        let all = verdict(&samples, Variant::All, &cases);
        let runs = verdict(&samples, Variant::Runs, &cases);
        let busy = verdict(&samples, Variant::Busy, &cases);

        assert!(all.state() == VerdictState::FallsShort && all.note == "lost: 4 KiB 2/3", "{all:?}");
        assert_eq!((runs.state(), busy.state()), (VerdictState::Reached, VerdictState::NotMeasured));
    }
}
