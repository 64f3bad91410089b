//! Probes of control groups: version, effective limit, memory in use.
//!
//! The effective limit is the smallest limit of the group and its visible ancestors. The working set is the usage
//! without inactive file pages.

use super::{Checked, Feature, Finding, Group, KernelFileError, SystemFiles, describe_error, format_size, trial};
use crate::cgroup::{Hierarchy, Limit, MAX_LEVELS, Version};
use crate::events::Events;
use crate::file;
use std::io::ErrorKind;
use std::path::Path;

pub(super) const FEATURES: &[Feature] = &[
    Feature {
        key: "cgroup",
        group: Group::Limits,
        name: "memory control group",
        since: "4.5",
        needed_for: "keeping below the limit of a container or service",
        lost: "a container's limit is not known: only --limit and the machine's memory count",
        fix: "boot with cgroup_enable=memory on the kernel's command line",
        check: |system| {
            let group = find_own_groups(system)?;
            Ok(Finding::available(format!("{}, {}", group.version(), group.name())))
        },
    },
    Feature {
        key: "cgroup_limit",
        group: Group::Limits,
        name: "control group's limit",
        since: "4.5",
        needed_for: "purging before the kernel kills",
        lost: "less than 64 MiB: blocks of 2 MiB are too large to pay off",
        fix: "raise memory.max of the group, or MemoryMax= of the service",
        check: probe_limit,
    },
    Feature {
        key: "cgroup_working_set",
        group: Group::Limits,
        name: "control group's working set",
        since: "4.5",
        needed_for: "knowing how much of the limit is really in use",
        lost: "only Pagemill's own memory is counted against the limit",
        fix: "boot with cgroup_enable=memory on the kernel's command line",
        check: probe_working_set,
    },
    Feature {
        key: "cgroup_writable",
        group: Group::Limits,
        name: "control groups of our own",
        since: "4.5",
        needed_for: "bench: runs inside a limit",
        lost: "bench skips the runs inside a limit, with a message; nothing else",
        fix: "systemd-run --user --scope -p Delegate=yes bash",
        check: |system| {
            let group = find_own_groups(system)?;
            let permission = trial::try_write_permission(Path::new(group.own.as_str()));
            permission.map_err(|error| Finding::missing(describe_error(&error)))?;
            Ok(Finding::available(format!("{} may be written", group.name())))
        },
    },
    Feature {
        key: "cgroup_events",
        group: Group::Limits,
        name: "warnings of a group's limit",
        since: "4.5",
        needed_for: "sleeping while a container's limit is far, and a wake-up near it",
        lost: "the limit is polled every 5 to 64 ms while there is memory to return",
        fix: "let the process write cgroup.event_control of its group (v1)",
        check: probe_limit_events,
    },
];

/// The control groups of this process.
struct OwnGroups {
    /// `None` for the root group of version 2, which has no memory statistics.
    groups: Option<Hierarchy>,
    /// Folder of the innermost group; empty for the root group of version 2.
    own: file::Path,
}

impl OwnGroups {
    fn version(&self) -> &'static str {
        match self.groups.as_ref().map(|groups| groups.version) {
            Some(Version::V1) => "v1",
            _ => "v2",
        }
    }

    fn name(&self) -> String {
        self.groups.as_ref().map_or("/".to_string(), |groups| groups.name(&self.own).to_string())
    }

    /// Returns the folder and limits of this process's group and of each visible ancestor, innermost first.
    fn levels(&self) -> Vec<(file::Path, Limit)> {
        let Some(groups) = &self.groups else { return Vec::new() };
        let folders = (0..MAX_LEVELS).map_while(|level| groups.folder(level));
        let with_limit = |folder| {
            let limit = groups.limit(&folder);
            (folder, limit)
        };
        folders.map(with_limit).collect()
    }
}

/// Finds the control groups of this process, or returns the finding that explains why none can be found.
fn find_own_groups(system: &SystemFiles) -> Result<OwnGroups, Finding> {
    let absent = |unread: KernelFileError| unread.or_if_absent(Finding::missing("this kernel has no control groups"));
    system.read("/proc/self/cgroup").map_err(absent)?;
    let mounts = system.read("/proc/self/mountinfo").map_err(absent)?;
    let root = system.root.to_string_lossy().trim_end_matches('/').to_string();
    match Hierarchy::find(&root) {
        Ok(groups) => {
            let own = groups.folder(0).ok_or_else(|| Finding::unknown("the group's path is too long"))?;
            Ok(OwnGroups { groups: Some(groups), own })
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let at = crate::cgroup::v2_mount_point(&mounts).map(|at| system.path(at));
            let controllers = at.and_then(|at| std::fs::read_to_string(at.join("cgroup.controllers")).ok());
            match controllers {
                Some(names) if names.split_whitespace().any(|name| name == "memory") => {
                    Ok(OwnGroups { groups: None, own: file::Path::new() })
                }
                _ => Err(Finding::missing("no memory controller is mounted here")),
            }
        }
        Err(error) => Err(Finding::unknown(describe_error(&error))),
    }
}

/// Reports the effective limit: the smallest limit of this process's group and its visible ancestors.
fn probe_limit(system: &SystemFiles) -> Checked {
    let own = find_own_groups(system)?;
    let levels = own.levels();
    Ok(match levels.iter().filter(|(_, limit)| *limit != Limit::NONE).min_by_key(|(_, limit)| limit.soft_bytes) {
        None => Finding::available(format!("none, {} levels looked at", levels.len().max(1))),
        Some((folder, limit)) => {
            let name = own.groups.as_ref().map_or("", |groups| groups.name(folder));
            let slows = if limit.soft_bytes < limit.hard_bytes { " (memory.high)" } else { "" };
            let found = format!("{} by {name}{slows}", format_size(limit.soft_bytes));
            if limit.soft_bytes >= 64 << 20 { Finding::available(found) } else { Finding::limited(found) }
        }
    })
}

