//! `pagemill mount | purge | umount`: a RAM file system that gives memory back.

use crate::fail;
use pagemill::units::{Bytes, parse_bytes};
use pagemill_mount::control::{self, End, Keeper, Reached, Server};
use pagemill_mount::mounting::{self, Mounted, Wanted};
use pagemill_mount::steward::{Settings, say};
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

/// At the end a busy mount is tried to be unmounted for so long.
const UNMOUNT_TRIES: Duration = Duration::from_secs(5);

/// Memory is taken and given back as files come and go. A file or folder with the attribute user.pagemill.volatile may
/// vanish before a limit is met: `full` as a whole, `partial` from its end; see `pagemill mark`.
///
/// The size is one for all: near a memory control group's limit it is held down so that no writer of that group is killed,
/// and everybody who writes meanwhile meets it.
///
/// Runs until it is unmounted: by Ctrl-C, SIGTERM, `pagemill umount` or umount(8). Mounting again where a controller was
/// killed takes over what is there.
#[derive(clap::Args)]
pub struct Mount {
    /// An empty folder.
    dir: PathBuf,
    /// Most memory for files (8G, 512M) [default: half of the machine's memory]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    size: Option<u64>,
    /// A memory control group whose limit is to be minded, besides those of the writers: its folder, or its name.
    #[arg(long, value_name = "GROUP")]
    cgroup: Vec<PathBuf>,
    /// Permissions of the file system's root, in octal.
    #[arg(long, value_name = "MODE", default_value = "1777", value_parser = parse_mode)]
    mode: u32,
    /// Return once it is mounted; the controller goes on by itself.
    #[arg(long)]
    daemon: bool,
    /// Say where it is mounted as one JSON object.
    #[arg(long)]
    json: bool,
    /// This is the process that --daemon leaves behind.
    #[arg(long, hide = true)]
    as_daemon: bool,
}

fn parse_mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o7777);
    mode.ok_or_else(|| format!("{text} are no permissions: octal, up to 7777"))
}

/// The command that starts the worker of a mount.
pub fn worker_program() -> Vec<OsString> {
    let own = std::env::current_exe().map_or_else(|_| "/proc/self/exe".into(), PathBuf::into_os_string);
    vec![own, "mount-worker".into()]
}

/// The hidden command itself.
pub fn worker() -> ExitCode {
    match pagemill_mount::worker::serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(1, &format!("mount-worker: {error}")),
    }
}

/// The folder of a group that is given by folder or by name.
fn group_folder(given: &Path) -> String {
    let name = given.strip_prefix("/").unwrap_or(given);
    let candidates = ["/sys/fs/cgroup/memory", "/sys/fs/cgroup"].map(|mount| Path::new(mount).join(name));
    let found = [given.to_owned()].into_iter().chain(candidates).find(|path| path.is_dir());
    found.unwrap_or_else(|| given.to_owned()).to_string_lossy().into_owned()
}

/// Half of what the machine has.
pub fn default_size() -> u64 {
    pagemill_sys::cgroup::machine("").map_or(1 << 30, |machine| machine.total_bytes / 2)
}

impl Mount {
    pub fn main(self) -> ExitCode {
        if self.daemon {
            return daemonize();
        }
        if self.as_daemon {
            let _ = rustix::process::setsid();
        }
        // Before anything is mounted: a signal that comes meanwhile is not lost, and ends nothing half-way.
        let signals = match Signals::new([SIGINT, SIGTERM, SIGHUP]) {
            Ok(signals) => signals,
            Err(error) => return fail(2, &format!("signals cannot be waited for: {error}")),
        };
        let wanted =
            Wanted { point: self.dir.clone(), size_bytes: self.size.unwrap_or_else(default_size), mode: self.mode };
        let mounted = match wanted.mount() {
            Ok(mounted) => mounted,
            Err(refusal) => return fail(2, &refusal.to_string()),
        };
        self.keep(wanted.size_bytes, mounted, signals)
    }

