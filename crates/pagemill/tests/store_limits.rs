//! Files with a store where the system refuses: rings, threads, locked memory, descriptors, length; and devices with
//! large sectors.
//!
//! Each refusal happens in a child, which is this program again. `pagemill doctor` reads the same table that is checked
//! here.
#![allow(unsafe_code)] // filters system calls, sets limits

use pagemill::mapping::policy::Always;
use pagemill::mapping::{Cache, Settings};
use pagemill::stats::{self, Counter};
use pagemill::store::{FileStore, Store};
use pagemill::units::PageSize;
use pagemill::{Error, Pagemill};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

const PAGE: usize = 4 << 10;
const MIB: usize = 1 << 20;
const LONG: Duration = Duration::from_secs(600);

/// Names the file that a child works on.
const FILE: &str = "STORE_LIMITS_FILE";

fn cache() -> Cache {
    let page = PageSize::new(PAGE).unwrap();
    let caches = Pagemill::for_test().caches;
    caches.collapse_by_hand();
    caches.make(Settings { page, policy: Box::new(Always), ..Settings::new("limits", 16 * MIB as u64) }).unwrap()
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / 100) as u8 | 1).collect()
}

/// All uses of a file with a store: it is read, also by a queue, written, extended and synced.
fn assert_works(path: &Path) {
    let cache = cache();
    let store = Arc::new(FileStore::open(path).unwrap());
    let file = cache.open(store.clone()).unwrap();
    let len = file.size_bytes() as usize;
    let mut queue = cache.queue(4).unwrap();
    queue.fetch(&file, 0, 1).unwrap();
    queue.wait(1, LONG).unwrap();
    queue.next().unwrap().result.unwrap();
    let mut expected = pattern(len);
    for at in [10, len / 2, len - 5] {
        assert_eq!(file.write_at(&[at as u8; 100], at as u64).unwrap(), 100);
        expected.resize(expected.len().max(at + 100), 0);
        expected[at..at + 100].fill(at as u8);
    }
    file.sync().unwrap();
    file.refresh().unwrap();
    let mut found = vec![0; expected.len() + 1];
    assert_eq!(file.read_at(&mut found, 0).unwrap(), expected.len());
    assert!(found[..expected.len()] == expected && fs::read(path).unwrap() == expected);
}

fn file_for_child() -> Option<PathBuf> {
    std::env::var_os(FILE).map(PathBuf::from)
}

fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|own| std::os::unix::fs::MetadataExt::uid(&own) == 0)
}

/// Runs this test once more, in a child set up by `prepare`: as an unprivileged user, if requested and possible.
fn in_child(test: &str, as_other_user: bool, prepare: fn() -> std::io::Result<()>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, pattern(5 * MIB + 100)).unwrap();
    let mut program = std::env::current_exe().unwrap();
    let is_other_user = as_other_user && is_root();
    if is_other_user {
        // That user may not have access to this program's directory.
        let copy = folder.path().join("tests");
        fs::copy(&program, &copy).unwrap();
        program = copy;
        for path in [folder.path(), &path] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o777)).unwrap();
        }
    }
    let mut command = Command::new(program);
    command.args(["--exact", test, "--nocapture"]).env(FILE, &path).current_dir(folder.path());
    if is_other_user {
        command.uid(65534).gid(65534);
    }
    // SAFETY: `prepare` makes system calls only.
    unsafe { command.pre_exec(prepare) };
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}: {said}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    print!("{said}");
}

fn set_limit(resource: libc::__rlimit_resource_t, most: u64) -> std::io::Result<()> {
    let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
    // SAFETY: reads `limit`.
    if unsafe { libc::setrlimit(resource, &raw const limit) } == 0 {
        Ok(())
    } else {
        Err(std::io::Error::last_os_error())
    }
}

/// Makes `io_uring_setup` fail in this process, and in its children.
fn forbid_rings(errno: i32) -> std::io::Result<()> {
    let step = |code: u32, jt: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf: 0, k };
    let filter = [
        // The number of the system call.
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, libc::SYS_io_uring_setup as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ALLOW),
        step(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ERRNO | errno as u32),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: sets a flag of this process.
    let mut result = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    if result == 0 {
        // SAFETY: reads the filter.
        result = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    }
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// Without a ring the store uses threads, and a counter and the table of `doctor` report it.
fn assert_works_without_rings(path: &Path) {
    assert_works(path);
    assert!(stats::get(Counter::RingsRefused) > 0);
    let report = pagemill_sys::probe::probe();
    let row = report.row("io_uring").unwrap();
    assert_ne!(row.state, pagemill_sys::probe::Availability::Available, "{}", row.found);
}

