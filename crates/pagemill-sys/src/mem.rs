//! Reserves address space, and allocates and frees its pages.
//!
//! A reservation has addresses, but no access and no pages. [`open`] makes a range of it readable and writable, still
//! without pages. An access or [`populate`] allocates pages, and [`discard`] frees them. docs/kernel.md has measured
//! costs.
#![allow(unsafe_code)] // the mapping system calls

use crate::result::check_result;
use rustix::io::{Errno, retry_on_intr};
use rustix::mm::{self, Advice, MapFlags, MprotectFlags, MsyncFlags, ProtFlags};
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The kind of pages that the kernel allocated for a block for which a huge page was requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// One huge page.
    Huge,
    /// OS pages, because no huge page was available.
    Small,
}

pub(crate) const MADV_GUARD_INSTALL: i32 = 102;
pub(crate) const MADV_GUARD_REMOVE: i32 = 103;

/// Cached result of [`os_page_bytes`]; 0 before the first call.
static OS_PAGE_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Returns the size of an OS page: 4, 16 or 64 KiB.
pub fn os_page_bytes() -> usize {
    let known = OS_PAGE_BYTES.load(Relaxed);
    if known != 0 {
        return known;
    }
    let bytes = kernel_page_bytes();
    OS_PAGE_BYTES.store(bytes, Relaxed);
    bytes
}

