//! Full scans of the file system. A scan finds files that existed before the controller started, files whose close
//! events were lost, and marks that were set on closed files.

mod folder_names;

use crate::file_access::now_ns;
use crate::file_access::{self, BadMark, FileAccess, FileAttributes, FileSystemUsage};
use crate::policy::{Ancestor, Marks};
use crate::purge;
use crate::submissions::{ScanMessage, SubmissionQueue};
use folder_names::UnreadNames;
use pagemill_sys::task;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Minimum and maximum of the interval between two periodic scans.
const SCAN_INTERVAL: std::ops::Range<Duration> = Duration::from_secs(30)..Duration::from_secs(600);

/// Periodic scans may run for one part in `SCAN_TIME_DIVISOR` of the time.
const SCAN_TIME_DIVISOR: u32 = 100;

/// Minimum interval between the starts of two scans that the control loop requests because events were lost or a folder
/// is unknown (`is_wanted`).
const WANTED_INTERVAL: Duration = Duration::from_millis(500);

/// Minimum interval between the starts of two requested scans while a limit is near and no file is known that can be
/// purged (`is_urgent`).
const URGENT_INTERVAL: Duration = Duration::from_millis(20);

/// Scans that the control loop requested may run for one part in `WANTED_SCAN_TIME_DIVISOR` of the time.
const WANTED_SCAN_TIME_DIVISOR: u32 = 4;

/// Number of folder entries after which a scan sleeps. A scan also examines at most this many entries of a large folder
/// at a time.
const ENTRIES_PER_REST: usize = 256;
/// A scan has at most some 1,000 more names of a folder than this in memory. The number is large because before Linux
/// 6.6 the start of a batch costs time in proportion to the entries before it.
const NAMES_AT_A_TIME: usize = 64 * ENTRIES_PER_REST;
/// A scan sleeps this many times as long as it worked on the last `ENTRIES_PER_REST` entries. It does not sleep while a
/// purge waits for the scan. The sleeps leave locks and CPUs to users that walk over the same files.
const REST_FACTOR: u32 = 3;

/// Maximum depth of folders.
const MAX_FOLDER_DEPTH: usize = 256;

/// What a scan reports: a folder, a file, or a mark with an invalid value.
#[derive(Debug)]
pub enum ScanItem {
    Folder { inode: u64, parent: u64, name: OsString, above: Ancestor, read_at: Instant },
    File { folder: u64, name: OsString, seen: FileAttributes, marks: Marks },
    Bad { path: PathBuf, mark: BadMark },
}

impl ScanItem {
    /// Returns folder, name and attributes of a file.
    pub fn file(&self) -> Option<(u64, &OsStr, &FileAttributes)> {
        match self {
            Self::File { folder, name, seen, .. } => Some((*folder, name, seen)),
            Self::Folder { .. } | Self::Bad { .. } => None,
        }
    }
}

/// A folder that has not been scanned yet. Its `parent` is shared by all subfolders of the parent.
struct PendingFolder {
    parent: Option<Rc<PendingFolder>>,
    above: Ancestor,
    name: OsString,
    inode: u64,
    depth: usize,
}

impl PendingFolder {
    /// Returns whether a file in this folder needs no action, given its own marks, those of its ancestors, and its
    /// memory. This is true of most files.
    fn is_irrelevant(&self, name: &OsStr, seen: &FileAttributes, own: Marks) -> bool {
        let above = std::iter::successors(Some(self), |folder| folder.parent.as_deref()).map(|folder| folder.above);
        seen.effective_marks(own, above).needs_no_action(seen.held_bytes) && !purge::is_ours(name)
    }

    /// Opens the folder at its path. `None` if it was removed or moved.
    fn open(&self, access: &FileAccess, path: &Path) -> Option<OwnedFd> {
        let fd = access.open_folder(path).ok()?;
        file_access::attributes(&fd).is_ok_and(|seen| seen.inode == self.inode).then_some(fd)
    }

    fn path(&self) -> PathBuf {
        let mut names = vec![&self.name];
        let mut at = &self.parent;
        while let Some(folder) = at {
            names.push(&folder.name);
            at = &folder.parent;
        }
        names.into_iter().rev().collect()
    }
}

