//! A cgroup around a workload, with or without a memory limit. Dropping the value kills the processes in the cgroup and
//! removes the cgroup.
//!
//! Both cgroup v1 and v2 are supported. The version is read from `/proc/self/cgroup`. If the bench may not make a
//! cgroup, it reports a gap and continues.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use crate::native;

/// Prefix of the names of the cgroups that the bench makes. The process id of the bench and a sequence number follow.
const PREFIX: &str = "pagemill-bench-";

/// The cgroup version of the memory controller, which determines the names of the files of a cgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

/// The existing cgroup below which new cgroups are made.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Parent {
    version: Version,
    folder: PathBuf,
}

/// A cgroup made by this process, with or without a memory limit.
#[derive(Debug)]
pub struct Cgroup {
    folder: PathBuf,
}

impl Cgroup {
    /// Makes a cgroup with a memory limit, below the cgroup of this process.
    ///
    /// # Errors
    ///
    /// A sentence for the report that gives the reason: there is no memory controller or no permission to use it.
    pub fn with_limit(limit_bytes: u64) -> Result<Self, String> {
        Self::new(Some(limit_bytes))
    }

    /// Makes a cgroup without a memory limit of its own, below the cgroup of this process.
    ///
    /// # Errors
    ///
    /// As [`Cgroup::with_limit`].
    pub fn without_limit() -> Result<Self, String> {
        Self::new(None)
    }

    fn new(limit_bytes: Option<u64>) -> Result<Self, String> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PREFIX}{}-{number}", std::process::id());
        let own = fs::read_to_string("/proc/self/cgroup").map_err(|cause| cause.to_string())?;
        let parent = find_parent(&own, Path::new("/sys/fs/cgroup"))
            .ok_or("no memory controller of cgroups is mounted at /sys/fs/cgroup")?;
        remove_stale_groups(&parent.folder);
        make_group(&parent, &name, limit_bytes)
    }

    /// Returns the peak in bytes of the memory charged to the cgroup, page cache included. Returns none if the kernel
    /// does not record it, like v2 before Linux 5.19.
    pub fn peak_bytes(&self) -> Option<u64> {
        let read = |name| fs::read_to_string(self.folder.join(name)).ok()?.trim().parse().ok();
        read("memory.max_usage_in_bytes").or_else(|| read("memory.peak"))
    }

    /// Returns the number of OOM kills in the cgroup; none if the kernel does not count them.
    pub fn oom_kills(&self) -> Option<u64> {
        let text = ["memory.oom_control", "memory.events"].map(|name| fs::read_to_string(self.folder.join(name)).ok());
        text.into_iter().flatten().find_map(|text| {
            let mut lines = text.lines();
            lines.find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
        })
    }

    /// Returns the path of the cgroup's file `cgroup.procs`. A process joins the cgroup by writing 0 to that file.
    pub fn join_file(&self) -> PathBuf {
        self.folder.join("cgroup.procs")
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // The bench started all processes in this group. A killed process remains in the group for a short time, so the
        // removal is retried.
        for _ in 0..200 {
            let members = fs::read_to_string(self.folder.join("cgroup.procs")).unwrap_or_default();
            for pid in members.lines().filter_map(|line| line.parse().ok()) {
                native::kill_process(pid);
            }
            if fs::remove_dir(&self.folder).is_ok() {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
        eprintln!("gap: {} could not be removed", self.folder.display());
    }
}

/// Removes cgroups that a killed bench left behind. The processes in such a cgroup have ended, since each workload ends
/// with its bench.
fn remove_stale_groups(parent: &Path) {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    for entry in entries {
        let name = entry.file_name().to_string_lossy().into_owned();
        let maker = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next());
        if maker.is_some_and(|maker| !Path::new("/proc").join(maker).exists()) {
            // `rmdir` fails for a group that still has processes, so such a group remains.
            let _ = fs::remove_dir(entry.path());
        }
    }
}

