//! `pagemill run`: a program and all that it starts, on Pagemill's allocator, under one budget.

use crate::ram::Ram;
use crate::report::{Collected, Report};
use crate::{elf, fail, preload};
use pagemill::published::{self, TREE_FILE, TREE_VARIABLE};
use pagemill::reclaim::tree::{TreePage, UNLIMITED};
use pagemill::units::{Bytes, PageSize, parse_bytes};
use pagemill_sys::child;
use std::ffi::{CString, OsString};
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Instant;

/// Exit status ends as the program's: its own status, 128 + signal if it was killed, 127 if it is not found, 126 if it
/// cannot be started, 2 for a usage error of `run` itself.
#[derive(clap::Args)]
pub struct Run {
    /// Most memory that the allocator may hold resident, for the program and all its children together (512M, 2G).
    /// Over it, free memory is given back first; then allocations fail with ENOMEM. [env: PAGEMILL_LIMIT]
    #[arg(long, value_name = "SIZE", value_parser = parse_limit)]
    limit: Option<u64>,

    /// Unit in which memory is brought in where no huge page serves: 4K to 8M. [env: PAGEMILL_PAGE_SIZE]
    #[arg(long, value_name = "SIZE", value_parser = parse_page_size)]
    page_size: Option<PageSize>,

    /// What a process holds before Pagemill serves it; until then the C library does. 0: from the first call on, as
    /// always under a limit. [default: 4M] [env: PAGEMILL_AFTER]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    after: Option<u64>,

    /// Mount a RAM file system there, for the program and its children only; no privileges needed. It gives memory back as
    /// `pagemill mount` does, and is gone at the end.
    #[arg(long, value_name = "DIR")]
    ram: Option<PathBuf>,

    /// Most memory for files in it. [default: half of the machine's memory]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, requires = "ram")]
    ram_size: Option<u64>,

    /// Print a report to standard error at the end, as time(1) does.
    #[arg(long)]
    report: bool,

    /// Write the report to a file instead of standard error. Implies --report.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// The report as one JSON object. Implies --report.
    #[arg(long)]
    json: bool,

    /// Check every free: a second one, or one of an address that was not handed out, ends the program. Slower.
    #[arg(long)]
    check: bool,

    /// Use no huge pages.
    #[arg(long)]
    no_huge: bool,

    /// Tell memory apart by this many nodes that do not really exist, to try node code.
    #[arg(long, value_name = "COUNT", hide = true, value_parser = clap::value_parser!(u32).range(1..=64))]
    nodes: Option<u32>,

    /// The program and its arguments.
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

fn parse_limit(text: &str) -> Result<u64, String> {
    match parse_bytes(text)? {
        0 => Err("a limit of 0 leaves a program no memory at all".into()),
        bytes => Ok(bytes),
    }
}

fn parse_page_size(text: &str) -> Result<PageSize, String> {
    text.parse()
}

/// Of a run inside a run: the outer tree's limit.
fn outer_limit() -> Option<u64> {
    let folder = std::env::var(TREE_VARIABLE.to_str().unwrap_or_default()).ok()?;
    let path = CString::new(format!("{folder}/{TREE_FILE}")).ok()?;
    TreePage::join(&path).ok().map(TreePage::limit)
}

/// Says something beside the program's own output.
fn say(message: &str) {
    let _ = writeln!(std::io::stderr(), "pagemill: {message}");
}

/// A process tree's folder, removed when its processes are gone.
struct Tree {
    folder: String,
    page: &'static TreePage,
}

impl Tree {
    fn new(limit: u64) -> Result<Self, String> {
        let folder = published::make_tree_folder()
            .map_err(|error| format!("no folder for the process tree's figures can be made: {error}"))?;
        let path = CString::new(format!("{folder}/{TREE_FILE}")).map_err(|error| error.to_string())?;
        let _ = std::fs::remove_file(format!("{folder}/{TREE_FILE}"));
        let page = TreePage::create(&path, limit).map_err(|error| error.to_string())?;
        Ok(Self { folder, page })
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        // Processes that outlive the command keep the folder; a later command sweeps it.
        self.page.sweep();
        if self.page.totals().members == 0 {
            let _ = std::fs::remove_dir_all(&self.folder);
        }
    }
}

impl Run {
    pub fn main(self) -> ExitCode {
        match self.run() {
            Ok(code) | Err(code) => code,
        }
    }

