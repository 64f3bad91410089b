//! Figures files: where processes publish their figures, and how other processes find and remove these files.
//!
//! A process of a `pagemill run` tree publishes into the tree's folder. Its file stays there after the process has
//! ended, until `run` has read its counters. Any other process publishes into the user's folder and removes its file at
//! exit. The file of a killed process is removed when another process lists the folder.
//!
//! A process that preloads the library and also uses this crate has two Pagemills, each with its own figures file. The
//! file of the library is in the tree's folder, the file of the crate in the user's. If both files are in the user's
//! folder, the second one has a different name (`.1` is appended).

mod reader;
mod survey;

pub use reader::{Reader, Reading};
pub use survey::TreeFolder;

use crate::reclaim::tree::{TreeAmounts, TreePage};
use crate::stats::{self, Snapshot};
use pagemill_sys::file::{self, Path};
use pagemill_sys::maps;
use pagemill_sys::process::{self, Identity};
use std::ffi::CStr;
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Environment variable that names the folder of a process tree.
pub const TREE_VARIABLE: &CStr = c"PAGEMILL_TREE";

/// Name of the file in a process tree's folder that holds the page that the tree's processes share.
pub const TREE_FILE: &str = "tree";

/// What a request file requests from a process. Each kind has its own part of the file's name.
///
/// Example: [`ListWriter`](crate::listing::ListWriter).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// List its volatile ranges.
    Ranges,
    /// List the memory use of its caches.
    Caches,
    /// List its slab caches.
    Slabs,
    /// Measure and return its figures.
    Figures,
    /// Give memory back, shrink slab caches, or change their settings.
    Command,
}

impl Subject {
    pub const ALL: [Self; 5] = [Self::Ranges, Self::Caches, Self::Slabs, Self::Figures, Self::Command];

    /// The part of a request file's name between the name of the process's figures file and the request number.
    const fn name_part(self) -> &'static str {
        match self {
            Self::Ranges => ".vranges-",
            Self::Caches => ".caches-",
            Self::Slabs => ".slabs-",
            Self::Figures => ".figures-",
            Self::Command => ".order-",
        }
    }
}

/// Age from which a request file is removed. A request takes some seconds, so the requester of an older file was
/// killed.
const MAX_REQUEST_AGE: Duration = Duration::from_secs(60);

/// The folder into which this process publishes.
enum PublishFolder {
    /// The folder of the process tree.
    Tree(Path),
    /// The user's folder for figures. `runtime` is the value of `XDG_RUNTIME_DIR`.
    User { runtime: Path },
}

/// The folder into which this process publishes; empty before [`set_publish_folder`].
static PUBLISH_FOLDER: OnceLock<PublishFolder> = OnceLock::new();

/// The [`publisher_key`] of the process that published its figures; 0 if none did. A fork child inherits its parent's
/// key.
static PUBLISHED_BY: AtomicU64 = AtomicU64::new(0);

/// Maximum number of instances of Pagemill in one process that publish into one folder. The preload library and a
/// program that links Pagemill have an instance each.
const MAX_INSTANCES: u32 = 4;

/// Index of this instance of Pagemill among those of the process that publish into the same folder.
static INSTANCE_INDEX: AtomicU32 = AtomicU32::new(0);

/// Sets the folder into which this process publishes: `tree`, or the user's folder if `tree` is empty.
///
/// Only the first call has an effect. `runtime` is the value of `XDG_RUNTIME_DIR`; the caller must read it while no
/// thread changes the environment.
pub fn set_publish_folder(tree: &str, runtime: &str) {
    let path = |text: &str| Path::format(format_args!("{text}")).unwrap_or_default();
    let _ = PUBLISH_FOLDER.set(match tree {
        "" => PublishFolder::User { runtime: path(runtime) },
        tree => PublishFolder::Tree(path(tree)),
    });
}

