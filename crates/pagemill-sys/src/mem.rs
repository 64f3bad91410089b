//! Address space and the pages behind it.
//!
//! A reservation has no access and no pages. [`open`] makes a part of it readable and writable, still without pages. A
//! touch or [`populate`] allocates pages, [`discard`] frees them. docs/kernel.md has measured costs.
#![allow(unsafe_code)] // the mapping system calls

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// `MADV_POPULATE_WRITE`, since Linux 5.14.
const POPULATE_WRITE: i32 = 23;
/// `MADV_COLD`, since Linux 5.4.
const COLD: i32 = 20;

/// The pages that the kernel allocated for a block that was to be huge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// One huge page.
    Huge,
    /// Single OS pages: no huge page was available.
    Small,
}

fn check(result: i32) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Cache of [`os_page_bytes`]; 0 if empty.
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

/// Makes this process act as if OS pages were larger than they are. For tests, before any other call.
///
/// # Panics
///
/// If the size was already queried, or if `bytes` is not a valid size.
pub fn pretend_os_page(bytes: usize) {
    assert!(bytes.is_power_of_two() && (kernel_page_bytes()..=MOST_OS_PAGE_BYTES).contains(&bytes));
    assert_eq!(OS_PAGE_BYTES.swap(bytes, Relaxed), 0, "other code counts on another size");
}

/// The largest OS page size.
const MOST_OS_PAGE_BYTES: usize = 64 << 10;

/// Maps anonymous memory by a plain system call. In the preload library the C library's `mmap` is jemalloc's, which
/// calls the arena again.
///
/// # Safety
///
/// With `MAP_FIXED`, nothing depends on the memory mapped there.
pub(crate) unsafe fn map(addr: usize, len_bytes: usize, protection: i32, flags: i32) -> io::Result<usize> {
    // SAFETY: the caller's promise.
    let result = unsafe { libc::syscall(libc::SYS_mmap, addr, len_bytes, protection, flags, -1, 0) };
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result as usize) }
}

/// Unmaps by a plain system call: the preload library exports its own `munmap`, for programs.
///
/// # Safety
///
/// The memory is no longer in use.
unsafe fn unmap(addr: usize, len_bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe { libc::syscall(libc::SYS_munmap, addr, len_bytes) };
}

/// `madvise` by a plain system call, for the same reason. Returns 0, or -1 and sets `errno`.
///
/// # Safety
///
/// The contents that the advice discards are not needed.
unsafe fn advise(addr: usize, len_bytes: usize, advice: i32) -> i32 {
    // SAFETY: the caller's promise.
    unsafe { libc::syscall(libc::SYS_madvise, addr, len_bytes, advice) as i32 }
}

/// `mprotect` by a plain system call, for the same reason. Returns 0, or -1 and sets `errno`.
///
/// # Safety
///
/// No code relies on the access that is removed.
unsafe fn protect(addr: usize, len_bytes: usize, protection: i32) -> i32 {
    // SAFETY: the caller's promise.
    unsafe { libc::syscall(libc::SYS_mprotect, addr, len_bytes, protection) as i32 }
}

