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

/// Exports C functions. Each only calls the function of the allocator that follows its arrow.
macro_rules! export {
    ($($name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)? => $function:ident($($value:expr),*);)*) => {$(
        /// Forwards to the allocator.
        ///
        /// # Safety
        ///
        /// The caller must keep the contract of the C function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) $(-> $result)? {
            // SAFETY: the caller keeps the contract, and the allocator's function has the same.
            unsafe { allocator::$function($($value),*) }
        }
    )*};
}

export! {
    malloc(size: usize) -> *mut c_void => malloc(size);
    calloc(count: usize, size: usize) -> *mut c_void => calloc(count, size);
    realloc(ptr: *mut c_void, size: usize) -> *mut c_void => realloc(ptr, size);
    reallocarray(ptr: *mut c_void, count: usize, size: usize) -> *mut c_void =>
        realloc(ptr, count.saturating_mul(size));
    free(ptr: *mut c_void) => free(ptr);
    aligned_alloc(alignment: usize, size: usize) -> *mut c_void => aligned_alloc(alignment, size);
    memalign(alignment: usize, size: usize) -> *mut c_void => aligned_alloc(alignment, size);
    posix_memalign(out: *mut *mut c_void, alignment: usize, size: usize) -> c_int =>
        posix_memalign(out, alignment, size);
    malloc_usable_size(ptr: *mut c_void) -> usize => malloc_usable_size(ptr);
    valloc(size: usize) -> *mut c_void => aligned_alloc(PAGE_BYTES, size);
    pvalloc(size: usize) -> *mut c_void => aligned_alloc(PAGE_BYTES, whole_pages(size));
}
