//! Mounts, takes over and unmounts file systems; finds the processes that block an unmount.

use crate::file_access::FileAccess;
use pagemill_core::published;
use pagemill_core::units::Bytes;
use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, retry_on_intr};
use rustix::mount::{self, FsMountFlags, FsOpenFlags, FsPickFlags, MountAttrFlags, MoveMountFlags, UnmountFlags};
use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// Source of Pagemill's mounts in `mountinfo`, which distinguishes them from other mounts.
pub const MOUNT_SOURCE: &str = "pagemill";

/// A line of `/proc/self/mountinfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountLine {
    device: (u32, u32),
    pub point: PathBuf,
    pub kind: String,
    pub source: String,
    /// Options of the file system, separated by commas.
    options: String,
}

impl MountLine {
    fn parse(line: &[u8]) -> Option<Self> {
        let mut words = line.split(|byte| *byte == b' ');
        let text = |word: &[u8]| String::from_utf8_lossy(word).into_owned();
        let device = text(words.nth(2)?);
        let (major, minor) = device.split_once(':')?;
        let point = PathBuf::from(OsString::from_vec(unescape(words.nth(1)?)));
        words.find(|word| *word == b"-")?;
        let (kind, source) = (text(words.next()?), text(&unescape(words.next()?)));
        let options = text(words.next().unwrap_or_default());
        Some(Self { device: (major.parse().ok()?, minor.parse().ok()?), point, kind, source, options })
    }

    /// Returns the device number of the file system.
    pub fn device(&self) -> u64 {
        rustix::fs::makedev(self.device.0, self.device.1)
    }

    /// Returns the value of the option `huge` of a tmpfs; `None` for another file system. The kernel does not list the
    /// value `never`.
    pub fn huge_option(&self) -> Option<&str> {
        let option = || self.options.split(',').find_map(|option| option.strip_prefix("huge="));
        (self.kind == "tmpfs").then(|| option().unwrap_or("never"))
    }

    /// Returns whether Pagemill mounted this tmpfs.
    pub fn is_ours(&self) -> bool {
        self.kind == "tmpfs" && self.source == MOUNT_SOURCE
    }

    /// Returns whether Pagemill mounted this file system through FUSE.
    pub fn is_our_fuse(&self) -> bool {
        self.source == MOUNT_SOURCE && self.kind.strip_prefix("fuse.") == Some(MOUNT_SOURCE)
    }
}

/// Decodes escapes such as `\040`, which the kernel writes for blanks.
fn unescape(word: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut rest = word;
    while let Some((first, after)) = rest.split_first() {
        let code = (*first == b'\\').then(|| std::str::from_utf8(after.get(..3)?).ok()).flatten();
        let byte = code.and_then(|code| u8::from_str_radix(code, 8).ok());
        bytes.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { &after[3..] } else { after };
    }
    bytes
}

/// Returns all mounts in stacking order: a mount that covers another comes later.
fn mounts() -> io::Result<Vec<MountLine>> {
    // The text is read as bytes, since a mount point may contain any byte except zero.
    let text = fs::read("/proc/self/mountinfo")?;
    Ok(text.split(|byte| *byte == b'\n').filter_map(MountLine::parse).collect())
}

/// Returns the topmost mount at exactly this path.
///
/// # Errors
///
/// Errors of reading `/proc`.
pub fn mount_at(point: &Path) -> io::Result<Option<MountLine>> {
    Ok(mounts()?.into_iter().rfind(|line| line.point == point))
}

/// Sets the option `huge` of the tmpfs that is mounted at `point`: `always`, `within_size`, `advise` or `never`. Applies
/// to memory that files get from now on, through all mounts of the file system.
///
/// # Errors
///
/// `EPERM` without `CAP_SYS_ADMIN` in the user namespace that mounted it; `EINVAL` if the kernel was built without huge
/// pages for tmpfs; `ENOSYS` before Linux 5.2.
pub fn set_huge_option(point: &Path, value: &str) -> io::Result<()> {
    let context = mount::fspick(rustix::fs::CWD, point, FsPickFlags::FSPICK_CLOEXEC)?;
    mount::fsconfig_set_string(context.as_fd(), "huge", value)?;
    Ok(mount::fsconfig_reconfigure(context.as_fd())?)
}

fn device_numbers(device: u64) -> (u32, u32) {
    (rustix::fs::major(device), rustix::fs::minor(device))
}

