//! What is known of the files, and how one of them is purged.

use crate::door::{self, Door, Seen};
use crate::folders::Folders;
use crate::groups::{GroupId, Groups, UNKNOWN};
use crate::index::{File, Index, Part};
use crate::pagework::PageWork;
use crate::policy::{self, Above, Marks, Volatile};
use crate::purge::{self, Outcome, Target};
use crate::scan::Found;
use crate::status::Counts;
use crate::steward::say;
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

/// A file that was closed is left alone for so long before its pages are looked at: many are opened again at once, and a
/// volatile one may be purged soon, in which the worker would only be in the way.
const DELAY: Duration = Duration::from_millis(200);
const VOLATILE_DELAY: Duration = Duration::from_millis(500);

/// Marks of folders that a look at everything goes by may be so old.
const MARKS_LAST: Duration = Duration::from_millis(100);

/// Most folders that are open at a time.
const MAX_OPEN: usize = 32;

/// Most paths that a bad mark was told of.
const MAX_TOLD: usize = 100;

/// Files that hold less are too many for each to be asked for its own marks when it is closed.
const OWN_MARKS_FROM_BYTES: u64 = 64 << 10;

/// A folder of the present batch of events, and what is marked on the way to it.
struct OpenFolder {
    inode: u64,
    fd: OwnedFd,
    above: Vec<Above>,
}

/// Files, folders, groups, and what is to be done with pages.
pub struct Ledger {
    door: Arc<Door>,
    folders: Folders,
    pub index: Index,
    pub groups: Groups,
    pub pages: PageWork,
    pub counts: Counts,
    /// Something is not known that a look at everything would show.
    pub wants_scan: bool,
    /// A file could not be purged because the worker had it: a moment later it can.
    pub met_worker: bool,
    /// Files that the present look at everything has found.
    seen: HashSet<u64>,
    batch_began: Instant,
    /// Folders of the present batch of events.
    open: HashMap<u64, OpenFolder>,
    /// Who closed the file before.
    last_writer: Option<(u32, GroupId)>,
    own_pid: u32,
    own_group: GroupId,
    told: HashSet<PathBuf>,
}

/// Now, as the times of files are told.
pub fn now_ns() -> i64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_nanos()).unwrap_or(i64::MAX)
}

impl Ledger {
    /// Knows nothing yet. `worker` is the program that looks after pages.
    pub fn new(door: Arc<Door>, mut groups: Groups, worker: Vec<OsString>) -> Self {
        Self {
            folders: Folders::new(door.root_inode()),
            index: Index::default(),
            pages: PageWork::new(worker),
            counts: Counts::default(),
            wants_scan: false,
            met_worker: false,
            seen: HashSet::new(),
            batch_began: Instant::now(),
            open: HashMap::new(),
            last_writer: None,
            own_pid: std::process::id(),
            own_group: groups.of_self(),
            told: HashSet::new(),
            door,
            groups,
        }
    }

    /// The kernel had no room for events.
    pub fn lost_events(&mut self) {
        self.counts.events_lost += 1;
        self.wants_scan = true;
    }

    /// Events follow that belong together: a folder is opened once for them.
    pub fn begin_batch(&mut self) {
        self.open.clear();
        self.last_writer = None;
        self.batch_began = Instant::now();
    }

    /// A folder has got a new name, and all below it new paths.
    pub fn folder_moved(&mut self, folder: Handle<'_>, name: &OsStr) {
        self.open.clear();
        let parent = self.folders.find(&self.door, folder);
        let is_learned = parent.is_some_and(|parent| self.folders.learn_name(&self.door, parent, name));
        self.wants_scan |= !is_learned;
    }

    /// A process closed a file that it had open for writing, or gave one this name.
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

    /// Opens a folder of this batch, and reads what holds in it.
    fn open_folder(&mut self, handle: Handle<'_>) -> Option<OpenFolder> {
        let inode = self.folders.find(&self.door, handle)?;
        let fd = self.folders.open(&self.door, inode).ok()?;
        let above = self.folders.above(&self.door, inode, self.batch_began)?;
        Some(OpenFolder { inode, fd, above })
    }

