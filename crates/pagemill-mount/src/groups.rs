//! The memory groups that files are charged to: whose limit is how near.
//!
//! A file's memory is charged to the group of who wrote it first. Groups are learned from the processes that notification
//! names, from the pages themselves where root may ask, and from `--cgroup`.

use pagemill::reclaim::limits::Room;
use pagemill::units::BLOCK_BYTES;
use pagemill_sys::cgroup::{Held, Hierarchy, Limit, MAX_LEVELS, Version};
use pagemill_sys::events::{self, Events, Source};
use pagemill_sys::file::Path;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

/// A group's number here. 0: not known.
pub type GroupId = u32;

pub const UNKNOWN: GroupId = 0;

/// Most groups that are watched. Whoever writes from one more is charged to "not known".
const MAX_GROUPS: usize = 512;

/// Limits may change: they are read anew so often.
const LIMITS_LAST: Duration = Duration::from_millis(500);

/// A process may move: its group is looked up anew so often.
const PROCESSES_LAST: Duration = Duration::from_secs(1);

/// Limited groups that do not write here are listed so often, oftener while the file system grows, as far as that takes no
/// more than this part of the time; there are at most so many.
const SUSPECTS_LAST: Duration = Duration::from_secs(5);
const LIST_SHARE: u32 = 20;
const MAX_SUSPECTS: usize = 256;

/// So much more in files in memory makes a suspect a writer.
const WRITTEN_BYTES: u64 = 4 * BLOCK_BYTES as u64;

/// A group that has written nothing for so long is forgotten: its limit is its own affair again.
const WRITERS_LAST: Duration = Duration::from_secs(60);

/// What a group held at most counts for so long.
const MOST_LASTS: Duration = Duration::from_secs(10);

/// Most processes that are kept in mind.
const MAX_PROCESSES: usize = 4096;

struct Group {
    hierarchy: Hierarchy,
    /// The watches of this group and of those above, as far as they have a limit.
    watches: Vec<usize>,
    inode: u64,
    /// When it last wrote; `None` for one that is watched in any case.
    wrote_at: Option<Instant>,
}

/// A limited group that is not known to write here. Before its first file is closed nobody tells of it, and that may be too
/// late: what it holds in memory is compared when the file system grows.
struct Suspect {
    folder: String,
    inode: u64,
    shared_bytes: u64,
}

/// A group with a limit.
struct Watch {
    folder: Path,
    name: String,
    version: Version,
    limit: Limit,
    /// The most in files in memory only, and when that was.
    most_shared: Option<(u64, Instant)>,
    /// What was found last: it counts until something else can be read.
    last: Option<Sample>,
    /// Usage at which the kernel is to wake the controller, and what does it (version 1).
    alarm: Option<(u64, Source)>,
}

/// What a look at a limited group found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    pub watch: usize,
    pub name: String,
    pub limit_bytes: u64,
    /// Used, but for what the kernel would take by itself.
    pub working_set_bytes: u64,
    /// What may come before the kernel kills.
    pub hard_room_bytes: u64,
    /// Files in memory only, this file system's and others': the most of the last seconds, for who has filled memory once
    /// does so again.
    pub shared_bytes: u64,
}

/// The groups, and the limits above them.
pub struct Groups {
    groups: BTreeMap<GroupId, Group>,
    last_id: GroupId,
    by_folder: HashMap<String, GroupId>,
    by_inode: HashMap<u64, GroupId>,
    by_process: HashMap<u32, (GroupId, Instant)>,
    watches: Vec<Watch>,
    limits_read_at: Option<Instant>,
    suspects: Vec<Suspect>,
    /// When they were listed last, and how long that took.
    listed: Option<(Instant, Duration)>,
    events: Option<Events>,
    root: String,
}

impl Groups {
    /// `root` stands before every path of the kernel: empty, or a made-up tree.
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

    /// Watches the group whose folder is given.
    ///
    /// # Errors
    ///
    /// `NotFound` if it is no memory group's.
    pub fn add_folder(&mut self, folder: &str) -> io::Result<GroupId> {
        let group = Hierarchy::find_at(&self.root, folder).map(|hierarchy| self.add(hierarchy))?;
        self.keep(group);
        Ok(group)
    }

