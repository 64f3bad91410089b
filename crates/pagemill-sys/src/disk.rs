//! Files and block devices: opened direct or buffered, read and written at given offsets.
//!
//! A [`Disk`] is one open file description. The kernel may transfer fewer bytes than requested; callers must then
//! transfer the rest. Opening does not block, even if the path has become a pipe or a terminal.
#![allow(unsafe_code)] // transfers by address

use crate::file::{self, Fd};
use crate::result::retry_interrupted;
use rustix::fs::{self, AtFlags, FallocateFlags, FileType, FlockOperation, Mode, OFlags, SeekFrom, StatxFlags};
use rustix::io::{Errno, retry_on_intr};
use rustix::mm::{Advice, madvise};
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Type of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    Regular,
    Device,
    Folder,
    /// A pipe, a socket, a terminal.
    Other,
}

/// Identity and properties of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    pub kind: FileKind,
    /// For a device its own number; for a file the number of the device that contains it.
    pub device: u64,
    /// Inode number of a file; 0 for a device, which may have several inodes.
    pub inode: u64,
    /// Preferred transfer size of the file system.
    pub block_bytes: usize,
}

/// Alignment that direct transfers (`O_DIRECT`) with a file require.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// Alignment of the buffer's address, in bytes.
    pub memory: usize,
    /// Alignment of the offset in the file and of the length, in bytes.
    pub offset: usize,
}

/// How to open a file. By default an existing file is opened read-only, through the kernel's page cache.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// The file is also opened for writing.
    pub is_writable: bool,
    /// The file is created. Opening an existing file fails.
    pub is_new: bool,
    /// Transfers bypass the kernel's page cache (`O_DIRECT`).
    pub is_direct: bool,
    /// Opening a block device that the system uses, such as a mounted one, fails.
    pub is_exclusive: bool,
}

/// An open file or block device.
pub struct Disk(Fd);

impl Disk {
    /// Opens the file at `path`.
    ///
    /// # Errors
    ///
    /// Errors of `open`: `EINVAL` where the file system refuses direct transfers, `EBUSY` for a device in use.
    pub fn open(path: &CStr, options: Options) -> io::Result<Self> {
        let direct = if options.is_direct { OFlags::DIRECT } else { OFlags::empty() };
        let mut flags = direct | OFlags::NONBLOCK | OFlags::NOCTTY;
        flags |= if options.is_writable { OFlags::RDWR } else { OFlags::RDONLY };
        flags.set(OFlags::CREATE, options.is_new);
        flags.set(OFlags::EXCL, options.is_new || options.is_exclusive);
        let disk = Self(file::open(path, flags, Mode::from_raw_mode(0o666))?);
        // `O_NONBLOCK` is cleared: with it an io_uring request would fail with `EAGAIN` instead of waiting for the
        // device.
        fs::fcntl_setfl(&disk, direct)?;
        Ok(disk)
    }

    /// Takes ownership of an open descriptor, whose flags stay unchanged.
    pub fn from_descriptor(descriptor: OwnedFd) -> Self {
        Self(descriptor.into())
    }

    /// Returns the number of the file descriptor.
    pub fn number(&self) -> i32 {
        self.0.descriptor_number()
    }

