//! One interface for a RAM file system and the real one, so that code can be tested without the real one.

use crate::error::Error;
use crate::file::{File, OpenOptions};
use crate::fs::RamFs;
use crate::inode::{Attr, FileType};
use crate::paths::OwnedDirEntry;
use std::fs;
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// A file system. [`RamFs`] implements it, and [`RealFs`] for a folder of the real file system. Both accept the same
/// [`OpenOptions`].
///
/// ```
/// use pagemill::ramfs::{FileSystem, RamFs, RealFs};
///
/// /// Code that is tested on a `RamFs`, and runs on a `RealFs`.
/// fn rotate(fs: &impl FileSystem) -> std::io::Result<()> {
///     if fs.exists("/log".as_ref()) {
///         fs.rename("/log".as_ref(), "/log.old".as_ref())?;
///     }
///     fs.write("/log".as_ref(), b"new\n")
/// }
///
/// let ram = RamFs::new("logs")?;
/// rotate(&ram)?;
/// rotate(&ram)?;
/// assert_eq!(ram.read("/log.old")?, b"new\n");
/// # let folder = std::env::temp_dir().join(format!("pagemill-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder)?;
/// rotate(&RealFs::new(&folder))?;
/// # std::fs::remove_dir_all(&folder)?;
/// # Ok::<(), std::io::Error>(())
/// ```
pub trait FileSystem: Send + Sync {
    type File: OpenFile;

    /// Opens or creates a regular file.
    ///
    /// # Errors
    ///
    /// `EINVAL` without access, and for `create` or `truncate` without `write`, or `truncate` with `append`, as
    /// [`std::fs::OpenOptions`]. [`RamFs::open`] accepts these, as `open(2)`.
    fn open(&self, path: &Path, options: &OpenOptions) -> io::Result<Self::File>;
    /// Returns the attributes of the file that a path leads to.
    fn metadata(&self, path: &Path) -> io::Result<Attr>;
    /// As [`FileSystem::metadata`], but of a symbolic link itself.
    fn symlink_metadata(&self, path: &Path) -> io::Result<Attr>;
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    fn remove_dir(&self, path: &Path) -> io::Result<()>;
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    fn hard_link(&self, original: &Path, link: &Path) -> io::Result<()>;
    fn symlink(&self, target: &Path, link: &Path) -> io::Result<()>;
    fn read_link(&self, path: &Path) -> io::Result<PathBuf>;
    /// Returns the entries of a directory, in any order. Their cookies are 0 on the real file system.
    fn read_dir(&self, path: &Path) -> io::Result<Vec<OwnedDirEntry>>;
    /// Returns the contents of a file.
    fn read(&self, path: &Path) -> io::Result<Vec<u8>>;
    /// Writes a file: creates it, or replaces its contents.
    fn write(&self, path: &Path, contents: &[u8]) -> io::Result<()>;

    /// Returns whether a path leads to a file. Errors count as no.
    fn exists(&self, path: &Path) -> bool {
        self.metadata(path).is_ok()
    }
}

/// An open file of a [`FileSystem`].
///
/// Example: [`FileSystem`].
pub trait OpenFile: Send + Sync {
    /// Reads bytes from `offset` on. Returns how many were read; 0 at the end of the file. A file of [`RealFs`] may read
    /// fewer bytes than remain.
    fn read_at(&self, to: &mut [u8], offset: u64) -> io::Result<usize>;
    /// Writes bytes at `offset`; with [`OpenOptions::append`] at the end. Returns how many were written.
    fn write_at(&self, from: &[u8], offset: u64) -> io::Result<usize>;
    fn size_bytes(&self) -> io::Result<u64>;
    fn set_size(&self, size_bytes: u64) -> io::Result<()>;
    /// Makes the file durable, where that is possible.
    fn sync(&self) -> io::Result<()>;
}

impl OpenFile for File {
    fn read_at(&self, to: &mut [u8], offset: u64) -> io::Result<usize> {
        Ok(self.read_at(to, offset)?)
    }

    fn write_at(&self, from: &[u8], offset: u64) -> io::Result<usize> {
        Ok(self.write_at(from, offset)?)
    }

    fn size_bytes(&self) -> io::Result<u64> {
        Ok(self.size_bytes())
    }

    fn set_size(&self, size_bytes: u64) -> io::Result<()> {
        Ok(self.set_size(size_bytes)?)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(self.sync()?)
    }
}

