//! The state of the files, and how one of them is purged.

use crate::control_loop::say;
use crate::file_access::{self, FileAccess, Seen};
use crate::folders::Folders;
use crate::groups::{GroupId, Groups, UNKNOWN};
use crate::index::{File, Index, PurgePart};
use crate::pagework::PageWork;
use crate::policy::{self, Above, Marks, Volatile};
use crate::purge::{self, PurgeOutcome, Target};
use crate::scan::ScanItem;
use crate::status::Counts;
use pagemill_sys::fanotify::Handle;
use pagemill_sys::pages;
use rustix::fs::OFlags;
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// How long a closed file waits before the worker examines its pages. Many files are reopened at once, and a volatile
/// file may be purged soon, which the worker would block.
const DELAY: Duration = Duration::from_millis(200);
const VOLATILE_DELAY: Duration = Duration::from_millis(500);

/// Maximum age of folder marks that a scan may rely on.
const MARKS_LAST: Duration = Duration::from_millis(100);

/// Maximum number of folders open at a time.
const MAX_OPEN: usize = 32;

/// Maximum number of volatile files that are checked again for a status request.
const MAX_LOOKED_AT: usize = 1024;

/// Maximum number of paths with bad marks that are reported.
const MAX_TOLD: usize = 100;

/// Smaller files are too many to read each one's own marks when it is closed.
const OWN_MARKS_FROM_BYTES: u64 = 64 << 10;

/// A folder of the current batch of events, and the marks on the path to it.
struct OpenFolder {
    inode: u64,
    fd: OwnedFd,
    above: Vec<Above>,
}

/// Files, folders, groups, and the pages to work on.
pub struct FileTable {
    access: Arc<FileAccess>,
    folders: Folders,
    pub index: Index,
    pub groups: Groups,
    pub pages: PageWork,
    pub counts: Counts,
    /// The state is incomplete, and a full scan is needed.
    pub wants_scan: bool,
    /// The worker had a file open that was to be purged. A retry shortly later can succeed.
    pub met_worker: bool,
    /// Memory of the files that were closed.
    pub closed_bytes: u64,
    /// Files that the current scan has found.
    seen: HashSet<u64>,
    batch_began: Instant,
    /// Folders of the present batch of events.
    open: HashMap<u64, OpenFolder>,
    /// Process and group of the previous close.
    last_writer: Option<(u32, GroupId)>,
    own_pid: u32,
    own_group: GroupId,
    told: HashSet<PathBuf>,
}

/// Returns the current time in the form of file times.
pub fn now_ns() -> i64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_nanos()).unwrap_or(i64::MAX)
}

impl FileTable {
    /// Creates an empty table. `worker` is the command line of the worker process.
    pub fn new(access: Arc<FileAccess>, mut groups: Groups, worker: Vec<OsString>) -> Self {
        let own_group = groups.of_self();
        // Without permission to read page charges, events carry no process id either. All writers then count as this
        // group.
        if !pages::may_ask_for_group() {
            groups.trust(own_group);
        }
        Self {
            folders: Folders::new(access.root_inode()),
            index: Index::default(),
            pages: PageWork::new(worker),
            counts: Counts::default(),
            wants_scan: false,
            met_worker: false,
            closed_bytes: 0,
            seen: HashSet::new(),
            batch_began: Instant::now(),
            open: HashMap::new(),
            last_writer: None,
            own_pid: std::process::id(),
            own_group,
            told: HashSet::new(),
            access,
            groups,
        }
    }

    /// Records that the kernel's event queue overflowed.
    pub fn lost_events(&mut self) {
        self.counts.events_lost += 1;
        self.wants_scan = true;
    }

    /// Starts a batch of events; each folder is opened once per batch.
    pub fn begin_batch(&mut self) {
        self.last_writer = None;
        self.batch_began = Instant::now();
    }

    /// Handles a renamed folder: every path below it changes.
    pub fn folder_moved(&mut self, folder: Handle<'_>, name: &OsStr) {
        self.open.clear();
        let parent = self.folders.find(&self.access, folder);
        let is_learned = parent.is_some_and(|parent| self.folders.learn_name(&self.access, parent, name));
        self.wants_scan |= !is_learned;
    }

