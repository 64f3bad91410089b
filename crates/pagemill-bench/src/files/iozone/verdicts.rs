//! Verdicts on all cells of the tables. A target is reached if no cell's interval lies wholly below the bound.

use super::{Case, Mode};
use crate::experiment::{Book, not_measured};
use crate::files::mount::{ALWAYS, CACHE, FileSystem, NEVER, STEERED, WITHIN_SIZE};
use crate::report::{Bound, Report, State, Verdict};
use crate::stats::{self, Better, Estimate};
use crate::workload::iozone::Operation;

/// The ratios of one cell in each round, where a cell is one operation with one number of workers.
struct Cell {
    name: String,
    ratios: Vec<f64>,
    is_lost: bool,
}

impl Cell {
    /// Returns the verdict on this cell alone.
    fn verdict(&self, bound: Bound) -> Verdict {
        let blank = not_measured(self.name.clone(), bound, "x", "");
        Verdict { estimate: stats::estimate(&self.ratios), is_lost: self.is_lost, ..blank }
    }

    fn value(verdict: &Verdict) -> f64 {
        verdict.estimate.map_or(0.0, |estimate| estimate.value)
    }
}

/// Adds the verdicts, and a note for each cell in which tmpfs with huge pages everywhere is slower than without any.
pub fn add(report: &mut Report, book: &Book<Case>, cases: &[Case]) {
    for (mode, against, bound) in [(Mode::Mapped, ALWAYS, 0.95), (Mode::ReadWrite, WITHIN_SIZE, 0.97)] {
        if cases.iter().any(|case| case.mode == mode) {
            let target = format!("{}, all cells, against {}", mode.name(), against.name);
            let cells = cells(book, cases, mode, STEERED, against);
            report.verdict(all_of(&cells, target, Bound::AtLeast(bound), against.name));
        }
    }
    if cases.iter().any(|case| case.mode == Mode::Mapped) {
        let cells = cells(book, cases, Mode::Mapped, STEERED, NEVER);
        let target = format!("mapped, geometric mean of all cells, against {}", NEVER.name);
        report.verdict(mean_of(&cells, target, Bound::AtLeast(3.0)));
    }
    for mode in [Mode::Mapped, Mode::ReadWrite] {
        let losing = cells(book, cases, mode, ALWAYS, NEVER);
        let losing = losing.iter().map(|cell| cell.verdict(Bound::AtLeast(1.0)));
        for verdict in losing.filter(|verdict| verdict.state() == State::FallsShort) {
            let Some(Estimate { value, low, high, .. }) = verdict.estimate else { continue };
            let finding = format!("{} loses to {}: {}", ALWAYS.name, NEVER.name, verdict.target);
            report.note(format!("{finding}: {value:.2} x [{low:.2}, {high:.2}]"));
        }
    }
}

/// Adds the verdicts on files in a page cache of the workload's process.
pub fn add_cached(report: &mut Report, book: &Book<Case>, cases: &[Case]) {
    for (against, bound) in [(NEVER, 1.3), (ALWAYS, 1.0)] {
        let target = format!("in a cache, all cells, against {}", against.name);
        let cells = cells(book, cases, Mode::ReadWrite, CACHE, against);
        report.verdict(all_of(&cells, target, Bound::AtLeast(bound), against.name));
    }
    let cells = cells(book, cases, Mode::ReadWrite, CACHE, NEVER);
    let target = format!("in a cache, geometric mean of all cells, against {}", NEVER.name);
    report.verdict(mean_of(&cells, target, Bound::AtLeast(2.0)));
}

fn cells(book: &Book<Case>, cases: &[Case], mode: Mode, subject: FileSystem, against: FileSystem) -> Vec<Cell> {
    let mut cells = Vec::new();
    for case in cases.iter().filter(|case| case.mode == mode) {
        for operation in Operation::ALL {
            let get = |name| book.get(case, name, operation.metric());
            if let (Some(series), Some(baseline)) = (get(subject.name), get(against.name)) {
                cells.push(Cell {
                    name: format!("{}, {}", case.name(), operation.metric()),
                    ratios: series.ratios(baseline, Better::Higher),
                    is_lost: !series.survived(),
                });
            }
        }
    }
    cells
}

