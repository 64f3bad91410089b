//! Huge pages that the administrator has reserved (hugetlb): mapping them, moving them to an address, and releasing
//! them.
//!
//! The kernel reserves the pages of a mapping when the mapping is created, or refuses to create it. So [`populate`]
//! later finds a page for each block. These pages are never swapped, split or partially released. They count neither as
//! resident memory of a process (`HugetlbPages` in its status file counts them) nor as memory of a control group.
//!
//! [`populate`]: crate::mem::populate
#![allow(unsafe_code)] // maps and moves pages

use crate::{disk, mem};
use rustix::mm::{MapFlags, MremapFlags, ProtFlags, mremap_fixed};
use std::io;

/// Maps `len_bytes` of reserved huge pages, each of `page_bytes`, at an address that the kernel chooses.
///
/// The pages read zero, are allocated at the first access, are not inherited by fork children, and can be moved by
/// [`place`].
///
/// # Errors
///
/// `ENOMEM` if too few reserved pages are free; `EINVAL` if the kernel has no pages of that size or cannot move them
/// (before Linux 5.16).
pub fn map(len_bytes: usize, page_bytes: usize) -> io::Result<usize> {
    assert!(page_bytes.is_power_of_two());
    assert!(len_bytes.is_multiple_of(page_bytes));
    let size = MapFlags::from_bits_retain(page_bytes.trailing_zeros() << libc::MAP_HUGE_SHIFT);
    let flags = MapFlags::PRIVATE | MapFlags::HUGETLB | size;
    // SAFETY: without MAP_FIXED a new mapping touches no existing memory.
    let addr = unsafe { mem::map(0, len_bytes, ProtFlags::READ | ProtFlags::WRITE, flags) }?;
    // Try one move here, where a failure does no harm. A kernel that cannot move such pages still unmaps the target.
    let moved = disk::keep_from_children(addr, len_bytes, true).and_then(|()| {
        let to = mem::reserve(len_bytes, page_bytes, 0)?;
        // SAFETY: no other thread knows these two ranges. After a failure, another thread may have mapped memory at
        // `to`, so `to` is not touched again.
        unsafe { place(addr, len_bytes, to) }.map(|()| to)
    });
    if moved.is_err() {
        // SAFETY: the range was mapped above and was not moved.
        unsafe { mem::unreserve(addr, len_bytes) };
    }
    moved
}

/// Moves a mapping that [`map`] created to the address `to`, and replaces the existing mapping there. A concurrent
/// reader of `to` reads either the old or the new memory.
///
/// # Errors
///
/// Errors of `mremap`. The mapping is then still at `from`. The state of `to` is unknown: it may be unmapped, and
/// another mapping may soon use it.
///
/// # Safety
///
/// `from` must be a whole mapping of [`map`]. `to` must be an equally long range of the caller's reservation, aligned
/// to the page size, with contents that no code needs.
pub unsafe fn place(from: usize, len_bytes: usize, to: usize) -> io::Result<()> {
    assert!(from.abs_diff(to) >= len_bytes, "the kernel moves no range onto itself");
    // SAFETY: guaranteed by the caller.
    unsafe { mremap_fixed(from as *mut _, len_bytes, len_bytes, MremapFlags::MAYMOVE, to as *mut _) }?;
    Ok(())
}

/// Returns the pages of a mapping to the kernel's reserve. The mapping's addresses stay reserved, without access.
///
/// # Errors
///
/// Errors of `mmap`. The state of the addresses is then unknown.
///
/// # Safety
///
/// The range must be one whole mapping of [`map`]. No code may need its contents or have a reference to them.
pub unsafe fn give_back(addr: usize, len_bytes: usize) -> io::Result<()> {
    // SAFETY: guaranteed by the caller.
    unsafe { mem::map(addr, len_bytes, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::FIXED) }.map(drop)
}
