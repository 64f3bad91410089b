//! Probes of io_uring, file events and folders, and of the privileges of this process.

use super::trial::{self, Folder, NoNamespace, Resource};
use super::{Feature, Finding, Group, System, describe};
use std::fs::File;
use std::path::{Path, PathBuf};

/// The command that lifts the limit of locked memory.
const MEMLOCK_FIX: &str = "sudo prlimit --pid $$ --memlock=unlimited";

pub(super) const ROWS: &[Feature] = &[
    Feature {
        key: "io_uring",
        group: Group::Files,
        name: "io_uring",
        since: "5.1",
        needed_for: "asynchronous direct reads and writes into huge pages",
        lost: "threads that read and write: more CPU per I/O",
        fix: "sudo sysctl kernel.io_uring_disabled=0",
        check: |_| ring_finding(trial::make_ring()),
    },
    Feature {
        key: "io_uring_memory",
        group: Group::Files,
        name: "memory known to rings",
        since: "5.19",
        needed_for: "large direct reads and writes that find their pages at once",
        lost: "each transfer looks up its pages: more CPU per large read",
        fix: MEMLOCK_FIX,
        check: |_| match trial::register_memory() {
            Ok(()) => Finding::available("2 MiB were registered"),
            Err(error) => Finding::refused(&error),
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
        check: direct_io,
    },
    Feature {
        key: "fanotify",
        group: Group::Files,
        name: "file events (fanotify)",
        since: "5.13",
        needed_for: "mount: events for new files, so that each gets the right page size",
        lost: "the file system is scanned periodically instead",
        fix: "",
        check: |_| match trial::watch_files(c"/") {
            Ok(true) => Finding::available("works, for whole file systems too"),
            Ok(false) => Finding::available("works; whole file systems only inside a user namespace"),
            Err(error) => Finding::refused(&error),
        },
    },
    Feature {
        key: "fuse",
        group: Group::Files,
        name: "FUSE",
        since: "2.6.14",
        needed_for: "a mount served by Pagemill itself",
        lost: "mount manages a tmpfs instead",
        fix: "sudo modprobe fuse",
        check: fuse,
    },
    Feature {
        key: "figures_folder",
        group: Group::Files,
        name: "folder for figures",
        since: "",
        needed_for: "figures that meminfo, vmstat and --report read",
        lost: "`pagemill run` refuses --limit and reports; without them, programs run but publish no figures",
        fix: "export XDG_RUNTIME_DIR=$(mktemp -d)",
        check: figures_folder,
    },
    Feature {
        key: "cache_folder",
        group: Group::Files,
        name: "folder for the preload file",
        since: "",
        needed_for: "run: the library is stored there once, unless it is beside the command",
        lost: "run stores it below /tmp or /dev/shm, again after each boot",
        fix: "export XDG_CACHE_HOME=$(mktemp -d)",
        check: cache_folder,
    },
    Feature {
        key: "user",
        group: Group::Privileges,
        name: "user",
        since: "",
        needed_for: "nothing: commands run unprivileged as far as possible",
        lost: "the capabilities are not known",
        fix: "",
        check: user,
    },
    Feature {
        key: "sandbox",
        group: Group::Privileges,
        name: "system call filter",
        since: "",
        needed_for: "distinguishing a sandbox's refusal from the kernel's",
        lost: "whether a filter refuses calls is not known",
        fix: "",
        check: sandbox,
    },
    Feature {
        key: "user_namespace",
        group: Group::Privileges,
        name: "user namespaces",
        since: "3.8",
        needed_for: "mount without root",
        lost: "mount needs root",
        fix: "sudo sysctl user.max_user_namespaces=15000",
        check: user_namespace,
    },
    Feature {
        key: "realtime",
        group: Group::Privileges,
        name: "real-time priority",
        since: "",
        needed_for: "mount: the purging thread outruns writers (32 MiB of room are enough)",
        lost: "mount keeps some 200 MiB of room below a control group's limit",
        fix: "sudo prlimit --pid $$ --rtprio=10",
        check: |_| match trial::take_realtime() {
            Ok(()) => Finding::available("SCHED_RR taken by a process that ended"),
            Err(error) => match trial::resource_limit(Resource::RealTime) {
                Ok((Some(limit), _)) => Finding::missing(format!("{}, RLIMIT_RTPRIO {limit}", describe(&error))),
                _ => Finding::refused(&error).with_fix("give the CPU control group real-time: cpu.rt_runtime_us"),
            },
        },
    },
];

/// Tries direct I/O in the current folder, then in the folder for temporary files.
fn direct_io(_: &System) -> Finding {
    let folders = [std::env::current_dir().unwrap_or_default(), std::env::temp_dir()];
    let mut refused = None;
    for folder in &folders {
        match trial::read_directly(folder) {
            Ok(Some(alignment)) => {
                let units = format!("multiples of {} bytes", alignment.offset);
                return Finding::available(format!("files in {}: {units}", folder.display()));
            }
            Ok(None) => return Finding::available(format!("files in {}", folder.display())),
            Err(error) if is_about_the_folder(&error) => {
                refused.get_or_insert_with(|| Finding::unknown(format!("{}: {}", folder.display(), describe(&error))));
            }
            Err(error) => return Finding::missing(format!("files in {}: {}", folder.display(), describe(&error))),
        }
    }
    refused.unwrap_or_else(|| Finding::unknown("no folder to try it in"))
}

/// Returns whether the error means that no file could be created in the folder, so that nothing is known about direct
/// I/O.
fn is_about_the_folder(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{NotFound, PermissionDenied, ReadOnlyFilesystem, StorageFull};
    [NotFound, PermissionDenied, ReadOnlyFilesystem, StorageFull].contains(&error.kind())
}

/// The finding for the result of creating a ring. Some kernels charge a ring as locked memory and return `ENOMEM`,
/// which has a fix of its own.
fn ring_finding(made: std::io::Result<()>) -> Finding {
    match made {
        Ok(()) => Finding::available("a ring was made"),
        Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => Finding::refused(&error).with_fix(MEMLOCK_FIX),
        Err(error) => Finding::refused(&error),
    }
}

/// Probes whether `/dev/fuse` can be opened and the mount helper is installed.
fn fuse(system: &System) -> Finding {
    const HELPERS: [&str; 2] = ["/usr/bin/fusermount3", "/bin/fusermount3"];
    match File::options().read(true).write(true).open(system.path("/dev/fuse")) {
        Ok(_) if HELPERS.iter().any(|path| system.has(path)) => {
            Finding::available("/dev/fuse opens, fusermount3 is there")
        }
        Ok(_) => Finding::available("/dev/fuse opens; no fusermount3: mounting needs root or a user namespace"),
        Err(error) => {
            let finding = Finding::missing(format!("/dev/fuse: {}", describe(&error)));
            let is_forbidden = error.kind() == std::io::ErrorKind::PermissionDenied;
            if is_forbidden { finding.with_fix("sudo chmod a+rw /dev/fuse") } else { finding }
        }
    }
}

/// Returns the folder itself, or its nearest ancestor that exists.
fn nearest_existing(folder: &Path) -> &Path {
    folder.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new("/"))
}

