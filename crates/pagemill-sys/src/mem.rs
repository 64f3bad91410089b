//! Address space and the pages behind it.
//!
//! A reservation starts without access and without pages. [`open`] makes a
//! part of it readable and writable (still no pages), a touch or [`populate`]
//! brings pages in, [`discard`] takes them out. Measured costs stand in
//! docs/kernel.md.
#![allow(unsafe_code)] // the mapping system calls

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// `MADV_POPULATE_WRITE`, since Linux 5.14.
const POPULATE_WRITE: i32 = 23;
/// `MADV_COLD`, since Linux 5.4.
const COLD: i32 = 20;

/// What the kernel put behind a block that was to be huge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// One huge page.
    Huge,
    /// Single OS pages: no huge page was to be had.
    Small,
}

fn check(result: i32) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// What [`os_page_bytes`] says; 0 while nobody has asked.
static OS_PAGE_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Bytes of an OS page: 4, 16 or 64 KiB.
pub fn os_page_bytes() -> usize {
    let known = OS_PAGE_BYTES.load(Relaxed);
    if known != 0 {
        return known;
    }
    let bytes = kernel_page_bytes();
    OS_PAGE_BYTES.store(bytes, Relaxed);
    bytes
}

fn kernel_page_bytes() -> usize {
    // SAFETY: reads a constant of the system.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

/// Lets this process do as if OS pages were larger than they are. For tests, before anything else.
///
/// # Panics
///
/// If somebody has asked for their size already, or they cannot be so large.
pub fn pretend_os_page(bytes: usize) {
    assert!(bytes.is_power_of_two() && (kernel_page_bytes()..=MOST_OS_PAGE_BYTES).contains(&bytes));
    assert_eq!(OS_PAGE_BYTES.swap(bytes, Relaxed), 0, "somebody counts on another size");
}

/// The largest OS pages that there are.
const MOST_OS_PAGE_BYTES: usize = 64 << 10;

/// Maps anonymous memory by the plain system call: in the preload library the C library's `mmap` is jemalloc's, and leads
/// back into the arena.
///
/// # Safety
///
/// With `MAP_FIXED` nobody depends on what is mapped there.
pub(crate) unsafe fn map(addr: usize, len_bytes: usize, protection: i32, flags: i32) -> io::Result<usize> {
    // SAFETY: the caller's promise.
    let result = unsafe { libc::syscall(libc::SYS_mmap, addr, len_bytes, protection, flags, -1, 0) };
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result as usize) }
}

/// Ends a mapping by the plain system call: the preload library has a `munmap` of its own, for programs.
///
/// # Safety
///
/// Nobody uses what is mapped there.
unsafe fn unmap(addr: usize, len_bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe { libc::syscall(libc::SYS_munmap, addr, len_bytes) };
}

/// `madvise` by the plain system call, for the same reason. 0, or -1 and `errno`.
///
/// # Safety
///
/// Nobody needs the contents that the advice gives up.
unsafe fn advise(addr: usize, len_bytes: usize, advice: i32) -> i32 {
    // SAFETY: the caller's promise.
    unsafe { libc::syscall(libc::SYS_madvise, addr, len_bytes, advice) as i32 }
}

/// `mprotect` by the plain system call, for the same reason. 0, or -1 and `errno`.
///
/// # Safety
///
/// Nobody counts on access that is taken away.
unsafe fn protect(addr: usize, len_bytes: usize, protection: i32) -> i32 {
    // SAFETY: the caller's promise.
    unsafe { libc::syscall(libc::SYS_mprotect, addr, len_bytes, protection) as i32 }
}

/// Reserves `len_bytes` of address space at a multiple of `align_bytes`, without access or pages.
///
/// Costs address space only: the reservation counts against `RLIMIT_AS` and
/// against nothing else. `hint` is where it would best lie (0: anywhere); the
/// kernel may choose otherwise.
///
/// # Errors
///
/// What `mmap` says, `ENOMEM` above all.
pub fn reserve(len_bytes: usize, align_bytes: usize, hint: usize) -> io::Result<usize> {
    assert!(align_bytes.is_power_of_two());
    let padded = len_bytes.checked_add(align_bytes).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: without MAP_FIXED a new mapping touches no existing memory.
    let start = unsafe { map(hint, padded, libc::PROT_NONE, flags) }?;
    let aligned = start.next_multiple_of(align_bytes);
    let (head, tail) = (aligned - start, padded - (aligned - start) - len_bytes);
    // SAFETY: both ends are parts of the mapping made above that nobody knows yet.
    unsafe {
        if head > 0 {
            unmap(start, head);
        }
        if tail > 0 {
            unmap(aligned + len_bytes, tail);
        }
    }
    Ok(aligned)
}