    /// Handles a file that a process closed after writing, or renamed to this name.
    pub fn written(&mut self, folder: Handle<'_>, name: &OsStr, pid: u32) {
        let is_own = pid != 0 && (pid == self.own_pid || pid == self.pages.worker_pid());
        if is_own {
            return;
        }
        self.counts.events += 1;
        let opened = folder.inode().and_then(|inode| self.open.remove(&inode)).or_else(|| self.open_folder(folder));
        let Some(opened) = opened else {
            self.wants_scan = true;
            return;
        };
        self.observe(&opened, name, pid);
        if self.open.len() >= MAX_OPEN {
            self.open.clear();
        }
        self.open.insert(opened.inode, opened);
    }

    /// Ends the batch and closes its folders: a deleted folder that is open could still be opened by its handle.
    pub fn end_batch(&mut self) {
        self.open.clear();
    }

    /// Opens a folder of this batch and reads the marks that apply in it.
    fn open_folder(&mut self, handle: Handle<'_>) -> Option<OpenFolder> {
        let inode = self.folders.find(&self.access, handle)?;
        let fd = self.folders.open(&self.access, inode).ok()?;
        let above = self.folders.above(&self.access, inode, self.batch_began)?;
        Some(OpenFolder { inode, fd, above })
    }

    /// Records a written file.
    fn observe(&mut self, folder: &OpenFolder, name: &OsStr, pid: u32) {
        let Ok(seen) = file_access::look_at(&folder.fd, name) else { return };
        if !seen.is_file() {
            return;
        }
        let mut own = Marks::default();
        // There are many small files: a scan finds their own marks, and a purge reads them first.
        if seen.held_bytes >= OWN_MARKS_FROM_BYTES {
            let mut bad = Vec::new();
            let Ok(marks) = file_access::marks_at(&folder.fd, name, |mark| bad.push(mark)) else { return };
            own = marks;
            for mark in bad {
                let path = self.folders.path(folder.inode).unwrap_or_default().join(name);
                self.tell_bad(path, &mark.0);
            }
        }
        let marks =
            policy::effective(own.trusted(seen.is_writable_by_others()), seen.owner, folder.above.iter().copied());
        self.closed_bytes += seen.held_bytes;
        let group = self.group_of_writer(pid);
        self.groups.brought(group, seen.held_bytes);
        self.note(folder.inode, name, &seen, marks, group, now_ns());
    }

    /// Returns the group of the process that closed a file. Without process ids (in a user namespace) this is our own
    /// group.
    fn group_of_writer(&mut self, pid: u32) -> GroupId {
        if pid == 0 {
            return self.own_group;
        }
        match self.last_writer {
            Some((last, group)) if last == pid => group,
            _ => {
                let group = self.groups.of_process(pid);
                self.last_writer = Some((pid, group));
                group
            }
        }
    }

    fn tell_bad(&mut self, path: PathBuf, text: &str) {
        self.counts.bad_marks += 1;
        if self.told.len() < MAX_TOLD && self.told.insert(path.clone()) {
            // Any user can choose names; control characters must not reach a terminal.
            say(&format!("{}: {text}: ignored", path.to_string_lossy().escape_debug()));
        }
    }

    /// Records an item that a scan found.
    pub fn found(&mut self, found: ScanItem) {
        match found {
            ScanItem::Folder { inode, parent, name, above, read_at } => {
                self.folders.learn(inode, parent, &name, above, read_at);
            }
            ScanItem::Bad { path, mark } => self.tell_bad(path, &mark.0),
            ScanItem::File { folder, name, seen, marks } => {
                if purge::is_ours(&name) {
                    self.finish(folder, &name);
                    return;
                }
                let since = Instant::now().checked_sub(MARKS_LAST).unwrap_or(self.batch_began);
                let Some(above) = self.folders.above(&self.access, folder, since) else {
                    // The marks are unknown for now: the file stays until they are known.
                    self.index.remove(seen.inode);
                    return;
                };
                let marks = policy::effective(marks.trusted(seen.is_writable_by_others()), seen.owner, above);
                let known_ns = self.index.get(seen.inode).map(|file| file.used_ns);
                self.note(folder, &name, &seen, marks, UNKNOWN, known_ns.unwrap_or(0).max(seen.used_ns));
                if self.index.get(seen.inode).is_none() {
                    return;
                }
                // The file may have been removed since the scan found it.
                if known_ns.is_none() && !self.is_there(folder, &name, seen.inode) {
                    self.index.remove(seen.inode);
                    return;
                }
                self.seen.insert(seen.inode);
            }
        }
    }

