//! The control group of this process: which version, which limit binds, how much is in use.
//!
//! The limit is the smallest of the group and its ancestors, as far as they
//! are visible; the working set is what is used less inactive file pages.

use super::{Feature, Finding, Group, System, Unread, describe, size, trial};
use crate::cgroup::{Mount, Version, group_path};
use std::path::{Path, PathBuf};

pub(super) const ROWS: &[Feature] = &[
    Feature {
        key: "cgroup",
        group: Group::Limits,
        name: "memory control group",
        since: "4.5",
        needed_for: "keeping below the limit of a container or service",
        lost: "a container's limit is not seen: only --limit and the machine's memory count",
        fix: "boot with cgroup_enable=memory on the kernel's command line",
        check: |system| match find(system) {
            Ok(group) => Finding::available(format!("v{}, {}", group.version, group.shown())),
            Err(finding) => finding,
        },
    },
    Feature {
        key: "cgroup_limit",
        group: Group::Limits,
        name: "control group's limit",
        since: "4.5",
        needed_for: "purging before the kernel kills",
        lost: "less than 64 MiB: no room for blocks of 2 MiB to pay",
        fix: "raise memory.max of the group, or MemoryMax= of the service",
        check: limit,
    },
    Feature {
        key: "cgroup_working_set",
        group: Group::Limits,
        name: "control group's working set",
        since: "4.5",
        needed_for: "knowing how much of the limit is really in use",
        lost: "only Pagemill's own memory is counted against the limit",
        fix: "boot with cgroup_enable=memory on the kernel's command line",
        check: working_set,
    },
    Feature {
        key: "cgroup_writable",
        group: Group::Limits,
        name: "control groups of our own",
        since: "4.5",
        needed_for: "bench: runs inside a limit; on v1 also an event just below the limit",
        lost: "bench leaves the runs inside a limit out and says so; nothing else",
        fix: "systemd-run --user --scope -p Delegate=yes bash",
        check: |system| match find(system) {
            Ok(group) => match trial::may_write(&group.own) {
                Ok(()) => Finding::available(format!("{} may be written", group.shown())),
                Err(error) => Finding::missing(describe(&error)),
            },
            Err(finding) => finding,
        },
    },
];

/// Where the memory controller keeps this process's figures.
struct ControlGroup {
    version: u8,
    /// The folder that the controller is mounted at.
    mount: PathBuf,
    /// This process's folder, the mount itself or below.
    own: PathBuf,
}

impl ControlGroup {
    /// The group's name, as `/proc/self/cgroup` has it.
    fn shown(&self) -> String {
        format!("/{}", self.own.strip_prefix(&self.mount).unwrap_or(Path::new("")).display())
    }

    /// The group and its ancestors, innermost first.
    fn levels(&self) -> impl Iterator<Item = &Path> {
        self.own.ancestors().take_while(|level| level.starts_with(&self.mount))
    }

    fn usage_file(&self) -> &'static str {
        if self.version == 1 { "memory.usage_in_bytes" } else { "memory.current" }
    }
}

fn find(system: &System) -> Result<ControlGroup, Finding> {
    let absent = |unread: Unread| {
        if unread.is_absent { Finding::missing("this kernel has no control groups") } else { unread.into() }
    };
    let cgroups = system.read("/proc/self/cgroup").map_err(absent)?;
    let mountinfo = system.read("/proc/self/mountinfo").map_err(absent)?;
    for Mount { version, root, at } in mountinfo.lines().filter_map(Mount::parse) {
        let Some(path) = cgroups.lines().find_map(|line| group_path(line, version)) else { continue };
        let version = if version == Version::V1 { 1 } else { 2 };
        // Inside a container the mount may show only the container's part.
        let below = Path::new(path).strip_prefix(root).unwrap_or(Path::new(""));
        let mount = system.path(at);
        let inner = if below.iter().any(|part| part == "..") { mount.clone() } else { mount.join(below) };
        let has_memory =
            |level: &&Path| level.join("memory.current").exists() || level.join("memory.usage_in_bytes").exists();
        let is_root_of_all = std::fs::read_to_string(mount.join("cgroup.controllers"))
            .is_ok_and(|names| names.split_whitespace().any(|name| name == "memory"));
        let mut group = ControlGroup { version, own: inner, mount };
        // The controller may be handed down to an ancestor only.
        let found = group.levels().find(has_memory).map(Path::to_path_buf);
        match found {
            Some(own) => group.own = own,
            None if is_root_of_all => group.own = group.mount.clone(),
            None => continue,
        }
        return Ok(group);
    }
    Err(Finding::missing("no memory controller is mounted here"))
}

/// The smallest limit and where it is set, over all levels.
fn smallest_limit(group: &ControlGroup) -> Option<(u64, PathBuf)> {
    /// Version 1 writes "no limit" as the largest number of whole pages.
    const NO_LIMIT: u64 = i64::MAX as u64 - (1 << 16);
    let files: &[&str] = if group.version == 1 { &["memory.limit_in_bytes"] } else { &["memory.max", "memory.high"] };
    let limits = group.levels().flat_map(|level| {
        files.iter().filter_map(move |file| {
            let bytes = std::fs::read_to_string(level.join(file)).ok()?.trim().parse().ok()?;
            (bytes < NO_LIMIT).then(|| (bytes, level.join(file)))
        })
    });
    limits.min_by_key(|(bytes, _)| *bytes)
}