/// Returns whether the file system is mounted anywhere that this process can see.
pub fn is_mounted(device: u64) -> bool {
    let numbers = device_numbers(device);
    // If the mounts cannot be read, the file system counts as mounted.
    mounts().map_or(true, |mounts| mounts.iter().any(|line| line.device == numbers))
}

/// Folder for sockets and locks of mounts by root. The path does not depend on the environment, because one lock must
/// serialize all of root's sessions.
const ROOT_FOLDER: &std::ffi::CStr = c"/run/pagemill";

/// Returns the folder for the sockets, locks and logs of this user's mounts.
///
/// # Errors
///
/// Errors of creating the folder.
pub fn folder() -> io::Result<PathBuf> {
    if rustix::process::geteuid().is_root() && pagemill_sys::file::make_private_dir(ROOT_FOLDER).is_ok() {
        return Ok(PathBuf::from(ROOT_FOLDER.to_string_lossy().into_owned()));
    }
    Ok(PathBuf::from(published::user_folder()?.as_str()))
}

/// Returns the socket path of a file system's controller.
///
/// # Errors
///
/// Errors of creating the user's folder.
pub fn socket_path(device: u64) -> io::Result<PathBuf> {
    let (major, minor) = device_numbers(device);
    Ok(folder()?.join(format!("mount-{major}-{minor}.sock")))
}

/// Why a mount or unmount was refused.
#[derive(Debug)]
pub enum Refusal {
    Missing(PathBuf),
    NoFolder(PathBuf),
    NotEmpty {
        point: PathBuf,
        entries: usize,
        first: String,
    },
    Taken {
        point: PathBuf,
        kind: String,
        source: String,
    },
    Running(PathBuf),
    NoSize,
    TooLarge {
        size_bytes: u64,
        machine_bytes: u64,
    },
    NotOurs(PathBuf),
    /// Pagemill mounted it through FUSE, where the command has no effect.
    IsFuse(PathBuf),
    NotMounted(PathBuf),
    Busy {
        point: PathBuf,
        users: Vec<FileSystemUser>,
        below: Vec<PathBuf>,
    },
    NoLock {
        path: PathBuf,
        error: io::Error,
    },
    NotAllowed {
        what: &'static str,
        error: io::Error,
    },
    System {
        what: &'static str,
        error: io::Error,
    },
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing(point) => write!(f, "{} does not exist", point.display()),
            Self::NoFolder(point) => write!(f, "{} is no folder", point.display()),
            Self::NotEmpty { point, entries, first } => {
                let others = if *entries > 1 { format!(" and {} others", entries - 1) } else { String::new() };
                write!(f, "{} is not empty: `{first}`{others} would be hidden", point.display())
            }
            Self::Taken { point, kind, source } => {
                write!(f, "something is mounted on {} already: {kind} from {source}", point.display())
            }
            Self::Running(point) => {
                write!(f, "{} is mounted by Pagemill already, and its controller runs", point.display())?;
                write!(f, " (pagemill status {})", point.display())
            }
            Self::NoSize => write!(f, "a size of 0 holds no file"),
            Self::TooLarge { size_bytes, machine_bytes } => {
                let (size, machine) = (Bytes(*size_bytes), Bytes(*machine_bytes));
                write!(f, "a size of {size} is beyond the machine's memory, {machine}")
            }
            Self::NotOurs(point) => write!(f, "what is mounted on {} was not mounted by Pagemill", point.display()),
            Self::IsFuse(point) => {
                write!(f, "{} is mounted with `pagemill mount --fuse`, ", point.display())?;
                write!(f, "which has no volatile files and no controller; `pagemill mount` without --fuse has both")
            }
            Self::NotMounted(point) => write!(f, "nothing is mounted on {}", point.display()),
            Self::Busy { point, users, below } => {
                write!(f, "{} is busy", point.display())?;
                if users.is_empty() && below.is_empty() {
                    write!(f, ": its users are not visible here (another user's process, a loop device, swap)")?;
                }
                below.iter().try_for_each(|point| write!(f, "\n  mounted below it: {}", point.display()))?;
                users.iter().try_for_each(|user| write!(f, "\n  {user}"))
            }
            Self::NotAllowed { what, error } => {
                write!(f, "{what}: {error}; an ordinary user can run `pagemill run --ram DIR -- PROGRAM`")
            }
            Self::NoLock { path, error } => write!(f, "{} cannot be locked: {error}", path.display()),
            Self::System { what, error } => write!(f, "{what}: {error}"),
        }
    }
}

