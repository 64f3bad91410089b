//! `pagemill mount --fuse` on the real kernel: operations of files, permissions, limits, and ends of the process.

mod common;

use common::fuse::{Fuse, is_mounted, may_use_fuse, start};
use common::ram::{MIB, pattern, wait_until};
use common::{End, PAGEMILL, TIMEOUT, TestFolder, finish, is_missing, is_root, shell};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc;
use std::thread;

/// Runs a command as the user 65534 with the given supplementary groups.
fn as_other_user(groups: &str, script: &str) -> End {
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", groups, "sh", "-c", script]).stdin(Stdio::null());
    finish(command, TIMEOUT)
}

/// Calls `act` in a thread. Panics if it does not end.
fn ends<T: Send + 'static>(what: &str, act: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, receive) = mpsc::channel();
    thread::spawn(move || send.send(act()));
    receive.recv_timeout(TIMEOUT).unwrap_or_else(|_| panic!("hangs: {what}"))
}

fn python(script: &str) -> Option<End> {
    if is_missing("python3") {
        return None;
    }
    let mut command = Command::new("python3");
    command.args(["-c", script]).stdin(Stdio::null());
    Some(finish(command, TIMEOUT))
}

/// Files of several lengths must keep their bytes, also after a rename, through a further name, and after removal while
/// open. Attributes must agree after each step, although the kernel caches them.
#[test]
fn files_names_and_links() {
    let Some(fuse) = Fuse::new(&["--size", "64M"]) else { return };
    for len in [0, 1, 4095, 4096, 4097, MIB + 1, 5 * MIB] {
        let path = fuse.at(&format!("len{len}"));
        fs::write(&path, pattern(len, len)).unwrap();
        assert!(fs::read(&path).unwrap() == pattern(len, len));
        assert_eq!(fs::metadata(&path).unwrap().len(), len as u64);
    }
    let (a, b) = (fuse.at("a"), fuse.at("b"));
    fs::write(&a, "one").unwrap();
    fs::hard_link(&a, &b).unwrap();
    assert_eq!((fs::metadata(&a).unwrap().nlink(), fs::metadata(&b).unwrap().nlink()), (2, 2));
    fs::write(&b, "three").unwrap();
    assert_eq!(fs::read_to_string(&a).unwrap(), "three");
    fs::create_dir(fuse.at("dir")).unwrap();
    fs::rename(&a, fuse.at("dir/a")).unwrap();
    assert!(!a.exists() && fs::read_to_string(fuse.at("dir/a")).unwrap() == "three");
    symlink("dir/a", fuse.at("link")).unwrap();
    assert_eq!(fs::read_to_string(fuse.at("link")).unwrap(), "three");
    assert_eq!(fs::rename(fuse.at("dir"), fuse.at("dir/below")).unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(fs::remove_dir(fuse.at("dir")).unwrap_err().kind(), ErrorKind::DirectoryNotEmpty);
    let mut open = File::options().read(true).write(true).open(&b).unwrap();
    fs::remove_file(&b).unwrap();
    fs::remove_file(fuse.at("dir/a")).unwrap();
    open.write_all(b"later").unwrap();
    open.seek(SeekFrom::Start(0)).unwrap();
    let mut text = String::new();
    open.read_to_string(&mut text).unwrap();
    assert_eq!((text.as_str(), open.metadata().unwrap().nlink()), ("later", 0));
    assert_eq!(fs::metadata(fuse.at("dir")).unwrap().nlink(), 2);
    let (longest, too_long) = ("n".repeat(255), "n".repeat(256));
    fs::write(fuse.at(&longest), "").unwrap();
    assert_eq!(fs::write(fuse.at(&too_long), "").unwrap_err().raw_os_error(), Some(libc::ENAMETOOLONG));
    let mut list = Command::new("ls");
    let listed = finish(
        {
            list.arg("-a").arg(fuse.at("dir"));
            list
        },
        TIMEOUT,
    );
    assert_eq!(listed.out, ".\n..\n", "the C library skips entries without an inode number");
}

/// The three forms of a rename, holes, allocation, and extended attributes, through Python's system calls.
#[test]
fn renames_holes_and_attributes() {
    let Some(fuse) = Fuse::new(&["--size", "64M"]) else { return };
    let script = format!(
        r#"
import ctypes, errno, os
os.chdir("{}")
libc = ctypes.CDLL(None, use_errno=True)
def rename(a, b, flags):
    return 0 if libc.renameat2(-100, a.encode(), -100, b.encode(), flags) == 0 else ctypes.get_errno()
for name in "ab":
    open(name, "w").write(name)
assert rename("a", "b", 1) == errno.EEXIST
assert rename("a", "b", 2) == 0 and open("a").read() == "b" and open("b").read() == "a"
assert rename("a", "c", 2) == errno.ENOENT and rename("a", "c", 1) == 0 and not os.path.exists("a")
assert rename("b", "c", 4) == errno.EINVAL

fd = os.open("sparse", os.O_RDWR | os.O_CREAT)
os.pwrite(fd, b"x" * 4096, 1 << 20)
assert os.lseek(fd, 0, os.SEEK_DATA) == 1 << 20 and os.lseek(fd, 1 << 20, os.SEEK_HOLE) == (1 << 20) + 4096
assert os.fstat(fd).st_blocks * 512 < 1 << 20
os.posix_fallocate(fd, 0, 8192)
assert os.lseek(fd, 0, os.SEEK_DATA) == 0
assert libc.fallocate(fd, 3, ctypes.c_long(1 << 20), ctypes.c_long(4096)) == 0
assert os.pread(fd, 4096, 1 << 20) == bytes(4096) and os.fstat(fd).st_size == (1 << 20) + 4096

os.setxattr("b", "user.color", b"red")
assert os.listxattr("b") == ["user.color"] and os.getxattr("b", "user.color") == b"red"
for call, code in [
    (lambda: os.setxattr("b", "user.color", b"", os.XATTR_CREATE), errno.EEXIST),
    (lambda: os.setxattr("b", "user.other", b"", os.XATTR_REPLACE), errno.ENODATA),
    (lambda: os.setxattr("b", "user.large", bytes(65537)), errno.E2BIG),
    (lambda: os.getxattr("b", "user.other"), errno.ENODATA),
]:
    try:
        call()
        raise SystemExit(f"no error {{code}}")
    except OSError as error:
        assert error.errno == code, error
os.removexattr("b", "user.color")
assert os.listxattr("b") == []
os.utime("b", ns=(-1_250_000_000, -2_000_000_000))
stat = os.stat("b")
assert (stat.st_atime_ns, stat.st_mtime_ns) == (-1_250_000_000, -2_000_000_000), stat
"#,
        fuse.point.display()
    );
    let Some(end) = python(&script) else { return };
    end.assert_success();
}

/// Bytes that are written through a shared mapping must be in the file, also for a reader without a mapping, and writes
/// must appear in the mapping. A mapping must keep a removed file.
#[test]
fn mappings_and_files_agree() {
    let Some(fuse) = Fuse::new(&["--size", "64M"]) else { return };
    let path = fuse.at("mapped");
    fs::write(&path, pattern(1, 4 * MIB)).unwrap();
    let script = format!(
        r#"
import mmap, os
path = "{}"
fd = os.open(path, os.O_RDWR)
view = mmap.mmap(fd, 0)
before = bytes(view)
view[5000:5005] = b"first"
assert os.pread(fd, 5, 5000) == b"first"
os.pwrite(fd, b"second", 3 << 20)
assert view[3 << 20 : (3 << 20) + 6] == b"second"
view.flush()
assert open(path, "rb").read()[5000:5005] == b"first"
os.remove(path)
assert view[:5000] == before[:5000]
view[0:1] = b"z"
assert os.pread(fd, 1, 0) == b"z"
"#,
        path.display()
    );
    let Some(end) = python(&script) else { return };
    end.assert_success();
}

/// Another user must be refused what the permission bits forbid, and get what a supplementary group permits. A write by
/// this user must clear the set-user-ID bit, and the kernel must not show the old bits from its cache.
#[test]
fn permissions_of_another_user() {
    let Some(fuse) = Fuse::new(&["--size", "64M"]) else { return };
    if !is_root() || is_missing("setpriv") {
        return;
    }
    let point = fuse.point.display();
    fs::set_permissions(fuse.place.path("."), fs::Permissions::from_mode(0o755)).unwrap();
    let refused = |groups: &str, script: &str| {
        let end = as_other_user(groups, script);
        assert!(!end.status.success(), "{script}");
        assert!(end.err.contains("ermi") || end.err.contains("ermitted"), "{script}: {}", end.err);
    };
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    let none = "--clear-groups";
    let file = fuse.at("file");
    fs::write(&file, "root's").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
    refused(none, &format!("cat {point}/file"));
    refused(none, &format!("rm -f {point}/file")); // the root directory is sticky
    refused(none, &format!("chmod 666 {point}/file"));
    chown(&file, None, Some(4242)).unwrap();
    as_other_user("--groups=4242", &format!("cat {point}/file")).assert_success();
    refused("--groups=4242", &format!("echo x >> {point}/file"));
    // A directory that the kernel has in its cache must be as closed as before.
    fs::create_dir_all(fuse.at("closed/below")).unwrap();
    fs::write(fuse.at("closed/below/file"), "").unwrap();
    fs::set_permissions(fuse.at("closed"), fs::Permissions::from_mode(0o700)).unwrap();
    refused(none, &format!("cat {point}/closed/below/file"));
    // New files belong to the user, less the umask.
    as_other_user(none, &format!("umask 027; echo mine > {point}/mine; mkdir {point}/own")).assert_success();
    let mine = fs::metadata(fuse.at("mine")).unwrap();
    assert_eq!((mine.uid(), mine.gid(), mine.mode() & 0o7777), (65_534, 65_534, 0o640));
    assert_eq!(mode(&fuse.at("own")), 0o750);
    // A write by another user clears the bits; one by root does not.
    let set_id = fuse.at("set_id");
    for (script, expected) in [
        (format!("echo x >> {point}/set_id"), 0o0777),
        (format!(": > {point}/set_id"), 0o0777),
        (format!("truncate -s 5 {point}/set_id"), 0o0777),
        (format!("fallocate -l 9999 {point}/set_id"), 0o0777),
    ] {
        fs::write(&set_id, "long enough").unwrap();
        fs::set_permissions(&set_id, fs::Permissions::from_mode(0o6777)).unwrap();
        File::options().append(true).open(&set_id).unwrap().write_all(b"more").unwrap();
        assert_eq!(mode(&set_id), 0o6777, "root keeps the bits");
        as_other_user(none, &script).assert_success();
        assert_eq!(mode(&set_id), expected, "{script}");
    }
    let options = fs::read_to_string("/proc/self/mounts").unwrap();
    let line = options.lines().find(|line| line.split(' ').nth(1) == fuse.point.to_str()).unwrap();
    assert!(line.contains("nosuid") && line.contains("nodev") && line.contains("default_permissions"), "{line}");
}

/// Every operation on a full file system must fail with ENOSPC and leave files as they were. Removing a file must make
/// room. The number of inodes must be limited, too.
#[test]
fn a_full_file_system_loses_nothing() {
    let Some(fuse) = Fuse::new(&["--size", "8M"]) else { return };
    fs::write(fuse.at("kept"), pattern(9, MIB)).unwrap();
    let full = fuse.at("full");
    let mut file = File::create(&full).unwrap();
    let mut written = 0;
    let error = loop {
        match file.write(&pattern(written, 64 << 10)) {
            Ok(len) => written += len,
            Err(error) => break error,
        }
        assert!(written < 8 * MIB);
    };
    assert_eq!(error.kind(), ErrorKind::StorageFull, "after {written} bytes");
    assert!(written > 4 * MIB, "{written} bytes");
    assert_eq!(fs::metadata(&full).unwrap().len(), written as u64);
    assert_eq!(fs::write(fuse.at("more"), pattern(1, MIB)).unwrap_err().kind(), ErrorKind::StorageFull);
    assert!(fs::read(fuse.at("kept")).unwrap() == pattern(9, MIB));
    let status = fuse.command(&["status", "--json", fuse.point.to_str().unwrap()]);
    let status: Value = serde_json::from_str(&status.out).unwrap();
    assert!(status["used_bytes"].as_u64().unwrap() >= (written + MIB) as u64, "{status}");
    fs::remove_file(&full).unwrap();
    drop(file);
    wait_until("the memory of the removed file is free", || fs::write(fuse.at("again"), pattern(2, 2 * MIB)).is_ok());
    let inodes = status["max_inodes"].as_u64().unwrap();
    let error = (0..inodes).find_map(|index| fs::create_dir(fuse.at(&format!("d{index}"))).err()).unwrap();
    assert_eq!(error.kind(), ErrorKind::StorageFull);
    assert!(fs::read(fuse.at("again")).unwrap() == pattern(2, 2 * MIB));
}

/// One thread lists a directory while another one creates, renames and removes entries. Each listing must have every
/// entry that stays exactly once, and no entry twice.
#[test]
fn a_changing_directory_is_listed_completely() {
    const STAY: usize = 700;
    let Some(fuse) = Fuse::new(&["--size", "64M"]) else { return };
    let folder = fuse.at("folder");
    fs::create_dir(&folder).unwrap();
    (0..STAY).for_each(|index| fs::write(folder.join(format!("stays{index}")), "").unwrap());
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for index in (0_usize..).take_while(|_| !is_over.load(Relaxed)) {
                let [from, to] = ["new", "renamed"].map(|name| folder.join(format!("{name}{index}")));
                fs::write(&from, "").unwrap();
                fs::rename(&from, &to).unwrap();
                if index >= 50 {
                    fs::remove_file(folder.join(format!("renamed{}", index - 50))).unwrap();
                }
            }
        });
        let listings = (0..20).map(|_| {
            let mut seen = BTreeMap::new();
            for entry in fs::read_dir(&folder).unwrap() {
                *seen.entry(entry.unwrap().file_name().into_string().unwrap()).or_insert(0) += 1;
            }
            let stay = seen.keys().filter(|name| name.starts_with("stays")).count();
            (stay, seen.values().all(|count| *count == 1))
        });
        let listings: Vec<_> = listings.collect();
        is_over.store(true, Relaxed);
        assert!(listings.iter().all(|listing| *listing == (STAY, true)), "{listings:?}");
    });
}

