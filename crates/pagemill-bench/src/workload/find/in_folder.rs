//! The operations of a tree in a folder, by system calls and by the program `find`.

use std::env;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::mount::MountFlags;

use super::{FindArguments, Tree};
use crate::workload::Failure;

/// A folder on a file system of its own, which is the current folder of the process: paths are short, as in a RAM file
/// system of the process.
pub struct Folder {
    root: PathBuf,
    dropping: Dropping,
}

/// How the kernel is made to forget names and inodes of the file system.
enum Dropping {
    Impossible,
    /// A shell command that mounts the file system anew.
    MountAnew(String),
    /// A remount, at which the kernel frees all unused dentries of the file system.
    Remount,
}

impl Folder {
    pub fn new(root: &Path, arguments: &FindArguments) -> Result<Self, Failure> {
        env::set_current_dir(root).map_err(|cause| failed(&root.display().to_string(), &cause))?;
        let dropping = match &arguments.mount_anew {
            Some(command) => Dropping::MountAnew(command.clone()),
            None if arguments.remount => Dropping::Remount,
            None => Dropping::Impossible,
        };
        Ok(Self { root: root.to_owned(), dropping })
    }

    /// Runs the shell command outside of the folder, which is not in use meanwhile.
    fn mount_anew(&self, command: &str) -> Result<(), Failure> {
        env::set_current_dir("/")?;
        let output = Command::new("sh").args(["-c", command]).stdin(Stdio::null()).output();
        let output = output.map_err(|cause| failed(command, &cause))?;
        if !output.status.success() {
            return Err(format!("{command}: {}", String::from_utf8_lossy(&output.stderr).trim()).into());
        }
        Ok(env::set_current_dir(&self.root)?)
    }
}

/// Returns a path of the tree as a path relative to the current folder.
fn relative(path: &str) -> &str {
    path.trim_start_matches('/')
}

fn failed(path: &str, cause: &io::Error) -> Failure {
    Failure::Other(format!("{path}: {cause}"))
}

impl Tree for Folder {
    fn create_directory(&self, path: &str) -> Result<(), Failure> {
        fs::create_dir(relative(path)).map_err(|cause| failed(path, &cause))
    }

    fn create(&self, path: &str) -> Result<(), Failure> {
        File::create_new(relative(path)).map(drop).map_err(|cause| failed(path, &cause))
    }

    fn remove(&self, path: &str) -> Result<(), Failure> {
        fs::remove_file(relative(path)).map_err(|cause| failed(path, &cause))
    }

    #[inline]
    fn exists(&self, path: &str) -> Result<bool, Failure> {
        match rustix::fs::stat(relative(path)) {
            Ok(_) => Ok(true),
            Err(rustix::io::Errno::NOENT) => Ok(false),
            Err(errno) => Err(failed(path, &errno.into())),
        }
    }

    fn search(&self, name: &str) -> Result<(Option<usize>, usize), Failure> {
        let mut command = Command::new("find");
        let output = command.args([".", "-name", name]).stdin(Stdio::null()).output();
        let output = output.map_err(|cause| failed("find", &cause))?;
        if !output.status.success() {
            return Err(format!("find: {}", String::from_utf8_lossy(&output.stderr).trim()).into());
        }
        Ok((None, output.stdout.iter().filter(|byte| **byte == b'\n').count()))
    }

    fn forget_after_building(&self) -> Result<(), Failure> {
        self.drop_caches()
    }

    fn drop_caches(&self) -> Result<(), Failure> {
        match &self.dropping {
            Dropping::Impossible => Ok(()),
            Dropping::MountAnew(command) => self.mount_anew(command),
            Dropping::Remount => rustix::mount::mount_remount(".", MountFlags::NODEV | MountFlags::NOSUID, c"")
                .map_err(|errno| failed("remount", &errno.into())),
        }
    }
}
