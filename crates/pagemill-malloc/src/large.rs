//! Large allocations: the path of malloc for all sizes that jemalloc does not serve. It also does what must wait until
//! jemalloc holds no lock, starts the library, and reports errors.
#![allow(unsafe_code)] // the program's pointers

use crate::globals::{self, SMALL_LIMIT, debug_assert_fatal, out_of_memory};
use crate::start::{self, State};
use crate::{check, libc_fallback, small, vrange_hooks};
use pagemill_core::Error;
use pagemill_heap::MIN_BYTES;
pub use pagemill_sys::process::set_errno;
use pagemill_volatile::Base;
use std::ffi::{c_int, c_void};
use std::ptr::{self, NonNull};
use std::sync::atomic::Ordering::Relaxed;

/// Returns the C library's error number of this thread.
pub fn errno() -> c_int {
    // SAFETY: the function returns the address of this thread's errno.
    unsafe { *libc::__errno_location() }
}

/// Ends the process because the program misused a pointer. The message names the function and the kind of misuse.
fn abort_for_misuse(function: &str, error: &Error) -> ! {
    let kind = match error {
        Error::FreedBefore { .. } if function == "free" => "double free",
        Error::FreedBefore { .. } => "use after free",
        _ => "invalid pointer",
    };
    pagemill_sys::fatal(format_args!("pagemill: {function}(): {kind}: {error}"))
}

/// Does the work that had to wait while jemalloc held its locks: pays the small allocator's debt, starts the helper
/// thread. The caller must hold no lock.
fn do_deferred_work(pagemill: &'static Base) {
    if SMALL_LIMIT.load(Relaxed) == 0 && !check::is_on() {
        SMALL_LIMIT.store(MIN_BYTES, Relaxed);
    }
    if pagemill.instance.account.has_debt() {
        pagemill.instance.account.pay_debt();
    }
    start_helper_if_due(pagemill);
}

/// Starts the helper thread if none runs and the process holds enough memory to need one.
#[inline]
fn start_helper_if_due(pagemill: &'static Base) {
    if pagemill.instance.helper.is_due() {
        start::start_helper(pagemill);
    }
}

/// The contents that the caller requires of an allocation.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Zeroing {
    Any,
    Zeroed,
}

/// Allocates from the allocator that serves the program now. Returns null and sets `errno` on failure.
fn allocate(size: usize, align: usize, zeroing: Zeroing) -> *mut c_void {
    let from_c_library = || libc_fallback::allocate(size, align, zeroing == Zeroing::Zeroed);
    match start::state() {
        State::LibcFallback if !libc_fallback::is_small_with(size) && start::switch_to_pagemill() => {
            allocate(size, align, zeroing)
        }
        State::LibcFallback => {
            let pointer = from_c_library();
            charge_libc_fallback();
            pointer
        }
        State::Starting | State::Unmanaged => from_c_library(),
        State::Ready(pagemill) => {
            do_deferred_work(pagemill);
            if size.max(align) < MIN_BYTES {
                let take = || small::allocate(size, align, zeroing == Zeroing::Zeroed);
                let mut pointer = take();
                if pointer.is_null() && pagemill.instance.account.has_debt() {
                    // The charge was refused while jemalloc held its locks, when little can be reclaimed. Reclaim now
                    // and retry.
                    do_deferred_work(pagemill);
                    pointer = take();
                }
                check::record_allocation(pointer);
                return pointer;
            }
            let result = match zeroing {
                Zeroing::Any => pagemill.heap.allocate(size, align).map(|allocation| allocation.addr),
                Zeroing::Zeroed => pagemill.heap.allocate_zeroed(size, align),
            };
            if let Ok(addr) = &result {
                debug_assert_fatal!((addr.as_ptr() as usize).is_multiple_of(align));
                debug_assert_fatal!(pagemill.heap.contains(addr.as_ptr() as usize));
            }
            // Every error is reported as `ENOMEM`, because programs expect no other error of malloc.
            result.map_or_else(|_| out_of_memory(), |addr| addr.as_ptr().cast())
        }
    }
}

