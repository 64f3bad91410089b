//! What weakens the figures of a run, each with its remedy: noise, missing privileges, missing peers.

use crate::machine::{BUSY_LOAD_PER_CPU, Machine};
use crate::report::{ORIGINAL_SUBJECTS, Report, Row, TARGET_KEPT, format_number};

/// A warning and the way to remove its cause.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    pub what: String,
    pub remedy: String,
}

/// Half of the spread above which a figure counts as noisy.
const NOISY_HALF_SPREAD: f64 = 0.15;

/// Remedies of gaps and errors, by a part of their text. The first that matches counts.
const REMEDIES: &[(&str, &str)] = &[
    ("takes root", "run the command with sudo"),
    ("not permitted", "run the command with sudo"),
    ("interrupted", "run it again, or only this experiment: --only NAME"),
    ("wrong answer", "this is a bug of the subject or of the bench: report it with this message"),
    ("did not end within", "end other programs and measure again"),
    ("fio is not there", "apt-get install fio"),
    ("the command is not built", "cargo build --release -p pagemill-cli -p pagemill-bench"),
    ("valgrind", "apt-get install valgrind"),
    ("configure script", "download and unpack the source of GNU hello; give its folder"),
    ("are in memory here", "give --dir a folder on a disk"),
    ("O_DIRECT", "give --dir a folder on a file system that supports direct I/O, such as ext4 or xfs"),
    ("are free", "free space on the disk, or give --dir a folder on another disk"),
    ("not available", "end programs that use much memory, or measure on a larger machine"),
    ("needs a limit", "run the command as root, where control groups are writable"),
    ("control group", "run the command as root, where control groups are writable"),
    ("cgroup", "run the command as root, where control groups are writable"),
    ("--seconds", "run the experiment without --quick, or with longer samples"),
    ("too few huge pages", "free memory, or run `echo 1 > /proc/sys/vm/compact_memory` as root"),
    ("is not installed", "install it"),
    ("no baseline", "none needed: another peer is the baseline"),
];

/// Words after which the text of a gap names its remedy.
const NAMED_REMEDY: &str = "; to have it: ";

impl Warning {
    fn new(what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { what: what.into(), remedy: remedy.into() }
    }

    /// Makes the warning of a gap or of an error, whose text may name the remedy itself.
    pub fn of_gap(gap: &str) -> Self {
        if let Some((what, remedy)) = gap.split_once(NAMED_REMEDY) {
            return Self::new(what, remedy);
        }
        let known = REMEDIES.iter().find(|(part, _)| gap.contains(part));
        Self::new(gap, known.map_or("see docs/benchmarks.md", |(_, remedy)| remedy))
    }
}

