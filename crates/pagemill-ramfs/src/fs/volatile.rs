//! Volatile files: their contents may be purged when the file system is full, while no program has them open.

use super::walk::Last;
use super::{Inner, RamFs};
use crate::error::{Error, Result};
use crate::file_data::FileData;
use crate::inode::{Ino, Inode, InodeHandle};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

/// Flags of a regular file, in [`Inode::parent`], which only directories need otherwise.
pub(super) const LINKABLE: u64 = 1;
pub(super) const VOLATILE: u64 = 2;
const PURGED: u64 = 4;

/// Maximum number of files that a short search for a volatile file examines. The next search continues behind them.
const MAX_SHORT_SEARCH: usize = 256;

impl RamFs {
    /// Marks a regular file as volatile: permits the file system to purge it while it is not open and no client holds its
    /// number. A write that finds no room for any byte purges such files, the one marked first before the others. A write
    /// that fits in part returns a short count instead. A full quota and [`crate::File::allocate`] purge nothing. A
    /// purged file is empty. A mark of a marked file changes nothing.
    ///
    /// # Errors
    ///
    /// [`Error::IsDirectory`], [`Error::Invalid`] for other objects that are no regular files.
    ///
    /// ```
    /// use pagemill::ramfs::RamFs;
    ///
    /// let fs = RamFs::builder("tiles").bytes(1 << 20).build()?;
    /// fs.write("/tile", &[1; 700_000])?;
    /// fs.mark_volatile("/tile")?;
    /// fs.write("/other", &[2; 700_000])?; // no room without a purge
    /// assert!(fs.unmark_volatile("/tile")?, "the tile is empty, and must be computed again");
    /// assert_eq!(fs.metadata("/tile")?.size_bytes, 0);
    /// # Ok::<(), pagemill::ramfs::Error>(())
    /// ```
    pub fn mark_volatile(&self, path: impl AsRef<Path>) -> Result<()> {
        self.inode_at(path.as_ref(), Last::Follow, Inner::mark_volatile)
    }

    /// Ends the mark of a volatile file. Returns whether its contents were purged since it was marked. False for a file
    /// that is not marked.
    ///
    /// # Errors
    ///
    /// As [`RamFs::mark_volatile`].
    pub fn unmark_volatile(&self, path: impl AsRef<Path>) -> Result<bool> {
        self.inode_at(path.as_ref(), Last::Follow, Inner::unmark_volatile)
    }
}

impl Inner {
    fn regular_file(&self, handle: InodeHandle) -> Result<Inode> {
        let inode = self.inode(handle)?;
        match (inode.is_regular(), inode.is_directory()) {
            (true, _) => Ok(inode),
            (_, true) => Err(Error::IsDirectory),
            _ => Err(Error::Invalid { what: "a volatile object that is no regular file" }),
        }
    }

    fn mark_volatile(&self, handle: InodeHandle) -> Result<()> {
        let ino = self.regular_file(handle)?.ino;
        let _locked = self.locks.lock([ino]);
        let inode = self.regular_file(handle)?;
        if inode.parent & VOLATILE == 0 {
            // From here on the inode keeps its handle.
            self.update_inode(handle, |old| Inode { parent: old.parent | VOLATILE, ..*old })?;
            self.volatile.with(|volatile| volatile.add(ino, handle));
        }
        Ok(())
    }

    fn unmark_volatile(&self, handle: InodeHandle) -> Result<bool> {
        let ino = self.regular_file(handle)?.ino;
        let _locked = self.locks.lock([ino]);
        let mut was_purged = false;
        self.update_inode(handle, |old| {
            was_purged = old.parent & PURGED != 0;
            Inode { parent: old.parent & !(VOLATILE | PURGED), ..*old }
        })?;
        self.volatile.with(|volatile| volatile.remove(ino));
        Ok(was_purged)
    }

    /// Purges, of the volatile files that `which` permits and that are not open, the one marked first. Returns false if it
    /// found none. With a spill store and [`Purge::Memory`] it examines at most [`MAX_SHORT_SEARCH`] files.
    pub fn purge_one(&self, which: Purge) -> bool {
        let marked = self.volatile.with(|volatile| volatile.files.len());
        // With a spill store other data can move, so a long search is not worth its time.
        let is_short = self.spill.is_some() && which == Purge::Memory;
        let most = if is_short { marked.min(MAX_SHORT_SEARCH) } else { marked };
        (0..most).any(|_| {
            let next = self.volatile.with(VolatileFiles::rotate);
            next.is_some_and(|(ino, handle)| self.active.if_unused(ino, || self.purge(handle, which)) == Some(true))
        })
    }

    /// Purges a file that is not in use, unless its mark has ended. Returns whether memory became free, or space in the
    /// spill store.
    fn purge(&self, handle: InodeHandle, which: Purge) -> bool {
        let Ok(inode) = self.inode(handle) else { return false };
        let has_bytes = |data: &FileData| match which {
            Purge::Memory => data.has_bytes_in_memory(),
            Purge::Anywhere => matches!(data.seek_data_in(0..u64::MAX), Ok(Some(_))),
        };
        let is_wanted = |data: &Arc<FileData>| data.is_purgeable() && has_bytes(data);
        let Some(data) = self.data_of(&inode).filter(is_wanted) else { return false };
        // The purge is recorded before it happens, so that no caller takes an emptied file for a kept one.
        let mut is_marked = false;
        let recorded = self.update_inode(handle, |old| {
            is_marked = old.parent & VOLATILE != 0;
            Inode { parent: old.parent | if is_marked { PURGED } else { 0 }, ..*old }
        });
        recorded.is_ok() && is_marked && data.empty(self.page_bytes())
    }

    /// Forgets a volatile file that was freed.
    pub(super) fn forget_volatile(&self, inode: &Inode) {
        if inode.is_regular() && inode.parent & VOLATILE != 0 {
            self.volatile.with(|volatile| volatile.remove(inode.ino));
        }
    }
}

/// Which volatile files a purge may choose.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purge {
    /// Those with bytes in memory.
    Memory,
    /// Also those with all bytes in the spill store.
    Anywhere,
}

/// The marked files in the order in which they are purged.
#[derive(Default)]
pub(crate) struct VolatileFiles {
    files: BTreeMap<u64, (Ino, InodeHandle)>,
    places: HashMap<Ino, u64>,
    next_place: u64,
}

impl VolatileFiles {
    fn add(&mut self, ino: Ino, handle: InodeHandle) {
        self.files.insert(self.next_place, (ino, handle));
        self.places.insert(ino, self.next_place);
        self.next_place += 1;
    }

    fn remove(&mut self, ino: Ino) {
        self.places.remove(&ino).map(|place| self.files.remove(&place));
    }

    /// Moves the first file behind all others, and returns it.
    fn rotate(&mut self) -> Option<(Ino, InodeHandle)> {
        let (_, (ino, handle)) = self.files.pop_first()?;
        self.add(ino, handle);
        Some((ino, handle))
    }
}