fn refusal_for(what: &'static str) -> impl FnOnce(io::Error) -> Refusal {
    move |error| match error.kind() {
        io::ErrorKind::PermissionDenied => Refusal::NotAllowed { what, error },
        _ => Refusal::System { what, error },
    }
}

/// A request to mount.
#[derive(Clone, Debug)]
pub struct MountRequest {
    pub point: PathBuf,
    /// The requested size. If `None`, a mount that is taken over keeps its recorded size, and a new one gets
    /// [`default_size`].
    pub size_bytes: Option<u64>,
    /// Permissions of the root folder.
    pub mode: u32,
}

/// Returns half of the machine's memory.
pub fn default_size() -> u64 {
    pagemill_sys::cgroup::machine("").map_or(1 << 30, |machine| machine.total_bytes / 2)
}

/// A file system that was mounted or taken over, and the access to it.
pub struct Mounted {
    pub point: PathBuf,
    pub access: FileAccess,
    /// The size that the user requested; the current size may be smaller.
    pub size_bytes: u64,
    /// The file system was already mounted, without a controller.
    pub was_taken_over: bool,
    /// The kernel has no huge pages for tmpfs.
    pub has_no_huge: bool,
}

impl MountRequest {
    /// Mounts a file system, or takes over one of Pagemill's that is mounted there without a controller.
    ///
    /// # Errors
    ///
    /// A [`Refusal`] that names the obstacle.
    pub fn mount(&self) -> Result<Mounted, Refusal> {
        check_size(self.size_bytes)?;
        let point = canonical(&self.point)?;
        // Two processes may mount here at the same time. The lock ensures that the second one finds the mount of the
        // first.
        let (folder, _lock) = lock_mounts()?;
        remove_dead_sockets(&folder);
        match mount_at(&point).map_err(refusal_for("the mounts cannot be read"))? {
            Some(line) if line.is_ours() => self.take_over(point),
            Some(line) => Err(Refusal::Taken { point, kind: line.kind, source: line.source }),
            None => self.mount_new(point),
        }
    }

    fn take_over(&self, point: PathBuf) -> Result<Mounted, Refusal> {
        let access = FileAccess::open(&point).map_err(refusal_for("the mount cannot be opened"))?;
        if is_controlled(access.device()) {
            return Err(Refusal::Running(point));
        }
        let now = access.usage().map_err(refusal_for("the mount cannot be read"))?.size_bytes;
        let size_bytes = self.size_bytes.or_else(|| access.requested_size()).unwrap_or(now);
        Ok(Self::with_recorded_size(Mounted { point, access, size_bytes, was_taken_over: true, has_no_huge: false }))
    }

    /// Records the requested size in the file system, for a later controller. If recording fails, a later controller
    /// uses the file system's current size instead.
    fn with_recorded_size(mounted: Mounted) -> Mounted {
        let _ = mounted.access.record_requested_size(mounted.size_bytes);
        mounted
    }

    fn mount_new(&self, point: PathBuf) -> Result<Mounted, Refusal> {
        // The descriptor identifies the folder from here on, even if the folder is renamed.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = || -> io::Result<OwnedFd> { Ok(retry_on_intr(|| rustix::fs::open(&point, flags, Mode::empty()))?) };
        let below = open().map_err(refusal_for("the mount point cannot be opened"))?;
        let place = PathBuf::from(format!("/proc/self/fd/{}", below.as_raw_fd()));
        if fs::read_link(&place).map_err(refusal_for("the mount point cannot be read"))? != point {
            return Err(Refusal::Missing(point));
        }
        check_empty(&point, &place)?;
        let size_bytes = self.size_bytes.unwrap_or_else(default_size);
        let (mount, has_no_huge) = self.create_tmpfs(size_bytes).map_err(refusal_for("tmpfs cannot be mounted"))?;
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        mount::move_mount(&mount, "", &below, "", flags)
            .map_err(|error| refusal_for("tmpfs cannot be mounted")(error.into()))?;
        // The clone is made after the mount is attached: before Linux 6.15 an unattached mount could not be cloned.
        let access = FileAccess::of_mount(&mount).map_err(|error| {
            drop(mount);
            let _ = mount::unmount(&point, UnmountFlags::NOFOLLOW);
            refusal_for("the mount cannot be opened")(error)
        })?;
        Ok(Self::with_recorded_size(Mounted { point, access, size_bytes, was_taken_over: false, has_no_huge }))
    }

