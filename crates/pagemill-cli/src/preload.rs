//! The preload library: the file beside the command, else the copy embedded in it, put into the user's cache once.

use std::fs;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

const NAME: &str = "libpagemill_malloc.so";

/// The library as it was when this command was built.
static EMBEDDED: &[u8] = include_bytes!(env!("PAGEMILL_PRELOAD_FILE"));

/// Where the loader will find the library.
///
/// # Errors
///
/// A sentence with every folder that was tried, and why the library there was not usable.
pub fn locate() -> Result<PathBuf, String> {
    // Without /proc the path of the command is unknown.
    let folder = std::env::current_exe().ok().and_then(|path| Some(path.parent()?.to_owned()));
    // Installed, it lies beside the command; built, among cargo's dependencies. Another version's file does not do.
    let mut beside = folder.into_iter().flat_map(|folder| [folder.join(NAME), folder.join("deps").join(NAME)]);
    if let Some(path) = beside.find(|path| can_be_named(path) && is_trusted(path) && is_embedded(path)) {
        return Ok(path);
    }
    let mut tried = String::new();
    for folder in folders() {
        match extract(&folder) {
            Ok(path) if can_be_named(&path) => return Ok(path),
            Ok(path) => tried += &format!("\n  {}: the loader takes no path with spaces or colons", path.display()),
            Err(error) => tried += &format!("\n  {}: {error}", folder.display()),
        }
    }
    Err(format!("the preload library can be put nowhere; set XDG_CACHE_HOME to a folder with room. Tried:{tried}"))
}

/// Bytes at the start of the library that tell one build from another: they hold the linker's build id, a hash of all
/// contents (the preload crate's build.rs asks for it), and the sizes of its parts.
const HEAD_BYTES: usize = 4096;

fn embedded_head() -> &'static [u8] {
    &EMBEDDED[..HEAD_BYTES.min(EMBEDDED.len())]
}

/// Whether a file is the embedded library, by its length and head. Comparing all of it takes longer than the rest of `run`.
fn is_embedded(path: &Path) -> bool {
    let is_same = || -> io::Result<bool> {
        let file = fs::File::open(path)?;
        let mut head = [0; HEAD_BYTES];
        let head = &mut head[..embedded_head().len()];
        file.read_exact_at(head, 0)?;
        Ok(file.metadata()?.len() == EMBEDDED.len() as u64 && head == embedded_head())
    };
    is_same().unwrap_or(false)
}

/// Whether only root and this user can write a file and its folder. The head says nothing about code that another user wrote.
fn is_trusted(path: &Path) -> bool {
    let is_safe = |path: &Path| {
        fs::symlink_metadata(path).is_ok_and(|metadata| {
            let is_ours = [0, pagemill_sys::process::user_id()].contains(&metadata.uid());
            is_ours && metadata.mode() & 0o022 == 0 && !metadata.is_symlink()
        })
    };
    is_safe(path) && path.parent().is_some_and(is_safe)
}

/// `LD_PRELOAD` separates by spaces and colons and has no way to quote them.
fn can_be_named(path: &Path) -> bool {
    !path.as_os_str().as_bytes().iter().any(|byte| matches!(byte, b' ' | b':'))
}

/// Folders to extract to, best first.
fn folders() -> Vec<PathBuf> {
    // Relative paths would mean another folder to each program.
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let user = pagemill_sys::process::user_id();
    let cache = variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")));
    let is_own = |path: &PathBuf| fs::metadata(path).is_ok_and(|metadata| metadata.uid() == user);
    let runtime = variable("XDG_RUNTIME_DIR").filter(is_own);
    let shared = ["/tmp", "/dev/shm"].map(|folder| PathBuf::from(folder).join(format!("pagemill-cache-{user}")));
    cache.into_iter().chain(runtime).map(|folder| folder.join("pagemill")).chain(shared).collect()
}

/// FNV-1a: names the version, guards nothing (the head is compared).
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01B3))
}

/// Puts the embedded library into `folder`, unless it is there already.
fn extract(folder: &Path) -> io::Result<PathBuf> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let metadata = fs::symlink_metadata(folder)?;
    if metadata.uid() != pagemill_sys::process::user_id() || metadata.mode() & 0o022 != 0 || !metadata.is_dir() {
        return Err(io::Error::other("not a folder that only this user can write"));
    }
    let path = folder.join(format!("{:016x}-{NAME}", hash(embedded_head())));
    if is_embedded(&path) {
        return Ok(path);
    }
    let temporary = folder.join(format!(".{}-{NAME}", std::process::id()));
    let result = write(&temporary).and_then(|()| fs::rename(&temporary, &path));
    if result.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    result.map(|()| path)
}

fn write(path: &Path) -> io::Result<()> {
    let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o700).open(path)?;
    file.write_all(EMBEDDED)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where the build id's hash begins: after the header of its note and the name "GNU".
    fn build_id_at() -> usize {
        const NOTE: &[u8] = b"\x03\0\0\0GNU\0";
        embedded_head().windows(NOTE.len()).position(|bytes| bytes == NOTE).expect("a build id in the head")
            + NOTE.len()
    }

    /// Extracting twice gives one file; one that is cut short, or of another build, is replaced.
    #[test]
    fn the_library_is_extracted_once_and_whole() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("cache");
        let path = extract(&folder).unwrap();
        assert_eq!(extract(&folder).unwrap(), path);
        let mut other_build = EMBEDDED.to_vec();
        other_build[build_id_at()] ^= 1;
        for damaged in [&b"damaged"[..], &EMBEDDED[..EMBEDDED.len() - 1], &other_build] {
            fs::write(&path, damaged).unwrap();
            assert_eq!(extract(&folder).unwrap(), path);
            assert!(fs::read(&path).unwrap() == EMBEDDED);
        }
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
    }

    #[test]
    fn a_folder_that_others_can_write_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().join(NAME);
        fs::write(&library, EMBEDDED).unwrap();
        fs::set_permissions(&library, fs::Permissions::from_mode(0o755)).unwrap();
        assert!(is_trusted(&library) && is_embedded(&library));
        fs::set_permissions(&library, fs::Permissions::from_mode(0o775)).unwrap();
        assert!(!is_trusted(&library));
        fs::set_permissions(&library, fs::Permissions::from_mode(0o755)).unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o1777)).unwrap();
        assert!(!is_trusted(&library));
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(extract(folder.path()).is_err());
    }
}