/// Returns the path of this process's figures file. Creates the folder of the file; returns `None` if that fails.
pub fn own_file() -> Option<Path> {
    own_file_of(process::own_identity(), INSTANCE_INDEX.load(Relaxed))
}

/// Returns the path of the figures file of the instance of Pagemill that has the index `copy` in this process.
fn own_file_of(identity: Identity, copy: u32) -> Option<Path> {
    let folder = match PUBLISH_FOLDER.get()? {
        PublishFolder::Tree(folder) => folder,
        PublishFolder::User { runtime } => &user_folder_below(runtime.as_str()).ok()?,
    };
    file_of_instance(folder.as_str(), identity, copy)
}

/// Returns the value of [`PUBLISHED_BY`] for a process: its id, and the low half of its start time.
fn publisher_key(identity: Identity) -> u64 {
    u64::from(identity.pid) << 32 | identity.start_ticks & u64::from(u32::MAX)
}

/// Publishes this process's figures, unless they are published already.
///
/// # Errors
///
/// The error of creating the file; `NotFound` without a folder; `AlreadyExists` if too many instances of Pagemill in
/// this process publish there. After an error the figures stay private.
pub fn publish() -> io::Result<()> {
    let identity = process::own_identity();
    if PUBLISHED_BY.load(Relaxed) == publisher_key(identity) {
        return Ok(());
    }
    for copy in 0..MAX_INSTANCES {
        let path = own_file_of(identity, copy).ok_or(io::ErrorKind::NotFound)?;
        // A file that exists but is not mapped is from before an `exec` of this process. It is reused.
        if !(file::exists(path.as_c_str()) && maps::has_mapped(path.as_str())) {
            stats::publish(path.as_c_str(), identity)?;
            INSTANCE_INDEX.store(copy, Relaxed);
            PUBLISHED_BY.store(publisher_key(identity), Relaxed);
            return Ok(());
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// Removes this process's figures file at exit. In a process tree the file stays, because `pagemill run` reads its
/// counters later.
pub fn remove_own_file() {
    // Most processes never publish: return before the system calls below.
    if PUBLISHED_BY.load(Relaxed) == 0 || !matches!(PUBLISH_FOLDER.get(), Some(PublishFolder::User { .. })) {
        return;
    }
    let identity = process::own_identity();
    if PUBLISHED_BY.load(Relaxed) == publisher_key(identity)
        && let Some(path) = own_file_of(identity, INSTANCE_INDEX.load(Relaxed))
    {
        file::remove(path.as_c_str());
    }
}

/// The user's folder for published figures, created if missing: below `XDG_RUNTIME_DIR`, else `/dev/shm`, else `/tmp`.
///
/// # Errors
///
/// The error of creating the folder; `InvalidInput` for a path that is too long.
pub fn user_folder() -> io::Result<Path> {
    let runtime = file::environment(c"XDG_RUNTIME_DIR").and_then(|path| path.to_str().ok());
    user_folder_below(runtime.unwrap_or_default())
}

/// As [`user_folder`], for callers that have read `XDG_RUNTIME_DIR` already.
fn user_folder_below(runtime: &str) -> io::Result<Path> {
    let mut result = Err(io::Error::from(io::ErrorKind::InvalidInput));
    for path in candidate_folders(runtime, process::user_id()) {
        result = file::make_private_dir(path.as_c_str()).map(|()| path);
        if result.is_ok() {
            break;
        }
    }
    result
}

/// Folders in which every user may create folders.
const SHARED_FOLDERS: [&str; 2] = ["/dev/shm", "/tmp"];

/// Returns the possible paths of a user's folder for figures, best first. With `sudo -E`, `XDG_RUNTIME_DIR` may name
/// the folder of a user other than `user`. Such a path is left out, because that other user could not remove the files.
fn candidate_folders(runtime: &str, user: u32) -> impl Iterator<Item = Path> {
    let is_own = |path: &Path| file::owner(path.as_c_str()) == Some(user);
    let runtime = Path::format(format_args!("{runtime}")).filter(|path| path.as_str().starts_with('/') && is_own(path));
    let below_runtime = runtime.map(|path| Path::format(format_args!("{}/pagemill", path.as_str())));
    let others = SHARED_FOLDERS.map(|folder| Path::format(format_args!("{folder}/pagemill-{user}")));
    below_runtime.into_iter().chain(others).flatten()
}

/// Returns the existing folders for figures that only `user` can access: those of [`candidate_folders`], and folders
/// with random names, which [`make_tree_folder`] creates where another user has occupied the usual names.
fn existing_private_folders(runtime: &str, user: u32) -> Vec<String> {
    let prefix = format!("pagemill-{user}-");
    let mut found: Vec<String> = candidate_folders(runtime, user).map(|path| path.as_str().to_owned()).collect();
    for folder in SHARED_FOLDERS {
        let names = names_in(folder).filter(|name| name.starts_with(&prefix));
        found.extend(names.map(|name| format!("{folder}/{name}")));
    }
    found.retain(|path| is_private(path, user));
    found
}

/// Returns this user's folders for figures, without folders that others can access.
fn own_private_folders() -> Vec<String> {
    existing_private_folders(&runtime_folder(), process::user_id())
}

/// Returns this user's folder for files of running programs, by `XDG_RUNTIME_DIR` or its usual name. A service has no
/// such variable, but sees the processes of its user's sessions.
fn runtime_folder() -> String {
    std::env::var("XDG_RUNTIME_DIR").unwrap_or_else(|_| format!("/run/user/{}", process::user_id()))
}

/// Returns the names in a folder; none if it cannot be read.
fn names_in(folder: &str) -> impl Iterator<Item = String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok())
}

/// Whether `path` is a folder that only `user` can access.
fn is_private(path: &str, user: u32) -> bool {
    Path::format(format_args!("{path}")).is_some_and(|path| file::is_private_dir(path.as_c_str(), user))
}

/// Path of the figures file of one process in a folder.
pub fn file_of(folder: &str, identity: Identity) -> Option<Path> {
    Path::format(format_args!("{folder}/{}-{}", identity.pid, identity.start_ticks))
}

/// As [`file_of`], for the instance of Pagemill that has the index `copy` in the process.
fn file_of_instance(folder: &str, identity: Identity, copy: u32) -> Option<Path> {
    match copy {
        0 => file_of(folder, identity),
        copy => Path::format(format_args!("{folder}/{}-{}.{copy}", identity.pid, identity.start_ticks)),
    }
}

/// Returns the process that published the figures file with this name; `None` if no figures file can have this name.
fn identity_of(name: &str) -> Option<Identity> {
    let (name, copy) = name.split_once('.').unwrap_or((name, "0"));
    copy.parse::<u32>().ok().filter(|copy| *copy < MAX_INSTANCES)?;
    let (pid, start_ticks) = name.split_once('-')?;
    Some(Identity { pid: pid.parse().ok()?, start_ticks: start_ticks.parse().ok()? })
}

/// Returns the path of the file of a request to the process that publishes its figures at the path `figures`.
pub(crate) fn request_file(figures: &str, subject: Subject, number: u32) -> Option<Path> {
    Path::format(format_args!("{figures}{}{number}", subject.name_part()))
}

/// Returns the process to which the request file with this name is addressed; `None` if no request file can have this
/// name.
fn request_target(name: &str) -> Option<Identity> {
    let (identity, number) = Subject::ALL.iter().find_map(|subject| name.rsplit_once(subject.name_part()))?;
    number.parse::<u32>().ok().and(identity_of(identity))
}

/// Removes request files of processes that have ended, and request files older than [`MAX_REQUEST_AGE`].
fn sweep_requests(folder: &str) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.filter_map(Result::ok) {
        let Some(identity) = entry.file_name().to_str().and_then(request_target) else { continue };
        let age = || entry.metadata().ok()?.modified().ok()?.elapsed().ok();
        if !process::is_alive(identity) || age().is_some_and(|age| age > MAX_REQUEST_AGE) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// A process and the figures that it published.
///
/// ```
/// use pagemill_testbed::Testbed;
/// use pagemill_core::published;
///
/// Testbed::of_process()?;
/// let folder = published::user_folder().unwrap();
/// let processes = published::list(folder.as_str(), false).unwrap();
/// for process in processes.iter().filter(|process| process.is_alive) {
///     println!("{} {}", process.identity.pid, process.snapshot.name());
/// }
/// # Ok::<(), pagemill_core::Error>(())
/// ```
pub struct Published {
    pub path: Path,
    pub identity: Identity,
    pub is_alive: bool,
    pub snapshot: Snapshot,
}

/// Reads all figures files in a folder. With `remove_ended`, removes the files of ended processes after reading them.
///
/// Allocates from the global allocator, so `malloc` must not call this.
///
/// # Errors
///
/// The error of reading the folder. Files that are not valid figures files are skipped.
pub fn list(folder: &str, remove_ended: bool) -> io::Result<Vec<Published>> {
    list_owned_by(folder, None, remove_ended)
}

/// As [`list`], but only files that `owner` owns.
fn list_owned_by(folder: &str, owner: Option<u32>, remove_ended: bool) -> io::Result<Vec<Published>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let Ok(name) = entry?.file_name().into_string() else { continue };
        let Some(identity) = identity_of(&name) else { continue };
        let Some(path) = Path::format(format_args!("{folder}/{name}")) else { continue };
        // Tested before reading: if the process has ended by now, the figures read below are its last ones.
        let is_alive = process::is_alive(identity);
        let snapshot = stats::read_of(path.as_c_str(), owner);
        if !is_alive && remove_ended {
            file::remove(path.as_c_str());
        }
        if let Ok(snapshot) = snapshot {
            found.push(Published { path, identity, is_alive, snapshot });
        }
    }
    Ok(found)
}

