//! The C interface of Pagemill. `include/pagemill.h` documents the functions.
#![allow(unsafe_code)] // the C ABI

use pagemill_core::instance::Instance;
use pagemill_core::stats::MemoryAmounts;
use pagemill_sys::process;
use pagemill_volatile as volatile;
use pagemill_volatile::Base;
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
    match Instance::of_process() {
        Ok(instance) => {
            // SAFETY: the caller's promise.
            unsafe { amounts.write(instance.figures().memory_amounts()) };
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
    let vranges = || Base::of_process().map(|base| base.vranges);
    // SAFETY: the caller's promise.
    unsafe { volatile::c::vrange(vranges, addr, len, (mode, behaviour), purged) }
}
