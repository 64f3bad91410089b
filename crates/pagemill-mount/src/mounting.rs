//! Mounting, taking over, unmounting; and who is in the way.

use crate::door::Door;
use pagemill::published;
use pagemill::units::Bytes;
use rustix::fs::{Mode, OFlags};
use rustix::mount::{self, FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, UnmountFlags};
use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// Name of the source in `mountinfo`, by which a mount is known as ours.
const SOURCE: &str = "pagemill";

/// A line of `/proc/self/mountinfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountLine {
    device: (u32, u32),
    pub point: PathBuf,
    pub kind: String,
    pub source: String,
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
        Some(Self { device: (major.parse().ok()?, minor.parse().ok()?), point, kind, source })
    }

    /// A tmpfs that Pagemill mounted.
    pub fn is_ours(&self) -> bool {
        self.kind == "tmpfs" && self.source == SOURCE
    }
}

/// `\040` and its like, as the kernel writes blanks.
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

/// All mounts, in the order in which they lie upon each other.
fn mounts() -> io::Result<Vec<MountLine>> {
    // Anybody's mount point may be of any bytes.
    let text = fs::read("/proc/self/mountinfo")?;
    Ok(text.split(|byte| *byte == b'\n').filter_map(MountLine::parse).collect())
}

/// The mount that is seen at a path, if one is right there.
///
/// # Errors
///
/// What reading `/proc` says.
pub fn mount_at(point: &Path) -> io::Result<Option<MountLine>> {
    Ok(mounts()?.into_iter().rfind(|line| line.point == point))
}

fn device_numbers(device: u64) -> (u32, u32) {
    (rustix::fs::major(device), rustix::fs::minor(device))
}

/// Whether the file system is mounted anywhere that this process can see.
pub fn is_mounted(device: u64) -> bool {
    let numbers = device_numbers(device);
    // Who cannot look does not conclude that it is gone.
    mounts().map_or(true, |mounts| mounts.iter().any(|line| line.device == numbers))
}

/// Root's folder for sockets and locks, whatever its environment says: of all its sessions one may mount only.
const ROOT_FOLDER: &std::ffi::CStr = c"/run/pagemill";

/// Where sockets, locks and logs of this user's mounts lie.
///
/// # Errors
///
/// What making it says.
pub fn folder() -> io::Result<PathBuf> {
    if rustix::process::geteuid().is_root() && pagemill_sys::file::make_private_dir(ROOT_FOLDER).is_ok() {
        return Ok(PathBuf::from(ROOT_FOLDER.to_string_lossy().into_owned()));
    }
    Ok(PathBuf::from(published::user_folder()?.as_str()))
}

/// Where the controller of a file system listens.
///
/// # Errors
///
/// What making the user's folder says.
pub fn socket_path(device: u64) -> io::Result<PathBuf> {
    let (major, minor) = device_numbers(device);
    Ok(folder()?.join(format!("mount-{major}-{minor}.sock")))
}

/// Why something is not mounted, or not unmounted.
#[derive(Debug)]
pub enum Refusal {
    Missing(PathBuf),
    NoFolder(PathBuf),
    NotEmpty { point: PathBuf, entries: usize, first: String },
    Taken { point: PathBuf, kind: String, source: String },
    Running(PathBuf),
    NoSize,
    TooLarge { size_bytes: u64, machine_bytes: u64 },
    NotOurs(PathBuf),
    NotMounted(PathBuf),
    Busy { point: PathBuf, holders: Vec<Holder>, below: Vec<PathBuf> },
    NoLock { path: PathBuf, error: io::Error },
    NotAllowed { what: &'static str, error: io::Error },
    System { what: &'static str, error: io::Error },
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing(point) => write!(f, "{} does not exist: mkdir -p '{0}'", point.display()),
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
            Self::NotMounted(point) => write!(f, "nothing is mounted on {}", point.display()),
            Self::Busy { point, holders, below } => {
                write!(f, "{} is busy", point.display())?;
                if holders.is_empty() && below.is_empty() {
                    write!(
                        f,
                        ": in use by what cannot be seen from here (another user's process, a loop device, swap)"
                    )?;
                }
                below.iter().try_for_each(|point| write!(f, "\n  mounted below it: {}", point.display()))?;
                holders.iter().try_for_each(|holder| write!(f, "\n  {holder}"))
            }
            Self::NotAllowed { what, error } => {
                write!(f, "{what}: {error}; as an ordinary user `pagemill run --ram DIR -- PROGRAM` does it")
            }
            Self::NoLock { path, error } => write!(f, "{} cannot be locked: {error}", path.display()),
            Self::System { what, error } => write!(f, "{what}: {error}"),
        }
    }
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> Refusal {
    move |error| match error.kind() {
        io::ErrorKind::PermissionDenied => Refusal::NotAllowed { what, error },
        _ => Refusal::System { what, error },
    }
}

/// What a mount is to be.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub point: PathBuf,
    pub size_bytes: u64,
    /// Permissions of its root.
    pub mode: u32,
}