/// Reads the figures files of the running processes in a folder. With `owner`, reads only files that this user owns.
fn list_running(folder: &str, owner: Option<u32>) -> impl Iterator<Item = Published> + use<> {
    list_owned_by(folder, owner, false).into_iter().flatten().filter(|process| process.is_alive)
}

/// Finds the published figures of a running process, in this user's folder or in the folder of a process tree below it.
pub fn find(pid: u32) -> Option<(Path, Snapshot)> {
    find_all(pid).into_iter().next()
}

/// Finds all published figures of a running process of this user: first those of the preload library, then those of
/// other instances of Pagemill in the process. Requests can be sent to such a process.
pub fn find_all(pid: u32) -> Vec<(Path, Snapshot)> {
    process::identity(pid).map_or_else(Vec::new, |identity| find_in_folders(identity, &own_folders(), None))
}

/// Reads the figures of a process from `folders`. With `owner`, reads only files that this user owns.
fn find_in_folders(identity: Identity, folders: &[String], owner: Option<u32>) -> Vec<(Path, Snapshot)> {
    let copies = |folder| (0..MAX_INSTANCES).filter_map(move |copy| file_of_instance(folder, identity, copy));
    let paths = folders.iter().flat_map(|folder| copies(folder));
    let read =
        |path: &Path| stats::read_of(path.as_c_str(), owner).ok().filter(|snapshot| snapshot.identity == identity);
    paths.filter_map(|path| Some((read(&path)?, path))).map(|(snapshot, path)| (path, snapshot)).collect()
}

