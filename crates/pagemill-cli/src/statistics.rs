//! The published statistics (counters) of running processes. Each process measures itself on request. For a process
//! that does not answer, the commands show the last published values with their age.

use crate::columns::Heading;
use crate::requests::Interrupt;
use pagemill_core::listing;
use pagemill_core::listing::Unanswered;
use pagemill_core::published;
use pagemill_core::stats::{Counter, Snapshot, Unit};
use pagemill_core::units::Bytes;
use pagemill_sys::file::Path;
use std::time::Duration;

/// The counters whose values add up to the resident memory of a process.
const RESIDENT_PARTS: [Counter; 4] = [Counter::Heap, Counter::Small, Counter::CLibrary, Counter::Cache];

/// The counters of returned memory, each with the reason in a word. Each is a sum of bytes since the start.
pub const RETURN_CAUSES: [(Counter, &str); 9] = [
    (Counter::GivenForAge, "age"),
    (Counter::GivenForNew, "new"),
    (Counter::GivenForProgram, "program"),
    (Counter::GivenForSibling, "sibling"),
    (Counter::GivenForLimit, "limit"),
    (Counter::GivenForGroup, "group"),
    (Counter::GivenForMachine, "machine"),
    (Counter::GivenForStall, "stall"),
    (Counter::Taken, "kernel"),
];

/// The counters of purged volatile bytes, each with the reason in a word, as in [`RETURN_CAUSES`]. Their sum is the
/// counter [`Counter::RangeBytesPurged`].
pub const PURGE_CAUSES: [(Counter, &str); 6] = [
    (Counter::PurgedForProgram, "program"),
    (Counter::PurgedForSibling, "sibling"),
    (Counter::PurgedForLimit, "limit"),
    (Counter::PurgedForGroup, "group"),
    (Counter::PurgedForMachine, "machine"),
    (Counter::PurgedForStall, "stall"),
];

/// A running process and its statistics.
#[derive(Clone)]
pub struct Process {
    pub published: published::Process,
    /// Sum of the statistics of all Pagemill instances in the process: that of the preload library and that of the
    /// crate.
    pub sum: Snapshot,
    /// Why the statistics are not current; `None` if they are current.
    pub stale: Option<&'static str>,
}

/// What a process id on the command line refers to.
pub enum Target {
    One(Box<Process>),
    /// A `pagemill run`: the members of its process tree.
    Tree(Vec<Process>),
}

/// Why no statistics of a process can be shown.
pub enum StatisticsError {
    /// The process does not exist or cannot be read.
    Missing(String),
    Interrupted,
}

/// Returns the statistics of a process, or of the members of a process tree.
pub fn read_target(pid: u32, interrupt: &Interrupt) -> Result<Target, StatisticsError> {
    if let Some(process) = published::read(pid) {
        return Ok(Target::One(Box::new(request_statistics(vec![process], interrupt)?.remove(0))));
    }
    match published::read_tree(pid) {
        Some(members) => Ok(Target::Tree(request_statistics(members, interrupt)?)),
        None => Err(StatisticsError::Missing(published::unreadable(pid))),
    }
}

/// Returns the statistics of all processes that this user may read.
pub fn read_all(interrupt: &Interrupt) -> Result<Vec<Process>, StatisticsError> {
    request_statistics(published::read_all(), interrupt)
}

/// Requests a measurement from every process before it waits for the first answer, so a process that does not answer
/// does not delay the others. For a process that ends during the wait, returns its last published values.
pub fn request_statistics(
    published: Vec<published::Process>,
    interrupt: &Interrupt,
) -> Result<Vec<Process>, StatisticsError> {
    let mut processes: Vec<Process> = published.into_iter().map(Process::published_only).collect();
    let mut asked = Vec::new();
    for (at, process) in processes.iter().enumerate().filter(|(_, process)| process.stale.is_none()) {
        asked.extend((0..process.published.found.len()).map(|part| (at, part)));
    }
    let found = |(at, part): &(usize, usize)| -> (&Path, &Snapshot) {
        let (path, snapshot) = &processes[*at].published.found[*part];
        (path, snapshot)
    };
    let targets: Vec<_> = asked.iter().map(found).collect();
    let answers = listing::ask_for_figures(&targets, || interrupt.has_signal());
    for ((at, part), answer) in asked.into_iter().zip(answers) {
        let process = &mut processes[at];
        match answer {
            Ok(snapshot) => process.published.found[part].1 = snapshot,
            Err(Unanswered::Stopped) => return Err(StatisticsError::Interrupted),
            Err(Unanswered::Late) => {
                process.stale = Some("it does not answer: it may be stopped, or in another mount namespace")
            }
            Err(Unanswered::Ended) => process.stale = Some("it has ended"),
            Err(_) => process.stale = Some("it could not answer"),
        }
    }
    processes.iter_mut().for_each(Process::sum_instances);
    Ok(processes)
}