/// A file system that is mounted, and the way in.
pub struct Mounted {
    pub point: PathBuf,
    pub door: Door,
    /// It was there; its controller was not.
    pub was_taken_over: bool,
    /// The kernel has no huge pages for it.
    pub has_no_huge: bool,
}

impl Wanted {
    /// Mounts it, or takes over what is mounted there without a controller.
    ///
    /// # Errors
    ///
    /// A [`Refusal`] that says what is in the way.
    pub fn mount(&self) -> Result<Mounted, Refusal> {
        self.check_size()?;
        let point = canonical(&self.point)?;
        // Of two that mount here at the same time the second shall see what the first has done.
        let no_folder = "no folder for its socket can be made, by XDG_RUNTIME_DIR or below /run, /dev/shm, /tmp";
        let path = folder().map_err(system(no_folder))?.join("mount.lock");
        let lock = fs::File::create(&path).and_then(|lock| {
            rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive)?;
            Ok(lock)
        });
        let _lock = lock.map_err(|error| Refusal::NoLock { path, error })?;
        sweep();
        match mount_at(&point).map_err(system("the mounts cannot be read"))? {
            Some(line) if line.is_ours() => self.take_over(point),
            Some(line) => Err(Refusal::Taken { point, kind: line.kind, source: line.source }),
            None => self.mount_new(point),
        }
    }

    fn check_size(&self) -> Result<(), Refusal> {
        let machine = pagemill_sys::cgroup::machine("").map_err(system("the machine's memory cannot be read"))?;
        match self.size_bytes {
            0 => Err(Refusal::NoSize),
            size_bytes if size_bytes > machine.total_bytes => {
                Err(Refusal::TooLarge { size_bytes, machine_bytes: machine.total_bytes })
            }
            _ => Ok(()),
        }
    }

    fn take_over(&self, point: PathBuf) -> Result<Mounted, Refusal> {
        let door = Door::open(&point).map_err(system("the mount cannot be opened"))?;
        if is_controlled(door.device()) {
            return Err(Refusal::Running(point));
        }
        Ok(Mounted { point, door, was_taken_over: true, has_no_huge: false })
    }

    fn mount_new(&self, point: PathBuf) -> Result<Mounted, Refusal> {
        // From here on it is this folder that is meant, whatever is renamed.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = || -> io::Result<OwnedFd> { Ok(rustix::fs::open(&point, flags, Mode::empty())?) };
        let below = open().map_err(system("the mount point cannot be opened"))?;
        let place = PathBuf::from(format!("/proc/self/fd/{}", below.as_raw_fd()));
        if fs::read_link(&place).ok().as_ref() != Some(&point) {
            return Err(Refusal::Missing(point));
        }
        let mut entries = fs::read_dir(&place).map_err(system("the mount point cannot be read"))?;
        if let Some(Ok(first)) = entries.next() {
            let first = first.file_name().to_string_lossy().into_owned();
            return Err(Refusal::NotEmpty { point, entries: 1 + entries.count(), first });
        }
        let (mount, has_no_huge) = self.make().map_err(system("tmpfs cannot be mounted"))?;
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        mount::move_mount(&mount, "", &below, "", flags)
            .map_err(|error| system("tmpfs cannot be mounted")(error.into()))?;
        // Only now: what is mounted nowhere could not be cloned before Linux 6.15.
        let door = Door::of_mount(&mount).map_err(|error| {
            drop(mount);
            let _ = mount::unmount(&point, UnmountFlags::NOFOLLOW);
            system("the mount cannot be opened")(error)
        })?;
        Ok(Mounted { point, door, was_taken_over: false, has_no_huge })
    }

    /// A new tmpfs that is mounted nowhere yet, and whether it has no huge pages.
    fn make(&self) -> io::Result<(OwnedFd, bool)> {
        let context = mount::fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        let set = |key: &str, value: String| mount::fsconfig_set_string(context.as_fd(), key, value);
        set("source", SOURCE.into())?;
        set("size", self.size_bytes.to_string())?;
        set("mode", format!("{:o}", self.mode))?;
        let has_no_huge = set("huge", "within_size".into()).is_err();
        mount::fsconfig_create(context.as_fd())?;
        let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
        Ok((mount::fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)?, has_no_huge))
    }
}