/// A sandbox whose filter forbids rings, as most do.
#[test]
fn filters_that_forbid_rings() {
    if let Some(path) = file_for_child() {
        return assert_works_without_rings(&path);
    }
    in_child("filters_that_forbid_rings", false, || forbid_rings(libc::EPERM));
    in_child("filters_that_forbid_rings", false, || forbid_rings(libc::ENOSYS));
}

const SETTING: &str = "/proc/sys/kernel/io_uring_disabled";

/// Restores a setting of the kernel on drop.
struct Restore(String);

impl Drop for Restore {
    fn drop(&mut self) {
        let _ = fs::write(SETTING, &self.0);
    }
}

/// A kernel that refuses new rings to unprivileged users; existing ones keep theirs.
#[test]
fn a_kernel_that_refuses_rings() {
    if let Some(path) = file_for_child() {
        return assert_works_without_rings(&path);
    }
    let Ok(before) = fs::read_to_string(SETTING) else { return println!("skipped: no {SETTING}") };
    if !is_root() {
        return println!("skipped: only root changes {SETTING}");
    }
    let _restore = Restore(before);
    if let Err(error) = fs::write(SETTING, "1") {
        return println!("skipped: {SETTING}: {error}");
    }
    in_child("a_kernel_that_refuses_rings", true, || Ok(()));
}

/// Neither lockable memory nor threads.
#[test]
fn no_locked_memory_and_no_threads() {
    const TEST: &str = "no_locked_memory_and_no_threads";
    if let Some(path) = file_for_child() {
        return assert_works(&path);
    }
    in_child(TEST, true, || set_limit(libc::RLIMIT_MEMLOCK, 0));
    in_child(TEST, true, || {
        set_limit(libc::RLIMIT_MEMLOCK, 0)?;
        forbid_rings(libc::EPERM)
    });
}

/// Neither a thread nor a ring is available once the file is open: the syncing thread writes itself.
#[test]
fn no_threads_at_all() {
    if let Some(path) = file_for_child() {
        // As many as exist.
        set_limit(libc::RLIMIT_NPROC, 0).unwrap();
        if std::thread::Builder::new().spawn(|| ()).is_ok() {
            println!("skipped: this user has any number of threads");
        }
        return assert_works(&path);
    }
    in_child("no_threads_at_all", true, || Ok(()));
    in_child("no_threads_at_all", true, || forbid_rings(libc::EPERM));
}

/// All descriptors are taken: opening reports it; an open file is read, written and synced, without a ring.
#[test]
fn no_descriptors() {
    let Some(path) = file_for_child() else { return in_child("no_descriptors", false, || Ok(())) };
    let cache = cache();
    let file = cache.open(Arc::new(FileStore::open(&path).unwrap())).unwrap();
    set_limit(libc::RLIMIT_NOFILE, 0).unwrap();
    let refused = FileStore::open_read_only(&path).unwrap_err();
    assert_eq!(refused.errno(), libc::EMFILE, "{refused}");
    assert!(matches!(cache.queue(1), Err(Error::System { .. })));
    let mut bytes = vec![0; 3 * MIB];
    assert_eq!(file.read_at(&mut bytes, 0).unwrap(), bytes.len());
    assert!(bytes == pattern(bytes.len()));
    for at in [0, 2 * MIB, 4 * MIB] {
        assert_eq!(file.write_at(&[9; PAGE], at as u64).unwrap(), PAGE);
    }
    file.sync().unwrap();
}

/// No file may grow: a sync reports it, where a plain write is a deadly signal; what fits is written.
#[test]
fn no_length() {
    let Some(path) = file_for_child() else { return in_child("no_length", false, || set_limit(libc::RLIMIT_FSIZE, 0)) };
    let file = cache().open(Arc::new(FileStore::open(&path).unwrap())).unwrap();
    assert_eq!(file.write_at(&[9; 10], 0).unwrap(), 10);
    for _ in 0..2 {
        let error = file.sync().unwrap_err();
        assert_eq!(error.errno(), libc::EFBIG, "{error}");
    }
    let mut bytes = vec![0; PAGE];
    assert_eq!(file.read_at(&mut bytes, 0).unwrap(), PAGE);
    assert!(bytes[..10] == [9; 10] && bytes[10..] == pattern(PAGE)[10..]);
    file.truncate(0).unwrap();
    file.sync().unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), 0);
}

