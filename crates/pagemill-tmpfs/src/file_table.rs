//! The controller's record of the file system: the folders, the volatile files, the memory groups and the worker's
//! queue. Events and scans update the record, and purges take files from it one at a time.

mod writers;

use crate::budget::Bound;
use crate::file_access::{self, FileAccess, FileAttributes, now_ns};
use crate::folders::Folders;
use crate::groups::{GroupId, Groups, RecordedFile, UNKNOWN, WrittenBytes};
use crate::index::{Charge, Index, PurgePart, VolatileFile};
use crate::messages::print_message;
use crate::pagework::PageWork;
use crate::policy::{Ancestor, Marks, Volatile};
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
use std::time::{Duration, Instant};
use writers::ClosedSizes;

/// Delay between the close of a file that is not volatile and its examination by the worker. Many files are reopened
/// soon after their close.
const EXAMINE_DELAY: Duration = Duration::from_millis(200);
/// Delay between the close of a volatile file and its examination by the worker. It is longer because the file may be
/// purged soon, and its purge fails while the worker has it open.
const VOLATILE_EXAMINE_DELAY: Duration = Duration::from_millis(500);

/// Maximum delay between a close and the reading of its event. A closed file counts as used until its close, which was
/// at most this long before its event was read.
const MAX_CLOSE_DELAY_NS: i64 = 1_000_000_000;

/// A folder that was moved during a scan can be missed by the scan. The event of the move was read at most this long
/// after the scan had ended.
const MAX_MOVE_DELAY: Duration = Duration::from_secs(1);

/// Maximum number of moved folders that are recorded during a scan. Files of further ones are found by the next scan.
const MAX_MOVED_FOLDERS: usize = 1 << 16;

/// Maximum age of recorded folder marks that may be used for a file that a scan found. Older marks are read again from
/// the folder.
const MAX_MARKS_AGE: Duration = Duration::from_millis(100);

/// Maximum number of folders that the controller has open at a time during a batch of events.
const MAX_OPEN_FOLDERS: usize = 32;

/// With more volatile files than this, a status request reads none of their attributes again.
const MAX_RECHECKED_FILES: usize = 1024;

/// Maximum number of paths for which a bad mark is reported.
const MAX_REPORTED_PATHS: usize = 100;

/// Memory that the purge of a file frees at least besides its contents: its inode and its directory entry.
const LEAST_INODE_BYTES: u64 = 768;

/// A closed file with at least this much memory has its own marks read at once. There are too many smaller files for
/// that.
const OWN_MARKS_FROM_BYTES: u64 = 64 << 10;

/// An open folder of the current batch of events, and the marks of its ancestors.
struct BatchFolder {
    inode: u64,
    fd: OwnedFd,
    ancestors: Vec<Ancestor>,
}

/// The controller's record of files, folders, groups and files queued for the worker.
pub struct FileTable {
    access: Arc<FileAccess>,
    folders: Folders,
    pub index: Index,
    pub groups: Groups,
    pub pages: PageWork,
    pub counts: Counts,
    /// Events were lost or a folder was not found, so a full scan is needed.
    pub wants_scan: bool,
    /// A purge skipped a file because the worker had the file open. A purge of that file some milliseconds later can
    /// succeed.
    pub skipped_for_worker: bool,
    /// Total memory of the files in all recorded close events.
    pub closed_bytes: u64,
    /// Highest inode number of a closed file: before the current batch of events, and now.
    newest_inodes: (u64, u64),
    closed_sizes: ClosedSizes,
    /// Inodes of the volatile files that the current scan has found.
    seen: HashSet<u64>,
    /// Inodes of the folders that were moved since the end of the last scan, and the time of the last move that was
    /// recorded.
    moved_folders: HashSet<u64>,
    moved_at: Option<Instant>,
    /// When the last scan ended.
    scan_ended: Option<Instant>,
    batch_began: Instant,
    /// Open folders of the current batch of events, by inode.
    open_folders: HashMap<u64, BatchFolder>,
    /// Process and group of the previous close event.
    last_writer: Option<(u32, GroupId)>,
    own_pid: u32,
    own_group: GroupId,
    may_ask_for_group: bool,
    reported_paths: HashSet<PathBuf>,
}

