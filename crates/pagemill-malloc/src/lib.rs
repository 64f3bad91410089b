//! The C functions `malloc`, `free` and related ones on Pagemill, for `LD_PRELOAD`.
//!
//! jemalloc serves sizes below 64 KiB, with extents from the arena ([`small`]); [`pagemill_heap`] serves larger sizes.
//! For sizes below 64 KiB, the exported functions [`malloc`] and [`free`] add one comparison and two jumps to
//! jemalloc's functions. All other cases are in [`large`].
//!
//! | file | contents |
//! |---|---|
//! | `lib.rs` | the exported functions; selects the path of a call |
//! | `large.rs` | large allocations, start, debts, errors |
//! | `small.rs` | jemalloc: its settings, its extents, its shrinker |
//! | `libc_fallback.rs` | libc fallback: the C library's malloc serves a program while it is small |
//! | `start.rs` | start of the library, growth of the program, exit; the helper thread |
//! | `globals.rs` | variables that several files use: the heap, the account, the limits of the fast paths |
//! | `settings.rs` | environment variables |
//! | `fork.rs` | the order of fork handlers |
//! | `mallctl.rs` | jemalloc's control call, for programs that are linked to jemalloc |
//! | `vrange_hooks.rs` | `pagemill_vrange`, and the mapping calls that remove its marks |
//! | `signals.rs` | `sigaction` and `signal`, so that Pagemill handles faults first |
//! | `check.rs` | `PAGEMILL_CHECK`: a bit for every small allocation |
//!
//! The program has *grown* when Pagemill serves it instead of the C library ([`libc_fallback`]).
//!
//! The crate allocates through its own functions only, and prints only warnings and messages that end the process.
//! There is no per-thread state, so nothing is cleaned up at thread exit. The crate makes no policy decisions: the heap
//! and the account do.
#![allow(unsafe_code)] // the C ABI of malloc

mod check;
mod fork;
mod globals;
mod large;
mod libc_fallback;
mod mallctl;
mod settings;
mod signals;
mod small;
mod start;
mod vrange_hooks;

use globals::{SMALL_BYTES, SMALL_LIMIT, SMALL_START, is_in_small_zone};
use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering::Acquire;
use tikv_jemalloc_sys as je;

/// Allocates `size` bytes; returns null and `ENOMEM` on failure.
///
/// Written in assembly, because every small allocation executes it: one comparison with memory and two jumps. The
/// compiler would load the atomic into a register first.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub extern "C" fn malloc(size: usize) -> *mut c_void {
    core::arch::naked_asm!(
        "cmp rdi, qword ptr [rip + {limit}]",
        "jae {large}",
        "jmp {small}",
        limit = sym SMALL_LIMIT,
        large = sym large::malloc,
        small = sym je::malloc,
    )
}

/// Frees an allocation of this library; null is allowed.
///
/// Written in assembly for the same reason as [`malloc`].
///
/// # Safety
///
/// The program must not use the allocation any more.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(pointer: *mut c_void) {
    core::arch::naked_asm!(
        "mov rax, rdi",
        "sub rax, qword ptr [rip + {start}]",
        "cmp rax, qword ptr [rip + {bytes}]",
        "jae {large}",
        "jmp {small}",
        start = sym SMALL_START,
        bytes = sym SMALL_BYTES,
        large = sym large::free,
        small = sym je::free,
    )
}

/// Allocates `size` bytes; returns null and `ENOMEM` on failure.
#[cfg(not(target_arch = "x86_64"))]
#[unsafe(no_mangle)]
pub extern "C" fn malloc(size: usize) -> *mut c_void {
    // Acquire ordering: jemalloc was started before the limit was stored.
    if size < SMALL_LIMIT.load(Acquire) {
        // SAFETY: jemalloc is initialised.
        return unsafe { je::malloc(size) };
    }
    large::malloc(size)
}

/// Frees an allocation of this library; null is allowed.
///
/// # Safety
///
/// The program must not use the allocation any more.
#[cfg(not(target_arch = "x86_64"))]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(pointer: *mut c_void) {
    if is_in_small_zone(pointer) {
        // SAFETY: the pointer is an allocation of jemalloc (guaranteed by the caller).
        return unsafe { je::free(pointer) };
    }
    // SAFETY: guaranteed by the caller.
    unsafe { large::free(pointer) }
}

