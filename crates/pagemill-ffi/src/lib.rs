//! Pagemill for C. `include/pagemill.h` says what each function does; here calls are only passed on.
#![allow(unsafe_code)] // the C ABI

use pagemill::Pagemill;
use pagemill::volatile;
use std::ffi::{c_int, c_void};

/// # Safety
///
/// As include/pagemill.h has it, which is the contract of [`volatile::handle_fault`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_handle_fault(signal: c_int, info: *const c_void, context: *mut c_void) -> c_int {
    // SAFETY: the caller's promise.
    c_int::from(unsafe { volatile::handle_fault(signal, info, context) })
}

/// # Safety
///
/// As include/pagemill.h has it, which is the contract of [`volatile::Vranges::vrange`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_vrange(
    addr: *mut c_void,
    len: usize,
    mode: c_int,
    behaviour: c_int,
    purged: *mut c_int,
) -> isize {
    let vranges = || Pagemill::of_process().map(|pagemill| pagemill.vranges);
    // SAFETY: the caller's promise.
    unsafe { volatile::c::vrange(vranges, addr, len, (mode, behaviour), purged) }
}