/// Returns the folders of the process trees below a folder, then the folder itself.
fn with_tree_folders(folder: String) -> Vec<String> {
    let mut folders: Vec<_> = tree_folders(&folder).into_iter().map(|(path, _)| path).collect();
    folders.push(folder);
    folders
}

/// Reads the published figures of all running processes of this user.
pub fn running() -> Vec<Snapshot> {
    own_folders().iter().flat_map(|folder| list_running(folder, None)).map(|process| process.snapshot).collect()
}

/// Returns the folders in which this user's processes publish, including the folders of process trees.
fn own_folders() -> Vec<String> {
    own_private_folders().into_iter().flat_map(with_tree_folders).collect()
}

/// A running process, with the figures of each instance of Pagemill in the process. The figures of the preload library,
/// if any, are the first.
///
/// ```
/// use pagemill_testbed::Testbed;
/// use pagemill_core::published;
/// use pagemill_core::stats::Counter;
///
/// Testbed::of_process()?;
/// let process = published::read(std::process::id()).expect("this process publishes");
/// let (_file, figures) = &process.found[0];
/// assert!(process.is_own() && figures.get(Counter::Resident) < 1 << 40);
/// # Ok::<(), pagemill_core::Error>(())
/// ```
#[derive(Clone)]
pub struct Process {
    pub identity: Identity,
    /// The user that publishes the figures. Root reads other users' figures but sends them no requests.
    pub user: u32,
    pub found: Vec<(Path, Snapshot)>,
}