/// Allocates a zeroed array of `count` elements of `size` bytes; returns null and `ENOMEM` on failure, also if the size
/// of the array overflows.
#[unsafe(no_mangle)]
pub extern "C" fn calloc(count: usize, size: usize) -> *mut c_void {
    match count.checked_mul(size) {
        Some(bytes) if bytes < SMALL_LIMIT.load(Acquire) => {
            // SAFETY: as in malloc.
            unsafe { je::calloc(1, bytes) }
        }
        Some(bytes) => large::calloc(bytes),
        None => globals::out_of_memory(),
    }
}

/// Resizes an allocation to `size` bytes; a size of 0 frees the allocation.
///
/// # Safety
///
/// `pointer` is null or an allocation of this library; the old address must not be used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(pointer: *mut c_void, size: usize) -> *mut c_void {
    if is_in_small_zone(pointer) && size < SMALL_LIMIT.load(Acquire) && size != 0 {
        // SAFETY: guaranteed by the caller.
        return unsafe { je::realloc(pointer, size) };
    }
    // SAFETY: guaranteed by the caller.
    unsafe { large::realloc(pointer, size) }
}

/// As [`realloc`] for an array; returns null and `ENOMEM` if the size overflows.
///
/// # Safety
///
/// As [`realloc`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn reallocarray(pointer: *mut c_void, count: usize, size: usize) -> *mut c_void {
    match count.checked_mul(size) {
        // SAFETY: guaranteed by the caller.
        Some(bytes) => unsafe { realloc(pointer, bytes) },
        None => globals::out_of_memory(),
    }
}

/// Allocates `size` bytes at a multiple of `align`, which must be a power of two; returns null and `EINVAL` for any
/// other value.
#[unsafe(no_mangle)]
pub extern "C" fn aligned_alloc(align: usize, size: usize) -> *mut c_void {
    large::allocate_aligned(align, size)
}

/// Allocates `size` bytes at a multiple of the smallest power of two that is at least `align`.
#[unsafe(no_mangle)]
pub extern "C" fn memalign(align: usize, size: usize) -> *mut c_void {
    large::allocate_aligned(align.checked_next_power_of_two().unwrap_or(0), size)
}

/// Allocates `size` bytes at a multiple of `align`, and stores the address in `result`. On failure returns `EINVAL` or
/// `ENOMEM` and stores nothing.
///
/// # Safety
///
/// `result` points to writable memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_memalign(result: *mut *mut c_void, align: usize, size: usize) -> c_int {
    if !align.is_power_of_two() || !align.is_multiple_of(size_of::<*mut c_void>()) {
        return libc::EINVAL;
    }
    let errno = large::errno();
    let pointer = large::allocate_aligned(align, size);
    large::set_errno(errno);
    if pointer.is_null() {
        return libc::ENOMEM;
    }
    // SAFETY: guaranteed by the caller.
    unsafe { result.write(pointer) };
    0
}

/// Allocates `size` bytes at a page boundary; returns null and `ENOMEM` on failure.
#[unsafe(no_mangle)]
pub extern "C" fn valloc(size: usize) -> *mut c_void {
    large::allocate_aligned(pagemill_core::units::os_page_bytes(), size)
}

/// Allocates `size` bytes, rounded up to whole pages, at a page boundary; returns null and `ENOMEM` on failure.
#[unsafe(no_mangle)]
pub extern "C" fn pvalloc(size: usize) -> *mut c_void {
    let page = pagemill_core::units::os_page_bytes();
    match size.max(1).checked_next_multiple_of(page) {
        Some(size) => large::allocate_aligned(page, size),
        None => globals::out_of_memory(),
    }
}

/// Returns the usable bytes of an allocation; 0 for null.
///
/// # Safety
///
/// `pointer` is null or an allocation of this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc_usable_size(pointer: *mut c_void) -> usize {
    // SAFETY: guaranteed by the caller.
    unsafe { large::usable_bytes(pointer) }
}

/// Returns all free memory to the system. Returns 1 if any memory was returned, else 0.
#[unsafe(no_mangle)]
pub extern "C" fn malloc_trim(_pad: usize) -> c_int {
    large::trim()
}

/// Frees an allocation of a known size (C23).
///
/// # Safety
///
/// As [`free`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free_sized(pointer: *mut c_void, _size: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe { free(pointer) }
}

/// Frees an allocation of a known size and alignment (C23).
///
/// # Safety
///
/// As [`free`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free_aligned_sized(pointer: *mut c_void, _align: usize, _size: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe { free(pointer) }
}
