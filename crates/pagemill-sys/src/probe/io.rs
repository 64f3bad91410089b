//! Probes of io_uring, file events and folders, and of the privileges of this process.

use super::trial::{self, FolderUsability, NamespaceError};
use super::{Checked, Feature, Finding, Group, SystemFiles, describe_error};
use std::fs::File;
use std::path::{Path, PathBuf};

/// The command that removes the limit of locked memory.
const MEMLOCK_FIX: &str = "sudo prlimit --pid $$ --memlock=unlimited";

pub(super) const FEATURES: &[Feature] = &[
    Feature {
        key: "io_uring",
        group: Group::Files,
        name: "io_uring",
        since: "5.1",
        needed_for: "asynchronous direct reads and writes into huge pages",
        lost: "threads that read and write: more CPU per I/O",
        fix: "sudo sysctl kernel.io_uring_disabled=0",
        check: |_| Ok(ring_finding(trial::try_io_uring())),
    },
    Feature {
        key: "io_uring_memory",
        group: Group::Files,
        name: "memory known to rings",
        since: "5.19",
        needed_for: "large direct reads and writes that find their pages at once",
        lost: "each transfer looks up its pages: more CPU per large read",
        fix: MEMLOCK_FIX,
        check: |_| {
            trial::try_register_memory()?;
            Ok(Finding::available("2 MiB were registered"))
        },
    },
    Feature {
        key: "direct_io",
        group: Group::Files,
        name: "direct I/O (O_DIRECT)",
        since: "",
        needed_for: "files behind Pagemill's page cache that bypass the kernel's",
        lost: "the kernel's page cache is used too: one more copy, and pages in memory twice",
        fix: "keep the files on ext4, XFS, Btrfs or a block device",
        check: |system| Ok(probe_direct_io(system)),
    },
    Feature {
        key: "fanotify",
        group: Group::Files,
        name: "file events (fanotify)",
        since: "5.13",
        needed_for: "mount: events for new files, so that each gets the right page size",
        lost: "the file system is scanned periodically instead",
        fix: "",
        check: |_| match trial::try_fanotify(c"/")? {
            true => Ok(Finding::available("works, for whole file systems too")),
            false => Ok(Finding::available("works; whole file systems only inside a user namespace")),
        },
    },
    Feature {
        key: "fuse",
        group: Group::Files,
        name: "FUSE",
        since: "2.6.14",
        needed_for: "mount --fuse, for root and for other users",
        lost: "mount --fuse is refused; mount needs root or run --ram",
        fix: "sudo modprobe fuse",
        check: |system| Ok(probe_fuse(system)),
    },
    Feature {
        key: "figures_folder",
        group: Group::Files,
        name: "folder for figures",
        since: "",
        needed_for: "figures that meminfo, vmstat and --report read",
        lost: "`pagemill run` refuses --limit and reports; without them, programs run but publish no figures",
        fix: "export XDG_RUNTIME_DIR=$(mktemp -d)",
        check: |system| Ok(probe_figures_folder(system)),
    },
    Feature {
        key: "cache_folder",
        group: Group::Files,
        name: "folder for the preload file",
        since: "",
        needed_for: "run: the library is stored there once, unless it is beside the command",
        lost: "run stores it below /tmp or /dev/shm, again after each boot",
        fix: "export XDG_CACHE_HOME=$(mktemp -d)",
        check: |system| Ok(probe_cache_folder(system)),
    },
    Feature {
        key: "user",
        group: Group::Privileges,
        name: "user",
        since: "",
        needed_for: "nothing: commands run unprivileged as far as possible",
        lost: "the capabilities are not known",
        fix: "",
        check: probe_user_and_capabilities,
    },
    Feature {
        key: "sandbox",
        group: Group::Privileges,
        name: "system call filter",
        since: "",
        needed_for: "distinguishing a sandbox's refusal from the kernel's",
        lost: "whether a filter refuses calls is not known",
        fix: "",
        check: probe_system_call_filter,
    },
    Feature {
        key: "user_namespace",
        group: Group::Privileges,
        name: "user namespaces",
        since: "3.8",
        needed_for: "mount without root",
        lost: "mount needs root",
        fix: "sudo sysctl user.max_user_namespaces=15000",
        check: |system| Ok(probe_user_namespace(system)),
    },
    Feature {
        key: "realtime",
        group: Group::Privileges,
        name: "real-time priority",
        since: "",
        needed_for: "mount: the purging thread outruns writers (32 MiB of room are enough)",
        lost: "mount keeps some 200 MiB of room below a control group's limit",
        fix: "sudo prlimit --pid $$ --rtprio=10",
        check: |_| {
            let explain = |error| match trial::resource_limit(libc::RLIMIT_RTPRIO) {
                Ok((Some(limit), _)) => Finding::missing(format!("{}, RLIMIT_RTPRIO {limit}", describe_error(&error))),
                _ => Finding::refused(&error).with_fix("give the CPU control group real-time: cpu.rt_runtime_us"),
            };
            trial::try_realtime_priority().map_err(explain)?;
            Ok(Finding::available("SCHED_RR taken by a process that ended"))
        },
    },
];

