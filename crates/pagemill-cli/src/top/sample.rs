//! Reads what processes on Pagemill have published, and what the kernel counts for them. Sends no request, so a sample
//! costs the sampled processes nothing.

use super::machine::MachineSample;
use crate::proc_status::children_of;
use crate::statistics;
use pagemill_core::published::{Reader, TREE_FILE, TreeFolder};
use pagemill_core::reclaim::tree::TreeHeader;
use pagemill_sys::file::Path;
use pagemill_sys::process::{self, Identity, Usage};
use std::collections::{HashMap, HashSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant, SystemTime};

/// Interval of searches that read much of `/proc`: processes of other users, and new programs of a tree.
const SEARCH_INTERVAL: Duration = Duration::from_secs(10);

/// A process on Pagemill, or a small program of a `pagemill run`, which the C library serves.
pub struct ProcessSample {
    pub usage: Usage,
    pub user: u32,
    /// The `pagemill run` to whose tree the process belongs.
    pub run: Option<Identity>,
    /// `None` if the process has published nothing, because it is small.
    pub pagemill: Option<statistics::Process>,
}

/// A `pagemill run`.
pub struct RunSample {
    pub identity: Identity,
    pub user: u32,
    /// The program with its arguments.
    pub command: String,
    /// Whether the `run` itself still exists. Its tree can have processes without it.
    pub is_alive: bool,
    pub header: TreeHeader,
}

/// Processes that run on Pagemill, and whose figures cannot be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unreadable {
    /// Processes of other users that have a helper thread. Only root can read their figures.
    pub other_users: usize,
    /// Processes with figures of another version of Pagemill.
    pub other_versions: usize,
}

pub struct Sample {
    pub time: SystemTime,
    pub at: Instant,
    pub processes: Vec<ProcessSample>,
    pub runs: Vec<RunSample>,
    pub machine: MachineSample,
    pub unreadable: Unreadable,
}

/// What is known about a `pagemill run` from earlier samples.
struct KnownRun {
    command: String,
    is_alive: bool,
    /// Descendants of the `run` that had published nothing at the last search.
    small: Vec<Identity>,
    /// Number of programs that had been started in the tree at the last search.
    started: u32,
    searched: Instant,
}

/// Takes samples. Keeps what does not change between two samples, because `/proc` is slow to read.
#[derive(Default)]
pub struct Sampler {
    reader: Reader,
    runs: HashMap<Identity, KnownRun>,
    other_users: Option<(Instant, usize)>,
}

impl Sampler {
    /// Samples all processes. Takes some 20 us for each process.
    pub fn sample(&mut self) -> Sample {
        let at = Instant::now();
        let mut unreadable = Unreadable { other_users: self.other_users(at), other_versions: 0 };
        let mut processes: Vec<ProcessSample> = Vec::new();
        for reading in self.reader.read() {
            let (usage, user, run) = (reading.usage, reading.user, reading.run);
            match reading.process.map(statistics::Process::published_only) {
                // The process may have ended and removed its file meanwhile.
                None => unreadable.other_versions += usize::from(process::is_alive(usage.identity)),
                pagemill => processes.push(ProcessSample { usage, user, run, pagemill }),
            }
        }
        let trees = self.reader.trees().to_vec();
        let runs = self.sample_runs(&trees, &mut processes, at);
        Sample { time: SystemTime::now(), at, processes, runs, machine: MachineSample::read(), unreadable }
    }

    /// Reads the page of each tree. Adds the small programs of the trees to `processes`.
    fn sample_runs(&mut self, trees: &[TreeFolder], processes: &mut Vec<ProcessSample>, at: Instant) -> Vec<RunSample> {
        let published: HashSet<u32> = processes.iter().map(|process| process.usage.identity.pid).collect();
        let run_pids: HashSet<u32> = trees.iter().map(|tree| tree.run.pid).collect();
        self.runs.retain(|run, _| trees.iter().any(|tree| tree.run == *run));
        let with_members: HashSet<Identity> = processes.iter().filter_map(|process| process.run).collect();
        let is_other = |pid: u32| published.contains(&pid) || run_pids.contains(&pid);
        let mut runs = Vec::new();
        for tree in trees {
            let owner = (tree.user != process::user_id()).then_some(tree.user);
            let Some(path) = Path::format(format_args!("{}/{TREE_FILE}", tree.path)) else { continue };
            let Ok(header) = TreeHeader::read(path.as_c_str(), owner) else { continue };
            let has_members = with_members.contains(&tree.run);
            let (known, small) = self.search(tree.run, header, at, has_members, is_other);
            let (user, run) = (tree.user, Some(tree.run));
            if known.is_alive || has_members {
                let (command, is_alive) = (known.command.clone(), known.is_alive);
                runs.push(RunSample { identity: tree.run, user, command, is_alive, header });
                processes.extend(small.into_iter().map(|usage| ProcessSample { usage, user, run, pagemill: None }));
            }
        }
        runs
    }

