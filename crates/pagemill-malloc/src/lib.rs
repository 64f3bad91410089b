//! The malloc family on Pagemill, for `LD_PRELOAD`.
//!
//! Sizes below 64 KiB go to jemalloc, whose extents come from the arena
//! ([`small`]); from there up to [`pagemill::heap`]. The two exported functions
//! that matter, [`malloc`] and [`free`], add one comparison and two jumps to
//! jemalloc's own; everything rare lies behind them in [`slow`].
//!
//! | file | what |
//! |---|---|
//! | `lib.rs` | the exported functions: which way a call goes |
//! | `slow.rs` | large sizes, start-up, debts, errors |
//! | `small.rs` | jemalloc: its settings, its extents, its shrinker |
//! | `young.rs` | a program while it is small: the C library's own malloc |
//! | `start.rs` | start, growth, exit; the helper thread |
//! | `settings.rs` | what the environment says |
//! | `fork.rs` | what happens around a fork, in which order |
//! | `marks.rs` | `pagemill_vrange`, and the calls that end what it marked |
//! | `signals.rs` | `sigaction` and `signal`: Pagemill hears of faults first |
//! | `check.rs` | `PAGEMILL_CHECK`: a bit for every small allocation |
//!
//! Nothing here allocates, except through itself, or prints, except before it
//! ends the process. No state of a thread is kept, so none has to be cleaned
//! up. There is no policy here: that is the heap's and the account's.
#![allow(unsafe_code)] // the C ABI of malloc

mod check;
mod fork;
mod marks;
mod settings;
mod signals;
mod slow;
mod small;
mod start;
mod young;

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering::Acquire, Ordering::Relaxed};
use tikv_jemalloc_sys as je;

/// Sizes below this go straight to jemalloc. 0 until the program has grown, while something is due outside its locks, and when checking.
static SMALL_LIMIT: AtomicUsize = AtomicUsize::new(0);

/// Addresses below this go straight to jemalloc. 0 until the program has grown, and when checking.
static SMALL_END: AtomicUsize = AtomicUsize::new(0);

/// Allocates `size` bytes; null and `ENOMEM` if they cannot be had.
///
/// Written out: one comparison with memory and two jumps, where the compiler
/// would load an atomic first. Every instruction here is on the way of each
/// small allocation.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub extern "C" fn malloc(size: usize) -> *mut c_void {
    core::arch::naked_asm!(
        "cmp rdi, qword ptr [rip + {limit}]",
        "jae {slow}",
        "jmp {small}",
        limit = sym SMALL_LIMIT,
        slow = sym slow::malloc,
        small = sym je::malloc,
    )
}

/// Frees an allocation of this library; null is fine.
///
/// Written out for the same reason as [`malloc`].
///
/// # Safety
///
/// The program does not use it any more.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(pointer: *mut c_void) {
    core::arch::naked_asm!(
        "cmp rdi, qword ptr [rip + {end}]",
        "jae {slow}",
        "jmp {small}",
        end = sym SMALL_END,
        slow = sym slow::free,
        small = sym je::free,
    )
}

/// Allocates `size` bytes; null and `ENOMEM` if they cannot be had.
#[cfg(not(target_arch = "x86_64"))]
#[unsafe(no_mangle)]
pub extern "C" fn malloc(size: usize) -> *mut c_void {
    // Acquire: who sees the limit sees jemalloc started.
    if size < SMALL_LIMIT.load(Acquire) {
        // SAFETY: jemalloc is initialised.
        return unsafe { je::malloc(size) };
    }
    slow::malloc(size)
}

/// Frees an allocation of this library; null is fine.
///
/// # Safety
///
/// The program does not use it any more.
#[cfg(not(target_arch = "x86_64"))]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(pointer: *mut c_void) {
    if (pointer as usize) < SMALL_END.load(Relaxed) {
        // SAFETY: null, or an allocation of jemalloc's (the caller's promise).
        return unsafe { je::free(pointer) };
    }
    // SAFETY: the caller's promise.
    unsafe { slow::free(pointer) }
}

