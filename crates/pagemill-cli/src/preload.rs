//! Locates the preload library: a file in the folder of the command `pagemill`, an installed file, or a copy of the
//! embedded library in the user's cache folder.

use std::fs;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

const LIBRARY_NAME: &str = "libpagemill_malloc.so";

/// Name of the library in a package, which installs it in the folder `lib/pagemill` beside the folder of the command.
const INSTALLED_NAME: &str = "libpagemill.so";

/// Returns whether a path in `LD_PRELOAD` is that of this library, of this or another version.
pub fn is_library(path: &str) -> bool {
    path.ends_with(LIBRARY_NAME) || path.rsplit('/').next() == Some(INSTALLED_NAME)
}

/// The preload library of this build. The command contains its bytes.
static EMBEDDED_LIBRARY: &[u8] = include_bytes!(env!("PAGEMILL_PRELOAD_FILE"));

/// Returns the path of a preload library of this build. Writes the library to a cache folder if the folder of the
/// command does not contain it.
///
/// # Errors
///
/// A message with every folder into which the library could not be written, and why.
pub fn locate_library() -> Result<PathBuf, String> {
    // Without /proc, the path of this command is unknown, so the cache folder is used.
    let folder = std::env::current_exe().ok().and_then(|path| Some(path.parent()?.to_owned()));
    // After a build, the library is in the folder of the command or in cargo's folder `deps`. A file of another version
    // is not used.
    let installed = |folder: &Path| Some(folder.parent()?.join("lib/pagemill").join(INSTALLED_NAME));
    let mut beside = folder.into_iter().flat_map(|folder| {
        let built = [folder.join(LIBRARY_NAME), folder.join("deps").join(LIBRARY_NAME)];
        built.into_iter().chain(installed(&folder))
    });
    if let Some(path) = beside.find(|path| is_preloadable(path) && is_trusted(path) && is_embedded(path)) {
        return Ok(path);
    }
    let mut tried = String::new();
    for folder in cache_folders() {
        match extract_library(&folder) {
            Ok(path) if is_preloadable(&path) => return Ok(path),
            Ok(path) => {
                tried += &format!("\n  {}: LD_PRELOAD cannot contain a path with spaces or colons", path.display())
            }
            Err(error) => tried += &format!("\n  {}: {error}", folder.display()),
        }
    }
    Err(format!("the preload library cannot be stored; set XDG_CACHE_HOME to a folder with free space. Tried:{tried}"))
}

/// Number of bytes at the start of the library that identify its build. These bytes contain the sizes of the library's
/// sections and the linker's build id, which is a hash of the whole library. The file `build.rs` of the preload crate
/// requests the build id.
const IDENTIFYING_BYTES: usize = 4096;

fn identifying_start() -> &'static [u8] {
    &EMBEDDED_LIBRARY[..IDENTIFYING_BYTES.min(EMBEDDED_LIBRARY.len())]
}

/// Returns whether a file equals the embedded library, judging by its length and its first bytes. A comparison of all
/// bytes would take longer than all other work of `run`.
fn is_embedded(path: &Path) -> bool {
    let is_same = || -> io::Result<bool> {
        let file = fs::File::open(path)?;
        let mut start = [0; IDENTIFYING_BYTES];
        let start = &mut start[..identifying_start().len()];
        file.read_exact_at(start, 0)?;
        Ok(file.metadata()?.len() == EMBEDDED_LIBRARY.len() as u64 && start == identifying_start())
    };
    is_same().unwrap_or(false)
}

/// Returns whether only root and this user can write to a file and its folder. Another user could change code in the
/// file without changing the first bytes, which [`is_embedded`] compares.
fn is_trusted(path: &Path) -> bool {
    let is_safe = |path: &Path| {
        fs::symlink_metadata(path).is_ok_and(|metadata| {
            let is_ours = [0, pagemill_sys::process::user_id()].contains(&metadata.uid());
            is_ours && metadata.mode() & 0o022 == 0 && !metadata.is_symlink()
        })
    };
    is_safe(path) && path.parent().is_some_and(is_safe)
}

