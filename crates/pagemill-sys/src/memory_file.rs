//! Memory files: sparse files without a name, whose bytes are memory. Several mappings of one process can share them.
//!
//! A file lies in the kernel's own file system for shared memory (memfd), or in a private tmpfs that has huge pages
//! ([`private_tmpfs`]). Pages are allocated by [`populate`] or [`populate_huge`], and freed by
//! [`punch`]. The kernel has no room in advance for a sparse file: an access to a page that was not populated raises
//! `SIGBUS` if there is no memory for the page.
//!
//! [`populate`]: crate::mem::populate
#![allow(unsafe_code)] // maps files, frees their pages

use crate::mem::{self, Backing};
use crate::{file, private_tmpfs, process, window};
use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use rustix::io::{Errno, fcntl_dupfd_cloexec, retry_on_intr};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap};
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed};

/// Setting that allows huge pages in files of [`FileSystem::Memfd`].
const SHMEM_ENABLED_PATH: &CStr = c"/sys/kernel/mm/transparent_hugepage/shmem_enabled";

/// Alignment of mappings in which huge pages are possible.
const BLOCK_ALIGN_BYTES: usize = 2 << 20;

/// The file system in which a memory file lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileSystem {
    /// The kernel's own file system for shared memory (`memfd_create`). The setting `shmem_enabled` of the machine
    /// allows huge pages; `MADV_COLLAPSE` (Linux 6.1) makes them unless the setting is `deny`.
    Memfd,
    /// A tmpfs that only this process can reach. Its files have huge pages where they are advised.
    Tmpfs,
}

/// A sparse file without a name, whose bytes are memory.
///
/// The program may close all descriptors that it does not know, and other files may get their numbers. So each use of
/// the descriptor checks that it still refers to this file. [`punch`] needs no descriptor.
pub struct MemoryFile {
    /// Number of the descriptor; -1 after [`MemoryFile::close`].
    descriptor: AtomicI32,
    /// Device and inode number of the file.
    identity: (u64, u64),
    len_bytes: usize,
    file_system: FileSystem,
    /// Address of [`MemoryFile::readable_mapping`]; 0 before it is created.
    readable_mapping: AtomicUsize,
}

impl MemoryFile {
    /// Creates a file of `len_bytes` that has no pages. If huge pages are wanted, selects the file system that gets them
    /// at the lowest cost: memfd if the machine's settings allow huge pages there, else a private tmpfs, else memfd.
    ///
    /// Cost: some 20 us; for a tmpfs 0.1 ms, or without the right to mount 1 ms.
    ///
    /// # Errors
    ///
    /// `EFBIG` if the length is above the process's file size limit; errors of `memfd_create`, `fcntl`, `ftruncate` and
    /// `fstat`.
    pub fn create(len_bytes: usize, is_huge_wanted: bool) -> io::Result<Self> {
        if is_huge_wanted
            && is_tmpfs_preferred()
            && let Ok(file) = Self::create_in(FileSystem::Tmpfs, len_bytes)
        {
            return Ok(file);
        }
        Self::create_in(FileSystem::Memfd, len_bytes)
    }

    /// As [`MemoryFile::create`], in the given file system.
    ///
    /// # Errors
    ///
    /// As [`MemoryFile::create`]. For a tmpfs also `EPERM`, `ENOSPC` or `ENOSYS` if the process may neither mount nor
    /// create a user namespace.
    pub fn create_in(file_system: FileSystem, len_bytes: usize) -> io::Result<Self> {
        let descriptor = match file_system {
            FileSystem::Memfd => memfd_create(c"pagemill", MemfdFlags::CLOEXEC)?,
            FileSystem::Tmpfs => private_tmpfs::open_file(len_bytes as u64)?,
        };
        Self::from_empty_file(descriptor, len_bytes, file_system)
    }

    /// Sets the length of a new file, and notes its identity.
    fn from_empty_file(descriptor: OwnedFd, len_bytes: usize, file_system: FileSystem) -> io::Result<Self> {
        // The limit is checked first, because the kernel would send a fatal signal.
        if process::file_size_limit() < len_bytes as u64 {
            return Err(Errno::FBIG.into());
        }
        // A program that has closed its standard streams may still write to their numbers.
        let descriptor = match descriptor.as_raw_fd() {
            0..=2 => fcntl_dupfd_cloexec(&descriptor, 3)?,
            _ => descriptor,
        };
        retry_on_intr(|| ftruncate(&descriptor, len_bytes as u64))?;
        let identity = identity_of(&descriptor)?;
        let descriptor = AtomicI32::new(descriptor.into_raw_fd());
        Ok(Self { descriptor, identity, len_bytes, file_system, readable_mapping: AtomicUsize::new(0) })
    }

