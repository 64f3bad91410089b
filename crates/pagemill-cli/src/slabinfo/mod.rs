//! `pagemill slabinfo [PID]`: shows the slab caches of one process, or of all processes of the user. Also sends
//! commands to one process.

mod control;
mod hints;
mod report;
pub mod table;

use crate::fail;
use crate::requests::{Interrupt, unanswered_reason};
use pagemill_core::Error;
use pagemill_core::listing::{Action, Unanswered};
use pagemill_core::published;
use pagemill_core::stats::{Counter, Snapshot};
use pagemill_slab::{SlabInfo, SlabKind};
use pagemill_sys::file::Path;
use serde_json::{Value, json};
use std::io::{ErrorKind, Write as _};
use std::process::ExitCode;
use table::Style;

/// Text of `--help` after the options.
const AFTER_HELP: &str = "\
Columns:
  OBJECTS           number of objects in use
  OBJSIZE           bytes per object (K, M, G: times 1024)
  SPACE             memory of the cache, in use or not
  SLABS/PART/EMPTY  number of all slabs; of partially used slabs; of unused slabs
  O/S, O            objects per slab; a slab has 2^O OS pages
  %FR               partially used slabs, in percent of all slabs
  %EF               memory of objects in use, in percent of SPACE; if this is low,
                    -s returns much
  FLG               M objects can be moved, C has a constructor, D debug mode,
                    L lost slabs, F skipped in the background after a panic until
                    -s or --set-ratio (see -r NAME),
                    P partial data: a NUMA node could not be examined

Examples:
  pagemill slabinfo                               show all your processes
  pagemill slabinfo 123 -r entries                show details of one cache
  pagemill slabinfo 123 -s                        shrink all caches now
  pagemill slabinfo 123 -s=entries                shrink one cache
  pagemill slabinfo 123 --set-ratio entries=50    empty slabs that are less than
                                                  half full
  pagemill slabinfo 123 --move entries --from 0 --to 1
  pagemill slabinfo 123 --balance entries         as many objects on each node

The process executes these commands itself. If one takes longer than 2 seconds,
it continues after the answer. -s, --move, --balance and the ratios call the
program's own code that moves objects, in a thread of the process. Only the user of the process may use
them; root uses `setpriv --reuid=USER`.";

#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Slabinfo {
    /// A running process that uses the crate. Default: all your processes that have slab caches.
    pid: Option<String>,
    /// A second argument, which is rejected with an error message.
    #[arg(hide = true)]
    other: Option<String>,
    /// Select only caches with a constructor.
    #[arg(short = 'C', long)]
    ctor: bool,
    /// Select only caches with movable objects.
    #[arg(short = 'M', long)]
    movable: bool,
    /// Show details of the caches with this name: settings, why objects were not moved, NUMA nodes.
    #[arg(short, long, value_name = "NAME")]
    report: Option<String>,
    /// Shrink the caches of PID, or those with this name: move objects together, and return the memory of empty slabs.
    #[arg(short, long, value_name = "NAME", num_args = 0..=1, require_equals = true, conflicts_with = "report")]
    shrink: Option<Option<String>>,
    /// Set the ratio of a cache of PID: slabs that are used less than this percentage are emptied in the background.
    /// With 0 no slabs are emptied, with 100 all slabs that are not full.
    #[arg(long, value_name = "NAME=PERCENT", value_parser = parse_ratio, requires = "pid", conflicts_with_all = ["report", "shrink"])]
    set_ratio: Vec<(String, u32)>,
    /// Set for a cache of PID how often, in percent, free objects of another NUMA node are used instead of a new slab.
    #[arg(long, value_name = "NAME=PERCENT", value_parser = parse_ratio, requires = "pid", conflicts_with_all = ["report", "shrink"])]
    set_remote_ratio: Vec<(String, u32)>,
    /// Move all objects of the caches of PID with this name from one NUMA node to another.
    #[arg(long = "move", value_name = "NAME", requires_all = ["pid", "from", "to"], conflicts_with_all = ["report", "shrink", "set_ratio", "set_remote_ratio"])]
    move_objects: Option<String>,
    /// The NUMA node from which --move moves the objects.
    #[arg(long, value_name = "NODE", requires = "move_objects")]
    from: Option<u16>,
    /// The NUMA node to which --move moves the objects.
    #[arg(long, value_name = "NODE", requires = "move_objects")]
    to: Option<u16>,
    /// Move objects of the caches of PID with this name from NUMA nodes that have more than the average to others.
    #[arg(long, value_name = "NAME", requires = "pid", conflicts_with_all = ["report", "shrink", "set_ratio", "set_remote_ratio", "move_objects"])]
    balance: Option<String>,
    /// Show whole names, exact numbers and long units, so the table can be wide.
    #[arg(short, long, conflicts_with = "report")]
    verbose: bool,
    /// Print one JSON object per process instead of tables, with all details of all caches.
    #[arg(long)]
    json: bool,
}

