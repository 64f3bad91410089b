//! Kernel calls of `pagemill run` fail one after the other, with each possible error. The command must not end by a
//! signal. Either the program must run and read what it wrote, or the error must say what failed. No descriptor, file,
//! folder, mount or control group may remain.
//!
//! Only calls of the command's first thread fail, from its first `geteuid` on. Earlier calls belong to the start of the
//! dynamic linker and of Rust's runtime. `fault.rs` tests the preloaded program, and `fault_mount.rs` tests `pagemill
//! mount`.
//!
//! By default a sample of the calls fails, which takes some 15 s for each scenario. `FAULT_SWEEP=full cargo
//! test -p pagemill-cli --test fault_run` makes most calls fail in turn, which takes some minutes.

mod common;

use common::sweep::{Outcome, cannot_inject, count_calls_by_name, failing_calls};
use common::{End, PAGEMILL, TIMEOUT, TestFolder, finish, finish_bytes, is_missing, may_mount, walk};
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};

/// Kernel calls, each with the errors that are injected in it. `close` and `fcntl` do not fail, because Rust's library
/// takes an error of these calls as a sign that the descriptor belongs to other code.
const CALL_ERRORS: &[(&str, &[&str])] = &[
    ("mmap", &["ENOMEM"]),
    ("openat", &["EMFILE", "EACCES", "EINTR"]),
    ("openat2", &["EMFILE", "EINTR"]),
    ("read", &["EIO", "EINTR"]),
    ("pread64", &["EIO", "EINTR"]),
    ("write", &["EIO", "ENOSPC", "EINTR"]),
    ("statx", &["EACCES", "ENOMEM"]),
    ("newfstatat", &["EACCES", "ENOMEM"]),
    ("fstatfs", &["ENOMEM"]),
    ("getdents64", &["EIO"]),
    ("readlink", &["EACCES"]),
    ("lseek", &["EIO"]),
    ("mkdir", &["EACCES", "ENOSPC"]),
    ("fallocate", &["ENOSPC", "EOPNOTSUPP", "EINTR"]),
    ("ftruncate", &["EIO"]),
    ("unlink", &["EACCES"]),
    ("unlinkat", &["EACCES"]),
    ("rmdir", &["EBUSY"]),
    ("socketpair", &["EMFILE"]),
    ("pipe2", &["EMFILE"]),
    ("eventfd2", &["EMFILE"]),
    ("clone", &["EAGAIN", "ENOMEM"]),
    ("clone3", &["EAGAIN", "ENOMEM"]),
    ("vfork", &["EAGAIN", "ENOMEM"]),
    ("wait4", &["EINTR"]),
    ("rt_sigtimedwait", &["EINTR"]),
    ("recvfrom", &["EINTR"]),
    ("prctl", &["EPERM"]),
    ("unshare", &["EPERM", "ENOSPC"]),
    ("mount", &["EPERM"]),
    ("fsopen", &["EPERM", "EMFILE"]),
    ("fsconfig", &["EINVAL", "ENOMEM"]),
    ("fsmount", &["EMFILE"]),
    ("open_tree", &["EMFILE"]),
    ("move_mount", &["EINVAL"]),
    ("umount2", &["EBUSY"]),
    ("fanotify_init", &["EMFILE", "ENOSYS"]),
    ("fanotify_mark", &["ENOMEM", "ENOSPC"]),
    ("fsetxattr", &["ENOSPC"]),
    ("flistxattr", &["ENOMEM"]),
    ("llistxattr", &["ENOMEM"]),
    ("flock", &["EINTR", "ENOLCK"]),
    ("socket", &["EMFILE"]),
    ("bind", &["EADDRINUSE"]),
    ("listen", &["EADDRINUSE"]),
    ("prlimit64", &["EPERM"]),
];

/// A scenario: the options of `run`, and the path to which its program copies a file. `@` in an option or in the path
/// means the folder of the test.
struct Scenario {
    name: &'static str,
    options: &'static [&'static str],
    copy: &'static str,
}

/// A shell script that copies a file, compares the copy, and prints which descriptors the shell inherited.
const COPY_SCRIPT: &str = r#"cat "$1" > "$2" && cmp "$1" "$2" && echo fine && cd /proc/self/fd && echo open: *"#;

impl Scenario {
    fn trace(&self, place: &TestFolder, calls: &str, inject: Option<&str>) -> (End, String) {
        let at = |text: &str| text.replace('@', place.path(".").to_str().unwrap());
        let (source, trace) = (place.path("source"), place.path("trace"));
        if !source.exists() {
            fs::write(&source, common::ram::pattern(1, 300_000)).unwrap();
        }
        let _ = fs::remove_file(&trace);
        let mut command = place.command_with_libc_fallback("strace");
        command.args(["-qq", "-e", "signal=none", "-o"]).arg(&trace);
        command.arg(format!("-etrace={calls},geteuid")).args(inject.map(|inject| format!("-einject={inject}")));
        command.args([PAGEMILL, "run"]).args(self.options.iter().map(|option| at(option)));
        command.args(["--", "sh", "-c", COPY_SCRIPT, "sh"]).arg(&source).arg(at(self.copy));
        let end = finish(command, TIMEOUT);
        (end, fs::read_to_string(trace).unwrap_or_default())
    }

