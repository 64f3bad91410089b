//! The memory that a group is known to have in this file system, and files that prove it.
//!
//! The event of a close names a process of a group, but the process may have written nothing, may have written to a
//! file of another group, and may delete the file later. So the bytes of a close are only a *claim*. Some claimed files
//! are kept as samples. When the claims could make a limit bound the size, the samples are examined, and the claims
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

    /// Returns `part` / `whole` of both sums.
    fn share(self, part: usize, whole: usize) -> Self {
        debug_assert!(part <= whole && whole > 0, "a share is at most the whole");
        let share = |bytes: u64| (u128::from(bytes) * part as u128 / whole as u128) as u64;
        Self { files: share(self.files), inodes: share(self.inodes) }
    }
}

/// Maximum number of samples of the claims, and of files that prove the confirmed bytes.
const MAX_SAMPLES: usize = 8;
const MAX_WITNESSES: usize = 4;

/// Distance in claimed bytes between the first two samples.
const FIRST_STEP_BYTES: u64 = 8 << 10;

/// Bytes that no page has proved yet, and a sample of the claimed files: after each `step_bytes` of claims, one file.
#[derive(Debug)]
struct Claims {
    bytes: WrittenBytes,
    samples: Vec<RecordedFile>,
    step_bytes: u64,
    /// The sum of claims at which the next file becomes a sample.
    next_bytes: u64,
    /// The file of the last claim.
    latest: Option<RecordedFile>,
}

impl Default for Claims {
    fn default() -> Self {
        let (step_bytes, next_bytes) = (FIRST_STEP_BYTES, FIRST_STEP_BYTES);
        Self { bytes: WrittenBytes::default(), samples: Vec::new(), step_bytes, next_bytes, latest: None }
    }
}

impl Claims {
    fn add(&mut self, bytes: WrittenBytes, file: RecordedFile) {
        self.bytes = self.bytes.plus(bytes);
        while self.bytes.sum() >= self.next_bytes {
            self.samples.push(file.clone());
            self.next_bytes = self.next_bytes.saturating_add(self.step_bytes);
            if self.samples.len() > MAX_SAMPLES {
                // The samples are at multiples of the step. Those at odd multiples are dropped.
                let mut is_even = true;
                self.samples.retain(|_| {
                    is_even = !is_even;
                    is_even
                });
                self.step_bytes = self.step_bytes.saturating_mul(2);
            }
            if self.next_bytes == u64::MAX {
                break;
            }
        }
        debug_assert!(self.samples.len() <= MAX_SAMPLES);
        self.latest = Some(file);
    }
}

/// What is known of one group's memory in this file system.
#[derive(Debug, Default)]
pub(super) struct Credit {
    confirmed: WrittenBytes,
    claims: Claims,
    /// Files whose pages are charged to the group, the newest last.
    witnesses: Vec<RecordedFile>,
}

impl Credit {
    pub(super) fn confirmed(&self) -> WrittenBytes {
        self.confirmed
    }

    pub(super) fn claimed(&self) -> WrittenBytes {
        self.claims.bytes
    }

    pub(super) fn is_empty(&self) -> bool {
        self.confirmed.sum() == 0 && self.claims.bytes.sum() == 0
    }

    /// Records a close that names the group.
    pub(super) fn claim(&mut self, bytes: WrittenBytes, file: RecordedFile) {
        self.claims.add(bytes, file);
    }

    /// Records a file whose pages are charged to the group.
    pub(super) fn confirm(&mut self, bytes: WrittenBytes, file: RecordedFile) {
        self.confirmed = self.confirmed.plus(bytes);
        self.add_witness(file);
    }

    /// Records that files with at least this much memory are charged to the group.
    pub(super) fn confirm_at_least(&mut self, files_bytes: u64) {
        self.confirmed.files = self.confirmed.files.max(files_bytes);
    }

    /// Returns the samples of the claims.
    pub(super) fn samples(&self) -> &[RecordedFile] {
        &self.claims.samples
    }

