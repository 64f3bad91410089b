//! mimalloc with its default settings, exported under the names of the malloc family.
//!
//! Each function only forwards to the prefixed symbol of the crate, so mimalloc itself is measured.

#![allow(unsafe_code)] // the C ABI of malloc

use libmimalloc_sys as mimalloc;

#[path = "../../family.rs"]
mod family;

/// The functions of mimalloc under the names that the module `family` uses.
mod allocator {
    use core::ffi::c_void;
    pub use libmimalloc_sys::mi_usable_size as malloc_usable_size;
    pub use libmimalloc_sys::{mi_calloc as calloc, mi_free as free, mi_malloc as malloc};
    pub use libmimalloc_sys::{mi_posix_memalign as posix_memalign, mi_realloc as realloc};

    /// Allocates `size` bytes at a multiple of `alignment`. Unlike mimalloc's own function, takes the alignment as the
    /// first argument.
    ///
    /// # Safety
    ///
    /// The caller must keep the contract of C's `aligned_alloc`.
    #[inline]
    pub unsafe fn aligned_alloc(alignment: usize, size: usize) -> *mut c_void {
        // SAFETY: the caller keeps the contract.
        unsafe { libmimalloc_sys::mi_malloc_aligned(size, alignment) }
    }
}

/// Calls `mi_collect`, by which the experiment `giveback` makes mimalloc return free memory. The exported name differs,
/// because the crate already defines `mi_collect`.
///
/// # Safety
///
/// There is no precondition.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peer_mi_collect(force: bool) {
    // SAFETY: `mi_collect` may be called at any time from any thread.
    unsafe { mimalloc::mi_collect(force) }
}
