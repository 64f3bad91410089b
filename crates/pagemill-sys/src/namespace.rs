//! A private mount namespace for this process.
#![allow(unsafe_code)] // unshare

use rustix::mount::{MountPropagationFlags, mount_change};
use rustix::process::{getegid, geteuid};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use std::fs;
use std::io;

/// Puts this process into a private mount namespace, which its children inherit.
///
/// A process without the right to mount is also put into a user namespace, in which it may mount with its own user id.
/// Its children lose that right when they execute a program.
///
/// # Errors
///
/// `EINVAL` if the process has more than one thread. Errors of `unshare`: `EPERM` or `ENOSPC` where user namespaces are
/// forbidden or limited. Errors of writing `/proc/self/setgroups`, `uid_map` and `gid_map`, and of `mount(2)`; the process
/// may then be in new namespaces already, so it should end.
pub fn enter_mounts() -> io::Result<()> {
    if fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() > 1) {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let (user, group) = (geteuid().as_raw(), getegid().as_raw());
    // SAFETY: the process has one thread, as far as `/proc` shows.
    if unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.is_err() {
        // SAFETY: as for the previous call.
        unsafe { unshare_unsafe(UnshareFlags::NEWUSER | UnshareFlags::NEWNS) }?;
        // The kernel accepts the group mapping only after this write, because a process must not be able to drop a
        // group that denies access to a file.
        fs::write("/proc/self/setgroups", "deny")?;
        fs::write("/proc/self/uid_map", format!("{user} {user} 1"))?;
        fs::write("/proc/self/gid_map", format!("{group} {group} 1"))?;
    }
    // Mounts are propagated in neither direction. A mount made elsewhere could hide one made here.
    Ok(mount_change(c"/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)?)
}
