//! `pagemill mount --fuse --spill`: more data than memory, their space on the disk, and ends of the process.

mod common;

use common::fuse::{Fuse, is_mounted, may_use_fuse, started};
use common::ram::{MIB, pattern, wait_until};
use common::{PAGEMILL, TIMEOUT, TestFolder, finish, is_missing};
use pagemill_fuse::{Mount, Options};
use pagemill_ramfs::RamFs;
use pagemill_store::{Faults, FaultyStore, MemoryStore};
use rustix::fs::Advice;
use serde_json::Value;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// An empty folder for spill files.
struct Disk {
    _parent: TestFolder,
    folder: PathBuf,
}

impl Disk {
    /// `None` if the folder of tests is in memory.
    fn new() -> Option<Self> {
        let parent = TestFolder::new();
        let folder = parent.path("disk");
        fs::create_dir(&folder).unwrap();
        if rustix::fs::statfs(&folder).unwrap().f_type as i64 == libc::TMPFS_MAGIC {
            println!("skipped: the folder of tests is on a tmpfs");
            return None;
        }
        Some(Self { _parent: parent, folder: fs::canonicalize(folder).unwrap() })
    }

    fn mount(&self, more: &[&str]) -> Option<Fuse> {
        let options = ["--size", "8M", "--spill", self.folder.to_str().unwrap()];
        Fuse::new(&[&options[..], more].concat())
    }

    /// Number of files in the folder. The spill file has no name, so there must be none.
    fn entries(&self) -> usize {
        fs::read_dir(&self.folder).unwrap().count()
    }
}

/// Reads a file, after the kernel's copies of its pages were dropped.
fn read(path: &Path) -> Vec<u8> {
    let file = File::open(path).unwrap();
    rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).unwrap();
    fs::read(path).unwrap()
}

fn status(fuse: &Fuse) -> Value {
    serde_json::from_str(&fuse.command(&["status", "--json", fuse.point.to_str().unwrap()]).out).unwrap()
}

/// Returns a path to the spill file, which has no name, through the descriptors of the process that has it open.
fn spill_file(fuse: &Fuse, disk: &Disk) -> PathBuf {
    let descriptors = fs::read_dir(format!("/proc/{}/fd", fuse.server.id())).unwrap();
    let is_in_folder = |path: &PathBuf| fs::read_link(path).is_ok_and(|target| target.starts_with(&disk.folder));
    descriptors.map(|entry| entry.unwrap().path()).find(is_in_folder).expect("there is a spill file")
}

/// Five files, together five times the memory, must keep their bytes, also after changes within them. The folder must
/// show no file. Removing the files must free the space on the disk.
#[test]
fn data_beyond_the_memory_move_to_disk_and_return() {
    let Some(disk) = Disk::new() else { return };
    let Some(fuse) = disk.mount(&["--spill-size", "64M"]) else { return };
    let path = |at: usize| fuse.at(&format!("file{at}"));
    (0..5).for_each(|at| fs::write(path(at), pattern(at, 8 * MIB)).unwrap());
    let space = rustix::fs::statvfs(&fuse.point).unwrap();
    assert_eq!(space.f_blocks * space.f_frsize, 72 * MIB as u64);
    assert!((space.f_blocks - space.f_bfree) * space.f_frsize >= 40 * MIB as u64);
    let used = status(&fuse);
    assert!(used["spilled_bytes"].as_u64().unwrap() >= 32 * MIB as u64, "{used}");
    assert!(used["memory_bytes"].as_u64().unwrap() <= 8 * MIB as u64, "{used}");
    assert_eq!(
        (&used["spill_limit_bytes"], &used["memory_limit_bytes"]),
        (&Value::from(64 << 20), &Value::from(8 << 20))
    );
    for at in 0..5 {
        let mut expected = pattern(at, 8 * MIB);
        assert!(read(&path(at)) == expected, "file {at}");
        let file = File::options().write(true).open(path(at)).unwrap();
        file.write_all_at(b"changed", 3 * MIB as u64 + 5).unwrap();
        file.set_len(7 * MIB as u64 + 100).unwrap();
        expected[3 * MIB + 5..][..7].copy_from_slice(b"changed");
        expected.truncate(7 * MIB + 100);
        assert!(read(&path((at + 1) % 5)).len() > 7 * MIB);
        assert!(read(&path(at)) == expected, "changed file {at}");
    }
    let text = fuse.command(&["status", fuse.point.to_str().unwrap()]).out;
    assert!(text.contains("in memory") && text.contains("on disk"), "{text}");
    let file = spill_file(&fuse, &disk);
    assert_eq!(fs::metadata(&file).unwrap().mode() & 0o777, 0o600);
    assert!(fs::metadata(&file).unwrap().blocks() * 512 >= 24 * MIB as u64);
    assert_eq!(disk.entries(), 0);
    (0..5).for_each(|at| fs::remove_file(path(at)).unwrap());
    wait_until("the space on the disk is free", || fs::metadata(&file).unwrap().blocks() * 512 <= MIB as u64);
    assert_eq!(status(&fuse)["spilled_bytes"], 0);
}