/// Refuses the options that [`std::fs::OpenOptions`] refuses, so that a test on a [`RamFs`] fails as on a [`RealFs`].
fn check_as_std(options: &OpenOptions) -> Result<(), Error> {
    let &OpenOptions { read, write, append, truncate, create, create_new, .. } = options;
    let is_writable = write || append;
    let refused = |what| Err(Error::Invalid { what });
    if !read && !is_writable {
        refused("opening a file neither for reading nor for writing")
    } else if !is_writable && (truncate || create || create_new) {
        refused("creating or truncating a file opened for reading")
    } else if append && truncate && !create_new {
        refused("truncating a file opened for appending")
    } else {
        Ok(())
    }
}

impl FileSystem for RamFs {
    type File = File;

    fn open(&self, path: &Path, options: &OpenOptions) -> io::Result<File> {
        check_as_std(options)?;
        Ok(self.open(path, options)?)
    }

    fn metadata(&self, path: &Path) -> io::Result<Attr> {
        Ok(self.metadata(path)?)
    }

    fn symlink_metadata(&self, path: &Path) -> io::Result<Attr> {
        Ok(self.symlink_metadata(path)?)
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        Ok(self.create_dir(path)?)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        Ok(self.remove_file(path)?)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        Ok(self.remove_dir(path)?)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        Ok(self.rename(from, to)?)
    }

    fn hard_link(&self, original: &Path, link: &Path) -> io::Result<()> {
        Ok(self.hard_link(original, link)?)
    }

    fn symlink(&self, target: &Path, link: &Path) -> io::Result<()> {
        Ok(self.symlink(target, link)?)
    }

    fn read_link(&self, path: &Path) -> io::Result<PathBuf> {
        Ok(self.read_link(path)?)
    }

    fn read_dir(&self, path: &Path) -> io::Result<Vec<OwnedDirEntry>> {
        Ok(self.read_dir(path)?)
    }

    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        Ok(self.read(path)?)
    }

    fn write(&self, path: &Path, contents: &[u8]) -> io::Result<()> {
        Ok(self.write(path, contents)?)
    }
}

/// A folder of the real file system, whose path stands before all paths. It is no protection: `..` and symbolic links
/// lead out of the folder.
///
/// Example: [`FileSystem`].
#[derive(Clone, Debug)]
pub struct RealFs {
    root: PathBuf,
}

impl RealFs {
    pub fn new(root: impl AsRef<Path>) -> Self {
        Self { root: root.as_ref().to_owned() }
    }

    fn at(&self, path: &Path) -> PathBuf {
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }
}

fn kind_of(kind: fs::FileType) -> FileType {
    match kind {
        kind if kind.is_dir() => FileType::Directory,
        kind if kind.is_symlink() => FileType::Symlink,
        kind if kind.is_fifo() => FileType::Fifo,
        kind if kind.is_socket() => FileType::Socket,
        kind if kind.is_char_device() => FileType::CharDevice,
        kind if kind.is_block_device() => FileType::BlockDevice,
        _ => FileType::Regular,
    }
}

fn attr_of(found: &fs::Metadata) -> Attr {
    let ns = |seconds: i64, ns: i64| seconds.saturating_mul(1_000_000_000).saturating_add(ns);
    let changed_ns = ns(found.ctime(), found.ctime_nsec());
    let since_1970 = |time: std::time::SystemTime| time.duration_since(std::time::UNIX_EPOCH).ok();
    Attr {
        ino: found.ino(),
        kind: kind_of(found.file_type()),
        mode: found.mode() & 0o7777,
        links: found.nlink() as u32,
        uid: found.uid(),
        gid: found.gid(),
        device: found.rdev(),
        size_bytes: found.len(),
        allocated_bytes: found.blocks() * 512,
        page_bytes: found.blksize() as u32,
        accessed_ns: ns(found.atime(), found.atime_nsec()),
        modified_ns: ns(found.mtime(), found.mtime_nsec()),
        changed_ns,
        created_ns: found.created().ok().and_then(since_1970).map_or(changed_ns, |age| age.as_nanos() as i64),
    }
}

impl OpenFile for fs::File {
    fn read_at(&self, to: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self, to, offset)
    }

    fn write_at(&self, from: &[u8], offset: u64) -> io::Result<usize> {
        FileExt::write_at(self, from, offset)
    }

    fn size_bytes(&self) -> io::Result<u64> {
        self.metadata().map(|found| found.len())
    }

    fn set_size(&self, size_bytes: u64) -> io::Result<()> {
        self.set_len(size_bytes)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_all()
    }
}

impl FileSystem for RealFs {
    type File = fs::File;

    fn open(&self, path: &Path, options: &OpenOptions) -> io::Result<fs::File> {
        let mut real = fs::OpenOptions::new();
        real.read(options.read).write(options.write && !options.append).append(options.append);
        real.truncate(options.truncate).create(options.create).create_new(options.create_new);
        if let Some(mode) = options.mode {
            real.mode(mode);
        }
        if options.no_follow {
            real.custom_flags(libc::O_NOFOLLOW);
        }
        real.open(self.at(path))
    }

