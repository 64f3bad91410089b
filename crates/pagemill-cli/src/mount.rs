//! `pagemill mount | purge | umount`: a RAM file system whose memory can be reclaimed, or one through FUSE.

pub mod fuse;

use crate::fail;
use crate::metrics::{self, OpenTarget, Publisher, Scope, Source};
use pagemill_core::units::{Bytes, parse_bytes};
use pagemill_sys::cgroup::Hierarchy;
use pagemill_tmpfs::control::{self, ControlLoopThread, EndReason, RequestOutcome, Server, Until};
use pagemill_tmpfs::control_loop::Settings;
use pagemill_tmpfs::messages::print_message;
use pagemill_tmpfs::mounting::{self, MountRequest, Mounted, Refusal};
use serde_json::json;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// Time for which the controller retries to unmount a busy file system when it ends.
const UNMOUNT_RETRY_TIME: Duration = Duration::from_secs(5);

/// Memory is used and returned as files are created and removed. Needs root, unless --fuse is given. Files with the
/// attribute user.pagemill.volatile, or below a folder with it, may be purged before a limit is reached: `full` as a
/// whole, `partial` from the end (`pagemill mark`).
///
/// The file system has one size. Near the limit of a memory control group, the size is reduced, so that writers of the
/// group usually get ENOSPC before the kernel kills them. The reduced size then applies to all writers.
///
/// Runs until it is unmounted: by Ctrl-C, SIGTERM, `pagemill umount` or umount(8), and without --daemon also by SIGHUP (a
/// closed terminal). All files are lost then. If the file system is busy, it stays mounted after a signal. Mounting again after a controller
/// was killed takes over the mount, with its size. A --daemon in a private mount namespace ends with the last other
/// process there.
///
/// With --fuse this process itself is the file system. That works for users without privileges, too, but is slower for
/// most operations (docs/mount-fuse.md), and the files are lost when the process ends.
#[derive(clap::Args)]
pub struct Mount {
    /// The mount point: an empty folder.
    dir: PathBuf,
    /// Maximum memory for files, such as 8G or 512M [default: half of the machine's memory, or the size last requested
    /// if a mount without a controller is taken over]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    size: Option<u64>,
    /// A control group whose memory limit is watched even before a process of the group writes files here: its folder
    /// or its name. Can be given several times.
    #[arg(long, value_name = "GROUP")]
    cgroup: Vec<PathBuf>,
    /// Permissions of the file system's root, in octal [default: 1777]
    #[arg(long, value_name = "MODE", value_parser = parse_mode)]
    mode: Option<u32>,
    /// Publish the metrics of this mount: at http://ADDR/metrics (ADDR is PORT or HOST:PORT), or in a file, given as a
    /// path with a slash, every 10 seconds and at the end.
    #[arg(long, value_name = "ADDR | FILE", value_parser = metrics::Target::parse)]
    metrics: Option<metrics::Target>,
    /// Return once the file system is mounted; the controller continues in the background.
    #[arg(long)]
    daemon: bool,
    /// Serve the files from this process through FUSE, instead of mounting a tmpfs. Without privileges this needs the
    /// program fusermount3, and only this user can use the files. No file can be volatile.
    #[arg(long, conflicts_with_all = ["cgroup", "metrics"])]
    fuse: bool,
    /// Number of threads that answer requests with --fuse [default: one for each CPU, at most 4]
    #[arg(long, value_name = "COUNT", requires = "fuse", value_parser = clap::value_parser!(u16).range(1..=64))]
    threads: Option<u16>,
    /// Maximum number of files, folders and links with --fuse [default: one for each KiB of --size, and one for each 16 KiB
    /// of --spill-size]
    #[arg(long, value_name = "COUNT", requires = "fuse", value_parser = clap::value_parser!(u64).range(2..))]
    inodes: Option<u64>,
    /// With --fuse: when the memory of --size is used up, move parts of files that were not used recently to this folder
    /// on a disk. Without it, writes then fail with "no space left". Parts come back when they are used. The data lie
    /// in a file without a name, which the kernel frees when this process ends.
    #[arg(long, value_name = "DIR", requires = "fuse")]
    spill: Option<PathBuf>,
    /// Maximum space in the folder of --spill, at most what is free there now [default: all that is free there now]
    #[arg(long, value_name = "SIZE", requires = "spill", value_parser = parse_bytes)]
    spill_size: Option<u64>,
    /// Print the mount as one JSON object.
    #[arg(long)]
    json: bool,
    /// Internal: this process is the background process that --daemon started.
    #[arg(long, hide = true)]
    as_daemon: bool,
}

