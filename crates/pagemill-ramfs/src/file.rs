//! Open files.

use crate::access::{Access, Caller};
use crate::active::Active;
use crate::error::{Error, Result};
use crate::file_data::{Allocate, FileData};
use crate::fs::Inner;
use crate::inode::{Attr, FileType, Ino, InodeHandle};
use crate::range_lock::LockRange;
use pagemill_cache::{Mapping, View, ViewMut};
use pagemill_store::Store;
use std::ops::Range;
use std::sync::Arc;

/// How a file is opened.
///
/// ```
/// use pagemill::ramfs::{OpenOptions, RamFs};
///
/// let fs = RamFs::new("logs")?;
/// let log = fs.open("/log", &OpenOptions::new().append(true).create(true))?;
/// log.write(b"one\n")?;
/// log.write(b"two\n")?;
/// assert_eq!(fs.read("/log")?, b"one\ntwo\n");
/// # Ok::<(), pagemill::ramfs::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenOptions {
    pub(crate) read: bool,
    pub(crate) write: bool,
    pub(crate) append: bool,
    pub(crate) truncate: bool,
    pub(crate) create: bool,
    pub(crate) create_new: bool,
    pub(crate) no_follow: bool,
    pub(crate) mode: Option<u32>,
}

impl OpenOptions {
    /// Returns options that permit nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the options for flags of `open(2)`.
    pub fn from_flags(flags: i32) -> Self {
        let access = flags & libc::O_ACCMODE;
        Self {
            read: access == libc::O_RDONLY || access == libc::O_RDWR,
            write: access == libc::O_WRONLY || access == libc::O_RDWR,
            append: flags & libc::O_APPEND != 0 && access != libc::O_RDONLY,
            truncate: flags & libc::O_TRUNC != 0,
            create: flags & libc::O_CREAT != 0,
            create_new: flags & (libc::O_CREAT | libc::O_EXCL) == libc::O_CREAT | libc::O_EXCL,
            no_follow: flags & libc::O_NOFOLLOW != 0,
            mode: None,
        }
    }

    /// Sets whether the file can be read.
    #[must_use]
    pub fn read(self, read: bool) -> Self {
        Self { read, ..self }
    }

    /// Sets whether the file can be written.
    #[must_use]
    pub fn write(self, write: bool) -> Self {
        Self { write, ..self }
    }

    /// Sets whether [`File::write`] appends. The file can be written then.
    #[must_use]
    pub fn append(self, append: bool) -> Self {
        Self { append, write: self.write || append, ..self }
    }

    /// Sets whether the file's length becomes 0. Needs the permission to write.
    #[must_use]
    pub fn truncate(self, truncate: bool) -> Self {
        Self { truncate, ..self }
    }

    /// Sets whether the file is created if it does not exist.
    #[must_use]
    pub fn create(self, create: bool) -> Self {
        Self { create, ..self }
    }

    /// Sets whether the file must be new.
    #[must_use]
    pub fn create_new(self, create_new: bool) -> Self {
        Self { create_new, create: self.create || create_new, ..self }
    }

    /// Sets whether a symbolic link as the last component is an error.
    #[must_use]
    pub fn no_follow(self, no_follow: bool) -> Self {
        Self { no_follow, ..self }
    }

    /// Sets the permission bits of a new file, of which the caller's umask is removed. The default is 0666.
    #[must_use]
    pub fn mode(self, mode: u32) -> Self {
        Self { mode: Some(mode), ..self }
    }

    /// The permissions that the open needs.
    fn access(&self) -> Access {
        let write = if self.write || self.truncate { Access::WRITE.0 } else { 0 };
        Access(write | if self.read { Access::READ.0 } else { 0 })
    }
}

/// What [`File::seek`] looks for.
///
/// Example: [`File::seek`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whence {
    Data,
    Hole,
}

