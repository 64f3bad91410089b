//! `pagemill_vrange`, as declared in include/pagemill.h. The C library and the preload library export it.
#![allow(unsafe_code)] // a C program's pointers

use super::vrange::{How, Mode, Vranges};
use libc::{EFAULT, EINVAL};
use pagemill_core::error::Result;
use pagemill_sys::{mem, process};
use std::ffi::{c_int, c_void};

/// Converts the mode and the behaviour of a call from C; `None` for values that pagemill.h does not define.
fn parse_mode_and_behaviour(mode: c_int, behaviour: c_int) -> Option<(Mode, How)> {
    let modes = [Mode::Nonvolatile, Mode::Volatile, Mode::VolatileStrict];
    let mode = modes.get(usize::try_from(mode).ok()?)?;
    let how = [How::Full, How::Partial].get(usize::try_from(behaviour).ok()?)?;
    Some((*mode, *how))
}

/// Executes one call of `pagemill_vrange`. Returns the number of bytes, or -1 with `errno` set. Calls `vranges` only if
/// the arguments are valid.
///
/// # Safety
///
/// As [`Vranges::vrange`]. `purged` may be any address.
pub unsafe fn vrange(
    vranges: impl FnOnce() -> Result<&'static Vranges>,
    addr: *mut c_void,
    len: usize,
    (mode, behaviour): (c_int, c_int),
    purged: *mut c_int,
) -> isize {
    let fail = |errno: c_int| {
        process::set_errno(errno);
        -1
    };
    let Some((mode, how)) = parse_mode_and_behaviour(mode, behaviour) else { return fail(EINVAL) };
    let write_purged = |is_purged: bool| {
        if !purged.is_null() {
            // SAFETY: `can_write_int` has succeeded for this address, which may be unaligned.
            unsafe { purged.write_unaligned(c_int::from(is_purged)) };
        }
    };
    if !purged.is_null() && !mem::can_write_int(purged as usize) {
        return fail(EFAULT);
    }
    // Written before anything changes, because `*purged` must be 0 after an error.
    write_purged(false);
    let marked = vranges().and_then(|vranges| {
        // SAFETY: guaranteed by the caller.
        unsafe { vranges.vrange(addr as usize, len, mode, how) }
    });
    match marked {
        Ok(marked) => {
            write_purged(marked.purged);
            marked.bytes as isize
        }
        Err(error) => fail(error.errno()),
    }
}
