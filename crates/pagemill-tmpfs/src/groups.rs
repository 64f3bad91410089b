//! The memory groups charged for files, their limits and usage.
//!
//! The kernel charges a file's page to the group of the process that first wrote the page. Pagemill learns of a group
//! when an event names one of its processes, when a page is charged to the group (only root can read page charges), or
//! from `--cgroup`. The kernel reports how much memory a group has in tmpfs files, but not in which file system. So a
//! group's limit bounds the size of this file system only if the group is known to have written here.

mod claims;
mod credit;
mod suspects;

use crate::recent_peak::RecentPeak;
use credit::Credit;
pub use credit::{RecordedFile, WrittenBytes};
use pagemill_core::reclaim::limits::Room;
use pagemill_core::units::BLOCK_BYTES;
use pagemill_sys::cgroup::{Hierarchy, Limit, MAX_LEVELS, Version};
use pagemill_sys::events::{self, Events, Source};
use pagemill_sys::file::Path;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};
use suspects::Suspect;

/// Id of a group in [`Groups`]; [`UNKNOWN`] is 0.
pub type GroupId = u32;

/// The id that stands for every group that is not in the table.
pub const UNKNOWN: GroupId = 0;

/// Memory of an inode with its directory entry and some attributes. The kernel charges it to the group of the process
/// that creates the file. An empty file takes some 1,000 bytes on Linux 6.18.
pub const INODE_BYTES: u64 = 1536;

/// Maximum number of known groups. Files written by further groups count as written by an unknown group.
const MAX_GROUPS: usize = 512;

/// Maximum age of the limits that were read; older ones are read again.
const LIMITS_MAX_AGE: Duration = Duration::from_millis(500);

/// Maximum age of a process's cached group. The cache expires because processes can move to another group.
const PROCESS_GROUP_MAX_AGE: Duration = Duration::from_secs(1);

/// The usual number of bytes below a group's limit that files may not fill ([`guard_bytes`]). They are left for page
/// tables, for other memory that is not in files, and for writes that happen while the size is changed.
const MIN_GUARD_BYTES: u64 = 4 * BLOCK_BYTES as u64;
/// The limit of a group, divided by this number, is used instead of `MIN_GUARD_BYTES` if it is more.
const GUARD_DIVISOR: u64 = 64;

/// Returns the memory below a group's limit that files may not fill, at most a quarter of the limit. The group's limit
/// bounds the size of this file system only if the group has written at least this much to this file system.
pub fn guard_bytes(limit_bytes: u64) -> u64 {
    MIN_GUARD_BYTES.max(limit_bytes / GUARD_DIVISOR).min(limit_bytes / 4)
}

/// A group of kind [`GroupKind::Writer`] that has not written for this long is removed from the table. Its limit then
/// no longer bounds the size.
const WRITER_MAX_IDLE: Duration = Duration::from_secs(60);

/// Maximum number of processes whose group is cached.
const MAX_CACHED_PROCESSES: usize = 4096;

/// A known memory group.
struct Group {
    hierarchy: Hierarchy,
    /// Indexes in `Groups::watches` of the limits that apply to this group: its own and those of its ancestors.
    watches: Vec<usize>,
    /// Inode number of the cgroup folder.
    inode: u64,
    kind: GroupKind,
    /// When a process of the group last wrote to this file system, as far as is known.
    wrote_at: Instant,
    /// Memory that the group is known, or claimed, to have in this file system.
    credit: Credit,
    /// When the claims of the group were last examined.
    examined_at: Option<Instant>,
    /// Volatile files are charged to the group.
    has_files: bool,
}

impl Group {
    /// Returns how much memory of the group counts as memory of this file system.
    fn counted_bytes(&self) -> WrittenBytes {
        let counted = self.credit.counted();
        match self.kind {
            GroupKind::Trusted => WrittenBytes { files: u64::MAX, ..counted },
            GroupKind::Writer | GroupKind::Kept => counted,
        }
    }
}

/// How long a group stays in the table, and how much of its memory counts as memory of this file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GroupKind {
    /// A group that is removed when it stops writing. Counts with the bytes that it is known to have written here.
    Writer,
    /// A group that is never removed while its folder exists. Counts with the bytes that it is known to have written
    /// here.
    Kept,
    /// A group that is never removed while its folder exists. All its memory in tmpfs files counts, because the user
    /// named the group, or because the controller cannot distinguish groups.
    Trusted,
}