/// After `kill -9` of the process, open files, names and mappings must give errors, also to callers that were waiting,
/// and nothing may hang. The next mount must report and remove the dead one; so must `pagemill umount`.
#[test]
fn a_killed_process_leaves_errors_and_is_cleaned_up() {
    let Some(mut fuse) = Fuse::new(&["--size", "64M"]) else { return };
    let path = fuse.at("file");
    fs::write(&path, pattern(1, 8 * MIB)).unwrap();
    let open = File::options().read(true).write(true).open(&path).unwrap();
    // Threads are inside of requests when the process is killed.
    let busy: Vec<_> = (0..4)
        .map(|index| {
            let (file, mut path) = (open.try_clone().unwrap(), fuse.point.clone());
            path.push(format!("new{index}"));
            thread::spawn(move || {
                loop {
                    let written = file.write_all_at(&[7; 4096], index * 4096).and_then(|()| fs::write(&path, "x"));
                    if let Err(error) = written {
                        return error;
                    }
                }
            })
        })
        .collect();
    wait_until("the threads write", || fuse.at("new3").exists());
    fuse.kill();
    for thread in busy {
        let error = ends("a thread that writes", move || thread.join().unwrap());
        let is_expected = [Some(libc::ENOTCONN), Some(libc::ECONNABORTED)].contains(&error.raw_os_error());
        assert!(is_expected, "{error}");
    }
    let again = open.try_clone().unwrap();
    let written = ends("a write", move || again.write_at(b"x", 0)).unwrap_err();
    let other = path.clone();
    let named = ends("a look-up", move || fs::read(other)).unwrap_err();
    for error in [written, named] {
        assert_eq!(error.raw_os_error(), Some(libc::ENOTCONN));
    }
    assert!(is_mounted(&fuse.point));
    let status = fuse.command(&["status", fuse.point.to_str().unwrap()]);
    assert!(status.code() == 2 && status.err.contains("has ended: `pagemill umount"), "{}", status.err);
    // The dead mount is still busy.
    fuse.server = start(&fuse.place, &fuse.point, &["--size", "64M"]);
    assert!(fuse.err().contains("had ended without unmounting it: unmounted, files lost"), "{}", fuse.err());
    assert!(!path.exists());
    fs::write(&path, "new").unwrap();
    drop(open);
    fuse.kill();
    fuse.command(&["umount", fuse.point.to_str().unwrap()]).assert_success();
    assert!(!fuse.is_mounted());
}

