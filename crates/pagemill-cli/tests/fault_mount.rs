//! Kernel calls of `pagemill mount` fail one after the other, with each possible error. The controller must not end by
//! a signal. Every written byte must be readable, and no mount, process or descriptor may remain. If an error ends the
//! controller, its message must say what failed.
//!
//! The test `failing_calls_at_start_and_end_are_survived` makes calls of the first thread fail, from its first
//! `geteuid` on: mount, start and end. The test `failing_calls_while_running_are_survived` attaches `strace` to a
//! running controller. Calls of its threads and of its worker then fail while files are written and purged.
//! `fault_run.rs` tests `pagemill run`.
//!
//! By default a sample of the calls fails, which takes some 20 s for each test. `FAULT_SWEEP=full cargo test -p
//! pagemill-cli --test fault_mount` makes most calls fail in turn, which takes some ten minutes.

mod common;

use common::ram::{MIB, pattern, start, wait_until};
use common::sweep::{Outcome, cannot_inject, count_calls_by_name, failing_calls, is_full_sweep};
use common::{End, Guard, PAGEMILL, TIMEOUT, TestFolder, finish, may_mount};
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::Stdio;

/// Calls that the controller makes while it starts and ends, each with the errors that are injected in it.
const CALL_ERRORS: &[(&str, &[&str])] = &[
    ("mmap", &["ENOMEM"]),
    ("openat", &["EMFILE", "EACCES", "EINTR"]),
    ("openat2", &["EMFILE", "EINTR"]),
    ("read", &["EIO", "EINTR"]),
    ("pread64", &["EIO"]),
    ("statx", &["EACCES", "ENOMEM"]),
    ("newfstatat", &["EACCES"]),
    ("fstatfs", &["ENOMEM"]),
    ("getdents64", &["EIO"]),
    ("readlink", &["EACCES"]),
    ("mkdir", &["EACCES", "ENOSPC"]),
    ("unlink", &["EACCES"]),
    ("socket", &["EMFILE"]),
    ("socketpair", &["EMFILE"]),
    ("bind", &["EADDRINUSE", "EACCES"]),
    ("listen", &["EADDRINUSE"]),
    ("eventfd2", &["EMFILE"]),
    ("clone3", &["EAGAIN"]),
    ("fsopen", &["EPERM", "EMFILE"]),
    ("fsconfig", &["EINVAL", "ENOMEM"]),
    ("fsmount", &["EMFILE"]),
    ("fspick", &["EMFILE"]),
    ("open_tree", &["EMFILE"]),
    ("move_mount", &["EINVAL"]),
    ("umount2", &["EBUSY", "EINVAL"]),
    ("fanotify_init", &["EMFILE", "ENOSYS"]),
    ("fanotify_mark", &["ENOMEM", "ENOSPC"]),
    ("fsetxattr", &["ENOSPC"]),
    ("flistxattr", &["ENOMEM"]),
    ("flock", &["EINTR", "ENOLCK"]),
    ("prlimit64", &["EPERM"]),
];

