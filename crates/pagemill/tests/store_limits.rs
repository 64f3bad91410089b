//! Tests of files with a store when the system refuses resources: rings, threads, locked memory, file descriptors, or
//! longer files. Also tests devices with large sectors.
//!
//! Each refusal happens in a child process, which runs this test program again. The tests also check the table that
//! `pagemill doctor` prints.
#![allow(unsafe_code)] // filters system calls, sets limits

use pagemill_cache::mapping::PageCache;
use pagemill_cache::mapping::policy::Always;
use pagemill_core::Error;
use pagemill_core::stats::{self, Counter};
use pagemill_core::units::PageSize;
use pagemill_store::{FileStore, Store};
use pagemill_testbed::Testbed;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

const PAGE_BYTES: usize = 4 << 10;
const MIB: usize = 1 << 20;
const WAIT_LIMIT: Duration = Duration::from_secs(600);

/// Environment variable with the path of the file that a child process uses.
const CHILD_FILE_ENV: &str = "STORE_LIMITS_FILE";

fn cache() -> PageCache {
    let page = PageSize::new(PAGE_BYTES).unwrap();
    let caches = Testbed::for_test().caches;
    caches.collapse_by_hand();
    PageCache::builder("limits").limit(16 * MIB as u64).page(page).policy(Always).build_in(caches).unwrap()
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / 100) as u8 | 1).collect()
}

/// Uses a file with a store in all ways: reads it directly and by a queue, writes it, extends it and syncs it. All must
/// succeed.
fn assert_works(path: &Path) {
    let cache = cache();
    let store = Arc::new(FileStore::open(path).unwrap());
    let file = cache.open(store.clone()).unwrap();
    let len = file.size_bytes() as usize;
    let mut queue = cache.queue(4).unwrap();
    queue.fetch(&file, 0, 1).unwrap();
    queue.wait(1, WAIT_LIMIT).unwrap();
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
    std::env::var_os(CHILD_FILE_ENV).map(PathBuf::from)
}

fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|own| std::os::unix::fs::MetadataExt::uid(&own) == 0)
}

/// Runs the test `test` again in a child process, after `prepare` has run in the child. With `as_other_user`, the child
/// is an unprivileged user if that is possible.
fn run_in_child(test: &str, as_other_user: bool, prepare: fn() -> std::io::Result<()>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, pattern(5 * MIB + 100)).unwrap();
    let mut program = std::env::current_exe().unwrap();
    let is_other_user = as_other_user && is_root();
    if is_other_user {
        // The unprivileged user may not have access to this program's directory, so the child runs a copy.
        let copy = folder.path().join("tests");
        fs::copy(&program, &copy).unwrap();
        program = copy;
        for path in [folder.path(), &path] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o777)).unwrap();
        }
    }
    let mut command = Command::new(program);
    command.args(["--exact", test, "--nocapture"]).env(CHILD_FILE_ENV, &path).current_dir(folder.path());
    if is_other_user {
        command.uid(65534).gid(65534);
    }
    // SAFETY: `prepare` makes system calls only.
    unsafe { command.pre_exec(prepare) };
    let output = command.output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}: {stdout}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    print!("{stdout}");
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

/// Makes the system call `io_uring_setup` fail in this process and its children.
fn forbid_rings(errno: i32) -> std::io::Result<()> {
    let instruction = |code: u32, jt: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf: 0, k };
    let filter = [
        // Loads the number of the system call.
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, libc::SYS_io_uring_setup as u32),
        instruction(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ALLOW),
        instruction(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ERRNO | errno as u32),
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

/// Asserts that a store works although the kernel refuses io_uring, because its rings then use threads. The counter
/// `RingsRefused` and the row `io_uring` of the table of `doctor` must report the refusal.
fn assert_works_without_rings(path: &Path) {
    assert_works(path);
    assert!(stats::get(Counter::RingsRefused) > 0);
    let report = pagemill_sys::probe::probe();
    let row = report.row("io_uring").unwrap();
    assert_ne!(row.state, pagemill_sys::probe::Availability::Available, "{}", row.found);
}

