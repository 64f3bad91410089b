//! Verdicts on all cells of the tables; a cell is one operation with one number of workers. A target is reached unless
//! some cell's whole confidence interval lies below the bound.

use super::{Case, Mode};
use crate::experiment::{SampleTable, not_measured};
use crate::files::mount::{ALWAYS, CACHE, FileSystem, NEVER, PAGEMILL_MOUNT, VIEWS, WITHIN_SIZE};
use crate::report::{Bound, Report, Verdict, VerdictState};
use crate::stats::{self, Better, Estimate};
use crate::workload::iozone::Operation;

/// The comparison of two file systems in one operation with one number of workers. For each round in which both were
/// measured, `ratios` has the speed on the first file system divided by the speed on the second.
struct Cell {
    name: String,
    ratios: Vec<f64>,
    has_lost_round: bool,
}

impl Cell {
    fn verdict(&self, bound: Bound) -> Verdict {
        let blank = not_measured(self.name.clone(), bound, "x", "");
        Verdict { estimate: stats::estimate_median(&self.ratios), has_lost_round: self.has_lost_round, ..blank }
    }

    fn value(verdict: &Verdict) -> f64 {
        verdict.estimate.map_or(0.0, |estimate| estimate.value)
    }
}

/// Adds the verdicts to the report. Also adds a note for each operation and number of workers for which tmpfs with huge
/// pages everywhere is slower than tmpfs without huge pages.
pub fn add_verdicts(report: &mut Report, samples: &SampleTable<Case>, cases: &[Case]) {
    for (mode, against, bound) in [(Mode::Mapped, ALWAYS, 0.95), (Mode::ReadWrite, WITHIN_SIZE, 0.97)] {
        if cases.iter().any(|case| case.mode == mode) {
            let target = format!("{}, all cells, against {}", mode.name(), against.name);
            let cells = collect_cells(samples, cases, mode, PAGEMILL_MOUNT, against);
            report.add_verdict(judge_all_cells(&cells, target, Bound::AtLeast(bound), against.name));
        }
    }
    if cases.iter().any(|case| case.mode == Mode::Mapped) {
        let cells = collect_cells(samples, cases, Mode::Mapped, PAGEMILL_MOUNT, NEVER);
        let target = "mapped, geometric mean of all cells";
        let processors = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        report.add_verdict(judge_mean(&cells, target, Bound::AtLeast(least_mapped_gain(&processors)), NEVER.name));
    }
    for mode in [Mode::Mapped, Mode::ReadWrite] {
        let losing = collect_cells(samples, cases, mode, ALWAYS, NEVER);
        let losing = losing.iter().map(|cell| cell.verdict(Bound::AtLeast(1.0)));
        for verdict in losing.filter(|verdict| verdict.state() == VerdictState::FallsShort) {
            let Some(Estimate { value, low, high, .. }) = verdict.estimate else { continue };
            let finding = format!("{} loses to {}: {}", ALWAYS.name, NEVER.name, verdict.target);
            report.add_note(format!("{finding}: {value:.2} x [{low:.2}, {high:.2}]"));
        }
    }
}

/// Returns the minimum speed of mapped files relative to files in small pages, given the contents of `/proc/cpuinfo`.
/// It is lower on processors by Intel.
fn least_mapped_gain(processors: &str) -> f64 {
    let vendor = processors.lines().find_map(|line| line.strip_prefix("vendor_id")?.split_once(": "));
    if vendor.is_some_and(|(_, vendor)| vendor.trim() == "GenuineIntel") { 2.3 } else { 3.0 }
}

/// Adds the verdicts on files in a page cache of the workload's process.
pub fn add_cache_verdicts(report: &mut Report, samples: &SampleTable<Case>, cases: &[Case]) {
    for (against, bound) in [(NEVER, 1.3), (ALWAYS, 1.0)] {
        let target = format!("in a cache, all cells, against {}", against.name);
        let cells = collect_cells(samples, cases, Mode::ReadWrite, CACHE, against);
        report.add_verdict(judge_all_cells(&cells, target, Bound::AtLeast(bound), against.name));
    }
    let cells = collect_cells(samples, cases, Mode::ReadWrite, CACHE, NEVER);
    report.add_verdict(judge_mean(&cells, "in a cache, geometric mean of all cells", Bound::AtLeast(2.0), NEVER.name));
}

/// Adds the verdicts on views of files in a page cache of the workload's process.
pub fn add_view_verdicts(report: &mut Report, samples: &SampleTable<Case>, cases: &[Case]) {
    let cells = collect_cells(samples, cases, Mode::Mapped, VIEWS, NEVER);
    let target = format!("in views, all cells, against {}", NEVER.name);
    report.add_verdict(judge_all_cells(&cells, target, Bound::AtLeast(1.0), NEVER.name));
    for (against, bound) in [(NEVER, 3.0), (ALWAYS, 1.0)] {
        let cells = collect_cells(samples, cases, Mode::Mapped, VIEWS, against);
        let target = "in views, geometric mean of all cells";
        report.add_verdict(judge_mean(&cells, target, Bound::AtLeast(bound), against.name));
    }
}