/// Returns the size of the kernel's pages, even after a call of [`pretend_os_page`].
fn kernel_page_bytes() -> usize {
    // SAFETY: the call returns a constant of the system.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

/// Makes this process act as if OS pages had `bytes` bytes, which must be at least their actual size. For tests, which
/// call this function before any other code reads the size.
///
/// # Panics
///
/// If the size was already queried, or if `bytes` is not a valid size.
pub fn pretend_os_page(bytes: usize) {
    assert!(bytes.is_power_of_two() && (kernel_page_bytes()..=MAX_OS_PAGE_BYTES).contains(&bytes));
    assert_eq!(OS_PAGE_BYTES.swap(bytes, Relaxed), 0, "other code counts on another size");
}

/// The largest OS page size that Pagemill supports.
const MAX_OS_PAGE_BYTES: usize = 64 << 10;

/// Returns whether an address is the start of an OS page.
fn is_at_page(addr: usize) -> bool {
    addr.is_multiple_of(kernel_page_bytes())
}

/// Maps anonymous memory by a direct system call. Returns the address. The preload library replaces the C library's
/// `mmap` by a function for jemalloc, which would call the arena again.
///
/// `map`, `unreserve`, `advise` and `protect` call rustix, which does not change `errno`.
///
/// # Safety
///
/// With `MAP_FIXED`, no code may depend on the memory that is mapped there.
pub(crate) unsafe fn map(addr: usize, len_bytes: usize, protection: ProtFlags, flags: MapFlags) -> io::Result<usize> {
    debug_assert!(!flags.contains(MapFlags::FIXED) || addr != 0 && is_at_page(addr));
    // SAFETY: guaranteed by the caller.
    let start = unsafe { mm::mmap_anonymous(addr as *mut _, len_bytes, protection, flags) }?;
    debug_assert!(!flags.contains(MapFlags::FIXED) || start as usize == addr);
    Ok(start as usize)
}

/// Calls `madvise` by a direct system call, because the preload library exports a `madvise` for programs.
///
/// # Safety
///
/// No code may need the contents that the advice discards.
unsafe fn advise(addr: usize, len_bytes: usize, advice: Advice) -> rustix::io::Result<()> {
    debug_assert!(is_at_page(addr));
    // SAFETY: guaranteed by the caller.
    unsafe { mm::madvise(addr as *mut _, len_bytes, advice) }
}

/// As [`advise`], with the number of an advice that rustix's [`Advice`] does not have.
///
/// # Safety
///
/// As [`advise`].
pub(crate) unsafe fn advise_by_number(addr: usize, len_bytes: usize, advice: i32) -> io::Result<()> {
    debug_assert!(is_at_page(addr));
    // SAFETY: guaranteed by the caller.
    check_result(unsafe { libc::syscall(libc::SYS_madvise, addr, len_bytes, advice) })
}

/// Changes the access rights of the `len_bytes` from `addr` on by a direct `mprotect` system call.
///
/// # Safety
///
/// No code may rely on the access that is removed.
unsafe fn protect(addr: usize, len_bytes: usize, access: MprotectFlags) -> io::Result<()> {
    debug_assert!(is_at_page(addr));
    // SAFETY: guaranteed by the caller.
    Ok(unsafe { mm::mprotect(addr as *mut _, len_bytes, access) }?)
}

/// Reserves `len_bytes` of address space at a multiple of `align_bytes`, without access or pages.
///
/// The reservation counts only against `RLIMIT_AS`. `hint` is the preferred address (0 for any); the kernel may choose
/// another.
///
/// # Errors
///
/// Errors of `mmap`, usually `ENOMEM`.
pub fn reserve(len_bytes: usize, align_bytes: usize, hint: usize) -> io::Result<usize> {
    assert!(align_bytes.is_power_of_two());
    // The kernel aligns to OS pages anyway.
    let spare_bytes = if align_bytes <= os_page_bytes() { 0 } else { align_bytes };
    // The spare addresses behind the range are unmapped, so they begin at an OS page.
    let len_bytes = len_bytes.checked_next_multiple_of(os_page_bytes()).ok_or(Errno::NOMEM)?;
    let padded = len_bytes.checked_add(spare_bytes).ok_or(Errno::NOMEM)?;
    // SAFETY: without MAP_FIXED the kernel maps unused addresses.
    let start = unsafe { map(hint, padded, ProtFlags::empty(), MapFlags::PRIVATE) }?;
    let aligned = start.next_multiple_of(align_bytes);
    assert!(aligned - start <= spare_bytes);
    let (head, tail) = (aligned - start, padded - (aligned - start) - len_bytes);
    // SAFETY: both ends belong to the mapping created above, which no other code knows.
    unsafe {
        if head > 0 {
            unreserve(start, head);
        }
        if tail > 0 {
            unreserve(aligned + len_bytes, tail);
        }
    }
    Ok(aligned)
}

/// Ends a reservation, by a direct system call, because the preload library exports a `munmap` for programs.
///
/// # Safety
///
/// `addr..addr + len_bytes` must be a reservation, or a range of one, that no code uses any more.
pub unsafe fn unreserve(addr: usize, len_bytes: usize) {
    debug_assert!(is_at_page(addr));
    // SAFETY: guaranteed by the caller.
    let _ = unsafe { mm::munmap(addr as *mut _, len_bytes) };
}

/// Makes reserved addresses readable and writable. The first access to a page allocates it, zeroed.
///
/// The length is charged against the system's commit limit, as for a new `mmap` of that length.
///
/// # Errors
///
/// `ENOMEM` if the kernel would also refuse an `mmap` of that length.
///
/// # Safety
///
/// The range must lie inside one reservation of the caller.
pub unsafe fn open(addr: usize, len_bytes: usize) -> io::Result<()> {
    // SAFETY: the caller owns the range, and additional access invalidates nothing.
    unsafe { protect(addr, len_bytes, MprotectFlags::READ | MprotectFlags::WRITE) }
}

/// As [`open`], but makes the addresses only readable. Charges and allocates no memory.
///
/// # Errors
///
/// Errors of `mprotect`.
///
/// # Safety
///
/// The range must lie inside a reservation of the caller and not be open.
pub unsafe fn open_to_read(addr: usize, len_bytes: usize) -> io::Result<()> {
    // SAFETY: the caller owns the range, and no code has written to it.
    unsafe { protect(addr, len_bytes, MprotectFlags::READ) }
}

/// Removes all access to the `len_bytes` from `addr` on. Their contents stay, and accesses fault until [`open`].
///
/// # Errors
///
/// Errors of `mprotect`; `ENOMEM` if the process has reached its limit of mappings.
///
/// # Safety
///
/// Any thread that accesses the range meanwhile must tolerate or handle the fault.
pub unsafe fn close(addr: usize, len_bytes: usize) -> io::Result<()> {
    // SAFETY: guaranteed by the caller.
    unsafe { protect(addr, len_bytes, MprotectFlags::empty()) }
}

/// Allows huge pages for the aligned 2 MiB blocks in the `len_bytes` from `addr` on. Returns whether the kernel
/// accepted the advice.
pub fn allow_huge(addr: usize, len_bytes: usize) -> bool {
    // SAFETY: the advice concerns paging only; contents do not change.
    unsafe { advise(addr, len_bytes, Advice::LinuxHugepage) }.is_ok()
}

/// Forbids huge pages for the `len_bytes` from `addr` on, so that only OS pages that are accessed are allocated.
pub fn forbid_huge(addr: usize, len_bytes: usize) {
    // SAFETY: the advice concerns paging only; contents do not change.
    let _ = unsafe { advise(addr, len_bytes, Advice::LinuxNoHugepage) };
}

/// Allocates pages for all of the `len_bytes` from `addr` on, as writes would, but without changing a byte.
///
/// # Errors
///
/// `ENOMEM` for unmapped addresses; `EFAULT`, `EHWPOISON` as in `madvise(2)`. Pages that were allocated before the
/// error stay.
pub fn populate(addr: usize, len_bytes: usize) -> io::Result<()> {
    // SAFETY: populating changes no contents.
    Ok(retry_on_intr(|| unsafe { advise(addr, len_bytes, Advice::LinuxPopulateWrite) })?)
}

/// Allocates pages for one block, as a huge page if one is available. Returns which kind the kernel allocated.
///
/// Populates the first OS page of the block. If the last OS page is then resident, too, the kernel has allocated a huge
/// page. Otherwise the rest of the block is not touched.
///
/// # Errors
///
/// As [`populate`].
pub fn populate_huge(block: usize, block_bytes: usize) -> io::Result<Backing> {
    assert!(block.is_multiple_of(block_bytes));
    allow_huge(block, block_bytes);
    populate(block, os_page_bytes())?;
    let mut last = [0u8; 1];
    resident(block + block_bytes - os_page_bytes(), os_page_bytes(), &mut last)?;
    Ok(if last[0] & 1 == 1 { Backing::Huge } else { Backing::Small })
}

/// Reports for every OS page of the `len_bytes` from `addr` on whether the page is resident: sets or clears the lowest
/// bit of the page's byte in `pages`.
///
/// # Errors
///
/// `ENOMEM` for unmapped parts.
///
/// # Panics
///
/// If `pages` has fewer bytes than the range has OS pages.
pub fn resident(addr: usize, len_bytes: usize, pages: &mut [u8]) -> io::Result<()> {
    let (page, of_kernel) = (os_page_bytes(), kernel_page_bytes());
    assert!(addr.is_multiple_of(page));
    assert!(pages.len() >= len_bytes.div_ceil(page));
    if page == of_kernel {
        // SAFETY: the call writes one byte per page into `pages`, which is long enough as asserted.
        return check_result(unsafe { libc::mincore(addr as *mut _, len_bytes, pages.as_mut_ptr()) });
    }
    for (at, into) in (0..len_bytes).step_by(page).zip(pages) {
        // The kernel's pages have at least 4 KiB.
        let mut parts = [0u8; MAX_OS_PAGE_BYTES >> 12];
        let len = page.min(len_bytes - at);
        // SAFETY: the call writes one byte per kernel page into `parts`, which has a byte for each of them.
        check_result(unsafe { libc::mincore((addr + at) as *mut _, len, parts.as_mut_ptr()) })?;
        *into = parts[..len.div_ceil(of_kernel)].iter().fold(0, |any, part| any | part & 1);
    }
    Ok(())
}

/// Returns how many of the `len_bytes` from `addr` on are resident, in whole OS pages.
///
/// # Errors
///
/// As [`resident`].
pub fn resident_bytes(addr: usize, len_bytes: usize) -> io::Result<usize> {
    const PAGES_PER_CALL: usize = 1024;
    let (page, mut pages, mut count) = (os_page_bytes(), [0u8; PAGES_PER_CALL], 0);
    for at in (0..len_bytes).step_by(PAGES_PER_CALL * page) {
        let len = (len_bytes - at).min(PAGES_PER_CALL * page);
        resident(addr + at, len, &mut pages)?;
        count += pages[..len / page].iter().filter(|page| **page & 1 == 1).count();
    }
    debug_assert!(count * page <= len_bytes);
    Ok(count * page)
}

/// Returns whether four bytes at `addr` can be written. The test overwrites the bytes: the kernel writes a CPU number
/// there.
pub fn can_write_int(addr: usize) -> bool {
    let nothing = std::ptr::null_mut::<u32>();
    // SAFETY: the kernel checks the address itself (`EFAULT`).
    unsafe { libc::syscall(libc::SYS_getcpu, addr as *mut u32, nothing, nothing) == 0 }
}

/// Checks that all of the `len_bytes` from `addr` on are mapped, by any kind of mapping. Accesses no page.
///
/// # Errors
///
/// `ENOMEM` if any address is not mapped or lies outside of user space.
pub fn is_mapped(addr: usize, len_bytes: usize) -> io::Result<()> {
    // SAFETY: since Linux 2.6.19 this flag has no effect except for the check.
    Ok(unsafe { mm::msync(addr as *mut _, len_bytes, MsyncFlags::ASYNC) }?)
}

/// Frees the pages of the `len_bytes` from `addr` on. The addresses read zero afterwards.
///
/// # Errors
///
/// `EINVAL` if the program has locked the memory; nothing is freed then.
///
/// # Safety
///
/// No code may need the contents or have a reference to them.
pub unsafe fn discard(addr: usize, len_bytes: usize) -> io::Result<()> {
    // SAFETY: the caller gives up the contents.
    Ok(unsafe { advise(addr, len_bytes, Advice::LinuxDontNeed) }?)
}

/// Offers the pages of the `len_bytes` from `addr` on to the kernel, which may free them when memory runs short
/// (`MADV_FREE`).
///
/// A page has its old bytes until the kernel frees it, and reads zero afterwards. A write to a page ends its offer.
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
    Ok(unsafe { advise(addr, len_bytes, Advice::LinuxFree) }?)
}

