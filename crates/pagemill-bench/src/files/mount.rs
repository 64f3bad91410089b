//! File systems in memory. Each is mounted for one sample, checked during the sample, and unmounted afterwards.
//!
//! All mounts are made in a private mount namespace. No other process sees them, and they vanish with the last process
//! of the bench, even if the bench is killed. The bench unmounts only what it mounted.

use std::ffi::CString;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use tempfile::TempDir;

use crate::child::{self, RunningGroup};
use crate::error::{Error, Result, doing};
use crate::experiment::{Named, check_names};
use crate::native;
use crate::subject::{self, PAGEMILL};

/// The file-system type that `statfs` reports for tmpfs.
const TMPFS_MAGIC: u64 = 0x0102_1994;
/// The file-system type that `statfs` reports for mounts through FUSE.
const FUSE_MAGIC: u64 = 0x6573_5546;
/// Time limit for `pagemill mount` to mount the file system, and to unmount it.
const MOUNT_TIMEOUT: Duration = Duration::from_secs(10);

/// A kind of file system that is measured: its name in the report, and how it is mounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileSystem {
    /// The stable name of the file system in tables, in JSON and for `--only`.
    pub name: &'static str,
    kind: FileSystemKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FileSystemKind {
    /// tmpfs with this value of its mount option `huge`.
    Tmpfs(&'static str),
    /// `pagemill mount`, whose controller decides on huge pages for each file.
    PagemillMount,
    /// `pagemill mount --fuse`, whose process has the files.
    PagemillFuse,
    /// A page cache inside the workload's process, so that nothing is mounted.
    Cache,
}

pub const NEVER: FileSystem = FileSystem { name: "tmpfs-never", kind: FileSystemKind::Tmpfs("never") };
pub const WITHIN_SIZE: FileSystem =
    FileSystem { name: "tmpfs-within-size", kind: FileSystemKind::Tmpfs("within_size") };
pub const ALWAYS: FileSystem = FileSystem { name: "tmpfs-always", kind: FileSystemKind::Tmpfs("always") };
pub const PAGEMILL_MOUNT: FileSystem = FileSystem { name: PAGEMILL, kind: FileSystemKind::PagemillMount };
pub const PAGEMILL_FUSE: FileSystem = FileSystem { name: "fuse", kind: FileSystemKind::PagemillFuse };
pub const CACHE: FileSystem = FileSystem { name: "cache", kind: FileSystemKind::Cache };
/// As [`CACHE`]; the workers access the files through views.
pub const VIEWS: FileSystem = FileSystem { name: "views", kind: FileSystemKind::Cache };

impl Named for FileSystem {
    fn name(&self) -> &'static str {
        self.name
    }
}

impl FileSystem {
    /// Returns whether the bench must mount this file system; false for a cache in the workload's own process.
    pub fn is_mounted(self) -> bool {
        self.kind != FileSystemKind::Cache
    }
}

/// How a file system was mounted, which determines how it is unmounted.
#[derive(Debug)]
enum Origin {
    /// The user mounted the file system beforehand. Only the bench's folder in it is removed.
    Given,
    Mounted,
    /// A `pagemill mount` process mounted the file system, and unmounts it on SIGTERM.
    PagemillMount(RunningGroup),
}

/// A mounted file system. Dropping the value unmounts the file system.
#[derive(Debug)]
pub struct Mounted {
    origin: Option<Origin>,
    device: u64,
    folder: TempDir,
}

/// What went wrong when a file system was unmounted.
#[derive(Debug, Default)]
pub struct UnmountResult {
    /// A message if the process `pagemill mount` did not unmount the file system by itself.
    pub complaint: Option<String>,
    /// The standard error of the process `pagemill mount`, as one line.
    pub stderr: String,
}

/// Mounts file systems in a private mount namespace.
#[derive(Debug)]
pub struct Mounter {
    /// A folder given by the user, on which a `pagemill mount` is already active.
    given_folder: Option<PathBuf>,
}

