//! Opening files: kind of file, exclusive writing, alignment of direct transfers.

use super::claims::FileClaim;
use super::{FileStore, Handle};
use crate::Aligned;
use crate::errno::{self, EINVAL, EISDIR, EOPNOTSUPP};
use pagemill_core::error::{Error, Result};
use pagemill_core::stats::{self, Counter};
use pagemill_core::units::{BLOCK_BYTES, PageSize};
use pagemill_sys::disk::{self, Alignment, Disk, Facts, FileKind, Options};
use pagemill_sys::process;
use std::ffi::{CStr, CString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Attempts to open a file that is replaced meanwhile.
const TRIES: usize = 8;

/// Handling of a missing file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Creation {
    Never,
    IfMissing,
    /// Fails if the file exists.
    Always,
}

/// Options of opening a [`FileStore`]. Default: an existing file, for reading and writing, with direct I/O.
///
/// ```
/// use pagemill::store::{FileOptions, Store};
///
/// # let path = std::env::temp_dir().join(format!("pagemill-doc-options-{}", std::process::id()));
/// let store = FileOptions::new().create_new().buffered().open(&path)?;
/// assert_eq!((store.is_direct(), store.size_bytes().unwrap()), (false, 0));
/// assert!(FileOptions::new().create_new().open(&path).is_err()); // it exists
/// # std::fs::remove_file(&path).unwrap();
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct FileOptions {
    is_writable: bool,
    creation: Creation,
    block_bytes: usize,
    use_direct: bool,
}

impl Default for FileOptions {
    fn default() -> Self {
        Self { is_writable: true, creation: Creation::Never, block_bytes: PageSize::MIN_BYTES, use_direct: true }
    }
}

impl FileOptions {
    pub fn new() -> Self {
        Self::default()
    }

    /// Opens for reading only. Any number of stores may read a file.
    #[must_use]
    pub fn read_only(self) -> Self {
        Self { is_writable: false, ..self }
    }

    /// Creates the file if it is missing.
    #[must_use]
    pub fn create(self) -> Self {
        Self { creation: Creation::IfMissing, ..self }
    }

    /// Creates the file; it must be missing.
    #[must_use]
    pub fn create_new(self) -> Self {
        Self { creation: Creation::Always, ..self }
    }

    /// Sets the unit of transfers: a power of two, raised to what direct transfers need.
    #[must_use]
    pub fn block_bytes(self, block_bytes: usize) -> Self {
        Self { block_bytes, ..self }
    }

    /// Uses the kernel's page cache, as if direct transfers were refused.
    #[must_use]
    pub fn buffered(self) -> Self {
        Self { use_direct: false, ..self }
    }

    /// Opens the file. [`FileStore::is_direct`] returns false if the file system refuses direct transfers.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] with the system's error: the file is missing, a folder (`EISDIR`), not writable (`EACCES`,
    /// `EROFS`), a mounted device (`EBUSY`). [`Error::Unsupported`] for pipes and terminals. [`Error::Busy`] if another
    /// store of this process writes to it, or a store of another process (by its advisory lock).
    /// [`Error::BadAlignment`] if the block is not a power of two.
    pub fn open(&self, path: impl AsRef<Path>) -> Result<FileStore> {
        if !self.block_bytes.is_power_of_two() {
            return Err(Error::BadAlignment { align_bytes: self.block_bytes });
        }
        let path = CString::new(path.as_ref().as_os_str().as_bytes()).map_err(|_| failed(errno::error(EINVAL)))?;
        for _ in 0..TRIES {
            if let Some(store) = self.try_open(&path)? {
                return Ok(store);
            }
        }
        Err(Error::Busy { what: "the file is replaced all the time" })
    }

    /// Returns `None` if the file was replaced meanwhile.
    fn try_open(&self, path: &CStr) -> Result<Option<FileStore>> {
        let Some((buffered, is_new)) = self.open_buffered(path).map_err(failed)? else { return Ok(None) };
        let facts = buffered.facts().map_err(failed)?;
        check_kind(facts.kind)?;
        let mut claim = None;
        if self.is_writable {
            let taken = FileClaim::take((facts.device, facts.inode));
            claim = Some(taken.ok_or(Error::Busy { what: "another store of this process writes to the file" })?);
            lock(&buffered)?;
        }
        let direct = match self.open_direct(path, &buffered, facts).map_err(failed)? {
            Second::Open(direct, alignment) => Some((direct, alignment)),
            Second::Refused => None,
            Second::Replaced => return Ok(None),
        };
        if is_new {
            // Best effort: some file systems cannot sync folders, and some folders cannot be opened.
            let _ = disk::sync_folder(&folder_of(path));
        }
        let (direct, alignment) = direct.unzip();
        if direct.is_none() && self.use_direct {
            stats::add(Counter::StoresBuffered, 1);
        }
        let alignment = alignment.unwrap_or(Alignment { memory: 1, offset: 1 });
        let handle = Handle {
            buffered,
            direct,
            alignment,
            block_bytes: self.block_bytes.max(alignment.offset),
            kind: facts.kind,
            is_writable: self.is_writable,
            is_limited: process::file_size_limit() != u64::MAX,
            is_resized: AtomicBool::new(is_new),
        };
        Ok(Some(FileStore { handle: Arc::new(handle), claim }))
    }

