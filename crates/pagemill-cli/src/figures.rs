//! Figures of running processes. Each process measures them on request; otherwise they are shown with their age.

use crate::asking::Interrupt;
use pagemill::listing::{self, Unanswered};
use pagemill::published;
use pagemill::stats::{Counter, Snapshot};
use pagemill::units::Bytes;
use pagemill_sys::file::Path;
use std::fmt::Write as _;
use std::time::Duration;

/// Parts that add up to resident memory.
const PARTS: [Counter; 4] = [Counter::Heap, Counter::Small, Counter::CLibrary, Counter::Cache];

/// A process and its figures.
pub struct Process {
    pub published: published::Process,
    /// Sum of the figures of all Pagemill instances in the process.
    pub sum: Snapshot,
    /// Why the figures are not current.
    pub stale: Option<&'static str>,
}

/// The meaning of a process id on the command line.
pub enum Target {
    One(Box<Process>),
    /// The members of a `pagemill run`'s tree.
    Tree(Vec<Process>),
}

/// Why there are no figures.
pub enum Trouble {
    /// The process does not exist or cannot be read.
    Missing(String),
    Interrupted,
}

/// Returns the figures of a process, or of the members of a tree.
pub fn of(pid: u32, interrupt: &Interrupt) -> Result<Target, Trouble> {
    if let Some(process) = published::read(pid) {
        return Ok(Target::One(Box::new(measured(vec![process], interrupt)?.remove(0))));
    }
    match published::read_tree(pid) {
        Some(members) => Ok(Target::Tree(measured(members, interrupt)?)),
        None => Err(Trouble::Missing(published::unreadable(pid))),
    }
}

/// Returns the figures of all processes that this user may read.
pub fn of_all(interrupt: &Interrupt) -> Result<Vec<Process>, Trouble> {
    measured(published::read_all(), interrupt)
}

/// Requests measurements from all processes at once, so that one without an answer does not delay the others.
/// Processes that end meanwhile keep their last figures.
pub fn measured(published: Vec<published::Process>, interrupt: &Interrupt) -> Result<Vec<Process>, Trouble> {
    let mut processes: Vec<Process> = published.into_iter().map(Process::unasked).collect();
    let mut asked = Vec::new();
    for (at, process) in processes.iter().enumerate().filter(|(_, process)| process.stale.is_none()) {
        asked.extend((0..process.published.found.len()).map(|part| (at, part)));
    }
    let found = |(at, part): &(usize, usize)| -> (&Path, &Snapshot) {
        let (path, snapshot) = &processes[*at].published.found[*part];
        (path, snapshot)
    };
    let targets: Vec<_> = asked.iter().map(found).collect();
    let answers = listing::ask_for_figures(&targets, || interrupt.has_come());
    for ((at, part), answer) in asked.into_iter().zip(answers) {
        let process = &mut processes[at];
        match answer {
            Ok(snapshot) => process.published.found[part].1 = snapshot,
            Err(Unanswered::Stopped) => return Err(Trouble::Interrupted),
            Err(Unanswered::Late) => {
                process.stale = Some("it does not answer: it may be stopped, or see other folders")
            }
            Err(Unanswered::Ended) => process.stale = Some("it has ended"),
            Err(_) => process.stale = Some("it could not answer"),
        }
    }
    processes.iter_mut().for_each(Process::add_up);
    Ok(processes)
}

impl Process {
    fn unasked(published: published::Process) -> Self {
        let can_measure = published.found.iter().all(|(_, snapshot)| snapshot.get(Counter::Helpers) > 0);
        let stale = match (published.is_own(), can_measure) {
            (false, _) => Some("another user's process: only that user can request figures"),
            (true, false) => Some("it has no helper thread to measure them"),
            (true, true) => None,
        };
        let mut process = Self { published, sum: Snapshot::default(), stale };
        process.add_up();
        process
    }