    fn metadata(&self, path: &Path) -> io::Result<Attr> {
        fs::metadata(self.at(path)).map(|found| attr_of(&found))
    }

    fn symlink_metadata(&self, path: &Path) -> io::Result<Attr> {
        fs::symlink_metadata(self.at(path)).map(|found| attr_of(&found))
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(self.at(path))
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(self.at(path))
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir(self.at(path))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(self.at(from), self.at(to))
    }

    fn hard_link(&self, original: &Path, link: &Path) -> io::Result<()> {
        fs::hard_link(self.at(original), self.at(link))
    }

    fn symlink(&self, target: &Path, link: &Path) -> io::Result<()> {
        std::os::unix::fs::symlink(target, self.at(link))
    }

    fn read_link(&self, path: &Path) -> io::Result<PathBuf> {
        fs::read_link(self.at(path))
    }

    fn read_dir(&self, path: &Path) -> io::Result<Vec<OwnedDirEntry>> {
        let listed = |entry: io::Result<fs::DirEntry>| {
            let entry = entry?;
            let kind = kind_of(entry.file_type()?);
            Ok(OwnedDirEntry {
                name: entry.file_name(),
                ino: std::os::unix::fs::DirEntryExt::ino(&entry),
                kind,
                cookie: 0,
            })
        };
        fs::read_dir(self.at(path))?.map(listed).collect()
    }

    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        fs::read(self.at(path))
    }

    fn write(&self, path: &Path, contents: &[u8]) -> io::Result<()> {
        fs::write(self.at(path), contents)
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    /// Runs the same calls on both file systems. Results and kinds of errors must be the same.
    fn use_all(fs: &impl FileSystem) -> Vec<String> {
        let path = Path::new;
        let mut seen = Vec::new();
        let mut note = |what: io::Result<String>| {
            seen.push(what.unwrap_or_else(|error| format!("error {:?}", error.kind())));
        };
        note(fs.create_dir(path("/dir")).map(|()| "made".into()));
        note(fs.create_dir(path("/dir")).map(|()| "made".into()));
        note(fs.write(path("/dir/file"), b"hello").map(|()| "written".into()));
        note(fs.hard_link(path("/dir/file"), path("/dir/other")).map(|()| "linked".into()));
        note(fs.symlink(path("dir/file"), path("/link")).map(|()| "linked".into()));
        note(fs.read_link(path("/link")).map(|target| format!("{target:?}")));
        note(fs.read(path("/link")).map(|bytes| format!("{bytes:?}")));
        let attr = |attr: Attr| format!("{} {} {}", attr.kind, attr.links, attr.size_bytes);
        note(fs.metadata(path("/link")).map(attr));
        note(fs.symlink_metadata(path("/link")).map(attr));
        note(fs.remove_dir(path("/dir")).map(|()| "removed".into()));
        note(fs.remove_file(path("/dir/missing")).map(|()| "removed".into()));
        note(fs.rename(path("/dir/other"), path("/renamed")).map(|()| "renamed".into()));
        let mut names: Vec<_> = fs.read_dir(path("/")).unwrap().into_iter().map(|e| (e.name, e.kind)).collect();
        names.sort_by(|one, other| one.0.cmp(&other.0));
        note(Ok(format!("{names:?}")));
        let file = fs.open(path("/renamed"), &OpenOptions::new().read(true).append(true)).unwrap();
        note(file.write_at(b"!", 0).map(|len| format!("{len} at the end")));
        note(file.set_size(3).and_then(|()| file.size_bytes()).map(|size| format!("{size}")));
        note(file.sync().map(|()| format!("{}", fs.exists(path("/nothing")))));
        // Each set of options, for a file that exists and for one that does not.
        for bits in 0..1 << 6 {
            let is = |bit: u32| bits >> bit & 1 == 1;
            let options = OpenOptions::new().read(is(0)).write(is(1)).append(is(2)).truncate(is(3));
            let options = options.create(is(4)).create_new(is(5));
            fs.write(path("/old"), b"old").unwrap();
            for name in ["/old", "/new"] {
                let opened = fs.open(path(name), &options);
                note(opened.and_then(|file| file.size_bytes()).map(|size| format!("{options:?}: {name} has {size}")));
            }
            let _ = fs.remove_file(path("/new"));
        }
        seen
    }

    /// The RAM file system must behave as the real one.
    #[test]
    fn ram_and_real_file_systems_agree() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(use_all(&RamFs::new("double").unwrap()), use_all(&RealFs::new(folder.path())));
    }
}
