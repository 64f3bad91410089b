//! The trials of the probes. Each makes a system call and undoes its effect before it returns.
#![allow(unsafe_code)] // system calls

use crate::disk::{self, Alignment, Disk, Options};
use crate::memory_file::{FileSystem, MemoryFile};
use crate::result::{check_result, take_descriptor};
use crate::userfault::Userfault;
use crate::{fault, mem, moves};
use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::io::{Errno, retry_on_intr};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::process::{Pid, PidfdFlags, WaitOptions, getpid, pidfd_open, waitpid};
use rustix::thread::futex::{Wait, WaitFlags, WaitPtr, WaitvFlags, waitv};
use rustix::thread::{ClockId, UnshareFlags, unshare_unsafe};
use std::ffi::{CStr, c_int, c_void};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::AtomicU32;

pub(super) const BLOCK_BYTES: usize = 2 << 20;

/// Mode of [`Userfault::register`]: the range may be write-protected.
const REGISTER_MODE_WRITE_PROTECT: u64 = 2;

/// Returns the kernel's release and the name of the processor architecture.
pub(super) fn kernel_names() -> (String, String) {
    let names = rustix::system::uname();
    (names.release().to_string_lossy().into_owned(), names.machine().to_string_lossy().into_owned())
}

/// Memory for trials: a whole number of 2 MiB blocks.
///
/// # Invariants
/// `addr..addr + len_bytes` is aligned to a block, readable and writable, and used by this value only. All accesses are
/// volatile, because the kernel may free the pages at any time.
pub(super) struct Scratch {
    addr: usize,
    len_bytes: usize,
}

impl Scratch {
    /// Maps `blocks` blocks of private memory that have no pages yet.
    pub fn new(blocks: usize) -> io::Result<Self> {
        let len_bytes = blocks * BLOCK_BYTES;
        Ok(Self { addr: mem::map_sparse(len_bytes, BLOCK_BYTES)?, len_bytes })
    }

    /// Maps one block of a memory file (memfd) that has no pages yet.
    pub fn shared() -> io::Result<Self> {
        Self::of_file(&MemoryFile::create_in(FileSystem::Memfd, BLOCK_BYTES)?)
    }

    /// Maps the first block of a memory file.
    pub fn of_file(file: &MemoryFile) -> io::Result<Self> {
        let scratch = Self::new(1)?;
        // SAFETY: the mapping replaces memory of `scratch` that no code has accessed yet.
        unsafe { file.map(0, BLOCK_BYTES, scratch.addr) }?;
        Ok(scratch)
    }

    pub fn addr(&self) -> usize {
        self.addr
    }

    pub fn write(&self, offset: usize, byte: u8) {
        assert!(offset < self.len_bytes);
        // SAFETY: the byte lies inside the range, which no other code accesses (type invariant).
        unsafe { ((self.addr + offset) as *mut u8).write_volatile(byte) };
    }

    pub fn read(&self, offset: usize) -> u8 {
        assert!(offset < self.len_bytes);
        // SAFETY: the byte lies inside the range, which is readable (type invariant).
        unsafe { ((self.addr + offset) as *const u8).read_volatile() }
    }

    /// Calls `madvise` for the first `len_bytes` of the memory.
    pub fn advise(&self, len_bytes: usize, advice: c_int) -> io::Result<()> {
        assert!(len_bytes <= self.len_bytes);
        // SAFETY: the advice affects only pages of memory that no other code accesses (type invariant).
        unsafe { mem::advise_by_number(self.addr, len_bytes, advice) }
    }

    /// Gives advice for every second of the first `2 * count` OS pages, by one `process_madvise` call on this process.
    pub fn advise_every_second_page(&self, count: usize, advice: c_int) -> io::Result<()> {
        let page = mem::os_page_bytes();
        assert!(2 * count * page <= self.len_bytes);
        let fd = pidfd_open(getpid(), PidfdFlags::empty())?;
        let ranges: Vec<libc::iovec> = (0..count)
            .map(|index| libc::iovec { iov_base: (self.addr + 2 * index * page) as *mut c_void, iov_len: page })
            .collect();
        // SAFETY: the ranges lie inside this memory (type invariant), and the call only reads `ranges`.
        let advised = unsafe {
            libc::syscall(libc::SYS_process_madvise, fd.as_raw_fd(), ranges.as_ptr(), ranges.len(), advice, 0)
        };
        match advised {
            bytes if bytes == (count * page) as libc::c_long => Ok(()),
            bytes if bytes < 0 => Err(io::Error::last_os_error()),
            bytes => Err(io::Error::other(format!("only {bytes} bytes were taken"))),
        }
    }

