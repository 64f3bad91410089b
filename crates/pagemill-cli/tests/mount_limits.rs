//! `pagemill mount` and control groups with a memory limit. A group must reduce the mount's size only if its processes
//! write to the mount.

mod common;

use common::group::Group;
use common::ram::{MIB, Ram, pattern, start, unprivileged, wait_until};
use common::{Guard, PAGEMILL, TIMEOUT, TestFolder, finish, is_missing, is_root, may_mount};
use pagemill_sys::open_permission::OpenPermissions;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

const GIB: u64 = 1 << 30;

fn bytes_used_by(group: &Group) -> u64 {
    let read = |name: &str| fs::read_to_string(group.folder.join(name)).ok()?.trim().parse().ok();
    read("memory.usage_in_bytes").or_else(|| read("memory.current")).unwrap_or(0)
}

/// Asserts that at least 95 % of the size that `used` bytes leave of 2 GiB are available.
fn assert_is_available(status: &Value, used_bytes: u64, beside: &str) {
    let [size, used] = ["size_bytes", "used_bytes"].map(|name| status[name].as_u64().unwrap());
    assert!(used >= used_bytes && used < used_bytes + MIB as u64, "{beside}: {status}");
    assert!((size - used) * 100 >= (2 * GIB - used) * 95, "{beside}: {size} in all, {used} used: {status}");
}

/// Runs a script in the group, and waits until the group uses 400 MiB. Until then and for some time after that, the size
/// of the empty mount must be available.
fn fill_memory_of(group: &Group, ram: &Ram, beside: &str, script: &str) -> Guard {
    let mut command = ram.place.command("sh");
    command.args(["-c", script]);
    let guard = Guard::new(group.enter(&command));
    wait_until("the neighbour has filled its memory", || {
        assert_is_available(&ram.status(), 0, beside);
        bytes_used_by(group) >= 400 * MIB as u64
    });
    assert_stays_available(ram, 0, beside);
    guard
}

fn assert_stays_available(ram: &Ram, used_bytes: u64, beside: &str) {
    for _ in 0..20 {
        assert_is_available(&ram.status(), used_bytes, beside);
        thread::sleep(Duration::from_millis(20));
    }
}

/// Creates and removes a file of 1 GiB in the empty mount. During that, at least 95 % of the remaining size must be
/// available.
fn assert_size_is_available(ram: &Ram, beside: &str) {
    let file = ram.at("file");
    for round in 0..5 {
        // The growth makes the controller search for the writer. The search proceeds in small steps.
        let end = finish(fallocate_command(&file, GIB), TIMEOUT);
        assert!(end.status.success(), "{beside}, round {round}: {}", end.err);
        assert_stays_available(ram, GIB, beside);
        fs::remove_file(&file).unwrap();
    }
}

fn fallocate_command(file: &Path, bytes: u64) -> Command {
    let mut command = Command::new("fallocate");
    command.args(["-l", &bytes.to_string()]).arg(file);
    command
}

/// Asserts that the limit of no group with this name counts.
fn assert_is_no_writer(ram: &Ram, name: &str) {
    let status = ram.status();
    let mut lines = status["lines"].as_array().unwrap().iter();
    assert!(lines.all(|line| !line["name"].as_str().unwrap().ends_with(name)), "{status}");
}

/// A tmpfs with room for 480 MiB. Dropping the value unmounts it.
struct PlainTmpfs(PathBuf);

impl PlainTmpfs {
    fn new(place: &TestFolder) -> Self {
        let point = place.path("plain");
        fs::create_dir(&point).unwrap();
        assert!(common::shell(&format!("mount -t tmpfs -o size=480M pagemill-test {}", point.display())).success());
        Self(point)
    }

    /// Returns a script that fills the file system.
    fn fill_script(&self) -> String {
        format!("head -c 420M /dev/zero > {}/file", self.0.display())
    }
}

