//! [`RamFs`] as a file system of the crate `vfs` (feature `vfs`).
//!
//! ```
//! # #[cfg(feature = "vfs")] {
//! use pagemill_ramfs::RamFs;
//! use vfs::VfsPath;
//!
//! let root: VfsPath = RamFs::new("scratch")?.into();
//! root.join("file")?.create_file()?.write_all(b"hello")?;
//! assert_eq!(root.join("file")?.read_to_string()?, "hello");
//! # }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use crate::error::Error;
use crate::file::{File, OpenOptions};
use crate::fs::RamFs;
use crate::inode::{FileType, SetAttr, SetTime};
use ::vfs::error::VfsErrorKind;
use ::vfs::{FileSystem, SeekAndRead, SeekAndWrite, VfsError, VfsFileType, VfsMetadata, VfsResult};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// An open file with a position, as [`std::fs::File`] has one.
struct Cursor {
    file: File,
    position: u64,
    appends: bool,
}

impl Cursor {
    fn open(fs: &RamFs, path: &str, options: OpenOptions) -> VfsResult<Box<Self>> {
        let appends = options.append;
        let file = fs.open(absolute(path), &options).map_err(error)?;
        Ok(Box::new(Self { file, position: 0, appends }))
    }
}

impl Read for Cursor {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let len = self.file.read_at(to, self.position)?;
        self.position += len as u64;
        Ok(len)
    }
}

impl Write for Cursor {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        let len = self.file.write_at(from, self.position)?;
        self.position = if self.appends { self.file.size_bytes() } else { self.position + len as u64 };
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Seek for Cursor {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let position = match to {
            SeekFrom::Start(offset) => Some(offset),
            SeekFrom::Current(delta) => self.position.checked_add_signed(delta),
            SeekFrom::End(delta) => self.file.size_bytes().checked_add_signed(delta),
        };
        self.position = position.ok_or(Error::Invalid { what: "a position before the begin of the file" })?;
        Ok(self.position)
    }
}

/// The crate's path of the root is empty.
fn absolute(path: &str) -> &str {
    if path.is_empty() { "/" } else { path }
}

fn error(error: Error) -> VfsError {
    match error {
        Error::NotFound => VfsErrorKind::FileNotFound.into(),
        error => io::Error::from(error).into(),
    }
}

fn time(ns: i64) -> Option<SystemTime> {
    let distance = Duration::from_nanos(ns.unsigned_abs());
    if ns < 0 { UNIX_EPOCH.checked_sub(distance) } else { UNIX_EPOCH.checked_add(distance) }
}

/// Returns the time in nanoseconds, the nearest one that a file can have.
fn time_to_set(time: SystemTime) -> SetTime {
    SetTime::To(match time.duration_since(UNIX_EPOCH) {
        Ok(since) => i64::try_from(since.as_nanos()).unwrap_or(i64::MAX),
        Err(before) => i64::try_from(before.duration().as_nanos()).map_or(i64::MIN, |ns| -ns),
    })
}

/// Permissions are checked for the caller of the handle. Names that are not UTF-8 are left out of listings. The time of
/// creation cannot be set.
impl FileSystem for RamFs {
    fn read_dir(&self, path: &str) -> VfsResult<Box<dyn Iterator<Item = String> + Send>> {
        let entries = self.read_dir(absolute(path)).map_err(error)?;
        Ok(Box::new(entries.into_iter().filter_map(|entry| entry.name.into_string().ok())))
    }

    fn create_dir(&self, path: &str) -> VfsResult<()> {
        self.create_dir(absolute(path)).map_err(|failed| match failed {
            Error::Exists if self.metadata(absolute(path)).is_ok_and(|attr| attr.kind == FileType::Directory) => {
                VfsErrorKind::DirectoryExists.into()
            }
            Error::Exists => VfsErrorKind::FileExists.into(),
            failed => error(failed),
        })
    }

