//! Metrics of processes and of process trees, with a bounded number of samples.

use crate::requests::Interrupt;
use crate::statistics::{self, Process};
use pagemill_core::metrics::{self, Exposition, FamilyKind, Labels, Value};
use pagemill_core::published;
use pagemill_core::reclaim::tree::{TreeAmounts, UNLIMITED};
use pagemill_core::stats::{Counter, CounterKind, Snapshot, TABLE};
use pagemill_sys::process::Identity;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Maximum number of process trees with samples of their own.
const MAX_TREES: usize = 20;

/// Value of the labels of the sum over all processes without samples of their own.
const OTHER: &str = "other";

/// Minimum time between two requests that make processes measure their memory. Between them, the values that only a
/// measurement updates are older.
const MEASURE_INTERVAL: Duration = Duration::from_secs(30);

/// Time for which a process that did not answer a request gets no further one.
const RETRY_DELAY: Duration = Duration::from_secs(300);

/// A process id with a start time.
type Key = (u32, u64);

fn key_of(identity: Identity) -> Key {
    (identity.pid, identity.start_ticks)
}

/// Chooses the processes with samples of their own. A process keeps its samples until it ends. A process without
/// samples of its own counts in the sum of the others, until it ends. So no counter decreases.
pub struct Selection {
    max_named: usize,
    named: BTreeSet<Key>,
    others: BTreeMap<Key, Snapshot>,
    /// Counters of processes that have ended and that counted in the sum of the others.
    ended: Snapshot,
    has_others: bool,
}

impl Selection {
    pub fn new(max_named: usize) -> Self {
        let (named, others) = (BTreeSet::new(), BTreeMap::new());
        Self { max_named, named, others, ended: Snapshot::default(), has_others: false }
    }

    /// Returns the labels and the values of the samples. The largest of the new processes get samples of their own.
    pub fn rows(&mut self, mut running: Vec<(Key, Snapshot)>) -> Vec<(Labels, Snapshot)> {
        let keys: BTreeSet<Key> = running.iter().map(|(key, _)| *key).collect();
        self.named.retain(|key| keys.contains(key));
        let ended: Vec<Key> = self.others.keys().filter(|key| !keys.contains(key)).copied().collect();
        for snapshot in ended.iter().filter_map(|key| self.others.remove(key)) {
            self.ended.absorb_ended(&snapshot);
        }
        running.sort_by_key(|(key, snapshot)| (Reverse(snapshot.get(Counter::Resident)), *key));
        let mut rows = BTreeMap::new();
        for (key, snapshot) in running {
            let is_new = !self.others.contains_key(&key);
            if self.named.contains(&key) || (is_new && self.named.len() < self.max_named) {
                self.named.insert(key);
                rows.insert(key, snapshot);
            } else {
                // A program that `exec` started in the process begins its counters at zero.
                let before = self.others.get(&key).filter(|before| begins_again(before, &snapshot));
                before.into_iter().for_each(|before| self.ended.absorb_ended(before));
                self.others.insert(key, snapshot);
                self.has_others = true;
            }
        }
        let named = |(key, snapshot): (Key, Snapshot)| (labels(&key.0.to_string(), &snapshot.name()), snapshot);
        let mut rows: Vec<_> = rows.into_iter().map(named).collect();
        if self.has_others {
            let mut others = self.others.values();
            let mut sum = others.next().cloned().unwrap_or_default();
            others.for_each(|other| sum.add(other));
            sum.absorb_ended(&self.ended);
            rows.push((labels(OTHER, OTHER), sum));
        }
        rows
    }
}

/// Returns whether the counters of a process have begun at zero since an earlier look.
fn begins_again(before: &Snapshot, now: &Snapshot) -> bool {
    let mut sums = TABLE.iter().filter(|row| row.kind == CounterKind::Sum);
    sums.any(|row| now.get(row.counter) < before.get(row.counter))
}

fn labels(pid: &str, name: &str) -> Labels {
    Labels::new(&[("pid", pid), ("comm", name)])
}

/// Reads the figures of processes, and makes the processes measure them from time to time.
#[derive(Default)]
pub struct FiguresReader {
    measured: Option<Instant>,
    /// The processes that did not measure, and when they were asked.
    silent: BTreeMap<Key, Instant>,
}

