//! `sigaction` and `signal` in a preloaded program: Pagemill's `SIGSEGV` handler runs before the program's.
//!
//! Pagemill must handle faults on strict volatile ranges first ([`pagemill_sys::fault`]), so it stores the program's
//! action for `SIGSEGV` and calls it for other faults. Until the program marks a strict range, and for all other
//! signals, these functions behave like those of the C library. `SIGBUS` is delivered to the program's handler
//! directly. Pagemill's handler runs on the stack that the program's handler would use, so `sigaltstack` is not
//! intercepted. Raw system calls and `sigset`, which POSIX has removed, are not intercepted either.
#![allow(unsafe_code)] // the C ABI of the signal calls

use pagemill_sys::fault::{self, Action};
use pagemill_sys::process::set_errno;
use std::ffi::c_int;

unsafe extern "C" {
    /// Another name of the C library's `sigaction`.
    fn __sigaction(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int;
    /// Another name of the C library's `signal`.
    fn ssignal(signal: c_int, handler: libc::sighandler_t) -> libc::sighandler_t;
}

/// Intercepts the program's calls of `sigaction`: stores the program's action for `SIGSEGV`, and passes other signals
/// on.
///
/// # Safety
///
/// As `sigaction(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sigaction(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int {
    if signal != libc::SIGSEGV {
        // SAFETY: guaranteed by the caller.
        return unsafe { __sigaction(signal, new, old) };
    }
    // SAFETY: `new` is null or points to an action (guaranteed by the caller).
    let new = unsafe { new.as_ref() }.map(|new| Action {
        handler: new.sa_sigaction,
        flags: new.sa_flags as u32 as u64,
        restorer: 0,
        mask: mask_of(&new.sa_mask),
    });
    match fault::program_action(new.map(without_restorer)) {
        Ok(before) => {
            // SAFETY: `old` is null or points to memory for an action (guaranteed by the caller).
            if let Some(old) = unsafe { old.as_mut() } {
                store_action(before, old);
            }
            0
        }
        Err(error) => {
            set_errno(error.raw_os_error().unwrap_or(libc::EINVAL));
            -1
        }
    }
}

/// Returns the first word of the C library's signal set. The kernel uses only this word.
fn mask_of(set: &libc::sigset_t) -> u64 {
    // SAFETY: the set is larger than a word and aligned like one.
    unsafe { std::ptr::from_ref(set).cast::<u64>().read() }
}

/// Clears the flag `SA_RESTORER`. The C library sets the restorer itself, so the caller's field may be uninitialised.
fn without_restorer(mut action: Action) -> Action {
    const SA_RESTORER: u64 = 0x0400_0000;
    action.flags &= !SA_RESTORER;
    action
}

/// Stores an action in the C library's structure.
fn store_action(action: Action, old: &mut libc::sigaction) {
    // SAFETY: the structure is plain data, for which zero bits are valid.
    *old = unsafe { std::mem::zeroed() };
    old.sa_sigaction = action.handler;
    old.sa_flags = action.flags as c_int;
    // SAFETY: as in `mask_of`.
    unsafe { (&raw mut old.sa_mask).cast::<u64>().write(action.mask) };
}

/// Sets the program's handler for `SIGSEGV`, for all variants of `signal`. Returns the previous handler.
fn set_handler(handler: libc::sighandler_t, flags: c_int, mask: u64) -> libc::sighandler_t {
    match fault::program_action(Some(Action { handler, flags: flags as u32 as u64, restorer: 0, mask })) {
        Ok(before) => before.handler,
        Err(error) => {
            set_errno(error.raw_os_error().unwrap_or(libc::EINVAL));
            libc::SIG_ERR
        }
    }
}

/// Intercepts the program's calls of `signal`: stores the program's handler for `SIGSEGV`, and passes other signals on.
///
/// # Safety
///
/// As `signal(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn signal(signal: c_int, handler: libc::sighandler_t) -> libc::sighandler_t {
    if signal != libc::SIGSEGV || handler == libc::SIG_ERR {
        // SAFETY: guaranteed by the caller.
        return unsafe { ssignal(signal, handler) };
    }
    set_handler(handler, libc::SA_RESTART, 1 << (libc::SIGSEGV - 1))
}

/// As [`signal`]; programs written for older BSDs use this name.
///
/// # Safety
///
/// As `signal(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bsd_signal(number: c_int, handler: libc::sighandler_t) -> libc::sighandler_t {
    // SAFETY: guaranteed by the caller.
    unsafe { signal(number, handler) }
}

/// `signal` with the semantics of System V: the handler is reset after one signal, and the signal is not blocked.
///
/// # Safety
///
/// As `sysv_signal(3)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sysv_signal(signal: c_int, handler: libc::sighandler_t) -> libc::sighandler_t {
    const SYSV_FLAGS: c_int = libc::SA_RESETHAND | libc::SA_NODEFER;
    if signal == libc::SIGSEGV && handler != libc::SIG_ERR {
        return set_handler(handler, SYSV_FLAGS, 0);
    }
    if handler == libc::SIG_ERR {
        set_errno(libc::EINVAL);
        return libc::SIG_ERR;
    }
    // SAFETY: the structures are plain data; the rest is guaranteed by the caller.
    unsafe {
        let (mut new, mut old): (libc::sigaction, libc::sigaction) = (std::mem::zeroed(), std::mem::zeroed());
        (new.sa_sigaction, new.sa_flags) = (handler, SYSV_FLAGS);
        if __sigaction(signal, &raw const new, &raw mut old) == 0 { old.sa_sigaction } else { libc::SIG_ERR }
    }
}

/// As [`sysv_signal`]; the C library's headers use this name.
///
/// # Safety
///
/// As `sysv_signal(3)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __sysv_signal(signal: c_int, handler: libc::sighandler_t) -> libc::sighandler_t {
    // SAFETY: guaranteed by the caller.
    unsafe { sysv_signal(signal, handler) }
}
