//! The reference: a map from paths to inodes, and a map of inodes. Simple, slow, and without any sharing of code.

use super::{Operation, Outcome, Seen, Subject, TARGET};
use pagemill_ramfs::Rename;
use std::collections::BTreeMap;

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Directory,
    File(Vec<u8>),
    Symlink,
}

#[derive(Default)]
pub struct Model {
    /// Paths without the root. A directory's entries are the paths one component longer.
    paths: BTreeMap<String, u32>,
    inodes: BTreeMap<u32, Kind>,
    held: Vec<u32>,
    next: u32,
}

fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(parent, _)| parent)
}

impl Model {
    /// Checks the directories above a path. A link on the way leads nowhere.
    fn walk(&self, path: &str) -> Result<(), i32> {
        let above = parent(path);
        if above.is_empty() {
            return Ok(());
        }
        self.walk(above)?;
        match self.kind(above)? {
            Kind::Directory => Ok(()),
            Kind::File(_) => Err(libc::ENOTDIR),
            Kind::Symlink => Err(libc::ENOENT),
        }
    }

    fn kind(&self, path: &str) -> Result<&Kind, i32> {
        self.paths.get(path).map(|inode| &self.inodes[inode]).ok_or(libc::ENOENT)
    }

    /// The inode of an existing path.
    fn find(&self, path: &str) -> Result<u32, i32> {
        self.walk(path)?;
        self.paths.get(path).copied().ok_or(libc::ENOENT)
    }

    /// The inode of a file that is opened.
    fn open(&self, path: &str) -> Result<u32, i32> {
        let inode = self.find(path)?;
        match self.inodes[&inode] {
            Kind::Directory => Err(libc::EISDIR),
            Kind::Symlink => Err(libc::ENOENT),
            Kind::File(_) => Ok(inode),
        }
    }

    fn bytes(&mut self, inode: u32) -> &mut Vec<u8> {
        match self.inodes.get_mut(&inode) {
            Some(Kind::File(bytes)) => bytes,
            other => panic!("{other:?} is no file"),
        }
    }

    fn make(&mut self, path: &str, kind: Kind) -> Outcome {
        self.walk(path)?;
        if self.paths.contains_key(path) {
            return Err(libc::EEXIST);
        }
        self.next += 1;
        self.inodes.insert(self.next, kind);
        self.paths.insert(path.to_owned(), self.next);
        Ok(Seen::Done)
    }

    fn entries(&self, directory: &str) -> Vec<String> {
        let inside = self.paths.keys().filter(|path| parent(path) == directory);
        inside.map(|path| path.rsplit('/').next().unwrap().to_owned()).collect()
    }

    fn is_directory(&self, path: &str) -> bool {
        self.kind(path) == Ok(&Kind::Directory)
    }

    /// Removes a path, and its inode if nothing else refers to it.
    fn remove(&mut self, path: &str) {
        let inode = self.paths.remove(path).unwrap();
        self.free(inode);
    }

    fn free(&mut self, inode: u32) {
        if !self.held.contains(&inode) && !self.paths.values().any(|other| *other == inode) {
            self.inodes.remove(&inode);
        }
    }

    /// Takes a path and everything below out of the map, with the paths relative to it.
    fn take(&mut self, path: &str) -> Vec<(String, u32)> {
        let below = format!("{path}/");
        let all: Vec<String> =
            self.paths.keys().filter(|other| *other == path || other.starts_with(&below)).cloned().collect();
        all.iter().map(|other| (other[path.len()..].to_owned(), self.paths.remove(other).unwrap())).collect()
    }

    fn put(&mut self, path: &str, taken: Vec<(String, u32)>) {
        self.paths.extend(taken.into_iter().map(|(rest, inode)| (format!("{path}{rest}"), inode)));
    }