/// Returns whether `LD_PRELOAD` can contain the path. Spaces and colons separate the paths in that variable and cannot
/// be quoted.
fn is_preloadable(path: &Path) -> bool {
    !path.as_os_str().as_bytes().iter().any(|byte| matches!(byte, b' ' | b':'))
}

/// Returns the folders into which the library may be written, in order of preference.
fn cache_folders() -> Vec<PathBuf> {
    // A relative path would mean a different folder for each program.
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let user = pagemill_sys::process::user_id();
    let cache = variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")));
    let is_own = |path: &PathBuf| fs::metadata(path).is_ok_and(|metadata| metadata.uid() == user);
    let runtime = variable("XDG_RUNTIME_DIR").filter(is_own);
    let shared = ["/tmp", "/dev/shm"].map(|folder| PathBuf::from(folder).join(format!("pagemill-cache-{user}")));
    cache.into_iter().chain(runtime).map(|folder| folder.join("pagemill")).chain(shared).collect()
}

/// Returns the FNV-1a hash of the bytes. The hash is only a part of the file name; the first bytes of the file are also
/// compared.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01B3))
}

/// Writes the embedded library into `folder`, unless the folder already contains it. Returns the path of the file.
fn extract_library(folder: &Path) -> io::Result<PathBuf> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let metadata = fs::symlink_metadata(folder)?;
    if metadata.uid() != pagemill_sys::process::user_id() || metadata.mode() & 0o022 != 0 || !metadata.is_dir() {
        return Err(io::Error::other("not a folder that only this user can write"));
    }
    let path = folder.join(format!("{:016x}-{LIBRARY_NAME}", fnv1a(identifying_start())));
    if is_embedded(&path) {
        return Ok(path);
    }
    let temporary = folder.join(format!(".{}-{LIBRARY_NAME}", std::process::id()));
    let result = write_library(&temporary).and_then(|()| fs::rename(&temporary, &path));
    if result.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    result.map(|()| path)
}

fn write_library(path: &Path) -> io::Result<()> {
    let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o700).open(path)?;
    file.write_all(EMBEDDED_LIBRARY)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the offset of the hash in the library's build id. The hash follows the header of its ELF note and the
    /// name "GNU".
    fn build_id_offset() -> usize {
        const NOTE: &[u8] = b"\x03\0\0\0GNU\0";
        identifying_start().windows(NOTE.len()).position(|bytes| bytes == NOTE).expect("a build id in the start")
            + NOTE.len()
    }

    /// The library is written twice to the same folder, which must then contain one file. A file that is truncated, or
    /// that is of another build, must be replaced.
    #[test]
    fn a_damaged_or_foreign_library_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("cache");
        let path = extract_library(&folder).unwrap();
        assert_eq!(extract_library(&folder).unwrap(), path);
        let mut other_build = EMBEDDED_LIBRARY.to_vec();
        other_build[build_id_offset()] ^= 1;
        for damaged in [&b"damaged"[..], &EMBEDDED_LIBRARY[..EMBEDDED_LIBRARY.len() - 1], &other_build] {
            fs::write(&path, damaged).unwrap();
            assert_eq!(extract_library(&folder).unwrap(), path);
            assert!(fs::read(&path).unwrap() == EMBEDDED_LIBRARY);
        }
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
    }

    #[test]
    fn a_folder_writable_by_others_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().join(LIBRARY_NAME);
        fs::write(&library, EMBEDDED_LIBRARY).unwrap();
        fs::set_permissions(&library, fs::Permissions::from_mode(0o755)).unwrap();
        assert!(is_trusted(&library) && is_embedded(&library));
        fs::set_permissions(&library, fs::Permissions::from_mode(0o775)).unwrap();
        assert!(!is_trusted(&library));
        fs::set_permissions(&library, fs::Permissions::from_mode(0o755)).unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o1777)).unwrap();
        assert!(!is_trusted(&library));
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(extract_library(folder.path()).is_err());
    }
}