    /// Watches a group whether it writes or not.
    fn keep(&mut self, group: GroupId) {
        if let Some(group) = self.groups.get_mut(&group) {
            group.wrote_at = None;
        }
    }

    /// The group of a process; [`UNKNOWN`] if it has ended, or no memory group is to be seen.
    pub fn of_process(&mut self, pid: u32) -> GroupId {
        if let Some((group, at)) = self.by_process.get(&pid)
            && at.elapsed() < PROCESSES_LAST
            && let Some(known) = self.groups.get_mut(group)
        {
            known.wrote_at = known.wrote_at.map(|_| Instant::now());
            return *group;
        }
        let Ok(hierarchy) = Hierarchy::find_of(&self.root, &pid.to_string()) else {
            // It has ended: what was found last is the best guess for what it wrote last.
            return self.by_process.get(&pid).map_or(UNKNOWN, |(group, _)| *group);
        };
        let group = self.add(hierarchy);
        if self.by_process.len() >= MAX_PROCESSES {
            self.by_process.clear();
        }
        self.by_process.insert(pid, (group, Instant::now()));
        group
    }

    /// The group of this process.
    pub fn of_self(&mut self) -> GroupId {
        let group = Hierarchy::find(&self.root).map_or(UNKNOWN, |hierarchy| self.add(hierarchy));
        self.keep(group);
        group
    }

    /// The group with a folder of this inode number, looked for below the mount of what is known.
    pub fn of_inode(&mut self, inode: u64) -> GroupId {
        if let Some(group) = self.by_inode.get(&inode) {
            return *group;
        }
        let found = self.top().and_then(|top| find_folder(top.into(), inode, 0));
        let hierarchy = found.and_then(|folder| Hierarchy::find_at(&self.root, folder.to_str()?).ok());
        let group = hierarchy.map_or(UNKNOWN, |hierarchy| self.add(hierarchy));
        if self.by_inode.len() < MAX_GROUPS {
            self.by_inode.insert(inode, group);
        }
        group
    }

    /// Where the controller is mounted, as far as that is visible.
    fn top(&self) -> Option<String> {
        let hierarchy = &self.groups.values().next()?.hierarchy;
        let folders = (0..MAX_LEVELS).map_while(|level| hierarchy.folder(level));
        folders.last().map(|path| path.as_str().to_owned())
    }

    /// Finds limited groups that write here although no closed file has told so yet: those that hold more in memory than when
    /// they were looked at last. To be called when the file system has grown. Some 40 us a limited group of the machine.
    pub fn find_writers(&mut self) {
        if self.listed.is_none_or(|(at, took)| at.elapsed() >= took * LIST_SHARE) {
            self.list_suspects();
        }
        let Some(hierarchy) = self.groups.values().next().map(|group| &group.hierarchy) else { return };
        let mut writers = Vec::new();
        for suspect in &mut self.suspects {
            let Some(folder) = Path::format(format_args!("{}", suspect.folder)) else { continue };
            let Ok(Held { shared_bytes, .. }) = hierarchy.held(&folder) else { continue };
            if shared_bytes > suspect.shared_bytes.saturating_add(WRITTEN_BYTES) {
                writers.push(suspect.folder.clone());
            }
            // Who is slow is found as well, only later.
            suspect.shared_bytes = suspect.shared_bytes.min(shared_bytes);
        }
        for folder in writers {
            if let Ok(hierarchy) = Hierarchy::find_at(&self.root, &folder) {
                self.add(hierarchy);
            }
        }
    }

    /// Lists limited groups now and then, so that it is known what they hold before they write.
    pub fn list_suspects_if_due(&mut self) {
        if self.listed.is_none_or(|(at, _)| at.elapsed() >= SUSPECTS_LAST) {
            self.list_suspects();
        }
    }

