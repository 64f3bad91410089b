//! A tmpfs that only this process can reach, for one file without a name.
//!
//! A process with the right to mount creates the tmpfs directly: a mount needs no mount point. Otherwise a child does
//! this in a user namespace of its own. The child shares memory and descriptors with this process, so the file that it
//! opens stays open here. The file keeps its file system in existence.
//!
//! A seccomp filter may kill the process for such calls. So a process with a filter does not try them.
#![allow(unsafe_code)] // clone, wait4

use crate::fault::AllSignalsBlocked;
use crate::file::{self, Fd, Text};
use crate::mem;
use crate::result::retry_interrupted;
use rustix::fs::{Mode, OFlags, openat};
use rustix::io::{Errno, Result, retry_on_intr, write};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};
use rustix::mount::{fsconfig_create, fsconfig_set_string, fsmount, fsopen};
use rustix::process::{getegid, geteuid};
use std::ffi::{CStr, c_int, c_void};
use std::os::fd::OwnedFd;
use std::ptr;

/// Size of the child's stack.
const CHILD_STACK_BYTES: usize = 128 << 10;

/// Opens a new, empty file in a new tmpfs, which has room for `size_bytes` and huge pages where they are advised
/// (`huge=advise`).
///
/// Cost: 0.1 ms; without the right to mount some 1 ms.
///
/// # Errors
///
/// `EPERM`, `ENOSPC`, `ENOSYS` and others if the process may neither mount nor create a user namespace; `EPERM` if it
/// has a seccomp filter.
pub fn open_file(size_bytes: u64) -> std::io::Result<OwnedFd> {
    // SAFETY: the call takes no further arguments.
    if unsafe { libc::prctl(libc::PR_GET_SECCOMP) } != 0 {
        return Err(Errno::PERM.into());
    }
    match mount_and_open(size_bytes) {
        Ok(file) => Ok(file),
        Err(_) => Ok(open_in_namespace(size_bytes)?),
    }
}