/// In a process tree, updates the account with the memory that the C library allocated for the program.
fn charge_libc_fallback() {
    if let Some(account) = start::account_of_libc_fallback() {
        libc_fallback::charge_roughly(account);
    }
}

/// [`crate::malloc`] of large allocations; while [`SMALL_LIMIT`] is 0, also of small ones.
#[inline(never)]
pub extern "C" fn malloc(size: usize) -> *mut c_void {
    allocate(size, 1, Zeroing::Any)
}

/// [`crate::calloc`] of large allocations; while [`SMALL_LIMIT`] is 0, also of small ones.
#[inline(never)]
pub fn calloc(size: usize) -> *mut c_void {
    allocate(size, 1, Zeroing::Zeroed)
}

/// Allocates at a multiple of `align`; returns null and `EINVAL` unless `align` is a power of two.
pub fn allocate_aligned(align: usize, size: usize) -> *mut c_void {
    if !align.is_power_of_two() {
        set_errno(libc::EINVAL);
        return ptr::null_mut();
    }
    allocate(size, align, Zeroing::Any)
}

/// The allocator that owns a pointer.
enum PointerOwner {
    /// No allocator, because the pointer is null.
    None,
    /// The C library, which serves the program before it has grown and while this library starts.
    CLibrary,
    /// jemalloc, which serves sizes below 64 KiB once the program has grown.
    Small,
    /// The heap of this library's instance.
    Heap(&'static Base),
}

/// Finds the allocator that owns a pointer. Ends the process if no allocator can own it; `function` is named in the
/// message.
fn owner_of(function: &str, pointer: *mut c_void) -> PointerOwner {
    let addr = pointer as usize;
    if pointer.is_null() {
        return PointerOwner::None;
    }
    match start::state() {
        State::Ready(pagemill) if pagemill.heap.contains(addr) => PointerOwner::Heap(pagemill),
        State::Ready(pagemill) if pagemill.instance.arena.contains(addr) => PointerOwner::Small,
        State::Ready(_) if libc_fallback::live_bytes() == 0 => {
            abort_for_misuse(function, &Error::NotAllocated { addr })
        }
        _ => PointerOwner::CLibrary,
    }
}

/// [`crate::free`] of large allocations; also of small ones if other work must be done first.
///
/// # Safety
///
/// As [`crate::free`].
#[inline(never)]
pub unsafe extern "C" fn free(pointer: *mut c_void) {
    if pointer.is_null() {
        return;
    }
    let errno = errno();
    match owner_of("free", pointer) {
        PointerOwner::None => {}
        PointerOwner::CLibrary => {
            // SAFETY: guaranteed by the caller.
            unsafe { libc_fallback::free(pointer) };
            match (globals::pagemill(), globals::account()) {
                (Some(pagemill), _) => libc_fallback::charge_exactly(pagemill.instance.account),
                (None, Some(account)) => libc_fallback::charge_roughly(account),
                (None, None) => {}
            }
        }
        PointerOwner::Small => {
            check::record_free("free", pointer);
            // SAFETY: guaranteed by the caller.
            unsafe { small::free(pointer) };
        }
        PointerOwner::Heap(pagemill) => {
            remove_marks(pagemill, pointer);
            // SAFETY: guaranteed by the caller.
            if let Err(error) = unsafe { pagemill.heap.free(pointer as usize) } {
                abort_for_misuse("free", &error);
            }
            // The free may have measured overcommitted memory and raised the charge. The program may make no further
            // call for a long time, so the helper is started now.
            start_helper_if_due(pagemill);
        }
    }
    set_errno(errno);
}

/// Removes the volatile marks of a slot that is freed or moved.
fn remove_marks(pagemill: &'static Base, pointer: *mut c_void) {
    if !pagemill.vranges.is_empty()
        && let Ok(bytes) = pagemill.heap.usable_bytes(pointer as usize)
    {
        vrange_hooks::remove_marks(pointer as usize, bytes);
    }
}

/// Returns the [`Base`] of this library. If the C library still serves the program, creates the [`Base`] first; returns
/// `None` if that fails.
pub fn grown_pagemill() -> Option<&'static Base> {
    loop {
        match start::state() {
            State::Ready(pagemill) => return Some(pagemill),
            State::LibcFallback if !start::switch_to_pagemill() => pagemill_sys::thread::pause(),
            State::LibcFallback => {}
            State::Starting | State::Unmanaged => return None,
        }
    }
}

