//! Full scans of the file system. A scan finds files that existed before the controller started, files whose close
//! events were lost, and marks that were set on closed files.

use crate::file_access::now_ns;
use crate::file_access::{self, BadMark, FileAccess, FileAttributes, FileSystemUsage};
use crate::policy::{self, Ancestor, Marks};
use crate::purge;
use crate::submissions::{ScanMessage, SubmissionQueue};
use pagemill_sys::task;
use rustix::fs::Dir;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Minimum and maximum of the interval between two periodic scans.
const SCAN_EVERY: std::ops::Range<Duration> = Duration::from_secs(30)..Duration::from_secs(600);

/// Periodic scans may run for 1/`SCAN_TIME_DIVISOR` of the time.
const SCAN_TIME_DIVISOR: u32 = 100;

/// Minimum interval between the starts of two scans that the control loop requests because events were lost or a folder
/// is unknown (`is_wanted`).
const WANTED_PAUSE: Duration = Duration::from_millis(500);

/// This interval while a limit is near and no file is known that can be purged (`is_urgent`).
const URGENT_PAUSE: Duration = Duration::from_millis(20);

/// Scans that the control loop requested may run for 1/`WANTED_SCAN_TIME_DIVISOR` of the time.
const WANTED_SCAN_TIME_DIVISOR: u32 = 4;

/// After each `REST_AFTER` entries, a scan sleeps `REST_TIMES` as long as it worked on these entries. It does not sleep
/// while a purge waits for it. The sleeps leave locks and CPUs to users that walk over the same files.
const REST_AFTER: u32 = 256;
const REST_TIMES: u32 = 3;

/// Maximum depth of folders.
const MAX_DEPTH: usize = 256;

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
        let marks = policy::effective_marks(own.trusted(seen.is_writable_by_others()), seen.owner, above);
        marks.needs_no_action(seen.held_bytes) && !purge::is_ours(name)
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
    /// Without files that need no action.
    Relevant,
}

/// Walks the file system and passes its folders and files to `tell`, each folder before its contents. Skips entries
/// that are removed during the walk, and the contents of folders deeper than `MAX_DEPTH`. Does not sleep while
/// `is_hurried` is set.
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
    let mut rest_now_and_then = || {
        entries_done += 1;
        if entries_done % REST_AFTER == 0 && !is_hurried.load(Relaxed) {
            std::thread::sleep(rested.elapsed() * REST_TIMES);
            rested = Instant::now();
        }
    };
    let root = access.open_folder(Path::new(""))?;
    let seen = file_access::attributes(&root)?;
    let marks = file_access::marks(&root, |mark| tell(ScanItem::Bad { path: PathBuf::new(), mark }))?;
    let above = Ancestor { marks, owner: seen.owner, is_open_to_others: seen.is_open_to_others() };
    let inode = access.root_inode();
    let mut open = vec![Rc::new(PendingFolder { parent: None, above, name: OsString::new(), inode, depth: 0 })];
    while let Some(folder) = open.pop() {
        let path = folder.path();
        let Ok(fd) = access.open_folder(&path) else { continue };
        let Ok(entries) = Dir::read_from(&fd) else { continue };
        for entry in entries.filter_map(Result::ok) {
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name == "." || name == ".." {
                continue;
            }
            rest_now_and_then();
            let (read_at, Ok(seen)) = (Instant::now(), file_access::attributes_at(&fd, name)) else { continue };
            if !seen.is_file() && !seen.is_folder() {
                continue;
            }
            let bad = |mark| tell(ScanItem::Bad { path: path.join(name), mark });
            let Ok(marks) = file_access::marks_at(&fd, name, bad) else { continue };
            let name = name.to_owned();
            if seen.is_file() {
                if which == Which::All || !folder.is_irrelevant(&name, &seen, marks) {
                    tell(ScanItem::File { folder: folder.inode, name, seen, marks });
                }
                continue;
            }
            let above = Ancestor { marks, owner: seen.owner, is_open_to_others: seen.is_open_to_others() };
            tell(ScanItem::Folder { inode: seen.inode, parent: folder.inode, name: name.clone(), above, read_at });
            debug_assert!(folder.depth <= MAX_DEPTH);
            if folder.depth < MAX_DEPTH {
                open.push(Rc::new(PendingFolder {
                    parent: Some(folder.clone()),
                    above,
                    name,
                    inode: seen.inode,
                    depth: folder.depth + 1,
                }));
            }
        }
    }
    Ok(())
}

/// Schedules scans and runs each in a thread of its own. The interval between periodic scans doubles while the usage
/// does not change, up to ten minutes.
pub struct Scanning {
    is_running: bool,
    /// Set while a purge waits for the current scan, so that the scan does not sleep.
    is_hurried: Arc<AtomicBool>,
    is_wanted: bool,
    began: Instant,
    began_ns: i64,
    next_at: Instant,
    interval: Duration,
    /// When the last completed scan began, and how long it took.
    results_began: Instant,
    scan_duration: Duration,
    /// Usage at the end of the last scan.
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
            next_at: now + SCAN_EVERY.start,
            interval: SCAN_EVERY.start,
            results_began: now,
            scan_duration: Duration::ZERO,
            usage,
        }
    }

    pub fn is_running(&self) -> bool {
        self.is_running
    }

    /// Returns the age of the results: the time since the last completed scan began.
    pub fn age(&self) -> Duration {
        self.results_began.elapsed()
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
        let pause = if is_urgent { URGENT_PAUSE } else { WANTED_PAUSE };
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
        let interval = if self.usage == usage { self.interval * 2 } else { SCAN_EVERY.start };
        self.interval = interval.max(self.scan_duration * SCAN_TIME_DIVISOR).clamp(SCAN_EVERY.start, SCAN_EVERY.end);
        debug_assert!((SCAN_EVERY.start..=SCAN_EVERY.end).contains(&self.interval));
        self.usage = usage;
        self.next_at = Instant::now() + self.interval;
    }
}