impl Drop for PlainTmpfs {
    fn drop(&mut self) {
        while !common::shell(&format!("umount {}", self.0.display())).success() {
            thread::sleep(Duration::from_millis(10));
        }
        fs::remove_dir(&self.0).unwrap();
    }
}

/// A limited group must not reduce a mount's size by anonymous memory, by files in a tmpfs of its own, or by files in
/// another mount.
#[test]
fn groups_that_do_not_write_here_do_not_reduce_the_size() {
    let Some(ram) = Ram::new(&["--size", "2G"]) else { return };
    if is_missing("fallocate") {
        return;
    }
    let group = |name: &str| Group::new(&format!("stranger-{name}"), 512 * MIB as u64);
    let check = |group: &Group, beside: &str, script: &str| {
        let _neighbour = fill_memory_of(group, &ram, beside, script);
        assert_size_is_available(&ram, beside);
        assert_is_no_writer(&ram, group.folder.file_name().unwrap().to_str().unwrap());
    };
    {
        let Some(group) = group("anonymous") else { return };
        // `dd` fills its buffer and then waits, because no process reads the pipe.
        check(&group, "anonymous memory", "dd if=/dev/zero bs=420M count=1 2> /dev/null | sleep 100000");
    }
    {
        let Some(group) = group("tmpfs") else { return };
        let plain = PlainTmpfs::new(&ram.place);
        check(&group, "a plain tmpfs", &format!("{}; exec sleep 100000", plain.fill_script()));
    }
    {
        let Some(group) = group("mount") else { return };
        let Some(other) = Ram::new(&["--size", "480M"]) else { return };
        let script = format!("exec 3> {}; head -c 420M /dev/zero >&3; exec sleep 100000", other.at("file").display());
        check(&group, "another mount", &script);
    }
}

/// A limited group has filled a tmpfs of its own, and creates and deletes small files here. It must not reduce the size
/// of the mount, whether the mount is empty or has files of another group.
#[test]
fn a_group_that_deletes_its_files_does_not_reduce_the_size() {
    let Some(ram) = Ram::new(&["--size", "2G"]) else { return };
    if is_missing("fallocate") || is_missing("python3") {
        return;
    }
    let Some(group) = Group::new("light", 512 * MIB as u64) else { return };
    let plain = PlainTmpfs::new(&ram.place);
    // The controller reads events every 5 ms. The pauses let it see the files before they are deleted, and keep the rate
    // of closes below the one above which the kernel reports no closes.
    let churn = "import os, sys, time
for batch in range(100):
    names = ['%s-%d-%d' % (sys.argv[1], batch, at) for at in range(100)]
    for name in names:
        with open(name, 'w') as f: f.write('x')
    time.sleep(0.02)
    for name in names: os.unlink(name)
open(sys.argv[2], 'w').close()";
    let done = ram.place.path("done");
    let script = format!(
        "{}; python3 -c \"{churn}\" {} {}; exec sleep 100000",
        plain.fill_script(),
        ram.at("light").display(),
        done.display()
    );
    let _neighbour = fill_memory_of(&group, &ram, "a light user", &script);
    let status = ram.status();
    wait_until("the files were created and deleted", || {
        assert_is_available(&ram.status(), 0, "a light user");
        done.exists()
    });
    assert!(ram.count("events") >= status["counts"]["events"].as_u64().unwrap() + 6000, "{}", ram.status());
    assert_size_is_available(&ram, "a light user");
}

