//! jemalloc under the names of the malloc family, with its own defaults.
//!
//! Every function is one jump to the crate's prefixed symbol, so that what is measured is jemalloc.

// Exporting C symbols and calling C is all that this file does.
#![allow(unsafe_code)] // the C ABI of malloc

use core::ffi::{c_int, c_void};
use tikv_jemalloc_sys as jemalloc;

/// The smallest page of the systems this is built for; a larger one only costs alignment.
const PAGE_BYTES: usize = if cfg!(target_arch = "x86_64") { 4096 } else { 65536 };

/// Rounds up to whole pages; what overflows stays too large to be granted.
fn whole_pages(size: usize) -> usize {
    size.checked_next_multiple_of(PAGE_BYTES).unwrap_or(size)
}

/// Takes `size` bytes.
///
/// # Safety
///
/// As for `malloc` of C: the caller keeps that function's contract.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc(size: usize) -> *mut c_void {
    // SAFETY: the arguments come unchanged from a caller who keeps the contract of `malloc`.
    unsafe { jemalloc::malloc(size) }
}

/// Takes `count * size` zeroed bytes.
///
/// # Safety
///
/// As for `calloc` of C: the caller keeps that function's contract.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn calloc(count: usize, size: usize) -> *mut c_void {
    // SAFETY: the arguments come unchanged from a caller who keeps the contract of `calloc`.
    unsafe { jemalloc::calloc(count, size) }
}

/// Resizes a block.
///
/// # Safety
///
/// As for `realloc` of C: the caller keeps that function's contract.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(ptr: *mut c_void, size: usize) -> *mut c_void {
    // SAFETY: the arguments come unchanged from a caller who keeps the contract of `realloc`.
    unsafe { jemalloc::realloc(ptr, size) }
}

/// Gives a block back.
///
/// # Safety
///
/// As for `free` of C: the caller keeps that function's contract.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(ptr: *mut c_void) {
    // SAFETY: the arguments come unchanged from a caller who keeps the contract of `free`.
    unsafe { jemalloc::free(ptr) }
}

/// Takes an aligned block.
///
/// # Safety
///
/// As for `aligned_alloc` of C: the caller keeps that function's contract.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aligned_alloc(alignment: usize, size: usize) -> *mut c_void {
    // SAFETY: the arguments come unchanged from a caller who keeps the contract of `aligned_alloc`.
    unsafe { jemalloc::aligned_alloc(alignment, size) }
}

/// Takes an aligned block.
///
/// # Safety
///
/// As for `memalign` of C: the caller keeps that function's contract.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memalign(alignment: usize, size: usize) -> *mut c_void {
    // SAFETY: the arguments come unchanged from a caller who keeps the contract of `memalign`.
    unsafe { jemalloc::aligned_alloc(alignment, size) }
}

/// Takes an aligned block; reports errors as its value.
///
/// # Safety
///
/// As for `posix_memalign` of C: the caller keeps that function's contract.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_memalign(out: *mut *mut c_void, alignment: usize, size: usize) -> c_int {
    // SAFETY: the arguments come unchanged from a caller who keeps the contract of `posix_memalign`.
    unsafe { jemalloc::posix_memalign(out, alignment, size) }
}

/// Tells how many bytes a block really has.
///
/// # Safety
///
/// As for `malloc_usable_size` of C: the caller keeps that function's contract.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc_usable_size(ptr: *mut c_void) -> usize {
    // SAFETY: the arguments come unchanged from a caller who keeps the contract of `malloc_usable_size`.
    unsafe { jemalloc::malloc_usable_size(ptr) }
}

/// Resizes a block to `count * size` bytes.
///
/// # Safety
///
/// As for `reallocarray` of C: the caller keeps that function's contract.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn reallocarray(ptr: *mut c_void, count: usize, size: usize) -> *mut c_void {
    // SAFETY: the arguments come unchanged from a caller who keeps the contract of `reallocarray`.
    unsafe { jemalloc::realloc(ptr, count.saturating_mul(size)) }
}

/// Takes a block that starts a page.
///
/// # Safety
///
/// As for `valloc` of C: the caller keeps that function's contract.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn valloc(size: usize) -> *mut c_void {
    // SAFETY: the arguments come unchanged from a caller who keeps the contract of `valloc`.
    unsafe { jemalloc::aligned_alloc(PAGE_BYTES, size) }
}

/// Takes whole pages.
///
/// # Safety
///
/// As for `pvalloc` of C: the caller keeps that function's contract.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvalloc(size: usize) -> *mut c_void {
    // SAFETY: the arguments come unchanged from a caller who keeps the contract of `pvalloc`.
    unsafe { jemalloc::aligned_alloc(PAGE_BYTES, whole_pages(size)) }
}

/// jemalloc's control call, by which `giveback` asks for free memory.
///
/// # Safety
///
/// As for `mallctl` of jemalloc: the caller keeps that function's contract.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mallctl(
    name: *const core::ffi::c_char,
    old: *mut c_void,
    old_len: *mut usize,
    new: *mut c_void,
    new_len: usize,
) -> c_int {
    // SAFETY: the arguments come unchanged from a caller who keeps the contract of `mallctl`.
    unsafe { jemalloc::mallctl(name, old, old_len, new, new_len) }
}