impl Process {
    /// Returns the user that must own the figures files of this process; `None` for a process of this user, whose
    /// folder is private. Root checks the owner when it reads files in another user's folder.
    pub fn owner(&self) -> Option<u32> {
        (!self.is_own()).then_some(self.user)
    }

    /// Whether the process belongs to this user, so that it answers this user's requests.
    pub fn is_own(&self) -> bool {
        self.user == process::user_id()
    }
}

/// Reads the published figures of a process, if this user may read them. Root may read those of all users' processes.
pub fn read(pid: u32) -> Option<Process> {
    let identity = process::identity(pid)?;
    let (own, user) = (process::user_id(), user_of(pid)?);
    let found = match user == own {
        true => find_all(pid),
        false if own == 0 => find_in_folders(identity, &folders_of(user), Some(user)),
        false => Vec::new(),
    };
    // A process that root started for another user publishes as root.
    let (found, user) = if found.is_empty() && own == 0 { (find_all(pid), own) } else { (found, user) };
    (!found.is_empty()).then_some(Process { identity, user, found })
}

/// Reads the published figures of all running processes that this user may read, in the order of the process ids.
pub fn read_all() -> Vec<Process> {
    Reader::default().read().into_iter().filter_map(|reading| reading.process).collect()
}

/// Reads the published figures of the processes with these ids, each process once.
fn read_pids(mut pids: Vec<u32>) -> Vec<Process> {
    pids.sort_unstable();
    pids.dedup();
    pids.into_iter().filter_map(read).collect()
}

/// Reads the published figures of the processes of a tree, whose `pagemill run` has the process id `run`. Returns
/// `None` if there is no such tree.
pub fn read_tree(run: u32) -> Option<Vec<Process>> {
    let (identity, user) = (process::identity(run)?, user_of(run)?);
    let own = process::user_id();
    let (folders, owner) = if user == own { (own_folders(), None) } else { (folders_of(user), Some(user)) };
    let name = format!("/run-{}-{}", identity.pid, identity.start_ticks);
    let folder = folders.into_iter().find(|folder| folder.ends_with(&name))?;
    let members = list_owned_by(&folder, owner, false).ok()?;
    Some(read_pids(members.iter().filter(|member| member.is_alive).map(|member| member.identity.pid).collect()))
}

/// Returns the folders of all process trees that this user may read. Some of the trees may have ended.
pub fn all_trees() -> Vec<TreeFolder> {
    survey::Survey::of_all_users().trees
}

