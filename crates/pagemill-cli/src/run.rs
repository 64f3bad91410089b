//! `pagemill run`: runs a program and its children on Pagemill's allocator, under one limit.

use crate::elf::{self, Obstacle};
use crate::kernel_limit::{self, KernelLimit};
use crate::limit::LimitSize;
use crate::metrics::{self, Scope, Source};
use crate::ram::Ram;
use crate::report::{self, CollectedStatistics, FinishedProgram, KernelLimitResult, Report};
use crate::tree_memory::{Excess, TreeMemory};
use crate::{fail, preload};
use pagemill_core::published::{self, TREE_FILE, TREE_VARIABLE};
use pagemill_core::reclaim::Return;
use pagemill_core::reclaim::tree::{TreePage, UNLIMITED};
use pagemill_core::units::{Bytes, PageSize, parse_bytes};
use pagemill_sys::child::{self, BlockedSignals, RunningChild};
use pagemill_sys::process;
use std::collections::BTreeMap;
use std::ffi::{CString, OsStr, OsString};
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Environment variables that `run` checks and passes on to the allocator, with their two valid values.
const KEYWORD_VARIABLES: [(&str, [&str; 2]); 3] =
    [("PAGEMILL_HELPER", ["on", "off"]), ("PAGEMILL_WATCH", ["on", "off"]), ("PAGEMILL_HUGE", ["never", "always"])];

/// Interval at which `run` adds the statistics of processes that have ended to the sums of its report.
const ABSORB_INTERVAL: Duration = Duration::from_secs(1);

/// The exit status is the program's: its own status, 128 + signal if it was killed, 127 if it is not found, 126 if it
/// cannot be started or limited, 2 for a usage error of `run` itself.
///
/// If `run` is killed (SIGKILL), the kernel kills the program, too. Its children continue. In a control group of version 2
/// made by --limit-kernel (Linux 5.14, no systemd scope), a guard process kills the children.
#[derive(clap::Args)]
pub struct Run {
    /// Limit the resident memory of the allocators of the program and all its children together. SIZE is a number of
    /// bytes (512M, 2G) or a percentage. 50% is half of the smallest control-group limit above this process, or half of
    /// the machine's memory if that is smaller. At the limit, the processes return free memory; then allocations fail
    /// with ENOMEM. A program into which the allocator
    /// cannot be preloaded is refused (status 126). [env: PAGEMILL_LIMIT]
    #[arg(long, value_name = "SIZE")]
    limit: Option<LimitSize>,

    /// With --limit: also run a program into which the allocator cannot be preloaded (static, set-uid, for another
    /// processor or C library). The limit has no effect on it.
    #[arg(long)]
    force: bool,

    /// Let the kernel limit all memory of the program and its children together. At the limit, the kernel drops file
    /// pages, then kills a process of the tree. SIZE is as for --limit. Creates a systemd scope, or a control group if there is none, and removes it at the end.
    #[arg(long, value_name = "SIZE")]
    limit_kernel: Option<LimitSize>,

    /// When free memory is returned to the system: keep (only on request or under pressure), eager (after 1 second
    /// without reuse), balanced[=SECONDS] (after so many seconds without reuse). [default: balanced=10]
    /// [env: PAGEMILL_RETURN]
    #[arg(long = "return", value_name = "WHEN")]
    return_after: Option<Return>,

    /// Memory that becomes resident at once where no huge page is used: a power of two from the size of an OS page to 8M.
    /// For allocations from 64 KiB up only
    /// if the kernel offers pages of 16 KiB to 1 MiB (see `pagemill doctor`). [env: PAGEMILL_PAGE_SIZE]
    #[arg(long, value_name = "SIZE", value_parser = parse_page_size)]
    page_size: Option<PageSize>,

    /// Memory that a process gets from the C library's allocator before Pagemill's allocator serves it. With 0, and
    /// always with --limit or --check, Pagemill serves the first call. [default: 4M] [env: PAGEMILL_AFTER]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    after: Option<u64>,