impl FileTable {
    /// Creates an empty table. `worker` is the command line of the worker process.
    pub fn new(access: Arc<FileAccess>, mut groups: Groups, worker: Vec<OsString>) -> Self {
        let own_group = groups.of_self();
        // Without permission to read page charges, the controller also gets no process ids in events. It then treats
        // all files as written by its own group.
        let may_ask_for_group = pages::may_ask_for_group();
        if !may_ask_for_group {
            groups.trust(own_group);
        }
        Self {
            folders: Folders::new(access.root_inode()),
            index: Index::default(),
            pages: PageWork::new(worker),
            counts: Counts::default(),
            wants_scan: false,
            skipped_for_worker: false,
            closed_bytes: 0,
            newest_inodes: (0, 0),
            closed_sizes: ClosedSizes::default(),
            seen: HashSet::new(),
            moved_folders: HashSet::new(),
            moved_at: None,
            scan_ended: None,
            batch_began: Instant::now(),
            open_folders: HashMap::new(),
            last_writer: None,
            own_pid: std::process::id(),
            own_group,
            may_ask_for_group,
            reported_paths: HashSet::new(),
            access,
            groups,
        }
    }

    /// Returns whether the controller may read which group a page is charged to.
    pub fn may_ask_for_group(&self) -> bool {
        self.may_ask_for_group
    }

    /// Records that events were lost because the kernel's event queue overflowed.
    pub fn record_lost_events(&mut self) {
        self.counts.events_lost += 1;
        self.wants_scan = true;
    }

    /// Starts a batch of events. Each folder is opened once per batch.
    pub fn begin_batch(&mut self) {
        self.last_writer = None;
        debug_assert!(self.open_folders.is_empty(), "folders stay open within one batch only");
        debug_assert!(self.newest_inodes.0 <= self.newest_inodes.1, "the numbers of inodes rise");
        self.newest_inodes.0 = self.newest_inodes.1;
        self.batch_began = Instant::now();
    }

    /// Records that a folder was renamed, which changes the paths of all files in it.
    pub fn record_moved_folder(&mut self, folder: Handle<'_>, name: &OsStr) {
        self.open_folders.clear();
        let parent = self.folders.find(&self.access, folder);
        self.record_new_path(parent, name, Instant::now());
    }

    /// Records that a folder was moved to `name` in `parent`, which is `None` if it is unknown. Requests a scan if the
    /// new path cannot be recorded, or if a scan that ended shortly before `now` may have missed the folder.
    fn record_new_path(&mut self, parent: Option<u64>, name: &OsStr, now: Instant) {
        self.moved_at = Some(now);
        let moved = parent.and_then(|parent| self.folders.record_subfolder(&self.access, parent, name));
        if self.moved_folders.len() < MAX_MOVED_FOLDERS {
            self.moved_folders.extend(moved);
        }
        let has_ended_shortly = self.scan_ended.is_some_and(|ended| now < ended + MAX_MOVE_DELAY);
        self.wants_scan |= moved.is_none() || has_ended_shortly;
    }

    /// Records that a process closed the file `name` after writing to it, or renamed a file to `name`.
    pub fn record_written(&mut self, folder: Handle<'_>, name: &OsStr, pid: u32) {
        let is_own = pid != 0 && (pid == self.own_pid || pid == self.pages.worker_pid());
        if is_own {
            return;
        }
        self.counts.events += 1;
        let opened =
            folder.inode().and_then(|inode| self.open_folders.remove(&inode)).or_else(|| self.open_folder(folder));
        let Some(opened) = opened else {
            self.wants_scan = true;
            return;
        };
        self.record_closed_file(&opened, name, pid);
        if self.open_folders.len() >= MAX_OPEN_FOLDERS {
            self.open_folders.clear();
        }
        self.open_folders.insert(opened.inode, opened);
        debug_assert!(self.open_folders.len() <= MAX_OPEN_FOLDERS);
    }

    /// Ends the batch of events and closes the folders that were opened for it. They must not stay open: the handle of
    /// a deleted folder can be opened, as if the folder existed, until the last descriptor is closed.
    pub fn end_batch(&mut self) {
        self.open_folders.clear();
    }

