//! Finds the files that processes of given memory groups have open or mapped in one file system, and the memory groups
//! that are charged for the pages of these files.
//!
//! The result shows which groups write to the file system, even before their processes close a file. Requires root, to
//! inspect other processes and pages. Opens only files of this file system, which never wait for a device or a network.

use crate::file_access::FileAccess;
use pagemill_sys::pages;
use rustix::fs::{self, CWD, Mode, OFlags};
use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Time limit of one call of [`charged_memory`]. Each call examines at least one process. The caller can continue with
/// the next process in another call.
const CALL_TIME_LIMIT: Duration = Duration::from_millis(3);

/// Maximum number of files examined per process.
const MAX_FILES_PER_PROCESS: usize = 1024;

/// Maximum number of pages of a file whose charged group is read.
const MAX_SAMPLED_PAGES: usize = 8;

/// Result of [`charged_memory`].
#[derive(Clone, Debug, Default)]
pub struct ChargedMemory {
    /// Memory of the open files in bytes, by the inode of the charged group's cgroup folder.
    pub bytes: HashMap<u64, u64>,
    /// Whether every process was examined.
    pub is_complete: bool,
    /// Number of processes examined.
    pub processes: usize,
}

/// Examines the processes of the groups with these cgroup folders, starting with the process at index `from`.
pub fn charged_memory(access: &FileAccess, folders: &[String], from: usize) -> ChargedMemory {
    charged_within(CALL_TIME_LIMIT, (access.root(), access.device()), folders, from)
}

/// A descriptor of the root folder of the examined file system, and its device number.
type FileSystem<'a> = (BorrowedFd<'a>, u64);

fn charged_within(time_limit: Duration, of: FileSystem<'_>, folders: &[String], from: usize) -> ChargedMemory {
    let begun = Instant::now();
    let procs = folders.iter().filter_map(|folder| std::fs::read_to_string(format!("{folder}/cgroup.procs")).ok());
    let mut pids: Vec<u32> = procs.flat_map(|text| text.lines().flat_map(str::parse).collect::<Vec<_>>()).collect();
    let from = if pids.is_empty() { 0 } else { from % pids.len() };
    pids.rotate_left(from);
    let (mut found, mut seen) = (ChargedMemory::default(), HashSet::new());
    for pid in &pids {
        // At least one process is examined, even if the time limit has passed before, as it may on a busy machine.
        if found.processes > 0 && begun.elapsed() > time_limit {
            return found;
        }
        for file in open_paths(*pid, of.1) {
            add_file_memory(&file, of, &mut seen, &mut found.bytes);
        }
        found.processes += 1;
    }
    debug_assert!(found.processes == pids.len(), "each process was examined");
    found.is_complete = true;
    found
}

/// Returns paths below `/proc` of the files in the file system that a process has open or mapped. Returns none
/// if the process does not see the file system mounted.
fn open_paths(pid: u32, device: u64) -> Vec<PathBuf> {
    let (major, minor) = (fs::major(device), fs::minor(device));
    // The text is read as bytes: there are many lines, and not all are UTF-8.
    let read = |name: &str| std::fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
    let mounts = read("mountinfo");
    let number = format!("{major}:{minor}");
    let mounts: HashSet<&[u8]> = lines(&mounts).filter_map(|line| mount_id(line, number.as_bytes())).collect();
    if mounts.is_empty() {
        return Vec::new();
    }
    let mut found = Vec::new();
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().filter_map(Result::ok);
    for name in entries.filter_map(|entry| entry.file_name().into_string().ok()).take(MAX_FILES_PER_PROCESS) {
        let info = read(&format!("fdinfo/{name}"));
        let mount = lines(&info).find_map(|line| line.strip_prefix(b"mnt_id:")).map(<[u8]>::trim_ascii);
        if mount.is_some_and(|mount| mounts.contains(mount)) {
            found.push(format!("/proc/{pid}/fd/{name}").into());
        }
    }
    let number = format!("{major:02x}:{minor:02x}");
    let maps = read("maps");
    let ranges = lines(&maps).filter_map(|line| mapped_range(line, number.as_bytes())).take(MAX_FILES_PER_PROCESS);
    found.extend(ranges.map(|range| format!("/proc/{pid}/map_files/{range}").into()));
    found
}