/// A limited group: a known group or an ancestor of one.
struct Watch {
    folder: Path,
    name: String,
    version: Version,
    limit: Limit,
    /// Recent peak of the group's memory in tmpfs files.
    peak_shared: RecentPeak,
    /// The last sample of limit and usage, used until a later reading of them succeeds.
    last: Option<Sample>,
    /// Usage above which the kernel wakes the controller, and the event source for it (cgroup version 1 only).
    alarm: Option<(u64, Source)>,
}

impl Watch {
    /// Watches the group with this cgroup folder, whose limit was not read yet.
    fn new(hierarchy: &Hierarchy, folder: Path) -> Self {
        let (name, peak_shared) = (hierarchy.name(&folder).to_owned(), RecentPeak::new(Instant::now()));
        Self { folder, name, version: hierarchy.version, limit: Limit::NONE, peak_shared, last: None, alarm: None }
    }
}

/// Limit and usage of a limited group. `watch` is its index among the limited groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    pub watch: usize,
    pub name: String,
    pub limit_bytes: u64,
    /// Usage less inactive file pages, which the kernel reclaims by itself.
    pub working_set_bytes: u64,
    /// Bytes that the group can still use until the kernel kills one of its processes.
    pub hard_room_bytes: u64,
    /// Memory of the group that counts as memory of this file system: the bytes that the group wrote here, but at most
    /// the recent peak of its memory in tmpfs files, and the inodes that it created here. The peak is used because a
    /// group that has filled memory once may fill it again.
    pub here_bytes: u64,
}

/// The table of memory groups that write to this file system, and of the limits on them and their ancestors.
pub struct Groups {
    groups: BTreeMap<GroupId, Group>,
    last_id: GroupId,
    by_folder: HashMap<String, GroupId>,
    by_inode: HashMap<u64, GroupId>,
    /// The cached group of each process, and when it was read.
    by_process: HashMap<u32, (GroupId, Instant)>,
    /// The limited groups.
    watches: Vec<Watch>,
    limits_read_at: Option<Instant>,
    suspects: Vec<Suspect>,
    /// When suspects were last listed, and how long the listing took.
    listed: Option<(Instant, Duration)>,
    events: Option<Events>,
    root: String,
}

impl Groups {
    /// Creates an empty table. `root` is prepended to every kernel path: empty, or the root of a test's copy of `/proc`
    /// and cgroup folders.
    pub fn new(root: &str) -> Self {
        Self {
            groups: BTreeMap::new(),
            last_id: UNKNOWN,
            by_folder: HashMap::new(),
            by_inode: HashMap::new(),
            by_process: HashMap::new(),
            watches: Vec::new(),
            limits_read_at: None,
            suspects: Vec::new(),
            listed: None,
            events: Events::new().ok(),
            root: root.to_owned(),
        }
    }

    /// Adds the group with this cgroup folder. The group is never removed while its folder exists, and counts as in
    /// [`Self::trust`].
    ///
    /// # Errors
    ///
    /// `NotFound` if `folder` is not the folder of a memory group.
    pub fn add_folder(&mut self, folder: &str) -> io::Result<GroupId> {
        let group = Hierarchy::find_at(&self.root, folder).map(|hierarchy| self.add(hierarchy))?;
        self.trust(group);
        Ok(group)
    }

    /// Counts all memory that the group has in tmpfs files as memory of this file system.
    pub fn trust(&mut self, group: GroupId) {
        if let Some(group) = self.groups.get_mut(&group) {
            group.kind = GroupKind::Trusted;
        }
    }

    /// Returns the group of a process; [`UNKNOWN`] if the process has begun to exit, so that its group cannot be read.
    pub fn of_process(&mut self, pid: u32) -> GroupId {
        if let Some((group, at)) = self.by_process.get(&pid)
            && at.elapsed() < PROCESS_GROUP_MAX_AGE
            && let Some(known) = self.groups.get_mut(group)
        {
            known.wrote_at = Instant::now();
            return *group;
        }
        let Ok(hierarchy) = Hierarchy::find_of(&self.root, &pid.to_string()) else { return UNKNOWN };
        // Version 1 reports the topmost group for a process that exits. The state is read after the group, because the
        // process can begin to exit in between.
        let may_be_wrong = hierarchy.version == Version::V1 && hierarchy.folder(1).is_none();
        if may_be_wrong && is_exiting(&self.root, pid) {
            return UNKNOWN;
        }
        let group = self.add(hierarchy);
        if self.by_process.len() >= MAX_CACHED_PROCESSES {
            self.by_process.clear();
        }
        self.by_process.insert(pid, (group, Instant::now()));
        group
    }