/// Ends a reservation.
///
/// # Safety
///
/// `addr..addr + len_bytes` is a reservation (or part of one) that nobody uses any more.
pub unsafe fn unreserve(addr: usize, len_bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe { unmap(addr, len_bytes) };
}

/// Makes reserved addresses readable and writable; pages come with the first touch, zeroed.
///
/// Charged against the system's commit limit exactly as a fresh `mmap` of the
/// same length would be.
///
/// # Errors
///
/// `ENOMEM` where `mmap` of that length would be refused too.
///
/// # Safety
///
/// The range lies inside one reservation of the caller.
pub unsafe fn open(addr: usize, len_bytes: usize) -> io::Result<()> {
    // SAFETY: the caller owns the range; more access invalidates nothing.
    check(unsafe { protect(addr, len_bytes, libc::PROT_READ | libc::PROT_WRITE) })
}

/// As [`open`], for reading only: no memory is promised, and none comes of it.
///
/// # Errors
///
/// What `mprotect` says.
///
/// # Safety
///
/// The range lies inside a reservation of the caller's, who has not opened it.
pub unsafe fn open_to_read(addr: usize, len_bytes: usize) -> io::Result<()> {
    // SAFETY: the caller owns the range, and nobody has written to it.
    check(unsafe { protect(addr, len_bytes, libc::PROT_READ) })
}

/// Takes all access to the range away: contents stay, and whoever touches them faults until [`open`].
///
/// # Errors
///
/// What `mprotect` says; `ENOMEM` where the process has as many mappings as it may.
///
/// # Safety
///
/// Whoever touches the range meanwhile can wait, or is told.
pub unsafe fn close(addr: usize, len_bytes: usize) -> io::Result<()> {
    // SAFETY: the caller's promise.
    check(unsafe { protect(addr, len_bytes, libc::PROT_NONE) })
}

/// Lets the kernel use huge pages for whole aligned blocks of the range. Returns whether it would.
pub fn allow_huge(addr: usize, len_bytes: usize) -> bool {
    // SAFETY: a hint about paging; contents do not change.
    unsafe { advise(addr, len_bytes, libc::MADV_HUGEPAGE) == 0 }
}

/// Keeps huge pages out of the range: what is untouched stays without a page.
pub fn forbid_huge(addr: usize, len_bytes: usize) {
    // SAFETY: a hint about paging; contents do not change.
    unsafe { advise(addr, len_bytes, libc::MADV_NOHUGEPAGE) };
}

/// Brings in pages for the whole range, as writes would, without changing a byte.
///
/// # Errors
///
/// `ENOMEM` for unmapped parts; `EFAULT`, `EHWPOISON`, `EINTR` as `madvise(2)`.
/// What had come in until then stays.
pub fn populate(addr: usize, len_bytes: usize) -> io::Result<()> {
    loop {
        // SAFETY: populating changes no contents.
        match check(unsafe { advise(addr, len_bytes, POPULATE_WRITE) }) {
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
            result => return result,
        }
    }
}

/// Brings in one block, huge if the kernel has a huge page, and says which it was.
///
/// The first touch decides: if it brought the last OS page of the block along,
/// the page is huge. Otherwise nothing more is touched.
///
/// # Errors
///
/// As [`populate`].
pub fn populate_huge(block: usize, block_bytes: usize) -> io::Result<Backing> {
    allow_huge(block, block_bytes);
    populate(block, os_page_bytes())?;
    let mut last = [0u8; 1];
    resident(block + block_bytes - os_page_bytes(), os_page_bytes(), &mut last)?;
    Ok(if last[0] & 1 == 1 { Backing::Huge } else { Backing::Small })
}

/// Says for every OS page of the range whether it is resident (lowest bit of each byte of `pages`).
///
/// # Errors
///
/// `ENOMEM` for unmapped parts.
///
/// # Panics
///
/// If `pages` is shorter than the number of pages.
pub fn resident(addr: usize, len_bytes: usize, pages: &mut [u8]) -> io::Result<()> {
    let (page, of_kernel) = (os_page_bytes(), kernel_page_bytes());
    assert!(pages.len() >= len_bytes.div_ceil(page));
    if page == of_kernel {
        // SAFETY: writes one byte per page into `pages`, long enough as asserted.
        return check(unsafe { libc::mincore(addr as *mut _, len_bytes, pages.as_mut_ptr()) });
    }
    for (at, into) in (0..len_bytes).step_by(page).zip(pages) {
        // The kernel's pages are 4 KiB at least.
        let mut parts = [0u8; MOST_OS_PAGE_BYTES >> 12];
        let len = page.min(len_bytes - at);
        // SAFETY: writes one byte per page of the kernel into `parts`, which has room for those of any OS page.
        check(unsafe { libc::mincore((addr + at) as *mut _, len, parts.as_mut_ptr()) })?;
        *into = parts[..len.div_ceil(of_kernel)].iter().fold(0, |any, part| any | part & 1);
    }
    Ok(())
}