/// Tries direct I/O in the current folder, then in the folder for temporary files.
fn probe_direct_io(_: &SystemFiles) -> Finding {
    let folders = [std::env::current_dir().unwrap_or_default(), std::env::temp_dir()];
    let mut refused = None;
    for folder in &folders {
        match trial::try_direct_read(folder) {
            Ok(Some(alignment)) => {
                let units = format!("multiples of {} bytes", alignment.offset);
                return Finding::available(format!("files in {}: {units}", folder.display()));
            }
            Ok(None) => return Finding::available(format!("files in {}", folder.display())),
            Err(error) if is_folder_error(&error) => {
                refused.get_or_insert_with(|| {
                    Finding::unknown(format!("{}: {}", folder.display(), describe_error(&error)))
                });
            }
            Err(error) => {
                return Finding::missing(format!("files in {}: {}", folder.display(), describe_error(&error)));
            }
        }
    }
    refused.unwrap_or_else(|| Finding::unknown("no folder to try it in"))
}

/// Returns whether the error means that no file could be created in the folder, so that nothing is known about direct
/// I/O.
fn is_folder_error(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{NotFound, PermissionDenied, ReadOnlyFilesystem, StorageFull};
    [NotFound, PermissionDenied, ReadOnlyFilesystem, StorageFull].contains(&error.kind())
}

/// Returns the finding for the result of creating an io_uring. Some kernels charge the ring as locked memory, and
/// return `ENOMEM` above the limit of locked memory. This error gets a different fix.
fn ring_finding(made: std::io::Result<()>) -> Finding {
    match made {
        Ok(()) => Finding::available("a ring was made"),
        Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => Finding::refused(&error).with_fix(MEMLOCK_FIX),
        Err(error) => Finding::refused(&error),
    }
}

/// Probes whether `/dev/fuse` can be opened and the mount helper is installed.
fn probe_fuse(system: &SystemFiles) -> Finding {
    const MOUNT_HELPERS: [&str; 2] = ["/usr/bin/fusermount3", "/bin/fusermount3"];
    match File::options().read(true).write(true).open(system.path("/dev/fuse")) {
        Ok(_) if MOUNT_HELPERS.iter().any(|path| system.has_file(path)) => {
            Finding::available("/dev/fuse opens, fusermount3 is there")
        }
        Ok(_) => {
            Finding::limited("/dev/fuse opens; no fusermount3: only root can mount").with_fix("sudo apt install fuse3")
        }
        Err(error) => {
            let finding = Finding::missing(format!("/dev/fuse: {}", describe_error(&error)));
            let is_forbidden = error.kind() == std::io::ErrorKind::PermissionDenied;
            if is_forbidden { finding.with_fix("sudo chmod a+rw /dev/fuse") } else { finding }
        }
    }
}

/// Returns the folder itself, or its nearest ancestor that exists.
fn nearest_existing_folder(folder: &Path) -> &Path {
    folder.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new("/"))
}