    fn add_up(&mut self) {
        let mut parts = self.published.found.iter().map(|(_, snapshot)| snapshot);
        self.sum = parts.next().cloned().unwrap_or_default();
        parts.for_each(|part| self.sum.add(part));
    }

    pub fn pid(&self) -> u32 {
        self.published.identity.pid
    }

    /// Returns the age of the figures, if they are not current.
    pub fn age(&self) -> Option<String> {
        self.stale.map(|_| self.sum.age().map_or_else(|| "never measured".to_owned(), ago))
    }

    /// Returns the title: id, name, and the age of the figures with its reason.
    pub fn title(&self) -> String {
        let note = match (self.age(), self.stale) {
            (Some(age), Some(why)) => format!("  ({age}: {why})"),
            _ => String::new(),
        };
        format!("{} {}{note}\n", self.pid(), self.sum.name())
    }
}

fn ago(age: Duration) -> String {
    match age.as_secs() {
        0 => format!("as of {} ms ago", age.as_millis()),
        seconds @ 1..120 => format!("as of {seconds} s ago"),
        seconds @ 120..7200 => format!("as of {} min ago", seconds / 60),
        seconds => format!("as of {} h ago", seconds / 3600),
    }
}

/// Returns the sum of the parts. The counter `resident` may be slightly older than they are.
pub fn resident(snapshot: &Snapshot) -> u64 {
    PARTS.iter().fold(0u64, |sum, counter| sum.saturating_add(snapshot.get(*counter)))
}

/// A number of processes, in words.
pub fn processes(count: usize) -> String {
    if count == 1 { "1 process".to_owned() } else { format!("{count} processes") }
}

/// Returns what could be given back at once, and the part of it that is not in `resident`.
pub fn giveable(snapshot: &Snapshot) -> (u64, u64) {
    let foreign = snapshot.get(Counter::MarkedForeign);
    (snapshot.giveable_of_resident().min(resident(snapshot)).saturating_add(foreign), foreign)
}

/// Returns the bytes that the program needs.
pub fn net(snapshot: &Snapshot) -> u64 {
    resident(snapshot) - snapshot.giveable_of_resident().min(resident(snapshot))
}

/// The sum over processes.
pub fn sum_of(processes: &[Process]) -> Snapshot {
    let mut snapshots = processes.iter().map(|process| &process.sum);
    let mut sum = snapshots.next().cloned().unwrap_or_default();
    snapshots.for_each(|snapshot| sum.add(snapshot));
    sum
}

/// A column of a table of processes.
pub type Column = (&'static str, fn(&Snapshot) -> u64);

/// Returns one line for each process, and the sum.
pub fn table(processes: &[Process], columns: &[Column]) -> String {
    let sum = sum_of(processes);
    let all = format!("all {}", processes.len());
    let width = processes.iter().map(|process| process.sum.name().len()).max().unwrap_or(0).max(all.len());
    let mut text = format!("{:>8} {:<width$}", "PID", "NAME");
    columns.iter().for_each(|(name, _)| _ = write!(text, " {name:>10}"));
    text.push('\n');
    let mut line = |pid: String, name: &str, snapshot: &Snapshot, rest: &str| {
        let _ = write!(text, "{pid:>8} {name:<width$}");
        columns.iter().for_each(|(_, of)| _ = write!(text, " {:>10}", Bytes(of(snapshot)).to_string()));
        let _ = writeln!(text, "{rest}");
    };
    for process in processes {
        let rest = process.age().map_or_else(String::new, |age| format!("  {age}"));
        line(process.pid().to_string(), &process.sum.name(), &process.sum, &rest);
    }
    line(String::new(), &all, &sum, "");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_told_in_words() {
        let told = [0, 12, 119, 120, 7199, 7200].map(|seconds| ago(Duration::from_secs(seconds)));
        let words = ["0 ms", "12 s", "119 s", "2 min", "119 min", "2 h"].map(|age| format!("as of {age} ago"));
        assert_eq!(told, words);
    }
}