    /// Opens the folder of an event and reads the marks of its ancestors.
    fn open_folder(&mut self, handle: Handle<'_>) -> Option<BatchFolder> {
        let inode = self.folders.find(&self.access, handle)?;
        let fd = self.folders.open(&self.access, inode).ok()?;
        let ancestors = self.folders.ancestors(&self.access, inode, self.batch_began)?;
        Some(BatchFolder { inode, fd, ancestors })
    }

    /// Records the file `name`, which the process `pid` closed or renamed.
    fn record_closed_file(&mut self, folder: &BatchFolder, name: &OsStr, pid: u32) {
        // The group is recorded also if the file has another name by now.
        let writer = self.group_of_writer(pid);
        let Ok(seen) = file_access::attributes_at(&folder.fd, name) else { return };
        // Without a process id, the worker's own close is known by the file. If a user writes to the file meanwhile,
        // the worker reports that the file is in use, or the next scan finds the change.
        let is_of_worker = !self.may_ask_for_group && pid == 0 && self.pages.is_sent(seen.inode);
        if !seen.is_file() || is_of_worker {
            return;
        }
        let mut own = Marks::default();
        // There are too many small files to read their own marks here. A scan reads the marks, and a purge reads them
        // again.
        if seen.held_bytes >= OWN_MARKS_FROM_BYTES {
            let mut bad = Vec::new();
            let Ok(marks) = file_access::marks_at(&folder.fd, name, |mark| bad.push(mark)) else { return };
            own = marks;
            for mark in bad {
                let path = self.folders.path(folder.inode).unwrap_or_default().join(name);
                self.report_bad_mark(path, &mark.0);
            }
        }
        let marks = seen.effective_marks(own, folder.ancestors.iter().copied());
        self.closed_bytes += seen.held_bytes;
        let charge = self.record_writer((folder.inode, &folder.fd), name, &seen, writer);
        // Files that were closed together are observed in any order, so the time of the last access orders them.
        let used_ns = seen.used_ns.max(now_ns().saturating_sub(MAX_CLOSE_DELAY_NS));
        self.record_file(folder.inode, name, &seen, marks, Some(charge), used_ns);
    }

    fn report_bad_mark(&mut self, path: PathBuf, text: &str) {
        self.counts.bad_marks += 1;
        if self.reported_paths.len() < MAX_REPORTED_PATHS && self.reported_paths.insert(path.clone()) {
            // Any user can choose names, and control characters must not reach a terminal.
            print_message(&format!("{}: {text}: ignored", path.to_string_lossy().escape_debug()));
        }
    }

    /// Records an item that a scan found.
    pub fn record_scan_item(&mut self, found: ScanItem) {
        match found {
            ScanItem::Folder { inode, parent, name, above, read_at } => {
                self.folders.record(inode, parent, &name, above, read_at);
            }
            ScanItem::Bad { path, mark } => self.report_bad_mark(path, &mark.0),
            ScanItem::File { folder, name, seen, marks } => {
                if purge::is_ours(&name) {
                    self.finish_purge(folder, &name);
                    return;
                }
                let since = Instant::now().checked_sub(MAX_MARKS_AGE).unwrap_or(self.batch_began);
                let Some(ancestors) = self.folders.ancestors(&self.access, folder, since) else {
                    // The marks of an ancestor are unknown. Without its marks the file must not be purged.
                    self.index.remove(seen.inode);
                    return;
                };
                let marks = seen.effective_marks(marks, ancestors);
                let known_ns = self.index.get(seen.inode).map(|file| file.used_ns);
                self.record_file(folder, &name, &seen, marks, None, known_ns.unwrap_or(0).max(seen.used_ns));
                if self.index.get(seen.inode).is_none() {
                    return;
                }
                // The file may have been removed since the scan found it.
                if known_ns.is_none() && !self.is_file_present(folder, &name, seen.inode) {
                    self.index.remove(seen.inode);
                    return;
                }
                self.seen.insert(seen.inode);
            }
        }
    }

    fn is_file_present(&mut self, folder: u64, name: &OsStr, inode: u64) -> bool {
        let folder = self.folders.open(&self.access, folder);
        folder.and_then(|folder| file_access::attributes_at(folder, name)).is_ok_and(|seen| seen.inode == inode)
    }