    /// Opens the file through the page cache, and returns whether it was created. `None` if it is created and removed
    /// meanwhile.
    fn open_buffered(&self, path: &CStr) -> io::Result<Option<(Disk, bool)>> {
        let plain = Options { is_writable: self.is_writable, ..Options::default() };
        if self.creation != Creation::Always {
            match Disk::open(path, plain) {
                Ok(disk) => return Ok(self.claim_device(path, disk)?.map(|disk| (disk, false))),
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                Err(error) if self.creation == Creation::Never => return Err(error),
                Err(_) => {}
            }
        }
        match Disk::open(path, Options { is_new: true, ..plain }) {
            Ok(disk) => Ok(Some((disk, true))),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && self.creation == Creation::IfMissing => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Opens a writable device exclusively (`O_EXCL`), which fails if the system uses it. The kind must be known before
    /// `O_EXCL` is used.
    fn claim_device(&self, path: &CStr, disk: Disk) -> io::Result<Option<Disk>> {
        let facts = disk.facts()?;
        if facts.kind != FileKind::Device || !self.is_writable {
            return Ok(Some(disk));
        }
        let options = Options { is_writable: true, is_exclusive: true, ..Options::default() };
        let exclusive = Disk::open(path, options)?;
        Ok((exclusive.facts()? == facts).then_some(exclusive))
    }

    /// Opens the file a second time, for direct I/O.
    fn open_direct(&self, path: &CStr, buffered: &Disk, facts: Facts) -> io::Result<Second> {
        let told = match buffered.direct_alignment() {
            _ if !self.use_direct => None,
            Ok(None) => None,
            Ok(Some(alignment)) => Some(alignment),
            Err(_) => Some(guess_alignment(buffered, facts)),
        };
        let Some(alignment) = told.filter(is_usable) else { return Ok(Second::Refused) };
        let options = Options { is_direct: true, is_writable: self.is_writable, ..Options::default() };
        let direct = match Disk::open(path, options) {
            Ok(direct) => direct,
            Err(error) if is_refusal(&error) => return Ok(Second::Refused),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Second::Replaced),
            Err(error) => return Err(error),
        };
        let found = direct.facts()?;
        if (found.kind, found.device, found.inode) != (facts.kind, facts.device, facts.inode) {
            return Ok(Second::Replaced);
        }
        // Some file systems accept `O_DIRECT` at open and then refuse the transfers.
        let mut block = Aligned::new(alignment.offset, alignment.memory);
        match direct.read_at(&mut block, 0) {
            Err(error) if is_refusal(&error) => Ok(Second::Refused),
            _ => Ok(Second::Open(direct, alignment)),
        }
    }
}

/// Locks a file for this process.
///
/// A killed process may keep its files open, and locked, for a moment while the kernel tears down its ring. So the lock
/// is retried for a while.
fn lock(file: &Disk) -> Result<()> {
    const STEP: Duration = Duration::from_millis(5);
    const LOCK_TRIES: usize = 200;
    for _ in 0..LOCK_TRIES {
        // A file system without locks: no other process holds one.
        if file.try_lock().unwrap_or(true) {
            return Ok(());
        }
        std::thread::sleep(STEP);
    }
    Err(Error::Busy { what: "another process writes to the file" })
}

/// Outcome of opening a file a second time, for direct I/O.
enum Second {
    Open(Disk, Alignment),
    Refused,
    /// The path names another file now.
    Replaced,
}

fn failed(cause: io::Error) -> Error {
    Error::Store { doing: "opening a file", cause }
}

fn check_kind(kind: FileKind) -> Result<()> {
    match kind {
        FileKind::Regular | FileKind::Device => Ok(()),
        FileKind::Folder => Err(failed(errno::error(EISDIR))),
        FileKind::Other => {
            Err(Error::Unsupported { what: "a store is a file or a block device, not a pipe or a terminal" })
        }
    }
}

fn is_refusal(error: &io::Error) -> bool {
    errno::is(error, EINVAL) || errno::is(error, EOPNOTSUPP)
}

/// Returns an alignment that all file systems accept. Needed before Linux 6.1, and where the file system does not
/// report one.
fn guess_alignment(disk: &Disk, facts: Facts) -> Alignment {
    let unit = match facts.kind {
        FileKind::Device => disk.sector_bytes().unwrap_or(PageSize::MIN_BYTES),
        _ => PageSize::MIN_BYTES,
    };
    Alignment { memory: unit, offset: unit }
}

fn is_usable(alignment: &Alignment) -> bool {
    [alignment.memory, alignment.offset].iter().all(|unit| unit.is_power_of_two() && *unit <= BLOCK_BYTES)
}

fn folder_of(path: &CStr) -> CString {
    let folder = Path::new(std::ffi::OsStr::from_bytes(path.to_bytes())).parent();
    let folder = folder.map_or(&b"."[..], |folder| folder.as_os_str().as_bytes());
    // Cannot fail: the bytes come from a C string.
    CString::new(if folder.is_empty() { b"." } else { folder }).unwrap_or_default()
}
