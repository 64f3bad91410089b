//! Renames: within a directory or between two, with replacement, without, or as an exchange.

use super::Inner;
use super::names::Located;
use super::remove::Remove;
use crate::access::{Access, Caller};
use crate::error::{Error, Result};
use crate::inode::{Inode, InodeHandle, MAX_LINKS};
use crate::name;
use crate::watch::EventKind;

/// What a rename does with an existing target.
///
/// ```
/// use pagemill::ramfs::{Rename, RamFs};
///
/// let fs = RamFs::new("scratch")?;
/// fs.write("/new", b"2")?;
/// fs.write("/old", b"1")?;
/// assert_eq!(fs.rename_with("/new", "/old", Rename::NoReplace).unwrap_err().errno(), 17); // EEXIST
/// fs.rename_with("/new", "/old", Rename::Exchange)?;
/// assert_eq!(fs.read("/old")?, b"2");
/// # Ok::<(), pagemill::ramfs::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rename {
    /// Replaces it, if it is a file or an empty directory.
    #[default]
    Replace,
    /// Fails.
    NoReplace,
    /// Gives it the old name. It must exist.
    Exchange,
}

/// One end of a rename.
struct End<'a> {
    directory: InodeHandle,
    parent: Inode,
    name: &'a [u8],
    located: Option<Located>,
    /// The inode that has the name, with its handle.
    inode: Option<(InodeHandle, Inode)>,
}

impl End<'_> {
    fn is_directory(&self) -> bool {
        self.inode.is_some_and(|(_, inode)| inode.is_directory())
    }

    fn handle(&self) -> Option<InodeHandle> {
        self.inode.map(|(handle, _)| handle)
    }
}

impl Inner {
    /// Renames a file or directory.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`], [`Error::Exists`], [`Error::NotEmpty`], [`Error::IsDirectory`], [`Error::NotDirectory`],
    /// [`Error::Invalid`] into itself, [`Error::OtherQuota`], and those of names, permissions and space.
    pub fn rename(
        &self,
        from: (InodeHandle, &[u8]),
        to: (InodeHandle, &[u8]),
        how: Rename,
        caller: &Caller,
    ) -> Result<()> {
        for (at, name) in [from.1, to.1].into_iter().enumerate() {
            name::check_length(name)?;
            if [&b"."[..], b"..", b""].contains(&name) {
                let is_taken = at == 1 && how == Rename::NoReplace;
                return Err(if is_taken { Error::Exists } else { Error::Busy { what: "the name `.` or `..`" } });
            }
        }
        while !self.try_rename(from, to, how, caller)? {}
        Ok(())
    }

    /// Attempts a rename. Returns false if a name has changed between its look-up and the locks.
    fn try_rename(
        &self,
        from: (InodeHandle, &[u8]),
        to: (InodeHandle, &[u8]),
        how: Rename,
        caller: &Caller,
    ) -> Result<bool> {
        let [old_parent, new_parent] = [self.directory(from.0)?, self.directory(to.0)?];
        caller.check(&old_parent, Access::EXECUTE)?;
        caller.check(&new_parent, Access::EXECUTE)?;
        let seen = [self.peek(&old_parent, from.1), self.peek(&new_parent, to.1)];
        let Some(moved) = seen[0] else { return Err(Error::NotFound) };
        let other = seen[1].unwrap_or(moved);
        let moves_directory = moved.1.is_directory() || (how == Rename::Exchange && other.1.is_directory());
        let _renaming = (moves_directory && from.0 != to.0).then(|| self.rename_lock.lock());
        let locked = self.locks.lock([old_parent.ino, new_parent.ino, moved.1.ino, other.1.ino]);
        let old = self.end_of_rename(from)?;
        let new = self.end_of_rename(to)?;
        if [old.handle(), new.handle()] != seen.map(|seen| seen.map(|(handle, _)| handle)) {
            return Ok(false);
        }
        if how == Rename::NoReplace && new.inode.is_some() {
            return Err(Error::Exists);
        }
        if old.handle() == new.handle() {
            return Ok(true); // two names of one file: both stay
        }
        self.check_rename(&old, &new, how, caller)?;
        let (moved, replaced) = (moved.1, new.inode.map(|(_, inode)| inode));
        let (old_ino, new_ino) = (old.parent.ino, new.parent.ino);
        match how {
            Rename::Exchange => self.exchange(&old, &new)?,
            Rename::Replace | Rename::NoReplace => self.replace(&old, &new)?,
        }
        let target = new.inode.filter(|_| how != Rename::Exchange);
        let is_last = |inode: &Inode| inode.is_directory() || inode.links == 1;
        target.iter().filter(|(_, inode)| !is_last(inode)).for_each(|(_, inode)| self.discharge_inodes(inode, 1));
        drop(locked);
        let freed = target.iter().filter(|(_, inode)| is_last(inode));
        freed.for_each(|(handle, inode)| self.free_if_unused(inode.ino, *handle));
        debug_assert!(replaced.is_none_or(|replaced| replaced.ino != moved.ino));
        self.watches.notify(EventKind::Removed, old_ino, from.1);
        self.watches.notify(EventKind::Created, new_ino, to.1);
        Ok(true)
    }