    /// Returns the group of this process. The group is never removed while its folder exists.
    pub fn of_self(&mut self) -> GroupId {
        let group = Hierarchy::find(&self.root).map_or(UNKNOWN, |hierarchy| self.add(hierarchy));
        if let Some(group) = self.groups.get_mut(&group) {
            group.kind = GroupKind::Kept;
        }
        group
    }

    /// Returns the group whose cgroup folder has this inode number; [`UNKNOWN`] if none is found. Searches the whole
    /// visible hierarchy.
    pub fn of_inode(&mut self, inode: u64) -> GroupId {
        if let Some(group) = self.by_inode.get(&inode) {
            return *group;
        }
        let found = self.top_folder().and_then(|top| find_folder(top.into(), inode, 0));
        let hierarchy = found.and_then(|folder| Hierarchy::find_at(&self.root, folder.to_str()?).ok());
        let group = hierarchy.map_or(UNKNOWN, |hierarchy| self.add(hierarchy));
        if self.by_inode.len() < MAX_GROUPS {
            self.by_inode.insert(inode, group);
        }
        group
    }

    /// Returns the topmost visible folder of the hierarchy.
    fn top_folder(&self) -> Option<String> {
        let hierarchy = &self.groups.values().next()?.hierarchy;
        let folders = (0..MAX_LEVELS).map_while(|level| hierarchy.folder(level));
        folders.last().map(|path| path.as_str().to_owned())
    }

    /// Returns the groups that have memory here and have not written for half of `WRITER_MAX_IDLE`. A group whose
    /// memory is still here must be renewed, or its limit no longer bounds the size.
    pub fn idle_writers(&self) -> Vec<GroupId> {
        let is_idle = |group: &Group| !group.credit.is_empty() && group.wrote_at.elapsed() > WRITER_MAX_IDLE / 2;
        self.groups.iter().filter(|(_, group)| is_idle(group)).map(|(id, _)| *id).collect()
    }

    /// Moves the recorded time of the last write of a group back by `by`.
    #[cfg(test)]
    pub fn age(&mut self, group: GroupId, by: Duration) {
        if let Some(group) = self.groups.get_mut(&group) {
            group.wrote_at = group.wrote_at.checked_sub(by).unwrap_or(group.wrote_at);
        }
    }

    /// Counts the last write of a group as now.
    pub fn renew(&mut self, group: GroupId) {
        if let Some(group) = self.groups.get_mut(&group) {
            group.wrote_at = Instant::now();
        }
    }

    /// Returns files that may be charged to a group, the likeliest first.
    pub fn files(&self, group: GroupId) -> Vec<RecordedFile> {
        self.groups.get(&group).map_or_else(Vec::new, |group| group.credit.files().cloned().collect())
    }

    /// Returns the inode of a group's cgroup folder; `None` if the group is not in the table.
    pub fn inode(&self, group: GroupId) -> Option<u64> {
        self.groups.get(&group).map(|group| group.inode)
    }

    fn add(&mut self, hierarchy: Hierarchy) -> GroupId {
        let Some(folder) = hierarchy.folder(0) else { return UNKNOWN };
        if let Some(id) = self.by_folder.get(folder.as_str()) {
            let id = *id;
            self.renew(id);
            return id;
        }
        if self.groups.len() >= MAX_GROUPS {
            self.remove_gone_groups();
            if self.groups.len() >= MAX_GROUPS {
                return UNKNOWN;
            }
        }
        self.last_id += 1;
        let id = self.last_id;
        debug_assert!(id != UNKNOWN && !self.groups.contains_key(&id), "ids are not reused");
        let inode = std::fs::metadata(folder.as_str()).map_or(0, |metadata| metadata.ino());
        self.by_folder.insert(folder.as_str().to_owned(), id);
        self.by_inode.insert(inode, id);
        let group = Group {
            hierarchy,
            watches: Vec::new(),
            inode,
            kind: GroupKind::Writer,
            wrote_at: Instant::now(),
            credit: Credit::default(),
            examined_at: None,
            has_files: false,
        };
        self.groups.insert(id, group);
        self.limits_read_at = None;
        id
    }