/// Probes the folders for figures files, in which processes publish their counters.
fn probe_figures_folder(system: &SystemFiles) -> Finding {
    let try_file = |folder: &Path| match trial::try_folder(nearest_existing_folder(folder)) {
        Ok(_) => Ok(()),
        Err(error) => Err(format!("{}: {}", folder.display(), describe_error(&error))),
    };
    let own = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|folder| folder.is_absolute());
    let note = if own.is_some() { "" } else { " (XDG_RUNTIME_DIR is not set)" };
    let mut reasons = Vec::new();
    for folder in own.into_iter().chain(["/dev/shm", "/tmp"].map(|folder| system.path(folder))) {
        match try_file(&folder) {
            Ok(()) if reasons.is_empty() => return Finding::available(format!("{}{note}", folder.display())),
            Ok(()) => return Finding::limited(format!("{}; {} works", reasons.join("; "), folder.display())),
            Err(reason) => reasons.push(reason),
        }
    }
    Finding::missing(reasons.join("; "))
}

/// Returns the user's cache folder (`XDG_CACHE_HOME`, else `~/.cache`).
fn user_cache_folder() -> Option<PathBuf> {
    let folder = |name| std::env::var_os(name).map(PathBuf::from).filter(|folder| folder.is_absolute());
    folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")))
}

/// Probes the folder in which `pagemill run` stores the preload library.
fn probe_cache_folder(_: &SystemFiles) -> Finding {
    let Some(folder) = user_cache_folder() else {
        return Finding::missing("neither XDG_CACHE_HOME nor HOME is set");
    };
    cache_folder_finding(&folder)
}

/// Returns the finding for `folder` as the folder of the preload library. The file of the library must be mapped as
/// code, which a noexec mount forbids.
fn cache_folder_finding(folder: &Path) -> Finding {
    let name = folder.display();
    match trial::try_folder(nearest_existing_folder(folder)) {
        Ok(FolderUsability::Usable) => Finding::available(name.to_string()),
        Ok(FolderUsability::NotExecutable(error)) => {
            Finding::missing(format!("{name} is mounted noexec: {}", describe_error(&error)))
        }
        Err(error) => Finding::missing(format!("{name}: {}", describe_error(&error))),
    }
}

/// Returns the value of the line of `/proc/self/status` that begins with `name`.
fn read_status_line(system: &SystemFiles, name: &str) -> Result<String, Finding> {
    let text = system.read("/proc/self/status")?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.map(|line| line.trim().to_string()).ok_or_else(|| Finding::unknown(format!("/proc/self/status has no {name}")))
}

/// Number and name of each capability that Pagemill can make use of.
const CAPABILITIES: [(u32, &str); 4] =
    [(14, "CAP_IPC_LOCK"), (21, "CAP_SYS_ADMIN"), (23, "CAP_SYS_NICE"), (24, "CAP_SYS_RESOURCE")];

/// Reports the effective user, and which of the [`CAPABILITIES`] this process has.
fn probe_user_and_capabilities(system: &SystemFiles) -> Checked {
    let id = crate::process::user_id();
    let name = if id == 0 { "root".to_string() } else { format!("user {id}") };
    let mask = u64::from_str_radix(&read_status_line(system, "CapEff")?, 16).unwrap_or(0);
    let held = |wanted: bool| -> Vec<&str> {
        CAPABILITIES.iter().filter(|(bit, _)| (mask >> bit & 1 == 1) == wanted).map(|(_, name)| *name).collect()
    };
    let (with, without) = (held(true), held(false));
    Ok(Finding::available(match (with.is_empty(), without.is_empty()) {
        (true, _) => format!("{name}, no capability that matters here"),
        (_, true) => format!("{name}, all capabilities that matter here"),
        _ => format!("{name}, with {}, without {}", with.join(", "), without.join(", ")),
    }))
}

/// Reports whether a system call filter (seccomp) is active.
fn probe_system_call_filter(system: &SystemFiles) -> Checked {
    Ok(Finding::available(match read_status_line(system, "Seccomp")?.as_str() {
        "0" => "none".to_string(),
        mode => format!("active (seccomp mode {mode}): what it refuses shows in the other rows"),
    }))
}