    /// Write-protects the first OS page, until `userfault` is dropped.
    pub fn write_protect_first_page(&self, userfault: &Userfault) -> io::Result<()> {
        const UFFDIO_WRITEPROTECT: libc::c_ulong = 0xC018_AA06;
        let (start, len) = (self.addr as u64, mem::os_page_bytes() as u64);
        userfault.register(start, len, REGISTER_MODE_WRITE_PROTECT)?;
        userfault.ioctl(UFFDIO_WRITEPROTECT, &mut [start, len, 1])
    }

    /// Makes each access to the first OS page raise SIGBUS. The page must not be resident.
    pub fn poison_first_page(&self, userfault: &Userfault) -> io::Result<()> {
        const UFFDIO_POISON: libc::c_ulong = 0xC020_AA08;
        let (start, len) = (self.addr as u64, mem::os_page_bytes() as u64);
        userfault.register(start, len, REGISTER_MODE_WRITE_PROTECT)?;
        userfault.ioctl(UFFDIO_POISON, &mut [start, len, 0, 0])
    }

    /// Returns whether the kernel can read the byte at `offset`. Raises no signal.
    pub fn is_readable(&self, offset: usize) -> bool {
        assert!(offset < self.len_bytes);
        fault::is_readable(self.addr + offset)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: the memory belongs to this value and is not used again.
        unsafe { mem::unreserve(self.addr, self.len_bytes) };
    }
}

/// Moves the pages of the second block of `scratch` to the first block, which must have no pages yet.
pub(super) fn move_second_block(scratch: &Scratch) -> io::Result<()> {
    let (to, from) = (scratch.addr, scratch.addr + BLOCK_BYTES);
    assert!(scratch.len_bytes >= 2 * BLOCK_BYTES);
    // SAFETY: both blocks are private memory of `scratch`, which no other code knows.
    match unsafe { moves::move_pages(to, from, BLOCK_BYTES) }? {
        BLOCK_BYTES => Ok(()),
        moved => Err(io::Error::other(format!("only {moved} bytes were moved"))),
    }
}

/// Runs `trial` in a child process and returns its result. A child that takes five seconds is killed.
fn run_in_child(trial: impl FnOnce() -> u8) -> io::Result<u8> {
    // SAFETY: the child makes only system calls (the callers ensure that), and ends without running destructors.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: the call accesses no memory.
        unsafe { libc::alarm(5) };
        let answer = trial();
        // SAFETY: the call only ends the child.
        unsafe { libc::_exit(answer.into()) };
    }
    if child < 0 {
        return Err(io::Error::last_os_error());
    }
    let (_, status) = retry_on_intr(|| waitpid(Pid::from_raw(child), WaitOptions::empty()))?.ok_or(Errno::CHILD)?;
    let signal = status.terminating_signal().unwrap_or_default();
    let killed = || io::Error::other(format!("the trial was killed by signal {signal}"));
    status.exit_status().map(|code| code as u8).ok_or_else(killed)
}

/// Returns the error number of the last system call as a byte. Child processes call this function, so it does not
/// allocate.
fn last_errno() -> u8 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO) as u8
}

/// Returns the error with this number; `Ok` for 0.
fn result_of_errno(errno: u8) -> io::Result<()> {
    if errno == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(errno.into())) }
}

/// Returns the first byte of `scratch` as a `fork` child reads it.
pub(super) fn first_byte_in_child(scratch: &Scratch) -> io::Result<u8> {
    run_in_child(|| scratch.read(0))
}