/// Allocates an array, zeroed; null and `ENOMEM` also if the size overflows.
#[unsafe(no_mangle)]
pub extern "C" fn calloc(count: usize, size: usize) -> *mut c_void {
    match count.checked_mul(size) {
        Some(bytes) if bytes < SMALL_LIMIT.load(Acquire) => {
            // SAFETY: as in malloc.
            unsafe { je::calloc(1, bytes) }
        }
        Some(bytes) => slow::calloc(bytes),
        None => slow::out_of_memory(),
    }
}

/// Changes the size of an allocation; a size of 0 frees it.
///
/// # Safety
///
/// `pointer` is null or an allocation of this library; the old address is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(pointer: *mut c_void, size: usize) -> *mut c_void {
    let is_small = (pointer as usize) < SMALL_END.load(Relaxed) && size < SMALL_LIMIT.load(Acquire);
    if is_small && size != 0 {
        // SAFETY: the caller's promise.
        return unsafe { je::realloc(pointer, size) };
    }
    // SAFETY: the caller's promise.
    unsafe { slow::realloc(pointer, size) }
}

/// As [`realloc`] for an array; null and `ENOMEM` if the size overflows.
///
/// # Safety
///
/// As [`realloc`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn reallocarray(pointer: *mut c_void, count: usize, size: usize) -> *mut c_void {
    match count.checked_mul(size) {
        // SAFETY: the caller's promise.
        Some(bytes) => unsafe { realloc(pointer, bytes) },
        None => slow::out_of_memory(),
    }
}

/// Allocates at a multiple of `align`, a power of two; null and `EINVAL` for any other.
#[unsafe(no_mangle)]
pub extern "C" fn aligned_alloc(align: usize, size: usize) -> *mut c_void {
    slow::aligned(align, size)
}

/// Allocates at a multiple of `align`, rounded up to a power of two.
#[unsafe(no_mangle)]
pub extern "C" fn memalign(align: usize, size: usize) -> *mut c_void {
    slow::aligned(align.checked_next_power_of_two().unwrap_or(0), size)
}

/// Stores an allocation at a multiple of `align`; returns `EINVAL` or `ENOMEM` and stores nothing otherwise.
///
/// # Safety
///
/// `result` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_memalign(result: *mut *mut c_void, align: usize, size: usize) -> c_int {
    if !align.is_power_of_two() || !align.is_multiple_of(size_of::<*mut c_void>()) {
        return libc::EINVAL;
    }
    let errno = slow::errno();
    let pointer = slow::aligned(align, size);
    slow::set_errno(errno);
    if pointer.is_null() {
        return libc::ENOMEM;
    }
    // SAFETY: the caller's promise.
    unsafe { result.write(pointer) };
    0
}

/// Allocates at a page boundary.
#[unsafe(no_mangle)]
pub extern "C" fn valloc(size: usize) -> *mut c_void {
    slow::aligned(pagemill::units::os_page_bytes(), size)
}

/// Allocates whole pages.
#[unsafe(no_mangle)]
pub extern "C" fn pvalloc(size: usize) -> *mut c_void {
    let page = pagemill::units::os_page_bytes();
    match size.max(1).checked_next_multiple_of(page) {
        Some(size) => slow::aligned(page, size),
        None => slow::out_of_memory(),
    }
}

/// Bytes that may be used of an allocation; 0 for null.
///
/// # Safety
///
/// `pointer` is null or an allocation of this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc_usable_size(pointer: *mut c_void) -> usize {
    // SAFETY: the caller's promise.
    unsafe { slow::usable(pointer) }
}

/// Gives all free memory back to the system; 1 if there was some.
#[unsafe(no_mangle)]
pub extern "C" fn malloc_trim(_pad: usize) -> c_int {
    slow::trim()
}

/// Frees an allocation of a known size (C23).
///
/// # Safety
///
/// As [`free`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free_sized(pointer: *mut c_void, _size: usize) {
    // SAFETY: the caller's promise.
    unsafe { free(pointer) }
}

/// Frees an allocation of a known size and alignment (C23).
///
/// # Safety
///
/// As [`free`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free_aligned_sized(pointer: *mut c_void, _align: usize, _size: usize) {
    // SAFETY: the caller's promise.
    unsafe { free(pointer) }
}
