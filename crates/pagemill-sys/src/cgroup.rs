//! Memory control groups, versions 1 and 2: the groups that this process is charged to, and their limits.
//!
//! A [`Hierarchy`] is searched for once and queried often. When the process moves to another group, the files of the
//! old group still exist, so callers should check [`Hierarchy::is_current`] from time to time. Nothing here allocates
//! or keeps a descriptor open: callers run inside `malloc`, and a program may close descriptors that it did not open.

use crate::file::{self, Path};
use std::io;

/// Maximum number of nested control groups that are examined, from the innermost outwards.
pub const MAX_LEVELS: usize = 12;

/// Version 1 reports that a group has no limit by a number above this value.
const NO_LIMIT: u64 = i64::MAX as u64 - (1 << 16);

/// Version of the control group interface, which determines the file names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    V1,
    V2,
}

/// A mount of a control group hierarchy: the group that is the root of the mount, and the mount point.
struct Mount<'line> {
    pub version: Version,
    /// Path, within the hierarchy, of the group at the root of the mount.
    pub root: &'line str,
    /// Path of the mount point.
    pub at: &'line str,
}

impl<'line> Mount<'line> {
    /// Parses a line of `mountinfo`. Returns `None` unless the line describes a mount of the memory controller of
    /// version 1, or of the hierarchy of version 2.
    fn parse_mount(line: &'line str) -> Option<Self> {
        let (place, kind) = line.split_once(" - ")?;
        let mut place = place.split(' ').skip(3);
        let (root, at) = (place.next()?, place.next()?);
        let mut kind = kind.split(' ');
        let (file_system, options) = (kind.next()?, kind.nth(1)?);
        match file_system {
            "cgroup" if options.split(',').any(|option| option == "memory") => {
                Some(Self { version: Version::V1, root, at })
            }
            "cgroup2" => Some(Self { version: Version::V2, root, at }),
            _ => None,
        }
    }

    /// Returns the folder, below `root`, of the group that has the path `path` in the hierarchy.
    fn folder(&self, root: &str, path: &str) -> Option<Path> {
        // A container's mount may show only its own groups. A path outside of the shown groups is ignored.
        let inner = path.strip_prefix(self.root.trim_end_matches('/')).unwrap_or("");
        let inner = if inner.split('/').any(|part| part == "..") { "" } else { inner.trim_end_matches('/') };
        format_path(format_args!("{root}{}{inner}", self.at)).ok()
    }
}

/// Returns the folder of this process's control group, and the version of its hierarchy. That is the hierarchy of the
/// memory controller in version 1, or else the hierarchy of version 2, which may lack the memory controller.
///
/// Unlike [`Hierarchy::find`], also returns a group that has no memory statistics.
///
/// # Errors
///
/// `NotFound` if no such hierarchy is visible; errors of reading `/proc`.
pub fn own_group(root: &str) -> io::Result<(Version, Path)> {
    find_mount(root, "self", |mount, path| Some((mount.version, mount.folder(root, path)?)))
}

/// Calls `act` with each mount of a hierarchy that process `pid` is in, and with the process's path in that hierarchy.
/// Returns the first value that `act` returns.
fn find_mount<T>(root: &str, pid: &str, act: impl Fn(&Mount<'_>, &str) -> Option<T>) -> io::Result<T> {
    for version in [Version::V1, Version::V2] {
        let Some(path) = read_group_path(root, pid, version)? else { continue };
        let mountinfo = format_path(format_args!("{root}/proc/self/mountinfo"))?;
        let found = file::find_line(mountinfo.as_c_str(), |line| {
            act(&Mount::parse_mount(line).filter(|mount| mount.version == version)?, path.as_str())
        })?;
        if let Some(found) = found {
            return Ok(found);
        }
    }
    Err(io::ErrorKind::NotFound.into())
}

/// Parses a line of `/proc/PID/cgroup`. Returns the path of the process's group if the line is that of the memory
/// controller (version 1) or of the hierarchy of version 2.
fn parse_group_path(line: &str, version: Version) -> Option<&str> {
    let mut fields = line.splitn(3, ':').skip(1);
    let (controllers, path) = (fields.next()?, fields.next()?);
    let is_ours = match version {
        Version::V1 => controllers.split(',').any(|name| name == "memory"),
        Version::V2 => controllers.is_empty(),
    };
    is_ours.then_some(path)
}

/// The groups that a process's memory is charged to: the process's own group and all its visible ancestors.
pub struct Hierarchy {
    pub version: Version,
    /// Folder of the innermost group that has memory statistics.
    own: Path,
    /// Length in bytes of the mount point's path, which is a prefix of `own`.
    mount_len: usize,
    /// Path of the process in `/proc/self/cgroup` when its groups were searched for. A different path later shows that
    /// the process has moved to another group.
    path: Path,
}

/// The limits of a group; `u64::MAX` means no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// The smaller of `memory.high`, above which the kernel throttles the group, and `memory.max`. In version 1 equal
    /// to `hard_bytes`.
    pub soft_bytes: u64,
    /// `memory.max`, or the limit of version 1. If the group cannot stay below this limit, the kernel kills processes
    /// of the group.
    pub hard_bytes: u64,
}