/// A controller without privileges trusts its own group. A process of the group fills another tmpfs. That must not
/// reduce the size of the empty private mount.
#[test]
fn a_tmpfs_of_the_own_group_does_not_reduce_an_empty_private_mount() {
    if !may_mount() || !is_root() {
        return;
    }
    let place = TestFolder::new();
    let Some(mut command) = unprivileged(&place) else { return };
    let Some(group) = Group::new("shared", 512 * MIB as u64) else { return };
    let (out, stop) = (place.path("cache/out"), place.path("cache/stop"));
    let script = "cd \"$1\"; while [ ! -e \"$3\" ]; do $2 status --json . >> \"$4\"; sleep 0.02; done";
    command.args(["run", "--ram"]).arg(place.path("ram")).args(["--ram-size", "2G", "--", "sh", "-c", script, "sh"]);
    command.arg(place.path("ram")).arg(PAGEMILL).arg(&stop).arg(&out);
    command.stderr(File::create(place.path("err")).unwrap());
    let mut inside = Guard::new(group.enter(&command));
    let statuses = || -> Vec<Value> {
        // The last line may be incomplete.
        let text = fs::read_to_string(&out).unwrap_or_default();
        let lines = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        lines.map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let mut has_ended = false;
    wait_until("its status is known", || {
        has_ended = inside.has_ended();
        has_ended || !statuses().is_empty()
    });
    if has_ended {
        return println!("skipped: {}", fs::read_to_string(place.path("err")).unwrap());
    }
    let plain = PlainTmpfs::new(&place);
    let mut fill = place.command("sh");
    fill.args(["-c", &format!("{}; exec sleep 100000", plain.fill_script())]);
    let _neighbour = Guard::new(group.enter(&fill));
    wait_until("the neighbour has filled its memory", || bytes_used_by(&group) >= 400 * MIB as u64);
    let before = statuses().len();
    wait_until("the status was read often", || statuses().len() >= before + 20);
    fs::write(&stop, "").unwrap();
    assert_eq!(inside.wait(TIMEOUT).code(), Some(0));
    statuses().iter().for_each(|status| assert_is_available(status, 0, "a tmpfs of the own group"));
}

/// The volatile files of a removed group are charged to its parent. They must not be purged for the limit of another
/// group.
#[test]
fn files_of_a_removed_group_are_not_purged_for_another() {
    let Some(ram) = Ram::new(&["--size", "1G"]) else { return };
    let cache = ram.folder("cache", &["--volatile", "full"]);
    let source = ram.place.path("source");
    fs::write(&source, pattern(1, 10 * MIB)).unwrap();
    {
        let Some(removed) = Group::new("removed", GIB) else { return };
        (0..4).for_each(|file| assert!(copy_in_group(&removed, &ram, &source, &cache.join(file.to_string()))));
        ram.wait_for_volatile(4);
    }
    let Some(group) = Group::new("remaining", 256 * MIB as u64) else { return };
    // The controller drops removed groups twice a second.
    thread::sleep(Duration::from_secs(1));
    let mut command = ram.place.command("sh");
    let script = format!(
        "head -c 1M /dev/zero > {}; dd if=/dev/zero bs=220M count=1 2> /dev/null | sleep 100000",
        ram.at("known").display()
    );
    command.args(["-c", &script]);
    let _filler = Guard::new(group.enter(&command));
    wait_until("nothing can be purged for the group", || ram.count("nothing_to_purge") > 0);
    assert_eq!(fs::read_dir(&cache).unwrap().count(), 4, "{}", ram.status());
}

/// A group has closed no file yet. It must reduce the mount's size by the files that it has open or mapped there.
/// Writes must fail with `ENOSPC` before the group's limit is reached, and no process may be killed.
#[test]
fn open_files_identify_the_writing_group() {
    let Some(ram) = Ram::new(&["--size", "2G"]) else { return };
    if is_missing("python3") {
        return;
    }
    let mapped = "import mmap, sys, time
f = open(sys.argv[1], 'wb+'); part = b'x' * (1 << 20)
f.truncate(300 << 20); m = mmap.mmap(f.fileno(), 300 << 20); f.close()
for at in range(300): m[at << 20:(at + 1) << 20] = part
print('full', flush=True); time.sleep(100000)";
    let written = "import sys, time
f = open(sys.argv[1], 'wb', buffering=0); part = b'x' * (1 << 20)
try:
    while True: f.write(part)
except OSError as error: print(error.errno, flush=True)
time.sleep(100000)";
    for (name, script, expected_output) in [("written", written, "28\n"), ("mapped", mapped, "full\n")] {
        let Some(group) = Group::new(&format!("open-{name}"), 512 * MIB as u64) else { return };
        let out = ram.place.path("python");
        let mut command = ram.place.command("sh");
        let script = format!("exec python3 -c \"{script}\" {} > {}", ram.at(name).display(), out.display());
        command.args(["-c", &script]);
        fs::write(&out, "").unwrap();
        let mut writer = Guard::new(group.enter(&command));
        wait_until("it is full", || {
            assert!(!writer.has_ended(), "{name}: it was killed");
            fs::read_to_string(&out).unwrap().ends_with('\n')
        });
        assert_eq!(fs::read_to_string(&out).unwrap(), expected_output, "{name}");
        wait_until("its group bounds the mount", || {
            let status = ram.status();
            let is_there = |line: &serde_json::Value| line["name"].as_str().unwrap().contains(&format!("open-{name}"));
            status["lines"].as_array().unwrap().iter().any(is_there) && status["size_bytes"].as_u64().unwrap() < GIB
        });
        drop(writer);
        fs::remove_file(ram.at(name)).unwrap();
    }
}

/// The controller is stopped while it delays an open, so the writer waits for this open. After the controller is
/// killed, opens must succeed again.
#[test]
fn opens_do_not_wait_for_a_killed_controller() {
    let Some(mut ram) = Ram::new(&["--size", "64M"]) else { return };
    let root = fs::File::open(&ram.point).unwrap();
    let listener = OpenPermissions::new().and_then(|listener| listener.start(root.as_fd()).map(|()| drop(listener)));
    if let Err(error) = listener {
        return println!("skipped: the kernel does not delay opens: {error}");
    }
    drop(root);
    let folder = ram.folder("cache", &["--volatile", "full"]);
    let (is_over, opened) = (AtomicBool::new(false), AtomicU64::new(0));
    let write = || {
        let bytes = vec![1; MIB];
        while !is_over.load(Relaxed) {
            // Nothing is purged here, so a write fails once the file system is full.
            let _ = fs::write(folder.join((opened.load(Relaxed) % 1000).to_string()), &bytes);
            opened.fetch_add(1, Relaxed);
        }
    };
    let controller = Pid::from_raw(ram.controller.id() as i32).unwrap();
    let (stop, go_on) = (|| kill_process(controller, Signal::STOP).unwrap(), || kill_process(controller, Signal::CONT));
    let begun = Instant::now();
    thread::scope(|scope| {
        let _end = OnDrop(|| {
            is_over.store(true, Relaxed);
            let _ = go_on();
        });
        scope.spawn(write);
        loop {
            assert!(begun.elapsed() < TIMEOUT, "no open waits");
            wait_until("an open waits", || ram.count("delayed_opens") > 0);
            stop();
            // On a slow machine, the delay of opens may have ended before the controller was stopped.
            let before = opened.load(Relaxed);
            thread::sleep(Duration::from_millis(300));
            if opened.load(Relaxed) <= before + 1 {
                break;
            }
            go_on().unwrap();
        }
        ram.controller.signal("KILL");
        ram.controller.wait(TIMEOUT);
        let before = opened.load(Relaxed);
        wait_until("the writer continues", || opened.load(Relaxed) > before + 10);
    });
}

/// Kills the worker process whenever the worker is in the group. The group's owner could do so by `cgroup.kill`, and
/// the kernel by its OOM killer.
fn kill_workers(group: &Group, is_over: &AtomicBool, killed: &AtomicU64) {
    while !is_over.load(Relaxed) {
        for pid in fs::read_to_string(group.folder.join("cgroup.procs")).unwrap().lines() {
            let is_worker =
                fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.ends_with(b"\0mount-worker\0"));
            let pid = pid.parse().ok().and_then(Pid::from_raw).filter(|_| is_worker);
            let is_killed = pid.is_some_and(|pid| kill_process(pid, Signal::KILL).is_ok());
            // The killed process remains in the list for a short time.
            while is_killed
                && pid.is_some_and(|pid| fs::read_link(format!("/proc/{}/exe", pid.as_raw_nonzero())).is_ok())
            {
                thread::yield_now();
            }
            killed.fetch_add(u64::from(is_killed), Relaxed);
        }
    }
}

