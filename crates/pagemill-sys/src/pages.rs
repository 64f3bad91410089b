//! Pages of a file in memory: making and splitting huge pages, finding the control group that is charged for a page,
//! and leases.
#![allow(unsafe_code)] // mmap, madvise, fcntl

use crate::mem::{self, os_page_bytes};
use crate::result::{check_result, take_descriptor};
use rustix::mm::{self, Advice, MapFlags, ProtFlags};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Once;

/// Result of an attempt to make a block of a file one huge page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collapse {
    /// The block is one huge page, now or already before the call.
    Huge,
    /// Other code has a reference to a page of the block. A retry may succeed.
    Busy,
    /// No huge page is available, or the group's limit leaves no room for one.
    NoMemory,
    /// The file or the kernel (before Linux 6.1) does not support `MADV_COLLAPSE`.
    Refused,
}

/// A read-only mapping of a range of a file, for system calls that need an address. Pagemill does not read the mapped
/// bytes.
struct FileMapping {
    addr: usize,
    len: usize,
}

impl FileMapping {
    /// Maps `len` bytes of `file` from `offset` on, at an address that is a multiple of `len`, as a huge page requires.
    /// `offset` must be a multiple of the OS page size.
    fn new(file: BorrowedFd<'_>, offset: u64, len: usize) -> io::Result<Self> {
        let mapping = Self { addr: mem::reserve(len, len, 0)?, len };
        let (at, flags) = (mapping.addr as *mut _, MapFlags::SHARED | MapFlags::FIXED);
        // SAFETY: the call replaces the reservation made above, which no other code knows.
        unsafe { mm::mmap(at, len, ProtFlags::READ, flags, file, offset) }?;
        Ok(mapping)
    }

    /// Enters the OS pages with the indices `pages` into the page table. Past the end of the file, this call of
    /// `madvise` returns an error, where an access would raise a signal.
    fn populate(&self, pages: Range<usize>) -> io::Result<()> {
        let page_bytes = os_page_bytes();
        assert!(pages.end * page_bytes <= self.len, "the pages are in the mapping");
        let at = (self.addr + pages.start * page_bytes) as *mut _;
        // SAFETY: this value owns the mapping, the range is in it, and the advice changes no byte.
        Ok(unsafe { mm::madvise(at, pages.len() * page_bytes, Advice::LinuxPopulateRead) }?)
    }

    /// Returns the ranges of OS pages that are resident, as page indices in the mapping.
    fn resident_ranges(&self) -> io::Result<Vec<Range<usize>>> {
        let mut states = vec![0u8; self.len / os_page_bytes()];
        mem::resident(self.addr, self.len, &mut states)?;
        let resident: Vec<_> = (0..states.len()).filter(|page| states[*page] & 1 == 1).collect();
        let runs = resident.chunk_by(|page, next| page + 1 == *next);
        Ok(runs.map(|run| run[0]..run[run.len() - 1] + 1).collect())
    }
}

impl Drop for FileMapping {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, which is not used again.
        unsafe { mem::unreserve(self.addr, self.len) };
    }
}

/// Makes one huge page of the block of `file` at `offset`, a multiple of `block_bytes`.
///
/// The bytes and other mappings of the file do not change. The huge page is charged to this process's memory group.
/// Takes some 0.25 ms. Needs Linux 6.1.
pub fn collapse(file: BorrowedFd<'_>, offset: u64, block_bytes: usize) -> Collapse {
    assert!(offset.is_multiple_of(block_bytes as u64));
    let Ok(mapping) = FileMapping::new(file, offset, block_bytes) else { return Collapse::NoMemory };
    // SAFETY: the value owns the mapping, and the advice changes no byte.
    match unsafe { mem::advise_by_number(mapping.addr, block_bytes, libc::MADV_COLLAPSE) } {
        Ok(()) => Collapse::Huge,
        Err(error) => match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EBUSY) => Collapse::Busy,
            Some(libc::ENOMEM) => Collapse::NoMemory,
            _ => Collapse::Refused,
        },
    }
}

/// Splits the huge page at `offset` of `file`, unless another process has mapped the page. The bytes do not change.
///
/// Marks one OS page of the huge page as cold (`MADV_COLD`), for which the kernel splits the huge page.
///
/// # Errors
///
/// Errors of mapping; `EFAULT` past the end of the file.
pub fn split(file: BorrowedFd<'_>, offset: u64, block_bytes: usize) -> io::Result<()> {
    let mapping = FileMapping::new(file, offset, block_bytes)?;
    mapping.populate(0..1)?;
    mem::cool(mapping.addr, os_page_bytes())
}

/// Returns whether this process may read which control group is charged for a page.
pub fn may_ask_for_group() -> bool {
    ChargedGroupReader::new().is_ok()
}

