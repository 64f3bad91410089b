//! The volatile files in LRU order, separately for each memory group that is charged for them.

use crate::groups::{GroupId, UNKNOWN};
use std::collections::{BTreeSet, HashMap};
use std::ffi::OsString;

/// Maximum number of indexed files, some 200 bytes each. While the index is full, no further file is added, so other
/// volatile files are not purged. A later scan may add them.
pub const MAX_FILES: usize = 1 << 20;

/// What a purge of a file frees: the whole file, or its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PurgePart {
    Whole,
    Tail,
}

/// The memory group that is charged for a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Charge {
    /// [`UNKNOWN`] if no group was found, or if several groups are charged.
    pub group: GroupId,
    /// The file's pages were examined. Otherwise `group` is that of the process that closed the file, which may be
    /// wrong: another process can have written the file.
    pub is_confirmed: bool,
}

impl Charge {
    pub const UNKNOWN: Self = Self { group: UNKNOWN, is_confirmed: false };
}

/// A volatile file, with its attributes when they were last read. `folder` is the inode of its folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolatileFile {
    pub folder: u64,
    pub name: OsString,
    pub part: PurgePart,
    pub used_ns: i64,
    pub held_bytes: u64,
    pub charge: Charge,
}

/// The volatile files by inode, and for each group the order in which its files were last used.
#[derive(Default)]
pub struct Index {
    files: HashMap<u64, VolatileFile>,
    groups: HashMap<Charge, GroupFiles>,
}

/// The volatile files charged to one group: time of last use and inode of each, and the sum of their memory. Empty
/// files are separate, since their purge frees little.
#[derive(Default)]
struct GroupFiles {
    order: BTreeSet<(i64, u64)>,
    empty: BTreeSet<(i64, u64)>,
    held_bytes: u64,
}

impl GroupFiles {
    fn order_of(&mut self, file: &VolatileFile) -> &mut BTreeSet<(i64, u64)> {
        if file.held_bytes == 0 { &mut self.empty } else { &mut self.order }
    }
}

impl Index {
    /// Inserts or replaces a file. Returns `false` if the index is full.
    pub fn insert(&mut self, inode: u64, file: VolatileFile) -> bool {
        self.remove(inode);
        if self.files.len() >= MAX_FILES {
            return false;
        }
        let group_files = self.groups.entry(file.charge).or_default();
        let is_new = group_files.order_of(&file).insert((file.used_ns, inode));
        debug_assert!(is_new, "a file is in one order");
        group_files.held_bytes += file.held_bytes;
        let replaced = self.files.insert(inode, file);
        debug_assert!(replaced.is_none(), "the file was removed before");
        debug_assert!(self.files.len() <= MAX_FILES);
        true
    }

    pub fn remove(&mut self, inode: u64) -> Option<VolatileFile> {
        let file = self.files.remove(&inode)?;
        debug_assert!(self.groups.contains_key(&file.charge), "the file is counted in a group");
        if let Some(group_files) = self.groups.get_mut(&file.charge) {
            let was_in_order = group_files.order_of(&file).remove(&(file.used_ns, inode));
            debug_assert!(was_in_order, "the file is in an order of its group");
            debug_assert!(group_files.held_bytes >= file.held_bytes, "the group counts the file");
            group_files.held_bytes -= file.held_bytes;
            if group_files.order.is_empty() && group_files.empty.is_empty() {
                debug_assert!(group_files.held_bytes == 0, "a group without files holds nothing");
                self.groups.remove(&file.charge);
            }
        }
        Some(file)
    }

    pub fn get(&self, inode: u64) -> Option<&VolatileFile> {
        self.files.get(&inode)
    }

    /// Returns the inode of the file that was used least recently, before `before_ns`, among the groups for which
    /// `is_selected` returns true. Returns an empty file only if there is no other.
    pub fn oldest(&self, is_selected: impl Fn(Charge) -> bool, before_ns: i64) -> Option<u64> {
        let oldest = |order_of: fn(&GroupFiles) -> &BTreeSet<(i64, u64)>| {
            let first = self.selected(&is_selected).filter_map(|group_files| order_of(group_files).first()).min();
            first.filter(|(used_ns, _)| *used_ns < before_ns).map(|(_, inode)| *inode)
        };
        oldest(|group_files| &group_files.order).or_else(|| oldest(|group_files| &group_files.empty))
    }

    /// Returns whether any indexed file counts as charged to this group.
    pub fn has_files_of(&self, group: GroupId) -> bool {
        [true, false].into_iter().any(|is_confirmed| self.groups.contains_key(&Charge { group, is_confirmed }))
    }

    /// Returns folder, inode and name of all files, sorted by folder.
    pub fn by_folder(&self) -> Vec<(u64, u64, OsString)> {
        let mut files: Vec<_> =
            self.files.iter().map(|(inode, file)| (file.folder, *inode, file.name.clone())).collect();
        files.sort_unstable();
        files
    }

