//! The pages of a file in memory: collapse small ones, split huge ones, ask whom they are charged to, take a lease.
#![allow(unsafe_code)] // mmap, madvise, fcntl

use crate::mem::os_page_bytes;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::sync::Once;

const MADV_COLD: libc::c_int = 20;
const MADV_COLLAPSE: libc::c_int = 25;

/// What became of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collapse {
    /// It is one huge page now, or was before.
    Huge,
    /// Somebody holds a page of it: later, perhaps.
    Busy,
    /// No huge page is to be had, or the group's limit leaves no room for one.
    NoMemory,
    /// This file, or this kernel (before 6.1), has none.
    Refused,
}

/// A part of a file, mapped read-only for the kernel's use: nothing of it is read here.
struct Window {
    addr: *mut libc::c_void,
    len: usize,
}

impl Window {
    /// At an address that is a multiple of `len`, as a huge page needs it. `offset` is a multiple of an OS page.
    fn new(file: BorrowedFd<'_>, offset: u64, len: usize) -> io::Result<Self> {
        // SAFETY: a reservation of twice the length, of which an aligned part is mapped over and the rest given up: nobody
        // else has addresses in it.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            let around = libc::mmap(std::ptr::null_mut(), 2 * len, libc::PROT_NONE, flags, -1, 0);
            if around == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            let lead = around.align_offset(len);
            let at = around.byte_add(lead);
            let flags = libc::MAP_SHARED | libc::MAP_FIXED;
            let addr = libc::mmap(at, len, libc::PROT_READ, flags, file.as_raw_fd(), offset as libc::off_t);
            let error = io::Error::last_os_error();
            if addr == libc::MAP_FAILED {
                libc::munmap(around, 2 * len);
                return Err(error);
            }
            if lead > 0 {
                libc::munmap(around, lead);
            }
            libc::munmap(at.byte_add(len), len - lead);
            Ok(Self { addr, len })
        }
    }

    fn advise(&self, len: usize, advice: libc::c_int) -> io::Result<()> {
        // SAFETY: our own mapping; the advice changes no byte.
        if unsafe { libc::madvise(self.addr, len, advice) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Maps the first page by asking the kernel: past the end of the file that is an error, not a signal.
    fn populate(&self) -> io::Result<()> {
        const MADV_POPULATE_READ: libc::c_int = 22;
        self.advise(os_page_bytes(), MADV_POPULATE_READ)
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: our own mapping, not used again.
        unsafe { libc::munmap(self.addr, self.len) };
    }
}

/// Makes one huge page of the block of `file` at `offset`, a multiple of `block_bytes`. The bytes stay; mappings of others
/// stay. Charged to this process's memory group. Some 0.25 ms. Since Linux 6.1.
pub fn collapse(file: BorrowedFd<'_>, offset: u64, block_bytes: usize) -> Collapse {
    let Ok(window) = Window::new(file, offset, block_bytes) else { return Collapse::NoMemory };
    match window.advise(block_bytes, MADV_COLLAPSE) {
        Ok(()) => Collapse::Huge,
        Err(error) => match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EBUSY) => Collapse::Busy,
            Some(libc::ENOMEM) => Collapse::NoMemory,
            _ => Collapse::Refused,
        },
    }
}

/// Splits the huge page at `offset` of `file`, if there is one that nobody else has mapped. The bytes stay.
///
/// By `MADV_COLD` of a part of it, which looks at pages one by one and therefore splits first.
///
/// # Errors
///
/// What mapping says; `EFAULT` past the end of the file.
pub fn split(file: BorrowedFd<'_>, offset: u64, block_bytes: usize) -> io::Result<()> {
    let window = Window::new(file, offset, block_bytes)?;
    window.populate()?;
    window.advise(os_page_bytes(), MADV_COLD)
}

/// The inode number of the memory group's folder that the page at `offset` is charged to. For root only.
///
/// # Errors
///
/// What mapping and reading the kernel's files say; `EFAULT` past the end of the file; `NotFound` for no page.
pub fn charged_group(file: BorrowedFd<'_>, offset: u64) -> io::Result<u64> {
    const IS_PRESENT: u64 = 1 << 63;
    const FRAME: u64 = IS_PRESENT.wrapping_shr(8) - 1;
    let window = Window::new(file, offset, os_page_bytes())?;
    window.populate()?;
    let read = |path: &str, index: u64| -> io::Result<u64> {
        let mut word = [0; 8];
        File::open(path)?.read_exact_at(&mut word, index * 8)?;
        Ok(u64::from_ne_bytes(word))
    };
    let entry = read("/proc/self/pagemap", window.addr as u64 / os_page_bytes() as u64)?;
    let frame = entry & FRAME;
    if entry & IS_PRESENT == 0 || frame == 0 {
        return Err(io::ErrorKind::NotFound.into());
    }
    read("/proc/kpagecgroup", frame)
}