    /// Reads one end of a rename, under the locks.
    fn end_of_rename<'a>(&self, (directory, name): (InodeHandle, &'a [u8])) -> Result<End<'a>> {
        let parent = self.directory(directory)?;
        let located = self.locate(&parent, name);
        let inode = match located.and_then(|located| located.inode) {
            Some(handle) => Some((handle, self.inode(handle)?)),
            None => None,
        };
        Ok(End { directory, parent, name, located, inode })
    }

    fn check_rename(&self, old: &End<'_>, new: &End<'_>, how: Rename, caller: &Caller) -> Result<()> {
        let (moved_handle, moved) = old.inode.ok_or(Error::NotFound)?;
        for end in [old, new] {
            caller.check(&end.parent, Access::WRITE)?;
            if let Some((_, inode)) = &end.inode {
                caller.check_sticky(&end.parent, inode)?;
            }
        }
        name::check(new.name)?;
        let changes_parent = old.directory != new.directory;
        let is_exchange = how == Rename::Exchange;
        if is_exchange && new.inode.is_none() {
            return Err(Error::NotFound);
        }
        if changes_parent {
            if moved.is_directory() && self.is_below(new.directory, moved_handle) {
                return Err(Error::Invalid { what: "a rename of a directory into itself" });
            }
            if let Some((target, inode)) = new.inode.filter(|(_, inode)| inode.is_directory())
                && self.is_below(old.directory, target)
            {
                let entries = self.entry_count(&inode);
                return Err(match is_exchange {
                    true => Error::Invalid { what: "an exchange of a directory with its own part" },
                    false => Error::NotEmpty { entries },
                });
            }
            if old.parent.quota != new.parent.quota {
                return Err(Error::OtherQuota);
            }
            // The entry `..` of a directory changes with its parent.
            for (_, inode) in old.inode.iter().chain(new.inode.iter().filter(|_| is_exchange)) {
                if inode.is_directory() {
                    caller.check(inode, Access::WRITE)?;
                }
            }
            let more_links = i64::from(old.is_directory()) - i64::from(new.is_directory());
            if more_links > 0 && new.parent.links >= MAX_LINKS {
                return Err(Error::TooManyLinks { links: new.parent.links });
            }
        }
        match &new.inode {
            Some((_, target)) if !is_exchange => {
                let what = if moved.is_directory() { Remove::Directory } else { Remove::File };
                self.check_removable(target, what)
            }
            _ => Ok(()),
        }
    }

    /// Returns whether a directory is `ancestor` or lies below it. The caller has `rename_lock`.
    fn is_below(&self, mut directory: InodeHandle, ancestor: InodeHandle) -> bool {
        while directory != ancestor {
            let Ok(inode) = self.inode(directory) else { return false };
            if inode.parent() == directory {
                return false;
            }
            directory = inode.parent();
        }
        true
    }

    /// Gives the inode of `old` the name `new`. An inode that had the name loses it.
    fn replace(&self, old: &End<'_>, new: &End<'_>) -> Result<()> {
        let (Some((handle, moved)), Some(from)) = (old.inode, old.located) else { return Err(Error::NotFound) };
        let parent = (new.directory, &new.parent);
        // Makes everything that can fail before the first visible change of a name.
        let negative = new.located.filter(|located| located.inode.is_none());
        let mut prepared = match (new.located, negative) {
            (Some(existing), None) => self.prepare_replacement(parent, new.name, existing, handle)?,
            _ => self.prepare_name(parent, new.name, negative, handle)?,
        };
        let links = -i32::from(new.is_directory());
        let mut undo = Undo::new(self);
        let now_ns = self.clock.now_ns();
        if old.directory == new.directory {
            undo.update(old.directory, |dir| touched(dir, now_ns, links))?;
        } else {
            undo.update(old.directory, |dir| touched(dir, now_ns, -i32::from(moved.is_directory())))?;
            undo.update(new.directory, |dir| touched(dir, now_ns, links + i32::from(moved.is_directory())))?;
        }
        undo.update(handle, |inode| reparented(inode, new.directory, now_ns))?;
        if let Some((target, _)) = new.inode {
            let gone = |inode: &Inode| if inode.is_directory() { 0 } else { inode.links - 1 };
            undo.update(target, |inode| Inode { links: gone(inode), changed_ns: now_ns, ..*inode })?;
        }
        undo.keep();
        // `prepare_name` may have made the directory's first index.
        let from_directory = self.inode(old.directory)?;
        match new.located.filter(|located| located.inode.is_some()) {
            Some(existing) => {
                self.change_names(&mut [(prepared, existing)], Some((&from_directory, from)), None);
            }
            None => {
                let negative = prepared.negative();
                self.change_names(&mut [], Some((&from_directory, from)), Some(&mut prepared));
                negative.iter().for_each(|negative| {
                    self.negatives.note_ended(1);
                    self.free_dentry(negative.dentry);
                });
            }
        }
        Ok(())
    }

    /// Exchanges the names of two inodes.
    fn exchange(&self, old: &End<'_>, new: &End<'_>) -> Result<()> {
        let (Some(one), Some(one_at)) = (old.inode, old.located) else { return Err(Error::NotFound) };
        let (Some(two), Some(two_at)) = (new.inode, new.located) else { return Err(Error::NotFound) };
        let first = self.prepare_replacement((new.directory, &new.parent), new.name, two_at, one.0)?;
        let second = self.prepare_replacement((old.directory, &old.parent), old.name, one_at, two.0)?;
        let now_ns = self.clock.now_ns();
        let links = i32::from(new.is_directory()) - i32::from(old.is_directory());
        let links = if old.directory == new.directory { 0 } else { links };
        let mut undo = Undo::new(self);
        undo.update(old.directory, |dir| touched(dir, now_ns, links))?;
        undo.update(new.directory, |dir| touched(dir, now_ns, -links))?;
        undo.update(one.0, |inode| reparented(inode, new.directory, now_ns))?;
        undo.update(two.0, |inode| reparented(inode, old.directory, now_ns))?;
        undo.keep();
        self.change_names(&mut [(first, two_at), (second, one_at)], None, None);
        Ok(())
    }
}

