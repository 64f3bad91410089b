//! `pagemill mount` on the real kernel: which files are purged, and how controllers end.

mod common;

use common::group::Group;
use common::ram::{MIB, Ram, pattern, start, unprivileged, wait_until};
use common::{Guard, PAGEMILL, TIMEOUT, TestFolder, finish, is_root, may_mount};
use serde_json::Value;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

const BLOCK: usize = MIB + MIB;

/// A purge must remove whole volatile files, the least recently used first. Other files, and open ones, must stay. The
/// files are too small for the worker, because a purge skips a file that the worker has open.
#[test]
fn the_least_recently_used_files_are_purged_first() {
    let Some(ram) = Ram::new(&["--size", "256M"]) else { return };
    let cache = ram.folder("cache", &["--volatile", "full"]);
    let kept = pattern(0, 3 * MIB);
    fs::write(ram.at("kept"), &kept).unwrap();
    for index in 1..=5 {
        fs::write(cache.join(index.to_string()), pattern(index, MIB)).unwrap();
        thread::sleep(Duration::from_millis(10));
    }
    ram.wait_for_volatile(5);
    let open = File::open(cache.join("1")).unwrap();
    assert_eq!(ram.purge(2), 2 * MIB as u64);
    let names = |folder: &Path| {
        let mut names: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names(&cache), ["1", "4", "5"], "1 is open; 2 and 3 are the least recently used");
    let mut bytes = vec![0; MIB];
    open.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes == pattern(1, MIB));
    assert_eq!(ram.count("spared_open"), 1);
    // A larger request must purge all closed volatile files, and no other file.
    assert_eq!(ram.purge(100), 2 * MIB as u64);
    assert_eq!(names(&cache), ["1"]);
    assert!(fs::read(ram.at("kept")).unwrap() == kept);
}

/// A purge must cut off the end of a partially volatile file, and store the offset in an attribute. The rest must be
/// intact. After a new write and `--refilled`, the file must count as whole.
#[test]
fn partial_files_lose_their_end() {
    let Some(ram) = Ram::new(&["--size", "256M"]) else { return };
    let file = ram.at("partial");
    fs::write(&file, pattern(1, 10 * MIB)).unwrap();
    ram.mark(&file, &["--volatile", "partial"]);
    assert_eq!(ram.purge(4), 4 * MIB as u64);
    assert!(fs::read(&file).unwrap() == pattern(1, 10 * MIB)[..6 * MIB]);
    let end = ram.command(&["mark", "--json", file.to_str().unwrap()]);
    let marks: Value = serde_json::from_str(&end.out).unwrap();
    assert_eq!((&marks["volatile"], &marks["purged_from"]), (&"partial".into(), &(6 * MIB).into()));
    fs::write(&file, pattern(1, 10 * MIB)).unwrap();
    let end = ram.command(&["mark", "--json", "--refilled", file.to_str().unwrap()]);
    assert_eq!(serde_json::from_str::<Value>(&end.out).unwrap()["purged_from"], Value::Null);
}

/// A mark on a folder must apply to all files below it unless a nearer folder has one. Invalid values must be rejected.
#[test]
fn marks_are_inherited_and_checked() {
    let Some(ram) = Ram::new(&["--size", "256M"]) else { return };
    let cache = ram.folder("cache", &["--volatile", "full"]);
    fs::create_dir_all(cache.join("a/b")).unwrap();
    fs::write(cache.join("a/b/goes"), pattern(1, MIB)).unwrap();
    fs::create_dir(cache.join("a/stays")).unwrap();
    ram.mark(&cache.join("a/stays"), &["--volatile", "none"]);
    fs::write(cache.join("a/stays/file"), pattern(2, MIB)).unwrap();
    ram.wait_for_volatile(1);
    assert_eq!(ram.purge(100), MIB as u64);
    assert!(!cache.join("a/b/goes").exists() && cache.join("a/stays/file").exists());
    let end = ram.command(&["mark", cache.join("a").to_str().unwrap()]);
    assert!(end.out.starts_with("volatile full (from above)  huge auto (default)"), "{}", end.out);
    let elsewhere = ram.command(&["mark", "--volatile", "full", ram.place.path("home").to_str().unwrap()]);
    assert!(elsewhere.code() == 1 && elsewhere.err.contains("it is not on a `pagemill mount`"), "{}", elsewhere.err);
    let end = ram.command(&["mark", "--volatile", "often", ram.point.to_str().unwrap()]);
    assert_eq!(end.code(), 2);
    assert!(end.err.contains("`often` is no value of user.pagemill.volatile: none, partial, full"), "{}", end.err);
    // An invalid value that is set without `pagemill mark` must be ignored and reported.
    let odd = ram.at("odd");
    fs::write(&odd, pattern(3, MIB)).unwrap();
    if common::is_missing("setfattr") {
        return;
    }
    assert!(common::shell(&format!("setfattr -n user.pagemill.volatile -v often {}", odd.display())).success());
    File::options().append(true).open(&odd).unwrap().write_all(b"x").unwrap();
    wait_until("the mark was told", || ram.count("bad_marks") > 0);
    assert_eq!(ram.purge(100), 0);
    assert!(odd.exists() && fs::read_to_string(ram.place.path("err")).unwrap().contains("`often` is no value"));
}

