//! Small allocations under the preloaded Pagemill, compared with plain jemalloc. Pagemill serves small allocations by
//! jemalloc.
//!
//! For a small malloc, Pagemill adds one comparison and two jumps to jemalloc's work. The measured nanoseconds show
//! their cost on this machine. The instruction counts (`--callgrind`) are also valid for other machines.

use std::time::Duration;

use pagemill_core::units::Bytes;

use crate::callgrind;
use crate::child;
use crate::error::Result;
use crate::experiment::{
    self, CommonOptions, Metric, Named, Progress, SampleTable, not_measured, report_rows, turns_by_case,
};
use crate::report::{Bound, Report, Row, TableCell, Verdict};
use crate::stats::{Better, Estimate};
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
    let mut report = Report::new("small", common.json);
    let ready = report.with_gaps(subject::select_available(&common.only, is_wanted)?);
    child::touch_beforehand(64)?;
    let samples = measure_cases(&ready, common)?;
    let metric = Metric::lower(NS_PER_PAIR, "ns").against(BASELINE);
    for case in cases() {
        let (pattern, threads, size) = case;
        let table = format!("{pattern}, {threads} threads: ns a malloc and free, half the spread, times {BASELINE}");
        let columns = [(metric, &*Bytes(size as u64).to_string())];
        report_rows(&mut report, &samples, (&case, &case_name(case)), &ready, &table, &columns);
    }
    add_verdicts(&mut report, &samples);
    if options.callgrind {
        count_instructions(&mut report, &ready, common)?;
    }
    Ok(report)
}

fn cases() -> Vec<Case> {
    let of_pattern = |pattern| THREAD_COUNTS.map(|threads| SIZES.map(|size| (pattern, threads, size)));
    PATTERNS.map(of_pattern).as_flattened().as_flattened().to_vec()
}

fn case_name((pattern, threads, size): Case) -> String {
    format!("{pattern}, {threads} threads, {}", Bytes(size as u64))
}

fn measure_cases(ready: &[AvailableSubject], common: &CommonOptions) -> Result<SampleTable<Case>> {
    let milliseconds = common.quick_or_full(("15", "60"));
    let cases = cases();
    let mut samples = SampleTable::new();
    for (case, subject) in turns_by_case(&cases, common.rounds(), ready, |case| case_name(*case)) {
        let (pattern, threads, size) = case;
        let (threads, size) = (threads.to_string(), size.to_string());
        let arguments =
            ["__small", "--pattern", pattern, "--threads", &threads, "--size", &size, "--measure-ms", milliseconds];
        let outcome = child::run_under(subject, arguments, Duration::from_secs(30))?;
        samples.add_outcome(case, subject.name(), &[NS_PER_PAIR], &outcome);
    }
    Ok(samples)
}

/// Adds the verdicts to the report: one for every case, one for the mean of all cases, and one for the cost of
/// returning memory by age.
fn add_verdicts(report: &mut Report, samples: &SampleTable<Case>) {
    let (mut all, mut aging_ratios) = (Vec::new(), Vec::new());
    for case in cases() {
        let pagemill = samples.get((&case, PAGEMILL, NS_PER_PAIR));
        if let (Some(pagemill), Some(keeping)) = (pagemill, samples.get((&case, PAGEMILL_WITHOUT_AGING, NS_PER_PAIR))) {
            aging_ratios.push(pagemill.ratios(keeping, Better::Lower));
        }
        let baseline = samples.get((&case, BASELINE, NS_PER_PAIR));
        if let (Some(pagemill), Some(baseline)) = (pagemill, baseline) {
            all.push(pagemill.ratios(baseline, Better::Lower));
            let blank = not_measured(format!("small, {}", case_name(case)), Bound::AtLeast(0.95), "x", "");
            report.add_verdict(blank.compared(Some(pagemill), (BASELINE, Some(baseline)), Better::Lower));
        }
    }
    let is_whole = all.len() == cases().len();
    let (ratios, note) = if is_whole { (&all[..], "") } else { (&[][..], "a side is missing") };
    let blank = not_measured("small, geometric mean of all cases", Bound::AtLeast(0.95), "x", note);
    report.add_verdict(blank.with_mean(ratios, BASELINE));
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
                if let Some(count) = report.unless_gap(instructions_per_pair(subject, pattern, size))? {
                    counts.push((subject.name(), count));
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
            case: format!("{pattern}, 1 threads, {}", Bytes(size as u64)),
            subject: name.to_owned(),
            baseline: baseline.map(|_| BASELINE.to_owned()),
            ratio: baseline.map(|baseline| baseline / count),
            cell: Some(TableCell {
                table: format!("{pattern}: instructions a malloc and free (callgrind)"),
                column: Bytes(size as u64).to_string(),
            }),
            ..report.single_value("instructions_per_pair", count, "instructions")
        });
    }
    if let (Some(pagemill), Some(baseline)) = (of(PAGEMILL), of(BASELINE)) {
        let more = pagemill - baseline;
        let target = format!("small, {pattern}, {}: instructions more", Bytes(size as u64));
        report.add_verdict(Verdict {
            // The count is exact, so the interval has zero width.
            estimate: Some(Estimate::exact(more, usize::MAX)),
            baseline: BASELINE.to_owned(),
            ..not_measured(target, Bound::AtMost(MAX_ADDED_INSTRUCTIONS), "instructions", "")
        });
    }
}

fn instructions_per_pair(ready: &AvailableSubject, pattern: &str, size: usize) -> Result<f64> {
    callgrind::instructions_per_operation(ready.name(), |command, pairs| {
        command.args(["__small", "--pattern", pattern]);
        command.args(["--size", &size.to_string(), "--pairs", &pairs.to_string()]);
        ready.apply(command);
        // With this setting, Pagemill serves the program from the first call on. Otherwise the C library would serve
        // this program, because it makes few calls.
        command.env("PAGEMILL_AFTER", "0");
    })
}
