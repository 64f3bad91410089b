//! A `pagemill mount` for one test, and the controller of the mount.

use super::{Guard, PAGEMILL, TIMEOUT, TestFolder, finish, is_missing, is_root, may_mount};
use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

pub const MIB: usize = 1 << 20;

/// A mounted RAM file system. Dropping the value unmounts the file system, even if it is busy.
pub struct Ram {
    pub place: TestFolder,
    pub point: PathBuf,
    pub controller: Guard,
}

impl Ram {
    pub fn new(options: &[&str]) -> Option<Self> {
        if !may_mount() {
            return None;
        }
        let place = TestFolder::new();
        let point = place.path("ram");
        fs::create_dir(&point).unwrap();
        let controller = start(&place, &point, options);
        Some(Self { place, point, controller })
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.point.join(name)
    }

    pub fn command(&self, arguments: &[&str]) -> super::End {
        let mut command = self.place.command(PAGEMILL);
        command.args(arguments);
        finish(command, TIMEOUT)
    }

    /// Creates a folder with marks, which apply to all files below the folder.
    pub fn folder(&self, name: &str, mark: &[&str]) -> PathBuf {
        let path = self.at(name);
        fs::create_dir(&path).unwrap();
        self.mark(&path, mark);
        path
    }

    pub fn mark(&self, path: &Path, mark: &[&str]) {
        self.command(&[&["mark"], mark, &[path.to_str().unwrap()]].concat()).assert_success();
    }

    pub fn status(&self) -> Value {
        let end = self.command(&["status", "--json", self.point.to_str().unwrap()]);
        end.assert_success();
        serde_json::from_str(&end.out).unwrap()
    }

    pub fn count(&self, name: &str) -> u64 {
        self.status()["counts"][name].as_u64().unwrap()
    }

    /// Purges `mib` MiB of volatile files. Returns the bytes that were purged.
    pub fn purge(&self, mib: usize) -> u64 {
        let end = self.command(&["purge", "--json", self.point.to_str().unwrap(), &format!("{mib}M")]);
        end.assert_success();
        serde_json::from_str::<Value>(&end.out).unwrap()["purged_bytes"].as_u64().unwrap()
    }

    pub fn is_mounted(&self) -> bool {
        fs::metadata(&self.point).unwrap().dev() != fs::metadata(self.place.path("home")).unwrap().dev()
    }

    /// Waits until the controller has found `files` volatile files.
    pub fn wait_for_volatile(&self, files: u64) {
        wait_until("volatile files are known", || self.status()["volatile_files"] == files);
    }
}

impl Drop for Ram {
    fn drop(&mut self) {
        if !self.controller.has_ended() {
            self.controller.signal("KILL");
            self.controller.wait(TIMEOUT);
        }
        while self.is_mounted() && super::shell(&format!("umount -l {}", self.point.display())).success() {}
    }
}

#[track_caller]
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < TIMEOUT, "never so: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Starts the controller of a new mount, and waits until the file system is mounted.
pub fn start(place: &TestFolder, point: &Path, options: &[&str]) -> Guard {
    let mut command = place.command(PAGEMILL);
    command.arg("mount").arg(point).args(options);
    command.stdout(File::create(place.path("out")).unwrap()).stderr(File::create(place.path("err")).unwrap());
    let mut controller = Guard::new(command);
    wait_until("it says that it is mounted", || {
        let err = || fs::read_to_string(place.path("err")).unwrap();
        assert!(!controller.has_ended(), "{}", err());
        fs::read_to_string(place.path("out")).unwrap().contains('\n')
    });
    controller
}

/// Returns the command `pagemill` for a user without privileges, which can reach the test's folders. Returns `None` if
/// this process is root and cannot become another user.
pub fn unprivileged(place: &TestFolder) -> Option<Command> {
    if !is_root() {
        return Some(place.command(PAGEMILL));
    }
    if is_missing("setpriv") {
        return None;
    }
    fs::set_permissions(place.path("."), fs::Permissions::from_mode(0o777)).unwrap();
    for folder in ["runtime", "cache"] {
        assert!(super::shell(&format!("chown nobody {}", place.path(folder).display())).success());
    }
    let mut command = place.command("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", PAGEMILL]);
    Some(command)
}

/// Returns bytes that depend on the seed and on their position. No byte is zero.
pub fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / 64 + seed * 31 + 1) as u8 | 1).collect()
}