impl Process {
    /// Returns a process with the statistics that it published. Sends no request, so they may be old.
    pub fn published_only(published: published::Process) -> Self {
        let can_measure = published.found.iter().all(|(_, snapshot)| snapshot.get(Counter::Helpers) > 0);
        let stale = match (published.is_own(), can_measure) {
            (false, _) => Some("another user's process: only that user can request figures"),
            (true, false) => Some("it has no helper thread to measure them"),
            (true, true) => None,
        };
        let mut process = Self { published, sum: Snapshot::default(), stale };
        process.sum_instances();
        process
    }

    fn sum_instances(&mut self) {
        let mut parts = self.published.found.iter().map(|(_, snapshot)| snapshot);
        self.sum = parts.next().cloned().unwrap_or_default();
        parts.for_each(|part| self.sum.add(part));
    }

    pub fn pid(&self) -> u32 {
        self.published.identity.pid
    }

    /// Returns how old the statistics are, such as "as of 3 s ago"; `None` if they are current.
    pub fn age(&self) -> Option<String> {
        self.stale.map(|_| self.sum.age().map_or_else(|| "never measured".to_owned(), age_text))
    }

    /// Returns the title line with process id and name. If the statistics are not current, the line also has their age
    /// and the reason.
    pub fn title(&self) -> String {
        let note = match (self.age(), self.stale) {
            (Some(age), Some(why)) => format!("  ({age}: {why})"),
            _ => String::new(),
        };
        format!("{} {}{note}\n", self.pid(), self.sum.name())
    }
}

pub fn age_text(age: Duration) -> String {
    match age.as_secs() {
        0 => format!("as of {} ms ago", age.as_millis()),
        seconds @ 1..120 => format!("as of {seconds} s ago"),
        seconds @ 120..7200 => format!("as of {} min ago", seconds / 60),
        seconds => format!("as of {} h ago", seconds / 3600),
    }
}

/// Returns the resident memory as the sum of its parts. The counter `resident` may be slightly older than the counters
/// of the parts.
pub fn resident_bytes(snapshot: &Snapshot) -> u64 {
    RESIDENT_PARTS.iter().fold(0u64, |sum, counter| sum.saturating_add(snapshot.get(*counter)))
}

pub fn process_count_text(count: usize) -> String {
    if count == 1 { "1 process".to_owned() } else { format!("{count} processes") }
}

/// Returns two numbers of bytes: those that could be returned to the system at once, and how many of them are not part
/// of `resident`.
pub fn giveable_bytes(snapshot: &Snapshot) -> (u64, u64) {
    let foreign = snapshot.get(Counter::MarkedForeign);
    (snapshot.giveable_of_resident().min(resident_bytes(snapshot)).saturating_add(foreign), foreign)
}

/// Returns the resident bytes that the process could not return to the system at once.
pub fn needed_bytes(snapshot: &Snapshot) -> u64 {
    resident_bytes(snapshot) - snapshot.giveable_of_resident().min(resident_bytes(snapshot))
}

pub fn sum_of(processes: &[Process]) -> Snapshot {
    let mut snapshots = processes.iter().map(|process| &process.sum);
    let mut sum = snapshots.next().cloned().unwrap_or_default();
    snapshots.for_each(|snapshot| sum.add(snapshot));
    sum
}

/// Returns the value of a counter with its unit.
pub fn amount_text(unit: Unit, value: u64) -> String {
    match unit {
        Unit::Bytes => Bytes(value).to_string(),
        Unit::Count => value.to_string(),
        Unit::Microseconds => format!("{value} us"),
        Unit::Nanoseconds => format!("{} us", value / 1000),
    }
}

/// A column of a table of processes: its title, and the function that returns its value for a process.
pub type ProcessColumn = (&'static str, fn(&Snapshot) -> u64);

/// Returns a table with one line for each process, and a line with the sum.
pub fn process_table(processes: &[Process], columns: &[ProcessColumn]) -> String {
    let sum = sum_of(processes);
    let mut headings = vec![Heading::right_aligned("PID", 8, 0), Heading::left_aligned("NAME", 0, 1)];
    headings.extend(columns.iter().map(|(name, _)| Heading::right_aligned(name, 10, 1)));
    headings.push(Heading::left_aligned("", 0, 2));
    let row = |pid: String, name: String, snapshot: &Snapshot, age: String| {
        let numbers = columns.iter().map(|(_, of)| Bytes(of(snapshot)).to_string());
        [pid, name].into_iter().chain(numbers).chain([age]).collect()
    };
    let mut rows: Vec<Vec<String>> = processes
        .iter()
        .map(|process| {
            let age = process.age().unwrap_or_default();
            row(process.pid().to_string(), process.sum.name().to_string(), &process.sum, age)
        })
        .collect();
    rows.push(row(String::new(), format!("all {}", processes.len()), &sum, String::new()));
    crate::columns::aligned_table(&headings, rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_age_is_shown_in_words() {
        let texts = [0, 12, 119, 120, 7199, 7200].map(|seconds| age_text(Duration::from_secs(seconds)));
        let words = ["0 ms", "12 s", "119 s", "2 min", "119 min", "2 h"].map(|age| format!("as of {age} ago"));
        assert_eq!(texts, words);
    }
}