/// Probes the folders in which figures files can be created.
fn figures_folder(system: &System) -> Finding {
    let try_file = |folder: &Path| match trial::try_folder(nearest_existing(folder)) {
        Ok(_) => Ok(()),
        Err(error) => Err(format!("{}: {}", folder.display(), describe(&error))),
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

/// Returns the user's cache folder, by the XDG rules.
fn user_cache() -> Option<PathBuf> {
    let folder = |name| std::env::var_os(name).map(PathBuf::from).filter(|folder| folder.is_absolute());
    folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")))
}

/// Probes the folder in which `pagemill run` stores the preload library.
fn cache_folder(_: &System) -> Finding {
    let Some(folder) = user_cache() else {
        return Finding::missing("neither XDG_CACHE_HOME nor HOME is set");
    };
    cache_finding(&folder)
}

/// The finding for `folder` as the place of the preload library, which must be mapped as code.
fn cache_finding(folder: &Path) -> Finding {
    let name = folder.display();
    match trial::try_folder(nearest_existing(folder)) {
        Ok(Folder::Usable) => Finding::available(name.to_string()),
        Ok(Folder::NotExecutable(error)) => Finding::missing(format!("{name} is mounted noexec: {}", describe(&error))),
        Err(error) => Finding::missing(format!("{name}: {}", describe(&error))),
    }
}

/// Returns the value of a line of `/proc/self/status`.
fn status_line(system: &System, name: &str) -> Result<String, Finding> {
    let text = system.read("/proc/self/status")?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.map(|line| line.trim().to_string()).ok_or_else(|| Finding::unknown(format!("/proc/self/status has no {name}")))
}

/// The capabilities that Pagemill can make use of: number and name.
const CAPABILITIES: [(u32, &str); 4] =
    [(14, "CAP_IPC_LOCK"), (21, "CAP_SYS_ADMIN"), (23, "CAP_SYS_NICE"), (24, "CAP_SYS_RESOURCE")];

/// Reports the user and its useful capabilities.
fn user(system: &System) -> Finding {
    let id = crate::process::user_id();
    let name = if id == 0 { "root".to_string() } else { format!("user {id}") };
    let mask = match status_line(system, "CapEff") {
        Ok(text) => u64::from_str_radix(&text, 16).unwrap_or(0),
        Err(finding) => return finding,
    };
    let held = |wanted: bool| -> Vec<&str> {
        CAPABILITIES.iter().filter(|(bit, _)| (mask >> bit & 1 == 1) == wanted).map(|(_, name)| *name).collect()
    };
    let (with, without) = (held(true), held(false));
    Finding::available(match (with.is_empty(), without.is_empty()) {
        (true, _) => format!("{name}, no capability that matters here"),
        (_, true) => format!("{name}, all capabilities that matter here"),
        _ => format!("{name}, with {}, without {}", with.join(", "), without.join(", ")),
    })
}

/// Reports whether a system call filter (seccomp) is active.
fn sandbox(system: &System) -> Finding {
    match status_line(system, "Seccomp").as_deref() {
        Ok("0") => Finding::available("none"),
        Ok(mode) => {
            Finding::available(format!("active (seccomp mode {mode}): what it refuses shows in the other rows"))
        }
        Err(_) => status_line(system, "Seccomp").err().unwrap_or_else(|| Finding::unknown("changed meanwhile")),
    }
}

/// Probes whether a file system can be mounted in a new user namespace.
fn user_namespace(system: &System) -> Finding {
    const SWITCHES: [(&str, &str); 2] = [
        ("/proc/sys/kernel/unprivileged_userns_clone", "0"),
        ("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1"),
    ];
    let blocked = SWITCHES.iter().find(|(path, off)| system.read(path).is_ok_and(|text| text == *off));
    let (state, error) = match trial::mount_in_namespace() {
        Ok(()) => return Finding::available("a tmpfs was mounted in one that ended"),
        Err(NoNamespace::Refused(error)) => (super::Availability::Missing, error),
        Err(NoNamespace::CannotMount(error)) => (super::Availability::Limited, error),
    };
    let found = match state {
        super::Availability::Limited => format!("can be made, but nothing mounted in it: {}", describe(&error)),
        _ => describe(&error),
    };
    let finding = Finding::new(state, found);
    match blocked {
        Some((path, off)) => {
            let name = path.trim_start_matches("/proc/sys/").replace('/', ".");
            finding.with_fix(format!("sudo sysctl {name}={}", 1 - off.parse::<u8>().unwrap_or(0)))
        }
        None if system.number("/proc/sys/user/max_user_namespaces").is_ok_and(|most| most > 0) => {
            finding.with_fix("allow unshare(CLONE_NEWUSER) in the sandbox, or run as root")
        }
        None => finding,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A ring refused for lack of lockable memory must get the fix for that limit.
    #[test]
    fn a_ring_without_lockable_memory_gets_another_fix() {
        let fix = |errno| ring_finding(Err(std::io::Error::from_raw_os_error(errno))).fix;
        assert_eq!(fix(libc::ENOMEM).as_deref(), Some(MEMLOCK_FIX));
        assert_eq!(fix(libc::EPERM), None, "the row's own");
    }
    use crate::probe::Availability;

    /// If the cache folder does not exist, its nearest existing ancestor must be tried. A folder that cannot be created
    /// must be reported as missing.
    #[test]
    fn a_missing_cache_folder_is_tried_in_its_ancestor() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(cache_finding(&folder.path().join("a/b")).state, Availability::Available);
        assert_eq!(cache_finding(Path::new("/proc/none")).state, Availability::Missing);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    /// The row must list the useful capabilities that the process has, and those that it lacks.
    #[test]
    fn capabilities_are_named() {
        let root = tempfile::tempdir().unwrap();
        let system = System { root: root.path().to_path_buf() };
        std::fs::create_dir_all(root.path().join("proc/self")).unwrap();
        for (mask, text) in [
            ("0000000000000000", "no capability that matters here"),
            ("000001ffffffffff", "all capabilities that matter here"),
            ("000001fffeffffff", "without CAP_SYS_RESOURCE"),
        ] {
            std::fs::write(root.path().join("proc/self/status"), format!("CapEff:\t{mask}\nSeccomp:\t2\n")).unwrap();
            assert!(user(&system).found.ends_with(text), "{mask}");
        }
        assert!(sandbox(&system).found.starts_with("active (seccomp mode 2)"));
    }
}
