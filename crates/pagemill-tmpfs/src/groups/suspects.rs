//! The search for limited groups that write to the file system before their processes close a file.

use super::{Groups, guard_bytes, subfolders};
use crate::openfiles::ChargedMemory;
use pagemill_core::units::BLOCK_BYTES;
use pagemill_sys::cgroup::{GroupMemory, Limit, MAX_LEVELS};
use pagemill_sys::file::Path;
use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

/// Maximum age of the list of suspects; [`Groups::list_suspects_if_due`] makes a new list after that.
const SUSPECTS_MAX_AGE: Duration = Duration::from_secs(5);
/// [`Groups::find_writers`] may list suspects more often, but only for one part in `LIST_TIME_DIVISOR` of the time.
const LIST_TIME_DIVISOR: u32 = 20;
/// Maximum number of groups in the list of suspects.
const MAX_SUSPECTS: usize = 256;

/// The open files of a suspect's processes are examined after the suspect's memory in tmpfs files has grown by more
/// than this.
const SUSPECT_GROWTH_BYTES: u64 = 4 * BLOCK_BYTES as u64;

/// A limited group that may write to this file system without the controller's knowledge (a *suspect*). Events name a
/// process only when the process closes a file, which may be too late. So when the file system grows, the suspect's
/// memory in tmpfs files is compared with the last value. If that memory has grown, the open files of the group's
/// processes are examined.
pub(super) struct Suspect {
    folder: String,
    inode: u64,
    limit_bytes: u64,
    /// Memory of the group in tmpfs files when its open files were last examined, or less if the memory shrank since
    /// then.
    shared_bytes: u64,
    /// Index of the group's process that is examined next.
    next_process: usize,
}

impl Groups {
    /// Finds limited groups that write here before their processes close a file.
    ///
    /// Must be called after the file system has grown. Selects the suspects with more memory in tmpfs files than
    /// before, and calls `charged` to examine the open files of their processes. The arguments of `charged` are cgroup
    /// folders and the index of the first process. Takes some 40 us per limited group of the machine, plus the time of
    /// `charged`.
    ///
    /// Returns whether any suspect has grown without a known cause: its groups are not known to have written enough
    /// here for the suspect's limit to bound the size.
    pub fn find_writers(&mut self, mut charged: impl FnMut(&[String], usize) -> ChargedMemory) -> bool {
        if self.listed.is_none_or(|(at, took)| at.elapsed() >= took * LIST_TIME_DIVISOR) {
            self.list_suspects();
        }
        let proved = |suspect: &Suspect| self.written_bytes_below(&suspect.folder) >= guard_bytes(suspect.limit_bytes);
        let proved: Vec<bool> = self.suspects.iter().map(proved).collect();
        let Some(hierarchy) = self.groups.values().next().map(|group| &group.hierarchy) else { return false };
        let mut grown = Vec::new();
        for (at, suspect) in self.suspects.iter_mut().enumerate().filter(|(at, _)| !proved[*at]) {
            let Some(folder) = Path::format(format_args!("{}", suspect.folder)) else { continue };
            let Ok(GroupMemory { shared_bytes, .. }) = hierarchy.memory(&folder) else { continue };
            if shared_bytes > suspect.shared_bytes.saturating_add(SUSPECT_GROWTH_BYTES) {
                grown.push((at, shared_bytes));
            }
            // The stored value never rises here, so the growth of a slow writer adds up over several calls.
            suspect.shared_bytes = suspect.shared_bytes.min(shared_bytes);
        }
        let mut is_open = false;
        for (at, shared_bytes) in grown {
            is_open |= !self.examine_suspect(at, shared_bytes, &mut charged);
        }
        is_open
    }

