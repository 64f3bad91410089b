//! The names of a directory: changes of its child index, under its lock.

use super::{Inner, STALE};
use crate::child_index::{Child, ChildIndex, IndexHandle};
use crate::dentry::{Dentry, DentryHandle, INLINE_BYTES};
use crate::error::{Error, Result};
use crate::inode::{Inode, InodeHandle};
use crate::negative::Negative;
use pagemill_slab::{Handle, enter};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// A name in a directory, as found under the directory's lock.
#[derive(Clone, Copy)]
pub(super) struct Located {
    pub child: Child,
    /// `None` for a negative dentry.
    pub inode: Option<InodeHandle>,
}

/// What an inode's name will be: made before a change, so that the change itself cannot fail. Dropping it frees it.
pub(super) struct Prepared<'fs> {
    fs: &'fs Inner,
    index: IndexHandle,
    child: Child,
    /// A negative dentry that the name replaces.
    negative: Option<Child>,
    is_used: bool,
}

impl Prepared<'_> {
    pub fn negative(&self) -> Option<Child> {
        self.negative
    }
}

impl Drop for Prepared<'_> {
    fn drop(&mut self) {
        if !self.is_used {
            self.fs.free_dentry(self.child.dentry);
        }
    }
}

impl Inner {
    /// Finds a name in a directory. The caller has the lock of the directory, as for all functions of this file.
    pub(super) fn locate(&self, directory: &Inode, name: &[u8]) -> Option<Located> {
        let guard = enter();
        let index = self.indices.get(Handle::from_bits(directory.data), &guard)?;
        let mut inode = None;
        let child = index.find(self.hasher.hash(name), |handle| {
            let dentry = self.dentries.get(handle, &guard).filter(|it| it.has_name(name, &self.texts, &guard));
            inode = dentry.and_then(Dentry::inode);
            dentry.is_some()
        });
        child.map(|child| Located { child, inode })
    }

    /// Number of entries of a directory.
    pub(super) fn entry_count(&self, directory: &Inode) -> u64 {
        self.indices.get(Handle::from_bits(directory.data), &enter()).map_or(0, ChildIndex::positives)
    }