/// Samples up to 64 pages spread over a file of `len_bytes`, until `max_groups` of them are resident. Returns the
/// charged group of each resident page: the inode number of its cgroup folder. Works only as root.
///
/// Allocates no page and takes no lock of the file, which a writer may hold for long. Takes some 6 us per sample.
///
/// # Errors
///
/// Errors of mapping and of reading kernel files.
pub fn charged_groups(file: BorrowedFd<'_>, len_bytes: u64, max_groups: usize) -> io::Result<Vec<u64>> {
    const MAX_SAMPLES: u64 = 64;
    /// Odd, so that its multiples modulo 64 reach every sample. The first samples then come from all parts of the file.
    const SAMPLE_STRIDE: u64 = 27;
    let page = os_page_bytes() as u64;
    let pages = len_bytes.div_ceil(page);
    let samples = MAX_SAMPLES.min(pages);
    let reader = ChargedGroupReader::new()?;
    let mut groups = Vec::new();
    for sample in 0..samples {
        if groups.len() == max_groups {
            break;
        }
        let sample = if samples == MAX_SAMPLES { sample * SAMPLE_STRIDE % MAX_SAMPLES } else { sample };
        // The sampling starts at the end, because the pages written last are resident.
        let offset = (pages - 1 - sample * pages / samples) * page;
        let mapping = FileMapping::new(file, offset, page as usize)?;
        if !mapping.resident_ranges()?.is_empty() && mapping.populate(0..1).is_ok() {
            groups.extend(reader.groups_of(&mapping, 0..1).ok().and_then(|groups| groups.first().copied()));
        }
    }
    Ok(groups)
}

/// Returns whether every resident page of a block of `file` is charged to the group whose cgroup folder has this inode
/// number. `offset` must be a multiple of `block_bytes`. Works only as root. Takes some 50 us.
///
/// # Errors
///
/// Errors of mapping and of reading kernel files; `NotFound` if the kernel reports no group for a page.
pub fn is_charged_to(file: BorrowedFd<'_>, offset: u64, block_bytes: usize, group: u64) -> io::Result<bool> {
    assert!(offset.is_multiple_of(block_bytes as u64));
    let mapping = FileMapping::new(file, offset, block_bytes)?;
    let reader = ChargedGroupReader::new()?;
    for pages in mapping.resident_ranges()? {
        mapping.populate(pages.clone())?;
        if reader.groups_of(&mapping, pages)?.iter().any(|found| *found != group) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The kernel files from which the charged control group of a page is read.
struct ChargedGroupReader {
    pagemap: File,
    groups: File,
}

/// Reads `count` words, from word `first` on, of a kernel file that has one word for each page.
fn read_words(file: &File, first: u64, count: usize) -> io::Result<Vec<u64>> {
    let mut bytes = vec![0; count * 8];
    file.read_exact_at(&mut bytes, first * 8)?;
    Ok(bytes.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)).collect())
}

impl ChargedGroupReader {
    fn new() -> io::Result<Self> {
        Ok(Self { pagemap: File::open("/proc/self/pagemap")?, groups: File::open("/proc/kpagecgroup")? })
    }

    /// Returns the charged group of each OS page in `pages`; these pages of the mapping must be populated.
    fn groups_of(&self, mapping: &FileMapping, pages: Range<usize>) -> io::Result<Vec<u64>> {
        const PRESENT_BIT: u64 = 1 << 63;
        const FRAME_MASK: u64 = PRESENT_BIT.wrapping_shr(8) - 1;
        let first = mapping.addr as u64 / os_page_bytes() as u64 + pages.start as u64;
        let mut frames = Vec::with_capacity(pages.len());
        for entry in read_words(&self.pagemap, first, pages.len())? {
            if entry & PRESENT_BIT == 0 || entry & FRAME_MASK == 0 {
                return Err(io::ErrorKind::NotFound.into());
            }
            frames.push(entry & FRAME_MASK);
        }
        let mut groups: Vec<u64> = Vec::with_capacity(frames.len());
        for run in frames.chunk_by(|one, next| *next == one + 1) {
            let mut group = self.group_of_folio(run[0])?;
            for word in read_words(&self.groups, run[0], run.len())? {
                // A frame without a group belongs to the folio of the frame before it.
                group = if word == 0 { group } else { word };
                groups.push(group);
            }
        }
        Ok(groups)
    }

    /// Returns the charged control group of the folio that contains the page frame with the number `frame`. Only the
    /// first page of a large folio has the group, and folios are aligned to their size.
    fn group_of_folio(&self, frame: u64) -> io::Result<u64> {
        const MAX_FOLIO_ORDER: u32 = 9;
        for order in 0..=MAX_FOLIO_ORDER {
            match read_words(&self.groups, frame >> order << order, 1)?[0] {
                0 => {}
                group => return Ok(group),
            }
        }
        Err(io::ErrorKind::NotFound.into())
    }
}

