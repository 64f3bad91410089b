//! The allocators that are compared, and the one table of settings that makes each return memory at once.
//!
//! `pagemill-bench settings` renders [`SUBJECTS`] for docs/benchmarks.md, so that the text cannot differ from
//! what was run. A subject whose library is missing is a gap, printed with the way to close it.

use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Error, Result};
use crate::native::GiveBack;

/// What a subject stands for in a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// An allocator as it comes.
    Default,
    /// The same, set to return memory as soon as it is free.
    ReturningAtOnce,
    /// What is being judged.
    Pagemill,
    /// The same, minding no limits: it tells what minding them costs, and is compared with nobody else.
    Unwatched,
}

/// Where a subject's library is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    /// In the C library; nothing is preloaded.
    System,
    /// Built with this bench: beside its executable or in `deps` there.
    Built(&'static str),
    /// Installed by the distribution under one of these names.
    Installed(&'static [&'static str]),
}

/// One allocator with one set of settings.
#[derive(Debug, PartialEq, Eq)]
pub struct Subject {
    /// The stable word for it, in tables, JSON and `--only`.
    pub name: &'static str,
    pub role: Role,
    pub library: Library,
    /// Environment variables of the workload.
    pub settings: &'static [(&'static str, &'static str)],
    /// By which call it is asked for its free memory.
    pub give_back: GiveBack,
    /// What the settings do.
    pub why: &'static str,
    /// How to get it where it is missing.
    pub obtain: &'static str,
}

const TCMALLOC: Library =
    Library::Installed(&["libtcmalloc_minimal.so.4", "libtcmalloc_minimal.so", "libtcmalloc.so.4", "libtcmalloc.so"]);
const JEMALLOC: Library = Library::Built("libpeer_jemalloc.so");
const MIMALLOC: Library = Library::Built("libpeer_mimalloc.so");
const BUILD: &str = "cargo build --release -p pagemill-bench";
const INSTALL: &str = "apt-get install libtcmalloc-minimal4";

/// All subjects, defaults first.
pub const SUBJECTS: &[Subject] = &[
    Subject {
        name: "glibc",
        role: Role::Default,
        library: Library::System,
        settings: &[],
        give_back: GiveBack::MallocTrim,
        why: "as it comes",
        obtain: "",
    },
    Subject {
        name: "jemalloc",
        role: Role::Default,
        library: JEMALLOC,
        settings: &[],
        give_back: GiveBack::Mallctl,
        why: "as it comes from the crate tikv-jemalloc-sys",
        obtain: BUILD,
    },
    Subject {
        name: "mimalloc",
        role: Role::Default,
        library: MIMALLOC,
        settings: &[],
        give_back: GiveBack::MiCollect,
        why: "as it comes from the crate libmimalloc-sys",
        obtain: BUILD,
    },
    Subject {
        name: "tcmalloc",
        role: Role::Default,
        library: TCMALLOC,
        settings: &[],
        give_back: GiveBack::ReleaseFreeMemory,
        why: "as it comes from the distribution (gperftools)",
        obtain: INSTALL,
    },
    Subject {
        name: "glibc-eager",
        role: Role::ReturningAtOnce,
        library: Library::System,
        settings: &[(
            "GLIBC_TUNABLES",
            "glibc.malloc.mmap_threshold=65536:glibc.malloc.trim_threshold=0:glibc.malloc.top_pad=0",
        )],
        give_back: GiveBack::MallocTrim,
        why: "blocks from 64 KiB are mapped and unmapped one by one, the heap's end is trimmed at each free",
        obtain: "",
    },
    Subject {
        name: "jemalloc-eager",
        role: Role::ReturningAtOnce,
        library: JEMALLOC,
        settings: &[("_RJEM_MALLOC_CONF", "dirty_decay_ms:0,muzzy_decay_ms:0")],
        give_back: GiveBack::Mallctl,
        why: "free extents are purged at once instead of over ten seconds",
        obtain: BUILD,
    },
    Subject {
        name: "mimalloc-eager",
        role: Role::ReturningAtOnce,
        library: MIMALLOC,
        settings: &[("MIMALLOC_PURGE_DELAY", "0")],
        give_back: GiveBack::MiCollect,
        why: "free pages are purged at once",
        obtain: BUILD,
    },
    Subject {
        name: "tcmalloc-eager",
        role: Role::ReturningAtOnce,
        library: TCMALLOC,
        settings: &[("TCMALLOC_AGGRESSIVE_DECOMMIT", "1"), ("TCMALLOC_RELEASE_RATE", "1000")],
        give_back: GiveBack::ReleaseFreeMemory,
        why: "free spans are decommitted at once; blocks up to 256 KiB may stay in its central cache",
        obtain: INSTALL,
    },
    Subject {
        name: "pagemill",
        role: Role::Pagemill,
        library: Library::Built("libpagemill_malloc.so"),
        settings: &[],
        give_back: GiveBack::MallocTrim,
        why: "as it comes",
        obtain: BUILD,
    },
    Subject {
        name: UNWATCHED,
        role: Role::Unwatched,
        library: Library::Built("libpagemill_malloc.so"),
        settings: &[("PAGEMILL_WATCH", "off"), ("PAGEMILL_IDLE", "off")],
        give_back: GiveBack::MallocTrim,
        why: "looks at no limits and gives nothing back unasked: what `ebizzy --cost` compares with",
        obtain: BUILD,
    },
];

