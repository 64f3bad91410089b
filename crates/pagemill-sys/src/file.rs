//! Operations on small files that do not allocate: reads, shared mappings, and paths in fixed buffers.
//!
//! The operations make direct system calls (rustix): the C library's `open`, `read` and `close` are cancellation
//! points, and callers may hold locks.
#![allow(unsafe_code)] // close, mmap

use crate::mem;
use rustix::fs::{self, CWD, FileType, Mode, OFlags, Stat};
use rustix::io::{Errno, retry_on_intr};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use std::ffi::CStr;
use std::fmt;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::ptr;

/// A text of at most `N - 1` bytes with a terminating zero. A longer text is truncated, and `is_cut` is set.
#[derive(Clone, PartialEq, Eq)]
pub struct Text<const N: usize> {
    bytes: [u8; N],
    len: usize,
    is_cut: bool,
}

impl<const N: usize> Text<N> {
    pub const fn new() -> Self {
        Self { bytes: [0; N], len: 0, is_cut: false }
    }

    /// Formats the arguments into a new text. Returns `None` if the result does not fit into `N - 1` bytes.
    pub fn format(arguments: fmt::Arguments<'_>) -> Option<Self> {
        let mut text = Self::new();
        let _ = fmt::Write::write_fmt(&mut text, arguments);
        (!text.is_cut).then_some(text)
    }

    /// Appends a byte if the buffer has room for it. Otherwise marks the text as truncated.
    pub fn push_byte(&mut self, byte: u8) {
        if self.len + 1 < N {
            self.bytes[self.len] = byte;
            self.len += 1;
        } else {
            self.is_cut = true;
        }
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the text; an empty one if the bytes are not UTF-8.
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(self.as_bytes()).unwrap_or("")
    }

    /// Returns the text as a C string, up to the first zero byte.
    pub fn as_c_str(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes).unwrap_or(c"")
    }
}

impl<const N: usize> Default for Text<N> {
    fn default() -> Self {
        Self::new()
    }
}

impl<const N: usize> fmt::Write for Text<N> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.bytes().for_each(|byte| self.push_byte(byte));
        Ok(())
    }
}

/// A path in a buffer that is long enough for every path that Pagemill creates.
pub type Path = Text<512>;

/// A descriptor that is closed on drop by a direct system call. An `OwnedFd` calls the C library's `close`.
pub struct Fd(ManuallyDrop<OwnedFd>);

impl Fd {
    /// Returns the number of the descriptor.
    pub(crate) fn descriptor_number(&self) -> i32 {
        self.0.as_raw_fd()
    }
}

impl From<OwnedFd> for Fd {
    fn from(descriptor: OwnedFd) -> Self {
        Self(ManuallyDrop::new(descriptor))
    }
}

impl AsFd for Fd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for Fd {
    fn drop(&mut self) {
        // SAFETY: the field is not used again.
        let number = unsafe { ManuallyDrop::take(&mut self.0) }.into_raw_fd();
        // SAFETY: the descriptor belonged to this value and is not used again.
        unsafe { rustix::io::close(number) };
    }
}

/// Opens a file with `O_CLOEXEC`. Repeats the call if a signal interrupts it.
pub(crate) fn open(path: &CStr, flags: OFlags, mode: Mode) -> io::Result<Fd> {
    // A path of another type than `CStr` could be copied to the heap.
    Ok(retry_on_intr(|| fs::openat(CWD, path, flags | OFlags::CLOEXEC, mode))?.into())
}

/// Reads a file from its start into `buffer`. Bytes beyond the buffer's length are not read.
///
/// # Errors
///
/// Errors of `open` or `read`.
pub fn read<'buffer>(path: &CStr, buffer: &'buffer mut [u8]) -> io::Result<&'buffer [u8]> {
    let len = read_all(&open(path, OFlags::RDONLY, Mode::empty())?, buffer)?;
    Ok(&buffer[..len])
}

/// Reads the first record of an open file of `/proc`, such as `/proc/PID/stat`, with one `pread`. The kernel returns a
/// record as a whole. Does not move the position of the descriptor.
pub(crate) fn read_record<'buffer>(fd: &Fd, buffer: &'buffer mut [u8]) -> io::Result<&'buffer [u8]> {
    let len = retry_on_intr(|| rustix::io::pread(fd, &mut *buffer, 0))?;
    Ok(&buffer[..len])
}