/// Calls that a running controller makes, each with the errors that are injected in it.
const RUNNING_CALL_ERRORS: &[(&str, &[&str])] = &[
    ("mmap", &["ENOMEM"]),
    ("openat", &["EMFILE", "EACCES", "EINTR"]),
    ("openat2", &["EMFILE", "EINTR"]),
    ("open_by_handle_at", &["ESTALE", "EMFILE"]),
    ("read", &["EIO", "EINTR", "ENOMEM"]),
    ("pread64", &["EIO", "EINTR"]),
    ("write", &["EIO", "EINTR"]),
    ("statx", &["ENOMEM"]),
    ("newfstatat", &["ENOMEM"]),
    ("fstatfs", &["ENOMEM"]),
    ("getdents64", &["EIO"]),
    ("flistxattr", &["ENOMEM"]),
    ("llistxattr", &["ENOMEM"]),
    ("fgetxattr", &["ENOMEM"]),
    ("lgetxattr", &["ENOMEM"]),
    ("renameat2", &["ENOSPC"]),
    ("unlinkat", &["EACCES"]),
    ("ftruncate", &["EIO", "EINTR"]),
    ("fsetxattr", &["ENOSPC"]),
    ("fspick", &["EMFILE"]),
    ("fsconfig", &["EINVAL", "ENOMEM"]),
    ("fanotify_mark", &["ENOMEM"]),
    ("socketpair", &["EMFILE"]),
    ("accept4", &["EMFILE", "ECONNABORTED"]),
    ("recvfrom", &["EINTR"]),
    ("clone3", &["EAGAIN"]),
    ("ppoll", &["EINTR", "ENOMEM"]),
    ("poll", &["EINTR"]),
    ("process_madvise", &["EPERM"]),
    ("madvise", &["EINVAL", "EAGAIN"]),
    ("lseek", &["EIO"]),
    ("fallocate", &["ENOSPC", "EINTR"]),
    ("sched_setattr", &["EPERM"]),
];

/// A mount, and its controller, which was started directly or under `strace`.
struct Mount {
    place: TestFolder,
    point: PathBuf,
    process: Guard,
    pid: Option<u32>,
}

impl Mount {
    fn new() -> Self {
        let (place, point) = new_mount_point();
        let process = start(&place, &point, &["--size", "64M"]);
        let pid = Some(process.id());
        Self { place, point, process, pid }
    }

    /// Starts the controller under `strace`. The field `pid` is `None` if the controller does not start.
    fn traced(calls: &str, inject: Option<&str>) -> Self {
        let (place, point) = new_mount_point();
        let mut command = place.command("strace");
        command.args(["-qq", "-e", "signal=none", "-o"]).arg(place.path("trace"));
        command.arg(format!("-etrace={calls},geteuid")).args(inject.map(|inject| format!("-einject={inject}")));
        command.args([PAGEMILL, "mount", "--size", "64M"]).arg(&point);
        let [out, err] = ["out", "err"].map(|name| place.path(name));
        command.stdout(File::create(&out).unwrap()).stderr(File::create(err).unwrap());
        let mut process = Guard::new(command);
        let output = || fs::read_to_string(&out).unwrap();
        wait_until("it is mounted or has ended", || output().contains('\n') || process.has_ended());
        let words = output();
        let pid = words.split_once("controller ").and_then(|(_, rest)| rest.split(';').next()?.parse().ok());
        Self { place, point, process, pid }
    }

    fn err(&self) -> String {
        fs::read_to_string(self.place.path("err")).unwrap()
    }

    fn is_mounted(&self) -> bool {
        fs::metadata(&self.point).unwrap().dev() != fs::metadata(self.place.path("home")).unwrap().dev()
    }

    fn command(&self, arguments: &[&str]) -> End {
        let mut command = self.place.command(PAGEMILL);
        command.args(arguments);
        finish(command, TIMEOUT)
    }

    /// Writes a file without a mark and a volatile file, requests the status of the mount, and purges. Returns how the
    /// two commands ended.
    fn use_mount(&self) -> [End; 2] {
        fs::write(self.point.join("kept"), pattern(3, 3 * MIB)).unwrap();
        let (new, volatile) = (self.point.join("new"), self.point.join("volatile"));
        fs::write(&new, pattern(4, MIB)).unwrap();
        let marked = self.command(&["mark", "--volatile", "full", new.to_str().unwrap()]);
        marked.assert_success();
        fs::rename(&new, &volatile).unwrap();
        let point = self.point.to_str().unwrap();
        [self.command(&["status", point]), self.command(&["purge", point, "1M"])]
    }

    /// Returns what is wrong with the files and with the answers of the controller when no call fails any more; `None`
    /// if nothing is wrong.
    fn problem(&self) -> Option<String> {
        if fs::read(self.point.join("kept")).ok() != Some(pattern(3, 3 * MIB)) {
            return Some("bytes are lost".into());
        }
        let [status, purge] = self.use_mount();
        for end in [status, purge] {
            if !end.status.success() {
                return Some(format!("it does not answer: {}", end.err));
            }
        }
        // An earlier purge may have removed the file.
        let is_gone = !self.point.join("volatile").exists();
        (!is_gone).then(|| "a volatile file is not purged".into())
    }

