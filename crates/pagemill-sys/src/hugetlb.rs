//! Huge pages that the administrator has reserved (hugetlb): mapped with their reservation, moved into place, given back.
//!
//! A mapping takes its pages out of what is free in the reserve when it is made, or is refused then: [`populate`] finds one for each
//! block later. None is ever swapped, split, or given back in part. They are no part of the resident memory of a process
//! (`HugetlbPages` in its status), nor of that of a control group.
//!
//! [`populate`]: crate::mem::populate
#![allow(unsafe_code)] // maps and moves pages

use crate::{disk, mem};
use std::io;

const ACCESS: i32 = libc::PROT_READ | libc::PROT_WRITE;

/// Maps reserved pages of `page_bytes`, wherever the kernel likes. They read zero, come with the first touch, are in no fork
/// child, and can be moved by [`place`].
///
/// # Errors
///
/// `ENOMEM` where not so many are free; `EINVAL` where the kernel has none of that size, or does not move them (before Linux 5.16).
pub fn map(len_bytes: usize, page_bytes: usize) -> io::Result<usize> {
    let size = (page_bytes.trailing_zeros() as i32) << libc::MAP_HUGE_SHIFT;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | size;
    // SAFETY: without MAP_FIXED a new mapping touches no existing memory.
    let addr = unsafe { mem::map(0, len_bytes, ACCESS, flags) }?;
    // Tried once where it does no harm: a kernel that does not move them unmaps the target all the same.
    let moved = disk::keep_from_children(addr, len_bytes, true).and_then(|()| {
        let to = mem::reserve(len_bytes, page_bytes, 0)?;
        // SAFETY: both are ours, and nobody knows of them. If it fails `to` may be another's already: it is left alone.
        unsafe { place(addr, len_bytes, to) }.map(|()| to)
    });
    if moved.is_err() {
        // SAFETY: mapped above, and not moved.
        unsafe { mem::unreserve(addr, len_bytes) };
    }
    moved
}

/// Moves a mapping that [`map`] made to `to`, in the place of what is there. Who reads there meanwhile sees the one or the other.
///
/// # Errors
///
/// What `mremap` says. The mapping is where it was then; nothing is known of `to`, which may be unmapped, and soon another's.
///
/// # Safety
///
/// `from` is such a mapping, `to` as much of a reservation of the caller at a multiple of the page, and nobody needs what is there.
pub unsafe fn place(from: usize, len_bytes: usize, to: usize) -> io::Result<()> {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: the caller's promise.
    let moved = unsafe { libc::syscall(libc::SYS_mremap, from, len_bytes, len_bytes, flags, to) };
    if moved == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Gives a mapping's pages back to the reserve. Its addresses stay reserved, without access.
///
/// # Errors
///
/// What `mmap` says. Nothing is known of the addresses then.
///
/// # Safety
///
/// It is one that [`map`] made, whole; nobody needs the contents any more, and no reference to them is alive.
pub unsafe fn give_back(addr: usize, len_bytes: usize) -> io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: the caller's promise.
    unsafe { mem::map(addr, len_bytes, libc::PROT_NONE, flags) }.map(drop)
}
