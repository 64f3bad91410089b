//! Small allocations under the preloaded Pagemill, compared with plain jemalloc. Pagemill serves small allocations by
//! jemalloc.
//!
//! For a small malloc, Pagemill adds one comparison and two jumps to jemalloc's work. The measured nanoseconds show
//! their cost on this machine. The instruction counts (`--callgrind`) are also valid for other machines.

use std::time::Duration;

use crate::callgrind;
use crate::child;
use crate::error::Result;
use crate::experiment::{self, CommonOptions, Metric, Progress, SampleTable, not_measured, report_row, rotated};
use crate::report::{Bound, Report, Row, TableCell, Verdict};
use crate::stats::{self, Better, Estimate};
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

pub fn run(options: &Options) -> Result<Report> {
    let common = &options.common;
    let is_wanted = |subject: &subject::Subject| match common.only.is_empty() {
        true => matches!(subject.name, BASELINE | PAGEMILL),
        false => true,
    };
    let (ready, gaps) = subject::select_available(&common.only, is_wanted)?;
    let mut report = Report::new("small", common.json);
    gaps.into_iter().for_each(|gap| report.add_gap(gap));
    child::touch_beforehand(64)?;
    let samples = measure_cases(&ready, common)?;
    let metric = Metric { name: NS_PER_PAIR, unit: "ns", better: Better::Lower, baseline: Some(BASELINE) };
    for case in cases() {
        for subject in &ready {
            let (pattern, threads, size) = case;
            let cell = TableCell {
                table: format!("{pattern}, {threads} threads: ns a malloc and free, half the spread, times {BASELINE}"),
                column: size_name(size),
            };
            let name = case_name(case);
            report_row(&mut report, &samples, (&case, &name), subject.name(), metric, Some(cell));
        }
    }
    add_verdicts(&mut report, &samples);
    if options.callgrind {
        count_instructions(&mut report, &ready, common)?;
    }
    Ok(report)
}

fn cases() -> impl Iterator<Item = Case> {
    PATTERNS.into_iter().flat_map(|pattern| {
        THREAD_COUNTS.into_iter().flat_map(move |threads| SIZES.into_iter().map(move |size| (pattern, threads, size)))
    })
}

fn size_name(size: usize) -> String {
    match size {
        size if size < 1024 => format!("{size} B"),
        size => format!("{} KiB", size / 1024),
    }
}

fn case_name((pattern, threads, size): Case) -> String {
    format!("{pattern}, {threads} threads, {}", size_name(size))
}

fn measure_cases(ready: &[AvailableSubject], common: &CommonOptions) -> Result<SampleTable<Case>> {
    let milliseconds = common.quick_or_full("15", "60");
    let progress = Progress::new(cases().count() * common.rounds() * ready.len());
    let mut samples = SampleTable::new();
    for case in cases() {
        let (pattern, threads, size) = case;
        let (threads, size) = (threads.to_string(), size.to_string());
        let arguments =
            ["__small", "--pattern", pattern, "--threads", &threads, "--size", &size, "--measure-ms", milliseconds];
        for round in 0..common.rounds() {
            for subject in rotated(ready, round) {
                progress.step(&format!("{}, {}", case_name(case), subject.name()));
                let outcome = child::run_under(subject, arguments, Duration::from_secs(30))?;
                samples.add_outcome(&case, subject.name(), &[NS_PER_PAIR], &outcome);
            }
        }
    }
    Ok(samples)
}

