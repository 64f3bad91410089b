//! Huge pages that the administrator has reserved (hugetlb): mapped with their reservation, moved into place,
//! released.
//!
//! A mapping reserves its pages when it is made, or is refused then. So [`populate`] later finds one for each block.
//! These pages are never swapped, split or partially released. They count neither as resident memory of a process
//! (`HugetlbPages` in its status) nor of a control group.
//!
//! [`populate`]: crate::mem::populate
#![allow(unsafe_code)] // maps and moves pages

use crate::{disk, mem};
use std::io;

const ACCESS: i32 = libc::PROT_READ | libc::PROT_WRITE;

/// Maps reserved pages of `page_bytes` at an address that the kernel chooses.
///
/// They read zero, are allocated at the first touch, are in no fork child, and can be moved by [`place`].
///
/// # Errors
///
/// `ENOMEM` if too few are free; `EINVAL` if the kernel has no pages of that size or cannot move them (before Linux
/// 5.16).
pub fn map(len_bytes: usize, page_bytes: usize) -> io::Result<usize> {
    let size = (page_bytes.trailing_zeros() as i32) << libc::MAP_HUGE_SHIFT;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | size;
    // SAFETY: without MAP_FIXED a new mapping touches no existing memory.
    let addr = unsafe { mem::map(0, len_bytes, ACCESS, flags) }?;
    // Tries one move here, where failure is harmless: a kernel that cannot move these pages still unmaps the target.
    let moved = disk::keep_from_children(addr, len_bytes, true).and_then(|()| {
        let to = mem::reserve(len_bytes, page_bytes, 0)?;
        // SAFETY: both ranges are ours and unknown to other threads. After a failure `to` may belong to another: it is
        // left alone.
        unsafe { place(addr, len_bytes, to) }.map(|()| to)
    });
    if moved.is_err() {
        // SAFETY: mapped above, and not moved.
        unsafe { mem::unreserve(addr, len_bytes) };
    }
    moved
}

/// Moves a mapping made by [`map`] to `to` and replaces what is there. A concurrent reader sees the old or the new
/// memory.
///
/// # Errors
///
/// Errors of `mremap`. The mapping is then still at `from`. The state of `to` is unknown: it may be unmapped and soon
/// used by another mapping.
///
/// # Safety
///
/// `from` is such a mapping. `to` is an equally long part of the caller's reservation, aligned to the page size, and
/// its contents are not needed.
pub unsafe fn place(from: usize, len_bytes: usize, to: usize) -> io::Result<()> {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: guaranteed by the caller.
    let moved = unsafe { libc::syscall(libc::SYS_mremap, from, len_bytes, len_bytes, flags, to) };
    if moved == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Returns a mapping's pages to the reserve. Its addresses stay reserved, without access.
///
/// # Errors
///
/// Errors of `mmap`. The state of the addresses is then unknown.
///
/// # Safety
///
/// The range is one whole mapping made by [`map`]. Its contents are not needed, and no reference to them is alive.
pub unsafe fn give_back(addr: usize, len_bytes: usize) -> io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: guaranteed by the caller.
    unsafe { mem::map(addr, len_bytes, libc::PROT_NONE, flags) }.map(drop)
}