/// Memory and the space for the spill file are used up. A write must fail with ENOSPC, and everything written before
/// must be readable, and writable in place. When the process is killed, nothing may be left in the folder.
#[test]
fn a_full_disk_loses_nothing() {
    let Some(disk) = Disk::new() else { return };
    let Some(mut fuse) = disk.mount(&["--spill-size", "8M"]) else { return };
    let path = fuse.at("full");
    let file = File::create(&path).unwrap();
    let mut written = 0;
    let error = loop {
        match file.write_at(&pattern(written, 64 << 10), written as u64) {
            Ok(len) => written += len,
            Err(error) => break error,
        }
        assert!(written <= 16 * MIB);
    };
    assert_eq!(error.kind(), ErrorKind::StorageFull, "after {written} bytes");
    assert!(written > 14 * MIB, "{written} bytes");
    for at in (0..written).step_by(64 << 10) {
        file.write_all_at(&pattern(at + 1, (64 << 10).min(written - at)), at as u64).unwrap();
    }
    let bytes = read(&path);
    assert_eq!(bytes.len(), written);
    for (at, part) in (0..).step_by(64 << 10).zip(bytes.chunks(64 << 10)) {
        assert!(part == pattern(at + 1, part.len()), "at {at}");
    }
    fuse.kill();
    assert_eq!(disk.entries(), 0);
}

/// The disk fails before the limit is reached: the process may not write files of more than 4 MiB. A write must fail with
/// ENOSPC, the reason must be reported, and everything written before must be readable.
#[test]
fn a_disk_that_fails_is_reported() {
    let Some(disk) = Disk::new() else { return };
    if !may_use_fuse() || is_missing("prlimit") {
        return;
    }
    let place = TestFolder::new();
    let point = place.path("fuse");
    fs::create_dir(&point).unwrap();
    let mut command = place.command("prlimit");
    command.args(["--fsize=4194304", PAGEMILL, "mount", "--fuse"]).arg(&point).args(["--size", "8M", "--spill"]);
    command.arg(&disk.folder).args(["--spill-size", "64M"]);
    let server = started(&place, command);
    let fuse = Fuse { place, point, server };
    let path = fuse.at("file");
    let file = File::create(&path).unwrap();
    let mut written = 0;
    while let Ok(len) = file.write_at(&pattern(written, 64 << 10), written as u64) {
        written += len;
        assert!(written <= 13 * MIB);
    }
    assert!(written > 10 * MIB, "{written} bytes");
    (0..50).for_each(|_| _ = file.write_at(&[1; 5000], written as u64).unwrap_err());
    let bytes = read(&path);
    for (at, part) in (0..).step_by(64 << 10).zip(bytes.chunks(64 << 10)) {
        assert!(part == pattern(at, part.len()), "at {at}");
    }
    let err = fuse.err();
    // Reported again only after a minute, although each write of new data fails.
    let reports = err.matches("no more data can be moved to the spill file in").count();
    assert!((1..10).contains(&reports) && err.contains("File too large"), "{err}");
}