/// Opens a file again, for reading, through the mount that `root` is open in. `file` may be open with `O_PATH`.
///
/// # Errors
///
/// `EPERM` without CAP_DAC_READ_SEARCH in the initial user namespace; `EOPNOTSUPP` if the file system has no handles;
/// `ESTALE` if `root` is on another file system.
pub fn open_through(root: BorrowedFd<'_>, file: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut handle = FileHandle::LARGEST;
    let (mut mount_id, file) = (0 as libc::c_int, file.as_raw_fd());
    let (to, path, flag) = (&raw mut handle, c"".as_ptr(), libc::AT_EMPTY_PATH);
    // SAFETY: the call writes at most `len_bytes` bytes of the handle, and the mount's id.
    check_result(unsafe { libc::syscall(libc::SYS_name_to_handle_at, file, path, to, &raw mut mount_id, flag) })?;
    handle.open(root, libc::O_RDONLY | libc::O_NONBLOCK | libc::O_NOATIME | libc::O_NOCTTY | libc::O_CLOEXEC)
}

/// `struct file_handle` with room for every handle.
#[repr(C)]
pub(crate) struct FileHandle {
    pub len_bytes: libc::c_uint,
    pub kind: libc::c_int,
    pub bytes: [u8; 128],
}

impl FileHandle {
    /// A handle of the largest size, with zero bytes.
    pub const LARGEST: Self = Self { len_bytes: 128, kind: 0, bytes: [0; 128] };

    /// Opens the file of this handle in the mount that contains `root`.
    pub fn open(&self, root: BorrowedFd<'_>, flags: libc::c_int) -> io::Result<OwnedFd> {
        assert!(self.len_bytes as usize <= self.bytes.len());
        // SAFETY: the call only reads the handle, whose length field bounds the bytes that are read.
        unsafe {
            take_descriptor(libc::syscall(libc::SYS_open_by_handle_at, root.as_raw_fd(), &raw const *self, flags))
        }
    }
}

/// Takes a write lease on a file (`F_SETLEASE`). Fails if any other descriptor or mapping of the file exists.
///
/// After that, a process that opens the file blocks until `file` is closed, for at most `/proc/sys/fs/lease-break-time`
/// seconds. The caller must own the file or have CAP_LEASE.
///
/// # Errors
///
/// `EAGAIN` if the file is open elsewhere; `EACCES` for another user's file.
pub fn take_lease(file: BorrowedFd<'_>) -> io::Result<()> {
    static INSTALL_HANDLER: Once = Once::new();
    // When a process opens the file, the kernel sends SIGIO to this process, which would end the process by default.
    INSTALL_HANDLER.call_once(|| install_empty_handler(libc::SIGIO));
    // SAFETY: the call takes numbers only.
    check_result(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK) })
}

/// Returns whether this process has the write lease on `file` and no process waits to open the file.
pub fn has_lease(file: BorrowedFd<'_>) -> bool {
    // SAFETY: the call takes numbers only. While another process waits to open the file, the call returns the type that
    // the lease will have after that.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETLEASE) == libc::F_WRLCK }
}

/// Releases the write lease on `file` before the file is closed.
pub fn end_lease(file: BorrowedFd<'_>) {
    // SAFETY: the call takes numbers only.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_UNLCK) };
}

/// Returns whether no other descriptor or mapping of the file exists now.
pub fn is_alone(file: BorrowedFd<'_>) -> bool {
    let is_alone = take_lease(file).is_ok();
    if is_alone {
        end_lease(file);
    }
    is_alone
}

extern "C" fn do_nothing(_: libc::c_int) {}

