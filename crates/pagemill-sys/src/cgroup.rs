//! Memory control groups, both versions: where this process is charged, and how much of each limit is left.
//!
//! A [`Hierarchy`] is found once and asked often; when the process is moved
//! to another group its files go on existing, so look again now and then.
//! Nothing here allocates or keeps a descriptor open: it is called inside
//! `malloc`, and a program may close what it did not open.

use crate::file::{self, Path};
use std::io;

/// Most levels that are looked at, innermost first.
pub const MAX_LEVELS: usize = 12;

/// Version 1 writes "no limit" as the largest number of whole pages.
const NO_LIMIT: u64 = i64::MAX as u64 - (1 << 16);

/// Which generation's file names hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    V1,
    V2,
}

/// A mount of a controller: the part of the hierarchy that is visible, and where.
struct Mount<'line> {
    pub version: Version,
    pub root: &'line str,
    pub at: &'line str,
}

impl<'line> Mount<'line> {
    /// From a line of `mountinfo`: the memory controller of version 1, or the unified hierarchy.
    fn parse(line: &'line str) -> Option<Self> {
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
}

/// From a line of `/proc/PID/cgroup`: the process's path in the hierarchy of that version.
fn group_path(line: &str, version: Version) -> Option<&str> {
    let mut fields = line.splitn(3, ':').skip(1);
    let (controllers, path) = (fields.next()?, fields.next()?);
    let is_ours = match version {
        Version::V1 => controllers.split(',').any(|name| name == "memory"),
        Version::V2 => controllers.is_empty(),
    };
    is_ours.then_some(path)
}

/// The groups that a process's memory is charged to: its own, and all above as far as they are visible.
pub struct Hierarchy {
    pub version: Version,
    /// Folder of the innermost group that has figures.
    own: Path,
    /// Length of the part of `own` that is the mount.
    mount_len: usize,
    /// What `/proc/self/cgroup` said, to notice a move.
    path: Path,
}

/// A group's limits; `u64::MAX` for none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Where the kernel begins to slow the group down: the smaller of `memory.high` and `memory.max`.
    pub soft_bytes: u64,
    /// Where it kills: `memory.max`, or the limit of version 1.
    pub hard_bytes: u64,
}

/// What a group's memory is used for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// File pages that nobody used lately.
    pub idle_bytes: u64,
    /// Other file pages that can be read again, and caches of the kernel.
    pub other_bytes: u64,
    /// Files that are in memory only, and shared memory.
    pub shared_bytes: u64,
}

impl Limit {
    pub const NONE: Self = Self { soft_bytes: u64::MAX, hard_bytes: u64::MAX };
}

impl Hierarchy {
    /// Finds this process's groups. `root` stands before every path: empty, or a folder with a made-up tree.
    ///
    /// Cost: some 100 us. Version 1 is preferred where both have the controller, as the kernel does.
    ///
    /// # Errors
    ///
    /// `NotFound` if no memory controller is visible; what reading `/proc` says.
    pub fn find(root: &str) -> io::Result<Self> {
        Self::find_of(root, "self")
    }

    /// As [`Self::find`], of the process with that number.
    ///
    /// # Errors
    ///
    /// As [`Self::find`]; `NotFound` too if the process is gone.
    pub fn find_of(root: &str, pid: &str) -> io::Result<Self> {
        for version in [Version::V1, Version::V2] {
            let Some(path) = path_of(root, pid, version)? else { continue };
            let mountinfo = join(format_args!("{root}/proc/self/mountinfo"))?;
            let found = file::find_line(mountinfo.as_c_str(), |line| {
                let mount = Mount::parse(line).filter(|mount| mount.version == version)?;
                Self::below(root, &mount, path.as_str())
            })?;
            if let Some(found) = found {
                return Ok(found);
            }
        }
        Err(io::ErrorKind::NotFound.into())
    }

