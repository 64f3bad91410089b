//! A full scan of the file system. Finds files that existed before, files with lost events, and marks that were
//! set on closed files.

use crate::file_access::{self, BadMark, FileAccess, Fill, Seen};
use crate::file_table::now_ns;
use crate::policy::{self, Above, Marks};
use crate::purge;
use crate::submissions::{Message, SubmissionQueue};
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

/// Bounds of the interval between two scans.
const SCAN_EVERY: std::ops::Range<Duration> = Duration::from_secs(30)..Duration::from_secs(600);

/// A scan may take 1/`SCAN_SHARE` of the time.
const SCAN_SHARE: u32 = 100;

/// Minimum interval before a requested scan, and the part of the time that such scans may take.
const WANTED_PAUSE: Duration = Duration::from_millis(500);
const WANTED_SHARE: u32 = 4;

/// After `REST_AFTER` entries a scan that no request waits for pauses `REST_TIMES` as long as they took. Users' own
/// walks need the same locks and CPUs.
const REST_AFTER: u32 = 256;
const REST_TIMES: u32 = 3;

/// Maximum depth of folders.
const MAX_DEPTH: usize = 256;

/// An item that a scan found.
#[derive(Debug)]
pub enum ScanItem {
    Folder { inode: u64, parent: u64, name: OsString, above: Above, read_at: Instant },
    File { folder: u64, name: OsString, seen: Seen, marks: Marks },
    Bad { path: PathBuf, mark: BadMark },
}

/// A folder still to be scanned: its name, and its parent, which other entries share.
struct PendingFolder {
    parent: Option<Rc<PendingFolder>>,
    above: Above,
    name: OsString,
    inode: u64,
    depth: usize,
}

impl PendingFolder {
    /// Returns whether nothing is to be done with a file here, by its current marks. This holds for most files.
    fn leaves_alone(&self, name: &OsStr, seen: &Seen, own: Marks) -> bool {
        let above = std::iter::successors(Some(self), |place| place.parent.as_deref()).map(|place| place.above);
        let marks = policy::effective(own.trusted(seen.is_writable_by_others()), seen.owner, above);
        marks.leave_alone(seen.held_bytes) && !purge::is_ours(name)
    }

    fn path(&self) -> PathBuf {
        let mut names = vec![&self.name];
        let mut at = &self.parent;
        while let Some(place) = at {
            names.push(&place.name);
            at = &place.parent;
        }
        names.into_iter().rev().collect()
    }
}

/// Walks everything below the root and passes it to `tell`, a folder before its contents. Skips entries that vanish
/// meanwhile, files with which nothing is to be done, and folders that are too deep.
///
/// # Errors
///
/// Errors of opening the root.
pub fn scan(access: &FileAccess, is_hurried: &AtomicBool, mut tell: impl FnMut(ScanItem)) -> io::Result<()> {
    let (mut entries_done, mut rested) = (0, Instant::now());
    let mut rest_now_and_then = || {
        entries_done += 1;
        if entries_done % REST_AFTER == 0 && !is_hurried.load(Relaxed) {
            std::thread::sleep(rested.elapsed() * REST_TIMES);
            rested = Instant::now();
        }
    };
    let root = access.open_folder(Path::new(""))?;
    let seen = file_access::look(&root)?;
    let marks = file_access::marks(&root, |mark| tell(ScanItem::Bad { path: PathBuf::new(), mark }))?;
    let above = Above { marks, owner: seen.owner, is_open_to_others: seen.is_open_to_others() };
    let inode = access.root_inode();
    let mut open = vec![Rc::new(PendingFolder { parent: None, above, name: OsString::new(), inode, depth: 0 })];
    while let Some(place) = open.pop() {
        let path = place.path();
        let Ok(fd) = access.open_folder(&path) else { continue };
        let Ok(entries) = Dir::read_from(&fd) else { continue };
        for entry in entries.filter_map(Result::ok) {
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name == "." || name == ".." {
                continue;
            }
            rest_now_and_then();
            let (read_at, Ok(seen)) = (Instant::now(), file_access::look_at(&fd, name)) else { continue };
            if !seen.is_file() && !seen.is_folder() {
                continue;
            }
            let bad = |mark| tell(ScanItem::Bad { path: path.join(name), mark });
            let Ok(marks) = file_access::marks_at(&fd, name, bad) else { continue };
            let name = name.to_owned();
            if seen.is_file() {
                if !place.leaves_alone(&name, &seen, marks) {
                    tell(ScanItem::File { folder: place.inode, name, seen, marks });
                }
                continue;
            }
            let above = Above { marks, owner: seen.owner, is_open_to_others: seen.is_open_to_others() };
            tell(ScanItem::Folder { inode: seen.inode, parent: place.inode, name: name.clone(), above, read_at });
            if place.depth < MAX_DEPTH {
                open.push(Rc::new(PendingFolder {
                    parent: Some(place.clone()),
                    above,
                    name,
                    inode: seen.inode,
                    depth: place.depth + 1,
                }));
            }
        }
    }
    Ok(())
}

