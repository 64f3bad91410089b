//! Tests of stores that need root or a fork: devices, full file systems, and registered memory in fork children.
#![allow(unsafe_code)] // forks

use pagemill_core::{Error, Result};
use pagemill_store::ring::{Engine, Event, Settings};
use pagemill_store::{Aligned, Buffer, FileStore, Ring, Store};
use pagemill_sys::mem;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const WAIT_LIMIT: Duration = Duration::from_secs(600);

fn aligned(len: usize, fill: u8) -> Aligned {
    let mut memory = Aligned::new(len, 64 * KIB);
    memory.fill(fill);
    memory
}

/// Lets one test at a time run, because a child process of one test has the open files of other tests for a short time.
fn exclusive_test() -> MutexGuard<'static, ()> {
    static RUNNING_TEST: Mutex<()> = Mutex::new(());
    RUNNING_TEST.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the output of a command, or the reason why the command failed.
fn run_command(program: &str, arguments: &[&str]) -> std::result::Result<String, String> {
    let output = Command::new(program).args(arguments).output().map_err(|error| format!("{program}: {error}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

/// A command that undoes a change to the system. It runs when this value is dropped.
struct UndoCommand(&'static str, Vec<String>);

impl Drop for UndoCommand {
    fn drop(&mut self) {
        let _ = Command::new(self.0).args(&self.1).status();
    }
}

fn path_text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// On a full file system, writes must fail with the system's error, by blocking calls and by a ring. Existing data must
/// stay.
#[test]
fn writes_to_full_file_systems_fail() {
    let _exclusive = exclusive_test();
    let folder = tempfile::tempdir().unwrap();
    if let Err(reason) = run_command("mount", &["-t", "tmpfs", "-o", "size=1m", "none", path_text(folder.path())]) {
        return println!("skipped: {reason}");
    }
    let _undo = UndoCommand("umount", vec![path_text(folder.path()).to_owned()]);
    let store = FileStore::create(folder.path().join("file")).unwrap();
    store.write(0, &aligned(512 * KIB, 1)).unwrap();
    for engine in [Engine::Best, Engine::Threads] {
        let error = store.write(512 * KIB as u64, &aligned(MIB, 2)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
        let mut ring = Ring::new(&Settings { engine, ..Settings::default() }).unwrap();
        let file = ring.attach(&store).unwrap();
        assert!(ring.write(file, 512 * KIB as u64, aligned(MIB, 2)).is_ok());
        ring.wait(1, WAIT_LIMIT).unwrap();
        let Some(Event::Done { result, .. }) = ring.next() else { panic!("the transfer has not completed") };
        assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::ENOSPC));
        let mut back = aligned(512 * KIB, 0);
        store.read(0, &mut back).unwrap();
        assert!(back.iter().all(|byte| *byte == 1));
    }
    store.set_size(0).unwrap();
    store.write(0, &aligned(512 * KIB, 3)).unwrap();
}

/// Creates a loop device on a file of `len_bytes` bytes. Returns the path of the device, and a command that removes it.
fn create_loop_device(folder: &Path, len_bytes: u64) -> std::result::Result<(PathBuf, UndoCommand), String> {
    let path = folder.join("device");
    fs::File::create(&path).and_then(|file| file.set_len(len_bytes)).map_err(|error| error.to_string())?;
    let device = run_command("losetup", &["--find", "--show", path_text(&path)])?;
    Ok((PathBuf::from(&device), UndoCommand("losetup", vec!["--detach".to_owned(), device])))
}

/// A block device has a fixed length. Writes beyond its end must fail, and only one store may write to it.
#[test]
fn devices_are_stores_of_fixed_length() {
    let _exclusive = exclusive_test();
    let folder = tempfile::tempdir().unwrap();
    let (path, _undo) = match create_loop_device(folder.path(), MIB as u64 + 512) {
        Ok(device) => device,
        Err(reason) => return println!("skipped: {reason}"),
    };
    let store = FileStore::open(&path).unwrap();
    let len = MIB as u64 + 512;
    assert!(store.is_device() && store.is_direct() && store.size_bytes().unwrap() == len);
    store.write(0, &aligned(64 * KIB, 1)).unwrap();
    store.write(MIB as u64, &aligned(512, 2)).unwrap();
    // The last block of the device is a partial block.
    let mut tail = aligned(4 * KIB, 9);
    store.read(MIB as u64, &mut tail).unwrap();
    assert!(tail[..512].iter().all(|byte| *byte == 2) && tail[512..].iter().all(|byte| *byte == 0));
    store.sync().unwrap();
    store.set_size(len).unwrap();
    assert_eq!(store.set_size(len - 512).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    assert_eq!(store.write(len, &aligned(512, 3)).unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    assert!(matches!(FileStore::open(&path), Err(Error::Busy { .. } | Error::Store { .. })));
    FileStore::open_read_only(&path).unwrap().read(0, &mut tail).unwrap();
    assert!(tail.iter().all(|byte| *byte == 1));
    drop(store);
    FileStore::open(&path).unwrap();
}

/// Opening a block device for writing must fail while the device is mounted.
#[test]
fn mounted_devices_cannot_be_opened_for_writing() {
    let _exclusive = exclusive_test();
    let folder = tempfile::tempdir().unwrap();
    let made = create_loop_device(folder.path(), 8 * MIB as u64).and_then(|(path, undo)| {
        run_command("mkfs.ext4", &["-q", path_text(&path)])?;
        let point = folder.path().join("mounted");
        fs::create_dir(&point).map_err(|error| error.to_string())?;
        run_command("mount", &[path_text(&path), path_text(&point)])?;
        Ok((path, undo, UndoCommand("umount", vec![path_text(&point).to_owned()])))
    });
    let (path, detach, unmount) = match made {
        Ok(made) => made,
        Err(reason) => return println!("skipped: {reason}"),
    };
    let opened: Result<FileStore> = FileStore::open(&path);
    match opened {
        Err(Error::Store { cause, .. }) => assert_eq!(cause.raw_os_error(), Some(libc::EBUSY)),
        other => panic!("{other:?}"),
    }
    FileStore::open_read_only(&path).unwrap();
    drop(unmount);
    drop(detach);
}

/// Runs `act` in a fork child. Returns whether `act` returned true.
fn run_in_child(act: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child makes some calls and ends without unwinding.
    match unsafe { libc::fork() } {
        0 => {
            let is_true = std::panic::catch_unwind(std::panic::AssertUnwindSafe(act)).unwrap_or(false);
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(if is_true { 0 } else { 1 }) }
        }
        child => {
            assert!(child > 0, "{}", io::Error::last_os_error());
            let mut status = -1;
            // SAFETY: waits for a child of this test, and writes `status`.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            status == 0
        }
    }
}

/// Fork children must not map the registered memory of a ring. Children that are forked after the memory was
/// unregistered must map it again. In a child, the parent's ring must report errors and be droppable, and a new ring
/// must work. The parent's ring must continue to work.
#[test]
fn registered_memory_is_not_mapped_in_children() {
    let _exclusive = exclusive_test();
    let folder = tempfile::tempdir().unwrap();
    let store = FileStore::create(folder.path().join("file")).unwrap();
    let mut ring = Ring::<Aligned>::new(&Settings::default()).unwrap();
    let mut second = Ring::<Aligned>::new(&Settings::default()).unwrap();
    if !ring.is_kernel() {
        return println!("skipped: no ring");
    }
    let file = ring.attach(&store).unwrap();
    let memory = aligned(4 * MIB, 1);
    let addr = memory.addr().as_ptr() as usize;
    let is_there = || mem::is_mapped(addr, 4 * MIB).is_ok();
    let id = match ring.register(Box::new(memory)) {
        Ok(id) => id,
        Err((error, _)) => return println!("skipped: {error}"),
    };
    /// A buffer for the second ring that is the memory of the first ring.
    struct SameMemory(std::ptr::NonNull<u8>);
    // SAFETY: lives as long as it is registered with the first ring, and no transfer uses it.
    unsafe impl Buffer for SameMemory {
        fn addr(&self) -> std::ptr::NonNull<u8> {
            self.0
        }
        fn len_bytes(&self) -> usize {
            4 * MIB
        }
    }
    let same = SameMemory(std::ptr::NonNull::new(addr as *mut u8).unwrap());
    let other = second.register(Box::new(same)).unwrap_or_else(|(error, _)| panic!("{error}"));
    assert!(is_there() && run_in_child(|| !is_there()));
    let mut ring = Some(ring);
    assert!(run_in_child(|| {
        let Some(mut inherited) = ring.take() else { return false };
        let refused = inherited.submit().unwrap_err().raw_os_error() == Some(libc::EBADF);
        let told = inherited.read(file, 0, aligned(512, 0)).is_ok();
        let Some(Event::Done { result, .. }) = inherited.next() else { return false };
        let is_error = result.unwrap_err().raw_os_error() == Some(libc::EBADF);
        drop(inherited);
        let mut own = Ring::new(&Settings::default()).unwrap();
        let file = own.attach(&store).unwrap();
        let is_queued = own.write(file, 0, aligned(512, 7)).is_ok();
        own.wait(1, WAIT_LIMIT).unwrap();
        let is_done = matches!(own.next(), Some(Event::Done { result: Ok(()), .. }));
        refused && told && is_error && is_queued && is_done && !is_there()
    }));
    let mut ring = ring.unwrap();
    let mut bytes = aligned(512, 0);
    assert!(ring.read(file, 0, bytes).is_ok());
    ring.wait(1, WAIT_LIMIT).unwrap();
    let Some(Event::Done { buffer, result: Ok(()), .. }) = ring.next() else {
        panic!("the parent's ring does not work any more")
    };
    bytes = buffer;
    assert!(bytes.iter().all(|byte| *byte == 7), "what the child wrote");
    drop(second.unregister(other).unwrap());
    assert!(run_in_child(|| !is_there()), "the first ring still has it");
    let memory = ring.unregister(id).unwrap();
    assert!(run_in_child(is_there));
    drop(memory);
    drop(FileStore::open(folder.path().join("file")).expect_err("children took the claim away"));
}