/// Installs an empty handler for a signal that would end this process. In programs that this process executes, the
/// signal has its default action.
fn install_empty_handler(signal: libc::c_int) {
    // SAFETY: the structures are plain data, the handler accesses nothing, and an existing handler stays.
    unsafe {
        let mut before: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &raw mut before);
        if before.sa_sigaction != libc::SIG_DFL {
            return;
        }
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = do_nothing as extern "C" fn(libc::c_int) as usize;
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(signal, &raw const action, std::ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK_BYTES: usize = 512 * 4096;
    use std::os::fd::AsFd;

    fn new_file(blocks: usize) -> Option<(tempfile::TempDir, File)> {
        let folder = tempfile::tempdir_in("/dev/shm").ok()?;
        let path = folder.path().join("file");
        std::fs::write(&path, vec![7u8; blocks * BLOCK_BYTES]).unwrap();
        Some((folder, File::open(path).unwrap()))
    }

    /// After a block of a file was made a huge page and split again, every byte must be unchanged.
    #[test]
    fn collapsing_and_splitting_keep_the_bytes() {
        let Some((_folder, file)) = new_file(2) else { return println!("skipped: no /dev/shm") };
        let done = collapse(file.as_fd(), BLOCK_BYTES as u64, BLOCK_BYTES);
        println!("collapse: {done:?}");
        if done == Collapse::Huge {
            split(file.as_fd(), BLOCK_BYTES as u64, BLOCK_BYTES).unwrap();
        }
        assert!(split(file.as_fd(), 8 * BLOCK_BYTES as u64, BLOCK_BYTES).is_err(), "past the end");
        let mut bytes = vec![0; 2 * BLOCK_BYTES];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 7));
    }

    /// Repeats a check until it succeeds. The check may fail at first, because children of parallel tests inherit open
    /// files for a moment.
    fn retry_until(is_so: impl Fn() -> bool) {
        let begun = std::time::Instant::now();
        while !is_so() {
            assert!(begun.elapsed().as_secs() < 600, "still refused");
            std::thread::yield_now();
        }
    }

    /// The kernel must refuse a lease while another descriptor or a mapping of the file exists.
    #[test]
    fn a_lease_is_refused_while_the_file_is_open_elsewhere() {
        let Some((folder, file)) = new_file(1) else { return println!("skipped: no /dev/shm") };
        let other = File::open(folder.path().join("file")).unwrap();
        let refused = take_lease(file.as_fd()).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EAGAIN));
        let mapping = FileMapping::new(other.as_fd(), 0, BLOCK_BYTES).unwrap();
        drop(other);
        assert_eq!(take_lease(file.as_fd()).unwrap_err().raw_os_error(), Some(libc::EAGAIN));
        drop(mapping);
        retry_until(|| take_lease(file.as_fd()).is_ok());
    }

    /// A thread that opens the file must block until the lease ends, and no signal may end this process.
    #[test]
    fn an_opener_waits_for_the_end_of_a_lease() {
        let Some((folder, file)) = new_file(1) else { return println!("skipped: no /dev/shm") };
        retry_until(|| is_alone(file.as_fd()));
        assert!(!has_lease(file.as_fd()));
        retry_until(|| take_lease(file.as_fd()).is_ok());
        assert!(has_lease(file.as_fd()));
        let path = folder.path().join("file");
        let opener = std::thread::spawn(move || File::open(path).map(drop));
        let begun = std::time::Instant::now();
        while has_lease(file.as_fd()) {
            assert!(begun.elapsed().as_secs() < 600, "no waiter is reported");
        }
        drop(file);
        opener.join().unwrap().unwrap();
    }

    /// Returns the control group that is charged for `file`, a new file of this process; `None` if this process cannot
    /// read it.
    fn charged_group(file: &File) -> Option<u64> {
        let groups = charged_groups(file.as_fd(), BLOCK_BYTES as u64, 1);
        if groups.is_err() {
            println!("skipped: the group cannot be read here");
        }
        groups.ok().map(|groups| groups[0])
    }

    /// All pages of a block must be charged to the same group, first as OS pages, then as one huge page.
    #[test]
    fn all_pages_of_a_block_have_one_group() {
        let Some((_folder, file)) = new_file(2) else { return println!("skipped: no /dev/shm") };
        let Some(group) = charged_group(&file) else { return };
        assert_ne!(group, 0);
        for _ in 0..2 {
            assert!(is_charged_to(file.as_fd(), BLOCK_BYTES as u64, BLOCK_BYTES, group).unwrap());
            assert!(!is_charged_to(file.as_fd(), BLOCK_BYTES as u64, BLOCK_BYTES, group + 1).unwrap());
            if collapse(file.as_fd(), BLOCK_BYTES as u64, BLOCK_BYTES) != Collapse::Huge {
                return println!("skipped: no huge page available");
            }
        }
    }

    /// `charged_groups` must return groups of resident pages only. For a file with holes, it must skip the holes and
    /// allocate no page.
    #[test]
    fn sampled_pages_report_their_groups() {
        let Some((folder, file)) = new_file(1) else { return println!("skipped: no /dev/shm") };
        let Some(group) = charged_group(&file) else { return };
        assert_eq!(charged_groups(file.as_fd(), BLOCK_BYTES as u64, 8).unwrap(), [group; 8]);
        File::options().write(true).open(folder.path().join("file")).unwrap().set_len(64 * BLOCK_BYTES as u64).unwrap();
        let held = || std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap());
        let before = held();
        let found = charged_groups(file.as_fd(), 64 * BLOCK_BYTES as u64, 8).unwrap();
        assert_eq!(found, [group], "one sample of 64 hits the first block");
        assert!(is_charged_to(file.as_fd(), BLOCK_BYTES as u64, BLOCK_BYTES, group).unwrap(), "a hole");
        assert_eq!(held(), before);
        assert!(charged_groups(file.as_fd(), 0, 8).unwrap().is_empty());
    }
}
