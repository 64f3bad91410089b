//! Accesses to views that must raise `SIGBUS`.
#![allow(unsafe_code)] // installs a signal handler, which maps memory

use pagemill_core::units::os_page_bytes;
use std::cell::Cell;
use std::ffi::c_void;
use std::sync::Once;

thread_local! {
    /// Address of the OS page in which this thread's next access must raise `SIGBUS`; 0 after the signal.
    static EXPECTED_PAGE: Cell<usize> = const { Cell::new(0) };
}

/// Asserts that an access at `addr`, an address in a view, raises `SIGBUS`. A handler lets the access continue.
pub fn assert_sigbus(addr: *mut u8, access: impl FnOnce(*mut u8)) {
    static INSTALL_HANDLER: Once = Once::new();
    INSTALL_HANDLER.call_once(|| {
        // SAFETY: plain data. The handler makes one system call.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_sigbus as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            assert_eq!(libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()), 0);
        }
    });
    let page = addr as usize & !(os_page_bytes() - 1);
    EXPECTED_PAGE.set(page);
    access(addr);
    assert_eq!(EXPECTED_PAGE.get(), 0, "the access behind the end succeeded");
    replace_page(page, libc::PROT_NONE);
}

extern "C" fn on_sigbus(_signal: i32, info: &libc::siginfo_t, _context: *mut c_void) {
    // SAFETY: the signal is a fault, so the field is valid.
    let addr = unsafe { info.si_addr() } as usize;
    let page = addr & !(os_page_bytes() - 1);
    if EXPECTED_PAGE.replace(0) == page {
        return replace_page(page, libc::PROT_READ | libc::PROT_WRITE);
    }
    // SAFETY: the fault was elsewhere: restores the default action, so that the next fault ends the process.
    unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
}

/// Replaces an OS page of a view, which has no folio there, by anonymous memory or by a reservation.
fn replace_page(page: usize, protection: i32) {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    // SAFETY: no folio is mapped in the page, and only this thread uses the view.
    let mapped = unsafe { libc::mmap(page as *mut c_void, os_page_bytes(), protection, flags, -1, 0) };
    if mapped == libc::MAP_FAILED {
        std::process::abort();
    }
}