impl Mounter {
    /// Moves the calling thread into a new mount namespace. Threads and processes that the calling thread starts later
    /// are in that namespace, too.
    ///
    /// # Errors
    ///
    /// [`Error::CannotRun`] if mounting is not permitted, or if the given folder is not on a tmpfs.
    pub fn new(given_folder: Option<&Path>) -> Result<Self> {
        let refused = |cause| Error::CannotRun(format!("mounting is not permitted here ({cause}); it takes root"));
        if let Some(folder) = given_folder {
            let device = device_of(folder).map_err(doing(folder.display().to_string()))?;
            assert_tmpfs(folder, device).map_err(Error::CannotRun)?;
        }
        native::unshare_mounts().map_err(refused)?;
        // Later mounts and unmounts of the host still propagate into this namespace, but mounts of the bench do not
        // propagate out.
        let inwards = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
        rustix::mount::mount_change("/", inwards).map_err(|errno| refused(errno.into()))?;
        Ok(Self { given_folder: given_folder.map(Path::to_owned) })
    }

    /// Returns the wanted file systems of `known` that can be mounted. For each that cannot be mounted, also returns a
    /// sentence for the report.
    ///
    /// # Errors
    ///
    /// [`Error::CannotRun`] for an unknown name, if a plain tmpfs cannot be mounted, or if no file system can be run.
    pub fn select(&self, only: &[String], known: &[FileSystem]) -> Result<(Vec<FileSystem>, Vec<String>)> {
        check_names("subject", only, &known.iter().map(|known| known.name).collect::<Vec<_>>())?;
        let (mut ready, mut gaps) = (Vec::new(), Vec::new());
        for &subject in known {
            if !only.is_empty() && only.iter().all(|name| name != subject.name) {
                continue;
            }
            if !subject.is_mounted() {
                ready.push(subject);
                continue;
            }
            match self.mount(subject, 64 << 20) {
                Ok(mounted) => {
                    ready.push(subject);
                    gaps.extend(mounted.unmount().complaint);
                }
                Err(Error::Gap(gap)) => gaps.push(gap),
                Err(error) => return Err(error),
            }
        }
        match ready.is_empty() {
            true => Err(Error::CannotRun(gaps.join("; "))),
            false => Ok((ready, gaps)),
        }
    }

    /// Mounts a file system of at most `size_bytes`. If the user gave a folder, makes a folder there instead of a mount of
    /// Pagemill, and ignores the size.
    ///
    /// # Errors
    ///
    /// [`Error::Gap`] if Pagemill's controller cannot mount it. [`Error::CannotRun`] if a tmpfs cannot be mounted.
    /// [`Error::Interrupted`] after a signal.
    pub fn mount(&self, subject: FileSystem, size_bytes: u64) -> Result<Mounted> {
        let builder = || tempfile::Builder::new().prefix("pagemill-bench-").to_owned();
        let FileSystemKind::Tmpfs(huge) = subject.kind else {
            if let Some(given_folder) = &self.given_folder {
                let folder = builder().tempdir_in(given_folder).map_err(doing(given_folder.display().to_string()))?;
                return Mounted::new(folder, Origin::Given, TMPFS_MAGIC);
            }
            let folder = builder().tempdir().map_err(doing("making a folder to mount on"))?;
            let (magic, options): (_, &[&str]) = match subject.kind {
                FileSystemKind::PagemillFuse => (FUSE_MAGIC, &["--fuse"]),
                _ => (TMPFS_MAGIC, &[]),
            };
            let running = start_controller(folder.path(), size_bytes, options)?;
            return Mounted::new(folder, Origin::PagemillMount(running), magic);
        };
        let folder = builder().tempdir().map_err(doing("making a folder to mount on"))?;
        let options = CString::new(format!("huge={huge},size={size_bytes},mode=700")).unwrap_or_default();
        let flags = MountFlags::NODEV | MountFlags::NOSUID;
        rustix::mount::mount(PAGEMILL, folder.path(), "tmpfs", flags, options.as_c_str())
            .map_err(|errno| Error::CannotRun(format!("a tmpfs with huge={huge} cannot be mounted here: {errno}")))?;
        Mounted::new(folder, Origin::Mounted, TMPFS_MAGIC)
    }
}