/// Reserves `len_bytes` of address space at a multiple of `align_bytes`, without access or pages.
///
/// The reservation counts against `RLIMIT_AS` and against nothing else. `hint` is the preferred address (0: any); the
/// kernel may choose another.
///
/// # Errors
///
/// Errors of `mmap`, usually `ENOMEM`.
pub fn reserve(len_bytes: usize, align_bytes: usize, hint: usize) -> io::Result<usize> {
    assert!(align_bytes.is_power_of_two());
    // The kernel aligns to OS pages anyway.
    let spare_bytes = if align_bytes <= os_page_bytes() { 0 } else { align_bytes };
    let padded = len_bytes.checked_add(spare_bytes).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: without MAP_FIXED a new mapping touches no existing memory.
    let start = unsafe { map(hint, padded, libc::PROT_NONE, flags) }?;
    let aligned = start.next_multiple_of(align_bytes);
    let (head, tail) = (aligned - start, padded - (aligned - start) - len_bytes);
    // SAFETY: both ends are parts of the mapping made above, unknown to other code.
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
/// `addr..addr + len_bytes` is a reservation, or part of one, that is no longer in use.
pub unsafe fn unreserve(addr: usize, len_bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe { unmap(addr, len_bytes) };
}

/// Makes reserved addresses readable and writable. Pages come with the first touch, zeroed.
///
/// Charged against the system's commit limit exactly as a new `mmap` of the same length.
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

/// As [`open`], for reading only. Commits no memory and allocates none.
///
/// # Errors
///
/// Errors of `mprotect`.
///
/// # Safety
///
/// The range lies inside a reservation of the caller that was not opened.
pub unsafe fn open_to_read(addr: usize, len_bytes: usize) -> io::Result<()> {
    // SAFETY: the caller owns the range, which has never been written.
    check(unsafe { protect(addr, len_bytes, libc::PROT_READ) })
}

/// Removes all access to the range. Its contents stay, and accesses fault until [`open`].
///
/// # Errors
///
/// Errors of `mprotect`; `ENOMEM` if the process has reached its limit of mappings.
///
/// # Safety
///
/// Any thread that accesses the range meanwhile tolerates or handles the fault.
pub unsafe fn close(addr: usize, len_bytes: usize) -> io::Result<()> {
    // SAFETY: the caller's promise.
    check(unsafe { protect(addr, len_bytes, libc::PROT_NONE) })
}

/// Allows huge pages for whole aligned blocks of the range. Returns whether the kernel accepted it.
pub fn allow_huge(addr: usize, len_bytes: usize) -> bool {
    // SAFETY: a hint about paging; contents do not change.
    unsafe { advise(addr, len_bytes, libc::MADV_HUGEPAGE) == 0 }
}

/// Excludes the range from huge pages: untouched OS pages stay unallocated.
pub fn forbid_huge(addr: usize, len_bytes: usize) {
    // SAFETY: a hint about paging; contents do not change.
    unsafe { advise(addr, len_bytes, libc::MADV_NOHUGEPAGE) };
}

/// Allocates pages for the whole range, as writes would, without changing a byte.
///
/// # Errors
///
/// `ENOMEM` for unmapped parts; `EFAULT`, `EHWPOISON`, `EINTR` as `madvise(2)`. Pages allocated before the error stay.
pub fn populate(addr: usize, len_bytes: usize) -> io::Result<()> {
    loop {
        // SAFETY: populating changes no contents.
        match check(unsafe { advise(addr, len_bytes, POPULATE_WRITE) }) {
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
            result => return result,
        }
    }
}

/// Allocates one block, as a huge page if the kernel has one, and returns which it was.
///
/// Touches the first OS page. If the last OS page of the block is then resident too, the page is huge. Otherwise
/// touches nothing more.
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

/// Reports for every OS page of the range whether it is resident (lowest bit of each byte of `pages`).
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
        // The kernel's pages are at least 4 KiB.
        let mut parts = [0u8; MOST_OS_PAGE_BYTES >> 12];
        let len = page.min(len_bytes - at);
        // SAFETY: writes one byte per page of the kernel into `parts`, which has room for those of any OS page.
        check(unsafe { libc::mincore((addr + at) as *mut _, len, parts.as_mut_ptr()) })?;
        *into = parts[..len.div_ceil(of_kernel)].iter().fold(0, |any, part| any | part & 1);
    }
    Ok(())
}

/// Returns the resident bytes of the range, in whole OS pages.
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

/// Returns whether four bytes at `addr` can be written. The kernel overwrites them with some number to find out.
pub fn can_write_int(addr: usize) -> bool {
    let nothing = std::ptr::null_mut::<u32>();
    // SAFETY: the kernel checks the address itself and returns `EFAULT`.
    unsafe { libc::syscall(libc::SYS_getcpu, addr as *mut u32, nothing, nothing) == 0 }
}

/// Checks that the whole range is mapped, with any kind of mapping. Touches no page.
///
/// # Errors
///
/// `ENOMEM` if a part is not mapped or is outside user address space.
pub fn is_mapped(addr: usize, len_bytes: usize) -> io::Result<()> {
    // SAFETY: this flag has had no effect but the check since Linux 2.6.19.
    check(unsafe { libc::syscall(libc::SYS_msync, addr, len_bytes, libc::MS_ASYNC) as i32 })
}

/// Frees the pages of the range. Its bytes read zero afterwards.
///
/// # Errors
///
/// `EINVAL` where the program has locked the memory; nothing was freed then.
///
/// # Safety
///
/// The contents are not needed, and no reference to them is alive.
pub unsafe fn discard(addr: usize, len_bytes: usize) -> io::Result<()> {
    // SAFETY: the caller gives up the contents.
    check(unsafe { advise(addr, len_bytes, libc::MADV_DONTNEED) })
}