/// The memory of a group, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupMemory {
    /// Bytes of inactive file pages.
    pub idle_bytes: u64,
    /// Bytes of active file pages, and of reclaimable kernel caches (slabs).
    pub other_bytes: u64,
    /// Bytes of files in memory-only file systems, and of shared memory.
    pub shared_bytes: u64,
}

impl Limit {
    pub const NONE: Self = Self { soft_bytes: u64::MAX, hard_bytes: u64::MAX };
}

impl Hierarchy {
    /// Searches for this process's groups. `root` is prepended to every path. It is empty, except in tests with fake
    /// files.
    ///
    /// Takes some 100 us. Prefers version 1 if both versions have the memory controller, as the kernel does.
    ///
    /// # Errors
    ///
    /// `NotFound` if no memory controller is visible; errors of reading `/proc`.
    pub fn find(root: &str) -> io::Result<Self> {
        Self::find_of(root, "self")
    }

    /// As [`Self::find`], for the process with the given id.
    ///
    /// # Errors
    ///
    /// As [`Self::find`]; also `NotFound` if the process has ended.
    pub fn find_of(root: &str, pid: &str) -> io::Result<Self> {
        find_mount(root, pid, |mount, path| Self::find_in_mount(root, mount, path))
    }

    /// Returns the group whose folder is `folder`, and its ancestors up to the mount point of the hierarchy.
    ///
    /// # Errors
    ///
    /// `NotFound` if `folder` is not the folder of a group with memory statistics; errors of reading `/proc`.
    pub fn find_at(root: &str, folder: &str) -> io::Result<Self> {
        let mountinfo = format_path(format_args!("{root}/proc/self/mountinfo"))?;
        let found = file::find_line(mountinfo.as_c_str(), |line| {
            let mount = Mount::parse_mount(line)?;
            let at = format_path(format_args!("{root}{}", mount.at)).ok()?;
            let inner = folder.trim_end_matches('/').strip_prefix(at.as_str())?;
            let path = format_path(format_args!("{}{inner}", mount.root.trim_end_matches('/'))).ok()?;
            let found = Self::find_in_mount(root, &mount, path.as_str())?;
            (found.own.as_str().len() == at.as_str().len() + inner.len()).then_some(found)
        })?;
        found.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Returns the group that has the path `path`, and its ancestors, as visible in one mount. Skips inner groups
    /// without memory statistics; returns `None` if no group has memory statistics.
    fn find_in_mount(root: &str, mount: &Mount<'_>, path: &str) -> Option<Self> {
        let mut hierarchy = Self {
            version: mount.version,
            own: mount.folder(root, path)?,
            mount_len: root.len() + mount.at.len(),
            path: format_path(format_args!("{path}")).ok()?,
        };
        // The controller may be enabled only for an ancestor of the group.
        let first = (0..MAX_LEVELS).find_map(|level| {
            let folder = hierarchy.folder(level)?;
            hierarchy.read_number(&folder, hierarchy.usage_file_name()).ok().map(|_| folder)
        })?;
        hierarchy.own = format_path(format_args!("{}", first.as_str())).ok()?;
        Some(hierarchy)
    }

    /// Returns whether this process is still in the group in which [`Self::find`] found it.
    pub fn is_current(&self, root: &str) -> bool {
        let now = read_group_path(root, "self", self.version);
        now.is_ok_and(|path| path.is_some_and(|path| path.as_bytes() == self.path.as_bytes()))
    }

    /// Returns the folder of the group that is `level` steps above the innermost one; `None` above the mount point.
    pub fn folder(&self, level: usize) -> Option<Path> {
        let mut folder = self.own.as_str();
        for _ in 0..level {
            if folder.len() <= self.mount_len {
                return None;
            }
            folder = &folder[..folder.rfind('/').filter(|at| *at >= self.mount_len)?];
        }
        format_path(format_args!("{folder}")).ok()
    }

    /// Returns the name of the group with this folder: its path below the mount point, as in `/proc/self/cgroup`.
    pub fn name<'folder>(&self, folder: &'folder Path) -> &'folder str {
        match folder.as_str().get(self.mount_len..) {
            None | Some("") => "/",
            Some(name) => name,
        }
    }

    /// Returns the name of the file that contains the memory usage of a group.
    fn usage_file_name(&self) -> &'static str {
        match self.version {
            Version::V1 => "memory.usage_in_bytes",
            Version::V2 => "memory.current",
        }
    }

    /// Reads the number in the file `name` of the group with this folder.
    fn read_number(&self, folder: &Path, name: &str) -> io::Result<u64> {
        file::read_number(format_path(format_args!("{}/{name}", folder.as_str()))?.as_c_str())
    }

    /// Returns the limits of the group with this folder; [`Limit::NONE`] if they cannot be read.
    pub fn limit(&self, folder: &Path) -> Limit {
        self.try_limit(folder).unwrap_or(Limit::NONE)
    }

    /// Returns the limits of a group.
    ///
    /// # Errors
    ///
    /// Errors of reading. A missing file (as in the root group of version 2) means no limit.
    pub fn try_limit(&self, folder: &Path) -> io::Result<Limit> {
        let read = |name| match self.read_number(folder, name) {
            Ok(limit) if limit < NO_LIMIT => Ok(limit),
            Ok(_) => Ok(u64::MAX),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(u64::MAX),
            Err(error) => Err(error),
        };
        Ok(match self.version {
            Version::V1 => {
                let hard_bytes = read("memory.limit_in_bytes")?;
                Limit { soft_bytes: hard_bytes, hard_bytes }
            }
            Version::V2 => {
                let hard_bytes = read("memory.max")?;
                Limit { soft_bytes: read("memory.high")?.min(hard_bytes), hard_bytes }
            }
        })
    }

    /// Returns the smallest soft limit of the process's group and its ancestors; `u64::MAX` if no group has a limit.
    pub fn smallest_limit_bytes(&self) -> u64 {
        let folders = (0..MAX_LEVELS).map_while(|level| self.folder(level));
        folders.map(|folder| self.limit(&folder).soft_bytes).min().unwrap_or(u64::MAX)
    }

    /// Returns the memory usage of the group with this folder, including page cache. Takes some 4 us.
    ///
    /// # Errors
    ///
    /// Errors of reading (the root group of version 2 has no such file); `InvalidData` for malformed contents.
    pub fn usage_bytes(&self, folder: &Path) -> io::Result<u64> {
        self.read_number(folder, self.usage_file_name())
    }

    /// Returns the bytes that the kernel can reclaim from a group before it kills processes. The first number counts
    /// inactive file pages. The second counts other file pages and reclaimable kernel caches, which are slower to
    /// reclaim. Takes some 20 to 50 us.
    pub fn reclaimable_bytes(&self, folder: &Path) -> (u64, u64) {
        let memory = self.memory(folder).unwrap_or_default();
        (memory.idle_bytes, memory.other_bytes)
    }

    /// Returns the memory of the group by kind. Takes some 20 to 50 us.
    ///
    /// `inactive_file` alone does not measure inactive file pages: it also counts pages offered with `MADV_FREE`, even
    /// after their owner uses them again. So `idle_bytes` is at most the file pages that are neither active nor in
    /// memory-only files.
    ///
    /// # Errors
    ///
    /// Errors of reading.
    pub fn memory(&self, folder: &Path) -> io::Result<GroupMemory> {
        let names = match self.version {
            Version::V1 => [
                "total_inactive_file ",
                "total_active_file ",
                "total_slab_reclaimable ",
                "total_cache ",
                "total_shmem ",
            ],
            Version::V2 => ["inactive_file ", "active_file ", "slab_reclaimable ", "file ", "shmem "],
        };
        let found = self.read_memory_stat(folder, names)?;
        let [idle, active, slab, files, shared_bytes] = found.map(Option::unwrap_or_default);
        let idle_files = files.saturating_sub(shared_bytes).saturating_sub(active);
        Ok(GroupMemory { idle_bytes: idle.min(idle_files), other_bytes: active.saturating_add(slab), shared_bytes })
    }

    /// Reads the rows with these names from the group's `memory.stat`. A missing row is `None`.
    fn read_memory_stat<const N: usize>(&self, folder: &Path, names: [&str; N]) -> io::Result<[Option<u64>; N]> {
        let mut found = [None; N];
        let path = format_path(format_args!("{}/memory.stat", folder.as_str()))?;
        let _: Option<()> = file::find_line(path.as_c_str(), |line| {
            for (place, name) in found.iter_mut().zip(names) {
                if let Some(number) = line.strip_prefix(name) {
                    *place = number.trim().parse().ok();
                }
            }
            found.iter().all(Option::is_some).then_some(())
        })?;
        Ok(found)
    }
}