    pub fn count(&self) -> usize {
        self.files.len()
    }

    /// Returns the total memory of the files in groups for which `is_selected` returns true. The memory of each file is
    /// that at its last reading.
    pub fn held_bytes(&self, is_selected: impl Fn(Charge) -> bool) -> u64 {
        self.selected(is_selected).map(|group_files| group_files.held_bytes).sum()
    }

    /// Returns the number of files in groups for which `is_selected` returns true.
    pub fn count_in(&self, is_selected: impl Fn(Charge) -> bool) -> usize {
        self.selected(is_selected).map(|group_files| group_files.order.len() + group_files.empty.len()).sum()
    }

    fn selected(&self, is_selected: impl Fn(Charge) -> bool) -> impl Iterator<Item = &GroupFiles> {
        self.groups.iter().filter(move |(charge, _)| is_selected(**charge)).map(|(_, group_files)| group_files)
    }

    /// Removes the files for which `is_there` returns false.
    pub fn retain(&mut self, mut is_there: impl FnMut(u64, &VolatileFile) -> bool) {
        let gone: Vec<u64> =
            self.files.iter().filter(|(inode, file)| !is_there(**inode, file)).map(|(inode, _)| *inode).collect();
        for inode in gone {
            self.remove(inode);
        }
        debug_assert!(self.count_in(|_| true) == self.files.len(), "each file is in one group");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn file(used_ns: i64, held_bytes: u64, group: GroupId) -> VolatileFile {
        let charge = Charge { group, is_confirmed: true };
        VolatileFile { folder: 1, name: "x".into(), part: PurgePart::Whole, used_ns, held_bytes, charge }
    }

    /// `oldest` must return the least recently used file of the selected groups, whatever the order of insertion.
    #[test]
    fn the_least_recently_used_file_is_returned() {
        let mut index = Index::default();
        for (inode, used, group) in [(10, 5, 1), (11, 3, 2), (12, 4, 1), (13, 3, 1)] {
            assert!(index.insert(inode, file(used, 100, group)));
        }
        assert_eq!((index.count(), index.held_bytes(|_| true)), (4, 400));
        assert_eq!(index.oldest(|_| true, i64::MAX), Some(11));
        assert_eq!(index.oldest(|charge| charge.group == 1, i64::MAX), Some(13));
        assert_eq!(index.oldest(|charge| charge.group == 3, i64::MAX), None);
        assert_eq!(index.held_bytes(|charge| charge.group == 1), 300);
        assert!(index.insert(13, file(9, 50, 2)), "used again, charged elsewhere");
        assert_eq!([1, 2, 3].map(|wanted| index.held_bytes(|charge| charge.group == wanted)), [200, 150, 0]);
        assert_eq!((index.oldest(|charge| charge.group == 1, i64::MAX), index.held_bytes(|_| true)), (Some(12), 350));
        index.retain(|inode, _| inode != 12);
        assert_eq!(index.oldest(|charge| charge.group == 1, i64::MAX), Some(10));
        assert!(index.insert(14, file(1, 0, 1)));
        assert_eq!(index.oldest(|charge| charge.group == 1, i64::MAX), Some(10), "an empty file is the last");
        assert_eq!(index.oldest(|charge| charge.group == 1, 5), Some(14), "the other was used later");
        assert_eq!(index.oldest(|charge| charge.group == 1, 1), None);
    }

    type Step = (u64, i64, u64, u32, bool);

    /// Steps of inode, last use, memory, group, and whether the file is inserted or removed.
    fn steps() -> impl Strategy<Value = Vec<Step>> {
        prop::collection::vec((0u64..20, 0i64..10, 0u64..4, 0u32..3, any::<bool>()), 0..200)
    }

    proptest! {
        /// After any inserts and removals, the sums and the order must equal those of a plain list.
        #[test]
        fn the_index_equals_a_sorted_list(steps in steps()) {
            let (mut index, mut list) = (Index::default(), HashMap::new());
            for (inode, used, held, group, is_in) in steps {
                if is_in {
                    index.insert(inode, file(used, held, group));
                    list.insert(inode, (used, held, group));
                } else {
                    prop_assert_eq!(index.remove(inode).is_some(), list.remove(&inode).is_some());
                }
                prop_assert_eq!(index.count_in(|charge| charge.group == 1), list.values().filter(|file| file.2 == 1).count());
                prop_assert_eq!(index.held_bytes(|_| true), list.values().map(|(_, held, _)| held).sum::<u64>());
                for wanted in 0..3 {
                    let oldest = list.iter().filter(|(_, file)| file.2 == wanted).map(|(inode, file)| (file.1 == 0, file.0, *inode)).min();
                    prop_assert_eq!(index.oldest(|charge| charge.group == wanted, i64::MAX), oldest.map(|(_, _, inode)| inode));
                }
            }
        }
    }
}
