//! The allocators that are compared, and the table of settings that make each allocator return memory at once.
//!
//! `pagemill-bench settings` renders [`SUBJECTS`] for docs/benchmarks.md. So the documented settings are those that
//! were measured. If a subject's library is missing, the report has a gap that says how to install it.

use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Error, Result};
use crate::native::GiveBack;

/// A subject with a stable name in tables, in JSON and for `--only`.
pub trait Named {
    fn name(&self) -> &'static str;
}

impl Named for &'static str {
    fn name(&self) -> &'static str {
        self
    }
}

/// A subject's name, with what its samples need.
impl<T> Named for (&'static str, T) {
    fn name(&self) -> &'static str {
        self.0
    }
}

impl<Subject: Named> Named for &Subject {
    fn name(&self) -> &'static str {
        (*self).name()
    }
}

/// Checks that each of the `given` names is one of the `known` names of its kind.
///
/// # Errors
///
/// [`Error::CannotRun`] with the list of known names if a name is unknown.
pub fn check_names(kind: &str, given: &[String], known: &[&str]) -> Result<()> {
    match given.iter().find(|name| !known.contains(&name.as_str())) {
        Some(name) => Err(Error::CannotRun(format!("no {kind} {name}; there are {}", known.join(", ")))),
        None => Ok(()),
    }
}

/// The role of a subject in a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A peer allocator with default settings.
    Default,
    /// A peer allocator with settings that return memory as soon as it is free.
    ReturningAtOnce,
    /// Pagemill with default settings. The targets of the experiments apply to this subject.
    Pagemill,
    /// Pagemill that does not watch memory limits. Compared with [`Role::Pagemill`], it shows the cost of watching
    /// limits.
    Unwatched,
    /// Pagemill that returns free memory only on request and under pressure. Compared with [`Role::Pagemill`], it shows
    /// the cost of returning memory by age.
    WithoutAging,
}

/// Where the library of an allocator is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    /// The C library; nothing is preloaded.
    System,
    /// Built together with this bench. A file with this name is in the folder of the bench's executable, in its
    /// subfolder `deps`, or in its parent folder.
    Built(&'static str),
    /// Installed by the distribution, under one of these file names.
    Installed(&'static [&'static str]),
}

/// One allocator with one set of settings.
#[derive(Debug, PartialEq, Eq)]
pub struct Subject {
    /// The stable name of the subject in tables, in JSON and for `--only`.
    pub name: &'static str,
    pub role: Role,
    pub library: Library,
    /// Environment variables that are set for the workload.
    pub settings: &'static [(&'static str, &'static str)],
    /// The C call that makes the allocator return its free memory.
    pub give_back: GiveBack,
    /// The effect of the settings, in words.
    pub effect: &'static str,
    /// The command that installs the library; empty if nothing needs to be installed.
    pub install_hint: &'static str,
}

const BUILD_HINT: &str = "cargo build --release -p pagemill-bench";
const TCMALLOC_INSTALL_HINT: &str = "apt-get install libtcmalloc-minimal4";

/// Makes the subject that is an allocator with its default settings. Subjects with other settings are copies of it with
/// some fields changed.
const fn default_subject(
    name: &'static str,
    library: Library,
    give_back: GiveBack,
    install_hint: &'static str,
) -> Subject {
    Subject { name, role: Role::Default, library, settings: &[], give_back, effect: "as it comes", install_hint }
}

const GLIBC: Subject = default_subject("glibc", Library::System, GiveBack::MallocTrim, "");
const JEMALLOC: Subject =
    default_subject("jemalloc", Library::Built("libpeer_jemalloc.so"), GiveBack::Mallctl, BUILD_HINT);
const MIMALLOC: Subject =
    default_subject("mimalloc", Library::Built("libpeer_mimalloc.so"), GiveBack::MiCollect, BUILD_HINT);
const TCMALLOC: Subject = default_subject(
    "tcmalloc",
    Library::Installed(&["libtcmalloc_minimal.so.4", "libtcmalloc_minimal.so", "libtcmalloc.so.4", "libtcmalloc.so"]),
    GiveBack::ReleaseFreeMemory,
    TCMALLOC_INSTALL_HINT,
);
const PAGEMILL_DEFAULT: Subject = Subject {
    role: Role::Pagemill,
    ..default_subject(PAGEMILL, Library::Built("libpagemill_malloc.so"), GiveBack::MallocTrim, BUILD_HINT)
};

