//! `pagemill metrics`: all counters as text for monitoring systems. `pagemill run --metrics` and `pagemill mount
//! --metrics` publish the metrics of one process tree or of one mount while they run.

mod mounts;
mod pages;
mod processes;

use crate::fail;
use crate::http::{self, Limits};
use pagemill_core::metrics::{self, Exposition, Format};
use pagemill_core::published;
use pagemill_tmpfs::mounting;
use processes::{FiguresReader, Selection};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write as _};
use std::net::TcpListener;
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;

/// Name of the file that `--textfile` writes. The textfile collector of node_exporter reads files named `*.prom`.
const TEXTFILE_NAME: &str = "pagemill.prom";

/// Interval in seconds at which `run --metrics FILE` and `mount --metrics FILE` write the file.
const FILE_INTERVAL_SECONDS: u32 = 10;

/// Number of processes with samples of their own, if the user sets none.
const DEFAULT_PROCESSES: usize = 20;

/// Bounds of the server. No page needs a body.
const SERVER_LIMITS: Limits = Limits { clients: 8, body_bytes: 0 };

/// Host of an address that consists of a port.
const DEFAULT_HOST: &str = "127.0.0.1";

#[derive(clap::Args)]
#[command(after_help = "\
Without --listen and --textfile, the metrics are printed once, in the format OpenMetrics. They contain all counters of \
the processes that `pagemill meminfo` shows, and those of process trees and mounts. The labels `pid` and `comm` \
distinguish the processes; all processes beyond --processes are summed up as `other`. The server also sends the text \
format of Prometheus, if the client prefers it.

Examples:
  pagemill metrics --listen 9464                                          http://127.0.0.1:9464/metrics
  pagemill metrics --textfile /var/lib/prometheus/node-exporter --every 15")]
pub struct Metrics {
    /// Serve the metrics at http://ADDR/metrics until Ctrl-C. ADDR is PORT (of 127.0.0.1) or HOST:PORT.
    #[arg(long, value_name = "ADDR", value_parser = parse_address, conflicts_with = "textfile")]
    listen: Option<String>,
    /// Write the metrics to DIR/pagemill.prom, in the text format of Prometheus. The file is replaced as a whole.
    #[arg(long, value_name = "DIR")]
    textfile: Option<PathBuf>,
    /// With --textfile: write the file again each time that so many seconds have passed, until Ctrl-C.
    #[arg(long, value_name = "SECONDS", requires = "textfile", value_parser = clap::value_parser!(u32).range(1..))]
    every: Option<u32>,
    /// Number of processes with samples of their own. The largest are chosen, and keep their samples until they end.
    #[arg(long, value_name = "COUNT", default_value_t = DEFAULT_PROCESSES)]
    processes: usize,
    /// Print the text format of Prometheus instead of OpenMetrics.
    #[arg(long, conflicts_with_all = ["listen", "textfile"])]
    prometheus: bool,
}

/// Where `run --metrics` and `mount --metrics` publish metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// Served over HTTP at this address.
    Address(String),
    /// Written to this file, in the text format of Prometheus.
    File(PathBuf),
}

impl Target {
    /// Parses `PORT`, `HOST:PORT`, or a path with a slash.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.contains('/') {
            return Ok(Self::File(PathBuf::from(text)));
        }
        let address = parse_address(text);
        address.map(Self::Address).map_err(|why| format!("{why}, or a path with a slash, such as ./metrics.prom"))
    }

    /// Binds the address, or checks that the file can be written. Prints the URL if the system chooses the port.
    ///
    /// # Errors
    ///
    /// A message with the cause.
    pub fn open(&self) -> Result<OpenTarget, String> {
        match self {
            Self::Address(address) => {
                let target = OpenTarget::Listener(listen_at(address)?);
                if let Some(url) = target.url().filter(|_| address.ends_with(":0")) {
                    print_message(&format!("metrics: {url}"));
                }
                Ok(target)
            }
            Self::File(path) => {
                write_atomically(path, "")?;
                Ok(OpenTarget::File(path.clone(), FILE_INTERVAL_SECONDS))
            }
        }
    }
}

fn parse_address(text: &str) -> Result<String, String> {
    let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok();
    match text.rsplit_once(':') {
        None if is_port(text) => Ok(format!("{DEFAULT_HOST}:{text}")),
        Some((host, port)) if !host.is_empty() && is_port(port) => Ok(text.to_owned()),
        _ => Err("expected PORT or HOST:PORT, such as 9464 or 0.0.0.0:9464".to_owned()),
    }
}

