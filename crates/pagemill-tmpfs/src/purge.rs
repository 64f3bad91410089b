//! Frees one file's memory: the whole file, or its end.
//!
//! A purge requests a write lease on the file first. The kernel refuses the lease while another process has the file
//! open or mapped. Once the lease is granted, the kernel delays later opens until this process closes its descriptor.
//! So no mapping loses its pages.
//!
//! Other processes can rename files during a purge. So a purge of a whole file first renames the file to a temporary
//! name (its *private name*), then checks the file, and only then unlinks it. The purge restores the old name if the
//! renamed file is not the expected one, or if a process waits to open the file. The private name contains the old name
//! and the inode number. If the controller is killed, the next controller can therefore finish or undo the purge.

use crate::file_access::{self, FileAttributes};
use crate::index::PurgePart;
use crate::messages::print_message;
use crate::policy::PURGED;
use pagemill_core::units::{BLOCK_BYTES, os_page_bytes};
use pagemill_sys::pages;
use rustix::fs::{self, AtFlags, OFlags};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// Prefix of private names. The inode number and the old name follow.
const PRIVATE_PREFIX: &str = ".pagemill-purge-";

/// Part of the name that a file gets if its old name cannot be restored, because a new file has it. The name consists
/// of the old name, this text and the inode number.
const RESCUED_NAME_PART: &str = ".pagemill-rescued-";

/// Maximum length of a file name in bytes.
const MAX_NAME_BYTES: usize = 255;

/// Result of a purge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PurgeOutcome {
    /// The file, or its end, was freed. `left_bytes` of the file's memory remain.
    Freed { bytes: u64, left_bytes: u64 },
    /// The file was used later than `Target::used_ns`: at this time, in nanoseconds since 1970.
    Used(i64),
    /// Another process has the file open or mapped.
    Open,
    /// There is nothing to purge under this name: the file is missing, is another file, is not volatile, has several
    /// names, or cannot be opened.
    Gone,
}

/// Returns whether a purge can free memory of a file with these attributes. The purge of an empty file as a whole frees
/// its inode.
pub fn can_purge(part: PurgePart, name: &OsStr, seen: &FileAttributes) -> bool {
    seen.links == 1
        && match part {
            PurgePart::Whole => private_name(seen.inode, name).is_some(),
            PurgePart::Tail => seen.held_bytes > 0,
        }
}

/// The file to purge.
pub struct Target<'a> {
    pub folder: BorrowedFd<'a>,
    pub name: &'a OsStr,
    pub inode: u64,
    pub part: PurgePart,
    /// The time of the last use that the caller knows, in nanoseconds since 1970. A file used later is not purged.
    pub used_ns: i64,
}

impl From<io::Error> for PurgeOutcome {
    fn from(error: io::Error) -> Self {
        match Errno::from_io_error(&error) {
            Some(Errno::AGAIN | Errno::TXTBSY) => Self::Open,
            _ => Self::Gone,
        }
    }
}

impl Target<'_> {
    /// Returns whether the file is at `name` in the folder, and has no other name.
    fn is_at(&self, name: &OsStr) -> bool {
        let seen = file_access::attributes_at(self.folder, name);
        seen.is_ok_and(|seen| seen.inode == self.inode && seen.links == 1)
    }
}

/// A check whether a file may be purged. It gets the open file and its attributes. It is called while this process has
/// the write lease on the file, except for the first call by [`finish`].
pub trait MayPurge: Fn(&OwnedFd, &FileAttributes) -> bool {}

impl<T: Fn(&OwnedFd, &FileAttributes) -> bool> MayPurge for T {}

/// Frees the whole file, or some `want_bytes` from its end, according to `target.part`.
pub fn purge(target: &Target<'_>, want_bytes: u64, may_purge: impl MayPurge) -> PurgeOutcome {
    let result = match target.part {
        PurgePart::Whole => purge_whole(target, may_purge),
        PurgePart::Tail => purge_tail(target, want_bytes, may_purge),
    };
    result.unwrap_or_else(|outcome| outcome)
}

/// Opens the file and obtains the lease, if the file is the expected one and was not used since `target.used_ns`.
fn open_with_lease(target: &Target<'_>, flags: OFlags) -> Result<(OwnedFd, FileAttributes), PurgeOutcome> {
    let fd = file_access::open_file(target.folder, target.name, flags)?;
    let seen = file_access::attributes(&fd)?;
    if seen.inode != target.inode || !seen.is_file() || seen.links != 1 {
        return Err(PurgeOutcome::Gone);
    }
    if seen.used_ns > target.used_ns {
        return Err(PurgeOutcome::Used(seen.used_ns));
    }
    pages::take_lease(fd.as_fd())?;
    Ok((fd, seen))
}