/// Splits a text into its lines.
fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|byte| *byte == b'\n')
}

/// Parses a line of `mountinfo`. Returns the mount id if the mount is of the device `device`, else `None`.
fn mount_id<'line>(line: &'line [u8], device: &[u8]) -> Option<&'line [u8]> {
    let mut words = line.split(|byte| *byte == b' ');
    let id = words.next()?;
    (words.nth(1)? == device).then_some(id)
}

/// Parses a line of `maps`. Returns the address range if the mapping is of the device `device`, else `None`.
fn mapped_range(line: &[u8], device: &[u8]) -> Option<String> {
    let mut words = line.split(|byte| *byte == b' ');
    let range = std::str::from_utf8(words.next()?).ok()?;
    (words.nth(2)? == device).then(|| range.to_owned())
}

/// Adds a file's memory to the groups charged for its pages, in proportion to the sampled pages of each group. Counts
/// each file once.
fn add_file_memory(path: &PathBuf, of: FileSystem<'_>, seen: &mut HashSet<u64>, bytes: &mut HashMap<u64, u64>) {
    let Ok(file) = fs::openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) else { return };
    let is_of_device = fs::fstat(&file).is_ok_and(|stat| stat.st_dev == of.1);
    // An open of the path below `/proc` could wait for this thread, since it goes through the users' mount
    // (`open_throttle`).
    let Ok(file) = pages::open_through(of.0, file.as_fd()) else { return };
    let Ok(seen_file) = crate::file_access::attributes(&file) else { return };
    if !is_of_device || !seen_file.is_file() || seen_file.held_bytes == 0 || !seen.insert(seen_file.inode) {
        return;
    }
    let groups = pages::charged_groups(file.as_fd(), seen_file.len_bytes, MAX_SAMPLED_PAGES).unwrap_or_default();
    for group in &groups {
        *bytes.entry(*group).or_default() += seen_file.held_bytes / groups.len() as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    /// `mount_id` and `mapped_range` must return a value only for lines of the given device.
    #[test]
    fn lines_of_other_devices_are_ignored() {
        let mount = b"36 35 0:79 / /mnt/a rw - tmpfs pagemill rw";
        assert_eq!(mount_id(mount, b"0:79"), Some(&b"36"[..]));
        assert_eq!((mount_id(mount, b"0:7"), mount_id(b"", b"0:79")), (None, None));
        let map = b"7f0000000000-7f0000200000 rw-s 00000000 00:4f 12                         /mnt/a/file";
        assert_eq!(mapped_range(map, b"00:4f").as_deref(), Some("7f0000000000-7f0000200000"));
        assert_eq!(mapped_range(map, b"00:50"), None);
    }

    /// An open file must count for this process's group on its own file system and on no other. A group without
    /// processes must have no open files.
    #[test]
    fn open_files_are_found() {
        let Ok(folder) = tempfile::tempdir_in("/dev/shm") else { return println!("skipped: no /dev/shm") };
        let path = folder.path().join("file");
        std::fs::write(&path, vec![1u8; 1 << 20]).unwrap();
        let file = std::fs::File::open(&path).unwrap();
        let metadata = file.metadata().unwrap();
        let Ok(groups) = pages::charged_groups(file.as_fd(), metadata.len(), MAX_SAMPLED_PAGES) else {
            return println!("skipped: page charges cannot be read here");
        };
        let group = folder.path().join("group");
        std::fs::create_dir(&group).unwrap();
        std::fs::write(group.join("cgroup.procs"), format!("{}\n", std::process::id())).unwrap();
        // Even with a time limit of zero, one process must be examined.
        let root = std::fs::File::open(folder.path()).unwrap();
        let folders = [group.to_string_lossy().into_owned()];
        let of = |device: u64| charged_within(Duration::ZERO, (root.as_fd(), device), &folders, 5);
        // Parallel tests may have files open there, too, so the sum can be larger.
        assert!(of(metadata.dev()).bytes[&groups[0]] >= metadata.blocks() * 512);
        let other = of(std::fs::metadata("/proc/self").unwrap().dev());
        assert!(other.bytes.is_empty() && other.is_complete && other.processes == 1);
        std::fs::write(group.join("cgroup.procs"), "").unwrap();
        assert!(of(metadata.dev()).bytes.is_empty());
    }
}