/// An allocator that gives pages back by mapping two of them to one place, where their blocks do not overlap. Only what it
/// is made for is measured beside it.
pub const MESH: Subject = Subject {
    name: "mesh",
    role: Role::Default,
    library: Library::Installed(&["libmesh.so"]),
    settings: &[],
    give_back: GiveBack::MeshCompact,
    why: "as it comes",
    obtain: "no distribution has it; build github.com/plasma-umass/Mesh, put its libmesh.so into /usr/local/lib",
};

/// The name of what is judged.
pub const PAGEMILL: &str = "pagemill";

/// The name of the same without the minding of limits.
pub const UNWATCHED: &str = "pagemill-unwatched";

/// Tells a workload which library must be mapped in it: the loader only warns when a preload fails.
pub const EXPECTED_LIBRARY: &str = "BENCH_EXPECTED_LIBRARY";

/// Variables that steer an allocator; the caller's own must not reach a workload.
const FOREIGN_SETTINGS: &[&str] =
    &["LD_PRELOAD", "GLIBC_TUNABLES", "MALLOC_", "_RJEM_", "MIMALLOC_", "TCMALLOC_", "PAGEMILL_"];

/// A subject that can be run here.
#[derive(Clone, Debug)]
pub struct Ready {
    pub subject: &'static Subject,
    preload: Option<PathBuf>,
}

impl Ready {
    /// The stable word for it.
    pub fn name(&self) -> &'static str {
        self.subject.name
    }

    /// The library that is preloaded, if any.
    pub fn preload(&self) -> Option<&Path> {
        self.preload.as_deref()
    }

    /// Whether it publishes what it could give back.
    pub fn publishes(&self) -> bool {
        self.is_pagemill()
    }

    fn is_pagemill(&self) -> bool {
        matches!(self.subject.role, Role::Pagemill | Role::Unwatched)
    }

    /// The start of a command line that runs a whole tree under this allocator: env(1) with the settings, so that what
    /// starts the tree has them not, and with the preload or Pagemill's own command, which makes one tree of it.
    ///
    /// # Errors
    ///
    /// A sentence for the list of gaps.
    pub fn launcher(&self, run_options: &[&str]) -> std::result::Result<Vec<String>, String> {
        let mut line = vec!["env".to_owned()];
        line.extend(self.subject.settings.iter().map(|(name, value)| format!("{name}={value}")));
        if self.is_pagemill() {
            let command = built_file("pagemill").ok_or("pagemill: the command is not built: cargo build --release")?;
            line.extend([command.display().to_string(), "run".to_owned()]);
            line.extend(run_options.iter().map(|word| (*word).to_owned()));
            line.push("--".to_owned());
            return Ok(line);
        }
        if let Some(library) = &self.preload {
            line.push(format!("LD_PRELOAD={}", library.display()));
            line.push(format!("{EXPECTED_LIBRARY}={}", library.display()));
        }
        Ok(line)
    }

    /// Puts the workload under this allocator, and under no other setting of the caller's.
    pub fn apply(&self, command: &mut Command) {
        clear_foreign_settings(command);
        for (name, value) in self.subject.settings {
            command.env(name, value);
        }
        if let Some(library) = &self.preload {
            command.env("LD_PRELOAD", library);
            command.env(EXPECTED_LIBRARY, library);
        }
    }
}

/// Takes from the command's environment whatever would steer an allocator.
pub fn clear_foreign_settings(command: &mut Command) {
    for (name, _) in env::vars_os() {
        if is_foreign(&name) {
            command.env_remove(&name);
        }
    }
    command.env_remove(EXPECTED_LIBRARY);
}

fn is_foreign(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    FOREIGN_SETTINGS.iter().any(|start| name.starts_with(start))
}

/// The subjects wanted that can run, and a sentence for each that cannot.
///
/// # Errors
///
/// [`Error::CannotRun`] for a name in `only` that none of those wanted has, or where nothing is left to run.
pub fn select(only: &[String], is_wanted: impl Fn(&Subject) -> bool) -> Result<(Vec<Ready>, Vec<String>)> {
    let known = || SUBJECTS.iter().filter(|subject| is_wanted(subject)).map(|subject| subject.name);
    if let Some(name) = only.iter().find(|name| !known().any(|known| known == *name)) {
        let names = known().collect::<Vec<_>>().join(", ");
        return Err(Error::CannotRun(format!("no subject {name}; there are {names}")));
    }
    let (mut ready, mut gaps) = (Vec::new(), Vec::new());
    for subject in SUBJECTS {
        let is_named = only.iter().any(|name| name == subject.name);
        let is_of_all = only.is_empty() && subject.role != Role::Unwatched;
        if !(is_named || is_of_all) || !is_wanted(subject) {
            continue;
        }
        match self::ready(subject) {
            Ok(subject) => ready.push(subject),
            Err(gap) => gaps.push(gap),
        }
    }
    if ready.is_empty() {
        return Err(Error::CannotRun(format!("no subject is there: {}", gaps.join("; "))));
    }
    Ok((ready, gaps))
}