/// The owner of a writer's control group kills each worker process that enters the group. Every byte must be kept,
/// another worker must create huge pages for other groups, and for a minute no worker may enter that group.
#[test]
fn a_group_that_kills_the_worker_is_avoided() {
    let Some(ram) = Ram::new(&["--size", "1G"]) else { return };
    let Some(group) = Group::new("killer", GIB) else { return };
    let begun = Instant::now();
    let source = ram.place.path("source");
    let bytes = pattern(1, 32 * MIB);
    fs::write(&source, &bytes).unwrap();
    let (is_over, killed) = (AtomicBool::new(false), AtomicU64::new(0));
    let avoided = format!("the worker for huge pages ended in {}", group.folder.display());
    let is_avoided = || fs::read_to_string(ram.place.path("err")).unwrap().contains(&avoided);
    let (mut files, mut copies) = (0, 0);
    thread::scope(|scope| {
        scope.spawn(|| kill_workers(&group, &is_over, &killed));
        // Dropping this value ends the other thread, also if this thread panics.
        let _end = OnDrop(|| is_over.store(true, Relaxed));
        // A worker that was killed after it sent its answer does not count as lost, so the loop continues.
        while !is_avoided() {
            assert!(begun.elapsed() < TIMEOUT, "no worker enters the group");
            files = files % 10 + 1;
            copies += 1;
            let mut copy = ram.place.command("cp");
            copy.arg(&source).arg(ram.at(&format!("file-{files}")));
            finish(group.enter(&copy), TIMEOUT).assert_success();
            // If the worker ended its work before it was killed, the loop tries another file.
            wait_until("the file was looked at", || ram.status()["files_waiting_for_pages"] == 0 || is_avoided());
        }
        let huge = ram.count("huge_blocks");
        fs::copy(&source, ram.at("other")).unwrap();
        let has_moved_on = || ram.count("huge_blocks") >= huge + 16 || ram.count("collapse_no_memory") > 0;
        wait_until("another worker has the file of another group", has_moved_on);
        let most = copies + begun.elapsed().as_secs() / 60;
        let (restarts, killed) = (ram.count("worker_restarts"), killed.load(Relaxed));
        assert!(restarts >= 1 && restarts.max(killed) <= most, "{restarts} restarts, {killed} killed");
    });
    let names = (1..=files).map(|file| format!("file-{file}")).chain(["other".to_owned()]);
    names.for_each(|name| assert!(fs::read(ram.at(&name)).unwrap() == bytes, "{name}"));
}