/// Starts `pagemill mount` and waits until the folder is a mount point.
fn start_controller(folder: &Path, size_bytes: u64, options: &[&str]) -> Result<RunningGroup> {
    let gap = |what: String| Err(Error::Gap(format!("pagemill: {what}")));
    let Some(program) = subject::built_file("pagemill") else {
        return gap("the command is not built: cargo build --release -p pagemill-cli".to_owned());
    };
    let before = device_of(folder).map_err(doing("looking at a folder to mount on"))?;
    let mut command = child::workload_command(["__enter", "--"])?;
    command.arg(program).arg("mount").arg(folder).args(["--size", &size_bytes.to_string()]).args(options);
    subject::clear_foreign_settings(&mut command);
    let running = RunningGroup::start(&mut command)?;
    let begun = Instant::now();
    while device_of(folder).is_ok_and(|device| device == before) {
        child::check_interrupt()?;
        if running.has_ended() {
            let finished = running.finish(Duration::ZERO)?;
            let complaint = String::from_utf8_lossy(&finished.stderr);
            let complaint = complaint.lines().find(|line| !line.trim().is_empty()).unwrap_or("it printed nothing");
            return gap(format!("`pagemill mount` ended with {}: {complaint}", finished.status));
        }
        if begun.elapsed() > MOUNT_TIMEOUT {
            return gap(format!("`pagemill mount` did not mount within {} s", MOUNT_TIMEOUT.as_secs()));
        }
        thread::sleep(Duration::from_millis(2));
    }
    Ok(running)
}