/// All subjects: the peers with default settings, the peers that return memory at once, then the variants of Pagemill.
pub const SUBJECTS: &[Subject] = &[
    GLIBC,
    Subject { effect: "as it comes from the crate tikv-jemalloc-sys", ..JEMALLOC },
    Subject { effect: "as it comes from the crate libmimalloc-sys", ..MIMALLOC },
    Subject { effect: "as it comes from the distribution (gperftools)", ..TCMALLOC },
    Subject {
        name: "glibc-eager",
        role: Role::ReturningAtOnce,
        settings: &[(
            "GLIBC_TUNABLES",
            "glibc.malloc.mmap_threshold=65536:glibc.malloc.trim_threshold=0:glibc.malloc.top_pad=0",
        )],
        effect: "blocks from 64 KiB are mapped and unmapped one by one, the heap's end is trimmed at each free",
        ..GLIBC
    },
    Subject {
        name: "jemalloc-eager",
        role: Role::ReturningAtOnce,
        settings: &[("_RJEM_MALLOC_CONF", "dirty_decay_ms:0,muzzy_decay_ms:0")],
        effect: "free extents are purged at once instead of over ten seconds",
        ..JEMALLOC
    },
    Subject {
        name: "mimalloc-eager",
        role: Role::ReturningAtOnce,
        settings: &[("MIMALLOC_PURGE_DELAY", "0")],
        effect: "free pages are purged at once",
        ..MIMALLOC
    },
    Subject {
        name: "tcmalloc-eager",
        role: Role::ReturningAtOnce,
        settings: &[("TCMALLOC_AGGRESSIVE_DECOMMIT", "1"), ("TCMALLOC_RELEASE_RATE", "1000")],
        effect: "free spans are decommitted at once; blocks up to 256 KiB may stay in its central cache",
        ..TCMALLOC
    },
    PAGEMILL_DEFAULT,
    Subject {
        name: PAGEMILL_UNWATCHED,
        role: Role::Unwatched,
        settings: &[("PAGEMILL_WATCH", "off"), ("PAGEMILL_RETURN", "keep")],
        effect: "looks at no limits and gives nothing back unasked: what `ebizzy --cost` compares with",
        ..PAGEMILL_DEFAULT
    },
    Subject {
        name: PAGEMILL_WITHOUT_AGING,
        role: Role::WithoutAging,
        settings: &[("PAGEMILL_RETURN", "keep")],
        effect: "returns free memory only on request and under pressure, not by age; runs where `--only` names it",
        ..PAGEMILL_DEFAULT
    },
];

/// Mesh, an allocator that compacts by meshing: it maps two virtual pages to one physical page if their allocations do
/// not overlap. Only measurements of compaction include Mesh.
pub const MESH: Subject = default_subject(
    "mesh",
    Library::Installed(&["libmesh.so"]),
    GiveBack::MeshCompact,
    "no distribution has it; build github.com/plasma-umass/Mesh, put its libmesh.so into /usr/local/lib",
);

/// Name of the subject that is Pagemill with default settings.
pub const PAGEMILL: &str = "pagemill";

/// Name of the subject that is Pagemill without watching of memory limits.
pub const PAGEMILL_UNWATCHED: &str = "pagemill-unwatched";

/// Name of the subject that is Pagemill without return of free memory by age.
pub const PAGEMILL_WITHOUT_AGING: &str = "pagemill-keep";

impl Role {
    /// Returns whether a subject with this role runs only if `--only` names it.
    fn is_on_request(self) -> bool {
        matches!(self, Self::Unwatched | Self::WithoutAging)
    }
}

/// Environment variable with the path of the preloaded library. The workload checks that this library is mapped,
/// because the loader only warns if a preload fails.
pub const EXPECTED_LIBRARY: &str = "BENCH_EXPECTED_LIBRARY";

/// Prefixes of environment variables that affect an allocator. Variables with these prefixes are removed, so that no
/// value from the caller's environment reaches a workload.
const FOREIGN_SETTINGS: &[&str] =
    &["LD_PRELOAD", "GLIBC_TUNABLES", "MALLOC_", "_RJEM_", "MIMALLOC_", "TCMALLOC_", "PAGEMILL_"];

/// A subject (allocator with settings) whose library was found on this machine.
#[derive(Clone, Debug)]
pub struct AvailableSubject {
    pub subject: &'static Subject,
    preload: Option<PathBuf>,
}

