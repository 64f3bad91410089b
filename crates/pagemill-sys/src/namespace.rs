//! A mount namespace of one's own.
#![allow(unsafe_code)] // unshare, mount

use std::fs;
use std::io;

fn check(result: i32) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// From now on what this process and its children mount is seen by them only. Who may not mount gets a user namespace too, in
/// which it may, as the user that it is; its children lose that right when they run a program.
///
/// To be called while there is one thread.
///
/// # Errors
///
/// What `unshare` says: `EPERM` or `ENOSPC` where user namespaces are forbidden or limited.
pub fn enter_mounts() -> io::Result<()> {
    // SAFETY: no arguments.
    let (user, group) = unsafe { (libc::geteuid(), libc::getegid()) };
    // SAFETY: concerns this process only.
    let is_allowed = check(unsafe { libc::unshare(libc::CLONE_NEWNS) });
    if is_allowed.is_err() {
        // SAFETY: as above.
        check(unsafe { libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNS) })?;
        // Without this the group may not be mapped; a process cannot leave groups that deny it something.
        fs::write("/proc/self/setgroups", "deny")?;
        fs::write("/proc/self/uid_map", format!("{user} {user} 1"))?;
        fs::write("/proc/self/gid_map", format!("{group} {group} 1"))?;
    }
    // What is mounted here is not passed on; what others mount is not either, for it could hide it.
    let flags = libc::MS_REC | libc::MS_PRIVATE;
    // SAFETY: strings that end with zero, and null where nothing is needed.
    check(unsafe { libc::mount(std::ptr::null(), c"/".as_ptr(), std::ptr::null(), flags, std::ptr::null()) })
}
