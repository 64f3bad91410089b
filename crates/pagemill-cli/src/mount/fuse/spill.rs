//! The file of `pagemill mount --fuse --spill`: without a name, so the kernel frees it when this process ends.

use pagemill_core::units::Bytes;
use pagemill_store::{FileStore, Store};
use pagemill_tmpfs::messages::print_message;
use std::fs::{self, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Minimum of `--size` with a spill file, and of `--spill-size`.
const MIN_BYTES: u64 = 1 << 20;

/// File systems in memory, where a spill file would be of no use: type numbers of statfs(2), and names.
const IN_MEMORY: [(i64, &str); 2] = [(libc::TMPFS_MAGIC, "tmpfs"), (0x8584_58f6, "ramfs")];

/// A store for the data of a full file system, and its maximum size.
pub struct SpillFile {
    pub store: Arc<ReportingStore>,
    pub limit_bytes: u64,
    /// Absolute path of the folder.
    pub folder: PathBuf,
}

impl SpillFile {
    /// Creates a file in the folder `dir`, for a file system with `size_bytes` of memory. `limit_bytes` is its maximum
    /// size, by default the space that is free there.
    ///
    /// # Errors
    ///
    /// A text: the folder is missing or cannot be written, lies in memory or below `mount_point`, or has too little
    /// space; a size is too small.
    pub fn create(dir: &Path, limit_bytes: Option<u64>, size_bytes: u64, mount_point: &Path) -> Result<Self, String> {
        if size_bytes < MIN_BYTES {
            return Err(format!("--spill needs a --size of {} or more, not {}", Bytes(MIN_BYTES), Bytes(size_bytes)));
        }
        if let Some(limit_bytes) = limit_bytes.filter(|limit_bytes| *limit_bytes < MIN_BYTES) {
            return Err(format!("--spill-size is {}, but at least {}", Bytes(limit_bytes), Bytes(MIN_BYTES)));
        }
        let folder = fs::canonicalize(dir).map_err(|error| format!("--spill {}: {error}", dir.display()))?;
        let text = |what: String| format!("--spill {}: {what}", folder.display());
        if !folder.is_dir() {
            return Err(text("is no folder".into()));
        }
        if folder.starts_with(mount_point) {
            return Err(text(format!("lies in the mount point {}", mount_point.display())));
        }
        let kind = rustix::fs::statfs(&folder).map_err(|error| text(error.to_string()))?.f_type as i64;
        if let Some((_, name)) = IN_MEMORY.iter().find(|(number, _)| *number == kind) {
            return Err(text(format!("is on a {name}, which is in memory itself: name a folder on a disk")));
        }
        let space = rustix::fs::statvfs(&folder).map_err(|error| text(error.to_string()))?;
        let free_bytes = space.f_bavail.saturating_mul(space.f_frsize);
        let limit_bytes = limit_bytes.unwrap_or(free_bytes);
        if limit_bytes > free_bytes || free_bytes < MIN_BYTES {
            let wanted = Bytes(limit_bytes.max(MIN_BYTES));
            return Err(text(format!("{} are free, not {wanted} (--spill-size)", Bytes(free_bytes))));
        }
        let file = tempfile::tempfile_in(&folder).map_err(|error| text(format!("no file can be made: {error}")))?;
        // Whatever the umask.
        let _ = file.set_permissions(Permissions::from_mode(0o600));
        // The file has no name, but this path leads to it.
        let store = FileStore::open(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let store = store.map_err(|error| text(format!("the file cannot be opened: {error}")))?;
        let store = ReportingStore { store, folder: folder.clone(), last_report: Mutex::new(None) };
        Ok(Self { store: Arc::new(store), limit_bytes, folder })
    }
}

/// Minimum time between two reports of failed transfers.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);

/// Reports failed reads and writes of a file on standard error, at most once in a minute.
pub struct ReportingStore {
    store: FileStore,
    folder: PathBuf,
    last_report: Mutex<Option<Instant>>,
}

impl ReportingStore {
    fn report<T>(&self, what: &str, result: io::Result<T>) -> io::Result<T> {
        if let Err(error) = &result {
            let mut last_report = self.last_report.lock().unwrap_or_else(PoisonError::into_inner);
            if last_report.is_none_or(|last| last.elapsed() >= REPORT_INTERVAL) {
                *last_report = Some(Instant::now());
                print_message(&format!("{what} the spill file in {}: {error}", self.folder.display()));
            }
        }
        result
    }
}

impl Store for ReportingStore {
    fn size_bytes(&self) -> io::Result<u64> {
        self.store.size_bytes()
    }

    fn block_bytes(&self) -> usize {
        self.store.block_bytes()
    }

    fn read(&self, offset: u64, to: &mut [u8]) -> io::Result<()> {
        self.report("files cannot be read from", self.store.read(offset, to))
    }

    fn write(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        self.report("no more data can be moved to", self.store.write(offset, from))
    }

    fn set_size(&self, size_bytes: u64) -> io::Result<()> {
        self.store.set_size(size_bytes)
    }

    fn sync(&self) -> io::Result<()> {
        self.store.sync()
    }

    fn discard(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.store.discard(offset, len_bytes)
    }
}
