//! Volatile ranges in a preloaded program: `pagemill_vrange`, and the calls that unmap or discard memory.
//!
//! A purge must never discard memory that was mapped after the mark. So `munmap`, `mmap` with `MAP_FIXED`, `mremap` and
//! the `madvise` values that discard contents are intercepted: each call first waits for purges of its range and
//! removes the range's marks. If the program has no marks, the interception costs one load. Raw system calls, and calls
//! inside the C library, are not intercepted.
#![allow(unsafe_code)] // the C ABI of the mapping calls

use crate::{globals, large, start};
use pagemill_core::stats;
use pagemill_volatile as volatile;
use std::ffi::{c_int, c_long, c_void};
use std::io;

/// Removes the volatile marks of a range that is about to be unmapped or discarded.
pub fn remove_marks(addr: usize, len: usize) {
    let Some(pagemill) = globals::pagemill().filter(|pagemill| !pagemill.vranges.is_empty()) else { return };
    let page = pagemill_core::units::os_page_bytes();
    let end = addr.saturating_add(len).checked_next_multiple_of(page).unwrap_or(usize::MAX & !(page - 1));
    if addr < end {
        pagemill.vranges.forget(addr & !(page - 1)..end);
    }
}

/// As [`remove_marks`], but does nothing if `addr` is not page aligned, because the kernel will refuse the program's
/// call.
fn remove_marks_if_aligned(addr: *mut c_void, len: usize) {
    if (addr as usize).is_multiple_of(pagemill_core::units::os_page_bytes()) {
        remove_marks(addr as usize, len);
    }
}

/// `pagemill_vrange` for preloaded programs.
///
/// # Safety
///
/// As documented in pagemill.h.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_vrange(
    addr: *mut c_void,
    len: usize,
    mode: c_int,
    behaviour: c_int,
    purged: *mut c_int,
) -> isize {
    // Marking memory makes a small program grow. If the arena cannot be created, the mark is refused, because no helper
    // could purge the memory.
    let vranges = || match large::grown_pagemill() {
        Some(pagemill) => {
            start::start_helper(pagemill);
            // The figures are published now, because a fork child may mark memory without ever being charged.
            pagemill.instance.account.note_first_use();
            Ok(pagemill.vranges)
        }
        None => Err(pagemill_core::Error::System {
            doing: "marking memory without an arena",
            cause: io::ErrorKind::OutOfMemory.into(),
        }),
    };
    // SAFETY: guaranteed by the caller.
    unsafe { volatile::c::vrange(vranges, addr, len, (mode, behaviour), purged) }
}

/// `pagemill_figures` for preloaded programs: measures memory and stores the amounts.
///
/// # Safety
///
/// As documented in pagemill.h: `amounts` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_figures(amounts: *mut stats::MemoryAmounts) -> c_int {
    // While the C library serves the program, there is no arena to measure.
    if let Some(pagemill) = globals::pagemill() {
        pagemill.instance.measure();
    }
    let figures = stats::snapshot();
    // SAFETY: guaranteed by the caller.
    unsafe { amounts.write(figures.memory_amounts()) };
    0
}

/// `pagemill_handle_fault` for preloaded programs.
///
/// # Safety
///
/// As documented in pagemill.h.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_handle_fault(signal: c_int, info: *const c_void, context: *mut c_void) -> c_int {
    // SAFETY: guaranteed by the caller.
    c_int::from(unsafe { volatile::handle_fault(signal, info, context) })
}

/// Intercepts the program's calls of `munmap`: removes the volatile marks of the range first.
///
/// # Safety
///
/// As `munmap(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(addr: *mut c_void, len: usize) -> c_int {
    remove_marks_if_aligned(addr, len);
    // SAFETY: guaranteed by the caller.
    unsafe { libc::syscall(libc::SYS_munmap, addr, len) as c_int }
}

/// Intercepts the program's calls of `mmap`: with `MAP_FIXED`, removes the volatile marks of the range first.
///
/// # Safety
///
/// As `mmap(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: libc::off_t,
) -> *mut c_void {
    if flags & libc::MAP_FIXED != 0 {
        remove_marks_if_aligned(addr, len);
    }
    // SAFETY: guaranteed by the caller.
    unsafe { libc::syscall(libc::SYS_mmap, addr, len, prot, flags, fd, offset) as *mut c_void }
}

/// As [`mmap`], because offsets have 64 bits in both functions on 64-bit systems.
///
/// # Safety
///
/// As `mmap(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: libc::off_t,
) -> *mut c_void {
    // SAFETY: guaranteed by the caller.
    unsafe { mmap(addr, len, prot, flags, fd, offset) }
}

/// Intercepts the program's calls of `mremap`: removes the volatile marks of the old and new range first. In C the
/// argument `new` is optional, but the calling convention is the same, and the kernel reads the argument only with
/// `MREMAP_FIXED`.
///
/// # Safety
///
/// As `mremap(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    old: *mut c_void,
    old_len: usize,
    new_len: usize,
    flags: c_int,
    new: *mut c_void,
) -> *mut c_void {
    let is_possible = new_len > 0 && flags & !(libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP) == 0;
    if is_possible {
        remove_marks_if_aligned(old, old_len);
    }
    if is_possible && flags & libc::MREMAP_FIXED != 0 {
        remove_marks_if_aligned(new, new_len);
    }
    // SAFETY: guaranteed by the caller.
    unsafe { libc::syscall(libc::SYS_mremap, old, old_len, new_len, flags as c_long, new) as *mut c_void }
}

/// Intercepts the program's calls of `madvise`: if the advice discards contents, removes the volatile marks of the
/// range first.
///
/// # Safety
///
/// As `madvise(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(addr: *mut c_void, len: usize, advice: c_int) -> c_int {
    let discards_contents =
        [libc::MADV_DONTNEED, libc::MADV_FREE, libc::MADV_REMOVE, libc::MADV_DONTNEED_LOCKED].contains(&advice);
    if discards_contents {
        remove_marks_if_aligned(addr, len);
    }
    // SAFETY: guaranteed by the caller.
    unsafe { libc::syscall(libc::SYS_madvise, addr, len, advice) as c_int }
}
