//! A tree of small files that is searched, walked, changed and emptied: in a RAM file system of this process, or in a
//! folder by system calls.

mod in_folder;
mod in_process;

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use crate::stats;
use crate::workload::{Failure, WorkloadResult, ensure};

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Work {
    /// Searches for a name that does not exist.
    Search,
    /// Look-ups of paths of different lengths, and of missing names.
    Lookups,
    /// Files created and removed.
    Churn,
    /// Memory after nine tenths of the files were removed at random.
    Removed,
    /// Memory of a new file system with the files that [`Work::Removed`] leaves.
    Fresh,
}

crate::workload::arguments! {
    FindArguments:
    work: Work,
    files: usize,
    directories: usize,
    /// Milliseconds of each kind of operation.
    run_ms: u64,
    threads: usize,
    /// Inodes and names keep their address.
    immovable: bool,
    /// Use this folder by system calls, instead of a RAM file system of this process.
    folder: Option<PathBuf>,
    /// Shell command that mounts the file system of the folder anew, to empty its caches.
    mount_anew: Option<String>,
    /// Remount the file system of the folder to empty its caches.
    remount: bool,
}

/// The operations that both kinds of file systems have. Paths begin at the root of the tree.
trait Tree: Sync {
    fn create_directory(&self, path: &str) -> Result<(), Failure>;
    fn create(&self, path: &str) -> Result<(), Failure>;
    fn remove(&self, path: &str) -> Result<(), Failure>;
    /// Returns whether the path leads to a file.
    fn exists(&self, path: &str) -> Result<bool, Failure>;
    /// Looks for a name in the whole tree. Returns the number of entries that were seen, if it is known, and the number
    /// of those that have the name.
    fn search(&self, name: &str) -> Result<(Option<usize>, usize), Failure>;
    /// Empties the caches that were filled while the tree was built, where that is possible.
    fn forget_after_building(&self) -> Result<(), Failure>;
    /// Empties the caches between two searches, where that is possible.
    fn drop_caches(&self) -> Result<(), Failure>;
}

const MISSING: &str = "a-name-that-no-file-has";
/// Number of components of the two paths whose look-ups are compared: the difference is the time of the others.
const DEPTHS: (usize, usize) = (2, 18);
/// Number of different paths of look-ups.
const PATHS: usize = 64;
/// Number of searches of which the median is taken.
const WARM_SEARCHES: usize = 7;

fn directory_path(directory: usize) -> String {
    format!("/d{directory:04}")
}

fn file_path(file: usize, directories: usize) -> String {
    format!("/d{:04}/file-{file:07}", file % directories)
}

pub fn run(arguments: &FindArguments) -> WorkloadResult {
    match (arguments.work, &arguments.folder) {
        (Work::Removed | Work::Fresh, _) => in_process::measure_memory(arguments),
        (_, Some(folder)) => measure(arguments, &in_folder::Folder::new(folder, arguments)?),
        (_, None) => measure(arguments, &in_process::InProcess::new(arguments)?),
    }
}

fn measure(arguments: &FindArguments, tree: &impl Tree) -> WorkloadResult {
    match arguments.work {
        Work::Search => search(arguments, tree),
        Work::Lookups => look_up(arguments, tree),
        _ => churn(arguments, tree),
    }
}

fn create_directories(tree: &impl Tree, directories: usize) -> Result<(), Failure> {
    (0..directories).try_for_each(|directory| tree.create_directory(&directory_path(directory)))
}

fn build(arguments: &FindArguments, tree: &impl Tree) -> Result<(), Failure> {
    create_directories(tree, arguments.directories)?;
    (0..arguments.files).try_for_each(|file| tree.create(&file_path(file, arguments.directories)))
}

/// Looks for [`MISSING`] once. Returns the milliseconds.
fn search_ms(tree: &impl Tree, entries: usize) -> Result<f64, Failure> {
    let begun = Instant::now();
    let (seen, found) = tree.search(MISSING)?;
    let took_ms = begun.elapsed().as_secs_f64() * 1e3;
    let is_right = found == 0 && seen.is_none_or(|seen| seen == entries);
    ensure(is_right, || format!("a search saw {seen:?} of {entries} entries and found {found}"))?;
    Ok(took_ms)
}

/// Looks for [`MISSING`] repeatedly. Returns the median of the milliseconds.
fn median_search_ms(tree: &impl Tree, entries: usize) -> Result<f64, Failure> {
    let times = (0..WARM_SEARCHES).map(|_| search_ms(tree, entries)).collect::<Result<Vec<f64>, Failure>>()?;
    stats::median(&times).ok_or_else(|| "no search".into())
}