    /// Removes groups that no longer exist, and those of kind [`GroupKind::Writer`] that have not written for long.
    /// Their ids are not reused: files charged to them count as charged to an unknown group.
    fn remove_gone_groups(&mut self) {
        let is_there = |group: &mut Group| {
            let folder = group.hierarchy.folder(0);
            let metadata = folder.and_then(|folder| std::fs::metadata(folder.as_str()).ok());
            let is_writer = group.wrote_at.elapsed() < WRITER_MAX_IDLE;
            if !is_writer {
                group.credit = Credit::default();
            }
            let is_watched = is_writer || group.has_files || group.kind != GroupKind::Writer;
            is_watched && metadata.is_some_and(|metadata| metadata.ino() == group.inode)
        };
        self.groups.retain(|_, group| is_there(group));
        let groups = &self.groups;
        self.by_folder.retain(|_, id| groups.contains_key(id));
        self.by_inode.retain(|_, id| groups.contains_key(id));
    }

    pub fn contains(&self, group: GroupId) -> bool {
        self.groups.contains_key(&group)
    }

    /// Returns the cgroup folder of a group; `None` if the group is not in the table.
    pub fn folder(&self, group: GroupId) -> Option<String> {
        self.groups.get(&group)?.hierarchy.folder(0).map(|folder| folder.as_str().to_owned())
    }

    /// Returns whether freeing memory charged to `group` lowers the usage of the limited group `watch`. True for a
    /// group that is unknown or was removed: the file may be charged to a descendant of `watch`.
    pub fn lowers_usage_of(&self, group: GroupId, watch: usize) -> bool {
        self.groups.get(&group).is_none_or(|group| group.watches.contains(&watch))
    }

    /// Reads the limits of all groups and their ancestors, unless they were read less than `LIMITS_MAX_AGE` ago.
    fn read_limits(&mut self) {
        if self.limits_read_at.is_some_and(|at| at.elapsed() < LIMITS_MAX_AGE) {
            return;
        }
        self.limits_read_at = Some(Instant::now());
        self.remove_gone_groups();
        let mut before = std::mem::take(&mut self.watches);
        for group in self.groups.values_mut() {
            group.watches.clear();
            let hierarchy = &group.hierarchy;
            for folder in (0..MAX_LEVELS).map_while(|level| hierarchy.folder(level)) {
                let at = match self.watches.iter().position(|watch| watch.folder.as_str() == folder.as_str()) {
                    Some(at) => at,
                    None => {
                        let mut watch = match before.iter().position(|watch| watch.folder.as_str() == folder.as_str()) {
                            Some(old) => before.swap_remove(old),
                            None => Watch::new(hierarchy, folder),
                        };
                        // A limit that cannot be read now, for lack of a descriptor for example, keeps its last value.
                        watch.limit = hierarchy.try_limit(&watch.folder).unwrap_or(watch.limit);
                        if watch.limit == Limit::NONE {
                            continue;
                        }
                        self.watches.push(watch);
                        self.watches.len() - 1
                    }
                };
                debug_assert!(at < self.watches.len() && !group.watches.contains(&at), "one watch for each level");
                group.watches.push(at);
            }
        }
    }

    /// Records which groups are charged for volatile files. Such a group stays in the table, since these files must be
    /// purged before its limit is reached by memory of any kind.
    pub fn record_files(&mut self, has_files: impl Fn(GroupId) -> bool) {
        self.groups.iter_mut().for_each(|(id, group)| group.has_files = has_files(*id));
    }

    /// Returns how many groups have been added so far, including groups that were removed again.
    pub fn groups_added(&self) -> u32 {
        self.last_id
    }

    /// Returns limit and usage of every limited group. Takes some 30 us per limited group.
    pub fn sample(&mut self) -> Vec<Sample> {
        self.read_limits();
        let counted = self.bytes_by_watch(Group::counted_bytes);
        let Some(any) = self.groups.values().next() else { return Vec::new() };
        let hierarchy = &any.hierarchy;
        let look = |at: usize, watch: &mut Watch| -> io::Result<Sample> {
            let usage = hierarchy.usage_bytes(&watch.folder)?;
            let held = hierarchy.memory(&watch.folder)?;
            let room = Room::of_group(watch.limit, usage, held.idle_bytes, held.other_bytes);
            let peak_shared = watch.peak_shared.record(held.shared_bytes, Instant::now());
            Ok(Sample {
                watch: at,
                name: watch.name.clone(),
                limit_bytes: watch.limit.soft_bytes,
                working_set_bytes: usage.saturating_sub(held.idle_bytes),
                hard_room_bytes: room.kill.limit_bytes.saturating_sub(room.kill.used_bytes),
                here_bytes: peak_shared.min(counted[at].files).saturating_add(counted[at].inodes),
            })
        };
        for (at, watch) in self.watches.iter_mut().enumerate() {
            match look(at, watch) {
                Ok(sample) => watch.last = Some(sample),
                Err(error) if error.kind() == io::ErrorKind::NotFound => watch.last = None,
                Err(_) => {}
            }
        }
        let samples = self.watches.iter().enumerate();
        samples.filter_map(|(watch, known)| Some(Sample { watch, ..known.last.clone()? })).collect()
    }