/// The files that a scan reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    All,
    /// All files except those that need no action.
    Relevant,
}

/// Walks the file system and passes its folders and files to `tell`, each folder before its contents. Skips:
///
/// - entries that are removed during the walk,
/// - the rest of a folder that is moved meanwhile,
/// - the contents of folders deeper than `MAX_FOLDER_DEPTH`.
///
/// Does not sleep while `is_hurried` is set.
///
/// The walk itself cannot distinguish a moved folder from a removed one. The event of the move requests another scan
/// ([`crate::file_table`]); without events, the next periodic scan finds the files.
///
/// No folder is open while the scan sleeps, or during a call of `tell`, which can wait. The handle of a deleted folder
/// can be opened, as if the folder existed, until the last descriptor is closed.
///
/// # Errors
///
/// Errors of opening the root.
pub fn scan(
    access: &FileAccess,
    which: Which,
    is_hurried: &AtomicBool,
    mut tell: impl FnMut(ScanItem),
) -> io::Result<()> {
    let (mut entries_done, mut rested) = (0, Instant::now());
    let mut rest_now_and_then = |entries: usize| {
        entries_done += entries;
        if entries_done >= ENTRIES_PER_REST && !is_hurried.load(Relaxed) {
            std::thread::sleep(rested.elapsed() * REST_FACTOR);
            (entries_done, rested) = (0, Instant::now());
        }
    };
    let mut found = Vec::new();
    let mut pending = vec![Rc::new(root_folder(access, &mut found)?)];
    found.drain(..).for_each(&mut tell);
    while let Some(folder) = pending.pop() {
        let path = folder.path();
        let mut unread = UnreadNames::new(max_entries(access));
        'folder: while let Some(fd) = folder.open(access, &path) {
            let Ok(batch) = unread.read_batch(&fd, NAMES_AT_A_TIME) else { break };
            drop(fd);
            if batch.is_empty() {
                break;
            }
            for names in batch.chunks(ENTRIES_PER_REST) {
                {
                    let Some(fd) = folder.open(access, &path) else { break 'folder };
                    for name in names {
                        pending.extend(examine_entry(&folder, &path, &fd, name, which, &mut found));
                    }
                }
                found.drain(..).for_each(&mut tell);
                rest_now_and_then(names.len());
            }
        }
    }
    Ok(())
}

/// Returns a number that is at least twice the number of entries in any folder: each entry counts as an inode, also a
/// further name of a file. Before Linux 6.6 a folder's newest entries come first, so a name is returned again for each
/// file that is created between two batches. A file system without a maximum of inodes does not count them.
fn max_entries(access: &FileAccess) -> u64 {
    let usage = access.usage().ok().filter(|usage| usage.max_inodes > 0);
    usage.map_or(u64::MAX, |usage| usage.inodes.saturating_mul(2))
}

/// Returns the root folder. Adds invalid marks to `found`.
fn root_folder(access: &FileAccess, found: &mut Vec<ScanItem>) -> io::Result<PendingFolder> {
    let root = access.open_folder(Path::new(""))?;
    let seen = file_access::attributes(&root)?;
    let marks = file_access::marks(&root, |mark| found.push(ScanItem::Bad { path: PathBuf::new(), mark }))?;
    let above = seen.as_ancestor(marks);
    Ok(PendingFolder { parent: None, above, name: OsString::new(), inode: access.root_inode(), depth: 0 })
}