/// Parses `NAME=PERCENT`, where NAME is the name of a slab cache. The name may contain any character.
fn parse_ratio(text: &str) -> Result<(String, u32), String> {
    let (name, percent) = text.rsplit_once('=').ok_or("expected NAME=PERCENT")?;
    let percent = percent.parse().map_err(|_| format!("{percent} is not a percentage"))?;
    if percent > 100 { Err(Error::BadRatio { percent }.to_string()) } else { Ok((name.to_owned(), percent)) }
}

/// A slab cache of a process. `at` is the index of its Pagemill instance in [`Process::found`]; `id` is its number in
/// that instance.
pub struct Cache {
    at: usize,
    id: u64,
    pub info: SlabInfo,
}

/// The published files of a process, and the slab caches that the process reported.
pub struct Process {
    found: Vec<(Path, Snapshot)>,
    pub caches: Vec<Cache>,
}

/// Requests reports about slab caches from all these processes before it waits for the first answer. Returns each
/// process with its slab caches. If a process did not answer, also returns an error for that process.
pub fn request_slab_caches(
    published: Vec<Vec<(Path, Snapshot)>>,
    interrupt: &Interrupt,
) -> Vec<(Process, Option<Unanswered>)> {
    let without_caches = |found| (Process { found, caches: Vec::new() }, None);
    let mut processes: Vec<(Process, Option<Unanswered>)> = published.into_iter().map(without_caches).collect();
    let (mut parts, mut targets) = (Vec::new(), Vec::new());
    for (number, (process, _)) in processes.iter().enumerate() {
        // A process without slab caches gets no request: a request would wake its helper thread for nothing.
        for (at, (path, snapshot)) in process.found.iter().enumerate().filter(|(_, (_, part))| has_caches(part)) {
            parts.push((number, at));
            targets.push((path, snapshot.identity));
        }
    }
    let answers = pagemill_slab::ask_for_slabs(&targets, || interrupt.has_signal());
    for ((number, at), answer) in parts.into_iter().zip(answers) {
        let (process, unanswered) = &mut processes[number];
        match answer {
            Ok(caches) => process.caches.extend(caches.into_iter().map(|(id, info)| Cache { at, id, info })),
            Err(error) => *unanswered = unanswered.take().or(Some(error)),
        }
    }
    for (process, _) in &mut processes {
        process.caches.sort_by_cached_key(|cache| (cache.info.kind == SlabKind::Fixed, cache.info.name.clone()));
    }
    processes
}

impl Process {
    pub fn snapshot(&self) -> &Snapshot {
        &self.found[0].1
    }

    fn pid(&self) -> u32 {
        self.snapshot().identity.pid
    }

    fn title(&self) -> String {
        format!("{} {}\n", self.pid(), self.snapshot().name())
    }

    fn json(&self, rest: Value) -> String {
        let mut object = json!({"pid": self.pid(), "name": self.snapshot().name()});
        if let (Some(object), Value::Object(rest)) = (object.as_object_mut(), rest) {
            object.extend(rest);
        }
        format!("{object}\n")
    }

