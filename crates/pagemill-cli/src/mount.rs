//! `pagemill mount | status | purge | umount | mark`: a RAM file system that gives memory back.

use crate::fail;
use pagemill::units::{Bytes, parse_bytes};
use pagemill_mount::control::{self, End, Keeper, Reached, Server};
use pagemill_mount::door;
use pagemill_mount::mounting::{self, Mounted, Refusal, Wanted};
use pagemill_mount::policy::{HUGE, Huge, VOLATILE, Volatile};
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
            let server = Server::start(&keeper, &point, device, ends)?;
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
                    let _ = control::unmount(&point, device, UNMOUNT_TRIES);
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
                Ok(End::Signal(_)) => match control::unmount(&point, device, UNMOUNT_TRIES) {
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
            let end = if self.as_daemon { "pagemill umount ends it" } else { "Ctrl-C unmounts it" };
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
        let Ok(socket) = mounting::socket_path(device) else { return };
        let log = File::options().create(true).append(true).open(socket.with_extension("log"));
        if let Ok(log) = log {
            let _ = rustix::stdio::dup2_stderr(&log);
        }
        if let Ok(null) = File::open("/dev/null") {
            let _ = rustix::stdio::dup2_stdout(&null);
        }
    }
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

/// Finds the mount, or says what is there instead.
fn find(dir: &Path) -> Result<(PathBuf, u64), ExitCode> {
    mounting::find(dir).map_err(|refusal: Refusal| fail(2, &refusal.to_string()))
}

fn nobody(point: &Path) -> String {
    format!(
        "the controller of {0} does not answer, or is another user's; if it has ended, `pagemill mount {0}` takes over",
        point.display()
    )
}

#[derive(clap::Args)]
pub struct Purge {
    /// Where it is mounted.
    dir: PathBuf,
    /// How much is to go (512M, 1G).
    #[arg(value_parser = parse_bytes)]
    size: u64,
    /// One JSON object.
    #[arg(long)]
    json: bool,
}

impl Purge {
    pub fn main(&self) -> ExitCode {
        let (point, device) = match find(&self.dir) {
            Ok(found) => found,
            Err(code) => return code,
        };
        match control::ask_purge(device, self.size) {
            Reached::Answer(bytes) if self.json => {
                println!("{}", json!({ "asked_bytes": self.size, "purged_bytes": bytes }));
                ExitCode::SUCCESS
            }
            Reached::Answer(bytes) => {
                let short = if bytes < self.size { "; nothing else is volatile and closed" } else { "" };
                println!("{} of {} purged{short}", Bytes(bytes), Bytes(self.size));
                ExitCode::SUCCESS
            }
            Reached::Refused(why) => fail(1, &why),
            Reached::Nobody => fail(2, &nobody(&point)),
        }
    }
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
        let (point, device) = match find(&self.dir) {
            Ok(found) => found,
            Err(code) => return code,
        };
        let result = match control::ask_unmount(device) {
            Reached::Answer(()) => Ok(()),
            Reached::Refused(why) => Err(why),
            // Its controller is gone.
            Reached::Nobody => mounting::unmount(&point, device).map_err(|refusal| refusal.to_string()),
        };
        match result {
            Ok(()) if self.json => println!("{}", json!({ "unmounted": point.to_string_lossy() })),
            Ok(()) => {}
            Err(why) => return fail(1, &why),
        }
        ExitCode::SUCCESS
    }
}

/// Without options: show what the files say of themselves. What holds for a file is its own mark, or else that of
/// the nearest folder above that has one.
#[derive(clap::Args)]
pub struct Mark {
    /// May it vanish when memory runs short: `full` (as a whole), `partial` (from its end), `none`.
    #[arg(long, value_name = "WHAT", value_parser = |text: &str| text.parse::<Volatile>())]
    volatile: Option<Volatile>,
    /// Huge pages: `auto` (where they pay), `always`, `never`.
    #[arg(long, value_name = "WHEN", value_parser = |text: &str| text.parse::<Huge>())]
    huge: Option<Huge>,
    /// Files and folders on a `pagemill mount`. A folder's marks hold for all below it.
    #[arg(required = true)]
    paths: Vec<PathBuf>,
    /// One JSON object a line.
    #[arg(long)]
    json: bool,
}

impl Mark {
    pub fn main(&self) -> ExitCode {
        let failed = self.paths.iter().filter(|path| self.mark(path).map_err(|why| fail(1, &why)).is_err()).count();
        ExitCode::from(u8::from(failed > 0))
    }

    fn mark(&self, path: &Path) -> Result<(), String> {
        let name = path.display();
        let said = |error: std::io::Error| format!("{name}: {error}");
        let open = || -> std::io::Result<_> {
            use rustix::fs::{Mode, OFlags};
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            Ok(rustix::fs::open(path, flags, Mode::empty())?)
        };
        let fd = open().map_err(said)?;
        let seen = door::look(&fd).map_err(said)?;
        if !seen.is_file() && !seen.is_folder() {
            return Err(format!("{name} is neither a file nor a folder"));
        }
        let user = rustix::process::geteuid().as_raw();
        if (self.volatile.is_some() || self.huge.is_some()) && user != 0 && user != seen.owner {
            return Err(format!("{name} belongs to user {}: only its owner may mark it", seen.owner));
        }
        let marks =
            [(VOLATILE, self.volatile.map(|word| word.to_string())), (HUGE, self.huge.map(|word| word.to_string()))];
        for (attribute, word) in marks {
            let Some(word) = word else { continue };
            door::set_attribute(&fd, attribute, &word).map_err(|error| match error.raw_os_error() {
                Some(libc::EOPNOTSUPP | libc::EPERM) => {
                    format!("{name}: {error}; before Linux 6.6 only root can mark files on tmpfs")
                }
                _ => said(error),
            })?;
        }
        let mut bad = Vec::new();
        let marks = door::marks(&fd, |mark| bad.push(mark.0)).map_err(said)?;
        let (volatile, huge) = (marks.volatile.map(|word| word.to_string()), marks.huge.map(|word| word.to_string()));
        let purged = door::purged_from(&fd);
        if self.json {
            println!(
                "{}",
                json!({ "path": path.to_string_lossy(), "volatile": volatile, "huge": huge, "purged_from": purged, "ignored": bad })
            );
        } else {
            let word = |word: Option<String>| word.unwrap_or_else(|| "-".into());
            let purged = purged.map_or_else(String::new, |from| format!("  purged from byte {from} on"));
            println!("volatile {:<8} huge {:<7} {name}{purged}", word(volatile), word(huge));
            bad.iter().for_each(|bad| say(&format!("{name}: {bad}: it is passed over")));
        }
        Ok(())
    }
}
