//! Opens files as stores: checks the kind of file, locks it for writing, and finds the alignment of direct transfers.

use super::claims::FileClaim;
use super::{FileHandle, FileStore};
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

/// Maximum number of attempts to open a file. An attempt is repeated if another file replaced the file at that path
/// meanwhile.
const MAX_OPEN_ATTEMPTS: usize = 8;

/// Whether opening a file creates the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Creation {
    Never,
    IfMissing,
    /// The file is created. If the file exists, opening fails.
    Always,
}

/// Options for opening a [`FileStore`]. By default an existing file is opened for reading and writing, with direct I/O.
///
/// ```
/// use pagemill::store::{FileOptions, Store};
///
/// let path = std::env::temp_dir().join(format!("pagemill-doc-options-{}", std::process::id()));
/// let store = FileOptions::new().create_new().buffered().open(&path)?;
/// assert_eq!((store.is_direct(), store.size_bytes().unwrap()), (false, 0));
/// assert!(FileOptions::new().create_new().open(&path).is_err()); // it exists
/// std::fs::remove_file(&path).unwrap();
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

    /// Opens the file for reading only. Any number of stores may read a file.
    #[must_use]
    pub fn read_only(self) -> Self {
        Self { is_writable: false, ..self }
    }

    /// Makes [`FileOptions::open`] create the file if it is missing.
    #[must_use]
    pub fn create(self) -> Self {
        Self { creation: Creation::IfMissing, ..self }
    }

    /// Makes [`FileOptions::open`] create the file, and fail if the file exists.
    #[must_use]
    pub fn create_new(self) -> Self {
        Self { creation: Creation::Always, ..self }
    }

    /// Sets the unit of transfers in bytes, a power of two. [`FileOptions::open`] uses the unit that direct transfers
    /// need, if that is larger.
    #[must_use]
    pub fn block_bytes(self, block_bytes: usize) -> Self {
        Self { block_bytes, ..self }
    }

    /// Makes transfers use the kernel's page cache (no `O_DIRECT`).
    #[must_use]
    pub fn buffered(self) -> Self {
        Self { use_direct: false, ..self }
    }

    /// Opens the file. If the file system refuses direct transfers, the store is buffered ([`FileStore::is_direct`]
    /// returns false).
    ///
    /// # Errors
    ///
    /// [`Error::Store`] with the system's error: the file is missing, is a folder (`EISDIR`), cannot be written
    /// (`EACCES`, `EROFS`), or is a device in use (`EBUSY`). [`Error::Unsupported`] for pipes and terminals.
    /// [`Error::Busy`] if another store writes to the file, in this process or (by its advisory lock) in
    /// another. [`Error::BadAlignment`] if the block size is not a power of two.
    pub fn open(&self, path: impl AsRef<Path>) -> Result<FileStore> {
        if !self.block_bytes.is_power_of_two() {
            return Err(Error::BadAlignment { align_bytes: self.block_bytes });
        }
        let path = CString::new(path.as_ref().as_os_str().as_bytes()).map_err(|_| open_error(errno::error(EINVAL)))?;
        for _ in 0..MAX_OPEN_ATTEMPTS {
            if let Some(store) = self.try_open(&path)? {
                return Ok(store);
            }
        }
        Err(Error::Busy { what: "the file is replaced all the time" })
    }

    /// Tries once to open the file. Returns `None` if another file replaced the file at that path during the call.
    fn try_open(&self, path: &CStr) -> Result<Option<FileStore>> {
        let Some((buffered, is_new)) = self.open_buffered(path).map_err(open_error)? else { return Ok(None) };
        let facts = buffered.facts().map_err(open_error)?;
        check_kind(facts.kind)?;
        let mut claim = None;
        if self.is_writable {
            let claimed = FileClaim::try_acquire((facts.device, facts.inode));
            claim = Some(claimed.ok_or(Error::Busy { what: "another store of this process writes to the file" })?);
            lock_for_writing(&buffered)?;
        }
        let opened = self.open_direct(path, &buffered, facts).map_err(open_error)?;
        let Some((direct, alignment)) = opened else { return Ok(None) };
        if is_new {
            // A failure is ignored: some file systems cannot sync folders, and some folders cannot be opened.
            let _ = disk::sync_folder(&folder_of(path));
        }
        if direct.is_none() && self.use_direct {
            stats::add(Counter::StoresBuffered, 1);
        }
        let handle = FileHandle {
            buffered,
            direct,
            alignment,
            block_bytes: self.block_bytes.max(alignment.offset),
            kind: facts.kind,
            is_writable: self.is_writable,
            is_limited: process::file_size_limit() != u64::MAX,
            is_resized: AtomicBool::new(is_new),
            is_store_dropped: AtomicBool::new(false),
        };
        Ok(Some(FileStore { handle: Arc::new(handle), claim }))
    }

    /// Opens the file through the kernel's page cache, and returns whether it was created. Returns `None` if another
    /// process created or replaced the file meanwhile.
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

    /// Reopens a writable device with `O_EXCL`, which fails while the system uses the device. Returns a file that is no
    /// device unchanged, because `O_EXCL` has another meaning for such files. Returns `None` if another file replaced
    /// the device at that path.
    fn claim_device(&self, path: &CStr, disk: Disk) -> io::Result<Option<Disk>> {
        let facts = disk.facts()?;
        if facts.kind != FileKind::Device || !self.is_writable {
            return Ok(Some(disk));
        }
        let options = Options { is_writable: true, is_exclusive: true, ..Options::default() };
        let exclusive = Disk::open(path, options)?;
        Ok((exclusive.facts()? == facts).then_some(exclusive))
    }

    /// Opens the file a second time, for direct I/O, and returns the alignment of its transfers. Returns no file and an
    /// alignment of 1 if the file system refuses direct I/O. Returns `None` if another file has replaced the file at
    /// that path.
    fn open_direct(&self, path: &CStr, buffered: &Disk, facts: Facts) -> io::Result<Option<(Option<Disk>, Alignment)>> {
        const REFUSED: (Option<Disk>, Alignment) = (None, Alignment { memory: 1, offset: 1 });
        let reported = match buffered.direct_alignment() {
            _ if !self.use_direct => None,
            Ok(alignment) => alignment,
            Err(_) => Some(guess_alignment(buffered, facts)),
        };
        let Some(alignment) = reported.filter(is_usable) else { return Ok(Some(REFUSED)) };
        let options = Options { is_direct: true, is_writable: self.is_writable, ..Options::default() };
        let direct = match Disk::open(path, options) {
            Ok(direct) => direct,
            Err(error) if is_refusal(&error) => return Ok(Some(REFUSED)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let found = direct.facts()?;
        if (found.kind, found.device, found.inode) != (facts.kind, facts.device, facts.inode) {
            return Ok(None);
        }
        // Some file systems accept `O_DIRECT` in `open`, but refuse the transfers.
        let mut block = Aligned::new(alignment.offset, alignment.memory);
        match direct.read_at(&mut block, 0) {
            Err(error) if is_refusal(&error) => Ok(Some(REFUSED)),
            _ => Ok(Some((Some(direct), alignment))),
        }
    }
}

/// Locks a file for writing, against other processes.
///
/// The lock is retried for a second: after a process was killed, its files stay open and locked while the
/// kernel tears down its ring.
fn lock_for_writing(file: &Disk) -> Result<()> {
    const RETRY_INTERVAL: Duration = Duration::from_millis(5);
    const MAX_LOCK_ATTEMPTS: usize = 200;
    for _ in 0..MAX_LOCK_ATTEMPTS {
        // A file system without locks is treated as unlocked.
        if file.try_lock().unwrap_or(true) {
            return Ok(());
        }
        std::thread::sleep(RETRY_INTERVAL);
    }
    Err(Error::Busy { what: "another process writes to the file" })
}

fn open_error(cause: io::Error) -> Error {
    Error::Store { doing: "opening a file", cause }
}

fn check_kind(kind: FileKind) -> Result<()> {
    match kind {
        FileKind::Regular | FileKind::Device => Ok(()),
        FileKind::Folder => Err(open_error(errno::error(EISDIR))),
        FileKind::Other => {
            Err(Error::Unsupported { what: "a store is a file or a block device, not a pipe or a terminal" })
        }
    }
}

/// Returns whether the file system refuses direct I/O.
fn is_refusal(error: &io::Error) -> bool {
    errno::is(error, EINVAL) || errno::is(error, EOPNOTSUPP)
}

/// Returns an alignment that the file system accepts: the sector size of a device, or 4 KiB for a file. Used if the
/// kernel (before Linux 6.1) or the file system does not report an alignment.
fn guess_alignment(disk: &Disk, facts: Facts) -> Alignment {
    let unit = match facts.kind {
        FileKind::Device => disk.sector_bytes().unwrap_or(PageSize::MIN_BYTES),
        _ => PageSize::MIN_BYTES,
    };
    Alignment { memory: unit, offset: unit }
}

/// Returns whether both fields of an alignment are powers of two and at most [`BLOCK_BYTES`].
fn is_usable(alignment: &Alignment) -> bool {
    [alignment.memory, alignment.offset].iter().all(|unit| unit.is_power_of_two() && *unit <= BLOCK_BYTES)
}

fn folder_of(path: &CStr) -> CString {
    let folder = Path::new(std::ffi::OsStr::from_bytes(path.to_bytes())).parent();
    let folder = folder.map_or(&b"."[..], |folder| folder.as_os_str().as_bytes());
    // The conversion cannot fail, because the bytes come from a C string.
    CString::new(if folder.is_empty() { b"." } else { folder }).unwrap_or_default()
}