/// An open regular file. It exists until this value is dropped, also without a name. Several threads may use it.
///
/// ```
/// use pagemill::ramfs::{OpenOptions, RamFs};
///
/// let fs = RamFs::new("scratch")?;
/// let file = fs.open("/file", &OpenOptions::new().read(true).write(true).create(true))?;
/// fs.remove_file("/file")?;
/// file.write_at(b"still here", 5)?;
/// assert_eq!(file.metadata()?.size_bytes, 15);
/// # Ok::<(), pagemill::ramfs::Error>(())
/// ```
pub struct File {
    fs: Arc<Inner>,
    active: Arc<Active>,
    options: OpenOptions,
    keeps_set_id: bool,
}

impl File {
    /// Opens an inode. The permission bits are checked.
    pub(crate) fn open(fs: &Arc<Inner>, inode: InodeHandle, options: &OpenOptions, caller: &Caller) -> Result<Self> {
        let found = fs.inode(inode)?;
        match found.kind() {
            FileType::Regular => {}
            FileType::Directory => return Err(Error::IsDirectory),
            FileType::Symlink => return Err(Error::LinkLoop { most: 0 }),
            _ => return Err(Error::Unsupported { what: "opening a device, pipe or socket" }),
        }
        caller.check(&found, options.access())?;
        let file = Self::of(fs, fs.begin_use(inode)?, options, caller);
        if options.truncate && found.data != 0 {
            fs.truncate(&file.active, 0, file.keeps_set_id)?;
        }
        Ok(file)
    }

    /// Makes a file of a use that has begun.
    pub(crate) fn of(fs: &Arc<Inner>, active: Arc<Active>, options: &OpenOptions, caller: &Caller) -> Self {
        Self { fs: fs.clone(), active, options: *options, keeps_set_id: caller.keeps_set_id() }
    }

    pub fn ino(&self) -> Ino {
        self.active.ino
    }

    pub(crate) fn is_of(&self, fs: &Arc<Inner>) -> bool {
        Arc::ptr_eq(&self.fs, fs)
    }

    pub(crate) fn is_writable(&self) -> bool {
        self.options.write
    }

    fn check_writable(&self) -> Result<()> {
        if self.options.write { Ok(()) } else { Err(Error::BadAccessMode { what: "writing" }) }
    }

    fn check_readable(&self) -> Result<()> {
        if self.options.read { Ok(()) } else { Err(Error::BadAccessMode { what: "reading" }) }
    }

    /// Reads bytes from `offset` on. Returns how many are before the end of the file.
    ///
    /// # Errors
    ///
    /// [`Error::BadAccessMode`], [`Error::Invalid`] for an offset beyond the largest, [`Error::Memory`].
    pub fn read_at(&self, to: &mut [u8], offset: u64) -> Result<usize> {
        self.check_readable()?;
        self.fs.read(&self.active, to, offset)
    }

    /// Writes bytes at `offset`, and extends the file if needed. Returns how many bytes were written: all, or as many
    /// as there was room for.
    ///
    /// # Errors
    ///
    /// If nothing was written: [`Error::NoSpace`], [`Error::QuotaExceeded`], [`Error::FileTooLarge`],
    /// [`Error::BadAccessMode`].
    pub fn write_at(&self, from: &[u8], offset: u64) -> Result<usize> {
        self.check_writable()?;
        self.fs.write(&self.active, from, (!self.options.append).then_some(offset), self.keeps_set_id)
    }

    /// Writes bytes at the end of the file.
    ///
    /// # Errors
    ///
    /// As [`File::write_at`].
    pub fn write(&self, from: &[u8]) -> Result<usize> {
        self.check_writable()?;
        self.fs.write(&self.active, from, None, self.keeps_set_id)
    }

