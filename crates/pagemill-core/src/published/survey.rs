//! Finds the figures files and the process trees of all users that this user may read. The names of the files suffice;
//! no figures are read.

use super::{
    MAX_INSTANCES, SHARED_FOLDERS, candidate_folders, identity_of, is_private, names_in, own_private_folders,
    runtime_folder, user_of,
};
use pagemill_sys::file::{self, Path};
use pagemill_sys::process::{self, Identity};
use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

/// The figures files of one process.
pub(super) struct ProcessFiles {
    pub identity: Identity,
    /// The owner of the folder with the files.
    pub user: u32,
    /// The `pagemill run` that started the tree of the process.
    pub run: Option<Identity>,
    /// The file of the preload library comes first.
    pub paths: Vec<Path>,
}

/// The folder of a process tree.
///
/// Example: [`Reader`](super::Reader).
#[derive(Clone)]
pub struct TreeFolder {
    pub path: String,
    /// The `pagemill run` of the tree.
    pub run: Identity,
    /// The owner of the folder.
    pub user: u32,
}

/// All figures files and process trees that this user may read: for root those of all users. Some of the processes may
/// have ended.
#[derive(Default)]
pub(super) struct Survey {
    /// In the order of the process ids. The files of a process's own user come before those that the process published
    /// as root.
    pub processes: Vec<ProcessFiles>,
    pub trees: Vec<TreeFolder>,
    /// The folders that were listed, or that would have been, each with the time of its latest change before that.
    folders: Vec<(String, Option<SystemTime>)>,
    taken: Option<SystemTime>,
}

/// Age from which a change of a folder is older than any later one. File systems record changes with the precision of
/// the kernel's tick, at most 10 ms.
const DISTINCT_CHANGE_AGE: Duration = Duration::from_millis(20);

/// Maximum number of figures files of one process: one for each instance in the folder of a tree and in that of the
/// user. A user may create more, under names such as `007-5`.
const MAX_FILES_OF_PROCESS: usize = 2 * MAX_INSTANCES as usize;

/// Maximum number of files of another user that are looked at. A user may create any number of them.
const MAX_NAMES: usize = 10_000;

impl Survey {
    /// Lists the folders of this user and, as root, those of the other users. Takes some 10 us for each process tree.
    pub fn of_all_users() -> Self {
        let (own, taken) = (process::user_id(), Some(SystemTime::now()));
        // A folder of this user that does not exist yet may be created later.
        let mut watched: Vec<(String, Option<SystemTime>)> =
            candidate_folders(&runtime_folder(), own).map(|path| with_change_time(path.as_str().to_owned())).collect();
        let mut folders: Vec<(u32, String)> = own_private_folders().into_iter().map(|folder| (own, folder)).collect();
        if own == 0 {
            folders.extend(folders_of_other_users());
        }
        let (mut trees, mut found, mut names_left) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
        for (user, folder) in folders {
            let left = names_left.entry(user).or_insert(if user == own { usize::MAX } else { MAX_NAMES });
            watched.push(with_change_time(folder.clone()));
            let below = add_files(&mut found, &folder, user, None, left);
            for (path, run) in below.into_iter().filter(|(path, _)| user == own || is_private(path, user)) {
                watched.push(with_change_time(path.clone()));
                add_files(&mut found, &path, user, Some(run), left);
                trees.push(TreeFolder { path, run, user });
            }
        }
        let mut processes: Vec<ProcessFiles> = found.into_values().collect();
        processes.iter_mut().for_each(ProcessFiles::order_paths);
        processes.sort_by_key(|files| (files.identity, files.user == own));
        Self { processes, trees, folders: watched, taken }
    }

    /// Returns whether no file was created or removed in the listed folders since. New folders of other users are not
    /// noticed. Takes some 2 us for each process tree.
    pub fn is_current(&self) -> bool {
        let Some(taken) = self.taken else { return false };
        self.folders.iter().all(|(path, changed)| {
            // Two changes shortly after each other can have the same time.
            let is_distinct = changed.is_none_or(|changed| changed + DISTINCT_CHANGE_AGE < taken);
            is_distinct && change_time(path) == *changed
        })
    }
}

fn with_change_time(path: String) -> (String, Option<SystemTime>) {
    let changed = change_time(&path);
    (path, changed)
}

/// Returns the time at which a file was last created or removed in a folder; `None` if there is no such folder.
fn change_time(path: &str) -> Option<SystemTime> {
    std::fs::symlink_metadata(path).and_then(|metadata| metadata.modified()).ok()
}

fn depth(path: &Path) -> usize {
    path.as_bytes().iter().filter(|byte| **byte == b'/').count()
}

