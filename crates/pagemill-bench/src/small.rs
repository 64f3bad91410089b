//! Small allocations under the preloaded Pagemill, compared with plain jemalloc. Pagemill serves small allocations by
//! jemalloc.
//!
//! For a small malloc, Pagemill adds one comparison and two jumps to jemalloc's work. The measured nanoseconds show
//! their cost on this machine. The instruction counts (`--callgrind`) are also valid for other machines.

use std::time::Duration;

use pagemill_core::units::Bytes;

use crate::callgrind::{self, INSTRUCTIONS_PER_PAIR};
use crate::child;
use crate::error::Result;
use crate::experiment::{self, CommonOptions, Metric, Named, Study, not_measured};
use crate::report::{Bound, Report, Series};
use crate::stats::Better;
use crate::subject::{self, AvailableSubject, PAGEMILL, PAGEMILL_WITHOUT_AGING};

/// Sizes of the allocations in bytes.
const SIZES: [usize; 7] = [16, 64, 256, 1 << 10, 4 << 10, 16 << 10, 32 << 10];
/// Orders of malloc and free, as the workload's command line names them: each allocation is freed at once; a thousand
/// are made, then freed; a random one of a thousand is replaced.
const PATTERNS: [&str; 3] = ["pair", "batch", "churn"];
const THREAD_COUNTS: [u16; 2] = [1, 2];

/// The allocator by which Pagemill serves small allocations, here preloaded without Pagemill.
const BASELINE: &str = "jemalloc";
/// Metric: nanoseconds of one malloc and one free.
const NS_PER_PAIR: &str = "ns_per_pair";

/// Maximum number of instructions that a pair of malloc and free may take in Pagemill more than in jemalloc.
const MAX_ADDED_INSTRUCTIONS: f64 = 8.0;

#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    #[command(flatten)]
    pub common: CommonOptions,
    /// Also count the instructions of a malloc and free with valgrind
    #[arg(long)]
    pub callgrind: bool,
}

/// Order of malloc and free (pattern), number of threads, and size of the allocations in bytes. The order of these
/// fields is also the order in the tables.
type Case = (&'static str, u16, usize);

pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let common = &options.common;
    let is_wanted = |subject: &subject::Subject| match common.only.is_empty() {
        true => matches!(subject.name, BASELINE | PAGEMILL),
        false => true,
    };
    let ready = report.with_gaps(subject::select_available(&common.only, is_wanted)?);
    child::touch_beforehand(64)?;
    let milliseconds = common.quick_or_full(("15", "60"));
    let mut study = Study::new(report, case_name);
    study.measure_by_case(
        (&cases(), common.rounds()),
        &ready,
        &[NS_PER_PAIR],
        |(pattern, threads, size), subject| {
            let (threads, size) = (threads.to_string(), size.to_string());
            let arguments =
                ["__small", "--pattern", pattern, "--threads", &threads, "--size", &size, "--measure-ms", milliseconds];
            child::run_under(subject, arguments, Duration::from_secs(30))
        },
    )?;
    let metric = Metric::lower(NS_PER_PAIR, "ns").against(BASELINE);
    for case in cases() {
        let (pattern, threads, size) = case;
        let table = format!("{pattern}, {threads} threads: ns a malloc and free, half the spread, times {BASELINE}");
        study.rows(&case, &ready, &table, &[(metric, &Bytes(size as u64).to_string())]);
    }
    add_verdicts(&mut study);
    if options.callgrind {
        count_instructions(report, &ready, common)?;
    }
    Ok(())
}

fn cases() -> Vec<Case> {
    let of_pattern = |pattern| THREAD_COUNTS.map(|threads| SIZES.map(|size| (pattern, threads, size)));
    PATTERNS.map(of_pattern).as_flattened().as_flattened().to_vec()
}

fn case_name(&(pattern, threads, size): &Case) -> String {
    format!("{pattern}, {threads} threads, {}", Bytes(size as u64))
}

/// Adds the verdicts to the report: one for every case, one for the mean of all cases, and one for the cost of
/// returning memory by age.
fn add_verdicts(study: &mut Study<'_, Case>) {
    let ns = (NS_PER_PAIR, Better::Lower);
    for case in cases() {
        let baseline = study.samples.get((&case, BASELINE, NS_PER_PAIR));
        if let (Some(pagemill), Some(baseline)) = (study.samples.get((&case, PAGEMILL, NS_PER_PAIR)), baseline) {
            let blank = not_measured(format!("small, {}", case_name(&case)), Bound::AtLeast(0.95), "x", "");
            study.report.add_verdict(blank.compared(Some(pagemill), (BASELINE, Some(baseline)), Better::Lower));
        }
    }
    let all = study.samples.ratios(&cases(), (PAGEMILL, BASELINE), ns);
    let is_whole = all.len() == cases().len();
    let (ratios, note) = if is_whole { (&all[..], "") } else { (&[][..], "a side is missing") };
    let blank = not_measured("small, geometric mean of all cases", Bound::AtLeast(0.95), "x", note);
    study.report.add_verdict(blank.with_mean(ratios, BASELINE));
    let aging_ratios = study.samples.ratios(&cases(), (PAGEMILL, PAGEMILL_WITHOUT_AGING), ns);
    experiment::judge_aging_cost("small", &aging_ratios)
        .into_iter()
        .for_each(|verdict| study.report.add_verdict(verdict));
}

fn count_instructions(report: &mut Report, ready: &[AvailableSubject], common: &CommonOptions) -> Result<()> {
    let sizes = if common.quick { &SIZES[1..2] } else { &SIZES[..] };
    let cases: Vec<Case> =
        PATTERNS.into_iter().flat_map(|pattern| sizes.iter().map(move |size| (pattern, 1, *size))).collect();
    let mut study = Study::new(report, case_name);
    study.measure_by_case((&cases, 1), ready, &[INSTRUCTIONS_PER_PAIR], |&(pattern, _, size), subject| {
        callgrind::count_instructions(subject.name(), INSTRUCTIONS_PER_PAIR, |command, pairs| {
            command.args(["__small", "--pattern", pattern]);
            command.args(["--size", &size.to_string(), "--pairs", &pairs.to_string()]);
            subject.apply(command);
            // With this setting, Pagemill serves the program from the first call on. Otherwise the C library would
            // serve this program, because it makes few calls.
            command.env("PAGEMILL_AFTER", "0");
        })
    })?;
    let metric = Metric::lower(INSTRUCTIONS_PER_PAIR, "instructions").against(BASELINE);
    for case in &cases {
        let (pattern, size) = (case.0, Bytes(case.2 as u64).to_string());
        let table = format!("{pattern}: instructions a malloc and free (callgrind)");
        study.rows(case, ready, &table, &[(metric, &size)]);
        let count = |subject| study.samples.get((case, subject, INSTRUCTIONS_PER_PAIR)).and_then(Series::median);
        if let (Some(pagemill), Some(baseline)) = (count(PAGEMILL), count(BASELINE)) {
            let operation = format!("small, {pattern}, {size}");
            let verdict = callgrind::judge_added(operation, MAX_ADDED_INSTRUCTIONS, pagemill, (BASELINE, baseline));
            study.report.add_verdict(verdict);
        }
    }
    Ok(())
}
