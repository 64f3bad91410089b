//! Windows: reserved addresses in which pieces of files are mapped and unmapped.
#![allow(unsafe_code)] // replaces mappings

use crate::{file, mem};
use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags, madvise, mremap_fixed};
use std::ffi::CStr;
use std::io;

pub use rustix::io::Errno;

/// The maximum number of mappings of a process.
const MAX_MAP_COUNT_PATH: &CStr = c"/proc/sys/vm/max_map_count";

/// The default of `vm.max_map_count`.
const DEFAULT_MAX_MAPPINGS: usize = 65_530;

/// Replaces the mappings of the `len_bytes` from `addr` on by a reservation, without access or pages.
///
/// # Errors
///
/// `ENOMEM` if the process has reached its limit of mappings.
///
/// # Safety
///
/// The range must lie inside one reservation of the caller. Any thread that accesses the range must tolerate or handle
/// the fault.
pub unsafe fn reserve_again(addr: usize, len_bytes: usize) -> io::Result<()> {
    // SAFETY: guaranteed by the caller.
    unsafe { mem::map(addr, len_bytes, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::FIXED) }.map(drop)
}

/// Maps the `len_bytes` of a file that are mapped from address `from` on a second time, at `to`, in place of the
/// existing mapping there. The new mapping has the access and the advice of the one at `from`. Needs no descriptor of
/// the file, and may be called in a signal handler.
///
/// # Errors
///
/// `ENOMEM` if the process has reached its limit of mappings. The addresses may be unmapped then.
///
/// # Safety
///
/// `from..from + len_bytes` must be a shared mapping of a file. `to..to + len_bytes` must lie inside one reservation of
/// the caller. Any thread that accesses that range must tolerate or handle the fault.
pub unsafe fn map_again(from: usize, len_bytes: usize, to: usize) -> Result<(), Errno> {
    // SAFETY: with an old length of 0 the mapping at `from` stays. The caller guarantees the rest.
    unsafe { mremap_fixed(from as *mut _, 0, len_bytes, MremapFlags::MAYMOVE, to as *mut _) }?;
    Ok(())
}

/// Reserves the `len_bytes` from `addr` on, if a failed call has unmapped them. Does nothing if something is mapped
/// there.
pub fn reserve_if_unmapped(addr: usize, len_bytes: usize) {
    let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
    // SAFETY: replaces no mapping. Fails if there is one.
    let _ = unsafe { mem::map(addr, len_bytes, ProtFlags::empty(), flags) };
}

/// Moves the pages of the `len_bytes` of private memory from address `from` on to `to`, in place of the existing
/// mapping there. Another thread sees the old mapping or the moved pages. The addresses from `from` on stay mapped,
/// without pages. May be called in a signal handler.
///
/// # Errors
///
/// As [`map_again`].
///
/// # Safety
///
/// The caller owns both ranges, each in one mapping, and no thread accesses the range at `from`.
pub unsafe fn move_pages(from: usize, len_bytes: usize, to: usize) -> Result<(), Errno> {
    let flags = MremapFlags::MAYMOVE | MremapFlags::DONTUNMAP;
    // SAFETY: guaranteed by the caller.
    unsafe { mremap_fixed(from as *mut _, len_bytes, len_bytes, flags, to as *mut _) }?;
    Ok(())
}

/// Maps `len_bytes` of private memory without pages, aligned to `align_bytes`. Fork children do not get the memory.
///
/// Ranges that [`move_pages`] moves out of it to adjacent addresses are one mapping there, if they were adjacent here.
///
/// # Errors
///
/// `ENOMEM` if there are no addresses, or if the system commits memory strictly and has too little.
pub fn map_private(len_bytes: usize, align_bytes: usize, use_huge: bool) -> io::Result<usize> {
    let addr = mem::reserve(len_bytes, align_bytes, 0)?;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the range was reserved above.
    let mapped =
        unsafe { mem::map(addr, len_bytes, access, MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE) };
    if let Err(error) = mapped {
        // SAFETY: no other code knows the addresses.
        unsafe { mem::unreserve(addr, len_bytes) };
        return Err(error);
    }
    exclude_from_fork(addr, len_bytes);
    if use_huge {
        mem::allow_huge(addr, len_bytes);
    } else {
        mem::forbid_huge(addr, len_bytes);
    }
    Ok(addr)
}

/// Excludes the `len_bytes` from `addr` on from fork children. Returns whether the kernel accepted the advice.
pub fn exclude_from_fork(addr: usize, len_bytes: usize) -> bool {
    // SAFETY: the advice concerns children only.
    unsafe { madvise(addr as *mut _, len_bytes, Advice::LinuxDontFork) }.is_ok()
}

/// Returns the maximum number of mappings of a process (`vm.max_map_count`).
pub fn max_mappings() -> usize {
    let mut buffer = [0; 32];
    let text = file::read(MAX_MAP_COUNT_PATH, &mut buffer).ok().and_then(|text| std::str::from_utf8(text).ok());
    text.and_then(|text| text.trim().parse().ok()).unwrap_or(DEFAULT_MAX_MAPPINGS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault;

    #[test]
    fn a_replaced_mapping_faults_again() {
        let page = mem::os_page_bytes();
        let addr = mem::reserve(2 * page, page, 0).unwrap();
        // SAFETY: this test reserved the range.
        unsafe { mem::open(addr, 2 * page).unwrap() };
        assert!(fault::is_readable(addr) && exclude_from_fork(addr, 2 * page));
        // SAFETY: no other code accesses the range.
        unsafe { reserve_again(addr, page).unwrap() };
        assert!(!fault::is_readable(addr) && fault::is_readable(addr + page));
        // SAFETY: as above.
        unsafe { mem::unreserve(addr, 2 * page) };
    }

    /// Pieces of private memory are moved to adjacent addresses, each by a call of its own. They must have their bytes
    /// there, in one mapping.
    #[test]
    fn moved_pieces_are_one_mapping() {
        let page = mem::os_page_bytes();
        let (from, to) = (map_private(8 * page, page, false).unwrap(), mem::reserve(8 * page, page, 0).unwrap());
        for at in [2, 1, 3, 4] {
            // SAFETY: no other code knows the memory.
            unsafe {
                ((from + at * page) as *mut u8).write(at as u8);
                move_pages(from + at * page, page, to + at * page).unwrap();
            }
        }
        // SAFETY: as above.
        let found = [1, 2, 3, 4].map(|at| unsafe { ((to + at * page) as *const u8).read() });
        assert_eq!(found, [1, 2, 3, 4]);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let mapping = format!("{:x}-{:x} rw-p", to + page, to + 5 * page);
        assert!(maps.contains(&mapping), "{mapping} in {maps}");
        assert!(!fault::is_readable(to) && fault::is_readable(from + page), "the source stays mapped");
        // SAFETY: as above.
        unsafe {
            mem::unreserve(from, 8 * page);
            mem::unreserve(to, 8 * page);
        }
    }

    #[test]
    fn the_maximum_of_mappings_is_read() {
        assert!(max_mappings() > 1000);
    }
}