    /// Returns all slab caches with this name. Names are compared in the form in which they are displayed. Returns an
    /// error message if there is no such cache.
    fn caches_named(&self, name: &str) -> Result<Vec<&Cache>, String> {
        let shown = pagemill_slab::shown_name(name);
        let named: Vec<&Cache> = self.caches.iter().filter(|cache| *cache.info.name == *shown).collect();
        if !named.is_empty() {
            return Ok(named);
        }
        let instead = hints::name_suggestion(&shown, self.cache_names());
        Err(format!("process {} has no slab cache {shown}{instead}", self.pid()))
    }

    fn cache_names(&self) -> impl Iterator<Item = &str> {
        self.caches.iter().map(|cache| &*cache.info.name)
    }
}

pub fn has_caches(snapshot: &Snapshot) -> bool {
    snapshot.get(Counter::SlabCaches) > 0
}

fn unanswered_message(found: &[(Path, Snapshot)], error: &Unanswered) -> String {
    let snapshot = &found[0].1;
    format!("process {}: {error}{}", snapshot.identity.pid, unanswered_reason(error, snapshot))
}

/// Writes text to standard output. A pipe that its reader (`head`, `less`) has closed is not an error.
fn write_to_stdout(text: &str) -> ExitCode {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            fail(1, &format!("the result cannot be written: {error}"))
        }
        _ => ExitCode::SUCCESS,
    }
}

/// Returns all processes of this user that have slab caches, and an exit status. Reports each process that did not
/// answer on standard error. Skips processes that have ended.
///
/// # Errors
///
/// `Stopped` if a signal interrupts the wait for the answers.
fn all_processes(interrupt: &Interrupt) -> Result<(Vec<Process>, ExitCode), Unanswered> {
    let mut pids: Vec<u32> = published::running().iter().map(|snapshot| snapshot.identity.pid).collect();
    pids.sort_unstable();
    pids.dedup();
    let mut published: Vec<_> = pids.into_iter().map(published::find_all).collect();
    published.retain(|found| found.iter().any(|(_, snapshot)| has_caches(snapshot)));
    let (mut processes, mut status) = (Vec::new(), ExitCode::SUCCESS);
    for (process, error) in request_slab_caches(published, interrupt) {
        match error {
            None => processes.push(process),
            Some(Unanswered::Stopped) => return Err(Unanswered::Stopped),
            Some(Unanswered::Ended) => {}
            Some(error) => status = fail(2, &unanswered_message(&process.found, &error)),
        }
    }
    Ok((processes, status))
}

/// Shrinks all slab caches of a process. Returns the bytes freed.
///
/// # Errors
///
/// A message; `None` if a signal interrupted the wait.
pub fn shrink_all(found: Vec<(Path, Snapshot)>, interrupt: &Interrupt) -> Result<u64, Option<String>> {
    let (process, error) = request_slab_caches(vec![found], interrupt).remove(0);
    match error {
        None => control::shrink_caches(&process, interrupt),
        Some(Unanswered::Stopped) => Err(None),
        Some(error) => Err(Some(unanswered_message(&process.found, &error))),
    }
}

impl Slabinfo {
    pub fn main(&self) -> ExitCode {
        if let Some(message) = self.argument_error() {
            return fail(2, &message);
        }
        let Ok(interrupt) = Interrupt::watch() else { return fail(1, "signals cannot be handled") };
        if let Some(pid) = self.pid.as_ref().and_then(|pid| pid.parse().ok()) {
            return self.main_for_process(pid, &interrupt);
        }
        match (all_processes(&interrupt), &self.shrink) {
            (Err(_), _) => interrupt.end(),
            (Ok((processes, _)), Some(name)) => fail(2, &hints::missing_process_error(name.as_deref(), &processes)),
            (Ok((processes, status)), None) => self.show(&processes, status),
        }
    }

