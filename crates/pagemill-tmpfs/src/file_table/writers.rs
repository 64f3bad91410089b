//! Which memory groups have memory in this file system: determined by the closes of their processes, and by the groups
//! that are charged for the pages of files.

use super::{FileTable, charge_of_pages, groups_of_pages};
use crate::file_access::{self, FileAttributes};
use crate::groups::{GroupId, INODE_BYTES, RecordedFile, UNKNOWN, WrittenBytes};
use crate::index::Charge;
use crate::openfiles;
use pagemill_core::units::BLOCK_BYTES;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Instant;

/// Maximum number of files whose memory at the last close is recorded. When the table is full, all its entries are
/// removed.
const MAX_RECORDED_SIZES: usize = 1 << 16;

/// The charged group is read from the pages of a file with at least this much memory, if the file's last close is
/// unknown. That takes some 40 us, which is little compared with the time to write the file.
const EXAMINED_AT_ONCE_BYTES: u64 = 4 * BLOCK_BYTES as u64;

/// Memory of recently closed files at their last close, by inode. A close adds nothing if the file was not written
/// since its last close. A rename adds nothing.
#[derive(Default)]
pub(super) struct ClosedSizes(HashMap<u64, u64>);

impl ClosedSizes {
    /// Records a file's memory. Returns the growth since the last close, and whether the file was known.
    fn record(&mut self, inode: u64, held_bytes: u64) -> (u64, bool) {
        if self.0.len() >= MAX_RECORDED_SIZES {
            self.0.clear();
        }
        let known = self.0.insert(inode, held_bytes);
        (held_bytes.saturating_sub(known.unwrap_or(0)), known.is_some())
    }
}

fn recorded_file(folder: u64, name: &OsStr, seen: &FileAttributes) -> RecordedFile {
    RecordedFile { folder, name: name.to_owned(), inode: seen.inode, was_empty: seen.held_bytes == 0 }
}

impl FileTable {
    /// Returns the group that is charged for a closed or renamed file, and records the file's growth for the group.
    ///
    /// The rename of a file whose last close is known adds nothing. If the last close is unknown, the process of the
    /// event may have renamed a file that a process of another group wrote. So the pages of a large file are examined.
    /// A smaller file is claimed for the group of the event's process: while close events are off, the rename is the
    /// only sign of the writer. The examination of the group's samples rejects claims for files of other groups.
    pub(super) fn record_writer(
        &mut self,
        folder: (u64, &OwnedFd),
        name: &OsStr,
        seen: &FileAttributes,
        writer: GroupId,
    ) -> Charge {
        let (files, is_known) = self.closed_sizes.record(seen.inode, seen.held_bytes);
        let is_large_and_new = !is_known && seen.held_bytes >= EXAMINED_AT_ONCE_BYTES;
        let of_pages = (writer == UNKNOWN || (is_large_and_new && self.may_ask_for_group))
            .then(|| charge_of_pages(&mut self.groups, folder.1, name, seen.inode))
            .flatten();
        let of_event = Charge { group: writer, is_confirmed: writer != UNKNOWN && !self.may_ask_for_group };
        // If several groups are charged, the writer is one of them.
        let charge = of_pages.filter(|charge| charge.group != UNKNOWN || writer == UNKNOWN).unwrap_or(of_event);
        // The numbers of inodes rise.
        let is_new = !is_known && seen.inode > self.newest_inodes.0;
        self.newest_inodes.1 = self.newest_inodes.1.max(seen.inode);
        let bytes = WrittenBytes { files, inodes: if is_new { INODE_BYTES } else { 0 } };
        let file = recorded_file(folder.0, name, seen);
        if !is_new {
            self.groups.record_name(&file);
        }
        self.groups.claim_written(charge.group, bytes, file);
        charge
    }

