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
        loop {
            let guard = enter();
            let inode = self.inodes.get(handle, &guard).ok_or(super::STALE)?;
            if !inode.is_directory() {
                return Err(crate::Error::NotDirectory);
            }
            if inode.data == 0 {
                break;
            }
            let mut batch = [None; BATCH];
            self.read_batch(Handle::from_bits(inode.data), after, &mut batch, &guard);
            for entry in batch.iter().flatten() {
                if !visit(entry) {
                    return Ok(());
                }
            }
            match &batch[BATCH - 1] {
                Some(last) => after = last.cookie,
                None => break,
            }
        }
        self.note_accessed(handle);
        Ok(())
    }

    /// Reads the next entries of a directory into the first places of `batch`, all of the same moment. Negative dentries
    /// are left out.
    fn read_batch<'a>(&'a self, index: IndexHandle, after: u64, batch: &mut [Option<DirEntry<'a>>], guard: &'a Guard) {
        loop {
            batch.fill(None);
            let Some(index) = self.indices.get(index, guard) else { return };
            let Some(sequence) = index.begin_read() else {
                spin_loop();
                continue;
            };
            // A dentry or an inode that is not found has changed in the index meanwhile.
            let entries = index.iter_after(after).filter_map(|child| self.entry_of_child(&child, guard));
            for (place, entry) in batch.iter_mut().zip(entries) {
                *place = Some(entry);
            }
            if index.is_unchanged(sequence) {
                return;
            }
        }
    }

    /// Returns the entry of a name; `None` for a negative dentry, and if the dentry or its inode was freed or has
    /// another handle by now.
    fn entry_of_child<'a>(&'a self, child: &Child, guard: &'a Guard) -> Option<DirEntry<'a>> {
        let dentry = self.dentries.get(child.dentry, guard)?;
        let inode = self.inodes.get(dentry.inode()?, guard)?;
        let name = dentry.name(&self.texts, guard)?;
        Some(DirEntry { name, ino: inode.ino, kind: inode.kind(), cookie: child.hash })
    }
}