/// Adds the verdicts to the report: one for every case, one for the mean of all cases, and one for the cost of
/// returning memory by age.
fn add_verdicts(report: &mut Report, samples: &SampleTable<Case>) {
    let (mut all, mut aging_ratios) = (Vec::new(), Vec::new());
    for case in cases() {
        let pagemill = samples.get(&case, PAGEMILL, NS_PER_PAIR);
        if let (Some(pagemill), Some(keeping)) = (pagemill, samples.get(&case, PAGEMILL_WITHOUT_AGING, NS_PER_PAIR)) {
            aging_ratios.push(pagemill.ratios(keeping, Better::Lower));
        }
        let baseline = samples.get(&case, BASELINE, NS_PER_PAIR);
        if let (Some(pagemill), Some(baseline)) = (pagemill, baseline) {
            let ratios = pagemill.ratios(baseline, Better::Lower);
            all.push(ratios);
            let blank = not_measured(format!("small, {}", case_name(case)), Bound::AtLeast(0.95), "x", "");
            report.add_verdict(blank.compared(pagemill, (BASELINE, baseline), Better::Lower));
        }
    }
    let is_whole = all.len() == cases().count();
    let means = if is_whole { stats::geometric_means(&all) } else { Vec::new() };
    let note = if is_whole { "" } else { "a side is missing" };
    report.add_verdict(Verdict {
        estimate: stats::estimate_median(&means),
        baseline: BASELINE.to_owned(),
        ..not_measured("small, geometric mean of all cases", Bound::AtLeast(0.95), "x", note)
    });
    if let Some(verdict) = experiment::judge_aging_cost("small", &aging_ratios) {
        report.add_verdict(verdict);
    }
}

fn count_instructions(report: &mut Report, ready: &[AvailableSubject], common: &CommonOptions) -> Result<()> {
    let sizes = if common.quick { &SIZES[1..2] } else { &SIZES[..] };
    let progress = Progress::new(PATTERNS.len() * sizes.len() * ready.len());
    for pattern in PATTERNS {
        for &size in sizes {
            let mut counts = Vec::new();
            for subject in ready {
                progress.step(&format!("instructions, {pattern}, {size} B, {}", subject.name()));
                match instructions_per_pair(subject, pattern, size)? {
                    Ok(count) => counts.push((subject.name(), count)),
                    Err(why) => report.add_gap(format!("instructions, {}: {why}", subject.name())),
                }
            }
            add_instruction_rows(report, pattern, size, &counts);
        }
    }
    Ok(())
}

fn add_instruction_rows(report: &mut Report, pattern: &str, size: usize, counts: &[(&'static str, f64)]) {
    let of = |wanted| counts.iter().find(|(name, _)| *name == wanted).map(|&(_, count)| count);
    for &(name, count) in counts {
        let baseline = of(BASELINE).filter(|_| name != BASELINE);
        report.add_row(Row {
            experiment: "small",
            case: format!("{pattern}, 1 threads, {}", size_name(size)),
            subject: name.to_owned(),
            metric: "instructions_per_pair",
            value: count,
            unit: "instructions",
            baseline: baseline.map(|_| BASELINE.to_owned()),
            ratio: baseline.map(|baseline| baseline / count),
            spread: 0.0,
            samples: 1,
            cell: Some(TableCell {
                table: format!("{pattern}: instructions a malloc and free (callgrind)"),
                column: size_name(size),
            }),
        });
    }
    if let (Some(pagemill), Some(baseline)) = (of(PAGEMILL), of(BASELINE)) {
        let more = pagemill - baseline;
        let target = format!("small, {pattern}, {}: instructions more", size_name(size));
        report.add_verdict(Verdict {
            // The count is exact, so the interval has zero width.
            estimate: Some(Estimate { value: more, low: more, high: more, samples: usize::MAX }),
            baseline: BASELINE.to_owned(),
            ..not_measured(target, Bound::AtMost(MAX_ADDED_INSTRUCTIONS), "instructions", "")
        });
    }
}

fn instructions_per_pair(
    ready: &AvailableSubject,
    pattern: &str,
    size: usize,
) -> Result<std::result::Result<f64, String>> {
    callgrind::instructions_per_operation(ready.name(), |command, pairs| {
        command.args(["__small", "--pattern", pattern]);
        command.args(["--size", &size.to_string(), "--pairs", &pairs.to_string()]);
        ready.apply(command);
        // With this setting, Pagemill serves the program from the first call on. Otherwise the C library would serve
        // this program, because it makes few calls.
        command.env("PAGEMILL_AFTER", "0");
    })
}