    /// Returns the group of the process that closed a file. Without permission to read page charges, events carry no
    /// process id, and the result is the controller's group. With that permission, they carry none for a process
    /// outside of the controller's PID namespace, whose group is unknown.
    pub(super) fn group_of_writer(&mut self, pid: u32) -> GroupId {
        if pid == 0 {
            return if self.may_ask_for_group { UNKNOWN } else { self.own_group };
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

    /// Records which group a file's pages are charged to. The folder must be known.
    pub fn record_charge(&mut self, folder: u64, name: &OsStr, seen: &FileAttributes) {
        if !self.may_ask_for_group || seen.held_bytes == 0 {
            return;
        }
        let Ok(fd) = self.folders.open(&self.access, folder) else { return };
        if let Some(charge) = charge_of_pages(&mut self.groups, &fd, name, seen.inode) {
            let (files, _) = self.closed_sizes.record(seen.inode, seen.held_bytes);
            let file = recorded_file(folder, name, seen);
            self.groups.claim_written(charge.group, WrittenBytes { files, inodes: 0 }, file);
        }
    }

    /// Examines files that processes of a group closed, to find out which of them are charged to the group. Does so for
    /// groups whose limit could then bound the size. Takes some 40 us for each of up to eight files of such a group.
    pub fn examine_claims(&mut self) {
        if !self.may_ask_for_group {
            return;
        }
        let now = Instant::now();
        for group in self.groups.groups_to_examine(now) {
            let (mut charged, mut examined) = (Vec::new(), 0);
            for file in self.groups.samples(group) {
                let Some(is_charged) = self.is_charged_to(group, &file) else { continue };
                examined += 1;
                charged.extend(is_charged.then_some(file));
            }
            // If no file can be examined now, the next check tries again.
            if examined > 0 {
                self.groups.count_claims(group, charged, examined, now);
            }
        }
    }

    /// Counts groups as writers again that have not written for long, but still have memory here: an open file, or a
    /// file that a process of the group closed.
    pub fn renew_writers(&mut self) {
        for group in self.groups.idle_writers() {
            let has_open = || {
                let (folder, inode) = (self.groups.folder(group)?, self.groups.inode(group)?);
                Some(openfiles::charged_memory(&self.access, &[folder], 0).bytes.contains_key(&inode))
            };
            if has_open() == Some(true) || self.has_charged_file(group) {
                self.groups.renew(group);
            }
        }
    }

    /// Returns whether one of the recorded files of a group still exists and is charged to the group.
    fn has_charged_file(&mut self, group: GroupId) -> bool {
        self.groups.files(group).iter().any(|file| self.is_charged_to(group, file) == Some(true))
    }

    /// Returns whether a file still exists and a sampled page of it is charged to `group`. A file without pages counts
    /// as charged to the group that is said to have created it, and so does a sparse file of which no sampled page is
    /// resident. `None` if the file cannot be examined now.
    fn is_charged_to(&mut self, group: GroupId, file: &RecordedFile) -> Option<bool> {
        let is_gone = |error: io::Error| (error.kind() == io::ErrorKind::NotFound).then_some(false);
        let folder = match self.folders.open(&self.access, file.folder) {
            Ok(folder) => folder,
            Err(error) => return is_gone(error),
        };
        match file_access::attributes_at(&folder, &file.name) {
            Err(error) => return is_gone(error),
            Ok(seen) if seen.inode != file.inode => return Some(false),
            Ok(seen) if seen.held_bytes == 0 => return Some(file.was_empty),
            Ok(_) => {}
        }
        let found = groups_of_pages(&folder, &file.name, file.inode)?;
        Some(found.is_empty() || found.iter().any(|inode| self.groups.of_inode(*inode) == group))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Place, table};
    use super::*;
    use std::time::Duration;

    /// A close must add the growth of a file since its last close: nothing if the file was only renamed or opened.
    #[test]
    fn a_close_adds_the_growth_of_a_file() {
        let mut sizes = ClosedSizes::default();
        let closes = [(7, 100), (7, 100), (7, 130), (7, 20), (7, 50), (8, 50)];
        let growth = closes.map(|(inode, held_bytes)| sizes.record(inode, held_bytes).0);
        assert_eq!(growth, [100, 0, 30, 0, 30, 50]);
    }

    /// The event of a rename names the group of a process that did not write the file. A large file must count for the
    /// group that is charged for its pages, and nothing must count for the other group. After that, a rename must count
    /// for no group. A small file counts as claimed by the group of the process.
    #[test]
    fn a_renamed_file_counts_for_the_charged_group() {
        let Some(place) = Place::new() else { return };
        let mut table = table(&place);
        let (own, folder) = (table.own_group, table.access.root_inode());
        let fd: OwnedFd = std::fs::File::open(place.path("")).unwrap().into();
        place.write("large", EXAMINED_AT_ONCE_BYTES as usize);
        place.write("small", 4096);
        let (large, small) = (place.seen("large"), place.seen("small"));
        let is_readable = groups_of_pages(&fd, OsStr::new("large"), large.inode).is_some_and(|found| !found.is_empty());
        if !table.may_ask_for_group || own == UNKNOWN || !is_readable {
            return println!("skipped: page charges cannot be read here");
        }
        let Some(other) = other_group(&mut table) else { return println!("skipped: there is one group only") };
        let mut rename = |name: &str, seen: &FileAttributes| {
            let charge = table.record_writer((folder, &fd), OsStr::new(name), seen, other);
            (charge, [own, other].map(|group| table.groups.claimed_bytes(group)))
        };
        let large_bytes = large.held_bytes;
        let of_pages = Charge { group: own, is_confirmed: true };
        let of_event = Charge { group: other, is_confirmed: false };
        let inode_bytes = INODE_BYTES;
        assert_eq!(rename("large", &large), (of_pages, [large_bytes + inode_bytes, 0]));
        assert_eq!(rename("large", &large), (of_event, [large_bytes + inode_bytes, 0]), "the file has not grown");
        let claimed = small.held_bytes + if small.inode > large.inode { inode_bytes } else { 0 };
        assert_eq!(rename("small", &small), (of_event, [large_bytes + inode_bytes, claimed]));
    }

    /// Adds a group other than the own one to the table: the topmost one.
    fn other_group(table: &mut FileTable) -> Option<GroupId> {
        let mut folder = std::path::PathBuf::from(table.groups.folder(table.own_group)?);
        while folder.pop() {
            let group = table.groups.add_folder(folder.to_str()?);
            if let Ok(group) = group {
                return (group != table.own_group).then_some(group);
            }
        }
        None
    }

    /// The only page of a sparse file is not among the sampled ones: the file must count as charged to the group that
    /// is said to have written it. If a sampled page is charged to another group, the file must not count.
    #[test]
    fn a_file_without_a_sampled_page_counts() {
        use std::os::unix::fs::{FileExt, MetadataExt};
        let Some(place) = Place::new() else { return };
        let mut table = table(&place);
        let (folder, group) = (table.access.root_inode(), table.groups.of_inode(u64::MAX - 1));
        // Of 1024 pages, those with number 1023, 1007, 991 and so on are sampled.
        for (name, page, counts) in [("between", 1000, true), ("sampled", 1023, false)] {
            let file = std::fs::File::create(place.path(name)).unwrap();
            file.set_len(4 << 20).unwrap();
            file.write_all_at(b"x", page << 12).unwrap();
            let inode = file.metadata().unwrap().ino();
            let file = RecordedFile { folder, name: name.into(), inode, was_empty: false };
            match table.is_charged_to(group, &file) {
                None => println!("skipped: charges of pages cannot be read here"),
                Some(is_charged) => assert_eq!(is_charged, counts, "{name}"),
            }
        }
    }

    /// With permission to read page charges, the writer of an event without a process id must be unknown, so that the
    /// file's pages are examined. Without it, the controller's group must count.
    #[test]
    fn a_writer_outside_of_the_pid_namespace_is_unknown() {
        let Some(place) = Place::new() else { return };
        let mut table = table(&place);
        table.own_group = 5;
        let mut group_of = |may_ask_for_group| {
            table.may_ask_for_group = may_ask_for_group;
            table.group_of_writer(0)
        };
        assert_eq!([true, false].map(&mut group_of), [UNKNOWN, 5]);
    }

    /// Closes say that this group has written files. A file must count while it exists, also under another name, and
    /// must not count after it was removed or emptied, or for another group.
    #[test]
    fn claimed_bytes_count_if_the_files_are_charged() {
        let Some(place) = Place::new() else { return };
        let mut table = table(&place);
        if !table.may_ask_for_group || table.own_group == UNKNOWN {
            return println!("skipped: page charges cannot be read here");
        }
        let (own, root) = (table.own_group, table.access.root_inode());
        let names = ["a", "b", "c"];
        let files = names.map(|name| {
            place.write(name, 4096);
            let seen = place.seen(name);
            recorded_file(root, OsStr::new(name), &seen)
        });
        std::fs::rename(place.path("c"), place.path("d")).unwrap();
        table.groups.claim_written(own, WrittenBytes { files: 1 << 20, inodes: 0 }, files[2].clone());
        table.groups.record_name(&RecordedFile { name: "d".into(), ..files[2].clone() });
        assert!(table.has_charged_file(own));
        // The group is quiet for long. It must not be forgotten, because its closed file is still here.
        table.groups.age(own, Duration::from_secs(45));
        assert_eq!(table.groups.idle_writers(), [own]);
        table.renew_writers();
        assert!(table.groups.idle_writers().is_empty());
        assert_eq!(files.each_ref().map(|file| table.is_charged_to(own, file)), [Some(true), Some(true), Some(false)]);
        assert_eq!(table.is_charged_to(own + 1, &files[0]), Some(false));
        std::fs::remove_file(place.path("a")).unwrap();
        place.write("b", 0);
        assert_eq!(files.each_ref().map(|file| table.is_charged_to(own, file)), [Some(false); 3]);
        place.write("empty", 0);
        let empty = recorded_file(root, OsStr::new("empty"), &place.seen("empty"));
        assert_eq!(table.is_charged_to(own, &empty), Some(true), "its inode is charged");
        std::fs::remove_file(place.path("d")).unwrap();
        assert!(!table.has_charged_file(own));
    }
}