    /// Completes a purge that was interrupted because the controller was killed.
    fn finish_purge(&mut self, folder: u64, name: &OsStr) {
        let Ok(fd) = self.folders.open(&self.access, folder) else { return };
        let folders = RefCell::new(&mut self.folders);
        purge::finish(fd.as_fd(), name, |fd, seen| is_still_volatile(&folders, &self.access, folder, fd, seen));
    }

    /// Records the end of a scan that began at `began`, in nanoseconds since 1970 at `began_ns`. Removes from the index
    /// the volatile files that the scan did not find. Keeps files used since the scan began.
    ///
    /// A scan can miss the files of a folder that is moved meanwhile, to a path that was scanned before or from a path
    /// that is scanned later. So the files below moved folders are kept, and another scan is requested.
    pub fn record_scan_end(&mut self, began: Instant, began_ns: i64) {
        let seen = std::mem::take(&mut self.seen);
        let moved = std::mem::take(&mut self.moved_folders);
        let has_moves = self.moved_at.is_some_and(|at| at >= began);
        let may_be_missed = |folder: u64| has_moves && self.folders.is_below_any(folder, &moved);
        let is_kept = |inode: &u64, file: &VolatileFile| {
            seen.contains(inode) || file.used_ns >= began_ns || may_be_missed(file.folder)
        };
        self.index.retain(|inode, file| is_kept(&inode, file));
        debug_assert!(self.seen.is_empty(), "the next scan begins with no file seen");
        self.wants_scan |= has_moves;
        self.scan_ended = Some(Instant::now());
        self.counts.scans += 1;
    }

    /// Sends the worker the jobs that are due, and records its results.
    pub fn work_on_pages(&mut self) {
        let charged = |groups: &mut Groups, folder: &Path, name: &OsStr, inode: u64| {
            if !self.may_ask_for_group {
                return self.own_group;
            }
            let folder = self.access.open_folder(folder).ok();
            folder
                .and_then(|folder| charge_of_pages(groups, &folder, name, inode))
                .map_or(UNKNOWN, |charge| charge.group)
        };
        let freed = self.pages.work(&self.access, &self.folders, &mut self.groups, &mut self.counts, charged);
        for inode in freed {
            let Some(VolatileFile { folder, name, .. }) = self.index.get(inode).cloned() else { continue };
            // If the folder was removed or moved, a scan finds its files.
            let Ok(folder) = self.folders.open(&self.access, folder) else { continue };
            recheck_file(&mut self.index, &folder, &name, inode);
        }
    }

    /// Records a file in the index of volatile files and in the worker's queue. `charge` is `None` if a scan found the
    /// file.
    fn record_file(
        &mut self,
        folder: u64,
        name: &OsStr,
        seen: &FileAttributes,
        marks: Marks,
        charge: Option<Charge>,
        used_ns: i64,
    ) {
        let known = self.index.get(seen.inode).map(|file| file.charge);
        let charge = match (known, charge) {
            // A process of another group has written to the file. A purge reads which group is charged now.
            (Some(known), Some(new)) if !new.is_confirmed && known.group != new.group => Charge::UNKNOWN,
            (known, new) => new.or(known).unwrap_or(Charge::UNKNOWN),
        };
        let part = match marks.volatile.unwrap_or_default() {
            Volatile::Full => Some(PurgePart::Whole),
            Volatile::Partial => Some(PurgePart::Tail),
            Volatile::None => None,
        };
        match part.filter(|part| purge::can_purge(*part, name, seen)) {
            Some(part) => {
                let file =
                    VolatileFile { folder, name: name.to_owned(), part, used_ns, held_bytes: seen.held_bytes, charge };
                self.counts.not_indexed += u64::from(!self.index.insert(seen.inode, file));
            }
            None => drop(self.index.remove(seen.inode)),
        }
        let delay = if part.is_some() { VOLATILE_EXAMINE_DELAY } else { EXAMINE_DELAY };
        self.pages.queue_file(folder, name, seen, marks.huge.unwrap_or_default(), delay);
    }