    /// Lists the limited groups of the machine that are not watched. What a new one holds it has written since the last list.
    fn list_suspects(&mut self) {
        let begun = Instant::now();
        // Who was removed and made anew is another.
        self.drop_gone();
        let mut folders = Vec::new();
        if let Some(top) = self.top() {
            find_folders(&top.into(), 0, &mut folders);
        }
        let Some(hierarchy) = self.groups.values().next().map(|group| &group.hierarchy) else { return };
        let is_first = self.listed.is_none();
        let mut before: HashMap<_, _> =
            self.suspects.drain(..).map(|suspect| ((suspect.folder, suspect.inode), suspect.shared_bytes)).collect();
        for folder in folders {
            let Some(path) = Path::format(format_args!("{folder}")) else { continue };
            let is_limited = || hierarchy.limit(&path) != Limit::NONE;
            if self.suspects.len() == MAX_SUSPECTS || self.by_folder.contains_key(&folder) || !is_limited() {
                continue;
            }
            let inode = std::fs::metadata(&folder).map_or(0, |metadata| metadata.ino());
            let now = || if is_first { hierarchy.held(&path).map_or(0, |held| held.shared_bytes) } else { 0 };
            let key = (folder, inode);
            let shared_bytes = before.remove(&key).unwrap_or_else(now);
            self.suspects.push(Suspect { folder: key.0, inode, shared_bytes });
        }
        self.listed = Some((Instant::now(), begun.elapsed()));
    }

    fn add(&mut self, hierarchy: Hierarchy) -> GroupId {
        let Some(folder) = hierarchy.folder(0) else { return UNKNOWN };
        if let Some(id) = self.by_folder.get(folder.as_str()) {
            if let Some(group) = self.groups.get_mut(id) {
                group.wrote_at = group.wrote_at.map(|_| Instant::now());
            }
            return *id;
        }
        if self.groups.len() >= MAX_GROUPS {
            self.drop_gone();
            if self.groups.len() >= MAX_GROUPS {
                return UNKNOWN;
            }
        }
        self.last_id += 1;
        let id = self.last_id;
        let inode = std::fs::metadata(folder.as_str()).map_or(0, |metadata| metadata.ino());
        self.by_folder.insert(folder.as_str().to_owned(), id);
        self.by_inode.insert(inode, id);
        self.groups.insert(id, Group { hierarchy, watches: Vec::new(), inode, wrote_at: Some(Instant::now()) });
        self.suspects.retain(|suspect| suspect.folder != folder.as_str());
        self.limits_read_at = None;
        id
    }

    /// Forgets groups that were removed, or have not written for long. Their numbers are not given again: what is charged to them is to nobody known.
    fn drop_gone(&mut self) {
        let is_there = |group: &Group| {
            let folder = group.hierarchy.folder(0);
            let metadata = folder.and_then(|folder| std::fs::metadata(folder.as_str()).ok());
            let is_writer = group.wrote_at.is_none_or(|at| at.elapsed() < WRITERS_LAST);
            is_writer && metadata.is_some_and(|metadata| metadata.ino() == group.inode)
        };
        self.groups.retain(|_, group| is_there(group));
        let groups = &self.groups;
        self.by_folder.retain(|_, id| groups.contains_key(id));
        self.by_inode.retain(|_, id| groups.contains_key(id));
    }

    /// Folder of a group, while it is there.
    pub fn folder(&self, group: GroupId) -> Option<String> {
        self.groups.get(&group)?.hierarchy.folder(0).map(|folder| folder.as_str().to_owned())
    }

    /// Whether giving back what is charged to `group` helps the limit of `watch`; perhaps, where the group is not known.
    pub fn helps(&self, group: GroupId, watch: usize) -> bool {
        self.groups.get(&group).is_none_or(|group| group.watches.contains(&watch))
    }