/// Times a search after the tree was built, one after its caches were emptied, and warm ones.
fn search(arguments: &FindArguments, tree: &impl Tree) -> WorkloadResult {
    build(arguments, tree)?;
    tree.forget_after_building()?;
    let entries = arguments.files + arguments.directories;
    let cold_ms = search_ms(tree, entries)?;
    tree.drop_caches()?;
    let dropped_ms = search_ms(tree, entries)?;
    let warm_ms = median_search_ms(tree, entries)?;
    let (_, found) = tree.search(&format!("file-{:07}", arguments.files - 1))?;
    ensure(found == 1, || format!("a search found an existing name {found} times"))?;
    Ok(serde_json::json!({ "cold_ms": cold_ms, "dropped_ms": dropped_ms, "warm_ms": warm_ms }))
}

/// Repeats `act` for about `run_ms`, with the numbers from 0. Returns the nanoseconds of one call, in the fastest of
/// several slices of the time.
fn time_ns(run_ms: u64, mut act: impl FnMut(usize) -> Result<(), Failure>) -> Result<f64, Failure> {
    const SLICES: u32 = 10;
    let slice = Duration::from_millis(run_ms) / SLICES;
    let (mut best_ns, mut number) = (f64::MAX, 0);
    for _ in 0..SLICES {
        let (begun, first) = (Instant::now(), number);
        while begun.elapsed() < slice || number == first {
            for _ in 0..PATHS {
                act(number)?;
                number += 1;
            }
        }
        best_ns = best_ns.min(begun.elapsed().as_nanos() as f64 / (number - first) as f64);
    }
    Ok(best_ns)
}

/// Times look-ups of a short path, of a missing name, and of paths of two depths.
fn look_up(arguments: &FindArguments, tree: &impl Tree) -> WorkloadResult {
    build(arguments, tree)?;
    let mut deep = String::new();
    let mut shallow = String::new();
    for depth in 1..=DEPTHS.1 {
        deep.push_str(&format!("/part{depth:02}"));
        tree.create_directory(&deep)?;
        if depth == DEPTHS.0 {
            shallow.clone_from(&deep);
        }
    }
    let expect = |path: &str, expected: bool| {
        let exists = tree.exists(path)?;
        ensure(exists == expected, || format!("{path} exists: {exists}"))
    };
    let directories = arguments.directories;
    let short: Vec<String> = (0..PATHS).map(|file| file_path(file * 97 % arguments.files, directories)).collect();
    let missing: Vec<String> =
        (0..PATHS).map(|number| format!("{}/no-such-{number:04}", directory_path(number * 97 % directories))).collect();
    let short_ns = time_ns(arguments.run_ms, |number| expect(&short[number % PATHS], true))?;
    let negative_ns = time_ns(arguments.run_ms, |number| expect(&missing[number % PATHS], false))?;
    let shallow_ns = time_ns(arguments.run_ms, |_| expect(&shallow, true))?;
    let deep_ns = time_ns(arguments.run_ms, |_| expect(&deep, true))?;
    let component_ns = (deep_ns - shallow_ns) / (DEPTHS.1 - DEPTHS.0) as f64;
    Ok(serde_json::json!({ "short_ns": short_ns, "negative_ns": negative_ns, "component_ns": component_ns }))
}

/// Creates and removes files in threads, each in a directory of its own. The result is the pairs per second.
fn churn(arguments: &FindArguments, tree: &impl Tree) -> WorkloadResult {
    create_directories(tree, arguments.threads)?;
    let time = Duration::from_millis(arguments.run_ms);
    let begun = Instant::now();
    let run = |thread: usize| {
        let directory = directory_path(thread);
        let paths: Vec<String> = (0..arguments.files).map(|file| format!("{directory}/{file:04}")).collect();
        let mut pairs = 0;
        while begun.elapsed() < time {
            paths.iter().try_for_each(|path| tree.create(path))?;
            paths.iter().try_for_each(|path| tree.remove(path))?;
            pairs += paths.len();
        }
        Ok(pairs)
    };
    let counts: Vec<Result<usize, Failure>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..arguments.threads).map(|thread| scope.spawn(move || run(thread))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or(Err("a thread panicked".into()))).collect()
    });
    let pairs = counts.into_iter().sum::<Result<usize, Failure>>()?;
    let seconds = begun.elapsed().as_secs_f64();
    let last = format!("{}/{:04}", directory_path(0), arguments.files - 1);
    ensure(!tree.exists(&last)?, || format!("{last} was removed and exists"))?;
    Ok(serde_json::json!({ "pairs_per_second": pairs as f64 / seconds }))
}
