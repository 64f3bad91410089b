//! A control group with a memory limit, of version 1 or 2.
//!
//! The group is a child of the group in which `run` is. A process of the parent group may be moved to the child group
//! without further rights. The limits of the ancestors still apply to the process.

use super::guard::Guard;
use super::{LimitStatistics, NAME_PREFIX, owner_of};
use pagemill_core::units::Bytes;
use pagemill_sys::cgroup::{self, Version};
use pagemill_sys::process;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

/// Number of attempts to remove a group. `rmdir` fails with `EBUSY` while exited processes are still members of the
/// group.
const REMOVE_ATTEMPTS: usize = 100;
/// Pause between two attempts to remove a group.
const REMOVE_PAUSE: Duration = Duration::from_millis(10);

/// A control group with a memory limit. Dropping the value removes the group. If this process is killed, the [`Guard`]
/// process removes the group.
pub struct Group {
    folder: PathBuf,
    /// The process that removes the group if this process is killed. `None` in the simulated file system of a test.
    guard: Option<Guard>,
}

impl Group {
    /// Creates a group with this limit as a child of the control group of this process. `root` is prepended to every
    /// path: it is empty, or the folder of a test's simulated file system.
    ///
    /// # Errors
    ///
    /// A message that says what is missing and how to provide it.
    pub fn new(root: &str, name: &str, limit_bytes: u64) -> Result<Self, String> {
        let (version, parent) = cgroup::own_group(root).map_err(|error| match error.kind() {
            ErrorKind::NotFound => {
                "no control group with a memory controller is visible here (/proc/self/cgroup)".to_owned()
            }
            _ => format!("the control group of this process cannot be found: {error}"),
        })?;
        let parent = Path::new(parent.as_str());
        if version == Version::V2 {
            enable_memory_controller(parent)?;
        }
        // The folder is removed at the end, so it must be a new one inside of the parent.
        assert!(!name.is_empty());
        assert!(!name.contains('/'));
        let folder = parent.join(name);
        fs::create_dir(&folder).map_err(|error| creation_error(parent, &error))?;
        let mut group = Self { folder, guard: None };
        let file = match version {
            Version::V1 => "memory.limit_in_bytes",
            Version::V2 => "memory.max",
        };
        fs::write(group.folder.join(file), limit_bytes.to_string()).map_err(|error| {
            format!("{} does not accept the limit {}: {error}", group.folder.join(file).display(), Bytes(limit_bytes))
        })?;
        if root.is_empty() {
            group.guard = Some(Guard::start(&group.folder).map_err(|error| {
                format!(
                    "the guard process, which removes the group if this process is killed, cannot be started: {error}"
                )
            })?);
        }
        Ok(group)
    }

    /// Opens the file `cgroup.procs`. A process enters the group by writing to it.
    ///
    /// # Errors
    ///
    /// A message for the user if the file cannot be opened for writing.
    pub fn open_procs_file(&self) -> Result<File, String> {
        let path = self.folder.join("cgroup.procs");
        let file = File::options().write(true).open(&path);
        file.map_err(|error| format!("no process can be moved to {}: {error}", path.display()))
    }

    pub fn statistics(&self) -> LimitStatistics {
        let read = |name| fs::read_to_string(self.folder.join(name)).ok();
        let number = |name| read(name)?.trim().parse().ok();
        let kills = |name| read(name)?.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok());
        LimitStatistics {
            peak_bytes: number("memory.max_usage_in_bytes").or_else(|| number("memory.peak")),
            kills: kills("memory.oom_control").or_else(|| kills("memory.events")),
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(guard) = self.guard.take() {
            guard.dismiss();
        }
        if !remove_when_empty(&self.folder) {
            let folder = self.folder.display();
            let _ = writeln!(
                io::stderr(),
                "pagemill: processes still run in the control group {folder}; a later `pagemill` command removes the group"
            );
        }
    }
}