    /// Returns the bytes that groups at or below a cgroup folder are known to have written here.
    fn written_bytes_below(&self, folder: &str) -> u64 {
        let is_below =
            |path: &str| path.strip_prefix(folder).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        let below = self.by_folder.iter().filter(|(path, _)| is_below(path));
        let bytes = below.filter_map(|(_, id)| self.groups.get(id)).map(|group| group.credit.counted().files);
        bytes.fold(0, u64::saturating_add)
    }

    /// Examines the open files of a suspect's processes. Returns whether its groups are now known to have written
    /// enough here for the suspect's limit to bound the size.
    fn examine_suspect(
        &mut self,
        at: usize,
        shared_bytes: u64,
        charged: &mut impl FnMut(&[String], usize) -> ChargedMemory,
    ) -> bool {
        let suspect = &mut self.suspects[at];
        let mut folders = Vec::new();
        find_folders(suspect.folder.as_ref(), 0, &mut folders);
        let found = charged(&folders, suspect.next_process);
        if found.is_complete {
            // Skips the suspect until its memory has grown by `SUSPECT_GROWTH_BYTES` again.
            (suspect.shared_bytes, suspect.next_process) = (shared_bytes, 0);
        } else {
            suspect.next_process += found.processes;
        }
        let (folder, guard) = (suspect.folder.clone(), guard_bytes(suspect.limit_bytes));
        for (inode, bytes) in found.bytes {
            let group = self.of_inode(inode);
            if let Some(group) = self.groups.get_mut(&group) {
                group.credit.record_open(bytes);
                group.wrote_at = Instant::now();
            }
        }
        self.written_bytes_below(&folder) >= guard
    }

    /// Lists the limited groups if the last list is 5 s old, so that their memory is known before they write here.
    /// Returns whether a new list was made.
    pub fn list_suspects_if_due(&mut self) -> bool {
        let is_due = self.listed.is_none_or(|(at, _)| at.elapsed() >= SUSPECTS_MAX_AGE);
        if is_due {
            self.list_suspects();
        }
        is_due
    }

    /// Lists the limited groups of the machine as suspects. If a group was not in the last list, all its memory in
    /// tmpfs files counts as written after that list. The first list is an exception: only later growth counts.
    fn list_suspects(&mut self) {
        let begun = Instant::now();
        // Drops removed groups first, because a group that was created again under the old name is a different group.
        self.remove_gone_groups();
        let mut folders = Vec::new();
        if let Some(top) = self.top_folder() {
            find_folders(top.as_ref(), 0, &mut folders);
        }
        let Some(hierarchy) = self.groups.values().next().map(|group| &group.hierarchy) else { return };
        let is_first = self.listed.is_none();
        let known = |suspect: Suspect| ((suspect.folder, suspect.inode), (suspect.shared_bytes, suspect.next_process));
        let mut before: HashMap<_, _> = self.suspects.drain(..).map(known).collect();
        for folder in folders {
            let Some(path) = Path::format(format_args!("{folder}")) else { continue };
            let limit = hierarchy.limit(&path);
            if self.suspects.len() == MAX_SUSPECTS || limit == Limit::NONE {
                continue;
            }
            let inode = std::fs::metadata(&folder).map_or(0, |metadata| metadata.ino());
            let now = || if is_first { hierarchy.memory(&path).map_or(0, |held| held.shared_bytes) } else { 0 };
            let key = (folder, inode);
            let (shared_bytes, next_process) = before.remove(&key).unwrap_or_else(|| (now(), 0));
            let limit_bytes = limit.soft_bytes;
            self.suspects.push(Suspect { folder: key.0, inode, limit_bytes, shared_bytes, next_process });
        }
        self.listed = Some((Instant::now(), begun.elapsed()));
    }
}

/// Adds the folder `at` and the folders below it to `found`. Stops at some `MAX_FOUND` folders.
fn find_folders(at: &std::path::Path, depth: usize, found: &mut Vec<String>) {
    const MAX_FOUND: usize = 1024;
    if depth == MAX_LEVELS || found.len() >= MAX_FOUND {
        return;
    }
    found.extend(at.to_str().map(str::to_owned));
    subfolders(at).for_each(|folder| find_folders(&folder, depth + 1, found));
}

