//! The volatile files in LRU order, separately for each memory group that is charged for them.

use crate::groups::GroupId;
use std::collections::{BTreeSet, HashMap};
use std::ffi::OsString;

/// Maximum number of indexed files (some 200 bytes each). Further files are purged only after others are gone.
pub const MAX_FILES: usize = 1 << 20;

/// Which part of a file is purged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PurgePart {
    Whole,
    Tail,
}

/// A volatile file as last seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    pub folder: u64,
    pub name: OsString,
    pub part: PurgePart,
    pub used_ns: i64,
    pub held_bytes: u64,
    pub group: GroupId,
}

/// The files by inode, and in order of use.
#[derive(Default)]
pub struct Index {
    files: HashMap<u64, File>,
    groups: HashMap<GroupId, Charged>,
}

/// The files charged to one group.
#[derive(Default)]
struct Charged {
    order: BTreeSet<(i64, u64)>,
    held_bytes: u64,
}

impl Index {
    /// Inserts or replaces a file. Returns whether there was room for it.
    pub fn insert(&mut self, inode: u64, file: File) -> bool {
        self.remove(inode);
        if self.files.len() >= MAX_FILES {
            return false;
        }
        let charged = self.groups.entry(file.group).or_default();
        charged.order.insert((file.used_ns, inode));
        charged.held_bytes += file.held_bytes;
        self.files.insert(inode, file);
        true
    }

    pub fn remove(&mut self, inode: u64) -> Option<File> {
        let file = self.files.remove(&inode)?;
        if let Some(charged) = self.groups.get_mut(&file.group) {
            charged.order.remove(&(file.used_ns, inode));
            charged.held_bytes -= file.held_bytes;
            if charged.order.is_empty() {
                self.groups.remove(&file.group);
            }
        }
        Some(file)
    }

    pub fn get(&self, inode: u64) -> Option<&File> {
        self.files.get(&inode)
    }

    /// Returns the least recently used file of the groups for which `counts` is true.
    pub fn oldest(&self, counts: impl Fn(GroupId) -> bool) -> Option<u64> {
        let counted = self.groups.iter().filter(|(group, _)| counts(**group));
        counted.filter_map(|(_, charged)| charged.order.first()).min().map(|(_, inode)| *inode)
    }

    /// Returns all files, sorted by folder.
    pub fn by_folder(&self) -> Vec<(u64, u64, OsString)> {
        let mut files: Vec<_> =
            self.files.iter().map(|(inode, file)| (file.folder, *inode, file.name.clone())).collect();
        files.sort_unstable();
        files
    }

    pub fn count(&self) -> usize {
        self.files.len()
    }

    /// Returns the memory of the files in groups for which `counts` is true, as last seen.
    pub fn held_bytes(&self, counts: impl Fn(GroupId) -> bool) -> u64 {
        let counted = self.groups.iter().filter(|(group, _)| counts(**group));
        counted.map(|(_, charged)| charged.held_bytes).sum()
    }

    /// Keeps the files for which `is_there` returns true.
    pub fn retain(&mut self, mut is_there: impl FnMut(u64, &File) -> bool) {
        let gone: Vec<u64> =
            self.files.iter().filter(|(inode, file)| !is_there(**inode, file)).map(|(inode, _)| *inode).collect();
        for inode in gone {
            self.remove(inode);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn file(used_ns: i64, held_bytes: u64, group: GroupId) -> File {
        File { folder: 1, name: "x".into(), part: PurgePart::Whole, used_ns, held_bytes, group }
    }

    /// The oldest file of the selected groups is returned, whatever the order of insertion.
    #[test]
    fn the_oldest_goes_first() {
        let mut index = Index::default();
        for (inode, used, group) in [(10, 5, 1), (11, 3, 2), (12, 4, 1), (13, 3, 1)] {
            assert!(index.insert(inode, file(used, 100, group)));
        }
        assert_eq!((index.count(), index.held_bytes(|_| true)), (4, 400));
        assert_eq!(index.oldest(|_| true), Some(11));
        assert_eq!(index.oldest(|group| group == 1), Some(13));
        assert_eq!(index.oldest(|group| group == 3), None);
        assert_eq!(index.held_bytes(|group| group == 1), 300);
        assert!(index.insert(13, file(9, 50, 2)), "used again, charged elsewhere");
        assert_eq!([1, 2, 3].map(|wanted| index.held_bytes(|group| group == wanted)), [200, 150, 0]);
        assert_eq!((index.oldest(|group| group == 1), index.held_bytes(|_| true)), (Some(12), 350));
        index.retain(|inode, _| inode != 12);
        assert_eq!(index.oldest(|group| group == 1), Some(10));
    }

    proptest! {
        /// Sums and order equal those of a plain list after any inserts and removals.
        #[test]
        fn it_is_a_sorted_list(steps in prop::collection::vec((0u64..20, 0i64..10, 0u64..99, 0u32..3, any::<bool>()), 0..200)) {
            let (mut index, mut list) = (Index::default(), HashMap::new());
            for (inode, used, held, group, is_in) in steps {
                if is_in {
                    index.insert(inode, file(used, held, group));
                    list.insert(inode, (used, held, group));
                } else {
                    prop_assert_eq!(index.remove(inode).is_some(), list.remove(&inode).is_some());
                }
                prop_assert_eq!(index.held_bytes(|_| true), list.values().map(|(_, held, _)| held).sum::<u64>());
                for wanted in 0..3 {
                    let oldest = list.iter().filter(|(_, file)| file.2 == wanted).map(|(inode, file)| (file.0, *inode)).min();
                    prop_assert_eq!(index.oldest(|group| group == wanted), oldest.map(|(_, inode)| inode));
                }
            }
        }
    }
}