    /// Reads the limits of all groups and of those above, if that was not done lately.
    fn read_limits(&mut self) {
        if self.limits_read_at.is_some_and(|at| at.elapsed() < LIMITS_LAST) {
            return;
        }
        self.limits_read_at = Some(Instant::now());
        self.drop_gone();
        let mut before = std::mem::take(&mut self.watches);
        for group in self.groups.values_mut() {
            group.watches.clear();
            let hierarchy = &group.hierarchy;
            for folder in (0..MAX_LEVELS).map_while(|level| hierarchy.folder(level)) {
                let at = match self.watches.iter().position(|watch| watch.folder.as_str() == folder.as_str()) {
                    Some(at) => at,
                    None => {
                        let old = before.iter().position(|watch| watch.folder.as_str() == folder.as_str());
                        let old = old.map(|old| before.swap_remove(old));
                        // What cannot be read now (no descriptor is to be had, say) is as it was.
                        let known = old.as_ref().map_or(Limit::NONE, |watch| watch.limit);
                        let limit = hierarchy.try_limit(&folder).unwrap_or(known);
                        if limit == Limit::NONE {
                            continue;
                        }
                        let (alarm, last, most_shared) =
                            old.map_or((None, None, None), |watch| (watch.alarm, watch.last, watch.most_shared));
                        let name = hierarchy.name(&folder).to_owned();
                        self.watches.push(Watch {
                            folder,
                            name,
                            version: hierarchy.version,
                            limit,
                            most_shared,
                            last,
                            alarm,
                        });
                        self.watches.len() - 1
                    }
                };
                group.watches.push(at);
            }
        }
    }

    /// How many groups were learned so far, those that were forgotten too.
    pub fn learned(&self) -> u32 {
        self.last_id
    }

