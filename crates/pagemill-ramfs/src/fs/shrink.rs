//! Giving memory back: negative dentries, sparse slabs, and sparse pages of handle tables.
//!
//! Slab caches move values by themselves, but handle tables can only free pages in which no handle is in use. So
//! [`RamFs::shrink`] first gives inodes and dentries with high handles low ones (*renumbering*). Only an inode that
//! its directory alone refers to gets another handle: inodes in use, volatile files, files with several names, and
//! directories that contain directories keep theirs.

use super::volatile::VOLATILE;
use super::{Inner, RamFs};
use crate::child_index::{Child, ChildIndex};
use crate::dentry::{Dentry, DentryHandle};
use crate::error::Result;
use crate::inode::InodeHandle;
use crate::negative::Negative;
use pagemill_slab::{Handle, HandleMap, Movable, SlabCache, enter};

/// Handles in one page of a handle table.
const HANDLES_PER_PAGE: u32 = 512;

/// What a call of [`RamFs::shrink`] has done.
///
/// Example: [`RamFs::shrink`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shrunk {
    /// Bytes by which the memory of metadata fell, and free bytes of the page cache that returned to the system.
    pub freed_bytes: u64,
    pub freed_dentries: u64,
    /// Inodes and dentries that got another handle.
    pub renumbered: u64,
}

/// The lowest handle indices that are to be free, of inodes and of dentries.
#[derive(Clone, Copy)]
struct Bounds {
    inode: u32,
    dentry: u32,
}

/// Objects whose last references were replaced, so that they can be freed.
#[derive(Default)]
struct Replaced {
    dentries: Vec<DentryHandle>,
}

impl RamFs {
    /// Returns unused memory to the system: frees all negative dentries, packs inodes and names into fewer slabs, makes
    /// sparse directories and handle tables smaller, and frees unused memory of the page cache.
    ///
    /// Cost: about a microsecond for each inode that is left. Changes wait while one directory is processed; look-ups
    /// do not wait.
    ///
    /// # Errors
    ///
    /// [`crate::Error::Memory`] with [`pagemill_core::Error::Busy`] if another thread defragments a slab cache for a
    /// second.
    ///
    /// ```
    /// use pagemill::ramfs::RamFs;
    ///
    /// let fs = RamFs::new("scratch")?;
    /// (0..2000).try_for_each(|i| fs.write(format!("/{i}"), b""))?;
    /// (0..2000).filter(|i| i % 10 > 0).try_for_each(|i| fs.remove_file(format!("/{i}")))?;
    /// let shrunk = fs.shrink()?;
    /// println!("{} bytes less, {} handles replaced", shrunk.freed_bytes, shrunk.renumbered);
    /// assert!(fs.exists("/1990"));
    /// # Ok::<(), pagemill::ramfs::Error>(())
    /// ```
    pub fn shrink(&self) -> Result<Shrunk> {
        let inner = &*self.inner;
        let before = inner.metadata_bytes();
        let freed_dentries = inner.free_negatives();
        inner.shrink_slabs()?;
        let renumbered = if inner.is_movable { inner.renumber()? } else { 0 };
        if renumbered > 0 {
            inner.shrink_slabs()?;
        }
        let freed_bytes = before.saturating_sub(inner.metadata_bytes()) + inner.cache.shrink();
        Ok(Shrunk { freed_bytes, freed_dentries, renumbered })
    }

    /// Frees the negative dentries that lie in sparse slabs (*partial shrink*), and the slabs that are empty then.
    /// Moves nothing. `used_percent` is the percentage of use below which a slab is sparse.
    ///
    /// # Errors
    ///
    /// As [`RamFs::shrink`].
    pub fn shrink_partially(&self, used_percent: u32) -> Result<Shrunk> {
        let inner = &*self.inner;
        let before = inner.metadata_bytes();
        let is_sparse = inner.dentries.sparse_handles(used_percent)?;
        let chosen = inner.negatives.take_where(|negative| is_sparse.contains(&negative.dentry));
        let freed_dentries = inner.evict_negatives(chosen);
        inner.dentries.trim()?;
        Ok(Shrunk { freed_bytes: before.saturating_sub(inner.metadata_bytes()), freed_dentries, renumbered: 0 })
    }
}

impl Inner {
    fn free_negatives(&self) -> u64 {
        self.evict_negatives(self.negatives.take_where(|_| true))
    }

    fn evict_negatives(&self, negatives: Vec<Negative>) -> u64 {
        negatives.into_iter().filter(|negative| self.evict_negative(*negative)).count() as u64
    }

    fn shrink_slabs(&self) -> Result<()> {
        for cache in self.slab_caches() {
            cache()?;
        }
        Ok(())
    }

    fn slab_caches(&self) -> [Box<dyn Fn() -> pagemill_core::Result<u64> + '_>; 6] {
        [
            Box::new(|| self.inodes.shrink()),
            Box::new(|| self.dentries.shrink()),
            Box::new(|| self.indices.shrink()),
            Box::new(|| self.files.shrink()),
            Box::new(|| self.texts.shrink()),
            Box::new(|| self.xattrs.shrink()),
        ]
    }