    fn main_for_process(&self, pid: u32, interrupt: &Interrupt) -> ExitCode {
        let found = published::find_all(pid);
        if found.is_empty() {
            return fail(2, &published::missing(pid));
        }
        let (process, error) = request_slab_caches(vec![found], interrupt).remove(0);
        match error {
            None => {}
            Some(Unanswered::Stopped) => return interrupt.end(),
            Some(error) => return fail(2, &unanswered_message(&process.found, &error)),
        }
        if let Some(name) = &self.shrink {
            return control::shrink(self, &process, name.as_deref(), interrupt);
        }
        if let (Some(name), Some(from), Some(to)) = (&self.move_objects, self.from, self.to) {
            return control::move_between_nodes(self, &process, name, Action::Move { from, to }, interrupt);
        }
        if let Some(name) = &self.balance {
            return control::move_between_nodes(self, &process, name, Action::Balance, interrupt);
        }
        if !self.set_ratio.is_empty() || !self.set_remote_ratio.is_empty() {
            return control::set_ratios(self, &process, interrupt);
        }
        match self.text_of(&process) {
            Ok(text) => write_to_stdout(&text),
            Err(message) => fail(2, &message),
        }
    }

    fn show(&self, processes: &[Process], status: ExitCode) -> ExitCode {
        let texts: Vec<String> = processes.iter().filter_map(|process| self.text_of(process).ok()).collect();
        match (&self.report, status == ExitCode::SUCCESS) {
            (_, false) => {
                write_to_stdout(&texts.concat());
                status
            }
            (Some(name), true) if texts.is_empty() => {
                let names = processes.iter().flat_map(Process::cache_names);
                let instead = hints::name_suggestion(name, names);
                fail(2, &format!("no process has a slab cache {}{instead}", pagemill_slab::shown_name(name)))
            }
            (None, true) if texts.is_empty() && !self.json => write_to_stdout("no process of yours has slab caches\n"),
            _ => write_to_stdout(&texts.concat()),
        }
    }

    fn is_selected(&self, info: &SlabInfo) -> bool {
        (!self.ctor || info.has_constructor) && (!self.movable || info.kind != SlabKind::Fixed)
    }

    fn text_of(&self, process: &Process) -> Result<String, String> {
        let caches: Vec<&SlabInfo> = match &self.report {
            Some(name) => process.caches_named(name)?.into_iter().map(|cache| &cache.info).collect(),
            None => process.caches.iter().map(|cache| &cache.info).filter(|info| self.is_selected(info)).collect(),
        };
        Ok(match &self.report {
            _ if self.json => process.json(report::json_of(&caches)),
            Some(_) => process.title() + &caches.iter().map(|info| report::text_of(info)).collect::<String>(),
            None => process.title() + &table::text_of(&caches, Style::of_output(self.verbose)),
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use pagemill_slab::NodeInfo;

    /// Returns a report about a slab cache with two NUMA nodes. The second node has no slabs.
    pub fn example_info(name: &str, kind: SlabKind) -> SlabInfo {
        let node = NodeInfo {
            used: 1100,
            cached: 60,
            objects: 1364,
            slabs: 4,
            partial: 1,
            empty: 0,
            lost: 1,
            blocks: 1,
            resident_bytes: 256 << 10,
        };
        SlabInfo {
            name: name.into(),
            kind,
            object_bytes: 192,
            stride_bytes: 192,
            slab_bytes: 64 << 10,
            objects_per_slab: 341,
            has_constructor: kind == SlabKind::ByOwner,
            is_debug: false,
            defrag_used_ratio: 30,
            remote_node_defrag_ratio: 100,
            total: node,
            nodes: vec![node, NodeInfo::default()],
            active: 1000,
            waiting: 20,
            cached: 100,
            moved: 7,
            freed: 1,
            busy: 2,
            refused: 3,
            failed: 4,
            emptied: 5,
            from_remote: 6,
            handle_bytes: if kind == SlabKind::ByHandle { 8 << 10 } else { 0 },
            is_partial: false,
            is_given_up: false,
        }
    }

    /// `NAME=PERCENT` is parsed. The name may contain any character. The percentage must be a number up to 100.
    #[test]
    fn ratios_are_parsed() {
        assert_eq!(parse_ratio("a=b=30"), Ok(("a=b".to_owned(), 30)));
        assert_eq!(
            (parse_ratio("a=100").is_ok(), parse_ratio("a").is_err(), parse_ratio("a=x").is_err()),
            (true, true, true)
        );
        assert_eq!(parse_ratio("a=101"), Err("101 is not a percentage: expected 0 to 100".to_owned()));
    }
}