    /// Mount a RAM file system at DIR that only the program and its children see; needs no privileges. Near a limit its
    /// marked files are purged, as with `pagemill mount`. It is removed at the end.
    #[arg(long, value_name = "DIR")]
    ram: Option<PathBuf>,

    /// Maximum memory for the files of --ram. [default: half of the machine's memory]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, requires = "ram")]
    ram_size: Option<u64>,

    /// Print a report to standard error at the end, as time(1) does: peak memory of the program and its children as the
    /// kernel counts it, peak memory of their allocators, and a plot of memory over time. The kernel's count is sampled,
    /// so short peaks can be missed. Shared memory counts in each process.
    #[arg(long)]
    report: bool,

    /// Write the report to a file instead of standard error. Implies --report.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Write the report to a file as an HTML page with a plot of memory over time, which needs no network. Without
    /// --report, --output or --json, there is no other report.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,

    /// Print the report as one JSON object. Implies --report.
    #[arg(long)]
    json: bool,

    /// Publish the metrics of the program and its children while they run: at http://ADDR/metrics (ADDR is PORT or
    /// HOST:PORT), or in a file, given as a path with a slash, every 10 seconds and at the end.
    #[arg(long, value_name = "ADDR | FILE", value_parser = metrics::Target::parse)]
    metrics: Option<metrics::Target>,

    /// Check every free: a double free, or a free of an invalid address, ends the program. Slower.
    #[arg(long)]
    check: bool,

    /// Use no huge pages for the allocator's memory, whatever the machine's setting.
    #[arg(long)]
    no_huge: bool,

    /// Allow huge pages only where the program or Pagemill requests them (madvise), whatever the machine's setting.
    /// Needs Linux 6.18.
    #[arg(long, conflicts_with = "no_huge")]
    huge_advised: bool,

    /// Act as if the machine had this many NUMA nodes, to test node code.
    #[arg(long, value_name = "COUNT", hide = true, value_parser = clap::value_parser!(u32).range(1..=64))]
    nodes: Option<u32>,

    /// The program and its arguments.
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

fn parse_page_size(text: &str) -> Result<PageSize, String> {
    text.parse()
}

/// Returns the limit of the process tree in which this command runs, if another `run` started it.
fn outer_tree_limit() -> Option<u64> {
    let folder = std::env::var(TREE_VARIABLE.to_str().unwrap_or_default()).ok()?;
    let path = CString::new(format!("{folder}/{TREE_FILE}")).ok()?;
    TreePage::join(&path).ok().map(TreePage::limit)
}

fn print_message(message: &str) {
    let _ = writeln!(std::io::stderr(), "pagemill: {message}");
}

/// The folder and the shared page of a process tree. Dropping the value removes the folder, unless a process of the
/// tree is still running.
struct Tree {
    folder: String,
    page: &'static TreePage,
}

impl Tree {
    fn new(limit: u64) -> Result<Self, String> {
        let folder = published::make_tree_folder()
            .map_err(|error| format!("no folder for the statistics of the process tree can be created: {error}"))?;
        let path = CString::new(format!("{folder}/{TREE_FILE}")).map_err(|error| error.to_string())?;
        let _ = std::fs::remove_file(format!("{folder}/{TREE_FILE}"));
        let page = TreePage::create(&path, limit).map_err(|error| error.to_string())?;
        Ok(Self { folder, page })
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        // Processes that run longer than this command still use the folder. A later command removes it.
        self.page.sweep();
        if self.page.totals().members == 0 {
            published::remove_tree_folder(&self.folder);
        }
    }
}

/// The limits of the program in bytes. A limit is `None` if the user did not set it.
struct Limits {
    /// Limit of the memory of all allocators in the process tree (`--limit`).
    own: Option<u64>,
    /// Limit that the kernel enforces on the process tree (`--limit-kernel`).
    kernel: Option<u64>,
}

/// A program that `run` has started.
struct RunningProgram<'tree> {
    child: RunningChild,
    start: Instant,
    folder: Option<&'tree str>,
    memory: Option<TreeMemory>,
    /// Whether a report has a time line of the returned bytes.
    is_reported: bool,
}