    fn open_file(&self, path: &str) -> VfsResult<Box<dyn SeekAndRead + Send>> {
        Ok(Cursor::open(self, path, OpenOptions::new().read(true))?)
    }

    fn create_file(&self, path: &str) -> VfsResult<Box<dyn SeekAndWrite + Send>> {
        Ok(Cursor::open(self, path, OpenOptions::new().write(true).create(true).truncate(true))?)
    }

    fn append_file(&self, path: &str) -> VfsResult<Box<dyn SeekAndWrite + Send>> {
        Ok(Cursor::open(self, path, OpenOptions::new().append(true))?)
    }

    fn metadata(&self, path: &str) -> VfsResult<VfsMetadata> {
        let attr = self.metadata(absolute(path)).map_err(error)?;
        let (file_type, len) = match attr.kind {
            FileType::Directory => (VfsFileType::Directory, 0),
            _ => (VfsFileType::File, attr.size_bytes),
        };
        let [created, modified, accessed] = [attr.created_ns, attr.modified_ns, attr.accessed_ns].map(time);
        Ok(VfsMetadata { file_type, len, created, modified, accessed })
    }

    fn set_modification_time(&self, path: &str, time: SystemTime) -> VfsResult<()> {
        let change = SetAttr { modified: Some(time_to_set(time)), ..SetAttr::default() };
        self.set_attributes(absolute(path), &change).map(drop).map_err(error)
    }

    fn set_access_time(&self, path: &str, time: SystemTime) -> VfsResult<()> {
        let change = SetAttr { accessed: Some(time_to_set(time)), ..SetAttr::default() };
        self.set_attributes(absolute(path), &change).map(drop).map_err(error)
    }

    fn exists(&self, path: &str) -> VfsResult<bool> {
        Ok(self.exists(absolute(path)))
    }

    fn remove_file(&self, path: &str) -> VfsResult<()> {
        self.remove_file(absolute(path)).map_err(error)
    }

    fn remove_dir(&self, path: &str) -> VfsResult<()> {
        self.remove_dir(absolute(path)).map_err(error)
    }

    fn copy_file(&self, from: &str, to: &str) -> VfsResult<()> {
        let mut from = Cursor::open(self, from, OpenOptions::new().read(true))?;
        let mut to = Cursor::open(self, to, OpenOptions::new().write(true).create(true).truncate(true))?;
        io::copy(&mut from, &mut to)?;
        Ok(())
    }

    fn move_file(&self, from: &str, to: &str) -> VfsResult<()> {
        self.rename(absolute(from), absolute(to)).map_err(error)
    }

    fn move_dir(&self, from: &str, to: &str) -> VfsResult<()> {
        self.rename(absolute(from), absolute(to)).map_err(error)
    }
}

#[cfg(all(test, not(shuttle)))]
#[allow(clippy::useless_vec)] // in the tests of the crate vfs
mod tests {
    use super::*;

    // The tests that the crate has for its own file systems.
    ::vfs::test_vfs!(RamFs::new("vfs").unwrap());

    /// A cursor that appends must be at the end of the file after each write, and times before 1970 must be kept.
    #[test]
    fn cursors_and_times() {
        let fs = RamFs::new("vfs").unwrap();
        fs.write("/file", b"one").unwrap();
        let mut cursor = Cursor::open(&fs, "/file", OpenOptions::new().append(true).read(true)).unwrap();
        cursor.write_all(b"two").unwrap();
        assert_eq!(cursor.stream_position().unwrap(), 6);
        assert!(cursor.seek(SeekFrom::End(-7)).is_err());
        cursor.seek(SeekFrom::End(-4)).unwrap();
        let mut rest = String::new();
        cursor.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "etwo");
        let before = UNIX_EPOCH - Duration::from_millis(1500);
        FileSystem::set_modification_time(&fs, "/file", before).unwrap();
        assert_eq!(FileSystem::metadata(&fs, "/file").unwrap().modified, Some(before));
    }
}