/// Ctrl-C must unmount and end with status 0. While a file is open, it must name the process, and a second Ctrl-C must
/// unmount anyway and end with status 1; the open file then gives errors.
#[test]
fn ctrl_c_unmounts() {
    let Some(mut fuse) = Fuse::new(&["--size", "64M", "--json"]) else { return };
    let out: Value = serde_json::from_str(&fs::read_to_string(fuse.place.path("out")).unwrap()).unwrap();
    let expected = (fuse.server.id().into(), fuse.point.to_str().unwrap().into(), true.into(), (64 * MIB).into());
    let [pid, mounted, is_fuse, size] = ["controller_pid", "mounted", "fuse", "size_bytes"].map(|key| out[key].clone());
    assert_eq!((pid, mounted, is_fuse, size), expected);
    fs::write(fuse.at("file"), "x").unwrap();
    fuse.server.signal("INT");
    assert_eq!(fuse.server.wait(TIMEOUT).code(), Some(0));
    assert!(!fuse.is_mounted() && fs::read_dir(&fuse.point).unwrap().next().is_none());

    fuse.server = start(&fuse.place, &fuse.point, &["--size", "64M"]);
    fs::write(fuse.at("file"), "x").unwrap();
    let open = File::options().read(true).write(true).open(fuse.at("file")).unwrap();
    let umount = fuse.command(&["umount", fuse.point.to_str().unwrap()]);
    assert_eq!(umount.code(), 1);
    let own = format!("process {}", std::process::id());
    assert!(umount.err.contains("is busy") && umount.err.contains(&own), "{}", umount.err);
    // The second signal may arrive before the process handles the first one, so it is repeated.
    wait_until("it ends", || {
        shell(&format!("kill -s INT {} 2>/dev/null", fuse.server.id()));
        fuse.server.has_ended()
    });
    assert_eq!(fuse.server.wait(TIMEOUT).code(), Some(1));
    let err = fuse.err();
    assert!(err.contains(&own) && err.contains("unmounted anyway: open files are lost"), "{err}");
    assert!(!fuse.is_mounted());
    let error = ends("a write to a lost file", move || open.write_at(b"x", 0)).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENOTCONN));
}