/// Offers the pages of the range to the kernel, which may reclaim them under pressure (`MADV_FREE`).
///
/// A page keeps its bytes until then; a write withdraws the offer for its page. A reclaimed page reads zero.
///
/// # Errors
///
/// `EINVAL` where the program has locked the memory.
///
/// # Safety
///
/// As [`discard`].
pub unsafe fn offer(addr: usize, len_bytes: usize) -> io::Result<()> {
    // SAFETY: the caller gives up the contents.
    check(unsafe { advise(addr, len_bytes, libc::MADV_FREE) })
}

/// Requests that the kernel reclaim the range as under pressure. Without swap it takes only offered pages. For tests.
pub fn reclaim(addr: usize, len_bytes: usize) {
    const PAGEOUT: i32 = 21;
    // SAFETY: contents do not change, except offered ones.
    unsafe { advise(addr, len_bytes, PAGEOUT) };
}

/// Splits the huge page of a block into OS pages, as far as the kernel does so on `MADV_COLD`.
///
/// `MADV_DONTNEED` of a part of a huge page frees nothing until the page is split. About 280 us a block.
pub fn split_huge(block: usize, block_bytes: usize) {
    // `MADV_COLD` for a part of a huge page makes the kernel split it first; for a whole one it would only deactivate
    // it.
    let _ = cool(block, block_bytes / 2);
    // Otherwise the kernel may rebuild the huge page, with zeros for freed parts.
    forbid_huge(block, block_bytes);
}

/// Marks the pages of a range as cold, which splits huge pages that are only partly in the range.
///
/// # Errors
///
/// `EINVAL` for locked memory.
pub fn cool(addr: usize, len_bytes: usize) -> io::Result<()> {
    // SAFETY: a hint about paging; contents do not change.
    check(unsafe { advise(addr, len_bytes, COLD) })
}

/// Frees the pages of the range and installs a guard for each: an access faults (`SIGSEGV`; `EFAULT` in system calls)
/// until [`remove_guards`]. Before its guard is in place a page may read zero, so [`close`] the range first.
///
/// # Errors
///
/// `EINVAL` before Linux 6.13 and for locked memory; `ENOMEM` without memory for page tables.
///
/// # Safety
///
/// As [`discard`].
pub unsafe fn install_guards(addr: usize, len_bytes: usize) -> io::Result<()> {
    const GUARD_INSTALL: i32 = 102;
    // SAFETY: the caller gives up the contents.
    check(unsafe { advise(addr, len_bytes, GUARD_INSTALL) })
}

/// Removes guards; their pages then read zero. Pages without a guard do not change.
///
/// # Errors
///
/// As [`install_guards`].
pub fn remove_guards(addr: usize, len_bytes: usize) -> io::Result<()> {
    const GUARD_REMOVE: i32 = 103;
    // SAFETY: there are no contents behind a guard.
    check(unsafe { advise(addr, len_bytes, GUARD_REMOVE) })
}

/// Maps `len_bytes` of new private memory for metadata: zeroed, readable and writable, without pages.
///
/// Not charged in advance (`MAP_NORESERVE`): most of a metadata area is never touched.
///
/// # Errors
///
/// Errors of `mmap`.
pub fn map_sparse(len_bytes: usize, align_bytes: usize) -> io::Result<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    if align_bytes <= os_page_bytes() {
        // SAFETY: without MAP_FIXED a new mapping touches no existing memory.
        return unsafe { map(0, len_bytes, libc::PROT_READ | libc::PROT_WRITE, flags) };
    }
    let addr = reserve(len_bytes, align_bytes, 0)?;
    // SAFETY: replaces the reservation made above, unknown to other code.
    let mapped = unsafe { map(addr, len_bytes, libc::PROT_READ | libc::PROT_WRITE, flags | libc::MAP_FIXED) };
    if mapped.is_err() {
        // SAFETY: as above.
        unsafe { unreserve(addr, len_bytes) };
    }
    mapped
}

/// Makes the OS page at `addr` read zero in a child made by `fork` or a raw `clone`. Returns whether the kernel
/// accepted it.
pub fn wipe_on_fork(addr: usize) -> bool {
    const WIPEONFORK: i32 = 18;
    // SAFETY: concerns children only.
    unsafe { advise(addr, os_page_bytes(), WIPEONFORK) == 0 }
}

/// Prefetches the cache line of an address. An invalid address does no harm.
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

/// Returns the thread pointer: it differs between live threads and costs one instruction.
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

    /// The result of `populate_huge` agrees with the number of resident pages.
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

    /// Two threads have different tokens.
    #[test]
    fn tokens_differ() {
        let here = thread_token();
        let there = std::thread::spawn(thread_token).join().unwrap();
        assert_ne!(here, there);
    }
}