/// Reads until `buffer` is full or the file ends. Returns the number of bytes.
fn read_all(fd: &Fd, buffer: &mut [u8]) -> io::Result<usize> {
    let mut len = 0;
    while len < buffer.len() {
        match read_some(fd, &mut buffer[len..])? {
            0 => break,
            count => len += count,
        }
    }
    Ok(len)
}

/// Reads at least one byte, unless the file has ended. Returns the number of bytes. Repeats the call if a signal
/// interrupts it.
fn read_some(fd: &Fd, buffer: &mut [u8]) -> io::Result<usize> {
    Ok(retry_on_intr(|| rustix::io::read(fd, &mut *buffer))?)
}

/// Calls `act` for each line of a text file until `act` returns a value. Skips lines that are longer than the buffer (1
/// KiB). Passes a line that is not UTF-8 as an empty one.
///
/// # Errors
///
/// Errors of `open` or `read`.
pub fn find_line<T>(path: &CStr, mut act: impl FnMut(&str) -> Option<T>) -> io::Result<Option<T>> {
    let fd = open(path, OFlags::RDONLY, Mode::empty())?;
    let mut buffer = [0u8; 1024];
    let (mut len, mut is_tail) = (0, false);
    loop {
        let count = read_some(&fd, &mut buffer[len..])?;
        len += count;
        let mut start = 0;
        while let Some(end) = buffer[start..len].iter().position(|byte| *byte == b'\n').map(|at| start + at) {
            // If the start of a line did not fit into the buffer, its end is skipped.
            let line = std::str::from_utf8(&buffer[start..end]).unwrap_or("");
            if !std::mem::take(&mut is_tail)
                && let Some(found) = act(line)
            {
                return Ok(Some(found));
            }
            start = end + 1;
        }
        if count == 0 {
            let line = std::str::from_utf8(&buffer[start..len]).unwrap_or("");
            return Ok(if is_tail || line.is_empty() { None } else { act(line) });
        }
        buffer.copy_within(start..len, 0);
        len -= start;
        if len == buffer.len() {
            (len, is_tail) = (0, true);
        }
    }
}

/// Reads a file that contains one number, or the word `max`, which becomes `u64::MAX`.
///
/// # Errors
///
/// Errors of `open` or `read`; `InvalidData` for any other content.
pub fn read_number(path: &CStr) -> io::Result<u64> {
    let mut buffer = [0u8; 64];
    let text = std::str::from_utf8(read(path, &mut buffer)?).unwrap_or("").trim();
    match text {
        "max" => Ok(u64::MAX),
        text => text.parse().map_err(|_| io::ErrorKind::InvalidData.into()),
    }
}

/// How to open a file that processes share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The file must not exist. The call creates it with mode 0600 and the given length.
    Create,
    /// The file must exist, have at least the given length and belong to this user.
    Update,
}

/// Flags for a path at which another user may have placed another kind of file. Opening then refuses a symbolic link,
/// does not wait for the other end of a pipe, and does not make a terminal the controlling terminal.
const UNTRUSTED_PATH_FLAGS: OFlags = OFlags::NOFOLLOW.union(OFlags::NONBLOCK).union(OFlags::NOCTTY);