/// Adds what a scan reports of one entry of a folder to `found`. Returns the entry if it is a folder to scan.
fn examine_entry(
    folder: &Rc<PendingFolder>,
    path: &Path,
    fd: &OwnedFd,
    name: &OsStr,
    which: Which,
    found: &mut Vec<ScanItem>,
) -> Option<Rc<PendingFolder>> {
    let (read_at, seen) = (Instant::now(), file_access::attributes_at(fd, name).ok()?);
    if !seen.is_file() && !seen.is_folder() {
        return None;
    }
    let marks =
        file_access::marks_at(fd, name, |mark| found.push(ScanItem::Bad { path: path.join(name), mark })).ok()?;
    let name = name.to_owned();
    if seen.is_file() {
        if which == Which::All || !folder.is_irrelevant(&name, &seen, marks) {
            found.push(ScanItem::File { folder: folder.inode, name, seen, marks });
        }
        return None;
    }
    let above = seen.as_ancestor(marks);
    found.push(ScanItem::Folder { inode: seen.inode, parent: folder.inode, name: name.clone(), above, read_at });
    debug_assert!(folder.depth <= MAX_FOLDER_DEPTH);
    let (inode, depth) = (seen.inode, folder.depth + 1);
    let pending = PendingFolder { parent: Some(folder.clone()), above, name, inode, depth };
    (folder.depth < MAX_FOLDER_DEPTH).then(|| Rc::new(pending))
}

/// Schedules scans and runs each in a thread of its own. The interval between periodic scans doubles while the usage of
/// the file system does not change, up to ten minutes.
pub struct Scanning {
    is_running: bool,
    /// Set while a purge waits for the current scan, so that the scan does not sleep.
    is_hurried: Arc<AtomicBool>,
    is_wanted: bool,
    began: Instant,
    began_ns: i64,
    next_at: Instant,
    interval: Duration,
    /// When the last completed scan began.
    results_began: Instant,
    /// How long the last completed scan took.
    scan_duration: Duration,
    /// Usage of the file system at the end of the last scan.
    usage: FileSystemUsage,
}

impl Scanning {
    pub fn new(usage: FileSystemUsage) -> Self {
        let now = Instant::now();
        Self {
            is_running: false,
            is_hurried: Arc::default(),
            is_wanted: false,
            began: now,
            began_ns: 0,
            next_at: now + SCAN_INTERVAL.start,
            interval: SCAN_INTERVAL.start,
            results_began: now,
            scan_duration: Duration::ZERO,
            usage,
        }
    }

    pub fn is_running(&self) -> bool {
        self.is_running
    }

    /// Returns the age of the results of the last scan: the time since the last completed scan began.
    pub fn age(&self) -> Duration {
        self.results_began.elapsed()
    }

    /// Returns when the current or last scan began.
    pub fn began(&self) -> Instant {
        self.began
    }

    /// Returns when the current or last scan began, in nanoseconds since 1970.
    pub fn began_ns(&self) -> i64 {
        self.began_ns
    }

    /// Sets whether the current and later scans skip their sleeps.
    pub fn hurry(&self, is_hurried: bool) {
        self.is_hurried.store(is_hurried, Relaxed);
    }

    /// Starts a scan if none is running and one is due. A periodic scan is due after the interval. A scan for which a
    /// purge waits (`is_waited_for`) is due at once. A requested scan (`is_wanted`) is due when the last scan began
    /// long enough ago, which is sooner if it is urgent.
    pub fn start_if_due(
        &mut self,
        access: &Arc<FileAccess>,
        submissions: &Arc<SubmissionQueue>,
        is_wanted: bool,
        is_urgent: bool,
        is_waited_for: bool,
    ) {
        self.is_wanted |= is_wanted;
        let now = Instant::now();
        let pause = if is_urgent { URGENT_INTERVAL } else { WANTED_INTERVAL };
        let pause = pause.max(self.scan_duration * WANTED_SCAN_TIME_DIVISOR);
        let is_due = now >= self.next_at || is_waited_for || (self.is_wanted && now >= self.began + pause);
        if self.is_running || !is_due {
            return;
        }
        (self.is_running, self.is_wanted) = (true, false);
        (self.began, self.began_ns) = (now, now_ns());
        let (access, submissions, is_hurried) = (access.clone(), submissions.clone(), self.is_hurried.clone());
        let work = move || {
            const BATCH: usize = 512;
            let mut batch = Vec::new();
            let _ = scan(&access, Which::Relevant, &is_hurried, |found| {
                batch.push(ScanMessage::ScanItem(found));
                if batch.len() == BATCH {
                    submissions.send_scan_messages(&mut batch);
                }
            });
            batch.push(ScanMessage::ScanEnded);
            submissions.send_scan_messages(&mut batch);
        };
        if task::spawn(c"scan", work).is_err() {
            self.is_running = false;
            self.next_at = now + self.interval;
        }
    }