/// A filter refuses the system calls for rings, as most sandboxes do. A store must work with threads instead.
#[test]
fn stores_work_if_a_sandbox_forbids_rings() {
    if let Some(path) = file_for_child() {
        return assert_works_without_rings(&path);
    }
    run_in_child("stores_work_if_a_sandbox_forbids_rings", false, || forbid_rings(libc::EPERM));
    run_in_child("stores_work_if_a_sandbox_forbids_rings", false, || forbid_rings(libc::ENOSYS));
}

const RINGS_SETTING: &str = "/proc/sys/kernel/io_uring_disabled";

/// The original value of the kernel setting for rings, which is restored on drop.
struct RestoreSetting(String);

impl Drop for RestoreSetting {
    fn drop(&mut self) {
        let _ = fs::write(RINGS_SETTING, &self.0);
    }
}

/// A kernel setting refuses new rings to unprivileged users. A store must work with threads instead.
#[test]
fn stores_work_if_the_kernel_refuses_rings() {
    if let Some(path) = file_for_child() {
        return assert_works_without_rings(&path);
    }
    let Ok(before) = fs::read_to_string(RINGS_SETTING) else { return println!("skipped: no {RINGS_SETTING}") };
    if !is_root() {
        return println!("skipped: only root changes {RINGS_SETTING}");
    }
    let _restore = RestoreSetting(before);
    if let Err(error) = fs::write(RINGS_SETTING, "1") {
        return println!("skipped: {RINGS_SETTING}: {error}");
    }
    run_in_child("stores_work_if_the_kernel_refuses_rings", true, || Ok(()));
}

/// An unprivileged user may not lock memory, and then has no rings either. A store must still work.
#[test]
fn stores_work_without_locked_memory() {
    const TEST_NAME: &str = "stores_work_without_locked_memory";
    if let Some(path) = file_for_child() {
        return assert_works(&path);
    }
    run_in_child(TEST_NAME, true, || set_limit(libc::RLIMIT_MEMLOCK, 0));
    run_in_child(TEST_NAME, true, || {
        set_limit(libc::RLIMIT_MEMLOCK, 0)?;
        forbid_rings(libc::EPERM)
    });
}

/// The user may not start threads, and then has no rings either. The thread that calls sync must write the pages
/// itself.
#[test]
fn stores_work_without_threads() {
    if let Some(path) = file_for_child() {
        // The limit is set to the number of threads that exist.
        set_limit(libc::RLIMIT_NPROC, 0).unwrap();
        if std::thread::Builder::new().spawn(|| ()).is_ok() {
            println!("skipped: this user has any number of threads");
        }
        return assert_works(&path);
    }
    run_in_child("stores_work_without_threads", true, || Ok(()));
    run_in_child("stores_work_without_threads", true, || forbid_rings(libc::EPERM));
}

/// The process may not open file descriptors. Opening a file must report that. A file that is already open must be
/// readable, writable and syncable, without a ring.
#[test]
fn open_files_work_without_new_descriptors() {
    let Some(path) = file_for_child() else {
        return run_in_child("open_files_work_without_new_descriptors", false, || Ok(()));
    };
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
        assert_eq!(file.write_at(&[9; PAGE_BYTES], at as u64).unwrap(), PAGE_BYTES);
    }
    file.sync().unwrap();
}