/// Combines many cells into one verdict, which has the estimate and the name of the worst cell.
fn all_of(cells: &[Cell], target: String, bound: Bound, baseline: &'static str) -> Verdict {
    let mut verdicts: Vec<Verdict> = cells.iter().map(|cell| cell.verdict(bound)).collect();
    // A cell that falls short is worse than an undecided cell, even if the undecided one has a lower median.
    let rank = |verdict: &Verdict| match verdict.state() {
        State::FallsShort => 0,
        State::WithinDoubt => 1,
        _ => 2,
    };
    verdicts.sort_by(|left, right| rank(left).cmp(&rank(right)).then(Cell::value(left).total_cmp(&Cell::value(right))));
    let Some(worst) = verdicts.first() else {
        return not_measured(target, bound, "x", "one side was not run");
    };
    let count = |wanted| verdicts.iter().filter(|verdict| verdict.state() == wanted).count();
    let (short, doubtful) = (count(State::FallsShort), count(State::WithinDoubt));
    let mut note = format!("worst of {} cells: {}; {short} short, {doubtful} within doubt", cells.len(), worst.target);
    for verdict in verdicts.iter().take(short).skip(1) {
        note += &format!("; also {}: {:.3}", verdict.target, Cell::value(verdict));
    }
    for cell in cells.iter().filter(|cell| cell.is_lost) {
        note += &format!("; samples lost: {}", cell.name);
    }
    Verdict { target, note, baseline: baseline.to_owned(), ..worst.clone() }
}

fn mean_of(cells: &[Cell], target: String, bound: Bound) -> Verdict {
    let ratios: Vec<Vec<f64>> = cells.iter().map(|cell| cell.ratios.clone()).collect();
    let blank = not_measured(target, bound, "x", "");
    match stats::estimate(&stats::geometric_means(&ratios)) {
        Some(estimate) => Verdict {
            estimate: Some(estimate),
            baseline: NEVER.name.to_owned(),
            is_lost: cells.iter().any(|cell| cell.is_lost),
            note: format!("{} cells", cells.len()),
            ..blank
        },
        None => Verdict { note: "one side was not run".to_owned(), ..blank },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(name: &str, ratios: &[f64]) -> Cell {
        Cell { name: name.to_owned(), ratios: ratios.to_owned(), is_lost: false }
    }

    fn judge(cells: &[Cell]) -> Verdict {
        all_of(cells, "all".to_owned(), Bound::AtLeast(0.95), "tmpfs-always")
    }

    /// A cell whose interval lies wholly below the bound makes the target fall short and is named, although an
    /// undecided cell has a lower median.
    #[test]
    fn the_worst_cell_stands_for_all() {
        let (good, doubtful) = (cell("good", &[1.0; 3]), cell("doubtful", &[0.5, 0.5, 1.5]));
        let short = cell("short", &[0.9, 0.91, 0.92]);

        let all = judge(&[good, doubtful, short]);

        assert_eq!(all.state(), State::FallsShort);
        assert!(all.note.contains("worst of 3 cells: short; 1 short, 1 within doubt"), "{}", all.note);
        assert_eq!(judge(&[cell("good", &[1.0; 3])]).state(), State::Reached);
        assert_eq!(judge(&[]).state(), State::NotMeasured);
    }

    /// A cell with a lost sample makes the target fall short, however good its other samples are.
    #[test]
    fn a_lost_round_condemns() {
        let lost = Cell { is_lost: true, ..cell("lost", &[2.0; 3]) };

        assert_eq!(judge(&[cell("good", &[1.0; 3]), lost]).state(), State::FallsShort);
    }
}