/// Returns the warnings about the machine.
pub fn of_machine(machine: &Machine) -> Vec<Warning> {
    let mut warnings = Vec::new();
    let mut add = |what: String, remedy: &str| warnings.push(Warning::new(what, remedy));
    if machine.fact("build") == "debug" {
        add(
            "the bench was built without optimization".to_owned(),
            "cargo build --release -p pagemill-cli -p pagemill-bench",
        );
    }
    let cpus = machine.cpus();
    if let Some(load) = machine.load.filter(|load| load / cpus > BUSY_LOAD_PER_CPU) {
        add(
            format!("other programs used the machine: load {load} on {cpus} CPUs at the start"),
            "end them and measure again",
        );
    }
    if machine.fact("huge_pages") == "never" {
        add(
            "the kernel gives no transparent huge pages".to_owned(),
            "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        );
    }
    let governor = machine.fact("governor");
    if ["powersave", "ondemand", "conservative"].contains(&governor) {
        add(
            format!("the frequency governor {governor} changes the CPU's speed"),
            "cpupower frequency-set -g performance",
        );
    }
    if machine.fact("virtual_machine") == "yes" {
        add(
            "the machine is virtual, so its speed can drift by a quarter within minutes".to_owned(),
            "compare only ratios of one run, or measure on bare metal",
        );
    }
    warnings
}

/// Returns the warnings about the figures of a report.
pub fn of_report(report: &Report) -> Vec<Warning> {
    let mut warnings: Vec<Warning> = Vec::new();
    for gap in report.gaps() {
        let warning = Warning::of_gap(gap);
        if !warnings.contains(&warning) {
            warnings.push(warning);
        }
    }
    let figures: Vec<&Row> = report.rows().iter().filter(|row| is_sampled(row)).collect();
    let noisy = |row: &&&Row| row.spread / 2.0 > NOISY_HALF_SPREAD;
    if let Some(worst) = figures.iter().filter(noisy).max_by(|a, b| a.spread.total_cmp(&b.spread)) {
        let count = figures.iter().filter(noisy).count();
        let Row { subject, case, metric, spread, value, unit, .. } = worst;
        let value = format_number(*value);
        let what = format!(
            "{count} of {} figures scatter by more than ±{:.0} %, most of all {subject}, {case}, {metric}: {value} {unit} ±{:.0} %",
            figures.len(),
            NOISY_HALF_SPREAD * 100.0,
            spread * 50.0
        );
        warnings.push(Warning::new(what, "end other programs; take more samples: --samples 9, without --quick"));
    }
    let single = figures.iter().filter(|row| row.samples < 2).count();
    if single > 0 {
        let what = format!("{single} of {} figures come from one sample, so their scatter is unknown", figures.len());
        warnings.push(Warning::new(what, "take more samples: --samples 5"));
    }
    warnings
}

/// Returns whether a row of a table is the result of samples. Verdicts, lost rounds and published results are not.
fn is_sampled(row: &Row) -> bool {
    row.cell.is_some()
        && row.metric != TARGET_KEPT
        && !row.is_lost_rounds()
        && !row.subject.starts_with(ORIGINAL_SUBJECTS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::TableCell;

    /// A gap that names its remedy must be split; a known gap must get its remedy. The messages of the bench about
    /// missing privileges, programs and devices must all be known.
    #[test]
    fn gaps_get_their_remedies() {
        let of = |gap: &str| Warning::of_gap(gap).remedy;
        let installed =
            Warning::of_gap("tcmalloc: libtcmalloc not found; to have it: apt-get install libtcmalloc-minimal4");
        assert_eq!(installed, Warning::new("tcmalloc: libtcmalloc not found", "apt-get install libtcmalloc-minimal4"));
        assert_eq!(of("mounting is not permitted here (EPERM); it takes root"), "run the command with sudo");
        assert_eq!(of("fio is not there (Debian: apt install fio): nothing"), "apt-get install fio");
        assert!(of("interrupted; everything started was ended").contains("again"));
        assert!(of("temporary folders are in memory here: --dir names one that is on a device").contains("--dir"));
        assert!(of("survive needs a limit: no control group is writable").contains("root"));
        assert_eq!(of("something else"), "see docs/benchmarks.md");
    }

    /// Noisy figures, and figures of one sample, must be counted; published results and verdicts must not.
    #[test]
    fn noise_is_counted() {
        let mut report = Report::new("it", false);
        for (subject, spread, samples) in [("a", 0.1, 3), ("b", 0.5, 3), ("c", 0.0, 1), ("original-2013", 0.0, 1)] {
            let cell = Some(TableCell { table: "t".to_owned(), column: "c".to_owned() });
            let single = report.single_value("rate", 7.0, "1/s");
            report.add_row(Row { subject: subject.to_owned(), spread, samples, cell, ..single });
        }

        let [noise, single] = &of_report(&report)[..] else { panic!("two warnings") };

        assert!(
            noise.what.starts_with("1 of 3 figures") && noise.what.contains("b, , rate: 7.00 1/s ±25 %"),
            "{noise:?}"
        );
        assert!(single.what.starts_with("1 of 3 figures"), "{single:?}");
    }

    /// A debug build must be a warning exactly in a debug build.
    #[test]
    fn debug_build_is_a_warning() {
        let warnings = of_machine(&Machine::read());
        let is_warned = warnings.iter().any(|warning| warning.what.contains("without optimization"));
        assert_eq!(is_warned, cfg!(debug_assertions));
    }
}