fn limit(system: &System) -> Finding {
    let group = match find(system) {
        Ok(group) => group,
        Err(finding) => return finding,
    };
    match smallest_limit(&group) {
        None => Finding::available(format!("none, {} levels looked at", group.levels().count())),
        Some((bytes, file)) => {
            let name = file.strip_prefix(&group.mount).unwrap_or(&file);
            let found = format!("{} by /{}", size(bytes), name.display());
            if bytes >= 64 << 20 { Finding::available(found) } else { Finding::limited(found) }
        }
    }
}

fn working_set(system: &System) -> Finding {
    let group = match find(system) {
        Ok(group) => group,
        Err(finding) => return finding,
    };
    let usage = std::fs::read_to_string(group.own.join(group.usage_file()));
    let stat = std::fs::read_to_string(group.own.join("memory.stat"));
    let name = if group.version == 1 { "total_inactive_file" } else { "inactive_file" };
    let inactive = stat.as_ref().ok().and_then(|text| {
        text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse::<u64>().ok())
    });
    match (usage.map(|text| text.trim().parse::<u64>()), inactive) {
        (Ok(Ok(usage)), Some(inactive)) => {
            let set = size(usage.saturating_sub(inactive));
            Finding::available(format!("{set} ({} used, {} of it inactive file pages)", size(usage), size(inactive)))
        }
        (Ok(Ok(usage)), None) => Finding::limited(format!("{} used; memory.stat says no {name}", size(usage))),
        (Ok(Err(_)), _) => Finding::unknown(format!("{} holds no number", group.usage_file())),
        // The root of version 2 has no figures of its own: the machine's count.
        (Err(_), Some(_)) if group.own == group.mount => Finding::available("the whole machine's (root of v2)"),
        (Err(error), _) => Finding::unknown(format!("cannot read {}: {}", group.usage_file(), describe(&error))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe::State;

    fn tree(files: &[(&str, &str)]) -> (tempfile::TempDir, System) {
        let root = tempfile::tempdir().unwrap();
        let system = System { root: root.path().to_path_buf() };
        for (path, text) in files {
            let path = system.path(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        (root, system)
    }

    /// Version 2: an ancestor's limit binds, `memory.high` counts, the working set leaves inactive file pages out.
    #[test]
    fn the_smallest_limit_of_all_ancestors_binds_v2() {
        let (_root, system) = tree(&[
            ("/proc/self/cgroup", "0::/app/worker\n"),
            ("/proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
            ("/sys/fs/cgroup/cgroup.controllers", "cpu memory\n"),
            ("/sys/fs/cgroup/app/memory.max", "1073741824\n"),
            ("/sys/fs/cgroup/app/memory.high", "536870912\n"),
            ("/sys/fs/cgroup/app/worker/memory.max", "max\n"),
            ("/sys/fs/cgroup/app/worker/memory.current", "104857600\n"),
            ("/sys/fs/cgroup/app/worker/memory.stat", "anon 1\ninactive_file 10485760\n"),
        ]);
        assert_eq!(limit(&system).found, "512 MiB by /app/memory.high");
        assert!(working_set(&system).found.starts_with("90 MiB "));
    }

    /// Version 1 beside an empty version 2; the mount shows the container's part only; no limit is a huge number.
    #[test]
    fn a_container_on_v1_is_found() {
        let (_root, system) = tree(&[
            ("/proc/self/cgroup", "4:memory:/docker/abc/task\n1:cpu:/\n0::/\n"),
            (
                "/proc/self/mountinfo",
                "29 22 0:5 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n\
                 30 22 0:6 /docker/abc /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n",
            ),
            ("/sys/fs/cgroup/unified/cgroup.controllers", "\n"),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "268435456\n"),
            ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "1048576\n"),
            ("/sys/fs/cgroup/memory/task/memory.limit_in_bytes", "9223372036854771712\n"),
            ("/sys/fs/cgroup/memory/task/memory.usage_in_bytes", "1048576\n"),
            ("/sys/fs/cgroup/memory/task/memory.stat", "inactive_file 1\ntotal_inactive_file 524288\n"),
        ]);
        let group = find(&system).ok().unwrap();
        assert_eq!((group.version, group.shown().as_str()), (1, "/task"));
        assert_eq!(limit(&system).found, "256 MiB by /memory.limit_in_bytes");
        assert!(working_set(&system).found.starts_with("512 KiB "));
    }

    /// A controller that nobody mounted is missing, a group path from outside a namespace is not followed.
    #[test]
    fn odd_trees_are_survived() {
        let (_root, system) = tree(&[("/proc/self/cgroup", "0::/\n"), ("/proc/self/mountinfo", "nonsense\n - \n")]);
        assert_eq!(limit(&system).state, State::Missing);

        let (_root, system) = tree(&[
            ("/proc/self/cgroup", "0::/../../outside\n"),
            ("/proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
            ("/sys/fs/cgroup/memory.current", "many\n"),
        ]);
        assert_eq!(limit(&system).state, State::Available);
        assert_eq!(working_set(&system).state, State::Unknown);
    }
}