/// Enables the memory controller for the child groups of `parent`, as version 2 requires: writes `+memory` to the
/// parent's `cgroup.subtree_control`.
fn enable_memory_controller(parent: &Path) -> Result<(), String> {
    let has_memory = |file: &str| {
        let names = fs::read_to_string(parent.join(file)).unwrap_or_default();
        names.split_ascii_whitespace().any(|name| name == "memory")
    };
    let at = parent.display();
    if !has_memory("cgroup.controllers") {
        return Err(format!(
            "{at} has no memory controller: `echo +memory > cgroup.subtree_control` in each group above enables it"
        ));
    }
    if has_memory("cgroup.subtree_control") {
        return Ok(());
    }
    match fs::write(parent.join("cgroup.subtree_control"), "+memory") {
        Ok(()) => Ok(()),
        // The kernel refuses because the parent group has processes of its own. Such a group cannot enable controllers
        // for its children.
        Err(error) if error.kind() == ErrorKind::ResourceBusy => Err(format!(
            "{at} has processes of its own, so no group inside it can have a limit: move them to such a group first, \
             `mkdir {at}/shell && for pid in $(cat {at}/cgroup.procs); do echo $pid > {at}/shell/cgroup.procs; done`, \
             `echo +memory > {at}/cgroup.subtree_control`, and run this there"
        )),
        Err(error) => Err(creation_error(parent, &error)),
    }
}

fn creation_error(parent: &Path, error: &io::Error) -> String {
    let parent = parent.display();
    format!(
        "no control group can be created in {parent} ({error}): root needs a writable cgroup file system, \
         another user needs a group that belongs to the user (`chown -R USER {parent}`, or a systemd unit with Delegate=yes)"
    )
}

/// Removes a group and its child groups as soon as they have no processes. Returns `false` if processes remain in them.
pub fn remove_when_empty(folder: &Path) -> bool {
    for _ in 0..REMOVE_ATTEMPTS {
        match remove_empty_group(folder) {
            Err(error) if error.kind() == ErrorKind::ResourceBusy => {}
            _ => return true,
        }
        let has_members =
            fs::read_to_string(folder.join("cgroup.procs")).is_ok_and(|members| contains_running_process(&members));
        if has_members {
            return false;
        }
        thread::sleep(REMOVE_PAUSE);
    }
    false
}

fn contains_running_process(members: &str) -> bool {
    members.lines().filter_map(|pid| pid.parse().ok()).any(|pid| process::identity(pid).is_some())
}

fn remove_empty_group(folder: &Path) -> io::Result<()> {
    for inner in child_groups(folder) {
        remove_empty_group(&inner)?;
    }
    fs::remove_dir(folder)
}

fn child_groups(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path()).collect()
}

/// Removes the empty groups of `run` commands that have ended. Examines the child groups of this process's group and of
/// all groups above it.
///
/// Kills no process. A `run` in another PID namespace seems to have ended while its program still runs. But the group
/// of such a `run` is not empty, so it is not removed.
pub fn remove_dead_groups() {
    let Ok((_, own)) = cgroup::own_group("") else { return };
    let mut level = Some(Path::new(own.as_str()));
    while let Some(folder) = level.filter(|folder| is_control_group(folder)) {
        remove_dead_child_groups(folder);
        level = folder.parent();
    }
}

fn is_control_group(folder: &Path) -> bool {
    folder.join("cgroup.procs").exists()
}