    /// Ends the claims after their samples were examined. `charged` are the samples that still exist and are charged to
    /// the group, of `examined` in all.
    pub(super) fn end_claims(&mut self, charged: Vec<RecordedFile>, examined: usize) {
        let claims = std::mem::take(&mut self.claims);
        self.confirmed = self.confirmed.plus(claims.bytes.share(charged.len(), examined));
        charged.into_iter().for_each(|file| self.add_witness(file));
        self.claims.latest = claims.latest;
    }

    fn add_witness(&mut self, file: RecordedFile) {
        self.witnesses.retain(|known| known.inode != file.inode);
        self.witnesses.push(file);
        self.witnesses.drain(..self.witnesses.len().saturating_sub(MAX_WITNESSES));
    }

    /// Returns files that may be charged to the group, first those that were charged to it.
    pub(super) fn files(&self) -> impl Iterator<Item = &RecordedFile> {
        let claims = &self.claims;
        self.witnesses.iter().rev().chain(&claims.latest).chain(claims.samples.iter().rev())
    }

    /// Records the present place of a file.
    pub(super) fn record_name(&mut self, file: &RecordedFile) {
        let Claims { samples, latest, .. } = &mut self.claims;
        for known in self.witnesses.iter_mut().chain(latest).chain(samples) {
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

    /// Examines the samples, of which those with these inodes are still there.
    fn end_claims(credit: &mut Credit, is_there: impl Fn(u64) -> bool) -> WrittenBytes {
        let samples = credit.samples().to_vec();
        let charged = samples.iter().filter(|file| is_there(file.inode)).cloned().collect();
        credit.end_claims(charged, samples.len());
        credit.confirmed()
    }

    /// Claims must count only in proportion to the files that are still there.
    #[test]
    fn claims_count_as_far_as_their_files_exist() {
        let mut credit = Credit::default();
        (0..6000).for_each(|inode| credit.claim(WrittenBytes { files: 100, inodes: 1436 }, file(inode)));
        assert_eq!((credit.confirmed().sum(), credit.claimed().sum()), (0, 6000 * 1536));
        assert!((MAX_SAMPLES / 2..=MAX_SAMPLES).contains(&credit.samples().len()));
        assert_eq!(end_claims(&mut credit, |_| false), WrittenBytes::default(), "all were deleted");
        assert_eq!((credit.claimed().sum(), credit.samples().len()), (0, 0));
        // The first half of the bytes is in one file, and the other half in deleted files.
        credit.claim(in_files(64 * MIB), file(1));
        (2..66).for_each(|inode| credit.claim(in_files(MIB), file(inode)));
        let half = end_claims(&mut credit, |inode| inode == 1).files;
        assert!((48 * MIB..=80 * MIB).contains(&half), "{half}");
        credit.claim(in_files(10 * MIB), file(70));
        assert_eq!(end_claims(&mut credit, |_| true).files, half + 10 * MIB);
    }

    /// The files that prove a group's memory must remain known under their present names, however much the group writes
    /// afterwards.
    #[test]
    fn witnesses_remain() {
        let mut credit = Credit::default();
        credit.confirm(in_files(MIB), file(1));
        (2..1000).for_each(|inode| credit.claim(in_files(MIB), file(inode)));
        assert_eq!(credit.files().next(), Some(&file(1)));
        assert!(credit.files().any(|known| *known == file(999)), "the last closed file");
        let renamed = RecordedFile { name: "new".into(), ..file(1) };
        credit.record_name(&renamed);
        assert_eq!(credit.files().next(), Some(&renamed));
        end_claims(&mut credit, |inode| inode == 999 || inode == 1);
        assert!(credit.files().any(|known| known.inode == 1));
    }

    /// Sums near the maximum must not overflow or loop.
    #[test]
    fn sums_are_limited() {
        let mut credit = Credit::default();
        credit.claim(in_files(u64::MAX), file(1));
        credit.claim(in_files(u64::MAX), file(2));
        assert_eq!(end_claims(&mut credit, |_| true).files, u64::MAX);
    }
}