    pub fn file_system(&self) -> FileSystem {
        self.file_system
    }

    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Maps the `len_bytes` of the file from `offset` on at `addr`, readable and writable, in place of the existing
    /// mapping there. All mappings of a byte show the same memory. Allocates no pages.
    ///
    /// # Errors
    ///
    /// Errors of `mmap`, after which the addresses may be unmapped; `EBADF` if the program has closed the descriptor.
    ///
    /// # Safety
    ///
    /// `addr..addr + len_bytes` must be a reservation of the caller, and no code may need its contents.
    pub unsafe fn map(&self, offset: usize, len_bytes: usize, addr: usize) -> io::Result<()> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.map_with(ProtFlags::READ | ProtFlags::WRITE, offset, len_bytes, addr) }
    }

    /// Returns the address of a mapping of the whole file that can only be read, and that fork children do not get. The
    /// first call creates the mapping, and `use_huge` allows or forbids huge pages in it; later calls ignore `use_huge`. It
    /// exists as long as this value, and is a source for [`window::map_again`].
    ///
    /// # Errors
    ///
    /// As [`MemoryFile::map`]; `ENOMEM` if there are no addresses.
    pub fn readable_mapping(&self, use_huge: bool) -> io::Result<usize> {
        let known = self.readable_mapping.load(Acquire);
        if known != 0 {
            return Ok(known);
        }
        let addr = mem::reserve(self.len_bytes, BLOCK_ALIGN_BYTES, 0)?;
        // SAFETY: the range was reserved above.
        let mapped = unsafe { self.map_with(ProtFlags::READ, 0, self.len_bytes, addr) };
        if mapped.is_ok() {
            window::exclude_from_fork(addr, self.len_bytes);
            if use_huge {
                mem::allow_huge(addr, self.len_bytes);
            } else {
                mem::forbid_huge(addr, self.len_bytes);
            }
            if let Err(other) = self.readable_mapping.compare_exchange(0, addr, AcqRel, Acquire) {
                // SAFETY: no other code knows the addresses.
                unsafe { mem::unreserve(addr, self.len_bytes) };
                return Ok(other);
            }
            return Ok(addr);
        }
        // SAFETY: as above.
        unsafe { mem::unreserve(addr, self.len_bytes) };
        mapped.map(|()| addr)
    }

    /// As [`MemoryFile::map`], with the given access.
    ///
    /// # Safety
    ///
    /// As [`MemoryFile::map`].
    unsafe fn map_with(&self, access: ProtFlags, offset: usize, len_bytes: usize, addr: usize) -> io::Result<()> {
        assert!(offset.checked_add(len_bytes).is_some_and(|end| end <= self.len_bytes), "the range is in the file");
        let descriptor = self.descriptor.load(Relaxed);
        if descriptor < 0 {
            return Err(Errno::BADF.into());
        }
        // SAFETY: the number is that of an open descriptor, or the calls below return an error.
        let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
        if identity_of(descriptor)? != self.identity {
            return Err(Errno::BADF.into());
        }
        let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: guaranteed by the caller.
        unsafe { mmap(addr as *mut _, len_bytes, access, flags, descriptor, offset as u64) }?;
        Ok(())
    }

    /// In a fork child: closes the descriptor, so that the child does not keep the memory of its parent.
    pub fn begin_child(&self) {
        self.close();
        // The child does not have the mapping.
        self.readable_mapping.store(0, Relaxed);
    }

    /// Closes the descriptor; mappings stay.
    fn close(&self) {
        let descriptor = self.descriptor.swap(-1, Relaxed);
        // SAFETY: if the number is open, the call below reads its identity; else it returns an error.
        if descriptor >= 0 && identity_of(unsafe { BorrowedFd::borrow_raw(descriptor) }).ok() == Some(self.identity) {
            // SAFETY: the descriptor belonged to this value and is not used again.
            unsafe { rustix::io::close(descriptor) };
        }
    }
}

