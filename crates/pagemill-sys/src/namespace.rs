//! A private mount namespace for this process.
#![allow(unsafe_code)] // unshare, mount

use std::fs;
use std::io;

fn check(result: i32) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Gives this process and its children a private mount namespace.
///
/// A process without the right to mount also gets a user namespace, in which it may mount under its own user id. Its
/// children lose that right when they execute a program. Must be called while the process has one thread.
///
/// # Errors
///
/// Errors of `unshare`: `EPERM` or `ENOSPC` where user namespaces are forbidden or limited.
pub fn enter_mounts() -> io::Result<()> {
    // SAFETY: no arguments.
    let (user, group) = unsafe { (libc::geteuid(), libc::getegid()) };
    // SAFETY: concerns this process only.
    let is_allowed = check(unsafe { libc::unshare(libc::CLONE_NEWNS) });
    if is_allowed.is_err() {
        // SAFETY: as above.
        check(unsafe { libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNS) })?;
        // Without this the kernel refuses the group mapping: a process must not leave groups that deny it access.
        fs::write("/proc/self/setgroups", "deny")?;
        fs::write("/proc/self/uid_map", format!("{user} {user} 1"))?;
        fs::write("/proc/self/gid_map", format!("{group} {group} 1"))?;
    }
    // No propagation in either direction: a mount made elsewhere could hide one made here.
    let flags = libc::MS_REC | libc::MS_PRIVATE;
    // SAFETY: strings that end with zero, and null where nothing is needed.
    check(unsafe { libc::mount(std::ptr::null(), c"/".as_ptr(), std::ptr::null(), flags, std::ptr::null()) })
}