/// The folder's path without links.
fn canonical(point: &Path) -> Result<PathBuf, Refusal> {
    let found = fs::canonicalize(point).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Refusal::Missing(point.to_owned()),
        _ => system("the mount point cannot be looked at")(error),
    })?;
    if found.is_dir() { Ok(found) } else { Err(Refusal::NoFolder(found)) }
}

/// Removes the sockets of controllers that were killed: nobody listens there any more.
fn sweep() {
    let Ok(entries) = folder().and_then(fs::read_dir) else { return };
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        let is_dead =
            || UnixStream::connect(&path).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused);
        if path.extension().is_some_and(|end| end == "sock") && is_dead() {
            let _ = fs::remove_file(&path);
        }
    }
}

/// Whether a controller answers for the file system.
pub fn is_controlled(device: u64) -> bool {
    socket_path(device).is_ok_and(|path| UnixStream::connect(path).is_ok())
}

/// The file system of ours that is mounted right at `point`: its canonical path, and its device.
///
/// # Errors
///
/// A [`Refusal`] that says what is there instead.
pub fn find(point: &Path) -> Result<(PathBuf, u64), Refusal> {
    let point = canonical(point)?;
    let line = mount_at(&point).map_err(system("the mounts cannot be read"))?;
    let device = fs::metadata(&point).map_err(system("the mount cannot be looked at"))?.dev();
    match line {
        None => Err(Refusal::NotMounted(point)),
        Some(line) if !line.is_ours() || line.device != device_numbers(device) => Err(Refusal::NotOurs(point)),
        Some(_) => Ok((point, device)),
    }
}

/// Unmounts the file system with this device from `point`, if it is what is mounted there. (Who mounts something on it between
/// that look and the call has that unmounted.)
///
/// # Errors
///
/// [`Refusal::Busy`] with who is in the way; `controller` and its children never are.
pub fn unmount(point: &Path, device: u64, controller: u32) -> Result<(), Refusal> {
    let line = mount_at(point).map_err(system("the mounts cannot be read"))?;
    if !line.is_some_and(|line| line.is_ours() && line.device == device_numbers(device)) {
        return Err(Refusal::NotOurs(point.to_owned()));
    }
    match mount::unmount(point, UnmountFlags::NOFOLLOW) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::BUSY) => {
            Err(Refusal::Busy { point: point.to_owned(), holders: holders(device, controller), below: below(point) })
        }
        Err(error) => Err(system("it cannot be unmounted")(error.into())),
    }
}

/// What is mounted below a path.
fn below(point: &Path) -> Vec<PathBuf> {
    let all = mounts().unwrap_or_default().into_iter().map(|line| line.point);
    all.filter(|other| other != point && other.starts_with(point)).collect()
}