/// In the background: `--daemon` must return when the file system is usable, and `pagemill umount` must end it.
#[test]
fn a_daemon_ends_when_it_is_unmounted() {
    if !may_use_fuse() {
        return;
    }
    let place = TestFolder::new();
    let point = place.path("fuse");
    fs::create_dir(&point).unwrap();
    let pagemill = |arguments: &[&str]| {
        let mut command = place.command(PAGEMILL);
        command.args(arguments).arg(&point);
        finish(command, TIMEOUT)
    };
    let mounted = pagemill(&["mount", "--fuse", "--daemon", "--json", "--size", "16M"]);
    let unmounted = Unmounted(point.clone());
    mounted.assert_success();
    let pid = serde_json::from_str::<Value>(&mounted.out).unwrap()["controller_pid"].to_string();
    fs::write(point.join("file"), "x").unwrap();
    let second = pagemill(&["mount", "--fuse"]);
    assert!(second.code() == 2 && second.err.contains("is mounted by Pagemill already"), "{}", second.err);
    let purge = {
        let mut command = place.command(PAGEMILL);
        command.arg("purge").arg(&point).arg("1M");
        finish(command, TIMEOUT)
    };
    assert!(purge.code() == 2 && purge.err.contains("which has no volatile files"), "{}", purge.err);
    pagemill(&["umount"]).assert_success();
    common::await_end_of(&pid);
    drop(unmounted);
    place.assert_no_files_left();
}