/// Copies `source` to `to` by a process of the group. Returns whether the copy succeeded.
fn copy_in_group(group: &Group, ram: &Ram, source: &Path, to: &Path) -> bool {
    let mut copy = ram.place.command("cp");
    copy.arg(source).arg(to);
    finish(group.enter(&copy), TIMEOUT).status.success()
}

/// Each file is written by a process of its own. The process has ended before the controller can read the process's
/// control group. Volatile files must be purged, and no write may fail.
#[test]
fn files_of_ended_processes_are_purged_for_their_group() {
    let Some(ram) = Ram::new(&["--size", "1G"]) else { return };
    let Some(group) = Group::new("ended", 128 * MIB as u64) else { return };
    let cache = ram.folder("cache", &["--volatile", "full"]);
    let source = ram.place.path("source");
    fs::write(&source, pattern(1, 10 * MIB)).unwrap();
    let failed: Vec<usize> =
        (0..40).filter(|file| !copy_in_group(&group, &ram, &source, &cache.join(file.to_string()))).collect();
    assert!(failed.is_empty(), "{failed:?} failed: {}", ram.status());
    assert!(ram.count("purged_bytes") > 0);
}

/// A process of a control group writes files that a process of another group opened and closes. So the close event
/// names the wrong group. The files must be purged for the group to which their memory is charged.
#[test]
fn files_closed_by_another_group_are_purged_for_the_charged_group() {
    let Some(ram) = Ram::new(&["--size", "1G"]) else { return };
    let Some(group) = Group::new("charged", 128 * MIB as u64) else { return };
    let cache = ram.folder("cache", &["--volatile", "full"]);
    for file in 0..40 {
        let to = fs::File::create(cache.join(file.to_string())).unwrap();
        let mut write = ram.place.command("sh");
        write.args(["-c", "head -c 10M /dev/zero >&3"]);
        let mut command = Command::new("sh");
        let inside = group.enter(&write);
        command.args(["-c", "exec \"$@\" 3>&1 >&2", "sh"]).arg(inside.get_program()).args(inside.get_args());
        let status = command.stdin(std::process::Stdio::null()).stdout(to.try_clone().unwrap()).status().unwrap();
        assert!(status.success(), "file {file}: {}", ram.status());
        drop(command);
        drop(to);
    }
    assert!(ram.count("purged_bytes") > 0);
}