    /// Creates a tmpfs that is not attached to a path yet. Returns the mount, and whether the kernel refused
    /// huge pages.
    fn create_tmpfs(&self, size_bytes: u64) -> io::Result<(OwnedFd, bool)> {
        let context = mount::fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        let set = |key: &str, value: String| mount::fsconfig_set_string(context.as_fd(), key, value);
        set("source", MOUNT_SOURCE.into())?;
        set("size", size_bytes.to_string())?;
        set("mode", format!("{:o}", self.mode))?;
        let has_no_huge = set("huge", "within_size".into()).is_err();
        mount::fsconfig_create(context.as_fd())?;
        let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
        Ok((mount::fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)?, has_no_huge))
    }
}

/// Locks mounting by this user, and returns the folder of the mounts' sockets. Dropping the file unlocks it.
///
/// # Errors
///
/// [`Refusal::NoLock`], errors of creating the folder.
pub fn lock_mounts() -> Result<(PathBuf, fs::File), Refusal> {
    let no_folder = "no folder for its socket can be created in XDG_RUNTIME_DIR, /run, /dev/shm or /tmp";
    let folder = folder().map_err(refusal_for(no_folder))?;
    let lock = lock(&folder).map_err(|error| Refusal::NoLock { path: folder.join("mount.lock"), error })?;
    Ok((folder, lock))
}

/// Checks a requested size of a file system.
///
/// # Errors
///
/// [`Refusal::NoSize`], [`Refusal::TooLarge`], errors of reading the machine's memory.
pub fn check_size(size_bytes: Option<u64>) -> Result<(), Refusal> {
    let machine = pagemill_sys::cgroup::machine("").map_err(refusal_for("the machine's memory cannot be read"))?;
    match size_bytes {
        Some(0) => Err(Refusal::NoSize),
        Some(size_bytes) if size_bytes > machine.total_bytes => {
            Err(Refusal::TooLarge { size_bytes, machine_bytes: machine.total_bytes })
        }
        _ => Ok(()),
    }
}

/// Checks that a mount point has no entries, which a mount would hide. `place` is a path that leads to it.
///
/// # Errors
///
/// [`Refusal::NotEmpty`], errors of reading.
pub fn check_empty(point: &Path, place: &Path) -> Result<(), Refusal> {
    let mut entries = fs::read_dir(place).map_err(refusal_for("the mount point cannot be read"))?;
    let Some(Ok(first)) = entries.next() else { return Ok(()) };
    let first = first.file_name().to_string_lossy().into_owned();
    Err(Refusal::NotEmpty { point: point.to_owned(), entries: 1 + entries.count(), first })
}

/// Returns the folder's absolute path without links.
///
/// # Errors
///
/// [`Refusal::Missing`], [`Refusal::NoFolder`], errors of reading.
pub fn canonical(point: &Path) -> Result<PathBuf, Refusal> {
    let found = fs::canonicalize(point).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Refusal::Missing(point.to_owned()),
        _ => refusal_for("the mount point cannot be read")(error),
    })?;
    let metadata = fs::metadata(&found).map_err(refusal_for("the mount point cannot be read"))?;
    if metadata.is_dir() { Ok(found) } else { Err(Refusal::NoFolder(found)) }
}

/// Locks a folder of sockets. Dropping the result unlocks it.
fn lock(folder: &Path) -> io::Result<fs::File> {
    let lock = fs::File::create(folder.join("mount.lock"))?;
    retry_on_intr(|| rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive))?;
    Ok(lock)
}

/// Removes the sockets of controllers that were killed. The caller must hold the lock of the folder.
fn remove_dead_sockets(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        let is_dead =
            || UnixStream::connect(&path).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused);
        if path.extension().is_some_and(|end| end == "sock") && is_dead() {
            let _ = fs::remove_file(&path);
        }
    }
}

/// Listens on a socket at `path`, and replaces the socket of a controller that has ended.
///
/// Holds the lock of the folder during the call. Between `bind` and `listen`, a socket refuses connections like the
/// socket of a dead controller. Without the lock, `remove_dead_sockets` in another process could remove the new socket.
///
/// # Errors
///
/// Errors of locking and of creating the socket.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    let _lock = path.parent().map(lock).transpose()?;
    let _ = fs::remove_file(path);
    UnixListener::bind(path)
}