/// Tries to get real-time priority, in a child process that ends after the trial.
pub(super) fn try_realtime_priority() -> io::Result<()> {
    result_of_errno(run_in_child(|| {
        let lowest = libc::sched_param { sched_priority: 1 };
        // SAFETY: the call only reads `lowest`.
        if unsafe { libc::sched_setscheduler(0, libc::SCHED_RR, &raw const lowest) } == 0 { 0 } else { last_errno() }
    })?)
}

/// Why a user namespace cannot be used here.
pub(super) enum NamespaceError {
    /// The namespace cannot be created.
    Refused(io::Error),
    /// The namespace can be created, but mounting in it is refused.
    CannotMount(io::Error),
}

/// Mounts a tmpfs in new user and mount namespaces of a child process. The namespaces end with the child.
pub(super) fn try_mount_in_namespace() -> Result<(), NamespaceError> {
    /// Bit that the child sets in its result if a call of `mount` failed.
    const IS_MOUNT_ERROR: u8 = 0x80;
    let byte_of = |error: Errno| error.raw_os_error() as u8;
    let answer = run_in_child(|| {
        // SAFETY: the call concerns only the child, which has one thread.
        if let Err(error) = unsafe { unshare_unsafe(UnshareFlags::NEWUSER | UnshareFlags::NEWNS) } {
            return byte_of(error) & !IS_MOUNT_ERROR;
        }
        let mounted = mount_change(c"/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)
            .and_then(|()| mount(c"tmpfs", c"/", c"tmpfs", MountFlags::empty(), None));
        mounted.map_or_else(|error| byte_of(error) | IS_MOUNT_ERROR, |()| 0)
    });
    match answer {
        Ok(0) => Ok(()),
        Ok(errno) if errno & IS_MOUNT_ERROR == 0 => {
            Err(NamespaceError::Refused(io::Error::from_raw_os_error(errno.into())))
        }
        Ok(errno) => Err(NamespaceError::CannotMount(io::Error::from_raw_os_error((errno & !IS_MOUNT_ERROR).into()))),
        Err(error) => Err(NamespaceError::Refused(error)),
    }
}

/// Tries `futex_waitv`, on a word whose value already differs from the expected one, so that the call does not block.
pub(super) fn try_futex_waitv() -> io::Result<()> {
    let word = AtomicU32::new(0);
    let mut waiter = Wait::new();
    waiter.val = 1;
    waiter.uaddr = WaitPtr::new(word.as_ptr().cast());
    waiter.flags = WaitFlags::SIZE_U32 | WaitFlags::PRIVATE;
    match waitv(&[waiter], WaitvFlags::empty(), None, ClockId::Realtime) {
        Ok(_) | Err(Errno::AGAIN) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Which huge pages this process may get. The setting (`PR_SET_THP_DISABLE`) is inherited from the parent process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AllowedHugePages {
    /// All huge pages that the machine's settings allow.
    All,
    /// Huge pages only where a program advises them (`PR_THP_DISABLE_EXCEPT_ADVISED`, Linux 6.18), as this crate does.
    WhereAdvised,
    None,
}

impl AllowedHugePages {
    fn from_flags(flags: i32) -> Self {
        match (flags & 1, flags & crate::process::THP_DISABLE_EXCEPT_ADVISED) {
            (0, _) => Self::All,
            (_, 0) => Self::None,
            _ => Self::WhereAdvised,
        }
    }
}

/// Reads which huge pages this process may get.
pub(super) fn allowed_huge_pages() -> io::Result<AllowedHugePages> {
    // SAFETY: the call accesses no memory.
    let answer = unsafe { libc::prctl(libc::PR_GET_THP_DISABLE, 0, 0, 0, 0) };
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(AllowedHugePages::from_flags(answer)) }
}

/// Returns this process's soft and hard limit of a resource; `None` for no limit.
pub(super) fn resource_limit(of: libc::__rlimit_resource_t) -> io::Result<(Option<u64>, Option<u64>)> {
    let limit = crate::process::resource_limit(of)?;
    let known = |value| (value != libc::RLIM_INFINITY).then_some(value);
    Ok((known(limit.rlim_cur), known(limit.rlim_max)))
}

/// Tries to reserve address space, and releases it again.
pub(super) fn try_reserve(len_bytes: usize) -> io::Result<()> {
    let addr = mem::reserve(len_bytes, BLOCK_BYTES, 0)?;
    // SAFETY: the range was reserved above, and no other code knows it.
    unsafe { mem::unreserve(addr, len_bytes) };
    Ok(())
}

/// Tries to lock memory that has no pages. The memory counts against `RLIMIT_MEMLOCK` as if it had pages.
pub(super) fn try_lock_memory(len_bytes: usize) -> io::Result<()> {
    let scratch = Scratch::new(len_bytes.div_ceil(BLOCK_BYTES))?;
    // SAFETY: the call locks memory of `scratch`. Dropping `scratch` unlocks it.
    check_result(unsafe { libc::mlock2(scratch.addr as *const c_void, len_bytes, libc::MLOCK_ONFAULT as _) })
}

/// Tries to create an io_uring with one entry, and closes it.
pub(super) fn try_io_uring() -> io::Result<()> {
    new_ring().map(drop)
}

/// Creates an io_uring with one entry.
fn new_ring() -> io::Result<OwnedFd> {
    let mut parameters = [0u32; 30];
    // SAFETY: the call writes at most the 120 bytes of `parameters`.
    unsafe { take_descriptor(libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr())) }
}

/// Tries to register a block of memory with an io_uring, and unregisters it.
pub(super) fn try_register_memory() -> io::Result<()> {
    let scratch = Scratch::new(1)?;
    let ring = new_ring()?;
    // An empty table (`struct io_uring_rsrc_register`), then its first entry (`struct io_uring_rsrc_update2`).
    const REGISTER_BUFFERS: libc::c_uint = 15;
    const UPDATE_BUFFERS: libc::c_uint = 16;
    const SPARSE_BIT: u64 = 1 << 32;
    let memory = libc::iovec { iov_base: scratch.addr as *mut c_void, iov_len: scratch.len_bytes };
    let table: [u64; 4] = [1 | SPARSE_BIT, 0, 0, 0];
    let entry: [u64; 4] = [0, (&raw const memory) as u64, 0, 1];
    for (request, argument) in [(REGISTER_BUFFERS, &table), (UPDATE_BUFFERS, &entry)] {
        let (fd, size) = (ring.as_raw_fd(), size_of_val(argument));
        // SAFETY: reads `argument` and `memory`. The memory of `scratch` outlives the ring, which unpins it when
        // closed.
        check_result(unsafe { libc::syscall(libc::SYS_io_uring_register, fd, request, argument.as_ptr(), size) })?;
    }
    Ok(())
}

/// Creates a file in `folder`, reads it with `O_DIRECT` and removes it. Returns the required alignment, if the kernel
/// reports it.
pub(super) fn try_direct_read(folder: &Path) -> io::Result<Option<Alignment>> {
    let path = trial_file_path(folder);
    std::fs::write(&path, [7; 1 << 16])?;
    let result = direct_read_of_file(&path);
    std::fs::remove_file(&path)?;
    result
}

/// Reads 64 KiB of a file with `O_DIRECT`.
fn direct_read_of_file(path: &Path) -> io::Result<Option<Alignment>> {
    let path = std::ffi::CString::new(path.as_os_str().as_encoded_bytes())?;
    let disk = Disk::open(&path, Options { is_direct: true, ..Options::default() })?;
    let alignment = disk.direct_alignment().unwrap_or_default();
    let scratch = Scratch::new(1)?;
    // SAFETY: the memory belongs to `scratch`, which only this function accesses.
    unsafe { disk::read_at(disk.number(), scratch.addr, 1 << 16, 0) }.map(|_| alignment)
}

/// Returns an unused path in `folder`.
fn trial_file_path(folder: &Path) -> std::path::PathBuf {
    folder.join(format!(".pagemill-doctor-{}-{:x}", std::process::id(), crate::clock::fine_ns()))
}

/// Creates an unprivileged fanotify listener. Returns whether this listener may also watch a whole file system.
pub(super) fn try_fanotify(folder: &CStr) -> io::Result<bool> {
    let flags = libc::FAN_CLASS_NOTIF | libc::FAN_CLOEXEC | libc::FAN_NONBLOCK | libc::FAN_REPORT_FID;
    // SAFETY: the call only creates a descriptor.
    let fd = unsafe { take_descriptor(libc::fanotify_init(flags, libc::O_RDONLY as u32)) }?;
    let flags = libc::FAN_MARK_ADD | libc::FAN_MARK_FILESYSTEM;
    // SAFETY: the call only reads `folder`, which is a C string. The kernel removes the mark with the descriptor.
    let marked =
        unsafe { libc::fanotify_mark(fd.as_raw_fd(), flags, libc::FAN_CREATE, libc::AT_FDCWD, folder.as_ptr()) };
    Ok(marked == 0)
}

/// The uses that a folder allows for the files in it.
pub(super) enum FolderUsability {
    /// A file in the folder can be created, written, and mapped as code.
    Usable,
    /// A file in the folder can be created and written, but not mapped as code.
    NotExecutable(io::Error),
}

/// Creates a file in `folder`, maps it as code and removes it.
pub(super) fn try_folder(folder: &Path) -> io::Result<FolderUsability> {
    let path = trial_file_path(folder);
    let file = File::options().read(true).write(true).create_new(true).open(&path)?;
    let written = file.set_len(4096).and_then(|()| io::Write::write_all(&mut &file, b"pagemill"));
    let mapped = map_as_code(&file);
    std::fs::remove_file(&path)?;
    written?;
    Ok(mapped.map_or_else(FolderUsability::NotExecutable, |()| FolderUsability::Usable))
}

/// Maps the first 4 KiB of a file as code, and unmaps them.
fn map_as_code(file: &File) -> io::Result<()> {
    let access = ProtFlags::READ | ProtFlags::EXEC;
    // SAFETY: the call creates a new mapping, which is never executed.
    let addr = unsafe { mmap(std::ptr::null_mut(), 4096, access, MapFlags::PRIVATE, file, 0) }?;
    // SAFETY: the mapping was created above, and no other code knows it.
    Ok(unsafe { munmap(addr, 4096) }?)
}

/// Checks the permission to write to a path, without writing.
pub(super) fn try_write_permission(path: &Path) -> io::Result<()> {
    Ok(accessat(CWD, path, Access::WRITE_OK, AtFlags::EACCESS)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each result of `PR_GET_THP_DISABLE` must be mapped to its value of `AllowedHugePages`.
    #[test]
    fn prctl_flags_map_to_allowed_huge_pages() {
        assert_eq!(
            [0, 1, 3].map(AllowedHugePages::from_flags),
            [AllowedHugePages::All, AllowedHugePages::None, AllowedHugePages::WhereAdvised]
        );
    }

    /// A byte in a page without access must be reported as unreadable, and the check must raise no signal.
    #[test]
    fn an_unreadable_byte_raises_no_signal() {
        let scratch = Scratch::new(1).unwrap();
        assert!(scratch.is_readable(0));
        // SAFETY: the range belongs to `scratch`, and no code accesses it before it is dropped.
        check_result(unsafe { libc::mprotect(scratch.addr as *mut c_void, BLOCK_BYTES, libc::PROT_NONE) }).unwrap();
        assert!(!scratch.is_readable(0));
    }

    /// `run_in_child` must return the result of its child. A child that is killed must lead to an error.
    #[test]
    fn results_of_children_are_returned() {
        assert_eq!(run_in_child(|| 7).unwrap(), 7);
        let killed = run_in_child(|| {
            // SAFETY: the call only ends the child.
            unsafe { libc::raise(libc::SIGKILL) };
            0
        });
        assert!(killed.unwrap_err().to_string().contains("signal 9"));
    }

    /// After a trial that creates a file in a folder, the folder must be empty.
    #[test]
    fn trials_leave_no_file() {
        let folder = tempfile::tempdir().unwrap();
        assert!(try_folder(folder.path()).is_ok());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        assert!(try_folder(&folder.path().join("none")).is_err());
    }
}