/// Whether nobody else has the file open or mapped; from then on whoever opens it waits until `file` is closed (at most
/// `/proc/sys/fs/lease-break-time` seconds). For its owner, or with CAP_LEASE.
///
/// # Errors
///
/// `EAGAIN` if somebody has it open, `EACCES` for a stranger.
pub fn take_lease(file: BorrowedFd<'_>) -> io::Result<()> {
    static IS_HANDLED: Once = Once::new();
    // Who opens the file meanwhile has the kernel send SIGIO here, which ends a process that does not expect it.
    IS_HANDLED.call_once(|| pass_over(libc::SIGIO));
    // SAFETY: plain arguments.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Whether the lease is held and nobody waits for its end.
pub fn has_lease(file: BorrowedFd<'_>) -> bool {
    // SAFETY: plain arguments. While it is being broken the kernel tells what it is to become.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETLEASE) == libc::F_WRLCK }
}

/// Ends a lease before the file is closed.
pub fn end_lease(file: BorrowedFd<'_>) {
    // SAFETY: plain arguments.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_UNLCK) };
}

/// Whether nobody else has the file open or mapped at this moment.
pub fn is_alone(file: BorrowedFd<'_>) -> bool {
    let is_alone = take_lease(file).is_ok();
    if is_alone {
        end_lease(file);
    }
    is_alone
}

extern "C" fn do_nothing(_: libc::c_int) {}

/// Has a signal that would end this process do nothing; programs that it runs get it as ever.
fn pass_over(signal: libc::c_int) {
    // SAFETY: plain data; the handler touches nothing; one that is there already stays.
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

    const BLOCK: usize = 512 * 4096;
    use std::os::fd::AsFd;

    fn file(blocks: usize) -> Option<(tempfile::TempDir, File)> {
        let folder = tempfile::tempdir_in("/dev/shm").ok()?;
        let path = folder.path().join("file");
        std::fs::write(&path, vec![7u8; blocks * BLOCK]).unwrap();
        Some((folder, File::open(path).unwrap()))
    }

    /// Small pages become a huge one and small ones again, and every byte stays.
    #[test]
    fn collapsing_and_splitting_keep_the_bytes() {
        let Some((_folder, file)) = file(2) else { return println!("skipped: no /dev/shm") };
        let done = collapse(file.as_fd(), BLOCK as u64, BLOCK);
        println!("collapse: {done:?}");
        if done == Collapse::Huge {
            split(file.as_fd(), BLOCK as u64, BLOCK).unwrap();
        }
        assert!(split(file.as_fd(), 8 * BLOCK as u64, BLOCK).is_err(), "past the end");
        let mut bytes = vec![0; 2 * BLOCK];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 7));
    }

    /// Children that tests beside this one start have all that is open for a moment.
    fn at_last(is_so: impl Fn() -> bool) {
        let begun = std::time::Instant::now();
        while !is_so() {
            assert!(begun.elapsed().as_secs() < 600, "it is refused for ever");
            std::thread::yield_now();
        }
    }

    /// A lease is refused while somebody else has the file open or mapped.
    #[test]
    fn a_lease_wants_the_file_alone() {
        let Some((folder, file)) = file(1) else { return println!("skipped: no /dev/shm") };
        let other = File::open(folder.path().join("file")).unwrap();
        let refused = take_lease(file.as_fd()).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EAGAIN));
        let window = Window::new(other.as_fd(), 0, BLOCK).unwrap();
        drop(other);
        assert_eq!(take_lease(file.as_fd()).unwrap_err().raw_os_error(), Some(libc::EAGAIN));
        drop(window);
        at_last(|| take_lease(file.as_fd()).is_ok());
    }

    /// Who opens the file waits until it is closed here, and nobody is killed for it.
    #[test]
    fn openers_wait_for_the_end_of_a_lease() {
        let Some((folder, file)) = file(1) else { return println!("skipped: no /dev/shm") };
        at_last(|| is_alone(file.as_fd()));
        assert!(!has_lease(file.as_fd()));
        at_last(|| take_lease(file.as_fd()).is_ok());
        assert!(has_lease(file.as_fd()));
        let path = folder.path().join("file");
        let opener = std::thread::spawn(move || File::open(path).map(drop));
        let begun = std::time::Instant::now();
        while has_lease(file.as_fd()) {
            assert!(begun.elapsed().as_secs() < 600, "nobody is said to wait");
        }
        drop(file);
        opener.join().unwrap().unwrap();
    }

    /// The group of a page is asked where that is allowed.
    #[test]
    fn pages_know_their_group() {
        let Some((_folder, file)) = file(1) else { return println!("skipped: no /dev/shm") };
        match charged_group(file.as_fd(), 0) {
            Ok(inode) => assert_ne!(inode, 0),
            Err(error) => println!("skipped: {error}"),
        }
        assert!(charged_group(file.as_fd(), 64 * BLOCK as u64).is_err());
    }
}