/// A user must not be able to mark another user's file, or to affect it by a mark on a folder to which all users may
/// write.
#[test]
fn users_can_mark_only_their_own_files() {
    let Some(ram) = Ram::new(&["--size", "256M"]) else { return };
    if !is_root() || common::is_missing("setfattr") || common::is_missing("su") {
        return;
    }
    for path in [ram.place.path("."), ram.place.path("runtime")] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let open = ram.at("open");
    fs::create_dir_all(open.join("below")).unwrap();
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
    fs::set_permissions(open.join("below"), fs::Permissions::from_mode(0o700)).unwrap();
    fs::write(open.join("below/file"), pattern(1, MIB)).unwrap();
    fs::write(ram.at("file"), pattern(2, MIB)).unwrap();
    let as_other_user = |script: String| {
        let mut command = Command::new("su");
        command.args(["nobody", "-s", "/bin/sh", "-c", &script]).stdin(Stdio::null());
        finish(command, TIMEOUT)
    };
    let set = |path: &Path| as_other_user(format!("setfattr -n user.pagemill.volatile -v full {}", path.display()));
    assert!(!set(&ram.at("file")).status.success() && !set(&ram.point).status.success(), "the kernel refuses that");
    set(&open).assert_success();
    assert_eq!(ram.purge(100), 0);
    assert!(open.join("below/file").exists() && ram.at("file").exists());
}

/// An access control list (format version 2). It lets user 65433 write to a file that the file's group may only read.
const ACL_FOR_ANOTHER_WRITER: &str = "0x02000000\
01000600ffffffff\
0200060099ff0000\
04000400ffffffff\
10000600ffffffff\
20000400ffffffff";

/// A user may write to another user's file, by its group or by an access control list, and can therefore mark the file.
/// The controller must not purge the file for this mark, until only the owner may write. `pagemill mark` must explain
/// both states.
#[test]
fn marks_on_files_writable_by_others_are_ignored() {
    let Some(ram) = Ram::new(&["--size", "256M"]) else { return };
    if !is_root() || common::is_missing("setfattr") || common::is_missing("setpriv") {
        return;
    }
    let (owner, other, group) = (65_432, 65_433, 65_434);
    let as_other = |arguments: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args([&format!("--reuid={other}"), &format!("--regid={other}"), &format!("--groups={group}")]);
        command.args(arguments).stdin(Stdio::null());
        finish(command, TIMEOUT)
    };
    // The group may write to these files, but only their owner may delete them, because the root folder is sticky.
    let (shared, listed) = (ram.at("shared"), ram.at("listed"));
    for (file, mode) in [(&shared, 0o660), (&listed, 0o640)] {
        fs::write(file, pattern(mode as usize, MIB)).unwrap();
        chown(file, Some(owner), Some(group)).unwrap();
        fs::set_permissions(file, fs::Permissions::from_mode(mode)).unwrap();
    }
    let path = |file: &Path| file.to_str().unwrap().to_owned();
    let list = format!("setfattr -n system.posix_acl_access -v {ACL_FOR_ANOTHER_WRITER} {}", path(&listed));
    let has_lists = common::shell(&list).success();
    let files: &[(&PathBuf, usize)] =
        if has_lists { &[(&shared, 0o660), (&listed, 0o640)] } else { &[(&shared, 0o660)] };
    if !has_lists {
        println!("not tried: tmpfs has no access control lists here");
    }
    for (file, seed) in files {
        as_other(&["setfattr", "-n", "user.pagemill.volatile", "-v", "full", &path(file)]).assert_success();
        assert!(!as_other(&["rm", "-f", &path(file)]).status.success(), "the user may not delete the file");
        assert_eq!(ram.purge(100), 0);
        assert!(fs::read(file).unwrap() == pattern(*seed, MIB));
        let shown = ram.command(&["mark", &path(file)]);
        assert!(
            shown.out.starts_with("volatile none") && shown.err.contains("users other than its owner"),
            "{}",
            shown.err
        );
        let refused = ram.command(&["mark", "--volatile", "full", &path(file)]);
        assert!(refused.code() == 1 && refused.err.contains("chmod go-w"), "{}", refused.err);
    }
    for (file, _) in files {
        fs::set_permissions(file, fs::Permissions::from_mode(0o600)).unwrap();
    }
    assert_eq!(ram.purge(100), files.len() as u64 * MIB as u64);
}