/// Schedules scans in a separate thread; less often while nothing changes.
pub struct Scanning {
    is_running: bool,
    /// A request waits for the current scan.
    is_hurried: Arc<AtomicBool>,
    is_wanted: bool,
    began: Instant,
    began_ns: i64,
    next: Instant,
    every: Duration,
    /// When the last completed scan began, and how long it took.
    looked: Instant,
    took: Duration,
    /// Usage at the last scan.
    fill: Fill,
}

impl Scanning {
    pub fn new(fill: Fill) -> Self {
        let now = Instant::now();
        Self {
            is_running: false,
            is_hurried: Arc::default(),
            is_wanted: false,
            began: now,
            began_ns: 0,
            next: now + SCAN_EVERY.start,
            every: SCAN_EVERY.start,
            looked: now,
            took: Duration::ZERO,
            fill,
        }
    }

    pub fn is_running(&self) -> bool {
        self.is_running
    }

    /// Returns the age of the last completed scan's results.
    pub fn age(&self) -> Duration {
        self.looked.elapsed()
    }

    /// Returns when the current scan began, in the form of file times.
    pub fn began_ns(&self) -> i64 {
        self.began_ns
    }

    /// Sets whether the current and later scans skip their pauses.
    pub fn hurry(&self, is_hurried: bool) {
        self.is_hurried.store(is_hurried, Relaxed);
    }

    /// Starts a scan if one is due, if one `is_wanted` and the last is old enough, or if a request waits for it.
    pub fn start_if_due(
        &mut self,
        access: &Arc<FileAccess>,
        submissions: &Arc<SubmissionQueue>,
        is_wanted: bool,
        is_waited_for: bool,
    ) {
        self.is_wanted |= is_wanted;
        let now = Instant::now();
        let pause = WANTED_PAUSE.max(self.took * WANTED_SHARE);
        let is_due = now >= self.next || is_waited_for || (self.is_wanted && now >= self.began + pause);
        if self.is_running || !is_due {
            return;
        }
        (self.is_running, self.is_wanted) = (true, false);
        (self.began, self.began_ns) = (now, now_ns());
        let (access, submissions, is_hurried) = (access.clone(), submissions.clone(), self.is_hurried.clone());
        let work = move || {
            const BATCH: usize = 512;
            let mut batch = Vec::new();
            let _ = scan(&access, &is_hurried, |found| {
                batch.push(Message::ScanItem(found));
                if batch.len() == BATCH {
                    submissions.send_found(&mut batch);
                }
            });
            batch.push(Message::ScanEnded);
            submissions.send_found(&mut batch);
        };
        if task::spawn(c"scan", work).is_err() {
            self.is_running = false;
            self.next = now + self.every;
        }
    }

    /// Ends the current scan and schedules the next.
    pub fn end(&mut self, fill: Fill) {
        self.is_running = false;
        (self.looked, self.took) = (self.began, self.began.elapsed());
        let every = if self.fill == fill { self.every * 2 } else { SCAN_EVERY.start };
        self.every = every.max(self.took * SCAN_SHARE).clamp(SCAN_EVERY.start, SCAN_EVERY.end);
        self.fill = fill;
        self.next = Instant::now() + self.every;
    }
}