/// Reports the working set of the innermost group: its memory usage less inactive file pages.
fn probe_working_set(system: &SystemFiles) -> Checked {
    let own = find_own_groups(system)?;
    let Some(groups) = &own.groups else { return Ok(Finding::available("the whole machine's (root of v2)")) };
    let unread = |error| Finding::unknown(format!("cannot read what the group uses: {}", describe_error(&error)));
    let usage = groups.usage_bytes(&own.own).map_err(unread)?;
    let (idle, _) = groups.reclaimable_bytes(&own.own);
    let [set, usage, idle] = [usage.saturating_sub(idle), usage, idle].map(format_size);
    Ok(Finding::available(format!("{set} ({usage} used, {idle} of it idle file pages)")))
}

/// Tries to receive events near the limit of the innermost group, as the governor does: sets a usage threshold (version
/// 1) or watches `memory.events` (version 2).
fn probe_limit_events(system: &SystemFiles) -> Checked {
    let own = find_own_groups(system)?;
    let Some(groups) = &own.groups else { return Ok(Finding::available("no limit to warn of (root of v2)")) };
    let folder = own.own.as_str();
    let alarm = Events::new().and_then(|events| match groups.version {
        Version::V1 => events.add_threshold(folder, 1 << 40).map(|_| "thresholds can be set"),
        Version::V2 => events.add_group_events(folder).map(|_| "memory.events says when a limit is met"),
    });
    Ok(Finding::available(alarm.map_err(|error| Finding::limited(describe_error(&error)))?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe::{Availability, finding_of};

    fn fake_files(files: &[(&str, &str)]) -> (tempfile::TempDir, SystemFiles) {
        let root = tempfile::tempdir().unwrap();
        let system = SystemFiles { root: root.path().to_path_buf() };
        for (path, text) in files {
            let path = system.path(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        (root, system)
    }

    /// In a control group hierarchy of version 2, the smaller limit of an ancestor must apply, `memory.high` must count
    /// as a limit, and the working set must exclude inactive file pages.
    #[test]
    fn the_smallest_limit_of_all_ancestors_counts_on_v2() {
        let (_root, system) = fake_files(&[
            ("/proc/self/cgroup", "0::/app/worker\n"),
            ("/proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
            ("/sys/fs/cgroup/app/memory.current", "209715200\n"),
            ("/sys/fs/cgroup/app/memory.max", "1073741824\n"),
            ("/sys/fs/cgroup/app/memory.high", "536870912\n"),
            ("/sys/fs/cgroup/app/worker/memory.max", "max\n"),
            ("/sys/fs/cgroup/app/worker/memory.current", "104857600\n"),
            ("/sys/fs/cgroup/app/worker/memory.stat", "anon 1\nfile 10485760\ninactive_file 10485760\n"),
        ]);
        assert_eq!(finding_of(probe_limit(&system)).found, "512 MiB by /app (memory.high)");
        assert!(finding_of(probe_working_set(&system)).found.starts_with("90 MiB "));
    }

    /// In a container with version 1, a version 2 hierarchy without controllers is mounted, too. The group of version 1
    /// must be found, with its limit.
    #[test]
    fn groups_of_a_v1_container_are_found() {
        let (_root, system) = fake_files(&[
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
            (
                "/sys/fs/cgroup/memory/task/memory.stat",
                "total_cache 524288\ninactive_file 1\ntotal_inactive_file 524288\n",
            ),
        ]);
        let group = find_own_groups(&system).ok().unwrap();
        assert_eq!((group.version(), group.name().as_str()), ("v1", "/task"));
        assert_eq!(finding_of(probe_limit(&system)).found, "256 MiB by /");
        assert!(finding_of(probe_working_set(&system)).found.starts_with("512 KiB "));
    }

    /// If no hierarchy is mounted, or if the group cannot be read, the limit must be reported as missing. A path
    /// outside of the mount must not be followed.
    #[test]
    fn unreadable_groups_are_reported_as_missing() {
        let (_root, system) =
            fake_files(&[("/proc/self/cgroup", "0::/\n"), ("/proc/self/mountinfo", "nonsense\n - \n")]);
        assert_eq!(finding_of(probe_limit(&system)).state, Availability::Missing);

        let (_root, system) = fake_files(&[
            ("/proc/self/cgroup", "0::/../../outside\n"),
            ("/proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
            ("/sys/fs/cgroup/memory.current", "many\n"),
        ]);
        assert_eq!(finding_of(probe_limit(&system)).state, Availability::Missing, "no level has a number");
        std::fs::write(system.path("/sys/fs/cgroup/memory.current"), "7\n").unwrap();
        assert_eq!(finding_of(probe_limit(&system)).state, Availability::Available);
        assert_eq!(
            finding_of(probe_limit_events(&system)).state,
            Availability::Limited,
            "a plain file sends no events"
        );

        std::fs::remove_file(system.path("/sys/fs/cgroup/memory.current")).unwrap();
        std::fs::write(system.path("/sys/fs/cgroup/cgroup.controllers"), "cpu memory\n").unwrap();
        assert_eq!(finding_of(probe_working_set(&system)).found, "the whole machine's (root of v2)");
    }
}