/// Writers in a limited group write volatile files without end. Old files must be purged, no process may be killed, and
/// at most one write in a hundred may fail. Other files must be kept.
#[test]
fn writers_survive_their_groups_limit() {
    let Some(ram) = Ram::new(&["--size", "4G"]) else { return };
    let Some(writers) = ram.place.compile("writers.c", &[]) else { return };
    let cache = ram.folder("cache", &["--volatile", "full"]);
    let kept = pattern(7, 40 * MIB);
    for threads in ["1", "4"] {
        let Some(group) = Group::new(&format!("files{threads}"), 512 * MIB as u64) else { return };
        // This file is charged to the group, like the writers' files.
        let source = ram.place.path("source");
        fs::write(&source, &kept).unwrap();
        let mut command = ram.place.command("sh");
        let script = format!(
            "cat {} > {} && exec {} {} {threads} 4 300",
            source.display(),
            ram.at("kept").display(),
            writers.display(),
            cache.display()
        );
        command.args(["-c", &script]);
        let end = finish(group.enter(&command), TIMEOUT);
        assert!(end.status.success(), "{threads} threads: {} {}", end.status, end.err);
        let counts: Vec<u64> = end.out.split_whitespace().map(|word| word.parse().unwrap()).collect();
        // If the machine does not run the controller for a long time, writes may fail. A failed write is not a kill.
        assert!(counts[1] * 100 <= counts[0], "{} of {} files failed", counts[1], counts[0]);
        assert!(fs::read(ram.at("kept")).unwrap() == kept);
        fs::remove_file(ram.at("kept")).unwrap();
        assert!(ram.count("purged_files") > 0);
        ram.purge(4096);
    }
}

/// A write beyond the size of the file system must fail with `ENOSPC`, and existing files must be kept.
#[test]
fn a_full_file_system_returns_enospc() {
    let Some(ram) = Ram::new(&["--size", "64M"]) else { return };
    let kept = pattern(1, 40 * MIB);
    fs::write(ram.at("kept"), &kept).unwrap();
    let error = fs::write(ram.at("more"), pattern(2, 40 * MIB)).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
    assert!(fs::read(ram.at("kept")).unwrap() == kept);
    fs::remove_file(ram.at("more")).unwrap();
    fs::write(ram.at("less"), pattern(3, 10 * MIB)).unwrap();
}

/// A controller is killed. The mount must stay unchanged, and the next controller must take it over with all files.
/// Then the controller is killed twelve times while files are written and purged. Only volatile files may be lost, and
/// no file with a private name may remain.
#[test]
fn a_killed_controller_is_replaced() {
    let Some(mut ram) = Ram::new(&["--size", "128M"]) else { return };
    let cache = ram.folder("cache", &["--volatile", "full"]);
    let partial = ram.folder("partial", &["--volatile", "partial"]);
    let kept = pattern(5, 20 * MIB);
    fs::write(ram.at("kept"), &kept).unwrap();
    // No socket of another mount has this device number, so no other test uses this name.
    let dead = format!("/run/pagemill/mount-0-{}.sock", u32::MAX - std::process::id());
    let dead = Path::new(&dead);
    for round in 0..12 {
        for index in 0..12 {
            let name = format!("{round}-{index}");
            let _ = fs::write(cache.join(&name), pattern(index, 3 * MIB));
            let _ = fs::write(partial.join(&name), pattern(index, MIB));
        }
        thread::sleep(Duration::from_millis(3 * round));
        ram.controller.signal("KILL");
        assert_eq!(ram.controller.wait(TIMEOUT).signal(), Some(9));
        assert!(ram.is_mounted() && fs::read(ram.at("kept")).unwrap() == kept);
        let text = ram.command(&["status", ram.point.to_str().unwrap()]);
        assert!(text.out.starts_with("no controller of"), "{}", text.out);
        ram.controller = start(&ram.place, &ram.point, &["--size", "128M"]);
        assert!(fs::read_to_string(ram.place.path("out")).unwrap().contains("taken over"));
        assert!(!dead.exists(), "a socket without a listener was not removed");
        if dead.parent().unwrap().is_dir() && is_root() {
            drop(std::os::unix::net::UnixListener::bind(dead).unwrap());
        }
    }
    let mut purged = ram.purge(1000);
    while purged > 0 {
        purged = ram.purge(1000);
    }
    for entry in fs::read_dir(&cache).unwrap().chain(fs::read_dir(&partial).unwrap()) {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        assert!(!name.starts_with('.'), "{name} was left");
        assert_eq!(entry.metadata().unwrap().len(), 0, "{name} could have been purged");
    }
    assert!(fs::read(ram.at("kept")).unwrap() == kept);
    let _ = fs::remove_file(dead);
}

