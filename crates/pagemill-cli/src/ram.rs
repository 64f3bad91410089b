//! `pagemill run --ram DIR`: a RAM file system for one program and its children, without privileges.
//!
//! This process enters a mount namespace of its own, inside a user namespace where it has no privileges; the program
//! inherits both. Its controller is a thread here, and ends with the program.

use crate::mount::worker_program;
use pagemill_mount::control::{End, Keeper, Server};
use pagemill_mount::mounting::{self, Mounted, Wanted};
use pagemill_mount::steward::{Settings, say};
use pagemill_sys::namespace;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver};

/// A private file system, for as long as the program runs.
pub struct Ram {
    // In this order: nobody is answered any more, then the steward ends.
    _server: Option<Server>,
    _keeper: Keeper,
    _ends: Receiver<End>,
    point: PathBuf,
    device: u64,
    /// The mount point, if it was made for this.
    made: Option<PathBuf>,
}

impl Ram {
    /// Mounts it, for this process and its children only. To be called while there is one thread.
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
            format!("no mount namespace of its own ({error}): user namespaces may be forbidden here; as root it works")
        })?;
        // Only its user can be there, but root's files stay root's alone.
        let wanted = Wanted { point: dir.to_owned(), size_bytes, mode: 0o700 };
        let Mounted { point, door, has_no_huge, .. } = wanted.mount().map_err(|refusal| refusal.to_string())?;
        if has_no_huge {
            say("this kernel has no huge pages for tmpfs: files stay in small ones");
        }
        // Who stands in the folder would stay below what is mounted now.
        if std::env::current_dir().is_ok_and(|here| here == point) {
            std::env::set_current_dir(&point).map_err(|error| error.to_string())?;
        }
        let device = door.device();
        let settings =
            Settings { mount_point: point.clone(), size_bytes, groups: Vec::new(), worker: worker_program() };
        let keeper = Keeper::start(settings, door).map_err(|error| error.to_string())?;
        let (ends, end) = mpsc::channel();
        let server = Server::start(&keeper, device, ends);
        if let Err(error) = &server {
            say(&format!("`pagemill status` will not reach the file system: {error}"));
        }
        Ok(Self { _server: server.ok(), _keeper: keeper, _ends: end, point, device, made: None })
    }
}

/// Makes the mount point if it is not there; returns it if so.
fn make(dir: &Path) -> Result<Option<PathBuf>, String> {
    if dir.exists() {
        return Ok(None);
    }
    let made = fs::create_dir(dir);
    made.map(|()| Some(dir.to_owned())).map_err(|error| {
        format!(
            "{} does not exist and cannot be made ({error}): any folder that exists does, an empty one",
            dir.display()
        )
    })
}

impl Drop for Ram {
    fn drop(&mut self) {
        let holders = mounting::holders(self.device, 0);
        if !holders.is_empty() {
            say(&format!(
                "{} stays for who still uses it, and nothing in it is purged any more:",
                self.point.display()
            ));
            holders.iter().for_each(|holder| say(&holder.to_string()));
        }
        // Who still uses it keeps it, and the folder with it.
        if let Some(made) = &self.made
            && rustix::mount::unmount(made, rustix::mount::UnmountFlags::NOFOLLOW).is_ok()
        {
            let _ = fs::remove_dir(made);
        }
    }
}