fn touched(directory: &Inode, now_ns: i64, links: i32) -> Inode {
    let links = directory.links.wrapping_add_signed(links);
    Inode { modified_ns: now_ns, changed_ns: now_ns, links, ..*directory }
}

fn reparented(inode: &Inode, parent: InodeHandle, now_ns: i64) -> Inode {
    let parent = if inode.is_directory() { parent.to_bits() } else { inode.parent };
    Inode { parent, changed_ns: now_ns, ..*inode }
}

/// Updates of inodes that are reverted when a later one fails.
struct Undo<'fs> {
    fs: &'fs Inner,
    done: Vec<(InodeHandle, Inode)>,
}

impl<'fs> Undo<'fs> {
    fn new(fs: &'fs Inner) -> Self {
        Self { fs, done: Vec::new() }
    }

    fn update(&mut self, handle: InodeHandle, change: impl FnMut(&Inode) -> Inode) -> Result<()> {
        let before = self.fs.inode(handle)?;
        self.fs.update_inode(handle, change)?;
        self.done.push((handle, before));
        Ok(())
    }

    fn keep(mut self) {
        self.done.clear();
    }
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        for (handle, before) in self.done.drain(..).rev() {
            // Only links and parent matter; a time that stays changed harms nothing.
            let revert = |now: &Inode| Inode { links: before.links, parent: before.parent, ..*now };
            let _ = self.fs.update_inode(handle, revert);
        }
    }
}