/// A controller that takes over a mount must use the recorded size, unless a new size is given.
#[test]
fn a_mount_that_is_taken_over_keeps_its_size() {
    let Some(mut ram) = Ram::new(&["--size", "200M"]) else { return };
    for (options, mib) in [(&[][..], 200), (&["--size", "100M"][..], 100), (&[][..], 100)] {
        ram.controller.signal("KILL");
        ram.controller.wait(TIMEOUT);
        ram.controller = start(&ram.place, &ram.point, options);
        let status = ram.status();
        assert_eq!((&status["asked_bytes"], &status["size_bytes"]), (&(mib * MIB).into(), &(mib * MIB).into()));
    }
}

/// Volatile files are written to a small mount as fast as possible, up to three fifths of its size. None may be purged.
#[test]
fn small_mounts_use_their_size() {
    let Some(ram) = Ram::new(&["--size", "200M"]) else { return };
    let cache = ram.folder("cache", &["--volatile", "full"]);
    for index in 0..120 {
        fs::write(cache.join(index.to_string()), pattern(index, MIB)).unwrap();
    }
    ram.wait_for_volatile(120);
    let status = ram.status();
    let is_near = |line: &Value| line["kind"] != "size" && line["used_bytes"].as_u64() > line["mark_bytes"].as_u64();
    if status["lines"].as_array().unwrap().iter().any(is_near) {
        return println!("skipped: another limit is near: {status}");
    }
    assert_eq!(status["counts"]["purged_files"], 0, "{status}");
}

/// The reported memory of volatile files must be current. It must not include a deleted file, although a deletion
/// causes no event, or zero pages that the worker freed.
#[test]
fn reported_volatile_bytes_are_current() {
    let Some(ram) = Ram::new(&["--size", "256M"]) else { return };
    let cache = ram.folder("cache", &["--volatile", "full"]);
    fs::write(cache.join("a"), pattern(1, MIB)).unwrap();
    fs::write(cache.join("b"), [vec![1; 4096], vec![0; 2 * BLOCK]].concat()).unwrap();
    ram.wait_for_volatile(2);
    fs::remove_file(cache.join("a")).unwrap();
    let held = || fs::metadata(cache.join("b")).unwrap().blocks() * 512;
    wait_until("its zeros were given back", || held() <= 4096);
    let status = ram.status();
    let told = ["volatile_files", "volatile_bytes"].map(|name| status[name].as_u64().unwrap());
    assert_eq!((told, &status["volatile_age_seconds"]), ([1, held()], &0.0.into()));
}

/// A daemon must end when no other process is left in its mount namespace.
#[test]
fn a_daemon_ends_with_its_namespace() {
    if !may_mount() || !is_root() || common::is_missing("unshare") {
        return;
    }
    let place = TestFolder::new();
    let point = place.path("ram");
    fs::create_dir(&point).unwrap();
    let mut command = place.command("unshare");
    let script = format!("{PAGEMILL} mount {} --size 64M --daemon --json && read line", point.display());
    command.args(["-m", "sh", "-c", &script]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut inside = Guard::new(command);
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(inside.child().stdout.take().unwrap()), &mut line)
        .unwrap();
    let mounted: Value = serde_json::from_str(&line).unwrap();
    let daemon = format!("/proc/{}/exe", mounted["controller_pid"].as_u64().unwrap());
    // The sleep is longer than the interval at which the daemon checks for other processes.
    thread::sleep(Duration::from_secs(5));
    assert!(Path::new(&daemon).exists(), "a shell is still in the namespace");
    drop(inside.child().stdin.take());
    wait_until("the daemon has ended", || !Path::new(&daemon).exists());
}