/// The worker process examines files whose writers have ended. Every page must stay charged to the control group of the
/// writers.
#[test]
fn the_worker_moves_no_charge() {
    let Some(ram) = Ram::new(&["--size", "1G"]) else { return };
    let Some(group) = Group::new("worker", GIB) else { return };
    let source = ram.place.path("source");
    fs::write(&source, pattern(1, 16 * MIB)).unwrap();
    let before = bytes_used_by(&group);
    let files = 6;
    for file in 0..files {
        assert!(copy_in_group(&group, &ram, &source, &ram.at(&file.to_string())));
    }
    let has_huge = || ram.count("huge_blocks") > 0 || ram.count("collapse_no_memory") > 0;
    wait_until("the worker examines files", has_huge);
    wait_until("all files were examined", || ram.status()["files_waiting_for_pages"] == 0);
    let charged_bytes = bytes_used_by(&group) - before;
    assert!(charged_bytes >= files * 16 * MIB as u64, "{charged_bytes} bytes of {files} files are charged");
}

/// Volatile files are created without a name and get their only name by a link, which no event reports. The controller
/// must search for these files before the group's limit is reached, and no write may fail. The writer pauses, so that
/// it does not write faster than the controller searches. A file can be purged between its close and the link.
#[test]
fn files_named_by_a_link_are_found_near_a_limit() {
    let Some(ram) = Ram::new(&["--size", "1G"]) else { return };
    let Some(group) = Group::new("links", 256 * MIB as u64) else { return };
    if is_missing("python3") {
        return;
    }
    let cache = ram.folder("cache", &["--volatile", "full"]);
    let script = "import os, sys, time
part = b'x' * (1 << 20); os.chdir(sys.argv[1]); root = os.open('/', os.O_RDONLY); linked = 0
for at in range(300):
    with open('new', 'wb', buffering=0) as f: assert f.write(part) == len(part), at
    try: os.link('new', 'linked-%d' % at); os.unlink('new'); linked += 1
    except FileNotFoundError: pass
    f = os.open('.', os.O_TMPFILE | os.O_RDWR, 0o644)
    assert os.write(f, part) == len(part), at
    os.link('/proc/self/fd/%d' % f, 'unnamed-%d' % at, src_dir_fd=root); os.close(f)
    time.sleep(0.01)
assert linked > 0";
    let mut write = ram.place.command("python3");
    write.args(["-c", script]).arg(&cache);
    let end = finish(group.enter(&write), TIMEOUT);
    assert!(end.status.success(), "{} {}", end.err, ram.status());
    assert!(ram.count("purged_bytes") > 0);
}