/// Removes the socket and the log of a controller that was killed, after its file system was unmounted. Does nothing if
/// a controller listens, for example of a new file system with the same device number.
pub fn remove_leftovers(device: u64) {
    let Ok(path) = socket_path(device) else { return };
    let _lock = path.parent().and_then(|folder| lock(folder).ok());
    if !is_mounted(device) && !is_controlled(device) {
        let _ = fs::remove_file(&path);
        let _ = fs::remove_file(path.with_extension("log"));
    }
}

/// Connects to the controller of a file system.
///
/// # Errors
///
/// Errors of connecting, which mean that no controller listens.
pub fn connect(device: u64) -> io::Result<UnixStream> {
    let path = socket_path(device)?;
    UnixStream::connect(&path).or_else(|error| {
        // The controller uses the user's folder if it could not create root's.
        let others = published::user_folder().ok().zip(path.file_name());
        let other = others.map(|(folder, name)| Path::new(folder.as_str()).join(name)).filter(|other| *other != path);
        other.map_or(Err(error), UnixStream::connect)
    })
}

/// Returns whether a controller listens for the file system.
pub fn is_controlled(device: u64) -> bool {
    connect(device).is_ok()
}

/// Returns the canonical path and the device of the file system that Pagemill mounted at exactly `point`.
///
/// # Errors
///
/// A [`Refusal`] that describes what is there instead.
pub fn find_own_mount(point: &Path) -> Result<(PathBuf, u64), Refusal> {
    let point = canonical(point)?;
    let line = mount_at(&point).map_err(refusal_for("the mounts cannot be read"))?;
    let device = fs::metadata(&point).map_err(refusal_for("the mount cannot be read"))?.dev();
    match line {
        None => Err(Refusal::NotMounted(point)),
        Some(line) if line.is_our_fuse() => Err(Refusal::IsFuse(point)),
        Some(line) if !line.is_ours() || line.device != device_numbers(device) => Err(Refusal::NotOurs(point)),
        Some(_) => Ok((point, device)),
    }
}

/// Unmounts the file system with this device number from `point`, if it is mounted there. The check and the unmount are
/// separate calls: a file system that another process mounts at `point` between them is unmounted instead.
///
/// # Errors
///
/// [`Refusal::Busy`] with the processes that use the file system, except `controller` and its children.
pub fn unmount(point: &Path, device: u64, controller: u32) -> Result<(), Refusal> {
    let line = mount_at(point).map_err(refusal_for("the mounts cannot be read"))?;
    if !line.is_some_and(|line| line.is_ours() && line.device == device_numbers(device)) {
        return Err(Refusal::NotOurs(point.to_owned()));
    }
    match mount::unmount(point, UnmountFlags::NOFOLLOW) {
        Ok(()) => Ok(()),
        Err(Errno::BUSY) => Err(busy(point, device, controller)),
        Err(error) => Err(refusal_for("it cannot be unmounted")(error.into())),
    }
}

/// Returns the refusal that lists the visible users of a file system, except `controller` and its children.
pub fn busy(point: &Path, device: u64, controller: u32) -> Refusal {
    Refusal::Busy { point: point.to_owned(), users: users(device, controller), below: mounts_below(point) }
}

/// Returns the mount points below a path.
fn mounts_below(point: &Path) -> Vec<PathBuf> {
    let all = mounts().unwrap_or_default().into_iter().map(|line| line.point);
    all.filter(|other| other != point && other.starts_with(point)).collect()
}

/// Returns all mount points of a file system that this process can see.
pub fn mount_points(device: u64) -> Vec<PathBuf> {
    let numbers = device_numbers(device);
    let all = mounts().unwrap_or_default().into_iter();
    all.filter(|line| line.device == numbers).map(|line| line.point).collect()
}

/// Returns the devices of all file systems of Pagemill that this process can see or control, each with a mount point
/// if it is mounted in this mount namespace. A file system in another namespace (`pagemill run --ram`) has none.
pub fn all_devices() -> Vec<(u64, Option<PathBuf>)> {
    let mut found: Vec<(u64, Option<PathBuf>)> = Vec::new();
    for line in mounts().unwrap_or_default().into_iter().filter(MountLine::is_ours) {
        let device = line.device();
        if found.iter().all(|(known, _)| *known != device) {
            found.push((device, Some(line.point)));
        }
    }
    let user_folder = published::user_folder().ok().map(|folder| PathBuf::from(folder.as_str()));
    for folder in folder().ok().into_iter().chain(user_folder) {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let Some(device) = entry.file_name().to_str().and_then(device_of_socket) else { continue };
            if found.iter().all(|(known, _)| *known != device) {
                found.push((device, None));
            }
        }
    }
    found
}