/// If a control group in the options does not exist, the command must report it before it mounts anything.
#[test]
fn a_missing_group_is_reported() {
    let place = TestFolder::new();
    let point = place.path("ram");
    fs::create_dir(&point).unwrap();
    let mut command = place.command(PAGEMILL);
    command.arg("mount").arg(&point).args(["--size", "64M", "--cgroup", "no/such"]);
    let end = finish(command, TIMEOUT);
    assert_eq!(end.code(), 2);
    assert!(end.err.contains("--cgroup no/such: there is no such memory control group"), "{}", end.err);
    assert_eq!(fs::metadata(&point).unwrap().dev(), fs::metadata(place.path("home")).unwrap().dev());
}

/// While a controller runs, a second controller must be refused. An unmount of a busy mount must name the processes
/// that use the mount.
#[test]
fn a_busy_mount_names_its_users() {
    let Some(mut ram) = Ram::new(&["--size", "64M"]) else { return };
    let point = ram.point.to_str().unwrap().to_owned();
    let device = fs::metadata(&point).unwrap().dev();
    let second = ram.command(&["mount", &point]);
    assert_eq!(second.code(), 2);
    assert!(second.err.contains("is mounted by Pagemill already, and its controller runs"), "{}", second.err);
    let mut command = Command::new("sleep");
    command.arg("1000").current_dir(&ram.point);
    let sleeper = Guard::new(command);
    let refused = ram.command(&["umount", &point]);
    assert_eq!(refused.code(), 1);
    let named = format!("process {} (sleep): works in {point}", sleeper.id());
    assert!(refused.err.contains(&named), "{}", refused.err);
    // A signal must end the controller even if the mount is busy. The mount must stay for the processes that use it,
    // and must be available for a new controller.
    ram.controller.signal("TERM");
    assert_eq!(ram.controller.wait(TIMEOUT).code(), Some(1));
    let err = fs::read_to_string(ram.place.path("err")).unwrap();
    assert!(err.contains(&named) && err.contains("takes it over") && ram.is_mounted(), "{err}");
    ram.controller = start(&ram.place, &ram.point, &["--size", "64M"]);
    drop(sleeper);
    ram.command(&["umount", &point]).assert_success();
    assert_eq!(ram.controller.wait(TIMEOUT).code(), Some(0));
    assert!(!ram.is_mounted());
    let (major, minor) = (device >> 8, device & 0xff);
    for folder in [Path::new("/run/pagemill"), &ram.place.path("runtime/pagemill")] {
        for end in ["sock", "log"] {
            let path = folder.join(format!("mount-{major}-{minor}.{end}"));
            assert!(!path.exists(), "{} was left", path.display());
        }
    }
}

/// After a mark is removed, no file may be purged because of that mark.
#[test]
fn a_removed_mark_has_no_effect() {
    let Some(ram) = Ram::new(&["--size", "128M"]) else { return };
    let cache = ram.folder("cache", &["--volatile", "full"]);
    for round in 0..10 {
        let path = cache.join(round.to_string());
        fs::write(&path, pattern(round, MIB)).unwrap();
        ram.wait_for_volatile(1);
        ram.mark(&cache, &["--volatile", "none"]);
        assert_eq!(ram.purge(100), 0);
        assert!(fs::read(&path).unwrap() == pattern(round, MIB));
        ram.mark(&cache, &["--volatile", "full"]);
        assert_eq!(ram.purge(100), MIB as u64);
    }
}

/// A mount point whose name is not valid UTF-8 must work.
#[test]
fn names_that_are_not_utf8_work() {
    use std::os::unix::ffi::OsStrExt;
    if !may_mount() {
        return;
    }
    let place = TestFolder::new();
    let point = place.path("odd").join(std::ffi::OsStr::from_bytes(b"a b\xff\n"));
    fs::create_dir_all(&point).unwrap();
    let mut controller = start(&place, &point, &["--size", "16M"]);
    let mut command = place.command(PAGEMILL);
    command.arg("status").arg(&point);
    finish(command, TIMEOUT).assert_success();
    let mut command = place.command(PAGEMILL);
    command.arg("umount").arg(&point);
    finish(command, TIMEOUT).assert_success();
    assert_eq!(controller.wait(TIMEOUT).code(), Some(0));
}