/// Adds the figures files in a folder to `found`, and subtracts the number of all names from `names_left`, which is
/// their maximum. Returns the folders of process trees below it.
fn add_files(
    found: &mut BTreeMap<(u32, u64, u32), ProcessFiles>,
    folder: &str,
    user: u32,
    run: Option<Identity>,
    names_left: &mut usize,
) -> Vec<(String, Identity)> {
    let mut trees = Vec::new();
    for name in names_in(folder).take(*names_left) {
        *names_left -= 1;
        let path = format!("{folder}/{name}");
        if let Some(run) = name.strip_prefix("run-").and_then(identity_of) {
            trees.push((path, run));
        } else if let (Some(identity), Some(path)) = (identity_of(&name), Path::format(format_args!("{path}"))) {
            let key = (identity.pid, identity.start_ticks, user);
            let files =
                found.entry(key).or_insert_with(|| ProcessFiles { identity, user, run: None, paths: Vec::new() });
            files.run = files.run.or(run);
            files.paths.push(path);
        }
    }
    trees
}

/// Returns the folders for figures of users other than this one, each with its user. Folders that other users can
/// access are left out.
fn folders_of_other_users() -> Vec<(u32, String)> {
    let of_runtime = names_in("/run/user").filter_map(|name| {
        let user = name.parse().ok()?;
        Some((user, format!("/run/user/{name}/pagemill")))
    });
    let of_shared = SHARED_FOLDERS.into_iter().flat_map(|shared| {
        names_in(shared).filter_map(move |name| {
            let (user, _) = name.strip_prefix("pagemill-")?.split_once('-').unwrap_or((&name["pagemill-".len()..], ""));
            Some((user.parse().ok()?, format!("{shared}/{name}")))
        })
    });
    let own = process::user_id();
    of_runtime.chain(of_shared).filter(|(user, path)| *user != own && is_private(path, *user)).collect()
}

impl ProcessFiles {
    /// Returns whether the files are really those of this process: a user could create files with the name of another
    /// user's process. For root, also files of root are accepted, because a process that root started for another user
    /// publishes as root.
    pub fn is_trusted(&self) -> bool {
        let (pid, own) = (self.identity.pid, process::user_id());
        if self.user == own && own == 0 {
            return true;
        }
        // The folder in `/proc` belongs to the effective user, or to root if the process may not be inspected.
        let folder = Path::format(format_args!("/proc/{pid}"));
        let is_owner = || folder.and_then(|folder| file::owner(folder.as_c_str())) == Some(self.user);
        (self.user != 0 && is_owner()) || user_of(pid) == Some(self.user)
    }
}

impl ProcessFiles {
    /// Sorts the paths, and removes those above [`MAX_FILES_OF_PROCESS`].
    fn order_paths(&mut self) {
        // The preload library publishes in the folder of the tree, other instances in that of the user.
        self.paths.sort_by(|one, other| (depth(other), one.as_str()).cmp(&(depth(one), other.as_str())));
        self.paths.truncate(MAX_FILES_OF_PROCESS);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// A user creates files under many names for one process. Only a few of them must be kept.
    #[test]
    fn the_number_of_files_of_a_process_is_limited() {
        let folder = tempfile::tempdir().unwrap();
        let names = ["7-5".to_owned()].into_iter().chain((1..30).map(|zeros| format!("{}7-5", "0".repeat(zeros))));
        names.for_each(|name| std::fs::write(folder.path().join(name), b"").unwrap());
        let (mut found, mut left) = (BTreeMap::new(), usize::MAX);
        add_files(&mut found, folder.path().to_str().unwrap(), 1, None, &mut left);
        let mut files = found.into_values().next().unwrap();
        assert_eq!(files.paths.len(), 30);
        files.order_paths();
        assert_eq!(files.paths.len(), MAX_FILES_OF_PROCESS);
    }

    /// Many files of one user must not make another user's survey large.
    #[test]
    fn the_number_of_files_is_limited() {
        let folder = tempfile::tempdir().unwrap();
        (1..=30).for_each(|pid| std::fs::write(folder.path().join(format!("{pid}-1")), b"").unwrap());
        let (mut found, mut left, path) = (BTreeMap::new(), 20, folder.path().to_str().unwrap());
        add_files(&mut found, path, 1, None, &mut left);
        add_files(&mut found, path, 2, None, &mut left);
        assert_eq!((found.len(), left), (20, 0));
    }

    /// A survey of a folder is current until a file in it is created or removed, or the folder appears.
    #[test]
    fn a_survey_is_current_until_a_folder_changes() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("folder");
        let survey_at = |taken: SystemTime| {
            let folders = vec![with_change_time(folder.to_str().unwrap().to_owned())];
            Survey { folders, taken: Some(taken), ..Survey::default() }
        };
        let later = SystemTime::now() + Duration::from_secs(60);
        let missing = survey_at(later);
        assert!(missing.is_current() && !Survey::default().is_current());
        std::fs::create_dir(&folder).unwrap();
        assert!(!missing.is_current());
        let survey = survey_at(later);
        assert!(survey.is_current());
        assert!(!survey_at(SystemTime::now() - Duration::from_secs(1)).is_current(), "it may have changed since");
        let file = std::fs::File::open(&folder).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(9)).unwrap();
        assert!(!survey.is_current());
        let survey = survey_at(later);
        std::fs::write(folder.join("1-2"), b"").unwrap();
        assert!(!survey.is_current());
    }
}