/// Parses permissions in octal.
pub fn parse_mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o7777);
    mode.ok_or_else(|| format!("{text} is not a mode: octal, up to 7777"))
}

/// Returns the command line of a mount's worker process.
pub fn worker_program() -> Vec<OsString> {
    let own = std::env::current_exe().map_or_else(|_| "/proc/self/exe".into(), PathBuf::into_os_string);
    vec![own, "mount-worker".into()]
}

/// The main function of the hidden command `mount-worker`, which runs the worker of a mount.
pub fn worker() -> ExitCode {
    match pagemill_tmpfs::worker::serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(1, &format!("mount-worker: {error}")),
    }
}

/// Returns the folder of a control group, which the user named by its folder or its name.
fn group_folder(given: &Path) -> Result<String, String> {
    let name = given.strip_prefix("/").unwrap_or(given);
    let [first, second] = ["/sys/fs/cgroup/memory", "/sys/fs/cgroup"].map(|mount| Path::new(mount).join(name));
    let is_group = |path: &Path| Hierarchy::find_at("", &path.to_string_lossy()).is_ok();
    let found = [given, &first, &second].into_iter().find(|path| is_group(path));
    found.map(|path| path.to_string_lossy().into_owned()).ok_or_else(|| {
        let (given, first, second) = (given.display(), first.display(), second.display());
        format!("--cgroup {given}: there is no such memory control group (also tried: {first}, {second})")
    })
}

impl Mount {
    pub fn main(self) -> ExitCode {
        if self.daemon {
            return self.start_daemon();
        }
        if self.as_daemon {
            let _ = rustix::process::setsid();
        }
        // The handlers are installed before the mount. A signal during the mount is then recorded and does not
        // interrupt the mount.
        let signals = match Signals::new([SIGINT, SIGTERM, SIGHUP]) {
            Ok(signals) => signals,
            Err(error) => return report_error(2, self.json, &format!("signals cannot be handled: {error}")),
        };
        if let Err(why) = fuse::remove_dead_mounts(&self.dir) {
            return report_error(2, self.json, &why);
        }
        if self.fuse {
            return self.main_of_fuse(signals);
        }
        let groups = match self.cgroup.iter().map(|group| group_folder(group)).collect() {
            Ok(groups) => groups,
            Err(why) => return report_error(2, self.json, &why),
        };
        let metrics = match self.metrics.as_ref().map(metrics::Target::open).transpose() {
            Ok(metrics) => metrics,
            Err(why) => return report_error(2, self.json, &why),
        };
        let mode = self.mode.unwrap_or(0o1777);
        let request = MountRequest { point: self.dir.clone(), size_bytes: self.size, mode };
        match request.mount() {
            Ok(mounted) => self.run_controller(groups, mounted, signals, metrics),
            Err(refusal) => report_error(2, self.json, &self.hint_of(&refusal)),
        }
    }

    /// Returns the text of a refusal, with the command that creates a missing mount point.
    fn hint_of(&self, refusal: &Refusal) -> String {
        match refusal {
            Refusal::Missing(_) => format!("{refusal}: mkdir -p '{}'", self.dir.display()),
            _ => refusal.to_string(),
        }
    }

    /// Runs the controller until the mount ends, then unmounts the file system.
    fn run_controller(
        &self,
        groups: Vec<String>,
        mounted: Mounted,
        mut signals: Signals,
        metrics: Option<OpenTarget>,
    ) -> ExitCode {
        let Mounted { point, access, size_bytes, was_taken_over, has_no_huge } = mounted;
        let device = access.device();
        let until = if self.as_daemon { Until::Abandoned } else { Until::Unmounted };
        let settings = Settings { mount_point: point.clone(), size_bytes, groups, worker: worker_program() };
        let (ends, end) = mpsc::channel();
        let signalled = ends.clone();
        let handle = signals.handle();
        let started = ControlLoopThread::start(settings, access).and_then(|control_loop| {
            let server = Server::start(&control_loop, device, until, ends)?;
            std::thread::Builder::new().name("signals".into()).spawn(move || {
                // A closed terminal sends SIGHUP. It must not end a daemon; every other signal does.
                while signals.forever().next().is_some_and(|signal| signalled.send(EndReason::Signal(signal)).is_ok()) {
                }
            })?;
            let source = Source::new(Scope::Mount(point.clone(), device));
            let publisher = metrics.map(|target| Publisher::start(target, source)).transpose()?;
            Ok((control_loop, server, publisher))
        });
        let (control_loop, server, publisher) = match started {
            Ok(started) => started,
            Err(error) => {
                // A mount that existed before this command stays mounted.
                if !was_taken_over {
                    let _ = control::unmount(&point, device, std::process::id(), UNMOUNT_RETRY_TIME);
                }
                let text = format!("the controller of {} cannot be started: {error}", point.display());
                return report_error(2, self.json, &text);
            }
        };
        if was_taken_over && self.mode.is_some() {
            print_message("--mode has no effect on a mount that is taken over; chmod changes its root");
        }
        if has_no_huge {
            print_message("this kernel has no huge pages for tmpfs: files stay in small ones");
        }
        self.report_ready(&point, size_bytes, was_taken_over, device);
        let status = loop {
            match end.recv() {
                Ok(EndReason::Signal(SIGHUP)) if self.as_daemon => {}
                Ok(EndReason::Signal(_) | EndReason::Abandoned) => {
                    match control::unmount(&point, device, std::process::id(), UNMOUNT_RETRY_TIME) {
                        Ok(()) => break ExitCode::SUCCESS,
                        Err(refusal) => {
                            control::report_still_mounted(&point, &refusal);
                            break ExitCode::from(1);
                        }
                    }
                }
                Ok(EndReason::Unmounted) | Err(_) => break ExitCode::SUCCESS,
            }
        };
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
        drop(publisher);
        drop(server);
        drop(control_loop);
        handle.close();
        if self.as_daemon {
            remove_empty_log(device);
        }
        status
    }