/// Only one test at a time changes settings of the whole machine.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Undoes the changes to the system.
struct Undo(&'static str, Vec<String>);

impl Drop for Undo {
    fn drop(&mut self) {
        let _ = Command::new(self.0).args(&self.1).status();
    }
}

fn output(program: &str, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new(program).args(arguments).output().map_err(|error| format!("{program}: {error}"))?;
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() { Ok(said(&output.stdout)) } else { Err(said(&output.stderr)) }
}

/// A device with sectors as long as a page.
fn large_sectors(folder: &Path) -> Result<(PathBuf, Undo), String> {
    let path = folder.join("image");
    fs::File::create(&path).and_then(|file| file.set_len(16 * MIB as u64)).map_err(|error| error.to_string())?;
    let image = path.to_str().ok_or("a path without a text")?;
    let device = output("losetup", &["--find", "--show", "--sector-size", "4096", image])?;
    Ok((PathBuf::from(&device), Undo("losetup", vec!["--detach".to_owned(), device])))
}

/// Transfers at unaligned offsets, lengths and addresses, against bytes in memory; then the same through a mapping.
fn assert_is_right(path: &Path, len: usize) {
    let store = FileStore::open(path).unwrap();
    assert!(store.alignment().offset == PAGE && store.block_bytes() == PAGE, "{:?}", store.alignment());
    let mut expected = vec![0; len];
    let mut memory = vec![0; 3 * PAGE];
    for round in 0..200 {
        let (at, count, skip) = (round * 7919 % (len - 3 * PAGE), round * 613 % (2 * PAGE), round % 7);
        let at = if round % 3 == 0 { at / 512 * 512 } else { at };
        memory[skip..skip + count].fill(round as u8);
        store.write(at as u64, &memory[skip..skip + count]).unwrap();
        expected[at..at + count].fill(round as u8);
        memory.fill(0xEE);
        store.read(at as u64 / 2, &mut memory[skip..skip + count]).unwrap();
        assert!(memory[skip..skip + count] == expected[at / 2..at / 2 + count], "round {round}");
    }
    store.sync().unwrap();
    let file = cache().open(Arc::new(store)).unwrap();
    assert_eq!(file.size_bytes(), len as u64);
    assert_eq!(file.write_at(&[7; 100], len as u64 - 100).unwrap(), 100);
    expected[len - 100..].fill(7);
    file.sync().unwrap();
    file.refresh().unwrap();
    let mut found = vec![0; len];
    assert_eq!(file.read_at(&mut found, 0).unwrap(), len);
    assert!(found == expected);
    assert!(fs::read(path).unwrap() == expected);
}

/// A device with sectors of 4 KiB, and a file of odd length on a file system on it.
#[test]
fn large_sectors_are_right() {
    let _turn = turn();
    let folder = tempfile::tempdir().unwrap();
    let (device, _detach) = match large_sectors(folder.path()) {
        Ok(made) => made,
        Err(reason) => return println!("skipped: {reason}"),
    };
    assert_is_right(&device, 16 * MIB);
    let point = folder.path().join("mounted");
    fs::create_dir(&point).unwrap();
    let (name, at) = (device.to_str().unwrap(), point.to_str().unwrap());
    if let Err(reason) = output("mkfs.ext4", &["-q", name]).and_then(|_| output("mount", &[name, at])) {
        return println!("skipped: {reason}");
    }
    // The writeback thread keeps files open for some moments more.
    let _unmount = Undo("umount", vec!["--lazy".to_owned(), at.to_owned()]);
    let path = point.join("file");
    fs::write(&path, vec![0; 3 * MIB + 777]).unwrap();
    assert_is_right(&path, 3 * MIB + 777);
    // Full: the sync reports it, and nothing is lost; after room is made, everything is there.
    let file = cache().open(Arc::new(FileStore::create(point.join("large")).unwrap())).unwrap();
    let bytes = pattern(14 * MIB);
    assert_eq!(file.write_at(&bytes, 0).unwrap(), bytes.len());
    let error = file.sync().unwrap_err();
    assert_eq!(error.errno(), libc::ENOSPC, "{error}");
    let mut found = vec![0; bytes.len()];
    assert_eq!(file.read_at(&mut found, 0).unwrap(), bytes.len());
    assert!(found == bytes);
    file.truncate(4 * MIB as u64).unwrap();
    file.sync().unwrap();
    assert!(fs::read(point.join("large")).unwrap() == bytes[..4 * MIB]);
}