/// The command that starts a daemon must return once the file system is mounted. The daemon must end when another
/// command unmounts the file system.
#[test]
fn a_daemon_runs_in_the_background() {
    if !may_mount() {
        return;
    }
    let place = TestFolder::new();
    let point = place.path("ram");
    fs::create_dir(&point).unwrap();
    let mut command = place.command(PAGEMILL);
    command.arg("mount").arg(&point).args(["--size", "64M", "--daemon", "--json"]);
    let end = finish(command, TIMEOUT);
    end.assert_success();
    let mounted: Value = serde_json::from_str(&end.out).unwrap();
    let pid = mounted["controller_pid"].as_u64().unwrap();
    let is_running = || Path::new(&format!("/proc/{pid}/exe")).exists();
    assert!(is_running());
    assert!(common::shell(&format!("umount {}", point.display())).success());
    wait_until("the controller has ended", || !is_running());
    // If the mount fails, the command itself must report the reason.
    fs::write(point.join("file"), "x").unwrap();
    let mut command = place.command(PAGEMILL);
    command.arg("mount").arg(&point).arg("--daemon");
    let end = finish(command, TIMEOUT);
    assert_eq!(end.code(), 2);
    assert!(end.err.contains("is not empty: `file` would be hidden"), "{}", end.err);
}

/// While the controller is stopped, more files are closed than the kernel's event queue can hold. The controller must
/// find all files by a scan.
#[test]
fn lost_events_are_replaced_by_a_scan() {
    // Number of events that the kernel's queue can hold; the kernel's default if the number cannot be read.
    let kept =
        fs::read_to_string("/proc/sys/fs/fanotify/max_queued_events").ok().and_then(|text| text.trim().parse().ok());
    let kept: u64 = kept.unwrap_or(16_384);
    if kept > 100_000 {
        return println!("skipped: the kernel queues {kept} events");
    }
    let files = kept + 4_000;
    let Some(ram) = Ram::new(&["--size", "512M"]) else { return };
    let cache = ram.folder("cache", &["--volatile", "full"]);
    common::stop(ram.controller.id());
    for index in 0..files {
        fs::write(cache.join(index.to_string()), b"x").unwrap();
    }
    ram.controller.signal("CONT");
    wait_until("all are known", || ram.status()["volatile_files"] == files);
    assert!(ram.count("events_lost") > 0);
}

/// Many small files are closed in a row, so the controller turns close events off. Afterwards all files must be
/// indexed. No folder may stay open, because an open descriptor would keep a deleted folder.
#[test]
fn many_small_files_are_indexed_in_the_end() {
    const FILES: usize = 60_000;
    let Some(ram) = Ram::new(&["--size", "4G"]) else { return };
    let cache = ram.folder("cache", &["--volatile", "full"]);
    for index in 0..FILES {
        fs::write(cache.join(index.to_string()), b"x").unwrap();
    }
    fs::write(cache.join("large"), pattern(1, BLOCK)).unwrap();
    ram.wait_for_volatile(FILES as u64 + 1);
    let (quiet_times, events) = (ram.count("quiet_times"), ram.count("events"));
    if quiet_times == 0 {
        println!("files were made too slowly here to be too many");
    } else {
        assert!(events < FILES as u64, "{events} events, {quiet_times} quiet times");
    }
    // Close events must be on again.
    wait_until("a single file is told of", || {
        fs::write(ram.at("single"), b"x").unwrap();
        ram.count("events") > events
    });
    let open = || {
        let links = fs::read_dir(format!("/proc/{}/fd", ram.controller.id())).unwrap().map(|link| link.unwrap().path());
        links.filter_map(|link| fs::read_link(link).ok()).any(|target| target.ends_with("cache"))
    };
    wait_until("no folder is open", || !open());
    assert!(ram.purge(4096) >= BLOCK as u64);
    assert_eq!(fs::read_dir(&cache).unwrap().count(), 0);
}

/// Handles of deleted folders must become stale at once, also while the controller scans, reads events and works on
/// files. The controller may have a folder open for a moment, so the test waits. Afterwards the controller must have no
/// folder open.
#[test]
fn deleted_folders_become_stale() {
    let Some(mut ram) = Ram::new(&["--size", "256M"]) else { return };
    if !is_root() || common::is_missing("python3") {
        return;
    }
    for index in 0..1000 {
        fs::write(ram.at(&index.to_string()), b"x").unwrap();
    }
    let script = "import ctypes, errno, os, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
root = os.open(sys.argv[1], os.O_RDONLY); end = time.monotonic() + 600
for at in range(1000):
    os.mkdir('folder', dir_fd=root)
    for name in range(at % 3): os.close(os.open('folder/%d' % name, os.O_CREAT | os.O_WRONLY, dir_fd=root))
    handle = ctypes.create_string_buffer(struct.pack('Ii', 128, 0) + bytes(128)); mount = ctypes.c_int()
    assert libc.name_to_handle_at(root, b'folder', handle, ctypes.byref(mount), 0) == 0, os.strerror(ctypes.get_errno())
    for name in range(at % 3): os.unlink('folder/%d' % name, dir_fd=root)
    os.rmdir('folder', dir_fd=root)
    while True:
        fd = libc.open_by_handle_at(root, handle, os.O_RDONLY)
        if fd < 0: break
        os.close(fd); assert time.monotonic() < end, at; time.sleep(0.001)
    assert ctypes.get_errno() == errno.ESTALE, os.strerror(ctypes.get_errno())";
    let mut command = Command::new("python3");
    command.args(["-c", script]).arg(&ram.point).stdin(Stdio::null());
    let mut folders = Guard::new(command);
    while !folders.has_ended() {
        // Each of these purges finds no file and waits for a scan.
        assert_eq!(ram.purge(1), 0);
    }
    assert!(folders.wait(TIMEOUT).success());
    let open = || {
        let links = fs::read_dir(format!("/proc/{}/fd", ram.controller.id())).unwrap().map(|link| link.unwrap().path());
        let names = links.filter_map(|link| fs::read_link(link).ok()).map(|target| target.into_os_string());
        names.filter_map(|name| name.into_string().ok()).any(|name| name.contains("folder"))
    };
    wait_until("no folder is open", || !open());
    assert!(!ram.controller.has_ended());
}

