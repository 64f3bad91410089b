//! Clients of `pagemill mount --fuse` that are killed, that use up what they can, or that send what no program sends.

mod common;

use common::fuse::{Fuse, may_use_fuse};
use common::ram::wait_until;
use common::{Guard, TIMEOUT, finish, is_missing, is_root};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

const SIZE_KIB: u64 = 8 << 10;

/// Memory that the process needs for its first requests, whatever the size: buffers, stacks, first slabs.
const OTHER_KIB: u64 = 24 << 10;

/// Mounts a file system in which every user may create files.
fn open_to_all() -> Option<Fuse> {
    if !may_use_fuse() || is_missing("python3") {
        return None;
    }
    if !is_root() {
        println!("skipped: only root can run clients as another user");
        return None;
    }
    let fuse = Fuse::new(&["--size", &format!("{SIZE_KIB}K"), "--threads", "2"])?;
    fs::set_permissions(fuse.place.path("."), fs::Permissions::from_mode(0o755)).unwrap();
    Some(fuse)
}

/// What all clients do first. Another user may not be able to read the modules of Python.
const BECOME_ANOTHER_USER: &str = "
import ctypes, errno, mmap, os, random
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
";

/// Returns a command that runs a Python script in the mount, as the user 65534.
fn client(fuse: &Fuse, script: &str) -> Command {
    let mut command = Command::new("python3");
    command.args(["-c", &format!("{BECOME_ANOTHER_USER}{script}")]);
    command.current_dir(&fuse.point).stdin(Stdio::null());
    command
}

/// Numbers of used blocks and inodes, by `statfs`.
fn used(fuse: &Fuse) -> (u64, u64) {
    let stat = rustix::fs::statfs(&fuse.point).unwrap();
    (stat.f_blocks - stat.f_bfree, stat.f_files - stat.f_ffree)
}

fn empty(fuse: &Fuse) {
    for entry in fs::read_dir(&fuse.point).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { fs::remove_dir_all(path).unwrap() } else { fs::remove_file(path).unwrap() }
    }
}

/// Clients that change, map and list everything are killed at any moment, while the kernel drops its caches. The file
/// system must answer afterwards, and nothing of them may be left when their files are removed.
#[test]
fn killed_clients_leave_nothing() {
    let Some(fuse) = open_to_all() else { return };
    let before = used(&fuse);
    let script = r#"
number = 0
while True:
    number += 1
    path = f"{os.getpid()}-{number % 7}"
    try:
        random.choice([
            lambda: os.mkdir(path),
            lambda: os.rmdir(path),
            lambda: os.rename(path, f"{path}-renamed"),
            lambda: os.link(path, f"{path}-second"),
            lambda: os.unlink(path),
            lambda: os.unlink(f"{path}-second"),
            lambda: os.symlink("x" * 3000, path),
            lambda: os.setxattr(path, "user.a", bytes(5000)),
            lambda: os.listdir("."),
            lambda: open(path, "wb").write(bytes(random.randrange(300000))),
            lambda: mmap.mmap(os.open(path, os.O_RDWR), 4096).write(b"mapped"),
            lambda: os.truncate(path, random.randrange(100000)),
        ])()
    except (OSError, ValueError):
        pass
"#;
    for _ in 0..6 {
        let mut clients: Vec<Guard> = (0..3).map(|_| Guard::new(client(&fuse, script))).collect();
        let _ = fs::write("/proc/sys/vm/drop_caches", "2");
        thread::sleep(Duration::from_millis(400));
        for client in &mut clients {
            assert!(!client.has_ended(), "{}", fuse.err());
            client.signal("KILL");
            client.wait(TIMEOUT);
        }
    }
    fs::write(fuse.at("file"), "still here").unwrap();
    assert_eq!(fs::read_to_string(fuse.at("file")).unwrap(), "still here");
    empty(&fuse);
    let _ = fs::write("/proc/sys/vm/drop_caches", "2");
    wait_until("all blocks and inodes are free", || used(&fuse) == before);
}