/// Returns the device of the file system whose controller's socket has this name.
fn device_of_socket(name: &str) -> Option<u64> {
    let (major, minor) = name.strip_prefix("mount-")?.strip_suffix(".sock")?.split_once('-')?;
    Some(rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?))
}

/// Returns whether only the controller (this process) and its children can reach the file system.
///
/// False if another process is in this mount namespace, sees the file system mounted, uses it, or keeps the
/// namespace alive by a mount. A process that cannot be inspected counts as one that can reach the file system.
pub fn is_abandoned(device: u64) -> bool {
    let namespace = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/mnt"));
    let own_pid = std::process::id();
    let (Ok(own), Ok(entries)) = (namespace(own_pid), fs::read_dir("/proc")) else { return false };
    let is_reached_by = |line: &[u8]| {
        let root = line.split(|byte| *byte == b' ').nth(3);
        root == Some(own.as_os_str().as_encoded_bytes())
            || MountLine::parse(line).is_some_and(|line| line.device == device_numbers(device))
    };
    let reaches = |pid: u32| match fs::read(format!("/proc/{pid}/mountinfo")) {
        Ok(mounts) => {
            mounts.split(|byte| *byte == b'\n').any(is_reached_by) || namespace(pid).is_ok_and(|other| other == own)
        }
        // `ENOENT` and `ESRCH`: the process has ended. `EINVAL`: a zombie has no mounts.
        Err(error) => !matches!(Errno::from_io_error(&error), Some(Errno::NOENT | Errno::SRCH | Errno::INVAL)),
    };
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    let mut others = pids.filter(|pid| *pid != own_pid && parent(*pid) != Some(own_pid));
    !others.any(reaches) && users(device, own_pid).is_empty()
}

/// Returns whether Pagemill mounted the file system.
pub fn is_ours(device: u64) -> bool {
    let numbers = device_numbers(device);
    mounts().is_ok_and(|mounts| mounts.iter().any(|line| line.device == numbers && line.is_ours()))
}

/// A process that uses a file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSystemUser {
    pub pid: u32,
    pub name: String,
    pub usage: String,
}

impl fmt::Display for FileSystemUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, usage) = (self.name.escape_debug(), self.usage.escape_debug());
        write!(f, "process {} ({name}): {usage}", self.pid)
    }
}

/// Returns the visible processes that use a file system, except this process, `controller` and their children.
pub fn users(device: u64, controller: u32) -> Vec<FileSystemUser> {
    const MAX_USERS: usize = 20;
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    let own = [std::process::id(), controller];
    let is_own = |pid: u32| own.contains(&pid) || parent(pid).is_some_and(|parent| own.contains(&parent));
    let others = pids.filter(|pid| !is_own(*pid));
    others.filter_map(|pid| user(pid, device)).take(MAX_USERS).collect()
}

fn parent(pid: u32) -> Option<u32> {
    Some(pagemill_sys::process::usage(pid)?.parent_pid)
}