/// Returns the mount point of the hierarchy of version 2, from the text of `mountinfo`.
pub(crate) fn v2_mount_point(mountinfo: &str) -> Option<&str> {
    let mut mounts = mountinfo.lines().filter_map(Mount::parse_mount);
    mounts.find(|mount| mount.version == Version::V2).map(|mount| mount.at)
}

/// Returns the path of the group of process `pid` in the hierarchy of `version`; `None` if the process is in no such
/// hierarchy.
fn read_group_path(root: &str, pid: &str, version: Version) -> io::Result<Option<Path>> {
    let file = format_path(format_args!("{root}/proc/{pid}/cgroup"))?;
    file::find_line(file.as_c_str(), |line| format_path(format_args!("{}", parse_group_path(line, version)?)).ok())
}

/// Formats a path. Returns the error `InvalidInput` if the path is too long for a [`Path`].
fn format_path(arguments: std::fmt::Arguments<'_>) -> io::Result<Path> {
    Path::format(arguments).ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

/// The memory of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Machine {
    pub total_bytes: u64,
    /// Memory that programs can still allocate without swapping (`MemAvailable`).
    pub available_bytes: u64,
    pub swap_free_bytes: u64,
}

/// Returns the machine's memory, as reported by `/proc/meminfo` below the folder `root`. Takes some 20 us.
///
/// # Errors
///
/// Errors of reading `/proc/meminfo`; `InvalidData` if rows are missing.
pub fn machine(root: &str) -> io::Result<Machine> {
    let file = format_path(format_args!("{root}/proc/meminfo"))?;
    let mut found = [None; 3];
    let _: Option<()> = file::find_line(file.as_c_str(), |line| {
        let (name, rest) = line.split_once(':')?;
        let place = ["MemTotal", "MemAvailable", "SwapFree"].iter().position(|known| *known == name)?;
        found[place] = rest.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024);
        found.iter().all(Option::is_some).then_some(())
    })?;
    match found {
        [Some(total_bytes), Some(available_bytes), swap] => {
            Ok(Machine { total_bytes, available_bytes, swap_free_bytes: swap.unwrap_or(0) })
        }
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fake_files(files: &[(&str, &str)]) -> (tempfile::TempDir, String) {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().to_str().unwrap().to_owned();
        for (path, text) in files {
            let path = std::path::PathBuf::from(format!("{root}{path}"));
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        (folder, root)
    }

    const V2_MOUNT: (&str, &str) =
        ("/proc/self/mountinfo", "22 1 8:1 / / rw - ext4 x rw\n30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");

    /// In a control group hierarchy of version 2, the process's groups must be listed from the innermost outwards. Each
    /// group must have its inactive file pages, and the smaller of `memory.max` and `memory.high` as its limit. A move
    /// of the process to another group must be detected.
    #[test]
    fn v2_groups_are_listed_from_the_innermost() {
        let (_folder, root) = fake_files(&[
            V2_MOUNT,
            ("/proc/self/cgroup", "0::/app/worker\n"),
            ("/sys/fs/cgroup/app/memory.max", "1073741824\n"),
            ("/sys/fs/cgroup/app/memory.high", "536870912\n"),
            ("/sys/fs/cgroup/app/memory.current", "200\n"),
            ("/sys/fs/cgroup/app/worker/memory.max", "max\n"),
            ("/sys/fs/cgroup/app/worker/memory.current", "100\n"),
            (
                "/sys/fs/cgroup/app/worker/memory.stat",
                "anon 1\nfile 90\nshmem 9\ninactive_anon 3\ninactive_file 40\nactive_file 7\nslab_reclaimable 5\n",
            ),
        ]);
        let groups = Hierarchy::find(&root).unwrap();
        assert_eq!(groups.version, Version::V2);
        let levels: Vec<_> = (0..MAX_LEVELS).map_while(|level| groups.folder(level)).collect();
        let ends: Vec<_> = levels.iter().map(|folder| folder.as_str().strip_prefix(root.as_str()).unwrap()).collect();
        assert_eq!(ends, ["/sys/fs/cgroup/app/worker", "/sys/fs/cgroup/app", "/sys/fs/cgroup"]);
        assert_eq!((groups.limit(&levels[0]), groups.usage_bytes(&levels[0]).unwrap()), (Limit::NONE, 100));
        assert_eq!(
            (groups.reclaimable_bytes(&levels[0]), groups.memory(&levels[0]).unwrap().shared_bytes),
            ((40, 12), 9)
        );
        // These numbers occur when a process offered pages with `MADV_FREE`: more inactive file pages than file pages.
        let stat = "file 30\nshmem 9\ninactive_file 40\nactive_file 7\nslab_reclaimable 5\n";
        std::fs::write(format!("{root}/sys/fs/cgroup/app/worker/memory.stat"), stat).unwrap();
        assert_eq!(groups.reclaimable_bytes(&levels[0]), (14, 12));
        let limit = Limit { soft_bytes: 512 << 20, hard_bytes: 1 << 30 };
        assert_eq!((groups.limit(&levels[1]), groups.reclaimable_bytes(&levels[1])), (limit, (0, 0)));
        assert_eq!(groups.smallest_limit_bytes(), 512 << 20, "the limit of an ancestor");
        assert!(groups.usage_bytes(&levels[2]).is_err());
        let other = Hierarchy::find_at(&root, &format!("{root}/sys/fs/cgroup/app/worker/")).unwrap();
        assert_eq!(other.folder(0).unwrap().as_str(), levels[0].as_str());
        assert_eq!(other.folder(2).unwrap().as_str(), levels[2].as_str());
        assert!(Hierarchy::find_at(&root, &format!("{root}/sys/fs/cgroup/app/gone")).is_err());
        assert!(Hierarchy::find_at(&root, "/elsewhere").is_err());
        assert!(Hierarchy::find_of(&root, "77").is_err(), "no such process");
        assert!(groups.is_current(&root));
        let own = own_group(&root).unwrap();
        assert_eq!((own.0, own.1.as_str()), (Version::V2, levels[0].as_str()));
        std::fs::write(format!("{root}/proc/self/cgroup"), "0::/other\n").unwrap();
        assert!(!groups.is_current(&root));
    }

    /// In a container with version 1, the mount shows only the container's groups. These groups must be found, and the
    /// huge number that means no limit must be recognised.
    #[test]
    fn groups_of_a_v1_container_are_found() {
        let (_folder, root) = fake_files(&[
            ("/proc/self/cgroup", "4:cpu,memory:/docker/abc/task\n1:cpuset:/\n0::/\n"),
            (
                "/proc/self/mountinfo",
                "29 22 0:5 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n\
                 30 22 0:6 /docker/abc /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n",
            ),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "268435456\n"),
            ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "1048576\n"),
            ("/sys/fs/cgroup/memory/task/memory.limit_in_bytes", "9223372036854771712\n"),
            ("/sys/fs/cgroup/memory/task/memory.usage_in_bytes", "1048576\n"),
            (
                "/sys/fs/cgroup/memory/task/memory.stat",
                "inactive_file 1\ntotal_cache 600000\ntotal_inactive_file 524288\n",
            ),
        ]);
        let groups = Hierarchy::find(&root).unwrap();
        let (inner, outer) = (groups.folder(0).unwrap(), groups.folder(1).unwrap());
        assert!(inner.as_str().ends_with("/memory/task") && groups.folder(2).is_none());
        assert_eq!((groups.limit(&inner), groups.limit(&outer).hard_bytes), (Limit::NONE, 256 << 20));
        assert_eq!(groups.smallest_limit_bytes(), 256 << 20);
        assert_eq!(groups.reclaimable_bytes(&inner), (524_288, 0));
    }

    /// A missing mount, malformed files, a path outside the mount, and removed files must lead to an error, or count as
    /// no limit.
    #[test]
    fn malformed_groups_lead_to_errors() {
        let (_folder, root) =
            fake_files(&[("/proc/self/cgroup", "0::/\n"), ("/proc/self/mountinfo", "nonsense\n - \n")]);
        assert_eq!(Hierarchy::find(&root).err().unwrap().kind(), io::ErrorKind::NotFound);
        assert_eq!(own_group(&root).err().unwrap().kind(), io::ErrorKind::NotFound);
        // The root group of version 2 has no statistics, but `own_group` finds it.
        let (_folder, root) = fake_files(&[V2_MOUNT, ("/proc/self/cgroup", "0::/\n")]);
        assert!(Hierarchy::find(&root).is_err());
        assert_eq!(own_group(&root).unwrap().1.as_str(), format!("{root}/sys/fs/cgroup"));
        assert!(Hierarchy::find("/nowhere/at/all").is_err());

        let (_folder, root) = fake_files(&[
            V2_MOUNT,
            ("/proc/self/cgroup", "0::/../../outside\n"),
            ("/sys/fs/cgroup/memory.current", "7\n"),
            ("/sys/fs/cgroup/memory.max", "many\n"),
            ("/sys/fs/cgroup/memory.stat", &"x".repeat(5000)),
        ]);
        let groups = Hierarchy::find(&root).unwrap();
        let own = groups.folder(0).unwrap();
        assert_eq!((groups.limit(&own), groups.reclaimable_bytes(&own)), (Limit::NONE, (0, 0)));
        assert!(groups.folder(1).is_none());
        std::fs::write(format!("{root}/sys/fs/cgroup/memory.current"), "lots").unwrap();
        assert_eq!(groups.usage_bytes(&own).unwrap_err().kind(), io::ErrorKind::InvalidData);
        std::fs::remove_file(format!("{root}/sys/fs/cgroup/memory.current")).unwrap();
        assert!(groups.usage_bytes(&own).is_err());
    }

    /// `machine` must return the total and the available memory of a `meminfo` file. A file without these rows must
    /// lead to an error.
    #[test]
    fn the_machines_memory_is_read() {
        let text = "MemTotal:  100 kB\nMemFree: 1 kB\nMemAvailable:   40 kB\nSwapFree: 8 kB\n";
        let (_folder, root) = fake_files(&[("/proc/meminfo", text)]);
        let machine_here = machine(&root).unwrap();
        let expected = Machine { total_bytes: 100 << 10, available_bytes: 40 << 10, swap_free_bytes: 8 << 10 };
        assert_eq!(machine_here, expected);
        std::fs::write(format!("{root}/proc/meminfo"), "MemTotal: many kB\n").unwrap();
        assert!(machine(&root).is_err());
        let real = machine("").unwrap();
        assert!(real.available_bytes <= real.total_bytes && real.available_bytes > 0);
    }
}