/// An ordinary user gives files large attributes, many names and long targets until an error. The error must be "no space
/// left", and the process that serves the file system must not grow by more than a small multiple of its
/// size.
#[test]
fn metadata_is_limited() {
    let Some(fuse) = open_to_all() else { return };
    let before = used(&fuse);
    let script = r#"
def until_full(act):
    for number in range(10**6):
        try:
            act(number)
        except OSError as error:
            assert error.errno in (errno.ENOSPC, errno.EMLINK), error
            return number
    raise SystemExit("there is no limit")
def attributes(number):
    path = f"file{number}"
    open(path, "w").close()
    for name in range(16):
        os.setxattr(path, f"user.{name}", bytes(60000))
files = until_full(attributes)
print("files", files)
for number in range(files):
    os.unlink(f"file{number}")
open("file", "w").close()
print("names", until_full(lambda number: os.link("file", f"{number}".zfill(255))))
"#;
    let resident_kib = || -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", fuse.server.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.strip_suffix(" kB"));
        line.unwrap().trim().parse().unwrap()
    };
    let before_kib = resident_kib();
    finish(client(&fuse, script), TIMEOUT).assert_success();
    let more_kib = resident_kib().saturating_sub(before_kib);
    assert!(more_kib < 2 * SIZE_KIB + OTHER_KIB, "{more_kib} KiB more");
    empty(&fuse);
    wait_until("all inodes are free", || used(&fuse) == before);
}

/// Names of all bytes, paths longer than the kernel's limit, listings from arbitrary positions, and offsets at the limits
/// of their types must give a result or an error, and damage nothing.
#[test]
fn unusual_requests_get_answers() {
    let Some(fuse) = open_to_all() else { return };
    let script = r#"
libc = ctypes.CDLL(None, use_errno=True)
names = [bytes(random.choice([b for b in range(1, 256) if b != 47]) for _ in range(255)) for _ in range(50)]
names += [bytes([b]) for b in range(1, 256) if b not in (46, 47)]
os.mkdir("names")
for name in names:
    open(b"names/" + name, "w").close()
assert sorted(os.listdir(b"names")) == sorted(set(names))

fd = os.open("names", os.O_RDONLY)
buffer = ctypes.create_string_buffer(32768)
positions = [0, 1, 7, 8, 2**31, 2**62 - 1, 2**62, 2**63 - 1] + [random.randrange(2**63) for _ in range(200)]
for position in positions:
    try:
        os.lseek(fd, position, os.SEEK_SET)
    except OSError:
        continue
    count = libc.syscall(217, fd, buffer, 32768) # getdents64
    assert -1 <= count <= 32768
    at = 0
    while at < count:
        length = int.from_bytes(buffer.raw[at + 16:at + 18], "little")
        name = buffer.raw[at + 19:at + length].split(b"\0")[0]
        assert name in names or name in (b".", b".."), name
        at += length

top = os.open(".", os.O_RDONLY)
for _ in range(300):
    os.mkdir("d" * 250)
    os.chdir("d" * 250)
open("deepest", "w").write("text")
assert open("deepest").read() == "text"
os.fchdir(top)

file = os.open("file", os.O_RDWR | os.O_CREAT)
for call in [
    lambda: os.pwrite(file, b"x", 2**63 - 1),
    lambda: os.pwrite(file, b"x", 2**63 - 4097),
    lambda: os.ftruncate(file, 2**63 - 1),
    lambda: os.posix_fallocate(file, 2**62, 2**62),
    lambda: os.lseek(file, 2**63 - 1, os.SEEK_HOLE),
    lambda: os.pread(file, 10, 2**63 - 11),
    lambda: os.utime(file, ns=(2**63 * 5, -(2**63) * 5)),
    lambda: os.fchmod(file, 0o177777),
    lambda: os.mknod("device", 0o060000, 1),
    lambda: os.mknod("nothing", 0o170000),
    lambda: os.setxattr(file, "user." + "n" * 300, b""),
    lambda: os.setxattr(file, "system.posix_acl_access", bytes(100)),
    lambda: os.getxattr(file, "user."),
]:
    try:
        call()
    except (OSError, OverflowError):
        pass
os.ftruncate(file, 0)
os.pwrite(file, b"works", 0)
assert os.pread(file, 10, 0) == b"works"
"#;
    finish(client(&fuse, script), TIMEOUT).assert_success();
    assert_eq!(fs::read_to_string(fuse.at("file")).unwrap(), "works");
    let mut command = Command::new("rm");
    command.arg("-r").arg(fuse.at("d".repeat(250).as_str()));
    finish(command, TIMEOUT).assert_success();
    empty(&fuse);
    assert_eq!(fuse.err(), "");
}