/// Purges a whole file. A failed step, or an obstacle, is the error.
fn purge_whole(target: &Target<'_>, may_purge: impl MayPurge) -> Result<PurgeOutcome, PurgeOutcome> {
    // A file whose private name would be too long is not purged, because the purge could not be undone.
    let ours = private_name(target.inode, target.name).ok_or(PurgeOutcome::Gone)?;
    let (fd, seen) = open_with_lease(target, OFlags::RDONLY)?;
    if !may_purge(&fd, &seen) {
        return Err(PurgeOutcome::Gone);
    }
    debug_assert!(is_ours(&ours), "a scan finds an unfinished purge by the name");
    file_access::rename(target.folder, target.name, &ours)?;
    Ok(finish_whole(target, &fd, &seen, &ours, may_purge))
}

/// Completes a purge after the file was renamed to the private name `ours`.
fn finish_whole(
    target: &Target<'_>,
    fd: &OwnedFd,
    seen: &FileAttributes,
    ours: &OsStr,
    may_purge: impl MayPurge,
) -> PurgeOutcome {
    // A process that opened the file by its old name may already wait for the end of the lease. It must get a file that
    // is not unlinked.
    let is_open_waiting = !pages::has_lease(fd.as_fd());
    if is_open_waiting || !target.is_at(ours) || !may_purge(fd, seen) {
        restore_name(target.folder, ours, target.name, target.inode);
        return if is_open_waiting { PurgeOutcome::Open } else { PurgeOutcome::Gone };
    }
    match fs::unlinkat(target.folder, ours, AtFlags::empty()) {
        Ok(()) => PurgeOutcome::Freed { bytes: seen.held_bytes, left_bytes: 0 },
        Err(_) => PurgeOutcome::Gone,
    }
}

/// Restores a file's old name. If a new file has that name, the old file gets a third name, which is printed.
fn restore_name(folder: BorrowedFd<'_>, ours: &OsStr, name: &OsStr, inode: u64) {
    let Err(error) = file_access::rename(folder, ours, name) else { return };
    if error.kind() == io::ErrorKind::AlreadyExists {
        let mut rescued = name.as_bytes().to_vec();
        rescued.extend_from_slice(format!("{RESCUED_NAME_PART}{inode:x}").as_bytes());
        rescued.drain(..rescued.len().saturating_sub(MAX_NAME_BYTES));
        let rescued = OsString::from_vec(rescued);
        let _ = file_access::rename(folder, ours, &rescued);
        let (name, rescued) = (name.to_string_lossy(), rescued.to_string_lossy());
        print_message(&format!(
            "a new file `{}` exists: the old one is now `{}`",
            name.escape_debug(),
            rescued.escape_debug()
        ));
    }
}

/// Purges some `want_bytes` from the end of a file. A failed step, or an obstacle, is the error.
fn purge_tail(target: &Target<'_>, want_bytes: u64, may_purge: impl MayPurge) -> Result<PurgeOutcome, PurgeOutcome> {
    let (fd, seen) = open_with_lease(target, OFlags::RDWR)?;
    let (mut len_bytes, mut left_bytes) = (seen.len_bytes, seen.held_bytes);
    let freed = |left_bytes| Ok(PurgeOutcome::Freed { bytes: seen.held_bytes - left_bytes, left_bytes });
    while len_bytes > 0 && seen.held_bytes - left_bytes < want_bytes {
        // Repeats the checks: the file may have been moved to a folder whose marks forbid a purge, or a process may
        // wait to open the file.
        if !target.is_at(target.name) || !may_purge(&fd, &seen) || !pages::has_lease(fd.as_fd()) {
            return if left_bytes < seen.held_bytes { freed(left_bytes) } else { Err(PurgeOutcome::Gone) };
        }
        let missing = want_bytes - (seen.held_bytes - left_bytes);
        // A hole at the end of the file frees no memory when it is cut. So each cut removes at least an eighth of the
        // file; otherwise the loop could run very long.
        len_bytes = shortened_len(len_bytes, missing.max(len_bytes / 8));
        // The new length is recorded before the file is truncated. After a crash between the two calls no bytes are
        // missing; a reader only trusts fewer bytes than are valid.
        let from = file_access::purged_from(&fd).map_or(len_bytes, |from| from.min(len_bytes));
        file_access::set_attribute(&fd, PURGED, &from.to_string())?;
        fs::ftruncate(&fd, len_bytes).map_err(io::Error::from)?;
        debug_assert!(from <= len_bytes, "no byte behind the end counts as valid");
        left_bytes = file_access::attributes(&fd)?.held_bytes.min(left_bytes);
    }
    freed(left_bytes)
}

