//! The C interface of Pagemill. Each function calls the crate `pagemill`; `include/pagemill.h` documents the functions.
#![allow(unsafe_code)] // the C ABI

use pagemill::Pagemill;
use pagemill::stats::MemoryAmounts;
use pagemill::volatile;
use pagemill_sys::process;
use std::ffi::{c_int, c_void};

/// # Safety
///
/// As documented in include/pagemill.h: the caller must fulfil the contract of [`volatile::handle_fault`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_handle_fault(signal: c_int, info: *const c_void, context: *mut c_void) -> c_int {
    // SAFETY: the caller guarantees it.
    c_int::from(unsafe { volatile::handle_fault(signal, info, context) })
}

/// # Safety
///
/// As documented in include/pagemill.h: `amounts` must point to writable memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_figures(amounts: *mut MemoryAmounts) -> c_int {
    match Pagemill::of_process() {
        Ok(pagemill) => {
            // SAFETY: the caller guarantees it.
            unsafe { amounts.write(pagemill.figures().memory_amounts()) };
            0
        }
        Err(error) => {
            process::set_errno(error.errno());
            -1
        }
    }
}

/// # Safety
///
/// As documented in include/pagemill.h: the caller must fulfil the contract of [`volatile::Vranges::vrange`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_vrange(
    addr: *mut c_void,
    len: usize,
    mode: c_int,
    behaviour: c_int,
    purged: *mut c_int,
) -> isize {
    let vranges = || Pagemill::of_process().map(|pagemill| pagemill.vranges);
    // SAFETY: the caller guarantees it.
    unsafe { volatile::c::vrange(vranges, addr, len, (mode, behaviour), purged) }
}
