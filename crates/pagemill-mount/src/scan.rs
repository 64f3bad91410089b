//! A look at everything: the only way to learn of what was there before, of what notification lost, and of marks that were
//! set on files afterwards.

use crate::door::{self, BadMark, Door, Fill, Seen};
use crate::inbox::{Inbox, Message};
use crate::ledger::now_ns;
use crate::policy::{Above, Marks};
use rustix::fs::Dir;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bounds of the time between two looks at everything.
const SCAN_EVERY: std::ops::Range<Duration> = Duration::from_secs(30)..Duration::from_secs(600);

/// A look at everything may take this part of the time.
const SCAN_SHARE: u32 = 100;

/// One that is wanted comes so soon after the last.
const WANTED_PAUSE: Duration = Duration::from_millis(500);

/// Deepest nesting that is followed.
const MAX_DEPTH: usize = 256;

/// Something that was found.
#[derive(Debug)]
pub enum Found {
    Folder { inode: u64, parent: u64, name: OsString, above: Above, read_at: Instant },
    File { folder: u64, name: OsString, seen: Seen, marks: Marks },
    Bad { path: PathBuf, mark: BadMark },
}

/// A folder that is still to be looked at: its name, and the way to it, which others share.
struct Place {
    parent: Option<Rc<Place>>,
    name: OsString,
    inode: u64,
    depth: usize,
}

impl Place {
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

/// Walks over everything below the root and tells it, a folder before what is in it. What vanishes meanwhile is passed over,
/// and so is what lies too deep.
///
/// # Errors
///
/// What opening the root says.
pub fn scan(door: &Door, mut tell: impl FnMut(Found)) -> io::Result<()> {
    door.open_folder(Path::new(""))?;
    let mut open = vec![Rc::new(Place { parent: None, name: OsString::new(), inode: door.root_inode(), depth: 0 })];
    while let Some(place) = open.pop() {
        let path = place.path();
        let Ok(fd) = door.open_folder(&path) else { continue };
        let Ok(entries) = Dir::read_from(&fd) else { continue };
        for entry in entries.filter_map(Result::ok) {
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name == "." || name == ".." {
                continue;
            }
            let (read_at, Ok(seen)) = (Instant::now(), door::look_at(&fd, name)) else { continue };
            if !seen.is_file() && !seen.is_folder() {
                continue;
            }
            let bad = |mark| tell(Found::Bad { path: path.join(name), mark });
            let Ok(marks) = door::marks_at(&fd, name, bad) else { continue };
            let name = name.to_owned();
            if seen.is_file() {
                tell(Found::File { folder: place.inode, name, seen, marks });
                continue;
            }
            let above = Above { marks, owner: seen.owner, is_open_to_others: seen.is_open_to_others() };
            tell(Found::Folder { inode: seen.inode, parent: place.inode, name: name.clone(), above, read_at });
            if place.depth < MAX_DEPTH {
                open.push(Rc::new(Place {
                    parent: Some(place.clone()),
                    name,
                    inode: seen.inode,
                    depth: place.depth + 1,
                }));
            }
        }
    }
    Ok(())
}

/// When everything is looked at: in a thread of its own, the seldomer the less happens.
pub struct Scanning {
    is_running: bool,
    is_wanted: bool,
    began: Instant,
    began_ns: i64,
    next: Instant,
    every: Duration,
    /// How full it was at the last.
    fill: Fill,
}

impl Scanning {
    pub fn new(fill: Fill) -> Self {
        let now = Instant::now();
        Self {
            is_running: false,
            is_wanted: false,
            began: now,
            began_ns: 0,
            next: now + SCAN_EVERY.start,
            every: SCAN_EVERY.start,
            fill,
        }
    }

    pub fn is_running(&self) -> bool {
        self.is_running
    }

    /// When the present one began, as the times of files are told.
    pub fn began_ns(&self) -> i64 {
        self.began_ns
    }

    /// Begins one if it is time, or if one `is_wanted` and the last was not just now, or if somebody waits for it.
    pub fn start_if_due(&mut self, door: &Arc<Door>, inbox: &Arc<Inbox>, is_wanted: bool, is_waited_for: bool) {
        self.is_wanted |= is_wanted;
        let now = Instant::now();
        let is_due = now >= self.next || is_waited_for || (self.is_wanted && now >= self.began + WANTED_PAUSE);
        if self.is_running || !is_due {
            return;
        }
        (self.is_running, self.is_wanted) = (true, false);
        (self.began, self.began_ns) = (now, now_ns());
        let (door, inbox) = (door.clone(), inbox.clone());
        let work = move || {
            const BATCH: usize = 512;
            let mut batch = Vec::new();
            let _ = scan(&door, |found| {
                batch.push(Message::Found(found));
                if batch.len() == BATCH {
                    inbox.send_found(&mut batch);
                }
            });
            batch.push(Message::ScanEnded);
            inbox.send_found(&mut batch);
        };
        if std::thread::Builder::new().name("scan".into()).spawn(work).is_err() {
            self.is_running = false;
            self.next = now + self.every;
        }
    }

    /// It has ended: when is the next?
    pub fn end(&mut self, fill: Fill) {
        self.is_running = false;
        let every = if self.fill == fill { self.every * 2 } else { SCAN_EVERY.start };
        self.every = every.max(self.began.elapsed() * SCAN_SHARE).clamp(SCAN_EVERY.start, SCAN_EVERY.end);
        self.fill = fill;
        self.next = Instant::now() + self.every;
    }
}