    /// Reads the attributes of all volatile files again, since files may have been removed or have shrunk. Returns
    /// `false`, and reads nothing, if there are more than `MAX_RECHECKED_FILES`. Also returns `false` if a folder
    /// cannot be opened; its files stay in the index until a scan.
    pub fn recheck_volatile_files(&mut self) -> bool {
        if self.index.count() > MAX_RECHECKED_FILES {
            return false;
        }
        let (mut last, mut is_complete): (Option<(u64, Option<OwnedFd>)>, bool) = (None, true);
        for (folder, inode, name) in self.index.by_folder() {
            if last.as_ref().is_none_or(|(at, _)| *at != folder) {
                last = Some((folder, self.folders.open(&self.access, folder).ok()));
            }
            let Some((_, Some(fd))) = &last else {
                // The folder was removed or moved. A scan finds its files at the new path.
                (self.wants_scan, is_complete) = (true, false);
                continue;
            };
            recheck_file(&mut self.index, fd, &name, inode);
        }
        is_complete
    }

    /// Returns the memory of the volatile files whose purge lowers the usage of a limit. Inodes count, except if the
    /// limit is the file system's size.
    pub fn held_bytes(&self, bound: Bound) -> u64 {
        let is_selected = |charge: Charge| match bound {
            Bound::Group(watch) => self.groups.lowers_usage_of(charge.group, watch),
            Bound::Size | Bound::Machine => true,
        };
        let inodes = if bound == Bound::Size { 0 } else { self.index.count_in(is_selected) as u64 };
        self.index.held_bytes(is_selected) + inodes * LEAST_INODE_BYTES
    }

    /// Purges the least recently used volatile file: the whole file, or its end. Returns the bytes freed. Returns 0 if
    /// this file could not be purged; the caller then calls again for the next file.
    ///
    /// With `watch`, considers only files whose purge lowers the usage of that limited group, and then files that may
    /// do so, because the charged group is not confirmed. Examines the pages of a file first if its group is not in the
    /// table (any more). Returns `None` if none of the considered files was last used before `began_ns`, the time in
    /// nanoseconds at which the caller began to purge.
    pub fn purge_one(&mut self, watch: Option<usize>, want_bytes: u64, began_ns: i64) -> Option<u64> {
        let groups = &self.groups;
        let lowers = |charge: Charge| watch.is_none_or(|watch| groups.lowers_usage_of(charge.group, watch));
        let by_group = self.index.oldest(lowers, began_ns);
        let inode = by_group.or_else(|| self.index.oldest(|charge| !charge.is_confirmed, began_ns))?;
        let mut file = self.index.remove(inode)?;
        debug_assert!(watch.is_none_or(|watch| by_group.is_none() || groups.lowers_usage_of(file.charge.group, watch)));
        debug_assert!(file.used_ns < began_ns, "files that were used since are not purged");
        self.pages.forget(inode);
        let Ok(folder) = self.folders.open(&self.access, file.folder) else {
            // The folder was moved.
            self.wants_scan = true;
            return Some(0);
        };
        if let Some(watch) = watch
            && (!self.groups.contains(file.charge.group) || (!file.charge.is_confirmed && by_group.is_none()))
            && let Some(charge) = charge_of_pages(&mut self.groups, &folder, &file.name, inode)
        {
            file.charge = charge;
            let bytes = WrittenBytes { files: file.held_bytes, inodes: 0 };
            let (folder, name, was_empty) = (file.folder, file.name.clone(), file.held_bytes == 0);
            self.groups.claim_written(charge.group, bytes, RecordedFile { folder, name, inode, was_empty });
            if !self.groups.lowers_usage_of(charge.group, watch) {
                self.index.insert(inode, file);
                return Some(0);
            }
        }
        let target = Target { folder: folder.as_fd(), name: &file.name, inode, part: file.part, used_ns: file.used_ns };
        let folders = RefCell::new(&mut self.folders);
        let may_purge =
            |fd: &OwnedFd, seen: &FileAttributes| is_still_volatile(&folders, &self.access, file.folder, fd, seen);
        let used_ns = match purge::purge(&target, want_bytes, may_purge) {
            PurgeOutcome::Freed { bytes, left_bytes } => {
                let counts = &mut self.counts;
                let (files, sum) = match file.part {
                    PurgePart::Whole => (&mut counts.purged_files, &mut counts.purged_bytes),
                    PurgePart::Tail => (&mut counts.cut_files, &mut counts.cut_bytes),
                };
                debug_assert!(file.part == PurgePart::Tail || left_bytes == 0, "nothing is left of a whole file");
                (*files, *sum) = (*files + 1, *sum + bytes);
                if left_bytes > 0 {
                    self.index.insert(inode, VolatileFile { held_bytes: left_bytes, used_ns: now_ns(), ..file });
                }
                return Some(bytes);
            }
            PurgeOutcome::Used(used_ns) => used_ns,
            PurgeOutcome::Open => {
                let is_worker = self.pages.is_sent(inode);
                self.counts.spared_open += u64::from(!is_worker);
                self.skipped_for_worker |= is_worker;
                // A file that a user has open counts as used now. A file that the worker has open counts as used at
                // `began_ns`, so that only the current purge skips it.
                if is_worker { began_ns.max(file.used_ns) } else { now_ns() }
            }
            PurgeOutcome::Gone => return Some(0),
        };
        self.index.insert(inode, VolatileFile { used_ns, ..file });
        Some(0)
    }
}