/// Unmounts a mount point when it is dropped, also after a failure.
struct Unmounted(PathBuf);

impl Drop for Unmounted {
    fn drop(&mut self) {
        while is_mounted(&self.0) && shell(&format!("umount -l {}", self.0.display())).success() {}
    }
}

/// Mounts that must be refused. The error must say what to do, and nothing may be mounted.
#[test]
fn refusals_say_what_to_do() {
    if !may_use_fuse() {
        return;
    }
    let place = TestFolder::new();
    let point = place.path("fuse");
    let refusal = |program: &str, before: &[&str], options: &[&str]| {
        let mut command = place.command(program);
        command.args(before).args(["mount", "--fuse"]).arg(&point).args(options);
        let end = finish(command, TIMEOUT);
        assert_eq!(end.code(), 2, "{}", end.err);
        assert!(!is_mounted(&point));
        end.err
    };
    let err = refusal(PAGEMILL, &[], &[]);
    assert!(err.contains("does not exist: mkdir -p"), "{err}");
    fs::create_dir(&point).unwrap();
    assert!(refusal(PAGEMILL, &[], &["--size", "0"]).contains("a size of 0 holds no file"));
    assert!(refusal(PAGEMILL, &[], &["--threads", "0"]).contains("1..=64"));
    for option in [["--cgroup", "x"], ["--metrics", "127.0.0.1:0"]] {
        let err = refusal(PAGEMILL, &[], &option);
        assert!(err.contains("cannot be used with") && err.contains(option[0]), "{err}");
    }
    fs::write(point.join("file"), "").unwrap();
    let err = refusal(PAGEMILL, &[], &[]);
    assert!(err.contains("is not empty: `file` would be hidden"), "{err}");
    fs::remove_file(point.join("file")).unwrap();
    let hide_device = r#"mount -t tmpfs none /dev && exec "$@""#;
    let err = refusal("unshare", &["-m", "sh", "-c", hide_device, "sh", PAGEMILL], &[]);
    assert!(err.contains("/dev/fuse is missing: `modprobe fuse`"), "{err}");
    if is_missing("setpriv") {
        return;
    }
    // Without `fusermount3`: an empty folder hides all programs, except a copy of setpriv.
    fs::set_permissions(place.path("."), fs::Permissions::from_mode(0o777)).unwrap();
    shell(&format!("chown 65534 {0}; cp $(command -v setpriv) {1}", point.display(), place.path("setpriv").display()));
    let setpriv = format!("{} --reuid=65534 --regid=65534 --clear-groups", place.path("setpriv").display());
    let hide_programs = format!(
        r#"mount -t tmpfs none /mnt && mknod -m 666 /mnt/fuse c 10 229 && mount --bind /mnt/fuse /dev/fuse &&
        mount -t tmpfs none /usr/bin && export XDG_RUNTIME_DIR=/nowhere PATH=/nowhere && exec {setpriv} "$@""#
    );
    let err = refusal("unshare", &["-m", "sh", "-c", &hide_programs, "sh", PAGEMILL], &[]);
    assert!(err.contains("fusermount3 is not installed: install the package fuse3"), "{err}");
}

