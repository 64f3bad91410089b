//! Pagemill for C. `include/pagemill.h` says what each function does; here calls are only translated.
#![allow(unsafe_code)] // the C ABI

use pagemill::Pagemill;
use pagemill::volatile::vrange;
use std::ffi::{c_int, c_void};

const EINVAL: c_int = 22;
const EFAULT: c_int = 14;

/// # Safety
///
/// As `pagemill_vrange` in include/pagemill.h, which is the contract of [`pagemill::volatile::Vranges::vrange`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_vrange(
    addr: *mut c_void,
    len: usize,
    mode: c_int,
    behaviour: c_int,
    purged: *mut c_int,
) -> isize {
    let Some((mode, how)) = vrange::from_c(mode, behaviour) else { return fail(EINVAL) };
    // Before anything changes.
    if !purged.is_null() && !pagemill_sys::mem::can_write_int(purged as usize) {
        return fail(EFAULT);
    }
    let marked = Pagemill::of_process().and_then(|pagemill| {
        // SAFETY: the caller's promise.
        unsafe { pagemill.vranges.vrange(addr as usize, len, mode, how) }
    });
    match marked {
        Ok(marked) => {
            if !purged.is_null() {
                // SAFETY: written to by the kernel just now.
                unsafe { purged.write(c_int::from(marked.purged)) };
            }
            marked.bytes as isize
        }
        Err(error) => fail(error.errno()),
    }
}

fn fail(errno: c_int) -> isize {
    pagemill_sys::process::set_errno(errno);
    -1
}
