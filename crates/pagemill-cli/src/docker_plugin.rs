//! `pagemill docker-plugin`: volumes of Docker whose files are in memory.
//!
//! Docker sends requests over HTTP to a Unix socket (its volume plugin protocol). Each volume is a `pagemill mount` with
//! a controller of its own, so the volumes do not depend on this process: it can end and start again while containers
//! use them.

mod options;
mod protocol;
mod volumes;

use crate::fail;
use crate::http::{self, Limits};
use rustix::fs::Mode;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::collections::BTreeSet;
use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use volumes::Volumes;

/// Bounds of the server. A body has a name, an identifier and the options of a volume.
const SERVER_LIMITS: Limits = Limits { clients: 64, body_bytes: 64 << 10 };

/// Interval at which the plugin checks whether each volume has a controller.
const CONTROLLER_CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// A volume is created by `docker volume create -d pagemill -o size=1G NAME`. Its options are `size` and `mode` of
/// `pagemill mount`, and `volatile` and `huge` of `pagemill mark`, which apply to all files of the volume that have no
/// marks of their own.
///
/// The files of a volume stay in memory until `docker volume rm`, also while no container uses them. Ctrl-C and SIGTERM
/// end the plugin and remove its socket. The volumes stay mounted, and the plugin finds them when it starts again.
/// After a restart of the machine the volumes are empty.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagemill docker-plugin
  docker volume create -d pagemill -o size=2G -o volatile=full cache
  docker run --rm -v cache:/cache debian df -h /cache")]
pub struct DockerPlugin {
    /// The socket. Docker finds it in /run/docker/plugins, and uses the file's name without `.sock` as the driver's
    /// name.
    #[arg(long, value_name = "PATH", default_value = "/run/docker/plugins/pagemill.sock")]
    socket: PathBuf,
    /// Folder for the options and the mount points of the volumes.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/pagemill/docker")]
    dir: PathBuf,
}

impl DockerPlugin {
    pub fn main(&self) -> ExitCode {
        let served = self.serve();
        served.map_or_else(|why| fail(2, &why), |()| ExitCode::SUCCESS)
    }

    /// Serves requests until a signal arrives.
    fn serve(&self) -> Result<(), String> {
        let signals =
            Signals::new([SIGINT, SIGTERM, SIGHUP]).map_err(|error| format!("signals cannot be handled: {error}"))?;
        if !rustix::process::geteuid().is_root() {
            return Err("mounting the volumes needs root privileges".to_owned());
        }
        let volumes = Arc::new(Volumes::open(&self.dir)?);
        let socket = Socket::bind(&self.socket)?;
        let (stop, stopped) = UnixStream::pair().map_err(|error| format!("no socket can be made: {error}"))?;
        let end_at_signal = move |mut signals: Signals| {
            signals.forever().next();
            drop(stop);
        };
        let watched = volumes.clone();
        let spawn = |name: &str, work: Box<dyn FnOnce() + Send>| {
            let spawned = thread::Builder::new().name(name.to_owned()).spawn(work);
            spawned.map_err(|error| format!("no thread can be started: {error}"))
        };
        spawn("signals", Box::new(move || end_at_signal(signals)))?;
        spawn("controllers", Box::new(move || watch_controllers(&watched)))?;
        let (path, count) = (self.socket.display(), volumes.count());
        let _ = writeln!(io::stdout(), "serving Docker at {path}, volumes: {count}; Ctrl-C ends the plugin");
        let _ = io::stdout().flush();
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
        let respond = |request: &http::Request| protocol::respond(&volumes, request);
        let served = http::serve(&socket.listener, &stopped, SERVER_LIMITS, &respond);
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
        served.map_err(|error| format!("{path} cannot be served: {error}"))
    }
}

/// Starts controllers for volumes that have lost theirs, until the process ends.
fn watch_controllers(volumes: &Volumes) {
    let mut failed = BTreeSet::new();
    loop {
        thread::sleep(CONTROLLER_CHECK_INTERVAL);
        volumes.replace_controllers(&mut failed);
    }
}

/// A socket that only root can connect to. Dropping the value removes the file.
struct Socket {
    listener: UnixListener,
    path: PathBuf,
}

impl Socket {
    /// Creates the socket, and its folder if that is missing. Replaces the socket of a process that has ended.
    fn bind(path: &Path) -> Result<Self, String> {
        let text = |error: io::Error| format!("no socket can be made at {}: {error}", path.display());
        if let Some(folder) = path.parent() {
            DirBuilder::new().recursive(true).mode(0o755).create(folder).map_err(text)?;
        }
        match fs::symlink_metadata(path) {
            Ok(metadata) if !metadata.file_type().is_socket() => {
                return Err(format!("{} exists, and is not a socket", path.display()));
            }
            Ok(_) => match UnixStream::connect(path) {
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => fs::remove_file(path).map_err(text)?,
                _ => return Err(format!("another process serves {}", path.display())),
            },
            Err(_) => {}
        }
        // No thread that creates files runs yet.
        let mask = rustix::process::umask(Mode::from_raw_mode(0o177));
        let listener = UnixListener::bind(path);
        rustix::process::umask(mask);
        Ok(Self { listener: listener.map_err(text)?, path: path.to_owned() })
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}