impl Drop for MemoryFile {
    fn drop(&mut self) {
        self.close();
        let readable = *self.readable_mapping.get_mut();
        if readable != 0 {
            // SAFETY: the mapping belongs to this value, whose users have ended.
            unsafe { mem::unreserve(readable, self.len_bytes) };
        }
    }
}

/// Returns the device and the inode number of an open file.
fn identity_of(descriptor: impl std::os::fd::AsFd) -> rustix::io::Result<(u64, u64)> {
    fstat(descriptor).map(|stat| (stat.st_dev, stat.st_ino))
}

/// Returns whether only a tmpfs of this process's own gets huge pages at their first access.
fn is_tmpfs_preferred() -> bool {
    let mut buffer = [0; 128];
    // `deny` forbids huge pages in all files in memory. The other words allow them in memfd.
    file::read(SHMEM_ENABLED_PATH, &mut buffer).is_ok_and(|text| text.windows(7).any(|word| word == b"[never]"))
}

/// Frees the pages of the `len_bytes` from `addr` on, which belong to a mapping of a memory file. All mappings of these
/// bytes read zero afterwards.
///
/// # Errors
///
/// `EINVAL` if the program has locked the memory; nothing is freed then.
///
/// # Safety
///
/// No code may need the contents or have a reference to them, in any mapping.
pub unsafe fn punch(addr: usize, len_bytes: usize) -> io::Result<()> {
    // SAFETY: the caller gives up the contents.
    Ok(retry_on_intr(|| unsafe { madvise(addr as *mut _, len_bytes, Advice::LinuxRemove) })?)
}

/// Allocates pages for all of the block of `block_bytes` at the address `block`, which has none, as a huge page if possible. The block belongs to a mapping of a
/// memory file. Returns which kind the kernel allocated.
///
/// Where the kernel allocates no huge page at the first access, the block is collapsed while it has one page. That
/// takes a tenth of the time of a collapse of 512 pages.
///
/// # Errors
///
/// As [`mem::populate`]: `EFAULT` if the kernel has no memory for a page of the file.
pub fn populate_huge(block: usize, block_bytes: usize) -> io::Result<Backing> {
    let first_access = mem::populate_huge(block, block_bytes)?;
    let backing = match first_access {
        Backing::Small if collapse(block, block_bytes).is_ok() => Backing::Huge,
        backing => backing,
    };
    // Also enters a collapsed block into the page table.
    mem::populate(block, block_bytes)?;
    Ok(backing)
}

