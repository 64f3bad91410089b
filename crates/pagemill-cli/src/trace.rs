//! `pagemill trace [PID]`: shows the latest events of a process, of the members of a process tree, or of all
//! processes.

use crate::fail;
use pagemill_core::published::{self, Process};
use pagemill_core::trace::{self, Recorded};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(clap::Args)]
pub struct Trace {
    /// A process on Pagemill, or a `pagemill run`, which stands for all processes of its tree. Default: all processes.
    pid: Option<u32>,
    /// Print one JSON object per line.
    #[arg(long)]
    json: bool,
    /// Write the events to a file for ui.perfetto.dev and chrome://tracing instead: the tracks of each process, the
    /// orders of new folios, and resident and returned memory.
    #[arg(long, value_name = "FILE", conflicts_with = "json")]
    perfetto: Option<PathBuf>,
}

/// An event that a process recorded, and the process.
struct EventLine {
    pid: u32,
    name: String,
    event: Recorded,
}

impl Trace {
    pub fn main(&self) -> ExitCode {
        let (lines, is_one) = match self.pid {
            Some(pid) => match published::read(pid) {
                // If a process has several Pagemill instances, only the events of the first are shown. The first is
                // that of the preload library.
                Some(process) => match events_of(&process, 1) {
                    Ok(lines) => (lines, true),
                    Err(error) => return fail(2, &format!("cannot read the events of {pid}: {error}")),
                },
                None => match published::read_tree(pid) {
                    Some(members) => (merged_events(&members), false),
                    None => return fail(2, &published::unreadable(pid)),
                },
            },
            None => (merged_events(&published::read_all()), false),
        };
        if let Some(path) = &self.perfetto {
            return write_perfetto(path, &lines);
        }
        if lines.is_empty() && !is_one && !self.json {
            println!("no process of {} is on Pagemill", if self.pid.is_some() { "the tree" } else { "yours" });
        }
        let mut out = std::io::stdout().lock();
        let start = lines.first().map_or(0, |first| first.event.time_ns);
        let written = lines.iter().try_for_each(|line| writeln!(out, "{}", self.text(line, start, is_one)));
        match written.and_then(|()| out.flush()) {
            // The reader (head, less) may close the pipe early.
            Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
                fail(1, &format!("the events cannot be written: {error}"))
            }
            _ => ExitCode::SUCCESS,
        }
    }

    fn text(&self, line: &EventLine, start_ns: u64, is_one: bool) -> String {
        let event = &line.event;
        if self.json {
            let mut object = serde_json::Map::new();
            object.insert("pid".into(), line.pid.into());
            object.insert("sequence".into(), event.sequence.into());
            object.insert("time_ns".into(), event.time_ns.into());
            object.insert("event".into(), event.event.into());
            // The number `pid` of an event `start` is the process's own id, which is already shown. In other events it
            // is the id of another process.
            let numbers = event.numbers.iter().filter(|(name, _)| *name != "pid" || event.event != "start");
            object.extend(numbers.map(|(name, number)| ((*name).to_owned(), (*number).into())));
            return serde_json::Value::Object(object).to_string();
        }
        let seconds = event.time_ns.saturating_sub(start_ns) as f64 / 1e9;
        let numbers: Vec<String> = event.numbers.iter().map(|(name, number)| format!("{name} {number}")).collect();
        let process_columns = if is_one { String::new() } else { format!("{:>8} {:<15}  ", line.pid, line.name) };
        format!("{seconds:>12.6} s  {process_columns}{:<14}  {}", event.event, numbers.join(", "))
    }
}

fn write_perfetto(path: &Path, lines: &[EventLine]) -> ExitCode {
    let events = lines.iter().map(|line| (line.pid, line.name.as_str(), &line.event));
    match std::fs::write(path, crate::perfetto::trace_json(events)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(1, &format!("the events cannot be written to {}: {error}", path.display())),
    }
}

fn events_of(process: &Process, parts: usize) -> std::io::Result<Vec<EventLine>> {
    let mut lines = Vec::new();
    for (path, snapshot) in process.found.iter().take(parts) {
        let events = trace::read(path.as_c_str(), process.owner())?;
        lines.extend(events.into_iter().map(|event| EventLine {
            pid: process.identity.pid,
            name: snapshot.name(),
            event,
        }));
    }
    Ok(lines)
}

/// Returns the events of several processes in order of time. Skips processes that have ended.
fn merged_events(processes: &[Process]) -> Vec<EventLine> {
    let each = processes.iter().filter_map(|process| events_of(process, usize::MAX).ok());
    let mut lines: Vec<EventLine> = each.flatten().collect();
    lines.sort_by_key(|line| line.event.time_ns);
    lines
}