/// Creates a tmpfs and opens a file in it. The caller must have the right to mount.
///
/// Makes only system calls, so that a child that shares the memory of this process can call it.
fn mount_and_open(size_bytes: u64) -> Result<OwnedFd> {
    let size = Text::<32>::format(format_args!("{size_bytes}")).ok_or(Errno::INVAL)?;
    let context = Fd::from(fsopen(c"tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?);
    for (key, value) in [(c"size", size.as_c_str()), (c"huge", c"advise"), (c"mode", c"0700")] {
        fsconfig_set_string(&context, key, value)?;
    }
    fsconfig_create(&context)?;
    let attributes =
        MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let root = Fd::from(fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?);
    openat(&root, c".", OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR)
}

/// The arguments and the result of the child, in memory that it shares with its parent.
struct Request {
    size_bytes: u64,
    user: u32,
    group: u32,
    opened: Result<OwnedFd>,
}

impl Request {
    /// Creates the tmpfs in the new namespaces of the child. Runs in the child.
    ///
    /// The parent's thread is suspended meanwhile, and shares all memory with the child. So this function must not
    /// allocate, lock or panic.
    fn open(&self) -> Result<OwnedFd> {
        // Without these mappings no file can be created: its owner would be unknown in the namespace.
        write_all(c"/proc/self/setgroups", format_args!("deny"))?;
        write_all(c"/proc/self/uid_map", format_args!("{0} {0} 1", self.user))?;
        write_all(c"/proc/self/gid_map", format_args!("{0} {0} 1", self.group))?;
        mount_and_open(self.size_bytes)
    }
}

/// Writes a short text to a kernel file with one call.
fn write_all(path: &CStr, text: std::fmt::Arguments<'_>) -> Result<()> {
    let text = Text::<64>::format(text).ok_or(Errno::INVAL)?;
    let file = file::open(path, OFlags::WRONLY, Mode::empty());
    let file = file.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    retry_on_intr(|| write(&file, text.as_bytes())).map(drop)
}

/// The first function of the child. `request` points to a [`Request`].
extern "C" fn child_main(request: *mut c_void) -> c_int {
    // SAFETY: `open_in_namespace` passes a `Request`, and is suspended while the child runs.
    let request = unsafe { &mut *request.cast::<Request>() };
    request.opened = request.open();
    0
}

/// As [`mount_and_open`], in a child with a user namespace and a mount namespace of its own.
///
/// The namespaces are created by `clone`, because `unshare` fails in a process with threads. The child runs no fork
/// handlers, and has no exit signal, so the program's own `wait` does not find it.
fn open_in_namespace(size_bytes: u64) -> Result<OwnedFd> {
    let (user, group) = (geteuid().as_raw(), getegid().as_raw());
    let mut request = Request { size_bytes, user, group, opened: Err(Errno::NOSYS) };
    let (access, kind) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::STACK);
    // SAFETY: the call creates a new mapping and replaces none.
    let stack = unsafe { mem::map(0, CHILD_STACK_BYTES, access, kind) }.map_err(|_| Errno::NOMEM)?;
    let end = (stack + CHILD_STACK_BYTES) as *mut c_void;
    let shared = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_FILES;
    let flags = shared | libc::CLONE_NEWUSER | libc::CLONE_NEWNS;
    // The child inherits the mask, so no handler of the program runs in it.
    let blocked = AllSignalsBlocked::begin();
    // SAFETY: the stack grows down from the end of the mapping. Because of CLONE_VFORK this thread continues only after
    // the child has stopped using the stack and `request`.
    let pid = unsafe { libc::clone(child_main, end, flags, ptr::from_mut(&mut request).cast()) };
    let refusal = Errno::from_io_error(&std::io::Error::last_os_error());
    if pid > 0 {
        // The C library's `waitpid` is a cancellation point. If the program waits for all kinds of children, it may find
        // this one first, and the call fails.
        let (nowhere, options) = (ptr::null_mut::<c_void>(), libc::__WALL);
        // SAFETY: the call only waits for the child, which ends.
        let _ = retry_interrupted(|| unsafe { libc::syscall(libc::SYS_wait4, pid, nowhere, options, nowhere) });
    }
    drop(blocked);
    // SAFETY: the child does not use the stack any more.
    unsafe { mem::unreserve(stack, CHILD_STACK_BYTES) };
    if pid < 0 { Err(refusal.unwrap_or(Errno::NOSYS)) } else { request.opened }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{FallocateFlags, fallocate, fstatfs, ftruncate};

    /// A file must be open after its tmpfs was created in a child, and have the requested room. No child may be left
    /// for the program to wait for.
    #[test]
    fn a_child_opens_a_file_for_its_parent() {
        for open in [mount_and_open, open_in_namespace] {
            let file = match open(4 << 20) {
                Ok(file) => file,
                Err(error) => {
                    println!("skipped: {error}");
                    continue;
                }
            };
            const TMPFS_MAGIC: i64 = 0x0102_1994;
            let system = fstatfs(&file).unwrap();
            assert_eq!((system.f_type as i64, system.f_blocks * system.f_bsize as u64), (TMPFS_MAGIC, 4 << 20));
            ftruncate(&file, 8 << 20).unwrap();
            fallocate(&file, FallocateFlags::empty(), 0, 4 << 20).unwrap();
            assert_eq!(fallocate(&file, FallocateFlags::empty(), 4 << 20, 4 << 20), Err(Errno::NOSPC));
        }
    }

    /// Threads create file systems while others run. Each must get its own file.
    #[test]
    fn threads_open_files_at_the_same_time() {
        let open = || (0..8).filter(|_| open_in_namespace(4 << 20).is_ok()).count();
        let opened = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(open)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum::<usize>()
        });
        assert!(opened == 0 || opened == 32, "{opened} of 32");
    }
}