/// Reads the attributes of a volatile file again. Removes the file from the index if it is no longer there.
fn recheck_file(index: &mut Index, folder: &OwnedFd, name: &OsStr, inode: u64) {
    let seen = file_access::attributes_at(folder, name).ok().filter(|seen| seen.inode == inode);
    let Some(file) = index.remove(inode) else { return };
    if let Some(seen) = seen.filter(|seen| purge::can_purge(file.part, name, seen)) {
        index.insert(inode, VolatileFile { held_bytes: seen.held_bytes, ..file });
    }
}

/// Returns the group that is charged for the sampled pages of a file. `None` if the file cannot be opened or its pages
/// cannot be examined.
fn charge_of_pages(groups: &mut Groups, folder: &OwnedFd, name: &OsStr, inode: u64) -> Option<Charge> {
    let found = groups_of_pages(folder, name, inode)?;
    let first = found.first().filter(|first| found.iter().all(|group| group == *first));
    Some(Charge { group: first.map_or(UNKNOWN, |group| groups.of_inode(*group)), is_confirmed: true })
}

/// Returns the inodes of the groups that are charged for the sampled pages of a file; empty if no sampled page is
/// resident. `None` if the file cannot be opened or its pages cannot be examined.
fn groups_of_pages(folder: &OwnedFd, name: &OsStr, inode: u64) -> Option<Vec<u64>> {
    const MAX_SAMPLES: usize = 4;
    let fd = file_access::open_file(folder, name, OFlags::RDONLY).ok()?;
    let seen = file_access::attributes(&fd).ok().filter(|seen| seen.inode == inode)?;
    pages::charged_groups(fd.as_fd(), seen.len_bytes, MAX_SAMPLES).ok()
}