    fn descriptors(&self) -> Vec<PathBuf> {
        let folder = format!("/proc/{}/fd", self.pid.unwrap());
        let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
        let mut targets: Vec<_> = entries.filter_map(|entry| fs::read_link(entry.path()).ok()).collect();
        targets.sort();
        targets
    }

    /// Returns whether the worker process of the mount runs. The worker runs if any thread of the controller has a
    /// child process.
    fn has_worker(&self) -> bool {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid.unwrap())).into_iter().flatten().flatten();
        tasks.flat_map(|task| fs::read_to_string(task.path().join("children"))).any(|pids| !pids.trim().is_empty())
    }

    /// Ends the controller. Returns what is wrong with how it ended; `None` if nothing is wrong.
    fn stop(&mut self) -> Option<String> {
        if let Some(pid) = self.pid {
            assert!(
                common::shell(&format!("kill -s TERM {pid} 2> /dev/null || ! kill -s 0 {pid} 2> /dev/null")).success()
            );
        }
        let status = self.process.wait(TIMEOUT);
        let err = self.err();
        if status.signal().is_some() || err.contains("panicked") {
            return Some("it ends by a signal or a panic".into());
        }
        match (status.code(), self.is_mounted()) {
            (Some(0), false) if self.pid.is_some() => None,
            // The controller may end with status 1 if it reported that it could not unmount.
            (Some(1), true) if err.contains("stays mounted without a controller") => None,
            (Some(2), false) => {
                let text = err.lines().next().and_then(|line| line.strip_prefix("pagemill: "));
                // The message must say more than the kernel's error text.
                let is_explained = text.is_some_and(|text| text.contains(": ") && text.len() > 30);
                (!is_explained).then(|| "the error does not say what failed".into())
            }
            (code, is_mounted) => Some(format!("status {code:?}, mounted: {is_mounted}")),
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if !self.process.has_ended() {
            self.process.signal("KILL");
            self.process.wait(TIMEOUT);
        }
        while self.is_mounted() && common::shell(&format!("umount -l {}", self.point.display())).success() {}
    }
}

fn new_mount_point() -> (TestFolder, PathBuf) {
    let place = TestFolder::new();
    let point = place.path("ram");
    fs::create_dir(&point).unwrap();
    (place, point)
}

fn cannot_run() -> bool {
    !may_mount() || cannot_inject()
}

#[test]
fn failing_calls_at_start_and_end_are_survived() {
    if cannot_run() {
        return;
    }
    let mut outcome = Outcome::default();
    // The `?` lets `strace` accept names of calls that do not exist on this processor.
    let all: Vec<_> = CALL_ERRORS.iter().map(|(call, _)| format!("?{call}")).collect();
    let mut clean = Mount::traced(&all.join(","), None);
    clean.use_mount().iter().for_each(End::assert_success);
    assert_eq!(clean.stop(), None);
    let counts = count_calls_by_name(&fs::read_to_string(clean.place.path("trace")).unwrap(), "geteuid");
    for (call, errors) in CALL_ERRORS {
        let Some((before, after)) = counts.get(*call).filter(|(_, after)| *after > 0) else { continue };
        outcome.calls += after;
        for error in *errors {
            outcome.pairs += 1;
            for at in failing_calls(*after, outcome.pairs) {
                let inject = format!("{call}:error={error}:when={}", before + at);
                let mut mount = Mount::traced(call, Some(&inject));
                let mut problems = Vec::new();
                if mount.pid.is_some() {
                    mount.use_mount();
                    problems.extend(mount.problem());
                }
                problems.extend(mount.stop());
                let trace = fs::read_to_string(mount.place.path("trace")).unwrap();
                outcome.count_run(&trace);
                let line = trace.lines().find(|line| line.contains("(INJECTED)")).unwrap_or_default();
                let problem_text = |what| format!("{what}: {inject}\n{line}\n{}", mount.err());
                outcome.problems.extend(problems.into_iter().map(problem_text));
            }
        }
    }
    outcome.assert_no_problems("mount, start and end");
}

