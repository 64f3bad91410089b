//! The file of `pagemill mount --fuse --spill`: without a name, so the kernel frees it when this process ends.

use pagemill_core::units::Bytes;
use pagemill_store::FileStore;
use std::fs;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// File systems in memory, where a spill file would be of no use: type numbers of statfs(2), and names.
const IN_MEMORY: [(i64, &str); 2] = [(0x0102_1994, "tmpfs"), (0x8584_58f6, "ramfs")];

/// A store for the data of a full file system, and its maximum size.
pub struct SpillFile {
    pub store: Arc<FileStore>,
    pub limit_bytes: u64,
    /// Absolute path of the folder.
    pub folder: PathBuf,
}

impl SpillFile {
    /// Creates a file in the folder `dir`. `limit_bytes` is its maximum size, by default the space that is free there.
    ///
    /// # Errors
    ///
    /// A text: the folder is missing or cannot be written, lies in memory or below `mount_point`, or has too little
    /// space.
    pub fn create(dir: &Path, limit_bytes: Option<u64>, mount_point: &Path) -> Result<Self, String> {
        let folder = fs::canonicalize(dir).map_err(|error| format!("--spill {}: {error}", dir.display()))?;
        let text = |what: String| format!("--spill {}: {what}", folder.display());
        if folder.starts_with(mount_point) {
            return Err(text(format!("lies in the mount point {}", mount_point.display())));
        }
        let kind = rustix::fs::statfs(&folder).map_err(|error| text(error.to_string()))?.f_type as i64;
        if let Some((_, name)) = IN_MEMORY.iter().find(|(number, _)| *number == kind) {
            return Err(text(format!("is on a {name}, which is in memory itself: name a folder on a disk")));
        }
        let file = tempfile::tempfile_in(&folder).map_err(|error| text(format!("no file can be made: {error}")))?;
        // The file has no name, but this path leads to it.
        let store = FileStore::open(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let store = store.map_err(|error| text(format!("the file cannot be opened: {error}")))?;
        let space = rustix::fs::statvfs(&folder).map_err(|error| text(error.to_string()))?;
        let free_bytes = space.f_bavail.saturating_mul(space.f_frsize);
        let limit_bytes = limit_bytes.unwrap_or(free_bytes);
        if limit_bytes > free_bytes {
            return Err(text(format!("{} are free, not {}", Bytes(free_bytes), Bytes(limit_bytes))));
        }
        Ok(Self { store: Arc::new(store), limit_bytes, folder })
    }
}