/// What the user wants to know about the program's memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Watch {
    Nothing,
    /// Whether memory outside the allocators exceeds the limit.
    Excess,
    Report,
}

impl<'tree> RunningProgram<'tree> {
    /// Starts the program. The memory of its process tree is sampled until it ends, unless `watch` is `Nothing`.
    ///
    /// # Errors
    ///
    /// The exit status for `run` and a message.
    fn start(
        program: &child::Program,
        tree: Option<&'tree Tree>,
        kernel: Option<&KernelLimit>,
        held: BlockedSignals,
        watch: Watch,
    ) -> Result<Self, (u8, String)> {
        let group = kernel.map(KernelLimit::open_procs_file).transpose().map_err(|message| (126, message))?.flatten();
        let inside = if group.is_some() { " (inside its control group)" } else { "" };
        let start = Instant::now();
        let child = child::spawn(program, group.as_ref(), held).map_err(|error| {
            let status = if error.kind() == ErrorKind::NotFound { 127 } else { 126 };
            (status, format!("the program cannot be started{inside}: {error}"))
        })?;
        let watched = tree.filter(|_| watch != Watch::Nothing);
        let memory = watched.map(|tree| TreeMemory::new(tree.page, child.id(), start));
        let folder = tree.map(|tree| tree.folder.as_str());
        Ok(Self { child, start, folder, memory, is_reported: watch == Watch::Report })
    }

    /// Waits until the program ends. Meanwhile samples the memory of its process tree, and adds up the statistics of
    /// ended processes.
    fn wait(self, program: &OsStr) -> io::Result<(FinishedProgram<'_>, Option<TreeMemory>, CollectedStatistics)> {
        let Self { child, start, folder, mut memory, is_reported } = self;
        let mut collected = CollectedStatistics::default();
        let mut absorb_next = start + ABSORB_INTERVAL;
        let end = child.wait(|| {
            if Instant::now() >= absorb_next {
                folder.into_iter().for_each(|folder| collected.absorb_ended(folder));
                absorb_next = Instant::now() + ABSORB_INTERVAL;
            }
            if let (Some(memory), Some(folder)) = (memory.as_mut().filter(|_| is_reported), folder) {
                memory.sample_returned(|| collected.returned(folder));
            }
            memory.as_mut().map_or(ABSORB_INTERVAL, TreeMemory::sample)
        })?;
        let wall = start.elapsed();
        folder.into_iter().for_each(|folder| collected.absorb_ended(folder));
        if let Some(memory) = &mut memory {
            memory.record_program_end(end.max_resident_bytes);
            let returned = folder.filter(|_| is_reported).map(|folder| collected.returned(folder));
            returned.into_iter().for_each(|returned| memory.timeline.record_returned(wall, returned));
        }
        Ok((FinishedProgram { program, end, wall }, memory, collected))
    }
}

/// Where the report is written.
struct Outputs {
    /// The file for the text or JSON; `None` for standard error.
    text: Option<File>,
    html: Option<File>,
    /// Whether the report is only written as an HTML page.
    only_html: bool,
}

impl Outputs {
    /// Writes the report everywhere, also after an error, which is returned.
    fn write(&mut self, report: &Report, as_json: bool) -> io::Result<()> {
        let page = self.html.as_mut().map_or(Ok(()), |file| file.write_all(report.html().as_bytes()));
        let text = if self.only_html { Ok(()) } else { report.write(as_json, self.text.as_mut()) };
        page.and(text)
    }
}