/// Maps a file that processes share. Returns the address.
///
/// # Errors
///
/// Errors of the system calls. `EINVAL` for a file that is too short; `EACCES` for one that is not a regular file of
/// this user.
pub fn map_shared(path: &CStr, len_bytes: usize, access: Access) -> io::Result<usize> {
    assert!(len_bytes > 0);
    let flags = match access {
        Access::Create => OFlags::RDWR | OFlags::CREATE | OFlags::EXCL,
        Access::Update => OFlags::RDWR,
    };
    if access == Access::Create && crate::process::file_size_limit() < len_bytes as u64 {
        return Err(Errno::FBIG.into());
    }
    // `O_NONBLOCK` is set because another user may have placed a pipe at this path, and opening it must not block.
    let fd = open(path, flags | UNTRUSTED_PATH_FLAGS, Mode::RUSR | Mode::WUSR)?;
    if access == Access::Create {
        // The file's memory is allocated now: on a full file system, access to a sparse file would end the process with
        // SIGBUS.
        let result = loop {
            // SAFETY: the descriptor is open.
            match unsafe { libc::posix_fallocate(fd.descriptor_number(), 0, len_bytes as libc::off_t) } {
                libc::EINTR => {}
                result => break result,
            }
        };
        if result != 0 {
            remove(path);
            return Err(io::Error::from_raw_os_error(result));
        }
    } else {
        check_owner_and_length(&fd, len_bytes)?;
    }
    // SAFETY: without MAP_FIXED a new mapping touches no existing memory.
    Ok(unsafe { mmap(ptr::null_mut(), len_bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &fd, 0) }?
        as usize)
}

/// A regular file that other processes may be changing, open for reading.
pub struct PublishedFile(Fd);

impl PublishedFile {
    /// Opens the file at `path`. `owner` is the required owner of the file. `None` requires this user as the owner;
    /// root then accepts any owner.
    ///
    /// # Errors
    ///
    /// Errors of `open`. `ELOOP` for a symbolic link. `EACCES` for a file that is not regular, or for another user's file.
    pub fn open(path: &CStr, owner: Option<u32>) -> io::Result<Self> {
        let fd = open(path, OFlags::RDONLY | UNTRUSTED_PATH_FLAGS, Mode::empty())?;
        let found = check_owner_and_length(&fd, 0)?.st_uid;
        if owner.is_some_and(|owner| owner != found) { Err(Errno::ACCESS.into()) } else { Ok(Self(fd)) }
    }

    /// Reads the first `buffer.len()` bytes. Later changes to the file have no effect on the bytes in `buffer`.
    ///
    /// # Errors
    ///
    /// Errors of `pread`. `EINVAL` for a file that is too short.
    pub fn read(&self, buffer: &mut [u8]) -> io::Result<()> {
        let mut len = 0;
        while len < buffer.len() {
            match retry_on_intr(|| rustix::io::pread(&self.0, &mut buffer[len..], len as u64))? {
                0 => return Err(Errno::INVAL.into()),
                count => len += count,
            }
        }
        Ok(())
    }

    /// Returns whether the file has been removed since it was opened.
    pub fn is_removed(&self) -> bool {
        fs::fstat(&self.0).is_ok_and(|stat| stat.st_nlink == 0)
    }
}

/// Returns whether `path` is a directory (not a symbolic link) of user `owner`, without permissions for group and
/// others.
pub fn is_private_dir(path: &CStr, owner: u32) -> bool {
    fs::lstat(path)
        .is_ok_and(|stat| is_of_type(&stat, FileType::Directory) && stat.st_uid == owner && stat.st_mode & 0o077 == 0)
}

/// Returns the id of the user that owns the folder or file at `path`; `None` if it cannot be read.
pub fn owner(path: &CStr) -> Option<u32> {
    fs::stat(path).ok().map(|stat| stat.st_uid)
}

fn is_of_type(stat: &Stat, kind: FileType) -> bool {
    FileType::from_raw_mode(stat.st_mode) == kind
}

/// Returns the properties of a file. Rejects a file that is not a regular file of this user (for root: of any user), and
/// a file shorter than `len_bytes`.
fn check_owner_and_length(fd: &Fd, len_bytes: usize) -> io::Result<Stat> {
    let (stat, user) = (fs::fstat(fd)?, crate::process::user_id());
    if !is_of_type(&stat, FileType::RegularFile) || (stat.st_uid != user && user != 0) {
        return Err(Errno::ACCESS.into());
    }
    if (stat.st_size as u64) < len_bytes as u64 {
        return Err(Errno::INVAL.into());
    }
    Ok(stat)
}

/// Maps zeroed private memory at `fixed`, in place of the existing mapping.
///
/// # Errors
///
/// Errors of `mmap`.
///
/// # Safety
///
/// `fixed..fixed + len_bytes` must be mapped, and no code may need its contents.
pub unsafe fn map_private_over(fixed: usize, len_bytes: usize) -> io::Result<()> {
    let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::FIXED);
    // SAFETY: guaranteed by the caller.
    unsafe { mem::map(fixed, len_bytes, access, flags) }.map(drop)
}