/// A control group creates many empty files, whose inodes are charged to the group. Volatile files must be purged
/// before the group's limit is reached. Near the limit, the creation of other files must fail with `ENOSPC`. No process
/// may be killed.
#[test]
fn empty_files_do_not_exhaust_a_group() {
    let Some(ram) = Ram::new(&["--size", "1G"]) else { return };
    if is_missing("python3") {
        return;
    }
    ram.folder("volatile", &["--volatile", "full"]);
    fs::create_dir(ram.at("plain")).unwrap();
    // The pause after a failure gives the controller time for a purge.
    let script = "import errno, os, sys, time
os.chdir(sys.argv[1]); full = 0
for at in range(100000):
    try: os.close(os.open('empty-%d' % at, os.O_CREAT | os.O_WRONLY))
    except OSError as error:
        assert error.errno == errno.ENOSPC
        full += 1
        if full == 500: break
        time.sleep(0.01)
print(at + 1, full)";
    for name in ["volatile", "plain"] {
        let Some(group) = Group::new(&format!("empty-{name}"), 96 * MIB as u64) else { return };
        let mut create = ram.place.command("python3");
        create.args(["-c", script]).arg(ram.at(name));
        let end = finish(group.enter(&create), TIMEOUT);
        let status = ram.status();
        assert!(end.status.success(), "{name}: {} {status}", end.err);
        let numbers: Vec<u64> = end.out.split_whitespace().map(|word| word.parse().unwrap()).collect();
        let (created, full) = (numbers[0] - numbers[1], numbers[1]);
        match name {
            "volatile" => assert!(created >= 95_000 && ram.count("purged_files") > 0, "{numbers:?} {status}"),
            _ => assert!(full == 500 && created >= 10_000, "{numbers:?} {status}"),
        }
        fs::remove_dir_all(ram.at(name)).unwrap();
    }
}

/// The controller is killed, and another controller takes over the mount. From the start, the mount's size must be
/// bounded by the limit of the control group whose files are there.
#[test]
fn a_mount_that_is_taken_over_is_bounded_at_once() {
    let Some(mut ram) = Ram::new(&["--size", "1G"]) else { return };
    let Some(group) = Group::new("taken", 256 * MIB as u64) else { return };
    let source = ram.place.path("source");
    fs::write(&source, pattern(1, 40 * MIB)).unwrap();
    for file in 0..4 {
        assert!(copy_in_group(&group, &ram, &source, &ram.at(&file.to_string())));
    }
    ram.controller.signal("KILL");
    ram.controller.wait(TIMEOUT);
    ram.controller = start(&ram.place, &ram.point, &["--size", "1G"]);
    let status = ram.status();
    assert!(status["size_bytes"].as_u64().unwrap() <= 256 * MIB as u64, "{status}");
    assert!(status["bounded_by"].as_str().unwrap().ends_with("-taken"), "{status}");
}

/// While the controller is stopped, `status` must report that, and `umount` must unmount without waiting for the
/// controller.
#[test]
fn a_stopped_controller_is_reported() {
    let Some(mut ram) = Ram::new(&["--size", "64M"]) else { return };
    let point = ram.point.to_str().unwrap().to_owned();
    ram.controller.signal("STOP");
    let end = ram.command(&["status", &point]);
    let expected = format!("process {}, is stopped; `kill -CONT", ram.controller.id());
    assert!(end.code() == 1 && end.err.contains(&expected), "{}", end.err);
    let end = ram.command(&["umount", &point]);
    assert!(end.code() == 0 && end.err.contains("is unmounted, but its memory stays in use"), "{}", end.err);
    assert!(!ram.is_mounted());
    ram.controller.signal("CONT");
    ram.controller.wait(TIMEOUT);
}

/// Calls a function when this value is dropped.
struct OnDrop<F: Fn()>(F);

impl<F: Fn()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}