    /// The groups from the one with this folder on upwards, as far as they are below the mount of the controller.
    ///
    /// # Errors
    ///
    /// `NotFound` if the folder is none of a memory group; what reading `/proc` says.
    pub fn find_at(root: &str, folder: &str) -> io::Result<Self> {
        let mountinfo = join(format_args!("{root}/proc/self/mountinfo"))?;
        let found = file::find_line(mountinfo.as_c_str(), |line| {
            let mount = Mount::parse(line)?;
            let at = join(format_args!("{root}{}", mount.at)).ok()?;
            let inner = folder.trim_end_matches('/').strip_prefix(at.as_str())?;
            let path = join(format_args!("{}{inner}", mount.root.trim_end_matches('/'))).ok()?;
            let found = Self::below(root, &mount, path.as_str())?;
            (found.own.as_str().len() == at.as_str().len() + inner.len()).then_some(found)
        })?;
        found.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// The hierarchy of one mount, if the controller is there.
    fn below(root: &str, mount: &Mount<'_>, path: &str) -> Option<Self> {
        // Inside a container the mount may show only the container's part; what lies outside cannot be followed.
        let inner = path.strip_prefix(mount.root.trim_end_matches('/')).unwrap_or("");
        let inner = if inner.split('/').any(|part| part == "..") { "" } else { inner.trim_end_matches('/') };
        let at = join(format_args!("{root}{}", mount.at)).ok()?;
        let own = join(format_args!("{}{inner}", at.as_str())).ok()?;
        let mut hierarchy = Self {
            version: mount.version,
            own,
            mount_len: at.as_bytes().len(),
            path: join(format_args!("{path}")).ok()?,
        };
        // The controller may be handed down to an ancestor only.
        let first = (0..MAX_LEVELS).find_map(|level| {
            let folder = hierarchy.folder(level)?;
            hierarchy.read(&folder, hierarchy.usage_file()).ok().map(|_| folder)
        })?;
        hierarchy.own = join(format_args!("{}", first.as_str())).ok()?;
        Some(hierarchy)
    }

    /// Whether the process is still where it was found.
    pub fn is_current(&self, root: &str) -> bool {
        let now = path_of(root, "self", self.version);
        now.is_ok_and(|path| path.is_some_and(|path| path.as_bytes() == self.path.as_bytes()))
    }

    /// Folder of the group `level` steps above the innermost one; `None` above the mount.
    pub fn folder(&self, level: usize) -> Option<Path> {
        let mut folder = self.own.as_str();
        for _ in 0..level {
            if folder.len() <= self.mount_len {
                return None;
            }
            folder = &folder[..folder.rfind('/').filter(|at| *at >= self.mount_len)?];
        }
        join(format_args!("{folder}")).ok()
    }

    /// A group's name, as `/proc/self/cgroup` has it below the mount.
    pub fn name<'folder>(&self, folder: &'folder Path) -> &'folder str {
        match folder.as_str().get(self.mount_len..) {
            None | Some("") => "/",
            Some(name) => name,
        }
    }

    fn usage_file(&self) -> &'static str {
        match self.version {
            Version::V1 => "memory.usage_in_bytes",
            Version::V2 => "memory.current",
        }
    }

    fn read(&self, folder: &Path, name: &str) -> io::Result<u64> {
        file::read_number(join(format_args!("{}/{name}", folder.as_str()))?.as_c_str())
    }

    /// The limits of a group; none where none can be read.
    pub fn limit(&self, folder: &Path) -> Limit {
        self.try_limit(folder).unwrap_or(Limit::NONE)
    }

    /// The limits of a group.
    ///
    /// # Errors
    ///
    /// What reading says; that there is no such file (as at the root of version 2) is no error but no limit.
    pub fn try_limit(&self, folder: &Path) -> io::Result<Limit> {
        let read = |name| match self.read(folder, name) {
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

    /// What the group uses, page cache and all. Some 4 us.
    ///
    /// # Errors
    ///
    /// What reading says (the root of version 2 has no such file), `InvalidData` for nonsense.
    pub fn usage_bytes(&self, folder: &Path) -> io::Result<u64> {
        self.read(folder, self.usage_file())
    }

    /// What the kernel can take of a group before it kills: file pages that nobody used lately, and, with more effort,
    /// other file pages and caches of its own. Some 20 to 50 us.
    pub fn reclaimable_bytes(&self, folder: &Path) -> (u64, u64) {
        let held = self.held(folder).unwrap_or_default();
        (held.idle_bytes, held.other_bytes)
    }

    /// What the group's memory is used for, as far as that matters. Some 20 to 50 us.
    ///
    /// `inactive_file` alone is no measure of idle file pages: it also has what was offered by `MADV_FREE`, and keeps it when
    /// its owner uses it again. So file pages are counted themselves, less those that are active or in memory only.
    ///
    /// # Errors
    ///
    /// What reading says.
    pub fn held(&self, folder: &Path) -> io::Result<Held> {
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
        let found = self.stat(folder, names)?;
        let [idle, active, slab, files, shared_bytes] = found.map(Option::unwrap_or_default);
        let idle_files = files.saturating_sub(shared_bytes).saturating_sub(active);
        Ok(Held { idle_bytes: idle.min(idle_files), other_bytes: active.saturating_add(slab), shared_bytes })
    }

    /// Rows of `memory.stat`.
    fn stat<const N: usize>(&self, folder: &Path, names: [&str; N]) -> io::Result<[Option<u64>; N]> {
        let mut found = [None; N];
        let path = join(format_args!("{}/memory.stat", folder.as_str()))?;
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

/// Where the unified hierarchy is mounted, from the text of `mountinfo`.
pub(crate) fn unified_mount(mountinfo: &str) -> Option<&str> {
    let mut mounts = mountinfo.lines().filter_map(Mount::parse);
    mounts.find(|mount| mount.version == Version::V2).map(|mount| mount.at)
}

fn path_of(root: &str, pid: &str, version: Version) -> io::Result<Option<Path>> {
    let file = join(format_args!("{root}/proc/{pid}/cgroup"))?;
    file::find_line(file.as_c_str(), |line| join(format_args!("{}", group_path(line, version)?)).ok())
}

fn join(arguments: std::fmt::Arguments<'_>) -> io::Result<Path> {
    Path::format(arguments).ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

/// Memory of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Machine {
    pub total_bytes: u64,
    /// What programs can still have without swapping.
    pub available_bytes: u64,
    pub swap_free_bytes: u64,
}

/// Reads the machine's memory. Some 20 us.
///
/// # Errors
///
/// What reading `/proc/meminfo` says; `InvalidData` if it does not tell.
pub fn machine(root: &str) -> io::Result<Machine> {
    let file = join(format_args!("{root}/proc/meminfo"))?;
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

    fn tree(files: &[(&str, &str)]) -> (tempfile::TempDir, String) {
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

    /// Version 2: levels from the inside out, the smaller of max and high, inactive file pages, a move is noticed.
    #[test]
    fn levels_of_v2_are_walked() {
        let (_folder, root) = tree(&[
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
            (groups.reclaimable_bytes(&levels[0]), groups.held(&levels[0]).unwrap().shared_bytes),
            ((40, 12), 9)
        );
        // What a process offered, and may use again, is no file page.
        let stat = "file 30\nshmem 9\ninactive_file 40\nactive_file 7\nslab_reclaimable 5\n";
        std::fs::write(format!("{root}/sys/fs/cgroup/app/worker/memory.stat"), stat).unwrap();
        assert_eq!(groups.reclaimable_bytes(&levels[0]), (14, 12));
        let limit = Limit { soft_bytes: 512 << 20, hard_bytes: 1 << 30 };
        assert_eq!((groups.limit(&levels[1]), groups.reclaimable_bytes(&levels[1])), (limit, (0, 0)));
        assert!(groups.usage_bytes(&levels[2]).is_err());
        let other = Hierarchy::find_at(&root, &format!("{root}/sys/fs/cgroup/app/worker/")).unwrap();
        assert_eq!(other.folder(0).unwrap().as_str(), levels[0].as_str());
        assert_eq!(other.folder(2).unwrap().as_str(), levels[2].as_str());
        assert!(Hierarchy::find_at(&root, &format!("{root}/sys/fs/cgroup/app/gone")).is_err());
        assert!(Hierarchy::find_at(&root, "/elsewhere").is_err());
        assert!(Hierarchy::find_of(&root, "77").is_err(), "no such process");
        assert!(groups.is_current(&root));
        std::fs::write(format!("{root}/proc/self/cgroup"), "0::/other\n").unwrap();
        assert!(!groups.is_current(&root));
    }

    /// Version 1 in a container: the mount shows only its part, and "no limit" is a huge number.
    #[test]
    fn a_container_on_v1_is_found() {
        let (_folder, root) = tree(&[
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
        assert_eq!(groups.reclaimable_bytes(&inner), (524_288, 0));
    }

    /// Nothing mounted, nonsense in the files, a path that leads outside, files that vanish: an error or no limit.
    #[test]
    fn odd_trees_are_survived() {
        let (_folder, root) = tree(&[("/proc/self/cgroup", "0::/\n"), ("/proc/self/mountinfo", "nonsense\n - \n")]);
        assert_eq!(Hierarchy::find(&root).err().unwrap().kind(), io::ErrorKind::NotFound);
        assert!(Hierarchy::find("/nowhere/at/all").is_err());

        let (_folder, root) = tree(&[
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

    /// The machine's memory: both numbers, and an error where one is missing.
    #[test]
    fn the_machines_memory_is_read() {
        let text = "MemTotal:  100 kB\nMemFree: 1 kB\nMemAvailable:   40 kB\nSwapFree: 8 kB\n";
        let (_folder, root) = tree(&[("/proc/meminfo", text)]);
        let machine_here = machine(&root).unwrap();
        let expected = Machine { total_bytes: 100 << 10, available_bytes: 40 << 10, swap_free_bytes: 8 << 10 };
        assert_eq!(machine_here, expected);
        std::fs::write(format!("{root}/proc/meminfo"), "MemTotal: many kB\n").unwrap();
        assert!(machine(&root).is_err());
        let real = machine("").unwrap();
        assert!(real.available_bytes <= real.total_bytes && real.available_bytes > 0);
    }
}