/// Probes whether a file system can be mounted in a new user namespace.
fn probe_user_namespace(system: &SystemFiles) -> Finding {
    const NAMESPACE_SETTINGS: [(&str, &str); 2] = [
        ("/proc/sys/kernel/unprivileged_userns_clone", "0"),
        ("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1"),
    ];
    let blocked = NAMESPACE_SETTINGS.iter().find(|(path, off)| system.read(path).is_ok_and(|text| text == *off));
    let (state, error) = match trial::try_mount_in_namespace() {
        Ok(()) => return Finding::available("a tmpfs was mounted in one that ended"),
        Err(NamespaceError::Refused(error)) => (super::Availability::Missing, error),
        Err(NamespaceError::CannotMount(error)) => (super::Availability::Limited, error),
    };
    let found = match state {
        super::Availability::Limited => format!("can be made, but nothing mounted in it: {}", describe_error(&error)),
        _ => describe_error(&error),
    };
    let finding = Finding::new(state, found);
    match blocked {
        Some((path, off)) => {
            let name = path.trim_start_matches("/proc/sys/").replace('/', ".");
            finding.with_fix(format!("sudo sysctl {name}={}", 1 - off.parse::<u8>().unwrap_or(0)))
        }
        None if system.read_number("/proc/sys/user/max_user_namespaces").is_ok_and(|most| most > 0) => {
            finding.with_fix("allow unshare(CLONE_NEWUSER) in the sandbox, or run as root")
        }
        None => finding,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If the kernel refuses a ring because of the limit of locked memory, the finding must have the fix for that
    /// limit.
    #[test]
    fn a_ring_above_the_memlock_limit_gets_another_fix() {
        let fix = |errno| ring_finding(Err(std::io::Error::from_raw_os_error(errno))).fix;
        assert_eq!(fix(libc::ENOMEM).as_deref(), Some(MEMLOCK_FIX));
        assert_eq!(fix(libc::EPERM), None, "the row's own");
    }
    use crate::probe::{Availability, finding_of};

    /// If the cache folder does not exist, its nearest existing ancestor must be tried, and no file may be left there.
    /// If no file can be created in that ancestor, the cache folder must be reported as missing.
    #[test]
    fn a_missing_cache_folder_is_tried_in_its_ancestor() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(cache_folder_finding(&folder.path().join("a/b")).state, Availability::Available);
        assert_eq!(cache_folder_finding(Path::new("/proc/none")).state, Availability::Missing);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    /// Without the device, FUSE must be missing. With the device but without `fusermount3`, the finding must have the
    /// package to install.
    #[test]
    fn fuse_needs_a_device_and_a_helper() {
        let root = tempfile::tempdir().unwrap();
        let system = SystemFiles { root: root.path().to_path_buf() };
        let write = |path: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, b"").unwrap();
        };
        assert_eq!(probe_fuse(&system).state, Availability::Missing);
        write("dev/fuse");
        let finding = probe_fuse(&system);
        assert_eq!((finding.state, finding.fix.as_deref()), (Availability::Limited, Some("sudo apt install fuse3")));
        write("usr/bin/fusermount3");
        assert_eq!(probe_fuse(&system).state, Availability::Available);
    }

    /// The finding must list the [`CAPABILITIES`] that the process has, and those that it lacks.
    #[test]
    fn capabilities_are_listed() {
        let root = tempfile::tempdir().unwrap();
        let system = SystemFiles { root: root.path().to_path_buf() };
        std::fs::create_dir_all(root.path().join("proc/self")).unwrap();
        for (mask, text) in [
            ("0000000000000000", "no capability that matters here"),
            ("000001ffffffffff", "all capabilities that matter here"),
            ("000001fffeffffff", "without CAP_SYS_RESOURCE"),
        ] {
            std::fs::write(root.path().join("proc/self/status"), format!("CapEff:\t{mask}\nSeccomp:\t2\n")).unwrap();
            assert!(finding_of(probe_user_and_capabilities(&system)).found.ends_with(text), "{mask}");
        }
        assert!(finding_of(probe_system_call_filter(&system)).found.starts_with("active (seccomp mode 2)"));
    }
}