/// Reads the amounts of process trees, in the order of the process ids of `pagemill run`. Leaves out trees of a
/// `pagemill run` that has ended.
pub fn read_trees(folders: &[TreeFolder]) -> Vec<(Identity, TreeAmounts)> {
    let own = process::user_id();
    let read = |folder: &TreeFolder| -> Option<(Identity, TreeAmounts)> {
        let run = Some(folder.run).filter(|run| process::is_alive(*run))?;
        let page = Path::format(format_args!("{}/{TREE_FILE}", folder.path))?;
        let owner = (folder.user != own).then_some(folder.user);
        Some((run, TreePage::read_amounts(page.as_c_str(), owner).ok()?))
    };
    let mut trees: Vec<_> = folders.iter().filter_map(read).collect();
    trees.sort_by_key(|(run, _)| run.pid);
    trees
}

/// Returns the folders into which another user's processes publish, without folders that others can access.
fn folders_of(user: u32) -> Vec<String> {
    let folders = existing_private_folders(&format!("/run/user/{user}"), user).into_iter().flat_map(with_tree_folders);
    folders.filter(|folder| is_private(folder, user)).collect()
}

/// Explains, for an error message, why [`find_all`] finds no process to which a request can be sent.
pub fn missing(pid: u32) -> String {
    if process::has_proc() && process::identity(pid).is_none() {
        return format!("there is no process {pid}");
    }
    if let Some(user) = user_of(pid).filter(|user| *user != process::user_id()) {
        return format!(
            "process {pid} is another user's: it answers user {user} only; root can send requests as that user \
             (setpriv --reuid={user})"
        );
    }
    explain_no_figures(pid)
}

/// Explains, for an error message, why [`read`] finds no figures of a process.
pub fn unreadable(pid: u32) -> String {
    let own = process::user_id();
    match user_of(pid).filter(|user| *user != own && own != 0) {
        Some(user) => format!("process {pid} is another user's: only user {user} and root can read its figures"),
        None if process::has_proc() && process::identity(pid).is_none() => format!("there is no process {pid}"),
        None => explain_no_figures(pid),
    }
}

/// Explains why a running process has no figures file.
fn explain_no_figures(pid: u32) -> String {
    format!(
        "process {pid} publishes no figures: it runs without Pagemill, with another version of it, is a fork child \
         that has not used it itself, or is so small that the C library serves it (run --after)"
    )
}

/// Returns the effective user of a process.
fn user_of(pid: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    // The line lists the real user first and the effective user second.
    users.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// Returns the folders of process trees below `folder`, each with the identity of the tree's `pagemill run`.
fn tree_folders(folder: &str) -> Vec<(String, Identity)> {
    names_in(folder)
        .filter_map(|name| Some((format!("{folder}/{name}"), identity_of(name.strip_prefix("run-")?)?)))
        .collect()
}

/// Removes the files of killed processes from this user's folder, and the folders of process trees of which all
/// processes have ended.
pub fn sweep() {
    match user_folder() {
        Ok(folder) => sweep_folder(folder.as_str()),
        // Another user occupies the usual names. Folders of trees under random names may exist nevertheless.
        Err(_) => existing_private_folders("", process::user_id()).iter().for_each(|folder| sweep_folder(folder)),
    }
}

/// As [`sweep`], for one folder.
fn sweep_folder(folder: &str) {
    // The usual case, an empty folder, must be fast, because frequently run commands call this.
    if std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_none()) {
        remove_random_folder(folder);
        return;
    }
    for (path, identity) in tree_folders(folder) {
        if !process::is_alive(identity) && list_running(&path, None).next().is_none() {
            let _ = std::fs::remove_dir_all(&path);
        }
        sweep_requests(&path);
    }
    sweep_requests(folder);
    let _ = list(folder, true);
    remove_random_folder(folder);
}