    /// Reports that the mount is ready to the user, to the process that started a daemon, and to systemd.
    fn report_ready(&self, point: &Path, size_bytes: u64, was_taken_over: bool, device: u64) {
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
        let (pid, size) = (std::process::id(), Bytes(size_bytes));
        let line = if self.json {
            let point = point.to_string_lossy();
            json!({ "mounted": point, "size_bytes": size_bytes, "controller_pid": pid, "taken_over": was_taken_over })
                .to_string()
        } else {
            let how = if was_taken_over { "taken over" } else { "mounted" };
            let end = self.end_hint(device);
            format!("{} {how}: up to {size}, controller {pid}; {end}", point.display())
        };
        let _ = writeln!(std::io::stdout(), "{line}");
        let _ = std::io::stdout().flush();
        if self.as_daemon {
            self.redirect_output_to_log(device);
        }
    }

    /// Returns the words that say how the mount ends, and where a background process writes messages.
    fn end_hint(&self, device: u64) -> String {
        if !self.as_daemon {
            return "Ctrl-C unmounts it".into();
        }
        let log = log_path(device).map_or_else(|_| String::new(), |path| format!("; messages in {}", path.display()));
        format!("`pagemill umount` ends it{log}")
    }

    /// Starts this command again as a background process, and waits until that process has mounted the file system.
    fn start_daemon(&self) -> ExitCode {
        let arguments = std::env::args_os().skip(1).filter(|argument| argument != "--daemon");
        let program = std::env::current_exe().unwrap_or_else(|_| "/proc/self/exe".into());
        let mut command = Command::new(program);
        command.args(arguments).arg("--as-daemon").stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(error) => return report_error(2, self.json, &format!("the controller cannot be started: {error}")),
        };
        let mut line = String::new();
        let _ = child.stdout.take().map(|stdout| BufReader::new(stdout).read_line(&mut line));
        print!("{line}");
        // With --json, the child process reports an error as an object, too. It has already printed the reason.
        let is_error = line.is_empty() || line.starts_with("{\"error\"");
        if !is_error {
            return ExitCode::SUCCESS;
        }
        let status = child.wait().ok().and_then(|status| status.code());
        ExitCode::from(status.and_then(|status| u8::try_from(status).ok()).unwrap_or(2))
    }

    /// Redirects standard error to a log file, which is in the folder of the controller's socket, and standard output
    /// to `/dev/null`.
    fn redirect_output_to_log(&self, device: u64) {
        let log = log_path(device).and_then(|log| File::options().create(true).append(true).open(log));
        if let Ok(log) = log {
            let _ = rustix::stdio::dup2_stderr(&log);
        }
        if let Ok(null) = File::open("/dev/null") {
            let _ = rustix::stdio::dup2_stdout(&null);
        }
    }
}

/// Removes the log of a background process if it is empty.
fn remove_empty_log(device: u64) {
    if let Ok(log) = log_path(device)
        && std::fs::metadata(&log).is_ok_and(|metadata| metadata.len() == 0)
    {
        let _ = std::fs::remove_file(log);
    }
}

fn log_path(device: u64) -> std::io::Result<PathBuf> {
    mounting::socket_path(device).map(|socket| socket.with_extension("log"))
}