/// Unmaps memory that [`map_shared`] mapped.
///
/// # Safety
///
/// No code may use the mapping any more.
pub unsafe fn unmap(addr: usize, len_bytes: usize) {
    // SAFETY: guaranteed by the caller.
    let _ = unsafe { rustix::mm::munmap(addr as *mut _, len_bytes) };
}

/// Creates a folder with mode 0700. Accepts an existing folder that only this user can access.
///
/// # Errors
///
/// Errors of `mkdir`; `EACCES` if the path exists and is not such a folder.
pub fn make_private_dir(path: &CStr) -> io::Result<()> {
    match fs::mkdir(path, Mode::RWXU) {
        Err(Errno::EXIST) if is_private_dir(path, crate::process::user_id()) => Ok(()),
        Err(Errno::EXIST) => Err(Errno::ACCESS.into()),
        result => Ok(result?),
    }
}

/// A file that another process created, and into which this process writes an answer. Before the answer, the file is
/// empty or contains a command.
pub struct AnswerFile(Fd);

impl AnswerFile {
    /// Opens the empty file at `path`.
    ///
    /// # Errors
    ///
    /// Errors of `open`. `EACCES` for anything but an empty regular file with one link that belongs to this effective
    /// user. So an unprivileged user cannot make a privileged process write to a file that the unprivileged user may
    /// not write.
    pub fn open(path: &CStr) -> io::Result<Self> {
        Self::open_with_len(path, OFlags::WRONLY, 0).map(|(file, _)| file)
    }

    /// Opens a file that contains exactly `command.len()` bytes, and reads them into `command`.
    ///
    /// # Errors
    ///
    /// As [`AnswerFile::open`]; also `EACCES` if the group or others may write the file.
    pub fn open_with(path: &CStr, command: &mut [u8]) -> io::Result<Self> {
        let (file, stat) = Self::open_with_len(path, OFlags::RDWR, command.len())?;
        if Mode::from_raw_mode(stat.st_mode).intersects(Mode::WGRP | Mode::WOTH) {
            return Err(Errno::ACCESS.into());
        }
        match read_some(&file.0, command)? {
            count if count == command.len() => Ok(file),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Opens a regular file of this user with one link and exactly `len` bytes.
    fn open_with_len(path: &CStr, access: OFlags, len: usize) -> io::Result<(Self, Stat)> {
        let fd = open(path, access | UNTRUSTED_PATH_FLAGS, Mode::empty())?;
        let stat = fs::fstat(&fd)?;
        let is_own = stat.st_uid == crate::process::user_id();
        let is_plain = is_of_type(&stat, FileType::RegularFile) && stat.st_nlink == 1;
        if is_own && is_plain && usize::try_from(stat.st_size) == Ok(len) {
            Ok((Self(fd), stat))
        } else {
            Err(Errno::ACCESS.into())
        }
    }

    /// Writes all of `bytes` at `offset`.
    ///
    /// # Errors
    ///
    /// Errors of `write`; `EFBIG` beyond this process's file size limit.
    pub fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        // The limit is checked first, because the kernel would send a fatal signal.
        if offset.saturating_add(bytes.len() as u64) > crate::process::file_size_limit() {
            return Err(Errno::FBIG.into());
        }
        let mut done = 0;
        while done < bytes.len() {
            let (rest, at) = (&bytes[done..], offset + done as u64);
            match retry_on_intr(|| rustix::io::pwrite(&self.0, rest, at))? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                count => done += count,
            }
        }
        Ok(())
    }
}

/// Returns whether a file exists at `path`.
pub fn exists(path: &CStr) -> bool {
    fs::access(path, fs::Access::EXISTS).is_ok()
}

/// Removes a file. Errors are ignored, including that of a missing file.
pub fn remove(path: &CStr) {
    let _ = fs::unlink(path);
}