/// Prints a message if memory outside the allocator exceeded `--limit` by a notable amount. Prints another one if the
/// kernel killed processes at `--limit-kernel`. Called when no report is printed.
fn report_limit_effects(memory: Option<&TreeMemory>, kernel: Option<&KernelLimitResult>) {
    if let Some(excess) = memory.and_then(|memory| memory.peak.excess.as_ref()).filter(|excess| is_notable(excess)) {
        print_message(&format!(
            "memory outside the allocator exceeded --limit {} by {}: {} (--limit-kernel limits all memory)",
            Bytes(excess.limit_bytes),
            Bytes(excess.bytes_over_limit()),
            report::describe_excess(excess),
        ));
    }
    if let Some(kernel) = kernel
        && let Some(kills) = kernel.statistics.kills.filter(|kills| *kills > 0)
    {
        let processes = if kills == 1 { "process" } else { "processes" };
        print_message(&format!(
            "the kernel killed {kills} {processes} at --limit-kernel {}",
            Bytes(kernel.limit_bytes)
        ));
    }
}

/// Returns whether an excess over `--limit` is large enough for a message. A small excess is usual, because stacks and
/// library data are outside the allocator.
fn is_notable(excess: &Excess) -> bool {
    let usual = (excess.limit_bytes / 16).max(8 << 20);
    excess.bytes_over_limit().min(excess.bytes_outside_allocators()) > usual
}

fn os_string(value: impl ToString) -> OsString {
    value.to_string().into()
}

impl Run {
    pub fn main(self) -> ExitCode {
        match self.run() {
            Ok(code) | Err(code) => code,
        }
    }

    fn run(mut self) -> Result<ExitCode, ExitCode> {
        self.read_environment().map_err(|message| fail(2, &message))?;
        if self.huge_advised {
            process::allow_huge_where_advised()
                .map_err(|error| fail(2, &format!("--huge-advised needs Linux 6.18: {error}")))?;
        }
        let name = &self.program[0].clone();
        let path = elf::find_program(name).ok_or_else(|| fail(127, &format!("{}: no such program", name.display())))?;
        let mut limits = self.resolve_limits().map_err(|message| fail(2, &message))?;
        let obstacle = self.check_obstacle(&path, &limits).map_err(|message| fail(126, &message))?;
        // Signals are blocked before any thread starts, so that all threads block them.
        let held = BlockedSignals::begin();
        let ram_size = || self.ram_size.unwrap_or_else(pagemill_tmpfs::mounting::default_size);
        let ram = self.ram.as_ref().map(|dir| Ram::mount(dir, ram_size())).transpose();
        let _ram = ram.map_err(|message| fail(2, &message))?;
        let mut output = self.open_outputs().map_err(|message| fail(2, &message))?;
        let metrics = self.metrics.as_ref().map(metrics::Target::open).transpose();
        let metrics = metrics.map_err(|message| fail(2, &message))?;
        // The loader of another C library would end the program, because it cannot load the preload library.
        let is_loadable = obstacle != Some(Obstacle::OtherCLibrary);
        let library = is_loadable.then(preload::locate_library).transpose().map_err(|message| fail(126, &message))?;
        let tree = self.create_tree(&mut limits).map_err(|message| fail(126, &message))?;
        let kernel = limits.kernel.map(KernelLimit::new).transpose().map_err(|message| fail(126, &message))?;
        let publisher =
            metrics.map(|target| metrics::Publisher::start(target, Source::new(Scope::OwnTree))).transpose();
        let publisher = publisher.map_err(|error| fail(126, &format!("no thread for the metrics: {error}")))?;

        let folder = tree.as_ref().map(|tree| tree.folder.as_str());
        let command = self.child_program(&path, library.as_deref(), folder, limits.own, kernel.as_ref());
        let command = command.map_err(|error| fail(126, &format!("{}: {error}", name.display())))?;
        let watch = match (self.wants_report(), limits.own) {
            (true, _) => Watch::Report,
            (false, Some(_)) => Watch::Excess,
            (false, None) => Watch::Nothing,
        };
        let run = RunningProgram::start(&command, tree.as_ref(), kernel.as_ref(), held, watch)
            .map_err(|(status, message)| fail(status, &format!("{}: {message}", name.display())))?;
        let (ran, memory, collected) =
            run.wait(name).map_err(|error| fail(126, &format!("waiting for {}: {error}", name.display())))?;
        drop(publisher);
        let code = ExitCode::from(ran.end.code as u8);
        if ran.end.signal == Some(libc::SIGSYS) {
            print_message(&format!(
                "a system call filter (seccomp) ended {}: the filter may forbid a call of the allocator (docs/kernel.md)",
                name.display()
            ));
        }
        let kernel = kernel
            .as_ref()
            .zip(limits.kernel)
            .map(|(kernel, limit_bytes)| KernelLimitResult { limit_bytes, statistics: kernel.statistics() });
        match tree.as_ref().zip(memory.as_ref()) {
            Some((tree, memory)) if self.wants_report() => {
                let report = Report::new(ran, tree.page, &tree.folder, memory, collected, kernel);
                // The program has run, so `run` returns the program's status even if writing the report fails.
                let written = output.write(&report, self.json);
                if let Err(error) = written {
                    print_message(&format!("the report cannot be written: {error}"));
                }
            }
            _ => report_limit_effects(memory.as_ref(), kernel.as_ref()),
        }
        Ok(code)
    }