/// Files may not grow, so a plain write would raise a deadly signal. A sync must report the problem instead, and must
/// write the bytes that fit.
#[test]
fn a_sync_reports_that_files_may_not_grow() {
    let Some(path) = file_for_child() else {
        return run_in_child("a_sync_reports_that_files_may_not_grow", false, || set_limit(libc::RLIMIT_FSIZE, 0));
    };
    let file = cache().open(Arc::new(FileStore::open(&path).unwrap())).unwrap();
    assert_eq!(file.write_at(&[9; 10], 0).unwrap(), 10);
    for _ in 0..2 {
        let error = file.sync().unwrap_err();
        assert_eq!(error.errno(), libc::EFBIG, "{error}");
    }
    let mut bytes = vec![0; PAGE_BYTES];
    assert_eq!(file.read_at(&mut bytes, 0).unwrap(), PAGE_BYTES);
    assert!(bytes[..10] == [9; 10] && bytes[10..] == pattern(PAGE_BYTES)[10..]);
    file.truncate(0).unwrap();
    file.sync().unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), 0);
}

/// Lets one test at a time change settings of the whole machine.
fn exclusive_test() -> MutexGuard<'static, ()> {
    static RUNNING_TEST: Mutex<()> = Mutex::new(());
    RUNNING_TEST.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A command that undoes a change to the system. It runs when this value is dropped.
struct UndoCommand(&'static str, Vec<String>);

impl Drop for UndoCommand {
    fn drop(&mut self) {
        let _ = Command::new(self.0).args(&self.1).status();
    }
}

fn run_command(program: &str, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new(program).args(arguments).output().map_err(|error| format!("{program}: {error}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

/// Creates a loop device whose sectors have the size of an OS page.
fn device_with_large_sectors(folder: &Path) -> Result<(PathBuf, UndoCommand), String> {
    let path = folder.join("image");
    fs::File::create(&path).and_then(|file| file.set_len(16 * MIB as u64)).map_err(|error| error.to_string())?;
    let image = path.to_str().ok_or("a path without a text")?;
    let device = run_command("losetup", &["--find", "--show", "--sector-size", "4096", image])?;
    Ok((PathBuf::from(&device), UndoCommand("losetup", vec!["--detach".to_owned(), device])))
}

/// Asserts that transfers with unaligned offsets, lengths and addresses have the same results as copies in memory. Also
/// checks accesses through a mapping.
fn assert_transfers_are_right(path: &Path, len: usize) {
    let store = FileStore::open(path).unwrap();
    assert!(store.alignment().offset == PAGE_BYTES && store.block_bytes() == PAGE_BYTES, "{:?}", store.alignment());
    let mut expected = vec![0; len];
    let mut memory = vec![0; 3 * PAGE_BYTES];
    for round in 0..200 {
        let (at, count, skip) = (round * 7919 % (len - 3 * PAGE_BYTES), round * 613 % (2 * PAGE_BYTES), round % 7);
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

/// Transfers must be right on a device with sectors of 4 KiB. They must also be right on a file of odd length, in a
/// file system on that device.
#[test]
fn transfers_to_large_sectors_are_right() {
    let _exclusive = exclusive_test();
    let folder = tempfile::tempdir().unwrap();
    let (device, _detach) = match device_with_large_sectors(folder.path()) {
        Ok(made) => made,
        Err(reason) => return println!("skipped: {reason}"),
    };
    assert_transfers_are_right(&device, 16 * MIB);
    let point = folder.path().join("mounted");
    fs::create_dir(&point).unwrap();
    let (name, at) = (device.to_str().unwrap(), point.to_str().unwrap());
    if let Err(reason) = run_command("mkfs.ext4", &["-q", name]).and_then(|_| run_command("mount", &[name, at])) {
        return println!("skipped: {reason}");
    }
    // The writeback thread keeps files open for a short time after they are closed.
    let _unmount = UndoCommand("umount", vec!["--lazy".to_owned(), at.to_owned()]);
    let path = point.join("file");
    fs::write(&path, vec![0; 3 * MIB + 777]).unwrap();
    assert_transfers_are_right(&path, 3 * MIB + 777);
    // If the file system is full, a sync must report that, and no data may be lost. Once there is room, the sync must
    // succeed.
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
