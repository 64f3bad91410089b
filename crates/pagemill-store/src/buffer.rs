//! Buffers: the memory that transfers read into or write from.
#![allow(unsafe_code)] // memory that a device writes to

use std::alloc::{self, Layout};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

#[diagnostic::on_unimplemented(
    message = "the memory of `{Self}` cannot be used for a transfer",
    label = "not a `Buffer`",
    note = "a transfer needs memory that stays in place and is aligned: use `Aligned`"
)]
/// Memory of a transfer. A type that implements this trait owns the memory or keeps it alive.
///
/// # Safety
///
/// 1. The `len_bytes` bytes from `addr` on can be read and written until the value is dropped, even if the value was
///    moved or forgotten.
/// 2. While a ring owns the value for a transfer, no other code reads the memory of a read or changes the memory of a
///    write.
///
/// Example: [`Aligned`], the usual buffer.
pub unsafe trait Buffer: 'static {
    fn addr(&self) -> NonNull<u8>;

    fn len_bytes(&self) -> usize;

    /// Returns whether fork children never inherit the memory, even while it is not registered with a ring. If true,
    /// registration leaves the memory's `MADV_DONTFORK` setting unchanged.
    fn is_kept_from_children(&self) -> bool {
        false
    }
}

// SAFETY: the boxed value keeps the trait's promises.
unsafe impl<B: Buffer + ?Sized> Buffer for Box<B> {
    fn addr(&self) -> NonNull<u8> {
        (**self).addr()
    }

    fn len_bytes(&self) -> usize {
        (**self).len_bytes()
    }

    fn is_kept_from_children(&self) -> bool {
        (**self).is_kept_from_children()
    }
}

/// Zeroed memory with the alignment that direct transfers need.
///
/// ```
/// use pagemill::store::{Aligned, Buffer};
///
/// let mut memory = Aligned::new(4096, 4096);
/// memory[..4].copy_from_slice(b"page"); // dereferences to a slice
/// assert_eq!((memory.len_bytes(), memory.addr().as_ptr() as usize % 4096), (4096, 0));
/// ```
pub struct Aligned {
    // Type invariant: `bytes` was allocated with `layout` and is owned by this value alone.
    bytes: NonNull<u8>,
    len_bytes: usize,
    layout: Layout,
}

impl Aligned {
    /// Allocates `len_bytes` at a multiple of `align_bytes`.
    ///
    /// # Panics
    ///
    /// If `align_bytes` is not a power of two, or memory is exhausted.
    pub fn new(len_bytes: usize, align_bytes: usize) -> Self {
        let layout = Layout::from_size_align(len_bytes.max(1), align_bytes);
        let layout = layout.unwrap_or_else(|_| panic!("no memory of {len_bytes} bytes at multiples of {align_bytes}"));
        // SAFETY: the size is not zero.
        let bytes = unsafe { alloc::alloc_zeroed(layout) };
        let bytes = NonNull::new(bytes).unwrap_or_else(|| alloc::handle_alloc_error(layout));
        Self { bytes, len_bytes, layout }
    }
}

impl Drop for Aligned {
    fn drop(&mut self) {
        // SAFETY: `bytes` was allocated with `layout` (type invariant).
        unsafe { alloc::dealloc(self.bytes.as_ptr(), self.layout) };
    }
}

impl Deref for Aligned {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the allocation is owned (type invariant) and was zeroed.
        unsafe { std::slice::from_raw_parts(self.bytes.as_ptr(), self.len_bytes) }
    }
}

impl DerefMut for Aligned {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: the allocation is owned (type invariant) and was zeroed.
        unsafe { std::slice::from_raw_parts_mut(self.bytes.as_ptr(), self.len_bytes) }
    }
}

impl std::fmt::Debug for Aligned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Aligned").field("len_bytes", &self.len_bytes).finish_non_exhaustive()
    }
}

// SAFETY: the value owns its memory, as a box does.
unsafe impl Send for Aligned {}
// SAFETY: shared references to the value only read the memory.
unsafe impl Sync for Aligned {}

// SAFETY: the allocation does not move with the value, and only the value's owner accesses it.
unsafe impl Buffer for Aligned {
    fn addr(&self) -> NonNull<u8> {
        self.bytes
    }

    fn len_bytes(&self) -> usize {
        self.len_bytes
    }
}

/// Zeroes the bytes of a buffer from index `from` to its end. The caller must own the buffer.
pub(super) fn zero_from(buffer: &impl Buffer, from: usize) {
    debug_assert!(from <= buffer.len_bytes(), "no more was read than fits");
    let len = buffer.len_bytes().saturating_sub(from);
    // SAFETY: the range lies inside of the buffer, and no other code accesses the buffer (both by the trait's promise).
    unsafe { buffer.addr().as_ptr().add(from.min(buffer.len_bytes())).write_bytes(0, len) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_and_zero() {
        for (len, align) in [(0, 1), (1, 512), (5000, 1 << 16)] {
            let mut memory = Aligned::new(len, align);
            assert_eq!(memory.addr().as_ptr() as usize % align, 0);
            assert!(memory.len() == len && memory.iter().all(|byte| *byte == 0));
            memory.fill(7);
            zero_from(&memory, len / 2);
            assert_eq!(memory.iter().filter(|byte| **byte == 7).count(), len / 2);
        }
    }
}
