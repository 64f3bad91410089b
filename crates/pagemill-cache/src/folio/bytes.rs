//! Copies to and from memory that other threads may change meanwhile.
//!
//! An ordinary copy that races with another thread's write would be a data race, which is undefined behaviour. So on
//! x86-64 and AArch64 the C library's functions are called through assembly, which the compiler treats like volatile
//! accesses. On other processors words are copied one by one. A copy that raced mixes old and new bytes; the caller
//! checks whether the copy is valid ([`super::word`]).
#![allow(unsafe_code)] // copies that may race

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use std::ffi::c_void;

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
unsafe extern "C" {
    // The C library's versions, which are optimised for the processor.
    fn memcpy(dst: *mut c_void, src: *const c_void, len_bytes: usize) -> *mut c_void;
    fn memset(dst: *mut c_void, byte: i32, len_bytes: usize) -> *mut c_void;
}

/// Copies `len_bytes` from `src` to `dst`.
///
/// # Safety
///
/// Both ranges of `len_bytes` are mapped and do not overlap, and `dst` is writable. No reference to either range
/// forbids the caller to read `src` or write `dst`.
#[inline]
pub(crate) unsafe fn copy(dst: *mut u8, src: *const u8, len_bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the call follows the C ABI, with the stack aligned and all clobbers declared. The caller guarantees the
    // bytes.
    unsafe {
        std::arch::asm!(
            "call {memcpy}",
            memcpy = in(reg) memcpy as *const (),
            inout("rdi") dst => _,
            inout("rsi") src => _,
            inout("rdx") len_bytes => _,
            clobber_abi("C"),
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the call follows the C ABI, with all clobbers declared. The caller guarantees the bytes.
    unsafe {
        std::arch::asm!(
            "blr {memcpy}",
            memcpy = in(reg) memcpy as *const (),
            inout("x0") dst => _,
            inout("x1") src => _,
            inout("x2") len_bytes => _,
            clobber_abi("C"),
        );
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    // SAFETY: guaranteed by the caller.
    unsafe {
        copy_words(dst, src, len_bytes);
    }
}

/// Zeroes `len_bytes` at `dst`.
///
/// # Safety
///
/// As [`copy`].
#[inline]
pub(crate) unsafe fn zero(dst: *mut u8, len_bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as in `copy`.
    unsafe {
        std::arch::asm!(
            "call {memset}",
            memset = in(reg) memset as *const (),
            inout("rdi") dst => _,
            inout("esi") 0 => _,
            inout("rdx") len_bytes => _,
            clobber_abi("C"),
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as in `copy`.
    unsafe {
        std::arch::asm!(
            "blr {memset}",
            memset = in(reg) memset as *const (),
            inout("x0") dst => _,
            inout("w1") 0 => _,
            inout("x2") len_bytes => _,
            clobber_abi("C"),
        );
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    for at in 0..len_bytes {
        // SAFETY: guaranteed by the caller.
        unsafe { dst.add(at).write_volatile(0) };
    }
}

/// Reads eight bytes as a little-endian integer. The read is atomic if `src` is aligned to eight bytes.
///
/// # Safety
///
/// The eight bytes from `src` on are mapped.
#[inline]
pub(crate) unsafe fn read_u64(src: *const u8) -> u64 {
    if src.addr().is_multiple_of(align_of::<u64>()) {
        // SAFETY: mapped as guaranteed by the caller, and aligned; volatile, since other threads may write meanwhile.
        return u64::from_le(unsafe { src.cast::<u64>().read_volatile() });
    }
    // SAFETY: mapped as guaranteed by the caller; an array of bytes needs no alignment.
    u64::from_le_bytes(unsafe { src.cast::<[u8; 8]>().read_volatile() })
}

/// Returns whether all of the `len_bytes` at `src` are zero.
///
/// # Safety
///
/// The `len_bytes` from `src` on are mapped.
pub(crate) unsafe fn is_zero(src: *const u8, len_bytes: usize) -> bool {
    let mut buffer = [0; 512];
    (0..len_bytes).step_by(buffer.len()).all(|at| {
        let len = buffer.len().min(len_bytes - at);
        // SAFETY: guaranteed by the caller; the buffer is local.
        unsafe { copy(buffer.as_mut_ptr(), src.add(at), len) };
        buffer[..len].iter().all(|byte| *byte == 0)
    })
}

/// As [`copy`], but copies word by word.
///
/// # Safety
///
/// As [`copy`].
#[cfg(any(test, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
unsafe fn copy_words(dst: *mut u8, src: *const u8, len_bytes: usize) {
    const WORD: usize = size_of::<u64>();
    let mut at = 0;
    // SAFETY: guaranteed by the caller, for each part.
    unsafe {
        while at < len_bytes {
            let (from, to) = (src.add(at), dst.add(at));
            if len_bytes - at >= WORD && (from.addr() | to.addr()).is_multiple_of(WORD) {
                to.cast::<u64>().write_volatile(from.cast::<u64>().read_volatile());
                at += WORD;
            } else {
                to.write_volatile(from.read_volatile());
                at += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Copies and zeroes 0 to 39 bytes at every alignment, with both copy functions. Exactly the requested bytes must
    /// change.
    #[test]
    fn copies_change_exactly_the_requested_bytes() {
        let source: Vec<u8> = (0..64).map(|at| at as u8 + 1).collect();
        for copy_function in [copy, copy_words] {
            for (from, to, len) in
                (0..9).flat_map(|from| (0..9).flat_map(move |to| (0..40).map(move |len| (from, to, len))))
            {
                let mut target = vec![0xFF; 64];
                // SAFETY: inside both vectors.
                unsafe { copy_function(target.as_mut_ptr().add(to), source.as_ptr().add(from), len) };
                assert_eq!(target[to..to + len], source[from..from + len]);
                assert!(target[..to].iter().chain(&target[to + len..]).all(|byte| *byte == 0xFF));
                // SAFETY: inside the vector.
                unsafe { zero(target.as_mut_ptr().add(to), len) };
                assert!(target[to..to + len].iter().all(|byte| *byte == 0));
                assert!(target[..to].iter().chain(&target[to + len..]).all(|byte| *byte == 0xFF));
            }
        }
    }
}
