//! Poisoning for AddressSanitizer (`--cfg asan`): free memory is closed to the program, and each access is reported. In
//! other builds this does nothing.
#![allow(unsafe_code)] // calls the sanitizer's runtime

#[cfg(asan)]
unsafe extern "C" {
    fn __asan_poison_memory_region(start: *const std::ffi::c_void, bytes: usize);
    fn __asan_unpoison_memory_region(start: *const std::ffi::c_void, bytes: usize);
}

/// Poisons bytes of slabs, except for the last few if the bytes after them stay accessible.
#[inline(always)]
pub(super) fn close(_at: usize, _bytes: usize) {
    // SAFETY: changes only the sanitizer's shadow memory.
    #[cfg(asan)]
    unsafe {
        __asan_poison_memory_region(_at as *const _, _bytes);
    }
}

/// Unpoisons bytes.
#[inline(always)]
pub(super) fn open(_at: usize, _bytes: usize) {
    // SAFETY: as above.
    #[cfg(asan)]
    unsafe {
        __asan_unpoison_memory_region(_at as *const _, _bytes);
    }
}
