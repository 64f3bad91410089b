//! A `pagemill mount --fuse` for one test, and the process that serves it.

use super::ram::wait_until;
use super::{End, Guard, PAGEMILL, TIMEOUT, TestFolder, finish, may_mount};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A RAM file system that is mounted through FUSE. Dropping the value unmounts it, even if it is busy.
pub struct Fuse {
    pub place: TestFolder,
    pub point: PathBuf,
    pub server: Guard,
}

impl Fuse {
    /// Mounts a file system. If this is not possible here, prints the reason and returns `None`.
    pub fn new(options: &[&str]) -> Option<Self> {
        if !may_use_fuse() {
            return None;
        }
        let place = TestFolder::new();
        let point = place.path("fuse");
        fs::create_dir(&point).unwrap();
        let server = start(&place, &point, options);
        Some(Self { place, point, server })
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.point.join(name)
    }

    pub fn command(&self, arguments: &[&str]) -> End {
        let mut command = self.place.command(PAGEMILL);
        command.args(arguments);
        finish(command, TIMEOUT)
    }

    pub fn err(&self) -> String {
        fs::read_to_string(self.place.path("err")).unwrap()
    }

    pub fn is_mounted(&self) -> bool {
        is_mounted(&self.point)
    }

    /// Kills the process that serves the file system, and waits for its end.
    pub fn kill(&mut self) {
        self.server.signal("KILL");
        self.server.wait(TIMEOUT);
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        if !self.server.has_ended() {
            self.kill();
        }
        while self.is_mounted() && super::shell(&format!("umount -l {}", self.point.display())).success() {}
    }
}

/// Returns whether a test may mount through FUSE. If not, prints that the test is skipped.
pub fn may_use_fuse() -> bool {
    if !Path::new("/dev/fuse").exists() {
        println!("skipped: there is no /dev/fuse");
        return false;
    }
    may_mount()
}

/// Returns whether something is mounted on `point`, also if its process has ended.
pub fn is_mounted(point: &Path) -> bool {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    mounts.lines().any(|line| line.split(' ').nth(4) == point.to_str())
}

/// Starts the process of a new mount, and waits until the file system is mounted.
pub fn start(place: &TestFolder, point: &Path, options: &[&str]) -> Guard {
    let mut command = place.command(PAGEMILL);
    command.args(["mount", "--fuse"]).arg(point).args(options);
    started(place, command)
}

/// Starts a command that mounts, with its output in files of `place`, and waits until it reports the mount.
pub fn started(place: &TestFolder, mut command: Command) -> Guard {
    command.stdout(File::create(place.path("out")).unwrap()).stderr(File::create(place.path("err")).unwrap());
    let mut server = Guard::new(command);
    wait_until("it reports the mount", || {
        let err = || fs::read_to_string(place.path("err")).unwrap();
        assert!(!server.has_ended(), "{}", err());
        fs::read_to_string(place.path("out")).unwrap().contains('\n')
    });
    server
}