impl Mounted {
    fn new(folder: TempDir, origin: Origin, magic: u64) -> Result<Self> {
        let device = device_of(folder.path()).map_err(doing("looking at a new mount"))?;
        let mounted = Self { origin: Some(origin), device, folder };
        assert_type(mounted.folder(), device, magic).map_err(Error::CannotRun)?;
        Ok(mounted)
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Returns the device number that the folder got when the file system was mounted on it. After an unmount, the
    /// folder has another device number.
    pub fn device(&self) -> u64 {
        self.device
    }

    pub fn unmount(mut self) -> UnmountResult {
        self.close()
    }

    fn close(&mut self) -> UnmountResult {
        let mut ended = match self.origin.take() {
            None | Some(Origin::Given) => return UnmountResult::default(),
            Some(Origin::Mounted) => UnmountResult::default(),
            Some(Origin::PagemillMount(running)) => self.end_controller(running),
        };
        if self.is_mounted() {
            // The device number shows that this mount was made by the bench. The mount is detached, since a killed
            // workload may use it for a short time longer.
            let result = rustix::mount::unmount(self.folder(), UnmountFlags::DETACH);
            let stays = result.err().map(|errno| format!("{} stays: {errno}", self.folder().display()));
            ended.complaint = ended.complaint.or(stays);
        }
        ended
    }

    fn end_controller(&self, running: RunningGroup) -> UnmountResult {
        running.terminate();
        let finished = match running.finish(MOUNT_TIMEOUT) {
            Ok(finished) => finished,
            // The interrupt has also killed the controller.
            Err(Error::Interrupted { .. }) => return UnmountResult::default(),
            Err(error) => {
                let complaint = Some(format!("pagemill: the controller did not end on request: {error}"));
                return UnmountResult { complaint, ..UnmountResult::default() };
            }
        };
        let stderr = String::from_utf8_lossy(&finished.stderr).trim().replace('\n', "; ");
        let complaint = (!finished.status.success() || self.is_mounted()).then(|| {
            let what = if self.is_mounted() { "did not unmount" } else { "unmounted" };
            format!("pagemill: asked to end the controller {what} and ended with {}: {stderr}", finished.status)
        });
        UnmountResult { complaint, stderr }
    }

    /// Returns whether the file system that was mounted on the folder is still there.
    fn is_mounted(&self) -> bool {
        device_of(self.folder()).is_ok_and(|device| device == self.device)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Some(complaint) = self.close().complaint {
            eprintln!("gap: {complaint}");
        }
    }
}

fn device_of(path: &Path) -> std::io::Result<u64> {
    fs::metadata(path).map(|metadata| metadata.dev())
}

/// Fails if the folder is not on a tmpfs, or is on a tmpfs whose device number is not `device`. Without this check, a
/// workload could measure the disk below a mount that has vanished.
pub fn assert_tmpfs(folder: &Path, device: u64) -> std::result::Result<(), String> {
    assert_type(folder, device, TMPFS_MAGIC)
}

fn assert_type(folder: &Path, device: u64, magic: u64) -> std::result::Result<(), String> {
    let at = |cause: std::io::Error| format!("{}: {cause}", folder.display());
    let kind = rustix::fs::statfs(folder).map_err(|errno| at(errno.into()))?.f_type as u64;
    match (kind, device_of(folder).map_err(at)?) {
        (kind, found) if kind == magic && found == device => Ok(()),
        (kind, found) if kind == magic => {
            Err(format!("{} is another file system than before (device {found}, not {device})", folder.display()))
        }
        _ if magic == TMPFS_MAGIC => Err(format!("{} is no tmpfs (statfs says {kind:#x})", folder.display())),
        _ => Err(format!("{} is not mounted through FUSE (statfs says {kind:#x})", folder.display())),
    }
}

/// Returns the bytes in use on the file system, by `statfs`.
pub fn used_bytes(folder: &Path) -> std::result::Result<u64, String> {
    let state = rustix::fs::statfs(folder).map_err(|errno| format!("{}: {errno}", folder.display()))?;
    Ok((state.f_blocks - state.f_bfree) * state.f_bsize as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tmpfs is mounted on a new folder. It must have its own device number, and [`used_bytes`] must count what is
    /// written to it. After the unmount, the folder must be gone. If mounting is not permitted, the test is skipped.
    #[test]
    fn unmount_leaves_nothing_behind() {
        // The test runs in a thread of its own, so that the other tests keep their mount namespace.
        let test = thread::spawn(|| {
            let mounter = Mounter::new(None).map_err(|error| error.to_string())?;
            let mounted = mounter.mount(NEVER, 1 << 20).map_err(|error| error.to_string())?;
            let folder = mounted.folder().to_owned();
            fs::write(folder.join("a"), [1; 5000]).expect("it is written");
            assert_eq!(used_bytes(&folder), Ok(8192));
            assert_eq!(assert_tmpfs(&folder, mounted.device()), Ok(()));
            assert!(assert_tmpfs(&folder, mounted.device() + 1).is_err());
            assert_eq!(mounted.unmount().complaint, None);
            assert!(!folder.exists());
            Ok::<(), String>(())
        });
        if let Err(why) = test.join().expect("the thread ends") {
            println!("skipped: {why}");
        }
    }

    /// An unknown file-system name must be refused with the list of known names. A folder that is not on a tmpfs must
    /// be refused before anything is mounted.
    #[test]
    fn unknown_name_and_other_folder_are_refused() {
        let mounter = Mounter { given_folder: None };
        let refusal = mounter.select(&["ramfs".to_owned()], &[NEVER, PAGEMILL_MOUNT]).map(|_| ());
        assert!(refusal.is_err_and(|error| error.to_string().contains("tmpfs-never, pagemill")));
        assert!(Mounter::new(Some(Path::new("/proc"))).is_err_and(|error| error.to_string().contains("no tmpfs")));
    }
}