/// Creates the folder of a new process tree, whose `pagemill run` is this process. Returns the path of the folder.
///
/// # Errors
///
/// The error of creating the folder.
pub fn make_tree_folder() -> io::Result<String> {
    let make_random_folder = |error| {
        let name = format!("pagemill-{}-{:016x}", process::user_id(), process::random_u64());
        let paths = SHARED_FOLDERS.iter().filter_map(|folder| Path::format(format_args!("{folder}/{name}")));
        paths.into_iter().find(|path| file::make_private_dir(path.as_c_str()).is_ok()).ok_or(error)
    };
    let (user, identity) = (user_folder().or_else(make_random_folder)?, process::own_identity());
    let path = Path::format(format_args!("{}/run-{}-{}", user.as_str(), identity.pid, identity.start_ticks))
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    file::make_private_dir(path.as_c_str())?;
    Ok(path.as_str().to_owned())
}

/// Removes the folder of a process tree, and its parent folder if [`make_tree_folder`] created the parent folder for
/// this tree only.
pub fn remove_tree_folder(folder: &str) {
    let _ = std::fs::remove_dir_all(folder);
    if let Some((parent, _)) = folder.rsplit_once('/') {
        remove_random_folder(parent);
    }
}

/// Removes an empty folder that [`make_tree_folder`] created under a random name.
fn remove_random_folder(folder: &str) {
    if SHARED_FOLDERS.iter().any(|shared| folder.starts_with(&format!("{shared}/pagemill-{}-", process::user_id()))) {
        let _ = std::fs::remove_dir(folder);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// A folder has three figures files of an ended process, one of which has an invalid index, and an unrelated file.
    /// The first listing must return and remove the two valid figures files. The other two files must stay.
    #[test]
    fn listing_removes_files_of_ended_processes() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().to_str().unwrap();
        let gone = Identity { pid: 1 << 30, start_ticks: 1 };
        let mut page = vec![0u8; stats::Figures::LEN];
        page[..8].copy_from_slice(b"pagemill");
        page[8..12].copy_from_slice(&stats::VERSION.to_le_bytes());
        std::fs::write(file_of(folder, gone).unwrap().as_str(), page).unwrap();
        let copy = |number| file_of_instance(folder, gone, number).unwrap();
        for number in [1, MAX_INSTANCES] {
            std::fs::copy(copy(0).as_str(), copy(number).as_str()).unwrap();
        }
        std::fs::write(format!("{folder}/other"), b"x").unwrap();
        let found = list(folder, true).unwrap();
        assert_eq!(found.len(), 2);
        assert!(found.iter().all(|process| !process.is_alive && process.identity == gone));
        assert_eq!(list(folder, true).unwrap().len(), 0);
        assert!(
            std::fs::exists(format!("{folder}/other")).unwrap()
                && std::fs::exists(copy(MAX_INSTANCES).as_str()).unwrap()
        );
    }

    /// A folder has a request file of an ended process, an old and a new request file of this process, and an unrelated
    /// file. Sweeping must remove the file of the ended process and the old file only.
    #[test]
    fn old_requests_are_swept() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().to_str().unwrap();
        let make = |identity, number| {
            let subject = Subject::ALL[number as usize % Subject::ALL.len()];
            let path = request_file(file_of(folder, identity).unwrap().as_str(), subject, number).unwrap();
            (std::fs::File::create(path.as_str()).unwrap(), path)
        };
        let own = process::own_identity();
        let (_, gone) = make(Identity { pid: 1 << 30, start_ticks: 1 }, 1);
        let ((old_file, old), (_, new)) = (make(own, 1), make(own, 2));
        old_file.set_modified(std::time::SystemTime::now() - 2 * MAX_REQUEST_AGE).unwrap();
        for subject in Subject::ALL {
            let name = format!("5-6.1{}7", subject.name_part());
            assert_eq!(request_target(&name), Some(Identity { pid: 5, start_ticks: 6 }), "{name}");
        }
        let foreign = format!("{folder}/1-1.vranges-x");
        std::fs::write(&foreign, b"").unwrap();
        sweep_requests(folder);
        let left = [gone.as_str(), old.as_str(), new.as_str(), &foreign].map(|path| std::fs::exists(path).unwrap());
        assert_eq!(left, [false, false, true, true]);
    }
}