#[cfg(test)]
mod tests {
    use super::super::WRITER_MAX_IDLE;
    use super::super::tests::Tree;
    use super::*;

    /// Groups fill memory before they close a file. A group with open files here must be found. A group without open
    /// files must be examined once, and again only after its memory has grown.
    #[test]
    fn writers_are_found_by_their_open_files() {
        let tree = Tree::new();
        for name in ["/own", "/a", "/b"] {
            tree.group(name, "1000000000", 0);
        }
        tree.group("/free", "max", 0);
        tree.set("/proc/self/cgroup", "0::/own\n");
        let mut groups = Groups::new(tree.root());
        groups.of_self();
        groups.list_suspects();
        assert_eq!(groups.suspects.len(), 3);
        let inode = |name: &str| std::fs::metadata(format!("{}/cg/{name}", tree.root())).unwrap().ino();
        let mut open = HashMap::new();
        let asked = std::cell::Cell::new(0);
        let find = |groups: &mut Groups, open: &HashMap<u64, u64>| {
            asked.set(0);
            groups.find_writers(|_, _| {
                asked.set(asked.get() + 1);
                ChargedMemory { bytes: open.clone(), is_complete: true, processes: 1 }
            })
        };
        assert!(!find(&mut groups, &open) && groups.groups_added() == 1 && asked.get() == 0);
        let holds = |name: &str, bytes: u64| tree.set(&format!("/cg/{name}/memory.stat"), &format!("shmem {bytes}\n"));
        holds("b", 100 * SUSPECT_GROWTH_BYTES);
        assert!(find(&mut groups, &open), "it may write here");
        assert_eq!((groups.groups_added(), asked.get()), (1, 1));
        assert!(!find(&mut groups, &open) && asked.get() == 0, "it holds the same");
        holds("b", 102 * SUSPECT_GROWTH_BYTES);
        open.insert(inode("b"), 101 * SUSPECT_GROWTH_BYTES);
        assert!(!find(&mut groups, &open), "it does");
        let samples = groups.sample();
        assert!(samples.iter().any(|sample| sample.name == "/b" && sample.here_bytes == 101 * SUSPECT_GROWTH_BYTES));
        // All memory of a group that is new, or was created again, counts as written since the last list.
        std::fs::remove_dir_all(format!("{}/cg/a", tree.root())).unwrap();
        tree.group("/other", "max", 0);
        for name in ["new", "a"] {
            tree.group(&format!("/{name}"), "1000000000", 0);
            holds(name, 2 * SUSPECT_GROWTH_BYTES);
        }
        groups.list_suspects();
        assert!(find(&mut groups, &HashMap::new()) && asked.get() == 2);
        // A group that no longer writes is removed, unless it still has files open.
        let age = |groups: &mut Groups, by: Duration| {
            let id = groups.by_inode[&inode("b")];
            groups.groups.get_mut(&id).unwrap().wrote_at = Instant::now().checked_sub(by).unwrap();
            groups.limits_read_at = None;
        };
        age(&mut groups, WRITER_MAX_IDLE * 3 / 4);
        let id = groups.by_inode[&inode("b")];
        assert_eq!(groups.idle_writers(), [id]);
        groups.renew(id);
        assert!(groups.idle_writers().is_empty());
        assert!(groups.groups[&id].wrote_at.elapsed() < WRITER_MAX_IDLE / 2);
        age(&mut groups, 2 * WRITER_MAX_IDLE);
        groups.record_files(|group| group == id);
        assert!(groups.sample().iter().any(|sample| sample.name == "/b" && sample.here_bytes == 0));
        groups.record_files(|_| false);
        groups.limits_read_at = None;
        assert!(groups.sample().iter().all(|sample| sample.name != "/b"));
    }
}
