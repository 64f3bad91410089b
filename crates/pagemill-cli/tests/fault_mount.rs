//! The n-th kernel call of `pagemill mount` fails, with each error that it can have: the controller ends by no signal, every
//! byte that was written is read back, and no mount, process or descriptor is left. An error that ends it says what failed.
//!
//! One test sweeps the calls of the first thread, from its first `geteuid` on: the mount, the start, and the end. The other
//! attaches to a running controller and makes the n-th call of each of its threads, and of its worker, fail while files are
//! written and purged. `fault_run.rs` sweeps `pagemill run`.
//!
//! By default a sample of the calls is tried, some 20 s a test; `FAULT_SWEEP=full cargo test -p pagemill-cli --test
//! fault_mount` tries them one by one, some ten minutes.

mod common;

use common::ram::{MIB, pattern, start, wait_until};
use common::sweep::{Outcome, cannot_inject, counts, is_full, sample};
use common::{End, Guard, PAGEMILL, Place, STUCK_AFTER, finish, may_mount};
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::Stdio;

/// Calls of the start and the end, and the errors that are tried with each.
const CALLS: &[(&str, &[&str])] = &[
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

/// Calls of a running controller.
const CALLS_AT_WORK: &[(&str, &[&str])] = &[
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

/// A controller, by itself or under strace, and its mount.
struct Mount {
    place: Place,
    point: PathBuf,
    process: Guard,
    pid: Option<u32>,
}

impl Mount {
    fn new() -> Self {
        let (place, point) = place();
        let process = start(&place, &point, &["--size", "64M"]);
        let pid = Some(process.id());
        Self { place, point, process, pid }
    }

    /// Starts it under strace; `pid` is `None` if that fails.
    fn traced(calls: &str, inject: Option<&str>) -> Self {
        let (place, point) = place();
        let mut command = place.command("strace");
        command.args(["-qq", "-e", "signal=none", "-o"]).arg(place.path("trace"));
        command.arg(format!("-etrace={calls},geteuid")).args(inject.map(|inject| format!("-einject={inject}")));
        command.args([PAGEMILL, "mount", "--size", "64M"]).arg(&point);
        let [out, err] = ["out", "err"].map(|name| place.path(name));
        command.stdout(File::create(&out).unwrap()).stderr(File::create(err).unwrap());
        let mut process = Guard::new(command);
        let said = || fs::read_to_string(&out).unwrap();
        wait_until("it is mounted or has ended", || said().contains('\n') || process.has_ended());
        let words = said();
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
        finish(command, STUCK_AFTER)
    }

    /// Writes a file that stays and one that is volatile, looks at the status, purges.
    fn work(&self) -> [End; 2] {
        fs::write(self.point.join("kept"), pattern(3, 3 * MIB)).unwrap();
        let (new, volatile) = (self.point.join("new"), self.point.join("volatile"));
        fs::write(&new, pattern(4, MIB)).unwrap();
        let marked = self.command(&["mark", "--volatile", "full", new.to_str().unwrap()]);
        marked.assert_success();
        fs::rename(&new, &volatile).unwrap();
        let point = self.point.to_str().unwrap();
        [self.command(&["status", point]), self.command(&["purge", point, "1M"])]
    }

    /// Returns what is wrong with the files and the answers of a controller whose calls succeed.
    fn problem(&self) -> Option<String> {
        if fs::read(self.point.join("kept")).ok() != Some(pattern(3, 3 * MIB)) {
            return Some("bytes are lost".into());
        }
        let [status, purge] = self.work();
        for end in [status, purge] {
            if !end.status.success() {
                return Some(format!("it does not answer: {}", end.err));
            }
        }
        // The purge before this one may have had the file already.
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

    /// Returns whether the worker runs: a descriptor of the controller is its socket.
    fn has_worker(&self) -> bool {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid.unwrap())).into_iter().flatten().flatten();
        tasks.flat_map(|task| fs::read_to_string(task.path().join("children"))).any(|pids| !pids.trim().is_empty())
    }

    /// Ends the controller; returns what is wrong then.
    fn stop(&mut self) -> Option<String> {
        if let Some(pid) = self.pid {
            assert!(
                common::shell(&format!("kill -s TERM {pid} 2> /dev/null || ! kill -s 0 {pid} 2> /dev/null")).success()
            );
        }
        let status = self.process.wait(STUCK_AFTER);
        let err = self.err();
        if status.signal().is_some() || err.contains("panicked") {
            return Some("it ends by a signal or a panic".into());
        }
        match (status.code(), self.is_mounted()) {
            (Some(0), false) if self.pid.is_some() => None,
            // It says that it could not unmount.
            (Some(1), true) if err.contains("stays mounted without a controller") => None,
            (Some(2), false) => {
                let text = err.lines().next().and_then(|line| line.strip_prefix("pagemill: "));
                // More than the kernel's own words.
                let is_told = text.is_some_and(|text| text.contains(": ") && text.len() > 30);
                (!is_told).then(|| "the error does not say what failed".into())
            }
            (code, is_mounted) => Some(format!("status {code:?}, mounted: {is_mounted}")),
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if !self.process.has_ended() {
            self.process.signal("KILL");
            self.process.wait(STUCK_AFTER);
        }
        while self.is_mounted() && common::shell(&format!("umount -l {}", self.point.display())).success() {}
    }
}

fn place() -> (Place, PathBuf) {
    let place = Place::new();
    let point = place.path("ram");
    fs::create_dir(&point).unwrap();
    (place, point)
}

fn is_impossible() -> bool {
    !may_mount() || cannot_inject()
}

#[test]
fn start_and_end() {
    if is_impossible() {
        return;
    }
    let mut outcome = Outcome::default();
    // `?`: not every processor has all of them.
    let all: Vec<_> = CALLS.iter().map(|(call, _)| format!("?{call}")).collect();
    let mut clean = Mount::traced(&all.join(","), None);
    clean.work().iter().for_each(End::assert_success);
    assert_eq!(clean.stop(), None);
    let counts = counts(&fs::read_to_string(clean.place.path("trace")).unwrap(), "geteuid");
    for (call, errors) in CALLS {
        let Some((before, after)) = counts.get(*call).filter(|(_, after)| *after > 0) else { continue };
        outcome.calls += after;
        for error in *errors {
            outcome.pairs += 1;
            for at in sample(*after, outcome.pairs) {
                let inject = format!("{call}:error={error}:when={}", before + at);
                let mut mount = Mount::traced(call, Some(&inject));
                let mut problems = Vec::new();
                if mount.pid.is_some() {
                    mount.work();
                    problems.extend(mount.problem());
                }
                problems.extend(mount.stop());
                let trace = fs::read_to_string(mount.place.path("trace")).unwrap();
                outcome.count(&trace);
                let line = trace.lines().find(|line| line.contains("(INJECTED)")).unwrap_or_default();
                let told = |what| format!("{what}: {inject}\n{line}\n{}", mount.err());
                outcome.problems.extend(problems.into_iter().map(told));
            }
        }
    }
    outcome.end("mount, start and end");
}

/// Attaches strace to all threads of the controller, works, and detaches. Returns the trace.
fn work_with_failures(mount: &Mount, call: &str, inject: &str) -> String {
    let trace = mount.place.path("trace");
    let _ = fs::remove_file(&trace);
    let mut command = mount.place.command("strace");
    command.args(["-f", "-e", "signal=none", "-o"]).arg(&trace).arg(format!("-etrace=?{call}"));
    command.arg(format!("-einject=?{inject}")).args(["-p", &mount.pid.unwrap().to_string()]);
    command.stderr(Stdio::piped());
    let mut strace = Guard::new(command);
    // It says that it is attached; later lines would end it if they could not be written.
    let mut lines = BufReader::new(strace.child().stderr.take().unwrap()).lines();
    assert!(lines.next().is_some_and(|line| line.unwrap().contains("attached")));
    let rest = std::thread::spawn(move || lines.map_while(Result::ok).count());
    // A request may be what fails.
    mount.work();
    // The worker looks at a file some time after the close.
    wait_until("the files were looked at, or the controller does not answer", || {
        let end = mount.command(&["status", "--json", mount.point.to_str().unwrap()]);
        !end.status.success() || end.out.contains("\"files_waiting_for_pages\":0")
    });
    strace.signal("TERM");
    strace.wait(STUCK_AFTER);
    rest.join().unwrap();
    fs::read_to_string(trace).unwrap_or_default()
}

#[test]
fn at_work() {
    if is_impossible() {
        return;
    }
    let mut outcome = Outcome::default();
    let tries: &[usize] = if is_full() { &[1, 2, 3, 5, 9, 20] } else { &[1] };
    for (call, errors) in CALLS_AT_WORK {
        // One error of each in a sample; a fresh controller for each call.
        let errors = if is_full() { errors } else { &errors[..1] };
        let mut mount = Mount::new();
        mount.work().iter().for_each(End::assert_success);
        wait_until("the worker has been started", || mount.has_worker());
        let open = mount.descriptors();
        for error in errors {
            let injected = outcome.injected;
            for at in tries {
                let inject = format!("{call}:error={error}:when={at}");
                let trace = work_with_failures(&mount, call, &inject);
                outcome.count(&trace);
                outcome.calls += trace.lines().count();
                let mut problems: Vec<_> = mount.problem().into_iter().collect();
                // A scan may run: it has folders open.
                let begun = std::time::Instant::now();
                while mount.descriptors().len() > open.len() && begun.elapsed() < STUCK_AFTER / 10 {
                    std::thread::sleep(std::time::Duration::from_millis(10));
                }
                if mount.descriptors().len() > open.len() {
                    problems.push(format!("open before: {open:?}\nnow: {:?}", mount.descriptors()));
                }
                let line = trace.lines().find(|line| line.contains("(INJECTED)")).unwrap_or_default();
                let told = |what| format!("{what}: {inject}\n{line}\n{}", mount.err());
                outcome.problems.extend(problems.into_iter().map(told));
                if mount.process.has_ended() {
                    mount = Mount::new();
                    mount.work();
                }
            }
            outcome.pairs += usize::from(outcome.injected > injected);
        }
        if let Some(what) = mount.stop() {
            outcome.problems.push(format!("{what}, after {call}: {}", mount.err()));
        }
    }
    outcome.end("mount, at work");
}