    fn resolve_limits(&self) -> Result<Limits, String> {
        let resolve = |size: Option<LimitSize>| size.map(LimitSize::resolve).transpose();
        Ok(Limits { own: resolve(self.limit)?, kernel: resolve(self.limit_kernel)? })
    }

    /// Returns an error if a limit would have no effect on the program. Without such a limit, warns about a program
    /// whose allocator cannot be replaced, and returns the obstacle.
    fn check_obstacle(&self, path: &Path, limits: &Limits) -> Result<Option<Obstacle>, String> {
        let Some(obstacle) = elf::obstacle(path) else { return Ok(None) };
        if obstacle == Obstacle::NeedsSanitizer {
            return Err(obstacle.refusal(path));
        }
        let is_bounded = limits.kernel.is_some() || kernel_limit::is_inside_limit();
        if limits.own.is_some() && !is_bounded && !self.force {
            return Err(obstacle.refusal(path));
        }
        print_message(&obstacle.warning(path));
        Ok(Some(obstacle))
    }

    fn wants_report(&self) -> bool {
        self.report || self.json || self.output.is_some() || self.html.is_some()
    }

    fn needs_own_tree(&self) -> bool {
        self.wants_report() || self.metrics.is_some()
    }

    /// Reads the environment variables that stand for options, for options that are not given. An empty variable counts
    /// as unset.
    fn read_environment(&mut self) -> Result<(), String> {
        fn value<T>(name: &str, parse: impl Fn(&str) -> Result<T, String>) -> Result<Option<T>, String> {
            let text = std::env::var(name).unwrap_or_default();
            if text.is_empty() {
                return Ok(None);
            }
            parse(&text).map(Some).map_err(|message| format!("{name}: {message}"))
        }
        self.limit = self.limit.or(value("PAGEMILL_LIMIT", str::parse)?);
        self.page_size = self.page_size.or(value("PAGEMILL_PAGE_SIZE", parse_page_size)?);
        self.after = self.after.or(value("PAGEMILL_AFTER", parse_bytes)?);
        let parse_return = |text: &str| Return::parse(text).map_err(|error| error.to_string());
        self.return_after = self.return_after.or(value("PAGEMILL_RETURN", parse_return)?);
        // Each process's allocator also reads these variables. Inside a process tree, the allocators do not report
        // invalid values, since every process would report them. So this command does.
        value("PAGEMILL_IDLE", |text| if text == "off" { Ok(0) } else { parse_bytes(text) })?;
        value("PAGEMILL_NODES", |text| text.parse::<usize>().map_err(|error| error.to_string()))?;
        for (name, words) in KEYWORD_VARIABLES {
            value(name, |text| {
                if words.contains(&text) { Ok(()) } else { Err(format!("expected one of {}", words.join(", "))) }
            })?;
        }
        Ok(())
    }

