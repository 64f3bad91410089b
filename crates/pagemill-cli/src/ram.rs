//! `pagemill run --ram DIR`: a RAM file system for one program and its children, without privileges.
//!
//! This process enters a private mount namespace, inside a user namespace if it has no privileges; the program
//! inherits both. The controller is a thread here and ends with the program.

use crate::mount::worker_program;
use pagemill_mount::control::{End, Keeper, Server, Until};
use pagemill_mount::control_loop::{Settings, say};
use pagemill_mount::mounting::{self, Mounted, Wanted};
use pagemill_sys::namespace;
use rustix::mount::{UnmountFlags, unmount};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver};

/// A private file system that lives as long as the program.
pub struct Ram {
    // Drop order: the server stops first, then the control loop.
    _server: Option<Server>,
    _keeper: Keeper,
    _ends: Receiver<End>,
    point: PathBuf,
    device: u64,
    /// The mount point, if it was created here.
    made: Option<PathBuf>,
}

impl Ram {
    /// Mounts it for this process and its children only. Must be called while the process has one thread.
    pub fn mount(dir: &Path, size_bytes: u64) -> Result<Self, String> {
        let made = make(dir)?;
        let result = Self::mount_at(dir, size_bytes);
        if result.is_err()
            && let Some(made) = &made
        {
            let _ = fs::remove_dir(made);
        }
        result.map(|mut ram| {
            ram.made = made;
            ram
        })
    }

    fn mount_at(dir: &Path, size_bytes: u64) -> Result<Self, String> {
        namespace::enter_mounts().map_err(|error| {
            format!(
                "no mount namespace can be created ({error}): user namespaces may be forbidden here; root needs none"
            )
        })?;
        // Only this user can be in the namespace, but root's files must stay private to root.
        let wanted = Wanted { point: dir.to_owned(), size_bytes: Some(size_bytes), mode: 0o700 };
        let Mounted { point, access, has_no_huge, .. } = wanted.mount().map_err(|refusal| refusal.to_string())?;
        if has_no_huge {
            say("this kernel has no huge pages for tmpfs: files stay in small ones");
        }
        // If the current folder is the mount point, this process would stay below the mount.
        if std::env::current_dir().is_ok_and(|here| here == point) {
            std::env::set_current_dir(&point).map_err(|error| error.to_string())?;
        }
        let device = access.device();
        let settings =
            Settings { mount_point: point.clone(), size_bytes, groups: Vec::new(), worker: worker_program() };
        let keeper = Keeper::start(settings, access).map_err(|error| {
            let _ = unmount(&point, UnmountFlags::NOFOLLOW);
            format!("the controller of {} cannot be started: {error}", point.display())
        })?;
        let (ends, end) = mpsc::channel();
        let server = Server::start(&keeper, device, Until::Unmounted, ends);
        if let Err(error) = &server {
            say(&format!("`pagemill status` will not reach the file system: {error}"));
        }
        Ok(Self { _server: server.ok(), _keeper: keeper, _ends: end, point, device, made: None })
    }
}

/// Creates the mount point if it is missing, and returns its path then.
fn make(dir: &Path) -> Result<Option<PathBuf>, String> {
    if dir.exists() {
        return Ok(None);
    }
    let made = fs::create_dir(dir);
    made.map(|()| Some(dir.to_owned())).map_err(|error| {
        format!("{} does not exist and cannot be created ({error}); use an existing empty folder", dir.display())
    })
}

impl Drop for Ram {
    fn drop(&mut self) {
        let holders = mounting::holders(self.device, 0);
        if !holders.is_empty() {
            say(&format!(
                "{} stays for the processes that still use it; nothing in it is purged any more:",
                self.point.display()
            ));
            holders.iter().for_each(|holder| say(&holder.to_string()));
        }
        // Processes that still use it keep it, and the folder as well.
        let Some(made) = self.made.as_ref().filter(|_| holders.is_empty()) else { return };
        // A holder may be invisible, or have ended only just now. The mount goes with its last user.
        let flags = UnmountFlags::NOFOLLOW;
        let unmounted = unmount(made, flags).or_else(|_| unmount(made, flags | UnmountFlags::DETACH));
        if let Err(error) = unmounted.map_err(Into::into).and_then(|()| fs::remove_dir(made)) {
            say(&format!("{} stays: it cannot be removed: {error}", made.display()));
        }
    }
}
