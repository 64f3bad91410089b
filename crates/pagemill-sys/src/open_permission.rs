//! Permission events of one file system (fanotify): the kernel delays each open of a regular file until the listener
//! allows it.
//!
//! Needs CAP_SYS_ADMIN in the initial user namespace, and a kernel with `CONFIG_FANOTIFY_ACCESS_PERMISSIONS`. If the
//! listener's descriptor is closed, or its process ends, the kernel allows all delayed opens.
#![allow(unsafe_code)] // fanotify, descriptors that arrive in events

use crate::result::{check_result, take_descriptor};
use rustix::io::Errno;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

/// A listener that lets the kernel delay the opens of files in one file system until the listener allows them.
pub struct OpenPermissions(OwnedFd);

/// An open that waits in the kernel for permission. Dropping the value allows the open.
pub struct DelayedOpen {
    listener: Arc<OpenPermissions>,
    /// The file, opened by the kernel for the listener. The number of its descriptor identifies the event in the answer
    /// to the kernel.
    file: Option<OwnedFd>,
}

impl Drop for DelayedOpen {
    fn drop(&mut self) {
        let Some(file) = self.file.take() else { return };
        let answer = libc::fanotify_response { fd: file.as_raw_fd(), response: libc::FAN_ALLOW };
        // The descriptor is closed before the answer, because after the answer the program may need that no other
        // descriptor of the file is open. The kernel compares only the number. No other event can have the same number,
        // because one thread reads and answers.
        drop(file);
        let bytes = (&raw const answer).cast();
        // SAFETY: the call only reads `answer`.
        unsafe { libc::write(self.listener.0.as_raw_fd(), bytes, size_of::<libc::fanotify_response>()) };
    }
}

impl OpenPermissions {
    /// Creates a listener that delays no opens before [`Self::start`].
    ///
    /// # Errors
    ///
    /// `EPERM` without CAP_SYS_ADMIN; `EINVAL` without support in the kernel.
    pub fn new() -> io::Result<Arc<Self>> {
        let flags = libc::FAN_CLASS_CONTENT | libc::FAN_CLOEXEC | libc::FAN_NONBLOCK;
        let file_flags = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_LARGEFILE;
        // SAFETY: the call only creates a descriptor.
        let fd = unsafe { take_descriptor(libc::syscall(libc::SYS_fanotify_init, flags, file_flags)) }?;
        Ok(Arc::new(Self(fd)))
    }

    /// Delays opens of files in the file system that contains `root`, except opens through the mount that `root` is
    /// open in.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the kernel has no permission events; errors of `fanotify_mark`. After an error, no open is delayed.
    pub fn start(&self, root: BorrowedFd<'_>) -> io::Result<()> {
        let ignore = libc::FAN_MARK_MOUNT | libc::FAN_MARK_IGNORED_MASK | libc::FAN_MARK_IGNORED_SURV_MODIFY;
        self.change_mark(root, libc::FAN_MARK_ADD | ignore)?;
        self.change_mark(root, libc::FAN_MARK_ADD | libc::FAN_MARK_FILESYSTEM)
    }

    /// Stops delaying opens. Opens that are already delayed still wait for their answer.
    pub fn stop(&self, root: BorrowedFd<'_>) {
        // The calls fail only if there is no mark. The second mark alone would slow down opens.
        let _ = self.change_mark(root, libc::FAN_MARK_REMOVE | libc::FAN_MARK_FILESYSTEM);
        let ignore = libc::FAN_MARK_MOUNT | libc::FAN_MARK_IGNORED_MASK;
        let _ = self.change_mark(root, libc::FAN_MARK_REMOVE | ignore);
    }

    fn change_mark(&self, root: BorrowedFd<'_>, how: libc::c_uint) -> io::Result<()> {
        let (listener, root) = (self.0.as_raw_fd(), root.as_raw_fd());
        // SAFETY: the path is a C string.
        check_result(unsafe { libc::fanotify_mark(listener, how, libc::FAN_OPEN_PERM, root, c".".as_ptr()) })
    }

    /// Reads the next open that waits; `None` if none waits, or if a signal interrupted the call. Only one thread may
    /// read and answer.
    ///
    /// Blocks while another process holds a lease on the file, since the kernel opens the file for the listener too.
    ///
    /// # Errors
    ///
    /// Errors of `read` and of the kernel's open (`EMFILE`, `EACCES`). The kernel has refused the program's open then.
    pub fn read(self: &Arc<Self>) -> io::Result<Option<DelayedOpen>> {
        let mut event = [0u8; size_of::<libc::fanotify_event_metadata>()];
        match rustix::io::read(&self.0, &mut event) {
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            result => result?,
        };
        let fd = event[16..20].try_into().map_or(-1, i32::from_ne_bytes);
        // SAFETY: the kernel created this descriptor for the event, and no other value owns it.
        let file = (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) });
        // An event that reports lost events has no descriptor.
        Ok(file.map(|file| DelayedOpen { listener: self.clone(), file: Some(file) }))
    }
}

/// The listener's descriptor, which is readable while an open waits.
impl AsFd for OpenPermissions {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::fs::{Mode, OFlags, openat};
    use rustix::mount::{OpenTreeFlags, open_tree};
    use std::fs::File;
    use std::thread;

    fn becomes_readable(listener: &OpenPermissions) -> bool {
        let at_most = Timespec { tv_sec: 20, tv_nsec: 0 };
        poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&at_most)).is_ok_and(|ready| ready > 0)
    }

    /// An open must wait until its `DelayedOpen` is dropped. Opens through the listener's own mount, and opens after
    /// `stop`, must not wait.
    #[test]
    fn an_open_waits_for_permission() {
        // The test uses a file system of its own, because opens by other processes would be delayed, too.
        let Ok(listener) = OpenPermissions::new() else { return println!("skipped: no permission events") };
        let Some(mount) = new_unattached_tmpfs() else { return println!("skipped: no right to mount") };
        let path = format!("/proc/self/fd/{}/file", mount.as_raw_fd());
        std::fs::write(&path, b"x").unwrap();
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
        // Before Linux 6.15 a mount that is attached nowhere cannot be cloned.
        let Ok(clone) = open_tree(&mount, "", flags) else { return println!("skipped: no clone of the mount") };
        let root = openat(&clone, ".", OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap();
        match listener.start(root.as_fd()) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return println!("skipped: {error}"),
            result => result.unwrap(),
        }
        drop(openat(&root, "file", OFlags::RDONLY, Mode::empty()).unwrap());
        assert!(listener.read().unwrap().is_none(), "an open through the listener's own mount");
        let opener = thread::spawn({
            let path = path.clone();
            move || File::open(path).map(drop)
        });
        assert!(becomes_readable(&listener));
        let delayed = listener.read().unwrap();
        assert!(delayed.is_some() && !opener.is_finished(), "it waits");
        drop(delayed);
        opener.join().unwrap().unwrap();
        listener.stop(root.as_fd());
        drop(File::open(&path).unwrap());
        // When the listener is dropped, the kernel allows all opens.
        listener.start(root.as_fd()).unwrap();
        let opener = thread::spawn(move || File::open(path).map(drop));
        assert!(becomes_readable(&listener));
        drop(listener);
        opener.join().unwrap().unwrap();
    }

    /// Returns a new tmpfs that is mounted at no path; `None` without the right to mount.
    fn new_unattached_tmpfs() -> Option<OwnedFd> {
        use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
        let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC).ok()?;
        fsconfig_create(context.as_fd()).ok()?;
        fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty()).ok()
    }
}