fn remove_dead_child_groups(folder: &Path) {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    for entry in entries {
        let name = entry.file_name();
        let run = name.to_str().filter(|name| name.starts_with(NAME_PREFIX)).and_then(owner_of);
        if run.is_some_and(|run| !process::is_alive(run)) {
            // The removal fails if the group still has processes. A later command then tries again.
            let _ = remove_empty_group(&entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a simulated file system in which this process is in the control group `/app`. The folder of that group
    /// has the given files. Returns the simulated file system and the folder.
    fn simulated_system(version: Version, files: &[(&str, &str)]) -> (tempfile::TempDir, String) {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().to_str().unwrap().to_owned();
        let (mount, own) = match version {
            Version::V1 => ("30 23 0:26 / /groups rw - cgroup cgroup rw,memory\n", "4:memory:/app\n0::/\n"),
            Version::V2 => ("30 23 0:26 / /groups rw - cgroup2 cgroup2 rw\n", "0::/app\n"),
        };
        let app = files.iter().map(|(name, text)| (format!("/groups/app/{name}"), *text));
        let proc = [("/proc/self/mountinfo".to_owned(), mount), ("/proc/self/cgroup".to_owned(), own)];
        for (path, text) in app.chain(proc) {
            let path = PathBuf::from(format!("{root}{path}"));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        (folder, root)
    }

    fn read_file(path: &str) -> String {
        fs::read_to_string(path).unwrap()
    }

    /// A group is created in a simulated system of each version. The limit must be written to the files of that
    /// version, and the statistics must be read from files of that version.
    #[test]
    fn a_group_of_either_version_is_limited() {
        let v2 = [("cgroup.controllers", "cpu memory\n"), ("cgroup.subtree_control", "cpu\n")];
        let (_folder, root) = simulated_system(Version::V2, &v2);
        let group = Group::new(&root, "new", 5 << 20).unwrap();
        let at = format!("{root}/groups/app/new");
        assert_eq!(read_file(&format!("{at}/memory.max")), "5242880");
        assert_eq!(read_file(&format!("{root}/groups/app/cgroup.subtree_control")), "+memory");
        assert!(group.open_procs_file().is_err(), "cgroup.procs does not exist yet");
        for (name, text) in [("memory.peak", "77\n"), ("memory.events", "oom 3\noom_kill 2\n"), ("cgroup.procs", "")] {
            fs::write(format!("{at}/{name}"), text).unwrap();
        }
        let statistics = group.statistics();
        assert_eq!((statistics.peak_bytes, statistics.kills), (Some(77), Some(2)));
        assert!(group.open_procs_file().is_ok());
        assert!(Group::new(&root, "new", 1).is_err(), "the group exists already");
        fs::remove_dir_all(&at).unwrap();

        let (_folder, root) = simulated_system(Version::V1, &[("memory.limit_in_bytes", "1")]);
        let group = Group::new(&root, "new", 5 << 20).unwrap();
        let at = format!("{root}/groups/app/new");
        assert_eq!(read_file(&format!("{at}/memory.limit_in_bytes")), "5242880");
        fs::write(format!("{at}/memory.max_usage_in_bytes"), "78\n").unwrap();
        fs::write(format!("{at}/memory.oom_control"), "under_oom 0\noom_kill 1\n").unwrap();
        let statistics = group.statistics();
        assert_eq!((statistics.peak_bytes, statistics.kills), (Some(78), Some(1)));
        fs::remove_dir_all(&at).unwrap();
    }

    /// If the memory controller is already enabled for child groups, `cgroup.subtree_control` must not be written. If
    /// the controller is missing, the error must name it.
    #[test]
    fn errors_name_the_missing_controller() {
        let (_folder, root) = simulated_system(Version::V2, &[("cgroup.controllers", "cpu\n")]);
        let message = Group::new(&root, "new", 1 << 20).err().unwrap();
        assert!(message.contains("/groups/app has no memory controller"), "{message}");
        let v2 = [("cgroup.controllers", "memory\n"), ("cgroup.subtree_control", "memory\n")];
        let (_folder, root) = simulated_system(Version::V2, &v2);
        let group = Group::new(&root, "new", 1 << 20).unwrap();
        assert_eq!(read_file(&format!("{root}/groups/app/cgroup.subtree_control")), "memory\n");
        fs::remove_dir_all(&group.folder).unwrap();
        let (_folder, root) = simulated_system(Version::V1, &[]);
        let message = Group::new(&root, "new", 1 << 20).err().unwrap();
        assert!(message.contains("no control group can be created in"), "{message}");
        assert!(Group::new("/nowhere/at/all", "new", 1).is_err());
    }

    /// Empty groups of `run` commands that have ended must be removed together with their child groups. Groups of
    /// commands that are still running, and other folders, must remain.
    #[test]
    fn groups_of_ended_runs_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let own = process::own_identity();
        let make = |name: &str| {
            let path = folder.path().join(name);
            fs::create_dir_all(&path).unwrap();
            path
        };
        let dead = make("pagemill-run-1073741824-1");
        make("pagemill-run-1073741824-1/pagemill-run-1073741825-2");
        let living = make(&format!("pagemill-run-{}-{}", own.pid, own.start_ticks));
        let foreign = make("other");
        remove_dead_child_groups(folder.path());
        assert_eq!([dead, living, foreign].map(|path| path.exists()), [false, true, true]);
    }
}