/// Returns the cells (operations with a number of workers) of one mode, with the speed on `subject` relative to the
/// speed on `against`.
fn collect_cells(
    samples: &SampleTable<Case>,
    cases: &[Case],
    mode: Mode,
    subject: FileSystem,
    against: FileSystem,
) -> Vec<Cell> {
    let mut cells = Vec::new();
    for case in cases.iter().filter(|case| case.mode == mode) {
        for operation in Operation::ALL {
            let get = |name| samples.get((case, name, operation.metric()));
            if let (Some(series), Some(baseline)) = (get(subject.name), get(against.name)) {
                cells.push(Cell {
                    name: format!("{}, {}", case.name(), operation.metric()),
                    ratios: series.ratios(baseline, Better::Higher),
                    has_lost_round: !series.survived(),
                });
            }
        }
    }
    cells
}

/// Combines the verdicts on many cells (operations with a number of workers) into one. The result has the estimate of
/// the worst cell, and a note that names this cell.
fn judge_all_cells(cells: &[Cell], target: String, bound: Bound, baseline: &'static str) -> Verdict {
    let mut verdicts: Vec<Verdict> = cells.iter().map(|cell| cell.verdict(bound)).collect();
    // A cell that falls short is worse than an undecided cell, even if the undecided cell has a lower median.
    let rank = |verdict: &Verdict| match verdict.state() {
        VerdictState::FallsShort => 0,
        VerdictState::WithinDoubt => 1,
        _ => 2,
    };
    verdicts.sort_by(|left, right| rank(left).cmp(&rank(right)).then(Cell::value(left).total_cmp(&Cell::value(right))));
    let Some(worst) = verdicts.first() else {
        return not_measured(target, bound, "x", "one side was not run");
    };
    let count = |wanted| verdicts.iter().filter(|verdict| verdict.state() == wanted).count();
    let (short, doubtful) = (count(VerdictState::FallsShort), count(VerdictState::WithinDoubt));
    let mut note = format!("worst of {} cells: {}; {short} short, {doubtful} within doubt", cells.len(), worst.target);
    for verdict in verdicts.iter().take(short).skip(1) {
        note += &format!("; also {}: {:.3}", verdict.target, Cell::value(verdict));
    }
    for cell in cells.iter().filter(|cell| cell.has_lost_round) {
        note += &format!("; samples lost: {}", cell.name);
    }
    Verdict { target, note, baseline: baseline.to_owned(), ..worst.clone() }
}

fn judge_mean(cells: &[Cell], target: &str, bound: Bound, baseline: &'static str) -> Verdict {
    let ratios: Vec<Vec<f64>> = cells.iter().map(|cell| cell.ratios.clone()).collect();
    let target = format!("{target}, against {baseline}");
    let verdict = not_measured(target, bound, "x", "one side was not run").with_mean(&ratios, baseline);
    if verdict.estimate.is_none() {
        return verdict;
    }
    let has_lost_round = cells.iter().any(|cell| cell.has_lost_round);
    Verdict { has_lost_round, note: format!("{} cells", cells.len()), ..verdict }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(name: &str, ratios: &[f64]) -> Cell {
        Cell { name: name.to_owned(), ratios: ratios.to_owned(), has_lost_round: false }
    }

    fn judge_cells(cells: &[Cell]) -> Verdict {
        judge_all_cells(cells, "all".to_owned(), Bound::AtLeast(0.95), "tmpfs-always")
    }

    /// If the whole confidence interval of one cell lies below the bound, the target must be missed, and the note must
    /// name this cell as the worst. The note must not name an undecided cell with a lower median instead.
    #[test]
    fn worst_cell_decides_the_verdict() {
        let (good, doubtful) = (cell("good", &[1.0; 3]), cell("doubtful", &[0.5, 0.5, 1.5]));
        let short = cell("short", &[0.9, 0.91, 0.92]);

        let all = judge_cells(&[good, doubtful, short]);

        assert_eq!(all.state(), VerdictState::FallsShort);
        assert!(all.note.contains("worst of 3 cells: short; 1 short, 1 within doubt"), "{}", all.note);
        assert_eq!(judge_cells(&[cell("good", &[1.0; 3])]).state(), VerdictState::Reached);
        assert_eq!(judge_cells(&[]).state(), VerdictState::NotMeasured);
    }

    /// The bound must depend on the vendor of the processor. Without a vendor, the stricter bound applies.
    #[test]
    fn bound_of_mapped_files_depends_on_the_processor() {
        let bounds = ["GenuineIntel", "AuthenticAMD"]
            .map(|vendor| least_mapped_gain(&format!("processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: 6\n")));

        assert_eq!(bounds, [2.3, 3.0]);
        assert_eq!(least_mapped_gain(""), 3.0);
    }

    /// If a sample of a cell was lost, the target must be missed, however good the other samples of the cell are.
    #[test]
    fn lost_round_misses_the_target() {
        let lost = Cell { has_lost_round: true, ..cell("lost", &[2.0; 3]) };

        assert_eq!(judge_cells(&[cell("good", &[1.0; 3]), lost]).state(), VerdictState::FallsShort);
    }
}