/// Folders and sizes that cannot be used. The error must name the folder and the reason, and nothing may be mounted.
#[test]
fn unsuitable_spill_folders_are_refused() {
    if !may_use_fuse() {
        return;
    }
    let (place, Some(disk)) = (TestFolder::new(), Disk::new()) else { return };
    let point = place.path("fuse");
    fs::create_dir(&point).unwrap();
    let refusal = |options: &[&str]| {
        let mut command = place.command(PAGEMILL);
        command.arg("mount").arg(&point).args(options);
        let end = finish(command, TIMEOUT);
        assert_eq!(end.code(), 2, "{}", end.err);
        assert!(!is_mounted(&point));
        end.err
    };
    let folder = disk.folder.to_str().unwrap();
    let err = refusal(&["--spill", folder]);
    assert!(err.contains("--fuse"), "{err}");
    let err = refusal(&["--fuse", "--spill-size", "1G"]);
    assert!(err.contains("--spill"), "{err}");
    let err = refusal(&["--fuse", "--spill", "/nowhere/at/all"]);
    assert!(err.contains("--spill /nowhere/at/all: No such file"), "{err}");
    if Path::new("/dev/shm").exists() {
        let err = refusal(&["--fuse", "--spill", "/dev/shm"]);
        assert!(err.contains("/dev/shm: is on a tmpfs, which is in memory itself"), "{err}");
    }
    let err = refusal(&["--fuse", "--spill", point.to_str().unwrap()]);
    assert!(err.contains("lies in the mount point"), "{err}");
    let err = refusal(&["--fuse", "--spill", "/dev/null"]);
    assert!(err.contains("--spill /dev/null: is no folder"), "{err}");
    let err = refusal(&["--fuse", "--spill", folder, "--spill-size", "1000T"]);
    assert!(err.contains("are free, not 1000 TiB (--spill-size)"), "{err}");
    let err = refusal(&["--fuse", "--spill", folder, "--spill-size", "0"]);
    assert!(err.contains("--spill-size is 0 B, but at least 1 MiB"), "{err}");
    let err = refusal(&["--fuse", "--spill", folder, "--size", "512K"]);
    assert!(err.contains("--spill needs a --size of 1 MiB or more, not 512 KiB"), "{err}");
}

/// The second segment of a file cannot be read from the store. A read of both through the kernel's readahead must fail
/// there, and must not make the file shorter: the kernel takes a short answer for the end of a file.
#[test]
fn a_failed_read_does_not_end_the_file() {
    let place = TestFolder::new();
    if !may_use_fuse() {
        return;
    }
    let store = Arc::new(FaultyStore::new(MemoryStore::new(Vec::new(), 512)));
    let fs = RamFs::builder("faulty").bytes(MIB as u64).spill(store.clone(), 8 * MIB as u64).build().unwrap();
    let point = place.path("mount");
    fs::create_dir(&point).unwrap();
    let mount = Mount::start(fs, &point, &Options { name: "faulty", threads: 2, allow_other: false }).unwrap();
    let unmount = Unmount(point.clone());
    let path = point.join("file");
    fs::write(&path, pattern(1, MIB)).unwrap();
    fs::write(point.join("other"), pattern(2, MIB)).unwrap();
    let file = File::open(&path).unwrap();
    // Brings only the first segment back into memory.
    rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).unwrap();
    rustix::fs::fadvise(&file, 0, None, Advice::Random).unwrap();
    file.read_exact_at(&mut [0; 4096], 0).unwrap();
    rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).unwrap();
    rustix::fs::fadvise(&file, 0, None, Advice::Normal).unwrap();
    store.set_faults(Faults { fails_after: Some(0), ..Faults::default() });
    let segment = 256 << 10;
    // A sequential reader has windows of readahead that cross the end of the segment.
    let (mut bytes, mut at) = (vec![0; 4096], 0);
    let error = loop {
        match file.read_at(&mut bytes, at) {
            Ok(len) => {
                assert!(len > 0, "the file ends at {at}");
                assert!(bytes[..len] == pattern(1, MIB)[at as usize..][..len], "other bytes at {at}");
                at += len as u64;
            }
            Err(error) => break error,
        }
    };
    assert_eq!((error.raw_os_error(), at), (Some(libc::EIO), segment));
    assert_eq!(file.metadata().unwrap().len(), MIB as u64);
    store.set_faults(Faults::default());
    assert!(read(&path) == pattern(1, MIB));
    drop((file, unmount));
    mount.wait();
}

/// Unmounts at the end of a test, also of one that fails.
struct Unmount(PathBuf);

impl Drop for Unmount {
    fn drop(&mut self) {
        let _ = pagemill_fuse::unmount(&self.0, false);
    }
}