/// Bytes of the range, whole OS pages, that are resident.
///
/// # Errors
///
/// As [`resident`].
pub fn resident_bytes(addr: usize, len_bytes: usize) -> io::Result<usize> {
    const PAGES: usize = 1024;
    let (page, mut pages, mut count) = (os_page_bytes(), [0u8; PAGES], 0);
    for at in (0..len_bytes).step_by(PAGES * page) {
        let len = (len_bytes - at).min(PAGES * page);
        resident(addr + at, len, &mut pages)?;
        count += pages[..len / page].iter().filter(|page| **page & 1 == 1).count();
    }
    Ok(count * page)
}

/// Whether four bytes can be written at `addr`; if so they hold some number afterwards. The kernel does the writing.
pub fn can_write_int(addr: usize) -> bool {
    let nothing = std::ptr::null_mut::<u32>();
    // SAFETY: the kernel checks the address itself, and says `EFAULT`.
    unsafe { libc::syscall(libc::SYS_getcpu, addr as *mut u32, nothing, nothing) == 0 }
}

/// Whether the whole range is mapped, whatever it is. Touches no page.
///
/// # Errors
///
/// `ENOMEM` where a part is not, or is no address of a program.
pub fn is_mapped(addr: usize, len_bytes: usize) -> io::Result<()> {
    // SAFETY: this flag has had no effect but the check since Linux 2.6.19.
    check(unsafe { libc::syscall(libc::SYS_msync, addr, len_bytes, libc::MS_ASYNC) as i32 })
}

/// Takes the pages of the range out: its bytes are gone and read zero afterwards.
///
/// # Errors
///
/// `EINVAL` where the program has locked the memory (nothing was freed then).
///
/// # Safety
///
/// Nobody needs the contents any more, and no reference to them is alive.
pub unsafe fn discard(addr: usize, len_bytes: usize) -> io::Result<()> {
    // SAFETY: the caller gives the contents up.
    check(unsafe { advise(addr, len_bytes, libc::MADV_DONTNEED) })
}

/// Offers the pages of the range to the kernel, which takes them when it runs short: until then, and from the next write
/// on, a page keeps its bytes; once taken it reads zero.
///
/// # Errors
///
/// `EINVAL` where the program has locked the memory.
///
/// # Safety
///
/// As [`discard`].
pub unsafe fn offer(addr: usize, len_bytes: usize) -> io::Result<()> {
    // SAFETY: the caller gives the contents up.
    check(unsafe { advise(addr, len_bytes, libc::MADV_FREE) })
}

/// Asks the kernel to reclaim the range as it would under pressure: without swap it takes what was offered, and nothing
/// else. For tests of what happens then.
pub fn reclaim(addr: usize, len_bytes: usize) {
    const PAGEOUT: i32 = 21;
    // SAFETY: contents do not change, but for those given up.
    unsafe { advise(addr, len_bytes, PAGEOUT) };
}

/// Splits the huge page behind a block into OS pages, as far as the kernel does so on `MADV_COLD`.
///
/// `MADV_DONTNEED` of a part of a huge page frees nothing while the page is
/// whole; after this it does. About 280 us a block.
pub fn split_huge(block: usize, block_bytes: usize) {
    // A cold hint for a part of a huge page makes the kernel split it first;
    // for a whole one it would only deactivate it.
    let _ = cool(block, block_bytes / 2);
    // Or the kernel makes it whole again, zeros and all.
    forbid_huge(block, block_bytes);
}

/// Takes the pages of a range for cold, which splits huge ones that it holds a part of.
///
/// # Errors
///
/// `EINVAL` for locked memory.
pub fn cool(addr: usize, len_bytes: usize) -> io::Result<()> {
    // SAFETY: a hint about paging; contents do not change.
    check(unsafe { advise(addr, len_bytes, COLD) })
}