fn listen_at(address: &str) -> Result<TcpListener, String> {
    TcpListener::bind(address).map_err(|error| {
        let hint = match error.kind() {
            ErrorKind::AddrInUse => "; another program uses it (port 0 chooses a free one)",
            _ => "",
        };
        format!("the metrics cannot be served at {address}: {error}{hint}")
    })
}

/// An address that is bound, or a file that can be written, and after how many seconds it is written again.
pub enum OpenTarget {
    Listener(TcpListener),
    File(PathBuf, u32),
}

impl OpenTarget {
    /// Returns the URL of the metrics, or `None` for a file.
    pub fn url(&self) -> Option<String> {
        match self {
            Self::Listener(listener) => Some(format!("http://{}/metrics", listener.local_addr().ok()?)),
            Self::File(..) => None,
        }
    }
}

/// What the metrics describe.
pub enum Scope {
    /// All processes, trees and mounts that this user may read.
    All,
    /// The process tree of this `pagemill run`.
    OwnTree,
    /// The mount with this mount point and device.
    Mount(PathBuf, u64),
}

/// Reads the figures that the metrics contain, and writes them as text.
pub struct Source {
    scope: Scope,
    selection: Selection,
    published: published::Reader,
    reader: FiguresReader,
}

impl Source {
    pub fn new(scope: Scope) -> Self {
        Self::with_processes(scope, DEFAULT_PROCESSES)
    }

    fn with_processes(scope: Scope, max_named: usize) -> Self {
        let (published, reader) = (published::Reader::default(), FiguresReader::default());
        Self { scope, selection: Selection::new(max_named), published, reader }
    }

    fn text(&mut self, format: Format) -> String {
        let mut text = Exposition::new(format);
        metrics::write_build_info(&mut text);
        match &self.scope {
            Scope::All => {
                let published = self.published.read().into_iter().filter_map(|reading| reading.process);
                let running = self.reader.figures(published.collect());
                processes::write_processes(&mut text, &mut self.selection, running);
                processes::write_trees(&mut text, published::read_trees(self.published.trees()));
                let visible = mounting::all_devices().into_iter().filter_map(|(device, point)| Some((point?, device)));
                mounts::write_mounts(&mut text, &mounts::request_all(visible.collect()));
            }
            Scope::OwnTree => {
                let running = self.reader.figures(published::read_tree(std::process::id()).unwrap_or_default());
                processes::write_processes(&mut text, &mut self.selection, running);
                processes::write_trees(&mut text, processes::own_tree());
            }
            Scope::Mount(point, device) => {
                mounts::write_mounts(&mut text, &mounts::request_all(vec![(point.clone(), *device)]));
            }
        }
        text.finish()
    }
}

