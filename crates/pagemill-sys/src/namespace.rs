//! A private mount namespace for this process.
#![allow(unsafe_code)] // unshare, mount

use crate::result::check_result;
use std::fs;
use std::io;

/// Puts this process into a private mount namespace, which its children inherit.
///
/// A process without the right to mount is also put into a user namespace, in which it may mount with its own user id.
/// Its children lose that right when they execute a program. The process must have only one thread.
///
/// # Errors
///
/// Errors of `unshare`: `EPERM` or `ENOSPC` where user namespaces are forbidden or limited.
pub fn enter_mounts() -> io::Result<()> {
    // SAFETY: the call takes no arguments.
    let (user, group) = unsafe { (libc::geteuid(), libc::getegid()) };
    // SAFETY: the call accesses no memory.
    let is_allowed = check_result(unsafe { libc::unshare(libc::CLONE_NEWNS) });
    if is_allowed.is_err() {
        // SAFETY: as for the previous call.
        check_result(unsafe { libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNS) })?;
        // The kernel accepts the group mapping only after this write, because a process must not be able to drop a
        // group that denies access to a file.
        fs::write("/proc/self/setgroups", "deny")?;
        fs::write("/proc/self/uid_map", format!("{user} {user} 1"))?;
        fs::write("/proc/self/gid_map", format!("{group} {group} 1"))?;
    }
    // Mounts are propagated in neither direction. A mount made elsewhere could hide one made here.
    let flags = libc::MS_REC | libc::MS_PRIVATE;
    // SAFETY: the arguments are C strings, and null where the call needs none.
    check_result(unsafe { libc::mount(std::ptr::null(), c"/".as_ptr(), std::ptr::null(), flags, std::ptr::null()) })
}
