//! The folders of the file system by inode number: their paths and marks.
//!
//! The kernel's events identify folders by inode. A recorded path becomes wrong when a folder is moved, so
//! [`Folders::open`] checks that the opened folder has the expected inode.

use crate::file_access::{self, FileAccess, FileAttributes};
use crate::policy::Ancestor;
use pagemill_sys::fanotify::Handle;
use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::time::Instant;

/// Maximum depth of folders.
const MAX_FOLDER_DEPTH: usize = 256;

/// Maximum number of folders in the table.
const MAX_FOLDERS: usize = 1 << 20;

/// A folder: its position in the tree, its marks, its owner, whether other users may write to it, and when these were
/// read.
struct Folder {
    parent: u64,
    name: OsString,
    above: Ancestor,
    read_at: Instant,
}

/// The table of folders.
pub struct Folders {
    known: HashMap<u64, Folder>,
    root: u64,
}

/// Reads the marks and the owner of an open folder, and whether other users may write to it.
fn read_ancestor(fd: &OwnedFd, seen: &FileAttributes) -> io::Result<Ancestor> {
    // Bad values are ignored here: the next scan reports them.
    Ok(seen.as_ancestor(file_access::marks(fd, |_| ())?))
}

impl Folders {
    pub fn new(root: u64) -> Self {
        Self { known: HashMap::new(), root }
    }

    /// Records a folder with its attributes at `read_at`. Returns `false` if the table is full.
    pub fn record(&mut self, inode: u64, parent: u64, name: &OsStr, above: Ancestor, read_at: Instant) -> bool {
        if self.known.len() >= MAX_FOLDERS && !self.known.contains_key(&inode) {
            return false;
        }
        debug_assert!(inode != self.root && inode != parent, "only folders below the root have a parent");
        self.known.insert(inode, Folder { parent, name: name.to_owned(), above, read_at });
        true
    }

    pub fn forget(&mut self, inode: u64) {
        self.known.remove(&inode);
    }

    /// Returns the inodes of the folder and its ancestors up to the root; `None` if one of the folders is unknown.
    fn chain(&self, inode: u64) -> Option<Vec<u64>> {
        let mut chain = vec![inode];
        while *chain.last()? != self.root {
            chain.push(self.known.get(chain.last()?)?.parent);
            if chain.len() > MAX_FOLDER_DEPTH {
                return None;
            }
        }
        debug_assert!(chain.last() == Some(&self.root) && chain.len() <= MAX_FOLDER_DEPTH);
        Some(chain)
    }

    /// Returns the last known path of a folder from the root.
    pub fn path(&self, inode: u64) -> Option<PathBuf> {
        let chain = self.chain(inode)?;
        Some(chain.iter().rev().skip(1).filter_map(|inode| self.known.get(inode)).map(|folder| &folder.name).collect())
    }

    /// Opens a folder by its recorded path.
    ///
    /// # Errors
    ///
    /// `NotFound` if the folder is unknown or was moved; errors of opening.
    pub fn open(&mut self, access: &FileAccess, inode: u64) -> io::Result<OwnedFd> {
        let path = self.path(inode).ok_or(io::ErrorKind::NotFound)?;
        let fd = access.open_folder(&path).inspect_err(|_| self.forget(inode))?;
        if file_access::attributes(&fd)?.inode == inode {
            return Ok(fd);
        }
        self.forget(inode);
        Err(io::ErrorKind::NotFound.into())
    }

    /// Returns the inode of an event's folder. If the folder's path is unknown, gets the path from the kernel, which
    /// requires privileges, and records it. `None` means that the path is still unknown and a scan is needed.
    pub fn find(&mut self, access: &FileAccess, handle: Handle<'_>) -> Option<u64> {
        let inode = handle.inode()?;
        if self.chain(inode).is_some() {
            return Some(inode);
        }
        let fd = handle.open(access.root()).ok()?;
        let path = rustix::fs::readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new()).ok()?;
        let mut parent = self.root;
        for part in Path::new(path.to_str().ok()?).components() {
            let Component::Normal(name) = part else { continue };
            parent = self.record_subfolder(access, parent, name)?;
        }
        self.chain(inode).map(|_| inode)
    }

    /// Records the subfolder `name` of `parent`, and returns its inode. `None` if the subfolder cannot be opened or the
    /// table is full.
    pub fn record_subfolder(&mut self, access: &FileAccess, parent: u64, name: &OsStr) -> Option<u64> {
        let fd = access.open_folder(&self.path(parent)?.join(name)).ok()?;
        let seen = file_access::attributes(&fd).ok()?;
        let above = read_ancestor(&fd, &seen).ok()?;
        self.record(seen.inode, parent, name, above, Instant::now()).then_some(seen.inode)
    }

    /// Returns whether a folder or one of its ancestors is in `inodes`.
    pub fn is_below_any(&self, folder: u64, inodes: &HashSet<u64>) -> bool {
        self.chain(folder).is_some_and(|chain| chain.iter().any(|inode| inodes.contains(inode)))
    }

    /// Returns the marks of a folder and its ancestors, nearest first. Marks that were read before `since` are read
    /// again. Returns `None` if a folder is unknown or cannot be read.
    pub fn ancestors(&mut self, access: &FileAccess, folder: u64, since: Instant) -> Option<Vec<Ancestor>> {
        let chain = self.chain(folder)?;
        for inode in &chain {
            let is_fresh = self.known.get(inode).is_some_and(|folder| folder.read_at >= since);
            if !is_fresh {
                self.refresh(access, *inode).ok()?;
            }
        }
        chain.iter().map(|inode| Some(self.known.get(inode)?.above)).collect()
    }

    /// Reads a folder's marks again.
    fn refresh(&mut self, access: &FileAccess, inode: u64) -> io::Result<()> {
        let read_at = Instant::now();
        let fd = if inode == self.root { access.open_folder(Path::new(""))? } else { self.open(access, inode)? };
        let above = read_ancestor(&fd, &file_access::attributes(&fd)?)?;
        let root = || Folder { parent: inode, name: OsString::new(), above, read_at };
        let folder = self.known.entry(inode).or_insert_with(root);
        (folder.above, folder.read_at) = (above, read_at);
        Ok(())
    }
}
