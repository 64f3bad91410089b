//! Results of system calls that are made directly or through the C library.

#![allow(unsafe_code)] // takes new descriptors

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// Returns the error in `errno` unless the `result` of a call is 0.
pub(crate) fn check_result(result: impl Into<i64>) -> io::Result<()> {
    if result.into() == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Takes ownership of the new descriptor that a call returned, or returns the error in `errno` if `fd` is negative.
///
/// # Safety
///
/// `fd` must be the result of a call that creates a descriptor, and no other value may own the descriptor.
pub(crate) unsafe fn take_descriptor(fd: impl Into<i64>) -> io::Result<OwnedFd> {
    let fd = fd.into();
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: guaranteed by the caller.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Repeats `call` while a signal interrupts it. Returns its result, or the error in `errno` if that is negative.
pub(crate) fn retry_interrupted(mut call: impl FnMut() -> i64) -> io::Result<usize> {
    loop {
        match usize::try_from(call()) {
            Ok(result) => return Ok(result),
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => {}
                error => return Err(error),
            },
        }
    }
}