/// Makes the kernel reclaim the `len_bytes` from `addr` on, as it does when memory runs short. Without swap, the kernel
/// takes only pages that [`offer`] offered. For tests.
pub fn reclaim(addr: usize, len_bytes: usize) {
    // SAFETY: contents do not change, except those that were offered.
    let _ = unsafe { advise(addr, len_bytes, Advice::LinuxPageOut) };
}

/// Splits the huge page of a block into OS pages, if the kernel splits pages for `MADV_COLD`.
///
/// Until the huge page is split, `MADV_DONTNEED` of a range inside the huge page frees nothing. Takes some 280 us.
pub fn split_huge(block: usize, block_bytes: usize) {
    assert!(block.is_multiple_of(block_bytes));
    // For a range inside a huge page, `MADV_COLD` makes the kernel split the page. For a whole huge page it would only
    // deactivate the page.
    let _ = cool(block, block_bytes / 2);
    // Otherwise the kernel may collapse the block into a huge page again, with zeros for freed OS pages.
    forbid_huge(block, block_bytes);
}

/// Marks the pages of a range as cold, which splits huge pages that lie only partly in the range.
///
/// # Errors
///
/// `EINVAL` for locked memory.
pub fn cool(addr: usize, len_bytes: usize) -> io::Result<()> {
    // SAFETY: the advice concerns paging only; contents do not change.
    Ok(unsafe { advise(addr, len_bytes, Advice::LinuxCold) }?)
}

