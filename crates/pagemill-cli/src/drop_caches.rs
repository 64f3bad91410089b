//! `pagemill drop-caches PID`: makes a process drop clean pages of its page caches, and shrink its slab caches.

use crate::requests::{Interrupt, unanswered_reason};
use crate::{fail, slabinfo};
use pagemill_core::listing::{self, ControlCommand, Unanswered};
use pagemill_core::published::{self, Process};
use pagemill_core::stats::Counter;
use pagemill_core::units::Bytes;
use serde_json::json;
use std::io::{ErrorKind, Write as _};
use std::process::ExitCode;

#[derive(clap::Args)]
#[command(after_help = "\
Dirty pages, pinned pages, and files that exist in memory only stay. Slab caches move objects together, and return the \
memory of empty slabs. The process executes the commands itself; if that takes longer than 2 seconds, it continues after \
the answer. `pagemill trim` returns free and volatile memory. Only the user of a process may drop its \
caches; root must first become that user (`setpriv --reuid=USER`).")]
pub struct DropCaches {
    /// A process that uses the crate, or a `pagemill run`, which stands for all processes of its tree.
    pid: u32,
    /// Which caches.
    #[arg(value_enum, default_value = "all")]
    which: Which,
    /// Print one JSON object for each process.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Which {
    /// Clean pages of page caches, and what shrinkers of the program can read again.
    Pages,
    /// Unused memory of slab caches.
    Slabs,
    /// Both.
    All,
}

impl DropCaches {
    pub fn main(&self) -> ExitCode {
        let Ok(interrupt) = Interrupt::watch() else { return fail(1, "signals cannot be handled") };
        let processes = match published::read(self.pid).filter(Process::is_own) {
            Some(process) => vec![process],
            None => match published::read_tree(self.pid) {
                Some(members) => members.into_iter().filter(Process::is_own).collect(),
                None => return fail(2, &published::missing(self.pid)),
            },
        };
        let mut status = ExitCode::SUCCESS;
        for process in processes {
            let (pid, name) = (process.identity.pid, process.found[0].1.name());
            match self.drop_caches_of(process, &interrupt) {
                Ok((pages, slabs)) => {
                    let written = writeln!(std::io::stdout(), "{}", self.text(pid, &name, pages, slabs));
                    if let Err(error) = written
                        && error.kind() != ErrorKind::BrokenPipe
                    {
                        return fail(1, &format!("the result cannot be written: {error}"));
                    }
                }
                Err(None) => return interrupt.end(),
                Err(Some(why)) => status = fail(2, &format!("process {pid}: {why}")),
            }
        }
        status
    }

    /// Returns the bytes of pages and of slabs that the process returned.
    fn drop_caches_of(&self, process: Process, interrupt: &Interrupt) -> Result<(u64, u64), Option<String>> {
        let pages = if self.which == Which::Slabs { 0 } else { drop_pages(&process, interrupt)? };
        let slabs = if self.which == Which::Pages { 0 } else { slabinfo::shrink_all(process.found, interrupt)? };
        Ok((pages, slabs))
    }

    fn text(&self, pid: u32, name: &str, pages: u64, slabs: u64) -> String {
        if self.json {
            return json!({"pid": pid, "name": name, "pages": pages, "slabs": slabs}).to_string();
        }
        let parts = match self.which {
            Which::Pages => format!("{} of pages", Bytes(pages)),
            Which::Slabs => format!("{} of slabs", Bytes(slabs)),
            Which::All => format!("{} of pages and {} of slabs", Bytes(pages), Bytes(slabs)),
        };
        format!("{pid} {name}: {parts} returned")
    }
}

/// Makes each Pagemill instance of a process drop contents that can be read again. Returns the bytes freed.
fn drop_pages(process: &Process, interrupt: &Interrupt) -> Result<u64, Option<String>> {
    let mut freed_bytes = 0_u64;
    for (path, snapshot) in &process.found {
        // Without a helper thread, the process answers no commands. So the command counts as unanswered without a wait.
        let answer = match snapshot.get(Counter::Helpers) > 0 {
            true => listing::command(path, snapshot.identity, ControlCommand::DropContents, || interrupt.has_signal()),
            false => Err(Unanswered::Late),
        };
        match answer {
            Ok(outcome) if outcome.errno == 0 => freed_bytes = freed_bytes.saturating_add(outcome.shrunk.freed_bytes),
            Ok(outcome) => {
                let error = std::io::Error::from_raw_os_error(outcome.errno);
                return Err(Some(format!("it cannot drop its caches now: {error}")));
            }
            Err(Unanswered::Stopped) => return Err(None),
            Err(error) => return Err(Some(format!("{error}{}", unanswered_reason(&error, snapshot)))),
        }
    }
    Ok(freed_bytes)
}
