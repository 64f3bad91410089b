//! jemalloc with its default settings, exported under the names of the malloc family.
//!
//! Each function only forwards to the prefixed symbol of the crate, so jemalloc itself is measured.

#![allow(unsafe_code)] // the C ABI of malloc

use core::ffi::{c_int, c_void};
use tikv_jemalloc_sys as jemalloc;

/// The largest usual OS page size of the processor. On systems with smaller pages, blocks have more alignment than
/// needed.
const PAGE_BYTES: usize = if cfg!(target_arch = "x86_64") { 4096 } else { 65536 };

/// Rounds up to whole pages. On overflow returns `size` itself, which is too large for any allocation to succeed.
fn whole_pages(size: usize) -> usize {
    size.checked_next_multiple_of(PAGE_BYTES).unwrap_or(size)
}

/// Allocates `size` bytes.
///
/// # Safety
///
/// The caller must keep the contract of C's `malloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc(size: usize) -> *mut c_void {
    // SAFETY: the arguments are forwarded unchanged; the caller keeps the contract of `malloc`.
    unsafe { jemalloc::malloc(size) }
}

/// Allocates `count * size` zeroed bytes.
///
/// # Safety
///
/// The caller must keep the contract of C's `calloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn calloc(count: usize, size: usize) -> *mut c_void {
    // SAFETY: the arguments are forwarded unchanged; the caller keeps the contract of `calloc`.
    unsafe { jemalloc::calloc(count, size) }
}

/// Resizes a block.
///
/// # Safety
///
/// The caller must keep the contract of C's `realloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(ptr: *mut c_void, size: usize) -> *mut c_void {
    // SAFETY: the arguments are forwarded unchanged; the caller keeps the contract of `realloc`.
    unsafe { jemalloc::realloc(ptr, size) }
}

/// Frees a block.
///
/// # Safety
///
/// The caller must keep the contract of C's `free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(ptr: *mut c_void) {
    // SAFETY: the arguments are forwarded unchanged; the caller keeps the contract of `free`.
    unsafe { jemalloc::free(ptr) }
}

/// Allocates an aligned block.
///
/// # Safety
///
/// The caller must keep the contract of C's `aligned_alloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aligned_alloc(alignment: usize, size: usize) -> *mut c_void {
    // SAFETY: the arguments are forwarded unchanged; the caller keeps the contract of `aligned_alloc`.
    unsafe { jemalloc::aligned_alloc(alignment, size) }
}

/// Allocates an aligned block.
///
/// # Safety
///
/// The caller must keep the contract of C's `memalign`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memalign(alignment: usize, size: usize) -> *mut c_void {
    // SAFETY: the arguments are forwarded unchanged; the caller keeps the contract of `memalign`.
    unsafe { jemalloc::aligned_alloc(alignment, size) }
}

/// Allocates an aligned block; returns 0 or an errno.
///
/// # Safety
///
/// The caller must keep the contract of C's `posix_memalign`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_memalign(out: *mut *mut c_void, alignment: usize, size: usize) -> c_int {
    // SAFETY: the arguments are forwarded unchanged; the caller keeps the contract of `posix_memalign`.
    unsafe { jemalloc::posix_memalign(out, alignment, size) }
}

/// Returns the usable size of a block.
///
/// # Safety
///
/// The caller must keep the contract of C's `malloc_usable_size`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc_usable_size(ptr: *mut c_void) -> usize {
    // SAFETY: the arguments are forwarded unchanged; the caller keeps the contract of `malloc_usable_size`.
    unsafe { jemalloc::malloc_usable_size(ptr) }
}

/// Resizes a block to `count * size` bytes.
///
/// # Safety
///
/// The caller must keep the contract of C's `reallocarray`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn reallocarray(ptr: *mut c_void, count: usize, size: usize) -> *mut c_void {
    // SAFETY: the arguments are forwarded unchanged; the caller keeps the contract of `reallocarray`.
    unsafe { jemalloc::realloc(ptr, count.saturating_mul(size)) }
}

/// Allocates a page-aligned block.
///
/// # Safety
///
/// The caller must keep the contract of C's `valloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn valloc(size: usize) -> *mut c_void {
    // SAFETY: the arguments are forwarded unchanged; the caller keeps the contract of `valloc`.
    unsafe { jemalloc::aligned_alloc(PAGE_BYTES, size) }
}

/// Allocates whole pages.
///
/// # Safety
///
/// The caller must keep the contract of C's `pvalloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvalloc(size: usize) -> *mut c_void {
    // SAFETY: the arguments are forwarded unchanged; the caller keeps the contract of `pvalloc`.
    unsafe { jemalloc::aligned_alloc(PAGE_BYTES, whole_pages(size)) }
}

/// Calls jemalloc's control function. The experiment `giveback` requests a purge with it.
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
    unsafe { jemalloc::mallctl(name, old, old_len, new, new_len) }
}
