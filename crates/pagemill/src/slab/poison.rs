//! In builds for AddressSanitizer (`--cfg asan`): what is free is closed to the program, and a use of it is reported. Elsewhere nothing.
#![allow(unsafe_code)] // the sanitizer's runtime

#[cfg(asan)]
unsafe extern "C" {
    fn __asan_poison_memory_region(start: *const std::ffi::c_void, bytes: usize);
    fn __asan_unpoison_memory_region(start: *const std::ffi::c_void, bytes: usize);
}

/// Closes bytes of slabs, but for the last few where the next ones stay open.
#[inline(always)]
pub(super) fn close(_at: usize, _bytes: usize) {
    // SAFETY: changes the sanitizer's books alone.
    #[cfg(asan)]
    unsafe {
        __asan_poison_memory_region(_at as *const _, _bytes);
    }
}

/// Ends that.
#[inline(always)]
pub(super) fn open(_at: usize, _bytes: usize) {
    // SAFETY: as above.
    #[cfg(asan)]
    unsafe {
        __asan_unpoison_memory_region(_at as *const _, _bytes);
    }
}