    fn run(mut self) -> Result<ExitCode, ExitCode> {
        self.read_environment().map_err(|message| fail(2, &message))?;
        let name = &self.program[0].clone();
        let Some(path) = elf::find(name) else {
            return Err(fail(127, &format!("{}: no such program", name.display())));
        };
        if let Some(obstacle) = elf::obstacle(&path) {
            say(&obstacle.explain(&path));
        }
        // First of all that starts a thread.
        let ram_size = self.ram_size.unwrap_or_else(crate::mount::default_size);
        let ram = self.ram.as_ref().map(|dir| Ram::mount(dir, ram_size)).transpose();
        let _ram = ram.map_err(|message| fail(2, &message))?;
        let mut output = self.open_output().map_err(|message| fail(2, &message))?;
        let library = preload::locate().map_err(|message| fail(126, &message))?;
        let tree = self.tree().map_err(|message| fail(126, &message))?;
        let folder = tree.as_ref().map(|tree| tree.folder.as_str());

        let start = Instant::now();
        let child = child::spawn(self.command(&library, folder)).map_err(|error| {
            let status = if error.kind() == ErrorKind::NotFound { 127 } else { 126 };
            fail(status, &format!("{}: {error}", name.display()))
        })?;
        let mut collected = Collected::default();
        let mut absorb = || folder.into_iter().for_each(|folder| collected.absorb_ended(folder));
        let end =
            child.wait(&mut absorb).map_err(|error| fail(126, &format!("waiting for {}: {error}", name.display())))?;
        let wall = start.elapsed();
        absorb();
        if let Some(tree) = tree.as_ref().filter(|_| self.wants_report()) {
            let report = Report::new(name, end, wall, tree.page, &tree.folder, collected);
            // The program's status stays: it ran.
            if let Err(error) = report.write(self.json, output.as_mut()) {
                say(&format!("the report cannot be written: {error}"));
            }
        }
        Ok(ExitCode::from(end.code as u8))
    }

    fn wants_report(&self) -> bool {
        self.report || self.json || self.output.is_some()
    }

    /// What the variables say that mirror a flag that was not given. An empty one says nothing.
    fn read_environment(&mut self) -> Result<(), String> {
        fn value<T>(name: &str, parse: impl Fn(&str) -> Result<T, String>) -> Result<Option<T>, String> {
            let text = std::env::var(name).unwrap_or_default();
            if text.is_empty() {
                return Ok(None);
            }
            parse(&text).map(Some).map_err(|message| format!("{name}: {message}"))
        }
        self.limit = self.limit.or(value("PAGEMILL_LIMIT", parse_limit)?);
        self.page_size = self.page_size.or(value("PAGEMILL_PAGE_SIZE", parse_page_size)?);
        self.after = self.after.or(value("PAGEMILL_AFTER", parse_bytes)?);
        Ok(())
    }

    /// The file of the report: before the program runs, so that a mistake costs nothing.
    fn open_output(&self) -> Result<Option<File>, String> {
        let Some(path) = &self.output else { return Ok(None) };
        let file = File::create(path);
        file.map(Some).map_err(|error| format!("the report cannot be written to {}: {error}", path.display()))
    }

    /// The process tree: a new one; none inside another run that this one neither limits nor reports on, whose tree
    /// serves; none where none can be made and nobody would miss it.
    fn tree(&mut self) -> Result<Option<Tree>, String> {
        if let Some(outer) = outer_limit() {
            let limit = self.limit.unwrap_or(outer);
            if limit >= outer && !self.wants_report() {
                self.limit = Some(outer).filter(|limit| *limit != UNLIMITED);
                return Ok(None);
            }
            if limit > outer {
                say(&format!("--limit {} is cut to {}, that of the run around this one", Bytes(limit), Bytes(outer)));
            }
            self.limit = Some(limit.min(outer)).filter(|limit| *limit != UNLIMITED);
        }
        match Tree::new(self.limit.unwrap_or(UNLIMITED)) {
            Ok(tree) => Ok(Some(tree)),
            Err(message) if self.limit.is_some() || self.wants_report() => Err(message),
            Err(message) => {
                say(&format!("{message}; every process is on its own"));
                Ok(None)
            }
        }
    }

    /// The program with the environment that brings the allocator to it and to what it starts.
    fn command(&self, library: &std::path::Path, tree: Option<&str>) -> Command {
        let mut preloads = OsString::from(library);
        if let Some(others) = std::env::var_os("LD_PRELOAD") {
            // A run inside a run has it already, from the same or another place.
            let is_ours = |path: &str| path.ends_with("libpagemill_malloc.so");
            let others = others.to_string_lossy().into_owned();
            for other in others.split([' ', ':']).filter(|path| !path.is_empty() && !is_ours(path)) {
                preloads.push(":");
                preloads.push(other);
            }
        }
        let mut command = Command::new(&self.program[0]);
        command.args(&self.program[1..]).env("LD_PRELOAD", preloads);
        if let Some(folder) = tree {
            command.env(TREE_VARIABLE.to_str().unwrap_or_default(), folder);
        }
        if let Some(limit) = self.limit {
            command.env("PAGEMILL_LIMIT", limit.to_string());
        }
        if let Some(after) = self.after {
            command.env("PAGEMILL_AFTER", after.to_string());
        }
        if let Some(page) = self.page_size {
            command.env("PAGEMILL_PAGE_SIZE", page.bytes().to_string());
        }
        if self.check {
            command.env("PAGEMILL_CHECK", "1");
        }
        if self.no_huge {
            command.env("PAGEMILL_HUGE", "never");
        }
        if let Some(nodes) = self.nodes {
            command.env("PAGEMILL_NODES", nodes.to_string());
        }
        command
    }
}