/// Attaches `strace` to all threads of the controller. Makes calls fail while files are written and purged, and then
/// detaches `strace`. Returns the trace.
fn use_mount_with_failures(mount: &Mount, call: &str, inject: &str) -> String {
    let trace = mount.place.path("trace");
    let _ = fs::remove_file(&trace);
    let mut command = mount.place.command("strace");
    command.args(["-f", "-e", "signal=none", "-o"]).arg(&trace).arg(format!("-etrace=?{call}"));
    command.arg(format!("-einject=?{inject}")).args(["-p", &mount.pid.unwrap().to_string()]);
    command.stderr(Stdio::piped());
    let mut strace = Guard::new(command);
    // The first line says that `strace` is attached. The other lines are read, too, because `strace` would end if it
    // could not write them.
    let mut lines = BufReader::new(strace.child().stderr.take().unwrap()).lines();
    assert!(lines.next().is_some_and(|line| line.unwrap().contains("attached")));
    let rest = std::thread::spawn(move || lines.map_while(Result::ok).count());
    // The calls that fail may be those of the requests.
    mount.use_mount();
    // The worker examines a file some time after its close.
    wait_until("the files were looked at, or the controller does not answer", || {
        let end = mount.command(&["status", "--json", mount.point.to_str().unwrap()]);
        !end.status.success() || end.out.contains("\"files_waiting_for_pages\":0")
    });
    strace.signal("TERM");
    strace.wait(TIMEOUT);
    rest.join().unwrap();
    fs::read_to_string(trace).unwrap_or_default()
}

#[test]
fn failing_calls_while_running_are_survived() {
    if cannot_run() {
        return;
    }
    let mut outcome = Outcome::default();
    let tries: &[usize] = if is_full_sweep() { &[1, 2, 3, 5, 9, 20] } else { &[1] };
    for (call, errors) in RUNNING_CALL_ERRORS {
        // In a sample, each call fails with one error only. Each call gets a new controller.
        let errors = if is_full_sweep() { errors } else { &errors[..1] };
        let mut mount = Mount::new();
        mount.use_mount().iter().for_each(End::assert_success);
        wait_until("the worker has been started", || mount.has_worker());
        let open = mount.descriptors();
        for error in errors {
            let injected = outcome.injected;
            for at in tries {
                let inject = format!("{call}:error={error}:when={at}");
                let trace = use_mount_with_failures(&mount, call, &inject);
                outcome.count_run(&trace);
                outcome.calls += trace.lines().count();
                let mut problems: Vec<_> = mount.problem().into_iter().collect();
                // A scan that is running has folders open, so the number of descriptors may take a while to fall.
                let begun = std::time::Instant::now();
                while mount.descriptors().len() > open.len() && begun.elapsed() < TIMEOUT / 10 {
                    std::thread::sleep(std::time::Duration::from_millis(10));
                }
                if mount.descriptors().len() > open.len() {
                    problems.push(format!("open before: {open:?}\nnow: {:?}", mount.descriptors()));
                }
                let line = trace.lines().find(|line| line.contains("(INJECTED)")).unwrap_or_default();
                let problem_text = |what| format!("{what}: {inject}\n{line}\n{}", mount.err());
                outcome.problems.extend(problems.into_iter().map(problem_text));
                if mount.process.has_ended() {
                    mount = Mount::new();
                    mount.use_mount();
                }
            }
            outcome.pairs += usize::from(outcome.injected > injected);
        }
        if let Some(what) = mount.stop() {
            outcome.problems.push(format!("{what}, after {call}: {}", mount.err()));
        }
    }
    outcome.assert_no_problems("mount, at work");
}