fn make_group(parent: &Parent, name: &str, limit_bytes: Option<u64>) -> Result<Cgroup, String> {
    if parent.version == Version::V2 {
        // The write fails if the parent group contains processes. The new group then has no memory.max, and the error
        // is reported below.
        let _ = fs::write(parent.folder.join("cgroup.subtree_control"), "+memory");
    }
    let folder = parent.folder.join(name);
    fs::create_dir(&folder).map_err(|cause| format!("no cgroup below {}: {cause}", parent.folder.display()))?;
    let group = Cgroup { folder };
    let limit_file = match parent.version {
        Version::V1 => "memory.limit_in_bytes",
        Version::V2 => "memory.max",
    };
    let write = |file: &str, value: &str| {
        fs::write(group.folder.join(file), value)
            .map_err(|cause| format!("{file} of a new cgroup cannot be written: {cause}"))
    };
    if let Some(limit_bytes) = limit_bytes {
        write(limit_file, &limit_bytes.to_string())?;
    }
    if parent.version == Version::V2 {
        // Swap is turned off: with swap, free memory would not have to be returned in time, which is what the bench
        // measures.
        let _ = write("memory.swap.max", "0");
    }
    Ok(group)
}

/// Returns the cgroup of this process in the hierarchy that has the memory controller; none if no hierarchy has it.
/// `own` is the text of `/proc/self/cgroup`.
fn find_parent(own: &str, mount: &Path) -> Option<Parent> {
    let (mut v1, mut v2) = (None, None);
    for line in own.lines() {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        match controllers {
            "" => v2 = Some(path),
            _ if controllers.split(',').any(|name| name == "memory") => v1 = Some(path),
            _ => {}
        }
    }
    let (version, hierarchy, path) = match (v1, v2) {
        (Some(path), _) => (Version::V1, mount.join("memory"), path),
        (None, Some(path)) => (Version::V2, mount.to_owned(), path),
        (None, None) => return None,
    };
    // In a container, the path may belong to a part of the tree that is not visible. The root of the mount is then the
    // group of this process.
    let own_folder = hierarchy.join(path.trim_start_matches('/'));
    let folder = [own_folder, hierarchy].into_iter().find(|folder| folder.is_dir())?;
    let has_memory = match version {
        Version::V1 => folder.join("memory.limit_in_bytes").exists(),
        Version::V2 => fs::read_to_string(folder.join("cgroup.controllers"))
            .is_ok_and(|names| names.split_whitespace().any(|name| name == "memory")),
    };
    has_memory.then_some(Parent { version, folder })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// [`find_parent`] must find the cgroup of the process in an imitation of `/sys/fs/cgroup` for v1 and for v2. If
    /// both versions are mounted and v1 has the memory controller, it must use v1.
    #[test]
    fn both_cgroup_versions_are_found() {
        let tree = tempfile::tempdir().expect("a temporary folder");
        let (v1, v2) = (tree.path().join("memory/a/b"), tree.path().join("c"));
        fs::create_dir_all(&v1).expect("made");
        fs::create_dir_all(&v2).expect("made");
        fs::write(v1.join("memory.limit_in_bytes"), "1").expect("written");
        fs::write(v2.join("cgroup.controllers"), "cpu memory").expect("written");

        let old = find_parent("4:cpu,memory:/a/b\n0::/\n", tree.path()).expect("v1 is there");
        let new = find_parent("0::/c\n", tree.path()).expect("v2 is there");

        assert_eq!((old.version, old.folder), (Version::V1, v1));
        assert_eq!((new.version, new.folder), (Version::V2, v2));
        assert_eq!(find_parent("1:cpu:/\n", tree.path()), None);
    }

    /// A real cgroup with a memory limit is made and dropped. Its folder must be gone afterwards. Without permission to
    /// make a cgroup, the test is skipped.
    #[test]
    fn cgroup_is_removed_on_drop() {
        match Cgroup::with_limit(64 << 20) {
            Ok(group) => {
                let folder = group.folder.clone();
                assert!(folder.is_dir() && group.join_file().exists());
                drop(group);
                assert!(!folder.exists());
            }
            Err(why) => println!("skipped: {why}"),
        }
    }
}
