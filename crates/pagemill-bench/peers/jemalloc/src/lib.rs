//! jemalloc with its default settings, exported under the names of the malloc family.
//!
//! Each function only forwards to the prefixed symbol of the crate, so jemalloc itself is measured.

#![allow(unsafe_code)] // the C ABI of malloc

use core::ffi::{c_int, c_void};
use tikv_jemalloc_sys as allocator;

#[path = "../../family.rs"]
mod family;

/// Calls jemalloc's control function `mallctl`, by which the experiment `giveback` makes jemalloc return free memory.
///
/// # Safety
///
/// The caller must keep the contract of jemalloc's `mallctl`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mallctl(
    name: *const core::ffi::c_char,
    old: *mut c_void,
    old_len: *mut usize,
    new: *mut c_void,
    new_len: usize,
) -> c_int {
    // SAFETY: the arguments are forwarded unchanged; the caller keeps the contract of `mallctl`.
    unsafe { allocator::mallctl(name, old, old_len, new, new_len) }
}
