//! The names in a folder, read in batches of bounded memory. The folder is not open between two batches.
//!
//! Since Linux 6.6 every entry of a tmpfs folder has an offset of its own, and a new entry has a higher offset than all
//! others. So a batch continues after the last one, whatever was created or deleted in between. On older kernels an
//! offset is a count of entries: if files that were read already are deleted between two batches, as many others are
//! skipped until the next scan.

use rustix::fs::{self, RawDir, SeekFrom};
use std::ffi::{OsStr, OsString};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;

/// Size of the buffer for one `getdents64` call. It holds any single entry, and some 1,000 entries with names of usual
/// length.
const BUFFER_BYTES: usize = 32 << 10;

/// Names that are still to be read from a folder.
pub(super) struct UnreadNames {
    /// Offset of the next entry.
    offset: u64,
    /// Number of names that may still be returned; 0 at the end. Without this bound, a process that creates files
    /// faster than they are read would keep the scan in one folder.
    names_left: u64,
}

impl UnreadNames {
    /// Starts at the folder's first name. `max_names` must be at least the number of entries that the folder has now.
    pub(super) fn new(max_names: u64) -> Self {
        Self { offset: 0, names_left: max_names }
    }

    /// Returns the next names: at least `min_names` and some 1,000 more, or fewer at the end of the folder. Returns
    /// none when all were returned.
    ///
    /// # Errors
    ///
    /// Errors of `lseek` and `getdents64`: `ENOENT` for a removed folder.
    pub(super) fn read_batch(&mut self, folder: &OwnedFd, min_names: usize) -> io::Result<Vec<OsString>> {
        debug_assert!(min_names > 0, "no name means that all were returned");
        let mut names = Vec::new();
        if self.names_left == 0 {
            return Ok(names);
        }
        fs::seek(folder, SeekFrom::Start(self.offset))?;
        let mut buffer = vec![MaybeUninit::uninit(); BUFFER_BYTES];
        let mut entries = RawDir::new(folder, &mut buffer);
        // The kernel's offset is after the last entry in the buffer, so a batch ends with a whole buffer.
        while names.len() < min_names || !entries.is_buffer_empty() {
            let Some(entry) = entries.next().transpose()? else {
                self.names_left = 0;
                return Ok(names);
            };
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name != "." && name != ".." {
                names.push(name.to_owned());
            }
        }
        self.offset = fs::seek(folder, SeekFrom::Current(0))?;
        self.names_left = self.names_left.saturating_sub(names.len() as u64);
        Ok(names)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::fs::File;
    use std::path::Path;

    fn open(folder: &Path) -> OwnedFd {
        File::open(folder).unwrap().into()
    }

    /// Between the batches, files that were read and files that were not are deleted, and others are created. Every
    /// file that existed all the time must be returned exactly once, and a batch must have a bounded number of names.
    #[test]
    fn files_are_read_once_while_others_come_and_go() {
        const FILES: usize = 10_000;
        /// A `struct linux_dirent64` with the shortest name.
        const MIN_ENTRY_BYTES: usize = 24;
        let Ok(place) = tempfile::tempdir_in("/dev/shm") else { return println!("skipped: no /dev/shm") };
        let path = |name: &str| place.path().join(name);
        (0..FILES).for_each(|index| drop(File::create(path(&format!("old-{index}"))).unwrap()));
        let (mut unread, mut found, mut batches) = (UnreadNames::new(u64::MAX), Vec::new(), 0);
        let mut deleted = BTreeSet::new();
        loop {
            let names = unread.read_batch(&open(place.path()), 1).unwrap();
            assert!(names.len() <= BUFFER_BYTES / MIN_ENTRY_BYTES, "{} names", names.len());
            if names.is_empty() {
                break;
            }
            batches += 1;
            let names = names.into_iter().map(|name| name.into_string().unwrap());
            found.extend(names.filter(|name| name.starts_with("old-")));
            // Deletes the last file that was read, which is next to the batch's end, others that were read, and files
            // at both ends of those that were not.
            let is_read: BTreeSet<_> = found.iter().cloned().collect();
            let (read, left): (Vec<_>, Vec<_>) =
                (0..FILES).map(|index| format!("old-{index}")).partition(|name| is_read.contains(name));
            let ends = left.iter().take(3).chain(left.iter().rev().take(3));
            for name in read.iter().step_by(7).chain(found.last()).chain(ends) {
                if deleted.insert(name.clone()) {
                    std::fs::remove_file(path(name)).unwrap();
                }
            }
            (0..100).for_each(|index| drop(File::create(path(&format!("new-{batches}-{index}"))).unwrap()));
            assert!(batches < FILES, "the end was not found");
        }
        assert!(batches > 5, "{batches} batches");
        let count = found.len();
        let found: BTreeSet<_> = found.into_iter().collect();
        let missing: Vec<_> = (0..FILES)
            .map(|index| format!("old-{index}"))
            .filter(|name| !deleted.contains(name) && !found.contains(name))
            .collect();
        if pagemill_sys::process::kernel_release() < (6, 6) {
            return println!("skipped: offsets are counts of entries; {} files were skipped", missing.len());
        }
        assert!(missing.is_empty(), "{missing:?}");
        assert_eq!(found.len(), count, "a file was returned twice");
    }

    /// After each batch, as many files are created as the batch returned. The reading must end after the files that
    /// existed at its start.
    #[test]
    fn reading_ends_although_files_are_created() {
        const FILES: usize = 3_000;
        let Ok(place) = tempfile::tempdir_in("/dev/shm") else { return println!("skipped: no /dev/shm") };
        let create = |index: usize| drop(File::create(place.path().join(index.to_string())).unwrap());
        (0..FILES).for_each(create);
        let (mut unread, mut found) = (UnreadNames::new(FILES as u64), 0);
        loop {
            let count = unread.read_batch(&open(place.path()), 1).unwrap().len();
            if count == 0 {
                break;
            }
            (0..count).for_each(|index| create(FILES + found + index));
            found += count;
            assert!(found < 10 * FILES, "the reading does not end");
        }
        assert!((FILES..2 * FILES).contains(&found), "{found} names");
    }

    /// A removed folder has no names, and reading them must be an error.
    #[test]
    fn a_removed_folder_cannot_be_read() {
        let Ok(place) = tempfile::tempdir_in("/dev/shm") else { return println!("skipped: no /dev/shm") };
        let fd = open(place.path());
        drop(place);
        let error = UnreadNames::new(u64::MAX).read_batch(&fd, 1).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