    /// Returns what is known about a `run`, and the usage of its small programs. Searches for it and for new programs if
    /// the tree's count of started programs has changed, if a small program has ended, if no process of the tree is
    /// known, or after [`SEARCH_INTERVAL`].
    fn search(
        &mut self,
        run: Identity,
        header: TreeHeader,
        at: Instant,
        has_members: bool,
        is_other: impl Fn(u32) -> bool,
    ) -> (&KnownRun, Vec<Usage>) {
        let known = self.runs.entry(run).or_insert_with(|| KnownRun {
            command: command_of(run.pid),
            is_alive: false,
            small: Vec::new(),
            started: u32::MAX,
            searched: at,
        });
        let usages = |small: &[Identity]| -> Vec<Usage> {
            let usage = |known: &Identity| process::usage(known.pid).filter(|usage| usage.identity == *known);
            small.iter().filter_map(usage).collect()
        };
        let mut found = usages(&known.small);
        let has_changed = known.started != header.started || found.len() < known.small.len();
        let is_old = at.duration_since(known.searched) >= SEARCH_INTERVAL;
        if has_changed || is_old || (found.is_empty() && !has_members) {
            let usage = process::usage(run.pid).filter(|usage| usage.identity == run);
            known.is_alive = usage.is_some();
            known.small = usage.map_or_else(Vec::new, |usage| small_descendants(&usage, &is_other));
            (known.started, known.searched) = (header.started, at);
            found = usages(&known.small);
        }
        // A small program may have published figures since the search.
        found.retain(|usage| !is_other(usage.identity.pid));
        (known, found)
    }

    /// Returns the number of processes of other users that have a helper thread of Pagemill. Root reads the figures of
    /// all users, so the number is 0.
    fn other_users(&mut self, at: Instant) -> usize {
        let own = process::user_id();
        if own == 0 {
            return 0;
        }
        match self.other_users {
            Some((counted, count)) if at.duration_since(counted) < SEARCH_INTERVAL => count,
            _ => {
                let count = count_helpers_of_others(own);
                self.other_users = Some((at, count));
                count
            }
        }
    }
}

/// Returns the descendants of a `run` that are neither published nor a `run` themselves.
fn small_descendants(run: &Usage, is_other: impl Fn(u32) -> bool) -> Vec<Identity> {
    let (mut found, mut open) = (Vec::new(), children_of(run.identity.pid, run.threads));
    while let Some(pid) = open.pop() {
        let Some(usage) = process::usage(pid) else { continue };
        // A nested `run` shows its own descendants. Helper processes of a `run` have the name of the command.
        let is_command = process::printable_letters(&usage.name).eq("pagemill".chars());
        if found.contains(&usage.identity) || is_command {
            continue;
        }
        open.extend(children_of(pid, usage.threads));
        if !is_other(pid) {
            found.push(usage.identity);
        }
    }
    found
}

/// Returns the program of a `pagemill run` with its arguments, from the command line of the `run`.
fn command_of(pid: u32) -> String {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words: Vec<String> =
        line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect();
    program_of_words(&words)
}

/// Returns the words after `--` or, without it, those after the name of the command.
fn program_of_words(words: &[String]) -> String {
    let from = words.iter().position(|word| word == "--").unwrap_or(1);
    let is_skipped = words.get(from).is_some_and(|word| word == "--" || word == "run");
    let text = words.get(from + usize::from(is_skipped)..).unwrap_or_default().join(" ");
    text.trim_end().chars().map(|letter| if letter.is_control() { '?' } else { letter }).collect()
}

/// Counts the processes of users other than `own` that have a thread named `pagemill`.
fn count_helpers_of_others(own: u32) -> usize {
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    let has_helper = |pid: &str| {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        // The first thread has the name of the program.
        tasks
            .filter(|task| task.file_name() != *pid)
            .any(|task| fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name == "pagemill\n"))
    };
    pids.filter(|entry| {
        let name = entry.file_name();
        let Some(pid) = name.to_str().filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())) else {
            return false;
        };
        entry.metadata().is_ok_and(|metadata| metadata.uid() != own) && has_helper(pid)
    })
    .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_of_a_run_is_found() {
        let program = |line: &str| program_of_words(&line.split(' ').map(str::to_owned).collect::<Vec<_>>());
        assert_eq!(program("pagemill run --limit 1G -- redis-server --port 1"), "redis-server --port 1");
        assert_eq!(program("pagemill run sleep 5"), "sleep 5");
        assert_eq!(program("pagemill run --json make"), "--json make");
        assert_eq!((program_of_words(&[]), program("x\u{1b}")), (String::new(), String::new()));
    }
}
