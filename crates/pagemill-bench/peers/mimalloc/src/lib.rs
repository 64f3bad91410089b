//! mimalloc under the names of the malloc family, with its own defaults.
//!
//! Every function is one jump to the crate's prefixed symbol, so that what is measured is mimalloc.

// Exporting C symbols and calling C is all that this file does.
#![allow(unsafe_code)] // the C ABI of malloc

use core::ffi::{c_int, c_void};
use libmimalloc_sys as mimalloc;

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
    unsafe { mimalloc::mi_malloc(size) }
}

/// Takes `count * size` zeroed bytes.
///
/// # Safety
///
/// As for `calloc` of C: the caller keeps that function's contract.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn calloc(count: usize, size: usize) -> *mut c_void {
    // SAFETY: the arguments come unchanged from a caller who keeps the contract of `calloc`.
    unsafe { mimalloc::mi_calloc(count, size) }
}

/// Resizes a block.
///
/// # Safety
///
/// As for `realloc` of C: the caller keeps that function's contract.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(ptr: *mut c_void, size: usize) -> *mut c_void {
    // SAFETY: the arguments come unchanged from a caller who keeps the contract of `realloc`.
    unsafe { mimalloc::mi_realloc(ptr, size) }
}

/// Gives a block back.
///
/// # Safety
///
/// As for `free` of C: the caller keeps that function's contract.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(ptr: *mut c_void) {
    // SAFETY: the arguments come unchanged from a caller who keeps the contract of `free`.
    unsafe { mimalloc::mi_free(ptr) }
}

/// Takes an aligned block.
///
/// # Safety
///
/// As for `aligned_alloc` of C: the caller keeps that function's contract.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aligned_alloc(alignment: usize, size: usize) -> *mut c_void {
    // SAFETY: the arguments come unchanged from a caller who keeps the contract of `aligned_alloc`.
    unsafe { mimalloc::mi_malloc_aligned(size, alignment) }
}

/// Takes an aligned block.
///
/// # Safety
///
/// As for `memalign` of C: the caller keeps that function's contract.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memalign(alignment: usize, size: usize) -> *mut c_void {
    // SAFETY: the arguments come unchanged from a caller who keeps the contract of `memalign`.
    unsafe { mimalloc::mi_malloc_aligned(size, alignment) }
}

/// Takes an aligned block; reports errors as its value.
///
/// # Safety
///
/// As for `posix_memalign` of C: the caller keeps that function's contract.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_memalign(out: *mut *mut c_void, alignment: usize, size: usize) -> c_int {
    // SAFETY: the arguments come unchanged from a caller who keeps the contract of `posix_memalign`.
    unsafe { mimalloc::mi_posix_memalign(out, alignment, size) }
}

/// Tells how many bytes a block really has.
///
/// # Safety
///
/// As for `malloc_usable_size` of C: the caller keeps that function's contract.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc_usable_size(ptr: *mut c_void) -> usize {
    // SAFETY: the arguments come unchanged from a caller who keeps the contract of `malloc_usable_size`.
    unsafe { mimalloc::mi_usable_size(ptr) }
}

/// Resizes a block to `count * size` bytes.
///
/// # Safety
///
/// As for `reallocarray` of C: the caller keeps that function's contract.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn reallocarray(ptr: *mut c_void, count: usize, size: usize) -> *mut c_void {
    // SAFETY: the arguments come unchanged from a caller who keeps the contract of `reallocarray`.
    unsafe { mimalloc::mi_realloc(ptr, count.saturating_mul(size)) }
}

/// Takes a block that starts a page.
///
/// # Safety
///
/// As for `valloc` of C: the caller keeps that function's contract.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn valloc(size: usize) -> *mut c_void {
    // SAFETY: the arguments come unchanged from a caller who keeps the contract of `valloc`.
    unsafe { mimalloc::mi_malloc_aligned(size, PAGE_BYTES) }
}

/// Takes whole pages.
///
/// # Safety
///
/// As for `pvalloc` of C: the caller keeps that function's contract.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvalloc(size: usize) -> *mut c_void {
    // SAFETY: the arguments come unchanged from a caller who keeps the contract of `pvalloc`.
    unsafe { mimalloc::mi_malloc_aligned(whole_pages(size), PAGE_BYTES) }
}

/// `mi_collect`, by which `giveback` asks for free memory; its own name is taken inside this library.
///
/// # Safety
///
/// As for `mi_collect` of mimalloc, which asks for nothing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peer_mi_collect(force: bool) {
    // SAFETY: `mi_collect` may be called at any time from any thread.
    unsafe { mimalloc::mi_collect(force) }
}