/// Returns the length to which a file of `len_bytes` is cut, to remove `bytes` or more. The result is a multiple of a
/// block if `bytes` is at least a block, else of a page.
fn shortened_len(len_bytes: u64, bytes: u64) -> u64 {
    let rest = len_bytes.saturating_sub(bytes.max(1));
    let unit = if bytes >= BLOCK_BYTES as u64 { BLOCK_BYTES } else { os_page_bytes() } as u64;
    let shortened = rest - rest % unit;
    debug_assert!(shortened < len_bytes || len_bytes == 0, "each cut shortens the file");
    shortened
}

/// Returns the private name for a file; `None` if that name would be too long.
fn private_name(inode: u64, name: &OsStr) -> Option<OsString> {
    let mut ours = format!("{PRIVATE_PREFIX}{inode:x}-").into_bytes();
    ours.extend_from_slice(name.as_bytes());
    (ours.len() <= MAX_NAME_BYTES).then(|| OsString::from_vec(ours))
}

/// Parses a private name. Returns the inode and the old name.
fn parse_private_name(name: &OsStr) -> Option<(u64, &OsStr)> {
    let rest = name.as_bytes().strip_prefix(PRIVATE_PREFIX.as_bytes())?;
    let at = rest.iter().position(|byte| *byte == b'-')?;
    let inode = u64::from_str_radix(std::str::from_utf8(&rest[..at]).ok()?, 16).ok()?;
    Some((inode, OsStr::from_bytes(&rest[at + 1..]))).filter(|(_, name)| !name.is_empty())
}

/// Returns whether `name` is a private name.
pub fn is_ours(name: &OsStr) -> bool {
    parse_private_name(name).is_some()
}