    /// Keeps what is mounted until its end.
    fn keep(&self, size_bytes: u64, mounted: Mounted, mut signals: Signals) -> ExitCode {
        let Mounted { point, door, was_taken_over, has_no_huge } = mounted;
        let device = door.device();
        let groups = self.cgroup.iter().map(|group| group_folder(group)).collect();
        let settings = Settings { mount_point: point.clone(), size_bytes, groups, worker: worker_program() };
        let (ends, end) = mpsc::channel();
        let signalled = ends.clone();
        let handle = signals.handle();
        let started = Keeper::start(settings, door).and_then(|keeper| {
            let server = Server::start(&keeper, device, ends)?;
            std::thread::Builder::new().name("signals".into()).spawn(move || {
                // A terminal that closes does not end a daemon, nor anything else that is asked for.
                while signals.forever().next().is_some_and(|signal| signalled.send(End::Signal(signal)).is_ok()) {}
            })?;
            Ok((keeper, server))
        });
        let (keeper, server) = match started {
            Ok(started) => started,
            Err(error) => {
                // What was there before stays.
                if !was_taken_over {
                    let _ = control::unmount(&point, device, std::process::id(), UNMOUNT_TRIES);
                }
                return fail(2, &error.to_string());
            }
        };
        if has_no_huge {
            say("this kernel has no huge pages for tmpfs: files stay in small ones");
        }
        self.tell_ready(&point, size_bytes, was_taken_over, device);
        let status = loop {
            match end.recv() {
                Ok(End::Signal(SIGHUP)) if self.as_daemon => {}
                Ok(End::Signal(_)) => match control::unmount(&point, device, std::process::id(), UNMOUNT_TRIES) {
                    Ok(()) => break ExitCode::SUCCESS,
                    Err(refusal) => {
                        control::say_left(&point, &refusal);
                        break ExitCode::from(1);
                    }
                },
                Ok(End::Unmounted) | Err(_) => break ExitCode::SUCCESS,
            }
        };
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
        drop(server);
        drop(keeper);
        handle.close();
        // Nothing was said: nobody is to find an empty file.
        if self.as_daemon
            && let Ok(log) = log_path(device)
            && std::fs::metadata(&log).is_ok_and(|metadata| metadata.len() == 0)
        {
            let _ = std::fs::remove_file(log);
        }
        status
    }

    /// Says that it is there: to people, to whoever waits for a daemon, to systemd.
    fn tell_ready(&self, point: &Path, size_bytes: u64, was_taken_over: bool, device: u64) {
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
        let (pid, size) = (std::process::id(), Bytes(size_bytes));
        let line = if self.json {
            let point = point.to_string_lossy();
            json!({ "mounted": point, "size_bytes": size_bytes, "controller_pid": pid, "taken_over": was_taken_over })
                .to_string()
        } else {
            let how = if was_taken_over { "taken over" } else { "mounted" };
            let log =
                log_path(device).map_or_else(|_| String::new(), |path| format!("; messages in {}", path.display()));
            let end =
                if self.as_daemon { format!("`pagemill umount` ends it{log}") } else { "Ctrl-C unmounts it".into() };
            format!("{} {how}: up to {size}, controller {pid}; {end}", point.display())
        };
        let _ = writeln!(std::io::stdout(), "{line}");
        let _ = std::io::stdout().flush();
        if self.as_daemon {
            self.leave_terminal(device);
        }
    }

    /// From now on messages go to a file beside the socket.
    fn leave_terminal(&self, device: u64) {
        let log = log_path(device).and_then(|log| File::options().create(true).append(true).open(log));
        if let Ok(log) = log {
            let _ = rustix::stdio::dup2_stderr(&log);
        }
        if let Ok(null) = File::open("/dev/null") {
            let _ = rustix::stdio::dup2_stdout(&null);
        }
    }
}

/// Where a daemon's messages go.
fn log_path(device: u64) -> std::io::Result<PathBuf> {
    mounting::socket_path(device).map(|socket| socket.with_extension("log"))
}

