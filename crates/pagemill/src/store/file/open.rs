//! Opening: what the file is, who else writes to it, how direct transfers are aligned.

use super::claims::Claim;
use super::{FileStore, Handle};
use crate::error::{Error, Result};
use crate::stats::{self, Counter};
use crate::store::Aligned;
use crate::store::errno::{self, EINVAL, EISDIR, EOPNOTSUPP};
use crate::units::{BLOCK_BYTES, PageSize};
use pagemill_sys::disk::{self, Alignment, Disk, Facts, Kind, Options};
use pagemill_sys::process;
use std::ffi::{CStr, CString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Times that opening begins anew because the file was replaced meanwhile.
const TRIES: usize = 8;

/// What is done about a file that is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Creation {
    Never,
    IfMissing,
    /// It must be missing.
    Always,
}

/// How a [`FileStore`] is opened. By default one that exists, to be read and written, past the kernel's page cache.
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

    /// It is not written to. Any number of stores read a file.
    #[must_use]
    pub fn read_only(self) -> Self {
        Self { is_writable: false, ..self }
    }

    /// A missing file is made.
    #[must_use]
    pub fn create(self) -> Self {
        Self { creation: Creation::IfMissing, ..self }
    }

    /// The file is made, and must be missing.
    #[must_use]
    pub fn create_new(self) -> Self {
        Self { creation: Creation::Always, ..self }
    }

    /// The unit of transfers: a power of two. It is at least what direct transfers need.
    #[must_use]
    pub fn block_bytes(self, block_bytes: usize) -> Self {
        Self { block_bytes, ..self }
    }

    /// Through the kernel's page cache, as if direct transfers were refused.
    #[must_use]
    pub fn buffered(self) -> Self {
        Self { use_direct: false, ..self }
    }

    /// Opens it. Where the file system refuses direct transfers, [`FileStore::is_direct`] says so.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] with what the system says: it is missing, a folder (`EISDIR`), not to be written (`EACCES`, `EROFS`), a device
    /// that is mounted (`EBUSY`). [`Error::Unsupported`] for pipes and terminals, [`Error::Busy`] if another store writes to it,
    /// of this process or, by its advisory lock, of another. [`Error::BadAlignment`] if the block is no power of two.
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

    /// `None` if the file was replaced meanwhile.
    fn try_open(&self, path: &CStr) -> Result<Option<FileStore>> {
        let Some((buffered, is_new)) = self.open_buffered(path).map_err(failed)? else { return Ok(None) };
        let facts = buffered.facts().map_err(failed)?;
        check_kind(facts.kind)?;
        let mut claim = None;
        if self.is_writable {
            let taken = Claim::take((facts.device, facts.inode));
            claim = Some(taken.ok_or(Error::Busy { what: "another store of this process writes to the file" })?);
            lock(&buffered)?;
        }
        let direct = match self.open_direct(path, &buffered, facts).map_err(failed)? {
            Second::Open(direct, alignment) => Some((direct, alignment)),
            Second::Refused => None,
            Second::Replaced => return Ok(None),
        };
        if is_new {
            // Best effort: some file systems do not do this for folders, and some folders cannot be opened.
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

    /// Opens it through the page cache, and says whether it was made; `None` if it comes and goes.
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

    /// A device to be written to must not be in use by the system; only who knows that it is one can ask for that.
    fn claim_device(&self, path: &CStr, disk: Disk) -> io::Result<Option<Disk>> {
        let facts = disk.facts()?;
        if facts.kind != Kind::Device || !self.is_writable {
            return Ok(Some(disk));
        }
        let options = Options { is_writable: true, is_exclusive: true, ..Options::default() };
        let exclusive = Disk::open(path, options)?;
        Ok((exclusive.facts()? == facts).then_some(exclusive))
    }

    /// Opens it once more, past the page cache.
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
        // Some file systems open such a file, and then refuse the transfers.
        let mut block = Aligned::new(alignment.offset, alignment.memory);
        match direct.read_at(&mut block, 0) {
            Err(error) if is_refusal(&error) => Ok(Second::Refused),
            _ => Ok(Second::Open(direct, alignment)),
        }
    }
}

/// Locks a file for this process.
///
/// A process that was killed may have its files open for some moments more, and their locks: its ring is taken down behind.
/// So it is tried for a while.
fn lock(file: &Disk) -> Result<()> {
    const STEP: Duration = Duration::from_millis(5);
    const LOCK_TRIES: usize = 200;
    for _ in 0..LOCK_TRIES {
        // Some file systems have no locks: then nobody else has one.
        if file.try_lock().unwrap_or(true) {
            return Ok(());
        }
        std::thread::sleep(STEP);
    }
    Err(Error::Busy { what: "another process writes to the file" })
}

/// What came of opening a file once more, past the page cache.
enum Second {
    Open(Disk, Alignment),
    Refused,
    /// The path names another file by now.
    Replaced,
}

fn failed(cause: io::Error) -> Error {
    Error::Store { doing: "opening a file", cause }
}

fn check_kind(kind: Kind) -> Result<()> {
    match kind {
        Kind::Regular | Kind::Device => Ok(()),
        Kind::Folder => Err(failed(errno::error(EISDIR))),
        Kind::Other => {
            Err(Error::Unsupported { what: "a store is a file or a block device, not a pipe or a terminal" })
        }
    }
}

fn is_refusal(error: &io::Error) -> bool {
    errno::is(error, EINVAL) || errno::is(error, EOPNOTSUPP)
}

/// Before Linux 6.1, and where the file system does not tell: what all of them take.
fn guess_alignment(disk: &Disk, facts: Facts) -> Alignment {
    let unit = match facts.kind {
        Kind::Device => disk.sector_bytes().unwrap_or(PageSize::MIN_BYTES),
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
    // It was a part of a C string.
    CString::new(if folder.is_empty() { b"." } else { folder }).unwrap_or_default()
}