    /// Returns the file's type, identity and preferred transfer size.
    ///
    /// # Errors
    ///
    /// Errors of `fstat`.
    pub fn facts(&self) -> io::Result<Facts> {
        let stat = fs::fstat(self)?;
        let kind = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => FileKind::Regular,
            FileType::BlockDevice => FileKind::Device,
            FileType::Directory => FileKind::Folder,
            _ => FileKind::Other,
        };
        let (device, inode) = if kind == FileKind::Device { (stat.st_rdev, 0) } else { (stat.st_dev, stat.st_ino) };
        Ok(Facts { kind, device, inode, block_bytes: stat.st_blksize as usize })
    }

    /// Returns the current length of a file or a device.
    ///
    /// # Errors
    ///
    /// Errors of `lseek`.
    pub fn size_bytes(&self) -> io::Result<u64> {
        // The changed file position does not matter: every transfer passes its own offset.
        Ok(fs::seek(self, SeekFrom::End(0))?)
    }

    /// Returns the alignment of direct transfers to this file; `Ok(None)` if the file supports no direct transfers.
    /// Needs Linux 6.1.
    ///
    /// # Errors
    ///
    /// Errors of `statx`; `EOPNOTSUPP` if the kernel or the file system does not report the alignment.
    pub fn direct_alignment(&self) -> io::Result<Option<Alignment>> {
        let stat = fs::statx(self, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)?;
        if !StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::DIOALIGN) {
            return Err(Errno::OPNOTSUPP.into());
        }
        let (memory, offset) = (stat.stx_dio_mem_align as usize, stat.stx_dio_offset_align as usize);
        Ok((offset > 0).then_some(Alignment { memory: memory.max(1), offset }))
    }

    /// Returns the logical sector size of a block device.
    ///
    /// # Errors
    ///
    /// `ENOTTY` for a file that is not a block device.
    pub fn sector_bytes(&self) -> io::Result<usize> {
        Ok(fs::ioctl_blksszget(self)? as usize)
    }

    /// Makes one read call. Returns the number of bytes read; 0 at the end of the file.
    ///
    /// # Errors
    ///
    /// Errors of `pread`.
    pub fn read_at(&self, to: &mut [u8], offset: u64) -> io::Result<usize> {
        // SAFETY: `to` is borrowed exclusively, so no other code accesses it.
        unsafe { read_at(self.number(), to.as_mut_ptr() as usize, to.len(), offset) }
    }

    /// Makes one write call. Returns the number of bytes written.
    ///
    /// # Errors
    ///
    /// Errors of `pwrite`. `EFBIG` beyond this process's file size limit.
    pub fn write_at(&self, from: &[u8], offset: u64) -> io::Result<usize> {
        // SAFETY: `from` is borrowed, so its bytes are readable.
        unsafe { write_at(self.number(), from.as_ptr() as usize, from.len(), offset) }
    }

    /// Truncates the file, or extends it with zeros.
    ///
    /// # Errors
    ///
    /// Errors of `ftruncate`: `EINVAL` for devices.
    pub fn set_size(&self, size_bytes: u64) -> io::Result<()> {
        if size_bytes > i64::MAX as u64 {
            return Err(Errno::FBIG.into());
        }
        Ok(retry_on_intr(|| fs::ftruncate(self, size_bytes))?)
    }

    /// Frees the space of a range of the file, which reads zero afterwards. The length does not change. A device
    /// discards or zeroes the range.
    ///
    /// # Errors
    ///
    /// Errors of `fallocate`: `EOPNOTSUPP` where the file system cannot punch holes, `EINVAL` for an empty range.
    pub fn punch_hole(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(retry_on_intr(|| fs::fallocate(self, how, offset, len_bytes))?)
    }

    /// Blocks until the file's data, and the metadata needed to read them, are on the device.
    ///
    /// # Errors
    ///
    /// Errors of `fdatasync`, including write errors since the last call.
    pub fn sync_data(&self) -> io::Result<()> {
        Ok(retry_on_intr(|| fs::fdatasync(self))?)
    }

    /// As [`Disk::sync_data`], but also waits until the rest of the file's metadata is on the device.
    ///
    /// # Errors
    ///
    /// Errors of `fsync`.
    pub fn sync_all(&self) -> io::Result<()> {
        Ok(retry_on_intr(|| fs::fsync(self))?)
    }

    /// Tries to acquire the file's advisory lock (`flock`), which only one open file description of all processes can
    /// have. Returns whether this open file description has the lock now. A fork child that inherited the descriptor
    /// shares the lock.
    ///
    /// # Errors
    ///
    /// Errors of `flock`: `ENOLCK`, or `EOPNOTSUPP` where the file system has no locks.
    pub fn try_lock(&self) -> io::Result<bool> {
        match retry_on_intr(|| fs::flock(self, FlockOperation::NonBlockingLockExclusive)) {
            Ok(()) => Ok(true),
            Err(Errno::WOULDBLOCK) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Releases the lock of [`Disk::try_lock`], also for fork children that inherited the descriptor.
    pub fn unlock(&self) {
        let _ = fs::flock(self, FlockOperation::Unlock);
    }
}

impl AsFd for Disk {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Makes changes of a folder durable, such as the entry of a new file.
///
/// # Errors
///
/// Errors of `open` or `fsync`.
pub fn sync_folder(path: &CStr) -> io::Result<()> {
    Disk(file::open(path, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())?).sync_all()
}

/// As [`Disk::read_at`], for the file with the descriptor number `descriptor` and the buffer at the address `addr`.
///
/// # Errors
///
/// Errors of `pread`.
///
/// # Safety
///
/// The `len_bytes` from `addr` on must be writable, and no reference to them may exist.
pub unsafe fn read_at(descriptor: i32, addr: usize, len_bytes: usize, offset: u64) -> io::Result<usize> {
    // A direct call, because rustix's `pread` takes a slice, and another thread may change these bytes meanwhile.
    // SAFETY: the call writes at most `len_bytes` at `addr`, which the caller allows.
    retry_interrupted(|| unsafe { libc::syscall(libc::SYS_pread64, descriptor, addr, len_bytes, offset) })
}

/// As [`Disk::write_at`], for the file with the descriptor number `descriptor` and the bytes at the address `addr`.
///
/// # Errors
///
/// Errors of `pwrite`.
///
/// # Safety
///
/// The `len_bytes` from `addr` on must be readable.
pub unsafe fn write_at(descriptor: i32, addr: usize, len_bytes: usize, offset: u64) -> io::Result<usize> {
    // A direct call, for the same reason as in `read_at`. SAFETY: the call reads at most `len_bytes` at `addr`, which
    // the caller allows.
    retry_interrupted(|| unsafe { libc::syscall(libc::SYS_pwrite64, descriptor, addr, len_bytes, offset) })
}

/// Excludes the `len_bytes` from `addr` on from the memory of fork children if `is_kept` is true (`MADV_DONTFORK`);
/// else includes them again. Used for pages that a device writes to, because a fork must not copy these pages.
///
/// # Errors
///
/// Errors of `madvise`: `ENOMEM` for addresses that are not mapped.
pub fn keep_from_children(addr: usize, len_bytes: usize, is_kept: bool) -> io::Result<()> {
    let advice = if is_kept { Advice::LinuxDontFork } else { Advice::LinuxDoFork };
    // SAFETY: the advice concerns fork children only; contents do not change.
    Ok(unsafe { madvise(addr as *mut _, len_bytes, advice) }?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CString;

    fn path_in(folder: &tempfile::TempDir, name: &str) -> CString {
        CString::new(folder.path().join(name).to_str().unwrap()).unwrap()
    }

    /// Bytes that were written at an offset must be read back from that offset. A read at the end of the file must
    /// return 0 bytes, and the reported sizes must be correct.
    #[test]
    fn files_are_read_and_written_at_offsets() {
        let folder = tempfile::tempdir().unwrap();
        let at = path_in(&folder, "file");
        let new = Options { is_writable: true, is_new: true, ..Options::default() };
        let disk = Disk::open(&at, new).unwrap();
        assert_eq!(Disk::open(&at, new).err().unwrap().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(disk.write_at(b"bytes", 3).unwrap(), 5);
        let mut bytes = [7; 10];
        assert_eq!(disk.read_at(&mut bytes, 1).unwrap(), 7);
        assert_eq!(&bytes[..8], b"\0\0bytes\x07");
        assert_eq!((disk.size_bytes().unwrap(), disk.read_at(&mut bytes, 8).unwrap()), (8, 0));
        disk.set_size(4).unwrap();
        disk.sync_data().unwrap();
        disk.sync_all().unwrap();
        assert_eq!(disk.size_bytes().unwrap(), 4);
        assert_eq!(disk.facts().unwrap().kind, FileKind::Regular);
        sync_folder(&path_in(&folder, "")).unwrap();
    }

    /// A second open file description must get the lock only after the first has released it.
    #[test]
    fn only_one_file_description_has_the_lock() {
        let folder = tempfile::tempdir().unwrap();
        let at = path_in(&folder, "file");
        std::fs::write(at.to_str().unwrap(), b"").unwrap();
        let open = || Disk::open(&at, Options::default()).unwrap();
        let (first, second) = (open(), open());
        assert!(first.try_lock().unwrap() && !second.try_lock().unwrap());
        first.unlock();
        assert!(second.try_lock().unwrap());
    }

    /// Opening a pipe must not wait for a writer. A pipe must be reported as `FileKind::Other`, and a folder as
    /// `FileKind::Folder`.
    #[test]
    fn a_pipe_opens_without_waiting() {
        let folder = tempfile::tempdir().unwrap();
        let at = path_in(&folder, "pipe");
        // SAFETY: the path is a C string.
        assert_eq!(unsafe { libc::mkfifo(at.as_ptr(), 0o600) }, 0);
        assert_eq!(Disk::open(&at, Options::default()).unwrap().facts().unwrap().kind, FileKind::Other);
        assert_eq!(Disk::open(c"/", Options::default()).unwrap().facts().unwrap().kind, FileKind::Folder);
    }
}
