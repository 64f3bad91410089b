//! A look at everything: the only way to learn of what was there before, of what notification lost, and of marks that were
//! set on files afterwards.

use crate::door::{self, BadMark, Door, Seen};
use crate::policy::{Above, Marks};
use rustix::fs::Dir;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Something that was found.
#[derive(Debug)]
pub enum Found {
    Folder { inode: u64, parent: u64, name: OsString, above: Above },
    File { folder: u64, name: OsString, seen: Seen, marks: Marks },
    Bad { path: PathBuf, mark: BadMark },
}

/// Walks over everything below the root and tells it, a folder before what is in it. What vanishes meanwhile is passed over.
///
/// # Errors
///
/// What opening the root says.
pub fn scan(door: &Door, mut tell: impl FnMut(Found)) -> io::Result<()> {
    door.open_folder(Path::new(""))?;
    let mut open = vec![(PathBuf::new(), door.root_inode())];
    while let Some((path, inode)) = open.pop() {
        let Ok(fd) = door.open_folder(&path) else { continue };
        let Ok(entries) = Dir::read_from(&fd) else { continue };
        for entry in entries.filter_map(Result::ok) {
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name == "." || name == ".." {
                continue;
            }
            let Ok(seen) = door::look_at(&fd, name) else { continue };
            let marks = |tell: &mut dyn FnMut(Found)| {
                door::marks_at(&fd, name, |mark| tell(Found::Bad { path: path.join(name), mark }))
            };
            if seen.is_folder() {
                let marks = marks(&mut tell);
                let above = Above { marks, owner: seen.owner, is_open_to_others: seen.is_open_to_others() };
                tell(Found::Folder { inode: seen.inode, parent: inode, name: name.to_owned(), above });
                open.push((path.join(name), seen.inode));
            } else if seen.is_file() {
                let marks = marks(&mut tell);
                tell(Found::File { folder: inode, name: name.to_owned(), seen, marks });
            }
        }
    }
    Ok(())
}