    /// Returns what is wrong with the end of a run; `None` if nothing is wrong. `clean` is the end of a run without a
    /// failure.
    fn problem(&self, end: &End, clean: &End) -> Option<String> {
        if end.status.signal().is_some() || end.err.contains("panicked") {
            return Some("it ends by a signal or a panic".into());
        }
        match end.status.code() {
            // After a failure, the program may inherit fewer descriptors than in a clean run, but no others.
            Some(0) if !end.out.contains("fine\n") => Some("the program did not run".into()),
            Some(0) if end.out.len() > clean.out.len() => Some("the program inherits a descriptor".into()),
            Some(0) => None,
            Some(2 | 126 | 127) => {
                let text = end.err.lines().last().and_then(|line| line.strip_prefix("pagemill: "));
                // The message must say more than the kernel's error text.
                let is_explained = text.is_some_and(|text| text.contains(": ") && text.len() > 30);
                (!is_explained).then(|| "the error does not say what failed".into())
            }
            _ => Some("the status is none of those of `run`".into()),
        }
    }

    fn sweep(&self, outcome: &mut Outcome) {
        // The `?` accepts names that do not exist on this processor.
        let all: Vec<_> = CALL_ERRORS.iter().map(|(call, _)| format!("?{call}")).collect();
        let place = TestFolder::new();
        let (clean, trace) = self.trace(&place, &all.join(","), None);
        if clean.code() == 126 && !self.options.is_empty() {
            return println!("skipped: {}: {}", self.name, clean.err);
        }
        assert!(clean.status.success() && clean.out.contains("fine"), "{}: {}{}", self.name, clean.out, clean.err);
        assert_eq!(leftovers(&place), Vec::<PathBuf>::new());
        let counts = count_calls_by_name(&trace, "geteuid");
        for (call, errors) in CALL_ERRORS {
            let Some((before, after)) = counts.get(*call).filter(|(_, after)| *after > 0) else { continue };
            outcome.calls += after;
            for error in *errors {
                outcome.pairs += 1;
                for at in failing_calls(*after, outcome.pairs) {
                    let inject = format!("{call}:error={error}:when={}", before + at);
                    let (end, trace) = self.trace(&place, call, Some(&inject));
                    outcome.count_run(&trace);
                    let line = trace.lines().find(|line| line.contains("(INJECTED)")).unwrap_or_default();
                    let details = format!("{}, {inject}: {}\n{line}\n{}{}", self.name, end.status, end.out, end.err);
                    outcome.problems.extend(self.problem(&end, &clean).map(|what| format!("{what}: {details}")));
                    // What `run` cannot remove must be named in its message, or be removed by the next command.
                    let mut left = leftovers(&place);
                    if end.err.contains("stays: it cannot be removed") {
                        let _ = fs::remove_dir(place.path("ram"));
                        left = leftovers(&place);
                    }
                    if !left.is_empty() {
                        finish(place.pagemill_run(&[], "true"), TIMEOUT).assert_success();
                        let mut next = place.command(PAGEMILL);
                        finish_bytes(next.arg("meminfo"), Vec::new(), TIMEOUT);
                    }
                    if !leftovers(&place).is_empty() {
                        outcome.problems.push(format!("left behind {:?}: {details}", leftovers(&place)));
                        leftovers(&place).iter().for_each(|path| drop(fs::remove_dir_all(path)));
                    }
                }
            }
        }
    }
}

/// Returns what a run left behind: files and folders of process trees, control groups, and a mount point.
fn leftovers(place: &TestFolder) -> Vec<PathBuf> {
    let is_trees = |path: &PathBuf| *path != place.path("runtime/pagemill") && !path.ends_with("mount.lock");
    let mut left: Vec<_> = walk(&place.path("runtime")).into_iter().filter(is_trees).collect();
    left.extend(Some(place.path("ram")).filter(|path| path.exists()));
    // `run` creates its groups in this process's own group, of cgroup version 1 or 2.
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let folders = own.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (names, path) = (fields.next()?, fields.next()?);
        let root = if names.is_empty() { "/sys/fs/cgroup" } else { "/sys/fs/cgroup/memory" };
        (names.is_empty() || names.split(',').any(|name| name == "memory")).then(|| format!("{root}{path}"))
    });
    let groups = folders.filter_map(|folder| fs::read_dir(folder).ok()).flatten().map(|entry| entry.unwrap().path());
    left.extend(groups.filter(|path| is_group_of_dead_run(path)));
    left
}

/// Returns whether a `run` that has ended created this control group. The result is `false` for the group of a `run`
/// that another test has started.
fn is_group_of_dead_run(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let pid = name.strip_prefix("pagemill-run-").and_then(|rest| rest.split('-').next());
    pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists())
}

#[test]
fn failing_calls_of_run_with_a_limit_are_survived() {
    sweep(Scenario { name: "run --limit", options: &["--limit", "300M", "--report"], copy: "@/copy" });
}

#[test]
fn failing_calls_of_run_with_a_control_group_are_survived() {
    sweep(Scenario { name: "run --limit-kernel", options: &["--limit-kernel", "300M"], copy: "@/copy" });
}

#[test]
fn failing_calls_of_run_with_a_mount_are_survived() {
    if may_mount() {
        sweep(Scenario { name: "run --ram", options: &["--ram", "@/ram", "--ram-size", "16M"], copy: "@/ram/copy" });
    }
}

fn sweep(scenario: Scenario) {
    if cannot_inject() || is_missing("cmp") {
        return;
    }
    let mut outcome = Outcome::default();
    scenario.sweep(&mut outcome);
    if outcome.runs > 0 {
        outcome.assert_no_problems(scenario.name);
    }
}
