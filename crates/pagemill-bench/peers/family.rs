//! The functions of the malloc family, for each of the two allocators. Each function only forwards to the allocator.

#![allow(unsafe_code)] // the C ABI of malloc

use core::ffi::{c_int, c_void};

use crate::allocator;

/// The largest usual OS page size of the processor architecture. On systems with smaller pages, allocations have more
/// alignment than needed.
const PAGE_BYTES: usize = if cfg!(target_arch = "x86_64") { 4096 } else { 65536 };

/// Rounds `size` up to whole OS pages. On overflow returns `size` itself, which is too large for any allocation to
/// succeed.
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
    unsafe { allocator::malloc(size) }
}

/// Allocates `count * size` zeroed bytes.
///
/// # Safety
///
/// The caller must keep the contract of C's `calloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn calloc(count: usize, size: usize) -> *mut c_void {
    // SAFETY: the arguments are forwarded unchanged; the caller keeps the contract of `calloc`.
    unsafe { allocator::calloc(count, size) }
}

/// Resizes an allocation to `size` bytes.
///
/// # Safety
///
/// The caller must keep the contract of C's `realloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(ptr: *mut c_void, size: usize) -> *mut c_void {
    // SAFETY: the arguments are forwarded unchanged; the caller keeps the contract of `realloc`.
    unsafe { allocator::realloc(ptr, size) }
}

/// Frees an allocation.
///
/// # Safety
///
/// The caller must keep the contract of C's `free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(ptr: *mut c_void) {
    // SAFETY: the arguments are forwarded unchanged; the caller keeps the contract of `free`.
    unsafe { allocator::free(ptr) }
}

/// Allocates `size` bytes at a multiple of `alignment`.
///
/// # Safety
///
/// The caller must keep the contract of C's `aligned_alloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aligned_alloc(alignment: usize, size: usize) -> *mut c_void {
    // SAFETY: the arguments are forwarded unchanged; the caller keeps the contract of `aligned_alloc`.
    unsafe { allocator::aligned_alloc(alignment, size) }
}

/// Allocates `size` bytes at a multiple of `alignment`.
///
/// # Safety
///
/// The caller must keep the contract of C's `memalign`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memalign(alignment: usize, size: usize) -> *mut c_void {
    // SAFETY: the arguments are forwarded unchanged; the caller keeps the contract of `memalign`.
    unsafe { allocator::aligned_alloc(alignment, size) }
}

/// Allocates `size` bytes at a multiple of `alignment`, and stores the address in `out`. Returns 0 or an errno.
///
/// # Safety
///
/// The caller must keep the contract of C's `posix_memalign`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_memalign(out: *mut *mut c_void, alignment: usize, size: usize) -> c_int {
    // SAFETY: the arguments are forwarded unchanged; the caller keeps the contract of `posix_memalign`.
    unsafe { allocator::posix_memalign(out, alignment, size) }
}

/// Returns the usable size of an allocation in bytes.
///
/// # Safety
///
/// The caller must keep the contract of C's `malloc_usable_size`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc_usable_size(ptr: *mut c_void) -> usize {
    // SAFETY: the arguments are forwarded unchanged; the caller keeps the contract of `malloc_usable_size`.
    unsafe { allocator::malloc_usable_size(ptr) }
}

/// Resizes an allocation to `count * size` bytes.
///
/// # Safety
///
/// The caller must keep the contract of C's `reallocarray`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn reallocarray(ptr: *mut c_void, count: usize, size: usize) -> *mut c_void {
    // SAFETY: the arguments are forwarded unchanged; the caller keeps the contract of `reallocarray`.
    unsafe { allocator::realloc(ptr, count.saturating_mul(size)) }
}

/// Allocates `size` bytes at a multiple of the OS page size.
///
/// # Safety
///
/// The caller must keep the contract of C's `valloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn valloc(size: usize) -> *mut c_void {
    // SAFETY: the arguments are forwarded unchanged; the caller keeps the contract of `valloc`.
    unsafe { allocator::aligned_alloc(PAGE_BYTES, size) }
}

/// Allocates whole OS pages of at least `size` bytes in total.
///
/// # Safety
///
/// The caller must keep the contract of C's `pvalloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvalloc(size: usize) -> *mut c_void {
    // SAFETY: the arguments are forwarded unchanged; the caller keeps the contract of `pvalloc`.
    unsafe { allocator::aligned_alloc(PAGE_BYTES, whole_pages(size)) }
}