/// A thread that serves metrics, or writes them to a file from time to time. Dropping the value ends the thread. A file
/// is written once more then.
pub struct Publisher {
    /// Closing this end of the socket wakes the thread, which then ends.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Publisher {
    /// Starts the thread. Signals that the calling thread blocks are blocked in the new thread, too.
    ///
    /// # Errors
    ///
    /// Errors of creating the thread.
    pub fn start(target: OpenTarget, source: Source) -> io::Result<Self> {
        let (stop, stopped) = UnixStream::pair()?;
        let work = move || match target {
            OpenTarget::Listener(listener) => {
                let source = Mutex::new(source);
                let page = |format| source.lock().unwrap_or_else(PoisonError::into_inner).text(format);
                let respond = |request: &http::Request| pages::respond(request, &page);
                if let Err(error) = http::serve(&listener, &stopped, SERVER_LIMITS, &respond) {
                    print_message(&format!("the metrics are not served any more: {error}"));
                }
            }
            OpenTarget::File(path, interval_seconds) => write_repeatedly(&path, interval_seconds, &stopped, source),
        };
        let thread = std::thread::Builder::new().name("metrics".into()).spawn(work)?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn print_message(message: &str) {
    let _ = writeln!(io::stderr(), "pagemill: {message}");
}

/// Writes the metrics to a file at once, then at intervals, and when the other end of `stopped` is closed.
fn write_repeatedly(path: &Path, interval_seconds: u32, stopped: &UnixStream, mut source: Source) {
    let timeout = Timespec { tv_sec: i64::from(interval_seconds), tv_nsec: 0 };
    let (mut is_last, mut has_failed) = (false, false);
    loop {
        match write_atomically(path, &source.text(Format::Prometheus)) {
            // A failure that repeats is reported once.
            Err(message) if !has_failed => {
                has_failed = true;
                print_message(&message);
            }
            Err(_) => {}
            Ok(()) => has_failed = false,
        }
        if is_last {
            return;
        }
        is_last = match poll(&mut [PollFd::new(stopped, PollFlags::IN)], Some(&timeout)) {
            Ok(ready) => ready > 0,
            Err(rustix::io::Errno::INTR) => false,
            Err(_) => true,
        };
    }
}

/// Replaces the contents of a file, so that a reader sees the old or the new contents.
fn write_atomically(path: &Path, text: &str) -> Result<(), String> {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
    let Some(name) = name else { return Err(format!("{} is not the path of a file", path.display())) };
    // The name of the temporary file does not end with `.prom`, so a collector does not read it.
    let temporary = path.with_file_name(format!(".{name}.{}", std::process::id()));
    // A file of this name can only be left by a killed process that had the same id.
    let _ = fs::remove_file(&temporary);
    let write = || -> io::Result<()> {
        let mut file = File::options().write(true).create_new(true).mode(0o644).open(&temporary)?;
        file.write_all(text.as_bytes())?;
        fs::rename(&temporary, path)
    };
    write().map_err(|error| {
        let _ = fs::remove_file(&temporary);
        format!("the metrics cannot be written to {}: {error}", path.display())
    })
}

impl Metrics {
    pub fn main(&self) -> ExitCode {
        let source = Source::with_processes(Scope::All, self.processes);
        match (&self.listen, &self.textfile) {
            (Some(address), _) => match listen_at(address) {
                Ok(listener) => publish_until_signal(OpenTarget::Listener(listener), source),
                Err(message) => fail(2, &message),
            },
            (None, Some(folder)) => self.write_textfile(&folder.join(TEXTFILE_NAME), source),
            (None, None) => self.print(source),
        }
    }

    fn print(&self, mut source: Source) -> ExitCode {
        let text = source.text(if self.prometheus { Format::Prometheus } else { Format::OpenMetrics });
        let mut out = io::stdout().lock();
        match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            Err(error) if error.kind() != ErrorKind::BrokenPipe => {
                fail(1, &format!("the metrics cannot be written: {error}"))
            }
            _ => ExitCode::SUCCESS,
        }
    }

    fn write_textfile(&self, path: &Path, mut source: Source) -> ExitCode {
        // The first text is written here, so that an error ends the command.
        if let Err(message) = write_atomically(path, &source.text(Format::Prometheus)) {
            return fail(2, &message);
        }
        match self.every {
            Some(seconds) => publish_until_signal(OpenTarget::File(path.to_owned(), seconds), source),
            None => ExitCode::SUCCESS,
        }
    }
}

/// Publishes metrics until SIGINT, SIGTERM or SIGHUP arrives.
fn publish_until_signal(target: OpenTarget, source: Source) -> ExitCode {
    let mut signals = match Signals::new([SIGINT, SIGTERM, SIGHUP]) {
        Ok(signals) => signals,
        Err(error) => return fail(2, &format!("signals cannot be handled: {error}")),
    };
    if let Some(url) = target.url() {
        let _ = writeln!(io::stdout(), "{url}; Ctrl-C ends the server");
        let _ = io::stdout().flush();
    }
    let publisher = match Publisher::start(target, source) {
        Ok(publisher) => publisher,
        Err(error) => return fail(2, &format!("no thread for the metrics can be started: {error}")),
    };
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    signals.forever().next();
    drop(publisher);
    ExitCode::SUCCESS
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An address, a port and a path must be distinguished. Other texts must be refused.
    #[test]
    fn targets_are_parsed() {
        let address = |text: &str| Ok(Target::Address(text.to_owned()));
        assert_eq!(Target::parse("9464"), address("127.0.0.1:9464"));
        assert_eq!(Target::parse("[::1]:80"), address("[::1]:80"));
        assert_eq!(Target::parse("./a:1"), Ok(Target::File("./a:1".into())));
        for wrong in ["", "a", ":80", "65536", "+1", "a:", "metrics.prom"] {
            assert!(Target::parse(wrong).is_err(), "{wrong}");
        }
    }

    /// A file must be replaced as a whole, and readable for all users. If that fails, no temporary file must be left.
    #[test]
    fn files_are_replaced_as_a_whole() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.prom");
        let leftover = folder.path().join(format!(".a.prom.{}", std::process::id()));
        fs::write(&leftover, "left by a killed process").unwrap();
        for text in ["first\n", "2\n"] {
            write_atomically(&path, text).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o444, 0o444);
        fs::create_dir(folder.path().join("b.prom")).unwrap();
        for wrong in [folder.path().join("b.prom"), folder.path().join("none/a.prom"), "/".into()] {
            assert!(write_atomically(&wrong, "x").is_err(), "{}", wrong.display());
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