    /// Records the end of the current scan and schedules the next.
    pub fn end(&mut self, usage: FileSystemUsage) {
        debug_assert!(self.is_running, "a scan ends once");
        self.is_running = false;
        (self.results_began, self.scan_duration) = (self.began, self.began.elapsed());
        let interval = if self.usage == usage { self.interval * 2 } else { SCAN_INTERVAL.start };
        self.interval =
            interval.max(self.scan_duration * SCAN_TIME_DIVISOR).clamp(SCAN_INTERVAL.start, SCAN_INTERVAL.end);
        debug_assert!((SCAN_INTERVAL.start..=SCAN_INTERVAL.end).contains(&self.interval));
        self.usage = usage;
        self.next_at = Instant::now() + self.interval;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};

    /// Returns whether this process has `folder` or a folder below it open.
    fn is_open(folder: &Path) -> bool {
        let links = fs::read_dir("/proc/self/fd").unwrap().filter_map(|link| fs::read_link(link.ok()?.path()).ok());
        links.into_iter().any(|target| target.starts_with(folder))
    }

    /// A folder has more entries than are examined at a time. All must be reported once. While an entry is reported,
    /// the folder must not be open.
    #[test]
    fn no_folder_is_open_while_entries_are_reported() {
        let Ok(place) = tempfile::tempdir_in("/dev/shm") else { return println!("skipped: no /dev/shm") };
        let large = place.path().join("large");
        fs::create_dir_all(large.join("below")).unwrap();
        fs::write(large.join("below/file"), "x").unwrap();
        (0..3 * ENTRIES_PER_REST).for_each(|index| fs::write(large.join(index.to_string()), "x").unwrap());
        let access = FileAccess::of_root(File::open(place.path()).unwrap().into()).unwrap();
        let (mut files, mut folders) = (Vec::new(), Vec::new());
        scan(&access, Which::All, &AtomicBool::new(false), |found| {
            assert!(!is_open(&large), "a folder is open");
            match found {
                ScanItem::File { name, .. } => files.push(name),
                ScanItem::Folder { name, .. } => folders.push(name),
                ScanItem::Bad { .. } => panic!("no mark is invalid"),
            }
        })
        .unwrap();
        files.sort();
        files.dedup();
        assert_eq!((files.len(), folders), (3 * ENTRIES_PER_REST + 1, vec!["large".into(), "below".into()]));
    }

    /// A folder has more names than are read at a time. While its files are reported, the reported ones are deleted and
    /// as many others are created. Each of the first files must be reported once, the scan must end, and the folder
    /// must not be open in between.
    #[test]
    fn a_large_folder_is_scanned_while_it_changes() {
        const FILES: usize = 2 * NAMES_AT_A_TIME + 1;
        let Ok(place) = tempfile::tempdir_in("/dev/shm") else { return println!("skipped: no /dev/shm") };
        let large = place.path().join("large");
        fs::create_dir(&large).unwrap();
        (0..FILES).for_each(|index| drop(File::create(large.join(format!("old-{index}"))).unwrap()));
        let access = FileAccess::of_root(File::open(place.path()).unwrap().into()).unwrap();
        let (mut files, mut reported) = (Vec::new(), 0);
        scan(&access, Which::All, &AtomicBool::new(true), |found| {
            let Some((_, name, _)) = found.file() else { return };
            assert!(reported % ENTRIES_PER_REST != 0 || !is_open(&large), "a folder is open");
            fs::remove_file(large.join(name)).unwrap();
            File::create(large.join(format!("new-{reported}"))).unwrap();
            files.extend(name.to_str().unwrap().starts_with("old-").then(|| name.to_owned()));
            reported += 1;
        })
        .unwrap();
        let count = files.len();
        files.sort();
        files.dedup();
        assert_eq!(files.len(), count, "a file was reported twice");
        match pagemill_sys::process::kernel_release() {
            release if release < (6, 6) => println!("skipped: {} files were skipped", FILES - count),
            _ => assert_eq!(count, FILES, "a file was skipped"),
        }
    }
}