/// Files that are renamed after they were written, and files in renamed folders, must be found under their last names.
#[test]
fn renamed_files_are_found() {
    let Some(ram) = Ram::new(&["--size", "128M"]) else { return };
    let cache = ram.folder("cache", &["--volatile", "full"]);
    fs::create_dir(cache.join("new")).unwrap();
    for index in 0..4 {
        let temporary = cache.join(format!("{index}.tmp"));
        fs::write(&temporary, pattern(index, MIB)).unwrap();
        fs::rename(temporary, cache.join(format!("new/{index}"))).unwrap();
    }
    ram.wait_for_volatile(4);
    fs::rename(cache.join("new"), cache.join("old")).unwrap();
    let mut purged = 0;
    wait_until("they are found where they are", || {
        purged += ram.purge(2);
        purged > 0
    });
    assert_eq!(fs::read_dir(cache.join("old")).unwrap().count(), 4 - purged as usize / MIB);
}

/// A race between threads. It lasts three seconds, or longer if the expected event has not been seen by then.
struct Race(Instant);

impl Race {
    fn begin() -> Self {
        Self(Instant::now())
    }

    fn is_over(&self, was_seen: bool) -> bool {
        self.0.elapsed() > if was_seen { Duration::from_secs(3) } else { TIMEOUT }
    }
}

/// Threads that open files during purges must get whole files or none, and the controller must continue to run.
#[test]
fn readers_get_whole_files_or_none() {
    let Some(mut ram) = Ram::new(&["--size", "128M"]) else { return };
    let cache = ram.folder("cache", &["--volatile", "full"]);
    let (cache, has_read, has_purged, race) = (&cache, AtomicBool::new(false), AtomicBool::new(false), Race::begin());
    let is_over = || race.is_over(has_read.load(Relaxed) && has_purged.load(Relaxed));
    thread::scope(|scope| {
        scope.spawn(|| {
            for index in 0.. {
                if is_over() {
                    return;
                }
                let _ = fs::write(cache.join(format!("new{}", index % 8)), pattern(index % 8, MIB / 4));
                let _ = fs::rename(cache.join(format!("new{}", index % 8)), cache.join((index % 8).to_string()));
            }
        });
        scope.spawn(|| {
            for index in (0..8).cycle() {
                if is_over() {
                    return;
                }
                if let Ok(bytes) = fs::read(cache.join(index.to_string())) {
                    assert!(bytes == pattern(index, MIB / 4), "{index}: {} bytes", bytes.len());
                    has_read.store(true, Relaxed);
                }
            }
        });
        scope.spawn(|| {
            while !is_over() {
                ram.purge(1);
                has_purged.store(ram.count("purged_files") > 0, Relaxed);
            }
        });
    });
    assert!(has_read.into_inner() && ram.count("purged_files") > 0);
    assert!(!ram.controller.has_ended());
}