    /// Opens the files for the report before the program runs, so that an error is reported at once.
    fn open_outputs(&self) -> Result<Outputs, String> {
        let open = |path: &PathBuf| {
            File::create(path).map_err(|error| format!("the report cannot be written to {}: {error}", path.display()))
        };
        let is_same = self.output.is_some() && self.output == self.html;
        if is_same {
            return Err("--output and --html name the same file".to_owned());
        }
        let only_html = !(self.report || self.json || self.output.is_some());
        Ok(Outputs {
            text: self.output.as_ref().map(open).transpose()?,
            html: self.html.as_ref().map(open).transpose()?,
            only_html,
        })
    }

    /// Creates the process tree. Returns `None` if the program joins the process tree of an outer `run`: inside another
    /// `run`, unless this `run` has a lower limit, a report or metrics. If the tree cannot be created, returns an error if
    /// there is a limit, a report or metrics, otherwise `None`.
    fn create_tree(&self, limits: &mut Limits) -> Result<Option<Tree>, String> {
        if let Some(outer) = outer_tree_limit() {
            let limit = limits.own.unwrap_or(outer);
            if limit >= outer && !self.needs_own_tree() {
                limits.own = Some(outer).filter(|limit| *limit != UNLIMITED);
                return Ok(None);
            }
            if limit > outer {
                print_message(&format!(
                    "--limit {} is reduced to {}, the limit of the outer run",
                    Bytes(limit),
                    Bytes(outer)
                ));
            }
            limits.own = Some(limit.min(outer)).filter(|limit| *limit != UNLIMITED);
        }
        match Tree::new(limits.own.unwrap_or(UNLIMITED)) {
            Ok(tree) => Ok(Some(tree)),
            Err(message) if limits.own.is_some() || self.needs_own_tree() => Err(message),
            Err(message) => {
                print_message(&format!("{message}; without it, the processes cannot make each other return memory"));
                Ok(None)
            }
        }
    }

    /// Returns the program with environment variables that load the allocator into the program and its children.
    fn child_program(
        &self,
        path: &Path,
        library: Option<&Path>,
        tree: Option<&str>,
        limit: Option<u64>,
        kernel: Option<&KernelLimit>,
    ) -> io::Result<child::Program> {
        let mut preloads = library.map(OsString::from).unwrap_or_default();
        if let Some(others) = std::env::var_os("LD_PRELOAD") {
            // Inside another `run`, the variable may already contain the library, with this or another path.
            let others = others.to_string_lossy().into_owned();
            for other in others.split([' ', ':']).filter(|path| !path.is_empty() && !preload::is_library(path)) {
                preloads.push(":");
                preloads.push(other);
            }
        }
        let mut environment: BTreeMap<OsString, OsString> = std::env::vars_os().collect();
        let mut set = |name: &str, value: Option<OsString>| {
            if let Some(value) = value {
                environment.insert(name.into(), value);
            }
        };
        set("LD_PRELOAD", Some(preloads));
        set(TREE_VARIABLE.to_str().unwrap_or_default(), tree.map(OsString::from));
        set("PAGEMILL_LIMIT", limit.map(os_string));
        set("PAGEMILL_AFTER", self.after.map(os_string));
        set("PAGEMILL_PAGE_SIZE", self.page_size.map(|page| os_string(page.bytes())));
        set("PAGEMILL_RETURN", self.return_after.map(os_string));
        set("PAGEMILL_CHECK", self.check.then(|| "1".into()));
        set("PAGEMILL_HUGE", self.no_huge.then(|| "never".into()));
        set("PAGEMILL_NODES", self.nodes.map(os_string));
        // The program is executed by the path that was found. If a launcher executes the program, the launcher gets its
        // name and looks it up.
        let launcher = kernel.map(KernelLimit::launcher).unwrap_or_default();
        let executed = launcher.first().map_or_else(|| path.into(), OsString::from);
        let arguments = launcher.iter().map(OsString::from).chain(self.program.iter().cloned());
        child::Program::new(executed, arguments, environment)
    }
}
