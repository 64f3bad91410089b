//! `pagemill trim`: makes processes return free and volatile memory now, and shows how much memory they returned.

use crate::columns::{self, Heading};
use crate::fail;
use crate::requests::{Interrupt, unanswered_reason};
use crate::statistics::{self, Process};
use pagemill_core::listing;
use pagemill_core::listing::{ControlCommand, Unanswered};
use pagemill_core::published;
use pagemill_core::stats::Counter;
use pagemill_core::units::{self, Bytes};
use pagemill_sys::process;
use serde_json::json;
use std::collections::BTreeSet;
use std::io::{ErrorKind, Write as _};
use std::process::ExitCode;

/// Maximum number of bytes that one request asks a process to return. Such a request takes some ten milliseconds, so
/// the command can end soon after Ctrl-C.
const MAX_REQUEST_BYTES: u64 = 256 << 20;

/// Without SIZE, the command requests at most this many bytes more than the process could have returned at the start.
/// Without this bound, the command would never end for a program that frees memory all the time.
const MAX_EXTRA_BYTES: u64 = 1 << 30;

#[derive(clap::Args)]
#[command(
    override_usage = "pagemill trim [--json] PID [SIZE]\n       pagemill trim [--json] --tree PID [SIZE]\n       pagemill trim [--json] --all [SIZE]",
    after_help = "\
Returns free memory, and volatile memory, whose contents are lost. Begins with the processes that can return most, \
and with SIZE stops after about that much. A process returns the free memory of all its allocations below 64 KiB \
together, even if this is more than SIZE. RETURNED is the memory that the kernel took back, as the process counts it. \
RSS is the resident memory of the process as the kernel counts it, before and after. `pagemill meminfo` shows how much \
is giveable. Only the user of a process can trim it; root must \
first become that user (`setpriv --reuid=USER`)."
)]
pub struct Trim {
    /// PID: a process on Pagemill, or a `pagemill run`, which stands for all processes of its tree; omitted with --tree
    /// and --all. SIZE: how much to return, in bytes or with K, M, G; default: all.
    #[arg(value_name = "PID | SIZE", num_args = 0..=2)]
    words: Vec<String>,
    /// Trim this process and all its descendants.
    #[arg(long, value_name = "PID", conflicts_with = "all")]
    tree: Option<u32>,
    /// Trim all your processes.
    #[arg(long)]
    all: bool,
    /// Print one JSON object for each process instead of a table.
    #[arg(long)]
    json: bool,
}

enum Targets {
    One(u32),
    Tree(u32),
    All,
}

/// What the command achieved for one process.
struct TrimResult {
    process: Process,
    before: u64,
    after: u64,
    returned: u64,
    trouble: Option<String>,
}

impl Trim {
    pub fn main(&self) -> ExitCode {
        let (targets, size) = match self.parse_arguments() {
            Ok(read) => read,
            Err(message) => return fail(2, &message),
        };
        let Ok(interrupt) = Interrupt::watch() else { return fail(1, "signals cannot be handled") };
        let found = match find_processes(&targets) {
            Ok(found) => found,
            Err(message) => return fail(2, &message),
        };
        let mut processes = match statistics::request_statistics(found, &interrupt) {
            Ok(processes) => processes,
            Err(_) => return interrupt.end(),
        };
        processes.sort_by_key(|process| u64::MAX - statistics::giveable_bytes(&process.sum).0);
        let (mut left, mut done) = (size, Vec::new());
        for process in processes {
            if left == Some(0) {
                break;
            }
            let trimmed = trim_process(process, left, &interrupt);
            left = left.map(|left| left.saturating_sub(trimmed.returned));
            done.push(trimmed);
            if interrupt.has_signal() {
                break;
            }
        }
        let status = self.show(&done);
        if interrupt.has_signal() { interrupt.end() } else { status }
    }

    fn parse_arguments(&self) -> Result<(Targets, Option<u64>), String> {
        let mut words = self.words.iter();
        let targets = match (self.all, self.tree) {
            (true, _) => Targets::All,
            (false, Some(pid)) => Targets::Tree(pid),
            (false, None) => {
                let word = words.next().ok_or("no process is given: use `pagemill trim PID`, --tree PID or --all")?;
                Targets::One(word.parse().map_err(|_| format!("{word} is not a process id"))?)
            }
        };
        let size = words.next();
        // The user may have meant the options of `meminfo PID --all` and have written a process id here.
        if let (Targets::All, Some(word)) = (&targets, size)
            && word.parse::<u32>().is_ok_and(|pid| process::identity(pid).is_some())
        {
            return Err(format!(
                "{word} is the id of a process, but --all trims all processes; a size of {word} bytes is written {word}B"
            ));
        }
        let size = size.map(|word| units::parse_bytes(word));
        match words.next() {
            Some(word) => {
                Err(format!("unexpected argument {word}: expected PID [SIZE], or with --tree and --all only [SIZE]"))
            }
            None => Ok((targets, size.transpose()?)),
        }
    }

    fn show(&self, done: &[TrimResult]) -> ExitCode {
        let text = if self.json { json_of(done) } else { text_of(done) };
        let mut out = std::io::stdout().lock();
        match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            Err(error) if error.kind() != ErrorKind::BrokenPipe => {
                return fail(1, &format!("the result cannot be written: {error}"));
            }
            _ => {}
        }
        let mut status = ExitCode::SUCCESS;
        for (done, trouble) in done.iter().filter_map(|done| Some((done, done.trouble.as_ref()?))) {
            status = fail(2, &format!("process {}: {trouble}", done.process.pid()));
        }
        status
    }
}

