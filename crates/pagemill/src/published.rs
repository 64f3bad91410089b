//! Where processes publish their figures, and how others find and sweep them.
//!
//! A process of a `pagemill run` tree publishes into the tree's folder, where
//! the file stays after its end until `run` has counted it; any other into the
//! user's folder, where it removes it at exit. Files of processes that were
//! killed are removed by whoever lists the folder.
//!
//! A process that is preloaded and uses this crate as well has two Pagemills, each with figures of its own: the preload's
//! lie in the tree's folder, the crate's in the user's. Where both lie in the user's the second file has another name.

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

/// Name of the shared page in a tree's folder.
pub const TREE_FILE: &str = "tree";

/// What one may ask of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Subject {
    /// A list of its volatile ranges.
    Ranges,
    /// A list of what its caches hold.
    Caches,
    /// A list of its slab caches.
    Slabs,
    /// That it shrinks slab caches, or changes how they are.
    SlabOrder,
}

impl Subject {
    pub const ALL: [Self; 4] = [Self::Ranges, Self::Caches, Self::Slabs, Self::SlabOrder];

    /// In the name of a file between a process's own and the number of a request.
    const fn word(self) -> &'static str {
        match self {
            Self::Ranges => ".vranges-",
            Self::Caches => ".caches-",
            Self::Slabs => ".slabs-",
            Self::SlabOrder => ".slab-order-",
        }
    }
}

/// A request takes some seconds at the most; what is older was left behind.
const REQUEST_ENDED_AFTER: Duration = Duration::from_secs(60);

/// Where this process publishes.
enum Home {
    /// The folder of its tree.
    Tree(Path),
    /// The user's folder; the value of `XDG_RUNTIME_DIR` that it is found by.
    User { runtime: Path },
}

static HOME: OnceLock<Home> = OnceLock::new();

/// Which process has published here: not its children.
static PUBLISHED_BY: AtomicU64 = AtomicU64::new(0);

/// Pagemills of one process that can publish into one folder.
const MOST_COPIES: u32 = 4;

/// Which of them this one is.
static COPY: AtomicU32 = AtomicU32::new(0);

/// Sets where this process publishes, for good: in the folder of its tree, or in the user's if that is empty. `runtime` is the
/// value of `XDG_RUNTIME_DIR`, read when nobody was changing the environment.
pub fn set_home(tree: &str, runtime: &str) {
    let path = |text: &str| Path::format(format_args!("{text}")).unwrap_or_default();
    let _ = HOME.set(match tree {
        "" => Home::User { runtime: path(runtime) },
        tree => Home::Tree(path(tree)),
    });
}

/// The file of this process's figures; `None` where there is no folder for it. Makes the folder.
pub fn own_file() -> Option<Path> {
    own_file_of(process::own_identity(), COPY.load(Relaxed))
}

fn own_file_of(who: Identity, copy: u32) -> Option<Path> {
    match HOME.get()? {
        Home::Tree(folder) => file_of_copy(folder.as_str(), who, copy),
        Home::User { runtime } => file_of_copy(user_folder_below(runtime.as_str()).ok()?.as_str(), who, copy),
    }
}

/// What [`PUBLISHED_BY`] says of a process.
fn mark_of(who: Identity) -> u64 {
    u64::from(who.pid) << 32 | who.start_ticks & u64::from(u32::MAX)
}

