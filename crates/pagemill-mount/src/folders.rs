//! The folders of the file system by inode number: where each is, and what is marked there.
//!
//! Events name folders by inode; paths may be old when somebody moves a folder, so whoever opens one here gets it only if
//! the inode is the right one.

use crate::door::{self, Door, Seen};
use crate::policy::Above;
use pagemill_sys::fanotify::Handle;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::time::Instant;

/// Deepest nesting that is followed.
const MAX_DEPTH: usize = 256;

/// Most folders that are kept in mind.
const MAX_FOLDERS: usize = 1 << 20;

struct Folder {
    parent: u64,
    name: OsString,
    above: Above,
    read_at: Instant,
}

/// What is known of folders.
pub struct Folders {
    known: HashMap<u64, Folder>,
    root: u64,
}

fn above(fd: &OwnedFd, seen: &Seen) -> io::Result<Above> {
    // A bad value is told by the look at everything.
    Ok(Above { marks: door::marks(fd, |_| ())?, owner: seen.owner, is_open_to_others: seen.is_open_to_others() })
}

impl Folders {
    pub fn new(root: u64) -> Self {
        Self { known: HashMap::new(), root }
    }

    /// Notes a folder as it was at `read_at`. Returns whether there was room.
    pub fn learn(&mut self, inode: u64, parent: u64, name: &OsStr, above: Above, read_at: Instant) -> bool {
        if self.known.len() >= MAX_FOLDERS && !self.known.contains_key(&inode) {
            return false;
        }
        self.known.insert(inode, Folder { parent, name: name.to_owned(), above, read_at });
        true
    }

    pub fn forget(&mut self, inode: u64) {
        self.known.remove(&inode);
    }

    /// The folder and those above it, up to the root; `None` where one of them is not known.
    fn chain(&self, inode: u64) -> Option<Vec<u64>> {
        let mut chain = vec![inode];
        while *chain.last()? != self.root {
            chain.push(self.known.get(chain.last()?)?.parent);
            if chain.len() > MAX_DEPTH {
                return None;
            }
        }
        Some(chain)
    }

    /// Path of a folder from the root, as it was last known.
    pub fn path(&self, inode: u64) -> Option<PathBuf> {
        let chain = self.chain(inode)?;
        Some(chain.iter().rev().skip(1).filter_map(|inode| self.known.get(inode)).map(|folder| &folder.name).collect())
    }

    /// Opens a folder; `NotFound` if it is not known, or is not where it was.
    ///
    /// # Errors
    ///
    /// What opening says.
    pub fn open(&mut self, door: &Door, inode: u64) -> io::Result<OwnedFd> {
        let path = self.path(inode).ok_or(io::ErrorKind::NotFound)?;
        let fd = door.open_folder(&path).inspect_err(|_| self.forget(inode))?;
        if door::look(&fd)?.inode == inode {
            return Ok(fd);
        }
        self.forget(inode);
        Err(io::ErrorKind::NotFound.into())
    }

    /// Finds out where the folder of an event is, if it is not known. Only the privileged can; others look everywhere.
    pub fn find(&mut self, door: &Door, handle: Handle<'_>) -> Option<u64> {
        let inode = handle.inode()?;
        if self.chain(inode).is_some() {
            return Some(inode);
        }
        let fd = handle.open(door.root()).ok()?;
        let path = rustix::fs::readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new()).ok()?;
        self.learn_path(door, Path::new(OsStr::new(path.to_str().ok()?)))?;
        self.chain(inode).map(|_| inode)
    }

    /// Notes every folder on the way to this one.
    fn learn_path(&mut self, door: &Door, path: &Path) -> Option<()> {
        let (mut parent, mut so_far) = (self.root, PathBuf::new());
        for part in path.components() {
            let Component::Normal(name) = part else { continue };
            so_far.push(name);
            let fd = door.open_folder(&so_far).ok()?;
            let seen = door::look(&fd).ok()?;
            self.learn(seen.inode, parent, name, above(&fd, &seen).ok()?, Instant::now()).then_some(())?;
            parent = seen.inode;
        }
        Some(())
    }

    /// Notes the folder that has this name in a folder. Returns whether there is one.
    pub fn learn_name(&mut self, door: &Door, parent: u64, name: &OsStr) -> bool {
        let Some(path) = self.path(parent) else { return false };
        let Ok(fd) = door.open_folder(&path.join(name)) else { return false };
        let Ok(seen) = door::look(&fd) else { return false };
        above(&fd, &seen).is_ok_and(|above| self.learn(seen.inode, parent, name, above, Instant::now()))
    }

    /// The marks of a folder and of those above it, the nearest first, as they were read at `since` or later; `None` if that
    /// cannot be told.
    pub fn above(&mut self, door: &Door, folder: u64, since: Instant) -> Option<Vec<Above>> {
        let chain = self.chain(folder)?;
        for inode in &chain {
            let is_fresh = self.known.get(inode).is_some_and(|folder| folder.read_at >= since);
            if !is_fresh {
                self.refresh(door, *inode).ok()?;
            }
        }
        chain.iter().map(|inode| Some(self.known.get(inode)?.above)).collect()
    }

    /// Reads a folder's marks anew.
    fn refresh(&mut self, door: &Door, inode: u64) -> io::Result<()> {
        let read_at = Instant::now();
        let fd = if inode == self.root { door.open_folder(Path::new(""))? } else { self.open(door, inode)? };
        let above = above(&fd, &door::look(&fd)?)?;
        let root = || Folder { parent: inode, name: OsString::new(), above, read_at };
        let folder = self.known.entry(inode).or_insert_with(root);
        (folder.above, folder.read_at) = (above, read_at);
        Ok(())
    }
}
