//! The file that an experiment reads and writes: a temporary file whose records identify their offset, or a file given
//! by the user.

use std::path::{Path, PathBuf};

use pagemill_core::units::BLOCK_BYTES;
use pagemill_store::{Aligned, FileOptions, FileStore, Store};
use tempfile::TempDir;

use crate::child;
use crate::error::{Error, Result};
use crate::pattern::{self, RECORD_BYTES, Records};

/// File-system types of `statfs` for file systems in memory: tmpfs and ramfs.
const IN_MEMORY_FS_TYPES: [u64; 2] = [0x0102_1994, 0x8584_58f6];

/// Bytes that must stay free on the file system of the temporary file.
const SPARE_BYTES: u64 = 256 << 20;

/// A file, of which the first `len_bytes` bytes are used. Dropping the value removes the file if it is temporary.
#[derive(Debug)]
pub struct Target {
    path: PathBuf,
    pub len_bytes: u64,
    /// Whether every record has the contents that [`Records`] writes. Otherwise reads cannot be checked.
    pub has_pattern: bool,
    _folder: Option<TempDir>,
}

fn cannot_run(path: &Path, why: impl std::fmt::Display) -> Error {
    Error::CannotRun(format!("{}: {why}", path.display()))
}

impl Target {
    /// Makes a temporary file of about `len_bytes` bytes in `dir` and fills it with records.
    ///
    /// # Errors
    ///
    /// [`Error::CannotRun`] on a file system in memory, without enough free space, or without O_DIRECT.
    pub fn make(dir: Option<&Path>, len_bytes: u64) -> Result<Self> {
        let dir = dir.map_or_else(default_folder, |dir| Ok(dir.to_owned()))?;
        check_folder(&dir, len_bytes)?;
        let folder = tempfile::Builder::new().prefix("pagemill-bench-").tempdir_in(&dir);
        let folder = folder.map_err(|cause| cannot_run(&dir, cause))?;
        let path = folder.path().join("file");
        let store = FileOptions::new().create_new().open(&path).map_err(|error| cannot_run(&path, error))?;
        check_direct(&path, &store)?;
        let mut bytes = Aligned::new(BLOCK_BYTES, RECORD_BYTES);
        let mut records = Records::filled(BLOCK_BYTES);
        let len_bytes = len_bytes / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
        for offset in (0..len_bytes).step_by(BLOCK_BYTES) {
            child::check_interrupt()?;
            bytes.copy_from_slice(records.stamped_at(0, offset));
            store.write(offset, &bytes).map_err(|cause| cannot_run(&path, cause))?;
        }
        store.sync().map_err(|cause| cannot_run(&path, cause))?;
        Ok(Self { path, len_bytes, has_pattern: true, _folder: Some(folder) })
    }

    /// Opens an existing file. Checks at three offsets whether it has the pattern of [`Records`].
    ///
    /// # Errors
    ///
    /// [`Error::CannotRun`] if the file does not support O_DIRECT, or is too short.
    pub fn existing(path: &Path, len_bytes: Option<u64>) -> Result<Self> {
        let path = path.canonicalize().map_err(|cause| cannot_run(path, cause))?;
        let store = FileStore::open_read_only(&path).map_err(|error| cannot_run(&path, error))?;
        check_direct(&path, &store)?;
        // Without this sync, the kernel could write dirty pages of its own cache during a measurement.
        store.sync().map_err(|cause| cannot_run(&path, cause))?;
        let size = store.size_bytes().map_err(|cause| cannot_run(&path, cause))?;
        let blocks = len_bytes.unwrap_or(size).min(size) / BLOCK_BYTES as u64;
        if blocks < 8 {
            return Err(cannot_run(&path, format!("{size} bytes are too few to be read at random")));
        }
        let mut record = Aligned::new(RECORD_BYTES, RECORD_BYTES);
        let mut has_pattern = true;
        for block in [0, blocks / 2, blocks - 1] {
            let offset = block * BLOCK_BYTES as u64;
            store.read(offset, &mut record).map_err(|cause| cannot_run(&path, cause))?;
            has_pattern &= pattern::is_intact(&record, 0, offset);
        }
        Ok(Self { path, len_bytes: blocks * BLOCK_BYTES as u64, has_pattern, _folder: None })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the arguments that tell a workload the path and length of the file, and whether it has the pattern of
    /// [`Records`].
    pub fn arguments(&self) -> impl Iterator<Item = String> {
        let words = ["--file".to_owned(), self.path.display().to_string()];
        let pattern = self.has_pattern.then(|| "--pattern".to_owned());
        words
            .into_iter()
            .chain(child::numeric_options(&[("--len-bytes", self.len_bytes)]).collect::<Vec<_>>())
            .chain(pattern)
    }
}

fn is_in_memory(folder: &Path) -> Result<bool> {
    let state = rustix::fs::statfs(folder).map_err(|cause| cannot_run(folder, cause))?;
    Ok(IN_MEMORY_FS_TYPES.contains(&(state.f_type as u64)))
}

fn default_folder() -> Result<PathBuf> {
    let folders = [std::env::temp_dir(), PathBuf::from("/var/tmp")];
    let on_device = folders.iter().find(|folder| matches!(is_in_memory(folder), Ok(false)));
    let why =
        || Error::CannotRun("temporary folders are in memory here: --dir names one that is on a device".to_owned());
    on_device.cloned().ok_or_else(why)
}

fn check_folder(folder: &Path, len_bytes: u64) -> Result<()> {
    if is_in_memory(folder)? {
        return Err(cannot_run(folder, "it is in memory (tmpfs), where nothing is read from a device"));
    }
    let state = rustix::fs::statvfs(folder).map_err(|cause| cannot_run(folder, cause))?;
    let free = state.f_bavail.saturating_mul(state.f_frsize);
    if free < len_bytes + SPARE_BYTES {
        let [free, wanted] = [free, len_bytes + SPARE_BYTES].map(|bytes| bytes >> 20);
        return Err(cannot_run(folder, format!("{free} MiB are free, {wanted} are needed: --mib takes less")));
    }
    Ok(())
}

fn check_direct(path: &Path, store: &FileStore) -> Result<()> {
    match store.is_direct() {
        true => Ok(()),
        false => Err(cannot_run(path, "the file system refuses O_DIRECT: the kernel's page cache would be measured")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A temporary file must be made, reopened by its path, and removed when dropped. A file system in memory must be
    /// refused.
    #[test]
    fn temporary_file_is_made_and_removed() {
        let refused = Target::make(Some(Path::new("/dev/shm")), 16 << 20);
        assert!(matches!(&refused, Err(Error::CannotRun(why)) if why.contains("in memory")), "{refused:?}");
        let made = match Target::make(None, 16 << 20) {
            Ok(made) => made,
            Err(error) => return println!("skipped: {error}"),
        };
        let path = made.path().to_owned();
        let found = Target::existing(&path, None).expect("it can be read");
        assert!(found.has_pattern && found.len_bytes == 16 << 20);
        assert!(Target::existing(&path, Some(1 << 20)).is_err(), "too short");
        drop((found, made));
        assert!(!path.exists());
    }

    /// A file that exceeds the free space must be refused before anything is written.
    #[test]
    fn too_large_file_is_refused() {
        if let Ok(folder) = default_folder() {
            assert!(matches!(check_folder(&folder, 1 << 60), Err(Error::CannotRun(why)) if why.contains("are free")));
        }
    }
}