/// Publishes this process's figures, unless that is done.
///
/// # Errors
///
/// What making the file says; `NotFound` without a folder; `AlreadyExists` if too many Pagemills of this process publish there.
/// The figures stay private then.
pub fn publish() -> io::Result<()> {
    let who = process::own_identity();
    if PUBLISHED_BY.load(Relaxed) == mark_of(who) {
        return Ok(());
    }
    for copy in 0..MOST_COPIES {
        let path = own_file_of(who, copy).ok_or(io::ErrorKind::NotFound)?;
        // What is there but not mapped is of this process's life before an `exec`, and taken over.
        if !(file::exists(path.as_c_str()) && maps::has_mapped(path.as_str())) {
            stats::publish(path.as_c_str(), who)?;
            COPY.store(copy, Relaxed);
            PUBLISHED_BY.store(mark_of(who), Relaxed);
            return Ok(());
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// Removes what this process published, at its end; in a tree it stays for `run` to count.
pub fn withdraw() {
    let who = process::own_identity();
    if matches!(HOME.get(), Some(Home::User { .. }))
        && PUBLISHED_BY.load(Relaxed) == mark_of(who)
        && let Some(path) = own_file_of(who, COPY.load(Relaxed))
    {
        file::remove(path.as_c_str());
    }
}

/// The user's folder for published figures, made if need be: below `XDG_RUNTIME_DIR`, else `/dev/shm`, else `/tmp`.
///
/// # Errors
///
/// What making the folder says; `InvalidInput` for a path that is too long.
pub fn user_folder() -> io::Result<Path> {
    let runtime = file::environment(c"XDG_RUNTIME_DIR").and_then(|path| path.to_str().ok());
    user_folder_below(runtime.unwrap_or_default())
}

/// As [`user_folder`], for who has read `XDG_RUNTIME_DIR` before.
///
/// # Errors
///
/// As [`user_folder`].
pub fn user_folder_below(runtime: &str) -> io::Result<Path> {
    let mut result = Err(io::Error::from(io::ErrorKind::InvalidInput));
    for path in candidates(runtime) {
        result = file::make_private_dir(path.as_c_str()).map(|()| path);
        if result.is_ok() {
            break;
        }
    }
    result
}

/// Where the user's folder may lie, best first.
fn candidates(runtime: &str) -> impl Iterator<Item = Path> {
    let below_runtime = runtime.starts_with('/').then(|| Path::format(format_args!("{runtime}/pagemill")));
    let user = process::user_id();
    let others = ["/dev/shm", "/tmp"].map(|folder| Path::format(format_args!("{folder}/pagemill-{user}")));
    below_runtime.into_iter().chain(others).flatten()
}

/// The file of one process in a folder.
pub fn file_of(folder: &str, who: Identity) -> Option<Path> {
    Path::format(format_args!("{folder}/{}-{}", who.pid, who.start_ticks))
}

/// As [`file_of`], of a process's other Pagemills.
fn file_of_copy(folder: &str, who: Identity, copy: u32) -> Option<Path> {
    match copy {
        0 => file_of(folder, who),
        copy => Path::format(format_args!("{folder}/{}-{}.{copy}", who.pid, who.start_ticks)),
    }
}

/// The identity that a file's name tells, if it is one of ours.
fn identity_of(name: &str) -> Option<Identity> {
    let (name, copy) = name.split_once('.').unwrap_or((name, "0"));
    copy.parse::<u32>().ok().filter(|copy| *copy < MOST_COPIES)?;
    let (pid, start_ticks) = name.split_once('-')?;
    Some(Identity { pid: pid.parse().ok()?, start_ticks: start_ticks.parse().ok()? })
}

/// The file by which somebody asks the process whose figures are `figures` for a list.
pub(crate) fn request_of(figures: &str, subject: Subject, number: u32) -> Option<Path> {
    Path::format(format_args!("{figures}{}{number}", subject.word()))
}

/// The process that is asked by a file of this name.
fn asked_of(name: &str) -> Option<Identity> {
    let (who, number) = Subject::ALL.iter().find_map(|subject| name.rsplit_once(subject.word()))?;
    number.parse::<u32>().ok().and(identity_of(who))
}

/// Removes requests whose process has ended, or that nobody waits for any more.
fn sweep_requests(folder: &str) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.filter_map(Result::ok) {
        let Some(who) = entry.file_name().to_str().and_then(asked_of) else { continue };
        let age = || entry.metadata().ok()?.modified().ok()?.elapsed().ok();
        if !process::is_alive(who) || age().is_some_and(|age| age > REQUEST_ENDED_AFTER) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// A published process.
pub struct Published {
    pub who: Identity,
    pub is_alive: bool,
    pub snapshot: Snapshot,
}

/// The figures in a folder. Those of ended processes are removed once read if `remove_ended`.
///
/// For commands, not for `malloc`: it allocates.
///
/// # Errors
///
/// What reading the folder says. Files that are no figures are passed over.
pub fn list(folder: &str, remove_ended: bool) -> io::Result<Vec<Published>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let Ok(name) = entry?.file_name().into_string() else { continue };
        let Some(who) = identity_of(&name) else { continue };
        let Some(path) = Path::format(format_args!("{folder}/{name}")) else { continue };
        // Asked before reading: a process found dead does not change its figures any more.
        let is_alive = process::is_alive(who);
        if let Ok(snapshot) = stats::read(path.as_c_str()) {
            found.push(Published { who, is_alive, snapshot });
        }
        if !is_alive && remove_ended {
            file::remove(path.as_c_str());
        }
    }
    Ok(found)
}

/// The published figures of a running process, in the user's folder or a tree below it.
pub fn find(pid: u32) -> Option<(Path, Snapshot)> {
    find_all(pid).into_iter().next()
}

/// All published figures of a running process, one for each Pagemill in it: that of the preload first.
pub fn find_all(pid: u32) -> Vec<(Path, Snapshot)> {
    let (Some(who), Ok(folder)) = (process::identity(pid), user_folder()) else { return Vec::new() };
    let mut folders: Vec<_> = tree_folders(folder.as_str()).into_iter().map(|(path, _)| path).collect();
    folders.push(folder.as_str().to_owned());
    let copies = |folder| (0..MOST_COPIES).filter_map(move |copy| file_of_copy(folder, who, copy));
    let paths = folders.iter().flat_map(|folder| copies(folder));
    paths.filter_map(|path| Some((stats::read(path.as_c_str()).ok()?, path))).map(|(read, path)| (path, read)).collect()
}

/// The published figures of all running processes of this user.
pub fn running() -> Vec<Snapshot> {
    let runtime = std::env::var("XDG_RUNTIME_DIR").unwrap_or_default();
    let mut folders: Vec<_> = candidates(&runtime).map(|path| path.as_str().to_owned()).collect();
    let trees: Vec<_> = folders.iter().flat_map(|folder| tree_folders(folder)).map(|(path, _)| path).collect();
    folders.extend(trees);
    let found = folders.iter().filter_map(|folder| list(folder, false).ok()).flatten();
    found.filter(|process| process.is_alive).map(|process| process.snapshot).collect()
}

/// Why [`find`] finds nothing, as far as can be said.
pub fn missing(pid: u32) -> String {
    if process::has_proc() && process::identity(pid).is_none() {
        return format!("there is no process {pid}");
    }
    if let Some(user) = user_of(pid).filter(|user| *user != process::user_id()) {
        return format!(
            "process {pid} is another user's: it answers user {user} only, as whom root can ask it (setpriv --reuid={user})"
        );
    }
    format!(
        "process {pid} publishes no figures: it runs without Pagemill, is a fork child that has not used \
         it itself, or is so small that the C library serves it (run --after)"
    )
}

/// The user that a process acts as.
fn user_of(pid: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    // The real user, then the effective one.
    users.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// Folders of process trees below the user's folder, and whose they are.
fn tree_folders(folder: &str) -> Vec<(String, Identity)> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.filter_map(|name| Some((format!("{folder}/{name}"), identity_of(name.strip_prefix("run-")?)?))).collect()
}

/// Removes what processes that were killed left behind: trees whose `run` is gone and that no process uses, and files.
pub fn sweep() {
    let Ok(folder) = user_folder() else { return };
    for (path, who) in tree_folders(folder.as_str()) {
        let is_used = list(&path, false).is_ok_and(|found| found.iter().any(|process| process.is_alive));
        if !process::is_alive(who) && !is_used {
            let _ = std::fs::remove_dir_all(&path);
        }
        sweep_requests(&path);
    }
    sweep_requests(folder.as_str());
    let _ = list(folder.as_str(), true);
}

/// Makes the folder of a new process tree, whose `run` is this process.
///
/// # Errors
///
/// What making it says.
pub fn make_tree_folder() -> io::Result<String> {
    let (user, who) = (user_folder()?, process::own_identity());
    let path = Path::format(format_args!("{}/run-{}-{}", user.as_str(), who.pid, who.start_ticks))
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    file::make_private_dir(path.as_c_str())?;
    Ok(path.as_str().to_owned())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// The figures of a process that has ended are listed once, foreign files stay.
    #[test]
    fn ended_processes_are_read_and_swept() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().to_str().unwrap();
        let gone = Identity { pid: 1 << 30, start_ticks: 1 };
        let mut page = vec![0u8; stats::Figures::LEN];
        page[..8].copy_from_slice(b"pagemill");
        page[8..12].copy_from_slice(&stats::VERSION.to_le_bytes());
        std::fs::write(file_of(folder, gone).unwrap().as_str(), page).unwrap();
        let copy = |number| file_of_copy(folder, gone, number).unwrap();
        for number in [1, MOST_COPIES] {
            std::fs::copy(copy(0).as_str(), copy(number).as_str()).unwrap();
        }
        std::fs::write(format!("{folder}/other"), b"x").unwrap();
        let found = list(folder, true).unwrap();
        assert_eq!(found.len(), 2);
        assert!(found.iter().all(|process| !process.is_alive && process.who == gone));
        assert_eq!(list(folder, true).unwrap().len(), 0);
        assert!(
            std::fs::exists(format!("{folder}/other")).unwrap() && std::fs::exists(copy(MOST_COPIES).as_str()).unwrap()
        );
    }

    /// Requests to processes that have ended go, and those of somebody long gone; new ones stay, as do foreign files.
    #[test]
    fn old_requests_are_swept() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().to_str().unwrap();
        let make = |who, number| {
            let subject = Subject::ALL[number as usize % Subject::ALL.len()];
            let path = request_of(file_of(folder, who).unwrap().as_str(), subject, number).unwrap();
            (std::fs::File::create(path.as_str()).unwrap(), path)
        };
        let own = process::own_identity();
        let (_, gone) = make(Identity { pid: 1 << 30, start_ticks: 1 }, 1);
        let ((old_file, old), (_, new)) = (make(own, 1), make(own, 2));
        old_file.set_modified(std::time::SystemTime::now() - 2 * REQUEST_ENDED_AFTER).unwrap();
        for subject in Subject::ALL {
            let name = format!("5-6.1{}7", subject.word());
            assert_eq!(asked_of(&name), Some(Identity { pid: 5, start_ticks: 6 }), "{name}");
        }
        let foreign = format!("{folder}/1-1.vranges-x");
        std::fs::write(&foreign, b"").unwrap();
        sweep_requests(folder);
        let left = [gone.as_str(), old.as_str(), new.as_str(), &foreign].map(|path| std::fs::exists(path).unwrap());
        assert_eq!(left, [false, false, true, true]);
    }
}