/// Frees the pages of the range and makes each of them a guard page. Until [`remove_guards`], an access faults
/// (`SIGSEGV`; `EFAULT` in system calls). A page may read zero before its guard is installed, so callers first
/// [`close`] the range.
///
/// # Errors
///
/// `EINVAL` before Linux 6.13 and for locked memory; `ENOMEM` if page tables cannot be allocated.
///
/// # Safety
///
/// As [`discard`].
pub unsafe fn install_guards(addr: usize, len_bytes: usize) -> io::Result<()> {
    // SAFETY: the caller gives up the contents.
    unsafe { advise_by_number(addr, len_bytes, MADV_GUARD_INSTALL) }
}

/// Removes guards, after which their pages read zero. Pages without a guard do not change.
///
/// # Errors
///
/// As [`install_guards`].
pub fn remove_guards(addr: usize, len_bytes: usize) -> io::Result<()> {
    // SAFETY: a page with a guard has no contents.
    unsafe { advise_by_number(addr, len_bytes, MADV_GUARD_REMOVE) }
}

/// Maps `len_bytes` of private memory for metadata: zeroed, readable and writable, without pages.
///
/// The length is not charged in advance (`MAP_NORESERVE`), because most of a metadata area is never accessed.
///
/// # Errors
///
/// Errors of `mmap`.
pub fn map_sparse(len_bytes: usize, align_bytes: usize) -> io::Result<usize> {
    let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
    if align_bytes <= os_page_bytes() {
        // SAFETY: without MAP_FIXED a new mapping touches no existing memory.
        return unsafe { map(0, len_bytes, access, flags) };
    }
    let addr = reserve(len_bytes, align_bytes, 0)?;
    assert!(addr.is_multiple_of(align_bytes));
    // SAFETY: the call replaces the reservation made above, which no other code knows.
    let mapped = unsafe { map(addr, len_bytes, access, flags | MapFlags::FIXED) };
    if mapped.is_err() {
        // SAFETY: as for the previous call.
        unsafe { unreserve(addr, len_bytes) };
    }
    mapped
}