    fn is_there(&mut self, folder: u64, name: &OsStr, inode: u64) -> bool {
        let folder = self.folders.open(&self.access, folder);
        folder.and_then(|folder| file_access::look_at(folder, name)).is_ok_and(|seen| seen.inode == inode)
    }

    /// Completes the purge of a file that a killed controller began.
    fn finish(&mut self, folder: u64, name: &OsStr) {
        let Ok(fd) = self.folders.open(&self.access, folder) else { return };
        let folders = RefCell::new(&mut self.folders);
        purge::finish(fd.as_fd(), name, |fd, seen| may_go(&folders, &self.access, folder, fd, seen));
    }

    /// Removes the files that the completed scan, begun at `began_ns`, did not find.
    pub fn forget_unseen(&mut self, began_ns: i64) {
        let seen = std::mem::take(&mut self.seen);
        self.index.retain(|inode, file| seen.contains(&inode) || file.used_ns >= began_ns);
        self.counts.scans += 1;
    }

    /// Gives the worker the jobs that are due, and takes its results.
    pub fn work_on_pages(&mut self) {
        let charged = |groups: &mut Groups, folder: &Path, name: &OsStr| {
            let group = self.access.open_folder(folder).ok().and_then(|folder| charged_group(groups, &folder, name));
            group.unwrap_or(UNKNOWN)
        };
        self.pages.work(&self.access, &self.folders, &mut self.groups, &mut self.counts, charged);
    }

    /// Records a file in the index of volatile files and in the queue of the worker.
    fn note(&mut self, folder: u64, name: &OsStr, seen: &Seen, marks: Marks, group: GroupId, used_ns: i64) {
        let known = self.index.get(seen.inode).map(|file| file.group).filter(|group| *group != UNKNOWN);
        let group = known.unwrap_or(group);
        let part = match marks.volatile.unwrap_or_default() {
            Volatile::Full => Some(PurgePart::Whole),
            Volatile::Partial => Some(PurgePart::Tail),
            Volatile::None => None,
        };
        match part.filter(|_| seen.held_bytes > 0) {
            Some(part) => {
                let file = File { folder, name: name.to_owned(), part, used_ns, held_bytes: seen.held_bytes, group };
                self.counts.not_indexed += u64::from(!self.index.insert(seen.inode, file));
            }
            None => drop(self.index.remove(seen.inode)),
        }
        let delay = if part.is_some() { VOLATILE_DELAY } else { DELAY };
        self.pages.note(folder, name, seen, marks.huge.unwrap_or_default(), group, delay);
    }

    /// Checks the volatile files again, if they are few: some may have been removed or have shrunk. Returns whether it
    /// did.
    pub fn look_again_at_volatile(&mut self) -> bool {
        if self.index.count() > MAX_LOOKED_AT {
            return false;
        }
        let mut last: Option<(u64, Option<OwnedFd>)> = None;
        for (folder, inode, name) in self.index.by_folder() {
            if last.as_ref().is_none_or(|(at, _)| *at != folder) {
                last = Some((folder, self.folders.open(&self.access, folder).ok()));
            }
            let Some((_, Some(fd))) = &last else {
                // The folder was moved: a scan finds its files at their new place.
                self.wants_scan = true;
                continue;
            };
            let seen = file_access::look_at(fd, &name).ok().filter(|seen| seen.inode == inode && seen.held_bytes > 0);
            let Some(file) = self.index.remove(inode) else { continue };
            if let Some(seen) = seen {
                self.index.insert(inode, File { held_bytes: seen.held_bytes, ..file });
            }
        }
        true
    }

    /// Returns the memory of volatile files that count for a limited group, or of all.
    pub fn held_bytes(&self, watch: Option<usize>) -> u64 {
        self.index.held_bytes(|group| watch.is_none_or(|watch| self.groups.helps(group, watch)))
    }

