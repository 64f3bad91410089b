//! Another local user cannot affect a run, although the folders of both lie side by side. Runs as root, for other
//! users.

mod common;

use common::{PAGEMILL, Place, STUCK_AFTER, finish, is_root, lacks};
use std::fs;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Users that have nothing else here.
const USER: u32 = 65_432;
const OTHER: u32 = 65_433;

/// Folders that another user has made where the user's would lie; removed at the end. One test at a time has them.
struct Squatted {
    folders: [PathBuf; 2],
    _one: MutexGuard<'static, ()>,
}

impl Squatted {
    fn new() -> Self {
        static ONE: Mutex<()> = Mutex::new(());
        let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let folders = ["/dev/shm", "/tmp"].map(|folder| Path::new(folder).join(format!("pagemill-{USER}")));
        for folder in &folders {
            fs::DirBuilder::new().mode(0o777).create(folder).unwrap();
            chown(folder, Some(OTHER), Some(OTHER)).unwrap();
        }
        Self { folders, _one: one }
    }
}

impl Drop for Squatted {
    fn drop(&mut self) {
        self.folders.iter().for_each(|folder| drop(fs::remove_dir_all(folder)));
    }
}

fn cannot_be_others() -> bool {
    if !is_root() {
        println!("skipped: not root");
    }
    !is_root() || lacks("setpriv")
}

/// The command under test, as a user that sees this place and has no folder for runtime files.
fn as_user(place: &Place) -> Command {
    let (program, cache) = (place.path("pagemill"), place.path("cache"));
    if !program.exists() {
        fs::copy(PAGEMILL, &program).unwrap();
    }
    for path in [place.path("."), program.clone()] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    chown(&cache, Some(USER), Some(USER)).unwrap();
    let mut command = place.command("setpriv");
    let user = USER.to_string();
    command.args(["--reuid", &user, "--regid", &user, "--clear-groups"]).arg(program).env_remove("XDG_RUNTIME_DIR");
    command
}

/// Names of the user's own folders where all may make some.
fn own_folders() -> Vec<PathBuf> {
    let of = |folder| fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let is_own = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().starts_with(&format!("pagemill-{USER}-"));
    of("/dev/shm").chain(of("/tmp")).filter(is_own).collect()
}

/// Another user has made both folders where the figures of this one would lie: a limit holds all the same, the processes are
/// found, and nothing is left.
#[test]
fn another_user_cannot_stop_a_limit() {
    if cannot_be_others() {
        return;
    }
    let (place, _squatted) = (Place::new(), Squatted::new());
    let mut command = as_user(&place);
    let program = place.path("pagemill");
    let script = format!("{0} meminfo $$ > /dev/null && {0} meminfo && exit 7", program.display());
    command.args(["run", "--limit", "300M", "--report", "--", "sh", "-c", &script]);
    let end = finish(command, STUCK_AFTER);
    assert_eq!(end.code(), 7, "{}", end.err);
    assert!(end.err.contains("limit") && end.out.contains("sh"), "{}{}", end.out, end.err);
    assert_eq!(own_folders(), Vec::<PathBuf>::new());
}

/// The next command removes the files that a killed run has left.
#[test]
fn what_a_killed_run_leaves_is_swept() {
    if cannot_be_others() {
        return;
    }
    let (place, _squatted) = (Place::new(), Squatted::new());
    let mut command = as_user(&place);
    command.args(["run", "--limit", "300M", "--", "sh", "-c", "kill -s KILL $PPID; exec sleep 600"]);
    assert!(!finish(command, STUCK_AFTER).status.success());
    assert_eq!(own_folders().len(), 1);
    // The program dies with `run`, some moments later.
    while !own_folders().is_empty() {
        let mut command = as_user(&place);
        command.args(["run", "--", "true"]);
        finish(command, STUCK_AFTER).assert_success();
    }
}

/// `sudo -E` keeps `XDG_RUNTIME_DIR`: nothing of root's is put into the folder of another user.
#[test]
fn the_runtime_folder_of_another_user_is_left_alone() {
    if cannot_be_others() {
        return;
    }
    let place = Place::new();
    let runtime = place.path("runtime");
    chown(&runtime, Some(USER), Some(USER)).unwrap();
    let mut command = place.shell(&["--limit", "300M", "--report"], "exit 6");
    command.env_remove("XDG_CACHE_HOME").env_remove("HOME");
    assert_eq!(finish(command, STUCK_AFTER).code(), 6);
    assert_eq!(fs::read_dir(&runtime).unwrap().count(), 0);
    // Root's own folder is there for all of its processes: removed if it is empty.
    drop(fs::remove_dir("/dev/shm/pagemill-0"));
}