    /// Returns for each limited group the sum of `bytes_of` over the group and its descendants.
    fn bytes_by_watch(&self, bytes_of: impl Fn(&Group) -> WrittenBytes) -> Vec<WrittenBytes> {
        let mut sums = vec![WrittenBytes::default(); self.watches.len()];
        for group in self.groups.values() {
            let bytes = bytes_of(group);
            for &watch in &group.watches {
                sums[watch] = sums[watch].plus(bytes);
            }
        }
        sums
    }

    /// Sets an alarm: the kernel wakes the controller when the usage of the limited group `watch` passes `bytes`.
    /// Returns whether the alarm is set.
    pub fn set_alarm(&mut self, watch: usize, bytes: u64) -> bool {
        let (Some(events), Some(watch)) = (&self.events, self.watches.get_mut(watch)) else { return false };
        if watch.version != Version::V1 {
            return false;
        }
        if watch.alarm.as_ref().is_none_or(|(at, _)| *at != bytes) {
            watch.alarm = None;
            watch.alarm = events.add_threshold(watch.folder.as_str(), bytes).ok().map(|source| (bytes, source));
        }
        watch.alarm.is_some()
    }

    /// Returns the descriptor that becomes readable when an alarm fires.
    pub fn alarms(&self) -> Option<&Events> {
        self.events.as_ref()
    }

    /// Consumes the alarms that have fired. Blocks until an alarm fires if none has.
    pub fn take_alarms(&self) {
        if let Some(events) = &self.events {
            let _ = events::wait(events.number());
        }
    }
}

/// Returns whether a process has begun to exit, or has ended.
fn is_exiting(root: &str, pid: u32) -> bool {
    /// Flag of an exiting process (`include/linux/sched.h`), and the index of the flags after the process's name.
    const PF_EXITING: u32 = 4;
    const FLAGS: usize = 6;
    let stat = std::fs::read_to_string(format!("{root}/proc/{pid}/stat")).unwrap_or_default();
    let flags = stat.rsplit_once(") ").and_then(|(_, fields)| fields.split(' ').nth(FLAGS)?.parse::<u32>().ok());
    flags.is_none_or(|flags| flags & PF_EXITING != 0)
}

/// Returns the folder with this inode number at or below `at`.
fn find_folder(at: std::path::PathBuf, inode: u64, depth: usize) -> Option<std::path::PathBuf> {
    if std::fs::metadata(&at).ok()?.ino() == inode {
        return Some(at);
    }
    if depth == MAX_LEVELS {
        return None;
    }
    subfolders(&at).find_map(|path| find_folder(path, inode, depth + 1))
}