/// The subject, if it can be run here.
///
/// # Errors
///
/// A sentence for the list of gaps.
pub fn ready(subject: &'static Subject) -> std::result::Result<Ready, String> {
    match find(subject.library) {
        Ok(preload) => Ok(Ready { subject, preload }),
        Err(names) => Err(format!("{}: {names} not found; to have it: {}", subject.name, subject.obtain)),
    }
}

fn find(library: Library) -> std::result::Result<Option<PathBuf>, String> {
    match library {
        Library::System => Ok(None),
        Library::Built(name) => built_file(name).map(Some).ok_or(name.to_owned()),
        Library::Installed(names) => {
            names.iter().find_map(|name| installed_file(name)).map(Some).ok_or(names[0].to_owned())
        }
    }
}

/// A file of this build. Cargo leaves the libraries of dependencies in `deps`; of two, the newer is meant.
pub fn built_file(name: &str) -> Option<PathBuf> {
    let executable = env::current_exe().ok()?;
    let folder = executable.parent()?;
    let folders = [folder.to_owned(), folder.join("deps"), folder.join("..")];
    let found = folders.iter().map(|folder| folder.join(name));
    let found = found.filter_map(|path| path.canonicalize().ok());
    found.max_by_key(|path| path.metadata().and_then(|file| file.modified()).ok())
}

/// A library in the system's folders, by its resolved name as `/proc/self/maps` shows it.
pub fn installed_file(name: &str) -> Option<PathBuf> {
    const FOLDERS: &[&str] = &[
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/lib/x86_64-linux-gnu",
        "/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/lib64",
        "/usr/lib",
        "/usr/local/lib",
    ];
    let found = FOLDERS.iter().map(|folder| Path::new(folder).join(name));
    found.filter_map(|path| path.canonicalize().ok()).next()
}

/// The settings as a table for docs/benchmarks.md.
pub fn settings_markdown() -> String {
    let mut text = String::from("| subject | environment | what that does |\n|---|---|---|\n");
    for subject in SUBJECTS {
        let settings: Vec<String> = subject.settings.iter().map(|(name, value)| format!("`{name}={value}`")).collect();
        let settings = match settings.is_empty() {
            true => "none".to_owned(),
            false => settings.join(" "),
        };
        text += &format!("| {} | {settings} | {} |\n", subject.name, subject.why);
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Names are stable words and unique; settings are what tells "returning at once" from a default.
    #[test]
    fn subjects_are_well_formed() {
        let names: BTreeSet<&str> = SUBJECTS.iter().map(|subject| subject.name).collect();
        assert_eq!(names.len(), SUBJECTS.len());
        for subject in SUBJECTS {
            let is_eager = subject.role == Role::ReturningAtOnce;
            let is_set = is_eager || subject.role == Role::Unwatched;
            assert_eq!(is_set, !subject.settings.is_empty(), "{}", subject.name);
            assert_eq!(is_eager, subject.name.ends_with("-eager"), "{}", subject.name);
            assert!(subject.library == Library::System || !subject.obtain.is_empty());
        }
    }

    /// Who is no peer of anybody runs only where it is named.
    #[test]
    fn the_unwatched_one_is_run_on_request() {
        let names = |only: &[String]| -> Vec<&str> {
            let (ready, gaps) = select(only, |_| true).unwrap_or_default();
            let gaps = gaps.into_iter().filter(|gap| gap.starts_with(UNWATCHED)).map(|_| UNWATCHED);
            ready.iter().map(Ready::name).chain(gaps).collect()
        };

        assert!(!names(&[]).contains(&UNWATCHED));
        assert_eq!(names(&["glibc".to_owned(), UNWATCHED.to_owned()]), ["glibc", UNWATCHED]);
    }

    /// Every setting is one that `clear_foreign_settings` would have taken from the caller.
    #[test]
    fn settings_are_ours_alone() {
        for (name, _) in SUBJECTS.iter().flat_map(|subject| subject.settings) {
            assert!(is_foreign(OsStr::new(name)), "{name}");
        }
        assert!(!is_foreign(OsStr::new("PATH")));
    }

    /// The rendered table has a line for each subject; an unknown name is refused with the known ones.
    #[test]
    fn settings_and_names_are_complete() {
        assert_eq!(settings_markdown().lines().count(), SUBJECTS.len() + 2);

        let refusal = select(&["hoard".to_owned()], |_| true).map(|_| ());
        assert!(refusal.is_err_and(|error| error.to_string().contains("jemalloc-eager")));
    }
}
