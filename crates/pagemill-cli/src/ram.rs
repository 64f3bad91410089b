//! `pagemill run --ram DIR`: mounts a RAM file system for one program and its children, without privileges.
//!
//! This process enters a private mount namespace. If it has no privileges, it also enters a user namespace. The program
//! inherits the namespaces. The controller runs in threads of this process, and ends with the program.

use crate::mount::worker_program;
use pagemill_sys::namespace;
use pagemill_tmpfs::control::{ControlLoopThread, EndReason, Server, Until};
use pagemill_tmpfs::control_loop::Settings;
use pagemill_tmpfs::messages::print_message;
use pagemill_tmpfs::mounting::{self, MountRequest, Mounted};
use rustix::mount::{UnmountFlags, unmount};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver};

/// A mounted RAM file system that exists as long as the program of `run` runs.
pub struct Ram {
    // Drop order: the server stops first, then the control loop.
    _server: Option<Server>,
    _control_loop: ControlLoopThread,
    _ends: Receiver<EndReason>,
    point: PathBuf,
    device: u64,
    /// The folder of the mount point, if this process created it.
    created: Option<PathBuf>,
}

impl Ram {
    /// Mounts the file system so that only this process and its children see it. This process must still have a single
    /// thread, because it enters namespaces.
    pub fn mount(dir: &Path, size_bytes: u64) -> Result<Self, String> {
        let created = create_mount_point(dir)?;
        let result = Self::mount_at(dir, size_bytes);
        if result.is_err()
            && let Some(created) = &created
        {
            let _ = fs::remove_dir(created);
        }
        result.map(|mut ram| {
            ram.created = created;
            ram
        })
    }

    fn mount_at(dir: &Path, size_bytes: u64) -> Result<Self, String> {
        namespace::enter_mounts().map_err(|error| {
            format!(
                "no mount namespace can be created ({error}): user namespaces may be forbidden here; root needs none"
            )
        })?;
        // Only this user can enter the namespace. The mode is still needed for root, whose files must stay private.
        let request = MountRequest { point: dir.to_owned(), size_bytes: Some(size_bytes), mode: 0o700 };
        let Mounted { point, access, has_no_huge, .. } = request.mount().map_err(|refusal| refusal.to_string())?;
        if has_no_huge {
            print_message("this kernel has no huge pages for tmpfs: files stay in small ones");
        }
        // If the current folder is the mount point, the process is in the folder below the mount. So it changes to the
        // path again, which leads into the mount.
        if std::env::current_dir().is_ok_and(|here| here == point) {
            std::env::set_current_dir(&point).map_err(|error| error.to_string())?;
        }
        let device = access.device();
        let settings =
            Settings { mount_point: point.clone(), size_bytes, groups: Vec::new(), worker: worker_program() };
        let control_loop = ControlLoopThread::start(settings, access).map_err(|error| {
            let _ = unmount(&point, UnmountFlags::NOFOLLOW);
            format!("the controller of {} cannot be started: {error}", point.display())
        })?;
        let (ends, end) = mpsc::channel();
        let server = Server::start(&control_loop, device, Until::Unmounted, ends);
        if let Err(error) = &server {
            print_message(&format!("`pagemill status` will not reach the file system: {error}"));
        }
        Ok(Self { _server: server.ok(), _control_loop: control_loop, _ends: end, point, device, created: None })
    }
}

/// Creates the folder of the mount point if it does not exist. Returns the path only if the folder was created.
fn create_mount_point(dir: &Path) -> Result<Option<PathBuf>, String> {
    if dir.exists() {
        return Ok(None);
    }
    let created = fs::create_dir(dir);
    created.map(|()| Some(dir.to_owned())).map_err(|error| {
        format!("{} does not exist and cannot be created: {error}; use an existing empty folder", dir.display())
    })
}

impl Drop for Ram {
    fn drop(&mut self) {
        let users = mounting::users(self.device, 0);
        if !users.is_empty() {
            print_message(&format!(
                "{} stays for the processes that still use it; nothing in it is purged any more:",
                self.point.display()
            ));
            users.iter().for_each(|user| print_message(&user.to_string()));
        }
        // While other processes use the file system, the mount and the folder must stay.
        let Some(created) = self.created.as_ref().filter(|_| users.is_empty()) else { return };
        // A process that uses the mount may be invisible to this process, or may only just have ended. A detached mount
        // ends when its last user ends.
        let flags = UnmountFlags::NOFOLLOW;
        let unmounted = unmount(created, flags).or_else(|_| unmount(created, flags | UnmountFlags::DETACH));
        if let Err(error) = unmounted.map_err(Into::into).and_then(|()| fs::remove_dir(created)) {
            print_message(&format!("{} stays: it cannot be removed: {error}", created.display()));
        }
    }
}