impl FiguresReader {
    /// Returns the figures of each process: the sum over its Pagemill instances.
    pub fn figures(&mut self, processes: Vec<published::Process>) -> Vec<(Key, Snapshot)> {
        let read: Vec<Process> = if self.measured.is_none_or(|measured| measured.elapsed() >= MEASURE_INTERVAL) {
            self.measured = Some(Instant::now());
            // Files of killed processes would make each reading of the folders slower.
            published::sweep();
            self.measure(processes)
        } else {
            processes.into_iter().map(Process::published_only).collect()
        };
        read.into_iter().map(|process| (key_of(process.published.identity), process.sum)).collect()
    }

    /// Requests measurements, except from processes that did not measure at a request a short time ago.
    fn measure(&mut self, processes: Vec<published::Process>) -> Vec<Process> {
        self.silent.retain(|_, asked| asked.elapsed() < RETRY_DELAY);
        let is_silent = |process: &published::Process| self.silent.contains_key(&key_of(process.identity));
        let (silent, asked): (Vec<_>, Vec<_>) = processes.into_iter().partition(is_silent);
        let Ok(mut read) = statistics::request_statistics(asked, &Interrupt::by_hand()) else {
            unreachable!("nothing interrupts these requests")
        };
        for process in read.iter().filter(|process| process.stale.is_some()) {
            self.silent.insert(key_of(process.published.identity), Instant::now());
        }
        read.extend(silent.into_iter().map(Process::published_only));
        read
    }
}

/// Writes the families of processes.
pub fn write_processes(metrics: &mut Exposition, selection: &mut Selection, running: Vec<(Key, Snapshot)>) {
    metrics.family("pagemill_processes", FamilyKind::Gauge, "", "Running processes on Pagemill.");
    metrics.sample(&Labels::default(), Value::Integer(running.len() as u64));
    metrics::write_process_families(metrics, &selection.rows(running));
}