/// Finishes or undoes the purge of a killed controller, if `name` is a private name (`.pagemill-purge-INODE-NAME`).
///
/// Unlinks the file if it has that inode and no other name, and `may_purge` returns true. If another process has such a
/// file open, the file keeps its private name until the next scan. All other files get their old name back. Returns
/// whether `name` is a private name.
pub fn finish(folder: BorrowedFd<'_>, name: &OsStr, may_purge: impl MayPurge) -> bool {
    let Some((inode, old)) = parse_private_name(name) else { return false };
    let Ok(fd) = file_access::open_file(folder, name, OFlags::RDONLY) else { return true };
    let Ok(seen) = file_access::attributes(&fd) else { return true };
    let target = Target { folder, name: old, inode, part: PurgePart::Whole, used_ns: i64::MAX };
    if seen.inode == inode && seen.is_file() && seen.links == 1 && may_purge(&fd, &seen) {
        // If the file is still open, the next scan removes it.
        if pages::take_lease(fd.as_fd()).is_ok() {
            finish_whole(&target, &fd, &seen, name, may_purge);
        }
    } else {
        restore_name(folder, name, old, seen.inode);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    struct Folder {
        path: tempfile::TempDir,
        fd: OwnedFd,
    }

    impl Folder {
        /// Creates a folder on tmpfs; `None` if `/dev/shm` is missing or not writable.
        fn new() -> Option<Self> {
            let path = tempfile::tempdir_in("/dev/shm").ok()?;
            let fd = File::open(path.path()).unwrap().into();
            Some(Self { path, fd })
        }

        fn write(&self, name: &str, len: usize) -> u64 {
            std::fs::write(self.at(name), vec![1u8; len]).unwrap();
            file_access::attributes_at(&self.fd, OsStr::new(name)).unwrap().inode
        }

        fn at(&self, name: &str) -> std::path::PathBuf {
            self.path.path().join(name)
        }

        fn names(&self) -> Vec<String> {
            let entries = std::fs::read_dir(self.path.path()).unwrap();
            let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        }

        fn purge(&self, name: &str, inode: u64, part: PurgePart, want: u64) -> PurgeOutcome {
            let target = Target { folder: self.fd.as_fd(), name: OsStr::new(name), inode, part, used_ns: i64::MAX };
            purge(&target, want, |_, _| true)
        }
    }

    /// A purge is tried while the file is open, after it was replaced, used, hard-linked or made nonvolatile, and
    /// through a symbolic link. The file must remain each time. Without an obstacle the file must be removed.
    #[test]
    fn only_the_intended_file_is_purged() {
        let Some(folder) = Folder::new() else { return println!("skipped: no /dev/shm") };
        let page = os_page_bytes();
        let inode = folder.write("a", page);
        let open = File::open(folder.at("a")).unwrap();
        assert_eq!(folder.purge("a", inode, PurgePart::Whole, 1), PurgeOutcome::Open);
        drop(open);
        assert_eq!(folder.purge("a", inode + 1, PurgePart::Whole, 1), PurgeOutcome::Gone, "another file of that name");
        let target =
            Target { folder: folder.fd.as_fd(), name: OsStr::new("a"), inode, part: PurgePart::Whole, used_ns: 5 };
        assert!(matches!(purge(&target, 1, |_, _| true), PurgeOutcome::Used(_)));
        let target = Target { used_ns: i64::MAX, ..target };
        assert_eq!(purge(&target, 1, |_, _| false), PurgeOutcome::Gone, "not volatile any more");
        std::fs::hard_link(folder.at("a"), folder.at("b")).unwrap();
        assert_eq!(folder.purge("a", inode, PurgePart::Whole, 1), PurgeOutcome::Gone, "two names");
        std::fs::remove_file(folder.at("b")).unwrap();
        std::os::unix::fs::symlink("a", folder.at("link")).unwrap();
        assert_eq!(folder.purge("link", inode, PurgePart::Whole, 1), PurgeOutcome::Gone);
        assert_eq!(folder.names(), ["a", "link"]);
        let freed = folder.purge("a", inode, PurgePart::Whole, 1);
        assert_eq!(freed, PurgeOutcome::Freed { bytes: page as u64, left_bytes: 0 });
        assert_eq!(folder.names(), ["link"]);
        let long = "n".repeat(255);
        let inode = folder.write(&long, page);
        assert_eq!(folder.purge(&long, inode, PurgePart::Whole, 1), PurgeOutcome::Gone, "no room for a name of ours");
        let can_purge = |name: &str, part| {
            let seen = file_access::attributes_at(&folder.fd, OsStr::new(name)).unwrap();
            super::can_purge(part, OsStr::new(name), &seen)
        };
        assert!(!can_purge(&long, PurgePart::Whole) && can_purge(&long, PurgePart::Tail));
        folder.write("empty", 0);
        assert!(can_purge("empty", PurgePart::Whole) && !can_purge("empty", PurgePart::Tail));
        std::fs::hard_link(folder.at("empty"), folder.at("second")).unwrap();
        assert!(!can_purge("empty", PurgePart::Whole));
        ["empty", "second"].iter().for_each(|name| std::fs::remove_file(folder.at(name)).unwrap());
        assert_eq!(folder.names(), ["link", &long]);
    }

    /// Another file is renamed to the target's name between the check and the purge's rename. That file must keep its
    /// contents and get its name back. A file must also get its name back if `may_purge` forbids the purge, and get a
    /// third name if a new file has the old one.
    #[test]
    fn a_replaced_file_gets_its_name_back() {
        let Some(folder) = Folder::new() else { return println!("skipped: no /dev/shm") };
        let (old, new) = (folder.write("a", 10), folder.write("other", 20));
        let ours = private_name(old, OsStr::new("a")).unwrap();
        // The state in `purge_whole` if another process renames its file just before.
        std::fs::rename(folder.at("other"), folder.at("a")).unwrap();
        file_access::rename(&folder.fd, OsStr::new("a"), &ours).unwrap();
        assert!(finish(folder.fd.as_fd(), &ours, |_, _| true));
        assert_eq!(folder.names(), ["a"]);
        assert_eq!(file_access::attributes_at(&folder.fd, OsStr::new("a")).unwrap().inode, new);
        // The controller was killed after it renamed the right file: the file is removed, unless `may_purge` forbids
        // that.
        let ours = private_name(new, OsStr::new("a")).unwrap();
        file_access::rename(&folder.fd, OsStr::new("a"), &ours).unwrap();
        assert!(finish(folder.fd.as_fd(), &ours, |_, _| false));
        assert_eq!(folder.names(), ["a"]);
        // A new file has the name: both are kept.
        file_access::rename(&folder.fd, OsStr::new("a"), &ours).unwrap();
        folder.write("a", 5);
        assert!(finish(folder.fd.as_fd(), &ours, |_, _| false));
        let rescued = format!("a{RESCUED_NAME_PART}{new:x}");
        assert_eq!((folder.names(), folder.at(&rescued).metadata().unwrap().len()), (vec!["a".into(), rescued], 20));
        let ours = private_name(folder.write("b", 1), OsStr::new("b")).unwrap();
        file_access::rename(&folder.fd, OsStr::new("b"), &ours).unwrap();
        assert!(finish(folder.fd.as_fd(), &ours, |_, _| true));
        assert_eq!(folder.names().len(), 2);
        assert!(!finish(folder.fd.as_fd(), OsStr::new(".pagemill-purge-zz"), |_, _| true));
    }

    /// Another process opens the file while the purge checks it, and waits for the lease. The purge must stop, and the
    /// process must get the file under its name.
    #[test]
    fn a_waiting_open_gets_the_file() {
        let Some(folder) = Folder::new() else { return println!("skipped: no /dev/shm") };
        let inode = folder.write("a", 10);
        let target = Target {
            folder: folder.fd.as_fd(),
            name: OsStr::new("a"),
            inode,
            part: PurgePart::Whole,
            used_ns: i64::MAX,
        };
        let path = folder.at("a");
        let asked = std::cell::Cell::new(0);
        let opener = std::cell::RefCell::new(None);
        // Another process opens the file during the check.
        let outcome = purge(&target, 1, |fd, _| {
            if asked.replace(asked.get() + 1) == 0 {
                let path = path.clone();
                *opener.borrow_mut() = Some(std::thread::spawn(move || File::open(path).map(drop)));
                let begun = std::time::Instant::now();
                while pages::has_lease(fd.as_fd()) {
                    assert!(begun.elapsed().as_secs() < 600, "no waiter is reported");
                }
            }
            true
        });
        assert_eq!((outcome, folder.names()), (PurgeOutcome::Open, vec!["a".to_owned()]));
        opener.into_inner().unwrap().join().unwrap().unwrap();
    }

    /// The end of a file is purged twice. Each purge must cut whole pages and record the offset in the attribute, and
    /// the file must remain. A purge of a file with a hole at its end must end, too.
    #[test]
    fn purged_tails_are_recorded() {
        let Some(folder) = Folder::new() else { return println!("skipped: no /dev/shm") };
        let page = os_page_bytes() as u64;
        let inode = folder.write("a", 10 * page as usize + 5);
        let open = || File::open(folder.at("a")).unwrap();
        if file_access::set_attribute(open(), PURGED, "99999999").is_err() {
            return println!("skipped: no attributes of users on tmpfs");
        }
        let freed = folder.purge("a", inode, PurgePart::Tail, 3 * page);
        assert_eq!(freed, PurgeOutcome::Freed { bytes: 4 * page, left_bytes: 7 * page });
        assert_eq!((file_access::purged_from(open()), open().metadata().unwrap().len()), (Some(7 * page), 7 * page));
        let freed = folder.purge("a", inode, PurgePart::Tail, u64::MAX);
        assert_eq!(freed, PurgeOutcome::Freed { bytes: 7 * page, left_bytes: 0 });
        assert_eq!((file_access::purged_from(open()), folder.names().len()), (Some(0), 1));
        let sparse = folder.write("b", page as usize);
        File::options().write(true).open(folder.at("b")).unwrap().set_len(1000 * page).unwrap();
        assert!(matches!(folder.purge("b", sparse, PurgePart::Tail, 1), PurgeOutcome::Freed { left_bytes: 0, .. }));
    }

    /// The length to which a purge cuts a file must be a multiple of a page or block, and always less than the old
    /// length.
    #[test]
    fn cuts_end_on_pages() {
        let (page, block) = (os_page_bytes() as u64, BLOCK_BYTES as u64);
        assert_eq!(shortened_len(10 * page + 5, 1), 10 * page);
        assert_eq!(shortened_len(10 * page, 1), 9 * page);
        assert_eq!(shortened_len(5 * block + 7, block), 4 * block);
        assert_eq!((shortened_len(page, block), shortened_len(5, 0)), (0, 0));
    }
}
