//! Windows: reserved addresses in which pieces of files are mapped and unmapped.
#![allow(unsafe_code)] // replaces mappings

use crate::{file, mem};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise};
use std::ffi::CStr;
use std::io;

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

    #[test]
    fn the_maximum_of_mappings_is_read() {
        assert!(max_mappings() > 1000);
    }
}