/// Makes the OS page at `addr` read zero in a child created by `fork` or a raw `clone`. Returns whether the kernel
/// accepted the advice.
pub fn wipe_on_fork(addr: usize) -> bool {
    // SAFETY: the advice concerns children only.
    unsafe { advise(addr, os_page_bytes(), Advice::LinuxWipeOnFork) }.is_ok()
}

/// Prefetches the cache line at `addr` into the processor's caches. An invalid address has no effect.
#[inline(always)]
pub fn prefetch(addr: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint that accesses no memory.
    unsafe {
        std::arch::asm!("prefetcht0 [{}]", in(reg) addr, options(nostack, preserves_flags, readonly));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a hint that accesses no memory.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{}]", in(reg) addr, options(nostack, preserves_flags, readonly));
    }
    let _ = addr;
}

/// Returns the thread pointer, a number that differs between running threads. Costs one instruction.
#[inline]
pub fn thread_token() -> usize {
    let token: usize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: in the x86-64 ABI, fs:0 contains the thread pointer itself.
    unsafe {
        core::arch::asm!("mov {}, fs:0", out(reg) token, options(nostack, preserves_flags, readonly))
    };
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the instruction reads the thread pointer register.
    unsafe {
        core::arch::asm!("mrs {}, tpidr_el0", out(reg) token, options(nostack, preserves_flags, nomem))
    };
    token
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK_BYTES: usize = 2 << 20;

    /// A reservation must be aligned as requested. A range of the reservation must be writable after `open`, and read
    /// zero after `discard`.
    #[test]
    fn reserved_memory_can_be_opened_and_discarded() {
        let addr = reserve(4 * BLOCK_BYTES, 4 * BLOCK_BYTES, 0).unwrap();
        assert_eq!(addr % (4 * BLOCK_BYTES), 0);
        // SAFETY: the range is a reservation of this function.
        unsafe { open(addr, BLOCK_BYTES).unwrap() };
        let byte = addr as *mut u8;
        // SAFETY: the page was opened above, and no other code knows it.
        unsafe {
            byte.write(7);
            discard(addr, os_page_bytes()).unwrap();
            assert_eq!(byte.read(), 0);
            unreserve(addr, 4 * BLOCK_BYTES);
        }
    }

    /// `populate_huge` must report a huge page if and only if all OS pages of the block are resident.
    #[test]
    fn populate_huge_reports_the_kind_of_page() {
        let addr = map_sparse(BLOCK_BYTES, BLOCK_BYTES).unwrap();
        let backing = populate_huge(addr, BLOCK_BYTES).unwrap();
        let mut pages = [0u8; BLOCK_BYTES / 4096];
        resident(addr, BLOCK_BYTES, &mut pages).unwrap();
        let count = pages[..BLOCK_BYTES / os_page_bytes()].iter().filter(|page| **page & 1 == 1).count();
        match backing {
            Backing::Huge => assert_eq!(count, BLOCK_BYTES / os_page_bytes()),
            Backing::Small => assert!(count < BLOCK_BYTES / os_page_bytes()),
        }
        // SAFETY: no other code knows the memory.
        unsafe { unreserve(addr, BLOCK_BYTES) };
    }

    /// Two threads must have different thread pointers.
    #[test]
    fn thread_tokens_differ() {
        let here = thread_token();
        let there = std::thread::spawn(thread_token).join().unwrap();
        assert_ne!(here, there);
    }
}
