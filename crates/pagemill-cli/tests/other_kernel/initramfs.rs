//! The initial root file system of the emulator: a cpio archive in the format "newc", which the kernel unpacks into
//! memory.
//!
//! The format is described in the kernel's source, Documentation/driver-api/early-userspace/buffer-format.rst.

use crate::common::{TIMEOUT, finish};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const FOLDER_MODE: u32 = 0o040_755;
const FILE_MODE: u32 = 0o100_755;

/// A cpio archive under construction, and the paths that it already contains.
#[derive(Default)]
pub struct Initramfs {
    bytes: Vec<u8>,
    names: BTreeSet<PathBuf>,
}

impl Initramfs {
    pub fn add_folder(&mut self, path: impl AsRef<Path>) {
        self.add(path.as_ref(), FOLDER_MODE, &[]);
    }

    pub fn add_file(&mut self, path: impl AsRef<Path>, contents: &[u8]) {
        self.add(path.as_ref(), FILE_MODE, contents);
    }

    /// Adds a program or library to the archive as `path`. Also adds every library that it needs, at the same path as
    /// on this machine.
    pub fn add_program(&mut self, path: impl AsRef<Path>, from: &Path) {
        self.add_file(path, &fs::read(from).unwrap());
        for library in needed_libraries(from) {
            let contents = fs::read(&library).unwrap();
            self.add_file(library, &contents);
        }
    }

    pub fn finish(mut self) -> Vec<u8> {
        self.write_entry(Path::new("TRAILER!!!"), 0, &[]);
        self.bytes
    }

    /// Adds a file or folder, unless the archive already contains its path. Adds its parent folders first, because the
    /// kernel does not create them.
    fn add(&mut self, path: &Path, mode: u32, contents: &[u8]) {
        let path = path.strip_prefix("/").unwrap_or(path);
        if path.as_os_str().is_empty() || !self.names.insert(path.to_owned()) {
            return;
        }
        self.add_folder(path.parent().unwrap());
        self.write_entry(path, mode, contents);
    }

    fn write_entry(&mut self, path: &Path, mode: u32, contents: &[u8]) {
        let name = path.as_os_str().as_bytes();
        // Inode, mode, user, group, links, time, length, device of the file (two fields), device number (two
        // fields), length of the name, checksum.
        let (index, len) = (self.names.len(), contents.len());
        let fields = [index, mode as usize, 0, 0, 1, 0, len, 0, 0, 0, 0, name.len() + 1, 0];
        self.bytes.extend(b"070701");
        for field in fields {
            self.bytes.extend(format!("{field:08x}").bytes());
        }
        self.bytes.extend(name);
        self.bytes.push(0);
        self.pad_to_four_bytes();
        self.bytes.extend(contents);
        self.pad_to_four_bytes();
    }

    fn pad_to_four_bytes(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

/// Returns every path in the output of `ldd` for a program: the libraries that it needs, and the loader.
fn needed_libraries(program: &Path) -> Vec<PathBuf> {
    let mut ldd = Command::new("ldd");
    ldd.arg(program);
    let end = finish(ldd, TIMEOUT);
    end.assert_success();
    end.out.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from).collect()
}