/// Makes a huge page of the pages of a block; missing pages become zero.
fn collapse(block: usize, block_bytes: usize) -> io::Result<()> {
    // SAFETY: collapsing changes no contents.
    unsafe { mem::advise_by_number(block, block_bytes, libc::MADV_COLLAPSE) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault;
    use std::os::fd::{AsRawFd, FromRawFd};

    const BLOCK_BYTES: usize = 2 << 20;

    /// Returns a file of four blocks in each file system that this process can use.
    fn files() -> impl Iterator<Item = MemoryFile> {
        [FileSystem::Memfd, FileSystem::Tmpfs].into_iter().filter_map(|file_system| {
            let file = MemoryFile::create_in(file_system, 4 * BLOCK_BYTES);
            file.inspect_err(|error| println!("skipped: {file_system:?}: {error}")).ok()
        })
    }

    /// Reserves addresses for `len_bytes` of the file, and maps them.
    fn map(file: &MemoryFile, offset: usize, len_bytes: usize) -> usize {
        let addr = mem::reserve(len_bytes, BLOCK_BYTES, 0).unwrap();
        // SAFETY: the range was reserved above.
        unsafe { file.map(offset, len_bytes, addr) }.unwrap();
        addr
    }

    /// Two mappings of a file must show the same bytes, at the offset that each was mapped with. After `punch`, both
    /// must read zero, and no page may be resident.
    #[test]
    fn mappings_of_a_file_share_its_bytes() {
        for file in files() {
            assert_eq!(file.len_bytes(), 4 * BLOCK_BYTES);
            let (all, third) = (map(&file, 0, 4 * BLOCK_BYTES), map(&file, 2 * BLOCK_BYTES, BLOCK_BYTES));
            let (written, read) = ((all + 2 * BLOCK_BYTES + 8) as *mut u64, (third + 8) as *const u64);
            let backing = populate_huge(all + 2 * BLOCK_BYTES, BLOCK_BYTES).unwrap();
            println!("{:?}: {backing:?}", file.file_system());
            assert_eq!(mem::resident_bytes(all, 4 * BLOCK_BYTES).unwrap(), BLOCK_BYTES);
            // SAFETY: both addresses were mapped above, and no other code knows them.
            unsafe {
                written.write_volatile(7);
                assert_eq!(read.read_volatile(), 7);
                punch(all + 2 * BLOCK_BYTES, BLOCK_BYTES).unwrap();
                assert_eq!(mem::resident_bytes(all, 4 * BLOCK_BYTES).unwrap(), 0);
                assert_eq!((read.read_volatile(), written.read_volatile()), (0, 0));
                mem::unreserve(all, 4 * BLOCK_BYTES);
                mem::unreserve(third, BLOCK_BYTES);
            }
        }
    }

    /// A range of the file is mapped again from the file's mappings, also after its descriptor was closed. The copy of the
    /// readable mapping must show the bytes and refuse writes; the copy of the other one must accept writes.
    #[test]
    fn a_mapping_is_mapped_again_without_a_descriptor() {
        for file in files() {
            let all = map(&file, 0, 4 * BLOCK_BYTES);
            let to = mem::reserve(2 * BLOCK_BYTES, BLOCK_BYTES, 0).unwrap();
            let readable = file.readable_mapping(true).unwrap();
            assert_eq!(file.readable_mapping(true).unwrap(), readable);
            file.close();
            // SAFETY: all addresses were mapped above, and no other code knows them.
            unsafe {
                ((all + BLOCK_BYTES) as *mut u64).write_volatile(7);
                window::map_again(readable + BLOCK_BYTES, BLOCK_BYTES, to).unwrap();
                window::map_again(all + BLOCK_BYTES, BLOCK_BYTES, to + BLOCK_BYTES).unwrap();
                assert_eq!((to as *const u64).read_volatile(), 7);
                ((to + BLOCK_BYTES) as *mut u64).write_volatile(8);
                assert_eq!(((to as *const u64).read_volatile(), (all as *const u64).read_volatile()), (8, 0));
                assert!(fault::is_writable(to + BLOCK_BYTES) && !fault::is_writable(to));
                mem::unreserve(all, 4 * BLOCK_BYTES);
                mem::unreserve(to, 2 * BLOCK_BYTES);
            }
        }
    }

    /// A tmpfs must refuse a page beyond its size with an error, not with a signal.
    #[test]
    fn a_full_file_system_is_an_error() {
        let Ok(descriptor) = private_tmpfs::open_file(BLOCK_BYTES as u64) else { return println!("skipped") };
        let file = MemoryFile::from_empty_file(descriptor, 4 * BLOCK_BYTES, FileSystem::Tmpfs).unwrap();
        let addr = map(&file, 0, 4 * BLOCK_BYTES);
        populate_huge(addr, BLOCK_BYTES).unwrap();
        let error = populate_huge(addr + BLOCK_BYTES, BLOCK_BYTES).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
        // SAFETY: no other code knows the memory.
        unsafe { mem::unreserve(addr, 4 * BLOCK_BYTES) };
    }

    /// The program closes the descriptor, and another file gets its number. A file must not be mapped then, and the
    /// other file must stay open.
    #[test]
    fn a_descriptor_of_another_file_is_not_used() {
        let file = MemoryFile::create(BLOCK_BYTES, true).unwrap();
        let addr = mem::reserve(BLOCK_BYTES, BLOCK_BYTES, 0).unwrap();
        let other = memfd_create(c"other", MemfdFlags::CLOEXEC).unwrap();
        // SAFETY: the call replaces the descriptor of `file` by a copy of `other`.
        let copy = unsafe { libc::dup3(other.as_raw_fd(), file.descriptor.load(Relaxed), libc::O_CLOEXEC) };
        // SAFETY: the range was reserved above.
        let mapped = unsafe { file.map(0, BLOCK_BYTES, addr) };
        assert_eq!(mapped.unwrap_err().raw_os_error(), Some(libc::EBADF));
        drop(file);
        // SAFETY: the descriptor was created by `dup3` above.
        fstat(unsafe { OwnedFd::from_raw_fd(copy) }).unwrap();
    }
}
