//! Listing a directory.

use super::Inner;
use crate::child_index::{Child, IndexHandle};
use crate::error::Result;
use crate::inode::{FileType, Ino, InodeHandle};
use pagemill_core::sync::spin_loop;
use pagemill_slab::{Guard, Handle, enter};

/// Number of names that one consistent look at the index of a directory returns.
const BATCH: usize = 64;

/// An entry of a directory.
///
/// ```
/// use pagemill::ramfs::RamFs;
///
/// let fs = RamFs::new("scratch")?;
/// fs.write("/a", b"")?;
/// let mut names = Vec::new();
/// fs.visit_dir("/", 0, |entry| {
///     names.push(entry.name.to_vec());
///     true
/// })?;
/// assert_eq!(names, [b"a"]);
/// # Ok::<(), pagemill::ramfs::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct DirEntry<'a> {
    pub name: &'a [u8],
    pub ino: Ino,
    pub kind: FileType,
    /// A listing that begins with this cookie continues behind this entry. Stable until the entry is removed or
    /// renamed, whatever happens to other entries. From 8 to 2^62.
    pub cookie: u64,
}

impl Inner {
    /// Calls `visit` for the entries of a directory behind a cookie, 0 for all, until it returns false. The entries `.`
    /// and `..` are not included. Entries that exist during the whole listing are visited once; those that are added or
    /// removed meanwhile at most once.
    pub fn visit_directory(
        &self,
        handle: InodeHandle,
        after: u64,
        mut visit: impl FnMut(&DirEntry<'_>) -> bool,
    ) -> Result<()> {
        let mut after = after;
        'batches: loop {
            let guard = enter();
            let inode = self.inodes.get(handle, &guard).ok_or(super::STALE)?;
            if !inode.is_directory() {
                return Err(crate::Error::NotDirectory);
            }
            if inode.data == 0 {
                break;
            }
            let mut batch = [Child { hash: 0, dentry: Handle::from_bits(0) }; BATCH];
            let count = self.read_batch(Handle::from_bits(inode.data), after, &mut batch, &guard);
            for child in &batch[..count] {
                match self.visit_child(child, &mut visit, &guard) {
                    Some(true) => {}
                    Some(false) => return Ok(()),
                    None => {
                        after = child.hash - 1;
                        continue 'batches;
                    }
                }
            }
            if count < BATCH {
                break;
            }
            after = batch[count - 1].hash;
        }
        self.note_accessed(handle);
        Ok(())
    }

    /// Calls `visit` for a name, unless it has a negative dentry. Returns `None` if the dentry or the inode has another
    /// handle by now or was freed, so that the index must be read again.
    fn visit_child(&self, child: &Child, visit: &mut impl FnMut(&DirEntry<'_>) -> bool, guard: &Guard) -> Option<bool> {
        let dentry = self.dentries.get(child.dentry, guard)?;
        let Some(inode) = dentry.inode() else { return Some(true) };
        let name = dentry.name(&self.texts, guard)?;
        let inode = self.inodes.get(inode, guard)?;
        Some(visit(&DirEntry { name, ino: inode.ino, kind: inode.kind(), cookie: child.hash }))
    }

    /// Reads the next names of a directory, all of the same moment. Returns their number.
    fn read_batch(&self, index: IndexHandle, after: u64, batch: &mut [Child], guard: &Guard) -> usize {
        loop {
            let Some(index) = self.indices.get(index, guard) else { return 0 };
            let Some(sequence) = index.begin_read() else {
                spin_loop();
                continue;
            };
            let mut count = 0;
            for (place, child) in batch.iter_mut().zip(index.iter_after(after)) {
                *place = child;
                count += 1;
            }
            if index.is_unchanged(sequence) {
                return count;
            }
        }
    }
}