impl Named for AvailableSubject {
    fn name(&self) -> &'static str {
        self.subject.name
    }
}

impl AvailableSubject {
    /// Returns the path of the library that is preloaded; none for the C library.
    pub fn preload(&self) -> Option<&Path> {
        self.preload.as_deref()
    }

    /// Returns whether the allocator publishes how much free memory it could return at once.
    pub fn publishes(&self) -> bool {
        self.is_pagemill()
    }

    fn is_pagemill(&self) -> bool {
        matches!(self.subject.role, Role::Pagemill | Role::Unwatched | Role::WithoutAging)
    }

    /// Returns the first words of a command line that runs a process tree under this allocator: `env` with the
    /// subject's settings, then `LD_PRELOAD=LIBRARY`. For Pagemill, `pagemill run` with `run_options` replaces the
    /// preload.
    ///
    /// # Errors
    ///
    /// [`Error::Gap`] if the subject cannot run. `part` is the part of the experiment that it names.
    pub fn launcher(&self, part: &str, run_options: &[&str]) -> Result<Vec<String>> {
        let mut line = vec!["env".to_owned()];
        line.extend(self.subject.settings.iter().map(|(name, value)| format!("{name}={value}")));
        if self.is_pagemill() {
            let gap = || Error::Gap(format!("{part}: pagemill: the command is not built: cargo build --release"));
            let command = built_file("pagemill").ok_or_else(gap)?;
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

    /// Sets the command's environment so that the command runs under this allocator, without any allocator setting of
    /// the caller.
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

/// Removes every variable that affects an allocator from the command's environment.
pub fn clear_foreign_settings(command: &mut Command) {
    for (name, _) in env::vars_os() {
        if is_allocator_variable(&name) {
            command.env_remove(&name);
        }
    }
    command.env_remove(EXPECTED_LIBRARY);
}

fn is_allocator_variable(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    FOREIGN_SETTINGS.iter().any(|start| name.starts_with(start))
}

/// Returns the wanted subjects whose libraries are found on this machine. For each other wanted subject, also returns a
/// sentence for the report that says what is missing.
///
/// # Errors
///
/// [`Error::CannotRun`] if `only` has a name that matches no wanted subject, or if no wanted subject is available.
pub fn select_available(
    only: &[String],
    is_wanted: impl Fn(&Subject) -> bool,
) -> Result<(Vec<AvailableSubject>, Vec<String>)> {
    let known = SUBJECTS.iter().filter(|subject| is_wanted(subject)).map(|subject| subject.name);
    check_names("subject", only, &known.collect::<Vec<_>>())?;
    let (mut ready, mut gaps) = (Vec::new(), Vec::new());
    for subject in SUBJECTS {
        let is_named = only.iter().any(|name| name == subject.name);
        let is_of_all = only.is_empty() && !subject.role.is_on_request();
        if !(is_named || is_of_all) || !is_wanted(subject) {
            continue;
        }
        match self::find_available(subject) {
            Ok(subject) => ready.push(subject),
            Err(gap) => gaps.push(gap),
        }
    }
    if ready.is_empty() {
        return Err(Error::CannotRun(format!("no subject is there: {}", gaps.join("; "))));
    }
    Ok((ready, gaps))
}

/// Returns the subject if its library is found on this machine.
///
/// # Errors
///
/// A sentence for the report, if the library is missing.
pub fn find_available(subject: &'static Subject) -> std::result::Result<AvailableSubject, String> {
    match find_library(subject.library) {
        Ok(preload) => Ok(AvailableSubject { subject, preload }),
        Err(names) => Err(format!("{}: {names} not found; to have it: {}", subject.name, subject.install_hint)),
    }
}

fn find_library(library: Library) -> std::result::Result<Option<PathBuf>, String> {
    match library {
        Library::System => Ok(None),
        Library::Built(name) => built_file(name).map(Some).ok_or(name.to_owned()),
        Library::Installed(names) => {
            names.iter().find_map(|name| installed_file(name)).map(Some).ok_or(names[0].to_owned())
        }
    }
}

/// Returns the path of a file that was built together with this bench. Cargo also keeps copies of libraries in `deps`;
/// the newest copy is returned.
pub fn built_file(name: &str) -> Option<PathBuf> {
    let executable = env::current_exe().ok()?;
    let folder = executable.parent()?;
    let folders = [folder.to_owned(), folder.join("deps"), folder.join("..")];
    let found = folders.iter().map(|folder| folder.join(name));
    let found = found.filter_map(|path| path.canonicalize().ok());
    found.max_by_key(|path| path.metadata().and_then(|file| file.modified()).ok())
}

/// Returns the path of a library in the system's folders with all links resolved, as it appears in `/proc/self/maps`.
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

/// Renders the subjects' settings as the Markdown table of docs/benchmarks.md.
pub fn settings_markdown() -> String {
    let mut text = String::from("| subject | environment | what that does |\n|---|---|---|\n");
    for subject in SUBJECTS {
        let settings: Vec<String> = subject.settings.iter().map(|(name, value)| format!("`{name}={value}`")).collect();
        let settings = match settings.is_empty() {
            true => "none".to_owned(),
            false => settings.join(" "),
        };
        text += &format!("| {} | {settings} | {} |\n", subject.name, subject.effect);
    }
    text
}

/// Starts of the names of subjects that are Pagemill, by experiment. In plots they have the first colour.
const OWN_SUBJECTS: &[(&str, &[&str])] = &[
    ("pageshift", &["cache", "view", "pin", "mount", "run"]),
    ("iozone", &["pagemill", "cache", "views"]),
    ("hit", &["huge", "dense"]),
    ("refs", &["splittable", "never-split", "split-collapse"]),
    ("miss", &["threads", "queue", "futures", "cache", "hits"]),
    ("orion", &["cache"]),
    ("stream", &["cache"]),
    ("writeback", &["cache"]),
    ("slab", &["fixed", "by-owner", "by-handle", "handle-read"]),
    ("volatile", &["handle", "vrange"]),
];

/// Returns whether a subject of an experiment is Pagemill.
pub fn is_own(experiment: &str, subject: &str) -> bool {
    let starts = OWN_SUBJECTS.iter().find(|(name, _)| *name == experiment).map_or(&["pagemill"][..], |(_, own)| own);
    subject.starts_with("pagemill") || starts.iter().any(|start| subject.starts_with(start))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Each subject must have a unique name. Exactly the subjects that differ from an allocator's default must have
    /// settings. Exactly the names of subjects that return memory at once must end in `-eager`.
    #[test]
    fn names_roles_and_settings_of_subjects_agree() {
        let names: BTreeSet<&str> = SUBJECTS.iter().map(|subject| subject.name).collect();
        assert_eq!(names.len(), SUBJECTS.len());
        for subject in SUBJECTS {
            let is_eager = subject.role == Role::ReturningAtOnce;
            let is_set = is_eager || subject.role.is_on_request();
            assert_eq!(is_set, !subject.settings.is_empty(), "{}", subject.name);
            assert_eq!(is_eager, subject.name.ends_with("-eager"), "{}", subject.name);
            assert!(subject.library == Library::System || !subject.install_hint.is_empty());
        }
    }

    /// The variants of Pagemill with other settings must be selected only if `--only` names them.
    #[test]
    fn pagemill_variants_run_only_if_named() {
        for own in [PAGEMILL_UNWATCHED, PAGEMILL_WITHOUT_AGING] {
            let names = |only: &[String]| -> Vec<&str> {
                let (ready, gaps) = select_available(only, |_| true).unwrap_or_default();
                let gaps = gaps.into_iter().filter(|gap| gap.starts_with(own)).map(|_| own);
                ready.iter().map(Named::name).chain(gaps).collect()
            };

            assert!(!names(&[]).contains(&own));
            assert_eq!(names(&["glibc".to_owned(), own.to_owned()]), ["glibc", own]);
        }
    }

    /// [`clear_foreign_settings`] must remove each variable that a subject's settings use, and keep `PATH`.
    #[test]
    fn settings_of_subjects_are_cleared() {
        for (name, _) in SUBJECTS.iter().flat_map(|subject| subject.settings) {
            assert!(is_allocator_variable(OsStr::new(name)), "{name}");
        }
        assert!(!is_allocator_variable(OsStr::new("PATH")));
    }

    /// The rendered table must have one line for each subject. An unknown name must be refused with the list of known
    /// names.
    #[test]
    fn settings_table_lists_every_subject() {
        assert_eq!(settings_markdown().lines().count(), SUBJECTS.len() + 2);

        let refusal = select_available(&["hoard".to_owned()], |_| true).map(|_| ());
        assert!(refusal.is_err_and(|error| error.to_string().contains("jemalloc-eager")));
    }
}
