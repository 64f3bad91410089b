//! An ext4 file system in a file, on a loop device. It is mounted in the private mount namespace of the bench.

use std::path::Path;
use std::process::{Command, Stdio};

use tempfile::{NamedTempFile, TempDir};

use crate::error::{Error, Result};

/// Size of the file system in bytes. The file that holds it is sparse.
const IMAGE_BYTES: u64 = 1 << 30;

/// The file that holds the file system, and the folder on which it is mounted.
pub struct Ext4Image {
    file: NamedTempFile,
    folder: TempDir,
    inodes: u64,
}

/// The file system while it is mounted. Dropping the value unmounts it.
pub struct MountedExt4<'image>(&'image Ext4Image);

impl Ext4Image {
    /// Makes a file system with room for `inodes` inodes, and mounts it once.
    ///
    /// # Errors
    ///
    /// [`Error::Gap`] that says what is missing, such as the program `mkfs.ext4`, a loop device, or ext4 in the kernel.
    pub fn new(inodes: u64) -> Result<Self> {
        let failed = |cause: std::io::Error| Error::Gap(cause.to_string());
        let file = NamedTempFile::new().map_err(failed)?;
        let folder = TempDir::new().map_err(failed)?;
        let image = Self { file, folder, inodes };
        drop(image.mount()?);
        Ok(image)
    }

    /// Makes the file system anew and mounts it.
    ///
    /// # Errors
    ///
    /// As [`Ext4Image::new`].
    pub fn mount(&self) -> Result<MountedExt4<'_>> {
        self.file.as_file().set_len(IMAGE_BYTES).map_err(|cause| Error::Gap(cause.to_string()))?;
        let mut make = Command::new("mkfs.ext4");
        run(make.args(["-q", "-F", "-N", &self.inodes.to_string()]).arg(self.file.path()))?;
        let mut mount = Command::new("mount");
        run(mount.args(["-o", "loop", "-t", "ext4"]).arg(self.file.path()).arg(self.folder.path()))?;
        Ok(MountedExt4(self))
    }
}

impl MountedExt4<'_> {
    pub fn folder(&self) -> &Path {
        self.0.folder.path()
    }

    /// Returns a shell command that unmounts and mounts the file system, so that the kernel has none of its names,
    /// inodes and blocks in memory.
    pub fn remount_command(&self) -> String {
        let (file, folder) = (self.0.file.path().display(), self.0.folder.path().display());
        format!("umount '{folder}' && mount -o loop -t ext4 '{file}' '{folder}'")
    }
}

impl Drop for MountedExt4<'_> {
    fn drop(&mut self) {
        if let Err(error) = run(Command::new("umount").arg(self.folder())) {
            eprintln!("gap: {error}");
        }
    }
}

/// Runs a command. The error has the first line that the command printed.
fn run(command: &mut Command) -> Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let gap = |what: &str| Error::Gap(format!("{name}: {what}"));
    let output = command.stdin(Stdio::null()).output().map_err(|cause| gap(&cause.to_string()))?;
    let complaint = String::from_utf8_lossy(&output.stderr);
    match output.status.success() {
        true => Ok(()),
        false => Err(gap(complaint.lines().next().unwrap_or("it failed without a message"))),
    }
}
