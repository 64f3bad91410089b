//! The memory that a group is known to have in this file system, and files that prove it.
//!
//! The event of a close names a process of a group, but the process may have written nothing, may have written to a
//! file of another group, and may delete the file later. So the bytes of a close are only a *claim*. Some claimed files
//! are kept as samples. When the claims could make a limit bound the size, the samples are examined. The bytes then
//! count in proportion to the samples that still exist and are charged to the group.

use std::ffi::OsString;

/// A file of this file system: the inode of its folder, its name in the folder, and its inode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedFile {
    pub folder: u64,
    pub name: OsString,
    pub inode: u64,
    /// The file had no pages when it was recorded, so only its inode counted.
    pub was_empty: bool,
}

/// Memory of files, and of their inodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WrittenBytes {
    pub files: u64,
    pub inodes: u64,
}

impl WrittenBytes {
    pub(super) fn sum(self) -> u64 {
        self.files.saturating_add(self.inodes)
    }

    pub(super) fn plus(self, other: Self) -> Self {
        let files = self.files.saturating_add(other.files);
        Self { files, inodes: self.inodes.saturating_add(other.inodes) }
    }

    /// Returns `part` / `whole` of the bytes of files, and of those of inodes.
    fn share(self, part: usize, whole: usize) -> Self {
        debug_assert!(part <= whole && whole > 0, "a share is at most the whole");
        let share = |bytes: u64| (u128::from(bytes) * part as u128 / whole as u128) as u64;
        Self { files: share(self.files), inodes: share(self.inodes) }
    }
}

/// Maximum number of files that are kept as samples of a group.
const MAX_SAMPLES: usize = 8;
/// Maximum number of files in `Credit::witnesses`.
const MAX_WITNESSES: usize = 4;

/// Initial value of `Credit::step_bytes`: of each step of so many claimed bytes, one file becomes a sample.
const FIRST_STEP_BYTES: u64 = 8 << 10;

/// What is known of one group's memory in this file system.
#[derive(Debug)]
pub(super) struct Credit {
    /// Bytes that were counted at the last examination, and the claims since then.
    bytes: WrittenBytes,
    counted: WrittenBytes,
    /// Memory of files that were once found open and charged to the group.
    open_bytes: u64,
    /// One claimed file for each `step_bytes` of `bytes`.
    samples: Vec<RecordedFile>,
    step_bytes: u64,
    /// The sum of `bytes` at which the next claimed file becomes a sample.
    next_bytes: u64,
    /// The file of the last claim.
    latest: Option<RecordedFile>,
    /// Files that were charged to the group at the last examination.
    witnesses: Vec<RecordedFile>,
}

impl Default for Credit {
    fn default() -> Self {
        Self {
            bytes: WrittenBytes::default(),
            counted: WrittenBytes::default(),
            open_bytes: 0,
            samples: Vec::new(),
            step_bytes: FIRST_STEP_BYTES,
            next_bytes: FIRST_STEP_BYTES,
            latest: None,
            witnesses: Vec::new(),
        }
    }
}

impl Credit {
    /// Returns the bytes that count as the group's memory in this file system.
    pub(super) fn counted(&self) -> WrittenBytes {
        WrittenBytes { files: self.counted.files.max(self.open_bytes), ..self.counted }
    }

    /// Returns the bytes that were claimed since the last examination.
    pub(super) fn claimed(&self) -> WrittenBytes {
        let WrittenBytes { files, inodes } = self.counted;
        WrittenBytes { files: self.bytes.files - files, inodes: self.bytes.inodes - inodes }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes.sum() == 0 && self.open_bytes == 0
    }

    /// Records a close by a process of the group: `bytes` are claimed, and `file` was closed.
    pub(super) fn claim(&mut self, bytes: WrittenBytes, file: RecordedFile) {
        self.bytes = self.bytes.plus(bytes);
        while self.bytes.sum() >= self.next_bytes {
            self.samples.push(file.clone());
            self.next_bytes = self.next_bytes.saturating_add(self.step_bytes);
            if self.samples.len() > MAX_SAMPLES {
                // Every other sample is dropped, so the others have twice the distance.
                self.samples = std::mem::take(&mut self.samples).into_iter().skip(1).step_by(2).collect();
                self.step_bytes = self.step_bytes.saturating_mul(2);
            }
            if self.next_bytes == u64::MAX {
                break;
            }
        }
        debug_assert!(self.samples.len() <= MAX_SAMPLES);
        self.latest = Some(file);
    }

    /// Records that open files with at least this much memory are charged to the group.
    pub(super) fn record_open(&mut self, files_bytes: u64) {
        self.open_bytes = self.open_bytes.max(files_bytes);
    }

    pub(super) fn samples(&self) -> &[RecordedFile] {
        &self.samples
    }

