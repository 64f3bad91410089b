//! Counts calls of the handler that maps pages of views.

#![allow(unsafe_code)] // replaces a signal handler

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use libc::{c_int, c_void, siginfo_t};

/// Number of faults that the page cache's handler has resolved since [`count_faults`].
static FAULTS: AtomicU64 = AtomicU64::new(0);

/// Installs a `SIGSEGV` handler that counts faults and calls the page cache's handler. A view must exist, so that the
/// latter is installed. Without this call, faults take as long as in other programs.
///
/// # Errors
///
/// The error of the system call `sigaction`.
pub fn count_faults() -> io::Result<()> {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: the call writes the current action, and changes nothing.
    if unsafe { libc::sigaction(libc::SIGSEGV, ptr::null(), action.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call above has written it.
    let mut action = unsafe { action.assume_init() };
    action.sa_sigaction = on_fault as *const () as usize;
    action.sa_flags |= libc::SA_SIGINFO;
    // SAFETY: the handler is a function with the arguments of `SA_SIGINFO`.
    match unsafe { libc::sigaction(libc::SIGSEGV, &raw const action, ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns the number of faults in views since [`count_faults`].
pub fn counted() -> u64 {
    FAULTS.load(Relaxed)
}

extern "C" fn on_fault(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    FAULTS.fetch_add(1, Relaxed);
    // SAFETY: these are the arguments that the kernel passed to this handler, which has `SA_SIGINFO`.
    if unsafe { pagemill_sys::fault::handle(signal, info.cast(), context) } {
        return;
    }
    // The fault is not in a view: the default action ends the process when the access is retried.
    // SAFETY: the call sets the default action.
    unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
}