    /// Makes everything that a new name needs: dentry, and room in the index. `located` is the name's negative dentry,
    /// if it has one.
    pub(super) fn prepare_name(
        &self,
        directory: (InodeHandle, &Inode),
        name: &[u8],
        located: Option<Located>,
        inode: InodeHandle,
    ) -> Result<Prepared<'_>> {
        let index = self.index_with_room(directory.0, directory.1)?;
        let hash = match located {
            Some(negative) => negative.child.hash,
            None => {
                let guard = enter();
                let free = self.indices.get(index, &guard).ok_or(STALE)?.free_hash(self.hasher.hash(name));
                free.ok_or(Error::Busy { what: "all hashes of this name in its directory" })?
            }
        };
        let dentry = self.new_dentry(name, Some(inode))?;
        let negative = located.map(|located| located.child);
        Ok(Prepared { fs: self, index, child: Child { hash, dentry }, negative, is_used: false })
    }

    /// Makes the dentry that replaces an existing one of the same name.
    pub(super) fn prepare_replacement(
        &self,
        directory: (InodeHandle, &Inode),
        name: &[u8],
        existing: Located,
        inode: InodeHandle,
    ) -> Result<Prepared<'_>> {
        let dentry = self.new_dentry(name, Some(inode))?;
        let index = Handle::from_bits(directory.1.data);
        let child = Child { hash: existing.child.hash, dentry };
        Ok(Prepared { fs: self, index, child, negative: None, is_used: false })
    }

    /// Enters a prepared name into its directory.
    pub(super) fn publish_name(&self, mut prepared: Prepared<'_>) {
        prepared.is_used = true;
        let guard = enter();
        let index = self.indices.get(prepared.index, &guard).expect("a locked directory keeps its index");
        let change = index.begin_change();
        match prepared.negative {
            None => change.insert(prepared.child, true),
            Some(_) => change.replace(prepared.child, 1),
        }
        drop(change);
        if let Some(negative) = prepared.negative {
            self.negatives.note_ended(1);
            self.free_dentry(negative.dentry);
        }
    }

    /// Changes several names at once: readers of the directories see all changes or none. `replaced` are existing names
    /// that get another dentry, `removed` names that end, `added` a new name.
    pub(super) fn change_names(
        &self,
        replaced: &mut [(Prepared<'_>, Located)],
        removed: Option<(&Inode, Located)>,
        added: Option<&mut Prepared<'_>>,
    ) {
        let guard = enter();
        let index_of = |handle: IndexHandle| self.indices.get(handle, &guard).expect("a locked directory has an index");
        let removed_index = removed.map(|(directory, _)| Handle::from_bits(directory.data));
        let mut handles: Vec<IndexHandle> = replaced.iter().map(|(new, _)| new.index).collect();
        handles.extend(removed_index);
        handles.extend(added.as_ref().map(|new| new.index));
        handles.sort_unstable_by_key(|handle| handle.to_bits());
        handles.dedup();
        let changes: Vec<_> = handles.iter().map(|handle| (*handle, index_of(*handle).begin_change())).collect();
        let change_of =
            |wanted: IndexHandle| &changes.iter().find(|(handle, _)| *handle == wanted).expect("begun above").1;
        for (new, old) in replaced.iter_mut() {
            change_of(new.index).replace(new.child, i64::from(old.inode.is_none()));
            new.is_used = true;
        }
        if let Some(new) = added {
            match new.negative {
                None => change_of(new.index).insert(new.child, true),
                Some(_) => change_of(new.index).replace(new.child, 1),
            }
            new.is_used = true;
        }
        if let (Some((_, old)), Some(index)) = (removed, removed_index) {
            change_of(index).remove(old.child.hash, old.inode.is_some());
        }
        drop(changes);
        replaced.iter().for_each(|(_, old)| self.free_dentry(old.child.dentry));
        removed.iter().for_each(|(_, old)| self.free_dentry(old.child.dentry));
    }

    /// Removes a name from its directory. Makes the index smaller if it is sparse.
    pub(super) fn remove_name(&self, directory: &Inode, located: Located) {
        let handle = Handle::from_bits(directory.data);
        let guard = enter();
        let index = self.indices.get(handle, &guard).expect("a locked directory keeps its index");
        index.begin_change().remove(located.child.hash, located.inode.is_some());
        let is_sparse = index.is_sparse();
        drop(guard);
        self.free_dentry(located.child.dentry);
        if is_sparse {
            // Without memory for the smaller table, the larger one stays.
            let _ = self.rebuild_index(handle, 0);
        }
    }

    /// Sets the times of a directory after a change of its entries, and adds to its number of links.
    ///
    /// # Errors
    ///
    /// [`Error::NoSpace`] without memory.
    pub(super) fn touch_directory(&self, handle: InodeHandle, directory: &Inode, links: i32) -> Result<()> {
        let now_ns = self.clock.now_ns();
        if links == 0 && directory.modified_ns == now_ns && directory.changed_ns == now_ns {
            return Ok(());
        }
        self.update_inode(handle, |old| Inode {
            modified_ns: now_ns,
            changed_ns: now_ns,
            links: old.links.wrapping_add_signed(links),
            ..*old
        })
    }

    fn new_dentry(&self, name: &[u8], inode: Option<InodeHandle>) -> Result<DentryHandle> {
        let text = match name.len() > INLINE_BYTES {
            true => Some(self.texts.insert(Arc::from(name))?),
            false => None,
        };
        let made = self.dentries.insert(Dentry::new(name, text, inode));
        made.map_err(|failed| {
            text.map(|text| self.texts.remove(text).map(drop));
            failed.into()
        })
    }

    /// Frees a dentry that no index refers to. Does nothing if it was freed.
    pub(super) fn free_dentry(&self, dentry: DentryHandle) {
        let text = self.dentries.remove(dentry).ok().flatten().and_then(|dentry| dentry.text());
        text.map(|text| self.texts.remove(text).map(drop));
    }

    /// Returns the index of a directory, with room for one more name.
    fn index_with_room(&self, handle: InodeHandle, directory: &Inode) -> Result<IndexHandle> {
        if directory.data == 0 {
            let index = ChildIndex::with_room_for(1);
            let bytes = index.bytes();
            let index = self.indices.insert(index)?;
            let updated = self.update_inode(handle, |old| Inode { data: index.to_bits(), ..*old });
            updated.inspect_err(|_| _ = self.indices.remove(index))?;
            self.index_bytes.fetch_add(bytes, Relaxed);
            return Ok(index);
        }
        let index = Handle::from_bits(directory.data);
        let guard = enter();
        let has_room = self.indices.get(index, &guard).ok_or(STALE)?.has_room();
        drop(guard);
        if !has_room {
            self.rebuild_index(index, 1)?;
        }
        Ok(index)
    }

    /// Replaces a table by one with room for `more` more names.
    pub(super) fn rebuild_index(&self, handle: IndexHandle, more: usize) -> Result<()> {
        let guard = enter();
        let old = self.indices.get(handle, &guard).ok_or(STALE)?;
        let change = old.begin_change();
        let mut bytes = 0;
        let replaced = self.indices.update(handle, |old| {
            let new = old.rebuilt(old.len() + more);
            bytes = new.bytes();
            new
        })?;
        debug_assert!(replaced, "a locked directory keeps its index");
        self.index_bytes.fetch_add(bytes, Relaxed);
        self.index_bytes.fetch_sub(old.bytes(), Relaxed);
        change.retire();
        Ok(())
    }

    /// Frees the index of a directory that was freed, with its negative dentries.
    pub(super) fn free_index(&self, directory: &Inode) {
        if directory.data == 0 {
            return;
        }
        // A negative dentry may be evicted meanwhile.
        let _locked = self.locks.lock([directory.ino]);
        let index: IndexHandle = Handle::from_bits(directory.data);
        let Ok(Some(removed)) = self.indices.remove(index) else { return };
        self.index_bytes.fetch_sub(removed.bytes(), Relaxed);
        let dentries: Vec<DentryHandle> = removed.iter_after(0).map(|child| child.dentry).collect();
        if self.negatives.limit() > 0 {
            self.negatives.take_where(|negative| negative.index == index);
            self.negatives.note_ended(dentries.len());
            dentries.into_iter().for_each(|dentry| self.free_dentry(dentry));
        }
    }

    /// Remembers that a name does not exist, if the limit permits it. Does nothing without memory.
    pub(super) fn add_negative(&self, handle: InodeHandle, name: &[u8]) {
        if crate::name::check(name).is_err() {
            return;
        }
        let Ok(directory) = self.directory(handle) else { return };
        let locked = self.locks.lock([directory.ino]);
        let evicted = self.try_add_negative(handle, name).unwrap_or_default();
        drop(locked);
        evicted.into_iter().for_each(|negative| _ = self.evict_negative(negative));
    }

    fn try_add_negative(&self, handle: InodeHandle, name: &[u8]) -> Result<Vec<Negative>> {
        let directory = self.directory(handle)?;
        if self.locate(&directory, name).is_some() {
            return Ok(Vec::new());
        }
        let index = self.index_with_room(handle, &directory)?;
        let guard = enter();
        let table = self.indices.get(index, &guard).ok_or(STALE)?;
        let hash = table.free_hash(self.hasher.hash(name)).ok_or(STALE)?;
        let dentry = self.new_dentry(name, None)?;
        let negative = Negative { directory: directory.ino, index, hash, dentry };
        let evicted = self.negatives.add(negative).inspect_err(|_| self.free_dentry(dentry))?;
        table.begin_change().insert(Child { hash, dentry }, false);
        Ok(evicted)
    }

    /// Removes a negative dentry that was taken out of the list of negative dentries. Returns false if its name exists by
    /// now. The caller has no lock.
    pub(super) fn evict_negative(&self, negative: Negative) -> bool {
        let _locked = self.locks.lock([negative.directory]);
        let guard = enter();
        let Some(index) = self.indices.get(negative.index, &guard) else { return false };
        // The name may exist by now, with another dentry.
        let is_negative =
            index.iter_after(negative.hash - 1).next() == Some(Child { hash: negative.hash, dentry: negative.dentry });
        if is_negative {
            index.begin_change().remove(negative.hash, false);
            self.negatives.note_ended(1);
            self.free_dentry(negative.dentry);
        }
        is_negative
    }
}
