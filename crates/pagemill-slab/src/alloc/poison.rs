//! Poisoning of free memory for AddressSanitizer (`--cfg asan`), which then reports each access to that memory. In
//! other builds the functions of this module do nothing.
#![allow(unsafe_code)] // calls the sanitizer's runtime

#[cfg(asan)]
unsafe extern "C" {
    fn __asan_poison_memory_region(start: *const std::ffi::c_void, bytes: usize);
    fn __asan_unpoison_memory_region(start: *const std::ffi::c_void, bytes: usize);
}

/// Poisons a byte range of slabs. The sanitizer works in units of eight bytes, so an incomplete last unit stays
/// accessible.
#[inline(always)]
pub(crate) fn poison(_at: usize, _bytes: usize) {
    // SAFETY: changes only the sanitizer's shadow memory.
    #[cfg(asan)]
    unsafe {
        __asan_poison_memory_region(_at as *const _, _bytes);
    }
}

/// Makes AddressSanitizer accept accesses to a byte range of slabs again.
#[inline(always)]
pub(crate) fn unpoison(_at: usize, _bytes: usize) {
    // SAFETY: changes only the sanitizer's shadow memory.
    #[cfg(asan)]
    unsafe {
        __asan_unpoison_memory_region(_at as *const _, _bytes);
    }
}