    fn rename(&mut self, from: &str, to: &str, how: Rename) -> Outcome {
        self.walk(from)?;
        self.walk(to)?;
        let source = *self.paths.get(from).ok_or(libc::ENOENT)?;
        let target = self.paths.get(to).copied();
        let is_below = |inner: &str, outer: &str| inner.starts_with(&format!("{outer}/"));
        match (how, target) {
            (Rename::NoReplace, Some(_)) => return Err(libc::EEXIST),
            (Rename::Exchange, None) => return Err(libc::ENOENT),
            _ if is_below(to, from) => return Err(libc::EINVAL),
            (Rename::Exchange, _) if is_below(from, to) => return Err(libc::EINVAL),
            _ if is_below(from, to) => return Err(libc::ENOTEMPTY),
            (_, Some(target)) if target == source => return Ok(Seen::Done),
            (Rename::Exchange, Some(_)) => {
                let (one, two) = (self.take(from), self.take(to));
                self.put(to, one);
                self.put(from, two);
                return Ok(Seen::Done);
            }
            (_, Some(_)) => match (self.is_directory(from), self.is_directory(to)) {
                (true, false) => return Err(libc::ENOTDIR),
                (false, true) => return Err(libc::EISDIR),
                (true, true) if !self.entries(to).is_empty() => return Err(libc::ENOTEMPTY),
                _ => {}
            },
            (_, None) => {}
        }
        if target.is_some() {
            self.remove(to);
        }
        let taken = self.take(from);
        self.put(to, taken);
        Ok(Seen::Done)
    }

    fn stat(&self, path: &str) -> Outcome {
        let inode = self.find(path)?;
        let names = self.paths.values().filter(|other| **other == inode).count() as u64;
        Ok(match &self.inodes[&inode] {
            Kind::File(bytes) => Seen::Attr('f', bytes.len() as u64, names),
            Kind::Symlink => Seen::Attr('l', TARGET.len() as u64, names),
            Kind::Directory => {
                let is_inside = |other: &&String| parent(other) == path && self.is_directory(other);
                Seen::Attr('d', 0, 2 + self.paths.keys().filter(is_inside).count() as u64)
            }
        })
    }
}

impl Subject for Model {
    fn apply(&mut self, operation: &Operation) -> Outcome {
        match operation {
            Operation::Create(path) => self.make(path, Kind::File(Vec::new())),
            Operation::Mkdir(path) => self.make(path, Kind::Directory),
            Operation::Symlink(path) => self.make(path, Kind::Symlink),
            Operation::Write(path, at, len, byte) => {
                let inode = self.open(path)?;
                let (at, len, bytes) = (usize::from(*at), usize::from(*len), self.bytes(inode));
                if len > 0 {
                    bytes.resize(bytes.len().max(at + len), 0);
                    bytes[at..at + len].fill(*byte);
                }
                Ok(Seen::Done)
            }
            Operation::Truncate(path, len) => {
                let inode = self.open(path)?;
                self.bytes(inode).resize(usize::from(*len), 0);
                Ok(Seen::Done)
            }
            Operation::Read(path) => {
                let inode = self.open(path)?;
                Ok(Seen::Bytes(self.bytes(inode).clone()))
            }
            Operation::Rmdir(path) => {
                self.find(path)?;
                match self.is_directory(path) {
                    false => Err(libc::ENOTDIR),
                    true if !self.entries(path).is_empty() => Err(libc::ENOTEMPTY),
                    true => {
                        self.remove(path);
                        Ok(Seen::Done)
                    }
                }
            }
            Operation::Unlink(path) => {
                self.find(path)?;
                if self.is_directory(path) {
                    return Err(libc::EISDIR);
                }
                self.remove(path);
                Ok(Seen::Done)
            }
            Operation::Link(from, to) => {
                let inode = self.find(from)?;
                self.walk(to)?;
                if self.paths.contains_key(to) {
                    return Err(libc::EEXIST);
                }
                if self.is_directory(from) {
                    return Err(libc::EPERM);
                }
                self.paths.insert(to.clone(), inode);
                Ok(Seen::Done)
            }
            Operation::Rename(from, to, how) => self.rename(from, to, *how),
            Operation::List(path) => {
                self.find(path)?;
                match self.kind(path)? {
                    Kind::Directory => {
                        let mut names = self.entries(path);
                        names.sort();
                        Ok(Seen::Names(names))
                    }
                    Kind::File(_) => Err(libc::ENOTDIR),
                    Kind::Symlink => Err(libc::ENOENT),
                }
            }
            Operation::Stat(path) => self.stat(path),
            Operation::Hold(path) => {
                let inode = self.open(path)?;
                self.held.push(inode);
                Ok(Seen::Done)
            }
            Operation::Release if self.held.is_empty() => Ok(Seen::Done),
            Operation::Release => {
                let inode = self.held.remove(0);
                let bytes = self.bytes(inode).clone();
                self.free(inode);
                Ok(Seen::Bytes(bytes))
            }
            Operation::Shrink => Ok(Seen::Done),
        }
    }
}