    /// Purges the least recently used file that helps. Returns the bytes freed, 0 if the file turned out to be in use.
    ///
    /// `None` if no such file was last used before `began_ns`. `watch`: only files charged below this limited group.
    pub fn purge_one(&mut self, watch: Option<usize>, want_bytes: u64, began_ns: i64) -> Option<u64> {
        let groups = &self.groups;
        let inode = self.index.oldest(|group| watch.is_none_or(|watch| groups.helps(group, watch)))?;
        // All other files were used or arrived after `began_ns`.
        self.index.get(inode).filter(|file| file.used_ns < began_ns)?;
        let file = self.index.remove(inode)?;
        self.pages.forget(inode);
        let Ok(folder) = self.folders.open(&self.access, file.folder) else {
            // The file's folder was moved.
            self.wants_scan = true;
            return Some(0);
        };
        if file.group == UNKNOWN
            && watch.is_some()
            && let Some(group) = charged_group(&mut self.groups, &folder, &file.name)
        {
            self.index.insert(inode, File { group, ..file });
            return Some(0);
        }
        let target = Target { folder: folder.as_fd(), name: &file.name, inode, part: file.part, used_ns: file.used_ns };
        let folders = RefCell::new(&mut self.folders);
        let may_go = |fd: &OwnedFd, seen: &Seen| may_go(&folders, &self.access, file.folder, fd, seen);
        match purge::purge(&target, want_bytes, may_go) {
            PurgeOutcome::Freed { bytes, left_bytes } => {
                let counts = &mut self.counts;
                let (files, sum) = match file.part {
                    PurgePart::Whole => (&mut counts.purged_files, &mut counts.purged_bytes),
                    PurgePart::Tail => (&mut counts.cut_files, &mut counts.cut_bytes),
                };
                (*files, *sum) = (*files + 1, *sum + bytes);
                if left_bytes > 0 {
                    self.index.insert(inode, File { held_bytes: left_bytes, used_ns: now_ns(), ..file });
                }
                Some(bytes)
            }
            PurgeOutcome::Used(used_ns) => {
                self.index.insert(inode, File { used_ns, ..file });
                Some(0)
            }
            PurgeOutcome::Open => {
                let is_worker = self.pages.is_given(inode);
                self.counts.spared_open += u64::from(!is_worker);
                self.met_worker |= is_worker;
                // The file is in use and moves to the end of the order. This purge does not retry a file that the
                // worker has open.
                let used_ns = if is_worker { began_ns.max(file.used_ns) } else { now_ns() };
                self.index.insert(inode, File { used_ns, ..file });
                Some(0)
            }
            PurgeOutcome::Gone => Some(0),
        }
    }
}

/// Returns the group charged for a file's first page, if it can be read and is known. `None` for a file that is open.
fn charged_group(groups: &mut Groups, folder: &OwnedFd, name: &OsStr) -> Option<GroupId> {
    let fd = file_access::open_file(folder, name, OFlags::RDONLY).ok()?;
    // Seeking for data takes the file's lock, which a slow writer can hold for long.
    pages::take_lease(fd.as_fd()).ok()?;
    let at = rustix::fs::seek(&fd, rustix::fs::SeekFrom::Data(0)).ok()?;
    let inode = pages::charged_group(fd.as_fd(), at).ok()?;
    Some(groups.of_inode(inode)).filter(|group| *group != UNKNOWN)
}

/// Returns whether an open file is volatile by its current marks.
fn may_go(folders: &RefCell<&mut Folders>, access: &FileAccess, folder: u64, fd: &OwnedFd, seen: &Seen) -> bool {
    let Ok(own) = file_access::marks(fd, |_| ()) else { return false };
    let Some(above) = folders.borrow_mut().above(access, folder, Instant::now()) else { return false };
    let marks = policy::effective(own.trusted(seen.is_writable_by_others()), seen.owner, above);
    marks.volatile.is_some_and(|volatile| volatile != Volatile::None)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The group of a file that is open elsewhere is not read: its lock may be held for long.
    #[test]
    fn open_files_are_not_asked() {
        let Ok(path) = tempfile::tempdir_in("/dev/shm") else { return println!("skipped: no /dev/shm") };
        let mut groups = Groups::new("");
        let own = groups.of_self();
        let folder: OwnedFd = std::fs::File::open(path.path()).unwrap().into();
        std::fs::write(path.path().join("file"), "text").unwrap();
        let mut asked = || charged_group(&mut groups, &folder, OsStr::new("file"));
        if own == UNKNOWN || asked().is_none() {
            return println!("skipped: page charges cannot be read here");
        }
        let writer = std::fs::File::options().append(true).open(path.path().join("file")).unwrap();
        assert_eq!(asked(), None);
        drop(writer);
        assert_eq!(asked(), Some(own));
    }
}