fn find_processes(targets: &Targets) -> Result<Vec<published::Process>, String> {
    let of_pid = |pid: u32| published::read(pid).filter(published::Process::is_own);
    let found = match targets {
        Targets::All => published::read_all().into_iter().filter(published::Process::is_own).collect(),
        Targets::One(pid) => match of_pid(*pid) {
            Some(process) => vec![process],
            None => own_tree_members(*pid).ok_or_else(|| published::missing(*pid))?,
        },
        Targets::Tree(pid) => {
            if pagemill_sys::process::identity(*pid).is_none() {
                return Err(published::missing(*pid));
            }
            let members = own_tree_members(*pid).unwrap_or_default();
            let mut pids: BTreeSet<u32> = members.iter().map(|member| member.identity.pid).collect();
            pids.extend(descendants(*pid));
            pids.into_iter().filter_map(of_pid).collect()
        }
    };
    match (found.is_empty(), targets) {
        (true, Targets::All) => Err("no process of yours is on Pagemill".to_owned()),
        (true, Targets::One(pid) | Targets::Tree(pid)) => {
            Err(format!("neither process {pid} nor a descendant of it is on Pagemill and yours"))
        }
        (false, _) => Ok(found),
    }
}

fn own_tree_members(pid: u32) -> Option<Vec<published::Process>> {
    Some(published::read_tree(pid)?.into_iter().filter(published::Process::is_own).collect())
}

fn descendants(pid: u32) -> Vec<u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten();
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    let parents: Vec<(u32, u32)> = pids.filter_map(|pid| Some((pid, process::usage(pid)?.parent_pid))).collect();
    let mut found = vec![pid];
    let mut at = 0;
    while let Some(parent) = found.get(at).copied() {
        at += 1;
        let children = parents.iter().filter(|(child, of)| *of == parent && !found.contains(child));
        let children: Vec<u32> = children.map(|(child, _)| *child).collect();
        found.extend(children);
    }
    found
}

fn trim_process(process: Process, max_bytes: Option<u64>, interrupt: &Interrupt) -> TrimResult {
    let before = process::resident_bytes(process.pid()).unwrap_or(0);
    let mut done = TrimResult { before, after: before, returned: 0, trouble: None, process };
    for (path, snapshot) in &done.process.published.found {
        let mut left = match max_bytes {
            Some(max_bytes) => max_bytes.saturating_sub(done.returned),
            None => snapshot.giveable_bytes().saturating_add(MAX_EXTRA_BYTES),
        };
        // Without a helper thread, the process answers no commands. So the command counts as unanswered without a wait.
        let has_helper = snapshot.get(Counter::Helpers) > 0;
        while left > 0 {
            let command = ControlCommand::Trim { want_bytes: left.min(MAX_REQUEST_BYTES) };
            let answer = match has_helper {
                true => listing::command(path, snapshot.identity, command, || interrupt.has_signal()),
                false => Err(Unanswered::Late),
            };
            match answer {
                Ok(outcome) if outcome.errno == 0 => {
                    let freed_bytes = outcome.shrunk.freed_bytes;
                    done.returned = done.returned.saturating_add(freed_bytes);
                    left = if freed_bytes == 0 { 0 } else { left.saturating_sub(freed_bytes) };
                }
                Ok(outcome) => {
                    let error = std::io::Error::from_raw_os_error(outcome.errno);
                    done.trouble = Some(format!("it cannot return memory now: {error}"));
                    break;
                }
                Err(Unanswered::Stopped) => break,
                Err(error) => {
                    done.trouble = Some(format!("{error}{}", unanswered_reason(&error, snapshot)));
                    break;
                }
            }
        }
    }
    done.after = process::resident_bytes(done.process.pid()).unwrap_or(0);
    done
}

fn text_of(done: &[TrimResult]) -> String {
    let sum = |of: fn(&TrimResult) -> u64| done.iter().fold(0u64, |sum, done| sum.saturating_add(of(done)));
    let headings = [
        Heading::right_aligned("PID", 8, 0),
        Heading::left_aligned("NAME", 0, 1),
        Heading::right_aligned("RETURNED", 10, 1),
        Heading::right_aligned("RSS BEFORE", 12, 1),
        Heading::right_aligned("RSS AFTER", 12, 1),
    ];
    let row = |pid: String, name: String, bytes: [u64; 3]| {
        [pid, name].into_iter().chain(bytes.map(|bytes| Bytes(bytes).to_string())).collect()
    };
    let of_process = |done: &TrimResult| {
        let name = done.process.sum.name().to_string();
        row(done.process.pid().to_string(), name, [done.returned, done.before, done.after])
    };
    let mut rows: Vec<Vec<String>> = done.iter().map(of_process).collect();
    if done.len() > 1 {
        let sums = [sum(|done| done.returned), sum(|done| done.before), sum(|done| done.after)];
        rows.push(row(String::new(), format!("all {}", done.len()), sums));
    }
    columns::aligned_table(&headings, rows)
}

fn json_of(done: &[TrimResult]) -> String {
    let object = |done: &TrimResult| {
        json!({
            "pid": done.process.pid(),
            "name": done.process.sum.name(),
            "giveable": statistics::giveable_bytes(&done.process.sum).0,
            "returned": done.returned,
            "rss_before": done.before,
            "rss_after": done.after,
            "trouble": done.trouble,
        })
    };
    done.iter().map(|done| format!("{}\n", object(done))).collect()
}