    /// As [`Inner::renumber`], but of all objects, also of those with low handles.
    #[cfg(all(test, shuttle))]
    pub fn renumber_all(&self) {
        let mut waiting = vec![self.root];
        while let Some(directory) = waiting.pop() {
            self.renumber_directory(directory, Bounds { inode: 0, dentry: 0 }, &mut waiting);
        }
    }

    /// Gives inodes and dentries with high handles low ones, directory by directory. Returns their number.
    fn renumber(&self) -> Result<u64> {
        let bounds = Bounds { inode: bound_of(&self.inodes), dentry: bound_of(&self.dentries) };
        let (mut waiting, mut count) = (vec![self.root], 0);
        while let Some(directory) = waiting.pop() {
            count += self.renumber_directory(directory, bounds, &mut waiting);
        }
        Ok(count)
    }

    /// Renumbers the entries of one directory, and adds its directories to `waiting`. Stops without memory.
    fn renumber_directory(&self, handle: InodeHandle, bounds: Bounds, waiting: &mut Vec<InodeHandle>) -> u64 {
        let all_locked = self.locks.lock_all();
        // Removed since it was found, or the directory of another handle: nothing refers to it here.
        let Ok(directory) = self.directory(handle) else { return 0 };
        if directory.data == 0 {
            return 0;
        }
        let index_handle = Handle::from_bits(directory.data);
        let guard = enter();
        let Some(index) = self.indices.get(index_handle, &guard) else { return 0 };
        let could_shrink = index.could_shrink();
        let mut replaced = Replaced::default();
        let children: Vec<Child> = index.iter_after(0).collect();
        for child in children {
            let Some(dentry) = self.dentries.get(child.dentry, &guard) else { continue };
            let Some(mut inode) = dentry.inode() else { continue };
            if let Some(new) = self.renumber_inode(inode, bounds.inode, |new| {
                self.replace_dentry(index, child, dentry, new, bounds.dentry, &mut replaced)
            }) {
                inode = new;
            } else if child.dentry.index() >= bounds.dentry {
                self.replace_dentry(index, child, dentry, inode, bounds.dentry, &mut replaced);
            }
            if self.inode(inode).is_ok_and(|inode| inode.is_directory()) {
                waiting.push(inode);
            }
        }
        drop(guard);
        if could_shrink {
            // Without memory for the smaller table, the larger one stays.
            let _ = self.rebuild_index(index_handle, 0);
        }
        drop(all_locked);
        // Old dentries share their long names with the new ones, so only the dentries are freed.
        replaced.dentries.iter().for_each(|dentry| _ = self.dentries.remove(*dentry));
        replaced.dentries.len() as u64
    }

    /// Gives an inode a lower handle, if it is not in use and only its dentry refers to it. `publish` replaces this
    /// reference.
    fn renumber_inode(
        &self,
        old: InodeHandle,
        bound: u32,
        publish: impl FnOnce(InodeHandle) -> bool,
    ) -> Option<InodeHandle> {
        if old.index() < bound {
            return None;
        }
        let ino = self.inode(old).ok()?.ino;
        // No use of the inode begins while its shard is locked. The last use may have changed the inode.
        let renumbered = self.active.if_unused(ino, || {
            let inode = self.inode(old).ok()?;
            let has_other_reference = match inode.is_directory() {
                true => inode.links != 2,
                false => inode.links != 1 || inode.parent & VOLATILE != 0,
            };
            if has_other_reference {
                return None;
            }
            let new = self.inodes.insert_low(inode).ok()?;
            let is_done = new.index() < old.index() && publish(new);
            let unused = if is_done { old } else { new };
            let _ = self.inodes.remove(unused);
            is_done.then_some(new)
        });
        renumbered.flatten()
    }

    /// Replaces a dentry by one for the inode's new handle. Returns false without memory.
    fn replace_dentry(
        &self,
        index: &ChildIndex,
        child: Child,
        dentry: &Dentry,
        inode: InodeHandle,
        bound: u32,
        replaced: &mut Replaced,
    ) -> bool {
        let Ok(new) = self.dentries.insert_low(dentry.with_inode(inode)) else { return false };
        let is_useful =
            new.index() < child.dentry.index() || dentry.inode() != Some(inode) || child.dentry.index() < bound;
        if !is_useful {
            let _ = self.dentries.remove(new);
            return false;
        }
        index.begin_change().replace(Child { hash: child.hash, dentry: new }, 0);
        replaced.dentries.push(child.dentry);
        true
    }
}

/// Returns the lowest handle index that should be free: all values fit below it, and a page more.
fn bound_of<T: Movable>(map: &HandleMap<T>) -> u32 {
    (map.len() as u32).next_multiple_of(HANDLES_PER_PAGE) + HANDLES_PER_PAGE
}