/// A marked folder is often replaced by a link to an unmarked folder during purges. Only volatile files may be purged.
#[test]
fn moved_folders_do_not_mislead_a_purge() {
    let Some(ram) = Ram::new(&["--size", "256M"]) else { return };
    let cache = ram.folder("cache", &["--volatile", "full"]);
    let kept = ram.at("kept");
    for folder in [cache.join("a"), kept.join("a")] {
        fs::create_dir_all(&folder).unwrap();
    }
    let precious = pattern(9, MIB);
    let (cache, kept, has_purged, race) = (&cache, &kept, AtomicBool::new(false), Race::begin());
    let is_over = || race.is_over(has_purged.load(Relaxed));
    thread::scope(|scope| {
        // Both folders contain the same names. This thread continuously replaces the marked folder by a link and
        // restores it.
        scope.spawn(|| {
            for index in 0.. {
                // The loop ends only after each name was written at least once.
                if index >= 8 && is_over() {
                    return;
                }
                let name = format!("a/{}", index % 8);
                let _ = fs::write(cache.join(&name), pattern(index, MIB));
                fs::write(kept.join(&name), pattern(9, MIB)).unwrap();
            }
        });
        scope.spawn(|| {
            while !is_over() {
                let _ = fs::rename(cache.join("a"), cache.join("b"));
                let _ = symlink(kept.join("a"), cache.join("a"));
                thread::sleep(Duration::from_millis(1));
                let _ = fs::remove_file(cache.join("a"));
                let _ = fs::rename(cache.join("b"), cache.join("a"));
                thread::sleep(Duration::from_millis(1));
            }
        });
        // Purges run at the same time. A volatile file that is replaced by another volatile file may be purged.
        scope.spawn(|| {
            while !is_over() {
                ram.purge(4);
                has_purged.store(ram.count("purged_files") > 0, Relaxed);
            }
        });
    });
    assert!(ram.count("purged_files") > 0, "nothing was purged, so the test shows nothing");
    for index in 0..8 {
        let path = kept.join(format!("a/{index}"));
        assert!(!path.exists() || fs::read(&path).unwrap() == precious, "{index}");
    }
    assert_eq!(fs::read_dir(kept.join("a")).unwrap().count(), 8);
}

/// `run --ram` must need no privileges. Only the program and its children may see the file system. It must be gone when
/// they have ended.
#[test]
fn a_private_mount_needs_no_privileges() {
    let place = TestFolder::new();
    let ram = place.path("ram");
    let script = "set -e; cd \"$1\"; mkdir cache; $2 mark --volatile full cache; head -c 8M /dev/urandom > cache/old
        head -c 4M /dev/urandom > kept; cp kept \"$3\"; $2 purge --json . 1M; $2 status .; ls cache; cmp kept \"$3\"";
    let arguments = |command: &mut Command, copy: &Path| {
        command.args(["run", "--ram"]).arg(&ram).args(["--ram-size", "256M", "--", "sh", "-c", script, "sh"]);
        command.arg(&ram).arg(PAGEMILL).arg(copy);
    };
    let mut command = unprivileged(&place).unwrap_or_else(|| place.command(PAGEMILL));
    arguments(&mut command, &place.path("copy"));
    let end = finish(command, TIMEOUT);
    if end.code() == 2 && end.err.contains("no mount namespace") {
        return println!("skipped: {}", end.err);
    }
    if end.err.contains("Permission denied") && end.code() >= 126 {
        return println!("skipped: other users cannot reach the command");
    }
    end.assert_success();
    assert!(end.out.contains("\"purged_bytes\":8388608") && !end.out.contains("\nold"), "{}", end.out);
    assert!(!ram.exists(), "`run` created the folder");
}

/// The controller of a private mount runs in threads of `run`. These threads must block the signals that `run`
/// forwards, so that only the command's own thread receives them.
#[test]
fn threads_of_a_private_mount_block_forwarded_signals() {
    let place = TestFolder::new();
    let mut command = place.command(PAGEMILL);
    command.args(["run", "--ram"]).arg(place.path("ram")).args(["--", "sh", "-c", "echo ready; read line; exit 5"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut guard = Guard::new(command);
    let mut ready = [0; 6];
    if guard.child().stdout.take().unwrap().read_exact(&mut ready).is_err() {
        return println!("skipped: no private mount can be made");
    }
    let tasks = fs::read_dir(format!("/proc/{}/task", guard.id())).unwrap().map(|task| task.unwrap());
    let others: Vec<_> = tasks.filter(|task| *task.file_name() != *guard.id().to_string()).collect();
    assert!(!others.is_empty());
    for task in others {
        let status = fs::read_to_string(task.path().join("status")).unwrap();
        let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap().trim();
        let blocked = u64::from_str_radix(blocked, 16).unwrap();
        for signal in [libc::SIGTERM, libc::SIGHUP, libc::SIGINT] {
            assert!(blocked >> (signal - 1) & 1 == 1, "{signal}: {status}");
        }
    }
    drop(guard.child().stdin.take());
    assert_eq!(guard.wait(TIMEOUT).code(), Some(5));
}