/// Returns the folders in the folder `at`; none if it cannot be read.
fn subfolders(at: &std::path::Path) -> impl Iterator<Item = std::path::PathBuf> {
    let entries = std::fs::read_dir(at).into_iter().flatten().filter_map(Result::ok);
    entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path())
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) struct Tree(tempfile::TempDir);

    impl Tree {
        pub(super) fn new() -> Self {
            let tree = Self(tempfile::tempdir().unwrap());
            tree.set("/proc/self/mountinfo", "30 23 0:26 / /cg rw - cgroup2 cgroup2 rw\n");
            tree
        }

        pub(super) fn root(&self) -> &str {
            self.0.path().to_str().unwrap()
        }

        pub(super) fn set(&self, path: &str, text: &str) {
            let path = std::path::PathBuf::from(format!("{}{path}", self.root()));
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }

        pub(super) fn group(&self, name: &str, max: &str, current: u64) {
            self.set(&format!("/cg{name}/memory.max"), max);
            self.set(&format!("/cg{name}/memory.current"), &current.to_string());
            self.set(
                &format!("/cg{name}/memory.stat"),
                "inactive_file 10\nactive_file 5\nslab_reclaimable 0\nfile 100\nshmem 60\n",
            );
        }
    }

    /// Two processes in groups below a limit write. Each group must be added once. The limits on the groups and on
    /// their parent must be read. Freeing memory must lower the usage only of limits above the charged group.
    #[test]
    fn limits_above_writers_are_watched() {
        let tree = Tree::new();
        tree.group("/app", "1000", 400);
        tree.group("/app/one", "max", 300);
        tree.group("/app/two", "500", 100);
        tree.set("/proc/7/cgroup", "0::/app/one\n");
        tree.set("/proc/8/cgroup", "0::/app/two\n");
        let mut groups = Groups::new(tree.root());
        let (one, two) = (groups.of_process(7), groups.of_process(8));
        assert_eq!((one, two, groups.of_process(7), groups.of_process(9)), (1, 2, 1, UNKNOWN));
        let samples = groups.sample();
        let named: Vec<_> = samples.iter().map(|sample| (sample.name.as_str(), sample.limit_bytes)).collect();
        assert_eq!(named, [("/app", 1000), ("/app/two", 500)]);
        assert_eq!((samples[0].working_set_bytes, samples[0].hard_room_bytes), (390, 1000 - 390 + 5));
        assert!(
            groups.lowers_usage_of(one, 0)
                && groups.lowers_usage_of(two, 0)
                && groups.lowers_usage_of(two, 1)
                && groups.lowers_usage_of(UNKNOWN, 1)
        );
        assert!(!groups.lowers_usage_of(one, 1));
        assert!(groups.folder(two).unwrap().ends_with("/cg/app/two"));
        assert!(!groups.set_alarm(0, 900), "version 2 has no thresholds");
    }

    /// A group must count with the bytes that it wrote here, at most its memory in tmpfs files. A group that the user
    /// named must count with all its memory in tmpfs files.
    #[test]
    fn counted_bytes_are_those_written_here() {
        let tree = Tree::new();
        tree.group("/app", "1000", 400);
        tree.group("/named", "1000", 400);
        tree.set("/proc/7/cgroup", "0::/app\n");
        let mut groups = Groups::new(tree.root());
        let app = groups.of_process(7);
        groups.add_folder(&format!("{}/cg/named", tree.root())).unwrap();
        let here = |groups: &mut Groups| groups.sample().iter().map(|sample| sample.here_bytes).collect::<Vec<_>>();
        assert_eq!(here(&mut groups), [0, 60]);
        let write = |groups: &mut Groups, bytes| {
            groups.claim_written(app, bytes, file(1));
            groups.count_claims(app, vec![file(1)], 1, Instant::now());
        };
        write(&mut groups, in_files(50));
        assert_eq!(here(&mut groups), [50, 60]);
        write(&mut groups, in_files(50));
        assert_eq!(here(&mut groups), [60, 60], "it has deleted some of it");
        write(&mut groups, WrittenBytes { files: 0, inodes: INODE_BYTES });
        assert_eq!(here(&mut groups), [60 + INODE_BYTES, 60], "inodes are no memory in files");
    }

    pub(super) fn file(inode: u64) -> RecordedFile {
        RecordedFile { folder: 1, name: "file".into(), inode, was_empty: false }
    }

    pub(super) fn in_files(files: u64) -> WrittenBytes {
        WrittenBytes { files, inodes: 0 }
    }

    /// A group is removed while files are still charged to it. The files must count for every limit, because the kernel
    /// moves the charges to the parent group.
    #[test]
    fn removed_groups_are_unknown() {
        let tree = Tree::new();
        tree.group("/app", "1000", 400);
        tree.group("/app/one", "500", 300);
        tree.set("/proc/7/cgroup", "0::/app/one\n");
        let mut groups = Groups::new(tree.root());
        let one = groups.of_process(7);
        let inode = std::fs::metadata(format!("{}/cg/app/one", tree.root())).unwrap().ino();
        assert_eq!((groups.sample().len(), groups.of_inode(inode)), (2, one));
        std::fs::remove_dir_all(format!("{}/cg/app/one", tree.root())).unwrap();
        groups.limits_read_at = None;
        assert!(groups.sample().is_empty(), "no process is left below /app");
        assert!(groups.lowers_usage_of(one, 0) && groups.folder(one).is_none());
        let app = groups.add_folder(&format!("{}/cg/app", tree.root())).unwrap();
        assert_eq!(groups.sample()[0].name, "/app");
        assert!(groups.folder(app).is_some());
        assert!(groups.add_folder("/nowhere").is_err());
    }
}