/// Starts this command again in the background and waits until it has mounted.
fn daemonize() -> ExitCode {
    let arguments = std::env::args_os().skip(1).filter(|argument| argument != "--daemon");
    let program = std::env::current_exe().unwrap_or_else(|_| "/proc/self/exe".into());
    let mut command = Command::new(program);
    command.args(arguments).arg("--as-daemon").stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return fail(2, &format!("the controller cannot be started: {error}")),
    };
    let mut line = String::new();
    let read = child.stdout.take().map(|stdout| BufReader::new(stdout).read_line(&mut line));
    if matches!(read, Some(Ok(1..))) {
        print!("{line}");
        return ExitCode::SUCCESS;
    }
    // It has said why.
    let status = child.wait().ok().and_then(|status| status.code());
    ExitCode::from(status.and_then(|status| u8::try_from(status).ok()).unwrap_or(2))
}

/// Says what went wrong: on standard error, and for machines on standard output.
pub fn refuse(status: u8, is_json: bool, why: &str) -> ExitCode {
    if is_json {
        let _ = writeln!(std::io::stdout(), "{}", json!({ "error": why }));
    }
    fail(status, why)
}

/// Writes a line to standard output; who has stopped reading is no failure.
fn tell(line: &str) -> Result<(), String> {
    match writeln!(std::io::stdout(), "{line}") {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(format!("this cannot be written: {error}")),
        _ => Ok(()),
    }
}

#[derive(clap::Args)]
pub struct Purge {
    /// Where it is mounted.
    dir: PathBuf,
    /// How much is to go (512M, 1G): whole files go, so that it may be more.
    #[arg(value_parser = parse_bytes)]
    size: u64,
    /// One JSON object.
    #[arg(long)]
    json: bool,
}

impl Purge {
    pub fn main(&self) -> ExitCode {
        let (point, device) = match mounting::find(&self.dir) {
            Ok(found) => found,
            Err(refusal) => return refuse(2, self.json, &refusal.to_string()),
        };
        let told = match control::ask_purge(device, self.size) {
            Reached::Answer(bytes) if self.json => {
                tell(&json!({ "asked_bytes": self.size, "purged_bytes": bytes }).to_string())
            }
            Reached::Answer(bytes) => {
                let short = if bytes < self.size { "; nothing else is volatile, closed and of one name" } else { "" };
                tell(&format!("{} purged, {} asked for{short}", Bytes(bytes), Bytes(self.size)))
            }
            Reached::Refused(why) => return refuse(1, self.json, &why),
            Reached::Nobody => return refuse(2, self.json, &unreachable(&point)),
        };
        told.map_or_else(|why| fail(1, &why), |()| ExitCode::SUCCESS)
    }
}

/// What can be said where no controller answers.
pub fn unreachable(point: &Path) -> String {
    let point = point.display();
    format!(
        "no controller of {point} answers: it is another user's, or has ended (then `pagemill mount {point}` takes over)"
    )
}

#[derive(clap::Args)]
pub struct Umount {
    /// Where it is mounted.
    dir: PathBuf,
    /// One JSON object.
    #[arg(long)]
    json: bool,
}

impl Umount {
    pub fn main(&self) -> ExitCode {
        const TRIES: Duration = Duration::from_millis(500);
        let (point, device) = match mounting::find(&self.dir) {
            Ok(found) => found,
            Err(refusal) => return refuse(2, self.json, &refusal.to_string()),
        };
        let controller = match control::ask_status(device) {
            Reached::Answer(status) => status.controller_pid.unwrap_or(0),
            Reached::Refused(_) | Reached::Nobody => 0,
        };
        // By who asks, and from where he asks: it may be mounted at several places.
        if let Err(refusal) = control::unmount(&point, device, controller, TRIES) {
            return refuse(1, self.json, &refusal.to_string());
        }
        // Its memory is free once the controller has ended.
        let begun = std::time::Instant::now();
        while !mounting::is_mounted(device) && mounting::is_controlled(device) && begun.elapsed() < UNMOUNT_TRIES {
            std::thread::sleep(Duration::from_millis(5));
        }
        let places: Vec<_> = mounting::places(device).iter().map(|place| place.display().to_string()).collect();
        let told = if self.json {
            tell(&json!({ "unmounted": point.to_string_lossy(), "still_mounted": places }).to_string())
        } else if places.is_empty() {
            Ok(())
        } else {
            tell(&format!("still mounted: {}", places.join(", ")))
        };
        told.map_or_else(|why| fail(1, &why), |()| ExitCode::SUCCESS)
    }
}
