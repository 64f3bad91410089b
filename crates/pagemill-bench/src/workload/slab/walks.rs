//! Walks of a tree of names, like those of the program `find`: without moves, during moves, and before and after
//! compaction.

use std::collections::BTreeMap;
use std::time::Duration;

use fastrand::Rng;
use pagemill_slab::Slabs;

use super::dentries::{DentryTree, WalkChecksum};
use super::turns::{TurnsArguments, repeat_walk_for};
use crate::stats;
use crate::workload::{Failure, WorkloadResult, ensure};

/// Average number of entries of a directory.
const ENTRIES_PER_DIRECTORY: usize = 100;

/// Maximum number of subdirectories of a directory.
const MAX_SUBDIRECTORIES: usize = 10;

/// Number of entries in the tree before nine tenths are removed, divided by the number of entries afterwards.
const SHRINK_FACTOR: usize = 10;

crate::workload::arguments! {
    /// Arguments of a run in which a tree of directories and files is changed between walks.
    TreeArguments:
    entries: usize,
    ..turns: TurnsArguments,
}

crate::workload::arguments! {
    /// Arguments of a run in which nine tenths of a tree of directories and files are removed. The rest is walked
    /// before and after compaction.
    PackedArguments:
    entries: usize,
    turn_ms: u64,
}

/// A tree of directories and files, and a model of its contents with which walks are compared.
struct TreeWithModel {
    tree: DentryTree,
    /// Maps the number of each directory to its entries. The entries are a map from the serial number of an entry to
    /// its number, and whether it is a directory.
    model: BTreeMap<u64, BTreeMap<u64, (u64, bool)>>,
    directories: Vec<u64>,
    /// For each file: the number of its directory, its serial number, and its own number.
    files: Vec<(u64, u64, u64)>,
    serial: u64,
    random: Rng,
}

impl TreeWithModel {
    fn new(slabs: &'static Slabs, entries: usize, capacity: usize) -> Result<Self, Failure> {
        let tree = DentryTree::new(slabs, capacity + 1)?;
        let (model, random) = (BTreeMap::from([(0, BTreeMap::new())]), Rng::with_seed(1));
        let mut watched = Self { tree, model, directories: vec![0], files: Vec::new(), serial: 0, random };
        for index in 1..(entries / ENTRIES_PER_DIRECTORY).max(2) {
            let parent = watched.directories[(index - 1) / MAX_SUBDIRECTORIES];
            let number = watched.add(parent, true)?;
            watched.model.insert(number, BTreeMap::new());
            watched.directories.push(number);
        }
        watched.add_files(entries + 1 - watched.directories.len())?;
        Ok(watched)
    }

    fn add(&mut self, parent: u64, is_directory: bool) -> Result<u64, Failure> {
        self.serial += 1;
        let number = self.tree.add(parent, self.serial, is_directory)?;
        self.model.entry(parent).or_default().insert(self.serial, (number, is_directory));
        Ok(number)
    }

    fn add_files(&mut self, files: usize) -> Result<(), Failure> {
        for _ in 0..files {
            let directory = self.directories[self.random.usize(..self.directories.len())];
            let number = self.add(directory, false)?;
            self.files.push((directory, self.serial, number));
        }
        Ok(())
    }

    fn remove_files(&mut self, files: usize) -> Result<(), Failure> {
        for _ in 0..files {
            let at = self.random.usize(..self.files.len());
            let (directory, serial, number) = self.files.swap_remove(at);
            self.tree.remove(number)?;
            self.model.entry(directory).or_default().remove(&serial);
        }
        Ok(())
    }

    fn expected_checksum(&self) -> WalkChecksum {
        let mut sum = WalkChecksum::default();
        let mut left = vec![0];
        while let Some(directory) = left.pop() {
            let entries = self.model.get(&directory).into_iter().flatten();
            entries.clone().for_each(|(serial, _)| sum.add(*serial));
            // The subdirectories are pushed in reverse, so that the first one is popped next.
            left.extend(entries.filter(|(_, (_, is_directory))| *is_directory).map(|(_, (number, _))| number).rev());
        }
        sum
    }

    /// Walks the tree repeatedly for `time`, and appends the nanoseconds per entry of each walk to `walks`.
    fn walk(&self, time: Duration, walks: &mut Vec<f64>) -> Result<(), Failure> {
        let expected = self.expected_checksum();
        repeat_walk_for(time, walks, || {
            let sum = self.tree.walk()?;
            ensure(sum == expected, || format!("a walk came by {sum:?}, and not by {expected:?}"))?;
            Ok(sum.entries)
        })
    }
}

/// In each turn, adds and removes as many files as the tree has, then walks the tree. The resulting JSON has the median
/// nanoseconds per entry.
pub fn run_tree(arguments: &TreeArguments, slabs: &'static Slabs) -> WorkloadResult {
    let mut watched = TreeWithModel::new(slabs, arguments.entries, 2 * arguments.entries)?;
    let mut walks = Vec::new();
    let files = watched.files.len();
    arguments.turns.run(slabs, |time| {
        watched.add_files(files)?;
        watched.remove_files(files)?;
        watched.walk(time, &mut walks)
    })?;
    Ok(serde_json::json!({ "ns": stats::median(&walks), "walks": walks.len(), "moved": watched.tree.moved_count()? }))
}

/// Walks a tree before and after its entries are compacted. The resulting JSON has the median nanoseconds per entry of
/// both.
pub fn run_packed(arguments: &PackedArguments, slabs: &'static Slabs) -> WorkloadResult {
    let time = Duration::from_millis(arguments.turn_ms);
    let mut watched = TreeWithModel::new(slabs, arguments.entries, SHRINK_FACTOR * arguments.entries)?;
    let more = (SHRINK_FACTOR - 1) * arguments.entries;
    watched.add_files(more)?;
    watched.remove_files(more)?;
    let (mut before, mut after) = (Vec::new(), Vec::new());
    watched.walk(time, &mut before)?;
    watched.tree.compact()?;
    watched.walk(time, &mut after)?;
    let (before, after) = (stats::median(&before), stats::median(&after));
    Ok(serde_json::json!({ "fragmented_ns": before, "packed_ns": after, "moved": watched.tree.moved_count()? }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::slab::slabs_of_test;

    /// Walks of a tree must find exactly the expected entries: with and without concurrent moves, before and after
    /// compaction.
    #[test]
    fn walks_are_right_during_moves() {
        let slabs = || slabs_of_test().expect("slabs");
        for moving in [false, true] {
            let arguments = TreeArguments { entries: 3000, turns: TurnsArguments { turns: 3, turn_ms: 100, moving } };
            let line = run_tree(&arguments, slabs()).expect("a walk");
            assert_eq!(line["moved"].as_u64() > Some(0), moving, "{line}");
        }
        let line = run_packed(&PackedArguments { entries: 2000, turn_ms: 5 }, slabs()).expect("a walk");
        assert!(line["moved"].as_u64() > Some(0) && line["packed_ns"].as_f64() > Some(0.0), "{line}");
    }

    /// An entry is removed from the tree but not from the model. The next walk must report a wrong answer.
    #[test]
    fn missing_entry_is_detected() {
        let mut watched = TreeWithModel::new(slabs_of_test().expect("slabs"), 500, 600).expect("a tree");
        assert!(watched.walk(Duration::ZERO, &mut Vec::new()).is_ok());
        let (.., number) = watched.files[7];
        watched.tree.remove(number).expect("it is there");

        assert!(matches!(watched.walk(Duration::ZERO, &mut Vec::new()), Err(Failure::WrongAnswer(_))));
    }
}