    /// Returns the length of the file in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.fs.size_of(&self.active)
    }

    /// Sets the length of the file. Bytes that are added are a hole. After an error the length is as before, or already
    /// changed if only the memory to record the time was missing.
    ///
    /// # Errors
    ///
    /// [`Error::BadAccessMode`], [`Error::FileTooLarge`], [`Error::Invalid`].
    pub fn set_size(&self, size_bytes: u64) -> Result<()> {
        self.check_writable()?;
        self.fs.truncate(&self.active, size_bytes, self.keeps_set_id)
    }

    /// Allocates, frees or zeroes a range. After an error the file is as before, with two exceptions: a part of the range
    /// may be zeroed, and the change is done if only the memory to record its time was missing.
    ///
    /// # Errors
    ///
    /// [`Error::NoSpace`], [`Error::QuotaExceeded`], [`Error::BadAccessMode`], [`Error::Invalid`] for an empty range,
    /// [`Error::FileTooLarge`] for a range that ends beyond 2^63 - 1, [`Error::Unsupported`] for memory behind the end.
    ///
    /// ```
    /// use pagemill::ramfs::{Allocate, OpenOptions, RamFs, Whence};
    ///
    /// let fs = RamFs::new("scratch")?;
    /// let file = fs.open("/file", &OpenOptions::new().read(true).write(true).create(true))?;
    /// file.allocate(Allocate::Extend, 0, 1 << 20)?;
    /// file.allocate(Allocate::Punch, 64 << 10, 64 << 10)?;
    /// assert_eq!((file.seek(Whence::Hole, 0)?, file.seek(Whence::Data, 64 << 10)?), (64 << 10, 128 << 10));
    /// # Ok::<(), pagemill::ramfs::Error>(())
    /// ```
    pub fn allocate(&self, how: Allocate, offset: u64, len_bytes: u64) -> Result<()> {
        self.check_writable()?;
        self.fs.allocate(&self.active, how, offset, len_bytes, self.keeps_set_id)
    }

    /// Returns the offset of the first data, or of the first hole, from `offset` on. The end of the file is a hole.
    ///
    /// # Errors
    ///
    /// [`Error::PastEnd`] if the offset lies behind the end, or if no data follow.
    pub fn seek(&self, whence: Whence, offset: u64) -> Result<u64> {
        let size_bytes = self.size_bytes();
        let past_end = Error::PastEnd { offset, size_bytes };
        let Some(data) = self.data().filter(|_| offset < size_bytes) else { return Err(past_end) };
        match whence {
            Whence::Data => data.seek_data_in(offset..size_bytes)?.ok_or(past_end),
            Whence::Hole => data.seek_hole_in(offset..size_bytes),
        }
    }

    /// Returns the attributes of the file.
    ///
    /// # Errors
    ///
    /// None in practice: an open file exists.
    pub fn metadata(&self) -> Result<Attr> {
        self.fs.attributes(self.active.inode)
    }

    /// Returns the permission bits of the file. Cheaper than [`File::metadata`], which also counts pages.
    ///
    /// # Errors
    ///
    /// None in practice: an open file exists.
    pub fn mode(&self) -> Result<u32> {
        self.fs.inode(self.active.inode).map(|inode| inode.mode & 0o7777)
    }

    /// Writes dirty pages of a file with a store to the store. Other files have nothing to write.
    ///
    /// # Errors
    ///
    /// [`Error::Memory`] with the error of the store.
    pub fn sync(&self) -> Result<()> {
        self.data().map_or(Ok(()), |data| Ok(data.mapping.sync()?))
    }

    /// Gives the empty file a store, from which its pages are read and to which changes are written back. The store must
    /// not use files of this file system: their locks may be held while the store is called.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`] if the file has data, [`Error::BadAccessMode`], those of the store.
    pub fn set_store(&self, store: Arc<dyn Store>) -> Result<()> {
        self.check_writable()?;
        self.fs.attach_store(&self.active, store)
    }

    fn data(&self) -> Option<&Arc<FileData>> {
        self.active.data.get()
    }

    /// Returns the file as a file of the page cache, with pins, queues and hints; `None` while it is empty. Writes
    /// through it count for no quota and set no time.
    ///
    /// With a spill store ([`crate::Builder::spill`]) reads all spilled segments of the file from the store, and may evict
    /// segments of other files. The file then stays in memory until it is removed. `None` also if the file does not fit
    /// into memory or the store fails; [`File::view`] reports which.
    pub fn mapping(&self) -> Option<&Mapping> {
        self.mapping_kept_in_memory().ok().flatten()
    }

    /// Brings the file into memory, where it stays, and returns its mapping.
    fn mapping_kept_in_memory(&self) -> Result<Option<&Mapping>> {
        let Some(data) = self.data() else { return Ok(None) };
        if let Some(segments) = &data.segments {
            self.fs.cache.check_process()?;
            let _writing = self.active.writing.lock();
            segments.spill.keep_in_memory(data, segments)?;
        }
        Ok(Some(&data.mapping))
    }

    /// Makes a range accessible as memory. The file system needs shared memory ([`crate::Builder::source`]). A view
    /// does not keep a file without a name: after the last close the pages of a file without a store are freed, and an
    /// access to the view raises `SIGBUS`. With a spill store the whole file is brought into memory, and stays there until
    /// it is removed.
    ///
    /// # Errors
    ///
    /// [`Error::PastEnd`] for an empty file, [`Error::BadAccessMode`], [`Error::Memory`]. With a spill store
    /// [`Error::NoSpace`] if the file does not fit into memory, and [`Error::Memory`] if the store fails to read.
    pub fn view(&self, range: Range<u64>) -> Result<View> {
        self.check_readable()?;
        Ok(self.mapping_kept_in_memory()?.ok_or(Error::PastEnd { offset: range.start, size_bytes: 0 })?.view(range)?)
    }

    /// As [`File::view`], for memory that can be written.
    ///
    /// # Errors
    ///
    /// As [`File::view`].
    pub fn view_mut(&self, range: Range<u64>) -> Result<ViewMut> {
        self.check_readable()?;
        self.check_writable()?;
        Ok(self
            .mapping_kept_in_memory()?
            .ok_or(Error::PastEnd { offset: range.start, size_bytes: 0 })?
            .view_mut(range)?)
    }

    /// Locks a range of bytes at once. A lock replaces earlier ones of the same owner in this range.
    ///
    /// # Errors
    ///
    /// [`Error::Locked`], [`Error::Invalid`] for an empty range.
    pub fn lock_range(&self, lock: LockRange) -> Result<()> {
        self.active.range_locks.try_lock(lock)
    }

    /// Locks a range of bytes; waits for locks of other owners.
    ///
    /// # Errors
    ///
    /// [`Error::Deadlock`], [`Error::Invalid`] for an empty range.
    pub fn lock_range_waiting(&self, lock: LockRange) -> Result<()> {
        self.active.range_locks.lock(lock)
    }

    /// Returns a lock that prevents `wanted`.
    pub fn conflicting_lock(&self, wanted: &LockRange) -> Option<LockRange> {
        self.active.range_locks.conflict(wanted)
    }

    /// Ends the locks of an owner from `start` to the byte before `end`.
    pub fn unlock_range(&self, owner: u64, start: u64, end: u64) {
        self.active.range_locks.unlock(owner, start, end);
    }

    /// Gives the file a name, for example one of [`crate::RamFs::open_nameless`].
    ///
    /// # Errors
    ///
    /// [`Error::Exists`], [`Error::NotFound`] for a file that was removed, and those of paths and space.
    pub fn link_at(&self, fs: &crate::RamFs, path: impl AsRef<std::path::Path>) -> Result<()> {
        if !self.is_of(&fs.inner) {
            return Err(Error::OtherFileSystem);
        }
        fs.link_handle(self.active.inode, path.as_ref())
    }
}

impl Drop for File {
    fn drop(&mut self) {
        self.fs.end_use(self.active.ino, 1);
    }
}

impl std::fmt::Debug for File {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut text = f.debug_struct("File");
        text.field("ino", &self.ino()).field("size_bytes", &self.size_bytes()).finish_non_exhaustive()
    }
}