/// Returns whether the C library would serve an allocation of this size now.
fn is_served_by_c_library(size: usize) -> bool {
    match start::state() {
        State::Starting | State::Unmanaged => true,
        State::LibcFallback => libc_fallback::is_small_with(size),
        State::Ready(_) => false,
    }
}

/// Returns the usable bytes of an allocation; 0 for null.
///
/// # Safety
///
/// As [`crate::malloc_usable_size`].
pub unsafe fn usable_bytes(pointer: *mut c_void) -> usize {
    match owner_of("malloc_usable_size", pointer) {
        PointerOwner::None => 0,
        // SAFETY: guaranteed by the caller.
        PointerOwner::CLibrary => unsafe { libc_fallback::usable_bytes(pointer) },
        // SAFETY: guaranteed by the caller.
        PointerOwner::Small => unsafe { small::usable_bytes(pointer) },
        PointerOwner::Heap(pagemill) => match pagemill.heap.usable_bytes(pointer as usize) {
            Ok(bytes) => bytes,
            Err(error) => abort_for_misuse("malloc_usable_size", &error),
        },
    }
}

/// [`crate::realloc`] of large allocations; also of small ones if other work must be done first.
///
/// # Safety
///
/// As [`crate::realloc`].
#[inline(never)]
pub unsafe fn realloc(pointer: *mut c_void, size: usize) -> *mut c_void {
    if pointer.is_null() {
        return malloc(size);
    }
    if size == 0 {
        // SAFETY: guaranteed by the caller.
        unsafe { crate::free(pointer) };
        return ptr::null_mut();
    }
    let owner = owner_of("realloc", pointer);
    if let PointerOwner::Small = owner {
        check::assert_live("realloc", pointer);
    }
    if let PointerOwner::CLibrary = owner
        && is_served_by_c_library(size)
    {
        // SAFETY: guaranteed by the caller.
        let new = unsafe { libc_fallback::resize(pointer, size) };
        charge_libc_fallback();
        return new;
    }
    if let PointerOwner::Heap(pagemill) = owner
        && size >= MIN_BYTES
    {
        do_deferred_work(pagemill);
        remove_marks(pagemill, pointer);
        // SAFETY: guaranteed by the caller.
        let result: Result<NonNull<u8>, Error> = unsafe { pagemill.heap.resize(pointer as usize, size) };
        return match result {
            Ok(addr) => addr.as_ptr().cast(),
            Err(error @ (Error::NotAllocated { .. } | Error::FreedBefore { .. })) => {
                abort_for_misuse("realloc", &error)
            }
            Err(_) => out_of_memory(),
        };
    }
    if let PointerOwner::Heap(pagemill) = owner {
        // The copy below reads this memory, so guards must be removed first.
        remove_marks(pagemill, pointer);
    }
    // Another allocator serves the new size, so the bytes are copied. SAFETY: guaranteed by the caller.
    let old_size = unsafe { usable_bytes(pointer) };
    let new = crate::malloc(size);
    if !new.is_null() {
        // SAFETY: both allocations have at least that many bytes and do not overlap.
        unsafe {
            ptr::copy_nonoverlapping(pointer.cast::<u8>(), new.cast::<u8>(), old_size.min(size));
            crate::free(pointer);
        }
    }
    new
}

/// Returns all free memory to the system. Returns 1 if any memory was returned, else 0.
pub fn trim() -> c_int {
    let has_trimmed = libc_fallback::trim();
    let State::Ready(pagemill) = start::state() else { return c_int::from(has_trimmed) };
    let freed = pagemill.instance.account.return_all();
    c_int::from(has_trimmed || freed > 0)
}