/// Reports an error on standard error and, with `is_json`, also as JSON on standard output. Returns the exit status.
pub fn report_error(status: u8, is_json: bool, why: &str) -> ExitCode {
    if is_json {
        let _ = writeln!(std::io::stdout(), "{}", json!({ "error": why }));
    }
    fail(status, why)
}

/// Writes a line to standard output. A pipe that its reader has closed is not an error.
fn print_line(line: &str) -> Result<(), String> {
    match writeln!(std::io::stdout(), "{line}") {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(format!("this cannot be written: {error}")),
        _ => Ok(()),
    }
}

#[derive(clap::Args)]
pub struct Purge {
    /// The mount point.
    dir: PathBuf,
    /// How much to purge, such as 512M or 1G. The last file can be purged as a whole, so more may be purged.
    #[arg(value_parser = parse_bytes)]
    size: u64,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl Purge {
    pub fn main(&self) -> ExitCode {
        let (point, device) = match mounting::find_own_mount(&self.dir) {
            Ok(found) => found,
            Err(refusal) => return report_error(2, self.json, &refusal.to_string()),
        };
        let written = match control::request_purge(device, self.size) {
            RequestOutcome::Answer(bytes) if self.json => {
                print_line(&json!({ "asked_bytes": self.size, "purged_bytes": bytes }).to_string())
            }
            RequestOutcome::Answer(bytes) => {
                let short = if bytes < self.size { "; no further volatile file could be purged" } else { "" };
                print_line(&format!("{} purged, {} requested{short}", Bytes(bytes), Bytes(self.size)))
            }
            RequestOutcome::Refused(why) => return report_error(1, self.json, &why),
            RequestOutcome::NoController => return report_error(2, self.json, &no_controller_message(&point)),
        };
        written.map_or_else(|why| fail(1, &why), |()| ExitCode::SUCCESS)
    }
}

pub fn no_controller_message(point: &Path) -> String {
    let point = point.display();
    format!(
        "no controller of {point} answers: it is another user's, or has ended (then `pagemill mount {point}` takes over)"
    )
}

/// Unmounts a file system from `point` only, and waits until its controller has ended, since the memory becomes free
/// then. While the file system is busy, retries for the duration `retry_time`. Returns the other mount points of the
/// file system, which keep its files in memory.
///
/// # Errors
///
/// The last [`Refusal`].
pub fn unmount_and_wait(point: &Path, device: u64, retry_time: Duration) -> Result<Vec<PathBuf>, Refusal> {
    let outcome = control::request_status(device);
    let controller = match &outcome {
        RequestOutcome::Answer(status) => status.controller_pid.unwrap_or(0),
        RequestOutcome::Refused(_) | RequestOutcome::NoController => 0,
    };
    control::unmount(point, device, controller, retry_time)?;
    let begun = std::time::Instant::now();
    // A stopped controller does not end.
    if let RequestOutcome::Refused(why) = &outcome {
        print_message(&format!("{} is unmounted, but its memory stays in use: {why}", point.display()));
    }
    let is_awaited = !matches!(outcome, RequestOutcome::Refused(_));
    while is_awaited
        && !mounting::is_mounted(device)
        && mounting::is_controlled(device)
        && begun.elapsed() < UNMOUNT_RETRY_TIME
    {
        std::thread::sleep(Duration::from_millis(5));
    }
    mounting::remove_leftovers(device);
    Ok(mounting::mount_points(device))
}

#[derive(clap::Args)]
pub struct Umount {
    /// The mount point.
    dir: PathBuf,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl Umount {
    pub fn main(&self) -> ExitCode {
        const RETRY_TIME: Duration = Duration::from_millis(500);
        if let Some(found) = fuse::Found::at(&self.dir) {
            return fuse::unmount(&found, RETRY_TIME, self.json);
        }
        let (point, device) = match mounting::find_own_mount(&self.dir) {
            Ok(found) => found,
            Err(refusal) => return report_error(2, self.json, &refusal.to_string()),
        };
        let mount_points = match unmount_and_wait(&point, device, RETRY_TIME) {
            Ok(mount_points) => mount_points,
            Err(refusal) => return report_error(1, self.json, &refusal.to_string()),
        };
        let mount_points: Vec<_> = mount_points.iter().map(|point| point.display().to_string()).collect();
        let written = if self.json {
            print_line(&json!({ "unmounted": point.to_string_lossy(), "still_mounted": mount_points }).to_string())
        } else if mount_points.is_empty() {
            Ok(())
        } else {
            print_line(&format!("still mounted: {}", mount_points.join(", ")))
        };
        written.map_or_else(|why| fail(1, &why), |()| ExitCode::SUCCESS)
    }
}