/// A family of process trees: its name, kind, unit and help, and the function that returns its value.
type TreeFamily = (&'static str, FamilyKind, &'static str, &'static str, fn(&TreeAmounts) -> Option<u64>);

const TREE_FAMILIES: [TreeFamily; 8] = {
    use FamilyKind::{Counter, Gauge};
    [
        ("pagemill_tree_limit_bytes", Gauge, "bytes", "Limit of a process tree (`pagemill run --limit`).", |tree| {
            (tree.limit != UNLIMITED).then_some(tree.limit)
        }),
        ("pagemill_tree_resident_bytes", Gauge, "bytes", "Memory charged to the processes of a tree.", |tree| {
            Some(tree.totals.resident)
        }),
        ("pagemill_tree_giveable_bytes", Gauge, "bytes", "Memory that a tree could give back at once.", |tree| {
            Some(tree.totals.giveable)
        }),
        ("pagemill_tree_resident_peak_bytes", Gauge, "bytes", "Largest resident memory of a tree so far.", |tree| {
            Some(tree.peak)
        }),
        (
            "pagemill_tree_net_peak_bytes",
            Gauge,
            "bytes",
            "Largest resident memory of a tree so far, without what could have been given back at once.",
            |tree| Some(tree.net_peak),
        ),
        ("pagemill_tree_processes", Gauge, "", "Processes of a tree that have memory of Pagemill.", |tree| {
            Some(tree.totals.members as u64)
        }),
        ("pagemill_tree_started", Counter, "", "Programs and fork children that were started in a tree.", |tree| {
            Some(u64::from(tree.started))
        }),
        (
            "pagemill_tree_unlisted",
            Counter,
            "",
            "Processes of a tree that are not in its sums, because it has more than 1024.",
            |tree| Some(tree.unlisted),
        ),
    ]
};

/// Writes the families of the largest process trees. The label `run` is the process id of `pagemill run`.
pub fn write_trees(metrics: &mut Exposition, mut trees: Vec<(Identity, TreeAmounts)>) {
    metrics.family("pagemill_trees", FamilyKind::Gauge, "", "Process trees of `pagemill run`.");
    metrics.sample(&Labels::default(), Value::Integer(trees.len() as u64));
    trees.sort_by_key(|(run, tree)| (Reverse(tree.totals.resident), run.pid));
    trees.truncate(MAX_TREES);
    trees.sort_by_key(|(run, _)| run.pid);
    let labels: Vec<Labels> = trees.iter().map(|(run, _)| Labels::new(&[("run", &run.pid.to_string())])).collect();
    for (name, kind, unit, help, value) in TREE_FAMILIES.iter().filter(|_| !trees.is_empty()) {
        metrics.family(name, *kind, unit, help);
        for (labels, (_, tree)) in labels.iter().zip(&trees) {
            if let Some(value) = value(tree) {
                metrics.sample(labels, Value::Integer(value));
            }
        }
    }
}

/// Returns the tree of this `pagemill run`; empty if it is not published.
pub fn own_tree() -> Vec<(Identity, TreeAmounts)> {
    let mut folders = published::all_trees();
    folders.retain(|folder| folder.run.pid == std::process::id());
    published::read_trees(&folders)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: u32, resident: u64) -> (Key, Snapshot) {
        let mut snapshot = Snapshot::default();
        snapshot.set(Counter::Resident, resident);
        snapshot.set(Counter::PurgeFreed, 10 * resident);
        snapshot.set(Counter::MeasuredAt, 5);
        ((pid, 1), snapshot)
    }

    fn shown(selection: &mut Selection, running: Vec<(Key, Snapshot)>) -> Vec<(Labels, u64, u64)> {
        let rows = selection.rows(running).into_iter();
        rows.map(|(labels, row)| (labels, row.get(Counter::Resident), row.get(Counter::PurgeFreed))).collect()
    }

    /// Two processes have samples of their own. A process must never change between its own samples and the sum, and
    /// the counters of the sum must not decrease when a process ends. A new process gets the samples of an ended one.
    #[test]
    fn counters_of_the_sum_never_decrease() {
        let (mut selection, named) = (Selection::new(2), |pid: u32| labels(&pid.to_string(), ""));
        let other = labels(OTHER, OTHER);
        assert_eq!(shown(&mut selection, vec![process(1, 5)]), [(named(1), 5, 50)]);
        let second = vec![process(1, 5), process(2, 6), process(3, 7), process(4, 4)];
        let expected = [(named(1), 5, 50), (named(3), 7, 70), (other.clone(), 10, 100)];
        assert_eq!(shown(&mut selection, second), expected);
        // Process 4 grows beyond process 1, process 2 ends.
        let third = vec![process(1, 5), process(3, 7), process(4, 9)];
        assert_eq!(shown(&mut selection, third)[2], (other.clone(), 9, 60 + 90));
        // Process 1 ends, and process 5 starts.
        let fourth = vec![process(3, 7), process(4, 9), process(5, 1)];
        let expected = [(named(3), 7, 70), (named(5), 1, 10), (other.clone(), 9, 150)];
        assert_eq!(shown(&mut selection, fourth), expected);
        // Process 4 calls `exec`.
        assert_eq!(shown(&mut selection, vec![process(4, 2)]), [(other.clone(), 2, 150 + 20)]);
        assert_eq!(shown(&mut selection, Vec::new()), [(other, 0, 170)]);
    }

    /// A tree without a limit has no sample of the limit. If there are more trees than are shown, the largest are shown.
    #[test]
    fn the_largest_trees_are_shown() {
        let mut metrics = Exposition::new(metrics::Format::Prometheus);
        let tree = |pid: u32| {
            let limit = if pid == 30 { 1 << 20 } else { UNLIMITED };
            let mut tree = TreeAmounts { limit, ..TreeAmounts::default() };
            tree.totals.resident = u64::from(pid);
            (Identity { pid, start_ticks: 1 }, tree)
        };
        write_trees(&mut metrics, (1..=30).map(tree).collect());
        let text = metrics.finish();
        assert!(text.contains("pagemill_trees 30\n"));
        assert!(text.contains("pagemill_tree_limit_bytes{run=\"30\"} 1048576\n") && !text.contains(" 18446744073709"));
        assert_eq!(text.matches("\npagemill_tree_resident_bytes{").count(), MAX_TREES);
        assert!(text.contains("{run=\"11\"} 11\n") && !text.contains("{run=\"10\"}"));
    }
}