/// Writes to standard error. Errors are ignored.
pub fn write_stderr(bytes: &[u8]) {
    // SAFETY: the program should leave this descriptor open. If it is closed, the call returns `EBADF`.
    let _ = rustix::io::write(unsafe { BorrowedFd::borrow_raw(libc::STDERR_FILENO) }, bytes);
}

/// Returns the value of an environment variable, without allocating.
///
/// The reference is valid until the program changes that variable. Callers read the value at start and keep no
/// reference.
pub fn environment(name: &CStr) -> Option<&'static CStr> {
    // SAFETY: `name` is a C string; the result points into the environment.
    let value = unsafe { libc::getenv(name.as_ptr()) };
    // SAFETY: getenv returns null or a C string.
    (!value.is_null()).then(|| unsafe { CStr::from_ptr(value) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// A text that is too long must be truncated, and `format` must return `None` for it.
    #[test]
    fn long_text_is_truncated() {
        let mut text = Text::<8>::new();
        let _ = fmt::Write::write_str(&mut text, "0123456789");
        assert_eq!(text.as_str(), "0123456");
        assert!(Text::<8>::format(format_args!("0123456789")).is_none());
    }

    /// `AnswerFile::open` must accept only an empty regular file of this user with one link. `open_with` must accept
    /// only such a file that contains exactly the command.
    #[test]
    fn answer_files_are_checked() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| Path::format(format_args!("{}/{name}", folder.path().display())).unwrap();
        let open = |name: &str| AnswerFile::open(path(name).as_c_str());
        std::fs::write(path("blank").as_str(), b"").unwrap();
        open("blank").unwrap().write_at(b"second", 5).unwrap();
        assert_eq!(std::fs::read(path("blank").as_str()).unwrap(), b"\0\0\0\0\0second");
        assert!(open("blank").is_err(), "it is not empty any more");
        std::fs::write(path("file").as_str(), b"").unwrap();
        std::os::unix::fs::symlink(path("file").as_str(), path("link").as_str()).unwrap();
        assert!(open("link").is_err() && open("missing").is_err() && open("").is_err());
        std::fs::hard_link(path("file").as_str(), path("second").as_str()).unwrap();
        assert!(open("file").is_err() && open("second").is_err());
        // SAFETY: the path is a C string.
        assert_eq!(unsafe { libc::mkfifo(path("pipe").as_c_str().as_ptr(), 0o600) }, 0);
        assert!(open("pipe").is_err());
        let mut command = [0; 6];
        std::fs::write(path("command").as_str(), b"shrink").unwrap();
        let open_with = |command: &mut [u8]| AnswerFile::open_with(path("command").as_c_str(), command);
        open_with(&mut command).unwrap().write_at(b"done", 6).unwrap();
        assert_eq!((&command, std::fs::read(path("command").as_str()).unwrap()), (b"shrink", b"shrinkdone".to_vec()));
        assert!(open_with(&mut command).is_err(), "it contains an answer already");
        std::fs::write(path("command").as_str(), b"shrink").unwrap();
        std::fs::set_permissions(path("command").as_str(), std::fs::Permissions::from_mode(0o620)).unwrap();
        assert!(open_with(&mut command).is_err(), "others may have written it");
        assert!(exists(path("pipe").as_c_str()) && !exists(path("missing").as_c_str()));
    }

    /// `map_shared` must fail to create a file that exists, and to map a file that is too short. Two mappings of a file
    /// must show the same bytes.
    #[test]
    fn shared_files_are_checked() {
        let folder = tempfile::tempdir().unwrap();
        let path = Path::format(format_args!("{}/page", folder.path().display())).unwrap();
        let made = map_shared(path.as_c_str(), 4096, Access::Create).unwrap();
        assert!(map_shared(path.as_c_str(), 4096, Access::Create).is_err(), "made twice");
        assert!(map_shared(path.as_c_str(), 8192, Access::Update).is_err(), "too short");
        let seen = map_shared(path.as_c_str(), 4096, Access::Update).unwrap();
        // SAFETY: both are mappings of the test.
        unsafe {
            (made as *mut u64).write(7);
            assert_eq!((seen as *const u64).read_volatile(), 7);
            unmap(made, 4096);
            unmap(seen, 4096);
        }
    }
}