/// Takes the pages of the range out and puts a guard in the place of each: a touch is a fault (`SIGSEGV`, of system calls
/// `EFAULT`) until [`remove_guards`]. In between somebody may see zeros: [`close`] the range before.
///
/// # Errors
///
/// `EINVAL` before Linux 6.13, and for locked memory; `ENOMEM` without memory for page tables.
///
/// # Safety
///
/// As [`discard`].
pub unsafe fn install_guards(addr: usize, len_bytes: usize) -> io::Result<()> {
    const GUARD_INSTALL: i32 = 102;
    // SAFETY: the caller gives the contents up.
    check(unsafe { advise(addr, len_bytes, GUARD_INSTALL) })
}

/// Takes guards away: the pages read zero. What has none stays as it is.
///
/// # Errors
///
/// As [`install_guards`].
pub fn remove_guards(addr: usize, len_bytes: usize) -> io::Result<()> {
    const GUARD_REMOVE: i32 = 103;
    // SAFETY: there are no contents behind a guard.
    check(unsafe { advise(addr, len_bytes, GUARD_REMOVE) })
}

/// Maps `len_bytes` of fresh private memory for metadata: zeroed, readable, writable, no pages yet.
///
/// Not charged in advance (`MAP_NORESERVE`): metadata areas are mostly never touched.
///
/// # Errors
///
/// What `mmap` says.
pub fn map_sparse(len_bytes: usize, align_bytes: usize) -> io::Result<usize> {
    let addr = reserve(len_bytes, align_bytes, 0)?;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: replaces the reservation made above, which nobody else knows.
    let mapped = unsafe { map(addr, len_bytes, libc::PROT_READ | libc::PROT_WRITE, flags) };
    if mapped.is_err() {
        // SAFETY: as above.
        unsafe { unreserve(addr, len_bytes) };
    }
    mapped
}

/// Asks that the OS page at `addr` read zero in a child made by `fork` or a raw `clone`.
pub fn wipe_on_fork(addr: usize) -> bool {
    const WIPEONFORK: i32 = 18;
    // SAFETY: concerns children only.
    unsafe { advise(addr, os_page_bytes(), WIPEONFORK) == 0 }
}

/// Lets the processor fetch the line that an address is in. A wrong address does no harm.
#[inline(always)]
pub fn prefetch(addr: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, which reads nothing.
    unsafe {
        std::arch::asm!("prefetcht0 [{}]", in(reg) addr, options(nostack, preserves_flags, readonly));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{}]", in(reg) addr, options(nostack, preserves_flags, readonly));
    }
    let _ = addr;
}

/// A number that differs between the threads alive and costs one instruction: the thread pointer.
#[inline]
pub fn thread_token() -> usize {
    let token: usize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the x86-64 ABI keeps the thread pointer's own address at fs:0.
    unsafe {
        core::arch::asm!("mov {}, fs:0", out(reg) token, options(nostack, preserves_flags, readonly))
    };
    #[cfg(target_arch = "aarch64")]
    // SAFETY: reads the thread pointer register.
    unsafe {
        core::arch::asm!("mrs {}, tpidr_el0", out(reg) token, options(nostack, preserves_flags, nomem))
    };
    token
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: usize = 2 << 20;

    /// A reservation is aligned, opens in parts, reads zero after a discard.
    #[test]
    fn reserved_memory_opens_and_empties() {
        let addr = reserve(4 * BLOCK, 4 * BLOCK, 0).unwrap();
        assert_eq!(addr % (4 * BLOCK), 0);
        // SAFETY: our own reservation.
        unsafe { open(addr, BLOCK).unwrap() };
        let byte = addr as *mut u8;
        // SAFETY: opened above; ours alone.
        unsafe {
            byte.write(7);
            discard(addr, os_page_bytes()).unwrap();
            assert_eq!(byte.read(), 0);
            unreserve(addr, 4 * BLOCK);
        }
    }

    /// The answer of `populate_huge` agrees with how many pages are resident.
    #[test]
    fn backing_is_what_is_resident() {
        let addr = map_sparse(BLOCK, BLOCK).unwrap();
        let backing = populate_huge(addr, BLOCK).unwrap();
        let mut pages = [0u8; BLOCK / 4096];
        resident(addr, BLOCK, &mut pages).unwrap();
        let count = pages[..BLOCK / os_page_bytes()].iter().filter(|page| **page & 1 == 1).count();
        match backing {
            Backing::Huge => assert_eq!(count, BLOCK / os_page_bytes()),
            Backing::Small => assert!(count < BLOCK / os_page_bytes()),
        }
        // SAFETY: ours alone.
        unsafe { unreserve(addr, BLOCK) };
    }

    /// Two threads have two tokens.
    #[test]
    fn tokens_differ() {
        let here = thread_token();
        let there = std::thread::spawn(thread_token).join().unwrap();
        assert_ne!(here, there);
    }
}