fn user(pid: u32, device: u64) -> Option<FileSystemUser> {
    let at = |what: &str| PathBuf::from(format!("/proc/{pid}/{what}"));
    let is_on = |path: &Path| fs::metadata(path).is_ok_and(|metadata| metadata.dev() == device);
    let target = |path: &Path| fs::read_link(path).map_or_else(|_| "?".into(), |path| path.display().to_string());
    let usage = if is_on(&at("cwd")) {
        format!("works in {}", target(&at("cwd")))
    } else if is_on(&at("root")) {
        "has its root there".to_owned()
    } else if is_on(&at("exe")) {
        format!("runs {}", target(&at("exe")))
    } else {
        let files = fs::read_dir(at("fd")).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
        let open = files.into_iter().find(|path| is_on(path)).map(|path| format!("has {} open", target(&path)));
        let (major, minor) = device_numbers(device);
        let maps = || fs::read_to_string(at("maps")).ok();
        let mapped = |maps: String| {
            let line = maps.lines().find(|line| line.split(' ').nth(3) == Some(&format!("{major:02x}:{minor:02x}")))?;
            Some(format!("has {} mapped", line.split_whitespace().nth(5).unwrap_or("a file")))
        };
        open.or_else(|| maps().and_then(mapped))?
    };
    let name = fs::read_to_string(at("comm")).unwrap_or_default().trim().to_owned();
    Some(FileSystemUser { pid, name, usage })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines with optional fields and escaped blanks must be parsed. `is_ours` must be true only for Pagemill's mounts.
    #[test]
    fn mount_lines_are_read() {
        let line = b"36 35 0:79 / /mnt/a\\040b rw,nosuid shared:9 master:1 - tmpfs pagemill rw,size=8k";
        let line = MountLine::parse(line).unwrap();
        assert_eq!(line.huge_option(), Some("never"));
        assert_eq!((line.device, line.point.to_str().unwrap(), line.is_ours()), ((0, 79), "/mnt/a b", true));
        let other = MountLine::parse(b"36 35 0:79 / /tm\xff rw - tmpfs tmpfs rw,huge=within_size,inode64").unwrap();
        assert_eq!(other.huge_option(), Some("within_size"));
        let ext4 = MountLine::parse(b"36 35 0:79 / / rw - ext4 /dev/vda rw").unwrap();
        assert_eq!(ext4.huge_option(), None);
        assert!(!other.is_ours() && MountLine::parse(b"nonsense").is_none());
        assert_eq!(unescape(b"a\\134b\\9"), b"a\\b\\9");
    }

    /// The name of a controller's socket has the device of its file system. Other files in the folder are ignored.
    #[test]
    fn sockets_name_their_devices() {
        let device = rustix::fs::makedev(3, 79);
        let socket = socket_path(device).unwrap();
        assert_eq!(socket.file_name().and_then(|name| device_of_socket(name.to_str()?)), Some(device));
        for name in ["mount-3-79.log", "mount-3.sock", "mount-x-1.sock", "3-79"] {
            assert_eq!(device_of_socket(name), None, "{name}");
        }
    }

    /// Mounts that must be refused for several reasons. Each error must name the obstacle, and nothing may have
    /// changed.
    #[test]
    fn a_refusal_names_the_obstacle() {
        let folder = tempfile::tempdir().unwrap();
        let wanted =
            |point: &Path, size| MountRequest { point: point.to_owned(), size_bytes: Some(size), mode: 0o1777 };
        let refusal = |point: &Path, size| wanted(point, size).mount().err().unwrap().to_string();
        assert_eq!(refusal(folder.path(), 0), "a size of 0 holds no file");
        assert!(refusal(folder.path(), u64::MAX).contains("is beyond the machine's memory"));
        assert!(refusal(&folder.path().join("x"), 1 << 20).contains("does not exist"));
        fs::write(folder.path().join("file"), "x").unwrap();
        assert!(refusal(&folder.path().join("file"), 1 << 20).ends_with("is no folder"));
        assert!(refusal(folder.path(), 1 << 20).ends_with("is not empty: `file` would be hidden"));
        assert!(refusal(Path::new("/proc"), 1 << 20).contains("something is mounted on /proc already: proc"));
        assert!(find_own_mount(Path::new("/proc")).unwrap_err().to_string().ends_with("was not mounted by Pagemill"));
        assert!(find_own_mount(folder.path()).unwrap_err().to_string().starts_with("nothing is mounted on"));
        assert!(matches!(unmount(Path::new("/proc"), 1, 0), Err(Refusal::NotOurs(_))));
    }

    /// One thread creates sockets while another thread continuously removes dead sockets. Each new socket must still
    /// exist afterwards.
    #[test]
    fn a_sweep_keeps_new_sockets() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("mount-0-1.sock");
        drop(UnixListener::bind(folder.path().join("mount-0-2.sock")).unwrap());
        let swept = || {
            let _lock = lock(folder.path()).unwrap();
            remove_dead_sockets(folder.path());
        };
        let is_over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                    swept();
                }
            });
            let is_kept = |_listener| {
                // The lock waits until a sweep that is running ends.
                drop(lock(folder.path()).unwrap());
                path.exists()
            };
            let are_kept = (0..2000).all(|_| listen(&path).is_ok_and(is_kept));
            is_over.store(true, std::sync::atomic::Ordering::Relaxed);
            assert!(are_kept);
        });
        swept();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "only the lock is left");
    }
}