    /// How much of each limit is used. Some 30 us a limit.
    pub fn sample(&mut self) -> Vec<Sample> {
        self.read_limits();
        let Some(any) = self.groups.values().next() else { return Vec::new() };
        let hierarchy = &any.hierarchy;
        let look = |at: usize, watch: &mut Watch| -> io::Result<Sample> {
            let usage = hierarchy.usage_bytes(&watch.folder)?;
            let held = hierarchy.held(&watch.folder)?;
            let room = Room::of_group(watch.limit, usage, held.idle_bytes, held.other_bytes);
            let is_most = |(most, at): &(u64, Instant)| held.shared_bytes >= *most || at.elapsed() > MOST_LASTS;
            if watch.most_shared.as_ref().is_none_or(is_most) {
                watch.most_shared = Some((held.shared_bytes, Instant::now()));
            }
            Ok(Sample {
                watch: at,
                name: watch.name.clone(),
                limit_bytes: watch.limit.soft_bytes,
                working_set_bytes: usage.saturating_sub(held.idle_bytes),
                hard_room_bytes: room.kill.limit_bytes.saturating_sub(room.kill.used_bytes),
                shared_bytes: watch.most_shared.map_or(0, |(most, _)| most),
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

    /// Has the kernel wake the controller when a watch's usage passes `bytes`. Returns whether it will.
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

    /// Descriptor that is readable when an alarm has come.
    pub fn alarms(&self) -> Option<&Events> {
        self.events.as_ref()
    }

    /// Takes the alarms that have come. Only once it is known that there are some: it waits otherwise.
    pub fn take_alarms(&self) {
        if let Some(events) = &self.events {
            let _ = events::wait(events.number());
        }
    }
}

/// All folders at or below `at`.
fn find_folders(at: &std::path::PathBuf, depth: usize, found: &mut Vec<String>) {
    const MOST: usize = 1024;
    if depth == MAX_LEVELS || found.len() >= MOST {
        return;
    }
    found.extend(at.to_str().map(str::to_owned));
    let Ok(entries) = std::fs::read_dir(at) else { return };
    for entry in entries.filter_map(Result::ok).filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        find_folders(&entry.path(), depth + 1, found);
    }
}

/// The folder with this inode number at or below `at`.
fn find_folder(at: std::path::PathBuf, inode: u64, depth: usize) -> Option<std::path::PathBuf> {
    if std::fs::metadata(&at).ok()?.ino() == inode {
        return Some(at);
    }
    if depth == MAX_LEVELS {
        return None;
    }
    let entries = std::fs::read_dir(&at).ok()?.filter_map(Result::ok);
    let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    folders.map(|entry| entry.path()).find_map(|path| find_folder(path, inode, depth + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Tree(tempfile::TempDir);

    impl Tree {
        fn new() -> Self {
            let tree = Self(tempfile::tempdir().unwrap());
            tree.set("/proc/self/mountinfo", "30 23 0:26 / /cg rw - cgroup2 cgroup2 rw\n");
            tree
        }

        fn root(&self) -> &str {
            self.0.path().to_str().unwrap()
        }

        fn set(&self, path: &str, text: &str) {
            let path = std::path::PathBuf::from(format!("{}{path}", self.root()));
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }

        fn group(&self, name: &str, max: &str, current: u64) {
            self.set(&format!("/cg{name}/memory.max"), max);
            self.set(&format!("/cg{name}/memory.current"), &current.to_string());
            self.set(
                &format!("/cg{name}/memory.stat"),
                "inactive_file 10\nactive_file 5\nslab_reclaimable 0\nfile 100\nshmem 60\n",
            );
        }
    }

    /// Writers' groups are learned once, limits above them are watched, and giving helps where it is charged.
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
        assert!(groups.helps(one, 0) && groups.helps(two, 0) && groups.helps(two, 1) && groups.helps(UNKNOWN, 1));
        assert!(!groups.helps(one, 1));
        assert!(groups.folder(two).unwrap().ends_with("/cg/app/two"));
        assert!(!groups.set_alarm(0, 900), "version 2 has no thresholds");
    }

    /// A limited group that fills memory before it closes a file is found; one that holds the same as before is not.
    #[test]
    fn writers_are_found_by_what_they_hold() {
        let tree = Tree::new();
        for name in ["/own", "/a", "/b"] {
            tree.group(name, "1000000000", 0);
        }
        tree.group("/free", "max", 0);
        tree.set("/proc/self/cgroup", "0::/own\n");
        let mut groups = Groups::new(tree.root());
        groups.of_self();
        groups.list_suspects();
        assert_eq!(groups.suspects.len(), 2);
        groups.find_writers();
        assert_eq!(groups.learned(), 1);
        let holds = |name: &str, bytes: u64| tree.set(&format!("/cg/{name}/memory.stat"), &format!("shmem {bytes}\n"));
        holds("b", 100 * WRITTEN_BYTES);
        groups.find_writers();
        assert_eq!((groups.learned(), groups.suspects.len()), (2, 1));
        assert!(groups.sample().iter().any(|sample| sample.name == "/b"));
        // One that is slow is found as well.
        for step in 1..=4 {
            assert_eq!(groups.learned(), 2);
            holds("a", step * WRITTEN_BYTES / 3);
            groups.find_writers();
        }
        assert_eq!(groups.learned(), 3);
        // One that was made meanwhile, and one that was made anew, have written all that they hold.
        tree.group("/new", "1000000000", 0);
        holds("new", 2 * WRITTEN_BYTES);
        std::fs::remove_dir_all(format!("{}/cg/a", tree.root())).unwrap();
        tree.group("/other", "max", 0);
        tree.group("/a", "1000000000", 0);
        holds("a", 2 * WRITTEN_BYTES);
        groups.list_suspects();
        groups.find_writers();
        assert_eq!(groups.learned(), 5);
        // It is forgotten when it writes no more.
        groups.groups.get_mut(&2).unwrap().wrote_at = Instant::now().checked_sub(2 * WRITERS_LAST);
        groups.limits_read_at = None;
        assert!(groups.sample().iter().all(|sample| sample.name != "/b"));
    }

    /// A group that was removed counts for everybody: its pages were passed on to its parent.
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
        assert!(groups.sample().is_empty(), "nobody is left below /app");
        assert!(groups.helps(one, 0) && groups.folder(one).is_none());
        let app = groups.add_folder(&format!("{}/cg/app", tree.root())).unwrap();
        assert_eq!(groups.sample()[0].name, "/app");
        assert!(groups.folder(app).is_some());
        assert!(groups.add_folder("/nowhere").is_err());
    }
}
