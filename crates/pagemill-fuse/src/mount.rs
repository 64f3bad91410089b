//! [`Mount`]: mounts a file system, runs its session threads, and unmounts it.

use crate::adapter::Adapter;
use fuser::{BackgroundSession, Config, MountOption, Session, SessionACL};
use pagemill_ramfs::RamFs;
use rustix::mount::UnmountFlags;
use std::fmt;
use std::io;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

const DEVICE: &str = "/dev/fuse";

/// Program that mounts and unmounts for users without privileges.
const HELPER: &str = "fusermount3";

/// How a file system is mounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options<'a> {
    /// Source of the mount in the list of mounts. The type is `fuse.` with this name.
    pub name: &'a str,
    /// Number of threads that answer requests, at least 1.
    pub threads: usize,
    /// Other users may use the files, as far as the permissions allow it. Users other than root may set this only if
    /// `/etc/fuse.conf` has `user_allow_other`.
    pub allow_other: bool,
}

/// A file system that is mounted through FUSE, without set-user-ID programs and devices (`nosuid`, `nodev`).
///
/// The session threads end when the file system is unmounted. When this process ends first, users of the files get
/// errors (`ENOTCONN`), and the mount point stays occupied until it is unmounted.
///
/// ```no_run
/// use pagemill_fuse::{Mount, Options, unmount};
/// use pagemill_ramfs::RamFs;
/// use std::path::Path;
///
/// let (fs, point) = (RamFs::new("scratch")?, Path::new("/mnt/scratch"));
/// let mount = Mount::start(fs, point, &Options { name: "scratch", threads: 2, allow_other: false })?;
/// std::fs::write(point.join("file"), "hello")?;
/// unmount(point, false)?;
/// mount.wait();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Mount {
    ended: Receiver<()>,
    /// Never dropped: dropping it would unmount whatever is mounted on the mount point by then.
    _session: ManuallyDrop<BackgroundSession>,
}

impl Mount {
    /// Mounts a file system at an existing directory, and starts threads that serve it. A process without the privilege
    /// to mount calls the program `fusermount3`.
    ///
    /// # Errors
    ///
    /// A [`MountError`] that says what is missing.
    pub fn start(fs: RamFs, point: &Path, options: &Options<'_>) -> Result<Self, MountError> {
        if !Path::new(DEVICE).exists() {
            return Err(MountError::NoDevice);
        }
        let mut config = Config::default();
        config.mount_options = vec![
            MountOption::FSName(options.name.to_owned()),
            // `MountOption::Subtype` would reach the kernel only through fusermount3.
            MountOption::CUSTOM(format!("subtype={}", options.name)),
            MountOption::DefaultPermissions,
            MountOption::NoSuid,
            MountOption::NoDev,
        ];
        config.acl = if options.allow_other { SessionACL::All } else { SessionACL::Owner };
        config.n_threads = Some(options.threads.max(1));
        config.clone_fd = true;
        let (notifier, (send_end, ended)) = (Arc::new(OnceLock::new()), mpsc::channel());
        let adapter = Adapter::new(fs, notifier.clone(), send_end);
        let session = Session::new(adapter, point, &config).map_err(|error| MountError::of(point, error))?;
        let _ = notifier.set(session.notifier());
        let session = session.spawn().map_err(MountError::Threads)?;
        Ok(Self { ended, _session: ManuallyDrop::new(session) })
    }

    /// Waits until the file system is unmounted and no process has a file of it open.
    pub fn wait(&self) {
        // An error means that the session threads have ended.
        let _ = self.ended.recv();
    }

    /// As [`Mount::wait`], for a limited time. Returns whether the session has ended.
    pub fn wait_for(&self, at_most: Duration) -> bool {
        !matches!(self.ended.recv_timeout(at_most), Err(RecvTimeoutError::Timeout))
    }
}

impl fmt::Debug for Mount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mount").finish_non_exhaustive()
    }
}

/// Why a file system was not mounted.
///
/// Example: [`Mount`].
#[derive(Debug)]
#[non_exhaustive]
pub enum MountError {
    /// There is no `/dev/fuse`.
    NoDevice,
    /// `/dev/fuse` cannot be opened.
    DeviceDenied(io::Error),
    /// This process may not mount, and the program `fusermount3` is not installed.
    NoHelper,
    /// The kernel or `fusermount3` refused the mount.
    Refused { point: PathBuf, error: io::Error },
    /// No threads could be started.
    Threads(io::Error),
}

impl MountError {
    fn of(point: &Path, error: io::Error) -> Self {
        let opened = std::fs::OpenOptions::new().read(true).write(true).open(DEVICE);
        match opened {
            Err(error) => Self::DeviceDenied(error),
            Ok(_) if error.kind() == io::ErrorKind::NotFound && point.exists() => Self::NoHelper,
            Ok(_) => Self::Refused { point: point.to_owned(), error },
        }
    }
}

impl fmt::Display for MountError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoDevice => write!(
                f,
                "{DEVICE} is missing: `modprobe fuse` loads the kernel's module; a container needs the device \
                 (`--device {DEVICE}`)"
            ),
            Self::DeviceDenied(error) => {
                write!(
                    f,
                    "{DEVICE} cannot be opened: {error}; it needs the permissions 0666, and the device must be "
                )?;
                write!(f, "allowed in this container")
            }
            Self::NoHelper => {
                write!(f, "this user may not mount, and {HELPER} is not installed: install the package fuse3, ")?;
                write!(f, "or run as root")
            }
            Self::Refused { point, error } => {
                // fusermount3 writes its name and an end of line.
                let reason = error.to_string();
                write!(f, "{} cannot be mounted through FUSE: {}", point.display(), reason.trim())
            }
            Self::Threads(error) => write!(f, "no threads can be started for the mount: {error}"),
        }
    }
}

impl std::error::Error for MountError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::DeviceDenied(error) | Self::Refused { error, .. } | Self::Threads(error) => Some(error),
            Self::NoDevice | Self::NoHelper => None,
        }
    }
}

/// Unmounts a FUSE file system. With `is_detached` also one that is in use: its name goes at once, and open files work
/// until the process that serves them ends.
///
/// # Errors
///
/// [`io::ErrorKind::ResourceBusy`] for a file system that is in use; errors of the system and of `fusermount3`.
pub fn unmount(point: &Path, is_detached: bool) -> io::Result<()> {
    let detach = if is_detached { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    match rustix::mount::unmount(point, UnmountFlags::NOFOLLOW | detach) {
        Err(rustix::io::Errno::PERM) => unmount_by_helper(point, is_detached),
        result => Ok(result?),
    }
}

fn unmount_by_helper(point: &Path, is_detached: bool) -> io::Result<()> {
    let mut command = Command::new(HELPER);
    command.arg("-u").args(is_detached.then_some("-z")).arg("--").arg(point).stdin(Stdio::null());
    let output = command.output().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => io::Error::other(MountError::NoHelper),
        _ => error,
    })?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    // The program reports the kernel's error by its text only, always in English.
    let kind = if text.contains("busy") { io::ErrorKind::ResourceBusy } else { io::ErrorKind::Other };
    Err(io::Error::new(kind, text))
}