/// A user without privileges must be able to mount through `fusermount3` and to unmount. Only this user may use the
/// files. Runs in a private mount namespace, with a device that all users may open.
#[test]
fn an_ordinary_user_mounts_through_fusermount3() {
    if !may_use_fuse() || !is_root() || is_missing("fusermount3") || is_missing("setpriv") {
        return;
    }
    let place = TestFolder::new();
    let point = place.path("fuse");
    fs::create_dir(&point).unwrap();
    fs::set_permissions(place.path("."), fs::Permissions::from_mode(0o755)).unwrap();
    let owned = [&point, &place.path("runtime"), &place.path("cache")].map(|path| path.display().to_string());
    assert!(shell(&format!("chown 65534 {}", owned.join(" "))).success());
    let script = r#"
set -eu
mount -t tmpfs none /mnt
mknod -m 666 /mnt/fuse c 10 229
mount --bind /mnt/fuse /dev/fuse
point=$2
user="setpriv --reuid=65534 --regid=65534 --clear-groups"
$user $1 mount --fuse --daemon --size 16M $point
trap 'umount -l $point 2>/dev/null || true' EXIT
$user sh -c "echo hello > $point/file && mkdir $point/dir && mv $point/file $point/dir && cat $point/dir/file"
$user stat -c '%u %g %a' $point
if ls $point 2>/dev/null; then echo "root may list it"; exit 1; fi
$1 status $point && exit 1
grep " $point " /proc/self/mounts
$user sh -c "cd $point && $1 umount $point" && exit 1
$user $1 umount $point
trap - EXIT
! grep " $point " /proc/self/mounts
"#;
    let mut command = place.command("unshare");
    command.args(["-m", "sh", "-c", script, "sh", PAGEMILL]).arg(&point);
    let end = finish(command, TIMEOUT);
    end.assert_success();
    let lines: Vec<_> = end.out.lines().collect();
    assert!(lines[0].contains("mounted through FUSE: up to 16 MiB"), "{}", end.out);
    assert_eq!(lines[1..3], ["hello", "65534 65534 1777"]);
    assert!(lines[3].contains("nosuid,nodev") && !lines[3].contains("allow_other"), "{}", lines[3]);
    assert!(end.err.contains("was mounted by another user"), "{}", end.err);
    assert!(end.err.contains("is busy") && end.err.contains("works in"), "{}", end.err);
}

/// Several threads write, rename and remove files in one directory at once. The remaining files must have their bytes.
#[test]
fn threads_share_a_mount() {
    let Some(fuse) = Fuse::new(&["--size", "64M", "--threads", "4"]) else { return };
    let done: io::Result<()> = thread::scope(|scope| {
        let threads: Vec<_> = (0..4_usize)
            .map(|thread| {
                let fuse = &fuse;
                scope.spawn(move || -> io::Result<()> {
                    for round in 0..100 {
                        let [new, kept] = ["new", "kept"].map(|name| fuse.at(&format!("{name}{thread}-{round}")));
                        fs::write(&new, pattern(round, 5000))?;
                        fs::rename(&new, &kept)?;
                        if round % 2 == 1 {
                            fs::remove_file(&kept)?;
                        }
                    }
                    Ok(())
                })
            })
            .collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap())
    });
    done.unwrap();
    let names: Vec<_> = fs::read_dir(&fuse.point).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(names.len(), 200);
    for path in names {
        let round: usize = path.to_str().unwrap().rsplit_once('-').unwrap().1.parse().unwrap();
        assert!(fs::read(&path).unwrap() == pattern(round, 5000), "{}", path.display());
    }
}