/// Returns whether an open file is volatile according to its current marks.
fn is_still_volatile(
    folders: &RefCell<&mut Folders>,
    access: &FileAccess,
    folder: u64,
    fd: &OwnedFd,
    seen: &FileAttributes,
) -> bool {
    let Ok(own) = file_access::marks(fd, |_| ()) else { return false };
    let Some(ancestors) = folders.borrow_mut().ancestors(access, folder, Instant::now()) else { return false };
    let marks = seen.effective_marks(own, ancestors);
    marks.volatile.is_some_and(|volatile| volatile != Volatile::None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Huge;
    use pagemill_core::units::BLOCK_BYTES;

    /// A folder in a tmpfs.
    pub(super) struct Place(tempfile::TempDir);

    impl Place {
        pub(super) fn new() -> Option<Self> {
            let place = tempfile::tempdir_in("/dev/shm").ok().map(Self);
            if place.is_none() {
                println!("skipped: no /dev/shm");
            }
            place
        }

        pub(super) fn path(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        pub(super) fn write(&self, name: &str, len: usize) {
            std::fs::write(self.path(name), vec![1; len]).unwrap();
        }

        pub(super) fn seen(&self, name: &str) -> FileAttributes {
            let folder = std::fs::File::open(self.path("")).unwrap();
            file_access::attributes_at(folder, OsStr::new(name)).unwrap()
        }
    }

    /// Returns a table of the files in a folder, without a worker.
    pub(super) fn table(place: &Place) -> FileTable {
        let root: OwnedFd = std::fs::File::open(place.path("")).unwrap().into();
        FileTable::new(Arc::new(FileAccess::of_root(root).unwrap()), Groups::new(""), Vec::new())
    }

    /// Returns a volatile file of the root folder for the index, with more memory than the real file has.
    fn volatile(table: &FileTable, name: &str) -> VolatileFile {
        let (folder, charge) = (table.access.root_inode(), Charge::UNKNOWN);
        VolatileFile { folder, name: name.into(), part: PurgePart::Whole, used_ns: 1, held_bytes: 1 << 30, charge }
    }

    /// Close events carry no process id. The close of a file that the worker has must not count as a write, unlike the
    /// closes before and after that.
    #[test]
    fn closes_by_the_worker_do_not_count() {
        let Some(place) = Place::new() else { return };
        let root: OwnedFd = std::fs::File::open(place.path("")).unwrap().into();
        let access = Arc::new(FileAccess::of_root(root).unwrap());
        let mut table = FileTable::new(access.clone(), Groups::new(""), vec!["never started".into()]);
        table.may_ask_for_group = false;
        place.write("file", BLOCK_BYTES);
        let seen = place.seen("file");
        let close = |table: &mut FileTable| {
            let (inode, fd) = (access.root_inode(), access.open_folder(Path::new("")).unwrap());
            table.record_closed_file(&BatchFolder { inode, fd, ancestors: Vec::new() }, OsStr::new("file"), 0);
            std::mem::take(&mut table.closed_bytes)
        };
        assert_eq!(close(&mut table), seen.held_bytes);
        assert_eq!(table.pages.count(), 1, "the worker is to examine the file");
        table.pages.pretend_to_send(seen.inode);
        assert_eq!((close(&mut table), table.pages.is_sent(seen.inode)), (0, true));
        table.may_ask_for_group = true;
        assert_eq!(close(&mut table), seen.held_bytes, "events carry the worker's process id");
    }

    /// A worker that answers each job at once, and says that it freed memory.
    const FREEING_WORKER: &str = r#"while read -r line; do
        inode=${line#*:}; inode=${inode%%,*}
        echo "{\"inode\":$inode,\"huge_blocks\":0,\"split_blocks\":0,\"freed_bytes\":4096,\"is_busy\":false,\"is_missing\":false,\"next\":null,\"has_no_memory\":false}" >&0
    done"#;

    /// The worker frees memory of a volatile file. The index must have the new size, although no event reports that.
    #[test]
    fn memory_that_the_worker_freed_is_subtracted() {
        let Some(place) = Place::new() else { return };
        let root: OwnedFd = std::fs::File::open(place.path("")).unwrap().into();
        let worker = ["sh", "-c", FREEING_WORKER].map(OsString::from).to_vec();
        let mut table = FileTable::new(Arc::new(FileAccess::of_root(root).unwrap()), Groups::new(""), worker);
        place.write("file", BLOCK_BYTES);
        let (seen, begun) = (place.seen("file"), Instant::now());
        table.index.insert(seen.inode, volatile(&table, "file"));
        table.pages.queue_file(table.access.root_inode(), OsStr::new("file"), &seen, Huge::Auto, Duration::ZERO);
        while table.index.held_bytes(|_| true) != seen.held_bytes {
            assert!(begun.elapsed() < Duration::from_secs(600), "the index has the old size");
            table.work_on_pages();
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(table.counts.sparse_bytes, 4096);
    }

    /// A folder with a volatile file is renamed, and no event reports that. The file must not be reported as current,
    /// and a scan must be requested.
    #[test]
    fn files_of_missing_folders_are_not_current() {
        let Some(place) = Place::new() else { return };
        let mut table = table(&place);
        std::fs::create_dir(place.path("old")).unwrap();
        place.write("old/file", 4096);
        place.write("other", 4096);
        let (folder, inode) = (place.seen("old").inode, place.seen("old/file").inode);
        let root = table.access.root_inode();
        assert_eq!(table.folders.record_subfolder(&table.access, root, OsStr::new("old")), Some(folder));
        table.index.insert(inode, VolatileFile { folder, ..volatile(&table, "file") });
        table.index.insert(place.seen("other").inode, volatile(&table, "other"));
        assert!(table.recheck_volatile_files() && !table.wants_scan);
        assert_eq!(table.index.held_bytes(|_| true), 2 * 4096);
        std::fs::rename(place.path("old"), place.path("new")).unwrap();
        assert!(!table.recheck_volatile_files() && table.wants_scan);
    }

    /// A folder is moved during a scan, which does not find the files below the folder. They must stay in the index,
    /// other files that the scan did not find must not, and another scan must be requested. A move before the scan must
    /// have no effect.
    #[test]
    fn a_folder_that_is_moved_during_a_scan_is_scanned_again() {
        let Some(place) = Place::new() else { return };
        let mut table = table(&place);
        let root = table.access.root_inode();
        std::fs::create_dir_all(place.path("old/below")).unwrap();
        let fill_index = |table: &mut FileTable, name: &str| {
            place.write(&format!("{name}/below/file"), 4096);
            let (folder, below) = (place.seen(name).inode, place.seen(&format!("{name}/below")).inode);
            assert_eq!(table.folders.record_subfolder(&table.access, root, OsStr::new(name)), Some(folder));
            assert_eq!(table.folders.record_subfolder(&table.access, folder, OsStr::new("below")), Some(below));
            let file = volatile(table, "file");
            table.index.insert(place.seen(&format!("{name}/below/file")).inode, VolatileFile { folder: below, ..file });
            table.index.insert(1 << 60, volatile(table, "deleted"));
        };
        fill_index(&mut table, "old");
        let began = Instant::now();
        std::fs::rename(place.path("old"), place.path("new")).unwrap();
        table.record_new_path(Some(root), OsStr::new("new"), Instant::now());
        assert!(!table.wants_scan, "the running scan must end first");
        table.record_scan_end(began, now_ns());
        assert_eq!(table.index.count(), 1, "only the file below the moved folder is kept");
        assert!(std::mem::take(&mut table.wants_scan));
        assert!(table.recheck_volatile_files(), "the folder has its new path");
        assert_eq!(table.index.held_bytes(|_| true), 4096);
        fill_index(&mut table, "new");
        table.record_scan_end(Instant::now(), now_ns());
        assert!(table.index.count() == 0 && !table.wants_scan, "the move was before this scan");
    }

    /// The event of a move during a scan can be read after the end of the scan. Another scan must be requested, but not
    /// for a move long after the scan.
    #[test]
    fn a_late_event_of_a_moved_folder_requests_a_scan() {
        let Some(place) = Place::new() else { return };
        let mut table = table(&place);
        let root = table.access.root_inode();
        std::fs::create_dir(place.path("folder")).unwrap();
        let is_requested = |table: &mut FileTable, now: Instant| {
            table.record_new_path(Some(root), OsStr::new("folder"), now);
            std::mem::take(&mut table.wants_scan)
        };
        assert!(!is_requested(&mut table, Instant::now()), "no scan has ended");
        table.record_scan_end(Instant::now(), now_ns());
        let ended = table.scan_ended.unwrap();
        assert!(is_requested(&mut table, ended + MAX_MOVE_DELAY / 2));
        assert!(!is_requested(&mut table, ended + MAX_MOVE_DELAY));
    }

    /// The charged group is read from the file's pages, also while a process has the file open. Another file of that
    /// name has no charge.
    #[test]
    fn the_charge_is_read_from_pages() {
        let Ok(path) = tempfile::tempdir_in("/dev/shm") else { return println!("skipped: no /dev/shm") };
        let mut groups = Groups::new("");
        let own = groups.of_self();
        let folder: OwnedFd = std::fs::File::open(path.path()).unwrap().into();
        let name = OsStr::new("file");
        std::fs::write(path.path().join(name), "text").unwrap();
        let inode = file_access::attributes_at(&folder, name).unwrap().inode;
        let mut charge_of = |inode: u64| charge_of_pages(&mut groups, &folder, name, inode);
        if own == UNKNOWN || charge_of(inode).is_none() {
            return println!("skipped: page charges cannot be read here");
        }
        let _writer = std::fs::File::options().append(true).open(path.path().join(name)).unwrap();
        assert_eq!(charge_of(inode), Some(Charge { group: own, is_confirmed: true }));
        assert_eq!(charge_of(inode + 1), None);
    }
}