    /// Takes note of a file that was written.
    fn observe(&mut self, folder: &OpenFolder, name: &OsStr, pid: u32) {
        let Ok(seen) = door::look_at(&folder.fd, name) else { return };
        if !seen.is_file() {
            return;
        }
        let mut own = Marks::default();
        // A small one's own marks are found by the look at everything, and read before it goes: there are many of them.
        if seen.held_bytes >= OWN_MARKS_FROM_BYTES {
            let mut bad = Vec::new();
            let Ok(marks) = door::marks_at(&folder.fd, name, |mark| bad.push(mark)) else { return };
            own = marks;
            for mark in bad {
                let path = self.folders.path(folder.inode).unwrap_or_default().join(name);
                self.tell_bad(path, &mark.0);
            }
        }
        let marks = policy::effective(trusted(own, &seen), seen.owner, folder.above.iter().copied());
        let group = self.group_of_writer(pid);
        self.note(folder.inode, name, &seen, marks, group, now_ns());
    }

    /// The group of who closed a file. Where nobody says who it was (in a namespace of its own) all come from here.
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
            // Names are anybody's; what they hold must not reach a terminal.
            say(&format!("{}: {text}: it is passed over", path.to_string_lossy().escape_debug()));
        }
    }

    /// Takes note of what a look at everything found.
    pub fn found(&mut self, found: Found) {
        match found {
            Found::Folder { inode, parent, name, above, read_at } => {
                self.folders.learn(inode, parent, &name, above, read_at);
            }
            Found::Bad { path, mark } => self.tell_bad(path, &mark.0),
            Found::File { folder, name, seen, marks } => {
                if purge::is_ours(&name) {
                    self.finish(folder, &name);
                    return;
                }
                let since = Instant::now().checked_sub(MARKS_LAST).unwrap_or(self.batch_began);
                let Some(above) = self.folders.above(&self.door, folder, since) else {
                    // It cannot be told now: it stays until it can.
                    self.index.remove(seen.inode);
                    return;
                };
                let marks = policy::effective(trusted(marks, &seen), seen.owner, above);
                let known_ns = self.index.get(seen.inode).map(|file| file.used_ns);
                self.note(folder, &name, &seen, marks, UNKNOWN, known_ns.unwrap_or(0).max(seen.used_ns));
                if self.index.get(seen.inode).is_none() {
                    return;
                }
                // It may have gone since it was found.
                if known_ns.is_none() && !self.is_there(folder, &name, seen.inode) {
                    self.index.remove(seen.inode);
                    return;
                }
                self.seen.insert(seen.inode);
            }
        }
    }

    fn is_there(&mut self, folder: u64, name: &OsStr, inode: u64) -> bool {
        let folder = self.folders.open(&self.door, folder);
        folder.and_then(|folder| door::look_at(folder, name)).is_ok_and(|seen| seen.inode == inode)
    }

    /// Ends what a controller that was killed began with a file.
    fn finish(&mut self, folder: u64, name: &OsStr) {
        let Ok(fd) = self.folders.open(&self.door, folder) else { return };
        let folders = RefCell::new(&mut self.folders);
        purge::finish(fd.as_fd(), name, |fd, seen| may_go(&folders, &self.door, folder, fd, seen));
    }

    /// A look at everything that began then has ended: what it did not find is not there any more.
    pub fn forget_unseen(&mut self, began_ns: i64) {
        let seen = std::mem::take(&mut self.seen);
        self.index.retain(|inode, file| seen.contains(&inode) || file.used_ns >= began_ns);
        self.counts.scans += 1;
    }

    /// Hands the worker what is due, and takes what it has done.
    pub fn work_on_pages(&mut self) {
        let charged = |groups: &mut Groups, folder: &Path, name: &OsStr| {
            let group = self.door.open_folder(folder).ok().and_then(|folder| charged_group(groups, &folder, name));
            group.unwrap_or(UNKNOWN)
        };
        self.pages.work(&self.door, &self.folders, &mut self.groups, &mut self.counts, charged);
    }

    /// Puts a file where it belongs: among the volatile ones, among those whose pages are to be looked at.
    fn note(&mut self, folder: u64, name: &OsStr, seen: &Seen, marks: Marks, group: GroupId, used_ns: i64) {
        let known = self.index.get(seen.inode).map(|file| file.group).filter(|group| *group != UNKNOWN);
        let group = known.unwrap_or(group);
        let part = match marks.volatile.unwrap_or_default() {
            Volatile::Full => Some(Part::Whole),
            Volatile::Partial => Some(Part::Tail),
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

    /// What the volatile files hold that count for a limited group, or all of them.
    pub fn held_bytes(&self, watch: Option<usize>) -> u64 {
        self.index.held_bytes(|group| watch.is_none_or(|watch| self.groups.helps(group, watch)))
    }

    /// Purges the file used least recently that helps; `None` if there is none that was used before `began_ns`. Some may turn
    /// out to be in use: 0 then.
    ///
    /// `watch`: only what is charged below this limited group.
    pub fn purge_one(&mut self, watch: Option<usize>, want_bytes: u64, began_ns: i64) -> Option<u64> {
        let groups = &self.groups;
        let inode = self.index.oldest(|group| watch.is_none_or(|watch| groups.helps(group, watch)))?;
        // All others were found in use since, or have come since.
        self.index.get(inode).filter(|file| file.used_ns < began_ns)?;
        let file = self.index.remove(inode)?;
        self.pages.forget(inode);
        let Ok(folder) = self.folders.open(&self.door, file.folder) else {
            // It was moved, with its folder.
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
        let may_go = |fd: &OwnedFd, seen: &Seen| may_go(&folders, &self.door, file.folder, fd, seen);
        match purge::purge(&target, want_bytes, may_go) {
            Outcome::Freed { bytes, left_bytes } => {
                let counts = &mut self.counts;
                let (files, sum) = match file.part {
                    Part::Whole => (&mut counts.purged_files, &mut counts.purged_bytes),
                    Part::Tail => (&mut counts.cut_files, &mut counts.cut_bytes),
                };
                (*files, *sum) = (*files + 1, *sum + bytes);
                if left_bytes > 0 {
                    self.index.insert(inode, File { held_bytes: left_bytes, used_ns: now_ns(), ..file });
                }
                Some(bytes)
            }
            Outcome::Used(used_ns) => {
                self.index.insert(inode, File { used_ns, ..file });
                Some(0)
            }
            Outcome::Open => {
                let is_worker = self.pages.is_given(inode);
                self.counts.spared_open += u64::from(!is_worker);
                self.met_worker |= is_worker;
                // It is used, and goes to the end; what the worker has is not met again this time.
                let used_ns = if is_worker { began_ns.max(file.used_ns) } else { now_ns() };
                self.index.insert(inode, File { used_ns, ..file });
                Some(0)
            }
            Outcome::Gone => Some(0),
        }
    }
}

/// The group that a file's first page is charged to, where that can be asked and is known; nothing is said of one that is open.
fn charged_group(groups: &mut Groups, folder: &OwnedFd, name: &OsStr) -> Option<GroupId> {
    let fd = door::open_file(folder, name, OFlags::RDONLY).ok()?;
    // To seek for data takes the file's lock, which a writer holds for as long as he is slow.
    pages::take_lease(fd.as_fd()).ok()?;
    let at = rustix::fs::seek(&fd, rustix::fs::SeekFrom::Data(0)).ok()?;
    let inode = pages::charged_group(fd.as_fd(), at).ok()?;
    Some(groups.of_inode(inode)).filter(|group| *group != UNKNOWN)
}

/// A file's own marks, as far as its owner can be held to them: anybody may have marked what anybody may write to.
fn trusted(own: Marks, seen: &Seen) -> Marks {
    let volatile = own.volatile.filter(|volatile| *volatile == Volatile::None || !seen.is_open_to_all());
    Marks { volatile, ..own }
}

/// Whether an open file is volatile, by what is marked at this moment.
fn may_go(folders: &RefCell<&mut Folders>, door: &Door, folder: u64, fd: &OwnedFd, seen: &Seen) -> bool {
    let Ok(own) = door::marks(fd, |_| ()) else { return false };
    let Some(above) = folders.borrow_mut().above(door, folder, Instant::now()) else { return false };
    let marks = policy::effective(trusted(own, seen), seen.owner, above);
    marks.volatile.is_some_and(|volatile| volatile != Volatile::None)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file that somebody has open is not asked for its group: its lock may be held for long.
    #[test]
    fn open_files_are_not_asked() {
        let Ok(path) = tempfile::tempdir_in("/dev/shm") else { return println!("skipped: no /dev/shm") };
        let mut groups = Groups::new("");
        let own = groups.of_self();
        let folder: OwnedFd = std::fs::File::open(path.path()).unwrap().into();
        std::fs::write(path.path().join("file"), "text").unwrap();
        let mut asked = || charged_group(&mut groups, &folder, OsStr::new("file"));
        if own == UNKNOWN || asked().is_none() {
            return println!("skipped: nobody says here which group a page is charged to");
        }
        let writer = std::fs::File::options().append(true).open(path.path().join("file")).unwrap();
        assert_eq!(asked(), None);
        drop(writer);
        assert_eq!(asked(), Some(own));
    }
}