/// Where else a file system is mounted, as far as can be seen.
pub fn places(device: u64) -> Vec<PathBuf> {
    let numbers = device_numbers(device);
    let all = mounts().unwrap_or_default().into_iter();
    all.filter(|line| line.device == numbers).map(|line| line.point).collect()
}

/// Whether a file system is one that Pagemill mounted.
pub fn is_ours(device: u64) -> bool {
    let numbers = device_numbers(device);
    mounts().is_ok_and(|mounts| mounts.iter().any(|line| line.device == numbers && line.is_ours()))
}

/// A process that uses a file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    pub pid: u32,
    pub name: String,
    pub how: String,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, how) = (self.name.escape_debug(), self.how.escape_debug());
        write!(f, "process {} ({name}): {how}", self.pid)
    }
}

/// Who uses a file system, as far as may be seen; not this process, nor `controller` and its children.
pub fn holders(device: u64, controller: u32) -> Vec<Holder> {
    const MOST: usize = 20;
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    let own = [std::process::id(), controller];
    let is_own = |pid: u32| own.contains(&pid) || parent(pid).is_some_and(|parent| own.contains(&parent));
    let others = pids.filter(|pid| !is_own(*pid));
    others.filter_map(|pid| holder(pid, device)).take(MOST).collect()
}

fn parent(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}

fn holder(pid: u32, device: u64) -> Option<Holder> {
    let at = |what: &str| PathBuf::from(format!("/proc/{pid}/{what}"));
    let is_on = |path: &Path| fs::metadata(path).is_ok_and(|metadata| metadata.dev() == device);
    let target = |path: &Path| fs::read_link(path).map_or_else(|_| "?".into(), |path| path.display().to_string());
    let how = if is_on(&at("cwd")) {
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
    Some(Holder { pid, name, how })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines are read with optional fields and escaped blanks; ours are told from others.
    #[test]
    fn mount_lines_are_read() {
        let line = b"36 35 0:79 / /mnt/a\\040b rw,nosuid shared:9 master:1 - tmpfs pagemill rw,size=8k";
        let line = MountLine::parse(line).unwrap();
        assert_eq!((line.device, line.point.to_str().unwrap(), line.is_ours()), ((0, 79), "/mnt/a b", true));
        let other = MountLine::parse(b"36 35 0:79 / /tm\xff rw - tmpfs tmpfs rw").unwrap();
        assert!(!other.is_ours() && MountLine::parse(b"nonsense").is_none());
        assert_eq!(unescape(b"a\\134b\\9"), b"a\\b\\9");
    }

    /// What is in the way is named, before anything is done.
    #[test]
    fn refusals_name_what_is_in_the_way() {
        let folder = tempfile::tempdir().unwrap();
        let wanted = |point: &Path, size_bytes| Wanted { point: point.to_owned(), size_bytes, mode: 0o1777 };
        let refusal = |point: &Path, size| wanted(point, size).mount().err().unwrap().to_string();
        assert_eq!(refusal(folder.path(), 0), "a size of 0 holds no file");
        assert!(refusal(folder.path(), u64::MAX).contains("is beyond the machine's memory"));
        assert!(refusal(&folder.path().join("x"), 1 << 20).contains("does not exist: mkdir -p"));
        fs::write(folder.path().join("file"), "x").unwrap();
        assert!(refusal(&folder.path().join("file"), 1 << 20).ends_with("is no folder"));
        assert!(refusal(folder.path(), 1 << 20).ends_with("is not empty: `file` would be hidden"));
        assert!(refusal(Path::new("/proc"), 1 << 20).contains("something is mounted on /proc already: proc"));
        assert!(find(Path::new("/proc")).unwrap_err().to_string().ends_with("was not mounted by Pagemill"));
        assert!(find(folder.path()).unwrap_err().to_string().starts_with("nothing is mounted on"));
        assert!(matches!(unmount(Path::new("/proc"), 1, 0), Err(Refusal::NotOurs(_))));
    }
}
