//! Another local user must not be able to affect a run, although the folders of both users are in the same parent
//! folder. The tests need root, and start programs as other users.

mod common;

use common::{PAGEMILL, TIMEOUT, TestFolder, finish, is_missing, is_root};
use std::fs;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Id of the user that runs programs. On this machine, the user owns no files.
const USER_ID: u32 = 65_432;
/// Id of another user, which also owns no files on this machine.
const OTHER_USER_ID: u32 = 65_433;

/// The two folders that Pagemill would create for the user `USER_ID`, created first by another user. Dropping the value
/// removes the folders. Only one test at a time can have such a value.
struct ForeignFolders {
    folders: [PathBuf; 2],
    _one: MutexGuard<'static, ()>,
}

impl ForeignFolders {
    fn new() -> Self {
        static ONE: Mutex<()> = Mutex::new(());
        let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let folders = ["/dev/shm", "/tmp"].map(|folder| Path::new(folder).join(format!("pagemill-{USER_ID}")));
        for folder in &folders {
            fs::DirBuilder::new().mode(0o777).create(folder).unwrap();
            chown(folder, Some(OTHER_USER_ID), Some(OTHER_USER_ID)).unwrap();
        }
        Self { folders, _one: one }
    }
}

impl Drop for ForeignFolders {
    fn drop(&mut self) {
        self.folders.iter().for_each(|folder| drop(fs::remove_dir_all(folder)));
    }
}

fn cannot_change_user() -> bool {
    if !is_root() {
        println!("skipped: not root");
    }
    !is_root() || is_missing("setpriv")
}

/// Returns the command under test, which runs as the user `USER_ID`. That user can reach the test's folders and has no
/// runtime folder.
fn as_user(place: &TestFolder) -> Command {
    let program = place.path("pagemill");
    if !program.exists() {
        place.install(PAGEMILL, "pagemill");
    }
    fs::set_permissions(place.path("."), fs::Permissions::from_mode(0o755)).unwrap();
    chown(place.path("cache"), Some(USER_ID), Some(USER_ID)).unwrap();
    let mut command = place.command("setpriv");
    let user = USER_ID.to_string();
    command.args(["--reuid", &user, "--regid", &user, "--clear-groups"]).arg(program).env_remove("XDG_RUNTIME_DIR");
    command
}

/// Returns the folders with random names in `/dev/shm` and `/tmp`. Pagemill creates such a folder for `USER_ID` if
/// another user owns the folder `pagemill-USER_ID` there.
fn own_folders() -> Vec<PathBuf> {
    let of = |folder| fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let is_own =
        |path: &PathBuf| path.file_name().unwrap().to_string_lossy().starts_with(&format!("pagemill-{USER_ID}-"));
    of("/dev/shm").chain(of("/tmp")).filter(is_own).collect()
}

/// Another user has created both folders in which Pagemill would publish files for this user. A limit must still apply,
/// `meminfo` must find the processes, and no folder may be left.
#[test]
fn another_user_cannot_stop_a_limit() {
    if cannot_change_user() {
        return;
    }
    let (place, _foreign_folders) = (TestFolder::new(), ForeignFolders::new());
    let mut command = as_user(&place);
    let program = place.path("pagemill");
    let script = format!("{0} meminfo $$ > /dev/null && {0} meminfo && exit 7", program.display());
    command.args(["run", "--limit", "300M", "--report", "--", "sh", "-c", &script]);
    let end = finish(command, TIMEOUT);
    assert_eq!(end.code(), 7, "{}", end.err);
    assert!(end.err.contains("limit") && end.out.contains("sh"), "{}{}", end.out, end.err);
    assert_eq!(own_folders(), Vec::<PathBuf>::new());
}

/// A `pagemill run` is killed. The next command must remove the files that it left.
#[test]
fn files_of_a_killed_run_are_removed() {
    if cannot_change_user() {
        return;
    }
    let (place, _foreign_folders) = (TestFolder::new(), ForeignFolders::new());
    let mut command = as_user(&place);
    command.args(["run", "--limit", "300M", "--", "sh", "-c", "kill -s KILL $PPID; exec sleep 600"]);
    assert!(!finish(command, TIMEOUT).status.success());
    assert_eq!(own_folders().len(), 1);
    // The program is killed some time after `run`. Only then can its files be removed, so the command is repeated.
    while !own_folders().is_empty() {
        let mut command = as_user(&place);
        command.args(["run", "--", "true"]);
        finish(command, TIMEOUT).assert_success();
    }
}

/// `sudo -E` keeps the variable `XDG_RUNTIME_DIR` of the other user. Root must then write no file into the runtime
/// folder of that user.
#[test]
fn the_runtime_folder_of_another_user_is_not_used() {
    if cannot_change_user() {
        return;
    }
    let place = TestFolder::new();
    let runtime = place.path("runtime");
    chown(&runtime, Some(USER_ID), Some(USER_ID)).unwrap();
    let mut command = place.pagemill_run_shell(&["--limit", "300M", "--report"], "exit 6");
    command.env_remove("XDG_CACHE_HOME").env_remove("HOME");
    assert_eq!(finish(command, TIMEOUT).code(), 6);
    assert_eq!(fs::read_dir(&runtime).unwrap().count(), 0);
    // All processes of root share root's own folder, so it is removed only if it is empty.
    drop(fs::remove_dir("/dev/shm/pagemill-0"));
}
