//! Walking a whole tree, as the program `find` does.

use super::RamFs;
use super::read_dir::DirEntry;
use super::walk::Last;
use crate::access::Access;
use crate::error::{Error, Result};
use crate::inode::FileType;
use pagemill_slab::enter;
use std::path::Path;

impl RamFs {
    /// Calls `visit` for everything below a directory, with the path of the entry's directory and the entry, until
    /// `visit` returns false. Visits the entries of a directory before those of its directories. Does not follow
    /// symbolic links. Directories that the caller may not read are left out. `visit` must not call [`RamFs::shrink`].
    ///
    /// # Errors
    ///
    /// [`Error::NotDirectory`], those of a path walk.
    ///
    /// ```
    /// use pagemill::ramfs::RamFs;
    ///
    /// let fs = RamFs::new("scratch")?;
    /// fs.create_dir_all("/a/b")?;
    /// fs.write("/a/b/file", b"")?;
    /// let mut found = Vec::new();
    /// fs.walk_tree("/a", |directory, entry| {
    ///     found.push([directory, b"/", entry.name].concat());
    ///     true
    /// })?;
    /// assert_eq!(found, [&b"/a/b"[..], b"/a/b/file"]);
    /// # Ok::<(), pagemill::ramfs::Error>(())
    /// ```
    pub fn walk_tree(&self, path: impl AsRef<Path>, mut visit: impl FnMut(&[u8], &DirEntry<'_>) -> bool) -> Result<()> {
        let (inner, path) = (&*self.inner, crate::paths::bytes(path.as_ref()));
        let start = inner.retry(|| inner.begin_use(inner.walk(path, &self.caller, Last::Follow)?.found()?))?;
        let mut waiting = vec![(path.to_vec(), start)];
        let mut result = Ok(());
        let mut is_over = false;
        while let Some((path, directory)) = waiting.pop() {
            if !is_over && result.is_ok() {
                let mut inside = Vec::new();
                let readable = inner.inode(directory.inode).and_then(|inode| self.caller.check(&inode, Access::READ));
                let listed = readable.and_then(|()| {
                    inner.visit_directory(directory.inode, 0, |entry| {
                        if entry.kind == FileType::Directory {
                            inside.push(entry.name.to_vec());
                        }
                        is_over = !visit(&path, entry);
                        !is_over
                    })
                });
                result = match listed {
                    Err(Error::AccessDenied { .. }) if !waiting.is_empty() || path.len() > 1 => Ok(()),
                    listed => listed,
                };
                for name in inside.iter().rev() {
                    let step = || {
                        let guard = enter();
                        let inode = inner.inodes.get(directory.inode, &guard).ok_or(super::STALE)?;
                        let found = inner.step_or_dots(directory.inode, inode, name, &guard)?;
                        // Removed since it was listed: nothing to visit.
                        found.handle().ok().map(|child| inner.begin_use(child)).transpose()
                    };
                    if let Ok(Some(child)) = inner.retry(step) {
                        waiting.push(([&path[..], b"/", name].concat(), child));
                    }
                }
            }
            inner.end_use(directory.ino, 1);
        }
        result
    }
}