    /// Counts the claimed bytes after the samples were examined. `charged` are the samples that still exist and are
    /// charged to the group, of `examined` in all.
    pub(super) fn count(&mut self, charged: Vec<RecordedFile>, examined: usize) {
        self.bytes = self.bytes.share(charged.len(), examined);
        self.counted = self.bytes;
        if charged.is_empty() {
            self.step_bytes = FIRST_STEP_BYTES;
        } else {
            self.witnesses.clone_from(&charged);
            self.witnesses.drain(..charged.len().saturating_sub(MAX_WITNESSES));
        }
        self.next_bytes = self.bytes.sum().saturating_add(self.step_bytes);
        self.samples = charged;
    }

    /// Returns files that may be charged to the group, first those that were charged to it.
    pub(super) fn files(&self) -> impl Iterator<Item = &RecordedFile> {
        self.witnesses.iter().rev().chain(&self.latest).chain(self.samples.iter().rev())
    }

    /// Records the present folder and name of a file.
    pub(super) fn record_name(&mut self, file: &RecordedFile) {
        for known in self.witnesses.iter_mut().chain(&mut self.latest).chain(&mut self.samples) {
            if known.inode == file.inode {
                (known.folder, known.name) = (file.folder, file.name.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn file(inode: u64) -> RecordedFile {
        RecordedFile { folder: 1, name: format!("{inode}").into(), inode, was_empty: false }
    }

    fn in_files(files: u64) -> WrittenBytes {
        WrittenBytes { files, inodes: 0 }
    }

    /// Examines the samples. Those for which `is_there` returns true are charged to the group.
    fn count(credit: &mut Credit, is_there: impl Fn(u64) -> bool) -> WrittenBytes {
        let samples = credit.samples().to_vec();
        let charged = samples.iter().filter(|file| is_there(file.inode)).cloned().collect();
        credit.count(charged, samples.len());
        credit.counted()
    }

    /// Claims must count only in proportion to the files that are still there.
    #[test]
    fn claims_count_as_far_as_their_files_exist() {
        let mut credit = Credit::default();
        (0..6000).for_each(|inode| credit.claim(WrittenBytes { files: 100, inodes: 1436 }, file(inode)));
        assert_eq!((credit.counted().sum(), credit.claimed().sum()), (0, 6000 * 1536));
        assert!((MAX_SAMPLES / 2..=MAX_SAMPLES).contains(&credit.samples().len()));
        assert_eq!(count(&mut credit, |_| false), WrittenBytes::default(), "all were deleted");
        assert_eq!((credit.claimed().sum(), credit.samples().len()), (0, 0));
        // The first half of the bytes is in one file, and the other half in deleted files.
        credit.claim(in_files(64 * MIB), file(1));
        (2..66).for_each(|inode| credit.claim(in_files(MIB), file(inode)));
        let half = count(&mut credit, |inode| inode == 1).files;
        assert!((48 * MIB..=80 * MIB).contains(&half), "{half}");
        credit.claim(in_files(10 * MIB), file(70));
        assert_eq!((credit.counted().files, credit.claimed().files), (half, 10 * MIB));
        assert_eq!(count(&mut credit, |_| true).files, half + 10 * MIB);
    }

    /// Files are deleted some time after their close. At each examination, the files of the last MiB still exist. The
    /// counted bytes must not add up over several examinations.
    #[test]
    fn deleted_files_do_not_add_up() {
        let mut credit = Credit::default();
        let mut inode = 0;
        for round in 0..100 {
            while credit.counted().sum() + credit.claimed().sum() < 8 * MIB {
                inode += 1;
                credit.claim(in_files(4096), file(inode));
            }
            let oldest = inode - MIB / 4096;
            let counted = count(&mut credit, |inode| inode > oldest).sum();
            assert!(counted <= 2 * MIB, "{counted} bytes after {round} rounds");
        }
    }

    /// Files that prove a group's memory must remain known under their present names, however much the group writes
    /// afterwards.
    #[test]
    fn witnesses_remain() {
        let mut credit = Credit::default();
        credit.claim(in_files(MIB), file(1));
        assert_eq!(count(&mut credit, |_| true).files, MIB);
        (2..1000).for_each(|inode| credit.claim(in_files(MIB), file(inode)));
        assert_eq!(credit.files().next(), Some(&file(1)));
        assert!(credit.files().any(|known| *known == file(999)), "the last closed file");
        let renamed = RecordedFile { name: "new".into(), ..file(1) };
        credit.record_name(&renamed);
        assert_eq!(credit.files().next(), Some(&renamed));
        count(&mut credit, |_| false);
        assert!(credit.files().any(|known| known.inode == 1));
    }

    /// Memory of open files must count at once, and must not add up.
    #[test]
    fn open_files_count_at_once() {
        let mut credit = Credit::default();
        [3, 5, 4].into_iter().for_each(|bytes| credit.record_open(bytes));
        assert_eq!((credit.counted().files, credit.claimed().files, credit.is_empty()), (5, 0, false));
    }

    /// Sums of bytes near the maximum of 64 bits must not overflow or cause an endless loop.
    #[test]
    fn sums_near_the_maximum_do_not_overflow() {
        let mut credit = Credit::default();
        credit.claim(in_files(u64::MAX), file(1));
        credit.claim(in_files(u64::MAX), file(2));
        assert_eq!(count(&mut credit, |_| true).files, u64::MAX);
    }
}
